"""Lab 04: a layer whose weights are whole only while it computes.

Layer 6 (labs). Invariant: an answer is held to the output and the gradients of one process, and then to what it has
kept from the forward pass to the backward pass: whole weights there are not ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES, NARROW, WIDE = 5, 12, 24
_OUTPUT, _INPUT, _FIRST, _SECOND = "output", "gradient of x", "gradient of share 1", "gradient of share 2"
LABELS = {
    _OUTPUT: Said("the output", "la sortie"),
    _INPUT: Said("the gradient of x", "le gradient de x"),
    _FIRST: Said("the gradient of the first layer's share", "le gradient de la part de la première couche"),
    _SECOND: Said("the gradient of the second layer's share", "le gradient de la part de la seconde couche"),
}


def gather(share: Tensor) -> Tensor:
    """All rows of a weight matrix, of which each rank holds an equal share.

    Args:
        share: this rank's rows, shape (rows / N, columns).

    Returns:
        all rows, shape (rows, columns), in the order of the ranks.
    """
    import torch.distributed as dist

    whole = share.new_empty(dist.get_world_size() * share.shape[0], share.shape[1])
    # Who: all ranks. What: each gives its rows and has all of them. How much: the matrix's bytes.
    dist.all_gather_into_tensor(whole, share.detach().contiguous())
    return whole


def sharded_linear(x: Tensor, share: Tensor, *, way: str = "right") -> Tensor:
    """x Wᵀ, where each rank holds some rows of W: gathered for forward, and again for backward. `way` spoils it.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.3.
    """
    import torch
    import torch.distributed as dist

    class ShardedLinear(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, share: Tensor) -> Tensor:
            context.save_for_backward(x, share)
            return x @ gather(share).T

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Any:
            x, share = context.saved_tensors
            size = dist.get_world_size()
            share_gradient = torch.empty_like(share)
            whole = gradient.T @ x
            # Who: all ranks. What: the gradient of the whole matrix, summed; rank r gets its rows. How much: its bytes.
            dist.reduce_scatter_tensor(share_gradient, whole.contiguous())
            weight = gather(share)
            if way == "first rows":
                weight = share.repeat(size, 1)
            input_gradient = gradient @ weight
            if way == "averages x":
                dist.all_reduce(input_gradient)
                input_gradient /= size
            return input_gradient, share_gradient / size

    result: Tensor = ShardedLinear.apply(x, share)
    return result


def _inputs(rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's x and the coefficients of its loss; the same weights on all ranks."""
    import torch

    own = torch.Generator().manual_seed(100 * seed + rank)
    common = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, NARROW, generator=own)
    coefficients = torch.randn(SAMPLES, NARROW, generator=own)
    first = torch.randn(WIDE, NARROW, generator=common) / NARROW**0.5
    return x, coefficients, first, torch.randn(NARROW, WIDE, generator=common) / WIDE**0.5


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    import torch

    x, coefficients, *weights = _inputs(rank, seed)
    x.requires_grad_()
    first, second = (weight.chunk(size)[rank].clone().requires_grad_() for weight in weights)
    whole, kept = WIDE * NARROW, []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes() // tensor.element_size() >= whole)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = answer(torch.tanh(answer(x, first)), second)
    (output * coefficients).sum().backward()
    values = {_OUTPUT: output, _INPUT: x.grad, _FIRST: first.grad, _SECOND: second.grad}
    return {"kept": any(kept)}, values


