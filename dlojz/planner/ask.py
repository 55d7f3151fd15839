"""Ask the planner for the best layout: `plan`; and find the smallest cluster where a model fits.

The whole answer is arithmetic on this machine, about a second. "Smallest" is the fewest GPUs, and of clusters that need
as many the one with the least memory; it is found by searching bytes alone, in the same space as any other question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from dlojz.base.contract import check_whole
from dlojz.base.errors import LabError
from dlojz.base.language import decimal, say, shortest
from dlojz.config.fields import LayoutFields
from dlojz.config.foreign_configs.foreign_meaning import ADAPTERS, ForeignConfig, ForeignRun, change_lines
from dlojz.cost_model import Calibration, workload
from dlojz.cost_model import calibration as calibration_named
from dlojz.cost_model.layouts import Integers
from dlojz.hardware import CLUSTERS, Cluster, cluster
from dlojz.hardware import cluster as cluster_named
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.planner.answer import Choice, Plan, question_row, seconds
from dlojz.planner.explain import (
    LayoutChange,
    LayoutVerdict,
    changes,
    code_of,
    differences,
    lighter_neighbours,
    refused,
    verdict_refused,
    verdict_sentence,
)
from dlojz.planner.planned_memory import fits, layout_memories, other_loss_bytes, searched_memories
from dlojz.planner.planned_model import Subject, chosen, question_refused, subject
from dlojz.planner.question import (
    MOST_BATCH,
    OVERLAPS,
    TRUE,
    Question,
    calibration_of,
    check_gpus,
    check_precision,
    fuses_attention,
    shard_columns,
    software_columns,
    true_columns,
    waited_columns,
)
from dlojz.planner.search import MOST_SIMULATED, SearchResult, search, simulate_fastest
from dlojz.planner.space import (
    FREE,
    REASONS,
    candidates_of,
    columns_of,
    counted_layers,
    gigabytes,
    layout_row,
    layout_title,
    more_percent,
    part_words,
    planned_layout,
    reason_counts,
    reason_words,
    running_engines,
    space_of,
)

NOT_CLUSTERS: Final = ("local",)  # placeholders, not measured values


class FittingCluster(NamedTuple):
    """Cluster, and how many of its GPUs a model fits on."""

    cluster: Cluster
    gpus: int


def batch_refusal(question: Question) -> str:
    """Say that no layout divides the batch, with the nearest ones that work; empty if one does."""
    replicas = {number: _replicas(question, number) for number in question.gpus}
    # Each number of GPUs has its own degrees.
    if any(question.batch % dp == 0 for degrees in replicas.values() for dp in degrees):
        return ""
    number, batch = question.gpus[0], question.batch
    fewest = min(replicas[number], default=0)
    if not fewest:
        return ""  # no degrees at all suit the model, which the search says better
    below = max((batch // dp * dp for dp in replicas[number]), default=0)
    above = min(-(-batch // dp) * dp for dp in replicas[number])  # multiples of dp around the batch
    works = say(en=" or ", fr=" ou ").join(str(batch_size) for batch_size in (below, above) if batch_size)
    return verdict_sentence("batch of no layout", question=question, number=number, fewest=fewest, works=works)


def _replicas(question: Question, number: int) -> set[int]:
    """Numbers of replicas that the model and an engine allow; a batch of all GPUs is one that any of them divides."""
    space = space_of(replace(question, batch=number), {"micro_batch": (1,)}, (number,))
    rows = np.flatnonzero((space.codes == 0).any(axis=1))  # at least one option allows it
    return set(space.degrees["dp"][rows].tolist())


def lightest(result: SearchResult) -> tuple[LayoutFields, float] | None:
    """The refused layout that needs least memory, and its bytes; None if none got so far."""
    if not result.heavy.size:
        return None
    index = int(np.argmin(result.heavy_bytes))
    return candidates_of(result.space, result.heavy[index])[0], float(result.heavy_bytes[index])


def fits_on(question: Question, site: Cluster, gpus: int) -> bool:
    """Whether any layout of the model fits on so many GPUs of a cluster."""
    try:
        precision = check_precision(site, question.precision)
    except LabError:
        if question.keeps_bf16:
            return False
        precision = check_precision(site, None)
    # A GPU without this precision (V100 has no bf16) is judged with its own default rather than left out.
    site_question = replace(question, cluster=site, gpus=(gpus,), precision=precision)
    space = space_of(site_question)
    flat_indices = np.flatnonzero(space.codes.reshape(-1) == 0)  # legal by degrees and options alone
    if not flat_indices.size:
        return False
    columns = frugal(space.columns(flat_indices))
    on_gpu, on_host = fits(space, columns, searched_memories(space, columns))
    return bool((on_gpu & on_host).any())


def frugal(columns: dict[str, Integers]) -> dict[str, Integers]:
    """Keep, of layouts that differ in micro-batch and recomputation alone, those that need least memory.

    Memory never falls with a larger micro-batch, nor with less that is computed again.
    """
    free = ("micro_batch", "micro_batches", "checkpointing")
    # The engine, degrees, ZeRO, schedule, offload.
    fixed = np.stack([column for name, column in columns.items() if name not in free], axis=1)
    # Sorted so that within a group the smallest micro-batch with the most recomputation comes first; unique keeps it.
    order = np.lexsort((columns["micro_batch"], -columns["checkpointing"]))
    _, first_indices = np.unique(fixed[order], axis=0, return_index=True)
    return {name: column[order[first_indices]] for name, column in columns.items()}


def _places(question: Question) -> Iterator[FittingCluster]:
    """Clusters and numbers of GPUs, the fewest GPUs first, the question's own cluster first among equals."""
    question_cluster = question.cluster
    other_clusters = [cluster(name) for name in CLUSTERS if name not in (question_cluster.name, *NOT_CLUSTERS)]
    ordered = [question_cluster, *sorted(other_clusters, key=lambda site: site.gpu.memory_bytes)]
    # Powers of two of nodes, and parts of one.
    counts = sorted({site.gpus_per_node * 2**k for site in ordered for k in range(15)} | {1, 2, 4})
    for gpus in counts:
        for site in ordered:
            # Whole nodes, or a part of one.
            if gpus <= site.num_gpus and (gpus < site.gpus_per_node or gpus % site.gpus_per_node == 0):
                yield FittingCluster(site, gpus)


