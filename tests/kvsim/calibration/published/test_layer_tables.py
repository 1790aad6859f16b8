"""Tables of the kernels of one layer: how passes are put together, what a fit finds in them, and what is refused."""

import pandas as pd
import pytest

from kvsim.calibration.published.imports import ImportOptions, import_tables
from kvsim.calibration.published.layer_tables import Link, read_layer_tables
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_price import PassPrice
from kvsim.errors import UserError
from kvsim.model.memory_shapes import memory_shape
from policies import Group
from tests.kvsim.calibration.published.layer_table_files import LAYERS, dense_us, write_tables
from tests.kvsim.costs.passes import cell_s
from tests.paths import SHARED

LLAMA = "llama-3.1-8b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables") / "small")


@pytest.fixture(scope="module")
def fitted(folder):
    return import_tables(folder)


def parts_of(folder, **given):
    return read_layer_tables(folder).parts(memory_shape(LLAMA), most_cells=40_000, **given)


def test_the_parts_of_a_pass_are_the_sums_of_their_kernels(folder):
    parts, _ = parts_of(folder, graphs=False)
    layer = dense_us(8) * (len(LAYERS) + 1) / len(LAYERS)  # Two norms in a layer.
    assert parts.work[8] == pytest.approx((32 * layer + 2 * (5 + 8 * 0.001)) * 1e-6)
    assert parts.head[8] == pytest.approx((1100 + 8 * 7 + 20 + 8 * 0.5) * 1e-6)
    assert parts.decode[8, 512] == pytest.approx(32 * (8 + 8 * 512 * 0.005) * 1e-6)


def test_small_passes_are_padded_to_the_next_cuda_graph(folder):
    (plain, _), (padded, _) = parts_of(folder, graphs=False), parts_of(folder)
    assert padded.work[65] == padded.work[72] > padded.work[64]
    assert padded.work[1024] == plain.work[1024]


def test_what_the_device_cannot_hold_is_left_out(folder):
    _, tested = read_layer_tables(folder).parts(memory_shape(LLAMA), most_cells=5_000)
    assert max(sum(cells for _, cells in s.scans) for s in tested.passes) <= 5_000


def test_an_all_reduce_is_added_where_devices_share_the_model(folder):
    alone, _ = parts_of(folder, graphs=False)
    shared, _ = parts_of(folder, graphs=False, link=Link(2, gb_s=16, latency_us=20))
    message = 2 * memory_shape(LLAMA).d_model * 64
    assert shared.work[64] - alone.work[64] == pytest.approx(65 * 2 * (message / 2 / 16e9 + 20e-6))


@pytest.mark.slow
def test_the_profile_has_what_a_cell_costs_in_each_regime(fitted):
    profile = fitted.profile
    price = PassPrice(profile, "gather", (Group(0),))
    assert cell_s(price, 32) == pytest.approx(32 * 0.005e-6, rel=0.02)
    assert cell_s(price, 32, prompt=256) == pytest.approx(32 * 0.01e-6, rel=0.05)
    for errors in profile.held_out.values():
        assert errors.error_median < 0.02
        assert errors.error_p95 < 0.1


def test_the_profile_says_what_it_is_of(fitted):
    profile = fitted.profile
    assert (profile.name, profile.device, profile.model) == ("rtx4090-llama-3.1-8b", "rtx4090", LLAMA)
    assert (profile.engine, profile.type_k, profile.machine) == ("vllm 0.19.0", "f16", None)
    assert profile.host is None
    assert "since 0.14 vLLM prepares a step" in profile.basis
    with pytest.raises(UserError, match="not of a machine that kvsim can measure"):
        profile.measured_on  # noqa: B018


@pytest.mark.slow
def test_a_profile_survives_its_file(fitted, tmp_path):
    written = fitted.save(tmp_path / "mine.json")
    assert [path.name for path in written] == ["mine.json", "mine.png"]
    assert load_profile(str(written[0])) == fitted.profile


@pytest.mark.slow
def test_the_same_tables_give_the_same_profile(folder, fitted):
    again = import_tables(folder).profile
    assert again.model_copy(update={"measured": fitted.profile.measured}) == fitted.profile


