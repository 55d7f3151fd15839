"""The bank of wrong answers of lab 12, and the stand-ins of its checks held against the libraries themselves.

The answers are written the way a student would write them, not as the faults that the judges compare with.
"""

import argparse
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlojz.labs import lab12_libraries as lab
from dlojz.labs.lab12_libraries.exercises_configuration import (
    GPT3,
    GPT3_GPUS,
    complete,
    megatron_layout,
    megatron_qkv,
    stage,
)
from dlojz.labs.lab12_libraries.exercises_loops import (
    AcceleratorStandIn,
    EngineStandIn,
    accelerate_loop,
    deepspeed_loop,
    make_batches,
    make_model,
    make_optimizer,
    plain_loop,
    updates,
    weights_of,
)
from tests.labs import student_answers_libraries as student
from tests.labs.answers import gather_for_metrics
from tests.labs.bank import Answer, BankTests

EXERCISES = {exercise.id: exercise for exercise in lab.EXERCISES}


def with_engine(way: str = "right") -> Answer:
    def answer(engine: Any, batches: Any) -> Any:
        k, losses = engine.gradient_accumulation_steps(), []
        for number, batch in enumerate(batches, start=1):
            if way == "zeroes first":
                engine.zero_grad()
            loss = engine.module(batch) if way == "module" else engine(batch)
            if way == "divides":
                loss = loss / k
            if way == "plain backward":
                loss.backward()
            elif way == "module":
                (loss / k).backward()
            else:
                engine.backward(loss)
            if way == "optimizer":
                engine.optimizer.step()
            elif way == "at the boundary":
                if number % k == 0:
                    engine.step()
            elif way != "no step":
                engine.step()
            if way == "steps twice":
                engine.step()
            if way == "zeroes":
                engine.zero_grad()
            losses.append(loss.item())
            if way == "returns early":
                return losses
        return losses

    return answer


def one_backward(engine: Any, batches: Any) -> None:
    engine.backward(sum(engine(batch) for batch in batches))
    engine.step()


def step_first(engine: Any, batches: Any) -> None:
    for batch in batches:
        loss = engine(batch)
        engine.step()
        engine.backward(loss)


