"""Pages that stay mapped in a slot: which are handed out, and which of them had to be mapped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.paging.free_lists.uncached import ParkedPages


def taken(pages, slot, at, n, *, ahead=False):
    pages.turn_to(slot, at, ahead=ahead)
    return pages.take(n)


def test_pages_mapped_nowhere_come_before_parked_ones_and_the_longest_parked_before_others():
    pages = ParkedPages(range(5))
    old, new = taken(pages, 0, 0, 2), taken(pages, 1, 0, 2)
    pages.release(old[::-1])
    pages.release(new[::-1])
    assert pages.order() == [4, old[1], old[0], new[1], new[0]]
    assert taken(pages, 2, 0, 2) == [4, old[1]]
    # What is left of slot 0 is still the beginning of its range.
    assert taken(pages, 0, 0, 2) == [old[0], new[1]]


def test_nothing_waits_for_a_page_that_is_mapped_ahead():
    pages = ParkedPages(range(4))
    taken(pages, 0, 0, 1)
    assert pages.settle() == 1
    taken(pages, 0, 1, 2, ahead=True)
    assert pages.settle() == 1
    taken(pages, 0, 3, 1, ahead=True)
    assert (pages.settle(), pages.n_mapped) == (0, 4)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_a_page_is_mapped_exactly_when_it_was_not_there(lengths):
    """Against a mapping that is kept by place: each slot's sequence gets a new length."""
    pages, held, there, mapped = ParkedPages(range(12)), [list[int]() for _ in range(4)], {}, 0
    for slot, length in lengths:
        own = held[slot]
        if length <= len(own):
            pages.release(own[length:][::-1])
            del own[length:]
        elif length - len(own) <= len(pages):
            at = len(own)
            own += taken(pages, slot, at, length - at)
            for number in range(at, length):
                if there.get((slot, number)) != own[number]:
                    mapped += 1
                    there = {place: page for place, page in there.items() if page != own[number]}
                    there[slot, number] = own[number]
        used = [page for each in held for page in each]
        assert sorted(used + pages.order()) == list(range(12))
        assert all(there[slot, number] == page for slot, each in enumerate(held) for number, page in enumerate(each))
    assert (pages.n_mapped, pages.settle()) == (mapped, mapped)
