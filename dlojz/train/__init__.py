"""Real training on every rank: engines, probes that attach from outside, and the one worker loop.

Layer 3. Invariant: `train` measures and never draws or predicts. Importing this package loads no torch.
"""

from __future__ import annotations

from dlojz.config import Layout
from dlojz.schema import LabError
from dlojz.text import say


def check_runnable(layout: Layout) -> None:
    """Refuse a legal layout that no engine of this version can run.

    Raises:
        LabError: naming the field and the values that run.
    """
    for name, legal in (("tp", 1), ("pp", 1), ("offload", "none"), ("sequence_parallel", False)):
        value = getattr(layout, name)
        if value != legal:
            raise LabError(
                say(
                    en=f"{name}={value!r} cannot be run yet by any engine: use {name}={legal!r}.",
                    fr=f"{name}={value!r} n'est encore exécutable par aucun moteur : prenez {name}={legal!r}.",
                )
            )
    if layout.checkpointing == "selective":
        raise LabError(
            say(
                en="checkpointing='selective' cannot be run yet: use 'full' (every block) or 'none'.",
                fr="checkpointing='selective' n'est pas encore exécutable : prenez 'full' (chaque bloc) ou 'none'.",
            )
        )
