"""The file that observations go to: a line of JSON for each request, after a header for each run.

A line is one write at the end of the file, so that a process that is killed loses at most the line that it was
writing.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsim.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: two processes that write to one file are not noticed.
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]


class ObservationFile:
    """Lines at the end of a file, which is renamed when it is full: ``mine.jsonl`` becomes ``mine.1.jsonl``, the next
    ``mine.2.jsonl``.

    ``header`` makes the first line of a run, and of each further file of the same run; it is asked when that line is
    written, just before the first request's. Raises ``UserError`` if the file cannot be written.
    """

    def __init__(self, path: Path, header: Callable[[], Record], *, rotate_bytes: int):
        self.path = path
        self.files: list[Path] = []
        """Files of this run that are full, oldest first."""
        self._header = header
        self._rotate_bytes = rotate_bytes
        self._begun = False
        self._file = -1
        self._size = self._lines = 0
        self._torn = False
        try:
            self._file = self._open()
        except (OSError, ValueError) as e:
            self.close()
            raise UserError(f"--out: {path}: cannot be written: {getattr(e, 'strerror', None) or e}") from None

    def write(self, record: Record) -> OSError | None:
        """Write a line. Raises ``OSError`` if that fails; a later line may be written again.

        Returns why no new file could be begun, if so: the line is in the old one then.
        """
        line, trouble = _line(record), None
        if self._lines > 0 and self._size + len(line) > self._rotate_bytes:
            try:
                self._rotate()
            except (OSError, ValueError) as e:
                trouble = OSError(f"no new file could be begun: {getattr(e, 'strerror', None) or e}")
        if not self._begun:
            self._append(_line(self._header()))
            self._begun = True
        self._append(line)
        self._lines += 1
        return trouble

    def close(self) -> None:
        """Close the file; it can be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o600)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("not a file")
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError("another process writes to it") from None
            self._size, self._lines = found.st_size, 0
            self._torn = found.st_size > 0 and not _ends_with_newline(file)
        except BaseException:  # Interrupts too: only a file that is returned stays open.
            os.close(file)
            raise
        return file

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = os.write(self._file, data)
        if written < len(data):  # The disk is full. What is there of the line would be a wrong one.
            self._torn = True
            os.ftruncate(self._file, self._size)
            self._torn = data is not line
            raise OSError("the disk is full")
        self._size += written
        self._torn = False

    def _rotate(self) -> None:
        """Go on in a new file. If that fails, go on in the old one."""
        n = 1
        while (full := self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}")).exists():
            n += 1
        os.rename(self.path, full)
        self.files.append(full)
        old = self._file
        self._file = self._open()
        self._begun = False
        os.close(old)


def _line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _ends_with_newline(file: int) -> bool:
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) == b"\n"
