"""What every reader owes whatever it is given: it reads a file, or refuses it in one line that names the file."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces import check_verdict, mangled, manifest, needs_shared, outcome
from tests.workloads.fuzz.readers import NAMED, OBJECTS, OBSERVED, RECORDED, TABLE
from tests.workloads.traces import test_azure, test_burstgpt, test_ragpulse, test_weka
from tests.workloads.traces.test_ragpulse import row as rag_row
from tests.workloads.traces.test_weka import agent, call, session_line
from workloads import KINDS, TableTrace

AGENTS = (session_line(*test_weka.TURNS), session_line(call(), agent(5, call())))
READERS = {
    "azure": (KINDS["azure"], {}, tuple(test_azure.WAYS_TO_WRITE_IT.values())),
    "burstgpt": (KINDS["burstgpt"], {"failed": "drop"}, tuple(test_burstgpt.WAYS_TO_WRITE_IT.values())),
    "ragpulse": (
        KINDS["ragpulse"],
        {"clock_reset": "continue"},
        (test_ragpulse.lines(*test_ragpulse.ROWS), test_ragpulse.lines(rag_row("9"), rag_row("1"))),
    ),
    "weka": (KINDS["weka"], {}, (test_weka.lines(*AGENTS),)),
    "recorded": (KINDS["recorded"], {}, (RECORDED,)),
    "observed": (KINDS["observed"], {}, (OBSERVED,)),
    "table in CSV": (TableTrace, {"format": "csv", "columns": NAMED}, (TABLE, OBJECTS)),
    "table in JSONL": (TableTrace, {"format": "jsonl", "columns": NAMED}, (TABLE, OBJECTS)),
}
"""Of each reader options and good files; Mooncake has more to keep, and a test of its own."""


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_read_or_refused(tmp_path_factory, name):
    reader, options, good = READERS[name]
    path = tmp_path_factory.getbasetemp() / "any-trace"

    @settings(deadline=None)
    @given(content=mangled(*good), strict=st.booleans(), skips=st.booleans())
    def check(content, strict, skips):
        path.write_bytes(content)
        more = {} if strict else {**options, "keep": 0.5}
        more |= {key: options[key] for key in ("format", "columns") if key in options}
        requests, message = outcome(reader, path, skip_bad_rows=skips, **more)
        assert requests or message.startswith(f"{path}: ")

    check()


SCHEMAS = {"azure": "azure", "burstgpt1": "burstgpt", "burstgpt3": "burstgpt"} | {
    kind: kind for kind in ("mooncake", "ragpulse")
}
ENTRIES = {name: (SCHEMAS[schema], entry) for schema in SCHEMAS for name, entry in manifest(schema).items()}


@needs_shared
@pytest.mark.parametrize(("kind", "entry"), ENTRIES.values(), ids=ENTRIES)
def test_the_shared_files_are_judged_as_their_manifest_says(kind, entry):
    check_verdict(KINDS[kind], entry)
