"""Run a script on a rank and write down what this rank read, held and saved, for the judge of the labs' scripts.

    python script_observer.py FOLDER train.py --epochs 2

The report is `FOLDER/rank-N.json`, whose keys are the fields of `dlojz.labs.script.script_trials.RankReport`. It is
also written where the script fails, with what was seen until then.
"""

import functools
import gc
import hashlib
import json
import os
import runpy
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
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
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

MOST_SAMPLES = 10_000
"""Samples of an epoch that are told apart, at most."""
MOST_PRODUCTS = 40
"""Calls of F.linear whose matrices are looked at: those of the first forward passes."""
LIBRARIES = ("DeepSpeedEngine", "Accelerator")


def _first_tensor(batch: object) -> Tensor | None:
    """Find the first tensor of a batch: the samples, by torch's convention."""
    if isinstance(batch, Tensor):
        return batch
    inner = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((tensor for element in inner if (tensor := _first_tensor(element)) is not None), None)


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

    def __init__(self, report: dict[str, Any]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._report = report
        self._first_of_step = False
        self._used: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        parameters = _parameters([optimizer])
        # FakeTensors: the watch predicts a step with them, which is none of the script's.
        if any(isinstance(_local(parameter), FakeTensor) for parameter in parameters):
            return
        self._report["steps"] += 1
        if all(candidate is not optimizer for candidate in self.optimizers):
            self.optimizers.append(optimizer)
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


def observe(report: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Put into a report, while a script runs, what its loaders yield, its optimizers step and `torch.save` writes."""
    iterate, save, linear = DataLoader.__iter__, torch.save, functional.linear
    steps = _Steps(report)

    def observed(loader: DataLoader[Any]) -> Iterator[Any]:
        samples: list[str] = []
        report["epochs"].append(samples)
        report["unshuffled"] += getattr(loader.sampler, "shuffle", None) is False
        for batch in iterate(loader):
            tensor = _first_tensor(batch)
            if tensor is not None and tensor.dim() > 0 and len(samples) < MOST_SAMPLES:
                # 48 bits tell so few samples apart.
                samples += [hashlib.sha1(_bytes_of(sample)).hexdigest()[:12] for sample in tensor]
            yield batch

    def saved(value: object, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, str | os.PathLike):
            report["saved"].append(os.path.realpath(file))
        save(value, file, *args, **kwargs)

    def begun(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Look at everything once, before the first step that has gradients: DCP makes one without, to get states."""
        parameters = _parameters([optimizer])
        if any(report["gradients"]) or any(isinstance(_local(parameter), FakeTensor) for parameter in parameters):
            return  # those of fakes are the watch's, which predicts the step
        states = [
            moment for state in optimizer.state.values() for moment in state.values() if isinstance(moment, Tensor)
        ]
        with _disable_current_modes():
            report["gradients"] = [
                float(_local(parameter.grad).double().square().sum()) if parameter.grad is not None else 0.0
                for parameter in parameters
            ]
            report["begun_with"] = [float(_local(parameter).double().square().sum()) for parameter in parameters]
            # Adam's own counter of steps has no dimension; its moments have those of the parameter.
            report["moments"] = int(any(_local(moment).any() for moment in states if moment.dim() > 0))
        report["group_size"] = dist.get_world_size() if dist.is_initialized() else 0
        _look_at_modules(report, parameters)

    def multiplied(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Count the values of the matrices that a few products use."""
        local_weight = _local(weight)
        if len(report["levels"]) < MOST_PRODUCTS and not isinstance(local_weight, FakeTensor):
            with _disable_current_modes():
                report["levels"].append(int(local_weight.unique().numel()))
        return linear(rows, weight, bias)

    uses: Counter[int] = Counter()

    def called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Count how often the first step calls each module that has parameters of its own."""
        tensor = _first_tensor(list(inputs))
        if isinstance(module, DistributedDataParallel) and not isinstance(tensor, FakeTensor):
            report["ddp_calls"] += 1
            report["ddp_synced"] += module.require_backward_grad_sync
        # Before the first step is counted.
        if not report["steps"] and module._parameters and not isinstance(tensor, FakeTensor):
            uses[id(module)] += 1
            report["uses"] = max(report["uses"], uses[id(module)])

    register_module_forward_pre_hook(called)
    functional.linear = multiplied  # type: ignore[assignment]
    _count_epochs(report)
    _count_late_shards(report)
    DataLoader.__iter__ = observed  # type: ignore[method-assign,assignment]
    torch.save = saved  # type: ignore[assignment]
    register_optimizer_step_pre_hook(begun)
    register_optimizer_step_post_hook(steps)
    return steps.optimizers


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
        elif issubclass(kind, nn.Module):
            owned_ids.update(map(id, candidate._parameters.values()))
            report["ddp"] += issubclass(kind, DistributedDataParallel)
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


def main() -> None:
    """Observe the script that the command line names."""
    folder, script, *arguments = sys.argv[1:]
    report: dict[str, Any] = {"epochs": [], "saved": [], "gradients": [], "levels": [], "begun_with": []}
    report |= dict.fromkeys(("schedule", "weights", "library"), "")
    report |= dict.fromkeys(("steps", "repeated", "kept", "group_size", "ddp", "fsdp_units", "blocks", "stale"), 0)
    report |= dict.fromkeys(("micro_batches", "held", "plain", "mesh_axes", "moments", "fused"), 0)
    report |= dict.fromkeys(("matrices", "zeros", "uses", "unshuffled", "set_epochs", "ddp_calls", "ddp_synced"), 0)
    report |= dict.fromkeys(("mesh_row", "by_columns", "by_rows", "late_shards"), 0)
    optimizers = observe(report)
    # As `python script.py arguments` would have it.
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        _look_at_weights(report, optimizers)
        path = Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
