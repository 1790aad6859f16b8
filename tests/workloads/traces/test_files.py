"""Packed files: told by their first bytes, unpacked piece by piece, and what each fault is called."""

import bz2
import gzip
import lzma
import tracemalloc

import pytest

from tests.traces import message_of
from workloads import AzureTrace, MooncakeTrace, WorkloadError
from workloads.traces.files import open_bytes

TEXT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2023-11-16 18:15:46.6805900,374,44\n" * 5000
PACK = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
SUFFIX = {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz"}


@pytest.mark.parametrize("packing", PACK)
def test_a_packed_file_is_read_whatever_its_name(write, packing):
    for name in ("trace.csv", f"trace.csv{SUFFIX[packing]}"):
        path = write(PACK[packing](TEXT), name)
        assert len(list(AzureTrace(path))) == 5000
        with open_bytes(path) as binary:
            assert binary.read() == TEXT


@pytest.mark.parametrize("packing", PACK)
def test_several_compressed_streams_are_one_file(write, packing):
    pack = PACK[packing]
    with open_bytes(write(pack(TEXT) + pack(b"more\n") + pack(b""))) as binary:
        assert binary.read() == TEXT + b"more\n"


@pytest.mark.parametrize("packing", PACK)
def test_of_nothing_packed_there_are_no_rows(write, packing):
    with pytest.raises(WorkloadError, match="empty file"):
        AzureTrace(write(PACK[packing](b"")))


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("keep", [12, 40, -9, -1])
def test_what_is_cut_short_is_refused(write, packing, keep):
    with pytest.raises(WorkloadError, match=f"damaged {packing} data") as fault:
        AzureTrace(write(PACK[packing](TEXT)[:keep]))
    message_of(fault)


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACK)
def test_what_follows_the_end_is_refused(write, packing):
    for rest in (b"and so on", b"\x01", TEXT):
        with pytest.raises(WorkloadError, match=f"damaged {packing} data") as fault:
            AzureTrace(write(PACK[packing](TEXT) + rest))
        message_of(fault)


@pytest.mark.parametrize("packing", PACK)
def test_a_flipped_bit_is_refused(write, packing):
    packed = bytearray(PACK[packing](TEXT))
    packed[-6] ^= 1
    with pytest.raises(WorkloadError, match=f"damaged {packing} data"):
        AzureTrace(write(bytes(packed)))


@pytest.mark.parametrize("packing", PACK)
def test_a_name_that_lies_is_refused(write, packing):
    suffix = SUFFIX[packing]
    with pytest.raises(WorkloadError, match=rf"trace\.csv{suffix}: named {suffix} but not {packing} data; rename it"):
        AzureTrace(write(TEXT, f"trace.csv{suffix}"))
    other = "xz" if packing != "xz" else "gzip"
    with pytest.raises(WorkloadError, match=rf"named {suffix} but not {packing} data"):
        AzureTrace(write(PACK[other](TEXT), f"trace.csv{suffix}"))
    with pytest.raises(WorkloadError, match=rf"named {suffix} but not {packing} data"):
        AzureTrace(write(b"", f"trace.csv{suffix}"))


def test_what_cannot_be_unpacked_is_named(write):
    for content, name in ((b"\x28\xb5\x2f\xfd" + b"x" * 99, "t.csv"), (TEXT, "t.csv.zst")):
        with pytest.raises(WorkloadError, match=r"zstd data, which cannot be read; unpack it first \(zstd -d\)"):
            AzureTrace(write(content, name))
    with pytest.raises(WorkloadError, match="zip data, which cannot be read"):
        AzureTrace(write(b"PK\x03\x04" + b"x" * 99))


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("reader", [AzureTrace, MooncakeTrace])
def test_a_bomb_fills_no_memory(write, packing, reader):
    """Forty million characters without a line end, in some kilobytes."""
    head = TEXT[:40] if reader is AzureTrace else b""
    path = write(PACK[packing](head + b"7" * 40_000_000))
    assert path.stat().st_size < 80_000
    tracemalloc.start()
    try:
        with pytest.raises(WorkloadError, match="longer than") as fault:
            reader(path)
        assert tracemalloc.get_traced_memory()[1] < 25e6
    finally:
        tracemalloc.stop()
    message_of(fault)


def test_a_dictionary_that_would_fill_the_memory_is_refused(write):
    """xz may ask for one of 1.5 GB, whatever there is to unpack."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**28}]
    with pytest.raises(WorkloadError, match=r"damaged xz data \(Memory usage limit exceeded\)"):
        AzureTrace(write(lzma.compress(TEXT, filters=filters)))
