"""Decision tree of the course, which strategy when, walked with the figures of one question.

Every branch shows the figures that decide it, all from the cost model or counted; the leaf is compared with what the
search found.

Source of the order of the questions: the course (states, activations, links, batch), which is that of Narayanan et al.
2021, §3.3 ("Takeaways"): data parallelism first, tensor parallelism within a node, then the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dlojz.base.display_hook import html_of
from dlojz.base.language import decimal, say, yes_no
from dlojz.config.fields import LayoutFields
from dlojz.cost_model.layouts import Integers
from dlojz.planner.planned_memory import layout_memories
from dlojz.planner.question import Question
from dlojz.planner.search import SearchResult
from dlojz.planner.space import LEAST_CONTEXT, WORDING, columns_of, gigabytes, planned_layout, run_refusal

FAMILIES: Final = ("data", "zero", "tensor", "pipeline", "hybrid", "context", "offload")
MOST_EXPOSED: Final = 0.25
"""Share of a step in exposed messages of ZeRO from which the tree turns to other ways. Our choice."""


@dataclass(frozen=True)
class Branch:
    """One question of the tree.

    Attributes:
        figures: name and value of what decides.
    """

    question: str
    figures: tuple[tuple[str, str], ...]
    yes: bool


@dataclass(frozen=True)
class Family:
    """Family of layouts: what the search found of one way to split.

    Attributes:
        name: of `FAMILIES`.
        admitted: how many of its layouts fit.
        best: the fastest; None if none fits.
        step_s: its seconds; infinite if none fits.
        exposed: share of its step in messages of data parallelism that are waited for.
    """

    name: str
    admitted: int
    best: LayoutFields | None
    step_s: float
    exposed: float


@dataclass(frozen=True)
class Tree:
    """Path down the decision tree, and its leaf.

    Attributes:
        leaf: of `FAMILIES`.
        families: all of them, as searched.
    """

    branches: tuple[Branch, ...]
    leaf: str
    families: dict[str, Family]

    @property
    def found(self) -> str:
        """The family of the fastest layout."""
        return min(self.families.values(), key=lambda family: family.step_s).name

    @property
    def sentence(self) -> str:
        """Where the tree ends, and how that compares with the search."""
        leaf, best = self.families[self.leaf], self.families[self.found]
        text = say(
            en=f"The tree ends at {family_words(leaf.name)}", fr=f"L’arbre aboutit à : {family_words(leaf.name)}"
        )
        if leaf.name == best.name:
            return text + say(en=", and so does the search.", fr=", et la recherche aussi.")
        slower = decimal(100 * (leaf.step_s / best.step_s - 1), 0)
        return text + say(
            en=f"; the search finds {family_words(best.name)} faster: the tree's way takes {slower} % longer.",
            fr=f" ; la recherche trouve plus rapide : {family_words(best.name)}. La voie de l’arbre prend {slower} % "
            "de plus.",
        )

    def __repr__(self) -> str:
        lines = []
        for branch in self.branches:
            figures = ", ".join(f"{name} {value}" for name, value in branch.figures)
            lines.append(f"{branch.question} {yes_no(branch.yes)} ({figures})")
        return "\n".join([*lines, self.sentence])

    def _repr_html_(self) -> str:
        return html_of(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "branches": [
                {"question": branch.question, "figures": dict(branch.figures), "yes": branch.yes}
                for branch in self.branches
            ],
            "leaf": self.leaf,
            "found": self.found,
            "families": {
                name: {"admitted": family.admitted, "step_s": family.step_s if family.best is not None else None}
                for name, family in self.families.items()
            },
        }


def family_words(name: str) -> str:
    """A family in the reader's language."""
    return WORDING(f"family {name}")


def family_of(columns: dict[str, Integers]) -> Integers:
    """The place in `FAMILIES` of each layout."""
    tensor, pipeline = columns["tp"] > 1, columns["pp"] > 1
    # Indices of FAMILIES, each rule over the one before: degrees, then ZeRO, then cp, then offload.
    families = np.where(
        tensor & pipeline, 4, np.where(pipeline, 3, np.where(tensor, 2, np.where(columns["zero"] > 0, 1, 0)))
    )
    families = np.where(columns["cp"] > 1, FAMILIES.index("context"), families)
    return np.where(columns["offload"] > 0, FAMILIES.index("offload"), families)


