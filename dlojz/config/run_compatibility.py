"""List what context parallelism cannot divide, what no engine of this version runs, and what no library's program does.

The last two can be predicted all the same. As in `compatibility`, the first rule speaks that a run breaks. What depends
on a machine, on the actions of a schedule or on the parts of a model is asked where runs are started
(`dlojz.runnable.check_runnable`), which reads these rules first.

Source: Llama Team 2024 (arXiv 2407.21783), §3.3.2, for the 2 × cp chunks of context parallelism.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from dlojz.base.language import say
from dlojz.config.compatibility import LAYOUT, LEGAL, Facts, Rule, first_set, has_experts, has_tied_head
from dlojz.config.engines import pipeline_stages, program_layouts
from dlojz.config.fields import ASYNCHRONOUS, RunFields
from dlojz.config.optimizers import ELEMENTWISE, KEEPING_DTYPE, OPTIMIZERS
from dlojz.models.foreign.elsewhere import size_of
from dlojz.models.foreign.names import is_elsewhere
from dlojz.models.sizes import CoAtNetSize, GPTSize

# --- models from elsewhere --------------------------------------------------------------------------------------------

WHOLE_LAYOUT: Final = {
    **{"cp": 1, "activation_plan": "", "gradient_compression": "none", "sequence_parallel": False},
}
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


ELSEWHERE: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "targets have a length beside an encoder",
        _stray_target_length,
        en="target_length={config.target_length} was received with {flaw}, but it is what the decoder of a model of "
        "transformers reads beside its encoder, in every step: use hf:FOLDER with the config.json of such a model (T5, "
        "BART, Whisper) and no curriculum, or leave it out.",
        fr="target_length={config.target_length} a été reçu avec {flaw}, mais c’est ce que lit à chaque pas le "
        "décodeur d’un modèle de transformers à côté de son encodeur : prenez hf:DOSSIER avec le config.json d’un tel "
        "modèle (T5, BART, Whisper) et aucun curriculum, ou retirez-le.",
    ),
    Rule(
        "adapters are beside layers of transformers",
        lambda config: config.lora is not None and not config.model.startswith("hf:"),
        en="lora={config.lora} was received with {config.model}, but adapters are put beside the layers of a model of "
        "transformers: use hf:FOLDER with its config.json, or put them into a file of your own, FILE.py:build, with "
        "requires_grad_(False) on what is frozen.",
        fr="lora={config.lora} a été reçu avec {config.model}, mais les adaptateurs se mettent à côté des couches d’un "
        "modèle de transformers : prenez hf:DOSSIER avec son config.json, ou mettez-les dans un fichier à vous, "
        "FICHIER.py:build, avec requires_grad_(False) sur ce qui est gelé.",
    ),
    Rule(
        "adapters have a rank and named layers",
        _stray_adapters,
        en="{name}={value!r} was received with lora={config.lora}: adapters need a rank (--lora 16), and their layers "
        "are names with commas between them, as in q_proj,v_proj.",
        fr="{name}={value!r} a été reçu avec lora={config.lora} : il faut aux adaptateurs un rang (--lora 16), et "
        "leurs couches sont des noms séparés par des virgules, comme q_proj,v_proj.",
    ),
    Rule(
        "models from elsewhere have replicas",
        _beyond_replicas,
        en="{name}={value!r} was received with {config.model}, but a model from elsewhere is predicted and run with "
        "replicas, whole or sharded (DDP, FSDP2, DeepSpeed, by hand), with tensor parallelism or in a pipeline, or on "
        "one process alone: use {name}={plain!r}, or a model of the catalogue.",
        fr="{name}={value!r} a été reçu avec {config.model}, mais un modèle venu d’ailleurs se prédit et s’exécute "
        "seulement avec des répliques, entières ou découpées (DDP, FSDP2, DeepSpeed, à la main), avec du Tensor "
        "Parallelism ou en pipeline, ou sur un seul processus : prenez {name}={plain!r}, ou un modèle du catalogue.",
    ),
    Rule(
        "models from elsewhere are split by torch or by hand",
        lambda config: is_elsewhere(config.model) and config.layout.tp > 1 and config.layout.engine == "deepspeed",
        en="tp={layout.tp} was received with {config.model} and engine='deepspeed', but the layers of a model from "
        "elsewhere are split by torch or by hand: use engine='torch' or 'by_hand', or tp=1.",
        fr="tp={layout.tp} a été reçu avec {config.model} et engine='deepspeed', mais les couches d’un modèle venu "
        "d’ailleurs sont découpées par torch ou à la main : prenez engine='torch' ou 'by_hand', ou tp=1.",
    ),
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


PRECISIONS: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "channels are last where weights keep their layout",
        _no_channels_last,
        en="channels_last is of models that read images, on one process and in DDP, but {name}={value!r} was received: "
        "use {name}={plain!r}, or leave it out.",
        fr="channels_last vaut pour des modèles qui lisent des images, sur un processus et avec DDP, mais "
        "{name}={value!r} a été reçu : prenez {name}={plain!r}, ou retirez-le.",
    ),
    Rule(
        "a loss in parts is of texts, with whole layers",
        _whole_logits,
        en="loss_chunks={layout.loss_chunks} computes the logits of a text in parts, on one process, in DDP, by hand "
        "and in FSDP2, but {name}={value!r} was received: use {name}={plain!r}, or loss_chunks=1.",
        fr="loss_chunks={layout.loss_chunks} calcule les logits d’un texte par parts, sur un processus, avec DDP, à la "
        "main et avec FSDP2, mais {name}={value!r} a été reçu : prenez {name}={plain!r}, ou loss_chunks=1.",
    ),
    Rule(
        "weights in bf16 stay so",
        _casts_true_weights,
        en="precision='bf16-true' keeps weights, gradients and optimizer states in bf16 on one process, in DDP, in DDP "
        "by hand and in FSDP2, but {name}={value!r} was received: use {name}={plain!r}, or precision='bf16'.",
        fr="precision='bf16-true' garde poids, gradients et états de l’optimiseur en bf16 sur un processus, avec DDP, "
        "avec DDP à la main et avec FSDP2, mais {name}={value!r} a été reçu : prenez {name}={plain!r}, ou "
        "precision='bf16'.",
    ),
    Rule(
        "gradients in fp32 are DeepSpeed's",
        lambda config: config.fp32_gradients and (config.precision == "fp32" or config.layout.engine != "deepspeed"),
        en="fp32_gradients is an option of DeepSpeed in bf16 or fp16, but engine={layout.engine!r}, "
        "precision={config.precision!r} was received: change these, or leave it out (elsewhere gradients are in fp32 "
        "already).",
        fr="fp32_gradients est une option de DeepSpeed en bf16 ou en fp16, mais engine={layout.engine!r}, "
        "precision={config.precision!r} a été reçu : changez-les, ou retirez-la (ailleurs, les gradients sont déjà en "
        "fp32).",
    ),
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


CONTEXT: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "context parallelism is of texts",
        lambda config: config.layout.cp > 1 and config.sequence_length is None,
        en="cp={layout.cp} divides the tokens of a text, but {config.model} reads images: use a gpt, llama or qwen "
        "model, or cp=1.",
        fr="cp={layout.cp} répartit les tokens d’un texte, mais {config.model} lit des images : prenez un modèle gpt, "
        "llama ou qwen, ou cp=1.",
    ),
    Rule(
        "context-parallel ranks have no experts",
        lambda config: config.layout.cp > 1 and has_experts(config.model),
        en="cp={layout.cp} was received with {config.model}, whose experts would be given other tokens than in one "
        "process, as a rank sees its own alone: use a dense model such as llama_tiny, or cp=1.",
        fr="cp={layout.cp} a été reçu avec {config.model}, dont les experts recevraient d’autres tokens que dans un "
        "seul processus, car un rang ne voit que les siens : prenez un modèle dense comme llama_tiny, ou cp=1.",
    ),
    Rule(
        "cp divides the sequence",
        _uneven_context,
        en="cp={layout.cp} does not divide sequence_length={config.sequence_length} into 2 × cp = {chunks} equal "
        "chunks: use {works}, or a sequence_length that {chunks} divides.",
        fr="cp={layout.cp} ne divise pas sequence_length={config.sequence_length} en 2 × cp = {chunks} parts égales : "
        "prenez {works}, ou un sequence_length que {chunks} divise.",
    ),
    Rule(
        "cp divides every length",
        _uneven_context_lengths,
        en="cp={layout.cp} divides each length into 2 × cp = {chunks} chunks, but lengths are multiples of "
        "{config.curriculum_multiple}: use curriculum_multiple={works}.",
        fr="cp={layout.cp} divise chaque longueur en 2 × cp = {chunks} parts, mais les longueurs sont des multiples de "
        "{config.curriculum_multiple} : prenez curriculum_multiple={works}.",
    ),
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
_OR_NONE: Final = {"en": ", or library='none'.", "fr": ", ou library='none'."}


def or_none() -> str:
    """End of a sentence: the lab's own training is an alternative to a library's program."""
    return say(**_OR_NONE)


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


def _library(name: str, applies: Callable[[RunFields], Facts | bool | None], *, en: str, fr: str) -> Rule[RunFields]:
    """Make a rule for the libraries' programs, which a run without a library does not break."""
    return Rule(name, lambda config: config.library != NO_LIBRARY and applies(config), en, fr, "library")


