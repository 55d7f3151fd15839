"""Space of all layouts of a question: degrees, options, and the reasons that exclude a layout.

All layouts of a question, and why those that no run can have are out: degrees on one side, options on the other.

Every combination has one code: 0 where nothing speaks against it before its bytes are known, else its place in
`REASONS`; a combination that says the same as a plainer one (sequence parallelism with tp = 1) is not a layout of its
own. Degrees × options is a matrix, so that a rule is one operation on all of them.

One layout in words and numbers, as a person reads it.

A candidate says all that decides its bytes and seconds; two that are equal run alike.

The closed list of reasons for which a layout is refused, in the words of a table.

Every refusal is one of these; what merely makes a layout slow is advice, never a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlojz.base.language import decimal, minus, say
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import CHECKPOINTING, OFFLOAD, SCHEDULES, Layouts
from dlojz.hardware import Precision
from dlojz.planner.planned_model import OFFERS, Offer, Subject

REASONS: Final = (
    "", "same", "engine", "split", "sequence", "stages", "chunks", "batch", "schedule", "memory", "host", "hours",
)  # fmt: skip
"""The closed list; `dlojz.planner.space` says each in words. `same` is no refusal: a plainer layout stands for it."""
CODE: Final = {name: code for code, name in enumerate(REASONS)}
DEGREES: Final = ("gpus", "dp", "tp", "pp", "cp", "micro_batch", "micro_batches", "ep")
OPTIONS: Final = ("engine", "zero", "schedule", "chunks", "checkpointing", "sequence_parallel", "offload")
MOST_TENSOR: Final = 64
LEAST_CONTEXT: Final = 8192
"""Tokens that a context-parallel rank keeps at least where it is searched; so samples of 16384 tokens are the first.

