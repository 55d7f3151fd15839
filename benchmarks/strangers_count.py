"""Independent count of a training script that runs without dlojz: the truth of `benchmarks/strangers.py`.

Copied as `sitecustomize.py` into a folder of PYTHONPATH, it is loaded by every Python process of a script, those that
the script starts itself included, and counts where `STRANGERS_COUNT` names a folder. Nothing of dlojz is imported, and
no way of counting is one of dlojz's:

- steps, losses, samples, tokens: what the script prints, one line `step K loss X samples N` for each step and process;
  a step ends with its line. `benchmarks/strangers.py` reads them from the output.
- peak: the log of torch's CPU allocator, all threads included, until the line of the last step.
- messages: torch's flight recorder; those between two ranks, which gloo does not record, by their methods.
- FLOPs: torch's registry of formulas, `torch.utils.flop_counter`; once in all, once without what runs under no_grad.
- states: storages of the parameters of modules that are called with gradients, their gradients, and the optimizers'
  tensors, at each update.

Each process writes `PID.json` into the folder at every step, as a process may end in any way.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import importlib
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER = "STRANGERS_COUNT"
STEP = re.compile(r"^step \d+\b")
LOGGED = re.compile(rb"C10 (?:alloc|deleted) \d+ bytes, total alloc (\d+) bytes|^(step|forward)$", re.MULTILINE)
DTYPES = {"Byte": "uint8", "Char": "int8"}
"""Types that the flight recorder calls by another name than torch does."""
PASSERS = ("torch.distributed.run", "resource_tracker", "torch.distributed.launcher", "_inductor", "forkserver")
"""Words in the commands of processes that only start others."""


def storages_of(tensors: Iterable[Any]) -> dict[int, int]:
    """List the storages of tensors and their bytes, each once; of a sharded tensor the rank's part."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        shard = getattr(tensor, "ds_tensor", None)  # DeepSpeed ZeRO-3 leaves an empty parameter
        local = shard if shard is not None else getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return storages


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Sum the storages of tensors, each once."""
    return sum(storages_of(tensors).values())


class Count:
    """Count of one process.

    Args:
        folder: where its file is written.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        self._torch: Any = torch
        self._folder = folder
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.begin()

    def begin(self) -> None:
        """Begin the count of this process, which may be the fork of one that counts."""
        self.flops = self.trained_flops = 0
        self._step_flops: list[int] = []
        self._step_trained_flops: list[int] = []
        self._step_ends_ns: list[int] = []
        self._point_to_point: list[tuple[int, str, int]] = []
        self._largest: dict[str, int] = {}
        self._first_forward: dict[str, int] = {}
        self._after_forward: dict[int, int] = {}
        self._modules.clear()
        self._optimizers.clear()
        log = os.open(self._folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        os.close(log)

    def called(self, module: Any, inputs: Any) -> None:
        """Note a module that is called with gradients and has something to train."""
        if module in self._modules or not self._torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            if not self._first_forward:
                batch = [leaf for leaf in self._torch.utils._pytree.tree_leaves(inputs) if hasattr(leaf, "numel")]
                tensors = (*module.parameters(), *module.buffers(), *batch)
                self._first_forward = {"expected_bytes": storage_bytes(tensors)}
                os.write(2, b"\nforward\n")
            self._modules.add(module)

    def returned(self, module: Any, *_: Any) -> None:
        """Note the weights after a forward pass: FSDP keeps those of its root whole until backward."""
        if module in self._modules and self._torch.is_grad_enabled():
            self._after_forward = storages_of(module.parameters())  # of the outermost in the end

    def updating(self, optimizer: Any, *_: Any) -> None:
        """Measure the states before or after an update; the largest sums are kept."""
        self._optimizers.add(optimizer)
        modules = list(self._modules)
        weights = [parameter for module in modules for parameter in module.parameters()]
        updated = [
            parameter for each in self._optimizers for group in each.param_groups for parameter in group["params"]
        ]
        gradients = [parameter.grad for parameter in (*weights, *updated) if parameter.grad is not None]
        leaves = self._torch.utils._pytree.tree_leaves([dict(each.state) for each in self._optimizers])
        states = [leaf for leaf in leaves if isinstance(leaf, self._torch.Tensor)]
        keys = {id(parameter) for parameter in (*weights, *updated)}
        states = [state for state in states if id(state) not in keys]
        sizes = {
            "weights": storage_bytes(weights or updated),
            "weights_after_forward": sum((self._after_forward | storages_of(weights or updated)).values()),
            "gradients": storage_bytes(gradients),
            "optimizer": storage_bytes(states),
            "buffers": storage_bytes(buffer for module in modules for buffer in module.buffers()),
            # In memory that processes share, which is none of the allocator's.
            "shared": storage_bytes(tensor for tensor in (*weights, *gradients, *states) if tensor.is_shared()),
        }
        self._largest = {name: max(size, self._largest.get(name, 0)) for name, size in sizes.items()}

    def sent(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Wrap a method of a process group that sends to one rank, or receives from it."""

        @functools.wraps(method)
        def counted(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self._point_to_point.append((time.time_ns(), kind, size))
            return method(group, tensors, *args, **kwargs)

        return counted

    def printing(self, plain: Callable[..., None]) -> Callable[..., None]:
        """Wrap `print`: a line that begins with `step` and a number ends a step of this process."""

        @functools.wraps(plain)
        def printed(*values: Any, **options: Any) -> None:
            plain(*values, **options)
            if values and STEP.match(" ".join(map(str, values))):
                os.write(2, b"\nstep\n")
                self._step_ends_ns.append(time.time_ns())
                self._step_flops.append(self.flops)
                self._step_trained_flops.append(self.trained_flops)
                self.flops = self.trained_flops = 0
                self.write()

        return printed

    def _messages(self) -> list[tuple[int, str, int]]:
        """List all messages: when they were handed over, their collective, bytes."""
        recorded = json.loads(self._torch._C._distributed_c10d._dump_fr_trace_json())
        messages = list(self._point_to_point)
        resolve = self._torch._C._distributed_c10d._resolve_process_group
        for entry in recorded.get("entries", ()):
            with contextlib.suppress(Exception):  # a group that is gone, or is not named so
                if resolve(entry["process_group"][0]).size() == 1:  # nobody to send to
                    continue
            collective = entry["profiling_name"].partition(":")[2]
            way = "output" if collective == "all_gather" else "input"
            size = 0
            for shape, dtype in zip(entry[f"{way}_sizes"], entry[f"{way}_dtypes"], strict=True):
                item_bytes = getattr(self._torch, DTYPES.get(dtype, dtype.lower())).itemsize
                for length in shape:
                    item_bytes *= length
                size += item_bytes
            messages.append((entry["time_created_ns"], collective, size))
        return messages

    def write(self) -> None:
        """Write what was counted until now."""
        steps: list[dict[str, int]] = [{} for _ in self._step_ends_ns]
        for time_ns, collective, size in self._messages():
            number = sum(end_ns < time_ns for end_ns in self._step_ends_ns)
            if number < len(steps):
                steps[number][collective] = steps[number].get(collective, 0) + size
        dist = self._torch.distributed
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        counts = {
            "rank": rank,
            "step_flops": self._step_flops,
            "step_trained_flops": self._step_trained_flops,
            "step_messages": steps,
            "largest": self._largest,
            **self._first_forward,
        }
        temporary = self._folder / f"{os.getpid()}.tmp"
        temporary.write_text(json.dumps(counts))
        temporary.replace(self._folder / f"{os.getpid()}.json")


def allocator_peaks(log: bytes) -> tuple[int, list[int]]:
    """Read a log of torch's allocator: bytes held at the first forward pass, and at most within each step.

    The first step begins with the process.
    """
    held = first = largest = 0
    peaks = []
    for found in LOGGED.finditer(log):
        if found[1]:
            held = int(found[1])
            largest = max(largest, held)
        elif found[2] == b"forward":
            first = first or held
        else:
            peaks.append(largest)
            largest = held
    return first, peaks


def log_allocations(torch: Any) -> None:
    """Have torch's CPU allocator log what it gives and takes back, with the sum that is held.

    Source: torch 2.13, `c10/core/CPUAllocator.cpp`, `ProfiledCPUMemoryReporter`; the names are those of its flags in
    the library, without and with gflags.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 0


def cpu_formulas(torch: Any, counter: Any) -> dict[Any, Callable[..., int]]:
    """FLOPs of what runs on a CPU by kernels of its own, for which torch has no formulas: attention, recurrent layers.

    A recurrent layer multiplies each position by both weights, `w_input` (gates × inputs) and `w_hidden`; its backward
    pass makes two such products of each, as that of any linear layer does.
    """
    aten = torch.ops.aten

    def recurrent(x: Any, w_input: Any, w_hidden: Any, *_: Any, **__: Any) -> int:
        return 2 * int(x.shape[0] * x.shape[1]) * (w_input.numel() + w_hidden.numel())

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: counter.sdpa_flop_count(
            q.shape, k.shape, v.shape
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            counter.sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
        ),
        aten.mkldnn_rnn_layer: recurrent,
        aten.mkldnn_rnn_layer_backward: lambda *inputs, **__: 2 * recurrent(*inputs[:3]),
    }


def flop_mode(torch: Any, count: Count) -> Any:
    """Make a mode that adds up the FLOPs of each operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counter: Any = importlib.import_module("torch.utils.flop_counter")
    formulas = {**counter.flop_registry, **cpu_formulas(torch, counter)}
    plain = {torch.ops.prim.device.default, torch.ops.aten.size.default, torch.ops.prim.layout.default}

    class FlopMode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
                return NotImplemented  # its local operations come by
            packet = getattr(func, "_overloadpacket", None)
            if packet not in formulas and func not in plain and isinstance(func, torch._ops.OpOverload):
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            result = func(*args, **kwargs)
            if packet in formulas:
                flops = formulas[packet](*args, **kwargs, out_val=result)
                count.flops += flops
                if torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
                    count.trained_flops += flops
            return result

    made: Any = FlopMode
    return made()


def install(folder: Path) -> None:
    """Count in this process."""
    import torch
    import torch.distributed as dist
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    count = Count(folder)
    os.register_at_fork(after_in_child=count.begin)
    log_allocations(torch)
    builtins.print = count.printing(builtins.print)
    register_module_forward_pre_hook(count.called)
    register_module_forward_hook(count.returned)
    register_optimizer_step_pre_hook(count.updating)
    register_optimizer_step_post_hook(count.updating)
    for kind in ("send", "recv"):
        setattr(dist.ProcessGroup, kind, count.sent(getattr(dist.ProcessGroup, kind), kind))
    flop_mode(torch, count).__enter__()
    run = threading.Thread.run

    def counted_run(self: threading.Thread) -> None:
        with flop_mode(torch, count):
            run(self)

    threading.Thread.run = counted_run  # type: ignore[method-assign]


if os.environ.get(FOLDER) and not any(word in " ".join(sys.orig_argv) for word in PASSERS):
    install(Path(os.environ[FOLDER]))
