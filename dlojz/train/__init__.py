"""Real training on every rank: engines, probes that attach from outside, and the one worker loop.

Layer 3. Invariant: `train` measures and never draws or predicts. Importing this package loads no torch.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.optimizer_stages import COMMUNICATING
from dlojz.schema import LabError
from dlojz.text import say


def check_runnable(config: RunConfig) -> None:
    """Refuse a legal configuration that no engine of this version can run, though it can be predicted.

    Raises:
        LabError: naming the field and a value that runs; why this machine cannot offload to the NVMe folder named; or
            what installs the library named.
    """
    runs: dict[str, tuple[object, ...]] = {"precision": ("fp32", "bf16")}
    optimizers = ("adamw", "momentum", "sgd", "lamb", *COMMUNICATING)
    runs |= {"optimizer": optimizers, "fp32_gradients": (False,)}
    layout = config.layout
    if config.optimizer == "lamb" and (layout.zero or layout.tp > 1 or layout.engine == "deepspeed"):
        raise LabError(
            say(
                en=f"optimizer='lamb' is run where each rank has whole layers, but {layout.title} was received: use "
                "engine='torch' or 'by_hand' with zero=0, tp=1.",
                fr=f"optimizer='lamb' s’exécute là où chaque rang a des couches entières, mais {layout.title} a été "
                "reçu : prenez engine='torch' ou 'by_hand' avec zero=0, tp=1.",
            )
        )
    for name, values in runs.items():
        value = getattr(config if name in type(config).model_fields else config.layout, name)
        legal = values[0]
        if value not in values:
            raise LabError(
                say(
                    en=f"{name}={value!r} cannot be run yet by any engine: use {name}={legal!r}.",
                    fr=f"{name}={value!r} n'est encore exécutable par aucun moteur : prenez {name}={legal!r}.",
                )
            )
    if config.library != "none":
        from dlojz.libraries import require

        require(config.library)
    if config.experts is not None:
        from dlojz.train.mixtures import check_mixture

        check_mixture(config)
    if config.layout.tp > 1:
        from dlojz.train.tensors import check_tensor

        check_tensor(config)
    if config.layout.pp > 1:
        from dlojz.train.pipelines import check_pipeline

        check_pipeline(config)
    if config.layout.nvme_path is not None:
        from dlojz.train.nvme import check_nvme

        check_nvme(config)
