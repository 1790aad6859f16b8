"""Prompts from the low end of the cache, generated tokens from the high end."""

import numpy as np

from policies import CacheConfig, Chunk, SequencePlan
from policies.layouts.prompt_decode_regions import PromptDecodeRegionsPolicy


def test_a_prompt_and_a_generated_token_that_meet_share_no_cell():
    """Cells 2, 6 and 7 are free: each part alone would take cell 7, the prompt because it finds 6 and 7 in a row."""
    policy = PromptDecodeRegionsPolicy("regions", CacheConfig(cells=8, n_ubatch=8))
    for seq, prompt in enumerate((2, 1, 3)):
        policy.open(seq, SequencePlan(prompt, 8, 8))
        policy.allocate([Chunk(seq, 0, prompt)])
    policy.free(1)
    policy.open(3, SequencePlan(2, 8, 8))
    placed = policy.allocate([Chunk(0, 2, 1), Chunk(3, 0, 2)])
    cells = np.concatenate([place.cells for batch in placed for place in batch.places])
    assert sorted(cells.tolist()) == [2, 6, 7]
    assert policy.usage().stored == 8
