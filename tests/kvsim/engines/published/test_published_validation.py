"""Published points, replayed and compared."""

from dataclasses import replace

import pandas as pd
import pytest
import simpy

import kvsim
import workloads
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.under_load import host_share
from kvsim.engines.published.points import read_points
from kvsim.engines.published.replay import FrontEndClients, Outcome, Prediction, replay_point
from kvsim.engines.published.servers import FRONT_END
from kvsim.engines.published.validation import PublishedValidation, validate_published
from kvsim.errors import UserError
from kvsim.simulation.arrivals import Inbox
from policies import Group
from policies.placement.rule import PassReads
from tests.kvsim.engines.published import REPLAYED, ROWS, write_points


@pytest.fixture
def file(tmp_path):
    return write_points(tmp_path / "points.csv")


@pytest.fixture
def points(file):
    return {point.id: point for point in read_points(file)}


def test_one_client_waits_for_its_prompt_and_then_for_each_token(file):
    """A prompt of 256 tokens in a pass of its own, and decodes of 257 to 263 cells."""
    row = validate_published(file, ["id=alone"]).table.iloc[0]
    price = PassPrice(load_profile("h100_sxm-llama-3.1-8b"), "gather", (Group(0),))

    def pass_s(tokens, cells):
        return price.seconds(PassReads.counted(tokens, 1, 0, [(tokens, cells)]))

    assert row["predicted_ttft"] == pytest.approx(pass_s(256, 256), rel=1e-3)
    decodes = [pass_s(1, cells) for cells in range(257, 264)]
    assert row["predicted_tpot"] == pytest.approx(sum(decodes) / 7, rel=1e-3)


def test_a_front_end_takes_prompts_in_turn():
    """Two clients of 100 tokens at 1 ms each, 10 ms around each request: the second waits for the first."""
    clients = FrontEndClients(0.010, 0.001)
    env = simpy.Environment()
    inbox = Inbox(env, keeps_script=False)
    workload = workloads.Synthetic(1, 2, workloads.no_gaps, workloads.Fixed(100), workloads.Fixed(2), 2)
    env.process(clients(env, inbox, workload))
    env.run(until=0.111)
    assert [job.arrival_s for job in inbox.take()] == [pytest.approx(0.110)]
    env.run()
    assert [job.arrival_s for job in inbox.take()] == [pytest.approx(0.210)]
    assert clients.mean_s == pytest.approx(0.160)


def test_what_clients_of_inference_max_wait_is_in_their_ttft(points):
    point = replace(points["alone"], source="db-dump", model="llama-3.1-70b", tp=4)
    with_front_end, without = (replay_point(replace(point, source=source)).prediction for source in ("db-dump", "mine"))
    # One client; 231 tokens in the mean of lengths between 204 and 256.
    assert with_front_end.front_end_s == pytest.approx(FRONT_END[0] + 231 * FRONT_END[1], rel=0.01)
    assert with_front_end.ttft_s > with_front_end.front_end_s
    assert without.front_end_s == 0


def test_the_host_adds_what_it_does_in_the_version_of_the_point(points):
    new = points["many"]
    steps = {version: replay_point(replace(new, version=version)).prediction for version in ("0.12.0", "0.14.0")}
    host = host_share("vllm 0.12.0")
    assert steps["0.12.0"].tpot_s - steps["0.14.0"].tpot_s == pytest.approx(
        host.seconds + 16 * host.sequence_s, rel=0.2
    )


def test_points_are_replayed_as_closed_loops_and_none_is_dropped_in_silence(file):
    found = validate_published(file)
    assert list(found.table["id"]) == list(REPLAYED)
    assert (found.table["predicted_ttft"] > 0).all()
    loop = {
        "name": "loop",
        "workload": {
            "kind": "closed-loop",
            "users": 4,
            "requests": 40,
            "prompt_tokens": {"kind": "fixed", "value": 256},
            "output_tokens": {"kind": "fixed", "value": 8},
        },
        "model": {"name": "llama-3.1-8b"},
        "server": {"async_scheduling": True},
        "machine": {"device": "h100_sxm"},
    }
    four, summary = found.table.iloc[1], kvsim.run(kvsim.load_scenario(loop)).summary
    assert four["predicted_ttft"] == summary["ttft_s"]["mean"]
    assert four["predicted_tpot"] == summary["tpot_s"]["mean"]
    assert len(found.table) + sum(found.reasons.values()) == 9
    assert {reason.split(":")[0].split(",")[0] for reason in found.reasons} == {
        "the point does not say how many servers prefill and decode",
        "attention data parallelism",
        "pipeline parallelism is not simulated",
        "sglang",
        "no model called 'someone/Some-Model-7B-FP8'; there are tiny",
    }


