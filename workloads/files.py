"""Opening trace files: plain or gzipped, as text or as bytes, with errors that a user can act on."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TextIO, cast

from workloads.request import WorkloadError

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The file as UTF-8 text (with or without a byte order mark), unpacked if it is gzip; line ends as they are.

    Raises ``WorkloadError`` for whatever is wrong with the file, also while it is being read.
    """
    with open_bytes(path) as binary, TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
        yield text


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked if it is gzip; whether it is, is read off its first bytes, not its name.

    Raises ``WorkloadError`` for whatever is wrong with the file, also while it is being read.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
        if path.suffix == ".gz" and not packed:
            raise WorkloadError(f"{path}: named .gz but not gzip data; rename it, or compress it with gzip")
        with cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb") as binary:
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
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise WorkloadError(f"{path}: damaged gzip data ({e})") from None
    except OSError as e:
        raise WorkloadError(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise WorkloadError(f"{str(path)!r}: cannot be a path: {e}") from None
