"""Which pipelines can be run: asked before any process is started.

Layer 3. Invariant: what passes here is built by `engines.build` without another question. The model's shapes are
asked, so torch is loaded, by pipelines alone.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.pipeline.cuts import schedule_of
from dlojz.pipeline.executable import ASYNCHRONOUS, check_executable
from dlojz.pipeline.torch_csv import torch_refusal
from dlojz.predict.parts import bounds_of
from dlojz.predict.shapes import model_shapes
from dlojz.schema import LabError
from dlojz.text import say


def check_pipeline(config: RunConfig) -> None:
    """Refuse a pipeline that can be simulated or predicted but not run.

    Raises:
        LabError: in one sentence that names what runs.
    """
    layout = config.layout
    schedule = schedule_of(layout)
    bounds_of(config, model_shapes(config))  # every stage has a block
    if layout.engine == "torch" and (refusal := torch_refusal(schedule)) is not None:
        raise LabError(refusal)
    if layout.engine == "by_hand":
        check_executable(schedule, asynchronous=True)
    # A stage's buffers for what it sends and receives are made once, for one shape.
    runs: dict[str, tuple[object, ...]] = {"offload": ("none",), "curriculum": ("none",)}
    if layout.engine != "deepspeed":
        runs["zero"] = (0, 2) if layout.engine == "torch" else (0,)
    if layout.engine == "deepspeed":
        runs["checkpointing"] = ("none", "full")
    elif schedule.splits_backward or schedule.name in ASYNCHRONOUS:
        runs["checkpointing"] = ("none",)
    if schedule.name in ASYNCHRONOUS:
        runs |= {"optimizer": ("sgd",), "dp": (1,), "precision": ("fp32",)}
    for name, values in runs.items():
        value = getattr(config if name in type(config).model_fields else layout, name)
        if value not in values:
            raise LabError(
                say(
                    en=f"{name}={value!r} is not run in a pipeline {schedule.name} with engine {layout.engine!r}: use "
                    f"{name}={values[0]!r}.",
                    fr=f"{name}={value!r} ne s’exécute pas dans un pipeline {schedule.name} avec "
                    f"engine={layout.engine!r} : prenez {name}={values[0]!r}.",
                )
            )
