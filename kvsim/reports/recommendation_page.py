"""The page of a recommendation that ``kvsim recommend`` saved."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.advice.memory.engine_flags import COMMANDS
from kvsim.advice.memory.flag_effects import Effect
from kvsim.reports.page import Cell, Page, Section, Table, interval, number, words
from kvsim.reports.parts import footer, picture, read, reproduce

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_SETTINGS = (
    "policy",
    "unified",
    "cells",
    "slots",
    "slot_context",
    "n_batch",
    "n_ubatch",
    "cache_ram",
    "type_k",
    "type_v",
)
_CANDIDATE_COLUMNS = (*_SETTINGS, "reason", "detail")
_PICTURE = "recommendation.png"


def recommendation_page(folder: Path, saved: dict[str, Any]) -> Page:
    """Make the page of a folder; ``saved`` is the content of its ``recommendation.json``."""
    if "fits" in saved:
        return _memory_page(saved)
    if "devices" in saved:
        return _devices_page(folder, saved)
    traffic, searched, slo = saved["traffic"], saved["searched"], saved["slo"]["text"]
    memory = "" if saved["memory_bytes"] is None else f" in {saved['memory_bytes'] / 1e9:.3g} GB"
    load = "its load" if saved["load"] == 1 else f"{saved['load']:g} times its load"
    asked = [
        f"Which settings serve “{saved['scenario']}” at {load}{memory}, so that {slo}?",
        f"{searched['settings']:,} settings, {searched['runs']:,} runs of up to {traffic['requests']:,} requests. "
        f"{traffic['note']}.",
    ]
    title = "Distance from the bounds, and largest loads"
    drawn = picture(folder / _PICTURE, title, lambda: _drawn(saved))
    sections = [
        Section("The best settings", [str(saved["rule"]).capitalize() + "."], [_best_table(saved)], [drawn]),
        Section("Commands", listings=_commands(saved)),
        Section("Settings that were ruled out", tables=_ruled_out(folder, saved)),
        Section("Limits of these predictions", [str(line) for line in saved["limits"]]),
        reproduce(
            str(saved["command"]),
            [(f"Scenario for place {b['place']}", read(folder / b["scenario"])) for b in saved["best"]],
        ),
    ]
    conclusion = [str(line) for line in (saved["basis"], saved["conclusion"], saved["compared"]) if line]
    return Page(f"Settings for {saved['scenario']}", asked, conclusion, sections, footer())


def _memory_page(saved: dict[str, Any]) -> Page:
    """The page of an answer without times: what memory says."""
    traffic, slo = saved["traffic"], saved["slo"]["text"]
    asked = [
        f"Which settings serve “{saved['scenario']}” with {saved['model']}, so that {slo}?",
        f"A request has up to {traffic['longest']:,} tokens, {traffic['mean']:,.0f} on average.",
    ]
    heads = ["engine", "K", "V", "longest at once", "P95 at once", "mean at once", "memory, GB", "options"]
    rows = [
        [
            *(words(fit[key]) for key in ("engine", "type_k", "type_v")),
            *(number(fit[key]) for key in ("longest", "p95", "mean")),
            number(fit["memory_bytes"] / 1e9),
            words(fit["typed"]),
        ]
        for fit in saved["fits"]
    ]
    sections = [
        Section("Requests held at once", [], [Table("By engine, and types of K and V", heads, rows)]),
        Section("Commands", listings=_memory_commands(saved)),
        Section("Limits of this answer", [str(line) for line in saved["limits"]]),
        reproduce(str(saved["command"]), []),
    ]
    conclusion = [str(saved["no_times"]), str(saved["conclusion"])]
    return Page(f"Memory for {saved['scenario']}", asked, conclusion, sections, footer())


def _devices_page(folder: Path, saved: dict[str, Any]) -> Page:
    """The page of an answer that compares devices."""
    traffic, slo, devices = saved["traffic"], saved["slo"]["text"], saved["devices"]
    asked = [
        f"Which of {', '.join(each['device'] for each in devices)} serves “{saved['scenario']}” with {saved['model']}, "
        f"so that {slo}?",
        f"Runs of up to {traffic['requests']:,} requests. {traffic['note']}.",
    ]
    bounds = [bound["measure"] for bound in saved["slo"]["bounds"] if bound["asked"]]
    heads = ["device", "SLO met", *(_head(m) for m in bounds), "largest load in every run", "on average"]
    heads += ["requests/s there", "price per hour", "1M output tokens", "1M at the largest load"]
    rows = []
    for each in devices:
        first = next(iter((each["answer"] or {}).get("best", ())), None)
        measures = [_interval(m, first["measures"][m]) if first else words("") for m in bounds]
        loads = [number(each["load"]), _interval("load", each["mean_load"] or {})]
        rate = number((each["served_at_largest"] or {}).get("requests_per_s"))
        prices = [number(each[key]) for key in ("price_per_hour", "cost_per_million", "cost_per_million_at_largest")]
        verdict = words(each["verdict"] or "no verdict")
        rows.append([words(each["device"]), verdict, *measures, *loads, rate, *prices])
    title = "Largest load of each device, and what a million output tokens cost"
    drawn = picture(folder / _PICTURE, title, lambda: _drawn(saved))
    note = "Loads are multiples of the load asked about."
    unknown = [f"{each['device']}: {each['no_verdict']}." for each in devices if each["no_verdict"]]
    typed = [(each["device"], f"{each['command']} {each['typed']}") for each in devices if each["command"]]
    chosen = [each for each in devices if each["scenario"]]
    files = [(f"Scenario for {each['device']}", read(folder / each["scenario"])) for each in chosen]
    sections = [
        Section("The devices", unknown, [Table("By device, with intervals", heads, rows, note)], [drawn]),
        Section("Commands", listings=typed),
        Section("Limits of these predictions", [str(line) for line in saved["limits"]]),
        reproduce(str(saved["command"]), files),
    ]
    conclusion = [*(str(line) for line in saved["bases"]), str(saved["conclusion"])]
    return Page(f"Devices for {saved['scenario']}", asked, conclusion, sections, footer())


def _drawn(saved: dict[str, Any]) -> Drawing:
    """The figure of an answer with times."""
    from kvsim.reports.device_comparison_plot import device_comparison_figure
    from kvsim.reports.recommendation_plot import recommendation_figure

    return device_comparison_figure(saved) if "devices" in saved else recommendation_figure(saved)


def _best_table(saved: dict[str, Any]) -> Table:
    bounds = [bound["measure"] for bound in saved["slo"]["bounds"] if bound["asked"]]
    heads = ["place", "settings", "SLO met", *(_head(m) for m in bounds), "largest load", "memory, MB"]
    rows = []
    for best in saved["best"]:
        figures = [_interval(m, best["measures"][m]) for m in bounds]
        load = best["sustained_load"] or {}
        largest = _interval("load", load)
        memory = number(best["memory_bytes"] / 1e6)
        rows.append([number(best["place"]), words(best["label"]), words(best["verdict"]), *figures, largest, memory])
    return Table("The best settings, with intervals", heads, rows, "Loads are multiples of the load asked about.")


def _commands(saved: dict[str, Any]) -> list[tuple[str, str]]:
    listings = []
    for best in saved["best"]:
        lines = [f"{best['command']} {best['typed']}"] if best["command"] else ["(no engine has this policy yet)"]
        lines += [f"# {note}" for note in best["notes"]]
        listings.append((f"{best['place']}. {best['label']}", "\n".join([*lines, *_effects(best)])))
    return listings


def _memory_commands(saved: dict[str, Any]) -> list[tuple[str, str]]:
    """What fits at most, and what each option does to memory, for the widest types of each engine."""
    widest: dict[str, dict[str, Any]] = {}
    for fit in saved["fits"]:
        if fit["typed"]:
            widest.setdefault(fit["engine"], fit)
    return [
        (f"{engine}, K and V in {fit['type_k']}", "\n".join([f"{COMMANDS[engine]} {fit['typed']}", *_effects(fit)]))
        for engine, fit in widest.items()
    ]


def _effects(typed: dict[str, Any]) -> list[str]:
    """What the options that were typed do to memory, as comments, and Ollama's variables in place of them."""
    # Recommendations of before these were told have neither key.
    lines = [f"#   {_option(each)}: {each['does']}" for each in typed.get("effects", ())]
    ollama = typed.get("ollama")
    if ollama:
        lines += ["", ollama["typed"], *(f"#   {_option(each)}: {each['does']}" for each in ollama["effects"])]
        lines += [f"#   not in Ollama: {option}: {why}" for option, why in ollama["missing"].items()]
    return lines


