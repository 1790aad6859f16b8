"""A file of what was measured or sent so far, from which what was interrupted goes on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvsim.errors import UserError


class Line(BaseModel):
    """A line of a journal: immutable, every key checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


HeaderT = TypeVar("HeaderT", bound=Line)
EntryT = TypeVar("EntryT", bound=Line)
LineT = TypeVar("LineT", bound=Line)


class Journal(Generic[HeaderT, EntryT]):
    """A file of lines in JSON: a header of one kind, then entries of others.

    A line is added by one write at the end, so that a kill loses that line at most; a line without an end is ignored,
    and taken away before the next is added.
    """

    def __init__(self, path: Path | None, header: type[HeaderT], *entries: type[EntryT]):
        """With ``path`` None, nothing is stored."""
        self.path, self._header, self._kinds = path, header, entries

    def header(self) -> HeaderT | None:
        """The header in the file; None if there is no file or it is not a journal. Raises ``UserError``."""
        lines = self._lines()
        return _parsed(lines[0], self._header) if lines else None

    def entries(self) -> list[EntryT]:
        """All entries. Raises ``UserError`` if one is damaged."""
        found: list[EntryT] = []
        for number, line in enumerate(self._lines()[1:], start=2):
            if (entry := _parsed(line, *self._kinds)) is None:
                raise UserError(f"{self.path}: line {number} is damaged; delete the file to begin anew")
            found.append(entry)
        return found

    def go_on(self, header: HeaderT) -> list[EntryT]:
        """The entries of a file that has this header; else none, and a new file. Raises ``UserError``."""
        found = self.entries() if self.header() == header else []
        if not found:
            self.begin(header)
        return found

    def begin(self, header: HeaderT) -> None:
        """Start a new file, replacing any other. Raises ``UserError`` if it cannot be written."""
        self._write("w", header)

    def add(self, entry: EntryT) -> None:
        """Append an entry. Raises ``UserError`` if it cannot be written."""
        self._write("a", entry)

    def remove(self) -> None:
        """Delete the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _lines(self) -> list[str]:
        if self.path is None:
            return []
        try:
            return self.path.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{self.path}: cannot go on from it: {e}; delete it to begin anew") from None

    def _write(self, mode: str, line: Line) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if mode == "a" and not _ends_whole(self.path):
                os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(f"{line.model_dump_json()}\n")
        except OSError as e:
            raise UserError(f"{self.path}: cannot write: {e.strerror}") from None


def _ends_whole(path: Path) -> bool:
    """Whether a file, which is not empty, ends with a whole line."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _parsed(line: str, *kinds: type[LineT]) -> LineT | None:
    """The line as the first kind that it is of; None if it is of none."""
    for kind in kinds:
        with suppress(ValidationError):
            return kind.model_validate_json(line)
    return None
