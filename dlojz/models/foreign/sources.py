"""Sources of models from elsewhere: timm, torchvision, a configuration of transformers, a function in one's own file.

The configurations of timm, torchvision and transformers say what a model reads; one's own file has `example_inputs()`.
Weights are random: nothing is downloaded or unpickled, and of a configuration's file nothing is executed. One's own
file is imported, and so executed, but not where a record that names it is read (`executing_no_file`).

A module given in Python is named like these, `module:CLASS-1`, in this process alone. It is copied without its memory,
so that the caller's stays as it is, whatever is done to it later.
"""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dlojz.base.language import say
from dlojz.models.foreign.elsewhere import CHAIN, Adapters, check_execution, file_of, is_own_file, target_length_of
from dlojz.models.foreign.example import Batch, Example, check_batch, family_name
from dlojz.models.foreign.hugging_face.configuration import read_configuration
from dlojz.models.foreign.meta_checks import built, not_built, not_logits, tried_on_meta
from dlojz.models.foreign.names import model_sentence
from dlojz.models.foreign.tensor_plan import check_styles
from dlojz.models.foreign.vision_packages import (
    Origin,
    ensure_torchvision_imports,
    origin_of_timm,
    origin_of_torchvision,
    package_of,
)
from dlojz.models.meta import on_meta

given_origins: dict[str, Origin] = {}
"""Modules given in Python, by their names."""


@lru_cache(maxsize=64)
def origin_of(name: str) -> Origin:
    """Look up what makes a model from elsewhere, and what it reads.

    Raises:
        LabError: no such model, its package is missing, or its inputs are not known.
    """
    package, _, model = name.partition(":")
    if is_own_file(name):
        with torch.random.fork_rng(devices=[]):  # weights are the same whether it was read before the seed or after
            return _origin_of_file(name)
    if name in given_origins:
        return given_origins[name]
    if package == "timm":
        return origin_of_timm(model)
    if package == "torchvision":
        return origin_of_torchvision(model)
    if package == "hf" and (file := file_of(name)):
        return _of_configuration(file, Adapters.of(name), target_length_of(name))
    raise model_sentence.refused("unknown model from elsewhere", name=name)


def _of_configuration(file: Path, adapters: Adapters | None, target_length: int | None) -> Origin:
    """Read a configuration of transformers as data; only architectures that transformers itself has are built."""
    package_of("transformers")
    make, family, size, classes, loss, example, title, has_classes = read_configuration(file, adapters, target_length)
    return Origin(make, family, size, classes, loss, example, title=title, has_classes=has_classes)


def _origin_of_file(name: str) -> Origin:
    written, _, function = name.rpartition(":")
    module = _imported(Path(written))
    build, inputs = getattr(module, function, None), getattr(module, "example_inputs", None)
    if not callable(build) or not callable(inputs):
        missing = "example_inputs" if callable(build) else function
        raise model_sentence.refused("file without this function", written=written, missing=missing, function=function)
    try:
        batch = inputs()
    except Exception as error:
        raise not_built(f"{written}:example_inputs", error) from error
    source = f"example_inputs() {say(en='of', fr='de')} {written}"
    return origin_of_batch(
        name, source, build, batch, *(getattr(module, attribute, None) for attribute in ("loss", "tp_plan"))
    )


def origin_of_batch(
    name: str,
    source: str,
    build: Callable[[], nn.Module],
    batch: Batch,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    tp_plan: object = None,
) -> Origin:
    """Read off a batch, which `source` gave, what a module reads; refuse what is no batch of tensors."""
    check_batch(source, batch)
    family, plan = family_name(batch), check_styles(name, tp_plan)
    with torch.random.fork_rng(devices=[]), on_meta():
        inputs = tree_map(lambda tensor: torch.empty_like(tensor, device="meta"), batch)
        module: Any = built(name, build)  # one's own function may return anything
        if not isinstance(module, nn.Module):
            result = type(module).__name__
            raise model_sentence.refused("function returns no module", name=name, result=result)
        output = tried_on_meta(name, module, inputs)
    tells_classes = isinstance(output, Tensor) and output.dim() > 1
    classes = output.shape[-1] if tells_classes else 256 if family == "text" else 10
    if loss is None and not isinstance(output, Tensor):
        raise not_logits(name, type(output).__name__)
    if family != "tensors":
        return Origin(lambda size, classes: build(), family, batch.shape[-1], classes, loss, None, plan)
    target_shape = tuple(output.shape[1:-1]) if isinstance(output, Tensor) else ()
    return Origin(
        lambda size, classes: build(), family, 0, classes, loss, Example(batch, target_shape), plan, "", tells_classes
    )


def _imported(path: Path) -> ModuleType:
    """Import one's own file under a separate name; its neighbours can be imported by it.

    Raises:
        LabError: there is no such file, it fails, or a record is read and this user has not executed it before.
    """
    if not path.is_file():
        raise model_sentence.refused("no file of a model", path=path, folder=Path.cwd())
    check_execution(path)
    with suppress(ModuleNotFoundError):
        ensure_torchvision_imports()  # for a file that imports it, or timm
    described = importlib.util.spec_from_file_location(f"dlojz_own_{path.stem}", path)
    assert described is not None and described.loader is not None  # of a file that ends in .py
    module = importlib.util.module_from_spec(described)
    sys.modules[described.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        described.loader.exec_module(module)
    except Exception as error:
        raise not_built(str(path), error) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def changes_its_model(name: str) -> bool:
    """Tell whether a name may be another model's in another process: one's own file, or a module given in Python."""
    return is_own_file(name) or name.removeprefix(CHAIN) in given_origins


def name_of_module(module: nn.Module, batch: object, tp_plan: object = None) -> tuple[str, int]:
    """Name a module, as it is now, so that it is predicted like a model from elsewhere; count the batch's samples.

    Args:
        module: On any device.
        batch: Example of its inputs: a tensor, or a tuple or dict of tensors.
        tp_plan: How tensor parallelism splits its layers (`dlojz.models.foreign.tensor_plan`); by default all it can.

    Raises:
        LabError: if it cannot be copied, or does not run on the batch.
    """
    title = type(module).__name__
    name = f"module:{title}-{len(given_origins) + 1}"
    # This copy keeps the module as it is now; each build copies it again.
    copied = _copied(module, name)
    source = say(en="the example of inputs", fr="l’exemple d’entrées")
    samples = check_batch(source, batch)
    given_origins[name] = origin_of_batch(name, source, lambda: _copied(copied, name), batch, tp_plan=tp_plan)
    return name, samples


def _copied(module: nn.Module, name: str) -> nn.Module:
    """Copy a module onto the meta device, with its shared weights, whatever its own device."""
    # `deepcopy` takes these in the place of the tensors: no weight is copied.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return built(name, lambda: copy.deepcopy(module, memo)).train()
