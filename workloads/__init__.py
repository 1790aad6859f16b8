"""Request streams: generated ones, and readers of public traces.

Knows neither the server nor the cache; imports neither ``kvsim`` nor ``real_engine``.
"""

from workloads.azure import AzureTrace
from workloads.gaps import Draw, Gaps, empirical_gaps, gamma_gaps, no_gaps, poisson_gaps, weibull_gaps
from workloads.joint import GivenPrompt
from workloads.lengths import Empirical, Fixed, Gamma, Lengths, Lognormal, Zipf
from workloads.mix import Mix, part_seed
from workloads.modulated import diurnal_gaps, modulated_gaps
from workloads.mooncake import MooncakeTrace
from workloads.request import Request, Segment, Workload, WorkloadError, answer_of
from workloads.sessions import MAX_TURNS, Sessions, Tools
from workloads.streams import stream
from workloads.synthetic import Synthetic
from workloads.traces import Trace

__all__ = [
    "MAX_TURNS",
    "AzureTrace",
    "Draw",
    "Empirical",
    "Fixed",
    "Gamma",
    "Gaps",
    "GivenPrompt",
    "Lengths",
    "Lognormal",
    "Mix",
    "MooncakeTrace",
    "Request",
    "Segment",
    "Sessions",
    "Synthetic",
    "Tools",
    "Trace",
    "Workload",
    "WorkloadError",
    "Zipf",
    "answer_of",
    "diurnal_gaps",
    "empirical_gaps",
    "gamma_gaps",
    "modulated_gaps",
    "no_gaps",
    "part_seed",
    "poisson_gaps",
    "stream",
    "weibull_gaps",
]
