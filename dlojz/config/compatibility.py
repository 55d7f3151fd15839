"""List what cannot be combined in a layout and in a run: the rules of scope "legal", in the order of precedence.

Of all the rules that a subject breaks, the first one of its list speaks. Rules ask for fields and for sizes of the
catalogue's models. What exists but no engine runs, or no library's program, is listed in `run_compatibility`.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3, for heads; Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2, for
the sequence; Fedus et al. 2021 (arXiv 2101.03961), §2, and Lepikhin et al. 2020 (arXiv 2006.16668), §3, for experts;
torch 2.13, `distributed/algorithms/ddp_comm_hooks`, for gradients; Li et al. 2021 (arXiv 2108.06084) and DeepSpeed's
`CurriculumScheduler` for curricula; Jiang et al. 2021 (arXiv 2104.00237) for updates within the passes.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

from dlojz import data as datasets
from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, say
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
Verdict = Facts | str | bool | None
"""What a condition finds in a subject: whether a rule is broken, or what its sentence says besides the fields, or the
whole sentence, where another module refuses the same."""
SENTENCES: Final = Sentences(Path(__file__).with_name("data") / "rules.md")
"""The sentences of the rules by their names: formats of `config`, `layout` and the facts of the condition."""


@dataclass(frozen=True)
class Rule(Generic[Subject_contra]):
    """Refuse one combination of fields.

    Args:
        name: of the rule, unique; its sentence stands under it in `SENTENCES`: what is wrong, the value received, what
            would work.
        condition: whether a subject breaks it, or, where it does, what its sentence says.
        scope: what it forbids.
    """

    name: str
    condition: Callable[[Subject_contra], Verdict]
    scope: Scope = "legal"

    def refusal(self, subject: Subject_contra) -> str | None:
        """Return the sentence by which a subject is refused, in the reader's language; None where it is not."""
        verdict = self.condition(subject)
        if not verdict:
            return None
        config = getattr(subject, "config", subject)
        if isinstance(verdict, str):
            text = verdict
        else:
            facts = {} if isinstance(verdict, bool) else verdict
            fields = {"config": config, "layout": getattr(config, "layout", config), **facts}
            text = SENTENCES(self.name, **fields)
        model = str(getattr(config, "model", ""))
        return text.replace(model, shown_name(model))


def rules(scope: Scope, conditions: Mapping[str, Callable[[Subject], Verdict]]) -> tuple[Rule[Subject], ...]:
    """Make the rules of a scope, by their names."""
    return tuple(Rule(name, condition, scope) for name, condition in conditions.items())


def first_refusal(rules: Sequence[Rule[Subject]], subject: Subject) -> str | None:
    """Return the sentence of the first rule that a subject breaks; None where it breaks none."""
    return next((refusal for rule in rules if (refusal := rule.refusal(subject)) is not None), None)


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


def _refused_by(validate: Callable[[], object]) -> str | None:
    """Catch the sentence by which another module refuses."""
    try:
        validate()
    except LabError as error:
        return str(error)
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


