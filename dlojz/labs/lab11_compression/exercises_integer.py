"""Exercise of lab 11 on a layer in whole numbers: a product of int8, a correction for the zero-point, two scales.

The product must multiply 8-bit numbers and add them up in 32 bits. A mistake in a shape raises an error in torch: it is
named where the answer is right without it.

Shape suffixes: B rows, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import Answer, expect_tensor, normal
from dlojz.labs.lab11_compression.exercises_quantize import quantize_affine, quantize_rows

TEXTS = Texts(__file__)

Undo = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]

PRODUCTS = ("mm", "bmm", "addmm", "mv", "dot", "_int_mm", "linear")


def integer_linear(x_q_BI: Tensor, x_scale: float, x_zero: int, w_q_OI: Tensor, w_scale_O1: Tensor) -> Tensor:
    """Compute a linear layer without bias, (B, O), with a product of whole numbers.

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


def _integer_cases() -> Iterator[tuple[Any, ...]]:
    for seed, rows, outputs, inputs in ((1, 3, 5, 40), (2, 6, 4, 64)):
        # A range off centre has a zero-point that is not 0, and weights of mean 0.2 give Σ q_w far from 0:
        # so a correction that is missing or wrong shows.
        x_q, x_scale, x_zero = quantize_affine(normal(seed, rows, inputs) + 1.0, -1.2, 4.0, 8)
        yield x_q, x_scale, x_zero, *quantize_rows(normal(seed + 10, outputs, inputs) + 0.2, 8)


def _watching() -> tuple[Any, list[str]]:
    """A mode that sees every product, and what it has to say against them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    problems: list[str] = []

    # Below autograd every spelling (@, matmul, F.linear) comes by as one of the PRODUCTS.
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in PRODUCTS:
                # The last two: addmm has the summand before its factors.
                factors = [argument for argument in args if torch.is_tensor(argument)][-2:]
                if any(factor.is_floating_point() for factor in factors):
                    problems.append("float")
                # int32 is fine as a type, as long as what it holds would fit in 8 bits.
                elif any(int(factor.min()) < -128 or int(factor.max()) > 127 for factor in factors):
                    problems.append("wide")
            return func(*args, **(kwargs or {}))

    return Products(), problems


def _integer_trial(answer: Callable[..., Any], *case: Any) -> Tensor:
    """The outputs, each divided by the scale of its column."""
    x_q_BI, x_scale, _, w_q_OI, w_scale_O1 = case
    value = expect_tensor(answer(*case), "y", (len(x_q_BI), len(w_q_OI)))
    # In units of the scales these are the whole sums: a column of small scale counts as much as another.
    return value.double() / (x_scale * w_scale_O1.T)


def _undone(undo: Undo) -> Callable[[Answer], Answer]:
    """Make a repair that hands other arguments to some of torch's functions that an answer calls.

    Args:
        undo: called with the function's name, its arguments and its keywords; gives these two without the mistake, or
            None where the call does not show it.
    """

    def repaired(answer: Answer) -> Answer:
        def within(*case: Any) -> Any:
            from torch.overrides import TorchFunctionMode

            class Undone(TorchFunctionMode):
                def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    kwargs = dict(kwargs or {})
                    args, kwargs = undo(getattr(func, "__name__", ""), args, kwargs) or (args, kwargs)
                    return func(*args, **kwargs)

            with Undone():
                return answer(*case)

        return within

    return repaired


def _product_transposed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The second factor of a product, where only its transpose fits."""
    if name not in ("matmul", "__matmul__", "mm") or len(args) != 2:
        return None
    left, right = args
    # Fits as it is, or fits neither way: hands off.
    if right.dim() != 2 or left.shape[-1] == right.shape[0] or left.shape[-1] != right.shape[1]:
        return None
    return (left, right.T), kwargs


def _sum_along(dim: int, keepdim: bool) -> Callable[..., Any]:
    """A sum of the weights along the inputs, where an answer sums along `dim` or keeps the dimension."""

    def undo(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name != "sum" or not args or args[0].dim() != 2:
            return None
        options = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
        # dim − 2 is the same dimension of a matrix, counted from the end.
        if options.get("dim") not in (dim, dim - 2) or bool(options.get("keepdim", False)) != keepdim:
            return None
        return args[:1], {**options, "dim": 1, "keepdim": False}

    return undo


def _check_products(answer: Callable[..., Any]) -> None:
    for case in _integer_cases():
        mode, problems = _watching()
        with mode:
            answer(*case)
        if "float" in problems:
            raise TEXTS.wrong("integer-linear", "a product of floats")
        if "wide" in problems:
            raise TEXTS.wrong("integer-linear", "9 bits in int8")


INTEGER_LINEAR = TEXTS.exercise(
    "integer-linear",
    integer_linear,
    trial=_integer_trial,
    cases=_integer_cases,
    mistakes={
        "the zero-point is left out": "- x_zero * wide_w_OI.sum(1) →",
        # An int8 product that runs over, with its correction and without.
        "another axis of the sums": (
            "wide_x_BI @ wide_w_OI.T → (wide_x_BI @ wide_w_OI.T).to(torch.int8).int()",
            "wide_x_BI @ wide_w_OI.T - x_zero * wide_w_OI.sum(1) → (wide_x_BI @ wide_w_OI.T).to(torch.int8).int()",
        ),
        "you take the zero-point away once": "* wide_w_OI.sum(1) →",
        "the correction is added": "- x_zero → + x_zero",
        "the correction adds up the inputs": "wide_w_OI.sum(1) → wide_x_BI.sum(1, keepdim=True)",
        "the scales of the weights are left out": "x_scale * w_scale_O1.T → x_scale",
        "the scale of x is left out": "x_scale * w_scale_O1.T → w_scale_O1.T",
        "no scale is applied": "x_scale * w_scale_O1.T * sums_BO → sums_BO.float()",
        "you divide by w_scale": "* w_scale_O1.T → / w_scale_O1.T",
        "the sum of the weights runs over in int8": "wide_w_OI.sum(1) → w_q_OI.sum(1).to(torch.int8)",
        "the correction counts the inputs": "wide_w_OI.sum(1) → w_q_OI.shape[1]",
        "the correction adds up all weights of the layer": "wide_w_OI.sum(1) → wide_w_OI.sum()",
        "you round the output": "x_scale * w_scale_O1.T * sums_BO → (x_scale * w_scale_O1.T * sums_BO).round()",
        "x_q − x_zero runs over in int8": "x_q_BI.int() → (x_q_BI - x_zero).int(); - x_zero * wide_w_OI.sum(1) →",
    },
    repairs={
        "w_scale is not transposed": lambda answer: lambda x_q, s, z, w_q, w_s: answer(x_q, s, z, w_q, w_s.T),
        "w_q is not transposed": lambda answer: lambda x_q, s, z, w_q, w_s: answer(x_q, s, z, w_q.T, w_s),
        "w_q is not transposed in the product": _undone(_product_transposed),
        "the correction sums over the outputs": _undone(_sum_along(0, keepdim=False)),
        "the sums of the rows stay a column": _undone(_sum_along(1, keepdim=True)),
    },
    then=_check_products,
)
