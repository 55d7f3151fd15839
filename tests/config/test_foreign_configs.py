"""Configurations of other programs: their keys, the runs that they mean, and what makes the programs stop."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.foreign_configs.foreign_documents import read_document, shown_value
from dlojz.config.foreign_configs.foreign_meaning import change_lines, foreign_run, named_sizes, programs, read_foreign
from dlojz.config.foreign_configs.shell_words import arithmetic, read_shell
from dlojz.hardware.decoder_size import DecoderSize

PUBLISHED = Path(__file__).with_name("foreign") / "published.txt"
_PARTS = re.split(r"^=== (\S+) \| .*\n", PUBLISHED.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
FILES = dict(zip(_PARTS[::2], _PARTS[1::2], strict=True))
LLAMA = {"model": "llama_3_8b", "sequence_length": 8192}

# File → program, what is given beside it, unknown keys, and fields of the layout, worked out by hand.
MEANT: dict[str, tuple[str, dict[str, Any], list[str], dict[str, Any]]] = {
    "gpt3-175b.sh": ("megatron", {"gpus": 1024}, [], {"dp": 8, "tp": 8, "pp": 16, "micro_batches": 192}),
    "gpt-yaml.yaml": ("megatron", {"gpus": 8}, [], {"dp": 8, "micro_batch": 2, "micro_batches": 8, "zero": 0}),
    # 128 / (8 · 1); sequence parallelism of one rank is none.
    "llama3-8b-fp8.sh": ("megatron", {}, [], {"dp": 8, "micro_batches": 16, "zero": 1, "sequence_parallel": False}),
    "mixtral-toy.sh": ("megatron", {}, [], {"dp": 2, "ep": 2, "micro_batches": 2}),
    # 48 nodes of 8: 384 = 8 · 4 · 12; 2048 / (8 · 2) = 128.
    "bloom-176b.slurm": (
        "megatron", {}, [],
        {"dp": 8, "tp": 4, "pp": 12, "micro_batches": 128, "zero": 1, "engine": "megatron-deepspeed"},
    ),
    "sc21-figure13.sh": ("megatron", {}, [], {"tp": 32, "pp": 2, "dp": 1, "checkpointing": "full"}),
    "sc21-145b.txt": ("megatron", {"gpus": 1536}, [], {"dp": 24, "micro_batches": 48, "checkpointing": "full"}),
    # 96 layers / (8 stages · 4) = 3 chunks.
    "korthikanti-175b.txt": ("megatron", {"gpus": 64}, [], {"chunks": 3, "schedule": "interleaved"}),
    "korthikanti-22b.txt": ("megatron", {"gpus": 8}, [], {"dp": 1, "tp": 8, "micro_batch": 4, "micro_batches": 1}),
    "korthikanti-1t.txt": ("megatron", {"gpus": 512}, [], {"dp": 1, "pp": 64, "sequence_parallel": True}),
    "nemo-llama2-70b.yaml": ("megatron", {}, [], {"dp": 4, "chunks": 20, "micro_batches": 32, "zero": 1}),
    "nemo-llama2-7b.yaml": ("megatron", {}, [], {"dp": 8, "micro_batches": 16}),
    "nemo-gpt3-175b.yaml": ("megatron", {}, [], {"dp": 4, "tp": 4, "pp": 8, "chunks": 6, "micro_batches": 64}),
    "titan-8b.toml": ("torchtitan", {"gpus": 64}, [], {"dp": 64, "zero": 3, "checkpointing": "selective"}),
    "titan-70b.toml": ("torchtitan", {"gpus": 64}, [], {"dp": 8, "tp": 8, "micro_batch": 8, "sequence_parallel": True}),
    "titan-405b.toml": ("torchtitan", {"gpus": 128}, [], {"dp": 16, "tp": 8, "micro_batch": 2}),
    "titan-registry.py": ("torchtitan", {"gpus": 64}, [], {"dp": 8, "tp": 8, "checkpointing": "full"}),
    "titan-8b-fsdp128.txt": ("torchtitan", {}, [], {"dp": 128, "micro_batch": 2, "micro_batches": 1}),
    "titan-8b-fsdp8.txt": ("torchtitan", {}, [], {"dp": 8, "micro_batch": 2}),
    "titan-70b-tp8.txt": ("torchtitan", {}, [], {"dp": 32, "tp": 8, "micro_batch": 16}),
    "ds-zero3.json": ("deepspeed", {**LLAMA, "gpus": 8}, [], {"zero": 3, "offload": "parameters", "micro_batch": 1}),
    "ds-auto.json": ("deepspeed", {**LLAMA, "gpus": 8}, [], {"zero": 3, "offload": "parameters"}),
    "ds-batch.json": ("deepspeed", {**LLAMA, "gpus": 8}, [], {"zero": 2, "micro_batch": 4, "micro_batches": 1}),
    "accelerate-fsdp2.yaml": ("accelerate", LLAMA, [], {"dp": 8, "zero": 3, "engine": "torch"}),
    "accelerate-zero3.yaml": ("accelerate", LLAMA, [], {"dp": 8, "zero": 3, "engine": "deepspeed"}),
    "accelerate-nd.yaml": ("accelerate", LLAMA, [], {"dp": 2, "cp": 4, "zero": 3}),
    "accelerate-megatron.yaml": ("accelerate", LLAMA, [], {"dp": 1, "tp": 2, "pp": 2, "checkpointing": "selective"}),
    "axolotl-8b-fsdp.yaml": ("axolotl", {"gpus": 8}, [], {"zero": 3, "micro_batch": 2, "micro_batches": 4}),
    "axolotl-70b-qlora.yaml": ("axolotl", {"gpus": 8}, [], {"zero": 3, "micro_batches": 4}),
    "axolotl-8b-lora.yml": ("axolotl", {"gpus": 8}, [], {"zero": 0, "micro_batch": 2}),
    "llamafactory-8b-lora.yaml": ("trainer", {"gpus": 8}, [], {"zero": 0, "micro_batches": 8}),
    "llamafactory-7b-full.yaml": ("trainer", {"gpus": 8}, [], {"zero": 3, "engine": "deepspeed", "micro_batches": 2}),
    "deepspeed-chat.sh": ("deepspeed_chat", {"gpus": 8}, [], {"zero": 3, "micro_batch": 4, "checkpointing": "full"}),
    "trainer-inline.json": ("trainer", {"gpus": 8}, [], {"zero": 2, "offload": "optimizer", "engine": "deepspeed"}),
    "ds-stage2.json": ("deepspeed", {**LLAMA, "gpus": 8}, [], {"zero": 2, "offload": "optimizer"}),
    # 32 nodes of 8, 256 / 4 replicas; 1024 / (64 · 2).
    "nemotron-15b.yaml": ("megatron", {}, [], {"dp": 64, "tp": 4, "micro_batches": 8, "sequence_parallel": True}),
    "trl-olympic.yaml": ("trainer", {"gpus": 8}, [], {"dp": 8, "micro_batch": 2, "micro_batches": 8}),
    "handbook-mistral.yaml": ("trainer", {"gpus": 8}, [], {"micro_batches": 4, "checkpointing": "full"}),
    "trainer-args.json": ("trainer", {}, [], {"dp": 8, "micro_batch": 4, "micro_batches": 2}),
    "run-clm.sh": ("trainer", {}, [], {"dp": 8, "micro_batch": 8, "micro_batches": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_foreign_run_of_public_configurations(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    program, overrides, unknown, layout = MEANT[name]
    config = read_foreign(tmp_path / name)
    assert config.program.name == program
    assert [meaning.key for meaning in config.meanings if meaning.status == "unknown"] == unknown
    run = foreign_run(config, **overrides)
    assert {field: run.layout[field] for field in layout} == layout
    assert run.failures == ()
    adapters = {"axolotl-70b-qlora.yaml": "QLoRA", "axolotl-8b-lora.yml": "LoRA", "llamafactory-8b-lora.yaml": "LoRA"}
    beside = (f"{adapters[name]} beside",) if name in adapters else ()  # of a name, whose config.json is not here
    assert tuple(text[: len(start)] for text, start in zip(run.undescribed, beside, strict=True)) == beside


def test_foreign_configs_are_at_least_thirty_and_all_programs_are_there() -> None:
    assert FILES.keys() == MEANT.keys()
    assert len(FILES) >= 30
    assert {program for program, *_ in MEANT.values()} == {
        name for name, program in programs().items() if program.signs
    }


PLAIN = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 2 "
STOPS = {
    "--tensor-model-parallel-size 3": "num-attention-heads 16 is no multiple of tensor-model-parallel-size 3",
    "--pipeline-model-parallel-size 5": "pp may be 1, 2, 3, 4, 6, 8, 12, 24",
    "--tensor-model-parallel-size 16 --pipeline-model-parallel-size 3": "gpus 64 is no multiple of",
    "--global-batch-size 200": "global-batch-size 200 is no multiple of micro-batch-size 2 × dp 64 = 128",
    "--num-virtual-stages-per-pipeline-rank 2": "num-virtual-stages-per-pipeline-rank 2 needs pp ≥ 2",
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4": "multiple of",
    "--expert-model-parallel-size 2": "needs experts ≥ 1",
    "--num-experts 6 --expert-model-parallel-size 4": "ep may be 1, 2, 3, 6",
    "--fp16 --bf16": "fp16 and bf16 are both on",
    "--tensor-model-parallel-size 16 --seq-length 1000 --sequence-parallel": "seq-length 1000 is no multiple of",
    "--num-experts 8 --tensor-model-parallel-size 2": "tensor-model-parallel-size 2 needs sequence_parallel ≥ 1",
    "--recompute-granularity full": "recompute-granularity full needs recompute_method ≥ 1",
    "--recompute-granularity selective --recompute-method uniform": "recompute_method are both on",
    "--max-position-embeddings 512": "seq-length 1024 needs max-position-embeddings 512 ≥ 1024",
    "--train-iters 10 --train-samples 640": "train_iters and train_samples are both on",
}


@pytest.mark.parametrize("words", STOPS)
def test_foreign_run_says_with_which_sizes_megatron_stops(words: str, tmp_path: Path) -> None:
    (tmp_path / "arguments.txt").write_text(PLAIN + words, encoding="utf-8")
    run = foreign_run(read_foreign(tmp_path / "arguments.txt"), gpus=64)
    assert any(STOPS[words] in sentence for sentence in run.failures), run.failures
    assert all("Megatron-LM/NeMo says, in substance: “" in sentence for sentence in run.failures)


def test_foreign_run_says_that_a_batch_of_deepspeed_and_degrees_of_torchtitan_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(FILES["ds-batch.json"], encoding="utf-8")
    (failure,) = foreign_run(read_foreign(tmp_path / "ds.json"), **LLAMA, gpus=16).failures
    # 4 · 1 · 16, where the file says 32.
    assert failure.startswith(
        "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 × dp 16 = 64. DeepSpeed says"
    )
    text = FILES["titan-8b.toml"].replace("shard_degree = -1", "shard_degree = 4")
    (tmp_path / "titan.toml").write_text(text, encoding="utf-8")
    (failure,) = foreign_run(read_foreign(tmp_path / "titan.toml"), gpus=8).failures
    assert failure.startswith("gpus 8 is not parallelism.data_parallel_shard_degree 4 = 4")


def test_foreign_run_shards_hybrid_fsdp_within_a_node(tmp_path: Path) -> None:
    """32 processes on 4 machines: states over 8 ranks, and 4 replicas of them."""
    path = tmp_path / "hybrid.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_machines: 4\nnum_processes: 32\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
    )
    run = foreign_run(read_foreign(path), **LLAMA)
    assert (run.layout["zero"], run.columns["zero_shards"]) == (3, 8)
    assert not any("hybrid" in text for text in run.assumed)


def test_read_shell_decides_conditions_and_runs_nothing(tmp_path: Path) -> None:
    script = read_shell(
        f"""#!/bin/bash
