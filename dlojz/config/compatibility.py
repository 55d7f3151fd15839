"""List what cannot be combined in a layout and in a run: the rules of scope "legal", in the order of precedence.

Of all the rules that a subject breaks, the first one of its list speaks. Rules ask for fields and for sizes of the
catalogue's models. What exists but no engine runs, or no library's program, is listed in `run_compatibility`.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3, for heads; Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2, for
the sequence; Fedus et al. 2021 (arXiv 2101.03961), §2, and Lepikhin et al. 2020 (arXiv 2006.16668), §3, for experts;
torch 2.13, `distributed/algorithms/ddp_comm_hooks`, for gradients; Li et al. 2021 (arXiv 2108.06084) and DeepSpeed's
`CurriculumScheduler` for curricula; Jiang et al. 2021 (arXiv 2104.00237) for updates within the passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Generic, Literal, TypeVar

from dlojz import data as datasets
from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.config.fields import (
    PARTITION_METHODS,
    PATTERN,
    ExpertFields,
    LayoutFields,
    RunFields,
    block_choices,
    explicit_bounds,
)
from dlojz.config.optimizers import COMMUNICATING, IN_PASS, LOCAL, OPTIMIZERS, WITH_FIRST_STAGE, WITH_FORMS
from dlojz.config.schedules import IN_PASSES, PLAIN, READ, check_local_steps, check_stages, stages_of
from dlojz.models.experts.routing import routing_refusal
from dlojz.models.foreign.elsewhere import is_taken_as_told, size_of
from dlojz.models.foreign.names import shown_name
from dlojz.models.sizes import AlexNetSize, CoAtNetSize, DeepSeekSize, GPTSize, LlamaSize, QwenSize, ViTSize

Subject = TypeVar("Subject")
Subject_contra = TypeVar("Subject_contra", contravariant=True)
Scope = Literal["legal", "run", "library"]
"""What a rule forbids: that the object exists; that an engine runs it, though it can be predicted; that a library's
program is asked for it."""
Facts = Mapping[str, object]


@dataclass(frozen=True)
class Rule(Generic[Subject_contra]):
    """Refuse one combination of fields.

    Args:
        name: of the rule, unique.
        applies: whether a subject breaks it, or, where it does, what its sentence says besides the fields.
        en: the sentence in English, as a format of `config`, `layout` and those facts: what is wrong, the value
            received, what would work.
        scope: what it forbids.
    """

    name: str
    applies: Callable[[Subject_contra], Facts | bool | None]
    en: str
    fr: str
    scope: Scope = "legal"

    def refusal(self, subject: Subject_contra) -> str | None:
        """Return the sentence by which a subject is refused, in the reader's language; None where it is not."""
        facts = self.applies(subject)
        if facts is None or facts is False:
            return None
        config = getattr(subject, "config", subject)
        fields = {"config": config, "layout": getattr(config, "layout", config), **(facts if facts is not True else {})}
        sentence = say(en=self.en, fr=self.fr).format(**fields)
        model = str(getattr(config, "model", ""))
        return sentence.replace(model, shown_name(model))


def first_refusal(rules: Sequence[Rule[Subject]], subject: Subject) -> str | None:
    """Return the sentence of the first rule that a subject breaks; None where it breaks none."""
    return next((sentence for rule in rules if (sentence := rule.refusal(subject)) is not None), None)


def check(rules: Sequence[Rule[Subject]], subject: Subject) -> None:
    """Refuse a subject that breaks a rule.

    Raises:
        LabError: with the sentence of the first one.
    """
    if (refusal := first_refusal(rules, subject)) is not None:
        raise LabError(refusal)


MAX_PATTERN: Final = 200
"""Letters that a regular expression may take."""


def first_set(subject: object, plain: Mapping[str, object]) -> Facts | None:
    """Return the first field that is not plain, as `name` and `value`, with its plain value; None where all are."""
    for name, expected in plain.items():
        if (value := getattr(subject, name)) != expected:
            return {"name": name, "value": value, "plain": expected}
    return None


def _refused_by(validate: Callable[[], object]) -> Facts | None:
    """Catch the sentence by which another module refuses."""
    try:
        validate()
    except LabError as error:
        return {"sentence": str(error)}
    return None


def _pattern_problem(pattern: str) -> str | None:
    """Explain why a text is no regular expression, in the reader's language."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None if len(pattern) <= MAX_PATTERN else say(en="too long", fr="trop long")


# --- a layout ---------------------------------------------------------------------------------------------------------


def _is_pattern(method: str) -> bool:
    return method.startswith(PATTERN) and 0 < len(method.removeprefix(PATTERN)) <= MAX_PATTERN


def _bad_pattern(layout: LayoutFields) -> Facts | None:
    if layout.pp == 1 or not _is_pattern(layout.partition):
        return None
    problem = _pattern_problem(layout.partition.removeprefix(PATTERN))
    return {"problem": problem} if problem else None


def _listed(method: str) -> bool:
    """Whether a partition lists increasing first blocks."""
    bounds = explicit_bounds(method) or ()
    return bool(bounds) and 0 not in bounds and list(bounds) == sorted(set(bounds))


def _unknown_partition(layout: LayoutFields) -> Facts | None:
    method = layout.partition
    if layout.pp == 1 or _is_pattern(method) or _listed(method) or method in PARTITION_METHODS:
        return None
    return {"method": method[:60]}


def _bad_tensor_parts(layout: LayoutFields) -> Facts | None:
    problem = _pattern_problem(layout.tensor_parts) if layout.tp > 1 else None
    return {"pattern": layout.tensor_parts[:60], "problem": problem} if problem else None


def _uneven_experts(layout: LayoutFields) -> Facts | None:
    if layout.dp % layout.ep == 0:
        return None
    works = (f"ep={ep}" for ep in range(2, min(layout.dp, 64) + 1) if layout.dp % ep == 0)
    return {"works": ", ".join(works) or "ep=1"}


def _unhooked(layout: LayoutFields) -> bool:
    """Whether gradients are compressed where torch's DDP has no hook for it."""
    return layout.gradient_compression != "none" and not (layout.engine_spec.torch_buckets and layout.tp == 1)


