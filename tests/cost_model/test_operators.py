"""One operator: waves, alignment, roofline, and a layer of the 22 B model against its published milliseconds."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dlojz import models
from dlojz.cost_model import Layouts, calibration, workload
from dlojz.cost_model.calibration import Calibration, Product, wave_efficiency
from dlojz.cost_model.passes import (
    all_to_all_s,
    channel_share,
    exchange_times,
    kind_times,
    message_times,
    passes_of,
    ring_times,
)
from dlojz.cost_model.workload import (
    Cut,
    FusedAttention,
    LayerOperator,
    attention_core,
    fused_attention_s,
    layer_operators,
    mixture_operators,
    operators_s,
    padded_vocabulary,
    product_operator,
    product_s,
)
from dlojz.hardware import cluster, gpu
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.hardware.evidence import table
from dlojz.hardware.gpus import ATTENTION_KERNELS
from dlojz.planner.planned_model import subject
from tests.models import own_models

A100 = gpu("a100-80")
PLAIN = Calibration("plain", unaligned=0.1, product_start=0.0)


def test_a_result_that_fills_its_waves_uses_every_multiprocessor() -> None:
    full = Product(256 * 108, 128, 4096)  # 108 tiles, one wave
    assert wave_efficiency(full, 108) == 1.0


def test_one_tile_more_needs_a_wave_more() -> None:
    one, more = Product(256 * 108, 128, 4096), Product(256 * 108 + 1, 128, 4096)
    assert wave_efficiency(more, 108) < 0.95 * wave_efficiency(one, 108)  # smaller tiles save some of it
    assert product_s(more, A100, PLAIN, "fp16") > 1.05 * product_s(one, A100, PLAIN, "fp16")


def test_product_s_of_a_head_of_108_is_slower_than_144_by_more_than_its_work() -> None:
    """13824 / 128 and 13824 / 96, the lesson of Jean Zay's rows 833 and 832."""
    slow, fast = (Product(2048, 2048, size, 32, attention=True) for size in (108, 144))
    assert product_s(slow, A100, PLAIN, "fp16") > 3 * product_s(fast, A100, PLAIN, "fp16")


def test_a_thin_product_takes_the_time_of_its_bytes() -> None:
    thin = Product(4096, 4096, 16)
    expected = thin.moved_bytes / (A100.memory_bytes_per_s * PLAIN.memory_efficiency)
    assert product_s(thin, A100, PLAIN, "fp16") == pytest.approx(expected, rel=1e-12)


def test_the_backward_has_twice_the_operations() -> None:
    product = Product(12, 20, 28, 3)
    assert sum(one.flops for one in product.backward()) == 2 * product.flops


def test_a_small_layer_is_bound_by_launching_its_kernels() -> None:
    operators = (product_operator("small", Product(8, 8, 8)), LayerOperator("pass", forward_bytes=16.0, kernels=9))
    forward, backward = operators_s(operators, A100, PLAIN, "fp16")
    assert forward == 10 * PLAIN.launch_s
    assert backward == 20 * PLAIN.launch_s


def test_the_bytes_of_all_passes_add_up() -> None:
    passes = [LayerOperator("pass", forward_bytes=each, backward_bytes=2 * each) for each in (1e9, 3e9)]
    memory, kernel = A100.memory_bytes_per_s * PLAIN.memory_efficiency, A100.kernel_s
    expected = 4e9 / memory + 2 * kernel, 8e9 / memory + 4 * kernel  # backward launches two for each
    assert operators_s(passes, A100, PLAIN, "fp16") == pytest.approx(expected, rel=1e-12)


def test_layer_operators_count_the_slowest_rank_where_tp_does_not_divide_heads() -> None:
    """6 heads of 32 and 2 of keys and values on 4 ranks: the fullest has 2 and 1."""
    size = DecoderSize(1, 192, 6, 512, 64, kv_heads=2)
    products = {one.name: one.forward for one in layer_operators(size, Cut(1, tp=4))}
    assert products["queries, keys, values"] == (Product(64, (2 + 1 + 1) * 32, 192),)
    assert products["projection"] == (Product(64, 192, 2 * 32),)


