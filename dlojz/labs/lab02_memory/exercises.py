"""Exercises of lab 02 on what memory holds: states and peak, one layer's activations, the largest batch, a replica.

The references are the closed forms of `dlojz.prediction.rules_of_thumb`, which the probe confirms to the byte.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, NamedTuple

from dlojz.base.language import shortest
from dlojz.base.table import Table
from dlojz.labs.kit.answer_numbers import plain
from dlojz.labs.kit.exercise import or_to_do
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import shown
from dlojz.prediction.rules_of_thumb import Shape, layer_bytes
from dlojz.prediction.rules_of_thumb import bytes_per_parameter as form

TEXTS = Texts(__file__)

PRECISIONS = ("fp32", "autocast", "bf16", "bf16_fp32_gradients")
OPTIMIZERS = ("sgd", "momentum", "adamw")


def bytes_per_parameter(precision: str, optimizer: str) -> int:
    """Bytes of all states per parameter on one device: weight, gradient, master copy and moments.

    Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), §3.1; see `dlojz.prediction.rules_of_thumb`.
    """
    return int(form(precision, optimizer).device_per_parameter)  # type: ignore[arg-type]


def _per_parameter(precision: str, optimizer: str) -> int:
    weights = {"fp32": (4, 4, 0), "autocast": (4, 4, 0), "bf16": (2, 2, 4), "bf16_fp32_gradients": (2, 4, 4)}
    weight, gradient, master = weights[precision]
    moments = {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]
    return weight + gradient + master + 4 * moments


BYTES_PER_PARAMETER = TEXTS.exercise(
    "bytes-per-parameter",
    bytes_per_parameter,
    cases=lambda: product(PRECISIONS, OPTIMIZERS),
    source=(_per_parameter,),
)


def data_parallel_bytes(parameters: int, sample_bytes: int, global_batch: int, dp: int) -> int:
    """Bytes of one of dp replicas in fp32 with AdamW: states, DDP's buckets, activations of its share of the batch.

    An upper bound: activations are released while gradients appear.

    Source: ZeRO (arXiv 1910.02054), §3: data parallelism replicates all states; torch's DDP keeps buckets as large as
    the gradients (Li et al. 2020, arXiv 2006.15704, §4.2).
    """
    # DDP's buckets hold a second copy of the fp32 gradients; one replica communicates nothing and has none.
    buckets_bytes = 4 * parameters if dp > 1 else 0
    return 16 * parameters + buckets_bytes + sample_bytes * global_batch // dp


DATA_PARALLEL_BYTES = TEXTS.exercise(
    "data-parallel-bytes",
    data_parallel_bytes,
    cases=(
        (1_000_000, 3_000_000, 64, 1),
        (1_000_000, 3_000_000, 64, 2),
        (2_500_000_000, 12_000_000_000, 64, 64),
        (25_000_000, 240_000_000, 128, 8),
        (7_000_000, 1_000, 32, 4),
        (3_000_000, 2_000_000, 32, 1),
        (9_000_000, 5_000_000, 16, 2),
    ),
)


Samples = Sequence[Mapping[str, int]]


def peak_bytes(samples: Samples) -> int:
    """Largest sum over the categories at one and the same moment."""
    return max(sum(sample.values()) for sample in samples)


def _steps() -> Iterator[tuple[list[dict[str, int]]]]:
    # Activations and gradients do not have their maxima together; the peak lies in the middle, early, late.
    states = {"weights": 40, "optimizer": 80}
    yield ([{**states, "activations": a, "gradients": g} for a, g in ((10, 0), (90, 0), (95, 4), (30, 30), (0, 40))],)
    yield ([{**states, "activations": a, "gradients": g} for a, g in ((5, 0), (20, 0), (8, 30), (0, 41), (0, 39))],)
    yield ([{"weights": 7, "workspace": w, "activations": a} for w, a in ((60, 0), (2, 50), (3, 55), (1, 12))],)
    yield ([{"weights": 7}, {"weights": 7, "activations": 20}, {"weights": 7, "gradients": 30}],)  # the last is largest
    yield ([{"weights": 5}, {"weights": 5, "activations": 8}, {"weights": 5, "activations": 2, "gradients": 44}],)
    yield ([{"weights": 9, "workspace": w, "activations": a} for w, a in ((80, 0), (1, 33), (0, 12))],)


def _maxima_added(samples: Samples) -> int:
    names = {name for sample in samples for name in sample}
    return sum(max(sample.get(name, 0) for sample in samples) for name in names)


PEAK = TEXTS.exercise(
    "peak",
    peak_bytes,
    cases=_steps,
    mistakes={
        "you add the largest value of each category": _maxima_added,
        "the moment of the peak, not its bytes": lambda samples: max(
            range(len(samples)), key=lambda moment: sum(samples[moment].values())
        ),
        "the mean over the step": lambda samples: sum(sum(sample.values()) for sample in samples) / len(samples),
    },
)


def transformer_layer_bytes(s: int, b: int, h: int, a: int) -> int:
    """Bytes that one transformer layer keeps for backward in 16 bit, with dropout and attention written out.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), §4.1: s·b·h·(34 + 5·a·s/h).
    """
    return int(layer_bytes(Shape(sequence_length=s, micro_batch=b, hidden=h, heads=a)))


def _sbh(factor: float, score_factor: float = 5) -> Callable[[int, int, int, int], float]:
    return lambda s, b, h, a: factor * s * b * h + score_factor * a * s * s * b


BLOCK_ACTIVATIONS = TEXTS.exercise(
    "block-activations",
    transformer_layer_bytes,
    cases=((128, 2, 64, 4), (1024, 1, 768, 12), (2048, 4, 12288, 96), (197, 8, 192, 3)),
    mistakes={
        "input of q, k, v counted three times": _sbh(38),
        "input of the softmax kept as well": _sbh(34, 7),
        "one 2-byte tensor of the scores is missing": _sbh(34, 3),
        "the scores are missing": _sbh(34, 0),
        "result of the softmax alone for the scores": _sbh(34, 2),
        "dropout masks of 2 bytes per element": _sbh(36, 6),
        "the dropout masks are missing": _sbh(32, 4),
        "the layer norms are missing": _sbh(30),
        "one of the two tensors of width 4 h": _sbh(26),
        "the terms of width h are missing": _sbh(0),
        "one dropout mask of width h is missing": _sbh(33),
        "a tensor of width h is missing": _sbh(32),
        "dropout mask of the scores is missing": _sbh(34, 4),
        "scores of s in place of s²": lambda s, b, h, a: 34 * s * b * h + 5 * a * s * b,
        "scores of width h per pair of tokens": lambda s, b, h, a: 34 * s * b * h + 5 * s * s * b * h,
        "the attention alone": _sbh(11),
        "the MLP is missing": _sbh(15),
        "you count elements, not bytes": _sbh(17, 2.5),
        "one head's scores for all heads": lambda s, b, h, a: 34 * s * b * h + 5 * s * s * b,
    },
)


_CALLS = 6
_NEAR, _FAR = 8, 16


def largest_batch(taken_bytes: Callable[[int], int], limit_bytes: int) -> int:
    """Largest batch that fits where memory is a line in the batch: two points give it."""
    # Both points lie beyond the batches whose peak is in the optimizer's update, where the line is another one.
    slope_bytes = (taken_bytes(_FAR) - taken_bytes(_NEAR)) // (_FAR - _NEAR)
    fixed_bytes = taken_bytes(_NEAR) - _NEAR * slope_bytes
    return max(0, (limit_bytes - fixed_bytes) // slope_bytes)


class _Line:
    """Bytes taken by batch, a line but for small batches, whose peak is elsewhere; counts how often it is asked."""

    def __init__(self, fixed_bytes: int, sample_bytes: int, least_bytes: int = 0) -> None:
        self.fixed_bytes, self.sample_bytes, self.least_bytes = fixed_bytes, sample_bytes, least_bytes
        self.least_slope_bytes = sample_bytes // 10
        self.asked: list[float] = []

    def __repr__(self) -> str:
        line = f"{self.fixed_bytes} + {self.sample_bytes} × batch"
        return f"max({self.least_bytes} + {self.least_slope_bytes} × batch, {line})" if self.least_bytes else line

    def __call__(self, batch: int) -> int:
        self.asked.append(batch)
        least_bytes = self.least_bytes + batch * self.least_slope_bytes if self.least_bytes else 0
        return max(least_bytes, self.fixed_bytes + batch * self.sample_bytes)


def _devices() -> Iterator[tuple[_Line, int]]:
    yield _Line(1_000, 10), 2_005
    yield _Line(500, 7), 500 + 7 * 40  # full to the last byte
    yield _Line(16_000, 230), 32_000
    yield _Line(39_000, 12_000), 32_000  # not even one sample
    yield _Line(1_000, 100, least_bytes=1_450), 9_999  # up to a batch of 5 the peak is in the optimizer's update
    # Once more each, so that no number fits by chance.
    yield _Line(250, 9), 250 + 9 * 31
    yield _Line(50_000, 7_000), 41_000
    yield _Line(2_000, 300, least_bytes=3_350), 20_123


def _refuse_many_calls(answer: Callable[..., Any]) -> None:
    """A right batch; how often was the memory asked for?"""
    # The lines of `_devices` are made anew, so the calls that the judge made before are not counted.
    lines = [line for line, limit_bytes in _devices() if answer(line, limit_bytes) is not None]
    calls = max(len(line.asked) for line in lines)
    if calls > _CALLS:
        raise TEXTS.wrong("largest-batch", "too many calls", calls=calls)


_QUOTIENT = "(limit_bytes - fixed_bytes) // slope_bytes"

LARGEST_BATCH = TEXTS.exercise(
    "largest-batch",
    largest_batch,
    cases=_devices,
    mistakes={
        "you take the line through the origin": lambda bytes_at, limit: limit // (bytes_at(_FAR) / _FAR),
        "you round to the nearest": f"{_QUOTIENT} → round((limit_bytes - fixed_bytes) / slope_bytes)",
        "taken_bytes(8) is not the fixed part": (
            f"- _NEAR * slope_bytes →; max(0, {_QUOTIENT}) → (limit_bytes - fixed_bytes) / slope_bytes"
        ),
        "one sample short": f"{_QUOTIENT} → {_QUOTIENT} - 1",
        "you divide the limit by what one sample takes": lambda bytes_at, limit: limit // bytes_at(1),
        "you round up": f"{_QUOTIENT} → -((fixed_bytes - limit_bytes) // slope_bytes)",
        "a negative batch where not even one sample fits": f"max(0, {_QUOTIENT}) → {_QUOTIENT}",
    },
    then=_refuse_many_calls,
)


@or_to_do
def asked(question: Callable[[], Any]) -> Any:
    """What a question gives that calls functions of the student."""
    return question()


@or_to_do
def states_table(bytes_per_parameter: Callable[[str, str], float]) -> Table:
    """Bytes per parameter by precision and optimizer, by the student's function."""

    def row(precision: str) -> tuple[str, ...]:
        return precision, *(shortest(bytes_per_parameter(precision, optimizer)) for optimizer in OPTIMIZERS)

    return Table(("", *OPTIMIZERS), tuple(map(row, PRECISIONS)))


