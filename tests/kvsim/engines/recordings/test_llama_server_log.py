"""Logs of llama-server, of a few lines each, and what is read in them."""

import gzip
import json

import pytest

from kvsim.engines.recordings.llama_server_join import SentRequest, recording
from kvsim.engines.recordings.llama_server_log import last_mark, read_log
from kvsim.engines.recordings.recording_files import write_recording
from kvsim.engines.recordings.server_flags import scenario_of
from kvsim.errors import UserError

LOADING = (
    ("I", "srv          init: using 7 threads for HTTP server"),
    ("I", "llama_context: constructing llama_context"),
    ("I", "llama_context: n_ctx                 = 9999"),
    ("I", "llama_context: constructing llama_context"),
    ("I", "llama_context: n_ctx                 = 512"),
    ("I", "llama_context: n_ctx_seq             = 256"),
    ("I", "llama_context: n_batch               = 8"),
    ("I", "llama_context: n_ubatch              = 4"),
    ("I", "llama_context: flash_attn            = auto"),
    (
        "I",
        "llama_kv_cache: size =   11.25 MiB (   256 cells,  30 layers,  2/2 seqs), K (f16):    5.62 MiB, V (q8_0): ...",
    ),
    (
        "I",
        "llama_memory_recurrent: size =    9.21 MiB (     2 cells,  10 layers,  2 seqs  0 rs_seq), R (f32): ...",
    ),
    ("I", "resolve_fused_ops: Flash Attention enabled"),
    ("I", "srv    load_model: initializing, n_slots = 2, n_ctx_slot = 256, kv_unified = 'false'"),
    ("I", "srv    load_model: prompt cache is enabled, size limit: 64 MiB"),
    ("I", "srv          init: idle slots will be saved to prompt cache upon starting a new task"),
)
ABOUT = {
    "n_ctx": 512,
    "n_batch": 8,
    "n_ubatch": 4,
    "flash_attn": "auto",
    "kv_cells": 256,
    "kv_streams": "2/2",
    "kv_type_k": "f16",
    "kv_type_v": "q8_0",
    "states": 2,
    "states_mib": 9.21,
    "flash_attn_resolved": "enabled",
    "http_threads": 7,
    "slots": 2,
    "n_ctx_slot": 256,
    "kv_unified": "false",
    "host_cache_mib": 64,
    "idle_slots": "idle slots will be saved to prompt cache upon starting a new task",
}


def slot(number, task, text, level="I"):
    return level, f"slot   operator(): id  {number} | task {task} | {text}"


def server(text, level="I"):
    return level, f"srv      function: {text}"


def queue(text):
    return "D", f"que      function: {text}"


def decode(n_batch=8, off=0):
    return server(f"n_batch (effective) = {n_batch}, off = {off}", "D")


def begun(task, tokens, number):
    """A task comes in, gets a slot that was never used, and begins with its prompt."""
    return [
        queue(f"new task, id = {task}/1, front = 0"),
        slot(number, -1, "selected slot by LRU, t_last = -1"),
        slot(number, task, "processing task, is_child = 0"),
        slot(number, task, f"new prompt, n_ctx_slot = 256, n_keep = 0, task.n_tokens = {tokens}"),
    ]


def piece(number, task, start, end=None):
    """Tokens of a prompt from ``start``, to its end or not."""
    lines = [slot(number, task, f"cached n_tokens = {start}, memory_seq_rm [{start}, end)")]
    if end is not None:
        lines.append(slot(number, task, f"init sampler, took 0.01 ms, tokens: text = {end}, total = {end}"))
    return lines


def token(number, task, position):
    return slot(number, task, f"slot decode token, id=7, n_ctx = 256, n_tokens = {position}, truncated = 0", "D")


DECODED = queue("done yielding to queue")


