# %% [markdown] lang="fr"
# # TP 02 — Empreinte mémoire
#
# « Est-ce que ça tient ? » C’est la première question que pose un gros modèle, avant même celle de la vitesse. Dans ce
# TP, vous y répondez **avant** de lancer quoi que ce soit, puis vous mesurez et vous comparez.
#
# À la fin, vous saurez :
#
# - dire combien d’octets coûte un paramètre, et d’où sortent les 12, 16, 18, 20 ou 24 octets que l’on cite partout ;
# - mesurer ce qui remplit la mémoire d’un véritable entraînement, catégorie par catégorie, et à quel instant ;
# - compter les activations d’une couche, à la main puis par une trace, et expliquer la différence ;
# - trouver le plus grand batch qui tienne sur un GPU donné ;
# - montrer pourquoi le *Data Parallelism* ne sauve pas un modèle trop gros ;
# - échanger du temps contre de la mémoire : points de contrôle d’activation, déchargement (*offload*), et les deux
#   ensemble sous un budget d’octets.
#
# Comptez une heure. Ψ désigne le nombre de paramètres ; `s` le nombre de tokens, `b` la taille du micro-batch, `h` la
# largeur du modèle, `a` le nombre de têtes d’attention. 1 Gio = 2³⁰ octets.

# %% [markdown] lang="en"
# # Lab 02 — Memory footprint
#
# "Does it fit?" That is the first question a big model asks, even before speed. In this lab you answer it **before**
# you run anything, then you measure and compare.
#
# By the end you can:
#
# - tell how many bytes a parameter costs, and where the 12, 16, 18, 20 or 24 bytes come from that everybody quotes;
# - measure what fills the memory of a real training, category by category, and at which moment;
# - count the activations of a layer, by hand, then by a trace, and explain the difference;
# - find the largest batch that fits on a given GPU;
# - show why data parallelism does not save a model that is too big;
# - trade time for memory: activation checkpointing, offloading, and both together under a budget of bytes.
#
# Allow an hour. Ψ is the number of parameters; `s` the number of tokens, `b` the size of the micro-batch, `h` the width
# of the model, `a` the number of attention heads. 1 GiB = 2³⁰ bytes.

# %% name="setup"
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dlojz
from dlojz import hardware, labs, models
from dlojz.base.language import format_bytes
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
# (Deux autres, hors de l’exercice. **bf16 pur**, courant en *fine-tuning* : poids, gradient et moments en bf16, sans
# copie maître, car PyTorch garde les moments dans le type du paramètre ; 8 octets, et les petites mises à jour perdues
# à l’arrondi. Et AdamW en **8 bits**, dont les deux moments prennent un octet chacun.)
#
# ### Exercice 1 — les octets par paramètre
#
# Renvoyez le nombre d’octets que prend un paramètre, tous états confondus. `optimizer` vaut `"sgd"`, `"momentum"` ou
# `"adamw"`.

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
# | `"autocast"` (`torch.autocast`) | fp32; cast on the fly for products | fp32 | — |
# | `"bf16"` (ZeRO's mixed precision) | bf16 | bf16 | fp32 |
# | `"bf16_fp32_gradients"` (Megatron) | bf16 | fp32 | fp32 |
#
# (Two more, which the exercise leaves out. **Pure bf16**, common in fine-tuning: weight, gradient and moments in bf16,
# no master copy, as PyTorch keeps moments in the parameter's type; 8 bytes, and small updates lost to rounding. And
# AdamW in **8 bit**, whose two moments take one byte each.)
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
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("bytes-per-parameter")

# %% [markdown] lang="fr"
# **Votre prédiction.** CoAtNet-7 en précision mixte (`"bf16"`) avec AdamW : combien d’octets d’états ? La cellule
# suivante compare à ce que le paquet calcule, tenseur par tenseur, pour DeepSpeed.

# %% [markdown] lang="en"
# **Your prediction.** CoAtNet-7 in mixed precision (`"bf16"`) with AdamW: how many bytes of states? The next cell lays
# it over what the package computes, tensor by tensor, for DeepSpeed.

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
# On lit partout des règles toutes faites, de 12 à 24 octets par paramètre. Presque aucune n’est fausse : elles ne
# comptent pas les mêmes choses. La figure les décompose ; la liste dit pour qui chacune vaut. Les 12 octets de
# l’optimiseur et les 16 de la précision mixte viennent de l’article de ZeRO, les 18 de Megatron-LM, les 20 d’Amazon
# SageMaker et de ZeRO-Infinity ; les 24, d’un tableau qui circule dans les cours. (Les références sont dans
# `rule.sources`.)

# %% [markdown] lang="en"
# The gap is the statistics of the batch norms, which are not parameters.
#
# Ready-made rules are quoted everywhere, from 12 to 24 bytes per parameter. Hardly any is wrong: they do not count the
# same things. The figure takes them apart; the list tells for whom each holds. The 12 bytes of the optimizer and the 16
# of mixed precision come from the ZeRO paper, the 18 from Megatron-LM, the 20 from Amazon SageMaker and ZeRO-Infinity;
# the 24, from a table shown in courses. (`rule.sources` has the references.)

# %% name="rules"
figures.rules_of_thumb()

# %% name="rules-sources"
for rule in rules_of_thumb.RULES.values():
    counted = " + ".join(str(part.bytes_per_parameter) for part in rule.parts)
    print(f"{rule.name:>12} = {counted}\n{'':>15}{rule.about()}")

# %% [markdown] lang="fr"
# **Expliquez.** Lesquelles retrouvez-vous avec votre fonction ? La règle des 24 octets est à part : elle ajoute aux
# états 8 octets « d’activations et de temporaires » *par paramètre*. Retenez-la : nous verrons plus loin ce qu’elle a
# de faux, et dans quel cas elle tombe pourtant juste.
#
# <details><summary>Réponse</summary>
#
# 12 (`momentum` en fp32), 16 (`adamw` en fp32 ou en bf16) et 18 (`adamw`, gradients en fp32). L’autre 12 n’est que la
# part de l’optimiseur dans les 16 de la précision mixte. Les 20 gardent chaque gradient deux fois, en 16 bits et en
# fp32, ce que `precision` ne permet pas de dire.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** Which of them does your function reproduce? The rule of 24 bytes stands apart: it adds 8 bytes of
# "activations and temporaries" *per parameter* to the states. Keep it in mind: we will see what is wrong with it, and
# in which case it comes out right all the same.
#
# <details><summary>Answer</summary>
#
# 12 (`momentum` in fp32), 16 (`adamw` in fp32 or bf16) and 18 (`adamw`, gradients in fp32). The other 12 is only the
# optimizer's part of the 16 of mixed precision. The 20 keep each gradient twice, in 16 bits and in fp32, which
# `precision` cannot express.
#
# </details>

