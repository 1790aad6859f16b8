"""What is served on a device, and the names of the profiles that are made for it rather than read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from pydantic import TypeAdapter

from kvsim.costs.memory_settings import Engine
from kvsim.errors import UserError
from kvsim.model.engine_shapes import Storage

ESTIMATE = "estimate:"
"""How the names of estimated profiles begin."""

ADAPTED = re.compile(r"([^?]+)\?k=(\w+)&v=(\w+)")
"""Names of profiles that are adapted to other types of K and V: another name, and these."""

_ENGINE: TypeAdapter[Engine] = TypeAdapter(Engine)
_STORAGE: TypeAdapter[Storage] = TypeAdapter(Storage)


@dataclass(frozen=True)
class Served:
    """A model on a device, and how it is served."""

    engine: Engine
    device: str
    """A device's name, or a file."""
    model: str
    tp: int = 1
    weights: str | None = None
    """None: the model's own type."""
    type_k: Storage = "f16"
    type_v: Storage = "f16"
    n_gpu_layers: int | None = None
    """llama.cpp: layers on the device, the head counting as one (``-ngl``); None: all."""
    n_cpu_moe: int = 0
    """llama.cpp: layers whose experts the CPU keeps (``--n-cpu-moe``)."""
    cpu_gb_s: float | None = None
    """Bandwidth of the computer's memory, 10**9 bytes/s; None: the device's usual."""
    flash_attn: bool = True
    """llama.cpp: flash attention (``--flash-attn``)."""
    ep: int = 1
    """vLLM: servers that divide the experts, of which this is one (``--enable-expert-parallel``)."""

    @property
    def estimate(self) -> str:
        """What ``load_profile`` takes to estimate its times: a name that says all that they are made of."""
        asked = {"engine": self.engine, "device": self.device, "model": self.model, "tp": self.tp}
        asked |= {"weights": self.weights or "", "k": self.type_k, "v": self.type_v}
        asked |= {"ngl": "" if self.n_gpu_layers is None else str(self.n_gpu_layers), "ncmoe": self.n_cpu_moe}
        asked |= {"cpu": self.cpu_gb_s, "fa": "" if self.flash_attn else "off"}
        asked |= {"ep": self.ep if self.ep > 1 else ""}
        return ESTIMATE + urlencode({key: value for key, value in asked.items() if value}, safe="/:")

    @property
    def only_llamacpp(self) -> str | None:
        """The option that only llama.cpp has and that is set; None if there is none."""
        asked = {
            "--ngl": self.n_gpu_layers is not None,
            "--n-cpu-moe": self.n_cpu_moe > 0,
            "--cpu-gb-s": self.cpu_gb_s is not None,
            "--no-flash-attn": not self.flash_attn,
        }
        return next((option for option, given in asked.items() if given), None)

    @staticmethod
    def named(name: str) -> Served:
        """What the name of an estimate says. Raises ``UserError``."""
        said = dict(parse_qsl(name.removeprefix(ESTIMATE)))
        try:
            engine = _ENGINE.validate_python(said["engine"])
            type_k, type_v = (_STORAGE.validate_python(said.get(key, "f16")) for key in ("k", "v"))
            tp, weights = int(said.get("tp", 1)), said.get("weights")
            placed = (int(said["ngl"]) if "ngl" in said else None, int(said.get("ncmoe", 0)))
            cpu_gb_s = float(said["cpu"]) if "cpu" in said else None
            on = (engine, said["device"], said["model"], tp, weights, type_k, type_v)
            return Served(*on, *placed, cpu_gb_s, said.get("fa") != "off", int(said.get("ep", 1)))
        except (KeyError, ValueError):
            known = Served("vllm", "h100_sxm", "qwen3-32b").estimate
            raise UserError(f"{name:.200}: not the name of an estimate, such as {known}") from None
