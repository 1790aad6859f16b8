"""Which tokens of a text rules of eviction keep, by the attention that SmolLM2 pays: ``python -m
benchmarks.reproduced.survivors``.

The scores that kvsim draws where there is no model are set by these figures (docs/reproduced.md, "Token eviction").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from policies import Chunk, Group, MicroBatch, Place, View
from policies.cells.token_rules import OBSERVED, HeavyHitters, PromptHeavy, TokenRule
from policies.vocabulary import Reads
from real_engine.arrays import FloatArray, IntArray
from real_engine.engine import Engine, layer_groups
from real_engine.loading import load_model
from real_engine.measured_attention import MeasuredAttention

TEXT = Path(__file__).parents[2] / "examples/reproduced/reading.txt"
"""The text that is read, cut into passages."""
TOKENS = 1024
"""Tokens of a passage, all of them a prompt."""
GROUPS = (1, 5, 30)
"""Into how many groups SmolLM2's 30 layers are divided."""
SHARES = (1 / 2, 1 / 4, 1 / 8)
"""Budgets, as shares of the passage."""
SINKS = 4
"""First tokens that are not counted among the survivors: every rule keeps them."""
RULES: dict[str, type[TokenRule]] = {"h2o": HeavyHitters, "snapkv": PromptHeavy}
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class _Kept(MeasuredAttention):
    """Keeps the weights of each query instead of summing them up."""

    def __init__(self) -> None:
        super().__init__()
        self.by_layer: Sequence[FloatArray] = ()
        """For each layer, shape (queries, tokens): summed over its heads."""

    def note(self, batch: MicroBatch, received: Sequence[FloatArray]) -> None:
        """Keep a pass that is the whole text."""
        self.by_layer = received


def weights(passages: int = 5) -> list[Sequence[FloatArray]]:
    """For each passage, layer by layer, the attention that each query token pays to each token."""
    model = load_model("smollm2")
    assert model.tokenizer is not None
    text = np.array(model.tokenizer.encode(TEXT.read_text(encoding="utf-8")))
    n_layers = model.transformer.shape.n_layers
    groups = [Group(TOKENS, share=1 / n_layers)] * n_layers
    every, one = np.arange(TOKENS), np.array([TOKENS])
    place = Place(every, Reads(one, one, one, np.array([1]), TOKENS), views=(View(every, every),))
    batch = MicroBatch((Chunk(0, 0, TOKENS),), (place,) * n_layers)
    found = []
    with threadpool_limits(1):
        for passage in range(passages):
            kept = _Kept()
            engine = Engine(model.transformer, groups, "gather", 0, attention=kept)
            engine.run(text[passage * TOKENS : (passage + 1) * TOKENS], batch)
            found.append(kept.by_layer)
    return found


def grouped(by_layer: Sequence[FloatArray], n: int) -> list[FloatArray]:
    """The layers' weights added up by group."""
    of = layer_groups(len(by_layer), [Group(0, share=1 / n)] * n)
    return [np.sum([w for w, own in zip(by_layer, of, strict=True) if own == group], axis=0) for group in range(n)]


def received(rule: type[TokenRule], paid: FloatArray) -> FloatArray:
    """The scores that a rule ranks tokens by, shape (tokens,): the sum over all queries, or over the last."""
    queries = rule(len(paid)).queries
    scores: FloatArray = paid[-(queries or len(paid)) :].sum(axis=0)
    return scores


def latest(rule: type[TokenRule], budget: int) -> int:
    """How many of the latest tokens a rule keeps in any case."""
    return rule(budget).queries or budget // 2


def survivors(rule: type[TokenRule], paid: FloatArray, budget: int) -> IntArray:
    """Positions that a rule keeps of a prompt beside the sinks and the latest tokens, ascending."""
    scores, every = received(rule, paid).astype(np.float64), np.arange(len(paid))
    kept = np.delete(every, rule(budget).evicted(every, len(every), lambda positions: scores[positions]))
    return kept[(kept >= SINKS) & (kept < len(every) - latest(rule, budget))]


def run_length(kept: IntArray) -> float:
    """Mean number of positions in a row."""
    return len(kept) / (1 + int((np.diff(kept) > 1).sum()))


