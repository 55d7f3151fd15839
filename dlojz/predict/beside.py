"""The field's rules of thumb and the papers' closed forms, each beside the figure of a forecast that it speaks of.

Layer 3. Invariant: a rule is laid beside the categories that it counts and no others, a form beside one traced layer;
the difference is a subtraction, never a judgement.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from statistics import median_low

from dlojz import models
from dlojz.config import RunConfig
from dlojz.footprint import Category
from dlojz.models.sizes import GPTSize, LlamaSize, ViTSize
from dlojz.predict.activation_forms import (
    Shape,
    infinity_activation_bytes,
    infinity_checkpoint_bytes,
    layer_bytes,
)
from dlojz.predict.forecast import Forecast
from dlojz.predict.model_trace import compute_of
from dlojz.predict.rules import RULES
from dlojz.predict.shapes import model_shapes
from dlojz.text import say

MASKS_PER_SBH = 2
"""Of Korthikanti's 34·s·b·h bytes, the masks of the two dropouts, 1 byte each (§4.1); our models have no dropout."""


@dataclass(frozen=True)
class Beside:
    """One figure from a formula beside the one of the forecast.

    Args:
        name: of the rule or of the form.
        formula: e.g. `16 Ψ` (Ψ: parameters of the model) or `34·sbh`.
        about: for whom it holds, in the reader's language.
        source: who says so.
        formula_bytes: what it gives for this run, were it on one process.
        forecast_bytes: what the rank holds, or the layer keeps, in the forecast.
    """

    name: str
    formula: str
    about: str
    source: str
    formula_bytes: int
    forecast_bytes: int

    @property
    def difference(self) -> float:
        """How much more the forecast is than the formula, as a share of the formula."""
        return self.forecast_bytes / self.formula_bytes - 1 if self.formula_bytes else 0.0


def rules_beside(forecast: Forecast) -> tuple[Beside, ...]:
    """Each rule of thumb for the whole model, beside what this rank holds of the categories that the rule counts.

    The master copy belongs to the weights wherever a rule counts these; a rule that counts activations is laid beside
    the peak.
    """
    parameters, memory = model_shapes(forecast.config).num_parameters, forecast.memory
    found = []
    for rule in RULES.values():
        counted: set[Category] = {part.category for part in rule.parts}
        if "activations" in counted:
            held = memory.peak_bytes or 0
        else:
            if "weights" in counted:
                counted.add("master")
            held = sum(memory.category(name) or 0 for name in counted)
        found.append(
            Beside(
                rule.name,
                f"{rule.bytes_per_parameter} Ψ",
                rule.about(),
                rule.sources[0],
                rule.total_bytes(parameters),
                held,
            )
        )
    return tuple(found)


def states_per_parameter(forecast: Forecast) -> float:
    """Bytes per parameter of the model that this rank holds as weights, gradients, optimizer states and master copy."""
    memory = forecast.memory
    states = memory.states_bytes - (memory.buffers_bytes or 0)
    return states / model_shapes(forecast.config).num_parameters


