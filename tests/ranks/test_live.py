"""Cells on live ranks: what comes back, what is kept, and what happens when a cell does its worst."""

import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dlojz.base.machine import patience
from dlojz.ranks import Ranks, RanksError
from dlojz.ranks.live import payload
from dlojz.ranks.rank_setup import RanksRefused
from dlojz.ranks.show import CellAnswer, CellFailure

SIZE = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as ranks:
        yield ranks


def said(answers: list[CellAnswer]) -> list[str]:
    return ["".join(part["text"] for part in answer.parts) for answer in answers]


def troubles(answers: list[CellAnswer]) -> list[CellFailure | None]:
    return [answer.trouble for answer in answers]


def still_work(ranks: Ranks) -> bool:
    """Whether the next cell runs on all ranks and reaches all of them."""
    answers = ranks.execute("check = torch.ones(1) * (rank + 1)\ndist.all_reduce(check)\nprint(int(check))")
    return said(answers) == ["6\n"] * SIZE and not any(troubles(answers))


def processes_below(ranks: Ranks) -> list[psutil.Process]:
    supervisor = psutil.Process(ranks.status().rows[0]["pid"]).parent()
    assert supervisor is not None
    return [supervisor, *supervisor.children(recursive=True)]


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until(true: Callable[[], bool], within_s: float = 120) -> bool:
    deadline_s = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return true()


def short_limit_s() -> int:
    """A limit within which a cell that does next to nothing ends on a busy machine too."""
    return 3 * math.ceil(patience())


def test_each_rank_has_its_number_and_they_share_a_group(ranks: Ranks) -> None:
    answers = ranks.execute("x = torch.full((2,), float(rank))\ndist.all_reduce(x)\nprint(rank, world_size, device)\nx")
    assert said(answers) == [f"{rank} {SIZE} cpu\ntensor([3., 3.])" for rank in range(SIZE)]
    assert [value.tolist() for value in ranks["x"]] == [[3.0, 3.0]] * SIZE
    assert answers[0].last == "all_reduce #1 [2] float32"


def test_variables_stay_from_cell_to_cell(ranks: Ranks) -> None:
    ranks.execute("kept = [rank, {'a': (1, None)}]")
    assert said(ranks.execute("print(kept[0])")) == ["0\n", "1\n", "2\n"]
    assert ranks["kept"] == [[rank, {"a": (1, None)}] for rank in range(SIZE)]
    assert ranks.pull("rank", "world_size") == {"rank": [0, 1, 2], "world_size": [SIZE] * SIZE}


def test_values_are_sent_to_every_rank(ranks: Ranks) -> None:
    ranks.execute("", packed=payload(["given", "other"], {"given": [1, 2], "other": "é"}))
    assert said(ranks.execute("print(given, other)")) == ["[1, 2] é\n"] * SIZE


def test_a_rank_computes_with_one_thread_and_tells_deepspeed_that_it_has_no_gpu(ranks: Ranks) -> None:
    code = "import os\nprint(torch.get_num_threads(), os.environ['DS_ACCELERATOR'])"
    assert said(ranks.execute(code)) == ["1 cpu\n"] * SIZE


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing_of_that_name", "unknown name on rank 0 'nothing_of_that_name': .*kept.* run that cell to its end"),
        ("lock", r"lock cannot be brought back from rank 0 \(lock: .*Print it in a %%ranks cell"),
        ("generator", r"generator cannot be brought back from rank 0 \(generator: "),
        ("function", r"function cannot be brought back from rank 0 \(function: "),
        ("file", r"file cannot be brought back from rank 0 \(TextIOWrapper: "),
        ("thing", r"thing cannot be brought back from rank 0 \(Thing: "),
    ],
)
def test_what_cannot_come_back_is_refused_in_one_sentence(ranks: Ranks, name: str, sentence: str) -> None:
    ranks.execute(
        "import threading, os\nkept = 1\nlock = threading.Lock()\ngenerator = (i for i in range(3))\n"
        "function = lambda: 1\nfile = open(os.devnull)\nclass Thing: pass\nthing = Thing()"
    )
    with pytest.raises(RanksRefused, match=sentence):
        ranks[name]
    assert still_work(ranks)


