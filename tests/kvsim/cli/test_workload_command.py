"""``kvsim workload`` and what ships with it: named workloads, more or less of a load, fits that can be pasted."""

import json
import tomllib

import numpy as np
import pytest

import kvsim
from kvsim.scenario.named_workloads import NAMED, mean_rate, named_section, named_text, scale_rate
from tests.kvsim.cli.answers import complaint
from tests.traces import SHARED, needs_shared
from tests.worlds import command
from workloads import WorkloadError
from workloads.fitting.statistics import describe, read_columns

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:{i // 60:02}:{i % 60:02}.{i * 37 % 100:02},{100 + i * 7919 % 400},{5 + i * 104729 % 60}\n"
    for i in range(300)
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_describe_says_it_to_people_and_as_one_object(trace):
    done = command("workload", "describe", str(trace))
    assert (done.returncode, done.stderr) == (0, "")
    assert "300 requests" in done.stdout
    told = json.loads(command("workload", "describe", str(trace), "--json").stdout)
    assert (told["requests"], told["prompt"]["max"], told["notes"]) == (300, 498, [])
    assert told["gap_cv"] == pytest.approx(kvsim.describe_workload(trace).gap_cv)


@pytest.mark.parametrize("source", ["chat", "assistant", "azure-conv"])
def test_scenarios_and_named_workloads_can_be_described(source):
    told = json.loads(command("workload", "describe", source, "--json").stdout)
    assert told["requests"] > 50
    assert told["name"] == source


@pytest.mark.slow
def test_a_fit_can_be_pasted(trace, tmp_path):
    done = command("workload", "fit", str(trace), "--out", str(tmp_path / "out"))
    assert done.returncode == 0
    section = done.stdout[done.stdout.index("[workload]") : done.stdout.index("\nSaved")]
    folder = tmp_path / "out" / "workload-trace"
    assert sorted(path.name for path in folder.iterdir()) == ["candidates.csv", "workload.png", "workload.toml"]
    assert tomllib.loads(section) == tomllib.loads((folder / "workload.toml").read_text())
    result = kvsim.run(str(folder / "workload.toml"), policy="paged", detail="requests")
    assert result.summary["requests"] == 300


@pytest.mark.slow
def test_a_fit_as_one_object(trace):
    told = json.loads(command("workload", "fit", str(trace), "--json").stdout)
    assert {row["of"] for row in told["candidates"]} == {"arrivals", "prompt", "output"}
    assert sum(row["used"] for row in told["candidates"] if row["of"] == "arrivals") == 1
    assert told["model"]["requests"] == 300
    again = json.loads(command("workload", "fit", str(trace), "--json").stdout)
    assert told == again


@pytest.mark.slow
def test_a_fit_has_the_rate_and_the_lengths_of_its_stream():
    scenario = kvsim.load(
        {
            "workload": {
                "kind": "mmpp",
                "rates": [40.0, 2.0],
                "dwell_s": [5.0, 10.0],
                "requests": 4000,
                "prompt_tokens": {"kind": "gamma", "shape": 2.0, "scale": 300.0},
                "output_tokens": {"kind": "lognormal", "mu": 4.0, "sigma": 0.8},
                "correlation": 0.6,
            }
        }
    )
    fitted = kvsim.fit_workload(scenario)
    assert fitted.used.candidate.kind == "mmpp"
    assert (fitted.prompt.used["kind"], fitted.output.used["kind"]) == ("gamma", "lognormal")
    assert fitted.section["correlation"] == pytest.approx(0.6, abs=0.05)
    assert mean_rate(fitted.section) == pytest.approx(fitted.statistics.rate, rel=1e-3)
    assert fitted.drawn.correlation == pytest.approx(fitted.statistics.correlation, abs=0.05)
    assert fitted.drawn.dispersion[1.0] == pytest.approx(fitted.statistics.dispersion[1.0], rel=0.3)


@pytest.mark.slow
def test_outputs_that_hang_on_the_prompt_in_no_simple_way_get_a_table_each():
    """Prompts of middle length have long answers, short and long ones short answers: of no rank correlation."""
    outputs = [{"kind": "fixed", "value": 20}, {"kind": "fixed", "value": 400}, {"kind": "fixed", "value": 30}]
    keys = {"kind": "given-prompt", "edges": [300, 700], "tables": outputs}
    scenario = kvsim.load(
        {
            "workload": {
                "requests": 3000,
                "prompt_tokens": {"kind": "empirical", "quantiles": [10, 1000]},
                "output_tokens": keys,
            }
        }
    )
    fitted = kvsim.fit_workload(scenario)
    assert fitted.output.used["kind"] == "given-prompt"
    assert "correlation" not in fitted.section
    middle = (fitted.model.prompt_tokens > 420) & (fitted.model.prompt_tokens < 580)
    assert np.median(fitted.model.output_tokens[middle]) == 400
    assert np.median(fitted.model.output_tokens[fitted.model.prompt_tokens < 200]) == 20


@pytest.mark.slow
def test_a_ticking_clock_is_told_of():
    quantiles = {"kind": "renewal", "quantiles": [0.0] * 9 + [2.0, 2.0], "requests": 900}
    fitted = kvsim.fit_workload(kvsim.load({"workload": quantiles}))
    assert fitted.statistics.tick_s == pytest.approx(0.2, rel=10)
    assert any("ticks" in note for note in fitted.notes)


@pytest.mark.slow
@pytest.mark.parametrize("cv", [2.0, 4.0])
def test_a_coarse_clock_does_not_spoil_a_fit(tmp_path, cv):
    """Gamma arrivals whose clock ticks every millisecond come back with their mean, variation and dispersion."""
    times = np.cumsum(np.random.default_rng(1).gamma(cv**-2, 0.5 * cv**2, 2000))
    path = tmp_path / "ticks.csv"
    path.write_text("arrival,prompt,output\n" + "".join(f"{t:.3f},{100 + i % 7},20\n" for i, t in enumerate(times)))
    fitted = kvsim.fit_workload(path)
    seen, drawn = fitted.statistics, fitted.drawn
    assert seen.tick_s == pytest.approx(1e-3)
    assert drawn.rate == pytest.approx(seen.rate, rel=0.2)
    assert drawn.gap_cv == pytest.approx(seen.gap_cv, rel=0.2)
    assert drawn.dispersion[1.0] == pytest.approx(seen.dispersion[1.0], rel=0.3)
    assert fitted.used.misfit == min(one.misfit for one in fitted.arrivals)
    assert "streams drawn from it" in fitted.why


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("describe", "nowhere.csv"), "nowhere.csv: no such file"),
        (("describe", "chat", "--drop-failed"), "failed is an option of trace files"),
        (("fit", "identical"), "closed loop"),
        (("fit", "chat", "--kind", "nonsense"), "nonsense"),
        (("show", "nonsense"), "no workload called 'nonsense'; there are azure-code"),
    ],
)
def test_a_mistake_is_answered_in_a_line(arguments, what):
    assert what in complaint(command("workload", *arguments))


