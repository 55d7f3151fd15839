# %% [markdown] lang="fr"
# # TP 08 — Le meilleur compromis
#
# Vous disposez désormais de cinq leviers, et chacun se paie : le *Data Parallelism* en mémoire et en *all-reduce*, ZeRO
# en messages, le *Pipeline Parallelism* en bulle, le *Tensor Parallelism* en communications difficiles à recouvrir, le
# recalcul en opérations. Pour un modèle, un calculateur et un batch donnés, cela fait des milliers de
# **configurations** : beaucoup sont impossibles, d’autres ne tiennent pas en mémoire, et parmi celles qui restent, la
# plus rapide l’est plusieurs fois plus que d’autres. Dans ce TP, vous construisez pièce par pièce ce qui les départage,
# puis vous confrontez le choix du planificateur à la mesure : sur Jean Zay, avec les relevés de BLOOM, et ici même, sur
# deux processus.
#
# À la fin, vous saurez :
#
# - dire ce que coûte l’entraînement d’un géant, et ce que détient chacun de ses rangs ;
# - résumer un lien en deux nombres, et choisir entre étages et répliques ;
# - trouver la configuration la plus rapide parmi celles qui tiennent, et les compromis que rien ne bat ;
# - poser le choix des découpes en programme linéaire, et celui des étages en programmation dynamique ;
# - défendre un choix face à une mesure, et dire jusqu’où l’on peut se fier à un modèle.
#
# Comptez une heure et demie. Deux processus suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 08 — The best compromise
#
# By now you have five levers, and each has its price: data parallelism costs memory and all-reduces, ZeRO messages,
# pipeline parallelism a bubble, tensor parallelism communications that are hard to hide, recomputation operations. For
# one model, one cluster and one batch that makes thousands of **layouts**: many are impossible, others do not fit into
# memory, and of those that are left the fastest is several times as fast as others. In this lab you build, piece by
# piece, what sets them apart, then hold the planner's choice against measurements: on Jean Zay, with BLOOM's readings,
# and right here, on two processes.
#
# By the end you can:
#
# - tell what training a giant costs, and what each of its ranks holds;
# - sum a link up in two numbers, and choose between stages and replicas;
# - find the fastest layout of those that fit, and the compromises that nothing beats;
# - put the choice of shardings as a linear programme, and that of stages as dynamic programming;
# - defend a choice against a measurement, and tell where trust in a model ends.
#
# Allow an hour and a half. Two processes are enough, without GPUs.

# %% name="setup"
import statistics

import dlojz
from dlojz import labs
from dlojz.cost_model.step import SECONDS_PER_DAY, training_s
from dlojz.hardware import cluster
from dlojz.labs.lab08_compromise import compromise_tables as tables
from dlojz.labs.lab08_compromise import figures
from dlojz.labs.lab08_compromise.exercises_alpa import perceptron, solve
from dlojz.planner.alpa.graph import mlp
from dlojz.planner.alpa.intra_operator import shard
from dlojz.planner.alpa.mesh import DeviceMesh
from dlojz.planner.this_machine import plan_here
from dlojz.running.measure import calibrated, measure_rounds

lab = labs.start("08")

# %% [markdown] lang="fr"
# ## 1. Le prix d’un géant
#
# Avant de chercher mieux, l’ordre de grandeur. Un token coûte 6 opérations par paramètre : 2 en passe avant, 4 en passe
# arrière ; 8 si l’on recalcule les activations. Pour P paramètres, T tokens et n GPU à X FLOP/s chacun, Narayanan et
# al. (2021) en tirent
#
# $$\text{durée} = \frac{8\,T P}{n X}$$
#
# **Votre prédiction.** GPT-3 (Brown et al., 2020) : 175 milliards de paramètres, 300 milliards de tokens, sur 1 024
# A100 qui atteignent 140 TFLOP/s chacun, comme dans l’article. Combien de **jours** ?

# %% [markdown] lang="en"
# ## 1. The price of a giant
#
# Before looking for better, the order of magnitude. A token costs 6 operations per parameter: 2 in forward, 4 in
# backward; 8 if activations are computed again. For P parameters, T tokens and n GPUs at X FLOP/s each, Narayanan et
# al. (2021) find
#
# $$\text{time} = \frac{8\,T P}{n X}$$
#
# **Your prediction.** GPT-3 (Brown et al., 2020): 175 billion parameters, 300 billion tokens, on 1,024 A100s that reach
# 140 TFLOP/s each, as in the paper. How many **days**?

# %% name="predict-days" stub="value"
lab.predict(
    "training-days",
    ### BEGIN SOLUTION
    8 * 175e9 * 300e9 / (1024 * 140e12) / 86_400,
    ### END SOLUTION
)

# %% name="reveal-days"
gpt3_parameters = 175e9
lab.reveal("training-days", training_s(8 * gpt3_parameters, 300e9, 1024, 140e12) / SECONDS_PER_DAY)

# %% [markdown] lang="fr"
# Voici la formule à côté du modèle de coût qui vous accompagnera dans ce TP : à gauche les modèles du cours sur un et
# quatre DGX A100, à droite le tableau de Narayanan et al., avec les durées tirées des débits publiés.

# %% [markdown] lang="en"
# Here is the formula beside the cost model that we use throughout this lab: at the left the course's models on one and
# four DGX A100, at the right the table of Narayanan et al., with the times that the published rates come to.

# %% name="giants"
figures.giants()

# %% [markdown] lang="fr"
# **Expliquez.** La formule suppose le même débit pour tous. Où le modèle de coût s’en écarte-t-il, et dans quel sens ?
# Et pourquoi le modèle de mille milliards n’a-t-il pas de durée sur quatre DGX ?
#
# <details><summary>Réponse</summary>
#
# À gauche, le modèle de coût est plus rapide : il choisit les bibliothèques d’aujourd’hui, souvent sans recalcul (6
# opérations au lieu de 8), et atteint plus de 140 TFLOP/s. À droite, il refait le calcul des configurations de
# l’époque, et s’en écarte peu. Sur quatre DGX, les états du plus grand modèle ne tiennent pas : c’est la première
# question à poser, **est-ce que ça tient ?**
#
# </details>
#
# ## 2. Ce qui tient
#
# ### Exercice 1 — les octets d’un rang
#
# Megatron-LM, en précision mixte : poids en bf16 (2 octets), gradients accumulés en fp32 (4), et pour Adam une copie
# maître et deux moments en fp32 (12). ZeRO répartit entre les dp répliques les états de l’optimiseur (niveau 1), les
# gradients aussi (2), les poids aussi (3). Avec 1F1B, un étage garde les activations de tous les micro-batches qu’il a
# commencés et dont le gradient n’est pas revenu.
#
# Renvoyez `(weights, gradients, optimizer, activations)`, en octets, pour un rang de l’étage `stage` (à partir de 0).
# `layout` a les champs `dp`, `tp`, `pp`, `zero` et `micro_batches` ; `parameters` est le nombre de paramètres de
# l’étage **entier** ; `micro_batch_bytes`, ce que **ce rang** garde d’un micro-batch.

# %% [markdown] lang="en"
# **Explain.** The formula takes one rate for all. Where does the cost model disagree with it, and in which direction?
# And why has the trillion-parameter model no time on four DGX?
#
# <details><summary>Answer</summary>
#
# At the left the cost model is faster: it chooses today's libraries, often without recomputation (6 operations instead
# of 8), and reaches more than 140 TFLOP/s. At the right it computes the layouts of that time, and stays close. On four
# DGX the states of the largest model do not fit. That is the first question to ask: **does it fit?**
#
# </details>
#
# ## 2. What fits
#
# ### Exercise 1 — the bytes of a rank
#
# Megatron-LM, in mixed precision: weights in bf16 (2 bytes), gradients accumulated in fp32 (4), and for Adam a master
# copy and two moments in fp32 (12). ZeRO partitions over the dp replicas the optimizer's states (stage 1), the
# gradients too (2), the weights too (3). Under 1F1B a stage keeps the activations of all micro-batches that it has
# begun and whose gradient has not come back.
#
# Return `(weights, gradients, optimizer, activations)`, in bytes, for a rank of stage `stage` (from 0). `layout` has
# the fields `dp`, `tp`, `pp`, `zero` and `micro_batches`; `parameters` is the number of parameters of the **whole**
# stage; `micro_batch_bytes`, what **this rank** keeps of one micro-batch.


