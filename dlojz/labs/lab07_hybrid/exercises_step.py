"""Exercises of lab 07 on ranks: one step in two dimensions, and attention whose keys and values go round a ring.

The step is judged by the gradients of the whole batch, attention by the outputs of one process with the whole sequence.

Shape suffixes: B batch, N heads, S tokens of one rank, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.config.layout import RankGrid
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import RANK_CASES
from dlojz.labs.kit.rank_judges import OUTPUT, asked_for, gathers, normals
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

HIDDEN, WIDTH, SAMPLES = 3, 4, 5
"""Hidden features of one rank, width of the stream, samples of one replica."""
NAMES = ("scale", "w1", "w2", "bias")
Part = dict[str, Tensor]


def make_part(rank: int, dp: int, tp: int, seed: int) -> tuple[Part, Tensor, Tensor]:
    """Make a rank's parameters, samples and targets from the seed."""
    coordinates = RankGrid(dp=dp, tp=tp).coordinates(rank)
    tensors = _whole(dp, tp, seed)
    part = {
        name: value.clone().requires_grad_()
        for name, value in _sliced(tensors, coordinates.tp).items()
        if name in NAMES
    }
    rows = slice(coordinates.dp * SAMPLES, (coordinates.dp + 1) * SAMPLES)
    return part, tensors["x"][rows], tensors["targets"][rows]


def _whole(dp: int, tp: int, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"scale": (WIDTH,), "w1": (tp * HIDDEN, WIDTH), "w2": (WIDTH, tp * HIDDEN), "bias": (WIDTH,),
              "x": (dp * SAMPLES, WIDTH), "targets": (dp * SAMPLES, WIDTH)}  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _sliced(tensors: Mapping[str, Tensor], number: int) -> Part:
    columns = slice(number * HIDDEN, (number + 1) * HIDDEN)
    return {**tensors, "w1": tensors["w1"][columns], "w2": tensors["w2"][:, columns]}


@dataclass(frozen=True)
class StepVariant:
    """Variant of the step, right or wrong; the right one by default.

    Args:
        added: axis over which the outputs are added up, `world` or empty.
        copied: axis over which the gradient of the input is added up.
        reduced: axis over which gradients are added up.
        divided: by what they are divided then: an axis, `world` or nothing.
        bias_each: whether every rank adds the bias before the sum.
        only_slices: whether the parameters that are whole everywhere are left out of the average.
    """

    added: str = "tp"
    copied: str = "tp"
    reduced: str = "dp"
    divided: str = "dp"
    bias_each: bool = False
    only_slices: bool = False


@cache
def gradients(dp: int, tp: int, seed: int, variant: StepVariant) -> list[Part]:
    """Compute in one process what each rank would hold after this variant of the step."""
    grid = RankGrid(dp=dp, tp=tp)
    parts = [make_part(rank, dp, tp, seed) for rank in range(grid.world_size)]
    # What enters the layer stands alone, so that its gradient can be added up as `copy` does.
    inputs = [(x * part["scale"]).detach().requires_grad_() for part, x, _ in parts]
    terms = [
        (entering @ part["w1"].T).relu() @ part["w2"].T + variant.bias_each * part["bias"]
        for entering, (part, _, _) in zip(inputs, parts, strict=True)
    ]
    for rank, (part, _, targets) in enumerate(parts):
        # Detached: an all-reduce adds the others' values, and backward reaches this rank's term alone.
        peer_terms = [terms[peer].detach() for peer in _group(grid, rank, variant.added) if peer != rank]
        y = sum(peer_terms, terms[rank]) + (not variant.bias_each) * part["bias"]
        ((y - targets) ** 2).mean().backward()
    rank_gradients: list[Part] = []
    for rank, (part, x, _) in enumerate(parts):
        # (samples, WIDTH): the gradient of x · scale, of which every slice of tp has a contribution.
        input_gradient = _sum([_gradient(inputs[peer]) for peer in _group(grid, rank, variant.copied)])
        weight_gradients = {name: _gradient(part[name]) for name in ("w1", "w2", "bias")}
        rank_gradients.append({"scale": (input_gradient * x).sum(0), **weight_gradients})
    return [_averaged(rank_gradients, rank, grid, variant) for rank in range(grid.world_size)]


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _averaged(rank_gradients: list[Part], rank: int, grid: RankGrid, variant: StepVariant) -> Part:
    group, divisor = _group(grid, rank, variant.reduced), len(_group(grid, rank, variant.divided))
    # `divided` may be another axis than `reduced`: in the right variant both are dp.
    averaged = {name: _sum([rank_gradients[peer][name] for peer in group]) / divisor for name in NAMES}
    if variant.only_slices:
        averaged |= {name: rank_gradients[rank][name] for name in ("scale", "bias")}
    return {f"gradient of {name}": value for name, value in averaged.items()}


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _group(grid: RankGrid, rank: int, axis: str) -> tuple[int, ...]:
    if axis == "world":
        return tuple(range(grid.world_size))
    return grid.group_of(rank, axis) if axis else (rank,)


STEP_DEGREES = {4: (2, 2), 3: (3, 1)}
"""(dp, tp) by number of ranks; in the second case the two differ, so that none stands for the other."""
STEP_CASES = ((4, 21), (3, 22))
_LABELS = {f"gradient of {name}": Said(f"the gradient of {name}", f"le gradient de {name}") for name in NAMES}


RIGHT = StepVariant()


