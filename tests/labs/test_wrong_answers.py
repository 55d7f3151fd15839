"""The bank of wrong answers: each must be refused for what is wrong with it; the references must pass.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dlojz.labs import lab00_getting_started, lab01_big_models
from dlojz.labs.lab01_big_models import exercises as attention_exercises
from dlojz.labs.lab01_big_models import exercises as cost_exercises
from dlojz.labs.lab01_big_models import exercises as position_exercises
from dlojz.labs.lab01_big_models import exercises as vision_exercises
from tests.labs.bank import BankTests, detached

EXERCISES = {exercise.id: exercise for exercise in (*lab00_getting_started.EXERCISES, *lab01_big_models.EXERCISES)}


def forgot_return(*arguments: Any) -> None:
    sum(range(3))


def last_gap(losses: list[float], reference: list[float]) -> float:
    if len(losses) != len(reference):
        raise ValueError("lengths")
    return abs(losses[-1] / reference[-1] - 1)


def silent_about_lengths(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, reference))  # noqa: B905 - the mistake itself


def signed_gap(losses: list[float], reference: list[float]) -> float:
    return max(a / b - 1 for a, b in zip(losses, reference, strict=True))


def absolute_gap(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def unscaled(q: Any, k: Any, v: Any) -> Any:
    return F.softmax(torch.einsum("td,sd->ts", q, k), dim=1) @ v


def scaled_by_width(q: Any, k: Any, v: Any) -> Any:
    return ((q @ k.T) / q.size(1)).softmax(dim=1) @ v


def softmax_over_queries(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.T / math.sqrt(q.size(1)), dim=0) @ v


def no_softmax(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.T / math.sqrt(q.size(1))) @ v


def weights_only(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.T / math.sqrt(q.size(1)), dim=1)


def keys_not_transposed(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k / math.sqrt(q.size(1)), dim=1) @ v


def one_head(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    q, k, v = (x @ qkv).split(x.shape[1], dim=1)
    return unscaled(q / math.sqrt(x.shape[1]), k, v) @ out


def each_head(x: Any, qkv: Any, num_heads: int, scale: float) -> list[Any]:
    q, k, v = (x @ qkv).split(x.shape[1], dim=1)
    width = x.shape[1] // num_heads
    cuts = [slice(n * width, (n + 1) * width) for n in range(num_heads)]
    return [unscaled(q[:, cut] / scale, k[:, cut], v[:, cut]) for cut in cuts]


def no_output_projection(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    return torch.cat(each_head(x, qkv, num_heads, math.sqrt(x.shape[1] // num_heads)), dim=1)


def full_width_scale(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    return torch.cat(each_head(x, qkv, num_heads, math.sqrt(x.shape[1])), dim=1) @ out


def heads_viewed(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    tokens, width = x.shape
    q, k, v = (part.contiguous().view(num_heads, tokens, width // num_heads) for part in (x @ qkv).chunk(3, dim=1))
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).reshape(tokens, width) @ out


def heads_not_transposed_back(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    heads = torch.stack(each_head(x, qkv, num_heads, math.sqrt(x.shape[1] // num_heads)))
    return heads.reshape(x.shape) @ out


def plain_view(image: Any, patch: int) -> Any:
    _, height, width = image.shape
    return image.view(height * width // patch**2, -1)


def loop_by_columns(image: Any, patch: int) -> Any:
    _, height, width = image.shape
    return torch.stack(
        [
            image[:, i : i + patch, j : j + patch].flatten()
            for j in range(0, width, patch)
            for i in range(0, height, patch)
        ]
    )


def channels_last(image: Any, patch: int) -> Any:
    _, height, width = image.shape
    return torch.stack(
        [
            image[:, i : i + patch, j : j + patch].permute(1, 2, 0).flatten()
            for i in range(0, height, patch)
            for j in range(0, width, patch)
        ]
    )


def still_folded(image: Any, patch: int) -> Any:
    return F.unfold(image[None], patch, stride=patch)[0]


def class_at_the_end(patches: Any, projection: Any, token: Any, position: Any) -> Any:
    return torch.vstack([patches @ projection, token]) + position


def class_without_position(patches: Any, projection: Any, token: Any, position: Any) -> Any:
    return torch.vstack([token, patches @ projection + position[1:]])


def no_class_token(patches: Any, projection: Any, token: Any, position: Any) -> Any:
    return patches @ projection + position[1:]


def no_position(patches: Any, projection: Any, token: Any, position: Any) -> Any:
    return torch.vstack([token, patches @ projection])


def bias_loop(table: Any, side: int, pick: Callable[..., Any]) -> Any:
    bias = torch.empty(side**2, side**2)
    for query in range(side**2):
        for key in range(side**2):
            rows, columns = query // side - key // side, query % side - key % side
            bias[query, key] = pick(table, rows, columns, side)
    return bias


def key_minus_query(table: Any, side: int) -> Any:
    return bias_loop(table, side, lambda table, rows, columns, side: table[side - 1 - rows, side - 1 - columns])


def rows_for_columns(table: Any, side: int) -> Any:
    return bias_loop(table, side, lambda table, rows, columns, side: table[columns + side - 1, rows + side - 1])


def negative_indices(table: Any, side: int) -> Any:
    return bias_loop(table, side, lambda table, rows, columns, side: table[rows, columns])


BANK: dict[str, list[tuple[Callable[..., Any], str]]] = {
    "global-batch": [
        (lambda micro_batch, micro_batches, dp: micro_batch * dp, "leave micro_batches out"),
        (lambda micro_batch, micro_batches, dp: micro_batch * micro_batches, "what one replica reads"),
        (lambda micro_batch, micro_batches, dp: micro_batch + micro_batches + dp, "add where"),
        (lambda micro_batch, micro_batches, dp: micro_batch * micro_batches // dp, "is expected"),
        (lambda micro_batch, micro_batches, dp: str(micro_batch * micro_batches * dp), "a number is expected"),
        (forgot_return, "returns nothing"),
    ],
    "steps-per-epoch": [
        (lambda num_samples, global_batch: math.ceil(num_samples / global_batch), "the sampler of the lab drops it"),
        (lambda num_samples, global_batch: num_samples / global_batch, "no fraction of a step"),
        (lambda num_samples, global_batch: 1 + num_samples // global_batch, "always add one step"),
        (lambda num_samples, global_batch: round(num_samples / global_batch), "round to the nearest"),
    ],
    "ring-bytes": [
        (lambda message_bytes, dp: message_bytes - message_bytes / dp, "That is half of it"),
        (lambda message_bytes, dp: message_bytes * 2, "Nearly"),
        (lambda message_bytes, dp: (dp - 1) * message_bytes, "naive"),
        (lambda message_bytes, dp: message_bytes, "the message itself"),
    ],
    "same-training": [
        (last_gap, "last step only"),
        (absolute_gap, "absolute gap"),
        (signed_gap, "absolute value"),
        (silent_about_lengths, "strict=True"),
    ],
    "attention": [
        (detached(attention_exercises.attention), "no gradient reaches q"),
        (unscaled, "not divided by √D"),
        (scaled_by_width, "divided by D"),
        (softmax_over_queries, "softmax runs over the queries"),
        (no_softmax, "softmax is missing"),
        (weights_only, "product with the values"),
        (keys_not_transposed, "raised RuntimeError"),
        (lambda q, k, v: (q @ k.T).tolist(), "a torch tensor is expected"),
    ],
    "multi-head": [
        (detached(attention_exercises.multi_head), "no gradient reaches x"),
        (one_head, "one head of width D"),
        (no_output_projection, "output projection is missing"),
        (full_width_scale, "divide by √H"),
        (heads_viewed, "mixes tokens and heads"),
        (heads_not_transposed_back, "without transposing back"),
    ],
    "patches": [
        (plain_view, "runs of pixels"),
        (loop_by_columns, "column by column"),
        (channels_last, "channels come last"),
        (still_folded, "transpose the result"),
    ],
    "tokens": [
        (lambda *case: vision_exercises.embed(*case[:3], case[3].detach()), "no gradient reaches the positions"),
        (class_at_the_end, "at the end"),
        (class_without_position, "has got no position"),
        (no_class_token, "class token is missing"),
        (no_position, "bag of patches"),
    ],
    "block-parameters": [
        (lambda width: 12 * width**2, "the biases (9 D) and the two layer norms"),
        (lambda width: 4 * width**2 + 4 * width, "attention alone"),
        (lambda width: 12 * width**2 + 9 * width, "layer norms are missing"),
        (lambda width: 3 * width**2 + 3 * width + 8 * width**2 + 5 * width + 4 * width, "output projection"),
        (lambda width: 10 * width**2, "is expected"),
    ],
    "attention-cost": [
        (lambda num_tokens, width: 2 * width * num_tokens**2, "projections, 4 T D²"),
        (lambda num_tokens, width: 4 * width**2 * num_tokens, "grows with T²"),
        (lambda num_tokens, width: num_tokens * width * (3 * width + 2 * num_tokens), "output projection"),
        (lambda num_tokens, width: num_tokens * width * (4 * width + num_tokens), "two products with T² D"),
        (lambda num_tokens, width: num_tokens * width * (8 * width + 4 * num_tokens), "two per multiply-add"),
    ],
    "relative-bias": [
        (detached(position_exercises.relative_bias), "no gradient reaches the table"),
        (key_minus_query, "sign is reversed"),
        (rows_for_columns, "swapped"),
        (negative_indices, "an index starts at 0"),
        (lambda table, side: table, "is expected"),
    ],
}

REFERENCES: dict[str, Callable[..., Any]] = {
    "global-batch": lambda micro_batch, micro_batches, dp: dp * micro_batches * micro_batch,
    "steps-per-epoch": lambda num_samples, global_batch: (num_samples - num_samples % global_batch) / global_batch,
    "ring-bytes": lambda message_bytes, dp: 2 * message_bytes * (1 - 1 / dp),
    "same-training": lambda losses, reference: max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True)),
    "attention": lambda q, k, v: unscaled(q / math.sqrt(q.size(1)), k, v),
    "multi-head": lambda x, qkv, out, n: no_output_projection(x, qkv, out, n) @ out,
    "patches": lambda image, patch: F.unfold(image[None], patch, stride=patch)[0].T,
    "tokens": lambda patches, projection, token, position: torch.vstack([token, patches @ projection]) + position,
    "block-parameters": lambda width: 12 * width**2 + 13 * width,
    "attention-cost": lambda num_tokens, width: 2 * num_tokens * width * (2 * width + num_tokens),
    "relative-bias": lambda table, side: bias_loop(
        table, side, lambda table, rows, columns, side: table[rows + side - 1, columns + side - 1]
    ),
}


class TestBank(BankTests):
    exercises = EXERCISES
    wrong, right = BANK, REFERENCES


def test_the_references_are_what_the_models_do() -> None:
    from dlojz.models.coatnet import RelativeAttention

    side, table = 3, torch.randn(5, 5)
    layer = RelativeAttention(8, 8, side, 8)
    layer.position_bias.data = table[None]
    assert torch.equal(layer.relative_bias()[0], position_exercises.relative_bias(table, side))

    attention = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    x = torch.randn(5, 8)
    theirs = attention(x[None], x[None], x[None])[0][0]
    ours = attention_exercises.multi_head(x, attention.in_proj_weight.T, attention.out_proj.weight.T, 2)
    torch.testing.assert_close(ours, theirs)

    kernel = torch.randn(6, 3, 4, 4)
    image = torch.randn(3, 8, 12)
    patches = vision_exercises.cut_in_patches(image, 4)
    torch.testing.assert_close(patches @ kernel.flatten(1).T, F.conv2d(image[None], kernel, stride=4)[0].flatten(1).T)


def test_attention_costs_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    tokens, width = 10, 12
    with FlopCounterMode(display=False) as counter:
        cost_exercises.attention_multiply_adds(tokens, width)
        attention_exercises.multi_head(
            torch.randn(tokens, width), torch.randn(width, 3 * width), torch.randn(width, width), 3
        )
    assert counter.get_total_flops() == 2 * cost_exercises.attention_multiply_adds(tokens, width)
