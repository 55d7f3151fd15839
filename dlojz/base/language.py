"""Choose the reader's language, and write sentences, lists and quantities in it.

Every sentence that a student sees is written twice, side by side; no other module knows of a decimal comma. Binary
prefixes (KiB, MiB, GiB) are powers of 1,024 and decimal ones (k, M, G) powers of 1,000, never mixed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import Any, Final, Literal, NamedTuple, get_args

from dlojz.base.errors import LabError

Language = Literal["en", "fr"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
_chosen: Language | None = None


def use_language(name: str) -> None:
    """Choose the language of all that follows in this process (`en` or `fr`).

    Raises:
        LabError: if the language is another one.
    """
    global _chosen
    for code in LANGUAGES:
        if name == code:
            _chosen = code
            return
    raise LabError(one_of("language", name, LANGUAGES))


def language() -> Language:
    """Return the language chosen, else that of `$DLOJZ_LANG`, else English."""
    if _chosen is not None:
        return _chosen
    return "fr" if os.environ.get("DLOJZ_LANG", "").lower().startswith("fr") else "en"


def say(*, en: str, fr: str) -> str:
    """Return the sentence in the reader's language."""
    return fr if language() == "fr" else en


class Said(NamedTuple):
    """A sentence in both languages; as a string, it is the reader's one."""

    en: str
    fr: str

    def __str__(self) -> str:
        return say(en=self.en, fr=self.fr)

    def begun(self) -> Said:
        """Both with a capital, as at the beginning of a sentence."""
        return Said(*(text[:1].upper() + text[1:] for text in self))


class Wrong(Exception):  # noqa: N818 - it is a verdict, not an error of the program
    """Raised by a judge: the sentence tells what is wrong and what to look at.

    Args:
        en: the sentence; alone, it is in the reader's language already.
        fr: the same in French.
    """

    def __init__(self, en: str, fr: str | None = None) -> None:
        super().__init__(en if fr is None else say(en=en, fr=fr))


def colon() -> str:
    """Colon of the reader's language."""
    return say(en=": ", fr=" : ")


def yes_no(answer: bool) -> str:
    """Write a truth value in the reader's language."""
    return say(en="yes", fr="oui") if answer else say(en="no", fr="non")


def refusal(*, en: str, fr: str) -> LabError:
    """The error that refuses a request, in the reader's language."""
    return LabError(say(en=en, fr=fr))


