"""Where a sweep keeps its runs: one SQLite file, safe against being killed at any moment.

Tables, ``FORMAT`` 1 (``PRAGMA user_version``; ``application_id`` tells the file from others):

- ``meta(key PRIMARY KEY, value)``: name, sweep (JSON), code.
- ``points(digest PRIMARY KEY, number, replication, policy, settings, scenario, status, measures, summary, error)``: a
  row for each finished run; ``settings``, ``measures`` and ``summary`` are JSON objects, ``scenario`` is TOML that runs
  by itself, ``status`` is ``done`` or ``failed``. Rows depend on the sweep and the code alone, bit for bit. ``number``
  is NULL for runs of an earlier version of the sweep or the code: they are kept, and found again by their digest.
- ``timings(digest, seconds, host, process, ended)``: a row for each time that a run was really made, ``seconds`` of
  wall clock, ``ended`` in ISO 8601.

While a sweep runs, nobody else can open its file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kvsim.errors import UserError
from kvsim.results import writable

FORMAT = 1
"""Version of the tables."""

_APPLICATION = 0x6B765350

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE points (
  digest TEXT PRIMARY KEY,
  number INTEGER,
  replication INTEGER NOT NULL,
  policy TEXT NOT NULL,
  settings TEXT NOT NULL,
  scenario TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
  measures TEXT NOT NULL,
  summary TEXT NOT NULL,
  error TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE timings (
  digest TEXT NOT NULL, seconds REAL NOT NULL, host TEXT NOT NULL, process INTEGER NOT NULL, ended TEXT NOT NULL
);
"""


_OTHERS = ("comparison", "recommendation")
"""What other commands call their files."""


def written_names(store: Path) -> dict[str, str]:
    """What the files beside a store are called, by what they hold: json, csv, runs, best, failures, png.

    They carry the store's own name, so that two sweeps can share a folder.
    """
    stem = f"{store.stem}-sweep" if store.stem in _OTHERS else store.stem
    names = {kind: f"{stem}.{kind}" for kind in ("json", "csv", "png")}
    return names | {kind: f"{'' if stem == 'sweep' else f'{stem}-'}{kind}.csv" for kind in ("runs", "best", "failures")}


@dataclass(frozen=True)
class Row:
    """A finished run, as it is kept."""

    digest: str
    """Of everything that the run depends on, and of the code."""
    number: int | None
    """Of its settings in the sweep."""
    replication: int
    policy: str
    settings: str
    """JSON: of each axis its value."""
    scenario: str
    """TOML; empty where the settings cannot be."""
    status: str
    measures: str = "{}"
    """JSON: see ``measures.MEASURES``."""
    summary: str = "{}"
    """JSON: what ``kvsim run --json`` prints, but for the wall clock."""
    error: str = ""
    """Why it failed, in one line."""


class Timing(NamedTuple):
    """That a run was made: how long it took, where and when."""

    digest: str
    seconds: float
    host: str
    process: int
    ended: str


class Place(NamedTuple):
    """Where in a sweep a finished run belongs: an earlier sweep may have had it elsewhere."""

    digest: str
    number: int
    replication: int
    settings: str
    """JSON."""


_COLUMNS = ", ".join(field.name for field in fields(Row))
_MARKS = ", ".join("?" for _ in fields(Row))


class Store:
    """A sweep's file, open for writing by one process alone. Use as a context manager.

    All methods raise ``UserError`` where the file cannot be read or written.
    """

    def __init__(self, path: str | Path):
        """Open or make the file. Raises ``UserError``: no such store, another version, in use, cannot be written."""
        self.path = Path(path)
        writable(self.path.parent)
        with self._guard():
            # Transactions are ours to begin; waiting for another sweep would take hours.
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=0)
        try:
            with self._guard():
                self._open()
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        (application,), (version,) = run("PRAGMA application_id").fetchone(), run("PRAGMA user_version").fetchone()
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != _APPLICATION:
            raise UserError(f"{self.path}: an SQLite file, but not one of a sweep; name another with --out")
        if tables and version != FORMAT:
            raise UserError(
                f"{self.path}: written by another kvsim (tables {version}, known: {FORMAT}); name another with --out"
            )
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        with self._transaction():
            if not tables:
                for statement in _TABLES.split(";"):
                    run(statement)
                run(f"PRAGMA application_id = {_APPLICATION}")
                run(f"PRAGMA user_version = {FORMAT}")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others have the file."""
        self._connection.close()

    def begin(self, meta: dict[str, str], adopted: Iterable[Place]) -> None:
        """A sweep begins: what it is, and which finished runs are part of it."""
        with self._transaction():
            run = self._connection.execute
            run("UPDATE points SET number = NULL")
            self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
            self._adopt(adopted)

    def adopt(self, found: Iterable[Place]) -> None:
        """These finished runs are part of the sweep, too."""
        with self._transaction():
            self._adopt(found)

    def _adopt(self, found: Iterable[Place]) -> None:
        self._connection.executemany(
            "UPDATE points SET number = ?, replication = ?, settings = ? WHERE digest = ?",
            ((place.number, place.replication, place.settings, place.digest) for place in found),
        )

    def add(self, rows: Sequence[Row], timings: Sequence[Timing] = ()) -> None:
        """Keep finished runs, all or none of them."""
        with self._transaction():
            self._connection.executemany(
                f"INSERT INTO points ({_COLUMNS}) VALUES ({_MARKS})", (astuple(row) for row in rows)
            )
            self._connection.executemany("INSERT INTO timings VALUES (?, ?, ?, ?, ?)", timings)

    def name(self) -> str | None:
        """What the sweep is called that this file was made for; None where it is new."""
        with self._guard():
            found = self._connection.execute("SELECT value FROM meta WHERE key = 'name'").fetchone()
        return None if found is None else str(found[0])

    def digests(self) -> set[str]:
        """Of all runs that were ever finished here."""
        with self._guard():
            return {digest for (digest,) in self._connection.execute("SELECT digest FROM points")}

    def rows(self) -> list[Row]:
        """The runs of the sweep, by number, policy and replication."""
        query = f"SELECT {_COLUMNS} FROM points WHERE number IS NOT NULL ORDER BY number, policy, replication"
        with self._guard():
            return [Row(*row) for row in self._connection.execute(query)]

    def timings(self) -> list[Timing]:
        """Every run that was made, in order of their ends."""
        with self._guard():
            return [Timing(*row) for row in self._connection.execute("SELECT * FROM timings ORDER BY rowid")]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guard():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """What SQLite complains of, in words and in one line."""
        try:
            yield
        except sqlite3.Error as e:
            raise UserError(f"{self.path}: {_in_words(e)}") from None


def _in_words(error: sqlite3.Error) -> str:
    kind = getattr(error, "sqlite_errorname", "").split("_")[:2]
    known = {
        "SQLITE_BUSY": "in use by another sweep, or open elsewhere; wait for it, or name another with --out",
        "SQLITE_LOCKED": "in use by another sweep, or open elsewhere; wait for it, or name another with --out",
        "SQLITE_NOTADB": "not an SQLite file; name another with --out",
        "SQLITE_CORRUPT": "damaged; move it away to begin anew",
        "SQLITE_READONLY": "cannot be written: read-only",
        "SQLITE_FULL": "cannot be written: the disk is full; what was finished before is kept",
        "SQLITE_IOERR": "cannot be written: the disk refuses; what was finished before is kept",
        "SQLITE_CANTOPEN": "cannot be opened",
    }
    return known.get("_".join(kind), f"cannot be used: {error}")
