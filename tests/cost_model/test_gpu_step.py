"""A step on one GPU follows from its kernels and from its host: whichever of the two is later decides."""

from collections import Counter
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.cost_model import gpu_step
from dlojz.cost_model.gpu_step import Kernels
from dlojz.cost_model.launched_operators import VIEW, Operator, Operators, operators_of_level
from dlojz.cost_model.measuring import Timed

LINEAR = Operator("linear", (64, 64, 64))
TIMINGS = (
    Timed("kernel", (64, 64, 64), 5.0, "linear"), Timed("kernel", (128, 128, 128), 40.0, "linear"),
    Timed("kernel", (8,), 1e-6, "add"), Timed("host", (8,), 1.0, "add"), Timed("host", (64, 64, 64), 2.0, "linear"),
    Timed("host", (8,), 0.5, "view"),
    Timed("kernel", (2, 8), 3.0, "update: adamw, foreach"), Timed("kernel", (4, 8), 6.0, "update: adamw, foreach"),
    Timed("host", (2, 8), 4.0, "update: adamw, foreach"), Timed("host", (4, 8), 4.0, "update: adamw, foreach"),
)  # fmt: skip


def kernels(slower: float, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels of a host that is so many times slower within a step, where two linear layers follow each other."""
    found = Operators((VIEW, LINEAR, VIEW, LINEAR), (4, 4), 1)
    monkeypatch.setattr(gpu_step, "operators_of", lambda config: found)
    monkeypatch.setattr(Kernels, "launching", lambda *given: gpu_step.Launching(slower, 0.0))
    return Kernels(TIMINGS)


def config(**fields: Any) -> RunConfig:
    return RunConfig.of(model="vit_tiny", image_size=32, micro_batch=2, data="synthetic", **fields)


def test_a_kernel_takes_what_was_measured_or_what_its_work_comes_to() -> None:
    known = Kernels(TIMINGS)
    assert known.kernel_s(LINEAR) == 5.0 and known.kernel_s(VIEW) == 0.0
    assert known.kernel_s(Operator("linear", (64, 64, 128))) == pytest.approx(10.0, rel=1e-3)
    assert known.kernel_s(Operator("linear", (128, 64, 64), "bf16")) == pytest.approx(10.0, rel=1e-3)


def test_step_s_of_kernels_is_decided_by_the_later_of_host_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched in 2.5 each, kernels of 5: the GPU waits once. Launched in 25 each, the host is the later one."""
    update_s = 3.0
    assert kernels(1.0, monkeypatch).step_s(config()) == pytest.approx(2.5 + 2 * 5.0 + update_s, rel=0.01)
    assert kernels(10.0, monkeypatch).step_s(config()) == pytest.approx(2 * 25.0 + 5.0 + update_s, rel=0.01)


def test_kernels_leave_what_was_not_measured_to_the_other_prediction() -> None:
    known = Kernels(TIMINGS)
    assert known.knows(config()) and not known.knows(config(update="fused"))
    assert not known.knows(config(dp=2)) and not Kernels(()).knows(config())


def test_operators_of_level_full_launch_forward_again_in_bf16_with_its_casts() -> None:
    plain, again = (
        Counter(one.label for one in operators_of_level(1, level, "bf16").calls) for level in ("none", "full")
    )
    blocks = operators_of_level(1, "none", "bf16").blocks
    assert plain["linear"] == blocks and again["linear"] == 2 * blocks and again["cast"] > plain["cast"] > 0
    assert plain["linear, of input"] == plain["linear, of weight"] == again["linear, of weight"] == blocks
