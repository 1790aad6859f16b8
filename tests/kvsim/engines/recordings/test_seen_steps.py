"""Steps that clients saw: of which the seconds and the work are known, and which are left out."""

import pytest

from kvsim.engines.recordings.seen_steps import SeenRequest, seen_steps
from kvsim.scenario.scenario import load_scenario

SERVERS = {
    name: load_scenario(
        {"server": {"scheduler": name, "n_batch": 64, "slots": 4, **more}, "cache": {"cells": 2048, "unified": False}}
    )
    for name, more in (("vllm", {}), ("llama-server", {"n_ubatch": 16}))
}
LLAMA = SERVERS["llama-server"]


def tokens(first, n, gap=1.0):
    return [first + gap * i for i in range(n)]


@pytest.mark.parametrize("scenario", SERVERS.values(), ids=SERVERS)
def test_a_request_alone_shows_its_prompt_and_each_token(scenario):
    steps = seen_steps([SeenRequest(10, 4, 0.5, tokens(2.0, 4))], scenario)
    assert [step.seconds for step in steps] == [1.5, 1.0, 1.0, 1.0]
    assert [step.output_s for step in steps] == [2.0, 3.0, 4.0, 5.0]
    prompt, *decodes = steps
    assert (prompt.regime, prompt.by_client) == ("mixed", True)
    assert [(work.tokens, work.scans) for work in prompt.works] == [(6, ((6, 10),))]
    assert [step.works[0].scans for step in decodes] == [((1, 11),), ((1, 12),), ((1, 13),)]
    assert not any(step.by_client for step in decodes)


def test_by_the_servers_own_clock_a_prompt_takes_what_it_says():
    (prompt, *_) = seen_steps([SeenRequest(10, 0, 0.5, tokens(2.0, 3), prompt_s=1.25)], LLAMA)
    assert (prompt.seconds, prompt.by_client) == (1.25, False)


def test_a_prompt_is_computed_in_micro_batches():
    (prompt, *_) = seen_steps([SeenRequest(40, 5, 0.0, tokens(2.0, 2))], LLAMA)
    assert [(work.tokens, work.scans) for work in prompt.works] == [
        (16, ((16, 21),)),
        (16, ((16, 37),)),
        (3, ((3, 40),)),
    ]


@pytest.mark.parametrize("uncached", [1, 65])
def test_prompts_of_a_token_or_of_several_steps_are_left_out(uncached):
    steps = seen_steps([SeenRequest(uncached + 9, 9, 0.0, tokens(2.0, 3))], LLAMA)
    assert [step.regime for step in steps] == ["decode", "decode"]


def test_steps_of_several_requests_are_those_in_which_all_get_a_token():
    """Each hears of it at a slightly different time; the time of the step is their median."""
    near = [SeenRequest(10, 0, 0.0, [2.0, 3.0, 4.0]), SeenRequest(20, 0, 0.0, [2.02, 3.02, 4.02])]
    steps = seen_steps(near, SERVERS["vllm"])
    assert [step.seconds for step in steps] == [1.0, 1.0]
    assert steps[0].start_s == pytest.approx(2.01)
    assert steps[0].works[0].scans == ((1, 11), (1, 21))


def test_where_others_wait_or_generate_a_step_is_not_known():
    long = SeenRequest(10, 0, 0.0, tokens(2.0, 9))
    waits = SeenRequest(20, 0, 4.5, [7.5])
    steps = seen_steps([long, waits], SERVERS["vllm"])
    assert [step.start_s for step in steps if step.regime == "decode"] == [2.0, 3.0, 8.0, 9.0]
    # Nobody was alone when the second prompt came.
    assert [step.start_s for step in steps if step.regime == "mixed"] == [0.0]


@pytest.mark.parametrize(
    ("slots", "passes"),
    [((0, 1, 2), [3]), ((0, 2, 3), [1, 2]), ((3, 0, 2), [1, 2]), ((0, None, 3), [2, 1])],
)
def test_a_divided_cache_computes_neighbours_together(slots, passes):
    requests = [SeenRequest(10 + i, 0, 0.0, tokens(2.0, 2), slot=slot) for i, slot in enumerate(slots)]
    (step,) = seen_steps(requests, LLAMA)
    assert [work.chunks for work in step.works] == passes
    unified = load_scenario(LLAMA, cache__unified=True)
    assert [work.chunks for work in seen_steps(requests, unified)[0].works] == [3]


def test_without_tokens_there_are_no_steps():
    assert seen_steps([], LLAMA) == ()
    assert seen_steps([SeenRequest(10, 0, 0.0, [])], LLAMA) == ()
    assert [step.regime for step in seen_steps([SeenRequest(10, 0, 0.0, [1.0])], LLAMA)] == ["mixed"]
    # All at once, as a server that buffers has it.
    assert len(seen_steps([SeenRequest(10, 0, 0.0, [1.0, 1.0, 1.0])], LLAMA)) == 1