def test_a_tensor_comes_back_without_its_history_and_without_the_rest_of_its_storage(ranks: Ranks) -> None:
    ranks.execute("weight = torch.ones(1000, requires_grad=True)\nview = (weight * 2)[rank : rank + 1]")
    for value in ranks["view"]:
        assert value.tolist() == [2.0]
        assert not value.requires_grad
        assert value.untyped_storage().nbytes() == 4


def test_an_exception_names_its_rank_and_its_line(ranks: Ranks) -> None:
    with pytest.raises(RanksError) as error:
        ranks.run("y = rank\nif rank == 1:\n    1 / 0", hint="And more.")
    # `%%ranks` is the first line of the cell in the notebook.
    assert str(error.value) == "Rank 1: ZeroDivisionError: division by zero\n    line 4: 1 / 0\nAnd more."
    assert ranks["y"] == [0, 1, 2]
    assert still_work(ranks)


def test_a_missing_rank_is_named_and_the_next_cell_works(ranks: Ranks) -> None:
    with pytest.raises(RanksError) as error:
        ranks.run("z = torch.ones(1)\nif rank != 2:\n    dist.all_reduce(z)")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("Missing rank: rank 2 ended without calling all_reduce #1 [1] float32")
    assert "    ranks 0 and 1: all_reduce #1 [1] float32" in lines
    assert "    rank 2: no collective" in lines
    assert lines[-1] == "The process group is made anew before the next cell."
    assert still_work(ranks)
    assert [value.tolist() for value in ranks["z"]] == [[1.0]] * SIZE


def test_the_error_that_others_waited_for_is_the_one_that_is_shown(ranks: Ranks) -> None:
    with pytest.raises(RanksError) as error:
        ranks.run("if rank == 0:\n    raise ValueError('cause')\ndist.barrier()")
    lines = str(error.value).splitlines()
    assert lines[:2] == ["Rank 0: ValueError: cause", "    line 3: raise ValueError('cause')"]
    assert "    ranks 1 and 2: barrier #1" in lines
    assert still_work(ranks)


def test_a_group_of_some_ranks_outlives_its_cell(ranks: Ranks) -> None:
    answers = ranks.execute("pair = dist.new_group([0, 1])\nif rank < 2:\n    dist.barrier(pair)")
    assert not any(troubles(answers))
    assert said(answers) == [""] * SIZE, "gloo's own chatter is left out"
    answers = ranks.execute("w = torch.ones(1)\nif rank < 2:\n    dist.all_reduce(w, group=pair)\nprint(int(w))")
    assert said(answers) == ["2\n", "2\n", "1\n"]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("import os\nos._exit(3)", 3), ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_a_rank_that_dies_is_replaced_and_the_others_keep_their_variables(
    ranks: Ranks, code: str, exit_code: int
) -> None:
    ranks.execute("survivor = rank * 10")
    answers = ranks.execute(f"if rank == 1:\n    {code.replace(chr(10), '; ')}\ndist.barrier()")
    assert answers[1].trouble is not None
    assert (answers[1].trouble.kind, answers[1].trouble.exit_code) == ("exit", exit_code)
    assert [answer.kept for answer in answers] == [True, False, True]
    assert still_work(ranks)
    assert said(ranks.execute("print(globals().get('survivor'))")) == ["0\n", "None\n", "20\n"]


def test_the_sentence_of_a_rank_that_died_tells_the_exit_code_and_what_is_lost(ranks: Ranks) -> None:
    with pytest.raises(RanksError) as error:
        ranks.run("import os\nif rank == 0:\n    os._exit(7)")
    assert "Rank 0: the process ended by itself with exit code 7, in the middle of the cell." in str(error.value)
    assert "Rank 0 starts anew, without any variables; ranks 1 and 2 keep theirs." in str(error.value)
    assert still_work(ranks)


