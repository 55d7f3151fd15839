"""Checks on the meta device: build and run a module there, or refuse it with the line at which it fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say
from dlojz.models.foreign.example import Batch, run_on, shapes_text

Built = TypeVar("Built")
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[2])


def built(name: str, build: Callable[[], Built]) -> Built:
    """Build a module (or its configuration), or refuse it with the line at which its builder fails."""
    try:
        return build()
    except Exception as error:
        raise not_built(name, error) from error


def not_built(name: str, error: Exception) -> LabError:
    """Make the refusal of a module whose builder fails."""
    needs_values = "meta" in str(error).lower()
    how = say(en=" without memory, as every model is first", fr=" sans mémoire, comme l’est d’abord tout modèle")
    return refusal(
        en=f"{name} cannot be built{how if needs_values else ''}: {error_with_line(error)}",
        fr=f"{name} ne peut pas être construit{how if needs_values else ''} : {error_with_line(error)}",
    )


def tried_on_meta(name: str, module: nn.Module, batch: Batch) -> Any:
    """Run a module on the meta device; returns its output.

    Raises:
        LabError: if it does not run.
    """
    try:
        with torch.no_grad():
            output = run_on(module.to("meta").eval(), batch)
    except Exception as error:
        if "meta tensor" in str(error).lower():
            raise refusal(
                en=f"the forward pass of {name} depends on the values of its data, so that it cannot be predicted: "
                f"{error_with_line(error)}",
                fr=f"la passe avant de {name} dépend des valeurs de ses données, et ne peut donc pas être prédite : "
                f"{error_with_line(error)}",
            ) from error
        raise refusal(
            en=f"{name} does not run on inputs of shape {shapes_text(batch)}: {error_with_line(error)}",
            fr=f"{name} ne s’exécute pas sur des entrées de forme {shapes_text(batch)} : {error_with_line(error)}",
        ) from error
    return output


def not_logits(name: str, given: object, needed: tuple[int, ...] = ()) -> LabError:
    """Make the refusal of an output that the loss cannot read."""
    shape = f" {needed}" if needed else ""
    return refusal(
        en=f"{name} gives {given}, but the loss needs one tensor of logits{shape}: return the logits alone, one for "
        "each class of the data, or write loss(output, targets) in your file.",
        fr=f"{name} donne {given}, mais la loss demande un seul tenseur de logits{shape} : renvoyez les logits seuls, "
        "un par classe des données, ou écrivez loss(output, targets) dans votre fichier.",
    )


def check_loss(name: str, loss: Callable[[Any, Tensor], Tensor], output: Any, targets: Tensor) -> None:
    """Refuse a loss of one's own file that does not read the output and the targets, or gives other than one number.

    Args:
        name: Of the model.
        loss: `loss(output, targets)` of its file.
        output: Of the module.
        targets: Class numbers, one for each image or token.
    """
    try:
        value = loss(output, targets)
    except Exception as error:
        raise refusal(
            en=f"loss(output, targets) of {name} does not run on targets of shape {tuple(targets.shape)}: "
            f"{error_with_line(error)}",
            fr=f"loss(output, targets) de {name} ne s’exécute pas sur des cibles de forme {tuple(targets.shape)} : "
            f"{error_with_line(error)}",
        ) from error
    if not isinstance(value, Tensor) or value.dim():
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise refusal(
            en=f"loss(output, targets) of {name} gives {given}: a tensor with one number, the mean, is needed.",
            fr=f"loss(output, targets) de {name} donne {given} : il faut un tenseur d’un seul nombre, la moyenne.",
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
