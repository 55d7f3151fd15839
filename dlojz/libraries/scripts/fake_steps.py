"""Run steps of a script's wrapped model on fake tensors, under the probes that measure the real ones.

The model is copied with what wraps it: FSDP1's handles, the hooks and DTensors of tensor parallelism, the stages and
the schedule of a pipeline. Each tensor of the copy is fake, of this rank's shape, and shares its storage with the same
others as before. Forward, backward and the update then run the wrapper's own code; a collective of fake tensors is
counted and moves nothing, so that one process alone runs the step of its rank. What the probes read off these steps is
the prediction, by construction the same quantities as those of a real run, without its memory and its processes.

Source: torch 2.13, `_subclasses/meta_utils.py` (storages, views and subclasses of a fake copy),
`distributed/_meta_registrations.py` (collectives of tensors without data).
"""

from __future__ import annotations

import contextlib
import importlib.util
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import _flat_param
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.libraries.scripts.first_step import GivenTensor, Replacements, ScriptModel, num_parameters
from dlojz.libraries.scripts.script_training import ScriptTraining
from dlojz.libraries.seen_engines import SeenTorch
from dlojz.prediction.allocator import replay
from dlojz.prediction.forecast import CUBLAS_HANDLES
from dlojz.results.footprint import Category, Footprint, Phases
from dlojz.train.dispatch_trace import StorageTrace
from dlojz.train.engines.base import local
from dlojz.train.probes import Probes

_COPIED = ("torch.distributed.fsdp.", "torch.distributed.pipelining.")
"""Modules whose objects belong to a wrapper and are copied with it; other objects are the script's, and stay."""
_KEPT_HOOKS = ("torch.nn.", "torch.distributed.")
"""Hooks from here belong to the model or to what wraps it; others are the script's."""


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is none of autograd's: a view whose base has changed cannot tell, as of FSDP1's weights."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


