"""Which reader suits a file, and every malformed file through the command line."""

import bz2
import gzip
import json

import pytest
from hypothesis import given, settings

from tests.traces import SHARED, lines, mangled, manifest, message_of, needs_shared, outcome
from tests.workloads.traces import (
    test_azure,
    test_burstgpt,
    test_mooncake,
    test_observed,
    test_ragpulse,
    test_recorded,
    test_weka,
)
from tests.worlds import command
from workloads import KINDS, Columns, WorkloadError, open_trace, sniff

GOOD = {
    "azure": test_azure.lines(*test_azure.ROWS),
    "burstgpt": lines(test_burstgpt.OLD, *test_burstgpt.ROWS),
    "mooncake": lines(*test_mooncake.ROWS),
    "ragpulse": lines(*test_ragpulse.ROWS),
    "weka": lines(test_weka.session_line(*test_weka.TURNS)),
    "recorded": lines(*test_recorded.ROWS),
    "observed": lines(*test_observed.ROWS),
    "log": lines("timestamp,prompt_tokens,completion_tokens", "0,40,2", "0.5,30,4"),
    "table": lines("arrival,prompt,output", "0,40,2", "0.5,30,4"),
}


def test_every_kind_is_tried():
    assert set(GOOD) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress], ids=["plain", "gzip", "bzip2"])
def test_a_good_file_is_known_by_its_first_bytes(write, kind, pack):
    path = write(pack(b"\xef\xbb\xbf" + GOOD[kind]))
    assert sniff(path) == kind
    trace = open_trace(str(path), **({"format": "csv"} if kind == "table" else {}))
    assert isinstance(trace, KINDS[kind])
    assert trace.n_requests == len(list(trace)) > 1


SUITS = {
    "new BurstGPT": (lines(test_burstgpt.NEW), "burstgpt"),
    "tabs": (lines(test_burstgpt.OLD.replace(",", "\t")), "burstgpt"),
    "semicolons": (lines(test_azure.HEADER.replace(",", ";")), "azure"),
    "another case": (lines(test_azure.HEADER.lower()), "azure"),
    "a column missing": (lines("TIMESTAMP,ContextTokens"), "azure"),
    "no header": (lines(*test_azure.ROWS), "azure"),
    "blank lines first": (b"\n\n" + GOOD["mooncake"], "mooncake"),
    "cut": (GOOD["mooncake"][:60], "mooncake"),
    "NaN": (b'{"timestamp": 0, "input_length": NaN', "mooncake"),
    "no ids": (b'{"timestamp": 0, "input_length": 3, "output_length": 3}', "mooncake"),
    "an array": (b"[" + GOOD["mooncake"] + b"]", "mooncake"),
    "ids in an object": (b'{"input_length": 3, "hash_ids": {"a": []}}', "ragpulse"),
    "no component": (b'{"timestamp": "0", "input_length": 3, "output_length": 3}', "ragpulse"),
    "a long session": (test_weka.session_line(*[test_weka.call()] * 9000).encode(), "weka"),
    "a list of sessions": (b"[" + GOOD["weka"] + b"]", "weka"),
    "objects": (b'{"arrival": 1, "prompt": 2, "output": 3}', "table"),
    "a recording cut in its first line": (GOOD["recorded"][:30], "recorded"),
    "a cut header of observed traffic": (GOOD["observed"][:40], "observed"),
    "observed traffic without its header": (lines(*test_observed.ROWS[1:]), "observed"),
    "Parquet": (b"PAR1\x15\x04\xff", "table"),
}


@pytest.mark.parametrize(("content", "kind"), SUITS.values(), ids=SUITS)
def test_a_damaged_file_goes_to_the_likeliest_reader(write, content, kind):
    assert sniff(write(content)) == kind


