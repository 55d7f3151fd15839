"""torch.distributed's Python functions, wrapped so that each call passes by the guard.

Arguments and results are torch's own; `__wrapped__` is the function that was there before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dlojz.processes.status_board import WAITER


class _Guard(Protocol):
    """What a wrapped call asks of the guard (`dlojz.processes.guard.Guard`)."""

    rank: int
    torn: bool

    def enter_collective(self, group: str, members: list[int], call: dict[str, Any]) -> dict[str, Any]: ...

    def enter_message(self, channel: str, peer: int, call: dict[str, Any]) -> dict[str, Any]: ...

    def receives_from_anyone(self) -> None: ...

    def wait(self, call: dict[str, Any], done: threading.Event, limit_s: float | None) -> None: ...

    def explain_failure(self, error: BaseException) -> None: ...



# The argument whose elements must be as many on every rank; an all-to-all may split unevenly, a barrier has none.
_ALIKE = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "gather": "tensor",
    "scatter": "tensor",
    "all_to_all": "",
    "all_to_all_single": "",
    "barrier": "",
}
COLLECTIVES = tuple(_ALIKE)
MESSAGES = ("send", "recv", "isend", "irecv")


def wrap_torch(guard: _Guard) -> Callable[[], None]:
    """Wrap the functions in this process; what is returned gives torch its own back."""
    originals = {name: getattr(distributed_c10d, name) for name in (*COLLECTIVES, *MESSAGES)}
    wrapping = _Wrapping(guard, originals)
    _set({name: wrapping.wrapped(name) for name in originals})
    return lambda: _set(originals)


def rebind(namespace: dict[str, Any]) -> None:
    """Let names that already held torch's functions (`from torch.distributed import all_reduce`) hold the wrapped."""
    wrapped = {getattr(dist, name) for name in (*COLLECTIVES, *MESSAGES)}
    of_torch = {function.__wrapped__: function for function in wrapped if hasattr(function, "__wrapped__")}
    for name, value in list(namespace.items()):
        if callable(value) and getattr(value, "__module__", None) == distributed_c10d.__name__:
            namespace[name] = of_torch.get(value, value)


def _set(functions: dict[str, Callable[..., Any]]) -> None:
    for name, function in functions.items():
        for module in (dist, distributed_c10d):
            setattr(module, name, function)


class _Wrapping:
    def __init__(self, guard: _Guard, originals: dict[str, Callable[..., Any]]) -> None:
        self._guard, self._originals, self._inside = guard, originals, threading.local()

    def wrapped(self, name: str) -> Callable[..., Any]:
        original = self._originals[name]
        signature = inspect.signature(original)
        enter = self._message if name in MESSAGES else self._collective

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            group = given.arguments["group"] or dist.group.WORLD
            if getattr(self._inside, "call", False) or group is None or dist.get_rank(group) < 0:
                return original(*args, **kwargs)
            # torch hands the works that it asks for to its own C++, which takes no other.
            by_torch = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
            self._inside.raw = by_torch and bool(given.arguments.get("async_op"))
            self._inside.call = True  # what torch's function calls in turn is part of this call
            try:
                return enter(name, given.arguments, group)
            finally:
                self._inside.call = False

        return guarded

    def _collective(self, name: str, given: dict[str, Any], group: Any) -> Any:
        described = {"op": name, "how": _how(given, group), **_described(given.get(_ALIKE[name]))}
        call = self._guard.enter_collective(group.group_name, dist.get_process_group_ranks(group), described)
        asynchronous = given["async_op"]
        work = self._called(name, {**given, "async_op": True})
        if work is None:
            return None
        guarded = GuardedWork(self._guard, work, call, _on_host(given))
        if asynchronous:
            return work if self._inside.raw else guarded
        guarded.wait()
        return None

    def _message(self, name: str, given: dict[str, Any], group: Any) -> Any:
        sends = name.endswith("send")
        side = "dst" if sends else "src"
        me, peer = self._guard.rank, given[side]
        if given[f"group_{side}"] is not None:
            peer = dist.get_global_rank(group, given[f"group_{side}"])
        if peer is None and not sends:
            # From anyone: whose message it is turns out later or, for irecv, never; nothing can be compared then.
            self._guard.receives_from_anyone()
            return self._called(name, given)
        if peer == me or peer not in dist.get_process_group_ranks(group):
            return self._called(name, given)  # a mistake that torch itself refuses
        source, target = (me, peer) if sends else (peer, me)
        channel = f"{group.group_name}|{source}>{target}|{given['tag']}"
        described = {"op": "send" if sends else "recv", "how": "", **_described(given["tensor"])}
        call = self._guard.enter_message(channel, peer, described)
        # Also a blocking call waits under the guard's eye.
        work = GuardedWork(self._guard, self._called("isend" if sends else "irecv", given), call, _on_host(given))
        if name in ("isend", "irecv"):
            return work
        work.wait()
        return None if sends else peer

    def _called(self, name: str, given: dict[str, Any]) -> Any:
        try:
            return self._originals[name](**given)
        except Exception:
            self._guard.torn = True  # the board says that this rank has called; torch has refused
            raise


class GuardedWork:
    """torch's `Work`, whose `wait` looks at the other ranks; all else is the work's own."""

    def __init__(self, guard: _Guard, work: Any, call: dict[str, Any], on_host: bool) -> None:
        self._guard, self._work, self._call, self._on_host = guard, work, call, on_host
        self._finished = False

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the call is done; `timeout` (a timedelta) takes the place of the guard's limit.

        Raises:
            CollectiveFault: if it cannot come to its end.
        """
        if self._finished:
            return True
        if not self._on_host:
            self._finished = True
            return bool(self._work.wait())
        done, errors = threading.Event(), list[BaseException]()

        def wait() -> None:
            try:
                self._work.wait()
            except BaseException as error:  # handed over to the rank's own thread
                errors.append(error)
            done.set()

        # gloo's own wait cannot be interrupted: it waits in a thread, this one stays free to look and to stop.
        threading.Thread(target=wait, daemon=True, name=WAITER).start()
        self._guard.wait(self._call, done, timeout.total_seconds() if timeout else None)
        if errors:
            self._guard.explain_failure(errors[0])
        self._finished = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finished or bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _how(given: dict[str, Any], group: Any) -> str:
    """Root and operation of a call, in words; empty where it has none."""
    words = []
    for side in ("src", "dst"):
        if side in given:
            root = given[side]
            if given.get(f"group_{side}") is not None:
                root = dist.get_global_rank(group, given[f"group_{side}"])
            words.append(f"{side}={0 if root is None else root}")
    if "op" in given:
        words.append(f"op={str(given['op']).rpartition('.')[2]}")
    return ", ".join(words)


def _described(tensor: Any) -> dict[str, Any]:
    if not isinstance(tensor, Tensor):
        return {"numel": 0, "shape": "", "dtype": ""}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"numel": tensor.numel(), "shape": str(list(tensor.shape)), "dtype": dtype}


def _on_host(given: dict[str, Any]) -> bool:
    """Whether the call is over when the host has waited for it: not with NCCL, which waits on the device."""
    lists = [value for value in given.values() if isinstance(value, list)]
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    tensors += [value for values in lists for value in values if isinstance(value, Tensor)]
    return all(tensor.device.type == "cpu" for tensor in tensors) if tensors else not torch.cuda.is_initialized()
