"""The calibration of a machine: known answers are found again, damaged files are refused, recorded numbers agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlojz.base.errors import LabError
from dlojz.by_hand.collectives.running import TimedMessage
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import measured_machine, measuring
from dlojz.cost_model.calibration import Calibration, Product
from dlojz.cost_model.measured_machine import (
    Measured,
    Setup,
    Tensors,
    default_path,
    line,
    local_parts,
    local_step_s,
    read_measured,
    site,
    update_s,
    write_measured,
)
from dlojz.cost_model.measuring import (
    CHAIN_LENGTHS,
    COLLECTIVES,
    LONG_PRODUCTS,
    MEETING_PRODUCTS,
    PARTS_LENGTHS,
    PRODUCTS,
    Timed,
    _by_turns,
    _neighbours,
    _window_on_gpu_s,
    chained,
)
from dlojz.cost_model.workload import product_s
from dlojz.hardware import gpu
from dlojz.hardware.links import bus_factor
from dlojz.processes.forks import first_failure, spmd

PEAK, START, LAUNCH_S, BANDWIDTH = 80e9, 8.0, 10e-6, 12e9
TENSOR_S, ELEMENT_S = 40e-6, 2e-9
ALPHA_S, BUS = 300e-6, 1e9
TRUE = Calibration("true", product_efficiency=0.8, attention_efficiency=0.8, product_start=START, unaligned=1.0)
CHIP = replace(gpu("cpu"), peak_flops={"fp32": PEAK / 0.8}, memory_bytes_per_s=1e15, num_sms=1)


def setup_of(ranks: int, slower: float = 1.0) -> Setup:
    """Measurements of a machine that is exactly as the cost model says."""
    products = [Product(*sizes) for sizes in (*PRODUCTS, (512, 512, 8), (512, 512, 16))]
    timings = [
        Timed("product", (one.m, one.n, one.k, 1), slower * (product_s(one, CHIP, TRUE, "fp32") + LAUNCH_S), "product")
        for one in products
    ]
    heads = Product(128, 128, 32, 16, attention=True)
    seconds = slower * (product_s(heads, CHIP, TRUE, "fp32") + LAUNCH_S)
    timings.append(Timed("attention", (128, 128, 32, 16), seconds, "attention"))
    timings += [Timed("pass", (size,), slower * size / BANDWIDTH, "pass") for size in (10**6, 10**7)]
    timings.append(Timed("launch", (), slower * LAUNCH_S, "launch"))
    for what, times in (("update", 1), *((("sharded", 5),) if ranks > 1 else ())):
        timings += [
            Timed(what, (tensors, each), slower * (times * tensors * TENSOR_S + tensors * each * ELEMENT_S), what)
            for tensors, each in ((8, 256), (64, 16384))
        ]
    points = [
        TimedMessage(size, ranks * ALPHA_S + bus_factor(name, ranks) * size / BUS, ranks, name)  # type: ignore[arg-type]
        for name in (*COLLECTIVES, "p2p")
        for size in (2**10, 2**16, 2**22)
        if ranks > 1
    ]
    return Setup(ranks=ranks, timings=tuple(timings), points=tuple(points))


def test_window_on_gpu_s_times_a_gpu_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events count milliseconds: here 2 for each call, and at least half a window of 100 is wanted."""
    calls: list[None] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(calls)

        def elapsed_time(self, end: Event) -> float:
            return 2.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert _window_on_gpu_s(lambda: calls.append(None), 0.1) == pytest.approx(2e-3)
    assert len(calls) == 8 + 32


