"""The closed forms equal what is counted from the programs, exactly; the seconds are those of the model."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.by_hand import collectives
from dlojz.by_hand.collectives import Link, cost_s
from dlojz.by_hand.collectives.algorithm_catalogue import node_size

from .counting import counted, sent_share

LINK = {"alpha_s": 2e-5, "beta_s_per_byte": 1e-9}
BEST = ("ring_all_reduce", "hierarchical_all_reduce")


@given(name=st.sampled_from(collectives.names()), size=st.integers(1, 33), data=st.data())
def test_collectives_terms_are_what_the_programs_do(name: str, size: int, data: st.DataObject) -> None:
    per_node = data.draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
    assert collectives.terms(name, size, per_node=per_node) == counted(name, size, per_node=per_node)


@given(size=st.integers(1, 17), rank=st.integers(0, 16))
def test_collectives_say_what_each_rank_sends(size: int, rank: int) -> None:
    rank %= size
    share = Fraction(size - 1, size)
    sent = {name: sent_share(name, rank, size) for name in collectives.names()}
    assert sent["ring_reduce_scatter"] == sent["ring_all_gather"] == sent["pairwise_all_to_all"] == share
    assert sent["ring_all_reduce"] == sent["hierarchical_all_reduce"] == 2 * share
    if size & (size - 1) == 0:
        assert sent["halving_doubling_all_reduce"] == 2 * share
        assert sent["doubling_all_reduce"] == size.bit_length() - 1
    assert sent["tree_reduce"] == (rank > 0)
    assert sent["tree_all_reduce"] == sent["tree_reduce"] + sent["tree_broadcast"]


@given(size=st.integers(2, 17), name=st.sampled_from([n for n in collectives.names() if n.endswith("all_reduce")]))
def test_collectives_of_all_reduce_send_no_less_than_the_bound(size: int, name: str) -> None:
    """Patarasuk & Yuan 2009: at least 2(p − 1)/p of the message per rank, on average over the ranks."""
    total = sum(sent_share(name, rank, size) for rank in range(size))
    assert total >= 2 * (size - 1)
    assert (total == 2 * (size - 1)) or name not in BEST


@pytest.mark.parametrize("name", collectives.names())
def test_one_rank_costs_nothing(name: str) -> None:
    assert cost_s(name, 2**20, 1, **LINK) == 0


def test_cost_s_of_four_ranks_by_hand() -> None:
    n = 2**20
    assert cost_s("ring_all_reduce", n, 4, **LINK) == pytest.approx(6 * 2e-5 + 1.5 * n * 1e-9)
    assert cost_s("tree_all_reduce", n, 4, **LINK) == pytest.approx(4 * 2e-5 + 4 * n * 1e-9)
    assert cost_s("halving_doubling_all_reduce", n, 4, **LINK) == pytest.approx(4 * 2e-5 + 1.5 * n * 1e-9)
    assert cost_s("doubling_all_reduce", n, 4, **LINK) == pytest.approx(2 * 2e-5 + 2 * n * 1e-9)


def test_fast_links_inside_nodes_help_the_two_level_algorithm_only() -> None:
    fast = Link(1e-6, 1e11)
    for name in collectives.names():
        plain, helped = (cost_s(name, 2**20, 8, inside=inside, **LINK) for inside in (None, fast))
        assert (helped < plain) == (name == "hierarchical_all_reduce")
    across = cost_s("ring_all_reduce", 2**18, 2, **LINK)
    expected = cost_s("ring_all_reduce", 2**20, 4, alpha_s=1e-6, beta_s_per_byte=1e-11) + across
    assert cost_s("hierarchical_all_reduce", 2**20, 8, inside=fast, **LINK) == pytest.approx(expected)
    assert node_size(8) == 4


@given(size=st.sampled_from([4, 8, 24, 512]))
def test_crossover_bytes_of_ring_and_tree_is_where_they_take_as_long(size: int) -> None:
    n = collectives.crossover_bytes("ring_all_reduce", "tree_all_reduce", size, **LINK)
    assert n is not None
    assert cost_s("ring_all_reduce", n, size, **LINK) == pytest.approx(cost_s("tree_all_reduce", n, size, **LINK))
    assert cost_s("ring_all_reduce", n / 2, size, **LINK) > cost_s("tree_all_reduce", n / 2, size, **LINK)


def test_crossover_bytes_is_none_where_one_is_never_slower() -> None:
    assert collectives.crossover_bytes("ring_all_reduce", "halving_doubling_all_reduce", 8, **LINK) is None
    assert collectives.crossover_bytes("ring_all_reduce", "ring_all_reduce", 8, **LINK) is None
    assert collectives.crossover_bytes("ring_all_reduce", "tree_all_reduce", 3, **LINK) is None  # 4 rounds each


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"message_bytes": -1}, "message_bytes must be a number of at least 0, but -1"),
        ({"alpha_s": float("nan")}, "alpha_s must be"),
        ({"beta_s_per_byte": "fast"}, "beta_s_per_byte must be .* but 'fast'"),
        ({"size": 0}, "at least 1, but 0"),
        ({"name": "tree"}, "unknown algorithm 'tree'"),
        ({"per_node": 3}, "4 ranks cannot be split into nodes of 3"),
    ],
)
def test_cost_s_refusals(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        cost_s(**{"name": "ring_all_reduce", "message_bytes": 4, "size": 4, **LINK, **change})  # type: ignore[arg-type]
