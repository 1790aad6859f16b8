"""``kvsim calibrate --from``: from the file of a benchmark to the times that runs take."""

import json

import pytest

from kvsim.costs.load_profile import load_profile
from tests.kvsim.cli.answers import complaint, succeeded
from tests.paths import DATA
from tests.worlds import command

pytestmark = pytest.mark.slow

FILES = DATA / "bench_files"
MINE = """
kind = "cpu"
memory_bytes = 25_000_000_000
bandwidth_gb_s = 20
tflops = 0.2
"""
LLAMA_BENCH = ("--model", "smollm2-135m", "--device", "mine.toml")
VLLM = ("--model", "smollm2-135m", "--device", "mine.toml", "--weights", "f32")
LENGTHS = ("--flags", "--input-len 256 --output-len 64 --batch-size 4")
TABLE = """
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes
| model                  |     size | params | backend | ngl |   test |               t/s |
| ---------------------- | -------: | -----: | ------- | --: | -----: | ----------------: |
| llama 8B Q4_K - Medium | 4.58 GiB | 8.03 B | CUDA    |  99 |  pp512 |   4700.42 ± 22.99 |
| llama 8B Q4_K - Medium | 4.58 GiB | 8.03 B | CUDA    |  99 |  tg128 |     132.64 ± 0.11 |

build: 71e74a3ac (6975)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of the user's own profiles, in an empty folder of work with a device."""
    monkeypatch.setenv("KVSIM_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(MINE)
    (tmp_path / "table.md").write_text(TABLE)
    return tmp_path / "profiles"


@pytest.mark.parametrize(
    ("file", "options", "tools"),
    [
        ("llama-bench.json", LLAMA_BENCH, "llama-bench b1"),
        ("llama-bench.jsonl", LLAMA_BENCH, "llama-bench b1"),
        ("llama-bench.csv", LLAMA_BENCH, "llama-bench b1"),
        ("llama-bench.md", LLAMA_BENCH, "llama-bench b1"),
        ("llama-batched-bench.txt", (*LLAMA_BENCH, "--weights", "q4_1"), "llama-batched-bench"),
        ("llama-batched-bench.jsonl", (*LLAMA_BENCH, "--weights", "q4_1"), "llama-batched-bench"),
        ("vllm-serve-1.json", VLLM, "vllm bench serve"),
        ("vllm-latency.json", (*VLLM, *LENGTHS), "vllm bench latency"),
        ("vllm-throughput.json", (*VLLM, *LENGTHS), "vllm bench throughput"),
        ("guidellm.json", VLLM, "GuideLLM 0.8.1"),
        ("aiperf.json", ("--model", "llama-3.1-8b"), "AIPerf 0.13.0"),
    ],
)
def test_every_form_corrects_a_profile(own, file, options, tools):
    done = command("calibrate", "--from", str(FILES / file), *options)
    assert done.returncode == 0
    (saved,) = own.iterdir()
    assert f"Saved {saved}. Use it with: kvsim run chat --model" in done.stdout
    profile = load_profile(str(saved))
    assert profile.corrected.by == f"{tools} ({file})"
    assert "No row tells of" in done.stdout
    assert f"corrected by {profile.corrected.rows} row" in done.stdout


def test_runs_find_the_corrected_times(own):
    before = command("run", "chat", "--model", "llama-3.1-8b", "--device", "rtx3090", "--weights", "q4_k_m", "--json")
    said = succeeded(command("calibrate", "--from", "table.md", "--model", "llama-3.1-8b"))
    assert "tg128   7.54 ms" in said
    assert (own / "rtx3090-llama-3.1-8b-q4_k_m-llamacpp.json").is_file()
    words = said.rsplit("Use it with: kvsim ", 1)[1].split()
    after = command(*words, "--json")
    first, second = json.loads(before.stdout), json.loads(after.stdout)
    assert "Times are estimated" in first["basis"]
    assert "corrected by 2 rows of llama-bench b6975 (table.md); each left out in turn" in second["basis"]
    assert first["tpot_s"]["mean"] != second["tpot_s"]["mean"]
    shown = succeeded(command("profile", "show", "rtx3090-llama-3.1-8b-q4_k_m-llamacpp"))
    assert "- No row of the benchmarks tells of attention of long prompts." in shown


def test_a_corrected_profile_is_not_corrected_again(own):
    ask = ("calibrate", "--from", "table.md", "--model", "llama-3.1-8b", "--json")
    first, second = (json.loads(succeeded(command(*ask)))["rows"] for _ in range(2))
    assert first == second


def test_several_files_are_read_as_the_shell_names_them(own):
    files = [str(FILES / name) for name in ("vllm-serve-1.json", "vllm-serve-4.json")]
    found = json.loads(command("calibrate", "--from", *files, *VLLM, "--json", "--out", "served.json").stdout)
    assert [row["where"] for row in found["rows"]] == [files[0], files[0], files[1]]
    assert load_profile("served.json").corrected.rows == 3
    assert not own.exists()


def test_rows_faster_than_the_device_are_said_to_be(own):
    (own.parent / "table.md").write_text(TABLE.replace("132.64", "532.64"))
    done = command("calibrate", "--from", "table.md", "--model", "llama-3.1-8b")
    assert done.returncode == 0
    assert "warning: 1 of 2 rows are faster than NVIDIA GeForce RTX 3090 can be with weights in q4_k_m" in done.stdout


def test_what_contradicts_the_file_is_refused_and_nothing_is_written(own):
    ask = ("calibrate", "--from", "table.md")
    assert "say by --model which model this is" in complaint(command(*ask))
    assert "not of qwen3-8b, which has 8.19 B parameters; it may be llama-3-8b or llama-3.1-8b" in complaint(
        command(*ask, "--model", "qwen3-8b")
    )
    of_llama = (*ask, "--model", "llama-3.1-8b")
    assert "timed on NVIDIA GeForce RTX 3090, not on rtx4090" in complaint(command(*of_llama, "--device", "rtx4090"))
    assert "--weights is q8_0, but the rows are of q4_k_m" in complaint(command(*of_llama, "--weights", "q8_0"))
    assert "--engine is vllm, but the rows are of llamacpp" in complaint(command(*of_llama, "--engine", "vllm"))
    assert "no engine called 'sglang'" in complaint(command(*of_llama, "--engine", "sglang"))
    assert "--url: means nothing beside --from" in complaint(command(*of_llama, "--url", "http://127.0.0.1:1"))
    assert "a file whose name ends in .json is expected" in complaint(command(*of_llama, "--out", "here"))
    assert not own.exists()


def test_options_of_benchmarks_go_with_files_of_benchmarks(own):
    assert "--device: only with --from" in complaint(command("calibrate", "--device", "rtx3090"))
    assert "table.md: a file means something only after --from" in complaint(command("calibrate", "table.md"))
    assert "none.json: cannot be read" in complaint(command("calibrate", "--from", "none.json", "--model", "tiny"))
