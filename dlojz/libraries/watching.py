"""Watch everything that a training calls: its modules, backward, optimizers, compiled functions and loaders of samples.

Within the context the calls of torch are wrapped; afterwards all is as before. The wrappers know nothing of steps: they
report to the `TrainingWatch`.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import eval_frame
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data._utils import fetch

from dlojz.libraries.scripts.first_step import Replacements
from dlojz.libraries.training_watch import TrainingWatch
from dlojz.train.probes import Probes


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
            # Under the probes' dispatch mode torch compiles nothing: the function itself is called.
            if probes.is_tracing:
                return function(*args, **kwargs)
            if not isinstance(owner, nn.Module):
                return compiled(*args, **kwargs)
            watch.called(owner, args)
            result = compiled(*args, **kwargs)
            watch.returned(owner, args, result)
            return result

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

        # Three modules hold the function under this name.
        for owner in (dist, distributed_c10d, device_mesh):
            if hasattr(owner, "init_process_group"):
                joined = then(owner.init_process_group, watch.meet, with_self=False)
                undo.put(owner, "init_process_group", joined)
        init = then(torch.optim.Optimizer.__init__, watch.made, with_self=True)
        undo.put(torch.optim.Optimizer, "__init__", init)
        undo.put(BaseProcess, "start", then(BaseProcess.start, watch.began_process, with_self=False))
        undo.put(subprocess.Popen, "__init__", then(subprocess.Popen.__init__, watch.began_process, with_self=False))
        for kind in (torch.optim.Optimizer, nn.Module):
            undo.put(kind, "zero_grad", plain(then(kind.zero_grad, watch.zeroed, with_self=True)))
        # The watch of a library's program has ended the recording: it predicts from the configuration.
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
        # Called where the module raises, too: no call is left open.
        undo.callback(register_module_forward_hook(watch.returned, always_call=True).remove)
        undo.callback(register_optimizer_step_pre_hook(plain(watch.stepped)).remove)
        undo.callback(register_optimizer_step_post_hook(plain(watch.after_update)).remove)
        # Put on the stack last, so that the watch closes before anything is put back.
        undo.callback(watch.close)
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        yield undo


def while_loading(probes: Probes, reader: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads samples, whose memory is none of the training's."""

    def reading(*args: Any, **kwargs: Any) -> Any:
        with probes.loading():
            return reader(*args, **kwargs)

    return reading
