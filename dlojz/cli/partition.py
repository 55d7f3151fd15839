"""`dlojz partition`: where to cut a model into pipeline stages, and how far other tools' cuts are from the best.

Layer 6. Invariant: every cut is computed from the model's own blocks; nothing is allocated unless blocks are timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dlojz import cli
from dlojz.cli.answer import answering, console, tell
from dlojz.cli.flags import Flag, config_flags, config_of, json_flag, number, parse
from dlojz.config import RunConfig
from dlojz.pipeline.block_weights import MEASURES, BlockWeights, block_weights
from dlojz.pipeline.partition import Partition, check_stages, exact, total_time
from dlojz.pipeline.partition_peers import PEERS, how_often, uniform
from dlojz.text import say
from dlojz.viz import partition_sheet as sheet

if TYPE_CHECKING:
    from dlojz.pipeline.partition_peers import HowOften

HELP = {
    "en": """Cut a model into pipeline stages: which blocks go where, and how evenly.

A pipeline runs at the pace of its heaviest stage: a step of m micro-batches takes Σ tᵢ + (m − 1) max tᵢ, so the best
cut is the one whose heaviest stage (the bottleneck) is lightest. Stages are runs of neighbouring blocks. The exact
optimum stands beside what DeepSpeed and torchgpipe would choose, and beside equal numbers of blocks. Imbalance is
bottleneck ÷ mean: 1.00 is perfect.

