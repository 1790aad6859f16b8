"""What ``kvsim validate`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.cli.tables.formats import LATENCIES, new_table, seconds, whole
from kvsim.engines.live.engine_validation import Validation


def show_validation(console: Console, v: Validation) -> None:
    """Print prediction, measurement and error for each policy and measure."""
    several = v.repeats > 1
    spread = ["± run to run"] if several else []
    over = ["over the repeats"] if several else []
    table = new_table("policy", "measure", "predicted", "measured", *spread, "error", *over, left=("measure",))
    before = None
    for row in v.table.to_dict("records"):
        policy = str(row["policy"]) if row["policy"] != before else ""
        before = row["policy"]
        if row["measure"] in LATENCIES:
            measure = f"{LATENCIES[str(row['measure'])]} {row['statistic']}"
            pair = (seconds(row["predicted"]), seconds(row["measured"]))
        else:
            measure, pair = "output tokens/s", (whole(row["predicted"]), whole(row["measured"]))
        error = "–" if row["error"] != row["error"] else f"{row['error']:+.1%}"
        cells = [policy, measure, *pair, *([f"{row['spread']:.1%}"] if several else []), error]
        if several:
            cells.append(f"{row['low']:+.1%} to {row['high']:+.1%}")
        table.add_row(*cells, end_section=row["measure"] not in LATENCIES)
    console.print(table)
    console.print(
        "Both runs placed the same cells: schedule "
        + ", ".join(f"{policy} {digest[:8]}" for policy, digest in v.schedules.items()),
        highlight=False,
    )
    if v.compared:
        counts = ", ".join(f"{policy} {n:,}" for policy, n in v.compared.items())
        console.print(
            f"llama.cpp showed its cells, and they were the policy's every time (comparisons: {counts})",
            highlight=False,
        )
    tau, wrong = v.ranking
    if tau is not None:
        console.print(
            f"Ranking of the policies by mean end-to-end latency: Kendall's tau {tau:.2f}, {wrong} pairs ranked "
            "differently although they are further apart than they vary from run to run",
            highlight=False,
        )
    low, high = min(pace[0] for pace in v.pace.values()), max(pace[1] for pace in v.pace.values())
    console.print(
        f"Largest error of end-to-end latency at P50 or P99: {v.worst:.1%}. Passes took {low:.3f} to {high:.3f} of the "
        f"time that they took in the calibration, and each step is scaled by the pace at its moment; without that: "
        f"{v.worst_unscaled:.1%}",
        highlight=False,
    )
    if v.elsewhere:
        decode, prompt = v.reference
        console.print(
            f"The profile was measured on a different processor ({v.profile.measured_on.processor}): here, a decode "
            f"{decode:.2f} times as long and a prompt {prompt:.2f} times. How other costs differ is not known; "
            f"a profile of this machine would say it: {v.profile.command} --model {v.scenario.model.name}, "
            "or validate without --profile",
            style="bold",
            highlight=False,
        )
    console.print(v.profile.describe(), style="dim", highlight=False)
