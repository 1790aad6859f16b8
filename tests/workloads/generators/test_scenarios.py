"""Generated workloads as a scenario states them: each survives its own file, and a mistake is answered with its key."""

import pytest

from kvsim import UserError, load_scenario
from tests.workloads.generators.test_synthetic import digest

LOGNORMAL = {"kind": "lognormal", "mu": 1.0, "sigma": 1.0}
POISSON = {"kind": "poisson"}
GIVEN = {"kind": "given-prompt", "edges": [100, 300], "tables": [{"kind": "fixed", "value": 3}] * 3}
WORKLOADS = {
    "agents": {"kind": "agents"},
    "agents, changed": {
        "kind": "agents",
        "tool_share": 0.5,
        "result_tokens": {"kind": "zipf", "exponent": 1.5, "max": 99},
        "tool_s": 0,
    },
    "sessions": {"kind": "sessions"},
    "sessions, changed": {
        "kind": "sessions",
        "sessions": 7,
        "cv": 2.0,
        "turns": {"kind": "fixed", "value": 3},
        "max_context": 900,
        "think_s": 0.0,
    },
    "sessions without system prompts": {"kind": "sessions", "system_prompts": 0, "user_tokens": LOGNORMAL},
    "weibull": {"kind": "weibull", "shape": 0.7},
    "mmpp": {"kind": "mmpp", "rates": [0, 50.0], "dwell_s": [1, 0.5]},
    "diurnal": {"kind": "diurnal", "profile": [1, 2.5], "phase_s": 3},
    "renewal": {"kind": "renewal", "quantiles": [0, 0.1, 3.0], "rate": 9},
    "renewal as it is": {"kind": "renewal", "quantiles": [0, 0.1, 0.3]},
    "correlation": {"correlation": -0.4},
    "closed loop": {"kind": "closed-loop", "correlation": 1},
    "gamma": {"prompt_tokens": {"kind": "gamma", "shape": 2, "scale": 90.5, "max": 800}},
    "zipf": {"output_tokens": {"kind": "zipf", "exponent": 1.1, "max": 400}},
    "empirical": {"prompt_tokens": {"kind": "empirical", "quantiles": [1, 2.5, 900]}},
    "given the prompt": {
        "output_tokens": {**GIVEN, "tables": [GIVEN["tables"][0], {"kind": "gamma", "shape": 1, "scale": 9.0}] * 2}
        | {"edges": [50, 100, 300]}
    },
}


@pytest.mark.parametrize("table", WORKLOADS.values(), ids=WORKLOADS)
def test_a_scenario_survives_its_own_file(tmp_path, table):
    ours, path = load_scenario({"workload": table}), tmp_path / "copy.toml"
    path.write_text(ours.to_toml(), encoding="utf-8")
    assert load_scenario(path).to_toml() == ours.to_toml() == load_scenario(load_scenario(path)).to_toml()
    assert digest(load_scenario(path).build_workload()) == digest(ours.build_workload())
    assert hash(ours) == hash(load_scenario(ours))


@pytest.mark.parametrize(
    "kind", ["poisson", "gamma", "batch", "closed-loop", "sessions", "agents", "azure", "mooncake"]
)
def test_every_kind_says_which_key_counts_its_requests(kind):
    path = {"path": "x"} if kind in ("azure", "mooncake") else {}
    counts = {"sessions": "sessions", "agents": "sessions", "azure": "limit", "mooncake": "limit"}
    assert load_scenario({"workload": {"kind": kind, **path}}).workload.count_key == counts.get(kind, "requests")


