"""A step: the closed form against the simulated pipeline, one layout against many, communication against formulas."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cost_model import Layouts, calibration, estimate, simulate, workload
from dlojz.cost_model.layouts import ENGINES, LOSSES, distinct, losses
from dlojz.cost_model.passes import (
    channel_share,
    collective_s,
    cuts_of,
    exposed_s,
    kind_times,
    neighbour_s,
    passes_of,
    stages_of,
)
from dlojz.cost_model.step import HOST_LINK_BYTES_PER_S, DataMessages, gathered_s, step_parts, tied_s, update_s
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.hardware.evidence import table

SELENE = cluster("selene")
FOUND = calibration("a100")
SIZE = DecoderSize(24, 2048, 16, 51200, 1024)


def _rows() -> Layouts:
    random = np.random.default_rng(3)
    n = 400
    return Layouts.of(
        dp=random.integers(1, 9, n), tp=2 ** random.integers(0, 4, n), pp=random.choice([1, 2, 4, 8], n),
        micro_batch=2 ** random.integers(0, 4, n), micro_batches=random.integers(1, 40, n),
        zero=random.integers(0, 4, n), checkpointing=random.integers(0, 3, n), engine=random.integers(0, 7, n),
        sequence_parallel=random.integers(0, 2, n), overlap=random.integers(0, 2, n), offload=random.integers(0, 3, n),
        gradient_bytes=random.choice([2, 4], n), fused_attention=random.integers(0, 2, n),
    )  # fmt: skip


def test_a_layout_gets_the_same_numbers_alone_and_among_many() -> None:
    layouts, model = _rows(), workload(SIZE)
    together = estimate(model, SELENE, layouts, FOUND)
    for place in range(0, len(layouts), 23):
        alone = estimate(model, SELENE, layouts[place], FOUND)
        assert alone.step_s[0] == pytest.approx(together.step_s[place], rel=1e-12)
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[place], rel=1e-12)


def test_the_parts_add_up_to_the_step_and_none_is_negative() -> None:
    parts = estimate(workload(SIZE), SELENE, _rows(), FOUND).parts
    columns = [getattr(parts, field.name) for field in fields(parts)]
    assert np.allclose(sum(columns), parts.step_s)
    assert min(column.min() for column in columns) >= -1e-12


@pytest.mark.parametrize(("schedule", "pp", "chunks"), [("1f1b", 4, 1), ("gpipe", 4, 1), ("interleaved", 4, 3)])
def test_estimate_in_closed_form_is_simulate_of_the_pipeline(schedule: str, pp: int, chunks: int) -> None:
    """Equal stages but for embedding and logits; those move an interleaved pipeline by less than 1 %."""
    layout = Layouts.of(pp=pp, chunks=chunks, schedule=schedule, micro_batches=16, tp=2, checkpointing="full")
    played = simulate(workload(SIZE), SELENE, layout, FOUND)
    tolerance = 1e-3 if chunks == 1 else 1e-2
    assert estimate(workload(SIZE), SELENE, layout, FOUND).step_s[0] == pytest.approx(played.step_s, rel=tolerance)


def test_estimate_and_simulate_fill_most_of_the_bubble_by_zero_bubble() -> None:
    both = [Layouts.of(pp=4, micro_batches=12, schedule=one) for one in ("1f1b", "zb-h1")]
    closed = [estimate(workload(SIZE), SELENE, one, FOUND).step_s[0] for one in both]
    played = [simulate(workload(SIZE), SELENE, one, FOUND).step_s for one in both]
    assert closed[1] < closed[0] and played[1] < played[0]


@pytest.mark.parametrize("row", [row.row for row in table("sc21-1") if row.pp > 1][:4])
def test_published_layouts_are_the_same_closed_and_played(row: str) -> None:
    found = next(one for one in table("sc21-1") if one.row == row)
    asked = workload(found.size), SELENE, Layouts.from_measurements([found]), FOUND
    assert estimate(*asked).step_s[0] == pytest.approx(simulate(*asked).step_s, rel=2e-3)


def test_78_layers_on_12_stages_leave_one_for_the_last() -> None:
    """As DeepSpeed dealt them out on Jean Zay (chronicle, "Re-do")."""
    stages = stages_of(workload(DecoderSize(78, 64, 4, 512, 32)), 12)
    assert stages.counts[stages.order][:, 1].tolist() == [7.0] * 11 + [1.0]


def test_embedding_and_logits_may_count_as_layers() -> None:
    """BLOOM: 70 layers on 12 stages, 5 on the first and the last, 6 on the others."""
    stages = stages_of(workload(DecoderSize(70, 64, 4, 512, 32)), 12, True)
    assert stages.counts[stages.order][:, 1].tolist() == [5.0] + [6.0] * 10 + [5.0]


def test_estimate_reduces_experts_among_the_ranks_that_hold_the_same() -> None:
    """69,120 weights that all four ranks hold, 264,704 of experts, which ep ranks divide; gradients of 2 bytes."""
    model = workload(DecoderSize(2, 64, 4, 512, 32, experts=4))
    alone, divided = (
        estimate(model, SELENE, Layouts.of(dp=4, ep=ep, engine="deepspeed"), FOUND).parts.data[0] for ep in (4, 2)
    )
    dense_s = float(collective_s("all_reduce", SELENE, FOUND, 2.0 * 69_120, 4))
    experts_s = float(collective_s("all_reduce", SELENE, FOUND, 264_704.0, 2, 2))
    assert alone == pytest.approx(dense_s)
    assert divided == pytest.approx(dense_s + experts_s)


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 32, 1), (8, 4, 1), (4, 4, 2)])
def test_collective_s_of_gradients_is_a_ring_over_the_nodes_cards(tp: int, dp: int, pp: int) -> None:
    """Every node's cards carry 8/L rings of 2(n − 1)/n·M bytes; L = 8/tp members of a group are in one node."""
    message, inside = 4e9, 8 // tp
    seconds = float(collective_s("all_reduce", SELENE, FOUND, message, dp, tp))
    moved = 2 * (dp - 1) / dp * message * (8 / min(inside, dp))
    rate = SELENE.inter.bytes_per_s("all_reduce", 4) * FOUND.inter_efficiency
    if dp > inside:
        assert seconds == pytest.approx(moved / rate, rel=0.02)
    assert pp >= 1


