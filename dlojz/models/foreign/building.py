"""Build a model from elsewhere as a list of blocks (`NestedBlocks`): the parts that repeat, and the module itself.

So it is sharded, traced and run by the same code as a model of the catalogue. Of the module are asked one tensor in,
and one out with a number for each class, or for each token and word; or any output, with a loss of one's own. It is
built and tried without memory first: one that chooses by the values of its data is refused there, with the line.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dlojz.base.language import say
from dlojz.models.blocks import BlockList, NestedBlocks
from dlojz.models.catalogue import ModelSpec
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.foreign.chain import chain_of, not_a_chain
from dlojz.models.foreign.elsewhere import CHAIN, absolute_name, target_length_of
from dlojz.models.foreign.example import run_on
from dlojz.models.foreign.hugging_face.task_modules import heads_of_logits
from dlojz.models.foreign.meta_checks import built, check_loss, not_logits, said_when_slow, tried_on_meta
from dlojz.models.foreign.names import model_sentence
from dlojz.models.foreign.sources import origin_of
from dlojz.models.foreign.tensor_plan import find_plan
from dlojz.models.foreign.tensor_regions import Region
from dlojz.models.meta import on_meta, sample_inputs, targets_shape

FEW_TOKENS = 8
"""Tokens with which the layers of a text model are looked at, where it reads any number of them."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def spec(name: str) -> ModelSpec:
    """Describe a model from elsewhere as an entry of the catalogue; the name of a file becomes absolute.

    Raises:
        LabError: no such model, its package is missing, or its inputs are not known.
    """
    if name.endswith(".py"):
        raise model_sentence.refused("file without its function", name=name)
    return _spec(absolute_name(name))


@lru_cache(maxsize=64)
def _spec(name: str) -> ModelSpec:
    origin = origin_of(name.removeprefix(CHAIN))
    image = origin.family == "image"
    return ModelSpec(
        name=name,
        family=origin.family,
        summary=say(en="from elsewhere", fr="venu d’ailleurs"),
        source=name.partition(":")[0],
        size=None,
        build=partial(_build, name),
        num_classes=origin.classes,
        image_size=origin.size if image else None,
        sequence_length=origin.size if origin.family == "text" else None,
        target_length=target_length_of(name) if origin.family == "text" else None,
        in_channels=3 if image else None,
        example=origin.example,
        class_title=origin.title,
        has_classes=origin.has_classes,
    )


def _build(
    name: str,
    *,
    num_classes: int | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
    vocabulary_size: int | None = None,
    in_channels: int | None = 3,
    checkpointing: Checkpointing | bool = "none",
) -> BlockList:
    """Build a module and list its blocks; the parts are found first, so that every process draws the same weights."""
    is_chain = name.startswith(CHAIN)
    if (checkpointing not in ("none", False) and not is_chain) or in_channels not in (None, 3):
        raise model_sentence.refused(
            "built with three channels", name=name, in_channels=in_channels, checkpointing=checkpointing
        )
    name = name.removeprefix(CHAIN)
    origin = origin_of(name)
    size, classes = image_size or sequence_length or origin.size, num_classes or vocabulary_size or origin.classes
    parts = _parts(name, size, classes)
    if is_chain and origin.loss:
        raise model_sentence.refused("computes its loss itself", name=name)
    if is_chain and origin.example and not isinstance(origin.example.batch, Tensor):
        raise not_a_chain(name, say(en="it reads more than one tensor", fr="il lit plus d’un tenseur"))
    module = _made(name, size, classes)
    if is_chain and any(
        getattr(getattr(part, "config", None), "is_encoder_decoder", False) for part in module.children()
    ):
        reason = model_sentence("encoder and decoder")
        raise not_a_chain(name, reason)
    if is_chain:
        # For transformers alone: where plain tracing fails, `chain_of` decides branches by shapes.
        made_on_meta = partial(_on_meta, name, size, classes) if name.startswith("hf:") else None
        model = chain_of(name, module, parts, checkpointing, made_on_meta)
    else:
        model = NestedBlocks(module, parts, origin.loss)
    model.logits_heads = heads_of_logits(module)
    model.tensor_plan = partial(tensor_plan, name, size, classes)
    model.parts = {path: module.get_submodule(path) for path in parts}
    return model


@lru_cache(maxsize=64)
def tensor_plan(name: str, size: int, classes: int, ranks: int, pattern: str = "") -> tuple[Region, ...]:
    """Find what so many tensor-parallel ranks share of a model from elsewhere, of a size of its input.

    Raises:
        LabError: see `dlojz.models.foreign.tensor_plan.find_plan`.
    """
    origin = origin_of(name)
    with torch.random.fork_rng(devices=[]), on_meta():
        module = _made(name, size, classes).eval()
        # A configuration of transformers reads any length, and few tokens are enough; another model may have a fixed
        # one.
        tokens = None if origin.family != "text" else min(size, FEW_TOKENS) if name.startswith("hf:") else size
        side = size if origin.family == "image" else None
        inputs = sample_inputs(name, 1, image_size=side, sequence_length=tokens)

    def run() -> None:
        with torch.enable_grad(), on_meta():
            run_on(module, inputs)

    return find_plan(name, module, _parts(name, size, classes), run, ranks, pattern, origin.tp_plan)


