"""Perplexity of a text under policies that evict tokens, compared with a cache that keeps all of them.

The text is cut into passages, each a sequence of one cache. Each begins with a prompt, read in one pass; the tokens
behind it are fed one by one, as if they had been generated, and the policy evicts by the attention that the engine
measures. What is counted is how well each of those tokens was predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from kvsim.errors import UserError
from policies import CacheConfig, Chunk, Policy, SequencePlan
from real_engine.accuracy import text_tokens
from real_engine.arrays import FloatArray, IntArray
from real_engine.engine import Engine
from real_engine.loading import LoadedModel, build_policy, load_model
from real_engine.measured_attention import measured_for
from real_engine.model import Transformer

FULL = "paged"
"""The policy that keeps everything."""
_BLOCK = 16
"""Cells of a block, which others can use only when all of them are free."""


class EvictionSetting(NamedTuple):
    """A policy with its budget."""

    policy: str
    budget: int
    """Tokens that each sequence keeps in each group; for a ring, its window."""
    groups: int = 1
    """Groups of layers, each of which keeps tokens of its own."""
    sinks: int = 4
    """First tokens that rules with sinks always keep."""


@dataclass(frozen=True)
class EvictionCost:
    """What each policy's evictions cost on one text, and what they freed."""

    model: str
    weights: str
    """Storage form of the weights."""
    text: str
    """Description of the text that was read."""
    passages: int
    prompt: int
    """Tokens of each passage that are read in one pass, as a prompt."""
    tokens: int
    """Tokens of each passage, prompt included."""
    reference_perplexity: float
    """Perplexity of what follows the prompts when nothing is evicted."""
    table: pd.DataFrame
    """A row for each setting: policy, budget, groups, sinks, perplexity, perplexity_over_full, by_passage (the same
    ratio for each passage), held (tokens held at the end, as a share of all) and blocks (blocks of 16 cells that hold
    any at the end, as a share of those when nothing is evicted); the two shares are means over layers."""

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "table"}
        return flat | {"settings": self.table.to_dict("records")}


class _Outcome(NamedTuple):
    losses: FloatArray
    """Shape (passages,): mean negative log-likelihood of the tokens behind each prompt."""
    held: float
    """Tokens held at the end, in a layer."""
    blocks: float
    """Blocks that hold any of them, in a layer."""


def eviction_cost(
    settings: Sequence[EvictionSetting],
    model: str | LoadedModel = "smollm2",
    *,
    text: str | None = None,
    passages: int = 1,
    prompt: int | None = None,
    tokens: int | None = None,
    weights: str = "f32",
    seed: int = 0,
    threads: int | None = 1,
    progress: Callable[[float], None] | None = None,
) -> EvictionCost:
    """Read a text under each setting, and compare its perplexity with that when nothing is evicted.

    ``text``: by default the page of ``accuracy``. ``passages``: into how many it is cut. ``tokens``: the most in each;
    ``prompt``: how many of them are the prompt, by default half. ``progress`` is called with the share done. Raises
    ``UserError``.
    """
    loaded = load_model(model, seed, weights) if isinstance(model, str) else model
    for setting in settings:
        _check(setting, loaded.transformer.shape.n_layers)
    ids, described = text_tokens(loaded, text, seed)
    cut = _passages(ids, passages, tokens, loaded.context)
    n = cut.shape[1]
    prompt = n // 2 if prompt is None else prompt
    if not 1 <= prompt < n:
        raise UserError(f"a prompt of {prompt} tokens; from 1 to {n - 1} are accepted in passages of {n}")
    for setting in settings:
        _policy(setting, passages, n, prompt)  # A mistake in one of them should not show after minutes.
    done = 0

    def note() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done / ((len(settings) + 1) * (n - prompt)))

    with threadpool_limits(threads):
        full = _read(loaded.transformer, cut, prompt, EvictionSetting(FULL, n), note)
        outcomes = [_read(loaded.transformer, cut, prompt, setting, note) for setting in settings]
    rows = [
        {
            **setting._asdict(),
            "perplexity": math.exp(found.losses.mean()),
            "perplexity_over_full": math.exp((found.losses - full.losses).mean()),
            "by_passage": np.exp(found.losses - full.losses).tolist(),
            "held": found.held / full.held,
            "blocks": found.blocks / full.blocks,
        }
        for setting, found in zip(settings, outcomes, strict=True)
    ]
    reference = math.exp(full.losses.mean())
    return EvictionCost(loaded.name, weights, described, passages, prompt, n, reference, pd.DataFrame(rows))


