"""Workloads: requests that are generated, or read from traces.

This package knows neither the server nor the cache, and imports neither ``kvsim`` nor ``real_engine``.
"""

from workloads.generators.gaps import Draw, Gaps, empirical_gaps, gamma_gaps, no_gaps, poisson_gaps, weibull_gaps
from workloads.generators.joint import GivenPrompt
from workloads.generators.lengths import Empirical, Fixed, Gamma, Lengths, Lognormal, Zipf
from workloads.generators.mix import Mix, part_seed
from workloads.generators.modulated import diurnal_gaps, modulated_gaps
from workloads.generators.sessions import MAX_TURNS, Sessions, Tools
from workloads.generators.synthetic import Synthetic
from workloads.request import BadRowError, Request, Segment, Workload, WorkloadError, answer_of
from workloads.rng import named_rng
from workloads.traces.azure import AzureTrace
from workloads.traces.burstgpt import BurstGptTrace
from workloads.traces.kinds import KINDS, open_trace, sniff
from workloads.traces.mooncake import MooncakeTrace
from workloads.traces.ragpulse import RagPulseTrace
from workloads.traces.table import TableTrace
from workloads.traces.table_row import Columns
from workloads.traces.trace import Trace
from workloads.traces.weka import WekaTrace

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
    "named_rng",
    "no_gaps",
    "open_trace",
    "part_seed",
    "poisson_gaps",
    "sniff",
    "weibull_gaps",
]
