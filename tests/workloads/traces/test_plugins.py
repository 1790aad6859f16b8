"""Readers that other packages register: the one of the documentation, and those that are left out."""

import re
import sys
from types import ModuleType

import pytest

from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.scenario.trace_files import trace_scenario
from tests.paths import ROOT
from tests.traces import lines, message_of
from workloads import AzureTrace, Request, WorkloadError, open_trace, sniff
from workloads.traces import kinds
from workloads.traces.kinds import ReaderWarning, others

PAGE = (ROOT / "docs" / "add-a-reader.md").read_text(encoding="utf-8")
ROW = '{"ms": %d, "in": %d, "out": %d, "status": %d}'
GOOD = (ROW % (1000, 5, 2, 200), ROW % (1500, 7, 3, 200), ROW % (2250, 9, 0, 503))


class Point:
    """An entry point."""

    def __init__(self, name, loaded):
        self.name, self.loaded = name, loaded

    def load(self):
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def register(monkeypatch, *points):
    monkeypatch.setattr(kinds, "entry_points", lambda group: points if group == "kvsim.readers" else [])


@pytest.fixture
def reader(monkeypatch):
    """The reader on the page, registered as the page says."""
    module = ModuleType("gateway")
    monkeypatch.setitem(sys.modules, "gateway", module)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "gateway.py", "exec"), vars(module))
    (kind, name) = re.search(r'"kvsim\.readers"\]\n(\w+) = "gateway:(\w+)"', PAGE).groups()
    assert kind == "gateway"
    register(monkeypatch, Point(kind, vars(module)[name]))


def test_the_reader_on_the_page_reads_what_the_page_says(reader, write):
    path = write(lines(*GOOD), "calls.jsonl")
    assert sniff(path) == "gateway"
    trace = open_trace(path)
    assert list(trace) == list(trace) == [Request(0, 0.0, 5, 2), Request(1, 0.5, 7, 3)]
    assert trace.notes == (f"{path}: 1 failed call dropped: row 3",)
    assert [r.prompt_tokens for r in trace_scenario(path, limit=1).build_workload()] == [5]


def test_a_scenario_names_it_and_its_options_and_survives_its_own_file(reader, write):
    write(lines(*GOOD), "calls.jsonl")
    section = re.search(r"    \[workload\]\n(    .*\n)*", PAGE)[0].replace("\n    ", "\n").lstrip()
    scenario = load_scenario(write(section.encode(), "mine.toml"))
    assert scenario.build_workload().n_requests == 2
    text = scenario.to_toml()
    assert load_scenario(write(text.encode(), "again.toml")).to_toml() == text
    more = write(section.replace("least = 2", "least = 3").encode(), "more.toml")
    with pytest.raises(WorkloadError, match="row 1: out 2 is out of range; expected 3 or more"):
        load_scenario(more).build_workload()
    wrong = write(section.replace("least", "leats").encode(), "wrong.toml")
    with pytest.raises(WorkloadError, match=r"leats: a trace of kind gateway has no such option; accepted: .*least"):
        load_scenario(wrong).build_workload()
    with pytest.raises(UserError, match=r"workload\.optoins: unknown key; did you mean 'options'"):
        load_scenario(write(section.replace("options", "optoins").encode(), "key.toml"))


BAD = {
    "status": (ROW % (2300, 1, 1, 42), "status 42 is out of range; expected 100 to 599"),
    "no answer": (ROW % (2300, 1, 0, 200), "out 0 is out of range; expected 1 or more"),
    "back in time": (ROW % (100, 1, 1, 200), "ms 100 is earlier than the row before"),
}


@pytest.mark.parametrize(("bad", "what"), BAD.values(), ids=BAD)
def test_a_bad_row_is_refused_by_its_number_or_left_out(reader, write, bad, what):
    path = write(lines(*GOOD, bad), "calls.jsonl")
    with pytest.raises(WorkloadError) as fault:
        open_trace(path)
    assert message_of(fault) == f"{path}: row 4: {what}"
    assert open_trace(path, skip_bad_rows=True).n_requests == 2


LEFT_OUT = {
    "no reader": (Point("mine", 3), "a subclass of workloads.api.Trace is expected, got 3"),
    "another's kind": (Point("azure", AzureTrace), "'azure' is a kind of trace already"),
    "no name": (Point("a b", AzureTrace), "letters, digits and any of . _ + @ - are accepted in its name"),
    "broken": (Point("mine", ImportError("no\nway")), "it cannot be imported: ImportError: no"),
}


@pytest.mark.parametrize(("point", "why"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_reader_that_cannot_be_used_is_left_out_with_a_warning(monkeypatch, point, why):
    register(monkeypatch, point, Point("of-azure", AzureTrace))
    with pytest.warns(ReaderWarning) as warned:
        assert others({"azure"}) == {"of-azure": AzureTrace}
    assert [str(each.message) for each in warned] == [f"reader {point.name!r} is left out: {why}"]


def test_an_unknown_kind_lists_those_that_are_registered(reader, write):
    with pytest.raises(WorkloadError, match=r"no kind of trace is called 'gatewya'; accepted: azure, .*, gateway"):
        open_trace(write(b"x"), "gatewya")
    with pytest.raises(UserError, match=r"no kind called 'gatewya'") as fault:
        load_scenario({"name": "x", "workload": {"kind": "gatewya", "path": "x"}})
    assert "registered" not in str(fault.value)
