"""Read published measurements: what ran where, how it was laid out, and what came out.

A row holds what its source prints, or what follows from it by arithmetic alone; what is not printed is None, and what
is taken from elsewhere says so in `note`. One CSV per table: lines `#: key = value` hold for each row, then a line of
names, then the rows; an empty cell takes the value of the head, `-` is none. The reader refuses a damaged cell, naming
table, line, row, column, value and what to do, and a layout that cannot have run (GPUs that are not the product of its
degrees, a batch that cannot be divided), unless the row says why it is excluded.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, refusal, say
from dlojz.hardware.clusters import CLUSTERS
from dlojz.hardware.decoder_size import DecoderSize, Formula, flops_per_sequence
from dlojz.hardware.gpus import ATTENTION_KERNELS, AttentionKernel

Checkpointing = Literal["none", "selective", "full"]
Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Engine = Literal[
    "megatron", "megatron-deepspeed", "deepspeed", "megatron-core", "torchtitan", "nemo", "llama", "composer",
    "fms-fsdp",
]  # fmt: skip
Dispatcher = Literal["all_to_all", "overlapped", "once_per_node"]
DISPATCHERS: Final = get_args(Dispatcher)
"""How rows reach the experts of other ranks: by all-to-alls that are waited for; by the same beside the computation of
another micro-batch; or each token once to each node, which hands it on to its experts there.

