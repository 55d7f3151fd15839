"""Right answers of the exercises that are judged by what they do, without a reference to compare them with."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlojz.by_hand.tensor.axis import add_up, copy
from dlojz.config.run_config import RunConfig
from dlojz.labs.lab04_zero.exercises_cost import bucket_elements
from dlojz.labs.lab07_hybrid.exercises import Part
from dlojz.labs.lab08_compromise.exercises_alpa import Costs, Matrices, Name, Programme, Row
from dlojz.pipeline.orders.zero_bubble import list_schedule
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.schedule_catalogue import build

RANKS, MICRO_BATCHES = 2, 4
"""Of `without_bubble`."""


def checkpointed(blocks: Sequence[nn.Module], x: Tensor, per_segment: int) -> Tensor:
    """Run the blocks, keeping for backward the input of each segment only; backward runs the segment again."""
    for start in range(0, len(blocks), per_segment):
        segment = nn.Sequential(*blocks[start : start + per_segment])
        x = checkpoint(segment, x, use_reentrant=False)
    return x


def deepspeed_settings(config: RunConfig, bucket_mib: float) -> dict[str, Any]:
    """DeepSpeed's configuration for a run, in its own words.

    Args:
        config: of which stage, offloading, precision and sizes of batches are said.
        bucket_mib: MiB of gradients that are reduced together; DeepSpeed counts elements.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON".
    """
    layout = config.layout
    zero: dict[str, Any] = {"stage": layout.zero, "reduce_bucket_size": bucket_elements(config, bucket_mib)}
    if layout.offload in ("optimizer", "parameters"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "bf16": {"enabled": config.precision == "bf16"},
        "zero_optimization": zero,
    }


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """1F1B's order of a rank: min(p − r, m) forwards, then a backward and a forward in turn, then the backwards left.

    Source: Fan et al. 2021 (arXiv 2007.01045), §4; Narayanan et al. 2021 (arXiv 2006.09503), §2.2.
    """
    warm_up = min(ranks - rank, micro_batches)
    order = [f"F{number}" for number in range(warm_up)]
    for number in range(micro_batches):
        order.append(f"B{number}")
        if warm_up + number < micro_batches:
            order.append(f"F{warm_up + number}")
    return order


def under_cap(ranks: int, micro_batches: int, limit: int) -> Schedule:
    """The shortest schedule that keeps within a limit: backwards first, and forwards only as long as there is room.

    For F = 1, B = 2, p ≤ 4 and m ≤ 8 this is the proven optimum (`dlojz.pipeline.shortest_schedule`).
    """
    return list_schedule(ranks, micro_batches, priority="backward-first", cap=limit)


def unblocked() -> list[list[str]]:
    """An order of 2 ranks and 4 micro-batches that runs with blocking sends and keeps at most 3 micro-batches.

    A rank that sends must find the other one receiving. In 1F1B both ranks send between their first backward and the
    forward that follows: one more forward before it, on the last rank as on the first, and they take turns.
    """
    ahead = ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    return [ahead, ahead]


def without_bubble() -> list[list[str]]:
    """ZB-H1 for 2 ranks and 4 micro-batches: 13 time units, which is the lower bound; each rank keeps 2.

    Source: Qi et al. 2024 (arXiv 2401.10241), §2.1.
    """
    return [[str(action) for action in order] for order in build("zb-h1", RANKS, MICRO_BATCHES).orders]


def deepspeed_pipeline(config: RunConfig) -> tuple[int, int, dict[str, Any]]:
    """Processes to start, what follows `-p`, and DeepSpeed's JSON, for a pipeline with replicas.

    Source: deepspeed.ai, "Pipeline Parallelism" (tutorial: AlexNet, `-p 2`) and "DeepSpeed Configuration JSON".
    """
    layout = config.layout
    return (
        layout.pp * layout.dp,
        layout.pp,
        {
            "train_batch_size": layout.micro_batch * layout.micro_batches * layout.dp,
            "train_micro_batch_size_per_gpu": layout.micro_batch,
            "gradient_accumulation_steps": layout.micro_batches,
            "zero_optimization": {"stage": layout.zero},
        },
    )


def hybrid_step(part: Part, x: Tensor, targets: Tensor, dp: Any, tp: Any) -> None:
    """Run forward and backward of this rank's slice and average its gradients over the replicas.

    Args:
        part: `scale` (D,) and `bias` (D,), whole on every rank; `w1` (H, D) and `w2` (D, H), this rank's slices.
        x: (B, D), the samples of this replica, the same on all its tensor ranks.
        targets: (B, D), likewise.
        dp: the axis of the replicas, a `dlojz.by_hand.tensor.axis.TensorAxis`.
        tp: the axis of the slices.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3, for the layer; §3 "Hybrid Model and Data Parallelism" for
    gradients, all-reduced over the ranks of the data axis alone.
    """
    # In backward, `copy` adds up over tp what each slice has found for its input: (B, D).
    h_BH = torch.relu(copy(x * part["scale"], tp) @ part["w1"].T)
    # Who: the ranks of tp. What: their terms of the output. How much: (B, D).
    y_BD = add_up(h_BH @ part["w2"].T, tp) + part["bias"]
    ((y_BD - targets) ** 2).mean().backward()
    for parameter in part.values():
        # Who: the ranks of dp, which hold the same slice. What: its gradient. How much: its bytes.
        dp.all_reduce(parameter.grad)
        parameter.grad /= dp.size


def programme(costs: Costs, resharding: Matrices) -> Programme:
    """Make objective and equations of the choice of one strategy per layer of a chain.

    s[v, k] says whether layer v takes strategy k; e[v, k, j] whether layer v takes k and layer v + 1 takes j. The row
    and column sums of e are the s of its two ends: the product s·s, made linear.

    Args:
        costs: of each layer, the communication of each strategy.
        resharding: between layers v and v + 1, what each pair of strategies costs.

    Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1, in the form of `dlojz.planner.alpa.intra_operator`.
    """
    objective: dict[Name, float] = {("s", v, k): cost for v, some in enumerate(costs) for k, cost in enumerate(some)}
    equations: list[Row] = [({("s", v, k): 1.0 for k in range(len(some))}, 1.0) for v, some in enumerate(costs)]
    for v, matrix in enumerate(resharding):
        makers, readers = range(len(costs[v])), range(len(costs[v + 1]))
        objective |= {("e", v, k, j): matrix[k][j] for k in makers for j in readers}
        equations += [({("s", v, k): -1.0} | {("e", v, k, j): 1.0 for j in readers}, 0.0) for k in makers]
        equations += [({("s", v + 1, j): -1.0} | {("e", v, k, j): 1.0 for k in makers}, 0.0) for j in readers]
    return objective, equations


def gather_for_metrics(values: Tensor, real: int) -> Tensor:
    """Gather the values of all ranks in order, without those that only fill the last batch.

    Args:
        values: of this rank, (samples of a rank, …), as many on each.
        real: how many rows, of all ranks together, are no repetitions.

    Source: Accelerate 1.15, `Accelerator.gather_for_metrics`, which knows `real` from its loader.
    """
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)  # Who: all ranks. What: this rank's values. How much: their bytes.
    return torch.cat(parts)[:real]
