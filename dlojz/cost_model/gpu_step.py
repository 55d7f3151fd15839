"""Predict the seconds of a step on one GPU from its kernels and its host, measured apart (`measuring_kernels`).

    kernel    seconds of the measured sizes nearest to its own, each scaled by the work that the two sizes come to
    host      of an operator what its launch took, times how much slower all are with this checkpointing and precision;
              and what a block costs beside its operators
    step      a kernel begins when it is launched, and the one before it is over; the update follows

The operators that the host launches in a micro-batch are read off the model on tensors without memory, with
recomputation and the casts of autocast, as memory is traced (`dlojz.prediction.model_trace`); an operator that is not
measured reads and writes its tensors as a sum does. Nothing is fitted to the seconds of a model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlojz.config.run_config import RunConfig
from dlojz.cost_model.calibration import nearest_mean
from dlojz.cost_model.measuring import Timed
from dlojz.cost_model.measuring_kernels import APART, LEVEL_LAYERS, tiny_blocks, tiny_step
from dlojz.hardware import Precision
from dlojz.hardware.links import fit_line
from dlojz.models.checkpointing import LEVELS, Checkpointing
from dlojz.models.foreign.elsewhere import contents_hash
from dlojz.models.foreign.names import is_elsewhere
from dlojz.models.foreign.sources import changes_its_model
from dlojz.prediction import trace_store
from dlojz.prediction.model_trace import TraceKey, key_of, tracer_of
from dlojz.prediction.shapes import RankPart

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


FORMS: Final = {"auto": "foreach", "in_backward": APART, "in_forward": APART}
"""Under which an update is measured, where it has another name."""


class Launching(NamedTuple):
    """What the host takes, beside what its launches take one by one.

    Attributes:
        slower: factor of a launch.
        block_s: of a block.
    """

    slower: float
    block_s: float


class Kernels:
    """A GPU's kernels and its host, as measured."""

    def __init__(self, timings: Sequence[Timed]) -> None:
        self.kernels: dict[tuple[str, Precision], dict[tuple[int, ...], float]] = {}
        launches: dict[tuple[str, Precision], list[float]] = {}
        self.levels: dict[tuple[str, Precision, int], float] = {}
        for timing in timings:
            if timing.what == "kernel":
                self.kernels.setdefault((timing.label, timing.precision), {})[timing.size] = timing.seconds
            elif timing.what == "host":
                launches.setdefault((timing.label, timing.precision), []).append(timing.seconds)
            elif timing.what == "level":
                self.levels[timing.label, timing.precision, timing.size[0]] = timing.seconds
        # Median seconds over all sizes: launching does not depend on the size.
        self.launches = {case: statistics.median(seconds) for case, seconds in launches.items()}
        self.updates = {
            timing.label: (_update(timings, "kernel", timing.label), _update(timings, "host", timing.label))
            for timing in timings
            if timing.what == "kernel" and timing.label.startswith("update")
        }
        # Seconds of the smallest pass: no kernel takes less.
        self.least_s = min(self.kernels.get((PASS, "fp32"), {(): 0.0}).values())
        self._known: dict[Operator, float] = {}

    def knows(self, config: RunConfig) -> bool:
        """Whether all is measured that a run on one GPU is made of."""
        layout = config.layout
        is_measured = layout.checkpointing in LEVELS and _label(config) in self.updates
        return is_measured and layout.world_size == 1 and layout.offload == "none" and not layout.activation_plan

    def kernel_s(self, operator: Operator) -> float:
        """Seconds of an operator on the GPU; 0 for a view."""
        if not operator.label:
            return 0.0
        if operator not in self._known:
            self._known[operator] = self._interpolated(operator)
        return self._known[operator]

    def _interpolated(self, operator: Operator) -> float:
        # Precisions that a label was not measured in (an embedding, a view) fall back on fp32.
        of_label = self.kernels.get((operator.label, operator.precision)) or self.kernels[operator.label, "fp32"]
        scaled_s = {}
        for size, seconds in of_label.items():
            share = _work(operator.label, operator.size) / _work(operator.label, size)
            # Above the least time, seconds grow with the work.
            scaled_s[size] = self.least_s + max(seconds - self.least_s, 0.0) * share
        return of_label.get(operator.size) or nearest_mean(operator.size, scaled_s)

    def launch_s(self, operator: Operator) -> float:
        """Seconds of launching an operator by itself; one in backward counts as a sum."""
        if not operator.label:
            return self.launches["view", "fp32"]
        label = PASS if "backward" in operator.label else operator.label
        return self.launches.get((label, operator.precision)) or self.launches[label, "fp32"]

    @lru_cache(maxsize=16)  # noqa: B019
    def launching(self, level: Checkpointing, precision: Precision) -> Launching:
        """What launching costs at a level of checkpointing: from blocks of few and of more layers."""
        few, many = (operators_of_level(layers, level, precision) for layers in LEVEL_LAYERS)
        few_s, more_s = (self.levels[level, precision, layers] for layers in LEVEL_LAYERS)
        few_launches_s, more_launches_s = (
            sum(map(self.launch_s, operators.calls)) / operators.blocks for operators in (few, many)
        )
        # Both per block, of 1 and of 5 layers: in the difference what a block itself costs cancels.
        slower = (more_s - few_s) / (more_launches_s - few_launches_s)
        return Launching(slower, max(few_s - slower * few_launches_s, 0.0))

    def step_s(self, config: RunConfig) -> float:
        """Predict the seconds of a step."""
        operators = operators_of(config)
        launching = self.launching(config.layout.checkpointing, config.compute_precision)
        host_s = gpu_s = 0.0
        for micro_batch in range(config.layout.micro_batches):
            host_s, gpu_s = self._played(operators, launching, host_s, gpu_s)
            if micro_batch:  # gradients are added to those of the micro-batch before
                host_s += len(operators.tensors) * launching.slower * self.launches[PASS, "fp32"]
                gpu_s += self.kernel_s(Operator(PASS, (sum(operators.tensors),)))  # one pass over all gradients
        (tensor_s, element_s), (call_s, launch_s) = self.updates[_label(config)]
        # The update's kernels begin when the GPU is done with backward, and the host has come to the update.
        gpu_s = max(gpu_s, host_s) + tensor_s * len(operators.tensors) + element_s * sum(operators.tensors)
        # The step ends when both GPU and host have.
        return max(gpu_s, host_s + call_s + launch_s * len(operators.tensors))

    def _played(self, operators: Operators, launching: Launching, host_s: float, gpu_s: float) -> tuple[float, float]:
        """When the host and the GPU are done with a micro-batch, from when they are with what was before."""
        # A block's own cost, spread evenly over its operators.
        around_s = launching.block_s * operators.blocks / len(operators.calls)
        for operator in operators.calls:
            host_s += around_s + launching.slower * self.launch_s(operator)
            if operator.label:  # a view occupies the host alone
                gpu_s = max(gpu_s, host_s) + self.kernel_s(operator)
        return host_s, gpu_s


