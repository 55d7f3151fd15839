"""What forecasts must hold whatever the run; against measured peaks they are tested in tests/train/test_truth.py."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz import hardware, models, predict
from dlojz.base.errors import LabError
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import mean_loss
from dlojz.models.meta import sample_inputs, targets_shape
from dlojz.models.sizes import GPTSize
from dlojz.pipeline.partition import stage_bounds
from dlojz.prediction.allocator import replay
from dlojz.prediction.engine_memory import Compressed, Ledger
from dlojz.prediction.forecast import CompiledRange, forecast, heaviest
from dlojz.prediction.model_trace import trace_of
from dlojz.prediction.rules_of_thumb import Shape, layer_bytes
from dlojz.prediction.shapes import RankPart, model_shapes
from dlojz.results.footprint import CATEGORIES, STATES

SMALL = {"model": "vit_tiny", "micro_batch": 4}
ENGINES = [
    {},
    {"dp": 2},
    {"dp": 2, "engine": "by_hand"},
    *({"dp": 2, "engine": "by_hand", "zero": stage} for stage in (1, 2, 3)),
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3},
    *({"dp": 2, "engine": "deepspeed", "zero": stage} for stage in range(4)),
]


def peak(device: str | None = None, **fields: object) -> int:
    return heaviest(RunConfig.of(**{**SMALL, **fields}), device).memory.peak_bytes or 0


@pytest.mark.parametrize("fields", ENGINES, ids=str)
@pytest.mark.parametrize("device", [None, "a100-80"])
def test_a_forecast_adds_up(fields: dict[str, object], device: str | None) -> None:
    """The categories at the peak, the blocks at the peak, the timeline's top and the movements all tell one peak."""
    told = forecast(RunConfig.of(**SMALL, **fields, micro_batches=2), 0, device)
    memory = told.memory
    assert memory.at_peak_bytes and sum(memory.at_peak_bytes.values()) == memory.peak_bytes
    by_block = sum(sum(held.values()) for _, held in told.at_peak_by_block)
    assert by_block == memory.peak_bytes
    assert max(sum(sample.bytes_by_category.values()) for sample in told.samples) == memory.peak_bytes
    assert replay(told.events).requested_peak_bytes == memory.peak_bytes
    assert all(memory.category(category) is not None for category in CATEGORIES if category != "script")
    assert told.moment
    if device is None:
        assert memory.reserved_bytes is None and memory.device_bytes is None
    else:
        assert memory.device_bytes and memory.reserved_bytes and memory.peak_bytes
        assert memory.peak_bytes <= memory.reserved_bytes
        gpu = hardware.device(device)
        nccl_bytes = gpu.nccl_bytes if "dp" in fields else 0  # it serves two processes and more
        assert memory.device_bytes - memory.reserved_bytes == gpu.context_bytes + nccl_bytes


@given(
    micro_batch=st.integers(1, 8),
    engine=st.sampled_from(ENGINES),
    checkpointing=st.sampled_from(["none", "full"]),
)
@settings(max_examples=15)
def test_heaviest_forecast_never_takes_less_for_more_samples(
    micro_batch: int, engine: dict[str, object], checkpointing: str
) -> None:
    fields = {**engine, "checkpointing": checkpointing}
    assert peak(**{**fields, "micro_batch": micro_batch}) <= peak(**{**fields, "micro_batch": micro_batch + 1})


def test_heaviest_forecast_takes_more_for_longer_sequences_and_larger_images() -> None:
    assert peak(image_size=32) < peak(image_size=64)
    assert peak(model="gpt_tiny", sequence_length=32) < peak(model="gpt_tiny", sequence_length=64)


def test_heaviest_forecast_takes_less_in_a_higher_stage_where_states_fill_the_device() -> None:
    """CoAtNet-0 with one small image per rank; the lab's bucket of DeepSpeed (8 MB) is small beside its states."""
    fields = {"model": "coatnet_0", "image_size": 32, "micro_batch": 1, "dp": 8, "micro_batches": 2}
    for engine, stages in (("deepspeed", (0, 1, 2, 3)), ("by_hand", (0, 1, 2, 3)), ("torch", (0, 2, 3))):
        peaks = [peak(**fields, engine=engine, zero=stage) for stage in stages]
        assert peaks == sorted(peaks, reverse=True), engine


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("device", [None, "h100"])
@pytest.mark.parametrize("model", ["coatnet_tiny", "vit_tiny", "gpt_tiny"])
def test_forecast_keeps_less_with_checkpointing(model: str, device: str | None, checkpointing: str) -> None:
    plain, fewer = (
        forecast(RunConfig.of(model=model, micro_batch=8, checkpointing=mode), 0, device).memory.activations_bytes or 0
        for mode in ("none", checkpointing)
    )
    assert fewer < 0.75 * plain


