"""Coverage-led fuzzing of the trace readers: each must read a file or refuse it in one line.

    python -m tests.workloads.fuzz.fuzz_readers csv --seconds 60 [--corpus FOLDER]

Needs atheris (the extra ``fuzz``). Ends with another exit code than 0, and leaves the bytes in ``crash-...``, where a
reader fails in another way, takes too long, or takes too much memory. ``make fuzz`` runs all groups. What is found
belongs in a test with fixed bytes: ``FOUND`` in ``test_corpus.py``, or the test file of the reader.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["workloads"]):
    from tests.workloads.fuzz.readers import GROUPS, feeder, seeds


def main():
    """Run until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", help="Folder for interesting bytes; by default none is kept.")
    given = parser.parse_args()
    readers = GROUPS[given.group]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(given.corpus or f"{folder}/corpus")
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds(readers)):
            (corpus / f"seed-{number}").write_bytes(seed)
        limits = [f"-max_total_time={given.seconds}", "-timeout=20", "-rss_limit_mb=1024", "-max_len=4096"]
        atheris.Setup(
            [sys.argv[0], *limits, f"-artifact_prefix={Path.cwd()}/", str(corpus)],
            feeder(Path(folder) / "trace", readers),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
