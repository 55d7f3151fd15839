"""Exercises of lab 04 on costs: bytes sent by stage, ZeRO-3's time, offloading, DeepSpeed's configuration.

Volumes are those of `dlojz.by_hand.zero`, its collectives run as rings; times follow the α–β model, layer by layer. A
configuration is judged by what DeepSpeed would do with it, read back by `dlojz.config.deepspeed_json`: no text is
compared, and keys that change nothing are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlojz.base.language import MEBIBYTE, shortest
from dlojz.config.run_config import RunConfig
from dlojz.labs.kit.exercise import Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, asked_run, check_settings, expect_json


def sent_bytes(weight_bytes: float, ranks: int, stage: int, micro_batches: int) -> float:
    """Bytes that one rank sends per optimizer step; gradients take as many bytes as weights.

    Each reduce-scatter or all-gather of the whole model sends (N − 1) / N times its bytes. Stages 0 and 1: one of each
    per step. Stage 2: one reduce-scatter per micro-batch, one all-gather. Stage 3: per micro-batch two all-gathers
    and one reduce-scatter.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7, for one micro-batch; a ring sends (N − 1) / N per pass.
    """
    return passes(stage, micro_batches) * (ranks - 1) / ranks * weight_bytes


def passes(stage: int, micro_batches: int = 1) -> int:
    """How many times the whole model goes through a reduce-scatter or an all-gather in one step."""
    return (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def _steps() -> Iterator[tuple[int, int, int, int]]:
    for weight_bytes, ranks, micro_batches in ((8_000, 4, 1), (36_000, 6, 4), (1_000, 2, 3), (500, 1, 2)):
        for stage in (3, 1, 0, 2):
            yield weight_bytes, ranks, stage, micro_batches


def _times(count: tuple[int, ...], w: float, n: int, stage: int) -> float:
    return count[stage] * (n - 1) / n * w


ZERO_VOLUME = Exercise(
    id="zero-volume",
    title=Said("bytes sent, by stage", "octets envoyés selon le niveau"),
    judge=Judge(
        sent_bytes,
        cases=_steps,
        mistakes=(
            Mistake(
                lambda w, n, stage, m: _times((2 * m, 2, m + 1, 3 * m), w, n, stage),
                "In stage 0 you all-reduce with every micro-batch: gradients are accumulated whole on each rank, and "
                "reduced once per step (no_sync in DDP).",
                "Au niveau 0, vous faites un all-reduce à chaque micro-batch : chaque rang cumule des gradients "
                "entiers, réduits une fois par pas (no_sync avec DDP).",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, 2, 3 * m), w, n, stage),
                "In stage 2 you reduce once per step: no rank keeps a whole gradient to add to, so it reduces with "
                "every micro-batch.",
                "Au niveau 2, vous réduisez une fois par pas : aucun rang ne garde de gradient entier auquel ajouter "
                "le suivant, on réduit donc à chaque micro-batch.",
            ),
            Mistake(
                lambda w, n, stage, m: passes(stage, m) * w,
                "The number of passes is right, but a rank never sends the part that is its own: (N − 1) / N of "
                "the bytes each time; try ranks = 1, where nothing is sent.",
                "Le nombre de passages est juste, mais un rang n’envoie jamais la part qui est la sienne : "
                "(N − 1) / N des octets à chaque fois ; essayez ranks = 1, où rien n’est envoyé.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, 2, 3), w, n, stage),
                "That is right for one micro-batch. Stages 2 and 3 keep no whole gradient to add to: they reduce "
                "with every micro-batch, and stage 3 gathers the weights for each.",
                "C’est juste pour un seul micro-batch. Les niveaux 2 et 3 ne gardent pas de gradient entier auquel "
                "ajouter le suivant : ils réduisent à chaque micro-batch, et le niveau 3 rassemble les poids pour "
                "chacun.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2 * m, 2 * m, 2 * m, 3 * m), w, n, stage),
                "Not everything is repeated with every micro-batch: stages 0 and 1 accumulate whole gradients and "
                "reduce once; and up to stage 2 the weights are gathered once, after the update.",
                "Tout ne se répète pas à chaque micro-batch : les niveaux 0 et 1 cumulent des gradients entiers et "
                "réduisent une seule fois ; et jusqu’au niveau 2, les poids sont rassemblés une seule fois, après "
                "la mise à jour.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, 2 * m, 3 * m), w, n, stage),
                "Almost: in stage 2 only the reduce-scatter is repeated with every micro-batch; the weights are "
                "gathered once, after the update.",
                "Presque : au niveau 2, seul le reduce-scatter se répète à chaque micro-batch ; les poids sont "
                "rassemblés une seule fois, après la mise à jour.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, m + 1, 2 * m), w, n, stage),
                "In stage 3 the weights are freed after the forward pass: each micro-batch gathers them twice, for "
                "forward and for backward, and reduces its gradients besides.",
                "Au niveau 3, les poids sont libérés après la passe avant : chaque micro-batch les rassemble deux "
                "fois, pour la passe avant et pour la passe arrière, et réduit en plus ses gradients.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, m, 3 * m), w, n, stage),
                "In stage 2 the all-gather of the updated weights is missing, once per step.",
                "Au niveau 2, il manque l’all-gather des poids mis à jour, une fois par pas.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((1, 1, m + 1, 3 * m), w, n, stage),
                "In stages 0 and 1 one pass is missing: an all-reduce is a reduce-scatter and an all-gather, and "
                "stage 1 brings the updated weights together.",
                "Aux niveaux 0 et 1, il manque un passage : un all-reduce est un reduce-scatter et un all-gather, "
                "et le niveau 1 rassemble les poids mis à jour.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, m + 1, m + 1, 3 * m), w, n, stage),
                "In stage 1 the gradients are accumulated whole, and reduced once per step; stage 2 reduces with "
                "every micro-batch.",
                "Au niveau 1, les gradients sont cumulés entiers, et réduits une fois par pas ; c’est le niveau 2 "
                "qui réduit à chaque micro-batch.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, m + 1, m), w, n, stage),
                "In stage 3 you count one pass per micro-batch; there are three: the weights for forward, again "
                "for backward, and the gradients.",
                "Au niveau 3, vous comptez un passage par micro-batch ; il y en a trois : les poids pour la passe "
                "avant, de nouveau pour la passe arrière, et les gradients.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((4, 2, m + 1, 3 * m), w, n, stage),
                "In stage 0 there is one all-reduce, two passes; the weights are not communicated.",
                "Au niveau 0, il y a un all-reduce, soit deux passages ; les poids ne sont pas communiqués.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 2, m + 1, 2 * m + 1), w, n, stage),
                "In stage 3 the gradients too are reduced with every micro-batch, since no rank keeps whole ones.",
                "Au niveau 3, les gradients aussi sont réduits à chaque micro-batch, puisqu’aucun rang n’en garde "
                "d’entiers.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((2, 3, m + 2, 3 * m), w, n, stage),
                "For stages 1 and 2 that is an all-reduce of the gradients plus an all-gather of the weights. "
                "A rank needs its own share of the sum alone: a reduce-scatter is enough, half an all-reduce.",
                "Aux niveaux 1 et 2, c’est là un all-reduce des gradients plus un all-gather des poids. Or un rang "
                "n’a besoin que de sa part de la somme : un reduce-scatter suffit, soit la moitié d’un all-reduce.",
            ),
            Mistake(
                lambda w, n, stage, m: _times((1, 2, m + 1, 3 * m), w, n, stage),
                "An all-reduce counts twice: it is a reduce-scatter, then an all-gather.",
                "Un all-reduce compte deux fois : c’est un reduce-scatter, suivi d’un all-gather.",
            ),
        ),
    ),
    praise_en="Right: with one micro-batch 2Ψ, 2Ψ, 2Ψ and 3Ψ. Stage 3 costs 50% more; accumulation widens the gap.",
    praise_fr="Exact : avec un seul micro-batch, 2Ψ, 2Ψ, 2Ψ et 3Ψ. Le niveau 3 coûte 50 % de plus ; l’accumulation "
    "creuse l’écart.",
    hint_en="Count, for each stage, how often the whole model goes through a reduce-scatter or an all-gather in one "
    "step. An all-reduce is one of each.",
    hint_fr="Comptez, pour chaque niveau, combien de fois le modèle entier passe par un reduce-scatter ou un "
    "all-gather au cours d’un pas. Un all-reduce, c’est l’un puis l’autre.",
    nearer_en="Stages 0 and 1: 2 passes. Stage 2: micro_batches + 1. Stage 3: 3 · micro_batches. Each pass sends "
    "weight_bytes · (ranks − 1) / ranks.",
    nearer_fr="Niveaux 0 et 1 : 2 passages. Niveau 2 : micro_batches + 1. Niveau 3 : 3 · micro_batches. Chaque passage "
    "envoie weight_bytes · (ranks − 1) / ranks.",
)


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
    from dlojz.config.run_config import RunConfig
    from dlojz.prediction.compute import step_flops
    from dlojz.prediction.shapes import model_shapes

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
        lambda sizes, p, a, b: sum(_ring(passes, size, p, a, b) for size in sizes),
        *(first if passes == 1 else second),
    )


ZERO_TIME = Exercise(
    id="zero-time",
    title=Said("when ZeRO-3 loses", "quand ZeRO-3 fait perdre du temps"),
    judge=Judge(
        zero_3_seconds,
        cases=_networks,
        mistakes=(
            _by_layer(1),
            _by_layer(2),
            Mistake(
                lambda sizes, p, a, b: all_at_once_seconds(sizes, p, a, b, passes=PASSES),
                "The bytes are right, but you send all layers in one message. ZeRO-3 gathers layer by layer: the "
                "latency is paid for each.",
                "Les octets sont justes, mais vous envoyez toutes les couches en un seul message. ZeRO-3 "
                "rassemble couche par couche : la latence se paie pour chacune.",
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * p * (a + b * size / p) for size in sizes),
                "One step too many: a ring all-gather, or reduce-scatter, takes p − 1; try ranks = 1, where "
                "nothing is sent.",
                "Une étape de trop : un all-gather ou un reduce-scatter en anneau en compte p − 1 ; essayez ranks "
                "= 1, où rien n’est envoyé.",
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * (a + b * size / p) for size in sizes),
                "You count one step per collective; in a ring there are p − 1.",
                "Vous comptez une étape par communication collective ; dans un anneau, il y en a p − 1.",
            ),
            Mistake(
                lambda sizes, p, a, b: max(_ring(PASSES, size, p, a, b) for size in sizes),
                "That is the slowest layer; the layers come one after the other, so their times add up.",
                "C’est la couche la plus lente ; les couches se suivent, leurs durées s’ajoutent donc.",
            ),
            Mistake(
                lambda sizes, p, a, b: zero_3_seconds(sizes[:-1], p, a, b),
                "The last layer is missing: look at where your loop ends.",
                "Il manque la dernière couche : regardez où finit votre boucle.",
            ),
            Mistake(
                lambda sizes, p, a, b: _ring(PASSES, sum(sizes) / len(sizes), p, a, b),
                "That is one layer of average size; each layer has its own three collectives.",
                "C’est une seule couche de taille moyenne ; chaque couche a ses trois communications collectives.",
            ),
            Mistake(
                lambda sizes, p, a, b: PASSES * (p - 1) * a * len(sizes),
                "The bytes are missing: each step carries n / p of them, which takes β · n / p.",
                "Il manque les octets : chaque étape en transporte n / p, ce qui prend β · n / p.",
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * (a + b * (p - 1) / p * size) for size in sizes),
                "α is paid once per collective here; yet a ring all-gather, like a reduce-scatter, takes p − 1 "
                "steps, and each begins with a latency.",
                "α n’est payée ici qu’une fois par communication collective ; or un all-gather en anneau, comme un "
                "reduce-scatter, fait p − 1 étapes, et chacune commence par une latence.",
            ),
            Mistake(
                lambda sizes, p, a, b: sum(_ring(2 * PASSES, size, p, a, b) for size in sizes),
                "You count three all-reduces. An all-gather, or a reduce-scatter, is half of one: p − 1 steps.",
                "Vous comptez trois all-reduce. Un all-gather, ou un reduce-scatter, n’en est que la moitié : "
                "p − 1 étapes.",
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * (p - 1) * (a + b * size) for size in sizes),
                "Each step carries the whole layer here; in a ring it carries one share of it, n / p.",
                "Chaque étape transporte ici toute la couche ; dans un anneau, elle n’en transporte qu’une part, "
                "n / p.",
            ),
            Mistake(
                lambda sizes, p, a, b: sum(PASSES * (p - 1) * b * size / p for size in sizes),
                "The latency is missing: it is what hurts with many small layers.",
                "La latence manque : c’est elle qui fait mal quand les couches sont petites et nombreuses.",
            ),
        ),
    ),
    praise_en="Right: 3 (p − 1) latencies per layer, whatever its size. Small layers on many ranks pay little else.",
    praise_fr="Exact : 3 (p − 1) latences par couche, quelle que soit sa taille. De petites couches sur beaucoup de "
    "rangs ne paient presque que cela.",
    hint_en="How many collectives does one layer need in a forward and a backward pass, and how many steps has each of "
    "them in a ring?",
    hint_fr="De combien de communications collectives une couche a-t-elle besoin en une passe avant et une passe "
    "arrière, et combien d’étapes chacune compte-t-elle dans un anneau ?",
    nearer_en="The sum over the layers of 3 (ranks − 1) · (alpha_s + beta_s_per_byte · n / ranks).",
    nearer_fr="La somme sur les couches de 3 (ranks − 1) · (alpha_s + beta_s_per_byte · n / ranks).",
)


Pair = tuple[float, float]
FLOPS_PER_TOKEN = 6
"""Per parameter: 2 in forward, 4 in backward (Kaplan et al. 2020, arXiv 2001.08361, §2.1)."""


def offload_bytes(parameters: float, ranks: int, offload: str) -> Pair:
    """Bytes of the model states of one rank on the device and in host memory: ZeRO-3, mixed precision, Adam.

    On the host the update works in fp32: master copy, gradient and two moments, 4 + 4 + 8 bytes.

    Source: Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv 2104.07857), §5.1; DeepSpeed 0.19 `runtime/zero/stage3.py`,
    which keeps the gradient on the host in fp32.
    """
    device, host = {"none": (16, 0), "optimizer": (2, 16), "parameters": (0, 18)}[offload]
    return device * parameters / ranks, host * parameters / ranks


def _offload_cases() -> Iterator[tuple[int, int, str]]:
    for parameters, ranks in ((8_000, 4), (13_000_000, 1), (960, 6)):
        for offload in ("optimizer", "none", "parameters"):
            yield parameters, ranks, offload


_BYTES_MISTAKES = (
    Mistake(
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (2, 16), "parameters": (2, 16)}),
        'For "parameters" you leave the weights on the device; they go to the host too, 2 bytes each.',
        "Pour « parameters », vous laissez les poids sur le GPU ; ils vont eux aussi chez l’hôte, 2 octets chacun.",
    ),
    *(
        Mistake(
            lambda p, n, offload, last=last: _parts(
                p, n, offload, {"none": (16, 0), "optimizer": (4, 16), "parameters": last}
            ),
            "On the device you still count the 16-bit gradients; each leaves for the host as soon as it is reduced.",
            "Sur le GPU, vous comptez encore les gradients sur 16 bits ; chacun part vers l’hôte dès qu’il est réduit.",
        )
        for last in ((2, 18), (0, 18))
    ),
    Mistake(
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (2, 16), "parameters": (0, 20)}),
        'For "parameters" you count the weights on the host in fp32; they keep their 2 bytes wherever they go.',
        "Pour « parameters », vous comptez chez l’hôte des poids en fp32 ; ils gardent partout leurs 2 octets.",
    ),
    Mistake(
        lambda p, n, offload: offload_bytes(p, n, offload)[::-1],
        "The two numbers are right, but swapped: first the device, then the host.",
        "Les deux nombres sont justes, mais intervertis : d’abord le GPU, ensuite la mémoire de l’hôte.",
    ),
    Mistake(
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (2, 12), "parameters": (0, 14)}),
        "The gradient is missing on the host: it is updated there, in fp32, so it takes 4 bytes per parameter there.",
        "Il manque le gradient du côté de l’hôte : la mise à jour s’y fait en fp32, il y prend donc 4 octets par "
        "paramètre.",
    ),
    Mistake(
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (2, 14), "parameters": (0, 16)}),
        "On the host the gradient is kept in fp32, as the update is done there: 4 bytes per parameter, not 2.",
        "Chez l’hôte, le gradient est gardé en fp32, puisque la mise à jour s’y fait : 4 octets par paramètre, et "
        "non 2.",
    ),
    Mistake(
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (4, 12), "parameters": (2, 14)}),
        "The gradients do not stay on the device: each leaves for the host as soon as it is reduced, as the "
        "update is done there.",
        "Les gradients ne restent pas sur le GPU : chacun part vers l’hôte dès qu’il est réduit, puisque la mise à "
        "jour s’y fait.",
    ),
    Mistake(
        lambda p, n, offload: _parts(p, 1, offload, {"none": (16, 0), "optimizer": (2, 16), "parameters": (0, 18)}),
        "These are the bytes of the whole model; with ZeRO-3 each rank has one N-th of them, on the host too.",
        "Ce sont les octets du modèle entier ; avec ZeRO-3, chaque rang n’en a qu’un N-ième, chez l’hôte aussi.",
    ),
    Mistake(
        lambda p, n, offload: (
            {"none": 16 / n, "optimizer": 2.0, "parameters": 0.0}[offload] * p,
            offload_bytes(p, n, offload)[1],
        ),
        "The weights on the device are not whole: with ZeRO-3 each rank keeps one N-th of them.",
        "Les poids sur le GPU ne sont pas entiers : avec ZeRO-3, chaque rang n’en garde qu’un N-ième.",
    ),
)


def _parts(p: float, n: int, offload: str, each: dict[str, tuple[int, int]]) -> Pair:
    device, host = each[offload]
    return device * p / n, host * p / n


OFFLOAD_BYTES = Exercise(
    id="offload-bytes",
    title=Said("what lies where", "ce qui se trouve où"),
    judge=Judge(
        offload_bytes,
        cases=_offload_cases,
        mistakes=_BYTES_MISTAKES,
        parts=(
            Said("the bytes on the device", "les octets sur le GPU"),
            Said("the bytes in host memory", "les octets dans la mémoire de l’hôte"),
        ),
    ),
    praise_en="Right. The host gives more than the device saves: 16 bytes for 14, as gradients are in fp32 there.",
    praise_fr="Exact. L’hôte fournit plus que le GPU n’économise : 16 octets pour 14, car les gradients y sont en "
    "fp32.",
    hint_en="List what the update on the host works with, in fp32: four numbers per parameter. What does the device "
    "still compute with?",
    hint_fr="Faites la liste de ce dont la mise à jour a besoin chez l’hôte, en fp32 : quatre nombres par paramètre. "
    "Et avec quoi le GPU calcule-t-il encore ?",
    nearer_en="Per parameter, over the number of ranks: none 16 and 0, optimizer 2 and 4 + 4 + 8, parameters 0 and "
    "that plus 2.",
    nearer_fr="Par paramètre, à diviser par le nombre de rangs : none, 16 et 0 ; optimizer, 2 et 4 + 4 + 8 ; "
    "parameters, 0 et la même chose plus 2.",
)


def transfer_over_compute(ranks: int, tokens: float, flops_per_s: float, pcie_bytes_per_s: float) -> float:
    """Seconds that gradients and weights take between device and host, over those that forward and backward take.

    Each rank sends its share of the gradients, 2Ψ/N bytes, and receives its share of the weights, 2Ψ/N; it computes
    6Ψ operations per token. Ψ cancels.

    Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), §4.2.2: 4 bytes per parameter and step.
    """
    return _ratio(4, ranks, tokens, flops_per_s, pcie_bytes_per_s)


def _ratio(
    each: float, n: float, tokens: float, flops: float, pcie: float, per_token: float = FLOPS_PER_TOKEN
) -> float:
    return (each / n / pcie) / (per_token * tokens / flops)


def _machines() -> Iterator[tuple[int, float, float, float]]:
    yield 4, 1000.0, 1e9, 1e6
    yield 1, 200.0, 4e6, 2e4
    yield 8, 5000.0, 6e8, 3e3


OFFLOAD_TIME = Exercise(
    id="offload-time",
    title=Said("when offloading pays", "quand le déchargement est rentable"),
    judge=Judge(
        transfer_over_compute,
        cases=_machines,
        mistakes=(
            Mistake(
                lambda n, tokens, flops, pcie: 1 / _ratio(4, n, tokens, flops, pcie),
                "It is the other way round: the seconds of the transfers over those of the computation.",
                "C’est l’inverse : les secondes de transfert, divisées par celles du calcul.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(2, n, tokens, flops, pcie),
                "That is one direction: gradients go down, and updated weights come back up.",
                "Cela ne compte qu’un sens : les gradients descendent, et les poids mis à jour remontent.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(4, 1, tokens, flops, pcie),
                "Each rank transfers its own share only, one N-th: every GPU has its link to the host.",
                "Chaque rang ne transfère que sa part, un N-ième : chaque GPU a son propre lien vers l’hôte.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(4, 1 / n, tokens, flops, pcie),
                "You multiply by the number of ranks; each transfers its own share, one N-th: divide.",
                "Vous multipliez par le nombre de rangs ; chacun ne transfère que sa part, un N-ième : divisez.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: 4 / n / pcie + 6 * tokens / flops,
                "You add both times; the question is how many times one holds the other: divide.",
                "Vous additionnez les deux durées ; on demande combien de fois l’une contient l’autre : divisez.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(4, n, tokens, flops, pcie, 4),
                "You count the backward pass alone, 4 operations per parameter and token: with forward there are 6.",
                "Vous ne comptez que la passe arrière, 4 opérations par paramètre et par token : avec la passe "
                "avant, il y en a 6.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(8, n, tokens, flops, pcie),
                "The transfers are in 16 bit, 2 bytes each way: the conversion to fp32 is done on the host.",
                "Les transferts se font sur 16 bits, 2 octets dans chaque sens : la conversion en fp32 a lieu chez "
                "l’hôte.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(16, n, tokens, flops, pcie),
                "Moments and master copy never travel: they are updated where they lie. Only gradients go down, "
                "and weights up.",
                "Les moments et la copie maître ne voyagent jamais : ils sont mis à jour là où ils se trouvent. "
                "Seuls les gradients descendent, et les poids remontent.",
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(4, n, tokens, flops, pcie, 2),
                "You count the forward pass alone, 2 operations per parameter and token: with backward there are 6.",
                "Vous ne comptez que la passe avant, 2 opérations par paramètre et par token : avec la passe "
                "arrière, il y en a 6.",
            ),
        ),
    ),
    praise_en="Right, and the size of the model has gone: what counts is how much each GPU computes between two "
    "updates.",
    praise_fr="Exact, et la taille du modèle a disparu : ce qui compte, c’est le calcul de chaque GPU entre deux mises "
    "à jour.",
    hint_en="For Ψ parameters: how many bytes does a rank send and receive, and how many operations does it compute? "
    "Ψ cancels.",
    hint_fr="Pour Ψ paramètres : combien d’octets un rang envoie-t-il et reçoit-il, et combien d’opérations "
    "calcule-t-il ? Ψ s’élimine.",
    nearer_en="Transfers: (2 + 2) / ranks / pcie_bytes_per_s. Computation: 6 · tokens / flops_per_s.",
    nearer_fr="Transferts : (2 + 2) / ranks / pcie_bytes_per_s. Calcul : 6 · tokens / flops_per_s.",
)


def bucket_elements(config: RunConfig, bucket_mib: float) -> int:
    """Gradients in a bucket of so many MiB: of 2 bytes each in bf16, 4 in fp32."""
    return int(bucket_mib * MEBIBYTE) // (2 if config.precision == "bf16" else 4)


def _json_cases() -> list[tuple[RunConfig, float]]:
    common = {"engine": "deepspeed", "model": "coatnet_tiny"}
    return [
        (RunConfig.of(dp=4, zero=2, micro_batch=8, **common), 50),
        (RunConfig.of(dp=2, zero=1, micro_batch=16, micro_batches=4, precision="bf16", **common), 10),
        (RunConfig.of(dp=8, zero=3, micro_batch=2, offload="parameters", precision="bf16", **common), 100),
        (RunConfig.of(dp=3, zero=2, micro_batch=5, micro_batches=2, offload="optimizer", **common), 25),
        (RunConfig.of(dp=16, zero=3, micro_batch=4, offload="optimizer", precision="bf16", **common), 200),
    ]


def _check_json(answer: Callable[..., Any], config: RunConfig, bucket_mib: float) -> None:
    document = expect_json(answer(config, bucket_mib))
    _check_batch(document, config)
    asked = asked_run(config, "dp", "zero", "micro_batch", "micro_batches", "precision", "offload")
    check_settings(document, config, asked)
    _check_bucket(document["zero_optimization"].get("reduce_bucket_size"), config, bucket_mib)


def _check_batch(document: Mapping[str, Any], config: RunConfig) -> None:
    layout = config.layout
    total, micro = document.get("train_batch_size"), document.get("train_micro_batch_size_per_gpu")
    if total is None and micro is None:
        raise Wrong(
            en="DeepSpeed refuses a file that gives no size of batch: write train_micro_batch_size_per_gpu, "
            "gradient_accumulation_steps, or train_batch_size, their product with the number of ranks.",
            fr="DeepSpeed refuse un fichier sans taille de batch : écrivez train_micro_batch_size_per_gpu, "
            "gradient_accumulation_steps, ou train_batch_size, leur produit par le nombre de rangs.",
        )
    if total == layout.micro_batch * layout.micro_batches != layout.global_batch:
        raise Wrong(
            en=f"train_batch_size={total} is the batch of one rank; DeepSpeed wants that of all {layout.dp} ranks: "
            "config.layout.global_batch.",
            fr=f"train_batch_size={total} est le batch d’un seul rang ; DeepSpeed attend celui des {layout.dp} "
            "rangs : config.layout.global_batch.",
        )
    if micro == layout.global_batch != layout.micro_batch:
        raise Wrong(
            en=f"train_micro_batch_size_per_gpu={micro} is the global batch; one rank reads {layout.micro_batch} "
            "samples in one forward pass: config.layout.micro_batch.",
            fr=f"train_micro_batch_size_per_gpu={micro} est le batch global ; un rang lit {layout.micro_batch} "
            "échantillons par passe avant : config.layout.micro_batch.",
        )


def _check_bucket(given: Any, config: RunConfig, bucket_mib: float) -> None:
    right, each = bucket_elements(config, bucket_mib), 2 if config.precision == "bf16" else 4
    if given == right:
        return
    if given is None:
        en, fr = (
            "reduce_bucket_size is missing; left out it is 500,000,000 elements, 1 GB in bf16.",
            "reduce_bucket_size manque ; par défaut, ce sont 500 000 000 éléments, soit 1 Go en bf16.",
        )
    elif given in (right * each, bucket_mib):
        en, fr = (
            f"reduce_bucket_size={given} is a number of bytes or MiB, but DeepSpeed counts elements, of {each} bytes "
            f"each in {config.precision}: {right}.",
            f"reduce_bucket_size={given} est un nombre d’octets ou de Mio, mais DeepSpeed compte des éléments, de "
            f"{each} octets chacun en {config.precision} : {right}.",
        )
    else:
        en, fr = (
            f"reduce_bucket_size={given}, but {shortest(bucket_mib)} MiB hold {right} gradients of {each} bytes "
            f"({config.precision}).",
            f"reduce_bucket_size={given}, or {shortest(bucket_mib)} Mio contiennent {right} gradients de {each} octets "
            f"({config.precision}).",
        )
    raise Wrong(en=en, fr=fr)


DEEPSPEED_JSON = Exercise(
    id="deepspeed-json",
    title=Said("DeepSpeed's JSON", "le JSON de DeepSpeed"),
    judge=Judge(cases=_json_cases, trial=_check_json),
    praise_en="Right: five runs, and DeepSpeed would do each of them as asked.",
    praise_fr="Exact : cinq exécutions, et DeepSpeed ferait chacune comme demandé.",
    hint_en="The top level has the sizes of batches, bf16 and zero_optimization; what is ZeRO's own (stage, bucket, "
    "offloading) goes into the latter.",
    hint_fr="Au premier niveau : les tailles de batch, bf16 et zero_optimization ; tout ce qui est propre à ZeRO "
    "(stage, bucket, déchargement) va dans cette dernière section.",
    nearer_en='zero_optimization: "stage", "reduce_bucket_size" (bucket_mib * 2**20 // 2 in bf16, // 4 in fp32) and, '
    'for offload "optimizer", "offload_optimizer": {"device": "cpu"}; for "parameters", "offload_param" as well.',
    nearer_fr='zero_optimization : "stage", "reduce_bucket_size" (bucket_mib * 2**20 // 2 en bf16, // 4 en fp32) et, '
    'pour offload "optimizer", "offload_optimizer": {"device": "cpu"} ; pour "parameters", "offload_param" en plus.',
)
