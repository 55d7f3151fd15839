"""Models from elsewhere: their blocks, parameters and FLOPs against what their packages print, and refusals."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dlojz
from dlojz import models
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import NestedBlocks, loss_of, mean_loss, tied_names
from dlojz.models.foreign.vision_packages import ensure_torchvision_imports
from dlojz.models.meta import on_meta, sample_inputs
from dlojz.runnable import check_runnable
from tests.models import own_models, own_shapes

ensure_torchvision_imports()
from tests.models import own_builders  # noqa: E402 - imports torchvision

OWN = str(Path(own_models.__file__))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        *(("resnet50", 16), ("vit_b_16", 12), ("swin_t", 12), ("convnext_tiny", 18)),
        *(("efficientnet_b0", 16), ("mobilenet_v3_small", 11), ("densenet121", 58), ("vgg11", 0)),
    ],
)
def test_torchvision_counts_the_same(name: str, blocks: int) -> None:
    """Source: torchvision's `WeightsEnum.meta`, `num_params` and `_ops` (multiply-adds of one image, in 10^9)."""
    ensure_torchvision_imports()
    from torchvision.models import get_model_weights

    told = get_model_weights(name).DEFAULT.meta
    counted = models.describe(f"torchvision:{name}")
    assert counted.parameters == told["num_params"]
    assert counted.multiply_adds / 1e9 == pytest.approx(told["_ops"], rel=0.04)  # theirs leaves out some products
    assert counted.blocks == blocks + 1


@pytest.mark.parametrize(
    ("name", "blocks", "parameters"),
    [
        ("vit_base_patch16_224", 12, 86_567_656),
        ("regnety_002", 14, 3_162_996),  # its blocks are attributes of its stages, and no container's
        ("convnext_atto", 12, 3_695_520),
        ("swin_tiny_patch4_window7_224", 12, 28_288_354),
    ],
)
def test_timm_s_models_are_found_by_their_configuration(name: str, blocks: int, parameters: int) -> None:
    counted = models.describe(f"timm:{name}")
    assert (counted.blocks, counted.image_size) == (blocks + 1, 224)
    assert counted.parameters == parameters
    assert models.describe(f"timm:{name}", num_classes=10).parameters < counted.parameters


def test_an_own_file_gives_the_module_that_it_builds() -> None:
    """The blocks first, then the rest, with the tied matrix once; the forward pass is the module's."""
    torch.manual_seed(0)
    model = models.build(f"{OWN}:build")
    torch.manual_seed(0)
    plain = own_models.build()
    assert isinstance(model, NestedBlocks) and len(model.blocks) == own_models.LAYERS + 1
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "blocks.0.norm.weight" and names[-3:] == [f"blocks.5.{one}" for one in (
        "token.weight", "norm.weight", "norm.bias",
    )]  # fmt: skip
    assert tied_names(model) == {"blocks.5.head.weight": "blocks.5.token.weight"}
    assert sorted(name for name, _ in model.named_buffers()) == ["blocks.5.calls", "blocks.5.scales"]
    tokens = torch.arange(own_models.TOKENS).reshape(1, -1)
    assert torch.equal(model(tokens), plain(tokens))
    with on_meta():
        shapes = models.build(f"{OWN}:build")
        assert shapes(sample_inputs(f"{OWN}:build", 3)).shape == (3, own_models.TOKENS, own_models.WORDS)


