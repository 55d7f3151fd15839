"""Sentences on the steps of a collective, and short durations as people read them."""

from collections.abc import Iterable

from dlojz.base.language import format_count, format_seconds, minus, say
from dlojz.by_hand.collectives.simulation import Held, Simulation, Transfer
from dlojz.display.tables import phrase


def _chunks(chunks: tuple[int, ...], undivided: bool) -> str:
    if undivided:
        return say(en="the whole message", fr="tout le message")
    if len(chunks) == 1:
        return say(en=f"chunk {chunks[0]}", fr=f"le morceau {chunks[0]}")
    *leading_chunks, last_chunk = map(str, chunks)
    # Two chunks are named one by one: "1 to 2" is no shorter.
    if chunks == tuple(range(chunks[0], chunks[-1] + 1)) and len(chunks) > 2:
        return say(en=f"chunks {chunks[0]} to {last_chunk}", fr=f"les morceaux {chunks[0]} à {last_chunk}")
    return phrase("several chunks", chunks=", ".join(leading_chunks), last_chunk=last_chunk)


def transfer_words(transfer: Transfer, undivided: bool = False) -> str:
    """Say a message: who sends which chunks to whom, and whether they are added or kept.

    Args:
        undivided: whether the algorithm does not cut its message, so that a chunk is all of it.

    Example:
        >>> transfer_words(Transfer(0, 1, (2,), (2,), True))
        'rank 0 sends chunk 2 to rank 1, which adds it'
    """
    if len(transfer.chunks) > 1:
        act = say(en="adds them", fr="les ajoute aux siens") if transfer.add else say(en="keeps them", fr="les garde")
    else:
        act = say(en="adds it", fr="l’ajoute au sien") if transfer.add else say(en="keeps it", fr="le garde")
    # "chunk 2", "chunks 0, 2 and 3", or the whole message.
    chunk_words = _chunks(transfer.chunks, undivided)
    return phrase("transfer", transfer=transfer, chunk_words=chunk_words, act=act)


def step_words(simulation: Simulation, step: int) -> list[str]:
    """Say each message of a step, numbered from 1; step 0 is the start."""
    if step == 0:
        return [phrase("before the first step")]
    undivided = len(simulation.states[0][0]) == 1
    return [transfer_words(transfer, undivided) for transfer in simulation.transfers[step - 1]]


def held_words(contents: Held, is_final: bool) -> str:
    """Say what a rank holds in a chunk: the number, whose contributions it has, whether it is final."""
    if contents.value is None:
        return say(en="nothing", fr="rien")
    final = say(en=", final", fr=", définitif") if is_final else ""
    return f"{number_words(contents.value)} ({rank_list(contents.ranks)}{final})"


def number_words(value: float | None) -> str:
    """Write a number of a chunk without needless digits."""
    return "·" if value is None else minus(f"{value:g}")


def rank_list(ranks: Iterable[int]) -> str:
    """List ranks.

    Example:
        >>> rank_list((0, 2))
        'ranks 0, 2'
    """
    numbers = [str(rank) for rank in ranks]
    word = say(en="rank", fr="rang") + ("s" if len(numbers) > 1 else "")
    return f"{word} {', '.join(numbers)}"


def format_latency(duration_s: float) -> str:
    """Format a duration that may be far below a millisecond.

    Example:
        >>> format_latency(42e-6)
        '42.0 µs'
    """
    # 999.6 µs reads as 1.00 ms: rounded first, the unit is that of the rounded number.
    duration_s = _three_digits(duration_s)
    if 0 < duration_s < 1e-6:
        return format_seconds(duration_s * 1e6).replace("ms", "ns")
    return format_seconds(duration_s * 1e3).replace("ms", "µs") if 0 < duration_s < 1e-3 else format_seconds(duration_s)


def format_bandwidth(bytes_per_s: float | None) -> str:
    """Format bytes per second with a decimal prefix, as links are sold.

    Example:
        >>> format_bandwidth(2.5e9)
        '2.50 GB/s'
    """
    return format_count(None if bytes_per_s is None else _three_digits(bytes_per_s), say(en="B/s", fr="o/s"))


def _three_digits(value: float) -> float:
    """Rounded before the unit is chosen: 999.9996 MB/s is 1 GB/s."""
    return float(f"{value:.3g}")
