"""Keep the accounts of one step of a script: optimizers that were fed, forward passes that were trained, losses.

A step ends when the optimizers that were fed a gradient since the last one have stepped. A gradient that is set to zero
before its optimizer steps feeds nobody: that of a generator's loss in the discriminator, for instance.

The samples of a backward pass are those of the forward calls through which it passes, whatever else was called. Several
calls in one pass (two views, a real and a generated batch) see the same samples. Passes for the same loss add up, as in
gradient accumulation.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dlojz.base.language import Sentences

TEXTS = Sentences(Path(__file__).parent / "data" / "step_ledger.md")

_TOKEN_DIMS = 2
"""Dimensions (samples, positions) of token ids."""
_IMAGE_DIMS, _MOST_CHANNELS = 3, 4
SEQUENCE_DIMS = 3
_FRAMES = 12
"""Frames above a call in which a variable's name is looked for."""
_UNCHANGED = (
    *("CloneBackward0", "AliasBackward0", "ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0"),
    *("SqueezeBackward0", "UnsqueezeBackward0", "ExpandBackward0", "SqueezeBackward1", "MeanBackward0"),
)
"""Nodes of autograd that leave the value of a single number as it is."""
_LIBRARIES = ("site-packages", "dist-packages", "/dlojz/", "<frozen ", "/lib/python")

Signature = list[tuple[int, int]]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Compute what no mode of the script's sees: the watch's own operations."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _is_of_script(code: CodeType) -> bool:
    return not any(part in code.co_filename for part in _LIBRARIES)


def script_frames(skip: int = 1) -> Iterator[Any]:
    """Walk up the frames of the script's own files, from the call that is running."""
    frame: Any = sys._getframe(skip)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if _is_of_script(frame.f_code):
            yield frame
        frame = frame.f_back


def unmeasured(takes_scratch: bool, computed_elsewhere: bool, has_missed: bool) -> list[str]:
    """Say which memory of a script was not measured.

    Args:
        takes_scratch: whether kernels on a CPU have taken memory that no tensor shows.
        computed_elsewhere: whether other threads compute in a traced step, or may do so.
        has_missed: whether a step had larger inputs than all that were traced.
    """
    notes = {"scratch": takes_scratch, "other threads": computed_elsewhere, "larger inputs": has_missed}
    return [TEXTS.say("unmeasured", key) for key, applies in notes.items() if applies]


