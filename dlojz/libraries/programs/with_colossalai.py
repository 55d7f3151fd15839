"""The training with Colossal-AI: a Booster, whose plugin lays the model over the ranks.

torchrun --nproc-per-node 2 with_colossalai.py --model gpt_tiny -b 16 -s 20
"""

from collections.abc import Sequence
from contextlib import nullcontext

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.utils import get_current_device
from torch import nn

from dlojz.libraries import course_training


def main(words: Sequence[str] | None = None) -> nn.Module:
    """Train as the command line says; returns the trained model."""
    parser = course_training.parser()
    args = parser.parse_args(words)
    colossalai.launch_from_torch(seed=args.seed, verbose=False)

    model = course_training.build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, _, _, _ = booster.boost(model, optimizer)
    data_loader = course_training.data_loader(args, dist.get_rank(), dist.get_world_size())

    for number, batch in enumerate(data_loader, start=1):
        is_last_micro_batch = number % args.accumulation == 0
        # Within `no_sync` gradients are summed on the rank, and nothing is sent.
        with nullcontext() if is_last_micro_batch else booster.no_sync(model, optimizer):
            loss = model([tensor.to(get_current_device()) for tensor in batch])
            booster.backward(loss / args.accumulation, optimizer)  # the gradients of a step add up to their mean
        if is_last_micro_batch:
            optimizer.step()
            optimizer.zero_grad()
        course_training.report(loss)
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
