"""Engine memory: what an engine with whole weights holds besides states and activations, and when.

One training step of one rank as a ledger: what is held, by category and by block, and when it is most.

Pure bookkeeping. What is held came in by `hold` under a key and goes out by `drop` of that key, so that the sum over
the categories is the total at every moment.

One process, and what an overlay is: what an engine holds besides what one process would allocate, and when.

An overlay only listens to the trace of one process (a unit begins, a gradient is ready, backward is over) and answers
with what the engine then takes or gives back; the bytes of its states come from `states`.

The whole model on every rank: torch's DDP, and DDP by hand.

See `base`.

Optimizers that communicate: nothing is sent or held before the update, which takes as much as the weights.

See `base`; the moments below follow the lines of `dlojz.by_hand.optimizers` one by one.

Local SGD and DiLoCo: an inner optimizer's update, then, where the replicas meet, one message of Ψ numbers.

See `base`; the moments follow the lines of `dlojz.by_hand.optimizers.local_sgd`.

torch's DDP with a hook: what it takes beside the buckets, when one leaves.

See `base`; on a CPU a bucket of PowerSGD has arrived before the next one leaves.

Source: torch 2.13, `distributed/algorithms/ddp_comm_hooks`, line by line.

Updates within the passes: in backward, where gradients are temporaries, or in the next forward, which finds them.

See `base`. What the probe measures shows the gradients of `in_backward` as workspace: they are gone before the engine
can show them in an inventory, and what autograd keeps of them at once is all that there ever is.

Source: `dlojz.by_hand.optimizers.in_backward`; DDP by hand: `dlojz.train.engines.replicated`.

Megatron-core's `DistributedDataParallel`: one buffer of gradients, and one of attention scores.

See `base`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from dlojz import models
from dlojz.base.language import MEBIBYTE
from dlojz.by_hand.optimizers.sent_bytes import SIGNS_PER_BYTE, chunk_bytes, chunk_elements
from dlojz.config.run_config import RunConfig
from dlojz.models.sizes import GPTSize
from dlojz.prediction.shapes import DDP_BUCKET_BYTES, FP32_BYTES, HALF_BYTES, ModelShapes, ParameterShape
from dlojz.prediction.states import buckets, compressed, renewed_bytes
from dlojz.results.footprint import CATEGORIES, Category, Memory
from dlojz.results.record import MemorySample

MAX_SAMPLES = 400
_ON_HOST = -1


@dataclass(frozen=True, slots=True)
class Movement:
    """Bytes that came (or went, where negative) under a key, with what a memory viewer shows of them."""

    key: int
    delta_bytes: int
    label: str


class Ledger:
    """Holds and drops bytes, and remembers the fullest moment.

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

    def hold(self, key: Any, category: Category, num_bytes: int, block: str = "") -> None:
        """Take in bytes under a key; what the key held before is replaced."""
        self.drop(key)
        if num_bytes <= 0:
            return
        self._keys += 1
        self._held[key] = (category, block, num_bytes, self._keys)
        self._move(category, block, num_bytes)
        self.movements.append(Movement(self._keys, num_bytes, f"{category}: {block or key} ({self.moment})"))
        if self._total_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_moment = self._total_bytes, self.moment
            self.peak_detail = self.detail
            self._at_peak, self._peak_blocks = self._by_category.copy(), self._by_block.copy()

    def drop(self, key: Any) -> None:
        """Let go of what a key holds; nothing happens where it holds nothing."""
        found = self._held.pop(key, None)
        if found is None:
            return
        category, block, num_bytes, number = found
        if number == _ON_HOST:
            self.host_bytes -= num_bytes
            return
        self._move(category, block, -num_bytes)
        self.movements.append(Movement(number, -num_bytes, ""))

    def hold_on_host(self, key: Any, num_bytes: int) -> None:
        """Take in bytes of host memory, which are none of the device's."""
        self.drop(key)
        self._held[key] = ("activations", "", num_bytes, _ON_HOST)
        self.host_bytes += num_bytes
        self.most_host_bytes = max(self.most_host_bytes, self.host_bytes)

    def bytes_of(self, key: Any) -> int:
        """Bytes that a key holds."""
        return self._held[key][2] if key in self._held else 0

    def rename(self, key: Any, name: Any) -> None:
        """Keep what a key holds under another name; what that name held is let go of."""
        found = self._held.pop(key, None)
        if found is not None:
            self.drop(name)
            self._held[name] = found

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
            **{f"{category}_bytes": self._largest[category] for category in CATEGORIES},
            peak_bytes=self.peak_bytes,
            peak_moment=self.peak_moment,
            at_peak_bytes={category: self._at_peak[category] for category in CATEGORIES},
            host_bytes=self.most_host_bytes,
        )

    def peak_by_block(self) -> tuple[tuple[str, dict[Category, int]], ...]:
        """What each block held at the peak, by category; what belongs to none is under the empty name."""
        blocks: dict[str, dict[Category, int]] = {}
        for (block, category), num_bytes in self._peak_blocks.items():
            if num_bytes:
                blocks.setdefault(block, {})[category] = num_bytes
        return tuple(blocks.items())

    def samples(self) -> tuple[MemorySample, ...]:
        """At most `MAX_SAMPLES` moments; of each stretch the fullest, so that no peak is lost.

        The time is the number of the movement: a prediction knows the order, not the seconds.
        """
        held: Counter[Category] = Counter()
        moments: list[tuple[int, int, str, dict[str, int]]] = []
        for number, (moment, category, delta_bytes) in enumerate(self._history):
            held[category] += delta_bytes
            moments.append((sum(held.values()), number, moment, {str(name): held[name] for name in CATEGORIES}))
        stretch = -(-len(moments) // MAX_SAMPLES) or 1
        fullest = (max(moments[i : i + stretch], key=lambda moment: moment[0]) for i in range(0, len(moments), stretch))
        return tuple(
            MemorySample(time_s=float(number), phase=moment, bytes_by_category=held)
            for _, number, moment, held in fullest
        )


class Moments(Protocol):
    """What an overlay may ask of the step that is being replayed."""

    ledger: Ledger
    micro_batch: int
    """Number of the micro-batch, from 0."""

    @property
    def last(self) -> bool:
        """Whether no other micro-batch follows in this step."""

    def free_gradient(self, name: str) -> None:
        """Give back the gradient that autograd has just made."""


class EngineMemory:
    """One process: gradients stay where autograd has put them.

    Args:
        config: the run.
        shapes: of the model, or of the rank's part of it.
        states: bytes by category that are there when the step begins, gradients only if they outlive the update.
    """

    keeps_gradients = True
    """Whether the gradients of a micro-batch stay as autograd has made them."""

    gradients_are_states = True
    """Whether these are the gradients that the engine's inventory shows, or on their way to those."""
    gradients_stay = False
    """Whether the engine's gradients are there when a step begins."""

    on_gpu = False
    dp_rank = 0

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        self.config, self.shapes = config, shapes
        self.by_name = {parameter.name: parameter for parameter in shapes.parameters}

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        """What the engine holds from step to step besides its states."""
        return {}

    def pieces(self, category: Category, num_bytes: int) -> list[int]:
        """A state as the tensors it is made of, where they are the parameters; else in one piece."""
        del category
        return [num_bytes]

    def begin_backward(self, step: Moments) -> None:
        """The backward pass of a micro-batch begins."""

    def gathered_bytes(self) -> int:
        """Weights among the states that are there only while the step runs."""
        return 0

    def renewed_bytes(self) -> int:
        """Optimizer states that are there only while the step runs: new ones beside the old, for a moment."""
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
        """The gradient of a parameter is there, in a tensor of its own."""

    def end_backward(self, step: Moments) -> None:
        """The backward pass of a micro-batch is over."""

    def update(self, step: Moments) -> None:
        """The optimizer steps."""
        step.ledger.hold("update", "workspace", self.update_bytes([p.numel for p in self.shapes.parameters]))
        step.ledger.drop("update")

    def update_bytes(self, sizes: list[int]) -> int:
        """Temporaries of an update of tensors of these sizes; LAMB takes as much as AdamW, one after the other.

        AdamW one after the other (`for_loop`, the CPU's way): a square root and its quotient, besides the last tensor's
        quotient; all at once (`foreach`, the GPU's way): a square root of all. SGD with weight decay: a gradient with
        the decay added, of one tensor or of all. A fused kernel needs none of these. Source: torch 2.13
        `optim/adam.py`, `_single_tensor_adam` and `_multi_tensor_adam`; `optim/sgd.py`, likewise.
        """
        config = self.config
        if not sizes or config.update == "fused":
            return 0
        auto = "foreach" if self.on_gpu and config.optimizer != "lamb" else "for_loop"
        at_once = (auto if config.update == "auto" else config.update) == "foreach"
        if config.optimizer in ("sgd", "momentum"):
            return FP32_BYTES * (sum(sizes) if at_once else max(sizes)) if config.weight_decay else 0
        if not config.optimizer.startswith(("adamw", "lamb")):
            return 0
        if at_once:
            return FP32_BYTES * sum(sizes)
        return FP32_BYTES * max(2 * size + former for former, size in pairwise([0, *sizes]))

    def end_step(self, step: Moments) -> None:
        """The step is over: gradients that outlive it aside, nothing of it is left."""


class DDP(EngineMemory):
    """torch DDP: buckets as large as the gradients, for good; or the gradients are views of them.

    Source: torch 2.13 `csrc/distributed/c10d/reducer.cpp`, `initialize_buckets`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.keeps_gradients = not config.layout.gradient_as_bucket_view

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        category: Category = "workspace" if self.keeps_gradients else "gradients"
        return {"buckets": (category, FP32_BYTES * self.shapes.num_parameters)}

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not self.keeps_gradients:  # added into the bucket, of which the parameter's gradient is a view
            step.free_gradient(parameter.name)


class ByHand(EngineMemory):
    """DDP by hand: a bucket is copied into one tensor once its gradients are ready; all stay until synchronised.

    Source: `dlojz.by_hand.ddp`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        given_mib = config.layout.bucket_mib
        limit_bytes = DDP_BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE)
        self.bucket_of: dict[str, int] = {}
        self.bucket_bytes: list[int] = []
        for parameter in reversed(shapes.parameters):
            if not self.bucket_bytes or self.bucket_bytes[-1] >= limit_bytes:
                self.bucket_bytes.append(0)
            self.bucket_of[parameter.name] = len(self.bucket_bytes) - 1
            self.bucket_bytes[-1] += FP32_BYTES * parameter.numel
        self.missing: list[int] = []

    def begin_step(self, step: Moments) -> None:
        self.missing = [list(self.bucket_of.values()).count(number) for number in range(len(self.bucket_bytes))]

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not step.last or self.config.layout.dp == 1:
            return
        number = self.bucket_of[parameter.name]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            step.ledger.hold(("bucket", number), "workspace", self.bucket_bytes[number])

    def end_backward(self, step: Moments) -> None:
        for number in range(len(self.bucket_bytes)):
            step.ledger.drop(("bucket", number))


