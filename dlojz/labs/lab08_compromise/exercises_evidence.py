"""Exercises of lab 08 on measurements: fit a link, compare layouts in paired rounds, judge a model on held-out rows.

The tests compare the fit with `dlojz.cost_model.measured_machine.line`, which computes it in another way.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dlojz.base.language import say, shortest, significant
from dlojz.hardware.links import weighted_line
from dlojz.labs.kit.exercise import Exercise, Mistake, Said
from dlojz.labs.kit.judges import Case, Judge, Numbers, part_by_part

Pair = tuple[float, float]


def bounded_line(message_bytes: Sequence[float], seconds: Sequence[float], factor: float) -> Pair:
    """Fit t = α + factor·n·β with α (s) and β (s per byte) ≥ 0 by least squares of the relative gaps.

    Args:
        message_bytes, seconds: the measurements.
        factor: bytes that the busiest link carries per byte of the message.

    Source: non-negative least squares of two unknowns (Lawson & Hanson 1974, ch. 23): where the free minimum has a
    negative unknown, the least is on the boundary on which that unknown is 0.
    """
    carried = [factor * n for n in message_bytes]
    alpha, beta = weighted_line(carried, seconds)
    if alpha < 0:
        return 0.0, slope_alone(carried, seconds)
    if beta < 0:
        return start_alone(seconds), 0.0
    return alpha, beta


def slope_alone(carried: Sequence[float], seconds: Sequence[float]) -> float:
    """Fit β of t = β·n by squared relative gaps."""
    shares = [n / t for n, t in zip(carried, seconds, strict=True)]
    return math.fsum(shares) / math.fsum(share * share for share in shares)


def start_alone(seconds: Sequence[float]) -> float:
    """Fit α of t = α by squared relative gaps."""
    return math.fsum(1 / t for t in seconds) / math.fsum(1 / t**2 for t in seconds)


def _carried(way: Callable[[Sequence[float], Sequence[float]], Pair]) -> Callable[..., Pair]:
    return lambda n, t, factor: way([factor * one for one in n], t)


def _absolute(n: Sequence[float], t: Sequence[float]) -> Pair:
    """The line by gaps in seconds, each number at least 0."""
    alpha, beta = weighted_line(n, t, [1.0] * len(t))
    if alpha < 0:
        return 0.0, math.fsum(x * y for x, y in zip(n, t, strict=True)) / math.fsum(x * x for x in n)
    return (math.fsum(t) / len(t), 0.0) if beta < 0 else (alpha, beta)


_RELATIVE, _IN_SECONDS = _carried(weighted_line), _carried(_absolute)


def _cut(n: Sequence[float], t: Sequence[float], factor: float) -> Pair:
    alpha, beta = _RELATIVE(n, t, factor)
    return max(alpha, 0.0), max(beta, 0.0)


def _free(n: Sequence[float], t: Sequence[float], factor: float) -> Pair:
    """The line by gaps in seconds, without bounds, as np.polyfit gives it."""
    return weighted_line([factor * one for one in n], t, [1.0] * len(t))


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
    durations = [significant(one, 2) for one in (t[0], t[-1])]
    return say(
        en=f"For messages of {n[0]:.0f} to {n[-1]:.0f} bytes in {durations[0]} to {durations[1]} s (factor "
        f"{shortest(factor)})",
        fr=f"Pour des messages de {n[0]:.0f} à {n[-1]:.0f} octets, en {durations[0]} à {durations[1]} s (facteur "
        f"{shortest(factor)})",
    )


_FIT_WAYS = (
    Mistake(
        _RELATIVE,
        "This line is the best without bounds, but for some of the measurements its α or its β is negative: beyond "
        "them it would predict messages that arrive before they leave. Ask for both to be at least 0.",
        "Sans contrainte, cette droite est la meilleure ; mais pour certaines des mesures, son α ou son β est négatif "
        ": hors de l’intervalle mesuré, elle prédirait des messages arrivés avant d’être partis. Imposez que les deux "
        "soient positifs ou nuls.",
    ),
    Mistake(
        _cut,
        "You set the negative number to 0, and keep the other; once α is 0, the best β is another one: fit it again "
        "alone.",
        "Vous ramenez le nombre négatif à 0 et gardez l’autre ; une fois α nul, le meilleur β n’est plus le même : "
        "ajustez-le de nouveau, seul.",
    ),
    Mistake(
        _IN_SECONDS,
        "You minimise gaps in seconds: the longest messages alone decide. Divide each row by its time, so that "
        "relative gaps count, as in lab 03.",
        "Vous minimisez des écarts en secondes : seuls les plus longs messages décident. Divisez chaque ligne par sa "
        "durée, pour que comptent les écarts relatifs, comme au TP 03.",
    ),
    Mistake(
        _free,
        "You fit gaps in seconds, so that the longest messages decide alone, and let both numbers be negative: divide "
        "each "
        "row by its time, and keep both at least 0.",
        "Vous ajustez des écarts en secondes, où les plus longs messages décident seuls, et laissez les nombres "
        "devenir "
        "négatifs : divisez chaque ligne par sa durée, et gardez les deux au moins à 0.",
    ),
)
_FIT_WHOLE = (
    Mistake(
        lambda n, t, factor: (0.0, statistics.median(b / (a * factor) for a, b in zip(n, t, strict=True))),
        "You leave the latency out: a short message takes α.",
        "Vous oubliez la latence : un message court prend α.",
    ),
    *(
        Mistake(
            lambda n, t, factor, of=of: (of(t), 0.0),
            "You leave the bytes out: a long message takes β for each of them.",
            "Vous oubliez les octets : un long message prend β pour chacun.",
        )
        for of in (min, max, statistics.fmean)
    ),
    Mistake(
        lambda n, t, factor: tuple(abs(one) for one in _RELATIVE(n, t, factor)),
        "You take the magnitude of a negative number: it is no fit any more. Set it to 0, and fit the other again "
        "alone.",
        "Vous prenez la valeur absolue d’un nombre négatif : ce n’est plus un ajustement. Mettez-le à 0, et ajustez "
        "l’autre "
        "de nouveau, seul.",
    ),
    Mistake(
        lambda n, t, factor: (1e6 * bounded_line(n, t, factor)[0], 1e9 * bounded_line(n, t, factor)[1]),
        "Your numbers are in microseconds and nanoseconds: return seconds, and seconds per byte.",
        "Vos nombres sont en microsecondes et nanosecondes : renvoyez des secondes, et des secondes par octet.",
    ),
    Mistake(
        lambda n, t, factor: bounded_line(n[:2], t[:2], factor),
        "You fit the first two measurements alone: all of them count.",
        "Vous n’ajustez que les deux premières mesures : toutes comptent.",
    ),
    Mistake(
        lambda n, t, factor: (
            bounded_line(n, t, factor)[0],
            1 / bounded_line(n, t, factor)[1] if bounded_line(n, t, factor)[1] else 0.0,
        ),
        "You return a bandwidth, bytes per second: β is its inverse, seconds per byte.",
        "Vous renvoyez un débit, en octets par seconde : β est son inverse, en secondes par octet.",
    ),
)
_FACTOR_WAYS = (
    Mistake(
        lambda n, t, factor: bounded_line(n, t, 1.0)[1],
        "α is right; your β is that of a byte of the message. Of each such byte the busiest link carries `factor`: t = "
        "α + factor · n · β, so that one β holds for every collective.",
        "α est juste ; votre β est celui d’un octet du message. Pour chacun, le lien le plus chargé en transporte "
        "`factor` : t = α + factor · n · β, et un même β vaut alors pour toutes les collectives.",
        part=1,
    ),
    Mistake(
        lambda n, t, factor: bounded_line(n, t, 1 / factor)[1],
        "α is right, but you divide the bytes by the factor: the link carries factor · n bytes.",
        "α est juste, mais vous divisez les octets par le facteur : le lien en transporte factor · n.",
        part=1,
    ),
)

BOUNDED_FIT = Exercise(
    id="bounded-fit",
    title=Said("a link in two numbers, for a planner", "un lien en deux nombres, pour planifier"),
    judge=Judge(
        bounded_line,
        cases=_messages,
        parts=(Said("α", "α"), Said("β", "β")),
        told=_told_messages,
        mistakes=(*_FIT_WHOLE, *part_by_part(_FIT_WAYS, 2), *_FACTOR_WAYS),
        tolerance=0.005,
    ),
    praise_en="Right: both numbers stay physical for every collective, even outside the range of the measurements.",
    praise_fr="Exact : les deux nombres restent physiques pour toutes les collectives, même hors de l’intervalle "
    "mesuré.",
    hint_en="As in lab 03, one row per measurement, divided by its time: α · 1/t + β · factor·n/t = 1. What is new: "
    "both unknowns at least 0. Look at scipy.optimize.nnls.",
    hint_fr="Comme au TP 03, une ligne par mesure, divisée par sa durée : α · 1/t + β · factor·n/t = 1. La nouveauté : "
    "les deux inconnues sont positives ou nulles. Voyez scipy.optimize.nnls.",
    nearer_en="nnls(rows, ones)[0] gives (α, β), where rows has the columns 1/t and factor·n/t. By hand: if α < 0, "
    "take α = 0 and the best β alone, Σ x ÷ Σ x² with x = factor·n/t.",
    nearer_fr="nnls(rows, ones)[0] donne (α, β), où rows a pour colonnes 1/t et factor·n/t. À la main : si α < 0, "
    "prenez α = 0 et le meilleur β seul, Σ x ÷ Σ x² avec x = factor·n/t.",
)


def compare_rounds(first_s: Sequence[float], second_s: Sequence[float]) -> Numbers:
    """Return (ratio, p): the median of second over first by round, and the sign test of the wins.

    p is that of the two-sided sign test: if neither were faster, each round that is no tie would be won by either with
    probability 1/2.

    Source: Conover 1999, "Practical Nonparametric Statistics", §3.4.
    """
    ratios = [second / first for first, second in zip(first_s, second_s, strict=True)]
    return statistics.median(ratios), min(1.0, 2 * _tail(*_wins(first_s, second_s)))


def _wins(first_s: Sequence[float], second_s: Sequence[float]) -> tuple[int, int]:
    """Rounds won by the one that won more, and rounds that are no ties."""
    pairs = list(zip(first_s, second_s, strict=True))
    ahead, behind = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return max(ahead, behind), ahead + behind


def _tail(wins: int, rounds: int) -> float:
    """Probability of at least so many heads."""
    return sum(math.comb(rounds, k) for k in range(wins, rounds + 1)) / 2**rounds


def _one_way(first_s: Sequence[float], second_s: Sequence[float], sign: int) -> float:
    """How likely the first of the two, or the second, wins as many rounds or more."""
    pairs = list(zip(first_s, second_s, strict=True))
    own, other = sum(sign * (b - a) > 0 for a, b in pairs), sum(sign * (b - a) < 0 for a, b in pairs)
    return _tail(own, own + other)


def _rounds() -> Iterator[Case]:
    """Noise that hits both of a round alike, and is larger than what sets them apart."""
    dice = random.Random(4)
    for count, edge in ((8, 1.05), (12, 1.02), (9, 1.0), (15, 0.97), (7, 1.3), (10, 1.01)):
        first, second = [], []
        for _ in range(count):
            weather = dice.choice((1.0, 1.1, 1.6, 2.3))
            first.append(round(0.02 * weather * dice.uniform(0.98, 1.02), 5))
            second.append(round(0.02 * edge * weather * dice.uniform(0.98, 1.02), 5))
        second[0] = first[0]  # a tie
        yield first, second


def _told_rounds(case: Case) -> str:
    first, second = case
    return say(en=f"For the rounds {first} and {second}", fr=f"Pour les tours {first} et {second}")


def _ratio(way: Callable[[Sequence[float]], float], english: str, french: str) -> Mistake:
    return Mistake(lambda first, second: way(second) / way(first), english, french, part=0)


_UNPAIRED = (
    "compares all rounds of one with all rounds of the other. A slow moment of the machine hits both of a round: take "
    "the ratio within each round first, then the median.",
    "compare tous les tours de l’une à tous ceux de l’autre. Un moment lent de la machine touche les deux mesures d’un "
    "tour : prenez d’abord le rapport dans chaque tour, puis la médiane.",
)

PAIRED = Exercise(
    id="paired-rounds",
    title=Said("is the first really faster?", "la première est-elle vraiment plus rapide ?"),
    judge=Judge(
        compare_rounds,
        cases=_rounds,
        parts=(Said("the ratio", "le rapport"), Said("p", "p")),
        told=_told_rounds,
        mistakes=(
            Mistake(
                lambda first, second: statistics.median([a / b for a, b in zip(first, second, strict=True)]),
                "Your ratio is the other way round: second over first, above 1 where the first is faster.",
                "Votre rapport est à l’envers : seconde sur première, plus grand que 1 si la première est la plus "
                "rapide.",
                part=0,
            ),
            _ratio(
                statistics.median, f"Your ratio of medians {_UNPAIRED[0]}", f"Votre rapport de médianes {_UNPAIRED[1]}"
            ),
            _ratio(
                statistics.fmean, f"Your ratio of means {_UNPAIRED[0]}", f"Votre rapport de moyennes {_UNPAIRED[1]}"
            ),
            _ratio(min, f"Your ratio of the best times {_UNPAIRED[0]}", f"Votre rapport des minima {_UNPAIRED[1]}"),
            Mistake(
                lambda first, second: statistics.fmean([b / a for a, b in zip(first, second, strict=True)]),
                "You take the mean of the ratios: one disturbed round moves it as far as it will; take the median.",
                "Vous prenez la moyenne des rapports : un seul tour perturbé la déplace à son gré ; prenez la médiane.",
                part=0,
            ),
            Mistake(
                lambda first, second: _tail(*_wins(first, second)),
                "Your p is one-sided: you did not know beforehand which would win, so count both sides (and at most "
                "1).",
                "Votre p est unilatéral : vous ne saviez pas d’avance laquelle gagnerait ; comptez les deux côtés (et "
                "1 au plus).",
                part=1,
            ),
            Mistake(
                lambda first, second: 2 * _tail(*_wins(first, second)),
                "A probability is at most 1: where both win equally often, the two sides overlap.",
                "Une probabilité vaut 1 au plus : quand les deux gagnent aussi souvent, les deux côtés se recouvrent.",
                part=1,
            ),
            Mistake(
                lambda first, second: min(1.0, 2 * _tail(_wins(first, second)[0], len(first))),
                "You count ties among the rounds: a tie speaks for neither, leave it out.",
                "Vous comptez les ex æquo parmi les tours : un ex æquo ne parle pour aucune, laissez-le de côté.",
                part=1,
            ),
            Mistake(
                lambda first, second: min(
                    1.0, 2 * math.comb(*reversed(_wins(first, second))) / 2 ** _wins(first, second)[1]
                ),
                "You take the probability of exactly so many wins; the question is about so many or more.",
                "Vous prenez la probabilité d’exactement autant de victoires ; il s’agit d’autant ou plus.",
                part=1,
            ),
            Mistake(
                lambda first, second: 1 - min(1.0, 2 * _tail(*_wins(first, second))),
                "You return 1 − p: p is small where chance alone would rarely win so often.",
                "Vous renvoyez 1 − p : p est petit quand le hasard seul gagnerait rarement aussi souvent.",
                part=1,
            ),
            *(
                Mistake(lambda first, second, p=p: p(*_wins(first, second)), en, fr, part=1)
                for p, en, fr in (
                    (
                        lambda most, n: most / n,
                        "You give the share of the rounds won: p is how likely a coin makes one at least as large.",
                        "Vous donnez la part des tours gagnés : p dit à quelle fréquence une pièce en fait une au "
                        "moins aussi grande.",
                    ),
                    (
                        lambda most, n: 0.5**most,
                        "That is how likely as many tosses in a row come down alike: count all results at least as "
                        "one-sided.",
                        "C’est la probabilité d’autant de lancers identiques à la suite : comptez tous les résultats "
                        "au moins aussi "
                        "déséquilibrés.",
                    ),
                    (
                        lambda most, n: 2 * 0.5**n,
                        "That is how likely one wins every round: count all results at least as one-sided as yours.",
                        "C’est la probabilité que l’un gagne tous les tours : comptez tous les résultats au moins "
                        "aussi déséquilibrés "
                        "que le vôtre.",
                    ),
                    (
                        lambda most, n: min(1.0, 2 * _tail(most + 1, n)),
                        "You count only results that are more one-sided: at least as one-sided, so from as many wins "
                        "on.",
                        "Vous ne comptez que les résultats plus déséquilibrés : au moins aussi déséquilibrés, donc à "
                        "partir d’autant "
                        "de victoires.",
                    ),
                )
            ),
            *(
                Mistake(
                    lambda first, second, sign=sign: _one_way(first, second, sign),
                    "Your p is one-sided: a result as one-sided the other way counts as well.",
                    "Votre p ne regarde qu’un côté : un résultat aussi déséquilibré dans l’autre sens compte aussi.",
                    part=1,
                )
                for sign in (1, -1)
            ),
            Mistake(
                lambda first, second: statistics.median([b - a for a, b in zip(first, second, strict=True)]),
                "You take differences in seconds: divide round by round, second / first.",
                "Vous prenez des différences en secondes : divisez tour par tour, second / first.",
                part=0,
            ),
            Mistake(
                lambda first, second: statistics.geometric_mean([b / a for a, b in zip(first, second, strict=True)]),
                "You take the geometric mean of the ratios: their median is asked for, which one bad round does not "
                "move.",
                "Vous prenez la moyenne géométrique des rapports : on demande leur médiane, qu’un mauvais tour ne "
                "déplace pas.",
                part=0,
            ),
            Mistake(
                lambda first, second: sorted(b / a for a, b in zip(first, second, strict=True))[len(first) // 2],
                "With an even number of rounds the median is the mean of the two in the middle: statistics.median.",
                "Avec un nombre pair de tours, la médiane est la moyenne des deux du milieu : statistics.median.",
                part=0,
            ),
            Mistake(
                lambda first, second: statistics.median(
                    [b / a for a, b in zip(sorted(first), sorted(second), strict=True)]
                ),
                "You sort each list: the n-th of each come from the same round, and must stay together.",
                "Vous triez chaque liste : les n-ièmes des deux viennent du même tour, et doivent rester ensemble.",
                part=0,
            ),
        ),
        tolerance=1e-6,
    ),
    praise_en="Right: the ratio does not depend on the load of the machine, and p says how far to trust its sign.",
    praise_fr="Exact : le rapport ne dépend pas de la charge de la machine, et p dit à quel point se fier à son signe.",
    hint_en="Go round by round: in each, one of the two wins. How often would a coin, tossed once per round, come down "
    "at least as one-sided?",
    hint_fr="Allez tour par tour : à chacun, l’une des deux gagne. À quelle fréquence une pièce, lancée une fois par "
    "tour, tomberait-elle au moins aussi souvent du même côté ?",
    nearer_en="n = rounds that are no tie, w = the larger number of wins: p = min(1, 2 · Σ_{k ≥ w} math.comb(n, k) / "
    "2ⁿ). The ratio is statistics.median of second / first.",
    nearer_fr="n = tours sans ex æquo, w = le plus grand nombre de victoires : p = min(1, 2 · Σ_{k ≥ w} math.comb(n, "
    "k) / 2ⁿ). Le rapport est statistics.median de seconde / première.",
)


class MeasuredRow(NamedTuple):
    """Published measurement with its prediction.

    Args:
        work: operations of a step, per GPU.
        measured_s, predicted_s: seconds of a step.
        fitted: whether the model's parameters were fitted on this row.
    """

    work: float
    measured_s: float
    predicted_s: float
    fitted: bool


def held_out_errors(rows: Sequence[MeasuredRow]) -> Numbers:
    """Return mean absolute relative errors of the model and of a constant, on rows not fitted on.

    The constant is one rate per GPU, the median of work over measured seconds of the fitted rows.

    Source: `dlojz.cost_model.validation`.
    """
    held = [row for row in rows if not row.fitted]
    rate = statistics.median(row.work / row.measured_s for row in rows if row.fitted)
    return (_mean_error(held, lambda row: row.predicted_s), _mean_error(held, lambda row: row.work / rate))


def _mean_error(rows: Sequence[MeasuredRow], guess: Callable[[MeasuredRow], float]) -> float:
    return statistics.fmean(abs(guess(row) / row.measured_s - 1) for row in rows)


def _trivial(rows: Sequence[MeasuredRow], rate_of: Callable[[Sequence[MeasuredRow]], float]) -> float:
    rate = rate_of(rows)
    return _mean_error([row for row in rows if not row.fitted], lambda row: row.work / rate)


def _rates(rows: Sequence[MeasuredRow]) -> list[float]:
    return [row.work / row.measured_s for row in rows]


def _tables() -> Iterator[tuple[list[MeasuredRow]]]:
    dice = random.Random(9)
    for count in (11, 24, 17):
        rows = []
        for number in range(count):
            fitted = number % 3 != 0
            measured = dice.uniform(5.0, 90.0)
            off = dice.uniform(0.97, 1.05) if fitted else dice.uniform(0.8, 1.15)
            rows.append(MeasuredRow(measured * dice.uniform(1.1e14, 1.6e14), measured, measured * off, fitted))
        dice.shuffle(rows)
        yield (rows,)


def _told_table(case: Case) -> str:
    held = sum(not row.fitted for row in case[0])
    return say(
        en=f"For a table of {len(case[0])} rows, of which {held} are held out",
        fr=f"Pour une table de {len(case[0])} lignes, dont {held} mises de côté",
    )


def _as(
    rows: Sequence[MeasuredRow], mean: Callable[[list[float]], float], gap: Callable[[float], float]
) -> tuple[float, float]:
    """Both errors, under another mean and another measure of one gap."""
    held = [row for row in rows if not row.fitted]
    rate = statistics.median(_rates([row for row in rows if row.fitted]))
    return (
        mean([gap(row.predicted_s / row.measured_s - 1) for row in held]),
        mean([gap(row.work / rate / row.measured_s - 1) for row in held]),
    )


def _on(part: int, which: Callable[[MeasuredRow], bool], english: str, french: str) -> Mistake:
    def way(rows: Sequence[MeasuredRow]) -> float:
        some = [row for row in rows if which(row)]
        rate = statistics.median(_rates([row for row in rows if row.fitted]))
        return _mean_error(some, (lambda row: row.predicted_s) if part == 0 else (lambda row: row.work / rate))

    return Mistake(way, english, french, part)


HELD_OUT = Exercise(
    id="held-out",
    title=Said("does the model add anything?", "le modèle apporte-t-il quelque chose ?"),
    judge=Judge(
        held_out_errors,
        cases=_tables,
        parts=(
            Said("the model's error", "l’erreur du modèle"),
            Said("error of the constant rate", "l’erreur du débit constant"),
        ),
        told=_told_table,
        mistakes=(
            _on(
                0,
                lambda row: True,
                "You count all rows: on those that the parameters were fitted on, a small error proves nothing.",
                "Vous comptez toutes les lignes : sur celles qui ont servi à ajuster les paramètres, une petite erreur "
                "ne prouve rien.",
            ),
            _on(
                0,
                lambda row: row.fitted,
                "You count the fitted rows, the very ones that prove nothing: take the others.",
                "Vous comptez les lignes ajustées, justement celles qui ne prouvent rien : prenez les autres.",
            ),
            Mistake(
                lambda rows: statistics.fmean(row.predicted_s / row.measured_s - 1 for row in rows if not row.fitted),
                "You leave the sign: errors of +20% and −20% would cancel out. That is the bias; take absolute values "
                "first.",
                "Vous gardez le signe : +20 % et −20 % se compenseraient. C’est le biais ; prenez d’abord les valeurs "
                "absolues.",
                part=0,
            ),
            Mistake(
                lambda rows: statistics.fmean(
                    abs(row.measured_s / row.predicted_s - 1) for row in rows if not row.fitted
                ),
                "You divide by the prediction: a model that predicts endless steps would be off by 100% at most. "
                "Divide by what was measured.",
                "Vous divisez par la prédiction : un modèle qui prédirait des pas sans fin ne se tromperait que de 100 "
                "%. Divisez par la mesure.",
                part=0,
            ),
            Mistake(
                lambda rows: statistics.fmean(abs(row.predicted_s - row.measured_s) for row in rows if not row.fitted),
                "Your error is in seconds: long steps would decide alone. Divide by what was measured.",
                "Votre erreur est en secondes : les longs pas décideraient seuls. Divisez par la mesure.",
                part=0,
            ),
            _on(
                1,
                lambda row: True,
                "The constant rate, too, is judged on the held-out rows; you count all of them.",
                "Le débit constant aussi se juge sur les lignes mises de côté ; vous les comptez toutes.",
            ),
            Mistake(
                lambda rows: _trivial(rows, lambda some: statistics.median(_rates(some))),
                "Your constant rate has seen the held-out rows: it, too, comes from the fitted ones alone.",
                "Votre débit constant a vu les lignes mises de côté : lui aussi vient des seules lignes ajustées.",
                part=1,
            ),
            Mistake(
                lambda rows: _trivial(rows, lambda some: statistics.fmean(_rates([row for row in some if row.fitted]))),
                "You take the mean rate of the fitted rows; the median is asked for, which no odd row can move.",
                "Vous prenez le débit moyen des lignes ajustées ; on demande la médiane, qu’une ligne aberrante ne "
                "déplace pas.",
                part=1,
            ),
            Mistake(
                lambda rows: _trivial(
                    rows, lambda some: statistics.median(_rates([row for row in some if not row.fitted]))
                ),
                "Your constant rate is fitted on the very rows that judge it; take it from the fitted ones.",
                "Votre débit constant est ajusté sur les lignes mêmes qui le jugent ; tirez-le des seules lignes "
                "ajustées.",
                part=1,
            ),
            *(
                Mistake(lambda rows, mean=mean, gap=gap, part=part: _as(rows, mean, gap)[part], en, fr, part)
                for mean, gap, en, fr in (
                    (
                        statistics.median,
                        abs,
                        "You take the median of the errors: their mean is asked for.",
                        "Vous prenez la médiane des erreurs : on demande leur moyenne.",
                    ),
                    (
                        max,
                        abs,
                        "You take the largest error: their mean is asked for.",
                        "Vous prenez la plus grande erreur : on demande leur moyenne.",
                    ),
                    (
                        statistics.fmean,
                        lambda off: off**2,
                        "You square the errors: their magnitude is asked for.",
                        "Vous élevez les erreurs au carré : on demande leur valeur absolue.",
                    ),
                    (
                        statistics.fmean,
                        lambda off: 100 * abs(off),
                        "Your errors are in per cent: return shares, 0.1 for 10%.",
                        "Vos erreurs sont en pour cent : renvoyez des parts, 0,1 pour 10 %.",
                    ),
                    (
                        statistics.fmean,
                        lambda off: abs(math.log(1 + off)),
                        "You take logarithms: |predicted / measured − 1| is asked for.",
                        "Vous prenez des logarithmes : on demande |prédit / mesuré − 1|.",
                    ),
                )
                for part in (0, 1)
            ),
            *(
                Mistake(lambda rows, of=of: _trivial(rows, of), en, fr, 1)
                for of, en, fr in (
                    (
                        lambda some: max(_rates([row for row in some if row.fitted])),
                        "Your rate is the largest: the median over the rows used in the fit.",
                        "Votre débit est le plus grand : prenez la médiane sur les lignes ajustées.",
                    ),
                    (
                        lambda some: statistics.median(row.work / row.predicted_s for row in some if row.fitted),
                        "Your rate comes from predicted times: the constant rate is measured, work / measured_s.",
                        "Votre débit vient de durées prédites : le débit constant se mesure, work / measured_s.",
                    ),
                    (
                        lambda some: statistics.harmonic_mean(_rates([row for row in some if row.fitted])),
                        "Your rate is a harmonic mean: the median is asked for.",
                        "Votre débit est une moyenne harmonique : on demande la médiane.",
                    ),
                )
            ),
            Mistake(
                lambda rows: statistics.fmean(
                    row.work / statistics.median(_rates([one for one in rows if one.fitted]))
                    for row in rows
                    if not row.fitted
                ),
                "That is the mean of the predicted seconds: their error is asked for, |predicted / measured − 1|.",
                "C’est la moyenne des secondes prédites : on demande leur erreur, |prédit / mesuré − 1|.",
                1,
            ),
        ),
        tolerance=1e-6,
    ),
    praise_en="Right: a model is judged on rows that it was not fitted on, and against what a constant rate achieves "
    "there.",
    praise_fr="Exact : un modèle se juge sur des lignes qui n’ont pas servi à l’ajuster, face à ce qu’y obtient un "
    "débit constant.",
    hint_en="Two lists: the rows that were fitted on, and the others. From which does the constant rate come, and "
    "on which are both judged?",
    hint_fr="Deux listes : les lignes ajustées et les autres. De laquelle le débit constant vient-il, et sur "
    "laquelle juge-t-on les deux ?",
    nearer_en="rate = statistics.median(work / measured_s) of the fitted rows; the constant rate predicts work / rate. "
    "Both errors are the mean of abs(predicted / measured − 1) over the rows that are not fitted.",
    nearer_fr="rate = statistics.median(work / measured_s) des lignes ajustées ; le débit constant prédit work / rate. "
    "Les deux erreurs sont la moyenne de abs(prédit / mesuré − 1) sur les lignes non ajustées.",
)