# %% name="rank-bytes"
def rank_bytes(layout, stage, parameters, micro_batch_bytes):
    ### BEGIN SOLUTION
    own = parameters / layout.tp
    weights = 2 * own / (layout.dp if layout.zero >= 3 else 1)
    gradients = 4 * own / (layout.dp if layout.zero >= 2 else 1)
    optimizer = 12 * own / (layout.dp if layout.zero >= 1 else 1)
    return weights, gradients, optimizer, micro_batch_bytes * min(layout.pp - stage, layout.micro_batches)
    ### END SOLUTION


lab.check("rank-bytes", rank_bytes)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("rank-bytes")

# %% [markdown] lang="fr"
# Votre compte pour GPT-3 sur 384 A100 de Jean Zay, à côté de celui du planificateur, pour trois des douze étages :

# %% [markdown] lang="en"
# Your figures for GPT-3 on 384 A100s of Jean Zay, beside the planner's, for three of the twelve stages:

# %% name="ranks"
gpt3 = dlojz.plan("gpt3-175b", "jean_zay_a100", gpus=384, batch=1536, engines="megatron-core")
tables.ranks(rank_bytes, gpt3.choose(dp=8, tp=4, pp=12, zero=1, schedule="1f1b", chunks=1), stages=(0, 6, 11))

# %% [markdown] lang="fr"
# Le premier étage garde douze micro-batches, le dernier un seul : c’est le premier qui décide.
#
# ## 3. Ce qui dure
#
# ### Exercice 2 — un lien en deux nombres, pour planifier
#
# Au TP 03, vous avez ajusté α et β sur une seule collective, pour un seul anneau. Un planificateur demande deux choses
# de plus :
#
# - **un même β pour toutes les collectives** : d’un message de n octets, le lien le plus chargé en transporte
#   `factor` · n, soit 2(p − 1)/p pour un *all-reduce*, (p − 1)/p pour un *all-gather* (c’est la convention de
#   *nccl-tests*, le *bus bandwidth*) :
#
# $$t = \alpha + \beta \cdot \text{factor} \cdot n$$
#
# - **des nombres physiques** : le planificateur extrapole sans cesse. Un α négatif, qui ne gêne personne tant qu’on
#   reste sur la droite, y ferait arriver les messages avant leur départ.
#
# Renvoyez `(alpha_s, beta_s_per_byte)`, **tous deux positifs ou nuls**, qui minimisent la somme des carrés des écarts
# **relatifs**, ((α + β·factor·n − t) / t)².

# %% [markdown] lang="en"
# The first stage keeps twelve micro-batches, the last one only: it is the first that decides.
#
# ## 3. What takes time
#
# ### Exercise 2 — a link in two numbers, for a planner
#
# In lab 03 you fitted α and β to one collective alone, for one ring. A planner asks for two things more:
#
# - **one β for all collectives**: of a message of n bytes the busiest link carries `factor` · n, which is 2(p − 1)/p
#   for an all-reduce, (p − 1)/p for an all-gather (the convention of nccl-tests, the bus bandwidth):
#
# $$t = \alpha + \beta \cdot \text{factor} \cdot n$$
#
# - **physical numbers**: it leaves the measured range all the time. A negative α, which disturbs nobody as long as one
#   stays on the line, would have messages arrive before they leave.
#
# Return `(alpha_s, beta_s_per_byte)`, **both at least 0**, that minimise the sum of the squared **relative** gaps,
# ((α + β·factor·n − t) / t)².


# %% name="bounded-fit"
def bounded_fit(message_bytes, seconds, factor):
    ### BEGIN SOLUTION
    import numpy as np
    from scipy.optimize import nnls

    rows = [(1 / t, factor * n / t) for n, t in zip(message_bytes, seconds, strict=True)]
    return nnls(np.array(rows), np.ones(len(rows)))[0]
    ### END SOLUTION


lab.check("bounded-fit", bounded_fit)

# %%
# lab.hint("bounded-fit")

# %% [markdown] lang="fr"
# Maintenant, cette machine. La cellule suivante prend votre calibrage (`dlojz calibrate`), ou mesure en une vingtaine
# de secondes ce qu’il faut ([measuring.py](../../dlojz/cost_model/measuring.py)) ; puis votre ajustement, pour chaque
# collective entre deux processus, à côté de celui du paquet.

# %% [markdown] lang="en"
# Now this machine. The next cell takes your calibration (`dlojz calibrate`), or measures what is needed in about twenty
# seconds ([measuring.py](../../dlojz/cost_model/measuring.py)); then your fit, for each collective between two
# processes, beside the package's.

# %% name="calibrated" tags=["nbval-ignore-output"]
measured = calibrated(ranks=(1, 2))
tables.links(bounded_fit, measured, ranks=2)

# %% name="alpha-beta" tags=["nbval-ignore-output"]
sizes, seconds = tables.messages(measured, 2, "all_reduce")
figures.alpha_beta(list(zip(sizes, seconds, strict=True)), yours=lambda: bounded_fit(sizes, seconds, 1.0))

# %% [markdown] lang="fr"
# **Expliquez.** Un seul β pour toutes les collectives : cette machine le confirme-t-elle ? Et que disent les écarts, en
# bas ?
#
# <details><summary>Réponse</summary>
#
# Rarement : chaque collective de *gloo* a son propre programme. C’est pourquoi le paquet garde α et β collective par
# collective, et selon le nombre de rangs. Quant aux écarts, ils dépassent le bruit par endroits : une droite n’est
# qu’une approximation.
#
# </details>
#
# ### Exercice 3 — la bulle ou l’*all-reduce* ?
#
# Vous avez des GPU en trop : faut-il en faire des étages ou des répliques ? Un pas compte `micro_batches`
# micro-batches, que les dp répliques se partagent ; une passe avant et une passe arrière d’un micro-batch à travers le
# modèle entier prennent `work_s` sur un GPU. Le travail de chaque GPU est le même quel que soit le partage ; le reste,
# c’est ce que l’on attend :
#
# - **la bulle** : (pp − 1) fois la durée d’un micro-batch sur un étage (TP 05) ;
# - **l’*all-reduce*** des gradients, en bf16, de l’étage : un anneau de 2 (dp − 1) étapes, dont chacune transporte un
#   morceau (TP 03) et dure `alpha_s` + `beta_s_per_byte` · octets.
#
# Et il faut que cela tienne : 16 octets d’états par paramètre, répartis sur pp étages, dans `capacity_bytes`.
#
# Parmi les pp qui divisent `gpus`, pour lesquels dp divise `micro_batches` et qui tiennent, trouvez celui dont
# l’attente totale est la plus courte. Renvoyez `(pp, bubble_s, all_reduce_s)`.

# %% [markdown] lang="en"
# **Explain.** One β for all collectives: does this machine confirm it? And what do the gaps at the bottom tell?
#
# <details><summary>Answer</summary>
#
# Rarely: each of gloo's collectives is a separate program. That is why the package keeps α and β by collective, and by
# number of ranks. As to the gaps, some exceed the noise: a line is only an approximation.
#
# </details>
#
# ### Exercise 3 — bubble or all-reduce?
#
# GPUs to spare: stages or replicas? A step has `micro_batches` micro-batches, which the dp replicas share; forward and
# backward of one micro-batch through the whole model take `work_s` on one GPU. The work of each GPU is the same however
# they are split; the rest is what one waits for:
#
# - **the bubble**: (pp − 1) times the length of a micro-batch on one stage (lab 05);
# - **the all-reduce** of the stage's gradients, in bf16: a ring of 2 (dp − 1) steps, of which each carries one chunk
#   (lab 03) and takes `alpha_s` + `beta_s_per_byte` · bytes.
#
# And it must fit: 16 bytes of states per parameter, shared over pp stages, into `capacity_bytes`.
#
# Of the pp that divide `gpus`, for which dp divides `micro_batches` and which fit, find the one that waits least.
# Return `(pp, bubble_s, all_reduce_s)`.


