"""Models of timm and torchvision: what builds each, what it reads, and the loss of its kind.

**torchvision.** Classification reads a square image; GoogLeNet and Inception v3 have auxiliary heads, as `get_model`
builds them, whose losses are added. Segmentation gives a map of classes, video models read clips. Detection chooses
boxes by the values of its scores, optical flow is trained on fields of vectors, and quantized models are not trained:
these are refused. Sources: Szegedy et al. 2014 (arXiv 1409.4842), §5, for GoogLeNet's weight of 0.3; PyTorch's tutorial
"Finetuning Torchvision Models" for Inception's 0.4; torchvision 0.28, `references/segmentation/train.py`, `criterion`,
for 0.5 and for the class 255 that does not count.
"""

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, decimal, refusal
from dlojz.base.requirements import distribution_of, missing_library
from dlojz.models.catalogue import Family
from dlojz.models.foreign.example import Example
from dlojz.models.foreign.meta_checks import not_built, way_out

TEXTS = Sentences(Path(__file__).parent / "data" / "vision_packages.md")

AUXILIARY: Final = {"googlenet": 0.3, "inception_v3": 0.4}
"""Weight of an auxiliary head's loss beside that of the head."""
SEGMENTATION_AUXILIARY: Final = 0.5
NO_CLASS: Final = 255
"""Class of a pixel that does not count."""
FRAMES: Final = {"swin3d": 32}
"""Frames of a clip, by the first letters of a model's name; else 16. Source: torchvision's documentation of weights."""
USUAL_FRAMES: Final = 16


class Origin(NamedTuple):
    """Builder of a model from elsewhere, and what it reads.

    Attributes:
        make: Module for a size of its input and a number of classes (or words).
        family: As in the catalogue.
        size: Default side of the images in pixels, or tokens per sample.
        classes: Default number of classes, or words.
        loss: Mean loss of its output and the targets; None for the cross-entropy of logits.
        example: Inputs, where they are neither square images nor tokens.
        tp_plan: How tensor parallelism splits its layers, where its author says so.
        title: Its class and what is assumed of it, in words; empty where its name says all.
        has_classes: Whether its output tells `classes` apart.
    """

    make: Callable[[int, int], nn.Module]
    family: Family
    size: int
    classes: int
    loss: Callable[[Any, Tensor], Tensor] | None = None
    example: Example | None = None
    tp_plan: dict[str, str] | None = None
    title: str = ""
    has_classes: bool = True


def package_of(name: str) -> Any:
    """Import a package of models.

    Raises:
        LabError: it is missing; the sentence says what installs it.
    """
    try:
        ensure_torchvision_imports()  # timm imports torchvision
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = distribution_of(error.name or name)
        raise LabError(missing_library(missing, en=f"a model of {name}", fr=f"un modèle de {name}")) from error


def origin_of_timm(name: str) -> Origin:
    """Look a model of timm up; one that its authors have trained without a head gets one of 1,000 classes.

    Raises:
        LabError: timm has no such model.
    """
    timm = package_of("timm")
    if not timm.is_model(name):
        raise _no_such_model("timm", name, timm.list_models())
    try:
        config = timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:  # a tag that it does not have
        raise not_built(f"timm:{name}", error) from error
    side, classes = (config.input_size[-1], config.num_classes or 1000) if config else (224, 1000)

    def make(size: int, classes: int) -> nn.Module:
        # A model of a fixed input, such as a ViT with its table of positions, is built for the size.
        fixed = {"img_size": size} if config and config.fixed_input_size and size != side else {}
        return cast(nn.Module, timm.create_model(name, pretrained=False, num_classes=classes, **fixed))

    return Origin(make, "image", side, classes)


def origin_of_torchvision(name: str) -> Origin:
    """Look a model of torchvision up.

    Raises:
        LabError: torchvision has no such model, or it is of a kind that is not trained on classes.
    """
    models = package_of("torchvision").models
    kinds = {kind: models.list_models(module=getattr(models, kind)) for kind in ("segmentation", "video")}
    if name in kinds["segmentation"]:
        return _segmentation(models, name)
    if name in kinds["video"]:
        return _video(models, name)
    names = models.list_models(module=models)  # those of classification; the other kinds are in submodules
    if name not in names:
        raise _other_kind(models, name) or _no_such_model("torchvision", name, models.list_models())
    side = models.get_model_weights(name).DEFAULT.transforms.keywords["crop_size"]

    def make(size: int, classes: int) -> nn.Module:
        options: dict[str, Any] = {}
        if name.startswith("vit_"):
            options = {"image_size": size}
        elif name.startswith("maxvit"):
            options = {"input_size": (size, size)}
        elif name in AUXILIARY:
            options = {"aux_logits": True, "init_weights": False}
        return cast(nn.Module, models.get_model(name, weights=None, num_classes=classes, **options))

    loss = partial(_with_auxiliary_logits, AUXILIARY[name]) if name in AUXILIARY else None
    return Origin(make, "image", side, 1000, loss)


