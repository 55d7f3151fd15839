"""Probes on operations whose bytes are known beforehand."""

import gc
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dlojz.config.run_config import RunConfig
from dlojz.hardware.gpus import device_of_driver
from dlojz.results.footprint import Overlap
from dlojz.train.dispatch_trace import CollectiveCall, MemoryProbe, StorageTrace, traffic_of
from dlojz.train.engines import base
from dlojz.train.loop import build_model
from dlojz.train.probes import PhaseClock, seconds_at_peak


def live(trace: StorageTrace) -> int:
    gc.collect()
    return sum(trace.live_bytes.values())


def test_a_storage_is_followed_from_allocation_to_release() -> None:
    with StorageTrace({}) as trace:
        weights = torch.zeros(1000)
        assert live(trace) == 4000
        view = weights[:10].view(2, 5)
        assert live(trace) == 4000, "a view has no bytes of its own"
        weights.untyped_storage().resize_(400)
        assert live(trace) == 400, "FSDP2 frees its gathered weights so"
        del weights, view
        assert live(trace) == 0
    outside = torch.zeros(10)
    assert live(trace) == 0, "nothing is followed once the trace is left"
    assert outside.sum() == 0


def test_categories_add_up_and_the_peak_is_found() -> None:
    with StorageTrace({}) as trace:
        probe = MemoryProbe(trace)
        weights = torch.zeros(100, requires_grad=True)
        probe.claim({"weights": [weights]})
        trace.step, trace.phase = 0, "forward"
        probe.before_forward({"weights": [weights]})
        kept = (weights * 2).exp()
        probe.after_forward({"weights": [weights]})
        trace.phase = "backward"
        kept.sum().backward()
        gradients = {"weights": [weights], "gradients": [weights.grad]}
        probe.claim(gradients)  # type: ignore[arg-type]
        del kept
        gc.collect()
        probe.after_step(gradients)  # type: ignore[arg-type]
        memory, timeline = probe.measure(0, torch.device("cpu"))
    assert memory.weights_bytes == 400
    assert memory.gradients_bytes == 400
    assert memory.activations_bytes == 400, "exp keeps its result; the product is not needed"
    assert memory.peak_moment == "backward"
    assert memory.at_peak_bytes
    assert sum(memory.at_peak_bytes.values()) == memory.peak_bytes
    assert max(sum(sample.bytes_by_category.values()) for sample in timeline) == memory.peak_bytes


def test_what_looked_like_an_activation_may_turn_out_to_be_a_gradient() -> None:
    """DDP makes its buckets in a forward pass; gradients that are views of them are counted once, as gradients."""
    with StorageTrace({}) as trace:
        probe = MemoryProbe(trace)
        weights = torch.zeros(100, requires_grad=True)
        trace.step, trace.phase = 0, "forward"
        probe.before_forward({"weights": [weights]})
        bucket = torch.zeros(100)
        probe.after_forward({"weights": [weights]})
        trace.phase = "backward"
        weights.grad = bucket.view(100)
        states = {"weights": [weights], "gradients": [weights.grad]}
        probe.claim(states)  # type: ignore[arg-type]
        probe.after_step(states)  # type: ignore[arg-type]
        memory, _ = probe.measure(0, torch.device("cpu"))
    assert (memory.gradients_bytes, memory.activations_bytes, memory.workspace_bytes) == (400, 0, 0)


def test_the_clock_notes_communication_beside_the_phases() -> None:
    clock = PhaseClock(0, torch.device("cpu"))
    for step, (exposed_s, hidden_s) in enumerate([(9.0, 9.0), (1.0, 5.0), (2.0, 3.0), (3.0, 4.0)]):
        clock.start_step(step)
        with clock.phase("backward"):
            end_s = time.perf_counter()
        clock.communicated(Overlap.after_backward(((end_s - hidden_s, end_s + exposed_s),), end_s))
        clock.end_step()
    phases = clock.phases(first_step=1)
    # Medians over the steps from the second on; the tolerance is the rounding of large clock readings.
    assert phases.communication_exposed_s == pytest.approx(2.0, abs=1e-6)
    assert phases.communication_hidden_s == pytest.approx(4.0, abs=1e-6)
    last = [span for span in clock.spans() if span.step == 3]
    assert [span.phase for span in last] == ["backward", "communication", "wait"]
    assert last[2].end_s == last[1].end_s and last[2].end_s - last[2].start_s == pytest.approx(3.0, abs=1e-6)
    assert PhaseClock(0, torch.device("cpu")).phases(first_step=0).communication_hidden_s is None


