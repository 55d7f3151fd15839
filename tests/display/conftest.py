"""Records made by hand, with figures of the size that real runs have."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.prediction import predict
from dlojz.results.footprint import Footprint, Memory, Phases, Traffic
from dlojz.results.record import MemorySample, RunRecord, Span
from tests.display.legible import language, legible_figures  # noqa: F401 - fixtures of all tests of this room

MakeRecord = Callable[..., RunRecord]


@pytest.fixture
def make_record() -> MakeRecord:
    """A finished run that measured exactly what is predicted, unless told otherwise."""

    def make(
        status: str = "completed",
        reason: str = "",
        *,
        measured: bool = True,
        extra_bytes: int = 0,
        loss_shift: float = 0.0,
        rate: float = 100.0,
        run_id: str | None = None,
        **fields: Any,
    ) -> RunRecord:
        config = RunConfig.of(**{"steps": 12, **fields})
        losses = tuple(0.2 + 2 * math.exp(-step / 5) + loss_shift for step in range(12 if measured else 0))
        spans = tuple(
            Span(rank=rank, step=step, phase=phase, start_s=step + start, end_s=step + end)
            for rank in range(config.layout.world_size)
            for step in range(3)
            for phase, start, end in (("forward", 0.0, 0.3), ("backward", 0.3, 0.8), ("optimizer", 0.8, 0.9))
        )
        timeline = tuple(
            MemorySample(
                time_s=index / 100,
                phase="forward" if index < 5 else "backward",
                bytes_by_category={"weights": 10**6, "activations": 10**5 * min(index, 9 - index)},
            )
            for index in range(10)
        )
        return RunRecord(
            run_id=run_id or f"20250101-120000-{config.hash}-00ff",
            config=config,
            status=status,
            reason=reason,  # type: ignore[arg-type]
            losses=losses,
            footprints=(_as_measured(predict(config), extra_bytes, rate),) if measured else (),
            spans=spans if measured else (),
            memory_timeline=timeline if measured else (),
        )

    return make


def _as_measured(predicted: Footprint, extra_bytes: int, rate: float) -> Footprint:
    control = Traffic(collective="all_reduce", group="control", group_size=2, count=1, message_bytes=8)
    traffic = [
        each.model_copy(update={"message_bytes": each.message_bytes + extra_bytes}) for each in predicted.communication
    ]
    states = predicted.memory.states_bytes
    memory = Memory(
        **{
            **predicted.memory.to_dict(),
            "activations_bytes": 36_000_000,
            "workspace_bytes": 2_000_000,
            "peak_bytes": states + 37_000_000,
        }
    )
    return Footprint(
        source="measured",
        parameters=predicted.parameters,
        memory=memory,
        samples_per_s=rate,
        communication=(*traffic, control),
        phases=Phases(step_s=0.25),
        step_flops=predicted.step_flops,
    )
