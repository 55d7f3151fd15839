"""Graphs with branches, and the devices on which their operators may be placed.

Layer 4. Invariant: tasks are listed in an order in which they can run. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dlojz.schema import LabError
from dlojz.text import say


class Task(NamedTuple):
    """One operator.

    Args:
        name: unique.
        time_s: on any device.
        output_bytes: of its result.
        inputs: names of the tasks whose results it reads.
        memory_bytes: weights and activations that stay on its device.
    """

    name: str
    time_s: float
    output_bytes: float = 0.0
    inputs: tuple[str, ...] = ()
    memory_bytes: float = 0.0


@dataclass(frozen=True)
class Devices:
    """Equal devices, each joined to each other.

    Args:
        count: at least 1.
        bytes_per_s: of a link.
        latency_s: of a message.
        memory_bytes: of a device.
    """

    count: int
    bytes_per_s: float
    latency_s: float = 0.0
    memory_bytes: float = float("inf")

    def __post_init__(self) -> None:
        if self.count < 1 or self.bytes_per_s <= 0:
            raise LabError(
                say(
                    en=f"a placement needs at least one device and a bandwidth above 0, but count={self.count!r} and "
                    f"bytes_per_s={self.bytes_per_s!r} were received: use for example 2 and 1e10.",
                    fr="un placement demande au moins un périphérique et un débit supérieur à 0, mais "
                    f"count={self.count!r} et bytes_per_s={self.bytes_per_s!r} ont été reçus : prenez par exemple 2 "
                    "et 1e10.",
                )
            )


def two_towers(depth: int = 3, time_s: float = 1.0, output_bytes: float = 1e9, exchange: bool = False) -> list[Task]:
    """A net with two branches, as AlexNet was trained on two GPUs: read, `depth` layers in each tower, then joined.

    Args:
        depth: layers of each tower.
        time_s: of each.
        output_bytes: of each result.
        exchange: in the middle each tower reads the other's result too (AlexNet's third convolution does).

    Source: Krizhevsky, Sutskever & Hinton 2012, "ImageNet Classification with Deep Convolutional Neural Networks",
    §3.2.
    """
    tasks = [Task("read", time_s / 2, output_bytes / 2)]
    before = {"left": "read", "right": "read"}
    for layer in range(depth):
        named = {tower: f"{tower} {layer}" for tower in before}
        both = exchange and layer == depth // 2
        for tower, name in named.items():
            tasks.append(Task(name, time_s, output_bytes, tuple(before.values()) if both else (before[tower],)))
        before = named
    return [*tasks, Task("join", time_s / 2, 0.0, tuple(dict.fromkeys(before.values())))]
