"""Answers on ranks: run them on forked ranks, and recognise the usual faults of parallel code in what ranks hold.

Each result of the ranks is compared with what one process computes, without communication. A fault is named only if it
explains the values of every rank that is wrong; otherwise the difference is stated, with the rank where it is largest.
Whatever an answer does on its ranks (wait for ever, exit, loop) ends with a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlojz.base.language import LANGUAGES, a_or_an, in_full, say
from dlojz.base.machine import patience
from dlojz.labs.kit.common_gap import common_gap
from dlojz.labs.kit.exercise import NotDone, Said, Sentences, Wrong, unusable, without_stamp
from dlojz.processes.forks import ForkedError, RankAnswer, spmd
from dlojz.processes.hang_diagnosis import listed, with_article

TEXTS = Sentences(Path(__file__).with_name("data") / "rank_judges.md")

TOLERANCE = 1e-4
"""Relative; the inputs are of order one in fp32, and the order of a sum changes no more than 1e-6 of it."""


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """One result, on every rank.

    Args:
        name: what it is; one that begins with `gradient` belongs to the backward pass.
        label: how sentences call it.
        given: what each rank gave.
        expected: what each rank should hold.
        local: what each rank holds without any communication; empty where that says nothing.
        bias: what is to be added once over all ranks, or None.
    """

    name: str
    label: Said
    given: Sequence[Any]
    expected: Sequence[Tensor]
    local: Sequence[Tensor] = field(default=())
    bias: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.expected)

    @property
    def backward(self) -> bool:
        """Whether this belongs to the backward pass."""
        return self.name.startswith("gradient")

    def right(self, rank: int) -> bool:
        """Whether this rank's value is the expected one."""
        return same(self.given[rank], self.expected[rank])

    def sentence(self, key: str, **values: object) -> Said:
        """Say something of this result: its label, also as it begins a sentence or follows “no”, and its size."""
        begun, plain = self.label.begun(), self.label.en.removeprefix("the ")
        return TEXTS.sentence("ranks", key, label=self.label, Label=begun, plain=plain, size=self.size, **values)


def same(value: Any, right: Tensor) -> bool:
    """Equal up to rounding, in shape too."""
    if not isinstance(value, torch.Tensor) or value.shape != right.shape:
        return False
    value, right = value.double(), right.double()
    if not bool(right.isfinite().all()):  # of an infinite scale, everything would be within the tolerance
        return bool(torch.allclose(value, right, rtol=TOLERANCE, equal_nan=True))
    scale = right.abs().max().clamp(min=1.0) if right.numel() else 1.0
    return bool(((value - right).abs() <= TOLERANCE * scale).all())


def evidence_of(
    results: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Tensor]], **context: Any
) -> list[RankEvidence]:
    """Evidence for each result, in the order of the first rank's expected ones.

    Args:
        results: by rank, what it gave by name.
        expected: by rank, what it should hold by name.
        context: `local` (by rank, by name), `bias` and `labels` (by name), as far as there are any.
    """
    return [
        RankEvidence(
            name=name,
            label=(context.get("labels") or {}).get(name) or _label(name),
            given=[rank.get(name) for rank in results],
            expected=[rank[name] for rank in expected],
            local=[rank[name] for rank in context.get("local") or () if name in rank],
            bias=(context.get("bias") or {}).get(name),
        )
        for name in expected[0]
    ]


def _label(name: str) -> Said:
    if name.startswith("gradient of "):
        return Said(f"the {name}", f"le gradient de {name.removeprefix('gradient of ')}")
    return {OUTPUT: Said("the output", "la sortie")}.get(name, Said(f"the {name}", f"« {name} »"))


class Trouble(NamedTuple):
    """What is wrong with a result, and how general the sentence is: the larger `rank`, the less it explains."""

    said: Said
    rank: int


def diagnosis(
    results: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Tensor]], **context: Any
) -> Trouble | None:
    """The fault that explains the first result that is wrong; None where all are right.

    Args:
        given, expected, more: as in `evidence_of`.
    """
    troubles = map(diagnose, evidence_of(results, expected, **context))
    return next((trouble for trouble in troubles if trouble is not None), None)


