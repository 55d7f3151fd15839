"""Bytes per parameter: the field's rules of thumb by name, what each counts, and DeepSpeed's buffers.

Layer 3. Invariant: a rule is the sum of its parts, and every part says in which precision it is kept. The closed forms
from which such rules come are in `dlojz.predict.state_forms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dlojz.footprint import Category
from dlojz.predict.state_forms import StatesForm, bytes_per_parameter
from dlojz.schema import LabError, one_of
from dlojz.text import say

REDUCE_BUCKET_ELEMENTS: Final = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: gradients that are reduced together."""
ALLGATHER_BUCKET_ELEMENTS: Final = 500_000_000
"""`allgather_bucket_size`: weights that stages 1 and 2 gather together after the update."""
PREFETCH_BUCKET_ELEMENTS: Final = 50_000_000
"""`stage3_prefetch_bucket_size`: weights that stage 3 gathers ahead of their use."""
PERSISTENCE_THRESHOLD_ELEMENTS: Final = 100_000
"""`stage3_param_persistence_threshold`: parameters up to this size stay whole on every rank."""
MAX_LIVE_ELEMENTS: Final = 1_000_000_000
"""`stage3_max_live_parameters`: weights that stage 3 keeps gathered at once, at most."""
SUB_GROUP_ELEMENTS: Final = 1_000_000_000
"""`sub_group_size`: weights that stage 3 updates together.

Source of all six: DeepSpeed 0.19, `runtime/zero/config.py`, where they are the defaults.
"""


def overlap_buffer_bytes(bucket_elements: int, element_bytes: int = 2) -> int:
    """Device memory that DeepSpeed's `overlap_comm` takes for buckets of reduction and gathering of one size.

    Source: Hugging Face Transformers, "DeepSpeed", ZeRO configuration: 4.5 times both; 9 GB at 5e8 in fp16.
    """
    return 9 * bucket_elements * element_bytes


@dataclass(frozen=True)
class Part:
    """One thing that a rule counts.

    Args:
        category: to which it belongs.
        bytes_per_parameter: of it.
        precision: in which it is kept; empty where it is no tensor of the model.
    """

    category: Category
    bytes_per_parameter: int
    precision: str


@dataclass(frozen=True)
class Rule:
    """A rule of thumb: so many bytes per parameter, and what these are.

    Args:
        name: by which it is found.
        parts: what it counts.
        sources: who says so.
        about: for whom it holds, in the reader's language.
    """

    name: str
    parts: tuple[Part, ...]
    sources: tuple[str, ...]
    about: Callable[[], str]

    @property
    def bytes_per_parameter(self) -> int:
        """Sum of the parts."""
        return sum(part.bytes_per_parameter for part in self.parts)

    def total_bytes(self, parameters: int) -> int:
        """Bytes of a model of so many parameters."""
        return self.bytes_per_parameter * parameters


_HALF_W, _HALF_G = Part("weights", 2, "16 bit"), Part("gradients", 2, "16 bit")
_W, _G = Part("weights", 4, "fp32"), Part("gradients", 4, "fp32")
_MASTER, _ADAM = Part("master", 4, "fp32"), Part("optimizer", 8, "fp32")

RULES: Final[dict[str, Rule]] = {
    rule.name: rule
    for rule in (
        Rule(
            "12-optimizer",
            (_MASTER, _ADAM),
            ("ZeRO (arXiv 1910.02054), §3.1: K = 12",),
            lambda: say(
                en="what ZeRO-1 shards: the optimizer's part alone, in mixed precision with Adam",
                fr="ce que ZeRO-1 répartit : la part de l’optimiseur seule, en précision mixte avec Adam",
            ),
        ),
        Rule(
            "12-momentum",
            (_W, _G, Part("optimizer", 4, "fp32")),
            ("torch.optim.SGD with momentum: one fp32 buffer per parameter",),
            lambda: say(en="fp32 and SGD with momentum", fr="fp32 et SGD avec momentum"),
        ),
        Rule(
            "16-mixed",
            (_HALF_W, _HALF_G, _MASTER, _ADAM),
            ("ZeRO (arXiv 1910.02054), §3.1", "Ultra-Scale Playbook, bf16 without fp32 gradients"),
            lambda: say(en="mixed precision with Adam", fr="précision mixte avec Adam"),
        ),
        Rule(
            "16-fp32",
            (_W, _G, _ADAM),
            (
                "Ultra-Scale Playbook, fp32",
                "torchtitan: FSDP over fp32 weights",
                "accelerate estimate-memory, 4 × fp32",
            ),
            lambda: say(
                en="fp32 with Adam, also under autocast, which casts only what it multiplies",
                fr="fp32 avec Adam, y compris sous autocast, qui ne convertit que ce qu’il multiplie",
            ),
        ),
        Rule(
            "18",
            (_HALF_W, _G, _MASTER, _ADAM),
            (
                "Megatron-LM, theoretical_memory_usage.py: 18, or 6 + 12/DP with its distributed optimizer",
                "Bekman, Machine Learning Engineering: 6 + 4 + 8",
                "DeepSpeed 0.19, estimate_zero3_model_states_mem_needs: 18/N",
            ),
            lambda: say(
                en="mixed precision with Adam, gradients accumulated in fp32",
                fr="précision mixte avec Adam, gradients accumulés en fp32",
            ),
        ),
        Rule(
            "20",
            (_HALF_W, _HALF_G, _G, _MASTER, _ADAM),
            (
                "Amazon SageMaker, Introduction to model parallelism: 10 billion parameters take 200 GB or more",
                "ZeRO-Infinity (arXiv 2104.07857), §3: 240·nl·hd² bytes for 12·nl·hd² parameters",
                "Ultra-Scale Playbook, bf16 with fp32 gradients",
                "DeepSpeed 0.19, estimate_zero2_model_states_mem_needs: 2 + 18/N",
            ),
            lambda: say(
                en="the same where gradients are kept in both precisions",
                fr="la même où les gradients sont gardés dans les deux précisions",
            ),
        ),
        Rule(
            "24",
            (_W, _G, _ADAM, Part("activations", 8, "")),
            ("a table shown in courses, without a publication that we know of",),
            lambda: say(
                en="fp32 with Adam, and some 8 bytes for activations and temporaries, which in truth do not depend on "
                "the number of parameters but on the batch",
                fr="fp32 avec Adam, plus environ 8 octets d’activations et de tenseurs temporaires, qui en réalité ne "
                "dépendent pas du nombre de paramètres mais du batch",
            ),
        ),
    )
}
"""The rules by name, the smallest first."""


def rule(name: str) -> Rule:
    """The rule of thumb of this name.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    if name not in RULES:
        raise LabError(one_of(say(en="rule", fr="règle"), name, RULES))
    return RULES[name]


__all__ = [
    "ALLGATHER_BUCKET_ELEMENTS",
    "MAX_LIVE_ELEMENTS",
    "PERSISTENCE_THRESHOLD_ELEMENTS",
    "PREFETCH_BUCKET_ELEMENTS",
    "REDUCE_BUCKET_ELEMENTS",
    "RULES",
    "SUB_GROUP_ELEMENTS",
    "Part",
    "Rule",
    "StatesForm",
    "bytes_per_parameter",
    "overlap_buffer_bytes",
    "rule",
]
