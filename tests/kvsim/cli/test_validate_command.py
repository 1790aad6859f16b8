"""``kvsim validate --recorded`` of recordings with steps, and ``--url``."""

import json
from shutil import copytree

import pandas as pd
import pytest

from tests.kvsim.cli.answers import complaint
from tests.kvsim.engines.live.fake_server import fake_server
from tests.kvsim.engines.recordings import changed, write
from tests.kvsim.engines.recordings.stepped_servers import KNOWN, LLAMA, Asked, asked, llama_recording
from tests.worlds import command

SMALL = """
[workload]
kind = "poisson"
rate = 200.0
requests = 12
prompt_tokens = { kind = "fixed", value = 12 }
output_tokens = { kind = "fixed", value = 4 }
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Recordings of equal requests: twice under some settings, once under others; and one without times."""
    folder = tmp_path_factory.mktemp("recordings")
    narrow = {**LLAMA, "flags": [*LLAMA["flags"][:2], "-np", "1", "-c", "2048", "-ub", "64", "--cache-ram", "0"]}
    write(folder / "a.jsonl", llama_recording(Asked(asked(20))))
    write(folder / "b.jsonl", llama_recording(Asked(asked(20), pace=lambda _: 1.2)))
    write(folder / "c.jsonl", llama_recording(Asked(asked(20)), narrow))
    write(folder / "untimed.jsonl", changed(llama_recording(Asked(asked(2))), 0, lambda m: m.update(timed=False)))
    KNOWN.save(folder / "known.json")
    (folder / "small.toml").write_text(SMALL)
    return folder


@pytest.fixture
def files(recordings, tmp_path, monkeypatch):
    """A copy of the recordings to be in."""
    monkeypatch.chdir(tmp_path)
    return copytree(recordings, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
def test_steps_pace_spread_and_ranking_are_told(files):
    done = command(
        "validate", "--recorded", "a.jsonl", "b.jsonl", "c.jsonl", "untimed.jsonl", "--profile", "known.json"
    )
    assert done.returncode == 0
    assert done.stderr == (
        "warning: untimed.jsonl: its times mean nothing (timed is false); kvsim conform compares its decisions\n"
    )
    told = " ".join(done.stdout.split())
    assert "a: llama-server 0.6.0-dev" in told
    assert "they take 1.00 to 1.00 times what the profile says" in told
    assert "they take 1.20 to 1.20 times what the profile says" in told
    assert (
        "Within 5% at P50 and 10% at P99 (or within what a and b, the same requests again, differ by): all are" in told
    )
    assert told.count("Predicted and measured order: Kendall's tau 1.00") == 2
    assert "no two that differ by more than the runs do are ranked wrong" in told
    table = pd.read_csv(files / "results" / "recorded-servers" / "recorded.csv")
    assert set(table["file"]) == {"a", "b", "c"}
    assert {"unpaced", "spread", "within"} <= set(table.columns)


@pytest.mark.slow
def test_a_run_alone_says_that_its_spread_is_not_known(files):
    done = command("validate", "--recorded", "a.jsonl", "--profile", "known.json", "--bound", "0.01")
    told = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "no requests were sent twice, so how much the server itself strays is not known): all are" in told
    assert "Kendall" not in told
    assert "run to run" not in told


@pytest.mark.slow
def test_what_is_outside_its_bound_is_named(files):
    """Half a second that no step explains, before half of the first tokens."""
    lines = llama_recording(Asked(asked(20)))
    for line in lines:
        if line["type"] == "request" and line["id"] % 2:
            line["token_s"] = [at + 0.5 for at in line["token_s"]]
    write(files / "late.jsonl", lines)
    done = command("validate", "--recorded", "late.jsonl", "--profile", "known.json", "--bound", "0.01")
    assert done.returncode == 1
    assert "the largest error" in done.stderr
    assert "not TTFT p50, TTFT p99, " in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recorded", "untimed.jsonl"], "untimed.jsonl: its times mean nothing"),
        (["--recorded", "missing.jsonl"], "missing.jsonl"),
        (["--recorded", "a.jsonl", "--url", "http://127.0.0.1:9"], "--url means nothing beside --recorded"),
        (["small.toml", "--flags", "-np 2"], "--flags: only with --url"),
        (["small.toml", "--url", "http://127.0.0.1:9", "--engine", "numpy"], "--engine means nothing beside --url"),
        (["small.toml", "--url", "http://127.0.0.1:9", "--flags", "-a", "--flags", "-b"], "2 given for 1 server"),
        (["small.toml", "--url", "http://127.0.0.1:9", "--profile", "known.json"], "cannot be reached"),
        (["small.toml", "--url", "http://192.0.2.1:1", "--profile", "known.json"], "--allow-remote"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(files, arguments, says):
    assert says in complaint(command("validate", *arguments))


@pytest.mark.slow
def test_a_server_is_asked_in_turns(files):
    KNOWN.model_copy(update={"model": "fake.gguf"}).save("of-fake.json")
    with fake_server(token_s=0.005) as server:
        done = command("validate", "small.toml", "--url", server.url, "--profile", "of-fake.json", "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert [each["requests"] for each in told["recordings"]] == [12, 12]
    names = [run["file"].rsplit("/", 1)[-1] for run in told["runs"]]
    assert [name.rpartition(".turn")[2] for name in names] == ["1.jsonl.gz", "2.jsonl.gz"]
    assert all(len(run["spread_of"]) == 2 for run in told["runs"])
