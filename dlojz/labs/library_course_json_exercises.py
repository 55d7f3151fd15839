"""Lab 12: the course's DeepSpeed JSON, completed with the sizes of batches that the slide left out.

Layer 6 (labs). Invariant: what is judged is what DeepSpeed would do with the file, read back by
`dlojz.train.deepspeed_json`; keys that change nothing are nobody's business.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from dlojz.config import RunConfig
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.schema import LabError
from dlojz.text import say

COURSE = {
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
    }
}
"""The JSON of the course's slide on DeepSpeed, word for word."""
CASES = ((128, 4, 28), (64, 2, 16), (96, 3, 10), (1536, 8, 7), (12, 4, 8))
"""Global batch, ranks, samples that fit in a GPU."""
UNSAID = 97
"""Micro-batch of a run about which the file says nothing; no case asks for it."""


def complete(course: Mapping[str, Any], global_batch: int, ranks: int, fits: int) -> dict[str, Any]:
    """The course's JSON with sizes of batches: the largest micro-batch that fits and divides a rank's samples.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON": train_batch_size = train_micro_batch_size_per_gpu ×
    gradient_accumulation_steps × number of GPUs.
    """
    samples = global_batch // ranks
    micro = max(size for size in range(1, fits + 1) if samples % size == 0)
    return {
        **course,
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": samples // micro,
    }


def _judge(answer: Callable[..., Any]) -> None:
    for global_batch, ranks, fits in CASES:
        course = copy.deepcopy(COURSE)
        document = _mapping(answer(course, global_batch, ranks, fits))
        asked = _asked(global_batch, ranks, fits)
        if course != COURSE:
            raise Wrong(
                say(
                    en="Your function changes the dictionary that it is given: the next file would begin with what "
                    "this one says. Work on a copy, e.g. {**course, …}.",
                    fr="Votre fonction modifie le dictionnaire reçu : le fichier suivant commencerait par ce que dit "
                    "celui-ci. Travaillez sur une copie, par exemple {**course, …}.",
                )
            )
        if document.get("zero_optimization") != COURSE["zero_optimization"]:
            raise Wrong(
                say(
                    en="What the course's file says of ZeRO is gone or has changed: keep course, and add to it, at the "
                    "top level.",
                    fr="Ce que le fichier du cours dit de ZeRO a disparu ou changé : gardez course, et complétez-le, "
                    "au premier niveau.",
                )
            )
        _check_sizes(document, complete(COURSE, global_batch, ranks, fits), asked, ranks, fits)


def _asked(global_batch: int, ranks: int, fits: int) -> Said:
    return Said(
        f"a global batch of {global_batch} on {ranks} GPUs with room for {fits} samples each",
        f"un batch global de {global_batch} sur {ranks} GPU, où tiennent {fits} échantillons chacun",
    )


def _mapping(document: object) -> Mapping[str, Any]:
    if document is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(document, Mapping):
        raise Wrong(
            say(
                en=f"A dictionary is expected, but your function returns a {type(document).__name__}.",
                fr=f"Un dictionnaire est attendu, mais votre fonction renvoie un objet de type "
                f"{type(document).__name__}.",
            )
        )
    return document


def _check_sizes(document: Mapping[str, Any], right: Mapping[str, Any], asked: Said, ranks: int, fits: int) -> None:
    total, micro = document.get("train_batch_size"), document.get("train_micro_batch_size_per_gpu")
    if total is None and micro is None:
        raise Wrong(
            say(
                en="DeepSpeed refuses this file: it gives no size of batch, neither train_batch_size nor "
                "train_micro_batch_size_per_gpu. That is what the slide left out.",
                fr="DeepSpeed refuse ce fichier : il ne donne aucune taille de batch, ni train_batch_size, ni "
                "train_micro_batch_size_per_gpu. C’est ce que la diapositive ne disait pas.",
            )
        )
    layout = _read(document, ranks, asked)
    wanted = right["train_batch_size"]
    if layout.global_batch != wanted:
        times = layout.global_batch / wanted
        raise Wrong(
            say(
                en=f"Asked for: {asked.en}. DeepSpeed would take {layout.global_batch} samples per step "
                f"({layout.micro_batch} × {layout.micro_batches} × {ranks}), {times:.3g} times as many: "
                "train_batch_size counts all GPUs, the micro-batch is that of one.",
                fr=f"Demandé : {asked.fr}. DeepSpeed prendrait {layout.global_batch} échantillons par pas "
                f"({layout.micro_batch} × {layout.micro_batches} × {ranks}), soit {times:.3g}".replace(".", ",")
                + " fois le compte : train_batch_size compte tous les GPU, le micro-batch est celui d’un seul.",
            )
        )
    if layout.micro_batch > fits:
        raise Wrong(
            say(
                en=f"Asked for: {asked.en}. The micro-batch of your file, {layout.micro_batch}, does not fit: "
                "accumulate over more, smaller ones.",
                fr=f"Demandé : {asked.fr}. Le micro-batch de votre fichier, {layout.micro_batch}, ne tient pas : "
                "cumulez-en davantage, plus petits.",
            )
        )
    best = right["train_micro_batch_size_per_gpu"]
    if layout.micro_batch < best:
        raise Wrong(
            say(
                en=f"Asked for: {asked.en}. Your file takes micro-batches of {layout.micro_batch}, and accumulates "
                f"{layout.micro_batches}; {best} fit and divide a GPU's samples too, with fewer passes.",
                fr=f"Demandé : {asked.fr}. Votre fichier prend des micro-batches de {layout.micro_batch}, et en cumule "
                f"{layout.micro_batches} ; {best} tiennent et divisent aussi les échantillons d’un GPU, en moins de "
                "passes.",
            )
        )


def _read(document: Mapping[str, Any], ranks: int, asked: Said) -> Any:
    from dlojz.train.deepspeed_json import read_deepspeed_json

    base = RunConfig.of(model="gpt_tiny", dp=ranks, engine="deepspeed", micro_batch=UNSAID)
    try:
        return read_deepspeed_json(json.dumps(document), base).layout
    except LabError as error:
        raise Wrong(
            say(
                en=f"Asked for: {asked.en}. DeepSpeed or the lab refuses your file: {error}",
                fr=f"Demandé : {asked.fr}. DeepSpeed ou le TP refuse votre fichier : {error}",
            )
        ) from None
    except (TypeError, ValueError) as error:
        raise Wrong(
            say(
                en=f"This dictionary cannot be written as JSON ({error}).",
                fr=f"Ce dictionnaire ne s’écrit pas en JSON ({error}).",
            )
        ) from None


COURSE_JSON = Exercise(
    id="course-json",
    title=Said("the course's JSON, completed", "le JSON du cours, complété"),
    judge=_judge,
    praise=Said(
        "Right: five clusters, and DeepSpeed would run each with the batch asked for.",
        "Exact : cinq configurations, et DeepSpeed exécuterait chacune avec le batch demandé.",
    ),
    hints=(
        Said(
            "Each GPU has global_batch / ranks samples per step. Into how many equal parts, at least, must they be cut "
            "for each part to fit?",
            "Chaque GPU a global_batch / ranks échantillons par pas. En combien de parts égales, au moins, faut-il les "
            "couper pour que chacune tienne ?",
        ),
        Said(
            "The micro-batch is the largest divisor of global_batch // ranks that is at most fits; "
            "gradient_accumulation_steps is how many of them make up the samples of a GPU.",
            "Le micro-batch est le plus grand diviseur de global_batch // ranks qui ne dépasse pas fits ; "
            "gradient_accumulation_steps est leur nombre dans les échantillons d’un GPU.",
        ),
    ),
)
