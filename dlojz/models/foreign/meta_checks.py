"""Checks on the meta device: build and run a module there, or refuse it with the line at which it fails."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, integer, say
from dlojz.models.foreign.example import Batch, run_on, shapes_text
from dlojz.models.foreign.names import is_elsewhere, shown_name

TEXTS = Sentences(Path(__file__).parent / "data" / "meta_checks.md")

Built = TypeVar("Built")
SLOW_S = 10.0
_OF_A_PACKAGE = ("hf:", "timm:", "torchvision:")
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[2])


def built(name: str, build: Callable[[], Built]) -> Built:
    """Build a module (or its configuration), or refuse it with the line at which its builder fails.

    A builder that reads the values of tensors of its own (torchvision's RegNets compute their widths so) cannot run on
    the meta device: there it runs again with tensors on the CPU, of which each parameter goes to the meta device as
    soon as a module has it, or, if the builder reads parameters too, in the end.
    """
    is_meta = torch.get_default_device().type == "meta"
    try:
        return moved_to_meta(build()) if is_meta else build()
    except LabError:
        raise
    except Exception as error:
        if not _needs_values(error) or not is_meta:
            raise not_built(name, error) from error
    # Functions of torch pass by the modes of `on_meta` here: neither on the meta device, nor without initial values.
    with torch._C.DisableTorchFunction():
        try:
            with patch.object(nn.Module, "register_parameter", _register_on_meta):
                return moved_to_meta(build())
        except Exception as error:
            if not _needs_values(error):
                raise not_built(name, error) from error
        try:
            return moved_to_meta(build())
        except Exception as error:
            raise not_built(name, error) from error


def _needs_values(error: Exception) -> bool:
    return "meta" in str(error).lower()  # torch's errors name the device


def _without_values(tensor: Tensor) -> Tensor:
    meta_tensor = torch.empty_like(tensor, device="meta")
    return (
        nn.Parameter(meta_tensor, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else meta_tensor
    )


_register = nn.Module.register_parameter  # before `built` patches it


def _register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    on_cpu = parameter is not None and parameter.device.type == "cpu"
    _register(
        module, name, cast(nn.Parameter, _without_values(parameter)) if on_cpu and parameter is not None else parameter
    )


def moved_to_meta(module: Built) -> Built:
    """Put the parameters and buffers of a module on the meta device, each once, so that shared ones stay shared."""
    meta_tensors: dict[int, Tensor] = {}
    for part in module.modules() if isinstance(module, nn.Module) else ():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device.type != "meta":
                    tensors[name] = meta_tensors.setdefault(id(tensor), _without_values(tensor))  # type: ignore[assignment]
    return module


def not_built(name: str, error: Exception) -> LabError:
    """Make the refusal of a module whose builder fails."""
    key = "refusal without memory" if _needs_values(error) else "refusal"
    return TEXTS.refusal("not built", key, name=name, error=error_with_line(error), end=_end(name))


def _end(name: str) -> str:
    """End a refusal with the way out, but of what is a file or a module of one's own already."""
    return say(en=f"; {own_file()}", fr=f" ; {own_file()}") if name.startswith(_OF_A_PACKAGE) else ""


def own_file() -> str:
    """Say what to do with a model of a package that is not predicted by its name: name it in a file of one's own."""
    return TEXTS.say("ways out", "own file")


def way_out() -> str:
    """Say how a part or a version of a model that is refused is predicted all the same: in a file of one's own."""
    return TEXTS.say("ways out", "part or version")


@contextmanager
def said_when_slow(name: str, tokens: int | None) -> Iterator[None]:
    """Say on standard error what takes longer than `SLOW_S` seconds and what shortens it, once for each length.

    Args:
        name: Of a model that is run without memory here.
        tokens: Per sample; None of images.
    """
    text = TEXTS.say("traced", "slow", name=shown_name(name), tokens=integer(tokens or 0))
    timer = Timer(SLOW_S, _say_once, (text,))
    timer.daemon = True  # must not keep the process alive
    # Only a sequence can be shortened, and the catalogue's models are fast.
    if tokens and is_elsewhere(name):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
            texts = {"error": error_with_line(error), "way": way_out()}
            raise TEXTS.refusal("traced", "depends on values", name=name, **texts) from error
        texts = {"shapes": shapes_text(batch), "error": error_with_line(error), "end": _end(name)}
        raise TEXTS.refusal("traced", "does not run", name=name, **texts) from error
    return output


def not_logits(name: str, output: object, logits_shape: tuple[int, ...] = ()) -> LabError:
    """Make the refusal of an output that the loss cannot read."""
    shape = f" {logits_shape}" if logits_shape else ""
    return TEXTS.refusal("loss", "no logits", name=name, output=output, shape=shape)


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
        shape, text = tuple(targets.shape), error_with_line(error)
        raise TEXTS.refusal("loss", "does not run", name=name, shape=shape, error=text) from error
    if not isinstance(value, Tensor) or value.dim():
        kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TEXTS.refusal("loss", "no number", name=name, kind=kind)


def error_with_line(error: BaseException) -> str:
    """Write an error in one line: its first sentence, and the innermost line outside of torch and this package."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    written = f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return written
    frames = traceback.extract_tb(error.__traceback__)
    callers = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(room) for room in _PACKAGES)]
    if not callers:
        return written
    line = f"{Path(callers[-1].filename).name}, {say(en='line', fr='ligne')} {callers[-1].lineno}: {callers[-1].line}"
    return f"{written} ({line})"
