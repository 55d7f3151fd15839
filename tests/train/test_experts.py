"""Mixtures of experts under the engines: the losses of one process, what is predicted is counted, and resumed."""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlojz import predict
from dlojz.config.run_config import RunConfig
from dlojz.prediction.shapes import RankPart, model_shapes
from dlojz.prediction.states import predict_states
from dlojz.results.record import read_events
from dlojz.running.state import loads_of
from tests.train.counted import (
    check_as_predicted,
    check_checkpoint_bytes,
    check_goes_on,
    check_refused,
    footprint,
    going_on_from,
    prepare_runs,
)

MOE: dict[str, Any] = {"model": "moe_tiny", "sequence_length": 16, "micro_batch": 2, "device": "cpu", "steps": 3}
SGD: dict[str, Any] = {**MOE, "optimizer": "sgd", "learning_rate": 0.01, "keep_weights": True}
HAND: dict[str, Any] = {**SGD, "engine": "by_hand"}
DEEPSPEED: dict[str, Any] = {**SGD, "engine": "deepspeed"}
PARITY: dict[str, dict[str, Any]] = {
    "one": {**SGD, "engine": "single", "micro_batches": 4},
    "ep1": {**HAND, "dp": 4},
    "ep2": {**HAND, "dp": 4, "ep": 2},
    "ep4": {**HAND, "dp": 4, "ep": 4},
    "ep2-accumulated": {**HAND, "dp": 2, "ep": 2, "micro_batches": 2},
    "ep2-checkpointed": {**HAND, "dp": 2, "ep": 2, "micro_batches": 2, "checkpointing": "full"},
    "ddp": {**SGD, "dp": 2, "micro_batches": 2},
    "fsdp2": {**SGD, "dp": 2, "micro_batches": 2, "zero": 3},
    "deepspeed-2": {**DEEPSPEED, "dp": 2, "micro_batches": 2, "zero": 2},
}
"""All of one global batch, in the same micro-batches of two samples: capacities and balance losses are theirs."""
WHOLE = {"capacity_factor": 8.0}  # of 8 experts, of which a token meets one: no token is dropped
SIDE: dict[str, dict[str, Any]] = {
    "hand-top1": {**HAND, **WHOLE, "dp": 4, "ep": 2},
    "deepspeed-top1": {**DEEPSPEED, **WHOLE, "dp": 4, "ep": 2},
    "hand-top2": {**HAND, "dp": 2, "ep": 2, "top_k": 2, "capacity_factor": 4.0, "balance_loss": 0.0},
    "deepspeed-top2": {**DEEPSPEED, "dp": 2, "ep": 2, "top_k": 2, "capacity_factor": 4.0, "balance_loss": 0.0},
}
ADAMW: dict[str, Any] = {**MOE, "optimizer": "adamw", "learning_rate": 1e-3}
COUNTED: dict[str, dict[str, Any]] = {
    "adamw-bf16": {**ADAMW, "engine": "by_hand", "dp": 2, "ep": 2, "precision": "bf16", "top_k": 2, "experts": 4},
    "groups": {**HAND, "dp": 2, "ep": 2, "expert_groups": 2, "z_loss": 1e-3, "bucket_mib": 0.5},
    "selective": {**HAND, "dp": 4, "ep": 2, "checkpointing": "selective", "optimizer": "momentum"},
    "adamw-deepspeed": {**ADAMW, "engine": "deepspeed", "dp": 4, "ep": 2, "micro_batches": 2, "checkpointing": "full"},
}
RUNS = {**PARITY, **SIDE, **COUNTED}
NIGHTLY = {"ep1", "hand-top1", "deepspeed-top1", "selective"}
"""On four ranks. By day experts are shared by four replicas (`ep2`, `ep4`, `adamw-deepspeed`), DeepSpeed's layer is
held against the lab's with two choices, and `ep2-checkpointed` computes activations again."""
EXACT = [name for name in RUNS if name != "fsdp2"]
"""All but FSDP2, whose peak is that of units which come and go while messages are under way."""
CUT = {"adamw-bf16": 1, "adamw-deepspeed": 1}
OTHERWISE = {"ep2-accumulated": "ddp", "ddp": "ep2-accumulated", "deepspeed-top2": "hand-top2"}
"""Cut off after two steps in one layout, gone on with in another."""