def with_accelerator(way: str = "right") -> Answer:
    def answer(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
        k = accelerator.gradient_accumulation_steps
        raw = model, optimizer, loader
        if way != "unprepared":
            optimizer, model, loader = accelerator.prepare(optimizer, model, loader)
        if way == "model":
            model = raw[0]
        if way == "optimizer":
            optimizer = raw[1]
        if way == "loader":
            loader = raw[2]
        for number, batch in enumerate(loader, start=1):
            if way == "no accumulate":
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
                continue
            if way == "accumulates at the boundary" and number % k:
                accelerator.backward(model(batch))
                continue
            before = model(batch) if way == "forward beside" else None
            with accelerator.accumulate(model):
                loss = model(batch) if before is None else before
                if way == "divides":
                    loss = loss / k
                if way == "plain backward":
                    loss.backward()
                else:
                    accelerator.backward(loss)
                if way != "counts" or number % k == 0:
                    optimizer.step()
                if way != "never zeroes":
                    optimizer.zero_grad()
            if way == "twice":
                accelerator.backward(model(batch))

    return answer


def synced(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    """Another right way: ask the accelerator, update after the block."""
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
        if accelerator.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()


def completing(way: str = "right") -> Answer:
    def answer(course: Any, global_batch: int, ranks: int, fits: int) -> Any:  # noqa: PLR0911
        document = course if way == "in place" else dict(course)
        micro = next(size for size in range(fits, 0, -1) if global_batch % (size * ranks) == 0)
        if way == "one by one":
            micro = 1
        if way == "does not fit":
            micro = global_batch // ranks
        if way in ("nothing", "stage alone"):
            return {"zero_optimization": {"stage": 2}} if way == "stage alone" else document
        if way == "divides by all":
            micro = max(1, fits // ranks)
        accumulation = global_batch // ranks // micro
        if way == "without accumulation":
            return {**document, "train_micro_batch_size_per_gpu": fits}
        if way == "of one rank":
            return {
                **document,
                "train_batch_size": micro * accumulation,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": accumulation,
            }
        if way == "per rank":
            return {
                **document,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": global_batch // micro,
            }
        if way == "two of three":
            return {**document, "train_batch_size": global_batch, "train_micro_batch_size_per_gpu": micro}
        document["train_micro_batch_size_per_gpu"] = micro
        document["gradient_accumulation_steps"] = accumulation
        document["train_batch_size"] = global_batch
        if way == "within zero":
            sizes = {key: document.pop(key) for key in list(document) if key != "zero_optimization"}
            return {"zero_optimization": {**document["zero_optimization"], **sizes}}
        return document

    return answer


def gathering(way: str = "right") -> Answer:
    def answer(values: Any, real: int) -> Any:  # noqa: PLR0911
        if way == "alone":
            return values[:real]
        size = dist.get_world_size()
        if way == "mean":
            mean = values.clone()
            dist.all_reduce(mean)
            return mean / size
        parts = [torch.zeros_like(values) for _ in range(size)]
        dist.all_gather(parts, values)
        if way == "each cut":
            return torch.vstack([part[: real // size] for part in parts])
        if way == "in turn":
            return torch.vstack([part[row] for row in range(len(values)) for part in parts])[:real]
        if way == "stacked":
            return torch.stack(parts)
        everything = torch.vstack(parts)
        if way == "last":
            return everything[len(everything) - real :]
        return everything if way == "uncut" else everything[:real]

    return answer


def converting(way: str = "right") -> Answer:
    def answer(weight: Any, heads: int, tp: int, rank: int) -> Any:
        q, k, v = weight.split(weight.shape[1])
        each, own = weight.shape[1] // heads, heads // tp
        mine = range(heads) if way == "whole" else range(rank * own, (rank + 1) * own)
        if way == "rank 0":
            mine = range(own)
        if way == "dealt":
            mine = range(rank, heads, tp)
        heads_of = [[part[head * each : (head + 1) * each] for head in mine] for part in (q, k, v)]
        if way == "rows":
            return weight[rank * len(weight) // tp : (rank + 1) * len(weight) // tp]
        if way == "three parts":
            return torch.cat([torch.cat(part) for part in heads_of])
        by_head = [torch.stack(three, dim=1).flatten(0, 1) for three in zip(*heads_of, strict=True)]
        right = torch.cat([torch.cat(three) for three in zip(*heads_of, strict=True)])
        if way == "columns":
            whole = converting("whole")(weight, heads, tp, rank)
            return whole[:, rank * weight.shape[1] // tp : (rank + 1) * weight.shape[1] // tp]
        return torch.cat(by_head) if way == "by row" else right

    return answer


def reading(way: str = "right") -> Answer:
    def answer(words: list[str], gpus: int) -> Any:
        parser = argparse.ArgumentParser()
        for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size"):
            parser.add_argument(f"--{name}", type=int, default=1)
        parser.add_argument("--micro-batch-size", type=int)
        parser.add_argument("--global-batch-size", type=int)
        given, _ = parser.parse_known_args(words)
        tp, pp, micro = given.tensor_model_parallel_size, given.pipeline_model_parallel_size, given.micro_batch_size
        dp = {"all": gpus, "without pp": gpus // tp, "without tp": gpus // pp}.get(way, gpus // (tp * pp))
        batch = given.global_batch_size or micro * dp
        m = batch // (micro * dp)
        m = {"batch": batch // micro, "samples": batch // dp, "by gpus": batch // (micro * gpus)}.get(way, m)
        if way == "texts":
            return tuple(map(str, (tp, pp, dp, m)))
        if way == "three":
            return tp, pp, dp
        if way == "swapped":
            return pp, tp, dp, m
        if way == "shares":
            return tp, pp, gpus / (tp * pp) + 0.5, m
        if way == "no default":
            return tp, pp, dp, (given.global_batch_size or 0) // (micro * dp)
        return tp, pp, dp, m

    return answer


def telling(way: str = "right") -> Answer:
    def answer(messages: Any, weight_bytes: int) -> Any:  # noqa: PLR0911
        gathered = messages.get("all_gather", 0)
        if way == "any gather":
            return 3 if gathered else 0
        if way == "by reduce":
            return 2 if "reduce_scatter" in messages else 0
        if way == "exact":
            return {0: 0, weight_bytes: 2, 2 * weight_bytes: 3}.get(gathered)
        if way == "always 0":
            return 0
        if way == "stage 1":
            return 1 if 0 < gathered < 2 * weight_bytes else 3 * (gathered > 0)
        if way == "by all-reduce":
            return 0 if messages.get("all_reduce", 0) >= weight_bytes else 3
        if way == "sum":
            return 3 if sum(messages.values()) > 2.5 * weight_bytes else 2 if gathered else 0
        if way == "exactly none":
            return 0 if gathered == 0 else 2 if gathered < 1.9 * weight_bytes else 3
        return 0 if gathered < 0.1 * weight_bytes else 2 if gathered < 1.9 * weight_bytes else 3

    return answer


REFERENCES: dict[str, Answer] = {
    "deepspeed-loop": deepspeed_loop,
    "course-json": complete,
    "accelerate-loop": accelerate_loop,
    "gather-metrics": gather_for_metrics,
    "read-traffic": stage,
    "megatron-qkv": megatron_qkv,
    "megatron-arguments": megatron_layout,
}

BANK: dict[str, list[tuple[Answer, str]]] = {
    "deepspeed-loop": [
        (with_engine("plain backward"), "You call loss.backward()"),
        (with_engine("divides"), "engine.backward divides it by the accumulation again"),
        (with_engine("zeroes"), "You zero the gradients with every micro-batch"),
        (with_engine("zeroes first"), "You zero the gradients with every micro-batch"),
        (with_engine("at the boundary"), "it counts them itself, and believes"),
        (with_engine("no step"), "engine.step is never called"),
        (with_engine("steps twice"), "Number of calls of engine.step"),
        (with_engine("optimizer"), "You use engine.optimizer yourself"),
        (one_backward, "engine.backward is called for 1 of 3"),
        (with_engine("returns early"), "ends after 1 of 3 micro-batches"),
        (with_engine("module"), "each would learn for itself"),
        (step_first, "Your function raised RuntimeError"),
        (lambda engine, batches: None, "forward is never called"),
    ],
    "course-json": [
        (completing("nothing"), "it gives no size of batch"),
        (completing("in place"), "changes the dictionary that it is given"),
        (completing("stage alone"), "is gone or has changed"),
        (completing("within zero"), "is gone or has changed"),
        (completing("of one rank"), "DeepSpeed or the lab refuses"),
        (completing("per rank"), "times as many"),
        (completing("without accumulation"), "times as many"),
        (completing("does not fit"), "does not fit"),
        (completing("one by one"), "with fewer passes"),
        (lambda *case: None, "returns nothing"),
        (lambda *case: "{}", "A dictionary is expected"),
    ],
    "accelerate-loop": [
        (with_accelerator("unprepared"), "prepare is never called"),
        (with_accelerator("model"), "through the model as it was given"),
        (with_accelerator("optimizer"), "knows nothing of accumulation"),
        (with_accelerator("loader"), "not the one that prepare gives"),
        (with_accelerator("no accumulate"), "Without accelerator.accumulate"),
        (with_accelerator("accumulates at the boundary"), "accumulate is entered for 2 of 10"),
        (with_accelerator("divides"), "accelerator.backward divides it by the accumulation again"),
        (with_accelerator("plain backward"), "You call loss.backward()"),
        (with_accelerator("never zeroes"), "Gradients are never zeroed"),
        (with_accelerator("counts"), "miss the end of the loader"),
        (with_accelerator("forward beside"), "forward runs outside accumulate"),
        (with_accelerator("twice"), "are not those of Accelerate's recipe"),
    ],
    "gather-metrics": [
        (gathering("uncut"), "they count twice in the metric"),
        (gathering("each cut"), "You cut every rank's part"),
        (gathering("in turn"), "one sample of each rank in turn"),
        (gathering("last"), "keep the first ones"),
        (gathering("mean"), "You average over the ranks"),
        (gathering("stacked"), "a further dimension"),
        (gathering("alone"), "Every rank returns its own values"),
        (lambda values, real: None, "returns nothing"),
    ],
    "read-traffic": [
        (telling("any gather"), "gathered once, after the update"),
        (telling("by reduce"), "although it reduces everything"),
        (telling("always 0"), "returns 0 in every case of this check"),
        (telling("exact"), "returns nothing for some of the steps"),
        (telling("stage 1"), "0, 2 (for stages 1 and 2) or 3 is expected"),
        (telling("by all-reduce"), "although it reduces everything"),
        (telling("exactly none"), "Leave room for small messages"),
        (telling("sum"), "gathered once, after the update"),
    ],
    "megatron-qkv": [
        (converting("rows"), "the first rank gets queries"),
        (converting("three parts"), "but not their order"),
        (converting("dealt"), "You deal the heads out in turn"),
        (converting("by row"), "You interleave row by row"),
        (converting("columns"), "You cut along the inputs"),
        (converting("whole"), "that is the whole layer"),
        (converting("rank 0"), "Every rank gets the part of rank 0"),
    ],
    "megatron-arguments": [
        (reading("all"), "counts every GPU"),
        (reading("without pp"), "forgets the pipeline"),
        (reading("without tp"), "forgets the tensor degree"),
        (reading("batch"), "of all replicas together"),
        (reading("by gpus"), "split the batch among all GPUs"),
        (reading("samples"), "divide by --micro-batch-size"),
        (reading("swapped"), "are swapped"),
        (reading("texts"), "turned into numbers"),
        (reading("three"), "Four numbers are expected"),
        (reading("shares"), "are whole numbers"),
        (reading("no default"), "one micro-batch per replica"),
        (lambda words, gpus: None, "returns nothing"),
    ],
}


WRONG = {name: [*answers, *student.WRONG[name]] for name, answers in BANK.items()}


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right = WRONG, REFERENCES
    others = (
        ("deepspeed-loop", with_engine()),
        ("course-json", completing()),
        ("course-json", completing("two of three")),
        ("accelerate-loop", with_accelerator()),
        ("accelerate-loop", synced),
        ("gather-metrics", gathering()),
        ("read-traffic", telling()),
        ("megatron-qkv", converting()),
        ("megatron-arguments", reading()),
        *student.RIGHT,
    )
    least, least_right = 6, 8


ENGINE_WAYS = ("right", "divides", "zeroes", "at the boundary", "no step", "returns early")
ACCELERATOR_WAYS = (
    *("right", "unprepared", "optimizer", "loader", "no accumulate", "divides", "plain backward", "never zeroes"),
    *("counts", "accumulates at the boundary", "twice"),
)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of this one process, as the libraries want it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as environment:
        told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in told.items():
            environment.setenv(name, str(value))
        environment.setenv("DS_ACCELERATOR", "cpu")
        import deepspeed

        # For inference alone, and takes 40 s to compile.
        environment.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        dist.init_process_group("gloo")
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ENGINE_WAYS)
def test_the_engine_of_the_check_behaves_as_deepspeeds(way: str) -> None:
    import deepspeed

    batches, model, twin = make_batches(8, 5), make_model(5), make_model(5)
    engine, *_ = deepspeed.initialize(
        model=twin,
        optimizer=make_optimizer(twin),
        config={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "gradient_clipping": 0.0},
        dist_init_required=False,
    )
    with_engine(way)(engine, batches)
    with_engine(way)(EngineStandIn(model, 4), batches)
    assert torch.equal(weights_of(model), weights_of(engine.module))
    engine.destroy()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ACCELERATOR_WAYS)
@pytest.mark.parametrize(("micro_batches", "accumulation"), [(10, 4), (6, 3), (3, 1)])
def test_the_accelerator_of_the_check_behaves_as_accelerates(way: str, micro_batches: int, accumulation: int) -> None:
    accelerate = pytest.importorskip("accelerate", reason="not installed: make libraries")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    class Listed(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.samples = [pair for batch in make_batches(micro_batches, 6) for pair in zip(*batch, strict=True)]

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, index: int) -> Any:
            return self.samples[index]

    model, twin = make_model(6), make_model(6)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    loader = torch.utils.data.DataLoader(Listed(), batch_size=4)
    try:
        with_accelerator(way)(accelerator, twin, make_optimizer(twin), loader)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    with_accelerator(way)(
        AcceleratorStandIn(accumulation), model, make_optimizer(model), make_batches(micro_batches, 6)
    )
    torch.testing.assert_close(weights_of(model), weights_of(twin))


@pytest.mark.parametrize(("micro_batches", "accumulation", "expected"), [(10, 4, 3), (8, 4, 2), (3, 1, 3), (1, 4, 1)])
def test_updates_of_a_loader(micro_batches: int, accumulation: int, expected: int) -> None:
    assert updates(micro_batches, accumulation) == expected


def test_leftover_micro_batches_wait_in_the_plain_loop_alone() -> None:
    batches = make_batches(10, 7)
    plain, prepared, short = make_model(7), make_model(7), make_model(7)
    plain_loop(plain, make_optimizer(plain), batches, 4)
    accelerate_loop(AcceleratorStandIn(4), prepared, make_optimizer(prepared), batches)
    plain_loop(short, make_optimizer(short), batches[:8], 4)
    assert torch.equal(weights_of(plain), weights_of(short))
    assert not torch.allclose(weights_of(prepared), weights_of(plain))


@pytest.mark.parametrize(("heads", "tp"), [(4, 2), (6, 3)])
def test_megatron_qkv_gives_heads_that_attend_as_torchs(heads: int, tp: int) -> None:
    """The ranks' heads, computed from their own rows, are torch's attention before its output projection."""
    import torch.nn.functional as F

    width = 4 * heads
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
    torch.nn.init.eye_(attention.out_proj.weight)
    x_BTD = torch.randn(2, 5, width)
    expected, _ = attention(x_BTD, x_BTD, x_BTD, need_weights=False)
    parts = []
    for rank in range(tp):
        rows = megatron_qkv(attention.in_proj_weight, heads, tp, rank)
        mixed = F.linear(x_BTD, rows).view(2, 5, heads // tp, 3, 4).transpose(1, 2)
        q, k, v = mixed.unbind(3)
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(torch.cat(parts, dim=2), expected, atol=1e-5, rtol=1e-5)


def test_megatron_layout_reads_gpt_3_of_the_example() -> None:
    assert megatron_layout(GPT3.split(), GPT3_GPUS) == (8, 16, 8, 192)