# %% name="rules-found"
states_table(bytes_per_parameter)

# %% [markdown] lang="fr"
# ## 2. En vrai : qu’est-ce qui remplit la mémoire ?
#
# Les états ne sont pas tout. La passe avant garde aussi des **activations**, tous les tenseurs dont la passe arrière
# aura besoin ; et chaque opération prend des **temporaires**, aussitôt rendus. Entraînons deux petits modèles : une
# sonde suit chaque tenseur, de son allocation à sa libération
# ([dispatch_trace.py](../../dlojz/train/dispatch_trace.py)).

# %% [markdown] lang="en"
# ## 2. For real: what fills the memory?
#
# States are not all. The forward pass also keeps **activations**, all the tensors that the backward pass will need; and
# each operation takes **temporaries**, given back at once. Let us train two small models: a probe follows every tensor,
# from its allocation to its release ([dispatch_trace.py](../../dlojz/train/dispatch_trace.py)).

# %% name="run-small" tags=["nbval-ignore-output"]
coatnet = dlojz.run(model="coatnet_tiny", micro_batch=16, steps=6)
vit = dlojz.run(model="vit_tiny", micro_batch=16, steps=6)
vit

# %% [markdown] lang="fr"
# Le tableau met les mesures en regard des prédictions. Celles-ci ne viennent d’aucune exécution : le modèle est suivi
# sur des tenseurs **factices** (*fake tensors*), qui ont une forme mais pas de mémoire
# ([trace.py](../../dlojz/prediction/trace.py)). Autograd y garde et y libère exactement ce qu’il garde et libère en
# vrai.

# %% [markdown] lang="en"
# The table sets the measurements beside the predictions. The predictions come from no run: the model is followed on
# **fake tensors**, which have a shape and no memory ([trace.py](../../dlojz/prediction/trace.py)). Autograd keeps and
# releases there exactly what it keeps and releases for real.

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
# Return the **peak**: the largest number of bytes held at one and the same moment.


# %% name="peak"
def peak(samples):
    ### BEGIN SOLUTION
    return max(sum(sample.values()) for sample in samples)
    ### END SOLUTION


lab.check("peak", peak)

# %%
# lab.hint("peak")

# %% [markdown] lang="fr"
# Sur le véritable pas de `vit_tiny`, votre fonction retrouve-t-elle le pic que la sonde annonce, et la prédiction ?

# %% [markdown] lang="en"
# On the real step of `vit_tiny`, does your function find the peak that the probe reports, and the prediction?

# %% name="peak-measured"
samples = [sample.bytes_by_category for sample in vit.record.memory_timeline]
measured = vit.record.footprint().memory
predicted = forecast(vit.config).memory
asked(lambda: (peak(samples) == measured.peak_bytes, abs(peak(samples) / predicted.peak_bytes - 1) < 1e-3))

# %% name="peak-figure" tags=["nbval-ignore-output"]
figures.peak_and_maxima(samples)

# %% [markdown] lang="fr"
# Le pic est **inférieur** à la somme des maximums. Il a lieu au début de la passe arrière : toutes les activations sont
# là, mais presque aucun gradient. Ceux-ci apparaissent ensuite, à mesure que les activations sont libérées.
#
# **Votre prédiction.** Avec un micro-batch de 64 et non plus de 16, combien d’octets d’activations `vit_tiny`
# gardera-t-il ? `measured.activations_bytes` donne ce qu’il en garde pour 16 ; et les états, changeront-ils ?

# %% [markdown] lang="en"
# The peak is **less** than the sum of the maxima. It comes at the beginning of the backward pass: all activations are
# there, but hardly any gradient. These appear as the activations are released.
#
# **Your prediction.** With a micro-batch of 64 instead of 16, how many bytes of activations will `vit_tiny` keep?
# `measured.activations_bytes` gives what it keeps for 16; and the states, will they change?

# %% name="predict-four-times" stub="value"
lab.predict(
    "four-times-the-batch",
    ### BEGIN SOLUTION
    4 * measured.activations_bytes,
    ### END SOLUTION
)

# %% name="run-64" tags=["nbval-ignore-output"]
vit_64 = dlojz.run(model="vit_tiny", micro_batch=64, steps=6)
vit_64

# %% name="reveal-four-times"
memory_64 = vit_64.record.footprint().memory
lab.reveal("four-times-the-batch", memory_64.activations_bytes)

# %% name="states-stay"
{run.config.layout.micro_batch: format_bytes(run.record.footprint().memory.states_bytes) for run in (vit, vit_64)}

# %% [markdown] lang="fr"
# Voilà la règle du jeu. Les **états** dépendent du modèle et de l’optimiseur, pas des données ; les **activations**
# sont proportionnelles au batch. Il n’existe donc pas d’« octets d’activations par paramètre ».
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
# Un tenseur gardé par deux opérations n’occupe la mémoire qu’une fois. Voici une couche de transformer écrite sans
# aucune fusion, comme l’étudient Korthikanti et al. (2022).

# %% [markdown] lang="en"
# These are the rules of the game. **States** depend on the model and on the optimizer, not on the data; **activations**
# are proportional to the batch. So there is no such thing as "bytes of activations per parameter".
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
# A tensor that two operations keep is in memory once. Here is a transformer layer written without any fusion, as
# Korthikanti et al. (2022) study it.


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
# All is in bf16 (2 bytes), but for the masks (1 byte). Return the bytes that `Layer` keeps with `fused=False`. Follow
# `forward` line by line, and count in units of `s·b·h` and of `a·s²·b`, the size of the scores.


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
# **Votre prédiction.** Combien d’octets pour `s = 1024`, `b = 4`, `h = 768`, `a = 12` ? Et que reste-t-il si
# l’attention est **fusionnée** (`fused=True`) : les scores ne sont jamais écrits en mémoire, le *dropout* des scores
# disparaît, `q`, `k`, `v` et le résultat sont gardés comme avant ?

# %% [markdown] lang="en"
# **Your prediction.** How many bytes for `s = 1024`, `b = 4`, `h = 768`, `a = 12`? And what is left if attention is
# **fused** (`fused=True`): scores are never written to memory, their dropout is gone, `q`, `k`, `v` and the result are
# kept as before?

