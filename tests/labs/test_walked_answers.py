"""Answers that readers tried, and that once got a wrong verdict: each is judged as it deserves, for what it does.

They are kept as they were written, from the statements alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz.base.language import use_language
from dlojz.by_hand.tensor.axis import add_up, copy, gather_tokens, scatter_tokens
from dlojz.labs.kit.exercise import judge
from tests.labs.bank import exercises_of_all_labs, first_of_each

EXERCISES = exercises_of_all_labs()

# ---- lab 02


def by_address(model: Any, host: Any) -> Any:
    weights = {weight.data_ptr() for weight in model.parameters()}

    def pack(tensor: Any) -> Any:
        return tensor if tensor.data_ptr() in weights else host.store(tensor)

    def unpack(packed: Any) -> Any:
        return packed if isinstance(packed, torch.Tensor) else host.fetch(packed)

    return pack, unpack


def always_fetched(model: Any, host: Any) -> Any:
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(tensor: Any) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.store(tensor)

    return pack, host.fetch


# ---- lab 03


def rebound(model: Any) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad / dist.get_world_size()
        dist.all_reduce(gradient)
        parameter.grad = gradient


def before_accumulation(model: Any) -> Any:
    flights: list[Any] = []
    for parameter in model.parameters():

        def hook(gradient: Any, parameter: Any = parameter) -> None:
            flights.append((dist.all_reduce(gradient, async_op=True), parameter))

        parameter.register_hook(hook)

    def synchronize() -> None:
        for work, parameter in flights:
            work.wait()
            parameter.grad /= dist.get_world_size()
        flights.clear()

    return synchronize


def gathered_in_hooks(model: Any) -> Any:
    flights: list[Any] = []
    size = dist.get_world_size()

    def hook(parameter: Any) -> None:
        parts = [torch.empty_like(parameter.grad) for _ in range(size)]
        flights.append((dist.all_gather(parts, parameter.grad, async_op=True), parameter, parts))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def synchronize() -> None:
        for work, parameter, parts in flights:
            work.wait()
            parameter.grad.copy_(sum(parts) / size)
        flights[:] = []

    return synchronize


def hashed(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(hash((seed, str(epoch))) % 2**32)
    return torch.randperm(num_samples, generator=generator)[rank::size][: num_samples // size]


def seed_times_epoch(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed * epoch)
    return torch.randperm(num_samples, generator=generator)[rank::size][: num_samples // size]


def indices_in_floats(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed + 1000 * epoch)
    return torch.randperm(num_samples, generator=generator)[rank::size][: num_samples // size].double()


# ---- lab 05


def last_in_first_out(rank: int, ranks: int, micro_batches: int) -> list[str]:
    warm_up = min(ranks - rank, micro_batches)
    order, stack = [f"F{i}" for i in range(warm_up)], list(range(warm_up))
    for i in range(micro_batches):
        order.append(f"B{stack.pop()}")
        if i + warm_up < micro_batches:
            order.append(f"F{i + warm_up}")
            stack.append(i + warm_up)
    return order


def under_a_smaller_cap(ranks: int, micro_batches: int, limit: int) -> Any:
    from dlojz.pipeline.orders.zero_bubble import list_schedule

    return list_schedule(ranks, micro_batches, priority="backward-first", cap=max(limit - 1, 1))


def stage(
    sent: Callable[..., Any] | None = None, back: str = "gradient of x", ends: str = "after yield"
) -> Callable[..., Any]:
    """A stage in two halves: how it sends forward, what it sends back, where its backward stands."""

    def run_stage(module: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any) -> Any:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        if rank > 0:
            x = torch.empty(shape, dtype=dtype)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = module(x)
        if rank < last:
            (sent or send)(y.detach(), rank + 1)
        if ends == "after yield":
            yield
        if rank < last:
            gradient = torch.empty(shape, dtype=dtype)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss_of(y).backward()
            gradient = torch.ones(shape, dtype=dtype)
        if rank > 0:
            send(x.grad if back == "gradient of x" else gradient, rank - 1)
        if ends == "before yield":
            yield

    return run_stage


def blocking(tensor: Any, to: int) -> None:
    dist.send(tensor, to)


def two_ranks_only(module: Any, x: Any, loss_of: Any, shape: Any, dtype: Any, send: Any) -> Any:
    if dist.get_rank() == 0:
        y = module(x)
        send(y.detach(), 1)
        yield
        gradient = torch.empty(shape, dtype=dtype)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        x = torch.empty(shape, dtype=dtype)
        dist.recv(x, 0)
        x.requires_grad_()
        loss = loss_of(module(x))
        yield
        loss.backward()
        send(x.grad, 0)


# ---- lab 04


def sharded_linear(results: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """ZeRO-3's linear layer, whose backward returns what it likes of both gradients."""

    class Sharded(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any, share: Any) -> Any:
            context.save_for_backward(x, share)
            return x @ gathered(share).T

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:  # type: ignore[override]
            x, share = context.saved_tensors
            share_gradient = torch.empty_like(share)
            dist.reduce_scatter_tensor(share_gradient, gradient.T @ x)
            return results(gradient @ gathered(share), share_gradient / dist.get_world_size())

    return Sharded.apply  # type: ignore[no-any-return]


