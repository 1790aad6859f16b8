"""What readers of other people's traces may import."""

from workloads.request import Prefixes as Prefixes
from workloads.request import Request as Request
from workloads.request import Segment as Segment
from workloads.request import WorkloadError as WorkloadError
from workloads.traces.bad_rows import FlawError as FlawError
from workloads.traces.columns import ANY as ANY
from workloads.traces.columns import NAME as NAME
from workloads.traces.columns import TOKENS as TOKENS
from workloads.traces.columns import Column as Column
from workloads.traces.columns import Schema as Schema
from workloads.traces.columns import time_in as time_in
from workloads.traces.columns import whole as whole
from workloads.traces.row_trace import Make as Make
from workloads.traces.row_trace import RowTrace as RowTrace
from workloads.traces.trace import Trace as Trace
