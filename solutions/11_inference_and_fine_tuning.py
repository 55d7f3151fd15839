# %% [markdown] lang="fr"
# # TP 11 — Compression pour l’inférence
#
# Un modèle entraîné sert ensuite pendant des mois : c’est alors sa taille et son temps de réponse qui coûtent. Ce TP
# part d’un modèle qui marche, le **professeur**, et le réduit de trois façons :
#
# - la **distillation** : un modèle plus petit, l’**étudiant**, apprend du professeur ;
# - la **quantification** : les mêmes poids, écrits sur moins de bits ;
# - l’**élagage** (*pruning*) : des poids deviennent nuls.
#
# Du chapitre du cours, ce TP traite donc la compression. Il ne traite ni le service du modèle (cache des clés et des
# valeurs, regroupement des requêtes), ni les adaptateurs comme LoRA.
#
# À la fin, vous saurez :
#
# - écrire la perte de distillation, avec sa température, avec ou sans vraies étiquettes ;
# - quantifier des poids et des activations, calculer une couche en entiers, prévoir le bruit que cela ajoute ;
# - entraîner à travers un arrondi, et dire quand il le faut ;
# - choisir les poids à enlever, chercher un ticket gagnant, imposer le motif 2:4 et le laisser se corriger ;
# - dire ce que chaque méthode fait gagner pour de bon : en octets, en secondes, ou seulement sur le papier.
#
# Comptez deux heures. Un seul processus suffit, sans GPU : tout s’entraîne ici en quelques secondes, sur de vrais
# chiffres manuscrits.

# %% [markdown] lang="en"
# # Lab 11 — Compression for inference
#
# Once trained, a model serves for months: what costs then is its size and the time of an answer. This lab starts from
# a model that works, the **teacher**, and makes it smaller in three ways:
#
# - **distillation**: a smaller model, the **student**, learns from the teacher;
# - **quantization**: the same weights, written in fewer bits;
# - **pruning**: weights become zero.
#
# Of the course's chapter this lab treats compression. It treats neither serving (cache of keys and values, batches of
# requests) nor adapters such as LoRA.
#
# By the end you can:
#
# - write the distillation loss, with its temperature, with or without true labels;
# - quantize weights and activations, compute a layer in whole numbers, foresee the noise that this adds;
# - train through a rounding, and tell when that is needed;
# - choose the weights that go, look for a winning ticket, impose the 2:4 pattern and let it correct itself;
# - tell what each method really gains: in bytes, in seconds, or on paper only.
#
# Allow two hours. One single process is enough, without a GPU: everything is trained here within seconds, on real
# handwritten digits.

# %% name="setup"
import copy

import torch
import torch.nn.functional as F

from dlojz import labs
from dlojz.compress.quantizers import observe
from dlojz.compress.task import Settings, digits, parameters, payload_bytes, trained_teacher
from dlojz.labs.lab11_compression import figures, figures_prune
from dlojz.running.store import runs_root

lab = labs.start("11")
torch.set_num_threads(1)  # a training depends on it, to the last bit // l’entraînement en dépend, au bit près

# %% [markdown] lang="fr"
# Le professeur est un petit *Vision Transformer* de 4 blocs. Il apprend sur 1 437 chiffres manuscrits, en 16 × 16
# pixels ; 360 autres, qui ne serviront jamais à l’apprentissage, jugeront tous les modèles de ce TP. Une image vaut
# donc 0,3 % d’**exactitude** (*accuracy*), la part de réponses justes.

# %% [markdown] lang="en"
# The teacher is a small Vision Transformer of 4 blocks. It learns from 1,437 handwritten digits, in 16 × 16 pixels; 360
# others, from which nobody ever learns, judge all models of this lab. So one image is 0.3% of **accuracy**, the share
# of right answers.

# %% name="teacher"
task = digits()
teacher = trained_teacher("vit_tiny", task, Settings(epochs=5), folder=runs_root() / "teachers")
figures.teacher_seen(teacher, task)

# %% [markdown] lang="fr"
# ## 1. Distiller
#
# Une étiquette dit : « c’est un 9 ». Un professeur en dit plus : « un 9 sans doute, un 1 peut-être, sûrement pas un
# 6 ». Ce sont ces nuances que l’étudiant apprend (Hinton et al., 2015). Pour qu’elles se voient, on divise les logits
# par une **température** T avant le softmax. Voici une image sur laquelle notre professeur hésite :

# %% [markdown] lang="en"
# ## 1. Distil
#
# A label says: “this is a 9”. A teacher says more: “a 9 most likely, a 1 perhaps, certainly no 6”. It is these shades
# that the student learns (Hinton et al., 2015). To make them visible, logits are divided by a **temperature** T before
# the softmax. Here is an image on which our teacher hesitates:

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
# pour les B échantillons i et toutes les classes c. Les gradients de logits adoucis sont environ T² fois plus petits :
# le facteur T² les remet à l’échelle.
#
# `student` et `teacher` sont des logits, de forme (échantillons, classes). Renvoyez la perte. L’étudiant en reçoit un
# gradient ; le professeur, aucun.

# %% [markdown] lang="en"
# ### Exercise 1 — the teacher's soft answers
#
# The loss compares the two softened distributions, p of the teacher and q of the student, by their Kullback-Leibler
# divergence:
#
# $$\frac{T^2}{B} \sum_{i=1}^{B} \sum_{c} p_{i,c} \, (\log p_{i,c} - \log q_{i,c})$$
#
# for the B samples i and all classes c. Gradients of softened logits are about T² times as small: the factor T² brings
# them back to scale.
#
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
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("soft-loss")

# %% [markdown] lang="fr"
# D’autres pertes se défendent : quand T est grand, celle-ci devient, à un facteur près, l’écart quadratique des logits
# (centrés), que l’on peut aussi prendre directement ; DistilBERT y ajoute l’angle entre les états cachés.
#
# ### Exercice 2 — avec et sans vraies étiquettes
#
# Le professeur peut répondre à des images que personne n’a étiquetées. Dans `labels`, `-1` veut dire « inconnue ».
# Renvoyez
#
# $$\alpha \times \text{perte de distillation} + (1 - \alpha) \times \text{entropie croisée}$$
#
# la première, celle de l’exercice 1, sur **tous** les échantillons ; la seconde, sans température, sur ceux qui ont une
# étiquette. Si aucun n’en a, le second terme est nul.

