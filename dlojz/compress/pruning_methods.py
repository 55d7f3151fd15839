"""Pruning: its methods, as the catalogue shows them.

Layer 2. Invariant: importing this loads no torch.
"""

from __future__ import annotations

from dlojz.compress.method import Method
from dlojz.text import say

_FINE_TUNING = {"epochs": 3, "learning_rate": 5e-4}

METHODS: tuple[Method, ...] = (
    Method(
        name="magnitude_global",
        family="pruning",
        function="pruning:magnitude",
        summary=lambda: say(
            en="the smallest weights of all layers together become zero, the others are trained on",
            fr="les plus petits poids, toutes couches confondues, deviennent nuls ; les autres sont affinés",
        ),
        options={"sparsity": 0.8, **_FINE_TUNING, "per_layer": False},
    ),
    Method(
        name="magnitude_layer",
        family="pruning",
        function="pruning:magnitude",
        summary=lambda: say(
            en="the smallest weights of each layer become zero, the same share of each; the others are trained on",
            fr="les plus petits poids de chaque couche deviennent nuls, la même part partout ; les autres sont affinés",
        ),
        options={"sparsity": 0.8, **_FINE_TUNING, "per_layer": True},
    ),
    Method(
        name="gradual",
        family="pruning",
        function="pruning:gradual",
        summary=lambda: say(
            en="more and more weights become zero while the model trains, along the cubic of Zhu and Gupta",
            fr="de plus en plus de poids deviennent nuls pendant l’entraînement, selon la cubique de Zhu et Gupta",
        ),
        options={"sparsity": 0.9, "epochs": 6, "learning_rate": 1e-3, "every": 5, "per_layer": True},
    ),
    Method(
        name="lottery",
        family="pruning",
        function="pruning:lottery_ticket",
        summary=lambda: say(
            en="a winning ticket: trained, pruned and rewound in rounds, from scratch",
            fr="un ticket gagnant : entraîné, élagué puis rembobiné, plusieurs fois, à partir de zéro",
        ),
        options={
            **{"sparsity": 0.8, "rounds": 2, "epochs": 6, "learning_rate": 1e-3},
            **{"rewind_epochs": 1, "per_layer": True},
        },
    ),
    Method(
        name="two_to_four",
        family="pruning",
        function="pruning:two_to_four",
        summary=lambda: say(
            en="2:4: of every four weights of a row the two smaller become zero, the others are trained on",
            fr="2:4 : sur quatre poids d’une ligne, les deux plus petits deviennent nuls ; les autres sont affinés",
        ),
        options=_FINE_TUNING,
    ),
    Method(
        name="two_to_four_permuted",
        family="pruning",
        function="pruning:two_to_four_permuted",
        summary=lambda: say(
            en="2:4 after an order of the dimensions that computes the same and loses less",
            fr="2:4 après avoir rangé les dimensions dans un ordre qui calcule la même chose et perd moins",
        ),
        options={**_FINE_TUNING, "sweeps": 2},
    ),
    Method(
        name="two_to_four_sr_ste",
        family="pruning",
        function="pruning:two_to_four_sr_ste",
        summary=lambda: say(
            en="2:4 trained with SR-STE: the mask follows the weights, hidden ones are pulled towards zero",
            fr="2:4 appris avec SR-STE : le masque suit les poids, ceux qu’il cache sont tirés vers zéro",
        ),
        options={**_FINE_TUNING, "decay": 2e-4, "origin": "teacher"},
    ),
)
"""In the order in which the board shows them."""
