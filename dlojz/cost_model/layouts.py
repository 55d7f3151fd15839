"""Layouts as columns, many at once, for the cost model; and what the libraries that run them do by habit.

All columns have one length. Words are kept as their places in the lists here, so that a hundred thousand layouts are
compared without looking at a string.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal
from dlojz.hardware import Device, Precision
from dlojz.hardware.evidence import DISPATCHERS, Measurement, Version
from dlojz.hardware.gpus import ATTENTION_KERNELS, AttentionKernel

Integers = NDArray[np.int64]
Reals = NDArray[np.float64]

CHECKPOINTING: Final = ("none", "selective", "full", "every_second")
SCHEDULES: Final = ("1f1b", "interleaved", "gpipe", "zb-h1")
CONTEXT_EXCHANGES: Final = ("ring", "all_to_all")
"""What context-parallel ranks exchange: keys and values; or all-to-alls give each rank all tokens of some heads."""
OFFLOAD: Final = ("none", "optimizer", "parameters")
ENGINES: Final = (
    "megatron", "megatron-deepspeed", "deepspeed", "megatron-core", "torchtitan", "nemo", "llama", "composer",
    "fms-fsdp",
)  # fmt: skip
LOSSES: Final = ("megatron", "torch", "fused", "fused, two metrics")
"""How the cross-entropy is computed: pass by pass over split logits, by torch's kernels, in one kernel, or in one with
torch's forward twice more for metrics of training."""
WORDS: Final[dict[str, tuple[str, ...]]] = {
    "checkpointing": CHECKPOINTING,
    "schedule": SCHEDULES,
    "offload": OFFLOAD,
    "engine": ENGINES,
    "attention_kernel": ATTENTION_KERNELS,
    "dispatcher": DISPATCHERS,
    "context_exchange": CONTEXT_EXCHANGES,
}
SOFTWARE: Final = ("torch", "transformer_engine", "fused_optimizer")
"""Columns that are what the engine has today unless they are given."""
TORCH_TODAY: Final = Version(2, 13)
EARLY_STOP_SINCE: Final = Version(2, 1)
"""Since which torch a checkpoint without reentrance stops computing again once it has all that the backward reads.

Source: PyTorch 2.1, `torch/utils/checkpoint.py`, `set_checkpoint_early_stop`; 2.0 has no such function.
"""
SEPARATE_ACCUMULATION: Final = ("sc21-1", "sc21-2", "jean-zay-a100", "jean-zay-v100", "vtrain-multi")
"""Tables from before Megatron could add to gradients within a product (`--gradient-accumulation-fusion`, 2022)."""
BLOCKED_FROM_GPUS: Final = 320
"""From so many GPUs on, Jean Zay's A100 rows ran with `CUDA_LAUNCH_BLOCKING=1`, because they hung without it.

Source: bigscience-workshop/bigscience, chronicles-prequel.md, "dealing with JZ hanging on the large model".
"""
_DEFAULTS: Final[dict[str, Any]] = {
    "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0, "zero_shards": 0, "micro_batch": 1, "micro_batches": 1,
    "chunks": 1, "sequence_parallel": 0, "fused_attention": 0, "embedding_slots": 0, "overlap": 0, "gradient_bytes": 2,
    "fused_accumulation": 1, "blocking": 0, "eager": 0, "compiled": 0, "asynchronous": 0, "relayed": 1,
    "dropout": 1, "fused_loss": 0, "checkpointing": "none", "schedule": "1f1b", "offload": "none", "engine": "megatron",
    "attention_kernel": "flash2", "dispatcher": "all_to_all", "checkpointed_every": 1, "tensor_overlap": 1,
    "gather_overlap": 1, "context_exchange": "ring", "torch": -1, "transformer_engine": -1, "fused_optimizer": -1,
    "true_weights": 0,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Layouts:
    """Many layouts as columns, one layout per place; build it with `Layouts.of`.

    Attributes:
        dp, tp, pp, cp: degrees; their product is the number of GPUs.
        ep: expert-parallel ranks: so many of the tp · cp · dp ranks, neighbours, share the experts of a mixture, which
            tensor parallelism does not cut.
        zero: stage, 0 to 3.
        zero_shards: ranks that states are sharded over (0: dp · cp).
        micro_batch, micro_batches: samples of one forward; forwards of one replica in a step.
        chunks: stages of one rank, with interleaving.
        checkpointed_every: of so many layers full checkpointing computes one again.
        sequence_parallel, fused_attention, overlap: 0 or 1, as in `dlojz.hardware.evidence.Measurement`.
        embedding_slots: 1 where embedding and logits count as a layer each when stages are cut.
        gradient_bytes: of an element of the accumulated gradients, 2 or 4.
        fused_accumulation: 1 where the product of a weight's gradient adds to what is there (Megatron since 2022).
        blocking: 1 where the host waits for each kernel (`CUDA_LAUNCH_BLOCKING=1`).
        eager: 1 where each operation on a tensor is a separate kernel; 0 where they are fused by hand or by
            torch.compile, which is taken to fuse all passes between two products, and to speed up nothing else.
        compiled: 1 where it is torch.compile, which keeps of a layer only what its backward reads.
        asynchronous: 1 where tensor-parallel messages run in pieces beside the products (async TP).
        relayed: 1 where NCCL reaches a card through the GPU beside it (PXN, since 2.12, 2022).
        dropout: 1 where dropout follows the embedding, the attention and the MLP, whose masks are kept.
        fused_loss: 1 where the cross-entropy is one kernel that writes nothing in fp32 (flash-attn's, Liger's).
        checkpointing, schedule, offload, engine: places in `CHECKPOINTING`, `SCHEDULES`, `OFFLOAD`, `ENGINES`.
        attention_kernel: place in `ATTENTION_KERNELS`, of a fused attention.
        dispatcher: place in `DISPATCHERS`.
        tensor_overlap: 0 where tensor-parallel messages wait though the library could run them beside products
            (`--tp-comm-overlap` left out).
        gather_overlap: 0 where the weights that ZeRO-1 gathers once per step are waited for (`--overlap-param-gather`).
        context_exchange: place in `CONTEXT_EXCHANGES`, of context parallelism.
        torch, transformer_engine: versions, 100 · major + minor (0: none); −1 is what the engine has today.
        fused_optimizer: 1 where Adam's update is one kernel in place; −1 as the engine has it.
        true_weights: 1 where weights, gradients and states are in 16 bit, without a master copy.
        precision: of the products, one for all; with fp8 attention, logits and messages stay in bf16.
    """

    dp: Integers
    tp: Integers
    pp: Integers
    cp: Integers
    ep: Integers
    zero: Integers
    zero_shards: Integers
    micro_batch: Integers
    micro_batches: Integers
    chunks: Integers
    checkpointed_every: Integers
    sequence_parallel: Integers
    fused_attention: Integers
    embedding_slots: Integers
    overlap: Integers
    gradient_bytes: Integers
    fused_accumulation: Integers
    blocking: Integers
    eager: Integers
    compiled: Integers
    asynchronous: Integers
    relayed: Integers
    dropout: Integers
    fused_loss: Integers
    checkpointing: Integers
    schedule: Integers
    offload: Integers
    engine: Integers
    attention_kernel: Integers
    dispatcher: Integers
    tensor_overlap: Integers
    gather_overlap: Integers
    context_exchange: Integers
    torch: Integers
    transformer_engine: Integers
    fused_optimizer: Integers
    true_weights: Integers
    precision: Precision = "fp16"

    @classmethod
    def of(cls, precision: Precision = "fp16", **columns: ArrayLike) -> Layouts:
        """Build layouts from columns: arrays or single values, words or their places, by default the plainest.

        Raises:
            LabError: for a column or word that is not known, lengths that differ, or a degree below 1.
        """
        for name in columns:
            if name not in _DEFAULTS:
                raise LabError(one_of("column", name, _DEFAULTS))
        # Words become their places in the lists.
        codes = {name: _codes(name, columns.get(name, default)) for name, default in _DEFAULTS.items()}
        try:
            arrays = dict(
                zip(codes, np.broadcast_arrays(*(np.atleast_1d(column) for column in codes.values())), strict=True)
            )
        except ValueError:
            lengths = {name: np.size(column) for name, column in codes.items() if np.size(column) > 1}
            raise refusal(
                en=f"all columns of layouts must have one length, but {lengths} was received.",
                fr=f"toutes les colonnes de layouts doivent avoir la même longueur, mais {lengths} a été reçu.",
            ) from None
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "micro_batches", "chunks", "checkpointed_every"):
            if arrays[name].size and arrays[name].min() < 1:
                raise refusal(
                    en=f"{name} must be at least 1, but {arrays[name].min()} was received.",
                    fr=f"{name} doit valoir au moins 1, mais {arrays[name].min()} a été reçu.",
                )
        arrays["zero_shards"] = np.where(arrays["zero_shards"] < 1, arrays["dp"] * arrays["cp"], arrays["zero_shards"])
        return cls(**arrays, precision=precision)

    @classmethod
    def from_measurements(cls, rows: Sequence[Measurement]) -> Layouts:
        """The layouts of published rows of one precision, in their order; each must print its micro-batch."""
        column = lambda name: np.array([getattr(row, name) for row in rows])  # noqa: E731
        return cls.of(
            precision=rows[0].precision if rows else "fp16",
            **{name: column(name) for name in ("dp", "tp", "pp", "cp", "ep", "zero", "zero_shards", "chunks")},
            checkpointed_every=column("checkpointed_every"),
            micro_batch=[row.micro_batch or 1 for row in rows],
            micro_batches=[row.micro_batches or 1 for row in rows],
            **{
                name: column(name).astype(int)
                for name in ("fused_attention", "overlap", "tensor_overlap", "gather_overlap")
            },
            **{name: [_fact(row, name) for row in rows] for name in SOFTWARE},
            # torchtitan has no tensor parallelism without it.
            sequence_parallel=[int(row.sequence_parallel or row.engine == "torchtitan") for row in rows],
            embedding_slots=[int(row.partition == "embedding") for row in rows],
            gradient_bytes=[4 if row.gradient_precision == "fp32" else 2 for row in rows],
            fused_accumulation=[int(row.table not in SEPARATE_ACCUMULATION) for row in rows],
            blocking=[int(row.table == "jean-zay-a100" and row.gpus >= BLOCKED_FROM_GPUS) for row in rows],
            relayed=[int(row.table not in SEPARATE_ACCUMULATION) for row in rows],
            eager=[int(row.series == "eager") for row in rows],
            compiled=[int(row.series in ("compiled", "asynchronous tensor parallelism")) for row in rows],
            asynchronous=[int(row.series == "asynchronous tensor parallelism") for row in rows],
            # GPT and BLOOM were trained with it, Llama and MPT (Composer) without.
            dropout=[int(row.size.biased and row.engine != "composer") for row in rows],
            checkpointing=[row.checkpointing for row in rows],
            schedule=[row.schedule if row.schedule in SCHEDULES else "1f1b" for row in rows],
            offload=[row.offload for row in rows],
            engine=[row.engine for row in rows],
            attention_kernel=[row.attention_kernel for row in rows],
            dispatcher=[row.dispatcher for row in rows],
        )

    def __len__(self) -> int:
        return int(self.dp.size)

    def __getitem__(self, index: Any) -> Layouts:
        """Select layouts by an index that numpy takes."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "precision"}
        shape = np.atleast_1d(self.dp[index]).shape
        chosen = {  # a value that all layouts share is not copied for each
            name: np.broadcast_to(column[:1] if column.size else 0, shape)  # broadcast: one value stands for all
            if column.strides == (0,)
            else np.atleast_1d(column[index])
            for name, column in columns.items()
        }
        return Layouts(**chosen, precision=self.precision)

    @property
    def gpus(self) -> Integers:
        """Number of GPUs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> Integers:
        """Samples of one step."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation and of a weight: 4 in fp32 and tf32, else 2 (products in fp8 keep both in 16 bit)."""
        return element_bytes(self.precision)


