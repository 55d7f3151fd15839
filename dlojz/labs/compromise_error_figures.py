"""Where the cost model is wrong, row by row of a published table, and what is known of the rows that are far off.

Layer 6 (labs), on `dlojz.viz`. Invariant: every usable row is drawn; what is said of a row far off is what its table,
its neighbours or `docs/validation.md` say of it, and "nothing is known" where they say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes

from dlojz.evidence import Measurement
from dlojz.labs.compromise_shown import illustrated, thousands
from dlojz.labs.pipeline_figures import Sheet
from dlojz.plan.choice import seconds
from dlojz.plan.validation import RowResult, TableResult, validate
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.footprint_words import percent
from dlojz.viz.palette import BLUE, GREY, VERMILION

FAR: Final = 0.10
"""Error from which a row is annotated."""
SAME: Final = ("size", "gpus", "dp", "tp", "pp", "cp", "zero", "chunks", "checkpointing", "precision", "series")
"""What a row has in common with the neighbour that it is told apart from: all but micro-batch and batch."""


def known(one: RowResult, among: Sequence[RowResult] = ()) -> str:
    """What is known of a row that the cost model misses.

    Args:
        one: the row.
        among: all rows of its table, to look for a neighbour with another micro-batch.

    Source: `docs/validation.md`; the head and the notes of the row's table.
    """
    row = one.row
    said = _of_table(row)
    if said:
        return said
    if "not printed" in row.note or "heads by" in row.note or "batch of the head" in row.note:
        return say(
            en="the source leaves a part of the layout open; it was completed",
            fr="la source laisse ouverte une partie de la configuration ; elle a été complétée",
        )
    twin = _neighbour(one, among)
    if twin is not None:
        there = percent(twin.error, signed=True)
        return say(
            en=f"nothing known; with micro-batch {twin.row.micro_batch} the same layout is {there} off",
            fr=f"rien de connu ; avec un micro-batch de {twin.row.micro_batch}, l’écart est de {there}",
        )
    return say(en="nothing is known", fr="rien n’est connu")


def _of_table(row: Measurement) -> str:
    """What `docs/validation.md` says of rows like this one; empty where it says nothing."""
    match row.table:
        case "mt-nlg":
            return say(
                en="never fitted on; its software is slower than Narayanan’s on the same machine",
                fr="jamais ajusté ; son logiciel est plus lent que celui de Narayanan sur la même machine",
            )
        case "sc21-2" if row.zero == 3:
            return say(
                en="ZeRO-3 of 2021: the model lets it gather through one network card per node",
                fr="ZeRO-3 de 2021 : le modèle ne lui accorde qu’une carte réseau par nœud",
            )
        case "jean-zay-v100":
            return say(
                en="shared network: one layout took 129, 217, 125 and 225 s on four days",
                fr="réseau partagé : une même configuration a pris 129, 217, 125 et 225 s en quatre jours",
            )
        case "jean-zay-a100" if row.size.head_size == 128:
            return say(
                en="heads 128 wide, fast on some days and not on others",
                fr="têtes de largeur 128, rapides certains jours et pas d’autres",
            )
        case "vtrain-multi" if row.tp in (2, 4) and row.pp > 1:
            return say(
                en="tp 2 or 4 with a pipeline: slower than with another micro-batch; the layout does not say why",
                fr="tp 2 ou 4 avec pipeline : plus lent qu’avec un autre micro-batch ; rien ne dit pourquoi",
            )
    return ""


def _neighbour(one: RowResult, among: Sequence[RowResult]) -> RowResult | None:
    """The row that differs in its micro-batch alone and that the model comes closest to; None without one nearer."""
    same = [
        other
        for other in among
        if other.row.micro_batch != one.row.micro_batch
        and all(getattr(other.row, name) == getattr(one.row, name) for name in SAME)
    ]
    nearest = min(same, key=lambda other: abs(other.error), default=None)
    return nearest if nearest is not None and abs(nearest.error) < FAR else None


@illustrated
def errors(table_name: str = "jean-zay-a100") -> tuple[LabFigure, Sheet]:
    """Predicted over measured for every row of a published table; those over 10 % with what is known of them.

    Args:
        table_name: of `dlojz.plan.validation.validated()`.

    Raises:
        LabError: for a table that prints no times, or that there is not.
    """
    found = validate(table_name)
    reasons = _reasons(found)
    figure = new_figure(11.4, 4.6 + 0.19 * len(reasons), alt=_alt(found))
    axes = figure.subplots()
    _points(axes, found, reasons)
    colon = say(en=": ", fr=" : ")
    told = "\n".join(
        letter + colon + reason + (f" ({len(rows)})" if len(rows) > 1 else "")
        for letter, (reason, rows) in reasons.items()
    )
    figure.supxlabel(told, x=0.06, ha="left", fontsize=8)
    return finish(figure), _sheet(found, reasons)


def _reasons(found: TableResult) -> dict[str, tuple[str, list[RowResult]]]:
    """The rows far off, under one letter for each reason, in the order of the table."""
    by_reason: dict[str, list[RowResult]] = {}
    for one in found.rows:
        if abs(one.error) > FAR:
            by_reason.setdefault(known(one, found.rows), []).append(one)
    return {chr(ord("a") + place): pair for place, pair in enumerate(by_reason.items())}


def _points(axes: Axes, found: TableResult, reasons: dict[str, tuple[str, list[RowResult]]]) -> None:
    places = {one.row.row: place for place, one in enumerate(found.rows)}
    axes.axhspan(-100 * FAR, 100 * FAR, color="#e8f0e8", zorder=0)
    axes.axhline(0, color=GREY, linewidth=1)
    for held, face, label in (
        (True, BLUE, say(en="held out", fr="mise de côté")),
        (False, "none", say(en="fitted on", fr="ajustée")),
    ):
        rows = [one for one in found.rows if one.held_out == held]
        axes.plot(
            [places[one.row.row] for one in rows], [100 * one.error for one in rows], linestyle="none", marker="o",
            markersize=5, markerfacecolor=face, markeredgecolor=BLUE, label=label,
        )  # fmt: skip
    axes.plot(
        range(len(found.rows)), [100 * (one.trivial_s / one.measured_s - 1) for one in found.rows],
        linestyle="none", marker="_", markersize=6, color=GREY, zorder=1,
        label=say(en="constant FLOP/s per GPU", fr="FLOP/s par GPU constants"),
    )  # fmt: skip
    for letter, (_, far) in reasons.items():
        for one in far:
            axes.annotate(
                letter, (places[one.row.row], 100 * one.error), xytext=(0, 6 if one.error > 0 else -6),
                textcoords="offset points", ha="center", va="bottom" if one.error > 0 else "top", fontsize=8.5,
                color=VERMILION, fontweight="bold",
            )  # fmt: skip
    axes.margins(y=0.12)
    axes.set_ylim(min(axes.get_ylim()[0], -16.0), max(axes.get_ylim()[1], 24.0))
    axes.set_xlim(-1, len(found.rows))
    step = max(1, len(found.rows) // 12)
    axes.set_xticks(
        range(0, len(found.rows), step), [one.row.row.partition("/")[2] for one in found.rows[::step]],
        fontsize=7, rotation=30, ha="right",
    )  # fmt: skip
    thousands(axes.yaxis)
    axes.set_ylabel(say(en="predicted over measured, %", fr="prédit sur mesuré, %"))
    axes.set_xlabel(say(en="row, in the order of the source", fr="ligne, dans l’ordre de la source"))
    axes.set_title(_title(found), fontsize=9.5, loc="left")
    axes.legend(fontsize=8, loc="upper right", ncols=3, framealpha=0.9)
    plain(axes)


def _title(found: TableResult) -> str:
    return say(
        en=f"{found.name}: {len(found.rows)} rows; held-out error {percent(found.mean)} on average, a constant rate "
        f"{percent(found.trivial)}",
        fr=f"{found.name} : {len(found.rows)} lignes ; erreur moyenne des lignes mises de côté {percent(found.mean)}, "
        f"taux constant {percent(found.trivial)}",
    )


def _sheet(found: TableResult, reasons: dict[str, tuple[str, list[RowResult]]]) -> Sheet:
    head = (
        say(en="row", fr="ligne"),
        "dp · tp · pp",
        "micro-batch",
        say(en="measured", fr="mesuré"),
        say(en="predicted", fr="prédit"),
        say(en="error", fr="erreur"),
        say(en="half", fr="moitié"),
        say(en="what is known", fr="ce qu’on en sait"),
    )
    held, fitted = say(en="held out", fr="mise de côté"), say(en="fitted on", fr="ajustée")
    rows = [
        (
            one.row.row.partition("/")[2],
            f"{one.row.dp} · {one.row.tp} · {one.row.pp}",
            str(one.row.micro_batch),
            seconds(one.measured_s),
            seconds(one.predicted_s),
            percent(one.error, signed=True),
            held if one.held_out else fitted,
            letter + say(en=": ", fr=" : ") + reason,
        )
        for letter, (reason, far) in reasons.items()
        for one in far
    ]
    return Sheet(head, tuple(rows))


def _alt(found: TableResult) -> str:
    far = [one for one in found.rows if abs(one.error) > FAR]
    each = ", ".join(f"{one.row.row.partition('/')[2]} {percent(one.error, signed=True)}" for one in far)
    return _title(found) + ". " + say(en=f"Over 10 %: {each or 'none'}.", fr=f"Au-delà de 10 % : {each or 'aucune'}.")
