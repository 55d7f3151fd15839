"""Models of transformers from a config.json: the class that it names, against one built and trained by transformers."""

import gc
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dlojz import models, predict
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.memory_tables import input_sentence
from dlojz.models.foreign import meta_checks
from dlojz.models.foreign.vision_packages import ensure_torchvision_imports
from dlojz.models.meta import on_meta

ensure_torchvision_imports()  # transformers looks for its operators
transformers = pytest.importorskip("transformers")

SAMPLES, TOKENS = 4, 32
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
BERT = {"model_type": "bert", "vocab_size": 512, **SMALL}
LLAMA = {"model_type": "llama", "vocab_size": 512, "num_key_value_heads": 2, **SMALL}
BART = {
    "model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256,
}  # fmt: skip
CLIP_TOWER = {**SMALL, "num_hidden_layers": 2, "projection_dim": 32}
CLIP = {
    "model_type": "clip", "projection_dim": 32,
    "text_config": {"model_type": "clip_text_model", "vocab_size": 300, **CLIP_TOWER},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **CLIP_TOWER},
}  # fmt: skip


def written(folder: Path, content: dict[str, Any], architecture: str = "") -> str:
    """Write a configuration that names a class, and return the model's name."""
    named = {"architectures": [architecture]} if architecture else {}
    (folder / "config.json").write_text(json.dumps({**content, **named}))
    return f"hf:{folder}"


