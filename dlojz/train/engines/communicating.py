"""Data parallelism whose reduction is the optimizer's: the whole model on every rank, and no gradient averaged before.

Layer 3. Invariant: between backward and the optimizer nothing is sent; after a step that sends, all ranks hold the same
weights.

Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888); see `dlojz.optim`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlojz.optim.communicating import Communicating
from dlojz.optim.one_bit_adam import OneBitAdam
from dlojz.optim.one_bit_lamb import OneBitLamb
from dlojz.optim.zero_one_adam import ZeroOneAdam
from dlojz.train.engines.base import Engine, Inventory
from dlojz.train.engines.states import Source

_OPTIMIZERS: dict[str, type[OneBitAdam] | type[OneBitLamb] | type[ZeroOneAdam]] = {
    "one_bit_adam": OneBitAdam,
    "one_bit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
}


class CommunicatingEngine(Engine):
    """One replica per rank, and an optimizer of `dlojz.optim` between them."""

    optimizer: Communicating

    def make_optimizer(self) -> Communicating:
        """The optimizer, with the ranks among which it averages."""
        config = self.config
        return _OPTIMIZERS[config.optimizer](
            self.model.parameters(),
            config.learning_rate,
            warmup_steps=config.warmup_steps or 0,
            weight_decay=config.weight_decay,
            total_steps=config.steps,
            group=self.axes.group("dp"),
        )

    def inventory(self) -> Inventory:
        held = super().inventory()
        compressor = self.optimizer.compressor
        if compressor is not None:
            held["optimizer"] += [compressor.worker_error, compressor.server_error]
        return held

    def whole_buffers(self) -> dict[str, Tensor]:
        """With what this rank's optimizer has for itself, named `own.RANK/NAME`."""
        own = {f"own.{self.axes.dp_rank}/{name}": tensor for name, tensor in self.optimizer.own_states().items()}
        return super().whole_buffers() | own

    @torch.no_grad()
    def restore_buffers(self, source: Source) -> None:
        """With what the optimizer of the same rank had for itself; of another number of ranks, nothing.

        Raises:
            LabError: if the buffers are another model's.
        """
        super().restore_buffers(source)
        ranks = self.config.layout.dp
        if source.names(f"own.{ranks - 1}") and not source.names(f"own.{ranks}"):
            kind = f"own.{self.axes.dp_rank}"
            self.optimizer.take_own_states({name: source.tensor(f"{kind}/{name}") for name in source.names(kind)})
