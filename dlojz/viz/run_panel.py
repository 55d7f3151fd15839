"""One run as it goes, as HTML and as text: state, why it waits, progress, loss, memory, step time, estimated end.

Layer 4. Invariant: two pure functions of one `RunView`; every text is escaped, both say the same, and what is not
known yet is left out rather than guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlojz.text import say
from dlojz.units import format_bytes, format_seconds
from dlojz.viz.grid import status_label
from dlojz.viz.markup import safe, visible
from dlojz.viz.palette import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION

RANKS_SHOWN = 8
CURVE_POINTS = 200
BAR_CHARACTERS = 24
QUIET = "#555555"
NO_FORMULAS = "mathjax_ignore tex2jax_ignore"
"""Classes of what JupyterLab may not read for formulas: `$HOME` and `$PATH` of a log are none."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 130, 46, 18
# A mark beside the colour: told apart without seeing colours.
_LOOK = {
    "queued": ("…", QUIET),
    "running": ("▶", BLUE),
    "completed": ("✓", GREEN),
    "timeout": ("⧗", ORANGE),
    "cancelled": ("■", QUIET),
}
_FAULT = ("✗", VERMILION)


@dataclass(frozen=True)
class RunView:
    """What there is to show of a run at one moment.

    Args:
        run_id, title: of the run.
        state: queued, running, or how it ended.
        reason: why it ended so, in a sentence; empty otherwise.
        waiting: why it waits, in words; empty otherwise.
        job: the scheduler's job and where it runs, in words; empty for a run of this machine.
        last_known: that the scheduler does not answer, and how old what it said is; empty otherwise.
        steps, losses: asked, and the loss of each finished step.
        peaks_bytes: by rank, what it took of its device at its peak so far.
        limit_bytes, limit_of: what a rank may take, and whose limit that is; None where it is not known.
        step_s: median of the last steps; None before the first.
        samples_per_s: rate of the whole run at that step time.
        remaining_s: until the last step, at that step time; None where it is not known or nothing remains.
        starts, job_left: when the job is expected to start, and what is left of its time limit; empty if not known.
    """

    run_id: str
    title: str
    state: str
    steps: int
    reason: str = ""
    waiting: str = ""
    job: str = ""
    last_known: str = ""
    losses: tuple[float, ...] = ()
    peaks_bytes: tuple[tuple[int, int], ...] = ()
    limit_bytes: int | None = None
    limit_of: str = ""
    step_s: float | None = None
    samples_per_s: float | None = None
    remaining_s: float | None = None
    starts: str = ""
    job_left: str = ""


def run_html(view: RunView) -> str:
    """The run as one `<div>`, every text escaped."""
    mark, color = _LOOK.get(view.state, _FAULT)
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left;font-weight:normal;padding-right:1em;vertical-align:top;'
        f'white-space:nowrap;color:#555">{safe(name)}</th><td style="text-align:left">{safe(value)}</td></tr>'
        for name, value in facts(view)
    )
    return (
        f'<div class="{NO_FORMULAS}" style="border-left:4px solid {color};padding:0.3em 0.9em;max-width:62em">'
        f'<div><b style="color:{color}"><span aria-hidden="true">{mark}</span> {safe(status_label(view.state))}</b>'
        f" · <b>{safe(view.title)}</b> · <code>{safe(view.run_id)}</code></div>"
        + _bar_html(view)
        + '<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start">'
        + f'<table style="margin:0">{rows}</table>'
        + _curve_svg(view.losses, view.steps)
        + _memory_html(view)
        + "</div></div>"
    )


def run_text(view: RunView) -> str:
    """The run as lines of text, for a terminal."""
    mark, _ = _LOOK.get(view.state, _FAULT)
    done = min(len(view.losses), view.steps)
    full = round(BAR_CHARACTERS * done / max(1, view.steps))
    bar = "█" * full + "░" * (BAR_CHARACTERS - full)
    lines = [
        f"{mark} {visible(status_label(view.state))} · {visible(view.title)} · {visible(view.run_id)}",
        f"  {bar} {done}/{view.steps}",
        *(f"  {visible(name)}: {visible(value)}" for name, value in facts(view)),
    ]
    if view.losses:
        lines.append(f"  {say(en='losses', fr='pertes')}: {_sparks(view.losses)}")
    for rank, peak in _fullest(view):
        lines.append(f"  {_of_rank(rank)}: {_peak_words(view, peak)}")
    if more := _unshown(view):
        lines.append(f"  {more}")
    return "\n".join(lines)


