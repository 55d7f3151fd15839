"""Explain a layout: why it is refused or slower, and the smallest change that helps.

A verdict is made of the figures of the search and of one more estimate. The smallest change is looked for among *all*
admitted layouts: the fewest choices changed, then the shortest step. What a question leaves out is completed: by the
fastest admitted layout with the values given, else by the refused one that got furthest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dlojz.base.contract import check_whole
from dlojz.base.display_hook import html_of
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, decimal, one_of, say, shortest, significant
from dlojz.config.fields import LayoutFields
from dlojz.cost_model import CHECKPOINTING, Memories, Parts, step_parts
from dlojz.cost_model.layouts import Integers, Reals
from dlojz.planner.planned_memory import RankMemory, fits, layout_memories
from dlojz.planner.planned_model import OFFERS, Offer
from dlojz.planner.question import MOST_BATCH, MOST_GPUS, Question
from dlojz.planner.search import SearchResult, fullest, rank_memories, search
from dlojz.planner.space import (
    CODE,
    COLUMN_VALUES,
    FREE,
    REASONS,
    Space,
    candidates_of,
    columns_of,
    contexts_of,
    gigabytes,
    lacks,
    layout_row,
    layout_title,
    more_percent,
    part_words,
    planned_layout,
    run_refusal,
    sequence_parts,
    space_of,
)


@dataclass(frozen=True)
class LayoutChange:
    """Change from one layout to another, with its effect.

    Attributes:
        changed: name → (from, to).
        memory_delta_bytes: on the fullest GPU; nan where the first layout has no meaning.
        step_ratio: its step over the first one's (as if that one fitted); nan likewise.
        fits: whether it is admitted.
    """

    to: LayoutFields
    changed: dict[str, tuple[Any, Any]]
    memory_delta_bytes: float
    step_ratio: float
    step_s: float
    fits: bool

    @property
    def words(self) -> str:
        """Change and effect, in one line."""
        text = ", ".join(f"{name} {before} → {after}" for name, (before, after) in self.changed.items())
        if math.isnan(self.step_ratio):
            return text
        sign = "+" if self.memory_delta_bytes >= 0 else ""
        time = more_percent(self.step_ratio)
        return say(
            en=f"{text}: {sign}{gigabytes(self.memory_delta_bytes)}, {time} time",
            fr=f"{text} : {sign}{gigabytes(self.memory_delta_bytes)}, {time} de temps",
        )


def changed_fields(layout: LayoutFields, target: LayoutFields) -> dict[str, tuple[Any, Any]]:
    """What one would change to get another layout: name → (here, there), without what follows from it."""
    row, target_row = layout_row(layout), layout_row(target)
    return {name: (row[name], target_row[name]) for name in ("gpus", *FREE) if row[name] != target_row[name]}


def differences(space: Space, flat_indices: Integers, reference: LayoutFields) -> Integers:
    """Count the choices in which each of some layouts differs from one; schedule and chunks are one choice."""
    columns, reference_columns = space.columns(flat_indices), columns_of([reference])
    # (choices, layouts): True where they differ.
    unlike = {name: columns[name] != reference_columns[name] for name in ("gpus", *FREE)}
    unlike["schedule"] |= unlike.pop("chunks")  # so changing both counts once
    counted: Integers = np.sum(list(unlike.values()), axis=0)
    return counted


def changes_from_fastest(result: SearchResult, flat_indices: Integers) -> Integers:
    """Count the choices in which each of some layouts differs from the fastest admitted one."""
    return differences(result.space, flat_indices, result.layout(0))


def smallest_change(result: SearchResult, candidate: LayoutFields, meaningful: bool) -> LayoutChange | None:
    """Find the admitted layout that differs in the fewest choices; of these the fastest."""
    if not result.admitted.size:
        return None
    # The first of equals, which is the fastest.
    index = int(np.argmin(differences(result.space, result.admitted, candidate)))
    return changes(result, candidate, [result.layout(index)], meaningful)[0]


def _estimated(space: Space, columns: Mapping[str, Integers]) -> tuple[Memories, Reals]:
    """Bytes of layouts, and seconds of a step in closed form."""
    question = space.question
    parts = step_parts(question.subject.workload, question.cluster, space.cost_layouts(columns), question.calibration)
    return layout_memories(space, columns), parts.step_s


def changes(
    result: SearchResult, candidate: LayoutFields, alternatives: Sequence[LayoutFields], meaningful: bool
) -> list[LayoutChange]:
    """Compare a layout with others."""
    if not alternatives:
        return []
    # Row 0 is the reference. A meaningless candidate has no bytes: its place is taken, its differences become nan.
    columns = columns_of([candidate if meaningful else alternatives[0], *alternatives])
    memories, step = _estimated(result.space, columns)
    on_gpu, on_host = fits(result.space, columns, memories)
    admissible = on_gpu & on_host & (step <= result.space.question.step_limit_s)
    total = memories.total_bytes
    unknown = 0.0 if meaningful else math.nan  # x + nan = nan: for every difference at once
    return [
        LayoutChange(
            alternative,
            changed_fields(candidate, alternative),
            float(total[index] - total[0]) + unknown,
            float(step[index] / step[0]) + unknown,
            float(step[index]),
            bool(admissible[index]),
        )
        for index, alternative in enumerate(alternatives, start=1)
    ]


def lighter_neighbours(question: Question, layout: LayoutFields) -> Iterator[LayoutFields]:
    """Yield layouts that differ in one choice which saves memory."""

    def changed(**fields: Any) -> LayoutFields:
        return layout.model_copy(update=fields)

    # `every_second` stands last in the list, but no engine of OFFERS has it: `code_of` drops it.
    for kind in CHECKPOINTING[CHECKPOINTING.index(layout.checkpointing) + 1 :]:
        yield changed(checkpointing=kind)
    if layout.tp > 1 and not layout.sequence_parallel:
        yield changed(sequence_parallel=True)
    for zero in range(layout.zero + 1, 4):
        yield changed(zero=zero)
    if layout.micro_batch > 1:
        half = layout.micro_batch // 2
        # The global batch stays: twice as many micro-batches.
        yield changed(micro_batch=half, micro_batches=question.batch // (layout.dp * half))
    if layout.dp % 2 == 0:
        dp = layout.dp // 2
        fewer = {"dp": dp, "micro_batches": question.batch // (dp * layout.micro_batch)}
        yield changed(**fewer, tp=2 * layout.tp)
        yield changed(**fewer, pp=2 * layout.pp)
        # Twice as many expert ranks need both: replicas, and experts that divide.
        if layout.dp % (2 * layout.ep) == 0 and max(1, question.subject.num_experts) % (2 * layout.ep) == 0:
            yield changed(ep=2 * layout.ep)
        if 2 * layout.cp in contexts_of(question.subject, 2 * layout.cp):
            yield changed(**fewer, cp=2 * layout.cp)
    if layout.offload == "none":
        yield changed(offload="optimizer")


def code_of(question: Question, layout: LayoutFields) -> str:
    """Find the reason against a layout that is known without its bytes; empty if none."""
    fixed_values = {name: column.tolist() for name, column in columns_of([layout]).items() if name in FREE}
    codes = space_of(question, fixed_values, (layout.world_size,)).codes  # one degree, one option: a 1 × 1 space
    return REASONS[int(codes.reshape(-1)[0])] if codes.size else "gpus"  # empty: no such pair of schedule and chunks


_FILE: Final = Path(__file__).with_name("data") / "verdicts.md"
verdict_sentence = Sentences(_FILE)
verdict_refused = verdict_sentence.refused
"""A sentence about a layout, by its key, and the error that says one."""


def _wrong_product(layout: LayoutFields, gpus: int) -> str:
    names, numbers = "dp × tp × pp", f"{layout.dp} × {layout.tp} × {layout.pp}"
    if layout.cp > 1:
        names, numbers = f"{names} × cp", f"{numbers} × {layout.cp}"
    return verdict_sentence("gpus", names=names, numbers=numbers, layout=layout, gpus=gpus)


def _split(question: Question, layout: LayoutFields) -> str:
    experts = question.subject.num_experts
    if max(1, experts) % layout.ep:
        return verdict_sentence("experts" if experts else "no experts", question=question, layout=layout)
    spreads = OFFERS[layout.engine].spreads_experts
    ranks = f"dp × cp × tp = {layout.replicas * layout.tp}" if spreads else f"dp={layout.dp}"
    if (layout.replicas * layout.tp if spreads else layout.dp) % layout.ep:
        return verdict_sentence("ranks of experts", layout=layout, ranks=ranks)
    if sentence := question.subject.split_conflict(layout.tp):
        return sentence
    assert question.subject.size is not None
    return verdict_sentence("heads", question=question, layout=layout)


def _sequence(question: Question, layout: LayoutFields) -> str:
    if layout.cp == 1:
        return verdict_sentence("sequence", question=question, layout=layout)
    parts = int(sequence_parts(layout.tp, layout.cp, layout.sequence_parallel))
    shared = f" × tp = {layout.tp}" if layout.sequence_parallel else ""
    return verdict_sentence("context", question=question, layout=layout, parts=parts, shared=shared)


def _stages(question: Question, layout: LayoutFields) -> str:
    layers = question.subject.num_layers
    stage_layers = -(-layers // layout.pp)  # rounded up
    filled = -(-layers // stage_layers)  # stages that get a layer
    return verdict_sentence("stages", layers=layers, stage_layers=stage_layers, filled=filled, layout=layout)


def _chunks(question: Question, layout: LayoutFields) -> str:
    layers, number = question.subject.num_layers, layout.pp * (layout.chunks or 1)
    return verdict_sentence(
        "chunks, counted" if OFFERS[layout.engine].slots else "chunks",
        **{
            "layers": layers,
            "with_logits": layers + 1,
            "with_embedding": layers + 2,
            "layout": layout,
            "number": number,
        },
    )


def _not_offered(question: Question, layout: LayoutFields) -> str:
    """What of a layout its library does not offer."""
    if question.is_of_runs and (sentence := run_refusal(question.subject, question.run_precision, layout)):
        return sentence
    offer, columns = OFFERS[layout.engine], columns_of([layout])
    with_pipeline = say(en=" with a pipeline", fr=" avec un pipeline") if layout.pp > 1 else ""
    lack = next(lack for lack, mask in lacks(question, columns, columns) if mask.any())
    if lack == "zero":
        stages = ", ".join(map(str, offer.zero_pipeline if layout.pp > 1 else offer.zero))
        return verdict_sentence("no ZeRO stage", layout=layout, with_pipeline=with_pipeline, stages=stages)
    stages = ", ".join(map(str, offer.context))
    if lack == "context":
        lack = _context_lack(question, offer)
    words = verdict_sentence(f"lack: {lack}", layout=layout, with_pipeline=with_pipeline, stages=stages)
    return verdict_sentence("not offered", layout=layout, lack=words)


CONTEXT_LACKS: Final = ("images", "context", "fused attention", "context with ZeRO")


def _context_lack(question: Question, offer: Offer) -> str:
    """What of context parallelism is missing, one of `CONTEXT_LACKS`."""
    offered = (not question.subject.is_image, bool(offer.context), question.fused_attention, False)
    return CONTEXT_LACKS[offered.index(False)]


_REASONS: Final[dict[str, Callable[[Question, LayoutFields], str]]] = {
    "same": lambda question, layout: verdict_sentence("same"),
    "engine": _not_offered,
    "split": _split,
    "sequence": _sequence,
    "stages": _stages,
    "chunks": _chunks,
    "batch": lambda question, layout: verdict_sentence(
        "batch", question=question, layout=layout, product=layout.dp * layout.micro_batch
    ),
    "schedule": lambda question, layout: verdict_sentence(
        "few micro-batches" if layout.chunks == 1 else "unsuited micro-batches", layout=layout
    ),
}


def cost_sentence(space: Space, layout: LayoutFields, reason: str, step_s: float, host_bytes: float) -> str:
    """Say why bytes or seconds refuse a layout, with the stage and the category that weigh most."""
    question = space.question
    if reason == "hours":
        assert question.steps is not None and question.hours is not None
        # Seconds of a step → hours of the training.
        took, limit = decimal(step_s * question.steps / 3600), shortest(question.hours)
        name = f" ({question.limit})" if question.limit else ""
        return verdict_sentence("hours", question=question, took=took, limit=limit, name=name)
    if reason == "host":
        node_gpus = min(layout.world_size, question.cluster.gpus_per_node)
        needs, has = gigabytes(host_bytes * node_gpus), gigabytes(question.cluster.host_memory_bytes)
        return verdict_sentence("host", node_gpus=node_gpus, needs=needs, has=has)
    # Out of memory: name the stage and the category that weigh most.
    rank = fullest(rank_memories(space, layout))
    name = max(rank.parts, key=lambda part: rank.parts[part])
    over = gigabytes(rank.total_bytes - question.device_bytes)
    return verdict_sentence("memory", over=over, stage=rank.stage, weight=weight_words(layout, rank, name))


def weight_words(layout: LayoutFields, rank: RankMemory, name: str) -> str:
    """Say what fills the fullest rank: its largest category with its factors, and the rest."""
    parts, batches = rank.parts, rank.in_flight
    facts: dict[str, object] = {"layers": rank.layers, "activations": gigabytes(parts["activations"])}
    facts["states"] = gigabytes(sum(parts[key] for key in ("weights", "gradients", "optimizer")))
    if name == "activations":
        micro_batch = gigabytes(parts[name] / batches if batches else 0.0)
        in_flight = decimal(batches, 0 if batches % 1 == 0 else 1)
        return verdict_sentence("full of activations", **facts, in_flight=in_flight, micro_batch=micro_batch)
    if name in ("weights", "gradients", "optimizer"):
        return verdict_sentence("full of states", **facts, layout=layout)
    return verdict_sentence("full", **facts, part=part_words(name), part_bytes=gigabytes(parts[name]))


@dataclass(frozen=True)
class LayoutVerdict:
    """Verdict on one layout.

    Attributes:
        reason: one of `dlojz.planner.space.NAMES`; empty if it is admitted.
        sentence: why, with its figures.
        change: the smallest one that would admit it; None if it is admitted, or nothing is.
        levers: for want of memory, what single changes would bring.
        rank: its place among the admitted, from 1; 0 if refused.
        step_s, memory_bytes: as estimated; nan where the layout has no meaning.
    """

    candidate: LayoutFields
    reason: str
    sentence: str
    change: LayoutChange | None
    levers: tuple[LayoutChange, ...]
    rank: int
    step_s: float
    memory_bytes: float

    @property
    def title(self) -> str:
        """The whole layout in one line."""
        return layout_title(self.candidate)

    @property
    def admitted(self) -> bool:
        """Whether a run can have it."""
        return not self.reason

    @property
    def in_one_line(self) -> str:
        """Layout, reason and smallest change."""
        colon = say(en=": ", fr=" : ")
        change = "" if self.change is None else f" → {self.change.words}"
        return self.title + colon + self.sentence + change

    def __str__(self) -> str:
        lines = [self.title, self.sentence]
        if self.change is not None:
            words = self.change.words
            lines.append(say(en=f"Smallest change: {words}.", fr=f"Plus petit changement : {words}."))
        marks = {True: say(en="fits:", fr="suffit :"), False: say(en="not enough:", fr="insuffisant :")}
        lines += [f"  {marks[lever.fits]} {lever.words}" for lever in self.levers]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_of(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        change = None if self.change is None else {"to": layout_row(self.change.to), "words": self.change.words}
        return {
            "layout": layout_row(self.candidate),
            "reason": self.reason,
            "sentence": self.sentence,
            "smallest_change": change,
            "levers": [{"words": lever.words, "fits": lever.fits} for lever in self.levers],
            "rank": self.rank,
            "step_s": None if math.isnan(self.step_s) else self.step_s,
            "memory_bytes": None if math.isnan(self.memory_bytes) else self.memory_bytes,
        }


def refused(result: SearchResult, candidate: LayoutFields, reason: str, *, gpus: int = 0) -> LayoutVerdict:
    """Judge a refused layout; where memory is missing, single changes are tried, which takes milliseconds.

    Args:
        gpus: that its degrees do not multiply to, for the reason `gpus`.
    """
    meaningful = reason in ("memory", "host", "hours")  # its degrees make sense, so bytes and seconds exist
    step, memory, question = math.nan, math.nan, result.space.question
    if meaningful:
        memories, step_s = _estimated(result.space, columns_of([candidate]))
        step, memory = float(step_s[0]), float(memories.total_bytes[0])
        sentence = cost_sentence(result.space, candidate, reason, step, float(memories.host[0]))
    elif reason == "gpus":
        sentence = _wrong_product(candidate, gpus)
    else:
        sentence = _REASONS[reason](question, candidate)
    change = smallest_change(result, candidate, meaningful)
    if change is not None and reason == "gpus":
        change.changed.pop("gpus", None)  # it follows from the degrees, and was given
    tried: list[LayoutChange] = []
    if reason == "memory":
        # A lever that is illegal itself is none.
        legal = [neighbour for neighbour in lighter_neighbours(question, candidate) if not code_of(question, neighbour)]
        # Those that fit first, then the fastest.
        tried = sorted(changes(result, candidate, legal, True), key=lambda lever: (not lever.fits, lever.step_s))
    return LayoutVerdict(candidate, reason, sentence, change, tuple(tried), 0, step, memory)


def admitted(result: SearchResult, index: int) -> LayoutVerdict:
    """Judge an admitted layout: its rank, and what makes it slower than the first."""
    step = float(result.step_s[index])
    if index == 0:
        sentence = verdict_sentence("fastest")
    else:
        deltas = {
            name: float(getattr(result.parts, name)[index] - getattr(result.parts, name)[0])
            for name in Parts.__dataclass_fields__
        }
        worst = sorted(deltas, key=lambda name: -deltas[name])[:2]
        part_text = ", ".join(
            f"{part_words(name)} +{significant(deltas[name])} s" for name in worst if deltas[name] > 0
        )
        percent = decimal(100 * (step / float(result.step_s[0]) - 1))
        count = result.admitted.size
        sentence = verdict_sentence("fits", number=index + 1, count=count, percent=percent, parts=part_text)
    total = float(result.memory.total_bytes[index])
    return LayoutVerdict(result.layout(index), "", sentence, None, (), index + 1, step, total)


def beside(result: SearchResult, value_result: SearchResult) -> LayoutVerdict:
    """Judge a layout that fits but has a value which the search does not try.

    Args:
        value_result: a search of that value alone.
    """
    step = float(value_result.step_s[0])
    rank = int(np.searchsorted(result.step_s, step)) + 1  # admitted steps ascend; its place, had it been searched
    ratio = step / float(result.step_s[0])
    percent = decimal(100 * abs(ratio - 1))
    pace = say(en="faster", fr="rapide") if ratio < 1 else say(en="slower", fr="lente")
    sentence = verdict_sentence("fits with a value of its own", rank=rank, percent=percent, pace=pace)
    total = float(value_result.memory.total_bytes[0])
    return LayoutVerdict(value_result.layout(0), "", sentence, None, (), rank, step, total)


FIELDS: Final = ("gpus", "dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "schedule", "chunks", "checkpointing",
                 "sequence_parallel", "offload", "context_exchange", "engine")  # fmt: skip
"""By which a layout is asked for."""


def checked(fields: Mapping[str, Any]) -> dict[str, int]:
    """Check fields, and convert them to columns.

    Raises:
        LabError: for an unknown field, word or number.
    """
    legal: dict[str, tuple[Any, ...]] = {**COLUMN_VALUES, "zero": (0, 1, 2, 3)}
    columns: dict[str, int] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            raise LabError(one_of("field", name, FIELDS))
        if name not in legal:
            columns[name] = check_whole(name, value, {"micro_batch": MOST_BATCH, "chunks": 1024}.get(name, MOST_GPUS))
        # True == 1: a flag is no ZeRO stage.
        elif value not in legal[name] or (name == "zero" and isinstance(value, bool)):
            raise LabError(one_of(name, value, tuple(map(str, legal[name]))))
        else:
            columns[name] = legal[name].index(value)
    return columns


def matching(result: SearchResult, flat_indices: Integers, fields: Mapping[str, Any]) -> Integers:
    """Select the layouts that have these values: their places in `flat_indices`, in order."""
    columns = result.space.columns(flat_indices)
    column_values = checked(fields)
    # No field at all: every layout matches.
    return np.flatnonzero(
        np.all([columns[name] == value for name, value in column_values.items()] or [flat_indices >= 0], axis=0)
    )


def verdict_of(result: SearchResult, fields: Mapping[str, Any]) -> LayoutVerdict:
    """Judge the layout that some fields ask for.

    Raises:
        LabError: for an unknown field or an illegal value.
    """
    question = result.space.question
    if fields.get("engine") in OFFERS and fields["engine"] not in question.engines:
        question = replace(question, engines=(*question.engines, fields["engine"]))
        result = replace(result, space=replace(result.space, question=question))
    column_values = checked(fields)
    numbers = [column_values["gpus"]] if "gpus" in column_values else list(question.gpus)
    if not _some_degrees(question, column_values, numbers):
        return refused(result, _asked(question, column_values), "gpus", gpus=numbers[0])
    indices = matching(result, result.admitted, fields)
    if indices.size:
        return admitted(result, int(indices[0]))
    # The values asked for, of each column one; all other columns as in any search.
    fixed_values = {name: (value,) for name, value in column_values.items() if name != "gpus"}
    value_result = search(space_of(question, fixed_values, numbers))
    if value_result.admitted.size:  # with a value that the search does not try, a micro-batch of 5 say
        return beside(result, value_result)
    return refused(result, *_furthest(value_result, result))


def _some_degrees(question: Question, column_values: Mapping[str, int], numbers: Sequence[int]) -> bool:
    """Whether the degrees asked for can multiply to one of these numbers of GPUs."""
    degrees = {name: column_values[name] for name in ("dp", "tp", "pp", "cp") if name in column_values}
    # Of the degrees that were given; the others may be anything that fills `number`.
    product = math.prod(degrees.values())
    over = [number // product for number in numbers if number % product == 0]
    if {"dp", "tp", "pp"} <= set(degrees):  # what is left over is cp, where that was not given and is searched
        over = [
            degree for degree in over if degree in ([1] if "cp" in degrees else contexts_of(question.subject, degree))
        ]
    return bool(over)


def _asked(question: Question, column_values: Mapping[str, int]) -> LayoutFields:
    """The layout asked for, with the plainest values for what was left out."""
    fields: dict[str, Any] = {"engine": question.engines[0], "micro_batch": 1}
    fields |= {
        name: COLUMN_VALUES[name][value] if name in COLUMN_VALUES else value
        for name, value in column_values.items()
        if name != "gpus"
    }
    number = question.batch // (fields.get("dp", 1) * fields["micro_batch"])
    return planned_layout(**fields, micro_batches=number)


def _furthest(value_result: SearchResult, result: SearchResult) -> tuple[LayoutFields, str]:
    """Of layouts of which none is admitted, one whose reason comes last, and that reason.

    For bytes it is the lightest, else the one most like the fastest admitted layout.
    """
    codes, space = value_result.codes.reshape(-1), value_result.space
    if not codes.size:
        raise verdict_refused("values together")
    refusal_codes = codes[codes != CODE["same"]]  # a plainer layout says why better
    # Reasons are ordered: the largest code got furthest.
    code = int(refusal_codes.max()) if refusal_codes.size else CODE["same"]
    flat_indices = np.flatnonzero(codes == code)
    if code == CODE["memory"]:  # the only reason with bytes to sort by
        light = value_result.heavy_bytes[np.isin(value_result.heavy, flat_indices)]
        flat_indices = value_result.heavy[np.isin(value_result.heavy, flat_indices)][np.argsort(light, kind="stable")]
    else:
        flat_indices = flat_indices[np.argsort(differences(space, flat_indices, result.layout(0)), kind="stable")]
    return candidates_of(space, flat_indices[0])[0], REASONS[code]