UNKNOWN = {
    "empty": (
        b"",
        "empty file; expected a trace of one of the kinds azure, burstgpt, mooncake, ragpulse, weka, recorded, "
        "observed, log, table",
    ),
    "blank": (b" \n\n", "empty file; expected"),
    "other CSV": (b"name,age\nx,3\n", "begins with 'name,age'; expected a trace of one of the kinds azure, "),
    "a table of one's own": (
        b"TIMESTAMP,x\n1,3\n",
        "begins with 'TIMESTAMP,x'; expected a trace of one of the kinds azure, burstgpt, mooncake, ragpulse, weka, "
        "recorded, observed, log, table; if it is a table of your own, name its columns with --columns "
        "arrival=TIMESTAMP,prompt=NAME,output=NAME (and session, priority, if there); found: TIMESTAMP, x",
    ),
    "objects of one's own": (
        b'{"ts": 1, "in": 3}\n',
        'begins with \'{"ts": 1, "in": 3}\'; expected a trace of one of the kinds azure, burstgpt, mooncake, ragpulse, '
        "weka, recorded, observed, log, table; if it is a table of your own, name its columns with --columns "
        "arrival=ts,prompt=NAME,output=NAME (and session, priority, if there); found: ts, in",
    ),
    "other JSON": (b'{"name": 3}', "begins with '{\"name\": 3}'; expected a trace of"),
    "binary": (b"\xff\xfe\x00junk", "not UTF-8 text (byte 0xff); expected a trace of"),
    "UTF-16": ("name,age".encode("utf-16-le"), "zero bytes; expected a trace of"),
    "cut gzip": (gzip.compress(GOOD["azure"])[:30], "damaged gzip data"),
}


