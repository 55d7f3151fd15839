"""Updates within the passes (`update="in_backward"`, `"in_forward"`), behind the interface of an optimizer.

Layer 3. Invariant: losses and weights are those of an update after backward, bit for bit.

Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237); see `dlojz.optim.in_backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dlojz.config import RunConfig
from dlojz.optim.in_backward import InBackward, MakeOptimizer


class PassOptimizer(torch.optim.Optimizer):
    """As an optimizer has it: states by parameter; but the passes themselves update, and forget gradients.

    Args:
        module: the model.
        config: the run; its `update` says which pass updates.
        make_optimizer: makes the optimizer of one parameter.
        hooked: whether backward itself calls the update; otherwise whoever averages gradients does.
    """

    def __init__(
        self, module: nn.Module, config: RunConfig, make_optimizer: MakeOptimizer, *, hooked: bool = True
    ) -> None:
        forward = config.update == "in_forward"
        self.passes = InBackward(module, make_optimizer, "forward" if forward else "backward", accumulates=forward)
        super().__init__(list(self.passes.optimizers), {})
        for one in self.passes.optimizers.values():
            one.state = self.state  # each touches its own parameter's alone
        if not hooked:
            self.passes.release()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The gradients are whole: the next forward pass may update; in backward it is done already."""
        self.passes.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a gradient is forgotten once it is used."""

    def finish(self) -> None:
        """Update what the last step has left to the next forward pass: before weights or states are read."""
        self.passes.finish()