def makes_states() -> bool:
    """Whether a library makes an optimizer's states by an update: DeepSpeed and DCP do so before training.

    Source: DeepSpeed 0.19, `runtime/zero/stage_1_and_2.py`; torch 2.13, `distributed/checkpoint/state_dict.py`.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name not in ("initialize_optimizer_states", "_init_optim_state"):
        frame = frame.f_back
    return frame is not None


def name_of(target: object) -> str:
    """Find the name under which the script holds an object: a variable or an attribute of `self`; empty if none."""
    for frame in script_frames(2):
        for scope in (frame.f_locals, frame.f_globals):
            for name, value in list(scope.items()):
                if value is target:
                    return str(name)
        owner = getattr(frame.f_locals.get("self"), "__dict__", {})
        for name, value in list(owner.items()):
            if value is target:
                return str(name)
    return ""


def samples_and_tokens(tensors: Sequence[Tensor], inputs: Any, sequences: tuple[int, int] | None) -> tuple[int, int]:
    """Count the samples and the tokens of a model's inputs; 0 where that cannot be seen.

    Args:
        inputs: positional arguments; a list of images (C, H, W) has as many samples as entries.
        sequences: length and samples of what a layer with `batch_first=False` was given in the call before.
    """
    argument = next(iter(inputs), None) if isinstance(inputs, tuple) else None
    if isinstance(argument, list) and argument and all(map(_is_image, argument)):
        return len(argument), 0
    batch = next((tensor for tensor in tensors if tensor.ndim), None)
    if batch is None:
        return 0, 0
    # A layer with `batch_first=False` has read that length first, and the samples second.
    dim = 1 if sequences is not None and tuple(batch.shape[:2]) == sequences else 0
    # Whole numbers of (samples, positions) are token ids; booleans are a mask.
    is_text = batch.ndim == _TOKEN_DIMS and not batch.is_floating_point() and batch.dtype != torch.bool
    return batch.size(dim), batch.numel() if is_text else 0


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == _IMAGE_DIMS and value.size(0) <= _MOST_CHANNELS


def reads_sequences_first(module: nn.Module) -> bool:
    """Whether a layer reads (length, samples, features)."""
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first


@dataclass(eq=False)
class ForwardCall:
    """Call of an outermost module with gradients."""

    samples: int = 0
    tokens: int = 0
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    is_trained: bool = False
    """Whether a backward pass went through it, as far as can be seen."""
    is_counted: bool = False
    """Whether its samples are in the accounts of a step."""
    is_pending: bool = False
    """Whether a step has ended since."""


@dataclass
class Loss:
    """Number that backward was called on.

    Args:
        name: of the script's variable; empty where it has none.
        factor: number by which it was multiplied last (a division by n is 1/n), as a number or a tensor.
        is_divided: whether that was a division.
    """

    value: Tensor
    name: str
    factor: Any = None
    is_divided: bool = False


def loss_of(value: Tensor, name: str) -> Loss:
    """Read a loss, with the number that multiplied or divided it last, whatever has cloned it since."""
    node: Any = value.grad_fn
    with without_modes():
        number = value.detach()
    while node is not None and node.name() in _UNCHANGED and len(node.next_functions) == 1:
        # A mean of several numbers computes the loss; one of a single number leaves it.
        if node.name() == "MeanBackward0" and list(getattr(node, "_saved_self_sym_sizes", (2,))) not in ([], [1]):
            break
        node = node.next_functions[0][0]
    kind = node.name() if node is not None else ""
    if kind not in ("DivBackward0", "MulBackward0") or node is None:
        return Loss(number, name)
    # A number of Python is no node of the graph; what is multiplied by another loss is no part of one.
    if sum(successor is not None for successor, _ in node.next_functions) != 1:
        return Loss(number, name)
    try:
        factor = node._saved_other
    except (AttributeError, RuntimeError):  # freed, or a version of torch that names it otherwise
        factor = None
    return Loss(number, name, factor, kind == "DivBackward0")


class GradientFeed:
    """Tell which optimizers were fed a gradient since they last stepped, or had it set to zero."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """All that the script has made."""
        self.fed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, Signature] = weakref.WeakKeyDictionary()
        self._before: list[tuple[weakref.ref[torch.optim.Optimizer], Signature]] = []
        self._elsewhere: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose parameters had no gradient after the pass that has fed them: a library keeps it."""

    def before_backward(self) -> None:
        """Note the gradients before an outermost backward pass."""
        # A single optimizer is fed by every pass: there is nothing to tell apart.
        if len(self.optimizers) > 1:
            self._before = [(weakref.ref(optimizer), _signature(optimizer)) for optimizer in self.optimizers]

    def after_backward(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that the pass has fed, which are noted."""
        if len(self.optimizers) == 1:
            reached = list(self.optimizers)
        else:
            pairs = [(reference(), signature) for reference, signature in self._before]
            reached = [
                optimizer
                for optimizer, signature in pairs
                if optimizer is not None and _is_fed(signature, _signature(optimizer))
            ]
        self._before = []
        self.fed.update(reached)
        for optimizer in reached:
            (self._elsewhere.discard if _has_gradient(optimizer) else self._elsewhere.add)(optimizer)
        return reached

    def is_fed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer about to step has new gradients, from backward or set by hand."""
        if optimizer in self.fed:
            return True
        signature = _signature(optimizer)
        return any(identity for identity, _ in signature) and signature != self._seen.get(optimizer)

    def used(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the gradients of an optimizer have served, or were set to zero."""
        self.fed.discard(optimizer)
        self._seen[optimizer] = _signature(optimizer)

    def drop_released(self) -> bool:
        """Forget optimizers whose gradients are all gone, set to None by hand; returns whether there was one.

        Where they were gone at the end of the backward pass already, they lie elsewhere: FSDP2 adds them up in tensors
        of its own while it does not synchronise.
        """
        released = [
            optimizer for optimizer in self.fed if optimizer not in self._elsewhere and not _has_gradient(optimizer)
        ]
        for optimizer in released:
            self.used(optimizer)
        return bool(released)


def updated_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what an optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _signature(optimizer: torch.optim.Optimizer) -> Signature:
    """Identity and version of each gradient; zeros where there is none.

    Megatron's DDP adds each gradient to a buffer, `main_grad`, as soon as autograd has made it, and sets it to None.
    """
    return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in _gradients(optimizer)]


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor | None]:
    for parameter in updated_by(optimizer):
        yield getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(gradient is not None for gradient in _gradients(optimizer))


def _is_fed(before: Signature, after: Signature) -> bool:
    # Another tensor, or the same one written to since; an identity of 0 is no gradient.
    return any(new != old and new[0] for old, new in zip(before, after, strict=False)) or len(after) > len(before)


class StepAccounts:
    """Accounts of the present step: samples, tokens and losses of its backward passes, optimizers that have stepped."""

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.updated: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.num_passes = 0
        self._samples: dict[str, int] = defaultdict(int)
        self._tokens: dict[str, int] = defaultdict(int)

    def passed(self, calls: Iterable[ForwardCall], loss_name: str) -> None:
        """Note a backward pass and the forward calls through which it went."""
        reached = list(calls)
        self._samples[loss_name] += max((call.samples for call in reached), default=0)
        self._tokens[loss_name] += max((call.tokens for call in reached), default=0)
        self.num_passes += 1

    def joined(self, later: StepAccounts) -> StepAccounts:
        """Join the accounts of a step with those of what has followed its first update."""
        joined = StepAccounts()
        for part in (self, later):
            joined.losses += part.losses
            joined.updated |= part.updated
            joined.num_passes += part.num_passes
            for name in part._samples:
                joined._samples[name] += part._samples[name]
                joined._tokens[name] += part._tokens[name]
        return joined

    @property
    def samples(self) -> int:
        """Samples of this rank; 0 where none were seen."""
        return max(self._samples.values(), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of this rank; 0 where the inputs are no text."""
        return max(self._tokens.values(), default=0)

    def named_losses(self, usual_passes: int) -> dict[str, float]:
        """Compute each loss of the step under its name, as the script would print it.

        Args:
            usual_passes: backward passes of the step before, for one with fewer of them.
        """
        groups: dict[str, list[Loss]] = defaultdict(list)
        for loss in self.losses:
            groups[loss.name].append(loss)
        max_passes = max((len(group) for group in groups.values()), default=0)
        with without_modes():
            return {name: _accumulated(group, max(max_passes, usual_passes)) for name, group in groups.items()}


def _accumulated(losses: Sequence[Loss], num_passes: int) -> float:
    """Compute the loss of several passes: the mean of the micro-batches'.

    Each may have been divided by the number of passes, whatever is missing of the last step. A loss that was divided
    by something that all passes share, such as the tokens of the whole batch, is a part of a sum.
    """
    values = [float(loss.value.float()) for loss in losses]
    factors = [_number(loss.factor) for loss in losses]
    shares = [_is_share(loss, factor, num_passes) for loss, factor in zip(losses, factors, strict=True)]
    # Each loss was divided by n: n times the mean of these is that of the losses, even if passes are missing.
    if num_passes > 1 and all(shares):
        return num_passes * statistics.fmean(values)
    # All divided by one other number, such as the tokens of the batch: parts of a sum.
    is_sum = len(losses) > 1 and len(set(factors)) == 1 and all(loss.is_divided for loss in losses)
    return sum(values) if is_sum else statistics.fmean(values)


def _number(factor: Any) -> float | None:
    try:
        return float(factor)
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_share(loss: Loss, factor: float | None, num_passes: int) -> bool:
    """Whether a loss was divided by the number of passes, or multiplied by its inverse."""
    if not factor:
        return False
    divisor = factor if loss.is_divided else 1 / factor
    return abs(divisor - num_passes) < 1e-4 * num_passes


def tensors_in(*values: Any) -> list[Tensor]:
    """List the tensors of nested arguments, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


_MOST_VARIABLES = 20_000


def script_variables(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that variables of the script hold, with the variables' names.

    Looked into are the frames of the script's files and its global variables, with containers, the attributes of
    objects and modules within them, such as a data set's; then what only a loop reads, which no variable holds. Left
    out are the models that are trained.
    """
    main = getattr(sys.modules.get("__main__"), "__dict__", {})
    scopes = [scope for frame in script_frames() for scope in (frame.f_locals, frame.f_globals)]
    trained = {id(part) for model in models for part in model.modules()}
    visited: set[int] = set()
    for scope in (*scopes, main):
        for name, value in list(scope.items()):
            if not name.startswith("__"):
                yield from ((name, tensor) for tensor in _tensors_held(value, trained, visited, depth=3))
    for name, value in _iterated():
        yield from ((name, tensor) for tensor in _tensors_held(value, trained, visited, depth=3))


def _iterated() -> Iterator[tuple[str, Any]]:
    """Yield the data sets of loaders, by their class, and the variables of the script's generators.

    `for batch in DataLoader(...)` leaves both to the loop alone: the garbage collector knows them.
    """
    for candidate in gc.get_objects():
        kind = type(candidate)  # `isinstance` may ask a lazy object for its class, which loads it
        if issubclass(kind, DataLoader | _BaseDataLoaderIter):
            dataset = vars(candidate).get("dataset", vars(candidate).get("_dataset"))
            yield type(dataset).__name__, dataset
        elif kind is GeneratorType and candidate.gi_frame is not None and _is_of_script(candidate.gi_code):
            yield from list(candidate.gi_frame.f_locals.items())


def _tensors_held(value: Any, trained: set[int], visited: set[int], depth: int) -> Iterator[Tensor]:
    # What was visited, and the limit, end circles and large structures.
    if id(value) in trained or id(value) in visited or len(visited) > _MOST_VARIABLES:
        return
    if isinstance(value, type | ModuleType | FunctionType | str | bytes | int | float):
        return
    if hasattr(type(value), "param_groups") or isinstance(value, torch.optim.Optimizer):
        return  # DeepSpeed's has buckets of gradients, and is none of torch's
    visited.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        for part in value.modules():  # of a whole model, a pipeline's stage trains a part only
            if id(part) not in trained:
                yield from (*part.parameters(recurse=False), *part.buffers(recurse=False))
    elif isinstance(value, dict):
        for content in list(value.values()):
            yield from _tensors_held(content, trained, visited, depth)
    elif isinstance(value, list | tuple | set | frozenset):
        for content in list(value):
            yield from _tensors_held(content, trained, visited, depth)
    elif depth and (attributes := getattr(value, "__dict__", None)):
        for content in list(attributes.values()):
            yield from _tensors_held(content, trained, visited, depth - 1)


SETTLING = 2
"""Steps of a kind before a steady one: the first makes the optimizer's states, the second settles buckets."""
_FREE_TRACES, _SHARE_OF_TRACES = 8, 10
_MUCH_LARGER = 1.05
"""Growth of the inputs from which on a step is traced in any case: inputs that grow tenfold cost at most 48 steps."""
_MOST_KINDS_TRACED = 64


class TracingPlan:
    """Decide which steps of a script are traced, and which of those are measured.

    Traced are the first steps of each kind (which optimizers step) until it is steady, and any step whose inputs are
    larger than those of every steady one; where they are hardly larger, one in ten, once there are many.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """Optimizers that have stepped."""
        self.input_bytes = 0
        """Largest inputs of a call of the present step."""
        self._missed_bytes = 0
        """Largest inputs of a step that was not traced."""
        self._largest_bytes = 0
        self._traced: Counter[str] = Counter()
        self._early: list[tuple[int, int]] = []
        """Second traced step of each kind, and its largest inputs."""
        self._steps = self._triggered = self._states_bytes = 0
        self._grows = False

    def wants(self, input_bytes: int) -> bool:
        """Note the inputs of a call; returns whether its step is to be traced because of them."""
        self.input_bytes = max(self.input_bytes, input_bytes)
        if not 0 < self._largest_bytes < input_bytes:
            return False
        return input_bytes >= _MUCH_LARGER * self._largest_bytes or self._may_trace()

    def _may_trace(self) -> bool:
        """Whether one more step may be traced besides; if so it counts."""
        # Eight are free; from then on one step in ten.
        may = self._triggered < _FREE_TRACES or self._triggered * _SHARE_OF_TRACES < self._steps
        self._triggered += may
        return may

    def ended(self, step: int, kind: str, was_traced: bool, states_bytes: int = 0) -> list[int]:
        """Note a step's end; returns the steps to measure now.

        Args:
            states_bytes: of the optimizers, at the end of a traced step.
        """
        self._steps += 1
        input_bytes, self.input_bytes = self.input_bytes, 0
        if not was_traced:
            self._traced.setdefault(kind, 0)
            self._missed_bytes = max(self._missed_bytes, input_bytes)
            return []
        self._traced[kind] += 1
        if self._traced[kind] < SETTLING:
            return []
        self._largest_bytes = max(self._largest_bytes, input_bytes)
        self._grows = self._traced[kind] > SETTLING and states_bytes > self._states_bytes
        self._states_bytes = states_bytes
        if self._traced[kind] == SETTLING:
            self._early.append((step, input_bytes))
            return []
        # Early steps with larger inputs: no steady step of their size has followed.
        larger = [early for early, early_bytes in self._early if early_bytes > input_bytes]
        self._early = []
        return [*larger, step]

    @property
    def undecided(self) -> frozenset[int]:
        """Traced steps that may still be measured: once another of their kind is steady, if their inputs are larger."""
        return frozenset(step for step, _ in self._early)

    @property
    def has_missed(self) -> bool:
        """Whether a step had larger inputs than all that were traced."""
        return 0 < self._largest_bytes < self._missed_bytes

    def is_due(self) -> bool:
        """Return whether the next step is to be traced, whatever its inputs; asked once for each step."""
        if not self._traced:
            return True
        if self._grows and self._may_trace():  # L-BFGS keeps more from step to step
            return True
        return min(self._traced.values()) <= SETTLING and self._traced.total() < _MOST_KINDS_TRACED