AGENTS = {
    "share": ({"tool_share": 1.1}, "workload.tool_share: input should be less than or equal to 1, got 1.1"),
    "time": ({"tool_s": -1}, "workload.tool_s: input should be greater than or equal to 0, got -1"),
    "results": ({"result_tokens": {"kind": "fixed"}}, "workload.result_tokens.value: field required"),
    "turns": ({"turns": {"kind": "zipf", "exponent": 1, "max": 1001}}, "workload.turns: 1001 turns; at most 1000"),
    "quantiles": ({"turns": {"kind": "empirical", "quantiles": [1, 2000]}}, "workload.turns: 2000 turns; at most"),
    "misspelt": ({"tool_shar": 1}, "workload.tool_shar: unknown key; did you mean 'tool_share'?"),
}

ARRIVALS = {
    "shape": ({"kind": "weibull", "shape": 0.01}, "workload.shape: input should be greater than or equal to 0.1"),
    "weibull rate": ({"kind": "weibull", "rate": 0}, "workload.rate: input should be greater than or equal to"),
    "one state": ({"kind": "mmpp", "rates": [1]}, "workload.rates: 2 to 1000 entries are expected, got 1"),
    "many states": ({"kind": "mmpp", "dwell_s": [1] * 1001}, "workload.dwell_s: 2 to 1000 entries are expected, got"),
    "states": (
        {"kind": "mmpp", "rates": [1, 2, 3]},
        "workload: 3 rates, 2 dwell_s; one of each is expected for each state",
    ),
    "negative": ({"kind": "mmpp", "rates": [1, -1]}, "workload.rates.1: input should be greater than or equal to 0"),
    "no stay": ({"kind": "mmpp", "dwell_s": [0, 1]}, "workload.dwell_s.0: input should be greater than or equal to"),
    "all 0": ({"kind": "mmpp", "rates": [0, 0]}, "workload: more than 100 changes of state for each request"),
    "hasty": ({"kind": "mmpp", "dwell_s": [1e-6, 1e-6]}, "workload: more than 100 changes of state for each request"),
    "rare": (
        {"kind": "mmpp", "rates": [1e-8, 0], "dwell_s": [1e9, 1e9]},
        "workload: less than 0.000001 requests/s on average",
    ),
    "text": ({"kind": "mmpp", "rates": ["a"] * 900}, "workload.rates.0: input should be a valid number, got 'a'"),
    "number for a list": ({"kind": "mmpp", "rates": 3.0}, "workload.rates: a list is expected, got 3.0"),
    "infinite": ({"kind": "mmpp", "rates": [1, float("inf")]}, "workload.rates.1: input should be a finite number"),
    "misspelt": ({"kind": "mmpp", "rate": [1, 2]}, "workload.rate: unknown key; did you mean 'rates'?"),
    "empty": ({"kind": "diurnal", "profile": []}, "workload.profile: 1 to 10000 entries are expected, got 0"),
    "night": ({"kind": "diurnal", "profile": [0, 0]}, "workload.profile: nothing ever arrives"),
    "period": ({"kind": "diurnal", "period_s": 0}, "workload.period_s: input should be greater than or equal to"),
    "endless": ({"kind": "diurnal", "rate": 1e6, "period_s": 1e9}, "workload: more than 1e12 requests in a period"),
    "phase": ({"kind": "diurnal", "phase_s": -1}, "workload.phase_s: input should be greater than or equal to 0"),
    "no quantiles": ({"kind": "renewal"}, "workload.quantiles: field required"),
    "one quantile": ({"kind": "renewal", "quantiles": [1]}, "workload.quantiles: 2 to 10000 entries are expected"),
    "fall": ({"kind": "renewal", "quantiles": [1, 0]}, "workload.quantiles: quantiles cannot decrease; 0.0 comes"),
    "stretched": ({"kind": "renewal", "quantiles": [0, 0], "rate": 1}, "workload: gaps of 0 seconds cannot be"),
}