def prepare(folder: Path) -> None:
    tried = {name: fields for name, fields in RUNS.items() if os.environ.get("DLOJZ_NIGHTLY") or name not in NIGHTLY}
    made = prepare_runs(folder, tried, CUT, left=dict.fromkeys(OTHERWISE, 1))
    again: dict[int, list[dict[str, Any]]] = {}
    for origin, name in OTHERWISE.items():
        config = RunConfig.of(**RUNS[name])
        job = going_on_from(made, f"cut/{origin}", f"otherwise/{origin}", config)
        again.setdefault(config.layout.world_size, []).append(job)
    for processes, listed in again.items():
        made.do(listed, processes)


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else []) for name in names]


def weights_of(runs: Any, name: str) -> dict[str, torch.Tensor]:
    return load_file(runs.root / "whole" / name / "weights.safetensors")


def close(runs: Any, name: str, reference: str) -> None:
    """Losses and final weights of two runs to fp32's rounding, which three small steps of SGD do not amplify."""
    expected = runs.told(f"whole/{reference}", "step", "loss")
    assert runs.told(f"whole/{name}", "step", "loss") == pytest.approx(expected, rel=1e-6)
    found, wanted = weights_of(runs, name), weights_of(runs, reference)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", marked(name for name in PARITY if name != "one"))
def test_every_layout_gives_the_losses_and_weights_of_one_process(runs: Any, name: str) -> None:
    """Also those that divide the experts: every number of a mixture is of its micro-batch."""
    assert any(max(load.tokens) > load.capacity for load in loads_of_run(runs, "one"))  # tokens are dropped on the way
    close(runs, name, "one")


@pytest.mark.parametrize("gate", [pytest.param("top1", marks=pytest.mark.nightly), "top2"])
def test_expert_engines_of_deepspeed_give_the_same_losses_and_weights(runs: Any, gate: str) -> None:
    """Where no token is dropped, and for two choices without the balance loss, which it counts otherwise."""
    close(runs, f"deepspeed-{gate}", f"hand-{gate}")


@pytest.mark.parametrize("name", marked(EXACT))
def test_predict_of_every_expert_layout_equals_what_is_counted(runs: Any, name: str) -> None:
    """States by category, bytes and calls of every collective, on every rank: exact; the peak to 2 %."""
    config = RunConfig.of(**RUNS[name])
    # What DeepSpeed's layer keeps between its products is not traced: it is taken to be what the lab's keeps. And it
    # gives a bucket of gradients back when its message has come: sooner or later, 14 % of this peak.
    near = 0.02 if config.layout.engine != "deepspeed" else 0.2
    # A few tokens' attention: its scores, computed again in backward, are 2 % of so small a model.
    check_as_predicted(runs, name, config, peak=near, step_flops=0.02)


def test_communication_all_to_all_carries_every_row_of_every_expert(runs: Any) -> None:
    """2 mixtures × (dispatch and combine) × (forward and backward) of E·C·D numbers; the ranks of one copy sum none."""
    for name, passes, micro_batches in (("ep2", 2, 1), ("ep2-accumulated", 2, 2), ("ep2-checkpointed", 3, 2)):
        counted = footprint(runs, name)
        [sent] = [one for one in counted.communication if one.collective == "all_to_all"]
        calls = 2 * 2 * passes * micro_batches
        capacity = math.ceil(1.25 * 2 * 16 / 8)
        assert (sent.group, sent.group_size, sent.count) == ("ep", 2, calls)
        assert sent.message_bytes == calls * 8 * capacity * 128 * 4
    groups = {one.group: one.group_size for one in predict(RunConfig.of(**PARITY["ep2"])).communication}
    assert groups == {"control": 4, "dp": 4, "ep": 2, "edp": 2}
    alone = {one.group for one in predict(RunConfig.of(**PARITY["ep4"])).communication}
    assert alone == {"control", "dp", "ep"}


