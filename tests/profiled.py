"""Traces as torch.profiler writes them, made from simulated timelines: on a CPU with gloo, on a GPU with NCCL."""

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import Timeline
from dlojz.results.rank_activities import OF_BACKWARD

BASE_NS = 1790857026000000000
HOST_THREAD, COMPUTE_STREAM, NCCL_STREAM = 100, 7, 20
Event = dict[str, Any]


def event(category: str, name: str, start_s: float, end_s: float, lane: int = HOST_THREAD, **args: Any) -> Event:
    """One complete event, in microseconds."""
    times = {"ts": round(start_s * 1e6, 3), "dur": round((end_s - start_s) * 1e6, 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": 4242, "tid": lane, **times, "args": args}


def write_trace(
    path: Path, rank: int, events: Iterable[Event], ranks: int, *, shift_s: float = 0.0, host: str = "node0"
) -> Path:
    """Write one rank's trace; its clock is ahead of the true time by `shift_s`."""
    shifted = [{**one, "ts": one["ts"] + shift_s * 1e6} for one in events]
    head = {"backend": "gloo", "rank": rank, "world_size": ranks}
    trace = {
        "schemaVersion": 1,
        "distributedInfo": head,
        "host_name": host,
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 4242, "args": {"name": "python"}}, *shifted],
        "traceName": path.name,
    }
    text = json.dumps(trace, indent=1)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def timeline_traces(
    folder: Path, timeline: Timeline, *, shifts_s: Sequence[float] = (), steps: int = 1, unit_s: float = 1e-3
) -> Path:
    """Write what each profiler would see of a simulated timeline, on a CPU; a wait is part of an action's mark."""
    schedule = timeline.schedule
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(schedule.ranks):
        events = []
        for step in range(steps):
            free = origin = 10.0 + step * (timeline.makespan + 5) * unit_s
            part = timeline.of_rank(rank)
            for number in range(part.start, part.stop):
                start, end = (origin + float(side[number]) * unit_s for side in (timeline.starts, timeline.ends))
                events.append(event("user_annotation", f"PP:{schedule.actions[number]}", min(free, start), end))
                if start > free:
                    events.append(event("user_annotation", "gloo:recv", free, start))
                if end > start:
                    events.append(event("cpu_op", "aten::mm", start, end))
                free = end
        shift = shifts_s[rank] if shifts_s else 0.0
        write_trace(folder / f"rank{rank}.json.gz", rank, events, schedule.ranks, shift_s=shift)
    return folder


def with_messages(schedule: Schedule) -> dict[int, list[str]]:
    """Actions with their sends and receives, much as torch's runtime orders them: a receive stands where its sender is.

    Source: `torch/distributed/pipelining/schedules.py` (2.13), `_add_send_recv`.
    """
    orders: dict[int, list[str]] = {rank: [] for rank in range(schedule.ranks)}
    position = [0] * schedule.ranks
    done: set[tuple[bool, int, int]] = set()
    while any(at < len(order) for at, order in zip(position, schedule.orders, strict=True)):
        for rank, order in enumerate(schedule.orders):
            if position[rank] == len(order):
                continue
            action = order[position[rank]]
            forward, stage, number = action.kind == "F", action.stage, action.micro_batch
            first = stage == (0 if forward else schedule.stages - 1)
            if not first and (forward, stage - 1 if forward else stage + 1, number) not in done:
                continue
            position[rank] += 1
            done.add((forward, stage, number))
            orders[rank].append(str(action))
            behind = stage + 1 if forward else stage - 1
            if 0 <= behind < schedule.stages and schedule.placement[0][behind] != rank:
                orders[rank].append(f"{stage}SEND_{'F' if forward else 'B'}{number}")
                orders[schedule.placement[0][behind]].append(f"{behind}RECV_{'F' if forward else 'B'}{number}")
    return orders


