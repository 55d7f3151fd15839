"""What a chain of operations takes beyond the sum of its parts: what is kept for backward, memory that is asked for
anew, caches that others have filled.

Layer 3. Invariant: the chain is no model of the lab but a perceptron, and each of its parts is among what is timed
alone: products, a norm and a GELU of its very sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dlojz.predict.time.measuring import Timed

ROWS, WIDTH, WIDER, LAYERS = 2048, 128, 4, 4
CHAIN: Final = Timed("chain", (ROWS, WIDTH, LAYERS), 0.0, f"{LAYERS} × (norm, linear, GELU, linear)")


def chain() -> Callable[[], Any]:
    """A step of the chain: forward and backward, with gradients made anew."""
    import torch
    from torch import nn

    layers = [
        part
        for _ in range(LAYERS)
        for part in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDER * WIDTH), nn.GELU(), nn.Linear(WIDER * WIDTH, WIDTH))
    ]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH, requires_grad=True)

    def call() -> None:
        model(x).mean().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return call


def chained(timings: Sequence[Timed]) -> float | None:
    """The measured chain over the sum of its parts as they were measured alone; None where one of them was not.

    A product has two more in its backward; a norm and a GELU were timed forward and backward.
    """
    whole = [one.seconds for one in timings if one.what == "chain"]
    wide, narrow = (ROWS, WIDER * WIDTH, WIDTH, 1), (ROWS, WIDTH, WIDER * WIDTH, 1)
    products = [
        one.seconds
        for one in timings
        if one.what == "product" and one.size in (wide, narrow) and one.precision == "fp32"
    ]
    elements = {f"norm {ROWS * WIDTH}", f"gelu {ROWS * WIDER * WIDTH}"}
    passes = [one.seconds for one in timings if one.what == "pass" and one.label in elements]
    if not whole or len(products) != 2 or len(passes) != 2:
        return None
    return whole[0] / (LAYERS * (3 * sum(products) + sum(passes)))
