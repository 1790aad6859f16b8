"""Correctness on a real model: SmolLM2 generates under every policy what it would without a cache.

As in ``test_engine`` and ``test_definition``, whose definitions are used: several concurrent sequences, chunked
prompts, compaction at random moments. Where the two largest logits are closer than rounding, either token is right; so
a token is wrong if its logit, recomputed without a cache, is below the largest by more than that.
"""

from importlib.resources import files

import numpy as np
import pytest

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from real_engine import Engine
from tests.gguf_files import SMOLLM2_MISSING
from tests.policies import test_definition
from tests.real_engine.recomputed import without_cache
from tests.real_engine.test_engine import compacted_at_random
from tests.worlds import scenario

pytestmark = [pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING), pytest.mark.slow]

ROUNDING = 1e-3
REQUESTS = 5
COMPACTING = ("fill-holes", "full-compaction", "adaptive", "threshold-compaction", "idle-compaction")
OTHERS = (
    "contiguous",
    "llama.cpp-b6975",
    "streams",
    "chunked",
    "prompt-decode-regions",
    "paged",
    "ring",
    "sliding-window",
)
"""A policy for each other layout and window; ``test_engine`` has all of them, on a small model."""
WORLD = scenario(
    seed=9,
    workload={
        "kind": "batch",
        "requests": REQUESTS,
        "prompt_tokens": {"kind": "lognormal", "mu": 2.6, "sigma": 0.5, "max": 32},
        "output_tokens": {"kind": "lognormal", "mu": 1.8, "sigma": 0.5, "max": 12},
    },
    server__slots=4,
    server__n_batch=40,
    server__n_ubatch=20,
    cache__cells=256,
)


@pytest.fixture(scope="module")
def model(smollm2):
    return smollm2


@pytest.fixture(scope="module")
def page(model):
    return model.tokenizer.encode(files("real_engine").joinpath("accuracy_text.txt").read_text(encoding="utf-8"))


class PagePromptEngine(Engine):
    """An engine whose prompts are real text, each from another place of the page."""

    page = ()

    def prompt(self, request):
        start = 83 * request.id % (len(self.page) - request.prompt_tokens)
        return list(self.page[start : start + request.prompt_tokens])


def serve(model, page, name):
    """Serve under a policy; return the engine, the policy, the completed requests, and cells moved by each
    compaction."""
    # The ring must be too large to overwrite anything, the sliding window narrower than the texts.
    world = load_scenario(WORLD, cache__window=64 if name == "ring" else 20)
    policy = build_policy(world, name)
    moved = compacted_at_random(policy, np.random.default_rng(3))
    engine = PagePromptEngine(model.transformer, policy.groups, policy.kernel, world.seed)
    engine.page = page
    recorder = Recorder()
    drive(world, policy, engine, recorder, None)
    completed = [job for job in recorder.requests.jobs if job.status == "completed"]
    assert len(completed) == REQUESTS
    return engine, policy, completed, moved


_recomputed = {}
"""By text: its logits from one pass without a cache. Most policies generate the same text."""


def wrong_tokens(model, engine, policy, jobs):
    wrong = 0
    for job in jobs:
        prompt = engine.prompt(job.request)
        text = engine.texts[job.request.id][: len(prompt) + job.generated]
        assert len(text) == len(prompt) + job.generated
        key = (tuple(text), policy.groups if any(group.window for group in policy.groups) else ())
        if key not in _recomputed:
            _recomputed[key] = without_cache(model.transformer, text[:-1], policy.groups, len(prompt) - 1)
        logits, said = _recomputed[key], text[len(prompt) :]
        wrong += int((logits.max(axis=1) - logits[np.arange(len(said)), said] > ROUNDING).sum())
    return wrong


@pytest.mark.parametrize("name", [*COMPACTING, *OTHERS])
def test_every_policy_generates_the_cacheless_text_with_random_compaction(model, page, name):
    engine, policy, jobs, moved = serve(model, page, name)
    assert wrong_tokens(model, engine, policy, jobs) == 0
    if name in COMPACTING:
        assert sum(moved) > 0, "nothing was tested"


def test_omitted_moves_change_the_text(model, page, monkeypatch):
    """The control."""
    monkeypatch.setattr(Engine, "_apply", lambda *_: None)
    assert wrong_tokens(model, *serve(model, page, "full-compaction")[:3]) > 0


FORGETFUL = scenario(
    seed=8,
    workload={
        "kind": "batch",
        "requests": 2,
        "prompt_tokens": {"kind": "lognormal", "mu": 2.2, "sigma": 0.3, "max": 12},
        "output_tokens": {"kind": "fixed", "value": 20},
    },
    server__slots=2,
    server__n_batch=16,
    server__n_ubatch=8,
    cache__cells=100,
)


def compared(model, monkeypatch, name, keep, **keys):
    """``test_definition.compare`` on this model with less text: tokens where the engine differs from the definition."""
    monkeypatch.setattr(test_definition, "MODEL", model.transformer)
    monkeypatch.setattr(test_definition, "SHAPE", model.transformer.shape)
    world = load_scenario(FORGETFUL, **keys)
    policy = build_policy(world, name)
    engine = test_definition.Compared(policy, keep, world.seed)
    recorder = Recorder()
    drive(world, policy, engine, recorder, None)
    assert [job.status for job in recorder.requests.jobs] == ["completed"] * 2
    assert engine.agree + engine.part > 32
    assert engine.forgotten > 15, "nothing was tested"
    return engine.part


def test_an_overwriting_ring_follows_its_definition(model, monkeypatch):
    def sinks_and_newest(alive):
        return alive if len(alive) <= 16 else alive[:3] + alive[-13:]

    assert compared(model, monkeypatch, "ring", sinks_and_newest, cache__window=16, cache__sinks=3) == 0


def test_a_context_shift_follows_its_definition(model, monkeypatch):
    keys = {"server__slot_context": 16, "server__context_shift": True, "server__n_keep": 4}
    assert compared(model, monkeypatch, "full-compaction", list, **keys) == 0
