"""`dlojz plan --cluster here`: the best layout for this machine's processes, run beside its neighbours where asked.

Layer 6. Invariant: seconds are predicted from the user's calibration before anything is run; with `--measure` the same
layouts are then run in turns, and what the choice loses is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rich.table import Table

from dlojz import cli
from dlojz.cli.answer import tell
from dlojz.cli.flags import number
from dlojz.schema import LabError
from dlojz.text import say

TAKEN: Final = ("cluster", "model", "gpus", "batch", "figure", "top", "measure", "json", "lang")
ROUNDS: Final = 6
MOST_MEASURED: Final = 8


def plan_here_answer(given: dict[str, Any], answer: Callable[[Any], None]) -> int:
    """Plan for this machine, and show the answer.

    Raises:
        LabError: for a flag that has no meaning here, or without a calibration.
    """
    from dlojz.plan.here import plan_here

    foreign = [name for name in given if name not in TAKEN]
    if foreign:
        flag = "--" + foreign[0].replace("_", "-")
        raise LabError(
            say(
                en=f"{flag} does not go with --cluster here, which takes --model, --gpus (processes), --batch, "
                "--measure, --figure, --top and --json.",
                fr=f"{flag} ne va pas avec --cluster here, qui prend --model, --gpus (processus), --batch, --measure, "
                "--figure, --top et --json.",
            )
        )
    top = number(given, "top", int, least=1) or 12
    made = plan_here(
        str(given.get("model", "coatnet_tiny")),
        number(given, "gpus", int, least=1) or 2,
        number(given, "batch", int, least=1) or 16,
    )
    kinds = made.kinds()[: min(top, MOST_MEASURED)]
    measured_s: list[float] = []
    if given.get("measure"):
        from dlojz.launch.choosing import measure_steps

        tell(
            say(
                en=f"Running {len(kinds)} layouts in turns, {ROUNDS} steps each…",
                fr=f"Exécution de {len(kinds)} configurations à tour de rôle, {ROUNDS} itérations chacune…",
            )
        )
        measured_s = measure_steps([one.config for one in kinds], ROUNDS)
    if given.get("figure"):
        made.figure(measured_s or None, given["figure"])
        tell(say(en=f"written: {given['figure']}", fr=f"écrit : {given['figure']}"))
    if given.get("json"):
        told = made.as_dict(top)
        for row, taken in zip(told["rows"], measured_s, strict=False):
            row["measured_s"] = taken
        answer(told)
        return cli.DONE
    answer("\n".join(f"{name}: {value}" for name, value in made.lines()))
    answer(_table(made, top, measured_s))
    if measured_s:
        answer(_verdict(measured_s))
    return cli.DONE


def _table(made: Any, top: int, measured_s: list[float]) -> Table:
    from dlojz.plan.choice import seconds

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    titles = [
        say(en="layout", fr="configuration"),
        say(en="predicted step", fr="itération prédite"),
        say(en="to the best", fr="au meilleur"),
        *([say(en="measured", fr="mesurée")] if measured_s else []),
    ]
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place == 0 else "right")
    for place, row in enumerate(made.table(top)):
        taken = [seconds(measured_s[place])] if place < len(measured_s) else [""] if measured_s else []
        table.add_row(*row, *taken)
    return table


def _verdict(measured_s: list[float]) -> str:
    loss = 100 * (measured_s[0] / min(measured_s) - 1)
    return say(
        en=f"The first choice takes {loss:.1f} % longer than the best of the {len(measured_s)} that were measured.",
        fr=f"Le premier choix prend {loss:.1f} % de plus que le meilleur des {len(measured_s)} mesurés.".replace(
            ".", ",", 1
        ),
    )
