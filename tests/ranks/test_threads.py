"""Ranks that are threads of one process give what ranks that are processes give, and 64 of them are no matter."""

from collections.abc import Iterator

import pytest

from dlojz.base.language import use_language
from dlojz.ranks.live import Ranks
from dlojz.ranks.magic import parse
from dlojz.ranks.rank_setup import RanksRefused
from dlojz.ranks.show import CellAnswer, RanksError

SIZE = 4
MANY = 64
# Each cell, and why it is here; what it prints must be the same on processes.
CELLS = {
    "collectives": """
x = torch.arange(4.0) + 10 * rank
for op in ("SUM", "MAX", "MIN", "PRODUCT"):
    y = x.clone(); dist.all_reduce(y, op=getattr(dist.ReduceOp, op)); print(op, y.tolist())
y = x.clone(); dist.broadcast(y, src=2); print(y.tolist())
y = x.clone(); dist.reduce(y, dst=1); print(y.tolist() if rank == 1 else "")
parts = [torch.zeros(4) for _ in range(world_size)]; dist.all_gather(parts, x); print(torch.stack(parts).tolist())
out = torch.zeros(16); dist.all_gather_into_tensor(out, x); print(out.tolist())
part = torch.zeros(1); dist.reduce_scatter(part, list(x.chunk(4))); print(part.item())
part = torch.zeros(1); dist.reduce_scatter_tensor(part, x); print(part.item())
got = torch.zeros(4); dist.scatter(got, [x + i for i in range(4)] if rank == 3 else None, src=3); print(got.tolist())
kept = [torch.zeros(4) for _ in range(4)] if rank == 0 else None; dist.gather(x, kept); print(kept)
rows = torch.zeros(4); dist.all_to_all_single(rows, x); print(rows.tolist())
sent = [1, 0, 2, 1]; sizes = [sent[rank]] * 4; rows = torch.zeros(4)
dist.all_to_all_single(rows, x[:1].repeat(4 * sent[rank]), output_split_sizes=sent, input_split_sizes=sizes)
print(rows.tolist())
""",
    "objects and groups": """
objects = [None] * world_size; dist.all_gather_object(objects, {"rank": rank}); print(objects)
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
x = torch.ones(1) * rank; dist.all_reduce(x, group=pair); print(x.item(), dist.get_rank(pair))
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = torch.ones(1) * rank; dist.all_reduce(x, group=mesh["dp"].get_group()); print(x.item())
""",
    "messages": """
right, left = (rank + 1) % world_size, (rank - 1) % world_size
x, y = torch.ones(3) * rank, torch.zeros(3)
work = dist.isend(x, right); dist.recv(y, left); work.wait(); print(y.tolist())
works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, left), dist.P2POp(dist.irecv, y, right)])
[work.wait() for work in works]; print(y.tolist())
work = dist.all_reduce(x, async_op=True)
while not work.is_completed():
    pass
print(x.tolist())
if rank == 0:
    print(sorted(dist.recv(y) for _ in range(3)))
else:
    dist.send(x, 0)
""",
    "generators of random numbers": """
import random
torch.manual_seed(rank); random.seed(rank)
first = torch.rand(2); dist.barrier(); second = torch.rand(2); dist.barrier()
print(first.tolist(), second.tolist(), random.random())
""",
    "data parallelism of torch": """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
torch.manual_seed(rank)
model(torch.randn(4, 8)).square().mean().backward()
print([round(value, 5) for value in model.module.weight.grad.flatten().tolist()])
""",
    "sharded weights and tensor parallelism of torch": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
torch.manual_seed(rank // 2)
loss = model(torch.randn(4, 8)).square().mean(); loss.backward()
print(round(loss.item(), 5), round(model[0].weight.grad.to_local().sum().item(), 4))
""",
}
FAULTS = {
    "missing": "dist.barrier() if rank else None",
    "order": "dist.barrier() if rank else dist.all_reduce(torch.ones(1))",
    "shape": "dist.all_reduce(torch.ones(2 + (rank == 1)))",
    "arguments": "dist.broadcast(torch.ones(2), src=int(rank == 3))",
    "deadlock": "x = torch.ones(1)\ndist.send(x, (rank + 1) % 4)\ndist.recv(x, (rank - 1) % 4)",
}


@pytest.fixture(scope="module")
def threads() -> Iterator[Ranks]:
    with Ranks(SIZE, threads=True) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def processes() -> Iterator[Ranks]:
    with Ranks(SIZE) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def many() -> Iterator[Ranks]:
    with Ranks(MANY, threads=True) as ranks:
        yield ranks


def printed(answers: list[CellAnswer]) -> list[str]:
    return ["".join(part["text"] for part in answer.parts) for answer in answers]


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_gives_on_threads_what_it_gives_on_processes(name: str, threads: Ranks, processes: Ranks) -> None:
    quiet = "import warnings\nwarnings.simplefilter('ignore')\n"  # a warning is told once in each process
    answers = [ranks.execute(quiet + CELLS[name]) for ranks in (threads, processes)]
    assert [answer.trouble for answer in [*answers[0], *answers[1]]] == [None] * 2 * SIZE
    assert printed(answers[0]) == printed(answers[1])
    assert all(printed(answers[0]))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_between_threads_is_named_as_between_processes(kind: str, threads: Ranks, processes: Ranks) -> None:
    sentences = []
    for ranks in (threads, processes):
        with pytest.raises(RanksError) as error:
            ranks.run(FAULTS[kind])
        sentences.append(str(error.value).splitlines()[0])
        causes = [answer.trouble.kind for answer in error.value.answers if answer.trouble]
        assert set(causes) == {kind}
    assert sentences[0] == sentences[1]
    threads.run("x = torch.ones(1); dist.all_reduce(x)")  # the next cell works
    assert [float(x) for x in threads["x"]] == [SIZE] * SIZE


def test_a_message_from_anyone_that_nobody_sends_is_named(threads: Ranks) -> None:
    answers = threads.execute("x = torch.ones(1)\ndist.recv(x) if rank == 0 else dist.barrier()")
    troubles = [answer.trouble for answer in answers]
    assert {trouble.kind for trouble in troubles if trouble} == {"missing"}
    assert all("rank 0 waits to receive from any rank, but none can send any more" in str(one) for one in troubles)


def test_the_other_ranks_hear_of_the_error_of_one(threads: Ranks) -> None:
    with pytest.raises(RanksError) as error:
        threads.run("1 / 0 if rank == 2 else dist.barrier()")
    assert str(error.value).splitlines()[:2] == [
        "Rank 2: ZeroDivisionError: division by zero",
        "    line 2: 1 / 0 if rank == 2 else dist.barrier()",
    ]


def test_a_loop_without_end_is_interrupted_and_variables_stay(threads: Ranks) -> None:
    threads.run("kept = rank")
    answers = threads.execute("while rank == 1:\n    pass", limit_s=1)
    assert [answer.trouble and answer.trouble.kind for answer in answers] == [None, "limit", "limit", "limit"]
    assert threads["kept"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "cell",
    {
        "interrupted": "while rank == 3:\n    pass\ndist.all_reduce(torch.full((1,), 100.0))",
        "error": "1 / (rank - 1)\ndist.all_reduce(torch.full((1,), 100.0))",
        "not waited for": "work = dist.all_reduce(torch.full((1,), 100.0), async_op=True) if rank else None",
    }.values(),
)
def test_calls_of_a_cell_that_not_all_came_to_are_forgotten(cell: str, threads: Ranks) -> None:
    threads.execute(cell, limit_s=1)
    threads.run("x = torch.ones(1); dist.all_reduce(x)")
    assert [float(x) for x in threads["x"]] == [SIZE] * SIZE


def test_the_generator_of_python_is_each_ranks_own(threads: Ranks) -> None:
    threads.run("import random; drawn = random.random()")
    assert len(set(threads["drawn"])) == SIZE


def test_output_is_each_ranks_own_and_the_last_value_is_shown(threads: Ranks) -> None:
    answers = threads.execute("print('of', rank)\nrank * 2")
    assert printed(answers) == [f"of {rank}\n{2 * rank}" for rank in range(SIZE)]
    assert [part["kind"] for part in answers[0].parts] == ["printed", "value"]
    assert printed(threads.execute("rank;")) == [""] * SIZE


def test_hash_seeds_differ_between_ranks(threads: Ranks) -> None:
    threads.run("seed = hash('dlojz')")
    assert len(set(threads["seed"])) == SIZE


def test_what_needs_processes_is_refused_in_a_sentence(threads: Ranks) -> None:
    use_language("fr")
    with pytest.raises(RanksError) as error:
        threads.run("import deepspeed")
    assert "DeepSpeed a besoin d’un processus par rang" in str(error.value)
    assert "%%ranks 4" in str(error.value)


def test_all_ranks_end_with_their_process_and_start_anew(threads: Ranks) -> None:
    answers = threads.execute("import os\nos._exit(3) if rank == 1 else dist.barrier()")
    assert [answer.trouble and (answer.trouble.kind, answer.trouble.exit_code) for answer in answers] == [
        ("exit", 3)
    ] * 4
    assert [answer.kept for answer in answers] == [False] * SIZE
    threads.run("x = torch.ones(1); dist.all_reduce(x)")
    assert [float(x) for x in threads["x"]] == [SIZE] * SIZE


def test_a_ring_of_64_ranks_gives_the_sum_and_sends_what_is_predicted(many: Ranks) -> None:
    many.run("""
parts, sent = list((torch.arange(640.0) + rank).chunk(world_size)), 0
for step in range(2 * (world_size - 1)):
    index = (rank - step) % world_size
    received = torch.empty_like(parts[index - 1])
    work = dist.isend(parts[index].clone(), (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size); work.wait()
    sent += received.numel()
    parts[index - 1] = parts[index - 1] + received if step < world_size - 1 else received
right = torch.equal(torch.cat(parts), torch.arange(640.0) * world_size + sum(range(world_size)))
""")
    assert many["right"] == [True] * MANY
    assert many["sent"] == [2 * (MANY - 1) * 640 // MANY] * MANY  # 2 (p - 1) / p of the elements


def test_the_status_of_64_threads_is_one_row_within_600_mib(many: Ranks) -> None:
    many.run("x = torch.ones(1); dist.all_reduce(x)")
    rows = many.status().rows
    assert len(rows) == MANY
    assert len({row["pid"] for row in rows}) == 1
    assert rows[0]["memory_bytes"] < 600 * 2**20
    assert [row[0] for row in many.status().table().rows] == [f"0–{MANY - 1}"]


def test_threads_are_asked_for_by_an_option_or_a_number() -> None:
    assert parse("4 --threads", is_cell=True).threads
    assert not parse("4", is_cell=True).threads
    with pytest.raises(RanksRefused, match="from 1 to 256"):
        parse("5000", is_cell=True)
