"""Observe a script on a rank: what it read, held, averaged and saved, for whoever compares processes.

The report is `observed/rank-N.json` of the run's folder, whose keys are the fields of `script_parity.RankReport`, and
`batches`: the samples that its loaders drew, by index, of each loader and each pass. A run on one process can read what
the ranks of another run have read, joined to one batch (`Observation.batches_of`). The report is also written where the
script fails, with what was seen until then.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import operator
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dlojz.base.files import write_atomic
from dlojz.config.run_config import Observation
from dlojz.libraries.scripts.script_parity import COMPARED_STEPS, OBSERVED, RankReport
from dlojz.libraries.step_ledger import tensors_in
from dlojz.libraries.training_watch import keywords_of_call

MOST_SAMPLES = 10_000
"""Samples of an epoch that are told apart, at most."""
MOST_PRODUCTS = 40
"""Calls of F.linear whose matrices are looked at: those of the first forward passes."""
LIBRARIES = ("DeepSpeedEngine", "Accelerator")
PROJECTIONS = 2
MOST_PROJECTED = 2**20
"""Elements of a tensor that are projected, at most, and of a matrix whose values are told apart."""


def _first_tensor(batch: object) -> Tensor | None:
    """Find the first tensor of a batch: the samples, by torch's convention."""
    if isinstance(batch, Tensor):
        return batch
    inner = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((tensor for element in inner if (tensor := _first_tensor(element)) is not None), None)


