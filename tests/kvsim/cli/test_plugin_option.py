"""Policies of one's own on the command line: from a file, from a package that is broken, and with faults in them."""

import json
import sys

import pytest

from policies import plugins
from tests.docs.pages import blocks
from tests.policies.invariants.subjects import FakeEntryPoint
from tests.worlds import command, python

PAGE = next(block for block in blocks("add-a-policy.md", "python") if "(Policy)" in block)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """A folder to be in; what was loaded from files is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(PAGE)


def test_a_file_serves_run_and_policies():
    done = command("run", "chat", "--requests", "5", "-p", "lowest-cell", "--plugin", "mine.py", "--json")
    assert json.loads(done.stdout)["policy"] == "lowest-cell"
    done = command("policies", "--plugin", "mine.py")
    assert "lowest-cell" in done.stdout.partition("schedulers")[0]
    assert "mine.py" in done.stdout
    told = json.loads(command("policies", "lowest-cell", "--plugin", "mine.py", "--json").stdout)
    assert told["source"].startswith("plug-in ")
    assert "mine.py" in told["source"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_file_serves_compare_and_its_report(tmp_path):
    done = command("compare", "chat", "--requests", "20", "-p", "lowest-cell", "-p", "paged", "--plugin", "mine.py")
    assert done.returncode == 0, done.stderr
    version = plugins.available()["lowest-cell"].origin.version
    assert f"plug-ins: lowest-cell from {tmp_path}/mine.py {version}" in done.stdout.replace("\n", "")
    assert command("report", "results/chat").returncode == 0
    page = (tmp_path / "results" / "chat" / "report.html").read_text(encoding="utf-8")
    assert f"plug-ins: lowest-cell from {tmp_path}/mine.py {version}" in page
    assert f"--policy paged --plugin {tmp_path}/mine.py" in page
    assert (
        command("why", "chat", "--requests", "20", "-p", "lowest-cell", "--plugin", "mine.py", "--json").returncode == 0
    )


SWEEP = """
scenario = "chat"
policies = ["lowest-cell", "paged"]
[axes]
"cache.cells" = [1024, 2048]
"""


@pytest.mark.slow
def test_a_file_serves_a_sweep_in_other_processes(tmp_path):
    (tmp_path / "small.toml").write_text(SWEEP)
    arguments = ["sweep", "small.toml", "--requests", "20", "--plugin", "mine.py", "--json", "--workers"]
    there = python("-m", "kvsim", *arguments, "2", folder=tmp_path)
    assert there.returncode == 0, there.stderr
    here = command(*arguments, "1", "--out", "here.sqlite")
    one, other = (json.loads(done.stdout) for done in (there, here))
    assert one["failed"] == 0
    assert one["points"] == other["points"]
    assert [each["policy"] for each in one["plugins"]] == ["lowest-cell"]


@pytest.mark.slow
@pytest.mark.usefixtures("brief_search")
def test_recommend_says_that_it_does_not_search_plug_ins():
    options = ["--scenario", "chat", "--slo", "ttft_p95<1s", "--requests", "10", "--engine", "vllm", "--workers", "1"]
    done = command("recommend", *options, "--plugin", "mine.py", "--json")
    assert done.returncode == 0, done.stderr
    assert "lowest-cell" in json.loads(done.stdout)["searched"]["policies_left_out"]


RUN = ["run", "chat", "--requests", "5", "-p", "lowest-cell", "--plugin", "mine.py"]
COMPARE = ["compare", "chat", "--requests", "5", "-p", "lowest-cell", "--plugin", "mine.py", "--json"]


@pytest.mark.parametrize("arguments", [RUN, COMPARE], ids=["run", "compare"])
@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ("import heapq", "import heapqueue", "import heapqueue", "ModuleNotFoundError: No module named 'heapqueue'"),
        ("def allocate(self", "def allocate(self(", "def allocate(self(", "SyntaxError: "),
        ("self.tables = {}", "self.tables = {}[0]", "self.tables = {}[0]", "KeyError: 0"),
        ("heapq.heappop(self.free_cells)", "heapq.pop(self.free_cells)", "heapq.pop", "AttributeError: module 'heapq'"),
        ("def usage(self)", "def usage(self, when)", "class LowestCell", "TypeError: "),
        ("return MicroBatch(", "return (", "class LowestCell", "policy 'lowest-cell', step 1: allocate gave (("),
    ],
)
def test_a_fault_is_a_line_with_file_and_line(arguments, right, wrong, line, message, tmp_path):
    broken = PAGE.replace(right, wrong, 1)
    assert broken != PAGE
    (tmp_path / "mine.py").write_text(broken)
    done = command(*arguments)
    at = next(n for n, text in enumerate(broken.splitlines(), 1) if line in text)
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"kvsim: mine.py:{at}: "), told
    assert message in told


def test_a_missing_file_is_a_line():
    done = command("run", "chat", "--plugin", "gone.py")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("kvsim: gone.py: no such file; its POLICIES = ")


class Broken(FakeEntryPoint):
    """A package that cannot be imported."""

    def __init__(self):
        def load():
            raise ImportError("no torch\nhere")

        super().__init__("broken", None)
        self.load = load


def test_a_broken_package_is_left_out_of_every_command_with_a_line(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Broken()])
    done = command("run", "chat", "--requests", "5")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: plug-in 'broken' of tests.policies.invariants.subjects")
    assert line.endswith("ImportError: no torch")
    for arguments in (["run", "chat", "-p", "broken"], ["compare", "-p", "broken"], ["policies", "broken"]):
        done = command(*arguments)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == line.replace("warning: ", "kvsim: ")


@pytest.mark.slow
def test_workers_do_not_say_again_what_is_left_out(tmp_path):
    """In processes of their own, where the package is found by all."""
    told = tmp_path / "site" / "broken-1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[kvsim.policies]\nbroken = no_such_module:Policy\n")
    (tmp_path / "small.toml").write_text(SWEEP.replace("lowest-cell", "contiguous"))
    asked = ("sweep", "small.toml", "--requests", "20", "--workers", "2", "--json")
    done = python("-m", "kvsim", *asked, folder=tmp_path, path=[tmp_path / "site"])
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "warning: plug-in 'broken' of broken 1.0 is left out: "
        "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    ]
