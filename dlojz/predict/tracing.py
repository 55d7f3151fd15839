"""Forward and backward of any module without its memory: every storage, from its allocation to its release.

Layer 3. Invariant: autograd itself says what is kept and for how long, on fake tensors, which have shapes and no
memory; what is traced equals a real run on the CPU to the byte, as the same operators are called in the same order.
Nothing is allocated: a model of 400 billion parameters is traced within seconds.

Fake CPU tensors, not CUDA ones: without a GPU a fake CUDA tensor cannot run backward. What differs on a GPU is
corrected afterwards (`dlojz.predict.on_gpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from dlojz.predict.following import Allocation, Follower, Mark, Trace
from dlojz.predict.megatron_ways import megatron_ways
from dlojz.predict.on_gpu import cuda_ways
from dlojz.schema import LabError
from dlojz.text import say

Compute = Literal["fp32", "autocast", "bf16"]
"""fp32; bf16 products over fp32 weights; or weights and inputs in bf16 themselves."""
HalfType = torch.bfloat16


def trace(
    module: nn.Module,
    *inputs: Tensor,
    compute: Compute = "fp32",
    targets: Tensor | None = None,
    loss: Callable[..., Tensor] | None = None,
    around_forward: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    on_gpu: bool = False,
    in_megatron: bool = False,
) -> Trace:
    """What forward and backward of a module allocate, without allocating it.

    Args:
        module: any; on the meta device or a real one, where it stays untouched.
        inputs: what its forward takes, on the meta device or a real one; copied, not changed.
        compute: in which precision.
        targets: what the loss compares the output with; part of the micro-batch.
        loss: of the module's output (and of the targets), a scalar; by default the sum of all its numbers.
        around_forward: made of the module, and entered around its forward pass; what its `host_copies` lists after it
            counts as host memory.
        on_gpu: correct what a GPU does otherwise (see `dlojz.predict.on_gpu`).
        in_megatron: and what Megatron-core does (see `dlojz.predict.megatron_ways`).

    Raises:
        LabError: if forward depends on the values of its data, or does not fit the inputs.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _as_fake(module, mode, compute):
        ways = _ways(compute, on_gpu, in_megatron)
        return _traced(module, inputs, targets, compute, loss or _sum_of_all, around_forward, on_gpu, ways)


def _traced(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    targets: Tensor | None,
    compute: Compute,
    loss: Callable[..., Tensor],
    around_forward: Callable[[nn.Module], AbstractContextManager[Any]] | None,
    on_gpu: bool,
    ways: AbstractContextManager[Any],
) -> Trace:
    parameters = dict(module.named_parameters())
    follower = Follower()
    follower.on_gpu = on_gpu
    around = nullcontext() if around_forward is None else around_forward(module)
    follower.ignore([*parameters.values(), *module.buffers()])
    with ExitStack() as stack:
        for handle in _marks(module, follower, ways):
            stack.callback(handle.remove)
        stack.enter_context(follower)
        try:
            read = tuple(_fake_like(tensor) for tensor in inputs)
            compared = () if targets is None else (_fake_like(targets),)
            for tensor in (*read, *compared):
                follower.see(tensor)
            follower.phase = "forward"
            casts = compute == "bf16"
            batch = tuple(x.to(HalfType) if casts and x.is_floating_point() else x for x in read)
            with ways:
                with around, _autocast(compute):
                    output = module(*batch)
                value = loss(output, *compared)
            del output
            on_host = frozenset(follower.see(tensor) for tensor in getattr(around, "host_copies", list)())
            kept = frozenset(follower.live_bytes)
            follower.phase = "backward"
            value.backward()
        except LabError:
            raise
        except Exception as error:
            raise LabError(_refusal(error)) from error
    for parameter in parameters.values():
        parameter.grad = None
    return Trace(
        tuple(follower.events),
        kept,
        on_host,
        follower.bytes_of,
        follower.module_of,
        follower.output_of,
    )