def gathered(share: Any) -> Any:
    whole = share.new_empty(dist.get_world_size() * share.shape[0], share.shape[1])
    dist.all_gather_into_tensor(whole, share)
    return whole


def sharded_by_transpose(x: Any, share: Any) -> Any:
    class Sharded(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any, share: Any) -> Any:
            context.save_for_backward(x, share)
            return x @ gathered(share).T

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:  # type: ignore[override]
            x, share = context.saved_tensors
            share_gradient = torch.empty_like(share)
            dist.reduce_scatter_tensor(share_gradient, x.T @ gradient)
            return gradient @ gathered(share), share_gradient / dist.get_world_size()

    return Sharded.apply(x, share)


# ---- lab 06


def three_copies(x: Any, qkv: Any, project: Any, heads: int, axis: Any) -> Any:
    width = x.shape[-1]
    own = qkv.view(3, heads, width // heads, width).chunk(axis.size, 1)[axis.rank]
    q, k, v = (torch.einsum("btw,hdw->bhtd", copy(x, axis), part) for part in own)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return add_up(y @ project.chunk(axis.size, 1)[axis.rank].T, axis)


def result_of_all_reduce(x: Any, weight: Any, bias: Any, y_gradient: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = weight.chunk(size)[rank]
    gradient = dist.all_reduce(y_gradient @ own)
    return x @ own.T + bias.chunk(size)[rank], gradient


class EnterByGather(torch.autograd.Function):
    """Identity forward; backward sums by an all-gather."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        return sum(parts)


def summed_by_gather(x: Any, expand: Any, expand_bias: Any, project: Any, project_bias: Any) -> Any:
    y = F.gelu(EnterByGather.apply(x) @ expand.T + expand_bias) @ project.T
    dist.all_reduce(y)
    return y + project_bias


def logarithm_first(logits: Any, targets: Any, axis: Any) -> Any:
    words = logits.shape[-1]
    local = targets - axis.rank * words
    elsewhere = (local < 0) | (local >= words)
    largest = logits.detach().amax(-1)
    axis.all_reduce(largest, largest=True)
    shifted = logits - largest[..., None]
    total = shifted.exp().sum(-1)
    own = shifted.gather(-1, local.masked_fill(elsewhere, 0)[..., None])[..., 0].masked_fill(elsewhere, 0)
    return (add_up(total.log(), axis) - add_up(own, axis)).mean()


def half_block(early: bool, copies: int = 1, behind: int = 0) -> Callable[..., Any]:
    """Half a block, which gathers the tokens before or after the norm; how often what enters the region is copied."""

    def copied(h: Any, axis: Any, times: int) -> Any:
        for _ in range(times):
            h = copy(h, axis)
        return h

    def answer(x: Any, weight: Any, bias: Any, region: Any, states: Any, axis: Any) -> Any:
        if axis.sequence_parallel:
            h = gather_tokens(x, axis) if early else x
            h = F.layer_norm(h, x.shape[-1:], copy(weight, axis), copy(bias, axis))
            h = copied(h if early else gather_tokens(h, axis), axis, behind)
            return x + states.dropout(scatter_tokens(region(h), axis), 0.5, "split")
        h = add_up(region(copied(F.layer_norm(x, x.shape[-1:], weight, bias), axis, copies)), axis)
        return x + states.dropout(h, 0.5, "replicated")

    return answer


def six_regions(samples: int, tokens: int, width: int, ranks: int, number_bytes: int) -> float:
    return 6 * 2 * (ranks - 1) / ranks * samples * tokens * width * number_bytes


# ---- lab 09


def rebinding(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
    mean = weights.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    delta = anchor - mean
    momentum = decay * momentum + delta
    anchor = anchor - rate * (delta + decay * momentum)
    weights.copy_(anchor)


def neighbouring_steps(norms: Any, beta2: float, threshold: float) -> int:
    delta = round(1 / (1 - beta2))
    for t in range(delta, len(norms)):
        a, b = norms[t - 1], norms[t]
        if min(a, b) / max(a, b) >= threshold:
            return t
    return len(norms)


# ---- lab 10


def weighted_by_logits(logits: Any, k: int) -> Any:
    weights, chosen = logits.topk(k)
    return (weights / weights.sum(-1, keepdim=True) if k > 1 else weights), chosen


def mixed_without_mask(
    x: Any, weights: Any, chosen: Any, places: Any, experts: Any, shape: tuple[int, int], read: str = "all"
) -> Any:
    buffer = x.new_zeros(*shape, x.shape[1])
    buffer[chosen, places] = x.unsqueeze(1).expand(*chosen.shape, -1)
    seen = (places >= 0) if read == "placed" else torch.ones_like(places)
    return ((weights * seen).unsqueeze(-1) * experts(buffer)[chosen, places]).sum(1)


# ---- lab 11


def mixed_without_alpha(student: Any, teacher: Any, labels: Any, temperature: float, alpha: float) -> Any:
    p, log_q = (teacher.detach() / temperature).softmax(-1), (student / temperature).log_softmax(-1)
    soft = temperature**2 * F.kl_div(log_q, p, reduction="batchmean")
    known = labels >= 0
    if not known.any():
        return soft
    return alpha * soft + (1 - alpha) * F.cross_entropy(student[known], labels[known])


def unsigned(x: Any, low: float, high: float, bits: int) -> Any:
    scale = (high - low) / (2**bits - 1)
    zero = -round(low / scale)
    return (torch.round(x / scale) + zero).clamp(0, 2**bits - 1).to(torch.uint8), scale, zero


def cached(mask: Callable[[int, int], Any], repeat: bool = False) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any, cache: Any) -> Any:
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        keys, values = k, v
        if repeat:
            keys, values = (one.repeat(1, q.shape[1] // k.shape[1], 1, 1) for one in (k, v))
        allowed = mask(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed, enable_gqa=not repeat), (k, v)

    return attention


def ones(tokens: int, seen: int) -> Any:
    return torch.ones(tokens, seen, dtype=torch.bool)


def cached_of_all_heads(by_hand: bool) -> Callable[..., Any]:
    """Attention with a cache that supposes as many heads of keys as of queries."""

    def attention(q: Any, k: Any, v: Any, cache: Any) -> Any:
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        allowed = ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2])
        if not by_hand:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed), (k, v)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return scores.softmax(-1) @ v, (k, v)

    return attention


def integer_linear(scales: Callable[[Any], Any] = lambda w_scale: w_scale.T) -> Callable[..., Any]:
    def answer(x_q: Any, x_scale: float, x_zero: int, w_q: Any, w_scale: Any) -> Any:
        sums = x_q.int() @ w_q.int().T - x_zero * w_q.int().sum(1)
        return x_scale * scales(w_scale) * sums

    return answer


def inputs_by_outputs(x_q: Any, x_scale: float, x_zero: int, w_q: Any, w_scale: Any) -> Any:
    return x_scale * w_scale.T * (x_q.int() @ w_q.int() - x_zero * w_q.int().sum(0))


def lora(a: Callable[[int, int], Any], b: Callable[[int, int], Any]) -> type[nn.Module]:
    class LoRA(nn.Module):
        def __init__(self, linear: Any, rank: int, alpha: float) -> None:
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.a = nn.Parameter(a(rank, linear.in_features))
            self.b = nn.Parameter(b(linear.out_features, rank))
            self.scale = alpha / rank

        def forward(self, x: Any) -> Any:
            return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)

    return LoRA


def masked_before(model: Any, masks: Any, batches: Any, optimizer: Any) -> None:
    for x, y in batches:
        for name, mask in masks.items():
            model.get_parameter(name).data *= mask
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class TimesRounded(torch.autograd.Function):
    """Rounds; backward multiplies by what was rounded."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient * context.saved_tensors[0].round()


class Straight(torch.autograd.Function):
    """Rounds; backward lets the gradient pass."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient


def times_rounded(weight: Any, scale: Any, bits: int) -> Any:
    top = 2 ** (bits - 1) - 1
    return scale * TimesRounded.apply(weight / scale).clamp(-top, top)


def hardtanh(weight: Any, scale: Any, bits: int) -> Any:
    top = float(2 ** (bits - 1) - 1)
    return F.hardtanh(Straight.apply(weight.div(scale)), -top, top) * scale


# ---- lab 12


def every_fourth(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


def round_the_engine(engine: Any, batches: Any) -> None:
    for batch in batches:
        engine.backward(engine.module(batch))
        engine.step()


def pace_in_floats(t: int, start: int, end: int, steps: int, degree: int, multiple: int) -> float:
    return (start + (end - start) * min(t / steps, 1) ** (1 / degree)) // multiple * multiple


def whole_parameters(parameters: float, ranks: int, stage: int) -> float:
    share = parameters // ranks
    return [16 * parameters, 4 * parameters + 12 * share, 2 * parameters + 14 * share, 16 * share][stage]


# ---- mistakes that had no name


def summed_on(batches: Callable[..., Any]) -> Callable[..., Any]:
    """Buckets whose sum is never begun again."""

    def fill(gradient_bytes: Any, limit_bytes: int) -> Any:
        buckets, filling, held = [], [], 0
        for index in reversed(range(len(gradient_bytes))):
            filling.append(index)
            held += gradient_bytes[index]
            if held >= limit_bytes:
                buckets.append(filling)
                filling = []
        return batches(buckets, filling)

    return fill


def fitted(weights: Callable[[Any], Any]) -> Callable[..., Any]:
    def fit(n: Any, t: Any, size: int) -> Any:
        slope, intercept = np.polyfit(n, t, 1, w=weights(np.array(t)))
        return intercept / (2 * (size - 1)), slope * size / (2 * (size - 1))

    return fit


def longer_of_two(batch: int, size: int, image_s: float, gradients: Any, alpha_s: float, beta: float) -> Any:
    sending = sum(2 * (size - 1) * (alpha_s + beta * one / size) for one in gradients)
    alone = batch * image_s
    return alone / size / max(alone / size, sending), alone / max(alone, sending)


def bubble_twice(p: int, m: int, f: float, b: float) -> Any:
    return (m + 2 * (p - 1)) * (f + b), (p - 1) / (m + p - 1), (p - 1) / m


def scales_once(model: Any, names: Any, batches: Any, optimizer: Any, bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    scales = {name: model.get_parameter(name).detach().abs().amax(1, keepdim=True) / top for name in names}
    for x, y in batches:
        rounded = {
            name: scale * Straight.apply(model.get_parameter(name) / scale).clamp(-top, top)
            for name, scale in scales.items()
        }
        optimizer.zero_grad()
        F.cross_entropy(torch.func.functional_call(model, rounded, (x,)), y).backward()
        optimizer.step()


def from_smallest_to_largest(weight: Any, bits: int) -> Any:
    scale = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / (2**bits - 1)
    return (weight / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8), scale


def ticket_of_all(start: Any, trained: Any, mask: Any, rate: float) -> Any:
    found = torch.ones_like(mask).flatten()
    found[trained.abs().flatten().argsort()[: round(rate * int(mask.sum()))]] = 0.0
    found = found.view_as(mask)
    return found, start * found


def soft_of_unknown(student: Any, teacher: Any, labels: Any, temperature: float, alpha: float) -> Any:
    known = labels >= 0
    p, log_q = (teacher[~known] / temperature).softmax(-1), (student[~known] / temperature).log_softmax(-1)
    soft = temperature**2 * F.kl_div(log_q, p.detach(), reduction="batchmean")
    return alpha * soft + (1 - alpha) * F.cross_entropy(student[known], labels[known])


def bytes_without_master(precision: str, optimizer: str) -> int:
    weight, gradient, master = {
        "fp32": (4, 4, 0),
        "autocast": (4, 4, 0),
        "bf16": (2, 2, 4),
        "bf16_fp32_gradients": (2, 4, 4),
    }[precision]
    moments = {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]
    return weight + gradient + 4 * moments + (0 if optimizer == "sgd" else master)


def sharded(parameters: float, ranks: int, stage: int) -> float:
    order = (2, 12, 2)
    return float(16 * parameters - sum(order[:stage]) * parameters * (1 - 1 / ranks))


def passes(counts: Callable[[int], tuple[int, int, int, int]]) -> Callable[..., float]:
    return lambda w, n, stage, m: counts(m)[stage] * (n - 1) / n * w


UNNAMED: list[tuple[str, Any, str]] = [
    ("ring-time", lambda n, p, a, b: 2 * (p - 1) * a + 2 * n * b, "are those of two whole messages"),
    ("alpha-beta", fitted(lambda t: 1 / t**2), "multiplies each gap by its weight before it"),
    ("alpha-beta", fitted(lambda t: t**-0.5), "multiplies each gap by its weight before it"),
    ("efficiency", longer_of_two, "as if they overlapped"),
    ("mfu", lambda rate, flops, n, peak: 3 * flops * rate * n / peak, "You multiply by the number of processes"),
    ("buckets", summed_on(lambda b, f: [*b, f] if f else b), "the sum still holds those that have left"),
    ("pipeline-bubble", bubble_twice, "counts the bubble twice"),
    ("aware-training", scales_once, "You compute the scales once"),
    ("rows", from_smallest_to_largest, "comes from the smallest and the largest weight"),
    ("ticket", ticket_of_all, "those removed before are there again, and may be chosen"),
    ("mixed-loss", soft_of_unknown, "samples without a label only"),
    ("bytes-per-parameter", bytes_without_master, "With sgd the master copy is missing"),
    ("largest-batch", lambda taken, limit: int(limit // (taken(16) / 16)), "through the origin"),
    (
        "largest-batch",
        lambda taken, limit: max(0, int((limit - taken(8)) // ((taken(16) - taken(8)) / 8))),
        "add those of that point",
    ),
    ("block-activations", lambda s, b, h, a: 38 * s * b * h + 5 * a * s * s * b, "three times"),
    ("block-activations", lambda s, b, h, a: 34 * s * b * h + 7 * a * s * s * b, "the input of the softmax as well"),
    ("block-activations", lambda s, b, h, a: 34 * s * b * h + 3 * a * s * s * b, "one tensor of 2 bytes is missing"),
    (
        "data-parallel-bytes",
        lambda p, sample, batch, dp: 16 * p + (4 * p / dp if dp > 1 else 0) + sample * batch // dp,
        "You divide the buckets by dp",
    ),
    ("zero-states", sharded, "You shard the gradients before the optimizer's states"),
    ("zero-volume", passes(lambda m: (2 * m, 2, m + 1, 3 * m)), "In stage 0 you all-reduce with every micro-batch"),
    ("zero-volume", passes(lambda m: (2, 2, 2, 3 * m)), "In stage 2 you reduce once per step"),
]


WRONG: list[tuple[str, Any, str]] = [
    *UNNAMED,
    ("offload", by_address, "may begin at another address (data_ptr())"),
    ("offload", always_fetched, "unpack must give it back as it is"),
    ("average-gradients", rebound, "Work in place"),
    ("overlap", before_accumulation, "register_hook hands you the gradient before it is in parameter.grad"),
    ("sampler", hashed, "Python salts hash() of a text"),
    ("sampler", seed_times_epoch, "In epoch 0 the seed changes nothing"),
    ("sampler", indices_in_floats, "whole numbers, are expected"),
    ("zero-states", whole_parameters, "rounded to a whole number of parameters"),
    ("one-f-one-b", last_in_first_out, "backwards go by rising numbers"),
    ("memory-cap", under_a_smaller_cap, "use the memory there is"),
    ("stage-boundary", stage(ends="before yield"), "backward has run before yield"),
    ("stage-boundary", stage(back="what came"), "You hand the gradient of your output on as it came"),
    ("stage-boundary", stage(sent=blocking), "Before yield nothing has been sent by send"),
    ("stage-boundary", two_ranks_only, "Before yield nothing has been sent by send"),
    ("attention-heads", three_copies, "4 all-reduces are made, and two are enough"),
    ("shard-weights", sharded_linear(lambda of_x, of_share: (of_share, of_x)), "result 1, a tensor of shape [6, 24]"),
    ("shard-weights", sharded_linear(lambda of_x, of_share: of_x), "2 in all, but it returns 1"),
    ("shard-weights", sharded_by_transpose, "but 24 are handed over: both must be equal"),
    ("column-linear", result_of_all_reduce, "dist.all_reduce works in place and returns None itself"),
    ("vocabulary-loss", logarithm_first, "The logarithms of the ranks' sums are added up"),
    ("sequence-parallel", half_block(early=True), "x is gathered before the norm"),
    ("sequence-parallel", half_block(early=False, copies=2), "Does h go through copy twice"),
    ("sequence-parallel", half_block(early=False, behind=1), "is there a copy, or another sum, behind it"),
    ("layer-bytes", six_regions, "1.5 times too large"),
    ("outer-step", rebinding, "anchor and momentum stay as they were"),
    ("freeze-step", neighbouring_steps, "You compare neighbouring steps"),
    ("gate", weighted_by_logits, "The weights are logits"),
    ("mixture", mixed_without_mask, "leave these choices out, both ways"),
    ("mixture", partial(mixed_without_mask, read="placed"), "leave these choices out there, too"),
    ("pacing", pace_in_floats, "a whole number is asked for"),
    ("mixed-loss", mixed_without_alpha, "the soft loss still weighs alpha"),
    ("affine", unsigned, "one byte as well; but int8 is asked for"),
    ("kv-cache", cached(lambda n, t: ones(n, t).triu(t - n + 1)), "The mask is the other way round"),
    ("kv-cache", cached(lambda n, t: ones(n, t).tril(t - n - 1)), "A token does not see itself"),
    ("kv-cache", cached(lambda n, t: ones(n, t).tril(t - n), repeat=True), "repeat deals them out in turn"),
    ("kv-cache", cached(lambda n, t: ones(n, t).tril(t - n).float()), "Your mask is of numbers"),
    ("kv-cache", cached_of_all_heads(by_hand=False), "fails where they have fewer: with enable_gqa=True"),
    ("kv-cache", cached_of_all_heads(by_hand=True), "fails where they have fewer: with enable_gqa=True"),
    ("integer-linear", integer_linear(lambda w_scale: w_scale), "with w_scale.T your function is right"),
    ("integer-linear", inputs_by_outputs, "with w_q.T your function is right"),
    ("permutation", lambda e, b, p, order: (e[:, order], b[order], p[:, order]), "columns of the first layer, its inp"),
    ("permutation", lambda e, b, p, order: (e[order], b[order], p[order]), "rows of the second layer, its outputs"),
    ("permutation", lambda e, b, p, order: (e[:, order], b[order], p[order]), "In both layers you move the wrong"),
    ("lora", lora(torch.zeros, torch.randn), "A begins at zero and B at random"),
    ("lora", lora(torch.randn, torch.zeros), "standard deviation of 1, as torch.randn does"),
    ("lora", lora(lambda rank, inputs: torch.randn(rank, inputs) / rank**0.5, torch.zeros), "1/√rank"),
    ("pruned-training", masked_before, "Mask after the update, too"),
    ("straight-through", times_rounded, "multiplies the gradient by the rounded value"),
    ("straight-through", hardtanh, "a weight that is rounded to the largest whole number itself gets none"),
    ("accelerate-loop", every_fourth, "no optimizer makes an update"),
    ("deepspeed-loop", round_the_engine, "engine.module goes round the engine"),
]
RIGHT: list[tuple[str, Any]] = [
    ("overlap", gathered_in_hooks),
    ("stage-boundary", stage()),
    ("shard-weights", sharded_linear(lambda of_x, of_share: (of_x, of_share))),
    ("integer-linear", integer_linear()),
    ("one-all-reduce", summed_by_gather),
    ("sequence-parallel", half_block(early=False)),
    ("lora", lora(lambda rank, inputs: torch.randn(rank, inputs) / inputs**0.5, torch.zeros)),
    ("kv-cache", cached(lambda n, t: ones(n, t).tril(t - n))),
]


@pytest.mark.parametrize(("exercise_id", "answer", "words"), first_of_each(WRONG))
def test_judge_refuses_a_walked_answer_for_what_it_does(exercise_id: str, answer: Any, words: str) -> None:
    verdict = judge(EXERCISES[exercise_id], answer)
    assert verdict.state == "wrong"
    assert words in verdict.message


@pytest.mark.parametrize(("exercise_id", "answer"), RIGHT, ids=[one[0] for one in RIGHT])
def test_judge_accepts_a_walked_right_answer(exercise_id: str, answer: Any) -> None:
    assert judge(EXERCISES[exercise_id], answer).state == "right"


def test_judge_keeps_the_error_of_an_answer_that_no_repair_makes_right() -> None:
    def without_correction(x_q: Any, x_scale: float, x_zero: int, w_q: Any, w_scale: Any) -> Any:
        return x_scale * w_scale * (x_q.int() @ w_q.int().T)

    assert "Your function raised RuntimeError" in judge(EXERCISES["integer-linear"], without_correction).message


def test_a_factor_is_written_as_the_language_writes_it() -> None:
    def all_reduce_seconds(layer_bytes: Any, ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
        return sum(4 * (ranks - 1) * (alpha_s + beta_s_per_byte * one / ranks) for one in layer_bytes)

    use_language("fr")
    assert "1,33 fois trop grand" in judge(EXERCISES["zero-time"], all_reduce_seconds).message
    assert "1,5 fois trop grand" in judge(EXERCISES["layer-bytes"], six_regions).message