def _made(name: str, size: int, classes: int) -> nn.Module:
    make = origin_of(name).make
    return built(name, lambda: make(size, classes))


def _on_meta(name: str, size: int, classes: int) -> tuple[nn.Module, Tensor]:
    """Build a module on the meta device, in evaluation mode, and an input of two samples."""
    side, tokens = (size, None) if origin_of(name).family == "image" else (None, size)
    with torch.random.fork_rng(devices=[]), on_meta():
        module = _made(name, size, classes).eval()
        for parameter in module.parameters():  # frozen ones too: `shape_tracing` sees by gradients what reads values
            parameter.requires_grad_(parameter.is_floating_point())
        return module, sample_inputs(name, 2, image_size=side, sequence_length=tokens)


@lru_cache(maxsize=64)
def _parts(name: str, size: int, classes: int) -> tuple[str, ...]:
    """Paths of the repeated parts that forward calls once each, in that order; found on the meta device.

    Raises:
        LabError: if the module cannot be built or run there, or gives other than one number per class.
    """
    family, loss = origin_of(name).family, origin_of(name).loss
    order: list[str] = []
    with torch.random.fork_rng(devices=[]), on_meta():
        module = _made(name, size, classes)
        # The order of the calls; a part that is called twice, or never, is no block (see the end).
        for path in repeated_parts(module):
            module.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: order.append(path))
        side, tokens = size if family == "image" else None, size if family == "text" else None
        inputs = sample_inputs(name, 2, image_size=side, sequence_length=tokens)
        with said_when_slow(name, tokens):
            output = tried_on_meta(name, module, inputs)
        logits_shape = (*targets_shape(name, 2, tokens), classes)
        if loss is not None:
            check_loss(name, loss, output, torch.zeros(logits_shape[:-1], dtype=torch.long))
        # More logits than classes are allowed, as of a padded vocabulary; fewer are not.
        elif output.shape[:-1] != logits_shape[:-1] or output.shape[-1] < classes:
            raise not_logits(name, tuple(output.shape), logits_shape)
    times = Counter(order)
    return tuple(path for path in order if times[path] == 1)


def repeated_parts(module: nn.Module) -> list[str]:
    """Find the parts of a module that repeat: its blocks, such as a transformer's or the residual blocks of a ResNet.

    A block has children and weights of its own, stands in a container (`nn.Sequential`, `nn.ModuleList`,
    `nn.ModuleDict`), and is of a class of which two neighbours there have the same shapes, else of one that repeats
    there. The outermost ones are taken. One that shares a weight with something outside is none. Where no container has
    any, the attributes of a module are taken as one (timm's RegNets: `s1.b1`, `s1.b2`).

    Returns:
        Their paths, in the order of the module; none where nothing repeats.
    """
    return _repeated_in(module, CONTAINERS) or _repeated_in(module, (nn.Module,))


def _repeated_in(module: nn.Module, containers: tuple[type[nn.Module], ...]) -> list[str]:
    # Of each module, the children that can be blocks.
    kinds = [(parent, [part for part in parent.children() if _can_be_block(part)]) for parent in module.modules()]
    siblings = [parts for parent, parts in kinds if isinstance(parent, containers)]
    # (containers themselves?, of the same shapes?): the strictest first.
    for plain, shaped in ((False, True), (True, True), (False, False)):
        repeats: Counter[Any] = Counter()
        for parts in siblings:
            counts = Counter((type(part), _shapes(part) if shaped else ()) for part in parts)
            repeats.update({kind: count for (kind, _), count in counts.items() if count > 1})
        classes = {kind for kind in repeats if plain or not issubclass(kind, CONTAINERS)}
        paths = [path for path, part in _outermost(module, classes, containers) if _is_separate(module, path, part)]
        if len(paths) > 1:
            return paths
    return []


def _can_be_block(part: nn.Module) -> bool:
    return any(True for _ in part.children()) and any(True for _ in part.parameters())


def _shapes(part: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, parameter.shape) for name, parameter in part.named_parameters())


def _outermost(
    module: nn.Module, classes: set[type], containers: tuple[type[nn.Module], ...], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_children():
        full_path = f"{path}.{name}".lstrip(".")
        if isinstance(module, containers) and type(part) in classes and _can_be_block(part):
            yield full_path, part
        else:
            yield from _outermost(part, classes, containers, full_path)


def _is_separate(module: nn.Module, path: str, part: nn.Module) -> bool:
    """Whether all names of a part's parameters are within it."""
    part_ids = {id(parameter) for parameter in part.parameters()}
    names = (name for name, parameter in module.named_parameters(remove_duplicate=False) if id(parameter) in part_ids)
    return all(name.startswith(f"{path}.") for name in names)
