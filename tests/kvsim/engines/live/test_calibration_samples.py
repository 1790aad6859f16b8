"""Designed loads, and the steps that are read off the times of their tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engines.live.load import HOLD, Limits, Staircase, fitted, probes, round_of, steps_of_prompt
from kvsim.engines.live.load_runs import LoadRequest, LoadRun, samples_of
from kvsim.engines.live.steps_seen import common_steps, windows
from kvsim.scenario.scenario import load_scenario

SCENARIO = load_scenario(
    {
        "model": {"name": "smollm2"},
        "server": {"slots": 4, "n_batch": 64},
        "cache": {"policy": "llama.cpp-b6975", "cells": 4096, "unified": False, "type_k": "f16", "type_v": "f16"},
    }
)


def staircase(requests, decode_s, prompt_s, batch=64):
    """A run of a server whose steps take ``decode_s``, or ``prompt_s`` where they have a part of a prompt.

    ``requests``: prompt tokens, and tokens generated until the next begins (of the last: in all), or of one that
    passes by that number below zero.
    """
    now, starts, streams = 0.0, [], []
    for i, (prompt, held) in enumerate(requests):
        starts.append(now - (0.3 * decode_s if i else 0.0))
        staying = [stream for stream, (_, own) in zip(streams, requests, strict=False) if own > 0]
        for _ in range(steps_of_prompt(prompt, batch, len(staying))):
            now += prompt_s
            for stream in staying:
                stream.append(now)
        streams.append([now])
        if held > 0:
            staying.append(streams[-1])
        for _ in range(abs(held) - 1):
            now += decode_s
            for stream in staying:
                stream.append(now)
    return LoadRun(
        origin=0,
        probe=False,
        shared=False,
        requests=[
            LoadRequest(prompt_tokens=prompt, sent_s=sent, token_s=times, prompt_s=None)
            for (prompt, _), sent, times in zip(requests, starts, streams, strict=True)
        ],
    )


def test_a_staircase_gives_its_steps_with_their_work():
    found = samples_of(staircase([(20, 8), (30, 8), (100, 8)], 0.01, 0.05), SCENARIO)
    decodes = [s for s in found.samples if s.tokens == s.chunks and not s.further]
    mixed = [s for s in found.samples if s.further]
    assert [s.chunks for s in decodes] == [1, 2, 3]
    assert all(s.seconds == pytest.approx(0.01) for s in decodes)
    assert all(s.seconds == pytest.approx(0.05) for s in mixed)
    # Beside one request 30 tokens in a step; beside two 62, then 38. One of each is in the pass of those that generate.
    assert [(s.chunks, s.further[0].tokens) for s in mixed] == [(2, 29), (3, 61), (3, 37)]
    # Middle of seven steps: 20 tokens of the prompt and the four generated before.
    assert decodes[0].scans == ((1, 23),)
    assert found.alone.waited_s == pytest.approx(0.05)


def test_requests_that_pass_by_leave_the_others_as_they_were():
    found = samples_of(staircase([(20, 8), (30, -8), (40, -8), (50, 8)], 0.01, 0.05), SCENARIO)
    assert [s.chunks for s in found.samples if not s.further] == [1, 1, 1, 2]
    mixed = [s for s in found.samples if s.further]
    assert [(s.chunks, s.further[0].tokens) for s in mixed] == [(2, 29), (2, 39), (2, 49)]
    # The first request goes on: eight steps more for each that passes.
    assert [s.scans[0][1] for s in mixed] == [28, 36, 44]


def test_what_is_not_certain_is_left_out_and_the_rest_is_followed():
    """The prompt in the middle took a step more than assumed: what comes behind it is still known."""
    whole = staircase([(20, 8), (30, 8), (40, 8)], 0.01, 0.05)
    times = [list(request.token_s) for request in whole.requests]
    late = times[1][0]
    # A step that no prompt was assumed for, as long as a mixed one, just before the prompt's own.
    later = [[t + 0.05 if t >= late - 1e-9 else t for t in stream] for stream in times]
    later[0] = sorted([*later[0], late])
    requests = [r.model_copy(update={"token_s": tuple(t)}) for r, t in zip(whole.requests, later, strict=True)]
    requests[2] = requests[2].model_copy(update={"sent_s": requests[2].sent_s + 0.05})
    found = samples_of(whole.model_copy(update={"requests": tuple(requests)}), SCENARIO)
    assert [s.chunks for s in found.samples if not s.further] == [1, 2, 3]
    assert [(s.chunks, s.further[0].tokens) for s in found.samples if s.further] == [(3, 39)]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(2, 60), st.integers(6, 12)), min_size=1, max_size=4),
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 2**16),
)
def test_every_sample_has_the_time_of_its_step_whatever_the_noise(requests, noise, seed):
    run, rng = staircase(requests, 0.01, 0.05), np.random.default_rng(seed)
    noisy = run.model_copy(
        update={
            "requests": tuple(
                r.model_copy(update={"token_s": tuple((np.array(r.token_s) + 0.01 * noise * rng.random()).tolist())})
                for r in run.requests
            )
        }
    )
    found = samples_of(noisy, SCENARIO)
    for sample in found.samples:
        is_decode = not sample.further and sample.tokens == sample.chunks
        assert sample.seconds == pytest.approx(0.01 if is_decode else 0.05, abs=0.0011)
    assert len(found.samples) >= len(requests)


def test_a_pause_of_one_stream_leaves_its_steps_out():
    times = (0.01 * np.arange(30)).tolist()
    late = [*times[:10], times[10] + 0.008, *times[11:]]
    seen = common_steps([times, late])
    assert not seen.clean[9]
    assert not seen.clean[10]
    assert seen.clean.sum() == 27


def read_late(run, when):
    """The same staircase by a client that had no processor, and read at these times what had come by then."""
    found = []
    for request in run.requests:
        read = when[np.searchsorted(when, request.token_s)] + 1e-5 * np.arange(len(request.token_s))
        found.append(request.model_copy(update={"token_s": tuple(read)}))
    return run.model_copy(update={"requests": tuple(found)})


@pytest.mark.parametrize("is_missed", [False, True])
def test_steps_whose_tokens_came_at_once_are_spread_evenly_and_mixed_ones_left_out(is_missed):
    run = staircase([(20, 21), (30, 22)], 0.01, 0.05)
    times = np.array(run.requests[0].token_s)
    assert times[21] == run.requests[1].token_s[0]
    # Two of three tokens of the first request are read in time, and the end of the other's prompt or not.
    in_time = np.arange(len(times)) % 3 != 1
    in_time[21] = not is_missed
    reads = np.append(times[in_time], 9.0)
    found = samples_of(read_late(run, reads), SCENARIO)
    assert found.at_once >= 7
    decodes = [s for s in found.samples if not s.further]
    assert [s.seconds for s in decodes] == pytest.approx([0.01] * len(decodes), rel=0.01)
    mixed = [s.seconds for s in found.samples if s.further]
    assert mixed == ([] if is_missed else pytest.approx([0.05], rel=0.01))


def test_a_staircase_whose_tokens_mostly_came_at_once_tells_nothing():
    found = samples_of(read_late(staircase([(20, 40)], 0.01, 0.05), np.arange(0.1, 9, 0.2)), SCENARIO)
    assert not found.samples
    assert found.left_out == 40


@pytest.mark.slow
@given(
    gaps=st.lists(st.floats(0.005, 0.05), min_size=12, max_size=40),
    offsets=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_streams_that_begin_at_different_steps_are_aligned(gaps, offsets):
    ends = np.cumsum(gaps)
    streams = [ends[offset:].tolist() for offset in offsets]
    seen = common_steps(streams)
    begin = max(offsets)
    assert seen.first == tuple(begin - offset for offset in offsets)
    assert seen.at_s == pytest.approx(ends[begin:])
    assert not seen.apart.any()


@pytest.mark.slow
@given(clean=st.lists(st.booleans(), max_size=60), longest=st.integers(1, 9), shortest=st.integers(1, 9))
def test_windows_are_clean_apart_and_of_the_right_length(clean, longest, shortest):
    longest = max(longest, shortest)
    found = windows(clean, longest, shortest)
    for begin, end in found:
        assert all(clean[begin:end])
        assert shortest <= end - begin <= longest
    assert all(one[1] <= other[0] for one, other in pairwise(found))
    taken = {i for begin, end in found for i in range(begin, end)}
    rest = [is_clean and i not in taken for i, is_clean in enumerate(clean)]
    assert windows(rest, shortest, shortest) == []


@given(
    requests=st.integers(1, 40),
    context=st.integers(64, 8192),
    longest=st.integers(1, 8192),
    seed=st.integers(0, 1000),
)
def test_a_round_fits_into_the_server(requests, context, longest, seed):
    limits = Limits(requests, context - 32, context, context * requests, 512)
    for stairs in round_of(limits, min(longest, limits.prompt), np.random.default_rng(seed)):
        assert 1 <= len(set(stairs.slots)) <= requests
        assert min(stairs.prompts) >= 1
        outputs = stairs.output_tokens
        assert outputs[stairs.staying :] == (1,) * stairs.passing
        assert all(a - b >= HOLD for a, b in pairwise(outputs) if b > 1)
        if outputs[0] < context // 2:
            assert all(n + out < context for n, out in zip(stairs.prompts, outputs, strict=True))


def test_a_round_reaches_every_number_of_requests_and_every_octave():
    limits = Limits(6, 1000, 4096, 6 * 4096, 2048)
    stairs = round_of(limits, 1000, np.random.default_rng(1))
    assert {each.staying for each in stairs} == {1, 2, 3, 4, 6}
    lengths = [n for each in stairs for n in each.prompts]
    assert {n.bit_length() for n in lengths} == set(range(1, 11))


def test_probes_double_up_to_the_longest():
    found = [each.prompts[0] for each in probes(Limits(2, 100, 132, 264, 2048))]
    assert found == [1, 2, 4, 8, 16, 32, 64, 100]


def test_a_long_staircase_shares_one_cache():
    stairs = fitted(Staircase((900, 900, 900), 2048), Limits(3, 1000, 1024, 1024, 2048))
    assert sum(stairs.prompts) + sum(stairs.output_tokens) <= 1024