def _gradients(ranks: Iterable[int], rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What one process computes: output and gradient of this rank's x, mean gradients over some ranks' data."""
    import torch

    of_rank, sums = {}, []
    for other in {rank, *ranks}:
        x, coefficients, *weights = _inputs(other, seed)
        x, first, second = (tensor.requires_grad_() for tensor in (x, *weights))
        output = torch.tanh(x @ first.T) @ second.T
        (output * coefficients).sum().backward()
        if other in ranks:
            sums.append((first.grad, second.grad))
        if other == rank:
            of_rank = {_OUTPUT: output.detach(), _INPUT: x.grad}
    means = [torch.stack([pair[number] for pair in sums]).mean(0).chunk(size)[rank] for number in (0, 1)]  # type: ignore[misc]
    return {**of_rank, _FIRST: means[0], _SECOND: means[1]}  # type: ignore[dict-item]


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return _gradients(range(size), rank, size, seed)


def _local(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    alone = _gradients([rank], rank, size, seed)
    return {name: alone[name] for name in (_FIRST, _SECOND)}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; were whole weights kept, or whole gradients communicated?"""
    gathers = sum(call["op"] in ("all_gather", "all_gather_into_tensor") for call in answers[0].calls)
    if answers[0].value["kept"] or gathers < 4:
        raise Wrong(
            say(
                en="Output and gradients are right, but the whole weights stay in memory from the forward pass to the "
                "backward pass, for every layer: keep the share, and gather it again in backward.",
                fr="La sortie et les gradients sont justes, mais les poids entiers restent en mémoire de la passe "
                "avant à la passe arrière, et cela pour chaque couche : gardez la part, et rassemblez-la de nouveau "
                "dans backward.",
            )
        )
    if any(call["op"] == "all_reduce" and call["numel"] >= WIDE * NARROW for call in answers[0].calls):
        raise Wrong(
            say(
                en="Output and gradients are right, but an all-reduce brings the whole gradient to every rank: a "
                "reduce-scatter gives each rank its rows, and sends half as much.",
                fr="La sortie et les gradients sont justes, mais un all-reduce apporte le gradient entier à chaque "
                "rang : un reduce-scatter donne à chaque rang ses lignes, et envoie deux fois moins d’octets.",
            )
        )


SHARD_WEIGHTS = Exercise(
    id="shard-weights",
    title=Said("sharding the weights (stage 3)", "répartir les poids (stage 3)"),
    judge=by_ranks(
        trial=_trial,
        expected=_expected,
        local=_local,
        labels=LABELS,
        mistakes=(
            Mistake(
                lambda x, share: sharded_linear(x, share, way="averages x"),
                Said(
                    "You average the gradient of x over the ranks; each rank has read data of its own, so that "
                    "gradient is its own too: only the gradient of the weights is averaged.",
                    "Vous moyennez le gradient de x entre les rangs ; or chaque rang a lu ses propres données, et ce "
                    "gradient n’appartient qu’à lui : seul celui des poids est moyenné.",
                ),
            ),
            Mistake(
                lambda x, share: sharded_linear(x, share, way="first rows"),
                Said(
                    "In backward you compute with this rank's rows alone: gather the weights again.",
                    "Dans backward, vous calculez avec les seules lignes de ce rang : rassemblez de nouveau les poids.",
                ),
            ),
        ),
        inspect=_inspect,
    ),
    praise=Said(
        "Right: between two layers no rank holds more than its share, of weights and of gradients.",
        "Exact : entre deux couches, aucun rang ne détient plus que sa part, ni des poids ni des gradients.",
    ),
    hints=(
        Said(
            "forward keeps x and share, not the whole weight. What must backward do first, then? With y = x Wᵀ, the "
            "gradient of W is gradientᵀ x, and that of x is gradient W.",
            "forward garde x et share, pas le poids entier. Par quoi backward doit-elle alors commencer ? Avec "
            "y = x Wᵀ, le gradient de W est gradientᵀ x, et celui de x est gradient W.",
        ),
        Said(
            "forward: context.save_for_backward(x, share), then x @ gather(share).T. backward: "
            "dist.reduce_scatter_tensor(share_gradient, gradient.T @ x), divided by the number of ranks, and "
            "gradient @ gather(share).",
            "forward : context.save_for_backward(x, share), puis x @ gather(share).T. backward : "
            "dist.reduce_scatter_tensor(share_gradient, gradient.T @ x), divisé par le nombre de rangs, et "
            "gradient @ gather(share).",
        ),
    ),
)
