"""Exercises of lab 11 on distillation: the loss of the teacher's soft answers, and its mix with true labels.

The student gets a gradient, the teacher none; labels may be known for some samples, for all, or for none.

Shape suffixes: B samples, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.kit.exercise import Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, gradient_of, normal, refuse_nothing
from dlojz.labs.kit.rank_judges import same

if TYPE_CHECKING:
    from torch import Tensor


Way = Callable[..., Any]


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """Compute T² times the mean over samples of KL(teacher ‖ student), both softened by T, teacher detached.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), section 2.
    """
    p_BK = (teacher_BK.detach() / temperature).softmax(-1)
    log_q_BK = (student_BK / temperature).log_softmax(-1)
    return temperature**2 * (p_BK * (p_BK.log() - log_q_BK)).sum(-1).mean()


def _soft_cases() -> Iterator[tuple[Any, ...]]:
    for seed, samples, classes, temperature in ((1, 6, 5, 2.0), (2, 9, 3, 4.0), (3, 4, 7, 0.5)):
        yield 2 * normal(seed, samples, classes), 2 * normal(seed + 10, samples, classes), temperature


def _kl(p_BK: Tensor, q_BK: Tensor) -> Tensor:
    return (p_BK * (p_BK.log() - q_BK.log())).sum(-1)


def _no_logarithm(student_BK: Tensor, p_BK: Tensor) -> Tensor:
    """F.kl_div of probabilities that are taken for logarithms."""
    return (p_BK * (p_BK.log() - student_BK.softmax(-1))).sum(-1).mean()


def _scaled(power: float) -> Way:
    return lambda student, teacher, t: t**power * soft_loss(student, teacher, t) / t**2


def _at(student_t: float, teacher_t: float) -> Way:
    """Each softened by a power of the temperature."""
    return lambda student, teacher, t: (
        t**2 * _kl((teacher / t**teacher_t).softmax(-1), (student / t**student_t).softmax(-1)).mean()
    )


def _check_gradients(answer: Way) -> None:
    for student_BK, teacher_BK, temperature in _soft_cases():
        student_BK.requires_grad_()
        teacher_BK.requires_grad_()
        found = gradient_of(answer(student_BK, teacher_BK, temperature), student_BK)
        wanted = gradient_of(soft_loss(student_BK, teacher_BK, temperature), student_BK)
        if found is None or wanted is None or not same(found, wanted):
            raise Wrong(
                en="The value is right, but the student gets no gradient, or a wrong one: leave its logits linked to "
                "the loss (no detach, no no_grad, no item).",
                fr="La valeur est juste, mais l’étudiant ne reçoit pas de gradient, ou un gradient faux : laissez ses "
                "logits liés à la perte (ni detach, ni no_grad, ni item).",
            )
        if gradient_of(answer(student_BK, teacher_BK, temperature), teacher_BK) is not None:
            raise Wrong(
                en="The value is right, but the teacher gets a gradient, too: it would be changed to please its "
                "student, and its backward pass costs time. teacher.detach().",
                fr="La valeur est juste, mais le professeur reçoit aussi un gradient : on le changerait pour plaire à "
                "son étudiant, et sa passe arrière coûte du temps. teacher.detach().",
            )


SOFT_LOSS = Exercise(
    id="soft-loss",
    title=Said("the teacher's soft answers", "les réponses nuancées du professeur"),
    judge=Judge(
        soft_loss,
        cases=_soft_cases,
        mistakes=(
            Mistake(
                _scaled(0),
                "The factor T² is missing: softened logits give gradients of about 1/T², so without it a change of "
                "temperature would also change how much this loss weighs beside another.",
                "Il manque le facteur T² : des logits adoucis donnent des gradients d’environ 1/T² ; sans lui, changer "
                "la température changerait aussi le poids de cette perte face à une autre.",
            ),
            Mistake(
                _scaled(1),
                "The factor is T², not T: T divides once in the softmax of the student and once more in the difference "
                "of the two probabilities.",
                "Le facteur est T², et non T : T divise une fois dans le softmax de l’étudiant, et une fois encore "
                "dans l’écart des deux probabilités.",
            ),
            Mistake(
                lambda student, teacher, t: soft_loss(student, teacher, t) / student.shape[1],
                "You average over classes too, as F.kl_div does by default: sum over the classes, then take the mean "
                'over the samples (reduction="batchmean").',
                "Vous moyennez aussi sur les classes, comme F.kl_div le fait par défaut : sommez sur les classes, puis "
                'moyennez sur les échantillons (reduction="batchmean").',
            ),
            Mistake(
                lambda student, teacher, t: soft_loss(student, teacher, t) * len(student),
                "You add the samples up: take their mean, so that the size of the batch does not change the learning "
                "rate.",
                "Vous additionnez les échantillons : prenez leur moyenne, pour que la taille du batch ne change pas le "
                "taux d’apprentissage.",
            ),
            Mistake(
                lambda student, teacher, t: t**2 * _kl((student / t).softmax(-1), (teacher / t).softmax(-1)).mean(),
                "The divergence is the other way round, KL(student ‖ teacher): it is the teacher's probabilities that "
                "weigh the differences. Mind the order of F.kl_div(student's logarithms, teacher's probabilities).",
                "La divergence est prise à l’envers, KL(étudiant ‖ professeur) : ce sont les probabilités du "
                "professeur qui pondèrent les écarts. Attention à l’ordre de F.kl_div(logarithmes de l’étudiant, "
                "probabilités du professeur).",
            ),
            Mistake(
                _at(1, 0),
                "The teacher is not softened: divide its logits by T, too.",
                "Le professeur n’est pas adouci : divisez aussi ses logits par T.",
            ),
            Mistake(
                _at(0, 1),
                "The student is not softened: divide its logits by T, too.",
                "L’étudiant n’est pas adouci : divisez aussi ses logits par T.",
            ),
            Mistake(
                _at(-1, -1),
                "You multiply the logits by T, which makes the probabilities harder: divide.",
                "Vous multipliez les logits par T, ce qui durcit les probabilités : divisez.",
            ),
            Mistake(
                lambda student, teacher, t: (
                    -(t**2) * ((teacher / t).softmax(-1) * (student / t).log_softmax(-1)).sum(-1).mean()
                ),
                "That is the cross-entropy with the teacher's probabilities: its gradient is right, but it is not 0 "
                "when the student answers like the teacher. Add the teacher's Σ p log p, or use F.kl_div.",
                "C’est l’entropie croisée avec les probabilités du professeur : son gradient est juste, mais elle ne "
                "vaut pas 0 quand l’étudiant répond comme le professeur. Ajoutez Σ p log p du professeur, ou prenez "
                "F.kl_div.",
            ),
            Mistake(
                _scaled(-2),
                "You divide by T²: the factor T² makes up for gradients that softening has made smaller, so multiply.",
                "Vous divisez par T² : ce facteur compense des gradients que l’adoucissement a réduits ; multipliez "
                "donc.",
            ),
            Mistake(
                lambda student, teacher, t: 2 * t * soft_loss(student, teacher, t) / t**2,
                "You multiply by 2T; the factor is T², temperature**2.",
                "Vous multipliez par 2T ; le facteur est T², soit temperature**2.",
            ),
            Mistake(
                lambda student, teacher, t: t**2 * _kl((teacher / t).softmax(0), (student / t).softmax(0)).mean(),
                "Your softmax runs over the samples (dim 0): the probabilities of one sample must add up to 1, so "
                "dim=-1.",
                "Votre softmax court sur les échantillons (dim 0) : les probabilités d’un échantillon doivent avoir "
                "pour somme "
                "1, donc dim=-1.",
            ),
            Mistake(
                lambda student, teacher, t: (
                    t**2 * ((teacher / t).softmax(-1) - (student / t).softmax(-1)).square().sum(-1).mean()
                ),
                "That is the square difference of the probabilities; the divergence is Σ p (log p − log q).",
                "C’est l’écart quadratique des probabilités ; la divergence est Σ p (log p − log q).",
            ),
            Mistake(
                lambda student, teacher, t: -soft_loss(student, teacher, t),
                "The sign is the other way round: a divergence is never negative, Σ p (log p − log q).",
                "Le signe est inversé : une divergence n’est jamais négative, Σ p (log p − log q).",
            ),
            Mistake(
                lambda student, teacher, t: t**2 * _no_logarithm(student / t, (teacher / t).softmax(-1)),
                "F.kl_div takes the student's logarithms: log_softmax for the student, softmax for the teacher.",
                "F.kl_div attend des logarithmes pour l’étudiant : log_softmax pour l’étudiant, softmax pour le "
                "professeur.",
            ),
            Mistake(
                lambda student, teacher, t: t**2 * _kl((teacher / t).softmax(-1), (student / t).softmax(-1)),
                "One loss per sample is left: take their mean.",
                "Il reste une perte par échantillon : prenez leur moyenne.",
            ),
        ),
        then=_check_gradients,
    ),
    praise_en="Right: the loss is zero when the student answers like the teacher, and its gradients keep their size at "
    "any temperature.",
    praise_fr="Exact : la perte est nulle quand l’étudiant répond comme le professeur, et ses gradients gardent leur "
    "ampleur à toute température.",
    hint_en="Two softmaxes of logits divided by T: probabilities p for the teacher, whose gradient you cut; logarithms "
    "log q for the student. Then Σ p (log p − log q).",
    hint_fr="Deux softmax de logits divisés par T : des probabilités p pour le professeur, dont vous coupez le "
    "gradient ; des logarithmes log q pour l’étudiant. Puis Σ p (log p − log q).",
    nearer_en='T**2 * F.kl_div(log_q, p, reduction="batchmean"), where log_q = (student / T).log_softmax(-1) and '
    "p = (teacher.detach() / T).softmax(-1).",
    nearer_fr='T**2 * F.kl_div(log_q, p, reduction="batchmean"), où log_q = (student / T).log_softmax(-1) et '
    "p = (teacher.detach() / T).softmax(-1).",
)


UNKNOWN = -1
"""The label of a sample that has none."""


def mixed_loss(student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float, alpha: float) -> Tensor:
    """Mix the soft loss of all samples (alpha) with the cross-entropy of the labelled ones (1 − alpha).

    Args:
        labels_B: classes, `UNKNOWN` where there is none; where nobody has one, the second term is 0.
        temperature: of the soft loss alone.
        alpha: from 0 to 1.
    """
    import torch.nn.functional as F

    known_B = labels_B != UNKNOWN
    soft = alpha * soft_loss(student_BK, teacher_BK, temperature)
    if not known_B.any():
        return soft
    return soft + (1 - alpha) * F.cross_entropy(student_BK[known_B], labels_B[known_B])


def _mixed_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    for seed, unknown, temperature, alpha in ((4, 3, 3.0, 0.7), (5, 5, 2.0, 0.2), (6, 1, 4.0, 0.4)):
        generator = torch.Generator().manual_seed(seed)
        labels_B = torch.randint(5, (8,), generator=generator)
        labels_B[torch.randperm(8, generator=generator)[:unknown]] = UNKNOWN
        yield 2 * normal(seed, 8, 5), 2 * normal(seed + 10, 8, 5), labels_B, temperature, alpha


def _hard(student: Tensor, labels: Tensor, divided: bool = False, t: float = 1.0) -> Tensor:
    import torch.nn.functional as F

    known = labels != UNKNOWN
    total = F.cross_entropy(student[known] / t, labels[known], reduction="sum")
    return total / (len(labels) if divided else known.sum())


def _of_target(student: Tensor, labels: Tensor) -> Tensor:
    """The mean logit of the true class."""
    known = labels != UNKNOWN
    return student[known].gather(1, labels[known].unsqueeze(1)).mean()


def _soft_of_known(student: Tensor, teacher: Tensor, labels: Tensor, t: float, alpha: float) -> Tensor:
    known = labels != UNKNOWN
    return alpha * soft_loss(student[known], teacher[known], t) + (1 - alpha) * _hard(student, labels)


def _as_a_class(which: int) -> Way:
    """What becomes of -1 if it is an index, or cut off at 0."""

    def way(student: Tensor, teacher: Tensor, labels: Tensor, t: float, alpha: float) -> Tensor:
        return mixed_loss(student, teacher, labels.where(labels != UNKNOWN, which % student.shape[1]), t, alpha)

    return way


_INDEXED = Said(
    "Samples without label (-1) are taken for samples of a class: leave them out of the cross-entropy.",
    "Les échantillons sans étiquette (-1) sont pris pour ceux d’une classe : écartez-les de l’entropie croisée.",
)


def _check_labels(answer: Way) -> None:
    import torch

    student_BK, teacher_BK = normal(7, 6, 5), normal(8, 6, 5)
    for labels_B in (torch.full((6,), UNKNOWN), torch.arange(6) % 5):
        found, wanted = (way(student_BK, teacher_BK, labels_B, 2.0, 0.5) for way in (answer, mixed_loss))
        if found is None:
            refuse_nothing(None)
        found = torch.as_tensor(found)
        if same(found, wanted):
            continue
        if not bool((labels_B == UNKNOWN).all()):
            raise Wrong(
                en="With some labels unknown you are right, but not where all are known.",
                fr="Avec quelques étiquettes inconnues, c’est juste, mais pas quand toutes sont connues.",
            )
        if bool(found.isnan().any()):
            raise Wrong(
                en="With some labels unknown you are right; without any label, the mean over no sample is NaN: the "
                "second term is 0 then.",
                fr="Avec quelques étiquettes inconnues, c’est juste ; mais sans aucune étiquette, la moyenne de rien "
                "est NaN : le second terme vaut alors 0.",
            )
        if same(found, soft_loss(student_BK, teacher_BK, 2.0)):
            raise Wrong(
                en="With some labels unknown you are right; without any label, the soft loss still weighs alpha: only "
                "the second term is 0.",
                fr="Avec quelques étiquettes inconnues, c’est juste ; mais sans aucune étiquette, la perte de "
                "distillation garde son poids alpha : seul le second terme vaut 0.",
            )
        raise Wrong(
            en="With some labels unknown you are right, but not without any label: the second term is 0 then, and the "
            "first remains as it is.",
            fr="Avec quelques étiquettes inconnues, c’est juste, mais pas sans aucune étiquette : le second terme vaut "
            "alors 0, et le premier reste tel quel.",
        )


MIXED_LOSS = Exercise(
    id="mixed-loss",
    title=Said("with and without true labels", "avec et sans vraies étiquettes"),
    judge=Judge(
        mixed_loss,
        cases=_mixed_cases,
        leaves={0: Said("the student's logits", "les logits de l’étudiant")},
        mistakes=(
            Mistake(
                lambda s, t, y, temperature, alpha: (
                    alpha * soft_loss(s[y == UNKNOWN], t[y == UNKNOWN], temperature) + (1 - alpha) * _hard(s, y)
                ),
                "The teacher is asked about samples without a label only: its soft loss counts for all samples.",
                "Le professeur n’est interrogé que sur les échantillons sans étiquette : sa perte compte pour tous.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: mixed_loss(s, t, y, temperature, 1 - alpha),
                "Alpha weighs the soft loss, 1 − alpha the true labels: you have swapped them.",
                "Alpha pondère la perte de distillation, 1 − alpha les vraies étiquettes : vous les avez échangés.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: (
                    alpha * soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y, t=temperature)
                ),
                "The true labels are compared at temperature T: they are not softened, so neither is the student.",
                "Les vraies étiquettes sont comparées à la température T : elles ne sont pas adoucies, l’étudiant n’a "
                "donc pas à l’être.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: (
                    alpha * soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y, divided=True)
                ),
                "The cross-entropy is divided by the number of all samples: divide by that of those with a label.",
                "L’entropie croisée est divisée par le nombre de tous les échantillons : divisez par celui des "
                "échantillons étiquetés.",
            ),
            Mistake(
                _soft_of_known,
                "The teacher is asked about samples with a label only: it is for the others that it is most useful.",
                "Le professeur n’est interrogé que sur les échantillons étiquetés : c’est pour les autres qu’il est le "
                "plus utile.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y),
                "The soft loss is not weighed: multiply it by alpha.",
                "La perte de distillation n’est pas pondérée : multipliez-la par alpha.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: alpha * soft_loss(s, t, temperature) + _hard(s, y),
                "The cross-entropy is not weighed: multiply it by 1 − alpha.",
                "L’entropie croisée n’est pas pondérée : multipliez-la par 1 − alpha.",
            ),
            Mistake(_as_a_class(-1), *_INDEXED),
            Mistake(_as_a_class(0), *_INDEXED),
            Mistake(
                lambda s, t, y, temperature, alpha: soft_loss(s, t, temperature) + _hard(s, y),
                "Neither loss is weighed: alpha times the soft loss, 1 − alpha times the cross-entropy.",
                "Aucune des deux pertes n’est pondérée : alpha fois la perte de distillation, 1 − alpha fois "
                "l’entropie croisée.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: (soft_loss(s, t, temperature) + _hard(s, y)) / 2,
                "You take the plain mean of the two losses: their weights are alpha and 1 − alpha.",
                "Vous prenez la simple moyenne des deux pertes : leurs poids sont alpha et 1 − alpha.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: alpha * soft_loss(s, t, temperature),
                "The true labels do not count: add (1 − alpha) × the cross-entropy of the samples that have one.",
                "Les vraies étiquettes ne comptent pas : ajoutez (1 − alpha) × l’entropie croisée des échantillons "
                "étiquetés.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: (1 - alpha) * _hard(s, y),
                "The teacher does not count: add alpha × the soft loss of all samples.",
                "Le professeur ne compte pas : ajoutez alpha × la perte de distillation de tous les échantillons.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: mixed_loss(s, t, y.where(y != 0, UNKNOWN), temperature, alpha),
                "Samples of class 0 are left out: a label is unknown if it is -1, and 0 is a class.",
                "Les échantillons de la classe 0 sont écartés : une étiquette est inconnue si elle vaut -1, et 0 est "
                "une classe.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: (
                    alpha * soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y, divided=True) * len(y)
                ),
                "The cross-entropy is a sum over the samples: take its mean over those that have a label.",
                "L’entropie croisée est une somme sur les échantillons : prenez sa moyenne sur ceux qui sont "
                "étiquetés.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: mixed_loss(s, t, y, 1.0, alpha),
                "The soft loss takes no temperature here: hand it the one that your function receives.",
                "La perte de distillation est prise ici sans température : donnez-lui celle que reçoit votre fonction.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: (
                    alpha * soft_loss(s, t, temperature) / temperature**2 + (1 - alpha) * _hard(s, y)
                ),
                "The soft loss lacks its factor T²: it is that of exercise 1.",
                "Il manque à la perte de distillation son facteur T² : c’est celle de l’exercice 1.",
            ),
            Mistake(
                lambda s, t, y, temperature, alpha: (
                    alpha * soft_loss(s, t, temperature) - (1 - alpha) * _of_target(s, y)
                ),
                "F.nll_loss takes log-probabilities: call log_softmax first, or F.cross_entropy, which does both.",
                "F.nll_loss attend des log-probabilités : appelez d’abord log_softmax, ou F.cross_entropy, qui fait "
                "les deux.",
            ),
        ),
        then=_check_labels,
    ),
    praise_en="Right: one loss for images with a label and for images without.",
    praise_fr="Exact : une seule perte pour les images étiquetées et pour les autres.",
    hint_en="known = labels != -1 tells which samples have a label; student[known] and labels[known] are theirs. What "
    "if there is none?",
    hint_fr="known = labels != -1 dit quels échantillons ont une étiquette ; student[known] et labels[known] sont les "
    "leurs. Et s’il n’y en a aucun ?",
    nearer_en="alpha * soft_loss(…) for all samples; then, if known.any(), add (1 - alpha) * "
    "F.cross_entropy(student[known], labels[known]).",
    nearer_fr="alpha * soft_loss(…) pour tous les échantillons ; puis, si known.any(), ajoutez (1 - alpha) * "
    "F.cross_entropy(student[known], labels[known]).",
)
