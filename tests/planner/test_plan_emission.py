"""A chosen layout as files: each is read back by the parser of the program that takes it, to the same layout."""

import json
import subprocess
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.config.deepspeed_json import read_deepspeed_json
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import calibration, simulate
from dlojz.cost_model.passes import stages_of
from dlojz.hardware import cluster
from dlojz.hardware.clusters import Machine, machine
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.planner.answer import Choice, Plan
from dlojz.planner.ask import plan
from dlojz.planner.explain import code_of
from dlojz.planner.export import batch_script, deepspeed_document, megatron_arguments, program, torchrun_arguments
from dlojz.planner.planned_model import subject
from dlojz.planner.question import Question
from dlojz.planner.space import columns_of, copies_of, planned_layout, space_of
from dlojz.runnable import check_runnable

from .trainers_arguments import read_megatron, read_torchtitan

LLAMA = DecoderSize(16, 2048, 16, 32000, 2048, mlp_width=5632, kv_heads=4, gated=True, tied=False, biased=False,
                    positions="none")  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Plan:
    """A decoder by its sizes, on two nodes."""
    return plan(LLAMA, "jean_zay_a100", gpus=16, batch=64, simulate=1)


@pytest.fixture(scope="module")
def site() -> Machine:
    """Jean Zay's A100 nodes."""
    return machine("jean_zay_a100")


def test_every_admitted_layout_of_a_catalogue_model_is_a_legal_run() -> None:
    """All of them: each makes a `RunConfig` that the lab's engines would take, with the same degrees and batch."""
    made = plan("gpt_tiny", "jean_zay_a100", gpus=4, batch=8, precision="bf16", simulate=1)
    assert made.found.admitted.size > 50
    seen = set()
    for place in range(made.found.admitted.size):
        choice = made.choice(place)
        one, config = choice.candidate, choice.config(steps=5)
        layout = config.layout
        assert (layout.dp, layout.tp, layout.pp, layout.zero, layout.global_batch) == (
            one.dp,
            one.tp,
            one.pp,
            one.zero,
            8,
        )
        assert config.steps == 5 and config.precision == "bf16" and config.device == "cuda"
        check_runnable(config)
        seen.add((one.engine, one.zero, one.pp > 1, one.tp > 1, one.offload))
    assert {engine for engine, *_ in seen} == {"torch", "deepspeed"} and any(tensor for *_, tensor, _ in seen)


