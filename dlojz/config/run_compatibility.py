"""List what context parallelism cannot divide, what no engine of this version runs, and what no library's program does.

The last two can be predicted all the same. As in `compatibility`, the first rule speaks that a run breaks. What depends
on a machine, on the actions of a schedule or on the parts of a model is asked where runs are started
(`dlojz.runnable.check_runnable`), which reads these rules first.

Source: Llama Team 2024 (arXiv 2407.21783), §3.3.2, for the 2 × cp chunks of context parallelism.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from dlojz.base.language import say
from dlojz.config.compatibility import LAYOUT, LEGAL, Facts, Rule, Verdict, first_set, has_experts, has_tied_head, rules
from dlojz.config.engines import pipeline_stages, program_layouts
from dlojz.config.fields import ASYNCHRONOUS, RunFields
from dlojz.config.optimizers import ELEMENTWISE, KEEPING_DTYPE, OPTIMIZERS
from dlojz.models.foreign.elsewhere import size_of
from dlojz.models.foreign.names import is_elsewhere
from dlojz.models.sizes import CoAtNetSize, GPTSize

# --- models from elsewhere --------------------------------------------------------------------------------------------

WHOLE_LAYOUT: Final = {**{"cp": 1, "activation_plan": "", "gradient_compression": "none", "sequence_parallel": False}}
"""Fields of a layout that are plain with a model from elsewhere."""


def _beyond_replicas(config: RunFields) -> Facts | None:
    """Find what a model from elsewhere cannot be laid out with: but replicas, tensor parallelism, or a pipeline."""
    if not is_elsewhere(config.model):
        return None
    plain = {"library": "none", **({"update": "auto"} if config.update == "in_forward" else {})}
    plain_layout: dict[str, object] = {"pp": 1} if config.layout.tp > 1 else {}
    # Of a model from elsewhere, activations alone can be offloaded.
    if config.layout.offload != "activations":
        plain_layout["offload"] = "none"
    return first_set(config.layout, {**WHOLE_LAYOUT, **plain_layout}) or first_set(config, plain)


def _stray_adapters(config: RunFields) -> Facts | None:
    """Find a field of adapters that is set where there are none, or is malformed."""
    if config.lora is None:
        return first_set(config, {"lora_targets": "", "lora_base": "none"})
    if re.fullmatch(r"([\w.-]+(,[\w.-]+)*)?", config.lora_targets) is None:
        return {"name": "lora_targets", "value": config.lora_targets}
    return None


def _stray_target_length(config: RunFields) -> Facts | None:
    """Find what a length of targets is not for: a model without a decoder of its own, or samples of another length."""
    if config.target_length is None:
        return None
    if not config.model.startswith("hf:"):
        return {"flaw": f"model={config.model!r}"}
    return {"flaw": f"curriculum={config.curriculum!r}"} if config.curriculum != "none" else None


ELSEWHERE: Final[tuple[Rule[RunFields], ...]] = rules(
    "legal",
    {
        "targets have a length beside an encoder": _stray_target_length,
        "adapters are beside layers of transformers": lambda config: (
            config.lora is not None and not config.model.startswith("hf:")
        ),
        "adapters have a rank and named layers": _stray_adapters,
        "models from elsewhere have replicas": _beyond_replicas,
        "models from elsewhere are split by torch or by hand": lambda config: (
            is_elsewhere(config.model) and config.layout.tp > 1 and config.layout.engine == "deepspeed"
        ),
    },
)
"""What a model from elsewhere may not be combined with."""

# --- precisions -------------------------------------------------------------------------------------------------------


def _casts_true_weights(config: RunFields) -> Facts | None:
    """Find the first field with which an engine would not keep weights in bf16, or keeps something beside them."""
    if config.precision != "bf16-true":
        return None
    layout = config.layout
    if not layout.engine_spec.keeps_dtypes:
        # By hand, stage 0 keeps types; DeepSpeed keeps them in no stage.
        name, value = ("engine", layout.engine) if layout.engine == "deepspeed" else ("zero", layout.zero)
        return {"name": name, "value": value, "plain": "torch" if name == "engine" else 0}
    if config.optimizer not in KEEPING_DTYPE:
        return {"name": "optimizer", "value": config.optimizer, "plain": "adamw"}
    plain_layout = {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "gradient_compression": "none"}
    return first_set(layout, plain_layout) or first_set(config, {"library": "none"})


def _whole_logits(config: RunFields) -> Facts | None:
    """Find the first field with which the logits cannot be computed in parts."""
    if config.layout.loss_chunks == 1:
        return None
    if config.layout.engine == "deepspeed":
        return {"name": "engine", "value": "deepspeed", "plain": "torch"}
    plain_layout: dict[str, object] = {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "activation_plan": ""}
    fields = first_set(config.layout, plain_layout) or first_set(config, {"library": "none"})
    return fields or ({"name": "model", "value": config.model, "plain": "gpt_tiny"} if config.image_size else None)


def _no_channels_last(config: RunFields) -> Facts | None:
    """Find the first field with which channels are not last: texts, or an engine that lays weights out itself."""
    if not config.layout.channels_last:
        return None
    if config.image_size is None:
        return {"name": "model", "value": config.model, "plain": "coatnet_tiny"}
    if config.layout.engine not in ("torch", "single"):
        return {"name": "engine", "value": config.layout.engine, "plain": "torch"}
    return first_set(config.layout, {"zero": 0, "pp": 1, "tp": 1}) or first_set(config, {"library": "none"})


PRECISIONS: Final[tuple[Rule[RunFields], ...]] = rules(
    "legal",
    {
        "channels are last where weights keep their layout": _no_channels_last,
        "a loss in parts is of texts, with whole layers": _whole_logits,
        "weights in bf16 stay so": _casts_true_weights,
        "gradients in fp32 are DeepSpeed's": lambda config: (
            config.fp32_gradients and (config.precision == "fp32" or config.layout.engine != "deepspeed")
        ),
    },
)
"""Which engines keep gradients in fp32, or weights in 16 bit."""

# --- context parallelism ----------------------------------------------------------------------------------------------

CHUNKS: Final = 2
"""Chunks of a sequence that a context-parallel rank holds: an early one and a late one, so that all are as busy."""


def _uneven_context(config: RunFields) -> Facts | None:
    """Find the nearest context-parallel degrees whose chunks come out even."""
    cp, length = config.layout.cp, config.sequence_length
    if cp == 1 or length is None or length % (CHUNKS * cp) == 0:
        return None
    # A chunk has at least one token.
    works = [degree for degree in range(2, length // CHUNKS + 1) if length % (CHUNKS * degree) == 0]
    below, above = (
        [degree for degree in works if degree < cp][-1:] or [1],
        [degree for degree in works if degree > cp][:1],
    )
    suggestions = [f"cp={degree}" for degree in below + above]
    return {"chunks": CHUNKS * cp, "works": say(en=" or ", fr=" ou ").join(suggestions)}


def _uneven_context_lengths(config: RunFields) -> Facts | None:
    multiple, chunks = config.curriculum_multiple, CHUNKS * config.layout.cp
    if config.curriculum == "none" or config.layout.cp == 1 or multiple % chunks == 0:
        return None
    return {"chunks": chunks, "works": math.lcm(multiple, chunks)}


CONTEXT: Final[tuple[Rule[RunFields], ...]] = rules(
    "legal",
    {
        "context parallelism is of texts": lambda config: config.layout.cp > 1 and config.sequence_length is None,
        "context-parallel ranks have no experts": lambda config: config.layout.cp > 1 and has_experts(config.model),
        "cp divides the sequence": _uneven_context,
        "cp divides every length": _uneven_context_lengths,
    },
)
"""What ranks that share sequences cannot do, besides the rules of their layout."""


# --- a library's program ----------------------------------------------------------------------------------------------

NO_LIBRARY: Final = "none"
SPLITS: Final[dict[str, tuple[str, ...]]] = {"megatron": ("tp", "pp")}
"""The axes, besides replicas, along which each library's program splits a model."""
ONE_WAY: Final[dict[str, object]] = {"precision": "fp32", "optimizer": "adamw", "update": "auto", "curriculum": "none"}
"""Fields for which the programs have one value only."""
ONE_WAY_OF_LAYOUT: Final[dict[str, object]] = {
    "cp": 1,
    "ep": 1,
    "checkpointing": "none",
    "activation_plan": "",
    "offload": "none",
    "bucket_mib": None,
    "gradient_as_bucket_view": False,
    "gradient_compression": "none",
}
"""The same, of the layout."""


