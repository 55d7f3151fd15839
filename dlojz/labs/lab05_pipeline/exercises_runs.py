"""Exercises of lab 05 on runs: one micro-batch on real ranks, stages cut by first fit, stale SGD, DeepSpeed's pipeline.

Gradients of a stage are those of one process that runs all stages; shapes and types of the boundary change from case to
case. A cut is judged by its loads against the fewest stages that exist. Stale SGD follows
`dlojz.pipeline.orders.asynchronous`. DeepSpeed's JSON is judged by what DeepSpeed would do with it.
"""

import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.language import shortest
from dlojz.config.run_config import RunConfig
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts
from dlojz.labs.kit.judges import asked_run, check_settings, expect_json, reader, refuse_nothing
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

CASES = ((2, 11), (2, 12), (3, 13))
"""Two ranks first; with three, the middle one receives and sends in both directions."""
MICRO_BATCHES = 2
"""Two: the forward of the second does not wait for the backward of the first."""
WIDE_SEED = 12
"""The seed of the case in double precision."""
_WEIGHT, _BIAS = "gradient of the weight", "gradient of the bias"
_LABELS = {
    _WEIGHT: Said("the gradient of the stage's weight", "le gradient du poids de l’étage"),
    _BIAS: Said("the gradient of the stage's bias", "le gradient du biais de l’étage"),
}


def run_stage(
    stage: Callable[[Tensor], Tensor],
    x: Tensor | None,
    loss_of: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    send: Callable[[Tensor, int], object] | None = None,
) -> None:
    """This rank's part of one micro-batch: its stage forward, then backward; gradients are left in the parameters.

    Args:
        stage: this rank's, called as a function.
        x: the micro-batch on rank 0, None elsewhere.
        loss_of: loss of the last stage's output.
        shape, dtype: of what passes between two stages.
        send: sends a tensor to a rank; `dist.send` by default.

    Source: Huang et al. 2019 (arXiv 1811.06965), §2.2, for one micro-batch.
    """
    send = send or dist.send
    rank, last_rank = dist.get_rank(), dist.get_world_size() - 1
    if x is None:
        x = torch.empty(shape, dtype=dtype)
        # Who: the rank before. What: its output. How much: one boundary, elements of `shape` × bytes of `dtype`.
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank == last_rank:
        loss_of(y).backward()
    else:
        send(y.detach(), rank + 1)
        # The gradient of y has the shape and dtype of y.
        gradient = torch.empty_like(y)
        # Who: the rank behind. What: the gradient of the output sent to it. How much: the same.
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
    if rank > 0 and x.grad is not None:
        send(x.grad, rank - 1)


def _stages(size: int, seed: int) -> tuple[list[nn.Sequential], list[Tensor], Tensor]:
    """All stages, the micro-batches and the targets, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    samples, width = 3 + seed % 3, 4 + seed % 2
    dtype = torch.float64 if seed == WIDE_SEED else torch.float32
    stages = [nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()) for _ in range(size)]
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    targets, *inputs = (
        torch.randn((samples, width), generator=generator, dtype=dtype) for _ in range(1 + MICRO_BATCHES)
    )
    return stages, inputs, targets


def _loss(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: ((y - targets) ** 2).sum()


def _gradients(stage: nn.Sequential) -> dict[str, Tensor | None]:
    return {_WEIGHT: stage[0].weight.grad, _BIAS: stage[0].bias.grad}  # type: ignore[dict-item]


def _asks_for_a_gradient(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Before a stage that is not the first runs: without this the fault would show only where the gradient is sent."""
    if not inputs[0].requires_grad:
        raise TEXTS.wrong("stage-boundary", "what was received asks for no gradient")


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Tensor | None]]:
    """The gradients; and whether this rank has sent back a gradient of ones, as `y.sum().backward()` begins with."""
    stages, inputs, targets = _stages(size, seed)
    stage, (x, *_) = stages[rank], inputs
    if rank > 0:
        stage.register_forward_pre_hook(_asks_for_a_gradient)
    rank_inputs = [micro_batch if rank == 0 else None for micro_batch in inputs]
    blocking: Callable[..., None] = dist.send
    ones: list[bool] = []

    def send(tensor: Tensor, *to: Any, **options: Any) -> None:
        # Only sends to the rank before: there goes the gradient.
        ones.append((*to, options.get("dst"))[0] == rank - 1 and bool((tensor == 1).all()))
        blocking(tensor, *to, **options)

    setattr(dist, "send", send)  # noqa: B010 - the process ends with the trial
    _run(answer, stage, rank_inputs, (_loss(targets), tuple(x.shape), x.dtype), is_last=rank == size - 1)
    return {"ones": any(ones)}, _gradients(stage)


