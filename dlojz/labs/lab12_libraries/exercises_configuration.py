"""Exercises of lab 12 on configurations: Megatron's arguments and weights, DeepSpeed's JSON, the messages of a step.

A JSON is judged by what DeepSpeed would do with it, read by `dlojz.config.deepspeed_json`. The messages of a step are
those that the package predicts and counts.

Shape suffixes: D width, H heads, E width of a head (D = H · E).
"""

import copy
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dlojz.base.language import significant
from dlojz.config.run_config import RunConfig
from dlojz.labs.kit.answer_numbers import plain
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import Case, expect_json, read_settings, refuse_nothing
from dlojz.results.footprint import Footprint

TEXTS = Texts(__file__)

Numbers = tuple[int, int, int, int]

GPT3 = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288 "
    "--num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 --global-batch-size 1536 --lr 6.0e-5 --clip-grad "
    "1.0 --fp16"
)
"""GPT-3, as in an example of Megatron-LM (pretrain_gpt3_175B.sh), which asks for 128 nodes of 8 GPUs."""
GPT3_GPUS = 128 * 8
ARGUMENTS_CASES = (
    (GPT3, GPT3_GPUS),
    ("--num-layers 24 --tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 64 --bf16", 16),
    ("--micro-batch-size 8 --pipeline-model-parallel-size 4 --global-batch-size 96", 12),
    ("--lr 1e-4 --micro-batch-size 2 --tensor-model-parallel-size 4", 8),
    ("--fp16 --global-batch-size 120 --micro-batch-size 5 --clip-grad 1.0", 6),
)
"""Command lines, and numbers of GPUs; in the fourth, no global batch is given."""


def megatron_layout(words: Sequence[str], gpus: int) -> Numbers:
    """Parse tensor and pipeline degrees, replicas, and micro-batches of a replica per step.

    Args:
        words: what follows the program's name.
        gpus: processes in all.

    Source: Narayanan et al. 2021 (arXiv 2104.04473): p · t · d = n, and m = B / (b · d); defaults as Megatron-LM's
    `arguments.py` sets them: degrees of 1, a global batch of one micro-batch per replica.
    """
    # Each word with the next one: pairs that begin with a value, or with a flag like --fp16, are never looked up.
    options = dict(pairwise(words))
    tp = int(options.get("--tensor-model-parallel-size", 1))
    pp = int(options.get("--pipeline-model-parallel-size", 1))
    dp = gpus // (tp * pp)
    micro = int(options["--micro-batch-size"])
    return tp, pp, dp, int(options.get("--global-batch-size", micro * dp)) // (micro * dp)


def _other_arguments(case: Case, answer: Numbers, right: Numbers) -> Said:
    """The first number that is wrong."""
    words, gpus = case
    part = next(part for part in range(4) if answer[part] != right[part])
    name, line = ("tp", "pp", "dp", "micro-batches")[part], " ".join(words)
    return TEXTS.sentence(
        "megatron-arguments",
        "Megatron would take other sizes",
        gpus=gpus,
        line=line,
        name=name,
        right=right[part],
        answer=answer[part],
    )


def _numbers(answer: Any) -> Numbers:
    refuse_nothing(answer)
    answer = plain(answer)
    if not isinstance(answer, tuple | list) or len(answer) != 4:
        raise TEXTS.wrong("megatron-arguments", "not four numbers")
    if any(isinstance(number, str) for number in answer):
        raise TEXTS.wrong("megatron-arguments", "texts among the four")
    if any(isinstance(number, float) for number in answer):
        raise TEXTS.wrong("megatron-arguments", "no whole numbers", answer=tuple(answer))
    tp, pp, dp, micro_batches = (int(number) for number in answer)
    return tp, pp, dp, micro_batches


MEGATRON_ARGUMENTS = TEXTS.exercise(
    "megatron-arguments",
    megatron_layout,
    cases=[(shlex.split(line), gpus) for line, gpus in ARGUMENTS_CASES],
    read=_numbers,
    differs=_other_arguments,
)


COURSE = {
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
    }
}
"""The JSON of the course's slide on DeepSpeed, word for word."""
COURSE_JSON_CASES = ((128, 4, 28), (64, 2, 16), (96, 3, 10), (1536, 8, 7), (12, 4, 8))
"""Global batch, ranks, samples that fit in a GPU."""


