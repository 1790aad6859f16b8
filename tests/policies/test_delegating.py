"""A policy around another leaves everything to it, whatever a policy can be asked."""

import inspect

import pytest

from policies import CacheConfig, Chunk, Policy, available
from policies.delegating import DelegatingPolicy
from policies.layouts.unified import UnifiedPolicy

SILENT = {"plan_decode_steps": None, "lockstep_batch": None}
"""What it does not leave to the inner one, and what it answers."""
METHODS = [name for name, _ in inspect.getmembers(Policy, inspect.isfunction) if not name.startswith("_")]


def around():
    return DelegatingPolicy(UnifiedPolicy("inner", CacheConfig(cells=64)))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_a_policy_is_the_inner_ones(monkeypatch, name):
    outer = around()
    parameters = list(inspect.signature(getattr(Policy, name)).parameters.values())[1:]
    given = [object() for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: object() for p in parameters if p.kind is p.KEYWORD_ONLY}
    answer, asked = object(), []

    def inner(*arguments, **keywords):
        asked.append((list(arguments), keywords))
        return answer

    monkeypatch.setattr(outer.inner, name, inner)
    found = getattr(outer, name)(*given, **named)
    if name in SILENT:
        assert (found, asked) == (SILENT[name], [])
    else:
        assert asked == [(given, named)]
        # Whatever says nothing need not hand it on.
        assert found is (None if inspect.signature(getattr(Policy, name)).return_annotation == "None" else answer)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SILENT])
def test_what_is_left_out_is_left_to_the_inner_ones_defaults(monkeypatch, name):
    """The defaults are the same in both."""

    def shown(of):
        return [(p.name, p.default, p.kind) for p in inspect.signature(getattr(of, name)).parameters.values()]

    assert shown(DelegatingPolicy) == shown(Policy)


@pytest.mark.parametrize("name", available())
def test_what_a_policy_says_of_itself_is_the_inner_ones(name):
    inner = available()[name](CacheConfig(cells=1024, sequences=2, max_tokens=256))
    outer = DelegatingPolicy(inner)
    said = [field for field in Policy.__annotations__ if not field.startswith("_")]
    assert {*said} >= {"name", "capacity", "groups", "kernel", "block_size", "unbounded", "can_free_while_decoding"}
    for field in (*said, "max_sequence_tokens"):
        assert getattr(outer, field) == getattr(inner, field)


def test_cells_are_taken_and_given_back_through_it():
    outer = around()
    outer.allocate([Chunk(0, 0, 5)])
    assert outer.sequences() == outer.inner.sequences() == [0]
    assert outer.usage() == outer.inner.usage()
    outer.free(0)
    assert outer.inner.sequences() == []