class Sentences(Formatter):
    """Sentences of a Markdown file, by section and key, or by the key alone where it stands in one section.

    Under `# section` and `## key` stand two points, English before French; text before them says what the file is for.
    By key alone a place may say how its value is written: `{peak:bytes}` by `format_bytes`, `{share:percent 0}` by
    `percent` with no digits.

    Args:
        path: the file.
        writers: further ways to write a value, by the name that a place has.

    Attributes:
        requested: pairs of section and key that the module has looked up, so that a test finds a sentence without its
            key, or a key without its sentence.
    """

    def __init__(self, path: Path, **writers: Callable[..., str]) -> None:
        self.path, self.writers = path, _WRITERS | writers
        self.requested: set[tuple[str, str]] = set()

    @cached_property
    def sentences(self) -> dict[str, dict[str, Said]]:
        """Sentences by section and key."""
        return read_sentences(self.path.read_text(encoding="utf-8"))

    @cached_property
    def pairs(self) -> dict[str, Said]:
        """Sentences by key alone.

        Raises:
            ValueError: if a key stands in two sections.
        """
        keys = [key for section in self.sentences.values() for key in section]
        if len(keys) != len(set(keys)):
            raise ValueError(f"{self.path.name}: {max(keys, key=keys.count)!r} stands in two sections")
        return {key: said for section in self.sentences.values() for key, said in section.items()}

    def __call__(self, key: str, /, **values: object) -> str:
        """Write the sentence of a key in the reader's language."""
        return self.vformat(str(self.pairs[key]), (), values)

    def refused(self, key: str, /, **values: object) -> LabError:
        """Make the error that refuses a request with the sentence of a key."""
        return LabError(self(key, **values))

    def titles(self, key: str, /, **values: object) -> tuple[str, ...]:
        """Write the titles of columns, which have `;` between them."""
        return tuple(title.strip() for title in self(key, **values).split(";"))

    def format_field(self, value: Any, format_spec: str) -> str:
        """Write a value as its place says."""
        name, *digits = format_spec.split()[:2] or [""]
        write = self.writers.get(name)
        return write(value, *map(int, digits)) if write else str(super().format_field(value, format_spec))

    def sentence(self, section: str, key: str, /, **values: object) -> Said:
        """Look up the sentence of a key in both languages, with these values; the key itself where there is none.

        Of a value that is `Said`, each language gets its own text.
        """
        self.requested.add((section, key))
        sentence = self.sentences.get(section, {}).get(key, Said(key, key))
        if not values:
            return sentence
        english, french = (
            {name: value[index] if isinstance(value, Said) else value for name, value in values.items()}
            for index in (0, 1)
        )
        return Said(sentence.en.format(**english), sentence.fr.format(**french))

    def say(self, section: str, key: str, /, **values: object) -> str:
        """Return the sentence of a section's key in the reader's language."""
        return str(self.sentence(section, key, **values))

    def wrong(self, section: str, key: str, /, **values: object) -> Wrong:
        """Make the verdict that says a sentence, for a judge to raise."""
        return Wrong(*self.sentence(section, key, **values))

    def refusal(self, section: str, key: str, /, **values: object) -> LabError:
        """Make the error that refuses a request with the sentence of a section's key."""
        return LabError(self.say(section, key, **values))


def read_sentences(markdown: str) -> dict[str, dict[str, Said]]:
    """Read a file of sentences: by section and key, English before French; `\\n` is a new line.

    Points with a star, and remarks between `<!--` and `-->`, are for others to read.

    Raises:
        ValueError: if a key has not one sentence in each language, or stands twice.
    """
    pairs: dict[str, dict[str, list[str]]] = {}
    section, key = "", ""
    for line in markdown.splitlines():
        mark, _, text = line.partition(" ")
        if mark == "#":
            section, key = text, "title"
            if section in pairs:
                raise ValueError(f"{section} stands twice")
            pairs[section] = {}
        elif mark == "##":
            key = text
            if key in pairs.setdefault(section, {}):
                raise ValueError(f"{section}: {key!r} stands twice")
        elif mark == "-":
            pairs[section].setdefault(key, []).append(text.replace("\\n", "\n"))
        elif line.strip() and key and not line.startswith(("*", "<!--")):
            raise ValueError(f"{section}, {key!r}: a sentence stands on one line, after '- ', but {line!r} does not")
    for name, sentences in pairs.items():
        for key, languages in sentences.items():
            if len(languages) != 2:
                raise ValueError(f"{name}, {key!r}: {len(languages)} sentences instead of one in each language")
    return {
        name: {key: Said(english, french) for key, (english, french) in sentences.items()}
        for name, sentences in pairs.items()
    }


_OVERFLOWS = re.compile(r"overflow|too (?:large|big) to convert", re.IGNORECASE)


@contextmanager
def refusing_overflow() -> Iterator[None]:
    """Refuse sizes whose tensors have more bytes than torch can count; a context, and a decorator.

    Raises:
        LabError: in place of torch's error, also on the meta device, which counts the bytes of what it does not store.
    """
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        # Another error of these classes is not for this sentence.
        if not _OVERFLOWS.search(str(error)):
            raise
        raise refusal(
            en="a tensor of this size would have more bytes than a 64-bit number counts: give a smaller image size, "
            "sequence length or micro-batch.",
            fr="un tenseur de cette taille aurait plus d’octets qu’un nombre de 64 bits n’en compte : donnez une "
            "taille d’image, une longueur de séquence ou un micro-batch plus petits.",
        ) from None