def test_neighbours_stop_the_clock_when_a_message_between_gpus_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends between GPUs return at once; the host of this test is rank 0 of two, and its tensors are on the CPU."""
    done: list[str] = []

    def on_cpu(make: Any) -> Any:
        return lambda *given, device: make(*given)  # noqa: PLW0108 - it drops the device

    for where, name, answer in (
        (dist, "get_rank", 0),
        (dist, "get_world_size", 2),
        (dist, "barrier", None),
        (dist, "send", None),
        (dist, "all_reduce", None),
        (torch.cuda, "synchronize", None),
    ):
        monkeypatch.setattr(where, name, lambda *_, name=name, answer=answer, **__: (done.append(name), answer)[1])
    for name in ("zeros", "tensor"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    points = _neighbours(torch.device("cuda"), repeats=1)
    once = ["barrier", "send", "synchronize"]
    assert done == ["get_rank", "get_world_size", *[*once * 3, "all_reduce"] * len(points)]


def test_the_slowest_rank_says_how_long_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank takes half a second: ten calls fill a window of five."""
    monkeypatch.setattr(measuring, "_ranks", lambda: 2)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda told, op: told.fill_(0.5))
    calls: list[None] = []
    assert measuring._call_s(lambda: calls.append(None), 5.0) == 0.5
    assert len(calls) == 2 + 10


def test_measure_engines_lets_ranks_meet_for_four_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 · 3 windows of 0.05 s, of 5 ms for each message; at least 41 of them; 11 after longer work; who waited."""
    sent: list[int] = []
    computed: list[None] = []
    for where, name, answer in (
        (measuring, "_ranks", 2),
        (measuring, "_pairs", []),
        (measuring, "_by_turns", [1.0, 1.0]),
        (dist, "get_world_size", 2),
    ):
        monkeypatch.setattr(where, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(torch, "mm", lambda *_: computed.append(None))
    monkeypatch.setattr(dist, "all_reduce", lambda message, group=None: sent.append(message.numel()))
    found = measuring.measure_engines(windows=3, window_s=0.05)
    assert [one.what for one in found] == ["chain", "parts", "meeting", "straggler", "straggler"]
    assert sent == [2**14] * 120 + [2 * 120] + 2 * ([2**14] * 11 + [2 * 11])
    assert len(computed) == 120 * MEETING_PRODUCTS + 11 * sum(LONG_PRODUCTS)
    sent.clear()
    measuring.measure_engines(windows=1, window_s=0.05)
    assert sent == [2**14] * 41 + [2 * 41] + 2 * ([2**14] * 11 + [2 * 11])


def test_by_turns_takes_the_mean_of_the_ranks_and_the_median_of_three_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two calls take turns; the other rank is three times as slow, and the second window falls to somebody else."""
    taken_s = iter([1.0, 10.0, 100.0, 1000.0, 2.0, 30.0])
    monkeypatch.setattr(measuring, "_ranks", lambda: 2)
    monkeypatch.setattr(measuring, "_window_s", lambda *_: next(taken_s))
    monkeypatch.setattr(dist, "all_reduce", lambda told: told.mul_(1 + 3))
    calls = (lambda: None, lambda: None)
    assert _by_turns(calls, 0.01, torch.device("cpu")) == [2.0 * 2, 30.0 * 2]


def _meeting_of_a_pair(rank: int, ranks: int) -> list[Any]:
    pair = measuring._own_pair()
    return [dist.get_process_group_ranks(pair), measuring._meeting(5, pair)[1]]


