"""Tables of lab 08: the student's figures beside the planner's, the package's, or what was measured."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlojz.base.language import decimal, percent, say, shortest, significant
from dlojz.base.table import Table, titles
from dlojz.cost_model.validation import validate
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import flops_per_sequence
from dlojz.hardware.evidence import Measurement
from dlojz.hardware.links import Interconnect
from dlojz.labs.kit.exercise import Sentences, or_to_do
from dlojz.labs.lab08_compromise.exercises_alpa import KNOWN, StageTimes, plan_of
from dlojz.labs.lab08_compromise.exercises_layouts import LayoutRow
from dlojz.labs.lab08_compromise.figures_published import BATCH, neighbours_of_bloom, sweep
from dlojz.planner.answer import Choice, Plan, seconds
from dlojz.planner.ask import plan
from dlojz.planner.planned_model import subject
from dlojz.planner.space import gigabytes, part_words, reason_words
from dlojz.planner.this_machine import LocalChoice
from dlojz.planner.tree import family_words

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

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
        # 2 bytes per weight in bf16; a rank has one of the tp slices of its stage
        parameters = rank.parts["weights"] / 2 * choice.candidate.tp
        # activations / in_flight: those of one micro-batch
        student_bytes = rank_bytes(choice.candidate, stage, parameters, rank.parts["activations"] / rank.in_flight)
        pairs = zip(student_bytes, (rank.parts[name] for name in STATES), strict=True)
        rows.append(
            (
                str(stage),
                *(f"{gigabytes(answer_bytes)} | {gigabytes(planned_bytes)}" for answer_bytes, planned_bytes in pairs),
            )
        )
    head = (say(en="stage, yours | planner", fr="étage, vous | planificateur"), *map(part_words, STATES))
    return Table(head, tuple(rows))


@or_to_do
def peak_shares(shares_of_peak: Answer) -> Table:
    """Tabulate MFU and HFU of Narayanan's Table 1 by the student's function, beside the paper's share of the peak."""
    rows = []
    for comparison in validate("sc21-1").rows:
        row, peak = comparison.row, cluster(comparison.row.cluster).gpu.peak_flops["bf16"]
        tokens_per_s = row.global_batch * row.size.sequence_length / comparison.measured_s
        shares = shares_of_peak(row.size.num_parameters, tokens_per_s, row.gpus, peak, row.checkpointing == "full")
        published_share = "—" if row.tflops_per_gpu is None else percent(1e12 * row.tflops_per_gpu / peak, 0)
        rows.append(
            (
                f"{decimal(row.size.num_parameters / 1e9, 1)}", str(row.gpus),
                "—" if row.tflops_per_gpu is None else decimal(row.tflops_per_gpu, 0),
                published_share, *(percent(share, 0) for share in shares),
            )
        )  # fmt: skip
    head = titles(*TEXTS.sentence("peak shares", "heads"))
    return Table(head, tuple(rows))


