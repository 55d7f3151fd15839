"""The training in plain torch: DDP, or FSDP2 with --zero 2 or 3.

torchrun --nproc-per-node 2 with_torch.py --model gpt_tiny -b 16 -s 20
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dlojz.libraries import course_training


def main(words: Sequence[str] | None = None) -> nn.Module:
    """Train as the command line says; returns the trained model."""
    parser = course_training.parser()
    parser.add_argument("--zero", type=int, choices=(0, 2, 3), help="what is sharded: 0 nothing, 3 weights too")
    args = parser.parse_args(words)
    device = course_training.device(args)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = course_training.build_model(args).to(device)
    if args.zero:
        for block in model.blocks:
            # A unit is gathered before it runs; with --zero 3 it is freed behind it, and gathered again for backward.
            fully_shard(block, reshard_after_forward=args.zero == 3)
        fully_shard(model, reshard_after_forward=args.zero == 3)
    elif dist.get_world_size() > 1:
        model = DistributedDataParallel(model, broadcast_buffers=False)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    data_loader = course_training.data_loader(args, dist.get_rank(), dist.get_world_size())

    for number, batch in enumerate(data_loader, start=1):
        is_last_micro_batch = number % args.accumulation == 0
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last_micro_batch  # else nothing is sent
        loss = model([tensor.to(device) for tensor in batch])
        (loss / args.accumulation).backward()  # the gradients of a step add up to their mean
        if is_last_micro_batch:
            optimizer.step()
            optimizer.zero_grad()
        course_training.report(loss)
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
