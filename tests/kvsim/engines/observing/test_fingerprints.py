"""Hashes of blocks."""

import os
import stat
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engines.observing.fingerprints import BLOCK_BYTES, BLOCK_TOKENS, BlockChain, ids_as_bytes, new_salt, salt_of
from kvsim.errors import UserError

SALT = bytes(range(32))


def hashes(text, salt=SALT, unit="bytes"):
    chain = BlockChain(salt, unit)
    chain.add(text)
    return chain.hashes


@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=5))
def test_hashes_do_not_depend_on_the_pieces_that_a_text_comes_in(text, cuts):
    whole, chain = hashes(text), BlockChain(SALT)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, stop in pairwise(edges):
        chain.add(text[start:stop])
    assert chain.hashes == whole
    assert (chain.units, len(whole)) == (len(text), len(text) // BLOCK_BYTES)


@given(st.binary(min_size=256, max_size=256), st.integers(0, 255))
def test_hashes_are_equal_up_to_the_block_in_which_texts_differ(text, at):
    other = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
    same = [mine == theirs for mine, theirs in zip(hashes(text), hashes(other), strict=True)]
    assert same == [block < at // BLOCK_BYTES for block in range(4)]


def test_equal_blocks_in_other_places_have_other_hashes():
    assert len(set(hashes(b"x" * BLOCK_BYTES * 9))) == 9


def test_another_salt_gives_other_hashes():
    text = b"x" * 640
    assert not set(hashes(text)) & set(hashes(text, new_salt()))
    assert new_salt() != new_salt()


def test_tokens_and_bytes_have_hashes_of_their_own():
    ids = ids_as_bytes([7] * BLOCK_TOKENS)
    assert hashes(ids, unit="tokens")[0] not in hashes(ids)
    chain = BlockChain(SALT, "tokens")
    chain.add(ids_as_bytes(range(40)))
    assert (chain.units, len(chain.hashes)) == (40, 2)


def test_the_hash_is_keyed_blake2b():
    """Written out once more from the description: the first block alone, the second after the first's hash."""
    from hashlib import blake2b

    def keyed(data):
        return blake2b(data, digest_size=8, key=SALT, person=b"bytes").digest()

    first = keyed(b"a" * 64)
    assert hashes(b"a" * 64 + b"b" * 64) == [first.hex(), keyed(first + b"b" * 64).hex()]


def test_a_salt_is_not_shown():
    chain = BlockChain(b"sesame" + bytes(26))
    chain.add(b"sesame")
    assert "sesame" not in repr(chain)


def test_a_salt_is_kept_for_its_owner_alone(tmp_path):
    path = tmp_path / "salt"
    made = salt_of(path)
    assert (len(made), salt_of(path)) == (32, made)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"salt: others may read it; chmod 600"):
        salt_of(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"has 5 bytes; a salt has 32\. Name a file that is new"):
        salt_of(path)
    with pytest.raises(UserError, match=r"--salt-file: .*: No such file or directory"):
        salt_of(tmp_path / "missing" / "salt")
