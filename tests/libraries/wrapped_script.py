"""A training of a small transformer, plain or wrapped as asked: nothing of the lab is imported."""

import argparse
import json
import os
import resource
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HEADS, TOKENS = 256, 64, 4, 32


def in_fp64(_, bucket):
    """Send gradients in twice their size, and return their mean."""
    sent = bucket.buffer().double() / dist.get_world_size()
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: done.value()[0].float())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        # With names: torch 2.8 takes a last "0" of a plan for the first of the layers too.
        parts = {"up": nn.Linear(WIDTH, 4 * WIDTH), "gelu": nn.GELU(), "down": nn.Linear(4 * WIDTH, WIDTH)}
        self.mlp = nn.Sequential(OrderedDict(parts))
        self.norm_of_mlp = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_of_mlp(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.passes = 0

    def forward(self, words: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        self.passes += 1
        x = self.embedding(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if args.recompute else layer(x)
        return {"logits": self.head(x) * scale}


class Stage(nn.Module):
    """A part of the transformer that one stage of a pipeline computes."""

    def __init__(self, whole: Transformer, number: int, stages: int) -> None:
        super().__init__()
        each = len(whole.layers) // stages
        self.embedding = whole.embedding if number == 0 else nn.Identity()
        self.layers = nn.ModuleList(whole.layers[number * each : (number + 1) * each])
        self.head = whole.head if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser()
WRAPPERS = ("none", "ddp", "fsdp1", "fsdp2", "hsdp", "nested", "tp", "sp", "2d", "pipeline", "deepspeed")
parser.add_argument("--wrap", choices=WRAPPERS, default="none")
parser.add_argument("--hook", choices=("none", "fp16", "own"), default="none", help="sends DDP's gradients")
parser.add_argument("--schedule", default="1F1B", help="of a pipeline, by torch's name")
parser.add_argument("--zero", type=int, default=0, help="stage of DeepSpeed")
parser.add_argument("--zero-options", default="{}", help="more of DeepSpeed's section zero_optimization, as JSON")
parser.add_argument("--bf16", action="store_true", help="with DeepSpeed: weights of 16 bit")
parser.add_argument("--freeze", action="store_true", help="the embedding and the first two layers are not trained")
parser.add_argument("--spare", action="store_true", help="a layer is made that forward does not use")
parser.add_argument("--units", action="store_true", help="with FSDP1: each layer is a unit")
parser.add_argument("--groups", action="store_true", help="two groups of parameters, with and without decay")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--keep", action="store_true", help="gathered weights stay from forward to backward")
parser.add_argument("--recompute", action="store_true", help="each layer is computed again in backward")
parser.add_argument("--late", action="store_true", help="gradients are set to zero between forward and backward")
parser.add_argument("--limit-mib", type=int, default=0, help="memory that the process may take besides")
args = parser.parse_args()

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
bare = Transformer()
model: nn.Module = bare
if args.spare:
    model.spare = nn.Linear(32, 47)
if args.freeze:
    for part in (bare.embedding, *bare.layers[:2]):
        part.requires_grad_(False)
if args.wrap == "ddp":
    model = DistributedDataParallel(model)
    if args.hook != "none":
        model.register_comm_hook(None, fp16_compress_hook if args.hook == "fp16" else in_fp64)
elif args.wrap == "fsdp1":
    model = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({Layer}) if args.units else None,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if args.keep else ShardingStrategy.FULL_SHARD,
        use_orig_params=args.groups,
    )
elif args.wrap in ("fsdp2", "hsdp", "nested", "tp", "sp", "2d"):
    mesh = None
    if args.wrap == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    if args.wrap in ("tp", "sp", "2d"):
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        between = Shard(1) if args.wrap == "sp" else Replicate()  # what lies between the layers
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "layers.*.qkv": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
            "layers.*.out": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "layers.*.mlp.up": ColwiseParallel(input_layouts=between),
            "layers.*.mlp.down": RowwiseParallel(output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        }
        if args.wrap == "sp":
            plan |= {"layers.*.norm": SequenceParallel(), "layers.*.norm_of_mlp": SequenceParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
if args.wrap == "nested":
    for layer in bare.layers:
        fully_shard(layer.mlp)
if args.wrap in ("fsdp2", "hsdp", "nested", "2d"):
    for layer in bare.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not args.keep)
    fully_shard(model, mesh=mesh)
elif args.wrap == "pipeline":
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = pipelining.schedules.get_schedule_class(args.schedule)
    each = 2 if issubclass(kind, pipelining.schedules.PipelineScheduleMulti) else 1
    numbers = range(rank, ranks * each, ranks)
    stages = [Stage(bare, number, ranks * each) for number in numbers]
    model = nn.ModuleList(stages)
    bare.embedding, bare.layers, bare.head = nn.Embedding(1, 1), nn.ModuleList(), nn.Linear(1, 1)  # the rest goes
    device = torch.device("cpu")
    made = [
        pipelining.PipelineStage(one, number, ranks * each, device) for one, number in zip(stages, numbers, strict=True)
    ]
    schedule = kind(made if each > 1 else made[0], args.accumulation, loss_fn=loss_of)
groups: list[dict[str, object]] = [{"params": list(model.parameters())}]
if args.groups:
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1]},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
optimizer = getattr(torch.optim, args.optimizer)(groups, lr=1e-3)
engine = None
if args.wrap == "deepspeed":
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference alone, and takes 40 s to compile
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": args.accumulation,
        "zero_optimization": {"stage": args.zero, "reduce_bucket_size": 100_000, **json.loads(args.zero_options)},
        "bf16": {"enabled": args.bf16},
        "zero_allow_untested_optimizer": True,
    }
    model, *_ = deepspeed.initialize(model=bare, optimizer=optimizer, config=settings, dist_init_required=False)
    engine = model
batch = 8
if args.limit_mib:
    batch = 4096
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + args.limit_mib * 2**20,) * 2)

for _ in range(5 if args.wrap == "pipeline" else 0):
    optimizer.zero_grad()
    words = torch.randint(WORDS, (batch, TOKENS + 1))
    losses: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
        if rank == 0:
            schedule.step(words[:, :-1].contiguous())
        else:
            schedule.step(target=words[:, 1:], losses=losses)
    optimizer.step()
for step in range(0 if args.wrap == "pipeline" else 5):
    if engine is None and not args.late:
        optimizer.zero_grad()
    for number in range(args.accumulation):
        words = torch.randint(WORDS, (batch, TOKENS + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            logits = model(words[:, :-1], scale=0.5)["logits"]
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        if engine is not None:
            engine.backward(loss)
            engine.step()
            continue
        loss = loss / args.accumulation
        if args.late and number == 0:
            optimizer.zero_grad()
        loss.backward()
    if engine is None:
        optimizer.step()
    print(f"step {step}: {loss.item():.6f}, random {torch.rand(()).item():.6f}", flush=True)
print(f"forward passes: {bare.passes}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
