"""Read what the ranks of a script have noted: samples, gradients, weights, wrappers (`rank_observer.py` writes it)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dlojz.base.language import say
from dlojz.results.record import RunRecord

COMPARED_STEPS = 10
"""Steps that are compared: later, rounding has grown."""
OBSERVED = "observed"
"""Folder of the reports, in that of the run."""


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes:
        rank: which one.
        steps, repeated: of its optimizers, and those with gradients that a step had used already.
        kept: steps whose gradients were still there when those of the next one came.
        group_size: ranks of the process group at the first step; 0 where there is none.
        shuffled, unshuffled: passes over a loader whose sampler shuffles, and does not.
        set_epochs: calls of `set_epoch`.
        epochs: digests of the samples that each pass over a DataLoader yielded, in their order.
        saved: files that torch.save wrote.
        ddp, fsdp_units: modules that DistributedDataParallel wraps, and that `fully_shard` was called on.
        late_shards: calls of `fully_shard` on a module of one that was sharded already.
        ddp_nested, ddp_ranks: those within another one, and the ranks of its group.
        ddp_calls, ddp_synced: forward passes of DistributedDataParallel, and those after which it averages.
        blocks: how often the block occurs that is repeated most.
        stale: parameters of its optimizer that no module has.
        schedule, micro_batches: class of torch's pipeline schedule, empty where there is none, and what it cuts.
        held, plain: elements of its parameters on this rank, and of those that are no DTensors.
        mesh_axes: axes of the largest mesh that a parameter lies on.
        mesh_row: its place along the first axis of such a mesh.
        by_columns, by_rows: matrices that are split along dim 0 of their weight, and along dim 1.
        begun_with: sum of squares of each parameter before the first step.
        gradients: sum of squares of the gradient of each parameter, at the first step.
        moments: whether its optimizer had any before that step.
        weights: digest of what is held, at the end.
        fused: whether its optimizer updates in one kernel.
        levels: different values of the matrices that the first products used.
        uses: calls of the module with parameters that the first step calls most often, recomputation included.
        matrices, zeros: elements of its matrices at the end, and how many of them are zero.
        library: class of the library that trains, empty where there is none.
        pipeline_ranks: ranks of its pipeline; 0 without one.
        optimizers, learning_rates: how many there are, and the rates of the first one.
        batches: by loader, in the order in which they are read: samples of its data set (`size`), batches of a pass
            (`length`), samples of a batch (`batch`), replicas that its sampler counts (0: unknown), indices of each
            batch of each pass, and the places of the passes in `epochs`.
        samples: digests of the samples that the model is called with, in each of the first steps.
        inputs: digests of the entries of each tensor that it is called with, in the first step.
        backwards, calls, synced: backward passes of the first step, calls of models, and those whose gradients DDP
            averages.
        local_gradients, used_gradients: projections of the gradient of each parameter at the first step: of what
            backward has brought on this rank, and of what the optimizer uses; empty where parameters are parts.
        clipped: norms at which the gradients of the first step were clipped.
        after: projections of each parameter after the last step that is compared.
        dropouts, batch_norms: layers in the first step that draw random numbers, or average over this rank's samples.
    """

    rank: int
    steps: int
    repeated: int
    kept: int
    group_size: int
    shuffled: int
    unshuffled: int
    set_epochs: int
    epochs: tuple[tuple[str, ...], ...]
    saved: tuple[str, ...]
    ddp: int
    ddp_nested: int
    ddp_ranks: int
    ddp_calls: int
    ddp_synced: int
    fsdp_units: int
    late_shards: int
    blocks: int
    stale: int
    schedule: str
    micro_batches: int
    held: int
    plain: int
    mesh_axes: int
    mesh_row: int
    by_columns: int
    by_rows: int
    begun_with: tuple[float, ...]
    gradients: tuple[float, ...]
    moments: int
    weights: str
    fused: int
    levels: tuple[int, ...]
    matrices: int
    zeros: int
    uses: int
    library: str
    pipeline_ranks: int
    optimizers: int
    learning_rates: tuple[float, ...]
    batches: tuple[dict[str, Any], ...]
    samples: tuple[list[str], ...]
    inputs: tuple[str, ...]
    backwards: int
    calls: int
    synced: int
    local_gradients: tuple[list[float], ...]
    used_gradients: tuple[list[float], ...]
    clipped: tuple[float, ...]
    after: tuple[list[float], ...]
    dropouts: int
    batch_norms: int

    @property
    def trained_loader(self) -> dict[str, Any] | None:
        """The loader of the samples that the model is trained with; None where that cannot be seen."""
        trained = set(self.inputs)
        shared = [
            (len(trained.intersection(itertools.chain.from_iterable(self._epochs(loader)))), loader)
            for loader in self.batches
        ]
        count, loader = max(shared, key=lambda pair: pair[0], default=(0, None))
        return loader if count or len(shared) == 1 else None

    def _epochs(self, loader: dict[str, Any]) -> list[tuple[str, ...]]:
        return [self.epochs[number] for number in loader["epochs"] if number < len(self.epochs)]

    @property
    def passes(self) -> Sequence[tuple[str, ...]]:
        """Digests of each pass over that loader, or of the first step, where there is none."""
        if self.trained_loader is not None:
            return self._epochs(self.trained_loader)
        if not self.batches and any(self.epochs):
            return self.epochs
        return [tuple(self.samples[0])] if self.samples else []


@dataclass(frozen=True)
class Trial:
    """One run of a script, with the reports of its ranks.

    Attributes:
        words: options of the script that were given besides the common ones.
        folder: of the run.
        rates: by rank, the numbers that it printed after `samples/s`.
        printed: by rank, the numbers that it printed after `loss`.
    """

    words: tuple[str, ...]
    record: RunRecord
    ranks: tuple[RankReport, ...]
    folder: Path | None = None
    rates: tuple[tuple[float, ...], ...] = ()
    printed: tuple[tuple[float, ...], ...] = ()

    @property
    def title(self) -> str:
        """The run in words: its processes and options."""
        return title_of(len(self.ranks), self.words)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the messages of a step, of all collectives of rank 0."""
        footprint = self.record.footprint()
        return sum(traffic.message_bytes for traffic in footprint.communication) if footprint is not None else 0

    @property
    def activations_bytes(self) -> int:
        """Bytes that forward keeps, of rank 0."""
        footprint = self.record.footprint()
        return (footprint.memory.activations_bytes or 0) if footprint is not None else 0


def title_of(processes: int, words: Sequence[str]) -> str:
    """Name a run by its processes and options."""
    short_words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    options = f", {' '.join(short_words)}" if words else ""
    return say(
        en=f"{processes} process{'es' if processes > 1 else ''}{options}",
        fr=f"{processes} processus{options}",
    )


def rank_reports(folder: Path, processes: int) -> tuple[RankReport, ...]:
    """Read what the ranks wrote; what has not got so far is left out."""
    reports = []
    for rank in range(processes):
        path = folder / OBSERVED / f"rank-{rank}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            content = {field.name: content[field.name] for field in fields(RankReport) if field.name != "rank"}
            content = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
            reports.append(RankReport(rank=rank, **content | {"epochs": tuple(map(tuple, content["epochs"]))}))
    return tuple(reports)
