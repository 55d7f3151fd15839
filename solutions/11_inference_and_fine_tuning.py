# %% [markdown] lang="fr"
# # TP 11 — Compression pour l’inférence
#
# Un modèle entraîné sert ensuite pendant des mois : c’est l’**inférence**, où sa taille et son temps de réponse
# coûtent. Ce TP réduit un modèle qui marche, le **professeur**, par **distillation** (un étudiant plus petit apprend
# de lui), **quantification** (moins de bits) et **élagage** (*pruning* : des poids deviennent nuls). Puis il sert un
# modèle de langue, avec un **cache KV**, et l’adapte par **LoRA**.
#
# À la fin, vous saurez :
#
# - écrire une perte de distillation, et les boucles d’entraînement à travers un arrondi et sous un masque ;
# - prédire ce que chaque méthode fait gagner en octets et en secondes, et le débit d’un modèle de langue ;
# - prédire la mémoire et le temps d’un **fine-tuning** par LoRA.
#
# Comptez deux heures. La partie 6, facultative, demande une demi-heure de plus. Un processus suffit, sans GPU. Les
# temps mesurés dépendent de la machine : un écart de 30 % n’y est pas une erreur.

# %% [markdown] lang="en"
# # Lab 11 — Compression for inference
#
# Once trained, a model serves for months: this is **inference**, where its size and the time of an answer cost. This
# lab takes a model that works, the **teacher**, and makes it smaller by **distillation** (a smaller student learns
# from it), **quantization** (fewer bits) and **pruning** (weights become zero). Then it serves a language model, with
# a **KV cache**, and adapts it by **LoRA**.
#
# By the end you can:
#
# - write a distillation loss, and the training loops through a rounding and under a mask;
# - predict what each method gains in bytes and in seconds, and the tokens per second of a language model;
# - predict memory and time of a LoRA **fine-tuning**.
#
# Allow two hours. Part 6 is optional, and takes half an hour more. One process is enough, without a GPU. Measured times
# depend on the machine, so a gap of 30% is not an error.

# %% name="setup"
import copy
import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from dlojz import labs
from dlojz.base.language import decimal, percent, yes_no
from dlojz.compress.task import accuracy, digits, new_model, parameters
from dlojz.labs.lab11_compression import figures

lab = labs.start("11")
torch.set_num_threads(1)  # a training depends on it, to the last bit // l’entraînement en dépend, au bit près

# %% [markdown] lang="fr"
# Le professeur est un petit *Vision Transformer* de 4 blocs. Il apprend sur 1 437 chiffres manuscrits ; 360 autres
# jugeront tous les modèles : une image vaut 0,3 % d’**exactitude** (*accuracy*). Voici la boucle de presque tous les
# entraînements du TP :

# %% [markdown] lang="en"
# The teacher is a small Vision Transformer of 4 blocks. It learns from 1,437 handwritten digits; 360 others judge all
# models: one image is 0.3% of **accuracy**. Here is the loop of nearly all trainings of the lab:

# %% name="teacher"
task = digits()
images, labels = task.inputs_NCHW, task.labels_N


def batches(steps, x=images, y=labels):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        index = torch.randint(len(x), (64,), generator=generator)
        yield x[index], y[index]


