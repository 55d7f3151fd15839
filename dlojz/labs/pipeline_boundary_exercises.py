"""Lab 05: one micro-batch through a pipeline of real ranks, forward and backward, with sends and receives only.

Layer 6 (labs). Invariant: what each rank's stage has learnt is held to the gradients of one process that runs all
stages; shapes and types of the boundary change from case to case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

CASES = ((2, 11), (2, 12), (3, 13))
"""Two ranks first; with three, the middle one receives and sends in both directions."""
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
    *,
    way: str = "right",
) -> None:
    """This rank's part of one micro-batch: its stage forward, then backward; gradients are left in the parameters.

    Args:
        stage: this rank's, called as a function.
        x: the micro-batch on rank 0, None elsewhere.
        loss_of: loss of the last stage's output.
        shape, dtype: of what passes between two stages.
        way: spoils it.

    Source: Huang et al. 2019 (arXiv 1811.06965), §2.2, for one micro-batch.
    """
    import torch
    import torch.distributed as dist

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if x is None:
        x = torch.empty(shape, dtype=dtype)
        # Who: the rank before. What: its output. How much: one boundary, elements of `shape` × bytes of `dtype`.
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank == last:
        loss_of(y).backward()
    else:
        dist.send(y.detach(), rank + 1)
        gradient = torch.empty_like(y)
        # Who: the rank behind. What: the gradient of the output sent to it. How much: the same.
        dist.recv(gradient, rank + 1)
        if way == "no gradient":
            y.sum().backward()
        else:
            y.backward(gradient)
    if rank > 0 and x.grad is not None:
        handed = x.detach() if way == "activation back" else x.grad
        if way == "gradient passed on":
            handed = y.detach().clone().zero_() if rank == last else gradient
        dist.send(handed, rank - 1)


def _stages(size: int, seed: int) -> tuple[list[nn.Sequential], Tensor, Tensor]:
    """All stages, the micro-batch and the targets, from the seed alone."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)
    samples, width = 3 + seed % 3, 4 + seed % 2
    dtype = torch.float64 if seed == WIDE_SEED else torch.float32
    stages = [nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()) for _ in range(size)]
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    x, targets = (torch.randn((samples, width), generator=generator, dtype=dtype) for _ in range(2))
    return stages, x, targets


def _loss(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: ((y - targets) ** 2).sum()


def _gradients(stage: nn.Sequential) -> dict[str, Tensor | None]:
    return {_WEIGHT: stage[0].weight.grad, _BIAS: stage[0].bias.grad}  # type: ignore[dict-item]


def _asks_for_a_gradient(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Before a stage that is not the first runs: without this the fault would show only where the gradient is sent."""
    if not inputs[0].requires_grad:
        raise ValueError(
            say(
                en="what was received asks for no gradient, so there will be none to send back: call "
                "x.requires_grad_() before the stage runs",
                fr="ce qui a été reçu ne demande pas de gradient, il n’y en aura donc pas à renvoyer : appelez "
                "x.requires_grad_() avant d’exécuter l’étage",
            )
        )


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Tensor | None]:
    stages, x, targets = _stages(size, seed)
    if rank > 0:
        stages[rank].register_forward_pre_hook(_asks_for_a_gradient)
    answer(stages[rank], x if rank == 0 else None, _loss(targets), tuple(x.shape), x.dtype)
    return _gradients(stages[rank])


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    stages, x, targets = _stages(size, seed)
    for stage in stages:
        x = stage(x)
    _loss(targets)(x).backward()
    return {name: gradient for name, gradient in _gradients(stages[rank]).items() if gradient is not None}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The gradients are right; has nothing but the boundary travelled?"""
    for answer in answers:
        for call in answer.calls:
            if call["op"] in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"):
                raise Wrong(
                    say(
                        en=f"The gradients are right, but {call['op']} makes every rank take part; a boundary concerns "
                        "two: dist.send and dist.recv are enough.",
                        fr=f"Les gradients sont justes, mais {call['op']} fait participer tous les rangs ; une "
                        "frontière n’en concerne que deux : dist.send et dist.recv suffisent.",
                    )
                )


STAGE_BOUNDARY = Exercise(
    id="stage-boundary",
    title=Said("send and receive between two stages", "envoyer et recevoir entre deux étages"),
    judge=by_ranks(
        trial=_trial,
        expected=_expected,
        cases=CASES,
        labels=_LABELS,
        mistakes=(
            Mistake(
                lambda *given: run_stage(*given, way="no gradient"),
                Said(
                    "The gradient that has been received is not used: backward must start from it, y.backward("
                    "gradient), not from a loss of this rank's own.",
                    "Le gradient reçu ne sert pas : c’est de lui que doit partir la passe arrière, y.backward("
                    "gradient), et non d’une perte propre à ce rang.",
                ),
            ),
            Mistake(
                lambda *given: run_stage(*given, way="activation back"),
                Said(
                    "You send back the activation that was received; the rank before needs its gradient, x.grad.",
                    "Vous renvoyez l’activation reçue ; le rang précédent a besoin de son gradient, x.grad.",
                ),
            ),
        ),
        inspect=_inspect,
    ),
    praise=Said(
        "Right, with 2 and 3 ranks: the same gradients as one process, with two messages per boundary.",
        "Exact, sur 2 et 3 rangs : les mêmes gradients qu’un seul processus, avec deux messages par frontière.",
    ),
    hints=(
        Said(
            "Forward: receive (unless you are rank 0), run the stage, send (unless you are the last). Backward: the "
            "same the other way round. What makes autograd compute a gradient for what was received?",
            "Passe avant : recevoir (sauf le rang 0), exécuter l’étage, envoyer (sauf le dernier). Passe arrière : de "
            "même, en sens inverse. Qu’est-ce qui fait calculer à autograd un gradient pour ce qui a été reçu ?",
        ),
        Said(
            "x = torch.empty(shape, dtype=dtype), dist.recv(x, rank - 1), x.requires_grad_(). After y = stage(x): the "
            "last rank does loss_of(y).backward(), the others send y.detach(), receive gradient, y.backward(gradient). "
            "At the end, unless rank 0: dist.send(x.grad, rank - 1).",
            "x = torch.empty(shape, dtype=dtype), dist.recv(x, rank - 1), x.requires_grad_(). Après y = stage(x) : le "
            "dernier rang fait loss_of(y).backward() ; les autres envoient y.detach(), reçoivent gradient, font "
            "y.backward(gradient). À la fin, sauf sur le rang 0 : dist.send(x.grad, rank - 1).",
        ),
    ),
)
