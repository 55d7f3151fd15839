# %% [markdown] lang="fr"
# # TP 02 — Empreinte mémoire
#
# « Est-ce que ça tient ? » Vous y répondez ici **avant** de lancer quoi que ce soit, puis vous mesurez et comparez.
#
# À la fin, vous saurez :
#
# - dire combien d’octets coûte un paramètre, et d’où sortent les 12, 16, 18, 20 ou 24 octets que l’on cite partout ;
# - mesurer ce qui remplit la mémoire d’un entraînement ;
# - compter les activations d’une couche, à la main puis par une trace, et expliquer la différence ;
# - trouver le plus grand batch qui tienne sur un GPU donné ;
# - montrer pourquoi le *Data Parallelism* ne sauve pas un modèle trop gros ;
# - échanger du temps contre de la mémoire : points de contrôle d’activation, déchargement (*offload*), ou les deux.
#
# Comptez deux heures. Ψ désigne le nombre de paramètres ; `s` le nombre de tokens, `b` la taille du micro-batch, `h` la
# largeur du modèle, `a` le nombre de têtes d’attention. 1 Gio = 2³⁰ octets.

# %% [markdown] lang="en"
# # Lab 02 — Memory footprint
#
# "Does it fit?" Here you answer **before** you run anything, then you measure and compare.
#
# By the end you can:
#
# - tell how many bytes a parameter costs, and where the figures that everybody quotes come from: 12, 16, 18, 20 or 24
#   bytes;
# - measure what fills the memory of a training;
# - count the activations of a layer, by hand, then by a trace, and explain the difference;
# - find the largest batch that fits on a given GPU;
# - show why data parallelism does not save a model that is too big;
# - trade time for memory: activation checkpointing, offloading, or both together.
#
# Allow two hours. Ψ is the number of parameters; `s` the number of tokens, `b` the size of the micro-batch, `h` the
# width of the model, `a` the number of attention heads. 1 GiB = 2³⁰ bytes.

# %% name="setup"
import time
from math import floor, log2
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dlojz
from dlojz import hardware, labs, models
from dlojz.base.language import decimal, format_bytes, percent, yes_no
from dlojz.base.machine import keep_freed_memory
from dlojz.display.style import category_label
from dlojz.labs.lab02_memory import figures
from dlojz.labs.lab02_memory.exercises import asked, states_table
from dlojz.planner import levers
from dlojz.planner.activation_budget import plan_activations
from dlojz.prediction import rules_of_thumb
from dlojz.prediction.forecast import forecast
from dlojz.prediction.trace import trace

lab = labs.start("02")

# %% [markdown] lang="fr"
# ## 1. Les états : des octets par paramètre
#
# D’un pas à l’autre, un entraînement garde pour chaque paramètre :
#
# - le **poids** ;
# - son **gradient**, que remplit la passe arrière ;
# - les **moments** de l’optimiseur, ici en fp32 : aucun pour SGD, un pour SGD avec *momentum*, deux pour AdamW ;
# - en précision mixte, une **copie maître** du poids, en fp32. C’est elle que l’optimiseur met à jour : bf16 n’a que 8
#   bits significatifs, et une mise à jour mille fois plus petite que le poids y disparaîtrait à l’arrondi.
#
# Tout cela forme les **états du modèle**. Quatre façons de choisir les précisions, toutes courantes :
#
# | `precision` | poids | gradient | copie maître |
# |--|--|--|--|
# | `"fp32"` | fp32 | fp32 | — |
# | `"autocast"` (`torch.autocast`) | fp32 ; converti à la volée pour les produits de matrices | fp32 | — |
# | `"bf16"` (précision mixte de ZeRO) | bf16 | bf16 | fp32 |
# | `"bf16_fp32_gradients"` (Megatron) | bf16 | fp32 | fp32 |
#
# (Hors de l’exercice : **bf16 pur**, 8 octets, où l’arrondi perd les petites mises à jour ; et AdamW en **8 bits**,
# dont les deux moments prennent un octet chacun.)
#
# ### Exercice 1 — les octets par paramètre
#
# Renvoyez les octets que prend un paramètre, tous états confondus. `optimizer` vaut `"sgd"`, `"momentum"` ou `"adamw"`.

# %% [markdown] lang="en"
# ## 1. States: bytes per parameter
#
# From one step to the next, a training keeps for each parameter:
#
# - the **weight**;
# - its **gradient**, which the backward pass fills;
# - the **moments** of the optimizer, here in fp32: none for SGD, one for SGD with momentum, two for AdamW;
# - in mixed precision, a **master copy** of the weight, in fp32. That is what the optimizer updates: bf16 has 8
#   significant bits only, and an update a thousand times smaller than the weight would be rounded away.
#
# All of this makes up the **model states**. Four ways to choose the precisions, all in use:
#
# | `precision` | weight | gradient | master copy |
# |--|--|--|--|
# | `"fp32"` | fp32 | fp32 | — |
# | `"autocast"` (`torch.autocast`) | fp32; cast on the fly for matrix products | fp32 | — |
# | `"bf16"` (ZeRO's mixed precision) | bf16 | bf16 | fp32 |
# | `"bf16_fp32_gradients"` (Megatron) | bf16 | fp32 | fp32 |
#
# (Left out of the exercise: **pure bf16**, 8 bytes, in which rounding loses small updates; and **8-bit** AdamW, whose
# two moments take one byte each.)
#
# ### Exercise 1 — bytes per parameter
#
# Return the bytes that one parameter takes, all states together. `optimizer` is `"sgd"`, `"momentum"` or `"adamw"`.


# %% name="bytes-per-parameter"
def bytes_per_parameter(precision, optimizer):
    ### BEGIN SOLUTION
    weight, gradient, master = {
        "fp32": (4, 4, 0),
        "autocast": (4, 4, 0),
        "bf16": (2, 2, 4),
        "bf16_fp32_gradients": (2, 4, 4),
    }[precision]
    moments = {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]
    return weight + gradient + master + 4 * moments
    ### END SOLUTION


lab.check("bytes-per-parameter", bytes_per_parameter)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez ; deux exécutions donnent le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment; running it twice gives the second hint.

# %%
# lab.hint("bytes-per-parameter")

# %% [markdown] lang="fr"
# **Votre prédiction.** CoAtNet-7, dont `models.describe("coatnet_7").parameters` donne le nombre de paramètres, en
# précision mixte (`"bf16"`) avec AdamW : combien d’octets d’états ? La cellule compare votre valeur au calcul du
# paquet, tenseur par tenseur.

# %% [markdown] lang="en"
# **Your prediction.** CoAtNet-7, whose parameters `models.describe("coatnet_7").parameters` counts, in mixed precision
# (`"bf16"`) with AdamW: how many bytes of states? The cell compares your figure with what the package computes, tensor
# by tensor.

# %% name="predict-coatnet-7-states" stub="value"
lab.predict(
    "coatnet-7-states",
    ### BEGIN SOLUTION
    bytes_per_parameter("bf16", "adamw") * models.describe("coatnet_7").parameters,
    ### END SOLUTION
)

# %% name="reveal-coatnet-7-states"
from dlojz.prediction.shapes import model_shapes
from dlojz.prediction.states import predict_states

mixed = dlojz.RunConfig.of(model="coatnet_7", data="synthetic", precision="bf16", engine="deepspeed")
lab.reveal("coatnet-7-states", predict_states(mixed, model_shapes(mixed), rank=0).states_bytes)

# %% [markdown] lang="fr"
# L’écart, ce sont les statistiques des *BatchNorm*, qui ne sont pas des paramètres.
#
# On lit partout des règles, de 12 à 24 octets par paramètre : elles ne comptent pas les mêmes choses. Les 12 octets de
# l’optimiseur et les 16 de la précision mixte viennent de ZeRO, les 18 de Megatron-LM, les 20 d’Amazon SageMaker et de
# ZeRO-Infinity ; les 24, d’un tableau qui circule dans les cours. (Références : `rule.sources`.)

