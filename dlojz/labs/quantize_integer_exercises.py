"""Lab 11: a linear layer computed in whole numbers, corrected for the zero-point.

Layer 6 (labs). Invariant: an answer is held to the layer's output, then to how it is computed: its product multiplies
numbers of 8 bits, adds them up in 32.

Shape suffixes: B rows, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import normal, shaped
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.quantize_affine_exercises import quantize_affine
from dlojz.labs.quantize_rows_exercises import quantize_rows
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

PRODUCTS = ("mm", "bmm", "addmm", "mv", "dot", "_int_mm", "linear")


def integer_linear(x_q_BI: Tensor, x_scale: float, x_zero: int, w_q_OI: Tensor, w_scale_O1: Tensor) -> Tensor:
    """What a linear layer without bias gives, (B, O), the product being of whole numbers.

    Σ s_x (q_x − z) s_w q_w = s_x s_w (Σ q_x q_w − z Σ q_w), over the inputs.

    Args:
        x_q_BI: in int8; x = x_scale × (x_q − x_zero).
        x_scale: of the whole tensor.
        x_zero: zero-point.
        w_q_OI: in int8; weight = w_scale × w_q.
        w_scale_O1: one scale per output.

    Source: Jacob et al. 2018 (arXiv 1712.05877), integer-arithmetic-only matrix multiplication.
    """
    wide_x_BI, wide_w_OI = x_q_BI.int(), w_q_OI.int()
    sums_BO = wide_x_BI @ wide_w_OI.T - x_zero * wide_w_OI.sum(1)
    return x_scale * w_scale_O1.T * sums_BO


def _cases() -> Iterator[tuple[Any, ...]]:
    for seed, rows, outputs, inputs in ((1, 3, 5, 40), (2, 6, 4, 64)):
        x_q, x_scale, x_zero = quantize_affine(normal(seed, rows, inputs) + 1.0, -1.2, 4.0, 8)
        yield x_q, x_scale, x_zero, *quantize_rows(normal(seed + 10, outputs, inputs) + 0.2, 8)


def _watching() -> tuple[Any, list[str]]:
    """A mode that sees every product, and what it has to say against them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in PRODUCTS:
                factors = [one for one in args if torch.is_tensor(one)][-2:]
                if any(one.is_floating_point() for one in factors):
                    found.append("float")
                elif any(int(one.min()) < -128 or int(one.max()) > 127 for one in factors):
                    found.append("wide")
            return func(*args, **(kwargs or {}))

    return Products(), found


def _trial(answer: Callable[..., Any], *case: Any) -> Tensor:
    """The outputs, each divided by the scale of its column."""
    x_q_BI, x_scale, _, w_q_OI, w_scale_O1 = case
    value = shaped(answer(*case), "y", (len(x_q_BI), len(w_q_OI)))
    return value.double() / (x_scale * w_scale_O1.T)


def _uncorrected(x_q: Tensor, s: float, z: int, w_q: Tensor, w_s: Tensor) -> Tensor:
    return s * w_s.T * (x_q.int() @ w_q.int().T)


def _narrow(corrected: bool) -> Callable[..., Tensor]:
    def way(x_q: Tensor, s: float, z: int, w_q: Tensor, w_s: Tensor) -> Tensor:
        import torch

        sums = (x_q.int() @ w_q.int().T).to(torch.int8).int()  # as an int8 product that runs over
        return s * w_s.T * (sums - z * w_q.int().sum(1) * corrected)

    return way


def _without_sum(x_q: Tensor, s: float, z: int, w_q: Tensor, w_s: Tensor) -> Tensor:
    return s * w_s.T * (x_q.int() @ w_q.int().T - z)


def _added(x_q: Tensor, s: float, z: int, w_q: Tensor, w_s: Tensor) -> Tensor:
    return s * w_s.T * (x_q.int() @ w_q.int().T + z * w_q.int().sum(1))


def _of_inputs(x_q: Tensor, s: float, z: int, w_q: Tensor, w_s: Tensor) -> Tensor:
    return s * w_s.T * (x_q.int() @ w_q.int().T - z * x_q.int().sum(1, keepdim=True))