Source: Megatron-core, `--moe-token-dispatcher-type alltoall`, `--overlap-moe-expert-parallel-comm`, and `flex` with
DeepEP (deepseek-ai/DeepEP) or HybridEP.
"""
MemoryReading = Literal["nvidia-smi", "reserved", "allocated", "states", "activations", ""]
Outcome = Literal["ran", "oom"]


class Version(NamedTuple):
    """Version of a library: 2.1, whatever its patch.

    Attributes:
        major, minor: its first two numbers.
    """

    major: int
    minor: int

    @classmethod
    def of(cls, text: str) -> Version:
        """Read `2.1`, `2.1.0`, or `2`.

        Raises:
            ValueError: for anything else.
        """
        numbers = [_natural(number) for number in text.split(".")]
        return cls(numbers[0], numbers[1] if len(numbers) > 1 else 0)

    @property
    def number(self) -> int:
        """100 · major + minor, which arrays compare."""
        return 100 * self.major + self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


FACTS: Final = (
    "torch", "transformer_engine", "attention_kernel", "fused_optimizer", "tensor_overlap", "gather_overlap",
)  # fmt: skip
"""Columns that say with which software a row was measured. What a file does not say of them is assumed."""
ASSUMABLE: Final = (*FACTS, "checkpointing", "micro_batch")
"""Columns that a row may hold though its source does not print them."""


class PublishedPrediction(NamedTuple):
    """What another tool has published for a row.

    Attributes:
        tool: its name.
        step_s: seconds of a step that it predicts.
    """

    tool: str
    step_s: float


@dataclass(frozen=True)
class Measurement:
    """Published measurement: a row of a table.

    Args:
        table: it is of, one of `TABLES`.
        row: a stable name, `table/line`.
        source: document, and table or line in it.
        cluster: of `dlojz.hardware`.
        gpus: in all; dp × tp × pp × cp.
        ep: expert-parallel ranks; so many of the tp · cp · dp ranks, neighbours, share the experts of a mixture.
        dispatcher: how rows reach the experts of other ranks.
        zero: stage, 0 to 3.
        zero_shards: ranks that states are sharded over; dp · cp where the table does not say otherwise.
        micro_batch: sequences of one forward; None if it is not printed.
        global_batch: sequences of one step.
        schedule: `gpipe`, `1f1b`, `interleaved`, …; empty without a pipeline.
        chunks: stages of one rank (interleaving), at least 1.
        partition: `layers`: layers split evenly, embedding and logits besides; `embedding`: embedding and logits
            count as a layer each.
        checkpointing: what the forward does not keep.
        checkpointed_every: of so many layers full checkpointing computes one again.
        sequence_parallel: whether norms and dropouts are split along the sequence.
        precision: of the matrix products.
        gradient_precision: that gradients are accumulated in.
        offload: what lies in the host's memory: `none`, `optimizer` or `parameters`.
        fused_attention: whether attention is one kernel that never writes the scores (FlashAttention).
        attention_kernel: generation of that kernel.
        torch: its version.
        transformer_engine: its version; None where layers are not Transformer Engine's.
        fused_optimizer: whether Adam's update is one kernel in place, without temporaries.
        overlap: whether data-parallel communication runs beside the backward.
        tensor_overlap: whether tensor-parallel messages run beside products where the library can do that
            (`--tp-comm-overlap`).
        gather_overlap: whether the weights that ZeRO-1 gathers are gathered beside the forward
            (`--overlap-param-gather`).
        assumed: which of `ASSUMABLE` the source does not print; one without a value is what the engine usually has.
        step_s: of one step; None if not printed.
        forward_s: of the forward alone, where it is printed apart.
        backward_s: of the backward alone, recomputation included.
        tflops_per_gpu: as printed, by `formula`.
        formula: that the table counts operations by.
        memory_bytes: of the fullest GPU; None if not printed.
        memory_reading: how it was read; `states` and `activations` are computed by the source, not read.
        memory_share: the same as a share of the layout without recomputation and sequence parallelism.
        outcome: `oom` where it did not fit.
        series: rows of one series were measured in the same way; between two, compare with care.
        excluded: why the row is not to be used; empty if it is.
        note: what one must know to read it.
        published: seconds of the same step that other tools have published, written `TOOL SECONDS; TOOL SECONDS`.
    """

    table: str
    row: str
    source: str
    cluster: str
    size: DecoderSize
    gpus: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    dispatcher: Dispatcher
    zero: int
    zero_shards: int
    micro_batch: int | None
    global_batch: int
    schedule: str
    chunks: int
    partition: str
    checkpointing: Checkpointing
    checkpointed_every: int
    sequence_parallel: bool
    precision: Precision
    gradient_precision: Precision
    offload: str
    engine: Engine
    fused_attention: bool
    attention_kernel: AttentionKernel
    torch: Version | None
    transformer_engine: Version | None
    fused_optimizer: bool | None
    overlap: bool
    tensor_overlap: bool
    gather_overlap: bool
    assumed: tuple[str, ...]
    step_s: float | None
    forward_s: float | None
    backward_s: float | None
    tflops_per_gpu: float | None
    formula: Formula
    memory_bytes: float | None
    memory_reading: MemoryReading
    memory_share: float | None
    outcome: Outcome
    series: str
    excluded: str
    note: str
    published: tuple[PublishedPrediction, ...]

    @property
    def usable(self) -> bool:
        """Whether the row may be fitted to and compared with."""
        return not self.excluded

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of one replica in one step; None where the micro-batch is not printed."""
        return self.global_batch // (self.dp * self.micro_batch) if self.micro_batch else None

    @property
    def seconds(self) -> float | None:
        """Seconds of one step: as printed, or what the printed TFLOP/s come to by the table's own formula."""
        if self.step_s is not None:
            return self.step_s
        if self.tflops_per_gpu is None or not self.formula:
            return None
        flops = self.global_batch * flops_per_sequence(self.size, self.formula)
        # FLOP of the whole batch over FLOP/s of all GPUs.
        return flops / (self.tflops_per_gpu * 1e12 * self.gpus)