def facts(view: RunView) -> list[tuple[str, str]]:
    """What is said in words, as pairs of name and value; only what is known."""
    told = [
        (say(en="why", fr="raison"), view.reason),
        (say(en="waiting", fr="attente"), view.waiting),
        (say(en="expected start", fr="début estimé"), view.starts if view.state == "queued" else ""),
        (say(en="job", fr="travail"), view.job),
        (say(en="scheduler", fr="ordonnanceur"), view.last_known),
        (say(en="loss", fr="perte"), _number(view.losses[-1]) if view.losses else ""),
        (say(en="step", fr="pas"), _speed(view)),
        (
            say(en="estimated end", fr="fin estimée"),
            say(en=f"in {format_seconds(view.remaining_s)}", fr=f"dans {format_seconds(view.remaining_s)}")
            if view.remaining_s is not None and view.state == "running"
            else "",
        ),
        (
            say(en="time left to the job", fr="temps restant au travail"),
            view.job_left if view.state == "running" else "",
        ),
    ]
    return [(name, value) for name, value in told if value]


def _speed(view: RunView) -> str:
    if view.step_s is None:
        return ""
    if view.samples_per_s is None:
        return format_seconds(view.step_s)
    rate = f"{view.samples_per_s:.0f}"
    return say(
        en=f"{format_seconds(view.step_s)}, {rate} samples/s", fr=f"{format_seconds(view.step_s)}, {rate} exemples/s"
    )


def _bar_html(view: RunView) -> str:
    done = min(len(view.losses), view.steps)
    share = 100 * done / max(1, view.steps)
    label = say(en=f"{done} of {view.steps} steps", fr=f"{done} pas sur {view.steps}")
    return (
        f'<div role="progressbar" aria-valuemin="0" aria-valuemax="{view.steps}" aria-valuenow="{done}" '
        f'aria-label="{safe(label)}" style="background:#e8e8e8;height:0.7em;margin:0.4em 0;max-width:36em">'
        f'<div style="background:{BLUE};height:100%;width:{share:.1f}%"></div></div>'
        f'<div style="color:#555;margin-bottom:0.4em">{safe(label)}</div>'
    )


def _curve_svg(losses: Sequence[float], steps: int) -> str:
    """The loss against the step, with its ends written; nothing before the second step."""
    if len(losses) < 2:
        return ""
    points = _thinned(losses)
    low, high = min(losses), max(losses)
    height, width = _HEIGHT - 2 * _BOTTOM, _WIDTH - _LEFT - 10

    def place(step: int, loss: float) -> str:
        across = step / max(1, steps - 1, len(losses) - 1)
        up = (loss - low) / (high - low) if high > low else 0.5
        return f"{_LEFT + across * width:.1f},{_BOTTOM + (1 - up) * height:.1f}"

    told = say(
        en=f"Loss from {_number(losses[0])} at step 0 to {_number(losses[-1])} at step {len(losses) - 1}",
        fr=f"Perte : de {_number(losses[0])} au pas 0 à {_number(losses[-1])} au pas {len(losses) - 1}",
    )
    path = " ".join(place(step, loss) for step, loss in points)
    return (
        f'<svg role="img" aria-label="{safe(told)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="width:100%;max-width:{_WIDTH}px;background:#fff" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="sans-serif" font-size="11">'
        f'<path d="M{_LEFT},{_BOTTOM - 6} V{_HEIGHT - _BOTTOM} H{_WIDTH - 4}" fill="none" stroke="{GREY}"/>'
        f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="1.8"/>'
        f'<text x="{_LEFT - 4}" y="{_BOTTOM + 4}" text-anchor="end">{_number(high, ".3g")}</text>'
        f'<text x="{_LEFT - 4}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">{_number(low, ".3g")}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">0</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 4}" text-anchor="end">{max(steps, len(losses)) - 1}</text>'
        f'<text x="{_LEFT + width / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{safe(say(en="step", fr="pas"))}'
        f'</text><text x="{_LEFT + 6}" y="{_BOTTOM - 6}">{safe(say(en="loss", fr="perte"))}</text></svg>'
    )