# %% [markdown] lang="en"
# Other losses have their merits: where T is large this one becomes, up to a factor, the square difference of the
# (centred) logits, which can also be taken as it is; DistilBERT adds the angle between hidden states.
#
# ### Exercise 2 — with and without true labels
#
# The teacher can answer for images that nobody has labelled. In `labels`, `-1` means “unknown”. Return
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
# Notre étudiant, `vit_mini`, a 2 blocs au lieu de 4 ; le reste (patchs, positions, classifieur) est le même.
#
# **Votre prédiction.** Quelle part des paramètres du professeur lui reste-t-il, entre 0 et 1 ?

# %% [markdown] lang="en"
# Our student, `vit_mini`, has 2 blocks instead of 4; the rest (patches, positions, classifier) is the same.
#
# **Your prediction.** Which share of the teacher's parameters does it have, between 0 and 1?

# %% name="predict-student" stub="value"
whole, block = parameters(teacher), parameters(teacher.get_submodule("blocks.1"))
lab.predict(
    "student-share",
    ### BEGIN SOLUTION
    (whole - 2 * block) / whole,
    ### END SOLUTION
)

# %% name="reveal-student"
from dlojz.compress.task import new_model

lab.reveal("student-share", parameters(new_model("vit_mini", task, seed=0)) / whole)

# %% [markdown] lang="fr"
# Entraînons-le de cinq façons, avec autant de mises à jour (`students`, dans
# [figures.py](../../dlojz/labs/lab11_compression/figures.py)). Toutes les étiquettes : seul, puis avec votre perte (T =
# 4, α = 0,9). 60 étiquettes : seul, puis avec votre perte, le professeur voyant toutes les images. Aucune étiquette,
# enfin (α = 1). **Avant de regarder** : de combien le professeur améliore-t-il l’étudiant qui a toutes les étiquettes,
# et celui qui n’en a que 60 ?

# %% [markdown] lang="en"
# Let us train it in five ways, with as many updates (`students`, in
# [figures.py](../../dlojz/labs/lab11_compression/figures.py)). All labels: alone, then with your loss (T = 4, α = 0.9).
# 60 labels: alone, then with your loss, the teacher seeing all images. Finally no label (α = 1). **Before you look**:
# by how much does the teacher improve the student that has all labels, and the one that has 60 only?

# %% name="students" tags=["nbval-ignore-output"]
students = figures.students(teacher, task, mixed_loss)
students

# %% name="students-seen"
figures.helps(students)

# %% [markdown] lang="fr"
# Avec toutes les étiquettes, l’étudiant se débrouille seul : la distillation n’ajoute presque rien. C’est quand les
# étiquettes manquent qu’elle change tout, et le professeur les remplace même entièrement. DistilBERT (Sanh et al.,
# 2019) garde 97 % des performances de BERT avec 60 % de ses poids ; c’est la dernière ligne. Ne rapprochez pas trop les
# deux : reconnaître des chiffres est bien plus facile que comprendre une phrase.
#
# Deux graines ne font pas une preuve. En voici cinq, avec les autres pertes :
#
# ```bash
# python benchmarks/distillation.py --seeds 5 --out distillation
# ```
#
# ## 2. Quantifier
#
# Un poids en fp32 occupe 4 octets, en INT8 un seul, et les unités INT8 d’un A100 calculent deux fois plus vite que
# celles en fp16. Le plus simple est la quantification **symétrique** : un poids vaut *échelle × entier*.
#
# ### Exercice 3 — des poids entiers
#
# `weight` est de forme (sorties, entrées). Chaque **ligne** a sa propre échelle : la plus grande valeur absolue de la
# ligne devient le plus grand entier, $2^{b-1}-1$ pour b bits, soit 127 pour 8. Renvoyez les entiers, en `torch.int8`
# (que `bits` vaille 8 ou moins), et les échelles, de forme (sorties, 1).

# %% [markdown] lang="en"
# With all labels the student manages alone: distillation adds next to nothing. It is where labels are missing that it
# changes everything, and the teacher even takes their place entirely. DistilBERT (Sanh et al., 2019) keeps 97% of
# BERT's performance with 60% of its weights; that is the last row. Do not compare the two too closely: to recognise
# digits is far easier than to understand a sentence.
#
# Two seeds prove nothing. Here are five, with the other losses:
#
# ```bash
# python benchmarks/distillation.py --seeds 5 --out distillation
# ```
#
# ## 2. Quantize
#
# A weight takes 4 bytes in fp32 and one in INT8, and the INT8 units of an A100 compute twice as fast as those in fp16.
# The simplest way is **symmetric** quantization: a weight is worth *scale × whole number*.
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
# (torch et torchao divisent par 127,5 plutôt que par 127 : ils se servent aussi du −128.)
#
# **Vos prédictions.** La première matrice d’un MLP de notre professeur est de forme (512, 128).
#
# - Combien d’octets prend-elle en INT8, avec ses échelles en fp32 ?
# - Un arrondi au plus proche se trompe d’au plus un demi-pas. Si toutes les erreurs entre −Δ/2 et Δ/2 sont aussi
#   probables, leur carré moyen est Δ²/12. Passer de 8 à 7 bits le multiplie donc à peu près par combien ?

# %% [markdown] lang="en"
# (torch and torchao divide by 127.5 rather than 127: they use −128, too.)
#
# **Your predictions.** The first matrix of an MLP of our teacher has the shape (512, 128).
#
# - How many bytes does it take in INT8, with its scales in fp32?
# - Rounding to the nearest is wrong by half a step at most. If all errors between −Δ/2 and Δ/2 are as likely, their
#   mean square is Δ²/12. So by how much, about, is it multiplied from 8 to 7 bits?

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