# %% name="predict-layer" stub="value"
s, b, h, a = 1024, 4, 768, 12
lab.predict(
    "layer-kept",
    ### BEGIN SOLUTION
    layer_bytes(s, b, h, a),
    ### END SOLUTION
)

# %% name="predict-fused" stub="value"
lab.predict(
    "fused-kept",
    ### BEGIN SOLUTION
    34 * s * b * h,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# La trace répond : `trace(module, entrée)` exécute les deux passes sur des tenseurs factices et relève tout ce qui
# reste vivant entre elles. `on_gpu=True` applique ce qu’un GPU fait autrement (masques d’un octet, statistiques en
# fp32).

# %% [markdown] lang="en"
# The trace answers: `trace(module, input)` runs both passes on fake tensors and notes all that stays alive between
# them. `on_gpu=True` applies what a GPU does otherwise (masks of one byte, statistics in fp32).

# %% name="reveal-layer"
with torch.device("meta"):
    x = torch.empty(b, s, h, dtype=torch.bfloat16)
    plain, fused = Layer(h, a), Layer(h, a, fused=True)
plain_trace = trace(plain, x, compute="bf16", on_gpu=True)
fused_trace = trace(fused, x, compute="bf16", on_gpu=True)
lab.reveal("layer-kept", plain_trace.saved_bytes)
lab.reveal("fused-kept", fused_trace.saved_bytes)

# %% [markdown] lang="fr"
# **Expliquez.** La trace trouve un peu plus que la formule. De combien d’octets par token ? La cellule donne cet écart
# pour les deux couches. Qui garde 16 octets par token ? Et les 48 autres, avec l’attention fusionnée ?

# %% [markdown] lang="en"
# **Explain.** The trace finds a little more than the formula. How many bytes per token? The cell gives this gap for
# both layers. Where do the extra 16 bytes per token come from? And the other 48, with fused attention?

# %% name="layer-gap"
asked(
    lambda: (
        round((plain_trace.saved_bytes - layer_bytes(s, b, h, a)) / (s * b)),
        round((fused_trace.saved_bytes - 34 * s * b * h) / (s * b)),
    )
)

# %% [markdown] lang="fr"
# Les deux *LayerNorm* gardent chacune une moyenne et un écart-type par token, en fp32 : 2 × 2 × 4 = 16 octets, que
# l’article néglige. L’attention fusionnée garde en plus un nombre en fp32 par requête et par tête, le logarithme de la
# somme du softmax : 12 têtes × 4 = 48 octets, de quoi recalculer tous les scores dans la passe arrière.
#
# La figure montre ce qu’y gagne la couche. Les scores faisaient les deux tiers de sa mémoire, et croissaient comme
# `s²` : c’est l’une des raisons du succès de l’attention fusionnée (*FlashAttention*).

# %% [markdown] lang="en"
# Each of the two layer norms keeps a mean and a deviation per token, in fp32: 2 × 2 × 4 = 16 bytes, which the paper
# leaves out. Fused attention also keeps one fp32 number per query and head, the logarithm of the sum of the softmax: 12
# heads × 4 = 48 bytes, enough to compute all scores again in the backward pass.
#
# The figure shows what the layer gains. The scores made up two thirds of its memory, and grew like `s²`: that is
# one of the reasons why fused attention (FlashAttention) has prevailed.

# %% name="layer-figure"
from dlojz.prediction.rules_of_thumb import Shape

figures.layer_parts(Shape(sequence_length=s, micro_batch=b, hidden=h, heads=a), plain_trace, fused_trace)

# %% [markdown] lang="fr"
# ## 4. Le plus grand batch
#
# Une part fixe, une part proportionnelle au batch : la mémoire est (presque) une **droite**. Deux points suffisent à la
# connaître. Prenez-les assez grands, 8 et 16 par exemple : pour un très petit batch, le pic survient ailleurs, dans la
# mise à jour de l’optimiseur.
#
# ### Exercice 4 — le plus grand batch qui tienne
#
# `taken_bytes(batch)` donne les octets occupés pour un batch donné ; chaque appel coûte une trace, ne la demandez pas
# plus de six fois. Renvoyez le plus grand batch dont la mémoire ne dépasse pas `limit_bytes`, et 0 si aucun ne tient.

# %% [markdown] lang="en"
# ## 4. The largest batch
#
# A fixed part, a part proportional to the batch: memory is (nearly) a **line**. Two points are enough to know it. Take
# them large enough, 8 and 16 for instance: for a very small batch the peak is elsewhere, in the optimizer's update.
#
# ### Exercise 4 — the largest batch that fits
#
# `taken_bytes(batch)` gives the bytes taken with a given batch; each call costs a trace, do not ask for it more than
# six times. Return the largest batch whose memory does not exceed `limit_bytes`, and 0 if none fits.


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
# **Votre prédiction.** Avec quel micro-batch maximal CoAtNet-0 (images de 224 × 224, fp32) tient-il sur un V100 de 32
# Go ? `taken` interroge la prévision : ce qu’il faut au moins sur le GPU, c’est-à-dire le pic, le contexte CUDA et
# NCCL. Servez-vous de votre fonction.

# %% [markdown] lang="en"
# **Your prediction.** Which is the largest micro-batch of CoAtNet-0, images of 224², fp32, on a V100 with 32 GB?
# `taken` asks the forecast: the least that the GPU must have, which is the peak, the CUDA context and NCCL. Use your
# function.

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
# Le paquet part de la même droite, puis vérifie autour de la limite : l’allocateur de CUDA réserve la mémoire par
# segments, et la droite a de petites marches.

# %% [markdown] lang="en"
# The package starts from the same line, then checks around the limit: CUDA's allocator reserves memory in segments, and
# the line has small steps.

# %% name="batch-figure"
lines = {
    "fp32": coatnet_0,
    "bf16 (autocast)": dlojz.RunConfig.of(model="coatnet_0", data="synthetic", precision="bf16"),
}
figures.memory_by_batch(lines, batches=(1, 8, 64), on=gpu, others=[hardware.device("v100-16")])

# %% [markdown] lang="fr"
# Les deux droites partent du même point, et l’une monte moins vite : comme annoncé, la précision mixte économise des
# activations, pas des états.
#
# ## 5. La limite du *Data Parallelism*
#
# Passons à CoAtNet-7, images de 512². Bloc par bloc, voici ses états (16 octets par paramètre), puis les activations
# d’**une seule** image. Les deux ne sont pas au même endroit : les premiers blocs voient de grandes cartes, les
# derniers ont de grands poids.

# %% [markdown] lang="en"
# Both lines start from the same point, and one climbs more slowly: as announced, mixed precision saves activations, not
# states.
#
# ## 5. The limit of data parallelism
#
# Now CoAtNet-7, images of 512². Block by block, here are its states (16 bytes per parameter), then the activations of
# **one single** image. They are not in the same place: the first blocks see large maps, the last ones have large
# weights.

# %% name="along-figure"
coatnet_7 = dlojz.RunConfig.of(model="coatnet_7", data="synthetic", image_size=512, micro_batch=1)
figures.along_the_model(coatnet_7, device="h100")

# %% [markdown] lang="fr"
# ### Exercice 5 — ce qu’occupe une réplique
#
# Un entraînement en *Data Parallelism*, fp32 et AdamW, sur `dp` GPU, pour un batch global de `global_batch` images
# (`dp` le divise). Majorez ce qu’occupe chaque GPU par la somme de trois termes :
#
# - les états ;
# - à partir de `dp` = 2, les *buckets* de DDP : une seconde copie des gradients, en fp32 (TP 03) ;
# - les activations : `sample_bytes` octets par image.

# %% [markdown] lang="en"
# ### Exercise 5 — what a replica takes
#
# A training with data parallelism, fp32 and AdamW, on `dp` GPUs, for a global batch of `global_batch` images (`dp`
# divides it). Bound what each GPU takes by the sum of three terms:
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
# De gauche à droite, on multiplie les GPU par 64, et la partie basse ne diminue pas ; de 1 à 2 GPU, elle augmente même,
# à cause des *buckets*. **Seules les activations sont réparties.** Aucun nombre de V100 n’entraînera ce modèle ainsi.
#
# **Expliquez.** Pour chaque GPU : une réplique tient-elle avec une image ? Et avec 1 024 GPU au lieu de 64 ? La cellule
# répond, puis donne le pic en octets par paramètre, et ce qui le compose.

# %% [markdown] lang="en"
# From left to right, GPUs are multiplied by 64, and the lower part does not shrink; from 1 to 2 GPUs it even grows,
# because of the buckets. **Activations alone are divided.** No number of V100s will ever train this model in this way.
#
# **Explain.** For each GPU: does a replica fit with one image? And with 1,024 GPUs instead of 64? The cell answers,
# then gives the peak in bytes per parameter, and what it is made of.

# %% name="limit-answers"
many = dlojz.RunConfig.of(**{**coatnet_7.to_dict(), "layout": coatnet_7.layout, "dp": 1024})
for device in devices:
    fits = [
        levers.taken_bytes(forecast(config, device=device)) <= device.memory_bytes for config in (replica.config, many)
    ]
    print(f"{device.name:>8}  {fits}")
print(replica.moment, round(replica.memory.peak_bytes / parameters, 1))
print({name: round(held / parameters, 1) for name, held in replica.memory.at_peak_bytes.items() if held})

# %% [markdown] lang="fr"
# On retrouve les **24 octets** par paramètre ! Avec une seule image, le pic est dans la mise à jour de l’optimiseur :
# aux 16 octets d’états s’ajoutent 4 octets de *buckets* et 4 de temporaires, car AdamW met à jour tous les poids d’un
# seul coup (`foreach`). (`workspace` réunit ces deux parts ; `buffers` désigne les statistiques des *BatchNorm*.) Mais
# ce n’est vrai que pour un si petit batch : dès que les activations dominent, la règle n’a plus de sens.
#
# Pour aller plus loin, il faudra répartir les états eux-mêmes : c’est *ZeRO*, au TP 04. Restent, sur un seul GPU, deux
# façons d’échanger du temps contre de la mémoire.
#
# ## 6. Recalculer : les points de contrôle d’activation
#
# Plutôt que de garder les activations d’un morceau du modèle, on n’en garde que l’**entrée**, et la passe arrière
# refait la passe avant de ce morceau juste avant de s’en servir. `checkpoint(f, x, use_reentrant=False)` renvoie `f(x)`
# et s’occupe du reste, y compris de tirer une seconde fois le même masque de *dropout*.

# %% [markdown] lang="en"
# Here are the **24 bytes** per parameter again! With one image the peak is in the optimizer's update: to the 16 bytes
# of states come 4 bytes of buckets and 4 of temporaries, as AdamW updates all weights at once (`foreach`). (`workspace`
# is both together; `buffers` are the statistics of BatchNorm.) But that holds for so small a batch only: once
# activations dominate, the rule no longer means anything.
#
# To go further, the states themselves must be partitioned: that is ZeRO, in lab 04. There remain, on one single GPU,
# two ways to trade time for memory.
#
# ## 6. Computing again: activation checkpointing
#
# Instead of keeping the activations of a piece of the model, keep its **input** alone; the backward pass runs the
# piece's forward pass again just before it needs it. `checkpoint(f, x, use_reentrant=False)` returns `f(x)` and sees to
# the rest, drawing the same dropout mask included.

# %% name="checkpoint-demo"
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
images = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
torch.equal(mlp(images), checkpoint(mlp, images, use_reentrant=False))

# %% [markdown] lang="fr"
# ### Exercice 6 — par segments
#
# Exécutez les `blocks` l’un après l’autre, par segments de `per_segment` blocs consécutifs (le dernier peut être plus
# court). Après la passe avant, seule l’entrée de chaque segment doit rester en mémoire. Renvoyez la sortie.

# %% [markdown] lang="en"
# ### Exercise 6 — by segments
#
# Run the `blocks` one after the other, in segments of `per_segment` consecutive blocks (the last one may be shorter).
# After the forward pass only the input of each segment may be left in memory. Return the output.


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
# De quelle longueur faire les segments ? S’ils sont courts, on garde beaucoup d’entrées ; s’ils sont longs, la passe
# arrière reconstitue d’un coup toutes les activations de l’un d’eux. Pour `n` blocs semblables, le pic varie comme
# `n / k + k` : il est le plus bas pour `k = √n` (Chen et al., 2016). Votre fonction, tracée sur 36 blocs :

# %% [markdown] lang="en"
# How long should segments be? Short ones keep many inputs; with long ones the backward pass restores all activations of
# one at once. For `n` blocks alike, the peak goes like `n / k + k`: it is lowest for `k = √n` (Chen et al., 2016). Your
# function, traced on 36 blocks:

# %% name="segments-figure"
with torch.device("meta"):
    many_blocks = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(36)]
    tokens = torch.empty(4096, 128)