_UPDATE_TENSORS = {"one_bit_adam": 2, "one_bit_lamb": 4, "zero_one_adam": 2}
"""Tensors of a parameter's size that its own update takes, besides the mean."""


class Compressed(EngineMemory):
    """The second stage of 1-bit Adam, 1-bit LAMB and 0/1 Adam."""

    def update_bytes(self, sizes: list[int]) -> int:
        """The most that the update takes at one moment, besides the errors, which are states.

        While parameters are told, one after the other: the momentum, the root of its variance twice, the quotient and
        where the variance is 0 (a byte each), and what was told last. While chunks are compressed: the messages, and of
        one chunk the signs as bytes and as numbers. Then the mean of all, and the update of one parameter.
        """
        dp, last = self.config.layout.dp, sizes[-1]
        telling = max(3 * FP32_BYTES * size + size + FP32_BYTES * former for former, size in pairwise([0, *sizes]))
        updating = _UPDATE_TENSORS[self.config.optimizer] * FP32_BYTES * max(sizes)
        if dp == 1:  # all that is told, and the same end to end
            whole = FP32_BYTES * sum(sizes)
            return max(2 * whole, whole + updating)
        chunk = chunk_elements(sum(sizes), dp)
        messages = 2 * dp * chunk_bytes(chunk) + FP32_BYTES * last
        mean = FP32_BYTES * dp * chunk
        reading = FP32_BYTES * chunk + chunk + chunk // SIGNS_PER_BYTE
        return max(telling, messages + mean + reading, mean + updating)


