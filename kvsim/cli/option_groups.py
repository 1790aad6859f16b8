"""Options that are the fields of a dataclass: those that several commands share, and those of commands with many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from kvsim.cli.options import (
    Columns,
    ContinueClock,
    DeviceCacheType,
    DeviceEngine,
    DeviceName,
    DeviceWeights,
    DropFailed,
    ModelName,
    ProfileName,
    Requests,
    ScenarioName,
    Scheduler,
    Seed,
    SkipBadRows,
    TensorParallel,
    TimeUnit,
)
from kvsim.errors import UserError

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario
    from workloads.traces.table_row import Time


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Have Typer see the fields of each parameter that is a dataclass as options of the command."""
    hints = get_type_hints(command, include_extras=True)
    shown: list[Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            shown += _parameters(hints[name])
        else:
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def called(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    vars(called)["__signature__"] = Signature(shown)
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return called


def _parameters(group: Any) -> list[Parameter]:
    """A parameter for each field of a dataclass."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def refuse(options: Any, why: str, *names: str) -> None:
    """Raise ``UserError`` if one of these fields of a dataclass of options has another value than its default."""
    for field in fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise UserError(f"--{field.name.replace('_', '-')}: {why}")


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """The model that a scenario's requests are for, and what serves it."""

    model: ModelName = None
    device: DeviceName = None
    tp: TensorParallel = None
    weights: DeviceWeights = None
    engine: DeviceEngine = None
    kv: DeviceCacheType = None

    @property
    def served(self) -> dict[str, Any]:
        """What is given of them, as arguments of ``load_scenario``."""
        keys = {
            "model": self.model,
            "device": self.device,
            "machine__tensor_parallel": self.tp,
            "machine__weights": self.weights,
            "machine__engine": self.engine,
            "cache__type_k": self.kv,
            "cache__type_v": self.kv,
        }
        return {key: value for key, value in keys.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions(ServedOptions):
    """A scenario, and what is replaced in it."""

    scenario: ScenarioName = "chat"
    scheduler: Scheduler = None
    seed: Seed = None
    requests: Requests = None
    profile: ProfileName = None
    skip_bad_rows: SkipBadRows = False

    def load(self, source: Scenario | None = None) -> Scenario:
        """The scenario with what is replaced; ``source``: in place of the one that is named. Raises ``UserError``."""
        from kvsim.scenario.scenario import given_profile, load_scenario
        from kvsim.scenario.trace_sections import TRACES, TraceWorkload

        scheduler = {} if self.scheduler is None else {"server__scheduler": self.scheduler}
        loaded = load_scenario(source or self.scenario, **self.served, **scheduler)
        changes: dict[str, Any] = {}
        if self.seed is not None:
            changes["seed"] = self.seed
        if self.requests is not None:
            changes[f"workload__{loaded.workload.count_key}"] = self.requests
        if self.skip_bad_rows:
            if not isinstance(loaded.workload, TraceWorkload):
                kind, kinds = loaded.workload.kind, ", ".join(TRACES)
                raise UserError(f"{loaded.name}: --skip-bad-rows: workload.kind is {kind!r}; accepted: {kinds}")
            changes["workload__skip_bad_rows"] = True
        if self.profile is not None:
            changes["machine__profile"] = given_profile(self.profile)
        return load_scenario(loaded, **changes)


@dataclass(frozen=True)
class TraceOptions:
    """How a trace is read."""

    columns: Columns = None
    time: TimeUnit = None
    skip_bad_rows: SkipBadRows = False
    drop_failed: DropFailed = False
    continue_clock: ContinueClock = False

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a trace's ``[workload]`` that are set."""
        keys: dict[str, Any] = {}
        if self.skip_bad_rows:
            keys["skip_bad_rows"] = True
        if self.drop_failed:
            keys["failed"] = "drop"
        if self.continue_clock:
            keys["clock_reset"] = "continue"
        return keys

    @property
    def table(self) -> dict[str, Any]:
        """Columns and unit of time of a table, as arguments. Raises ``UserError``."""
        return {"columns": _columns(self.columns), "time": _time(self.time)}


def _columns(text: str | None) -> dict[str, str] | None:
    """Names of columns by field."""
    if text is None:
        return None
    columns: dict[str, str] = {}
    for part in text.split(","):
        field, equals, name = (piece.strip() for piece in part.partition("="))
        if not (field and equals and name) or field in columns:
            what = f"{field} is given twice" if name and field in columns else f"{part!r} is not FIELD=NAME"
            raise UserError(
                f"--columns: {what}; pairs such as arrival=ts,prompt=in,output=out,session=user are expected"
            )
        columns[field] = name
    return columns


def _time(text: str | None) -> Time | None:
    if text is None:
        return None
    from workloads.traces.table_row import Time

    units: tuple[Time, ...] = get_args(Time)
    for unit in units:
        if text == unit:
            return unit
    raise UserError(f"--time: {text!r}; accepted: {', '.join(units)}")