def numbered_traces(folder: Path, timeline: Timeline, *, on_device: bool = False, unit_s: float = 1e-3) -> Path:
    """Write what each profiler sees of torch's 1F1B, which marks nothing: operators with autograd's numbers, messages.

    With gloo the operators last as long as they compute. With NCCL the host runs ahead, and kernels compute and
    communicate: synthetic, built to the format that `libkineto/src/output_json.cpp` and PyTorch's `saveNcclMeta`
    (`torch/csrc/profiler/util.cpp`) write, never recorded on a GPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(timeline.schedule.ranks):
        written = NumberedRank(rank, timeline.schedule.ranks, on_device)
        part = timeline.of_rank(rank)
        for number in range(part.start, part.stop):
            action = timeline.schedule.actions[number]
            start, end = (1.0 + unit_s * float(side[number]) for side in (timeline.starts, timeline.ends))
            forward = action.kind == "F"
            before, behind = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
            written.message("recv", before, start)
            written.computed(forward, action.micro_batch, start, end - 10e-6)
            written.message("send", behind, end - 9e-6)
        write_trace(folder / f"rank{rank}.json", rank, written.events, timeline.schedule.ranks)
    return folder


class NumberedRank:
    """Events of one rank, in which the host is busy from `host_s` on."""

    def __init__(self, rank: int, ranks: int, on_device: bool = False) -> None:
        self.rank, self.ranks, self.on_device = rank, ranks, on_device
        self.events: list[Event] = []
        self.numbers: dict[int, int] = {}
        self.next_number, self.correlation, self.free_s, self.host_s = 100, 1000, 1.0, 0.5

    def operator(self, name: str, start: float, end: float, number: int = -1, *, node: bool = False) -> None:
        """One operator; on a device it launches one kernel."""
        args: dict[str, Any] = {"Sequence number": number, "Fwd thread id": int(node)} if number >= 0 else {}
        lane = HOST_THREAD + 1 if node and self.on_device else HOST_THREAD
        if not self.on_device:
            self.events.append(event("cpu_op", name, start, end, lane, **args))
            return
        self.events.append(event("cpu_op", name, self.host_s, self.host_s + 8e-6, lane, **args))
        self.launch("sm90_xmma_gemm_f32f32", start, end, COMPUTE_STREAM, lane)

    def launch(self, kernel: str, start: float, end: float, stream: int, lane: int = HOST_THREAD, **args: Any) -> None:
        """One kernel and the call that launches it."""
        self.correlation += 1
        told = {"device": 0, "stream": stream, "correlation": self.correlation, **args}
        call = ("cuda_runtime", "cudaLaunchKernel") if stream == COMPUTE_STREAM else ("cuda_driver", "cuLaunchKernelEx")
        self.events.append(event(*call, self.host_s + 2e-6, self.host_s + 4e-6, lane, correlation=self.correlation))
        self.events.append(event("kernel", kernel, start, end, stream, **told))
        self.host_s += 10e-6

    def computed(self, forward: bool, micro_batch: int, start: float, end: float) -> None:
        """The operators of a forward, or those of a backward."""
        if forward:
            number = self.numbers[micro_batch] = self.next_number
            self.next_number += 2
            self.operator("aten::linear", start, (start + end) / 2, number)
            self.operator("aten::relu", (start + end) / 2 + 1e-6, end, number + 1)
        else:
            number, third = self.numbers[micro_batch], (end - start) / 3
            self.operator(f"{OF_BACKWARD}: ReluBackward0", start, start + third, number + 1, node=True)
            self.operator(f"{OF_BACKWARD}: AddmmBackward0", start + third + 1e-6, start + 2 * third, number, node=True)
            self.operator(f"{OF_BACKWARD}: torch::autograd::AccumulateGrad", start + 2 * third + 1e-6, end, node=True)
        self.free_s = end

    def message(self, kind: str, other: int, moment: float) -> None:
        """A receive that has arrived, or a send that is posted, at a moment."""
        if not 0 <= other < self.ranks:
            return
        posted = moment - 8e-6 if kind == "recv" else moment
        post_s = self.host_s if self.on_device else posted
        name = "c10d::recv_" if kind == "recv" else "c10d::send"
        number = {"Sequence number": self.next_number, "Fwd thread id": 0}  # the next operator's
        self.events.append(event("cpu_op", name, post_s, post_s + 1e-6, **number))
        if self.on_device:
            start, end = (self.free_s, moment - 2e-6) if kind == "recv" else (moment, moment + 8e-6)
            args: dict[str, Any] = {
                "Collective name": kind,
                "In msg nelems": 65536,
                "Out msg nelems": 65536,
                "Group size": 2,
                "dtype": "Float",
                "Process Group Name": "0",
                "Process Group Description": "default_pg",
                "Process Group Ranks": str(list(range(self.ranks))),
                "Rank": self.rank,
                "Src Rank" if kind == "recv" else "Dst Rank": other,
            }
            self.events.append(event("cpu_op", "record_param_comms", post_s + 1e-6, post_s + 6e-6, **args))
            kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
            self.launch(kernel, min(start, end - 1e-6), end, NCCL_STREAM, **args)


_COMMUNICATES = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")
_COMPUTES = re.compile(r"(\d+)([FBIW])(\d+)")


def stream_times(
    orders: Mapping[int, Sequence[str]], seconds: Mapping[str, float], transfer_s: float
) -> list[dict[str, tuple[float, float]]]:
    """Start and end of each action and each message, per rank, as NCCL runs them.

    A rank has one stream for computing and one for messages; each passes its work in the order in which it is listed. A
    message begins when its rank has computed what is listed before it, and ends `transfer_s` after both have begun.
    """
    times: list[dict[str, tuple[float, float]]] = [{} for _ in orders]
    begun: list[dict[str, float]] = [{} for _ in orders]
    queues = [[name for name in orders[rank] if _COMMUNICATES.fullmatch(name)] for rank in range(len(orders))]
    programs = [[name for name in orders[rank] if _COMPUTES.fullmatch(name)] for rank in range(len(orders))]
    before = [
        {
            name: [one for one in orders[rank][:place] if _COMPUTES.fullmatch(one)][-1:]
            for place, name in enumerate(orders[rank])
        }
        for rank in range(len(orders))
    ]
    computed, passed = [0] * len(orders), [0] * len(orders)
    free, clear = [0.0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank in range(len(orders)):
            if computed[rank] < len(programs[rank]):
                name = programs[rank][computed[rank]]
                stage, kind, number = _COMPUTES.fullmatch(name).groups()  # type: ignore[union-attr]
                needed = f"{stage}RECV_{'F' if kind == 'F' else 'B'}{number}"
                if kind == "W" or needed not in queues[rank] or needed in times[rank]:
                    start = max(free[rank], times[rank].get(needed, (0.0, 0.0))[1])
                    free[rank] = start + seconds[kind]
                    times[rank][name] = (start, free[rank])
                    computed[rank] += 1
                    moved = True
            if passed[rank] < len(queues[rank]):
                name = queues[rank][passed[rank]]
                if name not in begun[rank] and all(one in times[rank] for one in before[rank][name]):
                    made = max((times[rank][one][1] for one in before[rank][name]), default=0.0)
                    begun[rank][name] = max(clear[rank], made)
                    moved = True
                other = _other_side(name)
                peer = next(number for number, queue in enumerate(queues) if other in queue)
                if name in begun[rank] and other in begun[peer]:
                    end = max(begun[rank][name], begun[peer][other]) + transfer_s
                    for one, what in ((rank, name), (peer, other)):
                        times[one][what] = (begun[one][what], end)
                        clear[one] = end
                        passed[one] += 1
                    moved = True
    assert computed == [len(program) for program in programs], "the order deadlocks"
    return times


def _other_side(name: str) -> str:
    stage, side, direction, number = _COMMUNICATES.fullmatch(name).groups()  # type: ignore[union-attr]
    towards = 1 if (direction == "F") == (side == "SEND") else -1
    return f"{int(stage) + towards}{'RECV' if side == 'SEND' else 'SEND'}_{direction}{number}"


def stream_traces(
    folder: Path, times: Sequence[Mapping[str, tuple[float, float]]], *, shifts_s: Sequence[float] = ()
) -> Path:
    """Write what each rank's profiler would see of `stream_times`, on a GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, of_rank in enumerate(times):
        events = []
        for name, (start, end) in of_rank.items():
            sends = _COMMUNICATES.fullmatch(name)
            lane = NCCL_STREAM if sends else COMPUTE_STREAM
            kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)" if sends else "sm90_xmma_gemm"
            more = {"Collective name": sends[2].lower()} if sends else {}
            events.append(event("user_annotation", f"PP:{name}", 0.001, 0.001001))
            events.append(event("gpu_user_annotation", f"PP:{name}", 1 + start, 1 + end, lane))
            events.append(event("kernel", kernel, 1 + start, 1 + end, lane, **more))
        shift = shifts_s[rank] if shifts_s else 0.0
        write_trace(folder / f"rank{rank}.json", rank, events, len(times), shift_s=shift)
    return folder
