"""The judge of the growing script, on real processes: each lab's solution is right, and mistakes are named."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import Language, use_language
from dlojz.cli.main import main
from dlojz.labs.kit.exercise import Verdict, Wrong
from dlojz.labs.script import script_judge
from dlojz.labs.script.growing_script import LAST, script_of
from dlojz.labs.script.script_judge import judge_script
from dlojz.libraries.scripts.script_parity import check_saves

PREDICTED = {3: 2, 4: 2, 5: 2, 6: 1, 7: 2, 8: 1, 9: 1, 11: 1, 12: 2}
"""Runs of each lab's script whose messages are predicted."""
DAILY = (3,)
"""Labs whose script is judged every day: data parallelism; all of them every night."""


def judged(lab: int, text: str, folder: Path) -> Verdict:
    """Judge a text as a lab's script."""
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return judge_script(f"{lab:02}", path)


@pytest.mark.parametrize(
    "lab", [lab if lab in DAILY else pytest.param(lab, marks=pytest.mark.nightly) for lab in range(LAST + 1)]
)
def test_the_script_of_each_lab_is_right(lab: int, tmp_path: Path) -> None:
    verdict = judged(lab, script_of(lab, "en"), tmp_path)
    assert verdict.state == "right", verdict
    assert verdict.message.count(", as predicted") == PREDICTED.get(lab, 0), verdict
    assert "predicted for such a model" not in verdict.message, verdict


@pytest.mark.parametrize(
    ("saved", "is_refused"), [(("a", "b", "c"), False), (("a", "b", "b"), True), (("a", "a", ""), True)]
)
def test_check_saves_refuses_two_ranks_that_write_one_file(saved: tuple[str, ...], is_refused: bool) -> None:
    """Also where rank 0 is none of the two."""
    trial: Any = SimpleNamespace(ranks=[SimpleNamespace(saved=(path,) if path else ()) for path in saved])
    with pytest.raises(Wrong, match="Several ranks write") if is_refused else nullcontext():
        check_saves(trial)


