"""Bytes of a rank: the vectorised forms against the exact ones, the heaviest stage, offload, out of memory."""

from dataclasses import fields

import numpy as np
import pytest

from dlojz import models
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import Layouts, calibration, estimate, memories, workload
from dlojz.cost_model.layout_memory import (
    dummy_gradient_bytes,
    gathered_key_bytes,
    in_flight,
    layer_activation_bytes,
    states_of,
    zero3_live_bytes,
)
from dlojz.cost_model.passes import stages_of
from dlojz.cost_model.step import weights_of
from dlojz.hardware import Precision, cluster
from dlojz.hardware.decoder_size import DecoderSize, flops_per_sequence
from dlojz.planner.planned_model import OFFERS
from dlojz.prediction import predict
from dlojz.prediction.rules_of_thumb import Checkpointing, Offload, Shape, bytes_per_parameter, layer_bytes

SIZE = DecoderSize(48, 6144, 64, 51200, 2048)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_a_layers_activations_are_korthikantis(tp: int, sequence_parallel: bool, checkpointing: Checkpointing) -> None:
    layout = Layouts.of(tp=tp, micro_batch=4, sequence_parallel=int(sequence_parallel), checkpointing=checkpointing)
    exact = layer_bytes(
        Shape(2048, 4, 6144, 64), tp=tp, sequence_parallel=sequence_parallel, checkpointing=checkpointing
    )
    assert layer_activation_bytes(workload(SIZE), layout)[0] == pytest.approx(float(exact), rel=1e-12)


def test_every_second_layer_has_experts_and_the_others_an_mlp() -> None:
    """One token of width 4, 16 between the layers of an MLP, 2 of 4 experts in every second layer.

    On average a token has one row among experts (its input 8, its hidden layer 64, its output 8) and half an MLP (32);
    besides 40 that tp keeps whole, 32 of attention, and 5 of its scores.
    """
    size = DecoderSize(2, 4, 1, 8, 1, experts=4, top_k=2, every=2)
    assert layer_activation_bytes(workload(size), Layouts.of())[0] == 8 + 64 + 8 + 32 + 40 + 32 + 5


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (8, 1), (8, 3), (16, 3)])
def test_the_first_stage_keeps_as_many_layers_as_the_paper_says(pp: int, chunks: int) -> None:
    layout = Layouts.of(pp=pp, chunks=chunks, micro_batches=4 * pp, schedule="interleaved" if chunks > 1 else "1f1b")
    kept = in_flight(layout, 0)[0] * SIZE.layers / pp
    # Korthikanti et al. 2022, §4.2.3
    worth = 1 if chunks == 1 else 1 + (pp - 1) / (pp * chunks)
    assert kept == pytest.approx(SIZE.layers * worth, rel=1e-12)


@pytest.mark.parametrize(
    ("offload", "zero"),
    [*(("none", zero) for zero in range(4)), *(("optimizer", zero) for zero in range(1, 4)), ("parameters", 3)],
)
def test_states_are_those_of_the_zero_papers(zero: int, offload: Offload) -> None:
    layout = Layouts.of(dp=8, zero=zero, offload=offload)
    exact = bytes_per_parameter("fp16_amp", zero=zero, dp=8, offload=offload)
    weights, gradients, optimizer, host = (float(one[0]) for one in states_of(np.array([1.0]), layout))
    assert weights == pytest.approx(float(exact.device["weights"]), rel=1e-12)
    assert gradients == pytest.approx(float(exact.device["gradients"]), rel=1e-12)
    assert optimizer == pytest.approx(float(exact.device["optimizer"] + exact.device["master"]), rel=1e-12)
    assert host == pytest.approx(float(exact.host), rel=1e-12)


def test_memories_grow_with_more_of_anything_and_shrink_with_sharding() -> None:
    model = workload(SIZE)

    def total(**columns: object) -> float:
        return float(memories(model, Layouts.of(**{"tp": 8, "dp": 8, **columns})).total_bytes[0])  # type: ignore[arg-type]

    assert total(micro_batch=2) > total(micro_batch=1)
    assert total(checkpointing="none") > total(checkpointing="selective") > total(checkpointing="full")
    assert total(zero=0) > total(zero=1) > total(zero=2) > total(zero=3)
    assert total(zero=1, offload="optimizer") < total(zero=1)
    assert total(gradient_bytes=4) > total()


