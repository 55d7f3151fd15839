"""How an answer that runs on several ranks is judged: really run, on random inputs, against one process.

Layer 6 (labs). Invariant: the expected values are computed without any communication; the answer runs on real ranks,
forked for the purpose, and whatever it does there (wait for ever, exit, loop) ends with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_diagnosis import diagnose
from dlojz.labs.rank_evidence import gathered, same
from dlojz.labs.verdict import NotDone, Said
from dlojz.patience import patience
from dlojz.ranks.diagnosis import listed, with_article
from dlojz.ranks.forks import RankAnswer, RankError, spmd
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

CASES = ((2, 11), (3, 12), (4, 13))
"""Number of ranks and seed: several numbers, an odd one among them, so that no formula holds by chance."""
WALL_S = 6.0
LIMIT_S = 3.0
"""Seconds for an answer on all ranks, and for one collective; longer on a loaded machine (`limits_s`)."""

Trial = Callable[[Callable[..., Any], int, int, int], Any]
Values = Callable[[int, int, int], Mapping[str, "Tensor"]]


def by_ranks(  # noqa: PLR0913 - each is one more thing that can be known of the exercise
    *,
    trial: Trial,
    expected: Values,
    cases: Sequence[tuple[int, int]] = CASES,
    local: Values | None = None,
    whole: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    bias: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    labels: Mapping[str, Said] | None = None,
    mistakes: Sequence[Mistake] = (),
    inspect: Callable[[list[RankAnswer], int], None] | None = None,
) -> Callable[[Callable[..., Any]], None]:
    """A judge that runs an answer on several ranks and compares what each holds with what one process computes.

    Args:
        trial: called as `trial(answer, rank, size, seed)` on every rank; makes this rank's inputs from the seed, calls
            the answer and returns what came out, tensors by name, or a pair of JSON data and such tensors.
        expected: `expected(rank, size, seed)`, the same names, computed without communication.
        cases: numbers of ranks and seeds.
        local: `local(rank, size, seed)`, what a rank holds if nothing is communicated, for the names where that helps.
        whole: `whole(size, seed)`, the tensors of which the expected ones are shards.
        bias: `bias(size, seed)`, what must be added once over all ranks.
        labels: how sentences call each name.
        mistakes: wrong answers that are run in the same way where the values differ, before the general faults.
        inspect: looks at the answers (calls, JSON data) where all values are right; raises `Wrong`.
    """

    def judge(answer: Callable[..., Any]) -> None:
        for size, seed in cases:
            answers = _run(trial, answer, size, seed)
            _refuse_errors(answers, answer)
            truth = [expected(rank, size, seed) for rank in range(size)]
            given = [one.tensors for one in answers]
            evidence = list(
                gathered(
                    given,
                    truth,
                    local=[local(rank, size, seed) for rank in range(size)] if local else None,
                    whole=whole(size, seed) if whole else None,
                    bias=bias(size, seed) if bias else None,
                    labels=labels,
                )
            )
            said = next((said for one in evidence if (said := diagnose(one)) is not None), None)
            if said is not None:
                raise Wrong(str(_named(trial, given, mistakes, size, seed) or said))
            if inspect is not None:
                inspect(answers, size)

    judge.on_ranks = True  # type: ignore[attr-defined]
    return judge


def _run(trial: Trial, answer: Callable[..., Any], size: int, seed: int) -> list[RankAnswer]:
    code = getattr(answer, "__code__", None)

    def on_rank(rank: int, size: int) -> Any:
        import torch

        from dlojz.ranks.wrapping import rebind

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


def _named(
    trial: Trial, given: list[dict[str, Tensor]], mistakes: Sequence[Mistake], size: int, seed: int
) -> Said | None:
    """The mistake that gives the same values on every rank."""
    for mistake in mistakes:
        others = _run(trial, mistake.way, size, seed)
        if any(other.error for other in others):
            continue
        if all(
            set(mine) == set(other.tensors) and all(same(mine[name], other.tensors[name]) for name in mine)
            for mine, other in zip(given, others, strict=True)
        ):
            return mistake.says
    return None


def _refuse_errors(answers: list[RankAnswer], answer: Callable[..., Any]) -> None:
    """Say why ranks gave no value: the cause before its consequences."""
    failed = {one.rank: one.error for one in answers if one.error is not None}
    if not failed:
        return
    # Ranks that waited for one that failed tell of it too; the one that failed tells why.
    own = {rank: error for rank, error in failed.items() if not error.kind}
    ended = {rank: error for rank, error in failed.items() if error.kind in ("lost", "time") and not error.name}
    between = {rank: error for rank, error in failed.items() if error.kind and error.name}
    if own:
        rank, error = min(own.items())
        if error.name == NotDone.__name__:
            raise Undone(error.message)
        if error.name == NoTensor.__name__:
            raise Wrong(
                say(
                    en=f"Your function returns a {error.message}, but a torch tensor is expected.",
                    fr=f"Votre fonction renvoie un objet de type {error.message}, mais un tenseur torch est attendu.",
                )
            )
        raise Wrong(_raised(sorted(own), rank, error, len(answers)))
    if between and not any(error.kind == "lost" for error in ended.values()):
        first = between[min(between)]
        raise Wrong(first.message + _at(first))
    ranks = sorted(rank for rank, error in ended.items() if error.kind == "lost") or sorted(ended)
    raise Wrong(_ended(ranks, ended[ranks[0]]))


class NoTensor(TypeError):  # noqa: N818 - a verdict, as NotDone
    """The answer gave something else than a tensor; the message is the name of its type."""


class Undone(NotDone):
    """The answer is still a stub: its own sentence, brought back from a rank."""

    def __init__(self, sentence: str) -> None:
        NotImplementedError.__init__(self, sentence)


def _at(error: RankError) -> str:
    if not error.line:
        return ""
    return say(
        en=f"\nAt line {error.line} of your cell: {error.text}",
        fr=f"\nÀ la ligne {error.line} de votre cellule : {error.text}",
    )


def _raised(ranks: list[int], rank: int, error: RankError, size: int) -> str:
    first = error.message.strip().split("\n")[0]
    what = f"{error.name}: {first}" if first else error.name
    everywhere = len(ranks) == size
    if not error.line:
        return say(
            en=f"The check could not use what your function is or returned ({what}): look at the arguments it takes "
            "and at what it returns.",
            fr=f"La vérification n’a pas pu utiliser votre fonction ou son résultat ({what}) : regardez les arguments "
            "qu’elle prend et ce qu’elle renvoie.",
        )
    where_en = "every rank" if everywhere else listed(ranks, french=False)
    where_fr = "chaque rang" if everywhere else with_article(listed(ranks, french=True))
    return say(
        en=f"Your function raised {what}\non {where_en}, at line {error.line} of its cell: {error.text}",
        fr=f"Votre fonction a levé {what}\nsur {where_fr}, à la ligne {error.line} de sa cellule : {error.text}",
    )


def _ended(ranks: list[int], error: RankError) -> str:
    en, fr, several = listed(ranks, french=False), listed(ranks, french=True), len(ranks) > 1
    if error.kind == "time":
        return say(
            en=f"Your function had not answered after {error.message} s on {en} and was stopped: look for a loop that "
            "never ends.",
            fr=f"Votre fonction n’avait pas répondu au bout de {error.message} s sur {with_article(fr)} et a été "
            "arrêtée : cherchez une boucle sans fin.",
        )
    return say(
        en=f"The process of {en} ended without an answer (exit code {error.message}): your function left by os._exit, "
        "exceeded a limit, or crashed.",
        fr=(f"Les processus des {fr} se sont terminés" if several else f"Le processus du {fr} s’est terminé")
        + f" sans répondre (code de sortie {error.message}) : votre fonction est sortie par os._exit, a dépassé une "
        "limite ou s’est interrompue brutalement.",
    )
