"""The same warning from many runs is one line, with the range of its numbers."""

import pytest

from kvsim.experiments.shared_warnings import share_warnings


def lines(*runs):
    return [shared.line() for shared in share_warnings(runs)]


def test_numbers_that_differ_become_a_range():
    text = "a forward pass had {} tokens; the profile was measured up to 509"
    assert lines(("paged", [text.format(512)]), ("ring", [text.format("1,024")]), ("paged", [text.format(600)])) == [
        "2 policies (paged, ring): a forward pass had 512–1,024 tokens; the profile was measured up to 509"
    ]


def test_a_warning_of_one_policy_names_it():
    assert lines(("paged", ["unstable"]), ("ring", [])) == ["paged: unstable"]


def test_warnings_keep_their_order_and_count_runs():
    shared = share_warnings([("b", ["first", "took 2.5 s"]), ("a", ["took 10 s"]), ("b", ["took 2.50 s"])])
    assert [(each.text, each.sources, each.runs) for each in shared] == [
        ("first", ("b",), 1),
        ("took 2.5–10 s", ("b", "a"), 3),
    ]
    assert shared[1].line_of_runs(80) == "in 3 of 80 runs: took 2.5–10 s (b, a)"


@pytest.mark.parametrize("name", ["q8_0", "P95", "llama-3.1-8b", "b6975", "2026-11-21", "0.3.31.188"])
def test_digits_of_names_are_no_numbers(name):
    other = "".join(str((int(c) + 1) % 10) if c.isdigit() else c for c in name)
    assert len(share_warnings([("a", [f"measured with {name}"]), ("b", [f"measured with {other}"])])) == 2


def test_what_one_run_lists_is_not_merged():
    rows = ["row 5: arrival is missing", "row 9: arrival is missing"]
    assert lines(("a", rows), ("b", rows)) == [f"2 policies (a, b): {row}" for row in rows]
