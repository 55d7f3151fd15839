"""Trace forward and backward of any module without its memory: every storage, from its allocation to its release.

Fake tensors have shapes and no memory; autograd itself decides what is kept and for how long, so a trace equals a real
run on the CPU to the byte. A model of 400 billion parameters is traced within seconds. Without a GPU a fake CUDA tensor
cannot run backward, so differences are corrected on fake CPU tensors:

**GPU**: the operators that a CUDA device would choose are called. Source: torch 2.13
`aten/src/ATen/autocast_mode.h` (lists of operators in fp32), `aten/src/ATen/native/transformers` (which attention
kernel), `aten/src/ATen/native/Dropout.cpp` (a mask of one byte).

**Megatron-core** without Transformer Engine computes attention by several operators and the loss in place. With s
tokens, b samples, a heads and v words on a rank, in fp32:

    attention, forward     the scores, then the softmax: 4·a·s²·b each; the softmax is kept for backward
    attention, backward    up to 4 such tensors at once: scores that were masked in place are a view, whose gradient
                           autograd copies to find that of the whole
    loss                   the logits become their softmax, then their gradient: 4·s·b·v, in one place

Source: megatron-core 0.16.1, `transformer/dot_product_attention.py`, `fusions/fused_softmax.py` (without fusion) and
`tensor_parallel/cross_entropy.py`.

**Storages** are counted once, however many tensors view them, with their current bytes, until they are released.
Forecast and measurement (`dlojz.train.dispatch_trace`) both count by `StorageTracker`.

**Sums of gradients.** Where several operators have read a tensor, autograd adds their gradients: into the first one's
memory, if nothing else holds it; but never under a dispatch mode, where each sum is a tensor more. What is counted here
is the training without a mode: such a sum takes over the memory of what it was added to. Source: torch 2.13,
`csrc/autograd/input_buffer.cpp`, `accumulate` and `can_accumulate_inplace`.
"""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.hooks import RemovableHandle

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences
from dlojz.by_hand.chunked_loss import knowing_targets
from dlojz.models.foreign.elsewhere import ADAPTERS
from dlojz.models.foreign.meta_checks import error_with_line
from dlojz.prediction.shapes import FP32_BYTES

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Phase = Literal["data", "forward", "backward", "weights"]
"""Pass of a micro-batch; of a backward in two halves, `backward` is the one for the input."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Growth of a storage by some bytes (or shrinking, where negative), in which pass and for which module.

    Zero bytes: gradients are added up in its memory.
    """

    storage: int
    delta_bytes: int
    phase: Phase
    module: str
    """Path of the module that computes; empty outside the model."""


@dataclass(frozen=True, slots=True)
class TraceMark:
    """Mark in a trace: a unit of the model begins or ends a pass, or the gradient of a parameter is ready."""

    what: Literal["forward", "forwarded", "backward", "weights", "ready"]
    name: str
    """Of the module, or of the parameter."""
    storage: int = -1
    """Of the gradient, where one is ready."""


def _with_heads(query: Tensor, key_or_value: Tensor) -> tuple[int, ...]:
    """Shape of keys or values repeated for each head of the queries; torch before 2.13 counts no shared ones."""
    return (key_or_value.shape[0], query.shape[1], *key_or_value.shape[2:])


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, _with_heads(query, key), _with_heads(query, value))


def _attention_backward_flops(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, _with_heads(query, key), _with_heads(query, value))


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    output_mask = args[-1]  # which of the gradients of input, weight and bias
    # weight[0] is (C_in / groups, K, K): the products of one output element, two FLOPs each.
    return 2 * gradient.numel() * weight[0].numel() * (int(output_mask[0]) + int(output_mask[1]))


