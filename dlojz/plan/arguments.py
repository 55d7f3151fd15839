"""A layout as the arguments of the programs that train: Megatron-LM, torchtitan, torchrun.

Layer 4. Invariant: what is written here is read back by a parser that knows the programs' own flags, to the layout that
it was written from; every word is one word of a command line, never a piece of shell.

Source: NVIDIA/Megatron-LM, megatron/training/arguments.py; pytorch/torchtitan, torchtitan/config/job_config.py; torch,
torch/distributed/run.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from dlojz.evidence import DecoderSize
from dlojz.plan.candidate import Candidate
from dlojz.schema import LabError
from dlojz.text import say

_NUMBERS: Final = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "micro-batch-size", "global-batch-size", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads",
    "expert-model-parallel-size", "num-experts", "moe-router-topk", "moe-layer-freq",
    "num-query-groups", "seq-length", "max-position-embeddings", "recompute-num-layers", "train-iters", "zero-stage",
)  # fmt: skip
_SWITCHES: Final = (
    "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather", "use-flash-attn",
    "group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear", "bf16", "fp16",
    "deepspeed", "checkpoint-activations", "accumulate-allreduce-grads-in-fp32",
)  # fmt: skip
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "position-embedding-type": ("learned_absolute", "rope"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
}
_TITAN_SCHEDULES: Final = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
_TITAN: Final[dict[str, Any]] = {
    **dict.fromkeys(
        (
            "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree",
            "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree",
            "parallelism.context_parallel_degree",
            "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_layers_per_stage",
            "training.local_batch_size", "training.global_batch_size", "training.seq_len",
        ),
        int,
    ),
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.pipeline_parallel_schedule": (*_TITAN_SCHEDULES.values(), "PipelineScheduleMulti"),
    "parallelism.pipeline_parallel_schedule_csv": str,
    "activation_checkpoint.mode": ("none", "selective", "full"),
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise LabError(
            say(en=f"the arguments cannot be read: {message}.", fr=f"les arguments sont illisibles : {message}.")
        )


def megatron_parser() -> argparse.ArgumentParser:
    """A parser of the flags that are written here, with their types and legal words as Megatron declares them."""
    parser = _Parser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, legal in _WORDS.items():
        parser.add_argument(f"--{name}", choices=legal)
    parser.add_argument("--deepspeed_config")
    return parser


def read_megatron(words: Sequence[str]) -> dict[str, Any]:
    """The arguments by name, without those that were not given.

    Raises:
        LabError: for an unknown flag, or a value that Megatron refuses.
    """
    read = vars(megatron_parser().parse_args(list(words)))
    return {name: value for name, value in read.items() if value not in (None, False)}


def megatron_arguments(one: Candidate, size: DecoderSize, precision: str, flash: bool, steps: int | None) -> list[str]:
    """What `pretrain_gpt.py` is called with, for engines megatron-core and megatron-deepspeed; data and tokenizer are
    the user's.

    Args:
        one: the layout.
        size: of the decoder.
        precision: bf16 or fp16; fp32 has no flag.
        flash: whether attention is one kernel.
        steps: of the training; 1000 without it.
    """
    words = ["--tensor-model-parallel-size", one.tp, "--pipeline-model-parallel-size", one.pp]
    words += ["--micro-batch-size", one.micro_batch, "--global-batch-size", one.global_batch]
    words += ["--num-layers", size.layers, "--hidden-size", size.hidden, "--ffn-hidden-size", size.mlp_width]
    words += ["--num-attention-heads", size.heads, "--seq-length", size.sequence_length]
    words += ["--max-position-embeddings", size.sequence_length, "--train-iters", steps or 1000]
    if size.kv_heads != size.heads:
        words += ["--group-query-attention", "--num-query-groups", size.kv_heads]
    words += ["--swiglu"] * size.gated + ["--untie-embeddings-and-output-weights"] * (not size.tied)
    words += [] if size.biased else ["--disable-bias-linear", "--normalization", "RMSNorm"]
    words += ["--position-embedding-type", "learned_absolute" if size.positions == "learned" else "rope"]
    words += [f"--{precision}"] if precision in ("bf16", "fp16") else []
    words += ["--use-flash-attn"] * flash
    words += ["--context-parallel-size", one.cp] if one.cp > 1 else []
    words += ["--expert-model-parallel-size", one.ep] if one.ep > 1 else []
    if size.experts:
        words += ["--num-experts", size.experts, "--moe-router-topk", size.top_k, "--moe-layer-freq", size.every]
        words += ["--moe-token-dispatcher-type", "alltoall"]
    if one.chunks > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", one.chunks]
    if one.engine == "megatron-deepspeed":
        words += ["--deepspeed", "--deepspeed_config", "ds_config.json", "--zero-stage", one.zero]
        words += ["--checkpoint-activations"] * (one.checkpointing == "full")
        return [str(word) for word in words]
    words += ["--sequence-parallel"] * one.sequence_parallel
    words += ["--use-distributed-optimizer", "--overlap-param-gather"] * (one.zero > 0)
    words += ["--overlap-grad-reduce", "--accumulate-allreduce-grads-in-fp32"]
    if one.checkpointing != "none":
        words += ["--recompute-granularity", one.checkpointing]
        words += ["--recompute-method", "uniform", "--recompute-num-layers", 1] * (one.checkpointing == "full")
    return [str(word) for word in words]


def torchtitan_parser() -> argparse.ArgumentParser:
    """A parser of torchtitan's flags that are written here, with their types and legal words."""
    parser = _Parser(prog="torchtitan.train", allow_abbrev=False, add_help=False)
    for name, legal in _TITAN.items():
        if isinstance(legal, tuple):
            parser.add_argument(f"--{name}", choices=legal)
        else:
            parser.add_argument(f"--{name}", type=legal)
    return parser


