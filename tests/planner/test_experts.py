"""The planner on mixtures of experts: what is divided, what is exchanged, what is counted, and what is refused."""

import re

import numpy as np
import pytest

from dlojz import models
from dlojz.base.language import use_language
from dlojz.config.layout import RankGrid
from dlojz.cost_model import Calibration, Layouts, estimate, workload
from dlojz.cost_model.layout_memory import memories_of
from dlojz.cost_model.passes import all_to_all_s, collective_s, stages_of
from dlojz.cost_model.step import weights_of
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import DecoderSize, flops_per_sequence
from dlojz.planner import plan
from dlojz.planner.answer import Plan
from dlojz.planner.planned_model import OF_MIXTURES, OFFERS, chosen, subject
from dlojz.planner.space import experts_of
from dlojz.prediction.link_traffic import flows_of
from dlojz.results.footprint import Traffic

from .trainers_arguments import read_megatron

SIZE = DecoderSize(
    layers=8,
    hidden=1024,
    heads=16,
    vocabulary=32000,
    sequence_length=2048,
    mlp_width=3584,
    gated=True,
    tied=False,
    biased=False,
    positions="none",
    experts=8,
    top_k=2,
)
PUBLISHED_TFLOP_PER_S = 468
"""Of each H100, Mixtral 8x7B in bf16 with Megatron Core 0.9, which does not say on how many GPUs in which layout.

Source: docs.nvidia.com, Megatron Core API guide, "Mixture of Experts package"."""


@pytest.fixture(scope="module")
def mixtral() -> Plan:
    return plan("mixtral_8x7b", "jean_zay_h100", gpus=64, batch=256, sequence_length=4096, simulate=2)


@pytest.mark.parametrize("model", ["moe_tiny", "mixtral_8x7b", "mixtral_8x22b"])
def test_parameters_are_those_of_the_model(model: str) -> None:
    """All of them, and those that a token meets: to the last norm, which the planner leaves out of any decoder."""
    known, size = models.describe(model, sequence_length=None), workload(model).size
    spec = models.spec(model).size
    assert size is not None
    norm = (2 if size.biased else 1) * size.hidden
    assert workload(model).num_parameters == known.parameters - norm
    assert size.experts == spec.experts.num_experts  # type: ignore[union-attr]
    experts = size.layers * size.expert_parameters
    active = workload(model).num_parameters - experts + experts * size.top_k // size.experts
    assert active == known.active_parameters - norm


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "deepseek_v3"])
def test_a_model_with_latent_attention_is_planned_with_its_parameters(model: str) -> None:
    """But for what is rounded down where the first layers have no mixture: less than one for each layer and part."""
    known, size = models.describe(model, sequence_length=None), workload(model).size
    assert size is not None
    assert 0 <= known.parameters - size.num_parameters < 2 * size.layers
    made = plan(model, "dgx_h100", gpus=512, batch=2048, engines="megatron-core", simulate=0)
    words = made.best.documents()["arguments.txt"].split()
    read = read_megatron(words[1:])
    assert (read["kv_lora_rank"], read.get("q_lora_rank", 0)) == (size.latent, size.query_latent)
    assert read["moe_layer_freq"] == [0] * size.dense_layers + [1] * (size.layers - size.dense_layers)
    assert read["moe_shared_expert_intermediate_size"] == size.shared_experts * size.expert_width
    spread = made.choose(tp=4, ep=64)
    read = read_megatron(spread.documents()["arguments.txt"].split()[1:])
    assert read["expert_tensor_parallel_size"] == 1 and read["expert_model_parallel_size"] == 64


def test_a_dense_decoder_is_the_mixture_of_one_expert_without_its_gate() -> None:
    one = DecoderSize(**{**vars(SIZE), "experts": 1, "top_k": 1})
    dense = DecoderSize(**{**vars(SIZE), "experts": 0, "top_k": 1})
    gate = SIZE.hidden
    assert one.layer_parameters == dense.layer_parameters + gate
    assert one.layer_weights == dense.layer_weights + gate
    assert workload(one).flops() == workload(dense).flops() + 2 * SIZE.layers * SIZE.sequence_length * gate


