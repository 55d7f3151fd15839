"""The training with Accelerate: DDP; on GPUs also FSDP2 with --zero 2 or 3, DeepSpeed with its JSON file.

torchrun --nproc-per-node 2 with_accelerate.py --model gpt_tiny -b 16 -s 20
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import nn

from dlojz.libraries import course_training
from dlojz.libraries.course_training import completed


def main(words: Sequence[str] | None = None) -> nn.Module:
    """Train as the command line says; returns the trained model."""
    parser = course_training.parser()
    parser.add_argument("--zero", type=int, choices=(0, 2, 3), help="what is sharded: 0 nothing, 3 weights too")
    parser.add_argument("--deepspeed_config")
    args = parser.parse_args(words)
    model = course_training.build_model(args)

    plugins = {}
    if args.deepspeed_config:
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=completed(args))
    elif args.zero:
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=args.zero == 3,  # with 2, weights stay whole until backward
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted({type(block).__name__ for block in model.blocks}),
        )
    # Without cpu=True no process group is made where there is no GPU: each process would train alone, silently.
    on_cpu = course_training.device(args).type == "cpu"
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=args.accumulation, **plugins)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    data_loader = course_training.data_loader(args)
    model, optimizer, data_loader = accelerator.prepare(model, optimizer, data_loader)

    for batch in data_loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            # Outside of a step's last micro-batch both do nothing.
            optimizer.step()
            optimizer.zero_grad()
        course_training.report(loss)
    return model


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
