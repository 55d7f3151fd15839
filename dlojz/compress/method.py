"""What a method is: it gets a `Start`, a trained teacher and a task, and gives a `Shrunk`, a smaller model.

Layer 2. Invariant: a method does not change the teacher; an option that it does not have is refused. Importing this
loads no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dlojz.schema import LabError, one_of
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.fitting import Progress
    from dlojz.compress.task import Task

Family = Literal["distillation", "quantization", "pruning"]

TIMED_IMAGES = 64
"""Images of an answer that is timed: from 16 on an image takes vit_tiny no longer than among more, so that arithmetic
is measured and not the calls; a latency of one image is mostly calls."""


@dataclass(frozen=True)
class Start:
    """Where a method starts from.

    Args:
        teacher: trained, in evaluation mode; it is not changed.
        teacher_name: in the catalogue of models.
        task: what it was trained for.
        seed: of whatever is drawn.
        options: of the method, by name, over its defaults.
        progress: told as long work goes on.
        timed_images: of an answer that will be timed, for which a method foresees how long it takes.
    """

    teacher: nn.Module
    teacher_name: str
    task: Task
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None
    timed_images: int = TIMED_IMAGES

    @property
    def timed_batch(self) -> Tensor:
        """The images of that answer."""
        return self.task.held_out_NCHW[: self.timed_images]


@dataclass(frozen=True)
class LayerError:
    """How far one layer of a smaller model is from the teacher's.

    Args:
        name: of the layer.
        predicted_sqnr_db: signal to noise in decibels, foreseen before it was computed; None where nothing foresees
            it.
        measured_sqnr_db: the same, measured.
        bits: of a weight.
    """

    name: str
    predicted_sqnr_db: float | None
    measured_sqnr_db: float
    bits: float


@dataclass(frozen=True)
class Shrunk:
    """What a method gives.

    Args:
        model: what answers, in evaluation mode.
        stored: the tensors that a file keeps of it.
        predicted_bytes: of these tensors, from shapes and settings alone, before anything was computed.
        parameters: weights that are left, zeros not counted.
        layer_errors: layer by layer, where the method keeps the teacher's layers.
        notes: what a reader must know of it, a sentence each.
        predicted_latency_ratio: seconds of an answer over the teacher's, foreseen before the model was timed; None
            where nothing foresees it.
    """

    model: nn.Module
    stored: Mapping[str, Tensor]
    predicted_bytes: int
    parameters: int
    layer_errors: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()
    predicted_latency_ratio: float | None = None


@dataclass(frozen=True)
class Method:
    """One way to make a model small.

    Args:
        name: on the command line and in the tables.
        family: what kind of way it is.
        function: `module:function` of `dlojz.compress`, from a `Start` to a `Shrunk`.
        summary: in one line, in the reader's language.
        options: its options with their defaults.
        needs: packages that it imports and that may be missing, with `==` and a version where only that one will do.
    """

    name: str
    family: Family
    function: str
    summary: Callable[[], str]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """The sentence that says which package it lacks here, and the command that installs it; None if it has all."""
        for need in self.needs:
            package = need.partition("==")[0]
            if importlib.util.find_spec(package) is None:
                return say(
                    en=f"the method {self.name} needs {package}, which is not installed: pip install {need}.",
                    fr=f"la méthode {self.name} demande {package}, qui n’est pas installé : pip install {need}.",
                )
        return None

    def check_options(self, given: Iterable[str]) -> None:
        """Refuse a name that is no option of this method.

        Raises:
            LabError: the sentence lists those that it has.
        """
        for name in given:
            if not self.options:
                raise LabError(
                    say(
                        en=f"{self.name} has no options, but {name!r} was received: leave it out.",
                        fr=f"{self.name} n’a pas d’option, mais {name!r} a été reçu : retirez-la.",
                    )
                )
            if name not in self.options:
                raise LabError(
                    one_of(say(en=f"option of {self.name}", fr=f"option de {self.name}"), name, self.options)
                )

    def __call__(self, start: Start) -> Shrunk:
        """Apply it.

        Raises:
            LabError: if an option is unknown or illegal, or a package is missing.
        """
        lacking = self.missing()
        if lacking is not None:
            raise LabError(lacking)
        self.check_options(start.options)
        module, _, function = self.function.partition(":")
        apply = getattr(importlib.import_module(f"dlojz.compress.{module}"), function)
        shrunk: Shrunk = apply(start, **{**self.options, **start.options})
        return shrunk