def _held(variant: StepVariant) -> Callable[[int, int, int], Part]:
    return lambda rank, size, seed: gradients(*STEP_DEGREES[size], seed, variant)[rank]


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Tensor | None]]:
    from dlojz.by_hand.tensor.axis import TensorAxis

    dp, tp = STEP_DEGREES[size]
    grid, axes = RankGrid(dp=dp, tp=tp), {}
    for axis in ("dp", "tp"):
        for group in grid.groups(axis):
            process_group = dist.new_group(list(group))  # every rank makes every group, and keeps its own
            if rank in group:
                axes[axis] = TensorAxis(process_group)
    part, x, targets = make_part(rank, dp, tp, seed)
    answer(part, x, targets, axes["dp"], axes["tp"])
    grads = {f"gradient of {name}": part[name].grad for name in NAMES}
    if not any(grad is not None for grad in grads.values()):  # all zero: the first fault names it
        grads = {f"gradient of {name}": torch.zeros_like(part[name]) for name in NAMES}
    return None, grads


STEP_2D = TEXTS.exercise(
    "hybrid-step",
    _held(RIGHT),
    on_ranks=True,
    trial=_trial,
    cases=STEP_CASES,
    labels=_LABELS,
    faults={
        "no parameter has a gradient": lambda rank, size, seed: {
            name: 0 * value for name, value in _held(RIGHT)(rank, size, seed).items()
        },
        "neither copy nor average": _held(StepVariant(copied="", reduced="", divided="")),
        "your loss is a sum over samples and features": lambda rank, size, seed: {
            n: SAMPLES * WIDTH * v for n, v in _held(RIGHT)(rank, size, seed).items()
        },
        "your loss is a sum over the samples": lambda rank, size, seed: {
            n: SAMPLES * v for n, v in _held(RIGHT)(rank, size, seed).items()
        },
        "the gradients are averaged over all ranks": _held(StepVariant(reduced="world", divided="world")),
        "the two axes are swapped": _held(StepVariant(added="dp", copied="dp", reduced="tp", divided="tp")),
        "the gradients are averaged over tp": _held(StepVariant(reduced="tp", divided="tp")),
        "the gradients are summed over dp, but divided by all ranks": _held(StepVariant(divided="world")),
        "the gradients are summed over dp, but divided by tp.size": _held(StepVariant(divided="tp")),
        "the gradients are summed over the replicas": _held(StepVariant(divided="")),
        "no average over the replicas": _held(StepVariant(reduced="", divided="")),
        "only scale is wrong": _held(StepVariant(copied="")),
        "terms of the output alone, and no copy": _held(StepVariant(added="", copied="")),
        "terms of the output alone": _held(StepVariant(added="")),
        "the bias is added on every rank before the sum over tp": _held(StepVariant(bias_each=True)),
        "scale and bias are left out of the average": _held(StepVariant(only_slices=True)),
    },
)


BATCH, HEADS, TOKENS, HEAD = 2, 3, 4, 5
"""Of attention; the tokens are those of one rank."""


def _queries_keys_values(size: int, seed: int) -> list[Tensor]:
    """Those of the whole sequence, (B, N, size × S, H) each."""
    return normals(seed, *[(BATCH, HEADS, size * TOKENS, HEAD)] * 3)


def _ring_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    shards = (tensor.chunk(size, dim=2)[rank].contiguous() for tensor in _queries_keys_values(size, seed))
    return {OUTPUT: answer(*shards)}


def _attended(variant: str = "whole") -> Callable[[int, int, int], dict[str, Tensor]]:
    """What a rank has for its queries: the right way over the whole sequence, or a wrong one."""

    def attended(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        q_all, k, v = _queries_keys_values(size, seed)
        q = q_all.chunk(size, dim=2)[rank]
        scores = q @ k.mT if variant == "no root" else q @ k.mT / HEAD**0.5
        blocks = list(zip(scores.chunk(size, dim=-1), v.chunk(size, dim=2), strict=True))
        if variant == "own":
            blocks = [blocks[rank]]
        outputs = [block.softmax(-1) @ values for block, values in blocks]
        if variant == "mean":
            return {OUTPUT: torch.stack(outputs).mean(0)}
        if variant == "sum":
            return {OUTPUT: torch.stack(outputs).sum(0)}
        # exp of all scores, (…, S, N · S), over their sum: the softmax over the keys of all ranks.
        weights = torch.cat([block for block, _ in blocks], dim=-1).exp()
        values = torch.cat([values for _, values in blocks], dim=2)
        return {OUTPUT: weights @ values / (1 if variant == "not divided" else weights.sum(-1, keepdim=True))}

    return attended


def _inspect_ring(answers: list[RankAnswer], size: int) -> None:
    """The values are right; have keys and values gone round once, and from neighbour to neighbour?"""
    if any(gathers(answer) or asked_for(answer, "all_reduce") for answer in answers):
        raise TEXTS.wrong("ring-attention", "a collective is called")
    numel = sum(asked_for(answers[0], "send", "isend"))
    limit = 2 * (size - 1) * BATCH * HEADS * TOKENS * HEAD
    if numel > limit:
        passes = Said(f"{size - 1} pass{'es' if size > 2 else ''}", f"{size - 1} passage{'s' if size > 2 else ''}")
        raise TEXTS.wrong(
            "ring-attention",
            "more is sent than the ring needs",
            size=size,
            numel=numel,
            limit=limit,
            passes=passes,
        )


RING_ATTENTION = TEXTS.exercise(
    "ring-attention",
    _attended(),
    on_ranks=True,
    trial=_ring_trial,
    cases=RANK_CASES,
    inspect=_inspect_ring,
    faults={
        "keys of the rank's own tokens alone": _attended("own"),
        "you take the mean of the blocks' outputs": _attended("mean"),
        "you add up the outputs of the blocks": _attended("sum"),
        "outputs not divided by the sum of exponentials": _attended("not divided"),
        "scores not divided by √H": _attended("no root"),
    },
)
