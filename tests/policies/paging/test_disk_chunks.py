"""Which chunks come to a disk and back, by hand; recordings of vLLM's own tier are replayed in test_vllm_offload.py."""

from policies.paging.disk_chunks import TieredChunks
from policies.paging.host_chunks import Access


def stored(chunks, *keys):
    """Store chunks in host memory; the number of the copy that writes their files."""
    chunks.stored(chunks.prepare_store(keys, Access()))
    return chunks.begun[-1].number


def on_disk(*keys, n=2, most_files=100):
    """Chunks that are written to files one by one, so that host memory has the last ones."""
    chunks = TieredChunks(n, most_files=most_files)
    for key in keys:
        chunks.proceed([stored(chunks, key)], 0)
        chunks.step_composed()
    chunks.begun.clear()
    return chunks


def test_what_is_being_written_to_a_file_cannot_be_evicted():
    chunks = TieredChunks(2, most_files=9)
    number = stored(chunks, 1, 2)
    assert chunks.prepare_store([3], Access()) is None
    chunks.step_composed()
    chunks.proceed([number], 0)
    assert chunks.prepare_store([3], Access()) == {3: 0}


def test_a_chunk_is_sought_read_and_then_there_and_others_wait_for_it():
    chunks, first, second = on_disk(1, 2, 3), Access(), Access()
    assert [chunks.is_there(1, first), chunks.busy] == [None, True]
    chunks.step_composed()
    chunks.proceed([], 1)
    assert [chunks.is_there(1, access) for access in (first, second)] == [None, None]
    assert chunks.begun == []
    chunks.step_composed()
    (copy,) = chunks.begun
    assert (copy.to_disk, list(copy.slots), copy.files) == (False, [1], 1)
    chunks.proceed([copy.number], 0)
    assert [chunks.is_there(1, second), chunks.busy] == [True, False]
    assert chunks.evicted == [1, 2]


def test_an_answer_counts_until_the_last_request_that_asked_has_ended():
    chunks, patient, other = on_disk(1), Access(), Access()
    assert chunks.is_there(2, patient) is None
    chunks.step_composed()
    chunks.proceed([], 1)
    chunks.proceed([stored(chunks, 2)], 0)
    stored(chunks, 3), chunks.step_composed()
    stored(chunks, 4), chunks.step_composed()
    assert chunks.files >= {1, 2}
    assert [chunks.is_there(2, access) for access in (patient, other)] == [False, False], "as it was answered"
    for access in (patient, other):
        chunks.forget(access)
    assert chunks.is_there(2, Access()) is None, "it is asked again"


def test_what_is_on_the_disk_is_not_written_again_and_a_full_disk_takes_no_more():
    chunks = on_disk(1, 2, 3, n=3, most_files=4)
    chunks.proceed([stored(chunks, 4)], 0)
    chunks.step_composed()
    assert chunks.evicted == [1]
    chunks.proceed([stored(chunks, 1, 5)], 0)
    assert [copy.files for copy in chunks.begun] == [1, 0]
    assert chunks.files == {1, 2, 3, 4}
