"""Exercises of lab 11 on serving and adapting a model: attention with a cache of keys and values, a LoRA layer.

The cache is judged by decoding a sequence in pieces against causal attention over all of it. A LoRA layer is judged by
what it does: it begins as the layer that it wraps, trains two small matrices only, and adds their scaled product.

Shape suffixes: B sequences, N heads, G key-value heads, T tokens, H width of a head, R rank.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import significant
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import expect_several, expect_tensor, normal

TEXTS = Texts(__file__)

Cache = tuple[Tensor, Tensor]
Way = Callable[..., Any]


def cached_attention(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
    """Compute causal attention of new tokens to those in the cache and to each other.

    Args:
        q_BNTH: queries of the new tokens.
        k_BGTH: their keys, of as many heads or fewer.
        v_BGTH: their values.
        cache: keys and values of all tokens before; None at the beginning of a sequence.

    Returns:
        The output, shaped like the queries, and the cache with the new tokens.

    Source: Shazeer 2019, "Fast Transformer Decoding" (arXiv 1911.02150), section 2.4.1.
    """
    if cache is not None:
        k_BGTH, v_BGTH = (torch.cat(pair, 2) for pair in zip(cache, (k_BGTH, v_BGTH), strict=True))
    tokens, key_tokens = q_BNTH.shape[2], k_BGTH.shape[2]
    # tril(d): query i sees keys 0 to i + d, and d is the number of cached tokens.
    allowed = torch.ones(tokens, key_tokens, dtype=torch.bool).tril(key_tokens - tokens)
    grouped = q_BNTH.shape[1] > k_BGTH.shape[1]
    output = F.scaled_dot_product_attention(q_BNTH, k_BGTH, v_BGTH, attn_mask=allowed, enable_gqa=grouped)
    return output, (k_BGTH, v_BGTH)


def _decoded(answer: Way, seed: int, heads: int, kv_heads: int, pieces: tuple[int, ...]) -> Tensor:
    """The outputs of all tokens, decoded in pieces."""
    width, total = 4, sum(pieces)
    q, k, v = (
        normal(10 * seed + tensor_index, 2, n, total, width)
        for tensor_index, n in enumerate((heads, kv_heads, kv_heads))
    )
    cache, outputs, start = None, [], 0
    for tokens in pieces:
        piece = slice(start, start + tokens)
        output, cache = expect_several(
            answer(q[:, :, piece], k[:, :, piece], v[:, :, piece], cache), "(output, cache)", 2
        )
        outputs.append(expect_tensor(output, "output", (2, heads, tokens, width)))
        _refuse_other_cache(cache, heads, kv_heads)
        start += tokens
    return torch.cat(outputs, 2)


def _refuse_other_cache(cache: Any, heads: int, kv_heads: int) -> None:
    tensors = cache if isinstance(cache, tuple | list) else ()
    if len(tensors) != 2 or not all(torch.is_tensor(tensor) and tensor.dim() == 4 for tensor in tensors):
        raise TEXTS.wrong("kv-cache", "the cache is no pair")
    if heads > kv_heads and any(tensor.shape[1] == heads for tensor in tensors):
        raise TEXTS.wrong("kv-cache", "keys and values repeated", heads=heads, kv_heads=kv_heads)


def _with_all_heads(answer: Way) -> Way:
    """The answer with keys and values of as many heads as the queries, of which its cache keeps one per group."""

    def way(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        groups = q_BNTH.shape[1] // k_BGTH.shape[1]
        k_BNTH, v_BNTH = (tensor.repeat_interleave(groups, 1) for tensor in (k_BGTH, v_BGTH))
        if cache is not None:
            cache = (cache[0].repeat_interleave(groups, 1), cache[1].repeat_interleave(groups, 1))
        output, new_cache = answer(q_BNTH, k_BNTH, v_BNTH, cache)
        # One of each group of equal heads: (B, N, T, H) back to (B, G, T, H).
        return output, (new_cache[0][:, ::groups], new_cache[1][:, ::groups])

    return way


_SEEN = "tril(key_tokens - tokens)"

KV_CACHE = TEXTS.exercise(
    "kv-cache",
    cached_attention,
    trial=_decoded,
    # Seed, heads, key-value heads, tokens of each call: a prompt, single tokens, several at once.
    cases=((1, 2, 2, (5, 1, 1, 1)), (2, 4, 2, (4, 3, 1)), (3, 3, 1, (1, 1, 6, 2))),
    mistakes={
        "the mask begins in the top left corner": f"{_SEEN} → tril()",
        "new tokens see those after them": f".{_SEEN} →",
        "a token does not see itself": (
            f"{_SEEN} → tril(max(key_tokens - tokens - 1, 0))",
            f"{_SEEN} → tril(key_tokens - tokens - 1)",
        ),
        "the mask is the other way round": (
            f"{_SEEN} → triu(key_tokens - tokens + 1)",
            f"{_SEEN} → triu(key_tokens - tokens)",
        ),
    },
    repairs={"fewer key-value heads are not shared": _with_all_heads},
)


INPUTS, OUTPUTS = 7, 5
WIDE_INPUTS, WIDE_RANK = 900, 4
SPREAD_TOLERANCE = 0.1
"""Relative; of 3,600 normal numbers the standard deviation is known to 1.2 %."""


def _refuse_other_lora(answer: Way) -> None:
    """Refuse a layer that is not W x + b + alpha / rank × B A x, with A and B trained and their product zero at first.

    Source: Hu et al. 2022, "LoRA" (arXiv 2106.09685), section 4.1.
    """
    for seed, rank, alpha in ((1, 2, 5.0), (2, 3, 1.5)):
        torch.manual_seed(seed)
        # x is a leaf, too: the gradient must pass through the frozen layer to those below.
        linear, x = nn.Linear(INPUTS, OUTPUTS), normal(seed, 6, INPUTS).requires_grad_()
        # Before the answer gets the layer, which it may change.
        linear_output = linear(x).detach()
        layer = answer(linear, rank, alpha)
        if not isinstance(layer, nn.Module):
            raise TEXTS.wrong("lora", "no class of a module")
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        _refuse_other_parameters(trained, rank)
        if not torch.allclose(layer(x), linear_output, atol=1e-5):
            raise TEXTS.wrong("lora", "another answer before any training")
        _refuse_other_beginning(trained, rank)
        # With B = 0 no factor would show: both matrices get numbers, as after a training.
        down, up = _filled(trained, rank, seed)
        _refuse_other_output(layer(x).detach() - linear_output, x.detach() @ down.T @ up.T, rank, alpha)
        _refuse_cut_gradients(layer, x, trained)
    torch.manual_seed(3)
    layer = answer(nn.Linear(WIDE_INPUTS, OUTPUTS), WIDE_RANK, 4.0)
    _refuse_other_spread(
        next(parameter for parameter in layer.parameters() if parameter.numel() == WIDE_RANK * WIDE_INPUTS)
    )


def _refuse_other_beginning(trained: list[Any], rank: int) -> None:
    """Refuse another matrix that begins at zero than B."""
    up = next(parameter for parameter in trained if parameter.numel() == rank * OUTPUTS)
    if bool(up.any()):
        raise TEXTS.wrong("lora", "A at zero and B at random")


def _refuse_other_spread(down: Tensor) -> None:
    """Refuse an A whose standard deviation is not 1/√inputs."""
    spread, reference_spread = float(down.detach().std()), WIDE_INPUTS**-0.5
    if math.isclose(spread, reference_spread, rel_tol=SPREAD_TOLERANCE):
        return
    for wrong_spread, key in (
        (1.0, "A is drawn with a deviation of 1"),
        (WIDE_RANK**-0.5, "A is drawn with a deviation of 1/√rank"),
        ((3 * WIDE_INPUTS) ** -0.5, "A is drawn with a deviation of 1/√(3 × inputs)"),
        (1 / WIDE_INPUTS, "A is drawn with a deviation of 1/inputs"),
    ):
        if math.isclose(spread, wrong_spread, rel_tol=SPREAD_TOLERANCE):
            raise TEXTS.wrong("lora", key)
    raise TEXTS.wrong(
        "lora",
        "another spread of A",
        WIDE_INPUTS=WIDE_INPUTS,
        spread=significant(spread),
        reference_spread=significant(reference_spread),
    )


def _refuse_other_parameters(trained: list[Any], rank: int) -> None:
    sizes = sorted(parameter.numel() for parameter in trained)
    if sizes == sorted((rank * INPUTS, rank * OUTPUTS)):
        if not any(bool(parameter.any()) for parameter in trained):
            raise TEXTS.wrong("lora", "both matrices at zero")
        return
    if INPUTS * OUTPUTS in sizes:
        raise TEXTS.wrong("lora", "the weight is still trained")
    if sizes == sorted((OUTPUTS, rank * INPUTS, rank * OUTPUTS)):
        raise TEXTS.wrong("lora", "a bias is trained, too")
    if not sizes:
        raise TEXTS.wrong("lora", "nothing is trained")
    raise TEXTS.wrong("lora", "matrices of other shapes", rank=rank, INPUTS=INPUTS, OUTPUTS=OUTPUTS, sizes=sizes)


def _filled(trained: list[Any], rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Fill both matrices, whichever way they lie; return them as (rank, inputs) and (outputs, rank)."""
    down, up = normal(seed + 20, rank, INPUTS), normal(seed + 30, OUTPUTS, rank)
    for parameter in trained:
        # The counts tell A from B: rank × 7 and 5 × rank.
        matrix = down if parameter.numel() == down.numel() else up
        parameter.data.copy_(matrix if parameter.shape == matrix.shape else matrix.T)
    return down, up


