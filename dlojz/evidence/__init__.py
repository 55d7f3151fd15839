"""Published measurements as data: what real machines did with real models, each number with its source.

Layer 1. Invariant: nothing is corrected in silence; a number that cannot be true stays, with the reason it is excluded.
"""

from __future__ import annotations

from dlojz.evidence.loader import TABLES, measurements, read_table, table
from dlojz.evidence.measurement import Measurement
from dlojz.evidence.size import DecoderSize, flops_per_sequence

__all__ = ["TABLES", "DecoderSize", "Measurement", "flops_per_sequence", "measurements", "read_table", "table"]
