"""Catalogue of the models: names, dimensions, defaults and sources, accepted inputs, and `build`.

Importing it loads no torch. Names with a colon (`timm:resnet50`) are looked up in `dlojz.models.foreign` instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from dlojz.base.errors import LabError
from dlojz.base.language import one_of
from dlojz.models import sizes
from dlojz.models.experts.routing import Routing
from dlojz.models.foreign.names import is_elsewhere, is_hub_name, model_sentence, no_configuration

if TYPE_CHECKING:
    from dlojz.models.blocks import BlockList
    from dlojz.models.checkpointing import Checkpointing
    from dlojz.models.foreign.example import Example

Family = Literal["image", "text", "tensors"]
_READ = {"image": ("images", "image_size"), "text": ("text", "sequence_length"), "tensors": ("tensors of a shape", "")}
BYTES = 256

_TINYLLAMA, _LLAMA_3 = "Zhang et al. 2024, arXiv 2401.02385", "arXiv 2407.21783"
_V3, _MIXTRAL = "DeepSeek-AI 2024, arXiv 2412.19437", "Jiang et al. 2024, arXiv 2401.04088"
_SWITCH, _22B = "Fedus et al. 2021, arXiv 2101.03961", "Mistral AI 2024, configuration of the released weights"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Entry of the catalogue: a model, its dimensions and its defaults.

    Args:
        name: Name for ``build`` and the command line.
        family: ``image`` (pixels to classes), ``text`` (tokens to tokens) or, from elsewhere, ``tensors`` (`example`).
        summary: Description in a few words.
        source: Paper that describes it, and gives the dimensions in ``size``.
        size: Dimensions; plain data, no torch; None from elsewhere.
        build: Constructor, with the options that ``build`` has checked.
        num_classes: Default number of classes, or vocabulary of text; without a meaning unless ``has_classes``.
        image_size: Default side of the images in pixels; None for text.
        image_multiple: Image sizes are multiples of this.
        smallest_image: Image sizes are at least this.
        sequence_length: Default tokens per sample; None for images. Of a target, where it differs: target_length.
        in_channels: Default channels of the images; None for text.
        example: Inputs of a model that reads ``tensors``.
        class_title: Class of a model from elsewhere and what is assumed of it; empty where its name says all.
    """

    name: str
    family: Family
    summary: str
    source: str
    size: sizes.Size | None
    build: Callable[..., BlockList]
    num_classes: int
    image_size: int | None = None
    image_multiple: int = 1
    smallest_image: int = 1
    sequence_length: int | None = None
    target_length: int | None = None
    in_channels: int | None = None
    example: Example | None = None
    class_title: str = ""
    has_classes: bool = True


_CLASSES = {
    sizes.CoAtNetSize: ("coatnet", "CoAtNet"),
    sizes.ViTSize: ("vit", "ViT"),
    sizes.AlexNetSize: ("alexnet", "AlexNet"),
    sizes.GPTSize: ("gpt", "GPT"),
    sizes.LlamaSize: ("llama", "Llama"),
    sizes.QwenSize: ("qwen_deepseek", "Qwen"),
    sizes.DeepSeekSize: ("qwen_deepseek", "DeepSeek"),
}
"""Module and class of a model, by the type of its size."""


def _construct(size: sizes.Size, **options: Any) -> BlockList:
    module, class_name = _CLASSES[type(size)]
    return cast("BlockList", getattr(importlib.import_module(f"dlojz.models.{module}"), class_name)(size, **options))


def _image(
    source: str, multiple: int, smallest: int, name: str, image_size: int, summary: str, num_classes: int = 1000
) -> ModelSpec:
    size = sizes.IMAGE_SIZES[name]
    return ModelSpec(
        name=name,
        family="image",
        summary=summary,
        source=source,
        size=size,
        build=partial(_construct, size),
        num_classes=num_classes,
        image_size=image_size,
        image_multiple=size.patch if isinstance(size, sizes.ViTSize) else multiple,
        smallest_image=smallest,
        in_channels=3,
    )


def _text(source: str, name: str, sequence_length: int, vocabulary_size: int, summary: str) -> ModelSpec:
    size = sizes.TEXT_SIZES[name]
    return ModelSpec(
        name=name,
        family="text",
        summary=summary,
        source=source,
        size=size,
        build=partial(_construct, size),
        num_classes=vocabulary_size,
        sequence_length=sequence_length,
    )


_coatnet = partial(_image, "Dai et al. 2021, arXiv 2106.04803", 32, 1)
_vit = partial(_image, "Dosovitskiy et al. 2020, arXiv 2010.11929", 1, 1)
_alexnet = partial(_image, "Krizhevsky 2014, arXiv 1404.5997", 1, 63)  # below, the last pooling has nothing to pool
_gpt = partial(_text, "Radford et al. 2019, Language Models are Unsupervised Multitask Learners")
_llama = partial(_text, "Touvron et al. 2023, arXiv 2307.09288")
_qwen = partial(_text, "Qwen Team 2025, arXiv 2505.09388")
_deepseek = partial(_text, "DeepSeek-AI 2024, arXiv 2405.04434")