def _refuse_other_output(update: Tensor, product: Tensor, rank: int, alpha: float) -> None:
    if torch.allclose(update, alpha / rank * product, rtol=1e-3, atol=1e-4):
        return
    for factor, key in (
        (1.0, "the product without its factor"),
        (alpha, "the factor is alpha"),
        (1 / rank, "the factor is 1 / rank"),
        (rank / alpha, "the factor is upside down"),
        (0.0, "the product is not added"),
    ):
        if torch.allclose(update, factor * product, rtol=1e-3, atol=1e-4):
            raise TEXTS.wrong("lora", key)
    raise TEXTS.wrong("lora", "another factor than alpha / rank")


def _refuse_cut_gradients(layer: Any, x: Tensor, trained: list[Any]) -> None:
    output = layer(x).square().sum()
    gradients = torch.autograd.grad(output, [x, *trained], allow_unused=True) if output.requires_grad else [None] * 3
    if any(gradient is None for gradient in gradients[1:]):
        raise TEXTS.wrong("lora", "no gradient of the matrices")
    (right,) = torch.autograd.grad(_twin(layer, x).square().sum(), x)
    if gradients[0] is None or not torch.allclose(gradients[0], right, rtol=1e-3, atol=1e-3):
        raise TEXTS.wrong("lora", "another gradient of the input")


def _twin(layer: Any, x: Tensor) -> Tensor:
    """The same affine function, read off the layer's outputs: its gradient with respect to x is right."""
    with torch.no_grad():
        bias = layer(torch.zeros(1, INPUTS))
        # Row i of the output is the layer's answer to unit vector i: the whole of it is (inputs, outputs).
        weight = layer(torch.eye(INPUTS)) - bias
    return x @ weight + bias


LORA = TEXTS.exercise("lora", cases=(), then=_refuse_other_lora)
