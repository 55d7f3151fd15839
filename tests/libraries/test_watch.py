"""The watch that is put around a program: what it takes for the training, and what not."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlojz.config.run_config import RunConfig
from dlojz.libraries.seen_engines import SeenDDP, seen
from dlojz.libraries.training_watch import TrainingWatch


class Resized(Dataset[Tensor]):
    """As images of ImageNet: what transforms a sample is a module."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Tensor:
        resized: Tensor = nn.PReLU()(torch.full((1,), float(number))).detach()
        return resized


def test_training_watch_takes_no_module_in_a_process_that_loads_for_the_model() -> None:
    """A forked process inherits the watch, which must not take a transform for the model, nor touch the device."""
    events: Any = SimpleNamespace(write=lambda *_, **__: None)
    probes: Any = SimpleNamespace(trace=SimpleNamespace(fault=None), close=lambda: None)
    watch = TrainingWatch(RunConfig.of(model="vit_tiny"), events, probes, torch.device("cpu"))
    hook = register_module_forward_pre_hook(watch.called)
    try:
        assert [float(batch) for batch in DataLoader(Resized(), num_workers=1)] == [0.0, 1.0]
        assert not watch.fault
        Resized()[0]  # in this process it is taken for the model, and there are no probes
        assert "AttributeError" in watch.fault
    finally:
        hook.remove()


def test_stepped_tells_an_update_within_backward_from_one_after_it() -> None:
    """Two weights: the one's hook updates it while backward runs, the other is updated once backward has ended."""
    probes, first = MagicMock(), MagicMock()
    probes.trace.fault = None
    watch = TrainingWatch(RunConfig.of(model="vit_tiny"), MagicMock(), probes, torch.device("cpu"))
    watch.first = first
    early, late = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in (early, late)]
    for optimizer in optimizers:
        watch.made(optimizer)
    early.register_post_accumulate_grad_hook(lambda _: watch.stepped(optimizers[0]))
    watch.backwards(Tensor.backward)((early * late).sum())
    watch.stepped(optimizers[1])
    assert not watch.fault
    updates = [call.kwargs for call in first.before_update.call_args_list]
    assert updates == [{"within_backward": True}, {"within_backward": False}]


def test_seen_ddp_leaves_aside_what_colossal_ai_puts_around_it() -> None:
    """Its DDP plugin's wrapper, whose library cannot be installed beside this torch."""
    wrapper = type("TorchDDPModel", (nn.Module,), {"__module__": "colossalai.booster.plugin.torch_ddp_plugin"})()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        wrapper.module = DistributedDataParallel(nn.Linear(2, 2))
        engine = seen(RunConfig.of(model="vit_tiny"), wrapper, torch.device("cpu"))
        assert isinstance(engine, SeenDDP) and engine.model is wrapper.module and engine.replicas == 1
        assert [name for name, _ in engine.weights()] == ["weight", "bias"]
    finally:
        dist.destroy_process_group()
