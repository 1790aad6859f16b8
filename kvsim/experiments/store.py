"""The store of a sweep's runs: one SQLite file that stays valid if the process is killed at any moment.

Tables, ``FORMAT`` 4 (``PRAGMA user_version``; ``application_id`` tells the file from others):

- ``meta(key PRIMARY KEY, value)``: name, sweep (JSON), code.
- ``points(digest PRIMARY KEY, number, replication, policy, settings, scenario, status, measures, summary, error,
  warnings, times, sketches, checksum)``: one row per finished run; ``settings``, ``measures`` and ``summary`` are JSON
  objects, ``warnings`` is a JSON list, ``times`` a digest of the times of all requests, ``sketches`` a JSON object with
  the sketch of each latency (``pooled_percentiles``), ``checksum`` that of all that no later sweep changes,
  ``scenario`` is TOML that can be run by itself, ``status`` is ``done`` or ``failed``. Rows depend only on the sweep
  and the code, bit for bit. ``number`` is NULL for runs of an earlier version of the sweep or the code; they are kept
  and found by their digest.
- ``timings(digest, seconds, host, process, ended)``: one row each time a run was executed, with ``seconds`` of wall
  clock and ``ended`` in ISO 8601.

``FORMAT`` 1 had neither ``warnings`` nor ``times``, ``FORMAT`` 2 no ``sketches``, ``FORMAT`` 3 no ``checksum``; they
are added when such a file is opened. Its runs are of an earlier version of the code, so that a sweep makes them anew.
The file is locked while a sweep runs.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from kvsim.errors import UserError
from kvsim.experiments.pooled_percentiles import LatencySketch, LatencySketches
from kvsim.results import writable

FORMAT = 4
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
  times TEXT NOT NULL DEFAULT '',
  sketches TEXT NOT NULL DEFAULT '{}',
  checksum TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE timings (
  digest TEXT NOT NULL, seconds REAL NOT NULL, host TEXT NOT NULL, process INTEGER NOT NULL, ended TEXT NOT NULL
);
"""


_ADDED_COLUMNS = {
    "warnings TEXT NOT NULL DEFAULT '[]'": 2,
    "times TEXT NOT NULL DEFAULT ''": 2,
    "sketches TEXT NOT NULL DEFAULT '{}'": 3,
    "checksum TEXT NOT NULL DEFAULT ''": 4,
}
"""Columns that the first ``FORMAT`` had not, with the one that brought them."""

_RESERVED_STEMS = ("comparison", "recommendation")
"""File names of other commands."""


def written_names(store: Path) -> dict[str, str]:
    """Return the names of the files written beside a store, by content: json, csv, png, runs, best, failures.

    They contain the store's own name, so that several sweeps can share a folder.
    """
    stem = f"{store.stem}-sweep" if store.stem in _RESERVED_STEMS else store.stem
    names = {kind: f"{stem}.{kind}" for kind in ("json", "csv", "png")}
    return names | {kind: f"{'' if stem == 'sweep' else f'{stem}-'}{kind}.csv" for kind in ("runs", "best", "failures")}


class DamageWarning(UserWarning):
    """A stored run cannot be read, and is done again. The message is one line."""


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
    sketches: str = "{}"
    """JSON: the sketch of each latency, after the warm-up, as a list of its fields."""

    def latencies(self) -> LatencySketches:
        """The sketch of each latency."""
        return {latency: LatencySketch(*each) for latency, each in json.loads(self.sketches).items()}


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
_MARKS = ", ".join("?" for _ in (*fields(Row), "checksum"))
_POSITION = ("number", "replication", "settings")
"""Columns that a later sweep sets anew."""
_JSON = {"settings": dict, "measures": dict, "summary": dict, "warnings": list}


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
        if tables and version not in range(1, FORMAT + 1):
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
            for column, since in _ADDED_COLUMNS.items():
                if tables and version < since:
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
                f"INSERT INTO points ({_COLUMNS}, checksum) VALUES ({_MARKS})",
                ((*astuple(row), _checksum(vars(row))) for row in rows),
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

    def drop_damaged(self) -> list[str]:
        """Delete the runs that cannot be read, so that they are done again; return a line for each."""
        damaged = {}
        with self._transaction():
            self._connection.text_factory = bytes
            try:
                for row in self._connection.execute(f"SELECT {_COLUMNS}, checksum FROM points"):
                    named = dict(zip([*(field.name for field in fields(Row)), "checksum"], row, strict=True))
                    if (fault := _fault_of(named)) is not None:
                        which = ", ".join(
                            [f"{key} {_shown(named[key])}" for key in ("policy", "settings", "replication")]
                        )
                        damaged[row[0]] = f"{self.path}: a damaged run ({which}): {fault}; it is done again"
            finally:
                self._connection.text_factory = str
            digests = [(digest,) for digest in damaged]
            self._connection.executemany("DELETE FROM points WHERE CAST(digest AS BLOB) = ?", digests)
        return list(damaged.values())

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


def _fault_of(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a stored run, whose texts are bytes; None if it can be read."""
    for name, value in row.items():
        if name in ("number", "replication"):
            if not isinstance(value, int) and not (name == "number" and value is None):
                return f"{name} is no number"
            continue
        try:
            text = value.decode()
        except (UnicodeDecodeError, AttributeError):
            return f"{name} is no text"
        if (kind := _JSON.get(name)) is not None:
            try:
                whole = isinstance(json.loads(text), kind)
            except (ValueError, RecursionError):
                whole = False
            if not whole:
                return f"{name} is not the JSON of {'a list' if kind is list else 'an object'}"
    checksum = row["checksum"].decode()
    return None if checksum in ("", _checksum(row)) else "it is not what was stored"


def _checksum(row: Mapping[str, Any]) -> str:
    """A checksum of a run, whose texts may be bytes, as far as it stays as it was stored."""
    texts = (row[field.name] for field in fields(Row) if field.name not in _POSITION)
    kept = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return blake2b(repr(kept).encode(), digest_size=8).hexdigest()


def _shown(value: Any) -> str:
    return value.decode(errors="replace")[:80] if isinstance(value, bytes) else repr(value)


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
