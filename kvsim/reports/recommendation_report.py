"""The reports of recommendations: the best settings, what memory says, and several devices.

All are made of the object that ``--json`` prints, which an earlier version may have saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsim.advice.memory.engine_flags import COMMANDS
from kvsim.advice.memory.flag_effects import Effect, effect_lines
from kvsim.advice.recommend.candidates import REASONS
from kvsim.costs.memory_settings import ENGINE_TITLES
from kvsim.errors import counted
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import plain, plus_minus
from kvsim.model.storage_types import format_size
from kvsim.reports.formats import half_width, interval_of, whole
from kvsim.reports.report import Cell, Column, Report, Section, Table
from policies import available

if TYPE_CHECKING:
    from pathlib import Path

    from kvsim.advice.recommend.advice import Advice

Saved = Mapping[str, Any]


def advice_report(found: Advice, folder: Path | None = None) -> Report:
    """The best settings, devices, or what memory says; ``folder``: where the results are saved."""
    return recommendation_of(found.to_dict(), folder)


def recommendation_of(saved: Saved, folder: Path | None = None) -> Report:
    """The report of any of them from its object."""
    if "fits" in saved:
        return _of_memory(saved)
    return _of_devices(saved, folder) if "devices" in saved else _of_settings(saved, folder)


def _of_settings(saved: Saved, folder: Path | None) -> Report:
    traffic, searched, slo = saved["traffic"], saved["searched"], saved["slo"]["text"]
    memory = "" if saved["memory_bytes"] is None else f" in {format_size(saved['memory_bytes'])}"
    load = "its load" if saved["load"] == 1 else f"{saved['load']:g} times its load"
    best: Sequence[Saved] = saved["best"]
    notes = [f"{saved['rule']}; ± is half of a 95 % interval; loads are multiples of the load asked about"]
    return Report(
        f"Settings for {saved['scenario']}",
        [saved["basis"]] if saved["basis"] else [],
        [
            f"Which settings serve {saved['scenario']} at {load}{memory}, so that {slo}?",
            f"{searched['settings']:,} settings, {counted(searched['runs'], 'run')} of up to "
            f"{counted(traffic['requests'], 'request')}. {traffic['note']}.",
        ],
        [
            line
            for line in (
                saved["conclusion"],
                saved.get("fleet_in_words"),
                *saved.get("gains", ()),
                saved["compared"],
                saved.get("offer"),
            )
            if line
        ],
        [
            Section("The best settings", [], [_best(saved, best)], notes) if best else Section(),
            *_fleet(saved),
            Section("Commands", listings=[command_of(each, folder) for each in best]),
            Section("Settings that were ruled out", _ruled_out(searched), [_reasons(searched)]),
            _limits(saved),
        ],
    )


def _best(saved: Saved, best: Sequence[Saved]) -> Table:
    columns = [
        Column("", lambda each: each["place"] or ""),
        Column("policy", lambda each: each.get("name") or each["label"].partition(",")[0]),
        _setting("cells", "cells", whole),
        _setting("slots", "slots", whole),
        Column("batch", _batch),
        Column("K/V", lambda each: _types(each["settings"])),
        Column("memory", "memory_bytes", format_size),
        *(
            Column(bound["text"], partial(_interval, measure=bound["measure"]), _measure(bound))
            for bound in _asked(saved)
        ),
        Column("sustains", _sustains),
        Column("met", "verdict"),
    ]
    return Table("The best settings, with intervals", columns, [*saved.get("fixed", ()), *best])


def _fleet(saved: Saved) -> list[Section]:
    """How the fewest servers that suffice fare behind each router; nothing where one suffices."""
    if not (fleet := saved.get("fleet")):
        return []
    columns = [
        Column("router", "router"),
        *(
            Column(bound["text"], partial(_interval, measure=bound["measure"]), _measure(bound))
            for bound in _asked(saved)
        ),
        Column("met", "verdict"),
    ]
    tables = [Table("By router, with intervals", columns, fleet["behind"])]
    if (apart := fleet.get("apart")) is not None:
        columns = [Column("to prefill", "prefill"), Column("to decode", "decode"), *columns]
        tables.append(Table("With prefill and decode apart", columns, [apart]))
    return [Section(f"{fleet['replicas']} servers", tables=tables)]


def _interval(best: Saved, measure: str) -> Interval | None:
    return interval_of(best["measures"].get(measure))


def _sustains(best: Saved) -> Cell | None:
    load = interval_of(best["sustained_load"])
    return (
        None
        if load is None
        else Cell(
            f"≥ {plain(load.value, 3)} x, the most tried"
            if best["sustained_load"]["at_least"]
            else plus_minus(load, unit=" x"),
            load.value,
        )
    )


def _bounded(sign: str, is_bound: bool, text: str) -> str:
    """A figure, with a sign if it is only a bound: no larger load was tried."""
    return f"{sign} {text}" if is_bound else text


def _setting(heading: str, key: str, show: Callable[[Any], str] = str) -> Column:
    return Column(heading, lambda each: each["settings"][key], show)


def _batch(each: Saved) -> str:
    s = each["settings"]
    return str(s["n_batch"]) if each["engine"] == "vllm" else f"{s['n_batch']}/{s['n_ubatch']}"


def _types(s: Saved) -> str:
    return str(s["type_k"]) if s["type_k"] == s["type_v"] else f"{s['type_k']}/{s['type_v']}"


def _asked(saved: Saved) -> list[Saved]:
    return [bound for bound in saved["slo"]["bounds"] if bound["asked"]]


def _measure(bound: Saved) -> Callable[[Interval], str]:
    """Writes a bounded measure with its interval, as short as it goes."""

    def show(interval: Interval) -> str:
        if bound["measure"].endswith("_share"):
            return f"{interval.value:.1%}"
        return plus_minus(interval, unit=" s") if interval.value >= 1 else plus_minus(interval, 1e3, " ms")

    return show


def command_of(best: Saved, folder: Path | None) -> tuple[str, str]:
    """The heading of a setting, and what to type for it; ``folder``: where its scenario is saved."""
    typed = [f"{best['command']} {best['typed']}"] if best["command"] else ["(no engine has this policy yet)"]
    repeat = f"# to repeat: kvsim run {_in(folder, best['scenario'])}"
    return f"{best['place']}. {best['label']}", "\n".join([*typed, *_notes(best["notes"]), *_effects(best), repeat])


def _in(folder: Path | None, name: str) -> str:
    return name if folder is None else str(folder / name)


def _notes(lines: Sequence[str]) -> list[str]:
    return [f"#   note: {line}" for line in lines]


def _effects(typed: Saved) -> list[str]:
    """What the options that were typed do to memory, as comments, and Ollama's variables in place of them."""
    # Recommendations of before these were told have neither key.
    lines = _comments(typed.get("effects", ()))
    if ollama := typed.get("ollama"):
        lines += ["", ollama["typed"], *_comments(ollama["effects"])]
        lines += [f"#   not in Ollama: {option}: {why}" for option, why in ollama["missing"].items()]
    return lines


