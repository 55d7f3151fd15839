"""Lab 06: attention shared out by heads, from a projection whose rows hold queries, then keys, then values.

Layer 6 (labs). Invariant: an answer is held to the output and the gradients of whole attention in one process; which
heads a rank takes shows in the gradient of the projection.

Shape suffixes: B batch, T tokens, D width, N heads, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.tensor_diagnosis import NO_BACKWARD_SUM, NO_FORWARD_SUM, Fault, by_shares, gathers, normal
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

BATCH, TOKENS, HEADS, HEAD = 2, 5, 6, 4
WIDTH = HEADS * HEAD
OUTPUT, OF_X, OF_QKV = "output", "gradient of x", "gradient of qkv"
LABELS = {
    OUTPUT: Said("the output", "la sortie"),
    OF_X: Said("the gradient of x", "le gradient de x"),
    OF_QKV: Said("the gradient of qkv", "le gradient de qkv"),
}


def _inputs(seed: int) -> Any:
    x, qkv, project, loss = normal(seed, (BATCH, TOKENS, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (BATCH, TOKENS, 1))
    return x, qkv / WIDTH**0.5 * 2, project / WIDTH**0.5, loss


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    import torch.distributed as dist

    from dlojz.tensor.axis import TensorAxis

    x, qkv, project, coefficients = _inputs(seed)
    x.requires_grad_(), qkv.requires_grad_()
    y = answer(x, qkv, project, HEADS, TensorAxis(dist.group.WORLD))
    if y is not None and y.shape == x.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_X: x.grad, OF_QKV: qkv.grad}


def _attend(x_BTD: Tensor, rows_3NHD: Tensor, project_DE: Tensor, *, merge: bool = True) -> Tensor:
    import torch
    import torch.nn.functional as F

    q_BNTH, k_BNTH, v_BNTH = torch.einsum("btd,pnhd->pbnth", x_BTD, rows_3NHD)
    attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH)
    merged = attended_BNTH.transpose(1, 2) if merge else attended_BNTH
    return merged.reshape(BATCH, TOKENS, -1) @ project_DE.T


def _own_rows(qkv: Tensor, rank: int, size: int, way: str) -> Tensor:
    """The projection's rows that a rank takes, as (3, heads, H, D)."""
    whole = qkv.view(3, HEADS, HEAD, WIDTH)
    if way == "naive slice":
        return qkv.chunk(size)[rank].view(3, -1, HEAD, WIDTH)
    if way == "head by head":
        return qkv.chunk(size)[rank].view(-1, 3, HEAD, WIDTH).transpose(0, 1)
    if way == "interleaved":
        return whole[:, rank::size]
    return whole.chunk(size, dim=1)[rank]


def _shares(rank: int, size: int, seed: int, way: str = "right") -> dict[str, Tensor]:
    """What ranks hold; `own x` is this rank's contribution to the gradient of x."""
    x, qkv, project, coefficients = _inputs(seed)
    qkv.requires_grad_()
    copies = [x.clone().requires_grad_() for _ in range(size)]
    partials = []
    for other, copy in enumerate(copies):
        columns = project.chunk(size, dim=1)[other]
        if way == "project by outputs":
            columns = project.chunk(size)[other].T
        partials.append(_attend(copy, _own_rows(qkv, other, size, way), columns, merge=way != "unmerged"))
    (partials[rank] * coefficients).sum().backward(retain_graph=True)
    of_qkv, own_x = qkv.grad.clone(), copies[rank].grad.clone()
    for copy in copies:
        copy.grad = None
    (sum(partials) * coefficients).sum().backward()
    values = {OUTPUT: sum(partials), OF_X: sum(copy.grad for copy in copies), OF_QKV: of_qkv}
    return {name: value.detach() for name, value in {**values, "partial": partials[rank], "own x": own_x}.items()}


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    values = _shares(rank, size, seed)
    return {name: values[name] for name in LABELS}


def _output(way: str) -> Callable[[int, int, int], dict[str, Tensor]]:
    return lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed, way)[OUTPUT]}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    if gathers(answers[0]):
        raise Wrong(
            say(
                en="Output and gradients are right, but something is gathered: heads do not see each other, so that "
                "nothing has to be sent between the two projections.",
                fr="La sortie et les gradients sont justes, mais quelque chose est rassemblé : les têtes ne se voient "
                "pas, il n’y a donc rien à envoyer entre les deux projections.",
            )
        )


