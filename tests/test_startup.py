"""Which packages a command loads: one that simulates nothing loads none of the slow ones.

Times are not asserted here; ``python -m benchmarks.startup`` measures them.
"""

import ast
import json

import pytest

import kvsim
import workloads
from benchmarks.startup import sign_interval
from kvsim.cli.app import COMMANDS, LazyCommand, app
from kvsim.cli.commands import record
from tests.paths import ROOT
from tests.worlds import python

SLOW = {"pandas", "scipy", "matplotlib", "seaborn", "joblib", "jinja2", "tokenizers", "gguf", "sqlite3", "real_engine"}
"""Packages that a command loads only if it uses them; each takes from 20 ms to a second."""
SIMULATION = {"simpy", "kvsim.simulation", "kvsim.experiments", "kvsim.engines", "kvsim.calibration"}
SIMULATION |= {"kvsim.reports.style", "kvsim.reports.page"}
SECTIONS = {"numpy", "policies", "workloads", "kvsim.scenario.scenario"}

NOTHING = SLOW | SIMULATION | SECTIONS
RUN = SLOW | {"kvsim.experiments", "kvsim.engines", "kvsim.costs.fitting"}
LIGHT = [
    (["--version", "questions", "questions slow"], NOTHING | {"rich"}),
    (
        [
            *("--help", *(f"{command} --help" for command in COMMANDS), "workload fit --help"),
            *("workload list", "workload show azure-conv", "scenario list"),
            *("plan --list", "plan --model llama-3.1-8b --memory 80GB"),
        ],
        NOTHING,
    ),
    (
        ["scenario show identical"],
        SLOW | SIMULATION | {"rich", "kvsim.costs.profile", "policies.layouts.unified", "workloads.traces.azure"},
    ),
    (
        ["policies", "policies paged"],
        SLOW | SIMULATION | {"workloads", "kvsim.scenario.scenario", "policies.layouts.unified"},
    ),
    (["run identical"], RUN | {"rich.progress"}),
    (["run identical --json"], RUN | {"rich"}),
]
"""Commands, and what none of them must load."""
TELL = """
import io, json, sys
from contextlib import redirect_stdout, suppress
told = {}
for command in COMMANDS:
    sys.argv = ["kvsim", *command.split()]
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        from kvsim.cli.app import main
        main()
    told[command] = [*sys.modules]
print(json.dumps(told))
"""


def modules_of(commands, folder):
    """The modules that are loaded when each of some commands has run, one after the other in a new process."""
    done = python("-c", f"COMMANDS = {commands!r}\n{TELL}", folder=folder)
    assert done.returncode == 0, done.stderr
    return {command: set(modules) for command, modules in json.loads(done.stdout).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("commands", "slow"), LIGHT, ids=lambda given: given[0] if isinstance(given, list) else "")
def test_light_commands_do_not_load_what_they_do_not_use(commands, slow, tmp_path):
    for command, modules in modules_of(commands, tmp_path).items():
        assert modules & slow == set(), command


@pytest.mark.slow
def test_what_a_command_loads_is_seen(tmp_path):
    """The control: a command that needs the simulation loads it."""
    assert modules_of(["run identical"], tmp_path)["run identical"] >= {
        "kvsim.simulation.run",
        "simpy",
        "rich",
        "numpy",
    }


# The commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_the_command_itself_says(name):
    context = app.commands[name].make_context(name, [], resilient_parsing=True)
    assert context.command.name == name
    assert not isinstance(context.command, LazyCommand)
    assert context.command.help.partition("\n\n")[0] == COMMANDS[name]


def test_completion_lists_commands_and_their_options():
    context = app.make_context("kvsim", [], resilient_parsing=True)
    assert {item.value for item in app.shell_complete(context, "re")} == {"recommend", "report", "record"}
    _, command, _ = app.resolve_command(context, ["run"])
    inner = command.make_context("run", [], parent=context, resilient_parsing=True)
    assert {item.value for item in inner.command.shell_complete(inner, "--sk")} == {"--skip-bad-rows"}


def test_help_names_every_choice():
    """Help is written without loading the modules that know the choices."""
    from kvsim.advice.recommend.candidates import ENGINES as RECOMMENDED
    from kvsim.costs.memory_settings import PLAN_ENGINES
    from kvsim.engines.recordings.conformance import ENGINES as RECORDED
    from workloads import KINDS

    def help_of(name, parameter, *path):
        command = app.commands[name].make_context(name, [], resilient_parsing=True).command
        for part in path:
            command = command.commands[part]
        (found,) = (p.help for p in command.params if p.name == parameter)
        return found

    choices = {
        help_of("recommend", "engine"): RECOMMENDED,
        help_of("plan", "engine"): PLAN_ENGINES,
        help_of("conform", "engine"): RECORDED,
        help_of("record", "engine"): record.RECORDED,
        help_of("workload", "kind", "describe"): KINDS,
    }
    for text, names in choices.items():
        assert all(name in text for name in names), text


# The public names


@pytest.mark.parametrize("package", [kvsim, workloads])
def test_the_public_names_are_those_that_type_checkers_see(package):
    seen = {}
    for node in ast.parse((ROOT / package.__name__ / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If):
            for line in node.body:
                seen.setdefault(line.module, set()).update(alias.asname for alias in line.names)
    assert seen == {module: set(names) for module, names in package._PUBLIC.items()}
    assert set(package.__all__) == {name for names in seen.values() for name in names}


def test_the_former_name_of_load_scenario():
    assert kvsim.load is kvsim.load_scenario


# The benchmark


@pytest.mark.parametrize(
    ("values", "interval"),
    [([3.0], (3.0, 3.0)), ([2.0, 1.0, 3.0], (1.0, 3.0)), (range(1, 7), (1, 6)), (range(1, 11), (2, 9))],
)
def test_the_interval_of_a_median(values, interval):
    """Six values are the fewest whose range is a 95 % interval; of ten, the second and the ninth are its ends."""
    assert sign_interval(list(values)) == interval
