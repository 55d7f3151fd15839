"""Quantization: its methods, as the catalogue shows them.

Layer 2. Invariant: importing this loads no torch.
"""

from __future__ import annotations

from dlojz.compress.method import Method
from dlojz.compress.torchao_import import VERSION
from dlojz.text import say

_INT8 = {"bits": 8, "symmetric": True, "per_channel": True, "weight_range": "min_max"}
# Where it begins to matter for a model this small: two bits, and one scale for a whole layer.
_FEW_BITS = {"bits": 2, "per_channel": False, "weight_range": "min_max"}
_TRAINED = {**_FEW_BITS, "epochs": 3, "learning_rate": 5e-4}

METHODS: tuple[Method, ...] = (
    Method(
        name="int8_weight_only",
        family="quantization",
        function="quantization:post_training",
        summary=lambda: say(en="INT8 weights, multiplied as real numbers", fr="poids INT8, multipliés comme des réels"),
        options={**_INT8, "activations": "float"},
    ),
    Method(
        name="int8_dynamic",
        family="quantization",
        function="quantization:post_training",
        summary=lambda: say(
            en="INT8 weights and inputs, each row of inputs on a grid found as it comes; products of integers",
            fr="poids et entrées INT8, chaque ligne d’entrées sur une grille trouvée à la volée ; produits d’entiers",
        ),
        options={**_INT8, "activations": "dynamic"},
    ),
    Method(
        name="int8_static",
        family="quantization",
        function="quantization:post_training",
        summary=lambda: say(
            en="INT8 weights and inputs, the inputs' grid fixed beforehand by calibration; products of integers",
            fr="poids et entrées INT8, la grille des entrées fixée d’avance par calibrage ; produits d’entiers",
        ),
        options={**_INT8, "activations": "static", "activation_range": "mse", "samples": 256},
    ),
    Method(
        name="int4_weight_only",
        family="quantization",
        function="quantization:post_training",
        summary=lambda: say(
            en="4-bit weights, two to a byte, a scale per output; multiplied as real numbers",
            fr="poids de 4 bits, deux par octet, une échelle par sortie ; multipliés comme des réels",
        ),
        options={**_INT8, "bits": 4, "activations": "float"},
    ),
    Method(
        name="ptq_2bit",
        family="quantization",
        function="quantization:post_training",
        summary=lambda: say(
            en="2-bit weights, one scale a layer, without any training: where quantization alone breaks",
            fr="poids de 2 bits, une échelle par couche, sans entraînement : là où la quantification seule casse",
        ),
        options={**_FEW_BITS, "symmetric": True, "activations": "float"},
    ),
    Method(
        name="ptq_2bit_tuned",
        family="quantization",
        function="quantization:post_training_tuned",
        summary=lambda: say(
            en="the same, then scales, biases and norms are trained on; the integers stay",
            fr="la même, puis échelles, biais et normalisations sont affinés ; les entiers restent",
        ),
        options=_TRAINED,
    ),
    Method(
        name="qat_2bit",
        family="quantization",
        function="quantization:aware_training",
        summary=lambda: say(
            en="the same grid, with the weights trained on it through the straight-through estimator",
            fr="la même grille, les poids s’y entraînant grâce à l’estimateur straight-through",
        ),
        options=_TRAINED,
    ),
    Method(
        name="torch_int8_dynamic",
        family="quantization",
        function="quantization:torch_dynamic",
        summary=lambda: say(
            en="INT8 with torch's own kernels, the fast way on a CPU",
            fr="INT8 avec les noyaux de torch, la voie rapide sur CPU",
        ),
    ),
    *(
        Method(
            name=f"torchao_{form}",
            family="quantization",
            function=f"quantization:torchao_{form}",
            summary=summary,
            needs=(f"torchao=={VERSION}",),
        )
        for form, summary in (
            (
                "int8_weight_only",
                lambda: say(en="torchao's INT8 weights: our numbers", fr="les poids INT8 de torchao : nos nombres"),
            ),
            (
                "int8_dynamic",
                lambda: say(
                    en="torchao's INT8 weights and inputs: our numbers; made for torch.compile: called as here, "
                    "slower than torch's kernels",
                    fr="poids et entrées INT8 de torchao : nos nombres ; conçu pour torch.compile : appelé comme ici, "
                    "plus lent que les noyaux de torch",
                ),
            ),
            (
                "fp8_weight_only",
                lambda: say(en="torchao's FP8 weights (e4m3)", fr="les poids FP8 (e4m3) de torchao"),
            ),
            (
                "int4_weight_only",
                lambda: say(
                    en="torchao's INT4 weights in groups of 32, the rest in bfloat16",
                    fr="les poids INT4 de torchao par groupes de 32, le reste en bfloat16",
                ),
            ),
        )
    ),
)
"""In the order in which the board shows them."""
