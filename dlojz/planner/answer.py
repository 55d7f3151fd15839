"""Answer of the planner: the best layouts with error bars and the nearest measurement, and the refused ones.

The step of a layout is the simulated one where it was simulated, else the closed form's, and it says which. Every
layout of the space is either admitted or refused for one reason of the closed list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import numpy as np

from dlojz.base.display_hook import Summary, figure_of, table_of
from dlojz.base.errors import LabError
from dlojz.base.language import decimal, format_count, one_of, say
from dlojz.config.fields import LayoutFields
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import Bill, Layouts, Parts, StepSimulation, bill, estimate, workload
from dlojz.cost_model.calibration import default_words
from dlojz.cost_model.layouts import software
from dlojz.cost_model.validation import completed
from dlojz.hardware import cluster
from dlojz.hardware.evidence import Measurement, Version, measurements
from dlojz.hardware.gpus import ATTENTION_KERNELS
from dlojz.planner.explain import (
    LayoutVerdict,
    changes_from_fastest,
    matching,
    refused,
    verdict_of,
    verdict_refused,
    verdict_sentence,
)
from dlojz.planner.export import documents, is_run, run_config
from dlojz.planner.planned_memory import RankMemory, other_loss_bytes
from dlojz.planner.question import MARGINAL, WITHIN_ERROR, Question
from dlojz.planner.search import MOST_SIMULATED, PARTS, SearchResult, front_of, rank_memories
from dlojz.planner.space import (
    CODE,
    REASONS,
    candidates_of,
    columns_of,
    degrees_words,
    gigabytes,
    layout_row,
    layout_title,
    more_percent,
    part_words,
    reason_counts,
    reason_words,
)
from dlojz.planner.tree import Tree, tree_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

OTHER_GENERATION = 4.0
"""Doublings that another generation of GPUs counts for; another cluster of the same one counts for 1."""
FAR = 6.0
"""Distance from which a row says little."""


@dataclass(frozen=True)
class NearestMeasurement:
    """Published measurement that is closest to a planned layout.

    Attributes:
        distance: in doublings and unlike choices, at least 0.
        measured_s: seconds of its step.
        predicted_s: by the same calibration that planned.
    """

    row: Measurement
    distance: float
    measured_s: float
    predicted_s: float

    @property
    def words(self) -> str:
        """Row and error of the prediction, in one line."""
        row, billions = self.row, decimal(self.row.size.num_parameters / 1e9, 1)
        error = 100 * (self.predicted_s / self.measured_s - 1)
        percent = decimal(abs(error), 1)
        sign = "+" if error >= 0 else "−"
        far = say(en="; far from this plan", fr=" ; loin de ce plan") if self.distance > FAR else ""
        layout = f"{row.gpus} GPU, {degrees_words(row.dp, row.tp, row.pp, row.cp)}, batch {row.global_batch}"
        facts = {
            "layout": layout,
            "measured": decimal(self.measured_s, 2),
            "sign": sign,
            "percent": percent,
            "far": far,
        }
        return verdict_sentence("nearest row", row=row, billions=billions, **facts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "row": self.row.row,
            "source": self.row.source,
            "distance": round(self.distance, 2),
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
        }


@cache
def _known() -> tuple[Measurement, ...]:
    # One GPU: nothing is laid out there.
    return tuple(row for row in measurements() if row.usable and row.seconds and row.outcome == "ran" and row.gpus > 1)


def distance(question: Question, candidate: LayoutFields, row: Measurement) -> float:
    """Distance of a row: doublings apart, and choices that differ."""
    planned_size, size = question.subject.size, row.size
    assert planned_size is not None
    total = 0.0
    for planned, measured in (
        (planned_size.num_parameters, size.num_parameters),
        (candidate.world_size, row.gpus),
        (candidate.tp, row.tp),
        (candidate.pp, row.pp),
        (candidate.cp, row.cp),
        (planned_size.sequence_length * candidate.global_batch, size.sequence_length * row.global_batch),
    ):
        total += abs(log2(planned / measured))  # doublings: 8 GPUs against 32 count 2
    # Not printed in the table: half a doubling.
    total += 0.5 * abs(log2(candidate.micro_batch / row.micro_batch)) if row.micro_batch else 0.5
    # A ZeRO stage counts half.
    total += (candidate.checkpointing != row.checkpointing) + 0.5 * abs(candidate.zero - row.zero)
    total += 0.5 * (candidate.sequence_parallel != row.sequence_parallel) + 0.5 * (candidate.chunks != row.chunks)
    if row.cluster != question.cluster.name:
        same_generation = cluster(row.cluster).gpu.generation == question.cluster.gpu.generation
        total += 1.0 if same_generation else OTHER_GENERATION
    return total


def closest(question: Question, candidate: LayoutFields) -> NearestMeasurement | None:
    """Find the closest measured row; None for an image model, of which none is published."""
    if question.subject.size is None:
        return None
    mixed = question.subject.num_experts > 0
    rows = [row for row in _known() if (row.size.experts > 0) == mixed]  # a mixture beside mixtures alone
    row_distance, row = min(((distance(question, candidate, row), row) for row in rows), key=lambda pair: pair[0])
    # A row without its micro-batch is timed with the one that this calibration finds fastest.
    row = completed(row, question.calibration)
    layout = Layouts.from_measurements([row])
    prediction = estimate(workload(row.size), cluster(row.cluster), layout, question.calibration)
    # One row, so index 0.
    return NearestMeasurement(row, row_distance, float(row.seconds or 0.0), float(prediction.step_s[0]))


FILE: Final = Path(__file__).with_name("data") / "held_out.json"


class HeldOutErrors(NamedTuple):
    """Errors of a profile's fits on tables that they saw no row of.

    Attributes:
        low, high: factors on a predicted time between which four in five of the measured ones were.
        mean: mean absolute error, as a share.
    """

    rows: int
    low: float
    high: float
    mean: float


@cache
def held_out(profile: str) -> HeldOutErrors | None:
    """Look up the held-out errors of a shipped profile; None for another calibration."""
    shipped_errors: dict[str, list[float]] = json.loads(FILE.read_text(encoding="utf-8"))
    errors = shipped_errors.get(profile)
    return None if errors is None else HeldOutErrors(int(errors[0]), *errors[1:])


JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Summary):
    """Admitted layout with its seconds, bytes and energy.

    Attributes:
        candidate: the layout; its engine may be a library that the lab does not run.
        estimated_s: seconds of a step in closed form.
        parts: seconds by part, which add up to it.
        memory: bytes on the fullest GPU by category.
        energy_j: of a step, all GPUs, in joules.
        simulation: the simulated step; None without one.
    """

    candidate: LayoutFields
    estimated_s: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    energy_j: float
    simulation: StepSimulation | None
    found: SearchResult

    @property
    def question(self) -> Question:
        """The question that it answers."""
        return self.found.space.question

    @property
    def title(self) -> str:
        """The whole layout in one line."""
        return layout_title(self.candidate)

    @property
    def is_run(self) -> bool:
        """Whether `dlojz.run` runs it."""
        return is_run(self.question, self.candidate)

    @property
    def step_s(self) -> float:
        """Seconds of a step: simulated where it was, else in closed form."""
        return self.estimated_s if self.simulation is None else self.simulation.step_s

    @property
    def held_out(self) -> HeldOutErrors | None:
        """Errors of the calibration on rows it was not fitted on; None where none are known."""
        return held_out(self.question.calibration.name)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds between which four in five held-out rows would lie."""
        errors = self.held_out
        return None if errors is None else (self.step_s * errors.low, self.step_s * errors.high)

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest GPU."""
        return sum(self.memory.values())

    @property
    def margin_bytes(self) -> float:
        """Bytes of the GPU that stay free."""
        return self.question.device_bytes - self.memory_bytes

    @property
    def is_marginal(self) -> bool:
        """Whether it fits, but within 10 % of the GPU's memory."""
        return self.memory_bytes > MARGINAL * self.question.device_bytes

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of a step."""
        return self.candidate.world_size * self.step_s / 3600

    @property
    def energy_kwh(self) -> float:
        """kWh of a step, all GPUs."""
        return self.energy_j / JOULES_PER_KWH

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas together."""
        return self.candidate.global_batch / self.step_s  # a global batch counts the samples of all replicas

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """Memory of a rank of every stage."""
        return rank_memories(self.found.space, self.candidate)

    @cached_property
    def evidence(self) -> NearestMeasurement | None:
        """The closest measured row; None for an image model."""
        return closest(self.question, self.candidate)

    @property
    def time_words(self) -> str:
        """Seconds of a step with their interval."""
        text = f"{seconds(self.step_s)}"
        span = self.interval_s
        return text if span is None else f"{text} ({seconds(span[0])} – {seconds(span[1])})"

    @cached_property
    def software_words(self) -> str:
        """The facts of the software that the seconds and bytes rest on, and what the loss computed otherwise needs."""
        layouts = self.found.space.cost_layouts(columns_of([self.candidate]))
        words = []
        for name, title in (("torch", "torch"), ("transformer_engine", "Transformer Engine")):
            if number := int(software(layouts, name)[0]):
                words.append(f"{title} {Version(*divmod(number, 100))}")
        if self.question.fused_attention and not self.question.subject.is_image:
            words.append(f"attention {ATTENTION_KERNELS[int(layouts.attention_kernel[0])]}")
        fused = software(layouts, "fused_optimizer")[0] > 0
        words.append(say(en="Adam in one kernel", fr="Adam en un noyau") if fused else "Adam torch")
        if (other := other_loss_bytes(self.found.space, self.candidate)) is not None:
            needed = gigabytes(other)
            words.append(
                verdict_sentence("fused loss" if self.question.fused_loss else "loss pass by pass", needed=needed)
            )
        return ", ".join(words)

    @property
    def bill(self) -> Bill | None:
        """Bill of the whole training, without failures and restarts; None where its steps are not known."""
        steps = self.question.steps
        # A step's seconds × steps: no warm-up, no restart.
        return None if steps is None else bill(self.question.cluster, self.candidate.world_size, steps * self.step_s)

    def advice(self) -> list[str]:
        """Warnings about this layout."""
        candidate, warnings = self.candidate, []
        full = self.question.cluster.gpus_per_node
        if candidate.tp > full:
            warnings.append(verdict_sentence("tensor parallelism across nodes", tp=candidate.tp, full=full))
        if self.is_marginal:
            free = gigabytes(self.margin_bytes)
            warnings.append(verdict_sentence("marginal", free=free, roomier=self._roomier()))
        bubble = self.parts["bubble"] / self.estimated_s
        if bubble > 0.2:
            warnings.append(verdict_sentence("waiting pipeline", percent=100 * bubble))
        return warnings

    def _roomier(self) -> str:
        """The fastest layout that is not marginal, as the rest of a sentence; empty if there is none."""
        total = self.found.memory.total_bytes
        # `admitted`, `memory` and `step_s` are parallel arrays in order of seconds, so the first index is the fastest.
        roomy = np.flatnonzero(total <= MARGINAL * self.question.device_bytes)
        if not roomy.size:
            return ""
        index = int(roomy[0])
        title = layout_title(self.found.layout(index))
        free = gigabytes(self.question.device_bytes - float(total[index]))
        # Against the closed form: both sides without simulation.
        extra_time = more_percent(float(self.found.step_s[index]) / self.estimated_s)
        return say(en="; ", fr=" ; ") + verdict_sentence("roomier", title=title, free=free, extra_time=extra_time)

    def config(self, **fields: Any) -> RunConfig:
        """The layout as a `RunConfig` that `dlojz.run` takes; see `dlojz.planner.export.run_config`."""
        return run_config(self.question, self.candidate, **fields)

    def documents(self) -> dict[str, str]:
        """The layout as files, by name; see `dlojz.planner.export.documents`."""
        return documents(self.question, self.candidate)

    def _sharded(self) -> list[tuple[str, str]]:
        """Over which ranks the states are sharded, as a line of the summary; none where all share one copy."""
        copies = int(self.found.space.state_copies(columns_of([self.candidate]))[0])
        if copies == 1:
            return []
        shards = self.candidate.dp * self.candidate.cp // copies
        return [
            (
                say(en="states sharded over", fr="états découpés sur"),
                say(en=f"{shards} ranks, {copies} copies (HSDP)", fr=f"{shards} rangs, {copies} copies (HSDP)"),
            )
        ]

    def lines(self) -> list[tuple[str, str]]:
        """Summary, as pairs of name and value."""
        largest = sorted(self.parts, key=lambda name: -self.parts[name])[:4]
        shares = ", ".join(f"{part_words(name)} {100 * self.parts[name] / self.estimated_s:.0f} %" for name in largest)
        how = say(en="closed form", fr="forme close") if self.simulation is None else say(en="simulated", fr="simulée")
        rows = [
            (say(en="layout", fr="configuration"), self.title),
            *self._sharded(),
            (say(en=f"step ({how})", fr=f"itération ({how})"), self.time_words),
            (say(en="of which", fr="dont"), shares),
            (
                say(en="memory of the fullest GPU", fr="mémoire du GPU le plus rempli"),
                f"{gigabytes(self.memory_bytes)} / {gigabytes(self.question.device_bytes)}",
            ),
            (say(en="software", fr="logiciel"), self.software_words),
            (say(en="GPU-hours of 1000 steps", fr="heures GPU de 1000 itérations"), decimal(1000 * self.gpu_hours, 1)),
            (
                say(en="energy of 1000 steps", fr="énergie de 1000 itérations"),
                f"{decimal(1000 * self.energy_kwh, 1)} kWh",
            ),
        ]
        if self.bill is not None:
            rows.append((say(en="whole training", fr="entraînement entier"), self._training_words(self.bill)))
        kind = say(en="image model", fr="modèle d’images")
        if not self.question.subject.is_image:
            kind = say(en="model from elsewhere", fr="modèle venu d’ailleurs")
        none = verdict_sentence("no evidence", kind=kind)
        # Image models, and models from elsewhere, have no evidence.
        evidence_words = none if self.evidence is None else self.evidence.words
        if self.question.subject.num_experts:
            semicolon = say(en="; ", fr=" ; ")
            evidence_words = evidence_words.rstrip(".") + semicolon + verdict_sentence("mixtures are less close")
        rows.append((say(en="closest evidence", fr="mesure la plus proche"), evidence_words))
        if words := default_words(self.question.class_defaults, self.question.cluster.gpu):
            rows.append((say(en="not measured", fr="non mesuré"), words))
        rows += [(say(en="advice", fr="conseil"), sentence) for sentence in self.advice()]
        return rows

    def _training_words(self, account: Bill) -> str:
        days, hours, carbon = (
            decimal(account.days, 2),
            decimal(account.gpu_hours, 0),
            decimal(account.total_carbon_kg, 0),
        )
        return verdict_sentence("whole training", steps=self.question.steps, days=days, hours=hours, carbon=carbon)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "layout": layout_row(self.candidate),
            "step_s": self.step_s,
            "estimated_s": self.estimated_s,
            "simulated": self.simulation is not None,
            "interval_s": self.interval_s,
            "parts_s": dict(self.parts),
            "memory_bytes": dict(self.memory),
            "fullest_bytes": self.memory_bytes,
            "margin_bytes": self.margin_bytes,
            "gpu_hours": self.gpu_hours,
            "energy_kwh": self.energy_kwh,
            "samples_per_s": self.samples_per_s,
            "training": None if self.bill is None else asdict(self.bill),
            "advice": self.advice(),
        }


