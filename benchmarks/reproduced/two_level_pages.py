"""Jenga's claims: memory held for tokens that no layer will look at again, and what it costs in throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduced.finding import Finding, mean, measured, ratio
from kvsim.experiments.estimates import Interval
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.run import run
from policies import CacheConfig, Chunk, available
from policies.delegating import DelegatingPolicy
from policies.layouts.two_level import TwoLevelPolicy
from policies.policy import Policy
from policies.vocabulary import MicroBatch

IDEA = "Two-level pages"
_EXAMPLES = Path(__file__).parents[2] / "examples" / "reproduced"
MOONCAKE = _EXAMPLES / "two-level-pages.toml"
GEMMA_2 = _EXAMPLES / "two-level-pages-gemma-2.toml"
_ISSUE = "vLLM issue 11382"


def needed_cells(policy: TwoLevelPolicy) -> float:
    """Cells of all layers that later tokens can see; sequences must not share any."""
    lengths = [table.length for table in policy.parts[0].tables.values()]
    return sum(
        group.share * sum(length if group.window is None else min(length, group.window) for length in lengths)
        for group in policy.groups
    )


class Meter(DelegatingPolicy):
    """Counts, after each step, cells that are held and those of them that are needed."""

    def __init__(self, inner: Policy):
        super().__init__(inner)
        self.held = self.needed = self.most_at_once = 0.0

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step, and count."""
        placed = super().allocate(step, views=views)
        assert isinstance(self.inner, TwoLevelPolicy)
        self.held += self.inner.usage().allocated
        self.needed += needed_cells(self.inner)
        self.most_at_once = max(self.most_at_once, len(self.inner.sequences()))
        return placed

    @property
    def waste(self) -> float:
        """Share of what is held that is not needed."""
        return 1 - self.needed / self.held


class Served(NamedTuple):
    """What one policy made of some traffic."""

    waste: float
    at_once: float
    """The most sequences that held cells."""
    tokens_per_s: float
    """Generated tokens in a second."""


def serve(scenario: Scenario, name: str) -> Served:
    """Run a scenario under a preset, metered."""
    meters: list[Meter] = []

    def metered(config: CacheConfig) -> Policy:
        meters.append(Meter(available()[name](config)))
        return meters[-1]

    served = run(scenario, metered, detail="requests")
    return Served(meters[0].waste, meters[0].most_at_once, float(served.summary["throughput_tokens_per_s"]))


def against_uniform(seed: int) -> list[Served]:
    """Serve conversations of Mooncake's kind on Gemma 3's layers, with uniform and with two-level pages."""
    return [serve(load_scenario(MOONCAKE, seed=seed), name) for name in ("uniform-pages", "two-level-pages")]


def against_groups(seed: int) -> list[Served]:
    """Serve the first of them, with groups of layers and with two-level pages."""
    few = load_scenario(MOONCAKE, seed=seed, workload__requests=60)
    return [serve(few, name) for name in ("layer-groups", "two-level-pages")]


def waste_of_one(tokens: int, window: int, window_layers: int) -> float:
    """Share that is not needed of what one sequence holds where all layers keep all tokens."""
    config = CacheConfig(
        tokens + 16, n_ubatch=tokens, max_tokens=tokens, window=window, window_layers=window_layers, prefix_cache=False
    )
    meter = Meter(available()["uniform-pages"](config))
    meter.allocate([Chunk(0, 0, tokens)])
    return meter.waste


def find() -> list[Finding]:
    """The findings of docs/reproduced.md, in its order."""
    uniform, two_level = zip(*measured(against_uniform), strict=True)
    groups, beside_groups = zip(*measured(against_groups), strict=True)
    gemma_2 = load_scenario(GEMMA_2)
    before, after = serve(gemma_2, "uniform-pages"), serve(gemma_2, "two-level-pages")
    stand_in = "times of Qwen3 14B, since no profile of Gemma ships"
    law = "a law fitted to Mooncake's lengths, without its shared prefixes"
    return [
        Finding(
            IDEA,
            "25 % of the memory is wasted on Gemma 2",
            _ISSUE,
            _once(waste_of_one(8192, 4096, 1)),
            "share",
            "nothing: one sequence of 8,192 tokens, half of the layers with a window of 4,096",
        ),
        Finding(
            IDEA,
            "56.25 % of the memory is wasted on Ministral",
            _ISSUE,
            _once(waste_of_one(131_072, 32_768, 3)),
            "share",
            "nothing: one sequence of 131,072 tokens, three of four layers with a window of 32,768",
        ),
        Finding(
            IDEA,
            "73.6 % of the memory is wasted on Gemma 3 and Mooncake's trace",
            "Jenga (SOSP 2025)",
            mean([each.waste for each in uniform]),
            "share",
            f"Gemma 3 12B; {law}",
        ),
        Finding(
            IDEA,
            "what is wasted with two-level pages",
            "no figure published",
            mean([each.waste for each in two_level]),
            "share",
            "tokens of a prompt's last chunk that no window sees any more, and parts of pages",
        ),
        Finding(
            IDEA,
            "1.46 to 1.80 times the throughput on average over models and traces, up to 4.92 times",
            "Jenga (SOSP 2025, arXiv 2503.18292), H100 and L4, against vLLM",
            ratio([each.tokens_per_s for each in two_level], [each.tokens_per_s for each in uniform]),
            "times",
            f"Gemma 3 12B alone, on an H100; {stand_in}; {law}",
        ),
        Finding(
            IDEA,
            "against vLLM's own groups of layers, which came later",
            "no figure published",
            ratio([each.tokens_per_s for each in beside_groups], [each.tokens_per_s for each in groups]),
            "times",
            "the same, with a fifth of the requests",
        ),
        Finding(
            IDEA,
            "the most requests at once, two-level pages over uniform ones",
            "no figure published",
            ratio([each.at_once for each in two_level], [each.at_once for each in uniform]),
            "times",
            "the same",
        ),
        Finding(
            IDEA,
            "1.15 times the throughput (1,240 against 1,077 tokens/s) on Gemma 2 27B",
            "vLLM pull request 11938: 50 prompts of 6,144 tokens, 1,024 generated",
            _once(after.tokens_per_s / before.tokens_per_s),
            "times",
            f"{stand_in}; lengths are fixed, so that seeds change nothing",
        ),
    ]


def _once(value: float) -> Interval:
    """A figure in which nothing is drawn."""
    return Interval(value, value, value)
