"""What the functions that write orders share: a list that counts for itself, placements, and refusals.

Layer 2. Invariant: a stage takes its micro-batches in turn, per kind of action, unless a schedule says otherwise.
"""

from __future__ import annotations

from collections import Counter

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, overlapped
from dlojz.schema import LabError
from dlojz.text import say


class Writer:
    """One rank's order, written action by action; the micro-batch of each is the next one of its stage.

    Args:
        first: number of the first micro-batch of each pipe (bidirectional schedules number them over both).
    """

    def __init__(self, first: tuple[int, ...] = (0,)) -> None:
        self.actions: list[Action] = []
        self._first = first
        self._written: Counter[tuple[str, int, int]] = Counter()
        self._pending: list[Action] = []

    def forward(self, stage: int, pipe: int = 0) -> None:
        """Pass the next micro-batch forward."""
        self.actions.append(self._next(FORWARD, stage, pipe))

    def backward(self, stage: int, pipe: int = 0) -> None:
        """Pass the next micro-batch backward, whole."""
        self.actions.append(self._next(BACKWARD, stage, pipe))

    def backward_input(self, stage: int, pipe: int = 0) -> None:
        """Pass the next micro-batch backward for the input; its weight gradients wait for `weight`."""
        action = self._next(BACKWARD_INPUT, stage, pipe)
        self.actions.append(action)
        self._pending.append(action)

    def weight(self, stage: int | None = None) -> None:
        """Compute the weight gradients that wait longest (of one stage, or of any), if any wait."""
        for number, action in enumerate(self._pending):
            if stage is None or action.stage == stage:
                self.actions.append(self._pending.pop(number)._replace(kind=BACKWARD_WEIGHT))
                return

    def both(self, forward: tuple[int, int], backward: tuple[int, int]) -> None:
        """A forward and a whole backward at once, each given as (stage, pipe)."""
        self.actions.append(overlapped(self._next(FORWARD, *forward), self._next(BACKWARD, *backward)))

    def rest(self) -> None:
        """Compute all weight gradients that still wait."""
        while self._pending:
            self.weight()

    def _next(self, kind: str, stage: int, pipe: int) -> Action:
        key = (FORWARD if kind == FORWARD else BACKWARD, stage, pipe)
        micro_batch = self._first[pipe] + self._written[key]
        self._written[key] += 1
        return Action(kind, stage, micro_batch, pipe)


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Rank of each stage when chunks go round: stage s on rank s mod p (Narayanan et al. 2021, §2.2)."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def zigzag(ranks: int, chunks: int) -> tuple[int, ...]:
    """Rank of each stage when each chunk runs back the way of the one before: 0…p−1, p−1…0, … (a V for two chunks)."""
    there = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (there if chunk % 2 == 0 else there[::-1]))


def counted(schedule: str, **counts: int) -> None:
    """Refuse counts that are no whole numbers of at least 1."""
    french = {
        "ranks": "ranks (rangs)", "micro_batches": "micro_batches", "chunks": "chunks (étages par rang)",
        "waves": "waves (vagues)", "group": "group (micro-batches par groupe)",
    }  # fmt: skip
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LabError(
                say(
                    en=f"{schedule}: {name} must be a whole number of at least 1, but {value!r} was received.",
                    fr=f"{schedule} : {french.get(name, name)} doit être un entier d’au moins 1, mais {value!r} a été "
                    "reçu.",
                )
            )


def need_chunks(schedule: str, chunks: int, instead: str) -> None:
    """Refuse fewer than two chunks per rank; `instead` is the schedule that has one."""
    counted(schedule, chunks=chunks)
    if chunks < 2:
        raise LabError(
            say(
                en=f"{schedule} needs at least 2 chunks (stages) per rank, but {chunks} was received: take chunks=2 or "
                f"more, or the schedule {instead}.",
                fr=f"{schedule} demande au moins 2 étages (chunks) par rang, mais {chunks} a été reçu : prenez "
                f"chunks=2 ou plus, ou l’ordonnancement {instead}.",
            )
        )


def need_micro_batches(schedule: str, micro_batches: int, least: int, rule: str, instead: str) -> None:
    """Refuse fewer micro-batches than the schedule's warm-up takes; `rule` is the formula of `least`."""
    if micro_batches < least:
        raise LabError(
            say(
                en=f"{schedule} needs at least {rule} = {least} micro-batches, but {micro_batches} was received: take "
                f"{least} or more, or the schedule {instead}.",
                fr=f"{schedule} demande au moins {rule} = {least} micro-batches, mais {micro_batches} a été reçu : "
                f"prenez-en {least} ou plus, ou l’ordonnancement {instead}.",
            )
        )


def need_even_ranks(schedule: str, ranks: int, instead: str) -> None:
    """Refuse an odd number of ranks: the two directions of a bidirectional schedule meet between two middle ranks."""
    if ranks % 2:
        raise LabError(
            say(
                en=f"{schedule} needs an even number of ranks, since its two pipes run in opposite directions, but "
                f"{ranks} was received: take {max(2, ranks - 1)} or {ranks + 1}, or the schedule {instead}.",
                fr=f"{schedule} demande un nombre pair de rangs, car ses deux pipelines vont en sens contraires, mais "
                f"{ranks} a été reçu : prenez {max(2, ranks - 1)} ou {ranks + 1}, ou l’ordonnancement {instead}.",
            )
        )


def need_multiple(schedule: str, micro_batches: int, of: int, why: tuple[str, str]) -> None:
    """Refuse micro-batches that are no multiple of `of`; `why` tells the reason in English and in French."""
    if micro_batches % of:
        below, above = micro_batches // of * of, (micro_batches // of + 1) * of
        near = f"{below}", f"{above}"
        english, french = (" or ".join(near), " ou ".join(near)) if below else (near[1], near[1])
        raise LabError(
            say(
                en=f"{schedule} needs a multiple of {of} micro-batches ({why[0]}), but {micro_batches} was received: "
                f"take {english}.",
                fr=f"{schedule} demande un multiple de {of} micro-batches ({why[1]}), mais {micro_batches} a été "
                f"reçu : prenez-en {french}.",
            )
        )
