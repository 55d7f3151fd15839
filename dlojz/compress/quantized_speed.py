"""How long a quantized model will take, foreseen from its layers alone.

Layer 2. Invariant: the quantized model itself is never run here: the teacher is, once for all that is made of it, with
a clock at each of its layers, and each pair of layers on its own, in turns.

Source: Amdahl 1967, "Validity of the single processor approach to achieving large scale computing capabilities": what
is not made faster sets the limit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dlojz.compress.calibration import linear_layers
from dlojz.compress.measuring import latencies

ROUNDS = 5
Shares = tuple[dict[str, float], dict[str, torch.Size]]
"""By the name of a linear layer: its share of an answer's time, and the shape of its input."""
_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Shares]] = WeakKeyDictionary()


@dataclass(frozen=True)
class SpeedForecast:
    """A model's seconds, put together from those of its parts.

    Args:
        share: of the teacher's time that its linear layers take, from 0 to 1.
        kernel_ratio: seconds of all quantized layers over those of the teacher's.
        latency_ratio: seconds of the quantized model over the teacher's, 1 − share + share × kernel_ratio.
    """

    share: float
    kernel_ratio: float
    latency_ratio: float


class _Clock:
    """Seconds spent in each layer, and the shape of what entered it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.shapes: dict[str, torch.Size] = {}
        self.started_s = 0.0

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, every linear layer of a model is timed."""

        def begin(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.started_s = time.perf_counter()

        def ends(name: str) -> object:
            def end(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                self.seconds[name] += time.perf_counter() - self.started_s
                self.shapes[name] = inputs[0].shape

            return end

        hooks = []
        for name, linear in linear_layers(model).items():
            hooks.append(linear.register_forward_pre_hook(begin))
            hooks.append(linear.register_forward_hook(ends(name)))  # type: ignore[arg-type]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@torch.inference_mode()
def layer_shares(teacher: nn.Module, images_NCHW: Tensor, rounds: int = ROUNDS) -> Shares:
    """The share of an answer's time that each linear layer takes, and the shape of its input; on a CPU.

    All shares are those of one answer, and so add up: of all rounds the one whose linear layers together took the
    middle share, since an interruption makes the share of a round too large or too small, and seldom that of most.

    Args:
        teacher: in evaluation mode.
        images_NCHW: the batch.
        rounds: answers, after one that is not timed.
    """
    teacher(images_NCHW)
    clock = _Clock()
    found: list[dict[str, float]] = []
    with clock.watching(teacher):
        for _ in range(rounds):
            clock.seconds.clear()
            start_s = time.perf_counter()
            teacher(images_NCHW)
            whole_s = time.perf_counter() - start_s
            found.append({name: seconds / whole_s for name, seconds in clock.seconds.items()})
    return sorted(found, key=lambda shares: sum(shares.values()))[len(found) // 2], clock.shapes


def known_shares(teacher: nn.Module, images_NCHW: Tensor, rounds: int = ROUNDS) -> Shares:
    """`layer_shares`, timed once for a teacher, a shape of batch, a number of threads and of rounds: what is made of
    the same teacher is foreseen from the same shares. They are forgotten with the teacher.
    """
    key = (images_NCHW.shape, images_NCHW.dtype, torch.get_num_threads(), rounds)
    kept = _KNOWN.setdefault(teacher, {})
    if key not in kept:
        kept[key] = layer_shares(teacher, images_NCHW, rounds)
    return kept[key]


def speed_forecast(
    teacher: nn.Module, quantized: nn.Module, images_NCHW: Tensor, rounds: int = ROUNDS
) -> SpeedForecast:
    """Amdahl's law with measured kernels.

    Args:
        teacher: in evaluation mode, on a CPU.
        quantized: its layers bear the teacher's names and work in float32; those of the same shape are timed once.
        images_NCHW: the batch that will be timed.
        rounds: of each timing.
    """
    shares, shapes = known_shares(teacher, images_NCHW, rounds)
    layers = linear_layers(teacher)
    ratios: dict[tuple[torch.Size, torch.Size], float] = {}
    before = after = 0.0
    for name, part in shares.items():
        key = (shapes[name], layers[name].weight.shape)
        if key not in ratios:
            pair = [layers[name], quantized.get_submodule(name)]
            ratios[key] = latencies(pair, torch.randn(shapes[name], device=images_NCHW.device), rounds)[1].ratio
        before += part
        after += part * ratios[key]
    kernel_ratio = after / before if before else 1.0
    return SpeedForecast(before, kernel_ratio, 1 - before + after)
