"""Record the first step of a user's script, and repeat its forward pass up to the loss with a copy of its model.

Recorded are the calls of the outermost module that is trained and, from its output on, the calls of torch's functions
that lead to the loss: with the shapes of what they read, not with the tensors. The copy has neither FSDP2's classes nor
hooks, and its parameters are on the meta device.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined]  # torch 2.5 has it here
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules import transformer
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dlojz.models.blocks import NestedBlocks


class Replacements(contextlib.ExitStack):
    """Attributes of others, replaced within this context; afterwards all is as before."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace one attribute; that of a class is put back as it lay there: what `getattr` gives may bind nothing."""
        class_attributes = vars(owner) if isinstance(owner, type) else {}
        self.callback(setattr, owner, name, class_attributes.get(name, getattr(owner, name)))
        setattr(owner, name, value)


_CAUSAL = "_detect_is_causal_mask"
"""Function of torch's transformer that compares a mask with the causal one."""


class MadeTensor(NamedTuple):
    """Tensor that an earlier call has returned."""

    number: int


class GivenTensor(NamedTuple):
    """Tensor that comes from elsewhere: a batch, a target."""

    number: int


@dataclass
class RecordedCall:
    """Call of the model (`function` is None) or of a function of torch, with its arguments as a flat list."""

    function: Callable[..., Any] | None
    leaves: list[Any]
    structure: Any
    autocast: torch.dtype | None
    results: list[int] = field(default_factory=list)
    method: str = ""
    """Method of the model that its wrapper's forward leads to; by default its forward."""


Recorded = TypeVar("Recorded")