def _comments(effects: Sequence[Saved]) -> list[str]:
    """A line for each option or variable."""
    known = [Effect(each["option"], "" if each["value"] is True else each["value"], each["does"]) for each in effects]
    return [f"#   {line}" for line in effect_lines(known)]


def _reasons(searched: Saved) -> Table:
    columns = [
        Column("reason", lambda item: item[0]),
        Column("settings", lambda item: item[1]["count"], whole),
        Column("meaning", lambda item: item[1]["means"]),
    ]
    return Table("Settings by reason", columns, list(searched["reasons"].items()))


def _ruled_out(searched: Saved) -> list[str]:
    """How many settings were tried, by how much the service level was missed, and the policies not searched."""
    lines = [
        f"Of {searched['settings']:,} settings, {searched['tried']:,} were tried in "
        f"{counted(searched['runs'], 'run')}; ruled out:"
    ]
    if by := searched.get("missed_by"):
        lines.append(
            f"Those that were tried and missed the service level did so by a factor of {by[0]:.3g} to {by[1]:.3g}."
        )
    papers = {preset.name for preset in available().values() if preset.group == "papers"}
    left_out: dict[str, list[str]] = {}
    for name, why in searched["policies_left_out"].items():
        left_out.setdefault(REASONS.get(why["reason"], why["detail"]), []).append(name)
    for reason, names in left_out.items():
        ideas = [name for name in names if name in papers]
        said = [name for name in names if name not in ideas]
        said += [f"{counted(len(ideas), 'idea')} from papers (kvsim compare --group papers)"] if ideas else []
        lines.append(f"Not searched, {reason}: {', '.join(said)}")
    return lines


def _limits(saved: Saved) -> Section:
    return Section("Limits of these predictions", notes=[f"note: {line}" for line in saved["limits"]])


def _of_memory(saved: Saved) -> Report:
    traffic, slo, fits = saved["traffic"], saved["slo"]["text"], saved["fits"]
    counts = {
        "longest": f"at once, of {traffic['longest']:,} tokens (longest)",
        "p95": f"of {traffic['p95']:,} (P95)",
        "mean": f"of {traffic['mean']:,.0f} (mean)",
    }
    columns = [
        Column("engine", "engine", lambda engine: ENGINE_TITLES[engine]),
        Column("K/V", _types),
        # Without a memory the rows tell what some numbers of the longest requests need.
        *(Column(heading, key, whole) for key, heading in counts.items() if saved["memory_bytes"] or key == "longest"),
        Column("memory with the longest", "memory_bytes", lambda n: f"≈ {format_size(n)}"),
    ]
    no_times = saved["no_times"]
    return Report(
        f"Memory for {saved['scenario']}",
        [f"{no_times[:1].upper()}{no_times[1:]}."],
        [
            f"Which settings serve {saved['scenario']} with {saved['model']}, so that {slo}?",
            f"A request has up to {traffic['longest']:,} tokens, {traffic['mean']:,.0f} on average.",
        ],
        [saved["conclusion"]],
        [
            Section(
                "Requests held at once",
                tables=[Table("By engine, and types of K and V", columns, fits)] if fits else [],
            ),
            Section("Commands", listings=_memory_commands(fits)),
            _limits(saved),
        ],
    )


