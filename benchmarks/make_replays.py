"""The records that `on="replay"` shows: runs of the labs' configurations, measured here and shipped with the package.

    python benchmarks/make_replays.py --root /tmp/replays
    python benchmarks/make_replays.py --gpu benchmarks/records/gpu-NAME    # ships what `make gpu` has run at full size

Each configuration is really run, on at most two processes, one after the other, `--tries` times, and the fastest run is
kept: the one that the machine's other work disturbed least. Runs already in the root count. What is kept of a record is
all of it but the timeline, of which the last steps stay. The machine, its versions and the time of the measurement are
in the record itself (`environment`, `started_utc`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dlojz
from dlojz.base.files import write_atomic
from dlojz.config.run_config import RunConfig
from dlojz.results.record import RunRecord, write_record
from dlojz.results.record import read_record as read_shipped

FOLDER = Path(dlojz.__file__ or "").parent / "running" / "replays"
KEPT_STEPS, KEPT_SAMPLES = 2, 60
MOST_BYTES = 350_000


def configs() -> list[RunConfig]:
    """What is run: the configurations of the labs, and the first that a student tries."""
    first: dict[str, Any] = {"model": "coatnet_tiny", "dp": 2, "micro_batch": 16, "steps": 10}
    zero: dict[str, Any] = {"model": "coatnet_tiny", "dp": 2, "micro_batch": 4, "steps": 4}
    pipeline: dict[str, Any] = {"model": "vit_tiny", "image_size": 32, "pp": 2, "engine": "by_hand", "steps": 6}
    pipeline |= {"micro_batch": 16, "micro_batches": 8}
    tensor: dict[str, Any] = {"model": "llama_tiny", "engine": "by_hand", "micro_batch": 4, "steps": 4}
    asked = [
        {"model": "coatnet_tiny", "dp": 2},
        {"model": "vit_tiny", "dp": 2},
        first,
        {**first, "zero": 2, "engine": "deepspeed"},
        {**first, "dp": 1, "micro_batches": 2, "engine": "single"},
        *({**zero, "zero": stage, "engine": "deepspeed"} for stage in range(4)),
        {**zero, "zero": 3, "engine": "torch"},
        {**pipeline, "schedule": "gpipe"},
        {**pipeline, "schedule": "1f1b"},
        {**pipeline, "pp": 1, "engine": "torch"},
        tensor,
        {**tensor, "tp": 2},
    ]
    return [RunConfig.of(**fields) for fields in asked]


def trimmed(record: RunRecord) -> RunRecord:
    """The record with the last steps of its timeline, and its memory curve thinned out."""
    last = max((span.step for span in record.spans), default=0)
    every = max(1, -(-len(record.memory_timeline) // KEPT_SAMPLES))
    return record.model_copy(
        update={
            "spans": tuple(span for span in record.spans if span.step > last - KEPT_STEPS),
            "memory_timeline": record.memory_timeline[::every],
        }
    )


def fastest(config: RunConfig, root: Path, tries: int) -> RunRecord:
    """The record of the fastest of several runs."""
    records = [run.record for run in dlojz.runs(root) if run.config == config and run.state == "completed"]
    while len(records) < tries:
        run = dlojz.run(config, root=root, again=bool(records), progress=False)
        if run.state != "completed" or run.record is None:
            raise SystemExit(f"{config.title}: {run.state}. {run.record.reason if run.record else ''}")
        records.append(run.record)
    return max((record for record in records if record), key=rate)


def rate(record: RunRecord) -> float:
    """Samples per second."""
    footprint = record.footprint()
    return (footprint.samples_per_s if footprint else None) or 0.0


def ship(record: RunRecord) -> None:
    """Write a record into the package."""
    folder = FOLDER / "gpu" if record.config.device == "cuda" else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.config.hash}.json"
    write_record(path, trimmed(record))
    write_atomic(path, json.dumps(json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False))  # on one line
    size = path.stat().st_size
    print(f"{record.config.title}: {path.name}, {size} bytes, {rate(record):.0f} samples/s", flush=True)


def recorded(folder: Path) -> list[RunRecord]:
    """The runs of one process that `make gpu` has kept in a folder; ranks that share a GPU tell no seconds."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/…` finds its own folder alone
    from benchmarks.gpu import read_record

    kept = [read_record(path) for path in sorted(folder.glob("replays-*.json"))]
    found = [RunRecord.from_dict(one.result) for one in kept if one.state == "done"]
    return [one for one in found if one.config.layout.world_size == 1]


def main(root: Path | None = None, tries: int = 3, gpu: Path | None = None) -> None:
    """Run everything and write the records; with `gpu` nothing is run, and the records of that folder are written."""
    if (root is None) == (gpu is None):
        raise SystemExit("Give either --root, the folder of the runs to make, or --gpu, a folder of `make gpu`.")
    if gpu is not None:
        for record in recorded(gpu):
            ship(record)
    else:
        for config in configs():
            ship(fastest(config, Path(root or ""), tries))
    own = {f"{config.hash}.json" for config in configs()}
    total = 0
    for path in FOLDER.rglob("*.json"):
        if path.name not in own and read_shipped(path).config.device != "cuda":
            path.unlink()
        else:
            total += path.stat().st_size
    print(f"{len(list(FOLDER.rglob('*.json')))} records, {total} bytes")
    if total > MOST_BYTES:
        raise SystemExit(f"{total} bytes are more than the {MOST_BYTES} that may be shipped: keep less of each.")


if __name__ == "__main__":
    import tyro  # gpu_units.py uses what is above, where nothing else needs tyro

    tyro.cli(main)
