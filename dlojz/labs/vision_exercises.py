"""Lab 01: from an image to tokens.

Layer 6 (labs). Invariant: the references are torch's own functions or the package's own models.

Shape suffixes: C channels, H and W pixels, P patches, E = C × patch², T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlojz.labs.attention_exercises import random_tensors
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def cut_in_patches(image_CHW: Any, patch: int) -> Any:
    """Patches in reading order, each flattened channel by channel, row by row: shape (P, C × patch²).

    Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), section 3.1; the order is that of a convolution's kernel.
    """
    import torch.nn.functional as F

    return F.unfold(image_CHW[None], patch, stride=patch)[0].T


def _images() -> Iterator[tuple[Any, int]]:
    # Wider than high, so that rows and columns cannot be confused unnoticed.
    for channels, height, width, patch, seed in ((3, 8, 12, 4, 7), (1, 6, 10, 2, 8), (2, 9, 6, 3, 9)):
        yield random_tensors((channels, height, width), seed=seed)[0], patch


def _tiles(image_CHW: Any, patch: int) -> Any:
    """(C, rows, patch, columns, patch)."""
    channels, height, width = image_CHW.shape
    return image_CHW.reshape(channels, height // patch, patch, width // patch, patch)


PATCHES = Exercise(
    id="patches",
    title=Said("an image cut in patches", "une image découpée en patches"),
    judge=by_reference(
        cut_in_patches,
        cases=_images,
        mistakes=(
            Mistake(
                lambda image, patch: image.reshape(-1, image.shape[0] * patch**2),
                Said(
                    "A reshape alone cuts the image into runs of pixels along the rows, not into squares: separate "
                    "rows and columns of patches first.",
                    "Un reshape seul coupe l’image en suites de pixels le long des lignes, pas en carrés : séparez "
                    "d’abord les lignes et les colonnes de patches.",
                ),
            ),
            Mistake(
                lambda image, patch: _tiles(image, patch).permute(3, 1, 0, 2, 4).flatten(2).flatten(0, 1),
                Said(
                    "The patches come column by column; read them like a text, row by row.",
                    "Les patches viennent colonne par colonne ; lisez-les comme un texte, ligne par ligne.",
                ),
            ),
            Mistake(
                lambda image, patch: _tiles(image, patch).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1),
                Said(
                    "Within a patch the channels come last; the statement asks for channel by channel, as in the "
                    "kernel of a convolution.",
                    "Dans un patch, les canaux viennent en dernier ; l’énoncé demande canal par canal, comme dans le "
                    "noyau d’une convolution.",
                ),
            ),
            Mistake(
                lambda image, patch: _tiles(image, patch).permute(1, 3, 0, 4, 2).flatten(2).flatten(0, 1),
                Said(
                    "Each patch is transposed: within a patch, too, rows come before columns.",
                    "Chaque patch est transposé : dans un patch aussi, les lignes viennent avant les colonnes.",
                ),
            ),
            Mistake(
                lambda image, patch: cut_in_patches(image, patch).T,
                Said(
                    "One patch per row is expected: transpose the result.",
                    "On attend un patch par ligne : transposez le résultat.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: from here on, an image is a sequence like a sentence.",
        "Exact : à partir d’ici, une image est une séquence comme une phrase.",
    ),
    hints=(
        Said(
            "Reshape to five dimensions, so that “which row of patches” and “which row within the patch” are apart.",
            "Passez à cinq dimensions, pour séparer « quelle ligne de patches » et « quelle ligne dans le patch ».",
        ),
        Said(
            "reshape(C, H // patch, patch, W // patch, patch), then permute(1, 3, 0, 2, 4), then flatten twice.",
            "reshape(C, H // patch, patch, W // patch, patch), puis permute(1, 3, 0, 2, 4), puis flatten deux fois.",
        ),
    ),
)


def embed(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    """Tokens of a ViT: the class token, then the projected patches, positions added to all, T = P + 1.

    Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), equation 1.
    """
    import torch

    return torch.cat((class_token_D[None], patches_PE @ projection_ED)) + position_TD


def _sequences() -> Iterator[tuple[Any, ...]]:
    for patches, length, width, seed in ((4, 12, 6, 10), (9, 27, 8, 11)):
        yield random_tensors((patches, length), (length, width), (width,), (patches + 1, width), seed=seed)


def _class_last(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    import torch

    return torch.cat((patches_PE @ projection_ED, class_token_D[None])) + position_TD


def _class_without_position(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    import torch

    return torch.cat((class_token_D[None], patches_PE @ projection_ED + position_TD[1:]))


def _shifted_positions(patches_PE: Any, projection_ED: Any, class_token_D: Any, position_TD: Any) -> Any:
    import torch

    return torch.cat((class_token_D[None], patches_PE @ projection_ED + position_TD[:-1]))


TOKENS = Exercise(
    id="tokens",
    title=Said("class token and positions", "le token de classe et les positions"),
    judge=by_reference(
        embed,
        cases=_sequences,
        mistakes=(
            Mistake(
                _class_last,
                Said(
                    "The class token stands at the end; it is token 0, where the head of a ViT looks for it.",
                    "Le token de classe est à la fin ; c’est le token 0, là où la tête d’un ViT le cherche.",
                ),
            ),
            Mistake(
                _class_without_position,
                Said(
                    "The class token has got no position: position_TD has one row more than there are patches, and "
                    "its first row is for the class token.",
                    "Le token de classe n’a pas reçu de position : position_TD a une ligne de plus qu’il n’y a de "
                    "patches, et la première est pour lui.",
                ),
            ),
            Mistake(
                _shifted_positions,
                Said(
                    "The positions are shifted by one: row 0 belongs to the class token, row 1 to the first patch.",
                    "Les positions sont décalées d’un rang : la ligne 0 est celle du token de classe, la ligne 1 "
                    "celle du premier patch.",
                ),
            ),
            Mistake(
                lambda patches, projection, token, position: patches @ projection + position[1:],
                Said(
                    "The class token is missing: T = P + 1 tokens are expected, the class token first.",
                    "Le token de classe manque : on attend T = P + 1 tokens, celui de classe en premier.",
                ),
            ),
            Mistake(
                lambda patches, projection, token, position: embed(patches, projection, token, position * 0),
                Said(
                    "The positions are missing: without them the model sees a bag of patches, in no order.",
                    "Les positions manquent : sans elles, le modèle voit un sac de patches, sans ordre.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right. Token 0 will gather what the class needs; the others remember where they come from.",
        "Exact. Le token 0 rassemblera ce qu’il faut pour la classe ; les autres se souviennent de leur place.",
    ),
    hints=(
        Said(
            "Three operations: a matrix product, torch.cat, an addition. In which order, so that the class token gets "
            "a position too?",
            "Trois opérations : un produit matriciel, torch.cat, une addition. Dans quel ordre, pour que le token de "
            "classe reçoive lui aussi une position ?",
        ),
        Said(
            "torch.cat wants tensors of as many dimensions: class_token_D[None] has shape (1, D).",
            "torch.cat veut des tenseurs de même nombre de dimensions : class_token_D[None] est de forme (1, D).",
        ),
    ),
)
