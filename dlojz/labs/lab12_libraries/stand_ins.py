"""Stand-ins for DeepSpeed's engine and Accelerate's accelerator, and the small model that loops train on them.

They record what a loop does, and end with the weights of the real libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from dlojz.labs.kit.exercise import Said, Wrong

LEARNING_RATE = 0.5
SAMPLES, WIDTH, CLASSES = 4, 6, 3

BACKWARD_OF_THE_LOSS = Said(
    "You call loss.backward(): the engine does not see it, so it neither divides by the accumulation nor reduces "
    "gradients over the ranks (without ZeRO, DeepSpeed refuses it): engine.backward(loss).",
    "Vous appelez loss.backward() : le moteur ne le voit pas, donc ne divise pas par l’accumulation et ne réduit pas "
    "les gradients entre les rangs (sans ZeRO, DeepSpeed refuse) : engine.backward(loss).",
)
OPTIMIZER_BY_HAND = Said(
    "You use engine.optimizer yourself: under ZeRO it is no longer the one you know, and the engine no longer counts "
    "its micro-batches. engine.step() updates when it is time, and zeroes the gradients.",
    "Vous utilisez engine.optimizer vous-même : avec ZeRO, ce n’est plus celui que vous connaissez, et le moteur ne "
    "compte plus ses micro-batches. engine.step() met à jour au bon moment, et remet les gradients à zéro.",
)


def make_model(seed: int) -> nn.Module:
    """Make a small network whose `forward(batch)` is the mean loss of the batch, like the course's engine."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

        def forward(self, batch: Any) -> Tensor:
            inputs, classes = batch
            return nn.functional.cross_entropy(self.network(inputs), classes)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Loss()


def make_batches(number: int, seed: int) -> list[Any]:
    """Make micro-batches of inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (3 * torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator))
        for _ in range(number)
    ]


def make_optimizer(model: nn.Module) -> Any:
    """Make plain SGD, in which, unlike in Adam, a gradient that is too large shows in the weights."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def weights_of(model: nn.Module) -> Tensor:
    """Concatenate all weights in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class PreparedModel:
    """Stand-in for a prepared model, which counts forward passes."""

    def __init__(self, model: nn.Module, on_backward: Callable[[Tensor], None]) -> None:
        self.module, self.forwards = model, 0
        self._on_backward = on_backward

    def __call__(self, batch: Any) -> Tensor:
        self.forwards += 1
        loss: Tensor = self.module(batch)
        # The hook sees what arrives at the loss: 1 after loss.backward(), 1 / accumulation after the library's own.
        loss.register_hook(self._on_backward)
        return loss

    forward = __call__

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as on a module."""
        self.module.train(mode)
        return self

    def parameters(self) -> Iterator[Any]:
        """Parameters of the model."""
        return self.module.parameters()


class EngineStandIn(PreparedModel):
    """Stand-in for what `deepspeed.initialize` gives, on one process.

    Args:
        accumulation: `gradient_accumulation_steps` of the JSON.

    Source: DeepSpeed 0.19, `runtime/engine.py`: `backward` divides by the accumulation, `step` counts micro-batches
    and updates at every last one.
    """

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        super().__init__(model, self._on_own_backward)
        self._optimizer = make_optimizer(model)
        self._accumulation = accumulation
        self._inside = False
        self.backwards = self.steps = self.zeroed = 0
        self.arrived: list[float] = []
        """What each backward brought to its loss: 1 / accumulation, unless the loop divided once more."""

    def _on_own_backward(self, gradient: Tensor) -> None:
        # Not within `backward` below: the loop has called loss.backward().
        if not self._inside:
            raise Wrong(*BACKWARD_OF_THE_LOSS)
        self.arrived.append(float(gradient))

    def backward(self, loss: Tensor) -> Tensor:
        """Compute the gradients of this micro-batch's share of the mean."""
        self._inside = True
        self.backwards += 1
        share = loss / self._accumulation
        share.backward()
        self._inside = False
        return share

    def step(self) -> None:
        """Count a micro-batch; update and zero where it is the last of a step."""
        self.steps += 1
        if self.steps % self._accumulation == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        """Zero the accumulated gradients."""
        self.zeroed += 1
        self._optimizer.zero_grad()

    @property
    def optimizer(self) -> Any:
        """Refuse access to the engine's optimizer."""
        raise Wrong(*OPTIMIZER_BY_HAND)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        return (self.steps + 1) % self._accumulation == 0


