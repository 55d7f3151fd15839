"""Lab 05: what DeepSpeed must be told for a pipeline: processes, stages, and the JSON.

Layer 6 (labs). Invariant: the JSON is judged by what DeepSpeed would do with it, read back by
`dlojz.train.deepspeed_json`; keys that change nothing are nobody's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dlojz.config import RunConfig
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.schema import LabError
from dlojz.text import say

UNSAID = 97
"""Micro-batch of a run about which the file says nothing; no case asks for it."""


def deepspeed_pipeline(config: RunConfig) -> tuple[int, int, dict[str, Any]]:
    """Processes to start, what follows `-p`, and DeepSpeed's JSON, for a pipeline with replicas.

    Source: deepspeed.ai, "Pipeline Parallelism" (tutorial: AlexNet, `-p 2`) and "DeepSpeed Configuration JSON".
    """
    layout = config.layout
    return (
        layout.pp * layout.dp,
        layout.pp,
        {
            "train_batch_size": layout.micro_batch * layout.micro_batches * layout.dp,
            "train_micro_batch_size_per_gpu": layout.micro_batch,
            "gradient_accumulation_steps": layout.micro_batches,
            "zero_optimization": {"stage": layout.zero},
        },
    )


def course_case() -> RunConfig:
    """The course's run: AlexNet, 2 stages × 2 replicas, 8 micro-batches, 200 steps."""
    return RunConfig.of(model="alexnet", engine="deepspeed", pp=2, dp=2, micro_batch=32, micro_batches=8, steps=200)


def _cases() -> list[RunConfig]:
    common = {"engine": "deepspeed", "model": "alexnet"}
    return [
        course_case(),
        RunConfig.of(pp=4, dp=2, micro_batch=4, micro_batches=16, zero=1, **common),
        RunConfig.of(pp=2, dp=3, micro_batch=8, micro_batches=6, **common),
        RunConfig.of(pp=4, dp=1, micro_batch=16, micro_batches=12, **common),
    ]


def _judge(answer: Callable[..., Any]) -> None:
    for config in _cases():
        processes, stages, document = _three(answer(config))
        _check_numbers(processes, stages, config)
        _check_batch(document, config)
        layout = config.layout
        base = RunConfig.of(model=config.model, dp=layout.dp, pp=layout.pp, engine="deepspeed", micro_batch=UNSAID)
        try:
            from dlojz.train.deepspeed_json import read_deepspeed_json

            given = read_deepspeed_json(_text(document), base).layout
        except LabError as error:
            raise Wrong(
                say(
                    en=f"Asked for: {_asked(config)}. With your settings, DeepSpeed or the lab refuses: {error}",
                    fr=f"Demandé : {_asked(config)}. Avec vos réglages, DeepSpeed ou le TP refuse : {error}",
                )
            ) from None
        for name, key in (
            ("micro_batch", "train_micro_batch_size_per_gpu"),
            ("micro_batches", "gradient_accumulation_steps"),
            ("zero", "zero_optimization.stage"),
        ):
            if getattr(given, name) != getattr(layout, name):
                raise Wrong(
                    say(
                        en=f"Asked for: {_asked(config)}. DeepSpeed would run your settings with "
                        f"{name}={getattr(given, name)}, not {getattr(layout, name)}: look at {key}.",
                        fr=f"Demandé : {_asked(config)}. Avec vos réglages, DeepSpeed prendrait "
                        f"{name}={getattr(given, name)} et non {getattr(layout, name)} : regardez {key}.",
                    )
                )


def _asked(config: RunConfig) -> str:
    layout = config.layout
    return (
        f"pp={layout.pp}, dp={layout.dp}, micro_batch={layout.micro_batch}, micro_batches={layout.micro_batches}, "
        f"zero={layout.zero}"
    )