# %% name="reveal-int8"
from dlojz.compress.quantizers import Scheme, quantize, weight_grid

weight, scheme = teacher.get_submodule("blocks.2.mlp_expand").weight.detach(), Scheme(bits=8)
scale, zero_point = weight_grid(weight, scheme)
lab.reveal("int8-bytes", payload_bytes({"q": quantize(weight, scale, zero_point, scheme), "scale": scale}))

# %% name="reveal-noise" tags=["nbval-ignore-output"]
lab.reveal("noise-gained", figures.noise_ratio(weight, 8, 7))

# %% [markdown] lang="fr"
# Quatre fois plus de bruit, soit 6 décibels par bit. La figure le vérifie sur toute la matrice, avec votre fonction :
# trait large, ce que Δ²/12 prédit ; points, ce qui est mesuré.

# %% [markdown] lang="en"
# Four times as much noise, or 6 decibels per bit. The figure verifies it on the whole matrix, with your function: a
# broad line, what Δ²/12 predicts; points, what is measured.

# %% name="noise" tags=["nbval-ignore-output"]
figures.noise(quantize_rows, weight)

# %% [markdown] lang="fr"
# **Expliquez.** Une échelle par sortie gagne ici environ 3 dB, un demi-bit, pour 2 Kio de plus. À 2 bits, la prédiction
# se trompe : pourquoi ?
#
# <details><summary>Réponse</summary>
#
# Δ²/12 suppose une erreur répartie également sur tout le pas. À 2 bits symétriques, il ne reste que −1, 0 et 1, et Δ
# est la plus grande valeur absolue de la ligne : la plupart des poids sont plus petits que Δ/2, et deviennent 0. Leur
# erreur est le poids lui-même, le plus souvent proche de 0 : le bruit mesuré est un peu plus faible que prévu.
#
# </details>
#
# ### Exercice 4 — un intervalle qui n’est pas centré
#
# Les activations ne sont pas toujours centrées : après une GELU, presque tout est positif. La quantification **affine**
# leur donne un **point zéro** :
#
# $$x \approx \text{échelle} \times (q - \text{point zéro})$$
#
# `low` ≤ 0 ≤ `high` sont les bouts de l’intervalle, mesurés auparavant. `low` devient le plus petit entier signé de b
# bits, $-2^{b-1}$, et `high` le plus grand, $2^{b-1}-1$. Ce qui dépasse est **borné** (*clamp*). Le point zéro est
# entier, pour que 0 soit représenté exactement : $-2^{b-1}$ − arrondi(low / échelle). Renvoyez `q` (`torch.int8`),
# l’échelle et le point zéro.

# %% [markdown] lang="en"
# **Explain.** One scale per output gains about 3 dB here, half a bit, for 2 KiB more. With 2 bits the prediction is
# wrong: why?
#
# <details><summary>Answer</summary>
#
# Δ²/12 supposes an error spread evenly over the whole step. With 2 symmetric bits there remain −1, 0 and 1, and Δ is
# the largest absolute value of the row: most weights are smaller than Δ/2 and become 0. Their error is the weight
# itself, most often near 0: the noise measured is a little lower than predicted.
#
# </details>
#
# ### Exercise 4 — a range that is not centred
#
# Activations are not always centred: after a GELU nearly all of them are positive. **Affine** quantization gives them a
# **zero-point**:
#
# $$x \approx \text{scale} \times (q - \text{zero-point})$$
#
# `low` ≤ 0 ≤ `high` are the ends of the range, measured beforehand. `low` becomes the smallest signed whole number of b
# bits, $-2^{b-1}$, and `high` the largest, $2^{b-1}-1$. What sticks out is **clamped**. The zero-point is whole, so
# that 0 is represented exactly: $-2^{b-1}$ − round(low / scale). Return `q` (`torch.int8`), the scale and the
# zero-point.


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
# Reste à choisir l’intervalle : c’est le **calibrage**. On fait passer quelques images d’apprentissage, on regarde, on
# décide. Prendre le minimum et le maximum n’écrête rien, mais une seule valeur extrême élargit tous les pas ; écarter
# les extrêmes resserre les pas, mais écrête ces extrêmes ; on peut enfin chercher la moindre erreur. Votre fonction,
# sur ce qui entre dans la seconde matrice d’un MLP. **Avant de regarder** : lequel gagne à 8 bits, lequel à 4 ?

# %% [markdown] lang="en"
# It remains to choose the range: that is **calibration**. A few training images are run through, one looks, one
# decides. To take the minimum and the maximum clamps nothing, but one single extreme value widens all steps; to leave
# extremes out makes the steps smaller, but clamps them; and one can look for the least error. Your function, on what
# enters the second matrix of an MLP. **Before you look**: which one wins with 8 bits, which with 4?

# %% name="observed"
name = "blocks.1.mlp_project"
seen = observe(teacher, task.inputs_NCHW[:64], [name])[name].inputs_MI
figures.observed(seen, images=64)

# %% name="calibrated-eight" tags=["nbval-ignore-output"]
figures.calibrated(quantize_affine, seen, bits=8)

# %% name="calibrated-four" tags=["nbval-ignore-output"]
figures.calibrated(quantize_affine, seen, bits=4)

# %% [markdown] lang="fr"
# À 8 bits, il y a assez de pas : mieux vaut ne presque rien borner. À 4 bits, ils sont si rares que l’on gagne à
# sacrifier les extrêmes. Sans aucune donnée, on ne peut pas calibrer : il faut alors retrouver l’intervalle à chaque
# appel, ce que l’on nomme quantification **dynamique**.
#
# ### Exercice 5 — une couche en entiers
#
# Poids et activations sont entiers : le produit peut l’être aussi.
#
# $$\sum_i s_x (q_{x,i} - z) \, s_w q_{w,i} = s_x s_w \left( \sum_i q_{x,i} \, q_{w,i} - z \sum_i q_{w,i} \right)$$
#
# `x_q` (lignes, entrées) et `w_q` (sorties, entrées) sont en int8, `w_scale` est de forme (sorties, 1). Renvoyez la
# sortie, en flottants, de forme (lignes, sorties). Les facteurs restent des nombres de 8 bits, leur somme en demande
# 32 : `.int()` convertit un tenseur en int32.

