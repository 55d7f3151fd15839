"""Lab 08: two numbers for a link that a planner may extrapolate with.

Layer 6 (labs). Invariant: the fit is that of `dlojz.predict.time.measured_site.line`, by other arithmetic; the tests
hold the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from dlojz.labs.calibration_exercises import relative_line
from dlojz.labs.compromise_answers import Case, PartMistake, by_parts
from dlojz.labs.exercise import Exercise
from dlojz.labs.verdict import Said
from dlojz.text import say

Pair = tuple[float, float]


def bounded_line(message_bytes: Sequence[float], seconds: Sequence[float], factor: float) -> Pair:
    """α (s) and β (s per byte) of t = α + factor·n·β, both at least 0, that minimise the sum of squared relative gaps.

    Args:
        message_bytes, seconds: the measurements.
        factor: bytes that the busiest link carries per byte of the message.

    Source: non-negative least squares of two unknowns (Lawson & Hanson 1974, ch. 23): where the free minimum has a
    negative unknown, the least is on the boundary on which that unknown is 0.
    """
    carried = [factor * n for n in message_bytes]
    alpha, beta = relative_line(carried, seconds)
    if alpha < 0:
        return 0.0, slope_alone(carried, seconds)
    if beta < 0:
        return start_alone(seconds), 0.0
    return alpha, beta


def slope_alone(carried: Sequence[float], seconds: Sequence[float]) -> float:
    """β of t = β·n by squared relative gaps."""
    shares = [n / t for n, t in zip(carried, seconds, strict=True)]
    return math.fsum(shares) / math.fsum(share * share for share in shares)


def start_alone(seconds: Sequence[float]) -> float:
    """α of t = α by squared relative gaps."""
    return math.fsum(1 / t for t in seconds) / math.fsum(1 / t**2 for t in seconds)


def _carried(way: Callable[[Sequence[float], Sequence[float]], Pair]) -> Callable[..., Pair]:
    return lambda n, t, factor: way([factor * one for one in n], t)


def _absolute(n: Sequence[float], t: Sequence[float]) -> Pair:
    """The line by gaps in seconds, each number at least 0."""
    mean_n, mean_t = math.fsum(n) / len(n), math.fsum(t) / len(t)
    beta = math.fsum((x - mean_n) * (y - mean_t) for x, y in zip(n, t, strict=True)) / math.fsum(
        (x - mean_n) ** 2 for x in n
    )
    alpha = mean_t - beta * mean_n
    if alpha < 0:
        return 0.0, math.fsum(x * y for x, y in zip(n, t, strict=True)) / math.fsum(x * x for x in n)
    return (mean_t, 0.0) if beta < 0 else (alpha, beta)


_RELATIVE, _IN_SECONDS = _carried(relative_line), _carried(_absolute)


def _cut(n: Sequence[float], t: Sequence[float], factor: float) -> Pair:
    alpha, beta = _RELATIVE(n, t, factor)
    return max(alpha, 0.0), max(beta, 0.0)


def _messages() -> Iterator[Case]:
    """Times that no network would give: one link with little latency, one with little else, and two plain ones."""
    rough = (1.0, 1.2, 0.85, 1.1, 0.9, 1.15, 0.8, 1.05)
    sizes = [float(4**power) for power in range(5, 13)]
    for shift, (alpha, beta, factor) in enumerate(((4e-5, 5e-10, 1.5), (2e-4, 3e-9, 1.0), (9e-6, 8e-11, 0.875))):
        yield (
            sizes,
            [(alpha + factor * beta * n) * rough[(index + 3 * shift) % len(rough)] for index, n in enumerate(sizes)],
            factor,
        )
    # Short messages go faster than in proportion: a line through them would start below 0.
    yield sizes, [2e-9 * n * (0.6 if n < 2**16 else 1.1) for n in sizes], 1.75
    # Times that do not grow: nothing is left for the bytes.
    yield sizes[:4], [3.2e-4, 3.1e-4, 2.9e-4, 2.8e-4], 0.75


def _told_messages(case: Case) -> str:
    n, t, factor = case
    return say(
        en=f"For messages of {n[0]:.0f} to {n[-1]:.0f} bytes in {t[0]:.2g} to {t[-1]:.2g} s (factor {factor:g})",
        fr=f"Pour des messages de {n[0]:.0f} à {n[-1]:.0f} octets, en {t[0]:.2g} à {t[-1]:.2g} s (facteur {factor:g})"
        .replace(".", ","),
    )  # fmt: skip


def _fit_mistakes() -> Iterator[PartMistake]:
    ways: tuple[tuple[Callable[..., Pair], Said], ...] = (
        (
            _RELATIVE,
            Said(
                "This line is the best without bounds, but for some of the measurements its α or its β is negative: a "
                "planner that goes beyond them would foretell messages that arrive before they leave. Ask for both to "
                "be at least 0.",
                "Sans contrainte, cette droite est la meilleure ; mais pour certaines des mesures, son α ou son β est "
                "négatif : hors de l’intervalle mesuré, elle prédirait des messages arrivés avant d’être partis. "
                "Imposez que les deux soient positifs ou nuls.",
            ),
        ),
        (
            _cut,
            Said(
                "You set the negative number to 0, and keep the other; once α is 0, the best β is another one: fit it "
                "again alone.",
                "Vous ramenez le nombre négatif à 0 et gardez l’autre ; une fois α nul, le meilleur β n’est plus le "
                "même : ajustez-le de nouveau, seul.",
            ),
        ),
        (
            _IN_SECONDS,
            Said(
                "You minimise gaps in seconds: the longest messages alone decide. Divide each row by its time, so that "
                "relative gaps count, as in lab 03.",
                "Vous minimisez des écarts en secondes : seuls les plus longs messages décident. Divisez chaque ligne "
                "par sa durée, pour que comptent les écarts relatifs, comme au TP 03.",
            ),
        ),
    )
    for way, says in ways:
        for part in (0, 1):
            yield PartMistake(part, lambda n, t, factor, way=way, part=part: way(n, t, factor)[part], says)
    yield PartMistake(
        1,
        lambda n, t, factor: bounded_line(n, t, 1.0)[1],
        Said(
            "α is right; your β is that of a byte of the message. Of each such byte the busiest link carries `factor`: "
            "t = α + factor · n · β, so that one β holds for every collective.",
            "α est juste ; votre β est celui d’un octet du message. Pour chacun, le lien le plus chargé en transporte "
            "`factor` : t = α + factor · n · β, et un même β vaut alors pour toutes les collectives.",
        ),
    )
    yield PartMistake(
        1,
        lambda n, t, factor: bounded_line(n, t, 1 / factor)[1],
        Said(
            "α is right, but you divide the bytes by the factor: the link carries factor · n bytes.",
            "α est juste, mais vous divisez les octets par le facteur : le lien en transporte factor · n.",
        ),
    )


BOUNDED_FIT = Exercise(
    id="bounded-fit",
    title=Said("a link in two numbers, for a planner", "un lien en deux nombres, pour planifier"),
    judge=by_parts(
        bounded_line,
        cases=_messages,
        names=(Said("α", "α"), Said("β", "β")),
        told=_told_messages,
        mistakes=tuple(_fit_mistakes()),
        tolerance=0.005,
    ),
    praise=Said(
        "Right: two numbers that stay physical, for every collective, also where nothing was measured.",
        "Exact : deux nombres qui restent physiques, pour toutes les collectives, même là où rien n’a été mesuré.",
    ),
    hints=(
        Said(
            "As in lab 03, one row per measurement, divided by its time: α · 1/t + β · factor·n/t = 1. What is new: "
            "both unknowns at least 0. Look at scipy.optimize.nnls.",
            "Comme au TP 03, une ligne par mesure, divisée par sa durée : α · 1/t + β · factor·n/t = 1. La nouveauté : "
            "les deux inconnues sont positives ou nulles. Voyez scipy.optimize.nnls.",
        ),
        Said(
            "nnls(rows, ones)[0] gives (α, β), where rows has the columns 1/t and factor·n/t. By hand: if α < 0, take "
            "α = 0 and the best β alone, Σ x ÷ Σ x² with x = factor·n/t.",
            "nnls(rows, ones)[0] donne (α, β), où rows a pour colonnes 1/t et factor·n/t. À la main : si α < 0, prenez "
            "α = 0 et le meilleur β seul, Σ x ÷ Σ x² avec x = factor·n/t.",
        ),
    ),
)
