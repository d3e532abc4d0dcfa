"""Numbers of bytes, read and written."""

import pytest

from spmd.inspection import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (4096, 4096),
        (1.5, 1),
        ("4096", 4096),
        ("16GB", 16_000_000_000),
        ("16 GiB", 17_179_869_184),
        ("15.75gib", 16_911_433_728),
        (" .5 kb ", 500),
        ("1_000 B", 1000),
    ],
)
def test_sizes_are_read(text, count):
    """Decimal units are powers of 1,000, binary ones of 1,024, in any case."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "GB", "16 Gb/s", "-1", "1e9", "16XB", -1, float("inf"), float("nan"), True, None, []],
)
def test_what_is_no_size(text):
    """Anything else is an error, a bare truth value among it."""
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "4 Megs",
            "'Megs' is no unit of bytes: write 4MB (4,000,000 bytes) or 4MiB (4,194,304 bytes)",
        ),
        (
            "1.5g",
            "'g' is no unit of bytes: write 1.5GB (1,500,000,000 bytes) or 1.5GiB "
            "(1,610,612,736 bytes)",
        ),
        (
            "16 XB",
            "'XB' is no unit of bytes: write 16B, or one of KB, MB, GB, TB, KiB, MiB, GiB, TiB",
        ),
        ("lots", "'lots' is no number of bytes: write 4096, '16GB' or '15.75GiB'"),
    ],
)
def test_a_unit_that_is_not_known(text, words):
    """A slip in the unit is answered with what it may mean, in bytes."""
    with pytest.raises(ValueError, match="bytes") as e:
        parse_bytes(text)
    assert str(e.value) == words


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20 - 2**6, "1023.9 KiB"),
        (2**20, "1.0 MiB"),
        (2**40 - 1, "1.0 TiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_are_written(count, text):
    """A size stands in the largest unit that leaves at least one, rounding considered."""
    assert show_bytes(count) == text