class FakeCopier:
    """Copier of a model with its wrappers: tensors become fake, other objects of the script's stay the same."""

    def __init__(self, mode: FakeTensorMode, see: Callable[[Tensor], object]) -> None:
        self._mode, self._see = mode, see
        self._known: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that no identity is used twice
        self._ways: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (Tensor, self._tensor),
            (torch.optim.Optimizer, self._optimizer),
            (nn.Module, self._object),
            (dict, self._mapping),
            ((list, set, deque), self._elements),
            (tuple, self._tuple),
            (partial, lambda call: partial(self(call.func), *self(call.args), **self(call.keywords))),
            (types.MethodType, lambda method: types.MethodType(method.__func__, self(method.__self__))),
            (weakref.ref, lambda reference: reference if reference() is None else weakref.ref(self(reference()))),
        )

    def __call__(self, value: Any) -> Any:
        """Copy a value; what was copied before is found again."""
        if id(value) in self._known:
            return self._known[id(value)]
        for kinds, copier in self._ways:
            if isinstance(value, kinds):
                return copier(value)
        # Objects of the wrapper's classes are copied; any other object is shared with the script.
        is_wrapper_object = type(value).__module__.startswith(_COPIED) and not isinstance(
            value, Enum | Exception | type
        )
        return self._object(value) if is_wrapper_object else value

    def _know(self, value: Any, copy: Any) -> Any:
        self._originals.append(value)
        self._known[id(value)] = copy
        return copy

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Make a fake tensor; of one within autograd's graph without it."""
        plain = tensor if isinstance(tensor, nn.Parameter) or not tensor.requires_grad else tensor.data
        fake: Tensor = self._know(tensor, self._mode.from_tensor(plain, static_shapes=True))
        if plain is not tensor and _is_leaf(tensor):
            fake.requires_grad_()  # such as what a pipeline's stage receives into, before torch 2.13
        self._see(local(fake))
        for name, value in vars(tensor).items():
            setattr(fake, name, self(value))  # of a flat parameter: its shard, its whole, and what it is made of
        return fake

    def _elements(self, value: Any) -> Any:
        copy = self._know(value, value.copy())
        copy.clear()
        (copy.update if isinstance(value, set) else copy.extend)([self(element) for element in value])
        return copy

    def _tuple(self, value: Any) -> Any:
        kind = type(value)
        if kind is not tuple and not hasattr(value, "_fields"):
            return value
        parts = [self(element) for element in value]
        return self._know(value, kind(*parts) if kind is not tuple else tuple(parts))

    def _mapping(self, value: Any) -> Any:
        copy = self._know(value, value.copy())
        copy.clear()
        for key, element in value.items():
            copy[self(key)] = self(element)
        return copy

    def _object(self, value: Any) -> Any:
        copy = self._know(value, object.__new__(type(value)))
        slots = (name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()))
        content = {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__weakref__"}
        for name, attribute in (content | getattr(value, "__dict__", {})).items():
            replacement = attribute
            if isinstance(value, nn.Module) and name.endswith("_hooks") and isinstance(attribute, dict):
                replacement = type(attribute)(
                    {key: hook for key, hook in attribute.items() if _owner_of(hook).startswith(_KEPT_HOOKS)}
                )
            object.__setattr__(copy, name, self(replacement))
        return copy

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Copy an optimizer without its states, which its first update makes anew."""
        copy: torch.optim.Optimizer = self._know(optimizer, object.__new__(type(optimizer)))
        attributes = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
        hooks = {name: type(value)() for name, value in attributes.items() if name.endswith("_hooks")}
        copy.__dict__.update(attributes | hooks | {"state": defaultdict(dict)})
        copy.param_groups = [
            {**group, "params": [self(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
        ]
        return copy


def _owner_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "") or type(hook).__module__)


class FakeTrace(StorageTrace):
    """Storage trace of the fake tensors of one mode, with the module in which each storage begins."""

    def __init__(self, names: dict[str, str], device_type: str, mode: FakeTensorMode) -> None:
        super().__init__(names, device_type)
        self._mode = mode
        self.modules: list[str] = []
        self.in_backward_of = ""
        self.module_of: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
            return args[0]  # as with data; without them it would be a new tensor
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, tensor: Tensor) -> int | None:
        """Track a tensor's storage; returns its number in this trace."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._mode:
            return None
        return self.follow(tensor.untyped_storage()) if tensor.fake_device.type == self._device_type else None

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note another size of a storage that is tracked."""
        if storage._cdata in self._number_of:
            self.follow(storage)

    def begun(self, number: int) -> None:
        """Note the module that computes."""
        self.module_of[number] = self.modules[-1] if self.modules else self.in_backward_of

    def watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Hooks that say which module computes, forward or backward."""

        def enter(*_: Any) -> None:
            self.modules.append(name)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self.modules.pop()
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(begin_backward)

        def begin_backward(_: Tensor) -> None:
            self.in_backward_of = name

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)


def _storages_of_fakes() -> Replacements:
    """Let FSDP1 compare the storages of fake tensors, which have no addresses, by their own identity and size."""
    undo = Replacements()
    # `getattr`, since the second is not exported.
    original, allocated = _flat_param._same_storage, getattr(_flat_param, "_data_ptr_allocated")  # noqa: B009

    def same_storage(left: Tensor, right: Tensor) -> bool:
        operands = [local(tensor) for tensor in (left, right)]
        if all(isinstance(operand, FakeTensor) for operand in operands):
            return operands[0].untyped_storage()._cdata == operands[1].untyped_storage()._cdata
        return bool(original(left, right))

    def has_memory(tensor: Tensor) -> bool:
        return tensor.untyped_storage().size() > 0 if isinstance(tensor, FakeTensor) else allocated(tensor)

    undo.put(_flat_param, "_same_storage", same_storage)
    undo.put(_flat_param, "_data_ptr_allocated", has_memory)
    return undo


class FakeSteps(NamedTuple):
    """What the probes have read off the steady step.

    Attributes:
        at_peak: bytes by module and category at the peak; under an empty name what belongs to no module.
    """

    footprint: Footprint
    at_peak: dict[str, Counter[Category]]


