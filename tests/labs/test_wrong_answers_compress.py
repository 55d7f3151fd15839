"""The bank of wrong answers of lab 11.

The answers are written the way a student would write them, not as the faults that the judges compare with.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlojz.labs import lab11_compression as lab
from dlojz.labs.kit.judges import normal
from dlojz.labs.lab11_compression.exercises_prune import global_masks, next_ticket, reorder, sr_ste, two_of_four
from dlojz.labs.lab11_compression.exercises_quantize import (
    fake_quantize,
    integer_linear,
    quantize_affine,
    quantize_rows,
)
from dlojz.labs.lab11_compression.exercises_serve import cached_attention
from dlojz.labs.lab11_compression.exercises_train import mixed_loss, soft_loss, train_aware, train_pruned
from tests.labs import student_answers_compress as student
from tests.labs import student_answers_tuning as tuning
from tests.labs.bank import Answer, BankTests, detached

EXERCISES = {exercise.id: exercise for exercise in lab.EXERCISES}


def softening(way: str = "right") -> Answer:
    def answer(student: Any, teacher: Any, temperature: float) -> Any:
        t = temperature
        teacher = teacher if way == "not detached" else teacher.detach()
        student = student.detach() if way == "student detached" else student
        soft_student = student if way == "student hard" else student / t
        soft_teacher = teacher if way == "teacher hard" else teacher / t
        if way == "times":
            soft_student, soft_teacher = student * t, teacher * t
        p, log_q = F.softmax(soft_teacher, dim=1), F.log_softmax(soft_student, dim=1)
        if way == "reversed":
            loss = F.kl_div(p.log(), log_q.exp(), reduction="batchmean")
        elif way == "cross":
            loss = F.cross_entropy(soft_student, p)
        else:
            reduction = {"mean": "mean", "sum": "sum"}.get(way, "batchmean")
            loss = F.kl_div(log_q, p, reduction=reduction)
        return loss * {"without": 1.0, "once": t}.get(way, t * t)

    return answer


def mixing(way: str = "right") -> Answer:
    def answer(student: Any, teacher: Any, labels: Any, temperature: float, alpha: float) -> Any:
        known = labels >= 0
        seen = (student[known], teacher[known]) if way == "known only" else (student, teacher)
        soft = softening()(*seen, temperature)
        if way == "index":
            hard = -student.log_softmax(1)[torch.arange(len(labels)), labels].mean()
        elif way == "cut off":
            hard = F.cross_entropy(student, labels.clamp(min=0))
        elif way == "none is NaN":
            hard = F.cross_entropy(student, labels, ignore_index=-1)
        else:
            logits = student / temperature if way == "softened" else student
            hard = F.cross_entropy(logits[known], labels[known], reduction="sum")
            hard = hard / (len(labels) if way == "all" else max(int(known.sum()), 1))
        weights = {"swapped": (1 - alpha, alpha), "soft alone": (1, 1 - alpha), "hard alone": (alpha, 1)}
        soft_weight, hard_weight = weights.get(way, (alpha, 1 - alpha))
        return soft_weight * soft + hard_weight * hard

    return answer


def rounding(way: str = "right") -> Answer:
    def answer(weight: Any, bits: int) -> Any:
        high = {"2^": 2 ** (bits - 1), "whole": 2**bits - 1, "127": 127}.get(way, 2 ** (bits - 1) - 1)
        largest = weight.abs().max(dim=1, keepdim=True).values
        if way == "tensor":
            largest = weight.abs().max().reshape(1, 1).repeat(len(weight), 1)
        elif way == "signed":
            largest = weight.max(dim=1, keepdim=True).values
        elif way == "columns":
            largest = weight.abs().max(dim=0, keepdim=True).values
        scale = largest / high
        steps = weight / scale
        if way == "floor":
            steps = torch.floor(steps)
        elif way != "truncates":
            steps = torch.round(steps)
        if way == "2^":
            steps = steps.clamp(-high, high - 1)
        q = steps if way == "floats" else steps.to(torch.int8)
        if way == "one":
            return q
        return q, 1 / scale if way == "inverse" else scale.squeeze(1) if way == "flat" else scale

    return answer


def shifting(way: str = "right") -> Answer:
    def answer(x: Any, low: float, high: float, bits: int) -> Any:
        lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        if way == "observed":
            low, high = min(x.min().item(), 0), max(x.max().item(), 0)
        if way == "symmetric":
            scale = max(abs(low), abs(high)) / highest
            return torch.round(x / scale).clamp(lowest, highest).to(torch.int8), scale, 0
        scale = (high - low) / (2**bits if way == "2^" else 2**bits - 1)
        if way == "unsigned":
            shift = -round(low / scale)
            return (torch.round(x / scale) + shift).clamp(0, 2**bits - 1).to(torch.int8), scale, shift
        zero: Any = lowest - low / scale
        zero = zero if way == "not whole" else round(zero)
        zero = lowest + round(low / scale) if way == "sign" else zero
        steps = x / scale - zero if way == "minus" else x / scale + zero
        steps = steps if way == "truncates" else torch.round(steps)
        steps = steps if way == "wraps" else steps.clamp(lowest, highest)
        q = steps.to(torch.int64).to(torch.int8)
        return (q, scale, x) if way == "tensor" else (q, scale) if way == "two" else (q, scale, zero)

    return answer


def multiplying(way: str = "right") -> Answer:
    def answer(x_q: Any, x_scale: float, x_zero: int, w_q: Any, w_scale: Any) -> Any:
        if way == "floats":
            return F.linear((x_q.float() - x_zero) * x_scale, w_q.float() * w_scale)
        x, w = x_q.to(torch.int32), w_q.to(torch.int32)
        if way == "first":
            return torch.matmul(x - x_zero, w.T) * x_scale * w_scale.T
        product = x_q @ w_q.T if way == "narrow" else torch.matmul(x, w.T)
        product = product.to(torch.int32)
        corrections = {
            "none": 0, "once": x_zero, "added": -x_zero * w.sum(dim=1), "inputs": x_zero * x.sum(dim=1, keepdim=True),
        }  # fmt: skip
        sums = product - corrections.get(way, x_zero * w.sum(dim=1))
        if way == "x alone":
            return sums * x_scale
        return sums * w_scale.T if way == "w alone" else sums * x_scale * w_scale.T

    return answer


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def faking(way: str = "right") -> Answer:
    def answer(weight: Any, scale: Any, bits: int) -> Any:
        high = 2 ** (bits - 1) - 1
        if way == "detached":
            weight = weight.detach()
        q = torch.round(weight / scale).clamp(-high, high)
        if way in ("flat", "detached"):
            return q * scale
        if way == "all":
            return weight + (q * scale - weight).detach()
        if way == "unclamped":
            return Round.apply(weight / scale) * scale  # type: ignore[no-untyped-call]
        if way == "no rounding":
            return (weight / scale).clamp(-high, high) * scale
        straight = Round.apply(weight / scale).clamp(-high, high)  # type: ignore[no-untyped-call]
        if way == "divided":
            return straight + (q * scale - q).detach()
        return straight if way == "whole" else straight * scale

    return answer


def masking(way: str = "right") -> Answer:
    def answer(weights: Any, sparsity: float) -> Any:
        sizes = torch.cat([weight.reshape(-1) for weight in weights])
        sizes = sizes if way == "signed" else sizes.abs()
        total = len(sizes)
        if way == "max":
            return [weight.abs() >= sparsity * sizes.max() for weight in weights]
        share = 1 - sparsity if way == "swapped" else sparsity
        ordered = sizes.sort(descending=way == "largest").values
        threshold = ordered[round(share * total) - 1]
        if way == "right":
            mask = torch.ones(total)
            mask[sizes.argsort()[: round(share * total)]] = 0
            parts = mask.split([weight.numel() for weight in weights])
            return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        masks = []
        for weight in weights:
            size = weight if way == "signed" else weight.abs()
            if way == "each":
                threshold = size.flatten().sort().values[round(sparsity * weight.numel()) - 1]
            mask = size < threshold if way == "largest" else size > threshold
            masks.append(~mask if way == "removed" else weight * mask if way == "weights" else mask)
        return masks[0] if way == "one" else masks

    return answer


def pairing(way: str = "right") -> Answer:
    def answer(weight: Any) -> Any:
        size = weight if way == "signed" else weight.abs()
        mask = torch.zeros_like(weight)
        rows, columns = weight.shape
        if way == "half a row":
            for row in range(rows):
                mask[row, size[row].argsort(descending=True)[: columns // 2]] = 1
            return mask
        if way == "half":
            mask.view(-1)[size.flatten().argsort(descending=True)[: rows * columns // 2]] = 1
            return mask
        if way in ("threshold", "strict"):
            groups = size.reshape(rows, -1, 4)
            ordered = groups.sort(dim=2, descending=True).values
            kept = groups >= ordered[..., 1:2] if way == "threshold" else groups > ordered[..., 2:3]
            return kept.reshape(rows, columns)
        if way == "outputs":
            for column in range(columns):
                for row in range(0, rows, 4):
                    mask[row + size[row : row + 4, column].argsort(descending=True)[:2], column] = 1
            return mask
        for row in range(rows):
            for group in range(columns // 4):
                places = torch.arange(4) * (columns // 4) + group if way == "apart" else torch.arange(4) + 4 * group
                order = size[row, places].argsort(descending=way != "smallest")
                mask[row, places[order[:2]]] = 1
        return mask * weight if way == "weights" else mask

    return answer


def refining(way: str = "right") -> Answer:
    def answer(weight: Any, mask: Any, gradient: Any, decay: float) -> Any:
        pruned = torch.where(mask > 0, 0.0, weight)
        if way == "masked":
            return gradient * mask
        if way == "masked, decayed":
            return gradient * mask + decay * pruned
        pulls = {"kept": weight * mask, "everything": weight, "minus": -pruned, "alone": 0 * weight}
        return gradient + decay * pulls.get(way, pruned)

    return answer


def moving(way: str = "right") -> Answer:
    def answer(expand: Any, bias: Any, project: Any, order: Any) -> Any:
        back = torch.argsort(order)
        if way == "nothing":
            return expand, bias, project
        if way == "inverse":
            return expand[back], bias[back], project[:, back]
        if way == "second":
            return expand, bias, project[:, order]
        first = torch.stack([expand[i] for i in order])
        second = project.clone()
        if way == "inverse after":
            second = project[:, back]
        elif way != "first":
            second = torch.stack([project[:, i] for i in order], dim=1)
        if way == "two":
            return first, second
        return first, bias if way == "bias" else bias[order], second

    return answer


def drawing(way: str = "right") -> Answer:
    def answer(start: Any, trained: Any, mask: Any, rate: float) -> Any:
        remaining = mask > 0
        judged = start if way == "start" else trained
        if way == "zeros":
            sizes = (trained * mask).abs()
            threshold = sizes.flatten().sort().values[round(rate * mask.numel()) - 1]
            found = mask * (sizes > threshold)
        elif way == "forgets":
            threshold = judged.abs().flatten().sort().values[round(rate * mask.numel()) - 1]
            found = (judged.abs() > threshold).float()
        else:
            count = round(rate * (mask.numel() if way == "all" else int(remaining.sum())))
            left = judged[remaining].abs().sort(descending=way == "largest").values
            limit = left[min(count, len(left)) - 1]
            kept = judged.abs() < limit if way == "largest" else judged.abs() > limit
            found = mask * kept
        weights = {"trained": trained * found, "unmasked": start}.get(way, start * found)
        return found if way == "one" else (found, weights)

    return answer


REFERENCES: dict[str, Answer] = {
    "soft-loss": soft_loss,
    "mixed-loss": mixed_loss,
    "rows": quantize_rows,
    "affine": quantize_affine,
    "integer-linear": integer_linear,
    "straight-through": fake_quantize,
    "global-masks": global_masks,
    "ticket": next_ticket,
    "two-of-four": two_of_four,
    "sr-ste": sr_ste,
    "permutation": reorder,
    "aware-training": train_aware,
    "pruned-training": train_pruned,
    "kv-cache": cached_attention,
    "lora": tuning.lora(),
}

BANK: dict[str, list[tuple[Answer, str]]] = {
    "soft-loss": [
        (softening("without"), "The factor T² is missing"),
        (softening("once"), "The factor is T², not T"),
        (softening("mean"), "You average over classes too"),
        (softening("sum"), "You add the samples up"),
        (softening("reversed"), "the other way round"),
        (softening("teacher hard"), "The teacher is not softened"),
        (softening("student hard"), "The student is not softened"),
        (softening("times"), "You multiply the logits by T"),
        (softening("cross"), "That is the cross-entropy"),
        (softening("not detached"), "the teacher gets a gradient"),
        (softening("student detached"), "the student gets no gradient"),
        (lambda student, teacher, temperature: None, "returns nothing"),
    ],
    "mixed-loss": [
        (detached(mixing()), "no gradient reaches the student's logits"),
        (mixing("swapped"), "you have swapped them"),
        (mixing("softened"), "at temperature T"),
        (mixing("all"), "divided by the number of all samples"),
        (mixing("known only"), "with a label only"),
        (mixing("soft alone"), "The soft loss is not weighed"),
        (mixing("hard alone"), "The cross-entropy is not weighed"),
        (mixing("index"), "are taken for samples of a class"),
        (mixing("cut off"), "are taken for samples of a class"),
        (mixing("none is NaN"), "the mean over no sample is NaN"),
    ],
    "rows": [
        (rounding("tensor"), "one scale for the whole matrix"),
        (rounding("signed"), "not the largest magnitude"),
        (rounding("2^"), "You divide by 2^(bits − 1): the largest"),
        (rounding("whole"), "You divide by 2^bits − 1"),
        (rounding("127"), "whatever bits is"),
        (rounding("truncates"), "You truncate towards zero"),
        (rounding("floor"), "You round down"),
        (rounding("inverse"), "scale is upside down"),
        (rounding("columns"), "scale has the shape"),
        (rounding("flat"), "scale has the shape"),
        (rounding("floats"), "kept in float32"),
        (rounding("one"), "2 results are expected"),
    ],
    "affine": [
        (shifting("wraps"), "is not clamped"),
        (shifting("unsigned"), "begin at 0"),
        (shifting("sign"), "The sign of the zero-point is wrong"),
        (shifting("minus"), "You subtract the zero-point"),
        (shifting("2^"), "there are 2^bits − 1 steps"),
        (shifting("symmetric"), "That is the symmetric scheme"),
        (shifting("observed"), "You take the range from x itself"),
        (shifting("not whole"), "The zero-point is not whole"),
        (shifting("truncates"), "The whole numbers are truncated"),
        (shifting("tensor"), "must be one number each"),
        (shifting("two"), "3 results are expected"),
    ],
    "integer-linear": [
        (multiplying("none"), "The zero-point is left out"),
        (multiplying("narrow"), "The sums run over"),
        (multiplying("once"), "You take the zero-point away once"),
        (multiplying("added"), "is to be taken away, not added"),
        (multiplying("inputs"), "The correction adds up the inputs"),
        (multiplying("x alone"), "The scales of the weights are left out"),
        (multiplying("w alone"), "The scale of x is left out"),
        (multiplying("floats"), "the product is one of floats"),
        (multiplying("first"), "needs 9 bits"),
    ],
    "straight-through": [
        (faking("flat"), "no gradient passes: round() is flat"),
        (faking("detached"), "is not linked to the weights"),
        (faking("all"), "weights that are clamped get a gradient too"),
        (faking("unclamped"), "Nothing is clamped"),
        (faking("whole"), "You return the whole numbers"),
        (faking("divided"), "the gradient is divided by the scale"),
        (faking("no rounding"), "Nothing is rounded"),
    ],
    "global-masks": [
        (masking("each"), "Each layer loses the same share"),
        (masking("signed"), "the most negative weights"),
        (masking("swapped"), "you keep as much"),
        (masking("removed"), "Your mask is 1 where a weight goes"),
        (masking("largest"), "The largest weights go"),
        (masking("max"), "a share of the largest magnitude"),
        (masking("threshold"), "a threshold takes all that have its magnitude"),
        (masking("weights"), "holds other values than 0 and 1"),
        (masking("one"), "3 results are expected"),
    ],
    "ticket": [
        (drawing("trained"), "that is fine-tuning"),
        (drawing("unmasked"), "those removed are there again"),
        (drawing("all"), "The rate is taken of all weights"),
        (drawing("zeros"), "the same ones are removed again"),
        (drawing("forgets"), "what was removed comes back"),
        (drawing("start"), "You compare the weights before training"),
        (drawing("largest"), "The largest weights go"),
        (drawing("one"), "2 results are expected"),
    ],
    "two-of-four": [
        (pairing("outputs"), "Your groups run along the outputs"),
        (pairing("half a row"), "You keep half of each row"),
        (pairing("half"), "You keep half of all weights"),
        (pairing("apart"), "are not consecutive"),
        (pairing("signed"), "with their signs"),
        (pairing("smallest"), "The two smallest are kept"),
        (pairing("threshold"), "exactly two"),
        (pairing("strict"), "exactly two"),
        (pairing("weights"), "holds other values than 0 and 1"),
    ],
    "sr-ste": [
        (refining("masked"), "never moves again"),
        (refining("masked, decayed"), "pruned weights only shrink"),
        (refining("kept"), "pulls on the weights that are kept"),
        (refining("everything"), "ordinary weight decay"),
        (refining("minus"), "The sign is wrong"),
        (refining("alone"), "pruned weights wander"),
    ],
    "permutation": [
        (moving("bias"), "The bias stays where it was"),
        (moving("first"), "The second layer still reads"),
        (moving("second"), "Only the second layer is moved"),
        (moving("inverse after"), "moved by the inverse order"),
        (moving("inverse"), "the order is the inverse one"),
        (moving("nothing"), "Nothing is moved"),
        (moving("two"), "3 results are expected"),
    ],
}


BANK.update(tuning.WRONG)
WRONG = {name: [*answers, *student.WRONG.get(name, [])] for name, answers in BANK.items()}


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right = WRONG, REFERENCES
    others = (
        ("two-of-four", pairing()),
        *student.RIGHT,
        *tuning.RIGHT,
    )


@pytest.mark.parametrize("exercise_id", list(EXERCISES))
def test_judge_tells_a_wrong_answer_in_french_too(exercise_id: str) -> None:
    from dlojz.base.language import use_language
    from dlojz.labs.kit.exercise import judge

    english = {judge(EXERCISES[exercise_id], answer).message for answer, _ in BANK[exercise_id][:3]}
    use_language("fr")
    french = {judge(EXERCISES[exercise_id], answer).message for answer, _ in BANK[exercise_id][:3]}
    assert len(french) == len(english) and not french & english


@pytest.mark.parametrize(
    ("exercise_id", "answer", "in_english", "in_french"),
    [
        ("two-of-four", lambda weight: weight[:1], "The mask has the shape", "Le masque est de forme"),
        ("two-of-four", lambda weight: weight, "The mask holds other values", "Le masque contient d’autres valeurs"),
        (
            "ticket",
            lambda start, trained, mask, rate: (mask, start[:1]),
            "The tensor of weights has the shape",
            "Le tenseur des poids est de forme",
        ),
        (
            "straight-through",
            lambda weight, scale, bits: weight[:1],
            "The result has the shape",
            "Le résultat est de forme",
        ),
    ],
)
def test_what_cannot_be_read_is_named_in_the_readers_language(
    exercise_id: str, answer: Answer, in_english: str, in_french: str
) -> None:
    from dlojz.base.language import use_language
    from dlojz.labs.kit.exercise import judge

    assert judge(EXERCISES[exercise_id], answer).message.startswith(in_english)
    use_language("fr")
    assert judge(EXERCISES[exercise_id], answer).message.startswith(in_french)


def test_the_soft_loss_is_torchs() -> None:
    student_BK, teacher_BK = normal(1, 6, 5), normal(2, 6, 5)
    expected = 9 * F.kl_div((student_BK / 3).log_softmax(1), (teacher_BK / 3).softmax(1), reduction="batchmean")
    torch.testing.assert_close(soft_loss(student_BK, teacher_BK, 3.0), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_rows_and_quantize_affine_are_torchs(bits: int) -> None:
    high = 2 ** (bits - 1) - 1
    weight_OI = normal(3, 6, 7)
    q_OI, scale_O1 = quantize_rows(weight_OI, bits)
    expected = torch.fake_quantize_per_channel_affine(
        weight_OI, scale_O1.flatten(), torch.zeros(6, dtype=torch.int32), 0, -high, high
    )
    torch.testing.assert_close(scale_O1 * q_OI, expected)
    x = 3 * normal(4, 5, 6)
    q, scale, zero = quantize_affine(x, -1.5, 4.0, bits)
    expected = torch.fake_quantize_per_tensor_affine(x, scale, zero, -high - 1, high)
    torch.testing.assert_close(scale * (q.float() - zero), expected)
    torch.testing.assert_close(
        integer_linear(q.repeat(1, 2)[:, :7], scale, zero, q_OI, scale_O1),
        F.linear(scale * (q.float() - zero).repeat(1, 2)[:, :7], scale_O1 * q_OI.float()),
    )


def test_fake_quantize_has_the_gradient_of_torchs_estimator() -> None:
    weight_OI, scale_O1 = 3 * normal(5, 6, 7), torch.full((6, 1), 0.3)
    ours, theirs = (weight_OI.clone().requires_grad_() for _ in range(2))
    zeros = torch.zeros(6, dtype=torch.int32)
    values = fake_quantize(ours, scale_O1, 4)
    oracle = torch.fake_quantize_per_channel_affine(theirs, scale_O1.flatten(), zeros, 0, -7, 7)
    (our_gradient,), (their_gradient,) = (
        torch.autograd.grad(value.square().sum(), leaf) for value, leaf in ((values, ours), (oracle, theirs))
    )
    assert int((our_gradient == 0).sum()) > 0
    torch.testing.assert_close(our_gradient, their_gradient)


def test_the_masks_are_those_of_torch_prune() -> None:
    from torch.nn.utils import prune

    layers = [torch.nn.Linear(7, 5), torch.nn.Linear(5, 9)]
    masks = global_masks([layer.weight for layer in layers], 0.6)
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=0.6)
    for layer, mask in zip(layers, masks, strict=True):
        assert torch.equal(dict(layer.named_buffers())["weight_mask"], mask)


def test_two_of_four_is_the_best_of_all_choices() -> None:
    import itertools

    weight_OI = normal(6, 3, 8)
    groups = weight_OI.abs().reshape(-1, 4)
    best = torch.stack([groups[:, pair].sum(1) for pair in itertools.combinations(range(4), 2)]).max(0).values
    torch.testing.assert_close((two_of_four(weight_OI) * weight_OI.abs()).reshape(-1, 4).sum(1), best)


def test_reorder_gives_layers_that_compute_the_same() -> None:
    expand, bias, project = normal(7, 8, 5), normal(8, 8), normal(9, 3, 8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    x = normal(10, 4, 5)

    def output(first: Any, shift: Any, second: Any) -> Any:
        return F.gelu(x @ first.T + shift) @ second.T

    torch.testing.assert_close(output(*reorder(expand, bias, project, order)), output(expand, bias, project))
