"""``kvsim accuracy``: what narrower K and V cost, and what token eviction does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer
from kvsim.cli.option_groups import refuse, takes_groups
from kvsim.cli.options import Json, NumpyThreads, Plugins, Policies, WeightType, load_plugins, storage_type
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES

if TYPE_CHECKING:
    from real_engine.eviction_cost import EvictionSetting

app = typer.Typer(add_completion=False)

_EVICTION = "Token eviction"


@dataclass(frozen=True)
class EvictionOptions:
    """How tokens are evicted."""

    budget: Annotated[
        list[int] | None,
        typer.Option(help="Tokens that are kept; can be given several times.", min=2, rich_help_panel=_EVICTION),
    ] = None
    budget_groups: Annotated[
        list[int] | None,
        typer.Option(
            help="Groups of layers that each keep tokens of their own (1); can be given several times.",
            min=1,
            rich_help_panel=_EVICTION,
        ),
    ] = None
    sinks: Annotated[
        int | None, typer.Option(help="First tokens that streaming-llm keeps (4).", min=0, rich_help_panel=_EVICTION)
    ] = None
    passages: Annotated[
        int | None,
        typer.Option(help="Cut the text into so many (1); several give an interval.", min=1, rich_help_panel=_EVICTION),
    ] = None
    prompt: Annotated[
        int | None,
        typer.Option(help="First tokens of a passage, read in one pass (half).", min=1, rich_help_panel=_EVICTION),
    ] = None

    def settings(self, policies: list[str]) -> list[EvictionSetting]:
        """Every policy with every budget and number of groups. Raises ``UserError``."""
        if not self.budget:
            raise UserError("--policy: a --budget is missing, such as --budget 128")
        from real_engine.eviction_cost import EvictionSetting

        sinks = 4 if self.sinks is None else self.sinks
        every = product(policies, self.budget, self.budget_groups or [1])
        return [EvictionSetting(name, kept, groups, sinks) for name, kept, groups in every]


@dataclass(frozen=True)
class ReadingOptions:
    """What is read, and how."""

    model: Annotated[
        str,
        typer.Option(help="The model: smollm2, tiny, small, or a GGUF file.", autocompletion=completion.engine_models),
    ] = "smollm2"
    cache_type_k: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Storage type of keys: {', '.join(STORAGES)}; can be given several times.",
            autocompletion=completion.storages,
        ),
    ] = None
    cache_type_v: Annotated[
        list[str] | None,
        typer.Option(help="Storage type of values; can be given several times.", autocompletion=completion.storages),
    ] = None
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Read this text instead of a page of English.")] = (
        None
    )
    tokens: Annotated[
        int | None, typer.Option(help="Read at most this many tokens of the text, or of each passage.", min=2)
    ] = None
    weights: WeightType = "f32"
    threads: NumpyThreads = 1

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of both measurements. Raises ``UserError``."""
        try:
            content = None if self.text is None else self.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"--text: {self.text} cannot be read: {e}") from None
        return {"text": content, "weights": self.weights, "tokens": self.tokens, "threads": self.threads}


@app.command()
@takes_groups
def accuracy(
    reading: ReadingOptions,
    evicting: EvictionOptions,
    policy: Policies = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Measure how much accuracy narrower K and V cost, or token eviction.

    Compares logits, likeliest tokens and perplexity with those of f32. Given several types, tries all combinations.
    With --policy, compares perplexity with that of a cache that keeps all tokens, for each policy and --budget.
    """
    how = reading.how
    if not policy:
        why = "it is for --policy, such as --policy h2o --budget 128"
        refuse(evicting, why, *(field.name for field in fields(evicting)))
        _narrow_types(reading, how, as_json)
        return
    if reading.cache_type_k or reading.cache_type_v:
        raise UserError("--policy: K and V are kept in f32; leave --cache-type-k and --cache-type-v out")
    settings = evicting.settings(policy)
    load_plugins(plugin)
    _eviction(settings, reading.model, {**how, "passages": evicting.passages or 1, "prompt": evicting.prompt}, as_json)


def _narrow_types(reading: ReadingOptions, how: dict[str, Any], as_json: bool) -> None:
    from real_engine.accuracy import accuracy as measure

    types_k = [storage_type("--cache-type-k", name) for name in reading.cache_type_k or ()]
    types_v = [storage_type("--cache-type-v", name) for name in reading.cache_type_v or ()]
    with RunProgress(f"reading with {reading.model}", 100) as progress:
        found = measure(reading.model, types_k, types_v, **how, progress=progress.share)
    answer(found, as_json)


def _eviction(settings: list[EvictionSetting], model: str, options: dict[str, Any], as_json: bool) -> None:
    from kvsim.reports.accuracy_report import eviction_object
    from real_engine.eviction_cost import eviction_cost

    with RunProgress(f"reading with {model}", 100) as progress:
        found = eviction_cost(settings, model, **options, progress=progress.share)
    answer(found, as_json, of=eviction_object)
