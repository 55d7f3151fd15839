"""Lab 08: which of many layouts: the fastest that can run.

Layer 6 (labs). Invariant: layouts of different batches are compared by samples per second; why one cannot run is told
in the order in which the planner looks (`dlojz.plan.reasons`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlojz.labs.compromise_answers import refuse_nothing, shown, written
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say


@dataclass(frozen=True)
class Row:
    """A layout with what is known of it.

    Attributes:
        dp, tp, pp: replicas, tensor-parallel ranks, stages.
        micro_batch, micro_batches: samples of one forward; forwards of one replica in a step.
        step_s: seconds of a step.
        memory_bytes: of the fullest GPU.
    """

    dp: int
    tp: int
    pp: int
    micro_batch: int
    micro_batches: int
    step_s: float
    memory_bytes: float

    @property
    def title(self) -> str:
        """In a few words."""
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}, micro-batch {self.micro_batch} × {self.micro_batches}"

    @property
    def samples_per_s(self) -> float:
        """Of all replicas together."""
        return self.dp * self.micro_batch * self.micro_batches / self.step_s


def reason(row: Row, gpus: int, heads: int, capacity_bytes: float) -> str:
    """Why a layout cannot run: `gpus`, `split` or `memory`, in this order; empty if it can."""
    if row.dp * row.tp * row.pp != gpus:
        return "gpus"
    if heads % row.tp:
        return "split"
    return "memory" if row.memory_bytes > capacity_bytes else ""


def choose(layouts: Sequence[Row], gpus: int, heads: int, capacity_bytes: float) -> Row:
    """The layout with the most samples per second of those that can run."""
    able = [row for row in layouts if not reason(row, gpus, heads, capacity_bytes)]
    return max(able, key=lambda row: row.samples_per_s)


Question = tuple[list[Row], int, int, float]


def _questions() -> Iterator[Question]:
    """In each, for every mistake there is a layout that it would choose."""
    dice = random.Random(12)
    for gpus, heads in ((384, 64), (64, 40), (96, 96), (128, 25)):
        capacity = 8e10
        splits = [
            (gpus // (tp * pp), tp, pp)
            for tp in range(1, 9)
            for pp in range(1, gpus + 1)
            if gpus % (tp * pp) == 0 and pp <= 24
        ]
        rows = []
        for dp, tp, pp in splits:
            micro_batch = dice.choice((1, 2, 4))
            micro_batches = max(1, gpus * dice.choice((3, 4, 8)) // (dp * micro_batch))
            rate = dice.uniform(5.0, 20.0) * (1.5 if heads % tp else 1.0)
            samples = dp * micro_batch * micro_batches
            rows.append(Row(dp, tp, pp, micro_batch, micro_batches, samples / rate, dice.uniform(2e10, 1.1e11)))
        # The fastest of all would need more memory, or other GPUs; the shortest step reads the fewest samples.
        sure = next(split for split in splits if heads % split[1] == 0)
        rows.append(Row(*sure, 1, 64, sure[0] * 64 / 40.0, 1.2 * capacity))
        rows.append(Row(sure[0] + 1, *sure[1:], 1, 64, (sure[0] + 1) * 64 / 50.0, 3e10))
        rows.append(Row(*sure, 1, 2, sure[0] * 2 / 6.0, 3e10))
        dice.shuffle(rows)
        yield rows, gpus, heads, capacity


_WAYS: tuple[tuple[Callable[..., Row], Said], ...] = (
    (
        lambda rows, gpus, heads, capacity: min(
            (row for row in rows if not reason(row, gpus, heads, capacity)), key=lambda row: row.step_s
        ),
        Said(
            "You compare steps, but not all layouts read as many samples in one: dp · micro_batch · micro_batches "
            "differs. Compare samples per second.",
            "Vous comparez des pas, mais toutes les configurations n’y lisent pas autant d’échantillons : "
            "dp · micro_batch · micro_batches varie. Comparez des échantillons par seconde.",
        ),
    ),
    (
        lambda rows, gpus, heads, capacity: min(
            (row for row in rows if not reason(row, gpus, heads, capacity)), key=lambda row: row.memory_bytes
        ),
        Said(
            "You choose the one with the most memory to spare; of those that fit, the fastest is asked for.",
            "Vous choisissez celle qui laisse le plus de mémoire ; parmi celles qui tiennent, on demande la plus "
            "rapide.",
        ),
    ),
    (
        lambda rows, gpus, heads, capacity: min(
            (row for row in rows if not reason(row, gpus, heads, capacity)), key=lambda row: row.samples_per_s
        ),
        Said(
            "You choose the slowest of those that can run: samples per second are to be as many as possible.",
            "Vous choisissez la plus lente de celles qui peuvent tourner : il faut le plus d’échantillons par seconde.",
        ),
    ),
)


def _judge_choice(answer: Callable[..., Any]) -> None:
    questions = list(_questions())
    given = [_row_of(answer(list(rows), *rest), rows) for rows, *rest in questions]
    if all(own == choose(*question) for own, question in zip(given, questions, strict=True)):
        return
    for way, says in _WAYS:
        if all(own == way(*question) for own, question in zip(given, questions, strict=True)):
            raise Wrong(str(says))
    for own, (rows, gpus, heads, capacity) in zip(given, questions, strict=True):
        _refuse_unable(own, gpus, heads, capacity)
        right = choose(rows, gpus, heads, capacity)
        if own != right:
            raise Wrong(
                say(
                    en=f"On {gpus} GPUs you choose {own.title}, {written(own.samples_per_s)} samples per second; "
                    f"{right.title} can run too, with {written(right.samples_per_s)}.",
                    fr=f"Sur {gpus} GPU, vous choisissez {own.title}, {written(own.samples_per_s)} échantillons par "
                    f"seconde ; {right.title} peut tourner aussi, avec {written(right.samples_per_s)}.",
                )
            )


def _row_of(given: Any, rows: Sequence[Row]) -> Row:
    refuse_nothing(given)
    if isinstance(given, Row) and given in rows:
        return given
    raise Wrong(
        say(
            en=f"Return one of the layouts that you were given, as it is; your function returns {shown(given)}.",
            fr=f"Renvoyez telle quelle une des configurations reçues ; votre fonction renvoie {shown(given)}.",
        )
    )


def _refuse_unable(row: Row, gpus: int, heads: int, capacity: float) -> None:
    why = reason(row, gpus, heads, capacity)
    if why == "gpus":
        raise Wrong(
            say(
                en=f"You choose {row.title}: that makes {row.dp * row.tp * row.pp} ranks, but there are {gpus} GPUs. "
                "dp · tp · pp must use them all.",
                fr=f"Vous choisissez {row.title} : cela fait {row.dp * row.tp * row.pp} rangs, mais il y a {gpus} GPU. "
                "dp · tp · pp doit les employer tous.",
            )
        )
    if why == "split":
        raise Wrong(
            say(
                en=f"You choose {row.title}: tp={row.tp} does not divide the {heads} attention heads, so no rank could "
                "take a whole number of them.",
                fr=f"Vous choisissez {row.title} : tp={row.tp} ne divise pas les {heads} têtes d’attention ; aucun "
                "rang n’en aurait un nombre entier.",
            )
        )
    if why == "memory":
        raise Wrong(
            say(
                en=f"You choose {row.title}: it needs {written(row.memory_bytes / 1e9)} GB of a GPU that has "
                f"{written(capacity / 1e9)}. Drop what does not fit before you compare speeds.",
                fr=f"Vous choisissez {row.title} : elle demande {written(row.memory_bytes / 1e9)} Go à un GPU qui en a "
                f"{written(capacity / 1e9)}. Écartez ce qui ne tient pas avant de comparer les vitesses.",
            )
        )


CHOOSE = Exercise(
    id="choose-layout",
    title=Said("the fastest that can run", "la plus rapide qui puisse tourner"),
    judge=_judge_choice,
    praise=Said(
        "Right, on four clusters: first what can run at all, then samples per second.",
        "Exact, sur quatre clusters : d’abord ce qui peut tourner, ensuite les échantillons par seconde.",
    ),
    hints=(
        Said(
            "Filter, then choose. Three things rule a layout out: its ranks are not the GPUs, its tp does not divide "
            "the heads, its memory is not there. And what is fast: a short step, or many samples per second?",
            "Filtrez, puis choisissez. Trois choses écartent une configuration : ses rangs ne sont pas les GPU, son tp "
            "ne divise pas les têtes, sa mémoire manque. Et qu’est-ce qui est rapide : un pas court, ou beaucoup "
            "d’échantillons par seconde ?",
        ),
        Said(
            "able = [one for one in layouts if one.dp * one.tp * one.pp == gpus and heads % one.tp == 0 and "
            "one.memory_bytes <= capacity_bytes]; then max(able, key=…) with dp · micro_batch · micro_batches ÷ "
            "step_s.",
            "able = [one for one in layouts if one.dp * one.tp * one.pp == gpus and heads % one.tp == 0 and "
            "one.memory_bytes <= capacity_bytes] ; puis max(able, key=…) avec dp · micro_batch · micro_batches ÷ "
            "step_s.",
        ),
    ),
)