def train(model, loss, data, rate=1e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for x, y in data:
        value = loss(model, x, y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        decay.step()
    return model


def label_loss(model, x, y):
    return F.cross_entropy(model(x), y)


teacher = train(new_model("vit_tiny", task, seed=0), label_loss, batches(120))
print("accuracy > 95%: // exactitude > 95 % :", yes_no(accuracy(teacher, task) > 0.95))

# %% [markdown] lang="fr"
# ## 1. Distiller
#
# Un professeur en dit plus qu’une étiquette : « un 9 sans doute, un 1 peut-être, sûrement pas un 6 ». L’étudiant
# apprend ces nuances (Hinton et al., 2015). Pour les voir, on divise les logits par une **température** T avant le
# softmax :

# %% [markdown] lang="en"
# ## 1. Distil
#
# A teacher says more than a label: “a 9 most likely, a 1 perhaps, certainly no 6”. The student learns these shades
# (Hinton et al., 2015). To see them, logits are divided by a **temperature** T before the softmax:

# %% name="softened" tags=["nbval-ignore-output"]
figures.softened(teacher, task, (1, 2, 4))

# %% [markdown] lang="fr"
# ### Exercice 1 — les réponses nuancées du professeur
#
# La perte compare les deux distributions adoucies, p pour le professeur et q pour l’étudiant, par leur divergence de
# Kullback-Leibler :
#
# $$\frac{T^2}{B} \sum_{i=1}^{B} \sum_{c} p_{i,c} \, (\log p_{i,c} - \log q_{i,c})$$
#
# pour les B échantillons i et toutes les classes c. Le facteur T² remet à l’échelle des gradients environ T² fois plus
# petits. `student` et `teacher` sont des logits, de forme (échantillons, classes). Renvoyez la perte. L’étudiant en
# reçoit un gradient ; le professeur, aucun.

# %% [markdown] lang="en"
# ### Exercise 1 — the teacher's soft answers
#
# The loss compares the two softened distributions, p of the teacher and q of the student, by their Kullback-Leibler
# divergence:
#
# $$\frac{T^2}{B} \sum_{i=1}^{B} \sum_{c} p_{i,c} \, (\log p_{i,c} - \log q_{i,c})$$
#
# for the B samples i and all classes c. The factor T² brings gradients that are about T² times smaller back to scale.
# `student` and `teacher` are logits, of shape (samples, classes). Return the loss. The student gets a gradient from it;
# the teacher gets none.


# %% name="soft-loss"
def soft_loss(student, teacher, temperature):
    ### BEGIN SOLUTION
    p = (teacher.detach() / temperature).softmax(-1)
    log_q = (student / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(log_q, p, reduction="batchmean")
    ### END SOLUTION


lab.check("soft-loss", soft_loss)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante, une fois ou deux.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line, once or twice.

# %%
# lab.hint("soft-loss")

# %% [markdown] lang="fr"
# ### Exercice 2 — avec et sans vraies étiquettes
#
# Le professeur répond aussi à des images sans étiquette. Dans `labels`, `-1` veut dire « inconnue ». Renvoyez
#
# $$\alpha \times \text{perte de distillation} + (1 - \alpha) \times \text{entropie croisée}$$
#
# la première, celle de l’exercice 1, sur **tous** les échantillons ; la seconde, sans température, sur ceux qui ont une
# étiquette. Si aucun n’en a, le second terme est nul.

# %% [markdown] lang="en"
# ### Exercise 2 — with and without true labels
#
# The teacher also answers for images without a label. In `labels`, `-1` means “unknown”. Return
#
# $$\alpha \times \text{soft loss} + (1 - \alpha) \times \text{cross-entropy}$$
#
# the first, that of exercise 1, over **all** samples; the second, without temperature, over those that have a label.
# Where none has one, the second term is zero.


# %% name="mixed-loss"
def mixed_loss(student, teacher, labels, temperature, alpha):
    ### BEGIN SOLUTION
    known = labels != -1
    loss = alpha * soft_loss(student, teacher, temperature)
    if known.any():
        loss = loss + (1 - alpha) * F.cross_entropy(student[known], labels[known])
    return loss
    ### END SOLUTION


lab.check("mixed-loss", mixed_loss)

# %%
# lab.hint("mixed-loss")

# %% [markdown] lang="fr"
# Notre étudiant, `vit_mini`, a 2 blocs au lieu de 4. Entraînons-le de cinq façons, avec autant de mises à jour. **Avant
# de regarder** : de combien le professeur améliore-t-il l’étudiant qui a toutes les étiquettes, et celui qui n’en a que
# 60 ?

# %% [markdown] lang="en"
# Our student, `vit_mini`, has 2 blocks instead of 4. Let us train it in five ways, with as many updates. **Before you
# look**: by how much does the teacher improve the student that has all labels, and the one that has 60 only?

# %% name="students" tags=["nbval-ignore-output"]
def taught(alpha):
    def loss(model, x, y):
        with torch.no_grad():
            answers = teacher(x)
        return mixed_loss(model(x), answers, y, 4.0, alpha)

    return loss


few = labels.where(torch.arange(len(labels)) < 60, -1)
arms = {
    "all labels": (label_loss, batches(90)),
    "all labels + teacher": (taught(0.9), batches(90)),
    "60 labels": (label_loss, batches(90, images[:60], labels[:60])),
    "60 labels + teacher": (taught(0.9), batches(90, y=few)),
    "teacher alone": (taught(1.0), batches(90, y=torch.full_like(labels, -1))),
}
students = {name: train(new_model("vit_mini", task, seed=0), *arm) for name, arm in arms.items()}
kept = {name: accuracy(student, task) / accuracy(teacher, task) for name, student in students.items()}
for name, share in zip(
    (
        "all labels // toutes les étiquettes",
        "all labels + teacher // toutes + professeur",
        "60 labels // 60 étiquettes",
        "60 labels + teacher // 60 étiquettes + professeur",
        "teacher alone // professeur seul",
    ),
    kept.values(),
    strict=True,
):
    print(f"{name:<28}{percent(share)}")

# %% name="students-seen"
brought = yes_no(kept["60 labels + teacher"] > kept["60 labels"] + 0.05)
print("60 labels: the teacher brings > 5 points: // 60 étiquettes : le professeur apporte > 5 points :", brought)
brought = yes_no(kept["all labels + teacher"] > kept["all labels"] + 0.05)
print("all labels: the teacher brings > 5 points: // toutes : le professeur apporte > 5 points :", brought)

# %% [markdown] lang="fr"
# Avec toutes les étiquettes, la distillation n’ajoute presque rien ; quand elles manquent, elle change tout. DistilBERT
# (Sanh et al., 2019) garde 97 % des performances de BERT avec 60 % de ses poids. Une graine ne prouve rien ; en voici
# cinq : `python benchmarks/distillation.py --seeds 5 --out distillation`.
#
# **Votre prédiction.** Si une réponse du professeur prend 1, combien de temps prend celle de l’étudiant ?

# %% [markdown] lang="en"
# With all labels distillation adds next to nothing; where they are missing, it changes everything. DistilBERT (Sanh et
# al., 2019) keeps 97% of BERT's performance with 60% of its weights. One seed proves nothing; here are five:
# `python benchmarks/distillation.py --seeds 5 --out distillation`.
#
# **Your prediction.** If an answer of the teacher takes 1, how long does an answer of the student take?

# %% name="predict-student" stub="value"
lab.predict(
    "student-time",
    ### BEGIN SOLUTION
    2 / 4,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Tous les temps du TP se mesurent ainsi, à tour de rôle : un ralentissement de la machine les touche tous.

# %% [markdown] lang="en"
# All times of the lab are measured like this, in turns: a machine that slows down slows all of them.


# %% name="reveal-student" tags=["nbval-ignore-output"]
@torch.inference_mode()
def seconds(*works, rounds=15):
    taken = [[] for _ in works]
    for _ in range(rounds):
        for work, times_s in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - start)
    return [statistics.median(times_s) for times_s in taken]


four_blocks_s, two_blocks_s = seconds(lambda: teacher(images[:64]), lambda: students["all labels"](images[:64]))
lab.reveal("student-time", two_blocks_s / four_blocks_s)

# %% [markdown] lang="fr"
# ## 2. Quantifier
#
# Un poids en fp32 occupe 4 octets, en INT8 un seul. Le plus simple est la quantification **symétrique** : un poids vaut
# *échelle × entier*.
#
# ### Exercice 3 — des poids entiers
#
# `weight` est de forme (sorties, entrées). Chaque **ligne** a sa propre échelle : la plus grande valeur absolue de la
# ligne devient le plus grand entier, $2^{b-1}-1$ pour b bits, soit 127 pour 8. Renvoyez les entiers, en `torch.int8`
# (que `bits` vaille 8 ou moins), et les échelles, de forme (sorties, 1).

# %% [markdown] lang="en"
# ## 2. Quantize
#
# A weight takes 4 bytes in fp32 and one in INT8. The simplest way is **symmetric** quantization: a weight is worth
# *scale × whole number*.
#
# ### Exercise 3 — weights in whole numbers
#
# `weight` has the shape (outputs, inputs). Each **row** has its own scale: the largest magnitude of the row becomes the
# largest whole number, $2^{b-1}-1$ for b bits, that is 127 for 8. Return the whole numbers, in `torch.int8` (whether
# `bits` is 8 or less), and the scales, of shape (outputs, 1).


# %% name="rows"
def quantize_rows(weight, bits):
    ### BEGIN SOLUTION
    scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight / scale).round().to(torch.int8), scale
    ### END SOLUTION


lab.check("rows", quantize_rows)

# %%
# lab.hint("rows")

# %% [markdown] lang="fr"
# **Vos prédictions.** La première matrice d’un MLP du professeur est de forme (512, 128).
#
# - Combien d’octets prend-elle en INT8, avec ses échelles en fp32 ?
# - Si toutes les erreurs entre −Δ/2 et Δ/2, un demi-pas, sont aussi probables, leur carré moyen est Δ²/12. Passer de 8
#   à 7 bits le multiplie à peu près par combien ?

# %% [markdown] lang="en"
# **Your predictions.** The first matrix of an MLP of the teacher has the shape (512, 128).
#
# - How many bytes does it take in INT8, with its scales in fp32?
# - If all errors between −Δ/2 and Δ/2, half a step, are as likely, their mean square is Δ²/12. So by how much, about,
#   is it multiplied from 8 to 7 bits?

# %% name="predict-int8" stub="value"
lab.predict(
    "int8-bytes",
    ### BEGIN SOLUTION
    512 * 128 + 512 * 4,
    ### END SOLUTION
)

# %% name="predict-noise" stub="value"
lab.predict(
    "noise-gained",
    ### BEGIN SOLUTION
    2**2,
    ### END SOLUTION
)

# %% name="reveal-int8" tags=["nbval-ignore-output"]
weight = teacher.get_parameter("blocks.2.mlp_expand.weight").detach()


def noise(bits):
    q, scale = quantize_rows(weight, bits)
    return float((scale * q - weight).square().mean())


q, scale = quantize_rows(weight, 8)
lab.reveal("int8-bytes", q.nbytes + scale.nbytes)
lab.reveal("noise-gained", noise(7) / noise(8))
figures.noise(quantize_rows, weight)

# %% [markdown] lang="fr"
# Quatre fois plus de bruit, soit 6 décibels par bit.
#
# **FP8**, un flottant de huit bits, a deux formats : E4M3 a 4 bits d’exposant et 3 de mantisse, E5M2 en a 5 et 2.
# L’erreur y est relative à chaque nombre, et non au plus grand.
#
# **Votre prédiction.** Entre deux puissances de 2, E4M3 a 2³ valeurs à égale distance. Quelle est la plus grande erreur
# relative d’un arrondi, de 0 à 1 ?

# %% [markdown] lang="en"
# Four times as much noise, or 6 decibels per bit.
#
# **FP8**, a floating-point number of eight bits, has two formats: E4M3 has 4 bits of exponent and 3 of mantissa, E5M2
# has 5 and 2. Its error is relative to each number, and not to the largest one.
#
# **Your prediction.** Between two powers of 2, E4M3 has 2³ values at equal distances. What is the largest relative
# error of a rounding, from 0 to 1?

# %% name="predict-fp8" stub="value"
lab.predict(
    "fp8-error",
    ### BEGIN SOLUTION
    2**-3 / 2,
    ### END SOLUTION
)

# %% name="fp8" tags=["nbval-ignore-output"]
errors = {}
for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
    limits = torch.finfo(kind)
    factor = limits.max / weight.abs().max()  # the largest weight becomes the largest number // jusqu’au plus grand
    back = (weight * factor).to(kind).float() / factor
    normal = (weight * factor).abs() > limits.smallest_normal
    errors[kind] = float(((back - weight) / weight)[normal].abs().max())
    ratio = weight.square().mean() / (back - weight).square().mean()
    print(f"{kind!s:<20} max {decimal(limits.max, 0):<8} {decimal(10 * ratio.log10())} dB")
print(f"{'int8':<29} {decimal(10 * torch.log10(weight.square().mean() / noise(8)))} dB")

# %% name="reveal-fp8" tags=["nbval-ignore-output"]
lab.reveal("fp8-error", errors[torch.float8_e4m3fn])

# %% [markdown] lang="fr"
# Exactement 1/17 : à mi-chemin de 1 et de 1 + 2⁻³, l’erreur de 2⁻⁴ se rapporte au nombre lui-même, 1 + 2⁻⁴.
#
# Pour des poids de même échelle, INT8 est plus précis ; FP8 s’accommode mieux des extrêmes des activations (E4M3) et
# des gradients (E5M2, plus étendu). Ce CPU ne multiplie pas en FP8, il convertit : aucun gain de temps ici. Sur un
# H200, un produit de matrices de largeur 8 192 a pris 1,9 fois moins de temps qu’en bf16, conversions non comprises
# (mesuré en 2026 : `benchmarks/records/gpu-nvidia-h200/forms-fp8.json`).
#
# ### Exercice 4 — un intervalle qui n’est pas centré
#
# Après une GELU, presque tout est positif. La quantification **affine** ajoute un **point zéro** :
#
# $$x \approx \text{échelle} \times (q - \text{point zéro})$$
#
# `low` ≤ 0 ≤ `high` sont les bouts de l’intervalle. `low` devient le plus petit entier signé de b bits, $-2^{b-1}$, et
# `high` le plus grand, $2^{b-1}-1$. Ce qui dépasse est **écrêté** (*clamp*). Le point zéro est entier, pour que 0 soit
# représenté exactement : $-2^{b-1}$ − arrondi(low / échelle). Renvoyez `q` (`torch.int8`), l’échelle et le point zéro.

# %% [markdown] lang="en"
# Exactly 1/17: halfway between 1 and 1 + 2⁻³ the error of 2⁻⁴ is relative to the number itself, 1 + 2⁻⁴.
#
# For weights of one scale, INT8 is more accurate; FP8 copes better with the extremes of activations (E4M3) and of
# gradients (E5M2, of wider range). This CPU does not multiply in FP8, it converts: no time is gained here. On an H200,
# a product of matrices of width 8,192 took 1.9 times less time than in bf16, conversions aside (measured in 2026:
# `benchmarks/records/gpu-nvidia-h200/forms-fp8.json`).
#
# ### Exercise 4 — a range that is not centred
#
# After a GELU nearly all values are positive. **Affine** quantization adds a **zero-point**:
#
# $$x \approx \text{scale} \times (q - \text{zero-point})$$
#
# `low` ≤ 0 ≤ `high` are the ends of the range. `low` becomes the smallest signed whole number of b bits, $-2^{b-1}$,
# and `high` the largest, $2^{b-1}-1$. What sticks out is **clamped**. The zero-point is whole, so that 0 is represented
# exactly: $-2^{b-1}$ − round(low / scale). Return `q` (`torch.int8`), the scale and the zero-point.


# %% name="affine"
def quantize_affine(x, low, high, bits):
    ### BEGIN SOLUTION
    scale = (high - low) / (2**bits - 1)
    smallest, largest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    zero_point = smallest - round(low / scale)
    q = (x / scale).round() + zero_point
    return q.clamp(smallest, largest).to(torch.int8), scale, zero_point
    ### END SOLUTION


lab.check("affine", quantize_affine)

# %%
# lab.hint("affine")

# %% [markdown] lang="fr"
# Le choix de l’intervalle est le **calibrage**. Du minimum au maximum, rien n’est écrêté, mais un seul extrême élargit
# tous les pas ; écarter 1 % des valeurs les resserre. **Avant de regarder** : lequel gagne à 8 bits, lequel à 4 ?

# %% [markdown] lang="en"
# The choice of the range is called **calibration**. From minimum to maximum nothing is clamped, but one single extreme
# widens all steps; leaving 1% of the values out makes them smaller. **Before you look**: which one wins with 8 bits,
# which with 4?

# %% name="calibrated"
seen = []
layer = teacher.get_submodule("blocks.1.mlp_project")
hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().flatten()))
teacher(images[:64])
hook.remove()

