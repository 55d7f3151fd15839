"""Plans of tensor parallelism for models from elsewhere: what is found, what is refused, and what a rank computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.building import spec, tensor_plan
from dlojz.models.foreign.tensor_regions import Region, own_columns
from dlojz.prediction.shapes import pattern_of, tensor_share_rows
from dlojz.runnable import check_runnable
from tests.models import own_heads, own_models

OWN = str(Path(own_heads.__file__))
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "llama": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 16},
    },
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "t5": {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2},
    "phi3": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0},
    },
}


def configuration(folder: Path, kind: str, **changed: int) -> str:
    file = folder / f"{kind}.json"
    file.write_text(json.dumps({"model_type": kind, "vocab_size": 256, **TINY[kind], **changed}))
    return f"hf:{file}"


def found(name: str, ranks: int = 2, pattern: str = "") -> tuple[Region, ...]:
    entry = spec(name)
    return tensor_plan(entry.name, entry.image_size or entry.sequence_length or 0, entry.num_classes, ranks, pattern)


def briefly(region: Region) -> tuple[str, str, int]:
    parts = [f"{one.path} {'+'.join(map(str, one.parts))}" for one in region.columns]
    return ", ".join(parts), region.row.path, region.heads


@pytest.mark.parametrize(
    ("kind", "regions"),
    [
        ("gpt2", [("attn.c_attn 32+32+32", "attn.c_proj", 4), ("mlp.c_fc 128", "mlp.c_proj", 0)]),
        (
            "llama",
            [
                ("self_attn.q_proj 32, self_attn.k_proj 16, self_attn.v_proj 16", "self_attn.o_proj", 4),
                ("mlp.gate_proj 48, mlp.up_proj 48", "mlp.down_proj", 0),
            ],
        ),
        (
            "bert",
            [
                (
                    "attention.self.query 32, attention.self.key 32, attention.self.value 32",
                    *("attention.output.dense", 4),
                ),
                ("intermediate.dense 64", "output.dense", 0),
            ],
        ),
        ("t5", [("layer.1.DenseReluDense.wi 64", "layer.1.DenseReluDense.wo", 0)]),  # a bias of all heads
        (
            "phi3",
            [
                ("self_attn.qkv_proj 32+16+16", "self_attn.o_proj", 4),
                ("mlp.gate_up_proj 48+48", "mlp.down_proj", 0),
            ],
        ),
    ],
)
def test_transformers_regions_are_found(tmp_path: Path, kind: str, regions: list[tuple[str, str, int]]) -> None:
    plan = found(configuration(tmp_path, kind))
    first = plan[0].block
    assert [briefly(region) for region in plan if region.block == first] == regions
    assert len(plan) == (4 if kind == "t5" else 2 * len(regions))


def test_timm_s_vit_has_its_heads_divided() -> None:
    plan = found("timm:vit_small_patch16_224")
    assert len(plan) == 24 and briefly(plan[0]) == ("attn.qkv 384+384+384", "attn.proj", 6)
    assert ("attn", "num_heads", 3) in plan[0].settings
    assert [one.row.path for one in found("timm:vit_tiny_patch16_224", 2, "mlp")] == ["mlp.fc2"] * 12


def test_tensor_plan_splits_a_fused_projection_as_its_block_reads_it() -> None:
    """Queries, keys and values one after the other, or head by head; the norm within the heads sums its gradient."""
    plain, interleaved = found(f"{OWN}:build")[0], found(f"{OWN}:interleaved")[0]
    assert briefly(plain) == ("qkv 32+32+32", "out", 4) and briefly(interleaved) == ("qkv 96", "out", 4)
    assert plain.settings == (("", "n_heads", 2),) and plain.inner == ("norm_head.bias", "norm_head.weight")
    assert own_columns((4, 2), 2, 1).tolist() == [2, 3, 5]


@pytest.mark.parametrize(
    ("name", "tp", "english", "french"),
    [
        ("timm:vit_tiny_patch16_224", 2, "divide the 3 heads .* use tp=3, or leave", "les 3 têtes .* tp=3, ou"),
        (f"{OWN}:build", 3, "4 heads before layers.0.out .* use tp=2 or tp=4, or leave", "prenez tp=2 ou tp=4, ou"),
        (f"{OWN}:mixing", 2, "no two linear layers were found .* use tp=1", "aucune paire de couches .* tp=1"),
        (f"{own_models.__file__}:shared", 2, "no two linear layers were found", "aucune paire de couches linéaires"),
    ],
)
def test_tensor_plan_refuses_what_cannot_be_split(name: str, tp: int, english: str, french: str) -> None:
    for language, words in (("en", english), ("fr", french)):
        use_language(language)  # type: ignore[arg-type]
        with pytest.raises(LabError, match=words) as refused:
            found(name, tp)
        assert "\n" not in str(refused.value)
    with pytest.raises(LabError):
        check_runnable(RunConfig.of(model=name, tp=tp))


def test_a_plan_can_be_written(tmp_path: Path) -> None:
    """In the model's file, or with a module; it is proved like one that is found."""
    file = tmp_path / "planned.py"
    start = "from tests.models.own_heads import build, mixing, example_inputs\n"
    file.write_text(start + 'tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}\n')
    rows = tensor_share_rows(RunConfig.of(model=f"{file}:build", tp=2))
    assert [(row.layers, row.style, row.number) for row in rows] == [
        *(("layers.*.up", "colwise", 2), ("layers.*.down", "rowwise", 2), ("", "whole", 12)),
    ]
    with pytest.raises(LabError, match="mixes the parts: leave them whole"):
        found(f"{file}:mixing")
    module, batch = own_heads.build(), own_heads.example_inputs()
    mlp = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    whole, planned = (dlojz.predict(module, batch, tp=2, tp_plan=plan) for plan in (None, mlp))
    whole_bytes, planned_bytes = (one.memory.weights_bytes for one in (whole, planned))
    assert whole_bytes is not None and planned_bytes is not None
    # Of both blocks, the half of qkv (96 × 33) and of out's weight (32 × 32), 4 bytes a number.
    assert planned_bytes - whole_bytes == 2 * 4 * (96 * 33 + 32 * 32) // 2
    for plan, words in (
        ({"layers.*.up": "columns"}, "maps patterns of layers to colwise, rowwise, whole, but 'columns'"),
        ({"layers.*.up": "colwise"}, "says 'colwise' of layers.0.up, which is no linear layer of a repeated block"),
        ({"layers.*.none": "rowwise"}, "says 'rowwise' of layers.*.none"),
    ):
        with pytest.raises(LabError) as refused:
            dlojz.predict(module, batch, tp=2, tp_plan=plan)
        assert words in str(refused.value)


def test_rows_sum_to_the_states_of_a_rank() -> None:
    config = RunConfig.of(model=f"{OWN}:build", tp=2)
    rows = tensor_share_rows(config)
    assert sum(row.rank_bytes for row in rows) == dlojz.predict(config).memory.weights_bytes
    assert {row.layers: row.style for row in rows} == {
        **{"layers.*.norm_head": "inner", "layers.*.qkv": "colwise", "layers.*.out": "rowwise"},
        **{"layers.*.up": "colwise", "layers.*.down": "rowwise", "": "whole"},
    }
    assert pattern_of("stages.1.blocks.0.mlp.fc1") == "stages.*.blocks.*.mlp.fc1"


def test_finding_a_plan_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tensor_plan.cache_clear()
    found(f"{OWN}:build")
    assert torch.equal(torch.get_rng_state(), before)