def smallest_place(question: Question) -> FittingCluster | None:
    """Find the smallest cluster on which the model fits with this batch; None if there is none."""
    return next((fitting for fitting in _places(question) if fits_on(question, fitting.cluster, fitting.gpus)), None)


def fits_nowhere(result: SearchResult) -> str:
    """Say what is missing, and the smallest cluster that works."""
    question = result.space.question
    gpus = say(en=" or ", fr=" ou ").join(map(str, question.gpus))
    # Something fits, so only the hours refuse: the fastest of them is named.
    if result.fastest_s < np.inf and question.steps is not None and question.hours is not None:
        took = decimal(result.fastest_s * question.steps / 3600)
        limit = f"{shortest(question.hours)} h" + (f" ({question.limit})" if question.limit else "")
        return verdict_sentence("none in time", question=question, gpus=gpus, limit=limit, took=took)
    light = lightest(result)
    if light is None:
        counts = reason_counts(result.codes)
        worst = reason_words(max(counts, key=lambda reason: counts[reason]))
        return verdict_sentence("none possible", question=question, gpus=gpus, reason=worst)
    layout, needs = light
    missing = needs - question.device_bytes
    text = verdict_sentence("lightest", question=question, gpus=gpus, layout=layout_title(layout)) + " "
    if missing > 0:
        text += verdict_sentence("beyond the GPU", needs=gigabytes(needs), missing=gigabytes(missing))
    else:  # fits on the GPU, so it is the host's memory that lacks
        node_gpus = min(layout.world_size, question.cluster.gpus_per_node)
        memories = layout_memories(result.space, columns_of([layout]))
        offloaded, has = gigabytes(memories.host[0] * node_gpus), gigabytes(question.cluster.host_memory_bytes)
        text += verdict_sentence("beyond the host", offloaded=offloaded, node_gpus=node_gpus, has=has)
    fused_bytes, semicolon = other_loss_bytes(result.space, layout), say(en="; ", fr=" ; ")
    if missing > 0 and fused_bytes is not None and fused_bytes < needs:
        text += semicolon + verdict_sentence("with a fused loss", needs=gigabytes(fused_bytes))
    fitting = smallest_place(question)
    if fitting is None:
        return text + semicolon + verdict_sentence("no cluster")
    return text + semicolon + verdict_sentence("smallest cluster", cluster=fitting.cluster.name, gpus=fitting.gpus)


