"""How long the giants train: the formula 8TP/(nX) beside the cost model, in days, GPU-hours and energy.

Layer 6 (labs), on `dlojz.viz`. Invariant: nothing is typed in but models, tokens and machines; every duration is
arithmetic on a predicted step, on the formula, or on a published row, and the picture says which.

Source: Narayanan et al. 2021 (arXiv 2104.04473), §5.1, equation 4, and Table 1.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from matplotlib.axes import Axes

from dlojz.hardware import cluster
from dlojz.labs.compromise_shown import illustrated, logarithmic
from dlojz.labs.pipeline_figures import Sheet
from dlojz.plan.ask import plan
from dlojz.plan.interval import HeldOut, held_out
from dlojz.plan.reasons import decimal
from dlojz.plan.subject import subject
from dlojz.plan.validation import PROFILE_OF, validate
from dlojz.predict.time import Bill, bill, training_s
from dlojz.predict.time.training import SECONDS_PER_DAY
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, BLUE, ORANGE, VERMILION

TOKENS: Final = 300e9
RATE: Final = 140e12
"""FLOP/s of one A100 that the formula takes for every model, as the paper does for its 175 B."""
COURSE: Final = (("megatron-1.7b", 512), ("megatron-18b", 1024), ("megatron-76b", 1792), ("megatron-1t", 3072))
"""Models of the course's table, and the batch that Narayanan et al. trained each with."""
NODES: Final = (1, 4)
SITE: Final = "dgx_a100"
TABLE: Final = "sc21-1"


class Training(NamedTuple):
    """A whole training of one model.

    Attributes:
        parameters: of the model.
        gpus: how many.
        degrees: dp, tp, pp and cp of the cost model's layout; empty where none fits.
        formula_s: 8TP/(nX).
        model_s: of the cost model; None where no layout fits.
        interval: factors on it between which four in five held-out rows lay; None where it does not fit.
        published_s: what the published FLOP/s come to; None in the course's table.
        account: GPU-hours and energy of the cost model's training, of the formula's where that has none.
    """

    parameters: int
    gpus: int
    degrees: tuple[int, ...]
    formula_s: float
    model_s: float | None
    interval: HeldOut | None
    published_s: float | None
    account: Bill


@cache
def course_table() -> tuple[Training, ...]:
    """Models of the course on 1 and 4 DGX A100: the formula, and the planner's best layout."""
    site, made = cluster(SITE), []
    for model, batch in COURSE:
        for nodes in NODES:
            gpus = nodes * site.gpus_per_node
            parameters, degrees, step_s, known = _planned(model, gpus, batch)
            formula_s = training_s(8 * parameters, TOKENS, gpus, RATE)
            whole_s = None if step_s is None else step_s * TOKENS / (batch * 2048)
            account = bill(site, gpus, whole_s or formula_s)
            made.append(Training(parameters, gpus, degrees, formula_s, whole_s, known, None, account))
    return tuple(made)


def _planned(model: str, gpus: int, batch: int) -> tuple[int, tuple[int, ...], float | None, HeldOut | None]:
    """Parameters, degrees of the best layout, seconds of its step and their interval; none where nothing fits."""
    try:
        best = plan(model, SITE, gpus, batch, sequence_length=2048).best
    except LabError:
        return subject(model).num_parameters, (), None, None
    one = best.candidate
    return best.question.subject.num_parameters, (one.dp, one.tp, one.pp, one.cp), best.step_s, best.held_out


@cache
def published_table() -> tuple[Training, ...]:
    """Narayanan's Table 1: the formula at one rate for all, the published rate of each row, and the cost model."""
    known, made = held_out(PROFILE_OF[TABLE]), []
    for one in validate(TABLE).rows:
        row = one.row
        steps = TOKENS / (row.global_batch * row.size.sequence_length)
        formula_s = training_s(8 * row.size.num_parameters, TOKENS, row.gpus, RATE)
        account = bill(cluster(row.cluster), row.gpus, steps * one.predicted_s)
        made.append(
            Training(
                row.size.num_parameters, row.gpus, (row.dp, row.tp, row.pp, row.cp), formula_s, steps * one.predicted_s,
                known, steps * one.measured_s, account,
            )
        )  # fmt: skip
    return tuple(made)


def duration(seconds: float) -> str:
    """A long time in the unit a person would choose: days, weeks from three on, years from seventy weeks on."""
    days = seconds / SECONDS_PER_DAY
    if days < 21:
        return say(en=f"{decimal(days)} d", fr=f"{decimal(days)} j")
    if days < 70 * 7:
        return say(en=f"{decimal(days / 7)} weeks", fr=f"{decimal(days / 7)} semaines")
    return say(en=f"{decimal(days / 365.25)} years", fr=f"{decimal(days / 365.25)} ans")


