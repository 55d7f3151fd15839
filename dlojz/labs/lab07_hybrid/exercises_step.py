"""Exercises of lab 07 on ranks: one step in two dimensions, and attention whose keys and values go round a ring.

The step is judged by the gradients of the whole batch, attention by the outputs of one process with the whole sequence.

Shape suffixes: B batch, N heads, S tokens of one rank, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


@cache
def gradients(dp: int, tp: int, seed: int) -> list[Part]:
    """Compute in one process what each rank would hold after the step."""
    # Axes over which outputs are added up, gradients of inputs, and gradients; and what these are divided by.
    added, copied, reduced, divided = "tp", "tp", "dp", "dp"
    grid = RankGrid(dp=dp, tp=tp)
    parts = [make_part(rank, dp, tp, seed) for rank in range(grid.world_size)]
    # What enters the layer stands alone, so that its gradient can be added up as `copy` does.
    inputs = [(x * part["scale"]).detach().requires_grad_() for part, x, _ in parts]
    terms = [
        (entering @ part["w1"].T).relu() @ part["w2"].T for entering, (part, _, _) in zip(inputs, parts, strict=True)
    ]
    for rank, (part, _, targets) in enumerate(parts):
        # Detached: an all-reduce adds the others' values, and backward reaches this rank's term alone.
        peer_terms = [terms[peer].detach() for peer in _group(grid, rank, added) if peer != rank]
        y = sum(peer_terms, terms[rank]) + part["bias"]
        ((y - targets) ** 2).mean().backward()
    rank_gradients: list[Part] = []
    for rank, (part, x, _) in enumerate(parts):
        # (samples, WIDTH): the gradient of x · scale, of which every slice of tp has a contribution.
        input_gradient = _sum([_gradient(inputs[peer]) for peer in _group(grid, rank, copied)])
        weight_gradients = {name: _gradient(part[name]) for name in ("w1", "w2", "bias")}
        rank_gradients.append({"scale": (input_gradient * x).sum(0), **weight_gradients})
    averages: list[Part] = []
    for rank in range(grid.world_size):
        group, divisor = _group(grid, rank, reduced), len(_group(grid, rank, divided))
        average = {name: _sum([rank_gradients[peer][name] for peer in group]) / divisor for name in NAMES}
        averages.append({f"gradient of {name}": value for name, value in average.items()})
    return averages


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


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


def _after_step(rank: int, size: int, seed: int) -> Part:
    return gradients(*STEP_DEGREES[size], seed)[rank]


def _axes(added: str = "tp", copied: str = "tp", reduced: str = "dp", divided: str = "dp") -> str:
    """Other axes, `world` or none."""
    return f'"tp", "tp", "dp", "dp" → "{added}", "{copied}", "{reduced}", "{divided}"'


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
    _after_step,
    on_ranks=True,
    trial=_trial,
    cases=STEP_CASES,
    labels=_LABELS,
    source=(_after_step, gradients),
    faults={
        "no parameter has a gradient": "/ divisor → / divisor * 0",
        "neither copy nor average": _axes(copied="", reduced="", divided=""),
        "your loss is a sum over samples and features": ".mean().backward() → .sum().backward()",
        "your loss is a sum over the samples": "/ divisor → / divisor * SAMPLES",
        "the gradients are averaged over all ranks": _axes(reduced="world", divided="world"),
        "the two axes are swapped": _axes(added="dp", copied="dp", reduced="tp", divided="tp"),
        "the gradients are averaged over tp": _axes(reduced="tp", divided="tp"),
        "the gradients are summed over dp, but divided by all ranks": _axes(divided="world"),
        "the gradients are summed over dp, but divided by tp.size": _axes(divided="tp"),
        "the gradients are summed over the replicas": _axes(divided=""),
        "no average over the replicas": _axes(reduced="", divided=""),
        "only scale is wrong": _axes(copied=""),
        "terms of the output alone, and no copy": _axes(added="", copied=""),
        "terms of the output alone": _axes(added=""),
        "the bias is added on every rank before the sum over tp": (
            'part["w2"].T for → part["w2"].T + part["bias"] for; terms[rank]) + part["bias"] → terms[rank])'
        ),
        "scale and bias are left out of the average": (
            "in average.items() → in {**average, 'scale': rank_gradients[rank]['scale'], "
            "'bias': rank_gradients[rank]['bias']}.items()"
        ),
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


def _attended(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What a rank has for its queries over the whole sequence."""
    q_all, k, v = _queries_keys_values(size, seed)
    scores = q_all.chunk(size, dim=2)[rank] @ k.mT / HEAD**0.5
    # exp of all scores, (…, S, N · S), over their sum: the softmax over the keys of all ranks.
    weights = scores.exp()
    return {OUTPUT: weights @ v / weights.sum(-1, keepdim=True)}


_ALL_BLOCKS = "weights @ v / weights.sum(-1, keepdim=True)"
_BY_BLOCK = "sum(s.softmax(-1) @ b for s, b in zip(scores.chunk(size, dim=-1), v.chunk(size, dim=2), strict=True))"


def _inspect_ring(answers: list[RankAnswer], size: int) -> None:
    """The values are right; have keys and values gone round once, and from neighbour to neighbour?"""
    if any(gathers(answer) or asked_for(answer, "all_reduce") for answer in answers):
        raise TEXTS.wrong("ring-attention", "a collective is called")
    numel = sum(asked_for(answers[0], "send", "isend"))
    limit = 2 * (size - 1) * BATCH * HEADS * TOKENS * HEAD
    if numel > limit:
        passes = Said(f"{size - 1} pass{'es' if size > 2 else ''}", f"{size - 1} passage{'s' if size > 2 else ''}")
        raise TEXTS.wrong(
            "ring-attention", "more is sent than the ring needs", size=size, numel=numel, limit=limit, passes=passes
        )


RING_ATTENTION = TEXTS.exercise(
    "ring-attention",
    _attended,
    on_ranks=True,
    trial=_ring_trial,
    cases=RANK_CASES,
    inspect=_inspect_ring,
    faults={
        "keys of the rank's own tokens alone": (
            "k.mT → k.chunk(size, dim=2)[rank].mT; @ v → @ v.chunk(size, dim=2)[rank]"
        ),
        "you take the mean of the blocks' outputs": f"{_ALL_BLOCKS} → {_BY_BLOCK} / size",
        "you add up the outputs of the blocks": f"{_ALL_BLOCKS} → {_BY_BLOCK}",
        "outputs not divided by the sum of exponentials": "/ weights.sum(-1, keepdim=True) →",
        "scores not divided by √H": "/ HEAD**0.5 →",
    },
)