def test_workload_flops_are_those_of_the_experts_that_a_token_meets() -> None:
    """Doubling the experts adds the gate's columns alone; doubling k adds an expert's products for each token."""
    mlp = 2 * SIZE.sequence_length * 3 * SIZE.hidden * SIZE.mlp_width * SIZE.layers
    more = DecoderSize(**{**vars(SIZE), "experts": 16})
    twice = DecoderSize(**{**vars(SIZE), "top_k": 4})
    whole = workload(SIZE).flops()
    gate = 2 * SIZE.sequence_length * SIZE.hidden * 8 * SIZE.layers
    assert workload(more).flops() == whole + gate
    assert workload(twice).flops() == whole + 2 * mlp
    padded = DecoderSize(**{**vars(SIZE), "capacity_factor": 1.25})
    assert workload(padded).flops() == whole + 0.25 * 2 * mlp


def test_a_rank_holds_its_share_of_the_experts_and_all_of_the_rest() -> None:
    """Weights by closed form; with ZeRO-1 a rank's optimizer states are 12 bytes of Ψ/dp, whatever ep."""
    work, stages = workload(SIZE), stages_of(workload(SIZE), 1)
    experts = SIZE.layers * SIZE.expert_parameters
    layouts = Layouts.of(dp=16, ep=[1, 2, 4, 8], zero=1, precision="bf16")
    weights = weights_of(work, layouts, stages)
    rest = work.num_parameters - experts
    assert weights[0].tolist() == [rest + experts / ep for ep in (1, 2, 4, 8)]
    held = memories_of(work, layouts, stages, weights)
    assert held.weights == pytest.approx(2 * weights[0])
    assert held.optimizer == pytest.approx(np.full(4, 12 * work.num_parameters / 16))


def test_an_all_to_all_takes_longest_where_it_crosses_nodes() -> None:
    """Within a node as the link says; across, all GPUs of a node share its interfaces, so that it takes longer."""
    site, plain = cluster("jean_zay_h100"), Calibration("h100")
    within, across = (float(all_to_all_s(site, plain, 1e8, ranks)) for ranks in (4, 8))
    assert within == pytest.approx(site.intra.time_s("all_to_all", 4, 1e8) / plain.intra_efficiency)
    far = 1e8 * 4 / 8 * site.gpus_per_node / (site.inter.bytes_per_s("all_gather", 2) * plain.inter_efficiency)
    assert across == pytest.approx(site.inter.alpha_s("all_gather", 2) + far)
    assert across > within > 0
    assert float(all_to_all_s(site, plain, 1e8, 1)) == 0
    # A ring takes its message across once; an all-to-all once for every GPU of the node.
    assert across > float(collective_s("all_gather", site, plain, 1e8, 8))


def test_estimate_has_exchanges_and_experts_gradients_go_to_fewer_ranks() -> None:
    """With ep, tensor messages appear, and those of data parallelism shrink by the experts that no other rank holds."""
    # Launches of a µs, so that the GPU never waits for the host, which would hide messages.
    site, plain = cluster("jean_zay_h100"), Calibration("h100", launch_s=1e-6)
    found = estimate(workload(SIZE), site, Layouts.of(dp=8, ep=[1, 8], precision="bf16"), plain).parts
    sent = 2.5 * 2 * SIZE.sequence_length * SIZE.hidden * 1 / 2.5 * 2
    one = float(all_to_all_s(site, plain, sent, 8))
    assert found.tensor.tolist() == pytest.approx([0.0, 4 * SIZE.layers * one])
    assert found.data[1] < found.data[0]


def test_the_degrees_that_are_searched_divide_experts_and_replicas() -> None:
    assert experts_of(subject("mixtral_8x7b"), 64) == [1, 2, 4, 8]
    assert experts_of(subject("mixtral_8x7b"), 6) == [1, 2]
    assert experts_of(subject("llama_3_8b"), 64) == [1]
    assert chosen(None, catalogue=True, experts=True) == tuple(one for one in OFFERS if one in OF_MIXTURES)


