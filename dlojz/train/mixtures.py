"""Models with a mixture of experts: which layouts train them, and what their experts were given in each step.

Layer 3, loads no torch by itself. Invariant: what is refused here can be predicted, though no engine runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlojz.config import RunConfig
from dlojz.record import EventLog
from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

    from dlojz.train.engines.base import Engine

EVERYWHERE = ("adamw", "momentum", "sgd")
"""Optimizers that see each number by itself, so that a share of the experts is updated as in the whole."""


def check_mixture(config: RunConfig) -> None:
    """Refuse a run of a model with experts that no engine trains.

    Raises:
        LabError: naming what stands in the way, and what runs.
    """
    layout = config.layout
    if layout.pp > 1:
        _refuse(
            en=f"no pipeline trains a mixture of experts yet, but pp={layout.pp} was received with {config.model}: "
            "use pp=1; its memory can be predicted.",
            fr=f"aucun pipeline n’entraîne encore de mélange d’experts, mais pp={layout.pp} a été reçu avec "
            f"{config.model} : prenez pp=1 ; sa mémoire peut être prédite.",
        )
    if layout.strategy == "zero-3":
        # It finds the tensors that a module gives in tuples, lists and dictionaries alone, not in a gate's `Choice`.
        _refuse(
            en=f"DeepSpeed ZeRO-3 does not gather a gate's weights for its backward pass, but zero=3 was received with "
            f"{config.model}: use zero=2, or engine='torch' or 'by_hand'.",
            fr=f"DeepSpeed ZeRO-3 ne rassemble pas les poids d’une porte pour sa passe arrière, mais zero=3 a été reçu "
            f"avec {config.model} : prenez zero=2, ou engine='torch' ou 'by_hand'.",
        )
    if layout.ep == 1:
        return
    if config.optimizer not in EVERYWHERE:
        _refuse(
            en=f"optimizer={config.optimizer!r} needs whole layers, or averages over all ranks, but ep={layout.ep} "
            f"gives each rank experts of its own: use {', '.join(EVERYWHERE)}.",
            fr=f"optimizer={config.optimizer!r} demande des couches entières, ou moyenne entre tous les rangs, mais "
            f"ep={layout.ep} donne à chaque rang ses propres experts : prenez {', '.join(EVERYWHERE)}.",
        )
    if layout.engine == "deepspeed":
        _check_deepspeed(config)


def _check_deepspeed(config: RunConfig) -> None:
    """What DeepSpeed's own layer has no word for."""
    if config.precision != "fp32":
        _refuse(
            en=f"DeepSpeed's experts are run in fp32 here, but precision={config.precision!r} was received: use "
            "precision='fp32', or engine='by_hand'.",
            fr=f"les experts de DeepSpeed s’exécutent ici en fp32, mais precision={config.precision!r} a été reçu : "
            "prenez precision='fp32', ou engine='by_hand'.",
        )
    for name, plain in (("z_loss", 0.0), ("expert_groups", 1)):
        value = getattr(config, name)
        if value not in (None, plain):
            _refuse(
                en=f"DeepSpeed's gate has no {name}, but {name}={value!r} was received: use {name}={plain:g}, or "
                "engine='by_hand'.",
                fr=f"la porte de DeepSpeed n’a pas de {name}, mais {name}={value!r} a été reçu : prenez "
                f"{name}={plain:g}, ou engine='by_hand'.",
            )


def _refuse(*, en: str, fr: str) -> None:
    raise LabError(say(en=en, fr=fr))


class LoadWatch:
    """What the experts of a model were given within one step, on this rank; it is told after each step, never sent.

    Args:
        engine: its backward pass is watched, where its model has mixtures: a forward pass is noted once, also where
            checkpointing runs it again.
    """

    def __init__(self, engine: Engine) -> None:
        found = engine.module.named_modules() if hasattr(engine, "module") else ()
        self._layers = [(name, layer) for name, layer in found if hasattr(layer, "routing") and hasattr(layer, "last")]
        self._loads: dict[str, list[Any]] = {}
        if self._layers:
            self._watch(engine)

    def _watch(self, engine: Engine) -> None:
        backward = engine.backward

        def noting(loss: Tensor, *, last: bool) -> None:
            for name, layer in self._layers:
                self._loads.setdefault(name, []).append(layer.last)
            backward(loss, last=last)

        engine.backward = noting  # type: ignore[method-assign]

    def tell(self, events: EventLog, step: int) -> None:
        """Write the step's loads, one per mixture, with the sums over its micro-batches; the next begins at nothing."""
        if not self._layers:
            return
        layers = [
            {
                "layer": name,
                "tokens": sum(load.tokens_E for load in loads).tolist(),
                "capacity": sum(load.capacity for load in loads),
                "dropped": float(sum(load.dropped_share for load in loads)) / len(loads),
            }
            for name, loads in self._loads.items()
        ]
        self._loads = {}
        events.write("experts", step=step, layers=layers)
