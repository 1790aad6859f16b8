"""Types of K, V and weights, and sizes in bytes as people write and read them."""

import pytest

from kvsim.model.storage_types import CACHE_TYPES, binary_reading, decimal_hint, format_size, parse_size

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * GIB),
        ("512MiB", 512 * MIB),
        ("1.5 gb", 15 * 10**8),
        ("24g", 24 * 10**9),
        ("123", 123),
        ("7kib", 7168),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


def test_sizes_are_shown_in_powers_of_two():
    assert [format_size(n) for n in (3, 1536, 512 * MIB, 3 * GIB)] == ["3 B", "1.50 KiB", "512.00 MiB", "3.00 GiB"]


def test_every_cache_type_has_whole_blocks():
    assert all(block in (1, 32) and size > 0 for block, size in CACHE_TYPES.values())


@pytest.mark.parametrize(
    ("given", "meant", "hint"),
    [
        ("16GB", "16GiB", "16 GB is 14.90 GiB; a card sold as 16 GB usually has 16GiB"),
        ("16 g", "16GiB", "16 GB is 14.90 GiB; a card sold as 16 GB usually has 16GiB"),
        ("1.5tb", "1.5TiB", "1.5 TB is 1,396.98 GiB; a card sold as 1.5 TB usually has 1.5TiB"),
        ("16GiB", "", ""),
        ("512MB", "", ""),
        ("17179869184", "", ""),
        ("much", "", ""),
    ],
)
def test_what_gigabytes_may_have_meant(given, meant, hint):
    assert binary_reading(given) == meant
    assert decimal_hint(given) == hint