def test_neighbour_s_is_in_the_node_as_long_as_two_stages_fit_into_it() -> None:
    """Selene has 8 GPUs per node: 4 apart, a link of the node; 5 apart, all 8 share the node's interfaces."""
    message, far = 1e7, SELENE.inter
    inside = SELENE.intra.time_s("p2p", 2, message) / FOUND.intra_efficiency
    across = far.alpha_s("p2p", 2) + 8 * message / (far.bytes_per_s("all_gather", 2) * FOUND.inter_efficiency)
    for apart, expected in ((1, inside), (4, inside), (5, across), (8, across)):
        assert float(neighbour_s(SELENE, FOUND, message, 2, apart, 0, 1)) == pytest.approx(expected, rel=1e-12)
        assert float(neighbour_s(SELENE, FOUND, message, 1, apart, 0, 1)) == 0
    # Cut over 4 tensor-parallel ranks: a quarter is sent, and gathered over the links of the node.
    gathered = float(collective_s("all_gather", SELENE, FOUND, message, 4))
    quarter = far.alpha_s("p2p", 2) + 2 * message / (far.bytes_per_s("all_gather", 2) * FOUND.inter_efficiency)
    assert float(neighbour_s(SELENE, FOUND, message, 2, 8, 1, 4)) == pytest.approx(quarter + gathered, rel=1e-12)


def test_collective_s_of_a_group_in_one_node_never_touches_the_network() -> None:
    one = float(collective_s("all_reduce", SELENE, FOUND, 1e8, 8))
    assert one == pytest.approx(SELENE.intra.time_s("all_reduce", 8, 1e8) / FOUND.intra_efficiency)
    assert float(collective_s("all_reduce", SELENE, FOUND, 1e8, 1)) == 0