Source: our choice of a limit: Llama 3 shared 131072 tokens out over 16 ranks and 8192 over none, torchtitan began with
65536 over 2, and Megatron Core's guide ("Parallelism Strategies Guide") speaks of 8 K tokens and more; NeMo's rows have
8192 tokens both over 2 ranks and over 1, with more tokens/s over 1.
"""
CHUNKS: Final = (2, 3, 4, 6, 8)
TEXT_MICRO_BATCHES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
IMAGE_MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Space:
    """Degrees × options.

    Attributes:
        subject: the model.
        degrees: columns of `DEGREES`, one row each.
        options: columns of `OPTIONS`, one row each; words are places in the cost model's lists, engines in `names`.
        names: of the engines searched.
        codes: why each combination is out, degrees × options; 0 where its bytes decide.
        precision: of the products.
        fused_attention: whether attention is one kernel.
    """

    subject: Subject
    degrees: Mapping[str, Integers]
    options: Mapping[str, Integers]
    names: tuple[str, ...]
    codes: NDArray[np.uint8]
    precision: Precision
    fused_attention: bool

    def columns(self, places: Integers) -> dict[str, Integers]:
        """The columns of some layouts by their flat places."""
        rows, columns = np.divmod(places, self.codes.shape[1])
        return {name: column[rows] for name, column in self.degrees.items()} | {
            name: column[columns] for name, column in self.options.items()
        }

    def layouts(self, places: Integers) -> Layouts:
        """Some layouts as the cost model takes them."""
        return self.cost_layouts(self.columns(places))

    def cost_layouts(self, found: Mapping[str, Integers]) -> Layouts:
        """Columns as the cost model takes them."""
        pipeline, engine = (found["pp"] > 1).astype(int), found["engine"]
        offers = [OFFERS[name] for name in self.names]
        costed = np.array([[one.place(False), one.place(True)] for one in offers])
        taken = {name: found[name] for name in (*DEGREES[1:], *OPTIONS[1:])}
        return Layouts.of(
            precision=self.precision,
            **taken,
            engine=costed[engine, pipeline],
            overlap=np.array([int(one.overlap) for one in offers])[engine],
            gradient_bytes=np.array([one.gradient_bytes(self.precision) for one in offers])[engine],
            fused_attention=np.full(engine.size, int(self.fused_attention)),
        )

    def counts(self) -> dict[str, int]:
        """How many layouts each reason refuses, before bytes are known; `same` is none."""
        found = np.bincount(self.codes.reshape(-1), minlength=len(REASONS))
        return {name: int(found[code]) for name, code in CODE.items() if code > CODE["same"]}


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def contexts_of(subject: Subject, ranks: int) -> list[int]:
    """Context-parallel degrees that are searched among so many ranks: 1 alone for images and ordinary sequences."""
    most = max(1, (subject.sequence_length or 0) // LEAST_CONTEXT)
    return [one for one in divisors(ranks) if one <= most]


def experts_of(subject: Subject, dp: int) -> list[int]:
    """Expert-parallel degrees that are searched among so many replicas: 1 alone for a dense model.

    They divide the experts, so that each rank holds as many, and the replicas, among which they are found.
    """
    return [one for one in divisors(dp) if max(1, subject.num_experts) % one == 0]


def degrees_of(
    subject: Subject, gpus: Iterable[int], batch: int, given: Mapping[str, Sequence[int]]
) -> dict[str, Integers]:
    """Every way to deal GPUs out to replicas, tensor- and context-parallel ranks and stages, with every micro-batch.

    Args:
        given: values to take of `tp`, `pp`, `cp`, `ep`, `micro_batch` instead of all; of `dp`, those to keep.
    """
    usual = IMAGE_MICRO_BATCHES if subject.is_image else TEXT_MICRO_BATCHES
    sizes = given.get("micro_batch") or [one for one in usual if one <= batch]
    rows = []
    for number in gpus:
        for tp in given.get("tp") or [one for one in divisors(number) if one <= MOST_TENSOR]:
            if number % tp:
                continue
            for pp in given.get("pp") or divisors(number // tp):
                if (number // tp) % pp:
                    continue
                for cp in given.get("cp") or contexts_of(subject, number // tp // pp):
                    dp = number // tp // pp // cp
                    if dp * cp * pp * tp != number or ("dp" in given and dp not in given["dp"]):
                        continue
                    shared = given.get("ep") or experts_of(subject, dp)
                    rows += [
                        (number, dp, tp, pp, cp, size, batch // (dp * size), ep) for size in sizes for ep in shared
                    ]
    table = np.array(rows, np.int64).reshape(-1, len(DEGREES))
    return dict(zip(DEGREES, table.T, strict=True))


def options_of(names: Sequence[str], given: Mapping[str, Sequence[int]]) -> dict[str, Integers]:
    """Every combination of options that each engine offers at all.

    Args:
        names: of the engines, of `OFFERS`.
        given: values to take of a column instead, offered or not.
    """
    rows: list[tuple[int, ...]] = []
    for engine, name in enumerate(names):
        if engine not in given.get("engine", (engine,)):
            continue
        offer = OFFERS[name]
        lists: list[Sequence[Any]] = [
            given.get("zero") or sorted({*offer.zero, *offer.zero_pipeline}),
            _orders(offer, given),
            given.get("checkpointing") or [CHECKPOINTING.index(one) for one in offer.checkpointing],
            given.get("sequence_parallel") or range(1 + offer.sequence),
            given.get("offload") or [0, *(OFFLOAD.index(one.what) for one in offer.offload)],
        ]
        rows += [
            (engine, zero, *order, kept, sequence, offload) for zero, order, kept, sequence, offload in product(*lists)
        ]
    return dict(zip(OPTIONS, np.array(rows, np.int64).reshape(-1, len(OPTIONS)).T, strict=True))


def _orders(offer: Offer, given: Mapping[str, Sequence[int]]) -> list[tuple[int, int]]:
    """Schedules with their chunks."""
    interleaved = SCHEDULES.index("interleaved")
    schedules = given.get("schedule") or [SCHEDULES.index(one) for one in offer.schedules]
    if "chunks" in given:
        return [
            (one, chunks) for one, chunks in product(schedules, given["chunks"]) if (chunks > 1) == (one == interleaved)
        ]
    return [(one, chunks) for one in schedules for chunks in (CHUNKS if one == interleaved else (1,))]


def space_of(
    subject: Subject,
    gpus: Iterable[int],
    batch: int,
    names: Sequence[str],
    precision: Precision,
    fused_attention: bool,
    given: Mapping[str, Sequence[int]] | None = None,
) -> Space:
    """All layouts of a question with the reasons that are known without computing bytes or seconds.

    Args:
        subject: what is trained.
        gpus: numbers of GPUs to try.
        batch: samples of one step.
        names: of the engines, of `OFFERS`.
        precision: of the products.
        fused_attention: whether attention is one kernel.
        given: values of columns to take instead of all.
    """
    given = given or {}
    degrees = degrees_of(subject, gpus, batch, given)
    options = options_of(names, given)
    codes = np.zeros((degrees["dp"].size, options["zero"].size), np.uint8)
    for name, out in _rules(subject, degrees, options, [OFFERS[one] for one in names], batch, fused_attention):
        codes[(codes == 0) & out] = CODE[name]
    return Space(subject, degrees, options, tuple(names), codes, precision, fused_attention)


def _rules(
    subject: Subject,
    degrees: Mapping[str, Integers],
    options: Mapping[str, Integers],
    offers: Sequence[Offer],
    batch: int,
    fused_attention: bool,
) -> Iterable[tuple[str, NDArray[np.bool_]]]:
    """Reason and whom it refuses, in order: the first that applies is told."""
    dp, tp, pp, cp, size, number, ep = (degrees[name][:, None] for name in DEGREES[1:])
    engine, zero, schedule, chunks, _, sequence, offload = (options[name][None, :] for name in OPTIONS)
    first = SCHEDULES.index("1f1b")
    yield "same", (sequence > 0) & (tp == 1)
    yield "same", (schedule != first) & (pp == 1)
    yield "same", (zero > 0) & (dp * cp == 1) & (offload == 0)
    by_hand = np.array([one is OFFERS["by_hand"] for one in offers], bool)[engine]
    if OFFERS["torch"] in offers:
        yield "same", by_hand & (ep == 1) & ((tp == 1) | (not subject.is_image))  # what torch runs too
    yield "engine", _not_offered(subject, degrees, options, offers, fused_attention)
    fits = {int(one): not subject.misfit(int(one)) for one in np.unique(tp)}
    yield "split", (max(1, subject.num_experts) % ep > 0) | (dp % ep > 0)
    yield "split", ~np.vectorize(fits.__getitem__, otypes=[bool])(tp) if tp.size else tp > 0
    tokens = subject.sequence_length
    parts = sequence_parts(tp, cp, sequence)
    yield "sequence", parts > 1 if tokens is None else tokens % parts > 0
    layers = subject.num_layers
    each = -(-layers // pp)
    uneven = np.array([one.uneven for one in offers])[engine]
    empty = (pp > layers) | (-(-layers // each) != pp if not subject.is_image else pp > layers)
    yield "stages", empty | (~uneven & (layers % pp > 0))
    yield "chunks", (chunks > 1) & (layers % (pp * chunks) > 0 if not subject.is_image else pp * chunks > layers)
    yield "batch", (batch % (dp * size) > 0) & (chunks > 0)
    yield "schedule", (chunks > 1) & (number % pp > 0)
    yield "schedule", (schedule == SCHEDULES.index("zb-h1")) & (number < pp)


def sequence_parts(tp: Any, cp: Any, sequence_parallel: Any) -> Any:
    """Equal parts that a sample's tokens must come to: one per tensor-parallel rank with sequence parallelism, two per
    context-parallel rank, an early and a late one, so that the causal mask leaves all of them as much work.

    Args:
        tp, cp, sequence_parallel: numbers, or arrays of them.

    Source: Megatron-LM, megatron/training/arguments.py, and torchtitan, distributed/parallel_dims.py
    (`seq_len_divisor`).
    """
    return np.where(np.asarray(sequence_parallel) > 0, tp, 1) * np.where(np.asarray(cp) > 1, 2 * np.asarray(cp), 1)


def _not_offered(
    subject: Subject,
    degrees: Mapping[str, Integers],
    options: Mapping[str, Integers],
    offers: Sequence[Offer],
    fused_attention: bool,
) -> NDArray[np.bool_]:
    tp, pp, cp, ep = (degrees[name][:, None] for name in ("tp", "pp", "cp", "ep"))
    engine, zero, schedule, _, kept, sequence, offload = (options[name][None, :] for name in OPTIONS)

    def table(of: Any, length: int) -> NDArray[np.bool_]:
        return np.array([[of(one, place) for place in range(length)] for one in offers])

    stages = table(lambda one, place: place in one.zero, 4)[engine, zero]
    piped = table(lambda one, place: place in one.zero_pipeline, 4)[engine, zero]
    order = table(lambda one, place: SCHEDULES[place] in one.schedules, len(SCHEDULES))[engine, schedule]
    keeps = table(lambda one, place: CHECKPOINTING[place] in one.checkpointing, len(CHECKPOINTING))[engine, kept]
    splits = np.array([one.tensor[subject.is_image] for one in offers])[engine]
    shares = np.array([one.sequence and not subject.is_image for one in offers])[engine]
    rings = table(lambda one, place: place in one.context, 4)[engine, zero] & (fused_attention and not subject.is_image)
    shared = table(lambda one, place: place in one.experts[0], 4)[engine, zero]
    piped_experts = table(lambda one, place: place in one.experts[1], 4)[engine, zero]
    lies = np.ones_like(stages)
    for place, what in enumerate(OFFLOAD[1:], start=1):
        never = 9
        least = np.array([next((each.zero for each in one.offload if each.what == what), never) for one in offers])
        lies &= (offload != place) | (zero >= least[engine])
    split_backward = (schedule == SCHEDULES.index("zb-h1")) & (kept > 0)
    refused: NDArray[np.bool_] = (
        np.where(pp > 1, ~(piped & order), ~stages)
        | ~keeps | split_backward | (~splits & (tp > 1)) | (~shares & (sequence > 0)) | ~lies | (~rings & (cp > 1))
        | ((ep > 1) & (np.where(pp > 1, ~piped_experts, ~shared) | (offload > 0)))
        | ((offload > 0) & ((pp > 1) | (tp > 1)))
    )  # fmt: skip
    return refused


FREE = (
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "micro_batch",
    "schedule",
    "chunks",
    "checkpointing",
    "sequence_parallel",
    "offload",
    "engine",
)
"""What one chooses; dp and the number of micro-batches follow."""
_OFFLOAD: Final = {"none": "none", "optimizer": "optimizer", "all": "parameters"}
"""What the planner calls an offload, and what a `Layout` calls it."""


@dataclass(frozen=True)
class Candidate:
    """A layout of a question.

    Attributes:
        gpus: in all, dp × tp × pp × cp.
        dp, tp, pp: replicas, tensor-parallel ranks, pipeline stages.
        zero: stage, 0 to 3.
        micro_batch, micro_batches: samples of one forward; forwards of one replica in a step.
        schedule, chunks: of the pipeline; `1f1b` and 1 without one.
        checkpointing: none, selective or full.
        sequence_parallel: whether tensor-parallel ranks share norms and dropouts out along the sequence.
        offload: what lies in the host's memory: none, optimizer or all.
        engine: of `dlojz.planner.planned_model.OFFERS`.
        cp: context-parallel ranks, which share each sample's tokens out.
        ep: replicas that share the experts of a mixture out.
    """

    gpus: int
    dp: int
    tp: int
    pp: int
    zero: int
    micro_batch: int
    micro_batches: int
    schedule: str
    chunks: int
    checkpointing: str
    sequence_parallel: bool
    offload: str
    engine: str
    cp: int = 1
    ep: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def degrees(self) -> str:
        """Its degrees in a few words; cp and ep where there are any."""
        more = (f" · cp {self.cp}" if self.cp > 1 else "") + (f" · ep {self.ep}" if self.ep > 1 else "")
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}{more}"

    @property
    def title(self) -> str:
        """In one line."""
        parts = [self.engine, self.degrees]
        if self.zero:
            parts.append(f"ZeRO-{self.zero}")
        number = f" × {self.micro_batches}" if self.micro_batches else ""  # none where the batch cannot be dealt out
        parts.append(f"micro-batch {self.micro_batch}{number}")
        if self.pp > 1:
            parts.append(self.schedule + (f" × {self.chunks}" if self.chunks > 1 else ""))
        if self.checkpointing != "none":
            parts.append(checkpointing_words(self.checkpointing))
        if self.sequence_parallel:
            parts.append("SP")
        if self.offload != "none":
            parts.append(say(en=f"offload {self.offload}", fr=f"offload {self.offload}"))
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def changed_to(self, other: Candidate) -> dict[str, tuple[Any, Any]]:
        """What one would change to get another one: name → (here, there); what follows from it is left out."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in ("gpus", *FREE)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def checkpointing_words(kind: str) -> str:
    """A kind of checkpointing in the reader's language."""
    return {
        "none": say(en="everything kept", fr="tout gardé"),
        "selective": say(en="selective recomputation", fr="recalcul sélectif"),
        "full": say(en="full recomputation", fr="recalcul complet"),
    }[kind]


