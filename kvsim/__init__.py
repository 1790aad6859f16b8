"""Which KV-cache allocation policy, with which settings, will serve my traffic on my machine, and why?

The public interface: the same verbs as the command line, returning results backed by pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.comparison import Comparison, compare
from kvsim.costs import Profile, load_profile
from kvsim.errors import Livelock, UserError
from kvsim.metrics import Result
from kvsim.prefix_cache import PrefixStudy, prefix_cache
from kvsim.scenario import Scenario, builtin_names, load
from kvsim.simulation import run

if TYPE_CHECKING:
    from kvsim.calibration import calibrate
    from kvsim.validation import Validation, validate

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Livelock",
    "PrefixStudy",
    "Profile",
    "Result",
    "Scenario",
    "UserError",
    "Validation",
    "builtin_names",
    "calibrate",
    "compare",
    "load",
    "load_profile",
    "prefix_cache",
    "run",
    "validate",
]

_FACES = {"calibrate": "kvsim.calibration", "validate": "kvsim.validation", "Validation": "kvsim.validation"}


def __getattr__(name: str) -> Any:
    """The faces that drive the real engine are imported when first asked for: the core does not need it."""
    if name not in _FACES:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_FACES[name])
    return getattr(module, name)