class TensorShape(NamedTuple):
    """Tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{'×'.join(map(str, self.shape)) or '1'} {str(self.dtype).removeprefix('torch.')}"


NO_BACKWARD = -1
"""Number that autograd gives outside of every backward pass."""


class FirstStep(TorchFunctionMode):
    """Recording of a script's first step: its model's calls, and what leads from there to the loss.

    As a mode it is entered between the end of the model's forward pass and backward only. Tensors are not kept. A fault
    of the recording ends it, and is told in the place of the prediction: the training goes on.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.given: list[TensorShape] = []
        self.loss: int | None = None
        self.backwards = self.synchronised = 0
        """Backward passes, and those that average gradients."""
        self.zeroed_late = False
        """Whether gradients are set to zero between forward and backward."""
        self.updates_within_backward = False
        self.held: frozenset[int] = frozenset()
        """Results that the script still holds in the backward pass of its last micro-batch."""
        self.models: list[nn.Module] = []
        self.causal_masks: list[bool] = []
        """Whether each mask that torch's transformer has compared with the causal one is that."""
        self.schedule: Any = None
        """Of `torch.distributed.pipelining`, whose step is then the only call."""
        self.over = False
        self.fault: Exception | None = None
        """Why the recording ended early."""
        self._device_type = device_type
        self._thread = threading.get_ident()
        self._known: dict[int, tuple[weakref.ref[Tensor], MadeTensor | GivenTensor]] = {}
        self._results = 0
        self._replaced = Replacements()
        self._within = self._entered = False

    def follow_thread(self) -> None:
        """Listen to the thread that calls, which is the one that trains."""
        self._thread = threading.get_ident()

    def restart(self) -> None:
        """Forget what was recorded: its gradients were thrown away before an update."""
        if self.over:
            return
        self._leave()
        for recorded in (self.calls, self.given, self.models):
            recorded.clear()
        self._known.clear()
        self.loss, self.held, self.zeroed_late = None, frozenset(), False
        self.backwards = self.synchronised = self._results = 0

    def watch(self) -> None:
        """Watch what the script calls, until the step ends."""
        for owner in (torch.optim.Optimizer, nn.Module):
            self._replaced.put(owner, "zero_grad", self.zero_grad(owner.zero_grad))
        self._replaced.put(nn.Module, "__call__", self.model_call(nn.Module.__call__))
        self._replaced.put(transformer, _CAUSAL, self._compares_mask(getattr(transformer, _CAUSAL)))

    def _compares_mask(self, method: Callable[..., bool]) -> Callable[..., bool]:
        """Wrap the comparison of a mask with the causal one, which asks for its numbers."""

        def compared(mask: Tensor | None, is_causal: bool | None = None, *args: Any, **kwargs: Any) -> bool:
            result = method(mask, is_causal, *args, **kwargs)
            if self._within and self.backwards == 0 and is_causal is None and mask is not None:
                self.causal_masks.append(result)
            return result

        return compared

    def repeating(self) -> Replacements:
        """Answer for masks without numbers as was seen, in this thread, until the context ends."""
        undo, thread, answers = Replacements(), threading.get_ident(), cycle(self.causal_masks or [False])
        method = getattr(transformer, _CAUSAL)

        def compared(mask: Tensor | None, is_causal: bool | None = None, *args: Any, **kwargs: Any) -> bool:
            if threading.get_ident() == thread and is_causal is None and mask is not None:
                return next(answers)
            result: bool = method(mask, is_causal, *args, **kwargs)
            return result

        undo.put(transformer, _CAUSAL, compared)
        return undo

    def model_call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a module, and record the outermost ones that are trained."""

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.over or self._within or threading.get_ident() != self._thread or not torch.is_grad_enabled():
                return method(module, *args, **kwargs)
            if torch._C._current_graph_task_id() != NO_BACKWARD:  # checkpointing computes a block again
                return method(module, *args, **kwargs)
            with torch._C.DisableTorchFunction():
                is_trained = any(parameter.requires_grad for parameter in module.parameters())
            if not is_trained:
                return method(module, *args, **kwargs)
            self._leave()
            self._within = True
            call = self._or_over(self._begin_model, module, args, kwargs)
            try:
                result = method(module, *args, **kwargs)
            finally:
                self._within = False
            if call is not None:
                self.end_call(call, result)
            return result

        return called

    def begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> RecordedCall | None:
        """Record a call of a model that has begun already."""
        self._within = True
        return self._or_over(self._begin_model, module, args, kwargs)

    def end_call(self, call: RecordedCall, result: Any) -> None:
        """Record what a call of a model has returned, and listen to what is made of it."""
        self._within = False
        self._or_over(self._end, call, result)
        if not self.over and _len_torch_function_stack() == 0:
            self.__enter__()
            self._entered = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = None
        leaves = () if self.over else tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and self._is_made(leaf) for leaf in leaves):
            call = self._or_over(self._begin, func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            self._or_over(self._end, call, result)
        return result

    def _begin_model(self, module: nn.Module, args: Any, kwargs: Any) -> RecordedCall | None:
        """Note a model's call; what is recorded of it, where it is of the first micro-batch."""
        if self.backwards == 1:
            self._note_held()
        if module not in self.models:
            self.models.append(module)
        scheduled = running_schedule()
        if scheduled is None:
            call = self._begin(None, args, kwargs) if self.backwards == 0 else None
            if call is not None:
                call.method = _redirected(unwrapped(module)[0])
            return call
        if self.schedule is None:
            self.schedule, *arguments = scheduled
            self._begin(None, *arguments)
        return None

    def before_backward(self, root: Any) -> None:
        """Note that backward begins, and from where."""
        self._leave()
        if not self.over:
            self._or_over(self._begin_backward, root)

    def _begin_backward(self, root: Any) -> None:
        root_tensor = next((leaf for leaf in tree_leaves(root) if isinstance(leaf, Tensor)), None)
        if self.schedule is not None:
            self.loss = NO_LOSS
        elif self.backwards == 0 and root_tensor is not None and self._is_made(root_tensor):
            self.loss = self._known[id(root_tensor)][1].number
        self.backwards += 1
        self.synchronised += all(_synchronises(module) for module in self.models)

    def zero_grad(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what sets gradients to zero, and note whether it does so after forward."""

        def zeroed(*args: Any, **kwargs: Any) -> Any:
            if not self.over and self.calls and self.backwards == 0 and kwargs.get("set_to_none", True):
                self.zeroed_late = True
            return method(*args, **kwargs)

        return zeroed

    def before_update(self, *, within_backward: bool = False) -> None:
        """Note which results the script still holds: what backward needed is free by now."""
        if not self.over:
            self.updates_within_backward |= within_backward
            if self.backwards <= 1:
                self._or_over(self._note_held)

    def _or_over(self, record: Callable[..., Recorded], *args: Any) -> Recorded | None:
        try:
            with torch._C.DisableTorchFunction():
                return record(*args)
        except Exception as error:
            self.fault, self.over = error.with_traceback(None), True
            return None

    def _note_held(self) -> None:
        alive = (entry for entry in self._known.values() if entry[0]() is not None)
        self.held = frozenset(origin.number for _, origin in alive if isinstance(origin, MadeTensor))

    def end(self) -> None:
        """End the recording, and leave out what does not lead to the loss, such as an evaluation."""
        self._leave()
        self._replaced.close()
        if not self.over and self.schedule is None and self.loss is not None:
            self._or_over(self._leave_out)
        self.over = True
        self._known.clear()

    def _leave_out(self) -> None:
        self.calls = _leading_to(self.calls, self.loss)
        input_numbers = sorted(
            {leaf.number for call in self.calls for leaf in call.leaves if isinstance(leaf, GivenTensor)}
        )
        number_of = {number: GivenTensor(position) for position, number in enumerate(input_numbers)}
        self.given = [self.given[number] for number in input_numbers]
        for call in self.calls:
            call.leaves = [number_of[leaf.number] if isinstance(leaf, GivenTensor) else leaf for leaf in call.leaves]

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)

    def _is_made(self, tensor: Tensor) -> bool:
        entry = self._known.get(id(tensor))
        # An identity may be used again: the weak reference tells whether it is still this tensor.
        return entry is not None and entry[0]() is tensor and isinstance(entry[1], MadeTensor)

    def _place(self, tensor: Tensor) -> MadeTensor | GivenTensor:
        entry = self._known.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        origin = GivenTensor(len(self.given))
        self.given.append(TensorShape(tuple(tensor.shape), tensor.dtype))
        self._known[id(tensor)] = (weakref.ref(tensor), origin)
        return origin

    def _begin(self, function: Callable[..., Any] | None, args: Any, kwargs: Any) -> RecordedCall:
        flat, structure = tree_flatten((args, kwargs))
        leaves = [self._place(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        enabled = torch.is_autocast_enabled(self._device_type)
        dtype = torch.get_autocast_dtype(self._device_type) if enabled else None
        call = RecordedCall(function, leaves, structure, dtype)
        self.calls.append(call)
        return call

    def _end(self, call: RecordedCall, result: Any) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                call.results.append(self._results)
                self._known[id(leaf)] = (weakref.ref(leaf), MadeTensor(self._results))
                self._results += 1
        if call.function is not None and not call.results:
            self.calls.remove(call)


class StepRecordings:
    """Recordings of a script's later steps, of which the one that is measured is predicted.

    A recording that waits until its step is measured holds no model and no optimizer alive.
    """

    def __init__(self, device_type: str) -> None:
        self.present: FirstStep | None = None
        """Recording of the step that runs."""
        self._device_type = device_type
        self._kept: dict[int, tuple[FirstStep, list[weakref.ref[Any]], list[weakref.ref[Any]]]] = {}

    def begin(self) -> FirstStep:
        """Record the present step from here on, as the first one was."""
        if self.present is not None:
            self.present.end()
        self.present = FirstStep(self._device_type)
        self.present.follow_thread()
        self.present.watch()
        return self.present

    def keep(self, step: int, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """End the recording of a step, and keep it."""
        recording, self.present = self.present, None
        if recording is None:
            return
        recording.end()
        models = [weakref.ref(model) for model in recording.models]
        recording.models.clear()
        self._kept[step] = recording, models, [weakref.ref(optimizer) for optimizer in optimizers]

    def keep_only(self, steps: Container[int]) -> None:
        """Drop the recordings of all other steps."""
        self._kept = {step: entry for step, entry in self._kept.items() if step in steps}

    def take(self, step: int) -> tuple[FirstStep, list[torch.optim.Optimizer]] | None:
        """Return the recording of a step and its optimizers; None where it has none, or a model of it is gone."""
        if step not in self._kept:
            return None
        recording, of_models, of_optimizers = self._kept.pop(step)
        models: list[Any] = [reference() for reference in of_models]
        optimizers: list[Any] = [reference() for reference in of_optimizers]
        if None in (*models, *optimizers):
            return None
        recording.models.extend(models)
        return recording, optimizers


def _redirected(module: nn.Module) -> str:
    """Name the method that a module's forward leads to at this moment; empty where it is its own.

    Source: Lightning, `pytorch/strategies/strategy.py`, `_ForwardRedirection`: a call of DDP leads to `training_step`.
    """
    closure = getattr(vars(module).get("forward"), "__closure__", None) or ()
    # The wrapper's closure holds the name of the method.
    names = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, str)]
    return next((name for name in names if callable(getattr(type(module), name, None))), "")


def _synchronises(module: nn.Module) -> bool:
    """Whether this backward pass averages gradients: False within `no_sync`."""
    groups = (group for _, unit in fsdp_units(module) for group in param_groups(unit))
    parts = (part for part in module.modules() if isinstance(part, FullyShardedDataParallel))
    return (
        bool(getattr(module, "require_backward_grad_sync", True))
        and all(group.reduce_grads and group.all_reduce_grads for group in groups)
        and all(part._sync_gradients for part in parts)
    )


NO_LOSS = -1
"""Number of the loss that a pipeline's schedule computes itself."""


def running_schedule() -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Find the schedule of `torch.distributed.pipelining` whose step calls this, with what its step was given."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    frame = sys._getframe() if module is not None else None
    frame_locals = None
    # The outermost `step` counts: one schedule's may call another's.
    while frame is not None and module is not None:
        if frame.f_code.co_name == "step" and frame.f_code.co_filename == module.__file__:
            frame_locals = frame.f_locals
        frame = frame.f_back
    if frame_locals is None:
        return None
    options = {
        name: frame_locals[name]
        for name in ("target", "losses", "return_outputs", "loss_kwargs")
        if name in frame_locals
    }
    return frame_locals["self"], frame_locals["args"], frame_locals["kwargs"] | options


def schedule_stages(schedule: Any) -> list[Any]:
    """List the stages of a pipeline's schedule that are on this rank; none without a schedule."""
    return [] if schedule is None else list(getattr(schedule, "_stages", None) or [schedule._stage])


def replicas_of_pipeline(schedule: Any) -> int | None:
    """Return 1 where a pipeline is all that divides the ranks: each of them sees every micro-batch; else None."""
    stages = schedule_stages(schedule)
    return 1 if stages and stages[0].group_size == dist.get_world_size() else None


def num_parameters(models: Iterable[nn.Module]) -> int:
    """Count the parameters of whole models, of which ZeRO-3 or FSDP1 may have left this rank shards, or none."""
    modules = [part for model in models for part in model.modules()]
    handles = [
        module._handle
        for module in modules
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]
    # A flat parameter stands for many, which its own list counts.
    flat: list[Any] = [handle.flat_param for handle in handles]
    within = {
        id(parameter) for flat_parameter in flat for parameter in (flat_parameter, *(flat_parameter._params or ()))
    }
    numel_of = {
        id(parameter): int(getattr(parameter, "ds_numel", parameter.numel()))
        for part in modules
        for parameter in part._parameters.values()
        if parameter is not None and id(parameter) not in within
    }
    return sum(numel_of.values()) + sum(sum(flat_parameter._numels) for flat_parameter in flat)


def fsdp_units(module: nn.Module) -> list[tuple[str, FSDPModule]]:
    """List FSDP2's units by path, the outermost first."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]


def param_groups(unit: FSDPModule) -> list[Any]:
    """List the groups of parameters that an FSDP2 unit gathers and reduces at once: before torch 2.13 one at most."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def unwrapped(module: nn.Module) -> tuple[nn.Module, Any]:
    """The model within DDP, DeepSpeed's engine and `torch.compile`, and that DDP or engine."""
    around: Any = None
    while True:
        if isinstance(module, DistributedDataParallel) or type(module).__name__.startswith("DeepSpeedEngine"):
            around = module
            inner: Any = module.module
        else:
            inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module, around
        module = inner


def is_deepspeed_pipeline(module: nn.Module) -> bool:
    """Whether a module is a stage of DeepSpeed's pipeline, whose engine runs a schedule of its own."""
    return type(module).__name__ == "PipelineModule" and hasattr(module, "_grid")


_KEPT_HOOKS = "torch.nn."
"""Hooks from here belong to the model (weight normalisation); others are the script's or a wrapper's."""


def plain_copy(module: nn.Module, copies: dict[int, Any] | None = None) -> nn.Module:
    """Copy a model without FSDP2's classes and hooks; parameters whole, on the meta device, shared ones shared.

    Lists, dictionaries and sets among the attributes are copied, so that the copy's forward changes none of them.
    """
    copies = {} if copies is None else copies
    if id(module) in copies:
        cached: nn.Module = copies[id(module)]
        return cached
    kind = type(module)
    if issubclass(kind, FSDPModule):
        kind = next(base for base in kind.__mro__ if issubclass(base, nn.Module) and not issubclass(base, FSDPModule))
    copy: nn.Module = object.__new__(kind)
    copies[id(module)] = copy
    content = dict(vars(module))
    for name, value in content.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            hooks = {key: hook for key, hook in value.items() if _owner_of(hook).startswith(_KEPT_HOOKS)}
            content[name] = type(value)(hooks)
        elif name in ("_parameters", "_buffers"):
            content[name] = {
                key: tensor if tensor is None else _on_meta(tensor, copies) for key, tensor in value.items()
            }
        elif name == "_modules":
            content[name] = {key: child if child is None else plain_copy(child, copies) for key, child in value.items()}
        elif type(value) in (list, tuple, set, dict):
            content[name] = _container(value, copies)
        elif isinstance(value, nn.Module):
            content[name] = plain_copy(value, copies)
    copy.__dict__.update(content)
    return copy


def _owner_of(hook: Any) -> str:
    return str(getattr(hook, "__module__", "") or type(hook).__module__)


def _container(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return {
            key: plain_copy(element, copies) if isinstance(element, nn.Module) else element
            for key, element in value.items()
        }
    return type(value)(plain_copy(element, copies) if isinstance(element, nn.Module) else element for element in value)


def _on_meta(tensor: Tensor, copies: dict[int, Any]) -> Tensor:
    if id(tensor) not in copies:
        shape = getattr(tensor, "ds_shape", tensor.shape)  # of a parameter that DeepSpeed's stage 3 has partitioned
        meta_tensor = torch.empty(shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = (
            nn.Parameter(meta_tensor, requires_grad=tensor.requires_grad) if is_parameter else meta_tensor
        )
    copy: Tensor = copies[id(tensor)]
    return copy


class ScriptModel(NestedBlocks):
    """Copy of a script's model as blocks, whose forward pass repeats the first step's calls up to the loss.

    Args:
        autocast: type of all calls, in place of the recorded one.
        device_type: of the copy's tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Iterable[str],
        step: FirstStep,
        autocast: torch.dtype | None = None,
        device_type: str = "cpu",
    ) -> None:
        super().__init__(module, parts)
        self.device_type = device_type
        self.calls = _leading_to(step.calls, step.loss)
        self.loss_number, self.autocast, self.keeps = step.loss, autocast, step.held
        self.held: list[Tensor] = []
        self.ready: tuple[str, ...] = ()
        """Parameters in the order in which their gradients become ready, once that is traced."""
        self.in_backward: frozenset[str] = frozenset()
        """Modules that backward reaches: not those below the first trained parameter."""
        self.in_forward: frozenset[str] = frozenset()
        """Modules that forward calls."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss, or where none was seen the sum of all that the model returns."""
        values: dict[int, Tensor] = {}
        reading = ((index, leaf) for index, call in enumerate(self.calls) for leaf in call.leaves)
        # The last call that reads each result: behind it the result is freed.
        last_use = {leaf.number: index for index, leaf in reading if isinstance(leaf, MadeTensor)}
        present: torch.dtype | None = None
        with contextlib.ExitStack() as stack:
            for index, call in enumerate(self.calls):
                autocast_dtype = self.autocast or call.autocast
                if autocast_dtype is not present:
                    stack.close()
                    enabled, dtype = autocast_dtype is not None, autocast_dtype or torch.bfloat16
                    stack.enter_context(torch.autocast(self.device_type, dtype, enabled=enabled))
                    present = autocast_dtype
                self._run(call, values, inputs)
                free_numbers = [
                    number
                    for number in values
                    if last_use.get(number, -1) <= index and self.loss_number not in (None, number)
                ]
                for number in free_numbers:
                    value = values.pop(number)
                    if number in self.keeps:
                        self.held.append(value)
                    del value
        if self.loss_number is None:
            return torch.stack([tensor.float().sum() for tensor in values.values() if tensor.requires_grad]).sum()
        loss = values[self.loss_number]
        return loss if loss.numel() == 1 else loss.sum()

    def _run(self, call: RecordedCall, values: dict[int, Tensor], inputs: Sequence[Tensor]) -> None:
        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, MadeTensor):
                return values[leaf.number]
            if isinstance(leaf, GivenTensor):
                return inputs[leaf.number]
            elsewhere = isinstance(leaf, torch.device) and leaf.type != self.device_type
            return torch.device(self.device_type) if elsewhere else leaf

        leaves = [value_of(leaf) for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.structure)
        if call.method:
            _redirect(self.blocks[-1], call.method)
        result = (call.function or self.blocks[-1])(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        numbers = call.results or range(-1, -1 - len(tensors), -1)  # of a forward pass that has failed
        values.update(zip(numbers, tensors, strict=False))


_TELLS = ("log", "log_dict", "print")
"""Methods of Lightning's modules that report numbers, which a copy has not."""


def _redirect(module: nn.Module, method: str) -> None:
    """Let the next call of a module lead to another of its methods, which may call its forward."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        vars(module).pop("forward", None)
        return getattr(module, method)(*args, **kwargs)

    stubs = {name: lambda *_, **__: None for name in _TELLS if hasattr(type(module), name)}
    vars(module).update(stubs | {"forward": redirected})


def _leading_to(calls: list[RecordedCall], loss: int | None) -> list[RecordedCall]:
    """Leave out what does not lead to the loss, such as an accuracy; without a loss the model's calls remain."""
    if loss is None:
        return [call for call in calls if call.function is None]
    required_numbers, loss_calls = {loss}, []
    for call in reversed(calls):
        if required_numbers & set(call.results):
            required_numbers |= {leaf.number for leaf in call.leaves if isinstance(leaf, MadeTensor)}
            loss_calls.append(call)
    return loss_calls[::-1]
