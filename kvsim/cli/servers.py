"""What options say of servers that run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import UserError, counted
from kvsim.installation import install_extra

if TYPE_CHECKING:
    from kvsim.engines.live.recorded_meta import Asking
    from kvsim.engines.live.served import LiveServer


@dataclass(frozen=True)
class ServerAsked:
    """What options say of a server that runs."""

    url: str
    flags: str | None
    key_env: str | None
    """The environment variable that has its key."""
    allow_remote: bool
    model: str | None = None
    log: Path | None = None
    resume: bool = False
    timeout_s: float = 60.0
    limit_s: float = 3600.0

    def asked(self) -> Asking:
        """The server, and how it is asked. Raises ``UserError``."""
        check_httpx()
        from kvsim.engines.live.address import address_of
        from kvsim.engines.live.recorded_meta import Asking

        return Asking(
            address_of(self.url, allow_remote=self.allow_remote),
            key=key_of(self.key_env),
            timeout_s=self.timeout_s,
            limit_s=self.limit_s,
            flags=None if self.flags is None else words_of(self.flags),
            log=self.log,
            resume=self.resume,
        )

    def found(self, within_s: float = 60.0) -> LiveServer:
        """The server, after it was asked what it is, which may take so long. Raises ``UserError``."""
        check_httpx()
        from kvsim.engines.live.served import find_server

        key = key_of(self.key_env)
        return find_server(
            self.url,
            model=self.model,
            flags=self.flags or "",
            key=key,
            allow_remote=self.allow_remote,
            within_s=within_s,
        )


def servers_asked(urls: Sequence[str], flags: Sequence[str], logs: Sequence[Path], **same: Any) -> list[ServerAsked]:
    """Several servers; ``same``: what is said of all of them. Raises ``UserError``."""
    for option, given in (("--flags", flags), ("--log", logs)):
        if given and len(given) != len(urls):
            raise UserError(f"{option}: {len(given)} given for {counted(len(urls), 'server')}; one for each --url")
    nothing = [None] * len(urls)
    each = zip(urls, flags or nothing, logs or nothing, strict=True)
    return [ServerAsked(url, typed, log=log, **same) for url, typed, log in each]


def check_httpx() -> None:
    """Raise ``UserError`` unless servers can be asked."""
    if find_spec("httpx") is None:
        raise UserError(f"--url: asking a server needs httpx; install it with: {install_extra('serve')}")


def key_of(name: str | None) -> str | None:
    """The key in an environment variable. Raises ``UserError`` if there is none."""
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UserError(f"--key-env {name}: there is no such environment variable, or it is empty")
    return key


def words_of(flags: str) -> tuple[str, ...]:
    """Flags as a shell divides them. Raises ``UserError``."""
    try:
        return tuple(shlex.split(flags))
    except ValueError as e:
        raise UserError(f"--flags {flags!r:.80}: {e}") from None