def _beside_plan(layout: LayoutFields) -> Facts | None:
    """Find what an activation plan decides already."""
    if not layout.activation_plan:
        return None
    # The plan says of each block whether it is kept, recomputed or offloaded; states may be offloaded beside it.
    plain = {"checkpointing": "none", **({"offload": "none"} if layout.offload == "activations" else {})}
    return first_set(layout, plain)


def _split_beside_plan(layout: LayoutFields) -> Facts | None:
    """Find a split that an activation plan is not for."""
    if not layout.activation_plan:
        return None
    gathers = layout.engine == "deepspeed" and layout.zero == 3
    return first_set(layout, {"tp": 1, "pp": 1, "ep": 1} | ({"zero": 2} if gathers else {}))


def _offload_stage(layout: LayoutFields) -> Facts | None:
    minimum_stage = {"optimizer": 1, "parameters": 3}.get(layout.offload, 0)  # the lowest ZeRO stage that can
    if not minimum_stage or (layout.engine == "deepspeed" and layout.zero >= minimum_stage):
        return None
    return {"least": minimum_stage, "zero": max(minimum_stage, layout.zero)}


LAYOUT: Final[tuple[Rule[LayoutFields], ...]] = (
    Rule(
        "one process is alone",
        lambda layout: layout.engine == "single" and (layout.world_size > 1 or layout.zero > 0),
        en="engine 'single' is one process and has no ZeRO stage, but {layout.degrees}, zero={layout.zero} was "
        "received: use engine 'torch' or 'deepspeed'.",
        fr="engine='single', c’est un seul processus, sans ZeRO, mais {layout.degrees}, zero={layout.zero} a été reçu "
        ": prenez engine='torch' ou 'deepspeed'.",
    ),
    Rule(
        "torch has no ZeRO-1",
        lambda layout: layout.engine == "torch" and layout.zero == 1,
        en="engine 'torch' has no ZeRO-1 (it has zero=0: DDP, zero=2 and zero=3: FSDP2), but zero=1 was received: use "
        "engine 'deepspeed' for ZeRO-1.",
        fr="engine='torch' n’a pas de ZeRO-1 (zero=0 : DDP ; zero=2 et zero=3 : FSDP2), mais zero=1 a été reçu : "
        "prenez engine='deepspeed' pour ZeRO-1.",
    ),
    Rule(
        "options of a pipeline need one",
        lambda layout: (
            first_set(layout, {"schedule": None, "chunks": None, "partition": "uniform"}) if layout.pp == 1 else None
        ),
        en="{name}={value!r} needs a pipeline, but pp=1 was received: set pp to 2 or more.",
        fr="{name}={value!r} demande un pipeline, mais pp=1 a été reçu : prenez pp=2 ou plus.",
    ),
    Rule(
        "torch's pipeline keeps weights whole",
        lambda layout: layout.pp > 1 and layout.zero == 3 and layout.engine == "torch",
        en="zero=3 would gather a stage's weights anew for every micro-batch of a pipeline (pp={layout.pp}): use "
        "zero=2, which gathers them once per step, or zero=0.",
        fr="zero=3 rassemblerait à nouveau les poids d’un étage pour chaque micro-batch d’un pipeline (pp={layout.pp}) "
        ": prenez zero=2, qui les rassemble une fois par itération, ou zero=0.",
    ),
    Rule(
        "a pipeline accumulates whole gradients",
        lambda layout: layout.pp > 1 and layout.zero >= 2 and layout.engine != "torch",
        en="zero={layout.zero} shards gradients that a pipeline accumulates over micro-batches, so it cannot be "
        "combined with pp={layout.pp}: use zero=1 or zero=0 with a pipeline, or engine='torch' with zero=2 (FSDP2).",
        fr="zero={layout.zero} découpe des gradients qu’un pipeline accumule sur ses micro-batches : il ne se combine "
        "pas avec pp={layout.pp} ; avec un pipeline, prenez zero=1 ou zero=0, ou engine='torch' avec zero=2 (FSDP2).",
    ),
    Rule(
        "DeepSpeed's pipeline has one schedule",
        lambda layout: layout.pp > 1 and layout.engine == "deepspeed" and layout.schedule not in (None, "1f1b"),
        en="DeepSpeed's pipeline has one schedule, 1f1b, but schedule={layout.schedule!r} was received: use "
        "engine='torch' or 'by_hand' for it, or leave schedule out.",
        fr="le pipeline de DeepSpeed n’a qu’un ordonnancement, 1f1b, mais schedule={layout.schedule!r} a été reçu : "
        "prenez engine='torch' ou 'by_hand', ou retirez schedule.",
    ),
    Rule(
        "DeepSpeed's pipeline has one stage per rank",
        lambda layout: layout.pp > 1 and layout.engine == "deepspeed" and layout.chunks not in (None, 1),
        en="DeepSpeed's pipeline has one stage per rank, but chunks={layout.chunks} was received: use engine='torch' "
        "or 'by_hand', or chunks=1.",
        fr="le pipeline de DeepSpeed a un étage par rang, mais chunks={layout.chunks} a été reçu : prenez "
        "engine='torch' ou 'by_hand', ou chunks=1.",
    ),
    Rule(
        "the pattern of a partition can be read",
        _bad_pattern,
        en="partition={layout.partition!r} is no regular expression ({problem}): write e.g. type:AttentionBlock.",
        fr="partition={layout.partition!r} n’est pas une expression régulière ({problem}) : écrivez par exemple "
        "type:AttentionBlock.",
    ),
    Rule(
        "a partition is a known one",
        _unknown_partition,
        en="partition={method!r} is unknown: use uniform, parameters, flops, type:REGEX (class names of blocks), or "
        "at:4,8,12 with increasing first blocks of the stages after the first.",
        fr="partition={method!r} est inconnu : prenez uniform, parameters, flops, type:REGEX (noms de classe des "
        "blocs), ou at:4,8,12, premiers blocs croissants des étages après le premier.",
    ),
    Rule(
        "DeepSpeed's pipeline has three partitions",
        lambda layout: (
            layout.pp > 1
            and layout.engine == "deepspeed"
            and (layout.partition == "flops" or _listed(layout.partition))
        ),
        en="DeepSpeed partitions blocks by uniform, parameters or type:REGEX, but partition={layout.partition!r} was "
        "received: use one of these.",
        fr="DeepSpeed répartit les blocs par uniform, parameters ou type:REGEX, mais partition={layout.partition!r} a "
        "été reçu : prenez l’un des trois.",
    ),
    Rule(
        "options of tensor parallelism need it",
        lambda layout: first_set(layout, {"sequence_parallel": False, "tensor_parts": ""}) if layout.tp == 1 else None,
        en="{name}={value!r} needs tensor parallelism, but tp=1 was received: set tp to 2 or more.",
        fr="{name}={value!r} demande du Tensor Parallelism, mais tp=1 a été reçu : prenez tp=2 ou plus.",
    ),
    Rule(
        "sequence parallelism splits every part",
        lambda layout: layout.sequence_parallel and layout.tensor_parts != "",
        en="sequence_parallel needs every part split, as a whole one would miss the other ranks' tokens, but "
        "tensor_parts={layout.tensor_parts!r} was received: leave one of the two out.",
        fr="sequence_parallel demande que toutes les parties soient découpées, car il manquerait à une partie entière "
        "les tokens des autres rangs, mais tensor_parts={layout.tensor_parts!r} a été reçu : retirez l’un des deux.",
    ),
    Rule(
        "the pattern of the split parts can be read",
        _bad_tensor_parts,
        en="tensor_parts={pattern!r} is no regular expression ({problem}): write e.g. attention, mlp, or "
        "blocks\\.[0-3]\\.",
        fr="tensor_parts={pattern!r} n’est pas une expression régulière ({problem}) : écrivez par exemple attention, "
        "mlp, ou blocks\\.[0-3]\\.",
    ),
    Rule(
        "replicas hold equally many experts",
        _uneven_experts,
        en="the experts are divided among the dp replicas, but ep={layout.ep} does not divide dp={layout.dp}: use "
        "{works}.",
        fr="ce sont les dp répliques qui se partagent les experts, mais ep={layout.ep} ne divise pas dp={layout.dp} : "
        "prenez {works}.",
    ),
    Rule(
        "torch has no expert parallelism",
        lambda layout: layout.ep > 1 and layout.engine == "torch",
        en="engine 'torch' has no expert parallelism, but ep={layout.ep} was received: use engine='by_hand' "
        "or 'deepspeed'.",
        fr="engine='torch' n’a pas d’Expert Parallelism, mais ep={layout.ep} a été reçu : prenez engine='by_hand' ou "
        "'deepspeed'.",
    ),
    Rule(
        "expert parallelism is within the data axis",
        lambda layout: layout.ep > 1 and (layout.tp > 1 or layout.pp > 1),
        en="expert parallelism is within the data axis alone here, but ep={layout.ep} was received with "
        "tp={layout.tp}, pp={layout.pp}: use tp=1, pp=1, or ep=1.",
        fr="l’Expert Parallelism se fait ici dans le seul axe des données, mais ep={layout.ep} a été reçu avec "
        "tp={layout.tp}, pp={layout.pp} : prenez tp=1, pp=1, ou ep=1.",
    ),
    Rule(
        "expert-parallel ranks keep states whole",
        lambda layout: layout.ep > 1 and layout.zero > 0,
        en="ep={layout.ep} divides the experts among ranks that keep their states whole, but zero={layout.zero} was "
        "received: use zero=0, or ep=1.",
        fr="ep={layout.ep} partage les experts entre des rangs qui gardent leurs états entiers, mais "
        "zero={layout.zero} a été reçu : prenez zero=0, ou ep=1.",
    ),
    Rule(
        "context parallelism is beside the data axis",
        lambda layout: layout.cp > 1 and max(layout.tp, layout.pp, layout.ep) > 1,
        en="context parallelism is combined with data parallelism alone here, but cp={layout.cp} was received with "
        "tp={layout.tp}, pp={layout.pp}, ep={layout.ep}: use tp=1, pp=1, ep=1, or cp=1.",
        fr="le Context Parallelism ne se combine ici qu’avec le parallélisme de données, mais cp={layout.cp} a été "
        "reçu avec tp={layout.tp}, pp={layout.pp}, ep={layout.ep} : prenez tp=1, pp=1, ep=1, ou cp=1.",
    ),
    Rule(
        "context-parallel ranks keep states whole",
        lambda layout: layout.cp > 1 and not layout.engine_spec.torch_buckets and layout.strategy != "by_hand",
        en="context parallelism is run with DDP (engine='torch' or 'by_hand', zero=0), but cp={layout.cp} was received "
        "with engine={layout.engine!r}, zero={layout.zero}: use one of these, or cp=1.",
        fr="le Context Parallelism s’exécute avec DDP (engine='torch' ou 'by_hand', zero=0), mais cp={layout.cp} a été "
        "reçu avec engine={layout.engine!r}, zero={layout.zero} : prenez l’un d’eux, ou cp=1.",
    ),
    Rule(
        "the size of buckets is DDP's",
        lambda layout: layout.bucket_mib is not None and not layout.engine_spec.takes_bucket_mib,
        en="bucket_mib={layout.bucket_mib:g} was received, but {layout.title} has no such buckets: use it with DDP "
        "(engine 'torch', zero=0, dp=2 or more) or engine 'by_hand'.",
        fr="bucket_mib={layout.bucket_mib:g} a été reçu, mais {layout.title} n’a pas de tels buckets : prenez-le avec "
        "DDP (engine='torch', zero=0, dp=2 ou plus) ou engine='by_hand'.",
    ),
    Rule(
        "gradients as views of buckets are DDP's",
        lambda layout: layout.gradient_as_bucket_view and not layout.engine_spec.torch_buckets,
        en="gradient_as_bucket_view is an option of DDP, but {layout.title} was received: use it with engine 'torch', "
        "zero=0, dp=2 or more.",
        fr="gradient_as_bucket_view est une option de DDP, mais {layout.title} a été reçu : prenez-la avec "
        "engine='torch', zero=0, dp=2 ou plus.",
    ),
    Rule(
        "a rank of PowerSGD needs PowerSGD",
        lambda layout: layout.powersgd_rank != 1 and layout.gradient_compression != "powersgd",
        en="powersgd_rank={layout.powersgd_rank} was received, but "
        "gradient_compression={layout.gradient_compression!r} has no such matrices: use "
        "gradient_compression='powersgd', or leave powersgd_rank out.",
        fr="powersgd_rank={layout.powersgd_rank} a été reçu, mais gradient_compression={layout.gradient_compression!r} "
        "n’a pas de telles matrices : prenez gradient_compression='powersgd', ou retirez powersgd_rank.",
    ),
    # Before the next rule, which would blame the engine where only replicas are missing.
    Rule(
        "compressed gradients need replicas",
        lambda layout: _unhooked(layout) and layout.dp == 1,
        en="gradient_compression={layout.gradient_compression!r} compresses what replicas send each other, but dp=1 "
        "sends nothing: use dp=2 or more with engine='torch', zero=0, or leave it out.",
        fr="gradient_compression={layout.gradient_compression!r} compresse ce que s’envoient les répliques, mais dp=1 "
        "n’envoie rien : prenez dp=2 ou plus avec engine='torch', zero=0, ou retirez-la.",
    ),
    Rule(
        "compressed gradients are DDP's",
        _unhooked,
        en="gradient_compression={layout.gradient_compression!r} is a hook of torch's DDP, but {layout.title} was "
        "received: use engine='torch', zero=0, tp=1, pp=1 with dp=2 or more.",
        fr="gradient_compression={layout.gradient_compression!r} est un « hook » du DDP de torch, mais {layout.title} "
        "a été reçu : prenez engine='torch', zero=0, tp=1, pp=1 avec dp=2 ou plus.",
    ),
    Rule(
        "offloading of states is DeepSpeed's",
        _offload_stage,
        en="offload={layout.offload!r} is DeepSpeed's, from ZeRO-{least} on, but {layout.title} was received: use "
        "engine='deepspeed', zero={zero}, or offload='activations', which every engine can.",
        fr="offload={layout.offload!r} est une option de DeepSpeed, à partir de ZeRO-{least}, mais {layout.title} a "
        "été reçu : prenez engine='deepspeed', zero={zero}, ou offload='activations', que tous les moteurs savent "
        "faire.",
    ),
    Rule(
        "an activation plan lists runs of blocks",
        lambda layout: bool(layout.activation_plan) and not block_choices(layout.activation_plan),
        en="activation_plan={layout.activation_plan!r} is no list of choices with their numbers of blocks: write one "
        "such as 'keep:3,recompute:12,offload:1'.",
        fr="activation_plan={layout.activation_plan!r} n’est pas une liste de choix avec leur nombre de blocs : "
        "écrivez par exemple 'keep:3,recompute:12,offload:1'.",
    ),
    Rule(
        "an activation plan decides alone",
        _beside_plan,
        en="{name}={value!r} was received beside activation_plan, which already decides it block by block: use "
        "{name}={plain!r}, or leave activation_plan out.",
        fr="{name}={value!r} a été reçu avec activation_plan, qui en décide déjà bloc par bloc : prenez "
        "{name}={plain!r}, ou retirez activation_plan.",
    ),
    Rule(
        "an activation plan is for whole blocks",
        _split_beside_plan,
        en="{name}={value} was received with activation_plan, which is for models whose blocks are whole on each rank: "
        "use {name}={plain}, or checkpointing instead.",
        fr="{name}={value} a été reçu avec activation_plan, qui vaut pour des modèles dont chaque rang a les blocs "
        "entiers : prenez {name}={plain}, ou plutôt checkpointing.",
    ),
    Rule(
        "sub-groups are of DeepSpeed ZeRO-3",
        lambda layout: layout.sub_group_size is not None and (layout.engine != "deepspeed" or layout.zero != 3),
        en="sub_group_size={layout.sub_group_size} is an option of DeepSpeed ZeRO-3, but engine={layout.engine!r}, "
        "zero={layout.zero} was received: use engine='deepspeed' and zero=3, or leave it out.",
        fr="sub_group_size={layout.sub_group_size} est une option de DeepSpeed ZeRO-3, mais engine={layout.engine!r}, "
        "zero={layout.zero} a été reçu : prenez engine='deepspeed' et zero=3, ou retirez-le.",
    ),
)
"""Combinations that no layout may have."""