# %% name="best-split"
def best_split(gpus, micro_batches, work_s, parameters, capacity_bytes, alpha_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    able = []
    for pp in range(1, gpus + 1):
        dp = gpus // pp
        if gpus % pp == 0 and micro_batches % dp == 0 and 16 * parameters / pp <= capacity_bytes:
            bubble_s = (pp - 1) * work_s / pp
            all_reduce_s = 2 * (dp - 1) * (alpha_s + beta_s_per_byte * 2 * parameters / pp / dp)
            able.append((pp, bubble_s, all_reduce_s))
    return min(able, key=lambda one: one[1] + one[2])
    ### END SOLUTION


lab.check("best-split", best_split)

# %%
# lab.hint("best-split")

# %% [markdown] lang="fr"
# Appliquons-la à GPT-3 : 384 A100, 8 par groupe de tenseur (un nœud), donc 48 groupes à répartir ; d’abord comme si
# NVLink les reliait tous, puis avec le réseau de Selene, puis avec celui de Jean Zay, que les 8 GPU d’un nœud se
# partagent.

# %% [markdown] lang="en"
# Let us apply it to GPT-3: 384 A100s, 8 per tensor group (one node), so 48 groups to split; first as if NVLink joined
# them all, then with Selene's network, then with Jean Zay's, which the 8 GPUs of a node share.

# %% name="splits"
tables.splits(best_split, "gpt3-175b", gpus=384, tp=8, batch=1536, site="jean_zay_a100")

# %% [markdown] lang="fr"
# C’est toujours un extrême ! La somme des deux attentes est une fonction affine de 1/pp : le plus petit pipeline qui
# tient, ou le plus grand possible, selon le lien. D’où la règle de Narayanan et al. : du parallélisme de modèle
# **jusqu’à ce que cela tienne**, puis des répliques… si le réseau suit. Le planificateur, lui, compte aussi les
# messages du pipeline, d’autant plus nombreux que pp est grand (et répartit l’optimiseur, ZeRO-1 : dès pp = 2, cela
# tient) :

# %% [markdown] lang="en"
# Always an extreme! The sum of both waits is an affine function of 1/pp: the smallest pipeline that fits, or the
# longest there can be, as the link decides. Hence the rule of Narayanan et al.: model parallelism **until it fits**,
# then replicas… if the network keeps up. The planner also counts the messages of the pipeline, of which there are more
# as pp grows (and partitions the optimizer, ZeRO-1: from pp = 2 on it fits):

# %% name="bubble-or-all-reduce"
figures.bubble_or_all_reduce("gpt3-175b", "jean_zay_a100", gpus=384, batch=1536)

# %% [markdown] lang="fr"
# **Expliquez.** Où se trouve le minimum, et qu’est-ce qui l’y ramène ? Que changerait ZeRO-3, qui n’attend pas les
# mêmes messages, ou un *all-reduce* entièrement recouvert par la passe arrière ?
#
# <details><summary>Réponse</summary>
#
# Il se trouve à pp = 12. Sur ce réseau, moins de répliques et des étages plus petits réduisent l’échange des gradients
# ; les messages du pipeline, qui croissent avec pp, ramènent le minimum en deçà du plus grand. ZeRO-3 rassemble en plus
# les poids à chaque passe de chaque micro-batch : des répliques nombreuses coûteraient plus cher encore. Avec un
# *all-reduce* entièrement recouvert, il ne resterait que ce qui croît avec pp : le minimum irait au plus petit pp qui
# tient.
#
# </details>
#
# ## 4. Pourquoi BLOOM a pris t4 · p12 · d8
#
# En 2022, BigScience a essayé sur Jean Zay une vingtaine de configurations avant de lancer l’entraînement de BLOOM, et
# en a publié les relevés : durée d’un pas, mémoire, et celles qui ont manqué de mémoire. Les voici (pour ces dernières,
# les nombres sont ceux du modèle de coût).

# %% [markdown] lang="en"
# **Explain.** Where does the minimum go, and what brings it back there? What would ZeRO-3 change, which waits for other
# messages, or an all-reduce that backward hides completely?
#
# <details><summary>Answer</summary>
#
# It goes to pp = 12. On this network, fewer replicas and smaller stages reduce the exchange of gradients; the messages
# of the pipeline, which grow with pp, keep the minimum below the longest pipeline. ZeRO-3 would also gather the weights
# in each pass of each micro-batch: many replicas would cost even more. With an all-reduce that is hidden completely,
# only what grows with pp would remain: the minimum would go to the smallest pp that fits.
#
# </details>
#
# ## 4. Why BLOOM took t4 · p12 · d8
#
# In 2022 BigScience tried about twenty layouts on Jean Zay before BLOOM's training began, and published the readings:
# length of a step, memory, and those that ran out of it. Here they are (for the latter, the numbers are the cost
# model's).

# %% name="bloom-layouts"
layouts = tables.bloom_layouts()
capacity_bytes = cluster("jean_zay_a100").gpu.device.memory_bytes
print(len(layouts), capacity_bytes)
print(layouts[0])

# %% [markdown] lang="fr"
# ### Exercice 4 — la plus rapide qui puisse tourner
#
# Renvoyez celle des configurations de la liste qui traite le plus d’échantillons par seconde, parmi celles qui peuvent
# tourner : leurs rangs emploient exactement `gpus` GPU, tp divise les `heads` têtes d’attention, et la mémoire suffit.
# Les champs sont ceux que montre la cellule précédente.

# %% [markdown] lang="en"
# ### Exercise 4 — the fastest that can run
#
# Return the layout of the list that processes the most samples per second, of those that can run: their ranks use
# exactly `gpus` GPUs, tp divides the `heads` attention heads, and memory suffices. The fields are those that the cell
# before shows.


# %% name="choose-layout"
def choose(layouts, gpus, heads, capacity_bytes):
    ### BEGIN SOLUTION
    able = [
        one
        for one in layouts
        if one.dp * one.tp * one.pp == gpus and heads % one.tp == 0 and one.memory_bytes <= capacity_bytes
    ]
    return max(able, key=lambda one: one.dp * one.micro_batch * one.micro_batches / one.step_s)
    ### END SOLUTION


lab.check("choose-layout", choose)

# %%
# lab.hint("choose-layout")

# %% name="chosen"
tables.chosen(choose, layouts, gpus=384, heads=64, capacity_bytes=capacity_bytes)

# %% [markdown] lang="fr"
# C’est bien elle : dp 8, tp 4, pp 12, micro-batch 2. Ses poursuivantes, à 1 ou 2 % près aussi rapides, demandent de 13
# à 19 Go de plus par GPU ; la place gagnée a servi ensuite à accumuler les gradients en fp32. Les mêmes relevés, à côté
# de ce que prédit le modèle de coût, avec son intervalle :

# %% [markdown] lang="en"
# It is that one: dp 8, tp 4, pp 12, micro-batch 2. The runners-up, as fast within 1 or 2%, need 13 to 19 GB more per
# GPU; the room so gained was used later, to accumulate gradients in fp32. The same readings, beside what the cost model
# predicts, with its interval:

# %% name="bloom"
figures.bloom()

# %% [markdown] lang="fr"
# On ne mesure pas tout. Le planificateur, lui, passe **toutes** les configurations en revue, et dit pour chacune
# pourquoi elle n’est pas la première, ou pourquoi elle est impossible, et ce qu’il suffirait de changer. Ici, BLOOM
# tel qu’il fut entraîné : 70 couches, bf16, gradients en fp32.

# %% [markdown] lang="en"
# One cannot measure everything. The planner looks at **all** layouts. For each it says why it is not the first, or why
# it is impossible, and which change would be enough. Here, BLOOM as it was trained: 70 layers, bf16, gradients in fp32.

# %% name="why"
bloom = dlojz.plan("bloom-176b", "jean_zay_a100", gpus=384, batch=2048, engines="megatron-deepspeed")
taken = {"dp": 8, "tp": 4, "pp": 12, "zero": 1, "micro_batch": 2, "checkpointing": "full"}
others = ({"tp": 8, "pp": 6}, {"tp": 2, "pp": 24}, {"dp": 16, "pp": 6}, {"tp": 6, "pp": 8}, {"checkpointing": "none"})
for changed in ({}, *others):
    print(bloom.why(**{**taken, **changed}).in_one_line, end="\n\n")

# %% name="reasons"
tables.reasons(bloom)

# %% [markdown] lang="fr"
# dp 16 · tp 4 · pp 6, mesurée plus haut à 57 Go, est refusée ici : les relevés cumulaient les gradients en 16 bits ;
# les cumuler en fp32 prend 4 octets de plus par paramètre, 33 Go sur ce rang.
#
# **Expliquez.** Le planificateur ne met pourtant pas le choix de BLOOM en tête : lisez ce qui le ralentit. Pourquoi
# choisirait-on autrement aujourd’hui ? (`bloom.best` dit ce que le planificateur prendrait.)
#
# <details><summary>Réponse</summary>
#
# Le recalcul complet. Avec des logiciels d’aujourd’hui, FlashAttention ne garde plus les matrices d’attention : un
# pipeline plus long tient sans recalculer. Le meilleur choix dépend de ce que savent faire les bibliothèques, et ne
# vaut que pour son époque.
#
# </details>
#
# ### Exercice 5 — le front de Pareto
#
# « La plus rapide » n’est pas toujours la question : les heures GPU se comptent, l’énergie aussi, et un GPU plein à
# craquer est fragile. Une configuration est un **compromis** si aucune autre ne la **bat** : au moins aussi petite
# selon tous les critères, et plus petite selon l’un d’eux. Renvoyez les places (à partir de 0) des points que rien ne
# bat ; chaque point est un tuple de nombres, qu’on veut tous petits.

# %% [markdown] lang="en"
# dp 16 · tp 4 · pp 6, measured above at 57 GB, is refused here: those readings accumulated gradients in 16 bit; to
# accumulate them in fp32 takes 4 bytes more per parameter, 33 GB on this rank.
#
# **Explain.** And yet the planner does not put BLOOM's choice first: read what slows it down. Why would one choose
# otherwise today? (`bloom.best` has what the planner would take.)
#
# <details><summary>Answer</summary>
#
# Full recomputation. With today's software FlashAttention no longer keeps the attention matrices: a longer pipeline
# fits without computing again. The best choice depends on what libraries can do, and holds for its time only.
#
# </details>
#
# ### Exercise 5 — the Pareto front
#
# “The fastest” is not always the question: GPU-hours are counted, so is energy, and a GPU that is full to the brim is
# fragile. A layout is a **compromise** if no other **beats** it: at least as small in every criterion, and smaller in
# one of them. Return the places (from 0) of the points that nothing beats; each point is a tuple of numbers, all of
# which are to be small.


# %% name="pareto-front"
def pareto(points):
    ### BEGIN SOLUTION
    def beats(one, other):
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]
    ### END SOLUTION


