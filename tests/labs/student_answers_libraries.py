"""Answers of lab 12 as students write them, from its text alone: right ones, and wrong ones with their words."""

import copy
import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.labs.bank import Answer

# Loops.


def with_engine(
    loss: Any = lambda engine, batch: engine(batch),
    backward: Any = lambda engine, loss: engine.backward(loss),
    step: Any = lambda engine: engine.step(),
    after: Any = lambda engine, number, last: None,
    each: Any = lambda batches: batches,
) -> Answer:
    def answer(engine: Any, batches: Any) -> None:
        taken = list(each(batches))
        for number, batch in enumerate(taken, start=1):
            backward(engine, loss(engine, batch))
            step(engine)
            after(engine, number, number == len(taken))

    return answer


def engine_at_boundaries_only(engine: Any, batches: Any) -> None:
    for batch in batches:
        engine.backward(engine(batch))
        if engine.is_gradient_accumulation_boundary():
            engine.step()


def engine_as_plain(engine: Any, batches: Any) -> None:
    for number, batch in enumerate(batches, start=1):
        loss = engine(batch) / 4
        engine.backward(loss)
        if number % 4 == 0:
            engine.step()
            engine.zero_grad()


def engine_steps_at_the_end(engine: Any, batches: Any) -> None:
    for batch in batches:
        engine.backward(engine(batch))
    engine.step()


def with_accelerator(
    prepare: Any = lambda a, m, o, loader: a.prepare(m, o, loader),
    loss: Any = lambda model, batch: model(batch),
    zero: Any = lambda optimizer: optimizer.zero_grad(),
    zero_first: bool = False,
    backward: Any = lambda a, loss: a.backward(loss),
    context: Any = lambda a, model: a.accumulate(model),
    step: Any = lambda a, optimizer: optimizer.step(),
) -> Answer:
    def answer(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
        for batch in loader:
            with context(accelerator, model):
                if zero_first:
                    zero(optimizer)
                backward(accelerator, loss(model, batch))
                step(accelerator, optimizer)
                if not zero_first:
                    zero(optimizer)

    return answer


def prepared_one_by_one(a: Any, model: Any, optimizer: Any, loader: Any) -> Any:
    return a.prepare_model(model), a.prepare_optimizer(optimizer), a.prepare_data_loader(loader)


def prepared_separately(a: Any, model: Any, optimizer: Any, loader: Any) -> Any:
    return a.prepare(model), a.prepare(optimizer), a.prepare(loader)


def prepared_in_another_order(a: Any, model: Any, optimizer: Any, loader: Any) -> Any:
    loader, optimizer, model = a.prepare(loader, optimizer, model)
    return model, optimizer, loader


def prepared_and_swapped(a: Any, model: Any, optimizer: Any, loader: Any) -> Any:
    loader, optimizer, model = a.prepare(model, optimizer, loader)
    return model, optimizer, loader


# The JSON.


def completed(
    micro: Any = lambda samples, fits: max(m for m in range(1, fits + 1) if samples % m == 0),
    merge: Any = lambda course, sizes: course | sizes,
    total: Any = lambda batch, ranks: batch,
    steps: Any = lambda samples, micro: samples // micro,
) -> Answer:
    def answer(course: Any, global_batch: int, ranks: int, fits: int) -> Any:
        samples = global_batch // ranks
        m = micro(samples, fits)
        return merge(course, {
            "train_batch_size": total(global_batch, ranks),
            "train_micro_batch_size_per_gpu": m,
            "gradient_accumulation_steps": steps(samples, m),
        })  # fmt: skip

    return answer


def micro_downwards(samples: int, fits: int) -> int:
    micro = min(fits, samples)
    while samples % micro:
        micro -= 1
    return micro


def updated(course: Any, sizes: Any) -> Any:
    document = copy.deepcopy(course)
    document.update(sizes)
    return document


def within(course: Any, sizes: Any) -> Any:
    course.update(sizes)
    return course


# Metrics.


def gathered(
    cut: Any = lambda everything, real: everything[:real],
    join: Any = torch.cat,
    values_of: Any = lambda values: values,
) -> Answer:
    def answer(values: Any, real: int) -> Any:
        values = values_of(values)
        parts = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, values)
        return cut(join(parts), real)

    return answer


def gathered_into_one(values: Any, real: int) -> Any:
    everything = values.new_empty(dist.get_world_size() * len(values), *values.shape[1:])
    dist.all_gather_into_tensor(everything, values.contiguous())
    return everything.narrow(0, 0, real)