(x,) = seen
middle = [float(x.quantile(share)) for share in (0.005, 0.995)]
error = {}
for bits in (8, 4):
    for name, (low, high) in {"whole": (float(x.min()), float(x.max())), "99 %": middle}.items():
        x_q, x_scale, zero_point = quantize_affine(x, low, high, bits)
        error[bits, name] = float((x_scale * (x_q.float() - zero_point) - x).square().mean())
    better = error[bits, "whole"] < error[bits, "99 %"]
    print(f"{bits} bits: the whole range is better: // {bits} bits : l’étendue entière est meilleure :", yes_no(better))

# %% [markdown] lang="fr"
# À 4 bits, on gagne à sacrifier les extrêmes.
#
# ### Exercice 5 — une couche en entiers
#
# Poids et activations sont entiers : le produit peut l’être aussi.
#
# $$\sum_i s_x (q_{x,i} - z) \, s_w q_{w,i} = s_x s_w \left( \sum_i q_{x,i} \, q_{w,i} - z \sum_i q_{w,i} \right)$$
#
# `x_q` (lignes, entrées) et `w_q` (sorties, entrées) sont en int8, `w_scale` est de forme (sorties, 1). Renvoyez la
# sortie, en flottants, de forme (lignes, sorties). La somme demande 32 bits : `.int()` convertit en int32. Mais
# multipliez `x_q` tel quel : `x_q` − z demanderait 9 bits, et un processeur ne multiplie ici que des nombres de 8 bits.

# %% [markdown] lang="en"
# With 4 bits, giving up the extremes pays.
#
# ### Exercise 5 — a layer in whole numbers
#
# Weights and activations are whole numbers: so can the product be.
#
# $$\sum_i s_x (q_{x,i} - z) \, s_w q_{w,i} = s_x s_w \left( \sum_i q_{x,i} \, q_{w,i} - z \sum_i q_{w,i} \right)$$
#
# `x_q` (rows, inputs) and `w_q` (outputs, inputs) are in int8, `w_scale` has the shape (outputs, 1). Return the output,
# in floats, of shape (rows, outputs). The sum needs 32 bits: `.int()` turns a tensor into int32. But multiply `x_q` as
# it is: `x_q` − z would need 9 bits, and a processor multiplies numbers of 8 bits only here.


# %% name="integer-linear"
def integer_linear(x_q, x_scale, x_zero, w_q, w_scale):
    ### BEGIN SOLUTION
    sums = x_q.int() @ w_q.int().T - x_zero * w_q.int().sum(1)
    return x_scale * w_scale.T * sums
    ### END SOLUTION


lab.check("integer-linear", integer_linear)

# %%
# lab.hint("integer-linear")

# %% [markdown] lang="fr"
# Quantifions **toutes** les matrices du professeur, sans aucun entraînement (*post-training quantization*). **Avant de
# regarder** : à partir de combien de bits l’exactitude s’effondre-t-elle ?

# %% [markdown] lang="en"
# Let us quantize **all** matrices of the teacher, without any training (post-training quantization). **Before you
# look**: from how many bits on does the accuracy collapse?

# %% name="post-training" tags=["nbval-ignore-output"]
names = [f"{name}.weight" for name, module in teacher.named_modules() if isinstance(module, nn.Linear)]


def rounded(model, bits):
    model = copy.deepcopy(model)
    for name in names:
        q, scale = quantize_rows(model.get_parameter(name).data, bits)
        model.get_parameter(name).data = scale * q
    return model


accuracies = {bits: accuracy(rounded(teacher, bits), task) for bits in (8, 4, 3, 2)}
for bits, share in accuracies.items():
    print(f"{bits} bits: // {bits} bits :", percent(share))

# %% name="post-training-seen"
for bits in (8, 4, 2):
    near = accuracies[bits] > accuracy(teacher, task) - 0.02
    print(f"{bits} bits: less than 2 points lost: // {bits} bits : moins de 2 points perdus :", yes_no(near))

# %% [markdown] lang="fr"
# À 2 bits, le modèle perd pied. La dérivée d’un arrondi est nulle presque partout ; pour entraîner à travers lui,
# l’**estimateur straight-through** (Bengio et al., 2013) l’ignore au retour : c’est la *quantization-aware training*
# (QAT).
#
# ### Exercice 6 — un gradient à travers un arrondi
#
# Complétez `Round.backward`, puis `fake_quantize` : diviser par l’échelle, arrondir par `Round.apply`, borner entre
# $-(2^{b-1}-1)$ et $2^{b-1}-1$ pour b bits par `clamp` (un poids écrêté ne reçoit aucun gradient), multiplier par
# l’échelle.

# %% [markdown] lang="en"
# With 2 bits the model is lost. The derivative of a rounding is zero nearly everywhere; to train through it, the
# **straight-through estimator** (Bengio et al., 2013) ignores it on the way back: this is quantization-aware training
# (QAT).
#
# ### Exercise 6 — a gradient through a rounding
#
# Complete `Round.backward`, then `fake_quantize`: divide by the scale, round by `Round.apply`, clamp between
# $-(2^{b-1}-1)$ and $2^{b-1}-1$ for b bits by `clamp` (a weight that is clamped gets no gradient), multiply by the
# scale.


# %% name="straight-through"
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return gradient
        ### END SOLUTION