def test_exposed_s_by_overlap_lies_between_the_sum_and_the_longer() -> None:
    message, compute = np.array([1.0, 2.0, 5.0]), np.array([2.0, 2.0, 1.0])
    none, half, full = (exposed_s(message, compute, np.full(3, one), 0.2) for one in (0.0, 0.5, 1.0))
    assert none.tolist() == message.tolist()
    assert half == pytest.approx([0.2 + 0.4, 0.4 + 0.8, 1.0 + 3.0 + 0.5])  # bare, longer than what it runs beside, half
    assert full == pytest.approx([0.2, 0.4, 1.0 + 3.0])


def test_exposed_s_charges_the_channels_that_run_and_not_the_seconds_of_a_slow_wire() -> None:
    """Four seconds with a quarter of the channels take of the products what one second with all of them does."""
    all_run, quarter = exposed_s(1.0, 9.0, 0.5), exposed_s(4.0, 9.0, 0.5, 0.0, 1.0)
    assert float(all_run) == float(quarter) == 0.5
    assert float(exposed_s(4.0, 3.0, 0.5, 0.25, 1.0)) == 1.0 + 0.5 * 0.75  # the edge bare, the rest within 3 s
    assert float(exposed_s(4.0, 9.0, 0.0, 0.0, 1.0)) == 4.0, "nothing is hidden"


def test_channel_share_is_the_network_s_rate_over_the_links_and_1_in_a_node() -> None:
    """Selene: 8 cards carry so much of a node, NVLink so much of a GPU; of 8 groups each has an eighth."""
    share = SELENE.inter.bytes_per_s("all_gather", 2) / SELENE.intra.bytes_per_s("all_gather", 8)
    assert 0.5 < share < 1
    assert channel_share(SELENE, [8, 16, 16], [1, 1, 8]).tolist() == pytest.approx([1.0, share, share / 8])
    assert channel_share(cluster("fms_a100"), 16).tolist() == pytest.approx(40 / 227, rel=1e-6)


def test_gathered_s_of_hybrid_sharding_gathers_in_a_node_and_sums_shards_between_copies() -> None:
    """dp 64 over 8 GPUs of a node each: 2 GB are gathered in the node; of 4 GB of gradients a rank sums an eighth over
    the 8 nodes, while its 7 neighbours do the same."""
    some = Layouts.of("bf16", dp=64, zero=3, zero_shards=[8, 64], engine="composer", overlap=1, gradient_bytes=4)
    sent = gathered_s(np.full(2, 1e9), SELENE, some, FOUND)
    gather, scatter = (
        float(collective_s(kind, SELENE, FOUND, size, 8))
        for kind, size in (("all_gather", 2e9), ("reduce_scatter", 4e9))
    )
    summed = float(collective_s("all_reduce", SELENE, FOUND, 4e9 / 8, 8, 8))
    assert sent.forward[:, 0].tolist() == pytest.approx([gather, gather])  # all channels run in a node
    assert sent.backward[0, 0] == pytest.approx(gather + scatter + summed)
    assert sent.backward[1, 0] == pytest.approx(gather + scatter + summed * float(channel_share(SELENE, 8, 8)))
    assert sent.forward[0, 1] == pytest.approx(float(collective_s("all_gather", SELENE, FOUND, 2e9, 64)))
    # ZeRO-1: once per step; without ZeRO over how many ranks nothing is sharded does not count.
    once = Layouts.of("bf16", dp=64, zero=[1, 0], zero_shards=8, engine="megatron-core", overlap=1, gradient_bytes=4)
    sent = gathered_s(np.full(2, 1e9), SELENE, once, FOUND)
    assert sent.last[0].tolist() == pytest.approx(
        [scatter + summed, float(collective_s("all_reduce", SELENE, FOUND, 4e9, 64))]
    )
    assert sent.once[0].tolist() == pytest.approx([gather, 0.0])