def test_offloaded_activations_lie_in_host_memory() -> None:
    kept, moved = (forecast(RunConfig.of(**SMALL, offload=what)).memory for what in ("none", "activations"))
    assert moved.host_bytes and kept.host_bytes == 0
    images_bytes = 4 * 3 * 64 * 64 * 4  # they stay with who has read them, and a copy goes with the activations
    assert (moved.activations_bytes or 0) + moved.host_bytes == (kept.activations_bytes or 0) + images_bytes
    assert (moved.peak_bytes or 0) < 0.8 * (kept.peak_bytes or 0)


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_offloaded_states_lie_in_host_memory(offload: str) -> None:
    fields = {**SMALL, "engine": "deepspeed", "zero": 3, "dp": 2, "precision": "bf16"}
    kept, moved = (predict(RunConfig.of(**fields, offload=what)).memory for what in ("none", offload))
    assert moved.optimizer_bytes == moved.master_bytes == 0
    assert moved.host_bytes and moved.host_bytes >= (kept.optimizer_bytes or 0) + (kept.master_bytes or 0)
    assert moved.states_bytes < kept.states_bytes


# -- tensor and pipeline parallelism


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_forecast_of_tensor_parallelism_keeps_what_the_published_form_says(tp: int, sequence_parallel: bool) -> None:
    """Korthikanti et al. 2022, §4.2: per layer sbh(10 + 24/t) with tensor, 34/t with sequence parallelism too, here
    without its two dropout masks (1 byte each of the 10) nor scores: 8 + 24/t, 32/t; and what a fused attention keeps
    besides its output is in neither (its logarithms, 4 bytes per head and token).

    With sequence parallelism the lab keeps, of each of a layer's two regions, what entered, gathered: (t − 1)/t · 2sbh
    more than its own tokens; the paper gathers it once more in backward instead (§4.2.2).
    """
    config = RunConfig.of(
        model="gpt_tiny",
        micro_batch=2,
        precision="bf16",
        engine="deepspeed",
        tp=tp,
        sequence_parallel=sequence_parallel,
    )
    told = forecast(config)
    kept = sum(num for module, num in told.activations_by_module.items() if module.startswith("blocks.2"))
    shape = Shape(sequence_length=128, micro_batch=2, hidden=128, heads=4)
    form = layer_bytes(shape, tp=tp, sequence_parallel=sequence_parallel) - 5 * shape.scores // tp
    masks = 2 * shape.sbh // (tp if sequence_parallel else 1)
    statistics = 8 * shape.sequence_length * shape.micro_batch // (tp if sequence_parallel else 1)
    logarithms = 4 * shape.heads * shape.sequence_length * shape.micro_batch // tp
    gathered = 2 * 2 * shape.sbh * (tp - 1) // tp if sequence_parallel else 0
    assert kept == pytest.approx(float(form - masks + statistics + logarithms + gathered), rel=0.02)


def test_parts_make_the_whole() -> None:
    """Over all stages every block once; over tensor-parallel ranks every matrix once, norms and biases on each."""
    shapes = model_shapes(RunConfig.of(model="gpt_tiny"))
    parts = [RankPart(RunConfig.of(model="gpt_tiny", pp=3), rank).shapes for rank in range(3)]
    assert sum(part.num_parameters for part in parts) == shapes.num_parameters
    [part] = {RankPart(RunConfig.of(model="gpt_tiny", tp=2), rank).shapes for rank in range(2)}
    matrices = sum(parameter.numel for parameter in shapes.parameters if len(parameter.shape) == 2)
    shared = sum(parameter.numel for parameter in part.parameters if len(parameter.shape) == 2)
    position = 128 * 128  # the table of positions stays whole
    assert 2 * (shared - position) == matrices - position


@given(num_blocks=st.integers(1, 60), pp=st.integers(1, 60))
def test_stages_are_contiguous_and_even(num_blocks: int, pp: int) -> None:
    layout, names, ones = Layout(pp=pp), [""] * num_blocks, [1] * num_blocks
    if pp > num_blocks:
        with pytest.raises(LabError, match=f"the model has {num_blocks}"):
            stage_bounds(layout, pp, names, ones)
        return
    bounds = stage_bounds(layout, pp, names, ones)
    assert bounds[0] == 0 and bounds[-1] == num_blocks and len(bounds) == pp + 1
    sizes = [end - start for start, end in pairwise(bounds)]
    assert max(sizes) - min(sizes) <= 1