#SBATCH --nodes=4
N=${{SLURM_NNODES:-1}}
KIND="b"   # comment
A=$B
B=$A
if [[ "$KIND" == "a" ]]; then X=1
elif [ "$KIND" = b ] && [[ $N -gt 2 ]]; then X=$((N * (2 + 1)))
else X=3; fi
if [[ "$1" == "x" ]]; then Y=1; fi
for i in 1 2; do Z=1; done
ARGS=( --one 'a b' # not --this
  "--two $X" )
ARGS+=(--three $(touch {tmp_path}/made) `touch {tmp_path}/made`)
cat <<END
--not --these
END
FOO=1 torchrun train.py \\
  "${{ARGS[@]}}" --four $A ${{Q:-${{R:-7}}}} > log 2>&1
"""
    )
    assert script.variables["X"] == "12"
    assert "Y" not in script.variables and "Z" not in script.variables
    command = next(words for words in script.commands if "torchrun" in words)
    assert command[:6] == ["torchrun", "train.py", "--one", "a", "b", "--two"]
    assert command[6:8] == ["12", "--three"]
    # A variable that is made of itself has no value; what follows a redirection is no word.
    assert command[-3:] == ["--four", "$B", "7"]
    assert [text.split()[0] for text in script.unread] == ["if", "for"]
    assert list(tmp_path.iterdir()) == []


def test_arithmetic_computes_whole_numbers_alone() -> None:
    assert arithmetic("8*(2+1) - 10/3 % 2") == 23
    assert [arithmetic(text) for text in ("9**9**9", "1/0", "N*2", "__import__", "9" * 13, "(" * 150)] == [None] * 6


BAD: dict[str, tuple[bytes, str]] = {
    "empty.sh": (b" \n", "is empty"),
    "binary.yaml": (b"\xff\xfe\x00\x01", "it is no text"),
    "large.toml": (b"a" * (2**20 + 1), "is larger than 1048576 bytes"),
    "object.yaml": (b"a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "two.yaml": (b"a: 1\n---\nb: 2", "another document"),
    "deep.json": (b'{"a":' * 3000, "json"),
    "list.json": (b"[1]", "json: no key"),
    "other.toml": (b"[project]\nname = 'x'", "is of no program known here"),
    "bomb.yaml": (
        b"a: &a {x: 1}\n" + b"".join(b"%c: &%c {%s}\n" % (c, c, b", ".join(b"k%d: *%c" % (i, c - 1) for i in range(9)))
                                      for c in range(98, 112)), "more than 5000 keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_read_foreign_refuses_in_one_sentence(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LabError, match=re.escape(words)) as caught:
        read_foreign(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_read_document_refuses_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="is a folder"):
        read_document(tmp_path)
    use_language("fr")
    with pytest.raises(LabError, match="ne peut pas être lu"):
        read_document(tmp_path / "nothing.sh")


def test_shown_value_hides_secrets_and_control_marks() -> None:
    secrets = {
        "hub_token": "abc",
        "--wandb-key": "123abc",
        "api_key": "x",
        "url": "https://me:pw@host/",
        "a": "hf_" + "a" * 9,
    }
    assert {shown_value(key, value) for key, value in secrets.items()} == {"hidden"}
    assert shown_value("tokenizer_type", "GPT2") == "GPT2"
    assert shown_value("base_model", "\x1b[31m") == "\\u001b[31m"
    assert shown_value("a", [[1], [2]]) == "[2]"


def test_read_foreign_writes_no_secret_anywhere(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(FILES["trainer-args.json"], encoding="utf-8")
    config = read_foreign(tmp_path / "args.json")
    run = foreign_run(config)
    assert "hf_abc" not in json.dumps([config.as_dict(), run.as_dict()])


def test_named_sizes_of_a_folder_and_of_names_of_the_hub(tmp_path: Path) -> None:
    content = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    sizes = named_sizes(f"hf:{tmp_path}")
    assert (sizes["layers"], sizes["mlp_width"], sizes["vocabulary"], sizes["gated"]) == (2, 128, 99, True)
    assert named_sizes("meta-llama/Meta-Llama-3.1-8B-Instruct") == {"model": "llama_3_8b"}
    assert named_sizes("Qwen/Qwen2.5-Coder-7B-Instruct")["layers"] == 28
    assert named_sizes("somebody/unknown-1t") == {}
    for name in ("microsoft/Phi-4-mini-instruct", "nvidia/Mistral-NeMo-Minitron-8B-Base", "hub/zephyr-7b-gemma-v0.1"):
        assert named_sizes(name) == {}
    assert named_sizes("mistralai/Mistral-Nemo-Base-2407")["head_width"] == 128  # 32 · 128 of 5120
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    latent = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16}
    for more, fields in (
        (mixture, {"experts": 4, "top_k": 2, "expert_width": 32, "shared_experts": 0}),
        (latent | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4}, {"latent": 16, "head_width": 8, "dense_layers": 1}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**content, **more}), encoding="utf-8")
        assert named_sizes(f"hf:{tmp_path}").items() >= fields.items()
    (tmp_path / "config.json").write_text(json.dumps({"d_model": 3}), encoding="utf-8")
    with pytest.raises(LabError, match="does not say num_hidden_layers"):
        named_sizes(str(tmp_path))


AS_WRITTEN = tomllib.loads(PUBLISHED.with_name("as_written.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_foreign_run_says_what_configurations_as_users_write_them_mean(name: str, tmp_path: Path) -> None:
    row = AS_WRITTEN[name]
    (tmp_path / name).write_text(row["text"], encoding="utf-8")
    run = foreign_run(read_foreign(tmp_path / name), **row.get("beside", {}))
    means, fields = row.get("means", {}), {**run.run_fields(), **run.columns, **run.layout, "gpus": run.gpus}
    assert {field: fields.get(field) for field in means} == means
    assert row.get("says", "") in " ".join(run.sentences())
    for parts, sentences in ((row.get("failures"), run.failures), (row.get("undescribed"), run.undescribed)):
        assert parts is None or len(parts) == len(sentences), sentences
        assert all(part in sentence for part, sentence in zip(parts or (), sentences, strict=False)), sentences
    if name == "f.sh":  # DeepSeek-V2-Lite: 15.7 billion
        assert DecoderSize(**run.size).num_parameters == pytest.approx(15_706_484_224, rel=1e-8)


def test_change_lines_are_none_that_megatron_refuses(tmp_path: Path) -> None:
    """A method is of full recomputation alone; mixtures beside tensor parallelism need sequence parallelism."""
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --num-experts 8"
    (tmp_path / "a.txt").write_text(PLAIN + words, encoding="utf-8")
    config = read_foreign(tmp_path / "a.txt")
    before = foreign_run(config, gpus=64).layout
    method = ("# without --recompute-method", "# without --recompute-num-layers")
    selective = change_lines(config, before, {**before, "checkpointing": "selective"})
    assert selective == (*method, "--recompute-granularity selective")
    assert change_lines(config, before, {**before, "tp": 2}) is None
    lines = change_lines(config, before, {**before, "tp": 2, "sequence_parallel": True})
    assert {"--sequence-parallel", "--expert-tensor-parallel-size 1"} < set(lines or ())


@pytest.mark.parametrize(
    ("name", "changes", "undescribed"),
    [
        ("llamafactory-8b-lora.yaml", {}, "LoRA"),
        ("llamafactory-7b-full.yaml", {"ds_z3_config": "mine"}, "mine.json says, which the file names"),
        ("deepspeed-chat.sh", {"ZERO_STAGE=3": "ZERO_STAGE=$2"}, "--zero_stage $2 stands for"),
        ("axolotl-8b-fsdp.yaml", {"gradient_checkpointing: true": "gradient_checkpointing: maybe"}, "maybe stands for"),
    ],
)
def test_foreign_run_gives_no_figures_where_what_decides_them_is_not_known(
    tmp_path: Path, name: str, changes: dict[str, str], undescribed: str
) -> None:
    text = FILES[name]
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    (tmp_path / name).write_text(text)
    assert undescribed in " ".join(foreign_run(read_foreign(tmp_path / name), gpus=8).undescribed)


def test_foreign_run_takes_what_the_trainer_fills_in_from_the_trainer(tmp_path: Path) -> None:
    """`auto` alone is the precision of its key; beside the trainer's own key it is that of the trainer."""
    for name, precision, assumed in (("ds-stage2.json", "fp16", 1), ("trainer-inline.json", "fp16", 0)):
        (tmp_path / name).write_text(FILES[name].replace('"bf16": true, "fp16": false', '"bf16": true'))
        run = foreign_run(read_foreign(tmp_path / name), **LLAMA, gpus=8)
        assert run.precision == precision
        assert sum("filled in by the program" in text for text in run.assumed) == assumed


