"""Example links of several labs, and least squares for measured times. Assumptions say so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlojz.hardware.links import Link

Pair = tuple[float, float]


NVLINK = Link(5e-6, 300e9)
"""A100: 600 GB/s in both directions together (NVIDIA A100 datasheet), so 300 each way; the latency is an assumption."""
NETWORK = Link(10e-6, 25e9)
"""The network of labs 03 and 04: 200 Gbit/s, shared by the GPUs of a node or not; here each has it to itself."""


def relative_line(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    """The line a + b n that minimises the sum of ((a + b n − t) / t)²: every measurement weighs the same.

    Source: weighted least squares with weights 1 / t², by the normal equations of two unknowns.
    """
    return weighted_line(message_bytes, seconds, [1 / second**2 for second in seconds])


def weighted_line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> Pair:
    """Intercept and slope that minimise the weighted sum of squared residuals."""
    total = math.fsum(weights)
    x_mean = math.fsum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = math.fsum(w * y for w, y in zip(weights, ys, strict=True)) / total
    covariance = math.fsum(w * (x - x_mean) * (y - y_mean) for w, x, y in zip(weights, xs, ys, strict=True))
    variance = math.fsum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = covariance / variance
    return y_mean - slope * x_mean, slope
