"""Files of benchmarks, as their tools wrote them on a processor (``tests/data/bench_files/README.md``)."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.calibration.bench_calibration import calibrate_from
from kvsim.calibration.bench_files.reading import read_bench_file
from kvsim.calibration.bench_subject import BenchOptions
from kvsim.errors import UserError
from tests.paths import ROOT

DATA = ROOT / "tests" / "data" / "bench_files"
LENGTHS = "--input-len 256 --output-len 64 --batch-size 4"
FILES = sorted(path.name for path in DATA.iterdir() if path.name != "README.md")


def read(name, flags=LENGTHS):
    return read_bench_file(DATA / name, flags)


def refused(tmp_path, text, flags=""):
    file = tmp_path / "given"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_bench_file(file, flags)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(str(file))


def test_there_is_an_example_of_each_form():
    assert len(FILES) == 12


@pytest.mark.parametrize(
    ("form", "seconds"),
    [("json", 7.323719569), ("jsonl", 6.812703974), ("csv", 5.163029762), ("md", 256 / 34.60)],
)
def test_llama_bench_says_the_same_in_each_form(form, seconds):
    points = read(f"llama-bench.{form}")
    assert [point.title for point in points] == ["pp256", "tg32", "pp256 @ d1024", "tg32 @ d1024"]
    assert [point.kind for point in points] == ["prompt", "decode"] * 2
    set_up = points[0].set_up
    assert (set_up.tool, set_up.engine, set_up.weights) == ("llama-bench", "llamacpp", "q4_1")
    assert set_up.parameters == pytest.approx(134.5e6, rel=1e-3)
    assert set_up.threads == 1
    assert points[0].ubatch == 512
    assert points[0].seconds == pytest.approx(seconds, rel=1e-9)
    assert 0 < points[0].spread < 0.1


def test_only_tables_leave_the_processor_out():
    assert {form: read(f"llama-bench.{form}")[0].set_up.device is None for form in ("json", "jsonl", "csv", "md")} == {
        "json": False,
        "jsonl": False,
        "csv": False,
        "md": True,
    }


def test_a_table_says_the_device_that_is_logged_before_it(tmp_path):
    file = tmp_path / "pasted.txt"
    text = (DATA / "llama-bench.md").read_text().replace("| CPU ", "| CUDA")
    file.write_text(
        "ggml_cuda_init: found 1 CUDA devices:\n  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6\n" + text
    )
    set_up = read_bench_file(file)[0].set_up
    assert (set_up.device, set_up.threads) == ("NVIDIA GeForce RTX 3090", None)


@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_llama_batched_bench_has_prompts_and_decodes(form):
    points = read(f"llama-batched-bench.{form}")
    assert [point.title for point in points] == [
        "pp128",
        "tg16 @ d128",
        "2 x pp128",
        "2 x tg16 @ d128",
        "4 x pp128",
        "4 x tg16 @ d128",
    ]
    assert {point.ubatch for point in points} == {512}
    assert points[0].set_up.flash


def test_vllm_serve_tells_of_steps_and_of_prompts_that_were_alone():
    alone, loaded = read("vllm-serve-1.json"), read("vllm-serve-4.json")
    assert [point.kind for point in alone] == ["serve", "prompt"]
    assert (alone[1].prompt, alone[0].new, alone[0].sequences) == (256, 64, 1.0)
    (served,) = loaded
    assert 2 < served.sequences < 4
    assert served.seconds == pytest.approx(json.loads((DATA / "vllm-serve-4.json").read_text())["mean_tpot_ms"] / 1e3)
    assert served.set_up.engine == "vllm"


def test_vllm_latency_and_throughput_are_told_their_lengths(tmp_path):
    (batch,) = read("vllm-latency.json")
    assert (batch.title, batch.kind) == ("4 x pp256+tg64", "batch")
    (many,) = read("vllm-throughput.json", "--random-input-len=256 --random-output-len 64")
    assert many.title == "24 x pp256+tg64"
    for name in ("vllm-latency.json", "vllm-throughput.json"):
        assert "does not say how long its requests were; add what it was started with, such as --flags" in refused(
            tmp_path, (DATA / name).read_text()
        )
    text = (DATA / "vllm-throughput.json").read_text()
    assert "24 requests have 7,680 tokens, but --flags say 512 and 64" in refused(
        tmp_path, text, "--input-len 512 --output-len 64"
    )
    assert "--input-len is '-3', not a number" in refused(tmp_path, text, "--input-len -3 --output-len 64")


def test_guidellm_has_a_row_for_each_benchmark():
    points = read("guidellm.json")
    assert [point.kind for point in points] == ["serve", "prompt", "serve"]
    assert [point.prompt for point in points] == [256] * 3
    assert 2 < points[2].sequences < 4
    assert points[0].set_up.build == "0.8.1"


def test_aiperf_says_its_device_and_model():
    (served,) = read("aiperf.json")
    assert (served.prompt, served.new) == (550, 150)
    assert served.seconds == pytest.approx(12.5e-3)
    assert served.set_up.device == "NVIDIA H100 80GB HBM3"
    assert served.set_up.model == "meta-llama/Llama-3.1-8B-Instruct"


def test_wrong_rows_are_named(tmp_path):
    rows = json.loads((DATA / "llama-bench.json").read_text())
    rows[2]["avg_ns"] = -1
    assert refused(tmp_path, json.dumps(rows)) == ": row 3: avg_ns: input should be greater than 0.000001, got -1"
    del rows[2]["avg_ns"]
    assert refused(tmp_path, json.dumps(rows)) == ": row 3: avg_ns: field required"
    table = (DATA / "llama-bench.md").read_text()
    assert refused(tmp_path, table.replace("pp256 @", "xx256 @")).startswith(": line 5: test is 'xx256 @ d1024'")
    batched = (DATA / "llama-batched-bench.txt").read_text().splitlines()
    batched = [line.rsplit("|", 2)[0] + "|" if line.startswith("|   128") else line for line in batched]
    assert "9 columns where the table has 10" in refused(tmp_path, "\n".join(batched))


def test_other_files_are_refused_with_what_is_accepted(tmp_path):
    known = (
        ": not the result of a benchmark that is known; accepted are files of llama-bench -o json|jsonl|csv|md, "
        "llama-batched-bench, vllm bench, GuideLLM and AIPerf"
    )
    for text in ("", "hello\n", "{}", "[]", "[1]", '{"benchmarks": 3}', "a,b\n1,2\n", "null", '"text"'):
        assert refused(tmp_path, text) == known
    assert refused(tmp_path, "[" * 100_000) == known
    assert "not JSON, though it begins with a brace" in refused(tmp_path, "{\n{}")
    (tmp_path / "given").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text in UTF-8"):
        read_bench_file(tmp_path / "given")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_bench_file(tmp_path / "none")
    with pytest.raises(UserError, match="cannot be read"):
        read_bench_file(tmp_path)


OTHERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value, path=()):
    """The paths to all values of a JSON text."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_json_with_any_value_replaced_is_read_or_refused(tmp_path, name, data):
    whole = json.loads((DATA / name).read_text())
    *path, last = data.draw(st.sampled_from([path for path in places(whole) if path]))
    inner = whole
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(OTHERS)
    read_or_refuse(tmp_path, json.dumps(whole))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_text_with_any_part_replaced_is_read_or_refused(tmp_path, name, data):
    text = (DATA / name).read_text()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 40, len(text))))
    read_or_refuse(tmp_path, text[:start] + data.draw(st.text(max_size=8)) + text[stop:])


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_with_any_number_correct_a_profile_or_are_refused(tmp_path, data):
    rows = json.loads((DATA / "llama-bench.json").read_text())
    key = data.draw(st.sampled_from(["n_prompt", "n_gen", "n_depth", "n_ubatch", "avg_ns", "stddev_ns"]))
    rows[0][key] = data.draw(st.one_of(st.integers(0, 2**40), st.floats(1e-300, 1e300)))
    file, device = tmp_path / "mutated.json", tmp_path / "mine.toml"
    file.write_text(json.dumps(rows))
    device.write_text('kind = "cpu"\nmemory_bytes = 8_000_000_000\nbandwidth_gb_s = 20\ntflops = 0.2')
    said = ""
    try:
        done = calibrate_from([file], BenchOptions(model="smollm2-135m", device=str(device)))
        assert np.isfinite(done.correction.factors.logs).all()
    except UserError as error:
        said = str(error)
    assert "\n" not in said


def read_or_refuse(tmp_path, text):
    file = tmp_path / "mutated"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    points, said = [], ""
    try:
        points = read_bench_file(file, LENGTHS)
    except UserError as error:
        said = str(error)
    assert bool(points) != bool(said)
    assert "\n" not in said
    assert all(0 < point.seconds < float("inf") for point in points)
