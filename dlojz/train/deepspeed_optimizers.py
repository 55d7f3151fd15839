"""The `optimizer` section of DeepSpeed's JSON file, in the words of a `RunConfig`.

Layer 3. Invariant: an optimizer that is accepted updates exactly as the lab's optimizer of that name; rates that the
lab fixes are accepted with that value only.

Source: deepspeed.ai, "DeepSpeed Configuration JSON", section Optimizer; DeepSpeed 0.19 `runtime/engine.py`,
`_configure_basic_optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlojz.schema import LabError, one_of
from dlojz.text import say

OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw", "SGD": "sgd", "Lamb": "lamb"}
"""DeepSpeed's names, matched whatever the case. Its `Adam` decouples weight decay unless told otherwise: AdamW."""
NOT_IN_THE_LAB = (
    "Adagrad",
    "Lion",
    "Muon",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
)
"""Optimizers that DeepSpeed has, or had, and the lab has not."""
WHOLE_LAYERS = ("Lamb", "OneBitLamb", "OneBitAdam", "ZeroOneAdam")
"""Optimizers that need whole layers (their norms, or their errors of compression), which no rank of ZeRO has."""
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "bias_correction": True, "amsgrad": False}
_FIXED: dict[str, dict[str, Any]] = {
    "adamw": {**_ADAM, "adam_w_mode": True},
    "lamb": {**_ADAM, "max_coeff": 10.0, "min_coeff": 0.01},
    "sgd": {"dampening": 0, "nesterov": False},
}
_HARMLESS = ("torch_adam", "foreach", "fused")
"""How the same update is computed."""


def optimizer_fields(section: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Fields of `RunConfig` for an `optimizer` section.

    Args:
        section: with `type` and `params`, whose types were checked.
        stage: ZeRO stage.

    Raises:
        LabError: for an optimizer that does not exist, that ZeRO cannot shard, or that the lab has not; for a rate
            that is unknown or that the lab fixes otherwise.
    """
    named = section.get("type")
    known = {name.lower(): name for name in (*OPTIMIZERS, *NOT_IN_THE_LAB)}
    name = known.get(str(named).lower())
    if named is None or name is None:
        raise LabError(one_of("optimizer.type", named, OPTIMIZERS))
    if stage and name in WHOLE_LAYERS:
        raise LabError(
            say(
                en=f"optimizer {name} needs whole layers, and ZeRO-{stage} gives each rank a flat share that cuts "
                "through them, so it cannot be sharded: use AdamW, or stage 0.",
                fr=f"l’optimiseur {name} a besoin de couches entières, or ZeRO-{stage} donne à chaque rang une part "
                "à plat qui les coupe : il ne peut pas être découpé. Prenez AdamW, ou stage 0.",
            )
        )
    if name in NOT_IN_THE_LAB:
        raise LabError(
            say(
                en=f"optimizer {name} is DeepSpeed's and not one of the lab's: use {', '.join(OPTIMIZERS)}.",
                fr=f"l’optimiseur {name} existe dans DeepSpeed mais pas dans le TP : prenez {', '.join(OPTIMIZERS)}.",
            )
        )
    rule = OPTIMIZERS[name]
    given = {"optimizer": rule}
    for key, value in section.get("params", {}).items():
        given |= _rate(rule, key, value)
    return given


def _rate(rule: str, key: str, value: Any) -> dict[str, Any]:
    """One entry of `params`."""
    own = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    if value == "auto" or (key in (*own, "momentum") and (isinstance(value, bool) or not _is_number(value))):
        raise LabError(
            say(
                en=f"optimizer.params.{key} must be a number, but {value!r} was received.",
                fr=f"optimizer.params.{key} doit être un nombre, mais {value!r} a été reçu.",
            )
        )
    if key in own:
        return {own[key]: value}
    if key == "momentum" and rule == "sgd":
        if value in (0, 0.9):
            return {"optimizer": "momentum" if value else "sgd"}
        raise _fixed("momentum", value, "0 / 0.9")
    if key in _HARMLESS:
        return {}
    fixed = _FIXED[rule]
    if key not in fixed:
        raise LabError(one_of("optimizer.params key", key, [*own, *fixed, *(["momentum"] if rule == "sgd" else [])]))
    if value != fixed[key]:
        raise _fixed(key, value, fixed[key])
    return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _fixed(key: str, value: Any, fixed: Any) -> LabError:
    return LabError(
        say(
            en=f"optimizer.params.{key} is {fixed} in the lab, but {value!r} was received: write {fixed}, or leave it "
            "out.",
            fr=f"optimizer.params.{key} vaut {fixed} dans le TP, mais {value!r} a été reçu : écrivez {fixed}, ou "
            "retirez-le.",
        )
    )
