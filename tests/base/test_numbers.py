"""Numbers as both languages write them."""

from collections.abc import Callable

import pytest

from dlojz.base import language
from dlojz.base.language import use_language


@pytest.mark.parametrize(
    ("write", "english", "french"),
    [
        (lambda: language.decimal(1234.56), "1,234.6", "1\u202f234,6"),
        (lambda: language.decimal(0.25, 2, signed=True), "+0.25", "+0,25"),
        (lambda: language.decimal(1.25e300, 4), "1.2500e+300", "1,2500e+300"),
        (lambda: language.integer(10**15), "1,000,000,000,000,000", "1\u202f000\u202f000\u202f000\u202f000\u202f000"),
        (lambda: language.integer(1_234_567), "1,234,567", "1\u202f234\u202f567"),
        (lambda: language.significant(0.0123456), "0.0123", "0,0123"),
        (lambda: language.significant(1234.5, 2), "1.2e+03", "1,2e+03"),
        (lambda: language.significant(245_765.05, 6, grouped=True), "245,765", "245\u202f765"),
        (lambda: language.shortest(0.5), "0.5", "0,5"),
        (lambda: language.rounded(1.23456), "1.23", "1,23"),
        (lambda: language.rounded(12_345.6), "12,346", "12\u202f346"),
        (lambda: language.percent(0.0342), "3.4%", "3,4 %"),
        (lambda: language.percent(1, None), "100%", "100 %"),
        (lambda: language.percent(0.995, None), "99.5%", "99,5 %"),
        (lambda: language.spaced_percent(-0.0342, signed=True), "−3.4 %", "−3,4 %"),
        (lambda: language.brief_percent(0.0995), "10 %", "10 %"),
        (lambda: language.brief_percent(0.0342), "3.4 %", "3,4 %"),
        (lambda: language.localized("0.5", "fr"), "0,5", "0,5"),
        (lambda: language.format_bytes(1536), "1.50 KiB", "1,50 Kio"),
    ],
)
def test_a_number_has_the_marks_of_its_language(write: Callable[[], str], english: str, french: str) -> None:
    use_language("en")
    assert write() == english
    use_language("fr")
    assert write() == french


@pytest.mark.parametrize(
    ("num_bytes", "unit", "size"),
    [
        (1, "B", 1),
        (1000, "B", 1),
        (1023, "B", 1),
        (1024, "KiB", 2**10),
        (1023 * 2**10, "KiB", 2**10),
        (2**20, "MiB", 2**20),
    ],
)
def test_byte_scale_changes_at_powers_of_1024(num_bytes: int, unit: str, size: int) -> None:
    """1000 bytes are no KiB yet: an axis up to 1023 counts single bytes."""
    assert language.byte_scale(num_bytes) == (unit, size)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(59.94, "59.9 s"), (60, "60.0 s"), (90, "90.0 s"), (119, "119 s"), (120, "2 min 00 s"), (3661, "61 min 01 s")],
)
def test_format_seconds_takes_minutes_from_two_on(seconds: float, told: str) -> None:
    assert language.format_seconds(seconds) == told
