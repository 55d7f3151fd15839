"""Lab 10: the mixture: tokens laid out by expert, computed, and brought back with their weights.

Layer 6 (labs). Invariant: what found no place leaves the sum; the experts see one dense tensor, once.

Shape suffixes: T tokens, E experts, K choices of a token, C places of an expert, D width, N choices that have a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.expert_capacity_exercises import capacity, crowded, places
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

Experts = Callable[["Tensor"], "Tensor"]


def mixture(
    x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, places_TK: Tensor, experts: Experts, shape: tuple[int, int]
) -> Tensor:
    """Each token's experts, weighted and added up, (T, D); zero for a token that found no place.

    Args:
        x_TD: the tokens.
        weights_TK: of the choices.
        chosen_TK: numbers of the experts.
        places_TK: places within the experts; -1 where dropped.
        experts: takes and gives (E, C, D): expert e computes row e.
        shape: (E, C).

    Source: Lepikhin et al. 2020 (arXiv 2006.16668): dispatch and combine.
    """
    import torch

    token_N, choice_N = (places_TK >= 0).nonzero(as_tuple=True)
    where = chosen_TK[token_N, choice_N], places_TK[token_N, choice_N]
    buffer_ECD = x_TD.new_zeros(*shape, x_TD.shape[1])
    buffer_ECD[where] = x_TD[token_N]
    weighted_ND = weights_TK[token_N, choice_N].unsqueeze(1) * experts(buffer_ECD)[where]
    return torch.zeros_like(x_TD).index_add(0, token_N, weighted_ND)


class _Asked:
    """Experts that differ, and are not zero at zero, so that an empty place that is read shows."""

    def __init__(self, num_experts: int, room: int, width: int, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        self.shape = (num_experts, room, width)
        self.matrices_EDD = torch.randn(num_experts, width, width, generator=generator)
        self.biases_ED = torch.randn(num_experts, width, generator=generator)

    def __call__(self, buffer_ECD: Tensor) -> Tensor:
        given = tuple(getattr(buffer_ECD, "shape", ()))
        if given != self.shape:
            raise Wrong(
                say(
                    en=f"experts received a tensor of shape {given}, but takes (experts, capacity, width), here "
                    f"{self.shape}: row e is for expert e.",
                    fr=f"experts a reçu un tenseur de forme {given}, mais attend (experts, capacité, largeur), ici "
                    f"{self.shape} : la ligne e est pour l’expert e.",
                )
            )
        return (buffer_ECD @ self.matrices_EDD + self.biases_ED.unsqueeze(1)).tanh()

    def __repr__(self) -> str:
        return "experts"


def _mixtures() -> Iterator[tuple[Any, ...]]:
    import torch

    for number, (chosen_TK, experts, factor) in enumerate(crowded()):
        generator = torch.Generator().manual_seed(20 + number)
        tokens, k = chosen_TK.shape
        x_TD = torch.randn(tokens, 5, generator=generator)
        weights_TK = torch.rand(tokens, k, generator=generator)
        room = capacity(tokens, experts, k, factor)
        asked = _Asked(experts, room, 5, seed=30 + number)
        yield x_TD, weights_TK, chosen_TK, places(chosen_TK, experts, factor), asked, (experts, room)


def _unweighted(x: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    return mixture(x, weights.new_ones(weights.shape), *rest)


def _with_itself(x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor, experts: Experts, shape: Any) -> Tensor:
    """A token that no expert has seen comes out as it went in."""
    lost_T = (kept < 0).all(1, keepdim=True)
    return mixture(x, weights, chosen, kept, experts, shape) + lost_T * x


def _read_anyway(x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor, experts: Experts, shape: Any) -> Tensor:
    """Dropped tokens read the last place of their expert, which Python's -1 is."""
    seen = _outputs(x, weights, chosen, kept, experts, shape)
    return (weights.unsqueeze(-1) * seen[chosen, kept]).sum(1)


def _written_anyway(x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor, experts: Experts, shape: Any) -> Tensor:
    """Dropped tokens are written over the last place too."""
    buffer = x.new_zeros(*shape, x.shape[1])
    for choice in range(chosen.shape[1]):
        for token in range(len(x)):
            buffer[chosen[token, choice], kept[token, choice]] = x[token]
    return (weights.unsqueeze(-1) * experts(buffer)[chosen, kept]).sum(1)


