"""Space of all layouts of a question: degrees × options, with the reason that excludes each.

Every combination has one code: 0 where nothing speaks against it before its bytes are known, else its place in
`REASONS`. A combination that says the same as a plainer one (sequence parallelism with tp = 1) is no layout. Degrees ×
options is a matrix, so that a rule is one operation on all of them; outside the search a layout is the `LayoutFields`
of a run's configuration, not judged, so that a refused one can be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import Language, Sentences, decimal, language, minus, say
from dlojz.config.compatibility import check
from dlojz.config.fields import LayoutFields
from dlojz.config.run_compatibility import RUN
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import CHECKPOINTING, OFFLOAD, SCHEDULES, Layouts
from dlojz.cost_model.layouts import CONTEXT_EXCHANGES, WORDS, Integers, usual_kernel
from dlojz.models.foreign.elsewhere import CHAIN
from dlojz.planner.planned_model import OFFERS, Offer, Subject, question_sentence
from dlojz.planner.question import Question
from dlojz.prediction.shapes import check_parameters, check_stages_share_no_weight, model_shapes

REASONS: Final = (
    "", "same", "engine", "split", "sequence", "stages", "chunks", "batch", "schedule", "memory", "host", "hours",
)  # fmt: skip
"""The closed list of refusals, in the order in which they are looked at; `same`: a plainer layout stands for it.

What merely makes a layout slow is advice, never a reason.
"""
NAMES: Final = ("gpus", *REASONS[2:])
"""All reasons that are shown; `gpus` is met only where a layout is asked for by name."""
CODE: Final = {name: code for code, name in enumerate(REASONS)}
DEGREES: Final = ("gpus", "dp", "tp", "pp", "cp", "micro_batch", "micro_batches", "ep")
OPTIONS: Final = (
    "engine", "zero", "schedule", "chunks", "checkpointing", "sequence_parallel", "offload", "context_exchange",
)  # fmt: skip
FREE: Final = ("tp", "pp", "cp", "ep", "zero", "micro_batch", *OPTIONS[2:], "engine")
"""What one chooses; dp and the number of micro-batches follow."""
MOST_TENSOR: Final = 64
LEAST_CONTEXT: Final = 8192
"""Tokens that a context-parallel rank keeps at least where it is searched; so samples of 16384 tokens are the first.

