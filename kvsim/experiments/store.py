"""The store of a sweep's runs: one SQLite file that stays valid if the process is killed at any moment.

Tables, ``FORMAT`` 2 (``PRAGMA user_version``; ``application_id`` tells the file from others):

- ``meta(key PRIMARY KEY, value)``: name, sweep (JSON), code.
- ``points(digest PRIMARY KEY, number, replication, policy, settings, scenario, status, measures, summary, error,
  warnings, times)``: one row per finished run; ``settings``, ``measures`` and ``summary`` are JSON objects,
  ``warnings`` is a JSON list, ``times`` a digest of the times of all requests, ``scenario`` is TOML that can be run by
  itself, ``status`` is ``done`` or ``failed``. Rows depend only on the sweep and the code, bit for bit. ``number`` is
  NULL for runs of an earlier version of the sweep or the code; they are kept and found by their digest.
- ``timings(digest, seconds, host, process, ended)``: one row each time a run was executed, with ``seconds`` of wall
  clock and ``ended`` in ISO 8601.

``FORMAT`` 1 had neither ``warnings`` nor ``times``; they are added when such a file is opened. The file is locked while
a sweep runs.
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

FORMAT = 2
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
  error TEXT NOT NULL,
  warnings TEXT NOT NULL DEFAULT '[]',
  times TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE timings (
  digest TEXT NOT NULL, seconds REAL NOT NULL, host TEXT NOT NULL, process INTEGER NOT NULL, ended TEXT NOT NULL
);
"""


_ADDED_COLUMNS = ("warnings TEXT NOT NULL DEFAULT '[]'", "times TEXT NOT NULL DEFAULT ''")
"""Columns that ``FORMAT`` 1 had not."""

_RESERVED_STEMS = ("comparison", "recommendation")
"""File names of other commands."""


def written_names(store: Path) -> dict[str, str]:
    """Return the names of the files written beside a store, by content: json, csv, png, runs, best, failures.

    They contain the store's own name, so that several sweeps can share a folder.
    """
    stem = f"{store.stem}-sweep" if store.stem in _RESERVED_STEMS else store.stem
    names = {kind: f"{stem}.{kind}" for kind in ("json", "csv", "png")}
    return names | {kind: f"{'' if stem == 'sweep' else f'{stem}-'}{kind}.csv" for kind in ("runs", "best", "failures")}


@dataclass(frozen=True)
class Row:
    """A finished run as stored in the table ``points``."""

    digest: str
    """Digest of everything that the run depends on, code included."""
    number: int | None
    """Number of its settings in the sweep; None for runs of an earlier version."""
    replication: int
    policy: str
    settings: str
    """The value of each axis, as JSON."""
    scenario: str
    """TOML; empty for invalid settings."""
    status: str
    measures: str = "{}"
    """JSON; see ``measures.MEASURES``."""
    summary: str = "{}"
    """JSON: the output of ``kvsim run --json`` without the wall-clock time."""
    error: str = ""
    """Why the run failed, in one line."""
    warnings: str = "[]"
    """JSON: a list of the warnings that the run gave, a line each."""
    times: str = ""
    """Digest of the times of all requests; empty if it is unknown."""


class Timing(NamedTuple):
    """How long a run took, where, and when it ended."""

    digest: str
    seconds: float
    host: str
    process: int
    ended: str


class SweepPosition(NamedTuple):
    """Position of a finished run in the current sweep; it may differ from that in an earlier one."""

    digest: str
    number: int
    replication: int
    settings: str
    """JSON."""


_COLUMNS = ", ".join(field.name for field in fields(Row))
_MARKS = ", ".join("?" for _ in fields(Row))


