"""Exercises of lab 06 beyond one layer: MBConv by channels, torch's `parallelize_module`, the bytes that a layer sends.

MBConv is held to the output and gradients of one process. A plan is applied on two ranks and its results are compared;
where they are wrong, the plan says which layer is the cause, and names that torch would pass over are refused.

Shape suffixes: B batch, C channels, c hidden channels of one rank, H and W of the feature map.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dlojz.base.language import a_or_an, say
from dlojz.by_hand.collectives.cost import cost_s
from dlojz.hardware.links import Link
from dlojz.labs.kit.exercise import Challenge, Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge
from dlojz.labs.kit.rank_judges import (
    COUNTED_AGAIN,
    NO_BACKWARD_SUM,
    NO_FORWARD_SUM,
    OF_X,
    OUTPUT,
    TENSOR_CASES,
    added,
    gradient,
    normals,
    only,
    refuse_gathers,
    times_ranks,
)
from dlojz.models.sizes import LlamaSize
from dlojz.processes.forks import RankAnswer

if TYPE_CHECKING:
    from torch import Tensor

CONVOLUTION_BATCH, CHANNELS, HIDDEN, SQUEEZED, SIDE = 2, 4, 12, 3, 5
NAMES = ("expand", "depthwise", "squeeze", "squeeze_bias", "excite", "excite_bias", "project")
_CUT: dict[str, int | None] = {
    "expand": 0, "depthwise": 0, "squeeze": 1, "squeeze_bias": None, "excite": 0, "excite_bias": 0, "project": 1,
}  # fmt: skip
"""The dimension along which each weight is sharded; None: whole on every rank."""
_JUDGED = ("depthwise", "squeeze", "squeeze_bias", "project")
_NAMES = (OUTPUT, OF_X, *(f"gradient of {name}" for name in _JUDGED))


def _inputs(seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """x, the coefficients of the loss, the whole weights."""
    image = (CONVOLUTION_BATCH, CHANNELS, SIDE, SIDE)
    shapes = ((HIDDEN, CHANNELS, 1, 1), (HIDDEN, 1, 3, 3), (SQUEEZED, HIDDEN), (SQUEEZED,), (HIDDEN, SQUEEZED),
              (HIDDEN,), (CHANNELS, HIDDEN, 1, 1))  # fmt: skip
    x, coefficients, *weights = normals(seed, image, image, *shapes)
    return x, coefficients, dict(zip(NAMES, weights, strict=True))


def _own(rank: int, size: int, seed: int) -> SimpleNamespace:
    whole = _inputs(seed)[2]
    parts = {name: whole[name] if dim is None else whole[name].chunk(size, dim)[rank] for name, dim in _CUT.items()}
    return SimpleNamespace(**{name: part.clone().requires_grad_() for name, part in parts.items()})  # fmt: skip


def _gradients(own: SimpleNamespace) -> dict[str, Any]:
    return {f"gradient of {name}": getattr(own, name).grad for name in _JUDGED}


def _convolution_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    import torch.distributed as dist

    from dlojz.by_hand.tensor.axis import TensorAxis

    x, coefficients, _ = _inputs(seed)
    x.requires_grad_()
    own = _own(rank, size, seed)
    y = answer(x, own, TensorAxis(dist.group.WORLD))
    if y is not None and y.shape == x.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_X: x.grad, **_gradients(own)}


def _only(parts: list[Tensor], rank: int) -> Tensor:
    """The sum of all ranks' parts, through which the gradient reaches this rank's part only."""
    return added(part if one == rank else part.detach() for one, part in enumerate(parts))


def _shares(rank: int, size: int, seed: int, way: str = "right") -> dict[str, Tensor]:
    """What each rank holds, its contribution to the gradient of x by itself; `way` spoils the gate."""
    import torch
    import torch.nn.functional as F

    x, coefficients, _ = _inputs(seed)
    ranks, owns = range(size), [_own(one, size, seed) for one in range(size)]
    xs = [x.clone().requires_grad_() for _ in ranks]
    hidden = []
    for x_BCHW, own in zip(xs, owns, strict=True):
        expanded = F.gelu(F.conv2d(x_BCHW, own.expand))
        hidden.append(F.gelu(F.conv2d(expanded, own.depthwise, padding=1, groups=len(own.depthwise))))
    squeezed = [h.mean((2, 3)) @ own.squeeze.T for h, own in zip(hidden, owns, strict=True)]
    partials = []
    for one, own in enumerate(owns):
        if way == "gate alone":
            summed = squeezed[one]
        else:
            summed = _only(squeezed, one) if way == "gate not entered" else added(squeezed)
        times = size if way == "bias everywhere" else 1
        inner = F.silu(summed + times * own.squeeze_bias)
        if way == "summed late":
            inner = added(F.silu(part + own.squeeze_bias) for part in squeezed)
        if way == "summed early":
            inner = F.silu(added(h.mean((2, 3)) for h in hidden) @ own.squeeze.T + own.squeeze_bias)
        gate = torch.sigmoid(inner @ own.excite.T + own.excite_bias)
        partials.append(F.conv2d(hidden[one] * gate[:, :, None, None], own.project))
    y = x + added(partials)
    (y * coefficients).sum().backward()
    of_x = coefficients + added(gradient(one) for one in xs)
    values = {OUTPUT: y, OF_X: of_x, **_gradients(owns[rank])}
    if way != "gate not entered":  # the bias is whole on every rank, and so is its gradient
        values["gradient of squeeze_bias"] = added(gradient(one.squeeze_bias) for one in owns)
    values |= {"own x": coefficients + gradient(xs[rank]), "partial": x + partials[rank]}
    return {name: value.detach() for name, value in values.items()}


def _whole(
    seed: int,
    act: str = "gelu",
    inner: str = "silu",
    gate: str = "sigmoid",
    pool: str = "mean",
    gated: str = "multiplied",
    shortcut: float = 1.0,
) -> dict[str, Tensor]:
    """The output of another block, computed in one process."""
    import torch
    import torch.nn.functional as F

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu, "relu": F.relu, "silu": F.silu, "sigmoid": torch.sigmoid, "none": lambda h: h,
        "mean": lambda h: h.mean((2, 3)), "sum": lambda h: h.sum((2, 3)), "largest": lambda h: h.amax((2, 3)),
    }  # fmt: skip
    x, _, weights = _inputs(seed)
    own = SimpleNamespace(**weights)
    h = ways[act](F.conv2d(x, own.expand))
    h = ways[act](F.conv2d(h, own.depthwise, padding=1, groups=len(own.depthwise)))
    squeezed = ways[inner](ways[pool](h) @ own.squeeze.T + own.squeeze_bias)
    opened = ways[gate](squeezed @ own.excite.T + own.excite_bias)[:, :, None, None]
    h = {"multiplied": h * opened, "added": h + opened, "not": h}[gated]
    return {OUTPUT: shortcut * x + F.conv2d(h, own.project)}


MBCONV_CHANNELS = Exercise(
    id="mbconv-channels",
    title=Said("MBConv by channels", "MBConv par canaux"),
    judge=Judge(
        only(_shares, _NAMES),
        on_ranks=True,
        cases=TENSOR_CASES,
        trial=_convolution_trial,
        faults=(
            Mistake(
                only(_shares, [OUTPUT], "gate alone"),
                "The gate of squeeze-excite sees this rank's channels only: squeeze is a layer by rows, its "
                "partial products are to be added up.",
                "La porte de squeeze-excite ne voit que les canaux de ce rang : squeeze est une couche par ligne, "
                "ses produits partiels sont à additionner.",
            ),
            Mistake(
                only(_shares, [OUTPUT], "bias everywhere"),
                "The bias of squeeze is added on every rank before the sum, so it counts as many times as there "
                "are ranks: add it once, after.",
                "Le biais de squeeze est ajouté sur chaque rang avant la somme, il compte donc autant de fois "
                "qu’il y a de rangs : ajoutez-le une fois, après.",
            ),
            Mistake(only(_shares, {OUTPUT: "partial"}), *NO_FORWARD_SUM),
            Mistake(
                only(_shares, (OUTPUT, "gradient of squeeze"), "gate not entered"),
                "The forward pass is right, but the gradient that reaches squeeze comes from this rank's gates "
                "only: excite is a layer by columns, with its own beginning (copy), whose backward adds up.",
                "La passe avant est juste, mais le gradient qui parvient à squeeze ne vient que des portes de ce rang "
                ": excite est une couche par colonne, avec sa propre entrée (copy), dont la passe arrière additionne.",
            ),
            Mistake(only(_shares, {OUTPUT: OUTPUT, OF_X: "own x"}), *NO_BACKWARD_SUM),
            Mistake(times_ranks(_shares, "gradient of project"), *COUNTED_AGAIN),
            Mistake(
                lambda *case: {
                    OUTPUT: _shares(*case)[OUTPUT],
                    OF_X: _shares(*case)[OF_X] + (case[1] - 1) * _inputs(case[2])[1],
                },
                "The residual connection goes through the region's entry: backward adds its gradient up over the "
                "ranks, though it is whole on each. Add the x that has not passed copy.",
                "La connexion résiduelle passe par l’entrée de la région : la passe arrière additionne son gradient "
                "sur les rangs, alors qu’il est entier sur chacun. Ajoutez le x qui n’est pas passé par copy.",
            ),
            *(
                Mistake(lambda rank, size, seed, change=change: _whole(seed, **change), en, fr)
                for change, en, fr in (
                    (
                        {"act": "relu"},
                        "The activation of the convolutions is another one: F.gelu.",
                        "L’activation des convolutions n’est pas la bonne : F.gelu.",
                    ),
                    (
                        {"inner": "relu"},
                        "The activation of squeeze is another one: F.silu.",
                        "L’activation de squeeze n’est pas la bonne : F.silu.",
                    ),
                    (
                        {"inner": "none"},
                        "The activation of squeeze is missing: F.silu.",
                        "Il manque l’activation de squeeze : F.silu.",
                    ),
                    (
                        {"gate": "none"},
                        "The gate is not between 0 and 1: torch.sigmoid.",
                        "La porte n’est pas entre 0 et 1 : torch.sigmoid.",
                    ),
                    (
                        {"pool": "sum"},
                        "You add the pixels up: squeeze takes the mean over height and width.",
                        "Vous additionnez les pixels : squeeze prend la moyenne sur hauteur et largeur.",
                    ),
                    (
                        {"pool": "largest"},
                        "You take the largest pixel: squeeze takes the mean over height and width.",
                        "Vous prenez le plus grand pixel : squeeze prend la moyenne sur hauteur et largeur.",
                    ),
                    (
                        {"shortcut": 0.0},
                        "The residual connection is missing: x + …",
                        "Il manque la connexion résiduelle : x + …",
                    ),
                    (
                        {"gated": "not"},
                        "The gate is not used: multiply the channels by it.",
                        "La porte ne sert pas : multipliez-en les canaux.",
                    ),
                    (
                        {"gated": "added"},
                        "The gate is added: multiply the channels by it.",
                        "La porte est ajoutée : multipliez-en les canaux.",
                    ),
                )
            ),
            Mistake(
                lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed)[OUTPUT] + (size - 1) * _inputs(seed)[0]},
                "x is added on every rank before the sum, so it counts as many times as there are ranks: add it after "
                "add_up.",
                "x est ajouté sur chaque rang avant la somme, il compte donc autant de fois qu’il y a de rangs : "
                "ajoutez-le après "
                "add_up.",
            ),
            *(
                Mistake(
                    only(_shares, [OUTPUT], way),
                    "The sum over the ranks comes at the wrong place: add up what squeeze has made of this rank's "
                    "channels, before its "
                    "bias and its activation.",
                    "La somme sur les rangs n’est pas au bon endroit : additionnez ce que squeeze a fait des canaux "
                    "de ce rang, avant "
                    "son biais et son activation.",
                )
                for way in ("summed late", "summed early")
            ),
            Mistake(
                lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed)[OUTPUT], OF_X: _inputs(seed)[1]},
                "The output is right, but no gradient comes through the convolutions: a detach(), or no_grad, cuts "
                "the way back.",
                "La sortie est juste, mais aucun gradient ne traverse les convolutions : un detach(), ou no_grad, "
                "coupe le retour.",
            ),
        ),
        inspect=refuse_gathers(
            "All is right, but channels are gathered on the way: only the few squeezed numbers depend on all "
            "channels, and these are a sum.",
            "Tout est juste, mais des canaux sont rassemblés en chemin : seuls les quelques nombres comprimés "
            "dépendent de tous les canaux, et ce sont des sommes.",
        ),
    ),
    praise_en="Right: the depthwise convolution asks nobody, the gate asks for a few numbers, the end for one "
    "all-reduce.",
    praise_fr="Exact : la convolution depthwise ne demande rien, la porte quelques nombres, la fin un all-reduce.",
    hint_en="A 1×1 convolution is a linear layer over the channels: expand by columns, project by rows. Which of the "
    "two is squeeze, and which is excite?",
    hint_fr="Une convolution 1×1 est une couche linéaire sur les canaux : expand par colonne, project par ligne. Que "
    "sont alors squeeze et excite ?",
    nearer_en="Four operators: copy(x, axis) before expand; add_up(pooled @ squeeze.T, axis) before its bias; "
    "copy(…, axis) before excite; add_up of the output of project. The residual connection adds x itself.",
    nearer_fr="Quatre opérateurs : copy(x, axis) avant expand ; add_up(pooled @ squeeze.T, axis) avant son biais ; "
    "copy(…, axis) avant excite ; add_up de la sortie de project. La connexion résiduelle ajoute x lui-même.",
)


SIZE = LlamaSize(width=24, depth=1, num_heads=6, num_kv_heads=6, mlp_width=24)
COLUMNS = ("query", "key", "value", "mlp_gate", "mlp_expand")
ROWS = ("attention_project", "mlp_project")
NORMS = ("norm1", "norm2")
PLAN_BATCH, TOKENS = 2, 5


def _block(seed: int) -> Any:
    import torch

    from dlojz.models.llama import LlamaBlock

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaBlock(SIZE)


def _input(seed: int) -> Tensor:
    import torch

    return torch.randn(PLAN_BATCH, TOKENS, SIZE.width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _plan_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Apply the plan, go forward and backward; with the bytes that this rank sends on a ring, over those of x."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    from dlojz.train.dispatch_trace import StorageTrace, traffic_of

    logging.disable(logging.CRITICAL)  # DTensor tells of a misfit in twenty lines before it raises
    block, x = _block(seed), _input(seed)
    parallelize_module(block, init_device_mesh("cpu", (size,)), answer())
    with StorageTrace({}) as trace:
        with CommDebugMode() as counted:
            y = block(x)
            forward = counted.get_total_counts()
        y.sum().backward()
    sent = sum(one.sent_bytes for one in traffic_of(trace.trace.calls, trace.step)) / x.nbytes
    whole = [name for name in (*COLUMNS, *ROWS) if not isinstance(getattr(block, name).weight, DTensor)]
    return {"forward": forward, "whole": whole, "sent": sent}, {OUTPUT: y, OF_X: x.grad}


def _plan_expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x = _input(seed)
    y = _block(seed)(x)
    y.sum().backward()
    return {OUTPUT: y.detach(), OF_X: gradient(x)}


def _refuse_no_plan(plan: object) -> Mapping[str, Any]:
    from torch.distributed.tensor.parallel import ParallelStyle

    if not isinstance(plan, Mapping):
        raise Wrong(
            en=f"A dictionary is expected, name of a layer to its style, but {a_or_an(type(plan).__name__)} was "
            "returned.",
            fr="On attend un dictionnaire, du nom d’une couche vers son style, mais votre fonction renvoie un "
            f"objet de type {type(plan).__name__}.",
        )
    known = (*COLUMNS, *ROWS, *NORMS)
    for name, style in plan.items():
        if not any(fnmatch(one, str(name)) for one in known):
            raise Wrong(
                en=f"The block has no layer {name!r}; torch passes over such a name and splits nothing. Its layers "
                f"are {', '.join((*COLUMNS, *ROWS))}.",
                fr=f"Le bloc n’a pas de couche {name!r} ; torch ignore un tel nom et ne découpe rien. Ses couches "
                f"sont {', '.join((*COLUMNS, *ROWS))}.",
            )
        if not isinstance(style, ParallelStyle):
            raise Wrong(
                en=f"{name!r} needs an instance of a style, such as ColwiseParallel(), but {style!r} was given.",
                fr=f"{name!r} demande une instance de style, comme ColwiseParallel(), mais a reçu {style!r}.",
            )
    return plan


def _named(plan: Mapping[str, Any]) -> str | None:
    """The layer whose style explains that the block does not compute what it should."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def style(name: str) -> Any:
        return next((one for pattern, one in plan.items() if fnmatch(name, pattern)), None)

    for name in COLUMNS:
        if isinstance(style(name), RowwiseParallel):
            return say(
                en=f"{name} is row-parallel, but what it reads, x, is whole on every rank: it opens a region, so it "
                "must be column-parallel (ColwiseParallel).",
                fr=f"{name} est découpée par ligne, alors que ce qu’elle lit, x, est entier sur chaque rang : elle "
                "ouvre une région, donc par colonne (ColwiseParallel).",
            )
    for name in ROWS:
        if isinstance(style(name), ColwiseParallel):
            return say(
                en=f"{name} is column-parallel, but what it reads is sharded already (heads or hidden features of this "
                "rank): it closes a region, so it must be row-parallel (RowwiseParallel).",
                fr=f"{name} est découpée par colonne, alors que ce qu’elle lit est déjà réparti (têtes ou neurones "
                "cachés de ce rang) : elle ferme une région, donc par ligne (RowwiseParallel).",
            )
    missing = [name for name in (*COLUMNS, *ROWS) if style(name) is None]
    return _missing(missing) if missing else None