def fake_quantize(weight, scale, bits):
    ### BEGIN SOLUTION
    high = 2 ** (bits - 1) - 1
    return Round.apply(weight / scale).clamp(-high, high) * scale
    ### END SOLUTION


lab.check("straight-through", fake_quantize)

# %%
# lab.hint("straight-through")

# %% [markdown] lang="fr"
# ### Exercice 7 — la boucle de QAT
#
# À chaque batch (`images`, `labels`) : chaque matrice citée dans `names` est arrondie par votre `fake_quantize`, sur
# l’échelle de ses lignes (plus grande valeur absolue divisée par $2^{b-1}-1$, une constante pour le gradient) ; la
# perte est l’entropie croisée de ce que le modèle calcule **avec elles**, par
# `torch.func.functional_call(model, {nom: matrice}, (images,))` ; la mise à jour va aux poids flottants.

# %% [markdown] lang="en"
# ### Exercise 7 — the loop of QAT
#
# For each batch (`images`, `labels`): each matrix listed in `names` is rounded by your `fake_quantize`, on the scale of
# its rows (largest magnitude over $2^{b-1}-1$, a constant for the gradient); the loss is the cross-entropy of what the
# model computes **with them**, by `torch.func.functional_call(model, {name: matrix}, (images,))`; the update goes to
# the floating-point weights.


