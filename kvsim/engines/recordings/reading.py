"""Reading a recorded server, in whichever of the known forms."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from kvsim.engines.recordings.from_llama_server import read_llama_server
from kvsim.engines.recordings.from_vllm import read_vllm
from kvsim.engines.recordings.recorded_server import RecordedServer, read_recorded_server
from kvsim.engines.recordings.recording_files import NOT_A_RECORD, read_lines
from kvsim.engines.recordings.steps import LONGEST_S, SteppedServer
from kvsim.errors import UserError


def read_recording(path: str | Path) -> RecordedServer:
    """Read a recording of requests alone, of llama-server or of vLLM with its steps.

    Raises ``UserError`` and ``WorkloadError``, one line.
    """
    path = Path(path)
    try:
        _, header = next(read_lines(path), (0, {}))
    except UserError:
        return read_recorded_server(path)  # Which reads other compressions too, and says what is wrong.
    if header.get("type") != "meta":
        return read_recorded_server(path)
    if header.get("timed") is False:
        raise UntimedError(f"{path}: its times mean nothing (timed is false); kvsim conform compares its decisions")
    try:
        is_vllm = isinstance(header.get("engine"), dict)
        records = [record for _, record in read_lines(path)][1:]
        found = (read_vllm if is_vllm else read_llama_server)(path, header, records)
    except UserError as e:
        said = str(e).partition("\n")[0]  # A scenario names all of its faults.
        raise UserError(said if said.startswith(str(path)) else f"{path}: {said}") from None
    except ValidationError as e:
        fault = e.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise UserError(f"{path}: not a recording of vLLM or llama-server ({where}: {fault['msg']})") from None
    except NOT_A_RECORD as e:
        said = str(e).partition("\n")[0]
        raise UserError(f"{path}: not a recording of vLLM or llama-server ({type(e).__name__}: {said})") from None
    _check(found)
    return found


def _check(recording: SteppedServer) -> None:
    """Raise ``UserError`` for what cannot have been measured."""
    path = recording.path
    if not recording.requests:
        raise UserError(f"{path}: no request was answered, so there is nothing to compare")
    numbers = [request.id for request in recording.workload]
    if len(set(numbers)) < len(numbers):
        twice = next(number for at, number in enumerate(numbers) if number in numbers[:at])
        raise UserError(f"{path}: a second request {twice}")
    for request in recording.requests:
        times = (0.0, request.asked.arrival_s, request.first_token_s, request.last_token_s, LONGEST_S)
        if not all(a <= b for a, b in pairwise(times)):
            raise UserError(f"{path}: request {request.id}: sent, first and last token at {times[1:4]} s: not in order")
    for step in recording.steps:
        if not (0 < step.seconds <= LONGEST_S and 0 <= step.start_s <= LONGEST_S):
            raise UserError(f"{path}: a step at {step.start_s} s takes {step.seconds} s; more than 0 is expected")


class UntimedError(UserError):
    """A recording says of itself that its times mean nothing."""