LENGTHS = {
    "correlation": ({"correlation": 1.5}, "workload.correlation: input should be less than or equal to 1, got 1.5"),
    "twice": ({"correlation": 0.5, "output_tokens": GIVEN}, 'workload: output_tokens of kind "given-prompt" say how'),
    "shape": (
        {"prompt_tokens": {"kind": "gamma", "shape": 0, "scale": 1}},
        "workload.prompt_tokens.shape: input should be greater than or equal to 0.001",
    ),
    "max below min": (
        {"prompt_tokens": {"kind": "gamma", "shape": 1, "scale": 1, "min": 5, "max": 4}},
        "workload.prompt_tokens: max (4) is below min (5)",
    ),
    "no max": ({"prompt_tokens": {"kind": "zipf", "exponent": 1}}, "workload.prompt_tokens.max: field required"),
    "zipf": (
        {"prompt_tokens": {"kind": "zipf", "exponent": 1, "min": 5, "max": 4}},
        "workload.prompt_tokens: max (4) is below min (5)",
    ),
    "wide": (
        {"prompt_tokens": {"kind": "zipf", "exponent": 1, "max": 10**7}},
        "workload.prompt_tokens: 10000000 values from min to max; at most 1048576 are accepted",
    ),
    "one quantile": (
        {"prompt_tokens": {"kind": "empirical", "quantiles": [3]}},
        "workload.prompt_tokens.quantiles: 2 to 10000 entries are expected, got 1",
    ),
    "fall": (
        {"prompt_tokens": {"kind": "empirical", "quantiles": [3, 2]}},
        "workload.prompt_tokens.quantiles: quantiles cannot decrease; 2.0 comes after 3.0",
    ),
    "no tokens": (
        {"prompt_tokens": {"kind": "empirical", "quantiles": [0, 2]}},
        "workload.prompt_tokens.quantiles.0: input should be greater than or equal to 1",
    ),
    "prompt given itself": ({"prompt_tokens": GIVEN}, "workload.prompt_tokens.kind: no kind called 'given-prompt'"),
    "of a session": (
        {"kind": "sessions", "output_tokens": GIVEN},
        "workload.output_tokens.kind: no kind called 'given-",
    ),
    "table of tables": (
        {"output_tokens": {**GIVEN, "tables": [GIVEN] * 3, "edges": [3, 2]}},
        "workload.output_tokens.edges: edges must increase; 2 comes after 3",
    ),
    "tables": ({"output_tokens": {**GIVEN, "edges": [7]}}, "workload.output_tokens: tables: 3, edges: 1; one"),
    "in a table": (
        {"output_tokens": {**GIVEN, "tables": [*GIVEN["tables"][:2], {"kind": "fixed", "valu": 3, "value": 1}]}},
        "workload.output_tokens.tables.2.valu: unknown key; did you mean 'value'?",
    ),
    "value in a table": (
        {"output_tokens": {**GIVEN, "tables": [*GIVEN["tables"][:2], {"kind": "fixed", "value": 0}]}},
        "workload.output_tokens.tables.2.value: input should be greater than or equal to 1, got 0",
    ),
    "kind in a table": (
        {"output_tokens": {**GIVEN, "tables": [*GIVEN["tables"][:2], {"value": 0}]}},
        "workload.output_tokens.tables.2.kind: missing; accepted: 'fixed', 'lognormal', 'mean', 'gamma', 'zipf', ",
    ),
}

