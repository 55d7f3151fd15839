"""Exercise, verdict, prediction: what a lab asks, how it answers, and the numbers that students predict.

A judge is called with the student's function, in a child process, on the judge's inputs; it compares behaviour with a
reference and never reads the student's text (`dlojz.labs.kit.judges`). Every value is escaped before it is shown, and
the box in the notebook says what the text says.
"""

from __future__ import annotations

import dis
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from dlojz.base.language import Said as Said  # noqa: PLC0414 - the labs have all three from here
from dlojz.base.language import Sentences as Sentences  # noqa: PLC0414
from dlojz.base.language import Wrong as Wrong  # noqa: PLC0414
from dlojz.base.language import (
    a_or_an,
    byte_units,
    format_bytes,
    format_count,
    format_seconds,
    integer,
    minus,
    percent,
    say,
    shortest,
    significant,
)
from dlojz.base.requirements import distribution_of, extra_of, missing_library
from dlojz.base.table import safe, without_escapes
from dlojz.display.style import BLUE, NEUTRAL, VERMILION
from dlojz.labs.kit.answer_numbers import told_apart

if TYPE_CHECKING:
    from dlojz.labs.kit.sandbox import SandboxOutcome

State = Literal["right", "wrong", "todo", "note"]
_P = ParamSpec("_P")
_T = TypeVar("_T")

# Blue and orange rather than green and red, and a mark besides: told apart without seeing colours.
_LOOK: dict[State, tuple[str, str]] = {
    "right": ("✓", BLUE),
    "wrong": ("✗", VERMILION),
    "todo": ("…", NEUTRAL),
    "note": ("→", NEUTRAL),
}


TEXTS = Sentences(Path(__file__).with_name("data") / "exercise.md")


class NotDone(NotImplementedError):  # noqa: N818 - a state of the work, not a fault
    """Raised by the stub of an exercise that the student has not written yet.

    Args:
        exercise_id: The exercise, as in `lab.check("…", …)`.
    """

    def __init__(self, exercise_id: str) -> None:
        self.exercise_id = exercise_id
        super().__init__(not_done(exercise_id))

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of a stack of frames, which says nothing about work still to do.
        return [str(self)]


def not_done(exercise_id: str) -> str:
    """The sentence for an exercise that is still to do."""
    return TEXTS.say("verdict", "still to do", exercise_id=exercise_id)


@dataclass(frozen=True)
class Verdict:
    """One answer of a lab.

    Args:
        state: `right`, `wrong`, `todo`, or `note` (a hint, a comparison of two figures).
        message: Sentences a student can act on.
        printed: What the student's code printed while it was judged, already cut to a readable length.
        score: Of a valid answer to a challenge.
    """

    state: State
    message: str
    printed: str = ""
    score: float | None = None

    def __str__(self) -> str:
        text = f"{_LOOK[self.state][0]} {self.message}"
        return f"{text}\n{self._heading()}\n{self.printed}" if self.printed else text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark, colour = _LOOK[self.state]
        style = f"border-left: 4px solid {colour}; padding: 0.3em 0.8em; margin: 0.3em 0"
        message = "<br>".join(safe(line) for line in self.message.split("\n"))
        lines = "\n".join(safe(line.expandtabs(8)) for line in self.printed.split("\n"))
        printed = f"<br>{safe(self._heading())}<pre>{lines}</pre>" if self.printed else ""
        return f'<div style="{style}"><b style="color: {colour}">{mark}</b> {message}{printed}</div>'

    @staticmethod
    def _heading() -> str:
        return say(en="Your code printed:", fr="Votre code a affiché :")


