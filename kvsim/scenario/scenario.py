"""Scenarios: everything that a run depends on, read from one TOML file."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

import workloads
from kvsim.costs.shipped import is_shipped
from kvsim.errors import UserError, choices, did_you_mean, no_such, unknown
from kvsim.model.engine_versions import ENGINE_VERSIONS, LLAMACPP_B4666, PRESENT, EngineVersion
from kvsim.results import MEGABYTE, text_of
from kvsim.scenario.builtin import builtin_names, builtin_text
from kvsim.scenario.cluster_section import ClusterSection, ServersSection
from kvsim.scenario.content import content_of
from kvsim.scenario.device_defaults import table_on, with_device_defaults
from kvsim.scenario.model_groups import why_not_under
from kvsim.scenario.section import Section, WorkloadSection
from kvsim.scenario.server_defaults import (
    AUTO,
    TODAYS_SERVERS,
    other_names,
    present_name,
    with_own_scheduler,
    with_present_names,
    with_server_defaults,
    with_types,
    without_other_names,
)
from kvsim.scenario.serving_sections import CacheSection, MachineSection, ModelSection, ServerSection
from kvsim.scenario.speculation_section import SpeculationSection
from kvsim.scenario.trace_sections import REGISTERED
from kvsim.scenario.workload_sections import AnyWorkload, PoissonWorkload
from policies import CacheConfig, Content, RelativeCosts, engine_of
from policies.paging.cache_groups import GroupSpec
from workloads.request import timed

_SCHEDULER_ENGINES: dict[str, EngineVersion] = {
    **dict.fromkeys(TODAYS_SERVERS, PRESENT["llama.cpp"]),
    "llama-server-b4875": LLAMACPP_B4666,
    "vllm": PRESENT["vLLM"],
}
DRAFTING = ("vllm", *TODAYS_SERVERS)
"""Schedulers that check drafts."""
_STATIC_BATCH, _STATIC_UBATCH = 256, 128
_CONTEXT_UNIT, _EARLY_CONTEXT_UNIT = 256, 32
"""llama.cpp rounds contexts up to a multiple of this many cells (``llama_context``, ``GGML_PAD``): that of early 2025
unless flash attention is on."""
_EARLY_LEAST_BATCH = 64
"""llama.cpp of early 2025 raises ``--batch-size`` to this (``GGML_KQ_MASK_PAD``)."""


_MOST_DOTS = 100
_OF_ENGINES = ("server", "cache", "machine")
"""Sections of which much follows from an engine or a device."""


def engine_version(policy: str) -> EngineVersion | None:
    """The version of an engine that a policy stands for; None for a layout of our own."""
    return ENGINE_VERSIONS.get(engine_of(policy))


def check_name(name: str) -> str:
    """Return the name. Raises ``ValueError`` unless it can name a folder."""
    if not re.fullmatch(r"[^\W.][\w .+=@-]{0,99}", name):
        raise ValueError(f"{name!r} cannot name a folder; letters, digits, spaces and . _ + = @ - are accepted")
    return name


class Scenario(Section):
    """Everything that a run depends on."""

    name: Annotated[str, AfterValidator(check_name)] = "unnamed"
    """The name of the scenario, and of the folder for its results."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    workload: AnyWorkload = PoissonWorkload(kind="poisson")
    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    cache: CacheSection = CacheSection()
    machine: MachineSection = MachineSection()
    cluster: ClusterSection = ClusterSection()
    speculation: SpeculationSection = SpeculationSection()
    folder: Annotated[Path, Field(exclude=True, repr=False)] = Path()
    """The folder at which relative paths start; not part of the file."""

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, data: Any) -> Any:
        """A workload without a kind is Poisson."""
        if isinstance(data, dict) and isinstance(data.get("workload"), dict):
            return {**data, "workload": {"kind": "poisson", **data["workload"]}}
        return data

    @model_validator(mode="wrap")
    @classmethod
    def _with_device_defaults(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in what follows from the device, or from the server; it counts as not set, so that it follows others."""
        if not isinstance(data, dict):
            return validate(data)
        data, of_device = with_device_defaults(with_present_names(data))
        data, of_policy = with_own_scheduler(data)
        data, of_server = with_server_defaults(data)
        data, of_model = with_types(data)
        scenario = validate(data)
        for section, key in of_policy | of_device | of_server | of_model:
            getattr(scenario, section).model_fields_set.discard(key)
        return scenario

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        if refused := why_not_under(self.model.shape, self.cache.policy, {g.kind for g in self.cache.groups}):
            raise ValueError(refused)
        if self.slot_context > self.context_cells:
            raise ValueError(f"server.slot_context ({self.slot_context}) exceeds cache.cells ({self.cache.cells})")
        if self.server.scheduler != "vllm" and self.server.preemption == "swap":
            raise ValueError(f"server.preemption: only the scheduler vllm swaps, not {self.server.scheduler}")
        if self.server.preemption == "swap" and not self.cache.host_cells:
            raise ValueError("server.preemption: there is nowhere to swap to; give cache.host_cells")
        if self.cache.disk_cells and not self.cache.host_cells:
            raise ValueError("cache.disk_cells: there is no host memory before the disk; give cache.host_cells")
        if self.server.prefetch != "none" and not self.cache.host_cells:
            raise ValueError("server.prefetch: there is nothing to bring back from; give cache.host_cells")
        if self.speculation.on and self.server.scheduler not in DRAFTING:
            raise ValueError(
                f"speculation.method: the scheduler {self.server.scheduler} checks no drafts; accepted: "
                f"{', '.join(DRAFTING)}"
            )
        if self.speculation.on and self.speculation.method == "ngram" and self.server.async_scheduling:
            raise ValueError("server.async_scheduling: vLLM composes no steps ahead where n-grams draft")
        if self.slot_context < 2:
            raise ValueError(
                f"cache.cells ({self.cache.cells}) shared out over server.slots ({self.server.slots}) leaves "
                f"{self.slot_context} tokens a slot; at least 2 are needed"
            )
        return self

    def under(self, policy: str) -> Scenario:
        """The scenario with another policy: where it says nothing, all is as in the policy's engine: the scheduler, the
        sizes and, on a device, the times. Raises ``UserError`` where that cannot be."""
        return self if policy == self.cache.policy else load_scenario(self, cache__policy=policy)

    @property
    def engine(self) -> EngineVersion | None:
        """The version of an engine that the policy stands for; None for a layout of our own."""
        return engine_version(self.cache.policy)

    @property
    def scheduler_engine(self) -> EngineVersion | None:
        """The version of an engine whose batches the scheduler has by default; None for ``static``."""
        return _SCHEDULER_ENGINES.get(self.server.scheduler)

    @property
    def _is_llama_server(self) -> bool:
        return self.server.scheduler.startswith("llama-server")

    @property
    def _context_unit(self) -> int:
        """What a context is rounded up to a multiple of: cells, where scheduler and cache are of one llama.cpp."""
        if not self._is_llama_server or self.engine is not self.scheduler_engine:
            return 1
        early = self.engine is LLAMACPP_B4666 and self.cache.kernel != "tiled"
        return _EARLY_CONTEXT_UNIT if early else _CONTEXT_UNIT

    @property
    def context_cells(self) -> int:
        """The cells that the cache has: ``cache.cells``, rounded up as llama.cpp does under its server."""
        if self.unified or self.engine is LLAMACPP_B4666:
            return -(-self.cache.cells // self._context_unit) * self._context_unit
        return self.cache.cells if self._context_unit == 1 else self.server.slots * self.equal_share

    @property
    def equal_share(self) -> int:
        """The cells of one slot if all have equally many; caches of their own are rounded up one by one."""
        if self.engine is LLAMACPP_B4666:
            return self.context_cells // self.server.slots
        share = self.cache.cells // self.server.slots
        return -(-share // self._context_unit) * self._context_unit

    @property
    def auto_slots(self) -> bool:
        """Whether the number of slots is left to llama-server."""
        return self.server.scheduler in TODAYS_SERVERS and "slots" not in self.server.model_fields_set

    @property
    def unified(self) -> bool:
        """Whether all slots share one cache."""
        if self.cache.policy == "streams":  # Whose name says that each slot has its own.
            return False
        if self.cache.unified is not None:
            return self.cache.unified
        if self.engine is None or self.engine.unified:
            return True
        if self.auto_slots:
            return True
        # What the scenario says of its slots comes before what an engine assumes: own caches could not hold that much.
        return self.server.slot_context is not None and self.server.slot_context > self.equal_share

    @property
    def slot_context(self) -> int:
        """The most tokens in one slot."""
        if self.server.slot_context is not None:
            return self.server.slot_context
        # The server of early 2025 divides what it has, whatever the cache would allow.
        engines = (self.engine, self.scheduler_engine) if self._is_llama_server else (self.engine,)
        equal = not self.unified or any(engine is not None and engine.equal_shares for engine in engines)
        return self.equal_share if equal else self.context_cells

    @property
    def n_batch(self) -> int:
        """The most tokens in one step; by default as the scheduler's engine limits it, by what the cache can take."""
        engine, stated = self.scheduler_engine, self.server.n_batch
        if engine is LLAMACPP_B4666 and self.engine is engine:
            return max(min(stated or engine.n_batch, self.context_cells), _EARLY_LEAST_BATCH)
        if engine is not None and engine.engine == "llama.cpp":
            # As the context was asked for, not as it was rounded.
            return min(stated or engine.n_batch, self.cache.cells)
        if stated is not None:
            return stated
        if engine is None:
            return _STATIC_BATCH
        # vLLM's own rule; without chunked prefill a prompt has to fit into one step.
        tokens = engine.n_batch if self.server.chunked_prefill else max(engine.n_batch, self.slot_context)
        return min(tokens, self.server.slots * self.slot_context)

    @property
    def n_ubatch(self) -> int:
        """The most tokens in one forward pass."""
        if self.server.scheduler == "vllm":
            return self.n_batch
        engine, stated = self.scheduler_engine, self.server.n_ubatch
        return min(stated or (_STATIC_UBATCH if engine is None else engine.n_ubatch), self.n_batch)

    def cache_config(self, costs: RelativeCosts | None = None) -> CacheConfig:
        """The configuration for policies; ``costs`` are used by triggers that weigh moves against attention."""
        config = CacheConfig(
            n_ubatch=self.n_ubatch,
            sequences=self.server.slots,
            max_tokens=self.slot_context,
            n_layers=self.model.shape.n_layers,
            future=self._future,
            unified=self.unified,
            cells=self.context_cells,
            seed=self.seed,
            for_any_layout=True,
            draft_tokens=self.speculation.tokens if self.speculation.on else 0,
            lookahead=self.speculation.lookahead,
            key_lookahead=int(self.speculation.reads_hidden_states),
            snapshots=self.speculation.tokens if self.speculation.reads_hidden_states and self.model.takes_back else 0,
            groups=tuple(GroupSpec(**group.model_dump()) for group in self.cache.groups),
            **self.cache.model_dump(exclude={"policy", "unified", "type_k", "type_v", "cells", "groups"}),
        )
        return config if costs is None else config.with_options(costs=costs)

    def _future(self) -> Iterator[tuple[int, Content, int]]:
        """Number, content and prompt tokens of all requests as they should arrive, for clairvoyant policies."""
        for _, request in sorted(timed(self.build_workload()), key=itemgetter(0)):
            yield request.id, content_of(request), request.prompt_tokens

    @property
    def cell_bytes(self) -> float:
        """Bytes of one cell: one token's K and V in all layers."""
        return self.model.shape.cell_bytes(self.cache.type_k, self.cache.type_v)

    def build_workload(self) -> workloads.Workload:
        """Build the workload. Raises ``WorkloadError`` if a trace cannot be read."""
        return self.workload.build_limited(self.seed, self.folder)

    @property
    def servers(self) -> tuple[Scenario, ...]:
        """The scenario of each server of the cluster, as if it were alone. Raises ``UserError``."""
        found = list[Scenario]()
        for group in self.cluster.servers or (ServersSection(count=self.cluster.replicas),):
            data = self.model_dump(exclude_unset=True, exclude={"cluster", "folder"})
            for section in _OF_ENGINES:
                data[section] = {**data.get(section, {}), **getattr(group, section)}
            found += [validated(data, f"{self.name}: cluster.servers", self.folder)] * group.count
        return tuple(found)

    def _file(self, name: str) -> bool:
        try:
            return (self.folder / name).is_file()
        except (OSError, ValueError):
            return False

    def to_toml(self, *, left_open: bool = False) -> str:
        """The scenario as TOML, with all defaults; ``left_open``: without those that may follow from a policy that it
        is run under, so that they do so again."""
        table = self.model_dump(mode="json")
        if left_open:
            table |= {name: getattr(self, name).model_dump(mode="json", exclude_unset=True) for name in _OF_ENGINES}
        workload, machine = table["workload"], table["machine"]
        for section, key in (
            (machine, "profile"),
            *((table["speculation"], key) for key in ("profile", "measured")),
            *((part, "path") for part in (workload, *workload.get("parts", ()))),
        ):
            # Absolute paths, so that the scenario can be run from any folder.
            if section.get(key) is not None and not is_shipped(section[key]) and self._file(section[key]):
                section[key] = str((self.folder / section[key]).resolve())
        if self.auto_slots and not left_open:
            table["server"]["slots"] = AUTO
        unset = list(_unset(table))
        text = tomli_w.dumps(_without_none(table))
        return text + (f"\n# not set: {', '.join(unset)}\n" if unset else "")


def load_scenario(
    source: str | Path | Scenario | dict[str, Any],
    *,
    model: str | dict[str, Any] | None = None,
    device: str | None = None,
    **changes: Any,
) -> Scenario:
    """Load a scenario from a built-in name, a TOML file or a table.

    ``model``, ``device``: serve this model, or on this device, instead of the scenario's (``table_on``); a table is the
    section ``model`` as it stands. ``changes`` are keys to replace, with double underscores for dots
    (``workload__requests=10``); ``machine__device`` is the same as ``device``. Raises ``UserError`` with one line for
    each fault.
    """
    data, label, folder = table_of(source)
    if isinstance(model, dict):
        changes["model"], model = model, None
    data = table_on(data, model, changes.pop("machine__device", device), changes.get("machine__engine"))
    for key, value in changes.items():
        set_key(label, data, key.split("__"), value)
    return validated(data, label, folder)


def table_of(source: str | Path | Scenario | dict[str, Any]) -> tuple[dict[str, Any], str, Path]:
    """The table of what ``load_scenario`` takes: a copy with the keys that are set, its name for messages, and the
    folder at which relative paths start. Raises ``UserError``."""
    if isinstance(source, Scenario):
        data, label, folder = source.model_dump(exclude_unset=True), source.name, source.folder
    elif isinstance(source, dict):
        data, label, folder = source, str(source.get("name", "scenario")), Path()
    else:
        data, label, folder = read(source)
    return copy.deepcopy(data), label, folder


def validated(data: dict[str, Any], label: str, folder: Path) -> Scenario:
    """Make a scenario of a table; relative paths start at ``folder``.

    Raises ``UserError`` with one line for each fault, which starts with ``label``.
    """
    if "folder" in data:
        data = {k: v for k, v in data.items() if k != "folder"} if isinstance(data["folder"], Path) else data
        if "folder" in data:
            raise UserError(f"{label}: folder: unknown key")
    model = data.get("model")
    if isinstance(model, dict) and str(model.get("name", "")).endswith(".gguf"):
        # Relative to the folder of the file, like all paths; absolute, so that it can be resolved again.
        data = {**data, "model": {**model, "name": _absolute(folder, str(model["name"]))}}
    try:
        return Scenario.model_validate({**data, "folder": folder})
    except ValidationError as e:
        raise UserError("\n".join(_explain(label, error) for error in e.errors())) from None


def _absolute(folder: Path, name: str) -> str:
    try:
        return str((folder / Path(name).expanduser()).absolute())
    except (RuntimeError, ValueError):
        return name  # Opening the file will report the fault.


def read(source: str | Path) -> tuple[dict[str, Any], str, Path]:
    """Read the table of a built-in scenario or a file.

    Returns the table, its name for messages, and the folder at which relative paths start. Raises ``UserError``.
    """
    name = str(source)
    if name in builtin_names():
        data = tomllib.loads(builtin_text(name))
        return {"name": name, **data}, name, Path()
    data = read_toml(source, f"no such file, and not a built-in scenario; {choices(name, builtin_names())}")
    path = Path(source)
    return {"name": name_of(path), **data}, name, path.parent


def name_of(path: Path) -> str:
    """The default name of an experiment: that of its file."""
    return re.sub(r"[^\w+=@-]", "_", path.stem) or "unnamed"


def read_toml(source: str | Path, if_missing: str) -> dict[str, Any]:
    """Read a TOML file. Raises ``UserError``, with the text ``if_missing`` if there is no such file."""
    name = str(source)
    try:
        text = text_of(Path(source), MEGABYTE, "utf-8-sig")
        # Python's reader takes time that grows with the square of a key's parts, or more.
        if any(part.count(".") > _MOST_DOTS for part in re.split(r"[=\n,{}\[\]\"']", text)):
            raise UserError(f"{name}: a key has more than {_MOST_DOTS} dots; the keys of such a file have few")
        return tomllib.loads(text)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{name}: {if_missing}") from None
    except OSError as e:
        raise UserError(f"{name}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UserError(f"{name}: not UTF-8 text; a TOML file is expected") from None
    except RecursionError:
        raise UserError(f"{name}: not TOML: nested too deeply") from None
    except ValueError as e:  # TOMLDecodeError, an integer beyond Python's limit, or a path that cannot be
        raise UserError(f"{name!a}: not TOML: {e}".replace("'", "", 2)) from None


def set_key(label: str, data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a value in nested tables. Raises ``UserError`` if a key on the path is not a table."""
    keys = present_name(keys)
    without_other_names(data, keys)
    *parents, last = keys
    for depth, key in enumerate(parents, 1):
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise UserError(f"{label}: {'.'.join(keys[:depth])}: not a table, so it has no key {keys[depth]!r}")
    data[last] = value


def given_profile(profile: str) -> str:
    """What a scenario takes for a profile that a user typed, relative to the current folder, not to the scenario's."""
    is_file = not is_shipped(profile) and "\0" not in profile and Path(profile).is_file()
    return str(Path(profile).resolve()) if is_file else profile


def _unset(table: dict[str, Any], above: str = "") -> Iterator[str]:
    """The dotted keys without a value, except those of distributions."""
    for key, value in table.items():
        if value is None:
            yield f"{above}{key}"
        elif isinstance(value, dict) and not (above and "kind" in value):
            yield from _unset(value, f"{above}{key}.")


def _without_none(value: Any) -> Any:
    """Copy nested tables without the keys that are None."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _explain(label: str, error: ErrorDetails) -> str:
    """Describe a fault in one line: file, key, fault, what is accepted."""
    location, section, kinds = _locate(error["loc"])
    key = ".".join(part if part and part.isprintable() else repr(part) for part in location) or "scenario"
    given = error.get("input")
    if error["type"] == "extra_forbidden":
        known = [name for name in section.model_fields if name != "folder"]
        known.sort(key=WorkloadSection.model_fields.__contains__)  # What all kinds have comes after what is their own.
        if section is ServerSection:
            known += other_names("server")
        return f"{label}: {key}: {unknown('key', location[-1], known)}"
    if error["type"] == "union_tag_invalid":
        tags = [tag for tag in _quoted(error["ctx"]["expected_tags"]) if tag != REGISTERED]
        return f"{label}: {key}.kind: {no_such('kind', error['ctx']['tag'], tags)}"
    if error["type"] == "union_tag_not_found":
        return f"{label}: {key}.kind: missing; accepted: {', '.join(map(repr, kinds))}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{label}: {key}: a table is expected, got {given!r:.60}"
    if error["type"] == "tuple_type":
        return f"{label}: {key}: a list is expected, got {given!r:.60}"
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if error["type"] in ("missing", "value_error"):
        return f"{label}: {key}: {message}"
    shown = repr(given)
    hint = did_you_mean(str(given), _quoted(error["ctx"]["expected"])) if error["type"] == "literal_error" else ""
    return f"{label}: {key}: {message}, got {shown if len(shown) <= 60 else shown[:57] + '...'}{hint and '; ' + hint}"


def _quoted(names: str) -> list[str]:
    """The names in quotes in a message of pydantic's."""
    return re.findall(r"'([^']+)'", names)


def _locate(location: Sequence[str | int]) -> tuple[list[str], type[Section], dict[str, type[Section]]]:
    """The keys of a fault, the section of the last key, and the kinds of tables accepted there.

    pydantic's location also has the kinds of workloads and lengths among the keys, which this removes.
    """
    keys: list[str] = []
    section: type[Section] = Scenario
    kinds: dict[str, type[Section]] = {}
    for part in location:
        if part in kinds:
            section, kinds = kinds[str(part)], {}
            continue
        keys.append(str(part))
        if isinstance(part, str):
            section, kinds = kinds.get("", section), {}
            if part in section.model_fields:
                kinds = _kinds(section.model_fields[part].annotation)
    return keys, section, kinds


def _kinds(annotation: Any) -> dict[str, type[Section]]:
    """The sections that a key accepts, alone or in lists or unions, by ``kind``; by "" without a kind."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        kind = annotation.model_fields.get("kind")
        return dict.fromkeys((get_args(kind.annotation) or [REGISTERED]) if kind else [""], annotation)
    return {kind: section for inner in get_args(annotation) for kind, section in _kinds(inner).items()}


def shortened(scenario: Scenario, requests: int | None) -> Scenario:
    """The scenario with at most so many requests (sessions, where the workload counts these)."""
    if requests is None:
        return scenario
    key = scenario.workload.count_key
    now = getattr(scenario.workload, key)
    changes: dict[str, Any] = {f"workload__{key}": requests if now is None else min(now, requests)}
    return load_scenario(scenario, **changes)
