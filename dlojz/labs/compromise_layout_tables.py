"""Tables of lab 08 about layouts: what a rank holds, what links cost, which layouts are chosen, refused, on the front.

Layer 6 (labs). Invariant: nothing is typed in; an exercise that is still to do is answered by its sentence.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from dlojz.evidence import Measurement, flops_per_sequence
from dlojz.hardware import cluster
from dlojz.hardware.links import Collective, Interconnect, bus_factor
from dlojz.labs.compromise_bloom_figures import BATCH, neighbours_of_bloom, sweep
from dlojz.labs.compromise_choice_exercises import Row
from dlojz.labs.pipeline_figures import Sheet, or_to_do, percent, pictured
from dlojz.plan.answer import Plan
from dlojz.plan.ask import plan
from dlojz.plan.choice import Choice, seconds
from dlojz.plan.reasons import decimal, gigabytes, part_words, reason_words
from dlojz.plan.subject import subject
from dlojz.plan.tree import family_words
from dlojz.predict.time.measured import Measured
from dlojz.predict.time.measured_site import link_of
from dlojz.text import say
from dlojz.viz.canvas import LabFigure

Answer = Callable[..., Any]
STATES = ("weights", "gradients", "optimizer", "activations")
MATMUL_SHARE = 0.5
"""Of the GPU's peak, what the table of splits takes a layer to reach: a plain assumption, the same for every link."""


@or_to_do
def ranks(rank_bytes: Answer, choice: Choice, stages: Iterable[int]) -> Sheet:
    """Bytes of a rank of some stages of a planned layout: the student's, and the planner's."""
    rows = []
    for stage in stages:
        rank = choice.ranks[stage]
        parameters = rank.parts["weights"] / 2 * choice.candidate.tp
        own = rank_bytes(choice.candidate, stage, parameters, rank.parts["activations"] / rank.in_flight)
        pairs = zip(own, (rank.parts[name] for name in STATES), strict=True)
        rows.append((str(stage), *(f"{gigabytes(one)} | {gigabytes(other)}" for one, other in pairs)))
    head = (say(en="stage, yours | planner", fr="étage, vous | planificateur"), *map(part_words, STATES))
    return Sheet(head, tuple(rows))


def messages(measured: Measured, ranks: int, collective: str) -> tuple[list[int], list[float]]:
    """Bytes and seconds of the measured messages of one collective."""
    points = [point for point in measured.setup(ranks).points if point.collective == collective]
    return [point.message_bytes for point in points], [point.time_s for point in points]


@or_to_do
def links(fit: Answer, measured: Measured, ranks: int) -> Sheet:
    """α and bandwidth of every collective that was measured: the student's fit, and the package's."""
    found, rows = link_of(measured), []
    for name in cast(list[Collective], list(dict.fromkeys(one.collective for one in measured.setup(ranks).points))):
        factor = bus_factor(name, ranks)
        alpha, beta = fit(*messages(measured, ranks, name), factor)
        theirs = float(found.alpha_s(name, ranks)), float(found.bytes_per_s(name, ranks))
        bandwidth = f"{decimal(1 / beta / 1e9, 2)} | {decimal(theirs[1] / 1e9, 2)}" if beta else "—"
        rows.append((name, decimal(factor, 2), f"{seconds(alpha)} | {seconds(theirs[0])}", bandwidth))
    head = (
        say(en="yours | the package", fr="vous | le paquet"),
        say(en="factor", fr="facteur"),
        "α",
        say(en="1/β, GB/s", fr="1/β, Go/s"),
    )
    return Sheet(head, tuple(rows))