# %% name="aware-training"
def train_aware(model, names, batches, optimizer, bits):
    ### BEGIN SOLUTION
    for images, labels in batches:
        matrices = {}
        for name in names:
            weight = model.get_parameter(name)
            scale = weight.detach().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            matrices[name] = fake_quantize(weight, scale, bits)
        loss = F.cross_entropy(torch.func.functional_call(model, matrices, (images,)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ### END SOLUTION


lab.check("aware-training", train_aware)

# %%
# lab.hint("aware-training")

# %% name="aware-training-seen"
aware = copy.deepcopy(teacher)
train_aware(aware, names, batches(60), torch.optim.AdamW(aware.parameters(), lr=5e-4), bits=2)
enough = 0.9 * accuracy(teacher, task)
print("9/10 of the accuracy kept at 2 bits? // 9/10 de l’exactitude gardés à 2 bits ?")
print("no training: // sans entraînement :", yes_no(accuracies[2] > enough))
print("60 steps of QAT: // 60 pas de QAT :", yes_no(accuracy(rounded(aware, 2), task) > enough))

# %% [markdown] lang="fr"
# Seize fois moins de bits par poids, et presque tout est revenu.
#
# ## 3. Élaguer
#
# ### Exercice 8 — les plus petits poids partent
#
# `weights` est la liste des poids de toutes les couches, `sparsity` la part à enlever **sur l’ensemble** : un seul
# seuil pour toutes. Renvoyez la liste des masques, de mêmes formes, 1 pour un poids gardé, 0 pour un poids enlevé.
# Exactement `round(sparsity × nombre total)` poids partent, même à égalité.

# %% [markdown] lang="en"
# A sixteenth of the bits per weight, and nearly everything is back.
#
# ## 3. Prune
#
# ### Exercise 8 — the smallest weights go
#
# `weights` is the list of the weights of all layers, `sparsity` the share to be removed **of all of them together**:
# one threshold for all. Return the list of masks, of the same shapes, 1 for a weight that is kept and 0 for one that
# goes. Exactly `round(sparsity × total number)` weights go, also where some are equal.


# %% name="global-masks"
def global_masks(weights, sparsity):
    ### BEGIN SOLUTION
    sizes = torch.cat([weight.abs().flatten() for weight in weights])
    keep = torch.ones_like(sizes)
    keep[sizes.argsort()[: round(sparsity * len(sizes))]] = 0
    parts = keep.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
    ### END SOLUTION


lab.check("global-masks", global_masks)

# %%
# lab.hint("global-masks")

# %% [markdown] lang="fr"
# ### Exercice 9 — la boucle sous un masque
#
# `masks` donne un masque par nom de paramètre. Élaguez le modèle, puis entraînez ce qui reste, par l’entropie croisée,
# un batch par mise à jour : les poids enlevés sont nuls à **chaque** passe avant et à la fin. `optimizer` peut
# encore contenir le *momentum* d’un entraînement dense.

# %% [markdown] lang="en"
# ### Exercise 9 — the loop under a mask
#
# `masks` gives one mask per name of a parameter. Prune the model, then train what is left, by the cross-entropy, one
# batch per update: the weights that went are zero in **every** forward pass and at the end. `optimizer` may hold the
# momentum of a dense training.


# %% name="pruned-training"
def train_pruned(model, masks, batches, optimizer):
    ### BEGIN SOLUTION
    def prune():
        for name, mask in masks.items():
            model.get_parameter(name).data.mul_(mask)

    prune()
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        prune()
    ### END SOLUTION


lab.check("pruned-training", train_pruned)

# %%
# lab.hint("pruned-training")

# %% [markdown] lang="fr"
# Votre boucle à 80 % de zéros : un seuil commun ; couche par couche ; le seuil commun, mais le classifieur (la dernière
# matrice) laissé dense. **Avant de regarder** : quelle part du classifieur le seuil commun garde-t-il ?

# %% [markdown] lang="en"
# Your loop with 80% of zeros: one common threshold; layer by layer; the common threshold, but the classifier (the last
# matrix) left dense. **Before you look**: which share of the classifier does the common threshold keep?

# %% name="pruned" tags=["nbval-ignore-output"]
def pruned(masks, steps):
    model = copy.deepcopy(teacher)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    train_pruned(model, dict(zip(names, masks, strict=True)), batches(steps), optimizer)
    return model


weights = [teacher.get_parameter(name).detach() for name in names]
common, each = global_masks(weights, 0.8), [global_masks([weight], 0.8)[0] for weight in weights]
spared = [*global_masks(weights[:-1], 0.8), torch.ones_like(weights[-1])]
only_pruned = pruned(global_masks(weights, 0.3), 0)
print("30%, no training: // 30 %, sans entraînement :", percent(accuracy(only_pruned, task)))
sparse = {
    "common // commun": pruned(common, 60),
    "layer by layer // couche par couche": pruned(each, 60),
    "classifier dense // classifieur dense": pruned(spared, 60),
}
for name, model in sparse.items():
    print(f"80%, {name}: // 80 %, {name} :", percent(accuracy(model, task)))
print("kept of the classifier: // gardé du classifieur :", percent(common[-1].mean()))

# %% [markdown] lang="fr"
# Presque rien : ses poids sont petits par leur initialisation, non parce qu’ils sont inutiles. La magnitude ne dit
# l’importance qu’entre poids de même échelle.
#
# ### Grand et creux, ou petit et dense ?
#
# Selon Zhu et Gupta (2017), un grand modèle élagué bat un petit modèle dense de même taille. Comparons à **octets
# égaux** : un poids gardé occupe 4 octets, et chaque place un bit, qui dit si elle est gardée.
#
# **Votre prédiction.** Un modèle dense deux fois moins large a environ un quart des paramètres. Avec quelle part de
# zéros (*sparsity*) le professeur **creux** est-il aussi petit ?

# %% [markdown] lang="en"
# Next to nothing: its weights are small because of how they began, not because they are useless. Magnitude tells
# importance among weights of one scale only.
#
# ### Large and sparse, or small and dense?
#
# According to Zhu and Gupta (2017), a large pruned model beats a small dense one of the same size. Let us compare at
# **equal bytes**: a weight that is kept takes 4 bytes, and each place one bit, which says whether it is kept.
#
# **Your prediction.** A dense model of half the width has about a quarter of the parameters. With which share of zeros
# (**sparsity**) is the **sparse** teacher as small?

# %% name="predict-equal" stub="value"
lab.predict(
    "equal-bytes",
    ### BEGIN SOLUTION
    1 - 1 / 4 + 1 / 32,
    ### END SOLUTION
)

# %% name="reveal-equal"
from dlojz.models.sizes import ViTSize
from dlojz.models.vit import ViT


def narrow(width):
    torch.manual_seed(0)
    size = ViTSize(patch=8, width=width, depth=4, num_heads=4, mlp_width=4 * width)
    return ViT(size, image_size=16, num_classes=10)


def zeros_for(dense_bytes):  # share of zeros with which the teacher takes so many bytes // part de zéros
    matrices = sum(weight.numel() for weight in weights)
    others = parameters(teacher) - matrices
    return 1 - (dense_bytes - 4 * others - matrices / 8) / (4 * matrices)


lab.reveal("equal-bytes", zeros_for(4 * parameters(narrow(64))))

# %% [markdown] lang="fr"
# **Avant de regarder** : à octets égaux, avec autant de mises à jour en tout, lequel sera le plus exact ?

# %% [markdown] lang="en"
# **Before you look**: with equal bytes, and as many updates in all, which one will be more accurate?

# %% name="large-or-small" tags=["nbval-ignore-output"]
for width in (64, 48):
    dense = narrow(width)
    share = zeros_for(4 * parameters(dense))
    large = pruned([global_masks([weight], share)[0] for weight in weights], 60)
    train(dense, label_loss, batches(180))
    print(decimal(4 * parameters(dense) / 1e6, 2), "MB // Mo")
    print(f"  dense, width {width}: // dense, largeur {width} :", percent(accuracy(dense, task)))
    zeros = percent(share, 0)
    print(f"  sparse, {zeros} of zeros: // creux, {zeros} de zéros :", percent(accuracy(large, task)))

# %% [markdown] lang="fr"
# Ici, le petit modèle dense tient bon. **Expliquez** : pourquoi pas comme chez Zhu et Gupta ?
#
# <details><summary>Réponse</summary>
#
# Les chiffres sont si faciles qu’un modèle étroit suffit, contrairement à ImageNet ou à la traduction. Et eux enlèvent
# les poids **peu à peu**, pendant des milliers de pas ; 60 pas ne suffisent pas à se remettre d’une coupe.
#
# </details>
#
# ### Exercice 10 — le ticket gagnant
#
# Selon l’**hypothèse du ticket gagnant** (Frankle et Carbin, 2019), le grand réseau contient dès son initialisation un
# sous-réseau qui, entraîné **seul et depuis le début**, atteint la même exactitude. On le cherche par tours :
# entraîner ; enlever les plus petits poids ; ramener les autres à leur valeur **de départ** ; recommencer.
#
# Écrivez la fin d’un tour, pour une couche. `start` contient les poids d’avant tout entraînement, `trained` ceux
# d’après (pas forcément nuls là où `mask` l’est), `mask` vaut 1 là où un poids est encore là. On enlève
# `round(rate × nombre de poids restants)` poids parmi ceux **qui restent**. Renvoyez le nouveau masque, et les poids du
# prochain départ, masqués.

# %% [markdown] lang="en"
# Here the small dense model holds its ground. **Explain**: why is it not as with Zhu and Gupta?
#
# <details><summary>Answer</summary>
#
# Digits are so easy that a narrow model is enough, unlike ImageNet or translation. And Zhu and Gupta remove weights
# **little by little**, during thousands of steps; 60 steps are not enough to recover from a cut.
#
# </details>
#
# ### Exercise 10 — the winning ticket
#
# By the **lottery ticket hypothesis** (Frankle and Carbin, 2019), the large network contains from its initialisation a
# sub-network that, trained **alone and from the start**, reaches the same accuracy. It is looked for in rounds: train;
# remove the smallest weights; bring the others back to their value **at the start**; begin again.
#
# Write the end of a round, for one layer. `start` holds the weights before any training, `trained` those after it (not
# always zero where `mask` is zero), `mask` is 1 where a weight is still there.
# `round(rate × number of weights that remain)` weights go, of those **that remain**. Return the new mask, and the
# weights of the next start, zero where the mask is zero.


# %% name="ticket"
def next_ticket(start, trained, mask, rate):
    ### BEGIN SOLUTION
    sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten()
    new_mask = mask.clone().flatten()
    new_mask[sizes.argsort()[: round(rate * int(mask.sum()))]] = 0
    new_mask = new_mask.view_as(mask)
    return new_mask, start * new_mask
    ### END SOLUTION


lab.check("ticket", next_ticket)

# %%
# lab.hint("ticket")

# %% [markdown] lang="fr"
# Deux tours sur `vit_mini`, de 60 % chacun. Puis deux témoins ayant autant de zéros : le même masque avec d’autres
# poids de départ, et les mêmes poids sous un masque tiré au sort.

# %% [markdown] lang="en"
# Two rounds on `vit_mini`, each of which removes 60%. Then two controls, as sparse: the same mask with other weights to
# start from, and the same weights under a mask drawn by lot.

# %% name="tickets" tags=["nbval-ignore-output"]
def from_start(seed, masks):
    model = new_model("vit_mini", task, seed=seed)
    train_pruned(model, masks, batches(60), torch.optim.AdamW(model.parameters(), lr=1e-3))
    return model


start = dict(new_model("vit_mini", task, seed=0).named_parameters())
masks = {name: torch.ones_like(weight) for name, weight in start.items() if name in names and weight.dim() == 2}
trained = from_start(0, masks)
print("whole network: // réseau entier :", percent(accuracy(trained, task)))
for _ in range(2):
    after = dict(trained.named_parameters())
    masks = {name: next_ticket(start[name].data, after[name].data, mask, 0.6)[0] for name, mask in masks.items()}
    trained = from_start(0, masks)
    print("ticket: // ticket :", percent(accuracy(trained, task)))
drawn = {name: mask.flatten()[torch.randperm(mask.numel())].view_as(mask) for name, mask in masks.items()}
print("same mask, other weights: // même masque, autres poids :", percent(accuracy(from_start(1000, masks), task)))
print("same weights, random mask: // mêmes poids, masque aléatoire :", percent(accuracy(from_start(0, drawn), task)))

# %% [markdown] lang="fr"
# Sur de plus grands modèles, il faut ramener les poids à leur valeur d’un des premiers pas (Frankle et al., 2020).
# Plusieurs graines : `python benchmarks/lottery_ticket.py --seeds 5 --out lottery`.
#
# ### Combien de temps gagné ?
#
# **Votre prédiction.** Une couche multiplie 64 lignes par une matrice 1 024 × 1 024, dont on annule neuf poids sur dix.
# Si la couche pleine prend 1, combien prend celle-ci ? (Et au format CSR, qui ne garde que les poids non nuls ?)

# %% [markdown] lang="en"
# In larger models weights must be brought back to their value at one of the first steps (Frankle et al., 2020). Several
# seeds: `python benchmarks/lottery_ticket.py --seeds 5 --out lottery`.
#
# ### How much time is gained?
#
# **Your prediction.** A layer multiplies 64 rows by a matrix of 1,024 × 1,024, in which nine weights of ten become
# zero. If the full layer takes 1, how much does this one take? (And in the format CSR, which keeps only the weights
# that are not zero?)

# %% name="predict-masked" stub="value"
lab.predict(
    "masked-time",
    ### BEGIN SOLUTION
    1,
    ### END SOLUTION
)

# %% name="reveal-masked" tags=["nbval-ignore-output"]
warnings.simplefilter("ignore")  # CSR is in beta in torch // CSR est en bêta dans torch
full, rows = torch.randn(1024, 1024), torch.randn(1024, 64)
zeros = full * (torch.rand_like(full) > 0.9)
csr = zeros.to_sparse_csr()
full_s, zeros_s, csr_s = seconds(lambda: full @ rows, lambda: zeros @ rows, lambda: csr @ rows, rounds=40)
lab.reveal("masked-time", zeros_s / full_s)

# %% name="csr" tags=["nbval-ignore-output"]
print("CSR: // CSR :", decimal(csr_s / full_s, 2))

# %% [markdown] lang="fr"
# On ne gagne rien : le processeur multiplie aussi par zéro. CSR fait dix fois moins de multiplications, mais lit un
# indice par poids : le gain reste loin de dix. Un motif régulier, lui, peut être accéléré par le matériel (partie 6).
#
# ## 4. Servir un modèle de langue
#
# Un modèle de langue lit d’abord toute l’invite (*prompt*), en une passe : le **prefill**. Puis il écrit un token à la
# fois : le **decode**. L’attention y a besoin des clés et valeurs de tous les tokens précédents, qui ne changent plus :
# on les garde, dans le **cache KV**.
#
# ### Exercice 11 — l’attention avec un cache
#
# `q`, `k`, `v` sont ceux des **nouveaux** tokens, de forme (séquences, têtes, tokens, largeur d’une tête). `cache` est
# `None` au début, puis la paire que votre fonction a renvoyée. Chaque nouveau token voit ceux du cache, lui-même, et
# les nouveaux qui le précèdent. Renvoyez la sortie et le nouveau cache, une paire (k, v). `k` et `v` ont parfois moins
# de têtes que `q` (*grouped-query attention*) : `F.scaled_dot_product_attention(…, attn_mask=…, enable_gqa=True)` s’en
# charge ; un masque booléen y vaut `True` là où l’on regarde.

# %% [markdown] lang="en"
# Nothing is gained: the processor multiplies by zero, too. CSR makes a tenth of the multiplications, but reads an index
# per weight: the gain stays far from ten. A regular pattern can be built into the hardware (part 6).
#
# ## 4. Serve a language model
#
# A language model first reads the whole prompt, in one pass: the **prefill**. Then it writes one token at a time: the
# **decode**. There, attention needs the keys and values of all tokens before, which do not change any more: they are
# kept, in the **KV cache**.
#
# ### Exercise 11 — attention with a cache
#
# `q`, `k`, `v` are those of the **new** tokens, of shape (sequences, heads, tokens, width of a head). `cache` is `None`
# at the beginning, then the pair that your function has returned. Each new token sees those in the cache, itself, and
# the new ones before it. Return the output and the new cache, a pair (k, v). `k` and `v` may have fewer heads than `q`
# (grouped-query attention): `F.scaled_dot_product_attention(…, attn_mask=…, enable_gqa=True)` sees to it; there, a
# boolean mask is `True` where a token looks.


# %% name="kv-cache"
def cached_attention(q, k, v, cache):
    ### BEGIN SOLUTION
    if cache is not None:
        k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
    new, seen = q.shape[2], k.shape[2]
    mask = torch.ones(new, seen, dtype=torch.bool).tril(seen - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)
    ### END SOLUTION


lab.check("kv-cache", cached_attention)

# %%
# lab.hint("kv-cache")

# %% [markdown] lang="fr"
# Voici un Llama de 38 millions de paramètres, en fp32, aux poids aléatoires. Chaque bloc appelle votre fonction : 200
# tokens en prefill, puis 56 un par un, doivent donner les logits d’une seule passe.

# %% [markdown] lang="en"
# Here is a Llama of 38 million parameters, in fp32, with random weights. Each block calls your function: 200 tokens in
# prefill, then 56 one by one, must give the same logits as a single pass.

# %% name="llama"
from dlojz.models.blocks import SequenceShare
from dlojz.models.llama import Llama
from dlojz.models.sizes import LlamaSize


class Cached(SequenceShare):
    cache = None

    def positions(self, tokens, device, dtype=torch.float32):
        first = 0 if self.cache is None else self.cache[0].shape[2]
        return torch.arange(first, first + tokens, dtype=dtype)

    def attend(self, q, k, v, *, causal=True):
        output, self.cache = cached_attention(q, k, v, self.cache)
        return output


def begin(model, kind=Cached):
    for block in model.blocks[1:-1]:
        block.sequence = kind()


torch.manual_seed(0)
size = LlamaSize(width=768, depth=6, num_heads=12, num_kv_heads=4, mlp_width=2048)
llama = Llama(size, sequence_length=512, vocabulary_size=256).eval()
prompt = torch.randint(256, (1, 256))
with torch.inference_mode():
    whole = llama(prompt)
    begin(llama)
    pieces = [llama(piece) for piece in prompt.split([200] + 56 * [1], 1)]
caches = [block.sequence.cache for block in llama.blocks[1:-1]]
print("same logits: // mêmes logits :", yes_no(torch.allclose(torch.cat(pieces, 1), whole, atol=1e-4)))

# %% [markdown] lang="fr"
# **Votre prédiction.** 6 blocs, largeur 768, 12 têtes pour les requêtes, 4 pour les clés et les valeurs, en fp32 :
# combien d’octets ce cache prend-il pour 256 tokens ?

# %% [markdown] lang="en"
# **Your prediction.** 6 blocks, width 768, 12 heads of queries, 4 of keys and values, in fp32: how many bytes does this
# cache take for 256 tokens?

# %% name="predict-kv" stub="value"
lab.predict(
    "kv-bytes",
    ### BEGIN SOLUTION
    2 * 6 * 256 * 4 * (768 // 12) * 4,
    ### END SOLUTION
)

# %% name="reveal-kv"
lab.reveal("kv-bytes", sum(tensor.nbytes for cache in caches for tensor in cache))

# %% [markdown] lang="fr"
# Sans groupes de requêtes, ce serait le triple. Passons aux secondes. Deux débits de la machine suffisent : les FLOP
# par seconde d’un produit de matrices, et les octets lus par seconde de matrices que multiplie un vecteur. La cellule
# mesure aussi le modèle, à tour de rôle, sans le montrer.

# %% [markdown] lang="en"
# Without grouped queries it would be three times as much. Now for the seconds. Two rates of the machine are enough: the
# FLOP per second of a product of matrices, and the bytes read per second of matrices that multiply a vector. The cell
# also measures the model, in the same turns, and does not show it yet.

# %% name="rates" tags=["nbval-ignore-output"]
uncached = copy.deepcopy(llama)
begin(uncached, SequenceShare)


def prefill():
    begin(llama)
    llama(prompt)


wide, read = torch.randn(2048, 768), [torch.randn(2048, 768) for _ in range(26)]
works = {
    "product": lambda: F.linear(torch.ones(256, 768), wide),
    "reading": lambda: [F.linear(torch.ones(1, 768), matrix) for matrix in read],
    "prefill": prefill,
    "decode": lambda: llama(prompt[:, :1]),
    "no cache": lambda: uncached(prompt),
}
taken_s = dict(zip(works, seconds(*works.values(), rounds=5), strict=True))
flop_per_s = 2 * 256 * wide.numel() / taken_s["product"]
bytes_per_s = sum(matrix.nbytes for matrix in read) / taken_s["reading"]
print(decimal(bytes_per_s / 1e9), "GB/s, // Go/s,", f"{decimal(flop_per_s / 1e9, 0)} GFLOP/s,", end=" ")
print(decimal(flop_per_s / bytes_per_s), "FLOP per byte // FLOP par octet")

# %% [markdown] lang="fr"
# **Vos prédictions.** Un token demande environ 2 FLOP par paramètre. Un decode lit tous les poids pour un seul token :
# 2 FLOP pour 4 octets. Comparez aux FLOP de la machine par octet lu : lequel, du prefill ou du decode, est limité par
# le calcul (*compute-bound*), lequel par la mémoire (*memory-bound*) ? Combien de tokens par seconde en prefill de 256
# tokens, en decode d’une séquence ? Sans cache, où chaque token recalcule les 256 précédents, combien de fois plus de
# temps ? Ce sont des plafonds : attendez-vous à en atteindre 60 à 100 %, moins si la machine est occupée.

# %% [markdown] lang="en"
# **Your predictions.** A token takes about 2 FLOP per parameter. A decode reads all weights for one single token: 2
# FLOP for 4 bytes. Compare with the machine's FLOP per byte read: which one, prefill or decode, is limited by
# computation (compute-bound), which by memory (memory-bound)? How many tokens per second in a prefill of 256 tokens, in
# a decode of one sequence? Without a cache, where each token computes the 256 before it again, how many times as long?
# These rates are ceilings: expect 60 to 100% of them, less on a busy machine.

# %% name="predict-prefill" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "prefill-rate",
    ### BEGIN SOLUTION
    flop_per_s / (2 * parameters(llama)),
    ### END SOLUTION
)

# %% name="predict-decode" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "decode-rate",
    ### BEGIN SOLUTION
    bytes_per_s / (4 * parameters(llama)),
    ### END SOLUTION
)

# %% name="predict-cache" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "cache-gain",
    ### BEGIN SOLUTION
    (256 * 2 * parameters(llama) / flop_per_s) / (4 * parameters(llama) / bytes_per_s),
    ### END SOLUTION
)