@pytest.mark.slow
def test_the_host_is_given(folder):
    profile = import_tables(folder, ImportOptions(host_ms=1.5)).profile
    assert profile.host.seconds == 0.0015
    assert "The host adds 1.50 ms to a step: given with --host-ms" in profile.basis


@pytest.mark.slow
def test_another_model_with_the_same_attention_is_inferred(folder, fitted):
    profile = import_tables(folder, ImportOptions(model="qwen3-8b")).profile
    assert profile.name == "rtx4090-qwen3-8b"
    said = " ".join(profile.source.notes)
    assert "The tables are of llama-3.1-8b" in said
    assert "scaled by 0.857, the head and the sampler by 1.185" in said
    ours, theirs = (cell_s(PassPrice(p, "gather", (Group(0),)), 32) for p in (profile, fitted.profile))
    assert ours == pytest.approx(36 / 32 * theirs, rel=0.02)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ImportOptions(model="qwen3-14b"), "those of qwen3-14b cannot be inferred from them"),
        (ImportOptions(model="llama-3.1-8"), "no model called 'llama-3.1-8'"),
        (ImportOptions(device="h100"), "no device called 'h100'; did you mean 'h100_sxm'"),
        (ImportOptions(tp=2), "the tables say nothing of the link between the devices; give --link-gb-s"),
        (ImportOptions(link_gb_s=16.0), "only with --tp or --ep, 2 or more"),
        (
            ImportOptions(device="h100_sxm"),
            "--device h100_sxm: the tables of .* are of another one, NVIDIA GeForce RTX",
        ),
        (ImportOptions(vllm_version="banana"), "no version of vLLM is called 'banana'"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(folder, options, said):
    with pytest.raises(UserError, match=said):
        import_tables(folder, options)


def _edit(folder, tmp_path, name, change):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change(copy / name)
    return copy


def _negative_time(path):
    table = pd.read_csv(path)
    table.loc[3, "time_us"] = -1.0
    table.to_csv(path, index=False)


def _no_column(path):
    pd.read_csv(path).drop(columns="tokens").to_csv(path, index=False)


def _no_layer(path):
    table = pd.read_csv(path)
    table[table["layer"] != "o_proj"].to_csv(path, index=False)


def _half_a_token(path):
    table = pd.read_csv(path).astype({"kv_decode": float})
    table.loc[0, "kv_decode"] = 0.5
    table.to_csv(path, index=False)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "dense.csv",
            _negative_time,
            r"dense.csv: row 5: time_us is -1.0; a time above 0 and up to 1e[+]08, in microseconds,",
        ),
        ("dense.csv", _no_column, r"dense.csv: no column 'tokens'; needed are layer, tokens, time_us"),
        ("dense.csv", _no_layer, r"dense.csv: no rows of the layer o_proj"),
        ("attention.csv.gz", _half_a_token, r"attention.csv.gz: row 2: kv_decode is 0.5; a whole number from 0"),
        ("dense.csv", lambda path: path.write_text(""), r"dense.csv: cannot be read as CSV"),
        (
            "attention.csv.gz",
            lambda path: path.write_bytes(path.read_bytes()[:200]),
            r"attention.csv.gz: cannot be read",
        ),
        ("attention.csv.gz", lambda path: path.unlink(), r"no attention.csv or attention.csv.gz in it"),
        ("meta.yaml", lambda path: path.write_text("a: [1"), r"meta.yaml: not YAML"),
        ("meta.yaml", lambda path: path.unlink(), r"meta.yaml does not say gpu; give --device"),
    ],
    ids=["negative time", "no column", "no layer", "half a token", "empty", "cut", "missing", "no yaml", "no meta"],
)
def test_tables_that_cannot_be_read_take_one_line(folder, tmp_path, name, change, said):
    with pytest.raises(UserError, match=said) as caught:
        import_tables(_edit(folder, tmp_path, name, change))
    assert "\n" not in str(caught.value)


PUBLISHED = SHARED / "reference" / "vllm-gpu" / "profiles"


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published tables are not here")
@pytest.mark.parametrize("name", ["rtx4090-llama-3.1-8b", "rtxpro6000-qwen3-32b"])
def test_published_tables_predict_passes_between_their_entries_within_the_aim(name):
    for errors in import_tables(PUBLISHED / name).profile.held_out.values():
        assert errors.error_median <= 0.02
        assert errors.error_p95 <= 0.10
