"""Reading points that others measured, and choosing some of them."""

import pytest

from kvsim.engines.published import points as module
from kvsim.engines.published.points import chosen_points, published_file, read_points
from kvsim.errors import UserError
from tests.kvsim.engines.published import COLUMNS, ROWS, write_points


@pytest.fixture
def points(tmp_path):
    return {point.id: point for point in read_points(write_points(tmp_path / "points.csv"))}


def test_a_row_is_read_with_our_names_and_in_seconds(points):
    point = points["many"]
    assert (point.model, point.device, point.engine, point.version) == ("llama-3.1-8b", "h100_sxm", "vllm", "0.12.0")
    assert (point.isl, point.osl, point.concurrency, point.tp, point.pp, point.ep) == (512, 4, 16, 1, 1, 1)
    assert (point.ttft_s, point.tpot_s) == (0.040, 0.009)
    assert point.lengths == "512/4"


def test_a_model_that_is_not_known_keeps_its_name(points):
    assert points["unknown"].model == "someone/Some-Model-7B-FP8"


def test_more_devices_behind_the_experts_than_behind_attention_are_several_schedulers(points):
    assert points["shared"].dp == 2
    assert points["four"].dp == 1


def test_servers_that_are_apart_are_two_kinds(points):
    prefill, decode = points["halves"].halves
    assert (prefill.servers, decode.servers, points["halves"].tp) == (1, 2, 1)
    assert points["halves"].concurrency == 2 * 2
    assert points["halves"].servers == "1 x TP1 and 2 x TP1"
    assert (points["apart"].halves, points["apart"].concurrency) == (None, 0)


def test_a_third_may_be_looked_at_and_it_is_always_the_same(tmp_path):
    rows = [ROWS[0].replace("alone", f"point{i}", 1) for i in range(300)]
    read = read_points(write_points(tmp_path / "points.csv", *rows))
    looked_at = {point.id for point in read if point.looked_at}
    assert 75 < len(looked_at) < 125
    again = read_points(write_points(tmp_path / "again.csv", *reversed(rows)))
    assert {point.id for point in again if point.looked_at} == looked_at


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROWS[1].replace(",256,", ",many,"), "isl is 'many'; a number of at least 1 is expected"),
        (ROWS[1].replace(",4.0,", ",0,"), "batch_size is '0'; a number of at least 1 is expected"),
        (ROWS[1].replace(",20.0,", ",,"), "silicon_ttft_ms is ''; a number of at least 0 is expected"),
        (ROWS[1].replace(",8.0", ",nan"), "silicon_tpot_ms is 'nan'; a number of at least 0 is expected"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, said):
    path = write_points(tmp_path / "points.csv", ROWS[0], row)
    with pytest.raises(UserError) as error:
        read_points(path)
    assert str(error.value) == f"{path}, line 3: {said}"


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(COLUMNS.replace(",isl,", ",input,") + "\n")
    with pytest.raises(UserError, match="no column 'isl'; needed are id, backend, model_path"):
        read_points(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8 text is expected"):
        read_points(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_points(tmp_path / "none.csv")


def test_points_are_chosen_by_what_they_are(points):
    every = list(points.values())

    def ids(*only):
        return [point.id for point in chosen_points(every, only)]

    assert ids("model=llama-3.1-8b,isl=512") == ["many"]
    assert ids("isl=512", "id=many,id=four") == ["many"]
    assert ids("concurrency=1,concurrency=16") == ["alone", "many"]
    assert ids() == list(points)


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("gpu=h100", "KEY=VALUE is accepted, with a key of model, device, engine, version"),
        ("model", "'model'; KEY=VALUE is accepted"),
        ("device=h100", "no device of these points called 'h100'; did you mean 'h100_sxm'?"),
        ("isl=512,concurrency=4", "no concurrency of these points called '4'; there is 16"),
    ],
)
def test_a_choice_that_leaves_nothing_is_refused(points, only, said):
    with pytest.raises(UserError) as error:
        chosen_points(list(points.values()), [only])
    assert said in str(error.value)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"in aiconfigurator-core, which is not installed; install it with: .*\[gpu\]"):
        published_file()