def test_flops_of_a_grouped_convolution_and_of_attention() -> None:
    """2 × outputs × weights per output, backward twice as much; torch's own formula forgets the groups."""
    images_BCHW = torch.zeros(2, 8, 6, 6, requires_grad=True)
    depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    query_BNTH = torch.zeros(1, 2, 5, 4, requires_grad=True)
    with StorageTrace({}) as trace:
        trace.step = 0
        depthwise(images_BCHW).sum().backward()
        trace.step = 1
        torch.nn.functional.scaled_dot_product_attention(query_BNTH, query_BNTH, query_BNTH).sum().backward()
    forward = 2 * (2 * 8 * 6 * 6) * 9
    assert trace.trace.flops_of_step[0] == 3 * forward
    product = 2 * (1 * 2) * 5 * 5 * 4
    # Forward: scores and values. Backward: gradients of scores' two factors, of probabilities and of values, and the
    # fused kernel computes the scores again.
    assert trace.trace.flops_of_step[1] in (2 * product + 4 * product, 2 * product + 5 * product)


def test_storage_trace_parts_what_checkpointing_computes_again_from_the_models_flops() -> None:
    """By hand: 6 × 4 numbers through 4 × 4 weights are 2·6·4·4 FLOP a layer, and twice as many backward.

    torch's newer checkpointing stops early: the last layer's product is not needed for its own gradients.
    """
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    x_BC = torch.zeros(6, 4, requires_grad=True)
    product = 2 * 6 * 4 * 4
    for reentrant, recomputed in ((False, product), (True, 2 * product)):
        with StorageTrace({}) as trace:
            trace.step = 0
            checkpoint(layers, x_BC, use_reentrant=reentrant).sum().backward()
            trace.step = 1
            layers(x_BC).sum().backward()
        assert trace.trace.flops_of_step == {0: 6 * product + recomputed, 1: 6 * product}
        assert trace.trace.recomputed_of_type == {(0, torch.float32): recomputed}


def test_calls_are_added_up_by_collective_and_group() -> None:
    calls = [
        CollectiveCall(0, "all_reduce", "dp", 2, 100),
        CollectiveCall(1, "all_reduce", "dp", 2, 10),
        CollectiveCall(1, "all_reduce", "dp", 2, 20),
        CollectiveCall(1, "all_reduce", "control", 2, 8),
    ]
    found = {(t.collective, t.group): (t.count, t.message_bytes) for t in traffic_of(calls, 1)}
    assert found == {("all_reduce", "dp"): (2, 30), ("all_reduce", "control"): (1, 8)}


def test_the_clock_gives_the_engine_its_methods_back() -> None:
    config = RunConfig.of(image_size=32, micro_batch=2)
    engine = base.build(config, build_model(config), torch.device("cpu"))
    own = [engine.forward, engine.backward, engine.update]
    clock = PhaseClock(0, torch.device("cpu"))
    clock.attach(engine)
    clock.start_step(0)
    loss = engine.forward(torch.zeros(2, 3, 32, 32), torch.tensor([1, 2]), is_last=True)
    engine.backward(loss, is_last=True)
    engine.update()
    step_s = clock.end_step()
    clock.detach(engine)
    assert [engine.forward, engine.backward, engine.update] == own
    phases = clock.phases(first_step=0)
    assert phases.step_s == step_s
    assert phases.forward_s and phases.backward_s and phases.optimizer_s
    assert phases.forward_s + phases.backward_s + phases.optimizer_s <= step_s
    assert [span.phase for span in clock.spans()] == ["forward", "backward", "optimizer"]
    assert clock.phases(first_step=1).step_s is None


def test_seconds_at_peak_add_up_over_the_types() -> None:
    gpu = device_of_driver("NVIDIA H100 80GB HBM3")
    assert gpu is not None
    flops = {torch.bfloat16: int(gpu.peak_flops["bf16"]), torch.float32: int(gpu.peak_flops["fp32"]) // 2}
    assert seconds_at_peak(flops, gpu) == pytest.approx(1.5)
    assert seconds_at_peak({torch.float64: 1}, gpu) is None, "no rate is known"
    assert seconds_at_peak(flops, None) is None
    assert seconds_at_peak({}, gpu) is None