LAYOUT: Final[tuple[Rule[LayoutFields], ...]] = rules(
    "legal",
    {
        "one process is alone": lambda layout: layout.engine == "single" and (layout.world_size > 1 or layout.zero > 0),
        "torch has no ZeRO-1": lambda layout: layout.engine == "torch" and layout.zero == 1,
        "options of a pipeline need one": lambda layout: (
            first_set(layout, {"schedule": None, "chunks": None, "partition": "uniform"}) if layout.pp == 1 else None
        ),
        "torch's pipeline keeps weights whole": lambda layout: (
            layout.pp > 1 and layout.zero == 3 and layout.engine == "torch"
        ),
        "a pipeline accumulates whole gradients": lambda layout: (
            layout.pp > 1 and layout.zero >= 2 and layout.engine != "torch"
        ),
        "DeepSpeed's pipeline has one schedule": lambda layout: (
            layout.pp > 1 and layout.engine == "deepspeed" and layout.schedule not in (None, "1f1b")
        ),
        "DeepSpeed's pipeline has one stage per rank": lambda layout: (
            layout.pp > 1 and layout.engine == "deepspeed" and layout.chunks not in (None, 1)
        ),
        "the pattern of a partition can be read": _bad_pattern,
        "a partition is a known one": _unknown_partition,
        "DeepSpeed's pipeline has three partitions": lambda layout: (
            layout.pp > 1
            and layout.engine == "deepspeed"
            and (layout.partition == "flops" or _listed(layout.partition))
        ),
        "options of tensor parallelism need it": lambda layout: (
            first_set(layout, {"sequence_parallel": False, "tensor_parts": ""}) if layout.tp == 1 else None
        ),
        "sequence parallelism splits every part": lambda layout: layout.sequence_parallel and layout.tensor_parts != "",
        "the pattern of the split parts can be read": _bad_tensor_parts,
        "replicas hold equally many experts": _uneven_experts,
        "torch has no expert parallelism": lambda layout: layout.ep > 1 and layout.engine == "torch",
        "expert parallelism is within the data axis": lambda layout: layout.ep > 1 and (layout.tp > 1 or layout.pp > 1),
        "expert-parallel ranks keep states whole": lambda layout: layout.ep > 1 and layout.zero > 0,
        "context parallelism is beside the data axis": lambda layout: (
            layout.cp > 1 and max(layout.tp, layout.pp, layout.ep) > 1
        ),
        "context-parallel ranks keep states whole": lambda layout: (
            layout.cp > 1 and not layout.engine_spec.torch_buckets and layout.strategy != "by_hand"
        ),
        "the size of buckets is DDP's": lambda layout: (
            layout.bucket_mib is not None and not layout.engine_spec.takes_bucket_mib
        ),
        "gradients as views of buckets are DDP's": lambda layout: (
            layout.gradient_as_bucket_view and not layout.engine_spec.torch_buckets
        ),
        "a rank of PowerSGD needs PowerSGD": lambda layout: (
            layout.powersgd_rank != 1 and layout.gradient_compression != "powersgd"
        ),
        # Before the next rule, which would blame the engine where only replicas are missing.
        "compressed gradients need replicas": lambda layout: _unhooked(layout) and layout.dp == 1,
        "compressed gradients are DDP's": _unhooked,
        "offloading of states is DeepSpeed's": _offload_stage,
        "an activation plan lists runs of blocks": lambda layout: (
            bool(layout.activation_plan) and not block_choices(layout.activation_plan)
        ),
        "an activation plan decides alone": _beside_plan,
        "an activation plan is for whole blocks": _split_beside_plan,
        "sub-groups are of DeepSpeed ZeRO-3": lambda layout: (
            layout.sub_group_size is not None and (layout.engine != "deepspeed" or layout.zero != 3)
        ),
    },
)
"""Combinations that no layout may have."""


# --- a run ------------------------------------------------------------------------------------------------------------


def _input_problem(config: RunFields) -> str | None:
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


def _bad_stages(config: RunFields) -> str | None:
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


def _bad_routing(config: RunFields) -> str | None:
    if not has_experts(config.model):
        return None
    return routing_refusal(
        experts=config.experts or 1,
        top_k=config.top_k or 1,
        capacity_factor=1.0 if config.capacity_factor is None else config.capacity_factor,
        groups=config.expert_groups or 1,
        ep=config.layout.ep,
    )


def _unread(config: RunFields) -> Facts | None:
    """Find the first field that this curriculum does not read, and the curricula that do."""
    unread = {name: plain for name, plain in PLAIN.items() if name not in READ[config.curriculum]}
    if (unread_field := first_set(config, unread)) is None:
        return None
    readers = [curriculum for curriculum, names in READ.items() if unread_field["name"] in names]
    return {**unread_field, "works": ", ".join(f"curriculum={curriculum!r}" for curriculum in readers)}


def _no_multiple(config: RunFields, name: str, length: int | None) -> str | None:
    """Say that a length is no multiple of the curriculum's; None where it is one, or missing."""
    multiple = config.curriculum_multiple
    if not length or length % multiple == 0:
        return None
    # With the greatest common divisor this length is legal, and all that were legal stay so.
    facts = {"name": name, "length": length, "multiple": math.gcd(length, multiple)}
    return SENTENCES("lengths are multiples", config=config, **facts)


