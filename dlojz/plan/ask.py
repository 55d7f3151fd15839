"""`plan`: ask for the best layout of a model on a cluster.

Layer 4. Invariant: the whole answer is arithmetic on this machine, about a second; nothing is run, nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dlojz.evidence import DecoderSize
from dlojz.hardware import Cluster
from dlojz.hardware import cluster as cluster_named
from dlojz.plan.answer import Plan
from dlojz.plan.elsewhere import fits_nowhere
from dlojz.plan.engines import chosen
from dlojz.plan.question import FLASH_FROM, MOST_BATCH, Question, batch_refusal, check_gpus, check_precision, whole
from dlojz.plan.search import MOST_SIMULATED, played_out, search
from dlojz.plan.subject import subject
from dlojz.predict.time import Calibration
from dlojz.predict.time import calibration as calibration_named
from dlojz.schema import LabError
from dlojz.text import say

PROFILE_OF_GPU = {"v100": "v100", "a100": "a100", "h100": "h100", "h200": "h100"}
"""The calibration of each generation; H200 has the processor of H100 with more memory."""


def plan(  # noqa: PLR0913 - one call is all that a student has to know
    model: str | DecoderSize,
    cluster: str | Path | Cluster = "jean_zay_a100",
    gpus: int | Sequence[int] = 8,
    batch: int = 64,
    *,
    image_size: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    engines: str | Sequence[str] | None = None,
    fused_attention: bool | None = None,
    steps: int | None = None,
    hours: float | None = None,
    limit: str = "",
    calibration: str | Calibration | None = None,
    simulate: int = MOST_SIMULATED,
) -> Plan:
    """The best layout of a model on a cluster, what competes with it, and why all others are refused.

    Args:
        model: a name of the catalogue (`coatnet_7`), a published decoder (`megatron-1t`), or a `DecoderSize`.
        cluster: name, file of one's own, or the cluster itself.
        gpus: how many; several numbers are compared with each other.
        batch: samples of one step, over all replicas.
        image_size, sequence_length: of the samples; by default those of the model.
        precision: bf16, fp16 or fp32; by default bf16 where the GPU has it.
        engines: libraries to search; by default those that run the model.
        fused_attention: whether attention is one kernel; by default from A100 on.
        steps, hours: of the training, and within which time it must end; layouts that take longer are refused.
        limit: name of that limit, e.g. of a QoS.
        calibration: profile or file; by default that of the GPU's generation.
        simulate: how many of the fastest layouts are played out at most; 0 leaves the closed form.

    Raises:
        LabError: if the question is illegal, or the model fits in no layout: the sentence says what is missing and
            names the smallest cluster that works.

    Example:
        `plan("coatnet_7", "jean_zay_a100", gpus=8, batch=64)`
    """
    site = cluster if isinstance(cluster, Cluster) else cluster_named(cluster)
    numbers = tuple(gpus) if isinstance(gpus, Sequence) else (gpus,)
    if not numbers:
        raise LabError(say(en="gpus must name a number, but none was received.", fr="gpus doit donner un nombre."))
    numbers = tuple(dict.fromkeys(check_gpus(site, one) for one in numbers))
    batch = whole("batch", batch, MOST_BATCH)
    steps = None if steps is None else whole("steps", steps, 2**40)
    _check_hours(steps, hours)
    found_precision = check_precision(site, precision)
    asked = subject(model, image_size=image_size, sequence_length=sequence_length)
    names = chosen(
        engines if engines is None or isinstance(engines, str) else tuple(engines),
        catalogue=bool(asked.catalogue),
        experts=asked.num_experts > 0,
    )
    flash = site.gpu.name.split("-")[0] in FLASH_FROM if fused_attention is None else fused_attention
    question = Question(
        asked, site, _calibration(site, calibration), batch, numbers, found_precision, names, flash, steps, hours, limit
    )
    refusal = batch_refusal(question)
    if refusal:
        raise LabError(refusal)
    found = search(question.space(), site, question.calibration, step_limit_s=question.step_limit_s)
    if not found.admitted.size:
        raise LabError(fits_nowhere(question, found))
    return Plan(question, found, played_out(found, site, question.calibration, max(0, simulate)))


def _check_hours(steps: int | None, hours: float | None) -> None:
    if hours is not None and not (isinstance(hours, int | float) and 0 < hours < math.inf):
        raise LabError(
            say(
                en=f"hours must be greater than 0 and finite, but {hours!r} was received.",
                fr=f"hours doit être plus grand que 0 et fini, mais {hours!r} a été reçu.",
            )
        )
    if hours is not None and steps is None:
        raise LabError(
            say(
                en="hours limits a training, so steps must say how long it is, but none was received: give steps=….",
                fr="hours limite un entraînement : steps doit donner sa longueur, mais rien n’a été reçu ; donnez "
                "steps=….",
            )
        )


def _calibration(site: Cluster, given: str | Calibration | None) -> Calibration:
    if isinstance(given, Calibration):
        return given
    if given is not None:
        return calibration_named(given)
    profile = PROFILE_OF_GPU.get(site.gpu.name.split("-")[0])
    return Calibration(site.gpu.name) if profile is None else calibration_named(profile)
