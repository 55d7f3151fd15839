"""Tensor parallelism: the teaching engine's step time over torch's, as paired ratios in one run.

    python benchmarks/tensor_parallel.py --pairs 40 --out tensor_parallel.json

Two ranks (tp=2) hold the same model twice, split by `dlojz.by_hand.tensor` and by torch's `parallelize_module`. Each
pair is one step of each (forward, backward, update), in alternating order, so that the machine's noise falls on both
alike; a barrier stands before each step, and its time is that of the slower rank. Without and with sequence
parallelism, on `llama_tiny`, where what is around the products counts, and on a wider decoder, where the products do.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch.multiprocessing.spawn import spawn

from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList
from dlojz.models.llama import Llama
from dlojz.models.sizes import LLAMA_SIZES, LlamaSize
from dlojz.train.engines import base
from dlojz.train.engines.base import Engine

GOAL = 1.3
VOCABULARY = 256
ENGINES = ("by_hand", "torch")
SIZES = {
    "llama_tiny": LLAMA_SIZES["llama_tiny"],
    "wide": LlamaSize(width=768, depth=2, num_heads=12, num_kv_heads=4, mlp_width=2048),
}


def model_of(name: str, sequence_length: int) -> BlockList:
    """The same weights on every rank and for both engines."""
    torch.manual_seed(0)
    return Llama(SIZES[name], sequence_length=sequence_length, vocabulary_size=VOCABULARY)


def step_s(engine: Engine, tokens: torch.Tensor) -> float:
    """Seconds of one step."""
    dist.barrier()
    start_s = time.perf_counter()
    loss = engine.forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), is_last=True)
    engine.backward(loss, is_last=True)
    engine.update()
    took_s = time.perf_counter() - start_s
    if not torch.isfinite(loss):
        raise SystemExit("the training diverged; the comparison would mean nothing.")
    slowest = torch.tensor(took_s, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def rank_main(rank: int, ranks: int, store: str, pairs: int, batch: int, sequence_length: int, out: str) -> None:
    """What each rank runs; rank 0 keeps the times."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    tokens = torch.randint(VOCABULARY, (batch, sequence_length + 1), generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[str, list[float]]] = {}
    for name in SIZES:
        for sequence in (False, True):
            made = {}
            for which in ENGINES:
                config = RunConfig.of(
                    model="llama_tiny",
                    image_size=None,
                    sequence_length=sequence_length,
                    micro_batch=batch,
                    engine=which,
                    tp=ranks,
                    sequence_parallel=sequence,
                    optimizer="sgd",
                    learning_rate=0.01,
                    device="cpu",
                )
                made[which] = base.build(config, model_of(name, sequence_length), torch.device("cpu"))
            times: dict[str, list[float]] = {which: [] for which in ENGINES}
            for pair in range(pairs + 3):
                for which in ENGINES if pair % 2 else reversed(ENGINES):
                    took_s = step_s(made[which], tokens)
                    if pair >= 3:
                        times[which].append(took_s)
            found[f"{name}{', sequence parallel' if sequence else ''}"] = times
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main(pairs: int = 40, batch: int = 8, sequence_length: int = 64, out: Path | None = None) -> int:
    """Print the paired ratios by model; exit code 1 where a median exceeds the goal.

    Args:
        pairs: pairs of steps for each model.
        batch: samples per step.
        sequence_length: tokens per sample.
        out: JSON file for the times and ratios.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        told = str(Path(folder) / "times.json")
        given = (2, str(Path(folder) / "store"), pairs, batch, sequence_length, told)
        spawn(rank_main, args=given, nprocs=2)  # type: ignore[no-untyped-call]
        found: dict[str, dict[str, list[float]]] = json.loads(Path(told).read_text(encoding="utf-8"))
    print(f"tp=2, 2 ranks, batch {batch} × {sequence_length} tokens, fp32, {pairs} pairs; goal ≤ {GOAL}")
    print(f"{'model':30s} {'by hand ms':>11s} {'torch ms':>9s}   by hand / torch: median (quartiles)")
    results: dict[str, Any] = {}
    for name, times in found.items():
        ratios = [own / theirs for own, theirs in zip(*(times[which] for which in ENGINES), strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        own_ms, theirs_ms = (1e3 * statistics.median(times[which]) for which in ENGINES)
        print(f"{name:30s} {own_ms:11.2f} {theirs_ms:9.2f}   {median:.3f} ({low:.3f} to {high:.3f})")
        results[name] = {"by_hand_ms": own_ms, "torch_ms": theirs_ms, "ratio": median, "quartiles": [low, high]}
    if out is not None:
        out.write_text(json.dumps({"goal": GOAL, "pairs": pairs, "models": results, "times_s": found}), "utf-8")
    return 0 if all(one["ratio"] <= GOAL for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