def test_four_ranks_meet_in_pairs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told = spmd(_meeting_of_a_pair, 4)
    assert first_failure(told) is None
    assert [one.value[0] for one in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(one.value[1] > 0 for one in told)
    monkeypatch.setattr(measuring, "_own_pair", lambda: None)
    monkeypatch.setattr(measuring, "_pairs", list)
    for name in ("_by_turns", "_meeting"):
        monkeypatch.setattr(measuring, name, lambda *_, **__: [1.0, 1.0])
    for ranks, groups in ((2, [()]), (3, [()]), (4, [(), (2,)])):
        monkeypatch.setattr(measuring, "_ranks", lambda ranks=ranks: ranks)
        met = [one.size for one in measuring.measure_engines(windows=1, window_s=0.01) if one.what == "meeting"]
        assert met == groups
        assert measuring.count_engines(ranks) == measuring.count_engines(2) + len(groups) - 1


def test_tensor_parallelism_of_two_ranks_of_four_waits_as_pairs_do(machine: Measured) -> None:
    """ALPHA_S per rank: a message's start in a pair is 2·ALPHA_S, which the meeting's seconds replace."""
    four = setup_of(4, slower=2.0)
    pairs_s, all_s = 3e-3, 9e-3
    met = (Timed("meeting", (), all_s, "meeting"), Timed("meeting", (2,), pairs_s, "meeting of pairs"))
    rich = machine.model_copy(
        update={"setups": (*machine.setups[:2], Setup(ranks=4, timings=(*four.timings, *met), points=four.points))}
    )
    for fields, ranks, waited_s in (({"tp": 2, "dp": 2}, 2, pairs_s), ({"tp": 4}, 4, all_s)):
        config = RunConfig.of(model="gpt_tiny", micro_batch=8, engine="by_hand", **fields)
        bare, whole = local_parts(machine, config), local_parts(rich, config)
        messages = measured_machine._tensor_messages(config)
        assert float(whole.tensor[0] - bare.tensor[0]) == pytest.approx(messages * (waited_s - ranks * ALPHA_S))
    # A stage's message is met by the next one alone: forward and backward of three micro-batches.
    config = RunConfig.of(model="gpt_tiny", micro_batch=8, micro_batches=3, pp=4, schedule="1f1b")
    bare, whole = local_parts(machine, config), local_parts(rich, config)
    assert float(whole.pipeline[0] - bare.pipeline[0]) == pytest.approx(2 * 3 * (pairs_s - 2 * ALPHA_S))


def test_an_engine_of_two_ranks_of_four_costs_what_it_did_on_two_while_all_share_the_cores(machine: Measured) -> None:
    """Launches of four ranks take twice as long: so does what FSDP2 costs two of them."""
    block_s, tensor_s, other_s = 1e-3, 1e-4, 7.0
    sizes = ((2, 8), (8, 32), (8, 160))
    of_two = [Timed("fsdp2", size, block_s * size[0] + tensor_s * size[1], "fsdp2") for size in sizes]
    of_four = [Timed("fsdp2", size, other_s, "fsdp2") for size in sizes]
    alone, two, four = machine.setups
    rich = machine.model_copy(update={"setups": (
        alone, Setup(ranks=2, timings=(*two.timings, *of_two), points=two.points),
        Setup(ranks=4, timings=(*four.timings, *of_four), points=four.points),
    )})  # fmt: skip
    config = RunConfig.of(model="gpt_tiny", micro_batch=8, dp=2, tp=2, zero=2)
    found = local_parts(rich, config).data[0] - local_parts(machine, config).data[0]
    tensors = measured_machine.tensors_of(config.model, None, config.sequence_length, config.num_classes)
    assert float(found) == pytest.approx(2 * (block_s * tensors.blocks + tensor_s * tensors.tensors))


@pytest.fixture(scope="module")
def machine() -> Measured:
    """Two cores: one and two ranks as fast, four at half the speed."""
    setups = (setup_of(1), setup_of(2), setup_of(4, slower=2.0))
    return Measured(
        machine="here", processor="CPU", cores=2, memory_bytes=2**34, date="2026-11-22", versions={}, setups=setups
    )


def test_measured_machine_finds_known_answers_again(machine: Measured) -> None:
    """Exact but for rounding: the inner size at half speed is among those tried, the rest are medians of equals."""
    for ranks, slower in ((1, 1.0), (2, 1.0), (4, 2.0)):
        found = site(machine, ranks, image=False)
        assert found.calibration.product_start == START
        for sizes in PRODUCTS:
            said_s = product_s(Product(*sizes), found.cluster.gpu, found.calibration, "fp32")
            assert said_s == pytest.approx(slower * product_s(Product(*sizes), CHIP, TRUE, "fp32"), rel=1e-9)
        memory = found.cluster.gpu.memory_bytes_per_s * found.calibration.memory_efficiency
        assert memory == pytest.approx(BANDWIDTH / slower)
        assert found.calibration.serial_s == pytest.approx(slower * LAUNCH_S)
        assert found.update == pytest.approx((slower * TENSOR_S, slower * ELEMENT_S))
        assert max(abs(one.error) for one in found.residuals) < 1e-9
    links = site(machine, 2).cluster.intra
    assert links.alpha_s("all_gather", 4) == pytest.approx(4 * ALPHA_S)
    assert links.bytes_per_s("p2p", 2) == pytest.approx(BUS)


def test_a_line_never_falls_and_never_starts_below_zero() -> None:
    assert line([(1, 10, 2.0), (1, 20, 3.0)]) == pytest.approx((1.0, 0.1))
    assert line([(1, 10, 1.0), (1, 20, 3.0)]).start == 0
    assert line([(1, 10, 3.0), (1, 20, 1.0)]).slope == 0


def test_ranks_that_share_cores_take_their_own_measurements(machine: Measured) -> None:
    assert machine.setup(3).ranks == 4
    with pytest.raises(LabError, match="up to 4 ranks, but 8"):
        site(machine, 8)
    with pytest.raises(LabError, match="bf16 were not measured"):
        site(machine, 1, precision="bf16")


def test_a_file_is_read_again_and_a_damaged_one_refused(machine: Measured, tmp_path: Path) -> None:
    path = tmp_path / "own" / "calibration.json"
    write_measured(path, machine)
    assert read_measured(path) == machine
    whole = path.read_text(encoding="utf-8")

    def refused(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(LabError) as caught:
            read_measured(path)
        return str(caught.value)

    assert "damaged" in refused(whole[: len(whole) // 2])
    assert "checksum" in refused(whole.replace('"cores": 2', '"cores": 3'))
    assert "newer" in refused(whole.replace('"schema_version": 1', '"schema_version": 2'))
    assert "damaged" in refused("[]")
    path.unlink()
    with pytest.raises(LabError, match="run `dlojz calibrate` first"):
        read_measured(path)


def test_default_path_is_the_place_of_a_users_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "dlojz" / "calibration.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timings": [["product", [8, 8, 8, 1], 0.0, "none"]]}, "seconds above 0"),
        ({"timings": [["product", [8, 8], 1.0, "short"]]}, "its sizes"),
        ({"points": [[1024, 1.0, 3, "all_reduce"]]}, "of 2 ranks"),
        ({"timings": [["launch", [], 1e-5, "launch"]]}, "lack product, pass, update"),
        ({"points": []}, "lack messages"),
    ],
)
def test_setup_refuses_illegal_measurements(change: dict[str, Any], said: str) -> None:
    legal = json.loads(setup_of(2).to_json())
    with pytest.raises(LabError, match=said):
        Setup.from_dict({**legal, **change})


