"""What commands answer, well or not, and a scenario with little room that several tests run."""

import re
import sys
from pathlib import Path

PROGRAM = Path(sys.executable).parent / "kvsim"
PROGRESS = re.compile(r"(?!kvsim: |warning: ).*: .* after \d+ s")


def complaints(finished):
    """What a command said beside its output, but for how far it was: a busy machine takes long enough to be told."""
    return [line for line in finished.stderr.splitlines() if not PROGRESS.fullmatch(line)]


def succeeded(finished, warned=False):
    """What a command printed that went well; and that it had nothing to complain of, or warnings only."""
    assert finished.returncode == 0
    assert bool(complaints(finished)) is warned
    assert all(line.startswith("warning: ") for line in complaints(finished))
    return finished.stdout


def complaint(finished):
    """The one line that answers a mistake."""
    assert finished.returncode == 2
    assert finished.stdout == ""
    (line,) = complaints(finished)
    assert line.startswith("kvsim: ")
    return line.removeprefix("kvsim: ")


TIGHT = """
name = "tight"
[workload]
kind = "sessions"
sessions = 8
rate = 100.0
think_s = 0.2
max_context = 480
user_tokens = {kind = "fixed", value = 20}
output_tokens = {kind = "fixed", value = 40}
[server]
scheduler = "vllm"
slots = 4
n_batch = 256
preemption = "swap"
prefetch = "on-resume"
reserve_full = false
[cache]
policy = "paged"
cells = 640
host_cells = 8192
"""
