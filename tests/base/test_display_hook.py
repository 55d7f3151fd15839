"""The progress bar: from the first second on where one is wanted, nowhere else."""

import time

import pytest

from dlojz.base.display_hook import bar


@pytest.mark.parametrize("wanted", [True, False])
def test_a_long_loop_shows_a_bar_where_one_is_wanted(
    wanted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlojz.base.display_hook.wanted", lambda progress: wanted)
    show = bar(3)
    for done in range(1, 4):
        time.sleep(0.6)
        show(done)
    assert ("2/3" in capsys.readouterr().err) == wanted


def test_no_bar_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show = bar(1)
    time.sleep(1.1)
    show(1)
    assert capsys.readouterr().err == ""
