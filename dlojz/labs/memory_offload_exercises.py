"""Lab 02: activations that wait in host memory, and what the journey costs.

Layer 6 (labs). Invariant: the answer is entered around a real forward pass; what it sends to the host and fetches back
is counted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor, nn

_SAMPLES, _WIDTH = 5, 8


class Host:
    """Host memory, as the lab has it: tensors are stored under a number, and fetched by it.

    `stored_bytes` counts what has been stored, `fetches` how often something was fetched.
    """

    def __init__(self) -> None:
        self.stored_bytes = 0
        self.fetches = 0
        self._kept: dict[int, Tensor] = {}

    def store(self, tensor: Tensor) -> int:
        """Copy a tensor to the host, whole; its number."""
        self.stored_bytes += tensor.nbytes
        self._kept[len(self._kept)] = tensor.detach().clone()
        return len(self._kept) - 1

    def fetch(self, number: int) -> Tensor:
        """A copy of the tensor stored under this number, back on the device."""
        self.fetches += 1
        return self._kept[number].clone()


Hooks = tuple["Callable[[Tensor], Any]", "Callable[[Any], Tensor]"]


def offload_hooks(model: nn.Module, host: Host) -> Hooks:
    """The pair (pack, unpack) that moves what autograd saves to the host, the model's own parameters excepted.

    Source: torch `autograd.graph.saved_tensors_hooks`; Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857),
    §5.1.2. The package's own version is `dlojz.train.offload`.
    """
    from torch import Tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.store(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else host.fetch(packed)

    return pack, unpack


def _model() -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.LayerNorm(2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH), nn.Tanh()
    )


def _step(hooks_of: Callable[..., Any] | None) -> tuple[Host, list[Tensor]]:
    """One forward and backward pass under an answer's hooks, or without any: the host, and the gradients."""
    import torch

    model, host = _model(), Host()
    x = torch.randn(_SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(7))
    if hooks_of is None:
        model(x).square().sum().backward()
    else:
        pack, unpack = _as_hooks(hooks_of(model, host))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = model(x)
        output.square().sum().backward()
    return host, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _as_hooks(value: object) -> Hooks:
    if value is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return pack, unpack.",
                fr="Votre fonction ne renvoie rien : terminez-la par return pack, unpack.",
            )
        )
    if not isinstance(value, tuple) or len(value) != 2 or not all(map(callable, value)):
        raise Wrong(
            say(
                en="Two functions are expected, (pack, unpack), in this order, without calling them.",
                fr="On attend deux fonctions, (pack, unpack), dans cet ordre, sans les appeler.",
            )
        )
    return value


def _judge_hooks(answer: Callable[..., Any]) -> None:
    _, right = _step(None)
    expected, _ = _step(offload_hooks)
    weights_bytes = sum(parameter.nbytes for parameter in _model().parameters() if parameter.dim() > 1)
    host, gradients = _step(answer)
    if len(gradients) != len(right) or not all(a.allclose(b) for a, b in zip(gradients, right, strict=True)):
        raise Wrong(
            say(
                en="The gradients are no longer those of the model without hooks: unpack must give back exactly the "
                "tensor that pack was given, with its shape, type and values.",
                fr="Les gradients ne sont plus ceux du modèle sans hooks : unpack doit rendre exactement le tenseur "
                "que pack a reçu, avec sa forme, son type et ses valeurs.",
            )
        )
    if not host.stored_bytes:
        raise Wrong(
            say(
                en="The gradients are right, but nothing has gone to the host: pack must return host.store(tensor), a "
                "number, which autograd keeps in place of the tensor.",
                fr="Les gradients sont justes, mais rien n’est parti vers l’hôte : pack doit renvoyer "
                "host.store(tensor), un numéro, qu’autograd garde à la place du tenseur.",
            )
        )
    if not host.fetches:
        raise Wrong(
            say(
                en="Tensors are stored, but never fetched: pack also gives back the tensor itself, so autograd keeps "
                "it and no memory is saved. Keep the number alone.",
                fr="Des tenseurs sont stockés, mais jamais relus : pack rend aussi le tenseur lui-même, autograd le "
                "garde donc, et aucune mémoire n’est économisée. Ne gardez que le numéro.",
            )
        )
    extra = host.stored_bytes - expected.stored_bytes
    if 0 < extra <= weights_bytes:
        raise Wrong(
            say(
                en=f"Your hooks also move {extra} bytes of weights, which stay on the device anyway: that saves "
                "nothing. Autograd may hand over a transposed view of a weight, which is neither `in` "
                "model.parameters() nor an nn.Parameter; compare storages: tensor.untyped_storage().data_ptr().",
                fr=f"Vos hooks déplacent aussi {extra} octets de poids, qui restent de toute façon sur le GPU : cela "
                "n’économise rien. Autograd peut présenter une vue transposée d’un poids, qui n’est ni `in` "
                "model.parameters() ni un nn.Parameter ; comparez les zones de mémoire : "
                "tensor.untyped_storage().data_ptr().",
            )
        )
    if extra:
        raise Wrong(
            say(
                en=f"{host.stored_bytes} bytes have gone to the host, {expected.stored_bytes} are expected: all that "
                "is saved but the weights, each time it is saved, and nothing else.",
                fr=f"{host.stored_bytes} octets sont partis vers l’hôte, on en attend {expected.stored_bytes} : tout "
                "ce qui est gardé sauf les poids, chaque fois, et rien d’autre.",
            )
        )