def families_of(result: SearchResult) -> dict[str, Family]:
    """Summarise the search by family."""
    belongs = family_of(result.space.columns(result.admitted))
    summaries = {}
    for index, name in enumerate(FAMILIES):
        members = np.flatnonzero(belongs == index)  # ascending, so the first is the fastest
        if not members.size:
            # inf, so that no minimum picks a family without layouts.
            summaries[name] = Family(name, 0, None, float("inf"), 0.0)
            continue
        fastest = int(members[0])
        step = float(result.step_s[fastest])
        exposed = float(result.parts.data[fastest]) / step
        summaries[name] = Family(name, int(members.size), result.layout(fastest), step, exposed)
    return summaries


def _alone(result: SearchResult, zero: int = 0, checkpointing: str = "none") -> float:
    """Bytes of a rank of plain data parallelism with micro-batches of one sample."""
    # A model that cannot be recomputed is judged with all kept.
    if checkpointing != "none" and not _recomputes(result.space.question):
        checkpointing = "none"
    layout = _replicated(result.space.question, zero, checkpointing)
    return float(layout_memories(result.space, columns_of([layout])).total_bytes[0])


def _replicated(question: Question, zero: int, checkpointing: str) -> LayoutFields:
    gpus, engine = max(question.gpus), question.engines[0]  # all GPUs as replicas, one sample each
    return planned_layout(dp=gpus, zero=zero, micro_batch=1, checkpointing=checkpointing, engine=engine)


def _recomputes(question: Question) -> bool:
    """Whether the model's activations can be computed again, which a model from elsewhere may not allow."""
    layout = _replicated(question, 0, "full")
    return not question.is_of_runs or not run_refusal(question.subject, question.run_precision, layout)


def tree_of(result: SearchResult) -> Tree:
    """Walk the decision tree for the question of a search that admits one layout at least."""
    question = result.space.question
    families = families_of(result)
    branches: list[Branch] = []
    gpus, batch = max(question.gpus), question.batch

    def ask(english: str, french: str, yes: bool, *figures: tuple[str, str]) -> bool:
        branches.append(Branch(say(en=english, fr=french), figures, yes))
        return yes

    def compared(needs: float) -> tuple[tuple[str, str], tuple[str, str]]:
        return (
            (say(en="needs", fr="il faut"), gigabytes(needs)),
            (say(en="there are", fr="il y a"), gigabytes(question.device_bytes)),
        )

    # Bytes of one GPU without any splitting.
    kept_bytes, recomputed_bytes = _alone(result), _alone(result, checkpointing="full")
    # `or`: recomputation is asked about only where states and one sample do not fit.
    if ask(
        "Do the model's states and one sample fit on one GPU?",
        "Les états du modèle et un échantillon tiennent-ils sur un GPU ?",
        kept_bytes <= question.device_bytes,
        *compared(kept_bytes),
    ) or (
        _recomputes(question)
        and ask(
            "And if activations are computed again?",
            "Et si l’on recalcule les activations ?",
            recomputed_bytes <= question.device_bytes,
            *compared(recomputed_bytes),
        )
    ):
        # Here the model fits whole: data parallelism, unless there are fewer samples than GPUs.
        if ask(
            "Is there a sample for every GPU?",
            "Y a-t-il un échantillon par GPU ?",
            batch >= gpus and bool(families["data"].admitted),
            (say(en="batch", fr="batch"), str(batch)),
            ("GPU", str(gpus)),
        ):
            return Tree(tuple(branches), "data", families)
    else:
        sharded = _alone(result, zero=3, checkpointing="full")
        zero = families["zero"]
        samples = (say(en="samples per GPU", fr="échantillons par GPU"), decimal(batch / gpus, 2))
        if ask(
            f"Do the states fit if {gpus} GPUs share them (ZeRO-3), and has each GPU whole samples?",
            f"Les états tiennent-ils si {gpus} GPU se les partagent (ZeRO-3), chacun avec des échantillons entiers ?",
            bool(zero.admitted),
            # A refusal begins with its cause: no whole samples, or no memory.
            *_failing_first((batch % gpus != 0, (samples,)), (sharded > question.device_bytes, compared(sharded))),
        ) and ask(
            "Do the links hide ZeRO's messages behind the computation?",
            "Les messages de ZeRO sont-ils recouverts par le calcul ?",
            zero.exposed <= MOST_EXPOSED,
            (say(en="exposed", fr="exposé"), f"{decimal(100 * zero.exposed, 0)} %"),
            (say(en="allowed", fr="admis"), f"{decimal(100 * MOST_EXPOSED, 0)} %"),
        ):
            return Tree(tuple(branches), "zero", families)
    # Neither whole replicas nor sharded ones: the model itself is cut.
    leaf = _split(question, families, ask)
    return Tree(tuple(branches), leaf, families)


