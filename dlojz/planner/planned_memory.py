"""Memory of the planner's layouts: the forecast's where this lab runs them, published closed forms elsewhere.

A layout that `dlojz.run` can take has the bytes that `dlojz.prediction.forecast` gives its `RunConfig`
(`dlojz.prediction.many_layouts`; the tests hold it within 5 %). The closed forms of `dlojz.cost_model.layout_memory`
are those of software that this lab does not run: Megatron's, or models known by their sizes alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlojz.base.display_hook import wanted
from dlojz.base.language import say
from dlojz.config.fields import LayoutFields
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import Memories, memories
from dlojz.cost_model.layouts import Integers
from dlojz.hardware import Device
from dlojz.planner.planned_model import OF_THE_LAB
from dlojz.planner.space import COLUMN_VALUES, Space, candidates_from, columns_of, run_config_of
from dlojz.results.footprint import CATEGORIES

_KEY: Final = (
    "engine", "zero", "offload", "checkpointing", "tp", "sequence_parallel", "pp", "schedule", "chunks", "dp", "ep",
)  # fmt: skip
"""What makes layouts share their traces and their engine's states; the micro-batch and their number vary among them."""


def is_forecast(space: Space, columns: Mapping[str, Integers]) -> NDArray[np.bool_]:
    """Tell which layouts are runs of this lab: a model of the catalogue, one of its engines, no context parallelism,
    no hybrid sharding, and expert parallelism without ZeRO and without a pipeline.

    Precisions that only published measurements have (fp8, tf32) are none of the lab's either.
    """
    if not space.question.subject.catalogue or space.question.precision not in ("fp32", "bf16", "fp16"):
        return np.zeros(columns["dp"].size, bool)
    # Engine column → whether the lab runs it.
    lab = np.array([name in OF_THE_LAB for name in COLUMN_VALUES["engine"]])[columns["engine"]]
    experts = (columns["ep"] == 1) | ((columns["zero"] == 0) & (columns["pp"] == 1))
    eligible: NDArray[np.bool_] = lab & (columns["cp"] == 1) & experts & (space.state_copies(columns) == 1)
    return eligible


def layout_memories(space: Space, columns: Mapping[str, Integers]) -> Memories:
    """Bytes on the fullest rank of every layout.

    Args:
        space: that the layouts belong to.
        columns: theirs, of `DEGREES` and `OPTIONS`.
    """
    size = columns["dp"].size
    bytes_by_name = {field.name: np.zeros(size) for field in fields(Memories)}
    forecast = is_forecast(space, columns)
    closed_form = np.flatnonzero(~forecast)  # not the lab's runs: the cost model's closed form
    if closed_form.size:
        layouts = space.cost_layouts({name: column[closed_form] for name, column in columns.items()})
        closed = memories(space.question.subject.workload, layouts)
        for name, column in bytes_by_name.items():
            column[closed_form] = getattr(closed, name)
    for config, indices in _groups(space, columns, np.flatnonzero(forecast)):
        sizes, numbers = (columns[name][indices].tolist() for name in ("micro_batch", "micro_batches"))
        fullest_bytes = _fullest(config, tuple(zip(sizes, numbers, strict=True)), space.question.cluster.gpu)
        for name, column in bytes_by_name.items():
            column[indices] = fullest_bytes[name]
    return Memories(**bytes_by_name)


def other_loss_bytes(space: Space, candidate: LayoutFields) -> float | None:
    """Bytes on the fullest rank if the cross-entropy were one kernel, or were not, whichever is not asked for.

    None where there is no such choice: of image models, and of this lab's runs, which have torch's loss.
    """
    columns, question = columns_of([candidate]), space.question
    if question.subject.size is None or is_forecast(space, columns)[0]:
        return None
    with_other_loss = replace(space, question=replace(question, fused_loss=not question.fused_loss))
    return float(layout_memories(with_other_loss, columns).total_bytes[0])