# --- a run ------------------------------------------------------------------------------------------------------------


def _input_problem(config: RunFields) -> Facts | None:
    """Check the data set and the size of the input; a model that is not looked up here is checked when it is built."""

    def asked() -> None:
        if is_taken_as_told(config.model):
            if config.data != "example":
                family: datasets.Family = "text" if config.image_size is None else "image"
                datasets.check(config.data or "", family=family, model=config.model)
            return
        datasets.check(config.data or "", family=models.spec(config.model).family, model=config.model)
        models.check_input(config.model, image_size=config.image_size, sequence_length=config.sequence_length)

    return _refused_by(asked)


def _splits(config: RunFields) -> list[tuple[str, str, int]]:
    """List what `tp` must divide: its name in English and in French, and how many there are."""
    size = size_of(config.model)
    return list(_shared_out(size)) if isinstance(size, CoAtNetSize | ViTSize | GPTSize | LlamaSize) else []


def _shared_out(size: CoAtNetSize | ViTSize | GPTSize | LlamaSize) -> Iterator[tuple[str, str, int]]:
    if isinstance(size, CoAtNetSize):
        yield "channels of the stem", "canaux du premier bloc", size.stem_width
        for stage in size.stages:
            if stage.kind == "attention":
                yield "attention heads", "têtes d’attention", stage.width // size.head_dim  # heads × head_dim = width
            yield "channels of a stage", "canaux d’un étage", stage.width
        return
    yield "attention heads", "têtes d’attention", size.num_heads
    if isinstance(size, LlamaSize):
        yield "key-value heads", "têtes de clés et valeurs", size.num_kv_heads
    if not isinstance(size, GPTSize):  # whose hidden features are 4 × its width, which its heads divide
        yield "hidden features", "neurones cachés", size.mlp_width


