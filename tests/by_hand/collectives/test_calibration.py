"""α and β come back from the times they made; what determines no line is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.by_hand.collectives import SIZES_BYTES, AlphaBetaFit, TimedMessage, cost_s, fit


def _points(
    alpha_s: float, beta_s_per_byte: float, size: int = 4, collective: str = "all_reduce"
) -> list[TimedMessage]:
    name = {"all_reduce": "ring_all_reduce"}.get(collective, collective)
    return [
        TimedMessage(n, cost_s(name, n, size, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte), size, collective)
        for n in SIZES_BYTES
    ]


@given(
    alpha_s=st.floats(1e-7, 1e-3),
    beta_s_per_byte=st.floats(1e-12, 1e-8),
    size=st.integers(2, 17),
    collective=st.sampled_from(["all_reduce", "tree_all_reduce", "doubling_all_reduce"]),
)
def test_a_line_gives_its_own_alpha_and_beta(
    alpha_s: float, beta_s_per_byte: float, size: int, collective: str
) -> None:
    """Exact up to the rounding of the normal equations, whose condition is bounded by the spread of the sizes."""
    calibration = fit(_points(alpha_s, beta_s_per_byte, size, collective))
    assert calibration.alpha_s == pytest.approx(alpha_s, rel=1e-3)
    assert calibration.beta_s_per_byte == pytest.approx(beta_s_per_byte, rel=1e-3)
    assert calibration.residual < 1e-4
    n = 12345
    assert calibration.fitted_s(n) == pytest.approx(
        cost_s(calibration.algorithm, n, size, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte), rel=1e-3
    )


def test_small_messages_weigh_as_much_as_large_ones() -> None:
    """The largest time 20 % off moves α by far less than 20 %: plain least squares would lose it."""
    points = _points(3e-5, 1e-9)
    points[-1] = points[-1]._replace(time_s=points[-1].time_s * 1.2)
    calibration = fit(points)
    assert calibration.alpha_s == pytest.approx(3e-5, rel=0.05)
    assert calibration.residual == pytest.approx(0.06, abs=0.03)


@given(times=st.lists(st.floats(1e-6, 1), min_size=3, max_size=8, unique=True))
def test_alpha_and_beta_are_never_negative_and_the_least_of_the_legal_ones(times: list[float]) -> None:
    points = [TimedMessage(1024 * 4**number, time_s, 4) for number, time_s in enumerate(times)]
    calibration = fit(points)
    assert calibration.alpha_s >= 0 and calibration.beta_s_per_byte >= 0

    def error(alpha_s: float, beta_s_per_byte: float) -> float:
        return sum(((6 * alpha_s + 1.5 * beta_s_per_byte * p.message_bytes) / p.time_s - 1) ** 2 for p in points)

    best = error(calibration.alpha_s, calibration.beta_s_per_byte)
    for factor, other in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        assert best <= error(calibration.alpha_s * factor, calibration.beta_s_per_byte * other) * (1 + 1e-9) + 1e-12


def test_times_that_do_not_grow_have_no_bandwidth() -> None:
    calibration = fit([TimedMessage(n, 1e-3, 2) for n in SIZES_BYTES])
    assert calibration.beta_s_per_byte == pytest.approx(0, abs=1e-15)
    falling = fit([TimedMessage(n, 1e-3 / (number + 1), 2) for number, n in enumerate(SIZES_BYTES)])
    assert falling.bandwidth_bytes_per_s is None and falling.half_bytes is None


def test_fit_gives_the_words_of_the_alpha_beta_model() -> None:
    calibration = fit(_points(1e-5, 1e-9))
    assert calibration.latency_s == pytest.approx(6e-5)
    assert calibration.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert calibration.half_bytes is not None
    assert calibration.fitted_s(calibration.half_bytes) == pytest.approx(2 * calibration.latency_s)
    assert calibration.predict_s(0, 512) == pytest.approx(2 * 511 * 1e-5)
    assert calibration.predict_s(0, 512, "tree_all_reduce") == pytest.approx(18 * 1e-5)
    assert calibration.predict_s(2**20, 1) == 0


def test_json_there_and_back_and_points_as_lists() -> None:
    calibration = fit(_points(1e-5, 1e-9))
    assert AlphaBetaFit.from_json(calibration.to_json()) == calibration
    assert fit(json.loads(json.dumps(calibration.points))) == calibration
    with pytest.raises(LabError, match="size must be at least 2"):
        AlphaBetaFit.from_dict({**calibration.to_dict(), "size": 1})


@pytest.mark.parametrize(
    "points, sentence",
    [
        ([], r"0 point\(s\) of 0 size"),
        (_points(1e-5, 1e-9)[:2], r"2 point\(s\) of 2 size"),
        ([TimedMessage(1024, 1e-3, 4)] * 5, r"5 point\(s\) of 1 size"),
        ([*_points(1e-5, 1e-9), TimedMessage(1024, 0.0, 4)], r"positive bytes and seconds .* \(1024, 0.0, 4"),
        ([*_points(1e-5, 1e-9), TimedMessage(1024, -1.0, 4)], "-1.0"),
        ([*_points(1e-5, 1e-9), (0, 1.0, 4)], r"\(0, 1.0, 4\)"),
        ([*_points(1e-5, 1e-9), (1024, float("nan"), 4)], "nan"),
        ([*_points(1e-5, 1e-9), (1024, "fast", 4)], "fast"),
        ([*_points(1e-5, 1e-9), (1024, 1.0, 1)], "at least 2 ranks"),
        ([*_points(1e-5, 1e-9), (1024,)], r"a point is \(bytes"),
        ([*_points(1e-5, 1e-9), 3], "but 3 was received"),
        ([*_points(1e-5, 1e-9), *_points(1e-5, 1e-9, 2)], "all_reduce on 2, all_reduce on 4"),
        ([*_points(1e-5, 1e-9)[:3], TimedMessage(1024, 1.0, 4, "broadcast")], "one collective"),
        ([point._replace(collective="sum") for point in _points(1e-5, 1e-9)], "unknown collective 'sum'"),
    ],
)
def test_fit_refusals(points: list[object], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        fit(points)  # type: ignore[arg-type]
