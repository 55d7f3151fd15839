"""Lab 03: the two numbers of a network, α and β, found from measured times.

Layer 6 (labs). Invariant: the reference minimises relative gaps, so that short messages do not lose against long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

from dlojz.labs.collective_cost_exercises import ring_seconds
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

Pair = tuple[float, float]
Fit = Callable[[Sequence[float], Sequence[float], int], Pair]


def relative_line(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    """The line a + b n that minimises the sum of ((a + b n − t) / t)²: every measurement weighs the same.

    Source: weighted least squares with weights 1 / t², by the normal equations of two unknowns.
    """
    return _line(message_bytes, seconds, [1 / second**2 for second in seconds])


def _line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> Pair:
    total = math.fsum(weights)
    x_mean = math.fsum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = math.fsum(w * y for w, y in zip(weights, ys, strict=True)) / total
    covariance = math.fsum(w * (x - x_mean) * (y - y_mean) for w, x, y in zip(weights, xs, ys, strict=True))
    variance = math.fsum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = covariance / variance
    return y_mean - slope * x_mean, slope


def fit_alpha_beta(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Pair:
    """α (s) and β (s per byte) of a ring all-reduce of `size` ranks, from its times: t = 2 (p − 1) (α + β n / p)."""
    return _per_step(relative_line(message_bytes, seconds), size)


def _per_step(line: Pair, size: int) -> Pair:
    steps = 2 * (size - 1)
    return line[0] / steps, line[1] * size / steps


def _absolute(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    return _line(message_bytes, seconds, [1.0] * len(seconds))


def _ends(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    """Through the shortest and the longest message alone."""
    pairs = sorted(zip(message_bytes, seconds, strict=True))
    (few, short_s), (many, long_s) = pairs[0], pairs[-1]
    slope = (long_s - short_s) / (many - few)
    return short_s - slope * few, slope


def _measurements() -> Iterator[tuple[list[float], list[float], int]]:
    """Times of networks that do not exist, some too long by a quarter, some too short."""
    rough = (1.0, 1.25, 0.8, 1.1, 0.85, 1.2, 0.95, 0.75, 1.15)
    for shift, (size, alpha_s, beta_s_per_byte) in enumerate(((4, 5e-5, 4e-10), (2, 2e-4, 3e-9), (8, 1e-5, 1e-10))):
        message_bytes = [float(2**exponent) for exponent in range(10, 26, 2)]
        seconds = [
            ring_seconds(count, size, alpha_s, beta_s_per_byte) * rough[(index + 4 * shift) % len(rough)]
            for index, count in enumerate(message_bytes)
        ]
        yield message_bytes, seconds, size


_FIT_MISTAKES: tuple[tuple[Fit, Said], ...] = (
    (
        lambda n, t, p: relative_line(n, t),
        Said(
            "The line is right, t = a + b n, but it is that of the whole all-reduce: a = 2 (p − 1) α and "
            "b = 2 (p − 1) / p · β; solve for α and β.",
            "La droite est juste, t = a + b n, mais c’est celle de l’all-reduce entier : a = 2 (p − 1) α et "
            "b = 2 (p − 1) / p · β ; tirez-en α et β.",
        ),
    ),
    (
        lambda n, t, p: _per_step(_absolute(n, t), p),
        Said(
            "You minimise gaps in seconds: the longest messages decide, and α, which only the short ones show, is "
            "lost. Divide each row by its time, so that relative gaps count.",
            "Vous minimisez des écarts en secondes : les plus longs messages décident, et α, que seuls les courts "
            "révèlent, se perd. Divisez chaque ligne par sa durée, pour que comptent les écarts relatifs.",
        ),
    ),
    (
        lambda n, t, p: _absolute(n, t),
        Said(
            "Two things: you minimise gaps in seconds, where relative gaps are asked for; and a and b are those of "
            "the whole all-reduce, not yet α and β.",
            "Deux choses : vous minimisez des écarts en secondes, alors qu’on demande des écarts relatifs ; et a et b "
            "sont ceux de l’all-reduce entier, pas encore α et β.",
        ),
    ),
    (
        lambda n, t, p: _per_step(_ends(n, t), p),
        Said(
            "Your line goes through two measurements alone, and carries their errors whole; use all of them, by "
            "least squares.",
            "Votre droite ne passe que par deux mesures, dont elle hérite toute l’erreur ; utilisez-les toutes, par "
            "moindres carrés.",
        ),
    ),
    (
        lambda n, t, p: (fit_alpha_beta(n, t, p)[1], fit_alpha_beta(n, t, p)[0]),
        Said("You return β, then α: swap them.", "Vous renvoyez β puis α : échangez-les."),
    ),
    (
        lambda n, t, p: (relative_line(n, t)[0] / (2 * (p - 1)), relative_line(n, t)[1] / (2 * (p - 1))),
        Said(
            "α is right. A step carries one chunk of n / p bytes only, so b = 2 (p − 1) / p · β: your β lacks a "
            "factor p.",
            "α est juste. Une étape ne transporte qu’un morceau de n / p octets, donc b = 2 (p − 1) / p · β : il "
            "manque un facteur p à votre β.",
        ),
    ),
    (
        lambda n, t, p: (2 * fit_alpha_beta(n, t, p)[0], 2 * fit_alpha_beta(n, t, p)[1]),
        Said(
            "Both are twice too large: the ring takes 2 (p − 1) steps, reduce-scatter and all-gather.",
            "Les deux sont deux fois trop grands : l’anneau fait 2 (p − 1) étapes, reduce-scatter et all-gather.",
        ),
    ),
)
TOLERANCE = 0.01
"""Relative: float32 arithmetic passes, none of the mistakes above comes so close."""


def _judge_fit(answer: Callable[..., Any]) -> None:
    cases = list(_measurements())
    given = [_pair(answer(list(sizes), list(seconds), size)) for sizes, seconds, size in cases]
    if all(_close(pair, fit_alpha_beta(*case)) for pair, case in zip(given, cases, strict=True)):
        return
    for way, says in _FIT_MISTAKES:
        if all(_close(pair, way(*case)) for pair, case in zip(given, cases, strict=True)):
            raise Wrong(str(says))
    worst = next(index for index, case in enumerate(cases) if not _close(given[index], fit_alpha_beta(*case)))
    (alpha_s, beta), size = fit_alpha_beta(*cases[worst]), cases[worst][2]
    raise Wrong(
        say(
            en=f"For the times of {size} ranks, α = {alpha_s:.3g} s and β = {beta:.3g} s per byte are expected, but "
            f"your function returns {given[worst][0]:.3g} and {given[worst][1]:.3g}.",
            fr=(
                f"Pour les durées de {size} rangs, on attend α = {alpha_s:.3g} s et β = {beta:.3g} s par octet, mais "
                f"votre fonction renvoie {given[worst][0]:.3g} et {given[worst][1]:.3g}"
            ).replace(".", ",")
            + ".",
        )
    )


def _pair(value: object) -> Pair:
    """Two numbers, whatever holds them: a tuple, an array, a tensor."""
    if value is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return alpha_s, beta_s_per_byte.",
                fr="Votre fonction ne renvoie rien : terminez-la par return alpha_s, beta_s_per_byte.",
            )
        )
    parts: Any = value.tolist() if hasattr(value, "tolist") else value
    parts = (
        [part.item() if hasattr(part, "item") else part for part in parts] if isinstance(parts, (tuple, list)) else []
    )
    if len(parts) != 2 or not all(isinstance(part, Real) and not isinstance(part, bool) for part in parts):
        raise Wrong(
            say(
                en=f"Two numbers are expected, α then β, but your function returns {str(value)[:80]}.",
                fr=f"On attend deux nombres, α puis β, mais votre fonction renvoie {str(value)[:80]}.",
            )
        )
    return float(parts[0]), float(parts[1])


def _close(pair: Pair, right: Pair) -> bool:
    return all(math.isclose(one, other, rel_tol=TOLERANCE) for one, other in zip(pair, right, strict=True))


ALPHA_BETA = Exercise(
    id="alpha-beta",
    title=Said("α and β from measurements", "α et β d’après des mesures"),
    judge=_judge_fit,
    praise=Said(
        "Right: two numbers now stand for the network, and predict the times you have not measured.",
        "Exact : deux nombres résument désormais le réseau, et prédisent les durées que vous n’avez pas mesurées.",
    ),
    hints=(
        Said(
            "The unknowns are a and b. Each measurement is one row: a + b n = t; divided by t it reads "
            "a / t + b n / t = 1.",
            "Les inconnues sont a et b. Chaque mesure est une ligne : a + b n = t ; divisée par t, elle s’écrit "
            "a / t + b n / t = 1.",
        ),
        Said(
            "np.linalg.lstsq solves for (a, b) with the columns 1 / t and n / t and ones on the right; then "
            "α = a / (2 (p − 1)) and β = b p / (2 (p − 1)).",
            "np.linalg.lstsq donne (a, b), avec pour colonnes 1 / t et n / t et des 1 à droite ; puis "
            "α = a / (2 (p − 1)) et β = b p / (2 (p − 1)).",
        ),
    ),
)
