"""Answers of lab 11 on loops, the cache and LoRA, as students write them: right ones, wrong ones with their words."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.labs.bank import Answer


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def aware(way: str) -> Answer:
    """A loop of QAT: `way` is what is wrong with it."""

    def low(weight: Any, bits: int) -> Any:
        high = 2 ** (bits - 1) - 1
        sizes = weight.abs() if way == "scale learns" else weight.detach().abs()
        scale = sizes.max() / high if way == "matrix" else sizes.max(dim=1, keepdim=True).values / high
        if way == "no gradient":
            return torch.round(weight / scale).clamp(-high, high) * scale
        return Through.apply(weight / scale).clamp(-high, high) * scale

    def answer(model: Any, names: Any, batches: Any, optimizer: Any, bits: int) -> None:
        weights = {name: weight for name, weight in model.named_parameters() if name in names}
        if way == "once":
            for weight in weights.values():
                weight.data = low(weight, bits).detach()
        for images, labels in batches:
            if way == "overwritten":
                for weight in weights.values():
                    weight.data = low(weight, bits).detach()
            rounded = {} if way in ("dense", "once", "overwritten") else {n: low(w, bits) for n, w in weights.items()}
            if way != "adds up":
                optimizer.zero_grad()
            F.cross_entropy(torch.func.functional_call(model, rounded, images), labels).backward()
            if way != "no step":
                optimizer.step()
            if way == "first":
                return
        if way == "at the end":
            for weight in weights.values():
                weight.data = low(weight, bits).detach()

    return answer


def aware_by_parametrization(model: Any, names: Any, batches: Any, optimizer: Any, bits: int) -> None:
    """Weights put into the modules for the forward pass, and gradients carried back by hand."""
    high = 2 ** (bits - 1) - 1
    for images, labels in batches:
        kept = {name: model.get_parameter(name).data.clone() for name in names}
        for name in names:
            scale = kept[name].abs().amax(1, keepdim=True) / high
            model.get_parameter(name).data = (kept[name] / scale).round().clamp(-high, high) * scale
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for name in names:
            model.get_parameter(name).data = kept[name]
        optimizer.step()


def held(way: str) -> Answer:
    """A loop under masks: `way` is what is wrong with it."""

    def prune(model: Any, masks: Any) -> None:
        for name, mask in masks.items():
            weight = model.get_parameter(name)
            own = 1 - mask if way == "inverted" else mask
            weight.data *= own

    def answer(model: Any, masks: Any, batches: Any, optimizer: Any) -> None:
        if way not in ("at the end", "not before", "dense"):
            prune(model, masks)
        for images, labels in () if way == "untrained" else batches:
            loss = F.cross_entropy(model(images), labels)
            if way != "adds up":
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if way == "gradients":
                for name, mask in masks.items():
                    model.get_parameter(name).grad *= mask
            optimizer.step()
            if way not in ("before", "gradients", "at the end", "dense"):
                prune(model, masks)
        if way == "at the end":
            prune(model, masks)

    return answer


def held_with_gradients(model: Any, masks: Any, batches: Any, optimizer: Any) -> None:
    """Masked gradients and masked weights: more than is needed."""
    for name, mask in masks.items():
        model.get_parameter(name).data.mul_(mask)
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for name, mask in masks.items():
            model.get_parameter(name).grad.mul_(mask)
        optimizer.step()
        for name, mask in masks.items():
            model.get_parameter(name).data.mul_(mask)


def cached(way: str = "right", by_hand: bool = False) -> Answer:
    """Attention with a cache: `way` is what is wrong with it."""

    def answer(q: Any, k: Any, v: Any, cache: Any) -> Any:
        new = (k, v)
        if cache is not None and way != "forgets":
            pairs = [(b, a) if way == "reversed" else (a, b) for a, b in zip(cache, new, strict=True)]
            k, v = (torch.cat(pair, dim=2) for pair in pairs)
        kept = new if way == "last" else (k, v)
        heads, t, s = q.shape[1], q.shape[2], k.shape[2]
        if way == "repeated":
            k, v = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (k, v))
        kept = (k, v) if way == "repeated" and cache is None else kept
        if way == "is_causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), kept
        seen = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        if way == "sees all":
            seen = torch.ones(t, s, dtype=torch.bool)
        if way == "not itself":
            seen = torch.ones(t, s, dtype=torch.bool).tril(max(s - t - 1, 0))
        if by_hand:
            k, v = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (k, v))
            scores = q @ k.transpose(2, 3) / (1.0 if way == "unscaled" else math.sqrt(q.shape[-1]))
            return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v, kept
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True), kept

    return answer


def lora(way: str = "right", written: str = "parameters") -> Answer:
    """A LoRA layer: `way` is what is wrong with it, `written` how it is written."""

    class Layer(nn.Module):
        def __init__(self, linear: Any, rank: int, alpha: float) -> None:
            super().__init__()
            self.linear = linear
            if way not in ("not frozen", "bias learns"):
                for one in linear.parameters():
                    one.requires_grad = False
            if way == "bias learns":
                linear.weight.requires_grad_(False)
            inputs, outputs = linear.in_features, linear.out_features
            down, up = torch.randn(rank, inputs) / inputs**0.5, torch.zeros(outputs, rank)
            if written == "uniform":
                down = (2 * torch.rand(rank, inputs) - 1) * (3 / inputs) ** 0.5
            if way == "both random":
                up = torch.randn(outputs, rank)
            if way == "both zero":
                down = torch.zeros(rank, inputs)
            if written == "up random":
                down, up = torch.zeros(rank, inputs), torch.randn(outputs, rank)
            if written == "transposed":
                down, up = down.T.contiguous(), up.T.contiguous()
            if written == "linears":
                self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
                nn.init.zeros_(self.b.weight)
                if way != "as it begins":
                    nn.init.normal_(self.a.weight, std=inputs**-0.5)
            elif way == "tensors":
                self.a, self.b = down, up
            else:
                self.a, self.b = nn.Parameter(down), nn.Parameter(up)
            right = alpha / rank
            self.factor = {"alpha": alpha, "no factor": 1.0, "1 / rank": 1 / rank, "inverse": rank / alpha}.get(
                way, right
            )

        def forward(self, x: Any) -> Any:
            if way == "no grad":
                with torch.no_grad():
                    own = self.linear(x)
            else:
                own = self.linear(x)
            if written == "linears":
                return own + self.factor * self.b(self.a(x))
            if written == "transposed":
                return own + self.factor * (x @ self.a @ self.b)
            if way == "alone":
                return self.factor * (x @ self.a.T @ self.b.T)
            if way == "relu":
                return own + self.factor * ((x @ self.a.T).relu() @ self.b.T)
            return own + self.factor * ((x @ self.a.T) @ self.b.T)

    return Layer


RIGHT: list[tuple[str, Answer]] = [
    ("aware-training", aware_by_parametrization),
    ("pruned-training", held_with_gradients),
    ("kv-cache", cached(by_hand=True)),
    *(("lora", lora(written=one)) for one in ("transposed", "linears", "uniform")),
]
WRONG: dict[str, list[tuple[Answer, str]]] = {
    "aware-training": [
        (aware("dense"), "trains without any rounding"),
        (aware("adds up"), "Gradients of earlier batches are added"),
        (aware("no step"), "have not moved at all"),
        (aware("overwritten"), "You write the rounded weights over"),
        (aware("once"), "You round once, before the loop"),
        (aware("at the end"), "you write the rounding into the weights at the end"),
        (aware("no gradient"), "No gradient reaches the matrices"),
        (aware("matrix"), "one scale for the whole matrix"),
        (aware("scale learns"), "also flows through the scale"),
        (aware("first"), "Only the first batch"),
    ],
    "pruned-training": [
        (held("before"), "Pruned weights grow back"),
        (held("gradients"), "You mask the gradients"),
        (held("at the end"), "prune it at the end"),
        (held("not before"), "The first forward pass still sees the dense weights"),
        (held("dense"), "the masks are not used"),
        (held("inverted"), "You keep what should go"),
        (held("adds up"), "Gradients of earlier batches are added"),
        (held("untrained"), "the rest is not trained"),
        (lambda *_: None, "have not moved at all"),
    ],
    "kv-cache": [
        (cached("is_causal"), "The mask begins in the top left corner"),
        (cached("sees all"), "several new tokens see those after them"),
        (cached("forgets"), "attend to each other only"),
        (cached("last"), "the keys and values of the last call only"),
        (cached("reversed"), "The new keys stand before those of the cache"),
        (cached("not itself"), "A token does not see itself"),
        (cached("unscaled", by_hand=True), "not divided by the square root"),
        (cached("repeated"), "repeated for all 4 heads"),
        (lambda q, k, v, cache: cached()(q, k, v, cache)[0], "2 results are expected"),
    ],
    "lora": [
        (lora(written="up random"), "A begins at zero and B at random"),
        (lora("as it begins", "linears"), "a standard deviation of 1/√(3 × inputs)"),
        (lora("not frozen"), "The weight of the linear layer is still trained"),
        (lora("bias learns"), "A bias is trained, too"),
        (lora("both random"), "Before any training the layer must answer as the linear layer"),
        (lora("both zero"), "Both matrices begin at zero"),
        (lora("tensors"), "Nothing is trained"),
        (lora("alpha"), "multiplied by alpha, and not by alpha / rank"),
        (lora("no factor"), "without its factor"),
        (lora("1 / rank"), "and not 1 / rank"),
        (lora("inverse"), "upside down"),
        (lora("alone"), "Before any training the layer must answer as the linear layer"),
        (lora("relu"), "with nothing between"),
        (lora("no grad"), "passes on to the layers below"),
        (lambda linear, rank, alpha: 3, "A class that makes an nn.Module"),
    ],
}
