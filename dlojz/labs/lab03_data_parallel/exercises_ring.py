"""Exercises of lab 03 on the ring, the data and speed: all-reduce, its time, sampler, scaling, MFU, a challenge.

A ring is judged by the sum on every rank and by what was sent for it. The fit minimises relative gaps, so that short
messages count as much as long ones. For the sampler no order is prescribed: ranks must read disjoint, equal shares,
in another order in every epoch, and the same when asked again. All times are computed from what a case gives.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.language import say
from dlojz.hardware.links import weighted_line
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import Judge, expect_numbers, reader
from dlojz.labs.kit.rank_judges import run_on_ranks, same
from dlojz.labs.kit.sandbox import hashes_of_another_process
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

Pair = tuple[float, float]
CHUNK = 3
"""Elements of a chunk: more than one, so that a chunk is not taken for an element."""
_NAME = "sum"
_IN_PLACE = TEXTS.sentence("ring-all-reduce", "a name bound anew to a chunk")


def _input(rank: int, size: int, seed: int) -> Tensor:
    return torch.randn(CHUNK * size, generator=torch.Generator().manual_seed(1000 * seed + rank))


def _sum(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    # (N, CHUNK · N) summed over the ranks: what one process has that knows all inputs.
    return {_NAME: torch.stack([_input(peer, size, seed) for peer in range(size)]).sum(0)}


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    x = _input(rank, size, seed)
    try:
        returned = answer(x)
    except TypeError as error:
        if "item assignment" in str(error):
            error.args = (say(en=f"{error} ({_IN_PLACE.en})", fr=f"{error} ({_IN_PLACE.fr})"),)
        raise
    value = x if returned is None else returned
    return {"in place": same(x, _sum(rank, size, seed)[_NAME])}, {_NAME: value}


def ring(x: Tensor) -> Tensor:
    """The ring all-reduce of a vector, in place.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks, received = x.chunk(size), torch.empty(CHUNK)

    def pass_on(sent_index: int, received_index: int, add: bool) -> None:
        # Who: rank to its right neighbour. What: one chunk, (CHUNK,). How much: 4 · CHUNK bytes.
        sending = dist.isend(chunks[sent_index % size].clone(), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()  # type: ignore[union-attr]
        chunks[received_index % size].copy_(chunks[received_index % size] + received if add else received)

    for step in range(size - 1):
        # In step s rank r sends chunk r - s and adds what it receives to chunk r - s - 1, which it sends next.
        pass_on(rank - step, rank - step - 1, True)
    for step in range(size - 1):
        # After the reduce-scatter rank r holds the whole sum of chunk r + 1: from there on chunks replace those held.
        pass_on(rank + 1 - step, rank - step, False)
    return x


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The sum is right everywhere; was it a ring?"""
    for answer in answers:
        library = [call["op"] for call in answer.calls if call["op"] not in ("send", "recv")]
        numel = sum(call["numel"] for call in answer.calls if call["op"] == "send")
        if library or not numel:
            raise TEXTS.wrong(
                "ring-all-reduce", "torch's own collective made the sum", collective=(library or ["all_reduce"])[0]
            )
        # Elements that a ring sends: one chunk in each of its 2 (p - 1) steps.
        limit = 2 * (size - 1) * CHUNK
        if numel > limit:
            raise TEXTS.wrong(
                "ring-all-reduce",
                "more elements sent than a ring sends",
                size=size,
                rank=answer.rank,
                numel=numel,
                elements=CHUNK * size,
                limit=limit,
            )
        if not answer.value["in place"]:
            raise TEXTS.wrong("ring-all-reduce", "x does not hold the sum")


RING_ALL_REDUCE = TEXTS.exercise(
    "ring-all-reduce",
    _sum,
    on_ranks=True,
    trial=_trial,
    local=lambda rank, size, seed: {_NAME: _input(rank, size, seed)},
    labels={_NAME: Said("the sum", "la somme")},
    source=(ring,),
    inspect=_inspect,
)


def ring_seconds(message_bytes: float, size: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Time of a ring all-reduce: 2 (p − 1) steps, each α plus β times one chunk of n / p bytes.

    Source: Hockney 1994 (α–β); Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations
    in MPICH", §4.5, without the term of the additions.
    """
    return 2 * (size - 1) * (alpha_s + message_bytes / size * beta_s_per_byte)


RING_TIME = TEXTS.exercise(
    "ring-time",
    ring_seconds,
    cases=(
        (4_000_000, 4, 1e-3, 1e-9),
        (65_536, 8, 2e-3, 5e-8),
        (1_000_000, 2, 5e-4, 3e-9),
        (8_192, 64, 1e-3, 2e-7),
        (4_096, 1, 1e-3, 1e-8),
    ),
    mistakes={
        "bytes of two whole messages": lambda n, p, a, b: 2 * (p - 1) * a + 2 * n * b,
        "one half of the all-reduce only": lambda n, p, a, b: (p - 1) * (a + n / p * b),
        "each step carries the whole message here": lambda n, p, a, b: 2 * (p - 1) * (a + n * b),
        "the latency is missing": lambda n, p, a, b: 2 * (p - 1) / p * n * b,
        "α is paid once only": lambda n, p, a, b: a + 2 * (p - 1) / p * n * b,
        "α is paid once per half": lambda n, p, a, b: 2 * a + 2 * (p - 1) / p * n * b,
        "one step too many in each half": lambda n, p, a, b: 2 * p * (a + n / p * b),
        "the bytes are paid once only": lambda n, p, a, b: 2 * (p - 1) * a + n / p * b,
        "you divide by β": lambda n, p, a, b: 2 * (p - 1) * (a + n / p / b),
        "you multiply by 4 bytes per number": lambda n, p, a, b: 2 * (p - 1) * (a + 4 * n / p * b),
        "one message from one rank to another": lambda n, p, a, b: a + n * b,
        "the time of a tree": lambda n, p, a, b: 2 * math.log2(p) * (a + n * b),
    },
)


def fit_alpha_beta(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Pair:
    """α (s) and β (s per byte) of a ring all-reduce of `size` ranks, from its times: t = 2 (p − 1) (α + β n / p)."""
    return _per_step(weighted_line(message_bytes, seconds), size)


def _per_step(line: Pair, size: int) -> Pair:
    steps = 2 * (size - 1)
    # t = a + b·n is the whole ring: a holds 2 (p - 1) latencies, b the time of 2 (p - 1) chunks of n / p bytes.
    return line[0] / steps, line[1] * size / steps


def _ends(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    """Through the shortest and the longest message alone."""
    pairs = sorted(zip(message_bytes, seconds, strict=True))
    (few, short_s), (many, long_s) = pairs[0], pairs[-1]
    slope = (long_s - short_s) / (many - few)
    return short_s - slope * few, slope


def _measurements() -> Iterator[tuple[list[float], list[float], int]]:
    """Times of networks that do not exist, some too long by a quarter, some too short."""
    rough = (1.0, 1.25, 0.8, 1.1, 0.85, 1.2, 0.95, 0.75, 1.15)
    for shift, (size, alpha_s, beta_s_per_byte) in enumerate(((4, 5e-5, 4e-10), (2, 2e-4, 3e-9), (8, 1e-5, 1e-10))):
        message_bytes = [float(2**exponent) for exponent in range(10, 26, 2)]
        seconds = [
            ring_seconds(count, size, alpha_s, beta_s_per_byte) * rough[(index + 4 * shift) % len(rough)]
            for index, count in enumerate(message_bytes)
        ]
        yield message_bytes, seconds, size


FIT_TOLERANCE = 0.01
"""Relative: float32 arithmetic passes, none of the mistakes above comes so close."""


_LINE = "weighted_line(message_bytes, seconds)"
_ABSOLUTE = "weighted_line(message_bytes, seconds, [1.0] * len(seconds))"

ALPHA_BETA = TEXTS.exercise(
    "alpha-beta",
    fit_alpha_beta,
    cases=_measurements,
    source=(fit_alpha_beta, _per_step),
    mistakes={
        "the line is fitted with other weights than 1 / t": (
            f"{_LINE} → weighted_line(message_bytes, seconds, [1 / t**4 for t in seconds])",
            f"{_LINE} → weighted_line(message_bytes, seconds, [1 / t for t in seconds])",
        ),
        "the line is that of the whole all-reduce": f"_per_step({_LINE}, size) → {_LINE}",
        "you minimise gaps in seconds": f"{_LINE} → {_ABSOLUTE}",
        "gaps in seconds, and the line of the whole all-reduce": f"_per_step({_LINE}, size) → {_ABSOLUTE}",
        "your line goes through two measurements alone": f"{_LINE} → _ends(message_bytes, seconds)",
        "you return β, then α": lambda n, t, p: fit_alpha_beta(n, t, p)[::-1],
        "you compute with 4 ranks whatever `size` is": f"{_LINE}, size → {_LINE}, 4",
    },
    parts=(Said("α (s)", "α (s)"), Said("β (s per byte)", "β (s par octet)")),
    told=Said("For the times of {2} ranks", "Pour les durées de {2} rangs"),
    tolerance=FIT_TOLERANCE,
)


CASES = ((24, 4), (1797, 4), (103, 3), (50, 2), (3, 4))
SEED, EPOCHS = 7, 3
Shards = list[list[int]]


def _shards(answer: Callable[..., Any], num_samples: int, size: int, epoch: int, seed: int = SEED) -> Shards:
    return [_indices(answer(num_samples, rank, size, epoch, seed)) for rank in range(size)]


_indices = reader(
    lambda value: [operator.index(index) for index in (value.tolist() if hasattr(value, "tolist") else value)],
    TEXTS.sentence("sampler", "Indices of samples, whole numbers"),
)


def _check_sampler(answer: Callable[..., Any], num_samples: int, size: int) -> None:
    epochs = [_shards(answer, num_samples, size, epoch) for epoch in range(EPOCHS)]
    if [_shards(answer, num_samples, size, epoch) for epoch in range(EPOCHS)] != epochs:
        raise TEXTS.wrong("sampler", "two answers for the same epoch")
    for shards in epochs:
        _judge_range(shards, num_samples)
    for shards in epochs:
        _judge_epoch(shards, num_samples, size)
    if num_samples >= size:
        _judge_epochs(epochs, num_samples, size)


def _check_seed(answer: Callable[..., Any]) -> None:
    num_samples, size = CASES[1]
    unused = [
        _shards(answer, num_samples, size, epoch, SEED + 100) == _shards(answer, num_samples, size, epoch)
        for epoch in range(EPOCHS)
    ]
    if all(unused):
        raise TEXTS.wrong("sampler", "the seed changes nothing")
    if unused[0]:
        raise TEXTS.wrong("sampler", "the seed changes nothing in epoch 0")
    if any(unused):
        raise TEXTS.wrong("sampler", "in one epoch the seed changes nothing", epoch=unused.index(True))
    shards = _shards(answer, num_samples, size, 1)
    with hashes_of_another_process():
        elsewhere = _shards(answer, num_samples, size, 1)
    if shards != elsewhere:
        raise TEXTS.wrong("sampler", "hash differs between processes")


def _judge_range(shards: Shards, num_samples: int) -> None:
    outside = [index for shard in shards for index in shard if not 0 <= index < num_samples]
    if outside:
        raise TEXTS.wrong(
            "sampler", "a sample that does not exist", outside=outside[0], num_samples=num_samples, last=num_samples - 1
        )


def _judge_epoch(shards: Shards, num_samples: int, size: int) -> None:
    """One epoch: divided among the ranks, equally, whole."""
    lengths = [len(shard) for shard in shards]
    if any(shards) and all(set(shard) == set(shards[0]) for shard in shards):
        raise TEXTS.wrong("sampler", "every rank reads the same samples")
    common = {
        index for rank, shard in enumerate(shards) for index in shard if any(index in shards[r] for r in range(rank))
    }
    filled_up = num_samples % size and set(lengths) == {-(-num_samples // size)} and len(common) <= size
    if filled_up:
        raise TEXTS.wrong(
            "sampler",
            "overlapping shares from another order of the ranks",
            size=size,
            common_count=len(common),
            num_samples=num_samples,
        )
    if common:
        raise TEXTS.wrong(
            "sampler", "samples read by two ranks", size=size, common_count=len(common), num_samples=num_samples
        )
    if any(len(set(shard)) < len(shard) for shard in shards):
        raise TEXTS.wrong("sampler", "a sample twice in one epoch")
    if len(set(lengths)) > 1:
        raise TEXTS.wrong(
            "sampler",
            "shares of different lengths",
            num_samples=num_samples,
            size=size,
            lengths=", ".join(map(str, lengths)),
        )
    if lengths[0] != num_samples // size:
        raise TEXTS.wrong(
            "sampler",
            "shares of another length",
            num_samples=num_samples,
            size=size,
            lengths=lengths[0],
            due=num_samples // size,
        )


def _judge_epochs(epochs: Sequence[Shards], num_samples: int, size: int) -> None:
    """From epoch to epoch: shuffled, each time anew, over the whole data set."""
    first_epoch = epochs[0]
    dealt = [list(range(rank, num_samples, size))[: num_samples // size] for rank in range(size)]
    share = num_samples // size
    blocks = [list(range(rank * share, (rank + 1) * share)) for rank in range(size)]
    if any(shards in (dealt, blocks) for shards in epochs):
        raise TEXTS.wrong("sampler", "the samples are divided among the ranks, but not shuffled")
    if any(earlier == following for earlier, following in combinations(epochs, 2)):
        raise TEXTS.wrong("sampler", "every epoch has the same order")
    if all(sorted(shard) == sorted(first_epoch[rank]) for shards in epochs for rank, shard in enumerate(shards)):
        raise TEXTS.wrong("sampler", "a rank always reads the same part of the data")
    before, *later = ({pair for shard in shards for pair in pairwise(shard)} for shards in epochs)
    if any(len(pairs & before) > len(before) / 2 for pairs in later):
        raise TEXTS.wrong("sampler", "the order is turned or cut, not shuffled anew")
    never = set(range(num_samples)).difference(*(shard for shards in epochs for shard in shards))
    if never:
        raise TEXTS.wrong(
            "sampler",
            "a sample is never read",
            epochs_count=len(epochs),
            size=size,
            never=min(never),
            num_samples=num_samples,
        )


SAMPLER = TEXTS.exercise("sampler", cases=CASES, trial=_check_sampler, then=_check_seed)


def scaled_rate(step: int, base_rate: float, scale: float, warmup_steps: int) -> float:
    """Learning rate of a batch `scale` times as large: from `base_rate` in a straight line to `scale · base_rate`.

    Source: Goyal et al. 2017 (arXiv 1706.02677), §2.1 (linear scaling) and §2.2 (gradual warm-up).
    """
    share = min(1.0, step / warmup_steps)
    return base_rate * (1 + (scale - 1) * share)


def _steps() -> Iterator[tuple[int, float, float, int]]:
    for base_rate, scale, warmup_steps in ((0.1, 8, 40), (0.02, 16, 10)):
        for step in (0, 1, 7, 10, 39, 40, 41, 500):
            yield step, base_rate, scale, warmup_steps


LEARNING_RATE = TEXTS.exercise(
    "learning-rate",
    scaled_rate,
    cases=_steps,
    mistakes={
        "no warm-up": lambda step, base, scale, warm: base * scale,
        "you start from zero": lambda step, base, scale, warm: base * scale * min(1, step / warm),
        "you start from nearly zero": lambda step, base, scale, warm: base * scale * min(1, (step + 1) / warm),
        "a jump at the end of the warm-up": lambda step, base, scale, warm: base if step < warm else base * scale,
        "you rise by base_rate during the warm-up": lambda step, base, scale, warm: base * min(1 + step / warm, scale),
        "geometric in place of linear rise": lambda step, base, scale, warm: base * scale ** min(1, step / warm),
        "the rate never changes": lambda step, base, scale, warm: base,
    },
)


_EFFICIENCIES = (
    Said("the efficiency of strong scaling", "l’efficacité en scalabilité forte"),
    Said("the efficiency of weak scaling", "l’efficacité en scalabilité faible"),
)


def efficiencies(
    batch: int, size: int, image_s: float, gradient_bytes: Sequence[int], alpha_s: float, beta_s_per_byte: float
) -> tuple[float, float]:
    """Efficiency of strong and of weak scaling, where a ring all-reduce of each gradient follows the backward pass.

    Source: Amdahl 1967 (fixed work), Gustafson 1988 (work that grows with the processes); the ring's time as above.
    """
    alone_s = batch * image_s
    communication_s = sum(
        ring_seconds(message_bytes, size, alpha_s, beta_s_per_byte) for message_bytes in gradient_bytes
    )
    # Strong: one batch over all ranks; weak: one batch on each. The gradients, and so the ring's time, are the same.
    return alone_s / size / (alone_s / size + communication_s), alone_s / (alone_s + communication_s)


EFFICIENCY = TEXTS.exercise(
    "efficiency",
    efficiencies,
    cases=(
        (256, 2, 1e-3, [4_000_000, 4_096, 260_000], 1e-3, 1e-9),
        (64, 4, 5e-4, [65_536, 512], 2e-3, 5e-8),
        (1024, 8, 2e-4, [8_000_000, 2_000_000, 40_960], 1e-4, 2e-9),
        (32, 1, 1e-3, [1_000], 1e-3, 1e-9),
    ),
    read=lambda answer: expect_numbers(answer, _EFFICIENCIES),
    parts=_EFFICIENCIES,
    mistakes={
        "the two are swapped": lambda *case: efficiencies(*case)[::-1],
        "both are the efficiency of strong scaling": lambda *case: (efficiencies(*case)[0],) * 2,
        "both are the efficiency of weak scaling": lambda *case: (efficiencies(*case)[1],) * 2,
        "the communication is missing": lambda *case: (1.0, 1.0),
        "both turned over": lambda *case: tuple(1 / efficiency for efficiency in efficiencies(*case)),
    },
)


def mfu(images_per_s: float, forward_flops: float, processes: int, peak_flops: float) -> float:
    """Model FLOPs utilization: the FLOP/s that the model needs, as a share of the peak of all processes.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), §4.1: forward and backward count, recomputation does not.
    """
    return 3 * forward_flops * images_per_s / (processes * peak_flops)


MFU = TEXTS.exercise(
    "mfu",
    mfu,
    cases=((1000.0, 8e9, 8, 312e12), (250.0, 4.4e6, 2, 5e10), (90.0, 1e9, 1, 4e12)),
    mistakes={
        "turned over": lambda rate, flops, processes, peak: 1 / mfu(rate, flops, processes, peak),
    },
)

RANKS, ELEMENTS = 4, 24


def _part(rank: int, seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * seed + rank))


def _all(seed: int) -> Tensor:
    return sum((_part(rank, seed) for rank in range(1, RANKS)), _part(0, seed))


def _messages_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Tensor]]:
    x = _part(rank, seed)
    answer(x)
    return None, {"sum": x}


def _inspect_messages(answers: list[RankAnswer], size: int) -> None:
    """Sums are right; hold what was sent to the rules."""
    # Elements that a ring sends per rank: the challenge is to need fewer messages, not more bytes.
    limit = 2 * (size - 1) * ELEMENTS // size
    for answer in answers:
        library = [call["op"] for call in answer.calls if call["op"] not in ("send", "recv")]
        numel = sum(call["numel"] for call in answer.calls if call["op"] == "send")
        if library or not numel:
            raise TEXTS.wrong(
                "few-messages", "a collective is called", rank=answer.rank, collective=(library or ["all_reduce"])[0]
            )
        if numel > limit:
            raise TEXTS.wrong(
                "few-messages",
                "more elements sent than the rules allow",
                rank=answer.rank,
                numel=numel,
                ELEMENTS=ELEMENTS,
                limit=limit,
            )


_JUDGED = Judge(
    lambda rank, size, seed: {"sum": _all(seed)},
    cases=((RANKS, 31),),
    on_ranks=True,
    trial=_messages_trial,
    local=lambda rank, size, seed: {"sum": _part(rank, seed)},
    labels={"sum": Said("the sum", "la somme")},
    inspect=_inspect_messages,
)


class _FewMessages:
    """Judge of the challenge: rules first, then the most messages that one rank sends."""

    on_ranks = True
    cases = ((RANKS, 31),)

    def __call__(self, answer: Callable[..., Any]) -> float:
        _JUDGED(answer)
        ((ranks, seed),) = self.cases
        answers = run_on_ranks(_messages_trial, answer, ranks, seed=seed)
        # The slowest rank decides, so the score is the rank that sends most messages.
        return float(max(sum(call["op"] == "send" for call in rank_answer.calls) for rank_answer in answers))


FEW_MESSAGES = TEXTS.challenge("few-messages", _FewMessages(), target=4)
