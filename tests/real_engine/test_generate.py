"""Generated text: equal under every policy, drawn from the softmax, mistakes refused in one line."""

import numpy as np
import pytest

from kvsim.errors import UserError
from policies import CacheConfig, Chunk, available
from real_engine import load_model
from real_engine.generate import PromptedEngine, answer, generate
from real_engine.measured_attention import MeasuredAttention
from tests.gguf_files import SMOLLM2_MISSING, Small
from tests.real_engine.recomputed import generate_without_cache, swap_two_cells
from workloads import Request


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model that never ends an answer, so that every text has the requested length."""
    made = Small(tied=False, seed=3)
    made.tensors["output.weight"][:3] = 0
    return load_model(str(made.write(tmp_path_factory.mktemp("models") / "small.gguf")))


PROMPT = "hello world, hello 12 " * 3


@pytest.fixture(scope="module")
def expected(small):
    return generate_without_cache(small.transformer, small.tokenizer.encode(PROMPT), 20)


@pytest.mark.parametrize("policy", available())
def test_every_policy_generates_the_same_text(small, expected, policy):
    generated = generate(PROMPT, small, policy, 20)
    text = "".join(generated)
    assert generated.tokens == expected
    assert text == generated.text == small.tokenizer.decode(expected)
    assert len(generated.decode_s) == 19
    assert generated.prefill_s > 0


def test_a_policy_that_evicts_does_so_by_the_attention_of_the_model(small, expected):
    built = []

    def h2o(config):
        built.append(available()["h2o"](config.with_options(budget=12)))
        return built[-1]

    text = generate(PROMPT, small, h2o, 20)
    assert len(list(text)) <= len(text.tokens) == 20
    assert text.tokens != expected, "nothing was evicted"
    assert isinstance(built[0].attention, MeasuredAttention)


def test_a_prompt_longer_than_a_step(small, monkeypatch):
    prompt = PROMPT * 4
    once = generate(prompt, small, "paged", 5)
    list(once)
    monkeypatch.setattr("real_engine.generate._STEP", 7)
    often = generate(prompt, small, "contiguous", 5)
    list(often)
    assert often.tokens == once.tokens


@pytest.mark.parametrize("storage", ["f16", "q8_0"])
def test_narrow_keys_and_values(small, storage):
    generated = generate(PROMPT, small, "paged", 4, type_k=storage, type_v=storage)
    list(generated)
    assert len(generated.tokens) == 4


def test_draws_repeat_with_the_seed_and_only_with_it(small):
    def drawn(seed, policy="paged", temperature=1.0):
        generated = generate(PROMPT, small, policy, 16, temperature=temperature, seed=seed)
        list(generated)
        return generated.tokens

    assert drawn(1) == drawn(1) == drawn(1, "contiguous")
    assert drawn(1) != drawn(2)
    assert drawn(1, temperature=0.0) == drawn(2, temperature=0.0)


def test_draws_follow_the_softmax_at_the_temperature(small):
    """4000 draws of one token; the statistic is chi-square with about as many degrees of freedom as bins."""
    temperature, n = 2.0, 4000
    prompt = small.tokenizer.encode(PROMPT)
    policy = available()["paged"](CacheConfig(cells=256, sequences=1, max_tokens=256))
    engine = PromptedEngine(small.transformer, policy, prompt, temperature, seed=5)
    engine.begin(0, Request(0, 0.0, len(prompt), 1))
    (batch,) = policy.allocate([Chunk(0, 0, len(prompt))], views=True)
    tokens = np.array(prompt)
    engine._temperature = 0.0
    logits = engine.run(tokens, batch)[0].astype(np.float64)
    engine._temperature = temperature
    engine.model = type("Known", (), {"forward": lambda *_: logits[None, :].copy()})()
    drawn = np.bincount([engine.run(tokens, batch).argmax() for _ in range(n)], minlength=len(logits))
    share = np.exp(logits / temperature - (logits / temperature).max())
    share /= share.sum()
    bins = share * n >= 5
    assert bins.sum() > 20
    observed, mean = np.append(drawn[bins], drawn[~bins].sum()), np.append(share[bins], share[~bins].sum()) * n
    statistic, freedom = ((observed - mean) ** 2 / mean).sum(), bins.sum()
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)
    greedy = np.exp(logits - logits.max())
    greedy *= n / greedy.sum()
    assert ((drawn[bins] - greedy[bins]) ** 2 / np.maximum(greedy[bins], 1)).sum() > 3 * statistic, "the control"


def test_an_answer_ends_where_the_model_ends_it(small, expected):
    first_new = next(i for i, token in enumerate(expected) if i >= 3 and token not in expected[:i])
    small.tokenizer.ends, before = frozenset({expected[first_new]}), small.tokenizer.ends
    try:
        generated = generate(PROMPT, small, "paged", 20)
        text = "".join(generated)
    finally:
        small.tokenizer.ends = before
    assert generated.ended
    assert generated.tokens == expected[: first_new + 1]
    assert text == small.tokenizer.decode(expected[:first_new])


def test_answer_writes_as_it_goes_and_sums_up(tmp_path):
    path = str(Small(tied=False, seed=3).write(tmp_path / "m.gguf"))
    written = []
    generated = answer("hello", path, policy="ring", n=6, seed=4, chat=True, temperature=0.7, write=written.append)
    figures = generated.summary()
    assert "".join(written) == generated.text == figures["text"]
    assert figures["tokens"] == len(generated.tokens) <= 6
    assert figures["policy"] == "ring"
    assert figures["model"] == path
    assert figures["tokens_per_s"] == pytest.approx(1e3 / figures["ms_per_token"])
    assert f"{figures['tokens']} tokens under ring" in generated.describe()
    single = answer("hello", path, policy="paged", n=1, weights="mapped", threads=1, write=written.append)
    assert single.summary()["ms_per_token"] is None
    assert "ms each" not in single.describe()


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "the prompt is empty"),
        ("hello", {"n": 0}, "0 tokens; at least 1"),
        ("hello", {"temperature": -1.0}, "temperature -1; 0, or from 0.01 to 100"),
        ("hello", {"temperature": float("nan")}, "temperature nan"),
        ("hello", {"policy": "none"}, "no policy called 'none'; there are contiguous"),
        ("hello", {"n": 300}, "trained on 256 tokens; a prompt of 1 and 300 more"),
        ("hello " * 20, {"cells": 32}, "needs 2 blocks of 16 cells"),
        ("hello", {"cells": 0}, "0 cells; from 2 to"),
        ("hello", {"cells": 10**9}, "1000000000 cells; from 2 to"),
        ("hello " * 20, {"cells": 16, "policy": "growing"}, "16"),
        ("hello " * 20, {"cells": 16, "policy": "hf-reserved"}, "16"),
        ("hello " * 20, {"cells": 128, "policy": "growing", "n": 40}, "growing: "),
        ("hello", {"cells": 2}, "a cache of 2 cells"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(small, prompt, options, words):
    with pytest.raises(UserError) as caught:
        list(generate(prompt, small, **options))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_ring_continues_beyond_the_trained_context(small):
    generated = generate("hello", small, "ring", 300)
    list(generated)
    assert len(generated.tokens) == 300


def test_models_without_a_vocabulary_are_refused():
    with pytest.raises(UserError, match=r"model tiny: no supported vocabulary.*gpt2.*gpt-2 or smollm"):
        generate("hello", load_model("tiny"))


def test_a_policy_that_names_wrong_cells_garbles_the_text(small, expected):
    """The control: the comparison must be able to fail."""
    generated = generate(PROMPT, small, "paged", 20)
    swap_two_cells(generated._policy)
    list(generated)
    assert generated.tokens != expected


@pytest.mark.slow
@pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING)
def test_smollm2_knows_the_capital_of_france():
    model = load_model("smollm2", weights="int8")
    for policy in ("paged", "ring", "contiguous"):
        assert "".join(generate("The capital of France is", model, policy, 2)) == " Paris."
    chat = generate("What is the capital of France?", model, "paged", 16, chat=True)
    assert "Paris" in "".join(chat)
    assert chat.ended