LIBRARY: Final[tuple[Rule[RunFields], ...]] = (
    _library(
        "programs train no mixtures",
        lambda config: config.experts is not None,
        en="model={config.model!r} has a mixture of experts, which no library's program here trains: use a dense "
        f"model such as gpt_tiny{_OR_NONE['en']}",
        fr="model={config.model!r} a un mélange d’experts, qu’aucun programme de bibliothèque n’entraîne ici : "
        f"prenez un modèle dense comme gpt_tiny{_OR_NONE['fr']}",
    ),
    _library(
        "programs have one way",
        lambda config: first_set(config, ONE_WAY) or first_set(config.layout, ONE_WAY_OF_LAYOUT),
        en="{name}={value!r} is none of what the program of library={config.library!r} does: use {name}={plain!r}"
        f"{_OR_NONE['en']}",
        fr="{name}={value!r} n’est pas dans ce que fait le programme de library={config.library!r} : prenez "
        f"{{name}}={{plain!r}}{_OR_NONE['fr']}",
    ),
    _library(
        "programs split along their own axes",
        _foreign_axis,
        en="{name}={value} was received, but the program of library={config.library!r} splits no model that way: use "
        f"{{name}}=1{_OR_NONE['en']}",
        fr="{name}={value} a été reçu, mais le programme de library={config.library!r} ne découpe pas ainsi le "
        f"modèle : prenez {{name}}=1{_OR_NONE['fr']}",
    ),
    _library(
        "Megatron-core trains its own GPT",  # its mixtures are refused with the routing of their experts
        lambda config: _is_megatron(config) and not isinstance(size_of(config.model), GPTSize),
        en="model={config.model!r} was received, but the program of library='megatron' trains Megatron-core's own "
        f"GPT: use a model of the gpt family such as gpt_tiny{_OR_NONE['en']}",
        fr="model={config.model!r} a été reçu, mais le programme de library='megatron' entraîne le GPT de "
        f"Megatron-core : prenez un modèle de la famille gpt comme gpt_tiny{_OR_NONE['fr']}",
    ),
    _library(
        "Megatron-core's sequence parallelism needs Apex",
        lambda config: _is_megatron(config) and config.layout.sequence_parallel,
        en="sequence_parallel=True was received, but without NVIDIA's Apex or Transformer Engine Megatron-core's GPT "
        f"has torch's layer norm, which it refuses to combine with it: use sequence_parallel=False{_OR_NONE['en']}",
        fr="sequence_parallel=True a été reçu, mais sans Apex ni Transformer Engine de NVIDIA le GPT de Megatron-core "
        f"prend la layer norm de torch, qu’il refuse de combiner avec : prenez sequence_parallel=False{_OR_NONE['fr']}",
    ),
    _library(
        "Megatron-core is asked for 1f1b",
        lambda config: _is_megatron(config) and config.layout.schedule not in (None, "1f1b"),
        en="schedule={layout.schedule!r} was received, but the program of library='megatron' asks Megatron-core "
        f"for 1f1b: use schedule='1f1b'{_OR_NONE['en']}",
        fr="schedule={layout.schedule!r} a été reçu, mais le programme de library='megatron' demande 1f1b à "
        f"Megatron-core : prenez schedule='1f1b'{_OR_NONE['fr']}",
    ),
    _library(
        "Megatron-core's stages are equal",
        _uneven_layers,
        en="pp={layout.pp} was received, but Megatron-core gives each stage as many layers, and {config.model} has "
        "{depth}: use a pp that divides {depth}.",
        fr="pp={layout.pp} a été reçu, mais Megatron-core donne à chaque étage autant de couches, et {config.model} en "
        "a {depth} : prenez un pp qui divise {depth}.",
    ),
    _library(
        "Colossal-AI synchronizes BatchNorm",
        lambda config: config.library == "colossalai" and isinstance(size_of(config.model), CoAtNetSize),
        en="model={config.model!r} has BatchNorm, which Colossal-AI turns into SyncBatchNorm: that computes on GPUs "
        "only and over the samples of all replicas, which is another training: use a vit, gpt or llama "
        f"model{_OR_NONE['en']}",
        fr="model={config.model!r} a des BatchNorm, que Colossal-AI change en SyncBatchNorm : celle-ci ne calcule que "
        "sur GPU et sur les échantillons de toutes les répliques, ce qui est un autre entraînement : prenez un modèle "
        f"vit, gpt ou llama{_OR_NONE['fr']}",
    ),
    _library(
        "programs shard block by block",
        lambda config: config.layout.zero >= 2 and config.layout.engine == "torch" and has_tied_head(config),
        en="zero={layout.zero} was received with {config.model}, whose embedding and head are one matrix, but the "
        "program of library={config.library!r} shards block by block, which would make two of it: use a model with a "
        f"separate head such as gpt_tiny, zero=0{_OR_NONE['en']}",
        fr="zero={layout.zero} a été reçu avec {config.model}, dont l’embedding et la tête sont une seule matrice, "
        "mais le programme de library={config.library!r} découpe bloc par bloc, ce qui en ferait deux : prenez un "
        f"modèle à tête séparée comme gpt_tiny, zero=0{_OR_NONE['fr']}",
    ),
    _library(
        "programs have their own layouts",
        _no_program,
        en="engine={layout.engine!r}, zero={layout.zero} was received, but the program of library={config.library!r} "
        "has no such layout: use {works}.",
        fr="engine={layout.engine!r}, zero={layout.zero} a été reçu, mais le programme de library={config.library!r} "
        "n’a pas cette répartition : prenez {works}.",
    ),
)
"""What the libraries' programs do not do."""


