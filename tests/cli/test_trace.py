"""`dlojz trace`: who waits for whom in a folder of traces, in text, JSON and pictures, in both languages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import main
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import simulate
from tests.profiled import event, stream_times, stream_traces, timeline_traces, with_messages, write_trace
from tests.results.test_memory_snapshot import step as snapshot
from tests.results.test_memory_snapshot import written
from tests.results.test_rank_profile import gpu_steps

PNG = b"\x89PNG\r\n\x1a\n"
COSTS = Costs(forward=(1.0, 1.0, 3.0, 1.0), backward=(2.0, 2.0, 6.0, 2.0), latency=0.1)


def replicas(folder: Path, late: tuple[int, ...] = (1,)) -> Path:
    """Two ranks that compute and reduce; one comes 3 ms late to each collective."""
    for rank in range(2):
        events = []
        for step, late_rank in enumerate(late):
            at = 1.0 + 0.02 * step
            come = at + (0.013 if rank == late_rank else 0.010)
            events.append(event("cpu_op", "aten::mm", at, come))
            events.append(event("user_annotation", "gloo:all_reduce", come, at + 0.015, 101))
        write_trace(folder / f"rank{rank}.json", rank, events, 4)
    return folder


def _json(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["trace", *words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_main_trace_tells_draws_and_documents_a_pipeline(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = timeline_traces(tmp_path / "traces", simulate(build("1f1b", 4, 8), COSTS), shifts_s=(0, 9, 0, -4))
    assert main(["trace", str(folder), "--png", str(tmp_path / "step.png")]) == 0
    printed = capfd.readouterr().out
    assert "4 ranks; their clocks differed by up to 9.00 s and were aligned" in printed
    assert "Schedule: 1F1B (DAPPLE, PipeDream-Flush), 1f1b" in printed and "Bubble of each rank" in printed
    assert "Stage 2 on rank 2 is the slowest" in printed and "for the message of" in printed
    assert (tmp_path / "step.png").read_bytes().startswith(PNG)
    use_language("fr")
    assert main(["trace", str(folder)]) == 0
    french = capfd.readouterr().out
    assert "L’étage 2, sur le rang 2, est le plus lent" in french and "attend" in french and "Schedule" not in french
    use_language("en")
    told = _json(capfd, str(folder))
    (pipeline,) = told["pipelines"]
    assert pipeline["schedules"][0] == "1f1b" and pipeline["slow_stage"]["rank"] == 2
    assert pipeline["measured_s"] == pytest.approx(pipeline["simulated_s"], rel=0.05)
    assert [clock["shift_s"] for clock in told["clocks"]] == pytest.approx([0, -9, 0, 4], abs=1e-3)


def test_main_trace_tells_head_of_line_blocking_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    orders = with_messages(build("interleaved", 4, 8))
    times = stream_times(orders, {"F": 2e-3, "B": 4e-3}, 0.1e-3)
    folder = stream_traces(tmp_path, times)
    assert main(["trace", str(folder)]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert re.search(
        r"Head-of-line blocking on rank 0: 4RECV_F\d waits 6.20 ms for rank 3, .*; behind it 4SEND_F0", printed
    )
    assert "rank 1 idles" in printed and ": post this receive just before the action that needs it" in printed


def test_main_trace_tells_and_draws_a_late_replica(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = replicas(tmp_path)
    assert main(["trace", str(folder), "--png", str(tmp_path / "a.png")]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "Straggler: rank 1 comes last to 1 of 1 collectives, 3.00 ms after" in printed
    assert "all_reduce 1 3.50 ms 3.50 ms (100%)" in printed
    assert "Not given: the traces of ranks 2, 3 of 4" in printed and "Schedule" not in printed
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    told = _json(capfd, str(folder))
    (all_reduce,) = told["communication"]
    assert all_reduce["kind"] == "all_reduce" and all_reduce["exposed_s"] == pytest.approx(3.5e-3, abs=1e-6)
    assert told["stragglers"][0]["rank"] == 1 and told["pipelines"] == []


def test_main_trace_finds_no_straggler_in_ranks_that_come_late_by_turns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = replicas(tmp_path, (0, 1, 1, 0))
    for language, told in (("en", "No straggler: the ranks come late to the 4"), ("fr", "tour à tour aux 4")):
        use_language(language)
        assert main(["trace", str(folder)]) == 0
        assert told in " ".join(capfd.readouterr().out.split())


def test_main_trace_tells_one_rank_and_what_is_unknown_from_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write_trace(tmp_path / "a.json", 3, gpu_steps(), 8))
    assert main(["trace", path, "--png", str(tmp_path / "a.png")]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "Rank 3 of 8: 2 steps (ProfilerStep) in 20.0 ms" in printed
    assert "Launch-bound: yes, the device waits for the CPU. 40.0% of the time" in printed
    assert "communication exposed 4.00 ms (20%) 2.00 ms" in printed and "products 2 4.00 ms (31%) 2.00 ms" in printed
    assert "Unknown from one rank: who comes late" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    document = _json(capfd, path)
    (rank,) = document["ranks"]
    assert rank["waited_s"] is document["stragglers"] is None and rank["idle_s"] == pytest.approx(8e-3)
    assert document["launching"]["bound"] is True and document["kinds"][0]["kind"] == "communication"
    use_language("fr")
    assert main(["trace", path]) == 0
    assert "Limité par les lancements : oui, l’accélérateur attend le CPU. 40,0 %" in capfd.readouterr().out


def test_main_trace_of_a_cpu_says_what_launch_bound_would_need(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real profile of torch on the CPU: two updates are two steps, and there is no device."""
    from torch import nn, optim, rand
    from torch.profiler import profile

    model = nn.Linear(8, 8)
    update = optim.SGD(model.parameters(), lr=0.1)
    with profile() as traced:
        for _ in range(2):
            model(rand(4, 8)).sum().backward()
            update.step()
    traced.export_chrome_trace(str(tmp_path / "a.json"))
    assert main(["trace", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    printed = " ".join(capfd.readouterr().out.split())
    assert "A rank that the trace does not name (CPU): 2 steps (Optimizer.step)" in printed
    assert "Launch-bound: does not apply, as no kernel of a device is in the trace; where" in printed
    calls = {row["name"]: row["calls"] for row in _json(capfd, str(tmp_path / "a.json"))["kernels"]}
    assert calls["aten::addmm"] == 2


def test_main_trace_against_names_the_slower_kernel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "a.json", 3, gpu_steps(), 8)
    write_trace(tmp_path / "b.json", 3, gpu_steps(3, 3.0, 11.0), 8)
    words = [str(tmp_path / "a.json"), "--against", str(tmp_path / "b.json")]
    assert main(["trace", *words, "--png", str(tmp_path / "a.png")]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "A step takes 11.0 ms in b.json (3 steps), 10.0 ms in a.json (2 steps): +1.00 ms (+10.0%)" in printed
    assert "sm90_xmma_gemm_bf16 (+1.00 ms): mainly the time of each call (calls: 1; each 2.00 ms → 3.00 ms)" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    document = _json(capfd, *words)
    assert document["per_step"] and document["kinds"][0]["name"] == "product"
    use_language("fr")
    assert main(["trace", *words]) == 0
    assert "Un pas dure 11,0 ms dans b.json (3 pas)" in capfd.readouterr().out


def test_main_trace_tells_memory_snapshots_by_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = written(tmp_path / "a.pickle", snapshot()), written(tmp_path / "b.pickle", snapshot(9 * 2**20))
    assert main(["trace", str(first), "--png", str(tmp_path / "a.png")]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "peak of 26.0 MiB in use after 3 of 8 entries of the record, with 38.0 MiB reserved" in printed
    assert "run/model.py:14 forward 5.00 MiB 19% 1" in printed and "(before the record began) 6.00 MiB" in printed
    assert "Fragmentation: 20.0 MiB (52.6% of the reserved memory)" in printed and "Memory ran out: 64.0 MiB" in printed
    assert _json(capfd, str(first))["peak_bytes"] == 26 * 2**20 - 1024
    words = [str(first), "--against", str(second)]
    assert main(["trace", *words, "--png", str(tmp_path / "b.png")]) == 0
    assert "The largest difference: run/model.py:14 forward, +4.00 MiB (1 → 1 blocks)" in capfd.readouterr().out
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("a.png", "b.png"))
    assert _json(capfd, *words)["lines"][0]["difference_bytes"] == 4 * 2**20
    use_language("fr")
    assert main(["trace", *words]) == 0
    assert "L’écart le plus grand : run/model.py:14 forward, +4,00 Mio" in capfd.readouterr().out


def test_main_trace_help_shows_the_lines_that_write_traces(capfd: pytest.CaptureFixture[str]) -> None:
    for language in ("en", "fr"):
        use_language(language)
        assert main(["trace", "--help"]) == 0
        code = [line for line in capfd.readouterr().out.splitlines() if line.startswith("    ")]
        assert len(code) == 5 and compile("\n".join(line[4:] for line in code), "help", "exec")
        assert "profile() as traced" in code[1] and "export_chrome_trace" in code[-1]


@pytest.mark.parametrize(
    "key, value",
    [
        ("ts", -1),
        ("ts", -5.3e9),
        ("ts", 0),
        ("ts", 1e16),
        ("dur", 1e15),
    ],
)
@pytest.mark.parametrize("which", [0, -1])
def test_main_trace_names_an_impossible_time(
    key: str, value: Any, which: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One event of twenty, hours away from the others: its times would be those of the whole profile."""
    folder = replicas(tmp_path, late=(1,) * 10)
    path = folder / "rank1.json"
    content = json.loads(path.read_text())
    for one in content["traceEvents"]:
        if one.get("ph") == "X":
            one["ts"] += 3.6e9  # µs: an hour after what the clock counts from
    timed = [one for one in content["traceEvents"] if one.get("ph") == "X"]
    timed[which][key] = value
    path.write_text(json.dumps(content))
    assert main(["trace", str(folder)]) == 2
    printed = capsys.readouterr()
    assert "rank1.json has an impossible time: " in printed.err and timed[which]["name"] in printed.err
    assert printed.out == "" and len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    "words, told",
    [
        ("", "(traces of all ranks, or their folder; one trace, or one memory snapshot), but nothing"),
        ("nowhere", "there is no file nowhere"),
        ("rank0.json --against nowhere", "there is no file nowhere"),
        ("rank0.json rank1.json --against rank0.json", "compares one trace with one, but 2 and 1 were received"),
        ("rank0.json --against step.pickle", "memory snapshots are read alone, or one --against one"),
        ("step.pickle step.pickle", "memory snapshots are read alone, or one --against one"),
        ("step.pickle", "step.pickle is no whole pickle"),
        ("rank0.json rank0.json", "rank 0 has two traces"),
        ("rank0.json cut.json", "cut.json is cut off after"),
        ("rank0.json odd\x1b[31m<b>.json", "odd\\u001b[31m<b>.json is no Chrome trace"),
        ("rank0.json rank1.json --png x.txt", "--png needs a name that ends in"),
    ],
)
def test_main_trace_refuses_in_one_sentence(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(replicas(tmp_path))
    (tmp_path / "odd\x1b[31m<b>.json").write_text("hello")
    (tmp_path / "step.pickle").write_bytes(b"")
    (tmp_path / "cut.json").write_bytes((tmp_path / "rank1.json").read_bytes()[:-40])
    assert main(["trace", *words.split()]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.out == "" and len(printed.err.strip().splitlines()) == 1
    use_language("fr")
    assert main(["trace", *words.split()]) == 2
    assert capsys.readouterr().err != printed.err