def _check(setting: EvictionSetting, n_layers: int) -> None:
    if setting.budget < 2:
        raise UserError(f"a budget of {setting.budget} tokens; at least 2 are expected")
    if not 1 <= setting.groups <= n_layers:
        raise UserError(f"{setting.groups} groups of layers; from 1 to {n_layers} are accepted, the model's layers")


def _passages(ids: IntArray, passages: int, tokens: int | None, context: int | None) -> IntArray:
    """The text cut into passages of equal length, shape (passages, tokens of each); what is left over is dropped."""
    most = len(ids) // max(passages, 1)
    n = min(most, tokens or most, context or most)
    if passages < 1 or n < 2:
        raise UserError(
            f"{passages} passages of a text of {len(ids)} tokens: each needs at least 2, one to read and one to predict"
        )
    return ids[: passages * most].reshape(passages, most)[:, :n]


def _read(
    transformer: Transformer, text: IntArray, prompt: int, setting: EvictionSetting, note: Callable[[], None]
) -> _Outcome:
    """Read all passages; ``note`` is called for each token of them that is predicted."""
    passages, n = text.shape
    policy = _policy(setting, passages, n, prompt)
    engine = Engine(transformer, policy.groups, policy.kernel, 0, attention=measured_for(policy))
    losses = np.zeros(passages)

    def run(chunks: Sequence[Chunk]) -> FloatArray:
        """Logits after each chunk, where all attention so far is known when the policy evicts."""
        last: dict[int, FloatArray] = {}
        for batch in policy.allocate(chunks, views=True):
            engine.prepare(batch)
            tokens = np.concatenate([text[c.seq, c.start : c.start + c.n] for c in batch.chunks])
            last.update(zip([c.seq for c in batch.chunks], engine.run(tokens, batch), strict=True))
        return np.array([last[chunk.seq] for chunk in chunks])

    for seq in range(passages):
        policy.open(seq, SequencePlan(prompt, n, n))
    logits = np.concatenate([run([Chunk(seq, 0, prompt)]) for seq in range(passages)])
    for at in range(prompt, n):
        losses += _loss(logits, text[:, at])
        note()
        if at + 1 < n:
            logits = run([Chunk(seq, at, 1) for seq in range(passages)])
    return _Outcome(losses / (n - prompt), *_held(policy))


def _policy(setting: EvictionSetting, passages: int, n: int, prompt: int) -> Policy:
    """The policy, with room for all passages whole."""
    config = CacheConfig(
        cells=passages * (-(-n // _BLOCK) + 1) * _BLOCK,
        n_ubatch=max(prompt, passages),
        sequences=passages,
        max_tokens=n,
        block_size=_BLOCK,
        window=setting.budget,
        sinks=setting.sinks,
        prefix_cache=False,
        for_any_layout=True,
        budget=setting.budget,
        budget_groups=setting.groups,
    )
    policy = build_policy(setting.policy, config, f"{setting.policy} with a budget of {setting.budget}")
    if setting.policy != FULL and not policy.forgets:
        raise UserError(f"{setting.policy}: it evicts no tokens, so that they cost nothing")
    return policy


def _loss(logits: FloatArray, following: IntArray) -> FloatArray:
    """Negative log-likelihood of each row's next token."""
    shifted = (logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
    loss: FloatArray = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(following)), following]
    return loss


def _held(policy: Policy) -> tuple[float, float]:
    """Tokens, and blocks with any of them, that a layer holds in the mean."""
    tokens = blocks = 0.0
    for index, group in enumerate(policy.groups):
        cells = np.flatnonzero(policy.occupancy(index).position >= 0)
        tokens += group.share * len(cells)
        blocks += group.share * len(np.unique(cells // _BLOCK))
    return tokens, blocks
