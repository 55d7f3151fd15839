"""Sources of models from elsewhere: timm, torchvision, a configuration of transformers, a function in one's own file.

The configurations of timm, torchvision and transformers say what a model reads; one's own file has `example_inputs()`.
Weights are random: nothing is downloaded or unpickled, and of a configuration's file nothing is executed. One's own
file is imported, and so executed, but not where a record that names it is read (`executing_no_file`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say
from dlojz.models.catalogue import Family
from dlojz.models.foreign.elsewhere import check_execution, file_of, is_own_file
from dlojz.models.foreign.example import Batch, Example, check_batch, family_name
from dlojz.models.foreign.meta_checks import built, not_built, not_logits, tried_on_meta
from dlojz.models.foreign.missing_operators import ensure_grouped_products_on_meta, ensure_torchvision_imports
from dlojz.models.foreign.tensor_plan import check_styles
from dlojz.models.meta import on_meta

given_origins: dict[str, Origin] = {}  # by the names of `dlojz.models.foreign.given_module`
MAX_DEFAULT_TOKENS = 2048
"""Default tokens per sample of a configuration whose model can read more."""
_TASKS = ("Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification")
_IGNORED = ("auto_map", "quantization_config", "attn_implementation", "experts_implementation", "dtype", "torch_dtype")
"""Keys of a configuration that name code, or other weights than fp32 ones."""


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
    """

    make: Callable[[int, int], nn.Module]
    family: Family
    size: int
    classes: int
    loss: Callable[[Any, Tensor], Tensor] | None = None
    example: Example | None = None
    tp_plan: dict[str, str] | None = None


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
    if package == "hf" and (file := file_of(name)):
        return _of_configuration(file)
    raise refusal(
        en=f"unknown model {name!r}: a model from elsewhere is timm:NAME, torchvision:NAME, hf:FOLDER (or its "
        "config.json) or FILE.py:FUNCTION.",
        fr=f"modèle {name!r} inconnu : un modèle venu d’ailleurs s’écrit timm:NOM, torchvision:NOM, hf:DOSSIER (ou "
        "son config.json) ou FICHIER.py:FONCTION.",
    )


def _of_timm(name: str) -> Origin:
    timm = _package("timm")
    if not timm.is_model(name):
        raise _no_such_model("timm", name, timm.list_models())
    try:
        known = timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:  # a tag that it does not have
        raise not_built(f"timm:{name}", error) from error
    side, classes = (known.input_size[-1], known.num_classes or 1000) if known else (224, 1000)

    def make(size: int, classes: int) -> nn.Module:
        fixed = {"img_size": size} if known and known.fixed_input_size and size != side else {}
        return cast(nn.Module, timm.create_model(name, pretrained=False, num_classes=classes, **fixed))

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
        return cast(nn.Module, package.models.get_model(name, weights=None, num_classes=classes, **more))

    return Origin(make, "image", side, 1000)