_ENTRIES = (
    _coatnet("coatnet_tiny", 64, "CoAtNet for CPUs: every kind of block, a step in tens of milliseconds", 10),
    _coatnet("coatnet_0", 224, "smallest CoAtNet of the paper"),
    _coatnet("coatnet_1", 224, "CoAtNet-0's widths, twice as deep"),
    _coatnet("coatnet_2", 224, "CoAtNet-1's depths, a third wider"),
    _coatnet("coatnet_3", 224, "CoAtNet-1's depths, twice as wide"),
    _coatnet("coatnet_4", 224, "CoAtNet-3's widths, twice as deep"),
    _coatnet("coatnet_5", 512, "trained on JFT-300M; heads of 64"),
    _coatnet("coatnet_6", 512, "trained on JFT-3B; convolution and attention share stage 3; heads of 128"),
    _coatnet("coatnet_7", 512, "largest CoAtNet: the model that no single GPU trains without help"),
    _vit("vit_mini", 64, "vit_tiny with half of its blocks: the student of a distillation", 10),
    _vit("vit_tiny", 64, "ViT for CPUs: 4 blocks, patches of 8", 10),
    _vit("vit_ti_16", 224, "ViT-Ti/16 (DeiT's tiny)"),
    _vit("vit_s_16", 224, "ViT-S/16 (DeiT's small)"),
    _vit("vit_b_16", 224, "ViT-B/16"),
    _vit("vit_l_16", 224, "ViT-L/16"),
    _vit("vit_h_14", 224, "ViT-H/14"),
    _alexnet("alexnet_tiny", 64, "AlexNet for CPUs: eight narrow layers", 10),
    _alexnet("alexnet", 224, "AlexNet, eight layers to cut into a pipeline"),
    _gpt("gpt_tiny", 128, BYTES, "GPT for CPUs, byte by byte"),
    _text(_SWITCH, "moe_tiny", 128, BYTES, "gpt_tiny with 8 experts in every second block, 1 of which a token meets"),
    _gpt("gpt2_tiny", 128, BYTES, "gpt_tiny with GPT-2's tied head: the output layer is the token embedding"),
    _gpt("gpt2", 1024, 50257, "GPT-2 small"),
    _gpt("gpt2_medium", 1024, 50257, "GPT-2 medium"),
    _gpt("gpt2_large", 1024, 50257, "GPT-2 large"),
    _gpt("gpt2_xl", 1024, 50257, "GPT-2 XL"),
    _llama("llama_tiny", 128, BYTES, "Llama for CPUs, byte by byte: rotary positions, SwiGLU, grouped queries"),
    _text(_TINYLLAMA, "tinyllama_1b", 2048, 32000, "TinyLlama 1.1B: a Llama that one GPU trains"),
    _llama("llama_2_7b", 4096, 32000, "Llama 2 7B"),
    _llama("llama_2_13b", 4096, 32000, "Llama 2 13B"),
    _llama("llama_2_70b", 4096, 32000, "Llama 2 70B, with grouped queries"),
    _text(_LLAMA_3, "llama_3_8b", 8192, 128256, "Llama 3 8B"),
    _text(_LLAMA_3, "llama_3_70b", 8192, 128256, "Llama 3 70B"),
    _text(_LLAMA_3, "llama_3_1_405b", 8192, 128256, "Llama 3.1 405B"),
    _text(_MIXTRAL, "mixtral_8x7b", 32768, 32000, "Mixtral 8x7B: 8 experts in every block, 2 of which a token meets"),
    _text(_22B, "mixtral_8x22b", 65536, 32000, "Mixtral 8x22B: 8 experts in every block, 2 of which a token meets"),
    _qwen("qwen_tiny", 128, BYTES, "Qwen-3 for CPUs, byte by byte: queries and keys normalised, heads of 48"),
    _qwen("qwen_3_0_6b", 32768, 151936, "Qwen3 0.6B, with a tied head"),
    _qwen("qwen_3_4b", 32768, 151936, "Qwen3 4B, with a tied head"),
    _qwen("qwen_3_8b", 32768, 151936, "Qwen3 8B"),
    _qwen("qwen_3_32b", 32768, 151936, "Qwen3 32B"),
    _qwen("qwen_3_30b_a3b", 32768, 151936, "Qwen3 30B-A3B: 128 experts in every block, 8 of which a token meets"),
    _qwen("qwen_3_235b_a22b", 32768, 151936, "Qwen3 235B-A22B: 128 experts in every block, 8 of which a token meets"),
    _deepseek("deepseek_tiny", 128, BYTES, "DeepSeek for CPUs, byte by byte: latent attention, a shared expert and 8"),
    _deepseek("deepseek_v2_lite", 4096, 102400, "DeepSeek-V2-Lite: 2 shared experts and 64, 6 of which a token meets"),
    _text(_V3, "deepseek_v3", 4096, 129280, "DeepSeek-V3: a shared expert and 256, 8 of which a token meets"),
)
_CATALOGUE = {entry.name: entry for entry in _ENTRIES}