# %% [markdown] lang="en"
# The gap comes from the statistics of the batch norms, which are not parameters.
#
# Rules are quoted everywhere, from 12 to 24 bytes per parameter: they do not count the same things. The 12 bytes of the
# optimizer and the 16 of mixed precision come from ZeRO, the 18 from Megatron-LM, the 20 from Amazon SageMaker and
# ZeRO-Infinity; the 24, from a table shown in courses. (`rule.sources` has the references.)

# %% name="rules"
figures.rules_of_thumb()

# %% name="rules-sources"
for rule in rules_of_thumb.RULES.values():
    counted = " + ".join(str(part.bytes_per_parameter) for part in rule.parts)
    print(f"{rule.name:>12} = {counted}\n{'':>15}{rule.about()}")

# %% [markdown] lang="fr"
# **Expliquez.** Lesquelles retrouvez-vous avec votre fonction ? Celle des 24 octets ajoute aux états 8 octets
# « d’activations et de temporaires » *par paramètre* : nous verrons quand elle tombe juste.
#
# <details><summary>Réponse</summary>
#
# 12 (`momentum` en fp32), 16 (`adamw` en fp32 ou en bf16) et 18 (`adamw`, gradients en fp32). L’autre 12 n’est que la
# part de l’optimiseur dans les 16. Les 20 gardent chaque gradient deux fois, en 16 bits et en fp32.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** Which of them does your function reproduce? The 24-byte rule adds 8 bytes of "activations and
# temporaries" *per parameter* to the states: section 5 shows when it happens to be right.
#
# <details><summary>Answer</summary>
#
# 12 (`momentum` in fp32), 16 (`adamw` in fp32 or bf16) and 18 (`adamw`, gradients in fp32). The other 12 is only the
# optimizer's part of the 16. The 20 keep each gradient twice, in 16 bits and in fp32.
#
# </details>

# %% name="rules-found"
states_table(bytes_per_parameter)

# %% [markdown] lang="fr"
# Une diapositive du MIT donne « 24 Go en FP32, **12 Go en FP16** » pour un milliard de paramètres. Que dit votre
# fonction ? (En précision mixte, fp16 compte comme bf16.)

# %% [markdown] lang="en"
# An MIT slide gives "24 GB for FP32, **12 GB for FP16**" for a billion parameters. What does your function say? (In
# mixed precision, fp16 counts as bf16.)

# %% name="false-halving"
asked(lambda: {name: decimal(bytes_per_parameter(name, "adamw"), 0) + " GB // Go" for name in ("fp32", "bf16")})

# %% [markdown] lang="fr"
# Rien n’est divisé par deux : la copie maître et les moments restent en fp32. Seules les activations se réduisent.
#
# ### fp16 et la mise à l’échelle de la perte
#
# fp16 n’a que 5 bits d’exposant : sous 3 · 10⁻⁸, un gradient devient nul, au-dessus de 65 504, infini. On multiplie
# donc la perte par une **échelle**, puis on divise les gradients par elle ; s’ils débordent, on saute le pas et l’on
# divise l’échelle par deux, comme `torch.amp.GradScaler`.
#
# **Votre prédiction.** `largest` est le plus grand gradient d’un pas, sans échelle. En partant de 2³⁰, à quelle échelle
# l’entraînement commencera-t-il ? La cellule d’entraînement donne aussi les pas sautés, puis la part des gradients nuls
# aux échelles 2⁻¹⁴ et 1.

# %% [markdown] lang="en"
# Nothing is halved: the master copy and the moments stay in fp32. Activations alone shrink.
#
# ### fp16 and loss scaling
#
# fp16 has 5 bits of exponent only: below 3 · 10⁻⁸ a gradient becomes zero, above 65,504 infinite. So the loss is
# multiplied by a **scale**, then the gradients are divided by it; if they overflow, the step is skipped and the scale
# is halved, as `torch.amp.GradScaler` does.
#
# **Your prediction.** `largest` is the largest gradient of one step, without a scale. Beginning at 2³⁰, at which scale
# will the training start? The training cell also gives the steps skipped, then the share of gradients that are zero at
# the scales 2⁻¹⁴ and 1.

# %% name="half-precision"
torch.manual_seed(0)
inputs, targets = torch.randn(512, 64), torch.randn(512, 64)
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
masters = [parameter.detach().clone() for parameter in model.parameters()]  # fp32
model.half()


def gradients(scale):
    model.zero_grad()
    (scale * F.mse_loss(model(inputs.half()).float(), targets)).backward()
    return [parameter.grad.float() for parameter in model.parameters()]


largest = max(gradient.abs().max().item() for gradient in gradients(1.0))
print(decimal(largest, 3))

# %% name="predict-loss-scale" stub="value"
lab.predict(
    "loss-scale",
    ### BEGIN SOLUTION
    2 ** floor(log2(65504 / largest)),
    ### END SOLUTION
)

# %% name="loss-scaling"
scale, scales = 2.0**30, []
for _step in range(16):
    scaled = gradients(scale)
    if all(gradient.isfinite().all() for gradient in scaled):
        scales.append(scale)
        for parameter, master, gradient in zip(model.parameters(), masters, scaled, strict=True):
            master.sub_(0.5 * gradient / scale)
            parameter.data.copy_(master)  # rounded to fp16 // arrondi à fp16
    else:
        scale /= 2  # overflow: the step is skipped // débordement : le pas est sauté
print(f"2**{decimal(log2(scales[0]), 0)}, {16 - len(scales)}")
for power in (-14, 0):  # as small as late in a training // aussi petits qu’en fin d’entraînement
    zeros = torch.cat([gradient.flatten() for gradient in gradients(2.0**power)]) == 0
    print(f"2**{power}: {percent(zeros.float().mean(), 0)}")

# %% name="reveal-loss-scale"
lab.reveal("loss-scale", scales[0])

# %% [markdown] lang="fr"
# ## 2. En vrai : qu’est-ce qui remplit la mémoire ?
#
# La passe avant garde aussi des **activations**, tous les tenseurs dont la passe arrière aura besoin ; et chaque
# opération prend des **temporaires**, aussitôt rendus. Entraînons deux petits modèles : une sonde suit chaque tenseur,
# de son allocation à sa libération ([dispatch_trace.py](../../dlojz/train/dispatch_trace.py)).

# %% [markdown] lang="en"
# ## 2. For real: what fills the memory?
#
# The forward pass also keeps **activations**, all the tensors that the backward pass will need; and each operation
# takes **temporaries**, given back at once. Let us train two small models: a probe follows every tensor, from its
# allocation to its release ([dispatch_trace.py](../../dlojz/train/dispatch_trace.py)).

# %% name="run-small" tags=["nbval-ignore-output"]
coatnet = dlojz.run(model="coatnet_tiny", micro_batch=16, steps=6)
vit = dlojz.run(model="vit_tiny", micro_batch=16, steps=6)
vit

# %% [markdown] lang="fr"
# Les prédictions du tableau ne viennent d’aucune exécution : le modèle est suivi sur des tenseurs **factices** (*fake
# tensors*), qui ont une forme mais pas de mémoire ([trace.py](../../dlojz/prediction/trace.py)).

# %% [markdown] lang="en"
# The predictions in the table come from no run: the model is followed on **fake tensors**, which have a shape but no
# memory ([trace.py](../../dlojz/prediction/trace.py)).

# %% name="compare-small" tags=["nbval-ignore-output"]
dlojz.compare([coatnet, vit])

# %% [markdown] lang="fr"
# ### Exercice 2 — le pic
#
# La sonde donne la mémoire au fil du pas : `samples` est une liste d’instants, chacun un dictionnaire
# `{catégorie: octets}`. Renvoyez le **pic** : le plus grand nombre d’octets occupés à un même instant.

