"""A model is its flat list of blocks; checkpointing changes memory, nothing else."""

import copy

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.models.blocks import BlockList, merge_heads, split_heads
from dlojz.models.checkpointing import Checkpointing
from dlojz.train.dispatch_trace import StorageTrace

TINY = ["coatnet_tiny", "vit_tiny", "alexnet_tiny", "gpt_tiny", "llama_tiny"]


def sample(name: str, batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    entry = models.spec(name)
    if entry.family == "text":
        return torch.randint(entry.num_classes, (batch, entry.sequence_length or 1))
    return torch.randn(batch, 3, entry.image_size or 1, entry.image_size or 1)


def built(name: str, *, checkpointing: Checkpointing | bool = "none") -> BlockList:
    torch.manual_seed(0)
    return models.build(name, checkpointing=checkpointing)


@pytest.mark.parametrize("name", TINY)
def test_blocks_one_by_one_are_the_whole_forward(name: str) -> None:
    model, x = built(name).eval(), sample(name)
    whole = model(x)
    for block in model.blocks:
        x = block(x)
        assert x.is_contiguous(), f"{type(block).__name__} gives a strided view, which no send accepts"
    assert torch.equal(x, whole)


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_and_buffer_belongs_to_a_block(name: str) -> None:
    state = built(name).state_dict()
    assert all(key.startswith("blocks.") for key in state)
    buffers = dict(built(name).named_buffers())
    assert all(key.rsplit(".", 1)[1] in {"running_mean", "running_var", "num_batches_tracked"} for key in buffers)


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("level", ["selective", "every_second", "full"])
@pytest.mark.parametrize("name", TINY)
def test_checkpointing_changes_neither_outputs_nor_gradients_nor_statistics(
    name: str, level: Checkpointing, amp: bool
) -> None:
    """To the bit: what is computed again is computed alike, and what is kept is the very result."""
    plain, checkpointed, x = built(name), built(name, checkpointing=level), sample(name)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            outputs = [model(x) for model in (plain, checkpointed)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.float().square().mean().backward()
    for (key, expected), actual in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert expected.grad is not None, key
        assert torch.equal(expected.grad, actual.grad), key
    for (key, expected), actual in zip(plain.named_buffers(), checkpointed.buffers(), strict=True):
        assert torch.equal(expected, actual), key


def test_checkpointing_keeps_fewer_bytes_for_the_backward_pass() -> None:
    def saved_bytes(model: BlockList) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            keep = model(sample("coatnet_tiny", batch=4))
        del keep
        return sum(storages.values())

    plain = saved_bytes(built("coatnet_tiny"))
    assert saved_bytes(built("coatnet_tiny", checkpointing=True)) < plain / 4


def kept_bytes(model: BlockList, x: Tensor) -> int:
    """Bytes that a forward pass leaves alive for backward, whoever holds them: autograd or the selective cache."""
    trace = StorageTrace({})
    with trace:
        output = model(x)
        kept = sum(trace.live_bytes.values())
    del output
    return kept


@pytest.mark.parametrize("name", TINY)
def test_selective_checkpointing_lies_between_none_and_full(name: str) -> None:
    """It keeps less than none and more than full, and computes no product twice, or every second one."""
    x = sample(name, batch=4)
    levels: tuple[Checkpointing, ...] = ("full", "selective", "none", "every_second")
    full, selective, none, second = (kept_bytes(built(name, checkpointing=level), x) for level in levels)
    assert full < second <= selective < none
    assert second < selective or name.startswith("alexnet")  # a block of it is one product
    flops = []
    for level in levels:
        model = built(name, checkpointing=level)
        with FlopCounterMode(display=False) as counter:
            model(x).square().mean().backward()
        flops.append(counter.get_total_flops())
    assert flops[1] == flops[2] < flops[0] and flops[1] <= flops[3] < flops[0]


def test_selective_checkpointing_of_blocks_runs_without_memory() -> None:
    """On fake tensors, as the prediction runs it."""
    with torch.device("meta"):
        model = models.build("coatnet_tiny", checkpointing="selective")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.empty(2, 3, 64, 64))
        logits.float().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_checkpointing_refuses_another_level_and_understands_old_answers() -> None:
    legal = "none, selective, every_second, full"
    with pytest.raises(LabError, match=f"unknown checkpointing 'sometimes': legal values: {legal}"):
        models.build("vit_tiny", checkpointing="sometimes")  # type: ignore[arg-type]
    assert [models.build("vit_tiny", checkpointing=old).checkpointing for old in (False, True)] == ["none", "full"]


def test_checkpointing_is_off_where_there_is_nothing_to_save() -> None:
    model, x = built("coatnet_tiny", checkpointing=True), sample("coatnet_tiny")
    with torch.no_grad():
        assert model(x).grad_fn is None
    assert torch.equal(model.eval()(x), model(x))


def test_batch_norm_keeps_its_settings_after_a_checkpointed_step() -> None:
    model = built("coatnet_tiny", checkpointing=True)
    before = [copy.copy(norm.momentum) for norm in model.modules() if isinstance(norm, torch.nn.BatchNorm2d)]
    model(sample("coatnet_tiny")).sum().backward()
    norms = [norm for norm in model.modules() if isinstance(norm, torch.nn.BatchNorm2d)]
    assert [norm.momentum for norm in norms] == before
    assert all(int(norm.num_batches_tracked) == 1 for norm in norms)


@pytest.mark.parametrize("name", TINY)
def test_half_precision_runs_cast_and_under_autocast(name: str) -> None:
    x, model = sample(name), built(name, checkpointing=True)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x)
    mixed.float().square().mean().backward()
    torch.testing.assert_close(mixed.float(), expected, rtol=0, atol=0.1 * expected.detach().abs().max().item())
    model = model.bfloat16()
    output = model(x.bfloat16() if x.is_floating_point() else x)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_same_seed_gives_the_same_weights() -> None:
    first, second = built("coatnet_tiny").state_dict(), built("coatnet_tiny").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_split_heads_keeps_each_head_in_one_slice_of_rows() -> None:
    qkv_BTE = torch.arange(24.0).reshape(1, 1, 24)  # 2 heads of width 4
    q_BNTH, k_BNTH, v_BNTH = split_heads(qkv_BTE, head_dim=4)
    assert q_BNTH.flatten().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert k_BNTH[0, 1, 0].tolist() == [16, 17, 18, 19]
    assert merge_heads(v_BNTH).flatten().tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
