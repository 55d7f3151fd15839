"""Lab 11: what its parts show in common: questions with yes or no, and the board in one table.

Layer 6 (labs). Invariant: an answer is yes or no by a threshold that is stated, so that another processor, whose last
digits differ, answers the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dlojz.labs.pipeline_figures import Sheet, percent, plain_number
from dlojz.text import say
from dlojz.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from dlojz.compress.board_record import Board
    from dlojz.compress.task import Task


def answered(questions: Iterable[tuple[str, bool]]) -> Sheet:
    """Questions and their answers."""
    yes, no = say(en="yes", fr="oui"), say(en="no", fr="non")
    rows = tuple((question, yes if holds else no) for question, holds in questions)
    return Sheet((say(en="question", fr="question"), say(en="answer", fr="réponse")), rows)


def teacher_seen(teacher: nn.Module, task: Task) -> Sheet:
    """Yes or no: whether the teacher is worth learning from."""
    from dlojz.compress.fitting import accuracy

    question = say(en="the teacher's accuracy is above 95%", fr="l’exactitude du professeur dépasse 95 %")
    return answered([(question, accuracy(teacher, task) > 0.95)])


def board_table(board: Board) -> Sheet:
    """One row per method: accuracy, bytes predicted and written, latency beside the teacher's, on the front or not."""
    front = {line.method for line in board.front()}
    rows = tuple(
        (
            line.method,
            percent(line.accuracy),
            f"{format_bytes(line.predicted_bytes)} | {format_bytes(line.file_bytes)}",
            f"÷ {plain_number(line.ratio, 3)}",
            f"× {plain_number(line.latency_ratio, 2)}",
            "●" if line.method in front else "",
        )
        for line in board.lines()
    )
    head = (
        say(en="method", fr="méthode"),
        say(en="accuracy", fr="exactitude"),
        say(en="bytes: predicted | file", fr="octets : prédits | fichier"),
        say(en="size", fr="taille"),
        say(en="latency", fr="latence"),
        say(en="Pareto front", fr="front de Pareto"),
    )
    return Sheet(head, rows)


def files_as_predicted(board: Board) -> Sheet:
    """Yes or no: the bytes of every method's numbers are those that were predicted."""
    same: Sequence[bool] = [line.payload_bytes == line.predicted_bytes for line in board.lines()]
    return answered([(say(en="bytes as predicted, for every method", fr="octets comme prédits, pour chaque méthode"),
                      all(same))])  # fmt: skip
