"""Policies from elsewhere: found, named, left out with a reason, and their faults put down to a file and a line."""

import sys

import pytest

from policies import CacheConfig, PluginError, PluginWarning, available, load_plugin, plugins, why_left_out
from policies.plugins import loaded_files, reload_files
from tests.policies.invariants.subjects import FakeEntryPoint

POLICY = """
from policies.layouts.unified import UnifiedPolicy

class Mine(UnifiedPolicy):
    '''As contiguous, under another name.

    And more.
    '''

    def __init__(self, config):
        super().__init__("whatever", config)
"""
SMALL = CacheConfig(cells=64)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A function that writes a file, and forgets afterwards what was loaded from it."""
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# Single files


def test_the_policies_of_a_file_are_available_by_name(file):
    path = file(POLICY + "POLICIES = {'mine': Mine, 'mine-too': lambda config: Mine(config)}\n")
    assert load_plugin(path) == ("mine", "mine-too")
    assert list(available())[-2:] == ["mine", "mine-too"]
    found = available()["mine"]
    assert (found.summary, found.origin.package) == ("As contiguous, under another name.", str(path))
    assert [available()[name](SMALL).name for name in ("mine", "mine-too")] == ["mine", "mine-too"]


def test_a_file_imports_modules_beside_it(file):
    file("from policies.layouts.ring import RingPolicy as Base\n", "beside_it.py")
    load_plugin(file("from beside_it import Base\nPOLICIES = {'mine': lambda config: Base('ring', config)}\n"))
    assert available()["mine"](SMALL).unbounded


def test_a_module_beside_the_file_hides_none_that_is_installed(file):
    file("x = 1\n", "fractions.py")
    path = file("import fractions\nfractions.Fraction\nPOLICIES = {'mine': print}\n")
    with pytest.warns(
        PluginWarning, match=r"mine\.py: imports .*fractions\.py, not .*fractions\.py, which has the same"
    ):
        load_plugin(path)


def test_a_file_that_has_changed_is_loaded_anew_with_the_modules_beside_it(file):
    path = file("from kept_beside import made\nPOLICIES = {'mine': made}\n")
    versions = set()
    for layout in ("Reserved", "Growing"):
        base = f"policies.layouts.sequence_regions import {layout}Policy"
        file(f"from {base}\ndef made(config):\n    return {layout}Policy('mine', config)\n", "kept_beside.py")
        load_plugin(path)
        versions.add(available()["mine"].origin.digest)
        assert type(available()["mine"](SMALL)).__name__ == f"{layout}Policy"
        assert len(versions) == (1 if layout == "Reserved" else 2)
        load_plugin(path)
        versions.add(available()["mine"].origin.digest)
    assert len(versions) == 2


def test_a_worker_loads_the_files_of_the_process_that_sent_the_work(file, monkeypatch):
    path = file(POLICY + "POLICIES = {'mine': Mine}\n")
    load_plugin(path)
    sent = loaded_files()
    monkeypatch.setattr(plugins, "_files", {})
    assert "mine" not in available()
    reload_files(sent)
    assert "mine" in available()
    file(POLICY + "POLICIES = {'other': Mine}\n")
    monkeypatch.setattr(plugins, "_files", {})
    with pytest.raises(PluginError, match=r"mine\.py: changed while it was in use"):
        reload_files(sent)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n\nimport no_such_module\n", r"mine\.py:3: ModuleNotFoundError: No module named 'no_such_module'$"),
        (
            "from policies.api import NoSlot\n",
            r"mine\.py:1: ImportError: policies.api: NoSlot is called OutOfCells since",
        ),
        ("def f(:\n", r"mine\.py:1: SyntaxError: invalid syntax$"),
        ("import sys\nsys.exit('done')\n", r"mine\.py:2: SystemExit: done$"),
        ("x = 1\n", r"mine\.py: no POLICIES; POLICIES = {'name': class} is expected at its end$"),
        ("POLICIES = {}\n", "no POLICIES"),
        ("POLICIES = {'paged': print}\n", r"mine\.py: POLICIES: 'paged' is the name of a built-in policy$"),
        ("POLICIES = {'split-regions': print}\n", "'split-regions' is the name of a built-in policy"),
        ("POLICIES = {'a/b': print}\n", "'a/b' is not a valid name; letters, digits"),
        ("POLICIES = {'mine': 3}\n", "'mine': a class or another callable is expected, got 3"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(file, text, message):
    with pytest.raises(PluginError, match=message) as refused:
        load_plugin(file(text))
    assert len(str(refused.value).splitlines()) == 1
    assert loaded_files() == ()


def test_a_fault_in_a_module_beside_the_file_is_named_there(file):
    file("x = 1\n\n\nx.y\n", "faulty_beside.py")
    with pytest.raises(PluginError, match=r"faulty_beside\.py:4: AttributeError: 'int' object has no attribute 'y'$"):
        load_plugin(file("import faulty_beside\nPOLICIES = {}\n"))


@pytest.mark.parametrize("name", ["gone.py", "mine.txt", "."])
def test_what_is_no_file_of_python_is_refused(name, file, tmp_path):
    file("", "mine.txt")
    with pytest.raises(PluginError, match=r"no such file|a Python file is expected"):
        load_plugin(tmp_path / name)


def test_a_name_belongs_to_one_file(file):
    load_plugin(file(POLICY + "POLICIES = {'mine': Mine}\n"))
    with pytest.raises(PluginError, match=r"other\.py: POLICIES: 'mine' is a policy of .*mine\.py already"):
        load_plugin(file(POLICY + "POLICIES = {'mine': Mine}\n", "other.py"))


# Building


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("Mine", r"mine\.py:12: AttributeError: 'CacheConfig' object has no attribute 'nothing'"),
        ("lambda config: 'nothing'", r"mine\.py:13: mine gives 'str'; a policies\.api\.Policy is expected"),
        ("Bare", r"mine\.py:15: Bare does not set capacity, groups, kernel$"),
        ("Half", r"mine\.py:\d+: TypeError: Can't instantiate abstract class Half with abstract methods? .*allocate"),
        ("Odd", r"mine\.py:\d+: kernel: 'flash'; accepted: masked, tiled, gather, sliced$"),
    ],
)
def test_a_policy_that_cannot_be_built_is_named_with_its_line(file, made, message):
    text = f"""{POLICY}        config.nothing