class Logits(nn.Module):
    """Model of transformers that reads one tensor and returns its logits; a decoder reads the encoder's tokens too."""

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``(B, T)`` or images ``(B, C, H, W)`` to logits."""
        read = {"pixel_values" if self._task == "ImageClassification" else "input_ids": x}
        more: dict[str, dict[str, Any]] = {
            "Seq2SeqLM": {"decoder_input_ids": x, "use_cache": False},
            "CausalLM": {"use_cache": False},
        }
        masks = importlib.import_module("transformers.masking_utils")
        # Each row is one sequence; transformers would look for several at the values of the positions.
        with patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None, create=True):
            logits: Tensor = self.model(**read, **more.get(self._task, {})).logits
        return logits


def _of_configuration(file: Path) -> Origin:
    """Read a configuration of transformers as data; only architectures that transformers itself has are built."""
    transformers = _package("transformers")
    transformers.utils.logging.set_verbosity_error()
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        kind = given["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise refusal(
            en=f"{file} is no configuration of transformers, a JSON file with a model_type: {why}.",
            fr=f"{file} n’est pas une configuration de transformers, un fichier JSON avec un model_type : {why}.",
        ) from error
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        known = list(transformers.CONFIG_MAPPING)
        near = ", ".join(difflib.get_close_matches(str(kind), known, n=3))
        version = transformers.__version__
        raise refusal(
            en=f"transformers {version} does not know the architecture {kind!r} of {file}"
            + (f": did you mean {near}?" if near else f" among its {len(known)}; code beside it is never executed."),
            fr=f"transformers {version} ne connaît pas l’architecture {kind!r} de {file}"
            + (f" : peut-être {near} ?" if near else f" parmi ses {len(known)} ; son propre code n’est pas exécuté."),
        )

    def configured() -> Any:
        return transformers.CONFIG_MAPPING[kind](**_plain(given))

    config = built(str(file), configured)
    autos = {task: getattr(transformers, f"AutoModelFor{task}") for task in _TASKS}
    task = next((task for task, auto in autos.items() if type(config) in auto._model_mapping), None)
    if task is None:
        raise refusal(
            en=f"transformers builds no model of text or of image classes from {file} ({kind}).",
            fr=f"transformers ne construit pas de modèle de texte ou de classes d’images à partir de {file} ({kind}).",
        )
    image, text = task == "ImageClassification", config.get_text_config()

    def make(size: int, classes: int) -> nn.Module:
        ensure_grouped_products_on_meta()
        config = configured()
        if image:
            config.num_labels, config.image_size = classes, size
        else:
            text = config.get_text_config()
            text.vocab_size = classes
            if getattr(text, "max_position_embeddings", size) < size:
                text.max_position_embeddings = size
        return Logits(autos[task].from_config(config, dtype=torch.float32, trust_remote_code=False), task)

    if image:
        return Origin(make, "image", getattr(config, "image_size", None) or 224, config.num_labels)
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 512
    return Origin(make, "text", min(positions, MAX_DEFAULT_TOKENS), text.vocab_size)


def _plain(given: Any) -> Any:
    """Copy a configuration without the keys that name code."""
    if isinstance(given, dict):
        return {key: _plain(one) for key, one in given.items() if key not in _IGNORED and not key.startswith("_")}
    return [_plain(one) for one in given] if isinstance(given, list) else given


def _of_file(name: str) -> Origin:
    written, _, function = name.rpartition(":")
    module = _imported(Path(written))
    build, inputs = getattr(module, function, None), getattr(module, "example_inputs", None)
    if not callable(build) or not callable(inputs):
        missing = "example_inputs" if callable(build) else function
        raise refusal(
            en=f"{written} has no function {missing}(): it needs {function}(), which returns the module, and "
            "example_inputs(), which returns a batch of its inputs (and, if it returns no logits, "
            "loss(output, targets)).",
            fr=f"{written} n’a pas de fonction {missing}() : il faut {function}(), qui renvoie le module, et "
            "example_inputs(), qui renvoie un batch de ses entrées (et, s’il ne renvoie pas de logits, "
            "loss(output, targets)).",
        )
    try:
        batch = inputs()
    except Exception as error:
        raise not_built(f"{written}:example_inputs", error) from error
    source = f"example_inputs() {say(en='of', fr='de')} {written}"
    return origin_of_batch(name, source, build, batch, *(getattr(module, one, None) for one in ("loss", "tp_plan")))


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
        inputs = tree_map(lambda one: torch.empty_like(one, device="meta"), batch)
        output = tried_on_meta(name, built(name, build), inputs)
    classes = output.shape[-1] if isinstance(output, Tensor) and output.dim() > 1 else 256 if family == "text" else 10
    if loss is None and not isinstance(output, Tensor):
        raise not_logits(name, type(output).__name__)
    if family != "tensors":
        return Origin(lambda size, classes: build(), family, batch.shape[-1], classes, loss, None, plan)
    places = tuple(output.shape[1:-1]) if isinstance(output, Tensor) else ()
    return Origin(lambda size, classes: build(), family, 0, classes, loss, Example(batch, places), plan)


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
        raise not_built(str(path), error) from error
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