def _run(
    answer: Callable[..., Any],
    stage: nn.Sequential,
    inputs: list[Tensor | None],
    boundary: tuple[Any, ...],
    *,
    is_last: bool,
) -> None:
    """Run an answer on all micro-batches; one with a `yield` in halves, all first ones before the first second one."""
    destinations: list[int] = []

    def send(tensor: Tensor, to: int) -> None:
        destinations.append(to)
        dist.send(tensor, to)

    begun: list[Any] = []
    gradient_sets: list[dict[str, Tensor]] = []
    for x in inputs:
        halves = answer(stage, x, *boundary, send)
        if not isinstance(halves, GeneratorType):  # written in one piece: each micro-batch is judged for itself
            gradient_sets.append(
                {name: gradient.clone() for name, gradient in _gradients(stage).items() if gradient is not None}
            )
            stage.zero_grad()
            continue
        next(halves, None)
        # The last rank has nobody to send its output to.
        _refuse_first_half(stage, bool(destinations) or is_last)
        begun.append(halves)
        destinations.clear()
    # Second halves run only now: all forwards come before the first backward, as in GPipe.
    for halves in begun:
        for _ in halves:
            pass
    for parameter, name in zip(stage.parameters(), (_WEIGHT, _BIAS), strict=True):
        contributions = [gradient_set[name] for gradient_set in gradient_sets if name in gradient_set]
        if contributions:
            # Answers in one piece: their gradients were zeroed between micro-batches, and a step needs their sum.
            parameter.grad = sum(contributions[1:], contributions[0])


def _refuse_first_half(stage: nn.Sequential, handed_on: bool) -> None:
    """Refuse a first half in which backward has run, or after which the next rank waits for its input."""
    if any(gradient is not None for gradient in _gradients(stage).values()):
        raise TEXTS.wrong("stage-boundary", "backward has run before yield")
    if not handed_on:
        raise TEXTS.wrong("stage-boundary", "nothing is sent before yield")


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    stages, inputs, targets = _stages(size, seed)
    for x in inputs:
        y = x
        for stage in stages:
            y = stage(y)
        _loss(targets)(y).backward()
    return {name: gradient for name, gradient in _gradients(stages[rank]).items() if gradient is not None}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The gradients are right; has nothing but the boundary travelled?"""
    for answer in answers:
        for call in answer.calls:
            if call["op"] in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"):
                raise TEXTS.wrong("stage-boundary", "a collective is called", collective=call["op"])


STAGE_BOUNDARY = TEXTS.exercise(
    "stage-boundary",
    _expected,
    on_ranks=True,
    trial=_trial,
    cases=CASES,
    labels=_LABELS,
    source=(run_stage,),
    mistakes={
        "the gradient that has been received is not used": MistakeWay(
            "y.backward(gradient) → y.sum().backward()", seen=lambda ranks: not any(rank["ones"] for rank in ranks)
        ),
    },
    inspect=_inspect,
)


FirstFit = Callable[[Sequence[int], int], Sequence[int]]


def first_fit(weights: Sequence[int], limit: int) -> list[int]:
    """Bounds of the fewest stages whose loads do not exceed a limit: each takes blocks as long as they fit.

    Args:
        weights: one per block, none above the limit.
        limit: what a stage may weigh.

    Source: Pinar & Aykanat 2004 (J. Parallel Distrib. Comput. 64), §4, the probe.
    """
    bounds, load = [0], 0
    for block, weight in enumerate(weights):
        if load + weight > limit:
            bounds.append(block)
            load = 0
        load += weight
    return [*bounds, len(weights)]


def smallest_bottleneck(first_fit: FirstFit, weights: Sequence[int], stages: int) -> int:
    """The smallest limit for which `first_fit` needs no more than so many stages, by bisection."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(first_fit(weights, middle)) - 1 <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _partition_cases() -> Iterator[tuple[list[int], int]]:
    generator = random.Random(5)
    yield [4, 3, 2, 1], 5
    for _ in range(12):
        weights = [generator.randint(1, 9) for _ in range(generator.randint(4, 12))]
        yield weights, generator.randint(max(weights), 20)