figures.segments(checkpointed, many_blocks, tokens, lengths=(1, 2, 3, 4, 6, 9, 12, 18, 36))

# %% [markdown] lang="fr"
# **Votre prédiction.** La passe arrière coûte deux fois la passe avant. Si l’on refait toute la passe avant, par
# combien les opérations d’un pas sont-elles multipliées ?

# %% [markdown] lang="en"
# **Your prediction.** The backward pass costs twice the forward pass. If the whole forward pass is run again, how many
# times the operations of a step is that?

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
# Moins que 4/3, et ce n’est pas une erreur de mesure : le dernier produit de chaque bloc n’est pas refait, car la passe
# arrière du bloc n’a pas besoin de sa sortie. Or, dans un bloc de Transformer, la seconde couche du MLP pèse un tiers
# des produits. PyTorch s’arrête dès qu’il a retrouvé tout ce qui manquait.
#
# Le mode **sélectif** (`"selective"`) va moins loin : il garde le résultat des produits de matrices, des convolutions
# et de l’attention, et ne recalcule que le reste, qui coûte peu d’opérations : *LayerNorm*, GELU, *dropout*. (Le mode
# *selective* de Megatron-LM, de Korthikanti et al., 2022, est autre chose : il recalcule le cœur de l’attention et
# garde le reste. Ici, c’est l’attention que l’on garde.) Entre `"selective"` et `"full"`, celui de torchtitan
# (`"every_second"`) recalcule en plus un produit sur deux, dans l’ordre où ils sont exécutés.
#
# Dans le tableau, ne lisez pas la vitesse : ces quatre exécutions ont été mesurées l’une après l’autre, et une machine
# occupée à autre chose peut faire paraître le recalcul plus rapide. Comparez les octets et les opérations.