class LayerCost(NamedTuple):
    """One layer of the challenge.

    Attributes:
        kept_mib: activations that it keeps for its backward pass (MiB).
        input_mib: its input, all that it keeps if it is checkpointed (MiB).
        gflop: operations of its forward pass, done again if it is checkpointed (GFLOP).
    """

    kept_mib: int
    input_mib: int
    gflop: int


LAYERS, SEEDS = 24, (1, 2, 3)


def challenge_case(seed: int) -> tuple[list[LayerCost], int]:
    """24 layers of several sizes, and the limit for their activations (MiB)."""
    random = Random(seed)
    layers = []
    for _ in range(LAYERS):
        width = random.choice((4, 6, 9, 14))
        layers.append(LayerCost(width * random.randint(6, 18), width, random.randint(20, 90)))
    return layers, sum(layer.kept_mib for layer in layers) * 45 // 100


def challenge_peak_mib(layers: Sequence[LayerCost], chosen: Collection[int]) -> int:
    """Most activations at one moment: a layer's own, during its backward pass, with what the layers before it keep."""
    peak_mib = stored_mib = 0
    for index, layer in enumerate(layers):
        peak_mib = max(peak_mib, stored_mib + layer.kept_mib)
        stored_mib += layer.input_mib if index in chosen else layer.kept_mib
    return peak_mib