def _uneven_tensor(config: RunFields) -> Facts | None:
    tp = config.layout.tp
    shared = _splits(config) if tp > 1 else []
    for en, fr, number in shared:
        if number % tp:
            fitting = [d for d in range(2, min(number, 64) + 1) if all(n % d == 0 for _, _, n in shared)]
            works = ", ".join(f"tp={degree}" for degree in fitting) or "tp=1"
            return {"number": number, "what": say(en=en, fr=fr), "works": works}
    return None


def _uneven_sequence(config: RunFields) -> Facts | None:
    tp, length = config.layout.tp, config.sequence_length
    if not config.layout.sequence_parallel or length is None or length % tp == 0:
        return None
    return {"near": max(tp, length - length % tp)}  # the largest multiple of tp that is no longer, or tp itself


def _averages_elsewhere(config: RunFields) -> bool:
    """Whether an optimizer that averages over the ranks meets something else that does."""
    layout = config.layout
    averages_alone = layout.engine_spec.leaves_averaging and max(layout.tp, layout.pp, layout.cp, layout.ep) == 1
    return config.optimizer in COMMUNICATING and not averages_alone


def _bad_stages(config: RunFields) -> Facts | None:
    """Check the numbers of warm-up and local steps."""
    if config.optimizer not in COMMUNICATING:
        return None

    def asked() -> None:
        if config.optimizer in LOCAL:
            check_local_steps(config.local_steps or 0, config.steps)
        if config.optimizer not in LOCAL or config.warmup_steps:
            check_stages(config.warmup_steps or 0, config.steps)

    return _refused_by(asked)