class Store:
    """A sweep's file, opened for writing by one process; a context manager.

    All methods raise ``UserError`` if the file cannot be read or written.
    """

    def __init__(self, path: str | Path):
        """Open or create the file. Raises ``UserError`` if it is no store, of another version, in use or read-only."""
        self.path = Path(path)
        writable(self.path.parent)
        with self._plain_errors():
            # Transactions are begun explicitly; waiting for another sweep could take hours.
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=0)
        try:
            with self._plain_errors():
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
        if tables and version not in (1, FORMAT):
            raise UserError(
                f"{self.path}: written by another version of kvsim (tables {version}, known: {FORMAT}); "
                "name another with --out"
            )
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        with self._transaction():
            if not tables:
                for statement in _TABLES.split(";"):
                    run(statement)
                run(f"PRAGMA application_id = {_APPLICATION}")
            elif version == 1:
                for column in _ADDED_COLUMNS:
                    run(f"ALTER TABLE points ADD COLUMN {column}")
            run(f"PRAGMA user_version = {FORMAT}")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, so that other processes can open it."""
        self._connection.close()

    def begin(self, meta: dict[str, str], adopted: Iterable[SweepPosition]) -> None:
        """Start a sweep: store its description, and make finished runs that belong to it part of it."""
        with self._transaction():
            self._connection.execute("UPDATE points SET number = NULL")
            self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
            self._adopt(adopted)

    def adopt(self, positions: Iterable[SweepPosition]) -> None:
        """Make further finished runs part of the sweep."""
        with self._transaction():
            self._adopt(positions)

    def _adopt(self, positions: Iterable[SweepPosition]) -> None:
        self._connection.executemany(
            "UPDATE points SET number = ?, replication = ?, settings = ? WHERE digest = ?",
            ((at.number, at.replication, at.settings, at.digest) for at in positions),
        )

    def add(self, rows: Sequence[Row], timings: Sequence[Timing] = ()) -> None:
        """Store finished runs, either all of them or none."""
        with self._transaction():
            self._connection.executemany(
                f"INSERT INTO points ({_COLUMNS}) VALUES ({_MARKS})", (astuple(row) for row in rows)
            )
            self._connection.executemany("INSERT INTO timings VALUES (?, ?, ?, ?, ?)", timings)

    def name(self) -> str | None:
        """Return the name of the sweep that this file belongs to; None for a new file."""
        with self._plain_errors():
            found = self._connection.execute("SELECT value FROM meta WHERE key = 'name'").fetchone()
        return None if found is None else str(found[0])

    def digests(self) -> set[str]:
        """Return the digests of all stored runs, of earlier versions too."""
        with self._plain_errors():
            return {digest for (digest,) in self._connection.execute("SELECT digest FROM points")}

    def rows(self) -> list[Row]:
        """Return the runs of the current sweep, sorted by number, policy and replication."""
        query = f"SELECT {_COLUMNS} FROM points WHERE number IS NOT NULL ORDER BY number, policy, replication"
        with self._plain_errors():
            return [Row(*row) for row in self._connection.execute(query)]

    def timings(self) -> list[Timing]:
        """Return the timings of all executed runs, in the order in which they were stored."""
        with self._plain_errors():
            return [Timing(*row) for row in self._connection.execute("SELECT * FROM timings ORDER BY rowid")]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._plain_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Turn SQLite's errors into one-line messages for users."""
        try:
            yield
        except sqlite3.Error as e:
            raise UserError(f"{self.path}: {_plain_error(e)}") from None


def _plain_error(error: sqlite3.Error) -> str:
    kind = getattr(error, "sqlite_errorname", "").split("_")[:2]
    known = {
        "SQLITE_BUSY": "in use by another sweep or another program; wait for it, or name another with --out",
        "SQLITE_LOCKED": "in use by another sweep or another program; wait for it, or name another with --out",
        "SQLITE_NOTADB": "not an SQLite file; name another with --out",
        "SQLITE_CORRUPT": "damaged; move it away to start again",
        "SQLITE_READONLY": "cannot be written: read-only",
        "SQLITE_FULL": "cannot be written: the disk is full; finished runs are kept",
        "SQLITE_IOERR": "cannot be written: input/output error; finished runs are kept",
        "SQLITE_CANTOPEN": "cannot be opened",
    }
    return known.get("_".join(kind), f"cannot be used: {error}")