# %% [markdown] lang="en"
# With 8 bits there are steps enough: better clamp next to nothing. With 4 they are so few that giving up the extremes
# pays. Without any data there is no calibration: the range must then be found anew at every call, which is called
# **dynamic** quantization.
#
# ### Exercise 5 — a layer in whole numbers
#
# Weights and activations are whole numbers: so can the product be.
#
# $$\sum_i s_x (q_{x,i} - z) \, s_w q_{w,i} = s_x s_w \left( \sum_i q_{x,i} \, q_{w,i} - z \sum_i q_{w,i} \right)$$
#
# `x_q` (rows, inputs) and `w_q` (outputs, inputs) are in int8, `w_scale` has the shape (outputs, 1). Return the output,
# in floats, of shape (rows, outputs). The factors stay numbers of 8 bits, their sum needs 32: `.int()` turns a tensor
# into int32.


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
# Votre produit est exact : toute l’erreur vient des deux arrondis. Quantifions maintenant **tous** les poids linéaires
# du professeur, sans aucun entraînement (*post-training quantization*), par votre fonction `quantize_rows`.
# **Avant de regarder** : à partir de combien de bits l’exactitude s’effondre-t-elle ?

# %% [markdown] lang="en"
# Your product is exact: all of the error comes from the two roundings. Let us now quantize **all** linear weights of
# the teacher, without any training (post-training quantization), by your function `quantize_rows`. **Before you look**:
# from how many bits on does the accuracy collapse?

# %% name="post-training" tags=["nbval-ignore-output"]
post_training = figures.post_training(quantize_rows, teacher, task)
post_training

# %% name="post-training-seen"
figures.post_training_seen(post_training)

# %% [markdown] lang="fr"
# En 8 bits, et même en 4, ce petit modèle ne perd presque rien. En 2 bits, il ne reste que −1, 0 et 1, et il perd pied.
# Un fine-tuning peut-il le sauver ? Il faudrait dériver à travers l’arrondi, dont la dérivée est nulle presque partout.
# L’**estimateur straight-through** (Bengio et al., 2013) fait comme si l’arrondi n’existait pas au retour : la passe
# avant voit les poids arrondis, la passe arrière met à jour des poids flottants, que l’on garde. C’est la
# *quantization-aware training* (QAT).
#
# ### Exercice 6 — un gradient à travers un arrondi
#
# Complétez `Round.backward`, puis `fake_quantize` : diviser par l’échelle, arrondir par `Round.apply`, borner entre
# $-(2^{b-1}-1)$ et $2^{b-1}-1$ pour b bits, multiplier par l’échelle. Un poids borné ne doit recevoir aucun gradient :
# celui de `clamp` s’en charge.

# %% [markdown] lang="en"
# In 8 bits, and even in 4, this small model loses next to nothing. In 2 bits only −1, 0 and 1 are left, and it is lost.
# Can a fine-tuning save it? One would have to differentiate through the rounding, whose derivative is zero nearly
# everywhere. The **straight-through estimator** (Bengio et al., 2013) pretends on the way back that there is no
# rounding: forward sees rounded weights, backward updates the weights in floats, which are kept. That is
# quantization-aware training (QAT).
#
# ### Exercise 6 — a gradient through a rounding
#
# Complete `Round.backward`, then `fake_quantize`: divide by the scale, round by `Round.apply`, clamp between
# $-(2^{b-1}-1)$ and $2^{b-1}-1$ for b bits, multiply by the scale. A weight that is clamped must get no gradient: that
# of `clamp` sees to it.


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
# Deux époques de fine-tuning, en 2 bits, avec votre fonction, que `torch.nn.utils.parametrize` applique au poids de
# chaque couche linéaire :

# %% [markdown] lang="en"
# Two epochs of fine-tuning, in 2 bits, with your function, which `torch.nn.utils.parametrize` applies to the weight of
# each linear layer:

# %% name="aware-training" tags=["nbval-ignore-output"]
aware_training = figures.aware_training(quantize_rows, fake_quantize, teacher, task)
figures.aware_training_table(aware_training)

# %% name="aware-training-seen"
figures.aware_training_seen(aware_training)

# %% [markdown] lang="fr"
# Seize fois moins de bits par poids, et presque tout est revenu. Retenez l’ordre : arrondir d’abord, mesurer, et
# n’entraîner que si cela ne suffit pas.
#
# ## 3. Élaguer
#
# Si un poids arrondi à deux bits suffit souvent, certains ne servent-ils à rien ? Le critère le plus simple est aussi
# l’un des meilleurs : enlever les plus petits.
#
# ### Exercice 7 — les plus petits poids partent
#
# `weights` est la liste des poids de toutes les couches, `sparsity` la part à enlever **sur l’ensemble** : un seul
# seuil pour toutes. Renvoyez la liste des masques, de mêmes formes, 1 pour un poids gardé et 0 pour un poids enlevé. On
# enlève exactement `round(sparsity × nombre total)` poids, même à égalité.

# %% [markdown] lang="en"
# A sixteenth of the bits per weight, and nearly everything is back. Remember the order: round first, measure, and train
# only if that is not enough.
#
# ## 3. Prune
#
# If a weight rounded to two bits will often do, are some of no use at all? The simplest criterion is also one of the
# best: remove the smallest.
#
# ### Exercise 7 — the smallest weights go
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
# Votre fonction, appliquée au professeur (`pruned`, dans
# [figures_prune.py](../../dlojz/labs/lab11_compression/figures_prune.py), comme les entraînements qui suivent) : d’un
# coup ; puis avec deux époques de fine-tuning, les masques maintenus par `torch.nn.utils.prune` ; et enfin appelée sur
# une couche à la fois, pour que chacune perde la même part. **Avant de regarder** : où l’exactitude tombe-t-elle, et
# lequel des deux derniers vaut mieux ?

