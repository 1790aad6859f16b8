"""Policies and schedulers of others are held to their word as they run: a wrong one ends in a line that says what."""

import sys
from itertools import product

import numpy as np
import pytest

from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run
from kvsim.simulation.schedulers import SCHEDULERS
from policies import plugins, registry
from policies.checked import CheckedPolicy
from policies.layouts.unified import UnifiedPolicy
from tests.docs.pages import blocks
from tests.worlds import command


class Altered(UnifiedPolicy):
    """Right, but for what a subclass alters in the micro-batches that it gives."""

    def __init__(self, config):
        super().__init__("mine", config)

    def allocate(self, step, *, views=False):
        return self.alter(super().allocate(step, views=views))

    def alter(self, batches):
        return batches

    def with_cells(self, batches, change):
        return tuple(b._replace(places=(b.places[0]._replace(cells=change(b.cells)),)) for b in batches)


class OneCellForAll(Altered):
    def alter(self, batches):
        return self.with_cells(batches, np.zeros_like)


class Outside(Altered):
    def alter(self, batches):
        return self.with_cells(batches, lambda cells: cells + self.capacity)


class MinusOne(Altered):
    def alter(self, batches):
        return self.with_cells(batches, lambda cells: cells * 0 - 1)


class NoCells(Altered):
    def alter(self, batches):
        return self.with_cells(batches, lambda cells: cells[:0])


class Nothing(Altered):
    def alter(self, batches):
        return ()


class NoAnswer(Altered):
    def alter(self, batches):
        return None


class NegativeReads(Altered):
    def alter(self, batches):
        return tuple(
            b._replace(places=(b.places[0]._replace(reads=b.reads._replace(scanned=-b.reads.scanned)),))
            for b in batches
        )


class NegativeCapacity(Altered):
    def __init__(self, config):
        super().__init__(config)
        self.capacity = -5


class NeverFrees(Altered):
    def free(self, seq, start=0, stop=None):
        pass


class Leaks(Altered):
    """Forgets a sequence, and keeps its cells."""

    def usage(self):
        return super().usage().__class__(self.capacity, 0, 0, -1, 1, self.capacity, 0)


class Exits(Altered):
    def alter(self, batches):
        sys.exit(0)


class Raises(Altered):
    def alter(self, batches):
        return batches[99]


class TellsOfOtherCells(Altered):
    """What it says of its cells is not what it gave."""

    def occupancy(self, group=0):
        found = super().occupancy(group)
        return type(found)(np.roll(found.position, 1), found.owners[-1:] + found.owners[:-1])

    def alter(self, batches):
        self.arena.position[:] = self.arena.position[::-1]
        return batches


class SharesUnlikeTexts(Altered):
    """Says that the second sequence sees a cell of the first."""

    def occupancy(self, group=0):
        found = super().occupancy(group)
        return type(found)(found.position, tuple(frozenset({0, 1}) if 0 in of else of for of in found.owners))


WRONG = {
    OneCellForAll: r"step 1: cell 0 is given to \d+ tokens at once$",
    Outside: r"step 1: cell \d+ is given, and there are cells 0 to \d+$",
    MinusOne: r"step 1: cell -1 is given, and there are cells 0 to \d+$",
    NoCells: r"step 1: 0 cells are given to \d+ tokens$",
    Nothing: r"step 1: 0 of \d+ tokens of sequence 0 were given a cell$",
    NoAnswer: r"step 1: allocate gave None; a tuple of micro-batches is expected$",
    NegativeReads: r"step 1: reads.scanned is \[-\d+\] for 1 chunks$",
    NegativeCapacity: r"step 0: capacity is -5; a whole number from 1 on is expected$",
    NeverFrees: r"step \d+: sequence 0 was given up, and still holds \d+ cells$",
    Leaks: r"step 1: usage\(\)\.placeable is -1$",
    TellsOfOtherCells: r"step 1: ",
    SharesUnlikeTexts: r"step \d: sequence 1 was given up, and still holds \d+ cells$",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_policy_ends_in_a_line_that_says_what_is_broken(wrong):
    with pytest.raises(UserError, match=rf"policy 'mine', {WRONG[wrong]}") as refused:
        run(load_scenario("chat", workload__requests=5, server__scheduler="vllm"), wrong)
    assert len(str(refused.value).splitlines()) == 1


MINE = """
import sys
from policies.layouts.unified import UnifiedPolicy

class Mine(UnifiedPolicy):
    def __init__(self, config):
        super().__init__("mine", config)

    def allocate(self, step, *, views=False):
        INSTEAD

POLICIES = {"mine": Mine}
"""
SCHEDULER = next(block for block in blocks("add-a-scheduler.md", "python") if "SCHEDULERS" in block)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder; what was loaded from files is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(registry, "FILES", {})
    monkeypatch.setattr(plugins, "FILES", registry.FILES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("instead", "line"),
    [
        ("sys.exit(0)", "mine.py:10: SystemExit: 0 (policy 'mine', step 1)"),
        ("raise KeyError('x')", "mine.py:10: KeyError: 'x' (policy 'mine', step 1)"),
        ("return ()", "mine.py:5: policy 'mine', step 1: 0 of 58 tokens of sequence 7 were given a cell"),
    ],
)
def test_the_command_ends_with_2_and_one_line(instead, line, folder):
    (folder / "mine.py").write_text(MINE.replace("INSTEAD", instead))
    done = command("run", "chat", "--requests", "5", "-p", "mine", "--plugin", "mine.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr.replace("\n", "")


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("min(job.tokens - job.computed, room)", "job.tokens - job.computed + 1000", "1058 tokens are composed; 256"),
        ("Chunk(slot, job.computed, n)", "Chunk(slot + 7, job.computed, n)", "slot 7 is in the step, and no request"),
        ("Chunk(slot, job.computed, n)", "Chunk(slot, 0, n)", "slot 0 is to go on at position 0, and holds"),
    ],
)
def test_a_wrong_scheduler_ends_in_a_line(right, wrong, line, folder):
    assert right in SCHEDULER
    (folder / "mine.py").write_text(SCHEDULER.replace(right, wrong))
    done = command("run", "chat", "--requests", "5", "--scheduler", "shortest-first", "--plugin", "mine.py")
    assert done.returncode == 2
    assert f"scheduler 'shortest-first', step {'1' if 'holds' not in line else '2'}: {line}" in done.stderr


# What is right passes, and is the same


EACH = {
    *product(["contiguous", "paged"], SCHEDULERS),
    *product(["streams", "ring", "two-level-pages", "h2o", "vllm"], ["vllm", "llama-server"]),
}
"""Layouts of either kind under every scheduler, all others under one of each engine."""


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "scheduler"), sorted(EACH))
def test_what_is_right_passes_and_changes_nothing(policy, scheduler):
    asked = load_scenario(
        "chat", server__scheduler=scheduler, workload__requests=4, workload__rate=100.0, cache__cells=1024
    )
    looked_at, as_it_is = [run(asked, policy, check=check) for check in (True, False)]
    del looked_at.summary["wall_s"], as_it_is.summary["wall_s"]
    assert looked_at.summary == as_it_is.summary


def test_a_preset_is_not_looked_at_unless_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(CheckedPolicy, "__init__", None)
    run(load_scenario("chat", workload__requests=3), "paged")
    with pytest.raises(TypeError):
        run(load_scenario("chat", workload__requests=3), "paged", check=True)
