"""The bank of wrong answers: each must be refused for what is wrong with it; the references must pass.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
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


def unscaled(q: Any, k: Any, v: Any) -> Any:
    return F.softmax(torch.einsum("td,sd->ts", q, k), dim=1) @ v


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


def class_at_the_end(patches: Any, projection: Any, token: Any, position: Any) -> Any:
    return torch.vstack([patches @ projection, token]) + position


def class_without_position(patches: Any, projection: Any, token: Any, position: Any) -> Any:
    return torch.vstack([token, patches @ projection + position[1:]])


def bias_loop(table: Any, side: int, pick: Callable[..., Any]) -> Any:
    bias = torch.empty(side**2, side**2)
    for query in range(side**2):
        for key in range(side**2):
            rows, columns = query // side - key // side, query % side - key % side
            bias[query, key] = pick(table, rows, columns, side)
    return bias


def negative_indices(table: Any, side: int) -> Any:
    return bias_loop(table, side, lambda table, rows, columns, side: table[rows, columns])


def gap_checked(losses: list[float], reference: list[float]) -> float:
    if len(losses) != len(reference):
        raise ValueError("two lengths")
    largest = 0.0
    for a, b in zip(losses, reference):  # noqa: B905 - the lengths are the same
        largest = max(largest, abs((a - b) / b))
    return largest


def gap_asserted(losses: list[float], reference: list[float]) -> float:
    assert len(losses) == len(reference), "two lengths"
    return sorted(abs(loss - reference[step]) / reference[step] for step, loss in enumerate(losses))[-1]


def gap_indexed(losses: list[float], reference: list[float]) -> float:
    steps = range(max(len(losses), len(reference)))
    return max(abs(losses[step] - reference[step]) / reference[step] for step in steps)


def gap_by_numpy(losses: list[float], reference: list[float]) -> Any:
    assert len(losses) == len(reference)
    return np.max(np.abs(np.array(losses) - np.array(reference)) / np.abs(reference))


def gap_by_torch(losses: list[float], reference: list[float]) -> Any:
    assert len(losses) == len(reference)
    ours, theirs = torch.tensor(losses), torch.tensor(reference)
    return ((ours - theirs) / theirs).abs().max()


def gap_in_double(losses: list[float], reference: list[float]) -> Any:
    assert len(losses) == len(reference)
    ours, theirs = torch.tensor(losses, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    return torch.linalg.vector_norm(ours / theirs - 1, ord=math.inf).item()


def by_exponentials(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum("td,sd->ts", q, k).div_(math.sqrt(q.size(1)))
    weights = (scores - scores.amax(1, keepdim=True)).exp()
    return weights @ v / weights.sum(1, keepdim=True)


def heads_in_one_view(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    q, k, v = F.linear(x, qkv.T).view(len(x), 3, num_heads, -1).permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(x.shape) @ out


def heads_stacked(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    heads = each_head(x, qkv, num_heads, math.sqrt(x.shape[1] // num_heads))
    return torch.stack(heads, dim=1).flatten(1) @ out


def heads_interleaved(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    q, k, v = (x @ qkv).view(len(x), num_heads, 3, -1).permute(2, 1, 0, 3)
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(x.shape) @ out


def heads_strided(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    q, k, v = (part.unflatten(1, (-1, num_heads)).permute(2, 0, 1) for part in (x @ qkv).chunk(3, dim=1))
    return F.scaled_dot_product_attention(q, k, v).permute(1, 2, 0).reshape(x.shape) @ out


def heads_unscaled(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    return torch.cat(each_head(x, qkv, num_heads, 1), dim=1) @ out


def heads_keys_first(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    q, k, v = qkv.chunk(3, dim=1)
    return heads_stacked(x, torch.cat([k, q, v], dim=1), out, num_heads)


def heads_averaged(x: Any, qkv: Any, out: Any, num_heads: int) -> Any:
    heads = each_head(x, qkv, num_heads, math.sqrt(x.shape[1] // num_heads))
    return torch.stack(heads).mean(0).repeat(1, num_heads) @ out


def tiles_unfolded(image: Any, patch: int) -> Any:
    tiles = image.unfold(1, patch, patch).unfold(2, patch, patch)
    return tiles.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def tiles_by_einsum(image: Any, patch: int) -> Any:
    channels, height, width = image.shape
    tiles = image.reshape(channels, height // patch, patch, width // patch, patch)
    return torch.einsum("crpsq->rscpq", tiles).reshape(-1, channels * patch * patch)


def tiles_transposed(image: Any, patch: int) -> Any:
    return tiles_unfolded(image, patch).view(-1, len(image), patch, patch).transpose(2, 3).flatten(1)


def tiles_of_a_square(image: Any, patch: int) -> Any:
    channels, height, _ = image.shape
    side = height // patch
    return image.reshape(channels, side, patch, side, patch).permute(1, 3, 0, 2, 4).reshape(side**2, -1)


def bias_by_windows(table: Any, side: int) -> Any:
    windows = [table[row : row + side, column : column + side] for row in range(side) for column in range(side)]
    return torch.stack([window.flip(0, 1).reshape(-1) for window in windows])


BANK: dict[str, list[tuple[Callable[..., Any], str]]] = {
    "global-batch": [
        (lambda micro_batch, micro_batches, dp: micro_batch * dp, "leave micro_batches out"),
        (lambda micro_batch, micro_batches, dp: micro_batch * micro_batches, "what one replica reads"),
        (lambda micro_batch, micro_batches, dp: micro_batch + micro_batches + dp, "add where"),
        (lambda micro_batch, micro_batches, dp: micro_batch * micro_batches // dp, "You divide by dp: more replicas"),
        (lambda micro_batch, micro_batches, dp: str(micro_batch * micro_batches * dp), "a number is expected"),
        (forgot_return, "returns nothing"),
        (lambda micro_batch, micro_batches, dp: micro_batches * dp, "should be"),
        (lambda micro_batch, micro_batches, dp: 64, "Your function returns 64 in every case of this check"),
        (lambda micro_batch, micro_batches, dp: (micro_batch + micro_batches) * dp, "You add micro_batch and"),
        (lambda micro_batch, micro_batches, dp: micro_batch**micro_batches * dp, "is expected, but your function"),
        (lambda micro_batch, micro_batches, dp: [micro_batch * micro_batches * dp] * 2, "function returns a list, but"),
    ],
    "steps-per-epoch": [
        (lambda num_samples, global_batch: math.ceil(num_samples / global_batch), "the sampler of the lab drops it"),
        (lambda num_samples, global_batch: num_samples / global_batch, "no fraction of a step"),
        (lambda num_samples, global_batch: 1 + num_samples // global_batch, "always add one step"),
        (lambda num_samples, global_batch: round(num_samples / global_batch), "round to the nearest"),
        (lambda num_samples, global_batch: max(1, num_samples // global_batch), "Where the samples do not fill a"),
        (lambda num_samples, global_batch: num_samples % global_batch, "% gives what is left over"),
        (lambda num_samples, global_batch: num_samples // global_batch - 1, "In every case your result is too small"),
        (lambda num_samples, global_batch: global_batch // num_samples, "You divide the batch by the samples"),
        (lambda num_samples, global_batch: (num_samples - 1) // global_batch, "Where the samples fill the batches"),
        (lambda num_samples, global_batch: num_samples // global_batch * global_batch, "That is the number of samples"),
    ],
    "ring-bytes": [
        (lambda message_bytes, dp: message_bytes - message_bytes / dp, "That is half of it"),
        (lambda message_bytes, dp: message_bytes * 2, "Nearly"),
        (lambda message_bytes, dp: (dp - 1) * message_bytes, "naive"),
        (lambda message_bytes, dp: message_bytes, "That is the message itself"),
        (lambda message_bytes, dp: 2 * (dp - 1) * message_bytes, "You send the whole message at every stage of the"),
        (lambda message_bytes, dp: message_bytes / dp, "That is one share, what a rank sends in a single stage"),
        (lambda message_bytes, dp: 2 * dp * (message_bytes / (dp - 1)), "division by"),
        (lambda message_bytes, dp: 2 * message_bytes / dp, "You count one stage in each half"),
        (lambda message_bytes, dp: (2 * dp - 1) * message_bytes / dp, "One stage too many"),
        (lambda message_bytes, dp: dp * (2 * (dp - 1) * message_bytes / dp), "or count what all dp ranks send"),
    ],
    "same-training": [
        (last_gap, "last step only"),
        (lambda losses, reference: max(abs(a - b) for a, b in zip(losses, reference, strict=True)), "absolute gap"),
        (lambda losses, reference: max(a / b - 1 for a, b in zip(losses, reference, strict=True)), "absolute value"),
        (
            lambda losses, reference: max(abs(a - reference[step]) / reference[step] for step, a in enumerate(losses)),
            "For 2 losses against 3",
        ),
        (
            lambda losses, reference: np.max(np.abs(np.array(losses) / np.array(reference) - 1)),
            "For 2 losses against 1 your function returns 0.5 and",
        ),
        (
            lambda losses, reference: max(abs(a - b) / a for a, b in zip(losses, reference, strict=True)),
            "You divide by your own loss",
        ),
        (
            lambda losses, reference: sum(abs(a / b - 1) for a, b in zip(losses, reference, strict=True)) / len(losses),
            "You average",
        ),
        (
            lambda losses, reference: sum(abs(a / b - 1) for a, b in zip(losses, reference, strict=True)),
            "You add the gaps of all steps",
        ),
        (lambda losses, reference: 100 * gap_checked(losses, reference), "In every case your result is 100 times too"),
        (
            lambda losses, reference: gap_checked(losses, reference) if len(losses) == len(reference) else None,
            "For 3 losses against 2 your function returns None and",
        ),
        (
            lambda losses, reference: gap_checked(losses, reference) if len(losses) == len(reference) else math.inf,
            "For 3 losses against 2 your function returns inf and",
        ),
        (
            lambda losses, reference: min(abs(a / b - 1) for a, b in zip(losses, reference, strict=True)),
            "You take the smallest gap",
        ),
        (
            lambda losses, reference: max(abs(a - b) for a, b in zip(losses, reference, strict=True)) / max(reference),
            "You divide the largest absolute gap by the largest loss",
        ),
        (
            lambda losses, reference: (
                abs(max(losses) - max(reference)) / max(reference) if len(losses) == len(reference) else 1 / 0
            ),
            "is expected, but your function returns",
        ),
        (
            lambda losses, reference: max(abs(round(a / b - 1, 3)) for a, b in zip(losses, reference, strict=True)),
            "You round the gap",
        ),
        (
            lambda losses, reference: max(abs(a - b) / reference[0] for a, b in zip(losses, reference, strict=True)),
            "You divide every gap by the first loss",
        ),
    ],
    "attention": [
        (detached(attention_exercises.attention), "no gradient reaches q"),
        (unscaled, "not divided by √D"),
        (lambda q, k, v: ((q @ k.T) / q.size(1)).softmax(dim=1) @ v, "divided by D"),
        (lambda q, k, v: torch.softmax(q @ k.T / math.sqrt(q.size(1)), dim=0) @ v, "softmax runs over the queries"),
        (lambda q, k, v: (q @ k.T / math.sqrt(q.size(1))) @ v, "softmax is missing"),
        (lambda q, k, v: torch.softmax(q @ k.T / math.sqrt(q.size(1)), dim=1), "product with the values"),
        (lambda q, k, v: torch.softmax(q @ k / math.sqrt(q.size(1)), dim=1) @ v, "raised RuntimeError"),
        (lambda q, k, v: (q @ k.T).tolist(), "a torch tensor is expected"),
        (lambda q, k, v: by_exponentials(k, q, v), "mat1 and mat2 shapes cannot be multiplied (7x3 and"),
        (lambda q, k, v: by_exponentials(q, k, k), "You take the mean of the keys"),
        (lambda q, k, v: torch.softmax(q @ k.T / math.sqrt(len(q)), dim=1) @ v, "You divide by the square root of the"),
        (lambda q, k, v: torch.softmax(q @ k.T, dim=1) @ v / math.sqrt(q.size(1)), "You divide after the softmax"),
        (lambda q, k, v: torch.sigmoid(q @ k.T / math.sqrt(q.size(1))) @ v, "A sigmoid treats each score by itself"),
        (lambda q, k, v: torch.softmax(q @ k.T * math.sqrt(q.size(1)), dim=1) @ v, "The scores are multiplied by √D;"),
        (lambda q, k, v: v[(q @ k.T).argmax(1)], "the value of its best key alone"),
        (lambda q, k, v: torch.softmax((q @ k.T / math.sqrt(q.size(1))).tril(), dim=1) @ v, "Your scores are masked"),
        (
            lambda q, k, v: torch.softmax((q @ k.T / math.sqrt(q.size(1))).flatten(), dim=0).view(len(q), -1) @ v,
            "One softmax runs over all scores together",
        ),
        (lambda q, k, v: by_exponentials(q, k, v).T, "The result is transposed"),
        (lambda q, k, v: by_exponentials(q, k, v.detach()), "The values are right, but no gradient reaches v"),
        (lambda q, k, v: by_exponentials(q, k.detach(), v), "The values are right, but no gradient reaches k"),
    ],
    "multi-head": [
        (detached(attention_exercises.multi_head), "no gradient reaches x"),
        (one_head, "one head of width D"),
        (no_output_projection, "output projection is missing"),
        (full_width_scale, "divide by √H"),
        (heads_viewed, "mixes tokens and heads"),
        (heads_not_transposed_back, "without transposing back"),
        (heads_interleaved, "You cut the columns head by head, each with its query,"),
        (heads_strided, "A head takes every N-th column"),
        (heads_unscaled, "The scores are not divided by √H, the square root of a"),
        (heads_keys_first, "Queries and keys are swapped"),
        (heads_averaged, "You average the heads"),
        (lambda x, qkv, out, n: torch.cat(each_head(x, qkv, n, math.sqrt(n)), dim=1) @ out, "You divide by the square"),
        (lambda x, qkv, out, n: no_output_projection(x, qkv, out, n) @ out.T, "The output projection is transposed"),
        (lambda x, qkv, out, n: heads_stacked(x, qkv, out, 2), "two heads whatever num_heads is"),
        (lambda x, qkv, out, n: heads_stacked(x, qkv, out.detach(), n), "are right, but no gradient reaches out"),
    ],
    "patches": [
        (plain_view, "runs of pixels"),
        (loop_by_columns, "column by column"),
        (channels_last, "channels come last"),
        (lambda image, patch: F.unfold(image[None], patch, stride=patch)[0], "transpose the result"),
        (lambda image, patch: F.unfold(image[None], patch)[0].T, "Your patches overlap"),
        (tiles_transposed, "Each patch is transposed"),
        (tiles_of_a_square, "shape '[3, 2, 4, 2, 4]' is invalid for input of size"),
        (
            lambda image, patch: tiles_unfolded(image, patch).view(-1, len(image), patch, patch),
            "The values are right and in the right order, but the",
        ),
        (lambda image, patch: tiles_unfolded(image, patch)[:-1], "The rows are right, but the last ones are missing"),
        (lambda image, patch: tiles_unfolded(image, patch).flip(0), "The rows are right, but in reverse order"),
        (lambda image, patch: tiles_unfolded(image[:1], patch), "Only the first channel is there"),
        (lambda image, patch: tiles_unfolded(image, 4), "The shape is (2, 16), but (15, 4) is expected"),
        (lambda image, patch: tiles_unfolded(image, patch).flatten(), "The values are right and in the right order,"),
    ],
    "tokens": [
        (lambda *case: vision_exercises.embed(*case[:3], case[3].detach()), "no gradient reaches the positions"),
        (class_at_the_end, "at the end"),
        (class_without_position, "has got no position"),
        (lambda patches, projection, token, position: patches @ projection + position[1:], "class token is missing"),
        (lambda patches, projection, token, position: torch.vstack([token, patches @ projection]), "bag of patches"),
        (lambda a, w, token, position: torch.vstack([token, a @ w]) + position.roll(1, 0), "are shifted by one, and"),
        (lambda a, w, token, position: a @ w + token + position[1:], "You add the class token to every patch"),
        (lambda a, w, token, position: torch.vstack([token, a @ w]) * position, "You multiply by the positions"),
        (lambda a, w, token, position: torch.vstack([token + position[0], a @ w]), "The class token alone gets its"),
        (lambda a, w, token, position: torch.vstack([token, a @ w + position[:-1]]), "The positions are shifted by"),
        (lambda a, w, token, position: torch.vstack([token, a @ w]) + position[0], "Every token gets the first"),
        (lambda a, w, token, position: torch.vstack([token.detach(), a @ w]) + position, "gradient reaches the class"),
        (
            lambda a, w, token, position: torch.vstack([torch.zeros_like(token), a @ w]) + position,
            "The place of the class token is kept, but zeros stand",
        ),
        (
            lambda a, w, token, position: torch.hstack([token, (a @ w).flatten()]).view_as(position) - position,
            "You take the positions away",
        ),
    ],
    "block-parameters": [
        (lambda width: 12 * width**2, "the biases (9 D) and the two layer norms"),
        (lambda width: 4 * width**2 + 4 * width, "attention alone"),
        (lambda width: 12 * width**2 + 9 * width, "so many have the two layer norms"),
        (lambda width: 3 * width**2 + 3 * width + 8 * width**2 + 5 * width + 4 * width, "output projection"),
        (lambda width: 10 * width**2, "2 D² are missing"),
        (lambda width: 12 * width**2 + 11 * width, "One layer norm is missing, or each has lost its shift"),
        (lambda width: 12 * width**2 + 4 * width, "The biases are missing"),
        (lambda width: 8 * width**2 + 5 * width, "That is the MLP alone"),
        (lambda width: 12 * width**2 + 10 * width, "The bias of queries, keys and values, 3 D, is missing"),
        (lambda width: 12 * width**2 + 15 * width, "One layer norm too many"),
        (lambda width: 12 * 768**2 + 13 * 768, "Your function returns 7,087,872 in every case"),
        (lambda width: 12 * (12 * width**2 + 13 * width), "In every case your result is 12 times too large"),
        (lambda width: 12 * width**2 + 12 * width, "One bias of D numbers is missing"),
        (lambda width: 4 * (12 * width**2 + 13 * width), "In every case your result is 4 times too large"),
    ],
    "attention-cost": [
        (lambda num_tokens, width: 2 * width * num_tokens**2, "That is q kᵀ and the mean of the values"),
        (lambda num_tokens, width: 4 * width**2 * num_tokens, "grows with T²"),
        (lambda num_tokens, width: num_tokens * width * (3 * width + 2 * num_tokens), "output projection"),
        (lambda num_tokens, width: num_tokens * width * (4 * width + num_tokens), "two products with T² D"),
        (lambda num_tokens, width: num_tokens * width * (8 * width + 4 * num_tokens), "two per multiply-add"),
        (lambda t, d: 12 * t * d**2 + 2 * t**2 * d, "You count the MLP too"),
        (lambda t, d: 4 * d * t**2 + 2 * d**2 * t, "T and D are swapped"),
        (lambda t, d: 4 * t * d**2 + 2 * t * d, "Scores and mean grow with T²: every query meets every"),
        (lambda t, d: 4 * d**2 + 2 * t * d, "should be"),
        (lambda t, d: t * d**2 + 2 * t**2 * d, "You count one projection"),
        (lambda t, d: 4 * t * d**2 + 2 * t**2, "A score is a dot product of D terms, so T² D"),
    ],
    "relative-bias": [
        (detached(position_exercises.relative_bias), "no gradient reaches the table"),
        (negative_indices, "an index starts at 0"),
        (lambda table, side: table, "You return the table"),
        (lambda table, side: bias_by_windows(table, side).view(side, side, side, side), "The values are right and in"),
        (lambda table, side: bias_by_windows(table, side).T, "The sign is reversed"),
        (
            lambda table, side: bias_loop(
                table, side, lambda table, rows, columns, side: table[abs(rows), abs(columns)]
            ),
            "You take the distance, without its sign",
        ),
        (
            lambda table, side: bias_loop(
                table, side, lambda table, rows, columns, side: table[rows + side - 2, columns + side - 2]
            ),
            "The indices are one too small",
        ),
        (lambda table, side: bias_by_windows(table.T, side), "Rows and columns are swapped"),
        (
            lambda table, side: bias_loop(
                table, side, lambda table, rows, columns, side: table[rows + side, columns + side]
            ),
            "index 5 is out of bounds for dimension 1 with size",
        ),
        (
            lambda table, side: torch.stack(
                [table[i : i + side, j : j + side].flatten() for i in range(side) for j in range(side)]
            ),
            "You add the positions of query and key",
        ),
        (lambda table, side: bias_by_windows(table, side)[:side], "The rows are right, but the last ones are missing"),
        (
            lambda table, side: bias_loop(
                table, side, lambda table, rows, columns, side: table[rows + side - 1, side - 1]
            ),
            "Only the difference of rows counts",
        ),
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


OTHER_RIGHT_ANSWERS: list[tuple[str, Callable[..., Any]]] = [
    ("global-batch", lambda *sizes: np.prod(sizes)),
    ("global-batch", lambda *sizes: torch.tensor(sizes).prod()),
    ("global-batch", lambda micro_batch, micro_batches, dp: len(range(micro_batch)) * micro_batches * float(dp)),
    ("steps-per-epoch", lambda num_samples, global_batch: num_samples // global_batch),
    ("steps-per-epoch", lambda num_samples, global_batch: np.floor(num_samples / global_batch)),
    ("steps-per-epoch", lambda n, batch: torch.div(torch.tensor(n), batch, rounding_mode="floor")),
    ("ring-bytes", lambda message_bytes, dp: 2 * (dp - 1) * (message_bytes / dp)),
    ("ring-bytes", lambda message_bytes, dp: 2 * (dp - 1) * message_bytes // dp),
    ("ring-bytes", lambda message_bytes, dp: sum(message_bytes / dp for _ in range(2 * (dp - 1)))),
    ("ring-bytes", lambda message_bytes, dp: np.multiply(2 * (dp - 1) / dp, message_bytes)),
    ("same-training", gap_checked),
    ("same-training", gap_asserted),
    ("same-training", gap_indexed),
    ("same-training", gap_by_numpy),
    ("same-training", gap_by_torch),
    ("same-training", gap_in_double),
    ("attention", lambda q, k, v: torch.stack([torch.softmax(k @ query / len(query) ** 0.5, 0) @ v for query in q])),
    ("attention", lambda q, k, v: by_exponentials(q.double(), k.double(), v.double())),
    ("multi-head", heads_in_one_view),
    ("multi-head", lambda x, qkv, out, num_heads: heads_in_one_view(x.double(), qkv.double(), out.double(), num_heads)),
    ("patches", lambda image, patch: tiles_by_einsum(image.double(), patch)),
    ("tokens", lambda a, w, token, position: torch.vstack([token + position[0], torch.addmm(position[1:], a, w)])),
    ("tokens", lambda a, w, token, position: torch.cat((token[None], a @ w)).double() + position.double()),
    ("block-parameters", lambda width: np.polyval([12, 13, 0], width)),
    ("block-parameters", lambda width: 12.0 * width**2 + 13.0 * width),
    ("attention-cost", lambda t, d: np.dot([4, 2], [t * d**2, t**2 * d])),
    ("relative-bias", lambda table, side: bias_by_windows(table.double(), side)),
]


class TestBank(BankTests):
    exercises = EXERCISES
    wrong, right, others = BANK, REFERENCES, OTHER_RIGHT_ANSWERS


def test_multi_head_and_relative_bias_are_what_the_models_do() -> None:
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
