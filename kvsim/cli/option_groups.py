"""Options that are the fields of a dataclass: those that several commands share, and those of commands with many."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from kvsim.cli import options as declared
from kvsim.cli.console import warn
from kvsim.errors import UserError

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario
    from workloads.traces.table_row import Time


_NAMES = {"ngl": "n-gpu-layers"}
"""Options that are not named as their fields."""


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
class UsersOptions:
    """Traffic in its users' own words: arguments of ``users_section``."""

    users: declared.Users = None
    prompt: declared.PromptTokens = None
    shared: declared.SharedTokens = None
    output: declared.OutputTokens = None
    think: declared.Think = None
    turns: declared.Turns = None
    growth: declared.Growth = None
    tool_share: declared.ToolShare = None
    tool_time: declared.ToolTime = None

    @property
    def of_users(self) -> dict[str, Any] | None:
        """What is given of them; None without users. Raises ``UserError`` if what is needed is missing."""
        given = {f.name: v for f in fields(UsersOptions) if (v := getattr(self, f.name)) is not None}
        if not given:
            return None
        for name, example in (("users", "12"), ("prompt", "6000"), ("output", "300")):
            if name not in given:
                first = next(iter(given)).replace("_", "-")
                raise UserError(f"--{first}: say --{name} too, such as --{name} {example}")
        return given

    @property
    def typed(self) -> str:
        """All options that are given, as they are typed; without the scenario, which is none."""
        words: list[str] = []
        for field in fields(self):
            value, name = getattr(self, field.name), _NAMES.get(field.name, field.name.replace("_", "-"))
            if value != field.default and field.name != "scenario":
                words.append(f"--no-{name}" if value is False else f"--{name}")
                words += [] if isinstance(value, bool) else [str(value)]
        return shlex.join(words)

    @property
    def traffic(self) -> dict[str, Any]:
        """The users' workload as an argument of ``load_scenario``; empty without users. Raises ``UserError``."""
        if self.of_users is None:
            return {}
        from kvsim.scenario.users import users_section

        return {"workload": users_section(**self.of_users)}

    def base(self, named: str | None, default: str) -> str | dict[str, Any] | Scenario:
        """The scenario that is named; else, for users, one without settings of its own, or the default one."""
        return named or (default if self.of_users is None else {"name": "users"})