def distinct(layouts: Layouts, ignored: Collection[str]) -> tuple[Integers, Integers]:
    """Find layouts that differ in a column that is not ignored: the first of each kind, and the kind of each layout.

    What depends on few columns is computed once for each kind. Kinds are numbers in a mixed radix, whose digits are
    dense: tables as long as the largest number stand for a sort.
    """
    kinds, number = np.zeros(len(layouts), np.int64), 1
    for field in fields(layouts):
        column = getattr(layouts, field.name)
        if field.name in (*ignored, "precision") or column.strides == (0,):  # one value for all
            continue
        codes, values = _dense(column)
        kinds, number = kinds * values + codes, number * values
        if number > _LONGEST_TABLE:
            kinds, number = _dense(kinds)
    kinds, number = _dense(kinds)
    first = np.zeros(number, np.int64)
    first[kinds[::-1]] = np.arange(len(layouts))[::-1]  # of what is written twice the last stays
    return first, kinds


_LONGEST_TABLE: Final = 2**20


def _dense(column: Integers) -> tuple[Integers, int]:
    """Number the values of a column from 0 without gaps, and count them."""
    if not column.size:
        return column, 0
    if column.max() >= 4 * _LONGEST_TABLE or column.min() < 0:
        values, codes = np.unique(column, return_inverse=True)
        return codes.reshape(-1), values.size
    occurs = np.zeros(int(column.max()) + 1, bool)
    occurs[column] = True
    codes = np.cumsum(occurs) - 1
    return codes[column], int(codes[-1]) + 1