def test_micro_batches_in_flight_fill_the_first_stage() -> None:
    """1F1B holds one micro-batch per stage behind, GPipe all of them."""
    fields = {"model": "gpt_tiny", "micro_batch": 2, "pp": 3, "micro_batches": 6}
    first = forecast(RunConfig.of(**fields, schedule="1f1b"), 0)
    assert (first.in_flight, forecast(RunConfig.of(**fields, schedule="1f1b"), 2).in_flight) == (3, 1)
    every = forecast(RunConfig.of(**fields, schedule="gpipe"), 0)
    assert every.in_flight == 6
    # Both have a step's tokens twice, of 6 micro-batches of 2 samples; 1F1B's last send before its first backward still
    # holds its output, of 2 × 128 × 128 numbers.
    tokens_bytes, sent_bytes = 2 * 6 * 2 * 128 * 8, 2 * 128 * 128 * 4
    kept_bytes = (first.memory.activations_bytes or 0) - tokens_bytes - sent_bytes
    assert every.memory.activations_bytes == 2 * kept_bytes + tokens_bytes


def test_forecast_of_three_dimensions_together() -> None:
    whole = forecast(RunConfig.of(model="gpt_tiny")).memory
    config = RunConfig.of(model="gpt_tiny", tp=2, pp=2, dp=2, zero=1, engine="deepspeed", micro_batches=4)
    ranks = [forecast(config, rank).memory for rank in range(8)]
    weights = sum(memory.weights_bytes or 0 for memory in ranks)
    assert 2 * (whole.weights_bytes or 0) < weights < 2.2 * (whole.weights_bytes or 0)
    optimizer = sum(memory.optimizer_bytes or 0 for memory in ranks)
    assert (whole.optimizer_bytes or 0) < optimizer < 1.1 * (whole.optimizer_bytes or 0)


# -- bad input, and the ledger


@pytest.mark.parametrize(
    ("fields", "rank", "device", "words"),
    [
        ({"dp": 2}, 2, None, "rank 2 does not exist.*ranks 0 to 1"),
        ({}, 0, "v100", "v100-16"),
        ({"tp": 3}, 0, None, "tp=3 does not divide the 4 attention heads of vit_tiny"),
        ({"pp": 7}, 0, None, "the model has 6: use 6 stages or less"),
    ],
)
def test_what_cannot_be_forecast(fields: dict[str, object], rank: int, device: str | None, words: str) -> None:
    with pytest.raises(LabError, match=words):
        forecast(RunConfig.of(**SMALL, **fields), rank, device)


def test_the_moment_of_the_peak_is_told() -> None:
    found = forecast(RunConfig.of(**SMALL))

    def told(phase: str | None, module: str = "blocks.2") -> str:
        memory = found.memory.model_copy(update={"peak_moment": phase})
        return replace(found, memory=memory, peak_micro_batch=3, peak_module=module).moment

    assert told("forward") == "forward of micro-batch 3, in blocks.2"
    assert told("backward") == "backward of micro-batch 3, in blocks.2"
    assert told("backward", module="") == "loss backward of micro-batch 3"
    assert told("optimizer") == "optimizer step"
    assert told(None) == "between two steps"


def test_forecast_answers_a_second_question_from_memory() -> None:
    config = RunConfig.of(**SMALL)
    assert forecast(config) is forecast(config)
    assert forecast(config, 0, "h200") is forecast(config, 0, hardware.device("h200"))


def test_the_ledger_keeps_its_books() -> None:
    ledger = Ledger()
    ledger.moment = "forward"
    ledger.hold("a", "activations", 100, "blocks.0")
    ledger.hold("b", "workspace", 50)
    ledger.drop("a")
    ledger.hold("b", "workspace", 20)
    ledger.drop("never held")
    memory = ledger.memory()
    assert (memory.peak_bytes, memory.peak_moment) == (150, "forward")
    assert memory.at_peak_bytes == dict.fromkeys(CATEGORIES, 0) | {"activations": 100, "workspace": 50}
    assert dict(ledger.peak_by_block()) == {"blocks.0": {"activations": 100}, "": {"workspace": 50}}
    assert memory.workspace_bytes == 50
    assert all(memory.category(state) == 0 for state in STATES)


