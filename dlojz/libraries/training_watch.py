"""Watch a training from outside: the objects and calls of whoever trains, reported to the probes.

What trains runs the same with and without its watch, which reads its objects, the calls of the outermost modules,
backward, and the optimizers' steps.

A step is an optimizer's step; with several optimizers it ends with the last of those that are stepped in turn. Several
backward passes before it are gradient accumulation. An update that a gradient scaler, or DeepSpeed's, leaves out ends a
step too. Where optimizers update within backward, as soon as a gradient is there, a step is one backward pass. The loss
is the number that backward is called on, before a gradient scaler multiplies it: of a step with several it is their
mean, or their sum where each was multiplied or divided by a number, as accumulation does it. Of an optimizer that
evaluates a closure more than once (L-BFGS), it is the first value.

The first steps, which are traced, run as if `torch.compile` were not there, since torch compiles nothing under a
dispatch mode, and refuses `fullgraph=True` there: memory and FLOPs are those of eager mode, times those of the compiled
one.

Source: torch 2.13, `optim/optimizer.py`, `profile_hook_step` (hooks of all optimizers); `amp/grad_scaler.py`, `step`;
`nn/modules/module.py`, `_call_impl`; `_dynamo/eval_frame.py`, `compile_wrapper`, which puts the dispatch keys back
after each call, so that no mode can be left within one. DeepSpeed 0.19, `runtime/engine.py`, `_take_model_step`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._dynamo import eval_frame
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from dlojz.base.language import say
from dlojz.base.machine import rank_limit_bytes
from dlojz.config.run_config import RunConfig
from dlojz.hardware.gpus import device_of_driver
from dlojz.libraries.first_step import FirstStep, Replacements, num_parameters, schedule_stages
from dlojz.libraries.library_catalogue import LIBRARIES
from dlojz.libraries.seen_engines import SeenDeepSpeed, SeenTorch, mesh_groups, seen, uncompiled
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.results.footprint import Overlap
from dlojz.results.record import EventLog, Status
from dlojz.train.loop import GROUP_TIMEOUT, align_clocks, describe_device, report_measured, write_footprint
from dlojz.train.probes import Probes

MOST_UPDATES = 16
"""Updates after which a step ends although some optimizer has not been stepped: the script does not use it."""
_TOKEN_DIMS = 2
"""Whole numbers of samples × positions are tokens."""
_SCALED = ("DivBackward0", "MulBackward0")
_SENDING = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of a process group that send or receive, by their names in all versions of torch that the lab takes."""


@dataclass
class _Message:
    left_s: float
    arrived_s: float | None = None