def _splits_states(config: RunFields) -> bool:
    """Whether a rank has not each parameter and its gradient whole, as an update within the passes needs."""
    layout = config.layout
    holds_whole = layout.engine_spec.replicates and max(layout.tp, layout.pp, layout.ep) == 1
    return config.update in IN_PASSES and not holds_whole


ROUTING_FIELDS: Final = tuple(ExpertFields.model_fields)
"""Fields of a run that only a mixture of experts has."""


def has_experts(model: str) -> bool:
    """Whether a model of the catalogue has a mixture of experts."""
    return getattr(size_of(model), "experts", None) is not None


def has_tied_head(config: RunFields) -> bool:
    """Whether the output layer of a run's model is its token embedding."""
    return bool(getattr(size_of(config.model), "tied_head", False))


def _without_experts(config: RunFields) -> Facts | None:
    if has_experts(config.model):
        return None
    return first_set(config, dict.fromkeys(ROUTING_FIELDS)) or first_set(config.layout, {"ep": 1})


def _bad_routing(config: RunFields) -> Facts | None:
    if not has_experts(config.model):
        return None
    sentence = routing_refusal(
        experts=config.experts or 1,
        top_k=config.top_k or 1,
        capacity_factor=1.0 if config.capacity_factor is None else config.capacity_factor,
        groups=config.expert_groups or 1,
        ep=config.layout.ep,
    )
    return {"sentence": sentence} if sentence else None


def _unread(config: RunFields) -> Facts | None:
    """Find the first field that this curriculum does not read, and the curricula that do."""
    unread = {name: plain for name, plain in PLAIN.items() if name not in READ[config.curriculum]}
    if (unread_field := first_set(config, unread)) is None:
        return None
    readers = [curriculum for curriculum, names in READ.items() if unread_field["name"] in names]
    return {**unread_field, "works": ", ".join(f"curriculum={curriculum!r}" for curriculum in readers)}


def _no_multiple(config: RunFields, lengths: Mapping[str, int]) -> Facts | None:
    """Find the first length that is no multiple of the curriculum's, with its name."""
    multiple = config.curriculum_multiple
    for name, length in lengths.items():
        if length % multiple:
            # With the greatest common divisor this length is legal, and all that were legal stay so.
            return {"name": name, "length": length, "multiple": math.gcd(length, multiple)}
    return None


def _whole_no_multiple(config: RunFields) -> Facts | None:
    full_length, grows = config.sequence_length, config.curriculum != "none"
    return _no_multiple(config, {"sequence_length": full_length}) if full_length and grows else None


