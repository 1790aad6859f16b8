"""llama-server's context checkpoints, in small worlds: where they are made, which are given up, which is found."""

import pytest

from kvsim.errors import UserError
from kvsim.simulation.run import run
from kvsim.simulation.summary import lost_to_checkpoints
from tests.kvsim.simulation.stories import says, tell
from tests.worlds import scenario


def hybrid(**keys):
    """One slot, micro-batches of 8 tokens, no host cache, checkpoints as close as they come."""
    server = {"server__slots": 1, "server__cache_ram": 0, "server__n_ubatch": 8, "server__checkpoint_min_step": 0}
    return scenario(**{"cache__policy": "hybrid", "cache__cells": 256, **server, **keys})


def asks(number, *pieces, users=(), output=1):
    return says(number, 100.0 * number, *pieces, output=output)._replace(user_starts=users)


def parts(story, request):
    """The parts in which a prompt was computed: (first token, tokens)."""
    return [(start, n) for step in story.steps for number, start, n in step if number == request]


def test_a_prompt_is_cut_near_its_end_and_before_its_last_user_message():
    story = tell(hybrid(), [asks(0, (1, 0, 40), users=(0, 10, 20))])
    assert parts(story, 0) == [(0, 8), (8, 2), (10, 8), (18, 2), (20, 8), (28, 8), (36, 4)]
    assert story.recorder.counts.checkpoints.made == 4  # After 10, 20, 28 and 36 tokens.


def test_without_checkpoints_nothing_is_cut():
    story = tell(hybrid(server__ctx_checkpoints=0), [asks(0, (1, 0, 40), users=(0, 20))])
    assert parts(story, 0) == [(start, 8) for start in range(0, 40, 8)]
    assert story.recorder.counts.checkpoints.made == 0


def test_user_messages_too_close_to_the_last_checkpoint_are_passed_over():
    """The batch still ends at 20, since there is no checkpoint while it is composed; then that at 10 is too close."""
    story = tell(hybrid(server__checkpoint_min_step=15), [asks(0, (1, 0, 70), users=(0, 10, 20, 25, 30, 40, 50))])
    assert {start for start, _ in parts(story, 0)} >= {10, 20, 30, 50, 58, 66}
    assert story.recorder.counts.checkpoints.made == 5  # All of these but 20.


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, 20),  # At its last user message.
        ({"server__ctx_checkpoints": 0}, 0),
        ({"server__ctx_checkpoints": 2}, 0),  # The two near the end are left.
    ],
)
def test_another_answer_to_an_edited_message_goes_on_from_the_checkpoint_before_it(keys, found):
    requests = [
        asks(0, (1, 0, 20), (2, 0, 30), users=(0, 20)),
        asks(1, (1, 0, 20), (2, 0, 5), (3, 0, 30), users=(0, 20)),
    ]
    story = tell(hybrid(**keys), requests)
    assert story.jobs[1].cached == found
    assert story.recorder.counts.checkpoints.lost_tokens == 25 - found
    assert story.recorder.counts.checkpoints.spared_tokens == 20 - found


def test_the_same_prompt_begins_four_tokens_before_its_end_and_a_longer_one_at_its_end():
    requests = [asks(0, (1, 0, 30), output=3), asks(1, (1, 0, 30)), asks(2, (1, 0, 50))]
    assert [tell(hybrid(), requests).jobs[number].cached for number in range(3)] == [0, 26, 30]


def test_checkpoints_come_back_from_the_host_cache_with_what_they_are_of():
    """Two prompts that share nothing take turns in one slot."""
    first, second = (1, 0, 40), (2, 0, 40)
    requests = [
        asks(0, first, users=(0, 20)),
        asks(1, second, users=(0, 20)),
        asks(2, (1, 0, 30), (3, 0, 10), users=(0, 20)),
    ]
    story = tell(hybrid(server__cache_ram=-1), requests)
    assert [story.jobs[number].cached for number in range(3)] == [0, 0, 28]
    assert tell(hybrid(), requests).jobs[2].cached == 0


def test_their_bytes_count_in_the_host_cache():
    """Each state has 1 MiB, of which there are three checkpoints and one with the cells."""
    requests = [asks(0, (1, 0, 40), users=(0, 20)), asks(1, (2, 0, 40), users=(0, 20))]
    kept = [tell(hybrid(server__cache_ram=limit, model__state_mib=1.0), requests) for limit in (3, 6)]
    assert [story.recorder.counts.host.saves for story in kept] == [0, 1]


def test_a_state_is_as_large_as_the_models_unless_stated():
    lfm2 = {"model__name": "lfm2-1.2b", "cache__policy": "hybrid"}
    assert scenario(**lfm2).model.state_bytes == 10 * 4 * 4096
    assert scenario(**lfm2, model__state_mib=2.0).model.state_bytes == 2 << 20
    assert scenario().model.state_bytes == 0


def test_drafts_for_which_a_server_goes_back_to_a_checkpoint_are_refused():
    world = hybrid(speculation={"method": "ngram", "acceptance": 0.5}, workload__requests=2)
    with pytest.raises(UserError, match=r"speculation: not simulated beside states .* accepted: eagle or mtp"):
        run(world)


@pytest.mark.parametrize("streams", [False, True])
def test_states_take_back_what_is_rejected_of_drafts(streams):
    drafts = {"method": "mtp", "tokens": 3, "acceptance": 0.5}
    cells = {"cache__cells": 6000, "cache__unified": not streams}
    world = hybrid(speculation=drafts, server__slots=3, workload__requests=12, **cells)
    found = run(world, check=True).summary
    assert found["failed"] == 0 < found["completed"]
    assert 0 < found["speculation"]["accepted_tokens"] < found["speculation"]["drafted_tokens"]


def test_windows_have_checkpoints_too():
    world = {"cache__policy": "sliding-window", "cache__window": 16, "cache__cells": 1024}
    requests = [asks(0, (1, 0, 600), users=(0, 300)), asks(1, (1, 0, 345), (3, 0, 20), users=(0, 300))]
    assert tell(hybrid(**world), requests).jobs[1].cached == 299  # The last token in the checkpoint is computed again.
    assert tell(hybrid(**world, server__ctx_checkpoints=0), requests).jobs[1].cached == 0


def test_a_run_tells_what_was_lost_and_which_flag_spares_it():
    summary = run(scenario(workload__requests=5), "hybrid").summary
    assert summary["checkpoints"].keys() == {"made", "restored", "lost_tokens", "spared_tokens"}
    told = {"checkpoints": {"lost_tokens": 0, "spared_tokens": 0}}
    assert lost_to_checkpoints(told, 32) == ""
    told["checkpoints"]["lost_tokens"] = 90
    assert lost_to_checkpoints(told, 0).endswith("there were none (--ctx-checkpoints 32)")
    assert "no flag" in lost_to_checkpoints(told, 32)
    told["checkpoints"]["spared_tokens"] = 40
    assert "--checkpoint-min-step 0" in lost_to_checkpoints(told, 32)
    assert "spares 40 of them, the others by no flag" in lost_to_checkpoints(told, 32)