@pytest.mark.parametrize("name", CUT)
def test_expert_engines_go_on_from_a_checkpoint_as_if_not_cut_off(runs: Any, name: str) -> None:
    """Bit for bit, and in another layout to rounding: what is kept are whole experts."""
    check_goes_on(runs, name, 2)
    check_checkpoint_bytes(runs, name)


@pytest.mark.parametrize("origin", OTHERWISE)
def test_expert_engines_go_on_in_another_layout_to_the_same_losses(runs: Any, origin: str) -> None:
    """From shared experts to whole ones, back, and from DeepSpeed's to the lab's; 1e-5 is the order of summation."""
    expected = runs.told(f"whole/{origin}", "step", "loss")
    assert runs.told(f"otherwise/{origin}", "step", "step") == [2]
    assert runs.told(f"otherwise/{origin}", "step", "loss") == pytest.approx(expected[2:], rel=1e-5)


def loads_of_run(runs: Any, name: str) -> Any:
    ranks = RunConfig.of(**RUNS[name]).layout.world_size
    return loads_of({r: read_events(runs.root / "whole" / name / "events" / f"rank-{r}.jsonl") for r in range(ranks)})


def test_loads_of_a_run_tell_what_its_experts_were_given(runs: Any) -> None:
    """Step by step and mixture by mixture, over all ranks and micro-batches: the same however they are laid out."""
    loads = loads_of_run(runs, "ep4")
    assert [(load.step, load.layer) for load in loads] == [
        (step, f"blocks.{block}.mixture") for step in range(3) for block in (2, 4)
    ]
    assert all(sum(load.tokens) == 4 * 2 * 16 for load in loads)
    assert all(load.capacity == 4 * math.ceil(1.25 * 2 * 16 / 8) for load in loads)
    assert loads == loads_of_run(runs, "ep2-checkpointed")  # a pass that is computed again is not told twice
    for load in loads:  # each of the four micro-batches has its own rows: at least what is above their sum is dropped
        over = sum(max(0, tokens - load.capacity) for tokens in load.tokens)
        assert over / sum(load.tokens) - 1e-6 <= load.dropped < 1


def test_a_damaged_load_is_left_out() -> None:
    whole = {"layer": "a", "tokens": [1, 2], "capacity": 3, "dropped": 0.5}
    told = {"event": "experts", "step": 0, "layers": [whole]}
    assert [load.tokens for load in loads_of({0: [told], 1: [told]})] == [(2, 4)]
    for damaged in ({**whole, "dropped": 2.0}, {**whole, "tokens": [1]}, "a", {**whole, "tokens": "x"}):
        later = {**told, "step": 1}
        found = loads_of({0: [told, later], 1: [told, {**later, "layers": [damaged]}]})
        assert [load.step for load in found] == [0]
    assert loads_of({0: [{"event": "experts", "step": 0, "layers": 3}]}) == ()


def test_experts_are_shared_out_and_the_rest_replicated() -> None:
    """At ep = E a rank has one expert of each mixture; bytes of its states: AdamW's two moments beside."""
    shapes = model_shapes(RunConfig.of(**MOE))
    experts = sum(one.numel for one in shapes.parameters if one.is_expert)
    assert experts == 2 * 8 * (2 * 128 * 512 + 512 + 128)
    for ep in (1, 2, 4, 8):
        config = RunConfig.of(**{**ADAMW, "engine": "by_hand", "dp": 8, "ep": ep})
        memory = predict_states(config, RankPart(config).shapes)
        held = shapes.num_parameters - experts + experts // ep
        assert memory.weights_bytes == memory.gradients_bytes == 4 * held
        assert memory.optimizer_bytes == 8 * held + 4 * len(shapes.parameters)
    whole = predict_states(RunConfig.of(**ADAMW), shapes)
    assert whole.weights_bytes == 4 * shapes.num_parameters


