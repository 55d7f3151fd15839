"""Models to plan for (of the catalogue, published, or given by sizes), and what each training library offers.

What a library offers are facts of the software, each with its source; how fast it is, `dlojz.cost_model.layouts` says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import Language, Sentences, language, one_of, refusal, say
from dlojz.config.engines import pipeline_stages, zero_stages
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import ENGINES as COSTED
from dlojz.cost_model import Workload, workload
from dlojz.hardware import Precision
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.hardware.evidence import table
from dlojz.models.foreign.names import is_elsewhere, shown_name

_FILE: Final = Path(__file__).with_name("data") / "questions.md"
question_sentence = Sentences(_FILE)
question_refused = question_sentence.refused
"""A sentence about a question, by its key, and the error that says one."""
_ROWS: Final[dict[str, str]] = tomllib.loads(_FILE.with_name("published.toml").read_text(encoding="utf-8"))
"""Names of published decoders, and the row of `dlojz.hardware` that holds each one's sizes."""


@dataclass(frozen=True)
class Subject:
    """Model to plan for.

    Attributes:
        catalogue: its name in the catalogue of models, or from elsewhere; empty for sizes alone.
        image_size, sequence_length: of its samples; None where the other is meant.
        num_layers: that a pipeline can cut between: decoder layers, or blocks of an image model.
        adapters: fields of a run that train adapters beside its frozen layers; none of a model that is trained whole.
    """

    name: str
    workload: Workload
    catalogue: str
    image_size: int | None
    sequence_length: int | None
    num_layers: int
    adapters: tuple[tuple[str, Any], ...] = ()

    @property
    def size(self) -> DecoderSize | None:
        """Of a decoder; None for an image model, and for one from elsewhere."""
        return self.workload.size

    @property
    def is_image(self) -> bool:
        """Whether it reads images."""
        return self.image_size is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it comes from elsewhere (timm, torchvision, one's own file), so that its rules say what runs it."""
        return is_elsewhere(self.catalogue)

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        return self.workload.num_parameters

    @property
    def num_experts(self) -> int:
        """Experts of each mixture; 0 of a dense model."""
        return 0 if self.size is None else self.size.experts

    def split_conflict(self, tp: int) -> str:
        """Say why tensor parallelism cannot split this model over so many ranks; empty where it can.

        Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3, for what is split whole.
        """
        if tp == 1:
            return ""
        if self.catalogue and not self.num_experts:
            return _catalogue_conflict(self.catalogue, tp, language())
        split = {}  # what tp has to divide
        if self.size is not None:
            split = {
                say(en="attention heads", fr="têtes d’attention"): self.size.heads,
                say(en="key-value heads", fr="têtes de clés et valeurs"): self.size.kv_heads,
                say(en="hidden features of the MLP", fr="neurones cachés du MLP"): self.size.mlp_width,
            }
        if self.size is not None and self.num_experts:  # experts are not cut, only what every token meets
            every_token = say(en="features of the shared experts", fr="neurones des experts partagés")
            split |= {every_token: self.size.shared_experts * self.size.expert_width}
        for part, number in split.items():  # all must divide: heads and widths are cut, never one head
            if number % tp:
                return say(
                    en=f"tp={tp} does not divide the {number} {part}.", fr=f"tp={tp} ne divise pas {number} {part}."
                )
        return ""


@cache
def _catalogue_conflict(model: str, tp: int, _language: Language) -> str:
    """The refusal in the language of the reader, who is therefore part of what is remembered."""
    try:
        RunConfig.of(model=model, tp=tp)
    except LabError as error:
        return str(error)
    return ""


def published() -> tuple[str, ...]:
    """Names of the published decoders that can be planned for."""
    # Sizes come from the shipped tables; a table left out takes its names away.
    row_names = {row.row for name in {row.split("/")[0] for row in _ROWS.values()} for row in table(name)}
    return tuple(name for name, row in _ROWS.items() if row in row_names)


def subject(
    model: str | DecoderSize,
    *,
    image_size: int | None = None,
    sequence_length: int | None = None,
    adapters: Mapping[str, Any] | None = None,
) -> Subject:
    """The model of a name (of the catalogue, from elsewhere, or published) or of a decoder's sizes.

    Args:
        model: e.g. `coatnet_7`, `timm:convnext_base`, `megatron-1t`, or a `DecoderSize`.
        image_size: pixels of a side, of an image model; by default the catalogue's.
        sequence_length: tokens; by default those of the model.
        adapters: `lora`, `lora_targets` and `lora_base`, of a model of transformers.

    Raises:
        LabError: if there is no such model (those there are get listed), or the size does not fit it.
    """
    if adapters:
        if not isinstance(model, str) or not model.startswith("hf:"):
            raise question_refused("adapters of no folder", model=model if isinstance(model, str) else "--layers …")
        built = RunConfig.of(model=model, sequence_length=sequence_length, **adapters).built_model
        adapted = _of_catalogue(built, None, sequence_length)
        words = ", ".join(str(value) for value in adapters.values() if value not in ("", "none"))
        return replace(
            adapted, name=f"{adapted.name} + LoRA {words}", catalogue=model, adapters=tuple(adapters.items())
        )
    if isinstance(model, DecoderSize):
        sizes = f"{model.layers} × {model.hidden}"
        return _decoder(say(en=f"decoder {sizes}", fr=f"décodeur {sizes}"), model, sequence_length)
    if not isinstance(model, str):
        raise question_refused("no model", model=model)
    if model in models.names() or is_elsewhere(model):
        return _of_catalogue(model, image_size, sequence_length)
    key = model.strip().lower().replace("_", "-")
    if key not in published():
        raise LabError(one_of("model", model, (*models.names(), *published())))
    if image_size is not None:
        raise question_refused("text model", model=model, image_size=image_size)
    table_name = _ROWS[key].split("/")[0]
    size = next(row.size for row in table(table_name) if row.row == _ROWS[key])
    return _decoder(key, size, sequence_length)


def _decoder(name: str, size: DecoderSize, sequence_length: int | None) -> Subject:
    # Another length of samples changes activations and positions, not the layers.
    size = replace(size, sequence_length=sequence_length) if sequence_length is not None else size
    return Subject(name, workload(size), "", None, size.sequence_length, size.layers)


def _of_catalogue(model: str, image_size: int | None, sequence_length: int | None) -> Subject:
    spec = models.spec(model)
    work = workload(model, image_size, sequence_length)
    # What stages can be cut between.
    layers = work.size.layers if work.size is not None else sum(kind.count for kind in work.kinds)
    return Subject(
        shown_name(spec.name),
        work,
        spec.name,
        (image_size or spec.image_size) if spec.family == "image" else None,
        (sequence_length or spec.sequence_length) if spec.family == "text" else None,
        layers,
    )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Capabilities of one library.

    Attributes:
        costed: its name in the cost model, without and with a pipeline.
        zero: stages without a pipeline.
        zero_pipeline: stages with one.
        checkpointing: kinds; with a split backward (zb-h1) `none` alone.
        tensor: tensor parallelism for decoders, for image models.
        sequence: sequence parallelism.
        offload: what may lie in the host's memory, without a pipeline or tensor parallelism, and its least ZeRO stage.
        slots: whether embedding and logits may count as a layer each when stages are cut, and the last stage may hold
            fewer layers than the others; without it the first stages hold one layer more where they do not divide.
        overlap: whether gradients are reduced beside the backward.
        fp32_gradients: precisions in which gradients are accumulated in fp32.
        context: ZeRO stages with context parallelism (of decoders whose attention is one kernel).
        exchanges: what context-parallel ranks may exchange, of `dlojz.cost_model.layouts.CONTEXT_EXCHANGES`.
        experts: ZeRO stages with expert parallelism, without and with a pipeline.
        spreads_experts: whether expert parallelism spans the tensor- and context-parallel ranks too, which then do not
            cut experts; without it a mixture has no tensor parallelism.
        fp8: whether it computes a decoder's products in fp8.
        hybrid: least ZeRO stage whose states it shards over a part of the replicas, the others holding copies (HSDP);
            4 where there is none.
        dropout: whether its GPT has dropout by default.
        source: where it says so.
    """

    costed: tuple[str, str]
    zero: tuple[int, ...]
    zero_pipeline: tuple[int, ...]
    schedules: tuple[str, ...] = ("1f1b",)
    checkpointing: tuple[str, ...] = ("none", "selective", "full")
    tensor: tuple[bool, bool] = (True, False)
    sequence: bool = True
    offload: Mapping[str, int] = field(default_factory=dict)
    slots: bool = False
    overlap: bool = True
    fp32_gradients: tuple[Precision, ...] = ("fp16", "bf16", "fp8")
    context: tuple[int, ...] = ()
    exchanges: tuple[str, ...] = ("ring",)
    experts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    hybrid: int = 4
    spreads_experts: bool = False
    dropout: bool = False
    fp8: bool = False
    source: str

    def gradient_bytes(self, precision: Precision) -> int:
        """Bytes of an element of the accumulated gradients."""
        # fp32 in any case where the products are in fp32 too.
        return 4 if precision in self.fp32_gradients or precision in ("fp32", "tf32") else 2

    def place(self, pipeline: bool) -> int:
        """Its place among the cost model's engines."""
        return COSTED.index(self.costed[pipeline])


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _offers() -> dict[str, Offer]:
    tables = tomllib.loads((Path(__file__).with_name("data") / "libraries.toml").read_text(encoding="utf-8"))
    offers = {}
    for name, facts in tables.items():
        values: dict[str, Any] = {"zero": zero_stages(name), "zero_pipeline": pipeline_stages(name)}
        values |= {key: _as_tuples(value) for key, value in facts.items()}
        offers[name] = Offer(**values)
    return offers


OFFERS: Final = _offers()
"""Libraries by the name under which they are asked for."""
OF_THE_LAB: Final = ("torch", "by_hand", "deepspeed")
"""Those that `dlojz.run` runs: searched for the catalogue's models."""
OF_MIXTURES: Final = (*OF_THE_LAB, "megatron-core")
"""Those searched for the catalogue's models with experts, which only Megatron Core splits in a pipeline too."""
OF_GIANTS: Final = ("megatron-core", "megatron-deepspeed", "torch", "deepspeed")
"""Those searched for decoders given by their sizes."""


def chosen(
    engines: str | tuple[str, ...] | list[str] | None, *, catalogue: bool, experts: bool = False, fp8: bool = False
) -> tuple[str, ...]:
    """Choose the libraries to search, in the order of `OFFERS`.

    Args:
        engines: names, one or several; without them, those that suit the model.
        catalogue: whether the model is of the catalogue, so that the lab can run it.
        experts: whether it has a mixture of experts.
        fp8: whether products are computed in fp8.

    Raises:
        LabError: for an unknown name, or one that has no fp8.
    """
    usual: tuple[str, ...] = (OF_MIXTURES if experts else OF_THE_LAB) if catalogue else OF_GIANTS
    with_fp8 = tuple(name for name, offer in OFFERS.items() if offer.fp8)
    usual = with_fp8 if fp8 else usual
    engine_names = usual if engines is None else engines
    names = (
        tuple(name.strip() for name in engine_names.split(","))
        if isinstance(engine_names, str)
        else tuple(engine_names)
    )
    # By hand only models of the catalogue are split.
    legal = tuple(OFFERS) if catalogue else tuple(name for name in OFFERS if name != "by_hand")
    for name in names:
        if name not in legal:
            raise LabError(one_of("engine", name, legal))
        if fp8 and name not in with_fp8:
            raise refusal(
                en=f"{name} computes no products in fp8, but precision fp8 was asked for: use {' or '.join(with_fp8)}.",
                fr=f"{name} ne calcule pas de produits en fp8, or la précision fp8 a été demandée : prenez "
                f"{' ou '.join(with_fp8)}.",
            )
    return tuple(name for name in OFFERS if name in names)