def test_the_run_of_an_image_model_and_its_json(tmp_path: Any) -> None:
    made = plan("coatnet_tiny", "jean_zay_a100", gpus=4, batch=16, precision="bf16", simulate=1)
    offloaded = {"engine": "deepspeed", "zero": 3, "offload": "parameters"}
    for fields in ({"tp": 2}, offloaded, {"engine": "torch", "zero": 3}):
        choice = made.choose(**fields)
        files = choice.documents()
        config = RunConfig.from_json(files["run_config.json"])
        check_runnable(config)
        assert config == choice.config() and config.layout.tp == choice.candidate.tp
        if choice.candidate.engine == "deepspeed":
            read = read_deepspeed_json(files["ds_config.json"], base=config)
            assert read.layout == config.layout and config.layout.offload == "parameters"
        else:
            assert "ds_config.json" not in files


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": "deepspeed", "zero": 3, "offload": "parameters"},
        {"engine": "deepspeed", "zero": 1, "offload": "optimizer"},
        {"engine": "megatron-deepspeed", "zero": 1, "pp": 2, "checkpointing": "full"},
        {"engine": "deepspeed", "zero": 2},
    ],
)
def test_deepspeed_reads_its_own_configuration(llama: Plan, fields: dict[str, Any]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    choice = llama.choose(**fields)
    one, document = choice.candidate, deepspeed_document(choice.question, choice.candidate)
    assert json.loads(choice.documents()["ds_config.json"]) == document
    assert document.pop("train_batch_size") == 64 == one.dp * one.micro_batch * one.micro_batches
    read = DeepSpeedConfig(document)  # one process stands for all replicas, so their product is looked at above
    assert read.train_micro_batch_size_per_gpu == one.micro_batch
    assert read.gradient_accumulation_steps == one.micro_batches
    assert read.zero_optimization_stage == one.zero and read.bfloat16_config.enabled
    zero = read.zero_config
    assert (zero.offload_optimizer is not None) == (one.offload != "none")
    assert (zero.offload_param is not None) == (one.offload == "parameters")
    if one.pp > 1:
        assert read.pipeline["activation_checkpoint_interval"] == 1 and read.grad_accum_dtype == "fp32"


@pytest.mark.parametrize(
    "fields",
    [
        {
            "engine": "megatron-core",
            "pp": 2,
            "schedule": "interleaved",
            "chunks": 2,
            "tp": 2,
            "sequence_parallel": True,
        },
        {"engine": "megatron-core", "zero": 1, "pp": 1, "checkpointing": "full"},
        {"engine": "megatron-core", "zero": 0, "tp": 4, "checkpointing": "selective"},
        {"engine": "megatron-deepspeed", "tp": 2, "pp": 4, "zero": 1},
    ],
)
def test_program_of_megatron_reads_its_arguments_back(llama: Plan, fields: dict[str, Any]) -> None:
    choice = llama.choose(**fields)
    one, words = choice.candidate, program(choice.question, choice.candidate)
    assert words[0] == "pretrain_gpt.py"
    read = read_megatron(words[1:])
    assert read["tensor_model_parallel_size"] == one.tp and read["pipeline_model_parallel_size"] == one.pp
    assert read["micro_batch_size"] == one.micro_batch and read["global_batch_size"] == 64
    assert read["num_layers"] == 16 and read["ffn_hidden_size"] == 5632 and read["num_query_groups"] == 4
    assert read["swiglu"] and read["untie_embeddings_and_output_weights"] and read["position_embedding_type"] == "rope"
    assert read["bf16"] and "fp16" not in read and read.get("sequence_parallel", False) == one.sequence_parallel
    assert read.get("num_virtual_stages_per_pipeline_rank", 1) == one.chunks
    if one.engine == "megatron-core":
        assert read.get("recompute_granularity", "none") == one.checkpointing
        assert read.get("use_distributed_optimizer", False) == (one.zero == 1)
    else:
        assert read["deepspeed"] and read["zero_stage"] == one.zero and read["deepspeed_config"] == "ds_config.json"
    assert 16 % (read["tensor_model_parallel_size"] * read["pipeline_model_parallel_size"]) == 0


@pytest.mark.parametrize("fields", [{"zero": 3}, {"zero": 0, "tp": 2}, {"zero": 2, "pp": 2, "schedule": "zb-h1"},
                                    {"pp": 4, "schedule": "interleaved"}])  # fmt: skip
def test_torchtitan_and_torchrun_read_theirs_back(llama: Plan, fields: dict[str, Any]) -> None:
    from torch.distributed.run import get_args_parser

    choice = llama.choose(engine="torch", **fields)
    one = choice.candidate
    launched = get_args_parser().parse_args([*torchrun_arguments(16, 8), *program(choice.question, choice.candidate)])
    assert launched.nnodes == "2" and launched.nproc_per_node == "8" and launched.module
    read = read_torchtitan(launched.training_script_args)
    assert launched.training_script == "torchtitan.train"
    degrees = [read[f"parallelism.{name}_degree"] for name in ("tensor_parallel", "pipeline_parallel")]
    assert degrees == [one.tp, one.pp]
    shard, replicate = (read[f"parallelism.data_parallel_{name}_degree"] for name in ("shard", "replicate"))
    assert shard * replicate == one.dp and (shard > 1) == (one.zero > 0 and one.dp > 1)
    assert read["training.global_batch_size"] == 64
    by_operator = read.get("activation_checkpoint.selective_ac_option") == "op"
    assert by_operator == (read["activation_checkpoint.mode"] == "selective")
    if one.pp > 1:
        size = read["parallelism.pipeline_parallel_microbatch_size"]
        assert size == one.micro_batch and read["training.local_batch_size"] // size == one.micro_batches
        assert ("parallelism.pipeline_parallel_schedule_csv" in read) == (one.schedule == "zb-h1")


def test_program_with_context_parallelism_reads_back_and_is_no_run_of_the_lab() -> None:
    made = plan(
        LLAMA, "jean_zay_a100", gpus=16, batch=64, sequence_length=32768, engines=("torch", "megatron-core"), simulate=1
    )
    core = made.choose(engine="megatron-core", cp=2)
    assert read_megatron(program(core.question, core.candidate)[1:])["context_parallel_size"] == 2
    titan = made.choose(engine="torch", cp=4, zero=3)
    read = read_torchtitan(program(titan.question, titan.candidate)[2:])
    assert read["parallelism.context_parallel_degree"] == 4
    degrees = [read[f"parallelism.{name}_degree"] for name in ("data_parallel_shard", "tensor_parallel")]
    assert 4 * degrees[0] * degrees[1] * titan.candidate.pp == 16
    assert "context_parallel_size" not in read_megatron(
        program(made.question, made.choose(engine="megatron-core", cp=1).candidate)[1:]
    )
    own = plan("llama_tiny", "jean_zay_h100", gpus=2, batch=2, sequence_length=65536, engines="torch", simulate=1)
    shared, whole = own.choose(cp=2), own.choose(cp=1)
    with pytest.raises(LabError, match=r"parallelism over 2 ranks is run by this lab with DDP alone.*choose\(cp=1\)"):
        shared.config()
    assert set(shared.documents()) == {"arguments.txt", "torchrun.txt"} and not shared.is_run
    assert "run_config.json" in whole.documents() and whole.is_run
    assert "torchtitan.train" in batch_script(shared.question, shared.candidate, machine("jean_zay_h100"), hours=1)


def test_torchrun_arguments_of_one_node_need_no_rendezvous() -> None:
    assert torchrun_arguments(4, 8) == ["--nnodes", "1", "--nproc-per-node", "4", "--standalone"]


def _checked(text: str) -> dict[str, str]:
    """The directives of a script that bash reads without complaint."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return dict(line.partition("=")[::2] for line in lines)


def test_the_job_script_asks_for_the_right_nodes(llama: Plan, site: Machine) -> None:
    text = batch_script(llama.question, llama.best.candidate, site, hours=2.5, account="abc")
    told = _checked(text)
    assert told["nodes"] == "2" and told["gres"] == "gpu:8" and told["constraint"] == "a100"
    assert told["account"] == "abc@a100" and told["time"] == "02:30:00" and told["qos"] == "qos_gpu_a100-t3"
    assert told["cpus-per-task"] == "64" and told["ntasks-per-node"] == "1" and told["hint"] == "nomultithread"
    assert 'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' in text
    assert '--rdzv-endpoint "$HEAD:29500"' in text and "srun --cpus-per-task=" in text
    assert batch_script(llama.question, llama.best.candidate, site, account="abc@a100") == batch_script(
        llama.question, llama.best.candidate, site, account="abc"
    )


def test_nothing_foreign_gets_into_the_script(llama: Plan, site: Machine) -> None:
    for account in ("a\nrm -rf ~", "$(id)", "a b", "'"):
        with pytest.raises(LabError, match="no name of an account"):
            batch_script(llama.question, llama.best.candidate, site, account=account)
    changed = {"setup": (("module", "load", "x; touch /tmp/y"),), "environment": {"A": "$(id)"}}
    hostile = site.model_copy(update=changed)
    text = batch_script(llama.question, llama.best.candidate, hostile)
    assert "'x; touch /tmp/y'" in text and "export A='$(id)'" in text
    _checked(text)


def test_batch_script_names_a_queue_that_is_too_short_or_too_small(llama: Plan, bloom: Plan, site: Machine) -> None:
    with pytest.raises(LabError, match=r"16 GPUs for 30 h fit no QoS of jean_zay_a100.*qos_gpu_a100-t3 \(20 h"):
        batch_script(llama.question, llama.best.candidate, site, hours=30)
    with pytest.raises(LabError, match="384 GPUs for 1 h fit no QoS"):
        batch_script(bloom.question, bloom.best.candidate, site)


def test_batch_script_and_config_refuse_what_the_lab_does_not_run(llama: Plan, gpt2: Plan, site: Machine) -> None:
    with pytest.raises(LabError, match="no run of this lab"):
        llama.best.config()
    with pytest.raises(LabError, match="dlojz plan --script"):
        batch_script(gpt2.question, gpt2.best.candidate, site)
    assert set(llama.best.documents()) >= {"arguments.txt", "torchrun.txt"}
    assert isinstance(llama.best, Choice)


def test_heads_of_a_width_of_their_own_are_told_to_megatron() -> None:
    size = DecoderSize(4, 2048, 32, 151936, 4096, kv_heads=4, gated=True, biased=False, head_width=128)
    layout = planned_layout(engine="megatron-core", micro_batch=1)
    read = read_megatron(megatron_arguments(layout, size, "bf16", True, None))
    assert read["kv_channels"] == 128 and read["qk_layernorm"]


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "stages", "flags"),
    [
        (126, 16, 1, [7, *[8] * 14, 7], {"account_for_embedding_in_pipeline_split": True,
                                         "account_for_loss_in_pipeline_split": True}),  # Llama 3 405B: (126 + 2)/16
        (126, 16, 8, [0, *[1] * 126, 0], {"account_for_embedding_in_pipeline_split": True,
                                          "account_for_loss_in_pipeline_split": True}),
        (63, 16, 1, [*[4] * 15, 3], {"account_for_loss_in_pipeline_split": True}),  # (63 + 1)/16
        (61, 8, 1, [*[8] * 7, 5], {"decoder_last_pipeline_num_layers": 5}),  # 61 − 7 · 8
        (80, 8, 5, [2] * 40, {}),
    ],
)  # fmt: skip
def test_uneven_stages_are_told_to_megatron_and_cut_likewise(
    layers: int, pp: int, chunks: int, stages: list[int], flags: dict[str, Any]
) -> None:
    size = DecoderSize(layers, 256, 4, 1000, 128)
    kind = "interleaved" if chunks > 1 else "1f1b"
    layout = planned_layout(
        engine="megatron-core", pp=pp, schedule=kind, chunks=chunks, micro_batch=1, micro_batches=pp
    )
    read = read_megatron(megatron_arguments(layout, size, "bf16", True, None))
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
             "decoder_last_pipeline_num_layers")  # fmt: skip
    assert {name: read[name] for name in names if name in read} == flags
    question = Question(
        subject(size), cluster("selene"), calibration("a100"), pp, (pp,), "bf16", ("megatron-core",), True
    )
    space = space_of(question)
    columns = columns_of([layout])
    costed, work = space.cost_layouts(columns), question.subject.workload
    cut = stages_of(work, pp * chunks, bool(costed.embedding_slots[0]))
    assert cut.counts[cut.order, 1].tolist() == stages
    assert not code_of(question, layout)
    assert simulate(work, question.cluster, costed, question.calibration).step_s > 0


def test_what_waits_is_told_to_megatron_and_takes_longer() -> None:
    steps, flags = {}, {}
    for overlap in ("tensor,gradients,weights", "tensor,gradients", "gradients,weights", "none"):
        made = plan(LLAMA, "jean_zay_a100", 16, 64, engines="megatron-core", overlap=overlap, simulate=0)
        choice = made.choose(tp=2, pp=1, zero=1, micro_batch=1, checkpointing="none", sequence_parallel=True)
        steps[overlap] = choice.estimated_s
        read = read_megatron(program(choice.question, choice.candidate)[1:])
        flags[overlap] = [read.get(name, False) for name in
                          ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather")]  # fmt: skip
    everything, gathers, tensor, nothing = flags
    assert flags == {everything: [True] * 3, gathers: [True, True, False], tensor: [False, True, True],
                     nothing: [False] * 3}  # fmt: skip
    assert steps[everything] < min(steps[gathers], steps[tensor]) and steps[nothing] > max(
        steps[gathers], steps[tensor]
    )


def test_fp8_is_told_to_the_programs_that_have_it() -> None:
    made = plan(LLAMA, "jean_zay_h100", 16, 64, precision="fp8", simulate=0)
    assert {made.found.layout(place).engine for place in range(made.found.admitted.size)} == {"megatron-core", "torch"}
    core, titan = (made.choose(engine=name, zero=zero) for name, zero in (("megatron-core", 1), ("torch", 3)))
    read = read_megatron(program(core.question, core.candidate)[1:])
    assert read["fp8_format"] == "hybrid" and read["bf16"]
    assert read_torchtitan(program(titan.question, titan.candidate)[2:])["model.converters"] == "quantize.linear.float8"
    slower = plan(LLAMA, "jean_zay_h100", 16, 64, engines=("megatron-core", "torch"), simulate=0)
    assert made.best.estimated_s < slower.best.estimated_s


def test_plan_with_shards_keeps_copies_and_says_so_in_answer_and_flags() -> None:
    """64 replicas, states over 8 of them: eight times the states of a rank, and each library has its flag."""
    both = [plan("megatron-7.5b", "jean_zay_a100", 64, 512, engines="torch", simulate=0, shards=n) for n in (0, 8)]
    whole, hybrid = (one.choose(dp=64, zero=3, micro_batch=4, checkpointing="selective") for one in both)
    states = [one.memory["weights"] + one.memory["optimizer"] for one in (whole, hybrid)]
    assert states[1] > 4 * states[0]
    assert ("states sharded over", "8 ranks, 8 copies (HSDP)") in hybrid.lines()
    assert not any(name == "states sharded over" for name, _ in whole.lines())
    words = hybrid.documents()["arguments.txt"].split()
    flags = [words[words.index(f"--parallelism.data_parallel_{kind}_degree") + 1] for kind in ("shard", "replicate")]
    assert flags == ["8", "8"]
    layout = planned_layout(engine="megatron-core", dp=64, zero=1, micro_batch=1, micro_batches=1)
    size = subject("megatron-7.5b").size
    assert size is not None
    words = megatron_arguments(layout, size, "bf16", True, None, {"zero_shards": 16})
    assert words[words.index("--num-distributed-optimizer-instances") + 1] == "4"
    assert "--num-distributed-optimizer-instances" not in megatron_arguments(layout, size, "bf16", True, None)


@pytest.mark.parametrize(
    ("dp", "cp", "wanted", "copies"),
    [(64, 1, 8, 8), (64, 1, 0, 1), (8, 1, 8, 1), (8, 1, 64, 1), (12, 1, 8, 3), (8, 2, 8, 2), (1, 4, 2, 1)],
)
def test_copies_of_states_divide_replicas_and_ranks(dp: int, cp: int, wanted: int, copies: int) -> None:
    assert int(copies_of(dp, cp, {"zero_shards": wanted})) == copies
    assert dp % copies == 0 == dp * cp % copies


@pytest.mark.parametrize(
    ("engines", "shards"), [("megatron-deepspeed", 8), ("torch", -1), ("torch", "8"), ("torch", True)]
)
def test_plan_refuses_shards_that_no_library_has_or_that_are_no_number(engines: str, shards: Any) -> None:
    with pytest.raises(LabError, match=r"shards.*(use torch|at least 1|whole number|megatron-core)"):
        plan("megatron-7.5b", "jean_zay_a100", 64, 512, engines=engines, shards=shards)
