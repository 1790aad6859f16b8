"""Where the shared traces are, if they are here, and what their manifest says of the malformed ones."""

import json
from pathlib import Path

import pytest

from workloads import WorkloadError

SHARED = Path(__file__).parent.parent.parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/traces, which is not here")


def message_of(fault):
    """The one line that a WorkloadError says."""
    message = str(fault.value)
    assert len(message.splitlines()) == 1
    return message


def manifest(schema):
    """The malformed and the odd files in a schema, as their manifest describes them."""
    path = SHARED / "bad" / "manifest.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else []
    return {entry["file"]: entry for entry in entries if entry["schema"] == schema}


def check_verdict(reader, entry):
    """A reader judges a file as its manifest entry says."""
    path = SHARED / "bad" / entry["file"]
    if entry["strict_verdict"] == "accept":
        assert len(list(reader(path))) == entry["expected_rows_if_accepted"]
        return
    with pytest.raises(WorkloadError) as fault:
        reader(path)
    where = f"{path}: " if entry["bad_row"] is None else f"{path}: row {entry['bad_row']}: "
    assert message_of(fault).startswith(where)
