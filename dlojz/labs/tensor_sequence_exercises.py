"""Lab 06: half a transformer block between two sums, with and without sequence parallelism, dropout included.

Layer 6 (labs). Invariant: an answer is held to the outputs and gradients of one process that draws, for each rank, the
mask that rank should draw; then to what it has sent.

Shape suffixes: B batch, T tokens, D width; S = T / n tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.tensor_diagnosis import (
    COUNTED_AGAIN,
    NO_BACKWARD_SUM,
    NO_FORWARD_SUM,
    Fault,
    added,
    asked_for,
    by_shares,
    gradient,
    normal,
)
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

BATCH, TOKENS, WIDTH, HIDDEN = 2, 6, 8, 12
DROP = 0.5
CASES = ((2, 11), (2, 12), (3, 13))
OUTPUT, OF_X, OF_WEIGHT, OF_BIAS = "output", "gradient of x", "gradient of weight", "gradient of bias"
LABELS = {
    OUTPUT: Said("the output", "la sortie"),
    OF_X: Said("the gradient of x", "le gradient de x"),
    OF_WEIGHT: Said("the gradient of the norm's weight", "le gradient du poids de la norme"),
    OF_BIAS: Said("the gradient of the norm's bias", "le gradient du biais de la norme"),
}


def shares_tokens(seed: int) -> bool:
    """Whether a case is one with sequence parallelism: every other seed."""
    return seed % 2 == 1


def _inputs(seed: int) -> Any:
    """x, the norm's weight and bias, the region's two layers, the coefficients of the loss."""
    stream = (BATCH, TOKENS, WIDTH)
    return normal(seed, stream, (WIDTH,), (WIDTH,), (HIDDEN, WIDTH), (WIDTH, HIDDEN), stream)


def _region(rank: int, size: int, seed: int) -> Callable[[Tensor], Tensor]:
    """This rank's part of a parallel region: columns, a function of each feature, rows; the sum is left to do."""
    import torch

    _, _, _, expand, project, _ = _inputs(seed)
    return lambda x_BTD: torch.tanh(x_BTD @ expand.chunk(size)[rank].T) @ project.chunk(size, dim=1)[rank].T


def _own(whole: Tensor, rank: int, size: int, seed: int) -> Tensor:
    return whole.chunk(size, dim=1)[rank] if shares_tokens(seed) else whole


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from dlojz.tensor.axis import TensorAxis
    from dlojz.tensor.random_state import RandomStates

    x, weight, bias, _, _, coefficients = _inputs(seed)
    leaves = [leaf.clone().requires_grad_() for leaf in (_own(x, rank, size, seed), weight, bias)]
    axis = TensorAxis(dist.group.WORLD, sequence_parallel=shares_tokens(seed))
    torch.manual_seed(seed)  # who draws from torch's own generator draws the same on all ranks
    y = answer(*leaves, _region(rank, size, seed), RandomStates(seed, rank), axis)
    own = _own(coefficients, rank, size, seed)
    if y is not None and y.shape == own.shape and y.requires_grad:
        (y * own).sum().backward()
    gradients = dict(zip((OF_X, OF_WEIGHT, OF_BIAS), (leaf.grad for leaf in leaves), strict=True))
    return {"shares tokens": shares_tokens(seed)}, {OUTPUT: y, **gradients}


def _mask(rank: int, seed: int, stream: str, like: Tensor) -> Tensor:
    import torch

    from dlojz.tensor.random_state import RandomStates

    return RandomStates(seed, rank).dropout(torch.ones_like(like), DROP, stream)  # type: ignore[arg-type]


def _shares(rank: int, size: int, seed: int, way: str = "right") -> dict[str, Tensor]:
    """What each rank holds: the ranks' copies of x and of the norm are leaves of one graph, with one loss."""
    import torch
    import torch.nn.functional as F

    x, weight, bias, _, _, coefficients = _inputs(seed)
    split = shares_tokens(seed)
    stream = {"replicated": "replicated", "split": "split"}.get(way, "split" if split else "replicated")
    ranks = range(size)
    xs = [_own(x, one, size, seed).clone().requires_grad_() for one in ranks]
    norms = [[leaf.clone().requires_grad_() for leaf in (weight, bias)] for _ in ranks]
    normed = [F.layer_norm(xs[one], (WIDTH,), *norms[one]) for one in ranks]
    entered = [torch.cat(normed, dim=1)] * size if split else normed
    partials = [_region(one, size, seed)(entered[one]) for one in ranks]
    if way == "no sum":
        sums = [_own(partials[one], one, size, seed) for one in ranks]
    else:
        sums = [_own(added(partials), one, size, seed) for one in ranks]
    outputs = [xs[one] + sums[one] * _mask(one, seed, stream, sums[one]) for one in ranks]
    if split:
        losses = [(outputs[one] * _own(coefficients, one, size, seed)).sum() for one in ranks]
        added(losses).backward()
    else:  # one stream, which all ranks have: the shortcut is each rank's own, the region a sum of all ranks' parts
        (outputs[rank] * coefficients).sum().backward()
    leaves = [(xs[one], *norms[one]) for one in ranks]
    parts = [[gradient(leaf) for leaf in own] for own in leaves]
    own = parts[rank]
    whole = [added(part[number] for part in parts) for number in range(3)]
    values = {OUTPUT: outputs[rank], OF_X: own[0] if split else whole[0], OF_WEIGHT: whole[1], OF_BIAS: whole[2]}
    values |= {"own x": own[0], "own weight": own[1], "own bias": own[2]}
    return {name: value.detach() for name, value in values.items()}


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    values = _shares(rank, size, seed)
    return {name: values[name] for name in LABELS}


