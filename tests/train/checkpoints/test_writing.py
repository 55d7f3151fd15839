"""At whatever moment a writer dies, what is read is a committed state and never a wrong number."""

import ast
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dlojz
from dlojz.base import fault_injection as faults
from dlojz.base.errors import LabError
from dlojz.base.fault_injection import POINTS, VARIABLE, faultpoint
from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog, RunRecord, read_events, read_record, write_record
from dlojz.running.folder import read_owner
from dlojz.running.state import read_state
from dlojz.running.store import claim, run_ids
from dlojz.train.checkpoint_files import CheckpointPolicy, listing, newest, read_policy
from dlojz.train.checkpoint_tensors import CheckpointTensors, CheckpointWriter, already_there, keep_newest, sweep

Write = Callable[..., Path]
ALL = [f"{point}:{action}" for point in POINTS for action in ("kill", "enospc", "sleep")]


def values(run: Path) -> float | None:
    """The number that all tensors of the newest checkpoint hold, which is its step; None where there is none."""
    found = newest(run)
    if found.folder is None or found.manifest is None:
        return None
    with CheckpointTensors(found.folder, found.manifest) as source:
        numbers = torch.cat([source.tensor(name).flatten() for name in found.manifest.tensors]).unique().tolist()
    assert numbers == [float(found.manifest.step)], "a state of two steps"
    return float(numbers[0])