# %% [markdown] lang="en"
# ### Exercise 2 — the peak
#
# The probe gives the memory along the step: `samples` is a list of moments, each a dictionary `{category: bytes}`.
# Return the **peak**: the largest number of bytes held at one moment.


# %% name="peak"
def peak(samples):
    ### BEGIN SOLUTION
    return max(sum(sample.values()) for sample in samples)
    ### END SOLUTION


lab.check("peak", peak)

# %%
# lab.hint("peak")

# %% [markdown] lang="fr"
# Votre fonction retrouve-t-elle le pic que la sonde annonce pour `vit_tiny`, et la prédiction ?

# %% [markdown] lang="en"
# Does your function find the peak that the probe reports for `vit_tiny`, and the prediction?

# %% name="peak-measured"
samples = [sample.bytes_by_category for sample in vit.record.memory_timeline]
measured = vit.record.footprint().memory
predicted = forecast(vit.config).memory
asked(lambda: (peak(samples) == measured.peak_bytes, abs(peak(samples) / predicted.peak_bytes - 1) < 1e-3))

# %% name="peak-figure" tags=["nbval-ignore-output"]
figures.peak_and_maxima(samples)

# %% [markdown] lang="fr"
# Le pic est **inférieur** à la somme des maximums : au début de la passe arrière, toutes les activations sont là, mais
# presque aucun gradient. Avec un micro-batch de 64 au lieu de 16, que deviennent activations et états ?

# %% [markdown] lang="en"
# The peak is **less** than the sum of the maxima: at the beginning of the backward pass all activations are there, but
# hardly any gradient. With a micro-batch of 64 instead of 16, what becomes of activations and states?

# %% name="run-64" tags=["nbval-ignore-output"]
vit_64 = dlojz.run(model="vit_tiny", micro_batch=64, steps=6)
vit_64

# %% name="states-stay"
memory_64 = vit_64.record.footprint().memory
for batch, memory in ((16, measured), (64, memory_64)):
    print(batch, format_bytes(memory.activations_bytes), format_bytes(memory.states_bytes))

# %% [markdown] lang="fr"
# Les **états** dépendent du modèle et de l’optimiseur, pas des données ; les **activations** sont proportionnelles au
# batch. Il n’existe donc pas d’« octets d’activations par paramètre ».
#
# ## 3. Les activations d’une couche
#
# Que garde-t-on au juste ? Chaque opération garde ce dont **sa** passe arrière a besoin :
#
# | opération | ce qu’elle garde |
# |--|--|
# | couche linéaire | son entrée |
# | produit de deux activations | les deux |
# | softmax | son résultat |
# | GELU, *LayerNorm* | son entrée |
# | *dropout* | un masque, 1 octet par élément |
# | somme, découpage, changement de forme | rien |
#
# Un tenseur gardé par deux opérations n’occupe la mémoire qu’une fois. Voici une couche de transformer sans aucune
# fusion, comme chez Korthikanti et al. (2022).

# %% [markdown] lang="en"
# **States** depend on the model and on the optimizer, not on the data; **activations** are proportional to the batch.
# So there is no such thing as "bytes of activations per parameter".
#
# ## 3. The activations of one layer
#
# What exactly is kept? Each operation keeps what **its own** backward pass needs:
#
# | operation | what it keeps |
# |--|--|
# | linear layer | its input |
# | product of two activations | both |
# | softmax | its result |
# | GELU, layer norm | its input |
# | dropout | a mask, 1 byte per element |
# | sum, split, change of shape | nothing |
#
# A tensor that two operations keep is in memory once. Here is a transformer layer without any fusion, as in Korthikanti
# et al. (2022).


