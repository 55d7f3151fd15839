"""What a smaller model has become: parameters, bytes of a file that is really written, seconds of an answer.

Layer 2. Invariant: models are timed in turns, each round beginning with another, so that what slows the machine slows
all of them; what is compared are the ratios within a round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dlojz.schema import LabError
from dlojz.text import say


def parameters(model: nn.Module) -> int:
    """Weights of a model, zeros included."""
    return sum(parameter.numel() for parameter in model.parameters())


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a file keeps of a dense model: all of its parameters and buffers, in their own precision."""
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the numbers alone."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def saved_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the safetensors file that keeps them, header and names included: it is written, weighed and removed."""
    with tempfile.TemporaryDirectory(prefix="dlojz-compress-") as folder:
        path = Path(folder) / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return path.stat().st_size


@dataclass(frozen=True)
class Latency:
    """Seconds of one answer.

    Args:
        seconds: median over the rounds.
        ratio: median over the rounds of its seconds to those of the first model in the same round.
        ratio_low: a quarter of the rounds were below.
        ratio_high: a quarter were above.
    """

    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


@torch.inference_mode()
def latencies(models: Sequence[nn.Module], inputs: Tensor, rounds: int = 20, calls: int = 1) -> list[Latency]:
    """Time models in turns on the same inputs; ratios are to the first of them.

    A GPU is waited for once, after all the calls of a turn: with many of them the time is the device's, while a single
    short one would be timed with the Python that launches it.

    Args:
        models: in evaluation mode.
        inputs: one batch.
        rounds: how often each of them has its turn, after two answers that are not timed; at least 1.
        calls: answers of a turn, of which the mean is taken; at least 1.

    Raises:
        LabError: without a round or a call.
    """
    for name, value in (("rounds", rounds), ("calls", calls)):
        if value < 1:
            raise LabError(
                say(
                    en=f"{name} must be at least 1, but {value} was received.",
                    fr=f"{name} doit être au moins égal à 1, mais {value} a été reçu.",
                )
            )
    for model in models:
        model.eval()
        model(inputs)
        model(inputs)
    _wait_for(inputs)
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(rounds):
        for index in (*range(turn % len(models), len(models)), *range(turn % len(models))):
            start_s = time.perf_counter()
            for _ in range(calls):
                models[index](inputs)
            _wait_for(inputs)
            seconds[index].append((time.perf_counter() - start_s) / calls)
    found = []
    for own in seconds:
        ratios = [one / base for one, base in zip(own, seconds[0], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else (ratios[0],) * 3
        found.append(Latency(statistics.median(own), middle, low, high))
    return found


def _wait_for(inputs: Tensor) -> None:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
