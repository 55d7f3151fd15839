"""Tables of lab 08: the student's figures beside the planner's, the package's, or what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from dlojz.base.language import decimal, format_bytes, integer, percent, say, significant
from dlojz.base.table import Table, titles
from dlojz.cost_model.layouts import Layouts
from dlojz.cost_model.measured_machine import Measured, link_of
from dlojz.cost_model.step import memories
from dlojz.cost_model.validation import validate
from dlojz.cost_model.workload import decoder_workload
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.plan_figures import plan_figure
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import flops_per_sequence
from dlojz.hardware.evidence import Measurement
from dlojz.hardware.links import Collective, Interconnect, bus_factor
from dlojz.labs.kit.exercise import or_to_do
from dlojz.labs.kit.figures import pictured
from dlojz.labs.lab08_compromise.exercises_alpa import KNOWN, StageTimes, perceptron, plan_of, solve
from dlojz.labs.lab08_compromise.exercises_evidence import MeasuredRow
from dlojz.labs.lab08_compromise.exercises_layouts import LayoutRow
from dlojz.labs.lab08_compromise.figures_published import BATCH, neighbours_of_bloom, sweep
from dlojz.planner.alpa.graph import mlp
from dlojz.planner.alpa.intra_operator import shard
from dlojz.planner.alpa.mesh import DeviceMesh
from dlojz.planner.answer import Choice, Plan, seconds
from dlojz.planner.answer import held_out as planner_held_out
from dlojz.planner.ask import plan
from dlojz.planner.planned_model import subject
from dlojz.planner.space import gigabytes, part_words, reason_words
from dlojz.planner.this_machine import LocalChoice
from dlojz.planner.tree import family_words
from dlojz.results.record import RunRecord

Answer = Callable[..., Any]
STATES = ("weights", "gradients", "optimizer", "activations")
MATMUL_SHARE = 0.5
"""Of the GPU's peak, what the table of splits takes a layer to reach: a plain assumption, the same for every link."""


@or_to_do
def ranks(rank_bytes: Answer, choice: Choice, stages: Iterable[int]) -> Table:
    """Tabulate the bytes of a rank of some stages of a planned layout: the student's, and the planner's."""
    rows = []
    for stage in stages:
        rank = choice.ranks[stage]
        parameters = rank.parts["weights"] / 2 * choice.candidate.tp
        own = rank_bytes(choice.candidate, stage, parameters, rank.parts["activations"] / rank.in_flight)
        pairs = zip(own, (rank.parts[name] for name in STATES), strict=True)
        rows.append((str(stage), *(f"{gigabytes(one)} | {gigabytes(other)}" for one, other in pairs)))
    head = (say(en="stage, yours | planner", fr="étage, vous | planificateur"), *map(part_words, STATES))
    return Table(head, tuple(rows))


def messages(measured: Measured, ranks: int, collective: str) -> tuple[list[int], list[float]]:
    """Return bytes and seconds of the measured messages of one collective."""
    points = [point for point in measured.setup(ranks).points if point.collective == collective]
    return [point.message_bytes for point in points], [point.time_s for point in points]


@or_to_do
def links(fit: Answer, measured: Measured, ranks: int) -> Table:
    """Tabulate α and bandwidth of every measured collective: the student's fit, and the package's."""
    found, rows = link_of(measured), []
    for name in cast(list[Collective], list(dict.fromkeys(one.collective for one in measured.setup(ranks).points))):
        factor = bus_factor(name, ranks)
        alpha, beta = fit(*messages(measured, ranks, name), factor)
        theirs = float(found.alpha_s(name, ranks)), float(found.bytes_per_s(name, ranks))
        bandwidth = f"{decimal(1 / beta / 1e9, 2)} | {decimal(theirs[1] / 1e9, 2)}" if beta else "—"
        rows.append((name, decimal(factor, 2), f"{seconds(alpha)} | {seconds(theirs[0])}", bandwidth))
    head = titles(en="yours | the package; factor; α; 1/β, GB/s", fr="vous | le paquet; facteur; α; 1/β, Go/s")
    return Table(head, tuple(rows))


