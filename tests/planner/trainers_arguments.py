"""Parsers of the flags that `dlojz plan` writes for Megatron-LM and torchtitan, with the programs' own types and words.

Source: NVIDIA/Megatron-LM, megatron/training/arguments.py; pytorch/torchtitan, torchtitan/config/job_config.py.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, Final

_NUMBERS: Final = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "micro-batch-size", "global-batch-size", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads",
    "expert-model-parallel-size", "num-experts", "moe-router-topk", "expert-tensor-parallel-size",
    "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "kv-lora-rank", "q-lora-rank", "qk-head-dim",
    "v-head-dim", "qk-pos-emb-head-dim",
    "num-query-groups", "kv-channels", "seq-length", "max-position-embeddings", "recompute-num-layers", "train-iters",
    "zero-stage", "decoder-last-pipeline-num-layers",
)  # fmt: skip
_SWITCHES: Final = (
    "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather", "use-flash-attn",
    "tp-comm-overlap", "multi-latent-attention",
    "group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear", "bf16", "fp16",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    "deepspeed", "qk-layernorm", "checkpoint-activations", "accumulate-allreduce-grads-in-fp32",
)  # fmt: skip
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "cp-comm-type": ("p2p", "a2a", "allgather", "a2a+p2p"),
    "fp8-format": ("e4m3", "hybrid"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "position-embedding-type": ("learned_absolute", "rope"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
}
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
    "parallelism.pipeline_parallel_schedule": ("1F1B", "GPipe", "Interleaved1F1B", "PipelineScheduleMulti"),
    "parallelism.pipeline_parallel_schedule_csv": str,
    "model.converters": str,
    "quantize.linear.float8.enable_fsdp_float8_all_gather": None,
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "activation_checkpoint.selective_ac_option": ("1", "2", "op"),
}  # fmt: skip


def read_megatron(words: Sequence[str]) -> dict[str, Any]:
    """The arguments by name, without those that were not given; what Megatron refuses raises `ArgumentError`."""
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False, exit_on_error=False)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, legal in _WORDS.items():
        parser.add_argument(f"--{name}", choices=legal)
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--moe-layer-freq", type=_layer_frequency)
    return {name: value for name, value in _read(parser, words).items() if value not in (None, False)}


def _layer_frequency(text: str) -> int | list[int]:
    """A period, or a list such as ([0]*3+[1]*58), as Megatron's `moe_freq_type` reads it."""
    if text.isdecimal():
        return int(text)
    runs = re.fullmatch(r"\(\[0\]\*(\d+)\+\[1\]\*(\d+)\)", text)
    if runs is None:
        raise argparse.ArgumentTypeError(text)
    return [0] * int(runs[1]) + [1] * int(runs[2])


def read_torchtitan(words: Sequence[str]) -> dict[str, Any]:
    """The arguments by name, without those that were not given; what torchtitan refuses raises `ArgumentError`."""
    parser = argparse.ArgumentParser(prog="torchtitan.train", allow_abbrev=False, add_help=False, exit_on_error=False)
    for name, legal in _TITAN.items():
        if isinstance(legal, tuple):
            parser.add_argument(f"--{name}", choices=legal)
        elif legal is None:
            parser.add_argument(f"--{name}", action="store_true", default=None)
        else:
            parser.add_argument(f"--{name}", type=legal)
    return {name: value for name, value in _read(parser, words).items() if value is not None}


def _read(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    read, unknown = parser.parse_known_args(list(words))
    if unknown:
        raise argparse.ArgumentError(None, f"unknown arguments: {unknown}")
    return vars(read)
