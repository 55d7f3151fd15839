"""What torch's hooks make of DDP's buckets: messages, and what PowerSGD keeps.

Layer 3. Invariant: equal, to the byte, to what the probe counts once PowerSGD has begun.

With r the rank, a gradient of n rows and m columns (what follows the first dimension, end to end) is sent as P (n × r)
and Q (m × r), if that is less than half of it; else as it is, in fp32, with the others of its bucket.

Source: torch 2.13, `distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`, `_should_compress` and `powerSGD_hook`;
Vogels et al. 2019 (arXiv 1905.13727), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlojz.config import RunConfig
from dlojz.footprint import Traffic
from dlojz.predict.communication import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES, HALF_BYTES
from dlojz.units import MEBIBYTE

LEAST_RATE = 2
"""A gradient is sent as two matrices if these are smaller by more than this factor (`min_compression_rate`)."""
MESSAGES = 3
"""All-reduces of one bucket, even of nothing: what is not compressed, all P, all Q."""


@dataclass(frozen=True)
class Bucket:
    """One of DDP's buckets as PowerSGD sends it; in elements.

    Args:
        whole: all its gradients.
        plain: those that are sent as they are.
        p: all P together.
        q: all Q together.
    """

    whole: int
    plain: int
    p: int
    q: int

    @property
    def sent(self) -> int:
        """Elements of its three messages."""
        return self.plain + self.p + self.q


def buckets(config: RunConfig, shapes: ModelShapes) -> tuple[tuple[ParameterShape, ...], ...]:
    """The parameters of each of DDP's buckets, in the order in which they leave, after the first step."""
    from dlojz.predict.order import ready_order  # loads torch

    given_mib = config.layout.bucket_mib
    limit_bytes, later_bytes = DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES
    if given_mib is not None:
        limit_bytes = later_bytes = int(given_mib * MEBIBYTE)
    found: list[list[ParameterShape]] = [[]]
    for number in ready_order(config):
        if FP32_BYTES * sum(parameter.numel for parameter in found[-1]) >= limit_bytes:
            limit_bytes = later_bytes
            found.append([])
        found[-1].append(shapes.parameters[number])
    return tuple(tuple(bucket) for bucket in found)


def compressed(bucket: tuple[ParameterShape, ...], rank: int) -> Bucket:
    """A bucket as PowerSGD of this rank sends it."""
    plain = p = q = 0
    for parameter in bucket:
        rows = parameter.shape[0]
        columns = parameter.numel // rows
        thin = min(rows, columns, rank)
        if (rows + columns) * thin * LEAST_RATE < parameter.numel:
            p, q = p + rows * thin, q + columns * thin
        else:
            plain += parameter.numel
    return Bucket(sum(parameter.numel for parameter in bucket), plain, p, q)


def powersgd_buckets(config: RunConfig, shapes: ModelShapes) -> tuple[Bucket, ...]:
    """All buckets as PowerSGD sends them."""
    return tuple(compressed(bucket, config.layout.powersgd_rank) for bucket in buckets(config, shapes))


def hook_traffic(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """What DDP hands to the collectives of a step through the run's hook; PowerSGD's first steps in full aside."""
    if config.layout.gradient_compression == "powersgd":
        found = powersgd_buckets(config, shapes)
        count, message_bytes = MESSAGES * len(found), FP32_BYTES * sum(bucket.sent for bucket in found)
    else:
        count, message_bytes = len(buckets(config, shapes)), HALF_BYTES * shapes.num_parameters
    dp = config.layout.dp
    return [Traffic(collective="all_reduce", group="dp", group_size=dp, count=count, message_bytes=message_bytes)]


def kept_bytes(config: RunConfig, shapes: ModelShapes) -> int:
    """Errors, P and Q: what PowerSGD keeps from step to step; 0 without it."""
    if config.layout.gradient_compression != "powersgd":
        return 0
    return FP32_BYTES * sum(bucket.whole + bucket.p + bucket.q for bucket in powersgd_buckets(config, shapes))


def renewed_bytes(config: RunConfig, shapes: ModelShapes) -> int:
    """The errors of the largest bucket, which are there twice for a moment: the new ones beside the old."""
    if config.layout.gradient_compression != "powersgd":
        return 0
    return FP32_BYTES * max(bucket.whole for bucket in powersgd_buckets(config, shapes))
