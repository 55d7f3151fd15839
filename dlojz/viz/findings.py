"""What a comparison says, in sentences; every figure in them is read from it.

Layer 4. Invariant: a sentence is only said about runs that were measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlojz.text import say
from dlojz.units import format_bytes, format_count
from dlojz.viz.grid import gap_text

if TYPE_CHECKING:
    from dlojz.comparison import Comparison, Row


def findings(comparison: Comparison) -> list[str]:
    """Sentences about parity, communication, memory and speed, in the reader's language."""
    said = [_parity(comparison.rows), _communication(comparison), *_memory(comparison.rows), _speed(comparison.rows)]
    said += [_bubble(row) for row in comparison.rows]
    return [sentence for sentence in said if sentence]


def _parity(rows: tuple[Row, ...]) -> str | None:
    judged = [(row.loss_gap, row) for row in rows if row.loss_gap is not None]
    if not judged:
        return None
    gap, worst = max(judged, key=lambda pair: pair[0])
    return say(
        en=f"Parallel = serial: over {len(judged)} parallel runs, the losses differ from those of one process by at "
        f"most {gap_text(gap)} (relative; {worst.title}).",
        fr=f"Parallèle = séquentiel : sur {len(judged)} exécutions parallèles, les pertes diffèrent de celles d'un "
        f"seul processus d'au plus {gap_text(gap)} (en relatif ; {worst.title}).",
    )


def _communication(comparison: Comparison) -> str | None:
    if comparison.exact is None:
        return None
    if comparison.exact:
        return say(
            en="Communication predicted = counted, byte for byte: yes.",
            fr="Communication prédite = comptée, à l'octet près : oui.",
        )
    wrong = "; ".join(
        f"{row.title} {traffic.collective}: {traffic.message_bytes.predicted} ≠ {traffic.message_bytes.measured}"
        for row in comparison.rows
        for traffic in row.communication
        if traffic.message_bytes.equal is False
    )
    return say(
        en=f"Communication predicted = counted, byte for byte: NO ({wrong}).",
        fr=f"Communication prédite = comptée, à l'octet près : NON ({wrong}).",
    )


def _memory(rows: tuple[Row, ...]) -> list[str]:
    held = [  # a pipeline's ranks hold other blocks, not another share of the same
        (row.states_bytes.measured, row)
        for row in rows
        if row.states_bytes.measured and row.world_size > 1 and row.pipeline_s.measured is None
    ]
    if len(held) < 2:
        return []
    most, least = max(held, key=lambda pair: pair[0]), min(held, key=lambda pair: pair[0])
    said = []
    if most[0] > least[0]:
        said.append(
            say(
                en=f"Memory: the model states of one rank take {format_bytes(most[0])} with {most[1].title} and "
                f"{format_bytes(least[0])} with {least[1].title}, {most[0] / least[0]:.1f} times less.",
                fr=f"Mémoire : les états du modèle d'un rang occupent {format_bytes(most[0])} avec {most[1].title} et "
                f"{format_bytes(least[0])} avec {least[1].title}, soit {most[0] / least[0]:.1f} fois moins.",
            )
        )
        if sent := _price(most[1], least[1]):
            said.append(sent)
    return said


def _price(most: Row, least: Row) -> str | None:
    before, after = most.sent_bytes, least.sent_bytes
    if not before or not after:
        return None
    return say(
        en=f"Its price: a rank sends {format_bytes(after)} per step instead of {format_bytes(before)} in a ring "
        f"(×{after / before:.2f}).",
        fr=f"Son prix : en anneau, un rang envoie {format_bytes(after)} par pas au lieu de {format_bytes(before)} "
        f"(×{after / before:.2f}).",
    )


def _speed(rows: tuple[Row, ...]) -> str | None:
    parallel = [(row.samples_per_s.measured, row) for row in rows if row.samples_per_s.measured and row.world_size > 1]
    if not parallel:
        return None
    rate, fastest = max(parallel, key=lambda pair: pair[0])
    ideal = fastest.samples_per_s.predicted
    of_ideal = (
        say(
            en=f", {100 * rate / ideal:.0f} % of the ideal (predicted from one process)",
            fr=f", {100 * rate / ideal:.0f} % de l'idéal (prédit à partir d'un processus)",
        )
        if ideal
        else ""
    )
    return say(
        en=f"Speed: the fastest parallel run is {fastest.title} with {format_count(rate)} samples/s{of_ideal}.",
        fr=f"Vitesse : l'exécution parallèle la plus rapide est {fastest.title} avec {format_count(rate)} "
        f"échantillons/s{of_ideal}.",
    )


def _bubble(row: Row) -> str | None:
    """How far a pipeline's schedule was from its simulation."""
    step_s, bubble = row.pipeline_s, row.bubble_fraction
    if not step_s.measured or not step_s.predicted or bubble.measured is None or bubble.predicted is None:
        return None
    off = f"{100 * (step_s.measured / step_s.predicted - 1):+.0f}".replace("-", "−")
    shares = [f"{100 * share:.0f}" for share in (bubble.measured, bubble.predicted)]
    return say(
        en=f"Pipeline: with the measured times of its actions, {row.title} is simulated to within {off} % of its "
        f"measured step; its bubble is {shares[0]} % of the ranks' time, {shares[1]} % simulated.",
        fr=f"Pipeline : avec les durées mesurées de ses actions, la simulation de {row.title} est à {off} % du pas "
        f"mesuré ; sa bulle occupe {shares[0]} % du temps des rangs, {shares[1]} % en simulation.",
    )
