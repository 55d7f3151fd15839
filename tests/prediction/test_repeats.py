"""A model of alike blocks, four of which are traced: the trace is that of the whole model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList
from dlojz.prediction import model_trace
from dlojz.prediction.forecast import forecast
from dlojz.prediction.model_trace import RepeatedBlocks, stretches_of, trace_repeating
from dlojz.prediction.shapes import RankPart
from dlojz.prediction.trace import Allocation, MemoryTrace, TraceMark, trace

TEXT = {"model": "gpt2", "sequence_length": 16}
CONFIGS: dict[str, tuple[dict[str, Any], list[RepeatedBlocks]]] = {
    "fp32": (TEXT, [RepeatedBlocks(1, 12)]),
    "autocast, where casts are let go of at the end": ({**TEXT, "precision": "bf16"}, [RepeatedBlocks(1, 12)]),
    "computed again": ({**TEXT, "checkpointing": "full"}, [RepeatedBlocks(1, 12)]),
    "selectively": ({**TEXT, "checkpointing": "selective", "precision": "bf16"}, [RepeatedBlocks(1, 12)]),
    "kept on the host": ({**TEXT, "offload": "activations"}, [RepeatedBlocks(1, 12)]),
    "tensor parallel": ({**TEXT, "tp": 2, "sequence_parallel": True, "engine": "by_hand"}, [RepeatedBlocks(1, 12)]),
    "a pipeline": ({**TEXT, "pp": 4, "micro_batches": 4}, [RepeatedBlocks(1, 12)]),
    "two stretches": ({"model": "coatnet_1", "image_size": 32}, [RepeatedBlocks(4, 5), RepeatedBlocks(10, 13)]),
}


def events_of(found: MemoryTrace) -> list[Any]:
    """The events with storages numbered as they come; releases that follow one another in a fixed order."""
    told: list[Any] = []
    released: list[Any] = []
    number_of: dict[int, int] = {-1: -1}
    for event in found.events:
        number = number_of.setdefault(event.storage, len(number_of))
        held = (number, event.storage in found.kept, event.storage in found.on_host)
        if isinstance(event, Allocation) and event.delta_bytes < 0:
            released.append((*held, event.delta_bytes, event.phase))
            continue
        told += [*sorted(released), (held, _words(event))]
        released = []
    return told + sorted(released)


def _words(event: Any) -> tuple[Any, ...]:
    return tuple(getattr(event, name) for name in event.__slots__ if name != "storage")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """What a question gives with the blocks that repeat, and with all blocks traced."""

    def ask(question: Callable[[], Any]) -> tuple[Any, Any]:
        answers = []
        monkeypatch.setattr(model_trace, "kept", lambda _key, make: make())  # nothing is read from the store
        for how in (model_trace.trace_repeating, lambda model, trace: trace(model)):
            monkeypatch.setattr(model_trace, "trace_repeating", how)
            model_trace._kept.cache_clear()
            answers.append(question())
        model_trace._kept.cache_clear()
        return answers[0], answers[1]

    return ask


@pytest.mark.parametrize(
    ("name", "on_gpu"),
    [(name, name != "two stretches") for name in CONFIGS] + [("fp32", False), ("selectively", False)],
)
def test_the_expanded_trace_is_that_of_the_whole_model(
    name: str, on_gpu: bool, both: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, stretches = CONFIGS[name]
    config = RunConfig.of(data="synthetic", **fields)
    found: list[list[RepeatedBlocks]] = []

    def noted(model: BlockList) -> list[RepeatedBlocks]:
        found.append(stretches_of(model))
        return found[-1]

    monkeypatch.setattr(model_trace, "stretches_of", noted)
    monkeypatch.setattr(model_trace, "_UnlikeError", AssertionError)  # else the whole model would be traced, unseen
    expanded, whole = both(lambda: model_trace.trace_of(RankPart(config), on_gpu=on_gpu))
    assert found == [stretches]
    assert expanded.by_module == whole.by_module
    assert events_of(expanded) == events_of(whole)


@pytest.mark.parametrize("fields", [TEXT, {**TEXT, "precision": "bf16"}])
def test_trace_of_a_backward_in_two_halves_is_expanded_too(
    fields: dict[str, Any], both: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.of(data="synthetic", pp=2, schedule="zb-h1", micro_batches=2, **fields)
    monkeypatch.setattr(model_trace, "_UnlikeError", AssertionError)
    expanded, whole = both(lambda: model_trace.trace_of(RankPart(config), in_halves=True))
    assert events_of(expanded) == events_of(whole)
    assert expanded.gradient_of.keys() == whole.gradient_of.keys()


def test_the_forecast_is_the_same(both: Callable[..., Any]) -> None:
    config = RunConfig.of(data="synthetic", precision="bf16", pp=3, micro_batches=4, **TEXT)

    def told() -> Any:
        forecast.__globals__["_forecast"].cache_clear()
        return [forecast(config, rank, "h100") for rank in range(3)]

    for expanded, whole in zip(*both(told), strict=True):
        assert expanded.memory == whole.memory
        assert expanded.moment == whole.moment
        assert dict(expanded.at_peak_by_block) == dict(whole.at_peak_by_block)


class Wide(nn.Module):
    """A block that keeps what it is told in a table of its own."""

    def __init__(self, seen: list[Tensor] | None = None, slope: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen, self.slope = seen, slope

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x)) * self.slope
        if self.seen is not None:
            self.seen.append(x.detach().clone())
        return x


def test_blocks_that_look_alike_and_do_not_act_so_are_all_traced() -> None:
    """What a block leaves outside of itself lives on: it is released with no block."""
    seen: list[Tensor] = []

    def follow(model: nn.Module) -> MemoryTrace:
        seen.clear()
        found = trace(model, torch.empty(2, 8))
        seen.clear()
        return found

    model = BlockList([Wide(seen) for _ in range(7)])
    found = trace_repeating(model, follow)
    assert len(model.blocks) == 7
    assert {name.split(".")[1] for name in found.module_of.values() if name} == set("0123456")


def test_each_block_has_its_flops_and_the_first_no_gradient_of_its_inputs() -> None:
    """A product of 2 samples and 8 × 8 weights takes 2·2·64 operations: forward, its weights' gradient, its inputs'."""
    model = BlockList([Wide() for _ in range(7)])
    found = trace_repeating(model, lambda one: trace(one, torch.empty(2, 8)))
    assert found.flops_of == {"blocks.0": 2 * 256, **{f"blocks.{block}": 3 * 256 for block in range(1, 7)}, "": 0}
    again = BlockList([Wide() for _ in range(7)], checkpointing="full")
    assert trace_repeating(again, lambda one: trace(one, torch.empty(2, 8))).flops_of["blocks.0"] == 3 * 256


def test_other_settings_or_a_shared_parameter_make_other_blocks() -> None:
    assert stretches_of(BlockList([Wide() for _ in range(6)])) == [RepeatedBlocks(0, 6)]
    assert stretches_of(BlockList([Wide() for _ in range(4)])) == []
    assert stretches_of(BlockList([Wide(slope=float(number)) for number in range(6)])) == []
    tied = [Wide() for _ in range(6)]
    tied[3].linear.weight = tied[0].linear.weight
    assert stretches_of(BlockList(tied)) == []
    one = Wide()
    assert stretches_of(BlockList([one] * 6)) == []


@pytest.mark.parametrize("model", ["vit_tiny", "gpt_tiny", "coatnet_tiny"])
def test_trace_of_two_samples_or_more_has_gradients_ready_in_the_same_order(model: str) -> None:
    def order(samples: int) -> list[str]:
        events = model_trace.trace_of(RankPart(RunConfig.of(model=model, micro_batch=samples))).events
        return [event.name for event in events if isinstance(event, TraceMark) and event.what == "ready"]

    assert order(2) == order(5)
    assert len(set(order(2))) == len(order(2)) > 10
