"""What sbatch refuses, explained: its own words, then ours.

Layer 5. Invariant: the scheduler's words are always told, whatever is made of them; they differ between versions, so
that an explanation is looked for by the few words which do not.
"""

from __future__ import annotations

import re

from dlojz.text import say

NO_CONTROLLER = re.compile(r"[Uu]nable to contact slurm controller|[Cc]onnection refused")
UNCERTAIN = re.compile(r"[Ss]ocket timed out|[Zz]ero [Bb]ytes were transmitted|did not answer")
"""Words after which nobody knows whether the job was taken."""


def explain_refusal(words: str) -> str:
    """One sentence that says what a refusal of sbatch means and what to do; empty where it is not known."""
    for pattern, (english, french) in _EXPLAINED:
        if re.search(pattern, words, re.IGNORECASE):
            return say(en=english, fr=french)
    return ""


_EXPLAINED: tuple[tuple[str, tuple[str, str]], ...] = (
    (
        "unable to contact slurm controller|connection refused",
        (
            "the scheduler is down or cannot be reached: nothing was sent; try again in some minutes.",
            "l’ordonnanceur est arrêté ou injoignable : rien n’a été envoyé ; réessayez dans quelques minutes.",
        ),
    ),
    (
        "invalid account|account.*(?:not|invalid)|invalid account or account/partition",
        (
            "the account is unknown to this cluster, or has no hours for this partition: check account= "
            "and its ending.",
            "le compte est inconnu de ce calculateur, ou n’a pas d’heures sur cette partition : vérifiez account= "
            "et sa terminaison.",
        ),
    ),
    (
        "invalid qos",
        (
            "the account may not use this QoS: leave qos= out, or use one that `dlojz machines NAME` lists.",
            "le compte n’a pas droit à cette QoS : retirez qos=, ou prenez-en une que `dlojz machines NOM` liste.",
        ),
    ),
    (
        "invalid partition",
        (
            "the machine file names a partition that this cluster does not have: `sinfo -s` lists those it has.",
            "le fichier de machine nomme une partition que ce calculateur n’a pas : `sinfo -s` liste les siennes.",
        ),
    ),
    (
        "invalid feature|feature specification",
        (
            "no node of this cluster has the constraint of the machine file: `sinfo -o '%f'` lists what they have.",
            "aucun nœud de ce calculateur n’a la contrainte du fichier de machine : `sinfo -o '%f'` liste les leurs.",
        ),
    ),
    (
        "gres|generic resource",
        (
            "the nodes do not have the GPUs that the machine file asks for: `sinfo -o '%G'` lists what they have.",
            "les nœuds n’ont pas les GPU demandés par le fichier de machine : `sinfo -o '%G'` liste les leurs.",
        ),
    ),
    (
        "memory specification",
        (
            "a node has less memory than the machine file says: lower memory_gib_per_node.",
            "un nœud a moins de mémoire que ne le dit le fichier de machine : baissez memory_gib_per_node.",
        ),
    ),
    (
        "reservation",
        (
            "the reservation is unknown, over, or not for this account: leave reservation= out.",
            "la réservation est inconnue, terminée, ou pas pour ce compte : retirez reservation=.",
        ),
    ),
    (
        "more processors requested|node configuration is not available|node count specification",
        (
            "no node has as many cores or GPUs as are asked for: check cpus_per_gpu and gpus_per_node of the machine "
            "file.",
            "aucun nœud n’a autant de cœurs ou de GPU que demandé : vérifiez cpus_per_gpu et gpus_per_node dans le "
            "fichier de machine.",
        ),
    ),
    (
        "time limit|timelimit",
        (
            "the time limit is beyond what the partition or the QoS gives: ask for less.",
            "la limite de temps dépasse celle de la partition ou de la QoS : demandez moins.",
        ),
    ),
    (
        "job violates accounting/qos policy|submit limit|MaxSubmit",
        (
            "a limit of your account is reached, most often the number of jobs sent: wait for some to end.",
            "une limite de votre compte est atteinte, le plus souvent le nombre de travaux envoyés : attendez que "
            "certains finissent.",
        ),
    ),
    (
        "no such file or directory: 'sbatch'|sbatch: no such file|not found",
        (
            "this computer has no sbatch and sends no jobs: use on='local', or log in to the cluster.",
            "cet ordinateur n’a pas sbatch et n’envoie pas de travaux : prenez on='local', ou connectez-vous au "
            "calculateur.",
        ),
    ),
    (
        "no space left|disk quota",
        (
            "the disk or your quota is full: make room, then send it again.",
            "le disque ou votre quota est plein : faites de la place, puis renvoyez.",
        ),
    ),
)
