"""What is known of sequences in the host tier, until others are copied over them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.cells.host_copies import HostStates

COPIES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True), max_size=30)


@given(copies=COPIES)
def test_a_state_is_known_until_another_is_copied_over_any_of_its_cells(copies):
    states, live = HostStates(), {}
    for number, cells in enumerate(copies):
        live = {n: held for n, held in live.items() if not set(held) & set(cells)}
        live[number] = cells
        states.keep(np.array(cells), number)
        assert len(states) == len(live)
        for n, held in live.items():
            assert states.at(np.array(held)) == n