def parameters(folder: Path, architecture: str) -> int:
    """Count the parameters of the class that transformers builds."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, architecture)._from_config(config)
    return sum(one.numel() for one in model.parameters())


def measured_peak(model: torch.nn.Module, inputs: dict[str, Tensor]) -> int:
    """Train two steps in plain torch; return the peak in bytes of the second, by the profiler of torch's allocator."""
    parameters = list(model.train().parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=True)

    def step() -> None:
        loss = model(**inputs).loss
        loss.backward()
        del loss
        optimizer.step()

    step()
    optimizer.zero_grad()
    moments = [one for state in optimizer.state.values() for one in state.values()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    held = peak = 0
    events = (one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]")
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + sum(one.nbytes for one in (*parameters, *model.buffers(), *moments, *inputs.values()))


def predicted_peak(name: str, **fields: Any) -> int:
    size = {} if fields.pop("sized", False) else {"sequence_length": TOKENS}
    run = {"micro_batch": SAMPLES, "optimizer": "adamw", "device": "cpu", "data": "synthetic", **size, **fields}
    peak_bytes: int = predict(RunConfig.of(model=name, **run), 0).memory.peak_bytes or 0
    return peak_bytes


def labels_of_tokens(tokens: Tensor) -> dict[str, Tensor]:
    return {"labels": tokens}


def labels_of_samples(tokens: Tensor) -> dict[str, Tensor]:
    return {"labels": tokens[:, 0] % 2}


def ends_of_answers(tokens: Tensor) -> dict[str, Tensor]:
    return {"start_positions": tokens[:, 0] % TOKENS, "end_positions": tokens[:, 1] % TOKENS}


@pytest.mark.parametrize(
    ("content", "architecture", "labels"),
    [
        (BERT, "BertForMaskedLM", labels_of_tokens),
        (BERT, "BertForSequenceClassification", labels_of_samples),
        (BERT, "BertForTokenClassification", lambda tokens: {"labels": tokens % 2}),
        (BERT, "BertForQuestionAnswering", ends_of_answers),
        (LLAMA, "LlamaForCausalLM", labels_of_tokens),
        ({**LLAMA, "pad_token_id": 0}, "LlamaForSequenceClassification", labels_of_samples),
        (BART, "BartForConditionalGeneration", labels_of_tokens),
    ],
)
def test_hugging_face_configuration_forecasts_the_class_of_architectures(
    tmp_path: Path, content: dict[str, Any], architecture: str, labels: Callable[[Tensor], dict[str, Tensor]]
) -> None:
    """Parameters equal, and the peak of a training within 3 % of that of plain torch."""
    name = written(tmp_path, content, architecture)
    assert models.describe(name).parameters == parameters(tmp_path, architecture)
    model = getattr(transformers, architecture)._from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    tokens = torch.randint(2, 200, (SAMPLES, TOKENS))
    measured = measured_peak(model, {"input_ids": tokens, **labels(tokens)})
    assert predicted_peak(name) == pytest.approx(measured, rel=0.03)


def test_input_sentence_says_which_class_is_forecast_where_none_is_named(tmp_path: Path) -> None:
    name = written(tmp_path, BERT)
    assert models.describe(name).parameters == parameters(tmp_path, "BertForMaskedLM")
    sentence = input_sentence(RunConfig.of(model=name))
    assert "BertForMaskedLM (config.json names no class); vocabulary of 512" in sentence


def test_input_sentence_has_the_number_of_labels(tmp_path: Path) -> None:
    name = written(tmp_path, {**BERT, "num_labels": 7}, "BertForTokenClassification")
    assert "BertForTokenClassification, 7 classes;" in input_sentence(RunConfig.of(model=name))
    assert models.describe(name).parameters == parameters(tmp_path, "BertForTokenClassification")


T5 = {
    **{"model_type": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 256},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
}


@pytest.mark.parametrize(("source", "target"), [(48, 16), (16, 48)])
def test_target_length_forecasts_a_decoder_that_is_shorter_or_longer(tmp_path: Path, source: int, target: int) -> None:
    """Peak of a training in plain torch, and its FLOPs; the loss keeps a few scalars more there."""
    fields = {"sequence_length": source, "target_length": target}
    config = transformers.AutoConfig.from_pretrained(written(tmp_path, T5, "T5ForConditionalGeneration")[3:])
    model = transformers.T5ForConditionalGeneration._from_config(config)
    inputs = {"input_ids": torch.ones(SAMPLES, source).long(), "labels": torch.ones(SAMPLES, target).long()}
    assert 0 <= measured_peak(model, inputs) - predicted_peak(f"hf:{tmp_path}", **fields, sized=True) <= 32
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    run = RunConfig.of(model=f"hf:{tmp_path}", micro_batch=SAMPLES, **fields)
    # torch's counter knows no fused attention of a CPU, the one from decoder to encoder: 2 products forward and 5
    # backward in each of 2 layers with 4 heads of 16.
    fused_flops = 2 * 7 * 2 * SAMPLES * 4 * 16 * source * target
    assert predict(run).step_flops == counter.get_total_flops() + fused_flops
    assert f"targets of {target} tokens" in input_sentence(run)


def test_target_length_of_whisper_is_that_of_its_text(tmp_path: Path) -> None:
    """Ten words of text in place of 32, of which the decoder alone reads less: 22 × 300 logits at 4 bytes, at least."""
    name = written(tmp_path, WHISPER, "WhisperForConditionalGeneration")
    fewer_bytes = predicted_peak(name, sized=True, data="example") - predicted_peak(
        name, sized=True, data="example", target_length=10
    )
    assert fewer_bytes > SAMPLES * 22 * 300 * 4


@pytest.mark.parametrize(
    ("fields", "english", "french"),
    [
        ({"model": "gpt_tiny"}, "was received with model='gpt_tiny'", "prenez hf:DOSSIER"),
        ({"curriculum": "linear"}, "was received with curriculum='linear'", "aucun curriculum"),
        ({}, "LlamaForCausalLM of .*, which has no decoder", "n’a pas de décodeur"),
    ],
)
def test_target_length_is_refused_without_a_decoder(
    tmp_path: Path, fields: dict[str, Any], english: str, french: str
) -> None:
    run = {"model": written(tmp_path, LLAMA, "LlamaForCausalLM"), "target_length": 16, **fields}
    for language, words in (("en", english), ("fr", french)):
        use_language(language)
        with pytest.raises(LabError, match=words):
            predict(RunConfig.of(**run))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_hugging_face_attention_of_a_configuration_is_forecast(tmp_path: Path, attention: str, key: str) -> None:
    """Eager attention keeps scores and probabilities (T² numbers for each head), a fused kernel does not."""
    name = written(tmp_path, {**LLAMA, key: attention}, "LlamaForCausalLM")
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation=attention)
    tokens = torch.randint(2, 200, (2, 256))
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)
    measured = measured_peak(model, {"input_ids": tokens, "labels": tokens})
    assert predicted_peak(name, sequence_length=256, micro_batch=2, sized=True) == pytest.approx(measured, rel=0.03)
    assert f"LlamaForCausalLM, {attention} attention;" in input_sentence(RunConfig.of(model=name))


