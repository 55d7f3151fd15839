"""An exercise: what is asked, how an answer is judged, the two hints.

Layer 6 (labs). Invariant: a judge sees nothing but the answer it is given, calls it on inputs of its own, and compares
behaviour with a reference; it never reads the student's text. What it refuses, it explains in words to act on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from dlojz.labs.sandbox import Outcome, run_limited
from dlojz.labs.verdict import NotDone, Said, Verdict, not_done
from dlojz.text import say

PRINTED_CHARACTERS = 600


class Wrong(Exception):  # noqa: N818 - it is a verdict, not an error of the program
    """Raised by a judge: the sentence tells what is wrong and what to look at."""


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise of a lab.

    Args:
        id: Stable name, as in `lab.check("attention", …)`.
        title: Shown in the table of progress.
        judge: Called with the student's function, in a child process; raises `Wrong` to refuse it.
        praise: Said when the answer is right: one sentence on what has been gained.
        hints: Two, the second more precise than the first; neither gives the code.
    """

    id: str
    title: Said
    judge: Callable[[Callable[..., Any]], None]
    praise: Said
    hints: tuple[Said, Said]


def judge(exercise: Exercise, answer: object) -> Verdict:
    """Judge an answer within limits of time, memory and output; never raises for what the student wrote."""
    if answer is ...:
        return Verdict("todo", not_done(exercise.id))
    if not callable(answer):
        return Verdict(
            "wrong",
            say(
                en=f'lab.check("{exercise.id}", …) judges a function, but it received a {type(answer).__name__}: give '
                "it the name of the function, without parentheses.",
                fr=f'lab.check("{exercise.id}", …) juge une fonction, mais a reçu un objet de type '
                f"{type(answer).__name__} : donnez-lui le nom de la fonction, sans parenthèses.",
            ),
        )
    if getattr(exercise.judge, "on_ranks", False):
        import torch._dynamo  # noqa: F401 - here, once: the first optimizer on a rank would import it, for seconds
    outcome = run_limited(lambda: _judged(exercise, answer))
    verdict = _verdict(exercise, outcome)
    return Verdict(verdict.state, verdict.message, _shortened(outcome.printed))


def _judged(exercise: Exercise, answer: Callable[..., Any]) -> list[str]:
    """In the child: state and message."""
    try:
        exercise.judge(answer)
    except Wrong as wrong:
        return ["wrong", str(wrong)]
    except NotDone as error:
        return ["todo", str(error)]
    except MemoryError:
        return ["wrong", _too_much_memory()]
    except BaseException as error:  # the student's code may raise anything, SystemExit and KeyboardInterrupt included
        return ["wrong", _raised(error, answer)]
    return ["right", str(exercise.praise)]


def _verdict(exercise: Exercise, outcome: Outcome) -> Verdict:
    if outcome.end == "answered":
        state, message = outcome.answer
        return Verdict(state, message)
    return Verdict(
        "wrong",
        {
            "too_long": say(
                en=f"Your function had not answered after {outcome.limit_s:.0f} s and was stopped: look for a loop "
                "that never ends.",
                fr=f"Votre fonction n’avait pas répondu au bout de {outcome.limit_s:.0f} s et a été arrêtée : cherchez "
                "une boucle sans fin.",
            ),
            "flood": say(
                en="Your function printed more than 64 KiB and was stopped: remove the print from the loop.",
                fr="Votre fonction a affiché plus de 64 Kio et a été arrêtée : retirez le print de la boucle.",
            ),
            "died": say(
                en=f"The process that ran your function ended without an answer (exit code {outcome.exit_code}): it "
                "left by os._exit, exceeded a limit, or crashed.",
                fr=f"Le processus qui exécutait votre fonction s’est terminé sans répondre (code de sortie "
                f"{outcome.exit_code}) : il est sorti par os._exit, a dépassé une limite ou s’est interrompu "
                "brutalement.",
            ),
        }[outcome.end],
    )


def _too_much_memory() -> str:
    return say(
        en="Your function asked for more memory than a check allows (2 GiB): look for a list or a tensor that grows "
        "without limit.",
        fr="Votre fonction a demandé plus de mémoire que la vérification n’en accorde (2 Gio) : cherchez une liste ou "
        "un tenseur qui grandit sans limite.",
    )


def _raised(error: BaseException, answer: object) -> str:
    """An exception in one sentence, with the student's line where there is one."""
    name, text = type(error).__name__, str(error).strip().split("\n")[0]
    if isinstance(error, RuntimeError) and "allocate memory" in text:
        return _too_much_memory()
    what = f"{name}: {text}" if text else name
    code = getattr(answer, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if isinstance(code, CodeType) and frame.filename == code.co_filename]
    if not own:
        return say(
            en=f"The check could not use what your function is or returned ({what}): look at the arguments it takes "
            "and the type it returns.",
            fr=f"La vérification n’a pas pu utiliser votre fonction ou son résultat ({what}) : regardez les arguments "
            "qu’elle prend et le type qu’elle renvoie.",
        )
    number, line = own[-1].lineno, own[-1].line
    return say(
        en=f"Your function raised {what}\nat line {number} of its cell: {line}",
        fr=f"Votre fonction a levé {what}\nà la ligne {number} de sa cellule : {line}",
    )


def _shortened(printed: str) -> str:
    text = "".join(character if character.isprintable() or character in "\n\t" else "�" for character in printed)
    return text if len(text) <= PRINTED_CHARACTERS else text[:PRINTED_CHARACTERS] + "…"
