"""Reading a recorded server, in whichever of the known forms."""

from __future__ import annotations

from pathlib import Path

from kvsim.engines.conformance.recordings import read_lines
from kvsim.engines.recorded.llama_steps import read_llama_steps
from kvsim.engines.recorded.server import RecordedServer, read_recorded_server
from kvsim.engines.recorded.vllm_steps import read_vllm_steps
from kvsim.errors import UserError
from policies import Unsupported

_NOT_A_RECORD = (KeyError, TypeError, IndexError, AttributeError, ArithmeticError, ValueError, Unsupported)


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
        found = read_vllm_steps(path, header) if is_vllm else read_llama_steps(path, header)
    except UserError as e:
        raise UserError(str(e) if str(e).startswith(str(path)) else f"{path}: {e}") from None
    except _NOT_A_RECORD as e:
        raise UserError(f"{path}: not a recording of vLLM or llama-server ({type(e).__name__}: {e})") from None
    if not found.requests:
        raise UserError(f"{path}: no request was answered, so there is nothing to compare")
    return found


class UntimedError(UserError):
    """A recording says of itself that its times mean nothing."""
