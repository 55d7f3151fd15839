"""A log from anywhere: its first cause is named, what followed from it is not, and nothing is lost on the way."""

import gzip
import json
import re
import tomllib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.main import main
from dlojz.running.failures import log_reader
from dlojz.running.failures.log_diagnosis import LogDiagnosis, diagnose_logs
from dlojz.running.failures.log_reader import LogReader, rank_of
from dlojz.running.failures.signatures import memory_account, recognise, signatures

LOGS = Path(__file__).with_name("logs")
CAUSES: dict[str, dict[str, Any]] = tomllib.loads((LOGS / "causes.toml").read_text())
CASCADES = {"launcher-stopped", "child-failed", "peer-lost"}
ERROR = 'Traceback (most recent call last):\n  File "/data/user/train.py", line 3, in main\n    f()\nValueError: x\n'


def diagnosis_of(path: Path) -> LogDiagnosis:
    (diagnosis,) = diagnose_logs(str(path))
    return diagnosis


def test_diagnose_logs_names_the_known_causes_and_no_cascade_as_one() -> None:
    assert len(CAUSES) >= 60 and {path.stem for path in LOGS.glob("*.log")} == set(CAUSES)
    wrong, cascades = [], []
    for name, expected in CAUSES.items():
        diagnosis = diagnosis_of(LOGS / f"{name}.log")
        ranks = list(diagnosis.finding.ranks) if diagnosis.finding else []
        if diagnosis.name != expected["cause"] or expected.get("ranks", ranks) != ranks:
            wrong.append((name, diagnosis.name, ranks))
        if diagnosis.name in CASCADES and expected["cause"] not in CASCADES:
            cascades.append(name)
    assert not cascades
    assert not wrong


def test_logs_of_the_corpus_are_small_and_name_no_place_of_a_machine() -> None:
    for path in LOGS.glob("*.log"):
        text = path.read_text()
        assert len(text.encode()) <= 4096, path.name
        assert not re.search(r"/tmp/|/root|\.pyenv", text), path.name


def test_texts_of_every_signature_are_in_two_languages_without_open_places() -> None:
    for entry in signatures().values():
        match = re.compile(entry.pattern).search("")
        for language in ("en", "fr"):
            use_language(language)
            what, advice = entry.texts(3, match)
            assert what and advice and "{" not in what + advice, entry.name
        assert entry.en != entry.fr and entry.do_en != entry.do_fr


def test_memory_account_reads_both_forms_of_the_message_and_sees_fragmentation() -> None:
    text = (LOGS / "oom_backward.log").read_text()
    account = memory_account(text, "in the backward pass")
    assert "in the backward pass" in account and "1.96 GiB asked at once" in account
    assert "79.2 GiB on the GPU" in account
    assert "expandable_segments" in account
    assert "expandable_segments" not in memory_account((LOGS / "oom_optimizer.log").read_text())
    old = memory_account((LOGS / "oom_forward_old.log").read_text())
    assert "asked at once" in old and "allocated" in old


@pytest.mark.parametrize(
    "name, phase", [("oom_backward", "backward"), ("oom_optimizer", "optimizer"), ("oom_loading", "loaded")]
)
def test_diagnose_logs_says_the_phase_in_which_memory_ran_out(name: str, phase: str) -> None:
    finding = diagnosis_of(LOGS / f"{name}.log").finding
    assert finding is not None and phase in finding.what


def test_recognise_passes_over_ordinary_lines() -> None:
    assert recognise("step 3: loss 2.31, error rate 0.12") is None
    assert recognise("info: inference of nanogpt, loss: 2.0") is None


def test_rank_of_reads_names_and_folders() -> None:
    assert rank_of(Path("run/attempt_0/3/stderr.log")) == 3
    assert rank_of(Path("rank-12.log")) == rank_of(Path("trace_rank_12.json")) == 12
    assert rank_of(Path("slurm-4242.out")) is None


def test_a_folder_of_torchrun_is_one_job_and_its_ranks_are_told_apart(tmp_path: Path) -> None:
    for rank, text in enumerate(("RuntimeError: Connection closed by peer\n", ERROR)):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)
    diagnosis = diagnosis_of(tmp_path)
    assert diagnosis.finding is not None and diagnosis.finding.ranks == (1,)
    text = "\n".join(diagnosis.lines())
    assert "Rank 1 raised ValueError: x" in text and "train.py:3 in main" in text
    assert "What followed from it" in text and "rank 0" in text