def test_memories_under_cp_share_out_only_what_grows_with_the_sequence() -> None:
    one, two = (memories(workload(SIZE), Layouts.of(tp=8, cp=cp, checkpointing="selective")) for cp in (1, 2))
    for name in ("activations", "edges", "live"):
        assert getattr(two, name)[0] == pytest.approx(getattr(one, name)[0] / 2, rel=1e-12)
    assert two.weights[0] == one.weights[0] and two.optimizer[0] == one.optimizer[0]
    sharded = memories(workload(SIZE), Layouts.of(tp=8, cp=2, zero=1))
    assert sharded.optimizer[0] == pytest.approx(one.optimizer[0] / 2), "ZeRO shards over dp · cp ranks"


@pytest.mark.parametrize("model", [SIZE, "coatnet_tiny"])
def test_no_layouts_need_no_memory_and_no_time(model: DecoderSize | str) -> None:
    none = Layouts.of(dp=[1, 2])[np.zeros(0, int)]
    made = estimate(workload(model), cluster("selene"), none, calibration("a100"))
    assert made.step_s.shape == made.memory_bytes.shape == made.fits.shape == (0,)
    assert memories(workload(model), Layouts.of(dp=[])).total_bytes.shape == (0,)


@pytest.mark.parametrize("model", ["coatnet_tiny", "coatnet_0", "vit_tiny"])
def test_memories_of_an_image_model_selective_lie_between_none_and_full(model: str) -> None:
    """Within a third of the exact forecast: depthwise convolutions are counted as passes here, and kept there."""
    kept, peak = {}, {}
    for kind in ("none", "selective", "full"):
        made = memories(workload(model), Layouts.of("bf16", micro_batch=8, checkpointing=kind))
        kept[kind], peak[kind] = float(made.activations[0]), float((made.activations + made.live)[0])
    assert kept["full"] < kept["selective"] < kept["none"]
    assert peak["full"] <= peak["selective"] <= peak["none"] * (1 + 1e-12)
    config = RunConfig.of(model=model, micro_batch=8, checkpointing="selective", precision="bf16")
    exact = predict(config).memory.activations_bytes
    assert kept["selective"] == pytest.approx(exact, rel=1 / 3)


def test_estimate_says_what_does_not_fit() -> None:
    made = estimate(
        workload(SIZE), cluster("selene"), Layouts.of(tp=[1, 8], dp=8, checkpointing="full"), calibration("a100")
    )
    assert made.fits.tolist() == [False, True]


def test_memories_have_no_negative_category() -> None:
    made = memories(workload(SIZE), Layouts.of(tp=[1, 2, 8], pp=[1, 4, 8], micro_batches=16))
    assert min(getattr(made, field.name).min() for field in fields(made)) >= 0


def test_memories_in_fp32_double_all_but_gradients_and_need_no_master_copy() -> None:
    half = memories(workload(SIZE), Layouts.of("fp16", tp=8, gradient_bytes=4))
    full = memories(workload(SIZE), Layouts.of("fp32", tp=8, gradient_bytes=4))
    assert full.weights[0] == 2 * half.weights[0]
    assert full.activations[0] == 2 * half.activations[0]
    assert full.optimizer[0] == pytest.approx(half.optimizer[0] * 8 / 12)


def test_estimate_of_a_process_without_a_gpu_has_no_context() -> None:
    """The reserve of a small model is its optimizer's temporaries alone."""
    layout = Layouts.of("fp32")
    made = estimate(workload("gpt_tiny"), cluster("local"), layout, calibration("a100"))
    assert made.memory.reserve[0] == pytest.approx(2 * workload("gpt_tiny").num_parameters, rel=0.01)


def test_layer_activation_bytes_where_every_second_product_is_recomputed() -> None:
    """Llama 3 8B, per token and layer: input, queries, values, attention, its statistics, gate; not compiled, down."""
    llama = DecoderSize(
        32, 4096, 32, 128256, 8192, mlp_width=14336, kv_heads=8, gated=True, tied=False, biased=False, positions="none"
    )
    of_token = 2 * (4096 + 4096 + 1024 + 4096 + 14336) + 4 * 32
    for compiled in (0, 1):
        layout = Layouts.of("bf16", fused_attention=1, checkpointing="every_second", compiled=compiled)
        assert layer_activation_bytes(workload(llama), layout)[0] == 8192 * (of_token + (1 - compiled) * 2 * 4096)
    titan = Layouts.of("bf16", fused_attention=1, checkpointing="selective", engine="torchtitan", compiled=1)
    assert layer_activation_bytes(workload(llama), titan)[0] == 8192 * of_token


