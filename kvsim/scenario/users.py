"""Traffic in its users' own words: so many people or agents, and what each of them asks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvsim.errors import UserError
from kvsim.scenario.scenario import Scenario

_LENGTH = re.compile(r"(\d+)(?::(\d+(?:\.\d*)?|\.\d+)(%?))?")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|h)?")
_SECONDS = {"ms": 1e-3, None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_REQUESTS = 400
_EACH = 10
"""By default, so many requests in all, or so many conversations of each user if these are more."""

Text = str | int | float


def users_section(
    users: int,
    prompt: Text,
    output: Text,
    shared: int = 0,
    think: Text = 0,
    turns: int = 1,
    growth: Text | None = None,
    tool_share: float = 0.0,
    tool_time: Text = 1,
) -> dict[str, Any]:
    """Return the ``[workload]`` section, of kind ``users``, of so many users.

    ``prompt``: tokens of a conversation's first prompt, of which ``shared`` begin every prompt; ``output``: of each
    answer. ``growth``: how much longer each further prompt is than the one before, answer included. Lengths are a mean,
    or ``6000:0.8`` with a coefficient of variation (``6000:0`` is always the same). ``think``, ``tool_time``: seconds,
    or text such as ``30s``. Raises ``UserError``, with the names of options.
    """
    first, answer = _mean("--prompt", prompt), _mean("--output", output)
    own = first["mean"] - shared
    if shared < 0 or own < 1:
        raise UserError(
            f"--shared: {shared} of a prompt of {first['mean']} tokens; 0 to {first['mean'] - 1} are accepted"
        )
    section = {
        "kind": "users",
        "users": users,
        "sessions": max(-(-_REQUESTS // max(turns, 1)), _EACH * users),
        "turns": {"kind": "fixed", "value": turns},
        "first_tokens": {**first, "mean": own},
        "output_tokens": answer,
        "think_s": _seconds("--think", think),
    }
    if shared:
        section |= {"system_prompts": 1, "system_tokens": {"kind": "fixed", "value": shared}}
    if turns == 1:
        if growth is not None or tool_share:
            raise UserError("--growth, --tool-share: of the turns after the first; say how many there are with --turns")
        return section
    if growth is None:
        raise UserError("--turns: say how much longer each further prompt is too, such as --growth 500")
    grown = _mean("--growth", growth)
    if (message := grown["mean"] - answer["mean"]) < 1:
        raise UserError(
            f"--growth: {grown['mean']} tokens; a further prompt is longer by the answer before it, "
            f"{answer['mean']} tokens, and a message, so more than that is expected"
        )
    section["user_tokens"] = {**grown, "mean": message}
    if tool_share:
        section |= {"tool_share": tool_share, "tool_s": _seconds("--tool-time", tool_time)}
    return section


def _mean(option: str, value: Text) -> dict[str, Any]:
    """A distribution of lengths around a mean."""
    found = _LENGTH.fullmatch(str(value).strip())
    if found is None or int(found[1]) < 1:
        raise UserError(f"{option}: {value!r}: tokens are expected, such as 6000, or 6000:0.8 with their spread")
    spread = {} if found[2] is None else {"cv": float(found[2]) / (100 if found[3] else 1)}
    return {"kind": "mean", "mean": int(found[1]), **spread}


def _seconds(option: str, value: Text) -> float:
    found = _TIME.fullmatch(str(value).strip())
    if found is None:
        raise UserError(f"{option}: {value!r}: a time is expected, such as 30s, 500ms or 2min")
    return float(found[1]) * _SECONDS[found[2]]


def longest_request(section: dict[str, Any]) -> tuple[int, str]:
    """Return the tokens of the longest request of a users' section, prompt and answer together, and a note on it."""
    workload = Scenario.model_validate({"workload": section}).build_workload()
    tokens = [request.prompt_tokens + request.output_tokens for request in workload]
    said = (
        f"the longest of {len(tokens):,} requests drawn has {max(tokens):,} tokens, their mean {np.mean(tokens):,.0f}"
    )
    return max(tokens), f"{said}; --prompt and --output take the spread of lengths, as in --prompt 6000:0.2"
