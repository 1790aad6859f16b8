"""Who may know whom: the dependencies that the architecture forbids."""

import ast

import pytest

from tests.paths import ROOT

FACES = {"cli.py", "calibration", "live.py", "llama_studies.py", "memory.py", "recording.py", "validation.py"}


def imported(path):
    """Top-level packages that a file imports, at any depth, but for type checking."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("policies", {"kvsim", "real_engine", "workloads", "simpy"}),
        ("workloads", {"kvsim", "real_engine", "policies", "simpy"}),
        ("real_engine", {"simpy"}),
        ("kvsim", {"real_engine"}),
    ],
)
def test_nobody_imports_upward(package, forbidden):
    home = ROOT / package
    files = [p for p in home.rglob("*.py") if not (package == "kvsim" and p.relative_to(home).parts[0] in FACES)]
    assert files
    for path in files:
        assert not imported(path) & forbidden, f"{path.name} imports {imported(path) & forbidden}"


def test_the_simulation_runs_without_the_engine():
    """Importing the core pulls in no part of the real engine."""
    import subprocess
    import sys

    code = "import sys, kvsim, kvsim.simulation.run; sys.exit(any(m.startswith('real_engine') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_engine_runs_without_what_only_the_simulation_needs():
    """Whoever only runs the engine is spared the memory of large packages."""
    import subprocess
    import sys

    code = (
        "import sys, real_engine.footprint; sys.exit(bool({'pandas', 'scipy', 'pydantic', 'simpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_what_they_say_whatever_was_imported_before():
    """Also where a module has the same name as the function in it."""
    import kvsim
    import kvsim.advice.memory
    import kvsim.experiments.prefix_cache

    for name in kvsim.__all__:
        assert getattr(kvsim, name).__name__ == name
    assert {*kvsim.__all__} <= {*dir(kvsim)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvsim.nothing
