"""What to train and how it is laid on the devices: `RunConfig`, with its `Layout`.

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
from dlojz.curriculum_misfit import PLAIN, curriculum_misfit, fill_in_curriculum
from dlojz.layout import DEEPSPEED_BUCKET_ELEMENTS, LATER_FIELDS, MAX_COUNT, MAX_DEGREE, Layout, Strategy
from dlojz.layout_experts import ROUTING_FIELDS, fill_in_routing, routing_misfit
from dlojz.layout_tensor import tensor_misfit
from dlojz.library_misfit import engine_of, fill_in_library, library_misfit
from dlojz.optimizer_stages import fill_in_stages, optimizer_misfit
from dlojz.optimizer_update import update_misfit
from dlojz.schema import Contract, LabError, one_of
from dlojz.text import say

__all__ = ["DEEPSPEED_BUCKET_ELEMENTS", "LATER_FIELDS", "MAX_COUNT", "MAX_DEGREE", "Layout", "RunConfig", "Strategy"]

OWN_LATER_FIELDS = (
    *("fp32_gradients", "warmup_steps", "update", "local_steps", *ROUTING_FIELDS),
    *("curriculum", *PLAIN),
    "library",
)
"""Fields that a run has got since runs were first kept, its layout's aside."""


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
    layout: Layout = Layout()

    @classmethod
    def of(cls, **flat: Any) -> Self:
        """Build from fields given flat, those of the layout among them: `RunConfig.of(model="vit_tiny", dp=2)`.

        Raises:
            LabError: if a key is neither a field of `RunConfig` nor of `Layout`; the legal ones are listed.
        """
        own = {key: value for key, value in flat.items() if key in cls.model_fields}
        rest = {key: value for key, value in flat.items() if key not in cls.model_fields}
        rest = engine_of(own) | rest
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
        steps = filled.get("steps", cls.model_fields["steps"].default)
        if str(steps).isdecimal():  # a command line gives its numbers as texts; others are refused by their own field
            fill_in_stages(filled, int(steps))
        if filled.get("data") is None:
            filled["data"] = datasets.default_for(spec.family)
        size = "image_size" if spec.family == "image" else "sequence_length"
        if filled.get(size) is None:
            filled[size] = getattr(spec, size)
        fill_in_routing(filled, spec.size)
        fill_in_curriculum(filled, steps)
        fill_in_library(filled)
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.fp32_gradients and (self.precision == "fp32" or self.layout.engine != "deepspeed"):
            raise LabError(
                say(
                    en="fp32_gradients is an option of DeepSpeed in bf16 or fp16, but engine="
                    f"{self.layout.engine!r}, precision={self.precision!r} was received: change these, or leave it out "
                    "(elsewhere gradients are in fp32 already).",
                    fr="fp32_gradients est une option de DeepSpeed en bf16 ou en fp16, mais engine="
                    f"{self.layout.engine!r}, precision={self.precision!r} a été reçu : changez-les, ou retirez-la "
                    "(ailleurs, les gradients sont déjà en fp32).",
                )
            )
        spec = models.spec(self.model)
        datasets.check(self.data_name, family=spec.family, model=self.model)
        models.check_input(self.model, image_size=self.image_size, sequence_length=self.sequence_length)
        if (misfit := self._misfit()) is not None:
            raise LabError(misfit)
        return self

    def _misfit(self) -> str | None:
        """Why the parts of this run do not go together and what would work; None where they do."""
        asked = (tensor_misfit, optimizer_misfit, update_misfit, routing_misfit, curriculum_misfit, library_misfit)
        return next((misfit for ask in asked if (misfit := ask(self))), None)

    @property
    def data_name(self) -> str:
        """The data set that will be used (never empty once validated)."""
        return self.data or ""

    @property
    def num_classes(self) -> int:
        """Classes the model tells apart (size of the vocabulary for text)."""
        return datasets.num_classes(self.data_name) or models.spec(self.model).num_classes

    def in_use(self) -> dict[str, Any]:
        """Plain data as `to_dict` gives it, without what this run leaves alone: rare options, None, False, nothing."""
        content = self._without_later_fields()
        content["layout"] = _said(content["layout"])
        return _said(content)

    def _without_later_fields(self) -> dict[str, Any]:
        content = self.to_dict()
        for one, fields, names in (
            (content, type(self).model_fields, OWN_LATER_FIELDS),
            (content["layout"], Layout.model_fields, LATER_FIELDS),
        ):
            for name in names:
                if one[name] == fields[name].default:
                    del one[name]
        return content

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that name this run: equal configurations have equal hashes.

        At its default, a field that came later leaves the names of older runs as they are.
        """
        content = self._without_later_fields()
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """Model and layout in words, e.g. `coatnet_tiny, DDP ×2`."""
        processes = f" ×{self.layout.world_size}" if self.layout.world_size > 1 else ""
        library = f", library={self.library}" if self.library != "none" else ""
        return f"{self.model}, {self.layout.title}{processes}{library}"


def _said(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value not in (None, "", "none") and value is not False}
