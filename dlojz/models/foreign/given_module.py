"""Modules given in Python, named like models from elsewhere: `module:CLASS-1`, in this process alone.

A module is copied without its memory, so that the caller's stays as it is, whatever is done to it later.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dlojz.base.language import say
from dlojz.models.foreign.elsewhere import CHAIN, is_own_file
from dlojz.models.foreign.example import check_batch
from dlojz.models.foreign.meta_checks import built
from dlojz.models.foreign.sources import given_origins, origin_of_batch


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