def test_fsdp_in_a_pipeline_keeps_weights_gathered_and_gradients_whole() -> None:
    """Two stages, 8 shards: 2 bytes per weight from the first micro-batch to the last, and 4 of gradient if many."""
    plain = {"precision": "bf16", "dp": 8, "pp": 2, "zero": 3, "engine": "torchtitan", "fused_attention": 1}
    stages = stages_of(workload(SIZE), 2)
    for micro_batches, whole in ((1, 0), (4, 4)):
        layouts = Layouts.of(micro_batches=micro_batches, **plain)  # type: ignore[arg-type]
        held = weights_of(workload(SIZE), layouts, stages)
        weights, gradients, adam, _ = states_of(held[0], layouts)
        assert weights[0] == pytest.approx(held[0, 0] * (4 / 8 + 2))
        assert gradients[0] == pytest.approx(held[0, 0] * (4 / 8 + whole))
        assert adam[0] == pytest.approx(held[0, 0])


def test_memories_of_torch_s_ddp_have_buckets_as_large_as_its_gradients() -> None:
    """4 bytes per weight at every moment of the step; Megatron's gradients lie in their buffers."""
    parameters = workload(SIZE).num_parameters
    for engine, more in (("torchtitan", 4), ("megatron-core", 0)):
        one, two = (
            memories(workload(SIZE), Layouts.of("bf16", dp=dp, engine=engine, gradient_bytes=4)) for dp in (1, 2)
        )
        assert two.live[0] - one.live[0] == more * parameters


def test_memories_in_torch_keep_the_gathered_input_of_the_logits() -> None:
    """Per token, 8 ranks with sequence parallelism: Megatron keeps an eighth of the normed input."""
    size, ranks = DecoderSize(4, 1024, 16, 51200, 2048, biased=False), 8
    plain = {"precision": "bf16", "tp": ranks, "sequence_parallel": 1, "fused_attention": 1, "dropout": 0}
    edges = {
        name: float(memories(workload(size), Layouts.of(engine=name, **plain)).edges[0]) / 2048  # type: ignore[arg-type]
        for name in ("megatron", "megatron-core", "torchtitan")
    }
    assert edges["megatron"] == (10 * 51200 + 4 * 1024) / ranks
    assert edges["megatron-core"] == (6 * 51200 + 4 * 1024) / ranks, "exponentials over the logits"
    assert edges["torchtitan"] == 18 * 51200 / ranks + 2 * 1024 * (1 + 1 / ranks)


def test_memories_do_not_hold_the_loss_and_a_layer_together() -> None:
    full, longer = (
        memories(workload(SIZE), Layouts.of(tp=8, checkpointing="full", micro_batch=1, fused_loss=fused))
        for fused in (1, 0)
    )
    tokens, masks = 2048, 2048 * 6144
    assert full.edges[0] == masks and full.live[0] == 50 * tokens * 6144  # a layer's backward: the logits have gone
    at_loss = tokens * (10 * 51200 / 8 + 4 * 6144)
    assert longer.edges[0] + longer.live[0] == masks + max(50 * tokens * 6144, at_loss)


@pytest.mark.parametrize("model", ["qwen_3_8b", "qwen_3_30b_a3b"])
def test_a_decoder_with_wider_heads_has_its_parameters(model: str) -> None:
    width = workload(model).size.hidden  # type: ignore[union-attr]
    assert workload(model).num_parameters + width == models.describe(model).parameters  # the last norm


def test_dummy_gradients_are_one_buffer_for_each_shape_of_a_weight() -> None:
    """Of Llama-3-8B: 6144·h + h·h + 28672·h + h·14336 + 128256·h elements of 2 bytes, over tp; of GPT with tp 4 the
    MLP's two matrices are h × h both, as attention's output is with tp 1 alone."""
    llama = DecoderSize(32, 4096, 32, 128256, 8192, 14336, 8, gated=True, tied=False, biased=False, positions="none")
    gpt = DecoderSize(2, 1024, 16, 50304, 1024)
    columns = {"engine": "megatron-core", "tp": [1, 4], "zero": 1, "sequence_parallel": 1, "fused_attention": 1}
    whole = np.array([1.0, 32.0, 1.0])
    known = dummy_gradient_bytes(llama, Layouts.of("bf16", **columns), whole)
    assert known.tolist() == [2 * (6144 + 4096 + 28672 + 14336 + 128256) * 4096 / tp for tp in (1, 4)]
    middle = dummy_gradient_bytes(gpt, Layouts.of("bf16", **columns), np.array([0.0, 2.0, 0.0]))
    assert middle.tolist() == [2 * (3 + 1 + 4 + 4) * 2**20, 2 * (0.75 + 0.25 + 1) * 2**20]
    older = Layouts.of("bf16", **columns, transformer_engine=113)
    assert not dummy_gradient_bytes(llama, older, whole).any()
    # Nor has a fused Adam a temporary: of torch's the peak at the end is 4 bytes per parameter of the shard higher.
    work = workload(DecoderSize(2, 4096, 32, 1000, 16))
    plain, fused = (memories(work, Layouts.of("bf16", **columns, fused_optimizer=flag)) for flag in (0, 1))
    assert np.all(plain.total_bytes > fused.total_bytes) and np.all(plain.optimizer == fused.optimizer)