def overlap(sets: Sequence[IntArray]) -> float:
    """Mean share of one group's survivors that another one keeps as well."""
    pairs = [(a, b) for i, a in enumerate(sets) for b in sets[i + 1 :]]
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in pairs])) if pairs else float("nan")


def by_budget(found: Sequence[Sequence[FloatArray]]) -> pd.DataFrame:
    """A row for each rule, budget and number of groups: lengths of runs and overlap, means over passages."""
    rows = []
    for n in GROUPS:
        groups = [grouped(by_layer, n) for by_layer in found]
        for name, rule in RULES.items():
            for share in SHARES:
                budget = int(share * TOKENS)
                kept = [[survivors(rule, paid, budget) for paid in passage] for passage in groups]
                always = latest(rule, budget) + SINKS
                chance = (budget - always) / (TOKENS - always)
                lengths = [run_length(own) for passage in kept for own in passage]
                rows.append(
                    {
                        "rule": name,
                        "groups": n,
                        "budget": budget,
                        "survivors": np.mean([len(own) for passage in kept for own in passage]),
                        "mean_run": np.mean(lengths),
                        "run_by_chance": 1 / (1 - chance),
                        "overlap": np.mean([overlap(passage) for passage in kept]),
                        "overlap_by_chance": chance,
                    }
                )
    return pd.DataFrame(rows)


def of_scores(found: Sequence[Sequence[FloatArray]]) -> pd.DataFrame:
    """A row for each rule and number of groups: quantiles of log(score / mean), and correlations of log scores.

    Without the sinks and the last tokens. For H2O a score is divided by the queries that could see the token.
    ``slope`` is that of log score against the log of the distance from the end, ``rest`` the standard deviation of
    what is left without it; the correlations, of neighbours so many positions away and between groups, are of that.
    """
    rows = []
    for n in GROUPS:
        for name, rule in RULES.items():
            logs = [[_log_scores(rule, paid) for paid in grouped(by_layer, n)] for by_layer in found]
            every = [log for passage in logs for log in passage]
            row: dict[str, float | str] = {"rule": name, "groups": n}
            row |= {f"q{100 * q:g}": float(np.mean([np.quantile(log, q) for log in every])) for q in QUANTILES}
            row["std"] = float(np.mean([log.std() for log in every]))
            row["slope"] = float(np.mean([_slope(log) for log in every]))
            rests = [[_without_slope(log) for log in passage] for passage in logs]
            each = [rest for passage in rests for rest in passage]
            row["rest"] = float(np.mean([rest.std() for rest in each]))
            for lag in (1, 2, 4, 8, 16):
                row[f"lag{lag}"] = float(np.mean([np.corrcoef(rest[:-lag], rest[lag:])[0, 1] for rest in each]))
            between = [np.corrcoef(a, b)[0, 1] for passage in rests for a, b in _pairs(passage)]
            row["between_groups"] = float(np.mean(between)) if between else float("nan")
            rows.append(row)
    return pd.DataFrame(rows)


def _log_scores(rule: type[TokenRule], paid: FloatArray) -> FloatArray:
    inner = slice(SINKS, -OBSERVED)
    scores = received(rule, paid)[inner].astype(np.float64)
    if rule is HeavyHitters:
        scores /= np.arange(len(paid), 0, -1)[inner]
    found: FloatArray = np.log(scores / scores.mean())
    return found


def _log_distance(log: FloatArray) -> FloatArray:
    distance: FloatArray = np.log(np.arange(len(log), 0, -1) + OBSERVED)
    return distance


def _slope(log: FloatArray) -> float:
    return float(np.polyfit(_log_distance(log), log, 1)[0])


def _without_slope(log: FloatArray) -> FloatArray:
    x = _log_distance(log)
    rest: FloatArray = log - np.polyval(np.polyfit(x, log, 1), x)
    return rest


def _pairs(items: Sequence[FloatArray]) -> Iterator[tuple[FloatArray, FloatArray]]:
    return ((a, b) for i, a in enumerate(items) for b in items[i + 1 :])


def main() -> None:
    """Print both tables."""
    found = weights()
    with pd.option_context("display.width", 200, "display.max_columns", 30, "display.float_format", "{:.3f}".format):
        print(by_budget(found).to_string(index=False))
        print()
        print(of_scores(found).to_string(index=False))


if __name__ == "__main__":
    main()
