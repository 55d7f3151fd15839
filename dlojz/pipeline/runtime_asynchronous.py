"""Execute an asynchronous schedule on real ranks: PipeDream with stashed weights, PipeDream-2BW with two versions.

Layer 2, loads torch. Invariant: a micro-batch's backward uses the very weights that its forward used, and an update
changes none that are still needed: each version is a set of tensors of its own, and dropped after its last use. Which
version an action uses is counted from the schedule (`pipeline.versions`), the same count that the simulator shows.

What a rank keeps besides one set of weights: one more for each further version (p − r for PipeDream's rank r, 2 for
2BW). What it communicates is what the synchronous runtime does: boundaries and their gradients, nothing else.

Source: Narayanan et al. 2019, "PipeDream" (SOSP), §3.3: w(t+1) = w(t) − ν ∇f(w1(t−n+1), …, wn(t)); Narayanan et al.
2021, "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), §3.1: W(t+1) = W(t) − ν ∇f(W(t−1)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from dlojz.pipeline.action import FORWARD, UPDATE, Action
from dlojz.pipeline.runtime import Boundary, Kept, Loss, Perform, PipelineRuntime, StageKey
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.versions import version_audit

Weights = dict[str, Tensor]


class WeightVersions:
    """The versions of one stage's weights.

    Args:
        module: the stage; its parameters are always the newest version.
        learning_rate, weight_decay: of plain SGD.
    """

    def __init__(self, module: nn.Module, learning_rate: float, weight_decay: float) -> None:
        self._module, self._rate, self._decay = module, learning_rate, weight_decay
        self.newest = 0
        self.kept: dict[int, Weights] = {0: self._of_module()}
        self._sum: Weights = {}
        self._count = 0

    def _of_module(self) -> Weights:
        return {name: value.detach().requires_grad_() for name, value in self._module.named_parameters()}

    def add_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradient to those of the next update."""
        for name, gradient in zip(self.kept[self.newest], gradients, strict=True):
            if gradient is not None:
                self._sum[name] = self._sum[name] + gradient if name in self._sum else gradient
        self._count += 1

    def update(self) -> None:
        """Make a new version from the newest and the mean of the gradients since the last update."""
        new: Weights = {}
        with torch.no_grad():
            for name, weight in self.kept[self.newest].items():
                gradient = self._sum.get(name, torch.zeros_like(weight)) / max(self._count, 1)
                new[name] = (weight - self._rate * (gradient + self._decay * weight)).requires_grad_()
            for name, parameter in self._module.named_parameters():
                parameter.data = new[name].data
        self.newest += 1
        self.kept[self.newest] = new
        self._sum, self._count = {}, 0

    def drop_before(self, oldest: int) -> None:
        """Forget the versions that no action to come uses."""
        for version in [one for one in self.kept if one < min(oldest, self.newest)]:
            del self.kept[version]

    def restart(self) -> None:
        """Count the versions from 0 again: the newest is the only one left."""
        self.kept, self.newest = {0: self.kept[self.newest]}, 0


class AsynchronousRuntime(PipelineRuntime):
    """One rank of an asynchronous pipeline; `step` runs the schedule once, updates included.

    Args:
        schedule: pipedream or pipedream-2bw.
        modules, boundaries, loss, group, perform: as for `PipelineRuntime`.
        learning_rate, weight_decay: of plain SGD, which each stage does on its own.
    """

    asynchronous = True

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[StageKey, nn.Module],
        boundaries: Sequence[Boundary],
        loss: Loss,
        *,
        learning_rate: float,
        weight_decay: float = 0.0,
        group: dist.ProcessGroup | None = None,
        perform: Perform | None = None,
    ) -> None:
        super().__init__(schedule, modules, boundaries, loss, group=group, perform=perform)
        audit = version_audit(schedule)
        first, last = schedule.first_of_rank[self.rank : self.rank + 2]
        self._version_of = dict(zip(schedule.orders[self.rank], audit.versions[first:last], strict=True))
        self.weights = {key: WeightVersions(module, learning_rate, weight_decay) for key, module in modules.items()}
        self.versions_kept = 0
        """The most versions that a stage of this rank kept at a time in the last step."""

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Run the schedule once, updates included; the losses of the micro-batches whose last stage is here."""
        for versions in self.weights.values():
            versions.restart()
        self._needed = self._oldest_needed()
        self._done = self.versions_kept = 0
        return super().step(inputs, targets)

    def _oldest_needed(self) -> list[int]:
        """After each action of this rank: the oldest version that one to come uses."""
        oldest, needed = 2**31, []
        for action in reversed(self.schedule.orders[self.rank]):
            needed.append(oldest)
            version = self._version_of[action]
            if version is not None and action.kind != UPDATE:
                oldest = min(oldest, version)
        return needed[::-1]

    def _execute(self, action: Action) -> None:
        versions = self.weights[action.pipe, action.stage]
        if action.kind == UPDATE:
            self.perform(action, versions.update)
        else:
            super()._execute(action)
        versions.drop_before(self._needed[self._done])
        self.versions_kept = max(self.versions_kept, len(versions.kept))
        self._done += 1

    def _forward(self, action: Action, received: Tensor) -> None:
        key = (action.pipe, action.stage)
        entered = received.detach()
        if entered.is_floating_point() and action.stage:
            entered.requires_grad_()
        output: Any = functional_call(self.modules[key], self._used(action), (entered,))
        if action.stage == self.schedule.stages - 1:
            output = self.loss(output, self._targets[action.micro_batch])
            self._losses.append(output.detach())
        self._kept[action[1:4]] = Kept(entered, output)

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        kept = self._kept.pop(action[1:4])
        weights = list(self._used(action._replace(kind=FORWARD)).values())
        wanted = [kept.input, *weights] if kept.input.requires_grad else weights
        gradients = torch.autograd.grad(kept.output, wanted, gradient, allow_unused=True)
        self.weights[action.pipe, action.stage].add_gradient(gradients[len(wanted) - len(weights) :])
        return gradients[0] if kept.input.requires_grad else None

    def _used(self, action: Action) -> Weights:
        version = self._version_of[action]
        return self.weights[action.pipe, action.stage].kept[version or 0]