def _without_scales(keep_x: bool) -> Callable[..., Tensor]:
    def way(x_q: Tensor, s: float, z: int, w_q: Tensor, w_s: Tensor) -> Tensor:
        sums = x_q.int() @ w_q.int().T - z * w_q.int().sum(1)
        return s * sums.float() if keep_x else w_s.T * sums

    return way


_NARROW = Said(
    "The sums run over: products of int8 are added up in int32, so convert both factors first, .int().",
    "Les sommes débordent : les produits d’int8 s’additionnent en int32 ; convertissez d’abord les deux facteurs, "
    ".int().",
)
_BY_VALUE = by_trial(
    _trial,
    integer_linear,
    cases=_cases,
    mistakes=(
        Mistake(
            _uncorrected,
            Said(
                "The zero-point is left out: x is worth x_scale × (x_q − x_zero), and Σ (x_q − x_zero) w_q has a "
                "second part, −x_zero Σ w_q.",
                "Le point zéro est oublié : x vaut x_scale × (x_q − x_zero), et Σ (x_q − x_zero) w_q a une seconde "
                "partie, −x_zero Σ w_q.",
            ),
        ),
        Mistake(_narrow(True), _NARROW),
        Mistake(_narrow(False), _NARROW),
        Mistake(
            _without_sum,
            Said(
                "You take the zero-point away once; it counts once per input, times the weight: x_zero × the sum of "
                "the row of w_q.",
                "Vous retranchez le point zéro une seule fois ; il compte une fois par entrée, multiplié par le "
                "poids : x_zero × la somme de la ligne de w_q.",
            ),
        ),
        Mistake(_added, Said("The correction is to be taken away, not added.",
                             "La correction se retranche, elle ne s’ajoute pas.")),
        Mistake(
            _of_inputs,
            Said(
                "The correction adds up the inputs; it is the weights that the zero-point is multiplied by: "
                "w_q.sum(1).",
                "La correction additionne les entrées ; or ce sont les poids que le point zéro multiplie : w_q.sum(1).",
            ),
        ),
        Mistake(_without_scales(True), Said("The scales of the weights are left out: one per output, w_scale.T.",
                                            "Les échelles des poids manquent : une par sortie, w_scale.T.")),
        Mistake(_without_scales(False), Said("The scale of x is left out.", "L’échelle de x manque.")),
    ),
)  # fmt: skip


def _judge(answer: Callable[..., Any]) -> None:
    _BY_VALUE(answer)
    for case in _cases():
        mode, found = _watching()
        with mode:
            answer(*case)
        if "float" in found:
            raise Wrong(
                say(
                    en="The output is right, but the product is one of floats: multiply the whole numbers (.int()), "
                    "and the scales at the end.",
                    fr="La sortie est juste, mais le produit est fait en flottants : multipliez les entiers (.int()), "
                    "et les échelles à la fin.",
                )
            )
        if "wide" in found:
            raise Wrong(
                say(
                    en="The output is right, but x_q − x_zero needs 9 bits: a processor that multiplies int8 could not "
                    "do it. Multiply x_q as it is, and correct afterwards.",
                    fr="La sortie est juste, mais x_q − x_zero demande 9 bits : un processeur qui multiplie des int8 "
                    "ne saurait le faire. Multipliez x_q tel quel, et corrigez ensuite.",
                )
            )


INTEGER_LINEAR = Exercise(
    id="integer-linear",
    title=Said("a layer in whole numbers", "une couche en entiers"),
    judge=_judge,
    praise=Said(
        "Right: the product is exact; the correction depends on the weights alone, so it is computed once and for all.",
        "Exact : le produit ne perd rien ; la correction ne dépend que des poids, on la calcule une fois pour toutes.",
    ),
    hints=(
        Said(
            "Expand Σ x_scale (x_q − x_zero) × w_scale w_q: what can be taken out of the sum, and which two sums "
            "remain?",
            "Développez Σ x_scale (x_q − x_zero) × w_scale w_q : que peut-on sortir de la somme, et quelles sont les "
            "deux sommes qui restent ?",
        ),
        Said(
            "sums = x_q.int() @ w_q.int().T − x_zero * w_q.int().sum(1); then x_scale * w_scale.T * sums.",
            "sums = x_q.int() @ w_q.int().T − x_zero * w_q.int().sum(1) ; puis x_scale * w_scale.T * sums.",
        ),
    ),
)