def _uneven_lengths(config: RunFields) -> Facts | None:
    tp, multiple = config.layout.tp, config.curriculum_multiple
    if config.curriculum == "none" or not config.layout.sequence_parallel or multiple % tp == 0:
        return None
    return {"works": math.lcm(multiple, tp)}  # the smallest multiple of the present one that tp divides


def _paced(config: RunFields) -> bool:
    return config.curriculum in ("linear", "root")


def _start_no_multiple(config: RunFields) -> Facts | None:
    start = config.curriculum_start or config.sequence_length
    return _no_multiple(config, {"curriculum_start": start}) if start and _paced(config) else None


def _stages(config: RunFields) -> tuple[tuple[int, int], ...]:
    """Parse the stages of a discrete curriculum; none of another."""
    return stages_of(config.curriculum_lengths) if config.curriculum == "discrete" else ()


def _falling(config: RunFields) -> Facts | None:
    """Find two neighbouring lengths, or steps, of a discrete curriculum that do not rise."""
    if not (stages := _stages(config)):
        return None
    lengths = [0, *(length for length, _ in stages), config.sequence_length or 0]  # between 0 and the whole
    steps = [0, *(last_step for _, last_step in stages)]
    for kind, values in ((say(en="lengths", fr="les longueurs"), lengths), (say(en="steps", fr="les pas"), steps)):
        for before, after in pairwise(values):
            if after <= before:
                return {"what": kind, "before": before, "after": after}
    return None


def _stage_no_multiple(config: RunFields) -> Facts | None:
    name = say(en="length", fr="longueur")
    problems = (_no_multiple(config, {name: length}) for length, _ in _stages(config))
    return next((facts for facts in problems if facts), None)


def _never_whole(config: RunFields) -> Facts | None:
    stages = _stages(config)
    # After the last stage samples are whole, which at least one step must see.
    return {"most": config.steps - 1} if stages and stages[-1][1] >= config.steps else None


def _of_multiples(name: str, applies: Callable[[RunFields], Facts | None]) -> Rule[RunFields]:
    return Rule(
        name,
        applies,
        en="lengths are multiples of curriculum_multiple={config.curriculum_multiple}, but {name}={length} is none: "
        "use another length, or curriculum_multiple={multiple}.",
        fr="les longueurs sont des multiples de curriculum_multiple={config.curriculum_multiple}, mais {name}={length} "
        "n’en est pas un : prenez une autre longueur, ou curriculum_multiple={multiple}.",
    )


def _without_form(config: RunFields) -> Facts | None:
    """List the optimizers that have the form of the update."""
    with_form = IN_PASS if config.update in IN_PASSES else WITH_FORMS
    return {"forms": ", ".join(with_form)} if config.update != "auto" and config.optimizer not in with_form else None


def _splits_layers(config: RunFields) -> Facts | None:
    """Find the first field by which a rank would have a part of a layer, where the optimizer wants it whole."""
    layout, spec = config.layout, OPTIMIZERS[config.optimizer]
    if not spec.whole_layers:
        return None
    # FSDP2's rows of a matrix are gathered for Muon.
    plain = {} if spec.orthogonal and layout.engine_spec.gathers_frozen else {"zero": 0}
    engine = {"engine": "torch"} if layout.engine == "deepspeed" else {}
    return first_set(layout, {**engine, **plain, "tp": 1, "pp": 1, "ep": 1, "offload": "none"})


WHOLE_ONLY: Final = (AlexNetSize, QwenSize, DeepSeekSize)
"""Sizes of the models whose layers no rank holds in part."""


def _refused_elsewhere(name: str, applies: Callable[[RunFields], Facts | None]) -> Rule[RunFields]:
    """Make a rule with the sentence of another module, which refuses the same."""
    return Rule(name, applies, en="{sentence}", fr="{sentence}")


