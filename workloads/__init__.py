"""Request streams: generated ones, and readers of public traces.

Knows neither the server nor the cache; imports neither ``kvsim`` nor ``real_engine``.
"""

from workloads.azure import AzureTrace
from workloads.burstgpt import BurstGptTrace
from workloads.cells import Columns
from workloads.kinds import KINDS, open_trace, sniff
from workloads.lengths import Fixed, Lengths, Lognormal
from workloads.mooncake import MooncakeTrace
from workloads.ragpulse import RagPulseTrace
from workloads.request import BadRowError, Request, Segment, Workload, WorkloadError, answer_of
from workloads.sessions import MAX_TURNS, Sessions
from workloads.streams import stream
from workloads.synthetic import Gaps, Synthetic, gamma_gaps, no_gaps, poisson_gaps
from workloads.table import TableTrace
from workloads.traces import Trace
from workloads.weka import WekaTrace

__all__ = [
    "KINDS",
    "MAX_TURNS",
    "AzureTrace",
    "BadRowError",
    "BurstGptTrace",
    "Columns",
    "Fixed",
    "Gaps",
    "Lengths",
    "Lognormal",
    "MooncakeTrace",
    "RagPulseTrace",
    "Request",
    "Segment",
    "Sessions",
    "Synthetic",
    "TableTrace",
    "Trace",
    "WekaTrace",
    "Workload",
    "WorkloadError",
    "answer_of",
    "gamma_gaps",
    "no_gaps",
    "open_trace",
    "poisson_gaps",
    "sniff",
    "stream",
]