def candidates_of(space: Space, places: Any) -> list[Candidate]:
    """Layouts of a space by their flat places."""
    return candidates_from(space.columns(np.atleast_1d(places)), space)


def candidates_from(given: Mapping[str, Any], space: Space) -> list[Candidate]:
    """Layouts by the columns of a space."""
    columns = {name: column.tolist() for name, column in given.items()}
    words = {"schedule": SCHEDULES, "checkpointing": CHECKPOINTING, "offload": OFFLOAD, "engine": space.names}
    made = []
    for place in range(len(columns["dp"])):
        one: dict[str, Any] = {
            field.name: columns[field.name][place] for field in fields(Candidate) if field.name in columns
        }
        one |= {name: legal[one[name]] for name, legal in words.items()}
        made.append(Candidate(**{**one, "sequence_parallel": bool(one["sequence_parallel"])}))
    return made


def run_config_of(subject: Subject, precision: Precision, one: Candidate, **others: Any) -> RunConfig:
    """A layout of a model of the catalogue as a `RunConfig`.

    Args:
        subject: the model.
        precision: of the products.
        one: the layout; its engine is one of the lab's.
        **others: other fields of `RunConfig`, or other values.

    Raises:
        LabError: if no run can have it.
    """
    layout: dict[str, Any] = {
        "dp": one.dp, "tp": one.tp, "pp": one.pp, "ep": one.ep, "zero": one.zero, "engine": one.engine,
        "micro_batch": one.micro_batch, "micro_batches": one.micro_batches, "checkpointing": one.checkpointing,
        "offload": _OFFLOAD[one.offload], "sequence_parallel": one.sequence_parallel,
    }  # fmt: skip
    if one.pp > 1:
        layout["schedule"] = one.schedule
        layout |= {"chunks": one.chunks} if one.chunks > 1 else {}
    sample = {"image_size": subject.image_size} if subject.is_image else {"sequence_length": subject.sequence_length}
    return RunConfig.of(
        **{"model": subject.catalogue, **sample, "precision": precision, "device": "cuda", **layout, **others}
    )