def times(number, task, prompt_ms, answer_ms):
    return [
        slot(number, task, f"prompt eval time = {prompt_ms:10.2f} ms /     3 tokens (    1.00 ms per token)"),
        slot(number, task, f"       eval time = {answer_ms:10.2f} ms /     2 tokens (    1.00 ms per token)"),
        slot(number, task, "stop processing: n_tokens = 4, truncated = 0"),
    ]


@pytest.fixture
def log(tmp_path):
    """A function that writes a log, a line each millisecond from one minute after the start, and returns its path."""

    def write(*lines, loading=LOADING):
        stamped = [f"1.00.{i:03}.000 {level} {text}\n" for i, (level, text) in enumerate([*loading, *lines])]
        path = tmp_path / "server.log"
        path.write_text("".join(stamped))
        return path

    return write


def steps(path):
    return [record for record in read_log(path).records if record["type"] == "step"]


def events(path):
    return [record for record in read_log(path).records if record["type"] == "event"]


ONE_REQUEST = [
    *begun(0, 3, 1),
    *piece(1, 0, 0, 3),
    decode(),
    DECODED,
    token(1, 0, 3),
    decode(),
    DECODED,
    *times(1, 0, 12.5, 30.25),
]


def test_what_the_server_says_of_itself_is_that_of_its_last_context(log):
    assert read_log(log(*ONE_REQUEST)).about == ABOUT


def test_steps_and_events_keep_their_order_and_times(log):
    records = read_log(log(*ONE_REQUEST)).records
    told = [record.get("kind", "step") for record in records]
    assert told == ["post", "by_lru", "launch", "prompt", "step", "step", "prompt_time", "answer_time", "stop"]
    first = 60 + len(LOADING) / 1e3
    assert records[0] == {"type": "event", "t": pytest.approx(first), "kind": "post", "task": 0}
    assert records[1]["slot"] == 1
    assert "task" not in records[1]
    assert records[2] == {"type": "event", "t": pytest.approx(first + 0.002), "kind": "launch", "slot": 1, "task": 0}
    prompt = {key: records[3][key] for key in ("context", "n_keep", "tokens")}
    assert prompt == {"context": 256, "n_keep": 0, "tokens": 3}
    step = {"type": "step", "batch": 0, "off": 0, "n": 3, "ok": True, "tokens": [[1, "p", 0, 3]], "s": 0.001}
    assert {**records[4], "t": 0} == {**step, "t": 0}
    assert records[5]["tokens"] == [[1, "g", 3, 1]]
    assert records[-1]["tokens"] == 4


def test_a_prompt_longer_than_a_batch_fills_it(log):
    lines = [
        *begun(0, 20, 0),
        *piece(0, 0, 0),
        decode(),
        DECODED,
        *piece(0, 0, 8),
        decode(),
        DECODED,
        *piece(0, 0, 16, 20),
        decode(),
        DECODED,
    ]
    assert [step["tokens"] for step in steps(log(*lines))] == [[[0, "p", 0, 8]], [[0, "p", 8, 8]], [[0, "p", 16, 4]]]


def test_what_generates_leaves_less_of_a_batch_for_prompts(log):
    lines = [*begun(0, 20, 0), *begun(1, 9, 1), token(0, 0, 5), *piece(1, 1, 0), decode(), DECODED]
    assert steps(log(*lines))[0]["tokens"] == [[0, "g", 5, 1], [1, "p", 0, 7]]


def test_a_piece_that_did_not_fill_its_batch_ends_where_the_next_begins(log):
    lines = [*begun(0, 9, 0), *piece(0, 0, 0), decode(), DECODED, *piece(0, 0, 5, 9), decode(), DECODED]
    assert [step["tokens"] for step in steps(log(*lines))] == [[[0, "p", 0, 5]], [[0, "p", 5, 4]]]


