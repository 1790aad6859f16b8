"""Opening trace files: plain or packed, as text or as bytes, with errors that a user can act on."""

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
"""Packed bytes that are read at a time."""
_NO_TEXT = re.compile("[\udc80-\udcff]")
"""What stands for a byte that is not UTF-8."""
_MAX_DICTIONARY = 1 << 27
"""Bytes that unpacking xz may take; the most that ``xz -9`` asks for is half of it."""


def shown_path(path: Path | str) -> str:
    """The path in one line that can be printed: as it is, but for characters that cannot, which are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))


def no_text(text: str) -> str:
    """What is wrong with text that was opened by ``open_text`` and is not UTF-8; else nothing."""
    found = _NO_TEXT.search(text)
    return f"not UTF-8 text (byte {ord(found[0]) - 0xDC00:#04x})" if found else ""


def no_text_file(start: bytes) -> str:
    """What is wrong with a file that begins so and is no text at all; nothing where some bytes may be wrong."""
    if _is_utf16(start):
        return f"not UTF-8 text (byte {start[0]:#04x}): looks like UTF-16; UTF-8 is expected"
    text = start.decode("utf-8", errors="surrogateescape")
    return no_text(text) if len(_NO_TEXT.findall(text)) > max(3, len(text) // 10) else ""


def _is_utf16(start: bytes) -> bool:
    """Whether a file that begins so looks like UTF-16: a byte order mark, then a character of ASCII."""
    if start.startswith(b"\xff\xfe"):
        return len(start) >= 4 and start[2] != 0 and start[3] == 0
    return start.startswith(b"\xfe\xff") and len(start) >= 4 and start[2] == 0 and start[3] != 0


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The file as UTF-8 text (with or without a byte order mark), unpacked if it is packed; line ends as they are.

    Bytes that are not UTF-8 come as lone surrogates: whoever reads the row that they are in refuses it. Raises
    ``WorkloadError`` for whatever is wrong with the file, also while it is being read.
    """
    with open_bytes(path) as binary:
        # Whatever is opened can be looked into.
        if fault := no_text_file(cast(BufferedReader, binary).peek(_PIECE)):
            raise WorkloadError(f"{shown_path(path)}: {fault}; a trace is expected, CSV or JSONL")
        with TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield text


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked if it is gzip, bzip2 or xz; which, is read off its first bytes, not its name.

    It is unpacked piece by piece, as it is read. What is no regular file is refused before it is opened. Raises
    ``WorkloadError`` for whatever is wrong with the file, also while it is being read.
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
    """``"gzip"``, ``"bzip2"`` or ``"xz"`` by the file's first bytes; else nothing.

    Raises ``WorkloadError`` where its name says otherwise or it is packed in another way, and whatever opening it
    raises.
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
        raise WorkloadError(f"{shown}: {what} data, which is not read; unpack it first ({_UNREADABLE[what]})")
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
    """What bz2 and lzma have in common."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _DamagedError(Exception):
    """What is packed cannot be unpacked."""


class _Unpacked(RawIOBase):
    """A packed file's content. Unlike the standard library's readers, it does not overlook what follows the end."""

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
        """The beginning of what follows a stream's end; nothing where the file ends. xz may be padded by zeros."""
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