@or_to_do
def splits(best_split: Answer, model: str, gpus: int, tp: int, batch: int, site: str) -> Sheet:
    """What the student's function chooses if each group of tp GPUs speaks to the others over one link or another."""
    size, place = subject(model).size, cluster(site)
    assert size is not None
    work_s = flops_per_sequence(size, "model") / (tp * MATMUL_SHARE * place.gpu.peak_flops["bf16"])
    connections: tuple[tuple[Interconnect, int], ...] = (
        (place.intra, 1),
        (cluster("selene").inter, cluster("selene").gpus_per_node),
        (place.inter, place.gpus_per_node),
    )
    rows = []
    for link, sharing in connections:
        alpha, beta = float(link.alpha_s("all_reduce", 2)) / 2, sharing / float(link.bytes_per_s("all_reduce", 8))
        own = best_split(
            gpus // tp, batch, work_s, size.num_parameters / tp, place.gpu.device.memory_bytes, alpha, beta
        )
        pp, bubble_s, reduce_s = own
        rows.append(
            (
                link.name, f"{decimal(1 / beta / 1e9, 1)}", str(int(pp)), str(gpus // tp // int(pp)),
                seconds(bubble_s), seconds(reduce_s), seconds(batch * tp / gpus * work_s),
            )
        )  # fmt: skip
    head = (
        say(en="link", fr="lien"),
        say(en="GB/s of a rank", fr="Go/s d’un rang"),
        "pp",
        "dp",
        say(en="bubble", fr="bulle"),
        "all-reduce",
        say(en="work", fr="travail"),
    )
    return Sheet(head, tuple(rows))


def bloom_layouts() -> list[Row]:
    """Every layout that was measured for BLOOM's 72-layer forerunner on 384 A100s of Jean Zay, each once.

    Seconds are the median of its readings, bytes the largest one. Where no memory was read bytes are the cost model's;
    for those that ran out of it, seconds are too.
    """
    planned = {one.layout: one for one in neighbours_of_bloom()}
    found: dict[tuple[int, int, int, int], list[Measurement]] = {}
    for row in sweep():
        found.setdefault((row.dp, row.tp, row.pp, row.micro_batch or 1), []).append(row)
    made = []
    for (dp, tp, pp, size), some in found.items():
        own = planned[dp, tp, pp, size]
        batch = some[0].global_batch
        took = [row.seconds for row in some if row.seconds is not None]
        held = [row.memory_bytes for row in some if row.memory_bytes is not None]
        step_s = statistics.median(took) if took else own.predicted_s * batch / BATCH
        memory_bytes = max(held, default=sum(own.parts.values()))
        made.append(Row(dp, tp, pp, size, batch // (dp * size), round(step_s, 2), round(memory_bytes, -8)))
    return made


@or_to_do
def chosen(choose: Answer, layouts: Sequence[Row], gpus: int, heads: int, capacity_bytes: float) -> Sheet:
    """The layout that the student's function chooses, and those that come nearest to it."""
    own = choose(list(layouts), gpus, heads, capacity_bytes)
    able = sorted((one for one in layouts if one.memory_bytes <= capacity_bytes), key=lambda one: -one.samples_per_s)
    rows = [
        (
            ("★ " if one == own else "") + one.title,
            str(one.dp * one.micro_batch * one.micro_batches),
            seconds(one.step_s),
            decimal(one.samples_per_s, 2),
            gigabytes(one.memory_bytes),
        )
        for one in dict.fromkeys((own, *able[:7]))
    ]
    head = (
        say(en="layout", fr="configuration"),
        say(en="sequences per step", fr="séquences par pas"),
        say(en="step", fr="pas"),
        say(en="sequences per s", fr="séquences par s"),
        say(en="fullest GPU", fr="GPU le plus rempli"),
    )
    return Sheet(head, tuple(rows))


def reasons(plan: Plan) -> Sheet:
    """How many layouts of a plan each reason refuses."""
    counts = sorted(plan.refused.counts.items(), key=lambda pair: -pair[1])
    rows = [(reason_words(name), decimal(count, 0)) for name, count in counts]
    return Sheet((say(en="refused because", fr="refusées parce que"), say(en="layouts", fr="nombre")), tuple(rows))


@pictured
def drawn(plan: Plan) -> LabFigure:
    """A plan's picture, in few colours."""
    return plan.figure()


@or_to_do
def front(pareto: Answer, plan: Plan, most: int = 8) -> Sheet:
    """The front that the student's function finds among all admitted layouts, and whether the planner's is the same.

    Args:
        pareto: of points of seconds, GPU-seconds, joules and bytes, each in closed form.
        plan: of which every admitted layout is a point.
        most: layouts shown, evenly over the front.
    """
    everything = [plan.choice(place) for place in range(plan.found.admitted.size)]
    points = [
        (one.estimated_s, one.candidate.gpus * one.estimated_s, one.energy_j, one.memory_bytes) for one in everything
    ]
    own = sorted((everything[place] for place in pareto(points)), key=lambda one: one.estimated_s)
    same = {one.place for one in own} == {one.place for one in plan.pareto}
    told = say(en="the same", fr="le même") if same else say(en="another", fr="un autre")
    shown = [own[round(index * (len(own) - 1) / max(most - 1, 1))] for index in range(min(most, len(own)))]
    rows = [
        (
            one.candidate.title,
            str(one.candidate.gpus),
            seconds(one.estimated_s),
            decimal(1000 * one.candidate.gpus * one.estimated_s / 3600, 1),
            decimal(one.energy_j / 3600, 1),
            gigabytes(one.memory_bytes),
        )
        for one in shown
    ]
    head = (
        say(
            en=f"{len(own)} of {len(everything)} on the front; the planner's is {told}",
            fr=f"{len(own)} sur {len(everything)} sur le front ; celui du planificateur est {told}",
        ),
        "GPU",
        say(en="step", fr="pas"),
        say(en="GPU-hours of 1,000 steps", fr="heures GPU, 1 000 pas"),
        say(en="Wh of a step", fr="Wh d’un pas"),
        say(en="fullest GPU", fr="GPU le plus rempli"),
    )
    return Sheet(head, tuple(rows))


def trees(questions: Iterable[tuple[str, int, int]], site: str = "jean_zay_a100") -> Sheet:
    """Where the decision tree ends for several questions, and what the search finds.

    Args:
        questions: model, GPUs and batch of each.
        site: the cluster.
    """
    rows = []
    for model, gpus, batch in questions:
        asked = plan(model, site, gpus=gpus, batch=batch, simulate=1)
        tree = asked.tree
        slower = tree.families[tree.leaf].step_s / tree.families[tree.found].step_s - 1
        rows.append(
            (model, str(gpus), str(batch), family_words(tree.leaf), family_words(tree.found), f"+{percent(slower)}")
        )
    head = (
        say(en="model", fr="modèle"),
        "GPU",
        "batch",
        say(en="the tree", fr="l’arbre"),
        say(en="the search", fr="la recherche"),
        say(en="the tree's way is longer by", fr="la voie de l’arbre est plus longue de"),
    )
    return Sheet(head, tuple(rows))