def test_checkpointed_every_keeps_the_mean_of_its_layers() -> None:
    work = workload(DecoderSize(4, 4096, 32, 1000, 2048))
    none, second, full = (
        memories(work, Layouts.of(checkpointing=kind, checkpointed_every=every)).activations[0]
        for kind, every in (("none", 1), ("full", 2), ("full", 1))
    )
    assert second == pytest.approx((none + full) / 2)


V3 = DecoderSize(61, 7168, 128, 129280, 4096, mlp_width=18432, gated=True, tied=False, biased=False, positions="none",
                 experts=256, top_k=8, expert_width=2048, shared_experts=1, dense_layers=3, head_width=128, latent=512,
                 query_latent=1536, rotated_width=64)  # fmt: skip
"""DeepSeek-V3. Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2."""


def test_latent_attention_and_shared_experts_have_the_papers_parameters_and_operations() -> None:
    """By hand, matrix by matrix: W^DQ, W^UQ with W^QR, W^DKV with W^KR, W^UK with W^UV, W^O (section 2.1.1 there)."""
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 2 * 128 * 128 + 128 * 128 * 7168
    expert, dense, gate = 3 * 7168 * 2048, 3 * 7168 * 18432, 7168 * 256
    assert attention == V3.attention_weights == 187_105_280
    # Norms: two of a layer, one of each latent.
    layers = 61 * (attention + 2 * 7168 + 512 + 1536) + 3 * dense + 58 * (257 * expert + gate)
    # 671 B, as the paper has it; a share of a layer is rounded down once, so that 61 may be missing.
    assert 0 <= layers + 2 * 129280 * 7168 - workload(V3).num_parameters < 2 * 61
    assert layers + 2 * 129280 * 7168 == 671_026_397_184
    # A token meets 9 experts; scores are 192 wide, what they weigh 128.
    met = 61 * attention + 3 * dense + 58 * (9 * expert + gate) + 129280 * 7168
    core = 61 * 2 * 4096**2 * 128 * (192 + 128)
    assert workload(V3).flops() == pytest.approx(2 * 4096 * met + core, rel=1e-9)
    assert flops_per_sequence(V3, "model") == pytest.approx(3 * (2 * 4096 * met + core), rel=1e-9)


def test_latent_attention_and_shared_experts_keep_what_their_backward_reads() -> None:
    """Bytes per token: two norms and what they give (8 h), both latents before and after their norm, queries and keys
    of 192, values and output of 128; of the MLP gate, up, product; of each of 8 rows these, its input and its output.
    """
    kept = 8 * 7168 + 4 * (1536 + 512) + 2 * 128 * (2 * 192 + 2 * 128)
    mixture = 8 * (6 * 2048 + 4 * 7168) + 6 * 2048
    layout = Layouts.of(fused_attention=1, dropout=0)
    mean = (3 * 6 * 18432 + 58 * mixture) / 61
    assert layer_activation_bytes(workload(V3), layout)[0] == pytest.approx(4096 * (kept + mean), rel=1e-12)
    split = layer_activation_bytes(workload(V3), Layouts.of(fused_attention=1, dropout=0, tp=8, sequence_parallel=1))
    assert split[0] == pytest.approx(4096 * (kept + mean) / 8, rel=1e-12)


