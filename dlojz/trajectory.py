"""What a training on text went through, step by step, and on text that it never saw.

Layer 1. Invariant: all series of one trajectory have one entry per step; a figure reads them and computes nothing else.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal, Self

from pydantic import Field, model_validator

from dlojz.config import RunConfig
from dlojz.record import RunRecord
from dlojz.schema import Contract, LabError
from dlojz.text import say

SPIKE = 1.2
"""A step is a spike where its loss is so many times the smallest before it.

Source: Li et al. 2021 (arXiv 2108.06084), whose loss ratio this is."""


class HeldOut(Contract):
    """The loss on text that is not trained on, at the whole length whatever the length of the step."""

    step: int = Field(ge=0, description="steps done before")
    tokens: int = Field(ge=0, description="tokens read before")
    seconds: float = Field(ge=0, description="seconds of the steps done before")
    loss: float


class Trajectory(Contract):
    """One training, step by step."""

    schema_version: Literal[1] = 1
    config: RunConfig
    lengths: tuple[int, ...] = Field(description="tokens per sample")
    tokens: tuple[int, ...] = Field(description="tokens of the global batch")
    step_s: tuple[float, ...] = Field(description="seconds of the step")
    losses: tuple[float, ...] = Field(description="training loss, on samples of the step's own length")
    variance_norm: tuple[float, ...] = Field((), description="L1 norm of Adam's √v after the step; empty: not recorded")
    variance_max: tuple[float, ...] = Field((), description="largest number of Adam's √v after the step")
    diverged: bool = Field(False, description="whether it ended with a loss that is no number")
    held_out: tuple[HeldOut, ...] = Field((), description="losses on text that is not trained on")

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        steps = len(self.losses)
        series = {name: len(getattr(self, name)) for name in ("lengths", "tokens", "step_s")}
        series |= {name: len(getattr(self, name)) or steps for name in ("variance_norm", "variance_max")}
        for name, entries in series.items():
            if entries != steps:
                raise LabError(
                    say(
                        en=f"a trajectory of {steps} losses has {entries} {name}: give one of each per step.",
                        fr=f"une trajectoire de {steps} pertes a {entries} {name} : donnez-en une par pas.",
                    )
                )
        return self

    @classmethod
    def of(cls, record: RunRecord) -> Self:
        """The trajectory of a recorded run on text; of its losses on other text, and of Adam's √v, nothing is known.

        Raises:
            LabError: if the record tells no tokens: of images, or written before tokens were told.
        """
        if not record.losses or len(record.step_tokens) != len(record.losses):
            raise LabError(
                say(
                    en=f"the record of {record.title} tells no tokens, so its losses cannot be laid against them: run "
                    "a text model again.",
                    fr=f"le bilan de {record.title} ne donne pas ses tokens, on ne peut donc pas leur rapporter ses "
                    "losses : relancez un modèle de texte.",
                )
            )
        batch = record.config.layout.global_batch
        return cls(
            config=record.config,
            lengths=tuple(tokens // batch for tokens in record.step_tokens),
            tokens=record.step_tokens,
            step_s=record.step_s,
            losses=record.losses,
        )

    @property
    def tokens_read(self) -> tuple[int, ...]:
        """Tokens read by the end of each step."""
        return tuple(accumulate(self.tokens))

    @property
    def seconds_spent(self) -> tuple[float, ...]:
        """Seconds of the steps up to the end of each."""
        return tuple(accumulate(self.step_s))

    @property
    def loss_ratios(self) -> tuple[float, ...]:
        """Each loss over the smallest before it; 1 for the first. Above 1 the training went back.

        Source: Li et al. 2021 (arXiv 2108.06084).
        """
        if not self.losses:
            return ()
        smallest = accumulate(self.losses, min)
        return (1.0, *(loss / least for loss, least in zip(self.losses[1:], smallest, strict=False)))

    def spikes(self, ratio: float = SPIKE) -> tuple[int, ...]:
        """Numbers of the steps whose loss ratio is above so much."""
        return tuple(step for step, found in enumerate(self.loss_ratios) if found > ratio)

    def seconds_by_length(self) -> dict[int, float]:
        """Median seconds of a step of each length."""
        from statistics import median

        by_length: dict[int, list[float]] = {}
        for length, step_s in zip(self.lengths, self.step_s, strict=True):
            by_length.setdefault(length, []).append(step_s)
        return {length: median(times) for length, times in sorted(by_length.items())}
