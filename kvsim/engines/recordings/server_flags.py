"""The scenario of a recorded llama-server: what its flags say, and what it said of itself."""

from __future__ import annotations

from kvsim.advice.memory.command_line import engine_flags, llamacpp_keys
from kvsim.engines.recordings.recording_files import Record
from kvsim.model.recorded_names import model_of_file
from kvsim.scenario.scenario import Scenario, load_scenario


def scenario_of(header: Record) -> tuple[Scenario, bool]:
    """The scenario of a recording, and whether its model is known, so that bytes can be compared.

    The header's ``model`` may have the ``window`` of some layers, or the bytes of a sequence's state (``state_bytes``),
    of which a log has the sum of all.
    Flags that decide nothing (threads, say) are passed over. Raises ``UserError``.
    """
    flags, _, _ = engine_flags("llamacpp", [str(flag) for flag in header["flags"]])
    keys = {"cache__type_k": "f16", "cache__type_v": "f16", **llamacpp_keys(flags)}
    keys.pop("cache__kernel", None)  # A profile that is fitted to it has the costs of the kernel that ran.
    if "cache__cells" not in keys:
        keys["cache__cells"] = int(header["server"]["n_ctx"])
    told, server = header.get("model", {}), header["server"]
    model = model_of_file(str(told.get("file", "")))
    if "state_bytes" in told:
        keys |= {"cache__policy": "hybrid", "model__state_mib": told["state_bytes"] / 2**20}
    elif "states_mib" in server:
        keys["cache__policy"] = "hybrid"
        if model is None:  # The log rounds it to hundredths.
            keys["model__state_mib"] = server["states_mib"] / server["states"]
    elif "window" in told:
        keys |= {"cache__policy": "sliding-window", "cache__window": told["window"]}
    return load_scenario({"model": {} if model is None else {"name": model}}, **keys), model is not None