@pytest.mark.parametrize(
    ("exact", "predicted", "words"),
    [
        (True, (600, 208), ", as predicted"),
        (False, (600, 208), ", as many as predicted for such a model, by other messages"),
        (False, (1024, 1024), " (2.00 KiB predicted for such a model)"),
        (None, (0, 0), ""),
    ],
)
def test_what_is_sent_stands_beside_what_was_predicted(
    exact: bool | None, predicted: tuple[int, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [SimpleNamespace(message_bytes=SimpleNamespace(predicted=one)) for one in predicted]
    row = SimpleNamespace(exact=exact, communication=pairs)
    monkeypatch.setattr(script_judge, "compare", lambda record: SimpleNamespace(rows=[row]))
    trial: Any = SimpleNamespace(sent_bytes=808, record=None)
    assert str(script_judge._beside_prediction(trial)) == words


LOADER = "loader = DataLoader(samples, args.batch // replicas // micro_batches, sampler=sampler, drop_last=True)"
WRAP = "model = DistributedDataParallel(model)"
BY_BLOCK = """    for block in model.blocks:
        fully_shard(block)
"""
NO_SYNC = "with contextlib.nullcontext() if last else model.no_sync():"
GATHERED = "ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())"
MLPS = 'plan = {"blocks.*.fc1": ColwiseParallel(), "blocks.*.fc2": RowwiseParallel()}'
LOAD = '    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=args.load)\n'

WRONG: dict[str, tuple[int, list[tuple[str, str]], str]] = {
    "no-step": (0, [("        optimizer.step()\n", "")], "before any optimizer made a step"),
    "nothing-learnt": (0, [("lr=args.lr", "lr=0.0")], "The loss does not fall"),
    "recomputed-nothing": (2, [("if args.checkpointing", "if False")], "--checkpointing keeps"),
    "block-twice": (
        2,
        [("else block(x)\n", "else block(x)\n            x = x if args.checkpointing else block(x)\n")],
        "runs a layer 2 times",
    ),
    "bf16-nowhere": (2, [("    with precision:", "    with torch.enable_grad():")], "--bf16, no loss changes"),
    "same-samples": (
        3,
        [(LOADER, LOADER.replace("sampler=sampler", "shuffle=True")), ("    sampler.set_epoch(epoch)\n", "")],
        "several replicas read the same samples",
    ),
    "same-order": (3, [("    sampler.set_epoch(epoch)\n", "")], "call sampler.set_epoch"),
    "whole-batch-each": (3, [("args.batch // replicas //", "args.batch //")], "a step is to read --batch samples"),
    "no-average": (3, [(WRAP, ""), ("model.no_sync()", "contextlib.nullcontext()")], "wrap the model in Distributed"),
    "one-rank-steps": (
        3,
        [("        optimizer.step()\n", "        rank == 0 and optimizer.step()\n")],
        "rank 1 makes no",
    ),
    "stepped-twice": (
        3,
        [("        optimizer.step()\n", 2 * "        optimizer.step()\n")],
        "optimizer.step is called again with the same gradients",
    ),
    "gradients-kept": (3, [("        optimizer.zero_grad()\n", "")], "added to those of the step before"),
    "gradients-kept-by-one": (1, [("        optimizer.zero_grad()\n", "")], "added to those of the step before"),
    "wrapped-twice": (3, [(WRAP, f"{WRAP}\n{WRAP}")], "wraps 2 modules"),
    "no-no-sync": (3, [("model.no_sync()", "contextlib.nullcontext()")], "forward and backward, under model.no_sync()"),
    "not-divided": (3, [("loss_of(x, y) / micro_batches", "loss_of(x, y)")], "what each rank's loss is divided by"),
    "one-file": (
        3,
        [
            (
                "dist.destroy_process_group()",
                'torch.save(model.state_dict(), __file__ + ".pt")\ndist.destroy_process_group()',
            )
        ],
        "Several ranks write train.py.pt",
    ),
    "not-sharded": (4, [(f"{BY_BLOCK}    fully_shard(model)\n", "    pass\n")], "of the parameters: call fully_shard"),
    "root-first": (
        4,
        [(f"{BY_BLOCK}    fully_shard(model)\n", f"    fully_shard(model)\n{BY_BLOCK}")],
        "shard each block first, the model last",
    ),
    "one-unit": (4, [(BY_BLOCK, "")], "call it on each block first"),
    "root-whole": (4, [("    fully_shard(model)\n", "")], "call fully_shard on the whole model too"),
    "no-sync-of-fsdp": (4, [('if args.parallel == "ddp" and not last', "if not last")], "no attribute 'no_sync'"),
    "loaded-nothing": (4, [(LOAD, "")], "--load changes nothing"),
    "no-moments": (
        4,
        [(LOAD, LOAD.replace(', "optimizer": moments', ""))],
        "weights are read and the optimizer’s moments are not",
    ),
    "all-blocks": (5, [("model.blocks[rank * each : (rank + 1) * each]", "model.blocks")], "keep only the blocks"),
    "lost-block": (
        5,
        [("rank * each : (rank + 1) * each", "rank * each : rank * each + 1")],
        "part of the model is lost",
    ),
    "all-modules": (5, [("model.norm = model.head", "model.head")], "only the first one needs"),
    "other-samples": (5, [("(0, 1) if args", "(rank, size) if args")], "read 2 different shares"),
    "fewer-micro-batches": (5, [("(stage, args.accumulation,", "(stage, size,")], "into 2 micro-batches"),
    "bf16-beside-the-schedule": (
        5,
        [("    with precision:\n        if rank == 0:", "    with torch.enable_grad():\n        if rank == 0:")],
        "--accumulation 4 --bf16, no loss changes",
    ),
    "gpipe": (5, [("Schedule1F1B", "ScheduleGPipe")], "The schedule is ScheduleGPipe"),
    "no-plan": (6, [(MLPS, "plan = {}")], "are those of both layers of each MLP"),
    "rate-of-one-rank": (8, [("steps * args.batch /", "steps * args.batch / replicas /")], "as measured from outside"),
    "no-rate": (8, [('print(f"samples/s', 'print(f"rate')], "one for each of the two epochs is asked for"),
    "every-rank-prints": (
        8,
        [("    if rank == 0:\n        steps", "    if True:\n        steps")],
        "let rank 0 print it",
    ),
    "no-hook": (9, [("    if args.compress:", "    if False:")], "give DDP a hook"),
    "sum-of-ranks": (
        9,
        [(".to(torch.bfloat16) / replicas", ".to(torch.bfloat16)")],
        "must return the mean of the ranks",
    ),
    "not-fused": (9, [(", fused=args.fused", "")], "pass fused=args.fused"),
    "experts-summed": (
        10,
        [("lambda gradient: gradient / replicas", "lambda gradient: gradient")],
        "come from the tokens",
    ),
    "experts-of-rank-0": (10, [("for_model(model, list(own))", "for_model(model, [])")], "the experts of rank 0"),
    "other-order": (10, [("index_add(0, order, back)", "add(back)")], "in the order in which they left"),
    "all-experts": (10, [("[replica * own : (replica + 1) * own]", "")], "repeats must have the same size"),
    "not-rounded": (11, [("if args.quantize:", "if False:")], "different values in a product"),
    "no-slope": (
        11,
        [("weight + ((weight / scale).round() * scale - weight).detach()", "(weight / scale).round() * scale")],
        "a rounding has no slope",
    ),
    "masked-once": (11, [("            weight.data *= mask\n", "            pass\n")], "again after each step"),
    "no-stage": (12, [(', "zero_optimization": {"stage": 2}', "")], "give DeepSpeed’s configuration zero_optimization"),
    "divided-twice": (
        12,
        [("            accelerator.backward(loss)", "            accelerator.backward(loss / micro_batches)")],
        "look at what each rank's loss is divided by",
    ),
    "clipped": (12, [(', "gradient_clipping": 0.0', "")], 'unless its configuration says "gradient_clipping": 0.0'),
    "accelerate-alone": (12, [(", cpu=not on_gpu", "")], "Accelerator needs cpu=True"),
    "printed-nothing": (3, [("        total += loss.detach()\n", "")], "your script prints the loss 0 at step 1"),
    "printed-sum": (3, [("        total.zero_()\n", "")], "begin at zero for the next step"),
    "tp-on-two-axes": (
        7,
        [('(model, mesh["tp"], plan)', '(model, mesh if args.parallel == "tp" else mesh["tp"], plan)')],
        "On 2 processes, --parallel tp, your script does not come to its end",
    ),
    "no-sync-always": (3, [(NO_SYNC, "with model.no_sync():")], "every forward pass runs under no_sync()"),
    "inner-model": (3, [("F.cross_entropy(model(x)", "F.cross_entropy(model.module(x)")], "the model inside is called"),
    "not-shuffled": (3, [("shuffle=True", "shuffle=False")], "its sampler does not shuffle, so that set_epoch"),
    "last-blocks-first": (
        5,
        [
            (
                "model.blocks[rank * each : (rank + 1) * each]",
                "model.blocks[(size - 1 - rank) * each : (size - rank) * each]",
            )
        ],
        "the ranks hold them in another order",
    ),
    "both-by-columns": (6, [("RowwiseParallel()", GATHERED), ("ColwiseParallel()", GATHERED)], "and none by rows"),
    "tp-as-replica": (
        7,
        [('mesh["dp"].get_local_rank()', 'mesh["tp"].get_local_rank()')],
        "the rank's place along dp",
    ),
    "deepspeed-divided-twice": (
        12,
        [("model.backward(loss)", "model.backward(loss / micro_batches)")],
        "The gradients of the first step are 0.5 times as large",
    ),
    "one-axis": (7, [('"tp-fsdp": 2', '"tp-fsdp": 1')], "No parameter lies on a mesh of two axes"),
}


QUICK = ("same-order",)
"""What is judged every day, in one run; the others every night."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in WRONG]
)
def test_judge_script_names_a_mistake(name: str, tmp_path: Path) -> None:
    lab, changes, said = WRONG[name]
    text = script_of(lab, "en")
    for old, new in changes:
        assert old in text, name
        text = text.replace(old, new)
    verdict = judged(lab, text, tmp_path)
    assert verdict.state == "wrong" and said in verdict.message, verdict


@pytest.mark.parametrize(
    ("lab", "said"),
    [
        pytest.param(1, "No block with at least four parameters", marks=pytest.mark.nightly),
        pytest.param(
            2,
            "does not take the options of this lab (--checkpointing)",
            marks=pytest.mark.nightly,
        ),
        (3, "each process trains a model without the others"),
    ],
)
def test_the_script_of_the_lab_before_is_told_what_it_lacks(lab: int, said: str, tmp_path: Path) -> None:
    verdict = judged(lab, script_of(lab - 1, "en"), tmp_path)
    assert verdict.state == "wrong" and said in verdict.message, verdict


OWN = """
import argparse, os
import torch, torch.distributed as dist
from sklearn.datasets import load_digits

def main():
    words = argparse.ArgumentParser()
    for name, default in (("--epochs", 2), ("--batch", 64), ("--accumulation", 1)):
        words.add_argument(name, type=int, default=default)
    args = words.parse_args()
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for step in order.split(args.batch):
            if len(step) < args.batch:
                break
            optimizer.zero_grad()
            parts = step[rank::size].chunk(args.accumulation)
            for part in parts:
                model.require_backward_grad_sync = part is parts[-1]
                loss = torch.nn.functional.cross_entropy(model(images[part]), labels[part]) / len(parts)
                loss.backward()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            optimizer.step()
    if rank == 0:
        torch.save(net.state_dict(), os.devnull)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


RIGHT: dict[str, tuple[int, list[tuple[str, str]]]] = {
    "zeroed-by-hand": (
        1,
        [
            (
                "        optimizer.zero_grad()\n",
                "        for weight in model.parameters():\n            weight.grad.zero_()\n",
            )
        ],
    ),
    "autocast-of-amp": (
        2,
        [
            (
                "torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)",
                "torch.amp.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=args.bf16)",
            )
        ],
    ),
    "without-no-sync": (
        3,
        [
            (
                "        with contextlib.nullcontext() if last else model.no_sync():\n",
                "        model.require_backward_grad_sync = last\n        if True:\n",
            )
        ],
    ),
    "other-keys": (4, [('{"model": weights, "optimizer": moments}', '{"weights": weights, "adam": moments}')]),
    "block-by-block": (
        6,
        [
            (MLPS, 'plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}'),
            (
                "    parallelize_module(model, mesh, plan)",
                "    for block in model.blocks:\n        parallelize_module(block, mesh, plan)",
            ),
        ],
    ),
    "ignored-by-name": (
        10,
        [
            (
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(own))",
                "model._ddp_params_and_buffers_to_ignore = list(own)",
            )
        ],
    ),
    "smallest-by-order": (
        11,
        [(".kthvalue(int(args.prune * weight.numel())).values", ".sort()[0][int(args.prune * weight.numel()) - 1]")],
    ),
    "accelerate-steps-inside": (
        12,
        [
            (
                "            accelerator.backward(loss)",
                "            accelerator.backward(loss)\n            optimizer.step()\n            "
                "optimizer.zero_grad()",
            )
        ],
    ),
    "whole-batch-for-deepspeed": (
        12,
        [
            (
                '"train_micro_batch_size_per_gpu": args.batch // replicas // micro_batches',
                '"train_batch_size": args.batch',
            )
        ],
    ),
}
"""Other ways to write what a lab adds, as students did."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", RIGHT)
def test_judge_script_accepts_another_way(name: str, tmp_path: Path) -> None:
    lab, changes = RIGHT[name]
    text = script_of(lab, "en")
    for old, new in changes:
        assert old in text, name
        text = text.replace(old, new)
    verdict = judged(lab, text, tmp_path)
    assert verdict.state == "right", verdict


@pytest.mark.nightly
def test_a_script_written_in_another_way_is_right(tmp_path: Path) -> None:
    verdict = judged(3, OWN, tmp_path)
    assert verdict.state == "right" and "2 processes, --accumulation 2: loss" in verdict.message, verdict


ABSENT = "raise ModuleNotFoundError(\"No module named 'accelerate'\", name='accelerate')"


@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        ("en", "Not judged on 1 process: accelerate is not installed: pip install 'dlojz[libraries]'."),
        pytest.param(
            "fr",
            "Non vérifié sur 1 processus : accelerate n’est pas installé : pip install 'dlojz[libraries]'.",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_judge_script_calls_no_answer_wrong_for_a_library_of_the_course_that_is_missing(
    language: Language, sentence: str, tmp_path: Path
) -> None:
    use_language(language)
    verdict = judged(0, ABSENT, tmp_path)
    assert (verdict.state, verdict.message) == ("note", sentence)


def test_judge_script_leaves_a_module_that_nobody_knows_to_the_script(tmp_path: Path) -> None:
    assert judged(0, "import acelerate", tmp_path).state == "wrong"


@pytest.mark.nightly
def test_judge_script_of_lab_12_does_without_accelerate(tmp_path: Path) -> None:
    text = script_of(12, "en")
    line = next(line for line in text.splitlines() if "import Accelerator" in line)
    verdict = judged(12, text.replace(line.strip(), ABSENT), tmp_path)
    assert verdict.state == "right" and "--parallel deepspeed" in verdict.message, verdict
    assert verdict.message.splitlines()[-1] == (
        "Not judged on 2 processes, --parallel accelerate --accumulation 2: accelerate is not installed: pip install "
        "'dlojz[libraries]'."
    )


def test_the_command_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "train.py").write_text("import sys; sys.exit('no data')", encoding="utf-8")
    assert main(["labs", "judge", "00", str(path)]) == 1
    told = capsys.readouterr()
    assert "… 1 process" in told.err and "your script does not come to its end" in told.out
    assert main(["labs", "judge", "00", str(tmp_path / "other.py")]) == 2
    assert "is no file: give the path of the script" in capsys.readouterr().err
    assert main(["labs", "judge"]) == 2
    with pytest.raises(LabError, match="unknown lab '14'"):
        judge_script("14", path)
