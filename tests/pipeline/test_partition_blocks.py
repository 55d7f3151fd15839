"""What blocks weigh: counts that add up to the model's, times of blocks that ran."""

import math

import pytest
import torch

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.pipeline.partition import MEASURES, _durations, block_times, block_weights


@pytest.mark.parametrize("model", ["coatnet_tiny", "coatnet_7", "gpt_tiny", "alexnet"])
def test_counts_add_up_to_the_model(model: str) -> None:
    config = RunConfig.of(model=model)
    whole = models.describe(
        model, config.image_size, sequence_length=config.sequence_length, num_classes=config.num_classes
    )
    parameters, flops, ones = (block_weights(config, by) for by in ("parameters", "flops", "uniform"))  # type: ignore[arg-type]
    assert sum(parameters.weights) == whole.parameters
    assert sum(flops.weights) == whole.flops
    assert ones.weights == (1,) * whole.blocks and len(ones.kinds) == whole.blocks
    assert parameters.kinds == flops.kinds == ones.kinds


def test_block_weights_in_flops_follow_the_image_size_but_for_the_last_block() -> None:
    small, large = (block_weights(RunConfig.of(model="alexnet", image_size=size), "flops") for size in (96, 192))
    assert large.weights[0] > 3.5 * small.weights[0] and small.weights[-1] == large.weights[-1]


def test_regex_counts_the_blocks_that_match() -> None:
    weighed = block_weights(RunConfig.of(model="coatnet_tiny"), "regex", "attention")
    assert [kind == "AttentionBlock" for kind in weighed.kinds] == [weight == 1 for weight in weighed.weights]
    assert weighed.text(1) == "1 block" and weighed.text(3) == "3 blocks"


@pytest.mark.parametrize("model", ["alexnet_tiny", "gpt_tiny"])
def test_every_block_is_really_timed(model: str) -> None:
    told = []
    config = RunConfig.of(model=model, micro_batch=2, image_size=64 if model.startswith("alex") else None, device="cpu")
    times = block_times(config, repetitions=2, tell=lambda done, of: told.append((done, of)))
    blocks = len(block_weights(config).kinds)
    assert told == [(number + 1, blocks) for number in range(blocks)]
    assert len(times.forward_s) == len(times.backward_s) == blocks
    assert all(second > 0 and math.isfinite(second) for second in (*times.forward_s, *times.backward_s))
    assert times.step_s == tuple(f + b for f, b in zip(times.forward_s, times.backward_s, strict=True))


def test_blocks_alike_are_timed_once() -> None:
    once = block_times(RunConfig.of(model="gpt_tiny", micro_batch=1, device="cpu"), repetitions=1)
    assert len(set(once.forward_s[1:5])) == 1


@pytest.mark.parametrize(
    "by, pattern, words",
    [
        ("weight", None, ["'weight'", *MEASURES]),
        ("regex", None, ["pattern"]),
        ("flops", "Conv", ["pattern"]),
        ("regex", "Nothing", ["'Nothing'", "no block", "Stem"]),
    ],
)
def test_block_weights_and_block_times_refuse_bad_arguments(by: str, pattern: str | None, words: list[str]) -> None:
    with pytest.raises(LabError) as refused:
        block_weights(RunConfig.of(model="coatnet_tiny"), by, pattern)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refused.value)
    with pytest.raises(LabError, match="at least once"):
        block_times(RunConfig.of(model="coatnet_tiny"), repetitions=0)


def test_durations_of_each_backward_are_timed_without_gradients_to_add_to() -> None:
    """What PyTorch adds to is an addition more, and no part of the block."""
    block, given = torch.nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    before: list[bool] = []
    block.register_forward_pre_hook(lambda *_: before.append(block.weight.grad is given.grad is None))
    assert len(list(_durations(block, given, 2))) == 2
    assert before == [True] * 3 and block.weight.grad is not None


def test_durations_wait_for_a_gpu_before_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are queued and run later; here is no GPU, and the calls that wait for one are counted."""
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))

    class OnGpu(torch.Tensor):
        is_cuda = True

    given = torch.ones(4, 3).as_subclass(OnGpu).requires_grad_()
    assert len(list(_durations(torch.nn.Linear(3, 2), given, 2))) == 2
    assert len(waited) == 3 + 4 + 4