def test_gathered_s_of_experts_is_over_the_ranks_that_hold_the_same_ones() -> None:
    """tp 2, dp 16: experts over 4 neighbours of the 32 ranks are held 8 times, 4 apart."""
    some = Layouts.of("bf16", dp=16, tp=2, ep=4, zero=1, engine="megatron-core", overlap=1, gradient_bytes=2)
    sent = gathered_s(np.full(1, 1e9), SELENE, some, FOUND, ep=some.ep)
    assert float(sent.last[0, 0]) == pytest.approx(float(collective_s("reduce_scatter", SELENE, FOUND, 2e9, 8, 4)))


def test_collective_s_of_a_gather_around_a_ring_grows_with_every_rank() -> None:
    """NCCL's LL128: 1.9 µs a step in a node, 4 µs between nodes; nothing else of an empty message grows with ranks."""
    for ranks in (128, 512):
        nodes = ranks // 8
        expected = (ranks - nodes) * 1.9e-6 + (nodes - 1) * 4e-6
        assert float(collective_s("all_gather", SELENE, FOUND, 0.0, ranks)) == pytest.approx(expected)


def test_gathered_s_of_fsdp_pays_every_unit_and_reduces_in_its_own_type() -> None:
    some = Layouts.of("bf16", dp=64, zero=3, engine="composer", overlap=1, gradient_bytes=[2, 4])
    narrow, wide = _beside(gathered_s(np.full(2, 1e9), SELENE, some, FOUND, 26.0, 0.1))
    of = [float(collective_s("reduce_scatter", SELENE, FOUND, size, 64)) for size in (2e9, 4e9)]
    assert wide - narrow == pytest.approx(of[1] - of[0])
    single = _beside(gathered_s(np.full(2, 1e9), SELENE, some, FOUND, 1.0, 0.1))
    start = float(collective_s("all_gather", SELENE, FOUND, 0.0, 64))
    assert narrow - single[0] == pytest.approx(25 * 3 * start)


def _beside(sent: DataMessages) -> Any:
    """Seconds of what runs beside computation; the second row are those of channels."""
    return sent.forward[0] + sent.backward[0]


def test_gathers_of_the_forward_are_not_hidden_behind_the_backward() -> None:
    """Gathers are asked for one unit ahead: 1 M parameters on 512 GPUs, whose gathers take longer than the forward."""
    some = Layouts.of("bf16", dp=512, zero=3, engine="composer", overlap=1)
    parts = step_parts(workload(SIZE), SELENE, some, FOUND)
    weights = np.array([float(workload(SIZE).num_parameters)])
    sent = gathered_s(weights, SELENE, some, FOUND, SIZE.layers + 2.0)
    assert sent.forward[0, 0] > parts.forward[0]
    alone = exposed_s(_beside(sent), parts.forward + parts.backward, np.ones(1))
    assert parts.data[0] > alone[0]


def test_fsdp_in_a_pipeline_reduces_after_the_last_backward() -> None:
    some = Layouts.of("bf16", dp=8, pp=[1, 2], micro_batches=4, zero=3, engine="torchtitan", overlap=1)
    sent = gathered_s(np.full(2, 1e9), SELENE, some, FOUND, 26.0, 0.1)
    assert np.asarray(sent.edge[2]).tolist() == [0.1, 1.0] and sent.last[0, 1] > 0
    assert sent.last[0, 0] == 0, "without a pipeline every micro-batch reduces"


def test_estimate_of_torchs_checkpoint_does_not_compute_the_last_product_again() -> None:
    """So it computes less again than Megatron's, by the last product and the residual connection after it."""
    torch, megatron = (
        estimate(workload(SIZE), SELENE, Layouts.of("bf16", engine=one, checkpointing="full"), FOUND).parts
        for one in ("composer", "megatron")
    )
    assert torch.recompute[0] < 0.85 * megatron.recompute[0]


