"""Ring attention and context parallelism by hand, on forked ranks: one process's result, and the bytes predicted."""

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.by_hand.context_parallel import (
    RingShare,
    own_tokens,
    pairs_computed,
    positions_of,
    ring_bytes,
    share_sequences,
)
from dlojz.by_hand.ddp import DataParallel
from dlojz.by_hand.ring_attention import ORDERS, Order, PretendedRing, Ring, ring_attention
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.qwen_deepseek import DeepSeek
from dlojz.models.sizes import DeepSeekSize
from dlojz.processes.forks import RankAnswer, spmd
from dlojz.train.dispatch_trace import StorageTrace

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 2, 6, 2, 24, 8
STEPS = 5


def values(answers: list[RankAnswer]) -> list[Any]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.value for answer in answers]


def inputs(kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, whole. Large scores: no softmax is nearly uniform."""
    make = torch.Generator().manual_seed(5)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [2 * torch.randn(BATCH, n, LENGTH, HEAD_DIM, generator=make, dtype=torch.float64).to(dtype) for n in heads]


def attention_of_one(kv_heads: int, causal: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    q, k, v, grad = inputs(kv_heads, dtype)
    for one in (q, k, v):
        one.requires_grad_()
    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    output.backward(grad)
    return {"output": output.detach(), **{n: t.grad for n, t in (("q", q), ("k", k), ("v", v)) if t.grad is not None}}


def attention_on(rank: int, size: int, kv_heads: int, causal: bool, order: Order, dtype: torch.dtype) -> Any:
    q, k, v, grad = (own_tokens(x.transpose(1, 2), rank, size, order).transpose(1, 2) for x in inputs(kv_heads, dtype))
    for one in (q, k, v):
        one.requires_grad_()
    with StorageTrace({}) as trace:
        output = ring_attention(q, k, v, causal=causal, order=order)
        sent = [call.message_bytes for call in trace.trace.calls if call.collective == "send"]
        output.backward(grad)
        received = [call.message_bytes for call in trace.trace.calls if call.collective == "recv"]
        sent_in_all = [call.message_bytes for call in trace.trace.calls if call.collective == "send"]
    volumes = [sum(sent), sum(sent_in_all) - sum(sent), sum(received)]
    return volumes, {"output": output.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def gathered(answers: list[RankAnswer], name: str, order: Order) -> Tensor:
    size = len(answers)
    whole = torch.cat([answer.tensors[name] for answer in answers], dim=2)
    positions = torch.cat([positions_of(LENGTH // size, rank, size, order) for rank in range(size)])
    return whole[:, :, positions.argsort()]


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 4))])
def test_output_and_gradients_are_those_of_one_process_and_the_bytes_those_predicted(size: int) -> None:
    """Full and grouped heads, masked or not, both orders: in float64, so that what differs is wrong and not rounded."""
    cases = [
        (kv_heads, causal, order)
        for kv_heads, causal in ((KV_HEADS, True), (KV_HEADS, False), (HEADS, True))
        for order in ORDERS
    ]

    def ranks(rank: int, size: int) -> Any:
        volumes: list[list[int]] = []
        tensors: dict[str, Tensor] = {}
        for number, (kv_heads, causal, order) in enumerate(cases):
            sent, found = attention_on(rank, size, kv_heads, causal, order, torch.float64)
            volumes.append(sent)
            tensors |= {f"{number}.{name}": tensor for name, tensor in found.items()}
        return volumes, tensors

    answers = spmd(ranks, size)
    for volumes in values(answers):
        for (kv_heads, _, _), (forward, backward, received) in zip(cases, volumes, strict=True):
            predicted = ring_bytes(size, BATCH, kv_heads, LENGTH // size, HEAD_DIM, torch.float64)
            assert (forward, backward) == predicted
            assert received == forward + backward
    for number, (kv_heads, causal, order) in enumerate(cases):
        for name, expected in attention_of_one(kv_heads, causal).items():
            torch.testing.assert_close(gathered(answers, f"{number}.{name}", order), expected, msg=f"{number} {name}")


def test_in_bf16_messages_are_half_as_long_and_sums_stay_wide() -> None:
    """What is rounded is what is stored: within two roundings to 8 bits of the exact result for the same inputs."""

    def ranks(rank: int, size: int) -> Any:
        return attention_on(rank, size, KV_HEADS, True, "zigzag", torch.bfloat16)

    answers = spmd(ranks, 2)
    predicted = ring_bytes(2, BATCH, KV_HEADS, LENGTH // 2, HEAD_DIM, torch.bfloat16)
    assert predicted.backward == 3 * predicted.forward
    for forward, backward, _ in values(answers):
        assert (forward, backward) == predicted
    q, k, v, _ = (x.double() for x in inputs(KV_HEADS, torch.bfloat16))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    output = gathered(answers, "output", "zigzag")
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=2**-8, atol=1e-6)


def test_alone_it_is_attention_without_any_group() -> None:
    q, k, v, _ = inputs(KV_HEADS)
    for order in ORDERS:
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(ring_attention(q, k, v, order=order), expected)


@pytest.mark.parametrize("size", range(1, 9))
def test_pairs_computed_in_zigzag_are_as_many_on_every_rank(size: int) -> None:
    assert pairs_computed(size) == list(range(1, size + 1))
    assert pairs_computed(size, "zigzag") == [2 * size + 1] * size
    assert pairs_computed(size, causal=False) == [size] * size
    for order in ORDERS:
        positions = torch.cat([positions_of(6, rank, size, order) for rank in range(size)])
        assert sorted(positions.tolist()) == list(range(6 * size))


def llama(checkpointing: Checkpointing = "none") -> nn.Module:
    torch.manual_seed(1)
    return models.build("llama_tiny", sequence_length=32, checkpointing=checkpointing)


def deepseek(checkpointing: Checkpointing = "none") -> nn.Module:
    """Without experts: latent attention, whose values are padded to the width of the keys."""
    torch.manual_seed(1)
    size = DeepSeekSize(width=64, depth=4, num_heads=2, mlp_width=96, latent=16, head_dim=24, rotated_dim=8)
    return DeepSeek(size, sequence_length=32, vocabulary_size=256, checkpointing=checkpointing)


BUILD = {"llama": llama, "deepseek": deepseek}
KEYS = {"llama": (2, 32), "deepseek": (2, 32)}
"""Key-value heads, and the width of each."""


def sequences(step: int) -> tuple[Tensor, Tensor]:
    whole = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(step))
    return whole[:, :-1], whole[:, 1:]


@lru_cache
def trained_by_one(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = BUILD[name](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        tokens, targets = sequences(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "size", "order", "checkpointing"),
    [
        ("llama", 2, "contiguous", "full"),
        ("llama", 2, "zigzag", "selective"),
        ("llama", 4, "contiguous", "none"),
        ("deepseek", 2, "zigzag", "none"),
    ],
)
def test_share_sequences_trains_a_decoder_as_one_process(
    name: str, size: int, order: Order, checkpointing: Checkpointing
) -> None:
    """Five steps; rank 0's weights win at the start, sequences are shared twice, the bytes are those predicted."""

    def ranks(rank: int, size: int) -> Any:
        model = BUILD[name](checkpointing)
        if rank:
            for parameter in model.parameters():
                parameter.detach().mul_(rank + 2)
        share_sequences(model, RingShare(PretendedRing(0, size), "zigzag" if order == "contiguous" else "contiguous"))
        parallel, losses = DataParallel(share_sequences(model, RingShare(Ring(), order))), []
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        trace = StorageTrace({})
        for step in range(STEPS):
            with trace if step == 1 else nullcontext():
                tokens, targets = (own_tokens(whole, rank, size, order) for whole in sequences(step))
                loss = F.cross_entropy(parallel(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                parallel.synchronize()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / size)
        sums = dict.fromkeys(("send", "recv", "all_reduce"), 0)
        for call in trace.trace.calls:
            sums[call.collective] += call.message_bytes
        return [losses, sums], dict(model.named_parameters())

    answers = spmd(ranks, size)
    losses, weights = trained_by_one(name)
    heads, width = KEYS[name]
    ring = ring_bytes(size, 2, heads, 32 // size, width, torch.float32)
    block_bytes = ring.forward * (1 if checkpointing == "none" else 2) + ring.backward
    parameters = sum(weight.numel() for weight in weights.values())
    for found, sums in values(answers):
        assert found == pytest.approx(losses, rel=1e-5)
        assert sums["send"] == sums["recv"] == 4 * block_bytes
        assert sums["all_reduce"] == 4 * parameters  # bytes of an fp32 gradient
    for answer in answers:
        assert answer.tensors.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(answer.tensors[key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pretended_ring_moves_shapes_alone(order: Order) -> None:
    """Nothing is sent, and the rank whose keys are its own sees nobody else's shapes but its own."""
    q, k, v, _ = (own_tokens(x.transpose(1, 2), 1, 3, order).transpose(1, 2) for x in inputs(KV_HEADS))
    with StorageTrace({}) as trace:
        output = ring_attention(q.requires_grad_(), k, v, PretendedRing(1, 3), order=order)
        output.sum().backward()
    assert output.shape == q.shape and q.grad is not None and not trace.trace.calls


def test_a_group_shares_among_its_own_ranks() -> None:
    """Two rings of two: each finds the attention of its own sequence, the second one's being twice the first one's."""

    def ranks(rank: int, size: int) -> Any:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        q, k, v, _ = (own_tokens(x.transpose(1, 2), rank % 2, 2).transpose(1, 2) for x in inputs(KV_HEADS))
        return None, {"output": ring_attention(q, k, v * (1 + rank // 2), Ring(groups[rank // 2]))}

    answers = spmd(ranks, 4)
    values(answers)
    expected = attention_of_one(KV_HEADS, causal=True)["output"]
    torch.testing.assert_close(gathered(answers[:2], "output", "contiguous"), expected)
    torch.testing.assert_close(gathered(answers[2:], "output", "contiguous"), 2 * expected)


def test_own_tokens_and_ring_attention_refuse_what_does_not_fit() -> None:
    tokens = torch.zeros(1, 30, dtype=torch.long)
    with pytest.raises(LabError, match="30 tokens cannot be cut into 4 equal chunks .*use a length that 4 divides"):
        own_tokens(tokens, 0, 4)
    with pytest.raises(LabError, match="30 tokens cannot be cut into 8 equal chunks .*e.g. 32"):
        own_tokens(tokens, 0, 4, "zigzag")
    with pytest.raises(LabError, match="unknown order 'striped'"):
        own_tokens(tokens, 0, 2, "striped")  # type: ignore[arg-type]
    q, k, v, _ = inputs(KV_HEADS)
    with pytest.raises(LabError, match="do not fit"):
        ring_attention(q, k[:, :, 1:], v[:, :, 1:])
    with pytest.raises(LabError, match="do not fit"):
        ring_attention(q, q[:, :4], q[:, :4])
    with pytest.raises(LabError, match="23 tokens per rank cannot be cut into 2 equal chunks"):
        ring_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], order="zigzag")
    with pytest.raises(LabError, match="Linear has no attention over a sequence"):
        share_sequences(nn.Linear(2, 2), RingShare(Ring()))
    with pytest.raises(LabError, match="unknown order 'striped'"):
        RingShare(Ring(), "striped")  # type: ignore[arg-type]
