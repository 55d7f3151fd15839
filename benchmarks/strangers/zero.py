"""DeepSpeed in the style of its CIFAR example, with the stage of ZeRO that its argument says."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=0)
args = parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
}
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
torch.manual_seed(1 + torch.distributed.get_rank())
losses = []
for number in range(16):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(engine(inputs), targets)
    engine.backward(loss)
    losses.append(loss.item())
    engine.step()
    if len(losses) == 2:
        print(f"step {number // 2} loss {sum(losses) / 2:.6f} samples 32", flush=True)
        losses = []
torch.distributed.destroy_process_group()
