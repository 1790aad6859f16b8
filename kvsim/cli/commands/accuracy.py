"""``kvsim accuracy``: what narrower K and V cost, and what token eviction does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer
from kvsim.cli.options import Json, NumpyThreads, Plugins, Policies, WeightType, load_plugins, storage_type
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES

if TYPE_CHECKING:
    from real_engine.eviction_cost import EvictionSetting

app = typer.Typer(add_completion=False)

_Model = Annotated[
    str,
    typer.Option(help="The model: smollm2, tiny, small, or a GGUF file.", autocompletion=completion.engine_models),
]
_TypesK = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Storage type of keys: {', '.join(STORAGES)}; can be given several times.",
        autocompletion=completion.storages,
    ),
]
_TypesV = Annotated[
    list[str] | None,
    typer.Option(help="Storage type of values; can be given several times.", autocompletion=completion.storages),
]
_Text = Annotated[Path | None, typer.Option(metavar="FILE", help="Read this text instead of a page of English.")]
_Tokens = Annotated[
    int | None, typer.Option(help="Read at most this many tokens of the text, or of each passage.", min=2)
]
_EVICTION = "Token eviction"
_Budgets = Annotated[
    list[int] | None,
    typer.Option(help="Tokens that are kept; can be given several times.", min=2, rich_help_panel=_EVICTION),
]
_Groups = Annotated[
    list[int] | None,
    typer.Option(
        help="Groups of layers that each keep tokens of their own (1); can be given several times.",
        min=1,
        rich_help_panel=_EVICTION,
    ),
]
_Sinks = Annotated[
    int | None, typer.Option(help="First tokens that streaming-llm keeps (4).", min=0, rich_help_panel=_EVICTION)
]
_Passages = Annotated[
    int | None,
    typer.Option(help="Cut the text into so many (1); several give an interval.", min=1, rich_help_panel=_EVICTION),
]
_Prompt = Annotated[
    int | None,
    typer.Option(help="First tokens of a passage, read in one pass (half).", min=1, rich_help_panel=_EVICTION),
]


@app.command()
def accuracy(
    model: _Model = "smollm2",
    cache_type_k: _TypesK = None,
    cache_type_v: _TypesV = None,
    policy: Policies = None,
    plugin: Plugins = None,
    budget: _Budgets = None,
    budget_groups: _Groups = None,
    sinks: _Sinks = None,
    passages: _Passages = None,
    prompt: _Prompt = None,
    text: _Text = None,
    tokens: _Tokens = None,
    weights: WeightType = "f32",
    threads: NumpyThreads = 1,
    as_json: Json = False,
) -> None:
    """Measure how much accuracy narrower K and V cost, or token eviction.

    Compares logits, likeliest tokens and perplexity with those of f32. Given several types, tries all combinations.
    With --policy, compares perplexity with that of a cache that keeps all tokens, for each policy and --budget.
    """
    content = None if text is None else _read(text)
    options = {"text": content, "weights": weights, "tokens": tokens, "threads": threads}
    of_eviction = {"budget": budget, "budget-groups": budget_groups, "sinks": sinks, "passages": passages}
    of_eviction["prompt"] = prompt
    if not policy:
        for option, value in of_eviction.items():
            if value is not None:
                raise UserError(f"--{option}: it is for --policy, such as --policy h2o --budget 128")
        _narrow_types(model, cache_type_k or [], cache_type_v or [], options, as_json)
        return
    if cache_type_k or cache_type_v:
        raise UserError("--policy: K and V are kept in f32; leave --cache-type-k and --cache-type-v out")
    if not budget:
        raise UserError("--policy: a --budget is missing, such as --budget 128")
    from real_engine.eviction_cost import EvictionSetting

    load_plugins(plugin)
    kept_first = 4 if sinks is None else sinks
    settings = [
        EvictionSetting(name, kept, groups, kept_first)
        for name in policy
        for kept in budget
        for groups in budget_groups or [1]
    ]
    _eviction(settings, model, {**options, "passages": passages or 1, "prompt": prompt}, as_json)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--text: {path} cannot be read: {e}") from None


def _narrow_types(model: str, names_k: list[str], names_v: list[str], options: dict[str, Any], as_json: bool) -> None:
    from real_engine.accuracy import accuracy as measure

    types_k = [storage_type("--cache-type-k", name) for name in names_k]
    types_v = [storage_type("--cache-type-v", name) for name in names_v]
    with RunProgress(f"reading with {model}", 100) as progress:
        found = measure(model, types_k, types_v, **options, progress=progress.share)
    answer(found, as_json)


def _eviction(settings: list[EvictionSetting], model: str, options: dict[str, Any], as_json: bool) -> None:
    from kvsim.reports.accuracy_report import eviction_object
    from real_engine.eviction_cost import eviction_cost

    with RunProgress(f"reading with {model}", 100) as progress:
        found = eviction_cost(settings, model, **options, progress=progress.share)
    answer(found, as_json, of=eviction_object)
