"""Lab 07: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab07_hybrid.exercises import BETWEEN_NODES, DEGREES, GROUPS, LAYOUT_3D, PLACE
from dlojz.labs.lab07_hybrid.exercises_step import STEP_2D

EXERCISES = (PLACE, DEGREES, GROUPS, BETWEEN_NODES, STEP_2D, LAYOUT_3D)

PREDICTIONS = (
    Prediction(
        id="tensor-across",
        en="How many times as many bytes go between the nodes if tp is outermost, not innermost?",
        fr="Combien de fois plus d’octets passent entre les nœuds si tp est le plus extérieur, et non le plus "
        "intérieur ?",
        kind="ratio",
        tolerance=0.1,
    ),
    Prediction(
        id="weights-3d",
        en="How many times fewer bytes of weights does a rank hold with dp=2, pp=2, tp=2 than one process alone?",
        fr="Combien de fois moins d’octets de poids un rang détient-il avec dp=2, pp=2, tp=2 qu’un processus seul ?",
        kind="ratio",
        tolerance=0.05,
    ),
    Prediction(
        id="gradient-bytes",
        en="How many bytes of gradients does rank 0 all-reduce along dp per step, with dp=2 and tp=2 (fp32)?",
        fr="Combien d’octets de gradients le rang 0 réduit-il par pas selon dp, avec dp=2 et tp=2 (fp32) ?",
        kind="bytes",
        tolerance=0.02,
    ),
)
