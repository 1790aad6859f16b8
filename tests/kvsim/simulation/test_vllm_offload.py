"""Chunks in host memory under vLLM's scheduler: what is loaded and stored when, and who waits; to the second."""

from unittest.mock import patch

import numpy as np
import pytest

from kvsim.errors import Livelock, UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import run
from kvsim.simulation.time_breakdown import SECONDS
from tests.worlds import Diary, Given, scenario, serve
from workloads import Request, Segment


def says(number, at, *pieces, output=1):
    """A request by what its prompt says: (source, first token, tokens)."""
    content = tuple(Segment(*piece) for piece in pieces)
    return Request(number, at, sum(piece.n for piece in content), output, content=content)


def tell(requests, *, load_s=0.0, store_s=0.0, blocks=6, **keys):
    """Blocks of four tokens; a pass takes a second, and so many more the copy of a block in each direction."""
    world = scenario(
        **{
            "server__scheduler": "vllm",
            "server__slots": 2,
            "cache__policy": "vllm",
            "cache__block_size": 4,
            "cache__cells": 4 * (blocks + 1),
            "cache__host_cells": 64,
            **keys,
        }
    )
    diary = Diary(copying=lambda copies: sum((store_s if c.to_host else load_s) * c.n / 4 for c in copies))
    recorder, jobs = serve(world, Given(requests), diary)
    return diary, recorder, [job for _, job in sorted(jobs.items())]


OUT = [says(0, 0.0, (1, 0, 9)), says(1, 1.5, (2, 0, 23))]
"""0 has two full blocks; 1 takes all blocks that there are, from 1.5 s to 2.5 s."""

AGAIN = says(2, 3.0, (1, 0, 9), (4, 0, 1), output=2)
"""Begins as 0 did."""
MS = 0.02
"""Steps without tokens take a millisecond each, and a few may come before anything begins."""


def test_a_request_waits_for_its_load_without_a_slot_while_others_run():
    """Two blocks of two seconds each, from 3 s to 7 s. The step that begins at 7.25 s sees it, and ends at 8.25 s."""
    diary, recorder, jobs = tell([*OUT, AGAIN, says(3, 4.25, (3, 0, 5), output=4)], load_s=2.0)
    assert diary.steps == [
        [(0, 0, 9)],
        [(1, 0, 23)],
        [(3, 0, 5)],
        *([(3, at, 1)] for at in (5, 6, 7)),
        [(2, 8, 2)],
        [(2, 10, 1)],
    ]
    assert [job.started_s for job in jobs] == pytest.approx([0.0, 1.5, 8.25, 4.25], abs=MS)
    assert jobs[2].cached == recorder.counts.host.chunks.tokens == 8
    assert (recorder.counts.host.chunks.loads, recorder.counts.host.chunks.load_wait_s) == (
        1,
        pytest.approx(5.25, abs=MS),
    )
    assert [copy.n for copy in diary.copies if not copy.to_host] == [8]


def test_while_nothing_runs_a_load_is_seen_as_soon_as_it_has_ended():
    _, recorder, jobs = tell([*OUT, AGAIN], load_s=2.0)
    assert jobs[2].started_s == pytest.approx(7.0, abs=MS)
    assert recorder.counts.host.chunks.load_wait_s == pytest.approx(4.0, abs=MS)


def test_who_needs_a_chunk_that_is_being_loaded_waits_and_then_finds_it_in_blocks():
    diary, recorder, jobs = tell([*OUT, AGAIN, says(3, 4.0, (1, 0, 9), (5, 0, 2))], load_s=2.0)
    assert [job.started_s for job in jobs[2:]] == pytest.approx([7.0, 7.0], abs=MS)
    assert [job.cached for job in jobs[2:]] == [8, 8]
    assert recorder.counts.host.chunks.loads == 1
    assert sum(copy.n for copy in diary.copies if not copy.to_host) == 8