def plan(  # noqa: PLR0913 - one call is all that a student has to know
    model: str | DecoderSize,
    cluster: str | Path | Cluster = "jean_zay_a100",
    gpus: int | Sequence[int] = 8,
    batch: int = 64,
    *,
    image_size: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    lora: int | None = None,
    lora_targets: str = "",
    lora_base: str = "none",
    engines: str | Sequence[str] | None = None,
    fused_attention: bool | None = None,
    fused_loss: bool = False,
    overlap: str | Sequence[str] = OVERLAPS,
    shards: int = 0,
    software: str = "",
    steps: int | None = None,
    hours: float | None = None,
    limit: str = "",
    calibration: str | Calibration | None = None,
    simulate: int = MOST_SIMULATED,
) -> Plan:
    """Plan: the best layout of a model on a cluster, its competitors, and why all others are refused.

    Args:
        model: a name of the catalogue (`coatnet_7`), a published decoder (`megatron-1t`), or a `DecoderSize`.
        cluster: name, file of one's own, or the cluster itself.
        gpus: how many; several numbers are compared with each other.
        batch: samples of one step, over all replicas.
        image_size, sequence_length: of the samples; by default those of the model.
        precision: bf16, fp16, fp32 or, of a decoder's products, fp8; by default bf16 where the GPU has it. `bf16-true`
            keeps weights, gradients and states in bf16.
        lora, lora_targets, lora_base: adapters beside the frozen layers of a model of transformers, as a run has them.
        engines: libraries to search; by default those that run the model.
        fused_attention: whether attention is one kernel; by default from A100 on.
        fused_loss: whether the cross-entropy is one kernel, as flash-attn's and Liger's are.
        overlap: messages that run beside computation where a library can do it, of `OVERLAPS`; by default all.
        shards: data-parallel ranks that states are sharded over where a library can do it, with a copy on each such
            group (HSDP), e.g. those of a node; 0: all.
        software: facts of it, as `dlojz.planner.question.software_columns` reads them: `torch=2.0 fused_loss=yes`; by
            default today's.
        steps, hours: of the training, and within which time it must end; layouts that take longer are refused.
        limit: name of that limit, e.g. of a QoS.
        calibration: profile or file; by default that of the GPU's generation.
        simulate: how many of the fastest layouts are simulated at most; 0 leaves the closed form.

    Raises:
        LabError: if the question is illegal, or the model fits in no layout: the sentence says what is missing and
            names the smallest cluster that works.

    Example:
        `plan("coatnet_7", "jean_zay_a100", gpus=8, batch=64)`
    """
    site = cluster if isinstance(cluster, Cluster) else cluster_named(cluster)
    numbers = tuple(gpus) if isinstance(gpus, Sequence) else (gpus,)
    if not numbers:
        raise LabError(say(en="gpus must name a number, but none was received.", fr="gpus doit donner un nombre."))
    # Numbers given twice are searched once.
    numbers = tuple(dict.fromkeys(check_gpus(site, number) for number in numbers))
    batch = check_whole("batch", batch, MOST_BATCH)
    steps = None if steps is None else check_whole("steps", steps, 2**40)
    _check_hours(steps, hours)
    found_precision = check_precision(site, precision)
    adapters = {"lora": lora, "lora_targets": lora_targets, "lora_base": lora_base}
    adapters = {} if list(adapters.values()) == [None, "", "none"] else adapters
    planned_subject = subject(model, image_size=image_size, sequence_length=sequence_length, adapters=adapters)
    keeps_bf16 = precision == TRUE
    names = chosen(
        engines if engines is None or isinstance(engines, str) else tuple(engines),
        catalogue=bool(planned_subject.catalogue),
        experts=planned_subject.num_experts > 0,
        fp8=found_precision == "fp8",
    )
    if found_precision == "fp8" and planned_subject.size is None:
        raise verdict_refused("fp8 of decoders", planned_subject=planned_subject)
    if keeps_bf16 and not planned_subject.catalogue:
        raise question_refused("bf16 alone", model=planned_subject.name)
    if planned_subject.is_elsewhere or keeps_bf16:
        # Rules of runs: raises if no engine can run it.
        names = running_engines(planned_subject, TRUE if keeps_bf16 else found_precision, names)
    if shards and (adapters or keeps_bf16):
        raise question_refused("shards of no run", shards=shards)
    flash = fuses_attention(site) if fused_attention is None else fused_attention
    columns = waited_columns(overlap) | shard_columns(shards, names) | software_columns(software, site.gpu)
    columns |= true_columns(planned_subject, keeps_bf16)
    question = Question(
        planned_subject, site, _calibration(site, calibration), batch, numbers, found_precision, names, flash,
        bool(columns.pop("fused_loss", fused_loss)), steps, hours, limit, columns, keeps_bf16,
    )  # fmt: skip
    if undealt := batch_refusal(question):
        raise LabError(undealt)
    # Two answers are possible: a plan, or a refusal that names the smallest cluster (a second search, of bytes alone).
    result = search(space_of(question))
    if not result.admitted.size:
        raise LabError(fits_nowhere(result))
    return Plan(result, simulate_fastest(result, max(0, simulate)))


