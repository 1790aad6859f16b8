"""The examples of property tests: the same in every run, whichever tests have run before in the process."""

import importlib

from hypothesis import given
from hypothesis import strategies as st


def test_examples_do_not_depend_on_what_is_loaded(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_many_numbers.py").write_text(f"NUMBERS = {list(range(10**6, 10**6 + 500))}\n")
    drawn = []

    @given(st.lists(st.integers()))
    def draw(numbers):
        drawn.append(numbers)

    draw()
    importlib.import_module("of_many_numbers")
    draw()
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
