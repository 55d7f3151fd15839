"""`%%ranks` in a notebook: its first line, and a real kernel that lives through everything and takes all with it."""

from __future__ import annotations

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

    def outputs(self, request: str) -> list[str]:
        """What stays in the notebook: what was cleared does not."""
        kept: list[str] = []
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=WAIT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return kept
            if kind == "clear_output":
                kept.clear()
            elif kind == "stream":
                kept.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                kept.append(content["data"]["text/plain"])
            elif kind == "error":
                kept.append("\n".join(content["traceback"]))

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


def test_a_notebook_from_its_first_cell_to_a_killed_kernel(notebook: Notebook, tmp_path: Path) -> None:
    """One kernel for all, in the order a student would meet these."""
    assert notebook.run("%%ranks\n1") == ["no ranks are running: start some, e.g. with %%ranks 4."]
    assert notebook.run("%ranks status") == ["no ranks are running"]
    assert "--force" in notebook.run("%%ranks 256\n1")[0]
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
