"""The smallest complete policy: the required methods alone, under every scheduler and held to every rule."""

from functools import partial

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvsim
from policies import CacheConfig, CellMap, Chunk, Group, MicroBatch, NoSlot, Place, Policy, Unsupported, View, plugins
from policies.cells.reads import reads_of
from policies.vocabulary import split_batch
from tests.policies.invariants.rules import CacheMachine
from tests.policies.invariants.subjects import SETTINGS, FakeEntryPoint


class LowestFree(Policy):
    """Each token takes the lowest free cell, and attention gathers a sequence's own cells."""

    name = "lowest-free"

    def __init__(self, config):
        self.capacity, self.groups, self.kernel = config.cells, (Group(config.cells),), config.kernel or "gather"
        self.n_ubatch = config.n_ubatch
        self.cells = {}
        """Each sequence's cells, in order of position."""

    def allocate(self, step, *, views=False):
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")
        free = np.flatnonzero(self.occupancy().position < 0)
        if len(free) < sum(chunk.n for chunk in step):
            raise NoSlot(f"{len(free)} of {self.capacity} cells are free")
        batches = []
        for chunks in split_batch(step, self.n_ubatch):
            taken, free = np.split(free, [sum(chunk.n for chunk in chunks)])
            ends = np.cumsum([chunk.n for chunk in chunks])[:-1]
            for chunk, own in zip(chunks, np.split(taken, ends), strict=True):
                self.cells[chunk.seq] = np.append(self.cells.get(chunk.seq, own[:0]), own)
            span = max(int(cells.max()) for cells in self.cells.values()) + 1
            reads = reads_of(self.kernel, chunks, self.cells.__getitem__, span)
            seen = tuple(View(self.cells[c.seq], np.arange(len(self.cells[c.seq]))) for c in chunks) if views else ()
            batches.append(MicroBatch(chunks, (Place(taken, reads, views=seen),)))
        return tuple(batches)

    def free(self, seq, start=0, stop=None):
        held = len(self.cells.get(seq, ()))
        if start >= held or (stop is not None and stop <= start):
            return
        if stop is not None and stop < held:
            raise Unsupported(f"{self.name}: only a sequence's tail can go, not [{start}, {stop})")
        self.cells[seq] = self.cells[seq][:start]
        if start == 0:
            del self.cells[seq]

    def occupancy(self, group=0):
        position, owners = np.full(self.capacity, -1), [frozenset()] * self.capacity
        for seq, cells in self.cells.items():
            position[cells] = np.arange(len(cells))
            for cell in cells.tolist():
                owners[cell] = frozenset({seq})
        return CellMap(position, tuple(owners))


def test_it_has_the_required_methods_alone():
    own = {name for name in vars(LowestFree) if callable(getattr(LowestFree, name)) and not name.startswith("_")}
    assert own == Policy.__abstractmethods__
    assert len(own) <= 10


@pytest.mark.parametrize("scheduler", ["llama-server", "llama-server-b4875", "vllm", "static"])
def test_every_scheduler_serves_all_requests_with_it(scheduler, monkeypatch):
    mine = FakeEntryPoint(LowestFree.name, LowestFree)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [mine] if group == plugins.ENTRY_POINT_GROUP else [])
    scenario = kvsim.load("chat", workload__requests=20, server__scheduler=scheduler)
    result = kvsim.run(scenario, LowestFree.name, detail="tables")
    assert result.summary["policy"] == LowestFree.name
    assert (result.summary["completed"], result.summary["failed"]) == (20, 0)
    assert result.cache["stored"].max() > 0


@pytest.mark.slow
def test_it_passes_the_invariants():
    quick = settings(SETTINGS, max_examples=50, phases=[Phase.generate])
    run_state_machine_as_test(partial(CacheMachine, LowestFree), settings=quick)


def test_its_usage_is_counted_from_its_cells():
    policy = LowestFree(CacheConfig(cells=16))
    for seq in range(3):
        policy.allocate([Chunk(seq, 0, 3)])
    policy.free(1)
    usage = policy.usage()
    assert (usage.stored, usage.allocated, usage.free, usage.placeable) == (6, 6, 10, 10)
    assert (usage.free_extents, usage.largest_free_extent, usage.span) == (2, 7, 9)
    assert (policy.sequences(), policy.first_owners().tolist()) == ([0, 2], [0] * 3 + [-1] * 3 + [2] * 3 + [-1] * 7)
