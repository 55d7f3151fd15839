"""The outer level: which layers make a pipeline stage, and which submesh runs it.

A step of B micro-batches on stages that take t₁ … t_S for one of them lasts T = Σ t_i + (B − 1)·max t_j. The maximum
couples all stages. So it is fixed: for each t_max that could be the slowest stage, dynamic programming finds the least
sum of stages that are none slower,

    F(s, k, d) = min over i and submesh n × m of t(k … i, n × m, s) + F(s − 1, i + 1, d − n·m)

with s stages left, layers k and following, d devices left. T*(t_max) = min over s of F(s, 1, N·M) + (B − 1)·t_max, and
the smallest of these is T*. The s-th stage from the end keeps s micro-batches in flight (1F1B), which decides what
fits.

Layer 4. Invariant: the plan uses all devices and every layer once; pruned or not, the optimum is the same. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equations 2 to 5.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from dlojz.plan.alpa.pipeline_plan import PipelinePlan
from dlojz.plan.alpa.stage_table import Array, StageOption, StageOptions, StageTable
from dlojz.plan.alpa.submesh import submeshes
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes

__all__ = ["StageOption", "StageOptions", "pipeline"]


def pipeline(  # noqa: PLR0913 - a cluster, a step, and how to search
    options: StageOptions,
    layers: int,
    micro_batches: int,
    nodes: int = 1,
    gpus_per_node: int = 1,
    *,
    memory_bytes: float = math.inf,
    stages: int | None = None,
    epsilon: float = 0.0,
    prune: bool = True,
) -> PipelinePlan:
    """Cut layers into stages and give each a submesh, so that a step is shortest.

    Args:
        options: costs of a stage (see `StageOptions`).
        layers: K, at least 1.
        micro_batches: B of a step, at least 1.
        nodes: N.
        gpus_per_node: M, a power of two.
        memory_bytes: of one device.
        stages: how many, if that is not free; at most `layers`.
        epsilon: of candidates of t_max nearer than this to each other only the largest is tried (Alpa: 1e-6 s); the
            plan is then at most B·ε from the optimum.
        prune: leave out candidates of t_max that cannot be better than the best plan known.

    Returns:
        The plan. O(K³ · submeshes · N·M) per candidate, of which there are at most K² · submeshes.

    Raises:
        LabError: no layer, no micro-batch, more stages than layers or devices, or a model that fits nowhere; the
            sentence says how much memory is missing.
    """
    _check(layers, micro_batches, stages, nodes * gpus_per_node)
    shapes = submeshes(nodes, gpus_per_node)
    table = StageTable(options, layers, micro_batches, shapes, nodes * gpus_per_node, stages)
    times = table.stage_times(memory_bytes)
    candidates = np.unique(times[np.isfinite(times)])
    num_candidates = len(candidates)
    if not num_candidates or math.isinf(table.least_sum(times, math.inf)[0]):
        raise LabError(_nothing_fits(table, memory_bytes))
    candidates = _spread(candidates[candidates >= table.least_max(times)] if prune else candidates, epsilon)
    t_max, tried = _search(table, times, candidates) if prune else _try_all(table, times, candidates)
    found = table.plan(times, t_max)
    return PipelinePlan(tuple(found), micro_batches, nodes, gpus_per_node, memory_bytes, tried, num_candidates)


def _spread(candidates: Array, epsilon: float) -> Array:
    """Of candidates that lie within ε of each other, the largest: what is feasible for the others is for it."""
    kept: list[float] = []
    start = math.inf
    for candidate in candidates[::-1]:
        if start - candidate > max(epsilon, 1e-12 * start) or not kept:  # sums that differ by rounding are one
            start = float(candidate)
            kept.append(start)
    return np.array(kept[::-1])


def _try_all(table: StageTable, times: Array, candidates: Array) -> tuple[float, int]:
    totals = [table.total(times, float(t_max)) for t_max in candidates]
    return float(candidates[int(np.argmin(totals))]), len(totals)


def _search(table: StageTable, times: Array, candidates: Array) -> tuple[float, int]:
    """The best t_max and how many were tried.

    As t_max grows, the sum of stages falls: between two candidates a < b no plan beats F(b) + (B − 1)·a. The interval
    with the lowest such bound is halved, until no bound is below the best plan. (The paper walks upwards and stops at
    B·t_max ≥ best, which needs many more tries where all times differ.)
    """
    pace = table.micro_batches - 1

    def tried_at(index: int) -> tuple[float, float]:
        total = table.total(times, float(candidates[index]))
        return total, total - pace * float(candidates[index])

    end = len(candidates) - 1
    best, least_sum = tried_at(end)
    best_index, tried = end, 1
    queue = [(least_sum + pace * float(candidates[0]), 0, end - 1, least_sum)]
    while queue:
        bound, low, high, after = heapq.heappop(queue)
        if bound >= best:
            break
        if low > high:
            continue
        middle = (low + high) // 2
        total, own = tried_at(middle)
        tried += 1
        if total < best:
            best, best_index = total, middle
        if math.isfinite(own) and low < middle:
            heapq.heappush(queue, (own + pace * float(candidates[low]), low, middle - 1, own))
        if middle < high:
            heapq.heappush(queue, (after + pace * float(candidates[middle + 1]), middle + 1, high, after))
    return float(candidates[best_index]), tried


def _nothing_fits(table: StageTable, memory_bytes: float) -> str:
    needed = table.smallest_memory()
    if math.isinf(needed):
        return say(
            en=f"no cut of {table.layers} layers uses all {table.devices} devices: use fewer devices, or give costs "
            "for larger submeshes.",
            fr=f"aucun découpage de {table.layers} couches n’utilise les {table.devices} périphériques : prenez moins "
            "de périphériques, ou donnez les coûts de sous-maillages plus grands.",
        )
    total, has, lacking = format_bytes(needed), format_bytes(memory_bytes), format_bytes(needed - memory_bytes)
    return say(
        en=f"no cut of {table.layers} layers on {table.devices} devices fits: a device needs at least {total} and has "
        f"{has}, so {lacking} are missing: use more devices, a smaller micro-batch, or recomputation.",
        fr=f"aucun découpage de {table.layers} couches sur {table.devices} périphériques ne tient : un périphérique a "
        f"besoin d’au moins {total} et en a {has}, il manque donc {lacking} : prenez plus de périphériques, un "
        "micro-batch plus petit, ou le recalcul.",
    )


def _check(layers: int, micro_batches: int, stages: int | None, devices: int) -> None:
    if layers < 1 or micro_batches < 1:
        raise LabError(
            say(
                en=f"a pipeline has at least one layer and one micro-batch, but layers={layers!r} and "
                f"micro_batches={micro_batches!r} were received: use 1 or more of each.",
                fr=f"un pipeline a au moins une couche et un micro-batch, mais layers={layers!r} et "
                f"micro_batches={micro_batches!r} ont été reçus : prenez-en 1 ou plus.",
            )
        )
    most = min(layers, max(devices, 1))
    if stages is not None and not 1 <= stages <= most:
        raise LabError(
            say(
                en=f"{layers} layers on {devices} devices make 1 to {most} stages, but stages={stages} was received: "
                f"use {most} at most.",
                fr=f"{layers} couches sur {devices} périphériques font de 1 à {most} étages, mais stages={stages} a "
                f"été reçu : prenez {most} au plus.",
            )
        )