@dataclass(frozen=True, kw_only=True)
class ServedOptions(UsersOptions):
    """The model that a scenario's requests are for, what serves it, and perhaps other traffic."""

    model: declared.ModelName = None
    device: declared.DeviceName = None
    tp: declared.TensorParallel = None
    ep: declared.ExpertParallel = None
    weights: declared.DeviceWeights = None
    engine: declared.DeviceEngine = None
    kv: declared.DeviceCacheType = None
    ngl: declared.GpuLayers = None
    n_cpu_moe: declared.CpuExperts = None
    cpu_gb_s: declared.CpuBandwidth = None
    flash_attn: declared.FlashAttention = None
    replicas: declared.Replicas = None
    router: declared.RouterName = None

    @property
    def table(self) -> dict[str, Any]:
        """Which columns of a table are what, and the unit of its arrivals, where there are options for these."""
        return {}

    @property
    def served(self) -> dict[str, Any]:
        """What is given of them, as arguments of ``load_scenario``. Raises ``UserError``."""
        if self.flash_attn is not None and self.engine not in (None, "llamacpp"):
            raise UserError("--flash-attn, --no-flash-attn: llama.cpp has them and vLLM has not; leave them out")
        keys = {
            "model": self.model,
            "device": self.device,
            "machine__tensor_parallel": self.tp,
            "machine__expert_parallel": self.ep,
            "machine__weights": self.weights,
            "machine__engine": self.engine or (None if self.flash_attn is None else "llamacpp"),
            "cache__type_k": self.kv,
            "cache__type_v": self.kv,
            "machine__n_gpu_layers": self.ngl,
            "machine__n_cpu_moe": self.n_cpu_moe,
            "machine__cpu_gb_s": self.cpu_gb_s,
            "cluster__replicas": self.replicas,
            "cluster__router": self.router,
            "cache__kernel": {None: None, True: "tiled", False: "masked"}[self.flash_attn],
        }
        return self.traffic | {key: value for key, value in keys.items() if value is not None}

    def base(self, named: str | None, default: str) -> str | dict[str, Any] | Scenario:
        """The scenario that is named, or one of the users' or a trace file's traffic.

        Raises ``UserError`` if traffic has no model and device that serve it.
        """
        from kvsim.scenario.builtin import is_trace

        of_trace = named is not None and is_trace(named) and Path(named).is_file()
        traffic = named if of_trace else "--users" if named is None and self.of_users is not None else None
        if traffic is not None and (self.model is None or self.device is None):
            raise UserError(f"{traffic}: say what serves them, --model and --device, or name a scenario that does")
        if not (of_trace and traffic):
            if any(self.table.values()):
                raise UserError("--columns, --time: of a table of your own; name its file in place of a scenario")
            return UsersOptions.base(self, named, default)
        from kvsim.scenario.trace_files import trace_scenario

        return trace_scenario(traffic, **self.table)


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions(ServedOptions):
    """A scenario, and what is replaced in it."""

    scenario: declared.ScenarioName = None
    scheduler: declared.Scheduler = None
    seed: declared.Seed = None
    requests: declared.Requests = None
    profile: declared.ProfileName = None
    columns: declared.Columns = None
    time: declared.TimeUnit = None
    skip_bad_rows: declared.SkipBadRows = False

    @property
    def table(self) -> dict[str, Any]:
        """Which columns of a table are what, and the unit of its arrivals. Raises ``UserError``."""
        return {"columns": _columns(self.columns), "time": _time(self.time)}

    def load(self, source: Scenario | None = None, *, under: str | None = None) -> Scenario:
        """The scenario with what is replaced; ``source``: in place of the one that is named.

        ``under``: the policy that it is run under, which it gets if its own cannot serve ``--model``. Raises
        ``UserError``.
        """
        from kvsim.scenario.scenario import given_profile, load_scenario
        from kvsim.scenario.trace_sections import TRACES, TraceWorkload

        if source is None:
            warn(filter(None, [self._left_behind()]))
        scheduler = {} if self.scheduler is None else {"server__scheduler": self.scheduler}
        base, replaced = source or self.base(self.scenario, "chat"), {**self.served, **scheduler}
        try:
            loaded = load_scenario(base, **replaced)
        except UserError:
            if under is None or self.model is None:
                raise
            from kvsim.simulation.set_up import known_policy

            loaded = load_scenario(base, **replaced, cache__policy=known_policy(under))
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

    def _left_behind(self) -> str:
        """A line for what a file says and --device replaces, as it was written for another machine."""
        from kvsim.scenario.device_defaults import left_aside
        from kvsim.scenario.scenario import read

        if self.device is None or self.scenario is None or not self.scenario.endswith(".toml"):
            return ""
        return left_aside(self.scenario, read(self.scenario)[0], self.device, self.engine)


@dataclass(frozen=True)
class TraceOptions:
    """How a trace is read."""

    columns: declared.Columns = None
    time: declared.TimeUnit = None
    skip_bad_rows: declared.SkipBadRows = False
    drop_failed: declared.DropFailed = False
    continue_clock: declared.ContinueClock = False

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a trace's ``[workload]`` that are set."""
        keys = {
            "skip_bad_rows": self.skip_bad_rows,
            "failed": self.drop_failed and "drop",
            "clock_reset": self.continue_clock and "continue",
        }
        return {key: value for key, value in keys.items() if value}

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
    if text not in units:
        raise UserError(f"--time: {text!r}; accepted: {', '.join(units)}")
    return text
