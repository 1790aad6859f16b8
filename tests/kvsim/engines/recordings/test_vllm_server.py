"""Replays of vLLM servers: those of a plain model (``tests/vllm_async_model.py``)."""

import pytest

from kvsim.engines.recordings.conformance import ENGINES
from tests.kvsim.engines.recordings import changed, check_refused, drop, lines, put, write
from tests.vllm_async_model import record_server

MODELS = {
    "prefix cache": {},
    "nothing cached": {"caching": False},
    "in process": {"mode": "inproc", "slots": 2},
    "asynchronous": {"asynchronous": True},
    "asynchronous, few blocks, nothing cached": {"asynchronous": True, "caching": False, "blocks": 13},
    "asynchronous, short sequences": {"asynchronous": True, "most": 40, "budget": 9},
}


def of_steps(records, key):
    return sum(len(record.get(key, ())) for record in records if record["type"] == "step")


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_servers_of_the_model_agree(tmp_path, keys):
    preemptions = hits = idle = 0
    for seed in range(2):
        records = record_server(seed, **keys)
        found = ENGINES["vllm"](write(tmp_path / "server.jsonl", records))
        assert found.first is None
        steps = [record for record in records if record["type"] == "step"]
        mode = "in process" if "mode" in keys else "server"
        assert found.era == f"a model, {mode}{', asynchronous' * keys.get('asynchronous', False)}"
        assert found.agree == found.total == len(steps)
        assert of_steps(records, "new") == of_steps(records, "fin") == 40
        preemptions += of_steps(records, "pre")
        hits += sum(record.get("hit", 0) for record in records)
        idle += sum(not record["n"] for record in steps)
    assert preemptions > 0
    assert idle > 0
    assert (hits > 0) == keys.get("caching", True)


PLAIN, AHEAD = record_server(3, 12), record_server(3, 12, asynchronous=True)


def step(records, holds):
    """The number of the first step of which this holds."""
    return next(at for at, record in enumerate(records) if record["type"] == "step" and holds(record))


ALTERED = {
    "n": (lambda r: len(r["n"]) > 1, lambda r: r["n"].reverse()),
    "tokens": (lambda r: r["n"], lambda r: r["n"][0].__setitem__(1, 999)),
    "new": (lambda r: "new" in r, lambda r: r.pop("new")),
    "res": (lambda r: "res" in r, lambda r: r.update(res=[])),
    "pre": (lambda r: "pre" in r, lambda r: r.update(pre=[77])),
    "fin": (lambda r: "fin" in r, lambda r: r["fin"].append(77)),
    "run": (lambda r: r["run"][1], lambda r: r.update(run=[0, 0])),
    "wait": (lambda r: r["n"], lambda r: r.update(wait=[9, 9])),
    "free": (lambda r: r["n"], lambda r: r.update(free=1000)),
}


@pytest.mark.parametrize("records", [PLAIN, AHEAD], ids=["plain", "ahead"])
@pytest.mark.parametrize("field", ALTERED)
def test_an_altered_step_is_named_with_its_field(tmp_path, records, field):
    holds, change = ALTERED[field]
    number = step(records, holds)
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", changed(records, number, change)))
    assert (found.agree, found.first.record) == (found.total - 1, number - 1)
    assert found.first.fields == ({"tokens": "n"}.get(field, field),)
    assert found.first.operation == {"step": records[number]["s"], "t": records[number]["t"]}


def test_an_altered_hit_is_named_by_its_request(tmp_path):
    number = next(at for at, record in enumerate(PLAIN) if record.get("hit"))
    found = ENGINES["vllm"](write(tmp_path / "wrong.jsonl", changed(PLAIN, number, lambda r: r.update(hit=1))))
    assert found.first.fields == (f"hit of {PLAIN[number]['r']}",)
    assert found.first.recorded[found.first.fields[0]] == 1