class _Driver:
    """Steps of a copied training, in the phases in which the watch sees those of the script."""

    def __init__(self, training: ScriptTraining, probes: Probes, copy: FakeCopier, device: torch.device) -> None:
        self._training, self._probes, self._device = training, probes, device
        step = training.step
        self.models: list[nn.Module] = [copy(model) for model in step.models]
        self.optimizers: list[torch.optim.Optimizer] = [copy(optimizer) for optimizer in training.optimizers]
        self._schedule = copy(step.schedule)
        self._replayed = ScriptModel(self.models[0], (), step, training.autocast, device.type)
        if training.checkpointed:
            for path in training.parts:
                part = self.models[0].get_submodule(path)
                part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        self._timed = contextlib.ExitStack()
        self._forwards = self._depth = 0
        self._held: Any = None
        """What a micro-batch has left to variables of the script's, until the next one's output takes their place."""

    def watched(self) -> Replacements:
        """Watch where a schedule goes forward and back; otherwise the steps below say so themselves."""
        undo = Replacements()
        undo.callback(self.models[0].register_forward_hook(self._forget).remove)
        if self._schedule is not None:
            undo.put(torch.autograd, "backward", self._backwards(torch.autograd.backward))
            for model in self.models:
                undo.callback(model.register_forward_pre_hook(self._begin_forward).remove)
        return undo

    def _forget(self, *_: Any) -> None:
        self._held = None

    def _begin_forward(self, *_: Any) -> None:
        if not self._depth:
            self._forwards += 1
            self._enter("forward")

    def _backwards(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._enter("backward")
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._enter("data")

        return watched

    def _enter(self, phase: str) -> None:
        self._timed.close()
        if phase:
            self._timed.enter_context(self._probes.clock.phase(phase))

    def run(self, steps: int) -> None:
        """Run so many steps; what a step leaves to the variables of the script is there until the next one's."""
        for number in range(steps):
            self._probes.start_step(number)
            self._enter("data")
            self._forward_and_backward()
            self._enter("optimizer")
            for optimizer in self.optimizers:
                type(optimizer).step(optimizer)
            self._enter("")
            self._probes.end_step()

    def _forward_and_backward(self) -> None:
        training = self._training
        if not training.zeroed_late:
            self._zero_gradients()
        if self._schedule is not None:
            call, batch = training.step.calls[0], self._batch()
            leaves = [batch[leaf.number] if isinstance(leaf, GivenTensor) else leaf for leaf in call.leaves]
            args, kwargs = tree_unflatten(leaves, call.structure)
            enabled = call.autocast is not None
            with torch.autocast(self._device.type, call.autocast or torch.bfloat16, enabled=enabled):
                self._held = batch, kwargs, self._schedule.step(*args, **kwargs)
            return
        # Passes within `no_sync` come first: the last ones send the gradients.
        local_passes = training.step.backwards - training.step.synchronised
        for micro_batch in range(training.micro_batches):
            self._enter("data")
            batch = self._batch()
            self._enter("forward")
            self._replayed.held = []
            model: Any = self.models[0]
            context = model.no_sync() if micro_batch < local_passes else contextlib.nullcontext()
            with context:
                loss = self._replayed(*batch)
                self._held = batch, loss, self._replayed.held
                if training.zeroed_late and not micro_batch:
                    self._zero_gradients()
                self._enter("backward")
                loss.backward()

    def _batch(self) -> list[Tensor]:
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in self._training.given]

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for model in self.models:
            model.zero_grad()


