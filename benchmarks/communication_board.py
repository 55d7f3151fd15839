"""All ways to send less, on one board: bytes per step predicted and counted, step time, and the loss they keep.

    python benchmarks/communication_board.py --steps 120 --seeds 3 --out board

Two ranks train a byte-level decoder in every way of `dlojz.prediction.link_traffic`, in lockstep: in each round every
way takes one step, in an order that rotates, behind a barrier, so that the machine's noise falls on all alike; all
begin with the same weights and read the same samples. The first seed's pass counts what is handed to c10d, and is not
timed, as counting takes time; those of all other seeds are timed. The time of a step is the median of its kind (in
full, steady, nothing sent), weighted by how often the kind comes. Writes `board.json`, `board.en.png` and
`board.fr.png`, and prints a table.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import tyro

from dlojz.base.language import format_bytes, use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.communication_figures import communication_figure
from dlojz.prediction.link_traffic import Reduction, gaps_percent, predicted_way, traffic_of_step, ways

RANKS = 2
LAST_SHARE = 10
"""One step in so many, at the end, is judged."""
WALL_S = 7200.0


def progress(done: int, total: int, what: str) -> None:
    """A line on the terminal that fills up."""
    filled = round(30 * done / total)
    end = "\n" if done == total else ""
    line = f"\r{what:<22} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}{end}"
    os.write(2, line.encode())  # what a forked rank prints is kept from the terminal


def in_lockstep(configs: dict[str, RunConfig], *, count: bool, what: str) -> Any:
    """What each rank runs; returns per way its losses, seconds and bytes of every step."""

    def run(rank: int, ranks: int) -> dict[str, dict[str, list[float]]]:
        import torch
        import torch.distributed as dist

        from dlojz.train import loop
        from dlojz.train.dispatch_trace import StorageTrace, traffic_of
        from dlojz.train.engines import base

        class Counter(StorageTrace):  # type: ignore[no-untyped-call]
            """Collectives alone; storages are not followed."""

            def see(self, tensor: torch.Tensor) -> int | None:
                return None

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        built = {
            name: base.build(config, loop.build_model(config), torch.device("cpu")) for name, config in configs.items()
        }
        batches = {name: loop.open_batches(config, rank) for name, config in configs.items()}
        found: dict[str, dict[str, list[float]]] = {
            name: {"losses": [], "step_s": [], "sent_bytes": []} for name in configs
        }
        names, steps = list(configs), next(iter(configs.values())).steps
        for step in range(steps):
            for name in names[step % len(names) :] + names[: step % len(names)]:
                engine = built[name]
                dist.barrier()
                if count:
                    with Counter({}) as counter:
                        counter.step = step
                        loss = loop.accumulate(engine, batches[name], configs[name].layout.micro_batches, None)
                        engine.update()
                    sent = traffic_of(counter.trace.calls, step)
                    found[name]["sent_bytes"].append(sum(one.sent_bytes for one in sent))
                else:
                    start_s = time.perf_counter()
                    loss = loop.accumulate(engine, batches[name], configs[name].layout.micro_batches, None)
                    engine.update()
                    found[name]["step_s"].append(time.perf_counter() - start_s)
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                found[name]["losses"].append(float(mean) / ranks)
            if rank == 0:
                progress(step + 1, steps, what)
        return found

    return run


def trained(configs: dict[str, RunConfig], *, count: bool, what: str) -> dict[str, dict[str, list[float]]]:
    """One pass over all ways, on forked ranks; what rank 0 has seen."""
    from dlojz.processes.forks import spmd

    answers = spmd(in_lockstep(configs, count=count, what=what), RANKS, wall_s=WALL_S, limit_s=600.0)
    for answer in answers:
        if answer.error is not None:
            raise SystemExit(f"rank {answer.rank} failed: {answer.error.name}: {answer.error.message}")
    found: dict[str, dict[str, list[float]]] = answers[0].value
    return found


def step_s(config: RunConfig, passes: list[list[float]]) -> float:
    """Mean of a run's steps, each the median of its kind: of those that hand as much to the collectives."""
    kinds = [sum(one.message_bytes for one in traffic_of_step(config, step)) for step in range(config.steps)]
    times: dict[int, list[float]] = defaultdict(list)
    for seconds in passes:
        for kind, taken_s in zip(kinds, seconds, strict=True):
            times[kind].append(taken_s)
    return sum(statistics.median(times[kind]) for kind in kinds) / len(kinds)


