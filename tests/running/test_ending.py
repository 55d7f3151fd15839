"""The cause is reported, never a consequence."""

import signal
from dataclasses import replace

import pytest

from dlojz.running.ending import EndEvidence, classify, end_of

GLOO_LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:52311"


def test_classify_calls_it_completed_where_every_rank_is() -> None:
    ending = classify(EndEvidence(2, ends={0: ("completed", ""), 1: ("completed", "")}))
    assert (ending.status, ending.reason) == ("completed", "")


def test_classify_sees_no_completion_where_one_rank_says_nothing() -> None:
    ending = classify(EndEvidence(2, ends={0: ("completed", "")}, steps={0: 4, 1: 3}))
    assert ending.status == "failed"
    assert ending.reason == "rank 1 ended after step 3 without saying how."


def test_classify_calls_a_crash_at_exit_after_completion_a_failure() -> None:
    ends = {0: ("completed", ""), 1: ("completed", "")}
    ending = classify(EndEvidence(2, ends=ends, exit_codes={1: -signal.SIGABRT}, steps={0: 4, 1: 4}))  # type: ignore[arg-type]
    assert ending.status == "failed"
    assert "rank 1 was killed by signal 6 (SIGABRT) after step 4" in ending.reason


def test_classify_names_the_killed_rank_and_not_its_peer() -> None:
    ending = classify(EndEvidence(2, ends={0: ("failed", GLOO_LOST)}, exit_codes={0: 1, 1: -9}, steps={0: 7, 1: 7}))
    assert ending.status == "failed"
    assert ending.reason == (
        "rank 1 was killed by signal 9 (SIGKILL) after step 7: if nobody stopped it, the machine ran out of memory."
    )


def test_classify_blames_memory_only_where_nothing_else_is_known() -> None:
    killed = EndEvidence(1, exit_codes={0: -9}, steps={0: 7})
    assert "ran out of memory" in classify(killed).reason
    assert classify(replace(killed, kernel_oom=True)).status == "oom"
    counted = classify(replace(killed, kernel_oom=False))
    assert counted.status == "failed" and counted.reason.endswith(
        "(SIGKILL) after step 7: somebody stopped it, or a limit of the machine did; the kernel killed nothing for "
        "memory."
    )
    limited = classify(replace(killed, kernel_oom=False, cpu_limit_s=60.0)).reason
    assert "it had used the 60.0 s of processor time that it may use (ulimit -t)" in limited


def test_a_full_disk_is_part_of_the_reason() -> None:
    full = EndEvidence(1, exit_codes={0: 1}, steps={0: 7}, disk_problem="No space left on device")
    assert classify(full).reason.endswith(
        "; nothing more can be written into the folder of the run: No space left on device."
    )
    lost = classify(replace(full, exit_codes={}, launcher="vanished")).reason
    assert lost.startswith("the launcher could not write the record of the run, after step 7: No space left")


def test_classify_blames_no_peer_that_aborts_because_of_the_loss() -> None:
    ends = {0: ("failed", GLOO_LOST)}
    killed = classify(EndEvidence(2, ends=ends, exit_codes={0: -6, 1: -9}, steps={0: 3, 1: 3}))  # type: ignore[arg-type]
    assert killed.reason.startswith("rank 1 was killed by signal 9")
    raised = classify(EndEvidence(2, ends=ends, exit_codes={0: -6, 1: 1}, log_tails={1: "ValueError: no"}))  # type: ignore[arg-type]
    assert raised.reason == "rank 1 ended with exit code 1 before its first step was finished: ValueError: no"
    alone = classify(EndEvidence(2, exit_codes={0: -6}, log_tails={0: GLOO_LOST}))
    assert "rank 0 was killed by signal 6" in alone.reason


