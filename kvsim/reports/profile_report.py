"""The reports of ``kvsim profile``: the known profiles, and what one of them says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.costs.device_profiles import device_profiles
from kvsim.costs.load_profile import load_profile
from kvsim.costs.profile import INFERRED_ATTENTION, INFERRED_MOVES, Profile
from kvsim.costs.shipped import shipped_names
from kvsim.errors import counted
from kvsim.reports.formats import seconds, share, whole
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.calibration.published.device_fit import DeviceFit


def known_profiles() -> list[dict[str, Any]]:
    """All profiles by name: model, device or machine, engine, errors, where the file is ("" if it ships)."""
    found = []
    for name, source in ({name: name for name in shipped_names()} | device_profiles()).items():
        p = load_profile(source)
        of: dict[str, Any] = {"name": name, "model": p.model, "on": _on(p), "engine": p.engine}
        of |= {"device": p.device, "tensor_parallel": p.tensor_parallel, "weights": p.weights}
        of["expert_parallel"] = p.expert_parallel
        found_errors = (p.held_out_error_median, p.held_out_error_p95) if p.held_out_samples else (None, None)
        errors = dict(zip(("held_out_error_median", "held_out_error_p95"), found_errors, strict=True))
        found.append({**of, **errors, "file": "" if source == name else source})
    return found


def load_named(name: str) -> Profile:
    """A profile of a user's own by name, a shipped one, or a file. Raises ``UserError``."""
    return load_profile(device_profiles().get(name, name))


def profiles_report(profiles: list[dict[str, Any]]) -> Report:
    """A row for each profile, but one for all that ship of one model on one device under one engine."""
    together: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in profiles:
        alone = each["device"] is None or each["file"]
        key = (each["name"],) if alone else (each["device"], each["model"], each["engine"])
        together.setdefault(key, []).append(each)
    columns = [
        Column("profile", lambda rows: _called(rows[0])),
        Column("of", _offered),
        Column("engine", lambda rows: rows[0]["engine"]),
        Column("median", lambda rows: max(each["held_out_error_median"] for each in rows), share),
        Column("P95", lambda rows: max(each["held_out_error_p95"] for each in rows), share),
    ]
    own = ["* your own"] if any(each["file"] for each in profiles) else []
    notes = [
        "Names end in -tpN and in the type of the weights, where these are not one device and the model's own type: "
        "h100_sxm-qwen3-32b-tp2-fp8.",
        "median, P95: errors on passes held out of the fit, the largest of the row.",
        *own,
    ]
    return Report(sections=[Section(tables=[Table("Profiles", columns, list(together.values()))], notes=notes)])


def _called(profile: dict[str, Any]) -> str:
    """The name of the first profile of a row, without the devices that share the model and the type of its weights."""
    if profile["file"]:
        return f"{profile['name']} *"
    return profile["name"] if profile["device"] is None else f"{profile['device']}-{profile['model']}"


def _offered(profiles: list[dict[str, Any]]) -> str:
    """For each type of weights, how many devices may share the model; of a machine, the model and the machine."""
    if profiles[0]["device"] is None:
        return f"{profiles[0]['model']} on {profiles[0]['on']}"
    shared: dict[str, list[int]] = {}
    for each in profiles:
        divided = f", experts over {each['expert_parallel']}," if each["expert_parallel"] > 1 else ""
        shared.setdefault(f"{each['weights'] or ''}{divided}", []).append(each["tensor_parallel"])
    return "; ".join(f"{weights} on {', '.join(map(str, sorted(n)))}" for weights, n in shared.items())


def fit_report(fit: DeviceFit) -> Report:
    """A profile that was just made."""
    return profile_report(fit.profile)


def profile_report(p: Profile) -> Report:
    """Where a profile comes from, its errors, its range, and what passes cost by it."""
    about = []
    if p.source is not None:
        where = ", ".join(filter(None, [p.source.url, p.source.licence and f"licence {p.source.licence}"]))
        of = f"{p.source.title} {p.source.version}".rstrip()
        about = [
            f"Source: {of} ({where})." if where else f"Source: {of}.",
            *(f"- {note}" for note in p.source.notes),
            f"- Not measured: attention of layouts that the engine lacks, priced {INFERRED_ATTENTION}.",
            f"- Not measured: moves of cells and rotations of keys, priced {INFERRED_MOVES}.",
        ]
    about.append(
        f"Range: {p.tokens.low:,} to {p.tokens.high:,} tokens in a pass; {p.cells.low:,} to {p.cells.high:,} cells for "
        f"a token{f'; 1 to {p.sequences:,} sequences' if p.sequences else ''}."
    )
    errors = [
        Column("held out", lambda item: item[0]),
        Column("passes", lambda item: item[1].samples, whole),
        Column("median", lambda item: item[1].error_median, share),
        Column("P95", lambda item: item[1].error_p95, share),
        Column("largest", lambda item: item[1].error_most, share),
    ]
    tables = [Table("Errors", errors, list(p.held_out.items()))] if p.held_out else []
    prices = Table("Prices", [Column("a pass of", 0), Column("costs", 1, seconds)], _prices(p))
    return Report(basis=[p.basis], about=about, sections=[Section("Errors and prices", tables=[*tables, prices])])


def _prices(profile: Profile) -> list[tuple[str, float]]:
    """What some passes cost, by the formula that every simulation uses."""
    from kvsim.costs.pass_price import PassPrice
    from policies import Group
    from policies.placement.rule import PassReads

    price = PassPrice(profile, next(iter(profile.kernels), profile.own_kernel), (Group(0),))
    found = []
    for sequences in (1, 32, 128):
        for context in (512, 4096):
            if context <= profile.cells.high and sequences <= profile.tokens.high:
                work = PassReads.counted(sequences, sequences, 0, [(1, context)] * sequences)
                found.append((f"{counted(sequences, 'decode')} at {context:,} cells", price.seconds(work)))
    for prompt in (512, 2048, 8192):
        if prompt <= profile.tokens.high:
            work = PassReads.counted(prompt, 1, 0, [(prompt, prompt)])
            found.append((f"a prompt of {prompt:,} tokens", price.seconds(work)))
    return found


def _on(profile: Profile) -> str:
    if profile.machine is not None:
        return profile.machine.processor
    return (f"{profile.tensor_parallel} x " if profile.tensor_parallel > 1 else "") + str(profile.device)