def or_none() -> str:
    """End of a sentence: the lab's own training is an alternative to a library's program."""
    return say(en=", or library='none'.", fr=", ou library='none'.")


def stage_refusal(program: str, zero: object) -> str | None:
    """Explain why a library's program does not have this ZeRO stage with any engine; None where it has.

    Args:
        program: name of the library.
        zero: stage; None where none is asked for.
    """
    stages = sorted({stage for _, program_stages in program_layouts(program) for stage in program_stages})
    if zero is None or zero in stages:
        return None
    works = ", ".join(map(str, stages))
    return say(
        en=f"zero={zero} was received, but the program of library={program!r} has zero={works} only.",
        fr=f"zero={zero} a été reçu, mais le programme de library={program!r} n’a que zero={works}.",
    )


def _foreign_axis(config: RunFields) -> Facts | None:
    axes = [axis for axis in ("tp", "pp") if axis not in SPLITS.get(config.library, ())]
    return first_set(config.layout, dict.fromkeys(axes, 1))


def _is_megatron(config: RunFields) -> bool:
    return config.library == "megatron"


def _uneven_layers(config: RunFields) -> Facts | None:
    size = size_of(config.model)
    if not (_is_megatron(config) and isinstance(size, GPTSize) and size.depth % config.layout.pp):
        return None
    return {"depth": size.depth}