# %% name="reveal-rates" tags=["nbval-ignore-output"]
lab.reveal("prefill-rate", 256 / taken_s["prefill"])
lab.reveal("decode-rate", 1 / taken_s["decode"])
lab.reveal("cache-gain", taken_s["no cache"] / taken_s["decode"])

# %% [markdown] lang="fr"
# Le decode n’occupe presque pas les unités de calcul : autant servir plusieurs requêtes à la fois. **Avant de
# regarder** : jusqu’à combien de séquences le débit croît-il ?

# %% [markdown] lang="en"
# Decode leaves the compute units nearly idle: so several requests may be served at once. **Before you look**: up to how
# many sequences does the rate grow?

# %% name="batched" tags=["nbval-ignore-output"]
for sequences in (1, 4, 16, 64):
    token = torch.randint(256, (sequences, 1))
    begin(llama)
    (step_s,) = seconds(lambda token=token: llama(token), rounds=5)
    rate = f"{decimal(sequences / step_s, 0):>6} tokens/s, {decimal(1e3 * step_s, 0):>5} ms/token"
    print(f"{sequences:>3} sequences: // {sequences:>3} séquences :", rate)

# %% [markdown] lang="fr"
# **Expliquez.** Pourquoi le débit croît-il, et pourquoi pas sans fin ? Que gagnerait-on avec des poids en INT8 ?
#
# <details><summary>Réponse</summary>
#
# Les poids sont lus une fois pour toutes les séquences. Quand elles sont assez nombreuses, le calcul limite à son tour,
# et chacune attend ; et le cache grandit avec chacune. Des poids en INT8 font lire quatre fois moins d’octets : jusqu’à
# quatre fois plus de tokens par seconde en decode, si le noyau lit les entiers tels quels, et presque rien en prefill.
#
# </details>
#
# ## 5. Adapter par LoRA
#
# En fp32 avec AdamW, un fine-tuning complet demande 16 octets par paramètre : poids, gradient, deux moments. **LoRA**
# (Hu et al., 2022) gèle W et n’apprend que deux matrices étroites, A (rang, entrées) et B (sorties, rang) :
#
# $$y = W x + \frac{\alpha}{r} \, B A x$$
#
# ### Exercice 12 — une couche LoRA
#
# Écrivez la classe : elle enveloppe une `nn.Linear`, gelée, biais compris. A est tirée au hasard, d’écart type
# $1/\sqrt{\text{entrées}}$, et B est nulle : la couche commence telle qu’elle était.

