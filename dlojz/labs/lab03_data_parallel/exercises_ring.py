"""Exercises of lab 03 on the ring and the data: ring all-reduce, its time, α and β, the sampler, the learning rate.

A ring is judged by the sum on every rank and by what was sent for it. The fit minimises relative gaps, so that short
messages count as much as long ones. For the sampler no order is prescribed: ranks must read disjoint, equal shares,
in another order in every epoch, and the same when asked again.
"""

from __future__ import annotations

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
from dlojz.labs.kit.exercise import Said, Wrong
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts
from dlojz.labs.kit.judges import reader
from dlojz.labs.kit.rank_judges import same
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


def ring(
    x: Tensor,
    *,
    gather: bool = True,
    add_again: bool = False,
    turn: bool = True,
    steps_less: int = 0,
    first_offset: int = 1,
    upwards: bool = False,
) -> Tensor:
    """The ring all-reduce of a vector, in place; the options spoil it in the usual ways.

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

    for step in range(size - 1 - steps_less):
        # In step s rank r sends chunk r - s and adds what it receives to chunk r - s - 1, which it sends next.
        back = step if turn else 0
        pass_on(rank - back, rank - back - 1, True)
    for step in range(size - 1 - steps_less if gather else 0):
        # After the reduce-scatter rank r holds the whole sum of chunk r + 1: from there on chunks replace those held.
        back = (-step if upwards else step) if turn else 0
        pass_on(rank + first_offset - back, rank + first_offset - back - 1, add_again)
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
    mistakes={
        "the reduce-scatter alone": lambda x: ring(x, gather=False),
        "the all-gather still adds what arrives": lambda x: ring(x, add_again=True),
        "you send the same chunk in every step": lambda x: ring(x, turn=False),
        "the all-gather starts with the wrong chunk": lambda x: ring(x, first_offset=0),
        "the all-gather goes up in the chunks": lambda x: ring(x, upwards=True),
        "the mean in place of the sum": lambda x: ring(x) / (len(x) // CHUNK),
    },
    inspect=_inspect,
)


def ring_seconds(message_bytes: float, size: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Time of a ring all-reduce: 2 (p − 1) steps, each α plus β times one chunk of n / p bytes.

    Source: Hockney 1994 (α–β); Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations
    in MPICH", §4.5, without the term of the additions.
    """
    return 2 * (size - 1) * (alpha_s + message_bytes / size * beta_s_per_byte)


def _networks() -> Iterator[tuple[int, int, float, float]]:
    yield 4_000_000, 4, 1e-3, 1e-9
    yield 65_536, 8, 2e-3, 5e-8
    yield 1_000_000, 2, 5e-4, 3e-9
    yield 8_192, 64, 1e-3, 2e-7
    yield 4_096, 1, 1e-3, 1e-8


