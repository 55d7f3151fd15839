"""Lab 10: a small mixture trained in this process, every step's loads kept.

Layer 6 (labs). Invariant: two trials of one seed begin with the same weights and read the same samples; only the weight
of the balance loss differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlojz.moe.watch import StepLoad, watch_loads

MODEL = "moe_tiny"
EXPERTS, SEQUENCE_LENGTH, BATCH, LEARNING_RATE = 8, 32, 8, 1e-3
IDLE = 0.01
"""An expert that gets a smaller share of the choices than this is idle."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the mixtures of a model did with their tokens, step by step.

    Args:
        balance_loss: weight of the balance loss.
        loads: of each mixture and step.
        losses: by step, of the task alone.
    """

    balance_loss: float
    loads: tuple[StepLoad, ...]
    losses: tuple[float, ...]

    @property
    def dropped_share(self) -> float:
        """Share of all choices of the training that were dropped, from 0 to 1."""
        return sum(load.dropped for load in self.loads) / len(self.loads)

    @property
    def busiest_share(self) -> float:
        """Share of the choices that the busiest expert of a step got, mean over steps and mixtures; 1 / E at best."""
        return sum(max(load.tokens) / sum(load.tokens) for load in self.loads) / len(self.loads)

    @property
    def idle_experts(self) -> float:
        """Experts of a mixture that got next to nothing in a step, mean over steps and mixtures."""
        idle = [sum(tokens < IDLE * sum(load.tokens) for tokens in load.tokens) for load in self.loads]
        return sum(idle) / len(idle)


def train_mixture(*, balance_loss: float, steps: int = 40, seed: int = 3) -> Trial:
    """Train `moe_tiny` on the lab's prose in short samples, and keep its loads.

    Args:
        balance_loss: weight of the balance loss, 0 for none.
        steps: of AdamW.
        seed: of weights and samples.
    """
    import torch
    import torch.nn.functional as F

    from dlojz import models
    from dlojz.data.text import Prose
    from dlojz.moe import Routing

    routing = Routing(experts=EXPERTS, top_k=1, capacity_factor=1.25, balance_loss=balance_loss)
    with torch.random.fork_rng():  # the notebook's own random state stays as it is
        torch.manual_seed(seed)
        model = models.build(MODEL, sequence_length=SEQUENCE_LENGTH, routing=routing)
    prose, generator = Prose(SEQUENCE_LENGTH), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loads: list[StepLoad] = []
    losses: list[float] = []
    for step in range(steps):
        samples = [prose[int(index)] for index in torch.randint(len(prose), (BATCH,), generator=generator)]
        inputs_BT, targets_BT = (torch.stack(column) for column in zip(*samples, strict=True))
        loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        loads += watch_loads(model, step)
    return Trial(balance_loss=balance_loss, loads=tuple(loads), losses=tuple(losses))