def _missing(names: list[str]) -> str:
    return say(
        en=f"{', '.join(names)}: not in the plan, hence whole on every rank, where it no longer fits those around it "
        "or saves nothing.",
        fr=f"{', '.join(names)} : absent du plan, donc entier sur chaque rang, où cela ne va plus avec les couches "
        "voisines, ou n’économise rien.",
    )


def _refuse_whole_layers(answers: list[RankAnswer], size: int) -> None:
    if answers[0].value["whole"]:
        raise Wrong(_missing(answers[0].value["whole"]))


def _plan_inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; is all split, with two sums in forward?"""
    _refuse_whole_layers(answers, size)
    if answers[0].value["forward"] > 2:
        raise Wrong(
            en=f"The values are right, but forward communicates {answers[0].value['forward']} times: leave the "
            "layouts of inputs and outputs as they are, so that a layer by columns hands its share to the layer "
            "by rows; two all-reduces are enough.",
            fr=f"Les valeurs sont justes, mais la passe avant communique {answers[0].value['forward']} fois : "
            "laissez les répartitions d’entrée et de sortie par défaut, pour qu’une couche par colonne passe sa "
            "part à la couche par ligne ; deux all-reduces suffisent.",
        )


class _PlanJudge(Judge):
    """Run the plan on ranks; where values are wrong, name the layer that explains it."""

    def __call__(self, answer: Callable[..., Any]) -> None:
        import torch.distributed.tensor.debug
        import torch.distributed.tensor.parallel  # noqa: F401 - here, once, for all ranks

        plan = _refuse_no_plan(answer())
        try:
            super().__call__(answer)
        except Wrong:
            if (said := _named(plan)) is not None:
                raise Wrong(said) from None
            raise


PARALLELIZE_PLAN = Exercise(
    id="parallelize-plan",
    title=Said("torch's parallelize_module", "parallelize_module de torch"),
    judge=_PlanJudge(_plan_expected, on_ranks=True, trial=_plan_trial, cases=((2, 11),), inspect=_plan_inspect),
    praise_en="Right: seven layers, two styles, and two all-reduces in the forward pass.",
    praise_fr="Exact : sept couches, deux styles, et deux all-reduces en passe avant.",
    hint_en="For each layer: is what it reads whole on every rank, or sharded? Whole: by columns. Sharded: by rows.",
    hint_fr="Pour chaque couche : ce qu’elle lit est-il entier sur chaque rang, ou réparti ? Entier : par colonne. "
    "Réparti : par ligne.",
    nearer_en="query, key, value, mlp_gate and mlp_expand read x: ColwiseParallel(). attention_project and mlp_project "
    "read heads and hidden features: RowwiseParallel().",
    nearer_fr="query, key, value, mlp_gate et mlp_expand lisent x : ColwiseParallel(). attention_project et "
    "mlp_project lisent des têtes et des neurones cachés : RowwiseParallel().",
)


class _SendingJudge:
    """Run the plan on two ranks; its score is what a rank sends, over the bytes of x."""

    on_ranks = True
    cases = ((2, 12),)

    def __call__(self, answer: Callable[..., Any]) -> float:
        sent: list[float] = []

        def inspect(answers: list[RankAnswer], size: int) -> None:
            _refuse_whole_layers(answers, size)
            sent.append(max(one.value["sent"] for one in answers))

        _PlanJudge(_plan_expected, on_ranks=True, trial=_plan_trial, cases=self.cases, inspect=inspect)(answer)
        return max(sent)


FEWEST_BYTES = Challenge(
    id="fewest-bytes",
    title=Said("challenge: a plan with the fewest bytes", "défi : un plan qui envoie le moins d’octets"),
    judge=_SendingJudge(),
    target=4.0,
    unit_en="× the bytes of x",
    unit_fr="× les octets de x",
    praise_en="As few as by hand: each region is entered once, whatever the number of layers that read x.",
    praise_fr="Aussi peu qu’à la main : on n’entre qu’une fois dans chaque région, quel que soit le nombre de couches "
    "qui lisent x.",
    hint_en="In backward each column-parallel layer turns its own x into a DTensor, and sums its own gradient. "
    "What do query, key and value have in common, just before them?",
    hint_fr="En passe arrière, chaque couche par colonne fait de son x un DTensor à elle, et additionne donc un "
    "gradient à elle. Qu’ont en commun query, key et value, juste avant elles ?",
    nearer_en="The norms may stand in the plan too: what a norm gives out can be one DTensor, Replicate(), that all "
    "layers after it share. PrepareModuleOutput says so; see what its use_local_output does.",
    nearer_fr="Les normalisations peuvent figurer dans le plan : leur sortie peut être un seul DTensor, Replicate(), "
    "que partagent toutes les couches qui suivent. PrepareModuleOutput le dit ; voyez ce que fait use_local_output.",
)


LayerBytes = Callable[[int, int, int, int, int], float]
CASES = ((1, 2048, 12288, 8, 2), (4, 128, 128, 2, 4), (2, 1024, 4096, 4, 2))


def layer_bytes(samples: int, tokens: int, width: int, ranks: int, number_bytes: int) -> float:
    """Bytes that each rank sends for one transformer layer and one micro-batch, forward and backward.

    Four all-reduces of (B, T, D), each of which sends 2(n − 1)/n of its message.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.2, eq. for 8·b·s·h·(t − 1)/t elements.
    """
    return 4 * samples * tokens * width * number_bytes * 2 * (ranks - 1) / ranks


def layer_seconds(
    samples: int,
    tokens: int,
    width: int,
    ranks: int,
    number_bytes: int,
    link: Link,
    sent_bytes: LayerBytes = layer_bytes,
) -> float:
    """Time of the same four ring all-reduces over links of one kind; nothing hides them, as each is waited for.

    Args:
        sent_bytes: what a rank sends for the layer, by the same arguments; the student's function.
    """
    # 4 × 2 (p − 1) latencies, and the bytes over the bandwidth: the cost of four rings, of messages of these bytes.
    message_bytes = sent_bytes(samples, tokens, width, ranks, number_bytes) * ranks / (4 * 2 * (ranks - 1))
    beta = 1 / link.bytes_per_s
    return 4 * cost_s("ring_all_reduce", message_bytes, ranks, alpha_s=link.latency_s, beta_s_per_byte=beta)


def compute_seconds(samples: int, tokens: int, width: int, ranks: int, flops_per_s: float) -> float:
    """Time of the layer's matrix products on each rank, forward and backward.

    72·B·T·D²·(1 + T/(6D)) operations over the ranks, without recomputation.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix: 24·b·s·h²(1 + s/(6h)) in forward, twice that backward.
    """
    return 72 * samples * tokens * width**2 * (1 + tokens / (6 * width)) / ranks / flops_per_s


def _spoilt(factor: Callable[[int], float]) -> LayerBytes:
    return lambda b, t, d, n, size: layer_bytes(b, t, d, n, size) * factor(n)


LAYER_BYTES = Exercise(
    id="layer-bytes",
    title=Said("the bytes of a layer", "les octets d’une couche"),
    judge=Judge(
        layer_bytes,
        cases=lambda: CASES,
        mistakes=(
            Mistake(
                _spoilt(lambda n: 1 / 2),
                "Half is missing: the layer has two regions, attention and MLP, each with one all-reduce in forward "
                "and one in backward, four in all; and an all-reduce is a reduce-scatter and an all-gather.",
                "Il en manque la moitié : la couche a deux régions, attention et MLP, chacune avec un all-reduce "
                "en passe avant et un en passe arrière, soit quatre ; et un all-reduce est un reduce-scatter suivi "
                "d’un all-gather.",
            ),
            Mistake(
                _spoilt(lambda n: n / (2 * (n - 1))),
                "That is the size of the messages; on a ring each rank sends 2(N − 1)/N of each (lab 03).",
                "C’est la taille des messages ; sur un anneau, chaque rang en envoie 2(N − 1)/N (TP 03).",
            ),
            Mistake(
                _spoilt(lambda n: n / (n - 1)),
                "You count each message twice; on a ring each rank sends 2(N − 1)/N of it, a little less.",
                "Vous comptez chaque message deux fois ; sur un anneau, chaque rang en envoie 2(N − 1)/N, un peu "
                "moins.",
            ),
            Mistake(
                _spoilt(lambda n: 1 / n),
                "You divide by the number of ranks once more; but what is added up, (B, T, D), is whole on every "
                "rank: tensor parallelism shards weights, not this tensor.",
                "Vous divisez une fois de trop par le nombre de rangs ; or ce que l’on additionne, (B, T, D), est "
                "entier sur chaque rang : le parallélisme de tenseur répartit les poids, pas ce tenseur.",
            ),
            Mistake(
                lambda b, t, d, n, size: layer_bytes(b, t, d, n, 1),
                "That is a number of elements: times number_bytes.",
                "C’est un nombre d’éléments : multipliez par number_bytes.",
            ),
            Mistake(
                lambda b, t, d, n, size: layer_bytes(b, 1, d, n, size) * d,
                "You send the weights (D × D); tensor parallelism leaves them where they are, and sends "
                "activations: B × T × D.",
                "Vous envoyez les poids (D × D) ; le parallélisme de tenseur les laisse où ils sont, et envoie des "
                "activations : B × T × D.",
            ),
            Mistake(
                _spoilt(lambda n: 1 / 4),
                "You count a quarter: the layer makes four all-reduces (attention and MLP, forward and backward), and "
                "each rank sends "
                "2 (n − 1)/n of a message.",
                "Vous comptez un quart : la couche fait quatre all-reduces (attention et MLP, passe avant et passe "
                "arrière), et chaque "
                "rang envoie 2 (n − 1)/n d’un message.",
            ),
            Mistake(
                _spoilt(lambda n: 3 / 4),
                "You count three all-reduces: two regions, two directions, so four.",
                "Vous comptez trois all-reduces : deux régions, deux sens, donc quatre.",
            ),
            Mistake(
                _spoilt(float),
                "You multiply by n: in a ring each of the 2 (n − 1) steps carries one n-th of the message.",
                "Vous multipliez par n : dans un anneau, chacune des 2 (n − 1) étapes porte un n-ième du message.",
            ),
            Mistake(
                _spoilt(lambda n: 1 / (n - 1)),
                "You count one chunk in each direction of the ring: a rank sends 2 (n − 1) of them.",
                "Vous comptez un morceau par tour d’anneau : un rang en envoie 2 (n − 1).",
            ),
            Mistake(
                lambda b, t, d, n, size: layer_bytes(b, t, 1, n, size),
                "The width is left out: a token's activation has width numbers.",
                "La largeur est oubliée : l’activation d’un token a width nombres.",
            ),
            Mistake(
                lambda b, t, d, n, size: layer_bytes(1, t, d, n, size),
                "The samples are left out: the message holds the tokens of all of them.",
                "Les échantillons sont oubliés : le message contient les tokens de tous.",
            ),
            Mistake(
                lambda b, t, d, n, size: layer_bytes(b, 1, d, n, size),
                "The tokens are left out: the message holds those of the whole sequence.",
                "Les tokens sont oubliés : le message contient ceux de toute la séquence.",
            ),
            Mistake(
                _spoilt(lambda n: 8.0),
                "That is in bits: number_bytes is in bytes already.",
                "C’est en bits : number_bytes est déjà en octets.",
            ),
        ),
    ),
    praise_en="Right: four all-reduces of (B, T, D) for each layer and each micro-batch.",
    praise_fr="Exact : quatre all-reduces de (B, T, D) par couche et par micro-batch.",
    hint_en="How many regions has a transformer layer, and how many all-reduces each, forward and backward? What is "
    "the shape of what is added up?",
    hint_fr="Combien de régions une couche de transformer a-t-elle, et combien d’all-reduces chacune, en passes avant "
    "et arrière ? Quelle est la forme de ce qui est additionné ?",
    nearer_en="4 messages of samples · tokens · width · number_bytes, of which a ring sends 2 (ranks − 1) / ranks.",
    nearer_fr="4 messages de samples · tokens · width · number_bytes, dont un anneau envoie 2 (ranks − 1) / ranks.",
)
