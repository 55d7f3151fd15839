"""`on="replay"`: a record of a real run that is shipped with the package, shown as a run of one's own.

Layer 5. Invariant: a replayed record is never taken for a measurement made here: it carries `replayed_from` in its
environment, its folder names another worker (so that `on="local"` does not find it again), and its times are those of
the machine that it names.
"""

from __future__ import annotations

import os
from pathlib import Path

from dlojz.config import RunConfig
from dlojz.record import RunRecord, read_record, write_record
from dlojz.runs.handle import Run
from dlojz.runs.state import RECORD
from dlojz.runs.store import claim, runs_root
from dlojz.schema import LabError
from dlojz.text import say

FOLDER = Path(__file__).resolve().parent.parent / "replays"
WORKER = "dlojz.launch.replay"
"""Named in launch.json in place of the worker: no run that is really made has this one."""
REPLAYED_FROM = "replayed_from"
"""Key of the environment of a replayed record."""
LISTED = 3


def shipped() -> dict[str, Path]:
    """The shipped records: the hash of what was run → the file."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.json"))}


def is_replayed(record: RunRecord) -> bool:
    """Whether a record was replayed, not measured where it lies."""
    return REPLAYED_FROM in record.environment


def find(config: RunConfig) -> RunRecord:
    """The shipped record of a configuration, as it was measured.

    Raises:
        LabError: if none is shipped; the nearest configurations that are, with what differs.
    """
    path = shipped().get(config.hash)
    record = read_record(path) if path else None
    if record is None or record.config != config:
        raise LabError(_none_of(config))
    return record


def run(config: RunConfig, root: str | os.PathLike[str] | None = None) -> Run:
    """A run folder with the shipped record of a configuration, marked as replayed; an earlier one is found again.

    Args:
        config: what was run.
        root: folder of the runs; by default as for any run.

    Raises:
        LabError: if no such record is shipped, or the root cannot be written.
    """
    record = find(config)
    folder, _ = claim(config, runs_root(root), worker_module=WORKER)
    # Asked of the folder, not of `claim`: a process that ended between the two has left a folder without a record.
    if not (folder / RECORD).exists():
        try:
            write_record(folder / RECORD, _marked(record, folder.name))
        except OSError as error:
            raise LabError(
                say(
                    en=f"the record cannot be replayed into {folder}: {error.strerror}.",
                    fr=f"le bilan ne peut pas être rejoué dans {folder} : {error.strerror}.",
                )
            ) from None
    return Run(folder)


def _marked(record: RunRecord, run_id: str) -> RunRecord:
    """The record under the name of its new folder, with what it is a replay of."""
    where = record.environment.get("device") or f"CPU, {record.environment.get('cores', '?')} cores"
    told = f"{record.run_id}, measured {record.started_utc[:10]} on {where}, shipped with dlojz"
    return record.model_copy(update={"run_id": run_id, "environment": {**record.environment, REPLAYED_FROM: told}})


def _flat(config: RunConfig) -> dict[str, object]:
    content = config.to_dict()
    return {**content, **content.pop("layout")}


def _none_of(config: RunConfig) -> str:
    """The sentence for a configuration without record."""
    asked = _flat(config)
    near: list[tuple[bool, int, str]] = []
    for path in shipped().values():
        try:
            its = read_record(path).config
        except LabError:
            continue
        differing = [f"{key}={value}" for key, value in _flat(its).items() if asked[key] != value]
        near.append((its.model != config.model, len(differing), f"{its.title} ({', '.join(differing)})"))
    if not near:
        return say(
            en="this installation has no record to replay: use on='local', which runs on this machine.",
            fr="cette installation ne contient aucun bilan à rejouer : prenez on='local', qui exécute sur cette "
            "machine.",
        )
    listed = "; ".join(words for _, _, words in sorted(near)[:LISTED])
    return say(
        en=f"no record of {config.title} as it was asked is shipped for replay: did you mean, with what differs, "
        f"{listed}?",
        fr=f"aucun bilan de {config.title} tel que demandé n’est livré pour être rejoué. Vouliez-vous dire (entre "
        f"parenthèses, ce qui diffère) : {listed} ?",
    )
