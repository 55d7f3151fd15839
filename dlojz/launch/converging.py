"""Many short trainings one after the other on the same forked ranks: their losses, to be laid beside each other.

Layer 5. Invariant: each training is that of `dlojz.train`, engine and batches included, without its probes; two runs
that differ in the optimizer alone begin with the same weights and read the same samples in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from dlojz.config import RunConfig
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train import check_runnable

WALL_S: Final = 3600.0
LIMIT_S: Final = 300.0


def train_losses(configs: Sequence[RunConfig], *, wall_s: float = WALL_S) -> list[tuple[float, ...]]:
    """Losses of every training, step by step, all on the same ranks: started once, and not once for each.

    Args:
        configs: trainings on one number of ranks, on this machine's CPU, without pipelines.
        wall_s: seconds after which the ranks are stopped.

    Returns:
        For each training the mean loss of the global batch in every step; where it diverged, NaN from there on.

    Raises:
        LabError: without a training, for different numbers of ranks, or if a rank fails.
    """
    from dlojz.ranks.forks import spmd

    sizes = {one.layout.world_size for one in configs}
    if len(sizes) != 1 or any(one.layout.pp > 1 or one.device == "cuda" for one in configs):
        raise LabError(
            say(
                en="trainings are laid beside each other on one number of ranks, on the CPU and with pp=1, but "
                f"{len(configs)} on {sorted(sizes)} ranks were received.",
                fr="des entraînements se comparent sur un même nombre de rangs, sur le CPU et avec pp=1, mais "
                f"{len(configs)} sur {sorted(sizes)} rangs ont été reçus.",
            )
        )
    for config in configs:
        check_runnable(config)
    answers = spmd(_in_series(configs), sizes.pop(), wall_s=wall_s, limit_s=LIMIT_S)
    failed = next((one for one in answers if one.error is not None), None)
    if failed is not None and failed.error is not None:
        why = failed.error.message or failed.error.name or failed.error.kind
        raise LabError(
            say(
                en=f"rank {failed.rank} could not train: {why}.",
                fr=f"le rang {failed.rank} n’a pas pu entraîner : {why}.",
            )
        )
    return [tuple(math.nan if loss is None else loss for loss in one) for one in answers[0].value]


def _in_series(configs: Sequence[RunConfig]) -> Callable[[int, int], Any]:
    """What each rank runs."""

    def run(rank: int, ranks: int) -> list[list[float | None]]:
        import torch
        import torch.distributed as dist

        from dlojz.train import engines, loop

        torch.set_num_threads(1)
        found: list[list[float | None]] = []
        for config in configs:
            engine = engines.build(config, loop.build_model(config), torch.device("cpu"))
            batches = loop.open_batches(config, engine.axes.dp_rank)
            losses: list[float | None] = []
            for _ in range(config.steps):
                loss = loop.accumulate(engine, batches, config.layout.micro_batches, None).detach().clone()
                if ranks > 1:
                    # Who: all ranks. What: the loss of their batch, summed. How much: 4 bytes per step.
                    dist.all_reduce(loss)
                mean = float(loss) / ranks
                if not math.isfinite(mean):
                    break
                losses.append(mean)
                engine.update()
            found.append(losses + [None] * (config.steps - len(losses)))
            engine.close()
        return found

    return run