def _check_hours(steps: int | None, hours: float | None) -> None:
    if hours is not None and not (isinstance(hours, int | float) and 0 < hours < math.inf):
        raise verdict_refused("hours of a training", hours=hours)
    if hours is not None and steps is None:
        raise verdict_refused("hours without steps")


def _calibration(site: Cluster, calibration: str | Calibration | None) -> Calibration:
    if isinstance(calibration, Calibration):
        return calibration
    return calibration_of(site) if calibration is None else calibration_named(calibration)


MOST_CHANGES: Final = 3
LEAST_GAIN: Final = 0.01
"""Share of a step, or of a GPU's memory, that a change of a file saves at least."""


class FileChange(NamedTuple):
    """Change of a layout, as lines of a configuration file's own syntax."""

    change: LayoutChange
    lines: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ForeignPlan:
    """What another program's configuration comes to: its layout weighed and timed, and cheap changes of its file.

    Attributes:
        choice: the layout, where it fits; else None, and `verdict` says why.
        best_s: seconds of a step of the fastest layout of the same library on as many GPUs; None where nothing fits.
    """

    question: Question
    layout: LayoutFields
    choice: Choice | None
    verdict: LayoutVerdict | None
    changes: tuple[FileChange, ...]
    best_s: float | None

    def lines(self) -> list[tuple[str, str]]:
        """Pairs of name and value: as a plan's best layout is shown, with its memory by category."""
        if self.choice is None:
            assert self.verdict is not None
            rows = [question_row(self.question), (say(en="layout", fr="configuration"), self.verdict.title)]
            rows.append((say(en="does not run", fr="ne tourne pas"), self.verdict.sentence))
            if not math.isnan(self.verdict.memory_bytes):  # as if there were room
                needed = f"{gigabytes(self.verdict.memory_bytes)} / {gigabytes(self.question.device_bytes)}"
                rows.append((say(en="memory of the fullest GPU", fr="mémoire du GPU le plus rempli"), needed))
                rows.append((say(en="step, if it fitted", fr="itération, si ça tenait"), seconds(self.verdict.step_s)))
            return rows
        rows = [question_row(self.question), *self.choice.lines()]
        memory = sorted(self.choice.memory.items(), key=lambda part: -part[1])
        parts = ", ".join(
            f"{part_words(name)} {gigabytes(num_bytes)}" for name, num_bytes in memory if num_bytes >= 1e7
        )
        rows.insert(5, (say(en="of which", fr="dont"), parts))
        if self.best_s is not None:
            words = more_percent(self.best_s / self.choice.estimated_s)
            rows.append((say(en="fastest layout of all", fr="la plus rapide de toutes"), self._fastest(words)))
        return rows

    def _fastest(self, words: str) -> str:
        engine, gpus = self.layout.engine, self.layout.world_size
        return verdict_sentence("fastest of all", words=words, engine=engine, gpus=gpus)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "model": self.question.subject.name,
            "parameters": self.question.subject.num_parameters,
            "cluster": self.question.cluster.name,
            "precision": self.question.run_precision,
            "class_defaults": list(self.question.class_defaults),
            "layout": layout_row(self.layout),
            "choice": None if self.choice is None else self.choice.as_dict(),
            "refused": None if self.verdict is None else self.verdict.as_dict(),
            "best_s": self.best_s,
            "changes": [
                {
                    "lines": list(lines),
                    "changed": {name: list(pair) for name, pair in change.changed.items()},
                    "memory_delta_bytes": None if math.isnan(change.step_ratio) else change.memory_delta_bytes,
                    "step_ratio": None if math.isnan(change.step_ratio) else change.step_ratio,
                }
                for change, lines in self.changes
            ],
        }


def plan_foreign(config: ForeignConfig, run: ForeignRun, site: Cluster) -> ForeignPlan:
    """Weigh and time the one layout of a configuration, and look for the changes that cost least.

    Raises:
        LabError: if the cluster has not so many GPUs, or the model is none that the cost model describes.
    """
    question = _foreign_question(run, site)
    layout = planned_layout(**run.layout)
    columns = columns_of([layout])
    fixed_values = {name: column.tolist() for name, column in columns.items() if name in ("dp", *FREE)}
    single = search(space_of(question, fixed_values, (run.gpus,)))
    result = search(space_of(question))
    choice = Plan(single, simulate_fastest(single, 1)).best if single.admitted.size else None
    verdict = None
    if choice is None:
        reason = REASONS[int(single.codes.reshape(-1)[0])] if single.codes.size else "gpus"
        verdict = refused(result, layout, reason, gpus=run.gpus)
    best_s = float(result.step_s[0]) if result.admitted.size else None
    is_weighed = choice is not None or (verdict is not None and not math.isnan(verdict.memory_bytes))
    return ForeignPlan(question, layout, choice, verdict, _file_changes(config, result, layout, is_weighed), best_s)


