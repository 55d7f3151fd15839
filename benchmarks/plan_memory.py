"""Compare the planner's memory with the forecast of the very same runs.

The planner sums the forecast's traces for many layouts at once; the forecast replays one run, allocation by allocation.
Four models, three kinds of checkpointing, ZeRO 0 to 3 of each engine, tensor parallelism, two pipeline stages: for each
the fullest rank's bytes by both, and whether it fits on three GPUs. No GPU is needed.

    python benchmarks/plan_memory.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from dlojz import hardware
from dlojz.config.fields import LayoutFields
from dlojz.cost_model import calibration
from dlojz.planner.planned_memory import layout_memories
from dlojz.planner.planned_model import OF_THE_LAB, subject
from dlojz.planner.question import Question
from dlojz.planner.space import columns_of, layout_title, planned_layout, run_config_of, space_of
from dlojz.prediction.forecast import heaviest

MODELS = {"coatnet_7": {"image_size": 512}, "vit_l_16": {}, "gpt2_xl": {}, "llama_3_8b": {}}
DEVICES = ("v100-32", "a100-80", "h100")
BATCH = 64
MICRO_BATCH = 2
SHARDED = (
    *(("torch", zero) for zero in (0, 2, 3)),
    *(("deepspeed", zero) for zero in (0, 1, 2, 3)),
    *(("by_hand", zero) for zero in (1, 2, 3)),
)
"""Engines and ZeRO stages of data parallelism."""
GPUS = 8


class Compared(NamedTuple):
    """One layout by both.

    Attributes:
        model, candidate: which.
        planned: bytes that the planner says each GPU of `DEVICES` needs.
        forecast: bytes that the forecast says.
        limits: what the GPUs have.
    """

    model: str
    candidate: LayoutFields
    planned: tuple[float, ...]
    forecast: tuple[float, ...]
    limits: tuple[int, ...]

    @property
    def error(self) -> float:
        """Largest relative difference over the GPUs, with its sign."""
        return max((one / other - 1 for one, other in zip(self.planned, self.forecast, strict=True)), key=abs)

    @property
    def verdicts(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Whether it fits on each GPU, by the planner and by the forecast."""
        both = (self.planned, self.forecast)
        first, second = (tuple(one <= limit for one, limit in zip(each, self.limits, strict=True)) for each in both)
        return first, second


def candidates(model: str) -> Iterator[LayoutFields]:
    """The layouts of one model on eight GPUs."""
    tensor = 5 if model == "gpt2_xl" else 2  # its 25 heads
    for checkpointing in ("none", "selective", "full"):
        for engine, zero in SHARDED:
            if engine != "deepspeed" or checkpointing != "selective":
                yield _candidate(GPUS, 1, 1, zero, checkpointing, engine)
        yield _candidate(GPUS // tensor, tensor, 1, 0, checkpointing, "by_hand")
        yield _candidate(GPUS // 2, 1, 2, 0, checkpointing, "torch")
        if checkpointing != "selective":
            yield _candidate(GPUS // 2, 1, 2, 1, checkpointing, "deepspeed")


def _candidate(dp: int, tp: int, pp: int, zero: int, checkpointing: str, engine: str) -> LayoutFields:
    number = BATCH // (dp * MICRO_BATCH) or 1
    return planned_layout(
        dp=dp, tp=tp, pp=pp, zero=zero, micro_batch=MICRO_BATCH, micro_batches=number, checkpointing=checkpointing,
        engine=engine,
    )  # fmt: skip


def compared(model: str) -> list[Compared]:
    """All layouts of one model by both."""
    known = subject(model, **MODELS.get(model, {}))
    chosen = list(candidates(model))
    devices = [hardware.device(name) for name in DEVICES]
    columns, site, planned = columns_of(chosen), hardware.cluster("selene"), []
    for device in devices:
        question = Question(
            known, replace(site, gpu=device), calibration("a100"), BATCH, (GPUS,), "bf16", OF_THE_LAB, True
        )
        planned.append(layout_memories(space_of(question), columns).total_bytes)
    limits = tuple(device.memory_bytes for device in devices)
    made = []
    for place, one in enumerate(chosen):
        config = run_config_of(known, "bf16", one)
        told = heaviest(config, devices[0])
        # What another GPU changes is outside of the trace: its context, NCCL, and cuBLAS's two workspaces.
        needed = told.memory.needed_bytes or 0
        own = _outside(devices[0], one)
        forecast = tuple(float(needed - own + _outside(device, one)) for device in devices)
        made.append(Compared(model, one, tuple(float(each[place]) for each in planned), forecast, limits))
    return made


def _outside(device: hardware.Device, one: LayoutFields) -> int:
    return device.memory_bytes - device.allocatable_bytes(one.world_size) + 2 * device.cublas_workspace_bytes


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    everything: list[Compared] = []
    for model in MODELS:
        rows = compared(model)
        everything += rows
        for row in rows:
            print(
                f"{model:10} {row.forecast[1] / 1e9:7.1f} GB {100 * row.error:+5.1f} %  {layout_title(row.candidate)}"
            )
    errors = [100 * abs(row.error) for row in everything]
    differ = sum(row.verdicts[0] != row.verdicts[1] for row in everything)
    print(
        f"{len(everything)} layouts on {len(DEVICES)} GPUs: plan against forecast, median {median(errors):.1f} %, "
        f"worst {max(errors):.1f} %; {differ} verdicts differ"
    )


if __name__ == "__main__":
    main()
