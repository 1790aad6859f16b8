"""Opening trace files, plain or compressed, as text or as bytes, with errors that a user can act on."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import IO, Any, Protocol, TextIO, cast

from workloads.request import WorkloadError

_PIECE = 1 << 16
"""Compressed bytes that are read at a time."""
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Surrogates, which stand for bytes that are not UTF-8."""
_MAX_DICTIONARY = 1 << 27
"""The most memory for decompressing xz, in bytes; ``xz -9`` needs half of it."""


class Remark(str):
    """One of a workload's notes that says how its file was read, and warns of nothing."""

    heading = "note"


def shown_path(path: Path | str) -> str:
    """The path as one printable line; unprintable characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))


def not_utf8(text: str) -> str:
    """The fault of text from ``open_text`` that is not UTF-8; empty if it is."""
    found = _NOT_UTF8.search(text)
    return f"not UTF-8 text (byte {ord(found[0]) - 0xDC00:#04x})" if found else ""


def not_text(start: bytes) -> str:
    """The fault of a file that is not text at all, by its first bytes; empty if only some bytes are wrong."""
    if _is_utf16(start):
        return f"not UTF-8 text (byte {start[0]:#04x}): looks like UTF-16; UTF-8 is expected"
    text = start.decode("utf-8", errors="surrogateescape")
    return not_utf8(text) if len(_NOT_UTF8.findall(text)) > max(3, len(text) // 10) else ""


def _is_utf16(start: bytes) -> bool:
    """Whether the first bytes look like UTF-16: a byte order mark, then an ASCII character."""
    if start.startswith(b"\xff\xfe"):
        return len(start) >= 4 and start[2] != 0 and start[3] == 0
    return start.startswith(b"\xfe\xff") and len(start) >= 4 and start[2] == 0 and start[3] != 0


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a file as UTF-8 text, with or without a byte order mark, decompressed; line ends are kept.

    Bytes that are not UTF-8 become lone surrogates, for which readers refuse the row. Raises ``WorkloadError`` for
    any fault of the file, also while it is being read.
    """
    with open_bytes(path) as binary:
        # ``open_bytes`` always gives a reader that can peek.
        if fault := not_text(cast(BufferedReader, binary).peek(_PIECE)):
            raise WorkloadError(f"{shown_path(path)}: {fault}; a trace is expected, CSV or JSONL")
        with TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield text


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file as bytes, decompressed if its first bytes say that it is gzip, bzip2 or xz.

    It is decompressed piece by piece. Pipes and devices are refused before they are opened. Raises ``WorkloadError``
    for any fault of the file, also while it is being read.
    """
    packing, shown = "", shown_path(path)
    try:
        packing = packing_of(path)
        with _opened(path, packing) as binary:
            yield binary
    except WorkloadError:
        raise
    except FileNotFoundError:
        raise WorkloadError(f"{shown}: no such file") from None
    except IsADirectoryError:
        raise WorkloadError(f"{shown}: is a directory; a trace file is expected") from None
    except UnicodeDecodeError as e:
        raise WorkloadError(
            f"{shown}: not UTF-8 text (byte {e.object[e.start]:#04x}); a trace is expected, CSV or JSONL"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, _DamagedError) as e:
        raise WorkloadError(f"{shown}: damaged {packing} data ({e})") from None
    except OSError as e:
        raise WorkloadError(f"{shown}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise WorkloadError(f"{str(path)!r}: cannot be a path: {e}") from None


def packing_of(path: Path) -> str:
    """``"gzip"``, ``"bzip2"`` or ``"xz"`` by the first bytes of a file; empty for a plain file.

    Raises ``WorkloadError`` if the name disagrees or the format is not supported, and ``OSError``.
    """
    shown, mode = shown_path(path), os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise WorkloadError(f"{shown}: is a pipe or device; a file is expected, since it is read more than once")
    with path.open("rb") as raw:
        start = raw.read(8)
    found = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")
    named = _SUFFIXES.get(path.suffix.lower(), "")
    if found in _UNREADABLE or (named in _UNREADABLE and not found):
        what = found or named
        raise WorkloadError(f"{shown}: {what} data, which cannot be read; unpack it first ({_UNREADABLE[what]})")
    if named and named != found:
        how = "compress it with" if named == "gzip" else "pack it with"
        raise WorkloadError(
            f"{shown}: named {shown_path(path.suffix)} but not {named} data; rename it, or {how} {named}"
        )
    return found


def _opened(path: Path, packing: str) -> IO[bytes]:
    if packing == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    raw = path.open("rb")
    if not packing:
        return raw
    return BufferedReader(_Unpacked(raw, packing), _PIECE)


class _Decompressor(Protocol):
    """The common interface of the decompressors of bz2 and lzma."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _DamagedError(Exception):
    """The compressed data is damaged."""


class _Unpacked(RawIOBase):
    """A decompressed file. Unlike the readers of the standard library, it refuses data after the end."""

    def __init__(self, raw: IO[bytes], packing: str):
        self._raw, self._packing = raw, packing
        self._begin: Callable[[], _Decompressor] = _DECOMPRESSORS[packing]
        self._unpacking = self._begin()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while True:
            unpacking = self._unpacking
            if unpacking.eof:
                following = self._next_stream(unpacking.unused_data)
                if not following:
                    return 0
                unpacking = self._unpacking = self._begin()
            else:
                following = self._raw.read(_PIECE) if unpacking.needs_input else b""
                if unpacking.needs_input and not following:
                    raise _DamagedError("it ends before the end-of-stream marker was reached")
            try:
                data = unpacking.decompress(following, len(buffer))
            except (OSError, ValueError) as e:
                raise _DamagedError(e) from None
            if data:
                buffer[: len(data)] = data
                return len(data)

    def _next_stream(self, following: bytes) -> bytes:
        """The first bytes of the next compressed stream; empty at the end of the file. xz may be padded by zeros."""
        magic = next(magic for magic, name in _MAGIC.items() if name == self._packing)
        padding = 0
        while True:
            if self._packing == "xz":
                start = following.lstrip(b"\0")
                padding += len(following) - len(start)
                following = start
            piece = self._raw.read(_PIECE) if len(following) < len(magic) else b""
            if not piece:
                break
            following += piece
        if padding % 4 or (following and not following.startswith(magic)):
            raise _DamagedError("trailing bytes after its end")
        return following


_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zip": "zip"}
_UNREADABLE = {"zstd": "zstd -d", "zip": "unzip"}
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_DICTIONARY),
}