def test_operators_s_adds_to_every_kernel_by_waiting_for_each_launch() -> None:
    operators = (LayerOperator("pass", forward_bytes=1e9, backward_bytes=1e9, kernels=5),)
    free, waiting = (operators_s(operators, A100, PLAIN, "fp16", blocking=one) for one in (False, True))
    assert waiting[0] - free[0] == pytest.approx(5 * PLAIN.serial_s, rel=1e-9)
    assert waiting[1] - free[1] == pytest.approx(10 * PLAIN.serial_s, rel=1e-9)


def test_the_vocabulary_is_padded_for_every_rank() -> None:
    size = DecoderSize(2, 64, 4, 50257, 32)
    assert [padded_vocabulary(size, tp) for tp in (1, 4, 8)] == [50304, 12672, 6400]


def test_operations_of_a_decoder_are_those_of_the_papers_formula() -> None:
    """24·s·h² + 4·s²·h per layer and sample, and 2·s·h·V of the logits (Narayanan et al. 2021, appendix)."""
    size = DecoderSize(3, 512, 8, 1024, 128)
    expected = 3 * (24 * 128 * 512**2 + 4 * 128**2 * 512) + 2 * 128 * 512 * 1024
    assert workload(size).flops() == expected


@pytest.mark.parametrize("name", ["baseline", "sequence-parallel", "full", "selective", "selective-sequence-parallel"])
def test_a_layer_of_the_22_billion_model_takes_its_published_time(name: str) -> None:
    """Korthikanti et al. 2022, table 4; no row of it is fitted on. Tolerance: 12 %, the rows are printed to 0.1 ms."""
    row = next(one for one in table("korthikanti-4") if one.row.endswith(f"/{name}"))
    found, kind, selene = calibration("a100"), workload(row.size).kinds[1], cluster("selene")
    cut = Cut(4, 8, sequence_parallel=row.sequence_parallel)
    forward, backward, core, *_ = kind_times(kind, cut, selene, found, "fp16")
    message, message_back = message_times(kind, cut, selene, found)
    again = {"none": 0.0, "selective": core, "full": forward + message}[row.checkpointing]
    assert row.forward_s is not None and row.backward_s is not None
    assert forward + message == pytest.approx(row.forward_s, rel=0.12)
    assert backward + message_back + again == pytest.approx(row.backward_s, rel=0.12)


