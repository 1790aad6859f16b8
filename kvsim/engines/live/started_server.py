"""Starting a server by the user's command, with the options that were recommended, and ending it again."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from kvsim.advice.memory.engine_flags import Flags
from kvsim.engines.live.address import Address, address_of, is_loopback
from kvsim.engines.live.bounded import ServerFault
from kvsim.engines.live.settings import ServerSettings, ask_settings
from kvsim.errors import UserError

FLAGS = "{flags}"
"""Where the options go in a command; without it they go to its end."""
START_S = 600.0
"""Seconds in which a server has to be ready: vLLM may compile for minutes."""

_POLL_S = 0.1
_END_S = 10.0
"""Seconds in which a server may end by itself before it is killed."""
_PORTS = {"llamacpp": 8080, "vllm": 8000, None: 8080}
"""Ports on which servers listen where none is given, by engine."""
_ANYWHERE = ("0.0.0.0", "::", "[::]", "*")
"""Hosts that mean every address of this machine."""
_LAST_BYTES = 1 << 16
_LAST_CHARACTERS = 200


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts a server, and where that listens."""

    words: tuple[str, ...]
    address: Address
    engine: Literal["llamacpp", "vllm"] | None
    """Whose options it takes, as far as its words say."""

    def with_flags(self, flags: Flags) -> list[str]:
        """The words, with the options in place of ``{flags}`` or at the end."""
        typed = [word for pair in flags for word in pair if word]
        if not any(FLAGS in word for word in self.words):
            return [*self.words, *typed]
        words = []
        for word in self.words:
            # Within a word, as in that of a shell, they are quoted.
            words += typed if word == FLAGS else [word.replace(FLAGS, shlex.join(typed))]
        return words


def read_command(text: str, url: str | None = None) -> ServerCommand:
    """Read a command line; ``url``: where the server listens, by default what ``--host`` and ``--port`` say.

    Raises ``UserError`` if it is no command line, there is no such program, or the address is not of this machine.
    """
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise UserError(f"--verify: {text!r:.100}: {str(e).lower()}; a command line is expected") from None
    if not words:
        raise UserError('--verify: no command; one such as "llama-server -m model.gguf --port 8080" is expected')
    if shutil.which(words[0]) is None:
        raise UserError(f"--verify: {words[0]}: there is no such program")
    named = [Path(word).name.lower() for word in words]
    engine: Literal["llamacpp", "vllm"] | None = None
    if any("vllm" in name for name in named):
        engine = "vllm"
    elif any("llama-server" in name for name in named):
        engine = "llamacpp"
    if url is None:
        host = _option(words, "--host") or "127.0.0.1"
        host = "127.0.0.1" if host in _ANYWHERE else host
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        url = f"http://{host}:{_option(words, '--port') or _PORTS[engine]}"
    try:
        address = address_of(url, allow_remote=True)
    except UserError as e:
        raise UserError(f"--verify: {e}") from None
    if not is_loopback(address.host):
        raise UserError(f"--verify: {address}: not an address of this machine, on which the server is started")
    return ServerCommand(tuple(words), address, engine)


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of an option among words, the last one if it is there several times."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def check_free(address: Address) -> None:
    """Raise ``UserError`` if something listens at an address already, and would answer in the server's place."""
    with suppress(OSError), socket.create_connection((address.host, address.port), timeout=2):
        raise UserError(f"--verify: {address}: the port is in use; end what listens there, or give another by --port")


@contextmanager
def started(command: ServerCommand, flags: Flags, *, start_s: float = START_S) -> Iterator[tuple[ServerSettings, int]]:
    """What a server says of itself once it is ready, and its process; it is ended when the block is left, however.

    Raises ``UserError`` in one line if its port is in use, it cannot be started, ends by itself, or is not ready within
    ``start_s`` seconds.
    """
    check_free(command.address)
    words = command.with_flags(flags)
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
            )
        except OSError as e:
            raise UserError(f"--verify: {words[0]}: cannot be started: {e.strerror}") from None
        try:
            with _unless_told_to_end():
                yield _ready(process, command.address, said, start_s), process.pid
        except UserError:
            if how := _how_it_ended(process):
                raise UserError(f"--verify: the server ended {how}{_last_line(said)}") from None
            raise
        finally:
            _end(process)


@contextmanager
def _unless_told_to_end() -> Iterator[None]:
    """Leave the block when this process is told to end, which otherwise ends it at once and leaves the server alone."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Which alone has signals.
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ready(process: subprocess.Popen[bytes], address: Address, said: IO[bytes], start_s: float) -> ServerSettings:
    """Wait until the server answers. Raises ``UserError``."""
    until = time.monotonic() + start_s
    while True:
        if _how_it_ended(process):
            raise UserError("--verify: not ready")  # ``started`` says why.
        try:
            return ask_settings(address, timeout_s=max(1.0, min(10.0, until - time.monotonic())))
        except ServerFault as e:
            why = str(e)
        if time.monotonic() > until:
            raise UserError(f"--verify: not ready after {start_s:g} s: {why}{_last_line(said)}")
        time.sleep(_POLL_S)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """How a server ended by itself; empty if it runs."""
    code = process.poll()
    if code is None:
        return ""
    if code == -signal.SIGILL:
        return (
            "by an illegal instruction: it was compiled for another processor, or for instructions that this system "
            "does not enable; compile llama.cpp with -DGGML_NATIVE=OFF"
        )
    return f"with code {code}" if code >= 0 else f"by signal {-code}"


def _last_line(said: IO[bytes]) -> str:
    """The last line that was written to standard error, for the end of a message; empty if there is none."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - _LAST_BYTES))
    lines = [line.strip() for line in said.read().decode("utf-8", "replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    shown = "".join(c for c in last if c.isprintable())[:_LAST_CHARACTERS]
    return f"; it said last: {shown}" if shown else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and whatever it started, which are a group of processes of their own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