def test_setups_begin_with_one_rank(machine: Measured) -> None:
    with pytest.raises(LabError, match="begin with 1"):
        Measured.from_dict({**machine.to_dict(), "setups": [setup_of(2).to_dict()]})


def test_a_step_is_the_sum_of_what_was_measured(machine: Measured) -> None:
    config = RunConfig.of(model="gpt_tiny", dp=2, micro_batch=8)
    here = site(machine, 2, image=False)
    parts = local_parts(machine, config)
    assert local_step_s(machine, config) == pytest.approx(float(parts.step_s[0]))
    held = Tensors(53, 875_264, 6)
    assert float(parts.optimizer[0]) == pytest.approx(53 * TENSOR_S + 875_264 * ELEMENT_S)
    # One all-reduce of fp32 gradients over two ranks, nothing hidden.
    assert float(parts.data[0]) == pytest.approx(2 * ALPHA_S + 4 * 875_008 / BUS)
    sharded = RunConfig.of(model="gpt_tiny", dp=2, micro_batch=8, zero=3)
    assert update_s(here, sharded, held) == pytest.approx(5 * 53 * TENSOR_S + 875_264 / 2 * ELEMENT_S)
    assert local_step_s(machine, sharded) > local_step_s(machine, config)


def test_local_parts_of_four_ranks_on_two_cores_are_each_at_half_speed(machine: Measured) -> None:
    config = RunConfig.of(model="gpt_tiny", dp=2, micro_batch=4)
    wide = RunConfig.of(model="gpt_tiny", dp=4, micro_batch=4)
    two = local_parts(machine, config)
    four = local_parts(machine, wide)
    assert float(four.forward[0]) == pytest.approx(2 * float(two.forward[0]))
    assert float(four.optimizer[0]) == pytest.approx(2 * float(two.optimizer[0]))


