"""Watch a training from outside: the objects and calls of whoever trains, reported to the probes.

What trains runs the same with and without its watch, which reads its objects, the calls of the outermost module,
backward, and the optimizers' steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog, Status
from dlojz.train.engines.base import Engine, Inventory, locals_of, optimizer_states
from dlojz.train.engines.deepspeed import DeepSpeedEngine
from dlojz.train.engines.replicated import DDPEngine
from dlojz.train.loop import describe_device
from dlojz.train.probes import Probes

_WRAPPERS = ("module.", "network.", "_orig_mod.")


def plain_name(name: str) -> str:
    """Remove the wrappers' names from a parameter's name."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


class SeenTorch(Engine):
    """Engine around a model that torch trains, built by a program.

    Args:
        module: the outermost module, which the program calls.
    """

    others: tuple[nn.Module, ...] = ()
    """Outermost modules that are trained beside it."""

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model = self.module = module
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that have made a step, in the order of their first step."""

    @property
    def group_names(self) -> dict[str, str]:
        """Axis of each process group: none is named, since all ranks are replicas."""
        return {}

    def inventory(self) -> Inventory:
        modules = (self.module, *self.others)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return locals_of(
            {
                "weights": [*parameters],
                "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
                "optimizer": [state for optimizer in self.optimizers for state in optimizer_states(optimizer)],
                "buffers": [buffer for module in modules for buffer in module.buffers()],
            }
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            whole = parameter.detach()
            # Who: all ranks. What: one parameter, all-gathered whole where it is sharded; at the end of the run only.
            yield plain_name(name), (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()

    def close(self) -> None:
        """Close nothing: the objects are the program's."""


class SeenDDP(SeenTorch):
    """Engine around torch's DDP, which times its messages."""

    def __init__(self, config: RunConfig, module: DistributedDataParallel, device: torch.device) -> None:
        super().__init__(config, module, device)
        module._set_ddp_runtime_logging_sample_rate(1)  # a few clock readings per step: it times every step

    communications = DDPEngine.communications


class SeenDeepSpeed(DeepSpeedEngine):
    """Engine around a model that DeepSpeed trains."""

    def __init__(self, config: RunConfig, module: Any, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model, self.module, self.optimizer = module, module.module, module.optimizer
        self.optimizers: list[torch.optim.Optimizer] = []

    group_names = SeenTorch.group_names

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().weights():
            yield plain_name(name), weight


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given, or the module itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def seen(config: RunConfig, module: nn.Module, device: torch.device) -> SeenTorch | SeenDeepSpeed:
    """Build the engine that the probes read, from the outermost module that is called."""
    module = uncompiled(module)
    if type(module).__module__.startswith("deepspeed."):
        return SeenDeepSpeed(config, module, device)
    if isinstance(module, DistributedDataParallel):
        return SeenDDP(config, module, device)
    return SeenTorch(config, module, device)


class TrainingWatch:
    """Report the calls of one rank's training to the probes and to the event file.

    Args:
        probes: of this rank, started.
    """

    def __init__(self, config: RunConfig, events: EventLog, probes: Probes, device: torch.device) -> None:
        self.engine: SeenTorch | SeenDeepSpeed | None = None
        self.parameters = 0
        self.step = 0
        self.ended: tuple[Status, str] = ("completed", "")
        self.config, self._events, self._probes, self._device = config, events, probes, device
        self._phase = ""
        self._timed = contextlib.ExitStack()
        self._depth = self._forwards = 0
        self._batch: list[Tensor] = []

    @property
    def forwards_per_step(self) -> int:
        """Forward passes of a step, after whose backward the optimizer follows."""
        return self.config.layout.micro_batches

    def _enter(self, phase: str) -> None:
        """Begin a phase of time and memory."""
        self._timed.close()
        self._phase = phase
        if phase:
            self._timed.enter_context(self._probes.clock.phase(phase))

    def _attach(self, engine: SeenTorch | SeenDeepSpeed, module: nn.Module, library: str = "") -> None:
        """Attach the probes to what trains, and begin the first step with it."""
        first, self.engine = self.engine is None, engine
        self._probes.attach(engine)
        told = {"library": library} if library else {}
        device = describe_device(self._device)
        self._events.write("device", device=device, wrapped_in=type(uncompiled(module)).__name__, **told)
        if first:
            self._probes.start_step(0)
            self._enter("data")

    def called(self, module: nn.Module, inputs: Any) -> None:
        """Note the call of a module: a forward pass, if the module is an outermost one that is trained.

        Called by a module within a compiled one, it is compiled with it, to nothing.
        """
        if torch.compiler.is_compiling():
            return
        if get_worker_info() is not None:  # a forked process that loads: an image transform is a module too
            return
        if not self._is_trained(module) or self._phase in ("backward", ""):  # within it, or recomputed
            return
        self._forwards += 1
        self._enter("forward")
        self._batch = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._probes.loaded(*self._batch)

    def _is_trained(self, module: nn.Module) -> bool:
        """Whether a module that is called is an outermost one that is trained; the first call of one attaches it."""
        raise NotImplementedError

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the optimizer that is about to update."""
        if self.engine is not None and optimizer not in self.engine.optimizers:
            self.engine.optimizers.append(optimizer)

    def backwards(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call for backward; calls within it are part of it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and self._phase:
                self._enter("backward")
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0 and self._phase == "backward":
                    self._enter("optimizer" if self._forwards == self.forwards_per_step else "data")

        return watched

    def close(self) -> None:
        """Stop watching."""
        self._timed.close()


class Replacements(contextlib.ExitStack):
    """Attributes of others, replaced within this context; afterwards all is as before."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace one attribute."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


@contextlib.contextmanager
def watching_torch(watch: TrainingWatch, probes: Probes) -> Iterator[Replacements]:
    """Watch torch's modules, backward, optimizers and data loaders within this context."""
    with Replacements() as undo:
        undo.put(fetch._MapDatasetFetcher, "fetch", while_loading(probes, fetch._MapDatasetFetcher.fetch))
        # Where `torch.compile` meets a wrapper or an optimizer's hook, it breaks its graph, and both are called.
        undo.put(torch.Tensor, "backward", torch.compiler.disable(watch.backwards(torch.Tensor.backward)))
        undo.callback(register_module_forward_pre_hook(watch.called).remove)
        undo.callback(register_optimizer_step_pre_hook(torch.compiler.disable(watch.stepped)).remove)
        undo.callback(watch.close)
        yield undo


def while_loading(probes: Probes, read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads samples, whose memory is none of the training's."""

    def reading(*args: Any, **kwargs: Any) -> Any:
        with probes.loading():
            return read(*args, **kwargs)

    return reading