def test_sys_exit_ends_the_cell_and_not_the_rank(ranks: Ranks) -> None:
    answers = ranks.execute("import sys\nstays = 1\nsys.exit(2)")
    assert [trouble and (trouble.name, trouble.message) for trouble in troubles(answers)] == [
        ("SystemExit", "2")
    ] * SIZE
    assert ranks["stays"] == [1] * SIZE
    for code in ("quit()", "exit()"):
        ranks.execute(code)
    assert still_work(ranks)


def test_a_loop_ends_at_its_limit_and_only_that_rank_is_stopped(ranks: Ranks) -> None:
    limit_s = short_limit_s()
    ranks.execute("mine = rank")
    with pytest.raises(RanksError) as error:
        ranks.run("if rank == 2:\n    while True:\n        pass", limit_s=limit_s)
    first, second, *_ = str(error.value).splitlines()
    assert first == f"Rank 2: still running after {limit_s} s, the limit of this cell (--limit); interrupted."
    assert second.startswith("    line ")
    assert ranks["mine"] == [0, 1, 2]
    assert still_work(ranks)


def test_a_cell_that_is_deaf_to_the_interrupt_loses_its_process(ranks: Ranks) -> None:
    answers = ranks.execute(
        "import signal\nif rank == 1:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: pass",
        limit_s=short_limit_s(),
    )
    assert [trouble and trouble.kind for trouble in troubles(answers)] == [None, "exit", None]
    assert still_work(ranks)


def test_an_interrupt_stops_the_ranks_at_once(ranks: Ranks) -> None:
    code = (
        "import os, signal, time\ndist.barrier()\n"  # a rank that has not begun the cell hears no interrupt
        f"if rank == 0:\n    os.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(3000)"
    )
    answers = ranks.execute(code, limit_s=2000)
    assert [trouble and trouble.kind for trouble in troubles(answers)] == ["stopped"] * SIZE
    assert still_work(ranks)


def test_an_interrupt_between_cells_is_not_kept_for_the_next(ranks: Ranks) -> None:
    for row in ranks.status().rows:
        os.kill(row["pid"], signal.SIGINT)
    assert still_work(ranks)


def test_an_interrupt_may_come_at_any_moment_of_a_cell(ranks: Ranks) -> None:
    """Also between the message that brings the cell and its first line: it is an interrupt or nothing, no failure."""
    pids = [row["pid"] for row in ranks.status().rows]

    def interrupt(after_s: float) -> None:
        time.sleep(after_s)
        for pid in pids:
            os.kill(pid, signal.SIGINT)

    for number in range(20):
        thread = threading.Thread(target=interrupt, args=(number / 1000,))
        thread.start()
        answers = ranks.execute("import time\ntime.sleep(0.05)")
        thread.join()
        assert {trouble.name for trouble in troubles(answers) if trouble} <= {"KeyboardInterrupt"}
    assert still_work(ranks)


def test_a_flood_is_cut_and_harms_nobody(ranks: Ranks) -> None:
    answers = ranks.execute("for _ in range(1000):\n    print('flood' * 100)")
    assert not any(troubles(answers))
    for answer, text in zip(answers, said(answers), strict=True):
        assert answer.cut
        assert 60 * 2**10 < len(text) <= 64 * 2**10
    assert still_work(ranks)


def test_a_flood_without_end_is_ended_by_the_limit(ranks: Ranks) -> None:
    answers = ranks.execute("while True:\n    print('flood' * 100)", limit_s=1)
    # On a busy machine a rank may hear the interrupt too late, and is replaced.
    assert {trouble and trouble.kind for trouble in troubles(answers)} <= {"limit", "exit"}
    assert still_work(ranks)


