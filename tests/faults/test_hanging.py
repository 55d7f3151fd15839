"""A rank that does not come to a collective is named, with the collective, by the ranks' own flight recorders."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.running.state import read_all_events


def test_a_rank_that_sleeps_is_named_with_the_collective_it_did_not_come_to(
    launch: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    ward = launch("hanging", image_size=32)
    record = ward.run.wait(240).record
    assert (record.status, len(record.losses)) == ("failed", 2)
    assert "Timed out waiting 2000ms" in record.reason
    told = read_all_events(ward.run.folder)
    reached = [[event for event in told[rank] if event["event"] == "collectives"] for rank in (0, 1)]
    assert [len(events) for events in reached] == [1, 1]
    waited, slept = (events[0]["groups"] for events in reached)
    assert waited["1"] == slept["1"], "in the lab's own control group both had come to the same"
    # One all-reduce per bucket of gradients: the first of the third step is the one after those of the second.
    number, operation, kind, shape = waited["0"][len(slept["0"])]
    assert (number, operation, kind) == (slept["0"][-1][0] + 1, "all_reduce", "Float")
    [finding] = ward.run.diagnosis().findings
    assert (finding.kind, finding.ranks) == ("collective", (1,))
    assert f"rank 1 did not call all_reduce #{number} {shape} float32, in which rank 0 waited 2.00 s" in finding.what
    eventually(lambda: not ward.processes())


HANGS = """
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def validate():
    time.sleep(1000)


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4 and dist.get_rank() == 1:
        validate()
    dist.all_reduce(loss.detach())
"""


@pytest.mark.nightly
def test_run_says_while_a_script_hangs_which_rank_is_missing_and_where(tmp_path: Path) -> None:
    """Nothing happens for 30 s, and a look takes seconds: the sentence comes by itself, and the run goes on."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    command = [sys.executable, "-m", "dlojz", "run", str(script), "--nproc", "2", "--root", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        try:
            lines = [process.stderr.readline() for _ in range(3)]
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()
    assert "Missing rank: rank 1 has not called all_reduce #" in lines[0]
    assert lines[1:] == ["  rank 0: hangs.py:24 in <module>\n", "  rank 1: hangs.py:11 in validate\n"]
