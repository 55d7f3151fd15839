"""The Pareto front as a drawing that appears at once: step time across, free memory up.

Layer 4. Invariant: draws what the plan holds; the same layouts as the figure, and a marker says what a colour says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from dlojz.plan.choice import seconds
from dlojz.plan.reasons import decimal
from dlojz.text import say
from dlojz.viz.markup import safe
from dlojz.viz.palette import BLACK, GREY, SKY, VERMILION, YELLOW
from dlojz.viz.plan_figure import SLOWEST

if TYPE_CHECKING:
    from dlojz.plan.answer import Plan

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT: Final = 60
BOTTOM: Final = 44
MOST_DOTS: Final = 400


def front_svg(plan: Plan) -> str:
    """Admitted layouts as dots, those on the front as crosses, the best as a star; axes with their units."""
    found = plan.found
    slowest = min(SLOWEST * float(found.step_s[0]), float(found.step_s[-1]))
    low, high = math.log(0.93 * float(found.step_s[0])), math.log(1.08 * slowest)
    free = (plan.question.device_bytes - found.memory.total_bytes) / 1e9
    top = 1.06 * float(free.max())

    def across(step_s: float) -> float:
        return LEFT + (math.log(step_s) - low) / (high - low) * (WIDTH - LEFT - 12)

    def up(gigabytes_free: float) -> float:
        return (HEIGHT - BOTTOM) * (1 - gigabytes_free / top)

    near = np.flatnonzero(found.step_s <= slowest)
    some = near[np.unique(np.linspace(0, near.size - 1, min(near.size, MOST_DOTS)).astype(int))]
    dots = "".join(
        f'<circle cx="{across(float(found.step_s[place])):.1f}" cy="{up(float(free[place])):.1f}" r="2.2" '
        f'fill="none" stroke="{SKY}"/>'
        for place in some
    )
    crosses = "".join(
        f'<path d="M{across(one.estimated_s):.1f} {up(one.margin_bytes / 1e9):.1f}m-4-4l8 8m0-8l-8 8" '
        f'stroke="{BLACK}" stroke-width="1.6" fill="none"/>'
        for one in plan.pareto
        if one.estimated_s <= slowest
    )
    best = plan.best
    star = (
        f'<path d="M{across(best.estimated_s):.1f} {up(best.margin_bytes / 1e9):.1f}m0-9l2.6 6 6.4 .5-4.9 4.2 1.6 6.3'
        f'-5.7-3.4-5.7 3.4 1.6-6.3-4.9-4.2 6.4-.5z" fill="{YELLOW}" stroke="{VERMILION}" stroke-width="1.3"/>'
    )
    fit, front = decimal(found.admitted.size, 0), len(plan.pareto)
    told = say(
        en=f"{fit} layouts that fit, step time against free memory; {front} on the Pareto front",
        fr=f"{fit} configurations qui tiennent, durée et mémoire libre ; {front} sur le front de Pareto",
    )
    legend = say(
        en="circle: fits · cross: Pareto front · star: best, simulated",
        fr="rond : tient · croix : front de Pareto · étoile : la meilleure, simulée",
    )
    return (
        f'<svg role="img" aria-label="{safe(told)}" viewBox="0 0 {WIDTH:d} {HEIGHT + 22:d}" style="max-width:100%;'
        f'width:{WIDTH:d}px" font-size="11" font-family="sans-serif">'
        + _axes(low, high, top)
        + dots
        + crosses
        + star
        + _text(WIDTH / 2, HEIGHT + 16, legend)
        + "</svg>"
    )


def _axes(low: float, high: float, top: float) -> str:
    """Lines and numbers: seconds at 1, 2 and 5 of each decade, gigabytes at round heights."""
    marks = [
        factor * 10.0**power
        for power in range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
        for factor in (1, 2, 5)
        if low <= math.log(factor * 10.0**power) <= high
    ]
    floor, span = HEIGHT - BOTTOM, WIDTH - LEFT - 12
    drawn = ""
    for mark in marks:
        x = LEFT + (math.log(mark) - low) / (high - low) * span
        drawn += (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{floor:d}" stroke="{GREY}" stroke-opacity=".3"/>'
        ) + _text(x, floor + 15, seconds(mark))
    step = _round(top / 6)
    for part in range(int(top / step) + 1):
        y = floor * (1 - part * step / top)
        drawn += (
            f'<line x1="{LEFT:d}" x2="{WIDTH - 12:d}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GREY}" stroke-opacity=".3"/>'
        ) + _text(LEFT - 22, y + 4, decimal(part * step, 0))
    across, up = (
        say(en="seconds of a step (log.)", fr="durée d’une itération (log.)"),
        say(en="GB that stay free", fr="Go restés libres"),
    )
    return (
        drawn
        + _text(LEFT + span / 2, HEIGHT - 8, across)
        + f'<g transform="translate(14 {floor / 2:.0f}) rotate(-90)">'
        + _text(0, 0, up)
        + "</g>"
    )


def _round(value: float) -> float:
    """1, 2 or 5 times a power of ten, not less than a value; at least 1."""
    power = 10.0 ** math.floor(math.log10(max(value, 1.0)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="currentColor">{safe(words)}</text>'
