"""Conclusions of sweeps, their warnings, and the files and figures that they write."""

import io
import itertools
import json
import warnings

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import kvsim
from kvsim import UserError, sweep
from kvsim.cli.console import draw_report
from kvsim.experiments.measures import measure_interval
from kvsim.experiments.shared_warnings import share_assumptions
from kvsim.experiments.store import Store
from kvsim.reports.comparison_plots import latency_ranges
from kvsim.reports.sweep_plots import pareto_figure
from kvsim.reports.sweep_report import sweep_report
from tests.kvsim.experiments.small_sweeps import base
from tests.worlds import command

TIGHT = {
    "name": "tight",
    "base": base(rate=5.0, requests=30),
    "policies": ["contiguous", "paged", "ring", "oracle"],
    "axes": {"cache.cells": (160, 1024)},
}
"""With 160 cells, all policies but the ring fail requests."""
BRIEF = {"name": "brief", "base": {"workload": {"requests": 5}}}


CROWDED = TIGHT | {"base": base(rate=1000.0)}


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    return sweep(CROWDED, out=tmp_path_factory.mktemp("tight") / "a.sqlite", workers=1)


@pytest.mark.slow
def test_a_policy_without_competitors_has_not_won(tight):
    conclusion = tight.conclusion()
    assert "at 1 point ring has no competitor (contiguous, paged failed 66.7 to 93.3 % of the requests)" in conclusion
    assert "ring (which drops tokens) at 1" in conclusion
    best = tight.best()
    sizes = ("contiguous failed 40 of 60 requests (66.7 %)", "paged failed 56 of 60 requests (93.3 %)")
    assert best["left_out"].tolist() == ["; ".join(sizes), ""]
    assert best["rivals"].tolist() == [0, 2]
    html = kvsim.report(tight, out=tight.store.with_name("page.html")).read_text(encoding="utf-8")
    assert "ring (drops tokens), no competitor" in html
    assert sizes[0] in html


def test_warnings_are_gathered_and_survive_an_interruption(tight, tmp_path):
    """Each is given once, with the number of runs and the policies; a second call runs nothing and says the same."""
    failed = [line for line in tight.warnings if "failed" in line]
    full = "no room for 1 token: 0 of 160 cells are free"
    assert f"in 1 of 8 runs: 40 failed: a step found no room in the cache: {full} (contiguous)" in failed
    file = {"name": "fast", "base": {"workload": {"requests": 200, "rate": 100.0}}, "policies": ["paged", "ring"]}
    first = sweep(file, out=tmp_path / "a.sqlite", workers=1)
    again = sweep(file, out=tmp_path / "a.sqlite", workers=1)
    (unstable,) = [line for line in again.warnings if "unstable" in line]
    assert unstable.startswith("in 2 of 2 runs: unstable: arrivals outpace service; the queue grew by ")
    assert unstable.endswith(" (paged, ring)")
    assert first.warnings == again.warnings == tuple(again.to_dict()["warnings"])
    with Store(again.store) as store:
        assert len(store.timings()) == 2


def test_policies_that_failed_few_requests_can_be_ranked(tight):
    tolerant = sweep(CROWDED, out=tight.store, workers=1, max_failed="70 %")
    assert tolerant.best()["rivals"].tolist() == [1, 2]
    assert "policies are ranked if they failed at most 70 % of the requests" in tolerant.conclusion()


def test_identical_policies_have_no_lead_over_each_other(tmp_path):
    base = {"workload": {"requests": 60}, "server": {"scheduler": "llama-server"}}
    file = {"name": "twins", "base": base, "policies": ["paged", "vllm", "contiguous"]}
    result = sweep(file, out=tmp_path / "a.sqlite", workers=1)
    (best,) = result.best().to_dict("records")
    assert (best["best"], best["identical"], best["second"]) == ("paged", "vllm", "contiguous")
    assert result.conclusion().startswith("lowest e2e_mean of 1 point: paged (identical to vllm) at 1")
    alone = sweep(file | {"policies": ["paged", "vllm"]}, out=tmp_path / "a.sqlite", workers=1)
    assert "paged (identical to vllm) has no competitor" in alone.conclusion()


