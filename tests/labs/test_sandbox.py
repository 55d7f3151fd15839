"""Whatever a student's function does, the kernel answers and stays usable."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dlojz.base.language import use_language
from dlojz.labs.kit.exercise import NotDone, judge
from dlojz.labs.kit.sandbox import MORE_PROCESSES, OUTPUT_BYTES, run_limited, silenced
from dlojz.labs.lab00_getting_started.exercises import GLOBAL_BATCH


@pytest.fixture(autouse=True)
def english() -> None:
    use_language("en")


def loop_for_ever() -> None:
    while True:
        pass


def ignore_the_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def leave_a_child() -> None:
    subprocess.Popen(["sleep", "61.5"])
    time.sleep(60)


@pytest.mark.parametrize("job", [loop_for_ever, ignore_the_end, leave_a_child])
def test_run_limited_stops_a_job_without_end_with_all_it_started(job: Any) -> None:
    assert run_limited(job, wall_s=1.0).end == "too_long"
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "61.5"]]
    assert run_limited(lambda: 1).answer == 1


def leave_an_orphan_in_its_own_session() -> None:
    subprocess.Popen(["setsid", "--fork", "sleep", "61.75"])
    time.sleep(60)


def fork_a_bomb() -> int:
    """Processes that could be started; each of them leaves the session of the check."""
    started = 0
    while started < 500:
        try:
            pid = os.fork()
        except BlockingIOError:
            return started
        if pid == 0:
            os.setsid()
            os.closerange(0, 256)
            time.sleep(61)
            os._exit(0)
        started += 1
    return started


def test_run_limited_stops_what_leaves_the_session_too() -> None:
    assert run_limited(leave_an_orphan_in_its_own_session, wall_s=2.0).end == "too_long"
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "61.75"]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who has no other process")
def test_the_number_of_processes_is_limited() -> None:
    def as_another_user() -> int:
        os.setgroups([])
        os.setgid(4343)
        os.setuid(4343)
        outcome = run_limited(fork_a_bomb, wall_s=20.0)
        others = [one for one in psutil.process_iter() if one.pid != os.getpid()]
        left = sum(one.uids().real == 4343 and one.status() != psutil.STATUS_ZOMBIE for one in others)
        return int(outcome.answer) if left == 0 else -left

    started = run_limited(as_another_user, wall_s=60.0).answer
    assert MORE_PROCESSES // 2 <= started <= MORE_PROCESSES


def test_run_limited_stops_a_job_that_is_not_yet_alone_in_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is forked with this `setsid`: it has no group of its own, as in its first moment."""
    monkeypatch.setattr(os, "setsid", lambda: None)
    begun_s = time.monotonic()
    assert run_limited(lambda: time.sleep(60), wall_s=0.5).end == "too_long"
    assert time.monotonic() - begun_s < 45


def test_run_limited_gives_a_check_two_gibibytes() -> None:
    """As the sentence says that refuses more; what is never written takes addresses and no memory."""
    assert run_limited(lambda: len(bytearray(2_060_000_000))).answer == 2_060_000_000
    assert run_limited(lambda: len(bytearray(2_400_000_000))).end == "died"


def test_run_limited_gives_a_file_64_mebibytes_at_most(tmp_path: Path) -> None:
    def grow(num_bytes: int) -> None:
        with open(tmp_path / "file", "wb") as file:
            file.truncate(num_bytes)

    assert run_limited(lambda: grow(64 * 2**20)).end == "answered"
    assert run_limited(lambda: grow(64 * 2**20 + 1)).end == "died"


def test_run_limited_cuts_a_flood() -> None:
    def flood() -> None:
        while True:
            print("x" * 1000)

    outcome = run_limited(flood)
    assert outcome.end == "flood"
    assert len(outcome.printed) == OUTPUT_BYTES


def test_silenced_hides_what_deepspeed_and_its_children_print_and_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def write() -> None:
        subprocess.run(["sh", "-c", "echo out; echo err >&2"], check=True)

    with silenced():
        write()
    assert tuple(capfd.readouterr()) == ("", "")
    write()
    assert tuple(capfd.readouterr()) == ("out\n", "err\n")


def test_a_sudden_exit_is_told() -> None:
    outcome = run_limited(lambda: os._exit(7))
    assert (outcome.end, outcome.exit_code) == ("died", 7)


def test_run_limited_tells_a_crash() -> None:
    outcome = run_limited(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert (outcome.end, outcome.exit_code) == ("died", -signal.SIGSEGV)


def test_what_is_printed_comes_back_and_nothing_else_changes() -> None:
    numbers = [1]

    def job() -> int:
        numbers.append(2)
        print("é", file=sys.stderr)
        return len(numbers)

    outcome = run_limited(job)
    assert (outcome.end, outcome.answer, outcome.printed, numbers) == ("answered", 2, "é\n", [1])


def test_run_limited_has_torch_compute_in_the_child_after_threads_in_the_parent() -> None:
    large = torch.ones(600, 600)
    (large @ large).sum()
    assert run_limited(lambda: float((large @ large).sum())).answer == 600.0**3


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.exit(1)", "SystemExit"),
        ("input()", "no keyboard"),
        ("[0] * (10 * 2**30 // 8)", "more memory than a check allows"),
        ("torch.zeros(10 * 2**28)", "more memory than a check allows"),
        ("os._exit(0)", "without an answer"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_judge_says_what_goes_wrong_in_a_sentence(code: str, words: str) -> None:
    space: dict[str, Any] = {"os": os, "sys": sys, "torch": torch}
    exec(compile(f"def answer(*arguments):\n    {code}\n", "cell.py", "exec"), space)
    verdict = judge(GLOBAL_BATCH, space["answer"])
    assert verdict.state == "wrong"
    assert words in verdict.message


def test_judge_tells_an_exception_with_its_line() -> None:
    def answer(micro_batch: int, micro_batches: int, dp: int) -> int:
        missing: dict[str, int] = {}
        return missing["dp"]

    message = judge(GLOBAL_BATCH, answer).message
    assert "KeyError: 'dp'" in message
    assert 'return missing["dp"]' in message


@pytest.mark.parametrize("answer", [3, "answer", None, [1, 2]])
def test_judge_refuses_an_answer_of_the_wrong_type(answer: object) -> None:
    verdict = judge(GLOBAL_BATCH, answer)
    assert verdict.state == "wrong"
    assert type(answer).__name__ in verdict.message


def test_judge_refuses_a_function_with_other_arguments() -> None:
    verdict = judge(GLOBAL_BATCH, lambda: 3)
    assert verdict.state == "wrong"
    assert "the arguments that the exercise gives it" in verdict.message


def test_judge_calls_what_is_not_written_yet_to_do() -> None:
    def stub(*arguments: int) -> int:
        raise NotDone("global-batch")

    assert judge(GLOBAL_BATCH, stub) == judge(GLOBAL_BATCH, ...)
    assert judge(GLOBAL_BATCH, ...).state == "todo"
