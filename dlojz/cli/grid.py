"""Command `dlojz grid`.

What `dlojz grid` answers: words, tables, a JSON document.

Every figure is asked of `dlojz.config.layout` and `dlojz.prediction.link_traffic`; bytes are those of one step, sent by
all ranks.

`dlojz grid`: the ranks of a run on their nodes, who shares which group, what crosses which link.

Nothing is run on processes; where bytes are not known, the grid is told all the same, with one sentence that says why;
a picture is written before anything is printed, so that a wrong path is the only answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, say
from dlojz.base.table import Table
from dlojz.cli import main
from dlojz.cli.options import Flag, answering, config_flags, json_flag, number, parse, tell, typed
from dlojz.config.layout import AXES, DEFAULT_GPUS_PER_NODE, DEFAULT_ORDER, ORDERS, Layout, RankGrid, complete
from dlojz.config.run_config import RunConfig
from dlojz.hardware.links import Link
from dlojz.prediction.link_traffic import Crossing, link_traffic, placements

MOST_TOLD = 64
"""Ranks up to which the text lists all of them and all groups."""


def document(
    grid: RankGrid, found: dict[str, Crossing], unknown: str, links: tuple[Link, Link] | None = None
) -> dict[str, Any]:
    """Everything about a grid as plain JSON data; bytes per step, sent by all ranks."""
    from dlojz.display.grid_scene import advice

    own = found.get(grid.order)
    told: dict[str, Any] = {
        **{axis: grid.size(axis) for axis in ("dp", "pp", "tp")},
        "world_size": grid.world_size,
        "gpus_per_node": grid.gpus_per_node,
        "order": grid.order,
        "ranks": [
            {"rank": rank, "node": grid.node_of(rank), **grid.coordinates(rank)._asdict()}
            for rank in range(grid.world_size)
        ],
        "nodes": [list(ranks) for ranks in grid.nodes],
        "groups": {axis: [list(group) for group in grid.groups(axis)] for axis in AXES},
        "inside": {axis: grid.inside(axis) for axis in AXES},
        "spanning": {axis: [list(group) for group in grid.links(axis)] for axis in AXES},
        "advice": advice(grid),
        "traffic": [row._asdict() for row in own.rows] if own else None,
        "node_table_bytes": [list(row) for row in own.node_table] if own else None,
        "between_bytes_by_order": {
            order: {axis: one.bytes_of(axis, between=True) for axis in AXES} for order, one in found.items()
        }
        or None,
        "unknown": unknown or None,
    }
    if links and own:
        told["seconds_per_axis"] = own.seconds(*links)
    return told


def show_grid(
    grid: RankGrid,
    found: dict[str, Crossing],
    unknown: str,
    links: tuple[Link, Link] | None,
    answer: Callable[[Any], None],
    run: str = "",
) -> None:
    """Tell a grid in words and tables: ranks, groups, what would be better, bytes.

    Args:
        grid: the ranks.
        found: traffic by order, that of the grid among them; empty where it is not known.
        unknown: why it is not known.
        links: inside a node and between nodes, for seconds.
        answer: prints.
        run: whose bytes they are, in words.
    """
    from dlojz.display import grid_scene as words

    answer(words.size_sentence(grid) + "\n")
    answer(_ranks(grid))
    answer("")
    for axis in words.AXIS_ORDER:
        answer(_groups(grid, axis))
    answer("\n" + words.advice(grid) + "\n")
    own = found.get(grid.order)
    if own is None:
        answer(say(en="The bytes are not known: ", fr="Les octets ne sont pas connus : ") + unknown)
        return
    answer(
        say(
            en=f"Bytes per step, sent by all ranks, for {run}:",
            fr=f"Octets par pas, envoyés par tous les rangs, pour {run} :",
        )
    )
    answer(_table(words.crossing_titles(), words.crossing_rows(own), left=2))
    if 1 < len(grid.nodes) <= 8:
        titles = [say(en=f"to node {node}", fr=f"vers nœud {node}") for node in range(len(grid.nodes))]
        rows = [
            (say(en=f"node {node}", fr=f"nœud {node}"), *map(format_bytes, row))
            for node, row in enumerate(own.node_table)
        ]
        answer("")
        answer(_table(("", *titles), rows))
    if len(found) > 1:
        answer("\n" + say(en="Between nodes, by order of the axes:", fr="Entre nœuds, selon l’ordre des axes :"))
        answer(_table(words.order_titles(grid), words.order_rows(found)))
    if links:
        answer("\n" + words.seconds_sentence(own.seconds(*links)))


def _ranks(grid: RankGrid) -> str:
    """One line per node: each rank with its position (pp,dp,tp)."""
    lines = [say(en="rank (pp,dp,tp) on each node:", fr="rang (pp,dp,tp) sur chaque nœud :")]
    named = [
        f"{rank} ({','.join(map(str, grid.coordinates(rank)))})" for rank in range(min(grid.world_size, MOST_TOLD))
    ]
    width = max(map(len, named))
    for node, ranks in enumerate(grid.nodes):
        if ranks[0] >= MOST_TOLD:
            lines.append(
                say(en="  … (--json lists all ranks)", fr="  … (--json énumère tous les rangs)"),
            )
            break
        cells = named[ranks[0] : ranks[-1] + 1]
        name = say(en=f"node {node}", fr=f"nœud {node}")
        for start in range(0, len(cells), 8):
            shown = "  ".join(cell.ljust(width) for cell in cells[start : start + 8]).rstrip()
            lines.append(f"  {name if not start else ' ' * len(name)}  {shown}")
    return "\n".join(lines)


def _groups(grid: RankGrid, axis: str) -> str:
    """The groups along an axis, those that leave their node marked."""
    from dlojz.display.grid_scene import title_of

    title = title_of(grid, axis)
    if grid.size(axis) == 1:
        return title
    spanning, told, shown = set(grid.links(axis)), [], 0
    for group in grid.groups(axis):
        if shown + len(group) > MOST_TOLD:
            told.append("…")
            break
        shown += len(group)
        told.append("[" + " ".join(map(str, group)) + "]" + ("*" if group in spanning else ""))
    mark = say(en="   (*: across nodes)", fr="   (* : à cheval sur des nœuds)") if "*" in "".join(told) else ""
    return f"{title}{mark}\n  " + " ".join(told)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    return Table(tuple(titles), tuple(map(tuple, rows)), align="l" * left + "r", whole=left)


HELP = {
    "en": """The grid of ranks of a run with data, pipeline and tensor parallelism: where each rank stands, which ranks
