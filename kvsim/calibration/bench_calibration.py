"""Calibration by the files of benchmarks that users already have: ``kvsim calibrate --from``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.calibration.bench_correction import Correction, correct
from kvsim.calibration.bench_files.reading import read_bench_file
from kvsim.calibration.bench_passes import Limits, PartPrices, Pass
from kvsim.calibration.bench_subject import BenchOptions, BenchSubject, subject_of
from kvsim.costs.device_profiles import find_device_profile, profile_name
from kvsim.costs.memory_plan import default_cells
from kvsim.costs.physics import PassPhysics
from kvsim.costs.profile import Corrected, Profile
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.errors import UserError, counted
from kvsim.model.memory_shapes import memory_shape

_DEEP = 0.2
"""Share of attention in a step from which a row tells of it."""
_SEVERAL = 16
"""Sequences that stand for those of a batch."""


@dataclass(frozen=True)
class Unknown:
    """A part that no row tells of, and what would."""

    part: str
    command: str


@dataclass(frozen=True)
class BenchCalibration:
    """A profile that was corrected by benchmarks, and how well that went."""

    profile: Profile
    starting: Profile
    """The profile that was corrected."""
    subject: BenchSubject
    correction: Correction
    unknown: tuple[Unknown, ...]

    @property
    def range(self) -> str:
        """What the rows cover, in a sentence."""
        c = self.correction
        return (
            f"The rows cover passes of up to {counted(c.tokens, 'token')}, up to {counted(c.sequences, 'sequence')} "
            f"decoding at a time, and up to {counted(c.cells, 'cell')} of each; beyond, the profile is carried on by "
            "the same factors."
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Rows that no such device can have brought about, or no other traffic, in a line."""
        rows = self.correction.rows
        fast, all_rows = [row for row in rows if row.too_fast], counted(len(rows), "row")
        if not fast:
            shared = sum(row.shares_experts for row in rows)
            if not shared:
                return ()
            return (
                f"{shared} of {all_rows} are faster than if tokens chose their experts "
                "evenly: the benchmark's sequences, which are alike, share more of them than those of users may",
            )
        worst = max(fast, key=lambda row: row.least_s / row.point.seconds)
        s = self.subject
        return (
            f"{len(fast)} of {all_rows} are faster than {s.device.title} can be with "
            f"weights in {self.profile.weights}: {worst.point.where}, {worst.point.title}, took 1/"
            f"{worst.least_s / worst.point.seconds:.2f} of what its bandwidth and peak allow; the device, the weights "
            "or the model named are other than those measured, and prices are kept at that limit",
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        rows = [
            {
                "where": row.point.where,
                "what": row.point.title,
                "measured_s": row.point.seconds,
                "estimate_s": row.estimate_s,
                "corrected_s": row.corrected_s,
                "left_out_s": row.left_out_s,
                "least_s": row.least_s,
            }
            for row in self.correction.rows
        ]
        return {
            "rows": rows,
            "range": self.range,
            "unknown": [asdict(each) for each in self.unknown],
            "warnings": list(self.warnings),
            "profile": self.profile.model_dump(mode="json"),
        }


def calibrate_from(files: Sequence[str | Path], options: BenchOptions) -> BenchCalibration:
    """Correct the times of a model on a device by the results of benchmarks of it. Raises ``UserError``."""
    points = [point for file in files for point in read_bench_file(file, options.flags)]
    subject = subject_of(points, options)
    return calibrate_profile(_starting(subject, options.tp), subject)


def _starting(subject: BenchSubject, tp: int) -> Profile:
    """The profile that is corrected: that of the device, but none that was corrected before."""
    how: dict[str, Any] = {"tp": tp, "weights": subject.weights, "engine": subject.engine}
    how |= {"type_k": subject.type_k, "type_v": subject.type_v}
    found = find_device_profile(subject.model, subject.device_name, **how)
    if found.corrected is None:
        return found
    return find_device_profile(subject.model, subject.device_name, own=False, **how)


def calibrate_profile(starting: Profile, subject: BenchSubject) -> BenchCalibration:
    """Correct a profile by the rows of its subject."""
    physics = physics_of(starting, subject)
    done = correct(starting, physics, _limits(starting, subject), subject.points)
    profile = done.profile.model_copy(update=_about(starting, subject, done))
    found = BenchCalibration(
        profile, starting, subject, replace(done, profile=profile), _unknown(done, physics, subject)
    )
    assert profile.source is not None
    untold = [f"No row of the benchmarks tells of {each.part}." for each in found.unknown]
    notes = (*profile.source.notes, *subject.notes, found.range, *untold, *found.warnings)
    told = profile.model_copy(update={"source": profile.source.model_copy(update={"notes": notes})})
    return replace(found, profile=told)


def physics_of(profile: Profile, subject: BenchSubject) -> PassPhysics:
    """What passes need at least on the subject's device."""
    shape = memory_shape(subject.model)
    weights = profile.weights or shape.default_type
    types = (profile.type_k, profile.type_v)
    return PassPhysics(subject.device, shape, weights, *types, tp=profile.tensor_parallel, engine=subject.engine)


def _limits(profile: Profile, subject: BenchSubject) -> Limits:
    """What the engine puts into a pass by default."""
    if subject.engine != "vllm":
        return Limits(512, 1 << 20, 1 << 40)
    tokens, sequences = serve_defaults(subject.device.memory_bytes, subject.device.name)
    try:
        cells = default_cells(subject.model, subject.device_name, tp=profile.tensor_parallel, weights=subject.weights)
    except UserError:
        cells = 1 << 40  # It did fit, whatever the plan says.
    return Limits(tokens, sequences, cells)


def _about(starting: Profile, subject: BenchSubject, done: Correction) -> dict[str, Any]:
    """What the profile says of itself: its name, where it comes from, and the errors that were found."""
    tools = ", ".join(dict.fromkeys(f"{p.set_up.tool} {p.set_up.build}".strip() for p in subject.points))
    files = list(dict.fromkeys(Path(p.where.split(": ")[0]).name for p in subject.points))
    rows, errors = [[p.title, p.seconds] for p in subject.points], done.left_out_errors
    corrected = Corrected(
        by=f"{tools} ({', '.join(files[:3])}{f' and {len(files) - 3} others' if len(files) > 3 else ''})",
        rows=len(rows),
        error_median=float(np.median(errors)) if len(errors) else None,
        error_p90=float(np.quantile(errors, 0.9)) if len(errors) else None,
    )
    how: dict[str, Any] = {"tp": starting.tensor_parallel, "weights": subject.weights, "engine": subject.engine}
    how |= {"type_k": subject.type_k, "type_v": subject.type_v}
    return {
        "name": profile_name(memory_shape(subject.model), subject.device_name, **how),
        "corrected": corrected,
        "estimated": None,
        "samples": len(rows),
        "digest": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "measured": datetime.now(UTC).date().isoformat(),
    }


def _unknown(done: Correction, physics: PassPhysics, subject: BenchSubject) -> tuple[Unknown, ...]:
    """The parts that no row tells of, most telling first, with the command that would."""
    factors = done.factors
    depth = _telling_depth(done.profile, physics)
    if subject.engine == "llamacpp":
        base = "llama-bench -m FILE -p 512 -n 128"
        many = f"llama-batched-bench -m FILE -c {32 * (512 + 64)} -npp 512 -ntg 64 -npl 1,4,16,32"
        deep = f"llama-bench -m FILE -p 512 -n 64 -d 0,{depth}"
    else:
        bench = "vllm bench serve --model MODEL --dataset-name random --ignore-eos --save-result"
        lengths = "--random-input-len 512 --random-output-len 128"
        base = f"{bench} {lengths} --max-concurrency 1 --num-prompts 16"
        many = f"{bench} {lengths} --max-concurrency {_SEVERAL} --num-prompts {16 * _SEVERAL}"
        deep = f"{bench} --random-input-len {depth} --random-output-len 128 --max-concurrency 1 --num-prompts 8"
    parts = (
        (factors.tells_of(1), "the work of steps in which one sequence decodes", base),
        (factors.tells_of(512), "the work of prompts", base),
        (factors.tells_of(_SEVERAL), "the work of steps in which several sequences decode", many),
        (factors.tells_of_decode, "attention of sequences that decode over long contexts", deep),
        (factors.tells_of_prompt, "attention of long prompts", deep),
    )
    return tuple(Unknown(part, command) for told, part, command in parts if not told)


def _telling_depth(profile: Profile, physics: PassPhysics) -> int:
    """Cells from which attention is a good part of a step, as far as the model's context goes."""
    prices = PartPrices(profile, physics)
    depths = [d for d in (4096, 8192, 16384, 32768, 65536) if d < (physics.shape.context or 8193)] or [1024]
    for depth in depths:
        parts = prices.parts([Pass(1, singles=1, cells=depth)])
        if parts.decode.sum() >= _DEEP * prices.seconds([Pass(1, singles=1, cells=depth)]):
            return depth
    return depths[-1]