def test_a_batch_without_room_is_tried_in_smaller_pieces(log):
    def no_room(n_batch):
        text = "failed to find free space in the KV cache, retrying with smaller batch size, off = 0"
        return server(f"{text}, n_batch = {n_batch}, ret = 1", "W")

    lines = [
        *begun(0, 5, 0),
        *piece(0, 0, 0, 5),
        decode(),
        DECODED,
        server("purging slot 1 with 130 tokens", "W"),
        no_room(8),
        decode(),
        DECODED,
        no_room(4),
        decode(4),
        DECODED,
        decode(8, 4),
        DECODED,
    ]
    path = log(*lines)
    tried = [(step["batch"], step["off"], step["n"], step["ok"], "tokens" in step) for step in steps(path)]
    assert tried == [(0, 0, 5, False, True), (0, 0, 5, False, False), (0, 0, 4, True, False), (0, 4, 1, True, False)]
    purge = next(event for event in events(path) if event["kind"] == "purge")
    assert (purge["slot"], purge["tokens"]) == (1, 130)


def test_a_step_that_fails_for_good_is_not_ok(log):
    lines = [
        *begun(0, 5, 0),
        *piece(0, 0, 0, 5),
        decode(1),
        DECODED,
        server("Context size has been exceeded. off = 0, n_batch = 1, ret = 1", "E"),
        server("task id = 0, error: Context size has been exceeded.", "E"),
    ]
    path = log(*lines)
    assert [(step["n"], step["ok"]) for step in steps(path)] == [(1, False)]
    failed, error = events(path)[-2:]
    assert (failed["kind"], failed["message"], failed["ret"]) == ("failed", "Context size has been exceeded.", 1)
    assert (error["kind"], error["task"], error["message"]) == ("error", 0, "Context size has been exceeded.")


def test_an_empty_batch_is_no_step(log):
    lines = [decode(), server("no tokens to decode", "W"), *ONE_REQUEST, decode(), server("no tokens to decode", "W")]
    assert [step["batch"] for step in steps(log(*lines))] == [0, 1]


def test_a_step_that_the_log_does_not_see_the_end_of_is_left_out(log):
    assert len(steps(log(*ONE_REQUEST, token(1, 0, 4), decode()))) == 2


def test_a_message_that_does_not_end_its_line_is_followed_by_the_next(log):
    path = log(*ONE_REQUEST)
    whole = read_log(path).records
    path.write_text(path.read_text().replace("\n1.00.016", "\n1.00.015.500 D No parser definition detected.1.00.016"))
    assert read_log(path).records == whole


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            slot(0, -1, " - checking sim = 0.713 (82/115) > 0.100"),
            {"kind": "check", "slot": 0, "sim": 0.713, "lcp": 82, "of": 115},
        ),
        (
            slot(0, -1, "selected slot by LCP similarity, f_sim_best = 0.713 (> 0.100 thold), f_keep = 1.000"),
            {"kind": "by_similarity", "slot": 0, "sim": 0.713, "threshold": 0.1, "keep": 1.0},
        ),
        (
            server(" - looking for better prompt, base f_keep = -nan, f_sim = 0.000"),
            {"kind": "look", "keep": None, "sim": 0.0},
        ),
        (
            server("   - prompt with length     104, lcp =       0, f_keep = 0.000, f_sim = 0.000"),
            {"kind": "candidate", "tokens": 104, "lcp": 0, "keep": 0.0, "sim": 0.0},
        ),
        (
            server(" - saving prompt with length 104, total state size = 2.287 MiB (draft: 0.000 MiB)"),
            {"kind": "save", "tokens": 104, "mib": 2.287},
        ),
        (
            server(" - cache state: 1 prompts, 2.287 MiB (limits: 64.000 MiB, 512 tokens, 2982616 est)"),
            {"kind": "host_cache", "prompts": 1, "mib": 2.287},
        ),
        (
            server("   - prompt 0x7f00:     104 tokens, checkpoints:  0,     2.287 MiB"),
            {"kind": "host_entry", "tokens": 104, "mib": 2.287},
        ),
        (
            server(" - cache token limit (512, est: 700) reached, removing oldest entry (size = 2.287 MiB)"),
            {"kind": "token_limit", "limit": 512, "est": 700},
        ),
        (
            slot(1, 4, "reusing chunk with size 33, shifting KV cache [66, 99) -> [26, 59)"),
            {"kind": "reuse", "slot": 1, "task": 4, "tokens": 33, "from": 66, "to": 26},
        ),
        (
            slot(1, 4, "slot context shift, n_keep = 1, n_left = 254, n_discard = 127"),
            {"kind": "shift", "slot": 1, "task": 4, "n_keep": 1, "n_left": 254, "n_discard": 127},
        ),
        (queue("pop deferred task, id_task = 4"), {"kind": "pop", "task": 4}),
    ],
)
def test_kinds_of_events(log, line, expected):
    found = events(log(*ONE_REQUEST, line))[-1]
    assert {key: value for key, value in found.items() if key not in ("type", "t")} == expected


