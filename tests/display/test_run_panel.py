"""What a run looks like while it goes: the same in HTML and as text, every text escaped."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dlojz.base.language import use_language
from dlojz.running.run_view import CURVE_POINTS, RANKS_SHOWN, RunView, run_html, run_text

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e $\\foo$ \"quoted\" 'q'"
VIEW = RunView(
    run_id="20300101-000000-0123456789ab-cdef",
    title="coatnet_tiny · ZeRO-2 · 2 ranks",
    state="running",
    steps=20,
    job="12 on local",
    losses=(2.0, 1.5, 1.25, 1.0),
    peaks_bytes=((0, 900 * 2**20), (1, 512 * 2**20)),
    limit_bytes=960 * 2**20,
    limit_of="a rank's share",
    step_s=0.5,
    samples_per_s=64.0,
    remaining_s=8.0,
    job_left="59 min 58 s",
)
TEXT = """\
▶ running · coatnet_tiny · ZeRO-2 · 2 ranks · 20300101-000000-0123456789ab-cdef
  █████░░░░░░░░░░░░░░░░░░░ 4/20
  job                   12 on local
  loss                  1.0000
  step                  500 ms, 64 samples/s
  estimated end         in 8.00 s
  time left to the job  59 min 58 s
  losses                2.0000 █▅▃▁ 1.0000
  peak memory so far
  rank 0  900 MiB, 94 %
  rank 1  512 MiB, 53 %
  limit: 960 MiB, a rank's share"""


class Tags(HTMLParser):
    """The elements of a page and their attributes; unbalanced ones are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("br", "img", "path", "polyline"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def words(page: str) -> str:
    """The text of a page."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_as_text() -> None:
    assert run_text(VIEW) == TEXT


def test_as_html_says_the_same() -> None:
    page = run_html(VIEW)
    for told in (
        "running",
        "coatnet_tiny",
        "4 of 20 steps",
        "12 on local",
        "500 ms, 64 samples/s",
        "in 8.00 s",
        "94 %",
    ):
        assert told in words(page)
    bar = next(attributes for _, attributes in Tags(page).found if attributes.get("role") == "progressbar")
    assert (bar["aria-valuenow"], bar["aria-valuemax"]) == ("4", "20")
    curve = next(attributes for tag, attributes in Tags(page).found if tag == "svg")
    assert curve["aria-label"] == "Loss from 2.0000 at step 0 to 1.0000 at step 3"


def test_run_html_curve_lies_where_its_losses_are() -> None:
    points = next(attributes["points"] for tag, attributes in Tags(run_html(VIEW)).found if tag == "polyline")
    places = [tuple(map(float, point.split(","))) for point in (points or "").split()]
    assert [y for _, y in places] == [18.0, 65.0, 88.5, 112.0]  # from the top of the frame to its bottom
    assert [round(x - 46, 1) for x, _ in places] == [round(364 * step / 3, 1) for step in range(4)]  # of the steps done


def test_run_html_and_run_text_with_nothing_known_yet() -> None:
    view = RunView("r", "t", "queued", 20, waiting="it waits for others (Priority)", starts="2030-01-01 00:10")
    page, text = run_html(view), run_text(view)
    assert "<svg" not in page and "peak" not in page and "estimated" not in text
    for shown in (words(page), text):
        assert "it waits for others (Priority)" in shown and "2030-01-01 00:10" in shown


@pytest.mark.parametrize(
    "name", ["run_id", "title", "state", "reason", "waiting", "job", "last_known", "limit_of", "starts", "job_left"]
)
def test_a_hostile_text_is_shown_and_not_obeyed(name: str) -> None:
    state = "running" if name == "job_left" else "queued"
    view = replace(VIEW, **{"state": state, name: HOSTILE})
    page, text = run_html(view), run_text(view)
    assert not {"\x1b", "\u202e"} & set(page + text)
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in Tags(page).found)
    if name != "limit_of":
        assert "$\\foo$" in page and "<img src=x" in text


@pytest.mark.parametrize("losses", [(), (1.0,), (1.0, 1.0), tuple(float(n) for n in range(5000))])
def test_run_html_and_run_text_show_any_number_of_losses(losses: tuple[float, ...]) -> None:
    view = replace(VIEW, losses=losses, steps=4000)
    points = re.findall(r"\d+\.\d,\d+\.\d", run_html(view))
    assert len(points) <= CURVE_POINTS + 1
    assert "nan" not in run_html(view).lower()
    assert len(run_text(view).splitlines()) < 20


def test_many_ranks() -> None:
    view = replace(VIEW, peaks_bytes=tuple((rank, rank * 2**20 + 1) for rank in range(512)))
    for shown in (words(run_html(view)), run_text(view)):
        assert "rank 511" in shown and "rank 5 " not in shown and "and 504 ranks that hold less" in shown
    assert run_text(view).count("rank 5") == RANKS_SHOWN


def test_run_text_in_french() -> None:
    use_language("fr")
    told = run_text(replace(VIEW, state="queued", waiting="il attend", remaining_s=None))
    assert "en attente" in told and "attente  il attend" in told and "travail  12 on local" in told
    assert "rang 0" in told and "échantillons/s" in told