lab.check("pareto-front", pareto)

# %%
# lab.hint("pareto-front")

# %% [markdown] lang="fr"
# CoAtNet-7, le modèle de ce cours, sur 8, 16 ou 32 A100 : durée d’un pas, heures GPU, énergie, mémoire. Pour un modèle
# du catalogue, la mémoire est celle du TP 02 : la prévision, tenseur par tenseur. Pour BLOOM et les autres modèles
# publiés, que ce TP n’exécute pas, ce sont les formules des articles. La durée de chaque configuration vient d’une
# formule, la **forme close** ; les meilleures sont ensuite **simulées**, action par action, et c’est la durée simulée
# qui désigne la meilleure.

# %% [markdown] lang="en"
# CoAtNet-7, the model of this course, on 8, 16 or 32 A100s: length of a step, GPU-hours, energy, memory. For a model of
# the catalogue the memory is that of lab 02: the forecast, tensor by tensor. For BLOOM and the other published models,
# which this lab does not run, it is the papers' formulas. The time of every layout comes from a formula, the **closed
# form**; the best ones are then **simulated**, action by action, and the simulated time decides which is the best.

# %% name="front"
coatnet = dlojz.plan("coatnet_7", "jean_zay_a100", gpus=(8, 16, 32), batch=256)
tables.front(pareto, coatnet)

# %% [markdown] lang="fr"
# Peu de compromis, sur des milliers de configurations : c’est entre ceux-là que l’on choisit, selon ce qui manque. La
# figure entière, avec la mémoire de chaque étage, la décomposition du pas et les refus :

# %% [markdown] lang="en"
# Few compromises out of thousands of layouts: it is among those that one chooses, by what is scarce. The whole picture,
# with the memory of each stage, the step taken apart, and the refusals:

# %% name="plan-figure"
tables.drawn(coatnet)

# %% [markdown] lang="fr"
# À vous : changez modèle, calculateur, GPU et batch, et demandez la meilleure, le front, ou « pourquoi pas ». Sans
# noyau actif, la figure fixe montre la même chose.

# %% [markdown] lang="en"
# Your turn: change model, cluster, GPUs and batch, and ask for the best one, the front, or “why not”. Where no kernel
# runs, the static figure shows the same.

# %% name="planner" tags=["nbval-ignore-output"]
from dlojz.display.widgets.planner_panel import planner, still_planner

question = {"model": "coatnet_7", "cluster": "jean_zay_a100", "gpus": 8, "batch": 64}
planner(**question)

# %% name="still-planner" tags=["nbval-ignore-output"]
still_planner(**question)

# %% [markdown] lang="fr"
# ### Quelle stratégie, quand ?
#
# Le cours donne une liste de critères : le modèle tient-il, les liens suivent-ils, le batch suffit-il ? Les voici
# rangés en arbre, parcourus avec des nombres, puis confrontés à ce que trouve la recherche.

# %% [markdown] lang="en"
# ### Which strategy, when?
#
# The course gives a list of criteria: does the model fit, do the links keep up, is the batch large enough? Here they
# are put into a tree, followed with figures, then compared with what the search finds.

# %% name="tree"
bloom.tree

# %% name="trees"
tables.trees((("gpt2", 8, 64), ("coatnet_7", 8, 64), ("megatron-7.5b", 64, 512), ("megatron-76b", 128, 1024)))

# %% [markdown] lang="fr"
# L’arbre s’arrête à la stratégie la plus simple qui convienne ; la recherche, elle, compte des secondes. Elles
# s’écartent sur des points que l’arbre ne demande pas. Quand le modèle tient, répartir ses états (ZeRO-2) n’envoie pas
# plus d’octets que DDP (TP 04), mais divise aussi la mise à jour par le nombre de rangs : quelques pour cent. Pour le
# plus gros modèle, le *Tensor Parallelism* et ZeRO-3 ne tiennent qu’en recalculant toutes les activations ; avec un
# pipeline, un rang a moins de couches, et garde les siennes. Un arbre dit par où commencer, pas où s’arrêter.

# %% [markdown] lang="en"
# The tree stops at the simplest strategy that will do; the search counts seconds. They differ on points that the tree
# does not ask about. Where the model fits, sharding its states (ZeRO-2) sends no more bytes than DDP (lab 04), but also
# divides the update by the number of ranks: a few per cent. For the largest model, tensor parallelism with ZeRO-3 fits
# only if all activations are recomputed; with a pipeline a rank has fewer layers, and keeps their activations. A tree
# says where to begin, not where to stop.

