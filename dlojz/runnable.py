"""Refuse what no engine of this version, or not this machine, can run, though it can be predicted.

Asked before a run folder is made or a process started; nothing is written. torch is loaded only for pipelines, models
from elsewhere, and a pattern that is matched with the names of a model's parts.
"""

from __future__ import annotations

from dlojz.base.errors import LabError
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
        LabError: naming the field and a value that runs, or what installs the library named.
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
    check(PIPELINE, PipelineRun(config, schedule.name, schedule.splits_backward))


def check_tensor(config: RunConfig) -> None:
    """Refuse a run with tp > 1 whose pattern matches no part of its model.

    Raises:
        LabError: in one sentence that names what runs.
    """
    layout = config.layout
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