@pytest.mark.parametrize(("content", "what"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_suits_no_reader_is_refused(write, content, what):
    path = write(content)
    with pytest.raises(WorkloadError) as fault:
        open_trace(path)
    assert message_of(fault).startswith(f"{path}: {what}")


def test_a_kind_and_its_options_are_checked(write):
    path = write(GOOD["table"])
    assert open_trace(path, "table", columns=Columns(), limit=1).n_requests == 1
    with pytest.raises(WorkloadError, match=r"no kind of trace is called 'csv'; accepted: azure, burstgpt"):
        open_trace(path, "csv")
    with pytest.raises(
        WorkloadError, match="failed: a trace of kind table has no such option; accepted: limit, rate_scale"
    ):
        open_trace(path, "table", failed="drop")
    with pytest.raises(WorkloadError, match="no such file"):
        open_trace(path.with_name("none.csv"))


@pytest.mark.slow
@settings(deadline=None)
@given(content=mangled(*GOOD.values()))
def test_any_bytes_have_a_kind_or_none(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any-kind.csv"
    path.write_bytes(content)
    requests, message = outcome(open_trace, path)
    assert requests or message.startswith(f"{path}: ")


BAD_BYTES = {
    "azure": ("2023-11-16 18:15:52,x,5", 4, "ContextTokens 'x' is not"),
    "burstgpt": ("46,A,1,2,4,C", 4, "Total tokens 4 is not the sum"),
    "mooncake": ('{"timestamp": NaN}', 5, "not JSON (NaN"),
    "ragpulse": ('{"timestamp": 5}', 4, "no key 'input_length'"),
    "weka": (test_weka.session_line(), 2, "requests: none"),
    "recorded": (test_recorded.row(output=0), 6, "output_tokens 0 is out of range"),
    "observed": (test_observed.request(test_observed.ASKED, end="lost"), 5, 'end "lost"; expected completed'),
    "log": ("0.75,x,2", 3, 'prompt_tokens "x" is no number of tokens'),
    "table": ("0.75,x,2", 3, "prompt 'x' is not a whole number"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["run", "compare", "prefix-cache"])
def test_a_bad_row_is_one_line_on_the_command_line_or_a_warning(write, tmp_path, kind, verb):
    row, number, what = BAD_BYTES[kind]
    path = write(GOOD[kind] + row.encode() + b"\n")
    sizes = "[cache]\ncells = 4096\n[server]\nslot_context = 2048\n"
    scenario = write(f'[workload]\nkind = "{kind}"\npath = "trace.csv"\nlimit = 2\n{sizes}'.encode(), "mine.toml")
    others = [] if verb == "prefix-cache" else ["-p", "paged"]
    given_all = [verb, str(scenario), "--json", *others]
    refused = command(*given_all)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"kvsim: {path}: row {number}: {what}")
    assert len(refused.stderr.splitlines()) == 1
    done = command(*given_all, "--skip-bad-rows")
    assert done.returncode == 0
    assert json.loads(done.stdout)
    warnings = [line for line in done.stderr.splitlines() if "skipped" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: {path}: 1 bad row skipped: row {number} ({what}")


def test_notes_are_printed_once_however_many_policies_are_compared(write):
    write(GOOD["azure"] + b"x\n")
    scenario = write(b'[workload]\nkind = "azure"\npath = "trace.csv"\nskip_bad_rows = true\n', "mine.toml")
    done = command("compare", str(scenario), "--json", "-p", "paged", "-p", "contiguous", "-p", "oracle")
    assert done.returncode == 0
    assert done.stderr.count("skipped") == 1


def test_bad_rows_can_be_skipped_of_traces_only():
    refused = command("run", "chat", "--skip-bad-rows")
    assert refused.returncode == 2
    assert refused.stderr == (
        "kvsim: chat: --skip-bad-rows: workload.kind is 'poisson'; "
        "accepted: azure, burstgpt, mooncake, ragpulse, weka, recorded, observed, log, table\n"
    )


SCHEMAS = {"azure": "azure", "burstgpt1": "burstgpt", "burstgpt3": "burstgpt", "mooncake": "mooncake"}
SCHEMAS |= {"ragpulse": "ragpulse"}
ENTRIES = {name: (SCHEMAS[schema], entry) for schema in SCHEMAS for name, entry in manifest(schema).items()}


@needs_shared
@pytest.mark.parametrize(("kind", "entry"), ENTRIES.values(), ids=ENTRIES)
def test_every_malformed_file_through_the_command_line(write, kind, entry):
    path = SHARED / "bad" / entry["file"]
    sizes = "[cache]\ncells = 262144\n[server]\nslot_context = 131072\n"
    scenario = write(f'[workload]\nkind = "{kind}"\npath = "{path}"\n{sizes}'.encode(), "mine.toml")
    arguments = ("run", str(scenario), "--json", "--detail", "requests", "-p", "paged")
    done, skipping = command(*arguments), command(*arguments, "--skip-bad-rows")
    if entry["strict_verdict"] == "accept":
        assert sniff(path) == kind
        assert (done.returncode, json.loads(done.stdout)["requests"]) == (0, entry["expected_rows_if_accepted"])
        return
    where = "" if entry["bad_row"] is None else f" row {entry['bad_row']}:"
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvsim: {path}:{where}")
    assert len(done.stderr.splitlines()) == 1
    if entry["bad_row"] is None:
        assert (skipping.returncode, skipping.stderr) == (2, done.stderr)
        return
    assert sniff(path) == kind
    assert skipping.returncode == 0
    assert f"skipped: row {entry['bad_row']} (" in skipping.stderr


PUBLISHED = {
    "azure2023_code/*.csv.gz": ("azure", {}, 8_819),
    "azure2023_conv/*.csv.gz": ("azure", {}, 19_366),
    "burstgpt_1_slice400/*.csv": ("burstgpt", {"failed": "drop"}, 383),
    "mooncake_arxiv_1000/*.jsonl.gz": ("mooncake", {}, 1_000),
    "mooncake_conversation/*.jsonl.gz": ("mooncake", {}, 12_031),
    "ragpulse/0_trace.jsonl.gz": ("ragpulse", {"clock_reset": "continue"}, 7_106),
    "weka_claude_code_sample.jsonl.gz": ("weka", {}, 2_192),
}


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("pattern", PUBLISHED)
def test_the_published_traces_are_known_and_have_so_many_requests(pattern):
    kind, options, n = PUBLISHED[pattern]
    (path,) = SHARED.glob(pattern)
    assert sniff(path) == kind
    assert open_trace(path, **options).n_requests == n
