"""What options say of servers that run."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.errors import UserError, counted
from kvsim.installation import install_extra

if TYPE_CHECKING:
    from kvsim.engines.live.server_validation import AskedServer


@dataclass(frozen=True)
class ServersAsked:
    """What the options of ``validate --url`` say."""

    url: list[str]
    flags: list[str]
    log: list[Path]
    key_env: str | None
    allow_remote: bool
    timeout_s: float
    resume: bool
    model: str | None

    def asked(self) -> list[AskedServer]:
        """The servers. Raises ``UserError``."""
        check_httpx()
        from kvsim.engines.live.address import address_of
        from kvsim.engines.live.recorded_meta import Asking
        from kvsim.engines.live.server_validation import AskedServer

        for option, given in (("--flags", self.flags), ("--log", self.log)):
            if given and len(given) != len(self.url):
                raise UserError(
                    f"{option}: {len(given)} given for {counted(len(self.url), 'server')}; one for each --url"
                )
        key = key_of(self.key_env)
        found = []
        for i, url in enumerate(self.url):
            asking = Asking(
                key=key,
                timeout_s=self.timeout_s,
                flags=words_of(self.flags[i]) if self.flags else None,
                log=self.log[i] if self.log else None,
                resume=self.resume,
            )
            found.append(AskedServer(address_of(url, allow_remote=self.allow_remote), asking))
        return found


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
