"""Judge of an exercise: compare an answer with a reference, name the mistake, and read what answers return.

One class, `Judge`, made of data: a reference, inputs, the usual mistakes. With `on_ranks` the answer runs on ranks
(`dlojz.labs.kit.rank_judges`). A mistake is named only if it explains the answer on every input, and no other one does;
infinite values and NaN explain nothing. All else is told as what it looks like.

The functions `expect_…` read what an answer returned; what cannot be read is refused by a sentence that says what is
expected, and nothing is guessed.
"""

from __future__ import annotations

import copy
import json
import math
import operator
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlojz.base.errors import LabError
from dlojz.base.language import in_full, percent, say, shortest
from dlojz.base.machine import patience
from dlojz.labs.kit.answer_numbers import is_number, is_tensor, plain, plain_like, same_number, single, told_apart
from dlojz.labs.kit.common_gap import common_gap
from dlojz.labs.kit.exercise import Mistake, NotDone, Said, Sentences, Wrong, kind_of
from dlojz.labs.kit.rank_judges import (
    Trouble,
    Values,
    diagnosis,
    explains,
    normals,
    refuse_errors,
    run_on_ranks,
    tells_apart,
)
from dlojz.processes.forks import RankAnswer

if TYPE_CHECKING:
    from dlojz.config.run_config import RunConfig

TEXTS = Sentences(Path(__file__).with_name("data") / "judges.md")

TOLERANCE = 1e-4
"""Relative distance up to which two elements of tensors are the same."""
NEAR = 1e-3
"""Distance up to which two elements of gradients are the same, as a share of the largest one."""
LOST = 1e-5
"""A gradient below this share of the largest of all leaves is rounding in fp32: one way to it differs from another."""
Answer = Callable[..., Any]
Numbers = tuple[float, ...]
Case = tuple[Any, ...]
NAMING_S = 5.0
"""Seconds in which a mistake on ranks is looked for, longer on a loaded machine; then its symptom is told."""
RANK_CASES = ((2, 11), (3, 12), (4, 13))
"""Number of ranks and seed: several numbers, an odd one among them, so that no formula holds by chance."""


