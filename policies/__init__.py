"""KV-cache allocation policies: where each token's K and V live, and what must move.

Knows no clock, no bytes and no model; imports neither ``kvsim`` nor ``real_engine``. What a policy of one's own may
import is in ``policies.api``.
"""

from policies import compiled  # noqa: F401  (first: it decides whether compiled modules are used)
from policies.cells.region_search import SearchName
from policies.content import NOTHING, Content
from policies.paging.eviction import EVICTIONS, Eviction, FreeOrder
from policies.plugins import (
    available,
    engine_of,
    fault_in_plugin,
    in_group,
    load_plugin,
    origins,
    why_left_out,
)
from policies.policy import AdmissionRuleName, CacheConfig, Kernel, Policy, PolicyFactory
from policies.presets import GROUPS, Preset, PresetGroup, current_name
from policies.registry import PluginError, PluginWarning
from policies.vocabulary import (
    NO_MOVES,
    NO_SHIFT,
    CellMap,
    Checkpoint,
    Chunk,
    Exported,
    Group,
    HostCopy,
    MicroBatch,
    Moves,
    OutOfCells,
    Place,
    Reads,
    RelativeCosts,
    SequencePlan,
    Shift,
    Transfer,
    Unsupported,
    Usage,
    View,
)

__all__ = [
    "EVICTIONS",
    "GROUPS",
    "NOTHING",
    "NO_MOVES",
    "NO_SHIFT",
    "AdmissionRuleName",
    "CacheConfig",
    "CellMap",
    "Checkpoint",
    "Chunk",
    "Content",
    "Eviction",
    "Exported",
    "FreeOrder",
    "Group",
    "HostCopy",
    "Kernel",
    "MicroBatch",
    "Moves",
    "OutOfCells",
    "Place",
    "PluginError",
    "PluginWarning",
    "Policy",
    "PolicyFactory",
    "Preset",
    "PresetGroup",
    "Reads",
    "RelativeCosts",
    "SearchName",
    "SequencePlan",
    "Shift",
    "Transfer",
    "Unsupported",
    "Usage",
    "View",
    "available",
    "current_name",
    "engine_of",
    "fault_in_plugin",
    "in_group",
    "load_plugin",
    "origins",
    "why_left_out",
]