# --- what no engine runs yet ------------------------------------------------------------------------------------------

RUN_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "precision": ("fp32", "bf16"),
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


def _run(name: str, applies: Callable[[RunFields], Facts | bool | None], *, en: str, fr: str) -> Rule[RunFields]:
    return Rule(name, applies, en, fr, "run")


RUN: Final[tuple[Rule[RunFields], ...]] = (
    _run(
        "LAMB needs whole layers",
        lambda config: (
            config.optimizer == "lamb"
            and (config.layout.zero > 0 or config.layout.tp > 1 or config.layout.engine == "deepspeed")
        ),
        en="optimizer='lamb' is run where each rank has whole layers, but {layout.title} was received: use "
        "engine='torch' or 'by_hand' with zero=0, tp=1.",
        fr="optimizer='lamb' s’exécute là où chaque rang a des couches entières, mais {layout.title} a été reçu : "
        "prenez engine='torch' ou 'by_hand' avec zero=0, tp=1.",
    ),
    _run(
        "some values are only predicted",
        lambda config: _first_not_run(config, RUN_VALUES),
        en="{name}={value!r} cannot be run yet by any engine: use {name}={legal!r}.",
        fr="{name}={value!r} n'est encore exécutable par aucun moteur : prenez {name}={legal!r}.",
    ),
    _run(
        "pipelines train no mixtures",
        lambda config: config.experts is not None and config.layout.pp > 1,
        en="no pipeline trains a mixture of experts yet, but pp={layout.pp} was received with {config.model}: use "
        "pp=1; its memory can be predicted.",
        fr="aucun pipeline n’entraîne encore de mélange d’experts, mais pp={layout.pp} a été reçu avec {config.model} "
        ": prenez pp=1 ; sa mémoire peut être prédite.",
    ),
    _run(
        "DeepSpeed ZeRO-3 gathers no gate",
        # It finds the tensors that a module gives in tuples, lists and dictionaries alone, not in a gate's `Choice`.
        lambda config: config.experts is not None and not config.layout.engine_spec.gathers_experts,
        en="DeepSpeed ZeRO-3 does not gather a gate's weights for its backward pass, but zero=3 was received with "
        "{config.model}: use zero=2, or engine='torch' or 'by_hand'.",
        fr="DeepSpeed ZeRO-3 ne rassemble pas les poids d’une porte pour sa passe arrière, mais zero=3 a été reçu avec "
        "{config.model} : prenez zero=2, ou engine='torch' ou 'by_hand'.",
    ),
    _run(
        "experts of a rank are updated by themselves",
        lambda config: config.layout.ep > 1 and config.optimizer not in ELEMENTWISE,
        en="optimizer={config.optimizer!r} needs whole layers, or averages over all ranks, but ep={layout.ep} "
        f"gives each rank different experts: use {', '.join(ELEMENTWISE)}.",
        fr="optimizer={config.optimizer!r} demande des couches entières, ou moyenne entre tous les rangs, mais "
        f"ep={{layout.ep}} donne à chaque rang ses propres experts : prenez {', '.join(ELEMENTWISE)}.",
    ),
    _run(
        "DeepSpeed's experts are in fp32",
        lambda config: config.layout.ep > 1 and config.layout.engine == "deepspeed" and config.precision != "fp32",
        en="DeepSpeed's experts are run in fp32 here, but precision={config.precision!r} was received: use "
        "precision='fp32', or engine='by_hand'.",
        fr="les experts de DeepSpeed s’exécutent ici en fp32, mais precision={config.precision!r} a été reçu : prenez "
        "precision='fp32', ou engine='by_hand'.",
    ),
    _run(
        "DeepSpeed's gate has two losses less",
        _foreign_gate,
        en="DeepSpeed's gate has no {name}, but {name}={value!r} was received: use {name}={plain:g}, or "
        "engine='by_hand'.",
        fr="la porte de DeepSpeed n’a pas de {name}, mais {name}={value!r} a été reçu : prenez {name}={plain:g}, ou "
        "engine='by_hand'.",
    ),
    _run(
        "DeepSpeed trains no tensor-parallel layers",
        lambda config: config.layout.tp > 1 and config.layout.engine == "deepspeed",
        en="tp={layout.tp} is not run with engine 'deepspeed', which trains no tensor-parallel layers: use "
        "engine='by_hand' or 'torch', or tp=1.",
        fr="tp={layout.tp} ne s’exécute pas avec engine='deepspeed', qui n’entraîne pas lui-même de couches Tensor "
        "Parallel : prenez engine='by_hand' ou 'torch', ou tp=1.",
    ),
    _run(
        "asynchronous pipelines have whole layers",
        lambda config: config.layout.tp > 1 and config.layout.schedule in ASYNCHRONOUS,
        en="tp={layout.tp} is not run in the asynchronous pipeline {layout.schedule}: use a synchronous schedule such "
        "as 1f1b, or tp=1.",
        fr="tp={layout.tp} ne s’exécute pas dans le pipeline asynchrone {layout.schedule} : prenez un ordonnancement "
        "synchrone tel que 1f1b, ou tp=1.",
    ),
    _run(
        "asynchronous pipelines tie no head",
        lambda config: config.layout.schedule in ASYNCHRONOUS and has_tied_head(config),
        en="embedding and head of {config.model} are one matrix, of which first and last stage hold a copy each, and "
        "the asynchronous pipeline {layout.schedule} updates each stage alone, so that the copies would differ: use a "
        "synchronous schedule such as 1f1b, or a model with a separate head such as gpt_tiny.",
        fr="l’embedding et la tête de {config.model} sont une seule matrice, dont le premier et le dernier étage ont "
        "chacun une copie, et le pipeline asynchrone {layout.schedule} met chaque étage à jour seul, si bien que les "
        "copies divergeraient : prenez un ordonnancement synchrone tel que 1f1b, ou un modèle à tête séparée comme "
        "gpt_tiny.",
    ),
)
"""What no engine of this version runs, though it can be predicted."""