def final_loss(losses: list[float]) -> float:
    """Mean of the last tenth."""
    return statistics.fmean(losses[-max(1, len(losses) // LAST_SHARE) :])


def table(board: list[Reduction]) -> str:
    """The board as text; time and loss also against what sends everything, the loss seed by seed."""
    lines = [
        f"{'way':<20} {'predicted':>11} {'counted':>11} {'later':>11} {'step':>9} {'ratio':>6} {'loss':>7} {'gap':>7}"
    ]
    named = {way.name: way for way in board}
    for way in board:
        reference = named[way.against]
        loss, gap = statistics.median(way.losses), statistics.median(gaps_percent(way, reference))
        lines.append(
            f"{way.name:<20} {format_bytes(way.sent_bytes):>11} {format_bytes(way.counted_bytes):>11} "
            f"{format_bytes(way.steady_bytes):>11} {1e3 * (way.step_s or 0):>6.1f} ms "
            f"{(way.step_s or 0) / (reference.step_s or math.nan):>6.2f} {loss:>7.4f} "
            f"{gap:>+6.2f}%"
        )
    return "\n".join(lines)


def agreement(configs: dict[str, RunConfig], counted: dict[str, list[float]]) -> str:
    """In how many steps what was counted is what was predicted, and where not."""
    lines, equal, total = [], 0, 0
    for name, config in configs.items():
        predicted = [sum(one.sent_bytes for one in traffic_of_step(config, step)) for step in range(config.steps)]
        apart = [step for step, pair in enumerate(zip(predicted, counted[name], strict=True)) if pair[0] != pair[1]]
        equal, total = equal + config.steps - len(apart), total + config.steps
        if apart:
            more = sum(counted[name][step] - predicted[step] for step in apart)
            lines.append(f"  {name}: {more:+.0f} bytes in steps {apart}")
    return "\n".join([f"bytes predicted = bytes counted in {equal} of {total} steps", *lines])


def main(
    steps: int = 120,
    seeds: int = 3,
    model: str = "gpt_tiny",
    sequence_length: int = 64,
    micro_batch: int = 4,
    out: Path = Path("communication_board"),
    redraw: bool = False,
) -> None:
    """Train, count, time, draw.

    Args:
        steps: of each training.
        seeds: trainings of each way, at least 2; the loss shown is the median.
        model: of the catalogue, on text.
        sequence_length: bytes of each sample.
        micro_batch: samples per rank and step.
        out: name of the files, without ending.
        redraw: train nothing, draw what `out` holds already.
    """
    if redraw:
        kept = json.loads(out.with_suffix(".json").read_text())["ways"]
        board = [Reduction(**{**one, "losses": tuple(one["losses"])}) for one in kept]
        print(table(board))
        draw(board, out)
        return
    fields: dict[str, Any] = {"model": model, "sequence_length": sequence_length, "micro_batch": micro_batch}
    fields |= {"dp": RANKS, "device": "cpu"}
    passes = [
        trained(ways(steps, **fields, seed=seed), count=seed == 0, what=f"seed {seed + 1} of {seeds}")
        for seed in range(seeds)
    ]
    counted = {name: passes[0][name]["sent_bytes"] for name in passes[0]}
    board = [
        dataclasses.replace(
            predicted_way(name, config),
            counted_bytes=statistics.fmean(counted[name]),
            step_s=step_s(config, [one[name]["step_s"] for one in passes[1:]]),
            losses=tuple(final_loss(one[name]["losses"]) for one in passes),
        )
        for name, config in ways(steps, **fields).items()
    ]
    print(table(board))
    print(agreement(ways(steps, **fields), counted))
    document = {"steps": steps, "seeds": seeds, **fields, "ways": [dataclasses.asdict(way) for way in board]}
    document["losses"] = [{name: one[name]["losses"] for name in one} for one in passes]
    out.with_suffix(".json").write_text(json.dumps(document, indent=1))
    draw(board, out)


def draw(board: list[Reduction], out: Path) -> None:
    """The figure in both languages."""
    for language in ("en", "fr"):
        use_language(language)
        communication_figure(board, out.with_suffix(f".{language}.png"))


if __name__ == "__main__":
    tyro.cli(main)
