"""The file: its header, what it does when it is full, and what it does when it cannot be written."""

import errno
import json
import os
import stat

import pytest

from kvsim.engines.observing import observations
from kvsim.engines.observing.observations import ObservationFile
from kvsim.errors import UserError

HEADER = {"kind": "observed"}


def opened(path, rotate_bytes=10**6):
    return ObservationFile(path, lambda: HEADER, rotate_bytes=rotate_bytes)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_added_to_the_runs_before(out):
    for run in range(2):
        file = opened(out)
        assert out.exists()
        file.write({"run": run})
        file.close()
        file.close()
    assert lines(out) == [HEADER, {"run": 0}, HEADER, {"run": 1}]
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


@pytest.mark.parametrize("torn", ["{", '{"torn'])
def test_a_torn_line_is_ended_first(out, torn):
    out.write_text(torn)
    file = opened(out)
    file.write({"n": 1})
    file.close()
    assert out.read_text().split("\n")[0] == torn
    assert [json.loads(line) for line in out.read_text().splitlines()[1:]] == [HEADER, {"n": 1}]


def test_a_full_file_is_renamed_and_none_is_written_over(out):
    out.with_name("mine.1.jsonl").write_text("older\n")
    file = opened(out, 120)
    for n in range(12):
        assert file.write({"n": n, "filled": "x" * 20}) is None
    file.close()
    assert out.with_name("mine.1.jsonl").read_text() == "older\n"
    parts = [*file.files, out]
    assert [path.name for path in parts[:2]] == ["mine.2.jsonl", "mine.3.jsonl"]
    assert all(path.stat().st_size <= 120 for path in parts)
    assert [line["n"] for path in parts for line in lines(path)[1:]] == list(range(12))
    assert all(lines(path)[0] == HEADER for path in parts)


def test_a_line_longer_than_a_file_may_be_has_a_file_of_its_own(out):
    file = opened(out, 100)
    for n in range(3):
        file.write({"n": n, "filled": "x" * 300})
    file.close()
    assert [len(lines(path)) for path in (*file.files, out)] == [2, 2, 2]


def test_where_no_new_file_can_be_begun_the_old_one_goes_on(out, monkeypatch):
    file = opened(out, 100)
    monkeypatch.setattr(os, "rename", refuse)
    troubles = [file.write({"n": n, "filled": "x" * 40}) for n in range(4)]
    file.close()
    assert [line.get("n") for line in lines(out)] == [None, 0, 1, 2, 3]
    assert str(troubles[-1]) == "no new file could be begun: No space left on device"


def refuse(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_disk_was_full_lines_are_whole_again(out, monkeypatch):
    file = opened(out)
    file.write({"n": 0})
    write = os.write
    monkeypatch.setattr(observations.os, "write", lambda file, data: write(file, data[:7]))
    with pytest.raises(OSError, match="the disk is full"):
        file.write({"n": 1})
    monkeypatch.setattr(observations.os, "write", refuse)
    with pytest.raises(OSError, match="No space left"):
        file.write({"n": 2})
    monkeypatch.setattr(observations.os, "write", write)
    file.write({"n": 3})
    file.close()
    assert lines(out) == [HEADER, {"n": 0}, {"n": 3}]


def test_each_line_is_one_write(out, monkeypatch):
    written, write = [], os.write
    monkeypatch.setattr(observations.os, "write", lambda file, data: (written.append(data), write(file, data))[1])
    file = opened(out)
    for n in range(2):
        file.write({"n": n})
    file.close()
    assert written == [b'{"kind":"observed"}\n', b'{"n":0}\n', b'{"n":1}\n']


def test_two_do_not_write_to_one_file(out):
    pytest.importorskip("fcntl")
    file = opened(out)
    with pytest.raises(UserError, match="another process writes to it"):
        opened(out)
    file.close()
    opened(out).close()


def test_only_a_file_will_do(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "missing/mine.jsonl", "nul\0"):
        with pytest.raises(UserError, match=r"--out: .*: cannot be written: "):
            opened(tmp_path / name)
