"""Does the adaptive trigger beat every fixed threshold on the built-in long-run scenario?

Run with: python -m benchmarks.thresholds. Simulated seconds: the same on every machine.
"""

import joblib

from kvsim import load_scenario, run

THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


def row(policy: str, threshold: float) -> tuple[str, float, float, int, int]:
    summary = run(load_scenario("long-run", cache__threshold=threshold), policy).summary
    name = policy if policy == "adaptive" else f"threshold {threshold}"
    e2e = summary["e2e_s"]
    return name, e2e["mean"], e2e["p95"], summary["completed"], summary["cache"]["moved_cells"]


def main() -> None:
    jobs = [joblib.delayed(row)("threshold-compaction", threshold) for threshold in THRESHOLDS]
    rows = joblib.Parallel(n_jobs=-1)([joblib.delayed(row)("adaptive", 0.1), *jobs])
    most = max(completed for *_, completed, _ in rows)
    print(f"{'':16}{'e2e mean':>10}{'e2e P95':>10}{'completed':>11}{'cells moved':>13}")
    for name, mean, p95, completed, moved in rows:
        print(f"{name:16}{mean:>8.4f} s{p95:>8.4f} s{completed:>11,}{moved:>13,}")
    (_, adaptive, *_), *fixed = rows
    best, mean = min((r[:2] for r in fixed if r[3] == most), key=lambda r: r[1])
    print(f"adaptive / best fixed ({best}, of those that complete as many) = {adaptive / mean:.3f}")


if __name__ == "__main__":
    main()