class PreparedOptimizer:
    """Stand-in for a prepared optimizer, which does nothing while gradients are accumulated."""

    def __init__(self, optimizer: Any, accelerator: AcceleratorStandIn) -> None:
        self._optimizer, self._accelerator = optimizer, accelerator
        self.param_groups = optimizer.param_groups
        self.steps = self.zeroed = 0

    def step(self) -> None:
        """Update, after the last micro-batch of a step."""
        self.steps += 1
        if self._accelerator.sync_gradients:
            self._optimizer.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero, after the last micro-batch of a step."""
        self.zeroed += 1
        if self._accelerator.sync_gradients:
            self._optimizer.zero_grad()


class PreparedLoader:
    """Stand-in for a prepared loader, which knows its last micro-batch."""

    def __init__(self, batches: Sequence[Any], accelerator: AcceleratorStandIn) -> None:
        self._batches, self._accelerator = batches, accelerator
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        self._accelerator.at_the_end = False
        for number, batch in enumerate(self._batches, start=1):
            # Set before the loop gets the micro-batch, for which it then enters `accumulate`.
            self._accelerator.at_the_end = number == len(self._batches)
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


class AcceleratorStandIn:
    """Stand-in for `Accelerator(gradient_accumulation_steps=…)` on one process.

    Source: Accelerate 1.15, `accelerator.py` (`_do_sync`, `accumulate`, `backward`) and `optimizer.py`.
    """

    def __init__(self, accumulation: int) -> None:
        self.gradient_accumulation_steps = accumulation
        self.sync_gradients, self.at_the_end = True, False
        self.accumulated = self.backwards = self._step = 0
        self.arrived: list[float] = []
        self.outside = self.within = 0
        """Backward passes that the accelerator has not seen; forward passes within `accumulate`."""
        self._inside = False
        self.model: PreparedModel | None = None
        self.optimizer: PreparedOptimizer | None = None
        self.loader: PreparedLoader | None = None

    def prepare(self, *components: Any) -> Any:
        """Wrap each thing, in the order given."""
        prepared = tuple(self._prepared(component) for component in components)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(self, model: Any) -> Any:
        """Wrap a model; the three methods that `prepare` calls can be called one by one."""
        return self._prepared(model)

    prepare_optimizer = prepare_data_loader = prepare_model

    def _prepared(self, component: Any) -> Any:
        if hasattr(component, "param_groups"):
            self.optimizer = PreparedOptimizer(component, self)
            return self.optimizer
        if isinstance(component, list):
            self.loader = PreparedLoader(component, self)
            return self.loader
        self.model = PreparedModel(component, self._on_backward)
        return self.model

    def _on_backward(self, gradient: Tensor) -> None:
        self.outside += not self._inside
        self.arrived.append(float(gradient))

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Enter one micro-batch; gradients synchronise at every last one and at the end of the loader."""
        self.accumulated += 1
        if self.at_the_end:
            self._step, self.sync_gradients = 0, True
        else:
            self._step += 1
            self.sync_gradients = self._step % self.gradient_accumulation_steps == 0
        # What the counter gains until the block ends are forward passes within it.
        model, before = self.model, self.model.forwards if self.model else 0
        yield
        self.within += model.forwards - before if model else 0

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of this micro-batch's share of the mean."""
        self.backwards += 1
        self._inside = True
        (loss / self.gradient_accumulation_steps).backward()
        self._inside = False
