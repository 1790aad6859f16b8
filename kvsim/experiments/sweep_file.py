"""Sweep files: which scenarios to run under which policies, and how often, read from TOML."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from kvsim.costs.load_profile import load_profile
from kvsim.errors import UserError, choices, no_such, unknown
from kvsim.experiments.measures import NEED_OBJECTIVES, Objectives, measure_called, share_of_requests
from kvsim.experiments.sweep_design import AXIS_ACCEPTED, Axis, Scalar, Span, count_settings, lay_out, listed
from kvsim.scenario.builtin import builtin_names
from kvsim.scenario.device_defaults import left_aside, table_on
from kvsim.scenario.scenario import Scenario, check_name, name_of, read, read_toml, set_key, validated
from kvsim.scenario.section import Section
from kvsim.scenario.serving_sections import PolicyName
from policies import PolicyFactory, available, current_name, why_left_out

MOST_RUNS = 100_000
"""Maximum number of runs in one sweep."""
_MOST_REQUESTS = 10**9
"""Maximum number of requests in one run."""

_ACCEPTED = {
    "axes": AXIS_ACCEPTED,
    "policies": 'a list of policies or "all"',
    "show": 'a list of measures, such as ["ttft_p99", "tpot_p99"]',
    "warmup": '"mser-5", "none" or a number of requests',
}
"""What is accepted by keys that take values of several types."""


class StopRule(Section):
    """A rule that adds replications until the interval of a measure is narrow enough."""

    measure: Annotated[str, AfterValidator(measure_called)]
    within: Annotated[float, Field(gt=0, lt=1)]
    """Target relative error; see ``estimates.check_precision``."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    most: Annotated[int, Field(ge=2, le=10_000)] = 50
    """Maximum number of replications."""


class SweepFile(Section):
    """The keys of a sweep file."""

    name: Annotated[str, AfterValidator(check_name)] = "sweep"
    """Name of the sweep and of its results folder."""
    scenario: str | None = None
    """A built-in scenario or a file; relative paths are relative to the sweep file."""
    base: dict[str, Any] | None = None
    """The scenario itself, instead of its name."""
    policies: Annotated[list[PolicyName], Field(min_length=1)] | Literal["all"] | None = None
    """Policies to run each point under; by default the scenario's own."""
    replications: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Minimum number of runs of each point under each policy; the r-th run always has the scenario's seed plus r."""
    warmup: Literal["mser-5", "none"] | NonNegativeInt = "mser-5"
    design: Literal["grid", "latin-hypercube", "sobol"] = "grid"
    points: Annotated[int, Field(ge=1, le=MOST_RUNS)] | None = None
    """Number of settings, for designs other than a grid."""
    axes: dict[str, Axis] = Field(default_factory=dict)
    """The dotted scenario keys that vary, with their values."""
    stop: StopRule | None = None
    slo: Objectives | None = None
    """The service level that defines goodput."""
    show: Annotated[list[str], Field(min_length=1)] | None = None
    """Measures to print and draw; a list, or names with commas between them."""
    max_failed: float = 0.0
    """Share of its requests that a policy may have failed and still be ranked."""

    @field_validator("show", mode="before")
    @classmethod
    def _measures(cls, show: Any) -> Any:
        """Split names at commas, and write short names out."""
        names = [name.strip() for name in show.split(",")] if isinstance(show, str) else listed(show)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return names
        return list(dict.fromkeys(measure_called(name) for name in names))

    @field_validator("max_failed", mode="before")
    @classmethod
    def _share(cls, share: Any) -> Any:
        return share_of_requests("", share)

    @field_validator("axes", mode="before")
    @classmethod
    def _plain(cls, axes: Any) -> Any:
        """Convert tuples, ranges and arrays to lists of plain numbers, and former names of policies to current ones."""
        if not isinstance(axes, dict):
            return axes
        plain = {key: listed(axis) for key, axis in axes.items()}
        if isinstance(names := plain.get("cache.policy"), list):
            plain["cache.policy"] = [current_name(name) if isinstance(name, str) else name for name in names]
        return plain

    @model_validator(mode="after")
    def _fits(self) -> SweepFile:
        if (self.scenario is None) == (self.base is None):
            raise ValueError("a sweep needs either scenario, a name or a file, or a table [base]")
        if self.policies is not None and "cache.policy" in self.axes:
            raise ValueError("policies and the axis cache.policy say the same; give one of them")
        if "seed" in self.axes:
            raise ValueError("the axis seed: give replications instead; each has a seed of its own")
        if self.design == "grid":
            if self.points is not None:
                raise ValueError(
                    'points: a grid has as many as its axes make; give design = "latin-hypercube" or "sobol"'
                )
            for key, axis in self.axes.items():
                if isinstance(axis, Span) and axis.steps is None:
                    raise ValueError(f"axes.{key}: a grid needs steps")
        else:
            if self.points is None:
                raise ValueError(f'points: design = "{self.design}" needs to know how many')
            if not self.axes:
                raise ValueError(f'axes: design = "{self.design}" needs at least one')
        asked = {"show": self.show or [], "stop.measure": [self.stop.measure] if self.stop is not None else []}
        for key, names in asked.items():
            if self.slo is None and (unknown := sorted(NEED_OBJECTIVES.intersection(names))):
                raise ValueError(f"{key}: {unknown[0]} needs a table [slo] in the sweep, such as ttft_s = 0.5")
        if self.stop is not None and self.stop.most < self.replications:
            raise ValueError(f"stop.most ({self.stop.most}) is less than replications ({self.replications})")
        return self


