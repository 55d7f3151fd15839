"""The house: who may import whom, what loads lazily, how long a file may be, what must be documented."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dlojz"
LAYERS: dict[int, tuple[str, ...]] = {
    0: ("schema", "units", "text", "footprint", "faultpoint", "patience", "models", "moe", "data", "hardware"),
    1: (
        "layout",
        "layout_pipeline",
        "layout_tensor",
        "layout_gradients",
        "layout_experts",
        "optimizer_stages",
        "optimizer_update",
        "curriculum",
        "config",
        "curriculum_misfit",
        "library_misfit",
        "checkpoint_policy",
        "record",
        "trajectory",
        "grid",
        "evidence",
    ),
    2: ("pipeline", "collectives", "data_parallel", "zero", "tensor", "optim", "compress"),
    3: ("predict", "checkpoint", "train", "libraries"),
    4: ("comparison", "compare", "overlay", "viz", "plan"),
    5: ("runs", "launch", "ranks"),
    6: ("cli", "campaign", "labs", "__main__"),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
MAX_LINES = 300
NO_TORCH = (
    "dlojz",
    "dlojz.layout",
    "dlojz.config",
    "dlojz.hardware",
    "dlojz.record",
    "dlojz.models",
    "dlojz.moe",
    "dlojz.data",
    "dlojz.train",
    "dlojz.libraries",
    "dlojz.predict",
    "dlojz.runs",
    "dlojz.launch",
    "dlojz.ranks",
    "dlojz.cli",
    "dlojz.compare",
    "dlojz.collectives",
    "dlojz.pipeline",
    "dlojz.pipeline.catalogue",
    "dlojz.pipeline.cuts",
    "dlojz.optim.messages",
    "dlojz.optim.stages",
    "dlojz.overlay",
    "dlojz.grid",
    "dlojz.predict.link_traffic",
    "dlojz.evidence",
    "dlojz.plan",
    "dlojz.plan.alpa",
    "dlojz.predict.time",
)


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """All dlojz modules a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names if node.module == "dlojz")


@pytest.mark.parametrize("path", [path for path in MODULES if path != PACKAGE / "__init__.py"], ids=identifier)
def test_a_module_imports_its_own_layer_or_a_lower_one(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in LAYER_OF, f"{own} has no layer: give it one in this test and in CONTRIBUTING.md"
    for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        parts = name.split(".")
        if parts[0] != "dlojz" or len(parts) == 1:
            continue
        layer = LAYER_OF.get(parts[1])
        if layer is None and hasattr(__import__("dlojz"), parts[1]):
            pytest.fail(f"{identifier(path)}:{line} imports {name} from the package's front; import it from its module")
        assert layer is None or layer <= LAYER_OF[own], (
            f"{identifier(path)}:{line} (layer {LAYER_OF[own]}) imports {name} (layer {layer})"
        )


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{identifier(path)} has {lines} lines: split it by idea"


@pytest.mark.parametrize("name", NO_TORCH)
def test_no_torch_and_no_matplotlib_until_they_are_used(name: str) -> None:
    code = f"import sys, {name}; print([m for m in ('torch', 'matplotlib', 'deepspeed') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_dlojz_loads_next_to_nothing() -> None:
    """Well under 0.3 s follows from what is not loaded; the count of modules is the same on every machine."""
    code = "import sys; before = set(sys.modules); import dlojz; print(len(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30


def test_the_functions_keep_their_names_although_modules_bear_the_same_ones() -> None:
    code = (
        "import dlojz.predict.states, dlojz.compare, dlojz.runs, dlojz\n"
        "print(callable(dlojz.predict), callable(dlojz.compare), callable(dlojz.runs), callable(dlojz.run))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4


def public_names(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                yield from (
                    (f"{node.name}.{method.name}", method)
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
                )


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_every_public_name_is_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{identifier(path)} says nothing of itself"
    overrides = {"forward", "wrap", "autocast", "inventory", "weights", "close", "backward", "update"}
    if path.parent.name == "engines" and path.name != "pipeline.py":  # said there
        overrides |= {"build", "run_schedule", "own_weights", "reduce_gradients", "group_names"}
    if path.parent.name == "overlays" and path.name != "base.py":  # said in base.py
        overrides |= {"standing", "gathered_bytes", "updated", "flush", "ready"}
        overrides |= {"begin_step", "begin_backward", "forwarded", "end_backward", "end_step"}
    silent = [
        name
        for name, node in public_names(tree)
        if not ast.get_docstring(node) and name.rpartition(".")[2] not in overrides
    ]  # type: ignore[arg-type]
    assert not silent, f"{identifier(path)}: {', '.join(silent)} have no docstring"


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_nothing_is_unpickled_and_no_text_reaches_a_shell(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert "pickle" not in names, f"{identifier(path)}:{node.lineno} imports pickle"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("os.system", "eval", "exec", "torch.save"), (
                f"{identifier(path)}:{node.lineno} {called}"
            )
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert keywords.get("shell") != "True", f"{identifier(path)}:{node.lineno} uses a shell"
            if called == "torch.load":
                assert keywords.get("weights_only") == "True", f"{identifier(path)}:{node.lineno} unpickles"
