"""Messages of scripts: those of what wraps a model are predicted, a script's own are counted beside them."""

import textwrap
from collections.abc import Callable
from functools import cache

import pytest

import dlojz
from dlojz.compare import RunRow, TrafficPair
from dlojz.display.tables import comparison_markdown, group_label
from dlojz.results.footprint import Footprint
from dlojz.results.record import RunRecord

PARAMETERS = (64 * 256, 256, 256 * 256, 256, 256 * 10, 10)
"""Elements of each parameter of the net below."""
NET_BYTES = 4 * sum(PARAMETERS)
NET = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
def loss_of(model):
    return nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(0, 10, (16,)))
"""
STEPS = """
for step in range(6):
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
Recorded = Callable[..., RunRecord]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Run the net with these lines, once, and return the record."""

    @cache
    def run(text: str, steps: str = STEPS, processes: int = 2) -> RunRecord:
        folder = tmp_path_factory.mktemp("runs")
        path = folder / "written.py"
        path.write_text(NET + textwrap.dedent(text) + textwrap.dedent(steps), encoding="utf-8")
        made = dlojz.run(path, processes=processes, device="cpu", root=folder, progress=False)
        assert made.record is not None
        assert made.record.status == "completed", made.logs()
        return made.record

    return run


def row_of(record: RunRecord) -> RunRow:
    return dlojz.compare(record).rows[0]


def sent(pairs: tuple[TrafficPair, ...], origin: str) -> dict[str, tuple[object, ...]]:
    """Bytes and calls predicted and measured by collective."""
    return {
        pair.collective: (
            *(pair.message_bytes.predicted, pair.message_bytes.measured),
            *(pair.count.predicted, pair.count.measured),
        )
        for pair in pairs
        if pair.origin == origin
    }


IN_DDP = "model = DDP(net)\noptimizer = torch.optim.AdamW(model.parameters(), 1e-3)\n"
LOGGING = """
for step in range(6):
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    every = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(every, torch.ones(3))
    dist.reduce(shown, 0)
    dist.barrier()
