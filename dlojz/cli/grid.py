"""`dlojz grid`: the ranks of a run on their nodes, who shares which group, what crosses which link.

Layer 6. Invariant: nothing is run on processes; where bytes are not known, the grid is told all the same, with one
sentence that says why; a picture is written before anything is printed, so that a wrong path is the only answer.
"""

from __future__ import annotations

from typing import Any

from dlojz import cli
from dlojz.cli.answer import answering, tell
from dlojz.cli.flags import Flag, config_flags, json_flag, number, parse
from dlojz.cli.grid_tables import document, show_grid
from dlojz.collectives.cost import Link
from dlojz.config import Layout, RunConfig
from dlojz.grid import AXES, DEFAULT_GPUS_PER_NODE, DEFAULT_ORDER, ORDERS, Grid, complete
from dlojz.predict.link_traffic import Crossing, link_traffic, placements
from dlojz.schema import LabError
from dlojz.text import say

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
            from dlojz.viz.grid_figure import grid_figure

            grid_figure(grid, found.get(grid.order), given["png"], axis=given.get("axis"))
            tell(say(en=f"figure: {given['png']}", fr=f"figure : {given['png']}"))
        if given.get("json"):
            answer(document(grid, found, unknown, links))
        else:
            show_grid(grid, found, unknown, links, answer, _run_words(given))
    return cli.DONE


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


def _grid(given: dict[str, Any]) -> Grid:
    degrees = {axis: number(given, axis, int, 1) for axis in AXES}
    processes = number(given, "processes", int, 1)
    if processes is None:
        degrees = {axis: degree or 1 for axis, degree in degrees.items()}
    else:
        degrees = dict(zip(("dp", "pp", "tp"), complete(processes, **degrees), strict=True))
    per_node = number(given, "gpus_per_node", int, 1) or DEFAULT_GPUS_PER_NODE
    return Grid(**degrees, gpus_per_node=per_node, order=given.get("order", DEFAULT_ORDER))


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
    inside, between = (Link(wait * 1e-6, 1e-9 / speed) for wait, speed in zip(waits, speeds, strict=True))
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


def _traffic(given: dict[str, Any], grid: Grid) -> tuple[dict[str, Crossing], str]:
    """Traffic in every order that makes a difference, that of the grid first; or why it is not known."""
    fields = {name: given[name] for name in RUN_OPTIONS if name in given}
    fields["model"] = given.get("model", DEFAULT_MODEL)
    fields["micro_batches"] = given.get("micro_batches", DEFAULT_MICRO_BATCHES)
    asked = "model" in given or any(name in given for name in (*RUN_OPTIONS, "micro_batches"))
    try:
        config = RunConfig.of(**fields, **{axis: grid.size(axis) for axis in AXES})
        return (placements(config, grid) if len(grid.nodes) > 1 else {grid.order: link_traffic(config, grid)}), ""
    except LabError as error:
        if asked:  # what was asked for by name is refused; the default model is only an example
            raise
        return {}, str(error)