def complete(course: Mapping[str, Any], global_batch: int, ranks: int, fits: int) -> dict[str, Any]:
    """Complete the course's JSON with the largest micro-batch that fits and divides a rank's samples.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON": train_batch_size = train_micro_batch_size_per_gpu ×
    gradient_accumulation_steps × number of GPUs.
    """
    samples = global_batch // ranks
    micro = max(size for size in range(1, fits + 1) if samples % size == 0)
    return {
        **course,
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": samples // micro,
    }


def _check_course_json(answer: Callable[..., Any], global_batch: int, ranks: int, fits: int) -> None:
    # In one case the file says something else too, which must not get lost.
    original = {**COURSE, **({"wall_clock_breakdown": False} if global_batch == COURSE_JSON_CASES[-1][0] else {})}
    # Deep: an answer may add to the inner dictionary, too.
    course = copy.deepcopy(original)
    document = expect_json(answer(course, global_batch, ranks, fits))
    request = _course_json_asked(global_batch, ranks, fits)
    if course != original:
        raise TEXTS.wrong("course-json", "the given dictionary is changed")
    if document.get("zero_optimization") != COURSE["zero_optimization"]:
        raise TEXTS.wrong("course-json", "ZeRO of the given file has changed")
    lost = [name for name, value in original.items() if document.get(name) != value]
    if lost:
        raise TEXTS.wrong("course-json", "a setting of the given file has changed", lost=lost[0])
    _check_whole(document)
    _check_sizes(document, complete(COURSE, global_batch, ranks, fits), request, ranks, fits)


def _check_whole(document: Mapping[str, Any]) -> None:
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = document.get(name)
        if isinstance(value, float | str):
            raise TEXTS.wrong("course-json", "no whole number", name=name, value=value)


def _course_json_asked(global_batch: int, ranks: int, fits: int) -> Said:
    return TEXTS.sentence("course-json", "the case", global_batch=global_batch, ranks=ranks, fits=fits)


def _check_sizes(document: Mapping[str, Any], right: Mapping[str, Any], request: Said, ranks: int, fits: int) -> None:
    total, micro = document.get("train_batch_size"), document.get("train_micro_batch_size_per_gpu")
    if total is None and micro is None:
        raise TEXTS.wrong("course-json", "DeepSpeed refuses the file")
    # As DeepSpeed reads it: of the three sizes, one that is left out follows from the others.
    layout = read_settings(document, request, model="gpt_tiny", dp=ranks).layout
    right_batch = right["train_batch_size"]
    if layout.global_batch != right_batch:
        times = layout.global_batch / right_batch
        raise TEXTS.wrong(
            "course-json", "another global batch", request=request, layout=layout, ranks=ranks, times=significant(times)
        )
    if layout.micro_batch > fits:
        raise TEXTS.wrong(
            "course-json", "the micro-batch does not fit", request=request, micro_batch=layout.micro_batch
        )
    best = right["train_micro_batch_size_per_gpu"]
    if layout.micro_batch < best:
        raise TEXTS.wrong(
            "course-json", "micro-batches smaller than they could be", request=request, layout=layout, best=best
        )


COURSE_JSON = TEXTS.exercise("course-json", cases=COURSE_JSON_CASES, trial=_check_course_json)


PROJECTION_CASES = ((4, 3, 2, 1), (6, 2, 3, 1), (4, 2, 4, 2), (2, 3, 1, 0))
"""Heads, width of a head, ranks, rank; the last on one rank."""


