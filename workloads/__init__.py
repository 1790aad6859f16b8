"""Request streams: generated ones, and readers of public traces.

Knows neither the server nor the cache; imports neither ``kvsim`` nor ``real_engine``.
"""

from workloads.azure import AzureTrace
from workloads.burstgpt import BurstGptTrace
from workloads.cells import Columns
from workloads.gaps import Draw, Gaps, empirical_gaps, gamma_gaps, no_gaps, poisson_gaps, weibull_gaps
from workloads.joint import GivenPrompt
from workloads.kinds import KINDS, open_trace, sniff
from workloads.lengths import Empirical, Fixed, Gamma, Lengths, Lognormal, Zipf
from workloads.mix import Mix, part_seed
from workloads.modulated import diurnal_gaps, modulated_gaps
from workloads.mooncake import MooncakeTrace
from workloads.ragpulse import RagPulseTrace
from workloads.request import BadRowError, Request, Segment, Workload, WorkloadError, answer_of
from workloads.sessions import MAX_TURNS, Sessions, Tools
from workloads.streams import stream
from workloads.synthetic import Synthetic
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
    "RagPulseTrace",
    "Request",
    "Segment",
    "Sessions",
    "Synthetic",
    "TableTrace",
    "Tools",
    "Trace",
    "WekaTrace",
    "Workload",
    "WorkloadError",
    "Zipf",
    "answer_of",
    "diurnal_gaps",
    "empirical_gaps",
    "gamma_gaps",
    "modulated_gaps",
    "no_gaps",
    "open_trace",
    "part_seed",
    "poisson_gaps",
    "sniff",
    "stream",
    "weibull_gaps",
]
