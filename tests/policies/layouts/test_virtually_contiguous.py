"""Sequences that are contiguous in virtual memory: what attention reads, and which passes wait for pages."""

import numpy as np
import pytest

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run
from kvsim.simulation.set_up import cost_model, profile_of
from kvsim.simulation.time_breakdown import SECONDS
from policies import CacheConfig, Chunk, OutOfCells, SequencePlan, Unsupported
from policies.layouts.virtually_contiguous import VirtuallyContiguousPolicy


def cache(pages=8, **config):
    config = {"n_ubatch": 64, "max_tokens": 64} | config
    return VirtuallyContiguousPolicy("mine", CacheConfig(cells=4 * pages, page_tokens=4, **config))


def mapped(policy, *chunks):
    return [batch.places[0].mapped for batch in policy.allocate(chunks)]


def test_a_prompt_waits_for_its_pages_and_a_generated_token_for_none():
    policy = cache()
    assert mapped(policy, Chunk(0, 0, 6)) == [2]
    assert [mapped(policy, Chunk(0, at, 1)) for at in (6, 7, 8)] == [[0], [0], [0]]
    assert len(policy.tables[0].blocks) == 3


def test_the_page_of_the_next_token_is_mapped_ahead_of_a_chunk_of_a_prompt():
    policy = cache()
    assert mapped(policy, Chunk(0, 0, 4)) == [1]
    assert mapped(policy, Chunk(0, 4, 10)) == [2]
    # Here the next token still has room on the last page, so that nothing was mapped ahead.
    assert mapped(policy, Chunk(0, 14, 6)) == [1]


def test_only_the_first_pass_of_a_step_waits():
    policy = cache(n_ubatch=4)
    assert mapped(policy, Chunk(0, 0, 6), Chunk(1, 0, 5)) == [4, 0, 0]


def test_the_next_sequence_of_a_slot_finds_its_pages_mapped():
    policy = cache()
    policy.allocate([Chunk(0, 0, 20)])
    cells = policy.occupancy().position.tolist()
    policy.free(0)
    assert policy.usage().allocated == 0
    assert mapped(policy, Chunk(0, 0, 20)) == [0]
    assert policy.occupancy().position.tolist() == cells
    policy.free(0)
    assert mapped(policy, Chunk(1, 0, 20)) == [5]


def test_a_sequence_is_read_as_one_run_however_its_pages_lie():
    policy = cache()
    policy.allocate([Chunk(0, 0, 4), Chunk(1, 0, 4)])
    reads = policy.allocate([Chunk(0, 4, 5), Chunk(1, 4, 1)])[0].reads
    assert (reads.scanned.tolist(), reads.useful.tolist(), reads.runs.tolist()) == ([9, 5], [9, 5], [1, 1])
    # The control: through a table it is read page by page.
    policy = cache(kernel="gather")
    assert policy.allocate([Chunk(0, 0, 9)])[0].reads.runs.tolist() == [3]


def test_no_page_is_shared():
    policy = cache()
    policy.allocate([Chunk(0, 0, 4)])
    with pytest.raises(Unsupported):
        policy.copy(0, 1)
    with pytest.raises(OutOfCells):
        policy.allocate([Chunk(1, 0, 40)])


def test_the_next_step_of_rows_waits_for_pages_that_nobody_came_to_use():
    policy = cache()
    policy.open(1, SequencePlan(8, 64, 20))
    policy.allocate([Chunk(0, 0, 4)])
    rule = policy.placement_rule()
    assert rule.join(0, 60)
    [first] = rule.passes[0].groups
    assert rule.take_step()
    assert (first.mapped, first.prepares) == (0, False)
    policy.reserve(Chunk(1, 0, 8))
    policy.free(1)  # Preempted before its chunk was placed.
    assert rule.take_step()
    assert (first.mapped, first.prepares) == (2, True)
    assert rule.take_step()
    assert (first.mapped, first.prepares) == (0, False)


WORLD = load_scenario(
    "chat",
    workload__requests=30,
    server__slots=4,
    cache__policy="vattention",
    cache__page_tokens=16,
    machine__map_page_us=40.0,
)


def test_mapping_takes_as_long_as_the_scenario_says():
    free, dear = (run(WORLD.model_copy(update={"machine": machine(us)}), detail="tables") for us in (0.0, 500.0))
    costs = cost_model(WORLD, profile_of(WORLD))
    assert costs.mapping(3) == pytest.approx(3 * 40e-6 * 2 * WORLD.model.shape.n_layers)
    assert free.summary["e2e_s"]["mean"] < dear.summary["e2e_s"]["mean"]
    assert free.summary["cache"]["mapped_pages"] > 0
    assert "at 500 µs for each page" in dear.summary["inferred"]["mapping"]
    assert "as if it took no time" in free.summary["inferred"]["mapping"]
    assert "mapping" not in run(WORLD, "paged").summary["inferred"]


def machine(us):
    return WORLD.machine.model_copy(update={"map_page_us": us})


def test_mapping_is_a_cause_of_its_own_and_causes_make_up_the_whole():
    result, table = run(WORLD, detail="tables"), run(WORLD, "paged", detail="tables")
    np.testing.assert_allclose(result.causes[SECONDS].sum(axis=1), result.causes["e2e_s"], rtol=1e-9)
    page_s = cost_model(WORLD, profile_of(WORLD)).mapping(1)
    assert result.passes["mapping_s"].sum() == pytest.approx(page_s * result.summary["cache"]["mapped_pages"])
    assert result.causes["mapping_s"].sum() > 0
    assert table.causes["mapping_s"].sum() == 0