def _ways(compute: Compute, on_gpu: bool, in_megatron: bool) -> AbstractContextManager[Any]:
    if in_megatron:
        return megatron_ways(compute, on_gpu=on_gpu)
    return cuda_ways(compute) if on_gpu else nullcontext()


def _sum_of_all(output: Any) -> Tensor:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise LabError(
            say(
                en="nothing in the module's output depends on its parameters, so there is no backward pass to trace: "
                "give loss=, a function of the output.",
                fr="rien, dans la sortie du module, ne dépend de ses paramètres : il n’y a pas de passe arrière à "
                "suivre. Donnez loss=, une fonction de la sortie.",
            )
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def _fake_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


def _autocast(compute: Compute) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", HalfType) if compute == "autocast" else nullcontext()


@contextmanager
def _as_fake(module: nn.Module, mode: FakeTensorMode, compute: Compute) -> Iterator[None]:
    """Put fake CPU tensors where the module's parameters and buffers are, and those back afterwards."""
    fakes: dict[int, Tensor] = {}
    former: list[tuple[dict[str, Any], str, Any]] = []
    owned: dict[str, Any]

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            dtype = HalfType if compute == "bf16" and tensor.is_floating_point() else tensor.dtype
            made = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = made
        return fakes[id(tensor)]

    try:
        for part in module.modules():
            for owned in (part._parameters, part._buffers):
                for name, tensor in owned.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        former.append((owned, name, tensor))
                        owned[name] = fake(tensor)  # type: ignore[assignment]
        yield
    finally:
        for owned, name, tensor in former:
            owned[name] = tensor


def _marks(module: nn.Module, follower: Follower, ways: AbstractContextManager[Any]) -> Iterator[Any]:
    """Hooks that say which module computes, when it is done, and when a gradient is ready.

    A checkpointed block computes its forward again within backward, where autograd has left all modes: `ways` is
    entered anew for it, so that it saves the same tensors.
    """
    for name, part in module.named_modules():
        owns = any(True for _ in part.parameters(recurse=False))
        unit = owns or name.count(".") <= 1

        def enter(_: nn.Module, __: Any, name: str = name, unit: bool = unit) -> None:
            if unit:
                follower.events.append(Mark("forward", name))
            if follower.phase == "backward" and not follower.modules:
                ways.__enter__()
            follower.modules.append(name)

        def leave(_: nn.Module, __: Any, output: Any, name: str = name, unit: bool = unit) -> None:
            if follower.modules and follower.modules[-1] == name:
                follower.modules.pop()
                if follower.phase == "backward" and not follower.modules:
                    ways.__exit__(None, None, None)
            if not unit:
                return
            follower.events.append(Mark("forwarded", name))
            if isinstance(output, Tensor) and follower.phase == "forward":
                follower.output_of[name] = follower.see(output)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and follower.phase == "forward":
                    tensor.register_hook(lambda _: begin_backward(name))

        def begin_backward(name: str) -> None:
            follower.in_backward_of = name
            follower.events.append(Mark("backward", name))

        yield part.register_forward_pre_hook(enter)
        yield part.register_forward_hook(leave, always_call=True)
    for name, parameter in module.named_parameters():

        def ready(parameter: Tensor, name: str = name) -> None:
            number = follower.see(parameter.grad) if parameter.grad is not None else -1
            follower.events.append(Mark("ready", name, number))

        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(ready)


def _refusal(error: Exception) -> str:
    kind = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)[:300]
    if "DataDependent" in kind or "DynamicOutputShape" in kind or "UnbackedSymInt" in kind:
        return say(
            en=f"the module's forward depends on the values of its data ({first}), which a trace without memory does "
            "not have: trace a version without such a choice, or measure it on a real run.",
            fr=f"la passe avant du module dépend des valeurs de ses données ({first}), qu’une trace sans mémoire n’a "
            "pas : suivez une version sans ce choix, ou mesurez sur une vraie exécution.",
        )
    return say(
        en=f"the module does not run on these inputs: {kind}: {first}",
        fr=f"le module ne s’exécute pas sur ces entrées : {kind} : {first}",
    )


__all__ = ["Allocation", "Compute", "Mark", "Trace", "trace"]