ATTENTION_HEADS = Exercise(
    id="attention-heads",
    title=Said("attention by heads", "l’attention par têtes"),
    judge=by_shares(
        trial=_trial,
        expected=_expected,
        labels=LABELS,
        faults=(
            Fault(
                _output("naive slice"),
                Said(
                    "Queries, keys and values are mixed up: the rows of qkv hold all queries, then all keys, then all "
                    "values, and a plain slice of them gives some ranks queries only. View it as (3, heads, H, D), "
                    "and share out the dimension of the heads.",
                    "Requêtes, clés et valeurs sont mélangées : les lignes de qkv contiennent toutes les requêtes, "
                    "puis toutes les clés, puis toutes les valeurs ; une simple tranche ne donne à certains rangs que "
                    "des requêtes. Voyez-la comme (3, têtes, H, D), et partagez la dimension des têtes.",
                ),
            ),
            Fault(
                _output("head by head"),
                Said(
                    "You read qkv head by head, as (heads, 3, H); here its rows are laid out (3, heads, H): queries, "
                    "keys and values are mixed up.",
                    "Vous lisez qkv tête par tête, comme (têtes, 3, H) ; or ses lignes sont ici rangées (3, têtes, "
                    "H) : requêtes, clés et valeurs sont mélangées.",
                ),
            ),
            Fault(
                _output("interleaved"),
                Said(
                    "The order of the heads is another one: you take every N-th head, but consecutive columns of "
                    "project. Both must speak of the same heads: rank r has the r-th of N equal pieces.",
                    "L’ordre des têtes n’est pas le même : vous prenez une tête sur N, mais des colonnes consécutives "
                    "de project. Les deux doivent désigner les mêmes têtes : le rang r a le r-ième de N morceaux "
                    "égaux.",
                ),
            ),
            Fault(
                _output("unmerged"),
                Said(
                    "The heads are laid side by side in the wrong order: transpose (B, heads, T, H) to (B, T, heads, "
                    "H) before flattening the last two dimensions.",
                    "Les têtes sont mises bout à bout dans le mauvais ordre : transposez (B, têtes, T, H) en (B, T, "
                    "têtes, H) avant d’aplatir les deux dernières dimensions.",
                ),
            ),
            Fault(
                _output("project by outputs"),
                Said(
                    "The wrong dimension of project is split: this rank's heads are some of its inputs, dim=1 of "
                    "torch's weight, so that it is the layer by rows.",
                    "Ce n’est pas la bonne dimension de project : les têtes de ce rang sont une partie de ses entrées, "
                    "dim=1 du poids de torch ; c’est lui, la couche par ligne.",
                ),
            ),
            Fault(lambda *case: {OUTPUT: _shares(*case)["partial"]}, NO_FORWARD_SUM),
            Fault(
                lambda *case: {OUTPUT: _shares(*case)[OUTPUT], OF_X: _shares(*case)["own x"]},
                NO_BACKWARD_SUM,
            ),
        ),
        inspect=_inspect,
    ),
    praise=Said(
        "Right: each rank attends with its own heads, whole; one all-reduce in each direction.",
        "Exact : chaque rang calcule l’attention de ses têtes, entières ; un all-reduce dans chaque sens.",
    ),
    hints=(
        Said(
            "A head is the smallest piece that can be computed alone. Give the dimension of the heads a place of its "
            "own in the shape of qkv, then share it out. project multiplies the heads side by side.",
            "La tête est le plus petit morceau qui se calcule seul. Donnez à la dimension des têtes sa propre place "
            "dans la forme de qkv, puis partagez-la. project multiplie les têtes mises bout à bout.",
        ),
        Said(
            "x = copy(x, axis). own = qkv.view(3, heads, -1, width).chunk(axis.size, dim=1)[axis.rank]; q, k, v = "
            'torch.einsum("btd,pnhd->pbnth", x, own). After the attention: .transpose(1, 2).flatten(2), times '
            "project.chunk(axis.size, dim=1)[axis.rank].T, then add_up(…, axis).",
            "x = copy(x, axis). own = qkv.view(3, heads, -1, width).chunk(axis.size, dim=1)[axis.rank] ; q, k, v = "
            'torch.einsum("btd,pnhd->pbnth", x, own). Après l’attention : .transpose(1, 2).flatten(2), fois '
            "project.chunk(axis.size, dim=1)[axis.rank].T, puis add_up(…, axis).",
        ),
    ),
)
