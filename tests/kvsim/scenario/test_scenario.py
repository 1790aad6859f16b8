"""Scenario files: what the built-in ones say, what a file may leave out, and what each mistake is answered with."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim import UserError, run
from kvsim.costs.load_profile import load_profile
from kvsim.scenario.builtin import builtin_names
from kvsim.scenario.scenario import Scenario, load_scenario
from workloads import AzureTrace, WorkloadError


@pytest.fixture
def write(tmp_path):
    """Writes a scenario file; returns its path."""

    def write_file(content, name="mine.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def faults(path):
    """What ``load`` says of a file, without the file's name at the start of each line."""
    with pytest.raises(UserError) as fault:
        load_scenario(path)
    lines = str(fault.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


@pytest.mark.parametrize("name", builtin_names())
def test_a_built_in_scenario_survives_its_own_file(write, name):
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.build_workload().n_requests > 0
    again = load_scenario(write(scenario.to_toml(), "another-name.toml"))
    assert again.to_toml() == scenario.to_toml()
    assert again.model_dump(exclude={"folder"}) == scenario.model_dump(exclude={"folder"})
    assert list(again.build_workload()) == list(scenario.build_workload())


def test_the_written_file_names_every_key_even_those_not_set():
    text = load_scenario("identical", workload__prompt_tokens={"kind": "lognormal", "mu": 1.0, "sigma": 1.0}).to_toml()
    sections = tomllib.loads(text)
    assert set(sections) == {
        "name",
        "seed",
        "workload",
        "model",
        "server",
        "cache",
        "machine",
        "cluster",
        "speculation",
    }
    assert "max" not in sections["workload"]["prompt_tokens"]
    assert sections["server"]["slots"] == "auto"
    server = "server.n_batch, server.n_ubatch, server.slot_context"
    cache = "cache.unified, cache.search, cache.kernel"
    machine = (
        "machine.device, machine.engine, machine.weights, machine.n_gpu_layers, machine.cpu_gb_s, machine.host_gb_s"
    )
    unset = ["acceptance", "accepted_by_position", "measured", "model", "profile", "share"]
    rest = ", ".join(["cluster.link_gb_s", *(f"speculation.{key}" for key in unset)])
    first = "workload.max_output_tokens, model.state_mib"
    assert text.endswith(f"# not set: {first}, {server}, {cache}, {machine}, {rest}\n")


def test_a_file_may_say_nothing(write):
    empty = load_scenario(write(""))
    assert empty.name == "mine"
    assert empty == load_scenario(write("[workload]\n")) == load_scenario(write('[workload]\nkind = "poisson"\n'))


def test_a_file_with_a_workload_alone_runs(write):
    result = kvsim.run(write("[workload]\nrequests = 20\n"))
    assert result.summary["scenario"] == "mine"
    assert result.summary["requests"] == 20


def test_a_byte_order_mark_is_no_fault(write):
    assert load_scenario(write(b"\xef\xbb\xbfseed = 5\n")).seed == 5


def test_a_name_in_the_file_wins_over_the_file_s(write):
    assert load_scenario(write('name = "evening"\n')).name == "evening"


def test_changes_replace_keys_and_nothing_else():
    chat = load_scenario("chat")
    changed = load_scenario(chat, seed=9, cache__cells=4096, workload__prompt_tokens__max=100)
    assert (changed.seed, changed.cache.cells, changed.workload.prompt_tokens.max) == (9, 4096, 100)
    back = {"seed": 1, "cache__cells": 2048, "workload__prompt_tokens__max": 400}
    assert load_scenario(changed, **back) == chat == load_scenario("chat")


def test_a_change_may_be_a_section_or_name_the_model():
    assert load_scenario({}, model={"name": "small"}).model.name == "small"
    assert load_scenario({}, model="small").model.name == "small"


def test_a_table_is_left_as_it_was():
    table = {"cache": {"cells": 2048}}
    assert load_scenario(table, cache__cells=4096, seed=3).cache.cells == 4096
    assert table == {"cache": {"cells": 2048}}


WRONG_KEYS = {
    "misspelt key": ("[workload]\nraet = 3", "workload.raet: unknown key; did you mean 'rate'?"),
    "misspelt section": ("[wrkload]\nrate = 3", "wrkload: unknown key; did you mean 'workload'?"),
    "misspelt length": (
        '[workload]\nprompt_tokens = { kind = "lognormal", mu = 1.0, sigma = 1.0, mxa = 9 }',
        "workload.prompt_tokens.mxa: unknown key; did you mean 'max'?",
    ),
    "key of another kind": ("[workload]\nusers = 3", "workload.users: unknown key; accepted: requests, "),
    "unlike any": ("[server]\nzzz = 3", "server.zzz: unknown key; accepted: scheduler, slots, n_batch, n_ubatch, "),
    "named like a kind of workload": (
        "[server]\nbatch = 3",
        "server.batch: unknown key; did you mean 'n_batch' or",
    ),
    "section named like one": ('[azure]\npath = "x"', "azure: unknown key; accepted: name, seed, workload, "),
    "newline in a key": ('"a\\nb" = 3', "'a\\nb': unknown key"),
    "internal": ('folder = "."', "folder: unknown key"),
}
WRONG_VALUES = {
    "negative rate": (
        "[workload]\nrate = -1.0",
        "workload.rate: input should be greater than or equal to 0.000001, got -1.0",
    ),
    "zero rate": ("[workload]\nrate = 0", "workload.rate: input should be greater than or equal to 0.000001, got 0"),
    "nan rate": ("[workload]\nrate = nan", "workload.rate: input should be a finite number, got nan"),
    "infinite rate": ("[workload]\nrate = inf", "workload.rate: input should be a finite number, got inf"),
    "text for a number": ('[workload]\nrate = "8"', "workload.rate: input should be a valid number, got '8'"),
    "fraction of a request": ("[workload]\nrequests = 2.5", "workload.requests: input should be a valid integer"),
    "true for a number": ("seed = true", "seed: input should be a valid integer, got True"),
    "date for a number": ("seed = 2024-05-10", "seed: input should be a valid integer"),
    "number for a table": ("cache = 5", "cache: a table is expected, got 5"),
    "array of tables": ("[[workload]]\nrate = 3", "workload: a table is expected, got ["),
    "long text": (f'seed = "{"x" * 999}"', f"seed: input should be a valid integer, got '{'x' * 56}..."),
    "cv": ('[workload]\nkind = "gamma"\ncv = 0.0', "workload.cv: input should be greater than or equal to 0.01"),
    "users": ('[workload]\nkind = "closed-loop"\nusers = 0', "workload.users: input should be greater than 0"),
    "no path": ('[workload]\nkind = "azure"', "workload.path: field required"),
    "window": ('[workload]\nkind = "azure"\npath = "x"\nstop_s = 0', "workload.stop_s: input should be greater"),
    "unknown kind": (
        '[workload]\nkind = "poison"',
        "workload.kind: no kind called 'poison'; did you mean 'poisson'? Th",
    ),
    "kind that is no text": ("[workload]\nkind = 5", "workload.kind: no kind called '5'"),
    "unknown lengths": (
        '[workload]\nprompt_tokens = { kind = "pareto" }',
        "workload.prompt_tokens.kind: no kind called 'pareto'; there are fixed, lognormal",
    ),
    "lengths without kind": ("[workload]\nprompt_tokens = { value = 3 }", "workload.prompt_tokens.kind: missing"),
    "lengths as a number": ("[workload]\noutput_tokens = 3", "workload.output_tokens: a table is expected, got 3"),
    "missing mu": (
        '[workload]\nprompt_tokens = { kind = "lognormal", sigma = 1.0 }',
        "workload.prompt_tokens.mu: field required",
    ),
    "max below min": (
        '[workload]\nprompt_tokens = { kind = "lognormal", mu = 1.0, sigma = 1.0, min = 9, max = 8 }',
        "workload.prompt_tokens: max (8) is below min (9)",
    ),
    "length of nothing": (
        '[workload]\noutput_tokens = { kind = "fixed", value = 0 }',
        "workload.output_tokens.value: input should be greater than or equal to 1, got 0",
    ),
    "unknown model": ('[model]\nname = "gpt"', "model.name: no model called 'gpt'; there are tiny, small"),
    "unknown scheduler": (
        '[server]\nscheduler = "fair"',
        "server.scheduler: no scheduler called 'fair'; there are llama-server, ",
    ),
    "unknown kernel": ('[cache]\nkernel = "magic"', "cache.kernel: input should be 'masked'"),
    "slot larger than the cache": (
        "[server]\nslot_context = 32768",
        "scenario: server.slot_context (32768) exceeds cache.cells (16384)",
    ),
    "empty slot": (
        "[server]\nslot_context = 0",
        "server.slot_context: input should be greater than or equal to 2, got 0",
    ),
    "slot of one token": ("[server]\nslot_context = 1", "server.slot_context: "),
    "variation that divides by zero": ('[workload]\nkind = "gamma"\ncv = 1e-200', "workload.cv: "),
    "rate that leaves infinite gaps": ("[workload]\nrate = 1e-320", "workload.rate: "),
    "more than engines count": (
        "[server]\nn_batch = 9223372036854775808",
        "server.n_batch: input should be less than or equal to 2147483647, got 9223372036854775808",
    ),
    "too many slots": (
        "[server]\nslots = 16384\n[cache]\nunified = false",
        "scenario: cache.cells (16384) shared out over server.slots (16384)",
    ),
    "negative seed": ("seed = -1", "seed: input should be greater than or equal to 0, got -1"),
    "integer longer than Python converts": (f"seed = {'1' * 5000}", "not TOML: "),
    "not TOML": ("[work", "not TOML: "),
    "key twice": ("seed = 1\nseed = 2", "not TOML: "),
    "not UTF-8": (b'name = "caf\xe9"', "not UTF-8 text"),
    "binary": (bytes(range(256)), "not UTF-8 text"),
}
BAD_FILES = WRONG_KEYS | WRONG_VALUES


@pytest.mark.parametrize(("content", "answer"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_mistake_is_answered_with_its_key_in_one_line(write, content, answer):
    (line,) = faults(write(content))
    assert line.startswith(answer)


def test_every_fault_has_its_line(write):
    path = write('sead = 1\n[workload]\nrate = -1\nrequests = 0\n[cache]\ncells = "many"\n[model]\nname = "gpt"')
    keys = sorted(line.split(": ")[0] for line in faults(path))
    assert keys == ["cache.cells", "model.name", "sead", "workload.rate", "workload.requests"]


def test_a_missing_file_is_answered_with_the_built_in_names(tmp_path):
    (line,) = faults(tmp_path / "none.toml")
    assert line == "no such file, and not a built-in scenario; there are " + ", ".join(builtin_names())


def test_a_folder_is_no_scenario(tmp_path):
    assert faults(tmp_path) == ["cannot be read: Is a directory"]


def test_a_wrong_change_is_answered_like_a_wrong_file():
    with pytest.raises(UserError, match=r"^chat: cache\.cels: unknown key; did you mean 'cells'\?$"):
        load_scenario("chat", cache__cels=4096)
    with pytest.raises(
        UserError, match=r"^chat: workload\.rate: input should be greater than or equal to 0\.000001, got -1$"
    ):
        load_scenario("chat", workload__rate=-1)


def test_a_change_below_what_is_no_table_is_refused():
    with pytest.raises(UserError, match=r"^chat: cache\.cells"):
        load_scenario("chat", cache__cells__blocks=4)


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(UserError):
        load_scenario("a\0b")


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def test_a_relative_trace_starts_at_the_scenario_s_folder(write, tmp_path, monkeypatch):
    path = write('[workload]\nkind = "azure"\npath = "traces/day.csv"\n')
    write(TRACE, "traces/day.csv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for scenario in (load_scenario(path), load_scenario(load_scenario(path), seed=2), load_scenario("../mine.toml")):
        assert [request.prompt_tokens for request in scenario.build_workload()] == [374]


def test_a_written_scenario_finds_its_trace_from_another_folder(write):
    path = write('[workload]\nkind = "azure"\npath = "day.csv"\n')
    write(TRACE, "day.csv")
    again = load_scenario(write(load_scenario(path).to_toml(), "results/scenario.toml"))
    assert again.build_workload().n_requests == 1


def test_a_trace_in_the_home_of_an_unknown_user_is_refused(write):
    scenario = load_scenario(write('[workload]\nkind = "azure"\npath = "~no-such-user/day.csv"\n'))
    with pytest.raises(WorkloadError, match="~no-such-user"):
        scenario.build_workload()


def test_an_absolute_trace_stays_where_it_is(write):
    trace = write(TRACE, "day.csv")
    scenario = load_scenario(write(f'[workload]\nkind = "azure"\npath = "{trace}"\n', "folder/mine.toml"))
    assert isinstance(scenario.build_workload(), AzureTrace)


def test_a_trace_is_opened_only_to_run(write):
    scenario = load_scenario(write('[workload]\nkind = "azure"\npath = "none.csv"\n'))
    with pytest.raises(WorkloadError, match=r"none\.csv: no such file"):
        scenario.build_workload()


printable = st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)
scalars = st.one_of(
    st.booleans(),
    st.integers(-3, 5000),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["poisson", "gamma", "batch", "closed-loop", "azure", "fixed", "lognormal", "tiny", "masked"]),
    printable,
    st.datetimes(),
    st.dates(),
    st.times(),
)


def keys_of(*sections):
    return st.one_of(st.sampled_from(sorted({key for section in sections for key in section})), printable)


CHAT = tomllib.loads(load_scenario("chat").to_toml())
SECTIONS = {name: table for name, table in CHAT.items() if isinstance(table, dict)}
lengths = st.dictionaries(keys_of(["kind", "value", "mu", "sigma", "min", "max"]), scalars, max_size=5)
values = st.one_of(scalars, lengths, st.lists(scalars, max_size=2))
section_keys = keys_of(*SECTIONS.values(), ["users", "cv", "think_s", "path", "limit"])
tables = st.dictionaries(keys_of(CHAT), scalars | st.dictionaries(section_keys, values, max_size=4), max_size=5)
known_keys = [(section, key) for section, table in SECTIONS.items() for key in table]
plausible = st.integers(1, 5000) | st.floats(0.01, 100.0)
nearly_chat = st.tuples(st.sampled_from(known_keys), plausible | values).map(
    lambda change: {**CHAT, change[0][0]: {**SECTIONS[change[0][0]], change[0][1]: change[1]}}
)


@pytest.fixture(scope="module")
def any_path(tmp_path_factory):
    return tmp_path_factory.mktemp("any") / "any.toml"


def outcome(path):
    """The scenario, or the message if there is none."""
    try:
        return load_scenario(path), ""
    except UserError as e:
        return None, str(e)


@pytest.mark.slow
@settings(deadline=None)
@given(table=tables | nearly_chat)
def test_any_table_is_loaded_or_refused(any_path, table):
    any_path.write_text(tomli_w.dumps(table), encoding="utf-8")
    scenario, message = outcome(any_path)
    if scenario is None:
        assert message
        assert all(line.startswith(f"{any_path}: ") for line in message.splitlines())
    else:
        assert isinstance(scenario, Scenario)
        any_path.write_text(scenario.to_toml(), encoding="utf-8")
        assert load_scenario(any_path).to_toml() == scenario.to_toml()


@pytest.mark.slow
@settings(deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_loaded_or_refused(any_path, content):
    any_path.write_bytes(content)
    scenario, message = outcome(any_path)
    assert (scenario is None) == bool(message)


# Files that are no such files


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (".".join("a" * 50_000) + " = 1", "a key has more than 100 dots; the keys of such a file have few"),
        ("a = {" + ".".join("a" * 50_000) + " = 1}", "a key has more than 100 dots; the keys of such a file have few"),
        ("# " + "x" * 1_000_000, "more than 1 MB; such a file is smaller"),
    ],
    ids=["dots", "dots within", "large"],
)
def test_a_file_that_takes_too_long_to_read_is_refused(text, fault, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=rf"mine\.toml: {fault}$"):
        load_scenario(tmp_path / "mine.toml")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no device without an end here")
def test_no_more_is_read_of_a_file_without_an_end_than_such_a_file_has():
    with pytest.raises(UserError, match=r"^/dev/zero: more than 1 MB; such a file is smaller$"):
        load_scenario("/dev/zero")
    with pytest.raises(UserError, match=r"^/dev/zero: more than 16 MB; such a file is smaller$"):
        load_profile("/dev/zero")


def test_of_users_without_number_those_are_there_that_ask():
    asked = {"kind": "closed-loop", "requests": 5, "users": 5, "think_s": 1.0}
    few, many = [run(load_scenario({"workload": {**asked, "users": users}})).summary for users in (5, 10**9)]
    del few["wall_s"], many["wall_s"]
    assert few == many