def test_a_loss_is_fused_by_its_engine_or_by_the_layout() -> None:
    engines = ["megatron", "torchtitan", "composer"]
    plain, fused = (losses(Layouts.of(engine=engines, fused_loss=one)) for one in (0, 1))
    assert [LOSSES[one] for one in plain] == ["megatron", "torch", "fused, two metrics"]
    assert [LOSSES[one] for one in fused] == ["fused", "fused", "fused, two metrics"]
    forward = estimate(workload(SIZE), SELENE, Layouts.of(fused_loss=[0, 1]), FOUND).parts.forward
    assert forward[1] < forward[0]


def test_offloaded_weights_cross_the_hosts_link_twice_per_micro_batch() -> None:
    """Two bytes down for each pass, of the share of a rank; without overlap nothing hides them."""
    columns = {"dp": 8, "zero": 3, "micro_batches": 4, "engine": "deepspeed", "offload": ["optimizer", "parameters"]}
    made = estimate(workload(SIZE), SELENE, Layouts.of(**columns), replace(FOUND, overlap=0.0))  # type: ignore[arg-type]
    weights = workload(SIZE).num_parameters
    assert made.parts.data[1] - made.parts.data[0] == pytest.approx(4 * 4 * weights / 8 / HOST_LINK_BYTES_PER_S)
    assert made.parts.optimizer[1] == made.parts.optimizer[0]
    hidden = estimate(workload(SIZE), SELENE, Layouts.of(**columns), FOUND)  # type: ignore[arg-type]
    assert made.step_s[1] >= hidden.step_s[1] >= hidden.step_s[0]


def test_estimate_of_megatron_deepspeed_without_a_pipeline_shards_as_deepspeed() -> None:
    made = estimate(
        workload(SIZE), SELENE, Layouts.of(dp=32, zero=[2, 2, 3, 3], micro_batches=4, gradient_bytes=2,
                                           engine=["deepspeed", "megatron-deepspeed"] * 2), FOUND,
    )  # fmt: skip
    assert made.parts.data[0] == made.parts.data[1] and made.parts.data[2] == made.parts.data[3]


def test_estimate_of_an_image_model_selective_recomputes_what_is_no_product() -> None:
    none, selective, full = (
        estimate(
            workload("coatnet_tiny"),
            SELENE,
            Layouts.of("bf16", micro_batch=8, checkpointing=one, engine="torchtitan"),
            FOUND,
        ).parts
        for one in ("none", "selective", "full")
    )
    assert none.recompute[0] == 0 < selective.recompute[0] < full.recompute[0] < full.forward[0]
    assert full.recompute[0] > 0.8 * full.forward[0]  # each block's last product is not computed again


def test_estimate_of_zero_3_collapses_as_published() -> None:
    """144 → 88 → 44 TFLOP/s per GPU (Narayanan et al. 2021, table 2), each within 15 %."""
    rows = [row for row in table("sc21-2") if row.row.split("/")[1].startswith("zero-174.6")]
    made = estimate(workload(rows[0].size), SELENE, Layouts.from_measurements(rows), FOUND)
    for row, seconds in zip(rows, made.step_s, strict=True):
        assert row.seconds is not None
        assert float(seconds) == pytest.approx(row.seconds, rel=0.15)


@pytest.mark.parametrize(
    ("columns", "words"),
    [({"tp": 0}, "tp must be at least 1"), ({"schedule": "zigzag"}, "1f1b"), ({"width": 3}, "column"),
     ({"tp": [1, 2], "dp": [1, 2, 3]}, "one length")],
)  # fmt: skip
def test_bad_layouts_are_refused_in_one_sentence(columns: dict[str, object], words: str) -> None:
    with pytest.raises(LabError, match=words):
        Layouts.of(**columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("language", "words"), [("en", "unknown attention_kernel 'flash9'"), ("fr", "attention_kernel 'flash9'")]
)
def test_layouts_answer_an_unknown_attention_kernel_by_the_known_ones(language: str, words: str) -> None:
    use_language(language)
    with pytest.raises(LabError) as refused:
        Layouts.of(attention_kernel="flash9")
    told = str(refused.value)
    assert words in told and "flash2" in told and "\n" not in told
    assert ("valeur inconnue" in told) == (language == "fr")


