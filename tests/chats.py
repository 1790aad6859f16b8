"""Chats that come and go in few slots, so that llama-server copies what they said to the host and back."""

from typing import Any

from kvsim.scenario.scenario import Scenario, load_scenario


def chats(**changes: Any) -> Scenario:
    """Six users in two slots, who all begin with the same 40 tokens; the host is slow."""

    def tokens(most: int) -> dict[str, Any]:
        return {"kind": "lognormal", "mu": 3.0, "sigma": 0.5, "min": 4, "max": most}

    table = {
        "name": "chats",
        "seed": 1,
        "workload": {
            "kind": "sessions",
            "sessions": 6,
            "rate": 20.0,
            "turns": {"kind": "fixed", "value": 6},
            "user_tokens": tokens(60),
            "output_tokens": tokens(60),
            "system_tokens": {"kind": "fixed", "value": 40},
            "think_s": 0.02,
        },
        "server": {"scheduler": "llama-server", "slots": 2, "slot_context": 1024},
        "cache": {"cells": 2048, "unified": True, "policy": "contiguous"},
        "machine": {"host_gb_s": 0.05},
    }
    return load_scenario(table, **changes)
