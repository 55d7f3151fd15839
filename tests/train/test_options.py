"""Checkpointing and offloading under every engine: another place or another time, the same training."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dlojz import models
from dlojz.by_hand.activation_offload import MINIMUM_BYTES, ActivationOffload
from dlojz.config.run_config import RunConfig
from dlojz.prediction.shapes import model_shapes
from dlojz.prediction.states import offload_states, predict_states
from dlojz.train.loop import init_process_group, save_weights
from tests.train.matrix import do_in_forks, forget_deepspeed

SMALL = {"image_size": 32, "micro_batch": 4, "learning_rate": 0.01, "optimizer": "sgd", "dp": 2}
SELECTIVE, ACTIVATIONS = {"checkpointing": "selective"}, {"offload": "activations"}
PLAN = {"activation_plan": "recompute:3,keep:2,offload:4,keep:1"}
DEEPSPEED, BY_HAND = {"engine": "deepspeed"}, {"engine": "by_hand"}
MIXED = {"optimizer": "adamw", "precision": "bf16"}
# One case of each engine and stage that communicates or gathers in its own way.
CASES: dict[str, dict[str, Any]] = {
    "reference": {},
    "selective-ddp": {**SELECTIVE},
    "every-second-ddp": {"checkpointing": "every_second"},
    "every-second-fsdp2": {"zero": 3, "checkpointing": "every_second"},
    "selective-by-hand-3": {**BY_HAND, "zero": 3, **SELECTIVE},
    "selective-fsdp2": {"zero": 3, **SELECTIVE},
    "selective-zero-3": {**DEEPSPEED, "zero": 3, **SELECTIVE},
    "activations-ddp": {**ACTIVATIONS},
    "activations-by-hand": {**BY_HAND, **ACTIVATIONS},
    "activations-fsdp2-2": {"zero": 2, **ACTIVATIONS},
    "activations-fsdp2-3": {"zero": 3, **ACTIVATIONS},
    "activations-zero-3": {**DEEPSPEED, "zero": 3, **ACTIVATIONS},
    "both-fsdp2": {"zero": 3, **ACTIVATIONS, **SELECTIVE},
    "plan-ddp": {**PLAN},
    "plan-fsdp2-3": {"zero": 3, **PLAN},
    "plan-zero-2": {**DEEPSPEED, "zero": 2, **PLAN},
    "optimizer-zero-1": {**DEEPSPEED, "zero": 1, "offload": "optimizer"},
    "optimizer-zero-3": {**DEEPSPEED, "zero": 3, "offload": "optimizer"},
    "accumulated-reference": {"micro_batches": 2},
    "accumulated-optimizer-zero-1": {**DEEPSPEED, "zero": 1, "offload": "optimizer", "micro_batches": 2},
    "accumulated-optimizer-zero-2": {**DEEPSPEED, "zero": 2, "offload": "optimizer", "micro_batches": 2},
    "accumulated-parameters-zero-3": {**DEEPSPEED, "zero": 3, "offload": "parameters", "micro_batches": 2},
    "mixed-optimizer-zero-2": {**DEEPSPEED, "zero": 2, "offload": "optimizer", **MIXED},
    "mixed-parameters-zero-3": {**DEEPSPEED, "zero": 3, "offload": "parameters", **MIXED},
}
PARALLEL = [name for name in CASES if "reference" not in name and not name.startswith("mixed")]
MOVED = [name for name in CASES if "-optimizer" in name or "parameters" in name or name.startswith("optimizer")]


def num_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each once."""
    return sum(
        storage.nbytes() for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
    )


def steps_of(config: RunConfig, rank: int) -> dict[str, Any]:
    """Two steps of one engine: losses, final weights, largest bytes by category and on the host."""
    from dlojz.train import loop
    from dlojz.train.engines import base

    engine = base.build(config, loop.build_model(config), torch.device("cpu"))
    batches = loop.open_batches(config, rank)
    losses, held, kept, count = [], dict[str, int](), 0, config.layout.micro_batches
    for step in range(2):
        if engine.offload is not None:
            engine.offload.begin_step()
        total = 0.0
        for index in range(count):
            inputs, targets = next(batches)
            loss = engine.forward(inputs, targets, is_last=index == count - 1)
            if engine.offload is not None:
                kept = engine.offload.offloaded_bytes
                assert kept == num_bytes(engine.offload.host_copies())
            engine.backward(loss, is_last=index == count - 1)
            total += float(loss.detach())
            del loss
            for category, tensors in engine.inventory().items() if step else ():
                held[category] = max(held.get(category, 0), num_bytes(tensors))
            held["host"] = num_bytes(engine.offloaded())
        losses.append(total / count)
        engine.update()
    moved_bytes = engine.offload.moved_bytes if engine.offload else 0
    left_bytes = engine.offload.offloaded_bytes if engine.offload else 0
    weights = {name: weight.clone() for name, weight in engine.weights()}
    engine.close()
    facts = {"losses": losses, "held": held, "kept": kept, "moved": moved_bytes, "left": left_bytes}
    return {"facts": facts, "weights": weights}


def run_all(folder: Path, rank: int) -> None:
    """What one rank does: every case, one after the other."""
    torch.set_num_threads(1)
    init_process_group(folder, torch.device("cpu"), rank, 2)
    told = {}
    for name, fields in CASES.items():
        done = steps_of(RunConfig.of(**{**SMALL, **fields}), rank)
        told[name] = done["facts"]
        forget_deepspeed()
        if rank == 0:
            save_weights(folder / f"{name}.safetensors", done["weights"])
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


