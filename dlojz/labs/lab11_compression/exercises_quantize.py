"""Exercises of lab 11 on quantization: affine activations, rows of weights, straight-through, a layer in int8.

Answers are compared in the numbers that a file would keep, int8 and scales, with inputs on both sides of the range. No
weight lies within half a step outside of the range, where the two usual conventions of the estimator differ. A
layer in whole numbers must multiply 8-bit numbers and add them up in 32 bits; a mistake in a shape raises an error in
torch, and is named where the answer is right without it.

Shape suffixes: B rows, O outputs, I inputs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlojz.base.language import say
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import Answer, expect_int8, expect_several, expect_tensor, gradient_of, normal

TEXTS = Texts(__file__)

Affine = tuple[Tensor, float, int]
"""Whole numbers in int8, of the shape of x; scale; zero-point."""


def quantize_affine(x: Tensor, low: float, high: float, bits: int) -> Affine:
    """Quantize affinely: x ≈ scale × (q − zero_point), q from −2^(bits−1) to 2^(bits−1) − 1.

    Args:
        x: any shape; what lies outside of the range is clamped to it.
        low: lower end of the range, at most 0.
        high: upper end, at least 0.
        bits: from 2 to 8.

    Source: Jacob et al. 2018 (arXiv 1712.05877), section 2.1: r = S (q − Z), with Z a quantized value.
    """
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = (high - low) / (2**bits - 1)
    # low becomes the lowest number; rounded, since x = 0 must be exact.
    zero_point = lowest - round(low / scale)
    return ((x / scale).round() + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


def _affine_cases() -> Iterator[tuple[Any, ...]]:
    for seed, low, high, bits in ((1, -0.37, 2.9, 8), (2, -1.9, 0.61, 4), (3, -0.2, 4.3, 5)):
        # A standard deviation of 0.6 ranges about its middle: on both sides some values lie outside.
        yield (high - low) * 0.6 * normal(seed, 6, 7) + (high + low) / 2, low, high, bits


def _affine_trial(answer: Callable[..., Any], x: Tensor, low: float, high: float, bits: int) -> Tensor:
    """The whole numbers, the scale divided by the right one, the zero-point."""
    q, scale, zero_point = expect_several(answer(x.clone(), low, high, bits), "(q, scale, zero_point)", 3)
    q = expect_int8(q, "q", x.shape)
    try:
        pair = [float(scale) / quantize_affine(x, low, high, bits)[1], float(zero_point)]
    except (TypeError, ValueError, RuntimeError):
        raise TEXTS.wrong("affine", "not one number each") from None
    return torch.cat([q.flatten(), torch.tensor(pair, dtype=torch.float64)])


AFFINE = TEXTS.exercise(
    "affine",
    quantize_affine,
    trial=_affine_trial,
    cases=_affine_cases,
)


Quantized = tuple[Tensor, Tensor]
"""Whole numbers (O, I) in int8, scales (O, 1)."""


def quantize_rows(weight_OI: Tensor, bits: int) -> Quantized:
    """Quantize symmetrically per output: the largest magnitude of a row becomes 2^(bits − 1) − 1.

    Args:
        weight_OI: no row of which is zero.
        bits: from 2 to 8.

    Source: Gholami et al. 2021 (arXiv 2103.13630): symmetric quantization, restricted range, channelwise.
    """
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    # No clamp: by this scale no magnitude exceeds 2^(bits − 1) − 1.
    return (weight_OI / scale_O1).round().to(torch.int8), scale_O1


def _rows_cases() -> Iterator[tuple[Any, ...]]:
    """Rows of very different sizes, none of them centred."""
    for seed, outputs, inputs, bits in ((1, 4, 9, 8), (2, 7, 5, 4), (3, 5, 12, 3)):
        # From 0.01 to 10: with one scale for all, the smallest rows would be rounded to 0.
        sizes_O1 = 10 ** torch.linspace(-2, 1, outputs).unsqueeze(1)
        yield sizes_O1 * (normal(seed, outputs, inputs) - 0.4), bits


def _rows_trial(answer: Callable[..., Any], weight_OI: Tensor, bits: int) -> Tensor:
    """The whole numbers, then the scales, each divided by the right one."""
    q_OI, scale_O1 = expect_several(answer(weight_OI.clone(), bits), "(q, scale)", 2)
    q_OI = expect_int8(q_OI, "q", weight_OI.shape)
    wanted_O1 = quantize_rows(weight_OI, bits)[1]
    scale_O1 = expect_tensor(scale_O1, "scale", wanted_O1.shape).double()
    return torch.cat([q_OI.flatten(), (scale_O1 / wanted_O1).flatten()])


def _of_scale(edit: str) -> tuple[str, str]:
    """A wrong scale, with whole numbers clamped or not; int64 wraps around in int8, a float beyond it has no number."""
    clamped = ".round() → .round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)"
    return f"{edit}; .to(torch.int8) → .to(torch.int64).to(torch.int8)", f"{edit}; {clamped}"


_LARGEST = "weight_OI.abs().amax(1, keepdim=True)"
ROWS = TEXTS.exercise(
    "rows",
    quantize_rows,
    trial=_rows_trial,
    cases=_rows_cases,
    mistakes={
        "you use one scale for the whole matrix": f"{_LARGEST} → weight_OI.abs().max().expand(len(weight_OI), 1)",
        "you take the largest weight of a row": _of_scale(".abs() →"),
        "you divide by 2^(bits − 1)": _of_scale("(2 ** (bits - 1) - 1) → 2 ** (bits - 1)"),
        "you divide by 2^bits − 1, the number of steps": _of_scale("2 ** (bits - 1) - 1 → 2**bits - 1"),
        "you divide by 127 whatever bits is": _of_scale("(2 ** (bits - 1) - 1) → 127"),
        "your scale does not come from the largest magnitude": tuple(
            edits
            for size in (
                "weight_OI.abs().mean(1, keepdim=True)",
                "weight_OI.abs().sum(1, keepdim=True)",
                "(weight_OI.amax(1, keepdim=True) - weight_OI.amin(1, keepdim=True))",
                "weight_OI.std(1, keepdim=True)",
                "weight_OI.norm(dim=1, keepdim=True)",
            )
            for edits in _of_scale(f"{_LARGEST} → {size}")
        ),
        "your scale comes from the smallest and the largest": _of_scale(
            f"{_LARGEST} → (weight_OI.amax(1, keepdim=True) - weight_OI.amin(1, keepdim=True)); "
            "2 ** (bits - 1) - 1 → 2**bits - 1"
        ),
        "you divide by 2^bits": _of_scale("(2 ** (bits - 1) - 1) → 2**bits"),
        "you divide by the number of bits": _of_scale("(2 ** (bits - 1) - 1) → bits"),
    },
)


def fake_quantize(weight_OI: Tensor, scale_O1: Tensor, bits: int) -> Tensor:
    """Quantize weights and convert them back; the gradient passes except where they are clamped.

    Source: Bengio et al. 2013 (arXiv 1308.3432) for the estimator; Jacob et al. 2018 (arXiv 1712.05877) for training.
    """
    steps_OI = weight_OI / scale_O1
    # Forward this is steps_OI.round(); backward the difference is a constant, and the derivative 1.
    straight_OI = steps_OI + (steps_OI.round() - steps_OI).detach()
    return _clamped(straight_OI, bits) * scale_O1


def _clamped(q: Tensor, bits: int) -> Tensor:
    high = 2 ** (bits - 1) - 1
    return q.clamp(-high, high)


_VALUES, _GRADIENT = "values", "gradient"


def _straight_cases() -> Iterator[tuple[Any, ...]]:
    for seed, outputs, inputs, bits in ((1, 4, 10, 4), (2, 5, 8, 3)):
        scale_O1 = 0.1 + 0.5 * torch.rand(outputs, 1, generator=torch.Generator().manual_seed(seed))
        high = 2 ** (bits - 1) - 1
        steps_OI = high * 0.8 * normal(seed + 10, outputs, inputs)
        # These go one step outwards: so near the end, clamping before or after the rounding gives other gradients.
        between_OI = (steps_OI.abs() > high) & (steps_OI.abs() < high + 0.6)
        yield (steps_OI + steps_OI.sign() * between_OI) * scale_O1, scale_O1, bits, normal(seed + 20, outputs, inputs)


def _straight_trial(
    answer: Callable[..., Any], weight_OI: Tensor, scale_O1: Tensor, bits: int, weighting_OI: Tensor
) -> dict[str, Tensor]:
    """The values in steps, then the gradient of their weighted sum; what gets no gradient counts as zero."""
    leaf_OI = weight_OI.clone().requires_grad_()
    value = expect_tensor(answer(leaf_OI, scale_O1, bits), say(en="The result", fr="Le résultat"), weight_OI.shape)
    if not value.requires_grad:
        raise TEXTS.wrong("straight-through", "no link to the weights")
    # Weighted at random: by a gradient of ones, a wrong function of it may go unseen.
    gradient = gradient_of((value * weighting_OI).sum(), leaf_OI)
    gradient = torch.zeros_like(leaf_OI) if gradient is None else gradient
    return {_VALUES: (value.detach() / scale_O1).double(), _GRADIENT: gradient.double()}


def _rounded_gradient(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    straight = (weight / scale).clone()
    if straight.requires_grad:
        # What arrives at the rounding has been multiplied by the scale, and is divided by it afterwards.
        straight.register_hook(lambda gradient: gradient.round())
    return _clamped(straight + (straight.round() - straight).detach(), bits) * scale


_STRAIGHT = "steps_OI + (steps_OI.round() - steps_OI).detach()"
_RESULT = "_clamped(straight_OI, bits) * scale_O1"

STRAIGHT_THROUGH = TEXTS.exercise(
    "straight-through",
    fake_quantize,
    trial=_straight_trial,
    cases=_straight_cases,
    labels={
        _VALUES: Said("the values", "les valeurs"),
        _GRADIENT: Said("the gradient of the weights", "le gradient des poids"),
    },
    mistakes={
        "no gradient passes the rounding": f"{_STRAIGHT} → steps_OI.round()",
        "clamped weights get a gradient": f"{_RESULT} → weight_OI + ({_RESULT} - weight_OI).detach()",
        "the gradient is divided by the scale": (
            f"{_RESULT} → (q_OI := _clamped(straight_OI, bits)) + (q_OI * scale_O1 - q_OI).detach()"
        ),
        "nothing is rounded": f"{_STRAIGHT} → steps_OI",
        "backward doubles the gradient": f"{_RESULT} → 2 * (w_OI := {_RESULT}) - w_OI.detach()",
        "backward rounds the gradient": _rounded_gradient,
        "you round down": f"{_STRAIGHT} → steps_OI.floor()",
        "backward multiplies by the rounded value": (
            f"{_STRAIGHT} → steps_OI * (r_OI := steps_OI.detach().round()) + (r_OI - steps_OI * r_OI).detach()"
        ),
        "other ends of the clamp": tuple(
            f"_clamped(straight_OI, bits) → straight_OI.clamp({ends})"
            for ends in (
                "-(2 ** (bits - 1)), 2 ** (bits - 1) - 1",
                "0, 2 ** (bits - 1) - 1",
                "1 - 2**bits, 2**bits - 1",
                "-(2 ** (bits - 1)), 2 ** (bits - 1)",
                "1 - 2 ** (bits - 1), 2 ** (bits - 1)",
            )
        ),
    },
)


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
    repairs={
        "w_scale is not transposed": lambda answer: lambda x_q, s, z, w_q, w_s: answer(x_q, s, z, w_q, w_s.T),
        "w_q is not transposed": lambda answer: lambda x_q, s, z, w_q, w_s: answer(x_q, s, z, w_q.T, w_s),
        "w_q is not transposed in the product": _undone(_product_transposed),
        "the correction sums over the outputs": _undone(_sum_along(0, keepdim=False)),
        "the sums of the rows stay a column": _undone(_sum_along(1, keepdim=True)),
    },
    then=_check_products,
)
