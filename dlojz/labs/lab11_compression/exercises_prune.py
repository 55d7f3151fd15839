"""Exercises of lab 11 on pruning: global masks, the 2:4 pattern, SR-STE, permutations, the lottery ticket.

Where magnitudes are equal, it is free which of them goes: a global mask is judged by the count alone there, the 2:4
pattern by the count and magnitude of each group of four. Weights removed in earlier rounds of the lottery are not zero
in the trained weights, so that forgetting the mask shows.

Shape suffixes: O outputs, I inputs, H hidden units.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dlojz.base.language import say
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import expect_mask, expect_several, expect_tensor, normal

TEXTS = Texts(__file__)

Masks = list[Tensor]


def global_masks(weights: Sequence[Tensor], sparsity: float) -> Masks:
    """Make one mask per weight, 1 where it is kept: the smallest magnitudes of all together go.

    Args:
        weights: of any shapes.
        sparsity: share that goes, at least 0 and below 1; round(sparsity × number of weights) of them.

    Source: Han et al. 2015 (arXiv 1506.02626) for magnitudes; Frankle and Carbin 2019 (arXiv 1803.03635) for a
    threshold that all layers share.
    """
    sizes = torch.cat([weight.detach().abs().flatten() for weight in weights])
    keep = torch.ones_like(sizes)
    # By rank and not by threshold: exactly so many go, even where magnitudes are equal.
    keep[sizes.argsort()[: round(sparsity * len(sizes))]] = 0.0
    parts = keep.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


def _mask_cases() -> Iterator[tuple[Any, ...]]:
    # 60 weights: shares of which neither the truncation nor the next whole number is the nearest.
    for seed, sparsity in ((1, 0.5), (2, 0.78), (3, 0.104), (4, 0.52)):
        yield [3 * normal(seed, 4, 5) - 1, 0.5 * normal(seed + 10, 10, 3), normal(seed + 20, 10)], sparsity


def _mask_trial(answer: Callable[..., Any], weights: list[Tensor], sparsity: float) -> Tensor:
    # Copies: an answer may multiply the weights in place.
    weight_copies = [weight.clone() for weight in weights]
    masks = expect_several(answer(weight_copies, sparsity), f"[{', '.join(['mask'] * len(weights))}]", len(weights))
    names = [f"mask {number}" for number in range(len(weights))]
    checked_masks = [expect_mask(mask, name, w.shape) for mask, name, w in zip(masks, names, weights, strict=True)]
    return torch.cat([mask.flatten() for mask in checked_masks])


def _expect_equal_magnitudes(answer: Callable[..., Any]) -> None:
    """Refuse a threshold where it removes other than as many weights as are asked for: many have its magnitude."""
    weights, sparsity = [normal(5, 5, 6).round(), normal(15, 20).round()], 0.5
    quota = round(sparsity * sum(weight.numel() for weight in weights))
    pruned_count = int((_mask_trial(answer, weights, sparsity) == 0).sum())
    if pruned_count != quota:
        raise TEXTS.wrong(
            "global-masks", "too many weights of the same magnitude go", pruned_count=pruned_count, quota=quota
        )


GLOBAL_MASKS = TEXTS.exercise(
    "global-masks",
    global_masks,
    trial=_mask_trial,
    cases=_mask_cases,
    mistakes={
        "each layer loses the same share": lambda weights, sparsity: [global_masks([w], sparsity)[0] for w in weights],
    },
    then=_expect_equal_magnitudes,
)


def two_of_four(weight_OI: Tensor) -> Tensor:
    """Make a mask, (O, I), that keeps the two largest magnitudes of every four consecutive inputs.

    Args:
        weight_OI: I is a multiple of 4.

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378): the 2:4 pattern.
    """
    # (O, I) as (O, I / 4, 4)
    groups = weight_OI.detach().abs().unflatten(1, (-1, 4))
    return torch.zeros_like(groups).scatter(2, groups.topk(2, dim=2).indices, 1.0).flatten(1)


def sr_ste(weight_OI: Tensor, mask_OI: Tensor, gradient_OI: Tensor, decay: float) -> Tensor:
    """Compute the gradient of the dense weights: that of the sparse ones, plus the decay of pruned weights.

    Source: Zhou et al. 2021, "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch"
    (arXiv 2102.04010): the sparse-refined straight-through estimator.
    """
    return gradient_OI + decay * (1 - mask_OI) * weight_OI


def _weights() -> Iterator[tuple[Any, ...]]:
    for seed, outputs, inputs in ((1, 4, 8), (2, 8, 12)):
        yield (normal(seed, outputs, inputs) - 0.3,)
    # Two groups of four: in the first three are equal, in the second all; signs differ, and sizes from row to row.
    tied_I = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 2.0, 2.0, 2.0])
    tied_OI = normal(3, 4, 8).sign() * tied_I * torch.arange(1.0, 5.0).unsqueeze(1)
    yield (tied_OI,)


def _kept(answer: Callable[..., Any], weight_OI: Tensor) -> Tensor:
    """How many of each group of four, and how much magnitude."""
    mask_OI = expect_mask(answer(weight_OI.clone()), say(en="The mask", fr="Le masque"), weight_OI.shape)
    sizes_OI = mask_OI * weight_OI.abs().double()
    counts, magnitudes = (matrix.unflatten(1, (-1, 4)).sum(2).flatten() for matrix in (mask_OI, sizes_OI))
    return torch.cat([counts, magnitudes])


TWO_OF_FOUR = TEXTS.exercise(
    "two-of-four",
    two_of_four,
    trial=_kept,
    cases=_weights,
    mistakes={
        "you compare all weights with one threshold": lambda weight: (weight.abs() >= weight.abs().median()).float(),
        "the same two places of every group": tuple(
            f"groups.topk(2, dim=2).indices → torch.tensor({pair}).expand(*groups.shape[:2], 2)"
            for pair in itertools.combinations(range(4), 2)
        ),
    },
)


def _steps() -> Iterator[tuple[Any, ...]]:
    for seed, decay in ((4, 0.2), (5, 0.05)):
        weight_OI = normal(seed, 4, 8)
        yield weight_OI, two_of_four(weight_OI), normal(seed + 10, 4, 8), decay


SR_STE = TEXTS.exercise(
    "sr-ste",
    sr_ste,
    cases=_steps,
)


Layers = tuple[Tensor, Tensor, Tensor]


def reorder(expand_HI: Tensor, bias_H: Tensor, project_OH: Tensor, order_H: Tensor) -> Layers:
    """Permute the hidden units of two consecutive layers, whose output stays the same.

    Args:
        expand_HI: weights of the first layer.
        bias_H: of the first layer.
        project_OH: weights of the second.
        order_H: unit number `order_H[i]` comes to place i.

    Source: Pool and Yu 2021, "Channel Permutations for N:M Sparsity" (NeurIPS 2021).
    """
    return expand_HI[order_H], bias_H[order_H], project_OH[:, order_H]


def _permutation_cases() -> Iterator[tuple[Any, ...]]:
    # As wide as it is deep once: there an exchange of rows and columns gives no error of shape.
    for seed, hidden, inputs, outputs in ((1, 8, 5, 3), (2, 6, 6, 6)):
        order_H = torch.randperm(hidden, generator=torch.Generator().manual_seed(seed + 30))
        yield normal(seed, hidden, inputs), normal(seed + 10, hidden), normal(seed + 20, outputs, hidden), order_H


def _permutation_trial(
    answer: Callable[..., Any], expand: Tensor, bias: Tensor, project: Tensor, order: Tensor
) -> Tensor:
    layers = answer(expand.clone(), bias.clone(), project.clone(), order.clone())
    names = "(expand, bias, project)"
    checked_layers = [
        expect_tensor(layer, name, reference.shape)
        for layer, name, reference in zip(
            expect_several(layers, names, 3), ("expand", "bias", "project"), (expand, bias, project), strict=True
        )
    ]
    return torch.cat([layer.double().flatten() for layer in checked_layers])


def _transposing(answer: Callable[..., Any], *, expand: bool, project: bool) -> Callable[..., Layers]:
    """The answer with the other dimension of one matrix, or of both, where it moves one."""

    def way(expand_HI: Tensor, bias_H: Tensor, project_OH: Tensor, order_H: Tensor) -> Layers:
        # Transposed before and after, a move of columns becomes one of rows.
        layers = answer(expand_HI.T if expand else expand_HI, bias_H, project_OH.T if project else project_OH, order_H)
        return layers[0].T if expand else layers[0], layers[1], layers[2].T if project else layers[2]

    return way


PERMUTATION = TEXTS.exercise(
    "permutation",
    reorder,
    trial=_permutation_trial,
    cases=_permutation_cases,
    repairs={
        "you move the columns of the first layer": lambda answer: _transposing(answer, expand=True, project=False),
        "you move the rows of the second layer": lambda answer: _transposing(answer, expand=False, project=True),
        "in both layers you move the wrong dimension": lambda answer: _transposing(answer, expand=True, project=True),
    },
)


Ticket = tuple[Tensor, Tensor]


def next_ticket(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
    """Return the mask of the next round, and the weights it starts from.

    Args:
        start: weights before any training.
        trained: weights after training with the mask.
        mask: 1 where a weight is still there.
        rate: share of the remaining weights that goes; round(rate × remaining) of them, the smallest when trained.

    Source: Frankle and Carbin 2019, "The Lottery Ticket Hypothesis" (arXiv 1803.03635): iterative pruning.
    """
    remaining = int(mask.sum())
    # inf sorts last: what went in earlier rounds is not counted among the smallest once more.
    sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten()
    new_mask = mask.clone().flatten()
    new_mask[sizes.argsort()[: round(rate * remaining)]] = 0.0
    new_mask = new_mask.view_as(mask)
    return new_mask, start * new_mask


def _ticket_cases() -> Iterator[tuple[Any, ...]]:
    # A share of what remains that is rounded down (11.2, 5.8 up), and one that comes out even.
    for seed, rows, removed, rate in ((1, 5, 10, 0.2), (2, 6, 20, 0.4), (3, 5, 0, 0.3), (4, 5, 11, 0.2)):
        start, trained = normal(seed, rows, 8), normal(seed + 10, rows, 8)
        mask = torch.ones(rows * 8)
        mask[torch.randperm(rows * 8, generator=torch.Generator().manual_seed(seed))[:removed]] = 0.0
        yield start, trained, mask.view(rows, 8), rate


def _ticket_trial(answer: Callable[..., Any], start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    new_mask, weights = expect_several(answer(start.clone(), trained.clone(), mask.clone(), rate), "(mask, weights)", 2)
    # A name that is singular in both languages: it is the subject of the sentences that refuse a shape.
    names = say(en="The mask", fr="Le masque"), say(en="The tensor of weights", fr="Le tenseur des poids")
    checked_pair = expect_mask(new_mask, names[0], mask.shape), expect_tensor(weights, names[1], mask.shape).double()
    return torch.cat([tensor.flatten() for tensor in checked_pair])


TICKET = TEXTS.exercise(
    "ticket",
    next_ticket,
    trial=_ticket_trial,
    cases=_ticket_cases,
)