def test_input_sentence_says_that_flash_attention_is_counted_as_sdpa(tmp_path: Path) -> None:
    plain = predicted_peak(written(tmp_path, LLAMA, "LlamaForCausalLM"))
    other = tmp_path / "flash"
    other.mkdir()
    name = written(other, {**LLAMA, "attn_implementation": "flash_attention_2"}, "LlamaForCausalLM")
    assert predicted_peak(name) == plain
    assert "flash_attention_2 counted as SDPA" in input_sentence(RunConfig.of(model=name))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_input_sentence_names_the_dtype_and_predict_takes_the_precisions(
    tmp_path: Path, key: str, precision: str, dtype: torch.dtype
) -> None:
    """Weights of a checkpoint are mostly in bf16, but a training chooses."""
    name = written(tmp_path, {**LLAMA, key: "bfloat16"}, "LlamaForCausalLM")
    model = transformers.LlamaForCausalLM._from_config(transformers.AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    tokens = torch.randint(2, 200, (SAMPLES, TOKENS))
    measured = measured_peak(model, {"input_ids": tokens, "labels": tokens})
    assert predicted_peak(name, precision=precision) == pytest.approx(measured, rel=0.03)
    config = RunConfig.of(model=name, precision=precision)
    assert "LlamaForCausalLM, weights as --precision says (config.json: bfloat16);" in input_sentence(config)
    assert predict(config).memory.weights_bytes == dtype.itemsize * parameters(tmp_path, "LlamaForCausalLM")


def test_input_sentence_names_quantized_weights(tmp_path: Path) -> None:
    """Built with random weights, a model is not quantized."""
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}, "dtype": "float16"}
    config = RunConfig.of(model=written(tmp_path, {**LLAMA, **quantized}, "LlamaForCausalLM"))
    assert "LlamaForCausalLM, weights as --precision says (config.json: bitsandbytes);" in input_sentence(config)


def test_clip_reads_images_and_texts_and_computes_its_own_loss(tmp_path: Path) -> None:
    name = written(tmp_path, CLIP, "CLIPModel")
    assert models.describe(name).parameters == parameters(tmp_path, "CLIPModel")
    model = transformers.CLIPModel._from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    length = model.config.text_config.max_position_embeddings
    inputs = {"input_ids": torch.ones(SAMPLES, length).long(), "pixel_values": torch.rand(SAMPLES, 3, 32, 32)}
    measured = measured_peak(model, {**inputs, "return_loss": torch.tensor(True)})
    assert predicted_peak(name, sized=True, data="example") == pytest.approx(measured, rel=0.03)
    assert f"CLIPModel, pixel_values (1, 3, 32, 32), input_ids (1, {length})" in input_sentence(
        RunConfig.of(model=name)
    )