def _uneven_lengths(config: RunFields) -> Facts | None:
    tp, multiple = config.layout.tp, config.curriculum_multiple
    if config.curriculum == "none" or not config.layout.sequence_parallel or multiple % tp == 0:
        return None
    return {"works": math.lcm(multiple, tp)}  # the smallest multiple of the present one that tp divides


def _paced(config: RunFields) -> bool:
    return config.curriculum in ("linear", "root")


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


def _stage_no_multiple(config: RunFields) -> str | None:
    name = say(en="length", fr="longueur")
    return next(filter(None, (_no_multiple(config, name, length) for length, _ in _stages(config))), None)


def _never_whole(config: RunFields) -> Facts | None:
    stages = _stages(config)
    # After the last stage samples are whole, which at least one step must see.
    return {"most": config.steps - 1} if stages and stages[-1][1] >= config.steps else None


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

LEGAL: Final[tuple[Rule[RunFields], ...]] = rules(
    "legal",
    {
        "a model reads its data": _input_problem,
        # Tensor parallelism.
        "the model has no tensor-parallel form": lambda config: (
            config.layout.tp > 1 and isinstance(size_of(config.model), WHOLE_ONLY)
        ),
        "tp divides heads and widths": _uneven_tensor,
        "sequence parallelism is of texts": lambda config: (
            config.layout.sequence_parallel and config.sequence_length is None
        ),
        "tp divides the sequence": _uneven_sequence,
        # The optimizer.
        "warm-up steps need a first stage": lambda config: (
            {"works": ", ".join(WITH_FIRST_STAGE)}
            if config.warmup_steps is not None and config.optimizer not in WITH_FIRST_STAGE
            else None
        ),
        "local steps need replicas that go alone": lambda config: (
            {"works": ", ".join(LOCAL)} if config.local_steps is not None and config.optimizer not in LOCAL else None
        ),
        "an optimizer averages alone": _averages_elsewhere,
        "stages and local steps are within the run": _bad_stages,
        # The form of its update.
        "an optimizer of layers has them whole": _splits_layers,
        "forms of an update are of some optimizers": _without_form,
        "DeepSpeed updates in its own way": lambda config: (
            config.update in IN_PASSES and config.layout.engine == "deepspeed"
        ),
        "updates within the passes need whole states": _splits_states,
        "updates within the passes need gradients in full": lambda config: (
            config.update in IN_PASSES and config.layout.gradient_compression != "none"
        ),
        "an update in forward frees gradients": lambda config: (
            config.update == "in_forward" and config.layout.gradient_as_bucket_view
        ),
        "an update in backward accumulates nothing": lambda config: (
            config.update == "in_backward" and config.layout.micro_batches > 1
        ),
        "torch's DDP keeps its buckets": lambda config: (
            config.update == "in_backward" and config.layout.engine_spec.torch_buckets
        ),
        # Mixtures of experts.
        "numbers of a mixture need one": _without_experts,
        "tensor parallelism splits no mixture": lambda config: has_experts(config.model) and config.layout.tp > 1,
        "the numbers of a mixture go together": _bad_routing,
        # Curricula.
        "a curriculum reads its own fields": _unread,
        "a curriculum is of texts": lambda config: config.curriculum != "none" and config.sequence_length is None,
        "the whole length is a multiple": lambda config: (
            _no_multiple(config, "sequence_length", config.sequence_length) if config.curriculum != "none" else None
        ),
        "tp divides every length": _uneven_lengths,
        "a pacing starts below the whole length": lambda config: (
            _paced(config) and (config.curriculum_start or math.inf) >= (config.sequence_length or 0)
        ),
        "the first length is a multiple": lambda config: (
            _no_multiple(config, "curriculum_start", config.curriculum_start or config.sequence_length)
            if _paced(config)
            else None
        ),
        "a pacing ends within the run": lambda config: _paced(config) and (config.curriculum_steps or 1) > config.steps,
        "a discrete curriculum has lengths": lambda config: (
            config.curriculum == "discrete" and not config.curriculum_lengths
        ),
        "the lengths of a discrete curriculum can be read": lambda config: _refused_by(lambda: _stages(config)),
        "the lengths of a discrete curriculum rise": _falling,
        "the lengths of a discrete curriculum are multiples": _stage_no_multiple,
        "a discrete curriculum ends within the run": _never_whole,
    },
)
"""Combinations that no run may have, besides those of its layout."""
