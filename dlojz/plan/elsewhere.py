"""Where a model that fits nowhere would fit: what is missing, and the smallest cluster that works.

Layer 4. Invariant: "smallest" is the fewest GPUs, and of clusters that need as many the one with the least memory;
found by searching bytes alone, in the same space as any other question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from dlojz.hardware import CLUSTERS, Cluster, cluster
from dlojz.plan.candidate import Candidate, candidates_of, layouts_of
from dlojz.plan.question import Question, check_precision
from dlojz.plan.reasons import decimal, gigabytes, reason_words, shortest
from dlojz.plan.search import Found
from dlojz.predict.time import memories
from dlojz.schema import LabError
from dlojz.text import say

NOT_CLUSTERS: Final = ("local",)


class Place(NamedTuple):
    """Where it fits.

    Attributes:
        cluster: which.
        gpus: how many of it.
    """

    cluster: Cluster
    gpus: int


def lightest(question: Question, found: Found) -> tuple[Candidate, float] | None:
    """The refused layout that needs least memory, and its bytes; None if none got so far."""
    if not found.heavy.size:
        return None
    place = int(np.argmin(found.heavy_bytes))
    return candidates_of(found.space, found.heavy[place])[0], float(found.heavy_bytes[place])


def fits_on(question: Question, place: Cluster, gpus: int) -> bool:
    """Whether any layout of the model fits on so many GPUs of a cluster."""
    try:
        precision = check_precision(place, question.precision)
    except LabError:
        precision = check_precision(place, None)
    other = replace(question, cluster=place, gpus=(gpus,), precision=precision)
    space = other.space()
    places = np.flatnonzero(space.codes.reshape(-1) == 0)
    if not places.size:
        return False
    layouts = space.layouts(places)
    held = memories(question.subject.workload, layouts)
    here = held.host * min(gpus, place.gpus_per_node)
    return bool(((held.total_bytes <= place.gpu.device.memory_bytes) & (here <= place.host_memory_bytes)).any())


def _places(question: Question) -> Iterator[Place]:
    """Clusters and numbers of GPUs, the fewest GPUs first, the question's own cluster first among equals."""
    own = question.cluster
    others = [cluster(name) for name in CLUSTERS if name not in (own.name, *NOT_CLUSTERS)]
    ordered = [own, *sorted(others, key=lambda one: one.gpu.device.memory_bytes)]
    counts = sorted({one.gpus_per_node * 2**k for one in ordered for k in range(15)} | {1, 2, 4})
    for gpus in counts:
        for one in ordered:
            if gpus <= one.num_gpus and (gpus < one.gpus_per_node or gpus % one.gpus_per_node == 0):
                yield Place(one, gpus)


def smallest_place(question: Question) -> Place | None:
    """The smallest cluster on which the model fits with this batch; None if there is none."""
    return next((place for place in _places(question) if fits_on(question, place.cluster, place.gpus)), None)


def fits_nowhere(question: Question, found: Found) -> str:
    """The sentence: what is missing, and the smallest cluster that works."""
    name, gpus = question.cluster.name, say(en=" or ", fr=" ou ").join(map(str, question.gpus))
    if found.fastest_s < np.inf and question.steps is not None and question.hours is not None:
        took = decimal(found.fastest_s * question.steps / 3600)
        limit = f"{shortest(question.hours)} h" + (f" ({question.limit})" if question.limit else "")
        return say(
            en=f"no layout on {gpus} GPUs of {name} ends {question.steps} steps within {limit}: the fastest takes "
            f"{took} h; ask for more hours, fewer steps or more GPUs.",
            fr=f"aucune configuration sur {gpus} GPU de {name} ne finit {question.steps} itérations en {limit} : la "
            f"plus rapide prend {took} h ; demandez plus d’heures, moins d’itérations ou plus de GPU.",
        )
    light = lightest(question, found)
    if light is None:
        counts = found.counts()
        worst = max(counts, key=lambda one: counts[one])
        return say(
            en=f"no layout of {question.subject.name} is possible on {gpus} GPUs of {name} with a batch of "
            f"{question.batch}; most often because {reason_words(worst)}: change the batch or the number of GPUs.",
            fr=f"aucune configuration de {question.subject.name} n’est possible sur {gpus} GPU de {name} avec un batch "
            f"de {question.batch} ; le plus souvent : {reason_words(worst)}. Changez le batch ou le nombre de GPU.",
        )
    one, needs = light
    missing = needs - question.device_bytes
    text = say(
        en=f"{question.subject.name} fits in no layout on {gpus} GPUs of {name}: the lightest ({one.title}) ",
        fr=f"{question.subject.name} ne tient dans aucune configuration sur {gpus} GPU de {name} : la plus légère "
        f"({one.title}) ",
    )
    if missing > 0:
        text += say(
            en=f"needs {gigabytes(needs)} on one GPU, {gigabytes(missing)} more than there are",
            fr=f"demande {gigabytes(needs)} sur un GPU, soit {gigabytes(missing)} de trop",
        )
    else:
        here = min(one.gpus, question.cluster.gpus_per_node)
        held = memories(question.subject.workload, layouts_of([one], found.space)).host[0] * here
        offloaded, has = gigabytes(held), gigabytes(question.cluster.host_memory_bytes)
        text += say(
            en=f"would offload {offloaded} from the {here} GPUs of a node, whose memory is {has}",
            fr=f"déchargerait {offloaded} depuis les {here} GPU d’un nœud, dont la mémoire est de {has}",
        )
    place = smallest_place(question)
    if place is None:
        return text + say(en="; no cluster known here is large enough.", fr=" ; aucun calculateur connu ne suffit.")
    return text + say(
        en=f"; the smallest cluster that works is {place.cluster.name} with {place.gpus} GPUs.",
        fr=f" ; le plus petit calculateur qui convient est {place.cluster.name} avec {place.gpus} GPU.",
    )
