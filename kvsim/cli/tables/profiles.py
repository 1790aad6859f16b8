"""What ``kvsim profile`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvsim.calibration.published.device_fit import DeviceFit
from kvsim.cli.tables.formats import new_table, seconds, share
from kvsim.costs.device_profiles import device_profiles
from kvsim.costs.profile import INFERRED_ATTENTION, INFERRED_MOVES, Profile, load_profile
from kvsim.costs.shipped import shipped_names
from kvsim.errors import counted


def known_profiles() -> list[dict[str, Any]]:
    """All profiles by name: model, device or machine, engine, errors, where the file is ("" if it ships)."""
    sources = {name: name for name in shipped_names()} | device_profiles()
    found = []
    for name, source in sources.items():
        profile = load_profile(source)
        found.append(
            {
                "name": name,
                "model": profile.model,
                "on": _on(profile),
                "engine": profile.engine,
                "held_out_error_median": profile.held_out_error_median,
                "held_out_error_p95": profile.held_out_error_p95,
                "file": "" if source == name else source,
            }
        )
    return found


def load_named(name: str) -> Profile:
    """A profile of a user's own by name, a shipped one, or a file. Raises ``UserError``."""
    return load_profile(device_profiles().get(name, name))


def show_profiles(console: Console, profiles: list[dict[str, Any]]) -> None:
    """Print a line for each profile."""
    table = new_table("profile", "model", "on", "engine", "median", "P95", left=("model", "on", "engine"))
    for each in profiles:
        errors = share(each["held_out_error_median"]), share(each["held_out_error_p95"])
        table.add_row(each["name"] + (" *" if each["file"] else ""), each["model"], each["on"], each["engine"], *errors)
    console.print(table)
    console.print("median, P95: errors on passes held out of the fit.", style="dim", highlight=False)
    if any(each["file"] for each in profiles):
        console.print("* your own", style="dim", highlight=False)


def show_profile(console: Console, profile: Profile) -> None:
    """Print where a profile comes from, its errors, its range, and what passes cost by it."""
    p = profile
    console.print(p.basis, highlight=False, markup=False, soft_wrap=True)
    if p.source is not None:
        where = ", ".join(filter(None, [p.source.url, f"licence {p.source.licence}"]))
        console.print(f"Source: {p.source.title} {p.source.version} ({where}).", highlight=False, soft_wrap=True)
        others = (
            f"Not measured: attention of layouts that the engine lacks, priced {INFERRED_ATTENTION}.",
            f"Not measured: moves of cells and rotations of keys, priced {INFERRED_MOVES}.",
        )
        for note in (*p.source.notes, *others):
            console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"Range: {p.tokens.low:,} to {p.tokens.high:,} tokens in a pass; {p.cells.low:,} to {p.cells.high:,} cells for "
        "a token.",
        highlight=False,
        soft_wrap=True,
    )
    if p.held_out:
        table = new_table("held out", "passes", "median", "P95", "largest")
        for regime, e in p.held_out.items():
            table.add_row(regime, f"{e.samples:,}", share(e.error_median), share(e.error_p95), share(e.error_most))
        console.print(table)
    console.print(_prices(p))


def _prices(profile: Profile) -> Any:
    """A table of what some passes cost, by the formula that every simulation uses."""
    from kvsim.costs.pass_price import PassPrice
    from policies import Group
    from policies.placement.rule import PassReads

    kernel = next(iter(profile.kernels))
    price = PassPrice(profile, kernel, (Group(0),))
    table = new_table("a pass of", "costs")
    for sequences in (1, 32, 128):
        for context in (512, 4096):
            if context <= profile.cells.high and sequences <= profile.tokens.high:
                work = PassReads.counted(sequences, sequences, 0, [(1, context)] * sequences)
                name = f"{counted(sequences, 'decode')} at {context:,} cells"
                table.add_row(name, seconds(price.seconds(work)))
    for prompt in (512, 2048, 8192):
        if prompt <= profile.tokens.high:
            work = PassReads.counted(prompt, 1, 0, [(prompt, prompt)])
            table.add_row(f"a prompt of {prompt:,} tokens", seconds(price.seconds(work)))
    return table


def show_fit(console: Console, fit: DeviceFit) -> None:
    """Print a profile that was just made."""
    show_profile(console, fit.profile)


def _on(profile: Profile) -> str:
    if profile.machine is not None:
        return profile.machine.processor
    return (f"{profile.tensor_parallel} x " if profile.tensor_parallel > 1 else "") + str(profile.device)
