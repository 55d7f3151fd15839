"""What the probes cost: instrumented over bare step time, as paired ratios in one process.

    python benchmarks/probe_overhead.py --pairs 150
    python benchmarks/probe_overhead.py --script-pairs 12
    python benchmarks/probe_overhead.py --script-pairs 12 --processes 2   # its blocks sharded by FSDP2

**Engines.** Each pair is one bare and one instrumented step on the same engine, in alternating order, so that the
machine's noise falls on both alike. The steps compared are those whose time the lab reports; the traced ones at the
start of a run (memory and communication) are slower, are never reported as timings, and are shown apart.

**Scripts.** Each pair is a script of the user's that times its own steps, once started by Python and once by
`dlojz run`, in alternating order; compared are the medians of its steps after the first ones, which are traced and
predicted.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import tyro
from torch import Tensor

from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog
from dlojz.train.engines import base
from dlojz.train.loop import accumulate, agree, build_model, open_batches
from dlojz.train.probes import TRACED_STEPS, Probes

GOAL = 1.03
SCRIPT = """
import os, statistics, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True) for _ in range(4)]
model = nn.Sequential(nn.Linear(32, 128), *layers, nn.Linear(128, 32))
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 64, 32)
seconds = []
for _ in range(STEPS):
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - start)
print("median of a step:", statistics.median(seconds[UNCOUNTED:]))
"""
STEPS, UNCOUNTED = 160, 40


class Bench:
    """One engine that steps with or without its probes."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        device = torch.device("cpu")
        self.config = config
        self.probes = Probes(config, 0, device)
        self.probes.start()
        self.engine = base.build(config, build_model(config), device)
        self.batches: Iterator[tuple[Tensor, Tensor]] = open_batches(config, dp_rank=0)
        self.events = EventLog(folder / "rank-0.jsonl")
        self.step = 0
        self.probes.attach(self.engine)
        self.traced_s = [self.instrumented() for _ in range(TRACED_STEPS)][-1]
        self.probes.clock.detach(self.engine)

    def bare(self) -> float:
        """Seconds of one step without probes."""
        start_s = time.perf_counter()
        loss, _ = agree(accumulate(self.engine, self.batches, self.config.layout.micro_batches, None), False, None)
        self.engine.update()
        step_s = time.perf_counter() - start_s
        if not math.isfinite(loss):
            raise SystemExit("the training diverged; the comparison would mean nothing.")
        return step_s

    def instrumented(self) -> float:
        """Seconds of one step as the worker runs it, its event written and flushed."""
        start_s = time.perf_counter()
        self.probes.start_step(self.step)
        layout = self.config.layout
        loss, _ = agree(accumulate(self.engine, self.batches, layout.micro_batches, self.probes), False, None)
        self.engine.update()
        self.events.write("step", step=self.step, loss=loss, step_s=self.probes.end_step())
        self.step += 1
        return time.perf_counter() - start_s

    def pair(self, bare_first: bool) -> tuple[float, float]:
        """One bare and one instrumented step: (bare, instrumented) seconds."""
        if bare_first:
            bare_s = self.bare()
        self.probes.clock.attach(self.engine)
        instrumented_s = self.instrumented()
        self.probes.clock.detach(self.engine)
        return (bare_s if bare_first else self.bare()), instrumented_s


def script_step_s(command: list[str], folder: Path) -> float:
    """Seconds of the median step of the script, as it says itself."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "DLOJZ_RUNS": str(folder / "runs")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=surroundings, capture_output=True, text=True, check=True
    )
    told = next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("median of a step:"))
    return float(told.rpartition(" ")[2])


def main_of_scripts(pairs: int, processes: int) -> int:
    """Print the median paired ratio of a script's steps, watched over alone."""
    measured: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = SCRIPT.replace("UNCOUNTED", str(UNCOUNTED)).replace("STEPS", str(STEPS))
        (folder / "train.py").write_text(text, encoding="utf-8")
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        watched = ["-m", "dlojz", "run", "train.py", "--device", "cpu", "--nproc", str(processes)]
        commands = {"alone": [*(several if processes > 1 else ()), "train.py"], "watched": watched}
        for number in range(pairs):
            order = list(commands)[:: 1 if number % 2 else -1]
            step_s = {one: script_step_s(commands[one], folder) for one in order}
            measured.append((step_s["alone"], step_s["watched"]))
            print(f"pair {number + 1} of {pairs}: {measured[-1][1] / measured[-1][0]:.4f}", file=sys.stderr)
    low, median, high = statistics.quantiles((watched_s / alone_s for alone_s, watched_s in measured), n=4)
    alone_ms = 1e3 * statistics.median(alone_s for alone_s, _ in measured)
    print(f"a script of the user's, processes: {processes}, {pairs} pairs of {STEPS - UNCOUNTED} steps")
    print(f"its step                  {alone_ms:8.2f} ms (median)")
    print(f"watched / alone           {median:8.4f} (median; quartiles {low:.4f} to {high:.4f}; goal ≤ {GOAL})")
    return 0 if median <= GOAL else 1


def main(
    pairs: int = 150,
    batch: int = 16,
    threads: int = 1,
    model: str = "coatnet_tiny",
    script_pairs: int = 0,
    processes: int = 1,
) -> int:
    """Print the median paired ratio and its quartiles; exit code 1 where the median exceeds the goal.

    Args:
        pairs: pairs of steps.
        batch: samples per step.
        threads: threads torch may use.
        model: model of the catalogue.
        script_pairs: pairs of runs of a script, in place of steps of an engine; at least 2, 0: none.
        processes: of the script.
    """
    if script_pairs:
        return main_of_scripts(script_pairs, processes)
    torch.set_num_threads(threads)
    config = RunConfig.of(model=model, micro_batch=batch, steps=10**6, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, Path(folder))
        for _ in range(5):
            bench.bare()
        measured = [bench.pair(bare_first=bool(index % 2)) for index in range(pairs)]
    ratios = [instrumented_s / bare_s for bare_s, instrumented_s in measured]
    low, median, high = statistics.quantiles(ratios, n=4)
    bare_ms = 1e3 * statistics.median(bare_s for bare_s, _ in measured)
    print(f"{config.title}, batch {batch}, {threads} thread(s), {pairs} pairs")
    print(f"bare step                 {bare_ms:8.2f} ms (median)")
    print(f"instrumented / bare       {median:8.4f} (median; quartiles {low:.4f} to {high:.4f}; goal ≤ {GOAL})")
    traced = 1e3 * bench.traced_s / bare_ms
    print(f"traced step / bare        {traced:8.4f} (the first {TRACED_STEPS} steps of a run, never timed)")
    return 0 if median <= GOAL else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