RING_TIME = TEXTS.exercise(
    "ring-time",
    ring_seconds,
    cases=_networks,
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


def _absolute(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    return weighted_line(message_bytes, seconds, [1.0] * len(seconds))


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


ALPHA_BETA = TEXTS.exercise(
    "alpha-beta",
    fit_alpha_beta,
    cases=_measurements,
    mistakes={
        "the line is fitted with other weights than 1 / t": tuple(
            lambda n, t, p, power=power: _per_step(weighted_line(n, t, [1 / seconds**power for seconds in t]), p)
            for power in (4, 1)
        ),
        "multiplied by the steps": MistakeWay(lambda n, t, p: 2 * (p - 1) * weighted_line(n, t)[0], part=0),
        "the line is that of the whole all-reduce": lambda n, t, p: weighted_line(n, t),
        "you minimise gaps in seconds": lambda n, t, p: _per_step(_absolute(n, t), p),
        "gaps in seconds, and the line of the whole all-reduce": lambda n, t, p: _absolute(n, t),
        "your line goes through two measurements alone": lambda n, t, p: _per_step(_ends(n, t), p),
        "you return β, then α": lambda n, t, p: (fit_alpha_beta(n, t, p)[1], fit_alpha_beta(n, t, p)[0]),
        "β lacks a factor p": lambda n, t, p: (
            weighted_line(n, t)[0] / (2 * (p - 1)),
            weighted_line(n, t)[1] / (2 * (p - 1)),
        ),
        "β is the inverse, the bandwidth": MistakeWay(lambda n, t, p: 1 / fit_alpha_beta(n, t, p)[1], part=1),
        "you compute with 4 ranks whatever `size` is": lambda n, t, p: _per_step(weighted_line(n, t), 4),
        "both twice too large": lambda n, t, p: (2 * fit_alpha_beta(n, t, p)[0], 2 * fit_alpha_beta(n, t, p)[1]),
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
        raise Wrong(*_NOT_REPEATED)
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
        raise Wrong(*_SEED_UNUSED)
    if unused[0]:
        raise Wrong(*_SEED_UNUSED_AT_FIRST)
    if any(unused):
        raise TEXTS.wrong("sampler", "in one epoch the seed changes nothing", epoch=unused.index(True))
    shards = _shards(answer, num_samples, size, 1)
    with hashes_of_another_process():
        elsewhere = _shards(answer, num_samples, size, 1)
    if shards != elsewhere:
        raise Wrong(*_HASHED)


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
        raise Wrong(*_ALL_THE_SAME)
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
        raise Wrong(*_NOT_SHUFFLED)
    if any(earlier == following for earlier, following in combinations(epochs, 2)):
        raise Wrong(*_SAME_EVERY_EPOCH)
    if all(sorted(shard) == sorted(first_epoch[rank]) for shards in epochs for rank, shard in enumerate(shards)):
        raise Wrong(*_OWN_PART_ONLY)
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


_NOT_REPEATED = TEXTS.sentence("sampler", "two answers for the same epoch")
_ALL_THE_SAME = TEXTS.sentence("sampler", "every rank reads the same samples")
_NOT_SHUFFLED = TEXTS.sentence("sampler", "the samples are divided among the ranks, but not shuffled")
_SAME_EVERY_EPOCH = TEXTS.sentence("sampler", "every epoch has the same order")
_OWN_PART_ONLY = TEXTS.sentence("sampler", "a rank always reads the same part of the data")
_SEED_UNUSED = TEXTS.sentence("sampler", "the seed changes nothing")

_SEED_UNUSED_AT_FIRST = TEXTS.sentence("sampler", "the seed changes nothing in epoch 0")
_HASHED = TEXTS.sentence("sampler", "hash differs between processes")

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
        "the rate goes on rising after the warm-up": lambda step, base, scale, warm: (
            base * (1 + (scale - 1) * step / warm)
        ),
        "you scale by the square root": lambda step, base, scale, warm: (
            base * (1 + (math.sqrt(scale) - 1) * min(1, step / warm))
        ),
        "you rise by scale times the base rate": lambda step, base, scale, warm: (
            base * (1 + scale * min(1, step / warm))
        ),
        "a jump at the end of the warm-up": lambda step, base, scale, warm: base if step < warm else base * scale,
        "you rise by base_rate during the warm-up": lambda step, base, scale, warm: base * min(1 + step / warm, scale),
        "you are one step ahead": lambda step, base, scale, warm: scaled_rate(step + 1, base, scale, warm),
        "you arrive one step too early": lambda step, base, scale, warm: scaled_rate(step, base, scale, warm - 1),
        "geometric in place of linear rise": lambda step, base, scale, warm: base * scale ** min(1, step / warm),
        "the rate falls back after the warm-up": lambda step, base, scale, warm: (
            scaled_rate(step, base, scale, warm) if step <= warm else base
        ),
        "the rate never changes": lambda step, base, scale, warm: base,
    },
)
