"""Loading llama.cpp, its models and contexts, and refusals of what it does not support."""

import itertools

import pytest

from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES
from real_engine.llama_library import Context, ContextSettings, Library, LlamaModel
from tests.real_engine.llamacpp.conftest import FOLDER

pytestmark = pytest.mark.llama


def rows(seq, n, start=0):
    return [(1, start + i, False, (seq,)) for i in range(n)]


def test_it_says_which_llamacpp_it_is(library):
    assert library.name == f"llama-cpp-python {library.version}"
    assert library.era == ("A" if library.version == "0.3.8" else "B")


def test_another_version_cannot_be_loaded_beside_it(library, tmp_path):
    (tmp_path / "llama_cpp").mkdir()
    with pytest.raises(UserError, match=f"another llama-cpp-python, {library.version}, is in use in this process"):
        Library(tmp_path)


def test_the_same_version_may_be_loaded_twice_and_both_read_the_log(library, tiny, tmp_path):
    """llama.cpp has one log; a second ``Library`` must not take it from the first."""
    again = Library(FOLDER)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF no more")
    for each in (library, again):
        with pytest.raises(UserError, match=r"broken.gguf: llama.cpp cannot load it") as refused:
            LlamaModel(each, tmp_path / "broken.gguf")
        assert "it does not say why" not in str(refused.value)
    settings = ContextSettings(cells=256, show_cells=True)
    with LlamaModel(library, tiny) as model, Context(model, settings) as context:
        assert context.decode(rows(0, 3))[0] == 0
        assert [cells.position.size for cells in context.cells()] == [256]


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"GGUF" + bytes(100)])
def test_a_file_without_a_model_is_refused_in_one_line(library, tmp_path, content):
    path = tmp_path / "odd.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"odd.gguf: llama.cpp cannot load it") as refused:
        LlamaModel(library, path)
    assert "\n" not in str(refused.value)


def test_a_batch_of_more_tokens_than_cells_is_refused_before_it_ends_the_process(model):
    with (
        Context(model, ContextSettings(cells=256, n_batch=1024)) as context,
        pytest.raises(UserError, match=r"a batch of 257 tokens; llama\.cpp was set up for 1 to 256"),
    ):
        context.decode(rows(0, 257))


@pytest.mark.parametrize(("n_batch", "sequences"), [(1, 8), (8, 64)])
def test_batches_may_be_smaller_than_a_token_of_each_sequence(model, n_batch, sequences):
    """llama.cpp itself would abort the process."""
    with Context(model, ContextSettings(cells=256, n_batch=n_batch, n_ubatch=n_batch, sequences=sequences)) as context:
        assert context.decode(rows(sequences - 1, n_batch))[0] == 0
        with pytest.raises(UserError, match=f"a batch of {n_batch + 1} tokens"):
            context.decode(rows(0, n_batch + 1))


@pytest.mark.parametrize("flash", [False, True])
def test_each_type_of_cache_works_or_is_refused(model, flash):
    """A type that llama.cpp takes and then aborts the process for must be refused as well."""
    for type_k, type_v in itertools.product(STORAGES, repeat=2):
        settings = ContextSettings(cells=256, type_k=type_k, type_v=type_v, flash_attention=flash)
        try:
            context = Context(model, settings)
        except UserError as e:
            refused = str(e)
        else:
            refused = ""
            with context:
                assert context.decode(rows(0, 5))[0] == 0
        early = model.library.era == "A"
        if flash:
            assert ("takes no K and V in f32" in refused) == (early and "f32" in (type_k, type_v))
        else:
            assert (f"V in {type_v} needs flash attention" in refused) == (type_v in ("q8_0", "q4_0"))


def test_too_many_sequences_are_refused_with_llamacpps_reason(model, only):
    only("B")
    with pytest.raises(UserError, match=r"cannot make a context: .*n_seq_max must be <= 256") as refused:
        Context(model, ContextSettings(cells=512, sequences=300))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("cells", [100, 32 * 3 + 1, 0])
def test_cells_that_llamacpp_would_round_are_refused(model, cells):
    with pytest.raises(UserError, match="cells"):
        Context(model, ContextSettings(cells=cells))


def test_a_saved_state_can_be_restored(model):
    with Context(model, ContextSettings(cells=256)) as context:
        context.decode([*rows(0, 9), (2, 9, True, (0,))])
        best, state = context.best(9), context.state()
        context.clear()
        context.decode([(2, 0, True, (0,))])
        context.restore(state)
        context.decode([(3, 10, True, (0,))])
        after = context.best(0)
        context.clear()
        context.decode([*rows(0, 9), (2, 9, True, (0,))])
        assert context.best(9) == best
        context.decode([(3, 10, True, (0,))])
        assert context.best(0) == after