def element_bytes(precision: Precision) -> int:
    """Bytes of an activation in a precision of the products: 4 in fp32 and tf32, else 2."""
    return 4 if precision in ("fp32", "tf32") else 2


def _fact(row: Measurement, name: str) -> int:
    """A fact of a row's software as its column holds it: −1 where it is neither printed nor assumed to be a value."""
    value = getattr(row, name)
    if value is None:
        return -1 if name in row.assumed else 0
    return value.number if isinstance(value, Version) else int(value)


def _codes(name: str, values: ArrayLike) -> NDArray[Any]:
    legal = WORDS.get(name)
    array = np.asarray(values)
    if legal is None or array.dtype.kind in "iub":  # numbers already: places, flags
        return array.astype(np.int64)
    codes = {word: code for code, word in enumerate(legal)}
    try:
        return np.array([codes[str(word)] for word in array.reshape(-1)], np.int64).reshape(array.shape)
    except KeyError as error:
        raise LabError(one_of(name, error.args[0], legal)) from None


@dataclass(frozen=True, kw_only=True)
class LibraryHabits:
    """What a training library does that its layout does not say: facts of the software, not fitted numbers.

    Attributes:
        sliced: whether tensor-parallel ranks send a pipeline boundary in parts (scatter/gather).
        hidden_tensor: share of the tensor-parallel messages that run beside products.
        gather_interfaces: network interfaces of a node that gathering weights (ZeRO-3) can use.
        blocking: whether a stage waits for its neighbour's message before it computes.
        alternates: whether its selective checkpointing computes every second product again, else attention's core.
        reduces_each: whether gradients are reduced after every micro-batch with ZeRO-2, and weights gathered again for
            each micro-batch of a pipeline with ZeRO-3.
        loss: how the cross-entropy is computed, one of `LOSSES`.
        in_place_loss: whether Megatron's loss writes the exponentials over the logits.
        keeps_gathered: whether, with sequence parallelism, the logits' product keeps its gathered input for the
            backward (torch's DTensor), else the rank's part, which it gathers again.
        casts: bytes that a cast to fp8 moves per element of a factor and product; each factor is in two products, so
            that 2 are a kernel that reads 16 bit and writes both layouts.
        stops_early: whether full checkpointing is torch's without reentrance, which stops once it has all that the
            backward reads, since `EARLY_STOP_SINCE`.
        fused_optimizer: whether Adam's update is one kernel in place (apex's or Transformer Engine's).
        transformer_engine: version of today's, 100 · major + minor; 0 where layers are not Transformer Engine's.
        gathers_per_layer: messages that ZeRO-3 gathers a layer's weights in.
        flat_buffers: whether the optimizer's messages pass through flat buffers of the whole stage's weights, which
            ZeRO does not shard.
        widens_gradients: whether the update makes an fp32 copy of 16-bit gradients for the states that the rank holds,
            which lives until the next step; of gradients in fp32 there is none.
        fsdp: whether ZeRO-2 and 3 are FSDP's: fp32 shards are the master copy; layers are sent one by one, and
            gradients reduced in the type that they are accumulated in (else in that of the weights, with ZeRO-3);
            embedding and logits are one unit, gathered for the whole step. In a pipeline gradients are reduced when
            all backwards are done.
        copies_weights: whether FSDP copies gathered weights to where products read them, and gradients, in the type
            that they are reduced in, to where they are reduced from (FSDP2).
        flattens_gradients: whether FSDP's weights are views of one flat tensor, whose gradient is put together, cast
            and divided by the number of ranks before it is reduced (FSDP1).
        gathers_fp8: whether inputs and weights of fp8 products are cast before they are gathered.
        copies_messages: whether samples and tokens are two dimensions, so that with sequence parallelism what is
            gathered is copied after, and what is summed before its message.
        rings: whether context-parallel ranks hand keys and values on in a ring, beside attention (else they gather
            all of them before it).
        expands_keys: whether that ring is torch's: keys and values are repeated for all heads and gathered at once,
            and their gradients handed on in fp32.
        source: where it says so.
    """

    sliced: bool = True
    hidden_tensor: float = 0.0
    gather_interfaces: float = np.inf
    blocking: bool = True
    alternates: bool = False
    reduces_each: bool = False
    loss: str = "megatron"
    in_place_loss: bool = False
    keeps_gathered: bool = False
    casts: float = 2.0
    stops_early: bool = False
    fused_optimizer: bool = True
    transformer_engine: int
    gathers_per_layer: int = 1
    flat_buffers: bool = False
    widens_gradients: bool = False
    fsdp: bool = False
    copies_weights: bool = False
    flattens_gradients: bool = False
    gathers_fp8: bool = False
    copies_messages: bool = False
    rings: bool = True
    expands_keys: bool = False
    source: str


