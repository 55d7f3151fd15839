from pathlib import Path

import pytest
import torch

from dlojz import data
from dlojz.base.errors import LabError
from dlojz.data.datasets import MicroBatchSampler, micro_batches


def test_digits_are_the_real_ones_scaled_up() -> None:
    from sklearn.datasets import load_digits

    original = load_digits()
    small = data.load("digits", family="image", num_classes=10, image_size=8)
    grey = torch.from_numpy(original.images).float() / 16
    assert len(small) == len(grey) == 1797
    assert torch.equal(torch.stack([small[index][0][0] for index in range(1797)]), (grey - grey.mean()) / grey.std())
    assert [int(small[index][1]) for index in range(1797)] == original.target.tolist()
    image_CHW, label = data.load("digits", family="image", num_classes=10, image_size=64)[7]
    assert image_CHW.shape == (3, 64, 64)
    assert int(label) == original.target[7]
    # Averaging the enlarged image over 8×8 cells gives the small one back, up to the smoothing of the edges.
    averages = torch.nn.functional.adaptive_avg_pool2d(image_CHW[:1], 8)[0].flatten()
    assert torch.corrcoef(torch.stack([averages, grey[7].flatten()]))[0, 1] > 0.97


def test_synthetic_data_depends_on_index_and_seed_alone() -> None:
    first = data.load("synthetic", family="image", num_classes=7, seed=3, image_size=32)
    again = data.load("synthetic", family="image", num_classes=7, seed=3, image_size=32)
    other = data.load("synthetic", family="image", num_classes=7, seed=4, image_size=32)
    assert torch.equal(first[11][0], again[11][0])
    assert not torch.equal(first[11][0], other[11][0])
    assert not torch.equal(first[11][0], first[12][0])


def test_prose_is_english_and_targets_are_the_next_byte() -> None:
    prose = data.load("text", family="text", num_classes=256, sequence_length=80)
    inputs_T, targets_T = prose[100]
    assert inputs_T.shape == targets_T.shape == (80,)
    assert torch.equal(inputs_T[1:], targets_T[:-1])
    text = b"".join(bytes(prose[index][0].tolist()) for index in range(200)).decode(errors="replace")
    assert " the " in text


def test_a_data_set_that_is_not_there_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSDIR", raising=False)
    with pytest.raises(LabError, match="--data-root FOLDER"):
        data.check_available("imagenet")
    with pytest.raises(LabError, match="no folder train/"):
        data.check_available("imagenet", str(tmp_path))
    monkeypatch.setenv("DSDIR", str(tmp_path))
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    data.check_available("imagenet")


def test_imagenet_is_read_from_its_folder(tmp_path: Path) -> None:
    from PIL import Image

    for label in ("n01", "n02"):
        (tmp_path / "train" / label).mkdir(parents=True)
        Image.new("RGB", (80, 60), "red").save(tmp_path / "train" / label / "one.jpg")
    images = data.load("imagenet", family="image", num_classes=2, image_size=32, data_root=str(tmp_path))
    image_CHW, label = images[1]
    assert image_CHW.shape == (3, 32, 32)
    assert label == 1
    assert image_CHW[0].mean() > image_CHW[1].mean()


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_every_layout_sees_the_same_micro_batches(dp: int) -> None:
    """Micro-batch j of replica r is number j·dp + r of the step, over epoch ends too."""

    def steps(dp: int, micro_batches_per_step: int) -> list[list[list[int]]]:
        replicas = [
            iter(MicroBatchSampler(50, micro_batch=2, global_batch=12, dp=dp, dp_rank=rank, seed=5))
            for rank in range(dp)
        ]
        return [[next(replica) for _ in range(micro_batches_per_step) for replica in replicas] for _ in range(11)]

    assert steps(dp, 6 // dp) == steps(1, 6)


def test_an_epoch_repeats_no_sample_and_the_next_is_shuffled_anew() -> None:
    sampler = iter(MicroBatchSampler(24, micro_batch=4, global_batch=8, seed=0))
    first = [index for _ in range(6) for index in next(sampler)]
    second = [index for _ in range(6) for index in next(sampler)]
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(LabError, match="10 samples.*global batch of 16"):
        MicroBatchSampler(10, micro_batch=16, global_batch=16)


def test_micro_batches_are_stacked() -> None:
    digits = data.load("digits", family="image", num_classes=10, image_size=8)
    sampler = MicroBatchSampler(len(digits), micro_batch=5, global_batch=5)
    inputs_BCHW, targets_B = next(micro_batches(digits, sampler))
    assert inputs_BCHW.shape == (5, 3, 8, 8)
    assert targets_B.shape == (5,)


def test_the_size_the_catalogue_tells_is_the_size() -> None:
    digits = data.load("digits", family="image", num_classes=10, image_size=8)
    data.check_available("digits", global_batch=len(digits))
    with pytest.raises(LabError, match="make the batch smaller"):
        data.check_available("digits", global_batch=len(digits) + 1)
