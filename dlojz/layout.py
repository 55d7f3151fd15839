"""How a model is laid on the devices: `Layout`, and what cannot be combined.

Layer 1. Invariant: a layout that exists is legal; whether an engine of this version runs it is another question, which
`train.check_runnable` answers.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dlojz.layout_experts import experts_refusal
from dlojz.layout_gradients import gradients_refusal, gradients_title
from dlojz.layout_pipeline import pipeline_refusal, pipeline_title
from dlojz.layout_tensor import tensor_refusal, tensor_title
from dlojz.schema import Contract, LabError
from dlojz.text import say

Strategy = Literal[
    "single",
    "ddp",
    "by_hand",
    "by_hand-1",
    "by_hand-2",
    "by_hand-3",
    "fsdp2",
    "zero-0",
    "zero-1",
    "zero-2",
    "zero-3",
]

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
"""Names of the schedules; `dlojz.pipeline.catalogue` makes them."""

MAX_DEGREE = 2**20
MAX_COUNT = 2**31
"""Beyond these a number is a slip of the keyboard, and arithmetic on it only hides that."""
LATER_FIELDS = (
    *("bucket_mib", "gradient_as_bucket_view", "nvme_path", "chunks", "partition"),
    *("tensor_parts", "async_tensor_parallel", "ep", "gradient_compression", "powersgd_rank"),
)
"""Fields that a layout has got since runs were first kept."""
DEEPSPEED_BUCKET_ELEMENTS = 2_000_000
"""Elements per bucket of DeepSpeed, run and predicted; its own default, 5e8, would take 2 GB for the smallest model."""


class Layout(Contract):
    """How a model is laid on the devices: one degree per way of splitting, not a list of named modes.

    DDP is `dp=4`, and `dp=4, engine="by_hand"` the lab's own; ZeRO-2 with DeepSpeed is `dp=4, zero=2,
    engine="deepspeed"`; FSDP2 is `dp=4, zero=3`.

    Raises:
        LabError: if the fields cannot be combined; the sentence says why and what would work.
    """

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
    engine: Literal["torch", "by_hand", "deepspeed", "single"] = Field(
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

    @model_validator(mode="after")
    def _combinable(self) -> Self:
        refusal = self._refusal()
        if refusal:
            raise LabError(refusal)
        return self

    def _refusal(self) -> str | None:
        """Why these fields cannot be combined and what would work; None where they can."""
        if self.engine == "single" and (self.world_size > 1 or self.zero):
            return say(
                en=f"engine 'single' is one process and has no ZeRO stage, but {self.degrees}, zero={self.zero} was "
                "received: use engine 'torch' or 'deepspeed'.",
                fr=f"engine='single', c’est un seul processus, sans ZeRO, mais {self.degrees}, zero={self.zero} a été "
                "reçu : prenez engine='torch' ou 'deepspeed'.",
            )
        if self.engine == "torch" and self.zero == 1:
            return say(
                en="engine 'torch' has no ZeRO-1 (it has zero=0: DDP, zero=2 and zero=3: FSDP2), but zero=1 was "
                "received: use engine 'deepspeed' for ZeRO-1.",
                fr="engine='torch' n’a pas de ZeRO-1 (zero=0 : DDP ; zero=2 et zero=3 : FSDP2), mais zero=1 a été "
                "reçu : prenez engine='deepspeed' pour ZeRO-1.",
            )
        if (refusal := pipeline_refusal(self)) is not None:
            return refusal
        if (refusal := tensor_refusal(self) or experts_refusal(self)) is not None:
            return refusal
        return gradients_refusal(self) or self._offload_refusal()

    def _offload_refusal(self) -> str | None:
        """The same, of what is kept outside the device."""
        least = {"optimizer": 1, "parameters": 3}.get(self.offload, 0)
        if least and (self.engine != "deepspeed" or self.zero < least):
            return say(
                en=f"offload={self.offload!r} is DeepSpeed's, from ZeRO-{least} on, but {self.title} was received: use "
                f"engine='deepspeed', zero={max(least, self.zero)}, or offload='activations', which every engine can.",
                fr=f"offload={self.offload!r} est une option de DeepSpeed, à partir de ZeRO-{least}, mais {self.title} "
                f"a été reçu : prenez engine='deepspeed', zero={max(least, self.zero)}, ou offload='activations', que "
                "tous les moteurs savent faire.",
            )
        if self.nvme_path is not None and (self.zero != 3 or self.offload not in ("optimizer", "parameters")):
            return say(
                en=f"nvme_path takes what DeepSpeed ZeRO-3 offloads, but zero={self.zero}, offload={self.offload!r} "
                "was received: use zero=3 and offload='optimizer' or 'parameters', or leave nvme_path out.",
                fr=f"nvme_path reçoit ce que DeepSpeed ZeRO-3 décharge, mais zero={self.zero}, "
                f"offload={self.offload!r} a été reçu : prenez zero=3 et offload='optimizer' ou 'parameters', ou "
                "retirez nvme_path.",
            )
        return None

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
        if self.pp > 1 and self.engine == "torch" and self.zero == 0:
            return "by_hand" if self.dp > 1 else "single"  # a pipeline averages the gradients of its stages itself
        if self.engine == "deepspeed":
            return ("zero-0", "zero-1", "zero-2", "zero-3")[self.zero]
        if self.engine == "by_hand":
            return ("by_hand", "by_hand-1", "by_hand-2", "by_hand-3")[self.zero]
        if self.zero:
            return "fsdp2"
        return "ddp" if self.dp > 1 else "single"

    @property
    def title(self) -> str:
        """The name a person gives to this layout, e.g. `DeepSpeed ZeRO-2`."""
        rest = pipeline_title(self) if self.pp > 1 else self._data_parallel_title()
        rest += f", EP × {self.ep}" if self.ep > 1 else ""
        return tensor_title(self, rest) if self.tp > 1 else rest

    def _data_parallel_title(self) -> str:
        if self.strategy == "fsdp2":
            return "FSDP2" if self.zero == 3 else "FSDP2 (ZeRO-2)"
        names = {
            "single": say(en="one process", fr="un processus"),
            "ddp": "DDP" + gradients_title(self),
            "by_hand": say(en="DDP by hand", fr="DDP à la main"),
        }
        if self.engine == "by_hand" and self.zero:
            return say(en=f"ZeRO-{self.zero} by hand", fr=f"ZeRO-{self.zero} à la main")
        return names.get(self.strategy, f"DeepSpeed ZeRO-{self.zero}")

    def check_processes(self, processes: int) -> None:
        """Refuse a number of processes that the degrees do not multiply to.

        Raises:
            LabError: naming the degrees, the processes received and the `dp` that would work.
        """
        if processes == self.world_size:
            return
        rest = self.tp * self.pp
        fits = processes >= rest and processes % rest == 0
        works = f"dp={processes // rest}" if fits else f"{self.world_size} " + say(en="processes", fr="processus")
        raise LabError(
            say(
                en=f"{self.degrees} needs {self.world_size} processes (dp × tp × pp), but {processes} were received: "
                f"use {works}.",
                fr=f"{self.degrees} demande {self.world_size} processus (dp × tp × pp), mais {processes} ont été "
                f"reçus : prenez {works}.",
            )
        )