def test_a_folder_of_several_jobs_gets_a_sentence_for_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slurm-1001.out").write_text(ERROR)
    (tmp_path / "slurm-1002.out").write_text("2025-01-01 10:00:00 all done\n")
    assert main(["doctor", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "1001: The job raised ValueError: x" in printed and "1002: Nothing in it says that it failed" in printed


def test_json_has_the_cause_what_followed_and_the_times(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(LOGS / "oom_backward.log"), "--json"]) == 0
    (document,) = json.loads(capfd.readouterr().out)["logs"]
    assert document["cause"]["name"] == "cuda-memory" and document["cause"]["ranks"] == [2]
    assert document["seen"]["line"] == 9 and document["seen"]["place"].startswith("train.py:61 in main")
    assert "peer-lost" in {item["name"] for item in document["followed"]}


def test_an_empty_a_binary_and_a_healthy_log_each_get_their_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"")
    (tmp_path / "b.log").write_bytes(b"\x80\x02\x00\x01")
    (tmp_path / "c.log").write_text("2025-01-01 10:00:00 step 1\n")
    assert next(diagnosis_of(tmp_path / "a.log").lines()) == "It is empty."
    assert "b.log is binary" in "\n".join(diagnosis_of(tmp_path / "b.log").lines())
    healthy = "\n".join(diagnosis_of(tmp_path / "c.log").lines())
    assert healthy.startswith("Nothing in it says that it failed.") and "2025-01-01 10:00:00" in healthy
    with pytest.raises(LabError):
        (tmp_path / "empty").mkdir()
        diagnose_logs(str(tmp_path / "empty"))


def test_encodings_progress_bars_colours_and_gzip(tmp_path: Path) -> None:
    noisy = "\x1b[31m1%\r2%\r" + ERROR.replace("\n", "\r\n") + "Électron\n"
    for name, data in (
        ("latin.log", noisy.encode("latin-1")),
        ("utf16.log", noisy.encode("utf-16")),
        ("zipped.log.gz", gzip.compress(noisy.encode())),
    ):
        (tmp_path / name).write_bytes(data)
        assert diagnosis_of(tmp_path / name).name == "ValueError", name


