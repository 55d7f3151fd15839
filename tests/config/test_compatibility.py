"""The rule book: every rule has a run that breaks it first, and a sentence in both languages."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES, use_language
from dlojz.config.compatibility import LAYOUT, LEGAL, SENTENCES, Rule, Scope
from dlojz.config.fields import HELP, SUBJECTS, LayoutFields, RunFields
from dlojz.config.layout import Layout
from dlojz.config.run_compatibility import CONTEXT, ELSEWHERE, LIBRARY, PIPELINE, PRECISIONS, RULES, RUN, PipelineRun
from dlojz.config.run_config import RunConfig
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.runnable import check_runnable

GPT: dict[str, Any] = {"model": "gpt_tiny"}
MOE: dict[str, Any] = {"model": "moe_tiny"}
EXPERTS: dict[str, Any] = {**MOE, "dp": 2, "ep": 2, "engine": "by_hand"}
LINEAR: dict[str, Any] = {**GPT, "curriculum": "linear"}
DISCRETE: dict[str, Any] = {**GPT, "curriculum": "discrete"}
MEGATRON: dict[str, Any] = {**GPT, "library": "megatron"}
BROKEN: dict[str, dict[str, Any]] = {
    "one process is alone": {"dp": 2, "engine": "single"},
    "torch has no ZeRO-1": {"zero": 1},
    "options of a pipeline need one": {"chunks": 2},
    "torch's pipeline keeps weights whole": {"pp": 2, "zero": 3},
    "a pipeline accumulates whole gradients": {"pp": 2, "engine": "deepspeed", "zero": 3},
    "DeepSpeed's pipeline has one schedule": {"pp": 2, "engine": "deepspeed", "schedule": "dualpipe"},
    "DeepSpeed's pipeline has one stage per rank": {"pp": 2, "engine": "deepspeed", "chunks": 2},
    "the pattern of a partition can be read": {"partition": "type:(", "pp": 2},
    "a partition is a known one": {"pp": 2, "partition": "at:0"},
    "DeepSpeed's pipeline has three partitions": {"pp": 2, "engine": "deepspeed", "partition": "flops"},
    "options of tensor parallelism need it": {"tensor_parts": "("},
    "sequence parallelism splits every part": {"tp": 2, "tensor_parts": "mlp", "sequence_parallel": True},
    "the pattern of the split parts can be read": {"tensor_parts": "(", "tp": 2},
    "replicas hold equally many experts": {"ep": 2},
    "torch has no expert parallelism": {"dp": 2, "ep": 2},
    "expert parallelism is within the data axis": {"dp": 2, "engine": "by_hand", "tp": 3, "ep": 2},
    "expert-parallel ranks keep states whole": {"dp": 2, "engine": "by_hand", "zero": 3, "ep": 2},
    "context parallelism is beside the data axis": {"cp": 2, "pp": 2},
    "context-parallel ranks keep states whole": {"cp": 2, "zero": 2},
    "the size of buckets is DDP's": {"bucket_mib": 4.5},
    "gradients as views of buckets are DDP's": {"gradient_as_bucket_view": True},
    "a rank of PowerSGD needs PowerSGD": {"powersgd_rank": 4},
    "compressed gradients need replicas": {"gradient_compression": "powersgd"},
    "compressed gradients are DDP's": {"dp": 2, "engine": "by_hand", "gradient_compression": "powersgd"},
    "offloading of states is DeepSpeed's": {"offload": "parameters"},
    "an activation plan lists runs of blocks": {"activation_plan": "keep"},
    "an activation plan decides alone": {"activation_plan": "keep:3", "checkpointing": "full"},
    "an activation plan is for whole blocks": {"activation_plan": "keep:3", "tp": 2},
    "sub-groups are of DeepSpeed ZeRO-3": {"sub_group_size": 1000, "engine": "deepspeed", "zero": 2},
    "channels are last where weights keep their layout": {**GPT, "channels_last": True},
    "a loss in parts is of texts, with whole layers": {"loss_chunks": 2},
    "weights in bf16 stay so": {"precision": "bf16-true", "engine": "deepspeed", "dp": 2, "zero": 1},
    "gradients in fp32 are DeepSpeed's": {"fp32_gradients": True},
    "a model reads its data": {"data": "cifar"},
    "the model has no tensor-parallel form": {"tp": 2, "model": "alexnet"},
    "tp divides heads and widths": {"tp": 3},
    "sequence parallelism is of texts": {"sequence_parallel": True, "tp": 2},
    "tp divides the sequence": {**GPT, "tp": 2, "sequence_parallel": True, "sequence_length": 63},
    "warm-up steps need a first stage": {"warmup_steps": 2},
    "local steps need replicas that go alone": {"local_steps": 4},
    "an optimizer averages alone": {"optimizer": "one_bit_adam"},
    "stages and local steps are within the run": {"optimizer": "one_bit_adam", "engine": "by_hand", "steps": 1},
    "an optimizer of layers has them whole": {"optimizer": "muon", "tp": 2},
    "forms of an update are of some optimizers": {"update": "in_forward", "optimizer": "lamb"},
    "DeepSpeed updates in its own way": {"update": "in_backward", "engine": "deepspeed"},
    "updates within the passes need whole states": {"update": "in_forward", "tp": 2},
    "updates within the passes need gradients in full": {
        **{"update": "in_forward", "dp": 2},
        "gradient_compression": "powersgd",
    },
    "an update in forward frees gradients": {"update": "in_forward", "dp": 2, "gradient_as_bucket_view": True},
    "an update in backward accumulates nothing": {"update": "in_backward", "micro_batches": 4},
    "torch's DDP keeps its buckets": {"dp": 2, "update": "in_backward"},
    "numbers of a mixture need one": {"capacity_factor": 1.0},
    "tensor parallelism splits no mixture": {**MOE, "tp": 2},
    "the numbers of a mixture go together": {**MOE, "top_k": 9},
    "a curriculum reads its own fields": {"curriculum_lengths": "12:3"},
    "a curriculum is of texts": {"curriculum": "root"},
    "the whole length is a multiple": {**LINEAR, "curriculum_multiple": 6},
    "tp divides every length": {**LINEAR, "tp": 2, "sequence_parallel": True, "curriculum_multiple": 1},
    "a pacing starts below the whole length": {**LINEAR, "curriculum_start": 1024},
    "the first length is a multiple": {**LINEAR, "curriculum_start": 12},
    "a pacing ends within the run": {**LINEAR, "curriculum_steps": 50},
    "a discrete curriculum has lengths": DISCRETE,
    "the lengths of a discrete curriculum can be read": {**DISCRETE, "curriculum_lengths": "bad"},
    "the lengths of a discrete curriculum rise": {**DISCRETE, "curriculum_lengths": "16:5,8:10"},
    "the lengths of a discrete curriculum are multiples": {**DISCRETE, "curriculum_lengths": "12:3"},
    "a discrete curriculum ends within the run": {**DISCRETE, "curriculum_lengths": "8:50"},
    "targets have a length beside an encoder": {**GPT, "target_length": 4},
    "adapters are beside layers of transformers": {**GPT, "lora": 4},
    "adapters have a rank and named layers": {**GPT, "lora_base": "4bit"},
    "models from elsewhere have replicas": {"model": "torchvision:resnet18", "update": "in_forward"},
    "models from elsewhere are split by torch or by hand": {
        **{"model": "torchvision:resnet18", "tp": 2, "engine": "deepspeed"}
    },
    "context parallelism is of texts": {"cp": 2},
    "context-parallel ranks have no experts": {**MOE, "cp": 2},
    "cp divides the sequence": {**GPT, "cp": 3},
    "cp divides every length": {**LINEAR, "cp": 8},
    "programs train no mixtures": {**MOE, "library": "torch"},
    "programs have one way": {"library": "torch", "offload": "activations"},
    "programs split along their own axes": {"library": "torch", "pp": 4},
    "Megatron-core trains its own GPT": {"library": "megatron"},
    "Megatron-core's sequence parallelism needs Apex": {**MEGATRON, "sequence_parallel": True, "tp": 2},
    "Megatron-core is asked for 1f1b": {**MEGATRON, "pp": 2, "schedule": "zb-h1"},
    "Megatron-core's stages are equal": {**MEGATRON, "pp": 3},
    "Colossal-AI synchronizes BatchNorm": {"library": "colossalai"},
    "programs shard block by block": {"model": "gpt2_tiny", "library": "torch", "zero": 3, "dp": 2},
    "programs have their own layouts": {"library": "torch", "engine": "by_hand"},
    "LAMB needs whole layers": {"tp": 2, "optimizer": "lamb"},
    "some values are only predicted": {"precision": "fp16"},
    "pipelines train no mixtures": {**MOE, "pp": 4},
    "DeepSpeed ZeRO-3 gathers no gate": {**MOE, "engine": "deepspeed", "zero": 3},
    "experts of a rank are updated by themselves": {**EXPERTS, "optimizer": "lamb"},
    "DeepSpeed's experts are in fp32": {**EXPERTS, "engine": "deepspeed", "precision": "bf16"},
    "DeepSpeed's gate has two losses less": {**EXPERTS, "engine": "deepspeed", "z_loss": 0.1},
    "DeepSpeed trains no tensor-parallel layers": {"tp": 2, "engine": "deepspeed"},
    "asynchronous pipelines have whole layers": {"pp": 4, "schedule": "pipedream", "tp": 2},
    "asynchronous pipelines tie no head": {"model": "gpt2_tiny", "pp": 2, "schedule": "pipedream"},
    "some values are not run in a pipeline": {
        **{"pp": 2, "micro_batches": 2, "schedule": "zb-h1"},
        "checkpointing": "full",
    },
}
"""By the name of each rule, a run that breaks it before all others."""


def first_broken(rules: Sequence[Rule[Any]], subject: object) -> str | None:
    return next((rule.name for rule in rules if rule.refusal(subject) is not None), None)


def broken_by(fields: dict[str, Any]) -> str | None:
    """The name of the first rule that a run breaks, asked list by list, as those who build and start runs do."""
    layout = LayoutFields(**{name: value for name, value in fields.items() if name in LayoutFields.model_fields})
    if (name := first_broken(LAYOUT, layout)) is not None:
        return name
    own = {name: value for name, value in fields.items() if name not in LayoutFields.model_fields}
    run = RunFields(**RunConfig._fill_in({**own, "layout": layout}))
    if (name := first_broken((*PRECISIONS, *LEGAL, *ELSEWHERE, *CONTEXT, *LIBRARY), run)) is not None:
        return name
    config = RunConfig.of(**fields)
    if (name := first_broken(RUN, config)) is not None:
        return name
    schedule = schedule_of(config.layout)
    return first_broken(PIPELINE, PipelineRun(config, schedule.name, schedule.splits_backward))


def test_rules_have_names_of_their_own_and_an_example_each() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    assert list(BROKEN) == [rule.name for rule in RULES]
    assert {rule.scope for rule in RULES} == set(get_args(Scope))
    # What has no sentence of its own says another module's, or this one, which three rules say.
    assert set(SENTENCES.pairs) - set(BROKEN) == {"lengths are multiples"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_is_reached_and_says_so_in_both_languages(rule: Rule[Any]) -> None:
    """None hides behind another; and the sentence is what the reader gets."""
    fields = BROKEN[rule.name]
    assert broken_by(fields) == rule.name
    sentences = []
    for language in LANGUAGES:
        use_language(language)
        with pytest.raises(LabError) as refusal:
            config = RunConfig.of(**fields)
            assert rule.scope == "run", "an object that breaks a rule of another scope does not exist"
            check_runnable(config)
        sentences.append(str(refusal.value))
    assert len(set(sentences)) == len(LANGUAGES)
    assert not any("{" in sentence or "\n" in sentence for sentence in sentences)


@pytest.mark.parametrize("fields", [EXPERTS, {**MOE, "dp": 2, "engine": "deepspeed"}])
def test_a_gate_of_the_labs_own_has_all_its_losses(fields: dict[str, Any]) -> None:
    """Where no expert parallelism of DeepSpeed's brings its gate."""
    assert broken_by({**fields, "z_loss": 0.1}) is None


def test_fields_are_below_the_rules_and_the_rules_below_the_run() -> None:
    """Each module of the room imports earlier ones alone, wherever in the file, and for types too."""
    room = (
        "engines",
        "fields",
        "schedules",
        "compatibility",
        "run_compatibility",
        "layout",
        "run_config",
    )
    package = Path(dlojz.__file__).parent / "config"
    for number, name in enumerate(room):
        tree = ast.parse((package / f"{name}.py").read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        later = {f"dlojz.config.{other}" for other in room[number:]}
        assert not imported & later, f"{name} imports {sorted(filter(None, imported & later))}"


def test_a_layout_and_its_run_are_the_fields_judged() -> None:
    assert isinstance(RunConfig.of(), RunFields) and isinstance(Layout(), LayoutFields)
    assert list(RunConfig.model_fields) == [*RunFields.model_fields, "script"]
    assert isinstance(RunConfig().layout, Layout)


def test_each_field_has_help_in_both_languages() -> None:
    assert set(HELP.pairs) == {name for subject in SUBJECTS for name in subject.fields.model_fields}