# %% [markdown] lang="en"
# **Explain.** Why does the rate grow, and why not for ever? What would weights in INT8 gain?
#
# <details><summary>Answer</summary>
#
# The weights are read once for all sequences. Where there are enough of them, computation is the limit in its turn, and
# each sequence waits; and the cache grows with each. With weights in INT8 a fourth of the bytes are read: up to four
# times as many tokens per second in decode, if the kernel reads whole numbers as they are, and next to nothing in
# prefill.
#
# </details>
#
# ## 5. Adapt by LoRA
#
# In fp32 with AdamW, a full fine-tuning takes 16 bytes per parameter: weight, gradient, two moments. **LoRA** (Hu et
# al., 2022) freezes W and learns two narrow matrices only, A (rank, inputs) and B (outputs, rank):
#
# $$y = W x + \frac{\alpha}{r} \, B A x$$
#
# ### Exercise 12 — a LoRA layer
#
# Write the class: it wraps an `nn.Linear`, frozen, bias included. A is drawn at random, with a standard deviation of
# $1/\sqrt{\text{inputs}}$, and B is zero: the layer begins as it was.


# %% name="lora"
class LoRA(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        ### BEGIN SOLUTION
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.factor = alpha / rank
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        return self.linear(x) + self.factor * (x @ self.a.T @ self.b.T)
        ### END SOLUTION


lab.check("lora", LoRA)

# %%
# lab.hint("lora")

# %% [markdown] lang="fr"
# Le professeur doit maintenant lire des chiffres en négatif. Fine-tuning complet, puis par LoRA de rang 4, avec la
# boucle du début :

# %% [markdown] lang="en"
# The teacher must now read digits in negative. A full fine-tuning, then by LoRA of rank 4, with the loop of the
# beginning:

# %% name="adapted" tags=["nbval-ignore-output"]
def with_lora(model, rank, adapted):
    model = copy.deepcopy(model).requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in adapted:
            setattr(model.get_submodule(parent), name, LoRA(module, rank, alpha=2 * rank))
    return model


def negative(x):
    return x.max() + x.min() - x


def accuracy_negative(model):
    with torch.inference_mode():
        right = model(negative(task.held_out_NCHW)).argmax(1) == task.held_out_labels_N
    return float(right.float().mean())


print("before: // avant :", percent(accuracy_negative(teacher)))
some = with_lora(teacher, 4, ("qkv", "attention_project", "mlp_expand", "mlp_project"))
for name, model, rate in (("full", copy.deepcopy(teacher), 1e-3), ("LoRA", some, 5e-3)):
    train(model, label_loss, batches(60, negative(images)), rate)
    learnt = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"{name}: // {name} :", percent(accuracy_negative(model)))
    print("  parameters trained: // paramètres entraînés :", decimal(learnt, 0))

# %% [markdown] lang="fr"
# Si LoRA reste derrière après autant de pas : il n’entraîne que 4 % des paramètres, par des produits de rang 4, et B
# part de zéro. Essayez le rang 16, ou 120 pas : nous avons mesuré 95 % et 93 %, contre 94 % pour le fine-tuning
# complet.
#
# **Vos prédictions**, pour un Llama plus petit, en fp32, et LoRA de rang 8 sur les requêtes et les valeurs, comme dans
# l’article. `model_parameters` sont gelés, `lora_parameters` s’ajoutent et s’entraînent.
#
# - Combien d’octets prennent poids, gradients et moments d’AdamW ?
# - La passe arrière complète calcule deux produits par matrice : le gradient de l’entrée et celui du poids, chacun
#   aussi long que la passe avant. Lequel LoRA épargne-t-il ? Si les deux passes prennent ensemble 1 dans un fine-tuning
#   complet, combien prennent-elles avec LoRA ?

# %% [markdown] lang="en"
# If LoRA stays behind after as many steps: it trains 4% of the parameters only, through products of rank 4, and B
# begins at zero. Try rank 16, or 120 steps: we measured 95% and 93%, against 94% for the full fine-tuning.
#
# **Your predictions**, for a smaller Llama, in fp32, and LoRA of rank 8 on queries and values, as in the paper.
# `model_parameters` are frozen, `lora_parameters` are added and trained.
#
# - How many bytes do weights, gradients and AdamW's moments take?
# - A full backward computes two products per matrix: the gradient of the input and that of the weight, each as long as
#   the forward. Which one does LoRA save? If both passes take 1 together in a full fine-tuning, how long do they take
#   with LoRA?

# %% name="small-llama"
torch.manual_seed(0)
size = LlamaSize(width=512, depth=4, num_heads=8, num_kv_heads=8, mlp_width=1408)
small = Llama(size, sequence_length=128, vocabulary_size=256)
adapted = with_lora(small, 8, ("query", "value"))
model_parameters = parameters(small)
lora_parameters = parameters(adapted) - model_parameters
print("frozen: // gelés :", model_parameters, "| trained: // | entraînés :", lora_parameters)

# %% name="predict-lora-bytes" stub="value"
lab.predict(
    "lora-bytes",
    ### BEGIN SOLUTION
    4 * model_parameters + 16 * lora_parameters,
    ### END SOLUTION
)

# %% name="predict-lora-time" stub="value"
lab.predict(
    "lora-time",
    ### BEGIN SOLUTION
    2 / 3,
    ### END SOLUTION
)

# %% name="reveal-lora" tags=["nbval-ignore-output"]
text = torch.randint(256, (4, 129))


def forward_backward(model):
    model.zero_grad()
    with torch.inference_mode(False), torch.enable_grad():
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()


def state_bytes(model, optimizer):
    tensors = list(model.parameters())
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensors += [moment for moments in optimizer.state.values() for name, moment in moments.items() if name != "step"]
    return sum(tensor.nbytes for tensor in tensors)


full_s, lora_s = seconds(lambda: forward_backward(small), lambda: forward_backward(adapted), rounds=3)
lab.reveal("lora-time", lora_s / full_s)
kept_bytes = []
for model in (small, adapted):
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer.step()
    kept_bytes.append(state_bytes(model, optimizer))
lab.reveal("lora-bytes", kept_bytes[1])
print("full / LoRA: // complet / LoRA :", decimal(kept_bytes[0] / kept_bytes[1], 2))

# %% [markdown] lang="fr"
# Les états prennent presque quatre fois moins de place ; le temps baisse bien moins : tout le modèle se calcule encore.
# À l’inférence, BA s’ajoute à W. QLoRA (Dettmers et al., 2023) quantifie en plus les poids gelés, sur 4 bits.
#
# ## 6. Facultatif : le motif 2:4
#
# ### Exercice 13 — deux sur quatre
#
# Depuis l’A100, les GPU de NVIDIA multiplient jusqu’à deux fois plus vite une matrice dont tout groupe de **quatre
# poids consécutifs** d’une ligne a deux zéros : le **motif 2:4** (Mishra et al., 2021). `weight` est de forme (sorties,
# entrées), les entrées étant un multiple de 4. Renvoyez un masque de même forme, qui garde dans chaque groupe les deux
# plus grandes valeurs absolues, exactement deux, même à égalité.

