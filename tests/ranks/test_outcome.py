"""How a cell ended, in one text: each cause once, with the ranks it concerns."""

import pytest

from dlojz.base.language import use_language
from dlojz.ranks.show import CellAnswer, CellFailure, RanksError, must_rejoin, still_to_do, unknown_names

ZERO = CellFailure("ZeroDivisionError", "division by zero", lines=((2, "1 / 0", "f"),))
MISSING = CellFailure("CollectiveFault", "Missing rank: rank 1 ended.", "missing", ((1, "dist.barrier()", ""),))
PEER = CellFailure("CollectiveFault", "Missing rank: rank 0 was stopped.", "peer", ((1, "dist.barrier()", ""),))
TO_DO = CellFailure("NotDone", "still to do", lines=((0, "raise NotDone('x')", "f"),))


def text(*answers: CellAnswer) -> str:
    return str(RanksError(answers))


def test_the_same_error_is_told_once() -> None:
    answers = [CellAnswer(rank, trouble=ZERO) for rank in range(3)]
    assert text(*answers) == "Ranks 0–2: ZeroDivisionError: division by zero\n    line 3, f(): 1 / 0"


def test_different_errors_are_told_each_with_its_line() -> None:
    other = CellFailure("ZeroDivisionError", "float division by zero", lines=ZERO.lines)
    lines = text(CellAnswer(0, trouble=ZERO), CellAnswer(1, trouble=other)).splitlines()
    assert lines == [
        "Rank 0: ZeroDivisionError: division by zero",
        "    line 3, f(): 1 / 0",
        "Rank 1: ZeroDivisionError: float division by zero",
        "    line 3, f(): 1 / 0",
    ]


def test_a_fault_between_ranks_shows_what_each_called_last() -> None:
    answers = (CellAnswer(0, trouble=MISSING, last="barrier #1", torn=True), CellAnswer(1))
    assert text(*answers).splitlines() == [
        "Missing rank: rank 1 ended.",
        "    line 2: dist.barrier()",
        "Last call in this cell:",
        "    rank 0: barrier #1",
        "    rank 1: no collective",
        "The process group is made anew before the next cell.",
    ]


def test_a_consequence_is_no_error_of_its_own() -> None:
    assert "was stopped" not in text(CellAnswer(0, trouble=ZERO), CellAnswer(1, trouble=PEER, torn=True))
    assert "was stopped" in text(CellAnswer(0), CellAnswer(1, trouble=PEER, torn=True))


def test_work_still_to_do_is_recognised_behind_its_consequences() -> None:
    assert still_to_do([CellAnswer(0, trouble=TO_DO), CellAnswer(1, trouble=PEER)]) == "still to do"
    assert still_to_do([CellAnswer(0, trouble=TO_DO), CellAnswer(1, trouble=ZERO)]) == ""
    assert still_to_do([CellAnswer(0)]) == ""


def test_names_that_ranks_do_not_know_are_found() -> None:
    trouble = CellFailure("NameError", "name 'model' is not defined. Did you mean: 'mode'?")
    assert unknown_names([CellAnswer(0, trouble=trouble), CellAnswer(1, trouble=ZERO)]) == {"model"}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([CellAnswer(0), CellAnswer(1)], False),
        ([CellAnswer(0, trouble=ZERO), CellAnswer(1)], False),
        ([CellAnswer(0, torn=True), CellAnswer(1)], True),
        ([CellAnswer(0, trouble=CellFailure("", kind="exit")), CellAnswer(1)], True),
        ([CellAnswer(0, trouble=CellFailure("KeyboardInterrupt", kind="limit")), CellAnswer(1)], True),
        ([CellAnswer(0, counts={"0": 1}), CellAnswer(1, counts={"0": 2})], True),
        ([CellAnswer(0, counts={"0": 1, "1": 5}), CellAnswer(1, counts={"0": 1})], False),
    ],
)
def test_the_group_is_made_anew_only_where_it_must(answers: list[CellAnswer], expected: bool) -> None:
    assert must_rejoin(answers) is expected


def test_every_way_to_end_has_its_sentence_in_french() -> None:
    ways = [
        CellFailure("", kind="exit", exit_code=3),
        CellFailure("", kind="exit", exit_code=-9),
        CellFailure("", kind="exit", exit_code=None),
        CellFailure("KeyboardInterrupt", kind="exit", exit_code=-9),
        CellFailure("KeyboardInterrupt", kind="exit", exit_code=-9, limit_s=1.5),
        CellFailure("KeyboardInterrupt", kind="limit", limit_s=1.5),
        CellFailure("KeyboardInterrupt", kind="stopped"),
        CellFailure("SystemExit", "2"),
    ]
    use_language("fr")
    first_lines = [
        text(CellAnswer(1, trouble=way, kept=way.kind != "exit"), CellAnswer(0)).splitlines()[0] for way in ways
    ]
    assert first_lines == [
        "Rang 1 : le processus s’est terminé de lui-même, code de sortie 3, au milieu de la cellule.",
        "Rang 1 : le processus a été arrêté par le signal SIGKILL (c’est ainsi que finit une cellule qui demande trop "
        "de mémoire).",
        "Rang 1 : le processus s’est arrêté au milieu de la cellule.",
        "Rang 1 : aucune réaction à l’interruption ; le processus a été arrêté.",
        "Rang 1 : toujours en cours au bout de 1,5 s, sans réagir à l’interruption ; le processus a été arrêté.",
        "Rang 1 : exécution non terminée au bout de 1,5 s, la limite de cette cellule (--limit) ; interrompue.",
        "Rang 1 : exécution interrompue.",
        "Rang 1 : appel de sys.exit(2).",
    ]