# %% [markdown] lang="en"
# Your function, applied to the teacher (`pruned`, in
# [figures_prune.py](../../dlojz/labs/lab11_compression/figures_prune.py), as the trainings that follow): at once; then
# with two epochs of fine-tuning, the masks held by `torch.nn.utils.prune`; and finally called on one layer at a time,
# so that each loses the same share. **Before you look**: where does the accuracy fall, and which of the last two is
# better?

# %% name="pruned" tags=["nbval-ignore-output"]
pruned = figures_prune.pruned(global_masks, teacher, task)
pruned

# %% name="pruned-seen"
figures_prune.pruned_seen(pruned)

# %% [markdown] lang="fr"
# D’un coup, 30 % des poids ne manquent à personne. Mais pourquoi le seuil commun échoue-t-il à 80 %, même après
# fine-tuning ? Regardez ce que chaque sorte de couche garde :

# %% [markdown] lang="en"
# At once, nobody misses 30% of the weights. But why does the common threshold fail at 80%, even fine-tuned? Look at
# what each kind of layer keeps:

# %% name="who-keeps" tags=["nbval-ignore-output"]
figures_prune.who_keeps(global_masks, teacher)

# %% [markdown] lang="fr"
# Le classifieur perd presque **tout** : ses poids sont petits par leur initialisation, non parce qu’ils sont inutiles,
# et le seuil commun compare ce qui n’est pas comparable. La preuve : refaisons l’élagage à 80 %, avec le même
# fine-tuning, d’abord classifieur compris, puis en le laissant dense.

# %% [markdown] lang="en"
# The classifier loses nearly **everything**: its weights are small because of how they began, not because they are
# useless, and the common threshold compares what cannot be compared. The proof: let us prune to 80% again, with the
# same fine-tuning, first with the classifier, then leaving it dense.

# %% name="spared"
figures_prune.spared(global_masks, teacher, task)

# %% [markdown] lang="fr"
# La magnitude ne dit l’importance qu’entre poids de même échelle.
#
# On peut aussi enlever peu à peu, pendant que le modèle apprend. Zhu et Gupta (2017) proposent une cubique, rapide au
# début, quand il y a beaucoup de poids superflus, puis de plus en plus lente :
#
# $$s_t = s_f + (s_i - s_f) \left(1 - \frac{t - t_0}{n \, \Delta t}\right)^3$$
#
# La part de zéros va de $s_i$ à $s_f$, en $n$ renouvellements des masques espacés de $\Delta t$ pas, à partir du pas
# $t_0$. Jusqu’à 90 %, couche par couche, en trois époques, puis en neuf ([masks.py](../../dlojz/compress/masks.py)) ;
# la figure montre la plus courte. **Avant de regarder** : fera-t-on mieux qu’en enlevant les mêmes 90 % d’un coup,
# avant autant d’époques ?

# %% [markdown] lang="en"
# Magnitude tells importance among weights of one scale only.
#
# One can also remove little by little, while the model learns. Zhu and Gupta (2017) suggest a cubic, fast at first,
# while there are many superfluous weights, then slower and slower:
#
# $$s_t = s_f + (s_i - s_f) \left(1 - \frac{t - t_0}{n \, \Delta t}\right)^3$$
#
# The share of zeros goes from $s_i$ to $s_f$, in $n$ renewals of the masks that are $\Delta t$ steps apart, from step
# $t_0$ on. Up to 90%, layer by layer, within three epochs, then within nine
# ([masks.py](../../dlojz/compress/masks.py)); the figure shows the shorter one. **Before you look**: will it do better
# than to remove the same 90% at once, before as many epochs?

# %% name="gradual" tags=["nbval-ignore-output"]
gradual = figures_prune.gradual(teacher, task)
gradual

# %% name="gradual-table" tags=["nbval-ignore-output"]
gradual.table()

# %% name="gradual-seen"
gradual.seen()

# %% [markdown] lang="fr"
# Pas en trois époques : elles ne laissent pas assez de pas pour se remettre de chaque coupe. Avec trois fois plus de
# pas, l’écart est comblé ; et Zhu et Gupta en laissent bien davantage. Une bonne méthode hors de ses conditions n’en
# est plus une ; d’où l’intérêt d’un témoin.
#
# ### Exercice 8 — le ticket gagnant
#
# Faut-il donc entraîner le grand réseau pour trouver le petit ? Selon l’**hypothèse du ticket gagnant** (Frankle et
# Carbin, 2019), le grand contient dès son initialisation un sous-réseau qui, entraîné **seul et depuis le début**,
# atteint la même exactitude. On le cherche par tours : entraîner ; enlever les plus petits poids ; ramener les autres à
# leur valeur **de départ** ; recommencer.
#
# Écrivez la fin d’un tour, pour une couche. `start` contient les poids d’avant tout entraînement, `trained` ceux
# d’après, `mask` vaut 1 là où un poids est encore là. On enlève `round(rate × nombre de poids restants)` poids parmi
# ceux **qui restent**. Renvoyez le nouveau masque, et les poids du prochain départ, nuls là où le masque est nul.
# (`trained` n’est pas forcément nul là où `mask` l’est.)

# %% [markdown] lang="en"
# Not in three epochs: they leave too few steps to recover from each cut. With three times as many steps the gap is
# closed; and Zhu and Gupta leave far more. A good method outside of its conditions is no longer one; hence the worth of
# a control.
#
# ### Exercise 8 — the winning ticket
#
# Must the large network be trained, then, to find the small one? By the **lottery ticket hypothesis** (Frankle and
# Carbin, 2019), the large one contains from its initialisation a sub-network that, trained **alone and from the
# start**, reaches the same accuracy. It is looked for in rounds: train; remove the smallest weights; bring the others
# back to their value **at the start**; begin again.
#
# Write the end of a round, for one layer. `start` holds the weights before any training, `trained` those after it,
# `mask` is 1 where a weight is still there. `round(rate × number of weights that remain)` go, of those **that remain**.
# Return the new mask, and the weights of the next start, zero where the mask is. (`trained` need not be zero where
# `mask` is.)


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
# Deux tours avec votre fonction, sur `vit_mini`. Puis deux témoins ayant autant de zéros : le même masque avec d’autres
# poids de départ, et les mêmes poids sous un masque tiré au sort.