share a group, which groups leave their node, and how many bytes of a step cross which link.

processes = dp × pp × tp (SageMaker: processes per host = pipeline degree × data degree × tensor degree): with
--processes, the one degree that is left out is derived. Ranks fill the nodes in order; --order names the axes from the
innermost, whose neighbours are neighbouring ranks. tp-dp-pp is Megatron-LM's and the lab's: tensor parallelism, which
communicates most, stays inside a node. The last table tells what every other order would send between nodes.
Bytes are predicted from a model (--model and the options of a run); a ring goes through its group in the order of the
ranks.

Examples:
  dlojz grid --dp 2 --pp 2 --tp 2 --gpus-per-node 4
  dlojz grid --processes 16 --pp 4 --tp 2 --gpus-per-node 8           (2 nodes of 8 GPUs: dp is derived)
  dlojz grid --dp 2 --pp 4 --tp 2 --gpus-per-node 8 --order pp-dp-tp  (the bad one: tp across nodes)
  dlojz grid --dp 4 --pp 2 --model gpt2_xl --micro-batches 8 --bandwidths 300,25 --png grid.png""",
    "fr": """La grille des rangs d’une exécution en Data, Pipeline et Tensor Parallelism : la place de chaque rang,
les rangs d’un même groupe, les groupes à cheval sur des nœuds, et combien d’octets d’un pas passent par quel lien.

