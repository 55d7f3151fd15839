"""Lab 02: activation checkpointing by segments.

Layer 6 (labs). Invariant: the answer is held to the outputs and gradients of the plain loop, and to what is really
still in memory after forward: every block knows its own activations and counts how often it runs.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), §4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor, nn

_SAMPLES, _WIDTH = 4, 6
_CASES = ((6, 2), (7, 3), (5, 1), (8, 4))  # blocks, blocks per segment
_TOLERANCE = 1e-5


def checkpointed(blocks: Sequence[nn.Module], x: Tensor, per_segment: int) -> Tensor:
    """Run the blocks, keeping for backward the input of each segment only; backward runs the segment again."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    for start in range(0, len(blocks), per_segment):
        segment = nn.Sequential(*blocks[start : start + per_segment])
        x = checkpoint(segment, x, use_reentrant=False)
    return x


@dataclass
class _Trial:
    """What a forward pass leaves in memory, and what backward gives."""

    output: Tensor
    gradients: list[Tensor | None]
    hidden_alive: int
    outputs_alive: int
    runs: list[int]


def _probed_blocks(count: int, seed: int) -> tuple[list[nn.Module], list[Any], list[Any], list[int]]:
    """Blocks that note their hidden activations and outputs, without keeping them alive, and how often they run."""
    import torch
    from torch import nn

    hidden: list[Any] = []
    outputs: list[Any] = []
    runs = [0] * count

    class Probed(nn.Module):
        """A small MLP with dropout, added to its input."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.expand, self.shrink = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            runs[self.number] += 1
            inner = torch.tanh(self.expand(x))
            output: Tensor = x + self.dropout(self.shrink(inner))
            hidden.append(weakref.ref(inner.untyped_storage()))
            outputs.append(weakref.ref(output.untyped_storage()))
            return output

    torch.manual_seed(seed)
    return [Probed(number) for number in range(count)], hidden, outputs, runs


def _tried(answer: Callable[..., Any], count: int, per_segment: int) -> _Trial:
    import torch

    blocks, hidden, outputs, runs = _probed_blocks(count, seed=count)
    x = torch.randn(_SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(count))
    torch.manual_seed(100 + count)  # dropout's
    output = answer(blocks, x, per_segment)
    if output is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(output, torch.Tensor):
        raise Wrong(
            say(
                en=f"Your function returns a {type(output).__name__}, but the tensor that leaves the last block is "
                "expected.",
                fr=f"Votre fonction renvoie un objet de type {type(output).__name__}, mais on attend le tenseur qui "
                "sort du dernier bloc.",
            )
        )
    hidden_alive = sum(each() is not None for each in hidden)
    outputs_alive = sum(each() is not None for each in outputs)
    result = output.detach().clone()
    if output.requires_grad:
        output.square().sum().backward()
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    return _Trial(result, gradients, hidden_alive, outputs_alive, runs)


def _plain(blocks: Sequence[nn.Module], x: Tensor, per_segment: int) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _judge(answer: Callable[..., Any]) -> None:
    for count, per_segment in _CASES:
        given, right = _tried(answer, count, per_segment), _tried(_plain, count, per_segment)
        for refuse in (_judge_output, _judge_gradients, _judge_memory, _judge_runs):
            refuse(given, right, count, per_segment)


def _judge_output(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    if given.output.shape != right.output.shape or not given.output.allclose(right.output, atol=_TOLERANCE):
        unrun = [str(number) for number, runs in enumerate(given.runs) if not runs]
        if unrun:
            raise Wrong(
                say(
                    en=f"With {count} blocks, {per_segment} per segment, these never run: {', '.join(unrun)}. The last "
                    "segment may be shorter than the others.",
                    fr=f"Pour {count} blocs, à raison de {per_segment} par segment, ceux-ci ne s’exécutent jamais : "
                    f"{', '.join(unrun)}. Le dernier segment peut être plus court que les autres.",
                )
            )
        raise Wrong(
            say(
                en="The output is not that of the blocks run one after the other: each segment must begin with what "
                "the one before gives, and nothing may draw random numbers between them.",
                fr="La sortie n’est pas celle des blocs exécutés l’un après l’autre : chaque segment part de ce que "
                "donne le précédent, et rien ne doit tirer de nombres aléatoires entre les deux.",
            )
        )


def _judge_gradients(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    missing = [gradient is None for gradient in given.gradients]
    if all(missing):
        raise Wrong(
            say(
                en="The output is right, but no parameter gets a gradient: there is none under no_grad, and none with "
                "use_reentrant=True where the input asks for no gradient, as images do not. Take "
                "checkpoint(…, use_reentrant=False) alone.",
                fr="La sortie est juste, mais aucun paramètre ne reçoit de gradient : il n’y en a pas sous no_grad, ni "
                "avec use_reentrant=True quand l’entrée n’en demande pas, comme c’est le cas des images. Prenez "
                "checkpoint(…, use_reentrant=False), sans rien d’autre.",
            )
        )
    if any(missing):
        raise Wrong(
            say(
                en="Some parameters get no gradient: a detach cuts all that comes before it. checkpoint() does by "
                "itself all that is needed.",
                fr="Certains paramètres ne reçoivent pas de gradient : un detach coupe tout ce qui le précède. "
                "checkpoint() fait de lui-même tout le nécessaire.",
            )
        )
    for mine, its in zip(given.gradients, right.gradients, strict=True):
        assert mine is not None and its is not None
        if not mine.allclose(its, atol=_TOLERANCE):
            raise Wrong(
                say(
                    en="The output is right but not the gradients: what backward runs again is not what forward ran. "
                    "A function made in a loop sees the last value of the loop's variables, and dropout must draw the "
                    "same mask twice (checkpoint does so by itself).",
                    fr="La sortie est juste, mais pas les gradients : ce que la passe arrière recalcule n’est pas ce "
                    "qu’avait fait la passe avant. Une fonction créée dans une boucle voit la dernière valeur des "
                    "variables de la boucle ; et le dropout doit tirer deux fois le même masque (checkpoint s’en "
                    "charge).",
                )
            )


def _judge_memory(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    segments = -(-count // per_segment)
    if given.hidden_alive:
        raise Wrong(
            say(
                en=f"After forward, {given.hidden_alive} of the {count} hidden activations are still in memory, none "
                "is expected: run every segment through checkpoint(…), the last one too.",
                fr=f"Après la passe avant, {given.hidden_alive} des {count} activations internes sont encore en "
                "mémoire, aucune n’est attendue : faites passer chaque segment par checkpoint(…), le dernier compris.",
            )
        )
    if given.outputs_alive > segments:
        raise Wrong(
            say(
                en=f"After forward, the outputs of {given.outputs_alive} blocks are in memory; with {count} blocks and "
                f"{per_segment} per segment, {segments} are expected: one checkpoint for each segment, not for each "
                "block, and no list of outputs.",
                fr=f"Après la passe avant, les sorties de {given.outputs_alive} blocs sont en mémoire ; pour {count} "
                f"blocs, à raison de {per_segment} par segment, on en attend {segments} : un checkpoint par segment, "
                "non par bloc, et pas de liste de sorties.",
            )
        )
    if given.outputs_alive < segments:
        raise Wrong(
            say(
                en=f"After forward, the outputs of {given.outputs_alive} blocks are in memory, {segments} are "
                "expected: your segments are too long, and backward will have to hold all the activations of one at "
                "once.",
                fr=f"Après la passe avant, les sorties de {given.outputs_alive} blocs sont en mémoire, on en attend "
                f"{segments} : vos segments sont trop longs, et la passe arrière devra garder d’un coup toutes les "
                "activations de l’un d’eux.",
            )
        )


def _judge_runs(given: _Trial, right: _Trial, count: int, per_segment: int) -> None:
    most = max(given.runs)
    if most > 2:
        raise Wrong(
            say(
                en=f"A block runs {most} times in one step; twice is enough: forward, and once more in backward. Do "
                "not put one checkpoint inside another.",
                fr=f"Un bloc s’exécute {most} fois en un pas ; deux suffisent : la passe avant, puis une fois dans la "
                "passe arrière. N’imbriquez pas les checkpoints.",
            )
        )


CHECKPOINT = Exercise(
    id="checkpoint",
    title=Said("checkpointing by segments", "les points de contrôle par segments"),
    judge=_judge,
    praise=Said(
        "Right: the same gradients, and after forward only one tensor per segment is left in memory.",
        "Exact : les mêmes gradients, et après la passe avant il ne reste en mémoire qu’un tenseur par segment.",
    ),
    hints=(
        Said(
            "checkpoint(f, x, use_reentrant=False) returns f(x) and keeps x only. What must f be here, and how many "
            "times is checkpoint called?",
            "checkpoint(f, x, use_reentrant=False) renvoie f(x) et ne garde que x. Que doit être f ici, et combien de "
            "fois appelle-t-on checkpoint ?",
        ),
        Said(
            "for start in range(0, len(blocks), per_segment): a segment is nn.Sequential(*blocks[start : start + "
            "per_segment]), which is a function of x.",
            "for start in range(0, len(blocks), per_segment) : un segment est nn.Sequential(*blocks[start : start + "
            "per_segment]), qui est une fonction de x.",
        ),
    ),
)