# %% [markdown] lang="fr"
# ## 5. Chercher opérateur par opérateur : Alpa
#
# Le planificateur essaie des degrés, les mêmes pour toutes les couches. **Alpa** (Zheng et al., 2022) va plus loin, à
# deux niveaux : comment découper chaque opérateur sur un groupe de GPU (niveau **interne**, un programme linéaire en
# nombres entiers) ; où couper en étages, et quel groupe de GPU donner à chacun (niveau **externe**, de la programmation
# dynamique).
#
# Prenons six couches denses (batch 32, largeur 256, fp32) sur un maillage de 4 GPU, avec le modèle de coût du test
# d’Alpa : une communication coûte α + β · octets, α = β = 1, et un *all-reduce* de n octets entre 4 rangs
# 1 + 2 · ¾ · n (plus 0,01, pour départager deux plans égaux). Trois **stratégies** par couche : `column` (TP 06 : le
# gradient de l’entrée est réduit, sauf à la première couche, dont personne n’attend le gradient), `row` (la sortie est
# réduite), `batch` (le gradient des poids est réduit). Et entre deux couches, **changer de découpe** peut coûter :
# `resharding[v][k][j]`, si la couche v prend la stratégie k et la suivante la stratégie j.

# %% [markdown] lang="en"
# ## 5. Searching operator by operator: Alpa
#
# The planner tries degrees, the same for all layers. **Alpa** (Zheng et al., 2022) goes further, on two levels: how to
# shard each operator on a group of GPUs (the **inner** level, an integer linear programme); where to cut into stages,
# and which group of GPUs to give to each (the **outer** level, dynamic programming).
#
# Let us take six dense layers (batch 32, width 256, fp32) on a mesh of 4 GPUs, with the cost model of Alpa's own test:
# a communication costs α + β · bytes, α = β = 1, and an all-reduce of n bytes among 4 ranks 1 + 2 · ¾ · n (plus 0.01,
# to tell two equal plans apart). Three **strategies** per layer: `column` (lab 06: the input's gradient is reduced,
# except at the first layer, whose gradient nobody waits for), `row` (the output is reduced), `batch` (the weights'
# gradient is reduced). And between two layers **resharding** may cost: `resharding[v][k][j]`, if layer v takes strategy
# k and the next one strategy j.

# %% name="chain"
mesh = DeviceMesh((1, 4))
chain = perceptron(batch=32, width=256, layers=6, mesh=mesh)
print(chain.strategies)
print(chain.costs[0], chain.costs[1])
for row in chain.resharding[0]:
    print(row)

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien coûte la meilleure suite de six stratégies ? (Le TP 06 vous souffle laquelle.)

# %% [markdown] lang="en"
# **Your prediction.** What does the best sequence of six strategies cost? (Hint: lab 06 uses it.)

