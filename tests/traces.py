"""The shared traces, if they are present, and the manifest of the malformed ones."""

import json

import pytest
from hypothesis import strategies as st

from tests import paths
from workloads import WorkloadError

SHARED = paths.SHARED / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/traces, which is not here")


def message_of(fault):
    """The one line that a WorkloadError says."""
    return one_line(str(fault.value))


def one_line(message):
    """Return the message, which must be one line."""
    assert len(message.splitlines()) == 1
    return message


def manifest(schema):
    """Entries of the manifest for the malformed and unusual files of a schema."""
    path = SHARED / "bad" / "manifest.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else []
    return {entry["file"]: entry for entry in entries if entry["schema"] == schema}


def lines(*rows, end="\n"):
    """Rows of text as a file's bytes."""
    return "".join(f"{row}{end}" for row in rows).encode()


def outcome(reader, path, **options):
    """The requests of a file, read twice, and the message where there are none; a message is one line."""
    try:
        trace = reader(path, **options)
        requests = list(trace)
    except WorkloadError as e:
        return [], one_line(str(e))
    assert trace.n_requests == len(requests)
    assert list(trace) == requests
    assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in requests)
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    return requests, ""


def mangled(*files):
    """Bytes of one of these files with some replaced at several places, or any bytes at all."""
    cuts = st.lists(
        st.tuples(
            st.integers(0, 600),
            st.integers(0, 3),
            st.binary(max_size=3)
            | st.sampled_from([b'"', b"\r", b"\n", b",", b"9", b"-", b"{", b"\0", b"1e999", b"[]"]),
        ),
        max_size=4,
    )

    def mangle(content, places):
        for at, n, new in places:
            content = content[:at] + new + content[at + n :]
        return content

    return st.builds(mangle, st.sampled_from(files), cuts) | st.binary(max_size=100)