def megatron_qkv(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    """Return a rank's rows, (3D / tp, D), in the order q, k, v of a head, then of the next head.

    Args:
        weight: `in_proj_weight` of `nn.MultiheadAttention`, (3D, D): all of Q, then all of K, then all of V.
        heads: of the whole layer.
        tp: ranks that share it.
        rank: among them.

    Source: megatron-core 0.16, `transformer/attention.py`, `SelfAttention.get_query_key_value_tensors`.
    """
    width = weight.shape[1]
    # (3D, D) as (3, H, E, D), then (H, 3, E, D): q, k and v of a head stand together.
    by_head_HE = weight.view(3, heads, width // heads, width).transpose(0, 1)
    return by_head_HE.reshape(3 * width, width).chunk(tp)[rank]


def _cases() -> Iterator[tuple[Tensor, int, int, int]]:
    for number, (heads, head_width, tp, rank) in enumerate(PROJECTION_CASES):
        generator = torch.Generator().manual_seed(80 + number)
        yield torch.randn(3 * heads * head_width, heads * head_width, generator=generator), heads, tp, rank


MEGATRON_QKV = TEXTS.exercise(
    "megatron-qkv",
    megatron_qkv,
    cases=_cases,
)


Messages = Mapping[str, int]

METRIC_BYTES = 4096
"""All-gathered in a step besides, of values for a metric: far less than the weights."""
TRAFFIC_CASES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("DDP", {"engine": "torch"}, 0),
    ("DeepSpeed, stage 2", {"engine": "deepspeed", "zero": 2}, 2),
    ("FSDP2", {"engine": "torch", "zero": 3}, 3),
    ("DeepSpeed, stage 0", {"engine": "deepspeed", "zero": 0, "micro_batches": 2}, 0),
    ("DeepSpeed, stage 3", {"engine": "deepspeed", "zero": 3, "micro_batches": 2}, 3),
    ("ZeRO-1", {"engine": "by_hand", "zero": 1}, 2),
    ("ZeRO-2", {"engine": "by_hand", "zero": 2, "micro_batches": 4}, 2),
    ("DeepSpeed, stage 1", {"engine": "deepspeed", "zero": 1, "dp": 3}, 2),
)
"""Names, layouts of gpt_tiny, and what is to be found: stage 0, 2 for 1 or 2, 3."""


def messages_of(footprint: Footprint) -> dict[str, int]:
    """Sum the bytes of the messages of one step by collective, over all groups."""
    bytes_by_collective: dict[str, int] = defaultdict(int)
    for traffic in footprint.communication:
        bytes_by_collective[traffic.collective] += traffic.message_bytes
    return dict(bytes_by_collective)


def stage(messages: Messages, weight_bytes: int) -> int:
    """Recognise the ZeRO stage: 0 where no weights travel, 2 where they are gathered once per step, 3 where more often.

    Args:
        messages: bytes of one step by collective.
        weight_bytes: of the whole model.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7: stages 1 and 2 gather the updated weights once; stage 3
    gathers them for forward and again for backward.
    """
    gathered = messages.get("all_gather", 0) / weight_bytes
    # 0, 1, or 2 and more times Ψ: halfway between, padding and small messages have room.
    if gathered < 0.5:
        return 0
    return 2 if gathered < 1.5 else 3


def cases() -> list[tuple[str, dict[str, int], int, int]]:
    """Return name, messages, bytes of the weights and stage of each layout."""
    from dlojz import models
    from dlojz.prediction import predict

    # fp32: 4 bytes each
    weight_bytes = 4 * models.describe("gpt_tiny").parameters
    return [
        (name, messages_of(predict(RunConfig.of(**{"model": "gpt_tiny", "dp": 2, **layout}))), weight_bytes, right)
        for name, layout, right in TRAFFIC_CASES
    ]


def _step_cases() -> list[tuple[dict[str, int], int]]:
    """Messages of the layouts, and of DDP with a metric that is gathered."""
    layout_cases = [(messages, weight_bytes) for _, messages, weight_bytes, _ in cases()]
    messages, weight_bytes = layout_cases[0]
    return [*layout_cases, ({**messages, "all_gather": METRIC_BYTES}, weight_bytes)]


def _stage_number(answer: Any) -> int:
    if answer is None:
        raise TEXTS.wrong("read-traffic", "nothing for some steps")
    answer = plain(answer)
    if isinstance(answer, bool) or answer not in (0, 2, 3):
        raise TEXTS.wrong("read-traffic", "no such stage", answer=answer)
    return int(answer)


def _other_stage(case: Case, answer: int, right: int) -> Said:
    messages, weight_bytes = case
    parts = ", ".join(f"{name} {significant(size / weight_bytes)} Ψ" for name, size in messages.items())
    reason = _why(answer, right, messages)
    return TEXTS.sentence("read-traffic", "a step in words", parts=parts, reason=reason)


def _why(answer: int, right: int, messages: Messages) -> Said:
    if right == 0 and "all_gather" in messages:
        return TEXTS.sentence("read-traffic", "far less than the weights is gathered")
    if right == 0:
        return TEXTS.sentence("read-traffic", "every rank has all weights")
    if right == 2 and answer == 3:
        return TEXTS.sentence("read-traffic", "weights gathered once, after the update")
    if right == 2 and "reduce_scatter" not in messages:
        return TEXTS.sentence("read-traffic", "gradients leave by all-reduce")
    if right == 2:
        return TEXTS.sentence("read-traffic", "weights gathered once per step")
    return TEXTS.sentence("read-traffic", "weights gathered at least twice per step")


READ_TRAFFIC = TEXTS.exercise("read-traffic", stage, cases=_step_cases, read=_stage_number, differs=_other_stage)