def run_fake_steps(config: RunConfig, training: ScriptTraining, groups: dict[str, str]) -> FakeSteps:
    """Run a script's training on fake tensors until its steady step."""
    if importlib.util.find_spec("torch.distributed._meta_registrations") is None:  # before torch 2.11
        importlib.import_module("torch.distributed._tools.fake_collectives")  # collectives of fake tensors send nothing
    device = next(training.step.models[0].parameters()).device
    rank = dist.get_rank() if dist.is_initialized() else 0
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        trace = FakeTrace(dict(groups), device.type, mode)
        probes = Probes(config, rank, device, trace=trace)
        probes.memory.keeps_variables = True
        driver = _Driver(training, probes, FakeCopier(mode, trace.see), device)
        engine = SeenTorch(config, driver.models[0], device)
        engine.others, engine.optimizers = tuple(driver.models[1:]), driver.optimizers
        for model in driver.models:
            for name, part in model.named_modules():
                for handle in trace.watch(name, part):
                    stack.callback(handle.remove)
        stack.enter_context(mode)
        stack.enter_context(_storages_of_fakes())
        stack.enter_context(driver.watched())
        stack.callback(probes.close)
        probes.start()
        probes.attach(engine)
        driver.run(probes.steady_step + 1)
        measured = probes.footprint(num_parameters(training.step.models))
        assert measured is not None  # the steady step has just ended
        return FakeSteps(_as_predicted(measured, trace, training.device), _at_peak(probes, driver, training.parts))


def _as_predicted(measured: Footprint, trace: FakeTrace, gpu: Device | None) -> Footprint:
    """The footprint without what fake steps cannot tell: times, and memory that is not the trace's."""
    memory: dict[str, object] = {"reserved_bytes": None, "resident_bytes": None, "script_bytes": None}
    if gpu is not None:
        # cuBLAS takes its workspaces first; negative numbers are no storages of the trace.
        handles = [(-1 - handle, gpu.cublas_workspace_bytes) for handle in range(CUBLAS_HANDLES)]
        events = [(event.storage, event.delta_bytes) for event in trace.trace.storages]
        reserved = replay([*handles, *events]).reserved_peak_bytes
        processes = dist.get_world_size() if dist.is_initialized() else 1
        memory["reserved_bytes"] = reserved
        memory["device_bytes"] = reserved + gpu.memory_bytes - gpu.allocatable_bytes(processes)
    changes = {"source": "predicted", "phases": Phases(), "samples_per_s": None, "mfu": None}
    return measured.model_copy(update=changes | {"memory": measured.memory.model_copy(update=memory)})


def _at_peak(probes: Probes, driver: _Driver, parts: Sequence[str]) -> dict[str, Counter[Category]]:
    """Bytes by module at the peak; a state belongs to the module of its parameter."""
    trace = probes.trace
    assert isinstance(trace, FakeTrace)
    owner = dict(trace.module_of)
    for model in driver.models:
        for name, parameter in model.named_parameters():
            states = [optimizer.state.get(parameter, {}) for optimizer in driver.optimizers]
            tensors = (parameter, parameter.grad, *(value for state in states for value in state.values()))
            numbers = (trace.see(local(tensor)) for tensor in tensors if isinstance(tensor, Tensor))
            owner.update((number, name.rpartition(".")[0]) for number in numbers if number is not None)
    held_bytes: Counter[int] = Counter()
    total = peak_bytes = 0
    at_peak: Counter[int] = Counter()
    for event in trace.trace.storages:
        held_bytes[event.storage] += event.delta_bytes
        total += event.delta_bytes
        if event.step == probes.steady_step and total > peak_bytes:
            peak_bytes, at_peak = total, held_bytes.copy()
    bytes_by_module: dict[str, Counter[Category]] = defaultdict(Counter)
    for number, num_bytes in at_peak.items():
        if num_bytes:
            bytes_by_module[_part_of(owner.get(number, ""), parts)][probes.memory.category(number)] += num_bytes
    return bytes_by_module


def _part_of(path: str, parts: Sequence[str]) -> str:
    """The repeated part of a model that a module's path is in, or `(rest)`; nothing outside of modules."""
    within = [part for part in map(_unwrapped_path, parts) if f"{_unwrapped_path(path)}.".startswith(f"{part}.")]
    return max(within, key=len, default="(rest)" if path else "")


def _unwrapped_path(path: str) -> str:
    """A path without FSDP1's wrappers."""
    return ".".join(name for name in path.split(".") if name != "_fsdp_wrapped_module")