def fewest_gflop(layers: Sequence[LayerCost], limit_mib: int) -> int:
    """Fewest operations done again within the limit, by dynamic programming over what is held so far.

    Source: Bellman 1957; Beaumont et al. 2019 (arXiv 1911.13214) for chains of layers.
    """
    gflop_by_mib = {0: 0}
    for layer in layers:
        grown: dict[int, int] = {}
        for stored_mib, gflop in gflop_by_mib.items():
            # During its backward pass a layer needs all its activations, whichever way it is chosen.
            if stored_mib + layer.kept_mib > limit_mib:
                continue
            for more_mib, extra_gflop in ((layer.kept_mib, 0), (layer.input_mib, layer.gflop)):
                # Of all plans that hold as much after this layer, the one of fewest operations is enough.
                grown[stored_mib + more_mib] = min(
                    grown.get(stored_mib + more_mib, gflop + extra_gflop), gflop + extra_gflop
                )
        gflop_by_mib = grown
    return min(gflop_by_mib.values())


def _fewest_operations(answer: Callable[..., Any]) -> float:
    """Hold plans to the rules; give their operations as a share of the fewest possible."""
    plan_gflop = best = 0
    for seed in SEEDS:
        layers, limit_mib = challenge_case(seed)
        plan = answer(list(layers), limit_mib)
        try:
            chosen = [operator.index(index) for index in plain(plan)]
        except (TypeError, ValueError):
            raise TEXTS.wrong("fewest-operations", "no numbers of layers", plan=shown(plan)) from None
        if sorted(set(chosen)) != sorted(chosen) or not set(chosen) <= set(range(LAYERS)):
            raise TEXTS.wrong(
                "fewest-operations", "a layer twice, or one that does not exist", last=LAYERS - 1, chosen=chosen
            )
        peak = challenge_peak_mib(layers, set(chosen))
        if peak > limit_mib:
            raise TEXTS.wrong("fewest-operations", "the plan does not fit", peak=peak, limit_mib=limit_mib)
        # Summed over all seeds before the division, so that a large case weighs more.
        plan_gflop += sum(layers[index].gflop for index in chosen)
        best += fewest_gflop(layers, limit_mib)
    return round(100 * plan_gflop / best, 1)


FEWEST_OPERATIONS = TEXTS.challenge("fewest-operations", _fewest_operations, target=100)