def about(name: str) -> str:
    """Say what a user of the package would not expect of a model, in the reader's language; empty where it is plain."""
    package, _, model = name.partition(":")
    if package == "torchvision" and model in AUXILIARY:
        return TEXTS.say("notes", "auxiliary heads", weight=decimal(AUXILIARY[model], 1))
    if package == "torchvision" and model.startswith(("fcn_", "deeplabv3_")):
        return TEXTS.say("notes", "no auxiliary head")
    config = package_of("timm").models.get_pretrained_cfg(model) if package == "timm" else None
    if config and not config.num_classes:
        return TEXTS.say("notes", "other classes")
    return ""


def _with_auxiliary_logits(weight: float, output: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of the head, and of the auxiliary heads with a weight; in evaluation there is the head alone."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, targets)
    head, *auxiliary = (logits for logits in output if logits is not None)  # the tuples begin with the head
    losses = [weight * F.cross_entropy(logits, targets) for logits in auxiliary]
    return sum(losses, F.cross_entropy(head, targets))


def _segmentation(models: Any, name: str) -> Origin:
    side = models.get_model_weights(name).DEFAULT.transforms.keywords["resize_size"]
    classes = len(models.get_model_weights(name).DEFAULT.meta["categories"])

    def make(size: int, classes: int) -> nn.Module:
        del size
        return cast(nn.Module, models.get_model(name, weights=None, weights_backbone=None, num_classes=classes))

    example = Example(torch.empty(2, 3, side, side, device="meta"), (side, side))
    return Origin(make, "tensors", 0, classes, _of_pixels, example)


def _of_pixels(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Cross-entropy of a map of classes, and of the auxiliary head's map with half the weight, if there is one."""
    loss = F.cross_entropy(output["out"], targets, ignore_index=NO_CLASS)
    if "aux" in output:
        loss = loss + SEGMENTATION_AUXILIARY * F.cross_entropy(output["aux"], targets, ignore_index=NO_CLASS)
    return loss


def _video(models: Any, name: str) -> Origin:
    weights = models.get_model_weights(name).DEFAULT
    height, width = weights.transforms.keywords["crop_size"]
    frames = next((frames for start, frames in FRAMES.items() if name.startswith(start)), USUAL_FRAMES)

    def make(size: int, classes: int) -> nn.Module:
        del size
        return cast(nn.Module, models.get_model(name, weights=None, num_classes=classes))

    example = Example(torch.empty(2, 3, frames, height, width, device="meta"), ())
    return Origin(make, "tensors", 0, len(weights.meta["categories"]), None, example)


def _other_kind(models: Any, name: str) -> LabError | None:
    """Make the refusal of a model of torchvision that is not trained on classes; None for any other name."""
    kinds = {"detection": models.detection, "optical flow": models.optical_flow, "quantized": models.quantization}
    for key, module in kinds.items():
        if name in models.list_models(module=module):
            reason = TEXTS.sentence("not predicted", key)
            return TEXTS.refusal("not predicted", "refusal", name=name, reason=reason, way=way_out())
    return None


def _no_such_model(package: str, name: str, names: list[str]) -> LabError:
    suggestions = ", ".join(f"{package}:{candidate}" for candidate in difflib.get_close_matches(name, names, n=3))
    return refusal(
        en=f"{package} has no model {name!r}" + (f": did you mean {suggestions}?" if suggestions else "."),
        fr=f"{package} n’a pas de modèle {name!r}" + (f" : peut-être {suggestions} ?" if suggestions else "."),
    )


_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
# torch drops the operators of a Library that is garbage-collected: this list keeps them alive.
_libraries: list[object] = []


def ensure_torchvision_imports() -> None:
    """Make ``import torchvision`` and ``import timm`` work; call it before either, as often as you like.

    With a CPU-only torch the extension of PyPI's torchvision does not load, its operators are not registered, and
    ``import torchvision`` stops at ``operator torchvision::nms does not exist``. Two schemas without an implementation
    are enough; the lab never calls them. Where the extension loads, nothing changes.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    if _libraries or _extension_loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        # An operator may be defined once in a process only.
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}{_SCHEMA}")
    _libraries.append(library)


def _extension_loads() -> bool:
    """Say whether torchvision's compiled operators are registered, or register now."""
    if hasattr(torch.ops.torchvision, "nms"):
        return True
    described = importlib.util.find_spec("torchvision")
    if described is None or described.origin is None:
        raise ModuleNotFoundError(missing_library("torchvision"), name="torchvision")
    for extension in Path(described.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
    return hasattr(torch.ops.torchvision, "nms")