def gathered_by_sum(values: Any, real: int) -> Any:
    n, rank = len(values), dist.get_rank()
    everything = torch.zeros(n * dist.get_world_size(), *values.shape[1:], dtype=values.dtype)
    everything[rank * n : (rank + 1) * n] = values
    dist.all_reduce(everything)
    return everything[:real]


def gathered_row_by_row(values: Any, real: int) -> Any:
    rows = []
    for source in range(dist.get_world_size()):
        part = values.clone()
        dist.broadcast(part, source)
        rows += list(part)
    return torch.stack(rows[:real])


def to_rank_0(values: Any, real: int) -> Any:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(values, parts, dst=0)
    return torch.cat(parts)[:real] if parts else values


# Messages.


def told(gathered_at: Any = lambda g: 0 if g < 0.5 else 2 if g < 1.5 else 3) -> Answer:
    return lambda messages, weights: gathered_at(messages.get("all_gather", 0) / weights)


# Q, K and V.


def converted(
    heads_first: Any = lambda w, heads: w.view(3, heads, -1, w.shape[1]).permute(1, 0, 2, 3).reshape(w.shape),
    part: Any = lambda w, tp, rank: w.chunk(tp)[rank],
) -> Answer:
    return lambda weight, heads, tp, rank: part(heads_first(weight, heads), tp, rank)


def converted_by_index(weight: Any, heads: int, tp: int, rank: int) -> Any:
    width = weight.shape[1]
    size, own = width // heads, heads // tp
    rows = [
        part * width + head * size + i
        for head in range(rank * own, (rank + 1) * own)
        for part in range(3)
        for i in range(size)
    ]
    return weight[rows]


def converted_by_parts(weight: Any, heads: int, tp: int, rank: int) -> Any:
    parts = [part.chunk(heads) for part in weight.chunk(3)]
    own = heads // tp
    return torch.cat([torch.cat([part[h] for part in parts]) for h in range(own * rank, own * (rank + 1))])


def converted_by_numpy(weight: Any, heads: int, tp: int, rank: int) -> Any:
    w = weight.detach().numpy().reshape(3, heads, -1, weight.shape[1])
    return torch.from_numpy(np.split(np.swapaxes(w, 0, 1).reshape(weight.shape), tp)[rank].copy())


