"""A calibration from a machine's own measurements, in a minute: products, passes over memory, launches.

Layer 3. Invariant: each parameter is the median of what its own measurements say, so that one disturbed measurement
does not count; nothing is fitted to the time of a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlojz.hardware import Gpu, Precision
from dlojz.predict.time.calibration import BOUNDS, Calibration
from dlojz.predict.time.operators import Product, product_s
from dlojz.schema import LabError
from dlojz.text import say


def from_measurements(
    name: str,
    gpu: Gpu,
    *,
    products: Sequence[tuple[Product, float]],
    passes: Sequence[tuple[float, float]],
    launches_s: Sequence[float] = (),
    precision: Precision = "fp32",
    start: Calibration | None = None,
) -> Calibration:
    """The calibration that a machine's measurements come to.

    Args:
        name: of the profile.
        gpu: whose peaks the efficiencies refer to; for this machine its own best product and pass.
        products: products of matrices and the seconds of each.
        passes: bytes read and written, and the seconds.
        launches_s: seconds of an operation on next to nothing.
        precision: of the products.
        start: whose other parameters are kept; by default those of `Calibration`.

    Raises:
        LabError: without a product or a pass, or if a time is not above 0.
    """
    given: dict[str, list[float]] = {"products": [one[1] for one in products], "passes": [one[1] for one in passes]}
    for what, seconds_of in given.items():
        if not seconds_of or min(seconds_of) <= 0:
            raise LabError(
                say(
                    en=f"{what} needs measurements, each longer than 0 s, but {seconds_of[:3]} was received.",
                    fr=f"{what} demande des mesures, chacune de plus de 0 s, mais {seconds_of[:3]} a été reçu.",
                )
            )
    perfect = replace(
        start or Calibration(name), name=name, product_efficiency=BOUNDS["product_efficiency"].high,
        attention_efficiency=BOUNDS["attention_efficiency"].high, memory_efficiency=BOUNDS["memory_efficiency"].high,
        product_start=0.0, unaligned=1.0,
    )  # fmt: skip
    moved = statistics.median(num_bytes / seconds for num_bytes, seconds in passes) / gpu.memory_bytes_per_s

    def speed(attention: bool) -> float | None:
        shares = [
            product_s(product, gpu, perfect, precision) / seconds
            for product, seconds in products
            if product.attention == attention
        ]
        reach = perfect.attention_efficiency if attention else perfect.product_efficiency
        return statistics.median(shares) * reach if shares else None

    products_speed, attention_speed = speed(False), speed(True)
    found = {
        "product_efficiency": products_speed or attention_speed or 1.0,
        "attention_efficiency": attention_speed or products_speed or 1.0,
        "memory_efficiency": moved,
    }
    if launches_s:
        found["launch_s"] = statistics.median(launches_s)
    within: dict[str, Any] = {key: min(max(value, BOUNDS[key].low), BOUNDS[key].high) for key, value in found.items()}
    return replace(perfect, **within)