def _check_cut(answer: Callable[..., Any], weights: list[int], limit: int) -> int:
    """The number of stages of a cut that is one."""
    bounds = _read_bounds(answer(weights, limit))
    loads = [sum(weights[start:stop]) for start, stop in pairwise(bounds)]
    fewest = len(first_fit(weights, limit)) - 1
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(weights) or bounds != sorted(bounds):
        sentence = TEXTS.sentence("first-fit", "bounds that do not rise", bounds=bounds, blocks=len(weights))
    elif max(loads) > limit:
        sentence = TEXTS.sentence("first-fit", "a stage that is too heavy", bounds=bounds, load=max(loads))
    elif 0 in loads:
        sentence = TEXTS.sentence("first-fit", "a stage without a block", bounds=bounds)
    elif len(loads) > fewest:
        # Where no block is added that would still fit, each stage but the last takes as many as it can.
        early = next(n for n, load in enumerate(loads[:-1]) if load + weights[bounds[n + 1]] <= limit)
        block = bounds[early + 1]
        full = loads[early] + weights[block]
        counts = {"bounds": bounds, "stages": len(loads), "loads": loads, "fewest": fewest}
        key = "more stages than needed, one of exactly the limit" if full == limit else "more stages than needed"
        sentence = TEXTS.sentence("first-fit", key, **counts, early=early, block=block, full=full)
    else:
        return len(loads)
    raise TEXTS.wrong("first-fit", "a case", weights=weights, limit=limit, sentence=sentence)


_read_bounds = reader(
    lambda bounds: [operator.index(bound) for bound in bounds],
    TEXTS.sentence("first-fit", "a list of whole numbers is expected, such as [0, 2, 4]"),
)


FIRST_FIT = TEXTS.exercise("first-fit", first_fit, cases=_partition_cases, trial=_check_cut)


HUGE = 1e9
"""A weight that began at 1 and is larger halfway has diverged."""
StaleSgd = Callable[[float, int, int], Sequence[float]]


def stale_sgd(step: float, delay: int, updates: int) -> list[float]:
    """w(0) … w(updates) of w(t+1) = w(t) − α w(t−τ), with w(t) = 1 up to t = 0.

    Source: Yang et al. 2021, PipeMare (arXiv 1910.05124), §2.2, on λ/2 w² with λ = 1.
    """
    weights = [1.0]
    for number in range(updates):
        weights.append(weights[number] - step * weights[max(number - delay, 0)])
    return weights


def largest_step(stale_sgd: StaleSgd, delay: int) -> float:
    """The largest stable step of an iteration, by bisection: stable is what ends smaller than it was halfway."""
    # At the threshold, 2 sin(π / (4τ + 2)), the iterates turn once in so many updates.
    period = 4 * delay + 2
    stable, unstable = 0.0, 2.5
    while unstable - stable > 1e-3 * unstable:
        middle = (stable + unstable) / 2
        sizes = [abs(weight) for weight in stale_sgd(middle, delay, 40 * period)]
        # A run that diverges far ends with infinities and NaN, of which no comparison holds.
        if not max(sizes[-period:]) <= max(sizes[19 * period : 20 * period]) < HUGE:
            unstable = middle
        else:
            stable = middle
    return (stable + unstable) / 2


