"""Studies of the real llama.cpp with a tiny model: their cases, not their times."""

import pytest

from benchmarks.llama_studies.studies import measure_defragmentation, measure_holes, measure_shift
from kvsim.errors import UserError
from tests.real_engine.llamacpp.conftest import FOLDER

pytestmark = pytest.mark.llama


def test_studies_measure_the_cases_asked_for(tiny):
    model = str(tiny)
    holes = measure_holes(model, library=FOLDER, spans=(256, 512), rounds=2)
    assert len(holes.samples) == 2 * 2 * 2 * 2
    assert (holes.samples["seconds"] > 0).all()
    assert holes.table["high_n_kv"].tolist() == [256, 512] * 2
    assert set(holes.table["low_n_kv"]) <= {160, 256}

    shift = measure_shift(model, library=FOLDER, cells=(256, 2048), rounds=3)
    assert shift.table["cells"].tolist() == [256, 2048]

    passes = [(0, 0), (1, 1), (1, 200), (3, 1), (50, 3)]
    if holes.era == "A":
        # The number of runs and cells is checked where it is measured.
        study = measure_defragmentation(model, library=FOLDER, passes=passes, rounds=2)
        assert study.table[["runs", "cells"]].to_numpy().tolist() == [[0, 0], [1, 1], [1, 200], [3, 3], [50, 150]]
        most = (8192 - 2 * 2) // (6 * 2)
        with pytest.raises(UserError, match=f"one moves at most {most}$"):
            measure_defragmentation(model, library=FOLDER, passes=[*passes, (most + 1, 1)], rounds=1)
    else:
        with pytest.raises(UserError, match=r"it moves nothing, .* 0\.3\.8 has it"):
            measure_defragmentation(model, library=FOLDER, passes=passes, rounds=1)


def test_an_unloadable_model_is_refused_in_one_line(tmp_path):
    path = tmp_path / "not.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"llama\.cpp cannot load it") as raised:
        measure_holes(str(path), library=FOLDER, rounds=1)
    assert "\n" not in str(raised.value)
