"""torch's tensor parallelism behind the engines: what it sends, what a rank holds, what is refused."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.tensor import DTensor

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.by_hand.tensor.axis import TensorAxis
from dlojz.by_hand.tensor.split import parts_of, split_model
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList
from dlojz.pipeline.runtime import stage_modules
from dlojz.prediction.shapes import bounds_of
from dlojz.processes.forks import spmd
from dlojz.runnable import check_runnable
from dlojz.train.dispatch_trace import StorageTrace, traffic_of
from dlojz.train.engines.base import build, by_mesh, local
from dlojz.train.engines.pipeline_engines import TorchPipelineEngine
from dlojz.train.engines.tensor_engines import NOT_TORCHS, torch_parts

LLAMA = {"model": "llama_tiny", "image_size": None, "sequence_length": 16}
COATNET = {"model": "coatnet_tiny", "image_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "coatnet": COATNET,
    "gpt": {"model": "gpt_tiny", "image_size": None, "sequence_length": 16},
    "llama": LLAMA,
    "vit": {"model": "vit_tiny", "image_size": 32},
}
STREAM_BYTES = 2 * 16 * 128 * 4
"""The stream of a micro-batch of `llama_tiny`: (B, T, D) in fp32."""
WITHOUT_CONVOLUTIONS = "attention|mlp|embedding|head"
TOKEN_BYTES = 2 * 16 * 4


def config_for(**fields: Any) -> RunConfig:
    model = {} if "model" in fields else LLAMA
    return RunConfig.of(**{**model, "micro_batch": 2, "engine": "torch", "tp": 2, "steps": 1, **fields})


def model_of(config: RunConfig) -> BlockList:
    torch.manual_seed(0)
    built = models.build(
        config.model,
        image_size=config.image_size,
        sequence_length=config.sequence_length,
        num_classes=config.num_classes,
    )
    assert isinstance(built, BlockList)
    return built


def one_step(config: RunConfig, engine: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (2, 17), generator=generator)
    engine.backward(engine.forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), is_last=True), is_last=True)


def counted(config: RunConfig) -> dict[str, list[int]]:
    """Count and bytes per collective of one step on the tensor axis, as a rank has called them."""
    with StorageTrace({}) as trace:
        engine = build(config, model_of(config), torch.device("cpu"))
        trace.name_groups(engine.group_names)
        one_step(config, engine)
        trace.step = 0  # the step proper; what came before made nothing
        one_step(config, engine)
        engine.update()
    return {one.collective: [one.count or 0, one.message_bytes] for one in traffic_of(trace.trace.calls, 0)}


def on_two_ranks(function: Any) -> Any:
    answers = spmd(function, 2, wall_s=300, limit_s=120)
    errors = [answer.error for answer in answers if answer.error]
    assert not errors, errors
    return [answer.value for answer in answers]


def test_functional_collectives_are_counted_by_the_convention_of_the_others() -> None:
    def ranks(rank: int, size: int) -> Any:
        mine = torch.ones(4, 3)
        with StorageTrace({str(dist.group.WORLD.group_name): "tp"}) as trace:  # type: ignore[union-attr]
            trace.step = 0
            all_reduce(mine, "sum", dist.group.WORLD) + 0  # type: ignore[arg-type]
            all_gather_tensor(mine, 0, dist.group.WORLD) + 0  # type: ignore[arg-type]
            reduce_scatter_tensor(mine, "sum", 0, dist.group.WORLD) + 0  # type: ignore[arg-type]
        return [[one.collective, one.group, one.group_size, one.message_bytes] for one in trace.trace.calls]

    for calls in on_two_ranks(ranks):
        assert calls == [["all_reduce", "tp", 2, 48], ["all_gather", "tp", 2, 96], ["reduce_scatter", "tp", 2, 48]]


def test_traffic_of_each_region_is_once_forward_and_once_backward() -> None:
    """Query, key and value read one DTensor: one sum, not three; nor does the sequence change the number."""

    def ranks(rank: int, size: int) -> Any:
        return [counted(config_for()), counted(config_for(sequence_parallel=True))]

    regions = 1 + 2 * 4 + 1  # embedding (forward only), two in each of four blocks, head (backward only)
    both_ways = 2 * regions - 2
    for plain, sequence in on_two_ranks(ranks):
        of_loss = 3 * TOKEN_BYTES  # the largest logit, then two sums
        assert plain == {"all_reduce": [both_ways + 2, both_ways * STREAM_BYTES + of_loss]}
        norms = 9
        assert sequence == {
            "all_gather": [both_ways, both_ways * STREAM_BYTES],
            "reduce_scatter": [both_ways, both_ways * STREAM_BYTES],
            "all_reduce": [2 + norms, of_loss + norms * 128 * 4],
        }


def test_a_rank_holds_what_the_labs_split_gives_it_and_no_view_of_the_whole() -> None:
    def ranks(rank: int, size: int) -> Any:
        held = []
        for family in FAMILIES.values():
            module = build(config_for(**family), model_of(config_for(**family)), torch.device("cpu")).module
            own = {name: local(one) for name, one in module.named_parameters()}
            assert all(one.untyped_storage().nbytes() == one.nbytes for one in own.values())
            held.append({name: list(one.shape) for name, one in own.items()})
        return held

    for rank, held in enumerate(on_two_ranks(ranks)):
        for own, family in zip(held, FAMILIES.values(), strict=True):
            labs = split_model(model_of(config_for(**family)), TensorAxis(rank=rank, size=2), WITHOUT_CONVOLUTIONS)
            assert own == {name: list(one.shape) for name, one in labs.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_splits_every_part_but_convolutions(family: str) -> None:
    model = model_of(config_for(**FAMILIES[family]))
    left = set(parts_of(model)) - torch_parts(model)
    assert all(name.endswith(NOT_TORCHS) for name in left)
    assert bool(left) == (family == "coatnet")
    assert Counter(name.rpartition(".")[2] for name in torch_parts(model, "mlp")).keys() == {"mlp"}


def test_an_optimizer_gets_a_group_for_each_mesh() -> None:
    plain = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    assert by_mesh(plain) == plain, "as it always was"

    def ranks(rank: int, size: int) -> Any:
        engine = build(config_for(**COATNET), model_of(config_for(**COATNET)), torch.device("cpu"))
        kinds = [{isinstance(one, DTensor) for one in group["params"]} for group in engine.optimizer.param_groups]
        return [len(kinds), all(len(one) == 1 for one in kinds)]

    assert on_two_ranks(ranks) == [[2, True]] * 2


@pytest.mark.parametrize(("zero", "dtypes"), [(0, ["float32", "bfloat16"]), (2, ["bfloat16", "bfloat16"])])
def test_what_a_stage_receives_has_the_type_in_which_the_one_before_computes(zero: int, dtypes: list[str]) -> None:
    """Autocast leaves an embedding's output alone, FSDP2 casts its weights: a receiver of another type reads noise."""
    config = config_for(tp=1, dp=2, pp=2, zero=zero, micro_batches=2, precision="bf16", partition="at:1")
    engine = TorchPipelineEngine.__new__(TorchPipelineEngine)  # the rank's place and its groups play no part in this
    engine.config, engine.share = config, SimpleNamespace(pretending=nullcontext)  # type: ignore[assignment]
    stages = stage_modules(model_of(config), bounds_of(config))
    first, *others = engine._boundaries(stages)
    assert first.dtype == torch.int64
    assert [str(one.dtype).removeprefix("torch.") for one in others] == dtypes


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({**COATNET, "tensor_parts": "convolution"}, "convolutions are split by engine='by_hand' alone"),
        ({**COATNET, "tensor_parts": "mpl"}, "matches 'mpl'"),
        ({"tensor_parts": "mpl", "engine": "by_hand"}, "no part of Llama matches 'mpl'"),
        ({"engine": "deepspeed"}, "use engine='by_hand' or 'torch'"),
        ({"pp": 2, "zero": 2, "engine": "by_hand", "tp": 1}, "engine='torch' with zero=2"),
        ({"pp": 2, "zero": 3, "tp": 1}, "gather a stage's weights anew for every micro-batch"),
    ],
)
def test_check_runnable_refuses_in_one_sentence_what_torch_cannot_split(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError) as refused:
        check_runnable(config_for(**fields))
    said = str(refused.value)
    assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "fields", [{}, {"dp": 2, "zero": 3}, {"dp": 2, "pp": 2, "zero": 2}, {**COATNET, "tensor_parts": "attention|conv"}]
)
def test_check_runnable_passes_what_can_be_run(fields: dict[str, Any]) -> None:
    check_runnable(config_for(**{"micro_batches": 4, **fields}))