FOLDER: Final = Path(__file__).with_name("data") / "evidence"
FILES: Final = {path.stem.removeprefix("table-"): path for path in FOLDER.glob("*/table-*.csv")}
"""The file of each table, in the folder of the GPUs that it was measured on."""
TABLES: Final = tuple(sorted(FILES))
"""Names of all tables."""
NONE = "-"
_DEFAULTS: Final[dict[str, str]] = {
    "dp": "1", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "zero": "0", "schedule": "", "chunks": "1",
    "partition": "layers", "checkpointed_every": "1", "dispatcher": "all_to_all",
    "sequence_parallel": "no", "gradient_precision": "fp32", "offload": "none", "fused_attention": "no",
    "overlap": "no", "micro_batch": NONE, "step_s": NONE, "forward_s": NONE, "backward_s": NONE, "tflops_per_gpu": NONE,
    "formula": "", "memory_bytes": NONE, "memory_reading": "", "memory_share": NONE, "outcome": "ran", "series": "",
    "excluded": "", "note": "", "published": "",
}  # fmt: skip
_OF_FACTS: Final = {
    "torch": NONE, "transformer_engine": NONE, "attention_kernel": "flash2", "fused_optimizer": NONE,
    "tensor_overlap": "yes", "gather_overlap": "yes",
}  # fmt: skip
"""What a fact is taken to be that a file does not say."""
_LEGAL: Final[dict[str, tuple[str, ...]]] = {
    "cluster": CLUSTERS,
    "schedule": ("", "gpipe", "1f1b", "interleaved"),
    "checkpointing": get_args(Checkpointing),
    "precision": get_args(Precision),
    "gradient_precision": get_args(Precision),
    "engine": get_args(Engine),
    "attention_kernel": ATTENTION_KERNELS,
    "dispatcher": DISPATCHERS,
    "formula": get_args(Formula),
    "memory_reading": get_args(MemoryReading),
    "outcome": get_args(Outcome),
    "partition": ("layers", "embedding"),
    "offload": ("none", "optimizer", "parameters"),
}
_OF_SIZE: Final = tuple(field.name for field in fields(DecoderSize))
_OF_ROW: Final = tuple(field.name for field in fields(Measurement) if field.name not in ("table", "size"))
KEYS: Final = tuple(sorted({*_OF_SIZE, *_OF_ROW}))
"""Columns that a file may have."""


def _yes(cell: str) -> bool:
    if cell not in ("yes", "no"):
        # `_value` makes a sentence of it.
        raise ValueError(cell)
    return cell == "yes"


def _real(cell: str) -> float:
    value = float(cell)
    if not 0 < value < float("inf"):
        raise ValueError(cell)
    return value


def _natural(cell: str) -> int:
    # isdigit alone takes digits of other scripts, and int fails on some of them.
    if not cell.isascii() or not cell.isdigit():
        raise ValueError(cell)
    return int(cell)


def _assumed(cell: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in cell.split(",") if name.strip())
    if not set(names) <= set(ASSUMABLE):
        raise ValueError(cell)
    return names


def _published(cell: str) -> tuple[PublishedPrediction, ...]:
    pairs = [entry.strip().rpartition(" ") for entry in cell.split(";") if entry.strip()]
    if not all(tool for tool, _, _ in pairs):
        raise ValueError(cell)
    return tuple(PublishedPrediction(tool, _real(seconds)) for tool, _, seconds in pairs)


_READERS: Final[tuple[tuple[str, Callable[[str], Any]], ...]] = (
    ("bool", _yes),
    ("float", _real),
    ("int", _natural),
    ("Version", Version.of),
    ("tuple[str", _assumed),
    ("tuple", _published),
)
"""How the annotation of a field begins, and what reads its cell."""
_sentence = Sentences(FOLDER.with_name("evidence.md"))
"""Write what is wrong with a cell or a row, by its key."""


class _Place(NamedTuple):
    """Where a cell stands, for what refuses it."""

    path: Path
    line: int
    row: str = ""

    def refuse(self, problem: str) -> LabError:
        """Name file, line and row before what is wrong."""
        row = say(en=f", row {self.row}", fr=f", rangée {self.row}") if self.row else ""
        return refusal(
            en=f"{self.path.name}, line {self.line}{row}: {problem}",
            fr=f"{self.path.name}, ligne {self.line}{row} : {problem}",
        )