def or_to_do(make: Callable[_P, _T]) -> Callable[_P, _T | Verdict]:
    """What a student's function gives, or one sentence: the exercise is to do, or its answer is not right and fails.

    Such a sentence is also given back where it comes as an argument, from another function that is `or_to_do`.
    """

    @wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T | Verdict:
        to_do = next((argument for argument in args if isinstance(argument, Verdict)), None)
        if to_do is not None:
            return to_do
        try:
            return make(*args, **kwargs)
        except NotDone as error:
            return Verdict("todo", str(error))
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:PRINTED_CHARACTERS].partition("\n")[0]
            # An error may come from a function that was found wrong before: that is said in the place of a traceback.
            sentence = refused([*args, *kwargs.values()], message)
            if not sentence:
                raise
            return Verdict("wrong", sentence)

    return made


_FOUND_RIGHT: dict[str, object] = {}
"""Functions that were judged, by name: the one that was found right last, else None."""


def refused(values: Iterable[object], message: str = "") -> str:
    """Say which functions, given or used by given ones, were judged and not found right; nothing where none was.

    Args:
        message: the error that a cell meets with them.
    """
    names = list(dict.fromkeys(_not_found_right(values)))
    if not names:
        return ""
    text = ", ".join(names)
    en = f", and this cell cannot go on with {'them' if names[1:] else 'it'} ({message})" if message else ""
    fr = f", et cette cellule ne peut pas s’en servir ({message})" if message else ""
    if names[1:]:
        return TEXTS.say("verdict", "several functions not right", text=text, en=en, fr=fr)
    return TEXTS.say("verdict", "a function not right", text=text, en=en, fr=fr)


def made_with_refused(values: Iterable[object]) -> str:
    """Say that what a cell shows was made with functions that were judged, and refused; nothing where none was."""
    names = [name for name in dict.fromkeys(_not_found_right(values)) if _FOUND_RIGHT[name] is None]
    if not names:
        return ""
    text = ", ".join(names)
    return TEXTS.say("verdict", "made with a refused function", text=text)