Source: our choice of a limit: Llama 3 split 131072 tokens over 16 ranks and 8192 over none, torchtitan began with
65536 over 2, and Megatron Core's guide ("Parallelism Strategies Guide") speaks of 8 K tokens and more; NeMo's rows have
8192 tokens both over 2 ranks and over 1, with more tokens/s over 1.
"""
IMAGE_CHUNKS: Final = (2, 3, 4, 5, 6, 8)
"""Of an image model, whose chunks may hold unequal numbers of blocks; of a decoder every number that divides."""
TEXT_MICRO_BATCHES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
IMAGE_MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

WORDING: Final = Sentences(Path(__file__).with_name("data") / "words.md")
"""What reasons, parts, kinds of checkpointing and families of layouts are called, by their names."""
COLUMN_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    **{name: WORDS[name] for name in ("schedule", "checkpointing", "offload", "context_exchange")},
    "sequence_parallel": (False, True),
    "engine": tuple(OFFERS),
}
"""Values of the columns that hold places in a list."""


class PlannedLayout(LayoutFields):
    """Layout of a question: with what runs of this lab do not have.

    Attributes:
        context_exchange: what context-parallel ranks exchange, one of `CONTEXT_EXCHANGES`.
    """

    context_exchange: str = "ring"


def planned_layout(**fields: Any) -> PlannedLayout:
    """Build a layout that nothing judges, of any library of `OFFERS`; without a schedule it is 1f1b, of one chunk.

    `micro_batches` is 0 where the replicas do not divide the batch.
    """
    values: dict[str, Any] = {"schedule": "1f1b", "chunks": 1, **fields}
    return PlannedLayout.model_construct(**values)


def degrees_words(dp: int, tp: int, pp: int, cp: int = 1, ep: int = 1) -> str:
    """Write degrees in a few words; cp and ep where they exceed 1."""
    more_degrees = (f" · cp {cp}" if cp > 1 else "") + (f" · ep {ep}" if ep > 1 else "")
    return f"dp {dp} · tp {tp} · pp {pp}{more_degrees}"


def layout_title(layout: LayoutFields) -> str:
    """Write a whole layout of a question in one line: its library, degrees and options."""
    degrees = degrees_words(layout.dp, layout.tp, layout.pp, layout.cp, layout.ep)
    zero = [f"ZeRO-{layout.zero}"] if layout.zero else []
    chunks = f" × {layout.chunks}" if (layout.chunks or 1) > 1 else ""
    return layout_words(layout, layout.engine, degrees, *zero, schedule=f"{layout.schedule}{chunks}")


def layout_row(layout: LayoutFields) -> dict[str, Any]:
    """Plain data of a layout: what the search varies."""
    return {"gpus": layout.world_size} | {name: getattr(layout, name) for name in (*DEGREES[1:], *OPTIONS)}


@dataclass(frozen=True, eq=False)
class Space:
    """Degrees × options.

    Attributes:
        degrees: columns of `DEGREES`, one row each.
        options: columns of `OPTIONS`, one row each; words are their places in `COLUMN_VALUES`.
        codes: why each combination is out, degrees × options; 0 where its bytes decide.
    """

    question: Question
    degrees: Mapping[str, Integers]
    options: Mapping[str, Integers]
    codes: NDArray[np.uint8]

    def columns(self, flat_indices: Integers) -> dict[str, Integers]:
        """The columns of some layouts by their flat places."""
        # Flat index = row of degrees × number of options + column of options.
        rows, columns = np.divmod(flat_indices, self.codes.shape[1])
        return {name: column[rows] for name, column in self.degrees.items()} | {
            name: column[columns] for name, column in self.options.items()
        }

    def cost_layouts(self, columns: Mapping[str, Integers]) -> Layouts:
        """Convert columns for the cost model, with its engines and what they offer."""
        engine, precision = columns["engine"], self.question.precision
        # (engines, 2): the cost model's engine without and with a pipeline.
        costed = np.array([[offer.place(False), offer.place(True)] for offer in OFFERS.values()])
        cost_columns: dict[str, Any] = {name: columns[name] for name in (*DEGREES[1:], *OPTIONS[1:])}
        cost_columns |= {
            "engine": costed[engine, (columns["pp"] > 1).astype(int)],  # by engine, and by whether there is a pipeline
            "overlap": _of_offers(lambda offer: int(offer.overlap))[engine],
            "gradient_bytes": _of_offers(lambda offer: offer.gradient_bytes(precision))[engine],
            "dropout": _of_offers(lambda offer: int(offer.dropout))[engine],
            "fused_attention": int(self.question.fused_attention),
            "attention_kernel": _of_offers(lambda offer: usual_kernel(offer.costed[0], self.question.cluster.gpu))[
                engine
            ],
            "fused_loss": int(self.question.fused_loss),
            "tensor_overlap": columns["sequence_parallel"],  # Megatron-LM, arguments.py: only with it
            "embedding_slots": (
                counted_layers(
                    self.question.subject.num_layers,
                    columns["pp"],
                    columns["chunks"],
                    _of_offers(lambda offer: offer.slots)[engine],
                )
                == 2
            ).astype(int),
        }
        cost_columns |= dict(self.question.columns)
        if "zero_shards" in cost_columns:
            cost_columns["zero_shards"] = columns["dp"] * columns["cp"] // self.state_copies(columns)
        return Layouts.of(precision=precision, **cost_columns)

    def state_copies(self, columns: Mapping[str, Integers]) -> Integers:
        """Count the groups of replicas that hold a copy of the sharded states each (HSDP): 1 where all share one."""
        offered = columns["zero"] >= _of_offers(lambda offer: offer.hybrid)[columns["engine"]]
        return np.where(offered, copies_of(columns["dp"], columns["cp"], self.question.columns), 1)


def copies_of(dp: Any, cp: Any, columns: Mapping[str, int]) -> Any:
    """Count the copies of sharded states where a question's columns ask for shards over so many of dp · cp ranks.

    Shards are as near to that as replicas and ranks can be divided; of numbers or arrays.
    """
    shards = columns.get("zero_shards", 0)  # 0: gcd(n, 0) = n, so that all ranks share one copy
    return np.gcd(dp, dp * cp // np.gcd(dp * cp, shards))


def _of_offers(fact: Callable[[Offer], Any]) -> NDArray[Any]:
    """A fact of each library, by the places of the column `engine`."""
    return np.array([fact(offer) for offer in OFFERS.values()])


def columns_of(layouts: Sequence[LayoutFields]) -> dict[str, Integers]:
    """Convert layouts to columns."""
    rows = [layout_row(layout) for layout in layouts]
    return {
        name: np.array(
            [COLUMN_VALUES[name].index(row[name]) if name in COLUMN_VALUES else row[name] for row in rows], np.int64
        )
        for name in (*DEGREES, *OPTIONS)
    }


def candidates_from(columns: Mapping[str, Any]) -> list[LayoutFields]:
    """Convert columns to layouts."""
    lists = {
        name: [COLUMN_VALUES[name][index] for index in columns[name].tolist()]
        if name in COLUMN_VALUES
        else columns[name].tolist()
        for name in (*DEGREES[1:], *OPTIONS)  # `gpus` is left out: a layout computes it
    }
    return [planned_layout(**dict(zip(lists, row, strict=True))) for row in zip(*lists.values(), strict=True)]


def candidates_of(space: Space, flat_indices: Any) -> list[LayoutFields]:
    """Look up layouts of a space by their flat places."""
    return candidates_from(space.columns(np.atleast_1d(flat_indices)))


def reason_counts(codes: NDArray[np.uint8]) -> dict[str, int]:
    """Count the layouts that each reason refuses; only reasons that occur."""
    counts = np.bincount(codes.reshape(-1), minlength=len(REASONS))
    return {name: int(counts[CODE[name]]) for name in REASONS[2:] if counts[CODE[name]]}


def run_config_of(subject: Subject, precision: str, candidate: LayoutFields, **overrides: Any) -> RunConfig:
    """Convert a layout of a model of the catalogue, or from elsewhere, to a `RunConfig`.

    Args:
        candidate: the layout; its engine is one of the lab's.
        **overrides: other fields of `RunConfig`, or other values.

    Raises:
        LabError: if no run can have it.
    """
    layout: dict[str, Any] = {name: getattr(candidate, name) for name in LayoutFields.model_fields}
    layout["schedule"] = candidate.schedule if candidate.pp > 1 else None  # a run takes no schedule without a pipeline
    layout["chunks"] = candidate.chunks if candidate.pp > 1 and candidate.chunks != 1 else None
    sample = {"image_size": subject.image_size} if subject.is_image else {"sequence_length": subject.sequence_length}
    fields: dict[str, Any] = {"model": subject.catalogue, **sample, **dict(subject.adapters), "precision": precision}
    return RunConfig.of(**{**fields, "device": "cuda", **layout, **overrides})


def running_engines(subject: Subject, precision: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Select the engines that run a model on two ranks, with one ZeRO stage at least.

    Raises:
        LabError: if none does; the sentence is that of the first.
    """
    sentences: dict[str, list[str]] = {}
    for name in names:
        layouts = [planned_layout(dp=2, zero=zero, engine=name) for zero in OFFERS[name].zero]
        # A refusal for each ZeRO stage; empty: it runs.
        sentences[name] = [run_refusal(subject, precision, layout) for layout in layouts]
    engines = tuple(name for name, refusals in sentences.items() if not all(refusals))
    if not engines:
        raise LabError(next(iter(sentences.values()))[0])
    return engines