def _remedy(kind: str) -> str:
    """How a damaged cell is repaired; one that may be missing says so."""
    none = say(en=f", or write {NONE} if the source prints none", fr=f", ou écrivez {NONE} si la source n’en donne pas")
    return say(en="correct the cell", fr="corrigez la cellule") + (none if "None" in kind else "")


def _value(location: _Place, key: str, kind: str, cell: str) -> Any:
    if cell == NONE and "None" in kind:
        return None
    if key == "cluster" and cell.endswith(".toml"):
        path = location.path.parent / cell  # of a cluster of one's own, from the table's folder on
        if path.is_file():
            return str(path)
    # A column without a list of texts takes any.
    legal = _LEGAL.get(key, (cell,))
    if cell == NONE and "" in legal:
        return ""
    if cell not in legal:
        raise location.refuse(one_of(key, cell, filter(None, legal)))
    for name, parse in _READERS:
        # Of `float | None`, the annotation as a text, the beginning names the reader.
        if kind.startswith(name):
            try:
                return parse(cell)
            except ValueError:
                form = _sentence(name, assumable=", ".join(ASSUMABLE))
                problem = _sentence("cell", key=key, form=form, cell=cell, remedy=_remedy(kind))
                raise location.refuse(problem) from None
    return cell


def _built(location: _Place, cells: Mapping[str, str], built: type, **fixed_values: Any) -> dict[str, Any]:
    """The arguments of a dataclass, each read as its annotation says; one that the file leaves out is refused."""
    values = dict(fixed_values)
    for field in fields(built):
        if field.name in values:
            continue
        cell = cells.get(field.name)
        if cell is None:
            if field.default is MISSING:
                raise location.refuse(_sentence("missing cell", name=field.name))
            continue
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)  # a text where postponed
        values[field.name] = _value(location, field.name, kind, cell)
    return values


_COUNTS: Final = (
    "gpus", "dp", "tp", "pp", "cp", "ep", "zero_shards", "global_batch", "chunks", "checkpointed_every",
)  # fmt: skip


def _not_positive(row: Measurement) -> str:
    """The count of a layout that is 0; empty if none is."""
    name = next((name for name in _COUNTS if getattr(row, name) < 1), None)
    if name is not None:
        return _sentence("count", name=name)
    return _sentence("micro-batch", remedy=_remedy("None")) if row.micro_batch == 0 else ""


def _contradiction(row: Measurement) -> str:
    """What of a row contradicts the rest of it, or is impossible; empty if nothing."""
    degrees, ranks = row.dp * row.tp * row.pp * row.cp, row.dp * row.tp * row.cp
    replicas, stages = row.dp * row.cp, row.pp * row.chunks
    overlaps = row.tensor_overlap and "tensor_overlap" not in row.assumed
    broken = {
        "degrees": degrees != row.gpus,
        "batch": row.global_batch % (row.dp * (row.micro_batch or 1)) > 0,
        "layers": stages > row.size.layers,
        "ZeRO stage": row.zero > 3,
        "more shards than GPUs": row.zero_shards > row.gpus,
        "experts": ranks % row.ep > 0 or max(1, row.size.experts) % row.ep > 0,
        "shards": replicas % row.zero_shards > 0,
        "checkpointing": row.checkpointed_every > 1 and row.checkpointing != "full",
        "tensor overlap": overlaps and row.tp > 1 and not row.sequence_parallel,
    }
    facts = {"row": row, "degrees": degrees, "ranks": ranks, "replicas": replicas, "stages": stages}
    return next((_sentence(key, **facts) for key, is_broken in broken.items() if is_broken), "")


def _head(path: Path, lines: list[str]) -> tuple[dict[str, str], int]:
    """What holds for each row, and the number of lines that say so."""
    common = dict(_DEFAULTS)
    for number, line in enumerate(lines, start=1):
        if not line.startswith("#"):
            return common, number - 1
        if line.startswith("#:"):
            key, equals, value = line[2:].partition("=")
            if not equals or key.strip() not in KEYS:
                raise _Place(path, number).refuse(one_of("key", key.strip(), KEYS))
            common[key.strip()] = value.strip()
    return common, len(lines)


