"""Experts that are shared out: what a rank holds of them, and what its ranks send each other.

Layer 3. Invariant: equal to what the probe counts. With N tokens of a rank's micro-batch, E experts, k choices and
factor f, an expert's buffer has C = ⌈f·k·N/E⌉ rows of D numbers; each all-to-all carries the E·C·D numbers of all
buffers, of which the share of the rank's own experts, 1/ep, stays.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), for the two all-to-alls of a mixture's forward pass; the
backward pass of each is another (`dlojz.moe.exchange`).
"""

from __future__ import annotations

from dataclasses import replace

from dlojz import models
from dlojz.config import RunConfig
from dlojz.footprint import Collective, Traffic
from dlojz.layout import Layout
from dlojz.layout_experts import routing_of
from dlojz.moe.routing import all_to_all_bytes
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES, HALF_BYTES
from dlojz.units import MEBIBYTE

FORWARD_EXCHANGES = 2
"""Of a mixture: dispatch and combine; the backward pass has as many."""
BUCKET_BYTES = 25 * MEBIBYTE
"""A bucket of the engine by hand is closed once it holds so much, where nothing is said (`dlojz.data_parallel`)."""


def share_experts(shapes: ModelShapes, ep: int) -> ModelShapes:
    """What one of `ep` ranks holds: of each expert's parameter its block along the first dimension, the rest whole."""
    parameters = tuple(
        replace(one, shape=(one.shape[0] // ep, *one.shape[1:])) if one.is_expert else one for one in shapes.parameters
    )
    return replace(shapes, parameters=parameters)


def mixtures_of(shapes: ModelShapes) -> int:
    """Mixtures of a model."""
    return len({one.module for one in shapes.parameters if one.is_expert})


def exchange_bytes(config: RunConfig) -> int:
    """Bytes of one all-to-all of one mixture, for one micro-batch: the whole buffer, in the type computed in."""
    routing = routing_of(config)
    if routing is None:
        return 0
    width: int = getattr(models.spec(config.model).size, "width")  # noqa: B009 - of the models that have experts
    tokens = config.layout.micro_batch * (config.sequence_length or 1)
    each = FP32_BYTES if config.precision == "fp32" else HALF_BYTES
    return all_to_all_bytes(experts=routing.experts, capacity=routing.capacity(tokens), width=width, element_bytes=each)


def exchanges(config: RunConfig, shapes: ModelShapes) -> int:
    """All-to-alls of one step: two per mixture, pass and micro-batch; a block that is computed again sends again."""
    passes = 2 if config.layout.checkpointing == "none" else 3
    return FORWARD_EXCHANGES * passes * mixtures_of(shapes) * config.layout.micro_batches


def expert_buckets(config: RunConfig, shapes: ModelShapes) -> list[tuple[bool, list[ParameterShape]]]:
    """The buckets of gradients that the engine by hand fills, and whether each is of experts.

    Args:
        config: the run.
        shapes: of what the rank holds.
    """
    given_mib = config.layout.bucket_mib
    limit_bytes = BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE)
    found: list[tuple[bool, list[ParameterShape]]] = []
    for experts in (False, True):
        buckets: list[list[ParameterShape]] = []
        for parameter in reversed(shapes.parameters):
            if parameter.is_expert != experts:
                continue
            if not buckets or FP32_BYTES * sum(one.numel for one in buckets[-1]) >= limit_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
        found += [(experts, bucket) for bucket in buckets]
    return found


def gradient_traffic(config: RunConfig, shapes: ModelShapes, most_elements: int | None = None) -> list[Traffic]:
    """The gradients of everything but experts over dp ranks, those of experts over the dp/ep that hold the same.

    Args:
        config: the run.
        shapes: of what the rank holds.
        most_elements: that are reduced in one call; by default a bucket of the engine by hand.
    """
    layout: Layout = config.layout
    found: list[Traffic] = []
    buckets = expert_buckets(config, shapes)
    for experts, group, size in ((False, "dp", layout.dp), (True, "edp", layout.dp // layout.ep)):
        own = [bucket for kind, bucket in buckets if kind == experts]
        elements = sum(parameter.numel for bucket in own for parameter in bucket)
        if size > 1 and own:
            calls = len(own) if most_elements is None else -(-elements // most_elements)
            found.append(_traffic("all_reduce", group, size, calls, FP32_BYTES * elements))
    return found


def exchange_traffic(config: RunConfig, shapes: ModelShapes) -> list[Traffic]:
    """The all-to-alls of all mixtures."""
    calls = exchanges(config, shapes)
    return [_traffic("all_to_all", "ep", config.layout.ep, calls, calls * exchange_bytes(config))]


def _traffic(collective: Collective, group: str, size: int, count: int, message_bytes: int) -> Traffic:
    return Traffic(collective=collective, group=group, group_size=size, count=count, message_bytes=message_bytes)
