"""Figures and tables of lab 10 on the curriculum: the lengths of a run, trials laid over one another, in few colours.

Layer 6 (labs), on `dlojz.viz`. Invariant: what is drawn is what the package's runs and trials give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dlojz.labs.pipeline_figures import Picture, Sheet, plain_number
from dlojz.predict.curriculum import curriculum_cost
from dlojz.text import language, say
from dlojz.viz.curriculum_figure import curriculum_figure, pacing_figure

if TYPE_CHECKING:
    from dlojz.config import RunConfig
    from dlojz.trajectory import Trajectory


def _names(ones: Mapping[str, object]) -> dict[str, str]:
    """The names of a legend, in the reader's language."""
    french = {"without": "sans curriculum", "linear": "linéaire", "root": "racine carrée"}
    english = {"without": "without curriculum", "linear": "linear", "root": "square root"}
    known = french if language() == "fr" else english
    return {name: known.get(name, name) for name in ones}


def lengths(configs: Mapping[str, RunConfig]) -> Picture:
    """Tokens per sample by step, and tokens read so far, for several runs."""
    names = _names(configs)
    return Picture(pacing_figure({names[name]: config for name, config in configs.items()}))


def trials(trajectories: Mapping[str, Trajectory]) -> Picture:
    """Loss against tokens and against time, Adam's √v, and the cost of a step by its length, of several trials."""
    names = _names(trajectories)
    growing = max((one.config for one in trajectories.values()), key=lambda config: config.curriculum != "none")
    cost = curriculum_cost(growing)
    predicted = {length: cost.relative_cost(length) for length in (one.stretch.length for one in cost.lengths)}
    return Picture(curriculum_figure({names[name]: [one] for name, one in trajectories.items()}, predicted=predicted))


def trials_table(trajectories: Mapping[str, Trajectory]) -> Sheet:
    """Steps, tokens, loss on other text at the end, largest √v and seconds of several trials."""
    names = _names(trajectories)
    rows = tuple(
        (
            names[name],
            str(len(one.losses)),
            str(sum(one.tokens)),
            plain_number(one.held_out[-1].loss, 3),
            plain_number(max(one.variance_max), 2),
            plain_number(sum(one.step_s), 2),
        )
        for name, one in trajectories.items()
    )
    head = (
        say(en="trial", fr="essai"),
        say(en="steps", fr="pas"),
        say(en="tokens", fr="tokens"),
        say(en="loss on other text", fr="perte sur un autre texte"),
        say(en="largest √v", fr="plus grand √v"),
        say(en="seconds", fr="secondes"),
    )
    return Sheet(head, rows)
