"""Both levels together, for a model of the catalogue: the ILP prices stages, dynamic programming chooses among them.

The blocks of the model are clustered into layers. For each kind of block and each way to see a submesh as a logical
mesh (data parallelism along axis 0, free along axis 1) the ILP gives the communication, the memory, and how the weights
lie. A stage costs what its blocks cost together.

Layer 4. Invariant: one cost per kind of block and logical mesh, computed once; nothing is measured. As in Alpa, sending
activations between stages costs nothing, and computation and communication of one stage do not overlap. No torch.
Unlike Alpa, activations between blocks always lie along the batch (axis 0), and operators are not timed: their FLOPs
are.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, algorithm 1; §5.1 for logical meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from dlojz.plan.alpa.alpa_cluster import AlpaCluster
from dlojz.plan.alpa.clustering import cluster
from dlojz.plan.alpa.inter_operator import StageOption, pipeline
from dlojz.plan.alpa.intra_operator import shard
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.model_layers import ModelBlock, blocks_of
from dlojz.plan.alpa.operators import CODE
from dlojz.plan.alpa.pipeline_plan import PipelinePlan
from dlojz.plan.alpa.sharding_plan import ShardingPlan
from dlojz.plan.alpa.submesh import Submesh
from dlojz.schema import LabError
from dlojz.text import say


class BlockCost(NamedTuple):
    """One block on one logical mesh, per micro-batch."""

    compute_s: float
    communication_s: float
    state_bytes: float
    kept_bytes: float
    transient_bytes: float
    plan: ShardingPlan


class TwoLevel:
    """Costs of the stages of one model on one cluster.

    Args:
        model: a CoAtNet or a GPT of the catalogue, or the blocks of a model.
        cluster: the machine.
        micro_batch: samples of one micro-batch of the whole stage (its data-parallel devices share them).
        micro_batches: B of a step.
        layers: to cluster the blocks into; by default one per block, 16 at most.
        image_size: in pixels; by default the catalogue's.
        sequence_length: in tokens; by default the catalogue's.
        zero: gradients go by reduce-scatter and all-gather where they can, at the same cost, and each device holds its
            part of the optimizer's states only (see `ShardingPlan.zero_pairs`).
        recompute: activations inside a block are computed again in the backward pass: only its input is kept.

    Raises:
        LabError: a model of another family, or sizes that are no whole number of at least 1.
    """

    def __init__(  # noqa: PLR0913 - a model, a cluster, a step
        self,
        model: str | Sequence[ModelBlock],
        cluster: AlpaCluster,
        micro_batch: int,
        micro_batches: int,
        *,
        layers: int | None = None,
        image_size: int | None = None,
        sequence_length: int | None = None,
        zero: bool = False,
        recompute: bool = False,
    ) -> None:
        if micro_batch < 1 or micro_batches < 1:
            raise LabError(
                say(
                    en=f"a step has at least one micro-batch of one sample, but {micro_batches!r} of {micro_batch!r} "
                    "were received: use 1 or more of each.",
                    fr=f"un pas a au moins un micro-batch d’un exemple, mais {micro_batches!r} de {micro_batch!r} ont "
                    "été reçus : prenez-en 1 ou plus.",
                )
            )
        self.cluster, self.micro_batch, self.micro_batches = cluster, micro_batch, micro_batches
        self.zero, self.recompute = zero, recompute
        self.blocks = blocks_of(model, image_size, sequence_length) if isinstance(model, str) else tuple(model)
        self.bounds = self._clustered(min(len(self.blocks), 16) if layers is None else layers)
        self._known: dict[tuple[tuple[object, ...], DeviceMesh], BlockCost] = {}

    def _clustered(self, layers: int) -> tuple[int, ...]:
        """Blocks into layers, by work; a block is handed on to the next one only."""
        graphs = [block.graph(self.micro_batch, across=False) for block in self.blocks]
        flops = [graph.flops for graph in graphs]
        handed = [
            (number, [number + 1], float(graph.nodes["y"].tensor_bytes)) for number, graph in enumerate(graphs[:-1])
        ]
        # The lightest δ that works: a head or a stem may weigh several mean layers.
        mean = sum(flops) / max(layers, 1)
        for delta in (0.5, 1.0, 2.0, max(flops) / mean if mean else 0.0):
            try:
                return cluster(flops, handed, layers, delta).bounds
            except LabError:
                if not 1 <= layers <= len(flops):
                    raise
        return cluster(flops, handed, layers, float(layers)).bounds

    def block_cost(self, block: ModelBlock, mesh: DeviceMesh) -> BlockCost:
        """One block on one logical mesh, by the ILP; blocks of one kind are solved once."""
        if (block.kind, mesh) not in self._known:
            graph = block.graph(self.micro_batch, across=mesh.shape[0] > 1)
            plan = shard(graph, mesh, micro_batches=self.micro_batches, space=CODE)
            work, kept = plan.device_flops, plan.kept_bytes
            if self.recompute:
                work *= 4 / 3  # the forward pass again: Korthikanti et al. 2022 (arXiv 2205.05198), §5
                kept = plan.specs["x"].tile_bytes(graph.nodes["x"].tensor_bytes, mesh)
            transient = max(plan.peak_bytes - plan.state_bytes - kept, 0.0)
            states = plan.state_bytes - (plan.zero_saves_bytes() if self.zero else 0.0)
            self._known[block.kind, mesh] = BlockCost(
                work / self.cluster.flops_per_s, plan.cost, states, kept, transient, plan
            )
        return self._known[block.kind, mesh]

    def options(self, first: int, last: int, submesh: Submesh) -> tuple[StageOption, ...]:
        """The ways to run layers `first` to `last` on a submesh: one per logical mesh that divides the micro-batch."""
        blocks = self.blocks[self.bounds[first] : self.bounds[last + 1]]
        found = []
        for mesh in self.cluster.logical_meshes(submesh):
            if self.micro_batch % mesh.shape[0]:
                continue
            costs = [self.block_cost(block, mesh) for block in blocks]
            found.append(
                StageOption(
                    sum(cost.compute_s + cost.communication_s for cost in costs),
                    sum(cost.state_bytes for cost in costs) + max(cost.transient_bytes for cost in costs),
                    sum(cost.kept_bytes for cost in costs),
                    f"dp{mesh.shape[0]} × tp{mesh.shape[1]}",
                )
            )
        return tuple(found)

    def plan(self, *, stages: int | None = None) -> PipelinePlan:
        """The best pipeline, with names of layers and specs of their weights.

        Raises:
            LabError: a model that fits nowhere.
        """
        cluster = self.cluster
        found = pipeline(
            self.options,
            len(self.bounds) - 1,
            self.micro_batches,
            cluster.nodes,
            cluster.gpus_per_node,
            memory_bytes=cluster.memory_bytes,
            stages=stages,
            epsilon=1e-6,
        )
        specs = {layer: self._specs(layer, mesh) for layer, mesh in self._meshes(found)}
        return replace(found, unit="s", layer_names=self.layer_names, layer_specs=specs)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Of each layer, its first and its last block."""
        return tuple(
            _span(self.blocks[start].name, self.blocks[stop - 1].name) for start, stop in pairwise(self.bounds)
        )

    def _meshes(self, plan: PipelinePlan) -> list[tuple[int, DeviceMesh]]:
        found = []
        for stage in plan.stages:
            label = stage.label
            meshes = self.cluster.logical_meshes(stage.submesh)
            mesh = next(one for one in meshes if f"dp{one.shape[0]} × tp{one.shape[1]}" == label)
            found += [(layer, mesh) for layer in range(stage.first, stage.last + 1)]
        return found

    def _specs(self, layer: int, mesh: DeviceMesh) -> dict[str, str]:
        """How the weights of a layer's blocks lie; those of blocks of one kind are told once."""
        told: dict[str, str] = {}
        for block in self.blocks[self.bounds[layer] : self.bounds[layer + 1]]:
            plan = self.block_cost(block, mesh).plan
            weights: Sequence[str] = [name for name, node in plan.graph.nodes.items() if node.kind == "weight"]
            told |= {name: str(plan.specs[name]) for name in weights}
        return told


def _span(first: str, last: str) -> str:
    """From a block to another, the words that both begin with said once: `decoder 3–5`."""
    if first == last:
        return first
    begin, _, number = last.rpartition(" ")
    return f"{first}–{number}" if begin and first.startswith(f"{begin} ") else f"{first} – {last}"


def plan_model(  # noqa: PLR0913 - a model, a cluster, a step
    model: str | Sequence[ModelBlock],
    cluster: AlpaCluster,
    micro_batch: int,
    micro_batches: int,
    *,
    layers: int | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
    zero: bool = False,
    recompute: bool = False,
    stages: int | None = None,
) -> PipelinePlan:
    """The best stages, submeshes and shardings of a model on a cluster; arguments as of `TwoLevel`.

    Raises:
        LabError: as `TwoLevel`, and for a model that fits nowhere.
    """
    levels = TwoLevel(
        model,
        cluster,
        micro_batch,
        micro_batches,
        layers=layers,
        image_size=image_size,
        sequence_length=sequence_length,
        zero=zero,
        recompute=recompute,
    )
    return levels.plan(stages=stages)
