"""Export a chosen layout: RunConfig, DeepSpeed's JSON, arguments of Megatron-LM, torchtitan and torchrun, a job script.

The tests read each document back, with a parser that knows the programs' own flags, to the layout that it was written
from. Every word is one word of a command line, never a piece of shell.

Source: NVIDIA/Megatron-LM, megatron/training/arguments.py; pytorch/torchtitan, torchtitan/config/job_config.py; torch,
torch/distributed/run.py.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlojz.base.errors import LabError
from dlojz.base.language import say, shortest
from dlojz.config.deepspeed_json import deepspeed_json
from dlojz.config.fields import LayoutFields
from dlojz.config.run_config import RunConfig
from dlojz.hardware.clusters import Machine
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.planner.planned_model import OF_THE_LAB, OFFERS, question_refused
from dlojz.planner.question import Question
from dlojz.planner.space import copies_of, counted_layers, layout_title, run_config_of

_TITAN_SCHEDULES: Final[dict[str | None, str]] = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def megatron_arguments(  # noqa: PLR0915
    layout: LayoutFields,
    size: DecoderSize,
    precision: str,
    flash: bool,
    steps: int | None,
    columns: Mapping[str, int] | None = None,
) -> list[str]:
    """Arguments of `pretrain_gpt.py` for engines megatron-core and megatron-deepspeed, without data and tokenizer.

    Args:
        precision: bf16, fp16 or fp8, whose master type is bf16; fp32 has no flag.
        flash: whether attention is one kernel.
        steps: of the training; 1000 without it.
        columns: of the question: messages that are waited for.
    """
    overlaps = {name: (columns or {}).get(name, 1) for name in ("tensor_overlap", "overlap", "gather_overlap")}
    words = ["--tensor-model-parallel-size", layout.tp, "--pipeline-model-parallel-size", layout.pp]
    words += ["--micro-batch-size", layout.micro_batch, "--global-batch-size", layout.global_batch]
    words += ["--num-layers", size.layers, "--hidden-size", size.hidden, "--ffn-hidden-size", size.mlp_width]
    words += ["--num-attention-heads", size.heads, "--seq-length", size.sequence_length]
    words += ["--max-position-embeddings", size.sequence_length, "--train-iters", steps or 1000]
    if size.kv_heads != size.heads:
        words += ["--group-query-attention", "--num-query-groups", size.kv_heads]
    if size.latent:
        words += ["--multi-latent-attention", "--kv-lora-rank", size.latent, "--qk-layernorm"]
        words += ["--q-lora-rank", size.query_latent] if size.query_latent else []
        words += ["--qk-head-dim", size.head_size, "--v-head-dim", size.head_size]
        words += ["--qk-pos-emb-head-dim", size.rotated_width]
    else:
        words += ["--kv-channels", size.head_width, "--qk-layernorm"] if size.head_width else []
    words += ["--swiglu"] * size.gated + ["--untie-embeddings-and-output-weights"] * (not size.tied)
    words += [] if size.biased else ["--disable-bias-linear", "--normalization", "RMSNorm"]
    words += ["--position-embedding-type", "learned_absolute" if size.positions == "learned" else "rope"]
    words += [f"--{precision}"] if precision in ("bf16", "fp16") else []
    words += ["--bf16", "--fp8-format", "hybrid"] if precision == "fp8" else []
    words += ["--use-flash-attn"] * flash
    words += ["--context-parallel-size", layout.cp] if layout.cp > 1 else []
    exchange = getattr(layout, "context_exchange", "ring")
    words += ["--cp-comm-type", "a2a"] if layout.cp > 1 and exchange == "all_to_all" else []
    words += ["--expert-model-parallel-size", layout.ep] if layout.ep > 1 else []
    if size.experts:
        words += ["--num-experts", size.experts, "--moe-router-topk", size.top_k]
        # Megatron evaluates the list: 0 for a dense layer, 1 for one with a mixture.
        dense = f"([0]*{size.dense_layers}+[1]*{size.layers - size.dense_layers})"
        words += ["--moe-layer-freq", dense if size.dense_layers else size.every]
        words += ["--moe-token-dispatcher-type", "alltoall"]
        if size.expert_width != size.mlp_width:
            words += ["--moe-ffn-hidden-size", size.expert_width]
        if size.shared_experts:
            words += ["--moe-shared-expert-intermediate-size", size.shared_experts * size.expert_width]
        words += ["--expert-tensor-parallel-size", 1] if layout.tp > 1 else []
    if (layout.chunks or 1) > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", layout.chunks]
    if layout.engine in DEEPSPEED:
        words += ["--deepspeed", "--deepspeed_config", "ds_config.json", "--zero-stage", layout.zero]
        words += ["--checkpoint-activations"] * (layout.checkpointing == "full")
        return [str(word) for word in words]
    words += stage_words(size.layers, layout.pp, layout.chunks or 1)
    words += ["--sequence-parallel"] * layout.sequence_parallel
    # What runs beside products is cut up along the sequence.
    words += ["--tp-comm-overlap"] * (overlaps["tensor_overlap"] and layout.sequence_parallel)
    # Overlapping the parameters' gather needs the sharded optimizer.
    words += ["--use-distributed-optimizer"] * (layout.zero > 0)
    copies = int(copies_of(layout.dp, layout.cp, columns or {}))
    words += ["--num-distributed-optimizer-instances", copies] if layout.zero > 0 and copies > 1 else []
    words += ["--overlap-param-gather"] * (overlaps["gather_overlap"] and layout.zero > 0)
    words += ["--overlap-grad-reduce"] * overlaps["overlap"] + ["--accumulate-allreduce-grads-in-fp32"]
    if layout.checkpointing != "none":
        words += ["--recompute-granularity", layout.checkpointing]
        words += ["--recompute-method", "uniform", "--recompute-num-layers", 1] * (layout.checkpointing == "full")
    return [str(word) for word in words]


def stage_words(layers: int, pp: int, chunks: int) -> list[Any]:
    """Flags of Megatron's core for stages that hold different numbers of layers; none where all hold as many."""
    counted = int(counted_layers(layers, pp, chunks))
    words = ["--account-for-embedding-in-pipeline-split"] * (counted == 2)
    words += ["--account-for-loss-in-pipeline-split"] * (counted > 0)
    # All stages but the last hold as many, rounded up.
    return (
        [*words, "--decoder-last-pipeline-num-layers", layers - (pp - 1) * -(-layers // pp)] if counted < 0 else words
    )


def torchtitan_arguments(
    layout: LayoutFields,
    sequence_length: int | None,
    layers: int,
    precision: str = "bf16",
    columns: Mapping[str, int] | None = None,
) -> list[str]:
    """Arguments of torchtitan, beside the file of the model; fp8 as its docs/float8.md has it.

    A schedule that torch has no class for is read from the file that `dlojz pipeline` exports.

    Args:
        columns: of the question: over how many ranks states are sharded.
    """
    sharded = layout.zero > 0
    copies = int(copies_of(layout.dp, layout.cp, columns or {})) if sharded else layout.dp
    words: list[Any] = ["--parallelism.data_parallel_shard_degree", layout.dp // copies]
    words += ["--parallelism.data_parallel_replicate_degree", copies]
    words += ["--parallelism.fsdp_reshard_after_forward", "always" if layout.zero == 3 else "never"]
    words += ["--parallelism.tensor_parallel_degree", layout.tp, "--parallelism.pipeline_parallel_degree", layout.pp]
    # Only a pipeline cuts torchtitan's local batch into micro-batches; without one it accumulates up to the global.
    words += ["--training.local_batch_size", layout.micro_batch * (layout.micro_batches if layout.pp > 1 else 1)]
    words += ["--training.global_batch_size", layout.global_batch]
    words += ["--model.converters", "quantize.linear.float8"] if precision == "fp8" else []
    words += ["--quantize.linear.float8.enable_fsdp_float8_all_gather"] * (precision == "fp8" and sharded)
    words += ["--parallelism.context_parallel_degree", layout.cp] if layout.cp > 1 else []
    if sequence_length is not None:
        words += ["--training.seq_len", sequence_length]
    if layout.checkpointing in ("selective", "every_second"):  # its other policy, the default, keeps every second layer
        words += ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
    else:
        words += ["--activation_checkpoint.mode", layout.checkpointing]
    if layout.pp > 1:
        words += ["--parallelism.pipeline_parallel_microbatch_size", layout.micro_batch]
        # Stages × chunks, rounded up.
        words += ["--parallelism.pipeline_parallel_layers_per_stage", -(-layers // (layout.pp * (layout.chunks or 1)))]
        words += [
            "--parallelism.pipeline_parallel_schedule",
            _TITAN_SCHEDULES.get(layout.schedule, "PipelineScheduleMulti"),
        ]
        if layout.schedule not in _TITAN_SCHEDULES:
            words += ["--parallelism.pipeline_parallel_schedule_csv", f"{layout.schedule}.csv"]
    return [str(word) for word in words]


def torchrun_arguments(gpus: int, gpus_per_node: int) -> list[str]:
    """Arguments of `torchrun` before the program; the first node's address is the job's `$HEAD`."""
    nodes = -(-gpus // gpus_per_node)  # rounded up
    node_gpus = min(gpus, gpus_per_node)
    words = ["--nnodes", str(nodes), "--nproc-per-node", str(node_gpus)]
    return words + (["--standalone"] if nodes == 1 else ["--rdzv-backend", "c10d", "--rdzv-endpoint", "$HEAD:29500"])


_PLAIN: Final = re.compile(r"[A-Za-z0-9_@.+,&|-]{0,64}")
MEGATRON: Final[tuple[str, ...]] = ("megatron-core", "megatron-deepspeed")
DEEPSPEED: Final[tuple[str, ...]] = ("deepspeed", "megatron-deepspeed")


def is_run(question: Question, layout: LayoutFields) -> bool:
    """Tell whether `dlojz.run` runs a layout.

    That takes a model of the catalogue, an engine of the lab, context parallelism beside data parallelism alone, states
    sharded over all ranks, and expert parallelism without ZeRO and pipeline.
    """
    runs = bool(question.subject.catalogue) and layout.engine in OF_THE_LAB and not _rings_beside(layout)
    copies = int(copies_of(layout.dp, layout.cp, question.columns))
    runs = runs and question.precision != "fp8" and (copies == 1 or layout.zero < OFFERS[layout.engine].hybrid)
    return runs and (layout.ep == 1 or (layout.zero == 0 and layout.pp == 1))


def _rings_beside(layout: LayoutFields) -> bool:
    """Whether context parallelism is combined with more than data parallelism."""
    return layout.cp > 1 and (layout.zero > 0 or max(layout.tp, layout.pp, layout.ep) > 1)


def run_config(question: Question, layout: LayoutFields, **overrides: Any) -> RunConfig:
    """Convert a layout to a `RunConfig`.

    Args:
        **overrides: fields of `RunConfig`, e.g. steps.

    Raises:
        LabError: if the model is not of the catalogue, or the engine not one that `dlojz.run` runs.
    """
    subject = question.subject
    if _rings_beside(layout):
        raise question_refused("rings beside", layout=layout)
    if not is_run(question, layout):
        raise question_refused("no run of the lab", subject=subject, layout=layout)
    return run_config_of(subject, question.run_precision, layout, **overrides)


def deepspeed_document(question: Question, layout: LayoutFields) -> dict[str, Any]:
    """Write DeepSpeed's configuration of a layout whose engine is DeepSpeed's.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON".
    """
    if is_run(question, layout):
        return deepspeed_json(run_config(question, layout))
    zero: dict[str, Any] = {"stage": layout.zero}
    location = {"device": "cpu", "pin_memory": True}
    if layout.offload != "none":
        zero["offload_optimizer"] = location
    if layout.offload == "parameters":
        zero["offload_param"] = location
    settings: dict[str, Any] = {
        "train_batch_size": layout.global_batch,  # DeepSpeed checks: batch = micro-batch × accumulation × dp
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
    }
    if question.precision in ("bf16", "fp16"):  # fp32 is what DeepSpeed does without either
        settings[question.precision] = {"enabled": True}
    if question.precision == "bf16" and OFFERS[layout.engine].gradient_bytes("bf16") == 4:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if layout.pp > 1:
        settings["pipeline"] = {"activation_checkpoint_interval": int(layout.checkpointing == "full")}
    return settings


def program(question: Question, layout: LayoutFields) -> list[str]:
    """Program and its arguments, as words, after torchrun's own.

    Raises:
        LabError: for what `dlojz.run` runs.
    """
    if is_run(question, layout):
        raise question_refused("run by the lab", question=question)
    size = question.subject.size
    if layout.engine in MEGATRON and size is not None:
        flags = megatron_arguments(layout, size, question.precision, question.fused_attention, question.steps,
                                   question.columns)  # fmt: skip
        return ["pretrain_gpt.py", *flags]
    if layout.engine == "torch":
        flags = torchtitan_arguments(layout, question.subject.sequence_length, question.subject.num_layers,
                                     question.precision, question.columns)  # fmt: skip
        return ["-m", "torchtitan.train", *flags]
    # DeepSpeed without Megatron: the user's own script.
    return ["train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]


def documents(question: Question, layout: LayoutFields) -> dict[str, str]:
    """Write the files that a layout needs, by name.

    `run_config.json` (what `dlojz.run` runs), `ds_config.json` (DeepSpeed), `arguments.txt` (words of the program,
    one a line), `torchrun.txt`.
    """
    files: dict[str, str] = {}
    runs = is_run(question, layout)
    if runs:
        files["run_config.json"] = run_config(question, layout).to_json() + "\n"
    if layout.engine in DEEPSPEED:
        files["ds_config.json"] = json.dumps(deepspeed_document(question, layout), indent=2) + "\n"
    if not runs:
        files["arguments.txt"] = "\n".join(program(question, layout)) + "\n"
    files["torchrun.txt"] = "\n".join(torchrun_arguments(layout.world_size, question.cluster.gpus_per_node)) + "\n"
    return files


def batch_script(
    question: Question, layout: LayoutFields, site: Machine, *, hours: float = 1.0, account: str = ""
) -> str:
    """Write the job script of a layout on a machine, for `sbatch`.

    Args:
        site: the machine, of `dlojz.hardware.clusters`.
        hours: time limit.
        account: whose hours are billed; its ending is the machine's.

    Raises:
        LabError: if the account is no name, no quality of service gives so many GPUs for so long, or the model is of
            the catalogue (`dlojz.running.launch` writes its script).
    """
    gpus, full = layout.world_size, question.cluster.gpus_per_node
    node_gpus = min(gpus, full)
    if not _PLAIN.fullmatch(account):
        raise LabError(say(en=f"{account!r} is no name of an account.", fr=f"{account!r} n’est pas un nom de compte."))
    minutes = max(1, round(60 * hours))  # sbatch takes whole minutes
    options: dict[str, Any] = {
        "job-name": "plan",
        "partition": site.partition,
        "constraint": site.constraint,
        "account": account + site.account_suffix if account and not account.endswith(site.account_suffix) else account,
        "qos": fitting_qos(site, gpus, hours),
        "nodes": -(-gpus // full),  # rounded up
        "ntasks-per-node": 1,
        "gres": f"{site.gres}:{node_gpus}" if site.gres else "",
        "cpus-per-task": site.cpus_per_gpu * node_gpus,
        "hint": "nomultithread" if site.nomultithread else "",
        "time": f"{minutes // 60:02d}:{minutes % 60:02d}:00",
    }
    lines = ["#!/bin/bash", say(en=f"# Planned: {layout_title(layout)}", fr=f"# Planifié : {layout_title(layout)}")]
    lines += [f"#SBATCH --{name}={value}" for name, value in options.items() if value not in ("", None)]
    lines += ["", *(" ".join(map(shlex.quote, line)) for line in site.setup), "set -eu"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.environment.items()]
    # torchrun's rendezvous needs one address.
    lines += ['HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'] if gpus > full else []
    return "\n".join([*lines, "", _command(torchrun_arguments(gpus, full), program(question, layout))]) + "\n"


def _command(launcher: Sequence[str], words: Sequence[str]) -> str:
    """`srun torchrun …`, one option a line; srun no longer takes `--cpus-per-task` from the job (Slurm 22.05)."""
    # Quoted by double quotes, so that the shell still expands it.
    quoted = ['"$HEAD:29500"' if word.startswith("$HEAD") else shlex.quote(word) for word in (*launcher, *words)]
    lines, line = [], ["srun", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', "torchrun"]
    for word in quoted:
        if word.startswith("-") and line:  # an option begins a line; its values stay on it
            lines.append(" ".join(line))
            line = []
        line.append(word)
    return " \\\n  ".join([*lines, " ".join(line)])


def fitting_qos(site: Machine, gpus: int, hours: float) -> str:
    """Choose the first quality of service whose limits the job keeps; empty where the machine has none.

    Raises:
        LabError: if there are some and none fits; the sentence lists them.
    """
    # No `max_gpus`: no limit.
    fitting = [qos.name for qos in site.qos if hours <= qos.max_hours and gpus <= (qos.max_gpus or gpus)]
    if fitting or not site.qos:
        return str(fitting[0]) if fitting else ""
    qos_text = ", ".join(f"{qos.name} ({shortest(qos.max_hours)} h, {qos.max_gpus or '∞'} GPU)" for qos in site.qos)
    raise question_refused("no QoS", gpus=gpus, hours=shortest(hours), site=site, qos_text=qos_text)
