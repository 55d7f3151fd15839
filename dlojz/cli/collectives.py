"""`dlojz collectives`: the algorithms of collective communication, drawn, counted and timed.

Layer 6. Invariant: every figure comes from the programs that also run; what is timed is timed on real processes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from rich.table import Table

from dlojz import cli, collectives
from dlojz.cli.answer import answering
from dlojz.cli.calibration import calibrate, tell_written
from dlojz.cli.flags import Flag, json_flag, number, parse
from dlojz.collectives import simulate
from dlojz.collectives.catalogue import algorithm, check_size, node_size
from dlojz.collectives.measuring import LIBRARY, algorithm_of
from dlojz.collectives.words import step_words
from dlojz.schema import LabError
from dlojz.text import say

HELP = {
    "en": """The algorithms of collective communication: what each rank sends to whom, how often, how much.

Without --name: a table of all, for --ranks ranks. Rounds are messages that wait for each other (each costs α); "moved"
is what the busiest rank sends or receives, in messages (each byte costs β); "added" what it sums.
Time = rounds·α + moved·n·β.

With --name: one algorithm, step by step in words; --figure draws it.

With --calibrate: all-reduce (or --name) is timed on real processes of this machine, from 1 KiB to 16 MiB, and α and
the bandwidth 1/β are fitted; --figure draws points, line and what it says of 2, 8 and 512 ranks; --output keeps them.

Examples:
  dlojz collectives --ranks 8
  dlojz collectives --name ring_all_reduce --ranks 4 --figure ring.png
  dlojz collectives --calibrate --ranks 4 --figure calibration.png --output calibration.json
  dlojz collectives --calibrate --name tree_all_reduce --json""",
    "fr": """Les algorithmes de communication collective : ce que chaque rang envoie, à qui, combien de fois, combien.

Sans --name : un tableau de tous, pour --ranks rangs. Les étapes sont des messages qui s’attendent (chacune coûte α) ;
« déplacé » est ce qu’envoie ou reçoit le rang le plus chargé, en messages (chaque octet coûte β) ; « additionné », ce
qu’il somme. Durée = étapes·α + déplacé·n·β.

Avec --name : un algorithme, étape par étape, en phrases ; --figure le dessine.

Avec --calibrate : l’all-reduce (ou --name) est chronométré sur de vrais processus de cette machine, de 1 Kio à 16 Mio,
puis α et le débit 1/β sont ajustés ; --figure dessine les points, la droite et ce qu’elle dit de 2, 8 et 512 rangs ;
--output les garde.