# %% [markdown] lang="en"
# The states shrink almost fourfold; the time falls by far less: the whole model is still computed. At
# inference BA is added to W. QLoRA (Dettmers et al., 2023) also quantizes the frozen weights, to 4 bits.
#
# ## 6. Optional: the 2:4 pattern
#
# ### Exercise 13 — two of four
#
# Since the A100, NVIDIA's GPUs can multiply up to twice as fast by a matrix in which every group of **four consecutive
# weights** of a row has two zeros: the **2:4 pattern** (Mishra et al., 2021). `weight` has the shape (outputs, inputs),
# the inputs being a multiple of 4. Return a mask of the same shape, which keeps the two largest magnitudes of every
# group, exactly two, even where some are equal.


# %% name="two-of-four"
def two_of_four(weight):
    ### BEGIN SOLUTION
    groups = weight.abs().unflatten(1, (-1, 4))
    return torch.zeros_like(groups).scatter(2, groups.topk(2).indices, 1.0).flatten(1)
    ### END SOLUTION


lab.check("two-of-four", two_of_four)

# %%
# lab.hint("two-of-four")

# %% [markdown] lang="fr"
# **Votre prédiction.** On range les poids gardés côte à côte, et, pour chacun, sa place dans son groupe, sur deux bits.
# Combien d’octets prend une matrice 512 × 128 en fp16 ?

# %% [markdown] lang="en"
# **Your prediction.** The weights that are kept are laid side by side, and, for each, its place in its group, in two
# bits. How many bytes does a matrix of 512 × 128 in fp16 take?

# %% name="predict-two-of-four" stub="value"
lab.predict(
    "two-of-four-bytes",
    ### BEGIN SOLUTION
    512 * 64 * 2 + 512 * 64 * 2 / 8,
    ### END SOLUTION
)

# %% name="reveal-two-of-four"
from dlojz.compress.two_to_four import mask_2_of_4, pack

lab.reveal("two-of-four-bytes", pack(weight.half() * mask_2_of_4(weight)).num_bytes)

# %% [markdown] lang="fr"
# ### Exercice 14 — des poids coupés qui peuvent revenir
#
# SR-STE (Zhou et al., 2021) entraîne des poids **denses** à travers un masque recalculé à chaque pas : le gradient
# traverse le masque, comme il traversait l’arrondi, et `decay` × le poids s’ajoute à celui des poids coupés, pour les
# rappeler vers zéro. `gradient` est celui des poids masqués. Renvoyez celui des poids denses.

# %% [markdown] lang="en"
# ### Exercise 14 — pruned weights that may come back
#
# SR-STE (Zhou et al., 2021) trains **dense** weights through a mask computed anew at every step: the gradient passes
# straight through the mask, as it did through the rounding, and `decay` × the weight is added to that of the pruned
# weights, to call them back to zero. `gradient` is that of the masked weights. Return that of the dense ones.


# %% name="sr-ste"
def sr_ste(weight, mask, gradient, decay):
    ### BEGIN SOLUTION
    return gradient + decay * (1 - mask) * weight
    ### END SOLUTION


lab.check("sr-ste", sr_ste)

# %%
# lab.hint("sr-ste")

# %% name="refined" tags=["nbval-ignore-output"]
model = copy.deepcopy(teacher)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
inner = names[:-1]  # their inputs are multiples of 4 // leurs entrées sont des multiples de 4
for x, y in batches(45):
    masks = {name: two_of_four(model.get_parameter(name).detach()) for name in inner}
    masked = {name: (mask * model.get_parameter(name).detach()).requires_grad_() for name, mask in masks.items()}
    loss = F.cross_entropy(torch.func.functional_call(model, masked, (x,)), y)
    optimizer.zero_grad()
    loss.backward()
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        weight.grad = sr_ste(weight.detach(), mask, masked[name].grad, 2e-4)
    optimizer.step()
for name in inner:
    model.get_parameter(name).data *= two_of_four(model.get_parameter(name).data)
print("2:4, SR-STE: // 2:4, SR-STE :", percent(accuracy(model, task)))

# %% [markdown] lang="fr"
# ### Exercice 15 — un autre ordre, la même sortie
#
# Si un groupe de quatre a trois grands poids, 2:4 en sacrifie un. Changeons l’ordre des unités cachées d’un MLP, dans
# les deux couches à la fois. `expand` (cachées, entrées) et `bias` (cachées) sont ceux de la première couche, `project`
# (sorties, cachées) celui de la seconde. L’unité `order[i]` vient à la place i. Renvoyez les trois tenseurs.

# %% [markdown] lang="en"
# ### Exercise 15 — another order, the same output
#
# Where a group of four has three large weights, 2:4 sacrifices one. Let us change the order of an MLP's hidden units,
# in both layers at once. `expand` (hidden, inputs) and `bias` (hidden) are those of the first layer, `project`
# (outputs, hidden) that of the second. Unit `order[i]` comes to place i. Return the three tensors.


# %% name="permutation"
def reorder(expand, bias, project, order):
    ### BEGIN SOLUTION
    return expand[order], bias[order], project[:, order]
    ### END SOLUTION


lab.check("permutation", reorder)

# %%
# lab.hint("permutation")

# %% [markdown] lang="fr"
# Le paquet cherche un bon ordre ([permutations.py](../../dlojz/compress/permutations.py)) ; votre fonction l’applique :

# %% [markdown] lang="en"
# The package looks for a good order ([permutations.py](../../dlojz/compress/permutations.py)); your function applies
# it:

# %% name="in-order"
from dlojz.compress.permutations import best_permutation, permute_query_key

moved = copy.deepcopy(teacher)
block = moved.get_submodule("blocks.1")
tensors = [parameter.data for parameter in (block.mlp_expand.weight, block.mlp_expand.bias, block.mlp_project.weight)]
new = reorder(*tensors, best_permutation(tensors[2], 2))
block.mlp_expand.weight.data, block.mlp_expand.bias.data, block.mlp_project.weight.data = new
before, after = ((two_of_four(weight) * weight.abs()).sum() / weight.abs().sum() for weight in (tensors[2], new[2]))
permute_query_key(moved.get_submodule("blocks.2"), 0, torch.randperm(32))  # one head // une tête
with torch.inference_mode():
    apart = (moved(images[:64]) - teacher(images[:64])).abs().max()
print("2:4 keeps more: // 2:4 garde davantage :", yes_no(bool(after > before)))
print("same output: // même sortie :", yes_no(bool(apart < 1e-4)))

# %% [markdown] lang="fr"
# De même pour les colonnes de Q et de K, dans le même ordre (`permute_query_key`).

# %% [markdown] lang="en"
# It is the same for the columns of Q and K, in one order (`permute_query_key`).

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Deux boucles d’entraînement : l’une à travers un arrondi sur 8 bits (`--quantize`), l’autre sous un masque, après la
# première époque (`--prune 0.5`). Continuez dans votre `train.py`, ou partez de celui qu’écrit
# `dlojz labs script 11 un_autre_dossier`. La cellule ci-dessous le juge.
#
# À regarder : 255 valeurs au plus par matrice, la moitié nulles à la fin, et une perte qui baisse encore.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# return weight + ((weight / scale).round() * scale - weight).detach()
# smallest = weight.detach().abs().flatten().kthvalue(int(args.prune * weight.numel())).values
# masks.append(weight.detach().abs() > smallest)
# weight.data *= mask
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Two training loops: one through a rounding to 8 bits (`--quantize`), one under a mask, after the first epoch
# (`--prune 0.5`). Go on in your `train.py`, or let `dlojz labs script 11 another_folder` write what this lab begins
# with. The cell below judges it.
#
# What to look for: at most 255 different values in a matrix, half of them zero at the end, and a loss that still falls.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# return weight + ((weight / scale).round() * scale - weight).detach()
# smallest = weight.detach().abs().flatten().kthvalue(int(args.prune * weight.numel())).values
# masks.append(weight.detach().abs() > smallest)
# weight.data *= mask
# ```
#
# </details>

# %% name="own-script"
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | | distillation | quantification | élagage | LoRA |
# |--|--|--|--|--|
# | temps gagné | moins de couches | noyaux entiers, decode | 2:4 et le bon GPU | au plus ⅓ de l’entraînement |
# | le piège | oublier le témoin | un extrême élargit tous les pas | un seuil pour deux échelles | A et B nulles |

# %% [markdown] lang="en"
# ## Summary
#
# | | distillation | quantization | pruning | LoRA |
# |--|--|--|--|--|
# | time saved | fewer layers | integer kernels, decode | 2:4 and the right GPU | at most ⅓ of the training |
# | the trap | to forget the control | one extreme widens all steps | one threshold for two scales | A and B zero |

# %%
lab.progress()