def _thinned(losses: Sequence[float]) -> list[tuple[int, float]]:
    """At most `CURVE_POINTS` of them, the first and the last among them."""
    stride = max(1, math.ceil(len(losses) / CURVE_POINTS))
    steps = [*range(0, len(losses) - 1, stride), len(losses) - 1]
    return [(step, losses[step]) for step in steps]


def _memory_html(view: RunView) -> str:
    if not view.peaks_bytes:
        return ""
    going = view.state in ("queued", "running")
    title = say(en="peak memory", fr="pic de mémoire") + (say(en=" so far", fr=" jusqu’ici") if going else "")
    if view.limit_bytes:
        title += say(
            en=f" (limit {format_bytes(view.limit_bytes)}, {view.limit_of})",
            fr=f" (limite {format_bytes(view.limit_bytes)}, {view.limit_of})",
        )
    scale = max(view.limit_bytes or 0, *(peak for _, peak in view.peaks_bytes))
    rows = []
    for rank, peak in _fullest(view):
        near = view.limit_bytes is not None and peak > 0.9 * view.limit_bytes
        look = f"repeating-linear-gradient(45deg,{VERMILION} 0 5px,#f2c2a2 5px 8px)" if near else SKY
        rows.append(
            f'<tr><th scope="row" style="text-align:left;font-weight:normal">{safe(_of_rank(rank))}</th>'
            f'<td aria-hidden="true" style="width:11em;text-align:left"><div style="background:#e8e8e8">'
            f'<div style="height:0.8em;background:{look};width:{100 * peak / max(1, scale):.1f}%"></div></div></td>'
            f'<td style="text-align:right;white-space:nowrap">{safe(_peak_words(view, peak))}</td></tr>'
        )
    more = _unshown(view)
    note = f'<div style="color:#555">{safe(more)}</div>' if more else ""
    return (
        f'<div><table style="margin:0"><caption style="text-align:left;color:#555">{safe(title)}</caption>'
        f"<tbody>{''.join(rows)}</tbody></table>{note}</div>"
    )


def _fullest(view: RunView) -> list[tuple[int, int]]:
    """The ranks shown: the fullest ones, in the order of ranks."""
    return sorted(sorted(view.peaks_bytes, key=lambda pair: (-pair[1], pair[0]))[:RANKS_SHOWN])


def _unshown(view: RunView) -> str:
    left = len(view.peaks_bytes) - RANKS_SHOWN
    if left <= 0:
        return ""
    return say(en=f"and {left} ranks that hold less", fr=f"et {left} rangs moins chargés")


def _of_rank(rank: int) -> str:
    return say(en=f"rank {rank}", fr=f"rang {rank}")


def _peak_words(view: RunView, peak: int) -> str:
    if not view.limit_bytes:
        return format_bytes(peak)
    share = 100 * peak / view.limit_bytes
    return f"{format_bytes(peak)}, {_number(share, '.0f' if share >= 1 else '.1g')} %"


def _sparks(losses: Sequence[float]) -> str:
    """A curve of one line, at most 24 signs wide."""
    stride = max(1, math.ceil(len(losses) / BAR_CHARACTERS))
    chosen = [*losses[:-1:stride], losses[-1]]
    low, high = min(losses), max(losses)
    signs = "▁▂▃▄▅▆▇█"
    places = ((loss - low) / (high - low) if high > low else 0.0 for loss in chosen)
    drawn = "".join(signs[min(len(signs) - 1, int(place * len(signs)))] for place in places)
    return f"{_number(losses[0])} {drawn} {_number(losses[-1])}"


def _number(value: float, spec: str = ".4f") -> str:
    shown = f"{value:{spec}}"
    return say(en=shown, fr=shown.replace(".", ","))