def _memory_commands(fits: Sequence[Saved]) -> list[tuple[str, str]]:
    """What to type, and what each option does to memory, for the types of each engine that were chosen."""
    found = []
    for fit in fits:
        if fit["recommended"] and fit["typed"]:
            engine = fit["engine"]
            widest = next(other for other in fits if other["engine"] == engine)
            more = f", with which {fit['longest']:,} of the longest fit; in {widest['type_k']} {widest['longest']:,}"
            kinds = f"K and V in {fit['type_k']}{'' if fit['type_k'] == widest['type_k'] else more}"
            found.append((f"to type, with {kinds}:", "\n".join([f"{COMMANDS[engine]} {fit['typed']}", *_effects(fit)])))
    return found


def _of_devices(saved: Saved, folder: Path | None) -> Report:
    traffic, slo, devices = saved["traffic"], saved["slo"]["text"], saved["devices"]
    typed = []
    for each in devices:
        if each["scenario"]:
            line = f"{each['command']} {each['typed']}" if each["command"] else f"({_label(each)}, which no engine has)"
            typed.append((device_name(each), f"{line}\n# to repeat: kvsim run {_in(folder, each['scenario'])}"))
    return Report(
        f"Devices for {saved['scenario']}",
        saved["bases"],
        [
            f"Which of {'; '.join(device_name(each) for each in devices)} serves {saved['scenario']} "
            f"with {saved['model']}, so that {slo}?",
            f"Runs of up to {counted(traffic['requests'], 'request')}. {traffic['note']}.",
        ],
        [saved["conclusion"]],
        [
            Section("The devices", _no_verdicts(devices), [_devices(saved)]),
            Section("Commands", listings=typed),
            _limits(saved),
        ],
    )


def _label(device: Saved) -> str:
    return str(device["answer"]["best"][0]["label"])


def _no_verdicts(devices: Sequence[Saved]) -> list[str]:
    """Why a device has no verdict, and what memory says of it."""
    lines = []
    for each in devices:
        if each["no_verdict"]:
            held = each["answer"]["conclusion"] if "fits" in (each["answer"] or {}) else ""
            lines.append(f"{device_name(each)}: {each['no_verdict']}. {held}".strip())
    return lines


def _devices(saved: Saved) -> Table:
    def measured(each: Saved, measure: str) -> Interval | None:
        best = (each["answer"] or {}).get("best") or [{"measures": {}}]
        return _interval(best[0], measure)

    columns = [
        Column("device", device_name),
        Column("met", lambda each: each["verdict"] or "no verdict"),
        *(Column(b["text"], partial(measured, measure=b["measure"]), _measure(b)) for b in _asked(saved)),
        Column("up to, in every run", _up_to, meaning="largest load of those tried"),
        Column("on average", lambda each: interval_of(each["mean_load"]), half_width(unit=" x")),
        Column(
            "requests/s", lambda each: (each["served_at_largest"] or {}).get("requests_per_s"), lambda n: plain(n, 2)
        ),
    ]
    # Comparisons of before several servers were tried have neither key.
    several, several_prices = list[Column](), list[Column]()
    if any((each.get("replicas") or 1) > 1 for each in saved["devices"]):
        several = [Column("servers for this load", "replicas", whole)]
        several_prices = [Column("of these, per hour", "price_in_all", plain)]
    columns += several
    if any(each["price_per_hour"] is not None for each in saved["devices"]):
        columns += [
            Column("per hour", "price_per_hour", plain),
            *several_prices,
            Column("1M output tokens", "cost_per_million", lambda cost: plain(cost, 3)),
            Column("1M at the largest load", _cost_at_most),
        ]
    note = "loads are multiples of the load asked about; ≥, ≤: no larger load was tried"
    return Table("By device, with intervals", columns, saved["devices"], note)


def _up_to(each: Saved) -> Cell | None:
    load = each["load"]
    return None if load is None else Cell(_bounded("≥", each["load_at_least"], f"{plain(load, 3)} x"), load)


def _cost_at_most(each: Saved) -> Cell | None:
    cost = each["cost_per_million_at_largest"]
    return None if cost is None else Cell(_bounded("≤", each["load_at_least"], plain(cost, 3)), cost)


def device_name(each: Saved) -> str:
    """A device as it is named in tables and figures, with how many of it share the model and what else differs."""
    if "name" in each:  # Comparisons of before models and types could differ have none.
        return str(each["name"])
    n = each["tensor_parallel"]
    return str(each["device"]) if n == 1 else f"{n} x {each['device']}"