class Ran:
    """What all cases have measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("options")
    do_in_forks(run_all, folder, 2, [RunConfig.of(**{**SMALL, **fields}) for fields in CASES.values()])
    return Ran(folder)


@pytest.mark.parametrize("name", PARALLEL)
def test_checkpointing_and_offloading_leave_losses_and_weights_the_same(ran: Ran, name: str) -> None:
    """Losses and weights after two steps: summation order is all that may differ in fp32 (relative 1e-5)."""
    reference = "accumulated-reference" if name.startswith("accumulated") else "reference"
    for rank in range(2):
        facts = ran.facts[rank]
        assert facts[name]["losses"] == pytest.approx(facts[reference]["losses"], rel=1e-5)
    expected, actual = ran.weights(reference), ran.weights(name)
    assert actual.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(actual[key], weight, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_activation_offload_takes_the_same_activations_in_every_engine(ran: Ran) -> None:
    """Gathered weights and buckets never leave: what leaves is what forward of the same model saves."""
    names = [name for name in CASES if name.startswith("activations")]
    for rank in range(2):
        facts = ran.facts[rank]
        kept = {facts[name]["kept"] for name in names}
        assert len(kept) == 1 and kept.pop() > 2_000_000
        for name in names:
            # Each storage leaves once and comes back once; after backward nothing is left.
            assert facts[name]["moved"] == 2 * facts[name]["kept"]
            assert facts[name]["left"] == 0
        assert 0 < facts["both-fsdp2"]["kept"] < facts["activations-ddp"]["kept"] / 10


@pytest.mark.parametrize("name", MOVED)
def test_the_states_that_leave_the_device_are_predicted(ran: Ran, name: str) -> None:
    config = RunConfig.of(**{**SMALL, **CASES[name]})
    shapes = model_shapes(config)
    for rank in range(2):
        predicted = offload_states(config, shapes, predict_states(config, shapes, rank), rank)
        held = ran.facts[rank][name]["held"]
        for category in ("weights", "gradients", "optimizer", "master", "buffers"):
            assert held[category] == predicted.category(category), (rank, category)  # type: ignore[arg-type]
        assert held["host"] == predicted.host_bytes, rank
        assert predicted.nvme_bytes is None


def test_offload_states_leaves_as_before_what_stays_on_the_device() -> None:
    config = RunConfig.of(**SMALL, engine="deepspeed", zero=2)
    shapes = model_shapes(config)
    memory = predict_states(config, shapes)
    assert offload_states(config, shapes, memory) == memory


def sample(name: str) -> Tensor:
    torch.manual_seed(1)
    entry = models.spec(name)
    if entry.family == "text":
        return torch.randint(entry.num_classes, (2, 32))
    return torch.randn(2, 3, 32 if name != "alexnet_tiny" else 64, 32 if name != "alexnet_tiny" else 64)


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["coatnet_tiny", "alexnet_tiny", "llama_tiny"])
def test_offloaded_activations_give_the_same_bits(name: str, amp: bool) -> None:
    gradients = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model, x = models.build(name, image_size=None if name != "coatnet_tiny" else 32), sample(name)
        offload = ActivationOffload(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp), offload if offloaded else nullcontext():
            logits = model(x)
        assert (offload.offloaded_bytes > 0) == offloaded
        logits.float().square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        del logits
        assert offload.offloaded_bytes == 0 and not offload.host_copies()
        assert offload.moved_bytes == 2 * offload.most_bytes
    assert all(map(torch.equal, *gradients))


def test_a_storage_leaves_once_and_weights_and_small_tensors_stay() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            whole = x * 2
            left, right = whole.chunk(2, dim=1)  # two views of one storage, strided
            small = (whole[0, :4] * 1).exp()  # saved, and 16 bytes long
            return (left * right) @ self.weight + small.sum()

    module = Product()
    offload = ActivationOffload(module)
    x = torch.randn(32, 128, requires_grad=True)
    with offload:
        y = module(x)
    # `whole`, and the product's left factor; neither the weight nor the exponential.
    assert sorted(num_bytes([copy]) for copy in offload.host_copies()) == [32 * 64 * 4, 32 * 128 * 4]
    assert min(num_bytes([copy]) for copy in offload.host_copies()) >= MINIMUM_BYTES
    y.sum().backward()
    half = x.detach() * 2
    expected = torch.cat([half[:, 64:], half[:, :64]], dim=1) * 64 * 2
    expected[0, :4] += 2 * half[0, :4].exp() * 32 * 64
    torch.testing.assert_close(x.grad, expected)
    offload.close()
    assert not module._forward_pre_hooks and not module._forward_hooks


def test_activation_offload_takes_what_is_written_in_place_for_another_tensor() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    offload = ActivationOffload(nn.Identity())
    with offload:
        a = x * 1
        b = a.square()
        a.mul_(3)  # autograd alone would refuse backward; the host copies are of both moments
        c = a.square()
    assert len(offload.host_copies()) == 2
    (b + c).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() + 18 * x.detach())


def test_a_second_backward_fetches_again() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    offload = ActivationOffload(nn.Identity())
    with offload:
        y = (x * 1).exp().sum()
    y.backward(retain_graph=True)
    y.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())


def test_activation_offload_is_followed_without_memory() -> None:
    """On fake tensors, as the prediction runs it: the same bytes as for real."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    counted = []
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with torch.device("meta"):
            model = models.build("coatnet_tiny", image_size=32)
        with mode:
            model = model.to_empty(device="cpu")
            offload = ActivationOffload(model)
            with offload:
                logits = model(torch.zeros(2, 3, 32, 32))
            counted.append((offload.offloaded_bytes, len(offload.host_copies())))
            logits.sum().backward()
            counted[-1] += (offload.moved_bytes,)
    assert counted[0] == counted[1]
