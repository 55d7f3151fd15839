"""Messages of scripts by the rules of `dlojz run`: the same engine sends the same, whoever starts it.

Nothing is sent: a fake process group stands for the other ranks, and an object with the attributes of DeepSpeed's
engine for that engine, which is built on real ones only.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlojz import models
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.libraries.scripts.first_step import FirstStep
from dlojz.libraries.scripts.script_prediction import predict_training
from dlojz.prediction.communication import predict_communication
from dlojz.prediction.shapes import RankPart
from dlojz.results.footprint import Traffic

SCRIPT = Path(__file__).with_name("wrapped_script.py")
RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class DeepSpeedEngine(nn.Module):
    """What the recognition of a script reads of DeepSpeed's engine, under that class's name."""

    has_moe_layers, dp_world_size = False, RANKS

    def __init__(self, module: nn.Module, stage: int, sub_groups: int = 1, **options: Any) -> None:
        super().__init__()
        self.module, parameters = module, list(module.parameters())
        textbook = dict.fromkeys(("param_persistence_threshold", "max_reuse_distance", "prefetch_bucket_size"), 0)
        zero = {"stage": stage, "sub_group_size": 10**9, "reduce_bucket_size": 2_000_000, **textbook, **options}
        unset = {"overlap_comm": False, "offload_optimizer": None, "offload_param": None}
        self._config = SimpleNamespace(zero_config=SimpleNamespace(**zero, **unset))
        groups = {"round_robin_bit16_groups": [parameters], "fp16_groups": [parameters] * sub_groups}
        self.optimizer = SimpleNamespace(**groups, compute_grad_norm=True, check_grad_overflow=False)
        self.torch_autocast_enabled, self.gradient_clipping = lambda: False, lambda: 0.0
        self.get_data_types = lambda: (torch.float32, torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.module(inputs))


def lines(traffic: tuple[Traffic, ...]) -> list[tuple[str, int | None, int]]:
    """Calls and bytes of each collective along the data axis."""
    return [(line.collective, line.count, line.message_bytes) for line in traffic if line.group == "dp"]


def sent_by(model: nn.Module, inputs: Tensor, micro_batches: int = 1) -> list[tuple[str, int | None, int]]:
    """Predict what a script sends that trains this model with SGD."""
    step = FirstStep("cpu")
    step.watch()
    for _ in range(micro_batches):
        # DDP would wait for the answer of ranks that are not there.
        with model.no_sync() if isinstance(model, DistributedDataParallel) else ExitStack():
            loss = model(inputs).square().mean()
            step.before_backward(loss)
            loss.backward()
    step.before_update()
    step.end()
    config = RunConfig.of_script(SCRIPT).model_copy(update={"layout": Layout(dp=RANKS)})
    prediction = predict_training(config, step, [torch.optim.SGD(model.parameters(), 0.1)], None)
    assert prediction.footprint is not None, prediction.note
    return lines(prediction.footprint.communication)


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


TEXTBOOK: dict[str, tuple[Any, dict[str, Any]]] = {
    "DDP": (DistributedDataParallel, {}),
    "FSDP2": (sharded, {"zero": 3}),
    **{
        f"ZeRO-{stage}": (partial(DeepSpeedEngine, stage=stage), {"engine": "deepspeed", "zero": stage})
        for stage in range(4)
    },
}


@pytest.mark.parametrize("engine", TEXTBOOK)
def test_predict_training_and_predict_communication_send_the_same(engine: str) -> None:
    """gpt_tiny, two micro-batches: a script in the textbook form, and the run of the lab."""
    wrapped, fields = TEXTBOOK[engine]
    run = RunConfig.of(model="gpt_tiny", dp=RANKS, micro_batches=2, **fields)
    model = models.build("gpt_tiny", sequence_length=run.sequence_length, num_classes=run.num_classes)
    inputs = torch.randint(run.num_classes, (2, run.sequence_length or 0))
    expected = lines(predict_communication(RankPart(run)))
    assert expected and sent_by(wrapped(model), inputs, micro_batches=2) == expected


class WithSpare(nn.Module):
    """15 parameters, 6 that forward does not use, and 20 more: 41 in all."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.spare, self.end = nn.Linear(4, 3), nn.Linear(2, 2), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.end(self.begin(x)))


def test_zero_0_messages_have_zeros_for_what_forward_does_not_use() -> None:
    assert sent_by(DeepSpeedEngine(WithSpare(), 0), torch.randn(2, 4)) == [("all_reduce", 1, 4 * 41)]


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_or_2_messages_leave_out_what_forward_does_not_use(stage: int) -> None:
    """Three buckets of at most 17 gradients, then the norm; weights are padded to 44, and gathered at once.

    Stage 1, in the parameters' order: 12 + 3, 15 and 5; the unused 4 + 2 would have been a fourth. Stage 2, from the
    last layer on: 15, 5 + 12 and 3, or with the bias of a layer before its weight 5, 15 and 3 + 12.
    """
    engine = DeepSpeedEngine(WithSpare(), stage, reduce_bucket_size=17, allgather_bucket_size=10)
    assert sent_by(engine, torch.randn(2, 4)) == [("all_gather", 1, 4 * 44), ("all_reduce", 3 + 1, 4 * 35 + 4)]


def test_zero_3_messages_have_a_norm_for_each_sub_group_and_no_weights_of_unused_modules() -> None:
    """Two layers, twice each: 12 + 4 and 16 + 6 elements with the padding of two ranks; two norms in fp64."""
    sent = sent_by(DeepSpeedEngine(WithSpare(), 3, sub_groups=2), torch.randn(2, 4))
    assert sent == [("all_gather", 4, 2 * 4 * 38), ("all_reduce", 2, 2 * 8), ("reduce_scatter", 1, 4 * 38)]


def test_zero_3_messages_gather_an_output_projection_with_its_attention() -> None:
    """Five modules, twice each: attention (192 + 24 + 64 + 8), two layers (144 and 136), two norms of 16."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    numel = 288 + 144 + 136 + 2 * 16
    assert sent_by(DeepSpeedEngine(layer, 3), torch.randn(2, 5, 8)) == [
        ("all_gather", 10, 2 * 4 * numel),
        ("all_reduce", 1, 8),
        ("reduce_scatter", 1, 4 * numel),
    ]
