"""Declare the fields of a run and of its layout, with what follows from them alone.

Each value is within the bounds of its own field; whether the fields go together is judged by the rules above
(`dlojz.config.compatibility`), which `Layout` and `RunConfig` apply.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.language import say
from dlojz.config.engines import ENGINES, EngineSpec, Provider, Strategy, strategy_of

PipelineSchedule = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "looped-bfs",
    "chimera",
    "zb-h1",
    "zb-h2",
    "zb-1p",
    "zb-2p",
    "interleaved-zb",
    "zb-v",
    "dualpipe",
    "dualpipe-v",
    "hanayo",
    "terapipe",
    "bpipe",
    "pipedream",
    "pipedream-2bw",
    "pipemare",
    "ampnet",
]
"""Names of the schedules; `dlojz.pipeline.schedule_catalogue` makes them."""

ASYNCHRONOUS: Final = ("pipedream", "pipedream-2bw")
"""Asynchronous schedules that the lab's own runtime (`dlojz.pipeline.runtime`) executes."""
MAX_DEGREE = 2**20
MAX_COUNT = 2**31
"""Beyond these a number is a slip of the keyboard, and arithmetic on it only hides that."""
PARTITION_METHODS: Final = ("uniform", "parameters", "flops")
PATTERN: Final = "type:"
BOUNDS: Final = "at:"


def explicit_bounds(partition: str) -> tuple[int, ...] | None:
    """First blocks of the stages after the first, where `partition` lists them; None where it names a method."""
    if not partition.startswith(BOUNDS):
        return None
    parts = partition.removeprefix(BOUNDS).split(",")
    return tuple(int(part) for part in parts) if all(re.fullmatch(r"\s*\d{1,6}\s*", part) for part in parts) else ()