@dataclass(frozen=True)
class Point:
    """One combination of settings under one policy."""

    number: int
    """Number of the settings, from 0; the same under every policy."""
    policy: str
    settings: dict[str, Scalar]
    """The value of each axis."""
    scenario: Scenario | None
    """The scenario with the seed of the first replication; None for invalid settings."""
    fault: str = ""
    """Why the settings are invalid."""

    def replication(self, r: int) -> Scenario:
        """Return the scenario of the r-th replication, counted from 0."""
        assert self.scenario is not None, self.fault
        return self.scenario.model_copy(update={"seed": self.scenario.seed + r}) if r else self.scenario


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep file and all points that it lays out."""

    file: SweepFile
    points: tuple[Point, ...]
    """Sorted by number; each number appears once per policy."""
    factories: Mapping[str, PolicyFactory] = field(default_factory=dict)
    """What builds each policy that was given as a callable, by the name that it gives itself."""

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self.file.name

    @property
    def policies(self) -> list[str]:
        """Names of the policies, each once."""
        return list(dict.fromkeys(point.policy for point in self.points))

    @property
    def axes(self) -> list[str]:
        """The scenario keys that vary."""
        return list(self.file.axes)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the file with defaults filled in."""
        return self.file.model_dump(mode="json", by_alias=True, exclude_none=True)


def builtin_sweeps() -> list[str]:
    """Return the names of the sweep files that ship with the package."""
    return sorted(p.name.removesuffix(".toml") for p in _folder().iterdir() if p.name.endswith(".toml"))


def plan_sweep(
    source: str | Path | dict[str, Any],
    *,
    seed: int | None = None,
    requests: int | None = None,
    show: str | Sequence[str] | None = None,
    max_failed: float | str | None = None,
    policies: Sequence[str | PolicyFactory] | None = None,
    **served: Any,
) -> SweepPlan:
    """Read a sweep and lay out its points without running any.

    ``source`` is a built-in name, a TOML file or its table. ``served`` are keys to replace in the scenario, among them
    ``model`` and ``device`` (``load_scenario``), as ``seed`` and ``requests`` do; ``show``, ``max_failed`` and
    ``policies`` replace those of the sweep; policies may be callables, in a table too. Settings that are invalid only
    in combination, such as a slot context larger than the cache, become points with a ``fault``. Raises ``UserError``
    for anything that is always invalid: a misspelt key, a value that its key never accepts, an unknown policy, or a
    base scenario that cannot be run. Raises ``WorkloadError`` for an unreadable trace.
    """
    data, label, folder = _read(source)
    policies = [policies] if isinstance(policies, str) and policies != "all" else policies
    replaced = {"show": show, "max_failed": max_failed, "policies": policies}
    data = data | {key: value for key, value in replaced.items() if value is not None}
    data, callables = _without_callables(data)
    file = _checked(data, label)
    base, base_folder = _base(file, label, folder)
    base = table_on(base, served.pop("model", None), served.pop("device", None), served.get("machine__engine"))
    for key, value in served.items():
        set_key(label, base, key.split("__"), copy.deepcopy(value))
    if seed is not None:
        base["seed"] = seed
    own = validated(base, label, base_folder)
    _known_sections(file, label)
    if requests is not None:
        if not 1 <= requests <= _MOST_REQUESTS:
            raise UserError(f"--requests is {requests}; a whole number from 1 to {_MOST_REQUESTS:,} is accepted")
        set_key(label, base, ["workload", own.workload.count_key], requests)
        own = validated(base, label, base_folder)
    if own.seed + max(file.replications, file.stop.most if file.stop else 1) > 2**63:
        raise UserError(f"{label}: seed: {own.seed} leaves no room for further replications' seeds")
    file, factories = _with_names(file, callables, label, own)
    names = _policies(file, label, own, factories)
    runs = count_settings(file.axes, file.points, own) * len(names) * file.replications
    if runs > MOST_RUNS:
        raise UserError(f"{label}: {runs:,} runs; at most {MOST_RUNS:,} are accepted")
    settings = lay_out(file.axes, file.design, file.points, own)
    # What is wrong for every run is reported once, here.
    if not any(key.startswith(("workload.", "machine.")) for key in file.axes):
        own.build_workload()
        load_profile(own.machine.profile, own.folder)
    if not any(key.startswith(("model.", "machine.", "cache.type_")) for key in file.axes):
        from kvsim.simulation.set_up import profile_of

        profile_of(own)
    points = tuple(_points(file.name, base, base_folder, settings, names, own, served))
    _refuse_invalid_values(file, label, points, factories)
    return SweepPlan(file, points, factories)


