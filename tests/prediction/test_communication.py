"""Volumes per step against the ZeRO paper; against the counted bytes they are tested in tests/train."""

from typing import Any

import pytest
import torch

from dlojz import predict
from dlojz.base.language import MEBIBYTE
from dlojz.config.run_config import RunConfig
from dlojz.prediction.communication import deepspeed_buckets, receive_buffers_bytes
from dlojz.prediction.model_trace import ready_order
from dlojz.prediction.shapes import ParameterShape, RankPart, fill_buckets
from dlojz.train.engines import base
from dlojz.train.loop import build_model, open_batches


def sent_per_parameter(**fields: object) -> float:
    """Bytes that a rank sends in a ring, per parameter and per byte of a weight, times N/(N−1)."""
    config = RunConfig.of(model="coatnet_0", engine="deepspeed", precision="bf16", dp=64, **fields)
    footprint = predict(config)
    sent_bytes = sum(traffic.sent_bytes for traffic in footprint.communication if traffic.group == "dp")
    return sent_bytes / (63 / 64) / 2 / (footprint.parameters or 1)


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (3, 3)])
def test_predict_sends_the_paper_s_volumes(stage: int, volumes: float) -> None:
    """Rajbhandari et al. 2020, §7.1 and §7.2.2: 2Ψ for data parallelism, 3Ψ for stage 3; padding is the tolerance."""
    assert sent_per_parameter(zero=stage) == pytest.approx(volumes, rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2])
def test_predict_all_reduces_for_deepspeed_where_the_paper_reduce_scatters(stage: int) -> None:
    """The paper's 2Ψ for stages 1 and 2 need a reduce-scatter; DeepSpeed's bucketed all-reduce makes them 3Ψ."""
    assert sent_per_parameter(zero=stage) == pytest.approx(3, rel=1e-3)


def test_predict_sends_for_fsdp2_what_the_paper_says() -> None:
    for stage, volumes in ((2, 2), (3, 3)):
        config = RunConfig.of(model="coatnet_0", dp=4, zero=stage)
        footprint = predict(config)
        sent_bytes = sum(traffic.sent_bytes for traffic in footprint.communication if traffic.group == "dp")
        assert sent_bytes / (3 / 4) / 4 / (footprint.parameters or 1) == pytest.approx(volumes, rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "micro_batches", "volumes"), [(1, 1, 2), (2, 1, 2), (3, 1, 3), (1, 4, 2), (2, 4, 5), (3, 4, 12)]
)
def test_predict_sends_for_zero_by_hand_what_the_paper_says(stage: int, micro_batches: int, volumes: float) -> None:
    """§7.1 and §7.2.2, for one micro-batch; with m of them stage 2 sends (m + 1) Ψ, stage 3 sends 3mΨ."""
    config = RunConfig.of(model="coatnet_0", dp=4, zero=stage, engine="by_hand", micro_batches=micro_batches)
    footprint = predict(config)
    sent_bytes = sum(traffic.sent_bytes for traffic in footprint.communication if traffic.group == "dp")
    assert sent_bytes / (3 / 4) / 4 / (footprint.parameters or 1) == pytest.approx(volumes, rel=1e-3)


def test_predict_sends_for_fp16_what_bf16_sends() -> None:
    for fields in ({"engine": "by_hand"}, {"engine": "torch"}, {"engine": "deepspeed"}):
        half = [predict(RunConfig.of(dp=2, zero=3, precision=p, **fields)).communication for p in ("bf16", "fp16")]
        assert half[0] == half[1]


def test_predict_sends_nothing_for_one_process() -> None:
    assert predict(RunConfig.of()).communication == ()


def calls(**fields: object) -> int:
    [traffic] = [one for one in predict(RunConfig.of(**fields)).communication if one.group == "dp"]
    assert traffic.collective == "all_reduce"
    return traffic.count or 0


def test_predict_fills_buckets_of_a_size_that_was_asked_for() -> None:
    """vit_tiny has 3.13 MiB of gradients; torch's first bucket is small unless a size is given, ours never is."""
    assert calls(model="vit_tiny", dp=2) == 2
    assert calls(model="vit_tiny", dp=2, bucket_mib=25) == 1
    assert calls(model="vit_tiny", dp=2, engine="by_hand") == 1
    assert calls(model="vit_tiny", dp=2, bucket_mib=0.5) == calls(
        model="vit_tiny", dp=2, bucket_mib=0.5, engine="by_hand"
    )
    bytes_of = {
        traffic.message_bytes
        for mib in (0.001, 0.5, 4)
        for traffic in predict(RunConfig.of(model="vit_tiny", dp=2, bucket_mib=mib)).communication
        if traffic.group == "dp"
    }
    assert len(bytes_of) == 1, "buckets change the calls, never the bytes"