@pytest.mark.nightly
def test_the_plan_of_a_mixture_shares_its_experts_out(mixtral: Plan) -> None:
    best = mixtral.best
    assert best.candidate.ep > 1
    assert f"ep {best.candidate.ep}" in best.title
    assert best.memory_bytes < best.question.device_bytes
    assert sum(best.parts.values()) == pytest.approx(best.estimated_s)
    told = dict(best.lines())["closest evidence"]
    assert told.startswith("bridge-moe/") and "less closely than dense models" in told


@pytest.mark.nightly
def test_plan_of_mixtral_is_not_far_from_the_only_published_figure(mixtral: Plan) -> None:
    """An anchor, no validation: without the rows that a capacity factor of 1.25 adds it would be nearer still."""
    best = mixtral.best
    size = best.question.subject.size
    assert size is not None
    tera = flops_per_sequence(size, "model") * 256 / best.step_s / best.candidate.world_size / 1e12
    assert tera == pytest.approx(PUBLISHED_TFLOP_PER_S, rel=0.25)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wanted", "english", "french"),
    [
        ({"ep": 3}, "ep=3 does not divide the 8 experts", "ep=3 ne divise pas les 8 experts"),
        ({"engine": "torch", "tp": 2}, "torch does not offer Tensor Parallelism", "torch ne propose pas : Tensor"),
        (
            {"tp": 4, "ep": 8, "dp": 1, "pp": 16},
            "divides the experts among the ranks of dp × cp × tp = 4, which ep=8 does not divide",
            "partage les experts entre les rangs de dp × cp × tp = 4, que ep=8 ne divise pas",
        ),
        ({"engine": "torch", "ep": 2, "pp": 1}, "torch does not offer expert parallelism", "torch ne propose pas"),
        (
            {"engine": "by_hand", "ep": 2, "zero": 2, "pp": 1},
            "by_hand does not offer expert parallelism with ZeRO-2",
            "by_hand ne propose pas : l’Expert Parallelism avec ZeRO-2",
        ),
    ],
)
def test_why_says_what_speaks_against_a_layout_of_experts(
    mixtral: Plan, wanted: dict[str, object], english: str, french: str
) -> None:
    for language, sentence in (("en", english), ("fr", french)):
        use_language(language)
        assert re.search(re.escape(sentence), str(mixtral.why(**wanted)))


@pytest.mark.nightly
def test_documents_say_how_experts_are_shared_out(mixtral: Plan) -> None:
    words = mixtral.best.documents()["arguments.txt"].split()
    assert words[words.index("--expert-model-parallel-size") + 1] == str(mixtral.best.candidate.ep)
    assert words[words.index("--num-experts") + 1] == "8"
    small = plan("moe_tiny", "jean_zay_h100", gpus=4, batch=32, engines="by_hand", simulate=0)
    config = small.choose(ep=4, zero=0, pp=1).config()
    assert (config.layout.ep, config.layout.engine) == (4, "by_hand")


def test_bytes_cross_links_where_groups_of_experts_lie() -> None:
    """8 replicas on nodes of 4: ep=4 stays within a node, and its expert-data groups of 2 are across."""
    grid, plain = RankGrid(dp=8), [{}]
    exchanged = Traffic(collective="all_to_all", group="ep", group_size=4, count=1, message_bytes=400)
    averaged = Traffic(collective="all_reduce", group="edp", group_size=2, count=1, message_bytes=400)
    for rank in range(8):
        to = [(flow.target, flow.num_bytes) for flow in flows_of(exchanged, rank, grid, plain)]
        first = rank - rank % 4
        assert to == [(other, 100) for other in range(first, first + 4) if other != rank]
        assert [flow.target for flow in flows_of(averaged, rank, grid, plain)] == [(rank + 4) % 8]