# %% [markdown] lang="en"
# It is less than 4/3, and this is not a measurement error: the last product of each block is not run again, as the
# backward pass of the block does not need its output; and in a Transformer block the second layer of the MLP is a third
# of the products. PyTorch stops once it has found all that was missing.
#
# **Selective** checkpointing (`"selective"`) goes less far: it keeps the results of matrix products, convolutions and
# attention, and computes again only the rest, which takes few operations: layer norms, GELU, dropout. (Megatron-LM's
# *selective* mode, from Korthikanti et al., 2022, is another thing: it recomputes the core of attention and keeps the
# rest. Here attention is what is kept.) Between `"selective"` and `"full"`, torchtitan's (`"every_second"`) also
# computes every second product again, in the order in which they run.
#
# Do not read the speed in the table: these four runs were measured one after the other, and a machine that is busy
# otherwise can make checkpointing look faster. Compare the bytes and the operations.

# %% name="compare-checkpointing" tags=["nbval-ignore-output"]
dlojz.compare([vit_64, selective, every_second, full])

# %% name="checkpointing-seen"
for run in (vit_64, selective, every_second, full):
    footprint, forecasted = run.record.footprint(), dlojz.predict(run.config)
    print(
        f"{run.config.layout.checkpointing:>12}",
        format_bytes(footprint.memory.activations_bytes),
        format_bytes(footprint.memory.peak_bytes),
        abs(footprint.memory.peak_bytes / forecasted.memory.peak_bytes - 1) < 1e-3,
        abs(footprint.step_flops / forecasted.step_flops - 1) < 0.02,
    )

# %% [markdown] lang="fr"
# Et sur un V100 ? CoAtNet-0 encore, avec et sans points de contrôle. La part fixe ne change pas ; c’est la pente qui
# baisse, moins qu’on ne l’espère : le pic est maintenant dans le plus gros des blocs, dont la passe arrière reconstitue
# d’un coup toutes les activations.

# %% [markdown] lang="en"
# And on a V100? CoAtNet-0 again, with and without checkpointing. The fixed part does not change; the slope falls, less
# than one hopes: the peak is now in the biggest of the blocks, all of whose activations the backward pass restores at
# once.

# %% name="checkpointing-figure"
levels = {
    level: dlojz.RunConfig.of(model="coatnet_0", data="synthetic", checkpointing=level)
    for level in ("none", "selective", "full")
}
figures.memory_by_batch(levels, batches=(8, 64), on=gpu, others=[hardware.device("v100-16")])

# %% [markdown] lang="fr"
# ## 7. Décharger : la mémoire hôte
#
# L’autre échange : les activations partent vers la mémoire de l’hôte pendant la passe avant, et reviennent pour la
# passe arrière. Autograd s’y prête : il confie à une fonction `pack` chaque tenseur qu’il doit garder, garde ce qu’elle
# renvoie, et le passe à `unpack` quand il lui faut le tenseur.
#
# `host` représente la mémoire de l’hôte : `host.store(tensor)` y copie un tenseur et renvoie un numéro ;
# `host.fetch(number)` renvoie le tenseur.
#
# ### Exercice 7 — le déchargement
#
# Renvoyez le couple `(pack, unpack)` qui décharge tout ce qu’autograd garde, **sauf les paramètres** du modèle : ils
# resteront de toute façon sur le GPU. Attention : autograd peut présenter un poids sous la forme d’une vue, transposée
# par exemple. Deux tenseurs partagent leur mémoire quand leur `untyped_storage().data_ptr()` est le même.

# %% [markdown] lang="en"
# ## 7. Offloading: host memory
#
# The other trade: activations move to the memory of the host during the forward pass, and come back for the backward
# pass. Autograd lends itself to it: it hands every tensor that it has to keep to a function `pack`, keeps what that
# returns, and hands it to `unpack` when it needs the tensor.
#
# `host` stands for the memory of the host: `host.store(tensor)` copies a tensor there and returns a number;
# `host.fetch(number)` returns the tensor.
#
# ### Exercise 7 — offloading
#
# Return the pair `(pack, unpack)` that offloads all that autograd keeps, **except the parameters** of the model: they
# will stay on the GPU anyway. Mind that autograd may hand over a weight as a view, transposed for instance. Two tensors
# see the same memory when their `untyped_storage().data_ptr()` is the same.


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
# Le paquet fait de même, pour tous ses moteurs, avec `offload="activations"`.
#
# **Votre prédiction.** `vit_tiny`, micro-batch de 64 : combien d’octets attendront en mémoire hôte ? Vous avez tout ce
# qu’il faut dans `memory_64`.

