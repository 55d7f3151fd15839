"""Can this machine offload to that disk: asked before a run folder is made or a process started.

Layer 3. Invariant: each reason is one sentence, and nothing is written but an empty file that is removed at once.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dlojz.config import RunConfig
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes


def check_nvme(config: RunConfig) -> None:
    """Refuse an NVMe folder that this machine cannot use; a run that names none is let through.

    Raises:
        LabError: if the folder is missing, cannot be written, lacks space for the states of all ranks, or DeepSpeed's
            operator for asynchronous files (`async_io`) cannot be built here.
    """
    path = config.layout.nvme_path
    if path is None:
        return
    folder = Path(path)
    if not folder.is_dir():
        raise LabError(
            say(
                en=f"nvme_path={path!r} is no folder of this machine: give a folder on the NVMe disk, or leave it out "
                "to offload to host memory.",
                fr=f"nvme_path={path!r} n’est pas un dossier de cette machine : donnez un dossier du disque NVMe, ou "
                "retirez-le pour décharger vers la mémoire de l’hôte.",
            )
        )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LabError(
            say(
                en=f"nvme_path={path!r} cannot be written: {error.strerror or error}. Give a folder where you can "
                "write.",
                fr=f"nvme_path={path!r} n’est pas accessible en écriture : {error.strerror or error}. Donnez un "
                "dossier où vous pouvez écrire.",
            )
        ) from None
    _check_space(config, folder)
    if not has_async_io():
        raise LabError(
            say(
                en="DeepSpeed cannot offload to NVMe on this machine: its operator async_io needs the library libaio "
                "with its headers (libaio-dev) and a C++ compiler; leave nvme_path out to offload to host memory.",
                fr="DeepSpeed ne peut pas décharger vers un disque NVMe sur cette machine : son opérateur async_io "
                "demande la bibliothèque libaio avec ses en-têtes (libaio-dev) et un compilateur C++ ; retirez "
                "nvme_path pour décharger vers la mémoire de l’hôte.",
            )
        )


def needed_bytes(config: RunConfig) -> int:
    """Bytes that the ranks of this run put on the disk, all together."""
    from dlojz.predict.offload import offload_states
    from dlojz.predict.shapes import model_shapes
    from dlojz.predict.states import predict_states

    shapes = model_shapes(config)
    memories = (
        offload_states(config, shapes, predict_states(config, shapes, rank), rank)
        for rank in range(config.layout.world_size)
    )
    return sum(memory.nvme_bytes or 0 for memory in memories)


def _check_space(config: RunConfig, folder: Path) -> None:
    needed, free = needed_bytes(config), shutil.disk_usage(folder).free
    if needed > free:
        raise LabError(
            say(
                en=f"nvme_path={str(folder)!r} has {format_bytes(free)} left, but {config.layout.world_size} ranks "
                f"offload {format_bytes(needed)}: give a folder on a larger disk, or take a smaller model.",
                fr=f"nvme_path={str(folder)!r} n’a plus que {format_bytes(free)}, mais {config.layout.world_size} "
                f"rangs déchargent {format_bytes(needed)} : donnez un dossier d’un disque plus grand, ou prenez un "
                "modèle plus petit.",
            )
        )


def has_async_io() -> bool:
    """Whether DeepSpeed's operator for asynchronous files can be built, or is there already; takes seconds."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))
