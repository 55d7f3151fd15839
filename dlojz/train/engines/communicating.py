"""Data parallelism whose reduction is the optimizer's: the whole model on every rank, and no gradient averaged before.

Layer 3. Invariant: between backward and the optimizer nothing is sent; after a step that sends, all ranks hold the same
weights.

Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888); see `dlojz.optim`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlojz.optim.communicating import Communicating
from dlojz.optim.local_steps import DiLoCo, LocalSGD, LocalSteps
from dlojz.optim.one_bit_adam import OneBitAdam
from dlojz.optim.one_bit_lamb import OneBitLamb
from dlojz.optim.zero_one_adam import ZeroOneAdam
from dlojz.optimizer_stages import left_behind
from dlojz.train.engines.base import Engine, Inventory
from dlojz.train.engines.states import Source

_OPTIMIZERS: dict[str, type[OneBitAdam] | type[OneBitLamb] | type[ZeroOneAdam]] = {
    "one_bit_adam": OneBitAdam,
    "one_bit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
}


class CommunicatingEngine(Engine):
    """One replica per rank, and an optimizer of `dlojz.optim` between them."""

    optimizer: Communicating | LocalSteps

    def make_optimizer(self) -> Communicating | LocalSteps:
        """The optimizer, with the ranks among which it averages."""
        config, group = self.config, self.axes.group("dp")
        options: dict[str, Any] = {"weight_decay": config.weight_decay, "total_steps": config.steps, "group": group}
        parameters, rate, warmup_steps = self.model.parameters(), config.learning_rate, config.warmup_steps or 0
        if config.optimizer == "local_sgd":
            options["warmup_steps"] = warmup_steps
            return LocalSGD(parameters, rate, local_steps=config.local_steps or 1, **options)
        if config.optimizer == "diloco":
            return DiLoCo(parameters, rate, local_steps=config.local_steps or 1, **options)
        return _OPTIMIZERS[config.optimizer](parameters, rate, warmup_steps=warmup_steps, **options)

    def inventory(self) -> Inventory:
        held = super().inventory()
        compressor = getattr(self.optimizer, "compressor", None)
        if compressor is not None:
            held["optimizer"] += [compressor.worker_error, compressor.server_error]
        return held

    def whole_buffers(self) -> dict[str, Tensor]:
        """With what this rank's optimizer has for itself, named `own.RANK/NAME`."""
        own = {f"own.{self.axes.dp_rank}/{name}": tensor for name, tensor in self.optimizer.own_states().items()}
        return super().whole_buffers() | own

    @torch.no_grad()
    def restore_buffers(self, source: Source) -> None:
        """With what the optimizer of the same rank had for itself; of another number of ranks, nothing, which is said.

        Raises:
            LabError: if the buffers are another model's.
        """
        super().restore_buffers(source)
        if isinstance(self.optimizer, LocalSteps):
            self.optimizer.taken = source.updates
        ranks, kept = self.config.layout.dp, _kept_ranks(source)
        if kept == ranks:
            kind = f"own.{self.axes.dp_rank}"
            self.optimizer.take_own_states({name: source.tensor(f"{kind}/{name}") for name in source.names(kind)})
        elif kept:
            self.left_out = left_behind(self.config.optimizer, kept, ranks)


def _kept_ranks(source: Source) -> int:
    """How many ranks had something for themselves, the first counted even where it had nothing."""
    ranks = 1
    while source.names(f"own.{ranks}"):
        ranks += 1
    return ranks if ranks > 1 else 0