def one_of(subject: str, value: object, legal: Iterable[str]) -> str:
    """Write the sentence that refuses `value` and lists the `legal` ones, the closest first.

    Example:
        >>> one_of("engine", "tortch", ["torch", "deepspeed"])
        "unknown engine 'tortch': did you mean 'torch'? Legal values: torch, deepspeed."
    """
    legal = list(legal)
    close = difflib.get_close_matches(str(value), legal, n=1)
    legal_list = ", ".join(legal)
    if close:
        return say(
            en=f"unknown {subject} {str(value)!r}: did you mean {close[0]!r}? Legal values: {legal_list}.",
            fr=f"{subject} {str(value)!r} : valeur inconnue, peut-être {close[0]!r} ? Valeurs permises : {legal_list}.",
        )
    return say(
        en=f"unknown {subject} {str(value)!r}: legal values: {legal_list}.",
        fr=f"{subject} {str(value)!r} : valeur inconnue ; valeurs permises : {legal_list}.",
    )


MEBIBYTE = 2**20
_FRENCH = str.maketrans({",": "\u202f", ".": ","})  # a narrow no-break space between thousands


def localized(written: str, into: Language | None = None) -> str:
    """Return a number that Python wrote (`1,234.5`) with the marks of a language (`1 234,5` in French).

    Args:
        written: the number, or a text whose only points and commas are those of numbers.
        into: the language; the reader's own by default.
    """
    return written.translate(_FRENCH) if (into or language()) == "fr" else written


def a_or_an(word: str) -> str:
    """Put the English article before a word: `an int`, `an ndarray`, `a list`."""
    return f"{'an' if word[:1] in 'aeioAEIO' or word.startswith('nd') else 'a'} {word}"


def minus(written: str) -> str:
    """Return a number with a minus sign (U+2212) instead of a hyphen."""
    return written.replace("-", "−")


def decimal(value: float, digits: int = 1, *, signed: bool = False, into: Language | None = None) -> str:
    """Format a number with so many digits after the decimal mark, thousands apart.

    From 10²¹ on it is written with an exponent. `into`: the language, by default the reader's own.

    Example:
        >>> decimal(1234.56), decimal(1e300)
        ('1,234.6', '1.0e+300')
    """
    if abs(value) >= 1e21:
        return localized(f"{value:{'+' if signed else ''}.{max(1, digits)}e}", into)
    return localized(f"{value:{'+' if signed else ''},.{digits}f}", into)


def integer(value: float) -> str:
    """Format a number as a whole one, thousands apart."""
    return decimal(value, 0)


def significant(value: float, digits: int = 3, *, grouped: bool = False, into: Language | None = None) -> str:
    """Format a number with at most so many significant digits, as `:g` does; `grouped` sets thousands apart.

    `into`: the language, by default the reader's own.

    Example:
        >>> significant(0.012345)
        '0.0123'
    """
    return localized(f"{value:{',' if grouped else ''}.{digits}g}", into)


def in_full(value: float, digits: int, *, into: Language | None = None) -> str:
    """Format a number with at most so many significant digits, its whole part in full and thousands apart.

    `into`: the language, by default the reader's own.

    Example:
        >>> in_full(1212424.7, 6), in_full(84000.0, 6), in_full(4 / 3, 3)
        ('1,212,425', '84,000', '1.33')
    """
    # Its whole part would need more digits than that, or it has no other.
    if abs(value) >= 10**digits or float(value).is_integer():
        return decimal(value, 0, into=into)
    return significant(value, digits, grouped=True, into=into)


def shortest(value: float) -> str:
    """Format a number with no more digits than it takes, and at most six."""
    return significant(value, 6)


