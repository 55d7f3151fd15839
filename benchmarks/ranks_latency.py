"""How long ranks take to start, and a cell with an all-reduce from the notebook to its answers.

    python benchmarks/ranks_latency.py --ranks 4 --cells 30

The all-reduce alone is timed on the ranks, so that what remains is the part of the machinery between them and the
notebook.
"""

from __future__ import annotations

import statistics
import sys
import time

import tyro

from dlojz.ranks import Ranks

START_GOAL_S = 15.0
CELL_GOAL_S = 0.2

CELL = """
import time
x = torch.ones(1024)
started_s = time.perf_counter()
dist.all_reduce(x)
all_reduce_s = time.perf_counter() - started_s
print(float(x[0]))
"""


def main(ranks: int = 4, cells: int = 30) -> int:
    """Print the start and the medians; exit code 1 where a goal is missed.

    Args:
        ranks: number of ranks.
        cells: cells to time, after two that are not.
    """
    started_s = time.perf_counter()
    with Ranks(ranks) as live:
        start_s = time.perf_counter() - started_s
        for _ in range(2):
            live.execute(CELL)
        cell_s, empty_s, all_reduce_s = [], [], []
        for _ in range(cells):
            begun_s = time.perf_counter()
            answers = live.execute(CELL)
            cell_s.append(time.perf_counter() - begun_s)
            if any(answer.trouble for answer in answers):
                raise SystemExit("a cell failed; the times would mean nothing.")
            # Ranks enter at different moments: the last one to enter waits for nobody.
            all_reduce_s.append(min(live["all_reduce_s"]))
            begun_s = time.perf_counter()
            live.execute("")
            empty_s.append(time.perf_counter() - begun_s)
        memory_bytes = [row["memory_bytes"] for row in live.status().rows]
    cell_median_s = statistics.median(cell_s)
    quartiles = statistics.quantiles(cell_s, n=4)
    print(f"{ranks} ranks, {cells} cells")
    print(f"start                     {start_s:8.2f} s  (goal ≤ {START_GOAL_S:g} s)")
    print(
        f"cell with an all-reduce   {1e3 * cell_median_s:8.2f} ms (median; quartiles {1e3 * quartiles[0]:.1f} to "
        f"{1e3 * quartiles[2]:.1f}; goal ≤ {1e3 * CELL_GOAL_S:g} ms)"
    )
    print(f"empty cell                {1e3 * statistics.median(empty_s):8.2f} ms (median)")
    print(
        f"all-reduce alone          {1e3 * statistics.median(all_reduce_s):8.2f} ms (median, on the last rank to enter)"
    )
    print(f"own memory of a rank      {statistics.median(memory_bytes) / 2**20:8.1f} MiB (median)")
    return 0 if start_s <= START_GOAL_S and cell_median_s <= CELL_GOAL_S else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