def test_local_parts_refuses_what_the_cost_model_has_not(machine: Measured) -> None:
    config = RunConfig.of(model="gpt_tiny", pp=2, micro_batches=4, schedule="zb-v", engine="by_hand")
    with pytest.raises(LabError, match="schedules 1f1b"):
        local_parts(machine, config)


BLOCK_S, HOOK_S, DISPATCH_S, MEETING_S = 2e-3, 50e-6, 3e-3, 1.3e-3


def engines_setup(ranks: int) -> Setup:
    """The same machine with what engines add: of kind k, share_k × (blocks · BLOCK_S + tensors · HOOK_S)."""
    plain = setup_of(ranks)
    extra = [
        Timed(kind, (blocks, tensors), share * (blocks * BLOCK_S + tensors * HOOK_S), kind)
        for kind, share in (("ddp", 0.1), ("fsdp2", 1.0), ("fsdp3", 2.0), ("checkpoint", 0.5))
        for blocks, tensors in ((2, 8), (8, 32), (8, 160))
    ]
    extra += [Timed("dtensor", (count,), count * DISPATCH_S, "dtensor") for count in (4, 16)]
    extra.append(Timed("meeting", (), MEETING_S, "meeting"))
    return Setup(ranks=ranks, timings=(*plain.timings, *extra), points=plain.points)


@pytest.mark.parametrize(
    ("fields", "part", "extra_s"),
    [
        ({"dp": 2, "micro_batch": 4, "micro_batches": 2}, "data", 0.1 * (6 * BLOCK_S + 53 * HOOK_S)),
        ({"dp": 2, "micro_batch": 4, "micro_batches": 2, "zero": 2}, "data", 2 * (6 * BLOCK_S + 53 * HOOK_S)),
        ({"dp": 2, "micro_batch": 4, "micro_batches": 2, "zero": 3}, "data", 4 * (6 * BLOCK_S + 53 * HOOK_S)),
        ({"pp": 2, "micro_batch": 4, "micro_batches": 4}, "pipeline", 8 * (MEETING_S - 2 * ALPHA_S)),
        (
            {"micro_batch": 4, "micro_batches": 4, "checkpointing": "full"},
            "recompute",
            4 * 0.5 * (6 * BLOCK_S + 53 * HOOK_S),
        ),
        # 20 messages of the decoder's four blocks, embedding and head, counted by the probe's own predictor.
        (
            {"tp": 2, "micro_batch": 8, "engine": "torch"},
            "tensor",
            20 * (MEETING_S - 2 * ALPHA_S + DISPATCH_S - 2 * ALPHA_S),
        ),
    ],
)
def test_an_engines_own_code_is_added_as_it_was_measured(
    machine: Measured, fields: dict[str, Any], part: str, extra_s: float
) -> None:
    rich = machine.model_copy(update={"setups": (engines_setup(1), engines_setup(2), setup_of(4, slower=2.0))})
    config = RunConfig.of(model="gpt_tiny", **fields)
    bare, whole = local_parts(machine, config), local_parts(rich, config)
    assert float(getattr(whole, part)[0] - getattr(bare, part)[0]) == pytest.approx(extra_s)
    assert local_step_s(rich, config) - local_step_s(machine, config) == pytest.approx(extra_s)


def test_local_parts_lets_stages_that_wait_leave_their_core_to_others(machine: Measured) -> None:
    """Four ranks of which 4·2/(2 + 1) compute at a time, between two ranks at full and four at half speed."""
    wide = RunConfig.of(model="gpt_tiny", dp=2, pp=2, micro_batch=2, micro_batches=2)
    alone = RunConfig.of(model="gpt_tiny", pp=2, micro_batch=2, micro_batches=2)
    assert float(local_parts(machine, wide).forward[0]) == pytest.approx(
        (4 / 3) * float(local_parts(machine, alone).forward[0])
    )