def layouts_of(candidates: list[Candidate], space: Space) -> Layouts:
    """Candidates as the cost model takes them, with the precision and attention of a space."""
    offers = [OFFERS[one.engine] for one in candidates]
    taken = (*DEGREES[1:], "zero", "chunks", "schedule", "checkpointing", "offload")
    columns: Mapping[str, Any] = {name: [getattr(one, name) for one in candidates] for name in taken}
    return Layouts.of(
        precision=space.precision,
        **columns,
        sequence_parallel=[int(one.sequence_parallel) for one in candidates],
        engine=[offer.place(one.pp > 1) for offer, one in zip(offers, candidates, strict=True)],
        overlap=[int(offer.overlap) for offer in offers],
        gradient_bytes=[offer.gradient_bytes(space.precision) for offer in offers],
        fused_attention=[int(space.fused_attention)] * len(candidates),
    )


NAMES: Final = (
    "gpus",
    "engine",
    "split",
    "sequence",
    "stages",
    "chunks",
    "batch",
    "schedule",
    "memory",
    "host",
    "hours",
)
"""All reasons, in the order in which they are looked at; `gpus` is met only where a layout is asked for by name."""


def reason_words(name: str) -> str:
    """A reason in a few words of the reader's language."""
    return {
        "same": say(en="says the same as a plainer layout", fr="revient à une configuration plus simple"),
        "gpus": say(
            en="the product of the degrees is not the number of GPUs",
            fr="le produit des degrés n’est pas le nombre de GPU",
        ),
        "engine": say(en="the library does not offer it", fr="la bibliothèque ne le propose pas"),
        "split": say(en="tp does not divide heads or widths", fr="tp ne divise pas les têtes ou les largeurs"),
        "sequence": say(en="the ranks do not divide the sequence", fr="les rangs ne divisent pas la séquence"),
        "stages": say(en="the layers cannot fill the stages", fr="les couches ne remplissent pas les étages"),
        "chunks": say(en="the layers cannot fill the chunks", fr="les couches ne remplissent pas les chunks"),
        "batch": say(en="the batch cannot be dealt out", fr="le batch ne se répartit pas"),
        "schedule": say(
            en="too few, or unsuited, micro-batches for the schedule",
            fr="nombre de micro-batches inadapté à l’ordonnancement",
        ),
        "memory": say(en="out of memory (OOM)", fr="mémoire insuffisante (OOM)"),
        "host": say(en="the host's memory is too small", fr="mémoire de l’hôte insuffisante"),
        "hours": say(en="not done within the time allowed", fr="pas terminé dans le temps accordé"),
    }[name]


