"""The interface for policies of one's own: what it is, that it is as it was, and that the page says so.

After a change, ``python -m tests.policies.test_api`` writes the signatures anew.
"""

import ast
import dataclasses
import inspect
import re
from typing import get_args

import pytest

from policies import api, compiled
from tests.docs.pages import rows, sections
from tests.paths import DATA, ROOT
from tests.worlds import printed

SIGNATURES = DATA / f"policies_api_{api.API_VERSION}.txt"
EXAMPLE = ROOT / "examples" / "own-policy"
PURE = {compiled.PURE: "1"}
"""Compiled classes have no annotations to read."""
PROGRAM = "from tests.policies.test_api import described; print(*described(), sep='\\n')"


def _made():
    """Objects by the names of their classes, whose fields are only to be seen once there is one."""
    made = {one.__class__.__name__: one for one in (api.Row(0), api.PassReads(1), api.GroupReads())}
    rule = type("Rule", (api.PlacementRule,), dict.fromkeys(api.PlacementRule.__abstractmethods__))
    return made | {"PlacementRule": rule(1, 1)}


def described():
    """A line for each name, signature, field and flag of the interface."""
    objects = _made()
    for name in api.__all__:
        value = getattr(api, name)
        if inspect.isfunction(value):
            yield f"{name}{inspect.signature(value)}"
            continue
        yield f"{name}: {', '.join(get_args(value))}" if name == "Kernel" else name
        if not inspect.isclass(value):
            continue
        if dataclasses.is_dataclass(value):
            yield from (f"{name}.{field.name}: {field.type}{_default(field)}" for field in dataclasses.fields(value))
        else:
            for of in _layers(value):
                defaults = getattr(of, "_field_defaults", vars(of))
                for field, kind in inspect.get_annotations(of).items():
                    default = _shown(defaults[field]) if field in defaults else ""
                    yield f"{name}.{field}: {getattr(kind, '__forward_arg__', kind)}{default}"
        yield from _methods(value)
        yield from (f"{name}.{field}" for field in getattr(objects.get(name), "__dict__", ()) if field[0] != "_")


def _layers(kind):
    """A class and those of ours that it is made of."""
    return [of for of in kind.__mro__ if of is kind or (kind is api.Policy and of.__module__.startswith("policies"))]


def _shown(default):
    return f" = {default!r}" if isinstance(default, bool | int | float | str | tuple | None) else " = ..."


def _default(field):
    if field.default is not dataclasses.MISSING:
        return _shown(field.default)
    return " = ..." if field.default_factory is not dataclasses.MISSING else ""


def _methods(kind):
    for name, value in {name: value for of in reversed(_layers(kind)) for name, value in vars(of).items()}.items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(value, property):
            yield f"{kind.__name__}.{name}: {inspect.signature(value.fget).return_annotation}"
        elif inspect.isfunction(function) and not name.startswith("__" if kind is api.PlacementRule else "_"):
            abstract = " abstract" if getattr(function, "__isabstractmethod__", False) else ""
            yield f"{kind.__name__}.{name}{inspect.signature(function)}{abstract}"


@pytest.mark.slow
def test_a_change_of_the_interface_has_a_version_of_its_own():
    now = printed(PROGRAM, **PURE).splitlines()
    before = SIGNATURES.read_text(encoding="utf-8").splitlines()
    gone = [line for line in before if line not in now]
    assert not gone, "changed or gone: raise policies.api.API_VERSION, and write the signatures anew (see above)"
    added = [line for line in now if line not in before]
    assert not added, "added, which needs no other version: write the signatures anew (see above)"


@pytest.mark.slow
def test_what_is_compared_is_the_whole_interface():
    """The control: every name is in a line, and a default and an abstract method show."""
    lines = printed(PROGRAM, **PURE).splitlines()
    assert {re.match(r"\w+", line)[0] for line in lines} == set(api.__all__)
    assert "Policy.can_shift: bool = False" in lines
    assert "Row.length" in lines
    abstract = [line.split("(")[0] for line in lines if line.endswith(" abstract")]
    assert [name for name in abstract if name.startswith("Policy.")] == [
        "Policy.allocate",
        "Policy.free",
        "Policy.occupancy",
    ]
    assert {"PlacementRule._row_for", "PlacementRule.take_step"} < {*abstract}
    assert any(line.startswith("CacheConfig.cells: int") for line in lines)


def test_the_page_lists_the_names_of_the_interface():
    named = re.findall(
        r"`(\w+)`", "\n".join(name for name, _ in rows(sections("add-a-policy.md")["What may be imported"]))
    )
    assert sorted(named) == sorted(api.__all__)


def test_the_page_lists_what_a_policy_can_declare():
    told = set(re.findall(r"`(\w+)`", sections("add-a-policy.md")["What a policy declares"].split("| method |")[0]))
    declared = set(inspect.get_annotations(api.Policy))
    assert declared <= told


def imported_from_policies(path):
    """The names that a file imports from our policies, by module."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "policies":
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            found |= {alias.name: set() for alias in node.names if alias.name.split(".")[0] == "policies"}
    return found


def test_the_example_imports_nothing_else_of_ours():
    for path in EXAMPLE.rglob("*.py"):
        found = imported_from_policies(path)
        assert set(found) <= {"policies.api"}, path
        assert found.get("policies.api", set()) <= set(api.__all__), path


if __name__ == "__main__":
    SIGNATURES.write_text(printed(PROGRAM, **PURE), encoding="utf-8")