def test_internal_tasks_and_cancelled_requests_are_no_posts(log):
    internal = [queue("new task, id = 9, front = 0"), queue("new task, id = 9/1, front = 1")]
    assert [event["task"] for event in events(log(*ONE_REQUEST, *internal)) if event["kind"] == "post"] == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"not a log of llama-server with times; .* --log-timestamps --log-prefix -lv 5$"),
        ("slot launch_slot_: id  3 | task 0 | processing task\n", r"not a log of llama-server with times"),
        ("\x00\x1f\x8b\xff\n", r"not a log of llama-server with times"),
        ("0.05.011.411 D que    start_loop: update slots\n", r"does not show how llama-server loaded its model"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "other.log"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        read_log(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"^.*absent\.log: cannot be read: No such file"):
        read_log(tmp_path / "absent.log")


DRAFT = slot(1, 0, "generate_draft: id=7, #tokens=4, #draft=2, pos_next=4", "D")
REFUSED = {
    "a lower level": ([line for line in ONE_REQUEST if line[0] != "D"], 1, r"shows no batches: .* too low; .* -lv 5$"),
    "no requests": ([queue("waiting for new tasks")], 1, "shows no request that got a slot"),
    "two runs": (ONE_REQUEST, 2, "shows two starts"),
    "speculative decoding": ([*ONE_REQUEST, DRAFT], 1, "shows speculative decoding"),
}


@pytest.mark.parametrize(("lines", "starts", "message"), REFUSED.values(), ids=REFUSED)
def test_logs_that_cannot_be_replayed_are_refused(log, lines, starts, message):
    with pytest.raises(UserError, match=message):
        read_log(log(*lines, loading=LOADING * starts))


@pytest.mark.parametrize(
    "lines",
    [
        [line for line in ONE_REQUEST if "cached" not in line[1] and "decode token" not in line[1]],
        [*begun(0, 20, 0), *piece(0, 0, 0, 20), decode(), DECODED],
        [*begun(0, 3, 0), *piece(0, 0, 5, 3), decode(), DECODED],
        [*begun(0, 3, 0), *piece(0, 0, 0, 3), decode(8, 3), DECODED],
    ],
    ids=["no tokens", "more than a batch", "backwards", "beyond the batch"],
)
def test_a_damaged_log_is_refused(log, lines):
    with pytest.raises(
        UserError, match=r"server\.log: line \d+: a batch whose tokens are not shown; is the log damaged"
    ):
        read_log(log(*lines))


TWO_REQUESTS = [
    *begun(0, 3, 1),
    *begun(3, 3, 0),
    *piece(0, 3, 0, 3),
    *piece(1, 0, 0, 3),
    decode(),
    DECODED,
    *times(0, 3, 12.5, 30.25),
    *times(1, 0, 12.75, 31.0),
]


def answered(number, prompt, id_slot, prompt_ms, predicted_ms, send_s, answer=253):
    result = {"id_slot": id_slot, "prompt_ms": prompt_ms, "predicted_ms": predicted_ms}
    return SentRequest(number, prompt, 2, answer=answer, tokens=[answer] * 2, send_s=send_s, status=200, result=result)


def of_type(records, wanted):
    return [record for record in records if record["type"] == wanted]


def test_requests_are_joined_with_their_tasks_by_slot_and_times(log):
    sent = [answered(0, [5, 6, 7], 0, 12.504, 30.254, 1.0), answered(1, [5, 6, 8], 1, 12.746, 31.004, 1.001)]
    records = recording(read_log(log(*TWO_REQUESTS)), sent, {"name": "two", "flags": ["-np", "2"]})
    assert records[0]["type"] == "meta"
    assert records[0]["flags"] == ["-np", "2"]
    assert records[0]["server"] == ABOUT
    requests = of_type(records, "request")
    assert [request["task"] for request in requests] == [3, 0]
    sources = {record["name"]: record["tokens"] for record in of_type(records, "source")}
    said = [[t for name, first, n in r["prompt"] for t in sources[name][first : first + n]] for r in requests]
    assert said == [[5, 6, 7], [5, 6, 8]]
    assert "output" not in requests[0]


def test_the_log_is_put_on_the_clock_of_the_client(log):
    sent = [answered(0, [5, 6, 7], 0, 12.5, 30.25, 1.0), answered(1, [5, 6, 8], 1, 12.75, 31.0, 1.001)]
    posts = [r["t"] for r in recording(read_log(log(*TWO_REQUESTS)), sent, {}) if r.get("kind") == "post"]
    # Task 0, of the request sent last, got there quickest: it is taken to have come in when it was sent.
    assert posts == [1.001, 1.005]


def test_what_a_server_did_for_an_earlier_run_is_left_out(log):
    idle = server("all slots are idle")
    before = [*begun(1, 3, 1), *piece(1, 1, 0, 3), decode(), DECODED, *times(1, 1, 12.0, 30.0)]
    sent = [answered(0, [5, 6, 7], 0, 12.504, 30.254, 1.0), answered(1, [5, 6, 8], 1, 12.746, 31.004, 1.001)]
    alone = recording(read_log(log(idle, *TWO_REQUESTS)), sent, {})
    for lines in ([*before, idle, *TWO_REQUESTS], [idle, *before, idle, *TWO_REQUESTS]):
        records = recording(read_log(log(*lines)), sent, {})
        assert [r["kind"] for r in of_type(records, "event")] == [r["kind"] for r in of_type(alone, "event")]
        assert len(of_type(records, "step")) == len(of_type(alone, "step")) == 1
    # Where the server was never idle between them, what it did for others stays.
    assert len(of_type(recording(read_log(log(*before, *TWO_REQUESTS)), sent, {}), "step")) == 2


def test_what_has_no_times_is_joined_by_its_length(log):
    lines = [
        *begun(0, 0, 1),
        slot(1, 0, "empty prompt - releasing slot", "W"),
        *begun(2, 300, 0),
        server("task id = 2, error: request (300 tokens) exceeds the available context size (256 tokens)", "E"),
        *begun(4, 3, 1),
        *piece(1, 4, 0, 3),
        decode(),
        DECODED,
        *times(1, 4, 12.5, 30.25),
    ]
    nothing = {"id_slot": 1, "prompt_ms": 0.0, "predicted_ms": 0.0}
    sent = [
        SentRequest(0, [], 3, answer=253, status=400, error={"code": 400}),
        SentRequest(1, "", 3, answer=253, send_s=0.1, status=200, result=nothing),
        SentRequest(2, list(range(300)), 3, answer=253, send_s=0.2, status=400, error={"code": 400}),
        answered(3, [5, 6, 7], 1, 12.5, 30.25, 0.3),
    ]
    requests = of_type(recording(read_log(log(*lines)), sent, {}), "request")
    assert [request.get("task") for request in requests] == [None, 0, 2, 4]
    assert [request.get("raw_prompt") for request in requests] == [[], "", None, None]
    assert [request["prompt_tokens"] for request in requests] == [0, 0, 300, 3]


def test_requests_that_fail_before_they_begin_are_joined_by_their_marks(log):
    def launched(task, number, mark):
        params = (
            f"sampler params: \n\trepeat_last_n = 64\n\tmirostat = 0, mirostat_ent = {mark:.3f}, adaptive_decay = 0.9"
        )
        return [
            queue(f"new task, id = {task}/1, front = 0"),
            slot(number, -1, params),
            slot(number, task, "processing task, is_child = 0"),
        ]

    lines = [
        *launched(4, 1, 101),
        *launched(7, 0, 100),
        slot(0, 7, "new prompt, n_ctx_slot = 256, n_keep = 0, task.n_tokens = 3"),
        *piece(0, 7, 0, 3),
        decode(),
        DECODED,
        server("task id = 7, error: Context size has been exceeded.", "E"),
        server("task id = 4, error: Context size has been exceeded.", "E"),
    ]
    assert read_log(log(*lines)).marks == {4: 101.0, 7: 100.0}
    assert last_mark(log(*lines)) == 101
    sent = [
        SentRequest(i, [1, 2, 3], 5, answer=253, mark=mark, send_s=send_s, status=500, error={"code": 500})
        for i, mark, send_s in ((0, 100.0, 0.2), (1, 101.0, 0.1), (2, 102.0, 0.0))
    ]
    requests = of_type(recording(read_log(log(*lines)), sent, {}), "request")
    assert [request.get("task") for request in requests] == [7, 4, None]


def test_an_answer_of_other_tokens_is_kept(log):
    sent = answered(0, [5, 6, 7], 1, 12.5, 30.25, 0.0)
    sent.tokens = [253, 9]
    assert of_type(recording(read_log(log(*ONE_REQUEST)), [sent], {}), "request")[0]["output"] == [253, 9]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (answered(4, [5, 6, 7], 0, 12.5, 30.25, 0.0), "no task is that of request 4; is it the log of another run"),
        (answered(4, [5, 6, 7], 1, 12.6, 30.25, 0.0), "no task is that of request 4"),
        (answered(4, [5, 6], 1, 12.5, 30.25, 0.0), "no task is that of request 4"),
        (SentRequest(4, [5], 2, error={"code": 500}), "none of the 1 requests is in the log"),
        (answered(4, "abc", 1, 12.5, 30.25, 0.0), "request 4: its prompt is text; token ids are expected"),
    ],
)
def test_a_log_of_another_run_is_refused(log, sent, message):
    with pytest.raises(UserError, match=message):
        recording(read_log(log(*ONE_REQUEST)), [sent], {})


def test_equal_recordings_are_equal_files(log, tmp_path):
    sent = answered(0, [5, 6, 7], 1, 12.5, 30.25, 0.0)
    records = recording(read_log(log(*ONE_REQUEST)), [sent], {"name": "one", "flags": []})
    files = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    for path in files:
        write_recording(path, records)
    assert files[0].read_bytes() == files[1].read_bytes()
    with gzip.open(files[0], "rt") as lines:
        assert [json.loads(line) for line in lines] == records


def test_a_server_with_states_is_replayed_as_a_hybrid():
    scenario, _ = scenario_of({"flags": ["-np", "2"], "server": ABOUT})
    assert (scenario.cache.policy, scenario.model.state_mib) == ("hybrid", pytest.approx(4.605))
    without = {key: value for key, value in ABOUT.items() if not key.startswith("states")}
    assert scenario_of({"flags": ["-np", "2"], "server": without})[0].cache.policy != "hybrid"