OFFLOAD = Exercise(
    id="offload",
    title=Said("offloading activations", "le déchargement des activations"),
    judge=_judge_hooks,
    praise=Said(
        "Right: autograd keeps numbers, the host keeps the activations, and the gradients have not noticed.",
        "Exact : autograd garde des numéros, l’hôte garde les activations, et les gradients n’en savent rien.",
    ),
    hints=(
        Said(
            "pack returns whatever unpack will need: host.store(tensor), or the tensor itself where it is a weight. "
            "How does unpack tell the two apart?",
            "pack renvoie ce dont unpack aura besoin : host.store(tensor), ou le tenseur lui-même s’il s’agit d’un "
            "poids. Comment unpack distingue-t-il les deux ?",
        ),
        Said(
            "weights = {p.untyped_storage().data_ptr() for p in model.parameters()}; pack looks there; unpack asks "
            "isinstance(packed, torch.Tensor).",
            "weights = {p.untyped_storage().data_ptr() for p in model.parameters()} ; pack y regarde ; unpack teste "
            "isinstance(packed, torch.Tensor).",
        ),
    ),
)


def exposed_seconds(moved_bytes: float, link_bytes_per_s: float, forward_s: float) -> float:
    """Seconds that offloading adds to a step: what does not hide behind the forward, then the backward pass.

    The bytes leave during forward and come back during backward, which takes twice as long.

    Source: ZeRO-Infinity (arXiv 2104.07857), §5.1.2, for the overlap; Korthikanti et al. 2022 (arXiv 2205.05198),
    appendix A, for the factor 2.
    """
    one_way_s = moved_bytes / link_bytes_per_s
    return max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - 2 * forward_s)


def _journeys() -> Iterator[tuple[float, float, float]]:
    yield from ((25e9, 25e9, 0.4), (25e9, 25e9, 0.7), (5e9, 25e9, 0.5), (64e9, 16e9, 0.1), (12e9, 50e9, 0.2))


EXPOSED_SECONDS = Exercise(
    id="exposed-seconds",
    title=Said("what offloading costs", "ce que coûte le déchargement"),
    judge=by_reference(
        exposed_seconds,
        cases=_journeys,
        mistakes=(
            Mistake(
                lambda moved, link, forward: 2 * moved / link,
                Said(
                    "That is all the time the bytes travel; they travel while the GPU computes, and only what is "
                    "longer than the computation is waited for.",
                    "C’est tout le temps de transport ; or les octets voyagent pendant que le GPU calcule, et l’on "
                    "n’attend que ce qui dépasse le calcul.",
                ),
            ),
            Mistake(
                lambda moved, link, forward: max(0.0, moved / link - forward),
                Said(
                    "That is the way out; the bytes must come back, during the backward pass.",
                    "C’est l’aller ; les octets doivent aussi revenir, pendant la passe arrière.",
                ),
            ),
            Mistake(
                lambda moved, link, forward: max(0.0, 2 * moved / link - 3 * forward),
                Said(
                    "You hide both ways behind the whole step, but what is left over in forward cannot wait for "
                    "backward's spare time: compare each way with its own pass.",
                    "Vous cachez les deux trajets derrière le pas entier ; or ce qui dépasse de la passe avant ne peut "
                    "pas profiter du temps libre de la passe arrière : comparez chaque trajet à sa propre passe.",
                ),
            ),
            Mistake(
                lambda moved, link, forward: 2 * max(0.0, moved / link - forward),
                Said(
                    "Backward takes twice as long as forward: more is hidden on the way back.",
                    "La passe arrière dure deux fois plus que la passe avant : le retour se cache mieux.",
                ),
            ),
            Mistake(
                lambda moved, link, forward: moved / link - forward + moved / link - 2 * forward,
                Said(
                    "Where the transfer is shorter than the computation your function wins time; it costs nothing, "
                    "but gives nothing back: max(0, …) for each way.",
                    "Quand le transfert est plus court que le calcul, votre fonction gagne du temps ; il ne coûte "
                    "rien, mais ne rend rien non plus : max(0, …) pour chaque trajet.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: as long as the link keeps up with the computation, memory costs no time at all.",
        "Exact : tant que le lien suit le calcul, la mémoire gagnée ne coûte aucun temps.",
    ),
    hints=(
        Said(
            "How long does one way take? It has forward_s to hide on the way out; and how much on the way back?",
            "Combien de temps dure un trajet ? Il a forward_s pour se cacher à l’aller ; et combien au retour ?",
        ),
        Said(
            "max(0, way − forward_s) + max(0, way − 2 · forward_s), where way = moved_bytes / link_bytes_per_s.",
            "max(0, trajet − forward_s) + max(0, trajet − 2 · forward_s), où trajet = moved_bytes / link_bytes_per_s.",
        ),
    ),
)
