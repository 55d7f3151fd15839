"""Tables and sentences of profiler traces: clocks, shares of each rank, stragglers, the pipeline, the causes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlojz.base.language import decimal, format_seconds, integer, percent, say, spaced_percent
from dlojz.base.table import Table, titles, visible
from dlojz.pipeline.analysis import CAUSES, idle_by_cause
from dlojz.pipeline.analysis import title_of as cause_title
from dlojz.pipeline.schedule_catalogue import entry
from dlojz.pipeline.traced_pipeline import (
    HeadOfLine,
    MessageWait,
    ScheduleMatch,
    TracedPipeline,
    head_of_line,
    message_waits,
    slow_stage,
)
from dlojz.results.rank_activities import AlignedRanks, CollectiveShare, RankShares, Straggler

MOST_WAITS, MOST_BLOCKED = 3, 4
"""Of each kind, how many causes are told, and how many names in one of them."""
MOST_KINDS, MOST_LETTERS = 8, 24
"""Kinds of communication that are listed, and letters of their names."""
SLOWER = 1.1
"""A stage that takes this many times the mean is told as slow."""
LEAST_STRAGGLING = 0.01
"""Waiting for a rank is told from this part of the time on."""
MORE_THAN_ITS_TURN = 1.4
"""A straggler causes this many times the waiting that it would if all ranks came late by turns."""


def clock_sentence(aligned: AlignedRanks) -> str:
    """Say how the clocks of the ranks were aligned."""
    ranks = len(aligned.ranks)
    # inf: no collective and no pair of messages ties this clock to the others.
    free = [trace.rank for trace, unsure in zip(aligned.ranks, aligned.uncertain_s, strict=True) if math.isinf(unsure)]
    shift = max(aligned.shifts_s, key=abs)
    worst = max((unsure for unsure in aligned.uncertain_s if math.isfinite(unsure)), default=0.0)
    if free:
        names = ", ".join(map(str, free))
        return say(
            en=f"{ranks} ranks; clocks taken as they are, because no collective and no pair of messages ties them to "
            f"the others: rank {names}; times between hosts may be off.",
            fr=f"{ranks} rangs ; horloges prises telles quelles, car ni collective ni paire de messages ne les relie "
            f"aux autres : rang {names} ; les temps entre machines peuvent être décalés.",
        )
    if not shift:
        return say(
            en=f"{ranks} ranks; their clocks agree, to {format_seconds(worst)}.",
            fr=f"{ranks} rangs ; leurs horloges s’accordent, à {format_seconds(worst)} près.",
        )
    return say(
        en=f"{ranks} ranks; their clocks differed by up to {format_seconds(abs(shift))} and were aligned, to "
        f"{format_seconds(worst)}.",
        fr=f"{ranks} rangs ; leurs horloges différaient de {format_seconds(abs(shift))} au plus et ont été alignées, à "
        f"{format_seconds(worst)} près.",
    )


def missing_sentence(aligned: AlignedRanks) -> str:
    """Name the ranks whose traces were not given; empty where all are there."""
    size = max((trace.world_size or 0 for trace in aligned.ranks), default=0)
    # The size of the job, as the traces say it, less the ranks that were read.
    absent = sorted(set(range(size)) - {trace.rank for trace in aligned.ranks})
    if not absent:
        return ""
    names = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
    return say(
        en=f"Not given: the traces of ranks {names} of {size}; what these wait for, or make wait, is not seen.",
        fr=f"Non données : les traces des rangs {names} sur {size} ; ce qu’ils attendent ou font attendre ne se voit "
        "pas.",
    )


def shares_table(shares: tuple[RankShares, ...], length_s: float) -> Table:
    """List what each rank does with its time."""
    head = titles(
        en="rank; computing; communication hidden; communication exposed; waiting for late ranks; neither",
        fr="rang; calcul; communication recouverte; communication exposée; attente de retardataires; "
        "ni l’un ni l’autre",
    )
    rows = tuple(
        (
            str(share.rank),
            *(
                f"{format_seconds(seconds)} ({percent(seconds / length_s if length_s else 0.0, 0)})"
                for seconds in (share.computing_s, share.hidden_s, share.exposed_s, share.waited_s, share.idle_s)
            ),
        )
        for share in shares
    )
    caption = say(
        en=f"What each rank does in {format_seconds(length_s)} (waiting for late ranks is part of the exposed)",
        fr=f"Ce que fait chaque rang en {format_seconds(length_s)} (l’attente de retardataires fait partie de "
        "l’exposée)",
    )
    return Table(head, rows, caption, align="r", whole=1)


def collectives_table(collectives: tuple[CollectiveShare, ...]) -> Table:
    """List the kinds of communication, what is exposed most first."""
    head = titles(en="communication; number; time; exposed", fr="communication; nombre; temps; exposé")
    rows = tuple(
        (
            visible(row.kind)[:MOST_LETTERS],
            decimal(row.calls, 0),
            format_seconds(row.seconds),
            f"{format_seconds(row.exposed_s)} ({percent(row.exposed_s / row.seconds if row.seconds else 0.0, 0)})",
        )
        for row in collectives[:MOST_KINDS]
    )
    caption = say(en="Communication by kind, mean of the ranks", fr="Communication par type, moyenne des rangs")
    return Table(head, rows, caption, align="r", whole=1)


def straggler_sentences(stragglers: tuple[Straggler, ...], ranks: int, length_s: float) -> Iterator[str]:
    """Say which ranks the others wait for at collectives, by how much; or that they come late by turns."""
    if not stragglers:
        return
    waited_s = sum(row.waited_s for row in stragglers)
    # Waiting for a rank, as part of the time.
    late = [row for row in stragglers if row.waited_s > LEAST_STRAGGLING * length_s]
    # By turns each rank would cause 1 / ranks of all waiting.
    causing = [row for row in late if row.waited_s > MORE_THAN_ITS_TURN * waited_s / ranks]
    for row in causing[:MOST_WAITS]:
        yield say(
            en=f"Straggler: rank {row.rank} comes last to {integer(row.last)} of {integer(row.collectives)} "
            f"collectives, {format_seconds(row.late_s)} after the one before it (median); the others wait for it "
            f"{format_seconds(row.waited_s)} each, {percent(row.waited_s / length_s)} of the time, computing meanwhile "
            "or not (the table counts what is exposed).",
            fr=f"Retardataire : le rang {row.rank} arrive le dernier à {integer(row.last)} collectives sur "
            f"{integer(row.collectives)}, {format_seconds(row.late_s)} après le précédent (médiane) ; les autres "
            f"l’attendent {format_seconds(row.waited_s)} chacun, {spaced_percent(row.waited_s / length_s)} du temps, "
            "en calculant ou non pendant ce temps (le tableau compte ce qui est exposé).",
        )
    if late and not causing:
        yield say(
            en=f"No straggler: the ranks come late to the {integer(late[0].collectives)} collectives by turns (rank "
            f"{late[0].rank} most, last at {integer(late[0].last)}); these wait for the last rank "
            f"{percent(waited_s / length_s)} of the time, partly behind computing.",
            fr=f"Pas de retardataire : les rangs arrivent en retard tour à tour aux {integer(late[0].collectives)} "
            f"collectives (le rang {late[0].rank} le plus, dernier à {integer(late[0].last)}) ; elles attendent le "
            f"dernier rang {spaced_percent(waited_s / length_s)} du temps, en partie derrière le calcul.",
        )
    if not late:
        yield say(
            en=f"No straggler: at {integer(stragglers[0].collectives)} collectives no rank makes the others wait for "
            f"more than {percent(LEAST_STRAGGLING, 0)} of the time.",
            fr=f"Pas de retardataire : sur {integer(stragglers[0].collectives)} collectives, aucun rang ne fait "
            f"attendre les autres plus de {spaced_percent(LEAST_STRAGGLING, 0)} du temps.",
        )


def schedule_sentence(match: ScheduleMatch, pipeline: TracedPipeline) -> str:
    """Say which schedule of the catalogue the order is, or which is closest."""
    schedule = pipeline.overlay.measured.schedule
    size_en = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.micro_batches} micro-batches"
    size_fr = f"{schedule.ranks} rangs, {schedule.stages} étages, {schedule.micro_batches} micro-batches"
    if match.names:
        also = ", ".join(match.names[1:])
        equivalents = say(en=f" (the same order as {also})", fr=f" (le même ordre que {also})") if also else ""
        name = f"{entry(match.names[0]).title()}, {match.names[0]}"
        return say(
            en=f"Schedule: {name}{equivalents}; {size_en}.", fr=f"Ordonnancement : {name}{equivalents} ; {size_fr}."
        )
    if match.first_difference is None:
        return say(
            en=f"Schedule: none of the catalogue; {size_en}.",
            fr=f"Ordonnancement : aucun du catalogue ; {size_fr}.",
        )
    rank, actual, expected = match.first_difference
    return say(
        en=f"Schedule: none of the catalogue; the closest is {match.closest} ({percent(match.share, 0)} of the actions "
        f"in its order), and the first difference is rank {pipeline.ranks[rank]}: {actual} instead of {expected}; "
        f"{size_en}.",
        fr=f"Ordonnancement : aucun du catalogue ; le plus proche est {match.closest} "
        f"({spaced_percent(match.share, 0)} des actions dans son ordre), et la première différence est au rang "
        f"{pipeline.ranks[rank]} : {actual} au lieu de {expected} ; {size_fr}.",
    )


def overlay_sentences(pipeline: TracedPipeline) -> Iterator[str]:
    """Say length and bubble of the step beside its simulation."""
    from dlojz.display.figures.partition_figures import bubble_sentence, step_sentence  # matplotlib

    simulated, measured = pipeline.overlay.simulated, pipeline.overlay.measured
    yield say(
        en=f"Step {pipeline.step + 1} of {pipeline.steps}, beside its simulation with the mean time of each stage:",
        fr=f"Pas {pipeline.step + 1} sur {pipeline.steps}, à côté de sa simulation avec le temps moyen de chaque "
        "étage :",
    )
    yield f"  {step_sentence(simulated, measured)}"
    yield f"  {bubble_sentence(simulated, measured)}"


def bubble_table(pipeline: TracedPipeline) -> Table:
    """List the bubble of each rank, measured and simulated, and its causes."""
    simulated, measured = pipeline.overlay.simulated, pipeline.overlay.measured
    causes = idle_by_cause(measured, pipeline.overlay.costs)
    # Causes that no rank has get no column.
    present_causes = [cause for cause in CAUSES if any(of_rank[cause] > 0 for of_rank in causes)]
    head = (
        *titles(en="rank; bubble; simulated", fr="rang; bulle; simulée"),
        *(cause_title(cause) for cause in present_causes),
    )
    rows = tuple(
        (
            str(rank),
            # `or 1.0` guards against a step of length 0.
            f"{format_seconds(measured.idle[index])} ({percent(measured.idle[index] / (measured.makespan or 1.0), 0)})",
            format_seconds(simulated.idle[index]),
            *(format_seconds(causes[index][cause]) for cause in present_causes),
        )
        for index, rank in enumerate(pipeline.ranks)
    )
    return Table(head, rows, say(en="Bubble of each rank", fr="Bulle de chaque rang"), align="r", whole=1)


def cause_sentences(pipeline: TracedPipeline) -> Iterator[str]:
    """Say why the ranks of a pipeline wait: blocked messages, a slow stage, the longest waits beyond the schedule's."""
    blocked, waits = head_of_line(pipeline), message_waits(pipeline)
    if blocked or waits:
        receive = say(en="; 2RECV_F3 receives what 2F3 needs", fr=" ; 2RECV_F3 reçoit ce qu’il faut à 2F3")
        yield say(
            en=f"(2F3 is the forward of micro-batch 3 on stage 2, 2B3 its backward{receive if blocked else ''}.)",
            fr="(2F3 : passe avant du micro-batch 3 à l’étage 2 ; 2B3 : sa passe arrière"
            f"{receive if blocked else ''}.)",
        )
    for row in blocked[:MOST_WAITS]:
        yield _blocked_sentence(row)
    if len(blocked) > MOST_WAITS:
        # A rank may be held up by several messages at one action: its idle time counts once.
        idle_s = sum({(row.delayed_rank, row.delayed_action): row.idle_s for row in blocked}.values())
        yield say(
            en=f"In all {len(blocked)} messages hold up others in this step; the ranks idle {format_seconds(idle_s)} "
            "in sum for that.",
            fr=f"En tout, {len(blocked)} messages en bloquent d’autres dans ce pas ; l’inactivité qui en résulte est "
            f"de {format_seconds(idle_s)}, tous rangs confondus.",
        )
    slow = slow_stage(pipeline)
    if slow.seconds > SLOWER * slow.mean_s:
        yield say(
            en=f"Stage {slow.stage} on rank {slow.rank} is the slowest: {format_seconds(slow.seconds)} per "
            f"micro-batch, {decimal(slow.seconds / slow.mean_s, 2)} times the mean; all others wait for it.",
            fr=f"L’étage {slow.stage}, sur le rang {slow.rank}, est le plus lent : {format_seconds(slow.seconds)} par "
            f"micro-batch, {decimal(slow.seconds / slow.mean_s, 2)} fois la moyenne ; tous les autres l’attendent.",
        )
    for wait in waits[:MOST_WAITS]:
        yield _wait_sentence(wait)
    if not waits:
        yield say(en="No rank waits for a message.", fr="Aucun rang n’attend de message.")


