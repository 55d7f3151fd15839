"""Exercises of lab 04 on the stages: bytes of the states, then optimizer, gradients and weights sharded by hand.

An answer is held to the weights, mean gradients or outputs of one process, and then to what each rank has kept and
communicated for them: right values alone are not ZeRO.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dlojz.base.language import a_or_an
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import normal, refuse_nothing
from dlojz.labs.kit.rank_judges import gathers
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

WEIGHTS_BYTES, GRADIENTS_BYTES, OPTIMIZER_BYTES = 2, 2, 12
"""Per parameter, in mixed precision with Adam: the last one is a master copy and two moments, in fp32."""


def state_bytes(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of weights, gradients and optimizer on one rank: each part is sharded from a stage on.

    2Ψ + 2Ψ + 12Ψ without ZeRO, 4Ψ + 12Ψ/N for stage 1, 2Ψ + 14Ψ/N for stage 2, 16Ψ/N for stage 3.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5 and Fig. 1, with K = 12.
    """
    # Bytes per parameter, and the stage from which on they are sharded.
    parts = ((WEIGHTS_BYTES, 3), (GRADIENTS_BYTES, 2), (OPTIMIZER_BYTES, 1))
    return sum(part * parameters / (ranks if stage >= first_stage else 1) for part, first_stage in parts)


def _models() -> Iterator[tuple[int, int, int]]:
    for parameters, ranks in ((12_000, 4), (750_000, 64), (5_040, 3)):
        for stage in (1, 3, 2, 0):
            yield parameters, ranks, stage


_PARAMETERS_HERE = "parameters / (ranks if stage >= first_stage else 1)"

ZERO_STATES = TEXTS.exercise(
    "zero-states",
    state_bytes,
    cases=_models,
    mistakes={
        "the share of a rank is rounded to a whole number": (
            f"{_PARAMETERS_HERE} → int({_PARAMETERS_HERE})",
            f"{_PARAMETERS_HERE} → round({_PARAMETERS_HERE})",
            f"{_PARAMETERS_HERE} → -(-parameters // (ranks if stage >= first_stage else 1))",
        ),
    },
)


MakeOptimizer = Callable[[Sequence[Any]], Any]
WEIGHTS, STEPS = 24, 3
_WEIGHTS = "weights"


def _adam(tensors: Sequence[Any]) -> Any:
    # A large eps: without it Adam does not see a gradient that is as many times too large as there are ranks.
    return torch.optim.Adam(tensors, lr=0.1, eps=0.5)


def shard_optimizer(weights: Tensor, make_optimizer: MakeOptimizer) -> Callable[[Tensor], None]:
    """An optimizer for this rank's share of the weights; the function returned makes a step.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.1.
    """
    share = weights.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = make_optimizer([share])

    def step(gradient: Tensor) -> None:
        share.grad = gradient
        optimizer.step()
        # Who: all ranks. What: each gives its updated share, and has all of them. How much: the weights' bytes.
        dist.all_gather_into_tensor(weights, share)

    return step