@dataclass(frozen=True)
class Judge:
    """Compare an answer with a reference on all cases; raise `Wrong`, with the usual mistake by name.

    Args:
        reference: the right way; None where `trial` alone refuses what is wrong. On ranks: `reference(rank, size,
            seed)`, what a rank should hold, tensors by name, computed without communication.
        cases: gives the inputs, several and different, so that no constant passes; may load torch. On ranks: numbers
            of ranks and seeds.
        mistakes: tried in order on an answer that differs from the reference.
        repairs: mistakes that make an answer fail, undone: `way(answer)` gives the answer with other arguments or
            another result. One is named if the answer is then right on every case, and with no other one.
        trial: `trial(answer, *case)`, what becomes of an answer on a case, compared in place of what it returns:
            several tensors by name, where each has its label; may raise `Wrong`. On ranks, `trial(answer, rank,
            size, seed)` makes this rank's inputs from the seed, calls the answer, and returns tensors by name, or a
            pair of JSON data and such tensors.
        read: reads what an answer returned, or refuses it; by default it is held to the type of the reference's.
        parts: names of the numbers, where the answer returns several.
        told: a case in words, as the beginning of the sentence about an answer that nothing explains: a sentence with
            {0}, {1}… in place of its arguments, or a function of the case.
        tolerance: relative distance up to which two numbers are the same.
        differs: called with the case, what was given and what is right where no mistake explains an answer; what to
            say in place of the general sentence.
        leaves: arguments, by place, that an answer must be differentiable in, and how sentences call them: where its
            values are right, the gradients that it gives them are held to the reference's.
        counts: whether later cells count or cut with what the answer returns: it must be an int, not a float.
        then: asks an answer whose values are right for more; raises `Wrong`.
        on_ranks: whether the answer runs on several ranks; the fields below are for these.
        labels: how sentences call each name, of results on ranks, or of what a trial returns as a mapping.
        faults: mistakes as what each rank would hold, `way(rank, size, seed)`, some of the results by name, or None
            where the mistake cannot be made; tried before `mistakes`, which run on ranks.
        local: `local(rank, size, seed)`, what a rank holds if nothing is communicated, for the names where that helps.
        bias: `bias(size, seed)`, what must be added once over all ranks.
        inspect: looks at calls and JSON data of all ranks where their values are right; raises `Wrong`.
    """

    reference: Callable[..., Any] | None = None
    _: KW_ONLY
    cases: Callable[[], Iterable[Case]] | Sequence[Case] = RANK_CASES
    mistakes: Sequence[Mistake] = ()
    repairs: Sequence[Mistake] = ()
    trial: Callable[..., Any] | None = None
    read: Callable[[Any], Any] | None = None
    parts: Sequence[Said] = ()
    told: Said | Callable[[Case], str | Said] | None = None
    differs: Callable[[Any, Any, Any], Said] | None = None
    tolerance: float = 1e-9
    leaves: Mapping[int, Said] = field(default_factory=dict)
    counts: bool = False
    then: Callable[[Answer], None] | None = None
    on_ranks: bool = False
    labels: Mapping[str, Said] = field(default_factory=dict)
    faults: Sequence[Mistake] = ()
    local: Values | None = None
    bias: Callable[[int, int], Mapping[str, Tensor]] | None = None
    inspect: Callable[[list[RankAnswer], int], None] | None = None

    def __call__(self, answer: Answer) -> None:
        """Judge an answer.

        Raises:
            Wrong: unless it is right.
        """
        cases = list(self.cases() if callable(self.cases) else self.cases)
        (self._judge_on_ranks if self.on_ranks else self._judge_here)(answer, cases)
        if self.then is not None:
            self.then(answer)

    def _judge_here(self, answer: Answer, cases: list[Case]) -> None:
        if self.reference is None:
            for case in cases:
                self._outcome(answer, case)
            return
        expected = [self._outcome(self.reference, case) for case in cases]
        try:
            results = self._given(answer, cases, expected)
        except (Wrong, NotDone, MemoryError):
            raise
        except Exception:
            self._name(self.repairs, lambda repair: self._is_right(repair.way(answer), cases, expected))
            raise
        if self._same(results, expected):
            if self.counts:
                _refuse_floats(results)
            for case in cases if self.leaves else ():
                self._check_gradients(answer, case)
            return
        mistakes = [mistake for mistake in self.mistakes if mistake.part is None]
        self._name(mistakes, lambda mistake: self._explains(mistake, results, expected, cases))
        if self.parts:
            self._refuse_part(cases, results, expected, answer)
        if isinstance(expected[0], Mapping):
            self._refuse_result(results, expected)
        common = common_gap(results, expected, cases, answer)
        if common is not None:
            raise Wrong(*common)
        worst = next(index for index in range(len(cases)) if not self._same(results[index], expected[index]))
        if self.differs is not None:
            raise Wrong(*self.differs(cases[worst], results[worst], expected[worst]))
        raise Wrong(self._difference(cases[worst], results[worst], expected[worst]))

    def _given(self, answer: Answer, cases: list[Case], expected: list[Any]) -> list[Any]:
        return [self._read(self._outcome(answer, case), right) for case, right in zip(cases, expected, strict=True)]

    def _is_right(self, answer: Answer, cases: list[Case], expected: list[Any]) -> bool:
        try:
            return self._same(self._given(answer, cases, expected), expected)
        except Exception:  # the student's code may raise anything
            return False

    @staticmethod
    def _name(mistakes: Sequence[Mistake], explains: Callable[[Mistake], bool]) -> None:
        """Name the mistake that explains an answer; none where several do, which the cases do not part."""
        candidates = {mistake.en: mistake for mistake in mistakes if explains(mistake)}
        if len(candidates) == 1:
            mistake = next(iter(candidates.values()))
            raise Wrong(mistake.en, mistake.fr)

    def _explains(self, mistake: Mistake, results: list[Any], expected: list[Any], cases: list[Case]) -> bool:
        """Whether a mistake gives what the answer gave, in every case; infinite values and NaN prove nothing."""
        try:
            would = [self._outcome(mistake.way, case) for case in cases]
            return all(map(self._same_where_finite, results, would)) and not all(
                map(self._same_where_finite, would, expected)
            )
        except (ArithmeticError, IndexError, RuntimeError, Wrong):
            return False  # a way that cannot be gone to the end on these inputs has given nothing

    def _same_where_finite(self, value: Any, reference: Any) -> bool:
        if isinstance(reference, Mapping):
            return all(self._same_where_finite(value[name], part) for name, part in reference.items())
        if not is_tensor(reference) or value.shape != reference.shape or not reference.is_floating_point():
            return self._same(value, reference)
        finite = reference.isfinite()
        return bool((value.isfinite() == finite).all()) and self._same(value[finite], reference[finite])

    def _outcome(self, function: Answer, case: Case) -> Any:
        # A copy for each call: an answer that changes its arguments must not change the reference's.
        inputs = copy.deepcopy(case)
        return function(*inputs) if self.trial is None else self.trial(function, *inputs)

    def _check_gradients(self, answer: Answer, case: Case) -> None:
        """Refuse an answer that gives its arguments other gradients than the reference does."""
        assert self.reference is not None
        expected = self._gradients(self.reference, case)
        largest = max((float(right.abs().max()) for right in expected if right is not None), default=0.0)
        for name, actual, right in zip(self.leaves.values(), self._gradients(answer, case), expected, strict=True):
            if right is None or float(right.abs().max()) <= LOST * largest:
                continue
            if actual is not None and bool((actual - right).abs().max() <= NEAR * right.abs().max()):
                continue
            if actual is None or not bool(actual.any()):
                raise TEXTS.wrong("judge", "no gradient", name=name)
            raise TEXTS.wrong("judge", "another gradient", name=name)

    def _gradients(self, function: Answer, case: Case) -> list[Tensor | None]:
        """The gradients of the leaves, for a sum of what becomes of the answer with weights that are all different."""
        leaves = {index: case[index].detach().clone().requires_grad_() for index in self.leaves}
        # Clones: an answer may work in place, which a leaf does not allow.
        inputs = [leaves[i].clone() if i in leaves else copy.deepcopy(value) for i, value in enumerate(case)]
        try:
            value = function(*inputs) if self.trial is None else self.trial(function, *inputs)
        except RuntimeError as error:
            if "numpy()" not in str(error):
                raise
            return [None] * len(leaves)
        if not value.requires_grad:
            return [None] * len(leaves)
        weights = torch.linspace(0.5, 1.5, value.numel()).view(value.shape)
        return list(torch.autograd.grad((value * weights).sum(), list(leaves.values()), allow_unused=True))

    def _read(self, value: Any, right: Any) -> Any:
        if self.read is not None:
            return self.read(value)
        if self.parts:
            return expect_numbers(value, self.parts)
        value = plain_like(value, right)
        _check_type(value, right)
        return value

    def _same(self, value: Any, right: Any) -> bool:
        if isinstance(right, Mapping):
            return all(self._same(value[name], reference) for name, reference in right.items())
        if is_tensor(right):
            return value.shape == right.shape and bool(((value - right).abs() <= TOLERANCE * (1 + right.abs())).all())
        if isinstance(right, Real):
            return same_number(float(value), float(right), self.tolerance)
        if isinstance(right, list | tuple):
            return len(value) == len(right) and all(map(self._same, value, right))
        return bool(value == right)

    def _refuse_part(self, cases: list[Case], values: list[Numbers], expected: list[Numbers], answer: Answer) -> None:
        """Say which of several numbers is wrong, and why if a mistake explains it."""
        if self._same([sorted(numbers) for numbers in values], [sorted(right) for right in expected]):
            order_en, order_fr = _listed(self.parts)
            raise TEXTS.wrong("judge", "another order of the numbers", order_en=order_en, order_fr=order_fr)
        part = next(part for part in range(len(self.parts)) if not self._same(_nth(values, part), _nth(expected, part)))
        numbers = _nth(values, part)
        self._name(
            [mistake for mistake in self.mistakes if mistake.part == part],
            lambda mistake: all(
                self._same(value, mistake.way(*case)) for value, case in zip(numbers, cases, strict=True)
            ),
        )
        name = self.parts[part]
        common = common_gap(_nth(values, part), _nth(expected, part), cases, answer)
        if common is not None:
            raise Wrong(f"{_begun(name.en)}: {_going_on(common.en)}", f"{_begun(name.fr)} : {_going_on(common.fr)}")
        index = next(index for index in range(len(cases)) if not self._same(values[index][part], expected[index][part]))
        case_text = self._told(cases[index])
        right, value = told_apart(expected[index][part], values[index][part], 5)
        raise TEXTS.wrong("judge", "another number", case_text=case_text, name=name, right=right, value=value)

    def _refuse_result(self, results: list[Any], expected: list[Any]) -> None:
        """Say which of several results, by name, is the first that is not right, and what those before are."""
        wrong = next(
            name
            for name in expected[0]
            if not all(self._same(result[name], right[name]) for result, right in zip(results, expected, strict=True))
        )
        label = self.labels[wrong]
        values, right = [result[wrong] for result in results], [reference[wrong] for reference in expected]
        before = [self.labels[name] for name in expected[0]][: list(expected[0]).index(wrong)]
        en = f"{_begun(' and '.join(tag.en for tag in before))} are right, but not {label.en}. " if before else ""
        fr = f"Ceci est juste : {', '.join(tag.fr for tag in before)} ; mais pas ceci : {label.fr}. " if before else ""
        common = common_gap(values, right)
        if common is not None:
            name_en, name_fr = ("", "") if before else (f"{_begun(label.en)}: ", f"{_begun(label.fr)} : ")
            raise Wrong(f"{en}{name_en}{common.en}", f"{fr}{name_fr}{common.fr}")
        worst = next(i for i in range(len(values)) if not self._same(values[i], right[i]))
        gaps = (values[worst] - right[worst]).abs()
        share, gap = float((gaps > TOLERANCE * (1 + right[worst].abs())).double().mean()), gaps.max().item()
        raise TEXTS.wrong(
            "judge",
            "one of several results differs",
            en=en,
            Label=label.begun(),
            share=percent(share, 0),
            gap=in_full(gap, 2),
            fr=fr,
        )

    def _told(self, case: Case) -> str:
        if isinstance(self.told, Said):
            return str(self.told).format(*(shortest(part) if isinstance(part, float) else part for part in case))
        if self.told is not None:
            return str(self.told(case))
        arguments = ", ".join(map(repr, case))
        return say(en=f"For the arguments ({arguments})", fr=f"Pour les arguments ({arguments})")

    def _difference(self, case: Case, value: Any, right: Any) -> str:
        if not is_tensor(right):
            text, target = told_apart(float(value), float(right), 6) if isinstance(right, Real) else (value, right)
            case_text = self._told(case)
            return TEXTS.say("judge", "another value", case_text=case_text, target=target, text=text)
        if value.shape != right.shape:
            return TEXTS.say("judge", "another shape", shape=tuple(value.shape), due=tuple(right.shape))
        if not bool(value.isfinite().all()):
            return TEXTS.say("judge", "infinite or NaN")
        gaps = (value - right).abs()
        gap, share = gaps.max().item(), percent(float((gaps > TOLERANCE * (1 + right.abs())).double().mean()), 0)
        return TEXTS.say("judge", "values differ", share=share, gap=in_full(gap, 2))

    def _judge_on_ranks(self, answer: Answer, cases: list[Case]) -> None:
        for index, (size, seed) in enumerate(cases):
            answers = self._run(answer, size, seed)
            refuse_errors(answers)
            trouble = self._diagnosis([rank.tensors for rank in answers], size, seed)
            if trouble is not None:
                self._refuse_on_ranks(answer, answers, trouble, index, cases)
            if self.inspect is not None:
                self.inspect(answers, size)

    def _refuse_on_ranks(
        self, answer: Answer, answers: list[RankAnswer], trouble: Trouble, index: int, cases: list[Case]
    ) -> None:
        """Name a mistake that explains the answer on all numbers of ranks, else say what all of them have in common.

        Args:
            answers: of the first case that is not right.
            trouble: that case's.
            index: where it stands among the cases; those before are right.
        """
        until_s = time.monotonic() + NAMING_S * patience()
        ran = [(case, self._run(answer, *case)) for case in cases[index + 1 :]]
        evidence = [
            (cases[index], answers),
            *((case, ranks) for case, ranks in ran if not any(rank.error for rank in ranks)),
        ]
        mistake = self._mistake_on_ranks(evidence, cases[:index], until_s)
        if mistake is not None:
            raise Wrong(mistake.en, mistake.fr)
        troubles = [self._diagnosis([rank.tensors for rank in ranks], *case) for case, ranks in evidence[1:]]
        # The most general of the sentences holds in every case: what is told of one number of ranks may be chance.
        raise Wrong(
            *max(
                [trouble, *(symptom for symptom in troubles if symptom is not None)], key=lambda trouble: trouble.rank
            ).said
        )

    def _mistake_on_ranks(
        self, evidence: list[tuple[Case, list[RankAnswer]]], right: list[Case], until_s: float
    ) -> Mistake | None:
        """The mistake that explains an answer in all cases; None where there is none, or no time to be sure.

        Args:
            evidence: cases with what the answer gave there, the first not as it should be.
            right: cases in which it is right.
            until_s: when to look no further.
        """
        for fault in self.faults:
            verdicts = [self._shown(fault, case, ranks) for case, ranks in evidence]
            verdicts += [self._shown(fault, case, None) for case in right]
            if True in verdicts and False not in verdicts:
                return fault
        for mistake in self.mistakes:
            verdicts = []
            for case, ranks in [*evidence, *((case, None) for case in right)]:
                # Each mistake runs on ranks once more, for seconds: without time to be sure, none is named.
                if time.monotonic() > until_s:
                    return None
                verdicts.append(self._made(mistake, case, ranks))
                if verdicts[-1] is False:
                    break
            if True in verdicts and False not in verdicts:
                return mistake
        return None

    def _shown(self, fault: Mistake, case: Case, ranks: list[RankAnswer] | None) -> bool | None:
        """Whether ranks hold what they would under a fault; None where the case proves nothing.

        Args:
            ranks: what the answer gave; None where it is right.
        """
        would = [fault.way(rank, *case) for rank in range(case[0])]
        right = self._right(case)
        tensors = right if ranks is None else [rank.tensors for rank in ranks]
        if any(values is None for values in would):  # it changes nothing here: what is wrong has another cause
            return None if explains(right, tensors) else False
        if not explains(would, tensors):
            return False
        return None if ranks is None or explains(right, tensors) else tells_apart(would, right)

    def _made(self, mistake: Mistake, case: Case, ranks: list[RankAnswer] | None) -> bool | None:
        """Whether a mistake gives on ranks what the answer gave; None where the case proves nothing."""
        if ranks is not None and mistake.seen is not None and not mistake.seen([rank.value for rank in ranks]):
            return False
        runs = self._run(mistake.way, *case)
        if any(rank.error for rank in runs):
            return False
        right, would = self._right(case), [rank.tensors for rank in runs]
        tensors = right if ranks is None else [rank.tensors for rank in ranks]
        if not explains(would, tensors, True):
            return False
        return True if tells_apart(would, right) else None

    def _right(self, case: Case) -> list[Mapping[str, Tensor]]:
        assert self.reference is not None
        return [self.reference(rank, *case) for rank in range(case[0])]

    def _diagnosis(self, tensors: list[dict[str, Tensor]], size: int, seed: int) -> Trouble | None:
        return diagnosis(
            tensors,
            self._right((size, seed)),
            local=[self.local(rank, size, seed) for rank in range(size)] if self.local else None,
            bias=self.bias(size, seed) if self.bias else None,
            labels=self.labels,
        )

    def _run(self, function: Answer, size: int, seed: int) -> list[RankAnswer]:
        assert self.trial is not None
        return run_on_ranks(self.trial, function, size, seed)