@pytest.mark.parametrize(
    ("name", "fields", "precision"),
    [
        ("handbook-mistral.yaml", "torch_dtype: bfloat16", "bf16-true"),
        ("handbook-mistral.yaml", "", "bf16"),
        ("handbook-mistral.yaml", "torch_dtype: bfloat16\nfsdp: full_shard", "bf16"),
        ("llamafactory-7b-full.yaml", "pure_bf16: true", "bf16"),
    ],
)
def test_foreign_run_keeps_weights_in_bf16_where_nothing_shards_them(
    tmp_path: Path, name: str, fields: str, precision: str
) -> None:
    """FSDP and DeepSpeed train a copy in fp32 of what is loaded in bf16."""
    (tmp_path / name).write_text(f"{FILES[name]}\n{fields}\n")
    run = foreign_run(read_foreign(tmp_path / name), gpus=8)
    assert run.run_fields()["precision"] == precision
    assert any("stay in bf16" in text for text in run.assumed) is (precision == "bf16-true")


TINY = Path(__file__).parents[1] / "models" / "tiny_llama"
ADAPTED = {
    # Layers that are not said are peft's usual ones; LLaMA-Factory's are all.
    "axolotl-70b-qlora.yaml": ("", "4bit"),
    "axolotl-8b-lora.yml": ("", "8bit"),
    "llamafactory-8b-lora.yaml": ("all-linear", "none"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_foreign_run_of_adapters_is_described_beside_a_config_json(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    config = read_foreign(tmp_path / name)
    run = foreign_run(config, gpus=8, model=f"hf:{TINY}")
    assert run.undescribed == () and run.size["model"] == f"hf:{TINY}"
    written = yaml.safe_load(FILES[name])
    assert run.size["lora"] == written.get("lora_r", written.get("lora_rank", 8))
    assert (run.size["lora_targets"], run.size["lora_base"]) == ADAPTED[name]
    assert not any("lora_alpha" in text for text in run.assumed)


def test_foreign_run_of_adapters_takes_the_default_rank_and_leaves_dora_alone(tmp_path: Path) -> None:
    text = (
        f"model_name_or_path: {TINY}\nuse_peft: true\nper_device_train_batch_size: 2\nbf16: true\nlearning_rate: 1.0\n"
    )
    (tmp_path / "sft.yaml").write_text(text)
    run = foreign_run(read_foreign(tmp_path / "sft.yaml"), gpus=2)
    assert [run.size[name] for name in ("lora", "lora_targets", "lora_base")] == [16, "", "none"]
    assert any("rank 16" in text for text in run.assumed) and not run.keeps_bf16  # loaded in fp32
    (tmp_path / "sft.yaml").write_text(
        text + "torch_dtype: bfloat16\nlora_target_modules: [q_proj, v_proj]\nlora_r: 4\n"
    )
    run = foreign_run(read_foreign(tmp_path / "sft.yaml"), gpus=2)
    assert run.run_fields()["lora_targets"] == "q_proj,v_proj" and run.run_fields()["precision"] == "bf16-true"
    (tmp_path / "sft.yaml").write_text(text + "use_dora: true\n")
    assert foreign_run(read_foreign(tmp_path / "sft.yaml"), gpus=2).undescribed == ("DoRA",)
