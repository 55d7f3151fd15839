"""Engine memory: what an engine with whole weights holds besides states and activations, and when.

A `Ledger` records what is held through a training step, by category and by block, and its peak. An `EngineMemory`
listens to the trace of one process (a module begins, a gradient is ready, backward is over) and holds or drops what the
engine allocates then; the bytes of its states come from `states`. Here: one process, DDP (torch's, by hand, with hooks,
Megatron-core's), optimizers that compress or rarely communicate, updates within the passes; and the replay of a step.

The moments follow `dlojz.by_hand.optimizers`, `dlojz.train.engines.replicated` and, for hooks, torch 2.13
`distributed/algorithms/ddp_comm_hooks` line by line. With hooks on a CPU a bucket of PowerSGD has arrived before the
next one leaves. Gradients of `in_backward` are workspace: they are gone before the engine's inventory shows them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from dlojz import models
from dlojz.by_hand.optimizers.sent_bytes import SIGNS_PER_BYTE, chunk_bytes, chunk_elements
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.config.run_config import RunConfig
from dlojz.models.sizes import GPTSize
from dlojz.prediction.model_trace import block_of
from dlojz.prediction.shapes import FP32_BYTES, HALF_BYTES, ModelShapes, ParameterShape, bucket_bytes_of, fill_buckets
from dlojz.prediction.states import compressed, ddp_buckets, is_orthogonalized, renewed_bytes, state_elements
from dlojz.prediction.trace import Allocation, MemoryTrace, TraceMark
from dlojz.results.footprint import CATEGORIES, STATES, Category, Memory
from dlojz.results.record import MemorySample

MAX_SAMPLES = 400
_ON_HOST = -1


@dataclass(frozen=True, slots=True)
class Movement:
    """Bytes allocated (or released, where negative) under a key, with the label that a memory viewer shows.

    `stream` is the CUDA stream that allocates them: the caching allocator has a pool for each.
    """

    key: int
    delta_bytes: int
    label: str
    stream: int = 0


class Ledger:
    """Ledger of a step: holds and drops bytes, and records the peak.

    `moment` is the phase of the step, `detail` the micro-batch and the module; both are kept with the peak.
    """

    def __init__(self) -> None:
        self.moment = ""
        self.detail = (0, "")
        self.peak_detail = (0, "")
        self.movements: list[Movement] = []
        self.host_bytes = self.most_host_bytes = 0
        self._held: dict[Any, tuple[Category, str, int, int]] = {}
        self._by_category: Counter[Category] = Counter()
        self._by_block: Counter[tuple[str, Category]] = Counter()
        self._largest: dict[Category, int] = defaultdict(int)
        self._keys = 0
        self._total_bytes = 0
        self.peak_bytes, self.peak_moment = 0, ""
        self._at_peak: Counter[Category] = Counter()
        self._peak_blocks: Counter[tuple[str, Category]] = Counter()
        self._history: list[tuple[str, Category, int]] = []

    def hold(self, key: Any, category: Category, num_bytes: int, block: str = "", stream: int = 0) -> None:
        """Hold bytes under a key, allocated by a stream; what the key held before is replaced."""
        self.drop(key)
        if num_bytes <= 0:
            return
        # Each allocation has its own number: what a key holds anew is another storage to a memory viewer.
        self._keys += 1
        self._held[key] = (category, block, num_bytes, self._keys)
        self._move(category, block, num_bytes)
        self.movements.append(Movement(self._keys, num_bytes, f"{category}: {block or key} ({self.moment})", stream))
        if self._total_bytes > self.peak_bytes:  # of equal peaks the first
            self.peak_bytes, self.peak_moment = self._total_bytes, self.moment
            self.peak_detail = self.detail
            self._at_peak, self._peak_blocks = self._by_category.copy(), self._by_block.copy()

    def hold_briefly(self, key: Any, category: Category, num_bytes: int, block: str = "", stream: int = 0) -> None:
        """Hold bytes and drop them at once: a temporary."""
        self.hold(key, category, num_bytes, block, stream)
        self.drop(key)

    def drop(self, key: Any) -> None:
        """Drop what a key holds, if anything."""
        entry = self._held.pop(key, None)
        if entry is None:
            return
        category, block, num_bytes, number = entry
        if number == _ON_HOST:
            self.host_bytes -= num_bytes
            return
        self._move(category, block, -num_bytes)
        self.movements.append(Movement(number, -num_bytes, ""))

    def hold_on_host(self, key: Any, num_bytes: int) -> None:
        """Hold bytes of host memory, which are none of the device's."""
        self.drop(key)
        # No category counts it: `drop` stops at the number before it reads one.
        self._held[key] = ("activations", "", num_bytes, _ON_HOST)
        self.host_bytes += num_bytes
        self.most_host_bytes = max(self.most_host_bytes, self.host_bytes)

    def bytes_of(self, key: Any) -> int:
        """Bytes that a key holds."""
        return self._held[key][2] if key in self._held else 0

    def bytes_of_category(self, category: Category) -> int:
        """Bytes that are held of a category at this moment."""
        return self._by_category[category]

    def rename(self, key: Any, name: Any) -> None:
        """Move what a key holds to another name; what that name held is dropped."""
        entry = self._held.pop(key, None)
        if entry is not None:
            self.drop(name)
            # No movement: the storage is the same, and keeps its category.
            self._held[name] = entry

    def holds(self, key: Any) -> bool:
        """Whether a key holds anything."""
        return key in self._held

    def _move(self, category: Category, block: str, delta_bytes: int) -> None:
        self._by_category[category] += delta_bytes
        self._by_block[block, category] += delta_bytes
        self._largest[category] = max(self._largest[category], self._by_category[category])
        self._total_bytes += delta_bytes
        self._history.append((self.moment, category, delta_bytes))

    def memory(self) -> Memory:
        """Largest bytes by category, and the peak of their sum."""
        return Memory(
            # What a script's own variables hold is measured only.
            **{f"{category}_bytes": self._largest[category] for category in CATEGORIES if category != "script"},
            peak_bytes=self.peak_bytes,
            peak_moment=self.peak_moment,
            at_peak_bytes={category: self._at_peak[category] for category in CATEGORIES},
            host_bytes=self.most_host_bytes,
        )

    def peak_by_block(self) -> tuple[tuple[str, dict[Category, int]], ...]:
        """Bytes of each block at the peak, by category; under the empty name what belongs to no block."""
        blocks: dict[str, dict[Category, int]] = {}
        for (block, category), num_bytes in self._peak_blocks.items():
            if num_bytes:
                blocks.setdefault(block, {})[category] = num_bytes
        return tuple(blocks.items())

    def samples(self) -> tuple[MemorySample, ...]:
        """Sample the step: at most `MAX_SAMPLES` moments, of each stretch the fullest, so that no peak is lost.

        The time is the number of the movement, as a prediction knows the order only.
        """
        live_bytes: Counter[Category] = Counter()
        moments: list[tuple[int, int, str, dict[str, int]]] = []
        for number, (moment, category, delta_bytes) in enumerate(self._history):
            live_bytes[category] += delta_bytes
            moments.append(
                (sum(live_bytes.values()), number, moment, {str(name): live_bytes[name] for name in CATEGORIES})
            )
        stretch = -(-len(moments) // MAX_SAMPLES) or 1  # at least 1, where nothing has moved
        fullest = (max(moments[i : i + stretch], key=lambda moment: moment[0]) for i in range(0, len(moments), stretch))
        return tuple(
            MemorySample(time_s=float(number), phase=moment, bytes_by_category=category_bytes)
            for _, number, moment, category_bytes in fullest
        )


class Moments(Protocol):
    """Interface of the replayed step that an engine's memory may use."""

    ledger: Ledger
    micro_batch: int
    """Number of the micro-batch, from 0."""
    gradient_bytes: int
    """Largest bytes of gradients that are states, where they are more than those between steps."""

    @property
    def last(self) -> bool:
        """Whether no other micro-batch follows in this step."""

    def free_gradient(self, name: str) -> None:
        """Give back the gradient that autograd has just made."""


class EngineMemory:
    """Engine memory of one process: gradients stay where autograd has put them."""

    keeps_gradients = True
    """Whether the gradients of a micro-batch stay as autograd has made them."""

    gradients_are_states = True
    """Whether these are the gradients of the engine's inventory, or on their way to those."""
    gradients_stay = False
    """Whether the engine's gradients are there when a step begins."""

    on_gpu = False
    dp_rank = 0

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        self.config, self.shapes = config, shapes
        self.by_name = {parameter.name: parameter for parameter in shapes.parameters}

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        """Bytes held from step to step besides the states."""
        return {}

    def pieces(self, category: Category, num_bytes: int) -> list[int]:
        """Split a state into its tensors, where these are the parameters; else one piece."""
        del category
        return [num_bytes]

    def begin_backward(self, step: Moments) -> None:
        """The backward pass of a micro-batch begins."""

    def gathered_bytes(self) -> int:
        """Weights among the states that exist only while the step runs."""
        return 0

    def renewed_bytes(self) -> int:
        """Optimizer states that exist only while the step runs: new ones beside the old, for a moment."""
        return 0

    def begin_step(self, step: Moments) -> None:
        """The step begins."""

    def forward(self, step: Moments, module: str) -> None:
        """A module's forward begins."""

    def forwarded(self, step: Moments, module: str) -> None:
        """A module's forward is over."""

    def backward(self, step: Moments, module: str) -> None:
        """A module's backward begins."""

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        """The gradient of a parameter is ready, in its own tensor."""

    def end_backward(self, step: Moments) -> None:
        """The backward pass of a micro-batch is over."""

    def update(self, step: Moments) -> None:
        """The optimizer steps."""
        whole = [parameter for parameter in self.shapes.parameters if parameter.is_trained]
        num_bytes = self.matrix_update_bytes(whole) if self.of_matrices else self.update_bytes(self.updated())
        step.ledger.hold_briefly("update", "workspace", num_bytes)

    @property
    def of_matrices(self) -> bool:
        """Whether the temporaries of the update depend on the form of a matrix."""
        return bool(OPTIMIZERS[self.config.optimizer].matrix_states)

    def matrix_update_bytes(self, parameters: Sequence[ParameterShape]) -> int:
        """Temporaries of Muon's or Adafactor's update of these parameters, one after the other, in bytes.

        Adafactor: the estimate of the variance, which becomes the update, besides the last tensor's, and the means of
        the largest. Muon, of a matrix
        n × m with k = min(n, m): its update, twice X (n × m) and three times A (k × k) in bf16, besides the last
        matrix's X; then AdamW of all else. Source: torch 2.13 `optim/_adafactor.py`, `_single_tensor_adafactor`;
        `dlojz.by_hand.optimizers.muon`.
        """
        spec = OPTIMIZERS[self.config.optimizer]
        matrices = [parameter for parameter in parameters if is_orthogonalized(spec, parameter)]
        other_bytes = [
            parameter.element_bytes * self.elements_of(parameter)
            for parameter in parameters
            if not is_orthogonalized(spec, parameter)
        ]
        if spec.orthogonal:
            peaks = [self.orthogonal_bytes(parameter) for parameter in matrices]
            return max([*peaks, self._adamw_bytes(other_bytes)])
        means = [
            parameter.element_bytes * state_elements(spec, parameter, parameter.numel)
            for parameter in parameters
            if len(parameter.shape) > 1
        ]
        pairs = pairwise([0, *other_bytes])
        return max(size_bytes + former_bytes for former_bytes, size_bytes in pairs) + max(means, default=0)

    def orthogonal_bytes(self, parameter: ParameterShape) -> int:
        """Temporaries of Muon's update of a hidden matrix, in bytes; of a rank with some rows, with those gathered."""
        smaller, elements = min(parameter.shape), self.elements_of(parameter)
        x_bytes, gram_bytes = HALF_BYTES * parameter.numel, HALF_BYTES * smaller**2
        gathered_bytes = x_bytes if elements < parameter.numel else 0
        # A product may be made while A of the step before, and its polynomial, are still there; the next X beside this.
        products_bytes = x_bytes + max(3 * gram_bytes, 2 * gram_bytes + x_bytes)
        return parameter.element_bytes * elements + gathered_bytes + products_bytes

    def _adamw_bytes(self, tensor_bytes: Sequence[int]) -> int:
        """Temporaries of AdamW, all at once on a GPU, else one after the other, in bytes."""
        if self.on_gpu:
            return sum(tensor_bytes)
        return max(2 * size_bytes + former_bytes for former_bytes, size_bytes in pairwise([0, 0, *tensor_bytes]))

    def elements_of(self, parameter: ParameterShape) -> int:
        """Elements of a parameter that this rank updates."""
        return parameter.numel

    def updated(self) -> list[int]:
        """Elements of the tensors that the optimizer updates on this rank."""
        return [parameter.numel for parameter in self.shapes.parameters]

    def update_bytes(self, sizes: list[int]) -> int:
        """Temporaries of an update of tensors of these sizes, in bytes; LAMB's are AdamW's, one after the other.

        They are of the type of the weights.

        An 8-bit update is one kernel, which needs none (bitsandbytes, `optimizer_update_8bit_blockwise`). AdamW one
        after the other (`for_loop`, the CPU's way): a square root and its quotient, besides the last tensor's
        quotient; all at once (`foreach`, the GPU's way): a square root of all. SGD with weight decay: a gradient with
        the decay added, of one tensor or of all. A fused kernel needs none of these. Source: torch 2.13
        `optim/adam.py`, `_single_tensor_adam` and `_multi_tensor_adam`; `optim/sgd.py`, likewise.
        """
        config, spec = self.config, OPTIMIZERS[self.config.optimizer]
        if not sizes or config.update == "fused" or spec.block_elements:
            return 0
        # As torch chooses where nothing is asked for: all at once on CUDA only.
        auto = "foreach" if self.on_gpu and spec.has_forms else "for_loop"
        at_once = (auto if config.update == "auto" else config.update) == "foreach"
        element_sizes = [parameter.element_bytes for parameter in self.shapes.parameters if parameter.is_trained]
        if len(element_sizes) != len(sizes):  # one tensor, or the parts of a flat one: all of one type
            element_sizes = element_sizes[:1] * len(sizes)
        tensor_bytes = [element_bytes * size for element_bytes, size in zip(element_sizes, sizes, strict=True)]
        if spec.state_tensors in ((), ("momentum_buffer",)):
            return (sum(tensor_bytes) if at_once else max(tensor_bytes)) if config.weight_decay else 0
        if "exp_avg" not in spec.state_tensors:
            return 0
        if at_once:
            return sum(tensor_bytes)
        return max(2 * size_bytes + former_bytes for former_bytes, size_bytes in pairwise([0, *tensor_bytes]))

    def end_step(self, step: Moments) -> None:
        """The step is over: gradients that outlive it aside, nothing of it is left."""


class DDP(EngineMemory):
    """Engine memory of torch's DDP: buckets as large as the gradients, for good; or the gradients are views of them.

    Source: torch 2.13 `csrc/distributed/c10d/reducer.cpp`, `initialize_buckets`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.keeps_gradients = not config.layout.gradient_as_bucket_view

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        category: Category = "workspace" if self.keeps_gradients else "gradients"
        return {"buckets": (category, sum(parameter.num_bytes for parameter in self.shapes.parameters))}

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not self.keeps_gradients:  # added into the bucket, of which the parameter's gradient is a view
            step.free_gradient(parameter.name)


class ByHand(EngineMemory):
    """Engine memory of DDP by hand: a bucket is one tensor from its last gradient until all are synchronised.

    Source: `dlojz.by_hand.ddp`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.set_buckets(fill_buckets(reversed(shapes.parameters), bucket_bytes_of(config)))
        self.missing: list[int] = []

    def set_buckets(self, buckets: list[list[ParameterShape]]) -> None:
        """Number the buckets in the order in which they leave."""
        self.in_bucket = buckets
        self.bucket_of = {parameter.name: number for number, bucket in enumerate(buckets) for parameter in bucket}
        self.bucket_bytes = [sum(parameter.num_bytes for parameter in bucket) for bucket in buckets]

    def begin_step(self, step: Moments) -> None:
        self.missing = [len(bucket) for bucket in self.in_bucket]

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not step.last or self.config.layout.replicas == 1:
            return
        # Buckets leave in the last micro-batch; before, gradients only add up.
        number = self.bucket_of[parameter.name]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            step.ledger.hold(("bucket", number), "workspace", self.bucket_bytes[number])

    def end_backward(self, step: Moments) -> None:
        for number in range(len(self.bucket_bytes)):
            step.ledger.drop(("bucket", number))


class Compressed(EngineMemory):
    """Engine memory of 1-bit Adam, 1-bit LAMB and 0/1 Adam in their second stage."""

    def update_bytes(self, sizes: list[int]) -> int:
        """Peak of the update in bytes, besides the errors, which are states.

        While parameters are compressed one after the other: the momentum, the root of its variance twice, the quotient
        and where the variance is 0 (a byte each), and the former message. While chunks are compressed: the messages,
        and of one chunk the signs as bytes and as numbers. Then the mean of all, and the update of one parameter.
        """
        dp, last_size = self.config.layout.dp, sizes[-1]
        telling = max(
            3 * FP32_BYTES * size + size + FP32_BYTES * previous_size for previous_size, size in pairwise([0, *sizes])
        )
        updating = OPTIMIZERS[self.config.optimizer].update_tensors * FP32_BYTES * max(sizes)
        if dp == 1:  # all that is told, and the same end to end
            flat_bytes = FP32_BYTES * sum(sizes)
            return max(2 * flat_bytes, flat_bytes + updating)
        chunk = chunk_elements(sum(sizes), dp)
        messages = 2 * dp * chunk_bytes(chunk) + FP32_BYTES * last_size
        mean = FP32_BYTES * dp * chunk
        reading = FP32_BYTES * chunk + chunk + chunk // SIGNS_PER_BYTE
        # The three moments follow one another: the largest counts.
        return max(telling, messages + mean + reading, mean + updating)


class LocalStepsMemory(EngineMemory):
    """Engine memory of local SGD and DiLoCo, in a step after which the replicas meet: one message of Ψ numbers."""

    def update_bytes(self, sizes: list[int]) -> int:
        """Temporaries of the inner update, or the message of the meeting, whichever is more, in bytes."""
        inner = EngineMemory(
            self.config.model_copy(update={"optimizer": OPTIMIZERS[self.config.optimizer].baseline}), self.shapes
        )
        inner.on_gpu = self.on_gpu
        # DiLoCo's outer step exists with one replica too.
        meets = self.config.layout.dp > 1 or self.config.optimizer == "diloco"
        return max(inner.update_bytes(sizes), FP32_BYTES * sum(sizes) if meets else 0)


class HookedDDP(DDP):
    """Engine memory of DDP with a hook: gradients leave in half the bytes, or as PowerSGD's matrices."""

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        members = ddp_buckets(config, shapes)
        self._bucket_of = {parameter.name: number for number, bucket in enumerate(members) for parameter in bucket}
        self._sizes = [len(bucket) for bucket in members]
        self._buckets = [compressed(bucket, config.layout.powersgd_rank) for bucket in members]
        self._missing: list[int] = []

    def renewed_bytes(self) -> int:
        """New errors of the largest bucket, beside the old."""
        return renewed_bytes(self.config, self.shapes)

    def begin_step(self, step: Moments) -> None:
        self._missing = list(self._sizes)

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        super().ready(step, parameter)
        if not step.last:
            return
        number = self._bucket_of[parameter.name]
        self._missing[number] -= 1
        if self._missing[number]:
            return
        bucket, ledger = self._buckets[number], step.ledger
        if self.config.layout.gradient_compression != "powersgd":
            ledger.hold("half", "workspace", HALF_BYTES * bucket.whole)  # the former bucket's has arrived
            return
        # A copy of the gradients with the errors added; what is not compressed, end to end; then the new errors.
        ledger.hold("copy", "workspace", FP32_BYTES * (bucket.whole + bucket.plain))
        ledger.hold_briefly("errors", "optimizer", FP32_BYTES * bucket.whole)
        ledger.drop("copy")

    def end_backward(self, step: Moments) -> None:
        step.ledger.drop("half")


def _updates(overlay: EngineMemory, step: Moments, parameter: ParameterShape) -> None:
    alone_bytes = overlay.matrix_update_bytes([parameter]) if overlay.of_matrices else None
    update_bytes = overlay.update_bytes([parameter.numel]) if alone_bytes is None else alone_bytes
    step.ledger.hold_briefly("update", "workspace", update_bytes)


class InBackwardMemory(EngineMemory):
    """Engine memory of one process that updates a parameter, and frees its gradient, once that is ready."""

    gradients_are_states = False

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        _updates(self, step, parameter)
        step.free_gradient(parameter.name)

    def update(self, step: Moments) -> None:
        """Nothing is left to update."""


class ByHandInBackward(ByHand):
    """Engine memory of DDP by hand that updates in backward: a bucket is used and freed once the next one has left."""

    gradients_are_states = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.next = 0

    def begin_step(self, step: Moments) -> None:
        super().begin_step(step)
        self.next = 0

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        self.missing[self.bucket_of[parameter.name]] -= 1
        # Buckets leave in one order on all ranks: a full one waits for those before it.
        while self.next < len(self.missing) and not self.missing[self.next]:
            self._leave(step)

    def _leave(self, step: Moments) -> None:
        """The next bucket is sent, and the one before it has arrived."""
        number = self.next
        self.next += 1
        step.ledger.hold(("bucket", number), "workspace", self.bucket_bytes[number])
        for parameter in self.in_bucket[number]:
            step.free_gradient(parameter.name)
        if number:
            self._arrive(step, number - 1)

    def _arrive(self, step: Moments, number: int) -> None:
        for parameter in self.in_bucket[number]:
            _updates(self, step, parameter)
        step.ledger.drop(("bucket", number))

    def end_backward(self, step: Moments) -> None:
        while self.next < len(self.missing):
            self._leave(step)
        self._arrive(step, len(self.missing) - 1)

    def update(self, step: Moments) -> None:
        """Nothing is left to update."""


class InForward(EngineMemory):
    """Engine memory of updates in the next forward, which frees a module's gradients before it computes."""

    gradients_stay = True

    def pieces(self, category: Category, num_bytes: int) -> list[int]:
        """Split gradients by parameter, as they are freed so."""
        if category == "gradients":
            return [parameter.num_bytes for parameter in self.shapes.parameters]
        return super().pieces(category, num_bytes)

    def forward(self, step: Moments, module: str) -> None:
        super().forward(step, module)
        for number, parameter in enumerate(self.shapes.parameters):
            key = ("state", "gradients", number)
            if parameter.module == module and step.ledger.holds(key):
                _updates(self, step, parameter)
                step.ledger.drop(key)

    def update(self, step: Moments) -> None:
        """Keep the gradients for the next step."""
        for number, parameter in enumerate(self.shapes.parameters):
            # The same bytes: this step's gradient is a state when the next one begins.
            step.ledger.rename(("gradient", parameter.name), ("state", "gradients", number))


class DDPInForward(InForward, DDP):
    """Engine memory of updates in the next forward under torch's DDP."""


class ByHandInForward(InForward, ByHand):
    """Engine memory of updates in the next forward under DDP by hand."""


def by_hand_in_backward(config: RunConfig, shapes: ModelShapes) -> EngineMemory:
    """Build the memory of DDP by hand that updates in backward; one process sends nothing and has no buckets."""
    return (ByHandInBackward if config.layout.replicas > 1 else InBackwardMemory)(config, shapes)


class Megatron(EngineMemory):
    """Engine memory of Megatron-core's DDP: gradients are added into a buffer that is there from the start.

    From the first step on `GlobalMemoryBuffer` keeps a tensor of the size of all attention scores of a layer, 4·a·s²·b
    bytes (a heads of the rank, s tokens, b samples), as the unwritten addend of a product.

    Source: megatron-core 0.16.1, `distributed/param_and_grad_buffer.py`, `transformer/dot_product_attention.py`.
    """

    keeps_gradients = False
    gradients_stay = True

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        size, layout = models.spec(self.config.model).size, self.config.layout
        heads = size.num_heads // layout.tp if isinstance(size, GPTSize) else 0
        # (b, a, s, s) elements.
        scores = heads * (self.config.sequence_length or 0) ** 2 * layout.micro_batch
        return {"scores": ("workspace", FP32_BYTES * scores)}

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        step.free_gradient(parameter.name)


REPLAYED_MICRO_BATCHES = 3
"""The second micro-batch stands for all that follow it but the last."""


class StepReplay:
    """Replay of a step: the trace of one micro-batch through a ledger, as often as the step has micro-batches.

    Args:
        states: of this rank, as they are from step to step.
        samples_bytes: kept of the step's samples.
        ledger: to write in; by default a new one.
    """

    def __init__(
        self,
        config: RunConfig,
        trace: MemoryTrace,
        states: Memory,
        overlay: EngineMemory,
        *,
        samples_bytes: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.config, self.trace, self.overlay = config, trace, overlay
        self.ledger = ledger or Ledger()
        self.micro_batch = 0
        self.gradient_bytes = 0
        """Bytes of the gradients that autograd makes, where the engine keeps them; larger than the parameters where a
        gradient is a view of a larger tensor."""
        self.without_gradient: tuple[str, ...] = ()
        """Names of parameters that backward does not reach though they are not frozen."""
        self._samples_bytes = samples_bytes
        self.states = states
        self._is_gradient = {
            event.storage: event.name
            for event in trace.events
            if isinstance(event, TraceMark) and event.what == "ready"
        }
        self._accumulated: set[str] = set()
        self._phase = ""

    @property
    def last(self) -> bool:
        """Whether no other micro-batch follows in this step."""
        return self.micro_batch == self.config.layout.micro_batches - 1

    def free_gradient(self, name: str) -> None:
        """Free the gradient that autograd has just made."""
        self.ledger.drop(("gradient", name))

    def run(self) -> Ledger:
        """Replay the whole step; called again, the next one."""
        ledger = self.ledger
        self._at("between steps")
        if not ledger.holds(("state", "weights", 0)):
            self._hold_states()
        self.overlay.begin_step(self)
        self._at("forward")
        if self._samples_bytes:
            ledger.hold(("samples",), "activations", self._samples_bytes)
        self._micro_batches()
        ledger.drop(("samples",))
        self._at("optimizer")
        self.overlay.update(self)
        for name in self.overlay.by_name:
            self.free_gradient(name)
        self.overlay.end_step(self)
        self._accumulated.clear()
        return ledger

    def _micro_batches(self) -> None:
        """Replay forward and backward of the micro-batches."""
        previous_batch, count = -1, self.config.layout.micro_batches
        for number in range(count):
            if number < REPLAYED_MICRO_BATCHES - 1 or number == count - 1:
                self.micro_batch = number
                self._pass(previous_batch)
                previous_batch = number
        self._forget_batch(self.micro_batch)

    def _hold_states(self) -> None:
        for category in STATES:
            if category == "gradients" and not self.overlay.gradients_stay:
                continue
            category_bytes = self.states.category(category) or 0
            if category == "weights":
                category_bytes -= self.overlay.gathered_bytes()
            if category == "optimizer":
                category_bytes -= self.overlay.renewed_bytes()
            for number, piece in enumerate(self.overlay.pieces(category, category_bytes)):
                self.ledger.hold(("state", category, number), category, piece)
        for name, (category, num_bytes) in self.overlay.standing().items():
            self.ledger.hold(("standing", name), category, num_bytes)

    def _at(self, phase: str, module: str = "") -> None:
        if phase != self._phase and phase == "backward":
            self._phase = phase
            self.overlay.begin_backward(self)
        self._phase = self.ledger.moment = phase
        self.ledger.detail = (self.micro_batch, module)

    def _forget_batch(self, number: int) -> None:
        for storage in self.trace.kept:
            self.ledger.drop(("storage", number, storage))

    def _pass(self, previous_batch: int) -> None:
        """Forward and backward of a micro-batch; the samples of `previous_batch` go once this one's are there."""
        number = self.micro_batch
        for event in self.trace.events:
            if isinstance(event, TraceMark):
                self._mark(event)
                continue
            if event.phase == "forward" and previous_batch >= 0:
                self._forget_batch(previous_batch)
                previous_batch = -1
            self._at(event.phase, event.module)
            self._allocate(event, number)
        self.end_backward()

    def end_backward(self) -> None:
        """End the backward pass of a micro-batch."""
        self.overlay.end_backward(self)
        gradient_names = [name for name in self.overlay.by_name if self.ledger.holds(("gradient", name))]
        self.gradient_bytes = max(
            self.gradient_bytes, sum(self.ledger.bytes_of(("gradient", name)) for name in gradient_names)
        )

    def _allocate(self, event: Allocation, number: int) -> None:
        name, block = self._is_gradient.get(event.storage), block_of(event.module)
        if name is not None:
            if event.delta_bytes > 0:
                is_accumulated = name in self._accumulated or not self.overlay.keeps_gradients
                category: Category = (
                    "gradients" if self.overlay.gradients_are_states and not is_accumulated else "workspace"
                )
                self.ledger.hold(("gradient", name, "new"), category, event.delta_bytes, block)
            return
        key = ("storage", number, event.storage)
        if event.delta_bytes < 0:
            self.ledger.drop(key)
        elif event.delta_bytes == 0:
            self.ledger.hold(("nothing",), "workspace", 0, block)  # a slot begins, or a sum in place
        elif event.storage in self.trace.on_host:
            self.ledger.hold_on_host(key, event.delta_bytes)
        else:
            category = "activations" if event.storage in self.trace.kept else "workspace"
            self.ledger.hold(key, category, event.delta_bytes, block)

    def _mark(self, event: TraceMark) -> None:
        if event.what == "weights":
            return  # the weights' half of a backward; its gradients follow
        if event.what != "ready":
            getattr(self.overlay, event.what)(self, event.name)
            return
        new, gradient_key = ("gradient", event.name, "new"), ("gradient", event.name)
        if event.name in self._accumulated and self.overlay.keeps_gradients:
            self.ledger.drop(new)  # added into the gradient that is there
        else:
            self.ledger.rename(new, gradient_key)
            self._accumulated.add(event.name)
        parameter = self.overlay.by_name.get(event.name)
        if parameter is not None:
            self.overlay.ready(self, parameter)
