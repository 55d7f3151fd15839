"""Activation budget: keep, recompute or offload each block's activations, in the least time that a byte budget allows.

The peak of a step is a maximum over moments. A moment is here the fullest one of a pass over a block j, in which the
rank holds

    own[pass, j, choice of j] + sum over the blocks i before j of held[pass, i, choice of i]

so a budget is one constraint per moment, linear in the choices, and the least time an integer programme. Its figures
come from three forecasts (all blocks kept, recomputed, offloaded), and the blocks' inputs belong to those who read
them. What two neighbours both save is only known to the forecast of the answer; where that exceeds the budget, the
programme is solved again with so much less.

Seconds are those of recomputed operations at a share of the device's peak, of the activations that they write and read
again, and of copies: on a GPU the way to the host runs beside the computation, the way back does not
(`dlojz.by_hand.activation_offload`).

Source: Jain et al. 2020, "Checkmate" (arXiv 1910.02653), §4, for recomputation as an integer programme; Beaumont et al.
2021, "Efficient Combination of Rematerialization and Offloading for Training DNNs" (NeurIPS), for both together;
solver: `scipy.optimize.milp` (HiGHS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from dlojz import hardware
from dlojz.base.errors import LabError
from dlojz.base.language import MEBIBYTE, format_bytes, refusal
from dlojz.base.machine import c_output_discarded
from dlojz.config.fields import BLOCK_CHOICES
from dlojz.config.run_config import RunConfig
from dlojz.cost_model.step import HOST_LINK_BYTES_PER_S
from dlojz.hardware import Device
from dlojz.prediction.compute import recomputed_flops
from dlojz.prediction.engine_memory import Ledger
from dlojz.prediction.forecast import Forecast, forecast, replay_of
from dlojz.prediction.many_layouts import in_slots
from dlojz.prediction.model_trace import block_number, block_of
from dlojz.prediction.shapes import RankPart, model_shapes, num_blocks
from dlojz.prediction.trace import Allocation, MemoryTrace
from dlojz.results.footprint import Category

Reals = NDArray[np.float64]
PASSES: Final = ("forward", "backward")
KEEP, RECOMPUTE, OFFLOAD = range(len(BLOCK_CHOICES))
PEAK_SHARE: Final = 0.5
"""Share of a device's peak that recomputed blocks reach: 41.5 to 56.3 % are published for whole steps of large
transformers on A100 (Korthikanti et al. 2022, arXiv 2205.05198, table 5)."""
GAP: Final = 1e-3
"""Relative distance from the optimum at which the solver stops."""
TRIES: Final = 6
POINTS: Final = 12
"""Budgets of a curve, both ends included."""


class Speeds(NamedTuple):
    """Speeds by which a choice is timed: FLOP/s of recomputation, B/s of the device's memory, B/s of copies.

    `exposed` is the share of the copied bytes, out and back, that computation waits for.
    """

    flop_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    exposed: float

    @classmethod
    def of(cls, config: RunConfig, device: Device | None) -> Speeds:
        """Speeds of a GPU, or the placeholders of the CPU's file."""
        processor = device or hardware.gpu("cpu")
        if processor.is_of_size:
            raise refusal(
                en="a budget is met in the least time, but the speed of a GPU given by its size is not known: name a "
                "GPU, such as a100-40.",
                fr="un budget est tenu dans le moindre temps, mais la vitesse d’un GPU donné par sa taille n’est pas "
                "connue : nommez un GPU, par exemple a100-40.",
            )
        # FLOP/s; a precision that the device's file gives no peak for is timed as fp32.
        peaks = processor.peak_flops
        peak = PEAK_SHARE * peaks.get(config.compute_precision, peaks.get("fp32", min(peaks.values())))
        bandwidth = processor.memory_bytes_per_s
        # A copy within the CPU's memory reads and writes it.
        link, exposed = (bandwidth / 2, 1.0) if device is None else (HOST_LINK_BYTES_PER_S, 0.5)
        return cls(peak, bandwidth, link, exposed)


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Bytes and costs of every choice for every block of a model (choices in the order of `BLOCK_CHOICES`).

    Attributes:
        own: bytes in a pass over a block besides what the blocks before it hold, passes × (blocks and the loss, whose
            choice is the last block's) × choices.
        held: bytes that a block holds while a later one is computed, passes × blocks × choices.
        outside_bytes: most bytes outside of the passes, e.g. in the optimizer step.
        flops, moved_bytes, seconds: of a step, blocks × choices; bytes out and back.
        speeds: that give the seconds.
    """

    own: Reals
    held: Reals
    outside_bytes: float
    flops: Reals
    moved_bytes: Reals
    seconds: Reals
    speeds: Speeds

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return int(self.held.shape[1])

    def peak_bytes(self, choices: Any) -> Reals:
        """Peak of each row of choices (numbers, one per block)."""
        rows = np.atleast_2d(np.asarray(choices, int))
        blocks = np.arange(self.num_blocks)
        peaks = np.full(len(rows), self.outside_bytes)
        for pass_bytes, saved_bytes in zip(self.own, self.held, strict=True):
            # (rows, blocks + 1): bytes of all blocks before each one; the last column, before the loss, is all blocks.
            before = np.cumsum(np.pad(saved_bytes[blocks, rows], ((0, 0), (1, 0))), axis=1)
            # (rows, blocks + 1): the loss has no choice of its own, it follows the last block's.
            needs = np.concatenate([pass_bytes[blocks, rows], pass_bytes[-1, rows[:, -1:]]], axis=1)
            peaks = np.maximum(peaks, (before + needs).max(axis=1))
        return peaks

    def costs(self, choices: Sequence[int]) -> tuple[float, float, float]:
        """Seconds, FLOPs and moved bytes that a step takes more than with everything kept."""
        cells = np.arange(self.num_blocks), np.asarray(choices)
        return float(self.seconds[cells].sum()), float(self.flops[cells].sum()), float(self.moved_bytes[cells].sum())

    def constraints(self) -> Reals:
        """Bytes of every moment as rows over the variables (block, choice)."""
        rows = []
        for pass_bytes, saved_bytes in zip(self.own, self.held, strict=True):
            for number in range(self.num_blocks + 1):
                row = np.where(np.arange(self.num_blocks)[:, None] < number, saved_bytes, 0.0)  # blocks before this one
                # At the loss, number = blocks: the last block's variables.
                row[min(number, self.num_blocks - 1)] += pass_bytes[number]
                rows.append(row.ravel())
        return np.array(rows)  # (passes · (blocks + 1), blocks · choices)


def planned(config: RunConfig, choices: Sequence[int]) -> RunConfig:
    """The run with a choice for each block.

    Raises:
        LabError: if it already says what becomes of activations, or its blocks are not whole on each rank.
    """
    plan = ",".join(f"{BLOCK_CHOICES[choice]}:{len(list(run))}" for choice, run in groupby(choices))
    return RunConfig.of(**{**config.to_dict(), "layout": {**config.layout.to_dict(), "activation_plan": plan}})


def block_tables(config: RunConfig, rank: int = 0, device: Device | None = None) -> BlockTables:
    """Forecast a run with all blocks kept, recomputed and offloaded, and split the bytes of each moment by block.

    Args:
        config: the run, in which nothing is recomputed or offloaded.
        rank: one that it has.
        device: a GPU; by default the CPU.

    Raises:
        LabError: as `planned`, or as `forecast`.
    """
    count = num_blocks(model_shapes(config))
    uniform_configs = [planned(config, [choice] * count) for choice in range(len(BLOCK_CHOICES))]
    split = [
        _split(config if choice == KEEP else uniform_configs[choice], rank, device, count)
        for choice in range(len(uniform_configs))
    ]
    pass_bytes, saved_bytes = (np.stack([arrays[part] for arrays in split], axis=-1) for part in (0, 1))
    flops, moved_bytes, seconds = (np.zeros((count, len(BLOCK_CHOICES))) for _ in range(3))
    for block, number in recomputed_flops(uniform_configs[RECOMPUTE]).items():
        flops[block, RECOMPUTE] = number
    times = config.layout.micro_batches
    # Bytes of a step: out and back (2), once per micro-batch.
    moved_bytes[:, OFFLOAD] = 2.0 * times * split[OFFLOAD][3]
    speeds = Speeds.of(config, device)
    # What a recomputed block writes anew per step: all that it would have kept, less the input that it keeps.
    recomputed_bytes = np.maximum(saved_bytes[1, :, KEEP] - saved_bytes[1, :, RECOMPUTE], 0.0) * times
    # Each of these bytes is written, then read: 2.
    seconds[:, RECOMPUTE] = flops[:, RECOMPUTE] / speeds.flop_per_s + 2 * recomputed_bytes / speeds.memory_bytes_per_s
    seconds[:, OFFLOAD] = speeds.exposed * moved_bytes[:, OFFLOAD] / speeds.link_bytes_per_s
    return BlockTables(pass_bytes, saved_bytes, max(arrays[2] for arrays in split), flops, moved_bytes, seconds, speeds)


class _BlockLedger(Ledger):
    """Ledger that remembers the most bytes in each pass over a block, over the loss (`count`) and outside (-1)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.most: dict[tuple[str, int], int] = {}

    def _move(self, category: Category, block: str, delta_bytes: int) -> None:
        super()._move(category, block, delta_bytes)
        if delta_bytes > 0:  # only a growth can make a peak
            key = ("", -1)
            if self.moment in PASSES:
                # Modules outside of the blocks (embedding, last norm, head) count with the loss.
                number = block_number(self.detail[1])
                key = (self.moment, self.count if number is None else number)
            self.most[key] = max(self.most.get(key, 0), self._total_bytes)


def _split(config: RunConfig, rank: int, device: Device | None, count: int) -> tuple[Reals, Reals, float, Reals]:
    """Own and held bytes of every block in both passes, the most outside of them, and each block's on the host."""
    ledger = _BlockLedger(count)
    step = replay_of(RankPart(config, rank), device, ledger, in_slots)
    for _ in range(1 if device is None else 2):  # as the forecast for a GPU does
        step.run()
    saved_bytes, on_host = _held(step.trace, count)
    pass_bytes = np.zeros((len(PASSES), count + 1))
    for number, of_pass in enumerate(PASSES):
        # Held by the blocks before, without the block itself.
        before = np.cumsum(saved_bytes[number]) - saved_bytes[number]
        peaks = [ledger.most.get((of_pass, block), 0) for block in range(count)]
        # The peak counts the whole rank, states included; what earlier blocks hold is a term of its own.
        pass_bytes[number, :count] = np.maximum(np.array(peaks) - before, 0.0)
    # Both passes over the loss come while every block holds what it keeps for backward.
    loss = max(ledger.most.get((of_pass, count), 0) for of_pass in PASSES)
    pass_bytes[1, count] = max(0.0, loss - saved_bytes[1].sum())
    return pass_bytes, saved_bytes, float(ledger.most.get(("", -1), 0)), on_host


def _held(trace: MemoryTrace, count: int) -> tuple[Reals, Reals]:
    """Bytes that each block holds while later ones are computed forward, and until its backward; and on the host."""
    starts, live = np.zeros(count + 1), 0
    for event in trace.events:
        if not isinstance(event, Allocation):
            number = block_number(event.name)
            if event.what == "forward" and event.name == f"blocks.{number}":
                starts[number:] = live  # later ones too, until they begin themselves
        elif event.phase == "backward":
            break
        elif event.storage not in trace.on_host:
            live += event.delta_bytes
    saved_bytes, on_host = np.zeros((len(PASSES), count)), np.zeros(count)
    # The last block's difference is 0: after it comes the loss, which is taken together with backward.
    saved_bytes[0] = np.diff(starts)
    maker_of = {storage: block_number(name) for name, storage in trace.output_of.items() if name == block_of(name)}
    for storage in trace.kept:
        number = block_number(trace.module_of[storage])
        if number is None:
            continue
        if storage in trace.on_host:
            on_host[number] += trace.bytes_of[storage]
        else:  # what a block gives belongs to the one that reads it
            # `maker` is None: no block's output, so it stays with the block that computed it. So does the last block's
            # output: what reads it (norm, head) is no block.
            maker = maker_of.get(storage)
            saved_bytes[1, number if maker is None else min(maker + 1, count - 1)] += trace.bytes_of[storage]
    return saved_bytes, on_host


def cheapest(tables: BlockTables, budget_bytes: float) -> tuple[int, ...] | None:
    """Choose for each block what costs least time within a budget; None where no choice fits.

    The time is within `GAP` of the least.
    """
    if tables.outside_bytes > budget_bytes:
        return None
    # Of alike blocks the first are not kept: that lowers the most moments.
    count = tables.num_blocks
    # Two nudges far below GAP, for ties alone: later blocks cost a little more, and so does any choice but keep,
    # without which a choice that costs no seconds could be taken for nothing.
    order = 1 + GAP / 10 * np.arange(count)[:, None] / count
    costs = tables.seconds * order + GAP / 100 * tables.seconds.max() / count * (np.arange(len(BLOCK_CHOICES)) != KEEP)
    return _solved(costs.ravel(), LinearConstraint(tables.constraints() / budget_bytes, -np.inf, 1), count)


def least_memory(tables: BlockTables) -> tuple[int, ...]:
    """Choose for each block what makes the peak smallest, and of such choices a cheap one."""
    rows, count = tables.constraints(), tables.num_blocks
    # One real variable more, the peak, in units of the peak with all kept: each moment − peak ≤ 0.
    scale = float(tables.peak_bytes([KEEP] * count)[0])
    limits = LinearConstraint(np.column_stack([rows / scale, -np.ones(len(rows))]), -np.inf, 0)
    choices = _solved(np.append(np.zeros(rows.shape[1]), 1.0), limits, count)
    assert choices is not None  # the peak is free
    return cheapest(tables, float(tables.peak_bytes(choices)[0]) * (1 + GAP / 100)) or choices


def _solved(costs: Reals, limits: LinearConstraint, count: int) -> tuple[int, ...] | None:
    """Solve a programme over (block, choice) variables, of which a block has one; others after them are real."""
    num_binary = count * len(BLOCK_CHOICES)
    real = costs.size - num_binary
    # (blocks, variables): the choices of a block sum to 1.
    one_each = np.pad(np.kron(np.eye(count), np.ones(len(BLOCK_CHOICES))), ((0, 0), (0, real)))
    with c_output_discarded():
        answer = milp(
            costs / max(float(np.abs(costs).max()), 1e-30),  # at most 1: the solver's tolerances are absolute
            constraints=[limits, LinearConstraint(one_each, 1, 1)],
            integrality=np.append(np.ones(num_binary), np.zeros(real)),
            bounds=Bounds(0, np.append(np.ones(num_binary), np.full(real, np.inf))),
            options={"mip_rel_gap": GAP},
        )
    if answer.x is None:
        return None
    # Near 0 or 1, not exactly.
    return tuple(int(choice) for choice in answer.x[:num_binary].reshape(count, -1).argmax(axis=1))


@dataclass(frozen=True)
class BudgetPlan:
    """Choice for each block of a run under a budget.

    Attributes:
        config: the run with its `activation_plan`.
        forecast: of that run.
        budget_bytes: at least its peak.
        kept_peak_bytes: peak with everything kept.
        choices: numbers in `BLOCK_CHOICES`, one per block.
        tables: from which they were chosen.
    """

    config: RunConfig
    forecast: Forecast
    budget_bytes: int
    kept_peak_bytes: int
    choices: tuple[int, ...]
    tables: BlockTables

    @property
    def peak_bytes(self) -> int:
        """Peak of the forecast."""
        return self.forecast.memory.peak_bytes or 0

    def curve(self, points: int = POINTS) -> tuple[CurvePoint, ...]:
        """Memory against time of this run (`activation_curve`)."""
        return activation_curve(self.tables, points)


def plan_activations(config: RunConfig, budget_bytes: int, rank: int = 0, device: Device | None = None) -> BudgetPlan:
    """Choose what becomes of each block's activations so that a rank's step stays within a budget, in the least time.

    Args:
        config: the run, in which nothing is recomputed or offloaded.
        budget_bytes: for all that the allocator gives out, states included.
        rank: one that it has.
        device: a GPU; by default the CPU.

    Raises:
        LabError: if no choice fits: the sentence says the smallest budget that works; or as `block_tables`.

    Example:
        >>> config = RunConfig.of(model="gpt_tiny", micro_batch=8)
        >>> plan_activations(config, 40 * 2**20).config.layout.activation_plan
        'keep:1,offload:1,keep:4'
    """
    try:
        planned(config, [KEEP] * num_blocks(model_shapes(config)))
    except LabError as error:
        raise refusal(
            en=f"a budget is kept by a plan of activations, block by block: {error}",
            fr=f"un budget se tient par un plan d’activations, bloc par bloc : {error}",
        ) from error
    tables = block_tables(config, rank, device)
    kept_peak_bytes = forecast(config, rank, device).memory.peak_bytes or 0  # with everything kept
    target = float(budget_bytes)

    def answer(choices: tuple[int, ...]) -> BudgetPlan:
        chosen = planned(config, choices)
        return BudgetPlan(chosen, forecast(chosen, rank, device), budget_bytes, kept_peak_bytes, choices, tables)

    for _ in range(TRIES):
        choices = cheapest(tables, target)
        if choices is None:
            break
        budget_plan = answer(choices)
        if budget_plan.peak_bytes <= budget_bytes:
            return budget_plan
        target -= budget_plan.peak_bytes - budget_bytes  # the next budget is tighter by the excess
    smallest = answer(least_memory(tables))
    if smallest.peak_bytes <= budget_bytes:
        return smallest
    states = format_bytes(smallest.forecast.memory.states_bytes)
    works = ceil(smallest.peak_bytes / MEBIBYTE)
    raise refusal(
        en=f"a budget of {format_bytes(budget_bytes)} is too small: whatever is kept, rank {rank} takes "
        f"{format_bytes(smallest.peak_bytes)} ({states} of it states); the smallest budget that works is {works}MiB.",
        fr=f"un budget de {format_bytes(budget_bytes)} est trop petit : quoi que l’on garde, le rang {rank} prend "
        f"{format_bytes(smallest.peak_bytes)} (dont {states} d’états) ; le plus petit budget possible est {works}MiB.",
    )


class CurvePoint(NamedTuple):
    """Choice under one budget of a curve: its peak and what a step takes more than with everything kept."""

    peak_bytes: float
    seconds: float
    flops: float
    moved_bytes: float
    choices: tuple[int, ...]


def activation_curve(tables: BlockTables, points: int = POINTS) -> tuple[CurvePoint, ...]:
    """Trace memory against time: the cheapest choices under evenly spaced budgets, from the least peak to all kept.

    Args:
        tables: of a run (`block_tables`).
        points: at least 2.
    """
    smallest_bytes, largest_bytes = (
        float(tables.peak_bytes(choices)[0]) for choices in (least_memory(tables), [KEEP] * tables.num_blocks)
    )
    # The slack keeps a budget that equals a peak from failing by rounding.
    candidates = [
        cheapest(tables, budget * (1 + GAP / 100)) for budget in np.linspace(smallest_bytes, largest_bytes, points)
    ]
    return tuple(
        CurvePoint(float(tables.peak_bytes(choices)[0]), *tables.costs(choices), choices)
        for choices in candidates
        if choices is not None
    )