def _failing_first(*facts: tuple[bool, tuple[tuple[str, str], ...]]) -> tuple[tuple[str, str], ...]:
    """Order facts so that those that speak against a branch come before those that do not."""
    return tuple(
        figure for fails in (True, False) for failing, figures in facts if failing is fails for figure in figures
    )


def _split(question: Question, families: dict[str, Family], ask: Any) -> str:
    """The lower half of the tree: the model itself must be cut."""
    node = question.cluster.gpus_per_node
    tensor, hybrid, pipeline = families["tensor"], families["hybrid"], families["pipeline"]
    # Tensor parallelism across nodes is never the tree's way.
    within = tensor.best is not None and tensor.best.tp <= node and tensor.exposed <= MOST_EXPOSED
    if ask(
        f"Is it enough to split layers within a node of {node} GPUs, with links that hide the replicas' messages?",
        f"Suffit-il de partager les couches dans un nœud de {node} GPU, les liens cachant les messages des répliques ?",
        within,
        (say(en="layouts that fit", fr="configurations qui tiennent"), str(tensor.admitted)),
        ("tp", str(tensor.best.tp) if tensor.best is not None else "—"),
        (say(en="exposed", fr="exposé"), f"{decimal(100 * tensor.exposed, 0)} %"),
    ):
        return "tensor"
    for name, family in (("hybrid", hybrid), ("pipeline", pipeline)):
        layout = family.best
        if layout is not None:
            filled = ask(
                "Are there enough micro-batches to fill a pipeline?",
                "Y a-t-il assez de micro-batches pour remplir un pipeline ?",
                layout.micro_batches >= 4 * (layout.pp - 1),  # bubble (p − 1)/m ≤ 1/4
                ("pp", str(layout.pp)),
                (say(en="micro-batches", fr="micro-batches"), str(layout.micro_batches)),
                (
                    say(en="bubble (p − 1)/(v·m)", fr="bulle (p − 1)/(v·m)"),
                    f"{decimal(100 * (layout.pp - 1) / ((layout.chunks or 1) * layout.micro_batches), 0)} %",
                ),
            )
            # The first of the two families that fits decides.
            return name if filled or not _long(question, families, ask) else "context"
    if _long(question, families, ask):
        return "context"
    # Something is admitted, or there would be no tree.
    return next(name for name in ("offload", *FAMILIES) if families[name].admitted)


def _long(question: Question, families: dict[str, Family], ask: Any) -> bool:
    """Whether the sequences are long enough to split; asked where that was searched, and fits."""
    context = families["context"]
    if context.best is None:
        return False
    tokens = question.subject.sequence_length or 0
    answer: bool = ask(
        f"Are the sequences long enough to be split, {LEAST_CONTEXT} tokens or more to a rank?",
        f"Les séquences sont-elles assez longues pour être découpées, {LEAST_CONTEXT} tokens ou plus par rang ?",
        tokens // context.best.cp >= LEAST_CONTEXT,
        ("tokens", str(tokens)),
        ("cp", str(context.best.cp)),
        (say(en="tokens of a rank", fr="tokens par rang"), str(tokens // context.best.cp)),
    )
    return answer