# %% [markdown] lang="en"
# Two rounds with your function, on `vit_mini`. Then two controls, as sparse: the same mask with other weights to start
# from, and the same weights under a mask drawn by lot.

# %% name="tickets" tags=["nbval-ignore-output"]
figures_prune.tickets(next_ticket, task)

# %% [markdown] lang="fr"
# Le ticket fait mieux que les deux témoins : ni le masque seul, ni les poids seuls n’expliquent sa chance. Il n’égale
# pas tout à fait le réseau entier (une image vaut 0,3 point) : deux tours qui enlèvent chacun 60 %, c’est brutal. Une
# graine ne prouve rien, et sur de plus grands modèles il faut ramener les poids non au départ, mais à un pas proche du
# départ (Frankle et al., 2020). Plusieurs graines, et une exactitude selon la part de zéros :
#
# ```bash
# python benchmarks/lottery_ticket.py --seeds 5 --out lottery
# ```
#
# ### Combien de temps gagné ?
#
# **Votre prédiction.** Une couche dense multiplie 64 lignes par une matrice 1 024 × 1 024, dont on annule neuf poids
# sur dix. Si la couche pleine prend 1, combien prend celle-ci ?

# %% [markdown] lang="en"
# The ticket does better than both controls: neither the mask alone nor the weights alone explain its luck. It does not
# quite equal the whole network (one image is 0.3 points): two rounds that remove 60% each are brutal. One seed proves
# nothing, and in larger models weights must be brought back not to the start, but to a step near it (Frankle et
# al., 2020). Several seeds, and accuracy by the share of zeros:
#
# ```bash
# python benchmarks/lottery_ticket.py --seeds 5 --out lottery
# ```
#
# ### How much time is gained?
#
# **Your prediction.** A dense layer multiplies 64 rows by a matrix of 1,024 × 1,024, nine weights of ten of which
# become zero. If the full layer takes 1, how much does this one take?

# %% name="predict-masked" stub="value"
lab.predict(
    "masked-time",
    ### BEGIN SOLUTION
    1,
    ### END SOLUTION
)

# %% name="masked"
picture, measured = figures_prune.masked_ratio()

# %% name="reveal-masked" tags=["nbval-ignore-output"]
lab.reveal("masked-time", measured)

# %% [markdown] lang="fr"
# On ne gagne rien : le processeur multiplie par zéro comme par n’importe quoi. Un format creux (CSR) saute les zéros,
# mais il doit lire où sont les autres poids. Voici la même couche dans les deux formats ; le titre dit à partir de
# quelle part de zéros CSR l’emporte. La petite table le dit pour **une seule** ligne à multiplier, au lieu de 64.

# %% [markdown] lang="en"
# Nothing is gained: the processor multiplies by zero as by anything else. A sparse format (CSR) skips the zeros, but
# must read where the other weights are. Here is the same layer in both formats; the title says from which share of
# zeros on CSR wins. The small table says it for **a single** row to multiply, instead of 64.

# %% name="masked-figure" tags=["nbval-ignore-output"]
picture

# %% name="break-even" tags=["nbval-ignore-output"]
figures_prune.break_even()

# %% [markdown] lang="fr"
# Laissés dans un tenseur dense, des zéros au hasard ne font gagner que de la place sur le disque. En CSR, sur ce
# processeur, ils font gagner du temps au-delà de ce seuil ; et il en faut davantage quand il n’y a qu’une ligne à
# multiplier.
#
# ### Exercice 9 — deux sur quatre
#
# Un motif **régulier**, lui, se câble. Depuis l’A100, les GPU de NVIDIA multiplient deux fois plus vite une matrice
# dont tout groupe de **quatre poids consécutifs** d’une ligne a deux zéros : le motif **2:4** (Mishra et al., 2021).
#
# `weight` est de forme (sorties, entrées), les entrées étant un multiple de 4. Renvoyez un masque de même forme, qui
# garde dans chaque groupe les deux plus grandes valeurs absolues, exactement deux, même à égalité.

# %% [markdown] lang="en"
# Left in a dense tensor, zeros at random save room on the disk only. In CSR, on this processor, they gain time beyond
# that share; and it takes more of them where there is only one row to multiply.
#
# ### Exercise 9 — two of four
#
# A **regular** pattern can be wired. Since the A100, NVIDIA's GPUs multiply twice as fast by a matrix in which every
# group of **four consecutive weights** of a row has two zeros: the **2:4** pattern (Mishra et al., 2021).
#
# `weight` has the shape (outputs, inputs), the inputs being a multiple of 4. Return a mask of the same shape, which
# keeps the two largest magnitudes of every group, exactly two, even where some are equal.


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
# ### Exercice 10 — des poids coupés qui peuvent revenir
#
# Le masque du premier jour n’est pas forcément le bon. Entraînons donc des poids **denses** à travers le masque,
# recalculé à chaque pas : la passe avant voit `mask * weight`, et le gradient traverse le masque, comme il traversait
# l’arrondi. Mais les poids coupés errent alors sans retenue, et le masque change sans cesse. SR-STE (Zhou et al., 2021)
# les rappelle vers zéro : il ajoute à leur gradient `decay` × le poids.
#
# `gradient` est celui des poids masqués. Renvoyez celui des poids denses.

# %% [markdown] lang="en"
# ### Exercise 10 — pruned weights that may come back
#
# The mask of the first day need not be the right one. So let us train **dense** weights through the mask, computed anew
# at every step: forward sees `mask * weight`, and the gradient passes straight through the mask, as it did through the
# rounding. But then pruned weights wander without restraint, and the mask changes all the time. SR-STE (Zhou et al.,
# 2021) calls them back to zero: it adds `decay` × the weight to their gradient.
#
# `gradient` is that of the masked weights. Return that of the dense ones.


