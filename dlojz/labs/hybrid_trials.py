"""Lab 07: the small layer of the step in two dimensions, and what each way of doing the step would give.

Layer 6 (labs). Invariant: everything is computed in one process, without any communication.

Shape suffixes: D width of the stream, H hidden width of one rank, B samples of one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlojz.grid import Grid

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, WIDTH, SAMPLES = 3, 4, 5
"""Hidden features of one rank, width of the stream, samples of one replica."""
NAMES = ("scale", "w1", "w2", "bias")
Part = dict[str, "Tensor"]


def make_part(rank: int, dp: int, tp: int, seed: int) -> tuple[Part, Tensor, Tensor]:
    """A rank's parameters, samples and targets, from the seed alone."""
    place = Grid(dp=dp, tp=tp).coordinates(rank)
    whole = _whole(dp, tp, seed)
    part = {name: value.clone().requires_grad_() for name, value in _sliced(whole, place.tp).items() if name in NAMES}
    rows = slice(place.dp * SAMPLES, (place.dp + 1) * SAMPLES)
    return part, whole["x"][rows], whole["targets"][rows]


def _whole(dp: int, tp: int, seed: int) -> Part:
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = {"scale": (WIDTH,), "w1": (tp * HIDDEN, WIDTH), "w2": (WIDTH, tp * HIDDEN), "bias": (WIDTH,),
              "x": (dp * SAMPLES, WIDTH), "targets": (dp * SAMPLES, WIDTH)}  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _sliced(whole: Mapping[str, Tensor], number: int) -> Part:
    columns = slice(number * HIDDEN, (number + 1) * HIDDEN)
    return {**whole, "w1": whole["w1"][columns], "w2": whole["w2"][:, columns]}


@dataclass(frozen=True)
class Way:
    """One way to do the step, right or wrong; the right one by default.

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


def gradients(dp: int, tp: int, seed: int, way: Way) -> list[Part]:
    """What each rank would hold after the step done in this way, computed in one process."""
    grid = Grid(dp=dp, tp=tp)
    parts = [make_part(rank, dp, tp, seed) for rank in range(grid.world_size)]
    # What enters the layer stands alone, so that its gradient can be added up as `copy` does.
    inputs = [(x * part["scale"]).detach().requires_grad_() for part, x, _ in parts]
    terms = [
        (entering @ part["w1"].T).relu() @ part["w2"].T + way.bias_each * part["bias"]
        for entering, (part, _, _) in zip(inputs, parts, strict=True)
    ]
    for rank, (part, _, targets) in enumerate(parts):
        others = [terms[other].detach() for other in _group(grid, rank, way.added) if other != rank]
        y = sum(others, terms[rank]) + (not way.bias_each) * part["bias"]
        ((y - targets) ** 2).mean().backward()
    found: list[Part] = []
    for rank, (part, x, _) in enumerate(parts):
        entered = _sum([_gradient(inputs[other]) for other in _group(grid, rank, way.copied)])
        own = {name: _gradient(part[name]) for name in ("w1", "w2", "bias")}
        found.append({"scale": (entered * x).sum(0), **own})
    return [_averaged(found, rank, grid, way) for rank in range(grid.world_size)]


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _averaged(found: list[Part], rank: int, grid: Grid, way: Way) -> Part:
    group, by = _group(grid, rank, way.reduced), len(_group(grid, rank, way.divided))
    averaged = {name: _sum([found[other][name] for other in group]) / by for name in NAMES}
    if way.only_slices:
        averaged |= {name: found[rank][name] for name in ("scale", "bias")}
    return {f"gradient of {name}": value for name, value in averaged.items()}


def _sum(tensors: list[Tensor]) -> Tensor:
    import torch

    return torch.stack(tensors).sum(0)


def _group(grid: Grid, rank: int, axis: str) -> tuple[int, ...]:
    if axis == "world":
        return tuple(range(grid.world_size))
    return grid.group_of(rank, axis) if axis else (rank,)
