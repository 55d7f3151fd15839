"""Watch a training from outside: the objects and calls of whoever trains, reported to the probes.

What trains runs the same with and without its watch, which reads its objects, the calls of the outermost modules,
backward, and the optimizers' steps.

A step ends when the optimizers that were fed a gradient since the last one have stepped. Several backward passes before
it are gradient accumulation. An update that a gradient scaler, or DeepSpeed's, leaves out ends a step too; one without
a gradient is none. Where optimizers update within backward, as soon as a gradient is there, a step is one backward
pass. The loss is the number that backward is called on, before a gradient scaler multiplies it or accumulation divides
it (`step_ledger`); of several losses, their sum. Of an optimizer that evaluates a closure more than once (L-BFGS), it
is the first value.

A fault of the watch switches it off and never reaches the training. It holds no model and no optimizer alive.

The first steps, and those with larger inputs, are traced. They run as if `torch.compile` were not there, since torch
compiles nothing under a dispatch mode, and refuses `fullgraph=True` there: memory and FLOPs are those of eager mode,
times those of the compiled one.

Source: torch 2.13, `optim/optimizer.py`, `profile_hook_step` (hooks of all optimizers); `amp/grad_scaler.py`, `step`;
`nn/modules/module.py`, `_call_impl`; `_dynamo/eval_frame.py`, `compile_wrapper`, which puts the dispatch keys back
after each call, so that no mode can be left within one. DeepSpeed 0.19, `runtime/engine.py`, `_take_model_step`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info

from dlojz.base.language import say
from dlojz.base.machine import rank_limit
from dlojz.config.run_config import RunConfig
from dlojz.hardware.gpus import device_of_driver
from dlojz.libraries.library_catalogue import LIBRARIES
from dlojz.libraries.scripts.first_step import (
    FirstStep,
    RecordedCall,
    Replacements,
    StepRecordings,
    num_parameters,
    replicas_of_pipeline,
    schedule_stages,
)
from dlojz.libraries.seen_engines import MessageTimes, SeenDDP, SeenDeepSpeed, SeenTorch, mesh_groups, seen, uncompiled
from dlojz.libraries.step_ledger import (
    SEQUENCE_DIMS,
    ForwardCall,
    GradientFeed,
    Loss,
    StepAccounts,
    TracingPlan,
    loss_of,
    makes_states,
    name_of,
    reads_sequences_first,
    samples_and_tokens,
    script_frames,
    script_variables,
    tensors_in,
    unmeasured,
    updated_by,
)
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.results.footprint import NO_GRAD, Category
from dlojz.results.record import EventLog, Status
from dlojz.train.dispatch_trace import present_bytes
from dlojz.train.loop import (
    FOOTPRINT_EVERY,
    GROUP_TIMEOUT,
    align_clocks,
    describe_device,
    report_measured,
    write_footprint,
)
from dlojz.train.probes import Probes, StepMark


def keywords_of_call() -> dict[str, Any]:
    """Return the keyword arguments of the module call whose hook calls this: torch gives global hooks none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == nn.modules.module.__file__:
            keywords = frame.f_locals.get("kwargs")
            return keywords if isinstance(keywords, dict) else {}
    return {}


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a fault of the watch switch the watch off, and never reach the training that it looks at."""

    @functools.wraps(method)
    def guarded(self: TrainingWatch, *args: Any, **kwargs: Any) -> Any:
        if self.fault:
            return None
        try:
            if (fault := self._probes.trace.fault) is not None:
                raise fault
            with torch._C.DisableTorchFunction():  # no mode of the script's sees what the watch reads of its tensors
                return method(self, *args, **kwargs)
        except Exception as error:
            if not self.survives_faults:
                raise
            self.switch_off(error)
            return None

    return guarded


class _Boundary(NamedTuple):
    """End of an update after which the step may be over, if the optimizers that are awaited do not step."""

    mark: StepMark
    accounts: StepAccounts
    num_calls: int


INNER, SEQUENCES, OUTERMOST = 0, 1, 2
"""Kinds of modules: a part of a model, one that reads the length first, an outermost one that is trained."""
_FEW_NAMES = 8


class TrainingWatch:
    """Watch of one rank's training, which knows nothing of it."""

    survives_faults = True
    """Whether a fault of the watch ends the watch alone: it does where the training is somebody else's."""
    engine: SeenTorch | SeenDeepSpeed | None = None
    parameters = step = 0
    ended: tuple[Status, str] = ("completed", "")
    fault = ""
    """Why the watch has been switched off; empty while it is on."""
    untrained_calls = backward_calls = 0
    """Calls of modules without gradients, and of backward, before the first step."""
    processes = 0
    """Processes that the script has started itself, in which nothing is watched."""
    _phase = ""
    _made = _depth = _forwards = _updates = 0
    """Optimizers made; nested calls of backward; forward passes and updates of the present step."""
    _usual_forwards = _usual_passes = 1
    _usual_samples = 0
    """Forward and backward passes of the step before, and its samples."""
    _call: ForwardCall | None = None
    _caller: nn.Module | None = None
    """Outermost module that is being called: with gradients if there is a call, else to evaluate."""
    _phase_before = ""
    _inputs: Any = None
    _sequences: tuple[int, int] | None = None
    _updating: object = None
    """Optimizer that updates, or DeepSpeed's engine."""
    _evaluations = 0
    """Calls of its closure for backward in this update."""
    _in_action = False
    """Whether a pipeline's action runs, which is one phase."""
    _in_backward = False
    """Whether an optimizer has updated within the present backward pass."""
    _boundary: _Boundary | None = None
    _scaled: tuple[weakref.ref[Tensor], Loss] | None = None
    _met = False
    _others: Mapping[Category, int] = {}
    """States of other models than those of the step that was predicted."""
    _recorded: RecordedCall | None = None

    def __init__(self, config: RunConfig, events: EventLog, probes: Probes, device: torch.device) -> None:
        self.config, self._events, self._probes, self._device = config, events, probes, device
        self._probes.global_batch = None
        if config.script is not None:
            self._probes.follow_watch()
        self._probes.trace.keeps_faults = self.survives_faults
        self._thread = threading.get_ident()
        self._timed = contextlib.ExitStack()
        self._kinds: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """Kind of each module that has been called, where it is known."""
        self._models: list[weakref.ref[nn.Module]] = []
        """Outermost modules that are trained; the script may release them."""
        self._lists: weakref.WeakKeyDictionary[torch.optim.Optimizer, nn.Module] = weakref.WeakKeyDictionary()
        """Parameters, as a module, of an optimizer whose model is never called as a whole."""
        self._feed = GradientFeed()
        self._unused: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that are fed, but were not stepped when another was for the second time."""
        self._late: list[str] = []  # optimizers that have used gradients of earlier steps since the last one
        self._names: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
        self._loss_names: dict[tuple[Any, int], str] = {}
        self._accounts = StepAccounts()
        self._batch: list[Tensor] = []
        self._calls: list[ForwardCall] = []
        self._reached: list[ForwardCall] = []
        """Forward calls through which the present backward pass has gone."""
        self._samples: list[int] = []
        """Samples of each step that was timed."""
        self.first = FirstStep(device.type)
        self._recordings = StepRecordings(device.type)
        self._predicted: list[weakref.ref[nn.Module]] = []
        """Models of the step that was predicted."""
        self._messages = MessageTimes(self._sent_elsewhere)
        self._tracing = TracingPlan()

    def switch_off(self, error: Exception) -> None:
        """Stop watching after a fault of the watch, and say so once; the training goes on."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:  # to the innermost frame
            trace = trace.tb_next
        line = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""
        detail = f"{type(error).__name__}: {str(error)[:200]}"
        self.fault = say(
            en=f"the measurement failed after {self.step} steps and was ended ({line}, {detail}); the training went "
            "on.",
            fr=f"la mesure a échoué après {self.step} pas et a été arrêtée ({line}, {detail}) ; l’entraînement a "
            "continué.",
        )
        print(f"dlojz: {self.fault}", file=sys.stderr, flush=True)
        recordings = [recording.end for recording in filter(None, (self.first, self._recordings.present))]
        for step_out in (self._timed.pop_all, *recordings, self._probes.close):
            with contextlib.suppress(Exception):
                step_out()
        self._phase = ""
        with contextlib.suppress(OSError, ValueError):
            self._events.write("note", text=self.fault, ends_watch=True)

    @property
    def saw_nothing(self) -> bool:
        """Whether no step was seen, and not because the watch was switched off."""
        return self.step == 0 and not self.fault

    def time_messages(self, undo: Replacements) -> None:
        """Time the messages of the training from now on; on a GPU the host's waits tell nothing."""
        if self._device.type == "cpu":
            self._messages.install(undo)

    @_guarded
    def meet(self) -> None:
        """Align the ranks' clocks, once, when all have joined the script's process group."""
        if self._met or not dist.is_initialized() or dist.get_world_size() != self.config.layout.world_size:
            return
        self._met = True
        if dist.get_world_size() > 1:
            control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
            align_clocks(self._probes, control, self._events)
            dist.destroy_process_group(control)

    @_guarded
    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer of the script's."""
        self._feed.optimizers.add(optimizer)
        self._made += 1

    def began_process(self) -> None:
        """Note a process that the script starts."""
        self.processes += 1

    def _enter(self, phase: str) -> None:
        """Begin a phase of time and memory, unless a pipeline's action runs."""
        if self._in_action:
            return
        self._timed.close()
        self._phase = phase
        if phase:
            self._timed.enter_context(self._probes.clock.phase(phase))

    def called(self, module: nn.Module, inputs: Any) -> None:
        """Note the call of a module in the thread that trains: a forward pass, if it is an outermost one.

        Without gradients it is an evaluation. Called by a module within a compiled one, it is compiled with it, to
        nothing. In a forked process that loads, an image transform is a module too.
        """
        if torch.compiler.is_compiling() or self.fault:
            return
        kind = self._kinds.get(module)
        if kind != INNER:
            self._called(module, inputs, kind)

    @_guarded
    def _called(self, module: nn.Module, inputs: Any, kind: int | None) -> None:
        if get_worker_info() is not None or not self._is_here(module):
            return
        if kind == SEQUENCES:
            argument = next(iter(inputs), None) if self._call is not None else None
            if isinstance(argument, Tensor) and argument.ndim == SEQUENCE_DIMS:
                self._sequences = (argument.size(0), argument.size(1))
            return
        if not torch.is_grad_enabled():
            self.untrained_calls += kind is None
            if self._caller is None and self._phase != "backward":
                self._caller = module
                self._probes.trace.flops_target = Counter()  # an evaluation is no training
                self._see_inputs(tensors_in(inputs, keywords_of_call()))
                self._phase_before, self._probes.trace.phase = self._probes.trace.phase, NO_GRAD
            return
        if not (kind == OUTERMOST or self._is_trained(module)) or self._phase in ("backward", ""):
            return  # within it, or recomputed
        self._forwards += 1
        self._enter("forward")
        self._call, self._caller, self._sequences = ForwardCall(), module, None
        self._calls.append(self._call)
        self._probes.trace.flops_target = self._call.flops
        self._batch = tensors_in(inputs, keywords_of_call())
        if self._see_inputs(self._batch):
            self._recorded = self._recordings.begin().begin_call(module, inputs, keywords_of_call())
        self._probes.loaded(*self._batch)
        self._inputs = inputs

    def _see_inputs(self, tensors: list[Tensor]) -> bool:
        """Trace the present step too, if its inputs are larger than those of all traced steps; returns whether."""
        input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self.engine is None or not self._tracing.wants(input_bytes) or self._probes.is_tracing:
            return False
        if self._boundary is not None or self.config.script is None or not self.step:
            return False
        self._probes.resume(self._phase)
        self._probes.loaded(*tensors)
        return True

    def returned(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note that a module's call has ended; the output tells later whether a backward pass goes through it."""
        del inputs
        if torch.compiler.is_compiling() or module is not self._caller or self.fault:
            return
        self._returned(output)

    @_guarded
    def _returned(self, output: Any) -> None:
        call, self._call, self._caller = self._call, None, None
        self._probes.trace.flops_target = None
        if call is None:
            self._probes.trace.phase = self._phase_before
            return
        call.samples, call.tokens = samples_and_tokens(self._batch, self._inputs, self._sequences)
        self._inputs = None
        if self._recorded is not None and self._recordings.present is not None:
            self._recordings.present.end_call(self._recorded, output)
            self._recorded = None
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        call.is_trained = not outputs  # what returns no tensors does not tell
        for tensor in outputs:
            tensor.register_hook(functools.partial(self._reach, call))

    def _reach(self, call: ForwardCall, gradient: Tensor) -> None:
        del gradient
        call.is_trained = True
        if call not in self._reached:
            self._reached.append(call)

    def _is_here(self, module: nn.Module | None = None) -> bool:
        """Whether the thread that calls is the one that trains; the first that trains is that one, for good.

        Within backward, torch's own threads call hooks for the one that does.
        """
        thread = threading.get_ident()
        if thread == self._thread or self._depth:
            return True
        if self.step or self._forwards or self.backward_calls or not torch.is_grad_enabled() or module is None:
            return False
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return False
        self._thread = thread
        self.first.follow_thread()
        self._probes.enter_thread()
        return True

    def _is_trained(self, module: nn.Module) -> bool:
        """Whether a module of an unknown kind is an outermost one that is trained, and is so from now on."""
        parameters = list(module.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            if not parameters:
                self._kinds[module] = INNER
            return False  # frozen now: it may be trained later
        for part in module.modules():
            self._kinds[part] = SEQUENCES if reads_sequences_first(part) else INNER
        self._kinds[module] = OUTERMOST
        self._train([*(model for model in self.models if self._kinds.get(model) == OUTERMOST), module])
        return True

    @property
    def models(self) -> list[nn.Module]:
        """Outermost modules that are trained and that the script still holds."""
        return [model for model in (reference() for reference in self._models) if model is not None]

    def _train(self, models: list[nn.Module]) -> None:
        """Attach the probes to the outermost modules that are trained, and begin the first step with them."""
        before = self.engine
        self._models = [weakref.ref(model) for model in models]
        self.engine = engine = seen(self.config, models[0], self._device)
        if isinstance(engine, SeenTorch):
            engine.others = models[1:]
        if before is not None:
            engine.optimizers = before.optimizers
        self._probes.attach(engine)
        library = LIBRARIES.get(self.config.library)
        library_fields = {"library": f"{library.title} {library.version}".strip()} if library else {}
        device = describe_device(self._device)
        wrapped_in = type(uncompiled(models[0])).__name__
        threads = torch.get_num_threads()
        self._events.write("device", device=device, wrapped_in=wrapped_in, threads=str(threads), **library_fields)
        self.parameters = num_parameters(models)
        if before is None:
            self._messages.clear()
            self._probes.start_step(0)
            self._enter("data")
            if isinstance(engine, SeenDeepSpeed):
                self._watch_deepspeed(engine.model)

    def _watch_deepspeed(self, engine: Any) -> None:
        """Watch DeepSpeed's backward, which ends when gradients have left their buckets, and its update.

        The update steps the optimizer once for each group or shard, or not at all where a gradient is not finite.
        """
        engine.backward = self.backwards(engine.backward)
        update = engine._take_model_step

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._begin_engine_update(engine)
            try:
                return update(*args, **kwargs)
            finally:
                self._end_engine_update(engine)

        engine._take_model_step = watched

    @_guarded
    def _begin_engine_update(self, engine: Any) -> None:
        self._feed.fed.add(engine.basic_optimizer)  # whose gradients are in the engine's buckets
        self.stepped(engine.basic_optimizer)
        self._updating = engine

    @_guarded
    def _end_engine_update(self, engine: Any) -> None:
        self._updating = None
        self._accounts.updated.add(engine.basic_optimizer)
        self._feed.used(engine.basic_optimizer)
        self._end_update()

    def _only_prepares(self) -> bool:
        """Whether an update makes an optimizer's states alone, before anything was trained."""
        return not (self.step or self.backward_calls) and makes_states()

    @_guarded
    def stepped(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Begin an update; one within another belongs to it, and one within backward to that.

        Without a new gradient it is none, unless a closure is to compute one.
        """
        if not self._is_here() or self._only_prepares():
            return
        is_outer = self._updating is None and not self._depth
        if is_outer and not self._feed.is_fed(optimizer) and not any(map(callable, tree_leaves(arguments))):
            return
        if self.engine is None:  # a model that is no module, or is called in its parts
            parameter_list = nn.ParameterList(list(updated_by(optimizer)))
            self._lists[optimizer] = parameter_list
            self._train([parameter_list])
        assert self.engine is not None
        if all(optimizer is not candidate for candidate in self.engine.optimizers):
            self.engine.optimizers = [*self.engine.optimizers, optimizer]
            self._name(optimizer)
        for recording in filter(None, (self.first, self._recordings.present)):
            recording.before_update(within_backward=self._depth > 0)
        if is_outer:
            if self._boundary is not None and optimizer in self._boundary.accounts.updated:
                self._unused.update(self._awaited(self._boundary.accounts))
                self._end_at_boundary()
            self._updating = optimizer
            if self._phase != "optimizer":  # which begins when backward ends
                self._enter("optimizer")

    def _name(self, optimizer: torch.optim.Optimizer) -> None:
        """Name an optimizer as the script does; the next one of the same name gets a number."""
        name = name_of(optimizer) or type(optimizer).__name__
        namesakes = sum(existing == name or existing.startswith(f"{name} (") for existing in self._tracing.names)
        self._names[optimizer] = name = f"{name} ({namesakes + 1})" if namesakes else name
        self._tracing.names.append(name)

    @_guarded
    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End an update, and the step if no other optimizer is to follow."""
        if not self._is_here() or self._only_prepares() or not (self._depth or self._updating):
            return
        # Fed in steps that have ended, such as one that is updated in every third iteration, after the others.
        is_late = not self._depth and not self._accounts.num_passes and optimizer in self._feed.fed
        self._unused.discard(optimizer)
        self._feed.used(optimizer)
        if is_late and optimizer is self._updating and self._boundary is None:
            self._updating, self._updates = None, self._updates + 1
            self._late.append(self._names.get(optimizer, ""))
            self._events.write("late_update", optimizers=self._late[-1:])
            self._enter("data")
            return
        self._accounts.updated.add(optimizer)
        if self._depth:
            self._in_backward = self._in_backward or self._updating is None
        elif optimizer is self._updating:
            self._updating, self._evaluations = None, 0
            self._end_update()

    def _awaited(self, accounts: StepAccounts) -> list[torch.optim.Optimizer]:
        """List the optimizers that were fed a gradient which none has used yet."""
        waiting = [owner for owner in self._feed.fed if owner not in accounts.updated and owner not in self._unused]
        if not waiting:
            return []
        ids = {id(parameter) for optimizer in accounts.updated for parameter in updated_by(optimizer)}
        return [
            optimizer
            for optimizer in waiting
            if any(id(parameter) not in ids and parameter.grad is not None for parameter in updated_by(optimizer))
        ]

    def _end_update(self) -> None:
        """End the step, unless another optimizer is to follow."""
        self._updates += 1
        if self._boundary is not None:
            self._accounts = self._boundary.accounts.joined(self._accounts)
            self._boundary = None
        if self._awaited(self._accounts):
            self._boundary = _Boundary(self._probes.mark(), self._accounts, len(self._calls))
            self._accounts = StepAccounts()
            self._enter("data")
            return
        self._end_step()

    @_guarded
    def zeroed(self, owner: torch.optim.Optimizer | nn.Module) -> None:
        """Note gradients that were set to zero: those that no optimizer has used belong to no step."""
        if not self._is_here() or self._depth or self._updating is not None or isinstance(self.engine, SeenDeepSpeed):
            return
        if isinstance(owner, torch.optim.Optimizer):
            self._feed.used(owner)
        else:
            inside = {id(parameter) for parameter in owner.parameters()}
            for optimizer in list(self._feed.optimizers):
                if all(id(parameter) in inside for parameter in updated_by(optimizer)):
                    self._feed.used(optimizer)
        self._drop_unfed()

    def _drop_unfed(self) -> None:
        """End the step whose other optimizers have lost their gradients; forget passes whose gradients nobody uses."""
        if self._boundary is not None:
            if not self._awaited(self._boundary.accounts):
                self._end_at_boundary()
        elif self._accounts.num_passes and not self._feed.fed:
            self._accounts, self._calls, self._forwards = StepAccounts(), [], 0
            for recording in filter(None, (self.first, self._recordings.present)):
                recording.restart()

    def _or_left_out(
        self, method: Callable[..., Any], optimizer_of: Callable[..., torch.optim.Optimizer]
    ) -> Callable[..., Any]:
        """Wrap a step that may leave the update out, which ends a step of the training all the same."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = (self.step, self._updates)
            result = method(*args, **kwargs)
            if (self.step, self._updates) == before:
                self.stepped(optimizer_of(*args))
                self.after_update(optimizer_of(*args))
            return result

        return watched

    def scaler_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a gradient scaler's step, which leaves the update out where a gradient is not finite."""
        return self._or_left_out(method, lambda scaler, optimizer, *_: optimizer)

    def scaler_scale(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a gradient scaler's multiplication of the loss, whose own value is the one to report."""

        def watched(scaler: Any, outputs: Any) -> Any:
            result = method(scaler, outputs)
            self._note_scaled(outputs, result)
            return result

        return watched

    @_guarded
    def _note_scaled(self, outputs: Any, result: Any) -> None:
        if isinstance(outputs, Tensor) and isinstance(result, Tensor) and outputs.numel() == 1:
            self._scaled = (weakref.ref(result), loss_of(outputs, self._name_of_loss(outputs)))

    def backwards(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call for backward, and note the loss that it is called on; calls within it are part of it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._begin_backward(args[0] if args else None):
                return method(*args, **kwargs)
            try:
                return method(*args, **kwargs)
            finally:
                self._end_backward()

        return watched

    @_guarded
    def _begin_backward(self, root: Any) -> bool:
        """Begin a backward pass; returns whether it is one of the training's."""
        if threading.get_ident() != self._thread:
            return False
        if self._depth == 0:
            in_buckets = isinstance(self.engine, SeenDeepSpeed)  # where gradients are, and in none of its parameters
            if self._updating is None and not in_buckets and self._feed.drop_released():
                self._drop_unfed()
            self.backward_calls += 1
            for recording in filter(None, (self.first, self._recordings.present)):
                recording.before_backward(root)
            if self._updating is not None:
                self._evaluations += 1
            if self._evaluations <= 1:
                self._note_loss(root)
            self._feed.before_backward()
            self._reached = []
            if self._phase:
                self._enter("backward")
        self._depth += 1
        return True

    @_guarded
    def _end_backward(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._phase == "backward":
            self._enter("optimizer" if self._forwards == self._usual_forwards else "data")
        self._feed.after_backward()
        calls = self._reached or [call for call in self._calls if call.is_trained and not call.is_counted]
        for call in calls:
            call.is_counted = True
        if self._evaluations <= 1:  # a closure that is evaluated again sees the same samples
            self._accounts.passed(calls, self._accounts.losses[-1].name if self._accounts.losses else "")
        self._reached = []
        if self._in_backward:
            self._in_backward = False
            self._end_update()

    def _note_loss(self, loss: object) -> None:
        if isinstance(loss, list | tuple) and len(loss) == 1:  # torch's pipelines call it so
            loss = loss[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        if self._scaled is not None and self._scaled[0]() is loss:
            self._accounts.losses.append(self._scaled[1])
        else:
            self._accounts.losses.append(loss_of(loss, self._name_of_loss(loss)))
        self._scaled = None

    def _name_of_loss(self, loss: Tensor) -> str:
        """Name a loss as the script does; looked up once for each line that calls for backward."""
        frame = next(script_frames(), None)
        if frame is None:
            return ""
        call_site = (frame.f_code, frame.f_lasti)  # the instruction that called for backward
        if call_site not in self._loss_names:
            self._loss_names[call_site] = name_of(loss)
        return self._loss_names[call_site]

    def _loss(self, accounts: StepAccounts) -> float | None:
        """The loss of the step; None where none was seen."""
        losses = accounts.named_losses(self._usual_passes)
        return math.fsum(losses.values()) if losses else None

    def _end_at_boundary(self) -> None:
        """End the step where its last update ended; what has begun since belongs to the next one."""
        boundary, self._boundary = self._boundary, None
        assert boundary is not None
        later, self._accounts = self._accounts, boundary.accounts
        self._end_step(boundary)
        self._accounts = later

    def _end_step(self, boundary: _Boundary | None = None) -> None:
        assert self.engine is not None
        accounts, self._updates = self._accounts, 0
        num_calls = boundary.num_calls if boundary is not None else len(self._calls)
        calls, later = self._calls[:num_calls], self._calls[num_calls:]
        pending = [call for call in calls if not call.is_trained and not call.is_pending]
        for call in pending:  # a generator may be called before the discriminator's step
            call.is_pending = True
        self._calls = [*pending, *later]
        replicas = self.engine.replicas or replicas_of_pipeline(self.first.schedule)
        samples = replicas * accounts.samples if replicas else 0
        if not samples and not calls:  # a forward pass that is compiled with its step is not seen
            samples = self._usual_samples
        self._usual_samples = samples
        phase, mark = self._phase, boundary.mark if boundary is not None else None
        self._enter("")
        if self._probes.is_tracing:
            self._messages.compare(self._probes.trace.trace.calls, self.step)
            if isinstance(self.engine, SeenDDP) and self.engine.computes_elsewhere:
                self._probes.trace.elsewhere.add(self.step)
            for call in calls:
                if call.is_trained:
                    self._probes.trace.count_flops(call.flops)
                    if mark is not None:
                        mark.flops.update(call.flops)
        if self.first.schedule is None:  # a pipeline's waits are its bubble
            self.engine.overlap = self._messages.overlap(beside_reducer=isinstance(self.engine, SeenDDP))
        named_losses = accounts.named_losses(self._usual_passes)
        loss = self._loss(accounts)
        was_traced = self._probes.is_tracing
        step_s = self._probes.end_step(mark)
        self._write_step(accounts, named_losses, loss, step_s, samples, replicas)
        if loss is not None and not math.isfinite(loss) and self.ended[0] != "diverged":
            self.ended = ("diverged", f"the loss became {loss} at step {self.step}; the script went on.")
        self._report(accounts, samples, was_traced)
        self._usual_passes = max(1, accounts.num_passes)
        self._usual_forwards = max(1, sum(call.is_trained for call in calls))
        self._forwards = len(later)
        self._accounts = StepAccounts()
        self._batch = []
        self.step += 1
        if self.step == 1:
            self.predict()
            if self.config.script is not None and self._probes.is_tracing:
                self._recordings.begin()
            for stage in schedule_stages(self.first.schedule):
                self._time_actions(stage)
        self._messages.clear()
        self._probes.start_step(self.step, mark)
        self._enter(phase if boundary is not None and phase else "data")

    def _write_step(
        self,
        accounts: StepAccounts,
        named_losses: dict[str, float],
        loss: float | None,
        step_s: float,
        samples: int,
        replicas: int | None,
    ) -> None:
        """Write down a step; a figure that is not known is left out."""
        fields: dict[str, Any] = {"resident_bytes": present_bytes(self._device)}
        if replicas and accounts.tokens:
            fields["tokens"] = replicas * accounts.tokens
        if samples:
            fields["samples"] = samples
        if loss is not None and math.isfinite(loss):
            fields["loss"] = loss
        if any(named_losses) and all(map(math.isfinite, named_losses.values())):
            fields["losses"] = named_losses
        names = [self._names.get(optimizer, "") for optimizer in accounts.updated]
        if 0 < len(names) <= _FEW_NAMES:
            fields["optimizers"] = sorted(names)
        self._events.write("step", step=self.step, step_s=step_s, **fields)

    def _report(self, accounts: StepAccounts, samples: int, was_traced: bool) -> None:
        """Write the measurements that are due, and trace the next step or not."""
        if self.config.script is None:
            self._probes.global_batch = samples or None
            report_measured(self._events, self._probes, self.step, self._probes.rank, self.parameters)
            return
        if not was_traced:
            self._samples.append(samples)
            self._probes.global_batch = statistics.median_low(self._samples) or None
        kind = "+".join(sorted([*(self._names.get(optimizer, "") for optimizer in accounts.updated), *self._late]))
        self._late.clear()
        plan = self._tracing
        states_bytes = self._probes.optimizer_bytes() if was_traced else 0
        steady = plan.ended(self.step, kind, was_traced, states_bytes)
        variables = self._probes.variables(script_variables(self.models)) if steady else {}
        larger = [step for step in steady if self._probes.measure_if_largest(step)]
        self._recordings.keep(self.step, accounts.updated)
        if larger:
            self._predict_again(larger[-1])
            self._events.write("variables", names=variables)
            if self._probes.rank == 0:
                self._events.write("memory_timeline", samples=[sample.to_dict() for sample in self._probes.timeline])
            write_footprint(self._events, self._probes, self.parameters)
        elif self.step % FOOTPRINT_EVERY == FOOTPRINT_EVERY - 1:
            write_footprint(self._events, self._probes, self.parameters)
        self._recordings.keep_only(plan.undecided)
        if not plan.is_due():
            self._probes.pause()
            return
        if self.step:  # the first one is recorded until it is predicted
            self._recordings.begin()
        if not self._probes.is_tracing:
            self._probes.resume()

    @_guarded
    def _sent_elsewhere(self, method: str, group: Any, args: Any) -> None:
        """Count what another thread than the one that trains sends."""
        if self._probes.is_tracing:
            self._probes.trace.see_elsewhere(method, group, args)

    @_guarded
    def predict(self, limit_bytes: int | None = None) -> None:
        """Predict the run from its first step, on rank 0, or wherever memory has run out; the others wait for it.

        In a pipeline each rank predicts its own.

        Args:
            limit_bytes: 0 where memory has run out; by default that of a rank.
        """
        self.first.models.extend(filter(None, (reference() for reference in self._predicted)))
        self._predict(self.first, [owner for owner in self._feed.optimizers if owner not in self._unused], limit_bytes)

    def _predict_again(self, step: int) -> None:
        """Predict the step that is measured, where it has another model or another batch than the one predicted."""
        if (recorded_step := self._recordings.take(step)) is None:
            return
        assert self.engine is not None
        recording, optimizers = recorded_step
        models = [id(reference()) for reference in self._predicted]
        is_other = recording.given != self.first.given or [id(model) for model in recording.models] != models
        if recording.calls and (is_other or self._others != self.engine.states_besides(recording.models, optimizers)):
            self.first = recording
            self._predict(recording, optimizers, None)

    def _predict(self, step: FirstStep, optimizers: list[torch.optim.Optimizer], limit_bytes: int | None) -> None:
        if not step.models:
            return
        from dlojz.libraries.scripts.script_prediction import predict_training  # which an older torch cannot import

        step.end()
        self._predicted = [weakref.ref(model) for model in step.models]
        self._others = self.engine.states_besides(step.models, optimizers) if self.engine is not None else {}
        if not self._probes.rank or limit_bytes is not None or step.schedule is not None:
            on_gpu = self._device.type == "cuda"
            gpu = device_of_driver(torch.cuda.get_device_name(self._device)) if on_gpu else None
            if limit_bytes is None:
                limit_bytes = gpu.memory_bytes if gpu else rank_limit(self.config.layout.world_size).num_bytes
            predicted = predict_training(
                self.config,
                step,
                optimizers,
                gpu,
                on_gpu=on_gpu,
                groups=mesh_groups(step.models[0]),
                limit_bytes=limit_bytes,
                other_bytes=self._others,
            )
            self._events.write("prediction", prediction=predicted.to_dict())
        step.models.clear()  # which the script may release

    def _time_actions(self, stage: Any) -> None:
        """Time each action of a pipeline's stage, without what is received before it and sent after it."""

        def timed(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def watched(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
                action_kind = kind if kwargs.get("full_backward", True) else BACKWARD_INPUT
                action = Action(action_kind, stage.stage_index, micro_batch)
                self._timed.close()
                self._in_action = True
                try:
                    with self._probes.clock.phase("forward" if kind == FORWARD else "backward", str(action)):
                        return method(micro_batch, *args, **kwargs)
                finally:
                    self._in_action = False
                    self._phase = "forward"
                    if kind != FORWARD:
                        self._enter("data")

            return watched

        stage.forward_one_chunk = timed(stage.forward_one_chunk, FORWARD)
        stage.backward_one_chunk = timed(stage.backward_one_chunk, BACKWARD)
        stage.backward_weight_one_chunk = timed(stage.backward_weight_one_chunk, BACKWARD_WEIGHT)

    @_guarded
    def close(self) -> None:
        """Stop watching; a step that waits for another optimizer ends here, and what has begun of one is left out."""
        if self._boundary is not None:
            self._end_at_boundary()
        for recording in filter(None, (self.first, self._recordings.present)):
            recording.end()
        self._timed.pop_all()
        self._phase = ""
        self._probes.settle()
        if self.config.script is not None:
            trace = self._probes.trace
            takes_scratch = trace.takes_scratch and self._device.type == "cpu"
            for text in unmeasured(takes_scratch, bool(trace.elsewhere), self._tracing.has_missed):
                self._events.write("note", text=text)

    def report(self) -> None:
        """Write all measurements, however the training has ended."""
        self._probes.close()
        write_footprint(self._events, self._probes, self.parameters)
        self._events.write("spans", spans=[span.to_dict() for span in self._probes.clock.spans()])
