"""What tensor parallelism sends: closed forms against calls counted on one process, whose axis only pretends.

Against real ranks they are tested in tests/train/test_tensor.py.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from dlojz import predict
from dlojz.base.errors import LabError
from dlojz.by_hand.tensor.axis import TensorAxis
from dlojz.by_hand.tensor.split import parallel_loss, split_model
from dlojz.config.run_config import RunConfig
from dlojz.prediction.communication import block_messages, tensor_traffic
from dlojz.prediction.shapes import RankPart
from dlojz.train.loop import build_model, open_batches

COATNET = {"model": "coatnet_tiny", "image_size": 32}
VIT = {"model": "vit_tiny", "image_size": 32}
GPT = {"model": "gpt_tiny", "sequence_length": 16}
LLAMA = {"model": "llama_tiny", "sequence_length": 16}
CASES: list[dict[str, Any]] = [
    *({**model, "tp": 2, **how} for model in (COATNET, VIT, GPT, LLAMA) for how in ({}, {"precision": "bf16"})),
    *({**model, "tp": 2, "checkpointing": "full"} for model in (COATNET, VIT, LLAMA)),
    *({**model, "tp": 2, "checkpointing": "selective"} for model in (COATNET, GPT)),
    {**GPT, "tp": 4, "sequence_parallel": True},
    {**LLAMA, "tp": 2, "sequence_parallel": True},
    {**GPT, "tp": 2, "sequence_parallel": True, "checkpointing": "full", "precision": "bf16"},
    {**LLAMA, "tp": 2, "sequence_parallel": True, "checkpointing": "selective"},
    *({**LLAMA, "tp": 2, "tensor_parts": parts, "checkpointing": "full"} for parts in ("attention", "mlp", "head")),
    {**COATNET, "tp": 2, "tensor_parts": "convolution|mlp"},
]


class CountingAxis(TensorAxis):
    """Pretends to communicate, and counts what it would have sent: calls and bytes by collective."""

    def __init__(self, **place: Any) -> None:
        super().__init__(**place)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def _count(self, collective: str, num_bytes: int) -> None:
        self.calls[collective] += 1
        self.bytes[collective] += num_bytes

    def all_reduce(self, x: Tensor, *, largest: bool = False) -> Tensor:
        self._count("all_reduce", x.nbytes)
        return super().all_reduce(x, largest=largest)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        gathered = super().all_gather(x, dim)
        self._count("all_gather", gathered.nbytes)
        return gathered

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._count("reduce_scatter", x.nbytes)
        return super().reduce_scatter(x, dim)


def config_of(fields: dict[str, Any]) -> RunConfig:
    return RunConfig.of(**{"engine": "by_hand", "micro_batch": 2, **fields})


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: " ".join(str(value) for value in fields.values()))
def test_every_call_of_a_pass_is_predicted(fields: dict[str, Any]) -> None:
    config = config_of(fields)
    layout = config.layout
    axis = CountingAxis(rank=0, size=layout.tp, sequence_parallel=layout.sequence_parallel)
    model = split_model(build_model(config), axis, layout.tensor_parts)  # type: ignore[arg-type]
    inputs, targets = next(open_batches(config, 0))
    with torch.autocast("cpu", torch.bfloat16) if config.precision == "bf16" else nullcontext():
        logits = model(inputs)
    parallel_loss(model)(logits, targets).backward()  # type: ignore[no-untyped-call]
    predicted = tensor_traffic(RankPart(config))
    assert {one.collective: one.count for one in predicted} == dict(axis.calls)
    assert {one.collective: one.message_bytes for one in predicted} == dict(axis.bytes)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model["model"])
def test_a_transformer_block_sends_what_the_papers_say(model: dict[str, Any]) -> None:
    """Shoeybi et al. 2019, §3: two all-reduces of B·T·D in forward, two in backward.

    Korthikanti et al. 2022, §4.2.2: with sequence parallelism the same bytes over the wire, a ring all-reduce being a
    reduce-scatter and an all-gather; besides, the gradients of norms and biases, which are not in its count.
    """
    plain, split = (block_messages(config_of({**model, "tp": 2, "sequence_parallel": sp}))[1] for sp in (False, True))
    stream_bytes = 2 * 16 * 128 * 4
    assert [(one.phase, one.message_bytes) for one in plain] == [
        ("forward", stream_bytes),
        ("backward", stream_bytes),
    ] * 2
    pairs = [one for one in split if one.collective != "all_reduce"]
    assert sum(one.message_bytes for one in pairs) == 2 * sum(one.message_bytes for one in plain)
    assert Counter(one.phase for one in pairs) == {"forward": 4, "backward": 4}


def test_predict_sends_once_per_micro_batch_and_over_all_stages_the_same() -> None:
    """Everything is sent once per micro-batch; the stages of a pipeline together send what one replica does."""
    one, four = (predict(config_of({**LLAMA, "tp": 2, "micro_batches": count})) for count in (1, 4))
    [single], [fourfold] = ([each for each in told.communication if each.group == "tp"] for told in (one, four))
    assert (fourfold.count, fourfold.message_bytes) == (4 * (single.count or 0), 4 * (single.message_bytes or 0))
    piped = config_of({**LLAMA, "tp": 2, "pp": 2, "micro_batches": 4})
    of_stages = [each for rank in (0, 2) for each in predict(piped, rank).communication if each.group == "tp"]
    assert sum(each.message_bytes or 0 for each in of_stages) == fourfold.message_bytes


def test_predict_refuses_what_is_not_known() -> None:
    with pytest.raises(LabError, match="is not predicted: use engine='by_hand'"):
        predict(config_of({**GPT, "tp": 2, "engine": "deepspeed"}))
