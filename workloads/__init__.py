"""Request streams: generated ones, and readers of public traces.

Knows neither the server nor the cache; imports neither ``kvsim`` nor ``real_engine``.
"""

from workloads.azure import AzureTrace
from workloads.lengths import Fixed, Lengths, Lognormal
from workloads.request import Request, Workload, WorkloadError
from workloads.streams import stream
from workloads.synthetic import Gaps, Synthetic, gamma_gaps, no_gaps, poisson_gaps

__all__ = [
    "AzureTrace",
    "Fixed",
    "Gaps",
    "Lengths",
    "Lognormal",
    "Request",
    "Synthetic",
    "Workload",
    "WorkloadError",
    "gamma_gaps",
    "no_gaps",
    "poisson_gaps",
    "stream",
]
