"""Whether an optimizer can work on a share: it must treat each number by itself.

Layer 2. Invariant: judged by what it does and not by its name, so that it holds for optimizers written in a notebook.

SGD, Adam and their like update every number from its own gradient and its own history: cut anywhere, they do the same.
LAMB and Adafactor scale a layer's update by a norm over the whole layer, Muon and Shampoo need its matrix, L-BFGS the
whole gradient: on a share they would silently do something else, and something else for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from dlojz.schema import LabError
from dlojz.text import say

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
_SIDE = 6
_CUT = 13
_STEPS = 3


def check_elementwise(make_optimizer: MakeOptimizer, device: torch.device) -> None:
    """Try an optimizer on one small matrix, whole, then flat and cut in two: the same numbers must come out.

    Args:
        make_optimizer: makes the optimizer from a list of tensors.
        device: where it will work.

    Raises:
        LabError: if it makes no torch optimizer, or one that cannot be sharded.
    """
    matrix = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    flat = matrix.flatten()
    # The second part is far larger than the first: a norm over the whole is not that of either part.
    flat[_CUT:] *= 100
    whole, name = _updated([flat.view(_SIDE, _SIDE)], make_optimizer, device)
    try:
        parts, _ = _updated([flat[:_CUT], flat[_CUT:]], make_optimizer, device)
    except ValueError:  # Muon takes matrices only
        _refuse(name)
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
        _refuse(name)


def _updated(weights: list[Tensor], make_optimizer: MakeOptimizer, device: torch.device) -> tuple[Tensor, str]:
    """The weights after a few steps, in one flat tensor, and the optimizer's name."""
    parameters = [weight.clone().to(device).requires_grad_() for weight in weights]
    optimizer: Any = make_optimizer(parameters)
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LabError(
            say(
                en=f"make_optimizer must return a torch optimizer, but {name} was returned: give, for instance, "
                "lambda shares: torch.optim.AdamW(shares, lr=1e-3).",
                fr=f"make_optimizer doit renvoyer un optimiseur torch, mais {name} a été renvoyé : donnez, par "
                "exemple, lambda shares: torch.optim.AdamW(shares, lr=1e-3).",
            )
        )
    for step in range(1, _STEPS + 1):
        for parameter in parameters:
            parameter.grad = (parameter.detach() * step).sin()
        try:
            optimizer.step()
        except TypeError:  # L-BFGS: step() wants a closure that computes the whole loss again
            _refuse(name)
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]), name


def _refuse(name: str) -> NoReturn:
    raise LabError(
        say(
            en=f"ZeRO cannot shard {name}: its update of one weight depends on others of the same layer, which lie on "
            "other ranks; use one that treats each weight by itself, such as SGD, Adam or AdamW.",
            fr=f"ZeRO ne peut pas partager {name} : sa mise à jour d’un poids dépend d’autres poids de la même couche, "
            "qui se trouvent sur d’autres rangs ; prenez-en un qui traite chaque poids séparément, comme SGD, Adam ou "
            "AdamW.",
        )
    )
