"""Request streams: generated ones, and readers of public traces.

Knows neither the server nor the cache; imports neither ``kvsim`` nor ``real_engine``.
"""

from workloads.azure import AzureTrace
from workloads.lengths import Fixed, Lengths, Lognormal
from workloads.mooncake import MooncakeTrace
from workloads.request import Request, Segment, Workload, WorkloadError, answer_of
from workloads.sessions import MAX_TURNS, Sessions
from workloads.streams import stream
from workloads.synthetic import Gaps, Synthetic, gamma_gaps, no_gaps, poisson_gaps
from workloads.traces import Trace

__all__ = [
    "MAX_TURNS",
    "AzureTrace",
    "Fixed",
    "Gaps",
    "Lengths",
    "Lognormal",
    "MooncakeTrace",
    "Request",
    "Segment",
    "Sessions",
    "Synthetic",
    "Trace",
    "Workload",
    "WorkloadError",
    "answer_of",
    "gamma_gaps",
    "no_gaps",
    "poisson_gaps",
    "stream",
]
