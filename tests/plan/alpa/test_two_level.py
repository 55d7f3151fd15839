"""Both levels on CoAtNet and GPT: graphs against counts on the meta device, plans, published solutions in spirit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlojz import hardware, models
from dlojz.models.sizes import GPTSize
from dlojz.plan.alpa.alpa_cluster import GIB, PAPER_NODES, AlpaCluster, Link
from dlojz.plan.alpa.graph import Graph
from dlojz.plan.alpa.intra_operator import shard
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.model_layers import blocks_of, gpt_blocks
from dlojz.plan.alpa.operators import CODE
from dlojz.plan.alpa.submesh import Submesh
from dlojz.plan.alpa.two_level import TwoLevel, plan_model
from dlojz.schema import LabError

FOUR = replace(PAPER_NODES, gpus_per_node=4)


@pytest.mark.parametrize("model", ["gpt_tiny", "gpt2_xl", "coatnet_tiny", "coatnet_0", "coatnet_7"])
def test_graphs_have_the_flops_and_the_weights_of_the_model(model: str) -> None:
    """FLOPs exactly; of the parameters all but vectors, which are at most 2 %."""
    counted = models.describe(model)
    flops = weights = 0.0
    for block in blocks_of(model):
        graph = Graph(element_bytes=1)
        block.write(graph, graph.input("x", 1, *block.reads))
        flops += graph.flops
        weights += sum(node.tensor_bytes for node in graph.nodes.values() if node.kind == "weight")
    assert flops == counted.flops
    assert 0.98 * counted.parameters < weights < counted.parameters


def test_tensor_parallelism_of_a_decoder_block_is_megatrons() -> None:
    """Columns, then rows: 2 all-reduces forward and 2 backward of b·s·h (Shoeybi et al. 2019, arXiv 1909.08053, §3)."""
    block = blocks_of("gpt_tiny")[1]
    plan = shard(block.graph(1, across=False), DeviceMesh((1, 4), (1, 1), (1, 1)), space=CODE)
    sent = [one for one in plan.communications if one.collective == "all_reduce"]
    assert [one.message_bytes for one in sent] == [128 * 128 * 2] * 4
    assert len(sent) == len(plan.communications)
    heads_or_columns = {name: str(plan.specs[name]) for name in ("w_qkv", "w_out", "w_1", "w_2")}
    assert heads_or_columns == {"w_qkv": "RRS1R", "w_out": "S1RR", "w_1": "RS1", "w_2": "S1R"}
    assert plan.device_flops == pytest.approx(block.graph(1, across=False).flops / 4, rel=1e-12)


def test_costs_of_blocks_add_up() -> None:
    levels = TwoLevel("gpt_tiny", FOUR, 8, 4)
    options = [levels.options(first, last, Submesh(1, 2)) for first, last in ((1, 1), (2, 3), (1, 3))]
    for one, two, all_three in zip(*options, strict=True):
        assert one.time_s + two.time_s == pytest.approx(all_three.time_s, rel=1e-12)
        assert one.activation_bytes + two.activation_bytes == all_three.activation_bytes
    assert [option.label for option in options[0]] == ["dp2 × tp1", "dp1 × tp2"]


def test_more_micro_batches_never_make_a_step_per_micro_batch_longer() -> None:
    fast = replace(FOUR, intra=Link(1e-6, 136e9))
    steps = [plan_model("gpt_tiny", fast, 8, count).step_s / count for count in (1, 4, 32)]
    assert steps == sorted(steps, reverse=True)


def test_a_coatnet_gets_stages_of_unequal_depth() -> None:
    plan = plan_model("coatnet_0", FOUR, 16, 32, layers=7, stages=4, recompute=True)
    assert [stage.submesh.num_devices for stage in plan.stages] == [1] * 4
    depths = [stage.last + 1 - stage.first for stage in plan.stages]
    assert sum(depths) == 7
    assert len(set(depths)) > 1
    assert len(plan.layer_names) == 7
    assert plan.layer_names[0].startswith("stem")
    assert plan.layer_specs[0]["k_1"] == "RRR"


def test_alpas_own_plan_of_6_7_billion() -> None:
    """GPT-6.7B on 16 V100 of 16 GB: two stages of 8, each seen as (2, 4), as in Alpa's `suite_auto_gpt.py`.

    Its other plans are not asserted: those of 760M, 1.3B and 2.6B, where several come within 5 % of each other, hang on
    the operators' measured times; 15B and 39B need its rematerialisation and its memory to be modelled more finely.
    """
    blocks = gpt_blocks(GPTSize(width=4096, depth=32, num_heads=32), 1024, 51200)
    plan = plan_model(blocks, replace(PAPER_NODES, nodes=2), 4, 256, layers=8, recompute=True)
    assert [(str(stage.submesh), stage.label) for stage in plan.stages] == [("1 × 8", "dp2 × tp4")] * 2


def test_tensor_parallelism_only_where_memory_forces_it() -> None:
    """As the paper says of the best manual plans (§8.1); the same model with 16 GB per GPU and with 80."""
    blocks = gpt_blocks(GPTSize(width=4096, depth=32, num_heads=32), 1024, 51200)
    large = replace(PAPER_NODES, nodes=2, memory_bytes=78 * GIB)
    plans = [
        plan_model(blocks, cluster, 16, 64, layers=8, recompute=True, zero=True)
        for cluster in (replace(PAPER_NODES, nodes=2), large)
    ]
    assert [{stage.label for stage in plan.stages} for plan in plans] == [{"dp4 × tp2"}, {"dp8 × tp1"}]
    assert plans[1].step_s < plans[0].step_s


def test_clusters_of_the_catalogue() -> None:
    jean_zay = hardware.cluster("jean_zay_v100_16")
    found = AlpaCluster.of(jean_zay, 2)
    assert (found.nodes, found.gpus_per_node) == (2, 4)
    assert found.intra.bytes_per_s > found.inter.bytes_per_s
    mesh = found.logical_meshes(Submesh(2, 4))[-1]
    assert mesh.shape == (2, 4)
    assert mesh.beta[0] == pytest.approx(4 / found.inter.bytes_per_s)  # four rings share the cards of a node
    with pytest.raises(LabError, match=r"nodes, but 0 were asked for"):
        AlpaCluster.of(jean_zay, 0)


def test_what_fits_nowhere_is_said_with_what_is_missing() -> None:
    with pytest.raises(LabError, match=r"no cut of 6 layers on 4 devices fits: .* so .* are missing"):
        plan_model("gpt_tiny", replace(FOUR, memory_bytes=2**20), 8, 4)


def test_bad_input() -> None:
    with pytest.raises(LabError, match=r"written for CoAtNet and GPT, but vit_b_16 was received"):
        plan_model("vit_b_16", FOUR, 8, 4)
    with pytest.raises(LabError, match=r"unknown model 'gpt9'"):
        plan_model("gpt9", FOUR, 8, 4)
    with pytest.raises(LabError, match=r"at least one micro-batch of one sample, but 4 of 0"):
        plan_model("gpt_tiny", FOUR, 0, 4)
    with pytest.raises(LabError, match=r"6 operators make 1 to 6 layers, but 7"):
        plan_model("gpt_tiny", FOUR, 8, 4, layers=7)
    with pytest.raises(LabError, match=r"6 layers on 4 devices make 1 to 4 stages, but stages=5"):
        plan_model("gpt_tiny", FOUR, 8, 4, stages=5)
    with pytest.raises(LabError, match=r"are more than 0"):
        replace(FOUR, memory_bytes=0)