def _no_program(config: RunFields) -> Facts | None:
    """List what the program of a library has instead of this engine or ZeRO stage."""
    layouts = program_layouts(config.library)
    # One process runs torch's program, without replicas.
    engine = "torch" if config.layout.engine == "single" else config.layout.engine
    if any(engine == provider and config.layout.zero in stages for provider, stages in layouts):
        return None
    return {
        "works": ", ".join(f"engine={provider!r}, zero={'|'.join(map(str, stages))}" for provider, stages in layouts)
    }


_OF_PROGRAMS: Final[dict[str, Callable[[RunFields], Verdict]]] = {
    "programs train no mixtures": lambda config: config.experts is not None,
    "programs have one way": lambda config: first_set(config, ONE_WAY) or first_set(config.layout, ONE_WAY_OF_LAYOUT),
    "programs split along their own axes": _foreign_axis,
    # Its mixtures are refused with the routing of their experts.
    "Megatron-core trains its own GPT": lambda config: (
        _is_megatron(config) and not isinstance(size_of(config.model), GPTSize)
    ),
    "Megatron-core's sequence parallelism needs Apex": lambda config: (
        _is_megatron(config) and config.layout.sequence_parallel
    ),
    "Megatron-core is asked for 1f1b": lambda config: (
        _is_megatron(config) and config.layout.schedule not in (None, "1f1b")
    ),
    "Megatron-core's stages are equal": _uneven_layers,
    "Colossal-AI synchronizes BatchNorm": lambda config: (
        config.library == "colossalai" and isinstance(size_of(config.model), CoAtNetSize)
    ),
    "programs shard block by block": lambda config: (
        config.layout.zero >= 2 and config.layout.engine == "torch" and has_tied_head(config)
    ),
    "programs have their own layouts": _no_program,
}


def _with_a_library(condition: Callable[[RunFields], Verdict]) -> Callable[[RunFields], Verdict]:
    """A condition that a run without a library does not meet."""
    return lambda config: config.library != NO_LIBRARY and condition(config)


LIBRARY: Final = rules("library", {name: _with_a_library(condition) for name, condition in _OF_PROGRAMS.items()})
"""What the libraries' programs do not do."""


# --- what no engine runs yet ------------------------------------------------------------------------------------------

RUN_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "precision": ("fp32", "bf16", "bf16-true"),
    "optimizer": ("adamw", *(name for name, spec in OPTIMIZERS.items() if spec.runs)),
    "fp32_gradients": (False,),
}
"""Values that some engine runs, the usual one first."""


