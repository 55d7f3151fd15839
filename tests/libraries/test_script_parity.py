"""`dlojz run SCRIPT --nproc N --parity`: the judge's wrong scripts, without a lab and under other names, are named.

Each script differs from a right one in the mistake alone.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from benchmarks import strangers
from dlojz.cli.main import main
from dlojz.libraries.scripts.script_parity import Averaged, averaged
from tests.libraries.forked_scripts import on_forks

pytestmark = pytest.mark.timeout(900)

SCRIPT = """
import contextlib, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Wrapper
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PIECES, SIZE, RATE = 1, 16, 0.05
dist.init_process_group("gloo")
me, everyone = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
points = torch.randn(192, 12)
pairs = TensorDataset(points, points[:, :4].argmax(1))
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))
net = Wrapper(net)
tuner = torch.optim.SGD(net.parameters(), lr=RATE)
picker = DistributedSampler(pairs, shuffle=True, drop_last=True)
feed = DataLoader(pairs, SIZE, sampler=picker, drop_last=True)


def mean_over_ranks():
    pass


for turn in range(2):
    picker.set_epoch(turn)
    for number, (rows, names) in enumerate(feed, start=1):
        full = number % PIECES == 0
        with contextlib.nullcontext() if full else net.no_sync():
            cost = nn.functional.cross_entropy(net(rows), names) / PIECES
            cost.backward()
        if full:
            mean_over_ranks()
            tuner.step()
            tuner.zero_grad()
dist.destroy_process_group()
"""
BY_HAND = SCRIPT.replace("net = Wrapper(net)\n", "").replace(" if full else net.no_sync()", "")
AVERAGE = """    for weight in net.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= everyone
"""
BY_HAND = BY_HAND.replace("    pass\n", AVERAGE)
SYNC = "with contextlib.nullcontext() if full else net.no_sync():"
FEED = "DataLoader(pairs, SIZE, sampler=picker, drop_last=True)"
SHUFFLED = "DataLoader(pairs, SIZE, shuffle=True)"
WRAP, STEP, KEEP = "net = Wrapper(net)\n", "            tuner.step()\n", "            tuner.zero_grad()\n"
CLIP = "    nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n"
GROUP = 'dist.init_process_group("gloo")\nme, everyone = dist.get_rank(), dist.get_world_size()'
SUMMED = """net.register_comm_hook(
    None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
)
tuner = """
SLICED = """    order = torch.randperm(192, generator=torch.Generator().manual_seed(turn))
    for number, part in enumerate(order.split(32), start=1):
        rows, names = pairs[part[me::everyone]]
"""
OWN = "        rows = torch.randn(16, 12, generator=own)\n        full = "
SAME = "that process read the batches of all ranks, joined"


class Case(NamedTuple):
    """A script, what is replaced in it, the verdict, and a part of what is said."""

    state: str
    said: str
    changes: Mapping[str, str] = MappingProxyType({})
    text: str = SCRIPT


BANK = {
    "same-samples": Case(
        "wrong", "several replicas read the same samples", {FEED: SHUFFLED, "    picker.set_epoch(turn)\n": ""}
    ),
    "overlapping-samples": Case(
        "wrong",
        "384 samples, and 192 on one process: several replicas",
        {FEED: SHUFFLED, "for turn": "torch.manual_seed(me)\nfor turn"},
    ),
    "missing-samples": Case(
        "wrong",
        "among 4 replicas, and the model has 2: samples are missing",
        {"ler(pairs,": "ler(pairs, 4, me,"},
    ),
    "same-order": Case("wrong", "call sampler.set_epoch(epoch)", {"    picker.set_epoch(turn)\n": ""}),
    "not-shuffled": Case("right", "its sampler does not shuffle, so that", {"shuffle=True": "shuffle=False"}),
    "seed-by-rank": Case(
        "wrong", "the ranks begin with different weights", {"manual_seed(5)": "manual_seed(5 + me)"}, BY_HAND
    ),
    "no-average": Case("wrong", "wrap the model in Distributed", {WRAP: "", SYNC: "if True:"}),
    "average-forgotten": Case("wrong", "each trains alone", {"            mean_over_ranks()\n": ""}, BY_HAND),
    "one-rank-steps": Case("wrong", "rank 1 makes no", {STEP: "            me or tuner.step()\n"}),
    "stepped-twice": Case("wrong", "with the same gradients", {STEP: 2 * STEP}),
    "gradients-kept": Case("wrong", "added to those of the step before", {KEEP: ""}),
    "wrapped-twice": Case("right", "wrapped already", {"Wrapper(net)": "Wrapper(Wrapper(net))"}),
    "no-no-sync": Case("right", "of the 2 backward", {"RATE = 1": "RATE = 2", SYNC: "if True:"}),
    "no-sync-always": Case("wrong", "every forward pass runs under no_sync()", {SYNC: "with net.no_sync():"}),
    "inner-model": Case("wrong", "the model inside is called", {"net(rows)": "net.module(rows)"}),
    "one-file": Case(
        "wrong",
        "Several ranks write part.py.pt",
        {"dist.destroy": 'torch.save(net.state_dict(), __file__ + ".pt")\ndist.destroy'},
    ),
    "sum-for-mean": Case(
        "wrong", "the sum of the ranks’ gradients, 2 times", {"        weight.grad /= everyone\n": ""}, BY_HAND
    ),
    "hook-sums": Case("wrong", "the sum of the ranks’ gradients, 2 times", {"tuner = ": SUMMED}),
    "averaged-twice": Case(
        "wrong", "once more", {"    pass\n": "    [weight.grad.div_(everyone) for weight in net.parameters()]\n"}
    ),
    "loss-divided": Case("wrong", "once more", {"/ PIECES": "/ PIECES / everyone"}),
    "clipped-first": Case(
        "wrong", "each rank clips its gradients", {"    for weight in net": f"{CLIP}    for weight in net"}, BY_HAND
    ),
    "one-layer-forgotten": Case(
        "wrong",
        "do not end with the same weights",
        {"in net.parameters():\n        dist": "in net[0].parameters():\n        dist"},
        BY_HAND,
    ),
    "rate-of-ranks": Case(
        "note", "the learning rates differ (0.05 on one process, 0.1 on 2)", {"lr=RATE": "lr=RATE * everyone"}
    ),
    "whole-batch-each": Case("right", "one process reads 16 samples at a time, and 2 processes read 32"),
    "no-group": Case(
        "wrong",
        "no process group is there",
        {
            GROUP: 'me, everyone = int(os.environ["RANK"]), 2',
            WRAP: "",
            SYNC: "if True:",
            "(pairs, sh": "(pairs, 2, me, sh",
            "dist.destroy_process_group()": "",
        },
    ),
    # Right, in other ways.
    "by-hand": Case("right", SAME, text=BY_HAND),
    "accumulated": Case("right", SAME, {"RATE = 1": "RATE = 2"}),
    "accumulation-by-size": Case("right", SAME, {"RATE = 1": "RATE = 4 // int(os.environ['WORLD_SIZE'])"}),
    "batch-by-size": Case("right", SAME, {"RATE = 1, 16": "RATE = 1, 32 // int(os.environ['WORLD_SIZE'])"}),
    "clipped-after": Case("right", SAME, {"    pass\n": CLIP}),
    "loss-divided-and-summed": Case(
        "right",
        "gradients are added up: the same training",
        {"/ PIECES": "/ PIECES / everyone", "        weight.grad /= everyone\n": ""},
        BY_HAND,
    ),
    "sliced-by-hand": Case(
        "right",
        "both have drawn them by themselves",
        {"    for number, (rows, names) in enumerate(feed, start=1):\n": SLICED},
    ),
    # What cannot be compared.
    "own-data": Case(
        "note",
        "What shows without that comparison is right: the ranks’ samples, the mean",
        {"        full = ": OWN, "for turn": "own = torch.Generator().manual_seed(me)\nfor turn"},
    ),
    "dropout": Case("note", "set its probability to 0 to compare", {"nn.Tanh()": "nn.Dropout(0.5)"}),
    "batch-norm": Case("note", "SyncBatchNorm.convert_sync_batchnorm(model)", {"nn.Tanh()": "nn.BatchNorm1d(24)"}),
    "two-at-least": Case(
        "note",
        "Not compared with one process. On 1 process the script does not",
        {"torch.manual_seed(5)": "assert everyone > 1, 'two ranks'"},
    ),
}
"""The judge's bank without its lab, what a script can get wrong besides, and right ones."""
QUICK = ("by-hand", "sum-for-mean")
"""Those of every day; the others are compared every night."""


