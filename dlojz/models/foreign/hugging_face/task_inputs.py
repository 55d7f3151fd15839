"""Example inputs, labels and losses of transformers' classes, by their task and the arguments of their forward pass."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import say
from dlojz.models.foreign.names import model_sentence
from dlojz.models.meta import on_meta

MAX_DEFAULT_TOKENS = 2048
"""Default tokens per sample of a configuration whose model can read more."""
USUAL_TOKENS = 512
"""Default tokens per sample where a configuration names no limit."""
SAMPLES = 2
CHOICES = 2
"""Answers of which one is chosen."""
SECONDS_OF_SOUND = 10
VIDEO_FRAMES = 16
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions", "seq_length")


class InputsError(Exception):
    """No example inputs are known for a class; the message says why."""


def text_length(config: Any) -> int:
    """Return the default number of tokens per sample of a text model.

    RoBERTa's family counts positions from 2 (514 for 512 tokens); XLNet's limit of -1 is none.
    """
    limits = [getattr(config, name, None) for name in _LENGTHS]
    limit = next((length for length in limits if isinstance(length, int) and length > 0), USUAL_TOKENS)
    return min(limit - 2 if limit % 64 == 2 and limit > 2 else limit, MAX_DEFAULT_TOKENS)


def losses(task: str, config: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """Return the loss of a text model's output and tokens, whose remainders are its labels; None for next tokens.

    Source: transformers, `loss/loss_utils.py`: `ForSequenceClassificationLoss`, `ForTokenClassification`,
    `ForQuestionAnsweringLoss`.
    """
    labels = config.num_labels
    kind = getattr(config, "problem_type", None) or ("regression" if labels == 1 else "single_label_classification")

    def sequence_loss(logits_BC: Tensor, tokens_BT: Tensor) -> Tensor:
        first_B = tokens_BT[:, 0]  # the first token of a sample gives its label
        if kind == "regression":
            return F.mse_loss(logits_BC, first_B[:, None].expand_as(logits_BC).to(logits_BC.dtype))
        if kind == "multi_label_classification":
            chosen_BC = (tokens_BT[:, :1] % labels).expand_as(logits_BC)
            return F.binary_cross_entropy_with_logits(logits_BC, (chosen_BC > 0).to(logits_BC.dtype))
        return F.cross_entropy(logits_BC, first_B % labels)

    def token_loss(logits_BTC: Tensor, tokens_BT: Tensor) -> Tensor:
        # (B, T, C) → (B·T, C), and one label for each token.
        return F.cross_entropy(logits_BTC.reshape(-1, labels).float(), tokens_BT.reshape(-1) % labels)

    def answer_loss(ends: tuple[Tensor, Tensor], tokens_BT: Tensor) -> Tensor:
        starts_BT, stops_BT = ends
        # The answer begins and ends at the same token.
        places_B = tokens_BT[:, 0] % starts_BT.shape[1]
        return (F.cross_entropy(starts_BT, places_B) + F.cross_entropy(stops_BT, places_B)) / 2

    by_task: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "SEQUENCE_CLASSIFICATION": sequence_loss, "TOKEN_CLASSIFICATION": token_loss, "QUESTION_ANSWERING": answer_loss,
    }  # fmt: skip
    return by_task.get(task)


def batch_for(
    model_class: Any, config: Any, task: str, build: Callable[[], nn.Module], target_length: int | None = None
) -> dict[str, Tensor]:
    """Make a batch of two samples for a class's forward pass: its inputs, and labels where it takes them.

    Args:
        model_class: of transformers.
        config: its configuration.
        task: by `MODEL_FOR_{task}_MAPPING_NAMES`; empty for a class without a head.
        build: makes the model, on the meta device where one is asked how many tokens an image takes.
        target_length: tokens that a decoder reads beside an encoder; None for all that it has positions for.

    Raises:
        InputsError: none are known.
    """
    names = set(inspect.signature(model_class.forward).parameters)
    modes = set(getattr(model_class, "input_modalities", ("text",)))
    main = getattr(model_class, "main_input_name", "input_ids")
    text, vision = config.get_text_config(), getattr(config, "vision_config", None) or config
    batch: dict[str, Tensor] = {}
    if "pixel_values" in names and ("image" in modes or main == "pixel_values"):
        batch["pixel_values"] = _pixels(vision)
    elif main == "pixel_values_videos" or ("pixel_values_videos" in names and "video" in modes):
        batch[main] = _pixels(vision, getattr(vision, "num_frames", None) or VIDEO_FRAMES)
    if task == "VIDEO_CLASSIFICATION" and "pixel_values" in batch:
        batch["pixel_values"] = _pixels(vision, getattr(config, "num_frames", None) or VIDEO_FRAMES)
    batch |= _sound(config, names, modes, main)
    if "input_ids" in names and ("text" in modes or not batch) and not (batch and "decoder_input_ids" in names):
        length = text_length(text)
        if batch and "return_loss" in names:
            length = text_length(getattr(config, "text_config", text))
        words = getattr(text, "vocab_size", 0) or 1
        # Token ids in turn, below the size of the vocabulary: (B, T).
        tokens_BT = torch.arange(SAMPLES * length).reshape(SAMPLES, length) % words
        if task == "MULTIPLE_CHOICE":
            tokens_BT = tokens_BT[:, None].repeat(1, CHOICES, 1)  # (B, choices, T)
        if "pixel_values" in batch and "return_loss" not in names:
            tokens_BT = _with_images(tokens_BT, model_class, config, batch["pixel_values"], build)
        batch["input_ids"] = tokens_BT
        if "next_sentence_label" in names:
            batch["next_sentence_label"] = torch.zeros(SAMPLES, dtype=torch.long)
    if not batch:
        raise InputsError(model_sentence("inputs are not made", main=main))
    if "bool_masked_pos" in names and "pixel_values" in batch and task == "MASKED_IMAGE_MODELING":
        side, patch = batch["pixel_values"].shape[-1], getattr(vision, "patch_size", 16)
        # True masks a patch; here all are masked, (B, patches).
        batch["bool_masked_pos"] = torch.ones(SAMPLES, (side // patch) ** 2, dtype=torch.bool)
    if "labels" in names:
        batch |= _labels(config, task, batch, target_length)
    elif "decoder_input_ids" in names:
        batch["decoder_input_ids"] = torch.zeros(SAMPLES, target_length or text_length(text), dtype=torch.long)
    return batch


def _pixels(vision: Any, frames: int = 0) -> Tensor:
    side = getattr(vision, "image_size", None) or 224
    height, width = (side[0], side[-1]) if isinstance(side, list | tuple) else (side, side)
    channels = getattr(vision, "num_channels", None) or 3
    return torch.zeros(SAMPLES, *((frames,) if frames else ()), channels, height, width)  # (B, [frames,] C, H, W)


def _sound(config: Any, names: set[str], modes: set[str], main: str) -> dict[str, Tensor]:
    """Make sound: a waveform of ten seconds, or the spectrogram that a model has positions for."""
    rate = getattr(config, "sampling_rate", None) or 16_000
    if "input_values" in names and ("audio" in modes or main == "input_values"):
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram seen as an image
            return {"input_values": torch.zeros(SAMPLES, config.max_length, config.num_mel_bins)}
        return {"input_values": torch.zeros(SAMPLES, SECONDS_OF_SOUND * rate)}
    if "input_features" not in names or not ("audio" in modes or main == "input_features"):
        return {}
    bins = next(
        (getattr(config, name) for name in ("num_mel_bins", "input_feat_per_channel") if hasattr(config, name)), 80
    )
    positions = getattr(config, "max_source_positions", None) or 1500
    if config.model_type == "whisper":  # two convolutions, the second of stride 2
        return {"input_features": torch.zeros(SAMPLES, bins, 2 * positions)}
    return {"input_features": torch.zeros(SAMPLES, min(positions, 100 * SECONDS_OF_SOUND), bins)}


def _labels(config: Any, task: str, batch: dict[str, Tensor], target_length: int | None) -> dict[str, Tensor]:
    """Make labels of the shape that a task's loss reads."""
    numbers = torch.zeros(SAMPLES, dtype=torch.long)
    classes = task in ("MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION", "AUDIO_XVECTOR") or (
        task.endswith("CLASSIFICATION") and task != "TOKEN_CLASSIFICATION"  # also of image tokens: ImageGPT
    )
    if "input_ids" in batch and not classes and task != "VISUAL_QUESTION_ANSWERING":
        return {"labels": batch["input_ids"].clone()}
    if task == "SEMANTIC_SEGMENTATION":
        pixels = batch["pixel_values"]
        return {"labels": torch.zeros(SAMPLES, *pixels.shape[-2:], dtype=torch.long)}
    if task in ("SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "TEXT_RECOGNITION"):
        length = target_length or text_length(config.get_text_config(decoder=True))
        return {"labels": torch.zeros(SAMPLES, length, dtype=torch.long)}
    if classes:
        return {"labels": numbers}
    if task in ("", "PRETRAINING", "MASKED_IMAGE_MODELING", "BACKBONE"):
        return {}
    raise InputsError(
        say(
            en=f"labels for its task ({task.lower().replace('_', ' ')}) are not made here",
            fr=f"des étiquettes pour sa tâche ({task.lower().replace('_', ' ')}) ne sont pas fabriquées ici",
        )
    )


def _with_images(
    tokens_BT: Tensor, model_class: Any, config: Any, pixels: Tensor, build: Callable[[], nn.Module]
) -> Tensor:
    """Put as many image tokens into a text as the model makes of an image; asked of the model on the meta device."""
    token = getattr(config, "image_token_id", None)
    if token is None:
        token = getattr(config, "image_token_index", None)
    if token is None:
        return tokens_BT
    try:
        with torch.random.fork_rng(devices=[]), on_meta(), torch.no_grad():
            model: Any = build().to("meta").eval()
            features = model.get_image_features(pixel_values=torch.empty_like(pixels, device="meta"))
        features = getattr(features, "pooler_output", features)
        # An entry for each image: (tokens, D), or (pieces, tokens, D).
        count = sum(
            feature.shape[-2] if feature.dim() == 2 else feature.shape[0] * feature.shape[1] for feature in features
        )
    except Exception as error:
        raise InputsError(
            say(
                en=f"how many tokens an image takes in its text is not known here ({type(error).__name__} in "
                "get_image_features)",
                fr=f"on ne sait pas ici combien de tokens prend une image dans son texte ({type(error).__name__} dans "
                "get_image_features)",
            )
        ) from error
    per_sample = count // SAMPLES
    text_token = (token + 1) % config.get_text_config().vocab_size
    # The image's tokens stand first in a row, and nowhere else.
    tokens_BT = tokens_BT[:, : max(tokens_BT.shape[1], per_sample + 1)].masked_fill(tokens_BT == token, text_token)
    if tokens_BT.shape[1] < per_sample + 1:
        # Too short for the image: the row becomes twice as long as the image's tokens.
        tokens_BT = F.pad(tokens_BT, (0, 2 * per_sample - tokens_BT.shape[1]), value=text_token)
    tokens_BT[:, :per_sample] = token
    return tokens_BT