def test_too_few_to_fit(tmp_path):
    path = tmp_path / "few.csv"
    path.write_text("".join(line + "\n" for line in TRACE.splitlines()[:12]))
    done = command("workload", "fit", str(path), "--out", str(tmp_path))
    assert done.returncode == 2
    assert "11 requests are too few to fit" in done.stderr


@pytest.mark.parametrize("name", NAMED)
def test_a_named_workload_runs_and_names_its_source(name):
    assert named_text(name).startswith("# ")
    assert any(licence in named_text(name) for licence in ("CC-BY-4.0", "Apache-2.0", "MIT"))
    assert command("workload", "show", name).stdout == named_text(name)
    assert name in command("workload", "list").stdout
    scenario = kvsim.load({"workload": {"kind": "named", "name": name, "requests": 20_000, "rate": 2.0}})
    told = describe(scenario.build_workload())
    assert told.requests == 20_000
    assert told.rate == pytest.approx(2.0, rel=0.25)


def test_a_named_workload_s_own_rate_is_that_of_its_trace():
    told = describe(
        kvsim.load({"workload": {"kind": "named", "name": "azure-conv", "requests": 20_000}}).build_workload()
    )
    assert told.rate == pytest.approx(5.53, rel=0.1)
    assert told.prompt.mean == pytest.approx(1155, rel=0.03)
    assert told.output.mean == pytest.approx(211, rel=0.03)


@pytest.mark.parametrize("rate", [1e9, 1e-6])
def test_a_rate_that_cannot_be_drawn_is_refused_when_it_is_read(rate):
    with pytest.raises(kvsim.UserError, match="too far from the trace's own") as fault:
        kvsim.load({"workload": {"kind": "named", "name": "azure-code", "rate": rate}})
    assert len(str(fault.value).splitlines()) == 1


def test_the_list_names_sources_and_licences():
    told = json.loads(command("workload", "list", "--json").stdout)
    assert list(told) == list(NAMED)
    assert all(
        line.endswith(".") and any(of in line for of in ("CC-BY-4.0", "Apache-2.0", "MIT")) for line in told.values()
    )


def test_more_requests_than_can_be_described():
    with pytest.raises(WorkloadError, match="too many to describe"):
        describe(kvsim.load({"workload": {"requests": 10**9}}).build_workload())


def test_an_unknown_name_is_refused():
    with pytest.raises(kvsim.UserError, match="no workload called 'x'; there are azure-code"):
        kvsim.load({"workload": {"kind": "named", "name": "x"}})