def test_every_place_that_writes_has_its_fault_point_and_the_registry_knows_it() -> None:
    called = [
        ast.literal_eval(node.args[0])
        for path in Path(dlojz.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "faultpoint"
    ]
    assert sorted(called) == sorted(POINTS)


def test_faultpoint_refuses_a_fault_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, words in (
        ("checkpoint.writ:2:kill", "did you mean 'checkpoint.write:2'"),
        ("record.write:1:melt", "kill"),
    ):
        monkeypatch.setenv(VARIABLE, wanted)
        with pytest.raises(LabError, match=words):
            faultpoint("record.write:1")
    monkeypatch.delenv(VARIABLE)
    faultpoint("record.write:1")


def in_a_fork(act: Callable[[], None], fault: str) -> int:
    """The exit status of a copy of this process that does something at which it fails; one that sleeps is killed."""
    asleep, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        faults.time.sleep = lambda seconds: (os.close(tell), signal.pause())
        try:
            os.environ[VARIABLE] = fault
            act()
            code = 0
        except OSError as error:
            code = 2 if error.errno == errno.ENOSPC else 1
        except LabError as error:
            code = 2 if "No space left" in str(error) else 1
        finally:
            os._exit(code)
    os.close(tell)
    os.read(asleep, 1)  # until it sleeps, or is gone
    os.close(asleep)
    if fault.endswith(":sleep"):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("fault", ALL)
def test_whatever_happens_while_writing_what_is_read_is_a_committed_state(
    fault: str, write: Write, tmp_path: Path, config: RunConfig
) -> None:
    """A run with a record, events and two checkpoints goes on and writes all of these again, until it dies."""
    root = tmp_path / "runs"
    run, _ = claim(config, root)
    record = RunRecord(run_id=run.name, config=config, status="timeout", losses=(3.0, 2.0))
    write_record(run / "record.json", record)
    log = EventLog(run / "events" / "rank-0.jsonl")
    for step, loss in enumerate(record.losses):
        log.write("step", step=step, loss=loss, step_s=0.1)
    log.close()
    for step in (1, 2):
        write(step)
    (tmp_path / "checkpoints").rename(run / "checkpoints")
    reopened = RunConfig.of(model="llama_tiny", seed=9)

    def go_on() -> None:
        claim(config, root, policy=CheckpointPolicy(every_steps=1))  # opened again
        claim(reopened, root)  # and another one, new
        events = EventLog(run / "events" / "rank-0.jsonl")
        events.write("step", step=2, loss=1.0, step_s=0.1)
        writer = CheckpointWriter(run / "checkpoints", config, 3, file_bytes=100)
        for number in range(3):
            writer.add(f"weights/{number}", torch.full((5, 4), 3.0))
        writer.commit()
        keep_newest(run / "checkpoints", 2, 3)
        write_record(run / "record.json", record.model_copy(update={"losses": (3.0, 2.0, 1.0), "status": "completed"}))

    point, _, action = fault.rpartition(":")
    status = in_a_fork(go_on, fault)
    assert os.waitstatus_to_exitcode(status) == {"kill": -9, "sleep": -9, "enospc": 2}[action], "the point was met"
    for name in run_ids(root):  # each can be read, whatever state it is in
        state, told = read_state(root / name)
        assert state in ("queued", "running", "failed", "timeout", "completed")
        if name == run.name and told is not None:
            assert told.losses in ((3.0, 2.0), (3.0, 2.0, 1.0))
    assert read_owner(run) is not None
    losses = [event["loss"] for event in read_events(run / "events" / "rank-0.jsonl")]
    assert losses in ([3.0, 2.0], [3.0, 2.0, 1.0])
    committed = POINTS.index(point) >= POINTS.index("checkpoint.commit:2") and point.startswith("checkpoint")
    assert values(run) == (3.0 if committed else 2.0) or point.startswith("record")
    # And then it goes on as if nothing had been: the same step is written, nothing is left lying about.
    folder, again = claim(config, root)
    assert folder == run
    writer = CheckpointWriter(run / "checkpoints", config, 4)
    writer.add("weights/0", torch.full((5, 4), 4.0))
    writer.commit()
    keep_newest(run / "checkpoints", 2, 4)
    assert values(run) == 4.0
    assert len(list((run / "checkpoints").iterdir())) == 2 == len(listing(run))
    del again


def test_a_step_that_was_renamed_and_never_committed_is_written_again(write: Write, tmp_path: Path) -> None:
    (write(3) / "COMMIT").unlink()
    (tmp_path / "checkpoints" / "step-000003" / "tensors-0000.safetensors").write_bytes(b"half")
    assert not already_there(tmp_path / "checkpoints", 3)
    write(3)
    assert values(tmp_path) == 3.0
    assert already_there(tmp_path / "checkpoints", 3)


def test_the_newest_are_kept_and_a_damaged_later_one_counts_for_none(write: Write, tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        write(step)
    (tmp_path / "checkpoints" / "step-000009" / "manifest.json").write_bytes(b"{}")
    write(4)
    keep_newest(tmp_path / "checkpoints", 1, 4)
    assert values(tmp_path) == 4.0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000009"]


def test_sweep_leaves_alone_what_others_write_now(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    own = tmp_path / "checkpoints" / f"step-000002.tmp-{os.uname().nodename}-{os.getpid()}-{'0' * 32}"
    other = tmp_path / "checkpoints" / f"step-000002.tmp-another-1-{'1' * 32}"
    mine = tmp_path / "checkpoints" / "notes.tmp"
    for folder in (own, other, mine):
        folder.mkdir()
    sweep(tmp_path / "checkpoints")
    assert own.is_dir() and other.is_dir()
    os.utime(other, (0, 0))
    sweep(tmp_path / "checkpoints")
    assert own.is_dir() and mine.is_dir() and not other.exists()


def test_checkpoint_writer_begins_nothing_without_room(tmp_path: Path, config: RunConfig) -> None:
    with pytest.raises(LabError, match=r"a checkpoint takes .* delete runs that are no longer needed"):
        CheckpointWriter(tmp_path / "checkpoints", config, 1, needed_bytes=10**18)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_policy_is_kept_with_the_run(tmp_path: Path) -> None:
    assert read_policy(tmp_path) == CheckpointPolicy()
    CheckpointPolicy(every_steps=10, keep=1).write(tmp_path)
    policy = read_policy(tmp_path)
    assert [policy.due(step) for step in (1, 10, 15, 20)] == [False, True, False, True]
    assert not CheckpointPolicy().due(10)
    (tmp_path / "checkpoint_policy.json").write_text('{"every_steps": 0}')
    with pytest.raises(LabError, match="every_steps must be at least 1"):
        read_policy(tmp_path)


def test_a_record_is_read_back_after_it_was_set_aside(tmp_path: Path, config: RunConfig, write: Write) -> None:
    run, _ = claim(config, tmp_path / "runs")
    write_record(run / "record.json", RunRecord(run_id=run.name, config=config, status="timeout", losses=(3.0,)))
    write(1)
    (tmp_path / "checkpoints").rename(run / "checkpoints")
    assert claim(config, tmp_path / "runs") == (run, True)
    assert read_record(run / "attempts" / "1" / "record.json").losses == (3.0,)
