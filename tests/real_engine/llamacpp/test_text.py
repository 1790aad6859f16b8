"""What is said in a cache that is shared, tidied and used again is what each text says alone.

llama.cpp against itself, with SmolLM2: many sequences in a cache under the policy's bookkeeping, and each request's
text fed to a fresh context that has nothing else. Passes of other sizes sum in another order, so that logits differ by
rounding, and the likeliest token may be another where the first two are closer than that.
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
"""Tokens that the first of them is answered with; each that follows with one less."""
ROUNDING = 1.0
"""What is likeliest in company may be so much less likely alone, in logits; weights have four bits, which coarsens."""
N_UBATCH = 24
"""Where a processor has AMX, version 0.3.8 computes passes of 32 tokens and more with it, and some come out wrong."""


@pytest.fixture(scope="module")
def smollm2(library):
    with LlamaModel(library, gguf_path("smollm2")) as loaded:
        yield loaded


def logits(context, row):
    pointer = context.library.api.llama_get_logits_ith(context.handle, row)
    return np.ctypeslib.as_array(pointer, (context.model.vocabulary,)).copy()


class Tidying(GivenClock):
    """Asks for defragmentation before every third step, where there is such a thing."""

    def __init__(self, inner):
        super().__init__(inner)
        self.steps = self.moved = 0

    def step(self, step, batches):
        seconds = super().step(step, batches)
        self.steps += 1
        if self._inner.context.era == "A" and self.steps % 3 == 0:
            self.moved += self._inner.policy.compact().n_cells
        return seconds


def said_in_company(model, policy):
    """Of each request its text; and the backend."""
    divided = policy == "streams"
    world = scenario(
        server={"slots": 3, "n_batch": 64, "n_ubatch": N_UBATCH, "slot_context": 128, "keep_idle_slots": False},
        cache={"cells": 768 if divided else 256, "unified": not divided},
    )
    backend = backend_of(model, world, policy)
    backend.prompt = lambda request: list(PROMPTS[request.id])
    clock = Tidying(backend)
    with backend.context:
        requests = Listed([(0.05 * i, len(prompt), ANSWER - i) for i, prompt in enumerate(PROMPTS)])
        serve(world, requests, clock, backend.policy)
        backend.finish()
    return backend.texts, clock


def losses(model, prompt, answer):
    """By how much each token of an answer is less likely than the likeliest, in a context that has nothing else."""
    text = [*prompt, *answer]
    with Context(model, ContextSettings(cells=256, n_batch=64, n_ubatch=N_UBATCH)) as context:
        context.decode([(token, i, i == len(prompt) - 1, (0,)) for i, token in enumerate(prompt)])
        rows = [logits(context, len(prompt) - 1)]
        for i in range(len(prompt), len(text) - 1):
            context.decode([(text[i], i, True, (0,))])
            rows.append(logits(context, 0))
    return np.array([row.max() - row[token] for row, token in zip(rows, answer, strict=True)])


@pytest.mark.parametrize("policy", [name for names in POLICIES.values() for name in names if name != "sliding-window"])
def test_texts_in_a_shared_cache_equal_those_computed_alone(smollm2, library, only, policy):
    only(next(era for era, names in POLICIES.items() if policy in names))
    texts, clock = said_in_company(smollm2, policy)
    assert len(texts) == len(PROMPTS) > 4
    lost = [losses(smollm2, prompt, texts[i][len(prompt) :]) for i, prompt in enumerate(PROMPTS)]
    assert [len(each) for each in lost] == [ANSWER - i for i in range(len(PROMPTS))]
    every = np.concatenate(lost)
    assert every.max() < ROUNDING
    assert (every == 0).mean() > 0.9
    assert library.era == "B" or clock.moved > 20


def test_the_answer_to_another_prompt_differs_by_more_than_rounding(smollm2):
    """The control: of what is said nearly nothing would be said."""
    texts, _ = said_in_company(smollm2, POLICIES[smollm2.library.era][0])
    lost = losses(smollm2, PROMPTS[2], texts[1][len(PROMPTS[1]) :])
    assert lost.max() > 4 * ROUNDING
    assert (lost == 0).mean() < 0.7
