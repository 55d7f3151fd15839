"""Kernels and host are measured apart: every case can be called, both times are told, a machine's file takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlojz.cost_model import measuring_kernels
from dlojz.cost_model.measured_machine import Setup
from dlojz.cost_model.measuring import Timed
from dlojz.cost_model.measuring_kernels import KernelCase, both_s, cases, measure_kernels

CPU = torch.device("cpu")
NEEDED = (
    Timed("product", (8, 8, 8, 1), 1.0, ""), Timed("pass", (8,), 1.0, ""), Timed("launch", (), 1.0, ""),
    Timed("update", (8, 8), 1.0, ""),
)  # fmt: skip


def test_some_cases_are_timed_forward_and_backward_and_a_file_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [one for one in cases(CPU, small=True) if one.precision == "fp32" and one.num_bytes < 3e5]
    assert {one.label for one in few} >= {"add", "cast", "view"}
    monkeypatch.setattr(measuring_kernels, "cases", lambda device, small: iter(few))
    monkeypatch.setattr(measuring_kernels, "UPDATES", ((2, 8),))
    monkeypatch.setattr(measuring_kernels, "BLOCKS", 1)
    found = measure_kernels(CPU, small=True, rounds=1)
    told = {(one.what, one.label) for one in found}
    wanted = ("gelu", "gelu, backward", "add", "update: adamw, one by one")
    assert {(what, label) for what in ("kernel", "host") for label in wanted} <= told
    assert ("kernel", "add, backward") not in told
    assert {one.label for one in found if one.what == "level"} == {"none", "selective", "every_second", "full"}
    assert len(Setup(ranks=1, timings=(*NEEDED, *found)).timings) == len(NEEDED) + len(found)


def test_a_case_that_this_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*leaves: Any) -> Any:
        raise RuntimeError("no kernel")

    one = KernelCase("new", (8,), "fp32", 8.0, lambda: ((torch.ones(8),), lacking))
    monkeypatch.setattr(measuring_kernels, "cases", lambda device, small: iter([one]))
    for name in ("_updates", "_levels"):
        monkeypatch.setattr(measuring_kernels, name, lambda *given: iter(()))
    sustained = measuring_kernels._sustained(CPU, small=True)
    monkeypatch.setattr(measuring_kernels, "_sustained", lambda *given: sustained)
    assert measure_kernels(CPU, rounds=1) == [sustained]


def test_both_s_lets_the_gpu_sleep_while_its_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock counts from after the sleep: here 3 ms; the launches themselves take next to nothing."""
    done: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    kernels_s, host_s = both_s(lambda: done.append("call"), torch.device("cuda"), rounds=1)
    assert kernels_s == pytest.approx(3e-3) and host_s < 3e-3
    assert done == ["call", "call", "sleep", "event", "call", "event"]