def left_of(source: str, device: str, engine: str | None) -> str:
    """A line for what a user's own scenario in a sweep says and ``device`` replaces, axes aside; empty if nothing."""
    data, label, folder = _read(source)
    file = _checked(data, label)
    if source in builtin_sweeps() or (file.base is None and str(file.scenario) in builtin_names()):
        return ""
    return left_aside(label, _base(file, label, folder)[0], device, engine, but=file.axes)


def _folder() -> Any:
    return resources.files("kvsim.experiments") / "sweeps"


def _read(source: str | Path | dict[str, Any]) -> tuple[dict[str, Any], str, Path]:
    if isinstance(source, dict):
        return source, str(source.get("name", "sweep")), Path().resolve()
    name = str(source)
    if name in builtin_sweeps():
        data = tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8"))
        return {"name": name, **data}, name, Path().resolve()
    data = read_toml(source, f"no such file, and not a built-in sweep; {choices(str(source), builtin_sweeps())}")
    return {"name": name_of(Path(source)), **data}, name, Path(source).resolve().parent


def _checked(data: dict[str, Any], label: str) -> SweepFile:
    axes = data.get("axes")
    for key, axis in axes.items() if isinstance(axes, dict) else ():
        if unquoted := _nested_key(axis):
            raise UserError(f'{label}: axes: quote the key: "{key}.{unquoted}"')
    try:
        return SweepFile.model_validate(data)
    except ValidationError as e:
        # For a key of several types pydantic reports an error for each type; one line per key is enough.
        lines = [_explain(label, error) for error in e.errors()]
        raise UserError("\n".join({line.split(": ")[1]: line for line in reversed(lines)}.values())) from None


def _nested_key(axis: Any) -> str:
    """The rest of an axis key that was written without quotes, which TOML reads as nested tables; empty otherwise."""
    for key, value in axis.items() if isinstance(axis, dict) else ():
        if isinstance(value, dict | list):
            return ".".join(filter(None, (str(key), _nested_key(value))))
    return ""


def _known_sections(file: SweepFile, label: str) -> None:
    """Refuse an axis in a section that no scenario has; keys within sections are checked when they are set."""
    sections = [name for name in Scenario.model_fields if name != "folder"]
    for key in file.axes:
        section, dot, rest = key.partition(".")
        if dot and section not in sections:
            raise UserError(f"{label}: axes: {key}: {unknown('section', section, sections, f'.{rest}')}")


def _explain(label: str, error: ErrorDetails) -> str:
    """One line for one error: the file, the key, what is wrong, what is accepted."""
    where = [str(part) for part in error["loc"]]
    first = where[0] if where else ""
    if first == "axes":
        where = where[:2] + [part for part in where[3:] if not part.isdigit()]  # The third part is the union's tag.
    elif first in _ACCEPTED:
        where = where[:1]
    if where[-1:] in (["int"], ["float"]):
        return f"{label}: {'.'.join(where[:-1])}: a number is expected, got {error['input']!r:.60}"
    key = ".".join(where)
    if error["type"] == "extra_forbidden":
        sections: dict[str, type[Section]] = {"stop": StopRule, "slo": Objectives, "axes": Span}
        section = sections.get(first, SweepFile) if len(where) > 1 else SweepFile
        known = [field.alias or name for name, field in section.model_fields.items()]
        return f"{label}: {key}: {unknown('key', where[-1], known)}"
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if error["type"] in ("missing", "value_error"):
        return f"{label}: {key}: {message}" if key else f"{label}: {message}"
    if error["type"] == "model_type":
        message = "a table is expected"
    if first in _ACCEPTED and len(where) < 3:
        message = f"accepted: {_ACCEPTED[first]}"
    return f"{label}: {key}: {message}, got {error['input']!r:.60}"