def test_what_a_compressed_update_takes_is_counted_tensor_by_tensor() -> None:
    """Two tensors of 4096 elements on two ranks: each serves a chunk of 4096, told in 512 bytes of signs, 2 scales."""
    config = RunConfig.of(model="vit_tiny", dp=2, engine="by_hand", optimizer="one_bit_adam", warmup_steps=1)
    update_bytes = Compressed(config, model_shapes(config)).update_bytes
    messages, last, mean = 2 * 2 * (512 + 2 * 4), 4 * 4096, 4 * 2 * 4096
    signs = 4096 // 8 + 4096 + 4 * 4096  # packed, as bytes, as numbers
    assert update_bytes([4096, 4096]) == messages + last + mean + signs
    # One tensor alone: while it is told, momentum, root twice, quotient (fp32), and where the variance is 0.
    assert update_bytes([8192]) == (3 * 4 + 1) * 8192


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_forecast_of_stage_0_of_deepspeed_reduces_all_gradients_at_once_in_the_end(micro_batches: int) -> None:
    config = RunConfig.of(**SMALL, dp=2, engine="deepspeed", zero=0, micro_batches=micro_batches)
    whole = 4 * model_shapes(config).num_parameters
    sent = [number for number, delta in forecast(config).events if delta == -whole]
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("fields", "read_gib"),
    [
        ({"dp": 8, "sequence_length": 8192, "micro_batch": 2, "checkpointing": "every_second"}, 82.4),
        ({"dp": 128, "sequence_length": 8192, "micro_batch": 2, "checkpointing": "every_second"}, 67.0),
        ({"dp": 8, "sequence_length": 32768, "micro_batch": 1, "checkpointing": "full"}, 83.9),
    ],
)
def test_torchtitan_s_reserved_memory(fields: dict[str, Any], read_gib: float) -> None:
    """Liang et al. 2024 (arXiv 2410.06511), Llama 3 8B on H100, eager, and with full checkpointing compiled.

    Its script sets `expandable_segments:True` (torchtitan, run_llama_train.sh).
    """
    config = RunConfig.of(model="llama_3_8b", precision="bf16", zero=3, device="cuda", **fields)
    assert config.num_classes == 128256
    told = forecast(config, 0, "h100")
    assert -0.07 < (told.expandable_reserved_bytes or 0) / 2**30 / read_gib - 1 < 0
    assert (told.expandable_reserved_bytes or 0) < (told.memory.reserved_bytes or 0)


def test_compiled_range_begins_with_the_products_that_backward_reads() -> None:
    """Of each of gpt_tiny's blocks queries, keys, values, what attention gives and its sums, and the wide layer."""
    (samples, tokens), size = (4, 128), models.spec("gpt_tiny").size
    assert isinstance(size, GPTSize)
    wide = 8 * size.width + size.num_heads  # 3 + 1 + 4 widths
    kept_bytes = 4 * samples * tokens * (size.depth * wide + 256)  # and the logits
    for micro_batches in (1, 2):
        told = forecast(RunConfig.of(model="gpt_tiny", micro_batch=samples, micro_batches=micro_batches))
        memory, compiled = told.memory, told.compiled
        assert told.kept_products_bytes == kept_bytes and memory.gradients_bytes and memory.peak_bytes
        added_bytes = (micro_batches - 1) * memory.gradients_bytes
        assert compiled.low_bytes == memory.states_bytes - memory.gradients_bytes + kept_bytes + added_bytes
        assert added_bytes < compiled.high_bytes - memory.peak_bytes < added_bytes + 0.006 * memory.peak_bytes


def test_compiled_range_fits_only_where_both_ends_do() -> None:
    low, high = forecast(RunConfig.of(model="gpt_tiny")).compiled._replace(limit_bytes=1, beside_bytes=10**9)[:2]
    for limit, fits in ((low - 1, False), (low, None), (high - 1, None), (high, True)):
        assert CompiledRange(low, high, 7, limit + 7).fits is fits


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["gpt_tiny", "coatnet_tiny"])
def test_compiled_range_holds_what_torch_compile_keeps(model: str) -> None:
    """Bytes of all that the compiled graph of a model and its loss saves for backward, states left out."""
    config = RunConfig.of(model=model, micro_batch=4)
    sizes = {"image_size": config.image_size, "sequence_length": config.sequence_length}
    trained = models.build(model, **sizes, num_classes=config.num_classes)
    numbers = sample_inputs(model, 4, **sizes, device="cpu")
    inputs = torch.rand(numbers.shape) if numbers.is_floating_point() else torch.zeros_like(numbers)
    targets = torch.zeros(targets_shape(model, 4, config.sequence_length), dtype=torch.long)
    # Dynamo, autograd and the partitioner are inductor's; its code generator is left out.
    compiled = torch.compile(lambda x, y: mean_loss(trained(x), y), backend="aot_eager_decomp_partition")
    states = {one.untyped_storage().data_ptr() for one in (*trained.parameters(), *trained.buffers())}
    graph = compiled(inputs, targets).grad_fn
    assert "CompiledFunction" in type(graph).__name__  # one graph, without a break
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in graph.saved_tensors}
    saved_bytes = sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in states)
    trace = trace_of(RankPart(config))
    assert forecast(config).kept_products_bytes <= saved_bytes <= 1.005 * trace.saved_bytes
