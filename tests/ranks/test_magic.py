"""`%%ranks` in a notebook: its first line, and a real kernel that lives through everything and takes all with it."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

from dlojz.ranks.magic import RanksCommand, parse
from dlojz.ranks.rank_setup import RanksRefused

WAIT_S = 240


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("", RanksCommand()),
        ("4", RanksCommand(size=4)),
        ("--with f,g 2 --limit 1.5 --force", RanksCommand(size=2, names=("f", "g"), limit_s=1.5, force=True)),
        ("4 --with=f --limit=3", RanksCommand(size=4, names=("f",), limit_s=3)),
        ("--with f, g", RanksCommand(names=("f", "g"))),
        ("--with f --with g", RanksCommand(names=("f", "g"))),
    ],
)
def test_the_first_line_of_a_cell_is_understood(line: str, asked: RanksCommand) -> None:
    assert parse(line, is_cell=True) == asked


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("", RanksCommand("status")),
        ("status", RanksCommand("status")),
        ("start 4 --force", RanksCommand("start", size=4, force=True)),
        ("4", RanksCommand("start", size=4)),
        ("stop", RanksCommand("stop")),
        ("restart", RanksCommand("restart")),
    ],
)
def test_commands_are_understood(line: str, asked: RanksCommand) -> None:
    assert parse(line, is_cell=False) == asked


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("four", "a number of ranks is a whole number from 1 to 256, e.g. %%ranks 4, but 'four' was received."),
        ("0", "but '0' was received"),
        ("2 4", "one number of ranks is enough, but 2 and '4' were received."),
        ("--lmit 3", "unknown option '--lmit': did you mean '--limit'"),
        ("--limit", "--limit takes seconds.*but '' was received"),
        ("--limit soon", "but 'soon' was received"),
        ("--limit -1", "--limit takes seconds"),
        ("--limit nan", "--limit takes seconds"),
        ("--with", "--with takes names of the notebook.*but '' was received"),
        ("--with f()", "--with takes names of the notebook, e.g. --with model,batch, but 'f..' was received"),
    ],
)
def test_a_mistake_in_the_first_line_is_one_sentence(line: str, sentence: str) -> None:
    with pytest.raises(RanksRefused, match=sentence):
        parse(line, is_cell=True)


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(RanksRefused, match="unknown command 'strat': did you mean 'start'"):
        parse("strat", is_cell=False)


class Notebook:
    """A kernel, and what its cells leave behind."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)

    def send(self, code: str) -> str:
        return str(self.client.execute(code))

    def message(self, request: str) -> dict[str, Any]:
        """The next message that a cell sends."""
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=WAIT_S)
            if message["parent_header"].get("msg_id") == request:
                return message

    def until_shown(self, request: str, text: str) -> str:
        """The kind of the message by which a cell, before it ends, shows exactly this."""
        while True:
            message = self.message(request)
            assert message["content"].get("execution_state") != "idle", "the cell has ended"
            if message["content"].get("data", {}).get("text/plain") == text:
                return str(message["msg_type"])

    def outputs(self, request: str) -> list[str]:
        """What stays in the notebook: what was cleared or replaced does not."""
        kept: dict[object, str] = {}  # by display id, where it has one
        while True:
            message = self.message(request)
            kind, content = message["msg_type"], message["content"]
            key = content.get("transient", {}).get("display_id", len(kept))
            if kind == "status" and content["execution_state"] == "idle":
                return list(kept.values())
            if kind == "clear_output":
                kept.clear()
            elif kind == "stream":
                kept[key] = content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                kept[key] = content["data"]["text/plain"]
            elif kind == "error":
                kept[key] = "\n".join(content["traceback"])

    def run(self, code: str) -> list[str]:
        return self.outputs(self.send(code))

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.manager.provisioner.pid).children(recursive=True)

    def programs(self) -> list[str]:
        """What they run; those that have just ended run nothing."""
        found: list[str] = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found += process.cmdline()[:1]
        return found

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.run("%load_ext dlojz.ranks")
    try:
        yield notebook
    finally:
        notebook.close()


LOOP = """
import os, time
print("before", rank)
while not os.path.exists({go!r}):
    time.sleep(0.01)
print("after")
"""


def test_output_of_ranks_is_shown_while_they_run_and_replaced_at_the_end(notebook: Notebook, tmp_path: Path) -> None:
    """Rank 1 waits for the file; nothing but its line of before can be there until the test writes it."""
    go = tmp_path / "go"
    request = notebook.send("%%ranks 2" + LOOP.format(go=str(go)))
    notebook.until_shown(request, "rank 0: before 0\nrank 1: before 1")
    go.touch()
    assert notebook.outputs(request) == ["rank 0:\n    before 0\n    after\nrank 1:\n    before 1\n    after"]

    go.unlink()
    alone = "print('alone') if rank == 0 else None\n" + LOOP.format(go=str(go)).replace(", rank", "")
    request = notebook.send(f"%%ranks\n{alone}")
    notebook.until_shown(request, "rank 0:\n    alone\n    before\nrank 1: before")
    go.touch()
    assert notebook.outputs(request) == ["rank 0:\n    alone\n    before\n    after\nrank 1:\n    before\n    after"]


