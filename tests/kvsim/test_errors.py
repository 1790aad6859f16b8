"""What is said of a name that does not exist."""

import pytest

from kvsim.errors import choices, did_you_mean, no_such, unknown
from tests.worlds import command

NAMES = ("contiguous", "paged", "paged-window", "llama.cpp-b4666", "llama.cpp-b6975")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("pagd", "did you mean 'paged'?"),
        ("Paged", "did you mean 'paged'?"),
        ("paged-windw", "did you mean 'paged-window'?"),
        ("llama.cpp", "did you mean 'llama.cpp-b4666' or 'llama.cpp-b6975'?"),
        ("", ""),
        ("x" * 10_000, ""),
        ("oracle", ""),
    ],
)
def test_the_names_that_may_have_been_meant(given, hint):
    assert did_you_mean(given, NAMES) == hint


def test_sentences():
    assert no_such("policy", "pagd", ["paged", "ring"]) == (
        "no policy called 'pagd'; did you mean 'paged'? There are paged, ring"
    )
    assert no_such("engine", "x", ["llamacpp"]) == "no engine called 'x'; there is llamacpp"
    assert choices("x", ["a b", "c d"]) == "there are a b, c d"
    assert unknown("section", "cash", ["cache"], ".cells") == "unknown section; did you mean 'cache.cells'?"
    assert unknown("key", "x", ["cells", "slots"]) == "unknown key; accepted: cells, slots"


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("comapre", "Did you mean 'compare'?"),
        ("scenario shwo", "Did you mean 'show'?"),
        ("run chta", "did you mean 'chat'?"),
        ("run chat -p pagd", "did you mean 'paged'?"),
        ("run chat --profile defualt", "did you mean 'default'?"),
        ("policies vlm", "did you mean 'vllm'?"),
        ("compare chat -p pagd", "did you mean 'paged'?"),
        ("sweep no-sweep", "not a built-in sweep"),
        ("why chta", "did you mean 'chat'?"),
        ("prefix-cache chat -e lrru", "did you mean 'lru'?"),
        ("plan --model lama-3.1-8b", "did you mean 'llama-3.1-8b'"),
        ("plan --model phi-4 --engine vlm", "did you mean 'vllm'?"),
        ("plan --model phi-4 --cache-type-k q8", "did you mean 'q8_0'?"),
        ("plan --model phi-4 --weights q4_km", "did you mean 'q4_k_m'"),
        ("recommend --scenario chat --slo ttft_p95<1s --engine llama.cpp", "did you mean 'llamacpp'?"),
        ("calibrate --engine llama.cpp", "did you mean 'llamacpp'?"),
        ("calibrate --model smolm2", "did you mean 'smollm2'?"),
        ("conform lamacpp x", "did you mean 'llamacpp'?"),
        ("record llama-cpp chat", "did you mean 'llamacpp'?"),
        ("workload show azure-cov", "did you mean 'azure-conv'?"),
        ("workload describe azure-cov", "did you mean 'azure-conv'?"),
        ("memory --remedy quantised", "there are"),
    ],
)
def test_a_misspelt_name_on_the_command_line(line, meant):
    done = command(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert meant in done.stderr


def test_a_misspelt_option():
    done = command("compare", "chat", "--polcy", "paged")
    assert done.returncode == 2
    assert "--policy" in done.stderr


def test_a_misspelt_scheduler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('[server]\nscheduler = "vlmm"\n')
    assert command("run", "a.toml").stderr.startswith(
        "kvsim: a.toml: server.scheduler: no scheduler called 'vlmm'; did you mean 'vllm'? There are "
    )
