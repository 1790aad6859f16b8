"""Parts of the llama.cpp interface that need no llama.cpp: parsing its log, refusals, and broken packages."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvsim.errors import UserError
from kvsim.installation import install_extra, pip_install
from policies import CacheConfig, available
from real_engine.llama_cells import (
    SHARED,
    _parse_owners,
    _parse_positions,
    parse_cache_sizes,
    parse_cells,
    sequence_offset,
)
from real_engine.llama_library import ContextSettings, Library, refusal
from real_engine.llamacpp import POLICIES, context_settings

# As llama.cpp prints them: owners without spaces; five characters for each position; '*' at the head.


@pytest.mark.parametrize(
    ("dump", "owners"),
    [
        ("\n....", [-1, -1, -1, -1]),
        ("\n0.1M *\n\n", [0, -1, 1, SHARED]),
        ("\n0*.12\n", [0, -1, 1, 2]),
        ("\nM11M1010.. *\n", [SHARED, 11, SHARED, 10, 10, -1, -1]),
        ("\n100M199.\n", [100, SHARED, 199, -1]),
        ("MMM", [SHARED] * 3),
    ],
)
def test_owners_are_parsed_from_a_dump(dump, owners):
    assert _parse_owners(dump, len(owners)).tolist() == owners


def test_ambiguous_owners_are_refused():
    with pytest.raises(AssertionError, match="different numbers of digits"):
        _parse_owners("9101112", 4)


@pytest.mark.parametrize(
    ("dump", "positions"),
    [
        ("\n0    1    .    .    ", [0, 1, -1, -1]),
        ("\n12345.    999999   *\n", None),
        ("\n7    .    1234  *\n\n", [7, -1, 1234]),
        ("\n0    12345 6    ", [0, 12345, 6]),
        ("", []),
    ],
)
def test_positions_are_parsed_from_a_dump(dump, positions):
    if positions is None:
        with pytest.raises(ValueError, match=r"12345\."):
            _parse_positions(dump, 3)
    else:
        assert _parse_positions(dump, len(positions)).tolist() == positions


def test_a_dump_of_another_size_is_refused():
    with pytest.raises(AssertionError, match="3 positions were printed, not 4"):
        _parse_positions("\n0    1    .    ", 4)


def heading(stream, used, head, size, window=0):
    counts = f"n =     5, used ={used:6d}, head ={head:6d}, size ={size:6d}, n_swa ={window:6d}"
    return f"find_slot: stream[{stream}], {counts}\n"


FULL = [heading(0, 2, 2, 4), "\n00.. *\n\n", "\n0    1    .    .    *\n\n", "find_slot: stream[0] min[0] =     0\n"]


def test_the_first_dump_of_each_stream_of_each_cache_is_taken():
    later = [heading(0, 4, 0, 4), "\n0011\n", "\n0    1    0    1    \n"]
    window = [heading(0, 1, 3, 3, 64), "\n..0\n", "\n.    .    1    \n"]
    second = [heading(1, 1, 1, 4), "\n1...\n", "\n9    .    .    .    \n"]
    lines = ["something else\n", *FULL, *later, *window, "and more\n", *second, *window]
    found = list(parse_cells(lines, 2))
    assert [(c.cache, c.stream, c.used, c.head, c.window) for c in found] == [
        (0, 0, 2, 2, None),
        (1, 0, 1, 3, 64),
        (0, 1, 1, 1, None),
    ]
    assert found[0].position.tolist() == [0, 1, -1, -1]
    assert found[0].owner.tolist() == [0, 0, -1, -1]
    assert found[1].position.tolist() == [-1, -1, 1]
    assert found[2].owner.tolist() == [1, -1, -1, -1]
    assert all(c.largest is None and c.shared is None for c in found)


def test_the_only_cache_of_a_model_may_have_a_window():
    (cells,) = parse_cells([heading(0, 0, 0, 2, 64), "\n..\n", "\n.    .    \n"], 1)
    assert (cells.cache, cells.window) == (0, 64)


@pytest.mark.parametrize("lines", [[], ["no heading\n"], FULL[:1], FULL[:2]])
def test_incomplete_dumps_are_ignored(lines):
    assert list(parse_cells(lines, 1)) == []


def test_cache_sizes_are_parsed_in_order():
    lines = [
        "llama_kv_cache: size =    0.13 MiB (   512 cells,   2 layers,  4/4 seqs), K (f16):    0.06 MiB\n",
        "llama_kv_cache: something else\n",
        "llama_kv_cache: size =    0.06 MiB (   256 cells,   2 layers,  4/4 seqs), K (f16):    0.03 MiB\n",
    ]
    assert parse_cache_sizes(lines) == (512, 256)


@pytest.mark.parametrize("sequences", [1, 2, 9, 10, 11, 50, 90, 91, 150])
def test_offset_sequence_numbers_have_equally_many_digits(sequences):
    offset = sequence_offset(sequences, "B")
    assert len({len(str(offset + seq)) for seq in range(sequences)}) == 1
    assert sequence_offset(sequences, "A") == 0


# Refusals


@pytest.mark.parametrize(
    ("era", "keys", "why"),
    [
        ("A", {}, None),
        ("A", {"unified": False}, "one cache for all sequences, no streams"),
        ("A", {"cells": 288}, None),
        ("A", {"cells": 288, "flash_attention": True}, "multiples of 256 cells, not 288"),
        ("A", {"cells": 290}, "multiples of 32 cells, not 290"),
        ("A", {"flash_attention": True, "type_k": "f32"}, "takes no K and V in f32"),
        ("A", {"flash_attention": True, "type_v": "f32"}, "takes no K and V in f32"),
        ("B", {"flash_attention": True, "type_v": "f32"}, None),
        ("B", {"type_v": "q4_0"}, "V in q4_0 needs flash attention"),
        ("B", {"type_k": "q4_0"}, None),
        ("B", {"type_v": "q8_0", "flash_attention": True}, None),
        ("B", {"cells": 288}, "multiples of 256 cells, not 288"),
        ("B", {"unified": False, "sequences": 3}, "multiples of 256 cells for each of 3 streams, not 512"),
        ("B", {"unified": False, "sequences": 2}, None),
    ],
)
def test_unsupported_settings_are_refused(era, keys, why):
    found = refusal(era, ContextSettings(**{"cells": 512} | keys))
    assert (found is None) if why is None else (why in found)


def policy(name, **keys):
    return available()[name](CacheConfig(**{"cells": 2048, "sequences": 4, "for_any_layout": True} | keys))


@pytest.mark.parametrize(("era", "name"), [(era, name) for era, names in POLICIES.items() for name in names])
def test_settings_follow_from_the_policy(era, name):
    made, settings, offset = context_settings(
        policy(name, kernel="tiled"), ContextSettings(0, sequences=4, show_cells=True), era
    )
    assert made.name == name
    assert (settings.cells, settings.unified, settings.flash_attention) == (2048, name != "streams", True)
    assert (settings.sequences, offset) == (4, 0)


def test_sequence_numbers_start_at_ten_if_there_are_more_than_ten():
    _, settings, offset = context_settings(
        policy("llama.cpp-b6975"), ContextSettings(0, sequences=16, show_cells=True), "B"
    )
    assert (settings.sequences, offset) == (26, 10)
    _, settings, offset = context_settings(policy("llama.cpp-b6975"), ContextSettings(0, sequences=16), "B")
    assert (settings.sequences, offset) == (16, 0)


@pytest.mark.parametrize(
    ("era", "name", "keys", "why"),
    [
        ("A", "llama.cpp-b6975", {}, "this version does it as llama.cpp-b4666, not as llama.cpp-b6975"),
        ("B", "llama.cpp-b4666", {}, "as llama.cpp-b6975 or streams or sliding-window, not as llama.cpp-b4666"),
        ("B", "paged", {}, "not as paged"),
        ("A", "contiguous", {}, "not as contiguous"),
        ("B", "llama.cpp-b6975", {"kernel": "gather"}, "no kernel 'gather'; masked and tiled"),
        ("B", "sliding-window", {"sequences": 11}, "looked at with 10 slots at most"),
    ],
)
def test_a_policy_that_llamacpp_does_not_implement_is_refused_in_one_line(era, name, keys, why):
    with pytest.raises(UserError) as refused:
        context_settings(
            policy(name, **keys), ContextSettings(0, sequences=keys.get("sequences", 4), show_cells=True), era
        )
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


# Packages


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a llama_cpp with these contents into a folder, unloads any other, and returns the folder."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]:
        monkeypatch.delitem(sys.modules, name)

    def put(low_level, version="0.0.1"):
        (tmp_path / "llama_cpp").mkdir()
        (tmp_path / "llama_cpp" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (tmp_path / "llama_cpp" / "llama_cpp.py").write_text(low_level)
        return tmp_path

    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]:
        del sys.modules[name]


def refused(folder):
    before = list(sys.path)
    with pytest.raises(UserError) as found:
        Library(folder)
    assert sys.path == before
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_folder_without_llamacpp_is_named(tmp_path):
    assert refused(tmp_path).startswith(
        f"{tmp_path}: no llama_cpp in it; install it there with: {pip_install('--target')} "
    )
    assert refused(tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'}: no llama_cpp in it")


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert refused(None).endswith(f"install it with: {install_extra('llama')}")


def test_a_version_between_the_eras_is_named(package):
    folder = package("def llama_memory_seq_rm(): ...\ndef llama_kv_self_defrag(): ...\n", "0.3.12")
    assert refused(folder).startswith("llama-cpp-python 0.3.12: neither the view interface")


@pytest.mark.parametrize("raised", ["OSError('libllama.so: wrong ELF class\\n  and more')", "RuntimeError('no file')"])
def test_a_shared_library_that_cannot_be_loaded_is_said_in_one_line(package, raised):
    assert "llama-cpp-python cannot load llama.cpp: " in refused(package(f"raise {raised}"))


def test_a_missing_dependency_of_the_package_is_named(package):
    assert "cannot be imported (No module named 'nothing_like_it')" in refused(package("import nothing_like_it"))


def test_another_version_in_the_same_process_is_refused(package, monkeypatch, tmp_path):
    monkeypatch.setitem(
        sys.modules, "llama_cpp", SimpleNamespace(__file__="/elsewhere/llama_cpp/__init__.py", __version__="0.3.9")
    )
    assert refused(package("")) == f"{tmp_path}: another llama-cpp-python, 0.3.9, is in use in this process"


def test_a_build_that_lacks_a_function_is_said_in_one_line(package):
    said = refused(package("raise AttributeError('libllama.so: undefined symbol: llama_new')"))
    assert said == "llama-cpp-python cannot load llama.cpp: libllama.so: undefined symbol: llama_new"


def test_the_installed_package_is_not_confused_with_one_from_a_folder(package):
    folder = package("def llama_memory_seq_rm(): ...\ndef llama_kv_self_defrag(): ...\n", "0.3.12")
    refused(folder)
    assert refused(None) == "the installed one: another llama-cpp-python, 0.3.12, is in use in this process"


def test_a_custom_build_is_named_with_its_folder(monkeypatch):
    library = SimpleNamespace(version="0.3.36")
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    assert Library.name.fget(library) == "llama-cpp-python 0.3.36"
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/opt/mine")
    assert Library.name.fget(library) == "llama-cpp-python 0.3.36 with /opt/mine"


def test_positions_and_owners_are_int64():
    assert _parse_positions("0    ", 1).dtype == _parse_owners("0", 1).dtype == np.int64