@or_to_do
def splits(best_split: Answer, model: str, gpus: int, tp: int, batch: int, site: str) -> Table:
    """Tabulate the splits that the student's function chooses for several links between groups of tp GPUs."""
    size, machine = subject(model).size, cluster(site)
    assert size is not None
    # seconds of one sequence, forward and backward, through the whole model on one group of tp GPUs
    work_s = flops_per_sequence(size, "model") / (tp * MATMUL_SHARE * machine.gpu.peak_flops["bf16"])
    # each link with the number of GPUs that share its bandwidth
    connections: tuple[tuple[Interconnect, int], ...] = (
        (machine.intra, 1),
        (cluster("selene").inter, cluster("selene").gpus_per_node),
        (machine.inter, machine.gpus_per_node),
    )
    rows = []
    for link, sharing in connections:
        # a ring of 2 ranks makes 2 steps, so one step takes half the latency; β in s per byte
        alpha, beta = float(link.alpha_s("all_reduce", 2)) / 2, sharing / float(link.bytes_per_s("all_reduce", 8))
        split = best_split(gpus // tp, batch, work_s, size.num_parameters / tp, machine.gpu.memory_bytes, alpha, beta)
        pp, bubble_s, reduce_s = split
        rows.append(
            (
                link.name, f"{decimal(1 / beta / 1e9, 1)}", str(int(pp)), str(gpus // tp // int(pp)),
                seconds(bubble_s), seconds(reduce_s), seconds(batch * tp / gpus * work_s),
            )
        )  # fmt: skip
    head = titles(*TEXTS.sentence("splits", "heads"))
    return Table(head, tuple(rows))


def bloom_layouts() -> list[LayoutRow]:
    """List the layouts measured for BLOOM's 72-layer forerunner on 384 A100s of Jean Zay, each once.

    Seconds are the median of its readings, bytes the largest one. Where no memory was read bytes are the cost model's;
    for those that ran out of it, seconds are too.
    """
    planned = {neighbour.layout: neighbour for neighbour in neighbours_of_bloom()}
    measurements: dict[tuple[int, int, int, int], list[Measurement]] = {}
    for row in sweep():
        measurements.setdefault((row.dp, row.tp, row.pp, row.micro_batch or 1), []).append(row)
    layouts = []
    for (dp, tp, pp, size), readings in measurements.items():
        neighbour = planned[dp, tp, pp, size]
        batch = readings[0].global_batch
        took = [row.seconds for row in readings if row.seconds is not None]
        memory_readings = [row.memory_bytes for row in readings if row.memory_bytes is not None]
        step_s = statistics.median(took) if took else neighbour.predicted_s * batch / BATCH
        memory_bytes = max(memory_readings, default=sum(neighbour.parts.values()))
        layouts.append(LayoutRow(dp, tp, pp, size, batch // (dp * size), round(step_s, 2), round(memory_bytes, -8)))
    return layouts


@or_to_do
def chosen(choose: Answer, layouts: Sequence[LayoutRow], gpus: int, heads: int, capacity_bytes: float) -> Table:
    """Tabulate the layout that the student's function chooses, and the nearest others."""
    choice = choose(list(layouts), gpus, heads, capacity_bytes)
    able = sorted(
        (layout for layout in layouts if layout.memory_bytes <= capacity_bytes),
        key=lambda layout: -layout.samples_per_s,
    )
    rows = [
        (
            ("★ " if layout == choice else "") + layout.title,
            str(layout.dp * layout.micro_batch * layout.micro_batches),
            seconds(layout.step_s),
            decimal(layout.samples_per_s, 2),
            gigabytes(layout.memory_bytes),
        )
        for layout in dict.fromkeys((choice, *able[:7]))
    ]
    head = titles(*TEXTS.sentence("chosen", "heads"))
    return Table(head, tuple(rows))


def verdicts(plan: Plan, layouts: Iterable[Mapping[str, Any]]) -> Table:
    """List layouts with the planner's reason why each is not the first, or is refused."""
    rows = [
        (verdict.title, verdict.sentence, "—" if verdict.change is None else verdict.change.words)
        for verdict in (plan.why(**layout) for layout in layouts)
    ]
    return Table(
        titles(en="layout; why; smallest change", fr="configuration; pourquoi; plus petit changement"),
        tuple(rows),
        align="l",
    )


def reasons(plan: Plan) -> Table:
    """Count how many layouts of a plan each reason refuses."""
    counts = sorted(plan.refused.counts.items(), key=lambda pair: -pair[1])
    rows = [(reason_words(name), decimal(count, 0)) for name, count in counts]
    return Table((say(en="refused because", fr="refusées parce que"), say(en="layouts", fr="nombre")), tuple(rows))


def trees(questions: Iterable[tuple[str, int, int]], site: str = "jean_zay_a100") -> Table:
    """Tabulate the ends of the decision tree for questions (model, GPUs, batch), and what the search finds."""
    rows = []
    for model, gpus, batch in questions:
        question_plan = plan(model, site, gpus=gpus, batch=batch, simulate=1)
        tree = question_plan.tree
        slower = tree.families[tree.leaf].step_s / tree.families[tree.found].step_s - 1
        rows.append(
            (model, str(gpus), str(batch), family_words(tree.leaf), family_words(tree.found), f"+{percent(slower)}")
        )
    head = titles(*TEXTS.sentence("trees", "heads"))
    return Table(head, tuple(rows))


LIKELY = 0.05
"""p from which a difference is called chance."""


@or_to_do
def known_steps(shortest_step: Answer) -> Table:
    """Tabulate the six known cases: the student's shortest step, the package's, and the stages of its plan."""
    rows = []
    for name, (times, gpus, micro_batches) in KNOWN.items():
        student_step_s = shortest_step(times, times.layers, gpus, micro_batches)
        plan = plan_of(times, times.layers, gpus, micro_batches)
        cut = ", ".join(f"{stage.first}–{stage.last} × {stage.submesh.num_devices}" for stage in plan.stages)
        work = "; ".join(map(shortest, times.work))
        efficiency = " ".join(decimal(share, 2) for share in times.efficiency)
        steps_text = f"{significant(student_step_s, 5)} | {significant(plan.step_s, 5)}"
        rows.append((name, f"[{work}]", efficiency, str(gpus), str(micro_batches), steps_text, cut))
    head = titles(*TEXTS.sentence("known steps", "heads"))
    return Table(head, tuple(rows))


def case(name: str) -> tuple[StageTimes, int, int]:
    """Return a known case: times, GPUs, micro-batches."""
    return KNOWN[name]


@or_to_do
def duels(compare_rounds: Answer, rows: Sequence[LocalChoice], rounds: Sequence[Sequence[float]]) -> Table:
    """Compare the first layout with each other one, by the student's comparison of their rounds."""
    lines = []
    for row, row_rounds in list(zip(rows, rounds, strict=True))[1:]:
        ratio, p = compare_rounds(rounds[0], row_rounds)
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


def documents(files: Mapping[str, str], most: int = 24) -> None:
    """Print the files of a chosen layout, each cut to so many lines."""
    for name, text in files.items():
        lines = text.rstrip().splitlines()
        print(f"─── {name}")
        print("\n".join(lines[:most]) + ("\n…" if len(lines) > most else ""))
