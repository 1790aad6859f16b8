"""``kvsim profile``, and ``--model`` and ``--device`` wherever a scenario is served."""

import json

import pytest

from tests.kvsim.calibration.published.layer_table_files import write_tables
from tests.kvsim.cli.answers import complaint
from tests.worlds import command

pytestmark = pytest.mark.slow

ON_4090 = ("--model", "llama-3.1-8b", "--device", "rtx4090")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of the user's own profiles, in an empty folder of work."""
    monkeypatch.setenv("KVSIM_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "profiles"


def test_profiles_are_listed_and_shown(own):
    listed = json.loads(command("profile", "list", "--json").stdout)
    assert {"default", "rtx4090-llama-3.1-8b", "h100_sxm-qwen3-14b", "rtxpro6000-qwen3-32b-tp2"} <= set(listed)
    shown = command("profile", "show", "rtxpro6000-qwen3-32b-tp2").stdout
    assert "licence MIT" in shown
    assert "16 GB/s in each direction" in shown
    assert "Not measured: moves of cells" in shown
    assert "a prompt of 2,048 tokens" in shown


def test_imported_tables_serve_their_model_on_their_device(own, tmp_path):
    folder = write_tables(tmp_path / "tables", model="meta-llama/Llama-2-7b-hf")
    before = command("run", "chat", "--model", "llama-2-7b", "--device", "rtx4090", "--requests", "20").stdout
    assert before.startswith("Times are estimated: llama-2-7b on rtx4090 under vLLM")
    done = command("profile", "import", str(folder), "--source", "us", "--licence", "CC0")
    assert done.returncode == 0
    assert "Source: us of 2026-08-17 (licence CC0)." in done.stdout
    assert sorted(path.name for path in own.iterdir()) == ["rtx4090-llama-2-7b.json", "rtx4090-llama-2-7b.png"]
    assert "rtx4090-llama-2-7b *" in command("profile", "list").stdout
    printed = command("run", "chat", "--model", "llama-2-7b", "--device", "rtx4090", "--requests", "20").stdout
    assert printed.startswith("Times are those of profile rtx4090-llama-2-7b: model llama-2-7b on rtx4090 under vllm")
    assert "20 of 20 requests completed" in printed


def test_a_fault_in_a_table_leaves_nothing_behind(own, tmp_path):
    folder = write_tables(tmp_path / "tables")
    text = (folder / "per_sequence.csv").read_text().splitlines()
    text[2] = text[2].rsplit(",", 1)[0] + ",-4"
    (folder / "per_sequence.csv").write_text("\n".join(text))
    said = complaint(command("profile", "import", str(folder)))
    assert "per_sequence.csv: row 3: time_us is -4" in said
    assert not own.exists()


def test_the_name_of_the_file_must_be_that_of_a_profile(own, tmp_path):
    folder = write_tables(tmp_path / "tables")
    assert "ends in .json" in complaint(command("profile", "import", str(folder), "--out", "profile.txt"))


@pytest.mark.parametrize(
    "words",
    [
        ("run", "chat", "--requests", "20"),
        ("compare", "chat", "-p", "vllm", "-p", "ring", "--requests", "20"),
        ("why", "chat", "-p", "vllm"),
        ("sweep", "small.toml", "--requests", "20"),
    ],
    ids=lambda words: words[0],
)
def test_any_scenario_is_served_by_a_model_on_a_device(own, tmp_path, words):
    (tmp_path / "small.toml").write_text('scenario = "chat"\npolicies = ["vllm"]\n[axes]\n"workload.rate" = [4.0]\n')
    done = command(*words, *ON_4090)
    assert done.returncode == 0, done.stderr
    assert "profile rtx4090-llama-3.1-8b: model llama-3.1-8b on rtx4090 under vllm 0.19.0" in done.stdout


def test_what_is_inferred_stands_before_the_table(own):
    printed = command("compare", "chat", "-p", "vllm", "-p", "ring", "-p", "contiguous", "--requests", "20", *ON_4090)
    line = (
        "inferred, not measured: attention of ring, contiguous, as the engine's own attention over the cells that are"
    )
    head = printed.stdout.split("policy  ", 1)[0]
    assert line in head
    assert "assumed on NVIDIA GeForce RTX 4090: " in head


def test_a_profile_of_a_device_cannot_be_run_on_a_real_engine(own):
    said = complaint(command("validate", "chat", "--profile", "rtx4090-llama-3.1-8b"))
    assert "kvsim validate --recorded" in said
