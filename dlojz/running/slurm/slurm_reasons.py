"""Why a job waits: the scheduler's reasons, translated.

A reason that is not known is told as it is, never guessed; what would let a job wait for ever says so.

Source: "JOB REASON CODES" of squeue(1), Slurm 22.05, and https://slurm.schedmd.com/resource_limits.html for the limits
of associations and qualities of service.
"""

from __future__ import annotations

import re

from dlojz.base.language import say
from dlojz.running.folder import visible

FOR_EVER = frozenset({"PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "DependencyNeverSatisfied"})
"""Reasons for which a job never starts unless somebody changes it."""
_LIMIT = re.compile(r"(Assoc|QOS)(Grp|Max)([A-Za-z]*)")


def explain_reason(reason: str) -> str:
    """One sentence for a raw reason of `squeue`, with what can be done about it; empty where there is none."""
    name = reason.strip().strip("()")
    if name in ("", "None"):
        return ""
    words = _WORDS.get(name.partition(",")[0].replace(" ", "_").lower())
    if words is None:
        words = _by_kind(name)
    if words is None:
        shown = visible(name)[:200]
        return say(
            en=f"it waits; the scheduler says why: {shown}.",
            fr=f"il attend ; raison donnée par l’ordonnanceur : {shown}.",
        )
    return say(en=words[0], fr=words[1])


def _by_kind(name: str) -> tuple[str, str] | None:
    """Reasons that come in families: limits of an account or a QoS, and texts that end with names of nodes."""
    found = _LIMIT.match(name)
    if found:
        return _limit(*found.groups())
    for beginning, words in _BEGINNINGS.items():
        if name.lower().startswith(beginning):
            return words
    return None


def _limit(owner: str, kind: str, what: str) -> tuple[str, str]:
    """A limit, by who has it (account or QoS), whether all its users share it, and what it counts."""
    whose = ("your account", "de votre compte") if owner == "Assoc" else ("the QoS", "de la QoS")
    shared = kind == "Grp"
    counted = next((words for key, words in _COUNTED if key in what.lower()), ("resources", "de ressources"))
    if not shared and any(sign in what for sign in ("WallDuration", "PerJob", "PerNode", "MinutesPerJob")):
        return (
            f"{whose[0]} does not give one job so many {counted[0]}: it waits for ever; cancel it and ask for less.",
            f"la limite {whose[1]} n’accorde pas autant {counted[1]} à un seul travail : il attendra sans fin ; "
            "annulez-le et demandez moins.",
        )
    if "Minutes" in what and shared:
        return (
            f"the hours of {whose[0]} are used up: it starts when hours are added.",
            f"les heures {whose[1]} sont épuisées : il démarrera quand des heures seront ajoutées.",
        )
    who = (" together with all who share it", ", tous utilisateurs confondus") if shared else ("", "")
    return (
        f"{whose[0]} has reached its limit of {counted[0]}{who[0]}: it starts when other jobs end.",
        f"la limite {counted[1]} {whose[1]} est atteinte{who[1]} : il démarrera quand d’autres travaux finiront.",
    )


_COUNTED: tuple[tuple[str, tuple[str, str]], ...] = (
    ("gres", ("GPUs", "de GPU")),
    ("job", ("jobs at once", "de travaux simultanés")),
    ("node", ("nodes", "de nœuds")),
    ("cpu", ("cores", "de cœurs")),
    ("mem", ("memory", "de mémoire")),
    ("wall", ("hours", "d’heures")),
    ("billing", ("billed units", "d’unités facturées")),
)

_WORDS: dict[str, tuple[str, str]] = {
    "resources": (
        "it is next in line: it starts as soon as enough nodes are free.",
        "il est en tête de file : il démarre dès qu’assez de nœuds sont libres.",
    ),
    "priority": (
        "other jobs go first; a shorter time limit or fewer nodes may let it start sooner.",
        "d’autres travaux passent avant ; une limite de temps plus courte ou moins de nœuds peuvent l’avancer.",
    ),
    "partitiontimelimit": (
        "it asks for more time than the partition gives: it waits for ever; cancel it and ask for less.",
        "il demande plus de temps que la partition n’en donne : il attendra sans fin ; annulez-le et demandez moins.",
    ),
    "partitionnodelimit": (
        "it asks for more nodes than the partition gives: it waits for ever; cancel it and ask for fewer.",
        "il demande plus de nœuds que la partition n’en donne : il attendra sans fin ; annulez-le et demandez moins.",
    ),
    "partitionconfig": (
        "it asks for more nodes or time than the partition has or gives, or for what it does not offer: it waits for "
        "ever; cancel it and ask for less.",
        "il demande plus de nœuds ou de temps que la partition n’en a, ou ce qu’elle n’offre pas : il attendra sans "
        "fin ; annulez-le et demandez moins.",
    ),
    "badconstraints": (
        "no node has what it asks for: it waits for ever; cancel it and check the constraint of the machine file.",
        "aucun nœud n’a ce qu’il demande : il attendra sans fin ; annulez-le et vérifiez la contrainte du fichier de "
        "machine.",
    ),
    "partitiondown": (
        "the partition is closed: it starts when the site opens it again.",
        "la partition est fermée : il démarrera quand le centre la rouvrira.",
    ),
    "partitioninactive": (
        "the partition is closed: it starts when the site opens it again.",
        "la partition est fermée : il démarrera quand le centre la rouvrira.",
    ),
    "nodedown": (
        "a node that it needs is down: it starts when the node is back.",
        "un nœud dont il a besoin est en panne : il démarrera à son retour.",
    ),
    "reqnodenotavail": (
        "the nodes that it needs are down, reserved, or about to be maintained: a shorter time limit may let it start "
        "before.",
        "les nœuds dont il a besoin sont en panne, réservés ou bientôt en maintenance : une limite de temps plus "
        "courte peut le faire passer avant.",
    ),
    "reservation": (
        "it waits for its reservation to begin.",
        "il attend le début de sa réservation.",
    ),
    "invalidaccount": (
        "its account is not valid here: it waits for ever; cancel it and check account= and its ending.",
        "son compte n’est pas valable ici : il attendra sans fin ; annulez-le et vérifiez account= et sa terminaison.",
    ),
    "invalidqos": (
        "its QoS is not valid for this account: it waits for ever; cancel it and leave qos= out.",
        "sa QoS n’est pas valable pour ce compte : il attendra sans fin ; annulez-le et retirez qos=.",
    ),
    "begintime": (
        "it was put back into the queue, or is to start later: it starts by itself, within minutes as a rule.",
        "il a été remis dans la file, ou doit démarrer plus tard : il repart de lui-même, en quelques minutes.",
    ),
    "dependency": (
        "it waits for another job to end.",
        "il attend la fin d’un autre travail.",
    ),
    "dependencyneversatisfied": (
        "the job that it depends on has failed: it waits for ever; cancel it.",
        "le travail dont il dépend a échoué : il attendra sans fin ; annulez-le.",
    ),
    "jobarraytasklimit": (
        "the sweep already runs as many jobs as it may at once: it starts when one of them ends.",
        "le balayage a déjà autant de travaux en cours que permis : il démarre quand l’un d’eux finit.",
    ),
    "jobhelduser": (
        "it is held by you: release it with `scontrol release JOB`.",
        "vous l’avez retenu : libérez-le avec `scontrol release TRAVAIL`.",
    ),
    "jobheldadmin": (
        "it is held by the site: ask its support.",
        "le centre l’a retenu : demandez à son assistance.",
    ),
    "joblaunchfailure": (
        "a node could not start it: the log folder was missing, or the node is ill; send it again.",
        "un nœud n’a pas pu le démarrer : dossier des journaux absent, ou nœud défaillant ; renvoyez-le.",
    ),
    "nonzeroexitcode": (
        "a process of it ended with an error: its logs say why.",
        "un de ses processus s’est terminé par une erreur : ses journaux disent pourquoi.",
    ),
    "timelimit": (
        "it reached its time limit.",
        "il a atteint sa limite de temps.",
    ),
    "raisedsignal": (
        "a signal ended it.",
        "un signal l’a arrêté.",
    ),
    "outofmemory": (
        "it took more memory than it was given.",
        "il a pris plus de mémoire qu’accordé.",
    ),
    "licenses": (
        "it waits for a software licence.",
        "il attend une licence logicielle.",
    ),
    "cleaning": (
        "it is being put back into the queue.",
        "il est en train de retourner dans la file.",
    ),
    "nodes_required_for_job_are_down": (
        "the nodes that it needs are down or reserved.",
        "les nœuds dont il a besoin sont en panne ou réservés.",
    ),
}

_BEGINNINGS: dict[str, tuple[str, str]] = {
    "launch failed requeued held": (
        "a node could not start it, and it is held: release it with `scontrol release JOB`, or send the run again.",
        "un nœud n’a pas pu le démarrer, et il est retenu : libérez-le avec `scontrol release TRAVAIL`, ou renvoyez "
        "l’exécution.",
    ),
    "job_requeued_in_held_state": (
        "it was put back into the queue and is held: release it with `scontrol release JOB`, or send the run again.",
        "il a été remis dans la file et il est retenu : libérez-le avec `scontrol release TRAVAIL`, ou renvoyez "
        "l’exécution.",
    ),
    "job requeued in held state": (
        "it was put back into the queue and is held: release it with `scontrol release JOB`, or send the run again.",
        "il a été remis dans la file et il est retenu : libérez-le avec `scontrol release TRAVAIL`, ou renvoyez "
        "l’exécution.",
    ),
    "reqnodenotavail": _WORDS["reqnodenotavail"],
    "nodes required for job are down": _WORDS["nodes_required_for_job_are_down"],
    "node failure": _WORDS["nodedown"],
}