@illustrated
def giants() -> tuple[LabFigure, Sheet]:
    """Training on 300 billion tokens: the course's table on 1 and 4 DGX A100, and Narayanan's Table 1.

    Left and right the formula with 140 TFLOP/s per GPU beside the cost model (with its interval of four held-out rows
    in five); right also what the published FLOP/s come to. A model that fits nowhere has a formula's time all the same.
    """
    course, published = course_table(), published_table()
    figure = new_figure(12.6, 5.2, alt=_alt(course, published))
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.25))
    _drawn(
        left,
        course,
        say(
            en="course’s table: 1 and 4 DGX A100\nplanner’s best layout with today’s libraries",
            fr="tableau du cours : 1 et 4 DGX A100\nmeilleure configuration, bibliothèques d’aujourd’hui",
        ),
    )
    _drawn(
        right,
        published,
        say(
            en="Narayanan et al. 2021, Table 1\ntheir layouts, all with recomputation",
            fr="Narayanan et al. 2021, tableau 1\nleurs configurations, toutes avec recalcul",
        ),
    )
    handles, labels = right.get_legend_handles_labels()
    crosses, words = left.get_legend_handles_labels()
    extra = [(one, word) for one, word in zip(crosses, words, strict=True) if word not in labels]
    figure.legend(
        [*handles, *(one for one, _ in extra)], [*labels, *(word for _, word in extra)],
        loc="outside lower center", ncols=4, frameon=False,
    )  # fmt: skip
    return finish(figure), _sheet((*course, *published))


def _drawn(axes: Axes, trainings: tuple[Training, ...], title: str) -> None:
    places = list(range(len(trainings)))
    days = [one.formula_s / SECONDS_PER_DAY for one in trainings]
    axes.plot(
        places, days, linestyle="none", marker="D", markersize=7, markerfacecolor="none", color=ORANGE,
        label="8TP/(nX), X = 140 TFLOP/s",
    )  # fmt: skip
    fits = [
        (place, one.model_s / SECONDS_PER_DAY, (one.interval.low, one.interval.high))
        for place, one in zip(places, trainings, strict=True)
        if one.model_s is not None and one.interval is not None
    ]
    axes.errorbar(
        [place for place, _, _ in fits], [value for _, value, _ in fits],
        yerr=[[value * abs(factors[side] - 1) for _, value, factors in fits] for side in (0, 1)],
        linestyle="none", marker="o", markersize=5, color=BLUE, capsize=4,
        label=say(en="cost model", fr="modèle de coût"),
    )  # fmt: skip
    out = [place for place, one in zip(places, trainings, strict=True) if one.model_s is None]
    if out:
        axes.plot(
            out, [days[place] for place in out], linestyle="none", marker="x", markersize=11, color=VERMILION,
            label=say(en="fits in no layout", fr="ne tient dans aucune configuration"),
        )  # fmt: skip
    told = [(place, one.published_s) for place, one in zip(places, trainings, strict=True) if one.published_s]
    if told:
        axes.plot(
            [place for place, _ in told], [value / SECONDS_PER_DAY for _, value in told], linestyle="none", marker="+",
            markersize=11, color=BLACK, label=say(en="published FLOP/s", fr="FLOP/s publiés"),
        )  # fmt: skip
    axes.set_yscale("log")
    spread = max(days) / min(days)
    logarithmic(axes.yaxis, (1.0, 3.0) if spread > 100 else (1.0, 2.0, 3.0, 5.0, 7.0))
    axes.margins(x=0.06, y=0.12)
    axes.set_xticks(places, [f"{_billions(one.parameters)}\n{one.gpus} GPU" for one in trainings], fontsize=7.5)
    axes.set_xlabel(say(en="parameters; GPUs", fr="paramètres ; GPU"))
    axes.set_ylabel(say(en="days for 300 billion tokens (log.)", fr="jours pour 300 milliards de tokens (log.)"))
    axes.set_title(title, fontsize=10)
    plain(axes)


def _sheet(trainings: tuple[Training, ...]) -> Sheet:
    none = say(en="fits nowhere", fr="ne tient pas")
    rows = [
        (
            _billions(one.parameters),
            str(one.gpus),
            " · ".join(map(str, one.degrees[:3])) + (f" · cp {one.degrees[3]}" if one.degrees[3:] > (1,) else ""),
            duration(one.formula_s),
            none if one.model_s is None else duration(one.model_s),
            "" if one.published_s is None else duration(one.published_s),
            "" if one.model_s is None else decimal(one.account.gpu_hours / 1e3, 0),
            "" if one.model_s is None else decimal(one.account.energy_kwh / 1e3, 0),
        )
        for one in trainings
    ]
    head = (
        say(en="parameters", fr="paramètres"),
        "GPU",
        "dp · tp · pp",
        "8TP/(nX)",
        say(en="cost model", fr="modèle de coût"),
        say(en="published FLOP/s", fr="FLOP/s publiés"),
        say(en="thousand GPU-hours", fr="milliers d’heures GPU"),
        say(en="MWh of the GPUs", fr="MWh des GPU"),
    )
    return Sheet(head, tuple(rows))


def _alt(course: tuple[Training, ...], published: tuple[Training, ...]) -> str:
    each = ", ".join(
        f"{_billions(one.parameters)} / {one.gpus} GPU {duration(one.formula_s)} – "
        + (say(en="fits nowhere", fr="ne tient pas") if one.model_s is None else duration(one.model_s))
        for one in (*course, *published)
    )
    return say(
        en=f"Training on 300 billion tokens, by the formula – by the cost model: {each}.",
        fr=f"Entraînement sur 300 milliards de tokens, par la formule – par le modèle de coût : {each}.",
    )


def _billions(parameters: float) -> str:
    value = parameters / 1e9
    return say(en=f"{decimal(value, 1 if value < 10 else 0)} B", fr=f"{decimal(value, 1 if value < 10 else 0)} Md")