def test_ranks_that_hang_or_are_killed_keep_what_they_printed(notebook: Notebook) -> None:
    """One stops at the interrupt and answers itself; the other is deaf and killed: its text is that shown before."""
    deaf = (
        "if rank: import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('before')\nwhile True:\n    pass"
    )
    request = notebook.send(f"%%ranks 2\n{deaf}")
    notebook.until_shown(request, "rank 0: before\nrank 1: before")
    notebook.manager.interrupt_kernel()
    output, error = notebook.outputs(request)
    assert output == "ranks 0 and 1: before"
    assert error.startswith("Rank 0: interrupted.")
    assert "Rank 1: deaf to the interrupt; the process was ended." in error


def test_ranks_show_one_message_where_outputs_are_compared(notebook: Notebook) -> None:
    """A notebook is built and compared so: nbval understands no update."""
    notebook.run("%env DLOJZ_PROGRESS=off")
    request = notebook.send("%%ranks 2\nimport time\nprint(rank)\ntime.sleep(1)\nprint('end')")
    kinds = []
    while (message := notebook.message(request))["content"].get("execution_state") != "idle":
        kinds += [message["msg_type"]] if "data" in message["content"] else []
    assert kinds == ["display_data"]
    notebook.run("%env DLOJZ_PROGRESS=on")


def test_a_notebook_from_its_first_cell_to_a_killed_kernel(notebook: Notebook, tmp_path: Path) -> None:
    """One kernel for all, in the order a student would meet these."""
    notebook.run("%ranks stop")  # those of the tests before
    assert notebook.run("%%ranks\n1") == ["no ranks are running: start some, e.g. with %%ranks 4."]
    assert notebook.run("%ranks status") == ["no ranks are running"]
    assert notebook.run("%%ranks 256\n1") == ["ranks 0–255: 1"]  # threads
    notebook.run("%ranks stop")
    assert notebook.run("%%ranks 2\nprint(rank)") == ["rank 0: 0\nrank 1: 1"], "and no word of the start stays"
    assert notebook.run("%%ranks\nx = rank") == []
    assert notebook.run("ranks['x'], ranks.size") == ["([0, 1], 2)"]
    assert notebook.run("%%ranks\n1 / (rank - 1)") == [
        "rank 0: -1.0",
        "Rank 1: ZeroDivisionError: division by zero\n    line 2: 1 / (rank - 1)",
    ]
    assert notebook.run("%%ranks\n1 +") == ["Ranks 0 and 1: SyntaxError: invalid syntax\n    line 2: 1 +"]

    notebook.run("z = 5\ndef double(y):\n    return 2 * y")
    assert notebook.run("%%ranks\nz")[0].splitlines()[-1] == (
        "z: known in the notebook, not on the ranks, which have their own variables; %%ranks --with z sends a copy "
        "along."
    )
    assert notebook.run("%%ranks --with z,double\ndouble(z)") == ["ranks 0 and 1: 10"]

    notebook.run("from dlojz.labs import NotDone\ndef todo():\n    raise NotDone('abc')")
    assert notebook.run("%%ranks --with todo\ntodo()\ndist.barrier()") == [
        "Exercise “abc” is still to do: write the part marked TODO, then run this cell again."
    ]

    notebook.run("from dlojz.base.language import use_language; use_language('fr')")
    assert notebook.run("%%ranks\nprint(1)\ndist.all_reduce(torch.ones(rank + 1))")[:1] == ["rangs 0 et 1 : 1"]
    notebook.run("use_language('en')")

    request = notebook.send(f"%%ranks\nopen(f'{tmp_path}/{{rank}}', 'w').close()\nwhile True:\n    pass")
    while len(list(tmp_path.iterdir())) < 2:  # before the cell is running, the interrupt would be the notebook's own
        time.sleep(0.05)
    notebook.manager.interrupt_kernel()
    assert notebook.outputs(request)[-1].startswith("Ranks 0 and 1: interrupted.\n    line ")
    assert notebook.run("%%ranks\nprint(x)") == ["rank 0: 0\nrank 1: 1"]

    assert notebook.run("%%ranks 1\nprint(world_size)") == [
        "1 fresh ranks take the place of the 2 before, whose variables are gone.\n",
        "rank 0: 1",
    ]
    assert notebook.run("%%ranks\nprint(x)")[0].startswith("Rank 0: NameError: name 'x' is not defined")

    notebook.run(
        "%%ranks\nimport os, subprocess, time\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)"
    )
    folder = Path(notebook.run("ranks._cluster.folder")[0].split("'")[1])
    assert folder.exists()
    processes = notebook.processes()
    assert any("sleep" in program for program in notebook.programs())
    notebook.send("%%ranks\nwhile True:\n    pass")
    time.sleep(0.5)
    psutil.Process(notebook.manager.provisioner.pid).kill()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()
