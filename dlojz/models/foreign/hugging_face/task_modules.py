"""Modules around transformers' models: one that returns logits, one that returns the loss; no value of a mask is read.

transformers reads the values of its masks to see whether they mask anything, and those of tokens to warn of padding.
On the meta device there are none: there a sample is one sequence without padding.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


class Logits(nn.Module):
    """Model of transformers that reads one tensor and returns its logits; a decoder reads the encoder's tokens too.

    Args:
        model: of transformers.
        reads: argument of its forward pass for the tensor.
        lengths: tokens of the source and of the target, where the decoder reads other ones: the first of each row.
    """

    def __init__(self, model: nn.Module, reads: str = "input_ids", lengths: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.model = model
        self._reads, self._lengths = reads, lengths

    def forward(self, x: Tensor) -> Any:
        """Tokens ``(B, T)`` or images ``(B, C, H, W)`` to logits; to two tensors where an answer's ends are found."""
        inputs = {self._reads: x, **_switches(self.model)}
        if "decoder_input_ids" in inspect.signature(self.model.forward).parameters and self._reads == "input_ids":
            source, target = self._lengths if self._lengths[1] else (x.shape[1], x.shape[1])
            # Two tensors as a collator makes them, (B, S) and (B, T); a copy where the row is longer.
            inputs |= {"input_ids": x[:, :source].contiguous(), "decoder_input_ids": x[:, :target].contiguous()}
        with without_values(not isinstance(x, Tensor) or _is_without_values(x)):  # or traced
            output = self.model(**inputs)
        if "start_logits" in output:
            return output.start_logits, output.end_logits
        return output.logits if "logits" in output else output[0]


_AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings with which a model of transformers changes its logits after its head."""


def heads_of_logits(module: nn.Module) -> tuple[nn.Linear, ...]:
    """Find the layer whose output a `Logits` returns as it is for each token; empty where there is none."""
    model: Any = getattr(module, "model", None)
    if not isinstance(module, Logits) or not hasattr(model, "get_output_embeddings"):
        return ()
    head, text = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    scaled = any(getattr(text, name, None) not in (None, 1, 1.0) for name in _AFTER_HEAD)
    # T5 with a tied head scales what the head reads, which is before it.
    return (head,) if isinstance(head, nn.Linear) and not scaled else ()


class LossOfTask(nn.Module):
    """Model of transformers that reads a batch with its labels and returns its own loss, a scalar.

    One that computes no loss gives the mean of all that it returns.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        """Names of the model's arguments to tensors; returns the loss."""
        if "return_loss" in inspect.signature(self.model.forward).parameters:
            batch = {**batch, "return_loss": cast(Any, True)}  # CLIP's kind computes a loss only if asked
        with without_values(_is_without_values(next(iter(batch.values())))):
            output = self.model(**batch, **_switches(self.model))
        loss = getattr(output, "loss", None)
        if loss is not None:
            return cast(Tensor, loss).mean()
        tensors = [tensor for tensor in output.values() if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def _is_without_values(tensor: Tensor) -> bool:
    """Tell whether a tensor has only a shape: on the meta device, or in a trace of memory."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _switches(model: nn.Module) -> dict[str, Any]:
    """Arguments of a training's forward pass: no cache of keys and values."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


class _KnownValues(TorchFunctionMode):
    """Context in which a value that a tensor without values lacks is known where the line says which it is.

    An `assert` holds, which changes nothing that is computed; nothing is padded; no layer is dropped (LayerDrop, Fan et
    al. 2020, arXiv 1909.11556), so that the step with the most memory is predicted.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.__bool__) and _is_without_values(args[0]):
            line = _line_of(sys._getframe(1))
            if line.startswith("assert "):
                # What is asserted is either a condition, which holds, or a number of which only the type is read.
                return True if args[0].dtype == torch.bool else 0
            if any(words in line for words in _NEVER):
                return False
        return func(*args, **(kwargs or {}))


_NEVER = ("self.layerdrop", "padding_mask.any()")
"""In a line of transformers: a condition that never holds here."""


def _line_of(frame: Any) -> str:
    lines, first_line = inspect.getsourcelines(frame.f_code)
    return lines[max(frame.f_lineno - max(first_line, 1), 0)].strip()


@contextmanager
def without_values(on_meta: bool) -> Iterator[None]:
    """Keep transformers from reading the values of its masks: each row is one sequence without padding.

    On the meta device a mask that the model makes itself is taken as one of ones; elsewhere it is read as always.
    """
    masks = importlib.import_module("transformers.masking_utils")
    models = importlib.import_module("transformers.modeling_utils")
    with ExitStack() as stack:
        change = partial(patch.object, create=True)
        # Packed sequences are told by the values of positions: here no row has several.
        stack.enter_context(change(masks, "find_packed_sequence_indices", lambda *_, **__: None))
        stack.enter_context(
            change(models.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_, **__: None)
        )
        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            if original := getattr(masks, name, None):
                stack.enter_context(change(masks, name, partial(_of_mask_of_ones, original)))
        if on_meta:
            stack.enter_context(patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"))
            stack.enter_context(_KnownValues())
        yield


def _of_mask_of_ones(original: Callable[..., bool], padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
    if padding_mask is not None and _is_without_values(padding_mask):
        padding_mask = None
    return original(padding_mask, *args, **kwargs)
