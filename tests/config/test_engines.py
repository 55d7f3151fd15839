"""The registry of engines: nothing that it names is missing in the rooms above, and every legal run has an entry."""

import ast
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dlojz import runnable
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.engines import ENGINES, STRATEGIES, EngineSpec, pipeline_stages, program_layouts, zero_stages
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.libraries.library_catalogue import LIBRARIES
from dlojz.prediction.communication import TRAFFIC
from dlojz.prediction.forecast import OVERLAYS
from dlojz.prediction.states import STATES
from dlojz.train.engines.base import PIPELINES

TABLES: dict[str, Mapping[str, object]] = {"states": STATES, "traffic": TRAFFIC, "overlay": OVERLAYS}
PACKAGE = Path(runnable.__file__).parent


def classes_of(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / "train" / "engines" / f"{module}.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("spec", ENGINES.values(), ids=ENGINES)
def test_what_an_engine_names_is_implemented(spec: EngineSpec) -> None:
    for role, table in TABLES.items():
        asked = getattr(spec, role)
        assert asked in table, f"engine {spec.name!r} names {role}={asked!r}, which is not in that table"
    module, name = spec.trainer.split(".")
    assert name in classes_of(module), f"engine {spec.name!r} names trainer={spec.trainer!r}, which is not there"


@pytest.mark.parametrize("role", TABLES)
def test_what_is_implemented_is_named_by_an_engine(role: str) -> None:
    assert set(TABLES[role]) == {getattr(spec, role) for spec in ENGINES.values()}


def test_every_strategy_is_registered_under_its_name() -> None:
    assert set(STRATEGIES) == {name for name in ENGINES if "+" not in name}
    assert all(spec.name == name for name, spec in ENGINES.items())


def test_every_provider_of_pipelines_has_a_trainer_of_them() -> None:
    assert set(PIPELINES) == {spec.provider for spec in ENGINES.values() if spec.pipeline_zero} - {"single"}
    for trainer in PIPELINES.values():
        module, name = trainer.split(".")
        assert name in classes_of(module)


def test_every_library_is_the_equal_of_some_engine() -> None:
    assert {program for spec in ENGINES.values() for program in spec.programs} == set(LIBRARIES)
    assert program_layouts("accelerate") == (("torch", (0, 2, 3)), ("deepspeed", (0, 1, 2, 3)))
    assert program_layouts("megatron") == (("torch", (0,)), ("by_hand", (0,)))


def legal_runs() -> Iterator[RunConfig]:
    """Runs of each strategy with each form of it that the rules let through."""
    degrees: list[dict[str, Any]] = [{}, {"dp": 2}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "pp": 2}]
    engines = [{"engine": spec.provider, "zero": zero} for spec in ENGINES.values() for zero in spec.zero]
    forms: list[dict[str, Any]] = [
        {},
        {"optimizer": "one_bit_adam"},
        {"optimizer": "diloco"},
        {"gradient_compression": "fp16"},
        {"model": "moe_tiny", "dp": 2, "ep": 2},
        {"update": "in_backward"},
        {"update": "in_forward"},
        {"library": "megatron"},
    ]
    for fields in product(degrees, engines, forms):
        try:
            yield RunConfig.of(**{"model": "gpt_tiny"} | fields[0] | fields[1] | fields[2])
        except LabError:
            continue


def test_a_legal_run_has_one_form_at_most_and_an_entry() -> None:
    found = set()
    for config in legal_runs():
        assert len(config.engine_forms) <= 1
        assert config.engine_spec.states == config.layout.engine_spec.states, "a form keeps what its strategy keeps"
        found.add(config.engine_name)
    assert found == set(ENGINES), "each entry is the engine of some run"


def test_the_stages_of_a_provider_are_those_that_layouts_allow() -> None:
    """Torch's pipeline cannot be combined with ZeRO-3, DeepSpeed's with ZeRO-2 and 3."""

    def allowed(engine: str, **fields: Any) -> tuple[int, ...]:
        legal = []
        for zero in range(4):
            try:
                legal.append(Layout(engine=engine, dp=2, zero=zero, **fields).zero)
            except LabError:
                continue
        return tuple(legal)

    for engine in ("torch", "by_hand", "deepspeed"):
        assert allowed(engine) == zero_stages(engine)
        assert set(pipeline_stages(engine)) <= set(allowed(engine, pp=2))
    assert pipeline_stages("torch") == (0, 2)


def test_by_hand_stage_3_alone_gathers_weights_in_the_precision_that_it_computes_in() -> None:
    """The others keep fp32 weights and buffers, and autocast reads them; so `ZeroByHandEngine` trains."""
    runs = [RunConfig.of(dp=2, engine="by_hand", zero=zero, precision="bf16") for zero in range(4)]
    assert [run.layout.engine_spec.autocast for run in runs] == [True, True, True, False]


@pytest.mark.parametrize(("language", "titles"), [("en", "by hand"), ("fr", "à la main")])
def test_the_title_of_an_engine_is_in_the_reader_s_language(language: Any, titles: str) -> None:
    use_language(language)
    assert all(ENGINES[name].title(ENGINES[name].zero[-1]).endswith(titles) for name in STRATEGIES if "by_hand" in name)
    assert ENGINES["fsdp2"].title(2) == "FSDP2 (ZeRO-2)"


def test_the_names_of_strategies_are_written_in_the_registry_alone() -> None:
    """Others ask the entry for a fact, or for what implements it."""
    own = {f"by_hand-{stage}" for stage in (1, 2, 3)}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PACKAGE / "config" / "engines.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Constant) and node.value in own
            assert not named, f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)} names a strategy"
