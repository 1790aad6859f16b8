"""The trace readers on a fixed corpus: good files, mutations of them, and odd inputs.

The mutations are drawn from a seed, so that each run tests the same ones. ``make fuzz`` looks for others.
"""

import random
from contextlib import nullcontext

import pytest

from tests.workloads.fuzz.readers import GROUPS, SKIPS, THINS, feeder, seeds
from workloads import WorkloadError

MUTATIONS = 80
"""Of each good file, with bad rows refused and with bad rows skipped."""

ODD = (
    *(bytes([one]) for one in b'\n\r\0,;"\\{}[]:- \xff'),
    *b"null true NaN -Infinity 1e999 1e-999 0x1F 1_000 -1 0 0.1 00 +5 BZh9 PAR1 \\ud800 9223372036854775808".split(),
    *(b"\r\n", b"\xef\xbb\xbf", b"\xc2\xb2", b"\xd9\xa3", b"\xed\xa0\x80", b"\x1f\x8b\x08"),
    *(b"9" * 30, b"1" * 5000, b"[" * 2000),
    *(b"2023-02-30 00:00:00", b"0001-01-01 00:00:00", b"9999-12-31 23:59:59.999999999"),
)
"""Bytes that readers have cause to stumble over."""


def mutated(content, rng):
    """The bytes with one to four changes: a piece dropped, doubled, replaced or moved, a bit flipped, or a cut."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        start, length = rng.randrange(len(data) + 1), rng.choice((0, 1, 2, 8, 40))
        piece, odd = data[start : start + length], rng.choice(ODD)
        match rng.randrange(6):
            case 0:
                data[start : start + length] = odd
            case 1:
                del data[start : start + length]
            case 2:
                data[start:start] = piece * rng.choice((1, 2, 200))
            case 3 if start < len(data):
                data[start] ^= 1 << rng.randrange(8)
            case 4:
                data[rng.randrange(len(data) + 1) :] = piece
            case _:
                data[:] = data.replace(piece, odd, 3) if piece else data + odd
    return bytes(data)


FOUND = {
    "csv": (b"\x02arrival,prompt,output,who,rank\n\xd9\xa3,3,4,a,0\n", b"\x00\xef\xbb\xbf"),
    "jsonl": (b'\x03{"arrival": 1e999, "prompt": 3, "output": 4}\n', b"\x00" + b"[" * 4000, b"\x02\xed\xa0\x80\n"),
    "packed": (b"\x00\x1f\x8b\x08", b"\x01BZh9", b"\x02\xfd7zXZ\x00"),
    "parquet": (b"\x00PAR1PAR1", b"\x00PAR1\xff\xff\xff\xffPAR1"),
}
"""Whole inputs of each group, as ``feeder`` takes them. What ``make fuzz`` finds is added here, or where a test of its
reader can also say how it is refused (``tests/workloads/traces``)."""


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_readers_read_or_refuse_a_fixed_corpus(tmp_path, group):
    if group == "parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    readers, rng = GROUPS[group], random.Random(f"corpus of {group}")
    feed = feeder(tmp_path / "trace", readers)
    for seed in seeds(readers):
        feed(seed)
        for _ in range(MUTATIONS):
            feed(bytes([seed[0] + rng.choice((0, THINS))]) + mutated(seed[1:], rng))
    for found in FOUND[group]:
        for skips in (0, SKIPS):
            feed(bytes([found[0] + skips]) + found[1:])


@pytest.mark.parametrize(("message", "fails"), [("{}: one line", False), ("{}: two\nlines", True), ("no name", True)])
def test_a_reader_that_refuses_otherwise_is_caught(tmp_path, message, fails):
    """The control."""

    def reader(path, **_):
        raise WorkloadError(message.format(path))

    feed = feeder(tmp_path / "trace", ((reader, {}, b""),))
    with pytest.raises(AssertionError, match="not one line") if fails else nullcontext():
        feed(b"\0anything")