@pytest.mark.slow
def test_a_sweep_of_one_policys_settings_names_the_best_of_them(tmp_path):
    base = {"workload": {"requests": 60, "rate": 40.0}, "server": {"scheduler": "llama-server", "slots": 2}}
    file = {"name": "flags", "base": base, "policies": ["vllm"], "axes": {"server.slots": [1, 2, 16]}}
    result = sweep(file, out=tmp_path / "a.sqlite", workers=1)
    best = result.best().set_index("server.slots")["value"].idxmin()
    assert result.conclusion().startswith(f"lowest e2e_mean of 3 points under vllm: server.slots = {best} (")
    assert "; 1 point left out (vllm is unstable); from one run each" in result.conclusion()
    file["axes"]["workload.rate"] = [1.0, 2.0]
    of_traffic = sweep(file | {"replications": 2}, out=tmp_path / "b.sqlite", workers=1).conclusion()
    assert ": at workload.rate = 1.0: server.slots = " in of_traffic
    assert "; at workload.rate = 2.0: server.slots = " in of_traffic


def test_an_assumption_is_said_once_with_the_range_of_its_numbers():
    lines = [
        "assumed on X: 4,096 cells (256 blocks of 16), K and V in f16",
        "assumed on X: 512 cells (32 blocks of 16)",
    ]
    assert share_assumptions(lines) == ("assumed on X: 512–4,096 cells (32–256 blocks of 16), K and V in f16",)


def test_what_policies_of_an_engine_assume_alike_is_said_once():
    lines = [
        "assumed under llama.cpp-b6975, as in llama.cpp b6975: flash attention auto (on), one cache for all slots",
        "assumed under streams, as in llama.cpp b6975: flash attention auto (on)",
        "assumed under vllm, as in vLLM 0.33.0: blocks of 16 (--block-size)",
    ]
    assert share_assumptions(lines) == (
        "assumed under llama.cpp-b6975, streams, as in llama.cpp b6975: flash attention auto (on)",
        "assumed under llama.cpp-b6975, as in llama.cpp b6975: one cache for all slots",
        "assumed under vllm, as in vLLM 0.33.0: blocks of 16 (--block-size)",
    )


# What is shown

SERVED = BRIEF | {"slo": {"ttft_s": 0.5}, "policies": ["paged", "ring"], "axes": {"workload.rate": [2.0, 4.0]}}


def test_goodput_is_shown_where_there_is_a_service_level(tmp_path):
    usual = sweep(SERVED, out=tmp_path / "a.sqlite", workers=1)
    assert usual.shown[-2:] == ("goodput_requests_per_s", "slo_share")
    assert usual.drawn == ("e2e_mean",)
    assert "goodput_requests_per_s" not in sweep(BRIEF, out=tmp_path / "a.sqlite", workers=1).shown


@pytest.mark.slow
@pytest.mark.parametrize("show", ["ttft_p99, tpot_p99,goodput", ["ttft_p99", "tpot_p99", "goodput"]])
def test_measures_that_are_asked_for_are_printed_and_drawn(tmp_path, show):
    result = sweep(SERVED, out=tmp_path / "a.sqlite", workers=1, show=show)
    assert result.drawn == ("ttft_p99", "tpot_p99", "goodput_requests_per_s")
    assert result.shown == ("e2e_mean", *result.drawn)
    assert result.to_dict()["shown"] == list(result.shown)
    titles = [part.get_suptitle() for part in result.plot().subfigs]
    assert titles[:3] == ["ttft_p99, seconds", "tpot_p99, seconds", "goodput_requests_per_s"]
    written = io.StringIO()
    draw_report(Console(file=written, width=140), sweep_report(result))
    for head in ("ttft p99", "tpot p99", "goodput,"):
        assert head in written.getvalue()
    assert "throughput" not in written.getvalue()


def test_no_more_than_four_measures_are_drawn(tmp_path):
    names = ["ttft_p99", "tpot_p99", "e2e_p99", "goodput", "slo_share"]
    result = sweep(SERVED, out=tmp_path / "a.sqlite", workers=1, show=names)
    assert len(result.drawn) == 4
    assert len(result.shown) == 6