def _habits() -> dict[str, LibraryHabits]:
    tables = tomllib.loads((Path(__file__).with_name("data") / "libraries.toml").read_text(encoding="utf-8"))
    for habits in tables.values():
        habits["transformer_engine"] = Version.of(habits.get("transformer_engine", "0")).number
    return {name: LibraryHabits(**habits) for name, habits in tables.items()}


HABITS: Final = _habits()


def habit(layouts: Layouts, name: str) -> Reals:
    """Look up one habit of each layout's engine, as a number; of words their places."""
    values = [getattr(HABITS[engine], name) for engine in ENGINES]
    # In the order of ENGINES, which `layouts.engine` indexes.
    of_engine = np.array([float(LOSSES.index(setting) if isinstance(setting, str) else setting) for setting in values])
    return of_engine[layouts.engine]


def software(layouts: Layouts, name: str) -> Integers:
    """Look up one fact of each layout's software, of `SOFTWARE`: as it is given, else as the engine has it today."""
    column: Integers = getattr(layouts, name)
    usual = TORCH_TODAY.number if name == "torch" else habit(layouts, name).astype(np.int64)
    return np.where(column < 0, usual, column)


def stops_early(layouts: Layouts) -> NDArray[np.bool_]:
    """Tell where full checkpointing never computes a layer's last product again."""
    stops: NDArray[np.bool_] = software(layouts, "torch") >= EARLY_STOP_SINCE.number
    return stops & (habit(layouts, "stops_early") > 0)