_INNER = {"local_sgd": "sgd", "diloco": "adamw"}


class LocalStepsMemory(EngineMemory):
    """A step after which the replicas meet; in the others the message is not there."""

    def update_bytes(self, sizes: list[int]) -> int:
        """Temporaries of the inner update, or the message with which the replicas meet, whichever is more."""
        inner = EngineMemory(self.config.model_copy(update={"optimizer": _INNER[self.config.optimizer]}), self.shapes)
        inner.on_gpu = self.on_gpu
        meets = self.config.layout.dp > 1 or self.config.optimizer == "diloco"
        return max(inner.update_bytes(sizes), FP32_BYTES * sum(sizes) if meets else 0)


class HookedDDP(DDP):
    """DDP whose gradients leave in half the bytes, or as PowerSGD's matrices."""

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        members = buckets(config, shapes)
        self._bucket_of = {parameter.name: number for number, of in enumerate(members) for parameter in of}
        self._sizes = [len(of) for of in members]
        self._buckets = [compressed(of, config.layout.powersgd_rank) for of in members]
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
        if self._missing[number] == 0:
            self._leaves(step, number)

    def _leaves(self, step: Moments, number: int) -> None:
        bucket, ledger = self._buckets[number], step.ledger
        if self.config.layout.gradient_compression != "powersgd":
            ledger.hold("half", "workspace", HALF_BYTES * bucket.whole)  # the former bucket's has arrived
            return
        # A copy of the gradients with the errors added; what is not compressed, end to end; then the new errors.
        ledger.hold("copy", "workspace", FP32_BYTES * (bucket.whole + bucket.plain))
        ledger.hold("errors", "optimizer", FP32_BYTES * bucket.whole)
        ledger.drop("errors")
        ledger.drop("copy")

    def end_backward(self, step: Moments) -> None:
        step.ledger.drop("half")