def test_blocks_share_no_weight_and_are_called_once() -> None:
    """Blocks 0 and 1 have a weight in common, 2 is 3: of the five, the last alone would be a block."""
    model = models.build(f"{OWN}:shared")
    assert len(model.blocks) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{OWN}:choosing", r"depends on the values of its data.*\(own_models.py, line \d+: if tokens.sum\(\) > 0:\)"),
        (f"{OWN}:counting", r"does not run on inputs of shape \(2, 16\).*missing the required .forward"),
        (f"{OWN}:pair", "gives tuple, but the loss needs one tensor of logits"),
        (f"{OWN}:absent", r"has no function absent\(\)"),
        ("absent.py:build", "absent.py does not exist"),
        ("timm:vit_bass_patch16_224", "did you mean timm:vit_base_patch16_224"),
        ("timm:resnet50.no_tag", "cannot be built: RuntimeError"),
        ("timm:hf_hub:timm/resnet50", "timm has no model"),
        ("torchvision:fasterrcnn_resnet50_fpn", r"detects objects: .* FILE.py:build, with example_inputs\(\) and loss"),
        ("torchvision:raft_small", "estimates optical flow: its targets are fields of vectors"),
        ("torchvision:quantized_resnet18", "is quantized: it is made for inference"),
        ("torchvision:fcn_resnet5", "did you mean torchvision:fcn_resnet50"),
        ("jax:resnet50", r"is timm:NAME, torchvision:NAME, hf:FOLDER .* or FILE.py:FUNCTION"),
    ],
)
def test_foreign_model_that_cannot_be_built_or_traced_is_refused_in_one_sentence(name: str, words: str) -> None:
    with pytest.raises(LabError, match=words) as refused:
        models.build(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("maker", ["computed", "read"])
def test_foreign_builder_that_computes_sizes_with_tensors_is_built_on_the_cpu(maker: str) -> None:
    name = f"{own_builders.__file__}:{maker}"
    with on_meta():
        built = models.build(name)
    plain = getattr(own_builders, maker)()
    assert sum(one.numel() for one in built.parameters()) == sum(one.numel() for one in plain.parameters())
    assert {one.device.type for one in (*built.parameters(), *built.buffers())} == {"meta"}
    assert len(tied_names(built)) == 1  # the head stays the embedding's matrix
    assert models.describe(name).parameters == sum(one.numel() for one in plain.parameters())


@pytest.mark.parametrize("name", ["regnet_x_400mf", "regnet_y_16gf"])
def test_torchvision_s_regnets_count_the_same(name: str) -> None:
    """Source: torchvision's `WeightsEnum.meta`, `num_params`."""
    ensure_torchvision_imports()
    from torchvision.models import get_model_weights

    assert models.describe(f"torchvision:{name}").parameters == get_model_weights(name).DEFAULT.meta["num_params"]


@pytest.mark.parametrize(("name", "weight"), [("googlenet", 0.3), ("inception_v3", 0.4)])
def test_auxiliary_heads_are_those_of_get_model(name: str, weight: float) -> None:
    ensure_torchvision_imports()
    import torchvision

    with torch.device("meta"):
        plain = torchvision.models.get_model(name, weights=None, init_weights=False)
        model = models.build(f"torchvision:{name}", num_classes=1000)
    counted = sum(one.numel() for one in plain.parameters())
    assert counted == {"googlenet": 13_004_888, "inception_v3": 27_161_264}[name]
    assert models.describe(f"torchvision:{name}").parameters == counted
    assert sum(one.numel() for one in model.parameters()) == counted
    head, aux = torch.randn(2, 5), torch.randn(2, 5)
    targets = torch.tensor([1, 4])
    expected = F.cross_entropy(head, targets) + weight * F.cross_entropy(aux, targets)
    assert torch.allclose(loss_of(model)((head, aux), targets), expected)
    assert torch.equal(loss_of(model)(head, targets), F.cross_entropy(head, targets))
    assert str(weight) in models.about(f"torchvision:{name}")


@pytest.mark.parametrize(("name", "classes"), [("lraspp_mobilenet_v3_large", 21), ("mc3_18", 400), ("mvit_v2_s", 400)])
def test_torchvision_s_other_kinds_count_the_same(name: str, classes: int) -> None:
    """Source: torchvision's `WeightsEnum.meta`, `num_params`."""
    ensure_torchvision_imports()
    from torchvision.models import get_model_weights

    counted = models.describe(f"torchvision:{name}")
    assert counted.parameters == get_model_weights(name).DEFAULT.meta["num_params"]
    assert (counted.num_classes, counted.image_size) == (classes, None)


def test_loss_of_segmentation_is_compared_pixel_by_pixel() -> None:
    """With a class for what does not count, and half the loss of an auxiliary head."""
    with on_meta():
        model = models.build("torchvision:lraspp_mobilenet_v3_large")
    out, aux = torch.randn(2, 21, 4, 4), torch.randn(2, 21, 4, 4)
    targets = torch.randint(0, 21, (2, 4, 4))
    targets[0, :2] = 255
    losses = [F.cross_entropy(one, targets, ignore_index=255) for one in (out, aux)]
    assert torch.equal(loss_of(model)({"out": out}, targets), losses[0])
    assert torch.allclose(loss_of(model)({"out": out, "aux": aux}, targets), losses[0] + 0.5 * losses[1])


def test_a_model_without_classes_says_so() -> None:
    assert "which timm’s configuration has not" in models.about("timm:aimv2_large_patch14_224")
    assert models.about("timm:resnet18") == models.about("gpt_tiny") == ""


def test_an_own_file_may_import_torchvision_where_its_operators_do_not_load() -> None:
    """In a process of its own, in which nothing has imported torchvision yet."""
    code = f"import dlojz.models as m; print(m.describe({str(own_builders.__file__) + ':computed'!r}).parameters)"
    root = Path(__file__).parents[2]
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root).stdout
    assert int(printed) == sum(one.numel() for one in own_builders.computed().parameters())


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        (f"{OWN}:chained", own_models.LAYERS + 2),
        *(("torchvision:resnet18", 10), ("timm:vit_tiny_patch16_224", 14), ("timm:convnext_atto", 14)),
    ],
)
def test_a_chain_computes_what_the_module_computes(name: str, blocks: int) -> None:
    """With the same weights: stem, a block for each part with what stands between, head."""
    torch.manual_seed(0)
    chain = models.build(f"chain:{name}")
    torch.manual_seed(0)
    module = models.build(name)
    assert chain.is_chain and len(chain.blocks) == blocks
    assert sum(one.numel() for one in chain.parameters()) == sum(one.numel() for one in module.parameters())
    inputs = torch.arange(own_models.TOKENS).reshape(1, -1) if OWN in name else torch.rand(1, 3, 224, 224)
    assert torch.equal(chain.eval()(inputs), module.eval()(inputs))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{OWN}:skipping", "between layers.1 and layers.2 2 values pass"),
        (f"{OWN}:measuring", r"cannot be traced: .*\(own_models.py, line \d+: if tokens.shape"),
        ("torchvision:densenet121", "between features.denseblock1.denselayer1 and .*denselayer2 2 values pass"),
        ("torchvision:vgg11", "no blocks that repeat"),
    ],
)
def test_foreign_chain_of_blocks_says_where_it_breaks(name: str, words: str) -> None:
    with pytest.raises(LabError, match=f"is no chain of blocks.*{words}"):
        dlojz.predict(RunConfig.of(model=name, pp=2, micro_batches=2))
    with pytest.raises(LabError, match="is no chain of blocks"):  # before a process is started
        check_runnable(RunConfig.of(model=name, checkpointing="full"))