@pytest.mark.parametrize("records", [PLAIN, AHEAD], ids=["plain", "ahead"])
def test_when_a_request_came_matters(tmp_path, records):
    """The control: known to the scheduler a step later, or with a longer answer, it is in other steps."""
    number = next(at for at, record in enumerate(records) if record.get("r") == 4)
    first = records[step(records, lambda r: 4 in r.get("new", ()))]
    later = changed(records, number, lambda r: r.update(engine=first["t"] + 0.001))
    assert ENGINES["vllm"](write(tmp_path / "later.jsonl", later)).first.operation["step"] <= first["s"]
    longer = changed(records, number, lambda r: r.update(n_out=r["n_out"] + 1))
    last = records[step(records, lambda r: 4 in r.get("fin", ()))]
    assert ENGINES["vllm"](write(tmp_path / "longer.jsonl", longer)).first.operation["step"] == last["s"]
    other = changed(records, 0, lambda r: r["engine"].update(async_scheduling=records is PLAIN))
    assert ENGINES["vllm"](write(tmp_path / "other.jsonl", other)).first is not None


def test_sets_of_requests_have_no_order(tmp_path):
    number = step(PLAIN, lambda r: len(r.get("new", ())) > 1)
    other = changed(PLAIN, number, lambda r: r["new"].reverse())
    assert ENGINES["vllm"](write(tmp_path / "other.jsonl", other)).first is None


def engine(**keys):
    """The model's recording with other flags of the engine; None takes one away."""
    flags = {key: value for key, value in (PLAIN[0]["engine"] | keys).items() if value is not None}
    return lines([PLAIN[0] | {"engine": flags}, *PLAIN[1:]])


STEP = step(PLAIN, lambda r: r["n"])
MALFORMED = {
    "no version": (drop(PLAIN, 0, "vllm"), "line 1: "),
    "no engine": (drop(PLAIN, 0, "engine"), "line 1: not a vLLM recording's header"),
    "an engine of words": (put(PLAIN, 0, engine="fast"), "line 1: "),
    "an unknown mode": (engine(mode="cloud"), "line 1: mode is 'cloud'; accepted: server, inproc"),
    "no mode": (engine(mode=None), "line 1: "),
    "no blocks": (engine(num_blocks=None), "line 1: "),
    "blocks as words": (engine(num_blocks="many"), "line 1: num_blocks is 'many'; a whole number "),
    "a single block": (engine(num_blocks=1), "line 1: 4 cells make 1 blocks of 4"),
    "no seats": (engine(max_num_seqs=0), "line 1: max_num_seqs is 0; "),
    "an impossible order": (engine(scheduling_policy="fair"), "line 1: "),
    "a record of another type": (put(PLAIN, 2, type="note"), "line 3: type 'note' is unknown; accepted: request, step"),
    "a record without a type": (drop(PLAIN, 2, "type"), "line 3: "),
    "no prompt": (drop(PLAIN, 1, "prompt"), "line 2: "),
    "a prompt of words": (put(PLAIN, 1, prompt="hello"), "line 2: "),
    "an answer of nobody": (put(PLAIN, 1, prompt=[["out:x", 0, 3]]), "line 2: "),
    "another length": (put(PLAIN, 1, n_prompt=999), "line 2: n_prompt of request 0 is 999, its segments have "),
    "too long a prompt": (
        put(PLAIN, 1, prompt=[[1, 0, 10**7]], n_prompt=10**7),
        "line 2: request 0 has 10000000 tokens, a sequence at most 1000000",
    ),
    "no answer": (put(PLAIN, 1, n_out=0), "line 2: n_out is 0; a whole number "),
    "a request twice": (put(PLAIN, 2, r=0), "line 3: r is 0; a number that no other request has is expected"),
    "a request by name": (put(PLAIN, 2, r="me"), "line 3: r is 'me'; "),
    "no arrival": (drop(PLAIN, 1, "engine"), "line 2: "),
    "an arrival of words": (put(PLAIN, 1, engine="soon"), "line 2: "),
    "no time": (drop(PLAIN, STEP, "t"), f"line {STEP + 1}: "),
    "no tokens": (drop(PLAIN, STEP, "n"), f"line {STEP + 1}: "),
    "no steps": (lines(PLAIN[:13]), "nothing that can be compared"),
}


@pytest.mark.parametrize(("content", "answer"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_recordings_are_refused_in_one_line(tmp_path, content, answer):
    check_refused(tmp_path, "vllm", content, answer)


def test_lists_of_words_are_a_disagreement(tmp_path):
    path = write(tmp_path / "words.jsonl", changed(PLAIN, STEP, lambda r: r.update(new="all")))
    assert ENGINES["vllm"](path).first.fields == ("new",)