@pytest.mark.parametrize("model", ["coatnet_tiny", "gpt_tiny", "alexnet_tiny"])
@pytest.mark.parametrize("fields", [{}, {"precision": "bf16"}, {"checkpointing": "full"}])
def test_gradients_become_ready_in_the_order_predicted(model: str, fields: dict[str, str]) -> None:
    """A real backward pass against one without memory."""
    config = RunConfig.of(model=model, micro_batch=2, **fields)
    engine = base.build(config, build_model(config), torch.device("cpu"))
    order: list[int] = []
    for number, parameter in enumerate(engine.module.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    inputs, targets = next(open_batches(config, 0))
    engine.backward(engine.forward(inputs, targets, is_last=True), is_last=True)
    assert ready_order(config) == tuple(order)
    assert sorted(order) == list(range(len(order)))


def test_buckets() -> None:
    def filled(*numels: int) -> list[int]:
        parameters = [ParameterShape("", (numel,), 0, "") for numel in numels]
        return [len(bucket) for bucket in fill_buckets(parameters, 25 * MEBIBYTE, MEBIBYTE)]

    assert filled() == []
    assert filled(MEBIBYTE // 4, 25 * MEBIBYTE // 4, 1) == [1, 1, 1]
    assert filled(MEBIBYTE // 4 - 1, 1, 1) == [2, 1]
    assert deepspeed_buckets([1_999_999, 1, 1]) == [2, 1]
    assert deepspeed_buckets([5_000_000, 1]) == [1, 1]


def test_predict_sends_expert_gradients_among_the_ranks_that_hold_the_same() -> None:
    """moe_tiny: 2 mixtures of 8 experts of 131,712 parameters, of which two ranks hold half each; 613,888 others."""
    footprint = predict(RunConfig.of(model="moe_tiny", dp=4, ep=2, engine="by_hand"))
    sent = {one.group: (one.group_size, one.message_bytes) for one in footprint.communication}
    assert sent["dp"] == (4, 4 * 613_888)
    assert sent["edp"] == (2, 4 * 2 * 4 * 131_712)


def traffic_of(group: str, **fields: object) -> dict[str, tuple[int | None, int]]:
    """Messages and their bytes by collective, of one group."""
    communication = predict(RunConfig.of(**fields)).communication
    return {one.collective: (one.count, one.message_bytes) for one in communication if one.group == group}


def test_predict_gathers_a_tied_matrix_once_per_micro_batch_in_zero_3_by_hand() -> None:
    """gpt2_tiny, 3 micro-batches: 842,496 parameters, of which the tied matrix has V·h = 256·128 = 32,768.

    Six units (positions, four blocks, the last norm) are gathered for forward and for backward, the tied matrix once:
    3·(2·6 + 1) messages of 4·3·(2·809,728 + 32,768) bytes; gradients of all are reduced: 3·7 messages, 4·3·842,496.
    """
    sent = traffic_of("dp", model="gpt2_tiny", dp=2, zero=3, engine="by_hand", micro_batches=3)
    assert sent == {"all_gather": (39, 19_826_688), "reduce_scatter": (21, 10_109_952)}


@pytest.mark.parametrize(("cp", "length", "messages"), [(2, 128, 24), (3, 96, 48)])
def test_predict_gives_a_ring_one_step_less_than_ranks(cp: int, length: int, messages: int) -> None:
    """gpt_tiny, 4 layers, h = 128, 2 micro-batches of 16: per layer n − 1 messages forward, 2(n − 1) backward.

    Keys and values of S tokens forward, (n − 1)·2·16·S·128·4 bytes, and backward with their gradients twice that:
    with S = 64 and n = 2, as with S = 32 and n = 3, 1,048,576 and 2,097,152; times 4 layers, times 2.
    """
    sent = traffic_of("cp", model="gpt_tiny", cp=cp, sequence_length=length, micro_batches=2)
    assert sent == {"send": (messages, 25_165_824), "recv": (messages, 25_165_824)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predict_lets_local_steps_meet_in_fp32(precision: str) -> None:
    """vit_tiny has 827,786 parameters, whose weights are fp32 whatever is computed in."""
    sent = traffic_of("dp", model="vit_tiny", dp=2, engine="by_hand", optimizer="local_sgd", precision=precision)
    assert sent == {"all_reduce": (1, 4 * 827_786)}


def test_torchs_pipeline_keeps_a_buffer_for_each_message_that_it_receives() -> None:
    """A message has 4 samples × 128 tokens × 128 numbers in fp32; a stage in the middle receives on both sides."""
    message_bytes = 4 * 128 * 128 * 4
    fields: dict[str, Any] = {"model": "gpt_tiny", "sequence_length": 128, "micro_batch": 4, "micro_batches": 16}
    for layout, sides in (({"pp": 2}, (1, 1)), ({"pp": 3}, (1, 2, 1)), ({"pp": 2, "engine": "by_hand"}, (0, 0))):
        config = RunConfig.of(**fields, **layout)
        received = [receive_buffers_bytes(RankPart(config, rank)) for rank in range(config.layout.pp)]
        assert received == [16 * count * message_bytes for count in sides]