def _base(file: SweepFile, label: str, folder: Path) -> tuple[dict[str, Any], Path]:
    """The scenario's table as written, and the folder of its relative paths."""
    if file.base is not None:
        return {"name": file.name, **copy.deepcopy(file.base)}, folder
    assert file.scenario is not None
    inside = folder / file.scenario
    try:
        data, _, its_folder = read(str(inside) if inside.suffix == ".toml" and inside.is_file() else file.scenario)
    except UserError as e:
        raise UserError(f"{label}: scenario: {e}") from None
    return data, its_folder.resolve()


def _without_callables(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, PolicyFactory]]:
    """The table with a word in the place of each policy that is a callable, and the callables by these words."""
    given = data.get("policies")
    if not isinstance(given, list | tuple):
        return data, {}
    words = {f"callable {i}": policy for i, policy in enumerate(given) if callable(policy)}
    kept = [f"callable {i}" if callable(policy) else policy for i, policy in enumerate(given)]
    return {**data, "policies": kept}, words


def _with_names(
    file: SweepFile, callables: dict[str, PolicyFactory], label: str, base: Scenario
) -> tuple[SweepFile, dict[str, PolicyFactory]]:
    """The file with the names that callables give their policies, and the callables by these. Raises ``UserError``."""
    from kvsim.simulation.set_up import build_policy

    names: dict[str, str] = {}
    factories: dict[str, PolicyFactory] = {}
    for word, factory in callables.items():
        name = names[word] = build_policy(base, factory).name
        if name in available() or factories.setdefault(name, factory) is not factory:
            raise UserError(f"{label}: policies: a callable names its policy {name!r}, the name of another policy")
    if callables and isinstance(file.policies, list):
        file = file.model_copy(update={"policies": [names.get(policy, policy) for policy in file.policies]})
    return file, factories


def _policies(file: SweepFile, label: str, base: Scenario, factories: Mapping[str, PolicyFactory]) -> list[str | None]:
    """The policies to run; None stands for the scenario's own."""
    known = available()
    if file.policies == "all":
        return list(known)
    for name in [*(file.policies or ()), base.cache.policy]:
        if name not in known and name not in factories:
            why = why_left_out(name) or no_such("policy", name, known)
            raise UserError(f"{label}: policies: {why}")
    return list(dict.fromkeys(file.policies)) if file.policies else [None]


def _points(
    name: str,
    base: dict[str, Any],
    folder: Path,
    settings: list[dict[str, Scalar]],
    policies: list[str | None],
    own: Scenario,
    served: Mapping[str, Any],
) -> Iterator[Point]:
    for number, row in enumerate(settings):
        device = row.get("machine.device")
        table = table_on(copy.deepcopy(base), None, device if isinstance(device, str) else None)
        for key, value in served.items():  # Not of the device that is left behind.
            set_key(name, table, key.split("__"), copy.deepcopy(value))
        for key, value in row.items():
            set_key(f"{name}: axes", table, key.split("."), value)
        fault, scenario = "", None
        try:
            scenario = validated(table, name, folder)
        except UserError as e:
            fault = str(e)
        for policy in policies:
            under = policy or str(row.get("cache.policy", own.cache.policy))
            try:
                yield Point(number, under, row, scenario and scenario.under(under), fault)
            except UserError as e:
                yield Point(number, under, row, None, str(e))


def _refuse_invalid_values(
    file: SweepFile, label: str, points: tuple[Point, ...], factories: Mapping[str, PolicyFactory]
) -> None:
    """Raise ``UserError`` for an axis, or a value of a list, that is invalid at every point where it occurs."""
    for key, axis in file.axes.items():
        by_value: dict[Scalar | None, list[str | None]] = {}
        for point in points:
            value = None if isinstance(axis, Span) else point.settings[key]
            by_value.setdefault(value, []).append(_fault_of_key(file.name, key, point.fault))
        for faults in by_value.values():
            if faults[0] is not None and None not in faults:
                raise UserError(faults[0].replace(f"{file.name}: ", f"{label}: axes: ", 1))
    known = available()
    for point in points:
        if point.policy not in known and point.policy not in factories:
            why = why_left_out(point.policy) or no_such("policy", point.policy, known)
            raise UserError(f"{label}: axes: cache.policy: {why}")


def _fault_of_key(name: str, key: str, fault: str) -> str | None:
    """The line of a point's fault that names a key, if any."""
    return next((line for line in fault.splitlines() if line.startswith(f"{name}: {key}: ")), None)
