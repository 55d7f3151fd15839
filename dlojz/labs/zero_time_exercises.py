"""Lab 04: how long ZeRO-3 communicates, by the α–β model, layer by layer.

Layer 6 (labs). Invariant: the reference is the sum of the ring collectives that `dlojz.collectives` predicts with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

ALPHA_S, BETA_S_PER_BYTE = 10e-6, 1 / 25e9
"""The network of lab 03: 10 µs, 25 GB/s."""
FLOPS_PER_S = 200e12
"""What a GPU sustains in bf16; about half of what its data sheet promises."""
MICRO_BATCH = 16
PASSES = 3
"""Per layer and micro-batch: gathered for forward, gathered for backward, gradients reduce-scattered."""


def zero_3_seconds(layer_bytes: Sequence[float], ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Seconds that ZeRO-3 communicates for one micro-batch if nothing is hidden behind the computation.

    For each layer of n bytes three ring collectives of p − 1 steps: 3 (p − 1) (α + β n / p).

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7.2.2; Thakur, Rabenseifner & Gropp 2005, §4.1 and §4.2.
    """
    return sum(_ring(PASSES, size, ranks, alpha_s, beta_s_per_byte) for size in layer_bytes)


def all_at_once_seconds(
    layer_bytes: Sequence[float], ranks: int, alpha_s: float, beta_s_per_byte: float, *, passes: int = 2
) -> float:
    """The same for messages that hold the whole model: stages 0 to 2, where nothing has to wait for a layer."""
    return _ring(passes, sum(layer_bytes), ranks, alpha_s, beta_s_per_byte)


def compare_with_compute(
    model: str, ranks: int, zero_3: Callable[[Sequence[float], int, float, float], float] = zero_3_seconds
) -> dict[str, float]:
    """Seconds of communication over seconds of computation in one step of a model, for stages 2 and 3, in bf16.

    Args:
        model: of the catalogue; its blocks are the layers.
        ranks: at least 1.
        zero_3: gives the seconds of stage 3.
    """
    from dlojz.config import RunConfig
    from dlojz.predict.compute import step_flops
    from dlojz.predict.shapes import model_shapes

    config = RunConfig.of(model=model, data="synthetic", precision="bf16", dp=ranks, zero=3, micro_batch=MICRO_BATCH)
    compute_s = step_flops(config) / FLOPS_PER_S
    layers = [2.0 * sum(parameter.numel for parameter in block) for block in model_shapes(config).blocks()]
    return {
        "ZeRO-2": all_at_once_seconds(layers, ranks, ALPHA_S, BETA_S_PER_BYTE) / compute_s,
        "ZeRO-3": zero_3(layers, ranks, ALPHA_S, BETA_S_PER_BYTE) / compute_s,
    }


def _ring(passes: int, message_bytes: float, p: int, a: float, b: float) -> float:
    return passes * (p - 1) * (a + b * message_bytes / p)


def _networks() -> Iterator[tuple[list[int], int, float, float]]:
    yield [4_000, 8_000, 4_000], 4, 1e-3, 1e-6
    yield [1_000_000], 8, 2e-3, 5e-8
    yield [640, 1_280, 6_400, 64, 64], 2, 5e-4, 3e-7
    yield [900, 900], 1, 1e-3, 1e-6


def _by_layer(passes: int) -> Mistake:
    first = Said(
        "That is the gradients alone, or the weights alone: count the two all-gathers of the weights and the "
        "reduce-scatter of the gradients, three collectives per layer.",
        "C’est là une seule communication par couche : comptez les deux all-gather des poids et le reduce-scatter des "
        "gradients, soit trois communications collectives par couche.",
    )
    second = Said(
        "That makes two collectives per layer. The weights are gathered twice, as they are freed after the forward "
        "pass, and the gradients reduced: three.",
        "Cela fait deux communications collectives par couche. Les poids sont rassemblés deux fois, puisqu’ils sont "
        "libérés après la passe avant, et les gradients réduits : cela fait trois.",
    )
    return Mistake(
        lambda sizes, p, a, b: sum(_ring(passes, size, p, a, b) for size in sizes), first if passes == 1 else second
    )


ZERO_TIME = Exercise(
    id="zero-time",
    title=Said("when ZeRO-3 loses", "quand ZeRO-3 est perdant"),
    judge=by_reference(
        zero_3_seconds,
        cases=_networks,
        mistakes=(
            _by_layer(1),
            _by_layer(2),
            Mistake(
                lambda sizes, p, a, b: all_at_once_seconds(sizes, p, a, b, passes=PASSES),
                Said(
                    "The bytes are right, but you send all layers in one message. ZeRO-3 gathers layer by layer: the "
                    "latency is paid for each.",
                    "Les octets sont justes, mais vous envoyez toutes les couches en un seul message. ZeRO-3 "
                    "rassemble couche par couche : la latence se paie pour chacune.",
                ),
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * (a + b * (p - 1) / p * size) for size in sizes),
                Said(
                    "α is paid once per collective here; yet a ring all-gather, like a reduce-scatter, takes p − 1 "
                    "steps, and each begins with a latency.",
                    "α n’est payée ici qu’une fois par communication collective ; or un all-gather en anneau, comme un "
                    "reduce-scatter, fait p − 1 étapes, et chacune commence par une latence.",
                ),
            ),
            Mistake(
                lambda sizes, p, a, b: sum(_ring(2 * PASSES, size, p, a, b) for size in sizes),
                Said(
                    "You count three all-reduces. An all-gather, or a reduce-scatter, is half of one: p − 1 steps.",
                    "Vous comptez trois all-reduce. Un all-gather, ou un reduce-scatter, n’en est que la moitié : "
                    "p − 1 étapes.",
                ),
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * (p - 1) * (a + b * size) for size in sizes),
                Said(
                    "Each step carries the whole layer here; in a ring it carries one share of it, n / p.",
                    "Chaque étape transporte ici toute la couche ; dans un anneau, elle n’en transporte qu’une part, "
                    "n / p.",
                ),
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * (p - 1) * b * size / p for size in sizes),
                Said(
                    "The latency is missing: it is what hurts with many small layers.",
                    "La latence manque : c’est elle qui fait mal quand les couches sont petites et nombreuses.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: 3 (p − 1) latencies per layer, whatever its size. Small layers on many ranks pay little else.",
        "Exact : 3 (p − 1) latences par couche, quelle que soit sa taille. De petites couches sur beaucoup de rangs ne "
        "paient presque que cela.",
    ),
    hints=(
        Said(
            "How many collectives does one layer need in a forward and a backward pass, and how many steps has each of "
            "them in a ring?",
            "De combien de communications collectives une couche a-t-elle besoin en une passe avant et une passe "
            "arrière, et combien d’étapes chacune compte-t-elle dans un anneau ?",
        ),
        Said(
            "The sum over the layers of 3 (ranks − 1) · (alpha_s + beta_s_per_byte · n / ranks).",
            "La somme sur les couches de 3 (ranks − 1) · (alpha_s + beta_s_per_byte · n / ranks).",
        ),
    ),
)
