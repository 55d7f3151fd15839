"""With timm's weights, our CoAtNets compute timm's logits."""

import pytest
import torch
from torch import nn

from .timm_weights import TIMM_SIZES, create_timm_model, from_timm, key_map, renamed


def timm_model(name: str, **options: object) -> nn.Module:
    """timm's model with random values in every tensor: as timm builds it, all norms are alike and all biases zero, so
    that a swapped pair would go unnoticed."""
    torch.manual_seed(0)
    # Drawing 688 million normal numbers takes ten times as long as the forward pass: one draw of a million serves all
    # tensors, each from where the last one stopped.
    noise = torch.randn(1_000_003)
    with torch.device("meta"):
        model = create_timm_model(name, **options)
    model.to_empty(device="cpu")
    start = 0
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith("num_batches_tracked"):
                tensor.zero_()
                continue
            flat, count = tensor.view(-1), tensor.numel()
            repeats = -(-(start + count) // len(noise))
            flat.copy_(noise.repeat(repeats)[start : start + count])
            start = (start + count) % len(noise)
            if tensor.dim() > 1:
                flat.div_(tensor[0].numel() ** 0.5)
            elif key.endswith(("bias", "running_mean")):
                flat.mul_(0.1)
            else:
                flat.mul_(0.05).add_(1.0).abs_()
    return model


# CoAtNet-4 and -5, of the same blocks, take a minute and a half.
@pytest.mark.parametrize("name", [name for name in TIMM_SIZES if not name.startswith(("coatnet_4", "coatnet_5"))])
def test_from_timm_gives_logits_that_agree(name: str) -> None:
    theirs = timm_model(name).eval()
    ours = from_timm(theirs)
    x_BCHW = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected, actual = theirs(x_BCHW), ours(x_BCHW)
    assert expected.std() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_from_timm_gives_training_that_agrees_too() -> None:
    theirs = timm_model("coatnet_0_224", img_size=64, num_classes=10).train()
    ours = from_timm(theirs)
    ours.load_state_dict({key: tensor.clone() for key, tensor in ours.state_dict().items()}, assign=True)
    x_BCHW = torch.randn(4, 3, 64, 64)
    for model in (theirs, ours):
        model(x_BCHW).square().sum().backward()
    size = TIMM_SIZES["coatnet_0_224"]
    gradients = renamed({key: parameter.grad for key, parameter in theirs.named_parameters()}, size)
    for key, parameter in ours.named_parameters():
        expected = gradients[key].reshape(parameter.shape)
        assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm() + 1e-6, key
    statistics = renamed({key: buffer for key, buffer in theirs.named_buffers() if "running" in key}, size)
    for key, buffer in ours.named_buffers():
        if "running" in key:
            torch.testing.assert_close(buffer, statistics[key], rtol=1e-4, atol=1e-5)


def test_from_timm_shares_large_tensors_and_copies_none() -> None:
    theirs = create_timm_model("coatnet_0_224", img_size=64)
    ours = from_timm(theirs)
    assert ours.blocks[6].attention.qkv.weight.data_ptr() == theirs.stages[2].blocks[0].attn.qkv.weight.data_ptr()


def test_key_map_never_gives_two_prefixes_of_timm_one_of_ours() -> None:
    for name, size in TIMM_SIZES.items():
        prefixes = {theirs: ours for theirs, ours in key_map(size).items() if not theirs.endswith("norm1.norm")}
        assert len(set(prefixes.values())) == len(prefixes), name


def test_from_timm_refuses_another_model_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"unknown timm CoAtNet 'test_coatnet'.*coatnet_0_224"):
        from_timm(create_timm_model("test_coatnet"))
