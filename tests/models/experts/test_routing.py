"""What a mixture is told: capacity, bytes, and one sentence for each set of numbers that cannot be."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.models.experts import Routing, all_to_all_bytes
from dlojz.models.experts.routing import routing_refusal


def test_routing_is_known_without_torch() -> None:
    code = (
        "import sys, dlojz.models.experts; dlojz.models.experts.Routing(experts=4).capacity(9); sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("experts", "top_k", "factor", "tokens", "capacity"),
    [
        (8, 1, 1.0, 512, 64),
        (8, 1, 1.25, 512, 80),
        (8, 2, 1.25, 512, 160),
        (8, 1, 1.0, 100, 13),  # 12.5, rounded up
        (8, 1, 0.01, 8, 1),  # at least one
        (8, 1, 8.0, 100, 100),  # all of them: nothing can be dropped
        (8, 2, 4.0, 100, 100),
        (8, 2, 3.9999, 100, 100),  # ⌈99.9975⌉
        (8, 1, 100.0, 100, 100),  # a token goes to an expert once at most
        (3, 2, 1.5, 7, 7),
        (4, 1, math.inf, 5, 5),
    ],
)
def test_capacity(experts: int, top_k: int, factor: float, tokens: int, capacity: int) -> None:
    assert Routing(experts=experts, top_k=top_k, capacity_factor=factor).capacity(tokens) == capacity


@given(
    experts=st.integers(1, 64),
    top_k=st.integers(1, 64),
    factor=st.floats(0.001, 100),
    tokens=st.integers(1, 10_000),
)
def test_capacity_is_a_number_of_rows(experts: int, top_k: int, factor: float, tokens: int) -> None:
    if top_k > experts:
        return
    routing = Routing(experts=experts, top_k=top_k, capacity_factor=factor)
    assert 1 <= routing.capacity(tokens) <= tokens
    if factor >= 1:  # the fair share fits
        assert routing.capacity(tokens) * experts >= top_k * tokens
    if factor >= experts / top_k:
        assert routing.capacity(tokens) == tokens


def test_bytes_of_one_all_to_all_are_those_of_the_buffer() -> None:
    assert all_to_all_bytes(experts=8, capacity=80, width=128) == 8 * 80 * 128 * 4
    assert all_to_all_bytes(experts=8, capacity=80, width=128, element_bytes=2) == 8 * 80 * 128 * 2


REFUSED = [
    (
        {"experts": 0},
        "experts must be a whole number, at least 1, but 0 was received.",
        "experts doit être un nombre entier, au moins 1, mais 0 a été reçu.",
    ),
    (
        {"experts": 8, "top_k": 0},
        "top_k must be a whole number, at least 1, but 0 was received.",
        "top_k doit être un nombre entier, au moins 1, mais 0 a été reçu.",
    ),
    (
        {"experts": 8, "top_k": True},
        "top_k must be a whole number, at least 1, but True was received.",
        "top_k doit être un nombre entier, au moins 1, mais True a été reçu.",
    ),
    (
        {"experts": 4, "top_k": 5},
        "top_k=5 sends a token to more experts than the 4 that there are: use at most top_k=4.",
        "top_k=5 envoie un token à plus d’experts que les 4 qui existent : prenez au plus top_k=4.",
    ),
    (
        {"experts": 8, "capacity_factor": 0.0},
        "capacity_factor must be greater than 0, but 0 was received: 1 is each expert's fair share, 1.25 is usual.",
        "capacity_factor doit être plus grand que 0, mais 0 a été reçu : 1 est la part équitable de chaque expert, "
        "1,25 est l’usage.",
    ),
    (
        {"experts": 8, "capacity_factor": math.nan},
        "capacity_factor must be greater than 0, but nan was received: 1 is each expert's fair share, 1.25 is usual.",
        "capacity_factor doit être plus grand que 0, mais nan a été reçu : 1 est la part équitable de chaque expert, "
        "1,25 est l’usage.",
    ),
    (
        {"experts": 8, "groups": 3},
        "expert_groups=3 does not cut 8 experts into equal groups of at least top_k=1: a two-level gate chooses one "
        "group, then top_k of its experts.",
        "expert_groups=3 ne découpe pas 8 experts en groupes égaux d’au moins top_k=1 : une porte à deux niveaux "
        "choisit un groupe, puis top_k de ses experts.",
    ),
    (
        {"experts": 8, "groups": 4, "top_k": 3},
        "expert_groups=4 does not cut 8 experts into equal groups of at least top_k=3: a two-level gate chooses one "
        "group, then top_k of its experts.",
        "expert_groups=4 ne découpe pas 8 experts en groupes égaux d’au moins top_k=3 : une porte à deux niveaux "
        "choisit un groupe, puis top_k de ses experts.",
    ),
    (
        {"experts": 8, "balance_loss": -0.1},
        "balance_loss must be a finite weight, at least 0, but -0.1 was received: 0 leaves this loss out.",
        "balance_loss doit être un poids fini, au moins 0, mais -0.1 a été reçu : 0 supprime cette perte.",
    ),
    (
        {"experts": 8, "z_loss": math.inf},
        "z_loss must be a finite weight, at least 0, but inf was received: 0 leaves this loss out.",
        "z_loss doit être un poids fini, au moins 0, mais inf a été reçu : 0 supprime cette perte.",
    ),
]


@pytest.mark.parametrize(("given", "english", "french"), REFUSED)
def test_routing_refusals(given: dict[str, float], english: str, french: str) -> None:
    for name, sentence in (("en", english), ("fr", french)):
        use_language(name)
        with pytest.raises(LabError) as refused:
            Routing(**given)  # type: ignore[arg-type]
        assert str(refused.value) == sentence


def test_routing_refusal_of_ranks_that_cannot_share_the_experts_out() -> None:
    numbers = {"experts": 6, "top_k": 1, "capacity_factor": 1.0}
    assert routing_refusal(**numbers, ep=3) is None  # type: ignore[arg-type]
    assert (
        routing_refusal(**numbers, ep=4)  # type: ignore[arg-type]
        == "ep=4 does not divide the 6 experts: use ep=1, ep=2, ep=3, ep=6."
    )
    use_language("fr")
    assert (
        routing_refusal(**numbers, ep=4)  # type: ignore[arg-type]
        == "ep=4 ne divise pas les 6 experts : prenez ep=1, ep=2, ep=3, ep=6."
    )
