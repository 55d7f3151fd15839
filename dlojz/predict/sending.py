"""Ways to send less, side by side: what each sends in every step of a run, in the mean, and what a link makes of it.

Layer 3. Invariant: the bytes are those of `predict_communication`, step by step: first stages that send in full, steps
that send nothing, and all others; so that the mean over a run is what a probe counts over it.

Source: Patarasuk & Yuan 2009 (rings, see `Traffic.sent_bytes`); Hockney 1994, "The communication challenge for MPP",
for α + β bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dlojz.config import RunConfig
from dlojz.footprint import Traffic
from dlojz.layout_gradients import powersgd_start
from dlojz.optim import stages
from dlojz.optimizer_stages import LOCAL, meets
from dlojz.predict.communication import predict_communication
from dlojz.predict.shapes import ModelShapes, model_shapes
from dlojz.predict.states import FP32_BYTES

ADAM_RATE: Final = 1e-3
LAMB_RATE: Final = 1e-2
SGD_RATE: Final = 0.5
"""Learning rates of the board: one per inner optimizer, so that each way is held against what sends everything."""
BY_HAND: Final[Mapping[str, Any]] = {"engine": "by_hand"}
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "AdamW": {},
    "AdamW, fp16": {"gradient_compression": "fp16"},
    "AdamW, bf16": {"gradient_compression": "bf16"},
    "AdamW, PowerSGD-4": {"gradient_compression": "powersgd", "powersgd_rank": 4},
    "AdamW, PowerSGD-1": {"gradient_compression": "powersgd"},
    "1-bit Adam": {**BY_HAND, "optimizer": "one_bit_adam"},
    "0/1 Adam": {**BY_HAND, "optimizer": "zero_one_adam"},
    "DiLoCo": {**BY_HAND, "optimizer": "diloco"},
    "LAMB": {"optimizer": "lamb", "learning_rate": LAMB_RATE},
    "1-bit LAMB": {**BY_HAND, "optimizer": "one_bit_lamb", "learning_rate": LAMB_RATE},
    "SGD": {"optimizer": "sgd", "learning_rate": SGD_RATE},
    "local SGD": {**BY_HAND, "optimizer": "local_sgd", "learning_rate": SGD_RATE},
}
"""Fields by which the ways differ, by name; what sends everything comes before what is held against it."""
PLAIN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("lamb", "one_bit_lamb"), "LAMB"),
    **dict.fromkeys(("sgd", "local_sgd"), "SGD"),
}
"""What an optimizer is held against: the way that sends everything, in fp32, with the same inner update; else AdamW."""


@dataclass(frozen=True)
class Way:
    """One way to average over replicas, as the board shows it.

    Args:
        name: e.g. `1-bit Adam`.
        against: name of the way that it is held against, which sends everything; its own where it does so itself.
        sent_bytes: what one rank sends, in the mean of all steps, predicted.
        steady_bytes: the same after the first stage, of what has one: what a long run comes near to.
        rounds: messages that wait for each other, in the mean of all steps.
        counted_bytes: the same bytes, from what a probe has counted; None where nothing was run.
        step_s: seconds of a step, in the mean of all kinds of steps, measured; None where nothing was run.
        losses: of each seed, the mean loss of the last tenth of the steps.
    """

    name: str
    against: str
    sent_bytes: float
    steady_bytes: float
    rounds: float
    counted_bytes: float | None = None
    step_s: float | None = None
    losses: tuple[float, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it sends everything, in fp32."""
        return self.name == self.against

    def link_s(self, latency_s: float, bytes_per_s: float) -> float:
        """Seconds that a step's messages take over a link, when nothing is computed meanwhile: α rounds + β bytes.

        Args:
            latency_s: α, before the first byte of a message.
            bytes_per_s: 1/β, in one direction.
        """
        return self.rounds * latency_s + self.sent_bytes / bytes_per_s


def gaps_percent(way: Way, against: Way) -> tuple[float, ...]:
    """How far each seed's loss is above that of the same seed in another way, in percent.

    Args:
        way: with losses.
        against: with losses of the same seeds, such as the way that `Way.against` names.
    """
    return tuple(100 * (own / other - 1) for own, other in zip(way.losses, against.losses, strict=True))


def ways(steps: int, **fields: Any) -> dict[str, RunConfig]:
    """The runs of the board, by name.

    Args:
        steps: of each.
        fields: of `RunConfig` and `Layout` that all share; `dp` at least 2.

    Raises:
        LabError: if the fields do not go with one of the ways.
    """
    shared = {"learning_rate": ADAM_RATE, **fields, "steps": steps}
    return {name: RunConfig.of(**{**shared, **own}) for name, own in WAYS.items()}


def traffic_of_step(config: RunConfig, step: int, shapes: ModelShapes | None = None) -> tuple[Traffic, ...]:
    """What one rank hands to the collectives of a step of this number along the data axis.

    Args:
        config: a run without pipeline or tensor parallelism.
        step: from 0.
        shapes: of its model, where they are at hand.
    """
    shapes = shapes or model_shapes(config)
    kind = _kind(config, step)
    if config.layout.dp == 1 or kind == "nothing":
        return ()
    if kind == "in full":
        whole_bytes = FP32_BYTES * shapes.num_parameters
        dp = config.layout.dp
        return (Traffic(collective="all_reduce", group="dp", group_size=dp, count=1, message_bytes=whole_bytes),)
    return tuple(one for one in predict_communication(config, shapes) if one.group == "dp")


def _kind(config: RunConfig, step: int) -> str:
    """Whether a step sends everything, nothing, or what is steady of its way."""
    first = config.warmup_steps or 0
    if config.layout.gradient_compression == "powersgd":
        first = powersgd_start(config.steps)
    in_full, silent = step < first, False
    if config.optimizer == "zero_one_adam":
        in_full = step in stages.variance_steps(first)
        silent = not stages.synchronises(step, first, config.steps)
    elif config.optimizer in LOCAL:
        silent = not meets(step, config.local_steps or 1, first, config.steps)
    return "in full" if in_full else "nothing" if silent else "steady"


def rounds_of(traffic: Traffic) -> int:
    """Messages that wait for each other when a collective runs as a ring (all-to-all: in pairs)."""
    once = traffic.group_size - 1
    return (2 * once if traffic.collective == "all_reduce" else once) * (traffic.count or 1)


def predicted_way(name: str, config: RunConfig) -> Way:
    """A way before anything is run: the mean over all steps of the run."""
    shapes = model_shapes(config)
    kinds = [_kind(config, step) for step in range(config.steps)]
    each = {kind: traffic_of_step(config, kinds.index(kind), shapes) for kind in set(kinds)}
    told = [each[kind] for kind in kinds]
    later = told[max((step + 1 for step, kind in enumerate(kinds) if kind == "in full"), default=0) :]
    return Way(
        name,
        PLAIN.get(config.optimizer, "AdamW"),
        sent_bytes=sum(one.sent_bytes for step in told for one in step) / config.steps,
        steady_bytes=sum(one.sent_bytes for step in later for one in step) / len(later),
        rounds=sum(rounds_of(one) for step in told for one in step) / config.steps,
    )
