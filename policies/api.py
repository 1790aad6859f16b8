"""What a policy of one's own may import from ``policies``; everything else may change at any time.

``API_VERSION`` rises when a name here goes, or one of its signatures, fields or meanings changes. What is only added,
with a default, leaves it as it is.
"""

from typing import Any

from policies.cells.reads import reads_of
from policies.content import NOTHING, Content, Key
from policies.paging.free_lists.ranked import EvictionRank
from policies.placement.rule import GroupReads, PassReads, PlacementRule, Row
from policies.policy import CacheConfig, Kernel, Policy
from policies.vocabulary import (
    NO_MOVES,
    NO_SHIFT,
    CellMap,
    Checkpoint,
    Chunk,
    Exported,
    Group,
    HostCopy,
    IntArray,
    MicroBatch,
    Moves,
    OutOfCells,
    Place,
    Reads,
    SequencePlan,
    Shift,
    Transfer,
    Unsupported,
    Usage,
    View,
    split_batch,
)

API_VERSION = 2
"""The version of this interface."""
_RENAMED = {"NoSlot": "OutOfCells"}
"""Names of earlier versions, and what they are called now."""


def __getattr__(name: str) -> Any:
    """Raise ``ImportError`` for a name of an earlier version, and say what it is called now."""
    if name in _RENAMED:
        raise ImportError(f"policies.api: {name} is called {_RENAMED[name]} since API_VERSION {API_VERSION}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "API_VERSION",
    "NOTHING",
    "NO_MOVES",
    "NO_SHIFT",
    "CacheConfig",
    "CellMap",
    "Checkpoint",
    "Chunk",
    "Content",
    "EvictionRank",
    "Exported",
    "Group",
    "GroupReads",
    "HostCopy",
    "IntArray",
    "Kernel",
    "Key",
    "MicroBatch",
    "Moves",
    "OutOfCells",
    "PassReads",
    "Place",
    "PlacementRule",
    "Policy",
    "Reads",
    "Row",
    "SequencePlan",
    "Shift",
    "Transfer",
    "Unsupported",
    "Usage",
    "View",
    "reads_of",
    "split_batch",
]