def question_row(question: Question) -> tuple[str, str]:
    """Write what was asked, as a pair of name and value."""
    gpus = say(en=" or ", fr=" ou ").join(map(str, question.gpus))
    size = format_count(question.subject.num_parameters)
    return say(en="question", fr="question"), verdict_sentence("question", question=question, size=size, gpus=gpus)


def seconds(value: float) -> str:
    """Seconds with three significant digits, in s or ms, with the decimal mark of the reader's language."""
    scaled, unit = (value, "s") if value >= 1 else (1e3 * value, "ms")
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{decimal(scaled, digits)} {unit}"


@dataclass(frozen=True, eq=False)
class RefusedLayouts(Sequence[LayoutVerdict]):
    """Refused layouts; each verdict is made when it is indexed.

    Attributes:
        places: flat places of the refused layouts.
    """

    found: SearchResult
    places: np.ndarray[Any, Any]

    @property
    def counts(self) -> dict[str, int]:
        """Count the layouts that each reason refuses; only reasons that occur."""
        return reason_counts(self.found.codes.reshape(-1)[self.places])

    def by(self, reason: str) -> RefusedLayouts:
        """Select those that one reason refuses.

        Raises:
            LabError: for an unknown reason.
        """
        if reason not in CODE or CODE[reason] <= CODE["same"]:  # codes up to "same" are no refusals
            raise LabError(one_of("reason", reason, REASONS[2:]))
        codes = self.found.codes.reshape(-1)[self.places]
        return RefusedLayouts(self.found, self.places[codes == CODE[reason]])

    def nearest(self) -> LayoutVerdict:
        """Find the one that is most like the fastest admitted layout.

        Raises:
            LabError: if there is none.
        """
        if not len(self):
            raise verdict_refused("no refusal")
        return self[int(np.argmin(changes_from_fastest(self.found, self.places)))]

    def __len__(self) -> int:
        return int(self.places.size)

    @overload
    def __getitem__(self, index: int) -> LayoutVerdict: ...
    @overload
    def __getitem__(self, index: slice) -> RefusedLayouts: ...
    def __getitem__(self, index: int | slice) -> LayoutVerdict | RefusedLayouts:
        if isinstance(index, slice):
            return RefusedLayouts(self.found, self.places[index])
        flat_index = self.places[index]
        reason = REASONS[int(self.found.codes.reshape(-1)[flat_index])]
        return refused(self.found, candidates_of(self.found.space, flat_index)[0], reason)

    def __iter__(self) -> Iterator[LayoutVerdict]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return "\n".join(f"{number:>9}  {reason_words(name)}" for name, number in self.counts.items())


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Summary):
    """Answer of `dlojz.plan`.

    Attributes:
        found: the search: every layout with its code, the admitted ones in order.
        simulations: of the fastest ones, by place.
    """

    found: SearchResult
    simulations: Mapping[int, StepSimulation]

    @property
    def question(self) -> Question:
        """The question that it answers."""
        return self.found.space.question

    def choice(self, index: int) -> Choice:
        """The admitted layout of a place, from 0, in order of the closed form's seconds."""
        result = self.found
        return Choice(
            result.layout(index),
            float(result.step_s[index]),
            {field.name: float(getattr(result.parts, field.name)[index]) for field in fields(Parts)},
            {name: float(getattr(result.memory, name)[index]) for name in PARTS},
            float(result.energy_j[index]),
            self.simulations.get(int(index)),
            result,
        )

    @cached_property
    def top(self) -> tuple[Choice, ...]:
        """Simulated layouts, fastest first; a marginal one behind those that are `WITHIN_ERROR` slower at most."""
        return self._ordered(self.simulations)

    def _ordered(self, indices: Iterable[int]) -> tuple[Choice, ...]:
        choices = (self.choice(index) for index in indices)
        return tuple(sorted(choices, key=lambda choice: choice.step_s * (1 + WITHIN_ERROR * choice.is_marginal)))

    @property
    def best(self) -> Choice:
        """The fastest layout that fits, by simulation, and not marginal where that makes no difference."""
        return (self.top or self._ordered(range(min(self.found.admitted.size, MOST_SIMULATED))))[0]

    @cached_property
    def pareto(self) -> tuple[Choice, ...]:
        """Layouts that no other beats in step time, GPU-hours, energy and free memory all at once, fastest first."""
        return tuple(self.choice(int(index)) for index in front_of(self.found))

    @property
    def refused(self) -> RefusedLayouts:
        """All refused layouts."""
        # Admitted (0) and "same" are no refusals.
        return RefusedLayouts(self.found, np.flatnonzero(self.found.codes.reshape(-1) > CODE["same"]))

    @property
    def tree(self) -> Tree:
        """Which strategy when: the decision tree of the course, computed for this question."""
        return tree_of(self.found)

    def why(self, **fields: Any) -> LayoutVerdict:
        """Explain why a layout is refused, or how far it is from the best.

        Args:
            **fields: of a layout: dp, tp, pp, cp, zero, micro_batch, schedule, chunks, checkpointing,
                sequence_parallel, offload, engine, gpus. What is left out is chosen as well as can be.

        Raises:
            LabError: for an unknown field or an illegal value.

        Example:
            `plan.why(dp=4, tp=8, pp=12, checkpointing="none")`
        """
        return verdict_of(self.found, fields)

    def choose(self, **fields: Any) -> Choice:
        """The fastest admitted layout with these values.

        Raises:
            LabError: if none is admitted; the sentence says why.
        """
        indices = matching(self.found, self.found.admitted, fields)
        if not indices.size:
            raise LabError(self.why(**fields).in_one_line)
        return self.choice(int(indices[0]))

    def lines(self) -> list[tuple[str, str]]:
        """Summary, as pairs of name and value."""
        result = self.found
        counts = self.refused.counts
        layouts, fit, unfit = (  # "same" is counted nowhere
            decimal(number, 0)
            for number in (result.num_layouts, result.admitted.size, result.num_layouts - result.admitted.size)
        )
        return [
            question_row(self.question),
            (
                say(en="searched", fr="cherché"),
                say(
                    en=f"{layouts} layouts: {fit} admitted, {unfit} refused, {len(self.simulations)} simulated",
                    fr=f"{layouts} configurations : {fit} admises, {unfit} refusées, {len(self.simulations)} simulées",
                ),
            ),
            *self.best.lines(),
            *((reason_words(name), decimal(number, 0)) for name, number in counts.items()),
        ]

    def table(self, max_rows: int = 12) -> RenderableType:
        """Lay out the best layouts, the Pareto front and the refusals for a terminal."""
        return table_of(self, max_rows)

    def figure(self, path: str | Path | None = None) -> Figure:
        """Draw the Pareto front, memory of every rank, waterfall of the step, refusals by reason.

        Raises:
            LabError: if the picture cannot be written.
        """
        return figure_of(self, path)

    def as_dict(self, max_rows: int = 12) -> dict[str, Any]:
        """Plain data, for JSON."""
        question, best = self.question, self.best
        evidence = best.evidence
        return {
            "model": question.subject.name,
            "parameters": question.subject.num_parameters,
            "cluster": question.cluster.name,
            "gpus": list(question.gpus),
            "batch": question.batch,
            "precision": question.run_precision,
            "calibration": question.calibration.name,
            "class_defaults": list(question.class_defaults),
            "layouts": self.found.num_layouts,
            "admitted": int(self.found.admitted.size),
            "refused": self.refused.counts,
            "best": best.as_dict()
            | {
                "ranks": [
                    {"stage": rank.stage, "layers": rank.layers, "in_flight": rank.in_flight, "bytes": rank.parts}
                    for rank in best.ranks
                ],
                "closest_evidence": None if evidence is None else evidence.as_dict(),
                "documents": best.documents(),
            },
            "top": [choice.as_dict() for choice in self.top[:max_rows]],
            "pareto": [choice.as_dict() for choice in self.pareto[:max_rows]],
            "tree": self.tree.as_dict(),
        }
