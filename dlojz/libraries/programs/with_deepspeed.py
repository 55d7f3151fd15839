"""The training with DeepSpeed: ZeRO as its JSON file says.

torchrun --nproc-per-node 2 with_deepspeed.py -b 4 -s 20 --deepspeed --deepspeed_config ds_config_zero2.json
"""

from collections.abc import Sequence

import deepspeed
import torch
import torch.distributed as dist

from dlojz.libraries import course_training
from dlojz.libraries.course_training import completed


def main(words: Sequence[str] | None = None) -> deepspeed.DeepSpeedEngine:
    """Train as the command line and DeepSpeed's JSON file say; returns the trained model."""
    parser = course_training.parser()
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(words)
    args.deepspeed_config = completed(args)  # with -b and --accumulation, which the course's file leaves out
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference alone, and takes 40 s to compile
    deepspeed.init_distributed()

    model = course_training.build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    model_engine, optimizer, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), optimizer=optimizer
    )
    data_loader = course_training.data_loader(args, dist.get_rank(), dist.get_world_size())

    for batch in data_loader:
        loss = model_engine([tensor.to(model_engine.device) for tensor in batch])
        model_engine.backward(loss)  # which divides the loss by --accumulation
        model_engine.step()  # an update in the last micro-batch of a step only
        course_training.report(loss)
    return model_engine


if __name__ == "__main__":
    main().destroy()
    dist.destroy_process_group()