"""


def test_communication_of_a_script_is_counted_beside_that_of_ddp(recorded: Recorded) -> None:
    row = row_of(recorded(IN_DDP, LOGGING))
    assert sent(row.communication, "wrapper") == {"all_reduce": (NET_BYTES, NET_BYTES, 1, 1)}
    assert sent(row.communication, "script") == {
        "all_reduce": (None, 4, None, 1),
        "all_gather": (None, 2 * 3 * 4, None, 1),
        "reduce": (None, 4, None, 1),
        "barrier": (None, 0, None, 1),
    }
    assert row.exact is True and row.unequal_ranks == ()
    assert row.communication_exposed_s is not None
    written = comparison_markdown(dlojz.compare(recorded(IN_DDP, LOGGING))).replace("\\", "")
    assert "≠" not in written and "all_gather, B | 24" in written and "NO" not in written


@pytest.mark.nightly
def test_communication_of_objects_that_a_script_gathers_is_its_own(recorded: Recorded) -> None:
    row = row_of(recorded(IN_DDP, STEPS + "    dist.all_gather_object([None, None], {'loss': loss.item()})\n"))
    assert sent(row.communication, "wrapper") == {"all_reduce": (NET_BYTES, NET_BYTES, 1, 1)}
    assert row.exact is True
    assert sent(row.communication, "script")["all_gather"][0] is None


OPTIONS = ("find_unused_parameters=True", "static_graph=True", "gradient_as_bucket_view=True")


@pytest.mark.parametrize(
    "options", [OPTIONS[0], *(pytest.param(options, marks=pytest.mark.nightly) for options in OPTIONS[1:])]
)
def test_communication_with_options_of_ddp(options: str, recorded: Recorded) -> None:
    row = row_of(recorded(IN_DDP.replace("DDP(net)", f"DDP(net, {options})")))
    # Unused parameters are looked for by one int32 for each parameter.
    bitmap_bytes, calls = (4 * len(PARAMETERS), 2) if "unused" in options else (0, 1)
    expected = NET_BYTES + bitmap_bytes
    assert sent(row.communication, "wrapper") == {"all_reduce": (expected, expected, calls, calls)}
    assert sent(row.communication, "script") == {} and row.exact is True


def test_communication_has_unused_parameters_of_ddp_which_have_no_states(recorded: Recorded) -> None:
    text = """
        class Used(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.spare = net, nn.Linear(50, 50)
            def forward(self, x):
                return self.net(x)
        model = DDP(Used(), find_unused_parameters=True, bucket_cap_mb=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    """
    record = recorded(text)
    spare_bytes = 4 * (50 * 50 + 50)
    expected = NET_BYTES + spare_bytes + 4 * 8
    row = row_of(record)
    found = sent(row.communication, "wrapper")["all_reduce"]
    assert found[:2] == (expected, expected) and found[2] == found[3]
    for footprint in footprints(record):
        assert footprint.memory.weights_bytes == NET_BYTES + spare_bytes
        assert footprint.memory.gradients_bytes == NET_BYTES
        assert footprint.memory.optimizer_bytes == 2 * NET_BYTES + 4 * len(PARAMETERS)


def footprints(record: RunRecord) -> tuple[Footprint, Footprint]:
    """The one predicted and the one measured."""
    assert record.script_prediction is not None and record.script_prediction.footprint is not None
    measured = record.footprint()
    assert measured is not None
    return record.script_prediction.footprint, measured


def test_communication_for_clipping_under_fsdp2_is_counted_by_its_name(recorded: Recorded) -> None:
    text = """
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(net)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    """
    clip = "    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
    clipped = STEPS.replace("    optimizer.step()", clip + "    optimizer.step()")
    row = row_of(recorded(text, clipped))
    assert sent(row.communication, "clipping") == {"all_reduce": (None, 4 * len(PARAMETERS), None, 1)}
    assert row.exact is True and {"all_gather", "reduce_scatter"} == {*sent(row.communication, "wrapper")}
    assert row.communication_exposed_s is not None


def test_parallelism_by_hand_is_counted_and_nothing_is_predicted(recorded: Recorded) -> None:
    text = "model, optimizer = net, torch.optim.AdamW(net.parameters(), 1e-3)"
    average = "    for one in net.parameters(): dist.all_reduce(one.grad)\n"
    by_hand = STEPS.replace("    optimizer.step()", average + "    optimizer.step()")
    record = recorded(text, by_hand)
    row = row_of(record)
    assert sent(row.communication, "script") == {"all_reduce": (None, NET_BYTES, None, len(PARAMETERS))}
    assert sent(row.communication, "wrapper") == {} and row.exact is None
    assert record.script_prediction is not None and "counted" in record.script_prediction.note
    assert row.communication_exposed_s is not None


@pytest.mark.nightly
def test_communication_of_one_process_is_nothing(recorded: Recorded) -> None:
    row = row_of(recorded(IN_DDP, STEPS, 1))
    assert row.communication == () and row.communication_exposed_s is None and row.communication_hidden_s is None


@pytest.mark.parametrize("view", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_zero_redundancy_optimizer_of_torch(view: bool, recorded: Recorded) -> None:
    text = f"""
        from torch.distributed.optim import ZeroRedundancyOptimizer
        model = DDP(net)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view={view}, lr=1e-3
        )
    """
    record = recorded(text)
    row = row_of(record)
    calls = 2 if view else len(PARAMETERS)
    assert sent(row.communication, "wrapper") == {
        "all_reduce": (NET_BYTES, NET_BYTES, 1, 1),
        "broadcast": (NET_BYTES, NET_BYTES, calls, calls),
    }
    # By size each rank gets 256 × 256, or all that is left: the largest parameter goes to rank 0, alone.
    for footprint in footprints(record):
        assert footprint.memory.optimizer_bytes == 2 * 4 * 256 * 256 + 4
        assert footprint.memory.weights_bytes == NET_BYTES
    assert record.script_prediction is not None
    assert record.script_prediction.recognised["optimizer"] == "ZeroRedundancyOptimizer (AdamW)"


@pytest.mark.nightly
def test_communication_in_a_hooks_callbacks_is_counted(recorded: Recorded) -> None:
    """PowerSGD sends what it does not compress, then two factors of each matrix, in callbacks of other threads."""
    text = (
        IN_DDP
        + """
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
"""
    )
    record = recorded(text)
    biases = 256 + 256 + 10
    rows_and_columns = [(256, 64), (256, 256), (10, 256)]
    expected = 4 * (biases + sum(rows + columns for rows, columns in rows_and_columns))
    assert expected == 6480
    assert sent(row_of(record).communication, "wrapper") == {"all_reduce": (None, expected, None, 3)}
    prediction, measured = record.script_prediction, record.footprints[0]
    assert prediction is not None and prediction.footprint is not None
    for memory in (prediction.footprint.memory, measured.memory):  # the callbacks take memory that nobody sees
        assert memory.peak_bytes is memory.workspace_bytes is memory.at_peak_bytes is None
    assert prediction.footprint.step_flops is measured.step_flops is None  # nor what they compute
    assert any("other threads compute too" in note for note in record.notes)


@pytest.mark.nightly
def test_gradients_of_any_type_in_ddp(recorded: Recorded) -> None:
    text = """
        net.to(torch.bfloat16)
        net[0].to(torch.float64)
        class Cast(nn.ReLU):
            def forward(self, x):
                return torch.relu(x).bfloat16()
        net[1] = Cast()
        model = DDP(net)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    """
    steps = STEPS.replace("loss_of(model)", "model(torch.randn(16, 64).double()).square().mean()")
    record = recorded(text, steps)
    expected = 8 * sum(PARAMETERS[:2]) + 2 * sum(PARAMETERS[2:])
    assert sent(row_of(record).communication, "wrapper") == {"all_reduce": (expected, expected, 2, 2)}
    for footprint in footprints(record):
        assert footprint.memory.weights_bytes == footprint.memory.gradients_bytes == expected
        assert footprint.memory.optimizer_bytes == 2 * expected + 4 * len(PARAMETERS)


@pytest.mark.nightly
def test_a_group_without_a_name_is_called_by_its_size(recorded: Recorded) -> None:
    text = """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    """
    row = row_of(recorded(text, STEPS + "    shown = loss.detach().clone()\n    dist.all_reduce(shown)\n"))
    expected = 4 * 16 * 256  # what the second layer returns, summed over both ranks
    assert sent(row.communication, "wrapper") == {"all_reduce": (expected, expected, 1, 1)}
    assert sent(row.communication, "script") == {"all_reduce": (None, 4, None, 1)}
    assert {group_label(pair) for pair in row.communication} == {"group of 2 ranks"}