def _option(effect: dict[str, Any]) -> str:
    """An option or a variable as it is typed."""
    return Effect(effect["option"], "" if effect["value"] is True else effect["value"], "").typed


def _ruled_out(folder: Path, saved: dict[str, Any]) -> list[Table]:
    reasons = saved["searched"]["reasons"]
    counts = [[words(reason), number(each["count"]), words(each["means"])] for reason, each in reasons.items()]
    tables = [Table("Settings by reason", ["reason", "settings", "meaning"], counts)]
    rows = [
        [_setting(row.get(key, "")) for key in _CANDIDATE_COLUMNS]
        for row in csv.DictReader(io.StringIO(read(folder / "candidates.csv")))
    ]
    tables.append(Table("All settings", list(_CANDIDATE_COLUMNS), rows))
    left_out = [
        [words(policy), words(each["detail"])] for policy, each in saved["searched"]["policies_left_out"].items()
    ]
    return [*tables, Table("Policies that were not searched", ["policy", "why"], left_out)]


def _setting(text: str) -> Cell:
    try:
        return Cell(text, float(text))
    except ValueError:
        return words(text)


def _head(measure: str) -> str:
    return f"{measure.replace('_', ' ')}{', ms' if _is_latency(measure) else ''}"


def _interval(measure: str, ends: dict[str, Any]) -> Cell:
    """A measure with its interval, if it is known."""
    scale, unit = (1e3, "") if _is_latency(measure) else (100.0, "%") if measure.endswith("_share") else (1.0, "")
    return interval(ends.get("value"), ends.get("low"), ends.get("high"), scale, unit)


def _is_latency(measure: str) -> bool:
    return measure.split("_")[0] in ("ttft", "tpot", "e2e")