Exemples :
  dlojz collectives --ranks 8
  dlojz collectives --name ring_all_reduce --ranks 4 --figure anneau.png
  dlojz collectives --calibrate --ranks 4 --figure calibration.png --output calibration.json
  dlojz collectives --calibrate --name tree_all_reduce --json""",
}
DEFAULT_RANKS = 4


def collectives_command(words: list[str]) -> int:
    """List, show or time the algorithms."""
    given = parse("collectives", say(**HELP), _flags(), words)
    _check(given)
    ranks = number(given, "ranks")
    size = check_size(DEFAULT_RANKS if ranks is None else ranks)
    per_node = number(given, "per_node")
    with answering(given.get("json", False)) as answer:
        if given.get("calibrate"):
            return calibrate(given, size, answer)
        if given.get("name"):
            return _show(given, size, per_node, answer)
        return _list(given, size, per_node, answer)


def _flags() -> list[Flag]:
    return [
        Flag(
            "name",
            say(en="algorithm: ", fr="algorithme : ")
            + ", ".join(collectives.names())
            + say(en="; with --calibrate also ", fr=" ; avec --calibrate aussi ")
            + ", ".join(LIBRARY),
            metavar="NAME",
        ),
        Flag("ranks", say(en="number of ranks", fr="nombre de rangs"), metavar="INT", default=str(DEFAULT_RANKS)),
        Flag(
            "per_node",
            say(
                en="ranks of one node, for hierarchical_all_reduce (default: at most 4)",
                fr="rangs d’un nœud, pour hierarchical_all_reduce (par défaut : 4 au plus)",
            ),
            metavar="INT",
        ),
        Flag(
            "calibrate",
            say(
                en="time it on real processes and fit α and β", fr="chronométrer sur de vrais processus, ajuster α et β"
            ),
            kind="switch",
        ),
        Flag("figure", say(en="picture to write (.png, .svg)", fr="image à écrire (.png, .svg)"), metavar="FILE"),
        Flag(
            "output",
            say(en="file that keeps the calibration as JSON", fr="fichier qui garde la calibration en JSON"),
            metavar="FILE",
        ),
        json_flag(),
    ]


def _check(given: dict[str, Any]) -> None:
    """Refuse flags that would do nothing.

    Raises:
        LabError: naming what they need.
    """
    name, calibrating = given.get("name"), given.get("calibrate", False)
    if name is not None:
        _ = algorithm_of(name) if calibrating else algorithm(name)
    if given.get("figure") and not (name or calibrating):
        raise LabError(
            say(
                en="--figure draws one algorithm or a calibration: add --name ring_all_reduce, or --calibrate.",
                fr="--figure dessine un algorithme ou une calibration : "
                "ajoutez --name ring_all_reduce, ou --calibrate.",
            )
        )
    if given.get("output") and not calibrating:
        raise LabError(
            say(
                en="--output keeps a calibration: add --calibrate.",
                fr="--output garde une calibration : ajoutez --calibrate.",
            )
        )
    if given.get("per_node") and (calibrating or (name and not algorithm(name).two_level)):
        raise LabError(
            say(
                en="--per-node is for --name hierarchical_all_reduce, without --calibrate: leave it out here.",
                fr="--per-node ne sert qu’avec --name hierarchical_all_reduce, sans --calibrate : retirez-le.",
            )
        )


def _list(given: dict[str, Any], size: int, per_node: int | None, answer: Any) -> int:
    costs = {name: collectives.terms(name, size, per_node=per_node) for name in collectives.names()}
    if given.get("json"):
        answer(
            [
                {
                    "name": name,
                    "collective": algorithm(name).collective,
                    "ranks": size,
                    "chunks": collectives.num_chunks(name, size),
                    "rounds": cost.rounds,
                    "moved": float(cost.moved),
                    "added": float(cost.added),
                }
                for name, cost in costs.items()
            ]
        )
        return cli.DONE
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(say(en="name", fr="nom"), no_wrap=True)
    table.add_column("")
    for title in (
        say(en="rounds", fr="étapes"),
        say(en="moved", fr="déplacé"),
        say(en="added", fr="additionné"),
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for name, cost in costs.items():
        table.add_row(name, algorithm(name).title(), str(cost.rounds), _times(cost.moved), _times(cost.added))
    answer(table)
    nodes = node_size(size, per_node)
    answer(
        say(
            en=f"for {size} ranks (nodes of {nodes}); moved and added: by the busiest rank, in messages",
            fr=f"pour {size} rangs (nœuds de {nodes}) ; déplacé, additionné : par le rang le plus chargé, en messages",
        )
    )
    return cli.DONE


def _times(share: Fraction) -> str:
    return say(en=f"{float(share):.2f} ×", fr=f"{float(share):.2f} ×".replace(".", ","))


def _show(given: dict[str, Any], size: int, per_node: int | None, answer: Any) -> int:
    name = given["name"]
    simulation = simulate(name, size, per_node=per_node)
    if given.get("figure"):
        from dlojz.viz.collective_figure import collective_figure

        collective_figure(name, size, path=given["figure"], per_node=per_node)
    if given.get("json"):
        cost = collectives.terms(name, size, per_node=per_node)
        answer(
            {
                "name": name,
                "collective": algorithm(name).collective,
                "ranks": size,
                "rounds": cost.rounds,
                "moved": float(cost.moved),
                "added": float(cost.added),
                "steps": [[transfer._asdict() for transfer in step] for step in simulation.transfers],
                "values": [simulation.values(step) for step in range(len(simulation.states))],
            }
        )
        return cli.DONE
    lines = [say(en=f"{name}, {size} ranks", fr=f"{name}, {size} rangs")]
    for step in range(1, len(simulation.states)):
        lines.append(say(en=f"step {step}", fr=f"étape {step}"))
        lines += [f"  {sentence}" for sentence in step_words(simulation, step)]
    if not simulation.transfers:
        lines.append(say(en="one rank alone sends nothing", fr="un rang seul n’envoie rien"))
    answer("\n".join(lines))
    tell_written(given.get("figure"))
    return cli.DONE