def _three(given: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    if given is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    three = tuple(given) if isinstance(given, tuple | list) else ()
    if len(three) != 3 or not isinstance(three[2], Mapping):
        raise Wrong(
            say(
                en="Three things are expected: the number of processes, the number after -p, and the dictionary.",
                fr="On attend trois choses : le nombre de processus, le nombre qui suit -p, et le dictionnaire.",
            )
        )
    return three


def _check_numbers(processes: Any, stages: Any, config: RunConfig) -> None:
    layout = config.layout
    if stages != layout.pp:
        replicas = stages == layout.dp
        raise Wrong(
            say(
                en=f"Asked for: {_asked(config)}. You give -p {stages}"
                + (", the replicas" if replicas else "")
                + f"; -p is the number of stages of one pipeline: {layout.pp}.",
                fr=f"Demandé : {_asked(config)}. Vous donnez -p {stages}"
                + (", les répliques" if replicas else "")
                + f" ; -p est le nombre d’étages d’un pipeline : {layout.pp}.",
            )
        )
    if processes != layout.world_size:
        raise Wrong(
            say(
                en=f"Asked for: {_asked(config)}. {processes} processes are not enough or too many: each of the "
                f"{layout.dp} replica(s) is a whole pipeline of {layout.pp} ranks, {layout.world_size} in all.",
                fr=f"Demandé : {_asked(config)}. {processes} processus, ce n’est pas le bon compte : chacune des "
                f"{layout.dp} répliques est un pipeline entier de {layout.pp} rangs, soit {layout.world_size} en tout.",
            )
        )


def _check_batch(document: Mapping[str, Any], config: RunConfig) -> None:
    layout = config.layout
    total = document.get("train_batch_size")
    samples = layout.micro_batch * layout.micro_batches
    if total == samples * layout.world_size != layout.global_batch:
        raise Wrong(
            say(
                en=f"train_batch_size={total} counts every rank, but the {layout.pp} ranks of a pipeline pass the same "
                f"samples from one to the next: multiply by the replicas alone, {layout.global_batch}.",
                fr=f"train_batch_size={total} compte tous les rangs, mais les {layout.pp} rangs d’un pipeline se "
                f"passent les mêmes échantillons : ne multipliez que par les répliques, {layout.global_batch}.",
            )
        )
    if document.get("gradient_accumulation_steps") is None and total is None:
        raise Wrong(
            say(
                en="Nothing tells DeepSpeed how many micro-batches a step has: in a pipeline that is "
                "gradient_accumulation_steps; left out it is 1, and the pipeline is never full.",
                fr="Rien ne dit à DeepSpeed combien de micro-batches compte un pas : dans un pipeline, c’est "
                "gradient_accumulation_steps ; par défaut c’est 1, et le pipeline n’est jamais plein.",
            )
        )


def _text(document: Mapping[str, Any]) -> str:
    try:
        return json.dumps(document)
    except (TypeError, ValueError) as error:
        raise Wrong(
            say(
                en=f"This dictionary cannot be written as JSON ({error}).",
                fr=f"Ce dictionnaire ne s’écrit pas en JSON ({error}).",
            )
        ) from None


PIPELINE_JSON = Exercise(
    id="pipeline-json",
    title=Said("DeepSpeed's pipeline", "le pipeline de DeepSpeed"),
    judge=_judge,
    praise=Said(
        "Right: four runs, the course's among them, and DeepSpeed would do each of them as asked.",
        "Exact : quatre exécutions, dont celle du cours, et DeepSpeed ferait chacune comme demandé.",
    ),
    hints=(
        Said(
            "A replica is a whole pipeline. Which of the three sizes of batches know of the stages at all?",
            "Une réplique est un pipeline entier. Lesquelles des trois tailles de batch dépendent-elles des étages ?",
        ),
        Said(
            "layout.pp * layout.dp processes; -p layout.pp; gradient_accumulation_steps is layout.micro_batches, and "
            "train_batch_size is layout.global_batch; ZeRO's stage goes into zero_optimization.",
            "layout.pp * layout.dp processus ; -p layout.pp ; gradient_accumulation_steps vaut layout.micro_batches, "
            "et train_batch_size vaut layout.global_batch ; le stage de ZeRO va dans zero_optimization.",
        ),
    ),
)