class KnownSchedule(Protocol):
    """What the rules ask of a pipeline's schedule."""

    @property
    def name(self) -> str:
        """Of the schedule."""

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""


class PipelineRun(NamedTuple):
    """A run in a pipeline, with its schedule."""

    config: RunFields
    schedule: KnownSchedule


def _not_in_pipelines(run: PipelineRun) -> Facts | None:
    config, schedule = run
    engine = config.layout.engine
    asynchronous = schedule.name in ASYNCHRONOUS
    # A stage's buffers for what it sends and receives are made once, for one shape.
    runs: dict[str, tuple[object, ...]] = {"offload": ("none",), "curriculum": ("none",)}
    runs["zero"] = pipeline_stages(engine)
    if engine == "deepspeed":
        # Its PipelineModule checkpoints every block or none.
        runs["checkpointing"] = ("none", "full")
    elif schedule.splits_backward or asynchronous:
        runs["checkpointing"] = ("none",)
    if asynchronous:
        runs |= {"optimizer": ("sgd",), "dp": (1,), "precision": ("fp32",)}
    facts = _first_not_run(config, runs)
    return {**facts, "schedule": schedule.name} if facts else None


PIPELINE: Final[tuple[Rule[PipelineRun], ...]] = (
    Rule(
        "some values are not run in a pipeline",
        _not_in_pipelines,
        en="{name}={value!r} is not run in a pipeline {schedule} with engine {layout.engine!r}: use {name}={legal!r}.",
        fr="{name}={value!r} ne s’exécute pas dans un pipeline {schedule} avec engine={layout.engine!r} : prenez "
        "{name}={legal!r}.",
        scope="run",
    ),
)
"""What no engine of this version runs in a pipeline, though it can be predicted or simulated."""
RULES: Final[tuple[Rule[Any], ...]] = (*LAYOUT, *PRECISIONS, *LEGAL, *ELSEWHERE, *CONTEXT, *LIBRARY, *RUN, *PIPELINE)
"""The whole book."""
