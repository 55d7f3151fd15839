"""Exercises of lab 08 on layouts: bytes of a rank, the fastest layout, rates in paired rounds, fewest GPUs.

The bytes are those of Megatron-LM's states (16-bit weights, fp32 gradients, Adam with its master copy), as the planner
counts them; the reasons why a layout cannot run are tried in the order of `dlojz.planner.space`.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, shortest, significant
from dlojz.config.fields import LayoutFields
from dlojz.cost_model.step import SECONDS_PER_DAY
from dlojz.labs.kit.exercise import Mistake, Said, Wrong
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts, by_part, edited_when_called
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
    values: dict[str, Any] = {"name": name, "size": size, "min_stage": min_stage}

    def state(key: str, edits: str, **more: Any) -> Mistake:
        way = edited_when_called((rank_bytes,), edits, part)
        return TEXTS.mistake("rank-bytes", key, way, part=part, **values, **more)

    return [
        state("states of a whole stage", "slice_parameters * size → parameters * size"),
        state("never sharded over the replicas", "(layout.dp if layout.zero >= zero_stage else 1) → 1"),
        state("always sharded over the replicas", "if layout.zero >= zero_stage else 1 →"),
        *(
            state("sharded from another stage on", f">= zero_stage → >= {stage}", from_stage=stage)
            for stage in (1, 2, 3)
            if stage != min_stage
        ),
        *(
            state("other bytes per parameter", f"slice_parameters * size → slice_parameters * {each}", bytes_each=each)
            for each in (2, 4, 8, 12, 16)
            if each != size
        ),
        state("divided by pp", "parameters / layout.tp → parameters / layout.tp / layout.pp"),
        state("multiplied by tp", "parameters / layout.tp → parameters * layout.tp"),
        state("divided by tp in place of dp", "layout.dp if → layout.tp if"),
        state("sharded in one stage only", ">= zero_stage → == zero_stage"),
    ]


_IN_FLIGHT = "min(layout.pp - stage, layout.micro_batches)"


def _flight(count: str) -> MistakeWay:
    return MistakeWay(f"{_IN_FLIGHT} → {count}", part=3)


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
        "keeps all micro-batches, as GPipe does": _flight("layout.micro_batches"),
        "every stage keeps as many as the first": _flight("min(layout.pp, layout.micro_batches)"),
        "counts stages from the wrong end": _flight("min(stage + 1, layout.micro_batches)"),
        "one micro-batch in flight too few": _flight("min(layout.pp - stage - 1, layout.micro_batches)"),
        "more in flight than a step has": _flight("(layout.pp - stage)"),
        "keeps a single micro-batch": _flight("1"),
        "divides the activations by tp again": _flight(f"{_IN_FLIGHT} / layout.tp"),
        "larger of the two numbers": _flight("max(layout.pp - stage, layout.micro_batches)"),
        "one micro-batch in flight too many": _flight("min(layout.pp - stage + 1, layout.micro_batches)"),
        "divides the micro-batches by dp": _flight("layout.micro_batches / layout.dp"),
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
    priced = []
    for pp, dp in ((pp, gpus // pp) for pp in range(1, gpus + 1) if gpus % pp == 0):
        if micro_batches % dp == 0 and STATE_BYTES * parameters / pp <= capacity_bytes:
            bubble_s = (pp - 1) * work_s / pp
            reduce_s = 2 * (dp - 1) * (alpha_s + beta_s_per_byte * SPLIT_GRADIENT_BYTES * parameters / pp / dp)
            priced.append((float(pp), bubble_s, reduce_s))
    return min(priced, key=lambda split: split[1] + split[2])


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
    "you look at the seconds alone": "and STATE_BYTES * parameters / pp <= capacity_bytes →",
    "you leave the bubble out, so the longest pipeline always": "(pp - 1) * work_s / pp → 0.0",
    "you leave the all-reduce out": "2 * (dp - 1) → 0.0",
    "gradients of the whole model": "parameters / pp / dp → parameters / dp",
    "your bubble is pp times too long": "work_s / pp → work_s",
    "you take (p − 1)/m with the micro-batches of the whole": "work_s / pp → work_s / pp / dp",
    "each step of the ring carries one chunk": "parameters / pp / dp → parameters / pp",
    "you send as many bytes as there are parameters": "SPLIT_GRADIENT_BYTES * →",
    "your all-reduce goes round once": "2 * (dp - 1) → (dp - 1)",
    "you return dp, the number of replicas": "float(pp) → float(dp)",
    "micro-batches that cannot be shared equally": "micro_batches % dp == 0 and →",
    "a GPU filled exactly is refused": "<= capacity_bytes → < capacity_bytes",
    "you let through twice what a GPU can hold": "STATE_BYTES * → STATE_BYTES / 2 *",
    "you compare the longer of the two waits": "split[1] + split[2] → max(split[1], split[2])",
    "you take the split that waits most": "min(priced → max(priced",
    "you divide the latency by dp too": "2 * (dp - 1) → 2 * (dp - 1) / dp; parameters / pp / dp → parameters / pp",
    "you count 2 dp steps": "2 * (dp - 1) → 2 * dp",
    "the latency is left out": "(alpha_s + → (",
    "you count 4 bytes per gradient": "SPLIT_GRADIENT_BYTES → 2 * SPLIT_GRADIENT_BYTES",
    "your bubble is pp times a stage's length": "(pp - 1) * work_s / pp → work_s",
    "you divide the bubble by the micro-batches": "work_s / pp → work_s / pp / micro_batches",
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
        **{key: by_part(edits, 3) for key, edits in _SPLIT_WAYS.items()},
        "you add the two waits up": by_part(lambda *case: (best_split(*case)[0], sum(best_split(*case)[1:]), 0.0), 3),
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
    differs=_other_choice,
)


MODEL_OPERATIONS: Final = 6
"""Per parameter and token: 2 in forward, 4 in backward."""
RECOMPUTED: Final = 8
"""The same with a second forward."""


def shares_of_peak(parameters: float, tokens_per_s: float, gpus: int, peak_flops: float, recompute: bool) -> Numbers:
    """Return (MFU, HFU): the model's operations per second over the peak of all GPUs, and those really computed.

    Args:
        parameters: of the model.
        tokens_per_s: trained by all GPUs together.
        peak_flops: of one GPU, FLOP/s.
        recompute: whether activations are computed again.

    Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B.
    """
    # share of the peak for each operation per parameter and token
    rate = parameters * tokens_per_s / (gpus * peak_flops)
    return MODEL_OPERATIONS * rate, (RECOMPUTED if recompute else MODEL_OPERATIONS) * rate


def _training_told(case: Case) -> Said:
    parameters, tokens_per_s, gpus, peak, recompute = case
    return TEXTS.sentence(
        "shares-of-peak",
        "the case",
        parameters=significant(parameters),
        tokens_per_s=shortest(tokens_per_s),
        gpus=gpus,
        peak=significant(peak),
        recompute=recompute,
    )


SHARES = TEXTS.exercise(
    "shares-of-peak",
    shares_of_peak,
    cases=(
        (175e9, 140_000.0, 1024, 312e12, True),
        (22e9, 9_500.0, 8, 312e12, False),
        (7e9, 52_000.0, 16, 989e12, True),
        (875_000.0, 3_100.0, 4, 4e10, False),
    ),
    parts=(Said("the MFU", "la MFU"), Said("the HFU", "la HFU")),
    told=_training_told,
    tolerance=1e-6,
)


def compare_rounds(first_s: Sequence[float], second_s: Sequence[float]) -> Numbers:
    """Return (ratio, p): the median of second over first by round, and the sign test of the wins.

    p is that of the two-sided sign test: if neither were faster, each round that is no tie would be won by either with
    probability 1/2.

    Source: Conover 1999, "Practical Nonparametric Statistics", §3.4.
    """
    # within a round both meet the same disturbances, which the ratio cancels
    ratios = [second_round / first_round for first_round, second_round in zip(first_s, second_s, strict=True)]
    return statistics.median(ratios), min(1.0, 2 * _tail(*_wins(first_s, second_s)))


def _wins(first_s: Sequence[float], second_s: Sequence[float]) -> tuple[int, int]:
    """Rounds won by the one that won more, and rounds that are no ties."""
    pairs = list(zip(first_s, second_s, strict=True))
    first_wins, second_wins = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return max(first_wins, second_wins), first_wins + second_wins


def _tail(wins: int, rounds: int) -> float:
    """Probability of at least so many heads."""
    # a fair coin: each of the 2^rounds results is as likely
    return sum(math.comb(rounds, k) for k in range(wins, rounds + 1)) / 2**rounds


def _one_way(first_s: Sequence[float], second_s: Sequence[float], sign: int) -> float:
    """How likely the first of the two, or the second, wins as many rounds or more."""
    pairs = list(zip(first_s, second_s, strict=True))
    wins, losses = sum(sign * (b - a) > 0 for a, b in pairs), sum(sign * (b - a) < 0 for a, b in pairs)
    return _tail(wins, wins + losses)


def _rounds() -> Iterator[Case]:
    """Noise that hits both of a round alike, and is larger than what sets them apart."""
    dice = random.Random(4)
    for count, edge in ((8, 1.05), (12, 1.02), (9, 1.0), (15, 0.97), (7, 1.3), (10, 1.01)):
        first_s, second_s = [], []
        for _ in range(count):
            weather = dice.choice((1.0, 1.1, 1.6, 2.3))
            first_s.append(round(0.02 * weather * dice.uniform(0.98, 1.02), 5))
            second_s.append(round(0.02 * edge * weather * dice.uniform(0.98, 1.02), 5))
        second_s[0] = first_s[0]  # a tie
        yield first_s, second_s


_WON = "*_wins(first_s, second_s)"

PAIRED = TEXTS.exercise(
    "paired-rounds",
    compare_rounds,
    cases=_rounds,
    parts=(Said("the ratio", "le rapport"), Said("p", "p")),
    told=Said("For the rounds {0} and {1}", "Pour les tours {0} et {1}"),
    mistakes={
        "your ratio is the other way round": MistakeWay(
            "second_round / first_round → first_round / second_round", part=0
        ),
        "ratio of unpaired medians": MistakeWay(
            "statistics.median(ratios) → statistics.median(second_s) / statistics.median(first_s)", part=0
        ),
        "ratio of unpaired means": MistakeWay(
            "statistics.median(ratios) → statistics.fmean(second_s) / statistics.fmean(first_s)", part=0
        ),
        "ratio of the best times": MistakeWay("statistics.median(ratios) → min(second_s) / min(first_s)", part=0),
        "you take the mean of the ratios": MistakeWay("statistics.median → statistics.fmean", part=0),
        "your p is one-sided": MistakeWay("2 * _tail → _tail", part=1),
        "p above 1": MistakeWay("min(1.0, → (", part=1),
        "you count ties among the rounds": MistakeWay(f"{_WON} → _wins(first_s, second_s)[0], len(first_s)", part=1),
        "you take the probability of exactly so many wins": MistakeWay(
            f"_tail({_WON}) → math.comb(*_wins(first_s, second_s)[::-1]) / 2 ** _wins(first_s, second_s)[1]", part=1
        ),
        "you return 1 − p": MistakeWay("min(1.0, → 1 - min(1.0,", part=1),
        **{
            key: MistakeWay(lambda first_s, second_s, p=p: p(*_wins(first_s, second_s)), part=1)
            for key, p in {
                "you give the share of the rounds won": lambda wins, n: wins / n,
                "that is how likely as many tosses in a row come down alike": lambda wins, n: 0.5**wins,
                "that is how likely one wins every round": lambda wins, n: 2 * 0.5**n,
                "you count only results that are more one-sided": lambda wins, n: min(1.0, 2 * _tail(wins + 1, n)),
            }.items()
        },
        "the other side is not counted": tuple(
            MistakeWay(lambda first_s, second_s, sign=sign: _one_way(first_s, second_s, sign), part=1)
            for sign in (1, -1)
        ),
        "you take differences in seconds": MistakeWay(
            "second_round / first_round → second_round - first_round", part=0
        ),
        "you take the geometric mean of the ratios": MistakeWay(
            "statistics.median → statistics.geometric_mean", part=0
        ),
        "upper middle in place of the median": MistakeWay(
            "statistics.median(ratios) → sorted(ratios)[len(ratios) // 2]", part=0
        ),
        "each list sorted by itself": MistakeWay(
            "zip(first_s, second_s, → zip(sorted(first_s), sorted(second_s),", part=0
        ),
    },
    tolerance=1e-6,
)


DEADLINES: Final = (45.0, 30.0, 19.0)
"""Days that the challenge allows."""
CHALLENGE_MODEL, CHALLENGE_SITE, CHALLENGE_BATCH, CHALLENGE_TOKENS = "megatron-18b", "jean_zay_a100", 512, 100e9
CHALLENGE_GPUS: Final = tuple(range(8, 129, 8))
ENGINE: Final = "megatron-core"
SEQUENCE: Final = 2048
FIELDS: Final = ("dp", "tp", "pp", "zero", "micro_batch", "checkpointing")


def days_of(estimated_s: float) -> float:
    """Compute the days of the challenge's training from the seconds of a step."""
    # steps = tokens / (samples × tokens of a sample)
    return estimated_s * CHALLENGE_TOKENS / (CHALLENGE_BATCH * SEQUENCE) / SECONDS_PER_DAY


