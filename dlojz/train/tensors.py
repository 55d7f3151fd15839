"""Which tensor-parallel runs an engine of this version can do: asked before any process is started.

Layer 3. Invariant: what passes here is built by `engines.build` without another question; no torch is loaded.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.pipeline.executable import ASYNCHRONOUS
from dlojz.schema import LabError
from dlojz.text import say


def check_tensor(config: RunConfig) -> None:
    """Refuse a run with tp > 1 that can be predicted but not run.

    Raises:
        LabError: in one sentence that names what runs.
    """
    layout = config.layout
    if layout.engine == "deepspeed":
        raise LabError(
            say(
                en=f"tp={layout.tp} is not run with engine 'deepspeed', which trains no tensor-parallel layers of its "
                "own: use engine='by_hand' or 'torch', or tp=1.",
                fr=f"tp={layout.tp} ne s’exécute pas avec engine='deepspeed', qui n’entraîne pas lui-même de couches "
                "Tensor Parallel : prenez engine='by_hand' ou 'torch', ou tp=1.",
            )
        )
    if layout.schedule in ASYNCHRONOUS:
        raise LabError(
            say(
                en=f"tp={layout.tp} is not run in the asynchronous pipeline {layout.schedule}: use a synchronous "
                "schedule such as 1f1b, or tp=1.",
                fr=f"tp={layout.tp} ne s’exécute pas dans le pipeline asynchrone {layout.schedule} : prenez un "
                "ordonnancement synchrone tel que 1f1b, ou tp=1.",
            )
        )
