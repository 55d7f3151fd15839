"""torchvision and timm import beside any torch, and nothing is imported before it is needed."""

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_torchvision_and_timm_import_in_a_fresh_process() -> None:
    code = (
        "from dlojz.models.foreign.vision_packages import ensure_torchvision_imports as ensure\n"
        "ensure(); ensure()\n"
        "import torchvision, timm\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_neither_is_imported_by_our_modules() -> None:
    code = (
        "import sys, dlojz.models, dlojz.models.coatnet, dlojz.data.datasets\n"
        "sys.exit(bool({'timm', 'torchvision'} & set(sys.modules)))"
    )
    assert run(code).returncode == 0


def test_an_extension_that_loads_is_left_alone() -> None:
    # The operator defined beforehand stands for an extension that has registered it.
    code = (
        "import torch\n"
        "mine = torch.library.Library('torchvision', 'FRAGMENT')\n"
        "mine.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        "from dlojz.models.foreign import vision_packages\n"
        "vision_packages.ensure_torchvision_imports()\n"
        "assert vision_packages._libraries == []\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
