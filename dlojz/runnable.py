"""Refuse what no engine of this version, or not this machine, can run, though it can be predicted.

Asked before a run folder is made or a process started; nothing is written but an empty file that is removed at once.
torch is loaded only for pipelines, models from elsewhere, a pattern that is matched with the names of a model's parts,
and a device.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, refusal
from dlojz.config.compatibility import check
from dlojz.config.fields import block_choices
from dlojz.config.run_compatibility import NO_LIBRARY, PIPELINE, RUN, PipelineRun
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.names import is_elsewhere
from dlojz.pipeline.exchange_formats import torch_refusal
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.pipeline.validity import check_executable
from dlojz.prediction.shapes import bounds_of, check_parameters, model_shapes


def check_runnable(config: RunConfig) -> None:
    """Refuse a legal configuration that no engine of this version can run, though it can be predicted.

    Raises:
        LabError: naming the field and a value that runs; why this machine cannot offload to the NVMe folder named; or
            what installs the library named.
    """
    check(RUN, config)
    if config.library != NO_LIBRARY:
        from dlojz.libraries.library_catalogue import require

        require(config.library)
    if config.built_model != config.model and config.layout.pp == 1:
        model_shapes(config)  # its blocks are recomputed: it has some that repeat
    if is_elsewhere(config.model):
        check_parameters(config, model_shapes(config))
    if config.layout.activation_plan:
        check_plan(config)
    if config.layout.tp > 1:
        check_tensor(config)
    if config.layout.pp > 1:
        check_pipeline(config)
    if config.layout.nvme_path is not None:
        check_nvme(config)


def check_plan(config: RunConfig) -> None:
    """Refuse an activation plan that has not one choice for each block of its model.

    Raises:
        LabError: naming both numbers.
    """
    from dlojz.prediction.shapes import build_on_meta

    sizes = (config.built_model, config.image_size, config.sequence_length, config.num_classes)
    build_on_meta(*sizes, routing=config.routing).plan_activations(block_choices(config.layout.activation_plan))


def check_pipeline(config: RunConfig) -> None:
    """Refuse a pipeline that can be simulated or predicted but not run.

    Raises:
        LabError: in one sentence that names what runs.
    """
    layout = config.layout
    bounds_of(config)  # every stage has a block
    schedule = schedule_of(layout)
    if layout.engine == "torch" and (refusal := torch_refusal(schedule)) is not None:
        raise LabError(refusal)
    if layout.engine == "by_hand":
        check_executable(schedule, asynchronous=True)
    check(PIPELINE, PipelineRun(config, schedule))


def check_tensor(config: RunConfig) -> None:
    """Refuse a run with tp > 1 whose pattern matches no part of its model, or whose overlap this machine cannot do.

    Raises:
        LabError: in one sentence that names what runs.
    """
    layout = config.layout
    if layout.async_tensor_parallel:
        _check_overlap(config)
    if layout.tensor_parts or is_elsewhere(config.model):
        _check_parts(config)


def _check_parts(config: RunConfig) -> None:
    from dlojz.by_hand.tensor.axis import TensorAxis
    from dlojz.by_hand.tensor.split import split_model
    from dlojz.prediction.shapes import build_on_meta

    model = build_on_meta(config.built_model, config.image_size, config.sequence_length, config.num_classes)
    layout = config.layout
    if layout.engine == "torch" and model.tensor_plan is None:  # no plan of its own: torch's is made from the parts
        from dlojz.train.engines.tensor_engines import torch_parts

        torch_parts(model, layout.tensor_parts)
    else:
        split_model(model, TensorAxis(size=layout.tp), layout.tensor_parts)  # raises if a pattern matches no part


def _check_overlap(config: RunConfig) -> None:
    import torch

    tp = config.layout.tp
    enough = config.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() >= tp
    # Every GPU must reach the others' memory.
    if enough and all(torch.cuda.can_device_access_peer(0, peer) for peer in range(1, tp)):
        return
    raise refusal(
        en=f"async_tensor_parallel needs {tp} GPUs of one node that reach each other's memory (NVLink), which are not "
        "here: leave it out.",
        fr=f"async_tensor_parallel demande {tp} GPU d’un même nœud qui accèdent à la mémoire l’un de l’autre (NVLink), "
        "et il n’y en a pas ici : retirez-le.",
    )


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
        raise refusal(
            en=f"nvme_path={path!r} is no folder of this machine: give a folder on the NVMe disk, or leave it out to "
            "offload to host memory.",
            fr=f"nvme_path={path!r} n’est pas un dossier de cette machine : donnez un dossier du disque NVMe, ou "
            "retirez-le pour décharger vers la mémoire de l’hôte.",
        )
    try:
        with tempfile.TemporaryFile(dir=folder):  # removed when it is closed
            pass
    except OSError as error:
        raise refusal(
            en=f"nvme_path={path!r} cannot be written: {error.strerror or error}. Give a folder where you can write.",
            fr=f"nvme_path={path!r} n’est pas accessible en écriture : {error.strerror or error}. Donnez un dossier où "
            "vous pouvez écrire.",
        ) from None
    _check_space(config, folder)
    if not has_async_io():
        raise refusal(
            en="DeepSpeed cannot offload to NVMe on this machine: its operator async_io needs the library libaio with "
            "its headers (libaio-dev) and a C++ compiler; leave nvme_path out to offload to host memory.",
            fr="DeepSpeed ne peut pas décharger vers un disque NVMe sur cette machine : son opérateur async_io demande "
            "la bibliothèque libaio avec ses en-têtes (libaio-dev) et un compilateur C++ ; retirez nvme_path pour "
            "décharger vers la mémoire de l’hôte.",
        )


def needed_bytes(config: RunConfig) -> int:
    """Sum the bytes that all ranks of this run offload to the disk."""
    from dlojz.prediction.shapes import model_shapes
    from dlojz.prediction.states import offload_states, predict_states

    shapes = model_shapes(config)
    memories = (
        offload_states(config, shapes, predict_states(config, shapes, rank), rank)  # bytes on the disk of one rank
        for rank in range(config.layout.world_size)
    )
    return sum(memory.nvme_bytes or 0 for memory in memories)


def _check_space(config: RunConfig, folder: Path) -> None:
    total, free = needed_bytes(config), shutil.disk_usage(folder).free
    if total > free:
        raise refusal(
            en=f"nvme_path={str(folder)!r} has {format_bytes(free)} left, but {config.layout.world_size} ranks offload "
            f"{format_bytes(total)}: give a folder on a larger disk, or take a smaller model.",
            fr=f"nvme_path={str(folder)!r} n’a plus que {format_bytes(free)}, mais {config.layout.world_size} rangs "
            f"déchargent {format_bytes(total)} : donnez un dossier d’un disque plus grand, ou prenez un modèle plus "
            "petit.",
        )


def has_async_io() -> bool:
    """Whether DeepSpeed's operator for asynchronous files can be built, or is there already; takes seconds."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))