def _projections(tensor: Tensor | None) -> list[float]:
    """Project a tensor on a few fixed directions: what is a mean of tensors, is one of their projections too."""
    if tensor is None:
        return [0.0] * PROJECTIONS
    with _disable_current_modes():
        local = _local(tensor)
        flat = (local.to_dense() if local.is_sparse else local).flatten()
        flat = flat[:: 1 + flat.numel() // MOST_PROJECTED].double().cpu()
        # The same on every rank, and not taken from the script's own random numbers.
        generator = torch.Generator().manual_seed(flat.numel())
        directions = torch.randn(PROJECTIONS, flat.numel(), generator=generator, dtype=torch.float64)
        return [float(value) for value in directions @ flat]


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _bytes_of(tensor: Tensor) -> bytes:
    """Copy a tensor's bytes, unseen by the watch's count of memory."""
    with _disable_current_modes():
        flat: Tensor = tensor.detach().cpu().contiguous().flatten()
        return bytes(flat.view(torch.uint8).numpy().tobytes())


class _Steps:
    """Count the steps of optimizers in a report, and those with gradients that the step before has used.

    The second kind are of two sorts: the very same once more, and those to which new ones were added.
    """

    def __init__(self, report: dict[str, Any], most_steps: int) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._report, self._most_steps = report, most_steps
        self._watched: set[int] = set()
        self._first_of_step = False
        self._used: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        parameters = _parameters([optimizer])
        # FakeTensors: the watch predicts a step with them, which is none of the script's.
        if any(isinstance(_local(parameter), FakeTensor) for parameter in parameters):
            return
        self._report["steps"] += 1
        if id(optimizer) not in self._watched:
            self._watched.add(id(optimizer))
            self._watch(next((parameter for parameter in parameters if parameter.grad is not None), None))
        self._first_of_step = True
        gradient = next((parameter.grad for parameter in parameters if parameter.grad is not None), None)
        if gradient is not None:
            version = _local(gradient)._version  # FSDP2 adds to what a DTensor holds, unseen by its own version
            used_gradient, before = self._used.get(id(optimizer), (None, 0))
            self._report["repeated"] += int(
                used_gradient is not None and used_gradient() is gradient and version == before
            )
            self._used[id(optimizer)] = weakref.ref(gradient), version
        self._report["optimizers"] = len(self.optimizers)
        steps = self._report["steps"] // max(len(self.optimizers), 1)
        if steps == COMPARED_STEPS and not self._report["after"]:
            self._report["after"] = [_projections(parameter) for parameter in _parameters(self.optimizers)]
        if self._most_steps and steps == self._most_steps:
            raise SystemExit(0)  # on every rank after the same step, so that none waits for another

    def _watch(self, parameter: Tensor | None) -> None:
        """Look, where the first new gradient after a step comes, whether the step's own is still there.

        Whoever sets it to zero, and when, by then it must be done. What FSDP2 shards gets no such call.
        """
        if parameter is None or not parameter.requires_grad:
            return
        reference = weakref.ref(parameter)

        def arrives(_: Tensor) -> None:
            target = reference()
            # The hook runs before the new gradient is added: .grad is still that of the step before.
            if self._first_of_step and target is not None and target.grad is not None:
                with _disable_current_modes():
                    self._report["kept"] += int(bool(_local(target.grad).any()))
            self._first_of_step = False

        parameter.register_hook(arrives)


def observe(report: dict[str, Any], observation: Observation) -> list[torch.optim.Optimizer]:
    """Put into a report, while a script runs, what its loaders yield, its optimizers step and `torch.save` writes."""
    iterate, save = DataLoader.__iter__, torch.save
    steps = _Steps(report, observation.most_steps)
    local_gradients = _LocalGradients(report)
    _Batches(report, observation).watch()

    def observed(loader: DataLoader[Any]) -> Iterator[Any]:
        samples: list[str] = []
        report["epochs"].append(samples)
        shuffles = getattr(loader.sampler, "shuffle", None)
        report["unshuffled"] += shuffles is False
        report["shuffled"] += shuffles is True
        for batch in iterate(loader):
            tensor = _first_tensor(batch)
            if tensor is not None and tensor.dim() > 0 and len(samples) < MOST_SAMPLES:
                samples += _digests(tensor)
            yield batch

    def saved(value: object, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, str | os.PathLike):
            report["saved"].append(os.path.realpath(file))
        save(value, file, *args, **kwargs)

    _watch_first_step(report, steps, local_gradients)
    _watch_modules(report, local_gradients)
    _note_clipping(report)
    _count_epochs(report)
    _count_late_shards(report)
    DataLoader.__iter__ = observed  # type: ignore[method-assign,assignment]
    torch.save = saved  # type: ignore[assignment]
    register_optimizer_step_post_hook(steps)
    return steps.optimizers


def _watch_first_step(report: dict[str, Any], steps: _Steps, local_gradients: _LocalGradients) -> None:
    """Look at everything once, at the first step that has gradients."""

    def note_gradients(parameters: list[Tensor]) -> None:
        with _disable_current_modes():
            report["gradients"] = [
                float(_local(parameter.grad).double().square().sum()) if parameter.grad is not None else 0.0
                for parameter in parameters
            ]

    def ended(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the gradients that a closure has computed within the step."""
        parameters = _parameters([optimizer])
        is_fake = any(isinstance(_local(parameter), FakeTensor) for parameter in parameters)
        if any(map(callable, (*args, *kwargs.values()))) and not is_fake and not any(report["gradients"]):
            note_gradients(parameters)

    def begun(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at everything once, before the first step that has gradients: DCP makes one without, to get states."""
        parameters = _parameters([optimizer])
        if any(isinstance(_local(parameter), FakeTensor) for parameter in parameters):
            return  # those of fakes are the watch's, which predicts the step
        if all(candidate is not optimizer for candidate in steps.optimizers):
            # Before the step: ZeroRedundancyOptimizer, which has all parameters, steps by one of this rank's shard.
            steps.optimizers.append(optimizer)
        if any(report["gradients"]):
            return
        states = [
            moment for state in optimizer.state.values() for moment in state.values() if isinstance(moment, Tensor)
        ]
        if not any(map(callable, (*args, *kwargs.values()))):
            note_gradients(parameters)
            if any(report["gradients"]):
                local_gradients.end(parameters)
        with _disable_current_modes():
            report["begun_with"] = [float(_local(parameter).double().square().sum()) for parameter in parameters]
            # Adam's own counter of steps has no dimension; its moments have those of the parameter.
            report["moments"] = int(any(_local(moment).any() for moment in states if moment.dim() > 0))
        report["learning_rates"] = [float(group.get("lr") or 0.0) for group in optimizer.param_groups]
        report["group_size"] = dist.get_world_size() if dist.is_initialized() else 0
        _look_at_modules(report, parameters)

    register_optimizer_step_pre_hook(begun)
    register_optimizer_step_post_hook(ended)


def _watch_modules(report: dict[str, Any], local_gradients: _LocalGradients) -> None:
    """Note what modules are called with, how often, and the matrices that products use."""
    linear = functional.linear

    def multiplied(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Count the values of the matrices that a few products use."""
        local_weight = _local(weight)
        is_counted = local_weight.numel() <= MOST_PROJECTED and not isinstance(local_weight, FakeTensor)
        if len(report["levels"]) < MOST_PRODUCTS and is_counted:
            with _disable_current_modes():
                report["levels"].append(int(local_weight.unique().numel()))
        return linear(rows, weight, bias)

    uses: Counter[int] = Counter()
    models = _ModelCalls(report, local_gradients)

    def called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Count how often the first step calls each module that has parameters of its own."""
        tensor = _first_tensor(list(inputs))
        models.called(module, inputs)
        if isinstance(module, DistributedDataParallel) and not isinstance(tensor, FakeTensor):
            report["ddp_calls"] += 1
            report["ddp_synced"] += module.require_backward_grad_sync
        # Before the first step is counted.
        if not report["steps"] and module._parameters and not isinstance(tensor, FakeTensor):
            uses[id(module)] += 1
            report["uses"] = max(report["uses"], uses[id(module)])

    functional.linear = multiplied  # type: ignore[assignment]
    register_module_forward_pre_hook(called)
    register_module_forward_hook(lambda *_: models.returned(), always_call=True)


class _LocalGradients:
    """Gradients of this rank's own samples in the first step, as backward brings them, before any rank averages."""

    def __init__(self, report: dict[str, Any]) -> None:
        self._report = report
        self._sums: dict[int, list[float]] = {}
        self._arrivals: Counter[int] = Counter()
        self._handles: list[Any] = []

    def begin(self, model: nn.Module) -> None:
        """Look at the parameters of a model that is called before the first step, unless they are flattened parts."""
        kinds = {type(module).__name__ for module in model.modules()}
        if self._report["steps"] or kinds & {"FullyShardedDataParallel", "DeepSpeedEngine"}:
            return
        for parameter in model.parameters():
            is_whole = parameter.is_leaf and not isinstance(parameter, DTensor | FakeTensor)
            if parameter.requires_grad and is_whole and id(parameter) not in self._sums:
                self._sums[id(parameter)] = [0.0] * PROJECTIONS
                self._handles.append(parameter.register_hook(functools.partial(self._arrives, id(parameter))))

    def _arrives(self, key: int, gradient: Tensor) -> None:
        # Each backward pass of the step adds its part.
        if not isinstance(gradient, FakeTensor):
            sums = zip(self._sums[key], _projections(gradient), strict=True)
            self._sums[key] = [before + part for before, part in sums]
            self._arrivals[key] += 1
            self._report["backwards"] = max(self._arrivals.values())

    def end(self, parameters: Sequence[Tensor]) -> None:
        """Lay what an optimizer is about to use beside what has arrived."""
        for parameter in parameters:
            if id(parameter) in self._sums:
                self._report["local_gradients"].append(self._sums[id(parameter)])
                self._report["used_gradients"].append(_projections(parameter.grad))
        for handle in self._handles:
            handle.remove()


class _ModelCalls:
    """Samples that models are called with, in the first steps; calls of their parts are none."""

    def __init__(self, report: dict[str, Any], local_gradients: _LocalGradients) -> None:
        self._report, self._local_gradients = report, local_gradients
        self._depth = 0
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the samples of an outermost call with gradients."""
        self._depth += 1
        if not self._report["steps"]:  # what one process computes of these samples may be something else
            self._report["dropouts"] += isinstance(module, _DropoutNd) and module.training and module.p > 0
            is_local = isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
            self._report["batch_norms"] += is_local and module.training
        if self._depth > 1:
            self._parts.add(module)  # checkpointing calls it again, in backward
        elif torch.is_grad_enabled() and module not in self._parts and next(module.parameters(), None) is not None:
            tensors = tensors_in(inputs, keywords_of_call())
            if any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return
            self._local_gradients.begin(module)
            number, steps = self._report["steps"], self._report["samples"]
            batch = next((tensor.size(0) for tensor in tensors if tensor.dim()), 0)
            if number < COMPARED_STEPS:
                entries = [_digests(tensor) for tensor in tensors if tensor.dim() and tensor.size(0) == batch]
                steps += [[] for _ in range(number + 1 - len(steps))]
                # A mask alone may be the same for all samples: a sample is what all tensors have of it.
                samples = map("".join, zip(*entries, strict=True))
                steps[-1] += [hashlib.sha1(sample.encode()).hexdigest()[:12] for sample in samples]
                self._report["inputs"] += [] if number else [digest for part in entries for digest in part]
            if not number:
                self._report["calls"] += 1
                self._report["synced"] += getattr(module, "require_backward_grad_sync", True)

    def returned(self) -> None:
        """Note the end of a call."""
        self._depth = max(self._depth - 1, 0)


class _Batches:
    """Indices that loaders draw: noted for each pass, or replaced by those that the ranks of another run have drawn."""

    def __init__(self, report: dict[str, Any], observation: Observation) -> None:
        self._report, self._is_apart = report, observation.is_apart
        self._numbers: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
        folder = Path(observation.batches_of) / OBSERVED
        paths = sorted(folder.glob("rank-*.json")) if observation.batches_of else []
        ranks = [json.loads(path.read_text(encoding="utf-8"))["batches"] for path in paths]
        self._recorded = [[loader for loader in loaders if loader] for loaders in zip_longest(*ranks)]

    def watch(self) -> None:
        """Give each loader of a data set with indices its own sampler's, followed."""
        sampler_of = vars(DataLoader)["_index_sampler"].fget

        def followed(loader: DataLoader[Any]) -> Any:
            sampler = sampler_of(loader)
            has_indices = loader._dataset_kind == 0 and loader.batch_sampler is not None
            return _Indices(self, loader, sampler) if has_indices else sampler

        DataLoader._index_sampler = property(followed)  # type: ignore[method-assign,assignment]

    def recorded(self, loader: DataLoader[Any]) -> list[dict[str, Any]]:
        """What the ranks of the other run noted of a loader, known by its turn to be read first; empty without one."""
        number = self._numbers.get(loader, len(self._numbers))
        ranks = self._recorded[number] if number < len(self._recorded) else []
        size = len(loader.dataset)  # type: ignore[arg-type]
        return ranks if all(rank["size"] == size for rank in ranks) else []

    def drawn(self, loader: DataLoader[Any], sampler: Any) -> Iterator[list[Any]]:
        """Yield the batches of one pass."""
        ranks = self.recorded(loader)
        number = self._numbers.setdefault(loader, len(self._numbers))
        if number == len(self._report["batches"]):
            size = len(loader.dataset)  # type: ignore[arg-type]
            noted: dict[str, Any] = {"size": size, "length": len(sampler), "batch": loader.batch_size or 0}
            noted["replicas"] = getattr(loader.sampler, "num_replicas", 0)
            noted |= {"passes": [], "epochs": []}
            self._report["batches"].append(noted)
        passes = self._report["batches"][number]["passes"]
        batches: list[list[int]] = []
        passes.append(batches)
        self._report["batches"][number]["epochs"].append(len(self._report["epochs"]) - 1)
        by_rank = [rank["passes"][len(passes) - 1] for rank in ranks if len(rank["passes"]) >= len(passes)]
        # What all ranks of one replica read is read once.
        steps = [list(map(list, dict.fromkeys(tuple(batch or ()) for batch in step))) for step in zip_longest(*by_rank)]
        if self._is_apart:
            followed: Any = [batch for step in steps for batch in step if batch]
        else:
            followed = [[index for batch in step for index in batch] for step in steps]
        for batch in followed if by_rank else sampler:
            with contextlib.suppress(TypeError):  # indices that are no numbers are not noted
                batches.append([operator.index(index) for index in batch])
            yield batch


class _Indices:
    """A loader's sampler of batches, followed by `_Batches`."""

    def __init__(self, batches: _Batches, loader: DataLoader[Any], sampler: Any) -> None:
        self._batches, self._loader, self._sampler = batches, loader, sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches.drawn(self._loader, self._sampler)

    def __len__(self) -> int:
        ranks = self._batches.recorded(self._loader)
        return max((rank["length"] for rank in ranks), default=0) or len(self._sampler)


def _digests(samples: Tensor) -> list[str]:
    """Digest each sample: 48 bits tell so few apart."""
    return [hashlib.sha1(_bytes_of(sample)).hexdigest()[:12] for sample in samples]


def _note_clipping(report: dict[str, Any]) -> None:
    """Note the norms that gradients are clipped at in the first step, which each rank computes for itself."""
    clip = nn.utils.clip_grad_norm_

    @functools.wraps(clip)
    def noted(*args: Any, **kwargs: Any) -> Tensor:
        norm = clip(*args, **kwargs)
        if not report["steps"] and not isinstance(norm, DTensor | FakeTensor):
            report["clipped"].append(float(norm))
        return norm

    nn.utils.clip_grad_norm_ = noted


def _count_epochs(report: dict[str, Any]) -> None:
    """Count the calls of `set_epoch` from here on."""
    set_epoch = DistributedSampler.set_epoch

    def counted(sampler: DistributedSampler[Any], epoch: int) -> None:
        report["set_epochs"] += 1
        set_epoch(sampler, epoch)

    DistributedSampler.set_epoch = counted  # type: ignore[method-assign,assignment]


def _count_late_shards(report: dict[str, Any]) -> None:
    """Count the calls of `fully_shard` on a module of one that is sharded already."""
    shard = fsdp.fully_shard

    @functools.wraps(shard)
    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = [
            candidate
            for candidate in gc.get_objects()
            if issubclass(type(candidate), FSDPModule) and candidate is not module
        ]
        # `outer` holds the module, so it was sharded as a whole before its part.
        report["late_shards"] += any(inner is module for outer in sharded for inner in outer.modules())
        return shard(module, *args, **kwargs)

    fsdp.fully_shard = counted


def _parameters(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # By identity: == of two tensors compares their elements.
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def _look_at_modules(report: dict[str, Any], parameters: list[Tensor]) -> None:
    """Note what wraps the model, the blocks that repeat in it, its pipeline schedule, and what no module has."""
    blocks: Counter[object] = Counter()
    owned_ids: set[int] = set()
    for candidate in gc.get_objects():
        # type, not isinstance, which asks an object for its __class__: a lazy module would load itself.
        kind = type(candidate)
        if issubclass(kind, _PipelineSchedule):
            report["schedule"], report["micro_batches"] = kind.__name__, candidate._n_microbatches
            stages = getattr(candidate, "_stages", None) or [candidate._stage]
            report["pipeline_ranks"] = stages[0].group_size
        elif issubclass(kind, nn.Module):
            owned_ids.update(map(id, candidate._parameters.values()))
            if issubclass(kind, DistributedDataParallel):
                report["ddp"] += 1
                report["ddp_ranks"] = candidate.process_group.size()
                inner = (isinstance(part, DistributedDataParallel) for part in candidate.module.modules())
                report["ddp_nested"] += any(inner)
            report["fsdp_units"] += issubclass(kind, FSDPModule)
            shapes = tuple(tuple(parameter.shape) for parameter in candidate.parameters())
            # A block of a transformer has at least four parameters; a norm or a linear layer has two.
            if len(shapes) >= 4:
                blocks[kind.__name__, shapes] += 1
        if kind.__name__ in LIBRARIES:
            report["library"] = kind.__name__
    report["blocks"] = max(blocks.values(), default=0)
    if report["library"] != "DeepSpeedEngine":  # which steps parts that it has flattened
        report["stale"] = sum(id(parameter) not in owned_ids for parameter in parameters)


def _look_at_weights(report: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> None:
    """Note how much of the parameters this rank holds at the end, and their digest."""
    digest = hashlib.sha256()
    report["fused"] = int(any(group.get("fused") for optimizer in optimizers for group in optimizer.param_groups))
    for parameter in _parameters(optimizers):
        local = _local(parameter)
        report["held"] += local.numel()
        report["plain"] += 0 if isinstance(parameter, DTensor) else local.numel()
        axes = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
        report["mesh_axes"] = max(report["mesh_axes"], axes)
        if isinstance(parameter, DTensor):
            if axes > 1:
                report["mesh_row"] = (parameter.device_mesh.get_coordinate() or [0])[0]
            if local.dim() == 2:
                # torch's weight is (out, in), the transpose of A in Y = X A: dim 0 are A's columns, dim 1 its rows.
                report["by_columns"] += sum(placement.is_shard(0) for placement in parameter.placements)
                report["by_rows"] += sum(placement.is_shard(1) for placement in parameter.placements)
        report["matrices"] += local.numel() if local.dim() == 2 else 0
        report["zeros"] += int((local == 0).sum()) if local.dim() == 2 else 0
        digest.update(_bytes_of(local))
    report["weights"] = digest.hexdigest()


def _empty_report() -> dict[str, Any]:
    """Make the report of a rank that has done nothing yet: lists where `RankReport` has tuples, zeros, blanks."""
    empty: dict[str, Callable[[], object]] = {"int": int, "str": str}
    return {field.name: empty.get(str(field.type), list)() for field in fields(RankReport) if field.name != "rank"}


@contextlib.contextmanager
def observed(observation: Observation, folder: Path, rank: int) -> Iterator[None]:
    """Observe the script that runs within this context, and write the report of its rank."""
    report = _empty_report()
    optimizers = observe(report, observation)
    try:
        yield
    finally:
        _look_at_weights(report, optimizers)
        if not report["after"]:  # a run of fewer steps
            report["after"] = [_projections(parameter) for parameter in _parameters(optimizers)]
        (folder / OBSERVED).mkdir(exist_ok=True)
        write_atomic(folder / OBSERVED / f"rank-{rank}.json", json.dumps(report))
