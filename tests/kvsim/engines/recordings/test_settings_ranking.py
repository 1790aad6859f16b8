"""Rankings of settings under the same requests."""

import pandas as pd
import pytest

from kvsim.engines.recordings.settings_ranking import Ranking, rankings
from tests.kvsim.engines.recordings.test_spread import TWELVE, run


def tables(measured, predicted, ids=range(12)):
    """Latencies by request, all alike."""
    ids = [str(number) for number in ids]
    sides = {"measured": measured, "predicted": predicted}
    return pd.DataFrame({"id": ids} | {f"{side}_{m}": s for side, s in sides.items() for m in ("ttft_s", "e2e_s")})


def recorded(settings, measured, predicted, times=TWELVE, **keys):
    one = run(f"{settings}-{measured}", times, settings=settings, **keys)
    one.settings = settings
    return one, tables(measured, predicted, times)


def ranked(*runs):
    return {ranking.measure: ranking for ranking in rankings(runs)}


def test_settings_are_in_the_measured_order():
    found = ranked(recorded("slow", 3.0, 2.0), recorded("fast", 1.0, 1.5), recorded("middle", 2.0, 1.8))
    assert list(found) == ["ttft_s", "e2e_s"]
    assert found["e2e_s"].table["settings"].tolist() == ["fast", "middle", "slow"]
    assert (found["e2e_s"].tau, found["e2e_s"].wrong) == (1.0, 0)
    assert found["e2e_s"].to_dict()["settings"][0] == {
        "settings": "fast",
        "runs": 1,
        "measured": 1.0,
        "predicted": 1.5,
        "spread": 0.0,
    }


def test_of_several_runs_the_median_counts_and_their_range():
    found = ranked(recorded("a", 1.0, 1.1), recorded("a", 1.2, 1.1), recorded("a", 2.0, 1.3), recorded("b", 3.0, 2.0))[
        "e2e_s"
    ]
    assert found.table.loc[0].tolist() == ["a", 3, *map(pytest.approx, (1.2, 1.1, 0.5 / 1.2))]


def test_pairs_are_wrong_only_beyond_the_spread():
    table = pd.DataFrame(
        {
            "settings": ["a", "b", "c"],
            "measured": [1.0, 1.1, 2.0],
            "predicted": [1.2, 1.0, 0.9],
            "spread": [0.06, 0.06, 0],
        }
    )
    found = Ranking("e2e_s", table)
    assert found.wrong == 2  # a and b differ by less than their runs do.
    assert found.tau == pytest.approx(-1.0)
    assert Ranking("e2e_s", table.assign(predicted=1.0)).tau is None
    assert Ranking("e2e_s", table.assign(predicted=1.0)).wrong == 0


def test_other_requests_servers_and_single_settings_are_not_ranked():
    one = recorded("a", 1.0, 1.0)
    assert rankings([]) == rankings([one]) == ()
    assert rankings([one, recorded("a", 2.0, 2.0)]) == ()
    assert rankings([one, recorded("b", 2.0, 2.0, server="t")]) == ()
    assert rankings([one, recorded("b", 2.0, 2.0, lengths={3: 5})]) == ()


def test_of_runs_that_ended_earlier_only_requests_that_all_have_are_ranked():
    """The last requests are slow; without them the longer run is the faster one."""
    long, table = recorded("a", 1.0, 1.0, dict.fromkeys(range(20), 2.0))
    table.loc[12:, ["measured_e2e_s", "predicted_e2e_s"]] = 50.0
    found = ranked((long, table), recorded("b", 2.0, 2.0))["e2e_s"]
    assert found.table["settings"].tolist() == ["a", "b"]
    assert found.table["measured"].tolist() == [1.0, 2.0]