def _not_found_right(values: Iterable[object]) -> Iterator[str]:
    """Name the functions, given or used by a given one or by a class of the notebook, that were not found right."""
    pending = list(values)
    # Namespaces of the functions that were given: what they call there is looked into, what libraries define is not.
    scopes = [value.__globals__ for value in pending if isinstance(value, FunctionType)]
    seen_ids: set[int] = set()
    while pending:
        value = pending.pop(0)
        if id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        name = getattr(value, "__name__", "")
        # Also where a function was changed after it was found right: it is another object then.
        if isinstance(value, FunctionType | type) and name in _FOUND_RIGHT and _FOUND_RIGHT[name] is not value:
            yield str(name)
        if isinstance(value, FunctionType):
            if value.__module__ == "__main__" or any(value.__globals__ is scope for scope in scopes):
                pending += [value.__globals__.get(global_name) for global_name in _names(value.__code__)]
        else:
            value_type = value if isinstance(value, type) else type(value)
            if value_type.__module__ == "__main__":
                pending += [member for member in vars(value_type).values() if isinstance(member, FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals that a function reads; `co_names` has those of attributes too."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def kind_of(value: object) -> Said:
    """Name the type of a value as sentences do, in English with its article."""
    name = type(value).__name__
    return Said(a_or_an(name), name)


def show(verdict: Verdict) -> None:
    """Show a verdict in the notebook, or print it where there is none."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(verdict)
    else:
        display(verdict)


PRINTED_CHARACTERS = 600
WELL = 0.1
"""Gap up to which a prediction is called well predicted, whatever its tolerance."""
JUST_OVER = 1.02
"""Gap over tolerance up to which both may be written by the same digits."""
FACTOR = 0.5
"""Gap above which two numbers are a factor apart, rather than some per cent."""


@dataclass(frozen=True)
class Mistake:
    """A plausible wrong way: what it computes, and what to say to whoever took it.

    Args:
        way: called as the reference is.
        part: which of several numbers it is the wrong way to, from 0; None: to all that the answer returns.
        seen: what parts it from mistakes that give the same values: called with the JSON data that the trial brings
            back from each rank, it says whether they show this one.
    """

    way: Callable[..., Any]
    en: str
    fr: str
    part: int | None = None
    seen: Callable[[list[Any]], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise of a lab.

    Args:
        id: Stable name, as in `lab.check("attention", …)`.
        title: Shown in the table of progress.
        judge: Called with the student's function, in a child process; raises `Wrong` to refuse it. That of a
            challenge returns a score, any other one nothing.
        praise: Said when the answer is right: one sentence on what has been gained.
        hint, nearer: The first hint, and the second, nearer to the answer; neither gives the code.
    """

    id: str
    title: Said
    judge: Callable[[Callable[..., Any]], float | None]
    praise: Said
    hint: Said
    nearer: Said

    @property
    def hints(self) -> tuple[Said, Said]:
        """Both hints, in the order in which they are given."""
        return self.hint, self.nearer


@dataclass(frozen=True, kw_only=True)
class Challenge(Exercise):
    """A free-form problem: the judge refuses what breaks its rules, and returns the score of what does not.

    Args:
        target: The score to reach.
        unit: What is counted, as it stands after a number: `messages`, `% of DDP's bytes`.
    """

    target: float
    unit: Said

    def meets(self, score: float) -> bool:
        """Whether a score reaches the target."""
        return not self.is_better(self.target, score)

    def is_better(self, score: float, than: float) -> bool:
        """Whether one score is better than another one."""
        return score < than

    def told(self, score: float) -> str:
        """A score with its unit, and the target where it is missed."""
        text, target = minus(shortest(score)), minus(shortest(self.target))
        gap = "" if self.unit.en.startswith("%") else " "
        if self.meets(score):
            return say(en=f"{text}{gap}{self.unit.en}", fr=f"{text} {self.unit.fr}")
        return say(
            en=f"{text}{gap}{self.unit.en} (target: {target})", fr=f"{text} {self.unit.fr} (objectif : {target})"
        )

    def verdict(self, score: float) -> Verdict:
        """What is said of a valid answer."""
        score_text = self.told(score)
        if self.meets(score):
            reached = say(en=f"Target reached: {score_text}.", fr=f"Objectif atteint : {score_text}.")
            return Verdict("right", f"{reached} {self.praise}", score=score)
        return Verdict(
            "note", say(en=f"A valid answer: {score_text}.", fr=f"Réponse valide : {score_text}."), score=score
        )


def judge(exercise: Exercise, answer: object) -> Verdict:
    """Judge an answer within limits of time, memory and output; never raises for what the student wrote."""
    if answer is ...:
        return Verdict("todo", not_done(exercise.id))
    if not callable(answer):
        return Verdict("wrong", str(TEXTS.sentence("verdict", "no function", id=exercise.id, kind=kind_of(answer))))
    if getattr(exercise.judge, "on_ranks", False):
        import torch._dynamo  # noqa: F401 - here, once: the first optimizer on a rank would import it, for seconds
    from dlojz.labs.kit.sandbox import run_limited

    outcome = run_limited(lambda: _judged(exercise, answer))
    verdict = _verdict(exercise, outcome)
    if (name := getattr(answer, "__name__", "<lambda>")) != "<lambda>":
        # A challenge's valid answer that misses its target is noted: it is no wrong one.
        _FOUND_RIGHT[name] = answer if verdict.state in ("right", "note") else None
    return replace(verdict, printed=_shortened(_besides(outcome.printed, verdict.message)))


def _judged(exercise: Exercise, answer: Callable[..., Any]) -> list[Any]:
    """In the child: state and message, and of a challenge the score."""
    try:
        score = exercise.judge(answer)
    except Wrong as wrong:
        return ["wrong", str(wrong)]
    except NotDone as error:
        return ["todo", str(error)]
    except BaseException as error:  # the student's code may raise anything, SystemExit and KeyboardInterrupt included
        missing = distribution_of(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        # A library of the course that is not installed is no fault of the answer's.
        if extra_of(missing):
            absent = missing_library(missing)
            return ["todo", say(en=f"Not judged: {absent}", fr=f"Non vérifié : {absent}")]
        return ["wrong", _raised(error, answer)]
    if isinstance(exercise, Challenge) and score is not None:
        verdict = exercise.verdict(float(score))
        return [verdict.state, verdict.message, verdict.score]
    return ["right", str(exercise.praise)]


def _verdict(exercise: Exercise, outcome: SandboxOutcome) -> Verdict:
    if outcome.end == "answered":
        state, message, *score = outcome.answer
        return Verdict(state, message, score=score[0] if score else None)
    return Verdict(
        "wrong",
        {
            "too_long": TEXTS.say("verdict", "too long", limit_s=outcome.limit_s),
            "flood": TEXTS.say("verdict", "too much printed"),
            "died": TEXTS.say("verdict", "ended without an answer", exit_code=outcome.exit_code),
        }[outcome.end],
    )


def _too_much_memory() -> str:
    return TEXTS.say("verdict", "too much memory")


_TOO_FEW_GRADIENTS = re.compile(r"returned an incorrect number of gradients \(expected (\d+), got (\d+)\)")
_OTHER_SHAPE = re.compile(
    r"returned an invalid gradient at index (\d+) - got (\[[\d, ]*\]) but expected shape compatible with (\[[\d, ]*\])"
)


def _backward_returns(text: str) -> str:
    """Say what autograd refuses of the results of a student's own `backward`; nothing for any other error."""
    if number := _TOO_FEW_GRADIENTS.search(text):
        return TEXTS.say("verdict", "another number of gradients", due=number[1], returned=number[2])
    if shapes := _OTHER_SHAPE.search(text):
        index = int(shapes[1]) + 1
        return str(
            TEXTS.sentence("verdict", "a gradient of another shape", index=index, shape=shapes[2], due=shapes[3])
        )
    return ""


def unusable(text: str) -> str:
    """Say that the judge, not the student's code, met an error with an answer."""
    if sentence := _backward_returns(text):
        return sentence
    # Python's words for a call with too many or too few arguments.
    if "positional argument" in text:
        return TEXTS.say("verdict", "other arguments", text=text)
    return TEXTS.say("verdict", "unusable", text=text)


def _raised(error: BaseException, answer: object) -> str:
    """An exception in one sentence, with the student's line where there is one."""
    name, text = type(error).__name__, without_escapes(str(error)).strip().split("\n")[0]
    # torch's allocator raises RuntimeError, not MemoryError.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in text):
        return _too_much_memory()
    message = f"{name}: {text}" if text else name
    code = getattr(answer, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    student_frames = [frame for frame in frames if isinstance(code, CodeType) and frame.filename == code.co_filename]
    # No line of the answer's cell: the error came from the judge, with what the answer returned.
    if not student_frames:
        return unusable(message)
    number, line = student_frames[-1].lineno, student_frames[-1].line
    return TEXTS.say("verdict", "raised at a line", message=message, number=number, line=line)


_STAMP = re.compile(r"^(?:\[rank\d+\]:)?\[[IWEF]\d{4} [\d:.]+ \S+:\d+\] ")


def without_stamp(line: str) -> str:
    """Take the rank, the time and the place off a line of torch's C++ log."""
    return _STAMP.sub("", line)


def _besides(printed: str, message: str) -> str:
    """What was printed, less the lines of torch's C++ log that the message tells already."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if not (_STAMP.match(line) and without_stamp(line).strip() in message))


def _shortened(printed: str) -> str:
    text = "".join(character if character.isprintable() or character in "\n\t" else "�" for character in printed)
    return text if len(text) <= PRINTED_CHARACTERS else text[:PRINTED_CHARACTERS] + "…"


Kind = Literal["bytes", "count", "place", "rate", "ratio", "seconds", "share"]
_QUOTIENTS: frozenset[Kind] = frozenset({"rate", "ratio", "seconds", "share"})
"""What is compared by its quotient, so that half and double are as far off."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One question whose answer is a number.

    Args:
        id: Stable name, as in `lab.predict("parameters", …)`.
        en, fr: What to predict, in one sentence.
        kind: How the number is written, and how two of them are compared: a `place` in an order by the places between
            them; a `rate` (per second), a `ratio`, `seconds` and a `share` by the larger over the smaller, less one;
            `bytes` and a `count` by the distance from the figure.
        tolerance: Gap up to which a prediction counts as good, as `gap` gives it; a place may always be off by one.
    """

    id: str
    en: str
    fr: str
    kind: Kind
    tolerance: float = 0.1

    @property
    def question(self) -> Said:
        """What to predict."""
        return Said(self.en, self.fr)

    @property
    def unit(self) -> str:
        """The unit the number is in, in words."""
        return str(
            {
                "bytes": Said("in bytes", "en octets"),
                "count": Said("without unit", "sans unité"),
                "place": Said("a whole number from 1 on", "un entier à partir de 1"),
                "rate": Said("per second", "par seconde"),
                "ratio": Said("without unit", "sans unité"),
                "seconds": Said("in seconds", "en secondes"),
                "share": Said("a share between 0 and 1", "une part entre 0 et 1"),
            }[self.kind]
        )

    def admits(self, number: float) -> bool:
        """Check that a number can be what is asked for: a share lies between 0 and 1, only a ratio may be negative."""
        if self.kind == "place":
            return number >= 1 and float(number).is_integer()
        return self.kind == "ratio" or (number >= 0 and (self.kind != "share" or number <= 1))

    def gap(self, predicted: float, value: float) -> float:
        """Distance of a prediction from the figure: in places, or relative; infinite where no quotient exists."""
        # Before any quotient: two zeros are equal.
        if predicted == value:
            return 0.0
        if self.kind == "place":
            return abs(predicted - value)
        if self.kind in _QUOTIENTS:
            return _factor(predicted, value) - 1
        return abs(predicted - value) / abs(value) if value else float("inf")

    def is_within(self, predicted: float, value: float) -> bool:
        """Whether the gap is within the tolerance, up to the rounding of a quotient; for places, at most one."""
        limit = 1.0 if self.kind == "place" else self.tolerance * (1 + 1e-9)
        return self.gap(predicted, value) <= limit

    def format(self, value: float) -> str:
        """The number with its unit."""
        if self.kind == "bytes":
            return TEXTS.say("verdict", "bytes", short=format_bytes(value), full=integer(value))
        if self.kind == "seconds":
            return format_seconds(value)
        if self.kind in ("count", "rate") and abs(value) >= 10_000:
            short = format_count(value)
            return say(en=f"{short} ({integer(value)})", fr=f"{short} ({integer(value)})")
        return minus(shortest(value))

    def compare(self, predicted: float, value: float | None) -> Verdict:
        """Compare a prediction with the value: both numbers, and how far apart they are."""
        if value is None:
            return Verdict("wrong", TEXTS.say("verdict", "no figure"))
        within = self.is_within(predicted, value)
        predicted_text, theirs = self.format(predicted), self.format(value)
        # Both read the same and are not: as many more digits as tell them apart.
        if predicted_text == theirs and predicted != value and not within:
            predicted_text, theirs = (f"{predicted_text} ({digits})" for digits in told_apart(predicted, value, 6))
        figures_text = say(
            en=f"Predicted: {predicted_text}\nResult: {theirs}", fr=f"Prédit : {predicted_text}\nObtenu : {theirs}"
        )
        if predicted == value:
            return Verdict("right", figures_text + say(en="\nExactly right.", fr="\nC’est exact."))
        gap, margin = self._gap_text(predicted, value), self._margin_text(predicted, value)
        if within and self.kind != "place" and self.gap(predicted, value) <= WELL:
            return Verdict("right", figures_text + say(en=f"\n{gap}: well predicted.", fr=f"\n{gap} : bien prédit."))
        if within:
            return Verdict(
                "right",
                figures_text
                + say(en=f"\n{gap}: within the margin ({margin}).", fr=f"\n{gap} : dans la marge ({margin})."),
            )
        return Verdict("note", figures_text + self._beyond_margin(predicted, value, gap, margin))

    def _beyond_margin(self, predicted: float, value: float, gap: str, margin: str) -> str:
        """Say how a prediction outside its margin misses the figure."""
        if unit := self._other_unit(predicted, value):
            return "\n" + TEXTS.say("prediction", "right in another unit", unit=unit, asked=self.unit)
        if self.kind != "place" and self.gap(predicted, value) <= JUST_OVER * self.tolerance:
            return "\n" + TEXTS.say("prediction", "just over the margin", gap=gap, margin=margin)
        reach = TEXTS.sentence("prediction", "the exact number")
        if self.tolerance:
            reach = TEXTS.sentence("prediction", "within a margin", margin=margin)
        return "\n" + TEXTS.say("prediction", "find out why", gap=gap, reach=reach)

    def _other_unit(self, predicted: float, value: float) -> str:
        """Unit in which a prediction would be right; none for what has one unit only."""
        sizes: dict[str, float] = {}
        if self.kind == "bytes":
            # Bytes of each unit that the figure may have been given in: powers of 1024, and of 1000.
            sizes = {name: 1024.0**power for power, name in enumerate(byte_units()) if power}
            sizes |= {f"{prefix}{say(en='B', fr='o')}": 1000.0**power for power, prefix in enumerate("kMGT", start=1)}
        elif self.kind == "seconds":
            sizes = {"ms": 1e-3, "µs": 1e-6}
        candidates = {unit: self.gap(predicted * size, value) for unit, size in sizes.items()}
        candidates = {unit: gap for unit, gap in candidates.items() if self.is_within(predicted * sizes[unit], value)}
        # Of several units that would fit, the one in which the figure is nearest.
        return min(candidates, key=candidates.__getitem__) if candidates else ""

    def _gap_text(self, predicted: float, value: float) -> str:
        if self.kind == "place":
            place_count = int(self.gap(predicted, value))
            if place_count == 1:
                return say(en="One place apart", fr="Une place d’écart")
            return say(en=f"{place_count} places apart", fr=f"{place_count} places d’écart")
        off, factor = self.gap(predicted, value), _factor(predicted, value)
        if off < 1e-3:
            return say(en="Less than 0.1% apart", fr="Moins de 0,1 % d’écart")
        if factor <= 1 + FACTOR:
            return say(en=f"{percent(off)} apart", fr=f"{percent(off)} d’écart")
        if factor == float("inf"):
            return say(en="Far apart", fr="Très loin l’un de l’autre")
        return say(en=f"A factor of {significant(factor)} apart", fr=f"Un facteur {significant(factor)} d’écart")

    def _margin_text(self, predicted: float, value: float) -> str:
        """The tolerance in words, as it stands after “within”: a factor where the gap is told as one."""
        if self.kind == "place":
            return say(en="one place", fr="une place")
        if self.kind in _QUOTIENTS and 1 + FACTOR < _factor(predicted, value) < float("inf"):
            factor = significant(1 + self.tolerance)
            return say(en=f"a factor of {factor}", fr=f"un facteur {factor}")
        return percent(self.tolerance, None)


def _factor(left: float, right: float) -> float:
    """The larger of two numbers over the smaller; infinite where they differ in sign, or one is zero."""
    if not left or not right or (left < 0) != (right < 0):
        return float("inf")
    return max(left / right, right / left)
