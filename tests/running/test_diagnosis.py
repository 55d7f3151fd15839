"""A diagnosis names the cause: who, what, where; and says nothing where it knows nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.results.record import write_record
from dlojz.running.ending import HEAD_BYTES, Ending, first_error, read_log
from dlojz.running.failures.diagnosis import Symptoms, find_causes
from dlojz.running.run import Run
from dlojz.running.state import assemble

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e $\\foo$"
TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    import apex\n'
LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:52311\n"


def watchdog(rank: int, seq: int = 808, op: str = "ALLREDUCE", numel: int = 10) -> str:
    """The line of torch's ProcessGroupNCCL."""
    return (
        f"[rank{rank}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, "
        "Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
    )


def symptoms(
    status: str = "failed", reason: str = "", logs: dict[int | None, str] | None = None, **more: Any
) -> Symptoms:
    known = {"steps": 3, "losses": (2.0, 1.9, 1.8), "world_size": 4, "learning_rate": 0.1}
    return Symptoms(status=status, reason=reason, logs=logs or {}, **(known | more))


def the_cause(found: Symptoms) -> Any:
    causes = find_causes(found)
    assert len(causes) == 1
    return causes[0]


@pytest.mark.parametrize(
    "log, text, line",
    [
        (f"begin\n{TRACE}ModuleNotFoundError: No module named 'apex'\nmore\n", "ModuleNotFoundError: No module", 5),
        (f"{TRACE}{LOST}later\n{TRACE}ValueError: x\n", "ValueError: x", 9),
        (f"{TRACE}KeyError: 'a'\n\nDuring handling of it:\n\n{TRACE}ValueError: b\n", "KeyError: 'a'", 4),
        ("".join(f"[rank1]: {one}\n" for one in [*TRACE.splitlines(), "ValueError: y"]), "ValueError: y", 4),
        ("ok\nterminate called\n  what():  Socket Timeout\n", "what():  Socket Timeout", 3),
        ("Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault", 1),
        ("/x/job.sh: line 7: python: command not found\n", "/x/job.sh: line 7: python: command not found", 1),
    ],
)  # fmt: skip
def test_the_first_error_that_is_a_cause(log: str, text: str, line: int) -> None:
    found = first_error(log, 1)
    assert found is not None and found.text.startswith(text) and (found.line, found.rank) == (line, 1)
    assert not found.lost_peer


def test_a_lost_peer_is_told_only_where_there_is_nothing_else() -> None:
    found = first_error(TRACE + LOST)
    assert found is not None and found.lost_peer
    assert first_error("all is well\nstep 3: loss 2.0, error: 0.1\n") is None


def test_a_log_without_end_is_read_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text(f"{TRACE}ValueError: first\n" + "noise\n" * 1_000_000 + f"{TRACE}ValueError: last\n")
    text = read_log(path)
    assert len(text) < 2 * HEAD_BYTES and text.endswith("ValueError: last\n")
    found = first_error(text)
    assert found is not None and found.text == "ValueError: first"
    (tmp_path / "link").symlink_to(path)
    assert read_log(tmp_path / "link") == read_log(tmp_path) == read_log(tmp_path / "none") == ""


def test_find_causes_knows_a_missing_module() -> None:
    logs = {0: "", 2: f"{TRACE}ModuleNotFoundError: No module named 'apex.optimizers'\n"}
    found = the_cause(symptoms(logs=logs))
    assert (found.kind, found.ranks) == ("import", (2,))
    assert "Rank 2 could not import the module apex.optimizers" in found.what and "pip install apex`" in found.advice
    library = the_cause(symptoms(logs={None: "python: error: libcudart.so.12: cannot open shared object file\n"}))
    assert "The job could not load the library libcudart.so.12" in library.what
    name = the_cause(symptoms(logs={1: "ImportError: cannot import name 'x' from 'torch.y'\n"}))
    assert "torch.y, but not x" in name.what


def test_the_rank_that_did_not_come_to_a_collective() -> None:
    found = the_cause(symptoms(logs={rank: watchdog(rank) for rank in (0, 1, 3)} | {2: ""}))
    assert (found.kind, found.ranks) == ("collective", (2,))
    assert "rank 2 did not call ALLREDUCE (SeqNum=808, 10 elements), in which ranks" in found.what
    assert "10 min 00 s" in found.what


def test_the_rank_that_was_in_another_collective() -> None:
    logs = {rank: watchdog(rank) for rank in (0, 1, 3)} | {2: watchdog(2, 807, "BROADCAST", 5)}
    found = the_cause(symptoms(logs=logs))
    assert found.ranks == (2,) and "(rank 2 was in BROADCAST (SeqNum=807, 5 elements))" in found.what
    together = the_cause(symptoms(logs={rank: watchdog(rank) for rank in range(4)}))
    assert together.ranks == (0, 1, 2, 3) and "All ranks waited" in together.what


def test_the_watchdog_of_all_ranks_in_one_log() -> None:
    """srun without a file per rank: the ranks are told by torch's prefix."""
    found = the_cause(symptoms(logs={None: "".join(watchdog(rank) for rank in (0, 1, 2))}))
    assert found.ranks == (3,)