def test_simulate_takes_one_layout() -> None:
    with pytest.raises(LabError, match="one layout"):
        simulate(workload(SIZE), SELENE, Layouts.of(dp=[1, 2]), FOUND)
    with pytest.raises(LabError, match="dealt out"):
        simulate(workload(SIZE), SELENE, Layouts.of(pp=4, chunks=5, schedule="interleaved", micro_batches=8), FOUND)


def test_a_layout_of_which_nothing_is_said_is_one_sample_on_one_gpu() -> None:
    plain = Layouts.of()
    for name in ("dp", "tp", "pp", "cp", "ep", "zero_shards", "micro_batch", "micro_batches", "chunks"):
        assert getattr(plain, name).tolist() == [1], name
    for name in ("zero", "sequence_parallel", "fused_attention", "embedding_slots", "overlap", "blocking", "eager"):
        assert getattr(plain, name).tolist() == [0], name


def test_the_copies_of_a_tied_embedding_are_all_stages_but_one_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 stages of 2·4 ranks: rank 0 and rank 56 = 7·8 add V·h/t gradients; with one stage nothing is sent."""
    asked: list[tuple[Any, ...]] = []

    def seconds(name: str, _cluster: Any, _found: Any, message: Any, size: int, apart: Any) -> Any:
        asked.append((name, [float(one) for one in np.atleast_1d(message)], size, list(np.atleast_1d(apart))))
        return np.ones(2)

    monkeypatch.setattr("dlojz.cost_model.step.collective_s", seconds)
    layouts = Layouts.of(dp=[2, 2], tp=[4, 4], pp=[8, 1], gradient_bytes=[4, 4])
    assert list(np.atleast_1d(tied_s(workload(SIZE), SELENE, layouts, FOUND))) == [1.0, 0.0]
    assert asked == [("all_reduce", [4 * 51200 * 2048 / 4] * 2, 2, [56, 8])]


def test_stops_early_since_torch_2_1_without_reentrance() -> None:
    """Before, FSDP computes a whole layer again; Megatron's checkpoint, which is its own, always does."""
    work, site, profile = workload(DecoderSize(2, 4096, 32, 1000, 2048)), cluster("selene"), calibration("a100")
    layouts = Layouts.of("bf16", engine=["composer", "composer", "megatron", "composer"], torch=[200, 201, 201, -1],
                         fused_attention=1, eager=1, checkpointing="full")  # fmt: skip
    passes = passes_of(work, site, layouts, profile)
    cuts, places = cuts_of(layouts)
    tails = [kind_times(work.kinds[1], cuts[place], site, profile, "bf16").tail for place in places]
    saved = passes.forward[1] - passes.again[1]
    assert saved.tolist() == pytest.approx([0.0, tails[1], 0.0, tails[3]], abs=1e-15) and tails[1] > 1e-4
    assert passes_of(work, site, replace(layouts, checkpointed_every=layouts.dp + 1), profile).again[1] == (
        pytest.approx(passes.again[1] / 2)
    )


def test_distinct_layouts_stand_for_all_that_differ_in_nothing_else() -> None:
    """Each layout has the kind of the first that equals it in every column but the ignored one."""
    layouts = Layouts.of(dp=[4, 2, 4, 4, 2], micro_batch=[1, 1, 2, 1, 3], micro_batches=[2**23, 1, 2**23, 5, 1], tp=2)
    first, kinds = distinct(layouts, ("micro_batch",))
    assert sorted(first.tolist()) == [0, 1, 3] and first[kinds].tolist() == [0, 1, 0, 3, 1]
    alike, every = distinct(layouts, ())
    assert sorted(alike.tolist()) == list(range(5)) and alike[every].tolist() == list(range(5))
    assert distinct(layouts[:0], ())[1].size == 0