def test_classify_blames_no_peer_that_the_launcher_stops() -> None:
    """It sends SIGTERM to the peers of a rank that failed, whichever comes first."""
    failed = classify(EndEvidence(2, exit_codes={0: -15, 1: 3}, steps={0: 2, 1: 2}, log_tails={1: "ValueError: no"}))
    assert failed.status == "failed"
    assert failed.reason == "rank 1 ended with exit code 3 after step 2: ValueError: no"
    crashed = classify(EndEvidence(2, exit_codes={0: -15, 1: -11}, steps={0: 2, 1: 2}))
    assert crashed.reason == "rank 1 was killed by signal 11 (SIGSEGV) after step 2."
    alone = classify(EndEvidence(2, exit_codes={0: -15}, steps={0: 2}))
    assert alone.reason == "rank 0 was killed by signal 15 (SIGTERM) after step 2."


def test_classify_tells_a_crash_with_its_last_words() -> None:
    log = "Fatal Python error: Segmentation fault\n\nCurrent thread:\n  File x\n\nExtension modules: numpy, torch\n"
    ending = classify(EndEvidence(1, exit_codes={0: -11}, steps={0: 2}, log_tails={0: log}))
    assert ending.reason == (
        "rank 0 was killed by signal 11 (SIGSEGV) after step 2: Fatal Python error: Segmentation fault"
    )


def test_classify_calls_a_kill_by_the_kernel_for_memory_oom() -> None:
    crashed = EndEvidence(2, exit_codes={0: -11}, torch_debug="DETAIL")
    assert "(SIGSEGV) before its first step was finished: TORCH" in classify(crashed).reason
    assert classify(crashed).reason.endswith("=DETAIL is set, with which some versions of torch crash: run it without.")
    assert "TORCH" not in classify(replace(crashed, torch_debug="")).reason
    of_job = EndEvidence(2, exit_codes={1: -9}, kernel_oom=True, memory_of="the SLURM job 12")
    assert classify(of_job).reason.endswith("because the SLURM job 12 ran out of memory.")
    ending = classify(EndEvidence(2, exit_codes={1: -9}, steps={1: 7}, kernel_oom=True))
    assert ending.status == "oom"
    assert "rank 1" in ending.reason and "out of memory" in ending.reason


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_classify_calls_a_log_that_ends_with_an_allocation_failure_oom(said: str) -> None:
    ending = classify(EndEvidence(2, exit_codes={0: 1}, log_tails={0: f"Traceback\n{said}\n"}))
    assert ending.status == "oom"
    assert said in ending.reason


def test_classify_prefers_the_oom_that_a_worker_tells_to_its_peers() -> None:
    ends = {0: ("cancelled", "stopped by SIGTERM"), 1: ("oom", "the activations did not fit")}
    ending = classify(EndEvidence(2, ends=ends, exit_codes={0: 1, 1: 1}))  # type: ignore[arg-type]
    assert (ending.status, ending.reason) == ("oom", "rank 1: the activations did not fit")


def test_classify_prefers_a_cause_in_words_to_lost_peers() -> None:
    ends = {0: ("failed", GLOO_LOST), 1: ("failed", "ValueError: the batch is empty")}
    assert classify(EndEvidence(2, ends=ends)).reason == "rank 1: ValueError: the batch is empty"  # type: ignore[arg-type]


def test_classify_still_tells_lost_peers_alone() -> None:
    ending = classify(EndEvidence(2, ends={0: ("failed", GLOO_LOST)}, exit_codes={0: 1}))
    assert ending.status == "failed" and "Connection closed by peer" in ending.reason


def test_classify_tells_the_last_line_of_the_log_of_a_rank_that_told_nothing() -> None:
    ending = classify(EndEvidence(1, exit_codes={0: 1}, log_tails={0: "Traceback …\nImportError: no module x\n\n"}))
    assert ending.reason == "rank 0 ended with exit code 1 before its first step was finished: ImportError: no module x"


def test_classify_says_a_taken_port_in_plain_words() -> None:
    log = "torch.distributed.DistNetworkError: EADDRINUSE, message: address already in use"
    ending = classify(EndEvidence(1, exit_codes={0: 1}, log_tails={0: log}))
    assert ending.status == "failed" and "port" in ending.reason and "run it again" in ending.reason


