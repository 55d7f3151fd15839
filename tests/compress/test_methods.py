"""The catalogue of methods: light, complete, and refusing what a method does not have."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress.board_record import DEFAULT_METHODS
from dlojz.compress.method import METHODS, Method, Shrunk, Start, method


def test_compress_methods_load_no_torch() -> None:
    code = "import sys; from dlojz.compress.method import METHODS; sys.exit('torch' in sys.modules or not METHODS)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_a_function_that_takes_its_options(name: str) -> None:
    one = METHODS[name]
    module, _, function = one.function.partition(":")
    taken = inspect.signature(getattr(importlib.import_module(f"dlojz.compress.{module}"), function)).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        assert set(one.options) <= set(taken)
    english = one.summary()
    use_language("fr")
    assert one.summary() != english


def test_the_default_board_has_all_families() -> None:
    assert {METHODS[name].family for name in DEFAULT_METHODS} == {"distillation", "quantization", "pruning"}


def test_an_unknown_method_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(LabError, match="unknown method 'distil_soft': did you mean 'distill_soft'?"):
        method("distil_soft")


def test_compress_method_refuses_an_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(None, "vit_tiny", None, options={"temprature": 2})  # type: ignore[arg-type]
    with pytest.raises(LabError, match="unknown option of distill_soft 'temprature': did you mean 'temperature'?"):
        method("distill_soft")(start)


def test_a_method_whose_package_is_missing_says_the_command() -> None:
    lacking = Method("imagined", "quantization", "m:f", lambda: "", needs=("no_such_package",))
    with pytest.raises(LabError, match="imagined needs no_such_package, .* not installed: pip install no_such_package"):
        lacking(Start(None, "vit_tiny", None))  # type: ignore[arg-type]
    use_language("fr")
    assert "qui n’est pas installé : pip install no_such_package." in (lacking.missing() or "")
    assert Method("light", "pruning", "m:f", lambda: "", needs=("json",)).missing() is None


def test_compress_method_lays_what_is_given_over_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlojz.compress import distillation

    seen = {}

    def probe(start: Start, **options: object) -> Shrunk:
        seen.update(options)
        return Shrunk(None, {}, 0, 0)  # type: ignore[arg-type]

    monkeypatch.setattr(distillation, "soft", probe)
    method("distill_soft")(Start(None, "vit_tiny", None, options={"temperature": 2.0}))  # type: ignore[arg-type]
    assert seen == {**METHODS["distill_soft"].options, "temperature": 2.0}
