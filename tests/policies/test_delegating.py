"""A delegating policy leaves every method to the policy within, except those that would bypass it."""

import inspect

import pytest

from policies import CacheConfig, Policy, available
from policies.delegating import DECLARED, DelegatingPolicy
from policies.layouts.unified import UnifiedPolicy

NOT_DELEGATED = {"placement_rule"}
"""Methods that answer None instead."""
METHODS = [name for name, _ in inspect.getmembers(Policy, inspect.isfunction) if not name.startswith("_")]


def delegating():
    return DelegatingPolicy(UnifiedPolicy("inner", CacheConfig(cells=64)))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_passed_on_with_its_arguments(monkeypatch, name):
    outer = delegating()
    parameters = list(inspect.signature(getattr(Policy, name)).parameters.values())[1:]
    given = [object() for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: object() for p in parameters if p.kind is p.KEYWORD_ONLY}
    answer, asked = object(), []

    def inner(*arguments, **keywords):
        asked.append((list(arguments), keywords))
        return answer

    monkeypatch.setattr(outer.inner, name, inner)
    found = getattr(outer, name)(*given, **named)
    if name in NOT_DELEGATED:
        assert (found, asked) == (None, [])
    else:
        assert asked == [(given, named)]
        if inspect.signature(getattr(Policy, name)).return_annotation != "None":
            assert found is answer


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NOT_DELEGATED])
def test_every_method_has_the_defaults_of_a_policy(name):
    def parameters(of):
        return [(p.name, p.default, p.kind) for p in inspect.signature(getattr(of, name)).parameters.values()]

    assert parameters(DelegatingPolicy) == parameters(Policy)


@pytest.mark.parametrize("name", available())
def test_every_declared_attribute_is_that_of_the_inner_policy(name):
    inner = available()[name](CacheConfig(cells=1024, sequences=2, max_tokens=256))
    outer = DelegatingPolicy(inner)
    declared = DECLARED
    assert {*declared} >= {"name", "capacity", "groups", "kernel", "block_size", "unbounded", "can_free_while_decoding"}
    for field in (*declared, "max_sequence_tokens"):
        assert getattr(outer, field) == getattr(inner, field)