def test_a_chunk_that_is_still_being_stored_is_waited_for():
    """Two blocks, from 1 s to 3 s; then they are loaded. In blocks nothing is found, or it would start at once."""
    requests = [says(0, 0.0, (1, 0, 9)), says(1, 1.25, (1, 0, 9), (4, 0, 1))]
    starts = {}
    for caching in (False, True):
        _, recorder, jobs = tell(requests, load_s=1.0, store_s=1.0, blocks=12, cache__prefix_cache=caching)
        starts[caching] = jobs[1].started_s
        assert jobs[1].cached == 8
        assert recorder.counts.host.chunks.load_wait_s == pytest.approx(0.0 if caching else 2.0, abs=MS)
    assert starts == {False: pytest.approx(5.0, abs=MS), True: 1.25}


def test_a_store_begins_behind_the_step_and_one_copy_follows_another():
    """A block of 0 takes two seconds, from 1 s on: 1 takes its blocks, so that its step begins at 5 s."""
    _, recorder, jobs = tell(OUT, store_s=2.0)
    assert jobs[1].first_token_s == pytest.approx(6.0)
    assert (jobs[1].started_s, recorder.counts.host.chunks.store_wait_s) == (1.5, pytest.approx(3.5))


@pytest.mark.parametrize(("answers", "cells"), [(False, 4), (True, 12)])
def test_of_answers_nothing_is_stored_unless_it_is_asked_for(answers, cells):
    """A prompt of one block, and seven tokens more; the last one generated is never computed."""
    _, recorder, _ = tell([says(0, 0.0, (1, 0, 5), output=9)], cache__offload_answers=answers)
    assert recorder.counts.host.cells_out == cells


def test_steps_composed_ahead_see_a_load_one_step_later():
    rest = says(3, 4.25, (3, 0, 5), output=9)
    _, _, jobs = tell([*OUT, AGAIN, rest], load_s=2.0, server__async_scheduling=True)
    assert jobs[2].started_s == pytest.approx(9.25, abs=MS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"cache__host_cells": 8, "cache__offload_blocks": 4}, "8 host cells hold no chunk of 4 blocks"),
        ({"cache__disk_cells": 8, "cache__offload_blocks": 4}, "8 disk cells hold no chunk of 4 blocks"),
        ({"cache__disk_cells": 8, "cache__offload_store_threshold": 2}, "before a disk vLLM takes none"),
        ({"cache__disk_cells": 8, "cache__host_cells": 0}, "cache.disk_cells: there is no host memory before the disk"),
    ],
)
def test_tiers_that_cannot_be_are_refused(keys, words):
    with pytest.raises(UserError, match=words):
        tell([], **keys)


DISK = {"cache__host_cells": 20, "cache__disk_cells": 400, "machine__disk_latency_s": 1.0, "machine__disk_gb_s": 1e6}
"""Host memory has five chunks, as many as the prompt of 1; a file takes a second, and so does an answer of the disk."""


def test_what_has_left_host_memory_is_sought_on_the_disk_read_and_loaded():
    """Nothing is known of any prompt for a second. From 30 s on 2 waits for the answer, two files, and two blocks."""
    late = [says(0, 0.0, (1, 0, 9)), says(1, 10.0, (2, 0, 23)), says(2, 30.0, (1, 0, 9), (4, 0, 1))]
    _, recorder, jobs = tell(late, load_s=2.0, **DISK)
    assert [job.started_s for job in jobs] == pytest.approx([1.0, 11.0, 37.0], abs=MS)
    assert (jobs[2].cached, recorder.counts.disk.cells_out, recorder.counts.disk.cells_in) == (8, 28, 8)
    assert recorder.counts.host.chunks.lookup_wait_s == pytest.approx(1 + 1 + 3, abs=MS)


@pytest.mark.parametrize(("room", "cached"), [(12, 8), (4, 4)])
def test_a_full_disk_keeps_what_it_has(room, cached):
    late = [says(0, 0.0, (1, 0, 9)), says(1, 10.0, (2, 0, 23)), says(2, 30.0, (1, 0, 9), (4, 0, 1))]
    _, recorder, jobs = tell(late, **{**DISK, "cache__disk_cells": room})
    assert (recorder.counts.disk.cells_out, jobs[2].cached) == (room, cached)