def read_torchtitan(words: Sequence[str]) -> dict[str, Any]:
    """The arguments by name, without those that were not given.

    Raises:
        LabError: for an unknown flag, or a value that torchtitan refuses.
    """
    read = vars(torchtitan_parser().parse_args(list(words)))
    return {name: value for name, value in read.items() if value is not None}


def torchtitan_arguments(one: Candidate, sequence_length: int | None, layers: int) -> list[str]:
    """What torchtitan is called with beside the file of the model; a schedule that torch has no class for is read from
    the file that `dlojz pipeline` exports.

    Args:
        one: the layout.
        sequence_length: tokens.
        layers: of the model.
    """
    sharded = one.zero > 0
    words: list[Any] = ["--parallelism.data_parallel_shard_degree", one.dp if sharded else 1]
    words += ["--parallelism.data_parallel_replicate_degree", 1 if sharded else one.dp]
    words += ["--parallelism.fsdp_reshard_after_forward", "always" if one.zero == 3 else "never"]
    words += ["--parallelism.tensor_parallel_degree", one.tp, "--parallelism.pipeline_parallel_degree", one.pp]
    words += ["--training.local_batch_size", one.micro_batch * (one.micro_batches if one.pp > 1 else 1)]
    words += ["--training.global_batch_size", one.global_batch]
    words += ["--parallelism.context_parallel_degree", one.cp] if one.cp > 1 else []
    if sequence_length is not None:
        words += ["--training.seq_len", sequence_length]
    words += ["--activation_checkpoint.mode", one.checkpointing]
    if one.pp > 1:
        words += ["--parallelism.pipeline_parallel_microbatch_size", one.micro_batch]
        words += ["--parallelism.pipeline_parallel_layers_per_stage", -(-layers // (one.pp * one.chunks))]
        words += [
            "--parallelism.pipeline_parallel_schedule",
            _TITAN_SCHEDULES.get(one.schedule, "PipelineScheduleMulti"),
        ]
        if one.schedule not in _TITAN_SCHEDULES:
            words += ["--parallelism.pipeline_parallel_schedule_csv", f"{one.schedule}.csv"]
    return [str(word) for word in words]


def torchrun_arguments(gpus: int, gpus_per_node: int) -> list[str]:
    """What `torchrun` is called with before the program; the first node's address is the job's `$HEAD`.

    Source: torch/distributed/run.py.
    """
    nodes = -(-gpus // gpus_per_node)
    here = min(gpus, gpus_per_node)
    words = ["--nnodes", str(nodes), "--nproc-per-node", str(here)]
    return words + (["--standalone"] if nodes == 1 else ["--rdzv-backend", "c10d", "--rdzv-endpoint", "$HEAD:29500"])
