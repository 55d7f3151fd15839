import pytest

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, format_count, format_seconds
from dlojz.results.footprint import Footprint, Memory, Traffic


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": NaN}', "NaN"),
        ('{"a": Infinity}', "Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": 1, "a": 2}', "repeats the key 'a'"),
        ("[" * 100_000, "not a readable JSON document"),
        ('{"a": ' + "9" * 5000 + "}", "not a readable JSON document"),
        ("\ufeff{}", "not a readable JSON document"),
        ("{", "not a readable JSON document"),
        ("", "not a readable JSON document"),
    ],
)
def test_a_damaged_document_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        parse_json(text)


def test_an_unknown_key_lists_the_legal_ones() -> None:
    with pytest.raises(LabError, match="unknown key 'weight_bytes': did you mean 'weights_bytes'.*gradients_bytes"):
        Memory.from_dict({"weight_bytes": 3})


def test_a_footprint_goes_to_json_and_back() -> None:
    footprint = Footprint(
        source="measured",
        rank=1,
        memory=Memory(weights_bytes=12, at_peak_bytes={"weights": 12}),
        communication=(Traffic(collective="all_reduce", group="dp", group_size=2, message_bytes=8),),
    )
    assert Footprint.from_json(footprint.to_json()) == footprint
    assert footprint.traffic("all_reduce") == 8
    assert footprint.traffic("all_gather") == 0
    assert footprint.memory.states_bytes == 12


def test_a_newer_schema_is_refused() -> None:
    with pytest.raises(LabError, match="schema_version"):
        Footprint.from_dict({"schema_version": 2, "source": "measured"})


@pytest.mark.parametrize(
    ("collective", "expected"), [("all_reduce", 2 * 3 / 4 * 100), ("all_gather", 75), ("reduce_scatter", 75)]
)
def test_bytes_sent_in_a_ring(collective: str, expected: float) -> None:
    """Patarasuk & Yuan 2009: 2(N−1)/N and (N−1)/N of the message."""
    traffic = Traffic(collective=collective, group="dp", group_size=4, message_bytes=100)  # type: ignore[arg-type]
    assert traffic.sent_bytes == expected


def test_one_rank_sends_nothing() -> None:
    assert Traffic(collective="broadcast", group="dp", group_size=1, message_bytes=100).sent_bytes == 0


def test_quantities_carry_their_unit() -> None:
    assert [format_bytes(value) for value in (None, 0, 1023, 1536, 3 * 2**30)] == [
        "—",
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 GiB",
    ]
    assert [format_count(value, "FLOP") for value in (999, 4.55e9)] == ["999 FLOP", "4.55 GFLOP"]
    assert [format_seconds(value) for value in (0.0123, 59, 125)] == ["12.3 ms", "59.0 s", "2 min 05 s"]


def test_french_writes_octets_and_a_decimal_comma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlojz.base.language._chosen", "fr")
    assert [format_bytes(value) for value in (12, 3.5 * 2**20)] == ["12 o", "3,50 Mio"]
    assert format_count(4.55e9, "FLOP") == "4,55 GFLOP"
