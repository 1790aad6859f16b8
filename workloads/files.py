"""Opening trace files: plain or packed, as text or as bytes, with errors that a user can act on."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import IO, Any, Protocol, TextIO, cast

from workloads.request import WorkloadError

_PIECE = 1 << 16
"""Packed bytes that are read at a time."""
_MAX_DICTIONARY = 1 << 27
"""Bytes that unpacking xz may take; the most that ``xz -9`` asks for is half of it."""


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The file as UTF-8 text (with or without a byte order mark), unpacked if it is packed; line ends as they are.

    Raises ``WorkloadError`` for whatever is wrong with the file, also while it is being read.
    """
    with open_bytes(path) as binary, TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
        yield text


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked if it is gzip, bzip2 or xz; which, is read off its first bytes, not its name.

    It is unpacked piece by piece, as it is read. Raises ``WorkloadError`` for whatever is wrong with the file, also
    while it is being read.
    """
    packing = ""
    try:
        packing = packing_of(path)
        with _opened(path, packing) as binary:
            yield binary
    except WorkloadError:
        raise
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise WorkloadError(f"{path}: is a directory; a trace file is expected") from None
    except UnicodeDecodeError as e:
        raise WorkloadError(
            f"{path}: not UTF-8 text (byte {e.object[e.start]:#04x}); a trace is expected, CSV or JSONL"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, _DamagedError) as e:
        raise WorkloadError(f"{path}: damaged {packing} data ({e})") from None
    except OSError as e:
        raise WorkloadError(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise WorkloadError(f"{str(path)!r}: cannot be a path: {e}") from None


def packing_of(path: Path) -> str:
    """``"gzip"``, ``"bzip2"`` or ``"xz"`` by the file's first bytes; else nothing.

    Raises ``WorkloadError`` where its name says otherwise or it is packed in another way, and whatever opening it
    raises.
    """
    with path.open("rb") as raw:
        start = raw.read(8)
    found = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")
    named = _SUFFIXES.get(path.suffix, "")
    if found in _UNREADABLE or (named in _UNREADABLE and not found):
        what = found or named
        raise WorkloadError(f"{path}: {what} data, which is not read; unpack it first ({_UNREADABLE[what]})")
    if named and named != found:
        how = "compress it with" if named == "gzip" else "pack it with"
        raise WorkloadError(f"{path}: named {path.suffix} but not {named} data; rename it, or {how} {named}")
    return found


def _opened(path: Path, packing: str) -> IO[bytes]:
    if packing == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    raw = path.open("rb")
    if not packing:
        return raw
    return BufferedReader(_Unpacked(raw, _DECOMPRESSORS[packing]), _PIECE)


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

    def __init__(self, raw: IO[bytes], begin: Callable[[], _Decompressor]):
        self._raw, self._begin = raw, begin
        self._unpacking = begin()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while True:
            unpacking = self._unpacking
            if unpacking.eof:
                following = unpacking.unused_data or self._raw.read(_PIECE)
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
