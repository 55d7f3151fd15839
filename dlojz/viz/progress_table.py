"""The table of a student's progress over all labs, as HTML and as text.

Layer 4. Invariant: it draws what it is given and computes nothing; a bar never speaks alone, its two numbers stand in
it, and every text goes through `safe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlojz.text import language, say
from dlojz.viz.markup import safe, visible
from dlojz.viz.palette import BLUE, SKY

STYLE = (
    ".dlojz-progress{border-collapse:collapse;margin:.5em 0}"
    # JupyterLab aligns the cells of its tables to the right: one more class outweighs it.
    "table.dlojz-progress.dlojz-progress th,table.dlojz-progress.dlojz-progress td{padding:.3em .9em;text-align:left;"
    "border-bottom:1px solid #bbb}"
    ".dlojz-progress .track{position:relative;width:11em;height:1.35em;background:#e6e6e6;border-radius:3px}"
    ".dlojz-progress .fill{height:100%;border-radius:3px}"
    ".dlojz-progress .told{position:absolute;inset:0;text-align:center;line-height:1.35em;color:#000}"
)

PAGE_STYLE = "body{font-family:sans-serif;margin:2em;color:#222;background:#fff}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One lab of the table.

    Args:
        number, title: Of the lab.
        notebook: File name, for the link; empty where there is nothing beside the page to lead to.
        done, exercises: How many exercises are done, of how many; no exercise where the lab is not installed.
        predictions, made, good: How many predictions there are, were made, and were good.
    """

    number: str
    title: str
    notebook: str
    done: int
    exercises: int
    predictions: int
    made: int
    good: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do next.

    Args:
        number, title, notebook: Of the lab.
        exercise: Title of the first exercise that is not done.
    """

    number: str
    title: str
    notebook: str
    exercise: str


def progress_html(rows: Sequence[Row], advice: Advice | None) -> str:
    """The table and the advice, for a notebook."""
    titles = (say(en="lab", fr="TP"), say(en="exercises", fr="exercices"), say(en="predictions", fr="prédictions"))
    head = "".join(f'<th scope="col">{safe(title)}</th>' for title in titles)
    body = "".join(
        f"<tr><td>{_link(row.notebook, f'{row.number} {row.title}')}</td>"
        f"<td>{_bar(row)}</td><td>{safe(told_predictions(row))}</td></tr>"
        for row in rows
    )
    return (
        f"<style>{STYLE}</style>"
        f'<table class="dlojz-progress"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"<p>{safe(total(rows))}</p>{_advice_html(advice)}"
    )


def progress_page(rows: Sequence[Row], advice: Advice | None) -> str:
    """The same as one page that refers to nothing outside itself."""
    heading = say(en="Where I stand in the labs", fr="Où j’en suis dans les TP")
    return (
        f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(heading)}</title><style>{PAGE_STYLE}</style></head><body><h1>{safe(heading)}</h1>"
        f"{progress_html(rows, advice)}</body></html>\n"
    )


def _advice_html(advice: Advice | None) -> str:
    if advice is None:
        return f"<p><b>{safe(all_done())}</b></p>"
    before, after = sentence(advice)
    return f"<p>{safe(before)} {_link(advice.notebook, named(advice))}{safe(after)}</p>"


def _link(target: str, text: str) -> str:
    return f'<a href="{safe(target)}">{safe(text)}</a>' if target else safe(text)


def _bar(row: Row) -> str:
    if not row.exercises:
        return safe(not_there())
    percent = 100 * row.done / row.exercises
    color = BLUE if row.done == row.exercises else SKY
    # Light under black text; the full bar is told by its mark too.
    mark = "✓ " if row.done == row.exercises else ""
    told = safe(f"{mark}{row.done} / {row.exercises}")
    text = "#fff" if row.done == row.exercises else "#000"
    return (
        f'<div class="track"><div class="fill" style="width:{percent:.0f}%;background:{safe(color)}"></div>'
        f'<div class="told" style="color:{safe(text)}">{told}</div></div>'
    )


def progress_text(rows: Sequence[Row], advice: Advice | None) -> str:
    """The same at a terminal."""
    width = max((len(visible(row.title)) for row in rows), default=0)
    lines = []
    for row in rows:
        told = f"{row.done:>2}/{row.exercises:<2}" if row.exercises else not_there()
        mark = "✓" if row.exercises and row.done == row.exercises else "·"
        lines.append(
            f"{mark} {visible(row.number)} {visible(row.title):<{width}}  {told}  {told_predictions(row)}".rstrip()
        )
    if advice is None:
        closing = all_done()
    else:
        before, after = sentence(advice)
        closing = f"{before} {visible(named(advice))}{visible(after)}"
    return "\n".join([*lines, total(rows), closing])


def total(rows: Sequence[Row]) -> str:
    """All exercises and predictions in one sentence."""
    done, exercises = sum(row.done for row in rows), sum(row.exercises for row in rows)
    made, good = sum(row.made for row in rows), sum(row.good for row in rows)
    return say(
        en=f"Exercises done: {done} of {exercises}; predictions made: {made}, good at the first try: {good}.",
        fr=f"Exercices réussis : {done} sur {exercises} ; prédictions faites : {made}, dont bonnes du premier coup : "
        f"{good}.",
    )


def told_predictions(row: Row) -> str:
    """The predictions of a lab in a few words; empty where there are none."""
    if not row.predictions:
        return ""
    if not row.made:
        return say(en=f"{row.predictions} to make", fr=f"{row.predictions} à faire")
    return say(
        en=f"{row.made} of {row.predictions} made, {row.good} good",
        fr=f"{row.made} sur {row.predictions} faites, {row.good} bonnes",
    )


def named(advice: Advice) -> str:
    """The lab of the advice."""
    return say(en=f"lab {advice.number}, {advice.title}", fr=f"TP {advice.number}, {advice.title}")


def sentence(advice: Advice) -> tuple[str, str]:
    """What stands before and after the lab's name."""
    return say(en="Next:", fr="La suite :"), f" — {advice.exercise}."


def not_there() -> str:
    """Said of a lab that this installation does not have."""
    return say(en="not installed", fr="non installé")


def all_done() -> str:
    """Said when nothing is left."""
    return say(en="Every exercise of every lab is done.", fr="Tous les exercices de tous les TP sont réussis.")
