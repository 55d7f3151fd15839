"""Links between GPUs: the α–β model of a message, and seconds of a collective by its number of ranks.

`Link` is the one α–β model of the course: by-hand collectives, the pipeline simulator, the planner and the labs all ask
it. An `Interconnect` is a real link as measured: for each collective and number of ranks a `Link` with the latency of
the whole collective and its *bus* bandwidth, in the convention of nccl-tests, so that it can be compared with the wire
and with published logs. All-reduce stands apart from all-gather and reduce-scatter, because a switch that adds up
itself (NVLink SHARP) makes the first faster than the two others together.

`ranks` is how many GPUs of one node take part on a link inside the node. On a link between nodes it is how many *nodes*
take part, and the bandwidth is that of all the network cards of one node together: r rings that run at once, one for
each GPU of the node, have 1/r of it each. Point to point is between two GPUs, so between nodes over one card.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from dlojz.base.contract import check_at_least
from dlojz.base.errors import LabError
from dlojz.base.language import one_of
from dlojz.hardware.constants import Constant, ConstantsFile, file_of, own_files, toml_text, write_hardware

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
COLLECTIVES: Final = get_args(Collective)
FOLDER: Final = Path(__file__).with_name("data") / "links"
LINKS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""Names of all links."""


class Link(NamedTuple):
    """A link in the α–β model: a message of n bytes takes α + n/B seconds.

    Args:
        latency_s: α, seconds before the first byte of a message, at least 0.
        bytes_per_s: B = 1/β, bandwidth in one direction, above 0; infinite where bytes take no time.

    Source: Hockney 1994, "The communication challenge for MPP".
    """

    latency_s: Any
    bytes_per_s: Any

    def seconds(self, num_bytes: Any, messages: Any = 1) -> Any:
        """Seconds of messages that wait for each other; of numbers or numpy arrays.

        Args:
            num_bytes: of all messages together.
        """
        return messages * self.latency_s + num_bytes / self.bytes_per_s


NVLINK = Link(5e-6, 300e9)
"""Example of the labs: A100, 600 GB/s in both directions together (NVIDIA A100 datasheet), so 300 each way; the latency
is an assumption."""
NETWORK = Link(10e-6, 25e9)
"""Example of the labs: 200 Gbit/s, shared by the GPUs of a node or not; here each has it to itself."""