def _if(split: bool, values: Callable[[int, int, int], dict[str, Tensor]]) -> Callable[[int, int, int], Any]:
    """A fault of one of the two kinds of cases only."""
    return lambda rank, size, seed: values(rank, size, seed) if shares_tokens(seed) == split else None


def _norm_alone(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    values = _shares(rank, size, seed)
    return {OUTPUT: values[OUTPUT], OF_X: values[OF_X], OF_WEIGHT: values["own weight"]}


def _norm_again(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    values = _shares(rank, size, seed)
    return {OUTPUT: values[OUTPUT], OF_WEIGHT: size * values[OF_WEIGHT]}


def _region_alone(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    values = _shares(rank, size, seed)
    return {OUTPUT: values[OUTPUT], OF_X: values["own x"], OF_WEIGHT: values["own weight"]}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    if not answers[0].value["shares tokens"]:
        return
    if any(numel >= BATCH * TOKENS * WIDTH for numel in asked_for(answers[0], "all_reduce")):
        raise Wrong(
            say(
                en="All is right, but with sequence parallelism an all-reduce brings the whole sum to every rank, "
                "which then keeps its tokens only: a reduce-scatter sends half as much.",
                fr="Tout est juste, mais avec Sequence Parallelism un all-reduce apporte la somme entière à chaque "
                "rang, qui n’en garde que ses tokens : un reduce-scatter envoie deux fois moins d’octets.",
            )
        )


SEQUENCE_PARALLEL = Exercise(
    id="sequence-parallel",
    title=Said("sequence parallelism", "Sequence Parallelism"),
    judge=by_shares(
        trial=_trial,
        expected=_expected,
        cases=CASES,
        labels=LABELS,
        faults=(
            Fault(
                _if(True, lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed, "replicated")[OUTPUT]}),
                Said(
                    "With sequence parallelism all ranks draw the same dropout mask, but they hold different tokens: "
                    "the same places are dropped in each rank's tokens. Draw from the stream that differs (split).",
                    "Avec Sequence Parallelism, tous les rangs tirent le même masque de dropout, alors qu’ils "
                    "détiennent des tokens différents : les mêmes places s’annulent chez chacun. Tirez dans le flux "
                    "qui diffère (split).",
                ),
            ),
            Fault(
                _if(False, lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed, "split")[OUTPUT]}),
                Said(
                    "Without sequence parallelism every rank holds the same tokens, but each draws a dropout mask of "
                    "its own: what should be one stream becomes another on each rank. Draw from the stream that is "
                    "the same (replicated).",
                    "Sans Sequence Parallelism, tous les rangs détiennent les mêmes tokens, mais chacun tire son "
                    "propre masque de dropout : ce qui devrait être un seul flux d’activations diffère d’un rang à "
                    "l’autre. Tirez dans le flux commun (replicated).",
                ),
            ),
            Fault(
                _if(True, lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed, "no sum")[OUTPUT]}),
                Said(
                    "Each rank takes its tokens from its own partial product: a part is taken where a sum is due. The "
                    "region ends with a reduce-scatter (scatter_tokens).",
                    "Chaque rang prend ses tokens dans son propre produit partiel : vous découpez là où il faut une "
                    "somme. La région se termine par un reduce-scatter (scatter_tokens).",
                ),
            ),
            Fault(
                _if(False, lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed, "no sum")[OUTPUT]}),
                NO_FORWARD_SUM,
            ),
            Fault(
                _if(True, _norm_alone),
                Said(
                    "The output is right, but the gradient of the norm's weights holds this rank's tokens only: these "
                    "weights are whole on every rank, and each sees a part of the sequence. Add their gradients up "
                    "(copy), or they drift apart.",
                    "La sortie est juste, mais le gradient des poids de la norme ne compte que les tokens de ce rang : "
                    "ces poids sont entiers sur chaque rang, qui ne voit qu’une partie de la séquence. Additionnez "
                    "leurs gradients (copy), sinon ils s’écartent.",
                ),
            ),
            Fault(_if(False, _norm_again), COUNTED_AGAIN),
            Fault(_if(False, _region_alone), NO_BACKWARD_SUM),
        ),
        inspect=_inspect,
    ),
    praise=Said(
        "Right, with and without: the all-reduce in two halves, the norm's gradients added up, each mask where it "
        "belongs.",
        "Exact, avec et sans : l’all-reduce en deux moitiés, les gradients de la norme additionnés, chaque masque à sa "
        "place.",
    ),
    hints=(
        Said(
            "The region wants all tokens, and its end is a sum of which each rank keeps its own. Who sees all tokens "
            "when the norm is computed, and what follows for its weights? Are the tokens that are dropped the same on "
            "all ranks?",
            "La région veut tous les tokens, et se termine par une somme dont chaque rang garde sa part. Qui voit tous "
            "les tokens quand la norme se calcule, et qu’en résulte-t-il pour ses poids ? Les tokens soumis au dropout "
            "sont-ils les mêmes sur tous les rangs ?",
        ),
        Said(
            "With: weight and bias through copy(…, axis), norm, gather_tokens, region, scatter_tokens, dropout "
            '"split". Without: norm, copy, region, add_up, dropout "replicated". Then + x.',
            "Avec : weight et bias à travers copy(…, axis), norme, gather_tokens, region, scatter_tokens, dropout "
            '"split". Sans : norme, copy, region, add_up, dropout "replicated". Enfin + x.',
        ),
    ),
)