def explains(
    would: Sequence[Mapping[str, Tensor] | None], results: Sequence[Mapping[str, Tensor]], all_names: bool = False
) -> bool:
    """Whether ranks hold what they would under a fault.

    Args:
        would: by rank, results by name; None where the fault cannot be made.
        results: by rank, what it gave by name.
        all_names: whether both must have the same names; else those of `would` count.
    """
    return all(
        values is not None
        and (not all_names or set(values) == set(rank_results))
        and all(same(rank_results.get(name), value) for name, value in values.items())
        for rank_results, values in zip(results, would, strict=True)
    )


def tells_apart(would: Sequence[Mapping[str, Tensor]], right: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether a finite number among what ranks would hold is not the right one; infinity and NaN have many causes."""
    for values, reference in zip(would, right, strict=True):
        for name, value in values.items():
            finite = value.isfinite()
            if name not in reference or value.shape != reference[name].shape:
                return True
            if bool(finite.any()) and not same(value[finite], reference[name][finite]):
                return True
    return False


def diagnose(evidence: RankEvidence) -> Trouble | None:
    """The fault that explains what the ranks gave; None where all is right."""
    wrong = [rank for rank in range(evidence.size) if not evidence.right(rank)]
    if not wrong:
        return None
    for symptom in (_infinite, _nothing, _shape):
        sentence = symptom(evidence, wrong)
        if sentence is not None:
            return Trouble(sentence, SYMPTOM)
    for order, explained in enumerate(
        (_scaled, _alone, _copied, _biased, _other_rank, _other_chunks, _disagree, _common)
    ):
        sentence = explained(evidence, wrong)
        if sentence is not None:
            return Trouble(sentence, order)
    return Trouble(_difference(evidence, wrong), SYMPTOM)


SYMPTOM = 99
"""The rank of a sentence that says what is seen, and names no cause."""


def _named(ranks: Sequence[int]) -> Said:
    return Said(listed(ranks, french=False), with_article(listed(ranks, french=True)))


def _on(evidence: RankEvidence, wrong: Sequence[int]) -> Said:
    """Where: nothing if everywhere."""
    en, fr = _named(wrong)
    return Said("", "") if len(wrong) == evidence.size else Said(f" on {en}", f" sur {fr}")


def _nothing(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    empty = [rank for rank in wrong if evidence.given[rank] is None]
    if empty:
        if evidence.backward:
            return evidence.sentence("no gradient", where=_on(evidence, empty))
        return evidence.sentence("nothing is returned", where=_on(evidence, empty))
    return None


def _shape(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    odd = [rank for rank in wrong if evidence.given[rank].shape != evidence.expected[rank].shape]
    if not odd:
        return None
    rank = odd[0]
    shape, expected = tuple(evidence.given[rank].shape), tuple(evidence.expected[rank].shape)
    if all(_other_shape(evidence.given[r], evidence.expected[r]) for r in odd):
        return evidence.sentence("right values in another shape", rank=rank, shape=shape, expected=expected)
    return evidence.sentence("another shape", rank=rank, shape=shape, expected=expected)


def _other_shape(value: Any, right: Tensor) -> bool:
    return value.numel() == right.numel() and same(value.reshape(right.shape), right)


def _infinite(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    ranks = [r for r in wrong if torch.is_tensor(evidence.given[r]) and not bool(evidence.given[r].isfinite().all())]
    if not ranks:
        return None
    return evidence.sentence("infinite or NaN", ranks=_named(ranks))


def _scaled(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    size = evidence.size
    # A factor of the number of ranks shows on every rank, or is another fault.
    if len(wrong) < size:
        return None
    if _all(evidence, lambda rank: size * evidence.expected[rank]):
        if evidence.backward:
            return evidence.sentence("a gradient too large")
        return evidence.sentence("too large")
    if _all(evidence, lambda rank: evidence.expected[rank] / size):
        return evidence.sentence("too small")
    return None


def _alone(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    if not evidence.local:
        return None
    size = evidence.size
    way = Said("backward", "la passe arrière") if evidence.backward else Said("forward", "la passe avant")
    if all(same(evidence.given[rank], evidence.local[rank]) for rank in wrong):
        if len(wrong) < size:
            had = _named([rank for rank in range(size) if rank not in wrong])
            alone = Said("", "est seul" if size - len(wrong) == 1 else "sont seuls")
            still = Said("hold their", "gardent leur") if len(wrong) > 1 else Said("holds its", "garde sa")
            return evidence.sentence(
                "some got the result", Have=had.begun(), have=had, alone=alone, odd=_named(wrong), still=still
            )
        return evidence.sentence("own parts", way=way)
    if all(same(evidence.given[rank], evidence.local[rank] / size) for rank in wrong):
        return evidence.sentence("own parts, divided", where=_on(evidence, wrong))
    return None


def _copied(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    """One rank's own part on all of them."""
    for rank, part in enumerate(evidence.local if evidence.size > 1 else ()):
        if _all(evidence, lambda _, part=part: part):  # type: ignore[misc]
            return evidence.sentence("one rank's part everywhere", rank=rank)
    return None


def _biased(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    if evidence.bias is None:
        return None
    size, bias = evidence.size, evidence.bias
    if all(same(evidence.given[rank], evidence.expected[rank] + (size - 1) * bias) for rank in wrong):
        return evidence.sentence("the bias on every rank")
    if all(same(evidence.given[rank], evidence.expected[rank] - bias) for rank in wrong):
        return NO_BIAS
    return None


def _other_rank(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    """Each rank holds what another should: the ranks are in another order."""
    size, expected = evidence.size, evidence.expected
    if size < 2 or all(same(expected[rank], expected[0]) for rank in range(size)):
        return None
    holds: dict[int, int] = {}
    for rank in range(size):
        holders = [candidate for candidate in range(size) if same(evidence.given[rank], expected[candidate])]
        if not holders:
            return None
        holds[rank] = rank if rank in holders else holders[0]
    rank = wrong[0]
    return evidence.sentence("another order of the ranks", rank=rank, holds=holds[rank])


def _other_chunks(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    """The right chunks in another order, as an all-gather that forgets whose part it receives."""
    size = evidence.size
    for dim in range(evidence.expected[0].dim()):
        if all(_reordered(evidence.given[rank], evidence.expected[rank], size, dim) for rank in wrong):
            return evidence.sentence("chunks in another order", ranks=_named(wrong))
    return None


def _reordered(value: Any, right: Tensor, size: int, dim: int) -> bool:
    # Only whole chunks can be compared, one for each rank.
    if value.shape != right.shape or right.shape[dim] < size or right.shape[dim] % size:
        return False
    chunks, theirs = value.chunk(size, dim), list(right.chunk(size, dim))
    for chunk in chunks:
        position = next((index for index, candidate in enumerate(theirs) if same(chunk, candidate)), None)
        if position is None:
            return False
        del theirs[position]
    return True


def _disagree(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    """Ranks that should hold the same and do not, each with other values."""
    size, expected, results = evidence.size, evidence.expected, evidence.given
    if size < 2 or not all(same(expected[rank], expected[0]) for rank in range(size)):
        return None
    same_ranks = [rank for rank in range(size) if same(results[rank], results[0])]
    if len(same_ranks) == size:
        return None
    odd = [rank for rank in range(size) if rank not in same_ranks]
    return evidence.sentence("ranks disagree", agreeing=_named(same_ranks), odd=_named(odd))


def _common(evidence: RankEvidence, wrong: Sequence[int]) -> Said | None:
    sentence = common_gap([evidence.given[rank] for rank in wrong], [evidence.expected[rank] for rank in wrong])
    if sentence is None:
        return None
    return evidence.sentence("wrong values in common", ranks=_named(wrong), gap=sentence)


def _difference(evidence: RankEvidence, wrong: Sequence[int]) -> Said:
    gaps = {rank: float((evidence.given[rank] - evidence.expected[rank]).abs().max()) for rank in wrong}
    rank = max(gaps, key=lambda rank: gaps[rank])
    gap = Said(*(in_full(gaps[rank], 2, into=language) for language in LANGUAGES))
    return evidence.sentence("wrong values", ranks=_named(wrong), gap=gap, rank=rank)


def _all(evidence: RankEvidence, reference: Callable[[int], Tensor]) -> bool:
    return all(same(evidence.given[rank], reference(rank)) for rank in range(evidence.size))


OUTPUT, OF_X = "output", "gradient of x"
"""Names of results that most layers have; a name that begins with `gradient of` belongs to the backward pass."""
WALL_S = 6.0
LIMIT_S = 3.0
"""Seconds for an answer on all ranks, and for one collective; longer on a loaded machine (`limits_s`)."""

Trial = Callable[[Callable[..., Any], int, int, int], Any]
Values = Callable[[int, int, int], Mapping[str, Tensor]]


def run_on_ranks(trial: Trial, answer: Callable[..., Any], size: int, seed: int) -> list[RankAnswer]:
    """Run a trial of an answer on forked ranks; what is no tensor among its values is an error of that rank."""
    code = getattr(answer, "__code__", None)

    def on_rank(rank: int, size: int) -> Any:
        from dlojz.processes.guard import rebind

        rebind(getattr(answer, "__globals__", {}))
        result = trial(answer, rank, size, seed)
        data, values = result if isinstance(result, tuple) else (None, result)
        for value in values.values():
            if value is not None and not isinstance(value, torch.Tensor):
                raise NoTensor(type(value).__name__)
        return data, {name: value for name, value in values.items() if value is not None}

    wall_s, limit_s = limits_s()
    return spmd(on_rank, size, wall_s=wall_s, limit_s=limit_s, blame=[code.co_filename] if code else [])


def limits_s() -> tuple[float, float]:
    """Seconds for an answer and for a collective: as many times more as the machine has work per core."""
    factor = patience()
    return WALL_S * factor, LIMIT_S * factor


def refuse_errors(answers: list[RankAnswer]) -> None:
    """Say why ranks gave no value: the cause before its consequences.

    Raises:
        Wrong: if one gave none.
        Undone: if the answer is still a stub.
    """
    failed = {answer.rank: answer.error for answer in answers if answer.error is not None}
    if not failed:
        return
    # Ranks that waited for one that failed tell of it too; the one that failed tells why.
    raised_errors = {rank: error for rank, error in failed.items() if not error.kind}
    ended = {rank: error for rank, error in failed.items() if error.kind in ("lost", "time") and not error.name}
    between = {rank: error for rank, error in failed.items() if error.kind and error.name}
    if raised_errors:
        refused = {rank: error for rank, error in raised_errors.items() if error.name == Wrong.__name__}
        rank, error = min((refused or raised_errors).items())
        if error.name == NotDone.__name__:
            raise Undone(error.message)
        if error.name == Wrong.__name__:
            raise Wrong(error.message)
        if error.name == NoTensor.__name__:
            raise TEXTS.wrong("ranks", "no tensor", a_message=a_or_an(error.message), message=error.message)
        raise Wrong(_raised(sorted(raised_errors), rank, error, len(answers)))
    if between and not any(error.kind == "lost" for error in ended.values()):
        first_error = between[min(between)]
        raise Wrong(first_error.message + _at(first_error))
    ranks = sorted(rank for rank, error in ended.items() if error.kind == "lost") or sorted(ended)
    raise Wrong(_ended(ranks, ended[ranks[0]]))


class NoTensor(TypeError):  # noqa: N818 - a verdict, as NotDone
    """The answer gave something else than a tensor; the message is the name of its type."""


class Undone(NotDone):
    """The answer is still a stub: its own sentence, brought back from a rank."""

    def __init__(self, sentence: str) -> None:
        NotImplementedError.__init__(self, sentence)


def _at(error: ForkedError) -> str:
    if not error.line:
        return ""
    return say(
        en=f"\nAt line {error.line} of your cell: {error.text}",
        fr=f"\nÀ la ligne {error.line} de votre cellule : {error.text}",
    )


_GLOO = (
    (
        re.compile(r"invalid tensor size at index \d+ \(expected (\(.*?\)), got (\(.*?\))\)"),
        TEXTS.sentence("ranks", "shapes of two tensors"),
    ),
    (
        re.compile(r"input and output tensors must have the same size|in->size == out->size"),
        TEXTS.sentence("ranks", "shapes of sender and receiver"),
    ),
    (
        re.compile(r"outputShape\[0\] \* worldSize == inputShape\[0\] \((\d+) vs\. (\d+)\)"),
        TEXTS.sentence("ranks", "no room for the parts"),
    ),
)
"""What gloo refuses in the words of its C++, and what it means."""


def _meaning(message: str) -> str:
    """A line about an error of gloo; empty where there is nothing to add."""
    matches = ((pattern.search(message), sentence) for pattern, sentence in _GLOO)
    return next((f"\n{str(sentence).format(*match.groups())}" for match, sentence in matches if match), "")


def _raised(ranks: list[int], rank: int, error: ForkedError, size: int) -> str:
    first_line = without_stamp(error.message.strip().split("\n")[0])
    message = f"{error.name}: {first_line}" if first_line else error.name
    everywhere = len(ranks) == size
    if not error.line:
        return unusable(message)
    where_en = "every rank" if everywhere else listed(ranks, french=False)
    where_fr = "chaque rang" if everywhere else with_article(listed(ranks, french=True))
    return say(
        en=f"Your function raised {message}\non {where_en}, at line {error.line} of its cell: {error.text}",
        fr=f"Votre fonction a levé {message}\nsur {where_fr}, à la ligne {error.line} de sa cellule : {error.text}",
    ) + _meaning(first_line)


def _ended(ranks: list[int], error: ForkedError) -> str:
    en, fr, several = listed(ranks, french=False), listed(ranks, french=True), len(ranks) > 1
    if error.kind == "time":
        return TEXTS.say("ranks", "no answer in time", message=error.message, en=en, fr=with_article(fr))
    return say(
        en=f"The process of {en} ended without an answer (exit code {error.message}): your function left by os._exit, "
        "exceeded a limit, or crashed.",
        fr=(f"Les processus des {fr} se sont terminés" if several else f"Le processus du {fr} s’est terminé")
        + f" sans répondre (code de sortie {error.message}) : votre fonction est sortie par os._exit, a dépassé une "
        "limite ou s’est interrompue brutalement.",
    )


TENSOR_CASES = ((2, 11), (3, 12))
"""Number of ranks and seed; an odd number of ranks tells a sum over two from a sum over all."""

NO_FORWARD_SUM = TEXTS.sentence("ranks", "no sum in forward")
NO_BACKWARD_SUM = TEXTS.sentence("ranks", "no sum in backward")
COUNTED_AGAIN = TEXTS.sentence("ranks", "counted again in backward")
BIAS_EVERYWHERE = TEXTS.sentence("ranks", "the bias everywhere")
NO_BIAS = Said("The bias is never added.", "Le biais n’est jamais ajouté.")
NO_OFFSET = TEXTS.sentence("ranks", "no offset")


def only(values: Callable[..., Mapping[str, Tensor]], names: Iterable[str] | Mapping[str, str]) -> Values:
    """Take some of the results that ranks would hold.

    Args:
        values: gives results by name.
        names: of the results that are compared; a mapping gives, for each, the name under which `values` has it.
    """
    sources = dict(names) if isinstance(names, Mapping) else {name: name for name in names}

    def taken(rank: int, size: int, seed: int) -> Mapping[str, Tensor]:
        results = values(rank, size, seed)
        return {name: results[source] for name, source in sources.items()}

    return taken


def times_ranks(values: Callable[..., Mapping[str, Tensor]], name: str) -> Values:
    """The output as it is, and one gradient as many times too large as there are ranks."""

    def counted(rank: int, size: int, seed: int) -> Mapping[str, Tensor]:
        results = values(rank, size, seed)
        return {OUTPUT: results[OUTPUT], name: size * results[name]}

    return counted


def asked_for(answer: RankAnswer, *names: str) -> list[int]:
    """How many numbers each call to one of these collectives has sent or gathered, in order."""
    return [int(call["numel"]) for call in answer.calls if call["op"] in names]


def gathers(answer: RankAnswer) -> list[int]:
    """The same for everything that brings the ranks' tensors side by side."""
    return asked_for(answer, "all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_to_all_single")


def refuse_gathers(sentence: Said) -> Callable[[list[RankAnswer], int], None]:
    """Make a judge's `inspect` that refuses answers which bring tensors side by side where a sum is enough."""

    def inspect(answers: list[RankAnswer], size: int) -> None:
        if gathers(answers[0]):
            raise Wrong(*sentence)

    return inspect


def added(tensors: Iterable[Tensor]) -> Tensor:
    """The sum that an all-reduce of these would give."""
    return torch.stack(list(tensors)).sum(0)


def gradient(leaf: Tensor) -> Tensor:
    """What backward has left in a leaf; zeros where nothing came by."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def normals(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Make tensors of normal numbers that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]
