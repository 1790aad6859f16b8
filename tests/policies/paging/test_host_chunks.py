"""Which chunks host memory keeps, by hand; recordings of vLLM's own manager are replayed in test_vllm_offload.py."""

import pytest

from policies.paging.host_chunks import Access, HostChunks


def stored(chunks, *keys, access=None):
    """Offer chunks, and write those that are to be stored; their slots."""
    slots = chunks.prepare_store(keys, access or Access())
    if slots is not None:
        chunks.stored(slots)
    return slots


def used(chunks, *keys):
    """One request reads these chunks, and ends."""
    access = Access()
    chunks.pin(keys, access)
    chunks.unpin(keys)
    chunks.ended(keys, access)


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_what_is_there_is_not_stored_again_and_what_is_written_cannot_be_read(order):
    chunks, access = HostChunks(4, order=order), Access()
    assert chunks.prepare_store([1, 2], access) == {1: 0, 2: 1}
    assert [chunks.is_there(key, Access()) for key in (1, 2, 3)] == [None, None, False]
    chunks.stored([1, 2])
    assert chunks.is_there(1, Access()) is True
    assert stored(chunks, 1, 2, 3) == {3: 2}


def test_the_least_recently_used_goes_first_and_of_a_text_its_end():
    chunks = HostChunks(4)
    stored(chunks, 1, 2)
    stored(chunks, 3, 4)
    used(chunks, 1, 2)
    assert stored(chunks, 5) == {5: 2}
    assert stored(chunks, 6, 7) == {6: 1, 7: 3}
    assert chunks.evicted == [3, 4, 2]


def test_what_is_read_written_or_offered_stays():
    chunks, reader, writer = HostChunks(4), Access(), Access()
    stored(chunks, 1, 2, 3)
    chunks.pin([1], reader)
    chunks.prepare_store([4], writer)
    assert chunks.prepare_store([2, 5, 6], Access()) is None, "only 3 could go"
    assert chunks.evicted == []
    assert stored(chunks, 2, 5) == {5: 2}
    assert chunks.evicted == [3]


def test_a_chunk_is_stored_when_it_has_been_offered_often_enough():
    chunks = HostChunks(4, store_threshold=3)
    assert stored(chunks, 1, 2) == {}
    assert stored(chunks, 1) == {}
    assert stored(chunks, 1, 2) == {1: 0}


def test_arc_keeps_what_was_found_again_while_new_chunks_pass_by():
    """As many as there is room for, each stored once: LRU would have nothing left of 1 and 2."""
    found = {}
    for order in ("lru", "arc"):
        chunks = HostChunks(4, order=order)
        stored(chunks, 1, 2)
        used(chunks, 1, 2)
        for key in range(10, 16):
            stored(chunks, key)
        found[order] = [chunks.is_there(key, Access()) for key in (1, 2)]
    assert found == {"lru": [False, False], "arc": [True, True]}


def test_arc_gives_more_room_to_the_kind_that_is_asked_for_after_its_eviction():
    chunks = HostChunks(2, order="arc")
    stored(chunks, 1)
    used(chunks, 1)
    for key in (2, 3, 2):  # 2 was evicted for 3, and comes back: chunks stored once are to have a place.
        stored(chunks, key)
    assert chunks.evicted == [2, 3]
    stored(chunks, 3)
    stored(chunks, 4)
    assert 1 in chunks.evicted
