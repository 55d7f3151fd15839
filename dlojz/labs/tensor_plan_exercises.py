"""Lab 06: torch's `parallelize_module`: the plan of a Llama-like block, really applied on two ranks.

Layer 6 (labs). Invariant: a plan is run and its results are held to those of one process; only where they are wrong is
it looked at, to say which layer is the cause. Names that torch would pass over in silence are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.tensor_diagnosis import gradient
from dlojz.labs.verdict import Said
from dlojz.models.sizes import LlamaSize
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

SIZE = LlamaSize(width=24, depth=1, num_heads=6, num_kv_heads=6, mlp_width=24)
COLUMNS = ("query", "key", "value", "mlp_gate", "mlp_expand")
ROWS = ("attention_project", "mlp_project")
NORMS = ("norm1", "norm2")
BATCH, TOKENS = 2, 5
OUTPUT, OF_X = "output", "gradient of x"
LABELS = {OUTPUT: Said("the output", "la sortie"), OF_X: Said("the gradient of x", "le gradient de x")}


def _block(seed: int) -> Any:
    import torch

    from dlojz.models.llama import LlamaBlock

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaBlock(SIZE)


def _input(seed: int) -> Tensor:
    import torch

    return torch.randn(BATCH, TOKENS, SIZE.width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    logging.disable(logging.CRITICAL)  # DTensor tells of a misfit in twenty lines before it raises
    block, x = _block(seed), _input(seed)
    parallelize_module(block, init_device_mesh("cpu", (size,)), answer())
    with CommDebugMode() as counted:
        y = block(x)
        forward = counted.get_total_counts()
    y.sum().backward()
    whole = [name for name in (*COLUMNS, *ROWS) if not isinstance(getattr(block, name).weight, DTensor)]
    return {"forward": forward, "whole": whole}, {OUTPUT: y, OF_X: x.grad}


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x = _input(seed)
    y = _block(seed)(x)
    y.sum().backward()
    return {OUTPUT: y.detach(), OF_X: gradient(x)}


def _refuse_no_plan(plan: object) -> Mapping[str, Any]:
    from torch.distributed.tensor.parallel import ParallelStyle

    if not isinstance(plan, Mapping):
        raise Wrong(
            say(
                en=f"A dictionary is expected, name of a layer to its style, but a {type(plan).__name__} was returned.",
                fr="On attend un dictionnaire, du nom d’une couche vers son style, mais votre fonction renvoie un "
                f"objet de type {type(plan).__name__}.",
            )
        )
    known = (*COLUMNS, *ROWS, *NORMS)
    for name, style in plan.items():
        if not any(fnmatch(one, str(name)) for one in known):
            raise Wrong(
                say(
                    en=f"The block has no layer {name!r}; torch passes over such a name and splits nothing. Its layers "
                    f"are {', '.join((*COLUMNS, *ROWS))}.",
                    fr=f"Le bloc n’a pas de couche {name!r} ; torch ignore un tel nom et ne découpe rien. Ses couches "
                    f"sont {', '.join((*COLUMNS, *ROWS))}.",
                )
            )
        if not isinstance(style, ParallelStyle):
            raise Wrong(
                say(
                    en=f"{name!r} needs an instance of a style, such as ColwiseParallel(), but {style!r} was given.",
                    fr=f"{name!r} demande une instance de style, comme ColwiseParallel(), mais a reçu {style!r}.",
                )
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
                en=f"{name} is split by rows, but what it reads, x, is whole on every rank: it opens a region, so it "
                "goes by columns (ColwiseParallel).",
                fr=f"{name} est découpée par ligne, alors que ce qu’elle lit, x, est entier sur chaque rang : elle "
                "ouvre une région, donc par colonne (ColwiseParallel).",
            )
    for name in ROWS:
        if isinstance(style(name), ColwiseParallel):
            return say(
                en=f"{name} is split by columns, but what it reads is shared out already (heads or hidden features of "
                "this rank): it closes a region, so it goes by rows (RowwiseParallel).",
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


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; is all split, with two sums in forward?"""
    if answers[0].value["whole"]:
        raise Wrong(_missing(answers[0].value["whole"]))
    if answers[0].value["forward"] > 2:
        raise Wrong(
            say(
                en=f"The values are right, but forward communicates {answers[0].value['forward']} times: leave the "
                "layouts of inputs and outputs as they are, so that a layer by columns hands its share to the layer "
                "by rows; two all-reduces are enough.",
                fr=f"Les valeurs sont justes, mais la passe avant communique {answers[0].value['forward']} fois : "
                "laissez les répartitions d’entrée et de sortie par défaut, pour qu’une couche par colonne passe sa "
                "part à la couche par ligne ; deux all-reduces suffisent.",
            )
        )


_on_ranks = by_ranks(trial=_trial, expected=_expected, cases=((2, 11),), labels=LABELS, inspect=_inspect)


def _judge(answer: Callable[..., Any]) -> None:
    import torch.distributed.tensor.debug
    import torch.distributed.tensor.parallel  # noqa: F401 - here, once, for all ranks

    plan = _refuse_no_plan(answer())
    try:
        _on_ranks(answer)
    except Wrong:
        said = _named(plan)
        if said is None:
            raise
        raise Wrong(said) from None


_judge.on_ranks = True  # type: ignore[attr-defined]

PARALLELIZE_PLAN = Exercise(
    id="parallelize-plan",
    title=Said("torch's parallelize_module", "parallelize_module de torch"),
    judge=_judge,
    praise=Said(
        "Right: seven layers, two styles, and two all-reduces in the forward pass.",
        "Exact : sept couches, deux styles, et deux all-reduces en passe avant.",
    ),
    hints=(
        Said(
            "For each layer: is what it reads whole on every rank, or shared out? Whole: by columns. Shared out: by "
            "rows.",
            "Pour chaque couche : ce qu’elle lit est-il entier sur chaque rang, ou réparti ? Entier : par colonne. "
            "Réparti : par ligne.",
        ),
        Said(
            "query, key, value, mlp_gate and mlp_expand read x: ColwiseParallel(). attention_project and mlp_project "
            "read heads and hidden features: RowwiseParallel().",
            "query, key, value, mlp_gate et mlp_expand lisent x : ColwiseParallel(). attention_project et mlp_project "
            "lisent des têtes et des neurones cachés : RowwiseParallel().",
        ),
    ),
)