def names() -> list[str]:
    """List the names of all models, family by family, from small to large."""
    return list(_CATALOGUE)


def spec(name: str) -> ModelSpec:
    """Look a model up by its name.

    Raises:
        LabError: no model has this name; the sentence lists those that exist.
    """
    if is_elsewhere(name):
        return cast(ModelSpec, importlib.import_module("dlojz.models.foreign.building").spec(name))
    if not isinstance(name, str) or name not in _CATALOGUE:
        raise no_configuration(name) if is_hub_name(name) else LabError(one_of("model", name, _CATALOGUE))
    return _CATALOGUE[name]


def check_input(name: str, image_size: int | None = None, sequence_length: int | None = None) -> None:
    """Refuse an input that the model cannot read; None stands for the model's default.

    Args:
        name: A model of the catalogue.
        image_size: Side of the square image in pixels.
        sequence_length: Tokens per sample.

    Raises:
        LabError: unknown model, a size of the other family, or a size that this model cannot read.
    """
    entry = spec(name)
    reads, size_name = _READ[entry.family]
    for field, size in (("image_size", image_size), ("sequence_length", sequence_length)):
        if size is not None and field != size_name:
            hint = f"give {size_name}, or leave it out" if size_name else "leave it out"
            raise LabError(f"{name} reads {reads}: {field} has no meaning for it, but {size!r} was received: {hint}.")
        if size is not None:
            _check_positive(entry, size_name, size)
            _check_image_size(entry, size)


def build(
    name: str,
    *,
    image_size: int | None = None,
    sequence_length: int | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
    checkpointing: Checkpointing | bool = "none",
    routing: Routing | None = None,
) -> BlockList:
    """Build a model of the catalogue, its weights drawn from torch's global generator.

    Args:
        name: A model of the catalogue.
        image_size: Side of the square image in pixels; by default the catalogue's.
        sequence_length: Tokens per sample; by default the catalogue's.
        num_classes: Classes of images, or vocabulary of text; by default the catalogue's.
        in_channels: Channels of the images; by default 3.
        checkpointing: Recomputation in the backward pass (see `BlockList`; False: none, True: full).
        routing: Of the mixtures of experts; by default the catalogue's.

    Returns:
        A ``BlockList``: images ``(B, in_channels, image_size, image_size)`` to logits ``(B, num_classes)``, or integer
        tokens ``(B, T)`` to logits ``(B, T, num_classes)``.

    Raises:
        LabError: unknown model, a size that the model cannot have, or a routing for a model without experts.
    """
    check_input(name, image_size, sequence_length)
    entry = spec(name)
    mixed = _routed(entry, routing)
    _check_positive(entry, "num_classes", num_classes)
    if entry.family == "text":
        if in_channels is not None:
            raise LabError(f"{name} reads text: in_channels has no meaning for it, but {in_channels!r} was received.")
        return entry.build(
            sequence_length=sequence_length or entry.sequence_length,  # 0 has been refused above
            vocabulary_size=num_classes or entry.num_classes,
            checkpointing=checkpointing,
            **mixed,
        )
    _check_positive(entry, "in_channels", in_channels)
    return entry.build(
        image_size=image_size or entry.image_size,
        num_classes=num_classes or entry.num_classes,
        in_channels=in_channels or entry.in_channels,
        checkpointing=checkpointing,
    )


def _routed(entry: ModelSpec, routing: Routing | None) -> dict[str, Routing]:
    """Return the routing as an option of the model's constructor; nothing for a model without experts."""
    experts = getattr(entry.size, "experts", None)
    if experts is not None:
        return {"routing": routing or experts.routing()}
    if routing is None:
        return {}
    raise model_sentence.refused("routing without experts", experts=routing.experts, name=entry.name)


def _check_positive(entry: ModelSpec, argument: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise LabError(f"{argument} of {entry.name} must be a whole number, at least 1, but {value!r} was received.")


def _check_image_size(entry: ModelSpec, image_size: int) -> None:
    multiple, smallest = entry.image_multiple, max(entry.smallest_image, entry.image_multiple)
    if entry.family == "text" or (image_size >= smallest and image_size % multiple == 0):
        return
    below = image_size // multiple * multiple  # the two sizes around it that would do
    sides = [f"{size}" for size in (below, below + multiple) if size >= smallest] or [f"{smallest}"]
    rule = f"a multiple of {multiple}" if multiple > 1 else f"at least {smallest}"
    raise LabError(
        f"image_size of {entry.name} must be {rule} (pixels), but {image_size} was received: use {' or '.join(sides)}."
    )