def _outputs(x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor, experts: Experts, shape: Any) -> Tensor:
    token, choice = (kept >= 0).nonzero(as_tuple=True)
    buffer = x.new_zeros(*shape, x.shape[1])
    buffer[chosen[token, choice], kept[token, choice]] = x[token]
    return experts(buffer)


def _last_choice(x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor, experts: Experts, shape: Any) -> Tensor:
    """Each choice overwrites the one before."""
    seen, y = _outputs(x, weights, chosen, kept, experts, shape), x.new_zeros(x.shape)
    for choice in range(chosen.shape[1]):
        token = (kept[:, choice] >= 0).nonzero().squeeze(1)
        where = chosen[token, choice], kept[token, choice]
        y[token] = weights[token, choice].unsqueeze(1) * seen[where]
    return y


def _weighted_before(x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor, experts: Experts, shape: Any) -> Tensor:
    """The weight is applied to what enters the expert."""
    token, choice = (kept >= 0).nonzero(as_tuple=True)
    where = chosen[token, choice], kept[token, choice]
    buffer = x.new_zeros(*shape, x.shape[1])
    buffer[where] = weights[token, choice].unsqueeze(1) * x[token]
    return x.new_zeros(x.shape).index_add(0, token, experts(buffer)[where])


MIXTURE = Exercise(
    id="mixture",
    title=Said("the mixture", "le mélange"),
    judge=by_reference(
        mixture,
        cases=_mixtures,
        mistakes=(
            Mistake(
                _unweighted,
                Said(
                    "The experts' outputs are added up without their weights: multiply each by that of its choice.",
                    "Les sorties des experts sont additionnées sans leurs poids : multipliez chacune par celui de son "
                    "choix.",
                ),
            ),
            Mistake(
                _weighted_before,
                Said(
                    "The weight multiplies what enters the expert: multiply what comes out. An expert is not linear.",
                    "Le poids multiplie ce qui entre dans l’expert : multipliez ce qui en sort. Un expert n’est pas "
                    "linéaire.",
                ),
            ),
            Mistake(
                _with_itself,
                Said(
                    "A token without a place comes out as it went in. Here it gives zero: the residual connection "
                    "around the layer adds the token itself, and would do so twice.",
                    "Un token sans place ressort tel quel. Ici il donne zéro : c’est la connexion résiduelle autour de "
                    "la couche qui ajoute le token lui-même ; elle le ferait une seconde fois.",
                ),
            ),
            Mistake(
                _read_anyway,
                Said(
                    "Tokens without a place read the last place of their expert, since index -1 is the last one in "
                    "Python: leave these choices out.",
                    "Les tokens sans place lisent la dernière place de leur expert, car l’indice -1 désigne la "
                    "dernière en Python : écartez ces choix.",
                ),
            ),
            Mistake(
                _written_anyway,
                Said(
                    "Tokens without a place are written over the last place of their expert, since index -1 is the "
                    "last one in Python: leave these choices out, both ways.",
                    "Les tokens sans place s’écrivent sur la dernière place de leur expert, car l’indice -1 désigne la "
                    "dernière en Python : écartez ces choix, à l’aller comme au retour.",
                ),
            ),
            Mistake(
                _last_choice,
                Said(
                    "Each choice overwrites the one before: the outputs of a token's experts are added up.",
                    "Chaque choix écrase le précédent : les sorties des experts d’un même token s’additionnent.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: dispatch, compute, combine. The experts see a dense tensor; all the rest is addressing.",
        "Exact : répartir, calculer, recombiner. Les experts voient un tenseur dense ; le reste n’est que rangement.",
    ),
    hints=(
        Said(
            "Three times: fill a tensor (E, C, D) of zeros with the tokens that have a place; give it to experts, "
            "once; bring back each result, times its weight, to the token it came from.",
            "Trois temps : remplir un tenseur (E, C, D) de zéros avec les tokens qui ont une place ; le donner à "
            "experts, une fois ; ramener chaque résultat, fois son poids, au token dont il vient.",
        ),
        Said(
            "token, choice = (places >= 0).nonzero(as_tuple=True); where = chosen[token, choice], places[token, "
            "choice]; buffer[where] = x[token]; y.index_add(0, token, weight × experts(buffer)[where]).",
            "token, choice = (places >= 0).nonzero(as_tuple=True) ; where = chosen[token, choice], places[token, "
            "choice] ; buffer[where] = x[token] ; y.index_add(0, token, poids × experts(buffer)[where]).",
        ),
    ),
)