_TENSOR: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "the model has no tensor-parallel form",
        lambda config: config.layout.tp > 1 and isinstance(size_of(config.model), WHOLE_ONLY),
        en="tp={layout.tp} was received, but {config.model} has no tensor-parallel form: use a model of the coatnet, "
        "vit, gpt or llama families, or tp=1.",
        fr="tp={layout.tp} a été reçu, mais {config.model} n’a pas de forme Tensor Parallel : prenez un modèle des "
        "familles coatnet, vit, gpt ou llama, ou tp=1.",
    ),
    Rule(
        "tp divides heads and widths",
        _uneven_tensor,
        en="tp={layout.tp} does not divide the {number} {what} of {config.model}: use {works}.",
        fr="tp={layout.tp} ne divise pas les {number} {what} de {config.model} : prenez {works}.",
    ),
    Rule(
        "sequence parallelism is of texts",
        lambda config: config.layout.sequence_parallel and config.sequence_length is None,
        en="sequence_parallel splits the tokens of a text, but {config.model} reads images: use a gpt or llama "
        "model, or leave it out.",
        fr="sequence_parallel partage les tokens d’un texte, mais {config.model} lit des images : prenez un modèle gpt "
        "ou llama, ou retirez-le.",
    ),
    Rule(
        "tp divides the sequence",
        _uneven_sequence,
        en="sequence_parallel shares {config.sequence_length} tokens among tp={layout.tp} ranks, which does not come "
        "out even: use sequence_length={near} or another multiple of {layout.tp}.",
        fr="sequence_parallel partage {config.sequence_length} tokens entre tp={layout.tp} rangs, ce qui ne tombe pas "
        "juste : prenez sequence_length={near} ou un autre multiple de {layout.tp}.",
    ),
)
_OPTIMIZER: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "warm-up steps need a first stage",
        lambda config: config.warmup_steps is not None and config.optimizer not in WITH_FIRST_STAGE,
        en="warmup_steps={config.warmup_steps} was received, but {config.optimizer} has no first stage: use it with "
        f"{', '.join(WITH_FIRST_STAGE)}, or leave it out.",
        fr="warmup_steps={config.warmup_steps} a été reçu, mais {config.optimizer} n’a pas de première phase : "
        f"prenez-le avec {', '.join(WITH_FIRST_STAGE)}, ou retirez-le.",
    ),
    Rule(
        "local steps need replicas that go alone",
        lambda config: config.local_steps is not None and config.optimizer not in LOCAL,
        en="local_steps={config.local_steps} was received, but the replicas of {config.optimizer} meet in every step: "
        f"use it with {', '.join(LOCAL)}, or leave it out.",
        fr="local_steps={config.local_steps} a été reçu, mais les répliques de {config.optimizer} se rencontrent à "
        f"chaque pas : prenez-le avec {', '.join(LOCAL)}, ou retirez-le.",
    ),
    Rule(
        "an optimizer averages alone",
        _averages_elsewhere,
        en="optimizer={config.optimizer!r} averages over the ranks itself, so that nothing else may, but "
        "{layout.title} was received: use engine='by_hand', zero=0, tp=1, pp=1, cp=1, ep=1.",
        fr="optimizer={config.optimizer!r} moyenne lui-même entre les rangs, donc rien d’autre ne doit le faire, mais "
        "{layout.title} a été reçu : prenez engine='by_hand', zero=0, tp=1, pp=1, cp=1, ep=1.",
    ),
    _refused_elsewhere("stages and local steps are within the run", _bad_stages),
)
_UPDATE: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "an optimizer of layers has them whole",
        _splits_layers,
        en="optimizer={config.optimizer!r} updates a layer as a whole, but {name}={value!r} was received: use "
        "{name}={plain!r} (muon has zero=2 and zero=3 of engine='torch' too), or optimizer='adamw'.",
        fr="optimizer={config.optimizer!r} met à jour une couche entière, mais {name}={value!r} a été reçu : prenez "
        "{name}={plain!r} (muon a aussi zero=2 et zero=3 de engine='torch'), ou optimizer='adamw'.",
    ),
    Rule(
        "forms of an update are of some optimizers",
        _without_form,
        en="update={config.update!r} is a form of {forms}, but optimizer={config.optimizer!r} was received: use one of "
        "these, or update='auto'.",
        fr="update={config.update!r} est une forme de {forms}, mais optimizer={config.optimizer!r} a été reçu : prenez "
        "l’un d’eux, ou update='auto'.",
    ),
    Rule(
        "DeepSpeed updates in its own way",
        lambda config: config.update in IN_PASSES and config.layout.engine == "deepspeed",
        en="update={config.update!r} is an option of the engines torch and by_hand, but engine='deepspeed', which "
        "updates its own flat tensors after backward, was received: use one of these, or update='fused'.",
        fr="update={config.update!r} est une option des moteurs torch et by_hand, mais engine='deepspeed', qui met à "
        "jour ses propres tenseurs plats après la passe arrière, a été reçu : prenez l’un des deux, ou update='fused'.",
    ),
    Rule(
        "updates within the passes need whole states",
        _splits_states,
        en="update={config.update!r} updates each parameter within the passes, so that a rank must hold it and its "
        "gradient whole, but {layout.title} was received: use zero=0, tp=1, pp=1, ep=1, or update='fused'.",
        fr="update={config.update!r} met à jour chaque paramètre pendant les passes, donc un rang doit le détenir "
        "entier, et son gradient aussi, mais {layout.title} a été reçu : prenez zero=0, tp=1, pp=1, ep=1, ou "
        "update='fused'.",
    ),
    Rule(
        "updates within the passes need gradients in full",
        lambda config: config.update in IN_PASSES and config.layout.gradient_compression != "none",
        en="update={config.update!r} is run and predicted with gradients that are sent in full, but "
        "gradient_compression={layout.gradient_compression!r} was received: use gradient_compression='none', or "
        "update='fused'.",
        fr="update={config.update!r} s’exécute et se prédit avec des gradients envoyés en entier, mais "
        "gradient_compression={layout.gradient_compression!r} a été reçu : prenez gradient_compression='none', ou "
        "update='fused'.",
    ),
    Rule(
        "an update in forward frees gradients",
        lambda config: config.update == "in_forward" and config.layout.gradient_as_bucket_view,
        en="update='in_forward' frees each gradient in the next forward pass, but with gradient_as_bucket_view=True it "
        "is part of a bucket that stays: leave gradient_as_bucket_view out.",
        fr="update='in_forward' libère chaque gradient dans la passe avant suivante, mais avec "
        "gradient_as_bucket_view=True il fait partie d’un bucket qui reste : retirez gradient_as_bucket_view.",
    ),
    Rule(
        "an update in backward accumulates nothing",
        lambda config: config.update == "in_backward" and config.layout.micro_batches > 1,
        en="update='in_backward' updates a parameter as soon as its gradient is there, before other micro-batches "
        "could add theirs, but micro_batches={layout.micro_batches} was received: use micro_batches=1, or "
        "update='in_forward'.",
        fr="update='in_backward' met un paramètre à jour dès que son gradient est là, avant que d’autres micro-batches "
        "n’ajoutent le leur, mais micro_batches={layout.micro_batches} a été reçu : prenez micro_batches=1, ou "
        "update='in_forward'.",
    ),
    Rule(
        "torch's DDP keeps its buckets",
        lambda config: config.update == "in_backward" and config.layout.engine_spec.torch_buckets,
        en="update='in_backward' frees gradients as they come, but torch's DDP keeps them all in its buckets, so that "
        "nothing would be saved with dp={layout.dp}: use engine='by_hand', which sends and forgets a bucket at a time.",
        fr="update='in_backward' libère les gradients à mesure, mais le DDP de torch les garde tous dans ses buckets, "
        "donc rien ne serait économisé avec dp={layout.dp} : prenez engine='by_hand', qui envoie et oublie un bucket à "
        "la fois.",
    ),
)
_EXPERTS: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "numbers of a mixture need one",
        _without_experts,
        en="{name}={value} was received, but {config.model} has no experts: use a model with a mixture of experts such "
        "as moe_tiny, or leave it out.",
        fr="{name}={value} a été reçu, mais {config.model} n’a pas d’experts : prenez un modèle à mélange d’experts "
        "comme moe_tiny, ou retirez-le.",
    ),
    Rule(
        "tensor parallelism splits no mixture",
        lambda config: has_experts(config.model) and config.layout.tp > 1,
        en="Tensor Parallelism cannot split a mixture of experts, but tp={layout.tp} was received with {config.model}: "
        "use tp=1; ep divides the experts.",
        fr="le Tensor Parallelism ne sait pas découper un mélange d’experts, mais tp={layout.tp} a été reçu avec "
        "{config.model} : prenez tp=1 ; c’est ep qui partage les experts.",
    ),
    _refused_elsewhere("the numbers of a mixture go together", _bad_routing),
)
_CURRICULUM: Final[tuple[Rule[RunFields], ...]] = (
    Rule(
        "a curriculum reads its own fields",
        _unread,
        en="{name}={value!r} was received, but curriculum={config.curriculum!r} does not read it: use {works}, or "
        "leave it out.",
        fr="{name}={value!r} a été reçu, mais curriculum={config.curriculum!r} ne le lit pas : prenez {works}, ou "
        "retirez-le.",
    ),
    Rule(
        "a curriculum is of texts",
        lambda config: config.curriculum != "none" and config.sequence_length is None,
        en="curriculum={config.curriculum!r} makes the samples of a text grow, but {config.model} reads images: use a "
        "gpt or llama model, or leave it out.",
        fr="curriculum={config.curriculum!r} fait croître les échantillons d’un texte, mais {config.model} lit des "
        "images : prenez un modèle gpt ou llama, ou retirez-le.",
    ),
    _of_multiples("the whole length is a multiple", _whole_no_multiple),
    Rule(
        "tp divides every length",
        _uneven_lengths,
        en="sequence_parallel shares each length among tp={layout.tp} ranks, but lengths are multiples of "
        "{config.curriculum_multiple}: use curriculum_multiple={works}.",
        fr="sequence_parallel partage chaque longueur entre tp={layout.tp} rangs, mais les longueurs sont des "
        "multiples de {config.curriculum_multiple} : prenez curriculum_multiple={works}.",
    ),
    Rule(
        "a pacing starts below the whole length",
        lambda config: _paced(config) and (config.curriculum_start or math.inf) >= (config.sequence_length or 0),
        en="a curriculum ends longer than it starts, but curriculum_start={config.curriculum_start} and "
        "sequence_length={config.sequence_length} were received: use a start below {config.sequence_length}.",
        fr="un curriculum finit plus long qu’il ne commence, mais curriculum_start={config.curriculum_start} et "
        "sequence_length={config.sequence_length} ont été reçus : prenez un début inférieur à "
        "{config.sequence_length}.",
    ),
    _of_multiples("the first length is a multiple", _start_no_multiple),
    Rule(
        "a pacing ends within the run",
        lambda config: _paced(config) and (config.curriculum_steps or 1) > config.steps,
        en="curriculum_steps={config.curriculum_steps} ends beyond the {config.steps} steps of the run, whose samples "
        "would never be whole: use at most {config.steps}, or more steps.",
        fr="curriculum_steps={config.curriculum_steps} finit au-delà des {config.steps} pas de l’entraînement, dont "
        "les échantillons ne seraient jamais entiers : prenez au plus {config.steps}, ou davantage de pas.",
    ),
    Rule(
        "a discrete curriculum has lengths",
        lambda config: config.curriculum == "discrete" and not config.curriculum_lengths,
        en="curriculum='discrete' needs its lengths and their last steps: give curriculum_lengths, such as "
        "16:100,32:200.",
        fr="curriculum='discrete' demande ses longueurs et leurs derniers pas : donnez curriculum_lengths, par exemple "
        "16:100,32:200.",
    ),
    _refused_elsewhere(
        "the lengths of a discrete curriculum can be read", lambda config: _refused_by(lambda: _stages(config))
    ),
    Rule(
        "the lengths of a discrete curriculum rise",
        _falling,
        en="the {what} of a curriculum rise, up to the whole sequence_length={config.sequence_length}, but "
        "curriculum_lengths={config.curriculum_lengths} goes from {before} to {after}: write them in order, without "
        "the whole.",
        fr="{what} d’un curriculum croissent, jusqu’à sequence_length={config.sequence_length}, mais "
        "curriculum_lengths={config.curriculum_lengths} va de {before} à {after} : écrivez-les dans l’ordre, sans la "
        "longueur entière.",
    ),
    _of_multiples("the lengths of a discrete curriculum are multiples", _stage_no_multiple),
    Rule(
        "a discrete curriculum ends within the run",
        _never_whole,
        en="curriculum_lengths={config.curriculum_lengths} ends beyond the {config.steps} steps of the run, whose "
        "samples would never be whole: end it at step {most} at most, or take more steps.",
        fr="curriculum_lengths={config.curriculum_lengths} finit au-delà des {config.steps} pas de l’entraînement, "
        "dont les échantillons ne seraient jamais entiers : terminez-le au pas {most} au plus, ou prenez davantage de "
        "pas.",
    ),
)

LEGAL: Final[tuple[Rule[RunFields], ...]] = (
    _refused_elsewhere("a model reads its data", _input_problem),
    *_TENSOR,
    *_OPTIMIZER,
    *_UPDATE,
    *_EXPERTS,
    *_CURRICULUM,
)
"""Combinations that no run may have, besides those of its layout."""