# %% name="sr-ste"
def sr_ste(weight, mask, gradient, decay):
    ### BEGIN SOLUTION
    return gradient + decay * (1 - mask) * weight
    ### END SOLUTION


lab.check("sr-ste", sr_ste)

# %%
# lab.hint("sr-ste")

# %% [markdown] lang="fr"
# Vos deux fonctions sur le professeur : 2:4 d’un coup, puis deux époques avec un masque figé, et deux avec SR-STE. La
# dernière colonne compte les places gardées à la fin qui ne l’étaient pas au début.

# %% [markdown] lang="en"
# Your two functions on the teacher: 2:4 at once, then two epochs with a mask that stays, and two with SR-STE. The last
# column counts the places kept in the end that were not at the beginning.

# %% name="refined" tags=["nbval-ignore-output"]
figures_prune.refined(two_of_four, sr_ste, teacher, task)

# %% [markdown] lang="fr"
# En partant d’un modèle déjà entraîné, peu de places changent, et figer le masque suffit. SR-STE est fait pour
# entraîner **depuis le début**.
#
# ### Exercice 11 — un autre ordre, la même sortie
#
# Le hasard a voulu que certains groupes de quatre aient trois grands poids : 2:4 en sacrifie un. On peut changer les
# groupes sans rien changer au modèle. Dans un MLP, le numéro d’une unité cachée ne veut rien dire : déplaçons-la dans
# les deux couches à la fois.
#
# `expand` (cachées, entrées) et `bias` (cachées) sont ceux de la première couche, `project` (sorties, cachées) ceux de
# la seconde. L’unité `order[i]` vient à la place i. Renvoyez les trois tenseurs.

# %% [markdown] lang="en"
# Starting from a model that is trained already, few places change, and a mask that stays is enough. SR-STE is
# meant for training **from the start**.
#
# ### Exercise 11 — another order, the same output
#
# By chance some groups of four have three large weights: 2:4 sacrifices one. The groups can be changed without changing
# the model at all. In an MLP the number of a hidden unit means nothing: let us move it in both layers at once.
#
# `expand` (hidden, inputs) and `bias` (hidden) are those of the first layer, `project` (outputs, hidden) that of the
# second. Unit `order[i]` comes to place i. Return the three tensors.


# %% name="permutation"
def reorder(expand, bias, project, order):
    ### BEGIN SOLUTION
    return expand[order], bias[order], project[:, order]
    ### END SOLUTION


lab.check("permutation", reorder)

# %%
# lab.hint("permutation")

# %% [markdown] lang="fr"
# Le paquet cherche un bon ordre, en répartissant au mieux les groupes deux à deux
# ([permutations.py](../../dlojz/compress/permutations.py)) ; votre fonction l’applique. La sortie est-elle la même, à
# 10⁻⁴ près ?

# %% [markdown] lang="en"
# The package looks for a good order, distributing the groups two by two as well as can be
# ([permutations.py](../../dlojz/compress/permutations.py)); your function applies it. Is the output the same, to 10⁻⁴?

# %% name="in-order" tags=["nbval-ignore-output"]
figures_prune.in_order(two_of_four, reorder, teacher, task.held_out_NCHW[:64])

# %% [markdown] lang="fr"
# L’attention se prête au même jeu : Q·Kᵀ est une somme sur les colonnes d’une tête ; si l’on échange celles de Q, et
# celles de K de la même façon, elle ne change pas. Mais pas au hasard : échanger Q seul casse tout.

# %% [markdown] lang="en"
# Attention lends itself to the same game: Q·Kᵀ is a sum over the columns of a head; exchange those of Q, and those of K
# in the same way, and it does not change. But not at random: to exchange Q alone breaks everything.

# %% name="query-key"
from dlojz.compress.permutations import permute_query_key

images, order = task.held_out_NCHW[:64], torch.randperm(32, generator=torch.Generator().manual_seed(0))
both, alone = copy.deepcopy(teacher), copy.deepcopy(teacher)
permute_query_key(both.get_submodule("blocks.1"), 0, order)
with torch.no_grad():
    # head by head: 32 rows of Q, 32 of K, 32 of V // tête par tête : 32 lignes de Q, 32 de K, 32 de V
    rows = alone.get_submodule("blocks.1").qkv.weight
    rows[:32] = rows[:32][order]
figures_prune.same_outputs(teacher, both, alone, images)

# %% [markdown] lang="fr"
# ## 4. Tout sur un même tableau
#
# Prenons quelques méthodes du paquet, toutes parties du même professeur : une distillation, INT8 par les noyaux de
# torch, INT4, 2 bits avec QAT, et les élagages. Chaque fichier est **écrit**, puis pesé ; les modèles répondent **tour
# à tour** avec le professeur, si bien qu’un ralentissement de la machine les touche tous
# ([board.py](../../dlojz/compress/board.py)).
#
# **Avant de regarder** : lesquelles répondront plus vite que le professeur, et lesquelles ne seront que plus petites ?

# %% [markdown] lang="en"
# ## 4. All on one board
#
# Let us take some methods of the package, all from the same teacher: a distillation, INT8 by torch's own kernels, INT4,
# 2 bits with QAT, and the prunings. Each file is **written**, then weighed; the models answer **in turns** with the
# teacher, so that a machine that slows down slows all of them ([board.py](../../dlojz/compress/board.py)).
#
# **Before you look**: which of them will answer faster than the teacher, and which will only be smaller?

# %% name="board" tags=["nbval-ignore-output"]
from dlojz.compress.board import BoardRequest, make_board
from dlojz.display.figures.compress_figures import compress_figure
from dlojz.labs.kit.figures import Picture

names = ("distill_soft", "torch_int8_dynamic", "int4_weight_only", "qat_2bit", "magnitude_layer", "two_to_four")
request = BoardRequest(
    methods=names,
    options={"distill_soft": {"epochs": 5}},
    settings=Settings(epochs=5),
    folder=runs_root() / "teachers",
)
board = make_board(request, task)
Picture(compress_figure(board))

# %% name="board-table" tags=["nbval-ignore-output"]
figures.board_table(board)

