"""Assumptions about a model of transformers: the type of its weights and its attention, where a config.json names them.

Weights are random, in the type of the run's precision; an attention that only a GPU has is forecast as PyTorch's.
"""

from typing import Any

from dlojz.base.language import say

_DTYPE = ("dtype", "torch_dtype")
_ATTENTION = ("attn_implementation", "_attn_implementation")


def attention_of(content: dict[str, Any]) -> str | None:
    """Return the attention that a configuration names, if any."""
    named = next((content[key] for key in _ATTENTION if content.get(key)), None)
    return named if isinstance(named, str) else None


def assumptions_note(content: dict[str, Any]) -> str:
    """Say what of a configuration is forecast as the run has it: the type of the weights, and the attention."""
    return _dtype_note(content) + _attention_note(content)


def _dtype_note(content: dict[str, Any]) -> str:
    """Say that weights are in the type of the run's precision, where a configuration has others, quantized or not."""
    named = next((content[key] for key in _DTYPE if content.get(key)), None)
    if quantized := content.get("quantization_config"):
        named = quantized.get("quant_method", "quantization_config") if isinstance(quantized, dict) else quantized
    if named is None or named in ("auto", "float32"):
        return ""
    return say(
        en=f", weights as --precision says (config.json: {named})",
        fr=f", poids selon --precision (config.json : {named})",
    )


def _attention_note(content: dict[str, Any]) -> str:
    """Say which attention is forecast, where a configuration names one."""
    attention = attention_of(content)
    if attention is None:
        return ""
    if attention in ("eager", "sdpa"):
        return say(en=f", {attention} attention", fr=f", attention {attention}")
    if "flash" in attention:
        return say(
            en=f", {attention} counted as SDPA, whose fused kernel keeps the same tensors",
            fr=f", {attention} compté comme SDPA, dont le noyau fusionné garde les mêmes tenseurs",
        )
    return say(
        en=f", with its default attention instead of {attention}",
        fr=f", avec son attention par défaut au lieu de {attention}",
    )