def test_a_log_without_end_is_read_in_bounded_memory() -> None:
    reader = LogReader()
    tracemalloc.start()
    lines = (f"[rank{number % 8}]: error: step {number} failed to improve\n" for number in range(5_000))
    reader.read("long.log", lines)
    reader.read("end.log", iter(ERROR.splitlines(keepends=True)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6 and [event.name for event in reader.evidence.events] == ["ValueError"]


def test_flight_recorders_as_json_name_the_rank_that_did_not_come(tmp_path: Path) -> None:
    for rank, last in enumerate((3, 2, 3)):
        entries = [
            {
                "is_p2p": False,
                "process_group": ["0", "default_pg"],
                "collective_seq_id": number,
                "profiling_name": "nccl:all_reduce",
                "input_dtypes": ["Float"],
                "input_sizes": [[10]],
            }
            for number in range(1, last + 1)
        ]
        (tmp_path / f"trace_rank_{rank}.json").write_text(json.dumps({"version": "2.5", "entries": entries}))
    finding = diagnosis_of(tmp_path).finding
    assert finding is not None and finding.ranks == (1,)
    assert "rank 1 has not called all_reduce #3 [10] float32, in which ranks 0 and 2" in finding.what


HEALTHY = """2025-01-01 10:00:00 Warning: No module named 'apex', using torch.optim instead
[W101 10:00:01.123 socket.cpp:752] [c10d] The client socket has failed to connect to [node1]:29500. Retrying
node12:1234:1300 [0] NCCL WARN NET/IB : Unable to open device mlx5_1
train.py:9: UserWarning: This DataLoader will create 8 worker processes in total, which might freeze
batch too large, retrying: CUDA out of memory. Tried to allocate 2.00 GiB
[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4294967296, reducing to 2147483648
Exception ignored in: <function Loader.__del__ at 0x7f>
Traceback (most recent call last):
  File "/data/user/train.py", line 3, in __del__
AttributeError: 'NoneType' object has no attribute 'close'
step 2 loss 2.2, error rate 0.31
"""


def test_diagnose_logs_names_no_cause_where_the_program_went_on(tmp_path: Path) -> None:
    """What it mentions is shown; the exception after it is the cause."""
    (tmp_path / "went_on.log").write_text(HEALTHY)
    diagnosis = diagnosis_of(tmp_path / "went_on.log")
    assert diagnosis.finding is None
    text = "\n".join(diagnosis.lines())
    assert text.startswith("Nothing in it says that it failed.") and "What it mentions, and went on:" in text
    assert "CUDA out of memory" in text and "AttributeError" not in text
    (tmp_path / "failed.log").write_text(HEALTHY + ERROR)
    diagnosis = diagnosis_of(tmp_path / "failed.log")
    assert diagnosis.name == "ValueError" and diagnosis.following == () and diagnosis.evidence.notes == []


def test_diagnose_logs_says_that_an_exception_may_have_been_caught(tmp_path: Path) -> None:
    (tmp_path / "caught.log").write_text(ERROR + "step 3 loss 2.1\nstep 4 loss 2.0\n")
    diagnosis = diagnosis_of(tmp_path / "caught.log")
    assert diagnosis.name == "ValueError"
    assert "it may have been caught" in "\n".join(diagnosis.lines())


def test_every_line_that_recognise_knows_is_one_of_interest() -> None:
    """The quick search before the patterns passes over none of their lines."""
    lines = [line for path in LOGS.glob("*.log") for line in path.read_text().splitlines()]
    passed_over = [line for line in lines if recognise(line) and not log_reader._OF_INTEREST.search(line.lower())]
    assert len(lines) > 500 and passed_over == []


def test_texts_of_a_rank_are_french_with_their_article() -> None:
    use_language("fr")
    assert signatures()["worker-killed"].texts(1)[0] == "Un worker de chargement du rang 1 est mort."
    assert signatures()["worker-killed"].texts(None)[0] == "Un worker de chargement du travail est mort."


def test_diagnose_logs_says_the_step_and_the_tasks_that_slurm_ended_or_that_none_is_named() -> None:
    whats = {
        name: finding.what
        for name in ("task", "tasks", "batch")
        if (finding := diagnosis_of(LOGS / f"slurm_{name}_oom.log").finding)
    }
    assert whats["task"].endswith("for it (rank 3; step 4711.0).")
    assert whats["tasks"].endswith("for it (ranks 2 and 3; step 99.0).")
    assert whats["batch"].endswith("for it (which rank is not said; step 4711.batch).")
    use_language("fr")
    finding = diagnosis_of(LOGS / "slurm_batch_oom.log").finding
    assert finding is not None and finding.what.endswith("(le rang n’est pas dit ; étape 4711.batch).")


def test_diagnose_logs_of_no_training_says_so_and_where_a_boxed_traceback_stands(tmp_path: Path) -> None:
    assert "tests/test_model.py:41: AssertionError" in next(diagnosis_of(LOGS / "pytest_failed.log").lines())
    assert "↳ run.py:31 in <module>: outputs = model(**batch)" in "\n".join(
        diagnosis_of(LOGS / "accelerate_boxed.log").lines()
    )
    (tmp_path / "cron.log").write_text("Mar  1 10:00:01 host CRON[123]: (ops) CMD (run-parts /etc/cron.hourly)\n")
    assert "Its last lines are no training’s" in "\n".join(diagnosis_of(tmp_path / "cron.log").lines())
    assert "no training’s" not in "\n".join(diagnosis_of(LOGS / "restarted_exception.log").lines())


def test_diagnose_logs_names_the_rank_of_the_lines_and_not_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("".join(f"[rank1]: {line}\n" for line in ERROR.splitlines()))
    finding = diagnosis_of(tmp_path / "rank-0.log").finding
    assert finding is not None and finding.ranks == (1,)


def test_diagnose_logs_says_that_a_traceback_was_cut_and_that_later_steps_end_a_warning(tmp_path: Path) -> None:
    assert "(module.py:1553 in _wrapped_call_impl), rank 1, without its exception" in "\n".join(
        diagnosis_of(LOGS / "cut_traceback.log").lines()
    )
    line = "n1:1:9 [0] misc/cudawrap.cc:182 NCCL WARN Cuda failure 'initialization error'\n"
    for steps, name in ((0, "nccl-cuda"), (1, "nccl-cuda"), (2, "")):
        (tmp_path / "steps.log").write_text(line + "".join(f"step {step} loss 2.0\n" for step in range(steps)))
        assert diagnosis_of(tmp_path / "steps.log").name == name, steps
    # Of an exception they end nothing, and no node's name is a rank.
    (tmp_path / "raised.log").write_text(ERROR + "step 1 loss 2.0\nstep 2 loss 2.0\n")
    assert diagnosis_of(tmp_path / "raised.log").name == "ValueError"
    (tmp_path / "hosts.log").write_text("".join(f"worker1: {line}\n" for line in ERROR.splitlines()))
    assert diagnosis_of(tmp_path / "hosts.log").evidence.ranks == set()