processus = dp × pp × tp (SageMaker : processus par hôte = degré de pipeline × degré de données × degré de tenseur) :
avec --processes, le seul degré omis est déduit. Les rangs remplissent les nœuds dans l’ordre ; --order nomme les axes
en commençant par le plus intérieur, dont les voisins sont des rangs voisins. tp-dp-pp est l’ordre de Megatron-LM et du
TP : le Tensor Parallelism, qui communique le plus, reste dans un nœud. Le dernier tableau dit ce que chaque autre ordre
enverrait entre les nœuds. Les octets sont prédits à partir d’un modèle (--model et les options d’une exécution) ; un
anneau parcourt son groupe dans l’ordre des rangs.

Exemples :
  dlojz grid --dp 2 --pp 2 --tp 2 --gpus-per-node 4
  dlojz grid --processes 16 --pp 4 --tp 2 --gpus-per-node 8           (2 nœuds de 8 GPU : dp est déduit)
  dlojz grid --dp 2 --pp 4 --tp 2 --gpus-per-node 8 --order pp-dp-tp  (le mauvais : tp entre les nœuds)
  dlojz grid --dp 4 --pp 2 --model gpt2_xl --micro-batches 8 --bandwidths 300,25 --png grid.png""",
}
DEFAULT_MODEL, DEFAULT_MICRO_BATCHES = "gpt_tiny", 4
RUN_OPTIONS = (
    *("sequence_length", "image_size", "precision", "engine", "zero", "schedule", "chunks", "partition"),
    *("micro_batch", "sequence_parallel", "tensor_parts", "checkpointing", "ep"),
)
"""Options of a run that change what it sends."""


def grid_command(words: list[str]) -> int:
    """Tell a grid of ranks, its groups, its nodes and its traffic."""
    given = parse("grid", say(**HELP), _flags(), words)
    grid, links = _grid(given), _links(given)
    if "axis" in given:
        grid.size(given["axis"])  # refuses what is no axis
        if "png" not in given:
            raise LabError(
                say(
                    en="--axis chooses what the picture shows, but there is no picture: add --png FILE.",
                    fr="--axis choisit ce que montre l’image, mais il n’y a pas d’image : ajoutez --png FICHIER.",
                )
            )
    with answering(given.get("json", False)) as answer:
        found, unknown = _traffic(given, grid)
        if "png" in given:
            from dlojz.display.figures.grid_figures import grid_figure

            grid_figure(grid, found.get(grid.order), given["png"], axis=given.get("axis"))
            tell(say(en=f"figure: {given['png']}", fr=f"figure : {given['png']}"))
        if given.get("json"):
            answer(document(grid, found, unknown, links))
        else:
            show_grid(grid, found, unknown, links, answer, _run_words(given))
    return main.DONE


def _flags() -> list[Flag]:
    of_run = {flag.name: flag for flag in config_flags()}
    return [
        *(of_run[axis] for axis in AXES),
        Flag(
            "processes",
            say(
                en="processes in all; the degree that is left out is derived",
                fr="processus en tout ; le degré omis est déduit",
            ),
            "INT",
            default="dp × pp × tp",
        ),
        Flag("gpus_per_node", say(en="GPUs of a node", fr="GPU d’un nœud"), "INT", default=str(DEFAULT_GPUS_PER_NODE)),
        Flag(
            "order",
            say(en="axes, from the innermost to the outermost", fr="axes, du plus intérieur au plus extérieur"),
            "|".join(ORDERS),
            default=DEFAULT_ORDER,
        ),
        Flag("model", of_run["model"].help, "TEXT", default=DEFAULT_MODEL),
        Flag("micro_batches", of_run["micro_batches"].help, "INT", default=str(DEFAULT_MICRO_BATCHES)),
        *(of_run[name] for name in RUN_OPTIONS if name in of_run),
        Flag(
            "bandwidths",
            say(
                en="GB/s of a rank's link inside a node and between nodes, for seconds per axis",
                fr="Go/s du lien d’un rang dans un nœud et entre nœuds, pour des secondes par axe",
            ),
            "IN,OUT",
        ),
        Flag(
            "latencies",
            say(
                en="microseconds of a message inside a node and between nodes, with --bandwidths",
                fr="microsecondes d’un message dans un nœud et entre nœuds, avec --bandwidths",
            ),
            "IN,OUT",
            default="0,0",
        ),
        Flag("png", say(en="picture to write (.png, .svg, .pdf)", fr="image à écrire (.png, .svg, .pdf)"), "FILE"),
        Flag("axis", say(en="draw one axis alone", fr="dessiner un seul axe"), "|".join(AXES)),
        json_flag(),
    ]


def _grid(given: dict[str, Any]) -> RankGrid:
    degrees = {axis: number(given, axis, int, 1) for axis in AXES}
    processes = number(given, "processes", int, 1)
    if processes is None:
        degrees = {axis: degree or 1 for axis, degree in degrees.items()}
    else:
        degrees = dict(zip(("dp", "pp", "tp"), complete(processes, **degrees), strict=True))
    per_node = number(given, "gpus_per_node", int, 1) or DEFAULT_GPUS_PER_NODE
    return RankGrid(**degrees, gpus_per_node=per_node, order=given.get("order", DEFAULT_ORDER))


def _links(given: dict[str, Any]) -> tuple[Link, Link] | None:
    """The links inside a node and between nodes, where they are given."""
    if "bandwidths" not in given:
        if "latencies" in given:
            raise LabError(
                say(
                    en="--latencies does nothing without --bandwidths: add --bandwidths IN,OUT.",
                    fr="--latencies ne sert à rien sans --bandwidths : ajoutez --bandwidths DEDANS,ENTRE.",
                )
            )
        return None
    speeds = _pair("--bandwidths", given["bandwidths"], "300,25", zero=False)
    waits = _pair("--latencies", given.get("latencies", "0,0"), "2,10", zero=True)
    inside, between = (Link(wait * 1e-6, 1e9 * speed) for wait, speed in zip(waits, speeds, strict=True))
    return inside, between


def _pair(option: str, text: str, example: str, *, zero: bool) -> tuple[float, float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 2 or not all(0 <= value < float("inf") and (zero or value) for value in values):
        raise LabError(
            say(
                en=f"{option} takes two positive numbers, inside a node and between nodes, but {text!r} was received: "
                f"write {option} {example}.",
                fr=f"{option} attend deux nombres positifs, dans un nœud et entre nœuds, mais {text!r} a été reçu : "
                f"écrivez {option} {example}.",
            )
        )
    return values[0], values[1]


def _run_words(given: dict[str, Any]) -> str:
    """Whose bytes are told."""
    count, size = given.get("micro_batches", DEFAULT_MICRO_BATCHES), given.get("micro_batch", Layout().micro_batch)
    return f"{given.get('model', DEFAULT_MODEL)}, " + say(
        en=f"{count} micro-batches of {size}", fr=f"{count} micro-batches de {size}"
    )


def _traffic(given: dict[str, Any], grid: RankGrid) -> tuple[dict[str, Crossing], str]:
    """Traffic in every order that makes a difference, that of the grid first; or why it is not known."""
    fields = {name: given[name] for name in RUN_OPTIONS if name in given}
    fields["model"] = given.get("model", DEFAULT_MODEL)
    fields["micro_batches"] = given.get("micro_batches", DEFAULT_MICRO_BATCHES)
    asked = "model" in given or any(name in given for name in (*RUN_OPTIONS, "micro_batches"))
    try:
        config = RunConfig.of(**typed(fields), **{axis: grid.size(axis) for axis in AXES})
        return (placements(config, grid) if len(grid.nodes) > 1 else {grid.order: link_traffic(config, grid)}), ""
    except LabError as error:
        if asked:  # what was asked for by name is refused; the default model is only an example
            raise
        return {}, str(error)