@pytest.mark.parametrize(
    ("file", "show", "line"),
    [
        (
            BRIEF,
            "ttfft_p99",
            "brief: show: no measure called 'ttfft_p99'; did you mean 'ttft_p99'\\? There are goodput, ",
        ),
        (BRIEF, "goodput", r"brief: show: goodput_requests_per_s needs a table \[slo\] in the sweep, such as ttft_s"),
        (BRIEF | {"show": 3}, None, "brief: show: accepted: a list of measures"),
        (BRIEF | {"max_failed": "x"}, None, "brief: max_failed: 'x': a share of the requests is expected, such as 5%"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path, file, show, line):
    with pytest.raises(UserError, match=line) as e:
        sweep(file, out=tmp_path / "a.sqlite", show=show)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "a.sqlite").exists()


def test_the_figure_shows_where_requests_failed(tight):
    figure = tight.plot()
    assert figure.get_suptitle().endswith("hollow: requests failed")
    tight.plot("unstable")
    assert "hollow" not in sweep(BRIEF, out=tight.store.with_name("b.sqlite"), workers=1).plot().get_suptitle()


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["e2e_mean", "ttft_p95"])
def test_an_unmet_stopping_rule_is_reported(measure, tmp_path):
    """By the interval that the table has: of the mean of the runs, and of the P95 of all their requests."""
    rule = {"measure": measure, "within": 0.001, "most": 3}
    result = sweep(TIGHT | {"policies": ["paged", "ring"], "stop": rule}, out=tmp_path / "a.sqlite", workers=1)
    half = (result.table[f"{measure}_high"] - result.table[f"{measure}_low"]) / 2 / result.table[measure]
    for verdict, share in zip(result.table["verdict"], half, strict=True):
        assert f"3 runs, still ±{100 * share:.1f} %" in verdict
    assert "4 of 4 pairs of point and policy are not within 0.1 % after 3 runs" in result.conclusion()
    printed = result.to_dict()
    assert printed["imprecise"] == 4
    assert "still ±" in printed["points"][0]["verdict"]


def test_intervals_stay_within_the_bounds_of_a_measure():
    share = measure_interval("slo_share", [0.99, 0.5, 1.0])
    assert (share.high, share.value) == (1.0, pytest.approx(0.83))
    assert measure_interval("e2e_mean", [0.1, 5.0]).low == 0.0
    assert measure_interval("e2e_mean", [0.1]).low == -np.inf


@pytest.mark.slow
def test_prefix_hits_are_unknown_where_a_trace_does_not_tell_them(tmp_path):
    """Azure's traces have lengths only: no table, file or object may say that nothing was found."""
    trace = tmp_path / "azure.csv"
    rows = [f"2024-01-01 00:00:{i:02}.000,{40 + i},{5 + i % 3}\n" for i in range(30)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    scenario = tmp_path / "azure.toml"
    scenario.write_text(f'[workload]\nkind = "azure"\npath = "{trace}"\n')
    plan = {"scenario": str(scenario), "policies": ["paged"], "axes": {"server.slots": [2]}, "replications": 2}
    result = sweep(plan | {"show": ["prefix_hit_rate"]}, out=tmp_path / "a.sqlite", workers=1)
    result.save(tmp_path, plots=False)
    assert pd.read_csv(tmp_path / "a-runs.csv")["prefix_hit_rate"].isna().all()
    assert result.to_dict()["points"][0]["prefix_hit_rate"] is None
    compared = kvsim.compare(scenario, ["paged", "contiguous"], replications=2)
    assert compared.table["prefix_hit_rate"].isna().all()
    assert compared.replications_table["prefix_hit_rate"].isna().all()
    assert [each["prefix"]["hit_rate"] for each in compared.to_dict()["policies"]] == [None, None]


def test_flags_and_counts_have_no_interval(tight):
    assert {"unstable", "too_short", "warmup_requests", "e2e_mean_low"} <= set(tight.table.columns)
    assert not {"unstable_low", "too_short_high", "warmup_requests_low"} & set(tight.table.columns)


# Files


@pytest.mark.slow
def test_two_sweeps_share_a_folder(tmp_path):
    for name, policy in (("a", "paged"), ("b", "ring")):
        written = sweep(BRIEF | {"policies": [policy], "name": name}, out=tmp_path / f"{name}.sqlite").save()
        assert [path.name for path in written] == [
            f"{name}{rest}" for rest in (".json", ".csv", "-runs.csv", "-best.csv", ".png")
        ]
    for name in ("a.sqlite", "a.csv", "a-runs.csv", "a.json"):
        page = kvsim.report(tmp_path / name)
        assert page.name == "a-report.html"
        assert "Sweep: a<" in page.read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"contains several sweeps; name one of a\.json, b\.json"):
        kvsim.report(tmp_path)


