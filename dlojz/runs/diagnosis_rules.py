"""The rules of a diagnosis: what each kind of end looks like, and what to do about it. Pure.

Layer 5. Invariant: a rule answers only where its evidence is there in full, and names who, what and where from it.

Sources of the texts looked for: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp ("Watchdog caught collective operation
timeout"), ProcessGroupWrapper.cpp ("Detected mismatch between collectives on ranks"), ProcessGroupGloo.cpp ("failed to
pass monitoredBarrier"), gloo/transport/tcp ("Timed out waiting"), and the sentences of `dlojz.runs.ending`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dlojz.runs.ending import PORT
from dlojz.runs.first_errors import first_error
from dlojz.runs.recorded_calls import Calls
from dlojz.text import say

Kind = Literal["memory", "time-limit", "collective", "import", "divergence", "killed", "port", "node", "cancelled"]
NCCL = re.compile(
    r"(?:\[rank(?P<world>\d+)\]:)?.*Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?.*?Timeout\(ms\)=(?P<ms>\d+)"
)
BARRIER = re.compile(r"Ranks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass monitoredBarrier in (?P<ms>\d+) ?ms")
MISMATCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (?P<one>\d+) is running collective: "
    r"CollectiveFingerPrint\((?P<first>.*?)\), but Rank (?P<other>\d+) is running (?:inconsistent )?collective: "
    r"CollectiveFingerPrint\((?P<second>.*?)\)\."
)
GLOO = re.compile(r"Timed out waiting (?P<ms>\d+)ms for (?P<what>recv|send) operation to complete")
_MODULE = re.compile(r"(?:ModuleNotFoundError|ImportError): No module named '(?P<module>[\w.]{1,100})'")
_NAME = re.compile(r"ImportError: cannot import name '(?P<name>\w{1,100})' from '(?P<module>[\w.]{1,100})'")
_LIBRARY = re.compile(
    r"(?P<library>lib[\w.+-]{1,80}): cannot open shared object file|(?P<other>GLIBC\w*_[\d.]+)' not found"
)
_DIVERGED = re.compile(r"the loss became (?P<loss>\S+) at step (?P<step>\d+)")
_SIGNAL = re.compile(r"rank (?P<rank>\d+) was killed by (?:signal (?P<number>\d+) \((?P<name>\w+)\)|the system)")


class Finding(NamedTuple):
    """One cause: what happened, what to do about it, and on which ranks."""

    kind: Kind
    what: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Symptoms:
    """All that the rules look at.

    Args:
        status, reason: how the run ended, and the sentence of its record.
        steps: finished ones.
        losses: of those.
        logs: what was printed, by rank; None is the launcher and the scheduler's job.
        started: ranks that told anything at all.
        calls: by rank, the collectives that it told of when it failed.
    """

    status: str
    reason: str
    world_size: int
    learning_rate: float
    steps: int
    losses: tuple[float, ...]
    logs: Mapping[int | None, str]
    started: frozenset[int]
    calls: Mapping[int, Calls] = field(default_factory=dict)

    def matches(self, pattern: re.Pattern[str]) -> list[tuple[int | None, re.Match[str]]]:
        """Where a pattern is found first in each log, and, of the record's reason, under the job."""
        found = [(rank, match) for rank, text in self.logs.items() if (match := pattern.search(text))]
        told = pattern.search(self.reason)
        return [*found, (None, told)] if told else found


def out_of_memory(symptoms: Symptoms) -> Finding | None:
    """Memory ran out; what filled it is told beside the finding."""
    if symptoms.status != "oom":
        return None
    return Finding(
        "memory",
        say(
            en=f"Memory ran out {_after(symptoms)}.",
            fr=f"La mémoire a manqué {_after(symptoms)}.",
        ),
        say(
            en="That is a result: this layout does not fit. Take one of the levers below.",
            fr="C’est un résultat : ce découpage ne tient pas. Prenez l’un des leviers ci-dessous.",
        ),
    )


def time_limit(symptoms: Symptoms) -> Finding | None:
    """The time was over."""
    if symptoms.status != "timeout":
        return None
    return Finding(
        "time-limit",
        say(
            en=f"The time limit was reached {_after(symptoms)}.", fr=f"Le temps alloué s’est écoulé {_after(symptoms)}."
        ),
        say(
            en="Ask for the same run again: it goes on from its last checkpoint, if it has one; or allow it more time.",
            fr="Redemandez la même exécution : elle repart de son dernier checkpoint, s’il existe ; ou allouez-lui "
            "plus de temps.",
        ),
    )


def diverged(symptoms: Symptoms) -> Finding | None:
    """A loss that is not finite."""
    if symptoms.status != "diverged":
        return None
    found = _DIVERGED.search(symptoms.reason)
    step = int(found["step"]) if found else symptoms.steps
    last = f"{symptoms.losses[-1]:.4g}" if symptoms.losses else "—"
    rate = f"{symptoms.learning_rate:g}"
    return Finding(
        "divergence",
        say(
            en=f"The training diverged at step {step} with the learning rate {rate} (last finite loss: {last}).",
            fr=f"L’entraînement a divergé au pas {step} avec un taux d’apprentissage de {rate} (dernière perte finie : "
            f"{last}).",
        ),
        say(
            en=f"Divide the learning rate by ten (--learning-rate {symptoms.learning_rate / 10:g}); with fp16, look at "
            "the loss scale first.",
            fr=f"Divisez le taux d’apprentissage par dix (--learning-rate {symptoms.learning_rate / 10:g}) ; en fp16, "
            "regardez d’abord le facteur d’échelle de la perte.",
        ),
    )