WORKLOADS = {
    "poisson": {"kind": "poisson"},
    "gamma": {"kind": "gamma", "cv": 2.0},
    "weibull": {"kind": "weibull"},
    "mmpp": {"kind": "mmpp"},
    "diurnal": {"kind": "diurnal"},
    "renewal": {"kind": "renewal", "quantiles": [0.0, 0.1, 0.4]},
    "renewal with a rate": {"kind": "renewal", "quantiles": [0.0, 0.1, 0.4], "rate": 3.0},
    "named": {"kind": "named", "name": "azure-conv", "rate": 4.0},
    "mix": {"kind": "mix", "parts": [{"kind": "poisson"}, {"kind": "gamma", "cv": 2.0}]},
}


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_twice_the_load_is_the_same_requests_in_half_the_time(workload):
    """But for rounding, every arrival comes at half its time."""
    once = kvsim.load({"workload": workload})
    twice = kvsim.load({"workload": scale_rate(once.model_dump()["workload"], 2.0)})
    first, second = (read_columns(s.build_workload())[0] for s in (once, twice))
    assert second.arrivals_s == pytest.approx(first.arrivals_s / 2, rel=1e-9, abs=1e-9)
    assert np.array_equal(second.prompt_tokens, first.prompt_tokens)


def test_the_load_of_traces_sessions_and_users(trace):
    assert scale_rate({"kind": "azure", "path": "x", "rate_scale": 1.5}, 2)["rate_scale"] == 3
    assert scale_rate({"kind": "sessions", "rate": 0.5, "think_s": 2.0}, 4) == {
        "kind": "sessions",
        "rate": 2.0,
        "think_s": 2.0,
    }
    assert scale_rate({"kind": "closed-loop", "users": 8}, 0.01)["users"] == 1
    with pytest.raises(kvsim.UserError, match="at once"):
        scale_rate({"kind": "batch"}, 2)


def test_a_named_section_of_so_many_at_such_a_rate():
    section = named_section("azure-conv", 10, 1.0)
    assert section["requests"] == 10
    assert mean_rate(section) == pytest.approx(1.0)
    whole = named_section("azure-conv")
    assert section["rates"][0] / section["rates"][1] == pytest.approx(whole["rates"][0] / whole["rates"][1])


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("load", [0.03, 0.1])
def test_a_server_fares_alike_under_a_trace_and_under_its_model(load):
    """TTFT at P50 and P95 within 15 %, of the conversation trace and of what ships for it, under two loads."""
    server = {
        "server": {"scheduler": "vllm", "slots": 128, "n_batch": 2048},
        "cache": {"policy": "paged", "cells": 131072, "prefix_cache": False},
    }
    path = str(SHARED / "azure2023_conv" / "AzureLLMInferenceTrace_conv.csv.gz")
    real = {"kind": "azure", "path": path, "rate_scale": load}
    model = scale_rate(named_section("azure-conv", 19_366), load)
    seen, drawn = (
        kvsim.run(kvsim.load({**server, "workload": workload}), detail="requests").summary["ttft_s"]
        for workload in (real, model)
    )
    for quantile in ("p50", "p95"):
        assert drawn[quantile] == pytest.approx(seen[quantile], rel=0.15)


def test_even_gaps_are_fitted_without_a_law(tmp_path):
    path = tmp_path / "even.csv"
    path.write_text("arrival,prompt,output\n" + "".join(f"{i * 0.5},{100 + i % 7},{20 + i % 5}\n" for i in range(60)))
    done = command("workload", "fit", str(path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workload"]["kind"] == "renewal"
    assert found["model"]["gap_cv"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("held", "shared"), [(2048, 2048), (0, 128), (None, None)])
def test_what_a_logged_cache_held_becomes_a_shared_beginning(tmp_path, held, shared):
    """Of all requests but each tenth, whose hits had been evicted."""
    usage = [{"prompt_tokens": 2060 + i % 700, "completion_tokens": 9 + i % 50} for i in range(200)]
    if held is not None:
        details = [{"cached_tokens": (held + 128 * (i % 3)) * (i % 10 > 0)} for i in range(200)]
        usage = [one | {"prompt_tokens_details": told} for one, told in zip(usage, details, strict=True)]
    lines = [json.dumps({"created": 1.79e9 + i + i % 7 / 10, "usage": one}) for i, one in enumerate(usage)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines) + "\n")
    found = kvsim.fit_workload(tmp_path / "mine.jsonl")
    assert found.section.get("shared_tokens") == shared
    shown = command("workload", "describe", str(tmp_path / "mine.jsonl")).stdout
    assert ("prefix hits as the server counted them" in shown) == (held is not None)
    if held:
        assert "90.0% of the requests found 2,048 tokens or more" in shown
        assert found.drawn.reuse.hit_rate == pytest.approx(2048 / found.statistics.prompt.mean, rel=0.02)
        assert any("prefix hits beyond the first 2,048 tokens, which 90%" in note for note in found.notes)