def test_a_store_keeps_one_sweep(tmp_path):
    sweep(BRIEF, out=tmp_path / "a.sqlite", workers=1)
    with pytest.raises(UserError, match=r"a\.sqlite: holds the sweep 'brief', this one is 'other'; name another"):
        sweep(BRIEF | {"name": "other"}, out=tmp_path / "a.sqlite", workers=1)


def test_invalid_paths_of_a_store_are_refused(tmp_path):
    with pytest.raises(UserError, match="is a folder; a file is expected"):
        sweep(BRIEF, out=tmp_path)
    with pytest.raises(UserError, match=r"a\.csv: that name is used for tables and figures"):
        sweep(BRIEF, out=tmp_path / "a.csv")


def test_a_report_never_overwrites_what_it_reads(tmp_path):
    (tmp_path / "comparison.json").write_text("{}")
    done = command("report", str(tmp_path), "--out", str(tmp_path / "comparison.json"))
    assert done.returncode == 2
    assert done.stderr.endswith("a page is written to a file that ends in .html or .htm\n")
    assert (tmp_path / "comparison.json").read_text() == "{}"


# Arguments from Python


@pytest.mark.slow
def test_axes_may_be_any_sequence_of_numbers(tmp_path):
    for axis in ((512, 1024), range(512, 1025, 512), np.array([512, 1024]), [np.int64(512), np.int64(1024)]):
        result = sweep(BRIEF | {"axes": {"cache.cells": axis}}, out=tmp_path / "a.sqlite", workers=1)
        assert result.table["cache.cells"].tolist() == [512, 1024]
        json.dumps(result.to_dict())
    assert isinstance(result.table, pd.DataFrame)


@pytest.mark.slow
def test_arguments_of_a_comparison(tmp_path):
    scenario = kvsim.load("chat", workload__requests=5)
    comparison = kvsim.compare(scenario, "paged")
    assert [result.policy for result in comparison.results] == ["paged"]
    assert "paged" in kvsim.report(comparison, tmp_path / "page.html").read_text(encoding="utf-8")
    for nonsense in (comparison, 3):
        with pytest.raises(UserError, match="report of a "):
            kvsim.report(nonsense)
    for replications in (0, 1001, 2.5, True, "3"):
        with pytest.raises(UserError, match="a whole number from 1 to 1000 is accepted"):
            kvsim.compare(scenario, "paged", replications=replications)


# Figures


def test_an_empty_figure_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not pareto_figure({}, (), "nothing").legends


def test_the_pareto_figure_explains_its_markers():
    at = ((1.0, 0.9, 1.1), (2e6, 1e6, 3e6))
    figure = pareto_figure({"a": at, "b": at, "oracle": at}, ("a",), "title", ("b",))
    key = figure.axes[0].get_title(loc="left")
    assert "hollow: failed requests" in key
    assert "the oracle is a bound and not part of the front" in key
    assert figure.axes[0].lines[3].get_markerfacecolor() != "white"


@pytest.mark.slow
@pytest.mark.parametrize("values", [(11, 14, 18), (100, 140, 190), (11, 60, 95), (3, 30, 90), (7, 50, 900)])
def test_latencies_have_labels_that_do_not_collide(values):
    latency = dict(zip(("p50", "p95", "p99"), (v / 1e3 for v in values), strict=True))
    figure = latency_ranges([{"policy": "a", "ttft_s": latency, "tpot_s": latency, "e2e_s": latency}])
    figure.canvas.draw()
    for axis in figure.axes:
        low, high = axis.get_xlim()
        boxes = [
            label.get_window_extent()
            for at, label in zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
            if low <= at <= high and label.get_text()
        ]
        assert len(boxes) >= 2
        assert all(one.x1 < two.x0 for one, two in itertools.pairwise(boxes))