def _recurrent(inputs: Tensor, w_input: Tensor, w_hidden: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count one layer of a CPU's kernel: each position is multiplied by both weights, (gates × inputs, gates × hidden).

    Args:
        inputs: (length, samples, features), in either order of the first two.
    """
    return 2 * inputs.shape[0] * inputs.shape[1] * (w_input.numel() + w_hidden.numel())


def _recurrent_on_gpu(inputs: Tensor, weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    """Count all layers of cuDNN's kernel, whose weights are listed with their biases."""
    return 2 * inputs.shape[0] * inputs.shape[1] * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _twice(forward: Callable[..., int]) -> Callable[..., int]:
    """Count a backward pass: the gradients of inputs and of weights, each as many products as forward."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


_ATTENTION_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
# torch's own formulas, but for recurrent layers, which have none, attention (the CPU's kernel has none) and the
# backward of a convolution, whose formula forgets that a grouped one (CoAtNet's depthwise one) mixes no channels.
FLOP_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: _twice(_recurrent),
    torch.ops.aten._cudnn_rnn: _recurrent_on_gpu,
    torch.ops.aten._cudnn_rnn_backward: _twice(_recurrent_on_gpu),
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): _attention_flops for name in _ATTENTION_KERNELS},
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward"): _attention_backward_flops
        for name in _ATTENTION_KERNELS
    },
}


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Count the floating-point operations of one operator's call; None where it has no formula."""
    formula = FLOP_FORMULAS.get(func.overloadpacket)
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


@dataclass(frozen=True)
class MemoryTrace:
    """Allocations of one micro-batch's forward and backward passes.

    Args:
        events: allocations and marks, in the order in which they happen.
        kept: storages that forward leaves alive for backward, its inputs and its loss included.
        on_host: those of them that lie in host memory, where the device keeps nothing.
        bytes_of: largest bytes of each storage.
        module_of: module that allocated each storage.
        output_of: storage that each module's forward returns.
        flops_of: floating-point operations of both passes, by block; under an empty name those of no block.
        gradient_of: storage of the gradient of each block's output, in a trace of a backward in two halves.
        products: storages that a matrix product, a convolution or attention has made.
    """

    events: tuple[Allocation | TraceMark, ...]
    kept: frozenset[int]
    on_host: frozenset[int]
    bytes_of: dict[int, int]
    module_of: dict[int, str]
    output_of: dict[str, int]
    flops_of: dict[str, int] = field(default_factory=dict, compare=False)
    gradient_of: dict[str, int] = field(default_factory=dict)
    products: frozenset[int] = frozenset()

    @property
    def flops(self) -> int:
        """Floating-point operations of both passes."""
        return sum(self.flops_of.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes that are kept for backward, each storage once, the inputs included."""
        return sum(self.bytes_of[storage] for storage in self.kept)

    @property
    def peak_bytes(self) -> int:
        """Largest sum of all that both passes have allocated, gradients included, weights not."""
        live_bytes = peak = 0
        for event in self.events:
            if isinstance(event, Allocation):
                live_bytes += event.delta_bytes
                peak = max(peak, live_bytes)
        return peak

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes kept for backward by the module that made them, in the order of the forward pass."""
        total: dict[str, int] = {}
        for storage in sorted(self.kept):
            name = self.module_of[storage]
            total[name] = total.get(name, 0) + self.bytes_of[storage]
        return total


Node = tuple[str, int] | tuple[()]
_TELLS_HOLDERS = hasattr(torch.Tensor, "_use_count")
_HOLDERS_OF_STORAGE, _HOLDERS_OF_TENSOR = 2, 4
"""Holders of a gradient that only autograd keeps, as it is seen from a dispatch mode, whose own are among them."""


def _present_node() -> Node:
    """Kind and number of the node whose backward runs in this thread; empty outside of backward."""
    if torch._C._current_graph_task_id() == -1 or (node := torch._C._current_autograd_node()) is None:
        return ()
    return type(node).__name__, node._sequence_nr()  # not its name(): a script's own function may keep something there


class StorageTracker(TorchDispatchMode):
    """Dispatch mode that numbers storages and reports their growth; a subclass passes storages to `follow`."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes: dict[int, int] = {}
        """Number of each live storage → its bytes."""
        self._number_of: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._times: dict[int, int] = {}
        self._node_of: dict[int, Node] = {}
        """Number of each live storage → the node of autograd's graph that made it; empty outside of backward."""
        self._numbers = count()

    def begun(self, number: int) -> None:
        """Handle a new storage; its first bytes are reported by `grown`."""

    def grown(self, number: int, delta_bytes: int) -> None:
        """Handle the growth of a storage by so many bytes (or shrinking, where negative)."""
        raise NotImplementedError

    def follow(self, storage: torch.UntypedStorage, times: int = 1) -> int:
        """Track a storage, real or fake, or update its size; return its number, from 0.

        `times`: bytes to count for each of its bytes, as first given.
        """
        key = storage._cdata
        number = self._number_of.get(key)
        if number is None:
            number = next(self._numbers)
            self._number_of[key] = number
            self.live_bytes[number] = 0
            # The key is an address, which another storage may get: it is forgotten as soon as this one dies.
            self._references[number] = weakref.ref(storage, lambda _: self._forget(key, number))
            self._node_of[number] = _present_node()
            if times != 1:
                self._times[number] = times
            self.begun(number)
        delta_bytes = storage.nbytes() * self._times.get(number, 1) - self.live_bytes[number]
        if delta_bytes:
            self.live_bytes[number] += delta_bytes
            self.grown(number, delta_bytes)
        return number

    def sums_in_place(self, func: Any, args: Any) -> bool:
        """Tell, before an operator runs, whether it is a sum of gradients that autograd alone would make in place."""
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or not _TELLS_HOLDERS:
            return False
        node, (older, newer) = _present_node(), args[:2]
        if not node or not isinstance(newer, torch.Tensor) or {older.layout, newer.layout} != {torch.strided}:
            return False
        if older.shape != newer.shape or older.dtype != newer.dtype:
            return False
        if node[0] == "AccumulateGrad":  # its hooks' own sums: gradients are added up before it, or with `add_`
            return False
        storage = older.untyped_storage()
        number = self._number_of.get(storage._cdata)
        # What a node adds up for its own result, it has made itself.
        return (
            number is not None
            and self._node_of.get(number, node) != node
            and torch._C._storage_Use_Count(storage._cdata) <= _HOLDERS_OF_STORAGE
            and older._use_count() <= _HOLDERS_OF_TENSOR
            and torch._debug_has_internal_overlap(older) == 0
        )

    def take_over(self, old_storage: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """Count a new storage as the former one, which is about to be released."""
        number = self._number_of.pop(old_storage._cdata)
        key = storage._cdata
        self._number_of[key] = number
        # Drops the old storage's reference with its callback, which would report a release.
        self._references[number] = weakref.ref(storage, lambda _: self._forget(key, number))
        self._node_of[number] = _present_node()

    def abandon(self, storage: torch.UntypedStorage) -> None:
        """Stop tracking a storage, as if it had been released."""
        key = storage._cdata
        if (number := self._number_of.get(key)) is not None:
            self._forget(key, number)

    def _forget(self, key: int, number: int) -> None:
        self._number_of.pop(key, None)
        self._references.pop(number, None)
        self._times.pop(number, None)
        self._node_of.pop(number, None)
        if num_bytes := self.live_bytes.pop(number, 0):
            self.grown(number, -num_bytes)


class Follower(StorageTracker):
    """Storage tracker that records allocations and releases of two passes, with their modules; tensors may be fake."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Allocation | TraceMark] = []
        self.bytes_of: dict[int, int] = {}
        self.module_of: dict[int, str] = {}
        self.output_of: dict[str, int] = {}
        self.gradient_of: dict[str, int] = {}
        self.phase: Phase = "data"
        self.modules: list[str] = []
        self.in_backward_of = ""
        self.on_gpu = False
        self.ignored: set[int] = set()
        self.flops_of: Counter[str] = Counter()
        self.products: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = self.sums_in_place(func, args)
        result = func(*args, **(kwargs or {}))
        if in_place:
            self.take_over(args[0].untyped_storage(), result.untyped_storage())
            self.events.append(Allocation(self.see(result), 0, self.phase, self.module))
        flops = flops_of(func, args, kwargs or {}, result)
        self.flops_of[".".join(self.module.split(".")[:2])] += flops or 0
        # A GPU keeps the mean and the deviation of a normalisation in fp32, whatever its input.
        statistics = self.on_gpu and func is torch.ops.aten.native_layer_norm.default
        for number, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor):
                storage = self.see(tensor, FP32_BYTES // tensor.element_size() if statistics and number else 1)
                self.products |= {storage} if flops is not None and self.phase == "forward" else set()
        return result

    @property
    def flops(self) -> int:
        """Floating-point operations so far."""
        return self.flops_of.total()

    @property
    def module(self) -> str:
        """Path of the module that computes now."""
        if self.modules:
            return self.modules[-1]
        return self.in_backward_of if self.phase in ("backward", "weights") else ""

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count these tensors: they are states, which are predicted separately."""
        self.ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def see(self, tensor: Tensor, times: int = 1) -> int:
        """Track a tensor's storage, counted `times` its size; return its number, -1 if it is ignored."""
        storage = tensor.untyped_storage()
        return -1 if storage._cdata in self.ignored else self.follow(storage, times)

    def begun(self, number: int) -> None:
        """Record which module computes."""
        self.bytes_of[number] = 0
        self.module_of[number] = self.module

    def grown(self, number: int, delta_bytes: int) -> None:
        """Record the event, and the storage's largest size."""
        self.bytes_of[number] = max(self.bytes_of[number], self.live_bytes.get(number, 0))
        self.events.append(Allocation(number, delta_bytes, self.phase, self.module))


IN_FP32 = frozenset({
    "layer_norm", "group_norm", "softmax", "softmin", "log_softmax", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "pow", "__pow__", "__rpow__", "square", "softplus", "logsumexp", "cosine_similarity",
    "acos", "asin", "cosh", "sinh", "tan", "erfinv", "interpolate",
})  # fmt: skip
"""Functions that cast 16-bit inputs to fp32 under CUDA's autocast, and compute in 16 bit under the CPU's.

Source: torch 2.13, `aten/src/ATen/autocast_mode.h`, `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE`.
"""
SUMMED_IN_FP32 = frozenset({"sum", "cumsum", "cumprod", "prod"})
"""Functions whose result alone is in fp32 there: they read 16 bit."""


class CudaOverrides(TorchFunctionMode):
    """Override attention, dropout and autocast with what they choose on a CUDA device, for a compute precision."""

    def __init__(self, compute: str) -> None:
        super().__init__()
        self._autocast = compute == "autocast"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout or func is torch.dropout:
            return _dropout(*args, **kwargs)
        if func is F.rms_norm or func is torch.rms_norm:
            return _rms_norm(func, *args, **kwargs)
        if self._autocast and torch.is_autocast_enabled("cpu"):
            return _under_autocast(func, args, kwargs)
        return func(*args, **kwargs)


def _under_autocast(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in IN_FP32:
        return func(*tree_map(_to_fp32, args), **tree_map(_to_fp32, kwargs))
    if name in SUMMED_IN_FP32 and args and _is_half(args[0]):
        return func(*args, **{"dtype": torch.float32} | kwargs)
    if func is F.cross_entropy and args and _is_half(args[0]):
        return _cross_entropy(*args, **kwargs)
    return func(*args, **kwargs)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Any = None, *args: Any, label_smoothing: float = 0.0, **options: Any
) -> Tensor:
    """Cross-entropy as under CUDA's autocast, for a 16-bit input: the logarithm of the probabilities is left in 16
    bit, and cast for the mean over the targets. Under the CPU's, all is in fp32.

    Source: torch 2.13, `aten/src/ATen/native/LossNLL.cpp`, `cross_entropy_loss`: it asks `log_softmax` for the type of
    its input, which autocast then leaves as it is.
    """
    classes = 1 if logits.dim() > 1 else 0
    with torch.autocast("cpu", enabled=False):
        log_probabilities = torch.log_softmax(logits, classes)
        if target.is_floating_point():
            return -(log_probabilities * target).sum(dtype=torch.float32) / (logits.numel() / logits.shape[classes])
        loss = F.nll_loss(log_probabilities.float(), target, weight, *args, **options)
        if label_smoothing:
            spread = -log_probabilities.sum(classes, dtype=torch.float32).mean()
            loss = (1 - label_smoothing) * loss + label_smoothing / logits.shape[classes] * spread
    return loss


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    del inplace
    if not training or p == 0:
        return x
    output: Tensor = torch.native_dropout(x, p, True)[0]
    return output


class _FusedRmsNorm(torch.autograd.Function):
    """Allocations of CUDA's kernel: it keeps one number for each row, where the CPU's composition keeps the rows too.

    Source: torch 2.13, `aten/src/ATen/native/layer_norm.cpp`, `aten/src/ATen/native/cuda/layer_norm_kernel.cu`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: int) -> Tensor:
        ctx.save_for_backward(x, x.new_empty((*x.shape[:rows], *[1] * (x.dim() - rows)), dtype=torch.float32), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    func: Any, x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        composed: Tensor = func(x, normalized_shape, weight, eps)
        return composed
    normed: Tensor = _FusedRmsNorm.apply(x, weight, x.dim() - len(normalized_shape))
    return normed


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **options: Any) -> Tensor:
    # The CPU's fused kernel takes no bias that needs a gradient and falls back on the plain product, which keeps all
    # scores; CUDA's memory-efficient kernel takes it.
    if isinstance(attn_mask, Tensor) and attn_mask.requires_grad and not args and not options.get("dropout_p"):
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value, attn_mask = (tensor.to(dtype) for tensor in (query, key, value, attn_mask))
        bias = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)[0]
        return attended
    if options.get("enable_gqa") and query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        # The only kernel on CUDA that takes fp32 takes no shared heads of keys: the plain product is left.
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)


class MegatronOverrides(CudaOverrides):
    """Override attention and the loss with the allocations of Megatron-core's; with `on_gpu` the rest as CUDA's."""

    def __init__(self, compute: str, *, on_gpu: bool) -> None:
        super().__init__(compute)
        self._on_gpu = on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _WrittenOut.apply(*args[:3])
        if func is F.cross_entropy:
            return _InPlace.apply(*args[:2])
        if self._on_gpu:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _WrittenOut(torch.autograd.Function):
    """Attention as a product, a mask, a softmax and a product; queries, keys and values as (B, N, T, H)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, _ = q.shape
        scores = q.new_empty(batch, heads, tokens, tokens)
        weights = torch.softmax(scores, dim=-1)
        attended = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, weights)
        return attended.transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = ctx.saved_tensors
        # Megatron-core's holds four by then, and the gradient of the values; here the weights stay until the end, and
        # so does the gradient that has come in.
        copies = [torch.empty_like(weights) for _ in range(3)]
        del copies
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _InPlace(torch.autograd.Function):
    """The mean loss of logits that it overwrites."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return logits, None


Compute = Literal["fp32", "autocast", "bf16", "bf16-true"]
"""fp32; bf16 products over fp32 weights; weights and inputs in bf16 themselves; the same, with adapters in fp32."""
HalfType = torch.bfloat16


def trace(
    module: nn.Module,
    *inputs: Any,
    compute: Compute = "fp32",
    targets: Tensor | None = None,
    loss: Callable[..., Tensor] | None = None,
    around_forward: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    on_gpu: bool = False,
    in_megatron: bool = False,
    in_halves: bool = False,
) -> MemoryTrace:
    """Trace the allocations of a module's forward and backward, without allocating.

    Args:
        module: any; on the meta device or a real one, where it stays untouched.
        inputs: of its forward, tensors or nested ones, on the meta device or a real one; copied, not changed.
        targets: part of the micro-batch, for the loss.
        loss: of the module's output (and of the targets), a scalar; by default the sum of all its numbers.
        around_forward: made of the module and entered around its forward pass; its `host_copies` afterwards count as
            host memory.
        on_gpu: with a GPU's corrections.
        in_megatron: with Megatron-core's.
        in_halves: backward first for the input, then for the weights, as `torch.distributed.pipelining` does; of a list
            of blocks, whose first has no backward, as if it were on another rank.

    Raises:
        LabError: if forward depends on the values of its data, or does not fit the inputs.
    """
    if in_halves:
        # Makes a tensor when it is imported, which must be a real one and no part of the trace: before the modes. Only
        # here, as it loads torch's compiler, which takes as long as torch itself.
        importlib.import_module("torch.distributed.pipelining._backward")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _as_fake(module, mode, compute):
        modes: AbstractContextManager[Any] = nullcontext()
        if in_megatron:
            modes = MegatronOverrides(compute, on_gpu=on_gpu)
        elif on_gpu:
            modes = CudaOverrides(compute)
        around = nullcontext() if around_forward is None else around_forward(module)
        backward = _Halves(module) if in_halves else None
        return _traced(module, inputs, targets, (compute, on_gpu), loss or _sum_of_all, around, modes, backward)


def _traced(
    module: nn.Module,
    inputs: tuple[Any, ...],
    targets: Tensor | None,
    compute_on: tuple[Compute, bool],
    loss: Callable[..., Tensor],
    around: AbstractContextManager[Any],
    modes: AbstractContextManager[Any],
    halves: _Halves | None,
) -> MemoryTrace:
    compute, on_gpu = compute_on
    parameters = dict(module.named_parameters())
    follower = Follower()
    follower.on_gpu = on_gpu
    follower.ignore([*parameters.values(), *module.buffers()])
    with ExitStack() as stack:
        if halves is not None:
            stack.callback(halves.cut().remove)
        for handle in _marks(module, follower, modes):
            stack.callback(handle.remove)
        stack.enter_context(follower)
        try:
            fake_inputs = tree_map(_fake_like, inputs)
            compared = () if targets is None else (_fake_like(targets),)
            for tensor in tree_leaves((fake_inputs, compared)):
                follower.see(tensor)
            follower.phase = "forward"
            casts = compute in ("bf16", "bf16-true")
            batch = tree_map(lambda x: x.to(HalfType) if casts and x.is_floating_point() else x, fake_inputs)
            if any(_has_channels_last(parameter) for parameter in parameters.values()):
                batch = tuple(x.contiguous(memory_format=torch.channels_last) for x in batch)  # as the engine does
            with modes:
                with around, _autocast(compute), knowing_targets(module, *compared or (None,)):
                    output = module(*batch)
                value = loss(output, *compared)
            del output, batch
            on_host = frozenset(follower.see(tensor) for tensor in getattr(around, "host_copies", list)())
            kept_storages = frozenset(follower.live_bytes)
            follower.phase = "backward"
            if halves is None:
                value.backward()
            else:
                halves.backward(value, follower)
        except LabError:
            raise
        except Exception as error:
            raise _refusal(error) from error
    for parameter in parameters.values():
        parameter.grad = None
    return MemoryTrace(
        tuple(follower.events),
        kept_storages,
        on_host,
        follower.bytes_of,
        follower.module_of,
        follower.output_of,
        dict(follower.flops_of),
        follower.gradient_of if halves is not None else {},
        frozenset(follower.products),
    )


class _Halves:
    """Backward of a list of blocks in two halves; its first block is cut off.

    The second half comes parameter group by parameter group, in the order of the blocks. Source: torch 2.13,
    `torch/distributed/pipelining/_backward.py`.
    """

    def __init__(self, module: nn.Module) -> None:
        blocks = list(module.get_submodule("blocks").children())
        self._first, self._others = blocks[0], blocks[1:]
        self._name_of = {id(parameter): name for name, parameter in module.named_parameters()}
        self._entered: list[Tensor] = []

    def cut(self) -> RemovableHandle:
        """Detach what the first block gives, from now on."""

        def detached(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            self._entered.append(output.detach().requires_grad_())
            return self._entered[-1]

        return self._first.register_forward_hook(detached)

    def backward(self, loss: Tensor, follower: Follower) -> None:
        """Run both halves."""
        weights = [parameter for block in self._others for parameter in block.parameters() if parameter.requires_grad]
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

        _, groups = stage_backward_input([loss], None, self._entered, iter(weights))
        follower.phase = "weights"
        stage_backward_weight(iter(weights), self._marked(groups, follower))  # type: ignore[arg-type]
        self._entered.clear()

    def _marked(self, groups: list[dict[str, Any]], follower: Follower) -> Iterator[dict[str, Any]]:
        """The groups one after the other, with a mark where a block begins, and where gradients are ready."""
        block = 0
        for group in groups:
            # A group is a set, whose order differs from run to run.
            parameters = dict(sorted((self._name_of[id(node.variable)], node.variable) for node in group["params"]))
            first_name = next(iter(parameters))
            number = int(first_name.split(".")[1])
            for entered_block in range(block + 1, number + 1) or [number] * (number != block):
                follower.events.append(TraceMark("weights", f"blocks.{entered_block}"))
            block, follower.in_backward_of = number, first_name.rpartition(".")[0]
            yield group
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    follower.events.append(TraceMark("ready", name, follower.see(parameter.grad)))


def _has_channels_last(tensor: Tensor) -> bool:
    """Tell whether a convolution's weight lies so in memory, and in no other order too, as one of 1 × 1 does."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _sum_of_all(output: Any) -> Tensor:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise phrase.refused("no backward pass")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def _fake_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


def _autocast(compute: Compute) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", HalfType) if compute == "autocast" else nullcontext()


@contextmanager
def _as_fake(module: nn.Module, mode: FakeTensorMode, compute: Compute) -> Iterator[None]:
    """Put fake CPU tensors where the module's parameters and buffers are, and those back afterwards."""
    fakes: dict[int, Tensor] = {}
    originals: list[tuple[dict[str, Any], str, Any]] = []
    owned: dict[str, Any]

    def fake(tensor: Tensor, is_adapter: bool) -> Tensor:
        if id(tensor) not in fakes:
            casts = compute == "bf16" or (compute == "bf16-true" and not is_adapter)
            dtype = HalfType if casts and tensor.is_floating_point() else tensor.dtype
            fake_tensor = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            if _has_channels_last(tensor):
                fake_tensor = fake_tensor.contiguous(memory_format=torch.channels_last)
            if isinstance(tensor, nn.Parameter):
                fake_tensor = nn.Parameter(fake_tensor, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = fake_tensor
        return fakes[id(tensor)]

    try:
        for path, part in module.named_modules():
            for owned in (part._parameters, part._buffers):
                for name, tensor in owned.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        originals.append((owned, name, tensor))
                        owned[name] = fake(tensor, path.endswith(ADAPTERS))
        yield
    finally:
        for owned, name, tensor in originals:
            owned[name] = tensor


def _marks(module: nn.Module, follower: Follower, modes: AbstractContextManager[Any]) -> Iterator[Any]:
    """Hooks that record which module computes, when it is done, and when a gradient is ready.

    A checkpointed block recomputes its forward within backward, where autograd has left all modes: `modes` is entered
    anew for it, so that it saves the same tensors.
    """
    for name, part in module.named_modules():
        owns = any(True for _ in part.parameters(recurse=False))
        unit = owns or name.count(".") <= 1

        def enter(_: nn.Module, __: Any, name: str = name, unit: bool = unit) -> None:
            if unit:
                follower.events.append(TraceMark("forward", name))
            if follower.phase == "backward" and not follower.modules:
                modes.__enter__()
            follower.modules.append(name)

        def leave(_: nn.Module, __: Any, output: Any, name: str = name, unit: bool = unit) -> None:
            if follower.modules and follower.modules[-1] == name:
                follower.modules.pop()
                if follower.phase == "backward" and not follower.modules:
                    modes.__exit__(None, None, None)
            if not unit:
                return
            follower.events.append(TraceMark("forwarded", name))
            # Not when recomputed: that output is another storage.
            if isinstance(output, Tensor) and follower.phase == "forward":
                follower.output_of[name] = follower.see(output)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and follower.phase == "forward":
                    tensor.register_hook(lambda gradient: begin_backward(name, gradient))

        def begin_backward(name: str, gradient: Tensor) -> None:
            follower.in_backward_of = name
            follower.events.append(TraceMark("backward", name))
            if name.count(".") == 1:
                follower.gradient_of.setdefault(name, follower.see(gradient))

        yield part.register_forward_pre_hook(enter)
        yield part.register_forward_hook(leave, always_call=True)
    for name, parameter in module.named_parameters():

        def ready(parameter: Tensor, name: str = name) -> None:
            number = follower.see(parameter.grad) if parameter.grad is not None else -1
            follower.events.append(TraceMark("ready", name, number))

        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(ready)


class ValuesNeededError(LabError):
    """A forward pass that needs the values of its data, which a trace without memory does not have.

    Args:
        first: the error, with the line that caused it.
    """

    def __init__(self, reason: str) -> None:
        self.cause = phrase("forward depends on values", reason=reason)
        advice = phrase("way out of a choice")
        super().__init__(self.cause + advice)


def _refusal(error: Exception) -> LabError:
    kind, reason = type(error).__name__, error_with_line(error)
    if "DataDependent" in kind or "DynamicOutputShape" in kind or "UnbackedSymInt" in kind:
        return ValuesNeededError(reason)
    return phrase.refused("module does not run", reason=reason)