def fits(space: Space, columns: Mapping[str, Integers], needs: Memories) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tell which layouts fit on their GPUs, and which into the memory of a host, which the ranks of a node share."""
    cluster = space.question.cluster
    node_gpus = np.minimum(cluster.gpus_per_node, columns["gpus"])
    return needs.total_bytes <= cluster.gpu.memory_bytes, needs.host * node_gpus <= cluster.host_memory_bytes


def searched_memories(space: Space, columns: Mapping[str, Integers]) -> Memories:
    """As `layout_memories`, for many layouts: what has to be traced first is traced with a progress bar, and kept."""
    forecast = np.flatnonzero(is_forecast(space, columns))
    if not forecast.size:
        return layout_memories(space, columns)
    from dlojz.prediction.many_layouts import kept_summaries  # loads torch

    configs = [config for config, _ in _groups(space, columns, forecast)]  # the groups are few, the layouts many
    with kept_summaries(configs[0]):
        _trace_missing(space, configs)
        return layout_memories(space, columns)


def _trace_missing(space: Space, configs: list[RunConfig]) -> None:
    """Trace what the store does not hold, with a progress bar that says so."""
    from dlojz.prediction.many_layouts import make_trace, needed_traces

    missing = needed_traces(configs)
    if not missing:
        return
    from tqdm.auto import tqdm

    name = space.question.subject.name
    words = say(
        en=f"tracing the blocks of {name} (once; kept for the next plan)",
        fr=f"tracé des blocs de {name} (une seule fois ; conservé pour la suite)",
    )
    hidden = not wanted(None)
    for config in tqdm(
        missing, desc=words, unit="trace", file=sys.stderr, leave=False, dynamic_ncols=True, disable=hidden
    ):
        make_trace(config)


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank of a pipeline stage.

    Attributes:
        stage: its number, from 0.
        layers: layers, or blocks, that it holds.
        in_flight: micro-batches whose activations it keeps at most; of all its chunks together.
        parts: bytes by category (`dlojz.planner.search.PARTS`).
    """

    stage: int
    layers: int
    in_flight: float
    parts: dict[str, float]

    @property
    def total_bytes(self) -> float:
        """On the GPU, at the peak."""
        return sum(self.parts.values())


def forecast_ranks(space: Space, candidate: LayoutFields) -> list[RankMemory] | None:
    """Memory of the first rank of every stage of a run of this lab; None for another layout."""
    columns = columns_of([candidate])
    if not is_forecast(space, columns)[0]:
        return None
    config, _ = _groups(space, columns, np.array([0]))[0]
    ranks = []
    for stage, (stage_bytes, num_in_flight, blocks) in enumerate(
        _stages(config, ((candidate.micro_batch, candidate.micro_batches),), space.question.cluster.gpu)
    ):
        parts = {name: float(column[0]) for name, column in stage_bytes.items() if name != "host"}
        ranks.append(RankMemory(stage, blocks, num_in_flight, parts))
    return ranks


def _groups(space: Space, columns: Mapping[str, Integers], indices: Integers) -> list[tuple[RunConfig, Integers]]:
    """Layouts that differ in their micro-batches alone, each with a configuration that stands for them."""
    if not indices.size:
        return []
    question = space.question
    keys = np.stack([columns[name][indices] for name in _KEY], axis=1)  # (layouts, columns of the key)
    distinct, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    starts = np.searchsorted(group.reshape(-1)[order], np.arange(len(distinct) + 1))  # bounds of each group in `order`
    number = columns["micro_batches"]
    groups = []
    for group_index in range(len(distinct)):
        members = indices[order[starts[group_index] : starts[group_index + 1]]]
        of_most = members[int(np.argmax(number[members]))]  # a schedule may need as many micro-batches as stages
        candidate = candidates_from({name: column[of_most : of_most + 1] for name, column in columns.items()})[0]
        # micro_batch=1: a stand-in; the sizes are passed beside it.
        groups.append((run_config_of(question.subject, question.run_precision, candidate, micro_batch=1), members))
    return groups


@lru_cache(maxsize=4096)
def _fullest(config: RunConfig, pairs: tuple[tuple[int, int], ...], device: Device) -> dict[str, NDArray[np.float64]]:
    """Bytes of the fullest rank by the names of `Memories`, one place per micro-batch."""
    ranks = [stage_bytes for stage_bytes, _, _ in _stages(config, pairs, device)]
    # (stages, micro-batches): bytes on the device, the host's left out.
    totals = np.stack([sum(column for name, column in stage_bytes.items() if name != "host") for stage_bytes in ranks])
    fullest_stages, columns = np.argmax(totals, axis=0), np.arange(len(pairs))
    # Of each micro-batch the stage that is fullest; all categories come from that one stage.
    return {name: np.stack([stage_bytes[name] for stage_bytes in ranks])[fullest_stages, columns] for name in ranks[0]}


def _stages(
    config: RunConfig, pairs: tuple[tuple[int, int], ...], device: Device
) -> list[tuple[dict[str, NDArray[np.float64]], int, int]]:
    """Bytes of each stage's first rank by the names of `Memories`, its micro-batches in flight, and its blocks."""
    from dlojz.prediction.many_layouts import outside_bytes, rank_memories

    stages = []
    outside = float(outside_bytes(device, config.layout.world_size))
    for rank in rank_memories(config, list(pairs), device):
        categories = dict(zip(CATEGORIES, rank.by_category, strict=True))
        stage_bytes = {
            "weights": categories["weights"] + categories["buffers"],  # `Memories` has no category for buffers
            "gradients": categories["gradients"],
            "optimizer": categories["optimizer"] + categories["master"],  # nor for the fp32 master copy
            "activations": categories["activations"],
            "edges": np.zeros(len(pairs)),  # a forecast counts embedding and logits in the categories above
            "live": categories["workspace"],
            "reserve": np.full(len(pairs), outside),
            "host": rank.host,
        }
        stages.append((stage_bytes, rank.in_flight, rank.blocks))
    return stages
