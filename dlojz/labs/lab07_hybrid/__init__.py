"""Lab 07: its exercises in order, and what the student predicts."""

from __future__ import annotations

from dlojz.labs.kit.exercise import Prediction
from dlojz.labs.lab07_hybrid.exercises import BETWEEN_NODES, DEGREES, GROUPS, LAYOUT_3D, PLACE, PLACEMENT
from dlojz.labs.lab07_hybrid.exercises_step import RING_ATTENTION, STEP_2D

EXERCISES = (PLACE, DEGREES, GROUPS, BETWEEN_NODES, STEP_2D, LAYOUT_3D, RING_ATTENTION, PLACEMENT)

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
        id="across-seconds",
        en="How many seconds per step do the messages of tp take over the network if tp is outermost, for LLaMA-2 7B?",
        fr="Combien de secondes par pas prennent les messages de tp par le réseau si tp est le plus extérieur, pour "
        "LLaMA-2 7B ?",
        kind="seconds",
        tolerance=0.05,
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
    Prediction(
        id="ring-bytes",
        en="How many bytes does each of 4 ranks send in one ring attention, forward, of 256 tokens, 4 heads of 32, in "
        "fp32?",
        fr="Combien d’octets chacun des 4 rangs envoie-t-il pour une attention en anneau, en passe avant, de 256 "
        "tokens, 4 têtes de 32, en fp32 ?",
        kind="bytes",
        tolerance=0.001,
    ),
    Prediction(
        id="zigzag-speed-up",
        en="How many times as fast is causal ring attention on 2 ranks in zigzag order as with contiguous tokens?",
        fr="Combien de fois plus vite va une attention causale en anneau sur 2 rangs, en zigzag plutôt que par tokens "
        "contigus ?",
        kind="ratio",
        tolerance=0.25,
    ),
)