def test_the_result_is_the_same_with_any_number_of_workers(file):
    alone, two = (validate_published(file, workers=n) for n in (1, 2))
    pd.testing.assert_frame_equal(alone.table, two.table)
    assert alone.to_dict() == two.to_dict()


def test_a_sample_is_drawn_with_a_seed(file):
    drawn = {seed: validate_published(file, sample=2, seed=seed) for seed in (1, 2, 3, 4)}
    assert all(len(each.outcomes) == 2 + 4 and each.chosen == 5 for each in drawn.values())
    assert len({tuple(each.table["id"]) for each in drawn.values()}) > 1
    again = validate_published(file, sample=2, seed=1)
    assert again.to_dict() == drawn[1].to_dict()


def made(points, *factors):
    """Outcomes of the point ``four`` whose predictions are off by these factors; the last needs too many blocks."""
    outcomes = []
    for i, factor in enumerate(factors):
        point = replace(points["four"], id=f"p{i}", concurrency=2**i)
        short = 100 if i == len(factors) - 1 else 60 if i == len(factors) - 2 else 10
        prediction = Prediction(factor * point.ttft_s, point.tpot_s, 0.0, 99, short, i, "profile", "basis")
        outcomes.append(Outcome(point, prediction))
    return PublishedValidation((*outcomes, Outcome(points["other"], None, "why")), len(factors), 1)


def test_errors_are_those_of_predicted_over_measured(points):
    found = made(points, 1.1, 0.8, 1.3)
    assert list(found.table["error_ttft"]) == pytest.approx([0.1, -0.2, 0.3])
    assert list(found.table["error_tpot"]) == [0, 0, 0]
    assert found.error("ttft", "bias") == pytest.approx(0.1)
    assert found.error("ttft", "median") == pytest.approx(0.2)
    assert found.error("ttft", "p90") == pytest.approx(0.28)
    assert found.error("ttft", "median", "concurrency", 4) == pytest.approx(0.3)
    assert found.error("ttft", "median", "isl", 256) == pytest.approx(0.2)
    assert found.error("ttft", "median", "concurrency", 8) != found.error("ttft", "median", "concurrency", 8)
    # One client has 8 tokens in 20 + 7 x 8 ms, and 22 + 7 x 8 are predicted.
    assert found.table["measured_throughput"].iloc[0] == pytest.approx(8 / 0.076)
    assert found.table["predicted_throughput"].iloc[0] == pytest.approx(8 / 0.078)
    assert found.reasons == {"why": 1}


def test_the_worst_are_those_off_by_the_largest_factor(points):
    assert list(made(points, 1.1, 0.5, 1.6, 1.0).worst["id"]) == ["p1", "p2", "p0", "p3"]


def test_points_in_which_memory_decides_are_shown_with_those_before_them(points):
    assert list(made(points, 1.0, 1.0, 1.0, 1.0).pressed["id"]) == ["p2", "p3"]
    found = made(points, 1.0, 1.0)
    assert list(found.table["memory"]) == ["suffices", "decides"]
    others = replace(found, outcomes=(found.outcomes[0],))
    assert others.pressed.empty


@pytest.mark.slow
def test_the_table_and_the_picture_are_saved(file, tmp_path):
    found = validate_published(file)
    assert [path.name for path in found.save(tmp_path / "out")] == ["published.csv", "published.png"]
    read = pd.read_csv(tmp_path / "out" / "published.csv")
    assert list(read["id"]) == list(REPLAYED)
    assert list(read["predicted_ttft"]) == pytest.approx(list(found.table["predicted_ttft"]))
    none = validate_published(file, ["id=other"])
    assert [path.name for path in none.save(tmp_path / "out")] == ["published.csv"]
    assert not (tmp_path / "out" / "published.png").exists()


def test_a_measurement_that_stands_in_two_lines_counts_once(tmp_path):
    rows = [
        ROWS[1],
        ROWS[1].replace("four,ours", "again,elsewhere"),
        ROWS[1].replace("four", "other").replace("8.0", "8.1"),
    ]
    found = validate_published(write_points(tmp_path / "points.csv", *rows))
    assert list(found.table["id"]) == ["four", "other"]
    assert found.reasons == {"the same measurement stands in a line before": 1}


def test_a_file_without_points_is_refused(tmp_path):
    path = write_points(tmp_path / "points.csv")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match="there are no points in it"):
        validate_published(path)