# %% [markdown] lang="en"
# The package does the same, for all its engines, with `offload="activations"`.
#
# **Your prediction.** `vit_tiny`, micro-batch of 64: how many bytes will wait in host memory? You have all you need in
# `memory_64`.

# %% name="predict-offloaded" stub="value"
lab.predict(
    "offloaded-bytes",
    ### BEGIN SOLUTION
    memory_64.activations_bytes,
    ### END SOLUTION
)

# %% name="run-offload" tags=["nbval-ignore-output"]
offloaded = dlojz.run(vit_64.config, offload="activations")
offloaded

# %% name="reveal-offloaded"
lab.reveal("offloaded-bytes", offloaded.record.footprint().memory.host_bytes)

# %% [markdown] lang="fr"
# Vos hooks déchargent-ils autant que ceux du paquet ? Prenons un AlexNet, où convolutions, ReLU et *max-pooling* se
# suivent. La cellule donne le rapport.

# %% [markdown] lang="en"
# Do your hooks offload as much as those of the package? Let us take an AlexNet, where convolutions, ReLU and
# max-pooling follow one another. The cell gives the ratio.

# %% name="offload-ratio"
from dlojz.by_hand.activation_offload import ActivationOffload
from dlojz.labs.lab02_memory.exercises_recompute import Host

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
# donc copié deux fois. `torch.autograd.graph.save_on_cpu`, l’outil de PyTorch, fait comme vous. Le paquet ne déplace
# qu’une fois chaque zone de mémoire ; lisez comment dans
# [dlojz/by_hand/activation_offload.py](../../dlojz/by_hand/activation_offload.py).
#
# Les cinq entraînements, mesurés : ce que chacun gagne en mémoire, ce qu’il coûte en opérations ou en transport. (Sur
# notre machine, l’« hôte » est la même mémoire : la copie est réelle, le transport ne l’est pas.)

# %% [markdown] lang="en"
# Yours move more: the result of a ReLU is kept by itself **and** by the max-pooling that follows, so it is copied
# twice. `torch.autograd.graph.save_on_cpu`, PyTorch's own tool, does as you do. The package moves each piece of memory
# once; read how in [dlojz/by_hand/activation_offload.py](../../dlojz/by_hand/activation_offload.py).
#
# The five trainings, measured: what each gains in memory, what it costs in operations or in transport. (On our machine
# the "host" is the same memory: the copy is real, the transport is not.)

# %% name="exchange-figure" tags=["nbval-ignore-output"]
runs = {"none": vit_64, "selective": selective, "every_second": every_second, "full": full}
figures.operations_for_memory({**runs, 'offload="activations"': offloaded})

# %% [markdown] lang="fr"
# ### Exercice 8 — ce que coûte le transport
#
# Sur un GPU, `moved_bytes` octets partent pendant la passe avant, qui dure `forward_s` secondes, et reviennent pendant
# la passe arrière, qui dure deux fois plus. Le lien transporte `link_bytes_per_s` octets par seconde, pendant que le
# GPU calcule. Renvoyez les secondes que le déchargement **ajoute** au pas : à chaque passe, la part du transport qui
# dure plus longtemps que le calcul.

# %% [markdown] lang="en"
# ### Exercise 8 — what transport costs
#
# On a GPU, `moved_bytes` bytes leave during the forward pass, which takes `forward_s` seconds, and come back during the
# backward pass, which takes twice as long. The link carries `link_bytes_per_s` bytes per second while the GPU computes.
# Return the seconds that offloading **adds** to the step: in each pass, what is longer than the computation.


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
# **Expliquez.** Pour une image de CoAtNet-7, faut-il recalculer ou décharger ? Supposons un GPU qui soutient 62
# TFLOP/s (40 % d’un A100 en TF32), et deux liens : PCIe 4.0, 25 Go/s ; NVLink-C2C d’un GH200, 450 Go/s (NVIDIA,
# 2023). La cellule donne les millisecondes qu’ajoutent le recalcul complet, puis le déchargement par chacun des deux
# liens.

# %% [markdown] lang="en"
# **Explain.** For one image of CoAtNet-7, should one compute again, or offload? Suppose a GPU that sustains 62 TFLOP/s
# (40% of an A100 in TF32), and two links: PCIe 4.0, 25 GB/s; the NVLink-C2C of a GH200, 450 GB/s (NVIDIA, 2023). The
# cell gives the milliseconds added by full recomputation, then by offloading over each of the two links.

# %% name="recompute-or-offload"
forward_s = models.describe("coatnet_7", 512).flops / 62e12
links = {"PCIe 4.0": 25e9, "NVLink-C2C": 450e9}
print(round(1e3 * forward_s))
asked(lambda: {name: round(1e3 * exposed_seconds(sample_bytes, link, forward_s)) for name, link in links.items()})

# %% [markdown] lang="fr"
# Par PCIe, le recalcul est bien plus rapide ; par NVLink-C2C, le déchargement ne coûte plus rien. Aucune méthode n’est
# la meilleure : tout dépend de la machine.
#
# ## 8. Sous un budget, bloc par bloc
#
# Pourquoi faire le même choix pour tous les blocs ? Recalculer (`"recompute"`) ne garde que l’entrée d’un bloc et coûte
# sa passe avant ; décharger (`"offload"`) ne garde rien et coûte le transport ; garder (`"keep"`) ne coûte rien, tant
# que cela tient.
#
# Le pic est toujours un maximum sur des **instants**. La passe arrière va du dernier bloc au premier : quand elle
# traverse un bloc, les suivants ont tout rendu, et les précédents détiennent encore ce que le plan y laisse.
#
# ### Exercice 9 — garder, recalculer ou décharger
#
# `blocks` est la liste des blocs, du premier au dernier. Chacun a trois dictionnaires, indexés par le choix :
# `held_bytes`, ce qu’il détient jusqu’à sa passe arrière ; `backward_bytes`, ce qu’il faut pendant celle-ci **en plus**
# de ce que détiennent les blocs précédents ; `seconds`, ce que le choix ajoute au pas.
#
# Parmi les plans (un choix par bloc) dont le pic tient dans `budget_bytes`, renvoyez celui qui ajoute le moins de
# secondes, ou None si aucun ne tient. Les blocs sont peu nombreux : `plans` les énumère tous.