def _stale_cases() -> Iterator[tuple[float, int, int]]:
    for step, delay in ((0.5, 0), (0.3, 1), (0.4, 3), (0.1, 7), (1.5, 2)):
        for updates in (9, 1, 4):
            yield step, delay, updates


_read_weights = reader(
    lambda weights: [float(weight) for weight in weights],
    TEXTS.sentence("stale-sgd", "a list of weights, w(0) to w(updates), is expected"),
)


def _last(answer: Callable[..., Any], step: float, delay: int, updates: int) -> float:
    weights = _read_weights(answer(step, delay, updates))
    if len(weights) != updates + 1:
        raise TEXTS.wrong(
            "stale-sgd",
            "another number of values",
            updates=updates,
            value_count=updates + 1,
            weights_count=len(weights),
        )
    if float(weights[0]) != 1.0:
        raise TEXTS.wrong("stale-sgd", "another first value", weights=shortest(float(weights[0])))
    return float(weights[-1])


_OLD_WEIGHT = "weights[max(number - delay, 0)]"

STALE_SGD = TEXTS.exercise(
    "stale-sgd",
    stale_sgd,
    cases=_stale_cases,
    trial=_last,
    mistakes={
        "step taken from the old weights": f"weights[number] → {_OLD_WEIGHT}",
        "fresh gradient in the first updates": (
            f"{_OLD_WEIGHT} → weights[number - delay if number >= delay else number]"
        ),
        "your gradient is always that of w = 1": f"{_OLD_WEIGHT} → 1.0",
        "zero gradient in the first updates": f"{_OLD_WEIGHT} → (weights[number - delay] if number >= delay else 0.0)",
    },
)


def course_case() -> RunConfig:
    """The course's run: AlexNet, 2 stages × 2 replicas, 8 micro-batches, 200 steps."""
    return RunConfig.of(model="alexnet", engine="deepspeed", pp=2, dp=2, micro_batch=32, micro_batches=8, steps=200)


def _json_cases() -> list[tuple[RunConfig]]:
    common = {"engine": "deepspeed", "model": "alexnet"}
    return [
        (course_case(),),
        (RunConfig.of(pp=4, dp=2, micro_batch=4, micro_batches=16, zero=1, **common),),
        (RunConfig.of(pp=2, dp=3, micro_batch=8, micro_batches=6, **common),),
        (RunConfig.of(pp=4, dp=1, micro_batch=16, micro_batches=12, **common),),
    ]


def _check_json(answer: Callable[..., Any], config: RunConfig) -> None:
    processes, stages, document = _three(answer(config))
    request = asked_run(config, "pp", "dp", "micro_batch", "micro_batches", "zero")
    _check_numbers(processes, stages, config, request)
    _check_batch(expect_json(document), config)
    check_settings(document, config, request)


def _three(answer: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    refuse_nothing(answer)
    three = tuple(answer) if isinstance(answer, tuple | list) else ()
    if len(three) != 3 or not isinstance(three[2], Mapping):
        raise TEXTS.wrong("pipeline-json", "not three things")
    return three


def _check_numbers(processes: Any, stages: Any, config: RunConfig, request: Said) -> None:
    layout = config.layout
    if stages != layout.pp:
        key = "the replicas for the stages" if stages == layout.dp else "another number of stages"
        raise TEXTS.wrong("pipeline-json", key, request=request, stages=stages, due=layout.pp)
    if processes != layout.world_size:
        raise TEXTS.wrong(
            "pipeline-json", "another number of processes", request=request, processes=processes, layout=layout
        )


def _check_batch(document: Mapping[str, Any], config: RunConfig) -> None:
    layout = config.layout
    total = document.get("train_batch_size")
    samples = layout.micro_batch * layout.micro_batches
    if total == samples * layout.world_size != layout.global_batch:
        raise TEXTS.wrong("pipeline-json", "train_batch_size counts every rank", total=total, layout=layout)
    if document.get("gradient_accumulation_steps") is None and total is None:
        raise TEXTS.wrong("pipeline-json", "nothing tells DeepSpeed how many micro-batches a step has")


PIPELINE_JSON = TEXTS.exercise("pipeline-json", cases=_json_cases, trial=_check_json)
