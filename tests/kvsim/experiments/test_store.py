"""The store of a sweep: what it keeps, and its messages about files that it cannot use."""

import os
import sqlite3
from contextlib import closing

import pytest

from kvsim.errors import UserError
from kvsim.experiments.store import FORMAT, Row, Store, SweepPosition, Timing
from tests.worlds import python


def row(digest="a", number=0, **keys):
    return Row(digest, number, 0, "paged", '{"cache.cells": 64}', "seed = 1\n", "done", **keys)


def timing(digest="a"):
    return Timing(digest, 0.5, "here", 7, "2026-01-01T00:00:00")


def complaint(path):
    with pytest.raises(UserError) as caught:
        Store(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sweep.sqlite"


def test_added_rows_can_be_read_again(path):
    with Store(path) as store:
        store.add([row("b", 1), row("a", error="späß\n")], [timing()])
    with Store(path) as store:
        assert store.rows() == [row("a", error="späß\n"), row("b", 1)]
        assert store.timings() == [timing()]
        assert store.digests() == {"a", "b"}


def test_runs_of_an_earlier_sweep_are_kept_and_found_again(path):
    with Store(path) as store:
        store.add([row("a"), row("b", 1), row("c", 2)])
        store.begin({"name": "second"}, [SweepPosition("b", 0, 3, "{}")])
        assert [(each.digest, each.number, each.replication, each.settings) for each in store.rows()] == [
            ("b", 0, 3, "{}")
        ]
        assert store.digests() == {"a", "b", "c"}
        store.adopt([SweepPosition("c", 5, 0, "{}")])
        assert [each.digest for each in store.rows()] == ["b", "c"]


def test_rows_are_added_all_or_none(path):
    with Store(path) as store:
        store.add([row("a")])
        with pytest.raises(UserError, match="UNIQUE"):
            store.add([row("b"), row("a")], [timing("b")])
        assert store.digests() == {"a"}
        assert store.timings() == []


def test_every_commit_reaches_the_disk(path):
    with Store(path) as store:
        (mode,) = store._connection.execute("PRAGMA journal_mode").fetchone()
        (synchronous,) = store._connection.execute("PRAGMA synchronous").fetchone()
        assert (mode, synchronous) == ("wal", 2)


@pytest.mark.slow
def test_two_sweeps_cannot_share_a_file(path):
    with Store(path):
        code = f"from kvsim.experiments.store import Store; Store({str(path)!r})"
        other = python("-c", code)
        answer = "in use by another sweep or another program; wait for it, or name another with --out"
        assert answer in other.stderr.splitlines()[-1]
        assert complaint(path) == answer
    Store(path).close()


def test_other_files_are_left_alone(path):
    path.write_text("notes\n" * 1000)
    assert complaint(path) == "not an SQLite file; name another with --out"
    assert path.read_text() == "notes\n" * 1000


def test_an_sqlite_file_of_something_else_is_left_alone(path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE points (digest)")
        other.commit()
    before = path.read_bytes()
    assert complaint(path) == "an SQLite file, but not one of a sweep; name another with --out"
    assert path.read_bytes() == before


def test_another_version_is_refused(path):
    Store(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {FORMAT + 1}")
    answer = f"written by another version of kvsim (tables {FORMAT + 1}, known: {FORMAT}); name another with --out"
    assert complaint(path) == answer


@pytest.mark.parametrize(("version", "lacks"), [(1, ("warnings", "times", "sketches")), (2, ("sketches",)), (3, ())])
def test_a_store_of_an_earlier_format_gets_the_new_columns(path, version, lacks):
    with Store(path) as store:
        store.add([row("a")])
    with closing(sqlite3.connect(path)) as old:
        for column in (*lacks, "checksum"):
            old.execute(f"ALTER TABLE points DROP COLUMN {column}")
        old.execute(f"PRAGMA user_version = {version}")
        old.commit()
    for _ in range(2):
        with Store(path) as store:
            assert [each.warnings for each in store.rows()] == ["[]"]
            assert store.drop_damaged() == []
    with Store(path) as store:
        store.add([row("b", 1, warnings='["unstable"]', sketches='{"ttft": [2, [0.5, 1.0]]}')])
        assert [each.warnings for each in store.rows()] == ["[]", '["unstable"]']
        assert [each.latencies() for each in store.rows()] == [{}, {"ttft": (2, [0.5, 1.0])}]


def test_a_file_that_is_cut_short_is_refused(path):
    with Store(path) as store:
        store.add([row(str(i)) for i in range(200)])
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"sweep.sqlite: (damaged|not an SQLite)"), Store(path) as store:
        store.rows()


def test_a_file_that_cannot_be_written(path):
    with Store(path) as store:
        store._connection.execute("PRAGMA query_only = 1")
        with pytest.raises(UserError, match="cannot be written: read-only"):
            store.add([row()])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_file(path):
    Store(path).close()
    path.chmod(0o400)
    assert complaint(path) == "cannot be written: read-only"


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="taken: cannot write results: "):
        Store(tmp_path / "taken" / "sweep.sqlite")
    (tmp_path / "folder").mkdir()
    assert complaint(tmp_path / "folder") == "cannot be opened"


def test_a_full_disk_keeps_finished_runs(path):
    with Store(path) as store:
        store.add([row("a")])
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(UserError, match="the disk is full; finished runs are kept"):
            store.add([row("b", summary="x" * 100_000)], [timing("b")])
        assert [each.digest for each in store.rows()] == ["a"]
    with Store(path) as store:
        assert store.digests() == {"a"}


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("measures", '{"a": 1', "measures is not the JSON of an object"),
        ("summary", "[]", "summary is not the JSON of an object"),
        ("warnings", "", "warnings is not the JSON of a list"),
        ("error", b"\xff\xfe", "error is no text"),
        ("replication", "x", "replication is no number"),
        ("measures", '{"a": 2}', "it is not what was stored"),
        ("status", "failed", "it is not what was stored"),
    ],
)
def test_a_damaged_run_is_named_and_forgotten(column, value, fault, path):
    with Store(path) as store:
        store.add([row("a"), row("b", 1)])
    with closing(sqlite3.connect(path)) as connection, connection:
        text = f"CAST(X'{value.hex()}' AS TEXT)" if isinstance(value, bytes) else f"'{value}'"
        connection.execute(f"UPDATE points SET {column} = {text} WHERE digest = 'b'")
    with Store(path) as store:
        (line,) = store.drop_damaged()
        assert line.startswith(f"{path}: a damaged run (policy ")
        assert line.endswith(f": {fault}; it is done again")
        assert store.digests() == {"a"}
        assert store.drop_damaged() == []
