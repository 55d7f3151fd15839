"""Catalogue of the models: names, accepted inputs, and `build`. Importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal
from dlojz.models.entries import BYTES, ENTRIES, Family, ModelSpec
from dlojz.models.experts.routing import Routing

if TYPE_CHECKING:
    from dlojz.models.blocks import BlockList, Checkpointing

__all__ = ["BYTES", "Family", "ModelSpec", "build", "check_input", "names", "spec"]

_CATALOGUE = {entry.name: entry for entry in ENTRIES}


def names() -> list[str]:
    """List the names of all models, family by family, from small to large."""
    return list(_CATALOGUE)


def spec(name: str) -> ModelSpec:
    """Look a model up by its name.

    Raises:
        LabError: no model has this name; the sentence lists those that exist.
    """
    if not isinstance(name, str) or name not in _CATALOGUE:
        raise LabError(one_of("model", name, _CATALOGUE))
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
    if entry.family == "image":
        if sequence_length is not None:
            raise LabError(_other_family(entry, "images", "sequence_length", sequence_length, "image_size"))
        if image_size is not None:
            _check_image_size(entry, image_size)
    else:
        if image_size is not None:
            raise LabError(_other_family(entry, "text", "image_size", image_size, "sequence_length"))
        if sequence_length is not None:
            _check_positive(entry, "sequence_length", sequence_length)


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
        checkpointing: Recomputation in the backward pass: none, selective or full (False: none, True: full).
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
    if num_classes is not None:
        _check_positive(entry, "num_classes", num_classes)
    classes = entry.num_classes if num_classes is None else num_classes
    if entry.family == "text":
        if in_channels is not None:
            raise LabError(f"{name} reads text: in_channels has no meaning for it, but {in_channels!r} was received.")
        return entry.build(
            sequence_length=sequence_length or entry.sequence_length,
            vocabulary_size=classes,
            checkpointing=checkpointing,
            **mixed,
        )
    if in_channels is not None:
        _check_positive(entry, "in_channels", in_channels)
    return entry.build(
        image_size=image_size or entry.image_size,
        num_classes=classes,
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
    raise refusal(
        en=f"a routing over {routing.experts} experts was received, but {entry.name} has no experts: use a model "
        "with a mixture of experts such as moe_tiny, or leave it out.",
        fr=f"un routage entre {routing.experts} experts a été reçu, mais {entry.name} n’a pas d’experts : prenez "
        "un modèle à mélange d’experts comme moe_tiny, ou retirez-le.",
    )


def _check_positive(entry: ModelSpec, what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LabError(f"{what} of {entry.name} must be a whole number, at least 1, but {value!r} was received.")


def _check_image_size(entry: ModelSpec, image_size: int) -> None:
    _check_positive(entry, "image_size", image_size)
    multiple, smallest = entry.image_multiple, max(entry.smallest_image, entry.image_multiple)
    if image_size >= smallest and image_size % multiple == 0:
        return
    below = image_size // multiple * multiple
    near = [f"{size}" for size in (below, below + multiple) if size >= smallest] or [f"{smallest}"]
    rule = f"a multiple of {multiple}" if multiple > 1 else f"at least {smallest}"
    raise LabError(
        f"image_size of {entry.name} must be {rule} (pixels), but {image_size} was received: use {' or '.join(near)}."
    )


def _other_family(entry: ModelSpec, reads: str, what: str, value: object, instead: str) -> str:
    return (
        f"{entry.name} reads {reads}: {what} has no meaning for it, but {value!r} was received: "
        f"give {instead}, or leave it out."
    )
