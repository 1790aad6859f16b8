"""Our engine says what llama.cpp says: greedy text of SmolLM2, weights and cache in f32 in both.

``tests/data/llamacpp-greedy.json`` is what llama.cpp said here; ``benchmarks/record_greedy.py`` recorded it. The two
sum in different orders, so that logits differ by rounding, and the likeliest token may be another where the first two
are closer than that. Our engine is fed llama.cpp's tokens, one a step: as long as it would have said the same, that is
its own free text.
"""

import json
from functools import partial

import numpy as np
import pytest

from kvsim.model.engine_shapes import gguf_path
from policies import CacheConfig, Chunk, SequencePlan, available
from real_engine import Engine, load_model
from real_engine.generate import generate
from real_engine.tokenizer import Message
from tests.gguf_files import SMOLLM2_MISSING
from tests.paths import DATA

pytestmark = pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING)

RECORDED = json.loads((DATA / "llamacpp-greedy.json").read_text(encoding="utf-8"))
PROMPTS = {prompt["kind"]: prompt for prompt in RECORDED["prompts"]}
ROUNDING = 5e-4
"""Logits of the two engines may differ by so much: about eight times as much as was seen."""


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


def follow(model, name, kinds, n=48, engine_of=Engine):
    """Our logits before each of the ``n`` tokens that llama.cpp said: of each prompt an array (n, vocabulary).

    All sequences run at the same time: the prompts in one step, then a token of each.
    """
    prompts = [PROMPTS[kind] for kind in kinds]
    texts = [p["prompt"] + p["continuation"][:n] for p in prompts]
    longest = max(map(len, texts))
    # Windows that hold it all, so that nobody forgets; room for layouts that pad, or copy what grows.
    config = CacheConfig(
        cells=len(kinds) * -(-4 * longest // 64) * 64,
        n_ubatch=512,
        sequences=len(kinds),
        max_tokens=longest,
        window=longest,
        n_layers=model.transformer.shape.n_layers,
    )
    policy = available()[name](config)
    engine = engine_of(model.transformer, policy.groups, policy.kernel, 0)
    for seq, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        policy.open(seq, SequencePlan(len(prompt["prompt"]), len(text), len(text)))
    found = [[] for _ in texts]
    step = [Chunk(seq, 0, len(prompt["prompt"])) for seq, prompt in enumerate(prompts)]
    for _ in range(n):
        for batch in policy.allocate(step, views=True):
            tokens = [token for c in batch.chunks for token in texts[c.seq][c.start : c.start + c.n]]
            for chunk, row in zip(batch.chunks, engine.run(np.array(tokens), batch), strict=True):
                if chunk.start + chunk.n >= len(prompts[chunk.seq]["prompt"]):
                    found[chunk.seq].append(row)
        step = [Chunk(c.seq, c.start + c.n, 1) for c in step]
    return dict(zip(kinds, map(np.array, found), strict=True))


def disagreements(found):
    """Tokens that are not llama.cpp's although its first two are further apart than rounding; and the largest
    difference of a logit that was recorded."""
    wrong, furthest = [], 0.0
    for kind, logits in found.items():
        prompt = PROMPTS[kind]
        ours = logits.argmax(axis=1).tolist()
        for i, (row, token) in enumerate(zip(logits, ours, strict=True)):
            if token != prompt["continuation"][i] and prompt["gap"][i] > 2 * ROUNDING:
                wrong.append((kind, i))
            ids, theirs = zip(*prompt["largest"][i], strict=True)
            furthest = max(furthest, float(np.abs(row[list(ids)] - theirs).max()))
    return wrong, furthest


@pytest.mark.parametrize("policy", ["contiguous", "paged", "oracle"])
def test_eight_concurrent_texts_equal_llamacpps(model, policy):
    wrong, furthest = disagreements(follow(model, policy, list(PROMPTS)))
    assert wrong == []
    assert furthest < ROUNDING


@pytest.mark.parametrize(("number", "policy"), list(enumerate(available())))
def test_a_text_under_every_policy_equals_llamacpps(model, number, policy):
    """Another prompt for each, in turn."""
    kind = list(PROMPTS)[number % len(PROMPTS)]
    wrong, furthest = disagreements(follow(model, policy, [kind], 16))
    assert wrong == []
    assert furthest < ROUNDING


def test_a_freely_generated_text_equals_llamacpps(model):
    """Told through the engine's own way of taking its likeliest token."""
    prompt = PROMPTS["counting"]
    told = generate(prompt["text"], model, "paged", 12)
    "".join(told)
    assert told.tokens == prompt["continuation"][:12]


def test_prompts_are_tokenised_as_by_llamacpp(model):
    for kind, prompt in PROMPTS.items():
        encode = (lambda t: model.tokenizer.encode_chat([Message("user", t)])) if kind == "chat" else None
        assert (encode or model.tokenizer.encode)(prompt["text"]) == prompt["prompt"]


def test_the_recording_is_of_this_model_and_determines_almost_every_token():
    assert RECORDED["file"] == gguf_path(RECORDED["model"]).name
    gaps = [gap for prompt in PROMPTS.values() for gap in prompt["gap"]]
    assert len(gaps) == 48 * len(PROMPTS)
    assert np.mean(np.array(gaps) > 2 * ROUNDING) > 0.99
    for prompt in PROMPTS.values():
        assert [row[0][0] for row in prompt["largest"]] == prompt["continuation"]


def test_a_cache_in_f16_deviates_by_more_than_rounding(model):
    """The control: the bound is tight enough to tell."""
    narrow = partial(Engine, type_k="f16", type_v="f16")
    _, furthest = disagreements(follow(model, "paged", ["French"], 8, narrow))
    assert furthest > 2 * ROUNDING