def _updates(overlay: EngineMemory, step: Moments, parameter: ParameterShape) -> None:
    """One parameter is updated by itself: its temporaries come and go."""
    step.ledger.hold("update", "workspace", overlay.update_bytes([parameter.numel]))
    step.ledger.drop("update")


class InBackwardMemory(EngineMemory):
    """One process: a parameter is updated, and its gradient freed, once that is there."""

    gradients_are_states = False

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        _updates(self, step, parameter)
        step.free_gradient(parameter.name)

    def update(self, step: Moments) -> None:
        """It is done."""


class ByHandInBackward(ByHand):
    """DDP by hand: two buckets are under way at most; a bucket is used and freed once the next one has left."""

    gradients_are_states = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.in_bucket: list[list[ParameterShape]] = [[] for _ in self.bucket_bytes]
        for parameter in reversed(shapes.parameters):
            self.in_bucket[self.bucket_of[parameter.name]].append(parameter)
        self.next = 0

    def begin_step(self, step: Moments) -> None:
        super().begin_step(step)
        self.next = 0

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        self.missing[self.bucket_of[parameter.name]] -= 1
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
        """It is done."""


class InForward(EngineMemory):
    """Gradients stay over the end of the step; the next forward frees a module's before it computes."""

    gradients_stay = True

    def pieces(self, category: Category, num_bytes: int) -> list[int]:
        """Gradients parameter by parameter, since they go so."""
        if category == "gradients":
            return [FP32_BYTES * parameter.numel for parameter in self.shapes.parameters]
        return super().pieces(category, num_bytes)

    def forward(self, step: Moments, module: str) -> None:
        super().forward(step, module)
        for number, parameter in enumerate(self.shapes.parameters):
            key = ("state", "gradients", number)
            if parameter.module == module and step.ledger.holds(key):
                _updates(self, step, parameter)
                step.ledger.drop(key)

    def update(self, step: Moments) -> None:
        """It is put off: what backward has made is what the next step finds."""
        for number, parameter in enumerate(self.shapes.parameters):
            step.ledger.rename(("gradient", parameter.name), ("state", "gradients", number))


class DDPInForward(InForward, DDP):
    """The same under torch's DDP."""


class ByHandInForward(InForward, ByHand):
    """The same under DDP by hand."""


def by_hand_in_backward(config: RunConfig, shapes: ModelShapes) -> EngineMemory:
    """DDP by hand that updates in its backward pass; one process sends nothing, and has no buckets."""
    return (ByHandInBackward if config.layout.dp > 1 else InBackwardMemory)(config, shapes)


class Megatron(EngineMemory):
    """Gradients are added into a buffer that is there from the start; so is, from the first step, one for the scores.

    `GlobalMemoryBuffer` keeps a tensor of the size of all attention scores of a layer, 4·a·s²·b bytes (a heads of the
    rank, s tokens, b samples), which a product takes for what it adds to, times 0: nothing is ever written there.

    Source: megatron-core 0.16.1, `distributed/param_and_grad_buffer.py`, `transformer/dot_product_attention.py`.
    """

    keeps_gradients = False
    gradients_stay = True

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        size, layout = models.spec(self.config.model).size, self.config.layout
        heads = size.num_heads // layout.tp if isinstance(size, GPTSize) else 0
        scores = heads * (self.config.sequence_length or 0) ** 2 * layout.micro_batch
        return {"scores": ("workspace", FP32_BYTES * scores)}

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        step.free_gradient(parameter.name)