def test_a_disk_that_writes_keeps_chunks_in_host_memory_so_that_new_ones_find_no_room():
    """Three chunks of 0 are being written from 2 s to 5 s, when 1 would store its five, from 3.5 s to 4.5 s."""
    stored = {}
    for disk in (0, 400):
        _, recorder, _ = tell(
            [says(0, 0.0, (1, 0, 13)), says(1, 2.5, (2, 0, 23))], **DISK | {"cache__disk_cells": disk}
        )
        stored[disk] = recorder.counts.host.cells_out
    assert stored == {0: 32, 400: 12}


def test_chunks_that_displace_each_other_for_ever_are_an_error():
    """Host memory has four chunks, and all that are read for 2 have come before the next step."""
    requests = [says(0, 0.0, (1, 0, 23)), says(1, 10.0, (2, 0, 23)), says(2, 30.0, (1, 0, 23), (3, 0, 1))]
    keys = {**DISK, "cache__host_cells": 16, "machine__disk_latency_s": 0.0, "server__n_batch": 8}
    with pytest.raises(Livelock, match="request 2"):
        tell(requests, **keys)


CHAT = {
    "workload": {
        "kind": "sessions",
        "sessions": 12,
        "rate": 20.0,
        "turns": {"kind": "fixed", "value": 4},
        "user_tokens": {"kind": "fixed", "value": 60},
        "output_tokens": {"kind": "fixed", "value": 40},
        "system_tokens": {"kind": "fixed", "value": 100},
        "think_s": 0.3,
    },
    "server": {"scheduler": "vllm", "slots": 6, "n_batch": 128, "slot_context": 600},
    "cache": {"policy": "vllm", "cells": 1600, "host_cells": 8000},
    "machine": {"host_gb_s": 0.2},
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "cache",
    [
        {},
        {"cells": 900, "offload_order": "arc", "offload_blocks": 2, "host_cells": 1000},
        {"cells": 900, "host_cells": 1000, "disk_cells": 5000},
    ],
)
def test_how_the_steps_are_taken_changes_nothing(ahead, cache):
    world = load_scenario({**CHAT, "cache": CHAT["cache"] | cache}, server__async_scheduling=ahead)
    found = []
    checked = [{"check": True}] if "disk_cells" in cache else []  # Which takes ten times as long.
    for how in ({}, {"most_steps": 1}, {"most_steps": 0}, *checked):
        summary = run(world, **how).summary
        summary.pop("wall_s")
        found.append(summary)
    assert found[0]["host"]["chunk_loads"] > 5
    assert (found[0]["disk"]["tokens"] > 500) == ("disk_cells" in cache)
    assert found[0]["completed"] == 48
    assert all(other == found[0] for other in found[1:])


def test_what_waited_for_loads_is_in_the_account_of_each_request():
    result = run(load_scenario(CHAT), detail="tables")
    causes, host = result.causes, result.summary["host"]
    np.testing.assert_allclose(causes[SECONDS].sum(axis=1), causes["e2e_s"], rtol=1e-9)
    assert host["load_wait_s"] > 0
    assert causes["transfers_s"].sum() >= host["load_wait_s"] * (1 - 1e-9)


def test_more_is_found_than_without():
    found = {cells: run(load_scenario(CHAT, cache__host_cells=cells)).summary for cells in (0, 8000)}
    assert found[8000]["prefix"]["hit_rate"] > found[0]["prefix"]["hit_rate"] + 0.1
    assert found[0]["host"]["chunk_loads"] is None


def test_what_the_tiers_of_several_servers_did_adds_up():
    made = []

    def kept(**options):
        made.append(Recorder(**options))
        return made[-1]

    cache = {"policy": "vllm", "cells": 640, "host_cells": 1000, "disk_cells": 5000}
    with patch("kvsim.simulation.cluster.run.Recorder", kept):
        summary = run(load_scenario({**CHAT, "cache": cache}, cluster__replicas=2, machine__host_gb_s=0.02)).summary
    *servers, _ = made
    assert len(servers) == 2
    for key in ("chunk_loads", "chunk_tokens", "load_wait_s", "store_wait_s", "lookup_wait_s"):
        each = [getattr(one.counts.host.chunks, key.removeprefix("chunk_")) for one in servers]
        assert summary["host"][key] == pytest.approx(sum(each), rel=1e-12), key
        assert min(each) > 0, key
    assert summary["disk"]["tokens"] == sum(one.counts.disk.cells_in for one in servers) > 0
