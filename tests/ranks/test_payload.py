"""What goes to the ranks with a cell: source, module names, copies; and what does not."""

import linecache
import threading
from itertools import count
from typing import Any

import pytest

from dlojz.ranks.live import payload
from dlojz.ranks.rank_setup import RanksRefused

_CELLS = count()


def notebook(*cells: str) -> dict[str, Any]:
    """The variables of a notebook after these cells, which know their lines as IPython's do."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        name = f"<cell {next(_CELLS)}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), namespace)
    return namespace


def rebuilt(packed: dict[str, Any]) -> dict[str, Any]:
    """What a rank makes of it."""
    import importlib

    namespace: dict[str, Any] = {"__name__": "__main__", **packed["values"]}
    for name, (module, attribute) in packed["modules"].items():
        thing = importlib.import_module(module)
        namespace[name] = getattr(thing, attribute) if attribute else thing
    for source in packed["sources"]:
        exec(source, namespace)
    return namespace


def test_a_value_is_copied() -> None:
    assert payload(["a"], {"a": [1], "b": 2}) == {"modules": {}, "sources": [], "values": {"a": [1]}}


def test_a_function_goes_with_the_functions_classes_and_modules_it_mentions() -> None:
    variables = notebook(
        "import math\nfrom collections import Counter as Many\nSCALE = 3",
        "def helper(x):\n    return math.floor(x)",
        "class Box:\n    def __init__(self, x):\n        self.x = helper(x)",
        "def f(x):\n    return Box(x).x + Many('aab')['a']",
    )
    packed = payload(["f"], variables)
    assert packed["modules"] == {"math": ("math", ""), "Many": ("collections", "Counter")}
    assert packed["values"] == {}
    assert rebuilt(packed)["f"](4.7) == 6


def test_a_class_of_static_methods_goes_too() -> None:
    variables = notebook("class Twice:\n    @staticmethod\n    def forward(x):\n        return 2 * x")
    assert rebuilt(payload(["Twice"], variables))["Twice"].forward(3) == 6


def test_a_function_under_another_name_has_both() -> None:
    variables = notebook("def f():\n    return 1\ng = f", "h = lambda: 2")
    assert rebuilt(payload(["g", "h"], variables))["g"]() == 1
    assert rebuilt(payload(["g", "h"], variables))["h"]() == 2


def test_functions_that_call_each_other_are_sent_once() -> None:
    variables = notebook(
        "def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n != 0 and even(n - 1)"
    )
    packed = payload(["even"], variables)
    assert len(packed["sources"]) == 2
    assert rebuilt(packed)["even"](10)


def test_values_that_were_not_named_stay_in_the_notebook() -> None:
    variables = notebook("STEPS = 3\ndef f():\n    return STEPS")
    assert payload(["f"], variables)["values"] == {}
    assert rebuilt(payload(["f", "STEPS"], variables))["f"]() == 3


def test_what_every_rank_has_of_its_own_is_not_sent() -> None:
    variables = notebook("import torch\nrank = 7\ndef f():\n    return torch.ones(rank)")
    assert payload(["f"], variables)["modules"] == {}


def test_an_unknown_name_is_refused_and_the_closest_named() -> None:
    with pytest.raises(RanksRefused, match="unknown name 'modle': did you mean 'model'"):
        payload(["modle"], {"model": 1})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lock", "lock .lock. cannot be sent to the ranks: .*Make it inside the %%ranks cell"),
        ("inner", "inner cannot be sent to the ranks: its source is not known or not whole"),
        ("thing", "thing .Thing. cannot be sent to the ranks: Thing is a class of the notebook"),
        ("lost", "lost cannot be sent to the ranks: its source"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_sentence(name: str, sentence: str) -> None:
    variables = notebook(
        "def outer(x):\n    def inner():\n        return x\n    return inner\ninner = outer(1)",
        "class Thing:\n    pass\nthing = Thing()",
        "exec('def lost(): pass')",
    )
    variables["lock"] = threading.Lock()
    with pytest.raises(RanksRefused, match=sentence):
        payload([name], variables)