def _measurement(location: _Place, name: str, cells: Mapping[str, str]) -> Measurement:
    size = DecoderSize(**_built(location, cells, DecoderSize))
    unsaid = [name for name in FACTS if name not in cells]
    cells = {**cells, "assumed": ",".join(dict.fromkeys([*cells.get("assumed", "").split(","), *unsaid]))}
    identity = {"row": f"{name}/{cells['row']}", "source": cells.get("source", "").replace("{row}", cells["row"])}
    # Ranks that states are sharded over: dp · cp, unless a cell or the head says otherwise.
    ranks = [int(cells[degree]) for degree in ("dp", "cp") if cells[degree].isdecimal()]  # others are refused below
    cells = {"zero_shards": str(math.prod(ranks)), **_OF_FACTS, **cells, **identity}
    row = Measurement(**_built(location, cells, Measurement, table=name, size=size))
    zero = _not_positive(row)
    if zero:
        raise LabError(zero)
    wrong = _contradiction(row)
    if wrong and row.usable:
        raise LabError(_sentence("contradiction", problem=wrong))
    return row


def read_table(path: Path) -> tuple[Measurement, ...]:
    """Read all rows of a file, also excluded ones.

    Raises:
        LabError: if the file cannot be read, or a line of it is not legal; the sentence names file and line.
    """
    name = path.stem.removeprefix("table-")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(en=f"{path.name} cannot be read: {error}.", fr=f"{path.name} est illisible : {error}.") from None
    common, skipped = _head(path, lines)
    rows: dict[str, Measurement] = {}
    reader = csv.reader(lines[skipped:], strict=True)
    try:
        names = next(reader, [])
        for cell in names:
            if cell not in KEYS:
                raise _Place(path, skipped + reader.line_num).refuse(one_of("column", cell, KEYS))
        for cells in reader:
            # csv counts from its first line, which stands behind the head.
            line = skipped + reader.line_num
            row = _row(path, name, line, names, cells, common)
            if row.row in rows:
                twice = say(en=f"the row {row.row} was there before.", fr=f"la ligne {row.row} y était déjà.")
                raise _Place(path, line).refuse(twice)
            rows[row.row] = row
    except csv.Error as error:
        raise _Place(path, skipped + reader.line_num).refuse(f"{error}.") from None
    if not rows:
        raise refusal(en=f"{path.name} holds no row.", fr=f"{path.name} ne contient aucune ligne.")
    return tuple(rows.values())


def _row(
    path: Path, name: str, line: int, names: list[str], cells: list[str], common: Mapping[str, str]
) -> Measurement:
    location = _Place(path, line)
    if len(cells) != len(names):
        raise location.refuse(_sentence("cells", due=len(names), count=len(cells)))
    row_cells = {key: cell.strip() for key, cell in zip(names, cells, strict=True) if cell.strip()}
    if "row" not in row_cells:
        raise location.refuse(say(en="row is missing: give it a name.", fr="row manque : donnez-lui un nom."))
    location = _Place(path, line, row_cells["row"])
    try:
        return _measurement(location, name, {**common, **row_cells})
    except LabError as error:
        # It names the file already.
        if str(error).startswith(path.name):
            raise
        raise location.refuse(str(error)) from None


@cache
def table(name: str) -> tuple[Measurement, ...]:
    """Read all rows of a table, or of a `.csv` file, in the order of their source, also excluded ones (`row.usable`).

    Raises:
        LabError: if there is no such table (those there are get listed), or its file is not legal.
    """
    if name.endswith(".csv"):
        return read_table(Path(name).expanduser())
    if name not in TABLES:
        raise LabError(one_of("table", name, TABLES))
    return read_table(FILES[name])


def measurements() -> tuple[Measurement, ...]:
    """Read all rows of all tables."""
    return tuple(row for name in TABLES for row in table(name))
