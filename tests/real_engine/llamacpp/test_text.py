"""Text generated in a shared, compacted and reused cache equals text generated alone.

llama.cpp against itself, with SmolLM2: many sequences in a cache under the policy's bookkeeping, and each request's
text in a new context of its own. Passes of different sizes sum in different orders, so that logits differ by rounding,
and the most likely token may differ where the first two are closer than that.
"""

import json

import numpy as np
import pytest

from kvsim.model.engine_shapes import gguf_path
from real_engine.llama_library import Context, ContextSettings, LlamaModel
from real_engine.llamacpp import POLICIES
from tests.gguf_files import SMOLLM2_MISSING
from tests.paths import DATA
from tests.real_engine.llamacpp.runs import GivenClock, backend_of
from tests.worlds import Listed, scenario, serve

pytestmark = [pytest.mark.llama, pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING)]

RECORDED = json.loads((DATA / "llamacpp-greedy.json").read_text(encoding="utf-8"))
PROMPTS = [prompt["prompt"] for prompt in RECORDED["prompts"] if len(prompt["prompt"]) < 40]
ANSWER = 12
"""Tokens of the first answer; each further one has one less."""
ROUNDING = 1.0
"""Allowed loss in logits of a token when recomputed alone; large, since weights have four bits."""
N_UBATCH = 24
"""Below 32: on processors with AMX, version 0.3.8 computes some longer passes wrongly."""


@pytest.fixture(scope="module")
def smollm2(library):
    with LlamaModel(library, gguf_path("smollm2")) as loaded:
        yield loaded


def logits(context, row):
    pointer = context.library.api.llama_get_logits_ith(context.handle, row)
    return np.ctypeslib.as_array(pointer, (context.model.vocabulary,)).copy()


class DefragmentingClock(GivenClock):
    """Also defragments after every third step in era A."""

    def __init__(self, inner):
        super().__init__(inner)
        self.steps = self.moved = 0

    def step(self, step, batches):
        seconds = super().step(step, batches)
        self.steps += 1
        if self._inner.context.era == "A" and self.steps % 3 == 0:
            self.moved += self._inner.policy.compact().n_cells
        return seconds


def texts_in_shared_cache(model, policy):
    """Texts by request, and the backend."""
    divided = policy == "streams"
    world = scenario(
        server={"slots": 3, "n_batch": 64, "n_ubatch": N_UBATCH, "slot_context": 128, "keep_idle_slots": False},
        cache={"cells": 768 if divided else 256, "unified": not divided},
    )
    backend = backend_of(model, world, policy)
    backend.prompt = lambda request: list(PROMPTS[request.id])
    clock = DefragmentingClock(backend)
    with backend.context:
        requests = Listed([(0.05 * i, len(prompt), ANSWER - i) for i, prompt in enumerate(PROMPTS)])
        serve(world, requests, clock, backend.policy)
        backend.finish()
    return backend.texts, clock


def losses(model, prompt, answer):
    """Difference in logits between the most likely token and each token of an answer, computed alone."""
    text = [*prompt, *answer]
    with Context(model, ContextSettings(cells=256, n_batch=64, n_ubatch=N_UBATCH)) as context:
        context.decode([(token, i, i == len(prompt) - 1, (0,)) for i, token in enumerate(prompt)])
        rows = [logits(context, len(prompt) - 1)]
        for i in range(len(prompt), len(text) - 1):
            context.decode([(text[i], i, True, (0,))])
            rows.append(logits(context, 0))
    return np.array([row.max() - row[token] for row, token in zip(rows, answer, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for names in POLICIES.values() for name in names if name != "sliding-window"])
def test_texts_in_a_shared_cache_equal_those_computed_alone(smollm2, library, only, policy):
    only(next(era for era, names in POLICIES.items() if policy in names))
    texts, clock = texts_in_shared_cache(smollm2, policy)
    assert len(texts) == len(PROMPTS) > 4
    lost = [losses(smollm2, prompt, texts[i][len(prompt) :]) for i, prompt in enumerate(PROMPTS)]
    assert [len(each) for each in lost] == [ANSWER - i for i in range(len(PROMPTS))]
    every = np.concatenate(lost)
    assert every.max() < ROUNDING
    assert (every == 0).mean() > 0.9
    assert library.era == "B" or clock.moved > 20


@pytest.mark.slow
def test_the_answer_to_another_prompt_differs_by_more_than_rounding(smollm2):
    """The control: most tokens would not be chosen."""
    texts, _ = texts_in_shared_cache(smollm2, POLICIES[smollm2.library.era][0])
    lost = losses(smollm2, PROMPTS[2], texts[1][len(PROMPTS[1]) :])
    assert lost.max() > 4 * ROUNDING
    assert (lost == 0).mean() < 0.7
