"""``kvsim conform``: whether our schedulers and policies decide what recorded engines decided, record by record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvsim.engines.recordings.llama_server_replay import LlamaServerReplay
from kvsim.engines.recordings.llamacpp_replay import LlamaCppReplay
from kvsim.engines.recordings.recording_files import NOT_A_RECORD, Record, read_lines
from kvsim.engines.recordings.replay import Replay, State
from kvsim.engines.recordings.router_replay import RouterReplay
from kvsim.engines.recordings.vllm_manager import ManagerReplay
from kvsim.engines.recordings.vllm_scheduler import SchedulerReplay, ServerReplay
from kvsim.errors import UserError
from policies import Unsupported


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first record whose state is not ours."""

    record: int
    """Number of the record, 0 for the first after the header."""
    operation: Record
    fields: tuple[str, ...]
    recorded: State
    ours: State


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far our policy agrees with a recording."""

    file: str
    era: str
    """Version of the engine, or a range of versions that behave alike."""
    agree: int
    """Records that agree in every compared field; a first disagreement may cause later ones."""
    total: int
    """Records with at least one field to compare."""
    first: Disagreement | None
    excused: tuple[str, ...] = ()
    """What was decided by the recording because its clock cannot tell, in words."""

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        found: dict[str, Any] = {"file": self.file, "era": self.era, "agree": self.agree, "total": self.total}
        if self.excused:
            found["excused"] = list(self.excused)
        if self.first is not None:
            found["first_disagreement"] = asdict(self.first)
        return found


def conform(start: Callable[[Record], Replay], path: str | Path) -> Agreement:
    """Replay one recording; ``start`` makes the replay of a header. Raises ``UserError`` if it is not a recording.

    After a disagreement, later operations may be impossible on our state; such records count as disagreements.
    """
    source = Path(path)
    lines = read_lines(source)
    number, header = next(lines, (1, {}))
    agree = total = 0
    number_of_record = -1
    first: Disagreement | None = None
    try:
        replay = start(header)
        for number, record in lines:  # noqa: B007  (used where the loop fails)
            if record.get("type") == "footer":
                continue
            number_of_record += 1
            try:
                recorded, ours = replay.perform(record)
            except NOT_A_RECORD:
                if first is None:
                    raise
                total += 1
                continue
            if not recorded:
                continue
            total += 1
            differ = tuple(key for key in recorded if recorded[key] != ours.get(key))
            agree += not differ
            if differ and first is None:
                first = Disagreement(number_of_record, replay.operation(record), differ, recorded, ours)
    except (ValueError, Unsupported) as e:
        if isinstance(e, UserError) and str(e).startswith(f"{source}: "):
            raise
        raise UserError(f"{source}: line {number}: {str(e).splitlines()[0]}") from None
    except NOT_A_RECORD as e:
        raise UserError(f"{source}: line {number}: not a record of such a run ({type(e).__name__}: {e})") from None
    if number_of_record < 0:
        raise UserError(f"{source}: no record behind its header")
    if not total:
        raise UserError(f"{source}: nothing that can be compared: no record says what it found, or shows a cell")
    return Agreement(source.name, replay.era, agree, total, first, tuple(replay.excused))


def _vllm_replay(header: Record) -> Replay:
    """The replay of a recording of vLLM, by its header. Raises ``ValueError`` if it is none."""
    kinds: dict[str, Callable[[Record], Replay]] = {"manager": ManagerReplay, "scheduler": SchedulerReplay}
    if header.get("type") == "meta" and "engine" in header:
        return ServerReplay(header)
    if header.get("kind") not in kinds:
        raise ValueError(
            "not a vLLM recording's header; a JSON object with 'kind' (manager or scheduler), "
            "or of type 'meta' with an 'engine', is expected"
        )
    return kinds[header["kind"]](header)


ENGINES: dict[str, Callable[[str | Path], Agreement]] = {
    "llamacpp": partial(conform, LlamaCppReplay),
    "llama-server": partial(conform, LlamaServerReplay),
    "vllm": partial(conform, _vllm_replay),
    "router": partial(conform, RouterReplay),
}
"""By engine: functions that replay a recording and compare. They raise ``UserError`` if a file is no such recording."""
