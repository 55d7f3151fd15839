"""Distillation: its methods, as the catalogue shows them.

Layer 2. Invariant: importing this loads no torch; the methods differ in the loss alone, so that what one gains over
another is the loss's doing.
"""

from __future__ import annotations

from typing import Any

from dlojz.compress.method import Method
from dlojz.text import say

DEFAULT_STUDENT = "vit_mini"
_SHARED: dict[str, Any] = {
    "student": DEFAULT_STUDENT,
    "initialise": "random",
    "epochs": 12,
    "learning_rate": 1e-3,
}

METHODS: tuple[Method, ...] = (
    Method(
        name="student_alone",
        family="distillation",
        function="distilling:student_alone",
        summary=lambda: say(
            en="the student trained on the labels, without its teacher: what the others are measured by",
            fr="l’étudiant entraîné sur les étiquettes, sans son professeur : la référence des autres",
        ),
        options=_SHARED,
    ),
    Method(
        name="distill_soft",
        family="distillation",
        function="distilling:soft",
        summary=lambda: say(
            en="the teacher's probabilities softened by a temperature (KL), and a tenth of the labels",
            fr="les probabilités du professeur adoucies par une température (KL), et un dixième d’étiquettes",
        ),
        options={**_SHARED, "temperature": 4.0, "labels": 0.1},
    ),
    Method(
        name="distill_logits",
        family="distillation",
        function="distilling:logits",
        summary=lambda: say(
            en="the teacher's logits, by their mean square difference; no labels",
            fr="les logits du professeur, par l’écart quadratique moyen ; sans étiquettes",
        ),
        options={**_SHARED, "labels": 0.0},
    ),
    Method(
        name="distill_hidden",
        family="distillation",
        function="distilling:hidden",
        summary=lambda: say(
            en="DistilBERT's recipe: every second block of the teacher, soft labels, labels, and the cosine of hidden "
            "states",
            fr="la recette de DistilBERT : un bloc du professeur sur deux, étiquettes douces et vraies, et cosinus des "
            "états cachés",
        ),
        options={
            **_SHARED,
            "initialise": "teacher",
            "temperature": 4.0,
            "labels": 0.1,
            "hidden": 1.0,
            "hidden_kind": "cosine",
        },
    ),
)
"""In the order in which the board shows them."""