--by says what a block weighs: its parameters, its FLOPs, its time (each kind of block really runs, forward and
backward), 1 each (uniform), or 1 if --pattern is found in its class (regex, DeepSpeed's 'type:PATTERN').
--compare also weighs each cut in the other units (equal parameters are not equal work), and counts over 4,000 random
lists of blocks how often each tool misses the optimum.

Examples:
  dlojz partition --model coatnet_7 --stages 8
  dlojz partition --model coatnet_7 --stages 8 --by flops --compare --png cut.png
  dlojz partition --model coatnet_tiny --stages 4 --by time --micro-batch 8
  dlojz partition --model coatnet_7 --stages 4 --by regex --pattern Attention --json""",
    "fr": """Découper un modèle en étages de pipeline : quels blocs vont où, et avec quel équilibre.

Un pipeline avance au rythme de son étage le plus chargé : un pas de m micro-batches dure Σ tᵢ + (m − 1) max tᵢ ; le
meilleur découpage est donc celui dont l’étage le plus chargé (le goulot) l’est le moins. Un étage est une suite de
blocs voisins. L’optimum exact est montré à côté de ce que choisiraient DeepSpeed et torchgpipe, et du découpage en
nombres de blocs égaux. Déséquilibre = goulot ÷ moyenne : 1,00 est parfait.

--by dit ce que pèse un bloc : ses paramètres, ses FLOPs, son temps (chaque sorte de bloc est vraiment exécutée, passes
avant et arrière), 1 chacun (uniform), ou 1 si --pattern se trouve dans le nom de sa classe (regex, le 'type:MOTIF' de
DeepSpeed). --compare pèse aussi chaque découpage dans les autres unités (à paramètres égaux, le travail ne l’est pas),
et compte sur 4 000 listes de blocs aléatoires combien de fois chaque outil manque l’optimum.

Exemples :
  dlojz partition --model coatnet_7 --stages 8
  dlojz partition --model coatnet_7 --stages 8 --by flops --compare --png decoupage.png
  dlojz partition --model coatnet_tiny --stages 4 --by time --micro-batch 8
  dlojz partition --model coatnet_7 --stages 4 --by regex --pattern Attention --json""",
}
DEFAULT_STAGES, DEFAULT_MICRO_BATCHES = 4, 8
OF_THE_MODEL = ("model", "data", "image_size", "sequence_length", "micro_batch", "micro_batches", "device")
CASES, SEED = 4000, 0


def partition_command(words: list[str]) -> int:
    """Cut a model into stages and tell how evenly."""
    given = parse("partition", say(**HELP), _flags(), words)
    stages = number(given, "stages", least=1) or DEFAULT_STAGES
    config = config_of({"micro_batches": DEFAULT_MICRO_BATCHES, **given})
    by, pattern = given.get("by", "regex" if "pattern" in given else "parameters"), given.get("pattern")
    as_json = given.get("json", False)
    with answering(as_json) as answer:
        check_stages(len(block_weights(config).kinds), stages)  # before blocks are timed for nothing
        weighed = _weighed(config, by, pattern)
        cuts = {"exact": exact(weighed.weights, stages)}
        cuts |= {name: cut(weighed.weights, stages) for name, cut in PEERS.items()}
        others = _in_other_units(config, weighed, stages) if given.get("compare") else {}
        counts = [how_often(peer, CASES, SEED) for peer in PEERS] if given.get("compare") else []
        if "png" in given:
            from dlojz.viz.partition_figure import partition_figure

            titles = {sheet.title(name): cut for name, cut in cuts.items()}
            partition_figure(titles, weighed, model=config.model, path=given["png"])
            tell(say(en=f"figure: {given['png']}", fr=f"figure : {given['png']}"))
        if as_json:
            answer(_document(config, weighed, cuts, others, counts) | ({"pattern": pattern} if pattern else {}))
            return cli.DONE
        answer(sheet.headline(config.model, weighed, stages) + "\n")
        answer(sheet.stages_table(cuts["exact"], weighed))
        answer("")
        answer(sheet.methods_table(cuts, weighed, config.layout.micro_batches))
        answer(sheet.legend(config.layout.micro_batches))
        if given.get("compare"):
            answer("")
            answer(sheet.units_table(others))
            answer("")
            answer(sheet.counts_table(counts))
    return cli.DONE


def _flags() -> list[Flag]:
    by_name = {flag.name: flag for flag in config_flags()}
    micro_batches = by_name["micro_batches"]
    by_name["micro_batches"] = Flag(
        micro_batches.name, micro_batches.help, micro_batches.metavar, default=str(DEFAULT_MICRO_BATCHES)
    )
    return [
        Flag("stages", say(en="pipeline stages", fr="étages du pipeline"), "INT", default=str(DEFAULT_STAGES)),
        Flag("by", say(en="what a block weighs", fr="ce que pèse un bloc"), "|".join(MEASURES), default="parameters"),
        Flag(
            "pattern",
            say(
                en="regular expression found in the class of the blocks that count (--by regex)",
                fr="expression régulière cherchée dans la classe des blocs qui comptent (--by regex)",
            ),
            "REGEX",
        ),
        *(by_name[name] for name in OF_THE_MODEL),
        Flag(
            "compare",
            say(
                en="the cuts in other units, and how often each tool misses the optimum",
                fr="les découpages dans d’autres unités, et combien de fois chaque outil manque l’optimum",
            ),
            kind="switch",
        ),
        Flag("png", say(en="picture to write (.png, .svg, .pdf)", fr="image à écrire (.png, .svg, .pdf)"), "FILE"),
        json_flag(),
    ]


def _weighed(config: RunConfig, by: str, pattern: str | None) -> BlockWeights:
    if by != "time":
        return block_weights(config, by, pattern)  # type: ignore[arg-type]  # another word is refused there
    shown = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        task = progress.add_task(say(en="blocks timed", fr="blocs chronométrés"), total=None)
        return block_weights(
            config, "time", pattern, tell=lambda done, of: progress.update(task, completed=done, total=of)
        )


def _in_other_units(config: RunConfig, weighed: BlockWeights, stages: int) -> dict[str, dict[str, float]]:
    """Imbalance of the best cut by each unit, in each unit that is a cost."""
    costs = {"parameters": block_weights(config, "parameters"), "flops": block_weights(config, "flops")}
    if weighed.by == "time":
        costs["time"] = weighed
    cuts = {unit: exact(cost.weights, stages) for unit, cost in costs.items()}
    cuts["uniform"] = uniform(len(weighed.kinds), stages)
    if weighed.by == "regex":
        cuts["regex"] = exact(weighed.weights, stages)
    return {by: {unit: cut.weighed(cost.weights).imbalance for unit, cost in costs.items()} for by, cut in cuts.items()}


def _document(
    config: RunConfig,
    weighed: BlockWeights,
    cuts: Mapping[str, Partition],
    others: Mapping[str, Mapping[str, float]],
    counts: list[HowOften],
) -> dict[str, Any]:
    """Everything as plain JSON data."""
    best, m = cuts["exact"], config.layout.micro_batches
    document: dict[str, Any] = {
        "model": config.model,
        "by": weighed.by,
        "unit": weighed.unit or "parameters",
        "stages": best.num_stages,
        "micro_batches": m,
        "blocks": [
            {"block": block, "kind": kind, "weight": weight}
            for block, (kind, weight) in enumerate(zip(weighed.kinds, weighed.weights, strict=True))
        ],
        "methods": {
            name: {
                "bounds": list(cut.bounds),
                "loads": list(cut.loads),
                "bottleneck": cut.bottleneck,
                "imbalance": cut.imbalance,
                "spread": cut.spread,
                "total_time": total_time(cut.loads, m),
                "optimal": cut.bottleneck == best.bottleneck,
            }
            for name, cut in cuts.items()
        },
    }
    if others:
        document["imbalance_of_cut_by"] = others
        document["random_cases"] = {
            each.peer: {
                "cases": each.cases,
                "seed": each.seed,
                "not_optimal": each.missed,
                "worst_ratio": each.worst_ratio,
                "worst_weights": list(each.worst_weights),
                "worst_stages": each.worst_stages,
            }
            for each in counts
        }
    return document
