"""List the operators that a GPU's host launches in a micro-batch, forward and backward, each as its kernel is measured.

The model is run on tensors without memory, with recomputation and the casts of autocast, as memory is traced
(`dlojz.prediction.model_trace`). Labels and sizes are those of `dlojz.cost_model.measuring_kernels`; an operator that
is not measured there reads and writes its tensors as a sum does.

`traced_blocks` reads the operators of a model that the cost model times by their shapes (`dlojz.cost_model.workload`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlojz.base.language import refusing_overflow
from dlojz.config.run_config import RunConfig
from dlojz.cost_model.calibration import Product
from dlojz.cost_model.measuring_kernels import tiny_blocks, tiny_step
from dlojz.hardware import Precision
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.foreign.elsewhere import contents_hash
from dlojz.models.foreign.names import is_elsewhere
from dlojz.models.foreign.sources import changes_its_model
from dlojz.models.meta import sample_inputs
from dlojz.prediction import trace_store
from dlojz.prediction.model_trace import TraceKey, key_of, tracer_of
from dlojz.prediction.shapes import RankPart, build_on_meta

LABELS: Final = {
    "_log_softmax": "loss", "_log_softmax_backward_data": "loss, backward", "_to_copy": "cast",
    "avg_pool2d": "pool", "avg_pool2d_backward": "pool, backward", "gelu": "gelu", "gelu_backward": "gelu, backward",
    "native_batch_norm": "batch norm", "native_batch_norm_backward": "batch norm, backward",
    "native_layer_norm": "layer norm", "native_layer_norm_backward": "layer norm, backward",
    "sigmoid": "sigmoid", "sigmoid_backward": "sigmoid, backward", "silu": "silu", "silu_backward": "silu, backward",
    "sum": "sum of rows",
}  # fmt: skip
"""Of operators whose size is the shape of their largest tensor."""
IN_ROWS: Final = ("layer norm", "loss", "sum of rows")
"""Measured on rows and columns."""
IN_FOUR: Final = ("batch norm", "pool")
"""Measured on images, channels and two sides."""
VIEWS: Final = ("_unsafe_view",)
"""Without a kernel, besides what torch calls a view."""
UNSEEN: Final = ("prim::", "aten::empty", "aten::new_empty")
"""What stands for the memory of fake tensors."""
PASS: Final = "add"
PASS_BYTES: Final = 12
"""Of a sum in fp32, an element: two are read and one is written."""


class Operator(NamedTuple):
    """One call of an operator.

    Attributes:
        label: under which its kernel is measured; empty for a view, which has none.
        size: as it is measured.
        precision: of its input.
    """

    label: str
    size: tuple[int, ...] = ()
    precision: Precision = "fp32"


class Operators(NamedTuple):
    """Operators of a micro-batch.

    Attributes:
        calls: in the order of their launch.
        tensors: number of elements of each parameter.
        blocks: of the model.
    """

    calls: tuple[Operator, ...]
    tensors: tuple[int, ...]
    blocks: int


VIEW: Final = Operator("")


class _Recorder(TorchDispatchMode):
    """Records every operator that is called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.name().startswith(UNSEEN):
            self.calls.append(_operator(func, args, kwargs or {}, result))
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _operator(func: Any, args: Any, kwargs: Any, result: Any) -> Operator:
    """An operator as it is measured."""
    name = func.name().removeprefix("aten::").partition(".")[0]
    inputs, results = _tensors((args, kwargs)), _tensors(result)
    if func.is_view or name in VIEWS or not inputs or not results:
        return VIEW
    backward = ", backward" if "backward" in name else ""
    operand, size = inputs[0], tuple[int, ...]()
    label = LABELS.get(name, PASS)
    if name in ("addmm", "mm"):
        # m, n of the result, k rows of the right factor; `addmm` has the bias before the two factors.
        label, size = _product(name, *inputs[-2:]), (*results[0].shape, inputs[-1].shape[0])
    elif "attention" in name:
        biased = "efficient" in name  # in the trace: what has no bias is flash attention
        causal = not biased and any(argument is True for argument in (*args, *kwargs.values()))
        operand = inputs[1] if backward else operand  # backward is given the gradient first, then the queries
        label, size = f"attention{backward}", (*operand.shape, int(causal), int(biased))
    elif name.startswith("convolution"):
        outputs = operand if backward else results[0]
        # Backward: gradient, input, weight; forward: input, weight.
        operand, weight = inputs[1:3] if backward else inputs[:2]
        # weight: (channels out, channels in / groups, kernel, kernel)
        side, groups = operand.shape[2], max(operand.shape[1] // weight.shape[1], 1)
        stride = max(side // outputs.shape[2], 1)
        label, size = name.replace("_", ", "), (*operand.shape[:2], weight.shape[0], side, weight.shape[2])
        size = (*size, stride, groups)
    elif name.startswith("embedding"):
        # Backward: (gradient, indices) → matrix; forward: (matrix, indices) → rows.
        weight, rows = (results[0], operand) if backward else (operand, results[0])
        label, size = f"embedding{backward}", (math.prod(rows.shape[:-1]), *weight.shape)
    elif label == PASS or (label == "cast" and operand.dtype == results[0].dtype):  # a cast to the same type is a copy
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *results))
        return Operator(PASS, (max(num_bytes // PASS_BYTES, 1),))  # as long as a sum that moves as many bytes
    else:
        size = _size(label, max((*inputs, *results), key=Tensor.numel))
    return Operator(label, size, "bf16" if operand.element_size() == 2 else "fp32")


def _size(label: str, largest: Tensor) -> tuple[int, ...]:
    """Size of an operator that is measured by its largest tensor."""
    if label.startswith(IN_FOUR):
        return (*largest.shape, 1, 1)[:4]
    columns = largest.shape[-1] if largest.dim() else 1
    return (largest.numel() // columns, columns) if label.startswith(IN_ROWS) else (largest.numel(),)


def _product(name: str, left: Tensor, right: Tensor) -> str:
    """Which of a linear layer's products it is, by what is transposed in memory."""
    # The second factor is a transposed weight (n, k) in memory: x @ weight.t().
    if name == "addmm" or (right.stride(0) == 1 and right.stride(1) != 1):
        return "linear"
    # gradient.t() @ x, else gradient @ weight.
    return "linear, of weight" if left.stride(0) == 1 and left.stride(1) != 1 else "linear, of input"


def operators_of(config: RunConfig) -> Operators:
    """List the operators of a micro-batch of a run on one GPU; kept on disk, as a trace is."""
    return _kept(key_of(RankPart(config), on_gpu=True))


@lru_cache(maxsize=8)
def _kept(key: TraceKey) -> Operators:
    # One's own file, or a module given in Python: its name may be another model's elsewhere, so nothing is stored.
    if changes_its_model(key.model):
        return _listed(key)
    name = ("operators", key, contents_hash(key.model) if is_elsewhere(key.model) else "")
    operators = trace_store.read(name, _from_data)
    if operators is None:
        operators = _listed(key)
        trace_store.write(name, _to_data(operators))
    return operators


def _listed(key: TraceKey) -> Operators:
    model, traced = tracer_of(key)
    with _Recorder() as recorder:
        traced(model)
    tensors = tuple(parameter.numel() for parameter in model.parameters())
    return Operators(tuple(recorder.calls), tensors, len(list(model.blocks)))


def _to_data(operators: Operators) -> dict[str, Any]:
    numbers: dict[Operator, int] = {}  # an operator that repeats is stored once, calls by its number
    calls = [numbers.setdefault(operator, len(numbers)) for operator in operators.calls]
    return {"calls": calls, "operators": list(numbers), "tensors": operators.tensors, "blocks": operators.blocks}


def _from_data(data: dict[str, Any]) -> Operators:
    distinct_operators = [Operator(str(label), tuple(size), precision) for label, size, precision in data["operators"]]
    return Operators(
        tuple(distinct_operators[index] for index in data["calls"]), tuple(data["tensors"]), int(data["blocks"])
    )


@lru_cache(maxsize=32)
def operators_of_level(layers: int, level: Checkpointing, precision: Precision) -> Operators:
    """List the operators of the tiny blocks by which the host is measured."""
    with _Recorder() as recorder, FakeTensorMode():
        blocks, x = tiny_blocks(layers, torch.device("cpu"))
        recorder.calls.clear()  # creating the blocks has called operators too
        tiny_step(blocks, x, level, precision)
    tensors = tuple(parameter.numel() for block in blocks for parameter in block.parameters())
    return Operators(tuple(recorder.calls), tensors, len(blocks))


_VIEWS: Final = ("view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "reshape")


class Traced(NamedTuple):
    """One operation of one sample's forward.

    Attributes:
        product: as which it is computed; None for a pass over memory.
        per_sample: whether the batch multiplies the product's `batch` and not its rows.
        num_bytes: read and written, in 16 bit; 0 for a product.
        gradients: which of its two factors has a gradient, each by one more product; of a pass, whether one has.
        of_weights: whether it makes weights, whatever the batch, and once more in the backward.
    """

    product: Product | None
    per_sample: bool
    num_bytes: float
    gradients: tuple[bool, bool] = (True, True)
    of_weights: bool = False


class BlockWork(NamedTuple):
    """A block of a model, for one sample.

    Attributes:
        name: of its class.
        parameters: of it.
        elements: of what it hands on.
        traced: its operations in order.
        trained, quantized: as `Kind` has them.
    """

    name: str
    parameters: int
    elements: int
    traced: tuple[Traced, ...]
    trained: int
    quantized: tuple[int, int]


@lru_cache(maxsize=32)
@refusing_overflow()
def traced_blocks(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int, logit_bytes: float
) -> tuple[BlockWork, ...]:
    """The blocks of a model with the operations of one sample's forward, in order.

    Where the last block calls the others, it has what they do not compute, and the loss of a text.

    Args:
        logit_bytes: that the loss of a text moves forward, per logit.
    """
    built: Any = build_on_meta(model, image_size, sequence_length, num_classes).eval()
    x = sample_inputs(model, image_size=image_size, sequence_length=sequence_length)
    blocks: list[BlockWork] = []
    recorder = _Forward(built)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # MATH: attention as separate products, which have shapes
        if not built.is_chain:
            return _nested_work(built, x, logit_bytes if sequence_length is not None else 0.0)
        for block in built.blocks:
            recorder.traced = []
            with recorder:
                x = block(x)
            count, trained, quantized = _counted(built, block.parameters())
            blocks.append(BlockWork(type(block).__name__, count, x.numel(), tuple(recorder.traced), trained, quantized))
    return tuple(blocks)


def _counted(built: Any, parameters: Iterable[Any]) -> tuple[int, int, tuple[int, int]]:
    """Count weights, those that are trained, and those that are kept as codes, with the bytes of these."""
    from dlojz.models.foreign.hugging_face.low_rank import QuantizedBase

    # Scales and constants are bytes beside the codes, and no weights.
    sizes = {
        tensor: math.prod(part.shape) if tensor is part.codes else 0
        for part in built.modules()
        if isinstance(part, QuantizedBase)
        for tensor in (part.codes, part.scales, part.constants)
    }
    parameters = list(parameters)
    coded = [parameter for parameter in parameters if parameter in sizes]
    count = sum(sizes.get(parameter, parameter.numel()) for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return count, trained, (sum(map(sizes.__getitem__, coded)), sum(parameter.numel() for parameter in coded))


def _nested_work(built: Any, x: Any, logit_bytes: float) -> tuple[BlockWork, ...]:
    """Blocks of which the last calls the others, each once."""
    parts = built.blocks[:-1]
    elements, parameter_sets = [0] * len(parts), [set(block.parameters()) for block in built.blocks]
    parameter_sets[-1] -= set().union(*parameter_sets[:-1])
    traced: list[list[Traced]] = [[] for _ in built.blocks]
    with _Forward(built) as recorder:

        def enter(number: int) -> None:
            recorder.traced = traced[number]

        def leave(number: int, output: Any) -> None:
            recorder.traced = traced[-1]  # back in the outer block
            elements[number] = sum(tensor.numel() for tensor in _flat((output,)) if _is_tensor(tensor))

        hooks: list[Any] = []
        for number, part in enumerate(parts):
            hooks.append(part.register_forward_pre_hook(lambda *_, number=number: enter(number)))
            hooks.append(part.register_forward_hook(lambda *arguments, number=number: leave(number, arguments[-1])))
        recorder.traced = traced[-1]  # until a block begins, work is the outer one's
        logits = built(x)
        for hook in hooks:
            hook.remove()
    if logit_bytes:
        traced[-1].append(Traced(None, False, logit_bytes * logits.numel()))  # computed outside of the model
    names = [type(block).__name__ for block in built.blocks]
    counts, trained, quantized = zip(*(_counted(built, parameters) for parameters in parameter_sets), strict=True)
    sizes = [*elements, logits.numel()]
    return tuple(map(BlockWork, names, counts, sizes, map(tuple, traced), trained, quantized))


class _Forward(TorchDispatchMode):
    """Notes every operation on tensors; where weights are frozen, also which factors of it have a gradient.

    All that is computed from trained weights has one; tensors are told apart by their storages.
    """

    def __init__(self, built: Any) -> None:
        super().__init__()
        self.traced: list[Traced] = []
        self.follows = any(not parameter.requires_grad for parameter in built.parameters())
        self.trained = {_storage(parameter) for parameter in built.parameters() if parameter.requires_grad}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        traced = traced_operation(func.overloadpacket.__name__, args, result)
        if self.follows:
            factors = [_storage(tensor) in self.trained for tensor in _flat(args) if _is_tensor(tensor)]
            for written in filter(_is_tensor, _flat((result,))):
                # A storage that is new may have the number of one that is gone.
                (self.trained.add if any(factors) else self.trained.discard)(_storage(written))
            if traced is not None:
                pair = factors[:2] if func.overloadpacket.__name__ == "convolution" else factors[-2:]
                is_pass = traced.product is None
                traced = traced._replace(gradients=(any(factors), False) if is_pass else (pair[0], pair[1]))
        if traced is not None:
            self.traced.append(traced)
        return result


def traced_operation(name: str, args: Any, result: Any) -> Traced | None:  # noqa: PLR0911 - one for each kind
    """Translate one operator of PyTorch; None for a view, which does nothing.

    Args:
        name: of the operator, e.g. `addmm`.
        args: positional.
        result: what it gave.
    """
    tensors = [leaf for leaf in _flat(args) if _is_tensor(leaf)]
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = tensors[-2:]
        if left.ndim == 2:
            return Traced(Product(left.shape[0], right.shape[1], left.shape[1]), False, 0.0)
        batch, rows, inner = left.shape
        return Traced(Product(rows, right.shape[2], inner, batch, attention=True), True, 0.0)
    if name == "convolution":
        weight, groups = tensors[1], int(args[8])
        outputs = result.shape[0] * math.prod(result.shape[2:])  # positions of the output, of all samples
        inner = math.prod(weight.shape[1:])  # a filter: channels in / groups, kernel²
        if groups == weight.shape[0]:  # one filter per channel: bound by the bytes, not by the products
            return Traced(None, False, 2.0 * (tensors[0].numel() + result.numel()))
        return Traced(Product(outputs, weight.shape[0] // groups, inner, groups), False, 0.0)
    if name == "dequantize":  # of `low_rank`: codes, scales and constants are bytes
        read_bytes = sum(tensor.numel() for tensor in tensors)
        return Traced(None, False, read_bytes + 2.0 * result.numel(), of_weights=True)
    if name.lstrip("_").startswith(_VIEWS) or name in ("detach", "alias", "unsafe_view", "_unsafe_view"):
        return None
    written = [leaf for leaf in _flat((result,)) if _is_tensor(leaf)]
    read_tensors = written if name == "embedding" else tensors  # of its matrix, only the rows that are looked up
    return Traced(None, False, 2.0 * sum(tensor.numel() for tensor in (*read_tensors, *written)))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _storage(tensor: Any) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _is_tensor(value: Tensor | object) -> bool:
    return hasattr(value, "numel") and hasattr(value, "shape")