class LayoutFields(Contract):
    """Hold how a model is laid on the devices: the fields of `Layout`, not judged yet."""

    dp: int = Field(1, ge=1, le=MAX_DEGREE, description="data-parallel replicas")
    tp: int = Field(1, ge=1, le=MAX_DEGREE, description="tensor-parallel ranks that share each layer")
    pp: int = Field(1, ge=1, le=MAX_DEGREE, description="pipeline ranks: the model is cut into stages, in order")
    ep: int = Field(
        1,
        ge=1,
        le=MAX_DEGREE,
        description="expert-parallel ranks: so many of the dp replicas share out the experts of a mixture",
    )
    zero: int = Field(
        0, ge=0, le=3, description="ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 weights too"
    )
    engine: Provider = Field(
        "torch",
        description="torch (DDP, or FSDP2 where zero is 2 or 3; torch.distributed.pipelining where pp > 1), by_hand "
        "(DDP, ZeRO 1-3, pipelines and tensor parallelism as the lab writes them), deepspeed (ZeRO 0-3; "
        "PipelineModule), single (one process)",
    )
    schedule: PipelineSchedule | None = Field(
        None, description="pipeline schedule, where pp > 1; by default 1f1b (see `dlojz pipeline --list`)"
    )
    chunks: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="stages per pipeline rank; by default what the schedule needs"
    )
    partition: str = Field(
        "uniform",
        description="how the blocks are shared out to the stages: uniform, parameters, flops, type:REGEX (balances the "
        "blocks whose class name matches), or at:4,8,12 (first block of each stage but the first)",
    )
    micro_batch: int = Field(16, ge=1, le=MAX_COUNT, description="samples per micro-batch")
    micro_batches: int = Field(
        1, ge=1, le=MAX_COUNT, description="micro-batches that each replica accumulates per step"
    )
    checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="activation checkpointing: recompute in backward every block (full), or all but "
        "its matrix products, convolutions and attention (selective)",
    )
    offload: Literal["none", "optimizer", "parameters", "activations"] = Field(
        "none",
        description="what is kept in host memory: optimizer (DeepSpeed ZeRO 1-3: its states and the master copy), "
        "parameters (DeepSpeed ZeRO-3: the weights too), activations (any engine)",
    )
    sequence_parallel: bool = Field(False, description="shard the sequence outside tensor-parallel regions")
    tensor_parts: str = Field(
        "",
        description="where tp > 1, regular expression: the parts whose name it is found in are split, e.g. "
        "attention, mlp, or blocks\\.[0-3]\\.; by default all",
    )
    async_tensor_parallel: bool = Field(
        False, description="torch on GPUs: overlap tensor-parallel communication with the products (compiled)"
    )
    bucket_mib: float | None = Field(
        None,
        ge=0.001,
        le=MAX_DEGREE,
        description="MiB of gradients that leave together (DDP and by_hand); by default 25, DDP's first bucket 1",
    )
    gradient_as_bucket_view: bool = Field(
        False, description="DDP: gradients are views of the buckets, which saves a copy of them"
    )
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        "none", description="DDP: what the gradients are sent as (torch's communication hooks)"
    )
    powersgd_rank: int = Field(
        1, ge=1, le=1024, description="columns of the two thin matrices that PowerSGD sends for each gradient"
    )
    nvme_path: str | None = Field(
        None,
        description="folder on an NVMe disk that takes what is offloaded, not host memory (DeepSpeed ZeRO-3)",
    )

    @property
    def world_size(self) -> int:
        """Number of processes: the product of the degrees."""
        return self.dp * self.tp * self.pp

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all replicas."""
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def degrees(self) -> str:
        """The degrees in words, e.g. `dp=2, tp=1, pp=1`."""
        return f"dp={self.dp}, tp={self.tp}, pp={self.pp}" + (f", ep={self.ep}" if self.ep > 1 else "")

    @property
    def strategy(self) -> Strategy:
        """The name of the engine that runs this layout along its data-parallel axis."""
        return strategy_of(self.engine, self.zero, replicas=self.dp > 1, pipeline=self.pp > 1)

    @property
    def engine_spec(self) -> EngineSpec:
        """The entry of that engine in the registry."""
        return ENGINES[self.strategy]

    @property
    def title(self) -> str:
        """The name a person gives to this layout, e.g. `DeepSpeed ZeRO-2`."""
        rest = self._pipeline_title() if self.pp > 1 else self.engine_spec.title(self.zero) + self._compression_title()
        rest += f", EP × {self.ep}" if self.ep > 1 else ""
        return self._tensor_title(rest) if self.tp > 1 else rest

    def _compression_title(self) -> str:
        """What is added where gradients are compressed, e.g. ` + PowerSGD-4`."""
        if not self.engine_spec.torch_buckets:
            return ""
        names = {"none": "", "fp16": " + fp16", "bf16": " + bf16", "powersgd": f" + PowerSGD-{self.powersgd_rank}"}
        return names[self.gradient_compression]

    def _pipeline_title(self) -> str:
        runs = {"torch": "torch", "deepspeed": "DeepSpeed", "by_hand": say(en="by hand", fr="à la main")}[self.engine]
        chunks = f" × {self.chunks}" if self.chunks else ""
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        replicas = f", dp={self.dp}" if self.dp > 1 else ""
        return f"pipeline {self.schedule or '1f1b'} × {self.pp}{chunks} ({runs}{zero}{replicas})"

    def _tensor_title(self, rest: str) -> str:
        runs = {"torch": "torch", "by_hand": say(en="by hand", fr="à la main")}.get(self.engine, self.engine)
        sequence = say(en=", sequence parallel", fr=", Sequence Parallelism") if self.sequence_parallel else ""
        alone = self.pp == 1 and self.dp == 1 and not self.zero
        return f"TP × {self.tp} ({runs}{sequence})" + ("" if alone else f", {rest}")


class RunFields(Contract):
    """Hold one training run: the fields of `RunConfig`, not judged yet."""

    schema_version: Literal[1] = 1
    model: str = Field("coatnet_tiny", description="model of the catalogue (see `dlojz models`)")
    data: str | None = Field(None, description="digits, synthetic, imagenet or text; by default what suits the model")
    data_root: str | None = Field(None, description="folder of imagenet; by default $DSDIR/imagenet")
    image_size: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="height and width in pixels; by default the model's"
    )
    sequence_length: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="tokens per sample; by default the model's"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="bf16 and fp16 keep fp32 weights for the update (fp16 is predicted, not run)"
    )
    fp32_gradients: bool = Field(
        False, description="DeepSpeed in bf16 or fp16: gradients are kept in fp32 (predicted, not run)"
    )
    optimizer: Literal[
        "sgd",
        "momentum",
        "adamw",
        "lamb",
        "one_bit_adam",
        "one_bit_lamb",
        "zero_one_adam",
        "local_sgd",
        "diloco",
        "adamw_8bit",
    ] = Field(
        "adamw",
        description="update rule (one_bit_adam, one_bit_lamb and zero_one_adam send one bit per number, local_sgd and "
        "diloco average the weights every local_steps steps, all with engine by_hand; adamw_8bit is predicted, not "
        "run)",
    )
    update: Literal["auto", "for_loop", "foreach", "fused", "in_backward", "in_forward"] = Field(
        "auto",
        description="how sgd, momentum and adamw go through the parameters: one by one, all at a stroke, in one "
        "kernel, or each as soon as its gradient is there (in_backward) or as its module is used again (in_forward); "
        "auto is torch's choice",
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        le=MAX_COUNT,
        description="steps before one_bit_adam and one_bit_lamb compress, and zero_one_adam goes local steps; by "
        "default a quarter",
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="steps that each replica takes alone under local_sgd and diloco; by default 8",
    )
    learning_rate: float = Field(1e-3, gt=0, description="constant learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; L2 for sgd and momentum")
    steps: int = Field(20, ge=1, le=MAX_COUNT, description="optimizer steps")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of weights and of the order of the samples")
    experts: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="experts of each mixture, of a model that has some; by default its own"
    )
    top_k: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="experts that see each token; by default the model's"
    )
    capacity_factor: float | None = Field(
        None,
        description="tokens that an expert takes, in units of its fair share; those beyond are dropped "
        "(experts/top_k or more: none); by default the model's",
    )
    balance_loss: float | None = Field(
        None, ge=0, description="weight of the loss that balances the experts; by default 0.01"
    )
    z_loss: float | None = Field(
        None, ge=0, description="weight of the loss that keeps the router's logits small; by default 0"
    )
    expert_groups: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="groups of experts among which a two-level gate chooses first; by default 1, a flat gate",
    )
    curriculum: Literal["none", "linear", "root", "discrete"] = Field(
        "none", description="how the sequences of a text grow over the first steps: at once, or by this pacing function"
    )
    curriculum_start: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="tokens per sample at first; by default an eighth of sequence_length"
    )
    curriculum_steps: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="steps after which samples are whole; by default half of the run"
    )
    curriculum_root: int = Field(2, ge=1, le=64, description="degree of the root pacing function")
    curriculum_multiple: int = Field(
        8, ge=1, le=MAX_COUNT, description="lengths are multiples of this (tensor cores like 8 or 16)"
    )
    curriculum_lengths: str = Field(
        "", description="the lengths of a discrete curriculum and their last steps, e.g. 16:100,32:200 (then whole)"
    )
    library: Literal["none", "torch", "deepspeed", "accelerate", "megatron", "colossalai"] = Field(
        "none",
        description="none: dlojz trains with its own engine; else the training as a user of this library writes it "
        "(see `dlojz libraries`)",
    )
    keep_weights: bool = Field(False, description="keep the final weights in the run folder (safetensors)")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one")
    layout: LayoutFields = LayoutFields()