# %% name="layer"
class Layer(nn.Module):
    def __init__(self, h, a, fused=False):
        super().__init__()
        self.a, self.fused = a, fused
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.project = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.expand, self.shrink = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.softmax, self.gelu = nn.Softmax(dim=-1), nn.GELU()
        self.drop_scores, self.drop_attention, self.drop_mlp = nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):  # (b, s, h)
        q, k, v = (part.unflatten(-1, (self.a, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = self.attend(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.drop_attention(self.project(attended))
        return x + self.drop_mlp(self.shrink(self.gelu(self.expand(self.norm2(x)))))

    def attend(self, q, k, v):  # (b, a, s, h / a)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        # (b, a, s, s); dividing by a constant keeps nothing // (b, a, s, s) ; diviser par une constante ne garde rien
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return self.drop_scores(self.softmax(scores)) @ v


# %% [markdown] lang="fr"
# ### Exercice 3 — les octets qu’elle garde
#
# Tout est en bf16 (2 octets), sauf les masques (1 octet). Renvoyez le nombre d’octets que garde `Layer` avec
# `fused=False`. Suivez `forward` ligne à ligne, et comptez en unités de `s·b·h` et de `a·s²·b`, la taille des scores.

# %% [markdown] lang="en"
# ### Exercise 3 — the bytes it keeps
#
# Everything is in bf16 (2 bytes), except the masks (1 byte). Return the bytes that `Layer` keeps with `fused=False`.
# Follow `forward` line by line, and count in units of `s·b·h` and of `a·s²·b`, the size of the scores.


# %% name="block-activations"
def layer_bytes(s, b, h, a):
    ### BEGIN SOLUTION
    sbh, scores = s * b * h, a * s**2 * b
    # input, q and k, v, input of project, mask // entrée, q et k, v, entrée de project, masque
    attention = (2 + 4 + 2 + 2 + 1) * sbh + (2 + 1 + 2) * scores
    # inputs of expand, of GELU, of shrink, mask // entrées d’expand, de GELU, de shrink, masque
    mlp = (2 + 8 + 8 + 1) * sbh
    norms = 2 * 2 * sbh
    return attention + mlp + norms
    ### END SOLUTION


lab.check("block-activations", layer_bytes)

# %%
# lab.hint("block-activations")

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien d’octets pour `s = 1024`, `b = 4`, `h = 768`, `a = 12` ? La cellule donne aussi ce qui
# reste avec l’attention **fusionnée** : les scores et leur *dropout* ne sont jamais écrits en mémoire.

# %% [markdown] lang="en"
# **Your prediction.** How many bytes for `s = 1024`, `b = 4`, `h = 768`, `a = 12`? The cell also gives what is left
# with **fused** attention: scores and their dropout are never written to memory.

# %% name="predict-layer" stub="value"
s, b, h, a = 1024, 4, 768, 12
lab.predict(
    "layer-kept",
    ### BEGIN SOLUTION
    layer_bytes(s, b, h, a),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# `trace(module, entrée)` exécute les deux passes sur des tenseurs factices et relève ce qui reste vivant entre elles ;
# `on_gpu=True` applique ce qu’un GPU fait autrement (masques d’un octet, statistiques en fp32).

# %% [markdown] lang="en"
# `trace(module, input)` runs both passes on fake tensors and notes what stays alive between them; `on_gpu=True` applies
# what a GPU does differently (masks of one byte, statistics in fp32).

# %% name="reveal-layer"
with torch.device("meta"):
    x = torch.empty(b, s, h, dtype=torch.bfloat16)
    plain, fused = Layer(h, a), Layer(h, a, fused=True)
plain_trace = trace(plain, x, compute="bf16", on_gpu=True)
fused_trace = trace(fused, x, compute="bf16", on_gpu=True)
lab.reveal("layer-kept", plain_trace.saved_bytes)

# %% name="fused-bytes"
print(format_bytes(fused_trace.saved_bytes), format_bytes(34 * s * b * h))

# %% [markdown] lang="fr"
# **Expliquez.** La trace trouve un peu plus que la formule : la cellule donne l’écart en octets par token. Qui garde
# les 16 premiers ? Et les 48 autres, avec l’attention fusionnée ?

# %% [markdown] lang="en"
# **Explain.** The trace finds a little more than the formula: the cell gives the gap in bytes per token. What keeps the
# first 16? And the other 48, with fused attention?

# %% name="layer-gap"
asked(
    lambda: (
        round((plain_trace.saved_bytes - layer_bytes(s, b, h, a)) / (s * b)),
        round((fused_trace.saved_bytes - 34 * s * b * h) / (s * b)),
    )
)

# %% [markdown] lang="fr"
# Les deux *LayerNorm* gardent chacune une moyenne et un écart-type par token, en fp32 : 2 × 2 × 4 = 16 octets.
# L’attention fusionnée garde en plus, par requête et par tête, le logarithme de la somme du softmax : 12 têtes × 4 = 48
# octets, de quoi recalculer tous les scores.
#
# Les scores faisaient les deux tiers de la mémoire de la couche, et croissaient comme `s²` : l’une des raisons du
# succès de l’attention fusionnée (*FlashAttention*).

# %% [markdown] lang="en"
# Each of the two layer norms keeps a mean and a standard deviation per token, in fp32: 2 × 2 × 4 = 16 bytes. Fused
# attention also keeps, per query and head, the logarithm of the sum of the softmax: 12 heads × 4 = 48 bytes, enough to
# compute all scores again.
#
# The scores made up two thirds of the layer's memory, and grew like `s²`: one of the reasons why fused attention
# (FlashAttention) has prevailed.

# %% name="layer-figure"
from dlojz.prediction.rules_of_thumb import Shape

figures.layer_parts(Shape(sequence_length=s, micro_batch=b, hidden=h, heads=a), plain_trace, fused_trace)

# %% [markdown] lang="fr"
# ## 4. Le plus grand batch
#
# En fonction du batch, la mémoire suit (presque) une **droite**. Prenez deux points assez grands, 8 et 16 par exemple :
# pour un très petit batch, le pic survient dans la mise à jour de l’optimiseur.
#
# ### Exercice 4 — le plus grand batch qui tienne
#
# `taken_bytes(batch)` donne les octets occupés pour un batch donné ; chaque appel coûte une trace : six appels au plus.
# Renvoyez le plus grand batch dont la mémoire ne dépasse pas `limit_bytes`, et 0 si aucun ne tient.

# %% [markdown] lang="en"
# ## 4. The largest batch
#
# As a function of the batch, memory is (nearly) a straight **line**. Take two points that are large enough, 8 and 16
# for instance: for a very small batch the peak is in the optimizer's update.
#
# ### Exercise 4 — the largest batch that fits
#
# `taken_bytes(batch)` gives the bytes taken with a given batch; each call costs a trace, so make at most six calls.
# Return the largest batch whose memory does not exceed `limit_bytes`, and 0 if none fits.


# %% name="largest-batch"
def largest_batch(taken_bytes, limit_bytes):
    ### BEGIN SOLUTION
    slope_bytes = (taken_bytes(16) - taken_bytes(8)) / 8
    fixed_bytes = taken_bytes(8) - 8 * slope_bytes
    return max(0, int((limit_bytes - fixed_bytes) // slope_bytes))
    ### END SOLUTION


lab.check("largest-batch", largest_batch)

# %%
# lab.hint("largest-batch")

# %% [markdown] lang="fr"
# **Votre prédiction.** Quel est le plus grand micro-batch de CoAtNet-0 (images de 224 × 224, fp32) sur un V100 de
# 32 Go ? `taken` interroge la prévision : pic, contexte CUDA et NCCL.

# %% [markdown] lang="en"
# **Your prediction.** What is the largest micro-batch of CoAtNet-0 (images of 224 × 224, fp32) on a V100 with 32 GB?
# `taken` asks the forecast: peak, CUDA context and NCCL.

# %% name="predict-v100-batch" stub="value"
gpu = hardware.device("v100-32")
coatnet_0 = dlojz.RunConfig.of(model="coatnet_0", data="synthetic")


def taken(micro_batch):
    return levers.taken_bytes(forecast(levers.with_micro_batch(coatnet_0, micro_batch), device=gpu))


lab.predict(
    "v100-batch",
    ### BEGIN SOLUTION
    largest_batch(taken, gpu.memory_bytes),
    ### END SOLUTION
)

# %% name="reveal-v100-batch"
fit = levers.largest_batch(coatnet_0, gpu)
lab.reveal("v100-batch", fit.micro_batch)

# %% name="v100-taken"
f"{format_bytes(fit.taken_bytes)} / {format_bytes(fit.limit_bytes)}"

# %% [markdown] lang="fr"
# Le paquet vérifie aussi les batches voisins : l’allocateur de CUDA réserve par segments, et la droite a de petites
# marches.

# %% [markdown] lang="en"
# The package also checks the batches near that limit: CUDA's allocator reserves in segments, so the line has small
# steps.

# %% name="batch-figure"
lines = {
    "fp32": coatnet_0,
    "bf16 (autocast)": dlojz.RunConfig.of(model="coatnet_0", data="synthetic", precision="bf16"),
}
figures.memory_by_batch(lines, batches=(1, 8, 64), on=gpu, others=[hardware.device("v100-16")])

# %% [markdown] lang="fr"
# Les deux droites partent du même point : comme annoncé, la précision mixte économise des activations, pas des états.
#
# ## 5. La limite du *Data Parallelism*
#
# CoAtNet-7, images de 512², bloc par bloc : ses états (16 octets par paramètre), puis les activations d’**une seule**
# image. Les premiers blocs voient de grandes *feature maps*, les derniers ont de grands poids.

# %% [markdown] lang="en"
# Both lines start from the same point: as announced, mixed precision saves activations, not states.
#
# ## 5. The limit of data parallelism
#
# CoAtNet-7, images of 512², block by block: its states (16 bytes per parameter), then the activations of **one single**
# image. The first blocks see large feature maps, the last ones have large weights.

# %% name="along-figure"
coatnet_7 = dlojz.RunConfig.of(model="coatnet_7", data="synthetic", image_size=512, micro_batch=1)
figures.along_the_model(coatnet_7, device="h100")

# %% [markdown] lang="fr"
# ### Exercice 5 — ce qu’occupe une réplique
#
# *Data Parallelism*, fp32 et AdamW, sur `dp` GPU, pour un batch global de `global_batch` images (`dp` le divise).
# Renvoyez un majorant des octets qu’occupe chaque GPU, la somme de trois termes :
#
# - les états ;
# - à partir de `dp` = 2, les *buckets* de DDP : une seconde copie des gradients, en fp32 (TP 03) ;
# - les activations : `sample_bytes` octets par image.

# %% [markdown] lang="en"
# ### Exercise 5 — what a replica takes
#
# Data parallelism, fp32 and AdamW, on `dp` GPUs, for a global batch of `global_batch` images (`dp` divides it). Return
# an upper bound of the bytes that each GPU takes, the sum of three terms:
#
# - the states;
# - from `dp` = 2 on, DDP's buckets: a second copy of the gradients, in fp32 (lab 03);
# - the activations: `sample_bytes` bytes per image.


# %% name="data-parallel-bytes"
def replica_bytes(parameters, sample_bytes, global_batch, dp):
    ### BEGIN SOLUTION
    buckets_bytes = 4 * parameters if dp > 1 else 0
    return 16 * parameters + buckets_bytes + sample_bytes * global_batch // dp
    ### END SOLUTION


lab.check("data-parallel-bytes", replica_bytes)

# %%
# lab.hint("data-parallel-bytes")

# %% [markdown] lang="fr"
# **Votre prédiction.** Sur 64 GPU, avec une image chacun, quel sera le pic de mémoire d’une réplique de CoAtNet-7 ?

# %% [markdown] lang="en"
# **Your prediction.** On 64 GPUs with one image each, what will be the memory peak of a replica of CoAtNet-7?

# %% name="predict-replica" stub="value"
parameters = models.describe("coatnet_7").parameters
sample_bytes = forecast(coatnet_7, device="h100").memory.activations_bytes
lab.predict(
    "coatnet-7-replica",
    ### BEGIN SOLUTION
    replica_bytes(parameters, sample_bytes, 64, 64),
    ### END SOLUTION
)

# %% name="reveal-replica"
replica = forecast(dlojz.RunConfig.of(**{**coatnet_7.to_dict(), "layout": coatnet_7.layout, "dp": 64}), device="h100")
lab.reveal("coatnet-7-replica", replica.memory.peak_bytes)

# %% name="limit-figure"
devices = [hardware.device(name) for name in ("v100-16", "v100-32", "a100-40", "h100")]
figures.limit_of_data_parallelism(replica_bytes, parameters, sample_bytes, 64, devices)

# %% [markdown] lang="fr"
# De 1 à 64 GPU, la partie basse ne diminue pas ; les *buckets* l’augmentent même. **Seules les activations sont
# réparties.** Ajouter des V100 n’y changera rien.
#
# **Expliquez.** Pour chaque type de GPU : une réplique tient-elle avec 64, puis 1 024 GPU ? La cellule répond, puis
# donne le pic en octets par paramètre, et sa composition.

# %% [markdown] lang="en"
# From 1 to 64 GPUs the lower part does not shrink; the buckets even make it grow. **Activations alone are divided.**
# Adding V100s will not help.
#
# **Explain.** For each type of GPU: does a replica fit with 64, then with 1,024 GPUs? The cell answers, then gives the
# peak in bytes per parameter, and what it is made of.

# %% name="limit-answers"
many = dlojz.RunConfig.of(**{**coatnet_7.to_dict(), "layout": coatnet_7.layout, "dp": 1024})
for device in devices:
    taken = [levers.taken_bytes(forecast(config, device=device)) for config in (replica.config, many)]
    fits = [yes_no(taken_bytes <= device.memory_bytes) for taken_bytes in taken]
    print(f"{device.name:>8}", "64, 1,024 GPUs: // 64, 1 024 GPU :", *fits)
print(replica.moment, decimal(replica.memory.peak_bytes / parameters))
for name, part_bytes in replica.memory.at_peak_bytes.items():
    print("  ", category_label(name), decimal(part_bytes / parameters))

# %% [markdown] lang="fr"
# On retrouve les **24 octets** par paramètre : avec une seule image, le pic est dans la mise à jour de l’optimiseur.
# Aux 16 octets d’états s’ajoutent 4 de *buckets* et 4 de temporaires, car AdamW met à jour tous les poids ensemble
# (`foreach`). (« temporaires » réunit ces deux parts ; « tampons » désigne les statistiques des *BatchNorm*.) Dès que
# les activations dominent, la règle n’a plus de sens.
#
# Répartir les états eux-mêmes, c’est ZeRO, au TP 04. Restent, sur un GPU, deux façons d’échanger du temps contre de la
# mémoire.
#
# ## 6. Recalculer : les points de contrôle d’activation
#
# On ne garde que l’**entrée** d’un morceau du modèle ; la passe arrière en refait la passe avant juste avant d’en avoir
# besoin. `checkpoint(f, x, use_reentrant=False)` renvoie `f(x)` et s’occupe du reste, y compris de tirer une seconde
# fois le même masque de *dropout*.

# %% [markdown] lang="en"
# Here are the **24 bytes** per parameter again: with one image the peak is in the optimizer's update. On top of the 16
# bytes of states come 4 of buckets and 4 of temporaries, as AdamW updates all weights together (`foreach`).
# (`workspace` is both together; `buffers` are the statistics of BatchNorm.) Once activations dominate, the rule no
# longer means anything.
#
# Partitioning the states themselves is what ZeRO does, in lab 04. There remain, on one GPU, two ways to trade time for
# memory.
#
# ## 6. Computing again: activation checkpointing
#
# Of a piece of the model only the **input** is kept; the backward pass runs its forward pass again just before it needs
# it. `checkpoint(f, x, use_reentrant=False)` returns `f(x)` and sees to the rest, and even draws the same dropout mask
# a second time.

# %% name="checkpoint-demo"
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
images = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
torch.equal(mlp(images), checkpoint(mlp, images, use_reentrant=False))

# %% [markdown] lang="fr"
# ### Exercice 6 — par segments
#
# Exécutez les `blocks` l’un après l’autre, par segments de `per_segment` blocs (le dernier parfois plus court), et
# renvoyez la sortie. Après la passe avant, seule l’entrée de chaque segment doit rester en mémoire.

# %% [markdown] lang="en"
# ### Exercise 6 — by segments
#
# Run the `blocks` one after the other, in segments of `per_segment` blocks (the last one may be shorter), and return
# the output. After the forward pass only the input of each segment may be left in memory.


# %% name="checkpoint"
def checkpointed(blocks, x, per_segment):
    ### BEGIN SOLUTION
    for start in range(0, len(blocks), per_segment):
        segment = nn.Sequential(*blocks[start : start + per_segment])
        x = checkpoint(segment, x, use_reentrant=False)
    return x
    ### END SOLUTION


lab.check("checkpoint", checkpointed)

# %%
# lab.hint("checkpoint")

# %% [markdown] lang="fr"
# Des segments courts gardent beaucoup d’entrées ; longs, ils reconstituent beaucoup d’activations d’un coup. Pour `n`
# blocs semblables, par segments de `k`, le pic varie comme `n / k + k` : il est le plus bas pour `k = √n` (Chen et al.,
# 2016). Votre fonction, tracée sur 36 blocs :

# %% [markdown] lang="en"
# Short segments keep many inputs; long ones restore many activations at once. For `n` similar blocks, in segments of
# `k`, the peak varies as `n / k + k`: it is lowest for `k = √n` (Chen et al., 2016). Your function, traced on 36
# blocks:

# %% name="segments-figure"
with torch.device("meta"):
    many_blocks = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(36)]
    tokens = torch.empty(4096, 128)
figures.segments(checkpointed, many_blocks, tokens, lengths=(1, 2, 3, 4, 6, 9, 12, 18, 36))

# %% [markdown] lang="fr"
# **Votre prédiction.** La passe arrière coûte deux fois la passe avant. Si l’on refait toute la passe avant, par
# combien les opérations d’un pas sont-elles multipliées ?

# %% [markdown] lang="en"
# **Your prediction.** The backward pass costs twice the forward pass. If the whole forward pass is run again, by how
# much are the operations of a step multiplied?

# %% name="predict-recomputed" stub="value"
lab.predict(
    "recomputed-flops",
    ### BEGIN SOLUTION
    (1 + 2 + 1) / (1 + 2),
    ### END SOLUTION
)

# %% name="run-checkpointing" tags=["nbval-ignore-output"]
full = dlojz.run(vit_64.config, checkpointing="full")
selective = dlojz.run(vit_64.config, checkpointing="selective")
every_second = dlojz.run(vit_64.config, checkpointing="every_second")
full

# %% name="reveal-recomputed"
lab.reveal("recomputed-flops", full.record.footprint().step_flops / vit_64.record.footprint().step_flops)

# %% [markdown] lang="fr"
# Moins que 4/3 : le dernier produit de chaque bloc n’est pas refait, car la passe arrière du bloc n’a pas besoin de sa
# sortie. PyTorch s’arrête dès qu’il a retrouvé tout ce qui manquait.
#
# Le mode **sélectif** (`"selective"`) garde le résultat des produits de matrices, des convolutions et de l’attention.
# (Celui de Megatron-LM, de Korthikanti et al., 2022, recalcule au contraire le cœur de l’attention.) Celui de
# torchtitan (`"every_second"`) recalcule en plus un produit sur deux.

# %% [markdown] lang="en"
# Less than 4/3: the last product of each block is not run again, as the backward pass of the block does not need its
# output. PyTorch stops once it has found all that was missing.
#
# **Selective** checkpointing (`"selective"`) keeps the results of matrix products, convolutions and attention.
# (Megatron-LM's, from Korthikanti et al., 2022, on the contrary recomputes the core of attention.) Torchtitan's
# (`"every_second"`) also computes every second product again.

# %% name="checkpointing-seen"
for run in (vit_64, selective, every_second, full):
    footprint, forecasted = run.record.footprint(), dlojz.predict(run.config)
    print(
        f"{run.config.layout.checkpointing:>12}",
        format_bytes(footprint.memory.activations_bytes),
        format_bytes(footprint.memory.peak_bytes),
        "as predicted: peak, FLOP // comme prédit : pic, FLOP",
        yes_no(abs(footprint.memory.peak_bytes / forecasted.memory.peak_bytes - 1) < 1e-3),
        yes_no(abs(footprint.step_flops / forecasted.step_flops - 1) < 0.02),
    )

# %% [markdown] lang="fr"
# Et en secondes ? Votre `checkpointed`, sur quatre couches, un segment par couche : les pas avec et sans recalcul sont
# mesurés **en alternance**, et l’on prend la médiane des rapports.
#
# **Votre prédiction.** Par combien la durée d’un pas est-elle multipliée ? Et combien de fois plus de tokens par
# seconde traite-t-on avec un batch de 8 plutôt que de 2 ?

# %% [markdown] lang="en"
# And in seconds? Your `checkpointed`, on four layers, one segment per layer: steps with and without recomputation are
# measured **in turns**, and the median of the ratios is taken.
#
# **Your prediction.** By how much is the time of a step multiplied? And how many times as many tokens per second are
# processed with a batch of 8 instead of 2?

# %% name="predict-recomputed-time" stub="value"
lab.predict(
    "recomputed-time",
    ### BEGIN SOLUTION
    4 / 3,
    ### END SOLUTION
)

# %% name="predict-batch-rate" stub="value"
lab.predict(
    "batch-rate",
    ### BEGIN SOLUTION
    1,
    ### END SOLUTION
)

# %% name="measure-seconds"
torch.set_num_threads(1)
keep_freed_memory()  # as the caching allocator of a GPU does // comme l’allocateur à cache d’un GPU
layers = [Layer(128, 4) for _ in range(4)]


def step_s(batch, per_segment=None):
    x = torch.randn(batch, 128, 128, requires_grad=True)
    start = time.perf_counter()
    y = checkpointed(layers, x, per_segment) if per_segment else nn.Sequential(*layers)(x)
    y.sum().backward()
    return time.perf_counter() - start


step_s(8, 1)  # warm // à chaud
turns = [(step_s(8), step_s(8, 1), step_s(2)) for _ in range(9)]

# %% name="reveal-seconds" tags=["nbval-ignore-output"]
lab.reveal("recomputed-time", median(again / kept for kept, again, _ in turns))
lab.reveal("batch-rate", median(4 * small / kept for kept, _, small in turns))

# %% [markdown] lang="fr"
# Sur CPU, le travail croît avec le batch : un grand batch n’y économise que des coûts fixes. Un petit batch laisse un
# GPU presque inactif : la mémoire achète du débit. Et la durée peut croître de plus d’un tiers sans que les opérations
# le fassent : normalisations, activations et copies sont recalculées aussi, et prennent du temps sans compter comme
# opérations.
#
# **Répartir les points de contrôle.** Avec le *Tensor Parallelism* (TP 06), chaque rang garde les mêmes entrées de
# couches. ZeRO-R les **partitionne** (P_a) : chacun en garde une part, et un *all-gather* les réunit avant le recalcul.
# Pour les 96 couches de GPT-3 (`h` = 12 288, `s` = 2 048, bf16 ; Brown et al., 2020) et un micro-batch de 4, sans puis
# avec 8 rangs :

# %% [markdown] lang="en"
# On a CPU the work grows with the batch, so a larger one saves only fixed costs. A small batch leaves a GPU nearly
# idle: memory buys throughput. And the time may grow by more than a third although the operations do not:
# normalisations, activations and copies are recomputed too, and take time without counting as operations.
#
# **Partitioning the checkpoints.** With tensor parallelism (lab 06) each rank keeps the same inputs of layers. ZeRO-R
# **partitions** them (P_a): each keeps a part, and an all-gather unites them before recomputation. For the 96 layers of
# GPT-3 (`h` = 12,288, `s` = 2,048, bf16; Brown et al., 2020) and a micro-batch of 4, without and with 8 ranks:

# %% name="partitioned-checkpoints"
checkpoints_bytes = 2 * 2048 * 4 * 12288 * 96
print(format_bytes(checkpoints_bytes), format_bytes(checkpoints_bytes / 8))

# %% [markdown] lang="fr"
# ## 7. Décharger : la mémoire hôte
#
# Les activations partent vers la mémoire de l’hôte pendant la passe avant, et reviennent pour la passe arrière.
# Autograd confie à une fonction `pack` chaque tenseur qu’il doit garder, garde ce qu’elle renvoie, et le passe à
# `unpack` quand il lui faut le tenseur.
#
# `host` représente la mémoire de l’hôte : `host.store(tensor)` y copie un tenseur et renvoie un numéro ;
# `host.fetch(number)` renvoie le tenseur.
#
# ### Exercice 7 — le déchargement
#
# Renvoyez le couple `(pack, unpack)` qui décharge tout ce qu’autograd garde, **sauf les paramètres** du modèle.
# Attention : autograd peut présenter un poids comme une vue. Deux tenseurs partagent leur mémoire quand leur
# `untyped_storage().data_ptr()` est le même.

# %% [markdown] lang="en"
# ## 7. Offloading: host memory
#
# Activations move to the memory of the host during the forward pass, and come back for the backward pass. Autograd
# hands every tensor that it has to keep to a function `pack`, keeps what that returns, and hands it to `unpack` when it
# needs the tensor.
#
# `host` stands for the memory of the host: `host.store(tensor)` copies a tensor there and returns a number;
# `host.fetch(number)` returns the tensor.
#
# ### Exercise 7 — offloading
#
# Return the pair `(pack, unpack)` that offloads all that autograd keeps, **except the parameters** of the model. Mind
# that autograd may hand over a weight as a view. Two tensors share their memory when their
# `untyped_storage().data_ptr()` is the same.


# %% name="offload"
def offload_hooks(model, host):
    ### BEGIN SOLUTION
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.store(tensor)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else host.fetch(packed)

    return pack, unpack
    ### END SOLUTION


lab.check("offload", offload_hooks)

# %%
# lab.hint("offload")

# %% [markdown] lang="fr"
# Le paquet fait de même avec `offload="activations"`. Combien de secondes vos hooks ajoutent-ils à un pas de nos quatre
# couches ? Chaque octet est copié deux fois, aller et retour, à la vitesse que mesure la cellule.

# %% [markdown] lang="en"
# The package does the same with `offload="activations"`. How many seconds do your hooks add to a step of our four
# layers? Each byte is copied twice, out and back, at the speed that the cell measures.

# %% name="copy-speed" tags=["nbval-ignore-output"]
block = torch.randn(2**21)
copies = []
for _ in range(9):
    start = time.perf_counter()
    block.clone()
    copies.append(4 * 2**21 / (time.perf_counter() - start))
copy_bytes_per_s = median(copies)
kept_bytes = trace(nn.Sequential(*layers), torch.empty(8, 128, 128)).saved_bytes
print(format_bytes(kept_bytes), decimal(copy_bytes_per_s / 1e9), "GB/s // Go/s")

# %% name="predict-offload-seconds" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "offload-seconds",
    ### BEGIN SOLUTION
    2 * kept_bytes / copy_bytes_per_s,
    ### END SOLUTION
)

# %% name="measure-offload"
from dlojz.labs.lab02_memory.exercises_recompute import Host

stack = nn.Sequential(*layers)


def offloaded_step_s():
    with torch.autograd.graph.saved_tensors_hooks(*offload_hooks(stack, Host())):
        return step_s(8)


added_s = [offloaded_step_s() - step_s(8) for _ in range(9)]

# %% name="reveal-offload-seconds" tags=["nbval-ignore-output"]
lab.reveal("offload-seconds", median(added_s))

# %% name="run-offload" tags=["nbval-ignore-output"]
offloaded = dlojz.run(vit_64.config, offload="activations")
offloaded

# %% [markdown] lang="fr"
# Le pas s’allonge d’un peu plus que les copies, en général : autograd appelle aussi vos hooks, pour chaque tenseur.
#
# Vos hooks déchargent-ils autant que ceux du paquet ? Sur un AlexNet :

# %% [markdown] lang="en"
# In general the step grows by a little more than the copies: autograd also calls your hooks, for each tensor.
#
# Do your hooks offload as much as those of the package? For an AlexNet:

# %% name="offload-ratio"
from dlojz.by_hand.activation_offload import ActivationOffload

model = models.build("alexnet_tiny")
side = models.spec("alexnet_tiny").image_size
images = torch.randn(8, 3, side, side)


def moved_ratio():
    host, theirs = Host(), ActivationOffload(model)
    with torch.autograd.graph.saved_tensors_hooks(*offload_hooks(model, host)):
        model(images)
    with theirs:
        model(images)
    return round(host.stored_bytes / theirs.most_bytes, 1)


asked(moved_ratio)

# %% [markdown] lang="fr"
# Les vôtres déplacent davantage : le résultat d’une ReLU est gardé par elle **et** par le *max-pooling* qui la suit,
# donc copié deux fois, comme par `torch.autograd.graph.save_on_cpu`. Le paquet ne déplace qu’une fois chaque zone de
# mémoire ([dlojz/by_hand/activation_offload.py](../../dlojz/by_hand/activation_offload.py)).
#
# Ce que chacun des cinq entraînements gagne en mémoire, et ce qu’il coûte :

# %% [markdown] lang="en"
# Yours move more: the result of a ReLU is kept by the ReLU **and** by the max-pooling that follows, so it is copied
# twice, as by `torch.autograd.graph.save_on_cpu`. The package moves each piece of memory once
# ([dlojz/by_hand/activation_offload.py](../../dlojz/by_hand/activation_offload.py)).
#
# What each of the five trainings gains in memory, and what it costs:

# %% name="exchange-figure" tags=["nbval-ignore-output"]
runs = {"none": vit_64, "selective": selective, "every_second": every_second, "full": full}
figures.operations_for_memory({**runs, 'offload="activations"': offloaded})

# %% [markdown] lang="fr"
# ### Exercice 8 — ce que coûte le transport
#
# `moved_bytes` octets partent pendant la passe avant, qui dure `forward_s` secondes, et reviennent pendant la passe
# arrière, deux fois plus longue. Le lien transporte `link_bytes_per_s` octets par seconde, pendant que le GPU calcule.
# Renvoyez les secondes que le déchargement **ajoute** au pas : à chaque passe, ce qui dépasse le calcul.

# %% [markdown] lang="en"
# ### Exercise 8 — what transport costs
#
# `moved_bytes` bytes leave during the forward pass, which takes `forward_s` seconds, and come back during the backward
# pass, which takes twice as long. The link carries `link_bytes_per_s` bytes per second while the GPU computes. Return
# the seconds that offloading **adds** to the step: in each pass, the time by which the transport exceeds the
# computation.


# %% name="exposed-seconds"
def exposed_seconds(moved_bytes, link_bytes_per_s, forward_s):
    ### BEGIN SOLUTION
    one_way_s = moved_bytes / link_bytes_per_s
    return max(0, one_way_s - forward_s) + max(0, one_way_s - 2 * forward_s)
    ### END SOLUTION


lab.check("exposed-seconds", exposed_seconds)

# %%
# lab.hint("exposed-seconds")

# %% [markdown] lang="fr"
# **Expliquez.** Pour une image de CoAtNet-7, recalculer ou décharger ? Supposons un GPU à 62 TFLOP/s (40 % d’un A100 en
# TF32), et deux liens : PCIe 4.0, 25 Go/s ; NVLink-C2C d’un GH200, 450 Go/s (NVIDIA, 2023). La cellule donne les
# millisecondes ajoutées : recalcul complet, puis déchargement par chaque lien.

# %% [markdown] lang="en"
# **Explain.** For one image of CoAtNet-7, compute again, or offload? Suppose a GPU that sustains 62 TFLOP/s (40% of an
# A100 in TF32), and two links: PCIe 4.0, 25 GB/s; the NVLink-C2C of a GH200, 450 GB/s (NVIDIA, 2023). The cell gives
# the milliseconds added: full recomputation, then offloading over each link.

# %% name="recompute-or-offload"
forward_s = models.describe("coatnet_7", 512).flops / 62e12
links = {"PCIe 4.0": 25e9, "NVLink-C2C": 450e9}
print(round(1e3 * forward_s))
asked(lambda: {name: round(1e3 * exposed_seconds(sample_bytes, link, forward_s)) for name, link in links.items()})

# %% [markdown] lang="fr"
# Par PCIe, le recalcul est bien plus rapide ; par NVLink-C2C, le déchargement ne coûte plus rien.
#
# ## 8. Sous un budget, bloc par bloc
#
# Recalculer (`"recompute"`) ne garde que l’entrée d’un bloc et coûte sa passe avant ; décharger (`"offload"`) ne garde
# rien et coûte le transport ; garder (`"keep"`) ne coûte rien, tant que cela tient.
#
# La passe arrière va du dernier bloc au premier : quand elle traverse un bloc, les suivants ont tout rendu, et les
# précédents détiennent encore ce que le plan y laisse.
#
# ### Exercice 9 — garder, recalculer ou décharger
#
# `blocks` est la liste des blocs, du premier au dernier. Chacun a trois attributs, des dictionnaires par choix :
# `held_bytes`, ce qu’il détient jusqu’à sa passe arrière ; `backward_bytes`, ce qu’il faut pendant celle-ci **en
# plus** de ce que détiennent les blocs précédents ; `seconds`, ce que le choix ajoute au pas.
#
# Parmi les plans (un choix par bloc) dont le pic tient dans `budget_bytes`, renvoyez celui qui ajoute le moins de
# secondes, ou None. `plans` les énumère tous.

# %% [markdown] lang="en"
# Over PCIe, computing again is much faster; over NVLink-C2C, offloading no longer costs anything.
#
# ## 8. Under a budget, block by block
#
# Recomputing (`"recompute"`) holds only the input of a block and costs its forward pass; offloading (`"offload"`) holds
# nothing and costs the transport; keeping (`"keep"`) costs nothing, as long as it fits.
#
# The backward pass goes from the last block to the first: while it is in one block, the later ones have given
# everything back, and the earlier ones hold what the plan leaves there.
#
# ### Exercise 9 — keep, recompute or offload
#
# `blocks` is the list of the blocks, from first to last. Each has three attributes, which are dictionaries by choice
# (`block.held_bytes["keep"]`): `held_bytes`, what it holds until its backward pass; `backward_bytes`, what is needed
# during that pass **on top of** what the blocks before it hold; `seconds`, what the choice adds to the step.
#
# Of the plans (one choice per block) whose peak fits into `budget_bytes`, return the one that adds the fewest seconds,
# or None. `plans` goes through all of them.

# %% name="activation-plan"
from itertools import product


def choose(blocks, budget_bytes):
    plans = product(("keep", "recompute", "offload"), repeat=len(blocks))
    ### BEGIN SOLUTION
    def peak(plan):
        kept_bytes = most = 0
        for block, choice in zip(blocks, plan, strict=True):
            most = max(most, kept_bytes + block.backward_bytes[choice])
            kept_bytes += block.held_bytes[choice]
        return most

    def seconds(plan):
        return sum(block.seconds[choice] for block, choice in zip(blocks, plan, strict=True))

    return min((plan for plan in plans if peak(plan) <= budget_bytes), key=seconds, default=None)
    ### END SOLUTION


lab.check("activation-plan", choose)

# %%
# lab.hint("activation-plan")

# %% [markdown] lang="fr"
# En vrai : `coatnet_tiny`, micro-batch de 32, budget de 40 Mio. Le paquet en fait un **programme linéaire en nombres
# entiers** ([activation_budget.py](../../dlojz/planner/activation_budget.py)). Votre plan, le sien, et le pic prédit
# pour chacun :

# %% [markdown] lang="en"
# For real: `coatnet_tiny`, micro-batch of 32, budget of 40 MiB. The package makes it an **integer linear programme**
# ([activation_budget.py](../../dlojz/planner/activation_budget.py)). Your plan, the package's, and the peak predicted
# for each:

# %% name="plans"
from dlojz.labs.lab02_memory.exercises_recompute import plans_table

small = dlojz.RunConfig.of(model="coatnet_tiny", micro_batch=32, steps=6)
plan = plan_activations(small, 40 * 2**20)
plans_table(choose, plan)

# %% [markdown] lang="fr"
# Trois pics : si l’on garde tout, prédit pour le plan, mesuré.

# %% [markdown] lang="en"
# Let us run it. Three peaks: with everything kept, predicted for the plan, measured.

# %% name="run-plan" tags=["nbval-ignore-output"]
budgeted = dlojz.run(small, activation_plan=plan.config.layout.activation_plan)
budgeted

# %% name="plan-measured"
figures.plan_measured(plan, budgeted.record.footprint().memory.peak_bytes)

# %% [markdown] lang="fr"
# ## 9. À vous
#
# La calculatrice réunit tout ce TP ; sans noyau actif, la figure fixe la remplace.

# %% [markdown] lang="en"
# ## 9. Your turn
#
# The calculator brings this whole lab together; where no kernel runs, the static figure replaces it.

# %% name="calculator" tags=["nbval-ignore-output"]
from dlojz.display.widgets.calculator import calculator, still_calculator

chosen = {"model": "coatnet_0", "data": "synthetic", "micro_batch": 64, "device": "v100-32"}
calculator(**chosen)

# %% name="still-calculator" tags=["nbval-ignore-output"]
still_calculator(**chosen)

# %% [markdown] lang="fr"
# Trois nombres à ne pas confondre : le **pic** de ce qui est alloué (`torch.cuda.max_memory_allocated()`) ; ce qu’il
# **faut** au moins sur le GPU, avec le contexte CUDA et NCCL : lui seul décide si un modèle tient ; et ce que montre
# **`nvidia-smi`**, où l’allocateur garde en plus, en cache, ce qu’il a réservé (`torch.cuda.max_memory_reserved()`).
#
# ## Défi : le moins d’opérations
#
# Facultatif. Vingt-quatre couches, une limite en Mio. Une couche garde `layer.kept_mib` pour sa passe arrière ;
# recalculée, elle ne garde que `input_mib`, mais refait `gflop` GFLOP. Pendant sa passe arrière, une couche a toutes
# ses activations (`kept_mib`), en plus de ce que gardent les couches **précédentes** : ce total ne doit jamais
# dépasser `limit_mib`. Renvoyez les numéros (à partir de 0) des couches à recalculer. Le score compare leurs
# opérations au minimum possible, sur trois modèles. **Objectif : 100 %.**

# %% [markdown] lang="en"
# Three numbers not to be confused: the **peak** of what is allocated (`torch.cuda.max_memory_allocated()`); what the
# GPU **needs** at least, with the CUDA context and NCCL: this alone decides whether a model fits; and what
# **`nvidia-smi`** shows, where the allocator also caches what it has reserved (`torch.cuda.max_memory_reserved()`).
#
# ## Challenge: the fewest operations
#
# Optional. Here are 24 layers and a limit in MiB. A layer keeps `layer.kept_mib` for its backward pass; checkpointed,
# it keeps `input_mib` only, but does `gflop` GFLOP again. During its backward pass a layer has all its activations
# (`kept_mib`), on top of what the layers **before** it keep: this total must never exceed `limit_mib`. Return the
# numbers (from 0) of the layers to checkpoint. The score compares their operations with the fewest possible, over
# three models. **Target: 100%.**


# %% name="fewest-operations"
def checkpointed_layers(layers, limit_mib):
    ### BEGIN SOLUTION
    best = {0: (0, [])}  # MiB held so far: operations, layers // Mio détenus jusque-là : opérations, couches
    for index, layer in enumerate(layers):
        grown = {}
        for kept_mib, (gflop, chosen) in best.items():
            if kept_mib + layer.kept_mib <= limit_mib:
                kept = (kept_mib + layer.kept_mib, gflop, chosen)
                again = (kept_mib + layer.input_mib, gflop + layer.gflop, [*chosen, index])
                for total, cost, plan in (kept, again):
                    if total not in grown or cost < grown[total][0]:
                        grown[total] = cost, plan
        best = grown
    return min(best.values())[1]
    ### END SOLUTION


lab.check("fewest-operations", checkpointed_layers)

# %%
# lab.hint("fewest-operations")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Ajoutez au script deux options, `--bf16` et `--checkpointing`, et affichez le pic de mémoire du GPU à la fin.
# Continuez dans votre `train.py`, ou partez de la solution du TP précédent, qu’écrit
# `dlojz labs script 02 un_autre_dossier`, avec des `# TODO`.
#
# À regarder : `dlojz run my_training/train.py` sans et avec `-- --checkpointing`, puis `dlojz compare` : mêmes
# pertes, moins d’activations au pic.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# precision = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
# x = checkpoint(block, x, use_reentrant=False) if args.checkpointing else block(x)
# print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Add two options to the script, `--bf16` and `--checkpointing`, and print the peak memory of the GPU at the end. Go on
# in your `train.py`, or begin with the solution of the lab before, which `dlojz labs script 02 another_folder` writes,
# with a `# TODO` at each place to fill in.
#
# What to look for: `dlojz run my_training/train.py`, then the same with `-- --checkpointing`, then `dlojz compare`:
# the same losses, fewer activations at the peak.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# precision = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
# x = checkpoint(block, x, use_reentrant=False) if args.checkpointing else block(x)
# print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
# ```
#
# </details>

# %% name="judge-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# - Les **états** : de 8 à 18 octets par paramètre, selon la précision et l’optimiseur ; indépendants du batch.
# - Les **activations** : proportionnelles au batch, `sbh (34 + 5as/h)` par couche, `34 sbh` avec l’attention fusionnée.
# - Le **pic** : le maximum des sommes, pas la somme des maximums.
# - Le *Data Parallelism* ne répartit que les activations.
# - Les points de contrôle ajoutent au plus un tiers d’opérations ; le déchargement, le transport non recouvert.

# %% [markdown] lang="en"
# ## Summary
#
# - **States**: 8 to 18 bytes per parameter, depending on precision and optimizer; independent of the batch.
# - **Activations**: proportional to the batch, `sbh (34 + 5as/h)` per layer, `34 sbh` with fused attention.
# - The **peak**: the largest of the sums, not the sum of the largest.
# - Data parallelism divides only the activations.
# - Checkpointing costs at most a third more operations; offloading costs the transport that computation does not hide.

# %%
lab.progress()