# %% [markdown] lang="en"
# Over PCIe, computing again is much faster; over NVLink-C2C, offloading costs nothing any more. No method is best: it
# depends on the machine.
#
# ## 8. Under a budget, block by block
#
# Why make the same choice for all blocks? Recomputing (`"recompute"`) holds only the input of a block and costs its
# forward pass; offloading (`"offload"`) holds nothing and costs the transport; keeping (`"keep"`) costs nothing, as
# long as it fits.
#
# The peak is still a maximum over **moments**. The backward pass goes from the last block to the first: while it is in
# one block, the later ones have given everything back, and the earlier ones hold what the plan leaves there.
#
# ### Exercise 9 — keep, recompute or offload
#
# `blocks` is the list of the blocks, from first to last. Each has three dictionaries, by choice: `held_bytes`, what it
# holds until its backward; `backward_bytes`, what is needed during that **on top of** what the blocks before it hold;
# `seconds`, what the choice adds to the step.
#
# Of the plans (one choice per block) whose peak fits into `budget_bytes`, return the one that adds the fewest seconds,
# or None if none fits. The blocks are few: `plans` goes through all of them.

# %% name="activation-plan"
from itertools import product


def choose(blocks, budget_bytes):
    plans = product(("keep", "recompute", "offload"), repeat=len(blocks))
    ### BEGIN SOLUTION
    def peak(plan):
        held = most = 0
        for block, choice in zip(blocks, plan, strict=True):
            most = max(most, held + block.backward_bytes[choice])
            held += block.held_bytes[choice]
        return most

    def seconds(plan):
        return sum(block.seconds[choice] for block, choice in zip(blocks, plan, strict=True))

    return min((plan for plan in plans if peak(plan) <= budget_bytes), key=seconds, default=None)
    ### END SOLUTION


lab.check("activation-plan", choose)

# %%
# lab.hint("activation-plan")

# %% [markdown] lang="fr"
# En vrai : `coatnet_tiny`, micro-batch de 32, 40 Mio. Le paquet en fait un **programme linéaire en nombres entiers** :
# une variable 0 ou 1 par bloc et par choix, une inégalité par instant, passe avant comprise
# ([activation_budget.py](../../dlojz/planner/activation_budget.py)). Votre plan, le sien, et le pic que la prévision
# donne à chacun :

# %% [markdown] lang="en"
# For real: `coatnet_tiny`, micro-batch of 32, 40 MiB. The package makes it an **integer linear programme**: a variable,
# 0 or 1, per block and choice, an inequality per moment, those of the forward pass too
# ([activation_budget.py](../../dlojz/planner/activation_budget.py)). Your plan, the package's, and the peak that the
# forecast gives for each:

# %% name="plans"
from dlojz.labs.lab02_memory.exercises_recompute import plans_table

small = dlojz.RunConfig.of(model="coatnet_tiny", micro_batch=32, steps=6)
plan = plan_activations(small, 40 * 2**20)
plans_table(choose, plan)

# %% [markdown] lang="fr"
# Exécutons-le. Suivent trois pics : si l’on garde tout, prédit pour le plan, mesuré par la sonde.

# %% [markdown] lang="en"
# Let us run it. Three peaks follow: with everything kept, predicted for the plan, measured by the probe.

# %% name="run-plan" tags=["nbval-ignore-output"]
budgeted = dlojz.run(small, activation_plan=plan.config.layout.activation_plan)
budgeted

# %% name="plan-measured"
figures.plan_measured(plan, budgeted.record.footprint().memory.peak_bytes)

# %% [markdown] lang="fr"
# Et CoAtNet-7, six images, sur un H100 ? Tout garder ne tient pas. Voici le temps ajouté selon le budget, avec le plan
# de chacun à droite ; la ligne en tirets marque 70 Gio. (Soixante blocs font 3⁶⁰ plans : plus question de les
# énumérer.)

# %% [markdown] lang="en"
# And CoAtNet-7, six images, on an H100? Keeping everything does not fit. Here is the time added by budget, with the
# plan of each at the right; the dashed line is at 70 GiB. (Sixty blocks make 3⁶⁰ plans: nobody tries them all.)

# %% name="budget-curve"
from dlojz.display.figures.run_figures import activation_curve_figure

six = levers.with_micro_batch(coatnet_7, 6)
h100_plan = plan_activations(six, 70 * 2**30, device=hardware.device("h100"))
print(*map(format_bytes, (h100_plan.kept_peak_bytes, hardware.device("h100").memory_bytes)))
activation_curve_figure(h100_plan)

# %% [markdown] lang="fr"
# **Expliquez.** Revoyez la figure de la section 5 : pourquoi les premiers blocs d’abord ? Pourquoi la courbe est-elle
# presque plate à droite, et raide à gauche ? La cellule met ce que le plan ajoute en regard d’un pas entier.

# %% [markdown] lang="en"
# **Explain.** Look at the figure of section 5 again: why the first blocks first? Why is the curve nearly flat at the
# right, and steep at the left? The cell compares what the plan adds with a whole step.

# %% name="budget-price"
step_s = 3 * 6 * models.describe("coatnet_7", 512).flops / h100_plan.tables.speeds.flop_per_s
f"{1e3 * h100_plan.tables.costs(h100_plan.choices)[0]:.0f} ms / {1e3 * step_s:.0f} ms"

# %% [markdown] lang="fr"
# Les premiers blocs ont de grandes cartes et peu d’opérations : chaque milliseconde y libère beaucoup d’octets. Après
# eux, il ne reste que des blocs coûteux qui en libèrent peu. En ligne de commande : `dlojz memory … --budget 70GiB`.
#
# ## 9. À vous
#
# La calculatrice réunit tout ce TP : changez le modèle, le batch, la précision, l’optimiseur, la répartition, les
# points de contrôle, le déchargement, et regardez ce qui remplit le GPU. Sans noyau actif, la figure fixe montre la
# même chose.

# %% [markdown] lang="en"
# The first blocks have large maps and few operations: each millisecond frees many bytes there. After them, only
# expensive blocks are left, which free few. On the command line: `dlojz memory … --budget 70GiB`.
#
# ## 9. Your turn
#
# The calculator brings this whole lab together: change model, batch, precision, optimizer, layout, checkpointing,
# offloading, and watch what fills the GPU. Where no kernel runs, the static figure shows the same.

# %% name="calculator" tags=["nbval-ignore-output"]
from dlojz.display.widgets.calculator import calculator, still_calculator