def test_find_causes_knows_gloo_and_its_barrier() -> None:
    trace = 'Traceback (most recent call last):\n  File "/x/distributed_c10d.py", line 2810, in all_reduce\n'
    said = f"{trace}    work.wait()\nRuntimeError: [pair.cc] Timed out waiting 30000ms for recv operation to complete\n"
    logs: dict[int | None, str] = dict.fromkeys((0, 1, 2), said)
    found = the_cause(symptoms(logs=logs))
    assert found.ranks == (3,) and "rank 3 did not call all_reduce, in which ranks 0–2 waited 30.0 s" in found.what
    barrier = "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms\n"
    assert the_cause(symptoms(logs={0: barrier})).ranks == (1, 3)


def test_find_causes_knows_different_collectives() -> None:
    devices = "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu))"
    one, other = (
        f"CollectiveFingerPrint(SequenceNumber=3, OpType={operation}, TensorShape=[{size}], {devices}"
        for operation, size in (("ALLREDUCE", 10), ("BROADCAST", 7))
    )
    text = (
        "RuntimeError: Detected mismatch between collectives on ranks. "
        f"Rank 0 is running collective: {one}, but Rank 1 is running collective: {other}.\n"
    )
    found = the_cause(symptoms(logs={0: text}))
    assert found.ranks == (0, 1)
    assert "rank 0 OpType=ALLREDUCE, TensorShape=[10]" in found.what and "TensorShape=[7]" in found.what


def test_find_causes_knows_divergence_time_kill_port_and_node() -> None:
    diverged = the_cause(symptoms("diverged", "rank 0: the loss became nan at step 7; the weights were not …"))
    assert "diverged at step 7 with the learning rate 0.1" in diverged.what and "0.01" in diverged.advice
    assert the_cause(symptoms("timeout")).kind == "time-limit"
    killed = the_cause(
        symptoms(reason="rank 1 was killed by signal 9 (SIGKILL) after step 7: if nobody …", logs={0: LOST})
    )
    assert (killed.kind, killed.ranks) == ("killed", (1,))
    port = "torch.distributed.DistNetworkError: EADDRINUSE, message: address already in use\n"
    assert the_cause(symptoms(logs={0: TRACE + port})).kind == "port"
    assert the_cause(symptoms(reason="a node of the job 12 failed after step 2 (NODE_FAIL)")).kind == "node"


def test_find_causes_guesses_nothing_that_no_rule_knows() -> None:
    assert find_causes(symptoms(logs={0: f"{TRACE}ValueError: something new\n"})) == ()


@pytest.fixture
def ended(config: RunConfig, make_folder: Callable[..., Path], told: Any) -> Callable[..., Run]:
    """A run of two ranks that ended so."""

    def make(status: str, reason: str = "", logs: dict[str, str] | None = None) -> Run:
        events = {0: told(3), 1: told(2)}
        folder = make_folder(config, events)
        for name, text in (logs or {}).items():
            (folder / "logs" / f"{name}.log").write_text(text)
        write_record(folder / "record.json", assemble(folder.name, config, events, Ending(status, reason), 1.0))  # type: ignore[arg-type]
        return Run(folder)

    return make


def test_diagnosis_of_a_failed_run_shows_its_errors_without_hostile_text(ended: Callable[..., Run]) -> None:
    run = ended("failed", "rank 1: ValueError", {"rank-1": f"{TRACE}ValueError: {HOSTILE}\n", "rank-0": TRACE + LOST})
    found = run.diagnosis()
    assert [(error.rank, error.lost_peer) for error in found.errors] == [(0, True), (1, False)]
    page, text = found._repr_html_(), repr(found)
    assert "<img" not in page and "&lt;img" in page
    assert not {"\x1b", "\u202e"} & set(page + text)
    assert "rank 1, line 4  ValueError: <img" in text and "No known cause" in text
    assert found.to_dict()["errors"][1]["line"] == 4


def test_memory_with_its_levers_in_both_languages(ended: Callable[..., Run]) -> None:
    found = ended("oom", "rank 0: MemoryError").diagnosis()
    assert found.memory is not None and len(found.memory.levers) == 3
    assert found.findings[0].kind == "memory" and "dlojz run" in repr(found)
    assert "The cheapest levers" in found._repr_html_()
    use_language("fr")
    again = ended("oom", "rank 0: MemoryError").diagnosis()
    assert "La mémoire a manqué après 3 pas" in repr(again) and "Les leviers les moins coûteux" in repr(again)


def test_diagnosis_of_a_run_that_is_well_finds_nothing_wrong(
    ended: Callable[..., Run], config: RunConfig, make_folder: Callable[..., Path]
) -> None:
    assert "Nothing is wrong" in repr(ended("completed", logs={"rank-0": TRACE + LOST}).diagnosis())
    assert "Nothing is wrong" in repr(Run(make_folder(config, alive=True)).diagnosis())