def test_predict_refuses_a_foreign_weight_of_two_stages() -> None:
    with pytest.raises(LabError, match=r"own_models.py:build computes with blocks.0.token.weight in two blocks"):
        dlojz.predict(RunConfig.of(model=f"{OWN}:build", pp=2, micro_batches=2))


def test_a_loss_of_one_s_own_reads_any_output() -> None:
    name = str(Path(own_models.__file__).with_name("own_loss.py")) + ":build"
    model = models.build(name)
    tokens = torch.arange(own_models.TOKENS).reshape(1, -1)
    output = model(tokens)
    assert isinstance(output, tuple)
    assert torch.equal(loss_of(model)(output, tokens), mean_loss(output[0], tokens) + 1)
    assert loss_of(models.build(f"{OWN}:build")) is mean_loss


CONFIGURATION = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "dtype": "bfloat16",
    "auto_map": {"AutoModelForCausalLM": "elsewhere--code.Model"}, "_attn_implementation": "somebody/kernel",
}  # fmt: skip


@pytest.fixture
def transformers() -> None:
    """Skip without the optional extra; torchvision's operators first, which transformers looks for."""
    ensure_torchvision_imports()
    pytest.importorskip("transformers")


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("named", ["folder", "file"])
def test_foreign_configuration_of_transformers_is_built_in_fp32(tmp_path: Path, named: str) -> None:
    """In fp32, without the code and the kernel that it names; the file is part of the run's name."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGURATION))
    name = f"hf:{tmp_path if named == 'folder' else file}"
    model = models.build(name, sequence_length=8)
    assert len(model.blocks) == 4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 256)
    assert RunConfig.of(model=name).model_name == f"{tmp_path.name}/config.json"
    before = RunConfig.of(model=name).hash
    file.write_text(json.dumps({**CONFIGURATION, "num_hidden_layers": 2}))
    assert RunConfig.of(model=name).hash != before


def test_initial_values_are_skipped_on_meta_and_a_forward_pass_is_not() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with on_meta():
        weight, x = torch.nn.Parameter(torch.empty(4, 4)), torch.empty(4, 4)
        with Seen(), torch.no_grad():
            assert weight.uniform_(-1, 1).erfinv_().mul_(2.0).add_(1.0).clamp_(-2.0, 2.0) is weight
            assert seen == []
            x.mul_(2.0).clamp_(-2.0, 2.0)
    assert seen[0] == "mul_" and len(seen) > 1


@pytest.mark.usefixtures("transformers")
def test_foreign_configuration_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"no config.json in .*/none here, and nothing is downloaded: .* hf:FOLDER"):
        models.build(f"hf:{tmp_path / 'none'}")


@pytest.mark.usefixtures("transformers")
def test_foreign_folder_without_a_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder itself, also the one in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "."):
        with pytest.raises(LabError, match=rf"there is no config.json in {re.escape(folder)} here"):
            models.build(f"hf:{folder}")


def test_foreign_spec_refuses_a_function_that_returns_no_module(tmp_path: Path) -> None:
    file = tmp_path / "number.py"
    file.write_text("import torch\ndef build(): return 3\ndef example_inputs(): return torch.zeros(2, 3)\n")
    with pytest.raises(LabError, match=r"number.py:build gives int: the function that is named must return the module"):
        models.spec(f"{file}:build")


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"is no configuration of transformers.* JSONDecodeError: Expecting property name .*char 1\)\.$"),
        ("[]", "is no configuration of transformers"),
        ("{}", "a JSON file with a model_type: KeyError"),
        ('{"model_type": "lama"}', "does not know the architecture 'lama' of .*: did you mean llama"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot be built"),
        (
            '{"model_type": "encodec"}',
            r"EncodecModel of .* does not run on the inputs made here \(input_values .*FILE.py:build",
        ),
    ],
)
def test_foreign_file_that_is_no_configuration_is_refused_in_one_sentence(
    tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(LabError, match=words) as refused:
        models.build(f"hf:{tmp_path}")
    assert "\n" not in str(refused.value)


def test_foreign_models_have_transformers_as_an_optional_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LabError, match=r"pip install 'dlojz\[transformers\]'"):
        models.build(f"hf:{tmp_path}")


def test_describe_takes_an_image_of_another_size() -> None:
    assert models.describe("timm:vit_tiny_patch16_224", 32).flops < models.describe("timm:vit_tiny_patch16_224").flops
    with pytest.raises(LabError, match="timm:vit_tiny_patch16_224 .*8"):
        models.describe("timm:vit_tiny_patch16_224", 8)
    with pytest.raises(LabError, match="reads images: sequence_length has no meaning"):
        models.describe("timm:resnet18", sequence_length=4)


def test_a_module_is_predicted_like_its_file_and_stays_as_it_is() -> None:
    """On any device, its tied matrix once; predicted again after a change, it is the changed one."""
    module, tokens = own_models.build().eval(), own_models.example_inputs()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    fields: dict[str, Any] = {"dp": 8, "zero": 3}
    of_file = dlojz.predict(f"{OWN}:build", micro_batch=len(tokens), **fields)
    assert dlojz.predict(module, tokens, **fields) == of_file
    assert not module.training and all(torch.equal(before[name], one) for name, one in module.state_dict().items())
    with on_meta():
        assert dlojz.predict(own_models.build(), tokens.to("meta"), **fields) == of_file
    module.layers = torch.nn.ModuleList(list(module.layers.children())[:3])  # type: ignore[union-attr]
    assert (dlojz.predict(module, tokens, **fields).parameters or 0) < (of_file.parameters or 0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: dlojz.predict(own_models.build(), torch.zeros(2, 3, 8, 8)), "does not run on inputs of shape"),
        (lambda: dlojz.predict(own_models.build(), cast(Any, [1, 2])), "example of inputs gives int: a tensor"),
        (lambda: dlojz.predict(own_models.Choosing(), own_models.example_inputs()), "depends on the values"),
        (lambda: dlojz.predict(cast(Any, 3)), "3 was received"),
        (lambda: dlojz.predict(RunConfig.of(model="gpt_tiny"), dp=2), "dp was received with it"),
    ],
)
def test_what_is_no_module_to_predict(asked: Callable[[], object], words: str) -> None:
    with pytest.raises(LabError, match=words) as refused:
        asked()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(2, 3), torch.zeros(4, 3)), r"gives \(2, 3\) and \(4, 3\): a tensor is needed"),
        ({"x": torch.zeros(2, 3), "scale": 0.5}, "gives float: a tensor is needed"),
        ((), "gives tuple"),
        ({"words": torch.zeros(2, 3)}, r"does not run on inputs of shape words \(2, 3\)"),
    ],
)
def test_predict_refuses_inputs_that_do_not_fit_in_one_sentence(batch: object, words: str) -> None:
    with pytest.raises(LabError, match=words) as refused:
        dlojz.predict(own_models.build(), batch)
    assert "\n" not in str(refused.value)


def test_a_module_is_predicted_on_several_inputs() -> None:
    """As a tuple for its arguments and as a dict for its keywords; what reads several tensors is no chain of blocks."""
    module, (image, numbers) = own_shapes.build(), own_shapes.example_inputs()
    told = [dlojz.predict(module, batch, dp=2) for batch in ((image, numbers), {"image": image, "numbers": numbers})]
    assert told[0].memory == told[1].memory and told[0].communication == told[1].communication
    assert told[0].parameters == sum(one.numel() for one in module.parameters())
    with pytest.raises(LabError, match="no chain of blocks.*it reads more than one tensor"):
        dlojz.predict(module, (image, numbers), checkpointing="full")
    with pytest.raises(LabError, match="reads tensors of a shape: image_size has no meaning"):
        dlojz.predict(module, (image, numbers), image_size=64)


@pytest.mark.nightly
def test_every_model_of_torchvision_is_forecast_or_refused_for_what_it_is() -> None:
    """All that classify, segment or read videos; 15 of the 27 that detect, segment or read videos."""
    import torchvision.models as zoo

    reasons = {
        zoo.detection: "detects objects",
        zoo.quantization: "is quantized",
        zoo.optical_flow: "estimates optical flow",
    }
    for module, reason in reasons.items():
        for name in zoo.list_models(module=module):
            with pytest.raises(LabError, match=f"{reason}.*FILE.py:build"):
                dlojz.predict(f"torchvision:{name}")
    forecast = [name for module in (zoo, zoo.segmentation, zoo.video) for name in zoo.list_models(module=module)]
    for name in forecast:
        assert (dlojz.predict(f"torchvision:{name}").memory.peak_bytes or 0) > 0, name
    assert len(forecast) >= 95