def usual_kernel(engine: str, gpu: Device) -> AttentionKernel:
    """Choose the kernel of an engine's fused attention on a GPU today.

    Transformer Engine prefers cuDNN's from Hopper on and FlashAttention-2 on Ampere; torch's own is FlashAttention-2.

    Source: NVIDIA/NeMo, pull request 9188, "memory_optimizations.rst"; Transformer Engine, `get_attention_backend`.
    """
    is_engine = HABITS[engine].transformer_engine > 0
    return "cudnn" if is_engine and "cudnn_forward_128" in gpu.attention_flops else "flash2"


def losses(layouts: Layouts) -> Integers:
    """Look up how each layout computes its cross-entropy, by number in `LOSSES`: as its engine does, unless fused."""
    engine_losses = habit(layouts, "loss").astype(np.int64)
    # The engine's own fused losses stay as they are.
    fuses = (layouts.fused_loss > 0) & np.isin(engine_losses, [LOSSES.index(loss) for loss in ("megatron", "torch")])
    return np.where(fuses, LOSSES.index("fused"), engine_losses)


def alternates(layouts: Layouts) -> NDArray[np.bool_]:
    """Tell which layouts compute every second product again: by that word, or by their engine's selective policy."""
    selective = layouts.checkpointing == CHECKPOINTING.index("selective")
    by_word: NDArray[np.bool_] = layouts.checkpointing == CHECKPOINTING.index("every_second")
    return by_word | (selective & (habit(layouts, "alternates") > 0))