def transformer_shape(config: RunConfig) -> tuple[Shape, int] | None:
    """What the closed forms depend on, and the number of layers; None for a model that is no plain transformer.

    A ViT's sequence is its patches and the class token.
    """
    size = models.spec(config.model).size
    if isinstance(size, ViTSize):
        tokens = ((config.image_size or 0) // size.patch) ** 2 + 1
    elif isinstance(size, GPTSize | LlamaSize):
        tokens = config.sequence_length or 0
    else:
        return None
    return Shape(tokens, config.layout.micro_batch, size.width, size.num_heads), size.depth


def layer_trace_bytes(forecast: Forecast, layers: int) -> int:
    """What one transformer layer keeps for backward in the trace, for one micro-batch: the median of the rank's layers.

    0 for a rank that has none.
    """
    held: dict[str, int] = {}
    for path, num_bytes in forecast.activations_by_module.items():
        block = ".".join(path.split(".")[:2])
        held[block] = held.get(block, 0) + num_bytes
    own = [held[name] for number in range(1, layers + 1) if (name := f"blocks.{number}") in held]
    return median_low(own) if own else 0


def forms_beside(forecast: Forecast) -> tuple[Beside, ...]:
    """The papers' closed forms of one layer's activations beside the trace; none for a model that is no transformer.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), table 2; Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv
    2104.07857), §3.
    """
    found = transformer_shape(forecast.config)
    if found is None or not layer_trace_bytes(forecast, found[1]):
        return ()
    shape, layers = found
    traced = layer_trace_bytes(forecast, layers)
    forms = [_korthikanti(forecast.config, shape), _as_run(forecast.config, shape)]
    if forecast.config.layout.tp == 1:
        forms.append(_infinity(forecast.config, shape))
    return tuple(
        Beside(name, formula, about, source, round(num_bytes), traced)
        for name, formula, num_bytes, about, source in filter(None, forms)
    )


Form = tuple[str, str, Fraction, str, str]


def _korthikanti(config: RunConfig, shape: Shape) -> Form:
    layout = config.layout
    split = layout.tp > 1
    formula = {
        "none": "sbh(10 + 24/t) + 5·as²b/t" if split else "34·sbh + 5·as²b",
        "selective": "sbh(10 + 24/t)" if split else "34·sbh",
        "full": "2·sbh",
    }[layout.checkpointing]
    if split and layout.sequence_parallel:
        formula = {"none": "34·sbh/t + 5·as²b/t", "selective": "34·sbh/t", "full": "2·sbh/t"}[layout.checkpointing]
    kept = layout.checkpointing == "none"
    return (
        "Korthikanti",
        formula,
        layer_bytes(
            shape, tp=layout.tp, sequence_parallel=layout.sequence_parallel, checkpointing=layout.checkpointing
        ),
        say(en="16 bit, dropout, scores kept", fr="16 bits, dropout, scores gardés")
        if kept
        else say(en="16 bit, dropout", fr="16 bits, dropout"),
        "Korthikanti et al. 2022, arXiv 2205.05198, table 2",
    )


def _as_run(config: RunConfig, shape: Shape) -> Form | None:
    """The same with what our transformers are: no dropout, attention that keeps no scores, the run's precision."""
    layout = config.layout
    if layout.checkpointing == "selective" or layout.tp > 1 or isinstance(models.spec(config.model).size, LlamaSize):
        return None  # other tensors are kept: those of matrix products, whole inputs, a gated MLP
    words = 2 if config.precision == "fp32" else 1
    per_sbh = words * (2 if layout.checkpointing == "full" else 34 - MASKS_PER_SBH)
    return (
        say(en="the same as run here", fr="la même, comme ici"),
        f"{per_sbh}·sbh",
        Fraction(per_sbh * shape.sbh),
        say(
            en=f"{16 * words} bit, no dropout, fused attention",
            fr=f"{16 * words} bits, sans dropout, attention fusionnée",
        )
        + (
            say(en="; autocast keeps norms in fp32", fr=" ; autocast garde les normalisations en fp32")
            if compute_of(config) == "autocast"
            else ""
        ),
        "Korthikanti et al. 2022, arXiv 2205.05198, §4.1",
    )


def _infinity(config: RunConfig, shape: Shape) -> Form:
    full = config.layout.checkpointing == "full"
    return (
        "ZeRO-Infinity",
        "2·sbh" if full else "32·sbh + 4·as²b",
        infinity_checkpoint_bytes(shape, 1) if full else Fraction(infinity_activation_bytes(shape, 1)),
        say(en="16 bit", fr="16 bits"),
        "Rajbhandari et al. 2021, arXiv 2104.07857, §3",
    )


__all__ = [
    "Beside",
    "forms_beside",
    "layer_trace_bytes",
    "rules_beside",
    "states_per_parameter",
    "transformer_shape",
]