chosen = {"model": "coatnet_0", "data": "synthetic", "micro_batch": 64, "device": "v100-32"}
calculator(**chosen)

# %% name="still-calculator" tags=["nbval-ignore-output"]
still_calculator(**chosen)

# %% [markdown] lang="fr"
# Et quand cela ne tient pas ? `levers.levers` essaie tous les leviers, chacun seul : ici CoAtNet-0 et un micro-batch de
# 192, sur un V100 de 32 Go. Chaque ligne donne ce qui serait occupé sur le GPU, puis ce qui serait économisé.

# %% [markdown] lang="en"
# And if it does not fit? `levers.levers` tries every lever, each alone: here CoAtNet-0 with a micro-batch of 192, on a
# V100 with 32 GB. Each line gives what it would take of the GPU, then what it would save.

# %% name="levers"
too_big = levers.with_micro_batch(coatnet_0, 192)
print(format_bytes(taken(192)), "/", format_bytes(gpu.memory_bytes))
for lever in levers.levers(too_big, gpu):
    print(f"{format_bytes(lever.taken_bytes):>9}  {format_bytes(lever.saved_bytes):>9}  {lever.change}")

# %% [markdown] lang="fr"
# **En grand.** Tout ce que vous venez de faire vaut tel quel pour un vrai gros modèle, en changeant une ligne :
# `model="coatnet_7"` (ou `"vit_h_14"`, `"llama_3_8b"`, `"qwen_3_8b"`, `"deepseek_v2_lite"`), `device="h100"`. Un modèle
# de texte y est compté avec son propre vocabulaire, et ses têtes de clés et de valeurs partagées (Qwen-3) ou son
# attention latente et ses experts (DeepSeek).

# %% [markdown] lang="en"
# **At full size.** All you have just done holds as it is for a really big model, by changing one line:
# `model="coatnet_7"` (or `"vit_h_14"`, `"llama_3_8b"`, `"qwen_3_8b"`, `"deepseek_v2_lite"`), `device="h100"`. Models of
# text are counted with their own vocabulary, with shared key and value heads (Qwen-3) or latent attention and experts
# (DeepSeek).

# %% name="full-size"
big = forecast(dlojz.RunConfig.of(model="coatnet_7", data="synthetic", image_size=512, micro_batch=1), device="h100")
for name in ("peak", "needed", "device"):
    print(f"{name:>6}", format_bytes(getattr(big.memory, f"{name}_bytes")))
big.moment

# %% [markdown] lang="fr"
# Trois nombres pour une même mémoire, à ne pas confondre : le **pic** de ce qui est alloué ; ce qu’il **faut** au moins
# sur le GPU, avec le contexte CUDA et NCCL ; et ce que montre **`nvidia-smi`**, où l’allocateur garde en plus, en
# cache, ce qu’il a déjà réservé. S’il manque de place, il rend ce cache avant d’échouer : c’est le deuxième nombre qui
# décide si un modèle tient, ici, dans `dlojz memory` et dans `dlojz plan`. Près de la limite, ces restitutions
# ralentissent l’entraînement : `dlojz plan` signale un GPU rempli à plus de 90 %. Dans votre projet,
# `torch.cuda.max_memory_allocated()` donne le premier nombre, `torch.cuda.max_memory_reserved()` ce que l’allocateur a
# réservé.

# %% [markdown] lang="en"
# Three numbers for one memory, not to be confused: the **peak** of what is allocated; what the GPU **needs** at least,
# with the CUDA context and NCCL; and what **`nvidia-smi`** shows, where the allocator also caches what it has reserved
# before. When memory is short it gives this cache back before it fails: the second number decides whether a model fits,
# here, in `dlojz memory` and in `dlojz plan`. Near the limit these releases cost time: `dlojz plan` names a GPU that is
# more than 90% full. In a project of yours, `torch.cuda.max_memory_allocated()` gives the first number,
# `torch.cuda.max_memory_reserved()` what the allocator has reserved.

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Ajoutez au script deux options, `--bf16` et `--checkpointing`, et le pic de mémoire du GPU à la fin. Continuez dans
# votre `train.py`, ou partez de la solution du TP précédent : `dlojz labs script 02 un_autre_dossier` en écrit un, avec
# un `# TODO` à chaque endroit à compléter. Jugez-le par `dlojz labs judge 02 my_training/train.py`.
#
# À regarder : `dlojz run my_training/train.py -- --checkpointing`, puis `dlojz compare` avec l’entraînement sans cette
# option. Les pertes sont les mêmes, les activations au pic non.
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
# Add two options to the script, `--bf16` and `--checkpointing`, and the peak memory of the GPU at the end. Go on in
# your `train.py`, or begin with the solution of the lab before: `dlojz labs script 02 another_folder` writes one, with
# a `# TODO` at each place to fill in. Judge it by `dlojz labs judge 02 my_training/train.py`.
#
# What to look for: `dlojz run my_training/train.py -- --checkpointing`, then `dlojz compare` with the training without
# that option. The losses are the same, the activations at the peak are not.
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

# %% [markdown] lang="fr"
# ## Bilan
#
# - Les **états** : de 8 à 18 octets par paramètre, selon la précision et l’optimiseur (20 si l’on garde les gradients
#   dans les deux précisions) ; indépendants du batch.
# - Les **activations** : proportionnelles au batch, `sbh (34 + 5as/h)` par couche de transformer, `34 sbh` avec
#   l’attention fusionnée.
# - Le **pic** : le maximum des sommes, pas la somme des maximums.
# - Le *Data Parallelism* ne répartit que les activations.
# - Les points de contrôle coûtent au plus un tiers d’opérations en plus ; le déchargement, le temps de transport que le
#   calcul ne cache pas.
# - Sous un **budget**, on choisit bloc par bloc : d’abord là où une milliseconde libère le plus d’octets au pic.

# %% [markdown] lang="en"
# ## Summary
#
# - **States**: 8 to 18 bytes per parameter, depending on precision and optimizer (20 where gradients are kept in both
#   precisions); independent of the batch.
# - **Activations**: proportional to the batch, `sbh (34 + 5as/h)` per transformer layer, `34 sbh` with fused attention.
# - The **peak**: the largest of the sums, not the sum of the largest.
# - Data parallelism divides activations alone.
# - Checkpointing costs at most a third more operations; offloading costs the transport that computation does not hide.
# - Under a **budget**, choose block by block: first where a millisecond frees most bytes at the peak.

# %%
lab.progress()