def _blocked_sentence(row: HeadOfLine) -> str:
    queue = ", ".join(row.blocked[:MOST_BLOCKED]) + (", …" if len(row.blocked) > MOST_BLOCKED else "")
    # A receive at the head waits for its message; a send at the head waits for the receive to be posted.
    receives = "RECV" in row.blocker
    what_en = "its message is not made yet" if receives else "its receive is not posted yet"
    what_fr = "son message n’est pas encore produit" if receives else "sa réception n’est pas encore postée"
    remedy_en = (
        "post this receive just before the action that needs it" if receives else "post that receive earlier there"
    )
    remedy_fr = (
        "postez cette réception juste avant l’action qui en a besoin"
        if receives
        else "postez-y cette réception plus tôt"
    )
    return say(
        en=f"Head-of-line blocking on rank {row.rank}: {row.blocker} waits {format_seconds(row.held_s)} for rank "
        f"{row.source}, where {what_en}; behind it {queue} could go {format_seconds(row.ready_s)} earlier, so rank "
        f"{row.delayed_rank} idles {format_seconds(row.idle_s)} before {row.delayed_action}: {remedy_en}.",
        fr=f"Blocage en tête de file au rang {row.rank} : {row.blocker} attend {format_seconds(row.held_s)} le rang "
        f"{row.source}, où {what_fr} ; derrière, {queue} pourrait partir {format_seconds(row.ready_s)} plus tôt, et "
        f"le rang {row.delayed_rank} reste inactif {format_seconds(row.idle_s)} avant {row.delayed_action} : "
        f"{remedy_fr}.",
    )


def _wait_sentence(wait: MessageWait) -> str:
    return say(
        en=f"Rank {wait.rank} waits {format_seconds(wait.waited_s)} before {visible(wait.action)} for the message of "
        f"{visible(wait.producer)} on rank {wait.source} ({format_seconds(wait.simulated_s)} in the simulation).",
        fr=f"Le rang {wait.rank} attend {format_seconds(wait.waited_s)} avant {visible(wait.action)} le message de "
        f"{visible(wait.producer)} du rang {wait.source} ({format_seconds(wait.simulated_s)} dans la simulation).",
    )
