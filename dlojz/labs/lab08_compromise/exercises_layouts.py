"""Exercises of lab 08 on layouts: bytes of a rank, pipeline or replicas, the fastest layout.

The bytes are those of Megatron-LM's states (16-bit weights, fp32 gradients, Adam with its master copy), as the planner
counts them; the reasons why a layout cannot run are tried in the order of `dlojz.planner.space`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlojz.base.language import significant
from dlojz.config.fields import LayoutFields
from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts, by_part
from dlojz.labs.kit.judges import Case, Numbers, refuse_nothing, shown
from dlojz.planner.space import degrees_words

TEXTS = Texts(__file__)

WEIGHT_BYTES, MEMORY_GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Per parameter: bf16; fp32, in which gradients are accumulated; fp32 master copy and Adam's two moments."""


def rank_bytes(layout: Any, stage: int, parameters: float, micro_batch_bytes: float) -> Numbers:
    """Return (weights, gradients, optimizer, activations) of a rank of one stage, in bytes, under 1F1B.

    Args:
        layout: its degrees, ZeRO stage and micro-batches.
        stage: from 0.
        parameters: of the whole stage, all its slices together.
        micro_batch_bytes: activations that a rank of this stage keeps of one micro-batch.

    Sources: Rajbhandari et al. 2020 (arXiv 1910.02054), §5, for what each ZeRO stage shards; Narayanan et al. 2021
    (arXiv 2104.04473), §2.2, for the micro-batches in flight.
    """
    slice_parameters = parameters / layout.tp
    weights, gradients, optimizer = (
        slice_parameters * size / (layout.dp if layout.zero >= zero_stage else 1)
        for size, zero_stage in ((WEIGHT_BYTES, 3), (MEMORY_GRADIENT_BYTES, 2), (OPTIMIZER_BYTES, 1))
    )
    # 1F1B: pp − stage forwards before the first backward, then one is freed for each that comes
    return weights, gradients, optimizer, micro_batch_bytes * min(layout.pp - stage, layout.micro_batches)