def _label(config: RunConfig) -> str:
    return f"update: {config.optimizer}, {FORMS.get(config.update, config.update)}"


def _update(timings: Sequence[Timed], kind: str, label: str) -> tuple[float, float]:
    """Seconds of an update: of its kernels per tensor and per element, of its launches per call and per tensor."""
    label_timings = [timing for timing in timings if timing.what == kind and timing.label == label]
    if kind == "host":  # calls are 1 each: seconds = call_s · 1 + launch_s · tensors
        return fit_line([(1.0, float(timing.size[0]), timing.seconds) for timing in label_timings])
    return fit_line(
        [(float(timing.size[0]), float(math.prod(timing.size)), timing.seconds) for timing in label_timings]
    )


def _work(label: str, size: Sequence[int]) -> float:
    """What the seconds of large kernels with this label are in proportion to."""
    if label.startswith("convolution"):
        # Multiply-adds: outputs × (kernel² · inside / groups) each.
        images, inside, outside, side, kernel, stride, groups = size
        return images * outside * (side / stride) ** 2 * kernel**2 * inside / groups
    if label.startswith("attention"):
        samples, heads, tokens, width = size[:4]
        return samples * heads * tokens**2 * width
    if label.startswith("embedding"):
        tokens, words, width = size
        # Backward writes the gradient of the whole matrix.
        return words * width if "backward" in label else tokens * width
    return math.prod(size)