# %% name="predict-cost" stub="value"
lab.predict(
    "perceptron-cost",
    ### BEGIN SOLUTION
    # Columns, then rows: an all-reduce per layer but the first // Colonnes, lignes : un par couche sauf la première
    5 * (1 + 2 * 3 / 4 * 32 * 256 * 4 + 0.01),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# ### Exercice 6 — un programme linéaire
#
# Un solveur connaît des variables, un objectif linéaire et des équations. Ici :
#
# - `("s", v, k)` vaut 1 si la couche v prend la stratégie k, et 0 sinon ;
# - `("e", v, k, j)` doit valoir 1 si la couche v prend k **et** la couche v + 1 prend j : ce serait le produit
#   s[v, k] · s[v+1, j], qui n’est pas linéaire ; des équations doivent l’y contraindre.
#
# Renvoyez `objective, equations` : l’objectif est un dictionnaire variable → coût ; chaque équation, une paire
# (dictionnaire variable → coefficient, valeur de la somme). Ainsi `({("s", 0, 0): 1, ("s", 0, 1): 1}, 1)` dit
# s[0, 0] + s[0, 1] = 1. Toutes les variables sont déjà entre 0 et 1, les s sont entiers ; le nombre de stratégies peut
# varier d’une couche à l’autre.

# %% [markdown] lang="en"
# ### Exercise 6 — a linear programme
#
# A solver knows variables, a linear objective and equations. Here:
#
# - `("s", v, k)` is 1 if layer v takes strategy k, and 0 else;
# - `("e", v, k, j)` is to be 1 if layer v takes k **and** layer v + 1 takes j: that would be the product
#   s[v, k] · s[v+1, j], which is not linear; equations must force it.
#
# Return `objective, equations`: the objective is a dictionary variable → cost; each equation a pair (dictionary
# variable → coefficient, value of the sum). So `({("s", 0, 0): 1, ("s", 0, 1): 1}, 1)` says s[0, 0] + s[0, 1] = 1. All
# variables are between 0 and 1 already, the s are whole; the number of strategies may differ from layer to layer.


# %% name="sharding-programme"
def programme(costs, resharding):
    objective, equations = {}, []
    ### BEGIN SOLUTION
    for v, some in enumerate(costs):
        objective |= {("s", v, k): cost for k, cost in enumerate(some)}
        equations.append(({("s", v, k): 1 for k in range(len(some))}, 1))
    for v, matrix in enumerate(resharding):
        here, there = range(len(costs[v])), range(len(costs[v + 1]))
        objective |= {("e", v, k, j): matrix[k][j] for k in here for j in there}
        equations += [({("e", v, k, j): 1 for j in there} | {("s", v, k): -1}, 0) for k in here]
        equations += [({("e", v, k, j): 1 for k in here} | {("s", v + 1, j): -1}, 0) for j in there]
    ### END SOLUTION
    return objective, equations


lab.check("sharding-programme", programme)

# %%
# lab.hint("sharding-programme")

# %% [markdown] lang="fr"
# Votre programme sur les six couches ; et le coût que trouve le paquet en découpant chaque opérateur du graphe entier,
# passe arrière comprise ([intra_operator.py](../../dlojz/planner/alpa/intra_operator.py)) :

# %% [markdown] lang="en"
# Your programme on the six layers; and the cost that the package finds by sharding each operator of the whole graph,
# backward included ([intra_operator.py](../../dlojz/planner/alpa/intra_operator.py)):

# %% name="sharding"
figures.mlp_sharding(chain, lambda: solve(*programme(chain.costs, chain.resharding)))

# %% name="reveal-cost"
lab.reveal("perceptron-cost", shard(mlp(32, 256, 6), mesh).cost)

# %% [markdown] lang="fr"
# Personne n’a dit au solveur d’alterner colonnes et lignes : c’est la paire de Megatron (TP 06), retrouvée. Et si le
# batch grandit ?

# %% [markdown] lang="en"
# Nobody told the solver to take columns and rows in turn: it is Megatron's pair (lab 06), found again. And if the batch
# grows?

# %% name="by-batch"
tables.by_batch(programme, (32, 128, 256, 512, 1024), width=256, layers=6, mesh=mesh)

# %% [markdown] lang="fr"
# **Expliquez.** À partir d’un certain batch, le solveur passe au *Data Parallelism*. Pourquoi ?
#
# <details><summary>Réponse</summary>
#
# Les activations grandissent avec le batch, les poids non : à partir d’un certain batch, réduire des gradients de poids
# coûte moins que réduire des activations. (À 512, les deux coûts diffèrent d’un rien : opérateur par opérateur, une
# activation est redécoupée une fois pour la couche suivante et une fois pour le gradient de ses poids ; la chaîne ne
# compte que la première.)
#
# </details>
#
# ### Exercice 7 — des étages par programmation dynamique
#
# Le niveau externe : `layers` couches, dans l’ordre, à couper en étages ; à chaque étage un groupe de 1, 2, 4… GPU,
# pour employer exactement `gpus` GPU. `time_of(first, last, n)` donne la durée, pour un micro-batch, des couches
# `first` à `last` (incluse) sur n GPU. Avec B micro-batches, un pas dure
#
# $$T = \sum_i t_i + (B - 1)\,\max_j t_j$$
#
# Le maximum couple tous les étages. L’astuce d’Alpa : le **fixer**. Pour chaque valeur possible t_max, une récursion
# trouve la plus petite somme d’étages dont aucun n’est plus lent ; le meilleur T est le minimum de somme +
# (B − 1) · t_max. Renvoyez T.
#
# **Votre prédiction** d’abord. Huit couches égales, d’une unité de temps sur un GPU ; 2 GPU n’en valent que 1,8, et 4
# n’en valent que 3. Avec 4 GPU et **64** micro-batches, combien dure le plus court pas ?

# %% [markdown] lang="en"
# **Explain.** From a certain batch on, the solver turns to data parallelism. Why?
#
# <details><summary>Answer</summary>
#
# Activations grow with the batch, weights do not: from a certain batch on, reducing gradients of weights costs less
# than reducing activations. (At 512 the two costs differ by next to nothing: operator by operator an activation is
# resharded once for the next layer and once for the gradient of its weights; the chain counts the first only.)
#
# </details>
#
# ### Exercise 7 — stages by dynamic programming
#
# The outer level: `layers` layers, in order, to be cut into stages; to each stage a group of 1, 2, 4… GPUs, so as to
# use exactly `gpus` GPUs. `time_of(first, last, n)` gives the time, for one micro-batch, of layers `first` to `last`
# (included) on n GPUs. With B micro-batches a step takes
#
# $$T = \sum_i t_i + (B - 1)\,\max_j t_j$$
#
# The maximum couples all stages. Alpa's trick: **fix** it. For each possible value t_max, a recursion finds the least
# sum of stages of which none is slower; the best T is the least of sum + (B − 1) · t_max. Return T.
#
# **Your prediction** first. Eight equal layers, of one unit of time on one GPU; 2 GPUs are worth only 1.8, and 4 only
# 3. With 4 GPUs and **64** micro-batches, how long is the shortest step?

# %% name="predict-step" stub="value"
lab.predict(
    "many-micro-batches",
    ### BEGIN SOLUTION
    # Four stages of two layers, one GPU each // Quatre étages de deux couches, un GPU chacun
    4 * 2 + 63 * 2,
    ### END SOLUTION
)


# %% name="pipeline-stages"
def shortest_step(time_of, layers, gpus, micro_batches):
    ### BEGIN SOLUTION
    from functools import cache

    sizes = [n for n in (1, 2, 4, 8, 16) if n <= gpus]

    @cache
    def least(first, left, t_max):
        if first == layers:
            return 0 if left == 0 else float("inf")
        found = float("inf")
        for n in (n for n in sizes if n <= left):
            for last in range(first, layers):
                if (t := time_of(first, last, n)) <= t_max:
                    found = min(found, t + least(last + 1, left - n, t_max))
        return found

    times = {time_of(i, j, n) for i in range(layers) for j in range(i, layers) for n in sizes}
    return min(least(0, gpus, t_max) + (micro_batches - 1) * t_max for t_max in times)
    ### END SOLUTION


lab.check("pipeline-stages", shortest_step)

# %%
# lab.hint("pipeline-stages")

# %% name="reveal-step"
times, gpus, micro_batches = tables.case("D")
lab.reveal("many-micro-batches", tables.plan_of(times, times.layers, gpus, micro_batches).step_s)

# %% name="known-steps"
tables.known_steps(shortest_step)

# %% [markdown] lang="fr"
# **Expliquez** les cas C, B, D, dans cet ordre : mêmes couches, mêmes GPU, mais 1, 8, puis 64 micro-batches. Que
# devient le nombre d’étages, et pourquoi ?
#
# <details><summary>Réponse</summary>
#
# Un étage de plus allonge le remplissage, mais rend les GPU plus efficaces : plus il y a de micro-batches, moins le
# remplissage compte, et plus il y a d’étages.
#
# </details>
#
# Puis le cas E, où une couche pèse autant que les quatre autres ensemble : la table des durées, le choix, et le
# pipeline qu’il donne.

# %% [markdown] lang="en"
# **Explain** the cases C, B, D, in this order: the same layers, the same GPUs, but 1, 8, then 64 micro-batches. What
# becomes of the number of stages, and why?
#
# <details><summary>Answer</summary>
#
# One stage more lengthens the filling, but makes the GPUs more efficient: the more micro-batches there are, the less
# filling counts, and the more stages there are.
#
# </details>
#
# Then case E, where one layer weighs as much as the four others together: the table of times, the choice, and the
# pipeline that it makes.

# %% name="stages"
times, gpus, micro_batches = tables.case("E")
plan = tables.plan_of(times, times.layers, gpus, micro_batches)
figures.stages(tables.stage_times(times, gpus), plan, micro_batches, unit="")

# %% [markdown] lang="fr"
# ## 6. Ici : prédire, exécuter, défendre
#
# Assez de calculateurs lointains. `plan_here` ([this_machine.py](../../dlojz/planner/this_machine.py)) prend les
# mesures de la section 3 et passe en revue toutes les configurations que cette machine peut **vraiment** exécuter avec
# deux processus : un petit CoAtNet, 16 images par pas. Aucun pas de modèle n’a été mesuré : seulement des produits, des
# passes sur la mémoire, des messages, et chaque moteur à vide.

# %% [markdown] lang="en"
# ## 6. Here: predict, run, defend
#
# Let us come back to this machine. `plan_here` ([this_machine.py](../../dlojz/planner/this_machine.py)) takes the
# measurements of section 3 and looks at all the layouts that this machine can **really** run with two processes: a
# small CoAtNet, 16 images per step. No step of a model was measured: only products, passes over memory, messages, and
# each engine idling.

# %% name="plan-here" tags=["nbval-ignore-output"]
here = plan_here("coatnet_tiny", ranks=2, batch=16, measured=measured)
here

# %% [markdown] lang="fr"
# Gardons la plus rapide de chaque sorte, sans recalcul. **Votre prédiction**, d’après le tableau qui précède et ce que
# vous savez : la plus lente prendra combien de fois le temps de la plus rapide, une fois **mesurées** ?

# %% [markdown] lang="en"
# Let us keep the fastest of each kind, without recomputation. **Your prediction**, from the table above and from what
# you know: how many times as long as the fastest will the slowest take, once they are **measured**?

# %% name="rows" tags=["nbval-ignore-output"]
rows = [row for row in here.kinds() if row.config.layout.checkpointing == "none"]
for row in rows:
    print(f"{row.step_s:.3f} s", row.title)

# %% name="predict-slowest" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "slowest-here",
    ### BEGIN SOLUTION
    rows[-1].step_s / rows[0].step_s,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Et maintenant, on exécute : toutes sur les mêmes deux processus, à tour de rôle, douze tours (`measure_rounds`, dans
# [measure.py](../../dlojz/running/measure.py)). Un moment où la machine est occupée ailleurs les ralentit donc toutes.

# %% [markdown] lang="en"
# And now we run them: all on the same two processes, taking turns, twelve rounds (`measure_rounds`, in
# [measure.py](../../dlojz/running/measure.py)). So a moment when the machine is busy elsewhere slows all of them down.

# %% name="rounds" tags=["nbval-ignore-output"]
rounds = measure_rounds([row.config for row in rows], rounds=12)
medians = [statistics.median(own) for own in rounds]
figures.neighbours(rows, medians)

# %% name="reveal-slowest" tags=["nbval-ignore-output"]
lab.reveal("slowest-here", max(medians) / min(medians))

# %% [markdown] lang="fr"
# ### Exercice 8 — la première est-elle vraiment plus rapide ?
#
# Deux médianes diffèrent toujours. Pour **défendre** un choix, il faut dire de combien, et si le hasard aurait suffi.
# Vous recevez deux listes de durées ; les n-ièmes de chacune viennent du même tour, juste l’une après l’autre. Renvoyez
# `(ratio, p)` :
#
# - `ratio` : la médiane des rapports seconde / première, **tour par tour** ;
# - `p`, celui du test du signe : si aucune n’était plus rapide, chaque tour (sans compter les ex æquo) se jouerait à
#   pile ou face ; quelle serait la probabilité d’un résultat au moins aussi tranché, **dans un sens ou dans l’autre** ?

# %% [markdown] lang="en"
# ### Exercise 8 — is the first really faster?
#
# Two medians always differ. To **defend** a choice one must tell by how much, and whether chance would have been
# enough. You receive two lists of times; the n-th of each come from the same round, one right after the other. Return
# `(ratio, p)`:
#
# - `ratio`: the median of the ratios second / first, **round by round**;
# - `p`, that of the sign test: if neither were faster, each round (ties not counted) would be a toss of a coin; how
#   likely would be a result at least as one-sided, **one way or the other**?


# %% name="paired-rounds"
def compare_rounds(first_s, second_s):
    ### BEGIN SOLUTION
    from math import comb

    pairs = list(zip(first_s, second_s, strict=True))
    wins, losses = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    n, most = wins + losses, max(wins, losses)
    p = min(1, 2 * sum(comb(n, k) for k in range(most, n + 1)) / 2**n)
    return statistics.median(b / a for a, b in pairs), p
    ### END SOLUTION


lab.check("paired-rounds", compare_rounds)

# %%
# lab.hint("paired-rounds")

# %% [markdown] lang="fr"
# Le choix du planificateur, face à chacune de ses voisines :

# %% [markdown] lang="en"
# The planner's choice, against each of its neighbours:

# %% name="duels" tags=["nbval-ignore-output"]
tables.duels(compare_rounds, rows, rounds)

# %% [markdown] lang="fr"
# **Expliquez.** Le choix est-il défendable ? Si toutes les durées s’écartent du même facteur, la machine était occupée
# ailleurs : ce sont les rapports qui comptent. Là où rapports prédit et mesuré divergent, cherchez la pièce manquante :
# qu’est-ce que le planificateur n’a pas mesuré de cette machine ?
#
# <details><summary>Réponse</summary>
#
# Le choix est défendable si aucune voisine ne le bat au test du signe ; à égalité, il ne coûte rien de le garder. Ce
# que le planificateur n’a pas mesuré : les messages et le calcul qui se disputent les mêmes cœurs, par exemple. Chacun
# a été chronométré seul.
#
# </details>
#
# Le dernier mot revient à la configuration choisie : un entraînement ordinaire, avec sa fiche. (Une exécution
# chronomètre aussi chaque phase et chaque communication : son pas est un peu plus long que ci-dessus. Sa mémoire, elle,
# est prédite à 1 % près.)

# %% [markdown] lang="en"
# **Explain.** Can the choice be defended? If all times are off by one factor, the machine was busy elsewhere: it is the
# ratios that count. Where predicted and measured ratios part, look for the missing piece: what has the planner not
# measured of this machine?
#
# <details><summary>Answer</summary>
#
# It can if no neighbour beats it in the sign test; where they tie, keeping it costs nothing. What the planner has not
# measured: messages and computation that compete for the same cores, for one. Each was timed alone.
#
# </details>
#
# The chosen layout has the last word: an ordinary training, with its record. (A run also times each phase and each
# communication: its step is a little longer than above. Its memory is predicted within 1%.)

# %% name="run-best" tags=["nbval-ignore-output"]
run = dlojz.run(rows[0].config, steps=10)
tables.predicted_and_run(rows[0], rounds[0], run.record)

# %% name="compare-best" tags=["nbval-ignore-output"]
run.compare()

# %% [markdown] lang="fr"
# ## 7. Où le modèle se trompe, et comment on le sait
#
# Un modèle de coût a des paramètres, une douzaine par génération de GPU ; quelques-uns sont ajustés sur des mesures
# publiées. Sur ces mesures-là, il tombe juste : c’est fait pour. Deux questions décident de ce qu’il vaut : que
# donne-t-il sur des lignes **mises de côté**, sur lesquelles rien n’a été ajusté ? Et fait-il mieux que le plus simple
# des modèles, un **débit constant** par GPU ?
#
# ### Exercice 9 — le modèle apporte-t-il quelque chose ?
#
# Chaque ligne a `work` (les opérations d’un pas, par GPU), `measured_s`, `predicted_s`, et `fitted`, vrai si elle a
# servi à l’ajustement. Renvoyez `(model_error, constant_error)` : la moyenne, sur les lignes mises de côté, de
# |prédit / mesuré − 1| ; pour le modèle, puis pour le débit constant. Ce débit est la médiane de `work / measured_s`
# sur les lignes qui ont servi à l’ajustement.

# %% [markdown] lang="en"
# ## 7. Where the model is wrong, and how we know
#
# A cost model has parameters, a dozen per generation of GPUs; some of them are fitted to published measurements. On
# those it is right: that is what fitting is for. Two questions decide what it is worth: how does it do on rows that
# were **held out**, to which nothing was fitted? And does it do better than the simplest baseline, a **constant rate**
# per GPU?
#
# ### Exercise 9 — does the model add anything?
#
# Each row has `work` (the operations of a step, per GPU), `measured_s`, `predicted_s`, and `fitted`, true if it was
# used in the fit. Return `(model_error, constant_error)`: the mean over the held-out rows of |predicted / measured −
# 1|; for the model, then for the constant rate. That rate is the median of `work / measured_s` over the rows used in
# the fit.


# %% name="held-out"
def held_out_errors(rows):
    ### BEGIN SOLUTION
    rate = statistics.median(row.work / row.measured_s for row in rows if row.fitted)
    held = [row for row in rows if not row.fitted]
    model = statistics.fmean(abs(row.predicted_s / row.measured_s - 1) for row in held)
    return model, statistics.fmean(abs(row.work / rate / row.measured_s - 1) for row in held)
    ### END SOLUTION


lab.check("held-out", held_out_errors)

# %%
# lab.hint("held-out")

# %% [markdown] lang="fr"
# Sur les tableaux publiés que livre le paquet ([validation.py](../../dlojz/cost_model/validation.py)). La colonne
# « tableau écarté » est plus sévère encore : l’ajustement est refait sans **aucune** ligne du tableau, donc sans son
# logiciel.

# %% [markdown] lang="en"
# On the published tables that the package ships ([validation.py](../../dlojz/cost_model/validation.py)). The column
# “table left out” is stricter still: the fit is made again without **any** row of the table, so without its software.

# %% name="held-out-tables"
published = ("sc21-1", "sc21-2", "jean-zay-a100", "vtrain-multi", "megatron-h100", "torchtitan", "jean-zay-v100")
tables.held_out(held_out_errors, published)

# %% [markdown] lang="fr"
# Partout, il apporte quelque chose. Mais ces tableaux, on les connaissait. L’épreuve est venue des exécutions FSDP
# publiées par MosaicML (modèles MPT), que personne ici n’avait vues : le modèle y faisait **moins bien** qu’un débit
# constant, son intervalle était trop étroit, et le planificateur refusait, faute de mémoire, une bonne part de ce qui
# avait tourné. Les réparations :
#
# - l’**attention fusionnée**, que freinaient les octets de scores qu’elle n’écrit jamais, est un opérateur à part, au
#   débit publié pour chaque noyau et chaque GPU ;
# - les **messages de FSDP**, presque toujours recouverts, sont comptés un par un, avec une latence qui croît avec le
#   nombre de rangs ; rien ne recouvre le premier *all-gather* ni le dernier *reduce-scatter* ;
# - la **mémoire**, qui additionnait des pics d’instants différents, est un maximum sur des instants (TP 02) ;
# - l’**intervalle** vient de tableaux écartés en entier, donc de logiciels jamais vus ; il est plus large du côté lent.
#
# Le résultat, sur des tableaux dont aucune ligne n’a servi à l’ajustement :

# %% [markdown] lang="en"
# Everywhere it adds something. But these tables were known. The test came with the FSDP runs that MosaicML published
# (MPT models), which nobody here had seen: the model did **worse** on them than a constant rate, its interval was too
# narrow, and the planner refused, as out of memory, a good part of what had run. The repairs:
#
# - **fused attention**, held back by the bytes of scores that it never writes, is a separate operator, with a published
#   rate for each kernel and each GPU;
# - **FSDP's messages**, nearly always hidden, are counted one by one, with a latency that grows with the number of
#   ranks; nothing hides the first all-gather and the last reduce-scatter;
# - **memory**, which added up peaks of different moments, is a maximum over moments (lab 02);
# - the **interval** comes from tables left out whole, so from software never seen; it is wider on the slow side.
#
# The result, on tables of which no row was used in a fit:

# %% name="unseen"
tables.unseen(("mpt-a100", "mpt-h100", "mpt-h100-fp8", "mt-nlg"))

# %% [markdown] lang="fr"
# **Expliquez.** Peut-on encore dire que MPT n’a jamais été vu ? Et MT-NLG, plus lent que prédit, quoique le modèle
# connaisse cette machine, cette taille et cette configuration par Narayanan et al. : que ne peut-il pas savoir ?
#
# <details><summary>Réponse</summary>
#
# Rien n’est ajusté sur MPT, mais ses erreurs ont guidé les réparations : un tableau ne sert d’épreuve qu’une fois. De
# MT-NLG, le modèle ignore le logiciel ; un débit constant fait mieux ici, par chance.
#
# </details>
#
# Voilà pourquoi chaque durée du planificateur porte un **intervalle** et **la mesure publiée la plus proche**. Et voici
# ce que l’on sait des lignes de Jean Zay dont l’écart dépasse 10 %. Dans le tableau, chaque ligne porte son numéro dans
# le document publié ; « ajustée » veut dire qu’elle a servi à l’ajustement, « mise de côté » qu’elle n’y a pas servi.
# La lettre est celle de la figure.

# %% [markdown] lang="en"
# **Explain.** Can one still say that MPT was never seen? And MT-NLG is slower than predicted, though the model knows
# this machine, size and layout from Narayanan et al.: what can it not know?
#
# <details><summary>Answer</summary>
#
# Nothing is fitted to MPT, but its errors guided the repairs: a table is a test only once. Of MT-NLG the model does not
# know the software; a constant rate does better here, by luck.
#
# </details>
#
# That is why each time of the planner carries an **interval** and **the closest published measurement**. And here is
# what is known of the rows of Jean Zay that are more than 10% off. In the table each row is named by its line in the
# published document; “fitted on” means that it was used in the fit, “held out” that it was not. The letter is that of
# the figure.

# %% name="errors"
figures.errors("jean-zay-a100")

# %% [markdown] lang="fr"
# ## 8. Le même, en grand
#
# Un choix n’est utile que si on peut le lancer. `documents()` l’écrit pour la bibliothèque qui l’exécute :

# %% [markdown] lang="en"
# ## 8. The same, at full size
#
# A choice is of use only if one can launch it. `documents()` writes it for the library that runs it:

# %% name="documents"
tables.documents(bloom.choose(**taken).documents(), most=12)

# %% [markdown] lang="fr"
# Et quand `dlojz` sait l’exécuter lui-même, `config()` donne la configuration qu’attend `dlojz.run` : sur un
# calculateur, une seule ligne change, `on="slurm"`. L’aperçu ne soumet rien :

# %% [markdown] lang="en"
# And where `dlojz` can run it itself, `config()` gives the configuration that `dlojz.run` takes: on a cluster one line
# changes, `on="slurm"`. The preview submits nothing:

# %% name="preview"
big = dlojz.plan("coatnet_7", "jean_zay_a100", gpus=8, batch=64, engines="torch").best
dlojz.preview(big.config(steps=100), "jean_zay_a100", account="abc@a100", time_limit_s=1800)

# %% [markdown] lang="fr"
# En ligne de commande : `dlojz plan --model coatnet_7 --cluster jean_zay_a100 --gpus 8 --batch 64`, et pour cette
# machine, `dlojz plan --model coatnet_tiny --cluster here --gpus 2 --batch 16 --measure`.

# %% [markdown] lang="en"
# On the command line: `dlojz plan --model coatnet_7 --cluster jean_zay_a100 --gpus 8 --batch 64`, and for this machine
# `dlojz plan --model coatnet_tiny --cluster here --gpus 2 --batch 16 --measure`.

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Faites-lui mesurer son débit : à la fin de chaque époque, le rang 0 affiche `samples/s` et le nombre d’échantillons
# que toutes les répliques entraînent par seconde. Continuez dans votre `train.py`, ou laissez
# `dlojz labs script 08 un_autre_dossier` écrire ce par quoi ce TP commence. Jugez-le par
# `dlojz labs judge 08 my_training/train.py`.
#
# Puis choisissez. Prédisez laquelle des répartitions `--parallel ddp`, `fsdp`, `tp` et `1f1b --accumulation 4` est la
# plus rapide ici sur deux processus, lancez chacune trois fois à tour de rôle, et défendez votre choix par les
# médianes. À regarder : `dlojz compare`, avec les dossiers des exécutions, montre ce que chaque répartition détient et
# envoie.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# steps = len(loader) // micro_batches
# print(f"samples/s {steps * args.batch / (time.perf_counter() - begun_s):.1f}", flush=True)
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Let it measure itself: at the end of each epoch, rank 0 prints `samples/s` and how many samples all replicas train per
# second. Go on in your `train.py`, or let `dlojz labs script 08 another_folder` write what this lab begins with. Judge
# it by `dlojz labs judge 08 my_training/train.py`.
#
# Then choose. Predict which of `--parallel ddp`, `fsdp`, `tp` and `1f1b --accumulation 4` is the fastest on two
# processes here, start each of them three times in turns, and defend your choice by the medians. What to look for:
# `dlojz compare` with the folders of the runs shows what each layout holds and sends.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# steps = len(loader) // micro_batches
# print(f"samples/s {steps * args.batch / (time.perf_counter() - begun_s):.1f}", flush=True)
# ```
#
# </details>


# %% [markdown] lang="fr"
# ## Bilan
#
# | question | ce qui y répond | ce qui la tranche |
# |--|--|--|
# | est-ce que ça tient ? | états selon ZeRO, activations × micro-batches en cours | le premier étage |
# | étages ou répliques ? | bulle, *all-reduce*, messages du pipeline | le lien |
# | la plus rapide ? | filtrer, puis échantillons par seconde | les bibliothèques du jour |
# | quel compromis ? | le front de Pareto | vous |
# | quelle découpe, couche par couche ? | programme linéaire en nombres entiers | activations ou poids : le batch |
# | quels étages, sur quels GPU ? | programmation dynamique, t_max fixé | le nombre de micro-batches |
# | le choix est-il bon ? | des tours appariés, un test du signe | la mesure |
# | le modèle est-il bon ? | des lignes mises de côté, un modèle trivial | ce qu’il n’a jamais vu |

# %% [markdown] lang="en"
# ## Summary
#
# | question | what answers it | what decides it |
# |--|--|--|
# | does it fit? | states by ZeRO, activations × micro-batches under way | the first stage |
# | stages or replicas? | bubble, all-reduce, messages of the pipeline | the link |
# | the fastest? | filter, then samples per second | the libraries of the day |
# | which compromise? | the Pareto front | you |
# | which sharding, layer by layer? | an integer linear programme | activations or weights: the batch |
# | which stages, on which GPUs? | dynamic programming, t_max fixed | the number of micro-batches |
# | is the choice right? | paired rounds, a sign test | the measurement |
# | is the model right? | held-out rows, a trivial model | what it has never seen |

# %%
lab.progress()