def test_numbers_that_json_has_not_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    content = {"model_type": "bamba", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    name = written(tmp_path, {**content, **SMALL, "num_key_value_heads": 2, "num_hidden_layers": 2}, "BambaForCausalLM")
    assert models.describe(name, sequence_length=8).parameters == parameters(tmp_path, "BambaForCausalLM")


def test_run_config_takes_a_limit_of_minus_one_position_for_none(tmp_path: Path) -> None:
    content = {"model_type": "xlnet", "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "vocab_size": 256}
    assert RunConfig.of(model=written(tmp_path, content, "XLNetLMHeadModel")).sequence_length == 512


@pytest.mark.parametrize(
    ("content", "architecture"),
    [
        (BART, "BartForConditionalGeneration"),
        ({"model_type": "deberta-v2", "vocab_size": 256, **SMALL}, "DebertaV2ForMaskedLM"),
        ({"model_type": "rembert", "vocab_size": 256, "input_embedding_size": 64, **SMALL}, "RemBertForMaskedLM"),
        ({"model_type": "xlm", "vocab_size": 256, "emb_dim": 64, "n_layers": 2, "n_heads": 4}, "XLMWithLMHeadModel"),
    ],
)
def test_masks_of_ones_warnings_and_assertions_refuse_no_model(
    tmp_path: Path, content: dict[str, Any], architecture: str
) -> None:
    name = written(tmp_path, content, architecture)
    assert models.describe(name, sequence_length=16).parameters == parameters(tmp_path, architecture)
    with on_meta():
        output = models.build(name, sequence_length=16)(torch.zeros(2, 16, dtype=torch.long))
    assert output.shape == (2, 16, 256)


@pytest.mark.parametrize(
    ("content", "architecture", "words"),
    [
        (BERT, "BertForEverything", "BertForEverything of .* transformers .* has no such class"),
        (BERT, "LlamaForCausalLM", "LlamaForCausalLM of .* needs a LlamaConfig, but its model_type is 'bert'"),
        ({"model_type": "detr"}, "DetrForObjectDetection", r"labels for its task \(object detection\) are not made"),
        ({**BERT, "num_attention_heads": 5}, "BertForMaskedLM", "cannot be built: ValueError: The hidden size"),
    ],
)
def test_describe_refuses_a_class_that_is_not_forecast_with_the_way_out(
    tmp_path: Path, content: dict[str, Any], architecture: str, words: str
) -> None:
    with pytest.raises(LabError, match=rf"{words}.*FILE.py:build, with example_inputs\(\) and loss"):
        models.describe(written(tmp_path, content, architecture))


DECODERS = {
    "llama": LLAMA,
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 16},
    "gpt_neox": {**SMALL, "model_type": "gpt_neox", "vocab_size": 512},
    "gpt2": {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4},
    "opt": {**SMALL, "model_type": "opt", "vocab_size": 512, "word_embed_proj_dim": 64, "ffn_dim": 128},
    "bloom": {"model_type": "bloom", "vocab_size": 512, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    "bert": BERT,
}
CLASSES = {
    "llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel", "opt": "OPTForCausalLM", "bloom": "BloomForCausalLM", "mixtral": "MixtralForCausalLM",
    "bert": "BertForMaskedLM",
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
def test_chain_of_transformers_decoders_computes_what_the_module_computes(tmp_path: Path, kind: str) -> None:
    """For another number of samples than the one that it was traced with, to the bit."""
    name = models.spec(written(tmp_path, DECODERS[kind], CLASSES[kind])).name
    outputs = []
    for start in ("", "chain:"):
        torch.manual_seed(0)
        model = models.build(start + name, sequence_length=TOKENS).eval()
        outputs.append(model(torch.arange(3 * TOKENS).reshape(3, TOKENS)))
    assert model.is_chain and len(model.blocks) == DECODERS[kind].get("num_hidden_layers", 3) + 2
    assert torch.equal(*outputs)


def test_checkpointing_of_a_decoder_is_that_of_transformers(tmp_path: Path) -> None:
    """The peak is within 3 % of a training in plain torch after `gradient_checkpointing_enable()`."""
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    content = {"model_type": "llama", **size, "num_key_value_heads": 8, "vocab_size": 1000}
    name = written(tmp_path, content, "LlamaForCausalLM")
    model = transformers.LlamaForCausalLM._from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    model.gradient_checkpointing_enable()
    tokens = torch.randint(2, 200, (2, 1024))
    measured = measured_peak(model, {"input_ids": tokens, "labels": tokens})
    forecast = predicted_peak(name, sequence_length=1024, micro_batch=2, checkpointing="full", sized=True)
    assert forecast == pytest.approx(measured, rel=0.03)
    sentence = input_sentence(RunConfig.of(model=name, checkpointing="full"))
    assert "checkpointing recomputes what comes before and after the layers too" in sentence


def test_hugging_face_encoder_and_decoder_are_no_chain(tmp_path: Path) -> None:
    name = models.spec(written(tmp_path, BART, "BartForConditionalGeneration")).name
    with pytest.raises(LabError, match="is no chain of blocks.*an encoder and a decoder"):
        models.build(f"chain:{name}")


@pytest.mark.parametrize("start", ["", "hf:"])
def test_spec_says_how_a_model_of_the_hub_is_given(start: str) -> None:
    words = r"no config.json in meta-llama/Llama-2-7b-hf here.*hf:FOLDER.*`hf download meta-llama/Llama-2-7b-hf config"
    with pytest.raises(LabError, match=words):
        models.spec(f"{start}meta-llama/Llama-2-7b-hf")


WHISPER = {
    "model_type": "whisper", "vocab_size": 300, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
IMAGE_GPT = {"model_type": "imagegpt", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 65}


@pytest.mark.parametrize(
    ("content", "architecture", "classes"),
    [
        (WHISPER, "WhisperForConditionalGeneration", None),
        ({**IMAGE_GPT, "num_labels": 3}, "ImageGPTForImageClassification", 3),
    ],
)
def test_describe_counts_classes_only_where_a_model_has_them(
    tmp_path: Path, content: dict[str, Any], architecture: str, classes: int | None
) -> None:
    described = models.describe(written(tmp_path, content, architecture))
    assert described.num_classes == classes
    model = getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(tmp_path))
    assert described.parameters == sum(one.numel() for one in model.parameters())


SIGHT = {**SMALL, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
LLAVA = {
    "model_type": "llava", "text_config": {**LLAMA, "max_position_embeddings": 64}, "image_token_index": 511,
    "vision_config": {"model_type": "clip_vision_model", **SIGHT}, "vision_feature_layer": -1,
}  # fmt: skip
GEMMA_3 = {
    "model_type": "gemma3", "mm_tokens_per_image": 4, "image_token_index": 511, "boi_token_index": 510,
    "text_config": {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "max_position_embeddings": 64},
    "vision_config": {"model_type": "siglip_vision_model", **SIGHT}, "eoi_token_index": 509,
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "architecture"),
    [(LLAVA, "LlavaForConditionalGeneration"), (GEMMA_3, "Gemma3ForConditionalGeneration")],
)
def test_images_beside_text_are_forecast(tmp_path: Path, content: dict[str, Any], architecture: str) -> None:
    name = written(tmp_path, content, architecture)
    assert models.describe(name).parameters == parameters(tmp_path, architecture)
    model = getattr(transformers, architecture)._from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    tokens = torch.full((SAMPLES, 64), 7)
    tokens[:, : 16 if architecture.startswith("Llava") else 4] = 511
    measured = measured_peak(
        model, {"input_ids": tokens, "pixel_values": torch.rand(SAMPLES, 3, 32, 32), "labels": tokens}
    )
    assert predicted_peak(name, sized=True, data="example") == pytest.approx(measured, rel=0.03)


def test_asserted_values_refuse_no_trace_of_memory(tmp_path: Path) -> None:
    """XLM asserts the lengths of its sequences; the peak is that of plain torch."""
    content = {"model_type": "xlm", "vocab_size": 256, "emb_dim": 64, "n_layers": 2, "n_heads": 4}
    name = written(tmp_path, content, "XLMWithLMHeadModel")
    model = transformers.XLMWithLMHeadModel._from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    tokens = torch.randint(3, 200, (SAMPLES, TOKENS))
    assert predicted_peak(name) == pytest.approx(
        measured_peak(model, {"input_ids": tokens, "labels": tokens}), rel=0.03
    )


def test_a_chain_keeps_no_weights_of_blocks_that_are_gone(tmp_path: Path) -> None:
    """A rank of a pipeline holds its own blocks alone, without waiting for the garbage collector."""
    name = models.spec(written(tmp_path, LLAMA, "LlamaForCausalLM")).name
    gc.collect()
    gc.disable()
    try:
        model = models.build(f"chain:{name}", sequence_length=TOKENS)
        last = weakref.ref(next(model.blocks[-2].parameters()))
        first = model.blocks[0]
        del model
        assert last() is None and list(first.parameters())
    finally:
        gc.enable()


def test_said_when_slow_names_the_tokens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_checks, "SLOW_S", 0.01)
    with meta_checks.said_when_slow("hf:/models/rwkv/config.json", 512):
        time.sleep(0.3)
    assert "rwkv/config.json is still being traced at 512 tokens" in capsys.readouterr().err
