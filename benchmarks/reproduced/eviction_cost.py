"""What token eviction costs SmolLM2 in perplexity, by the attention that it pays itself: short runs, a minute in all.

The table of docs/reproduced.md is of longer runs; ``kvsim accuracy`` makes both.
"""

from __future__ import annotations

from benchmarks.reproduced.finding import Finding
from benchmarks.reproduced.survivors import TEXT
from kvsim.experiments.estimates import Interval
from kvsim.reports.accuracy_report import ratio_interval
from real_engine.eviction_cost import EvictionSetting, eviction_cost

PASSAGES = 5
PROMPT = 256
TOKENS = 320
"""Tokens of a passage, prompt included."""
BUDGET = 64
"""A fifth of them."""
_DIFFERS = (
    f"SmolLM2-135M in f32, {PASSAGES} passages of English, {TOKENS - PROMPT} tokens behind prompts of {PROMPT}, "
    "positions as in the text, one choice of tokens for all heads and layers"
)


def find() -> list[Finding]:
    """The claims of three papers about quality."""
    settings = [
        EvictionSetting("streaming-llm", BUDGET, sinks=0),
        EvictionSetting("streaming-llm", BUDGET),
        EvictionSetting("h2o", BUDGET),
        EvictionSetting("snapkv", BUDGET),
    ]
    cost = eviction_cost(
        settings, text=TEXT.read_text(encoding="utf-8"), passages=PASSAGES, prompt=PROMPT, tokens=TOKENS
    )
    window, streaming, h2o, snapkv = [_interval(by_passage) for by_passage in cost.table["by_passage"]]
    sinks = "Xiao et al., StreamingLLM (arXiv 2309.17453), Table 1: Llama 2 13B on a book of PG19, 1,024 tokens kept"
    heavy = "Zhang et al., H2O (arXiv 2306.14048): OPT, LLaMA and GPT-NeoX on HELM and lm-eval tasks"
    snap = "Li et al., SnapKV (arXiv 2404.14469): several models of 7B and more on 16 data sets of long texts"
    name = "Token eviction"
    return [
        Finding(name, "perplexity 5,158 if just the last tokens are kept", sinks, window, "times", _DIFFERS),
        Finding(name, "5.40 with the first four as well, as without eviction", sinks, streaming, "times", _DIFFERS),
        Finding(name, "a fifth of the tokens, chosen by attention, is nearly enough", heavy, h2o, "times", _DIFFERS),
        Finding(name, "what the prompt's end looks at is enough", snap, snapkv, "times", _DIFFERS),
    ]


def _interval(by_passage: list[float]) -> Interval:
    found = ratio_interval(by_passage)
    assert found is not None
    return found