def _first_not_run(config: RunFields, runs: Mapping[str, tuple[object, ...]]) -> Facts | None:
    """Find the first field whose value is not run, as `name` and `value`, with the one to use."""
    for name, values in runs.items():
        # A field of the run, or else of its layout.
        value = getattr(config if name in type(config).model_fields else config.layout, name)
        if value not in values:
            return {"name": name, "value": value, "legal": values[0]}
    return None


def _foreign_gate(config: RunFields) -> Facts | None:
    """Find a number of a mixture that DeepSpeed's gate does not have."""
    # With ep=1 the mixture is the lab's own, whatever the engine.
    if config.layout.ep == 1 or config.layout.engine != "deepspeed":
        return None
    for name, plain in (("z_loss", 0.0), ("expert_groups", 1)):
        if (value := getattr(config, name)) not in (None, plain):
            return {"name": name, "value": value, "plain": plain}
    return None


RUN: Final[tuple[Rule[RunFields], ...]] = rules(
    "run",
    {
        "LAMB needs whole layers": lambda config: (
            config.optimizer == "lamb"
            and (config.layout.zero > 0 or config.layout.tp > 1 or config.layout.engine == "deepspeed")
        ),
        "some values are only predicted": lambda config: _first_not_run(config, RUN_VALUES),
        "pipelines train no mixtures": lambda config: config.experts is not None and config.layout.pp > 1,
        # It finds the tensors that a module gives in tuples, lists and dictionaries alone, not in a gate's `Choice`.
        "DeepSpeed ZeRO-3 gathers no gate": lambda config: (
            config.experts is not None and not config.layout.engine_spec.gathers_experts
        ),
        "experts of a rank are updated by themselves": lambda config: (
            {"works": ", ".join(ELEMENTWISE)} if config.layout.ep > 1 and config.optimizer not in ELEMENTWISE else None
        ),
        "DeepSpeed's experts are in fp32": lambda config: (
            config.layout.ep > 1 and config.layout.engine == "deepspeed" and config.precision != "fp32"
        ),
        "DeepSpeed's gate has two losses less": _foreign_gate,
        "DeepSpeed trains no tensor-parallel layers": lambda config: (
            config.layout.tp > 1 and config.layout.engine == "deepspeed"
        ),
        "asynchronous pipelines have whole layers": lambda config: (
            config.layout.tp > 1 and config.layout.schedule in ASYNCHRONOUS
        ),
        "asynchronous pipelines tie no head": lambda config: (
            config.layout.schedule in ASYNCHRONOUS and has_tied_head(config)
        ),
    },
)
"""What no engine of this version runs, though it can be predicted."""


class PipelineRun(NamedTuple):
    """A run in a pipeline, with the name of its schedule, and whether that computes gradients of weights apart."""

    config: RunFields
    schedule: str
    splits_backward: bool


def _not_in_pipelines(run: PipelineRun) -> Facts | None:
    config, schedule, splits_backward = run
    engine = config.layout.engine
    asynchronous = schedule in ASYNCHRONOUS
    # A stage's buffers for what it sends and receives are made once, for one shape.
    runs: dict[str, tuple[object, ...]] = {"offload": ("none",), "curriculum": ("none",)}
    runs["zero"] = pipeline_stages(engine)
    if engine == "deepspeed":
        # Its PipelineModule checkpoints every block or none.
        runs["checkpointing"] = ("none", "full")
    elif splits_backward or asynchronous:
        runs["checkpointing"] = ("none",)
    if asynchronous:
        runs |= {"optimizer": ("sgd",), "dp": (1,), "precision": ("fp32",)}
    facts = _first_not_run(config, runs)
    return {**facts, "schedule": schedule} if facts else None


PIPELINE: Final[tuple[Rule[PipelineRun], ...]] = rules(
    "run", {"some values are not run in a pipeline": _not_in_pipelines}
)
"""What no engine of this version runs in a pipeline, though it can be predicted or simulated."""
RULES: Final[tuple[Rule[Any], ...]] = (*LAYOUT, *PRECISIONS, *LEGAL, *ELSEWHERE, *CONTEXT, *LIBRARY, *RUN, *PIPELINE)
"""The whole book."""
