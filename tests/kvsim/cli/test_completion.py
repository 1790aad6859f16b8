"""What a shell offers, asked as its own completion script asks."""

import inspect

import pytest

from kvsim.cli import completion
from kvsim.cli.app import COMMANDS, app
from kvsim.costs.shipped import shipped_names
from kvsim.scenario.builtin import builtin_names
from policies import available
from tests.worlds import command, python


def offered(line, monkeypatch):
    """The completions of a line's last word."""
    words = line.split(" ")
    for name, value in {
        "_KVSIM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }.items():
        monkeypatch.setenv(name, value)
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_every_command_is_offered(monkeypatch):
    assert offered("kvsim ", monkeypatch) == [*COMMANDS]
    assert offered("kvsim re", monkeypatch) == [name for name in COMMANDS if name.startswith("re")]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("kvsim --v", ["--version"]),
        ("kvsim scenario ", ["show", "list"]),
        ("kvsim compare --max-f", ["--max-failed"]),
        ("kvsim run ", builtin_names()),
        ("kvsim scenario show ch", ["chat"]),
        ("kvsim run chat --policy ", [*available()]),
        ("kvsim compare -p paged -p pa", ["paged", "paged-window"]),
        ("kvsim policies vl", ["vllm"]),
        ("kvsim run --profile ", shipped_names()),
        ("kvsim run --detail ", ["requests", "cache"]),
        ("kvsim prefix-cache chat -e l", ["lru", "lfu"]),
        ("kvsim plan --engine ", ["llamacpp", "vllm"]),
        ("kvsim recommend --engine ", ["llamacpp", "vllm", "both", "any"]),
        ("kvsim calibrate --engine ", ["numpy", "llamacpp"]),
        ("kvsim conform ", ["llamacpp", "llama-server", "vllm", "router"]),
        ("kvsim record ", ["llamacpp", "router"]),
        ("kvsim plan --model phi-3-", ["phi-3-mini-4k", "phi-3-mini-128k"]),
        ("kvsim calibrate --model s", ["small", "smollm2"]),
        ("kvsim plan --cache-type-v q8", ["q8_0"]),
        ("kvsim memory --cache-type-v q8", ["q8_0"]),
        ("kvsim accuracy --weights ma", ["mapped"]),
        ("kvsim plan --weights q4_k_", ["q4_k_s", "q4_k_m"]),
        ("kvsim workload show azure-", ["azure-code", "azure-conv"]),
        ("kvsim workload describe azure-co", ["azure-code", "azure-conv"]),
        ("kvsim workload fit --kind ra", ["ragpulse"]),
        ("kvsim memory --remedy o", ["once"]),
        ("kvsim run no-such", []),
    ],
)
def test_values_are_offered(line, names, monkeypatch):
    assert offered(line, monkeypatch) == names


def test_all_places_of_names_are_there():
    offers = {name: offer for name, offer in vars(completion).items() if inspect.isfunction(offer) and name[0] != "_"}
    del offers["import_module"], offers["starting"]
    assert [name for name, offer in offers.items() if not offer("")] == []


def options(command, path=()):
    """All parameters of a command and of those in it."""
    for name, inner in getattr(command, "commands", {}).items():
        made = inner.make_context(name, [], resilient_parsing=True).command
        yield from options(made, (*path, name))
    for parameter in command.params:
        yield (*path, parameter.name), parameter


NAMED = {"policy", "scenario", "engine", "profile", "eviction", "cache_type_k", "cache_type_v", "weights", "remedy"}


def test_whatever_has_names_offers_them():
    """But for ``generate --model``: a built-in model without a vocabulary cannot write."""
    without = [path for path, parameter in options(app) if path[-1] in NAMED and not parameter._custom_shell_complete]
    assert without == []


def test_no_option_has_a_tuple_by_default():
    """As a comma behind the value of a field would make it; Typer takes it for several values."""
    assert [path for path, parameter in options(app) if isinstance(parameter.default, tuple)] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_that_a_shell_reads(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = python("-m", "kvsim", "--show-completion", shell)
    assert f"_KVSIM_COMPLETE=complete_{shell}" in done.stdout