MIX = {
    "no parts": ({}, "workload.parts: field required"),
    "one part": ({"parts": [POISSON]}, "workload.parts: 2 to 100 entries are expected, got 1"),
    "many parts": ({"parts": [POISSON] * 101}, "workload.parts: 2 to 100 entries are expected, got 101"),
    "no list": ({"parts": POISSON}, "workload.parts: a list is expected, got {"),
    "no tables": ({"parts": [POISSON, 5]}, "workload.parts.1: a table is expected, got 5"),
    "mix": ({"parts": [POISSON, {"kind": "mix"}]}, "workload.parts.1: a mix cannot be part of a mix; name its parts"),
    "closed loop": ({"parts": [{"kind": "closed-loop"}, POISSON]}, "workload.parts.0: a closed loop cannot be part of"),
    "kind": (
        {"parts": [POISSON, {"kind": "poison"}]},
        "workload.parts.1.kind: no kind called 'poison'; did you mean 'poi",
    ),
    "misspelt": ({"parts": [POISSON, {"raet": 1}]}, "workload.parts.1.raet: unknown key; did you mean 'rate'?"),
    "of another kind": ({"parts": [POISSON, {"users": 1}]}, "workload.parts.1.users: unknown key; accepted: requests,"),
    "value": ({"parts": [POISSON, {"rate": -1}]}, "workload.parts.1.rate: input should be greater than or equal to"),
    "length": (
        {"parts": [POISSON, {"prompt_tokens": {**LOGNORMAL, "mu": 99}}]},
        "workload.parts.1.prompt_tokens.mu: input should be less than or equal to 20, got 99",
    ),
    "length misspelt": (
        {"parts": [POISSON, {"prompt_tokens": {**LOGNORMAL, "mxa": 99}}]},
        "workload.parts.1.prompt_tokens.mxa: unknown key; did you mean 'max'?",
    ),
    "named like a kind": ({"parts": [POISSON, {"gamma": 1}]}, "workload.parts.1.gamma: unknown key; accepted: "),
    "no path": ({"parts": [POISSON, {"kind": "azure"}]}, "workload.parts.1.path: field required"),
    "limit": ({"parts": [POISSON] * 2, "limit": 0}, "workload.limit: input should be greater than 0, got 0"),
    "key": ({"parts": [POISSON] * 2, "requests": 9}, "workload.requests: unknown key; accepted: kind, parts, limit"),
}

SESSIONS = {
    "misspelt": ({"turn": 3}, "workload.turn: unknown key; did you mean 'turns'?"),
    "of another kind": ({"requests": 3}, "workload.requests: unknown key; accepted: sessions, turns, "),
    "too many turns": ({"turns": {"kind": "fixed", "value": 1001}}, "workload.turns: 1001 turns; at most 1000 are"),
    "too long a tail": ({"turns": {**LOGNORMAL, "max": 5000}}, "workload.turns: 5000 turns; at most 1000"),
    "too many at least": ({"turns": {**LOGNORMAL, "min": 5000}}, "workload.turns: 5000 turns; at most 1000"),
    "no turn": ({"turns": {"kind": "fixed", "value": 0}}, "workload.turns.value: input should be greater"),
    "in a length": (
        {"user_tokens": {**LOGNORMAL, "mxa": 9}},
        "workload.user_tokens.mxa: unknown key; did you mean 'max'",
    ),
    "kind of length": ({"system_tokens": {"kind": "zipff"}}, "workload.system_tokens.kind: no kind called 'zipff'"),
    "number for lengths": ({"turns": 4}, "workload.turns: a table is expected, got 4"),
    "popularity": ({"popularity": -1.0}, "workload.popularity: input should be greater than or equal to 0"),
    "prompts": ({"system_prompts": -1}, "workload.system_prompts: input should be greater than or equal to 0"),
    "context": ({"max_context": 1}, "workload.max_context: input should be greater than or equal to 2"),
    "sessions": ({"sessions": 10**12}, "workload.sessions: input should be less than or equal to 10000000"),
}

MISTAKES = {
    f"{kind}, {name}": ({**({} if kind in ("arrivals", "lengths") else {"kind": kind}), **table}, answer)
    for kind, mistakes in {
        "agents": AGENTS,
        "arrivals": ARRIVALS,
        "lengths": LENGTHS,
        "mix": MIX,
        "sessions": SESSIONS,
    }.items()
    for name, (table, answer) in mistakes.items()
}


@pytest.mark.parametrize(("table", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_with_its_key_in_one_line(table, answer):
    with pytest.raises(UserError) as fault:
        load_scenario({"workload": table})
    lines = str(fault.value).splitlines()
    assert any(line.startswith(f"scenario: {answer}") for line in lines)
    assert len(lines) == 1 or "edges must increase" in answer, "its three tables are of the wrong kind besides"