def test_all_ways_to_print_are_heard_in_order(ranks: Ranks) -> None:
    code = (
        "import os, subprocess, sys, warnings\nprint('first')\nos.write(1, b'second\\n')\n"
        "subprocess.run(['echo', 'third'])\nprint('fourth', file=sys.stderr)"
    )
    assert said(ranks.execute(code)) == ["first\nsecond\nthird\nfourth\n"] * SIZE


def test_closed_streams_are_open_again_in_the_next_cell(ranks: Ranks) -> None:
    ranks.execute("import os, sys\nsys.stdout.close()\nos.close(1)\nos.close(2)")
    assert still_work(ranks)


def test_a_display_keeps_text_and_png_and_no_html(ranks: Ranks) -> None:
    code = (
        "from IPython.display import HTML, Image, display\nprint('before')\ndisplay(HTML('<b>bold</b>'))\n"
        "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n', format='png'))\nprint('after')\n1 + 1"
    )
    answer = ranks.execute(code)[0]
    assert [part["kind"] for part in answer.parts] == ["printed", "value", "image", "printed", "value"]
    assert not any("<b>" in str(part) for part in answer.parts)
    assert said(ranks.execute("1 + 1;")) == [""] * SIZE


def test_input_is_refused_rather_than_waited_for(ranks: Ranks) -> None:
    answers = ranks.execute("input('?')")
    assert [trouble and trouble.name for trouble in troubles(answers)] == ["EOFError"] * SIZE


def test_a_forked_child_is_no_second_rank(ranks: Ranks) -> None:
    answers = ranks.execute("import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\nprint(child > 0)")
    assert [sorted(text.split()) for text in said(answers)] == [["False", "True"]] * SIZE
    assert still_work(ranks)


def test_a_destroyed_group_is_made_anew(ranks: Ranks) -> None:
    ranks.execute("dist.destroy_process_group()")
    assert still_work(ranks)


def test_a_hundred_children_go_with_their_rank(ranks: Ranks) -> None:
    before = {process.pid for process in processes_below(ranks)}
    ranks.execute(
        "import os, time\nif rank == 0:\n    for _ in range(100):\n        if os.fork() == 0:\n"
        "            os.setsid()\n            time.sleep(1000)"
    )
    assert len(processes_below(ranks)) >= len(before) + 100
    ranks.execute("import os\nif rank == 0:\n    os._exit(0)")
    assert still_work(ranks)
    assert wait_until(lambda: len(processes_below(ranks)) <= len(before))


def test_ranks_that_die_between_cells_are_replaced(ranks: Ranks) -> None:
    victim = ranks.status().rows[1]["pid"]
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        try:
            return victim not in [row["pid"] for row in ranks.status().rows]
        except RanksRefused:  # it died before it could answer
            return False

    assert wait_until(replaced)
    assert still_work(ranks)


def test_another_number_means_other_ranks(ranks: Ranks) -> None:
    ranks.execute("old = 1")
    ranks.start(2)
    try:
        assert said(ranks.execute("dist.barrier()\nprint(world_size, 'old' in globals())")) == ["2 False\n"] * 2
    finally:
        ranks.start(SIZE)
    assert still_work(ranks)


def test_without_a_supervisor_all_is_lost_and_can_be_started_again() -> None:
    with Ranks(1) as ranks:
        ranks.execute("import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)")
        supervisor, *others = processes_below(ranks)
        supervisor.kill()
        assert supervisor.wait(20) is not None
        with pytest.raises(RanksRefused, match="the ranks have ended, all of them"):
            ranks.execute("1")
        assert wait_until(lambda: not alive(others))
        with pytest.raises(RanksRefused, match="no ranks are running"):
            ranks.execute("1")
        assert not ranks


def test_nothing_is_left_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Ranks(1) as ranks:
        ranks.execute("import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)")
        processes = processes_below(ranks)
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0, "keys lie there"
    assert wait_until(lambda: not alive(processes))
    assert not folder.exists()
    assert ranks.size == 0
