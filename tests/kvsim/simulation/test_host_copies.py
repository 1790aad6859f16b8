"""Copies of whole sequences to and from host memory: counted, priced, and in every second's account."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

import kvsim
from kvsim.cli.console import draw_report
from kvsim.costs.cost_model import CostModel
from kvsim.costs.load_profile import load_profile
from kvsim.costs.profile import Coefficient, HostCopyCost
from kvsim.reports.comparison_report import _caches
from kvsim.reports.report import SnapshotStrip, report_of
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run
from kvsim.simulation.snapshots import Snapshots, load_snapshots, save_snapshots
from kvsim.simulation.time_breakdown import SECONDS
from policies import HostCopy, Transfer
from tests.chats import chats
from tests.worlds import command

POLICIES = ("contiguous", "streams", "llama.cpp-b4666", "sliding-window")


def printed(what):
    """What is printed of a result."""
    text = io.StringIO()
    draw_report(Console(file=text, width=240), report_of(what))
    return " ".join(text.getvalue().split())


def seconds(value):
    return Coefficient(value=value, low=value, high=value)


@pytest.mark.parametrize("name", POLICIES)
def test_every_copy_is_counted_and_priced(name):
    """By the bytes that the link carries; of layers with a window, only what is in it."""
    found = run(chats(), name).summary["host"]
    assert found["saves"] > 20
    assert found["loads"] > 10
    assert found["copy_s"] == pytest.approx((found["bytes_out"] + found["bytes_in"]) / 0.05e9, rel=1e-3)
    assert 0 < found["most_bytes"] <= found["limit_bytes"] == 8192 << 20


TIER = {
    "workload": {"kind": "sessions", "sessions": 20, "rate": 3.0, "system_tokens": {"kind": "fixed", "value": 2000}},
    "model": {"name": "llama-3.1-8b"},
    "cache": {"policy": "paged", "cells": 5000, "host_cells": 100_000},
    "machine": {"device": "rtx4090"},
}


@pytest.mark.slow
@pytest.mark.parametrize("detail", ["cache", "tables"])
def test_a_tier_behind_a_device_takes_its_bus_and_steps_wait_for_it(detail):
    """Not the device's own memory; and counted where it waits, once."""
    found = run(load_scenario(TIER), detail=detail).summary
    copied = found["host"]["bytes_out"] + found["host"]["bytes_in"]
    assert copied > 1e8
    assert found["host"]["step_copies_s"] == pytest.approx(copied / 24e9, rel=1e-6)
    assert found["inferred"]["host_copies"].startswith("at 24 GB/s, what its PCIe 4.0 x16 carries")
    slow = run(load_scenario(TIER, machine__host_gb_s=0.5)).summary
    assert slow["host"]["step_copies_s"] > 20 * found["host"]["step_copies_s"]
    assert slow["ttft_s"]["mean"] > found["ttft_s"]["mean"]
    assert "host_copies" not in slow["inferred"]
    without = run(load_scenario(TIER, cache__host_cells=0)).summary
    assert without["prefix"]["hit_rate"] < found["prefix"]["hit_rate"]


def test_sequences_with_a_window_are_smaller():
    """In layers with a window, copies take what the window holds."""
    whole, windowed = (run(chats(cache__window=16), name).summary["host"] for name in ("streams", "sliding-window"))
    assert 0 < windowed["bytes_out"] / windowed["saves"] < 0.8 * whole["bytes_out"] / whole["saves"]


def test_without_a_host_cache_there_is_nothing_to_count():
    found = run(chats(server__cache_ram=0)).summary["host"]
    assert (found["saves"], found["loads"], found["copy_s"]) == (0, 0, 0)
    assert found["most_bytes"] is None
    assert found["limit_bytes"] is None
    assert run(chats(), "paged").summary["host"]["most_bytes"] is None, "blocks are not copied out"


def test_a_host_cache_may_be_without_a_limit():
    found = run(chats(server__cache_ram=-1)).summary["host"]
    assert found["most_bytes"] > 0
    assert found["limit_bytes"] is None


@pytest.mark.parametrize("name", POLICIES)
def test_seconds_of_copies_are_in_the_account_of_each_request(name):
    """All requests in a slot wait for a copy, those that are being given theirs included."""
    result = run(chats(), name, detail="tables")
    causes = result.causes
    np.testing.assert_allclose(causes[SECONDS].sum(axis=1), causes["e2e_s"], rtol=1e-9)
    copy_s = result.summary["host"]["copy_s"]
    assert copy_s <= causes["transfers_s"].sum() * (1 + 1e-9)
    assert causes["transfers_s"].sum() <= 2 * copy_s * (1 + 1e-9), "there are two slots"
    assert result.passes["waited_s"].sum() == pytest.approx(copy_s)
    assert (result.passes["start_s"].diff().dropna() >= result.passes["seconds"].iloc[:-1].to_numpy() - 1e-9).all()