def missing_module(symptoms: Symptoms) -> Finding | None:
    """Something that is imported is not there."""
    for rank, found in symptoms.matches(_MODULE):
        module = found["module"]
        return Finding(
            "import",
            say(
                en=f"{_place(rank)} could not import the module {module}: it is not installed in this environment.",
                fr=f"{_place(rank)} n’a pas pu importer le module {module} : il n’est pas installé dans cet "
                "environnement.",
            ),
            say(
                en=f"Load the module that provides it on the cluster (`module avail`), or `pip install "
                f"{module.partition('.')[0]}` in the environment that the machine file activates.",
                fr=f"Chargez sur le calculateur le module qui le fournit (`module avail`), ou `pip install "
                f"{module.partition('.')[0]}` dans l’environnement que le fichier de machine active.",
            ),
            _ranks(rank),
        )
    for rank, found in symptoms.matches(_NAME):
        return Finding(
            "import",
            say(
                en=f"{_place(rank)} found the module {found['module']}, but not {found['name']} in it.",
                fr=f"{_place(rank)} a trouvé le module {found['module']}, mais pas {found['name']} dedans.",
            ),
            say(
                en="Its version differs from the one that the labs were written with: see `dlojz doctor`.",
                fr="Sa version n’est pas celle avec laquelle les TP ont été écrits : voir `dlojz doctor`.",
            ),
            _ranks(rank),
        )
    for rank, found in symptoms.matches(_LIBRARY):
        library = found["library"] or found["other"]
        return Finding(
            "import",
            say(
                en=f"{_place(rank)} could not load the library {library}.",
                fr=f"{_place(rank)} n’a pas pu charger la bibliothèque {library}.",
            ),
            say(
                en="Load the modules of the machine file (CUDA, compiler) before Python starts, and no others.",
                fr="Chargez les modules du fichier de machine (CUDA, compilateur) avant Python, et eux seuls.",
            ),
            _ranks(rank),
        )
    return None


def port_taken(symptoms: Symptoms) -> Finding | None:
    """Another program uses the port."""
    # The ports of peers that have gone are no cause: only who says it first is believed.
    errors = [(rank, first_error(text, rank)) for rank, text in symptoms.logs.items()]
    taken = [rank for rank, error in errors if error and PORT.search(error.text)]
    if not taken and "EADDRINUSE" not in symptoms.reason:
        return None
    rank = taken[0] if taken else None
    return Finding(
        "port",
        say(
            en=f"{_place(rank)} could not open its network port: another program uses it.",
            fr=f"{_place(rank)} n’a pas pu ouvrir son port réseau : un autre programme l’utilise.",
        ),
        say(
            en="Run it again: a free port is chosen each time.",
            fr="Relancez : un port libre est choisi à chaque fois.",
        ),
        _ranks(rank),
    )


def killed(symptoms: Symptoms) -> Finding | None:
    """A rank that a signal ended."""
    found = _SIGNAL.search(symptoms.reason)
    if not found or symptoms.status == "oom":
        return None
    rank, name = int(found["rank"]), found["name"] or "SIGKILL"
    advice = say(
        en="If nobody stopped it, the memory of the node ran out: look at the memory of the job, and at its limit.",
        fr="Si personne ne l’a arrêté, la mémoire du nœud a manqué : regardez la mémoire du travail et sa limite.",
    )
    crash = say(
        en=f"A crash in compiled code: the log of rank {rank} ends with its last words.",
        fr=f"Un plantage dans du code compilé : le journal du rang {rank} se termine par ses derniers mots.",
    )
    return Finding(
        "killed",
        say(
            en=f"Rank {rank} was killed ({name}) {_after(symptoms)}; the other ranks only lost it.",
            fr=f"Le rang {rank} a été tué ({name}) {_after(symptoms)} ; les autres rangs n’ont fait que le perdre.",
        ),
        advice if name in ("SIGKILL", "SIGTERM") else crash,
        (rank,),
    )


def lost_node(symptoms: Symptoms) -> Finding | None:
    """The machine failed, or was given to somebody else."""
    for words in ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED"):
        if words in symptoms.reason:
            return Finding(
                "node",
                say(
                    en=f"The cluster ended the job ({words}); the training is not at fault.",
                    fr=f"Le calculateur a mis fin au travail ({words}) ; l’entraînement n’y est pour rien.",
                ),
                say(
                    en="Ask for the same run again: it goes on from its last checkpoint, if it has one.",
                    fr="Redemandez la même exécution : elle repart de son dernier checkpoint, s’il existe.",
                ),
            )
    return None


def _after(symptoms: Symptoms) -> str:
    steps = symptoms.steps
    if not steps:
        return say(en="before the first step was finished", fr="avant la fin du premier pas")
    return say(en=f"after {steps} steps", fr=f"après {steps} pas")


def _place(rank: int | None) -> str:
    return say(en="The job", fr="Le travail") if rank is None else say(en=f"Rank {rank}", fr=f"Le rang {rank}")


def _ranks(rank: int | None) -> tuple[int, ...]:
    return () if rank is None else (rank,)