def divisors(number: int) -> list[int]:
    """List all divisors, ascending."""
    # Up to √number; each divides once with its counterpart.
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def contexts_of(subject: Subject, ranks: int) -> list[int]:
    """List the context-parallel degrees to search: 1 alone for images and ordinary sequences."""
    max_degree = max(1, (subject.sequence_length or 0) // LEAST_CONTEXT)  # tokens of a rank ≥ LEAST_CONTEXT
    return [degree for degree in divisors(ranks) if degree <= max_degree]


def experts_of(subject: Subject, ranks: int) -> list[int]:
    """List the expert-parallel degrees to search: 1 alone for a dense model.

    They divide the experts, so that each rank holds as many, and the ranks that share them.
    """
    return [degree for degree in divisors(ranks) if max(1, subject.num_experts) % degree == 0]


def degrees_of(
    subject: Subject, gpus: Iterable[int], batch: int, fixed_values: Mapping[str, Sequence[int]]
) -> dict[str, Integers]:
    """Enumerate the degrees: replicas, tensor- and context-parallel ranks, stages, and micro-batches.

    Args:
        fixed_values: values to take of `tp`, `pp`, `cp`, `ep`, `micro_batch` instead of all; of `dp`, those to keep.
    """
    usual = IMAGE_MICRO_BATCHES if subject.is_image else TEXT_MICRO_BATCHES
    sizes = fixed_values.get("micro_batch") or [size for size in usual if size <= batch]
    rows = []
    for number in gpus:
        for tp in fixed_values.get("tp") or [divisor for divisor in divisors(number) if divisor <= MOST_TENSOR]:
            if number % tp:  # given values need not divide
                continue
            for pp in fixed_values.get("pp") or divisors(number // tp):
                if (number // tp) % pp:
                    continue
                for cp in fixed_values.get("cp") or contexts_of(subject, number // tp // pp):
                    dp = number // tp // pp // cp
                    if dp * cp * pp * tp != number or ("dp" in fixed_values and dp not in fixed_values["dp"]):
                        continue
                    shared = fixed_values.get("ep") or experts_of(subject, dp * cp * tp)
                    # Micro-batches: batch ÷ (dp · size); where that does not divide, the rule "batch" refuses.
                    rows += [
                        (number, dp, tp, pp, cp, size, batch // (dp * size), ep) for size in sizes for ep in shared
                    ]
    # (rows, degrees); (0, degrees) where nothing multiplies to the GPUs.
    table = np.array(rows, np.int64).reshape(-1, len(DEGREES))
    return dict(zip(DEGREES, table.T, strict=True))


def options_of(
    question: Question, fixed_values: Mapping[str, Sequence[int]], stages: Sequence[int]
) -> dict[str, Integers]:
    """Enumerate the combinations of options that each engine of a question offers.

    Args:
        fixed_values: values to take of a column instead, offered or not.
        stages: numbers of stages that occur, for which chunks are looked for.
    """
    rows: list[tuple[int, ...]] = []
    long = "cp" in fixed_values or (question.subject.sequence_length or 0) >= 2 * LEAST_CONTEXT
    for name in question.engines:
        engine, offer = COLUMN_VALUES["engine"].index(name), OFFERS[name]
        if engine not in fixed_values.get("engine", (engine,)):
            continue
        lists: list[Sequence[Any]] = [
            # Without and with a pipeline: the rule "engine" sorts them out.
            fixed_values.get("zero") or sorted({*offer.zero, *offer.zero_pipeline}),
            _orders(offer, fixed_values, chunks_of(question.subject, stages, offer.slots)),
            fixed_values.get("checkpointing") or [CHECKPOINTING.index(kind) for kind in offer.checkpointing],
            fixed_values.get("sequence_parallel") or range(1 + offer.sequence),  # [0] or [0, 1]
            fixed_values.get("offload") or [0, *map(OFFLOAD.index, offer.offload)],
            # Where the samples are too short for context parallelism there is nothing to choose.
            fixed_values.get("context_exchange")
            or [CONTEXT_EXCHANGES.index(word) for word in offer.exchanges][: 1 + long],
        ]
        rows += [
            (engine, zero, *order, checkpointing, sequence, offload, exchange)
            for zero, order, checkpointing, sequence, offload, exchange in product(*lists)
        ]
    return dict(zip(OPTIONS, np.array(rows, np.int64).reshape(-1, len(OPTIONS)).T, strict=True))


def counted_layers(layers: int, pp: ArrayLike, chunks: ArrayLike, slots: ArrayLike = 1) -> Integers:
    """Count what is added to a decoder's layers so that all chunks get equally many: 0; 2 where embedding and logits
    count as a layer each; 1 where the logits do; −1 where none of these divides, or `slots` is 0.

    Source: Megatron-LM, core/transformer/transformer_block.py, `get_num_layers_to_build`.
    """
    parts = np.asarray(pp) * np.asarray(chunks)
    uneven = np.where((layers + 2) % parts == 0, 2, np.where((layers + 1) % parts == 0, 1, -1))
    return np.where(layers % parts == 0, 0, np.where(np.asarray(slots) > 0, uneven, -1))


def chunks_of(subject: Subject, stages: Sequence[int], slots: bool) -> list[int]:
    """List the numbers of chunks, from 2 on, into which the layers of some number of stages can be dealt out."""
    if subject.is_image:
        return list(IMAGE_CHUNKS)
    chunks = np.arange(2, subject.num_layers // 2 + 2)[:, None]  # (chunks, stages)
    divide = counted_layers(subject.num_layers, [pp for pp in stages if pp > 1] or [2], chunks, slots) >= 0
    return [int(number) for number in chunks[divide.any(axis=1), 0]]


def _orders(offer: Offer, fixed_values: Mapping[str, Sequence[int]], many: Sequence[int]) -> list[tuple[int, int]]:
    """Schedules with their chunks."""
    interleaved = SCHEDULES.index("interleaved")
    schedules = fixed_values.get("schedule") or [SCHEDULES.index(schedule) for schedule in offer.schedules]
    if "chunks" in fixed_values:
        return [
            # Interleaved has 2 chunks or more, all others 1.
            (schedule, chunks)
            for schedule, chunks in product(schedules, fixed_values["chunks"])
            if (chunks > 1) == (schedule == interleaved)
        ]
    return [(schedule, chunks) for schedule in schedules for chunks in (many if schedule == interleaved else (1,))]


def space_of(
    question: Question, fixed_values: Mapping[str, Sequence[int]] | None = None, gpus: Iterable[int] | None = None
) -> Space:
    """Build the space of a question, with the reasons that are known without bytes or seconds.

    Args:
        fixed_values: values of columns to take instead of all.
        gpus: numbers of GPUs to try instead of the question's.
    """
    fixed_values = fixed_values or {}
    degrees = degrees_of(question.subject, gpus or question.gpus, question.batch, fixed_values)
    options = options_of(question, fixed_values, np.unique(degrees["pp"]).tolist())
    codes = np.zeros((degrees["dp"].size, options["zero"].size), np.uint8)  # (degrees, options)
    for name, mask in _rules(question, degrees, options):
        codes[(codes == 0) & mask] = CODE[name]  # the first reason stays
    space = Space(question, degrees, options, codes)
    if question.is_of_runs:
        _refuse_no_runs(space)
    return space


def _refuse_no_runs(space: Space) -> None:
    """Refuse the layouts that no run of this lab can have, by the rules of runs."""
    # One check per distinct ranks and option, not per micro-batch: each check may trace the model.
    judged = ("dp", "tp", "pp", "cp", "ep")
    ranks = np.stack([space.degrees[name] for name in judged], axis=1)
    distinct, group = np.unique(ranks, axis=0, return_inverse=True)
    for number in range(len(distinct)):
        rows = np.flatnonzero(group.reshape(-1) == number)
        for column in np.flatnonzero((space.codes[rows] == 0).any(axis=0)).tolist():
            # The first of the group that is not refused yet: it stands for all.
            row = rows[np.flatnonzero(space.codes[rows, column] == 0)[0]]
            candidate = candidates_of(space, row * space.codes.shape[1] + column)[0]
            if run_refusal(space.question.subject, space.question.run_precision, candidate):
                codes = space.codes[rows, column]
                # The whole group, but reasons found before stay.
                space.codes[rows, column] = np.where(codes == 0, CODE["engine"], codes)


def run_refusal(subject: Subject, precision: str, candidate: LayoutFields) -> str:
    """Say why no run of a model can have a layout, or none whose seconds are known; empty where one can."""
    if subject.is_elsewhere and candidate.tp > 1:
        return question_sentence("seconds of tensor parallelism", candidate=candidate)
    try:
        config = run_config_of(subject, precision, candidate)
        check(RUN, config)
        check_parameters(config, model_shapes(config))
    except LabError as error:
        return str(error)
    if not config.built_model.startswith(CHAIN):  # built as it is: no cut into blocks that could fail
        return ""
    pp = config.layout.pp
    if refused := _chain_refusal(config.model, config.image_size, config.sequence_length, pp, language()):
        return refused
    from dlojz.prediction.many_layouts import trace_refusal  # loads torch

    # Legal and a chain, but the trace itself may fail, e.g. with a checkpointing that the model does not bear.
    return trace_refusal(config)


@cache
# `_language` is part of the cache's key: the sentence is in the reader's language.
def _chain_refusal(model: str, image_size: int | None, tokens: int | None, pp: int, _language: Language) -> str:
    """Say why a model is no chain of blocks, or none that stages can divide; empty where it is one."""
    blocks: dict[str, Any] = {"pp": pp} if pp > 1 else {"checkpointing": "full"}
    config = RunConfig.of(model=model, image_size=image_size, sequence_length=tokens, micro_batches=pp, **blocks)
    try:
        shapes = model_shapes(config)
        if pp > 1:
            check_stages_share_no_weight(config, shapes)
    except LabError as error:
        return str(error)
    return ""


def _rules(
    question: Question, degrees: Mapping[str, Integers], options: Mapping[str, Integers]
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield each reason and whom it refuses; the first that applies is kept."""
    subject, batch = question.subject, question.batch
    dp, tp, pp, cp, size, number, ep = (degrees[name][:, None] for name in DEGREES[1:])  # (degrees, 1)
    # (1, options), so every rule broadcasts to (degrees, options)
    engine, zero, schedule, chunks, _, sequence, offload, exchange = (options[name][None, :] for name in OPTIONS)
    default_schedule = SCHEDULES.index("1f1b")
    yield "same", (sequence > 0) & (tp == 1)
    yield "same", (schedule != default_schedule) & (pp == 1)
    yield "same", (exchange > 0) & (cp == 1)
    # One data rank has nothing to shard, but offload needs a ZeRO stage even there.
    yield "same", (zero > 0) & (dp * cp == 1) & (offload == 0)
    if "torch" in question.engines:
        by_hand = engine == COLUMN_VALUES["engine"].index("by_hand")
        yield "same", by_hand & (ep == 1) & ((tp == 1) | (not subject.is_image))  # what torch runs too
    if question.keeps_bf16:  # one by one these would be many; `run_refusal` says why
        yield "engine", (tp * pp * cp * ep > 1) & (zero >= 0)
    yield from (("engine", mask) for _, mask in lacks(question, degrees, options))
    # Once per tp, not once per layout.
    fits = {int(degree): not subject.split_conflict(int(degree)) for degree in np.unique(tp)}
    sharing = np.where(_of_offers(lambda offer: offer.spreads_experts)[engine], dp * cp * tp, dp)
    yield "split", (max(1, subject.num_experts) % ep > 0) | (sharing % ep > 0)
    yield "split", ~np.vectorize(fits.__getitem__, otypes=[bool])(tp) if tp.size else tp > 0
    kv_heads = 0 if subject.size is None else subject.size.kv_heads
    yield "split", (exchange > 0) & (kv_heads % (tp * cp) > 0)
    tokens = subject.sequence_length
    parts = sequence_parts(tp, cp, sequence)
    yield "sequence", parts > 1 if tokens is None else tokens % parts > 0
    layers = subject.num_layers
    stage_layers = -(-layers // pp)  # layers of a stage, rounded up
    counted = counted_layers(layers, pp, chunks, _of_offers(lambda offer: offer.slots)[engine])
    # Rounded up, the last stages may get nothing: 9 layers on 6 stages fill 5.
    empty = (pp > layers) | (-(-layers // stage_layers) != pp if not subject.is_image else pp > layers)
    yield "stages", empty & ((counted < 1) | subject.is_image)
    # An image model's chunks may hold unequal numbers of blocks, one at least.
    yield "chunks", (chunks > 1) & (counted < 0 if not subject.is_image else pp * chunks > layers)
    # `chunks > 0` holds always: it gives the rule its options axis.
    yield "batch", (batch % (dp * size) > 0) & (chunks > 0)
    yield "schedule", (chunks > 1) & (number % pp > 0)  # Narayanan et al. 2021, §2.2: a multiple of pp
    yield "schedule", (schedule == SCHEDULES.index("zb-h1")) & (number < pp)


def sequence_parts(tp: Any, cp: Any, sequence_parallel: Any) -> Any:
    """Count the equal parts of a sample's tokens: one per tensor-parallel rank with sequence parallelism, two per
    context-parallel rank, an early and a late one, so that the causal mask leaves all of them as much work.

    Args:
        tp, cp, sequence_parallel: numbers, or arrays of them.

    Source: Megatron-LM, megatron/training/arguments.py, and torchtitan, distributed/parallel_dims.py
    (`seq_len_divisor`).
    """
    return np.where(np.asarray(sequence_parallel) > 0, tp, 1) * np.where(np.asarray(cp) > 1, 2 * np.asarray(cp), 1)


def lacks(
    question: Question, degrees: Mapping[str, Integers], options: Mapping[str, Integers]
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield what a library may not offer, and which layouts ask for it: (degrees, options)."""
    tp, pp, cp, ep = (degrees[name][:, None] for name in ("tp", "pp", "cp", "ep"))
    engine, zero, schedule, _, checkpointing, sequence, offload, exchange = (options[name][None, :] for name in OPTIONS)
    is_image = question.subject.is_image

    def offers(fact: Callable[[Offer], Collection[Any]], values: Sequence[Any], column: Integers) -> NDArray[np.bool_]:
        # (engines, values)
        table: NDArray[np.bool_] = _of_offers(lambda offer: [value in fact(offer) for value in values])
        return table[engine, column]  # (1, options)

    stages = range(4)
    yield "zero", np.where(pp > 1, ~offers(lambda offer: offer.zero_pipeline, stages, zero),
                           ~offers(lambda offer: offer.zero, stages, zero))  # fmt: skip
    mixture = question.subject.num_experts > 0
    yield (
        "tensor",
        (tp > 1) & ~_of_offers(lambda offer: offer.tensor[is_image] and (offer.spreads_experts or not mixture))[engine],
    )
    yield "schedule", (pp > 1) & ~offers(lambda offer: offer.schedules, SCHEDULES, schedule)
    yield "checkpointing", ~offers(lambda offer: offer.checkpointing, CHECKPOINTING, checkpointing)
    yield "split_backward", (schedule == SCHEDULES.index("zb-h1")) & (checkpointing > 0)
    rings = offers(lambda offer: offer.context, stages, zero) & (question.fused_attention and not is_image)
    yield "context", (cp > 1) & ~rings
    yield "exchange", (cp > 1) & ~offers(lambda offer: offer.exchanges, CONTEXT_EXCHANGES, exchange)
    experts = np.where(pp > 1, offers(lambda offer: offer.experts[1], stages, zero),
                       offers(lambda offer: offer.experts[0], stages, zero))  # fmt: skip
    yield "experts", (ep > 1) & ~experts
    yield "sequence", (sequence > 0) & ~_of_offers(lambda offer: offer.sequence and not is_image)[engine]
    # The least ZeRO stage of each offload, without one 9, above any: (engines, offloads).
    min_zero = _of_offers(lambda offer: [0, *(offer.offload.get(kind, 9) for kind in OFFLOAD[1:])])[engine, offload]
    yield "offload", (offload > 0) & ((zero < min_zero) | (ep > 1) | (pp > 1) | (tp > 1))


def layout_words(layout: LayoutFields, *opening: str, schedule: str = "") -> str:
    """Name a layout in one line: what opens it, then micro-batches, schedule, recomputation, SP and offload if any.

    Args:
        layout: of the planner or of a run.
        opening: its engine, degrees or title.
        schedule: of its pipeline, where the opening does not say it.
    """
    number = f" × {layout.micro_batches}" if layout.micro_batches else ""
    parts = [*opening, f"micro-batch {layout.micro_batch}{number}"]
    parts += [schedule] if schedule and layout.pp > 1 else []
    parts += [WORDING(layout.checkpointing)] if layout.checkpointing != "none" else []
    parts += ["SP"] if layout.sequence_parallel else []
    exchange = getattr(layout, "context_exchange", "ring")
    parts += ["all-to-all"] if exchange == "all_to_all" else []
    parts += [f"offload {layout.offload}"] if layout.offload != "none" else []
    return ", ".join(parts)


def reason_words(name: str) -> str:
    """A reason in a few words of the reader's language."""
    return WORDING(name)


def part_words(name: str) -> str:
    """A part of a step, or a category of memory, in the reader's language."""
    return WORDING(name)


def more_percent(ratio: float) -> str:
    """How much more a ratio is than one, in whole percent with its sign; ±0 where it rounds to nothing."""
    percent = round(100 * (ratio - 1))
    return minus(f"{percent:+d} %") if percent else "±0 %"


def gigabytes(num_bytes: float) -> str:
    """Bytes as decimal gigabytes, as the tables of the literature print them; with a proper minus sign."""
    unit = say(en="GB", fr="Go")
    digits = 2 if abs(num_bytes) < 1e9 else 1
    return f"{minus(decimal(num_bytes / 1e9, digits))} {unit}"
