"""The catalogue of methods: what each is called, which family it is of, and the function that applies it.

Layer 2. Invariant: each family tells its own methods in a module that loads no torch, and this one only collects them,
in the order in which the board shows them.
"""

from __future__ import annotations

from dlojz.compress import distillation_methods, pruning_methods, quantization_methods
from dlojz.compress.method import Family, LayerError, Method, Shrunk, Start
from dlojz.schema import LabError, one_of
from dlojz.text import say

__all__ = ["METHODS", "Family", "LayerError", "Method", "Shrunk", "Start", "method"]

METHODS: dict[str, Method] = {
    method.name: method
    for methods in (distillation_methods.METHODS, quantization_methods.METHODS, pruning_methods.METHODS)
    for method in methods
}
"""Every method, by name."""


def method(name: str) -> Method:
    """A method by its name.

    Raises:
        LabError: if there is none; the sentence lists those that exist.
    """
    if name not in METHODS:
        raise LabError(one_of(say(en="method", fr="méthode"), name, METHODS))
    return METHODS[name]
