"""The direction of what docs/reproduced.md says of reservation and preemption, on small versions."""

import pytest

from benchmarks.reproduced.admission import NEXT_CHUNK, NO_EVICT, SGLANG, WATERMARK, oversubscribed, served


def test_reserving_nothing_costs_throughput_only_where_preempted_requests_come_back_in_pieces():
    few = {"workload__requests": 40}
    reserved, free, pieces = (
        oversubscribed(scenario, policy, 3, **few)
        for scenario, policy in ((NO_EVICT, "no-evict"), (NO_EVICT, "paged"), (NEXT_CHUNK, "paged"))
    )
    assert reserved.preemptions == 0 < free.preemptions < pieces.preemptions
    assert free.throughput > 0.95 * reserved.throughput
    assert pieces.throughput < 0.8 * reserved.throughput
    assert pieces.tpot_p99 > 1.5 * reserved.tpot_p99


def test_a_watermark_saves_preemptions_and_a_whole_reservation_costs_throughput():
    small = {"workload__requests": 32, "workload__users": 16, "cache__cells": 37_456}
    off, some = (served(WATERMARK, "paged", 1, cache__watermark=w, **small) for w in (0.0, 0.05))
    reserved = served(WATERMARK, "no-evict", 1, **small)
    assert off.preemptions > 1.3 * some.preemptions > 0 == reserved.preemptions
    assert reserved.throughput < 0.9 * off.throughput


@pytest.mark.slow
def test_a_share_that_is_learned_from_preemptions_keeps_them_rare():
    small = {"workload__requests": 32, "workload__users": 16, "cache__cells": 37_456, **SGLANG}
    fits, expected = (served(WATERMARK, policy, 1, **small) for policy in ("paged", "expected-length"))
    assert fits.preemptions > 2 * expected.preemptions