def _foreign_question(run: ForeignRun, site: Cluster) -> Question:
    """Ask about a decoder by its sizes, whatever its name: the closed forms know every library's layouts."""
    fields = dict(run.size)
    tokens = fields.pop("sequence_length", None)
    if adapters := {name: fields.pop(name) for name in ADAPTERS if name in fields}:
        adapted = subject(fields["model"], sequence_length=tokens, adapters=adapters)
        return _completed(run, site, adapted, keeps_bf16=run.keeps_bf16)
    if (name := fields.pop("model", None)) is not None:
        size = workload(name, sequence_length=tokens).size
        if size is None:
            raise verdict_refused("no decoder", name=name)
    else:
        if tokens is None:
            raise verdict_refused("no length")
        size = DecoderSize(**fields, sequence_length=tokens)
    planned_subject = subject(size)
    if name is not None:
        planned_subject = replace(planned_subject, name=name)
    return _completed(run, site, planned_subject)


def _completed(run: ForeignRun, site: Cluster, planned_subject: Subject, *, keeps_bf16: bool = False) -> Question:
    # Products in fp8 where the GPU has them; the planner's own questions have the usual precisions alone.
    has_fp8 = run.precision == "fp8" and "fp8" in site.gpu.peak_flops
    precision = "fp8" if has_fp8 else check_precision(site, None if run.precision == "fp8" else run.precision)
    fused = fuses_attention(site) if run.fused_attention is None else run.fused_attention
    batch = run.layout["dp"] * run.layout["micro_batch"] * run.layout["micro_batches"]
    return Question(
        planned_subject, site, calibration_of(site), check_whole("batch", batch, MOST_BATCH),
        (check_gpus(site, run.gpus),), precision, (run.layout["engine"],), fused, run.fused_loss, run.steps,
        columns=run.columns, keeps_bf16=keeps_bf16,
    )  # fmt: skip


def _file_changes(
    config: ForeignConfig, result: SearchResult, layout: LayoutFields, is_weighed: bool
) -> tuple[FileChange, ...]:
    """Choose the changes that cost least: those of one choice before others, then what fits, then the shortest step.

    Of changes of the same fields the best stands for all. Where the layout fits, one has to save time or memory.
    """
    question = result.space.question
    neighbours = [near for near in lighter_neighbours(question, layout) if not code_of(question, near)]
    if result.admitted.size:
        apart = differences(result.space, result.admitted, layout)
        # Of few differences, the first of equals being the fastest.
        order = np.argsort(apart, kind="stable")[: 64 * MOST_CHANGES]
        neighbours += [result.layout(int(index)) for index in order if apart[index]]
    # Stages that hold different numbers of layers take flags that no line of a change has.
    counted = _counted(question, layout)
    neighbours = [near for near in neighbours if _counted(question, near) in (0, counted)]
    found_changes = [
        change for change in changes(result, layout, neighbours, is_weighed) if change.changed and change.fits
    ]
    chosen: dict[tuple[str, ...], FileChange] = {}
    before = _written_fields(layout)
    for change in sorted(found_changes, key=lambda change: (len(change.changed), change.step_s)):
        saved_bytes = -change.memory_delta_bytes
        if is_weighed and change.step_ratio > 1 - LEAST_GAIN and saved_bytes < LEAST_GAIN * question.device_bytes:
            continue
        key = tuple(change.changed)
        lines = None if key in chosen else change_lines(config, before, _written_fields(change.to))
        if lines:
            chosen[key] = FileChange(change, lines)
    return tuple(chosen.values())[:MOST_CHANGES]


def _counted(question: Question, layout: LayoutFields) -> int:
    return int(counted_layers(question.subject.num_layers, layout.pp, layout.chunks or 1))


def _written_fields(layout: LayoutFields) -> dict[str, Any]:
    """Fields that a file may write: what the search varies, and what follows from it."""
    return layout_row(layout) | {"chunks": layout.chunks or 1, "sequence_parallel": layout.sequence_parallel}
