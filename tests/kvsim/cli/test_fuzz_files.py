"""Random scenario and profile files: a few of what ``fuzz_files`` goes through for as long as it is let."""

import pytest

from tests.kvsim.cli import fuzz_files


@pytest.mark.parametrize("number", range(8))
def test_a_random_file_is_answered_well_or_in_lines(number, tmp_path):
    assert fuzz_files.case(number) == fuzz_files.case(number)
    assert fuzz_files.fault_of(number, tmp_path) is None


def test_what_is_answered_otherwise_is_told(monkeypatch, tmp_path):
    """The control."""

    def wrong(*_):
        raise KeyError("x")

    monkeypatch.setattr(fuzz_files, "command", wrong)
    assert fuzz_files.fault_of(1, tmp_path).startswith("KeyError: 'x' (")
