"""What recordings of servers say of how they were made."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from kvsim.engines.live.address import Address
from kvsim.engines.live.recorded_lines import Record
from kvsim.engines.live.recording_journal import RecordingJournal
from kvsim.engines.live.served import model_of
from kvsim.engines.live.settings import ServerSettings, about_server
from kvsim.engines.live.traffic import SendingStopped
from kvsim.errors import UserError
from kvsim.machine import processor, system_load
from kvsim.scenario.scenario import Scenario
from workloads import Workload


@dataclass(frozen=True)
class Asking:
    """A server that is asked, and how."""

    address: Address
    key: str | None = None
    timeout_s: float = 60.0
    """The longest silence."""
    limit_s: float = 3600.0
    """The longest time that the sending may take."""
    flags: tuple[str, ...] | None = None
    """What the server was started with, if the user says it."""
    log: Path | None = None
    """llama-server's own log."""
    texts: int = 0
    """Another number, other texts of the same lengths: for a run that shall find nothing of an earlier one."""
    resume: bool = False
    """Go on with a recording that ended early."""


@dataclass
class Run:
    """A recording under way."""

    scenario: Scenario
    path: Path
    asking: Asking
    settings: ServerSettings
    workload: Workload
    journal: RecordingJournal
    stopped: SendingStopped | None = None
    others: dict[str, int] | None = None
    """Tokens ``counted`` by the server meanwhile, and those that were ``ours``."""


def llama_server_meta(run: Run, flags: Sequence[str], assumed: Sequence[str]) -> Record:
    """What a recording of llama-server says of it; without what its log says."""
    settings = run.settings
    meta = {"name": run.path.name.split(".jsonl")[0], **_common_meta(run, assumed), "flags": list(flags)}
    meta["server"] = about_server(settings, flags)
    meta["model"] = {"file": PurePath(settings.model_file or settings.model or "").name}
    return meta


def openai_meta(run: Run, assumed: Sequence[str]) -> Record:
    """What a recording of another server says of it, by the names of recordings of vLLM."""
    settings = run.settings
    engine: Record = {"mode": "server", "model": _model(run), "max_model_len": settings.context}
    names = {"num_gpu_blocks": "num_blocks", "block_size": "block_size"}
    engine |= {names[key]: int(value) for key, value in settings.cache.items() if key in names and value.isdigit()}
    if "enable_prefix_caching" in settings.cache:
        engine["prefix_caching"] = settings.cache["enable_prefix_caching"] == "True"
    version = (
        {"vllm": settings.engine.removeprefix("vllm").strip()} if settings.is_vllm else {"server": settings.engine}
    )
    meta = {**version, **_common_meta(run, assumed), "engine": engine, "cache": settings.cache, "timed": True}
    if run.asking.flags is not None:
        meta["flags"] = list(run.asking.flags)
    elif settings.started is not None:
        meta["flags"] = settings.started.words
    return meta


def _model(run: Run) -> str | None:
    """The model by the name that a profile of the server has; where it cannot be known here, by the server's own."""
    try:
        return model_of(run.asking.address, run.settings, None)
    except UserError:
        return run.settings.model


def _common_meta(run: Run, assumed: Sequence[str]) -> Record:
    """What recordings of all servers say of how they were made."""
    journal = run.journal
    meta: Record = {
        "recorded": datetime.date.today().isoformat(),
        "source": f"kvsim record --url {run.asking.address}",
        "scenario": run.scenario.name,
        "settings": run.scenario.workload.model_dump(mode="json"),
        "seed": journal.head.seed,
        "requests": run.workload.n_requests,
        "ended": len(journal.latest),
        "prompts": "text" if journal.head.vocabulary.is_text else "token ids",
        "texts": journal.head.texts,
        "clock": "client",
        "machine": {
            "of": "client",
            "cpu": processor(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "load": round(system_load(), 2),
        },
        "assumed": list(assumed),
    }
    if run.others is not None:
        meta["tokens"] = run.others
    if len(journal.parts) > 1:
        meta["resumed_s"] = [round(part_s, 6) for part_s in journal.parts[1:]]
    if run.stopped is not None:
        meta["stopped"] = str(run.stopped)
    return meta
