"""Random text configurations of transformers: forecast, then trained in plain torch, and laid over one another.

    python benchmarks/text_configurations.py                                  # 40 of them: minutes on 2 cores
    python benchmarks/text_configurations.py --page docs/foreign_models.md    # and their part of the page
    python benchmarks/text_configurations.py --kinds bart mixtral

Classes are drawn from the mappings of transformers for causal, masked and translating models; each gets two small
layers, in the names that its configuration has. One that transformers itself cannot make so is left out; one that is
not forecast is counted, with the reason. The truth is the peak of torch's allocator in two steps of AdamW, by its
profiler.
"""

from __future__ import annotations

import inspect
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro
from foreign_models import profiled_peak_bytes
from rich.console import Console

from dlojz.base.errors import LabError
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.prediction.forecast import forecast

TOKENS = 64
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 128),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),  # a layer left out at random
    **{"moe_intermediate_size": 32, "sliding_window": 32, "vocab_size": 500},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "layer_types": None, "mlp_layer_types": None},
}
TITLE = "## Text models in plain torch"
PAGE = f"""{TITLE}

Written by `python benchmarks/text_configurations.py --page docs/foreign_models.md`: classes of transformers drawn at
random, two small layers each, two steps of AdamW on two texts of {TOKENS} tokens in plain torch, without the engines
and the tracker of this package; the peak is that of torch's CPU allocator, from its profiler.
"""


def drawn(seed: int) -> Iterator[tuple[str, str]]:
    """List all kinds of text models and their classes, in an order drawn at random."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    pairs = list(dict.fromkeys(pair for mapping in mappings for pair in mapping.items()))
    random.Random(seed).shuffle(pairs)
    for kind, names in pairs:
        yield kind, names if isinstance(names, str) else names[0]


def write_configuration(kind: str, name: str, folder: Path) -> bool:
    """Write a small configuration; False where transformers cannot make one, or its text is part of several models."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    fields = {*inspect.signature(made.__init__).parameters, *getattr(made, "__dataclass_fields__", ())}
    try:
        config = made(**{field: value for field, value in SMALL.items() if field in fields})
    except Exception as error:  # of any library's own kind
        print(f"{kind}: transformers makes none of these sizes: {type(error).__name__}", file=sys.stderr)
        return False
    if getattr(config, "text_config", None) is not None:
        return False
    config.architectures = [name]
    config.save_pretrained(folder)
    return True


def measured(kinds: tuple[str, ...], count: int, seed: int) -> Table:
    """Forecast and train so many configurations."""
    rows: list[tuple[str, ...]] = []
    errors: list[float] = []
    refused: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        for kind, name in drawn(seed):
            folder = Path(root) / f"{kind}-{name}"
            if len(rows) == count or (kinds and kind not in kinds) or not write_configuration(kind, name, folder):
                continue
            try:
                config = RunConfig.of(model=f"hf:{folder}", sequence_length=TOKENS, micro_batch=2, device="cpu")
                told_bytes = forecast(config).memory.peak_bytes or 0
            except LabError as refusal:
                refused.append(f"{kind}: {str(refusal).replace(root, '')[:160]}")
                print(f"not forecast: {refused[-1]}", file=sys.stderr)
                continue
            counted_bytes = profiled_peak_bytes(config)
            error = told_bytes / counted_bytes - 1
            errors.append(abs(error))
            rows.append((name, f"{told_bytes:,}", f"{counted_bytes:,}", f"{100 * error:+.2f} %"))
            print(*rows[-1], sep="  ", file=sys.stderr)
    note = (
        f"{len(rows)} models: median error {100 * statistics.median(errors):.2f} %, worst {100 * max(errors):.2f} %; "
        f"{len(refused)} more were drawn and are not forecast."
    )
    head = ("model", "predicted, bytes", "plain torch, bytes", "difference")
    return Table(head, tuple(rows), align="lrrr", notes=(note,))


def main(kinds: tuple[str, ...] = (), count: int = 40, seed: int = 20261130, page: Path | None = None) -> None:
    """Forecast, train, compare and print a line for each configuration."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    table = measured(kinds, count, seed)
    Console(width=130).print(table)
    if page is not None:
        above = page.read_text(encoding="utf-8").partition(TITLE)[0].rstrip()
        page.write_text(f"{above}\n\n{PAGE}\n{table.markdown()}\n", encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