# %% name="board-bytes"
figures.files_as_predicted(board)

# %% [markdown] lang="fr"
# **Expliquez.** Quelles méthodes gagnent du temps, lesquelles de la place seulement, et pourquoi ?
#
# <details><summary>Réponse</summary>
#
# - En **temps** : moins de couches (la distillation), ou des noyaux faits pour les entiers (INT8 de torch).
# - En **place** seulement : INT4 et 2 bits reviennent en flottants avant chaque produit, et les zéros se multiplient
#   comme le reste. Le motif 2:4 attend, lui, un GPU qui sache s’en servir.
#
# </details>
#
# Une méthode est sur le **front de Pareto** quand aucune autre n’est à la fois aussi exacte, aussi petite et aussi
# rapide. Les méthodes se composent aussi : rien n’interdit de quantifier un étudiant. Le même tableau, avec d’autres
# méthodes et plusieurs graines :
#
# ```bash
# dlojz compress --seeds 3 --figure board.png
# ```
#
# ## 5. En vraie grandeur
#
# Tout ce que vous venez d’écrire vaut sur un grand modèle. Ce qui change, c’est ce que le matériel récompense. Une
# couche de ViT-L/16 (1 024 → 4 096), par exemple : sur un GPU depuis l’A100, la cellule la chronomètre aussi au format
# 2:4 ; sur un CPU, elle s’en tient aux formes que torch sait y multiplier.

# %% [markdown] lang="en"
# **Explain.** Which methods save time, which only room, and why?
#
# <details><summary>Answer</summary>
#
# - **Time**: fewer layers (distillation), or kernels made for whole numbers (torch's INT8).
# - **Room** only: INT4 and 2 bits return to floats before each product, and zeros are multiplied like the rest. The 2:4
#   pattern waits for a GPU that can use it.
#
# </details>
#
# A method is on the **Pareto front** where no other one is as accurate, as small and as fast at once. Methods can be
# combined, too: nothing forbids to quantize a student. The same board, with other methods and several seeds:
#
# ```bash
# dlojz compress --seeds 3 --figure board.png
# ```
#
# ## 5. At full size
#
# All that you have written holds for a large model. What changes is what the hardware rewards. Take a layer of ViT-L/16
# (1,024 → 4,096): on a GPU since the A100, the cell also times it in the 2:4 format; on a CPU it keeps to the forms
# that torch can multiply there.

# %% name="full-size" tags=["nbval-ignore-output"]
device = "cuda" if torch.cuda.is_available() else "cpu"
rows = 8192 if device == "cuda" else 64
picture, _ = figures_prune.masked_ratio(outputs=4096, inputs=1024, rows=rows, device=device, rounds=12)
picture

# %% [markdown] lang="fr"
# Pour la quantification, les mêmes mesures sur les couches de ViT-S/16 et ViT-B/16, avec les noyaux INT8 de torch et de
# torchao (FP8 et INT4 aussi, là où ils existent) :
#
# ```bash
# python benchmarks/int8_speed.py --rounds 20
# python benchmarks/sparse_speed.py --rounds 50
# ```

# %% [markdown] lang="en"
# For quantization, the same measurements on the layers of ViT-S/16 and ViT-B/16, with the INT8 kernels of torch and of
# torchao (FP8 and INT4 too, where they exist):
#
# ```bash
# python benchmarks/int8_speed.py --rounds 20
# python benchmarks/sparse_speed.py --rounds 50
# ```

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Deux boucles d’entraînement en vue de l’inférence : l’une entraîne avec des poids arrondis sur 8 bits (`--quantize`),
# l’autre en retire une part après la première époque (`--prune 0.5`). Continuez dans votre `train.py`, ou laissez
# `dlojz labs script 11 un_autre_dossier` écrire ce par quoi ce TP commence. Jugez-le par
# `dlojz labs judge 11 my_training/train.py`.
#
# À regarder : au plus 255 valeurs différentes par matrice, la moitié nulles à la fin, et une perte qui baisse encore.
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
# Two training loops for inference: one that trains with weights rounded to 8 bits (`--quantize`), one that removes a
# share of them after the first epoch (`--prune 0.5`). Go on in your `train.py`, or let
# `dlojz labs script 11 another_folder` write what this lab begins with. Judge it by
# `dlojz labs judge 11 my_training/train.py`.
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


# %% [markdown] lang="fr"
# ## Bilan
#
# | | distillation | quantification | élagage |
# |--|--|--|--|
# | on change | l’architecture | le nombre de bits | le nombre de poids non nuls |
# | il faut | un entraînement, le professeur, des images | rien, ou du calibrage ; QAT à peu de bits | un fine-tuning |
# | gain de temps | moins de couches, comme ici | noyaux entiers | 2:4 et le bon GPU, ou CSR si presque tout est nul |
# | gain de place | oui | par poids, ÷ 4 (INT8), 8 (INT4), 16 (2 bits) | selon la part de zéros, places comprises |
# | le piège | oublier le témoin : l’étudiant seul | un extrême qui élargit tous les pas | un seuil pour deux échelles |
#
# Le fichier entier d’un modèle quantifié gagne moins que ses poids : échelles, biais et positions y restent en fp32
# (voyez le tableau de la partie 4).

# %% [markdown] lang="en"
# ## Summary
#
# | | distillation | quantization | pruning |
# |--|--|--|--|
# | what changes | the architecture | the number of bits | the number of weights that are not zero |
# | what it takes | a training, the teacher, images | nothing, or calibration; QAT with few bits | a fine-tuning |
# | gain in time | fewer layers, as here | integer kernels | 2:4 and the right GPU, or CSR if nearly all is zero |
# | gain in room | yes | per weight, ÷ 4 (INT8), 8 (INT4), 16 (2 bits) | by the share of zeros, their places included |
# | the trap | to forget the control: the student alone | one extreme widens all steps | one threshold for two scales |
#
# The whole file of a quantized model gains less than its weights: scales, biases and positions stay in fp32 there (see
# the table of part 4).

# %%
lab.progress()
