"""What a comparison is: quantities in pairs, predicted and measured; one row per run.

Layer 4, made by `dlojz.compare`. Invariant: what is derived here (sums, verdicts) is derived from the pairs alone; a
figure that is not known stays `None`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dlojz.footprint import STATES, Collective, Traffic
from dlojz.schema import Contract
from dlojz.text import say
from dlojz.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


class Pair(Contract):
    """One quantity, predicted and measured; `None` where not known."""

    predicted: int | float | None = None
    measured: int | float | None = None

    @property
    def equal(self) -> bool | None:
        """Whether both are the same number; None where one is not known."""
        return None if self.predicted is None or self.measured is None else self.predicted == self.measured


class TrafficPair(Contract):
    """What rank 0 hands to one collective per step, predicted and measured."""

    collective: Collective
    group: str
    message_bytes: Pair
    count: Pair


class Row(Contract):
    """One run: how it ended, and each quantity predicted and measured (rank 0, per training step)."""

    run_id: str
    title: str = Field(description="the layout as a person names it")
    model: str
    strategy: str
    world_size: int
    global_batch: int
    status: str = Field(description="a final status, or queued or running")
    reason: str = Field("", description="why the run ended so; empty for a completed run")
    prediction_note: str = Field("", description="why there is no prediction; empty where there is one")
    run_note: str = Field("", description="what of the run does nothing, and why; mostly empty")
    losses: tuple[float, ...] = ()
    serial_losses: tuple[float, ...] | None = Field(
        None, description="of the same training on one process, if it is among the records: what parallel must give"
    )
    first_loss: Pair = Pair()
    last_loss: Pair = Pair()
    samples_per_s: Pair = Field(
        Pair(),
        description="predicted: dp × the throughput of the same training on one process, × a pipeline's speed-up",
    )
    step_s: float | None = None
    pipeline_s: Pair = Field(
        Pair(), description="a pipeline's schedule, without the update; predicted: simulated with the measured actions"
    )
    bubble_fraction: Pair = Field(Pair(), description="idle share of the ranks in it, simulated likewise and measured")
    communication_exposed_s: float | None = Field(None, description="measured: waiting for it after backward")
    communication_hidden_s: float | None = Field(None, description="measured: under way while backward computed")
    step_flops: Pair = Pair()
    memory_bytes: dict[str, Pair] = Field(default_factory=dict, description="by category, and `peak`")
    max_peak_bytes: int | None = Field(None, description="largest measured peak over all ranks")
    limit_bytes: int | None = Field(
        None, description="what a rank could take where it ran: memory of its GPU, or its share of the machine's"
    )
    limit_of: str = Field("", description="whose limit that is, in words")
    communication: tuple[TrafficPair, ...] = ()
    unequal_ranks: tuple[int, ...] = Field((), description="ranks whose collectives moved other bytes than predicted")

    @property
    def exact(self) -> bool | None:
        """Whether, on every rank, every collective moved exactly the bytes predicted; None where one is not known."""
        verdict = _all(traffic.message_bytes.equal for traffic in self.communication)
        return verdict and not self.unequal_ranks

    @property
    def loss_gap(self) -> float | None:
        """Largest relative difference to the losses of one process, over the steps that both have."""
        common = list(zip(self.losses, self.serial_losses or (), strict=False))
        return max((abs(own - serial) / max(abs(serial), 1e-30) for own, serial in common), default=None)

    @property
    def communication_bytes(self) -> Pair:
        """Message bytes of all collectives of one step."""
        pairs = [traffic.message_bytes for traffic in self.communication]
        return Pair(predicted=_sum(pair.predicted for pair in pairs), measured=_sum(pair.measured for pair in pairs))

    @property
    def sent_bytes(self) -> float | None:
        """What rank 0 sends per step when the collectives it was seen to call run as rings; None if none was seen."""
        seen = [
            Traffic(
                collective=pair.collective,
                group=pair.group,
                group_size=self.world_size,
                message_bytes=int(pair.message_bytes.measured),
            ).sent_bytes
            for pair in self.communication
            if pair.message_bytes.measured is not None
        ]
        return sum(seen) if seen else None

    @property
    def states_bytes(self) -> Pair:
        """Weights, gradients, optimizer states, master copies and buffers together."""
        pairs = [self.memory_bytes[name] for name in STATES]
        return Pair(predicted=_sum(pair.predicted for pair in pairs), measured=_sum(pair.measured for pair in pairs))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, with what is derived from it."""
        return {**super().to_dict(), "exact": self.exact, "loss_gap": self.loss_gap}


class Comparison(Contract):
    """Several runs side by side; shows itself as a table in a notebook and in a terminal."""

    schema_version: Literal[1] = 1
    rows: tuple[Row, ...]

    @property
    def exact(self) -> bool | None:
        """Whether every run that was measured moved exactly the bytes predicted; None if none was."""
        return _all(row.exact for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, with what is derived from it."""
        return {
            "schema_version": self.schema_version,
            "exact": self.exact,
            "rows": [row.to_dict() for row in self.rows],
        }

    def markdown(self) -> str:
        """The table as Markdown: quantities as rows, runs as columns, each cell predicted | measured."""
        from dlojz.viz.markup import markdown

        return markdown(self)

    def figure(self, path: str | Path | None = None) -> Figure:
        """Memory, communication, throughput and losses in one figure; saved as a picture if a path is given.

        Raises:
            LabError: if the picture cannot be written.
        """
        from dlojz.viz.compare_figure import compare_figure

        return compare_figure(self, path)

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        from dlojz.viz.findings import findings

        return findings(self) + self._limits()

    def _limits(self) -> list[str]:
        """How near the fullest rank came to the limit of what it ran on."""
        known = [row for row in self.rows if row.limit_bytes and row.max_peak_bytes]
        if not known:
            return []
        row = max(known, key=lambda row: (row.max_peak_bytes or 0) / (row.limit_bytes or 1))
        share = f"{100 * (row.max_peak_bytes or 0) / (row.limit_bytes or 1):.2g}"
        limit, peak = format_bytes(row.limit_bytes), format_bytes(row.max_peak_bytes)
        return [
            say(
                en=f"Limit: {row.title} came nearest to it, with a peak of {peak}, {share} % of {limit} "
                f"({row.limit_of}).",
                fr=f"Limite : {row.title} s’en approche le plus, avec un pic de {peak}, soit "
                f"{share.replace('.', ',')} % de {limit} ({row.limit_of}).",
            )
        ]

    def __repr__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        from dlojz.viz.markup import html_table

        return html_table(self)

    def __rich__(self) -> RenderableType:
        from dlojz.viz.tables import comparison_table

        return comparison_table(self)


def _sum(values: Iterable[int | float | None]) -> int | float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    known = [verdict for verdict in verdicts if verdict is not None]
    return all(known) if known else None