def test_step_parts_of_many_layouts_are_those_of_each_alone() -> None:
    """What is computed once for layouts of a kind is what each has: no column is ignored on which it depends."""
    rng, number, work, site = np.random.default_rng(5), 60, workload("mixtral_8x7b"), cluster("dgx_h100")
    choices = {
        "dp": (8, 16), "tp": (1, 2), "pp": (1, 2, 4), "cp": (1, 2), "ep": (1, 2, 8), "zero": (0, 1, 2, 3),
        "micro_batch": (1, 2), "micro_batches": (1, 8, 16), "chunks": (1, 2), "sequence_parallel": (0, 1),
        "fused_attention": (0, 1), "checkpointing": (0, 1, 2, 3), "schedule": (0, 2, 3), "offload": (0, 1, 2),
        "engine": tuple(range(len(ENGINES))), "overlap": (0, 1), "gradient_bytes": (2, 4), "dropout": (0, 1),
        "tensor_overlap": (0, 1), "gather_overlap": (0, 1), "context_exchange": (0, 1), "attention_kernel": (0, 1),
        "fused_loss": (0, 1), "embedding_slots": (0, 1), "zero_shards": (0, 8), "eager": (0, 1), "compiled": (0, 1),
        "dispatcher": (0, 1, 2),
        "asynchronous": (0, 1), "relayed": (0, 1), "blocking": (0, 1), "fused_accumulation": (0, 1),
    }  # fmt: skip
    # Neighbours that differ in one column, so that each column decides somewhere between two alike.
    base = {name: np.repeat(rng.choice(values, number), 2) for name, values in choices.items()}
    for place, name in enumerate((*choices, *choices)[:number]):
        base[name][2 * place + 1] = rng.choice(choices[name])
    layouts = Layouts.of(precision="bf16", **base)
    together = estimate(work, site, layouts, calibration("h100"))
    alone = [estimate(work, site, layouts[place : place + 1], calibration("h100")) for place in range(2 * number)]
    for part in fields(together.parts):
        assert getattr(together.parts, part.name).tolist() == [float(getattr(one.parts, part.name)[0]) for one in alone]
    for part in fields(together.memory):
        each = [float(getattr(one.memory, part.name)[0]) for one in alone]
        assert getattr(together.memory, part.name).tolist() == each


def test_gathered_s_sends_gradients_of_trained_weights_alone() -> None:
    """A hundredth is trained: DDP sums 4e7 bytes, FSDP gathers all, DeepSpeed’s ZeRO-1 sends no more."""
    trained = np.full(1, 0.01)

    def sent(engine: str, zero: int) -> DataMessages:
        some = Layouts.of("bf16", dp=8, zero=zero, engine=engine, overlap=1, gradient_bytes=4)
        return gathered_s(np.full(1, 1e9), SELENE, some, FOUND, trained=trained)

    seconds = {
        (kind, size): float(collective_s(kind, SELENE, FOUND, size, 8))
        for kind, size in [("all_reduce", 4e7), ("all_gather", 2e9), ("all_gather", 2e7), ("reduce_scatter", 4e7)]
    }
    assert float(sent("composer", 0).last[0, 0]) == pytest.approx(seconds["all_reduce", 4e7])
    fsdp = sent("composer", 3)
    assert float(fsdp.forward[0, 0]) == pytest.approx(seconds["all_gather", 2e9])
    assert float(fsdp.backward[0, 0]) == pytest.approx(seconds["all_gather", 2e9] + seconds["reduce_scatter", 4e7])
    one = sent("deepspeed", 1)
    assert float(one.once[0, 0]) == pytest.approx(seconds["all_gather", 2e7])
    assert float(one.last[0, 0]) == pytest.approx(seconds["reduce_scatter", 4e7])


def test_update_s_of_weights_in_bf16_alone_moves_16_of_34_bytes() -> None:
    """Two moments and the weight read and written in 16 bit, the gradient read twice: 8 + 4 + 4; 4 are the same."""
    usual, true = (
        float(update_s(np.full(1, 1e9), SELENE, Layouts.of("bf16", true_weights=flag), FOUND)[0]) for flag in (0, 1)
    )
    assert true / usual == pytest.approx((16 + 4) / (34 + 4))