def _cases() -> Iterator[Case]:
    dice = random.Random(8)
    for dp, tp, pp, zero, micro_batches in (
        (8, 4, 12, 1, 128), (4, 2, 8, 0, 16), (16, 8, 4, 2, 6), (3, 1, 6, 3, 4), (2, 4, 5, 3, 40), (6, 2, 3, 2, 9),
        (5, 8, 7, 1, 3),
    ):  # fmt: skip
        for stage in {0, 1, pp // 2, pp - 1}:
            parameters = dice.randrange(10**8, 10**10)
            layout = LayoutFields(dp=dp, tp=tp, pp=pp, zero=zero, micro_batches=micro_batches)
            yield layout, stage, parameters, dice.randrange(10**8, 10**9)


def _states(part: int) -> list[Mistake]:
    """The usual mistakes about one kind of state."""
    size, min_stage = ((WEIGHT_BYTES, 3), (MEMORY_GRADIENT_BYTES, 2), (OPTIMIZER_BYTES, 1))[part]
    name = Said(("weights", "gradients", "optimizer")[part], ("poids", "gradients", "états de l’optimiseur")[part])

    def shared(layout: Any, from_stage: int = min_stage) -> int:
        return int(layout.dp) if layout.zero >= from_stage else 1

    def state(key: str, bytes_of: Callable[..., float], **values: Any) -> Mistake:
        return TEXTS.mistake(
            "rank-bytes",
            key,
            lambda layout, stage, parameters, micro_batch_bytes: bytes_of(layout, parameters),
            part=part,
            name=name,
            size=size,
            min_stage=min_stage,
            **values,
        )

    return [
        state("states of a whole stage", lambda layout, parameters: parameters * size / shared(layout)),
        state("never sharded over the replicas", lambda layout, parameters: parameters / layout.tp * size),
        state("always sharded over the replicas", lambda layout, parameters: parameters / layout.tp * size / layout.dp),
        *(
            state(
                "sharded from another stage on",
                lambda layout, parameters, stage=stage: parameters / layout.tp * size / shared(layout, stage),
                from_stage=stage,
            )
            for stage in (1, 2, 3)
            if stage != min_stage
        ),
        *(
            state(
                "other bytes per parameter",
                lambda layout, parameters, size=bytes_each: parameters / layout.tp * size / shared(layout),
                bytes_each=bytes_each,
            )
            for bytes_each in (2, 4, 8, 12, 16)
            if bytes_each != size
        ),
        state("divided by pp", lambda layout, parameters: parameters / layout.tp / layout.pp * size / shared(layout)),
        state("multiplied by tp", lambda layout, parameters: parameters * layout.tp * size / shared(layout)),
        state(
            "divided by tp in place of dp",
            lambda layout, parameters: parameters / layout.tp * size / (layout.tp if layout.zero >= min_stage else 1),
        ),
        state(
            "sharded in one stage only",
            lambda layout, parameters: parameters / layout.tp * size / (layout.dp if layout.zero == min_stage else 1),
        ),
    ]


def _flight(count: Callable[[Any, int], float]) -> MistakeWay:
    return MistakeWay(
        lambda layout, stage, parameters, micro_batch_bytes: micro_batch_bytes * count(layout, stage), part=3
    )


RANK_BYTES = TEXTS.exercise(
    "rank-bytes",
    rank_bytes,
    cases=_cases,
    parts=(
        Said("weights", "les poids"),
        Said("gradients", "les gradients"),
        Said("optimizer", "l’optimiseur"),
        Said("activations", "les activations"),
    ),
    told=TEXTS.sentence("rank-bytes", "the case"),
    mistakes={
        "states sharded or counted wrongly": tuple(mistake for part in range(3) for mistake in _states(part)),
        "keeps all micro-batches, as GPipe does": _flight(lambda layout, stage: layout.micro_batches),
        "every stage keeps as many as the first": _flight(lambda layout, stage: min(layout.pp, layout.micro_batches)),
        "counts stages from the wrong end": _flight(lambda layout, stage: min(stage + 1, layout.micro_batches)),
        "one micro-batch in flight too few": _flight(
            lambda layout, stage: min(layout.pp - stage - 1, layout.micro_batches)
        ),
        "more in flight than a step has": _flight(lambda layout, stage: layout.pp - stage),
        "keeps a single micro-batch": _flight(lambda layout, stage: 1),
        "divides the activations by tp again": _flight(
            lambda layout, stage: min(layout.pp - stage, layout.micro_batches) / layout.tp
        ),
        "larger of the two numbers": _flight(lambda layout, stage: max(layout.pp - stage, layout.micro_batches)),
        "one micro-batch in flight too many": _flight(
            lambda layout, stage: min(layout.pp - stage + 1, layout.micro_batches)
        ),
        "divides the micro-batches by dp": _flight(lambda layout, stage: layout.micro_batches / layout.dp),
    },
    tolerance=1e-6,
)


STATE_BYTES, SPLIT_GRADIENT_BYTES = 16, 2
"""Per parameter: what Adam in mixed precision keeps; what an all-reduce of bf16 gradients carries."""


def best_split(
    gpus: int,
    micro_batches: int,
    work_s: float,
    parameters: float,
    capacity_bytes: float,
    alpha_s: float,
    beta_s_per_byte: float,
) -> Numbers:
    """Return (pp, bubble, all-reduce) of the split pp × dp that fits and whose two costs add up to least.

    The bubble is (pp − 1) of a micro-batch's work_s / pp; the ring all-reduce of a stage's gradients among dp replicas
    takes 2 (dp − 1)(α + β · 2 · parameters / (pp · dp)). Their sum is linear in 1/pp: one end of what fits is best.

    Args:
        gpus: to split.
        micro_batches: of a step, all replicas together; dp must divide it.
        work_s: forward and backward of one micro-batch through the whole model on one GPU.
        parameters: of the whole model.
        capacity_bytes: of a GPU, for the states of its stage.
        alpha_s, beta_s_per_byte: of a link.

    Sources: Narayanan et al. 2021 (arXiv 2104.04473), §3.3.1; Patarasuk & Yuan 2009, §3.
    """
    return _least()(gpus, micro_batches, work_s, parameters, capacity_bytes, alpha_s, beta_s_per_byte)


Cost = Callable[..., float]


def _bubble_s(pp: int, dp: int, m: int, work_s: float, parameters: float, alpha: float, beta: float) -> float:
    return (pp - 1) * work_s / pp


def _reduce_s(pp: int, dp: int, m: int, work_s: float, parameters: float, alpha: float, beta: float) -> float:
    return 2 * (dp - 1) * (alpha + beta * SPLIT_GRADIENT_BYTES * parameters / pp / dp)


def _least(
    bubble: Cost = _bubble_s,
    reduce: Cost = _reduce_s,
    *,
    key: Callable[[Numbers], float] = lambda split: split[1] + split[2],
    worst: bool = False,
    shared: bool = True,
    fits: Callable[[float, int, float], bool] = lambda parameters, pp, capacity: (
        STATE_BYTES * parameters / pp <= capacity
    ),
) -> Callable[..., Numbers]:
    """The split that two costs choose, with the costs; by another order of them, or another rule of what can be."""

    def found(gpus: int, m: int, work_s: float, parameters: float, capacity: float, *link: float) -> Numbers:
        priced = [
            (float(pp), bubble(pp, dp, m, work_s, parameters, *link), reduce(pp, dp, m, work_s, parameters, *link))
            for pp, dp in ((pp, gpus // pp) for pp in range(1, gpus + 1) if gpus % pp == 0)
            if (m % dp == 0 or not shared) and fits(parameters, pp, capacity)
        ]
        return (max if worst else min)(priced, key=key)

    return found


def _clusters() -> Iterator[Case]:
    dice = random.Random(3)
    for gpus in (16, 24, 64, 96, 128):
        for min_stages in (1, 2, 3, 4, 5, 8):
            capacity = 8e10
            # the states of one stage fit from about so many stages on
            parameters = capacity / STATE_BYTES * min_stages * dice.uniform(0.8, 0.98)
            work_s = 10 ** dice.uniform(-1.0, 1.0)
            # Around the balance of bubble and all-reduce, so that now the one and now the other wins.
            beta = work_s / parameters * 10 ** dice.uniform(-1.0, 0.0)
            yield gpus, gpus * dice.randrange(1, 5), work_s, parameters, capacity, 10 ** dice.uniform(-5.0, -3.5), beta
    # Micro-batches that the most replicas could not share equally; states that fill a GPU to the last byte.
    yield 24, 36, 8.0, 1e9, 8e10, 1e-5, 1e-12
    yield 16, 64, 9.0, 1e10, 8e10, 1e-5, 1e-12


def _told_cluster(case: Case) -> Said:
    gpus, m, work_s, parameters, capacity, alpha, beta = case
    return TEXTS.sentence(
        "best-split",
        "the case",
        gpus=gpus,
        capacity=significant(capacity, 2),
        m=m,
        work_s=significant(work_s, 2),
        parameters=significant(parameters, 2),
        alpha=significant(alpha, 2),
        beta=significant(beta, 2),
    )


_SPLIT_WAYS = {
    "you look at the seconds alone": _least(fits=lambda parameters, pp, capacity: True),
    "you leave the bubble out, so the longest pipeline always": _least(lambda *a: 0.0),
    "you leave the all-reduce out": _least(reduce=lambda *a: 0.0),
    "gradients of the whole model": _least(reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(1, dp, m, w, g, a, b)),
    "your bubble is pp times too long": _least(lambda pp, dp, m, w, g, a, b: (pp - 1) * w),
    "you take (p − 1)/m with the micro-batches of the whole": _least(
        lambda pp, dp, m, w, g, a, b: (pp - 1) / m * (m / dp * w / pp)
    ),
    "each step of the ring carries one chunk": _least(
        reduce=lambda pp, dp, m, w, g, a, b: 2 * (dp - 1) * (a + b * SPLIT_GRADIENT_BYTES * g / pp)
    ),
    "you send as many bytes as there are parameters": _least(
        reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(pp, dp, m, w, g / SPLIT_GRADIENT_BYTES, a, b)
    ),
    "your all-reduce goes round once": _least(
        reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(pp, dp, m, w, g, a, b) / 2
    ),
    "you return dp, the number of replicas": lambda gpus, *arguments: (
        gpus / best_split(gpus, *arguments)[0],
        *best_split(gpus, *arguments)[1:],
    ),
    "micro-batches that cannot be shared equally": _least(shared=False),
    "a GPU filled exactly is refused": _least(
        fits=lambda parameters, pp, capacity: STATE_BYTES * parameters / pp < capacity
    ),
    "you let through twice what a GPU can hold": _least(
        fits=lambda parameters, pp, capacity: STATE_BYTES / 2 * parameters / pp <= capacity
    ),
    "you compare the longer of the two waits": _least(key=lambda split: max(split[1], split[2])),
    "you take the split that waits most": _least(worst=True),
    "you divide the latency by dp too": _least(
        reduce=lambda pp, dp, m, w, g, a, b: 2 * (dp - 1) / dp * (a + b * SPLIT_GRADIENT_BYTES * g / pp)
    ),
    "you count 2 dp steps": _least(
        reduce=lambda pp, dp, m, w, g, a, b: (
            _reduce_s(pp, dp, m, w, g, a, b) / (dp - 1) * dp if dp > 1 else 2 * (a + b * SPLIT_GRADIENT_BYTES * g / pp)
        )
    ),
    "the latency is left out": _least(reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(pp, dp, m, w, g, 0.0, b)),
    "you count 4 bytes per gradient": _least(reduce=lambda pp, dp, m, w, g, a, b: _reduce_s(pp, dp, m, w, 2 * g, a, b)),
    "your bubble is pp times a stage's length": _least(lambda pp, dp, m, w, g, a, b: w),
    "you divide the bubble by the micro-batches": _least(lambda pp, dp, m, w, g, a, b: (pp - 1) * w / pp / m),
    "you add the two waits up": lambda *case: (best_split(*case)[0], sum(best_split(*case)[1:]), 0.0),
}

BEST_SPLIT = TEXTS.exercise(
    "best-split",
    best_split,
    cases=_clusters,
    parts=(
        Said("pp", "pp"),
        Said("the bubble in seconds", "la bulle en secondes"),
        Said("the all-reduce in seconds", "l’all-reduce en secondes"),
    ),
    told=_told_cluster,
    mistakes={
        **{key: by_part(way, 3) for key, way in _SPLIT_WAYS.items()},
        "the bubble as a share of the work": MistakeWay(
            lambda gpus, m, work_s, *arguments: best_split(gpus, m, work_s, *arguments)[1] / (m / gpus * work_s), part=1
        ),
    },
    tolerance=1e-6,
)


@dataclass(frozen=True)
class LayoutRow:
    """Layout with its step time and memory.

    Attributes:
        dp, tp, pp: replicas, tensor-parallel ranks, stages.
        micro_batch, micro_batches: samples of one forward; forwards of one replica in a step.
        step_s: seconds of a step.
        memory_bytes: of the fullest GPU.
    """

    dp: int
    tp: int
    pp: int
    micro_batch: int
    micro_batches: int
    step_s: float
    memory_bytes: float

    @property
    def title(self) -> str:
        """Short description."""
        return f"{degrees_words(self.dp, self.tp, self.pp)}, micro-batch {self.micro_batch} × {self.micro_batches}"

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all replicas together."""
        return self.dp * self.micro_batch * self.micro_batches / self.step_s


def reason(row: LayoutRow, gpus: int, heads: int, capacity_bytes: float) -> str:
    """Say why a layout cannot run: `gpus`, `split` or `memory`, in this order; empty if it can."""
    if row.dp * row.tp * row.pp != gpus:
        return "gpus"
    if heads % row.tp:
        return "split"
    return "memory" if row.memory_bytes > capacity_bytes else ""


def choose(layouts: Sequence[LayoutRow], gpus: int, heads: int, capacity_bytes: float) -> LayoutRow:
    """Choose the layout with the most samples per second of those that can run."""
    able = [row for row in layouts if not reason(row, gpus, heads, capacity_bytes)]
    return max(able, key=lambda row: row.samples_per_s)


Question = tuple[list[LayoutRow], int, int, float]


def _questions() -> Iterator[Question]:
    """In each, for every mistake there is a layout that it would choose."""
    dice = random.Random(12)
    for gpus, heads in ((384, 64), (64, 40), (96, 96), (128, 25)):
        capacity = 8e10
        splits = [
            (gpus // (tp * pp), tp, pp)
            for tp in range(1, 9)
            for pp in range(1, gpus + 1)
            if gpus % (tp * pp) == 0 and pp <= 24
        ]
        rows = []
        for dp, tp, pp in splits:
            micro_batch = dice.choice((1, 2, 4))
            micro_batches = max(1, gpus * dice.choice((3, 4, 8)) // (dp * micro_batch))
            # faster where tp does not divide the heads: chosen by who does not look at that
            rate = dice.uniform(5.0, 20.0) * (1.5 if heads % tp else 1.0)
            samples = dp * micro_batch * micro_batches
            rows.append(LayoutRow(dp, tp, pp, micro_batch, micro_batches, samples / rate, dice.uniform(2e10, 1.1e11)))
        # The fastest of all would need more memory, or other GPUs; the shortest step reads the fewest samples.
        sure = next(split for split in splits if heads % split[1] == 0)
        rows.append(LayoutRow(*sure, 1, 64, sure[0] * 64 / 40.0, 1.2 * capacity))
        for wrong_dp, rate in ((sure[0] + 1, 50.0), (sure[0] - 1, 45.0)):  # a GPU too many, a GPU that does nothing
            rows.append(LayoutRow(wrong_dp, *sure[1:], 1, 64, wrong_dp * 64 / rate, 3e10))
        rows.append(LayoutRow(*sure, 1, 2, sure[0] * 2 / 6.0, 3e10))
        dice.shuffle(rows)
        yield rows, gpus, heads, capacity


def _row_of(answer: Callable[..., Any], rows: list[LayoutRow], *limits: float) -> LayoutRow:
    choice = answer(list(rows), *limits)
    refuse_nothing(choice)
    if isinstance(choice, LayoutRow) and choice in rows:
        return choice
    raise TEXTS.wrong("choose-layout", "no layout of the list", choice=shown(choice))


def _other_choice(case: Case, row: LayoutRow, right: LayoutRow) -> Said:
    _, gpus, heads, capacity = case
    # samples per second; then GB
    rate, best = significant(row.samples_per_s, 5), significant(right.samples_per_s, 5)
    memory_gb, gpu_gb = significant(row.memory_bytes / 1e9, 5), significant(capacity / 1e9, 5)
    explanation = {
        "gpus": TEXTS.sentence("choose-layout", "other GPUs", dp=row.dp * row.tp * row.pp, gpus=gpus),
        "split": TEXTS.sentence("choose-layout", "tp does not divide the heads", tp=row.tp, heads=heads),
        "memory": TEXTS.sentence("choose-layout", "too much memory", memory_gb=memory_gb, gpu_gb=gpu_gb),
        "": TEXTS.sentence(
            "choose-layout", "slower than another one", gpus=gpus, rate=rate, title=right.title, best=best
        ),
    }[reason(row, gpus, heads, capacity)]
    return Said(f"You choose {row.title}: {explanation.en}", f"Vous choisissez {row.title} : {explanation.fr}")


CHOOSE = TEXTS.exercise(
    "choose-layout",
    choose,
    cases=_questions,
    trial=_row_of,
    mistakes={
        "steps in place of samples per second": lambda rows, gpus, heads, capacity: min(
            (row for row in rows if not reason(row, gpus, heads, capacity)), key=lambda row: row.step_s
        ),
        "most memory to spare": lambda rows, gpus, heads, capacity: min(
            (row for row in rows if not reason(row, gpus, heads, capacity)), key=lambda row: row.memory_bytes
        ),
        "the slowest of those that can run": lambda rows, gpus, heads, capacity: min(
            (row for row in rows if not reason(row, gpus, heads, capacity)), key=lambda row: row.samples_per_s
        ),
        "you count the samples of one replica": lambda rows, gpus, heads, capacity: max(
            (row for row in rows if not reason(row, gpus, heads, capacity)),
            key=lambda row: row.micro_batch * row.micro_batches / row.step_s,
        ),
        "you count one micro-batch per step": lambda rows, gpus, heads, capacity: max(
            (row for row in rows if not reason(row, gpus, heads, capacity)),
            key=lambda row: row.dp * row.micro_batch / row.step_s,
        ),
    },
    differs=_other_choice,
)