def _nth(rows: Sequence[Numbers], part: int) -> list[float]:
    return [row[part] for row in rows]


def _begun(words: str) -> str:
    return words[:1].upper() + words[1:]


def _going_on(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _listed(names: Sequence[Said]) -> tuple[str, str]:
    return ", ".join(name.en for name in names), ", ".join(name.fr for name in names)


def _check_type(value: object, right: object) -> None:
    refuse_nothing(value)
    if is_tensor(right) and not is_tensor(value):
        raise TEXTS.wrong("judge", "no tensor returned", kind=kind_of(value))
    if isinstance(right, Real) and not is_number(value):
        raise TEXTS.wrong("judge", "no number", kind=kind_of(value))


def _refuse_floats(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _refuse_floats(value)
        elif isinstance(value, float):
            raise TEXTS.wrong("judge", "a float for a whole number", value=value)


def refuse_nothing(result: object, names: str = "") -> None:
    """Refuse None, which is what a function without return gives.

    Args:
        result: what the answer returned.
        names: what it is to return, as the sentence quotes it, e.g. `pack, unpack`.

    Raises:
        Wrong: for None.
    """
    if result is None:
        returned = f"return {names}" if names else "return"
        raise TEXTS.wrong("judge", "nothing is returned", returned=returned)


def reader(convert: Callable[[Any], Any], expected: Said, names: str = "") -> Callable[[Any], Any]:
    """Make a reader of what answers return.

    Args:
        convert: makes of it what is compared; raises TypeError or ValueError where it cannot.
        expected: the beginning of a sentence, e.g. `A list of whole numbers is expected`.
        names: as in `refuse_nothing`.

    Returns:
        A function that raises `Wrong` for nothing, and for what `convert` refuses.
    """

    def read(result: Any) -> Any:
        refuse_nothing(result, names)
        if isinstance(result, Generator):
            raise TEXTS.wrong("judge", "a generator", expected=expected)
        try:
            return convert(plain(result))
        except (TypeError, ValueError):
            raise TEXTS.wrong("judge", "something else is returned", expected=expected, result=shown(result)) from None

    return read


def expect_several(returned: object, names: str, count: int) -> tuple[Any, ...]:
    """Read what a function returned that gives several things.

    Args:
        names: of the things, as a sentence quotes them, e.g. `(q, scale)`.

    Raises:
        Wrong: if they are not so many.
    """
    refuse_nothing(returned)
    returned = plain(returned) if getattr(returned, "ndim", 0) == 1 else returned
    results = tuple(returned) if isinstance(returned, tuple | list) else ()
    if len(results) != count:
        key = "another number of results" if isinstance(returned, tuple | list) else "one thing for several results"
        raise TEXTS.wrong("judge", key, count=count, names=names, kind=kind_of(returned), length=len(results))
    return results


def expect_tensor(value: object, name: str, shape: Sequence[int]) -> Tensor:
    """Read a tensor of one shape.

    Raises:
        Wrong: if it is none, or of another shape.
    """
    refuse_nothing(value)
    if not torch.is_tensor(value):
        raise TEXTS.wrong("judge", "no tensor", name=name, kind=kind_of(value))
    if tuple(value.shape) != tuple(shape):
        raise TEXTS.wrong("judge", "another shape of a tensor", name=name, shape=tuple(value.shape), due=tuple(shape))
    return value


def expect_int8(value: object, name: str, shape: Sequence[int]) -> Tensor:
    """Read a tensor of int8, as float64 for comparison.

    Raises:
        Wrong: if it is kept in another type: the bytes of a file depend on it.
    """
    tensor = expect_tensor(value, name, shape)
    if tensor.dtype != torch.int8:
        kind, num_bytes = str(tensor.dtype).removeprefix("torch."), tensor.element_size()
        if num_bytes == 1:
            raise TEXTS.wrong("judge", "another type of one byte", name=name, kind=kind)
        raise TEXTS.wrong("judge", "another type than int8", name=name, kind=kind, num_bytes=num_bytes)
    return tensor.double()


def expect_mask(value: object, name: str, shape: Sequence[int]) -> Tensor:
    """Read a mask of zeros and ones, or of booleans, as float64.

    Raises:
        Wrong: if there is anything else in it.
    """
    tensor = expect_tensor(value, name, shape).double()
    if not bool(((tensor == 0) | (tensor == 1)).all()):
        raise TEXTS.wrong("judge", "no mask", name=name)
    return tensor


def expect_numbers(result: Any, names: Sequence[Said]) -> Numbers:
    """Read as many numbers as there are names, whatever holds them: a tuple, a list, an array, a tensor.

    Raises:
        Wrong: for nothing, for another number of them, for something that is no finite number.
    """
    refuse_nothing(result)
    # What lstsq gives for a column is a column: (2, 1).
    parts = (
        result if isinstance(result, tuple | list) else plain(result.ravel() if hasattr(result, "ravel") else result)
    )
    parts = [plain(single(part)) for part in parts] if isinstance(parts, tuple | list) else [parts]
    if len(parts) != len(names) or not all(map(is_number, parts)):
        (listed_en, listed_fr), s = _listed(names), "s" if len(names) > 1 else ""
        raise TEXTS.wrong(
            "judge",
            "another number of numbers",
            names_count=len(names),
            s=s,
            listed_en=listed_en,
            result=shown(result),
            listed_fr=listed_fr,
        )
    values = tuple(float(part) for part in parts)
    for value, name in zip(values, names, strict=True):
        if not math.isfinite(value):
            raise TEXTS.wrong("judge", "no finite number", value=value, name=name)
    return values


def expect_json(document: Any) -> Mapping[str, Any]:
    """Read a dictionary that can be written as JSON.

    Raises:
        Wrong: for nothing, for something else, for a value that JSON has not.
    """
    refuse_nothing(document)
    if not isinstance(document, Mapping):
        raise TEXTS.wrong("judge", "no dictionary", kind=kind_of(document))
    try:
        json.dumps(document)
    except (TypeError, ValueError) as error:
        raise TEXTS.wrong("judge", "no JSON", error=error) from None
    return document


UNSAID = 97
"""Micro-batch of a run about which the file says nothing; no case asks for it."""
_SETTINGS = {
    "zero": "zero_optimization.stage",
    "precision": "bf16.enabled",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "micro_batches": "gradient_accumulation_steps",
    "offload": "zero_optimization.offload_optimizer, offload_param",
}


def read_settings(document: Mapping[str, Any], request: Said, **base: Any) -> RunConfig:
    """Read DeepSpeed's settings as DeepSpeed would.

    Args:
        document: the settings, JSON data.
        request: the run in words.
        base: what the run has besides: model and degrees.

    Raises:
        Wrong: if DeepSpeed or the lab refuses them.
    """
    from dlojz.config.deepspeed_json import read_deepspeed_json
    from dlojz.config.run_config import RunConfig

    try:
        return read_deepspeed_json(json.dumps(document), RunConfig.of(engine="deepspeed", micro_batch=UNSAID, **base))
    except LabError as error:
        raise TEXTS.wrong("judge", "settings are refused", request=request, error=error) from None


def asked_run(config: RunConfig, *names: str) -> Said:
    """Write fields of a run and of its layout, as `dp=4, zero=2`; the same in both languages."""
    values = {name: getattr(config if name == "precision" else config.layout, name) for name in names}
    run = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return Said(run, run)


def check_settings(document: Mapping[str, Any], reference: RunConfig, request: Said) -> None:
    """Refuse settings that DeepSpeed would read as another run.

    Args:
        document: the settings, JSON data.
        request: the run in words.

    Raises:
        Wrong: as `read_settings`, or with the first field that differs, and the key to look at.
    """
    layout = reference.layout
    config = read_settings(document, request, model=reference.model, dp=layout.dp, pp=layout.pp)
    for name, key in _SETTINGS.items():
        left, right = (getattr(run if name == "precision" else run.layout, name) for run in (config, reference))
        if left != right:
            raise TEXTS.wrong("judge", "another run", request=request, name=name, left=left, right=right, setting=key)


def shown(value: Any) -> str:
    """What was returned, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def normal(seed: int, *shape: int) -> Tensor:
    """Make one tensor of `normals`."""
    return normals(seed, shape)[0]


def gradient_of(value: Tensor, leaf: Tensor) -> Tensor | None:
    """The gradient of a scalar with respect to a leaf; None if there is none."""
    if not value.requires_grad:
        return None
    return torch.autograd.grad(value, leaf, allow_unused=True)[0]


MAX_GROUPS = 4096
"""A list that grows beyond this is a loop gone wrong."""


def expect_triple(result: Any, names: str) -> tuple[int, int, int]:
    """Read three whole numbers.

    Args:
        names: what the three are, as a student reads it, e.g. `(pp, dp, tp)`.

    Raises:
        Wrong: for nothing, something that is no triple, or a number that is not whole.
    """
    refuse_nothing(result)
    numbers = plain(result)
    three = tuple(numbers) if isinstance(numbers, tuple | list) else ()
    if len(three) != 3:
        raise TEXTS.wrong("judge", "no three numbers", names=names, result=shown(result))
    first, second, third = (_whole(number, names) for number in three)
    return first, second, third


def expect_groups(result: Any, ranks: int) -> list[tuple[int, ...]]:
    """Read groups of ranks, each sorted, in the order of their first ranks.

    Raises:
        Wrong: for nothing, for something that is no list of lists of ranks, for a rank that does not exist, is in two
            groups or in none.
    """
    refuse_nothing(result)
    groups: list[tuple[int, ...]] = []
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise Wrong(_no_groups(result))
    for group in result:
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise Wrong(_no_groups(result))
        groups.append(tuple(sorted(_whole(rank, say(en="ranks", fr="des rangs")) for rank in group)))
        if len(groups) > MAX_GROUPS:
            raise TEXTS.wrong("judge", "too many groups", MAX_GROUPS=MAX_GROUPS)
    _refuse_other_ranks(groups, ranks)
    return sorted(groups)


def _refuse_other_ranks(groups: list[tuple[int, ...]], ranks: int) -> None:
    """Each rank once."""
    members = [rank for group in groups for rank in group]
    for rank in members:
        if not 0 <= rank < ranks:
            raise TEXTS.wrong("judge", "no such rank", rank=rank, ranks=ranks, last=ranks - 1)
        if members.count(rank) > 1:
            raise TEXTS.wrong("judge", "a rank in two groups", rank=rank, ranks=ranks)
    missing = sorted(set(range(ranks)) - set(members))
    if missing:
        raise TEXTS.wrong("judge", "a rank in no group", missing=missing[0], ranks=ranks, members_count=len(members))


def _no_groups(result: Any) -> str:
    return TEXTS.say("judge", "no groups", result=shown(result))


def _whole(number: Any, names: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TEXTS.wrong("judge", "no whole number", names=names, number=shown(number)) from None