def test_a_run_without_a_word_on_routing_has_the_models_own() -> None:
    config = RunConfig.of(model="moe_tiny")
    routing = config.routing
    assert routing is not None
    assert (routing.experts, routing.top_k, routing.capacity_factor, routing.groups) == (8, 1, 1.25, 1)
    assert RunConfig.of(model="gpt_tiny").routing is None
    assert config.hash == RunConfig.of(model="moe_tiny", experts=8, capacity_factor=1.25).hash
    assert RunConfig.of(model="moe_tiny", dp=4, ep=2, engine="by_hand").title == "moe_tiny, DDP by hand, EP × 2 ×4"


EP: dict[str, Any] = {"dp": 4, "ep": 2, "engine": "by_hand"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"dp": 6, "ep": 3, "engine": "by_hand"}, "does not divide the 8 experts: use", "ne divise pas les 8 experts"),
    ({"dp": 4, "ep": 3, "engine": "by_hand"}, r"ep=3 does not divide dp=4: use ep=2, ep=4", "ep=3 ne divise pas dp=4"),
    ({"capacity_factor": 0.0}, "must be greater than 0, but 0 was", "plus grand que 0, mais 0"),
    ({"capacity_factor": -1.0}, "greater than 0, but -1 was received", "plus grand que 0, mais -1"),
    ({"top_k": 9}, "top_k=9 sends a token to more experts than the 8", "top_k=9 envoie un token à plus d’experts"),
    ({"expert_groups": 3}, "expert_groups=3 does not cut 8 experts", "expert_groups=3 ne découpe pas 8 experts"),
    ({"dp": 4, "ep": 2}, "engine 'torch' has no expert parallelism", "engine='torch' n’a pas d’Expert Parallelism"),
    ({**EP, "zero": 1}, "keep their states whole, but zero=1", "gardent leurs états entiers, mais zero=1"),
    ({**EP, "tp": 2}, "within the data axis alone here, but ep=2", "dans le seul axe des données"),
    ({"tp": 2}, "Tensor Parallelism cannot split a mixture", "ne sait pas découper un mélange d’experts"),
    ({"model": "gpt_tiny", **EP}, "ep=2 was received, but gpt_tiny has no experts", "mais gpt_tiny n’a pas d’experts"),
    ({"model": "gpt_tiny", "top_k": 2}, "top_k=2 was received, but gpt_tiny", "top_k=2 a été reçu, mais gpt_tiny"),
]  # fmt: skip
NOT_RUN: list[tuple[dict[str, Any], str, str]] = [
    ({"pp": 2}, "no pipeline trains a mixture of experts yet, but pp=2", "aucun pipeline n’entraîne encore"),
    ({"dp": 2, "zero": 3, "engine": "deepspeed"}, "does not gather a gate's", "ne rassemble pas les poids"),
    ({**EP, "optimizer": "lamb"}, "optimizer='lamb' needs whole layers", "demande des couches entières"),
    ({**EP, "engine": "deepspeed", "precision": "bf16"}, "are run in fp32 here", "s’exécutent ici en fp32"),
    ({**EP, "engine": "deepspeed", "z_loss": 0.1}, "gate has no z_loss", "la porte de DeepSpeed n’a pas"),
    ({**EP, "engine": "deepspeed", "expert_groups": 2}, "has no expert_groups", "n’a pas de expert_groups"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "english", "french"), [*REFUSED, *NOT_RUN])
def test_check_runnable_refuses_in_one_sentence_what_expert_engines_cannot(
    fields: dict[str, Any], english: str, french: str
) -> None:
    check_refused({"model": "moe_tiny", **fields}, english, french, to_run=True)
    if "pp" in fields:
        assert predict(RunConfig.of(**{**MOE, **fields})).memory.peak_bytes