def test_a_price_comes_from_calibration_else_from_copies_inside_the_cache_else_from_what_is_stated():
    """A machine's profile may have measured copies; a device's has a stated link."""
    profile, out = load_profile("default"), HostCopy((Transfer(True, 0, 0, 30), Transfer(True, 50, 30, 10)))
    back = HostCopy([t._replace(to_host=False) for t in out.transfers])
    own = profile.moves.per_run_s.value * 2 + profile.moves.per_cell_s.value * 40
    inside = profile.model_copy(update={"host_copies": None})
    assert CostModel(inside, cell_bytes=1000.0).host_copies(out) == pytest.approx(own)
    assert CostModel(inside).host_copies_basis is None
    measured = HostCopyCost(
        out_per_copy_s=seconds(1.0),
        out_per_cell_s=seconds(0.1),
        in_per_copy_s=seconds(2.0),
        in_per_cell_s=seconds(0.2),
    )
    calibrated = profile.model_copy(update={"host_copies": measured})
    assert CostModel(calibrated, cell_bytes=1000.0).host_copies(out) == pytest.approx(1 + 4)
    assert CostModel(calibrated, cell_bytes=1000.0).host_copies(back) == pytest.approx(2 + 8)
    assert CostModel(calibrated).host_copies_basis is None
    stated = load_profile("h100_sxm-llama-3.1-8b")
    on = CostModel(stated, cell_bytes=1e6)
    assert on.host_copies(out) == pytest.approx(40e6 / 48e9)
    assert "48 GB/s, what its PCIe 5.0 x16 carries" in on.host_copies_basis
    still = inside.model_copy(update={"moves": None})
    assert CostModel(still, cell_bytes=1e6).host_copies(out) == pytest.approx(40e6 / 1.5e9)
    assert CostModel(still, cell_bytes=1e6).host_copies(back) == pytest.approx(40e6 / 6e9)
    assert [CostModel(each, cell_bytes=1e6).host_copies(HostCopy(())) for each in (still, stated, calibrated)] == [
        0,
        0,
        0,
    ]


# What is said of it


def test_a_run_says_what_the_host_cache_did():
    told = printed(run(chats()))
    found = run(chats()).summary["host"]
    assert f"host cache: {found['saves']} saves (" in told
    assert f", {found['loads']} loads (" in told
    assert "of copying; at most" in told
    assert "held of 8.00 GiB" in told
    assert "ahead of use" not in told
    assert "held without a limit" in printed(run(chats(server__cache_ram=-1)))
    assert "host cache" not in printed(run(chats(server__cache_ram=0)))


def test_a_comparison_has_columns_only_where_a_policy_copies():
    both = kvsim.compare(chats(), ["contiguous", "paged"], snapshots=False)
    saves, loads = (both.results[0].summary["host"][key] for key in ("saves", "loads"))
    told = printed(both)
    assert "host host bytes" in told
    assert f" {saves} {loads} " in told
    assert "host host" not in printed(kvsim.compare(chats(), ["paged"], snapshots=False))


def test_films_say_what_the_host_cache_holds(tmp_path):
    """At their moment, and at no other: nothing at first, and never more than the most."""
    result = run(chats(), snapshots=True)
    save_snapshots(
        tmp_path / "films", [("contiguous", result.frames), ("none", [f._replace(host=None) for f in result.frames])]
    )
    kept, none = load_snapshots(tmp_path / "films")
    prompts, held = kept.host.T
    assert kept.host.shape == (len(kept.times_s), 2)
    assert (prompts[0], held[0]) == (0, 0)
    assert held.max() <= result.summary["host"]["most_bytes"]
    assert len({*held.tolist()}) > 10
    assert ((prompts == 0) == (held == 0)).all()
    assert none.host is None


def test_a_report_has_columns_only_where_a_policy_copies():
    """And its films say at each moment what is held."""
    copying, paged = (run(chats(), name, snapshots=True) for name in ("contiguous", "paged"))
    _, done = _caches([copying.summary, paged.summary])
    heads = [column.heading for column in done.columns]
    saves = heads.index("host saves")
    assert [row[saves].value for row in done.cells] == [copying.summary["host"]["saves"], 0]
    assert "bytes to the host" in heads
    _, done = _caches([paged.summary])
    assert not any("host" in column.heading for column in done.columns)
    *_, line = report_of(copying).sections[1].text
    assert re.fullmatch(r"host cache: .*iB\), .*iB\), .*iB held of 8\.00 GiB", line), "all sizes in powers of two"
    said = [SnapshotStrip(Snapshots.of(r.policy, r.frames)).data["said"] for r in (copying, paged)]
    assert said[0][0] == "host cache: 0 prompts, 0 B"
    assert any(words.startswith("host cache: 2 prompts, ") for words in said[0])
    assert said[1] == []


@pytest.mark.slow
def test_the_command_says_it(tmp_path):
    (tmp_path / "chats.toml").write_text(chats().to_toml())
    done = command("run", str(tmp_path / "chats.toml"), "--json")
    assert json.loads(done.stdout)["host"]["saves"] > 20
