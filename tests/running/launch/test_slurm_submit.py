"""Sending a run: what is written before, what is made of each answer of sbatch, what is found again after a crash.

`sbatch`, `squeue` and `sacct` are programs of the test, on PATH.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.results.record import read_record
from dlojz.running import launch
from dlojz.running.folder import Job, read_job
from dlojz.running.launch import run, submit_many
from dlojz.running.limits import preview
from dlojz.running.run import Run
from dlojz.running.slurm import slurm_job
from dlojz.running.slurm.slurm_queue import explain_reason, explain_refusal

Program = Callable[[str, str], None]
CONFIG = RunConfig.of(model="vit_tiny", dp=2, device="cpu")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Write a program of the scheduler; those that are not written are not there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("DLOJZ_MACHINES", "DLOJZ_MACHINE", "DLOJZ_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)

    def write(name: str, body: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    for name in ("squeue", "sacct", "scancel", "scontrol"):
        write(name, "exit 1")
    return write


def send(**more: object) -> Run:
    return run(CONFIG, on="slurm", machine="local", wait=False, **more)  # type: ignore[arg-type]


def test_read_job_finds_all_written_before_it_is_sent_and_its_number_after(program: Program, tmp_path: Path) -> None:
    program(
        "sbatch",
        f'pwd -P > {tmp_path}/cwd; cp job.json {tmp_path}; ls logs; echo "welcome to the cluster"; echo "41;lab"',
    )
    os.environ["SBATCH_PARTITION"] = "other"
    try:
        one = send()
    finally:
        del os.environ["SBATCH_PARTITION"]
    assert (tmp_path / "cwd").read_text().strip() == str(one.folder)
    before, after = Job.from_json((tmp_path / "job.json").read_text()), read_job(one.folder)
    assert (before.name, before.job_id, before.machine) == (one.run_id, "", "local")
    assert after == Job(**{**before.to_dict(), "job_id": "41"})
    assert os.access(one.folder / "job.sh", os.X_OK)
    assert send() == one, "it is found again and not sent twice"


def test_options_of_the_caller_s_environment_do_not_change_the_job(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "PMI_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/kept")
    program("sbatch", f"env > {tmp_path}/seen; echo 1")
    send()
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/kept" in seen
    assert not any(name in seen for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "PMI_RANK"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1", "sinfo -s"),
        ("echo 'sbatch: error: Invalid account or account/partition combination specified' >&2; exit 1", "account="),
        ("echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1", "nothing was sent"),
        ("printf 'sbatch: error: \\033[2J<b>' >&2; exit 255", "\\x1b[2J<b>"),
        ("exit 3", "exit code 3, without a word"),
    ],
)
def test_record_of_a_run_that_sbatch_refused_is_failed_and_tells_why(
    program: Program, tmp_path: Path, body: str, words: str
) -> None:
    program("sbatch", body)
    with pytest.raises(LabError) as refusal:
        send()
    assert "the scheduler refused the job" in str(refusal.value)
    assert words in str(refusal.value)
    (folder,) = (tmp_path / "runs").glob("2*")
    record = read_record(folder / "record.json")
    assert record.status == "failed"
    assert record.reason == str(refusal.value)
    job = read_job(folder)
    assert job is not None
    assert job.job_id == ""


@pytest.mark.parametrize("answer", ["echo yes", "echo '12 34'", "true", "echo '41;lab'; echo bye"])
def test_recover_asks_the_queue_for_a_number_that_nobody_knows(program: Program, answer: str, tmp_path: Path) -> None:
    program("sbatch", answer)
    with pytest.raises(LabError, match="did not say whether it took"):
        send()
    (folder,) = (tmp_path / "runs").glob("2*")
    assert not (folder / "record.json").exists()
    job = read_job(folder)
    assert job is not None
    assert job.job_id == ""
    program("squeue", 'echo "7|2000-01-01T00:00:00"; echo junk; echo "55|$(TZ=UTC0 date +%Y-%m-%dT%H:%M:%S)"')
    found = slurm_job.recover(folder)
    assert found is not None
    assert found.job_id == "55", "an older job of this name is another one"
    assert read_job(folder) == found


def test_a_socket_that_timed_out_is_looked_up_at_once(program: Program) -> None:
    program(
        "sbatch",
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
    )
    program("squeue", 'echo "56|$(TZ=UTC0 date +%Y-%m-%dT%H:%M:%S)"')
    job = read_job(send().folder)
    assert job is not None
    assert job.job_id == "56"


def test_recover_asks_the_accounting_for_what_the_queue_has_forgotten(program: Program) -> None:
    program("sbatch", "echo 57")
    one = send()
    job = read_job(one.folder)
    assert job is not None
    Job(**{**job.to_dict(), "job_id": ""}).write(one.folder)
    assert slurm_job.recover(one.folder) is None
    program("sacct", 'echo "57|$(TZ=UTC0 date +%Y-%m-%dT%H:%M:%S)"')
    assert slurm_job.recover(one.folder) == job


def test_a_sweep_is_one_array_per_shape_and_sends_only_what_is_new(program: Program, tmp_path: Path) -> None:
    program(
        "sbatch",
        f'grep -h "^#SBATCH --array" job.sh >> {tmp_path}/sent; cat folders.txt | wc -l >> {tmp_path}/sent; echo "$$"',
    )
    small, large = CONFIG, RunConfig.of(model="vit_tiny", dp=4, device="cpu")
    others = [RunConfig.of(model="vit_tiny", dp=2, device="cpu", seed=seed) for seed in (1, 2)]
    runs = submit_many([small, large, *others], on="slurm", machine="local", at_once=2)
    assert [one.config for one in runs] == [small, large, *others]
    assert sorted((tmp_path / "sent").read_text().split("\n")) == [
        "",
        "#SBATCH --array=0-0%1",
        "#SBATCH --array=0-2%2",
        "1",
        "3",
    ]
    jobs = [read_job(one.folder) for one in runs]
    assert len({job.job_id for job in jobs if job}) == 2
    assert len({(job.job_id, job.array_task) for job in jobs if job}) == 4
    assert submit_many([small, large, *others], on="slurm", machine="local") == runs
    assert len(list((tmp_path / "runs" / ".sweeps").iterdir())) == 2


def test_submit_many_makes_several_arrays_of_a_sweep_that_is_too_long_for_one(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_TASKS", 2)
    program("sbatch", f'grep -h "^#SBATCH --array" job.sh >> {tmp_path}/sent; echo "$$"')
    five = [RunConfig.of(model="vit_tiny", dp=2, device="cpu", seed=seed) for seed in range(5)]
    runs = submit_many(five, on="slurm", machine="local", at_once=4)
    assert (tmp_path / "sent").read_text().split() == ["#SBATCH", "--array=0-1%2"] * 2 + ["#SBATCH", "--array=0-0%1"]
    assert all((job := read_job(one.folder)) is not None and job.job_id for one in runs)


def test_submit_many_makes_two_arrays_of_runs_of_two_interpreters(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "own" / "lib" / "python3.11" / "site-packages" / "colossalai-0.5.0.dist-info"
    own = tmp_path / "own" / "bin" / "python"
    for folder in (packages, own.parent):
        folder.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: colossalai\nVersion: 0.5.0\n")
    own.touch()
    monkeypatch.setenv("DLOJZ_COLOSSALAI", str(own))
    program("sbatch", f'grep "^PYTHON=" job.sh >> {tmp_path}/sent; echo "$$"')
    both = [CONFIG, RunConfig.of(model="vit_tiny", dp=2, device="cpu", library="colossalai")]
    submit_many(both, on="slurm", machine="local", at_once=2)
    assert len((tmp_path / "sent").read_text().splitlines()) == 2


def test_submit_many_sends_nothing_of_a_sweep_of_which_one_cannot_run(program: Program, tmp_path: Path) -> None:
    program("sbatch", "echo 1")
    with pytest.raises(LabError, match="8 ranks need 4 nodes"):
        submit_many([CONFIG, RunConfig.of(model="vit_tiny", dp=8)], on="slurm", machine="local")
    assert not (tmp_path / "runs").exists()
    program("sbatch", "echo no >&2; exit 1")
    with pytest.raises(LabError, match="refused the job: no"):
        submit_many([CONFIG], on="slurm", machine="local")
    (folder,) = (tmp_path / "runs").glob("2*")
    assert read_record(folder / "record.json").status == "failed"


def test_refusals_before_sending_leave_no_folder(program: Program, tmp_path: Path) -> None:
    program("sbatch", "echo 1")
    with pytest.raises(LabError, match="8 ranks need 4 nodes"):
        run(CONFIG, dp=8, on="slurm", machine="local")
    with pytest.raises(LabError, match="account"):
        send(account="a b")
    (tmp_path / "bin" / "sbatch").unlink()
    os.environ["PATH"] = str(tmp_path / "bin")
    with pytest.raises(LabError, match="this computer has no sbatch"):
        send()
    assert not (tmp_path / "runs").exists()


def test_submit_many_leaves_nothing_that_waits_in_a_root_that_slurm_cannot_be_told(
    program: Program, tmp_path: Path
) -> None:
    program("sbatch", f"touch {tmp_path}/asked; echo 1")
    for send_it in (send, lambda **more: submit_many([CONFIG], on="slurm", machine="local", **more)):
        with pytest.raises(LabError, match="cannot be given to the scheduler"):
            send_it(root=tmp_path / "50%")
    records = [read_record(path) for path in (tmp_path / "50%").glob("2*/record.json")]
    assert [record.status for record in records] == ["failed", "failed"]
    assert not (tmp_path / "asked").exists()


def test_preview_looks_for_a_gpu_on_the_cluster(program: Program) -> None:
    program("sbatch", "echo 1")
    with pytest.raises(LabError, match="no GPU that computes"):
        run(CONFIG, device="cuda", machine="local")
    assert preview(CONFIG, "local").refusals == ()


def test_slurm_job_gives_up_a_sbatch_that_hangs(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program("sbatch", "exec sleep 3600")
    monkeypatch.setattr(slurm_job, "TIMEOUT_S", 0.2)
    with pytest.raises(LabError, match="did not answer within"):
        send()


@pytest.mark.parametrize(
    ("reason", "words", "mots"),
    [
        ("Resources", "it waits for nodes", "il attend des nœuds"),
        ("(Priority)", "other jobs go first", "d’autres travaux"),
        ("PartitionTimeLimit", "for ever", "sans fin"),
        ("PartitionConfig", "for ever", "sans fin"),
        ("AssocGrpGRES", "your account has reached its limit of GPUs together", "de GPU de votre compte"),
        ("AssocGrpGRESMinutes", "used up", "épuisées"),
        ("QOSMaxJobsPerUserLimit", "the QoS has reached its limit of jobs at once", "travaux simultanés de la QoS"),
        ("QOSGrpNodeLimit", "limit of nodes together", "de nœuds de la QoS"),
        ("QOSMaxWallDurationPerJobLimit", "so many hours: it waits for ever", "d’heures à un seul travail"),
        ("QOSMaxGRESPerUser", "limit of GPUs", "de GPU"),
        ("BeginTime", "by itself", "de lui-même"),
        ("ReqNodeNotAvail, UnavailableNodes:n[0-1]", "maintained", "maintenance"),
        ("launch failed requeued held", "scontrol release", "scontrol release"),
        ("JobArrayTaskLimit", "the sweep", "le balayage"),
        ("Something\x1b[2JNew", "Something\\x1b[2JNew", "Something\\x1b[2JNew"),
    ],
)
def test_reasons_are_translated(reason: str, words: str, mots: str) -> None:
    assert words in explain_reason(reason)
    use_language("fr")
    assert mots in explain_reason(reason)


def test_no_reason_needs_no_words() -> None:
    assert explain_reason("None") == explain_reason("") == explain_refusal("never heard of") == ""