def part_words(name: str) -> str:
    """A part of a step, or a category of memory, in the reader's language."""
    return {
        "forward": say(en="forward", fr="passe avant"),
        "backward": say(en="backward", fr="passe arrière"),
        "recompute": say(en="recomputation", fr="recalcul"),
        "tensor": say(en="tensor-parallel messages", fr="messages du Tensor Parallelism"),
        "pipeline": say(en="pipeline messages", fr="messages du pipeline"),
        "bubble": say(en="pipeline bubble", fr="bulle du pipeline"),
        "data": say(en="data-parallel messages, exposed", fr="messages du Data Parallelism, exposés"),
        "optimizer": say(en="optimizer", fr="optimiseur"),
        "constant": say(en="constant per step", fr="constante par itération"),
        "weights": say(en="weights", fr="poids"),
        "gradients": say(en="gradients", fr="gradients"),
        "activations": say(en="activations", fr="activations"),
        "edges": say(en="embedding and logits", fr="embedding et logits"),
        "live": say(en="layer being computed", fr="couche en cours de calcul"),
        "reserve": say(en="CUDA, NCCL, fragments", fr="CUDA, NCCL, fragments"),
    }[name]


def more_percent(ratio: float) -> str:
    """How much more a ratio is than one, in whole percent with its sign; ±0 where it rounds to nothing."""
    percent = round(100 * (ratio - 1))
    return minus(f"{percent:+d} %") if percent else "±0 %"


def gigabytes(num_bytes: float) -> str:
    """Bytes as decimal gigabytes, as the tables of the literature print them; with a proper minus sign."""
    unit = say(en="GB", fr="Go")
    digits = 2 if abs(num_bytes) < 1e9 else 1
    return f"{minus(decimal(num_bytes / 1e9, digits))} {unit}"