@pytest.mark.parametrize("ratio", [0.8, 1.25, 1.5])
def test_what_a_chain_takes_beyond_its_parts_is_taken_by_all_that_computes(machine: Measured, ratio: float) -> None:
    parts, whole = PARTS_LENGTHS._replace(seconds=0.1), CHAIN_LENGTHS._replace(seconds=0.1 * ratio)
    assert chained([parts]) is chained([whole]) is None
    assert chained([parts, whole]) == pytest.approx(ratio)
    own = setup_of(2)
    config = RunConfig.of(model="gpt_tiny", dp=2, micro_batch=8)
    bare, longer = (
        local_parts(machine.model_copy(update={"setups": (setup_of(1), setup)}), config)
        for setup in (own, Setup(ranks=2, timings=(*own.timings, parts, whole), points=own.points))
    )
    for name in ("forward", "backward"):
        assert float(getattr(longer, name)[0]) == pytest.approx(ratio * float(getattr(bare, name)[0]))
    assert float(longer.data[0]) == pytest.approx(float(bare.data[0]))


def test_local_parts_let_ranks_come_apart_under_ddp_and_meet_under_fsdp2(
    machine: Measured,
) -> None:
    """A meeting takes 3 ms after 16 ms of work, and 0.08 and 0.12 s more per second of 16 and 64 times that."""
    short_s, growth = 3e-3, 0.1
    met, apart = Timed("meeting", (), short_s, "meeting"), list[Timed]()
    for products, slope in zip(LONG_PRODUCTS, (0.08, 0.12), strict=True):
        longer_s = short_s + slope * 4e-3 * (products - MEETING_PRODUCTS)
        apart.append(Timed("straggler", (4000 * products,), longer_s, "meeting after longer work"))
    own = setup_of(2)
    bare, rich = (
        machine.model_copy(
            update={"setups": (setup_of(1), Setup(ranks=2, timings=(*own.timings, *more), points=own.points))}
        )
        for more in ((met,), (met, *apart))
    )
    assert site(bare, 2).straggling == 0
    assert site(rich, 2).straggling == pytest.approx(growth)
    for fields, waits in (({}, 1), ({"zero": 1, "engine": "by_hand"}, 1), ({"zero": 2}, 0)):
        config = RunConfig.of(model="gpt_tiny", dp=2, micro_batch=8, **fields)
        before, after = local_parts(bare, config), local_parts(rich, config)
        computed_s = float(before.forward[0] + before.backward[0])
        assert float(after.data[0] - before.data[0]) == pytest.approx(waits * growth * computed_s)


def test_where_as_many_compute_as_were_measured_they_are_as_fast(machine: Measured) -> None:
    """One micro-batch through two stages: of four ranks two compute at a time, at full speed."""
    wide = RunConfig.of(model="gpt_tiny", dp=2, pp=2, micro_batch=2)
    alone = RunConfig.of(model="gpt_tiny", pp=2, micro_batch=2)
    assert float(local_parts(machine, wide).forward[0]) == pytest.approx(float(local_parts(machine, alone).forward[0]))


def test_residual_of_a_product_has_what_was_taken_off_the_measurement() -> None:
    """300 ms of 1 s; and where less than a tenth of a measurement is left, the launch alone."""
    product = Product(512, 512, 512)
    computed_s = product_s(product, CHIP, TRUE, "fp32")
    timing = Timed("product", (512, 512, 512), 1.0, "large product")
    for fair_s, overhead_s in ((0.7, 0.3), (0.05, 0.01)):
        residual = measured_machine._of_product(timing, (product, fair_s), CHIP, TRUE, 0.01)
        assert residual.fitted_s == pytest.approx(computed_s + overhead_s)


def test_measure_engines_keeps_long_work_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_ranks", lambda: 3)
    monkeypatch.setattr(measuring, "_pairs", lambda: ())
    monkeypatch.setattr(measuring, "_by_turns", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(measuring, "_meeting", lambda often, group=None, products=4: (products / 1000, 0.002))
    timings = measuring.measure_engines(windows=1, window_s=0.01)
    stragglers = [(timing.size, timing.seconds) for timing in timings if timing.what == "straggler"]
    assert stragglers == [((64_000,), 0.002), ((256_000,), 0.002)]
