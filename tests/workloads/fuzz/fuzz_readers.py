"""Feeds the readers of traces with bytes, led by coverage: each must read a file or refuse it in one line.

    python -m tests.workloads.fuzz.fuzz_readers csv --seconds 60 [--corpus FOLDER]

Needs atheris (the extra ``fuzz``). Ends with another exit code than 0, and leaves the bytes in ``crash-...``, where a
reader fails in another way, takes too long, or takes too much memory.
"""

import argparse
import bz2
import gzip
import lzma
import sys
import tempfile
from itertools import islice, pairwise
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["workloads"]):
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
TABLE = b"arrival,prompt,output,who,rank\n0.5,3,4,a,0\n0.75,3,4,a,-1\n1,3,4,,0\n"
OBJECTS = b'{"arrival": 0.5, "prompt": 3, "output": 4, "who": "a", "rank": 0}\n'
NAMED = workloads.Columns(session="who", priority="rank")


def parquet():
    """A small table; nothing where pyarrow is missing."""
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
        (workloads.TableTrace, {"format": "jsonl", "columns": NAMED}, OBJECTS),
    ),
    "packed": (
        (workloads.open_trace, {}, gzip.compress(AZURE)),
        (workloads.open_trace, {}, bz2.compress(MOONCAKE)),
        (workloads.open_trace, {}, lzma.compress(RAGPULSE)),
        (workloads.open_trace, {}, BURST),
    ),
    "parquet": ((workloads.TableTrace, {"format": "parquet", "columns": NAMED}, parquet()),),
}


def feeder(path, readers):
    """The first byte chooses the reader and whether bad rows are skipped, the others are the file."""

    def feed(data):
        choice = data[0] if data else 0
        reader, options, _ = readers[choice % len(readers)]
        path.write_bytes(data[1:])
        try:
            trace = reader(path, skip_bad_rows=bool(choice & 64), keep=0.5 if choice & 128 else 1.0, **options)
            requests = list(islice(trace, 1000))
        except WorkloadError as e:
            if len(str(e).splitlines()) != 1:
                raise AssertionError(f"not one line: {e}") from e
            return
        if len(requests) != min(1000, trace.n_requests):
            raise AssertionError(f"{len(requests)} requests, {trace.n_requests} were promised")
        for before, after in pairwise(requests):
            if before.arrival_s > after.arrival_s or after.prompt_tokens < 1 or after.output_tokens < 1:
                raise AssertionError(f"{before}, then {after}")

    return feed


def main():
    """Runs until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", help="Where interesting bytes are kept; by default nowhere.")
    given = parser.parse_args()
    readers = GROUPS[given.group]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(given.corpus or f"{folder}/corpus")
        corpus.mkdir(parents=True, exist_ok=True)
        for number, (_, _, seed) in enumerate(readers):
            for skips in (0, 64):
                (corpus / f"seed-{number}-{skips}").write_bytes(bytes([number + skips]) + seed)
        limits = [f"-max_total_time={given.seconds}", "-timeout=20", "-rss_limit_mb=1024", "-max_len=4096"]
        atheris.Setup(
            [sys.argv[0], *limits, f"-artifact_prefix={Path.cwd()}/", str(corpus)],
            feeder(Path(folder) / "trace", readers),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
