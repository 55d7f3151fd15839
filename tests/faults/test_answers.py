"""What a student's answer may do to the process that checks it, and what is left of it afterwards."""

import os
import sys
import time

import psutil

from dlojz.labs.kit.sandbox import run_limited

MARK = "600.25"
CHILDREN = 40


def forks_without_end() -> None:
    """As a loop around os.fork: each child waits, and some have children themselves."""
    for number in range(CHILDREN):
        if os.fork() == 0:
            if number % 4 == 0:
                os.fork()
            os.execvp("sleep", ["sleep", MARK])
    time.sleep(600)


def closes_its_streams() -> int:
    sys.stdout.close()
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    return 3


def left() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", MARK]]


def test_what_an_answer_forks_goes_with_it() -> None:
    assert run_limited(forks_without_end, wall_s=1.5).end == "too_long"
    for process in left():  # killed, and perhaps not yet waited for
        process.wait(60)
    assert left() == []
    assert run_limited(lambda: 1).answer == 1


def test_an_answer_that_closes_its_streams_harms_only_itself() -> None:
    outcome = run_limited(closes_its_streams)
    assert (outcome.end, outcome.answer, outcome.printed) == ("died", None, "")
    print("the streams of this process are open")
    assert run_limited(lambda: 1).answer == 1
