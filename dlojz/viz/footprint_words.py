"""What a forecast says in sentences, and how its shares and differences are written.

Layer 4. Invariant: every figure in a sentence is read from the forecast, with its unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlojz.text import language, say
from dlojz.units import format_bytes
from dlojz.viz.markup import visible
from dlojz.viz.palette import category_label

if TYPE_CHECKING:
    from dlojz.predict.advice import Fit
    from dlojz.predict.forecast import Forecast


def percent(share: float, signed: bool = False) -> str:
    """A share as people read it: 3.4 %, or +12 % where it is a difference."""
    value = 100 * share
    digits = f"{value:{'+' if signed else ''}.{0 if abs(value) >= 9.95 else 1}f}"
    return (digits.replace(".", ",") if language() == "fr" else digits).replace("-", "−") + " %"


def difference(share: float) -> str:
    """How much more or less, in words short enough for a table; `=` below a tenth of a percent."""
    return "=" if abs(share) < 5e-4 else percent(share, signed=True)


def block_label(name: str) -> str:
    """A block by its path; what belongs to none are the model's states and the engine's buffers."""
    return visible(name) if name else say(en="(states, engine, loss)", fr="(états, moteur, perte)")


def headline(forecast: Forecast) -> str:
    """What was asked, for which rank, on which device."""
    where = forecast.device.title if forecast.device else "CPU"
    return say(
        en=f"{visible(forecast.config.title)}, micro-batch {forecast.config.layout.micro_batch}, on {where}: "
        f"memory of rank {forecast.rank}, predicted",
        fr=f"{visible(forecast.config.title)}, micro-batch {forecast.config.layout.micro_batch}, sur {where} : "
        f"mémoire du rang {forecast.rank}, prédite",
    )


def peak_sentence(forecast: Forecast) -> str:
    """The peak, its moment and what fills most of it."""
    memory = forecast.memory
    at_peak = memory.at_peak_bytes or {}
    most = max(at_peak, key=lambda name: at_peak[name], default=None)
    filled = ""
    if most is not None and memory.peak_bytes:
        share = percent(at_peak[most] / memory.peak_bytes)
        filled = say(en=f"; {share} of it: {category_label(most)}", fr=f" ; dont {share} : {category_label(most)}")
    return say(
        en=f"Peak: {format_bytes(memory.peak_bytes)}, in the {visible(forecast.moment)}{filled}.",
        fr=f"Pic : {format_bytes(memory.peak_bytes)} ({visible(forecast.moment)}){filled}.",
    )


def verdict(taken: int, limit_bytes: int, title: str) -> str:
    """Whether it fits, and how much is left or missing."""
    rest = limit_bytes - taken
    if rest >= 0:
        return say(
            en=f"Fits into {title} ({format_bytes(limit_bytes)}): {format_bytes(rest)} are left.",
            fr=f"Tient sur {title} ({format_bytes(limit_bytes)}) : il reste {format_bytes(rest)}.",
        )
    return say(
        en=f"Does NOT fit into {title} ({format_bytes(limit_bytes)}): {format_bytes(-rest)} too much.",
        fr=f"Ne tient PAS sur {title} ({format_bytes(limit_bytes)}) : {format_bytes(-rest)} de trop.",
    )


def fit_sentence(fit: Fit, title: str) -> str:
    """The largest micro-batch that fits, in words."""
    if fit.micro_batch == 0:
        return say(
            en=f"Not even one sample fits into {title}: it takes {format_bytes(fit.taken_bytes)} of "
            f"{format_bytes(fit.limit_bytes)}.",
            fr=f"Pas même un exemple ne tient sur {title} : il prend {format_bytes(fit.taken_bytes)} pour "
            f"{format_bytes(fit.limit_bytes)}.",
        )
    return say(
        en=f"Largest micro-batch that fits into {title}: {fit.micro_batch} ({format_bytes(fit.taken_bytes)} of "
        f"{format_bytes(fit.limit_bytes)}).",
        fr=f"Le plus grand micro-batch qui tient sur {title} : {fit.micro_batch} ({format_bytes(fit.taken_bytes)} "
        f"sur {format_bytes(fit.limit_bytes)}).",
    )
