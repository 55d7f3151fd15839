"""One published measurement: what ran where, how it was laid out, and what came out.

Layer 1. Invariant: only what the source prints, or what follows from it by arithmetic alone; what is not printed is
None, and what is taken from elsewhere says so in `note`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlojz.evidence.size import DecoderSize, Formula, flops_per_sequence

Checkpointing = Literal["none", "selective", "full"]
Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Engine = Literal["megatron", "megatron-deepspeed", "deepspeed", "megatron-core", "torchtitan", "nemo", "llama"]
MemoryReading = Literal["nvidia-smi", "reserved", "allocated", "states", "activations", ""]
Outcome = Literal["ran", "oom"]


@dataclass(frozen=True)
class Measurement:
    """A row of a published table.

    Args:
        table: it is of, one of `TABLES`.
        row: a stable name, `table/line`.
        source: document, and table or line in it.
        cluster: of `dlojz.hardware`.
        size: of the model.
        gpus: in all; dp × tp × pp × cp.
        dp: replicas.
        tp: tensor-parallel degree.
        pp: pipeline stages.
        cp: context-parallel degree.
        zero: stage, 0 to 3.
        zero_shards: ranks that states are sharded over; dp where the table does not say otherwise.
        micro_batch: sequences of one forward; None if it is not printed.
        global_batch: sequences of one step.
        schedule: `gpipe`, `1f1b`, `interleaved`, …; empty without a pipeline.
        chunks: stages of one rank (interleaving), at least 1.
        partition: `layers`: layers shared out evenly, embedding and logits besides; `embedding`: embedding and logits
            count as a layer each.
        checkpointing: what the forward does not keep.
        sequence_parallel: whether norms and dropouts are split along the sequence.
        precision: of the matrix products.
        gradient_precision: that gradients are accumulated in.
        offload: what lies in the host's memory: `optimizer`, `all`, or nothing.
        engine: what ran it.
        fused_attention: whether attention is one kernel that never writes the scores (FlashAttention).
        overlap: whether data-parallel communication runs beside the backward.
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
    zero: int
    zero_shards: int
    micro_batch: int | None
    global_batch: int
    schedule: str
    chunks: int
    partition: str
    checkpointing: Checkpointing
    sequence_parallel: bool
    precision: Precision
    gradient_precision: Precision
    offload: str
    engine: Engine
    fused_attention: bool
    overlap: bool
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
        return flops / (self.tflops_per_gpu * 1e12 * self.gpus)

    def counted_tflops_per_gpu(self, formula: Formula | None = None) -> float | None:
        """TFLOP/s of each GPU that the step's time comes to, in 10¹²/s; None without a time.

        Args:
            formula: to count by; the table's own without it.
        """
        formula = self.formula if formula is None else formula
        if self.seconds is None or not formula:
            return None
        return self.global_batch * flops_per_sequence(self.size, formula) / (self.seconds * self.gpus * 1e12)