def rounded(value: float, digits: int = 3) -> str:
    """Format a number with at most so many significant digits, but its whole part in full, thousands apart.

    Example:
        >>> rounded(12345.6), rounded(1.23456)
        ('12,346', '1.23')
    """
    return integer(value) if abs(value) >= 10 ** (digits - 1) else significant(value, digits)


def percent(share: float, digits: int | None = 1, *, signed: bool = False) -> str:
    """Format a share in percent, `3.4%` in English and `3,4 %` in French; `None`: one digit, unless it is a zero."""
    return _hundredths(share, digits, signed) + say(en="%", fr=" %")


def spaced_percent(share: float, digits: int | None = 1, *, signed: bool = False) -> str:
    """Format a share in percent as the SI writes it in either language: a space before the unit, a minus sign."""
    return minus(_hundredths(share, digits, signed)) + " %"


def _hundredths(share: float, digits: int | None, signed: bool) -> str:
    if digits is None:
        # Whole after rounding to one digit, such as 3.04 %.
        digits = 0 if float(f"{100 * share:.1f}").is_integer() else 1
    return decimal(100 * share, digits, signed=signed)


def brief_percent(share: float, *, signed: bool = False) -> str:
    """Format a share with one decimal below ten percent and none above: 3.4 %, 12 %."""
    # 9.95 and more would be rounded to 10.0.
    return spaced_percent(share, 0 if abs(100 * share) >= 9.95 else 1, signed=signed)


def _scaled(value: float, step: float, prefixes: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    while abs(value) >= step and index < len(prefixes) - 1:
        value /= step
        index += 1
    return value, prefixes[index]


def _digits(value: float) -> str:
    """Three significant digits, without exponent, with the decimal mark of the reader's language."""
    magnitude = abs(value)
    # One digit less behind the mark for each one before it.
    digits = f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
    return localized(digits)


def byte_units() -> tuple[str, ...]:
    """List the units of bytes by powers of 1,024, as the reader's language writes them."""
    byte = say(en="B", fr="o")
    return (byte, *(f"{prefix}{byte}" for prefix in ("Ki", "Mi", "Gi", "Ti", "Pi")))


def byte_scale(num_bytes: float) -> tuple[str, int]:
    """Choose the unit in which a figure of this size reads well: its name, and how many bytes it has."""
    units = byte_units()
    # At least 1 byte, as 0 would fit no unit.
    power = max(n for n in range(len(units)) if max(num_bytes, 1) >= 1024**n)
    return units[power], 1024**power


_SIZE: Final = re.compile(r"(\d+(?:[.,]\d+)?)\s*([KMGT]?)(i?)[BO]?", re.IGNORECASE)


def size_bytes(word: str) -> int | None:
    """Parse a size such as `30GiB` (powers of 1,024), `30GB` (of 1,000) or bytes without a unit; None if it is none."""
    match = _SIZE.fullmatch(word.strip())
    if match is None:
        return None
    number, prefix, binary = match.groups()
    # The position of the prefix is the power; a blank stands for none.
    return int(float(number.replace(",", ".")) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def format_bytes(num_bytes: float | None) -> str:
    """Format bytes with a binary prefix; a missing value is a dash.

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
    """Format a count, FLOPs or a rate with a decimal prefix; a missing value is a dash.

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
    """Format a duration in the unit a person would choose; a missing value is a dash."""
    if duration_s is None:
        return "—"
    if duration_s >= 120:
        minutes, seconds = divmod(round(duration_s), 60)
        return f"{minutes} min {seconds:02d} s"
    return f"{_digits(duration_s)} s" if duration_s >= 1 else f"{_digits(duration_s * 1e3)} ms"


def gap_text(gap: float | None) -> str:
    """Format a relative difference to its order of magnitude."""
    return "—" if gap is None else "0" if gap == 0 else f"{gap:.0e}"


_WRITERS: Final[dict[str, Callable[..., str]]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "integer": integer,
    "decimal": decimal,
    "percent": percent,
    "spaced": spaced_percent,
    "brief": brief_percent,
}