POLICIES = {{'mine': {made}}} if {made == "lambda config: 'nothing'"} else {{}}

class Bare(UnifiedPolicy):
    def __init__(self, config):
        pass

class Half(UnifiedPolicy.__mro__[1]):
    def __init__(self, config):
        pass

class Odd(UnifiedPolicy):
    def __init__(self, config):
        super().__init__('odd', config)
        self.kernel = 'flash'

POLICIES = POLICIES or {{'mine': {made}}}
"""
    load_plugin(file(text))
    with pytest.raises(PluginError, match=message):
        available()["mine"](SMALL)


def test_a_policy_that_refuses_its_settings_is_not_at_fault(file):
    load_plugin(file(POLICY + "        raise ValueError('too few cells')\nPOLICIES = {'mine': Mine}\n"))
    with pytest.raises(ValueError, match=r"^too few cells$") as refused:
        available()["mine"](SMALL)
    assert not isinstance(refused.value, PluginError)


# Installed packages


class Broken(FakeEntryPoint):
    """A package that cannot be imported."""

    def __init__(self, name, error):
        def load():
            raise error

        super().__init__(name, None)
        self.load = load


def test_a_plug_in_that_cannot_be_imported_is_left_out_with_a_line(monkeypatch):
    points = [Broken("mine", ImportError("no torch\nhere")), FakeEntryPoint("other", lambda config: None)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    with pytest.warns(PluginWarning) as told:
        assert "other" in available()
    (line,) = [str(warning.message) for warning in told]
    assert line.startswith("plug-in 'mine' of tests.policies.invariants.subjects without a version is left out: ")
    assert line.endswith("ImportError: no torch")
    assert "mine" not in available()
    assert why_left_out("mine") == line
    assert why_left_out("other") is None


def test_a_name_that_is_registered_twice_is_that_of_the_first(monkeypatch):
    first, second = (FakeEntryPoint("mine", factory) for factory in (len, max))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [first, second])
    with pytest.warns(PluginWarning, match="'mine' is registered twice"):
        assert available()["mine"].summary.startswith("Return the number of items")
    assert why_left_out("mine") is None


def test_what_is_no_callable_is_left_out(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [FakeEntryPoint("mine", 3)])
    with pytest.warns(PluginWarning, match="'mine': a class or another callable is expected, got 3"):
        assert "mine" not in available()