def own_then_order(weight: Any, heads: int, tp: int, rank: int) -> Any:
    own = heads // tp
    q, k, v = (
        part.view(heads, -1, weight.shape[1])[rank * own : (rank + 1) * own] for part in weight.split(len(weight) // 3)
    )
    return torch.stack([q, k, v], dim=1).flatten(0, 2)


# Arguments.


def arguments(
    dp: Any = lambda gpus, tp, pp: gpus // (tp * pp),
    times: Any = lambda batch, micro, dp: batch // (micro * dp),
    order: Any = lambda tp, pp, dp, m: (tp, pp, dp, m),
    default: Any = lambda micro, dp: micro * dp,
) -> Answer:
    def answer(words: list[str], gpus: int) -> Any:
        found = {a: b for a, b in pairwise(words) if a.startswith("--")}
        tp = int(found.get("--tensor-model-parallel-size", "1"))
        pp = int(found.get("--pipeline-model-parallel-size", "1"))
        replicas = dp(gpus, tp, pp)
        micro = int(found["--micro-batch-size"])
        batch = int(found["--global-batch-size"]) if "--global-batch-size" in found else default(micro, replicas)
        return order(tp, pp, replicas, times(batch, micro, replicas))

    return answer


def arguments_by_index(words: list[str], gpus: int) -> Any:
    def value(name: str, default: int) -> int:
        return int(words[words.index(name) + 1]) if name in words else default

    tp, pp = value("--tensor-model-parallel-size", 1), value("--pipeline-model-parallel-size", 1)
    dp = gpus // tp // pp
    micro = value("--micro-batch-size", 1)
    return [tp, pp, dp, value("--global-batch-size", micro * dp) // micro // dp]


def arguments_by_pattern(words: list[str], gpus: int) -> Any:
    line = " ".join(words)

    def value(name: str) -> int | None:
        found = re.search(rf"--{name} (\d+)", line)
        return int(found.group(1)) if found else None

    tp, pp = value("tensor-model-parallel-size") or 1, value("pipeline-model-parallel-size") or 1
    dp, micro, batch = gpus // (tp * pp), value("micro-batch-size"), value("global-batch-size")
    return tp, pp, dp, 1 if batch is None else batch // (micro * dp)  # type: ignore[operator]


def arguments_word_by_word(words: list[str], gpus: int) -> Any:
    tp = pp = 1
    micro = batch = 0
    for name, value in pairwise(words):
        if name == "--tensor-model-parallel-size":
            tp = int(value)
        elif name == "--pipeline-model-parallel-size":
            pp = int(value)
        elif name == "--micro-batch-size":
            micro = int(value)
        elif name == "--global-batch-size":
            batch = int(value)
    dp = gpus // (tp * pp)
    return torch.tensor([tp, pp, dp, (batch or micro * dp) // (micro * dp)])


RIGHT: list[tuple[str, Answer]] = [
    ("deepspeed-loop", with_engine()),
    ("deepspeed-loop", with_engine(loss=lambda engine, batch: engine.forward(batch))),
    ("deepspeed-loop", with_engine(each=iter)),
    ("deepspeed-loop", with_engine(loss=lambda engine, batch: engine.__call__(batch))),
    ("deepspeed-loop", with_engine(after=lambda engine, number, last: engine.train())),
    ("deepspeed-loop", with_engine(after=lambda engine, number, last: print(number) if last else None)),
    ("deepspeed-loop", lambda engine, batches: [(engine.backward(engine(b)), engine.step()) for b in batches]),
    ("deepspeed-loop", lambda engine, batches: (engine.train() and None) or with_engine()(engine, batches)),
    ("course-json", completed()),
    ("course-json", completed(micro=micro_downwards)),
    ("course-json", completed(merge=updated)),
    ("course-json", completed(merge=lambda course, sizes: {**sizes, **course})),
    ("course-json", completed(merge=lambda course, sizes: dict(course, **sizes))),
    (
        "course-json",
        completed(
            micro=lambda samples, fits: next(
                samples // k for k in range(1, samples + 1) if samples % k == 0 and samples // k <= fits
            )
        ),
    ),
    (
        "course-json",
        completed(
            micro=lambda samples, fits: sorted(m for m in range(1, min(samples, fits) + 1) if samples % m == 0)[-1]
        ),
    ),
    ("course-json", completed(merge=lambda course, sizes: {k: v for d in (course, sizes) for k, v in d.items()})),
    ("course-json", completed(merge=lambda course, sizes: {**course, **dict(list(sizes.items())[:2])})),
    ("accelerate-loop", with_accelerator()),
    ("accelerate-loop", with_accelerator(prepare=prepared_separately)),
    ("accelerate-loop", with_accelerator(prepare=prepared_in_another_order)),
    ("accelerate-loop", with_accelerator(prepare=prepared_one_by_one)),
    ("accelerate-loop", with_accelerator(prepare=lambda a, m, o, loader: (*a.prepare(m, o), a.prepare(loader)))),
    ("accelerate-loop", with_accelerator(zero=lambda optimizer: optimizer.zero_grad(set_to_none=True))),
    ("accelerate-loop", with_accelerator(loss=lambda model, batch: model.forward(batch))),
    ("gather-metrics", gathered()),
    ("gather-metrics", gathered(join=lambda parts: torch.stack(parts).flatten(0, 1))),
    ("gather-metrics", gathered(cut=lambda everything, real: everything.split([real, len(everything) - real])[0])),
    ("gather-metrics", gathered(cut=lambda everything, real: torch.index_select(everything, 0, torch.arange(real)))),
    ("gather-metrics", gathered_into_one),
    ("gather-metrics", gathered_by_sum),
    ("gather-metrics", gathered_row_by_row),
    ("read-traffic", told()),
    ("read-traffic", told(lambda g: (0, 2, 3, 3, 3, 3, 3, 3, 3)[min(round(g), 8)])),
    ("read-traffic", told(lambda g: 3 if g > 1.7 else 2 if g > 0.3 else 0)),
    ("read-traffic", told(lambda g: torch.tensor(0 if g < 0.5 else 2 if g < 1.5 else 3))),
    ("read-traffic", told(lambda g: np.int64(0 if g < 0.4 else 2 if g < 1.6 else 3))),
    ("megatron-qkv", converted()),
    ("megatron-qkv", converted(part=lambda w, tp, rank: w.view(tp, -1, w.shape[1])[rank])),
    ("megatron-qkv", converted(part=lambda w, tp, rank: w.tensor_split(tp)[rank].clone())),
    (
        "megatron-qkv",
        converted(
            heads_first=lambda w, heads: torch.einsum("phdw->hpdw", w.unflatten(0, (3, heads, -1))).flatten(0, 2)
        ),
    ),
    ("megatron-qkv", converted_by_index),
    ("megatron-qkv", converted_by_parts),
    ("megatron-qkv", converted_by_numpy),
    ("megatron-qkv", own_then_order),
    ("megatron-arguments", arguments()),
    ("megatron-arguments", arguments_by_index),
    ("megatron-arguments", arguments_by_pattern),
    ("megatron-arguments", arguments_word_by_word),
    ("megatron-arguments", lambda *asked: np.array(arguments()(*asked))),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "deepspeed-loop": [
        (engine_as_plain, "You scale the loss, and engine.backward"),
        (engine_steps_at_the_end, "Number of calls of engine.step for"),
        (engine_at_boundaries_only, "engine.step is never called: no weight"),
        (
            with_engine(backward=lambda engine, loss: (engine.backward(loss), engine.backward(loss))),
            "Your function raised RuntimeError",
        ),
        (with_engine(backward=lambda engine, loss: None), "micro-batches: each one has its own, before"),
        (
            with_engine(loss=lambda engine, batch: engine(batch) * engine.gradient_accumulation_steps()),
            "You scale the loss, and engine.backward",
        ),
        (with_engine(loss=lambda engine, batch: engine(batch).detach()), "Your function raised RuntimeError"),
        (with_engine(each=lambda batches: batches[:-1]), "micro-batches (a return inside it?)."),
        (
            with_engine(after=lambda engine, number, last: engine.optimizer.zero_grad()),
            "You use engine.optimizer yourself: under ZeRO",
        ),
        (with_engine(each=lambda batches: [batches[0]] * len(batches)), "the weights are not those of the plain"),
    ],
    "course-json": [
        (completed(merge=within), "Your function changes the dictionary that it"),
        (completed(merge=lambda course, sizes: sizes), "What the course's file says of ZeRO is gone"),
        (
            completed(merge=lambda course, sizes: {"zero_optimization": course["zero_optimization"], **sizes}),
            "The file that you are given says",
        ),
        (completed(steps=lambda samples, micro: samples / micro), "these sizes are whole numbers, so divide"),
        (completed(micro=lambda samples, fits: fits), "With your settings, DeepSpeed or the lab"),
        (completed(micro=lambda samples, fits: samples), "does not fit: accumulate over more, smaller"),
        (completed(micro=lambda samples, fits: 1), "fit and divide a GPU's samples too, with"),
        (completed(micro=math.gcd), "fit and divide a GPU's samples too, with"),
        (
            completed(micro=lambda samples, fits: min(m for m in range(2, fits + 1) if samples % m == 0)),
            "fit and divide a GPU's samples too, with",
        ),
        (completed(total=lambda batch, ranks: batch // ranks), "With your settings, DeepSpeed or the lab"),
        (completed(total=lambda batch, ranks: batch * ranks), "With your settings, DeepSpeed or the lab"),
        (
            completed(merge=lambda course, sizes: {**course, **{k: str(v) for k, v in sizes.items()}}),
            "': these sizes are whole numbers, so divide",
        ),
    ],
    "accelerate-loop": [
        (with_accelerator(prepare=prepared_and_swapped), "Your function raised TypeError"),
        (with_accelerator(zero_first=True), "the weights are not those of Accelerate's"),
        (
            with_accelerator(zero_first=True, zero=lambda optimizer: None),
            "Gradients are never zeroed: each update adds",
        ),
        (with_accelerator(loss=lambda model, batch: model(batch) / 4), "You scale the loss, and accelerator.backward"),
        (
            with_accelerator(backward=lambda a, loss: (a.backward(loss), a.backward(loss))),
            "Your function raised RuntimeError",
        ),
        (with_accelerator(step=lambda a, optimizer: None), "no optimizer makes an update"),
        (
            with_accelerator(
                step=lambda a, optimizer: optimizer.step() if a.sync_gradients else None, zero=lambda optimizer: None
            ),
            "Gradients are never zeroed: each update adds",
        ),
        (with_accelerator(backward=lambda a, loss: None), "accelerator.backward is called for"),
        (
            with_accelerator(step=lambda a, optimizer: (optimizer.step(), optimizer.step())),
            "micro-batches: call it once after each.",
        ),
    ],
    "gather-metrics": [
        (
            gathered(cut=lambda everything, real: everything[: real - 1]),
            "The last sample is missing: keep `real` of",
        ),
        (gathered(cut=lambda everything, real: everything.mean()), "You return the metric itself: return the"),
        (gathered(join=lambda parts: torch.cat(parts[::-1])), "The chunks of what is gathered of a batch"),
        (gathered(join=lambda parts: parts[dist.get_rank()]), "Every rank returns its own values: gather"),
        (to_rank_0, "alone has all the values: each rank needs"),
    ],
    "read-traffic": [
        (told(lambda g: 0 if g == 0 else 2 if g < 2 else 3), "what is gathered is far less than the"),
        (told(lambda g: 0 if g <= 0 else 2 if g <= 1 else 3), "the weights are gathered once, after the"),
        (told(round), "Your function returns"),
        (told(lambda g: 3 if g >= 2 else 2), "the weights never travel, since every rank"),
        (told(lambda g: g), "Your function returns"),
        (lambda messages, weights: 2 if "all_gather" in messages else 0, "the weights are gathered at least twice per"),
        (lambda messages, weights: 3 if messages["all_gather"] > weights else 2, "Your function raised KeyError"),
        (
            lambda messages, weights: "ZeRO-3" if messages.get("all_gather", 0) > 1.5 * weights else "DDP",
            "Your function returns 'DDP'",
        ),
        (lambda messages, weights: 0 if "all_reduce" in messages else 3, "returns 0 in every case of this check"),
    ],
    "megatron-qkv": [
        (
            converted(heads_first=lambda w, heads: w.view(heads, 3, -1, w.shape[1]).transpose(0, 1).reshape(w.shape)),
            "…), Megatron's order: torch's are laid out",
        ),
        (
            converted(heads_first=lambda w, heads: w.view(3, heads, -1, w.shape[1]).transpose(1, 2).reshape(w.shape)),
            "You exchange heads and the rows of a head: it",
        ),
        (converted(heads_first=lambda w, heads: w), "You cut torch's rows as they lie: all of Q"),
        (converted(part=lambda w, tp, rank: w.chunk(tp)[tp - 1 - rank]), "The order of the ranks is reversed: rank"),
        (converted(part=lambda w, tp, rank: w[rank::tp]), "You take every N-th row: a rank's part is one"),
        (converted(part=lambda w, tp, rank: w.chunk(tp)[0]), "Every rank gets the part of rank"),
        (
            converted(
                heads_first=lambda w, heads: w.view(3, heads, -1, w.shape[1]).flip(0).transpose(0, 1).reshape(w.shape)
            ),
            "Within a head, the order is another one: q",
        ),
        (
            converted(
                heads_first=lambda w, heads: (
                    w.T.contiguous().view(3, heads, -1, w.shape[1]).transpose(0, 1).reshape(w.shape)
                )
            ),
            "You transpose the weight: torch's is",
        ),
        (
            lambda weight, heads, tp, rank: converted()(weight, tp, tp, rank),
            "The heads are the right ones, but not their",
        ),
    ],
    "megatron-arguments": [
        (
            arguments(dp=lambda gpus, tp, pp: gpus / (tp * pp), times=lambda batch, micro, dp: batch / (micro * dp)),
            "): degrees and counts are whole numbers, so",
        ),
        (arguments(times=lambda batch, micro, dp: batch), "You return the global batch"),
        (arguments(times=lambda batch, micro, dp: batch // dp), "the samples of a replica per step; divide"),
        (arguments(times=lambda batch, micro, dp: batch // (micro * dp) + 1), "Megatron would take micro-batches="),
        (arguments(order=lambda tp, pp, dp, m: (dp, tp, pp, m)), "but your function returns"),
        (arguments(order=lambda tp, pp, dp, m: (tp, pp, m, dp)), "but your function returns"),
        (
            arguments(order=lambda tp, pp, dp, m: {"tp": tp, "pp": pp, "dp": dp, "m": m}),
            "Four numbers are expected: tp, pp, dp and the",
        ),
        (arguments(default=lambda micro, dp: micro), "Right, except where no global batch is given"),
        (arguments(dp=lambda gpus, tp, pp: gpus - tp * pp), "but your function returns"),
        (lambda words, gpus: (8, 16, 8, 192), "but your function returns"),
        (
            lambda words, gpus: tuple(int(w) for w in words if w.isdigit())[:4],
            "Four numbers are expected: tp, pp, dp and the",
        ),
    ],
}
