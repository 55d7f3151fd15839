"""What the inputs of each layer look like, seen on a few real images before their grid is fixed.

Layer 2. Invariant: the model computes what it would have computed without being watched, and is left as it was; the
held-out images are never asked.

Shape suffixes: N images, C, H, W; M rows (samples × tokens), I inputs of a layer.

Source: Nagel et al. 2021 (arXiv 2106.08295) for calibration and the choice of a range.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlojz.compress.quantizers import RangeChoice, Scheme, value_range
from dlojz.schema import LabError
from dlojz.text import say

SAMPLES = 256
"""Images that calibrate where nothing else is said."""
_BATCH = 64


def refuse_no_data() -> None:
    """Say that a static grid cannot be fixed without data.

    Raises:
        LabError: always.
    """
    raise LabError(
        say(
            en="calibration was given 0 images, but a static grid is fixed by what the layers' inputs are seen to be: "
            "give it at least one image, or choose int8_dynamic, whose grid is found anew for each row.",
            fr="le calibrage a reçu 0 image, or une grille statique se fixe d’après les entrées observées dans chaque "
            "couche : donnez-lui au moins une image, ou choisissez int8_dynamic, dont la grille est retrouvée à "
            "chaque ligne.",
        )
    )


@dataclass(frozen=True)
class Observed:
    """The inputs that one layer was seen to have.

    Args:
        inputs_MI: all of them, a row per sample and token.
    """

    inputs_MI: Tensor

    def range(self, scheme: Scheme, choice: RangeChoice = "min_max") -> tuple[Tensor, Tensor]:
        """Lowest and highest value that a grid shared by all inputs should hold, ``(1, 1)`` each."""
        return value_range(self.inputs_MI.reshape(1, -1), scheme, choice)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model, by the path of their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def observe(model: nn.Module, images_NCHW: Tensor | None, names: Iterable[str] | None = None) -> dict[str, Observed]:
    """Run images through a model and keep what enters its layers, by hooks that are taken off again.

    Args:
        model: watched in evaluation mode, whatever the mode that it comes in and is left in.
        images_NCHW: what it is shown; all inputs are kept in memory, so a few hundred images are plenty.
        names: of the layers to watch; all linear ones without it.

    Raises:
        LabError: without images.
    """
    if images_NCHW is None or len(images_NCHW) == 0:
        refuse_no_data()
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module) -> Any:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.setdefault(name, []).append(inputs[0].detach().flatten(0, -2))

        return module.register_forward_pre_hook(keep)

    watched = linear_layers(model) if names is None else {name: model.get_submodule(name) for name in names}
    hooks = [watch(name, module) for name, module in watched.items()]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for batch_BCHW in images_NCHW.split(_BATCH):  # type: ignore[union-attr]
            model(batch_BCHW)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return {name: Observed(torch.cat(rows)) for name, rows in seen.items()}