@or_to_do
def splits(best_split: Answer, model: str, gpus: int, tp: int, batch: int, site: str) -> Table:
    """Tabulate the splits that the student's function chooses for several links between groups of tp GPUs."""
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
        own = best_split(gpus // tp, batch, work_s, size.num_parameters / tp, place.gpu.memory_bytes, alpha, beta)
        pp, bubble_s, reduce_s = own
        rows.append(
            (
                link.name, f"{decimal(1 / beta / 1e9, 1)}", str(int(pp)), str(gpus // tp // int(pp)),
                seconds(bubble_s), seconds(reduce_s), seconds(batch * tp / gpus * work_s),
            )
        )  # fmt: skip
    head = titles(
        en="link; GB/s of a rank; pp; dp; bubble; all-reduce; work",
        fr="lien; Go/s d’un rang; pp; dp; bulle; all-reduce; travail",
    )
    return Table(head, tuple(rows))


def bloom_layouts() -> list[LayoutRow]:
    """List the layouts measured for BLOOM's 72-layer forerunner on 384 A100s of Jean Zay, each once.

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
        made.append(LayoutRow(dp, tp, pp, size, batch // (dp * size), round(step_s, 2), round(memory_bytes, -8)))
    return made


@or_to_do
def chosen(choose: Answer, layouts: Sequence[LayoutRow], gpus: int, heads: int, capacity_bytes: float) -> Table:
    """Tabulate the layout that the student's function chooses, and the nearest others."""
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
    head = titles(
        en="layout; sequences per step; step; sequences per s; fullest GPU",
        fr="configuration; séquences par pas; pas; séquences par s; GPU le plus rempli",
    )
    return Table(head, tuple(rows))


def reasons(plan: Plan) -> Table:
    """Count how many layouts of a plan each reason refuses."""
    counts = sorted(plan.refused.counts.items(), key=lambda pair: -pair[1])
    rows = [(reason_words(name), decimal(count, 0)) for name, count in counts]
    return Table((say(en="refused because", fr="refusées parce que"), say(en="layouts", fr="nombre")), tuple(rows))


@pictured
def drawn(plan: Plan) -> LabFigure:
    """Draw a plan, in few colours."""
    return plan_figure(plan)


@or_to_do
def front(pareto: Answer, plan: Plan, most: int = 8) -> Table:
    """Tabulate the front that the student's function finds among all admitted layouts, and compare the planner's.

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
    same = {points[one.place] for one in own} == {points[one.place] for one in plan.pareto}  # it keeps equals once
    told = say(en="the same", fr="le même") if same else say(en="another", fr="un autre")
    shown = [own[round(index * (len(own) - 1) / max(most - 1, 1))] for index in range(min(most, len(own)))]
    if plan.best.place not in {one.place for one in shown}:
        shown = sorted([*shown, plan.best], key=lambda one: one.estimated_s)
    rows = [
        (
            one.candidate.title + (" ★" if one.place == plan.best.place else ""),
            str(one.candidate.gpus),
            seconds(one.estimated_s),
            decimal(1000 * one.candidate.gpus * one.estimated_s / 3600, 1),
            decimal(one.energy_j / 3600, 1),
            gigabytes(one.memory_bytes),
        )
        for one in shown
    ]
    counts = integer(len(own)), integer(len(everything))
    caption = say(
        en=f"{counts[0]} of {counts[1]} layouts are on the front, of which {len(rows)} are shown; the planner's "
        f"front is {told}.",
        fr=f"{counts[0]} configurations sur {counts[1]} sont sur le front, dont {len(rows)} sont montrées ; celui du "
        f"planificateur est {told}.",
    )
    chosen = say(
        en=f"★ the planner's choice: {seconds(plan.best.estimated_s)} in closed form, {seconds(plan.best.step_s)} "
        "simulated.",
        fr=f"★ le choix du planificateur : {seconds(plan.best.estimated_s)} par la forme close, "
        f"{seconds(plan.best.step_s)} simulé.",
    )
    head = (
        say(en="layout", fr="configuration"),
        "GPU",
        say(en="step, closed form", fr="pas, forme close"),
        say(en="GPU-hours of 1,000 steps", fr="heures GPU, 1 000 pas"),
        say(en="Wh of a step", fr="Wh d’un pas"),
        say(en="fullest GPU", fr="GPU le plus rempli"),
    )
    return Table(head, tuple(rows), caption, notes=(chosen,))


def trees(questions: Iterable[tuple[str, int, int]], site: str = "jean_zay_a100") -> Table:
    """Tabulate the ends of the decision tree for questions (model, GPUs, batch), and what the search finds."""
    rows = []
    for model, gpus, batch in questions:
        asked = plan(model, site, gpus=gpus, batch=batch, simulate=1)
        tree = asked.tree
        slower = tree.families[tree.leaf].step_s / tree.families[tree.found].step_s - 1
        rows.append(
            (model, str(gpus), str(batch), family_words(tree.leaf), family_words(tree.found), f"+{percent(slower)}")
        )
    head = titles(
        en="model; GPU; batch; the tree; the search; the tree's way is longer by",
        fr="modèle; GPU; batch; l’arbre; la recherche; la voie de l’arbre est plus longue de",
    )
    return Table(head, tuple(rows))


STRATEGY = {"column": ("C", "C"), "row": ("R", "L"), "batch": ("B", "B")}
LIKELY = 0.05
"""p from which a difference is called chance."""


@or_to_do
def by_batch(programme: Answer, batches: Iterable[int], width: int, layers: int, mesh: DeviceMesh) -> Table:
    """Tabulate the cheapest sharding of a perceptron by batch: the student's chain, and the whole graph."""
    rows = []
    for batch in batches:
        chain = perceptron(batch, width, layers, mesh)
        found = solve(*programme(chain.costs, chain.resharding))
        letters = [] if found is None else [STRATEGY[chain.strategies[k]] for k in found.strategies()]
        rows.append(
            (
                str(batch),
                " ".join(say(en=english, fr=french) for english, french in letters),
                "—" if found is None else decimal(found.cost, 0),
                decimal(shard(mlp(batch, width, layers), mesh).cost, 0),
            )
        )
    head = titles(
        en="batch; strategies (C columns, R rows, B batch); your programme; the package, operator by operator",
        fr="batch; stratégies (C colonnes, L lignes, B batch); votre programme; le paquet, opérateur par opérateur",
    )
    return Table(head, tuple(rows))


@or_to_do
def known_steps(shortest_step: Answer) -> Table:
    """Tabulate the six known cases: the student's shortest step, the package's, and the stages of its plan."""
    rows = []
    for name, (times, gpus, micro_batches) in KNOWN.items():
        own = shortest_step(times, times.layers, gpus, micro_batches)
        plan = plan_of(times, times.layers, gpus, micro_batches)
        cut = ", ".join(f"{one.first}–{one.last} × {one.submesh.num_devices}" for one in plan.stages)
        work = ", ".join(f"{weight:g}" for weight in times.work)
        efficiency = " ".join(decimal(one, 2) for one in times.efficiency)
        both = f"{significant(own, 5)} | {significant(plan.step_s, 5)}"
        rows.append((name, f"[{work}]", efficiency, str(gpus), str(micro_batches), both, cut))
    head = titles(
        en="case; work; efficiency of 1, 2, 4… GPUs; GPU; B; yours | the package; stages: layers × GPUs",
        fr="cas; travail; efficacité de 1, 2, 4… GPU; GPU; B; vous | le paquet; étages : couches × GPU",
    )
    return Table(head, tuple(rows))


def case(name: str) -> tuple[StageTimes, int, int]:
    """Return a known case: times, GPUs, micro-batches."""
    return KNOWN[name]


def stage_times(times: StageTimes, gpus: int) -> dict[tuple[int, int, int], float]:
    """Compute the times of all stages of a case, by first layer, last layer and GPUs."""
    sizes = [2**power for power in range(gpus.bit_length())]
    layers = range(times.layers)
    return {
        (first, last, size): times(first, last, size)
        for first in layers
        for last in layers
        for size in sizes
        if first <= last
    }


@or_to_do
def duels(compare_rounds: Answer, rows: Sequence[LocalChoice], rounds: Sequence[Sequence[float]]) -> Table:
    """Compare the first layout with each other one, by the student's comparison of their rounds."""
    lines = []
    for row, own in list(zip(rows, rounds, strict=True))[1:]:
        ratio, p = compare_rounds(rounds[0], own)
        if p > LIKELY:
            verdict = say(en="undecided", fr="rien ne permet de le dire")
        elif ratio > 1:
            verdict = say(en="the first is faster", fr="la première est plus rapide")
        else:
            verdict = say(en="the first is slower", fr="la première est plus lente")
        lines.append((row.title, decimal(row.step_s / rows[0].step_s, 2), decimal(ratio, 2), decimal(p, 4), verdict))
    head = titles(
        en=f"against {rows[0].title}; predicted ratio; measured ratio; p; verdict",
        fr=f"face à {rows[0].title}; rapport prédit; rapport mesuré; p; verdict",
    )
    return Table(head, tuple(lines))


def predicted_and_run(row: LocalChoice, rounds: Sequence[float], record: RunRecord | None) -> Table:
    """Tabulate a layout's step and peak: predicted, measured in turns with its neighbours, and in a run."""
    own = record.footprint() if record else None
    peaks = [one.memory.peak_bytes for one in record.footprints if one.memory.peak_bytes] if record else []
    step_s = own.phases.step_s if own else None
    rows = (
        (
            say(en="step", fr="pas"),
            seconds(row.step_s),
            seconds(statistics.median(rounds)),
            "—" if step_s is None else seconds(step_s),
        ),
        (
            say(en="peak of the fullest rank", fr="pic du rang le plus rempli"),
            format_bytes(row.peak_bytes),
            "—",
            format_bytes(max(peaks)) if peaks else "—",
        ),
    )
    head = (
        row.title,
        say(en="predicted", fr="prédit"),
        say(en="measured, in turns", fr="mesuré, à tour de rôle"),
        say(en="measured, in a run", fr="mesuré, en exécution"),
    )
    return Table(head, rows)


def evidence(name: str) -> list[MeasuredRow]:
    """Return the rows of a published table with their predictions."""
    return [
        MeasuredRow(
            one.row.global_batch
            * flops_per_sequence(one.row.size, "recompute" if one.row.checkpointing == "full" else "model")
            / one.row.gpus,
            one.measured_s,
            one.predicted_s,
            not one.held_out,
        )
        for one in validate(name).rows
    ]


@or_to_do
def held_out(errors: Answer, names: Sequence[str]) -> Table:
    """Tabulate errors of the model and of a constant rate by the student's function, and with the table left out."""
    rows = []
    for name in names:
        result = validate(name)
        model, constant = errors(evidence(name))
        adds = say(en="yes", fr="oui") if model < constant else say(en="no", fr="non")
        both = (
            f"{percent(one)} | {percent(other)}" for one, other in ((model, result.mean), (constant, result.trivial))
        )
        rows.append((name, f"{len(result.held)} / {len(result.rows)}", *both, percent(result.left_out_mean), adds))
    head = titles(
        en="yours | the package; held out / rows; model; constant rate; table left out; does it add anything?",
        fr="vous | le paquet; mises de côté / lignes; modèle; débit constant; tableau écarté; apporte-t-il quelque "
        "chose ?",
    )
    return Table(head, tuple(rows))


def unseen(names: Sequence[str]) -> Table:
    """Tabulate published tables that no fit has seen: errors, a constant rate, the planner's interval, memory."""
    rows, intervals = [], {}
    for name in names:
        result = validate(name)
        known = planner_held_out(result.profile)
        assert known is not None
        intervals[result.profile.upper()] = f"{decimal(known.low, 2)} – {decimal(known.high, 2)}"
        inside = [known.low <= one.measured_s / one.predicted_s <= known.high for one in result.rows]
        refused = sum(_share_of_gpu(one.row) > 1 for one in result.rows)
        rows.append(
            (
                name, str(len(result.rows)), percent(result.mean), percent(result.worst), percent(result.trivial),
                percent(statistics.fmean(inside), 0), str(refused),
            )
        )  # fmt: skip
    head = titles(
        en="table; rows that ran; model; worst row; constant rate; inside the interval; refused as OOM",
        fr="tableau; lignes exécutées; modèle; pire ligne; débit constant; dans l’intervalle; refusées (OOM)",
    )
    told = ", ".join(f"{profile} {factors}" for profile, factors in intervals.items())
    note = say(en=f"Interval, measured over predicted: {told}.", fr=f"Intervalle, mesuré sur prédit : {told}.")
    return Table(head, tuple(rows), align="lrrrrrr", notes=(note,))


def _share_of_gpu(row: Measurement) -> float:
    needed = memories(decoder_workload(row.size), Layouts.from_measurements([row])).total_bytes[0]
    return float(needed) / cluster(row.cluster).gpu.memory_bytes


def documents(files: Mapping[str, str], most: int = 24) -> None:
    """Print the files of a chosen layout, each cut to so many lines."""
    for name, text in files.items():
        lines = text.rstrip().splitlines()
        print(f"─── {name}")
        print("\n".join(lines[:most]) + ("\n…" if len(lines) > most else ""))