def bus_factor(collective: Collective, ranks: Any) -> Any:
    """Bytes that cross the wire of one rank for each byte of the message; 0 for one rank alone.

    Args:
        collective: its name; the message is the whole tensor that is reduced, gathered, scattered or held.
        ranks: a number or a numpy array of them, at least 1.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md: 2 (n − 1)/n for all-reduce, (n − 1)/n for all-gather, reduce-scatter
    and all-to-all, 1 for broadcast and point to point; what a ring sends (Patarasuk and Yuan 2009, J. Parallel Distrib.
    Comput. 69, §4).
    """
    if collective in ("broadcast", "p2p"):
        return 1.0 * (ranks > 1)
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def fit_line(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit seconds = start · a + slope · b by least squares of relative errors, both at least 0.

    So a message of 1 KiB weighs as much as one of 16 MiB. With a = 1 message and b its bytes, start is α and slope β.

    Args:
        rows: (a, b, seconds) of each measurement; at least one.

    Source: the normal equations of two unknowns; where one comes out negative the least of the legal ones lies on the
    border (Lawson & Hanson 1974, "Solving least squares problems", ch. 23).
    """
    # Divided by the seconds, so that residuals are relative errors.
    scaled = [(a / seconds, b / seconds) for a, b, seconds in rows]
    # The normal equations: Σ a², Σ b², Σ a·b; their right sides Σ a and Σ b, as every measurement is now 1.
    aa, bb, ab = (sum(row[i] * row[j] for row in scaled) for i, j in ((0, 0), (1, 1), (0, 1)))
    a1, b1 = (sum(row[i] for row in scaled) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if bb == 0 or (aa > 0 and determinant <= 1e-14 * aa * bb):  # nothing, or nothing else, that grows with b
        return a1 / aa, 0.0
    if aa == 0:
        return 0.0, b1 / bb
    start, slope = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if start < 0:
        return 0.0, b1 / bb
    return (a1 / aa, 0.0) if slope < 0 else (start, slope)


def weighted_line(
    xs: Sequence[float], ys: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """Fit intercept and slope, of any sign, by weighted least squares.

    Args:
        xs, ys: the points.
        weights: of the squared residuals; by default 1 / y², so that every measurement weighs the same.

    Source: the normal equations of two unknowns.
    """
    weights = [1 / y**2 for y in ys] if weights is None else weights
    total = math.fsum(weights)
    x_mean = math.fsum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = math.fsum(w * y for w, y in zip(weights, ys, strict=True)) / total
    covariance = math.fsum(w * (x - x_mean) * (y - y_mean) for w, x, y in zip(weights, xs, ys, strict=True))
    variance = math.fsum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = covariance / variance
    return y_mean - slope * x_mean, slope


@dataclass(frozen=True)
class Interconnect:
    """A link as measured: latency α and bus bandwidth of each collective by number of ranks.

    Args:
        alpha: seconds of an empty message, by collective and number of ranks.
        bandwidth: bus bandwidth in B/s, by collective and number of ranks.
        constants: each figure with its source, `all_reduce.bandwidth.8`.
    """

    name: str
    title: str
    alpha: Mapping[str, Mapping[int, float]]
    bandwidth: Mapping[str, Mapping[int, float]]
    constants: Mapping[str, Constant]

    def time_s(self, collective: Collective, ranks: Any, message_bytes: Any) -> Any:
        """Seconds of one collective: α(n) + factor(n) · bytes / bandwidth(n); nothing for one rank alone.

        Args:
            ranks: how many take part; a number or a numpy array of them.
            message_bytes: of the whole message, at least 0; a number or a numpy array.

        Raises:
            LabError: for an unknown collective, or less than one rank.
        """
        link = Link(self.alpha_s(collective, ranks), self.bytes_per_s(collective, ranks))
        # Factor × message bytes cross the wire, at the bus bandwidth.
        return link.seconds(bus_factor(collective, ranks) * message_bytes)

    def alpha_s(self, collective: Collective, ranks: Any) -> Any:
        """Latency of the whole collective; between and beyond known numbers of ranks, linear in log₂ n.

        Args:
            ranks: a number or a numpy array of them, at least 1; one alone takes nothing.

        Raises:
            LabError: for an unknown collective, or less than one rank.
        """
        curve = self._curve(self.alpha, collective)
        return _each(lambda count: _between(curve, count, further=True) if count > 1 else 0.0, ranks)

    def bytes_per_s(self, collective: Collective, ranks: Any) -> Any:
        """Bus bandwidth; between known numbers of ranks linear in log₂ n, beyond the last that of the last.

        Args:
            ranks: a number or a numpy array of them, at least 1; for one alone, that of two.

        Raises:
            LabError: for an unknown collective, or less than one rank.
        """
        curve = self._curve(self.bandwidth, collective)
        return _each(lambda count: _between(curve, max(2, count), further=False), ranks)

    @staticmethod
    def _curve(curves: Mapping[str, Mapping[int, float]], collective: str) -> Mapping[int, float]:
        if collective not in curves:
            raise LabError(one_of("collective", collective, COLLECTIVES))
        return curves[collective]


def _each(function: Callable[[int], float], ranks: Any) -> Any:
    """A function of one number of ranks, for a number or for each of an array, which holds few distinct ones."""
    if hasattr(ranks, "shape") and ranks.shape:
        import numpy as np

        counts = ranks.astype(int)
        if counts.size and counts.min() < 1:
            # Refuses a number below 1.
            _counted(function, int(counts.min()))
        table = np.zeros(counts.max(initial=0) + 1)  # an index is faster than a sort where millions are asked for
        # Which numbers of ranks occur.
        present = np.zeros(table.shape, dtype=bool)
        present[counts] = True
        for count in np.flatnonzero(present):
            table[count] = function(int(count))
        return table[counts]
    return _counted(function, int(ranks))


def _counted(function: Callable[[int], float], ranks: int) -> float:
    check_at_least(1, ranks=ranks)
    return function(ranks)


def _between(curve: Mapping[int, float], ranks: int, further: bool) -> float:
    rank_counts = sorted(curve)
    if ranks in curve:
        return curve[ranks]
    if ranks < rank_counts[0] or len(rank_counts) == 1:
        # One figure for all numbers of ranks: a ring's latency grows with them, its bandwidth does not.
        return curve[rank_counts[0]]
    if ranks > rank_counts[-1]:
        if not further:
            return curve[rank_counts[-1]]
        # The line through the last two goes on.
        low, high = rank_counts[-2], rank_counts[-1]
    else:
        high = min(count for count in rank_counts if count > ranks)
        low = max(count for count in rank_counts if count < ranks)
    # Where the number lies between the two on a logarithmic scale.
    share = math.log2(ranks / low) / math.log2(high / low)
    # A line that falls is cut at the smallest figure of the curve.
    return max(curve[low] + share * (curve[high] - curve[low]), min(curve.values()))


def read_link(path: Path) -> Interconnect:
    """Read the link that a file describes: one table per collective, with `alpha` and `bandwidth`.

    Raises:
        LabError: if the file lacks a constant, or holds an illegal one.
    """
    file = ConstantsFile.read(path)
    file.keys(("title", *COLLECTIVES))
    constants: dict[str, Constant] = {}
    curves: dict[str, dict[str, dict[int, float]]] = {"alpha": {}, "bandwidth": {}}
    for collective in COLLECTIVES:
        table = file.table(collective)
        file.keys(curves, table, collective)
        for kind, unit in (("alpha", "s"), ("bandwidth", "B/s")):
            curve = file.curve(kind, unit, table, f"{collective}.{kind}")
            constants |= {f"{collective}.{kind}.{ranks}": constant for ranks, constant in curve.items()}
            curves[kind][collective] = {ranks: constant.value for ranks, constant in curve.items()}
    return Interconnect(path.stem, file.text("title"), curves["alpha"], curves["bandwidth"], constants)


@cache
def _shipped(name: str) -> Interconnect:
    return read_link(FOLDER / f"{name}.toml")


def link(name: str) -> Interconnect:
    """Look up a link by its name, or read it from the path of a `.toml` file.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    if name in LINKS:
        return _shipped(name)
    if path := file_of("links", name):
        return read_link(path)
    raise LabError(one_of("link", name, [*LINKS, *own_files("links")]))


def write_link(path: Path, connection: Interconnect, source: str, date: str) -> None:
    """Write the file that describes a measured link, so that `read_link` reads it again; a latency of 0 as 1 ns.

    Raises:
        LabError: if the folder cannot be written.
    """
    provenance = f'source = {toml_text(source)}, date = {toml_text(date)}, standing = "measured" }}'
    lines = [f"title = {toml_text(connection.title)}"]
    for collective in COLLECTIVES:
        lines += ["", f"[{collective}]"]
        for kind, unit, curve in (("alpha", "s", connection.alpha), ("bandwidth", "B/s", connection.bandwidth)):
            values = [max(value, 1e-9) for value in curve[collective].values()]
            lines.append(
                f'{kind} = {{ ranks = {[*curve[collective]]}, values = {values!r}, unit = "{unit}", {provenance}'
            )
    write_hardware(path, lines)
