"""What to train and how it is laid on the devices: `Layout` and `RunConfig`.

Layer 1 (above the catalogues of models and data, against which names are checked). Invariant: an object that exists
is legal and complete: what was left out is filled in with the value that will be used, so that equal runs have
equal hashes. The global batch is derived, never stored.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dlojz import data as datasets
from dlojz import models
from dlojz.schema import Contract, LabError, one_of
from dlojz.text import say

Strategy = Literal["single", "ddp", "by_hand", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3"]

MAX_DEGREE = 2**20
MAX_COUNT = 2**31
"""Beyond these a number is a slip of the keyboard, and arithmetic on it only hides that."""
LATER_FIELDS = ("bucket_mib", "gradient_as_bucket_view")
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
    tp: int = Field(1, ge=1, le=MAX_DEGREE, description="tensor-parallel ranks that share each layer (not run yet)")
    pp: int = Field(1, ge=1, le=MAX_DEGREE, description="pipeline stages (not run yet)")
    zero: int = Field(
        0, ge=0, le=3, description="ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 weights too"
    )
    engine: Literal["torch", "by_hand", "deepspeed", "single"] = Field(
        "torch",
        description="torch (DDP, or FSDP2 where zero is 2 or 3), by_hand (DDP as the lab writes it), "
        "deepspeed (ZeRO 0-3), single (one process)",
    )
    schedule: Literal["gpipe", "1f1b"] | None = Field(None, description="pipeline schedule; needs pp > 1")
    micro_batch: int = Field(16, ge=1, le=MAX_COUNT, description="samples per micro-batch")
    micro_batches: int = Field(
        1, ge=1, le=MAX_COUNT, description="micro-batches that each replica accumulates per step"
    )
    checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="activation checkpointing: recompute in backward (none or full; selective is not run yet)",
    )
    offload: Literal["none", "optimizer", "parameters", "activations"] = Field(
        "none", description="what is moved to host memory (not run yet)"
    )
    sequence_parallel: bool = Field(False, description="shard the sequence outside tensor-parallel regions")
    bucket_mib: float | None = Field(
        None,
        ge=0.001,
        le=MAX_DEGREE,
        description="MiB of gradients that leave together (DDP and by_hand); by default 25, DDP's first bucket 1",
    )
    gradient_as_bucket_view: bool = Field(
        False, description="DDP: gradients are views of the buckets, which saves a copy of them"
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
        if self.zero >= 2 and self.pp > 1:
            return say(
                en=f"zero={self.zero} shards gradients that a pipeline accumulates over micro-batches, so it cannot be "
                f"combined with pp={self.pp}: use zero=1 or zero=0 with a pipeline.",
                fr=f"zero={self.zero} découpe des gradients qu’un pipeline accumule sur ses micro-batches : il ne "
                f"se combine pas avec pp={self.pp} ; avec un pipeline, prenez zero=1 ou zero=0.",
            )
        if self.schedule and self.pp == 1:
            return say(
                en=f"schedule={self.schedule!r} needs a pipeline, but pp=1 was received: set pp to 2 or more.",
                fr=f"schedule={self.schedule!r} demande un pipeline, mais pp=1 a été reçu : prenez pp=2 ou plus.",
            )
        if self.sequence_parallel and self.tp == 1:
            return say(
                en="sequence_parallel needs tensor parallelism, but tp=1 was received: set tp to 2 or more.",
                fr="sequence_parallel demande du Tensor Parallelism, mais tp=1 a été reçu : prenez tp=2 ou plus.",
            )
        return self._bucket_refusal()

    def _bucket_refusal(self) -> str | None:
        """The same, of DDP written by hand and of buckets."""
        if self.engine == "by_hand" and self.zero:
            return say(
                en=f"engine 'by_hand' keeps the whole model on every rank, but zero={self.zero} was received: use "
                "zero=0, or engine 'deepspeed' for ZeRO.",
                fr=f"engine='by_hand' garde le modèle entier sur chaque rang, mais zero={self.zero} a été reçu : "
                "prenez zero=0, ou engine='deepspeed' pour ZeRO.",
            )
        if self.bucket_mib is not None and self.strategy not in ("ddp", "by_hand"):
            return say(
                en=f"bucket_mib={self.bucket_mib:g} was received, but {self.title} has no such buckets: use it with "
                "DDP (engine 'torch', zero=0, dp=2 or more) or engine 'by_hand'.",
                fr=f"bucket_mib={self.bucket_mib:g} a été reçu, mais {self.title} n’a pas de tels buckets : prenez-le "
                "avec DDP (engine='torch', zero=0, dp=2 ou plus) ou engine='by_hand'.",
            )
        if self.gradient_as_bucket_view and self.strategy != "ddp":
            return say(
                en=f"gradient_as_bucket_view is an option of DDP, but {self.title} was received: use it with engine "
                "'torch', zero=0, dp=2 or more.",
                fr=f"gradient_as_bucket_view est une option de DDP, mais {self.title} a été reçu : prenez-la avec "
                "engine='torch', zero=0, dp=2 ou plus.",
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
        return f"dp={self.dp}, tp={self.tp}, pp={self.pp}"

    @property
    def strategy(self) -> Strategy:
        """The name of the engine that runs this layout along its data-parallel axis."""
        if self.engine == "deepspeed":
            return ("zero-0", "zero-1", "zero-2", "zero-3")[self.zero]
        if self.engine == "by_hand":
            return "by_hand"
        if self.zero:
            return "fsdp2"
        return "ddp" if self.dp > 1 else "single"

    @property
    def title(self) -> str:
        """The name a person gives to this layout, e.g. `DeepSpeed ZeRO-2`."""
        if self.strategy == "fsdp2":
            return "FSDP2" if self.zero == 3 else "FSDP2 (ZeRO-2)"
        names = {
            "single": say(en="one process", fr="un processus"),
            "ddp": "DDP",
            "by_hand": say(en="DDP by hand", fr="DDP à la main"),
        }
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


class RunConfig(Contract):
    """One training run, whole: model, data, precision, optimizer, length, and its `Layout`.

    Raises:
        LabError: if a value is illegal or unknown; the sentence names it and the legal ones.
    """

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
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 keeps fp32 weights in the optimizer")
    optimizer: Literal["sgd", "momentum", "adamw"] = Field("adamw", description="update rule")
    learning_rate: float = Field(1e-3, gt=0, description="constant learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled for adamw, L2 for sgd")
    steps: int = Field(20, ge=1, le=MAX_COUNT, description="optimizer steps")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of weights and of the order of the samples")
    keep_weights: bool = Field(False, description="keep the final weights in the run folder (safetensors)")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one")
    layout: Layout = Layout()

    @classmethod
    def of(cls, **flat: Any) -> Self:
        """Build from fields given flat, those of the layout among them: `RunConfig.of(model="vit_tiny", dp=2)`.

        Raises:
            LabError: if a key is neither a field of `RunConfig` nor of `Layout`; the legal ones are listed.
        """
        own = {key: value for key, value in flat.items() if key in cls.model_fields}
        rest = {key: value for key, value in flat.items() if key not in cls.model_fields}
        legal = [*cls.model_fields, *Layout.model_fields]
        for key in rest:
            if key not in Layout.model_fields:
                raise LabError(one_of("key", key, sorted(set(legal) - {"layout", "schema_version"})))
        if rest:
            base = own.get("layout", Layout())
            own["layout"] = Layout(**{**base.to_dict(), **rest})
        return cls(**own)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Put the defaults that depend on the model where nothing was given."""
        if not isinstance(given, dict):
            return given
        spec = models.spec(given.get("model", cls.model_fields["model"].default))
        filled = dict(given)
        if filled.get("data") is None:
            filled["data"] = datasets.default_for(spec.family)
        size = "image_size" if spec.family == "image" else "sequence_length"
        if filled.get(size) is None:
            filled[size] = getattr(spec, size)
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        spec = models.spec(self.model)
        datasets.check(self.data_name, family=spec.family, model=self.model)
        models.check_input(self.model, image_size=self.image_size, sequence_length=self.sequence_length)
        return self

    @property
    def data_name(self) -> str:
        """The data set that will be used (never empty once validated)."""
        return self.data or ""

    @property
    def num_classes(self) -> int:
        """Classes the model tells apart (size of the vocabulary for text)."""
        return datasets.num_classes(self.data_name) or models.spec(self.model).num_classes

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that name this run: equal configurations have equal hashes."""
        content = self.to_dict()
        for name in LATER_FIELDS:  # at its default, a field leaves the names of older runs as they are
            if content["layout"][name] == Layout.model_fields[name].default:
                del content["layout"][name]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """Model and layout in words, e.g. `coatnet_tiny, DDP ×2`."""
        processes = f" ×{self.layout.world_size}" if self.layout.world_size > 1 else ""
        return f"{self.model}, {self.layout.title}{processes}"
