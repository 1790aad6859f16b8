"""The direction of what docs/reproduced.md says of token eviction, on a small version."""

from benchmarks.reproduced.token_eviction import BATCH, blocks_of, served

SMALL = {
    "workload__requests": 12,
    "workload__prompt_tokens": {"kind": "fixed", "value": 128},
    "workload__output_tokens": {"kind": "fixed", "value": 64},
    "server__slot_context": 192,
    "cache__cells": 832,
    "cache__budget": 38,
}


def test_holes_keep_blocks_that_refilling_needs_less_of_and_packing_hardly_any():
    found = {
        policy: blocks_of(1, policy, 102, 16, prompt=256, answer=128)
        for policy in ("h2o", "h2o-refilled", "h2o-packed", "h2o-blocks")
    }
    stay, refilled, packed, whole = (each.held / each.needed for each in found.values())
    assert stay > refilled > 2 > 1.1 > packed >= whole == 1
    assert all(each.whole > each.held for each in found.values())


def test_what_evicts_tokens_serves_more_only_where_holes_are_packed():
    paged, holes, packed = (served(BATCH, policy, 1, **SMALL) for policy in ("paged", "h2o", "h2o-packed"))
    assert packed.throughput > 1.5 * max(paged.throughput, holes.throughput)
    assert holes.useful < 0.9 < packed.useful
    assert 0 < packed.copying < 0.01
    assert (holes.moved, holes.copying) == (0, 0)
