"""The process that listens at an address of this machine, and its command line, as Linux tells them.

``/proc/net/tcp`` names the socket that listens and its owner, ``/proc/PID/fd`` the processes that have it
(``proc(5)``). Only processes of this user are looked at. Of their environment only the variables ``LLAMA_ARG_...`` are
read, which llama-server takes for flags, and of the command line only flags that are known here are kept: no keys.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvsim.advice.memory.command_line import ServerLine, read_command
from kvsim.engines.live.address import Address, is_loopback
from kvsim.errors import UserError

_LISTENS = "0A"
_PROC = Path("/proc")
_NAMES_THE_MODEL = ("--model", "--hf-repo", "--hf-file")


@dataclass(frozen=True)
class Started:
    """How a server was started."""

    process: int
    folder: Path | None
    """Where, if that is known."""
    line: ServerLine

    @property
    def flags(self) -> Mapping[str, str]:
        """Values by the flags' long names, empty for a switch; without those that name the model."""
        return {flag: value for flag, value in self.line.flags.items() if flag not in _NAMES_THE_MODEL}

    @property
    def words(self) -> list[str]:
        """The flags as they are typed."""
        return [word for flag, value in self.flags.items() for word in ((flag, value) if value else (flag,))]

    def __str__(self) -> str:
        return f"its command line (process {self.process}) says {shlex.join(self.words) or 'no flag that matters'}"


def started_at(address: Address) -> Started | None:
    """How the llama-server or vLLM at an address was started; None where that cannot be known."""
    for process in _processes_at(address):
        with suppress(OSError, UserError):
            words = _texts(process / "cmdline")
            variables = [text for text in _texts(process / "environ") if text.startswith("LLAMA_ARG_")]
            line = read_command(shlex.join([*variables, *words]))
            if line.program != "ollama":
                return Started(int(process.name), _folder(process), line)
    return None


def server_process(address: Address) -> int | None:
    """The process on this machine that listens at an address; None if there is none, or it cannot be seen."""
    return next((int(process.name) for process in _processes_at(address)), None)


def _processes_at(address: Address) -> Iterator[Path]:
    if is_loopback(address.host):
        yield from _with_sockets({f"socket:[{inode}]" for inode in _listening(address.port)})


def _listening(port: int) -> Iterator[str]:
    """The sockets of this user that listen at a port."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for row in (_PROC / "net" / name).read_text("ascii").splitlines()[1:]:
                fields = row.split()
                at = int(fields[1].rsplit(":", 1)[1], 16)
                if fields[3] == _LISTENS and at == port and int(fields[7]) == os.getuid():
                    yield fields[9]


def _with_sockets(sockets: set[str]) -> Iterator[Path]:
    """The processes that have one of these open, the oldest first."""
    numbers = sorted(int(entry.name) for entry in _PROC.glob("[0-9]*")) if sockets else []
    for process in (_PROC / str(number) for number in numbers):
        with suppress(OSError):
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                yield process


def _texts(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")


def _folder(process: Path) -> Path | None:
    try:
        return Path(os.readlink(process / "cwd"))
    except OSError:
        return None