def _fewest(answer: Callable[..., Any]) -> float:
    """Add up the GPUs of the layouts for all deadlines."""
    from dlojz.planner.ask import plan

    total = 0
    for days in DEADLINES:
        layout = answer(days)
        if not isinstance(layout, Mapping) or set(layout) != set(FIELDS):
            raise TEXTS.wrong("fewest-gpus", "no such dictionary", FIELDS=", ".join(FIELDS))
        try:
            gpus = int(layout["dp"]) * int(layout["tp"]) * int(layout["pp"])
        except (TypeError, ValueError):
            raise Wrong("dp, tp and pp are whole numbers.", "dp, tp et pp sont des nombres entiers.") from None
        if gpus not in CHALLENGE_GPUS:
            raise TEXTS.wrong("fewest-gpus", "another number of GPUs", gpus=gpus, CHALLENGE_GPUS=CHALLENGE_GPUS[-1])
        try:
            # simulate=1: the fastest layout alone; the chosen one is judged by its own estimate
            challenge_plan = plan(CHALLENGE_MODEL, CHALLENGE_SITE, gpus, CHALLENGE_BATCH, engines=ENGINE, simulate=1)
            took = days_of(challenge_plan.choose(**layout).estimated_s)
        except LabError as error:
            raise Wrong(str(error), str(error)) from None
        if took > days:
            late = decimal(took, 1)
            raise TEXTS.wrong("fewest-gpus", "too late", days=shortest(days), late=late)
        total += gpus
    return float(total)


FEWEST_GPUS = TEXTS.challenge("fewest-gpus", _fewest, target=80)