def _shard_optimizer_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Several steps, so that moments count."""
    optimizer_elements: list[int] = []

    def make_optimizer(tensors: Any) -> Any:
        optimizer = _adam(tensors)
        optimizer_elements.append(sum(tensor.numel() for group in optimizer.param_groups for tensor in group["params"]))
        return optimizer

    weights = normal(seed, WEIGHTS)
    step = answer(weights, make_optimizer)
    if not callable(step):
        return {"returned": type(step).__name__}, _weights_after(rank, size, seed)  # for `_inspect_states` to refuse
    for number in range(STEPS):
        step(normal(seed + 1 + number, WEIGHTS).chunk(size)[rank].clone())
    return {"elements": optimizer_elements}, {_WEIGHTS: weights}


def _weights_after(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    weights = normal(seed, WEIGHTS)
    optimizer = _adam([weights])
    for number in range(STEPS):
        weights.grad = normal(seed + 1 + number, WEIGHTS)
        optimizer.step()
    return {_WEIGHTS: weights}


def _own_share_updated(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    weights = normal(seed, WEIGHTS)
    weights.chunk(size)[rank].copy_(_weights_after(rank, size, seed)[_WEIGHTS].chunk(size)[rank])
    return {_WEIGHTS: weights}


def _inspect_states(answers: list[RankAnswer], size: int) -> None:
    """The weights are right; has each rank kept the states of its share alone?"""
    returned = answers[0].value.get("returned")
    if returned:
        raise TEXTS.wrong("shard-optimizer", "step is not returned", a_returned=a_or_an(returned), returned=returned)
    share = WEIGHTS // size
    numel = max(answers[0].value["elements"], default=share)
    if numel > share:
        raise TEXTS.wrong(
            "shard-optimizer", "rank 0's optimizer has been given too much", numel=numel, WEIGHTS=WEIGHTS, share=share
        )
    if any(call["op"] == "all_reduce" and call["numel"] >= WEIGHTS for call in answers[0].calls):
        raise TEXTS.wrong("shard-optimizer", "an all-reduce of them sends twice as much as needed")


SHARD_OPTIMIZER = TEXTS.exercise(
    "shard-optimizer",
    _weights_after,
    on_ranks=True,
    trial=_shard_optimizer_trial,
    local=_own_share_updated,
    labels={_WEIGHTS: Said("the weights", "les poids")},
    faults={
        "no all-gather of the updated shares": _own_share_updated,
        "the weights have not changed on any rank": lambda rank, size, seed: {_WEIGHTS: normal(seed, WEIGHTS)},
    },
    source=(shard_optimizer,),
    inspect=_inspect_states,
)


SHAPES = ((3, 5), (4,), (2, 3))
"""25 gradients, which neither 2 nor 4 ranks share evenly; 3 ranks get one fewer, and need no zeros."""
_SHARE = "gradient share"


def reduce_gradients(gradients: Sequence[Tensor]) -> Tensor:
    """This rank's share of the mean gradient, flat; zeros fill the last share up.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.2; the padding is that of `dlojz.by_hand.zero`.
    """
    size = dist.get_world_size()
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat = F.pad(flat, (0, -flat.numel() % size))
    share = flat.new_empty(flat.numel() // size)
    # Who: all ranks. What: all gradients, flat and padded, summed; rank r gets the r-th part. How much: their bytes.
    dist.reduce_scatter_tensor(share, flat)
    return share / size


def _gradients_of(rank: int, size: int, seed: int) -> list[Tensor]:
    gradients = [normal(1000 * seed + 10 * rank + number, *shape) for number, shape in enumerate(SHAPES)]
    return [gradient[:3] if gradient.shape == (4,) and size == 3 else gradient for gradient in gradients]


def _reduce_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    share = answer(_gradients_of(rank, size, seed))
    if share is None:
        return {"nothing": True}, _share_of(range(size), rank, size, seed)  # for `_inspect_volume` to refuse
    return {}, {_SHARE: share}


def _share_of(ranks: Sequence[int], rank: int, size: int, seed: int) -> dict[str, Tensor]:
    flats = [torch.cat([gradient.flatten() for gradient in _gradients_of(peer, size, seed)]) for peer in ranks]
    mean = torch.stack(flats).mean(0)
    return {_SHARE: F.pad(mean, (0, -mean.numel() % size)).chunk(size)[rank]}


def _inspect_volume(answers: list[RankAnswer], size: int) -> None:
    """The share is right; was anything sent that only other ranks need?"""
    if answers[0].value.get("nothing"):
        refuse_nothing(None)
    total_numel = sum(gradient.numel() for gradient in _gradients_of(0, size, 0))
    if sum(call["numel"] for call in answers[0].calls if call["op"] == "all_reduce") >= total_numel:
        raise TEXTS.wrong("shard-gradients", "an all-reduce brings the whole sum to every rank")
    if any(call["op"] in ("all_gather", "all_gather_into_tensor", "gather") for call in answers[0].calls):
        raise TEXTS.wrong("shard-gradients", "all gradients are brought together")


SHARD_GRADIENTS = TEXTS.exercise(
    "shard-gradients",
    lambda rank, size, seed: _share_of(range(size), rank, size, seed),
    on_ranks=True,
    trial=_reduce_trial,
    local=lambda rank, size, seed: _share_of([rank], rank, size, seed),
    labels={_SHARE: Said("the share of the gradient", "le gradient (la part du rang)")},
    source=(reduce_gradients,),
    inspect=_inspect_volume,
)


SAMPLES, NARROW, WIDE = 5, 12, 24
_OUTPUT, _INPUT, _FIRST, _SECOND = "output", "gradient of x", "gradient of share 1", "gradient of share 2"
LABELS = {
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
    matrix = share.new_empty(dist.get_world_size() * share.shape[0], share.shape[1])
    # Who: all ranks. What: each gives its rows and has all of them. How much: the matrix's bytes.
    dist.all_gather_into_tensor(matrix, share.detach().contiguous())
    return matrix


def _ranks() -> int:
    return dist.get_world_size()


def sharded_linear(x: Tensor, share: Tensor) -> Tensor:
    """x Wᵀ, where each rank holds some rows of W: gathered for forward, and again for backward.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.3.
    """

    class ShardedLinear(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, share: Tensor) -> Tensor:
            context.save_for_backward(x, share)
            return x @ gather(share).T

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Any:
            x, share = context.saved_tensors
            size = dist.get_world_size()
            # (rows, samples) @ (samples, columns): the shape of the whole weight.
            share_gradient = torch.empty_like(share)
            weight_gradient = gradient.T @ x
            # Who: all ranks. What: the gradient of the whole matrix, summed; rank r gets its rows. How much: its bytes.
            dist.reduce_scatter_tensor(share_gradient, weight_gradient.contiguous())
            input_gradient = gradient @ gather(share)
            return input_gradient, share_gradient / size

    result: Tensor = ShardedLinear.apply(x, share)
    return result


def _inputs(rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's x and the coefficients of its loss; the same weights on all ranks."""
    rank_generator = torch.Generator().manual_seed(100 * seed + rank)
    common = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, NARROW, generator=rank_generator)
    coefficients = torch.randn(SAMPLES, NARROW, generator=rank_generator)
    first_weight = torch.randn(WIDE, NARROW, generator=common) / NARROW**0.5
    return x, coefficients, first_weight, torch.randn(NARROW, WIDE, generator=common) / WIDE**0.5


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    x, coefficients, *weights = _inputs(rank, seed)
    x.requires_grad_()
    first_share, second_share = (weight.chunk(size)[rank].clone().requires_grad_() for weight in weights)
    weight_numel, saved_whole = WIDE * NARROW, []

    def pack(tensor: Tensor) -> Tensor:
        # By storage: a saved view, as the transposed weight, holds the whole matrix too.
        saved_whole.append(tensor.untyped_storage().nbytes() // tensor.element_size() >= weight_numel)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = answer(torch.tanh(answer(x, first_share)), second_share)
    (output * coefficients).sum().backward()
    values = {_OUTPUT: output, _INPUT: x.grad, _FIRST: first_share.grad, _SECOND: second_share.grad}
    return {"kept": any(saved_whole)}, values


def _gradients(ranks: Iterable[int], rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What one process computes: output and gradient of this rank's x, mean gradients over some ranks' data."""
    of_rank, sums = {}, []
    # Always with this rank, whose output is compared, though the mean may be over others.
    for peer in {rank, *ranks}:
        x, coefficients, *weights = _inputs(peer, seed)
        x, first_weight, second_weight = (tensor.requires_grad_() for tensor in (x, *weights))
        output = torch.tanh(x @ first_weight.T) @ second_weight.T
        (output * coefficients).sum().backward()
        if peer in ranks:
            sums.append((first_weight.grad, second_weight.grad))
        if peer == rank:
            of_rank = {_OUTPUT: output.detach(), _INPUT: x.grad}
    means = [torch.stack([pair[number] for pair in sums]).mean(0).chunk(size)[rank] for number in (0, 1)]  # type: ignore[misc]
    return {**of_rank, _FIRST: means[0], _SECOND: means[1]}  # type: ignore[dict-item]


def _local(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    rank_gradients = _gradients([rank], rank, size, seed)
    return {name: rank_gradients[name] for name in (_FIRST, _SECOND)}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; were whole weights kept, or whole gradients communicated?"""
    # Two layers, forward and backward, whatever brings the shares together: who does so less often has kept the whole.
    if answers[0].value["kept"] or len(gathers(answers[0])) < 4:
        raise TEXTS.wrong("shard-weights", "whole weights stay in memory")
    if any(call["op"] == "all_reduce" and call["numel"] >= WIDE * NARROW for call in answers[0].calls):
        raise TEXTS.wrong("shard-weights", "an all-reduce brings the whole gradient")


SHARD_WEIGHTS = TEXTS.exercise(
    "shard-weights",
    lambda rank, size, seed: _gradients(range(size), rank, size, seed),
    on_ranks=True,
    trial=_trial,
    local=_local,
    labels=LABELS,
    source=(sharded_linear,),
    mistakes={
        "the output is divided by the number of ranks": lambda x, share: sharded_linear(x, share) / _ranks(),
        "this rank's rows repeated for all ranks": lambda x, share: x @ share.repeat(_ranks(), 1).T,
    },
    inspect=_inspect,
)
