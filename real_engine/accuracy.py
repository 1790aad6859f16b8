"""Accuracy of narrow K and V: logits, top-1 tokens and perplexity compared with a cache in f32.

Every pair of types reads the same text, a few tokens in each pass, so that every token attends to K and V as stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES, Storage
from policies import CacheConfig, Chunk, Policy, SequencePlan, available
from real_engine.arrays import FloatArray, IntArray
from real_engine.engine import Engine
from real_engine.loading import LoadedModel, load_model
from real_engine.model import Attend, Transformer
from workloads import named_rng

PAIRS: tuple[tuple[Storage, Storage], ...] = (
    *((storage, storage) for storage in STORAGES),
    ("q8_0", "q4_0"),
    ("q4_0", "q8_0"),
    ("f16", "q4_0"),
    ("q4_0", "f16"),
)
"""Default pairs of types for K and V: both alike, and mixtures of a narrow and a wider one."""

_TEXT = "accuracy_text.txt"
_RANDOM_TOKENS = 512
"""Length of the text for a model without a vocabulary."""
_POLICY = "paged"
"""Policy under which the text is read. Any policy that evicts nothing gives the same figures but for rounding."""
_STEP = 64
"""Tokens in one forward pass."""
_SEQ = 0
"""Number of the only sequence."""


@dataclass(frozen=True)
class Accuracy:
    """Deviation of each pair of types for K and V from f32, on one text."""

    model: str
    weights: str
    """Storage form of the weights."""
    text: str
    """Description of the text that was read."""
    tokens: int
    """Tokens of the text: logits are compared after each, and each but the first is predicted."""
    reference_perplexity: float
    """Perplexity with K and V in f32."""
    table: pd.DataFrame
    """A row for each pair: k, v, cell_bytes, logits_rmse (root mean squared difference from f32's logits, over all
    tokens and the whole vocabulary), top1_agreement (share of tokens after which the most likely token is the same),
    perplexity (exp of the mean negative log-likelihood of each next token), perplexity_over_f32."""

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "table"}
        return flat | {"pairs": self.table.to_dict("records")}


class AllLogitsTransformer(Transformer):
    """A transformer that returns the logits after every token of a pass, whichever were asked for."""

    __slots__ = ()

    def forward(self, tokens: IntArray, positions: IntArray, outputs: IntArray, attend: Attend) -> FloatArray:
        """Logits after all tokens, shape (n_tokens, vocabulary)."""
        return Transformer.forward(self, tokens, positions, np.arange(len(tokens)), attend)


def accuracy(
    model: str | LoadedModel = "smollm2",
    types_k: Sequence[Storage] | None = None,
    types_v: Sequence[Storage] | None = None,
    *,
    text: str | None = None,
    weights: str = "f32",
    tokens: int | None = None,
    seed: int = 0,
    threads: int | None = 1,
    progress: Callable[[float], None] | None = None,
) -> Accuracy:
    """Read a text with K and V stored in several types, and compare each with f32.

    ``text`` is by default a page of English that comes with the package; for a model without a vocabulary, which can
    read none, it is random tokens drawn from ``seed``. ``tokens`` limits its length. Every combination of ``types_k``
    and ``types_v`` is tried; if only one of the two is given, the other runs over all types, and if neither, ``PAIRS``
    is used. ``threads`` are those of the BLAS. ``progress`` is called with the share done. Raises ``UserError``.
    """
    loaded = load_model(model, seed, weights) if isinstance(model, str) else model
    if tokens is not None and tokens < 2:
        raise UserError(f"{tokens} tokens; at least 2 are needed, one to read and one to predict")
    ids, described = text_tokens(loaded, text, seed)
    ids = ids[:tokens][: loaded.context]
    pairs = list(dict.fromkeys((k, v) for k in types_k or STORAGES for v in types_v or STORAGES))
    if not types_k and not types_v:
        pairs = list(PAIRS)
    # f32 is read once: its logits are the reference and give its own row.
    readers = {pair: _Reader(loaded.transformer, ids, *pair) for pair in dict.fromkeys([("f32", "f32"), *pairs])}
    with threadpool_limits(threads):
        # Interleaved, so that the logits of only one pass of two readers are held at a time.
        for start in range(0, len(ids), _STEP):
            stop = min(start + _STEP, len(ids))
            reference = None
            for at, reader in enumerate(readers.values()):
                logits = reader.read(start, stop)
                reference = logits if reference is None else reference
                reader.compare(logits, reference, ids[start + 1 : stop + 1])
                if progress is not None:
                    progress((start + (stop - start) * (at + 1) / len(readers)) / len(ids))
    perplexity = {pair: math.exp(reader.negative_log_likelihood / (len(ids) - 1)) for pair, reader in readers.items()}
    first = perplexity["f32", "f32"]
    shape = loaded.transformer.shape
    rows = [
        {
            "k": k,
            "v": v,
            "cell_bytes": shape.cell_bytes(k, v),
            "logits_rmse": math.sqrt(readers[k, v].squared_error / (len(ids) * shape.vocabulary)),
            "top1_agreement": readers[k, v].agreements / len(ids),
            "perplexity": perplexity[k, v],
            "perplexity_over_f32": perplexity[k, v] / first,
        }
        for k, v in pairs
    ]
    return Accuracy(loaded.name, weights, described, len(ids), first, pd.DataFrame(rows))


class _Reader:
    """An engine that reads the text, with running sums of its deviation from the reference."""

    def __init__(self, transformer: Transformer, text: IntArray, k: Storage, v: Storage):
        weights = (getattr(transformer, field.name) for field in fields(transformer))
        transformer = AllLogitsTransformer(*weights)
        self._text = text
        self._policy = _policy(len(text), transformer.shape.n_layers)
        self._engine = Engine(transformer, self._policy.groups, self._policy.kernel, 0, type_k=k, type_v=v)
        self._policy.open(_SEQ, SequencePlan(len(text), len(text), len(text)))
        self.squared_error = 0.0
        """Sum of the squared differences."""
        self.agreements = 0
        """Tokens after which the most likely token is the reference's."""
        self.negative_log_likelihood = 0.0
        """Sum of the negative log-likelihoods of the next tokens."""

    def read(self, start: int, stop: int) -> FloatArray:
        """Logits after each token of ``[start, stop)``, shape (stop - start, vocabulary)."""
        found = []
        for batch in self._policy.allocate([Chunk(_SEQ, start, stop - start)], views=True):
            (chunk,) = batch.chunks
            found.append(self._engine.run(self._text[chunk.start : chunk.start + chunk.n], batch))
        return np.concatenate(found)

    def compare(self, logits: FloatArray, reference: FloatArray, following: IntArray) -> None:
        """Add a pass to the sums; ``following`` are the next tokens, of which the last token of the text has none."""
        self.squared_error += float(np.square(logits - reference).sum(dtype=np.float64))
        self.agreements += int((logits.argmax(axis=1) == reference.argmax(axis=1)).sum())
        rows = logits[: len(following)]
        shifted = rows - rows.max(axis=1, keepdims=True)
        log_odds = shifted[np.arange(len(following)), following]
        self.negative_log_likelihood += float((np.log(np.exp(shifted).sum(axis=1, dtype=np.float64)) - log_odds).sum())


def text_tokens(loaded: LoadedModel, text: str | None, seed: int) -> tuple[IntArray, str]:
    """Tokens of a text, by default of the page that comes with the package, and its description.

    For a model without a vocabulary they are random, drawn from ``seed``. Raises ``UserError``.
    """
    if loaded.tokenizer is None:
        if text is not None:
            raise UserError(f"model {loaded.name} has no vocabulary to read a text with")
        vocabulary = loaded.transformer.shape.vocabulary
        ids = named_rng(seed, "accuracy").integers(0, vocabulary, _RANDOM_TOKENS)
        return ids.astype(np.int64), f"random tokens, seed {seed}"
    page = files("real_engine").joinpath(_TEXT).read_text(encoding="utf-8") if text is None else text
    described = "a page of English" if text is None else "the given text"
    return np.array(loaded.tokenizer.encode(page), dtype=np.int64), described


def _policy(tokens: int, n_layers: int) -> Policy:
    config = CacheConfig(
        cells=-(-tokens // 64) * 64 + 64,
        n_ubatch=_STEP,
        sequences=1,
        max_tokens=tokens,
        n_layers=n_layers,
        for_any_layout=True,
    )
    return available()[_POLICY](config)
