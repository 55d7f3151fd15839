"""Checkpoints of three formats side by side: which rank writes which file, with how many bytes, and what was predicted.

Layer 6 (labs). Invariant: files are listed, measured, copied and altered as bytes; none is loaded.

With Ψ parameters in fp32, Adam and N data-parallel ranks, and B bytes of BatchNorm statistics per replica:

    format              rank 0 writes                               each other rank writes
    DeepSpeed, ZeRO-2   4Ψ weights, B; 12Ψ/N master and moments     12Ψ/N master and moments
    DCP, FSDP2          its rows of 12Ψ weights and moments, B/N    the same
    dlojz               12Ψ weights and moments, N·B                nothing

Source: DeepSpeed 0.19, `runtime/engine.py` (`save_checkpoint`, `_get_zero_ckpt_name`); torch 2.13,
`distributed/checkpoint/filesystem.py` (`__RANK_N.distcp`), `distributed/checkpoint/_dedup_save_plans.py`, which gives
what all ranks hold to the one that has least to write.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import wrap
from typing import Literal

from dlojz.config import RunConfig
from dlojz.footprint import Category
from dlojz.labs.foreign_formats_pickle import calls, entries, imported, numbers_after, read, refused_by_weights_only
from dlojz.predict.checkpoint_bytes import checkpoint_bytes
from dlojz.predict.shapes import model_shapes
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes

Format = Literal["deepspeed", "dcp", "dlojz"]
FORMATS: dict[Format, str] = {"deepspeed": "DeepSpeed, ZeRO-2", "dcp": "DCP, FSDP2", "dlojz": "dlojz"}
_WRITER = re.compile(r"(?:__(\d+)_\d+\.distcp|.*zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt)")
_PICKLED = (".pt", ".distcp", ".metadata")
_SHARE = "optim_states.pt"
WIDTH = 110


@dataclass(frozen=True)
class FormatFile:
    """One file of a checkpoint."""

    format: Format
    path: Path
    name: str
    """Within the folder of the checkpoint."""
    rank: int
    """That has written it."""
    bytes: int

    @property
    def pickled(self) -> bool:
        """Whether it holds pickles, by its name."""
        return self.path.name.endswith(_PICKLED)


def files(folders: Mapping[Format, Path]) -> list[FormatFile]:
    """The files of some checkpoints, the largest of each rank first.

    Args:
        folders: of each format.

    Raises:
        LabError: if a folder is not there.
    """
    found: list[FormatFile] = []
    for kind, folder in folders.items():
        if not folder.is_dir():
            raise LabError(
                say(
                    en=f"there is no checkpoint {FORMATS[kind]} in {folder}: run the cell that writes it first.",
                    fr=f"il n’y a pas de checkpoint {FORMATS[kind]} dans {folder} : exécutez d’abord la cellule qui "
                    "l’écrit.",
                )
            )
        own = [
            FormatFile(kind, path, path.relative_to(folder).as_posix(), _rank(path), path.stat().st_size)
            for path in folder.rglob("*")
            if path.is_file()
        ]
        found += sorted(own, key=lambda file: (file.rank, -file.bytes, file.name))
    return found


def _rank(path: Path) -> int:
    """The rank that has written a file: the one in its name, else rank 0, which writes what there is once."""
    named = _WRITER.fullmatch(path.name)
    return int(named[1] or named[2]) if named else 0


def predicted_bytes(config: RunConfig, kind: Format, rank: int) -> dict[Category, float]:
    """Bytes of tensors that a rank writes, by category; see the table above.

    Args:
        config: the run: a model in fp32 with Adam, data-parallel.
        kind: the format.
        rank: 0 to dp − 1.
    """
    shapes, ranks = model_shapes(config), config.layout.dp
    replica_bytes = 4 * shapes.float_buffer_elements + shapes.integer_buffer_bytes
    parameters = shapes.num_parameters
    if kind == "deepspeed":
        found: dict[Category, float] = {"master": 4 * parameters / ranks, "optimizer": 8 * parameters / ranks}
        return {"weights": 4 * parameters, "buffers": replica_bytes, **found} if rank == 0 else found
    if kind == "dcp":
        rows = sum(parameter.rows_numel(ranks, rank) for parameter in shapes.parameters)
        return {"weights": 4 * rows, "optimizer": 8 * rows, "buffers": replica_bytes / ranks}
    if rank > 0:
        return {}
    beside = checkpoint_bytes(config) - 12 * parameters
    return {"weights": 4 * parameters, "optimizer": 8 * parameters, "buffers": beside}


class FileTable:
    """The files of some checkpoints: who has written each, and its bytes; each rank's sum beside what was predicted.

    Args:
        folders: of each format.
        config: the run that they are of.
    """

    def __init__(self, folders: Mapping[Format, Path], config: RunConfig) -> None:
        self.config, self.files = config, files(folders)
        self.formats = list(folders)

    def written_bytes(self, kind: Format, rank: int) -> int:
        """What a rank has written in a format."""
        return sum(file.bytes for file in self.files if (file.format, file.rank) == (kind, rank))

    def predicted_bytes(self, kind: Format, rank: int) -> float:
        """What a rank was to write, of tensors alone."""
        return sum(predicted_bytes(self.config, kind, rank).values())

    def __repr__(self) -> str:
        width = max(len(file.name) for file in self.files) + 2
        named, predicted = say(en="rank", fr="rang"), say(en="predicted", fr="prédit")
        lines: list[str] = []
        for kind in self.formats:
            lines.append(FORMATS[kind])
            for rank in range(self.config.layout.dp):
                total, expected = self.written_bytes(kind, rank), self.predicted_bytes(kind, rank)
                sums = f"{format_bytes(total):>10}   ({predicted} {format_bytes(expected)})"
                lines.append(f"  {f'{named} {rank}':<{width + 4}}{sums}")
                own = [file for file in self.files if (file.format, file.rank) == (kind, rank)]
                lines += [f"    {file.name:<{width + 2}}{format_bytes(file.bytes):>10}" for file in own]
        return "\n".join(lines)


class PickleTable:
    """The pickles of some checkpoints: how many calls loading them would make, and what it would import.

    Args:
        folders: of each format.
    """

    def __init__(self, folders: Mapping[Format, Path]) -> None:
        self.rows = [
            (file, calls(content), imported(content), refused_by_weights_only(file.path))
            for file in files(folders)
            if file.pickled
            for content in (read(file.path),)
        ]
        self.formats = list(folders)

    def __repr__(self) -> str:
        lines: list[str] = []
        for kind in self.formats:
            rows = [row for row in self.rows if row[0].format == kind]
            lines.append(FORMATS[kind])
            for file, called, _, refused in rows:
                count = say(en=f"{called:,} calls", fr=f"{_grouped(called)} appels")
                lines.append(f"  {file.path.name:<44}{count:>14}   {refused}".rstrip())
            lines += _by_module({name for _, _, names, _ in rows for name in names})
            if not rows:
                lines.append("  " + say(en="no pickle", fr="aucun pickle"))
        return "\n".join(lines)


def _by_module(names: set[str]) -> list[str]:
    """Names as lines, those of one module side by side."""
    split = sorted(name.rpartition(".")[::2] for name in names)
    lines: list[str] = []
    for module, own in groupby(split, key=lambda pair: pair[0]):
        told = f"{module}: {', '.join(name for _, name in own)}"
        lines += wrap(told, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False)
    return lines


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def frozen_ranks(folder: Path) -> list[int]:
    """Into how many parts each file of a DeepSpeed checkpoint says that the optimizer is cut; nothing is loaded."""
    shares = [file for file in files({"deepspeed": folder}) if file.name.endswith(_SHARE)]
    return [numbers_after(read(file.path), "partition_count")[0] for file in shares]


def with_a_flipped_bit(folder: Path, to: Path) -> str:
    """Copy a checkpoint and flip one bit of the copy, in the middle of the largest tensor; returns the file's name.

    Args:
        folder: of the checkpoint; nothing in it is touched.
        to: folder of the copy; one that is there is replaced.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    largest = max((path for path in to.rglob("*") if path.is_file()), key=lambda path: (path.stat().st_size, path))
    content = bytearray(read(largest))
    # Between two entries of an archive lies a tensor; a file of another kind is one run of bytes, its head aside.
    edges = [*entries(bytes(content)), len(content)] if largest.suffix != ".safetensors" else [0, len(content)]
    _, start, end = max((after - before, before, after) for before, after in pairwise(edges))
    content[(start + end) // 2] ^= 0b0100_0000
    largest.write_bytes(content)
    return largest.relative_to(to).as_posix()