class MessageTimes:
    """Clock of the messages that a program's own calls send in the present step, from departure to arrival; on the CPU.

    A call of `torch.distributed` hands a message to its process group and gets a handle. While a rank waits on a
    handle, its communication is exposed; what travels while it computes is hidden. Messages that torch sends without
    Python (DDP's reducer, which has its own clock; DTensors' functional collectives) are not seen: `compare` takes the
    number that the probes have counted in a traced step, and unless it is the number of those that were timed, nothing
    is reported. Seconds are of `time.perf_counter`.

    Source: torch 2.13, `distributed/distributed_c10d.py`: `work.wait()` at the end of each call unless `async_op`.
    """

    def __init__(self) -> None:
        self._sees_all = False
        self._messages: list[_Message] = []
        self._waits: list[tuple[float, float]] = []
        self._of_handle: weakref.WeakKeyDictionary[Any, _Message] = weakref.WeakKeyDictionary()

    def install(self, undo: Replacements) -> None:
        """Time all messages from now on, until the context ends."""
        # Where `torch.compile` meets a wrapper, it breaks its graph, and the wrapper is called.
        plain = torch.compiler.disable
        for name in _SENDING:
            if hasattr(dist.ProcessGroup, name):
                undo.put(dist.ProcessGroup, name, plain(self._sending(getattr(dist.ProcessGroup, name))))
        undo.put(Work, "wait", plain(self._waiting(Work.wait)))

    def _sending(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def sent(*args: Any, **kwargs: Any) -> Any:
            message = _Message(time.perf_counter())
            handle = method(*args, **kwargs)
            if handle is None:  # a message that a group of the program's own puts off: counted, but not timed
                return None
            self._messages.append(message)
            self._of_handle[handle] = message
            if getattr(args[-1], "asyncOp", True):  # else the caller waits at once
                # A message between two ranks has no future: it has arrived when the wait for it is over.
                with contextlib.suppress(RuntimeError):
                    handle.get_future().add_done_callback(functools.partial(_arrive, message))
            return handle

        return sent

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def waited(handle: Any, *args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return method(handle, *args, **kwargs)
            finally:
                self._waits.append((start_s, time.perf_counter()))
                if (message := self._of_handle.get(handle)) is not None:
                    _arrive(message)

        return waited

    def compare(self, counted: int) -> None:
        """Note whether as many messages were timed in the present step as the probes have counted in it, and any."""
        self._sees_all = 0 < counted == len(self._messages)

    def overlap(self) -> Overlap | None:
        """Return the overlap of the step's messages with its computing; None where not all are seen."""
        now_s = time.perf_counter()
        # One that is still under way, or whose arrival nobody saw, is counted until now.
        intervals = tuple((one.left_s, one.arrived_s or now_s) for one in self._messages)
        return Overlap(intervals, tuple(self._waits)) if self._sees_all else None

    def clear(self) -> None:
        """Begin another step."""
        self._messages, self._waits = [], []


def _arrive(message: _Message, *_: Any) -> None:
    """Note that a message has arrived, by whoever sees it first."""
    if message.arrived_s is None:
        message.arrived_s = time.perf_counter()


def keywords_of_call() -> dict[str, Any]:
    """Return the keyword arguments of the module call whose hook calls this: torch gives global hooks none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == nn.modules.module.__file__:
            found = frame.f_locals.get("kwargs")
            return found if isinstance(found, dict) else {}
    return {}


class TrainingWatch:
    """Watch of one rank's training, which knows nothing of it.

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
        self.untrained_calls = self.backward_calls = 0
        """Calls of modules without gradients, and of backward, before the first step."""
        self.processes = 0
        """Processes that the script has started itself, in which nothing is watched."""
        self._made = 0
        """Optimizers made."""
        self._probes.global_batch = None
        self._thread = threading.get_ident()
        self._kinds: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        """Whether a module is an outermost one that is trained, where that is known."""
        self._models: list[nn.Module] = []
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._unused: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._updated: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._updating: object = None
        """Optimizer that updates, or DeepSpeed's engine."""
        self._updates = 0
        self._in_action = False
        """Whether a pipeline's action runs, which is one phase."""
        self._in_backward = False
        """Whether an optimizer has updated within the present backward pass."""
        self._usual_forwards = 1
        """Forward passes of the step before."""
        self._samples = self._tokens = 0
        self._losses: list[tuple[Tensor, bool]] = []
        self._scaled: tuple[weakref.ref[Tensor], Tensor, bool] | None = None
        self._met = False
        self.first = FirstStep(device.type)
        self._messages = MessageTimes()

    def time_messages(self, undo: Replacements) -> None:
        """Time the messages of the training from now on; on a GPU the host's waits tell nothing."""
        if self._device.type == "cpu":
            self._messages.install(undo)

    def meet(self) -> None:
        """Align the ranks' clocks, once, when all have joined the script's process group."""
        if self._met or not dist.is_initialized() or dist.get_world_size() != int(os.environ["WORLD_SIZE"]):
            return
        self._met = True
        if dist.get_world_size() > 1:
            control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
            align_clocks(self._probes, control, self._events)
            dist.destroy_process_group(control)

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer of the script's."""
        self._optimizers.add(optimizer)
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
        if torch.compiler.is_compiling():
            return
        kind = self._kinds.get(module)
        if kind is False or threading.get_ident() != self._thread or get_worker_info() is not None:
            return
        if not torch.is_grad_enabled():
            self.untrained_calls += kind is None
            return
        if not (kind or self._is_trained(module)) or self._phase in ("backward", ""):  # within it, or recomputed
            return
        self._forwards += 1
        self._enter("forward")
        self._batch = [leaf for leaf in tree_leaves((inputs, keywords_of_call())) if isinstance(leaf, Tensor)]
        self._probes.loaded(*self._batch)
        if module is self._models[0] and self._batch and self._batch[0].ndim:
            self._samples += self._batch[0].size(0)
            if self._batch[0].ndim == _TOKEN_DIMS and not self._batch[0].is_floating_point():
                self._tokens += self._batch[0].numel()

    def _is_trained(self, module: nn.Module) -> bool:
        """Whether a module of an unknown kind is an outermost one that is trained, and is so from now on."""
        parameters = list(module.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            if not parameters:
                self._kinds[module] = False
            return False  # frozen now: it may be trained later
        for part in module.modules():
            self._kinds[part] = False
        self._kinds[module] = True
        self._train([*(model for model in self._models if self._kinds.get(model)), module])
        return True

    def _train(self, models: list[nn.Module]) -> None:
        """Attach the probes to the outermost modules that are trained, and begin the first step with them."""
        self._models, before = models, self.engine
        self.engine = engine = seen(self.config, models[0], self._device)
        if isinstance(engine, SeenTorch):
            engine.others = tuple(models[1:])
        engine.optimizers = before.optimizers if before else []
        self._probes.attach(engine)
        library = LIBRARIES.get(self.config.library)
        told = {"library": f"{library.title} {library.version}".strip()} if library else {}
        device = describe_device(self._device)
        self._events.write("device", device=device, wrapped_in=type(uncompiled(models[0])).__name__, **told)
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
            optimizer = engine.basic_optimizer
            self.stepped(optimizer)
            self._updating = engine
            try:
                result = update(*args, **kwargs)
            finally:
                self._updating = None
            self._updated.add(optimizer)
            self._unused.discard(optimizer)
            self._end_update()
            return result

        engine._take_model_step = watched

    def _is_elsewhere(self) -> bool:
        """Whether this thread trains nothing; within backward, torch's own threads call hooks for the one that does."""
        return threading.get_ident() != self._thread and not self._depth

    def _is_prepared(self) -> bool:
        """Whether an optimizer's states are made by an update, before anything was trained: DeepSpeed and DCP do so.

        Source: DeepSpeed 0.19, `runtime/zero/stage_1_and_2.py`; torch 2.13, `distributed/checkpoint/state_dict.py`.
        """
        frame = None if self.step or self.backward_calls else sys._getframe()
        while frame is not None and frame.f_code.co_name not in ("initialize_optimizer_states", "_init_optim_state"):
            frame = frame.f_back
        return frame is not None

    def stepped(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Begin an update; one within another belongs to it, and one within backward to that."""
        if self._is_elsewhere() or self._is_prepared():
            return
        if self.engine is None:  # a model that is no module, or is called in its parts
            held = [one for group in optimizer.param_groups for one in group["params"]]
            self._train([nn.ParameterList(held)])
        assert self.engine is not None
        if optimizer not in self.engine.optimizers:
            self.engine.optimizers.append(optimizer)
        self.first.before_update(within_backward=self._depth > 0)
        if self._updating is None and not self._depth:
            self._updating = optimizer
            if self._phase != "optimizer":  # which begins when backward ends
                self._enter("optimizer")

    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End an update, and the step if no other optimizer is to follow."""
        if self._is_elsewhere() or self._is_prepared():
            return
        self._updated.add(optimizer)
        self._unused.discard(optimizer)
        if self._depth:
            self._in_backward = True
        elif optimizer is self._updating:
            self._updating = None
            self._end_update()

    def _end_update(self) -> None:
        """End the step, unless another optimizer is to follow."""
        self._updates += 1
        missing = self._missing()
        if missing and self._updates < MOST_UPDATES:
            if not self._in_backward:
                self._losses.clear()  # the loss of the step is that of its last optimizer
            self._enter("data")
            return
        self._unused.update(missing)
        self._end_step()

    def _missing(self) -> list[torch.optim.Optimizer]:
        """Optimizers that have not been stepped yet, though they are used, and another does not update the same."""
        missing = [one for one in self._optimizers if one not in self._updated and one not in self._unused]
        if not missing:
            return []
        done = {id(one) for optimizer in self._updated for one in _updated_by(optimizer)}
        return [optimizer for optimizer in missing if any(id(one) not in done for one in _updated_by(optimizer))]

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
            if isinstance(outputs, Tensor) and isinstance(result, Tensor):
                self._scaled = (weakref.ref(result), outputs.detach(), _is_part(outputs))
            return result

        return watched

    def backwards(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call for backward, and note the loss that it is called on; calls within it are part of it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            if self._depth == 0:
                self.backward_calls += 1
                self.first.before_backward(args[0] if args else None)
                self._note_loss(args[0] if args else None)
                if self._phase:
                    self._enter("backward")
            self._depth += 1
            try:
                result = method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0 and self._phase == "backward":
                    self._enter("optimizer" if self._forwards == self._usual_forwards else "data")
            if self._depth == 0 and self._in_backward:
                self._end_update()
                self._in_backward = False
            return result

        return watched

    def _note_loss(self, loss: object) -> None:
        if isinstance(loss, list | tuple) and len(loss) == 1:  # torch's pipelines call it so
            loss = loss[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        if self._updating is not None and self._losses:  # a closure that is evaluated again
            return
        if self._scaled is not None and self._scaled[0]() is loss:
            self._losses.append(self._scaled[1:])
        else:
            self._losses.append((loss.detach(), _is_part(loss)))
        self._scaled = None

    def _loss(self) -> float | None:
        """The loss of the step; None where none was seen."""
        values = [float(value.float()) for value, _ in self._losses]
        if not values:
            return None
        parts = all(scaled for _, scaled in self._losses)
        self._losses.clear()
        return math.fsum(values) if parts else statistics.fmean(values)

    def _end_step(self) -> None:
        assert self.engine is not None
        self._updates = 0
        replicas = self.engine.replicas or self._replicas_of_pipeline()
        if self._samples or not self._probes.global_batch:  # a forward pass compiled with its step is not seen
            self._probes.global_batch = replicas * self._samples if replicas and self._samples else None
        self._enter("")
        if self._probes.is_tracing:
            self._messages.compare(sum(call.step == self.step for call in self._probes.trace.trace.calls))
        if self.first.schedule is None:  # a pipeline's waits are its bubble
            self.engine.overlap = self._messages.overlap()
        loss = self._loss()
        step_s = self._probes.end_step()
        told: dict[str, float] = {"tokens": replicas * self._tokens} if replicas and self._tokens else {}
        if loss is not None and math.isfinite(loss):
            told["loss"] = loss
        self._events.write("step", step=self.step, step_s=step_s, **told)
        if loss is not None and not math.isfinite(loss):
            self.ended = ("diverged", f"the loss became {loss} at step {self.step}; the script went on.")
        report_measured(self._events, self._probes, self.step, self._probes.rank, self.parameters)
        self._usual_forwards = max(1, self._forwards)
        self._forwards = self._samples = self._tokens = 0
        self._updated.clear()
        self._batch = []
        self.step += 1
        if self.step == 1:
            self.predict()
            for stage in schedule_stages(self.first.schedule):
                self._time_actions(stage)
        self._messages.clear()
        self._probes.start_step(self.step)
        self._enter("data")

    def _replicas_of_pipeline(self) -> int | None:
        """Return 1 where a pipeline is all that divides the ranks: each of them sees every micro-batch."""
        stages = schedule_stages(self.first.schedule)
        return 1 if stages and stages[0].group_size == dist.get_world_size() else None

    def predict(self, limit_bytes: int | None = None) -> None:
        """Predict the run from its first step, on rank 0, or wherever memory has run out; the others wait for it.

        In a pipeline each rank predicts its own.

        Args:
            limit_bytes: 0 where memory has run out; by default that of a rank.
        """
        if not self.first.models:
            return
        from dlojz.libraries.script_prediction import predict_training  # which an older torch cannot import

        self.first.end()
        if self._probes.rank and limit_bytes is None and self.first.schedule is None:
            return
        on_gpu = self._device.type == "cuda"
        gpu = device_of_driver(torch.cuda.get_device_name(self._device)) if on_gpu else None
        if limit_bytes is None:
            limit_bytes = gpu.memory_bytes if gpu else rank_limit_bytes(self.config.layout.world_size)
        predicted = predict_training(
            self.config,
            self.first,
            [one for one in self._optimizers if one not in self._unused],
            gpu,
            on_gpu=on_gpu,
            groups=mesh_groups(self.first.models[0]),
            limit_bytes=limit_bytes,
        )
        self._events.write("prediction", prediction=predicted.to_dict())

    def _time_actions(self, stage: Any) -> None:
        """Time each action of a pipeline's stage, without what is received before it and sent after it."""

        def timed(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def watched(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
                own = kind if kwargs.get("full_backward", True) else BACKWARD_INPUT
                action = Action(own, stage.stage_index, micro_batch)
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

    def close(self) -> None:
        """Stop watching; what has begun of another step is left out, if there was one before."""
        if self._updates and self.step == 0:
            self._end_step()
        self._timed.pop_all()
        self._phase = ""
        self._probes.settle()

    def report(self) -> None:
        """Write all measurements, however the training has ended."""
        self._probes.close()
        write_footprint(self._events, self._probes, self.parameters)
        self._events.write("spans", spans=[span.to_dict() for span in self._probes.clock.spans()])

    def saw(self) -> str:
        """Say what the script was seen to do, where no optimizer made a step."""
        without, backward, made = self.untrained_calls, self.backward_calls, self._made
        if backward and made:
            return say(
                en=f"backward was called {backward} times and optimizers made: {made}, but none was stepped",
                fr=f"backward a été appelé {backward} fois et optimiseurs créés : {made}, mais aucun n’a fait de pas",
            )
        if backward:
            return say(
                en=f"backward was called {backward} times, but no optimizer of torch was made",
                fr=f"backward a été appelé {backward} fois, mais aucun optimiseur de torch n’a été créé",
            )
        if self._forwards:
            return say(
                en=f"forward passes of a model with gradients: {self._forwards}, but backward was never called",
                fr=f"passes forward d’un modèle avec gradients : {self._forwards}, mais backward n’a jamais été appelé",
            )
        if without:
            return say(
                en=f"modules were called {without} times, always without gradients, as under torch.no_grad()",
                fr=f"des modules ont été appelés {without} fois, toujours sans gradients, comme sous torch.no_grad()",
            )
        if self.processes:
            return say(
                en=f"no model of torch was called in it, and the {self.processes} processes that it started itself are "
                "not watched: start them with --nproc",
                fr=f"aucun modèle de torch n’y a été appelé, et les {self.processes} processus qu’il a lancés lui-même "
                "ne sont pas observés : lancez-les par --nproc",
            )
        return say(en="no model of torch was called", fr="aucun modèle de torch n’a été appelé")


def _is_part(loss: Tensor) -> bool:
    """Whether a loss was multiplied or divided by a number, as that of one micro-batch of several is."""
    return type(loss.grad_fn).__name__ in _SCALED


def _updated_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what an optimizer updates."""
    return (one for group in optimizer.param_groups for one in group["params"])


def eager_while_traced(compiling: Callable[..., Any], watch: TrainingWatch, probes: Probes) -> Callable[..., Any]:
    """Wrap what makes a compiled function: it calls the function itself as long as the probes trace.

    Afterwards a module that was compiled in place (`module.compile()`) calls no hook: it is reported here.
    """

    def made(context: Any, function: Any) -> Any:
        compiled = compiling(context, function)
        if isinstance(function, nn.Module | type):
            return compiled
        owner = getattr(function, "__self__", None)

        @functools.wraps(compiled)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if probes.is_tracing:
                return function(*args, **kwargs)
            if isinstance(owner, nn.Module):
                watch.called(owner, args)
            return compiled(*args, **kwargs)

        chosen._torchdynamo_wrapper_id = id(chosen)  # type: ignore[attr-defined]  # by which torch unwraps it
        return chosen

    return made


@contextlib.contextmanager
def watching(watch: TrainingWatch, probes: Probes) -> Iterator[Replacements]:
    """Watch everything that is called within this context; afterwards all is as before."""
    # Where `torch.compile` meets a wrapper or an optimizer's hook, it breaks its graph, and both are called.
    plain = torch.compiler.disable
    with Replacements() as undo:

        def then(method: Callable[..., Any], note: Callable[..., Any], *, with_self: bool) -> Callable[..., Any]:
            @functools.wraps(method)
            def followed(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                note(*args[: int(with_self)])
                return result

            return followed

        for owner in (dist, distributed_c10d, device_mesh):
            if hasattr(owner, "init_process_group"):
                joined = then(owner.init_process_group, watch.meet, with_self=False)
                undo.put(owner, "init_process_group", joined)
        made = then(torch.optim.Optimizer.__init__, watch.made, with_self=True)
        undo.put(torch.optim.Optimizer, "__init__", made)
        undo.put(BaseProcess, "start", then(BaseProcess.start, watch.began_process, with_self=False))
        undo.put(subprocess.Popen, "__init__", then(subprocess.Popen.__init__, watch.began_process, with_self=False))
        if not watch.first.over:
            watch.first.watch()
        compiling = eager_while_traced(eval_frame.OptimizeContext.__call__, watch, probes)
        undo.put(eval_frame.OptimizeContext, "__call__", compiling)
        undo.put(fetch._MapDatasetFetcher, "fetch", while_loading(probes, fetch._MapDatasetFetcher.fetch))
        undo.put(torch.Tensor, "backward", plain(watch.backwards(torch.Tensor.backward)))
        undo.put(torch.autograd, "backward", plain(watch.backwards(torch.autograd.backward)))
        undo.put(torch.amp.GradScaler, "step", plain(watch.scaler_step(torch.amp.GradScaler.step)))
        undo.put(torch.amp.GradScaler, "scale", plain(watch.scaler_scale(torch.amp.GradScaler.scale)))
        watch.time_messages(undo)
        undo.callback(register_module_forward_pre_hook(watch.called).remove)
        undo.callback(register_optimizer_step_pre_hook(plain(watch.stepped)).remove)
        undo.callback(register_optimizer_step_post_hook(plain(watch.after_update)).remove)
        undo.callback(watch.close)
        undo.callback(watch.first.end)
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        yield undo


def while_loading(probes: Probes, read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads samples, whose memory is none of the training's."""

    def reading(*args: Any, **kwargs: Any) -> Any:
        with probes.loading():
            return read(*args, **kwargs)

    return reading
