"""Sources of models from elsewhere: timm, torchvision, and a function in one's own file.

timm's and torchvision's configurations say what a model reads; one's own file has `example_inputs()`. Weights are
random: nothing is downloaded or unpickled. One's own file is imported, and so executed, but not where a record that
names it is read (`executing_no_file`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say
from dlojz.models.catalogue import Family
from dlojz.models.foreign.elsewhere import check_execution, is_own_file
from dlojz.models.meta import on_meta

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[2])
given_origins: dict[str, Origin] = {}  # by the names of `dlojz.models.foreign.given_module`
# torch drops the operators of a Library that is garbage-collected: this list keeps it alive.
_libraries: list[object] = []


class Origin(NamedTuple):
    """Builder of a model from elsewhere, and what it reads.

    Attributes:
        make: Module for a size of its input and a number of classes (or words).
        family: As in the catalogue.
        size: Default side of the images in pixels, or tokens per sample.
        classes: Default number of classes, or words.
    """

    make: Callable[[int, int], nn.Module]
    family: Family
    size: int
    classes: int


@lru_cache(maxsize=64)
def origin_of(name: str) -> Origin:
    """Look up what makes a model from elsewhere, and what it reads.

    Raises:
        LabError: no such model, its package is missing, or its inputs are not known.
    """
    package, _, rest = name.partition(":")
    if is_own_file(name):
        return _of_file(name)
    if name in given_origins:
        return given_origins[name]
    if package == "timm":
        return _of_timm(rest)
    if package == "torchvision":
        return _of_torchvision(rest)
    raise refusal(
        en=f"unknown model {name!r}: a model from elsewhere is timm:NAME, torchvision:NAME or FILE.py:FUNCTION.",
        fr=f"modèle {name!r} inconnu : un modèle venu d’ailleurs s’écrit timm:NOM, torchvision:NOM ou "
        "FICHIER.py:FONCTION.",
    )


def _of_timm(name: str) -> Origin:
    timm = _package("timm")
    if not timm.is_model(name):
        raise _no_such_model("timm", name, timm.list_models())
    try:
        known = timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:  # a tag that it does not have
        raise _not_built(f"timm:{name}", error) from error
    side, classes = (known.input_size[-1], known.num_classes or 1000) if known else (224, 1000)

    def make(size: int, classes: int) -> nn.Module:
        fixed = {"img_size": size} if known and known.fixed_input_size and size != side else {}
        module: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, **fixed)
        return module

    return Origin(make, "image", side, classes)


def _of_torchvision(name: str) -> Origin:
    package = _package("torchvision")
    names = package.models.list_models(module=package.models)
    if name not in names:
        raise _no_such_model("torchvision", name, names)
    side = package.models.get_model_weights(name).DEFAULT.transforms.keywords["crop_size"]

    def make(size: int, classes: int) -> nn.Module:
        more: dict[str, Any] = {}
        if name.startswith("vit_"):
            more = {"image_size": size}
        elif name.startswith("maxvit"):
            more = {"input_size": (size, size)}
        elif name in ("googlenet", "inception_v3"):
            more = {"aux_logits": False, "init_weights": False}
        module: nn.Module = package.models.get_model(name, weights=None, num_classes=classes, **more)
        return module

    return Origin(make, "image", side, 1000)


def _of_file(name: str) -> Origin:
    written, _, function = name.rpartition(":")
    module = _imported(Path(written))
    build, inputs = getattr(module, function, None), getattr(module, "example_inputs", None)
    if not callable(build) or not callable(inputs):
        missing = "example_inputs" if callable(build) else function
        raise refusal(
            en=f"{written} has no function {missing}(): it needs {function}(), which returns the module, and "
            "example_inputs(), which returns a batch of images or tokens.",
            fr=f"{written} n’a pas de fonction {missing}() : il faut {function}(), qui renvoie le module, et "
            "example_inputs(), qui renvoie un batch d’images ou de tokens.",
        )
    try:
        batch = inputs()
    except Exception as error:
        raise _not_built(f"{written}:example_inputs", error) from error
    return origin_of_batch(name, f"example_inputs() {say(en='of', fr='de')} {written}", build, batch)


def origin_of_batch(name: str, source: str, build: Callable[[], nn.Module], batch: object) -> Origin:
    """Read off a batch, which `source` gave, what a module reads; refuse another batch than of images or tokens."""
    tokens = isinstance(batch, Tensor) and batch.dim() == 2 and not batch.is_floating_point()
    images = isinstance(batch, Tensor) and batch.dim() == 4 and batch.shape[1:] == (3, batch.shape[3], batch.shape[3])
    if not isinstance(batch, Tensor) or not (tokens or images):
        given = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
        raise refusal(
            en=f"{source} gives {given}: a batch of square images (N, 3, S, S) or of whole "
            "numbers (N, T) is needed.",
            fr=f"{source} donne {given} : il faut un batch d’images carrées (N, 3, S, S) ou de "
            "nombres entiers (N, T).",
        )
    with torch.random.fork_rng(devices=[]), on_meta():
        output = tried_on_meta(name, built(name, build), torch.empty_like(batch, device="meta"))
    return Origin(lambda size, classes: build(), "text" if tokens else "image", batch.shape[-1], output.shape[-1])


def _imported(path: Path) -> ModuleType:
    """Import one's own file under a separate name; its neighbours can be imported by it.

    Raises:
        LabError: there is no such file, it fails, or a record is read and this user has not executed it before.
    """
    if not path.is_file():
        raise refusal(
            en=f"the model's file {path} does not exist (in {Path.cwd()}).",
            fr=f"le fichier du modèle {path} n’existe pas (dans {Path.cwd()}).",
        )
    check_execution(path)
    described = importlib.util.spec_from_file_location(f"dlojz_own_{path.stem}", path)
    assert described is not None and described.loader is not None  # of a file that ends in .py
    module = importlib.util.module_from_spec(described)
    sys.modules[described.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        described.loader.exec_module(module)
    except Exception as error:
        raise _not_built(str(path), error) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _package(name: str) -> Any:
    try:
        ensure_torchvision_imports()  # timm imports torchvision
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise refusal(
            en=f"models of {name} need it: {error}: pip install {name}.",
            fr=f"les modèles de {name} en ont besoin : {error} : pip install {name}.",
        ) from error


def _no_such_model(package: str, name: str, names: list[str]) -> LabError:
    near = ", ".join(f"{package}:{one}" for one in difflib.get_close_matches(name, names, n=3))
    return refusal(
        en=f"{package} has no classification model {name!r}" + (f": did you mean {near}?" if near else "."),
        fr=f"{package} n’a pas de modèle de classification {name!r}" + (f" : peut-être {near} ?" if near else "."),
    )


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
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}{_SCHEMA}")
    _libraries.append(library)


def _extension_loads() -> bool:
    """Say whether torchvision's compiled operators are registered, or register now."""
    if hasattr(torch.ops.torchvision, "nms"):
        return True
    described = importlib.util.find_spec("torchvision")
    if described is None or described.origin is None:
        raise ModuleNotFoundError("torchvision is not installed: install the packages of requirements.txt.")
    for extension in Path(described.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
    return hasattr(torch.ops.torchvision, "nms")


def built(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a module, or refuse it with the line at which its builder fails."""
    try:
        return build()
    except Exception as error:
        raise _not_built(name, error) from error


def _not_built(name: str, error: Exception) -> LabError:
    needs_values = "meta" in str(error).lower()
    how = say(en=" without memory, as every model is first", fr=" sans mémoire, comme l’est d’abord tout modèle")
    return refusal(
        en=f"{name} cannot be built{how if needs_values else ''}: {error_with_line(error)}",
        fr=f"{name} ne peut pas être construit{how if needs_values else ''} : {error_with_line(error)}",
    )


def tried_on_meta(name: str, module: nn.Module, batch: Tensor) -> Tensor:
    """Run a module on the meta device.

    Raises:
        LabError: if it does not run, or gives no tensor.
    """
    try:
        with torch.no_grad():
            output = module.to("meta").eval()(batch)
    except Exception as error:
        if "meta tensor" in str(error).lower():
            raise refusal(
                en=f"the forward pass of {name} depends on the values of its data, so that it cannot be predicted: "
                f"{error_with_line(error)}",
                fr=f"la passe avant de {name} dépend des valeurs de ses données, et ne peut donc pas être prédite : "
                f"{error_with_line(error)}",
            ) from error
        raise refusal(
            en=f"{name} does not run on inputs of shape {tuple(batch.shape)}: {error_with_line(error)}",
            fr=f"{name} ne s’exécute pas sur des entrées de forme {tuple(batch.shape)} : {error_with_line(error)}",
        ) from error
    if not isinstance(output, Tensor):
        raise not_logits(name, type(output).__name__)
    return output


def not_logits(name: str, given: object, needed: tuple[int, ...] = ()) -> LabError:
    """Make the refusal of an output that the loss cannot read."""
    shape = f" {needed}" if needed else ""
    return refusal(
        en=f"{name} gives {given}, but the loss needs one tensor of logits{shape}: return the logits alone, one for "
        "each class of the data.",
        fr=f"{name} donne {given}, mais la loss demande un seul tenseur de logits{shape} : renvoyez les logits seuls, "
        "un par classe des données.",
    )


def error_with_line(error: BaseException) -> str:
    """Write an error in one line: its first sentence, and the innermost line outside of torch and this package."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    written = f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return written
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(room) for room in _PACKAGES)]
    if not own:
        return written
    where = f"{Path(own[-1].filename).name}, {say(en='line', fr='ligne')} {own[-1].lineno}: {own[-1].line}"
    return f"{written} ({where})"
