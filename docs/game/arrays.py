"""Arrays in pure Python, under NumPy's names: what the game's engine asks of NumPy, for the browser.

No registry has NumPy built for WebAssembly. `build.py` puts this module into the page's engine as `numpy`, so that the
simulator there is the package's, line by line. What it does not know it refuses: it never guesses. The test plays all
levels with it and with NumPy, and compares the answers as text.
"""

# ruff: noqa: A001, N801 - the names are NumPy's
from __future__ import annotations

import builtins
import math
import operator
from itertools import accumulate, chain, pairwise
from typing import Any

int64, float64, inf = int, float, math.inf


class ndarray:
    """Array of one or more dimensions: all elements in one list, the last index running fastest."""

    def __init__(self, flat, shape: tuple[int, ...] | None = None) -> None:
        self.flat: list[Any] = list(flat)
        self.shape = (len(self.flat),) if shape is None else shape

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.flat)

    @property
    def T(self) -> ndarray:  # noqa: N802
        """The transpose of a matrix."""
        rows, columns = self.shape
        return ndarray(
            [self.flat[row * columns + column] for column in range(columns) for row in range(rows)], (columns, rows)
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def reshape(self, rows: int, columns: int) -> ndarray:
        """Cut into rows, as many as there are."""
        assert rows == -1
        return ndarray(self.flat, (self.size // columns, columns))

    def tolist(self) -> list[Any]:
        """All elements of one dimension."""
        (_,) = self.shape
        return list(self.flat)

    def _numbers(self, key: Any) -> tuple[list[int], tuple[int, ...]]:
        """Numbers of the elements that a key selects, and the shape of the selection."""
        if isinstance(key, tuple):
            if len(key) != len(self.shape):
                raise NotImplementedError(key)
            (count,) = {index.size for index in key if isinstance(index, ndarray)}
            columns = [index.flat if isinstance(index, ndarray) else [index] * count for index in key]
            numbers = [0] * count
            for length, column in zip(self.shape, columns, strict=True):
                numbers = [
                    number * length + _within(index, length) for number, index in zip(numbers, column, strict=True)
                ]
            return numbers, (count,)
        if isinstance(key, slice):
            rows = list(range(len(self))[key])
        elif not isinstance(key, ndarray):
            rows = [range(len(self))[key]]
        elif key.flat and isinstance(key.flat[0], bool):
            rows = [row for row, chosen in zip(range(len(self)), key.flat, strict=True) if chosen]
        else:
            rows = [_within(row, len(self)) for row in key.flat]
        width = math.prod(self.shape[1:])
        shape = self.shape[1:] if isinstance(key, int) else (len(rows), *self.shape[1:])
        return [row * width + column for row in rows for column in range(width)], shape

    def __getitem__(self, key: Any) -> Any:
        numbers, shape = self._numbers(key)
        return ndarray((self.flat[number] for number in numbers), shape) if shape else self.flat[numbers[0]]

    def __setitem__(self, key: Any, value: Any) -> None:
        numbers, _ = self._numbers(key)
        values = value.flat if isinstance(value, ndarray) else [value] * len(numbers)
        for number, element in zip(numbers, values, strict=True):
            self.flat[number] = element

    def any(self) -> bool:
        """Whether an element is not zero."""
        return builtins.any(self.flat)

    def max(self) -> Any:
        """The largest element."""
        return builtins.max(self.flat)

    def min(self) -> Any:
        """The smallest element."""
        return builtins.min(self.flat)

    def sum(self) -> Any:
        """The sum."""
        return builtins.sum(self.flat)

    def argmax(self) -> int:
        """Number of the first largest element."""
        return self.flat.index(builtins.max(self.flat))


def _within(index: int, length: int) -> int:
    # NumPy counts negative ones from the end; the engine has none, and one that appears is an error.
    if not 0 <= index < length:
        raise IndexError(index)
    return index


def _elementwise(function, reflected: bool = False):
    def operate(left: ndarray, right: Any) -> ndarray:
        others = right.flat if isinstance(right, ndarray) else [right] * left.size
        pairs = zip(others, left.flat, strict=True) if reflected else zip(left.flat, others, strict=True)
        return ndarray([function(a, b) for a, b in pairs], left.shape)

    return operate


for _name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_"):
    _method = _name.rstrip("_")
    setattr(ndarray, f"__{_method}__", _elementwise(getattr(operator, _name)))
    if _method in ("add", "sub", "mul"):
        setattr(ndarray, f"__r{_method}__", _elementwise(getattr(operator, _name), reflected=True))


def array(values, dtype=None) -> ndarray:
    """Copy a sequence, or a sequence of rows."""
    rows = values.flat if isinstance(values, ndarray) else list(values)
    is_matrix = bool(rows) and isinstance(rows[0], list | tuple)
    flat = chain.from_iterable(rows) if is_matrix else rows
    return ndarray(map(dtype, flat) if dtype else flat, (len(rows), len(rows[0])) if is_matrix else None)


def full(shape, value, dtype=float) -> ndarray:
    """Fill an array with one value."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return ndarray([dtype(value)] * math.prod(shape), shape)


def zeros(shape, dtype=float) -> ndarray:
    """Fill an array with zeros."""
    return full(shape, 0, dtype)


def arange(*limits: int) -> ndarray:
    """Count."""
    return ndarray(range(*limits))


def repeat(values, counts) -> ndarray:
    """Repeat each value as often as its count says."""
    return ndarray(value for value, count in zip(values, counts, strict=True) for _ in range(count))


def cumsum(values) -> ndarray:
    """Add up, one after the other."""
    return ndarray(accumulate(int(value) if isinstance(value, bool) else value for value in values))


def diff(values, prepend) -> ndarray:
    """Subtract from each the one before."""
    return ndarray(after - before for before, after in pairwise([prepend, *values]))


def flatnonzero(values) -> ndarray:
    """Numbers of the elements that are not zero."""
    return ndarray(number for number, value in enumerate(values.flat) if value)


def where(condition, true, false) -> ndarray:
    """Choose from two arrays or numbers."""
    columns = [value.flat if isinstance(value, ndarray) else [value] * condition.size for value in (true, false)]
    return ndarray(a if chosen else b for chosen, a, b in zip(condition.flat, *columns, strict=True))


def concatenate(parts) -> ndarray:
    """Join one-dimensional arrays."""
    return ndarray(chain.from_iterable(parts))


def lexsort(keys) -> ndarray:
    """Order by the last key, then by those before it."""
    rows = list(zip(*reversed([list(key) for key in keys]), strict=True))
    return ndarray(sorted(range(len(rows)), key=rows.__getitem__))


def any(values) -> bool:
    """Whether an element is not zero."""
    return values.any()


def abs(values) -> ndarray:
    """The amounts."""
    return ndarray(builtins.abs(value) for value in values)


def argmax(values) -> int:
    """Number of the first largest element."""
    return values.argmax()
