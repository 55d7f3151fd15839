"""Quantities as people read them.

Layer 0. Invariant: a number shown to a student carries its unit; binary prefixes (KiB, MiB, GiB) are powers of
1,024 and decimal ones (k, M, G) powers of 1,000, never mixed.
"""

from __future__ import annotations

from dlojz.text import say

MEBIBYTE = 2**20


def _scaled(value: float, step: float, prefixes: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    while abs(value) >= step and index < len(prefixes) - 1:
        value /= step
        index += 1
    return value, prefixes[index]


def _digits(value: float) -> str:
    """Three significant digits, without exponent, with the decimal mark of the reader's language."""
    magnitude = abs(value)
    digits = f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
    return say(en=digits, fr=digits.replace(".", ","))


def byte_units() -> tuple[str, ...]:
    """Units of bytes by powers of 1,024, as the reader's language writes them."""
    byte = say(en="B", fr="o")
    return (byte, *(f"{prefix}{byte}" for prefix in ("Ki", "Mi", "Gi", "Ti", "Pi")))


def format_bytes(num_bytes: float | None) -> str:
    """Bytes with a binary prefix; a missing value is a dash.

    Example:
        >>> format_bytes(3 * 1024 * 1024)
        '3.00 MiB'
    """
    if num_bytes is None:
        return "—"
    units = byte_units()
    value, unit = _scaled(num_bytes, 1024, units)
    return f"{num_bytes:.0f} {unit}" if unit == units[0] else f"{_digits(value)} {unit}"


def format_count(count: float | None, unit: str = "") -> str:
    """A count, FLOPs or a rate with a decimal prefix; a missing value is a dash.

    Example:
        >>> format_count(25_036_820)
        '25.0 M'
    """
    if count is None:
        return "—"
    value, prefix = _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"))
    number = f"{value:g}" if not prefix and float(value).is_integer() else _digits(value)
    return f"{number} {prefix}{unit}".rstrip()


def format_seconds(duration_s: float | None) -> str:
    """A duration in the unit a person would choose; a missing value is a dash."""
    if duration_s is None:
        return "—"
    if duration_s >= 120:
        minutes, seconds = divmod(round(duration_s), 60)
        return f"{minutes} min {seconds:02d} s"
    return f"{_digits(duration_s)} s" if duration_s >= 1 else f"{_digits(duration_s * 1e3)} ms"