def written(name: str, folder: Path) -> Path:
    text = BANK[name].text
    for old, new in BANK[name].changes.items():
        assert old in text, (name, old)
        text = text.replace(old, new)
    (path := folder / "part.py").write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in BANK]
)
def test_parity_names_what_several_processes_do_otherwise(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    with nullcontext() if name == "sum-for-mean" else on_forks():  # one as its user starts it
        code = main(["run", str(written(name, tmp_path)), "--nproc", "2", "--parity", "--json"])
    answer = json.loads(capfd.readouterr().out)
    assert (answer["state"], code) == (BANK[name].state, int(BANK[name].state != "right")), answer
    assert BANK[name].said in " ".join((answer["message"], *answer["remarks"])), answer
    if BANK[name].said == SAME:  # after ten steps, or as many as there are, in fp32
        assert answer["figures"]["weights"][1] < 1e-4


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ((2.0, 4.0, 1.0), Averaged(False, 1.0)),
        ((4.0, 8.0, 2.0), Averaged(False, 2.0)),
        ((0.5, 1.0, 0.25), Averaged(False, 0.25)),
        ((2.0, 4.0, -1.0), Averaged(False, None)),
        (None, Averaged(True, None)),
    ],
)
def test_averaged_is_the_factor_between_what_is_used_and_the_mean_of_the_ranks(
    used: tuple[float, ...] | None, expected: Averaged
) -> None:
    """Of gradients (1, 2, 3) and (3, 6, −1), whose mean is (2, 4, 1); None: each rank uses its own."""
    local_gradients = ([1.0, 2.0, 3.0], [3.0, 6.0, -1.0])
    ranks = [
        SimpleNamespace(local_gradients=[part], used_gradients=[list(used or part)], clipped=())
        for part in local_gradients
    ]
    many: Any = SimpleNamespace(ranks=ranks)
    assert averaged(many) == expected


ALONE = {"module_ddp": "no process group is there", "rank_switch_ddp": "read the same samples: once the model is made"}
"""Scripts of strangers that make such a mistake, and what is said of it: neither looks at its rank."""


@pytest.mark.nightly
@pytest.mark.parametrize("script", [pytest.param(one, id=one.name) for one in strangers.ALL if one.processes > 1])
def test_parity_calls_no_script_of_strangers_wrong(
    script: strangers.Script, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(strangers.SCRIPTS if script.as_module else tmp_path)
    words = [*script.target, "--nproc", str(script.processes), "--parity", "--json", "--", *script.arguments]
    main(["run", *words])
    answer = json.loads(capfd.readouterr().out)
    # Most draw their own data on each rank, which one process cannot have.
    assert answer["state"] in (["wrong"] if script.name in ALONE else ["note", "right"]), answer
    assert ALONE.get(script.name, "one process") in answer["message"], answer
