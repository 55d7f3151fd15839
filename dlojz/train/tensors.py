"""Which tensor-parallel runs an engine of this version can do: asked before any process is started.

Layer 3. Invariant: what passes here is built by `engines.build` without another question. torch is loaded only where a
pattern has to be held against the names of a model's parts, or a device asked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dlojz.config import RunConfig
from dlojz.pipeline.executable import ASYNCHRONOUS
from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.models.blocks import BlockList

NOT_TORCHS = ("stem", "convolution")
"""Parts that the lab splits and torch does not: it has no style for convolutions."""


def check_tensor(config: RunConfig) -> None:
    """Refuse a run with tp > 1 that can be predicted but not run.

    Raises:
        LabError: in one sentence that names what runs.
    """
    layout = config.layout
    if layout.engine == "deepspeed":
        raise LabError(
            say(
                en=f"tp={layout.tp} is not run with engine 'deepspeed', which trains no tensor-parallel layers of its "
                "own: use engine='by_hand' or 'torch', or tp=1.",
                fr=f"tp={layout.tp} ne s’exécute pas avec engine='deepspeed', qui n’entraîne pas lui-même de couches "
                "Tensor Parallel : prenez engine='by_hand' ou 'torch', ou tp=1.",
            )
        )
    if layout.schedule in ASYNCHRONOUS:
        raise LabError(
            say(
                en=f"tp={layout.tp} is not run in the asynchronous pipeline {layout.schedule}: use a synchronous "
                "schedule such as 1f1b, or tp=1.",
                fr=f"tp={layout.tp} ne s’exécute pas dans le pipeline asynchrone {layout.schedule} : prenez un "
                "ordonnancement synchrone tel que 1f1b, ou tp=1.",
            )
        )
    if layout.async_tensor_parallel:
        _check_overlap(config)
    if layout.tensor_parts:
        _check_parts(config)


def torch_parts(model: BlockList, pattern: str = "") -> set[str]:
    """Names of the parts that engine torch splits: those that match, but for convolutions.

    Args:
        model: the whole model.
        pattern: regular expression, as in `dlojz.tensor.split.split_model`; by default everything.

    Raises:
        LabError: if none is left; the sentence names some that could be.
    """
    from dlojz.tensor.split import parts_of

    names = [name for name in parts_of(model) if not name.endswith(NOT_TORCHS)]
    chosen = {name for name in names if re.search(pattern, name)}
    if not chosen:
        of = type(model).__name__
        raise LabError(
            say(
                en=f"engine 'torch' splits no part of {of} that matches {pattern!r}: it can split {_some(names)}; "
                "convolutions are split by engine='by_hand' alone.",
                fr=f"engine='torch' ne découpe aucune partie de {of} qui corresponde à {pattern!r} : il sait découper "
                f"{_some(names)} ; seul engine='by_hand' découpe les convolutions.",
            )
        )
    return chosen


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, …, {names[-1]}"


def _check_parts(config: RunConfig) -> None:
    from dlojz.predict.shapes import build_on_meta
    from dlojz.tensor.axis import TensorAxis
    from dlojz.tensor.split import split_model

    model = build_on_meta(config.model, config.image_size, config.sequence_length, config.num_classes)
    layout = config.layout
    if layout.engine == "torch":
        torch_parts(model, layout.tensor_parts)
    else:
        split_model(model, TensorAxis(size=layout.tp), layout.tensor_parts)


def _check_overlap(config: RunConfig) -> None:
    import torch

    tp = config.layout.tp
    enough = config.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() >= tp
    if enough and all(torch.cuda.can_device_access_peer(0, other) for other in range(1, tp)):
        return
    raise LabError(
        say(
            en=f"async_tensor_parallel needs {tp} GPUs of one node that reach each other's memory (NVLink), which are "
            "not here: leave it out.",
            fr=f"async_tensor_parallel demande {tp} GPU d’un même nœud qui accèdent à la mémoire l’un de l’autre "
            "(NVLink), et il n’y en a pas ici : retirez-le.",
        )
    )
