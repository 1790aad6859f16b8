"""Accuracy of narrow K and V: exact for f32, ordered by width, mistakes refused in one line."""

import json
from importlib.resources import files

import numpy as np
import pytest

from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES
from kvsim.model.storage_types import bytes_per_number
from policies import CacheConfig, Chunk, available
from real_engine import Engine, load_model
from real_engine.accuracy import PAIRS, accuracy
from tests.gguf_files import SMOLLM2_MISSING, Small
from tests.kvsim.cli.answers import complaint
from tests.real_engine.recomputed import without_cache
from tests.worlds import command
from workloads import named_rng

KEYS = ["k", "v", "cell_bytes", "logits_rmse", "top1_agreement", "perplexity", "perplexity_over_f32"]


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def found(request):
    """150 tokens: two whole passes and a partial one."""
    if request.param == "smollm2" and SMOLLM2_MISSING:
        pytest.skip(SMOLLM2_MISSING)
    loaded = request.getfixturevalue("smollm2") if request.param == "smollm2" else load_model(request.param)
    return loaded, accuracy(loaded, tokens=150)


@pytest.mark.slow
def test_f32_is_the_reference(found):
    loaded, result = found
    row = result.table.iloc[0]
    assert (row["k"], row["v"]) == ("f32", "f32")
    assert (row["logits_rmse"], row["top1_agreement"], row["perplexity_over_f32"]) == (0, 1, 1)
    assert row["perplexity"] == result.reference_perplexity
    assert (result.model, result.weights, result.tokens) == (loaded.name, "f32", 150)


@pytest.mark.slow
def test_narrower_types_deviate_more(found):
    loaded, result = found
    assert list(zip(result.table["k"], result.table["v"], strict=True)) == list(PAIRS)
    alike = result.table[result.table["k"] == result.table["v"]]
    assert alike["k"].tolist() == list(STORAGES)
    assert np.diff(alike["logits_rmse"]).min() > 0
    assert np.diff(alike["cell_bytes"]).max() < 0
    assert (np.diff(alike["top1_agreement"]) <= 0).all()
    shape = loaded.transformer.shape
    numbers = shape.n_layers * shape.n_kv_heads * shape.d_head
    for row in result.table.to_dict("records"):
        assert row["cell_bytes"] == numbers * (bytes_per_number(row["k"]) + bytes_per_number(row["v"]))
        assert row["perplexity_over_f32"] == pytest.approx(row["perplexity"] / result.reference_perplexity)
    rmse = result.table.set_index(["k", "v"])["logits_rmse"]
    for mixed in (("q8_0", "q4_0"), ("q4_0", "q8_0")):
        assert rmse["q8_0", "q8_0"] < rmse[mixed] < rmse["q4_0", "q4_0"]


@pytest.mark.slow
def test_perplexity_is_that_of_a_pass_without_a_cache(found):
    loaded, result = found
    text = the_text(loaded)[:150]
    logits = without_cache(loaded.transformer, text).astype(np.float64)
    shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    by_hand = np.exp(-np.mean([shares[i, token] for i, token in enumerate(text[1:])]))
    assert result.reference_perplexity == pytest.approx(by_hand, rel=1e-5)


def the_text(loaded):
    if loaded.tokenizer is None:
        return named_rng(0, "accuracy").integers(0, loaded.transformer.shape.vocabulary, 512)
    page = files("real_engine").joinpath("accuracy_text.txt").read_text(encoding="utf-8")
    assert 400 <= len(page.split()) <= 600
    return loaded.tokenizer.encode(page)


def test_logits_are_those_of_an_engine_that_reads_token_by_token():
    """Whatever the size of a pass, each token sees the stored K and V of earlier tokens and its own."""
    loaded = load_model("tiny")
    result = accuracy(loaded, ["q4_0"], ["q8_0"], tokens=70)
    text = the_text(loaded)[:70]
    logits = {}
    for types in (("f32", "f32"), ("q4_0", "q8_0")):
        policy = available()["contiguous"](CacheConfig(cells=128, sequences=1, max_tokens=128))
        engine = Engine(
            loaded.transformer, policy.groups, policy.kernel, 0, **dict(zip(("type_k", "type_v"), types, strict=True))
        )
        rows = []
        for i, token in enumerate(text):
            (batch,) = policy.allocate([Chunk(0, i, 1)], views=True)
            rows.append(engine.run(np.array([token]), batch)[0])
        logits[types] = np.array(rows)
    narrow, wide = logits["q4_0", "q8_0"], logits["f32", "f32"]
    (row,) = result.table.to_dict("records")
    # Different rounding of a sum may select another code of q4_0 here and there.
    assert row["logits_rmse"] == pytest.approx(np.sqrt(np.mean((narrow - wide) ** 2)), rel=0.05)
    assert row["top1_agreement"] == pytest.approx(np.mean(narrow.argmax(axis=1) == wide.argmax(axis=1)), abs=0.03)


def test_given_types_are_combined():
    def pairs(*types):
        table = accuracy("tiny", *types, tokens=8).table
        return list(zip(table["k"], table["v"], strict=True))

    assert pairs(["q8_0", "f16"], ["q4_0"]) == [("q8_0", "q4_0"), ("f16", "q4_0")]
    assert pairs(["q8_0"]) == [("q8_0", v) for v in STORAGES]
    assert pairs(None, ["f16", "f16"]) == [(k, "f16") for k in STORAGES]


def test_the_command_prints_one_object_or_a_table():
    once = command("accuracy", "--model", "tiny", "--tokens", "20", "--cache-type-k", "q8_0", "--json")
    again = command("accuracy", "--model", "tiny", "--tokens", "20", "--cache-type-k", "q8_0", "--json")
    assert (once.returncode, once.stderr) == (0, "")
    printed = json.loads(once.stdout)
    assert printed == json.loads(again.stdout)
    assert (printed["model"], printed["tokens"], printed["text"]) == ("tiny", 20, "random tokens, seed 0")
    assert [list(row) for row in printed["pairs"]] == [KEYS] * 4
    table = command("accuracy", "--model", "tiny", "--tokens", "20", "--cache-type-v", "q4_0").stdout
    assert table.count("q4_0") == 5
    assert "tiny, weights as f32, reads 20 tokens" in table


def test_a_short_context_cuts_the_text(tmp_path):
    path = str(Small(fields={"llama.context_length": 40}).write(tmp_path / "m.gguf"))
    result = accuracy(path, ["f16"], ["f16"])
    assert result.tokens == 40
    assert result.text == "a page of English"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cache-type-k", "q5_1"), "--cache-type-k: no type called 'q5_1'; there are f32, f16, q8_0, q4_0"),
        (("--cache-type-v", ""), "--cache-type-v: no type called ''"),
        (("--model", "none"), "no model called 'none'"),
        (("--model", "none.gguf"), "none.gguf: cannot be read"),
        (("--weights", "q4_0"), "no type of weights called 'q4_0'"),
    ],
)
def test_mistakes_are_refused_in_one_line(arguments, words):
    assert words in complaint(command("accuracy", "--model", "tiny", *arguments))


def test_too_short_a_text_and_heads_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(UserError, match="1 tokens; at least 2 are needed"):
        accuracy("tiny", tokens=1)
    path = str(Small(d_head=24, n_heads=2, n_kv_heads=2).write(tmp_path / "m.gguf"))
    with pytest.raises(UserError, match="heads of 24 numbers cannot be cut into blocks of 32"):
        accuracy(path)
