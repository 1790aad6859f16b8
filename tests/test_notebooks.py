"""The notebooks run from top to bottom, are saved with their outputs, and use the public interface alone."""

import ast
import re

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

import kvsim
from tests.paths import ROOT

OURS = {"kvsim", "policies", "workloads", "real_engine", "tests", "benchmarks"}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


FEWER = {
    "01-first-comparison": {
        'kvsim.load("chat", cache__cells=': 'kvsim.load("chat", workload__requests=150, cache__cells='
    },
    "02-calibration": {"seconds=12": "seconds=4", "requests=10, repeats=3": "requests=4, repeats=2"},
    "03-memory": {'memory("small"': 'memory("tiny"'},
    "04-workloads": {"range(1, 6)": "(1, 2)", "range(1, 4)": "(1,)", "(1.0, 2.0, 4.0, 8.0)": "(1.0, 8.0)"},
    "05-parameter-sweep": {
        "REQUESTS = 300": "REQUESTS = 60",
        "requests=200": "requests=40",
        '"most": 20': '"most": 6',
        '"points": 32': '"points": 8',
    },
    "06-policy-comparison": {
        "compare(name, POLICIES": "compare(kvsim.load(name, workload__requests=150), POLICIES",
        "replications=5": "replications=2",
        "replications=3": "replications=2",
        "replications=12": "replications=3",
        "workload__requests=200": "workload__requests=60",
    },
    "07-validate-against-real-engine": {
        "seconds=10": "seconds=4",
        '"paged", "ring", "adaptive"]': '"paged"]',
        "repeats=3": "repeats=1",
        "requests=10,": "requests=8,",
        "requests=10)": "requests=4)",
        "(64, 1900, 3800)": "(64, 3800)",
        "ROUNDS = 15": "ROUNDS = 4",
    },
    "08-why-does-it-slow-down": {
        "repeats=8": "repeats=3",
        "REQUESTS = 1200": "REQUESTS = 300",
        "(10, 100, 1000, 4000)": "(10, 100, 1000)",
        '": kvsim.load("chat")': '": kvsim.load("chat", workload__requests=80)',
        "workload__requests=200": "workload__requests=80",
        "seeds=(1, 2, 3)": "seeds=(1, 2)",
    },
    "09-choose-your-settings": {
        "slo=promise, requests=200": "slo=promise, requests=60",
        "workload__requests=400": "workload__requests=100",
        "(11, 12, 13)": "(11,)",
    },
}
"""What runs less often here than in what was saved: the figures are for readers, the way to them is tested."""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell put out: names of streams and types of results, in order; a stream may come in several pieces."""
    found = []
    for output in cell.outputs:
        kind = output.get("name") or sorted(output.get("data", {}))
        if not (isinstance(kind, str) and found[-1:] == [kind]):
            found.append(kind)
    return found


def private_imports(source):
    """What a cell imports of ours that is not public."""
    found = []
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in OURS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name not in {"kvsim", *(f"kvsim.{name}" for name in kvsim.__all__)}]


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_a_notebook_runs_and_was_saved_with_its_outputs(path, tmp_path):
    saved, fresh = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    for often, seldom in FEWER.get(path.stem, {}).items():
        assert any(often in cell.source for cell in code_cells(fresh)), often
        for cell in code_cells(fresh):
            cell.source = cell.source.replace(often, seldom)
    NotebookClient(fresh, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert [kinds(cell) for cell in code_cells(saved)] == [kinds(cell) for cell in code_cells(fresh)]
    assert [cell.execution_count for cell in code_cells(saved)] == list(range(1, len(code_cells(saved)) + 1))


@each_notebook
def test_a_notebook_tells_nothing_of_the_machine_s_folders_or_clock(path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert "execution" not in cell.metadata
        for output in cell.outputs:
            shown = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
            assert not re.search(r"/(home|root|tmp|Users|var)/|[A-Z]:\\", "\n".join(shown))


@each_notebook
def test_a_notebook_imports_the_public_interface_alone(path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert private_imports(cell.source) == []


def test_private_imports_are_found():
    """The control: what the notebooks must not do is recognised, and what they may do is let pass."""
    source = (
        "%matplotlib inline\nimport kvsim, pandas\nimport kvsim.costs.profile\n"
        "from kvsim import load_scenario, reports\nimport policies"
    )
    assert private_imports(source) == ["kvsim.costs.profile", "kvsim.reports", "policies"]
