"""Layouts run side by side on this machine, so that a planner's choice can be held against its neighbours.

Layer 5. Invariant: all layouts live on the same forked ranks and take turns, in alternating order, so that whatever
else the machine does falls on all alike; a step is over when its slowest rank is; the ranks are gone when it ends.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from dlojz.config import RunConfig
from dlojz.launch.calibrating import measure_machine
from dlojz.predict.time.measured import Measured, default_path, read_measured, write_measured
from dlojz.runs.progress import wanted
from dlojz.schema import LabError
from dlojz.text import say

WARM: Final = 2
"""Steps of each layout that are not counted."""
WALL_S: Final = 600.0
LIMIT_S: Final = 300.0
MOST_ROUNDS: Final = 1000


def calibrated(
    ranks: Sequence[int] = (1, 2), *, path: Path | None = None, quick: bool = True, fresh: bool = False
) -> Measured:
    """The user's calibration if it covers so many ranks, else one measured now and kept.

    Args:
        ranks: numbers of processes that will run.
        path: of the file; by default the user's.
        quick: measure in some ten seconds if it must be measured, instead of a minute.
        fresh: measure in any case; on a machine with other work, what was measured an hour ago says little.

    Raises:
        LabError: if a rank cannot measure, or the file cannot be written.
    """
    path = path or default_path()
    try:
        found = read_measured(path)
        if not fresh and found.gpu == "cpu" and {*ranks} <= {one.ranks for one in found.setups}:
            return found
    except LabError:  # none, an old or a damaged one: measured anew
        pass
    asked = sorted({1, *ranks})
    if wanted(None):
        print(
            say(
                en=f"Measuring this machine with {', '.join(map(str, asked))} process(es): some ten seconds each…",
                fr=f"Mesure de cette machine avec {', '.join(map(str, asked))} processus : une dizaine de secondes "
                "chacune…",
            ),
            file=sys.stderr,
        )
    found = measure_machine(asked, quick=quick, device="cpu")
    write_measured(path, found)
    return found


def measure_rounds(configs: Sequence[RunConfig], rounds: int = 8) -> list[tuple[float, ...]]:
    """Seconds of a step of each layout in every round, all layouts in turns on the same ranks.

    Args:
        configs: layouts with the same number of ranks.
        rounds: steps of each that count, 1 to 1000.

    Returns:
        For each layout its rounds; the n-th rounds of two layouts were run one after the other, so that their
        difference is a paired one.

    Raises:
        LabError: without a layout, for different numbers of ranks, or if a rank fails.
    """
    from dlojz.ranks.forks import spmd

    sizes = {one.layout.world_size for one in configs}
    if len(sizes) != 1 or not 1 <= rounds <= MOST_ROUNDS:
        raise LabError(
            say(
                en=f"layouts are compared on one number of ranks and in 1 to {MOST_ROUNDS} rounds, but {len(configs)} "
                f"layout(s) on {sorted(sizes)} ranks in {rounds} rounds were received.",
                fr=f"des configurations se comparent sur un même nombre de rangs et en 1 à {MOST_ROUNDS} tours, mais "
                f"{len(configs)} configuration(s) sur {sorted(sizes)} rangs en {rounds} tours ont été reçues.",
            )
        )
    answers = spmd(_turns(configs, rounds), sizes.pop(), wall_s=WALL_S, limit_s=LIMIT_S)
    failed = next((one for one in answers if one.error is not None), None)
    if failed is not None and failed.error is not None:
        why = failed.error.message or failed.error.name or failed.error.kind
        raise LabError(
            say(
                en=f"rank {failed.rank} could not run the layouts: {why}.",
                fr=f"le rang {failed.rank} n’a pas pu exécuter les configurations : {why}.",
            )
        )
    return [tuple(one) for one in answers[0].value]


def measure_steps(configs: Sequence[RunConfig], rounds: int = 8) -> list[float]:
    """Median seconds of a step of each layout; see `measure_rounds`.

    Raises:
        LabError: as `measure_rounds`.
    """
    return [statistics.median(one) for one in measure_rounds(configs, rounds)]


def _turns(configs: Sequence[RunConfig], rounds: int) -> Callable[[int, int], list[list[float]]]:
    """What each rank runs."""

    def run(rank: int, ranks: int) -> list[list[float]]:
        import torch
        import torch.distributed as dist

        from dlojz.train import engines, loop

        made: list[tuple[Any, Any, int]] = []
        for config in configs:
            engine = engines.build(config, loop.build_model(config), torch.device("cpu"))
            made.append((engine, loop.open_batches(config, engine.axes.dp_rank), config.layout.micro_batches))
        times_s: list[list[float]] = [[] for _ in made]
        for number in range(rounds + WARM):
            order = range(len(made))
            for place in order if number % 2 else reversed(order):
                engine, batches, micro_batches = made[place]
                if ranks > 1:
                    # Who: all ranks. What: nothing but that each is there. How much: a few bytes.
                    dist.barrier()
                start_s = time.perf_counter()
                loop.accumulate(engine, batches, micro_batches, None)
                engine.update()
                took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
                if ranks > 1:
                    # Who: all ranks. What: their seconds, of which the largest count. How much: 8 bytes.
                    dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number >= WARM:
                    times_s[place].append(float(took))
        return times_s

    return run
