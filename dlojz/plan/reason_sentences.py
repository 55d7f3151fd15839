"""Why a layout is refused before its bytes are known, in one sentence with its numbers.

Layer 4. Invariant: one sentence per reason of the closed list, and it names what is wrong, not only that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dlojz.plan.candidate import Candidate
from dlojz.plan.engines import OFFERS
from dlojz.plan.question import Question
from dlojz.plan.space import sequence_parts
from dlojz.text import say


def reason_sentence(reason: str, question: Question, one: Candidate) -> str:
    """The sentence; empty for reasons that need bytes or seconds (`dlojz.plan.cost_sentences`)."""
    sentence = _SENTENCES.get(reason)
    return "" if sentence is None else sentence(question, one)


def _gpus(question: Question, one: Candidate) -> str:
    product = one.dp * one.tp * one.pp * one.cp
    names, numbers = "dp × tp × pp", f"{one.dp} × {one.tp} × {one.pp}"
    if one.cp > 1:
        names, numbers = f"{names} × cp", f"{numbers} × {one.cp}"
    return say(
        en=f"{names} = {numbers} = {product} is not the {one.gpus} GPUs.",
        fr=f"{names} = {numbers} = {product} n’est pas le nombre de GPU, {one.gpus}.",
    )


def _same(question: Question, one: Candidate) -> str:
    return say(
        en="one of its options changes nothing here (nothing to share, cut or shard): the plainer layout is meant.",
        fr="une de ses options ne change rien ici (rien à partager, couper ou découper) : prenez la configuration "
        "plus simple.",
    )


def _split(question: Question, one: Candidate) -> str:
    experts = question.subject.num_experts
    if max(1, experts) % one.ep:
        return say(
            en=f"ep={one.ep} does not divide the {experts} experts of a mixture."
            if experts
            else f"ep={one.ep} shares experts out, but {question.subject.name} has none.",
            fr=f"ep={one.ep} ne divise pas les {experts} experts d’un mélange."
            if experts
            else f"ep={one.ep} partage des experts, mais {question.subject.name} n’en a pas.",
        )
    if one.dp % one.ep:
        return say(
            en=f"the replicas share the experts out, but ep={one.ep} does not divide dp={one.dp}.",
            fr=f"ce sont les répliques qui se partagent les experts, mais ep={one.ep} ne divise pas dp={one.dp}.",
        )
    return question.subject.misfit(one.tp)


def _sequence(question: Question, one: Candidate) -> str:
    tokens = question.subject.sequence_length
    if one.cp > 1:
        parts = int(sequence_parts(one.tp, one.cp, one.sequence_parallel))
        shared = f" × tp = {one.tp}" if one.sequence_parallel else ""
        return say(
            en=f"context parallelism deals {tokens} tokens out in 2 × cp = 2 × {one.cp}{shared} parts, {parts} in all, "
            "which does not come out even.",
            fr=f"le Context Parallelism répartit {tokens} tokens en 2 × cp = 2 × {one.cp}{shared} parts, {parts} en "
            "tout : ça ne tombe pas juste.",
        )
    return say(
        en=f"sequence parallelism shares {tokens} tokens among tp={one.tp} ranks, which does not come out even.",
        fr=f"le Sequence Parallelism partage {tokens} tokens entre tp={one.tp} rangs : ça ne tombe pas juste.",
    )


def _stages(question: Question, one: Candidate) -> str:
    layers = question.subject.num_layers
    each = -(-layers // one.pp)
    filled = -(-layers // each)
    if one.pp <= layers and filled == one.pp:
        return say(
            en=f"{one.engine} wants equal stages, but pp={one.pp} does not divide {layers} layers.",
            fr=f"{one.engine} veut des étages égaux, or pp={one.pp} ne divise pas {layers} couches.",
        )
    return say(
        en=f"{layers} layers, {each} to a stage, fill {filled} of pp={one.pp} stages.",
        fr=f"{layers} couches, {each} par étage, remplissent {filled} étages sur pp={one.pp}.",
    )


def _chunks(question: Question, one: Candidate) -> str:
    layers, number = question.subject.num_layers, one.pp * one.chunks
    parts = f"pp × chunks = {one.pp} × {one.chunks} = {number}"
    return say(
        en=f"{layers} layers cannot be dealt out to {parts} equal parts.",
        fr=f"{layers} couches ne se répartissent pas en {parts} parts égales.",
    )


def _batch(question: Question, one: Candidate) -> str:
    product = f"dp × micro-batch = {one.dp} × {one.micro_batch} = {one.dp * one.micro_batch}"
    return say(
        en=f"a batch of {question.batch} is no multiple of {product}.",
        fr=f"un batch de {question.batch} n’est pas un multiple de {product}.",
    )


def _schedule(question: Question, one: Candidate) -> str:
    least = say(en=f"at least pp = {one.pp}", fr=f"au moins pp = {one.pp}")
    multiple = say(en=f"a multiple of pp = {one.pp}", fr=f"un multiple de pp = {one.pp}")
    need = least if one.chunks == 1 else multiple
    return say(
        en=f"{one.schedule} needs {need} micro-batches, but a replica has {one.micro_batches}.",
        fr=f"{one.schedule} demande {need} micro-batches, or une réplique en a {one.micro_batches}.",
    )


def _not_offered(question: Question, one: Candidate) -> str:
    """What of a layout its library does not offer."""
    offer, name = OFFERS[one.engine], one.engine
    zero = offer.zero_pipeline if one.pp > 1 else offer.zero
    listed = ", ".join(map(str, zero))
    with_pipeline = say(en=" with a pipeline", fr=" avec un pipeline") if one.pp > 1 else ""
    if one.zero not in zero:
        return say(
            en=f"{name} has no ZeRO-{one.zero}{with_pipeline}: it has zero = {listed}.",
            fr=f"{name} n’a pas ZeRO-{one.zero}{with_pipeline} : il a zero = {listed}.",
        )
    lacks = ""
    if one.tp > 1 and not offer.tensor[question.subject.is_image]:
        lacks = say(en="Tensor Parallelism for this model", fr="Tensor Parallelism pour ce modèle")
    elif one.pp > 1 and one.schedule not in offer.schedules:
        lacks = say(en=f"the schedule {one.schedule}", fr=f"l’ordonnancement {one.schedule}")
    elif one.checkpointing not in offer.checkpointing:
        lacks = say(en=f"checkpointing={one.checkpointing}", fr=f"checkpointing={one.checkpointing}")
    elif one.schedule == "zb-h1" and one.checkpointing != "none":
        lacks = say(
            en="recomputation with a split backward (zb-h1)",
            fr="recalcul avec une passe arrière coupée en deux (zb-h1)",
        )
    elif one.cp > 1 and not (one.zero in offer.context and question.fused_attention and not question.subject.is_image):
        lacks = _no_context(question, one)
    elif one.ep > 1 and one.zero not in offer.experts[one.pp > 1]:
        lacks = say(
            en=f"expert parallelism{with_pipeline} with ZeRO-{one.zero}",
            fr=f"l’Expert Parallelism{with_pipeline} avec ZeRO-{one.zero}",
        )
    elif one.sequence_parallel and not (offer.sequence and not question.subject.is_image):
        lacks = say(en="sequence parallelism for this model", fr="Sequence Parallelism pour ce modèle")
    elif one.offload != "none":
        lacks = say(
            en=f"offload={one.offload} with tp {one.tp}, pp {one.pp}, ZeRO-{one.zero}",
            fr=f"offload={one.offload} avec tp {one.tp}, pp {one.pp}, ZeRO-{one.zero}",
        )
    return say(en=f"{name} does not offer {lacks}.", fr=f"{name} ne propose pas : {lacks}.")


def _no_context(question: Question, one: Candidate) -> str:
    """What of context parallelism is missing."""
    stages = OFFERS[one.engine].context
    if question.subject.is_image:
        return say(en="context parallelism for images", fr="le Context Parallelism pour des images")
    if not stages:
        return say(en="context parallelism", fr="le Context Parallelism")
    if not question.fused_attention:
        return say(
            en="context parallelism without a fused attention", fr="le Context Parallelism sans attention fusionnée"
        )
    listed = ", ".join(map(str, stages))
    return say(
        en=f"context parallelism with ZeRO-{one.zero}, only with zero = {listed}",
        fr=f"le Context Parallelism avec ZeRO-{one.zero}, seulement avec zero = {listed}",
    )


_SENTENCES: Final[dict[str, Callable[[Question, Candidate], str]]] = {
    "gpus": _gpus,
    "same": _same,
    "engine": _not_offered,
    "split": _split,
    "sequence": _sequence,
    "stages": _stages,
    "chunks": _chunks,
    "batch": _batch,
    "schedule": _schedule,
}