def test_ring_times_of_keys_and_values_are_one_forward_and_two_backward() -> None:
    """Ring attention over 4 ranks of a node: 2 tensors of s·h elements of 2 bytes for each of 2 samples."""
    size, found, selene = DecoderSize(2, 64, 4, 512, 32), calibration("a100"), cluster("selene")
    ring = selene.intra.time_s("all_gather", 4, 2 * (32 * 64) * 2 * 2) / found.intra_efficiency
    kind, none = workload(size).kinds[1], replace(found, overlap=0.0)
    around = partial(ring_times, kind, cluster=selene, precision="fp16", core_s=(1.0, 1.0))
    assert around(Cut(2, cp=4), calibration=none) == pytest.approx((ring, 2 * ring), rel=1e-12)
    assert around(Cut(2), calibration=none) == (0.0, 0.0)
    # Beside attention, all channels run in a node; Llama 3 gathers before it computes.
    share = 1 - found.overlap
    assert around(Cut(2, cp=4), calibration=found) == pytest.approx((share * ring, 2 * share * ring), rel=1e-12)
    assert around(Cut(2, cp=4, rings=False), calibration=found) == pytest.approx((ring, 2 * ring), rel=1e-12)
    # torch's hands gradients on in fp32, four times, of which the last has nothing beside it.
    returned = 2 * ring * 4 / 3
    expected = share * ring, share * ring + returned * (1 / 4 + share * 3 / 4)
    assert around(Cut(2, cp=4, expands_keys=True), calibration=found) == pytest.approx(expected, rel=1e-12)
    # With tensor parallelism a rank holds half of the heads; the group's ranks are 2 apart, but in the node still. Two
    # all-reduces each way, of s/4·h elements.
    half = selene.intra.time_s("all_gather", 4, (32 * 64) * 2 * 2) / found.intra_efficiency
    one = selene.intra.time_s("all_reduce", 2, 2 * (32 * 64) * 2 // 4) / found.intra_efficiency
    cut = Cut(2, tp=2, cp=4)
    assert message_times(kind, cut, selene, found) == pytest.approx((2 * one, 2 * one), rel=1e-12)
    assert around(cut, calibration=none) == pytest.approx((half, 2 * half), rel=1e-12)


MIXTURE = DecoderSize(
    2, 64, 4, 512, 32, mlp_width=96, gated=True, biased=False, positions="none", experts=8, top_k=2
)  # fmt: skip


def test_mixture_operators_move_rows_twice_each_way_and_in_fp8_pad_and_cast_them() -> None:
    """2 samples of 32 tokens, 2 experts each: 128 rows of 64; 4 experts of a rank, of 2 ranks, so 32 rows of each."""
    operators = mixture_operators(MIXTURE, Cut(2, ep=2))
    rows, tokens = 128 * 64, 64 * 64
    moved = {one.name: one.forward_bytes for one in operators if one.name.startswith(("dispatch", "combine"))}
    # Permutation 1 reads a token once and writes it twice; permutation 2 reads and writes each row; and back.
    once, sorted_rows = 2 * (rows + tokens), 4 * rows
    assert moved == {
        "dispatch": once,
        "dispatch, by expert": sorted_rows,
        "combine": once,
        "combine, by expert": sorted_rows,
    }
    products = {one.name: (one.forward, one.kernels) for one in operators if one.forward}
    assert products["experts, up"] == ((Product(32, 192, 64, 4),), 4), "each expert is a kernel"
    assert products["experts, down"] == ((Product(32, 64, 96, 4),), 4)
    narrow = {one.name: one for one in mixture_operators(MIXTURE, Cut(2, ep=2, narrow=True))}
    assert narrow["dispatch, padding"].forward_bytes == 4 * rows == narrow["combine, padding"].backward_bytes
    assert narrow["experts, up"].kernels == 12, "greatest value, cast, product"
    # The last one is that of the MLP's rows, 128 of 96.
    assert narrow["cast of rows"].forward_bytes == 2 * 128 * 96
    # One expert of a rank needs no second sort.
    assert not any("by expert" in one.name for one in mixture_operators(MIXTURE, Cut(2, ep=8)))


def test_mixture_operators_of_tensor_parallel_ranks_each_have_their_tokens() -> None:
    """Experts are not cut: 2 ranks with 32 tokens each, experts over 4 of the ranks: as many rows as over 2 with 64."""
    half = {one.name: one for one in mixture_operators(MIXTURE, Cut(2, tp=2, sequence_parallel=True, ep=4))}
    assert half["experts, up"].forward == (Product(32, 192, 64, 2),)
    assert half["dispatch"].forward_bytes == 2 * (64 + 32) * 64


def test_exchange_times_follow_the_dispatcher() -> None:
    """16 ranks on two nodes: half of the rows leave the node; sent once, a token's two go there with the chance 3/4."""
    found, selene = calibration("a100"), cluster("selene")
    kind = workload(MIXTURE).kinds[1]
    waited = 2 * float(all_to_all_s(selene, found, 2 * 2 * 64 * 64 * 2, 16))
    times = partial(exchange_times, kind, cluster=selene, calibration=found, precision="bf16", computing_s=(1.0, 2.0))
    assert times(Cut(4, ep=16)) == (waited, waited)
    hidden = (1 - found.overlap) * float(channel_share(selene, 16)) * waited
    assert times(Cut(4, ep=16, dispatcher=1)) == pytest.approx((hidden, hidden))
    # Two tensor-parallel ranks hand over half of the tokens each.
    assert times(Cut(8, tp=2, ep=16)) == (waited, waited)
    assert times(Cut(4)) == (0.0, 0.0)
    many, once = (float(all_to_all_s(selene, found, 1e12, 16, 1, copies)) for copies in (1, 2))
    assert once / many == pytest.approx(3 / 4, rel=1e-3)  # 2 · (1 − 1/4)/2 of half, instead of half


@pytest.mark.parametrize(("ep", "waited_s"), [(8, 0.14e-3), (16, 0.42e-3)])
def test_exchange_times_of_tokens_sent_once_wait_beside_the_kernel(ep: int, waited_s: float) -> None:
    """Hybrid-EP's own table: 4,096 tokens of 7,168 in 16 bit, each counted for every rank (8) or node (2) it reaches.

    A rank of 8 is reached by one of 8 rows with the chance 1 − (7/8)⁸, a node of 2 with 1 − (1/2)⁸. GB/s with what is
    waited for, and of the kernel alone, of dispatch and of combine.
    """
    groups = {8: 8, 16: 2}[ep]
    rates = {8: ((535.94, 734.95), (530.86, 673.84)), 16: ((54.47, 71.71), (53.35, 62.95))}[ep]
    sent_bytes = 4096 * 7168 * 2 * groups * (1 - (1 - 1 / groups) ** 8)
    published_s = sum(sent_bytes / with_start / 1e9 - sent_bytes / alone / 1e9 for with_start, alone in rates) / 2
    assert published_s == pytest.approx(waited_s, rel=0.02)
    found, selene = calibration("a100"), cluster("selene")
    kind = workload(MIXTURE).kinds[1]
    kernel_s = float(all_to_all_s(selene, found, 2 * 2 * 64 * 64 * 2, ep, 1, kind.top_k))
    forward, backward = exchange_times(kind, Cut(4, ep=ep, dispatcher=2), selene, found, "bf16", (1.0, 2.0))
    assert forward == backward == pytest.approx(2 * (waited_s + kernel_s), rel=1e-12)


def test_product_s_casts_the_factors_of_every_expert() -> None:
    """3 experts of 512 rows: (512 + 256) · 1024 elements of each, 2 bytes."""
    h100 = gpu("h100")
    product = Product(512, 256, 1024, 3)
    with_cast, without = (product_s(product, h100, PLAIN, "fp8", cast_bytes) for cast_bytes in (2.0, 0.0))
    cast_s = 3 * (512 + 256) * 1024 * 2 / (h100.memory_bytes_per_s * PLAIN.memory_efficiency)
    assert with_cast - without == pytest.approx(cast_s, rel=1e-9)
    heads = product._replace(attention=True)  # which stay in 16 bit
    assert product_s(heads, h100, PLAIN, "fp8", 2.0) == product_s(heads, h100, PLAIN, "fp8", 0.0)


def test_message_times_known_from_another_layer_are_the_same() -> None:
    """A layer of the same width has them at once; another width, and another cut, are timed."""
    found, selene = calibration("a100"), cluster("selene")
    size = DecoderSize(2, 512, 4, 512, 4096)
    known: dict[tuple[float, ...], float] = {}
    for kind in (*workload(size).kinds, *workload(replace(size, hidden=1024)).kinds):
        for cut in (Cut(1), Cut(1, 2), Cut(2, 2), Cut(1, 4), Cut(1, 4, sequence_parallel=True)):
            times = message_times(kind, cut, selene, found, seconds_of_sum=known)
            assert times == message_times(kind, cut, selene, found)
    assert len(known) == 7  # a message of 2 samples of 512 is as large as one of 1 of 1024


def test_torch_s_ring_repeats_keys_and_values_for_all_heads() -> None:
    size, found, selene = DecoderSize(2, 64, 4, 512, 32, kv_heads=2), calibration("a100"), cluster("selene")
    kind = workload(size).kinds[1]
    plain, expanded = (
        ring_times(kind, Cut(2, cp=4, expands_keys=one), selene, replace(found, overlap=0.0), "bf16", (1.0, 1.0))[0]
        for one in (False, True)
    )
    alpha = selene.intra.alpha_s("all_gather", 4)
    assert expanded - alpha == pytest.approx(2 * (plain - alpha))


def test_torchtitan_copies_its_messages_and_gathers_them_in_fp8() -> None:
    """A reduce-scatter and an all-gather of s·h elements, each read and written once more; fp8 is one byte."""
    size, found, h100 = DecoderSize(2, 512, 4, 512, 4096), calibration("h100"), cluster("dgx_h100")
    kind, memory = workload(size).kinds[1], h100.gpu.memory_bytes_per_s * found.memory_efficiency
    cut, elements = Cut(2, 8, sequence_parallel=True), 2 * 512 * 4096
    plain, copied = (
        message_times(kind, cut._replace(copies_messages=one), h100, found, "fp8")[0] for one in (False, True)
    )
    assert copied - plain == pytest.approx(2 * 2 * 4 * elements / memory)
    narrow = message_times(kind, cut._replace(gathers_fp8=True, copies_messages=True), h100, found, "fp8")[0]
    saved = h100.intra.time_s("all_gather", 8, 2 * elements) - h100.intra.time_s("all_gather", 8, elements)
    assert copied - narrow == pytest.approx(2 * (saved / found.intra_efficiency + 2 * elements / memory))


def test_messages_run_while_the_gpu_waits_for_the_host() -> None:
    """So a layer bound by launches takes as long as the host, whatever its messages, up to its idle time."""
    size, selene = DecoderSize(2, 256, 4, 512, 64), cluster("selene")
    slow = replace(calibration("a100"), launch_s=60e-6, intra_efficiency=1.1)
    tensor = passes_of(workload(size), selene, Layouts.of(tp=[1, 2]), slow)
    messages = message_times(workload(size).kinds[1], Cut(1, 2), selene, slow)
    times = kind_times(workload(size).kinds[1], Cut(1, 2), selene, slow, "fp16")
    assert 0 < messages[0] < times.idle and 0 < messages[1] < times.idle_backward
    assert tensor.tensor_forward[1].tolist() == tensor.tensor_backward[1].tolist() == [0.0, 0.0]


def test_kind_times_with_fused_attention_skip_the_scores_in_memory() -> None:
    size = table("korthikanti-5")[0].size
    kind, found, selene = workload(size).kinds[1], calibration("a100"), cluster("selene")
    plain, fused = (kind_times(kind, Cut(4, 8, fused_attention=one), selene, found, "fp16") for one in (False, True))
    assert fused[0] < plain[0] and fused[1] < plain[1]
    assert math.isfinite(fused[2])


def test_fused_attention_takes_its_published_rate_and_its_bytes() -> None:
    """16 384 tokens, heads of 128, causal: the rate of the kernel's figure less its half-speed rows; no tiles."""
    one = FusedAttention(16384, 16384, 128, 32, 8)
    assert one.flops() == 2 * 32 * 16384**2 * 128 and one.flops(backward=True) == 2.5 * one.flops()
    assert one.moved_bytes() == 2 * 16384 * 128 * (2 * 32 + 2 * 8) + 4 * 32 * 16384
    # Backward: Q, O and dO read (2 bytes each), dQ added up in fp32 (read and written) and written in 16 bit: 16 bytes
    # per element; K and V read, dK and dV written: 4; three fp32 statistics per row.
    assert one.moved_bytes(True) == 16384 * 128 * (16 * 32 + 4 * 2 * 8) + 3 * 4 * 32 * 16384
    h100 = gpu("h100")
    for kernel in ATTENTION_KERNELS:
        seconds = fused_attention_s(one._replace(kernel=kernel), h100, PLAIN, "bf16")
        rate = h100.attention_flops[f"{kernel}_forward_128"] * 16384 / (16384 + 256)
        assert seconds == pytest.approx(one.flops() / rate)
    fast = replace(h100, attention_flops=dict.fromkeys(h100.attention_flops, 1e18))
    memory = h100.memory_bytes_per_s * PLAIN.memory_efficiency
    assert fused_attention_s(one, fast, PLAIN, "bf16", True) == pytest.approx(one.moved_bytes(True) / memory)
    causal, whole = (fused_attention_s(each, h100, PLAIN, "bf16") for each in (one, one._replace(causal=False)))
    assert whole == pytest.approx(2 * causal)


def test_fused_attention_s_between_published_heads_and_on_gpus_without_a_rate() -> None:
    heads = [FusedAttention(4096, 4096, size, 32, 32) for size in (64, 96, 128, 256)]
    sizes = [fused_attention_s(one, A100, PLAIN, "bf16") / one.width for one in heads]
    assert sizes[0] > sizes[1] > sizes[2] == pytest.approx(sizes[3])
    v100, one = gpu("v100-32"), FusedAttention(4096, 4096, 64, 32, 32)
    assert not v100.attention_flops
    reached = v100.peak_flops["fp16"] * PLAIN.attention_efficiency * 4096 / (4096 + 256)
    assert fused_attention_s(one, v100, PLAIN, "fp16") == pytest.approx(one.flops() / reached)


@pytest.mark.parametrize("model", ["torchvision:resnet50", "timm:vit_tiny_patch16_224", f"{own_models.__file__}:build"])
def test_the_operators_of_a_model_from_elsewhere_are_those_that_torch_counts(model: str) -> None:
    """Products of one sample's forward beside torch's counter, parameters beside the module's, each once."""
    counted, made = models.describe(model), workload(model)
    assert made.size is None and made.num_parameters == counted.parameters
    assert made.flops() == pytest.approx(counted.flops, rel=0.02)
    assert sum(kind.count for kind in made.kinds) == counted.blocks


def test_heads_exchanged_are_four_all_to_alls_each_way_and_one_kernel_of_all_tokens() -> None:
    """Two samples of 65536 tokens, 32 heads of 128, 8 of keys: a rank of tp 2, cp 4 sends 1/8 of queries and of what
    attention gives (2 · 65536 · 4096 · 2 bytes), and of keys and values (2 · 65536 · 1024 · 2 bytes).
    """
    size = DecoderSize(1, 4096, 32, 1000, 65536, kv_heads=8)
    site, found, kind = cluster("selene"), Calibration("a100"), workload(size).kinds[1]
    cut = Cut(2, tp=2, cp=4, fused_attention=True, exchanges_heads=True)
    queries, keys = 2 * 65536 * 4096 * 2 / 8, 2 * 65536 * 1024 * 2 / 8
    once = 2 * sum(float(all_to_all_s(site, found, sent, 4, 2)) for sent in (queries, keys))
    assert ring_times(kind, cut, site, found, "bf16", (1.0, 1.0)) == pytest.approx((once, once))
    (core,) = attention_core(size, cut)
    assert core.fused is not None and core.fused[:5] == (65536, 65536, 128, 2 * 32 // 8, 2 * 8 // 8)
    # As many operations as a ring's ranks have, and no sums of partial results.
    ring = attention_core(size, cut._replace(exchanges_heads=False))
    assert len(ring) == 2 and ring[0].flops == core.flops


LLAMA = f"hf:{Path(__file__).parents[1] / 'models' / 'tiny_llama'}"


def test_workload_of_adapters_has_one_product_backward_for_a_frozen_factor() -> None:
    """Seven linear layers, each with two products beside it, and two of attention: 23 forward.

    Backward a frozen one has 1, the others 2: 7 + 28 + 4. In the first layer queries, keys and values read what has no
    gradient: their frozen products have none, and A has that of its weight alone, 3 + 3 less. The head, frozen too,
    has one. Rank 4 trains 4 · (in + out): 4 · (2 · 128 + 2 · 96 + 3 · 160). In 4 bits 30,720 weights are half as many
    bytes, a scale for each 64, and 8 bytes of constants for each of the seven.
    """
    adapted = subject(
        LLAMA, sequence_length=32, adapters={"lora": 4, "lora_targets": "all-linear", "lora_base": "4bit"}
    )
    first, middle, head = adapted.workload.kinds
    counts = [
        [sum(len(getattr(operator, way)) for operator in kind.operators(Cut(1))) for way in ("forward", "backward")]
        for kind in (first, middle, head)
    ]
    assert counts == [[23, 33], [23, 39], [1, 1]]
    assert (middle.trained, head.trained) == (3712, 0)
    assert middle.quantized == (30720, 15360 + 480 + 56)
    assert middle.gathered(2) == middle.parameters - 30720 + 15896 / 2
    # What makes weights in 16 bit again takes as long for any batch.
    moved = [[o.forward_bytes for o in middle.operators(Cut(size)) if not o.forward] for size in (1, 2)]
    assert sum(once == twice for once, twice in zip(*moved, strict=True)) == 7
