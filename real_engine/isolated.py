"""A measurement in a process of its own: a question as JSON to its input, an answer as JSON from its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsim.errors import UserError

_ROOT = Path(__file__).parent.parent


def ask_isolated(
    module: str,
    question: Mapping[str, Any],
    failed: str,
    *,
    killed: str = "",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What ``python -m module`` answers.

    Raises ``UserError``: with what it says under ``error``, or, where it says nothing of the kind, beginning with
    ``failed``; ``killed`` is added where a signal ended it. ``environment``: variables besides this process's own.
    """
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module],
        input=json.dumps(question),
        env=os.environ | dict(environment or {}) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        why = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        if ended.returncode < 0:
            why = [f"it was ended by signal {-ended.returncode}{killed}"]
        raise UserError(f"{failed}: {why[0]}") from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer
