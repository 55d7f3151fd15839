"""DeepSpeed's PipelineModule on two stages, in the style of DeepSpeedExamples/training/pipeline_parallelism."""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
net = PipelineModule(layers=layers, loss_fn=nn.functional.cross_entropy, num_stages=2, partition_method="uniform")
data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
config = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}
parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, training_data=data, config=config)
for step in range(8):
    loss = engine.train_batch()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
torch.distributed.destroy_process_group()
