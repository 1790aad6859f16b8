"""``kvsim compare``: one scenario under several policies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.console import answer, point_to_questions, warn
from kvsim.cli.option_groups import ScenarioOptions, takes_groups
from kvsim.cli.options import Check, Json, MaxFailed, Out, Plots, Plugins, Policies, load_plugins, preset_group
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.experiments.comparison import Comparison
    from kvsim.experiments.draft_counts import DraftCounts

app = typer.Typer(add_completion=False)

_DraftTokens = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Compare drafts of so many tokens instead, under one policy: 0,2,4,8; 0 is none. How many are accepted "
        "says [speculation].",
    ),
]


@app.command()
@takes_groups
def compare(
    of: ScenarioOptions,
    policy: Policies = None,
    group: Annotated[
        str,
        typer.Option(help="Without --policy, the policies of this group: standard or papers.", metavar="GROUP"),
    ] = "standard",
    plugin: Plugins = None,
    out: Out = Path("results"),
    replications: Annotated[
        int, typer.Option(help="Repeat every run with this many seeds, to get confidence intervals.", min=1, max=1000)
    ] = 1,
    max_failed: MaxFailed = "0%",
    plots: Plots = False,
    check: Check = False,
    draft_tokens: _DraftTokens = None,
    loads: Annotated[
        str, typer.Option(metavar="X,...", help="With --draft-tokens: multiples of the load, such as 1,4,16.")
    ] = "1",
    everything: Annotated[
        bool, typer.Option("--all", help="Print all that was found: every percentile, the cache, what was assumed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare policies on one scenario: by default those of engines, and ours."""
    from kvsim.experiments.comparison import choose
    from kvsim.experiments.comparison import compare as compare_policies
    from kvsim.experiments.measures import share_of_requests
    from kvsim.simulation.set_up import priced, profile_of
    from policies import in_group

    load_plugins(plugin)
    if draft_tokens is not None:
        answer(_compared_drafts(of, policy, draft_tokens, loads), as_json)
        return
    plots = plots and not as_json  # There is no folder for them.
    ranked_up_to = share_of_requests("--max-failed", max_failed)
    chosen = preset_group(group)
    loaded = of.load(under=policy[0] if policy else None)
    total = (len(policy) if policy else len(in_group(chosen))) * loaded.build_workload().n_requests * replications
    profile_of(loaded)  # This and the next raise before a folder is made.
    choose(policy, in_group(chosen), lambda one: priced(loaded, one))
    if not as_json:
        writable(out / loaded.name)
    with RunProgress(loaded.name, total) as progress:
        comparison = compare_policies(
            loaded,
            policy,
            progress=progress,
            snapshots=plots,
            detail="states" if plots else "rows",
            replications=replications,
            max_failed=ranked_up_to,
            group=chosen,
            check=check,
        )
    warn(comparison.warnings)
    answer(comparison, as_json, details=everything)
    if not as_json:
        _save(comparison, out / loaded.name, plots, everything)


def _compared_drafts(of: ScenarioOptions, policies: list[str] | None, drafts: str, loads: str) -> DraftCounts:
    """The answer to ``--draft-tokens``. Raises ``UserError``."""
    from kvsim.experiments.draft_counts import compare_drafts

    if policies is not None and len(policies) > 1:
        raise UserError("--draft-tokens: under one policy; name it with --policy")
    policy = policies[0] if policies else None
    counts = [int(n) for n in _numbers("--draft-tokens", drafts, r"\d{1,2}")]
    multiples = [float(x) for x in _numbers("--loads", loads, r"\d{1,4}(?:\.\d{1,4})?")]
    return compare_drafts(of.load(under=policy), counts, policy, loads=multiples)


def _numbers(option: str, text: str, pattern: str) -> list[str]:
    """The numbers of a list that was typed. Raises ``UserError``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(pattern, part) for part in parts):
        raise UserError(f"{option}: numbers are expected, such as 1,2,4; got {text!r:.40}")
    return parts


def _save(comparison: Comparison, folder: Path, plots: bool, everything: bool) -> None:
    """Save what was found, and say where."""
    written = comparison.save(folder, plots=plots)
    first = [path.name for path in written if path.name in ("comparison.csv", "comparison.png", "cells.png")]
    more = "" if plots else "; --plots draws pictures too"
    if not everything:
        more += "; --all prints the cache, all percentiles and what was assumed"
    typer.echo(f"\nSaved {', '.join(first)} and {len(written) - len(first)} more files in {written[0].parent}/{more}")
    if any(result.summary["failed"] for result in comparison.results):
        point_to_questions("requests fail")