@pytest.mark.parametrize("cause", ["cancelled", "timeout"])
def test_classify_tells_what_the_launcher_stopped(cause: str) -> None:
    evidence = EndEvidence(
        2,
        stopped_by=cause,
        ends={0: ("failed", GLOO_LOST)},
        steps={0: 3, 1: 2},  # type: ignore[arg-type]
        time_limit_s=90,
    )
    ending = classify(evidence)
    assert ending.status == cause
    assert "after step 3" in ending.reason


def test_classify_is_not_changed_by_a_request_that_comes_after_the_end() -> None:
    ends = {0: ("completed", ""), 1: ("completed", "")}
    assert classify(EndEvidence(2, stopped_by="cancelled", ends=ends)).status == "completed"  # type: ignore[arg-type]


def test_classify_tells_a_launcher_that_vanished_or_failed() -> None:
    assert "the launcher vanished after step 2" in classify(EndEvidence(2, steps={0: 2}, launcher="vanished")).reason
    assert "OSError: no" in classify(EndEvidence(2, launcher="OSError: no")).reason


def test_classify_calls_it_a_failure_where_nothing_is_known_at_all() -> None:
    assert classify(EndEvidence(3)).status == "failed"


def test_the_end_of_an_earlier_start_is_none_of_this_one() -> None:
    end = {"event": "end", "status": "failed", "reason": "rank 1 was killed"}
    assert end_of([end]) == ("failed", "rank 1 was killed")
    for started in ("start", "started"):  # a rank's word, and a job's
        assert end_of([end, {"event": started}]) is None


def test_end_of_an_event_with_an_unknown_status_is_none() -> None:
    assert end_of([{"event": "end", "status": "splendid"}]) is None
    assert end_of([{"event": "end", "status": "oom", "reason": "a\x1bb"}]) == ("oom", "a\\x1bb")


SCRIPT = EndEvidence(1, steps={0: 5}, script="train.py")


def test_classify_calls_a_silent_script_completed_where_its_exit_code_is_known() -> None:
    """It may end by `os._exit(0)`; a launcher writes no end either."""
    assert classify(SCRIPT).status == "completed"
    assert classify(replace(SCRIPT, launcher="vanished")).status == "failed"
    assert classify(replace(SCRIPT, exit_codes={0: 3})).reason == "rank 0 ended with exit code 3 after step 5"
    assert classify(replace(SCRIPT, steps={0: 0})).status == "failed"


def test_classify_calls_a_stopped_script_cancelled_however_it_ends() -> None:
    stopped = replace(SCRIPT, stopped_by="cancelled", ends={0: ("completed", "")})
    assert classify(stopped).status == "cancelled"
    assert classify(replace(stopped, script="")).status == "completed"
    told = replace(SCRIPT, launcher="vanished", ends={0: ("cancelled", "the run was interrupted after step 5.")})
    assert classify(told).reason == "the run was interrupted after step 5."


def test_classify_tells_that_a_script_that_trained_nothing_was_not_measured() -> None:
    untrained = EndEvidence(1, ends={0: ("completed", "")}, script="train.py", untrained="rank 0: nothing was measured")
    assert classify(untrained).status == "failed" and classify(untrained).reason == "rank 0: nothing was measured"


def test_classify_names_the_child_that_failed_and_not_the_process_that_started_it() -> None:
    failed = replace(
        SCRIPT,
        ends={0: ("failed", "rank 0: ProcessRaisedException: …")},
        exit_codes={0: 1},
        children={0: ("failed", GLOO_LOST), 1: ("failed", "rank 1: ValueError: bad")},
    )
    assert classify(failed).reason == "rank 1: ValueError: bad"
    handled = replace(SCRIPT, ends={0: ("completed", "")}, children={0: ("failed", "rank 0: ValueError: bad")})
    assert classify(handled).status == "completed"
    diverged = replace(SCRIPT, children={0: ("diverged", "the loss became nan at step 3; the script went on.")})
    assert classify(diverged).status == "diverged"
