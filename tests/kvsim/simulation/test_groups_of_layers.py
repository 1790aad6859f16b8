"""Hybrid models under vLLM's scheduler: whole runs, with what the policy promises looked at in each step."""

import pytest

import kvsim
from kvsim.errors import UserError

STATES = [{"kind": "full", "layers": 2}, {"kind": "state", "layers": 2, "checkpoint_grid": 1}]
WINDOWS = [{"kind": "latent", "block_size": 8}, {"kind": "window", "span": 40}]


def scenario(groups, *, cells=400):
    return {
        "workload": {"requests": 15, "shared_tokens": 48},
        "server": {"scheduler": "vllm", "slots": 8, "n_batch": 160},
        "cache": {"policy": "vllm", "cells": cells, "groups": groups},
    }


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("groups", "cells"), [(STATES, 520), (WINDOWS, 400)])
def test_every_request_is_served_and_every_promise_kept(groups, cells, ahead):
    asked = scenario(groups, cells=cells)
    asked["server"]["async_scheduling"] = ahead
    found = kvsim.run(asked, check=True).summary
    assert (found["completed"], found["failed"]) == (15, 0)
    assert found["preemptions"] > 0


def test_states_take_room_of_which_a_cache_without_them_has_more():
    found = [kvsim.run(scenario(groups, cells=3000)).summary["cache"] for groups in (STATES, STATES[:1])]
    states, plain = (cache["internal_fragmentation_mean"] for cache in found)
    assert states > plain > 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ahead"), [("mtp", False), ("mtp", True), ("ngram", False)])
@pytest.mark.parametrize("groups", [STATES, WINDOWS])
def test_drafts_are_checked_beside_groups(groups, method, ahead):
    asked = scenario(groups, cells=700) | {"speculation": {"method": method, "tokens": 3, "acceptance": 0.6}}
    asked["server"]["async_scheduling"] = ahead
    found = kvsim.run(asked, check=True).summary
    assert (found["completed"], found["failed"]) == (15, 0)
    drafts = found["speculation"]
    assert drafts["drafted_tokens"] > drafts["accepted_tokens"] > 0


def test_each_drafted_token_takes_a_state_more():
    def found(**drafts):
        asked = scenario([{"kind": "full"}, {"kind": "state"}], cells=3000)
        asked["workload"]["requests"], asked["cache"]["prefix_cache"] = 1, False
        return kvsim.run(asked | {"speculation": drafts}).summary["cache"]["allocated_cells_mean"]

    drafts = {"tokens": 3, "acceptance": 1.0, "found": 0.0}  # None is ever found.
    assert found(method="ngram", **drafts) == pytest.approx(found() + 3 * 16)


def test_groups_that_do_not_fit_together_are_refused_in_a_line():
    with pytest.raises(UserError, match="another kind than state"):
        kvsim.run(scenario([{"kind": "state"}]))
