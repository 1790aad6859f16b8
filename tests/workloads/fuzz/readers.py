"""Readers of traces in groups, a good file for each, and what each owes whatever bytes it is given.

A reader must read a file or refuse it in one line that names the file, and give the same when it is read again.
"""

import bz2
import gzip
import lzma
from itertools import islice, pairwise

import workloads
from workloads import WorkloadError

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,396,109\n"
BURST = (
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,,1.5,A,472,18,490,Chat\n45.5,,1,B,0,0,0,Chat\n"
)
MOONCAKE = b'{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [5, 6]}\n'
RAGPULSE = (
    b'{"timestamp": "82", "input_length": 12, "output_length": 9, "hash_ids": {"sys_prompt": [1], "passages_ids": [],'
    b' "history": [], "web_search": [], "user_input": [2]}}\n'
)
WEKA = (
    b'{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "type": "n", "in": 70, "out": 3,'
    b' "hash_ids": [1], "api_time": 1.5}, {"t": 2.5, "type": "subagent", "requests": [{"t": 0, "in": 9, "out": 1,'
    b' "hash_ids": []}]}, {"t": 9, "in": 130, "out": 1, "hash_ids": [1, 2], "think_time": 1}]}\n'
)
RECORDED = (
    b'{"kind": "meta", "engine": "vllm", "requests": 1}\n{"kind": "request", "arrival_s": 0.5, "prompt": [["p", 0, 9]],'
    b' "output_tokens": 3}\n{"kind": "second", "t": 1.0}\n'
)
OBSERVED = (
    b'{"kind": "observed", "version": 1, "started": "2026-11-23T05:49:13.123Z", "block_bytes": 8, "block_tokens": 2}\n'
    b'{"kind": "request", "arrival_s": 0.5, "last_s": 2.5, "status": 200, "end": "completed", "prompt_tokens": 5,'
    b' "output_tokens": 3, "counted": "server", "unit": "bytes", "prompt_units": 18, "blocks": ["000000000000000a",'
    b' "000000000000000b"], "answer_units": 9, "answer_blocks": ["000000000000000c"]}\n'
    b'{"kind": "request", "arrival_s": 3, "last_s": 4, "status": 200, "end": "cancelled", "prompt_tokens": 9,'
    b' "output_tokens": 1, "counted": "estimate", "unit": "bytes", "prompt_units": 33, "blocks": ["000000000000000a",'
    b' "000000000000000b", "000000000000000c", "000000000000000d"], "answer_units": 0, "answer_blocks": []}\n'
)
TABLE = b"arrival,prompt,output,who,rank\n0.5,3,4,a,0\n0.75,3,4,a,-1\n1,3,4,,0\n"
OBJECTS = b'{"arrival": 0.5, "prompt": 3, "output": 4, "who": "a", "rank": 0}\n'
NAMED = workloads.Columns(session="who", priority="rank")
SKIPS, THINS = 64, 128
"""Bits of an input's first byte: bad rows are skipped, half of the requests are dropped."""


def parquet():
    """Bytes of a small table; none where pyarrow is missing."""
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ImportError:
        return b""
    sink = pa.BufferOutputStream()
    rows = {"arrival": [0.5, 1.5], "prompt": [3, 4], "output": [5, 6], "who": ["a", "a"], "rank": [0, 1]}
    pq.write_table(pa.table(rows), sink)
    return sink.getvalue().to_pybytes()


GROUPS = {
    "csv": (
        (workloads.AzureTrace, {}, AZURE),
        (workloads.BurstGptTrace, {"failed": "drop"}, BURST),
        (workloads.TableTrace, {"format": "csv", "columns": NAMED}, TABLE),
        (workloads.TableTrace, {"format": "csv", "time": "datetime", "delimiter": ";"}, TABLE.replace(b",", b";")),
    ),
    "jsonl": (
        (workloads.MooncakeTrace, {}, MOONCAKE),
        (workloads.RagPulseTrace, {"clock_reset": "continue"}, RAGPULSE),
        (workloads.WekaTrace, {}, WEKA),
        (workloads.RecordedTrace, {}, RECORDED),
        (workloads.ObservedTrace, {}, OBSERVED),
        (workloads.ObservedTrace, {"sessions": False}, OBSERVED),
        (workloads.TableTrace, {"format": "jsonl", "columns": NAMED}, OBJECTS),
    ),
    "packed": (
        (workloads.open_trace, {}, gzip.compress(AZURE, mtime=0)),
        (workloads.open_trace, {}, bz2.compress(MOONCAKE)),
        (workloads.open_trace, {}, lzma.compress(RAGPULSE)),
        (workloads.open_trace, {}, BURST),
    ),
    "parquet": ((workloads.TableTrace, {"format": "parquet", "columns": NAMED}, parquet()),),
}


def seeds(readers):
    """A good input for each reader, with bad rows refused and with bad rows skipped."""
    for number, (_, _, content) in enumerate(readers):
        for skips in (0, SKIPS):
            yield bytes([number + skips]) + content


def feeder(path, readers):
    """A function that gives an input to a reader: the first byte chooses reader and options, the others are the file.

    It raises where the reader neither reads nor refuses in one line.
    """

    def feed(data):
        choice = data[0] if data else 0
        reader, options, _ = readers[choice % len(readers)]
        path.write_bytes(data[1:])
        try:
            trace = reader(path, skip_bad_rows=bool(choice & SKIPS), keep=0.5 if choice & THINS else 1.0, **options)
            requests = list(islice(trace, 1000))
        except WorkloadError as e:
            if len(str(e).splitlines()) != 1 or not str(e).startswith(f"{path}: "):
                raise AssertionError(f"not one line that names the file: {e}") from e
            return
        if requests != list(islice(trace, 1000)):
            raise AssertionError("read again, it gives other requests")
        if len(requests) != min(1000, trace.n_requests):
            raise AssertionError(f"{len(requests)} requests, {trace.n_requests} were promised")
        for before, after in pairwise(requests):
            if before.arrival_s > after.arrival_s or after.prompt_tokens < 1 or after.output_tokens < 1:
                raise AssertionError(f"{before}, then {after}")

    return feed