def test_experts_are_spread_over_the_tensor_parallel_ranks_which_do_not_cut_them() -> None:
    """With ZeRO-1 a rank's optimizer states are 12 bytes of Ψ/(dp · tp), however the experts are shared out."""
    work, stages = workload(V3), stages_of(workload(V3), 1)
    experts = 61 * V3.expert_parameters
    layouts = Layouts.of(dp=32, tp=8, ep=[8, 64, 256], zero=1, precision="bf16", sequence_parallel=1)
    weights = weights_of(work, layouts, stages)[0]
    rest = work.num_parameters - experts
    assert weights == pytest.approx([rest / 8 + experts / ep for ep in (8, 64, 256)])
    states = memories(work, layouts)
    assert states.weights == pytest.approx(2 * weights)
    assert states.optimizer == pytest.approx(np.full(3, 12 * work.num_parameters / 256))


def test_gathered_key_bytes_grow_with_the_whole_sequence() -> None:
    """405 B over tp 8 · cp 8 in torch: 2048 elements of 16 heads; 2 · 2 bytes of 262,144 tokens, and 28 of 32,768."""
    size = DecoderSize(126, 16384, 128, 128256, 262144, 53248, 8, gated=True, tied=False, biased=False)
    layouts = Layouts.of("bf16", engine=["torchtitan", "llama", "nemo", "torchtitan"], tp=8, cp=[8, 8, 8, 1])
    counted = gathered_key_bytes(size, layouts) * 32768
    gathered = 8 * 128 * 262144  # keys of a rank, values, and the gradients of both: 2 bytes each
    assert counted.tolist() == [4 * 2048 * 262144 + 28 * 2048 * 32768, gathered, 0, 0]


@pytest.mark.parametrize(
    ("precision", "gradient_bytes", "zero", "of_parameter"),
    [
        ("fp16", 2, 0, 20),
        ("bf16", 4, 0, 18),
        ("bf16", 2, 0, 20),
        ("fp16", 2, 1, 4 + 16 / 4),
        ("bf16", 4, 1, 6 + 12 / 4),
    ],
)
def test_megatron_core_takes_as_many_bytes_per_parameter_as_its_documentation_says(
    precision: Precision, gradient_bytes: int, zero: int, of_parameter: float
) -> None:
    """Megatron-LM, "Distributed Optimizer": 20 with fp16 gradients, 18 with fp32 ones; over d = 4: 4 + 16/d, 6 + 12/d.

    A sample of one token keeps next to nothing, so that the update is the fullest moment where it copies gradients.
    """
    work = workload(DecoderSize(4, 1024, 8, 1024, 1))
    layout = Layouts.of(precision, engine="megatron-core", dp=4, zero=zero, gradient_bytes=gradient_bytes, dropout=0)
    memory = memories(work, layout)
    taken = memory.weights + memory.gradients + memory.optimizer + memory.live * (gradient_bytes == 2)
    dummies = dummy_gradient_bytes(work.size, layout, np.array([1.0, 4.0, 1.0]))  # Transformer Engine's, beside them
    dummies = dummies if gradient_bytes == 2 else 0.0
    assert taken - dummies == pytest.approx(of_parameter * work.num_parameters, rel=1e-9)


def test_megatron_core_of_the_planner_accumulates_in_fp32_in_bf16_alone() -> None:
    assert [OFFERS["megatron-core"].gradient_bytes(precision) for precision in ("fp16", "bf16", "fp32")] == [2, 4, 4]


@pytest.mark.parametrize(
    ("hidden", "tp", "elements"),
    [
        # 12 · 4096² fit into half of 10⁹ beside the largest matrix, 4 · 4096²: the whole layer stays.
        (4096, 1, 201_326_592 + 50_000_000 + 67_108_864),
        # 4 · 20480² are 1,677,721,600: they, half of 10⁹, what is gathered ahead, and their gradient.
        (20480, 1, 1_677_721_600 + 500_000_000 + 50_000_000 + 1_677_721_600),
        (20480, 8, 629_145_600 + 50_000_000 + 209_715_200),
    ],
)
def test_zero3_live_bytes_of_deepspeed_are_of_matrices(hidden: int, tp: int, elements: int) -> None:
    """And of an engine that gathers layer by layer: two layers' weights, and a gradient."""
    size = DecoderSize(2, hidden, 32, 51200, 2048, biased=False)
    layer = np.full(3, 12 * hidden**2 / tp)
    layouts = Layouts.of("bf16", engine=["deepspeed", "megatron-core", "deepspeed"], zero=[3, 3, 2], dp=64, tp=tp)
    assert zero3_live_bytes(size, layouts, layer).tolist() == [2 * elements, 6 * 12 * hidden**2 / tp, 0]
