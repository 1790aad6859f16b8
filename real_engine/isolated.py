"""Measurements in an isolated process: a request as JSON on its input, the result as JSON on its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_ROOT = Path(__file__).parent.parent


def ask_isolated(
    module: str,
    request: Mapping[str, Any],
    failed: str,
    *,
    killed: str = "",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``python -m module`` with ``request`` and return its result.

    ``environment``: variables added to this process's own. Raises ``UserError`` with the process's own ``error``, or,
    if it reported none, with a message that begins with ``failed``; ``killed`` is appended if a signal ended it.
    """
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    finished = subprocess.run(
        [sys.executable, "-P", "-m", module],
        input=json.dumps(request),
        env=os.environ | dict(environment or {}) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        result: dict[str, Any] = json.loads(finished.stdout)
    except ValueError:
        reason = finished.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        if finished.returncode < 0:
            reason = [f"it was ended by signal {-finished.returncode}{killed}"]
        raise UserError(f"{failed}: {reason[0]}") from None
    if "error" in result:
        raise UserError(result["error"])
    return result


def answer(measure: Callable[[dict[str, Any]], DataclassInstance]) -> int:
    """Be that process: measure what the input asks for, print the result or the error, and return the exit code."""
    try:
        print(json.dumps(asdict(measure(json.load(sys.stdin)))))
    except UserError as e:
        print(json.dumps({"error": str(e)}))
        return 2
    return 0
