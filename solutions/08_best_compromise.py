# %% [markdown] lang="fr"
# # TP 08 — Le meilleur compromis
#
# Vous disposez désormais de cinq leviers, et chacun se paie : le *Data Parallelism* en mémoire et en *all-reduce*, ZeRO
# en messages, le *Pipeline Parallelism* en bulle, le *Tensor Parallelism* en communications difficiles à recouvrir, le
# recalcul en opérations. Pour un modèle et un calculateur donnés, cela fait des milliers de **configurations**.
# Beaucoup sont impossibles ou ne tiennent pas en mémoire ; les autres vont plus ou moins vite. Dans ce TP, vous
# prédisez l’ordre de huit configurations d’un petit GPT, vous les exécutez vraiment toutes les huit, et vous défendez
# votre choix.
#
# À la fin, vous saurez :
#
# - dire ce que coûte l’entraînement d’un géant, et quelle part de la crête il atteint ;
# - trouver la configuration la plus rapide parmi celles qui tiennent, et dire pourquoi les autres sont refusées ;
# - prédire l’ordre de configurations sur une machine mesurée, et le confronter à l’exécution ;
# - défendre un choix, mesures à l’appui, et dire jusqu’où l’on peut se fier à un modèle.
#
# Comptez une heure et demie. Quatre processus suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 08 — The best compromise
#
# By now you have five levers, and each has its price: data parallelism costs memory and all-reduces, ZeRO messages,
# pipeline parallelism a bubble, tensor parallelism communications that are hard to hide, recomputation operations. For
# one model and one cluster that makes thousands of **layouts**. Many are impossible or do not fit into memory; the
# others are faster or slower. In this lab you predict the order of eight layouts of a small GPT, really run all eight,
# and defend your choice.
#
# By the end you can:
#
# - tell what training a giant costs, and which share of the peak it reaches;
# - find the fastest layout of those that fit, and say why the others are refused;
# - predict the order of layouts on a measured machine, and compare it with runs;
# - defend a choice against a measurement, and tell where trust in a model ends.
#
# Allow an hour and a half. Four processes are enough, without GPUs.

# %% name="setup"
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch.nn.parallel import DistributedDataParallel

import dlojz
from dlojz import labs, models
from dlojz.base.language import decimal, percent
from dlojz.config.run_config import RunConfig
from dlojz.cost_model.step import SECONDS_PER_DAY, training_s
from dlojz.hardware import cluster
from dlojz.labs.lab08_compromise import compromise_tables as tables
from dlojz.labs.lab08_compromise import figures
from dlojz.labs.lab08_compromise.exercises_alpa import perceptron, solve
from dlojz.planner.alpa.graph import mlp
from dlojz.planner.alpa.intra_operator import shard
from dlojz.planner.alpa.mesh import DeviceMesh
from dlojz.planner.this_machine import predicted_here
from dlojz.processes.forks import spmd
from dlojz.running.measure import calibrated
from dlojz.train import loop
from dlojz.train.engines import base

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
# Here is the formula beside the cost model that we use throughout this lab: on the left the course's models on one and
# four DGX A100, on the right the table of Narayanan et al., with the times implied by the published rates.

# %% name="giants"
figures.giants()

# %% [markdown] lang="fr"
# **Expliquez.** Où le modèle de coût s’écarte-t-il de la formule ? Et pourquoi le modèle de mille milliards n’a-t-il
# pas de durée sur quatre DGX ?
#
# <details><summary>Réponse</summary>
#
# À gauche, il choisit les bibliothèques d’aujourd’hui, souvent sans recalcul (6 opérations au lieu de 8). Sur quatre
# DGX, les états du plus grand modèle ne tiennent pas. Le prix se lit en **heures GPU**, nombre de GPU fois durée.
#
# </details>
#
# ### Exercice 1 — la part de la crête
#
# 140 TFLOP/s, est-ce beaucoup ? On rapporte un débit à la **crête** de l’accélérateur : 312 TFLOP/s pour un A100 en
# bf16. Deux rapports se publient :
#
# - la **MFU** (*Model FLOPs utilization*) ne compte que les 6 opérations par paramètre et par token que demande le
#   modèle ;
# - la **HFU** (*hardware FLOPs utilization*) compte celles qui sont vraiment calculées : 8 avec recalcul.
#
# Renvoyez `(mfu, hfu)`, des parts entre 0 et 1. `tokens_per_s` est le débit de tous les GPU ensemble, `peak_flops` la
# crête d’un seul, `recompute` vrai ou faux.

# %% [markdown] lang="en"
# **Explain.** Where does the cost model disagree with the formula? And why has the trillion-parameter model no time on
# four DGX?
#
# <details><summary>Answer</summary>
#
# At the left it chooses today's libraries, often without recomputation (6 operations instead of 8). On four DGX the
# states of the largest model do not fit. The price is read in **GPU-hours**, GPUs times duration.
#
# </details>
#
# ### Exercise 1 — the share of the peak
#
# Are 140 TFLOP/s much? A rate is compared with the **peak** of the device: 312 TFLOP/s for an A100 in bf16. Two ratios
# are published:
#
# - the **MFU** (model FLOPs utilization) counts only the 6 operations per parameter and token that the model asks for;
# - the **HFU** (hardware FLOPs utilization) counts those that are really computed: 8 with recomputation.
#
# Return `(mfu, hfu)`, shares between 0 and 1. `tokens_per_s` is the rate of all GPUs together, `peak_flops` the peak of
# one, `recompute` true or false.


# %% name="shares-of-peak"
def shares_of_peak(parameters, tokens_per_s, gpus, peak_flops, recompute):
    ### BEGIN SOLUTION
    rate = parameters * tokens_per_s / (gpus * peak_flops)
    return 6 * rate, (8 if recompute else 6) * rate
    ### END SOLUTION


lab.check("shares-of-peak", shares_of_peak)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("shares-of-peak")

# %% [markdown] lang="fr"
# Le tableau de Narayanan et al., où tout est recalculé. La colonne « % de la crête » est la leur :

# %% [markdown] lang="en"
# The table of Narayanan et al., where everything is computed again. The column “% of peak” is theirs:

# %% name="peak-shares"
tables.peak_shares(shares_of_peak)

# %% [markdown] lang="fr"
# **Expliquez.** Leur pourcentage est-il une MFU ou une HFU ? Et pourquoi votre HFU est-elle plus petite, surtout pour
# les petits modèles ?
#
# <details><summary>Réponse</summary>
#
# Une HFU : le recalcul y compte. Leur formule compte aussi l’attention et les logits, que « 8 par paramètre » oublie,
# et dont la part décroît quand le modèle grandit.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** Is their percentage an MFU or an HFU? And why is your HFU smaller, above all for small models?
#
# <details><summary>Answer</summary>
#
# An HFU: recomputation counts. Their formula also counts attention and the logits, which “8 per parameter” leaves out,
# and whose share falls as the model grows.
#
# </details>

# %% [markdown] lang="fr"
# ## 2. Ce qui tient
#
# ### Exercice 2 — les octets d’un rang
#
# Megatron-LM, en précision mixte : poids en bf16 (2 octets), gradients accumulés en fp32 (4), et pour Adam une copie
# maître et deux moments en fp32 (12). ZeRO répartit entre les dp répliques les états de l’optimiseur (ZeRO-1), les
# gradients aussi (ZeRO-2), les poids aussi (ZeRO-3). Avec 1F1B, un étage garde les activations de tous les
# micro-batches qu’il a commencés et dont le gradient n’est pas revenu.
#
# Renvoyez `(weights, gradients, optimizer, activations)`, en octets, pour un rang de l’étage `stage` (à partir de 0).
# `layout` a les champs `dp`, `tp`, `pp`, `zero` et `micro_batches` (par réplique) ; `parameters` compte les paramètres
# de l’étage **entier** ; `micro_batch_bytes`, ce que **ce rang** garde d’un micro-batch.

# %% [markdown] lang="en"
# ## 2. What fits
#
# ### Exercise 2 — the bytes of a rank
#
# Megatron-LM, in mixed precision: weights in bf16 (2 bytes), gradients accumulated in fp32 (4), and for Adam a master
# copy and two moments in fp32 (12). ZeRO partitions over the dp replicas the optimizer's states (ZeRO-1), the gradients
# too (ZeRO-2), the weights too (ZeRO-3). Under 1F1B a stage keeps the activations of all micro-batches that it has
# begun and whose gradient has not come back.
#
# Return `(weights, gradients, optimizer, activations)`, in bytes, for a rank of stage `stage` (from 0). `layout` has
# the fields `dp`, `tp`, `pp`, `zero` and `micro_batches` (per replica); `parameters` is the number of parameters of the
# **whole** stage; `micro_batch_bytes`, what **this rank** keeps of one micro-batch.


# %% name="rank-bytes"
def rank_bytes(layout, stage, parameters, micro_batch_bytes):
    ### BEGIN SOLUTION
    rank_parameters = parameters / layout.tp
    weights = 2 * rank_parameters / (layout.dp if layout.zero >= 3 else 1)
    gradients = 4 * rank_parameters / (layout.dp if layout.zero >= 2 else 1)
    optimizer = 12 * rank_parameters / (layout.dp if layout.zero >= 1 else 1)
    return weights, gradients, optimizer, micro_batch_bytes * min(layout.pp - stage, layout.micro_batches)
    ### END SOLUTION


lab.check("rank-bytes", rank_bytes)

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
# ## 3. Ce qui prend du temps
#
# ### Exercice 3 — la bulle ou l’*all-reduce* ?
#
# Avec `gpus` GPU, faut-il des étages ou des répliques (dp = `gpus` / pp) ? Un pas compte `micro_batches` micro-batches,
# que les dp répliques se partagent ; une passe avant et une passe arrière d’un micro-batch à travers le modèle entier
# prennent `work_s` sur un GPU. Le travail de chaque GPU ne dépend pas du partage ; le reste est de l’attente :
#
# - **la bulle** : (pp − 1) fois la durée d’un micro-batch sur un étage (TP 05) ;
# - **l’*all-reduce*** des gradients, en bf16, de l’étage : un anneau de 2 (dp − 1) étapes, dont chacune transporte un
#   morceau (TP 03) et dure `alpha_s` + `beta_s_per_byte` · octets.
#
# Il faut aussi que cela tienne dans `capacity_bytes` : 16 octets d’états pour chacun des `parameters` paramètres du
# modèle, répartis sur pp étages.
#
# Parmi les pp qui divisent `gpus`, pour lesquels dp divise `micro_batches` et qui tiennent, trouvez celui dont
# l’attente totale est la plus courte. Renvoyez `(pp, bubble_s, all_reduce_s)`.

# %% [markdown] lang="en"
# The first stage keeps twelve micro-batches, the last one only: it is the first that decides.
#
# ## 3. What takes time
#
# ### Exercise 3 — bubble or all-reduce?
#
# With `gpus` GPUs, should there be more stages, or more replicas (dp = `gpus` / pp)? A step has `micro_batches`
# micro-batches, which the dp replicas share; forward and backward of one micro-batch through the whole model take
# `work_s` on one GPU. The work of each GPU does not depend on the split; the rest is waiting:
#
# - **the bubble**: (pp − 1) times the length of a micro-batch on one stage (lab 05);
# - **the all-reduce** of the stage's gradients, in bf16: a ring of 2 (dp − 1) steps, of which each carries one chunk
#   (lab 03) and takes `alpha_s` + `beta_s_per_byte` · bytes.
#
# It must also fit into `capacity_bytes`: 16 bytes of states for each of the model's `parameters` parameters, shared
# over pp stages.
#
# Of the pp that divide `gpus`, for which dp divides `micro_batches` and which fit, find the one whose total wait is
# shortest. Return `(pp, bubble_s, all_reduce_s)`.


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
    return min(able, key=lambda split: split[1] + split[2])
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
# C’est toujours le plus petit pp qui tient, ou le plus grand : la somme des deux attentes est une fonction affine de
# 1/pp. D’où la règle de Narayanan et al. : du parallélisme de modèle **jusqu’à ce que cela tienne**, puis des
# répliques… si le réseau suit. Le planificateur compte aussi les messages du pipeline (et répartit l’optimiseur,
# ZeRO-1 : dès pp = 2, cela tient) :

# %% [markdown] lang="en"
# It is always the smallest pp that fits, or the largest: the sum of both waits is an affine function of 1/pp. Hence
# the rule of Narayanan et al.: model parallelism **until it fits**, then replicas… if the network keeps up. The
# planner also counts the messages of the pipeline (and partitions the optimizer, ZeRO-1: from pp = 2 on it fits):

# %% name="bubble-or-all-reduce"
figures.bubble_or_all_reduce("gpt3-175b", "jean_zay_a100", gpus=384, batch=1536)

# %% [markdown] lang="fr"
# **Expliquez.** Où se trouve le minimum, et qu’est-ce qui l’y ramène ? Que changeraient ZeRO-3, qui n’attend pas les
# mêmes messages, ou un *all-reduce* entièrement recouvert par la passe arrière ?
#
# <details><summary>Réponse</summary>
#
# À pp = 12 : les messages du pipeline et l’étage le plus chargé, qui croissent avec pp, l’y ramènent. ZeRO-3
# rassemble en plus les poids à chaque passe : des répliques nombreuses coûteraient plus cher. Avec un *all-reduce*
# recouvert, le minimum irait au plus petit pp qui tient.
#
# </details>
#
# ## 4. Pourquoi BLOOM a pris t4 · p12 · d8
#
# En 2022, BigScience a essayé sur Jean Zay une vingtaine de configurations avant de lancer l’entraînement de BLOOM, et
# en a publié les relevés : durée d’un pas, mémoire, et celles qui ont manqué de mémoire. Les voici (pour ces dernières,
# les nombres sont ceux du modèle de coût).

# %% [markdown] lang="en"
# **Explain.** Where is the minimum, and what brings it there? What would change with ZeRO-3, which waits for other
# messages, or with an all-reduce that backward hides completely?
#
# <details><summary>Answer</summary>
#
# At pp = 12: the messages of the pipeline and the busiest stage, which grow with pp, bring it there. ZeRO-3 would
# also gather the weights in each pass: many replicas would cost more. With an all-reduce that is hidden, the minimum
# would go to the smallest pp that fits.
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
        row
        for row in layouts
        if row.dp * row.tp * row.pp == gpus and heads % row.tp == 0 and row.memory_bytes <= capacity_bytes
    ]
    return max(able, key=lambda row: row.dp * row.micro_batch * row.micro_batches / row.step_s)
    ### END SOLUTION


lab.check("choose-layout", choose)

# %%
# lab.hint("choose-layout")

# %% name="chosen"
tables.chosen(choose, layouts, gpus=384, heads=64, capacity_bytes=capacity_bytes)

# %% [markdown] lang="fr"
# C’est bien elle : dp 8, tp 4, pp 12, micro-batch 2. Ses poursuivantes, presque aussi rapides (1 ou 2 % d’écart),
# demandent de 13 à 19 Go de plus par GPU ; la place gagnée a servi ensuite à cumuler les gradients en fp32. Les mêmes
# relevés, à côté de ce que prédit le modèle de coût, avec son intervalle :

# %% [markdown] lang="en"
# It is that one: dp 8, tp 4, pp 12, micro-batch 2. The runners-up, as fast within 1 or 2%, need 13 to 19 GB more per
# GPU; the room gained was used later to accumulate gradients in fp32. The same readings, beside what the cost model
# predicts, with its interval:

# %% name="bloom"
figures.bloom()

# %% [markdown] lang="fr"
# Le planificateur passe **toutes** les configurations en revue, et dit pour chacune pourquoi elle n’est pas la
# première, ou pourquoi elle est impossible. Ici, BLOOM tel qu’il fut entraîné : 70 couches, bf16, gradients en fp32.

# %% [markdown] lang="en"
# The planner looks at **all** layouts. For each it says why it is not the first, or why it is impossible. Here, BLOOM
# as it was trained: 70 layers, bf16, gradients in fp32.

# %% name="why"
bloom = dlojz.plan("bloom-176b", "jean_zay_a100", gpus=384, batch=2048, engines="megatron-deepspeed")
taken = {"dp": 8, "tp": 4, "pp": 12, "zero": 1, "micro_batch": 2, "checkpointing": "full"}
others = ({"tp": 8, "pp": 6}, {"tp": 2, "pp": 24}, {"dp": 16, "pp": 6}, {"tp": 6, "pp": 8}, {"checkpointing": "none"})
tables.verdicts(bloom, [{**taken, **changed} for changed in ({}, *others)])

# %% name="reasons"
tables.reasons(bloom)

# %% [markdown] lang="fr"
# dp 16 · tp 4 · pp 6, mesurée plus haut à 57 Go, est refusée ici : les relevés cumulaient les gradients en 16 bits ;
# en fp32 s’y ajoutent 4 octets par paramètre, 33 Go sur ce rang.
#
# **Expliquez.** Le planificateur ne met pourtant pas le choix de BLOOM en tête : lisez ce qui le ralentit. Pourquoi
# choisirait-on autrement aujourd’hui ? (`bloom.best` est son choix.)
#
# <details><summary>Réponse</summary>
#
# Le recalcul complet. Aujourd’hui, FlashAttention ne garde plus les matrices d’attention : un pipeline plus long tient
# sans recalculer. Le meilleur choix dépend des logiciels du moment.
#
# </details>

# %% [markdown] lang="en"
# dp 16 · tp 4 · pp 6, measured above at 57 GB, is refused here: those readings accumulated gradients in 16 bit; in
# fp32, 4 bytes per parameter come on top, 33 GB on this rank.
#
# **Explain.** And yet the planner does not put BLOOM's choice first: read what slows it down. Why would one choose
# otherwise today? (`bloom.best` is the planner's choice.)
#
# <details><summary>Answer</summary>
#
# Full recomputation. Today FlashAttention no longer keeps the attention matrices: a longer pipeline fits without
# computing again. The best choice depends on the software of the time.
#
# </details>

# %% [markdown] lang="fr"
# ### Quelle stratégie, quand ?
#
# Le cours donne une liste de critères : le modèle tient-il, les liens suivent-ils, le batch suffit-il ? Les voici en
# un arbre, parcouru pour BLOOM, puis confronté à la recherche.

# %% [markdown] lang="en"
# ### Which strategy, when?
#
# The course gives a list of criteria: does the model fit, do the links keep up, is the batch large enough? Here they
# form a tree, which is followed with numbers, then compared with what the search finds.

# %% name="tree"
bloom.tree

# %% name="trees"
tables.trees((("megatron-1.7b", 8, 64), ("megatron-7.5b", 64, 512), ("megatron-76b", 128, 1024)))

# %% [markdown] lang="fr"
# L’arbre s’arrête à la stratégie la plus simple qui convienne ; la recherche, elle, compte des secondes. **Pourquoi
# s’écartent-ils ?** L’arbre ne demande ni ce que coûte la mise à jour, que ZeRO divise aussi, ni ce qu’il faut
# recalculer pour tenir.

# %% [markdown] lang="en"
# The tree takes the first strategy that fits, the search the fastest. **Why do they differ?** The tree
# asks neither what the update costs, which ZeRO divides too, nor what must be recomputed to fit.

# %% [markdown] lang="fr"
# `docs/validation.md` montre de combien le planificateur se trompe, tableau par tableau.
#
# ## 5. Ici : prédire, exécuter, défendre
#
# Un GPT de 875 000 paramètres, 16 séquences de 128 tokens par pas, quatre processus, huit configurations.

# %% [markdown] lang="en"
# `docs/validation.md` shows by how much the planner is wrong, table by table.
#
# ## 5. Here: predict, run, defend
#
# A GPT of 875,000 parameters, 16 sequences of 128 tokens per step, four processes, eight layouts.

# %% name="eight"
small = {"model": "gpt_tiny", "device": "cpu"}
eight = [
    RunConfig.of(**small, dp=4, micro_batch=4),
    RunConfig.of(**small, dp=4, micro_batch=4, zero=1, engine="by_hand"),
    RunConfig.of(**small, dp=4, micro_batch=4, zero=3),
    RunConfig.of(**small, pp=4, micro_batch=4, micro_batches=4, schedule="1f1b"),
    RunConfig.of(**small, pp=2, dp=2, micro_batch=2, micro_batches=4, schedule="1f1b"),
    RunConfig.of(**small, tp=4, micro_batch=16, engine="torch"),
    RunConfig.of(**small, tp=2, dp=2, micro_batch=8, engine="torch"),
    RunConfig.of(**small, tp=2, dp=2, zero=3, micro_batch=8, engine="torch"),
]
for index, config in enumerate(eight):
    print(index, config.layout.title)

# %% [markdown] lang="fr"
# **Votre prédiction.** Rangez-les de la plus rapide à la plus lente : renvoyez leurs huit numéros. Pensez au nombre de
# messages d’un pas, à leur taille, à ce qui attend. Et à quelle place DDP arrive-t-il ?

# %% [markdown] lang="en"
# **Your prediction.** Put them in order, the fastest first: return their eight numbers. Think of the number of messages
# in a step, of their size, of what waits. And in which place does DDP come?


# %% name="my-order"
def my_order():
    ### BEGIN SOLUTION
    # Few messages first; tensor parallelism sends some per layer // Peu de messages d’abord ; le TP en a par couche
    return [0, 1, 4, 3, 2, 6, 5, 7]
    ### END SOLUTION


my_order()


# %% name="predict-place" stub="value"
lab.predict(
    "ddp-place",
    ### BEGIN SOLUTION
    1,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Au tour du planificateur. `calibrated` prend votre calibrage (`dlojz calibrate`), ou mesure en une demi-minute
# environ des produits, des passes sur la mémoire, des messages et chaque moteur à vide
# ([measuring.py](../../dlojz/cost_model/measuring.py)).

# %% [markdown] lang="en"
# Now the planner. `calibrated` takes your calibration (`dlojz calibrate`), or times matrix products, memory passes,
# messages and each engine's fixed overhead, in about half a minute
# ([measuring.py](../../dlojz/cost_model/measuring.py)).

# %% name="predicted" tags=["nbval-ignore-output"]
measured = calibrated(ranks=(1, 4))
rows = [predicted_here(config, measured) for config in eight]
for row in sorted(rows, key=lambda row: row.step_s):
    print(f"{decimal(1e3 * row.step_s, 0):>6} ms {decimal(row.peak_bytes / 2**20, 0):>6}", "MiB // Mio", row.title)

# %% [markdown] lang="fr"
# **Votre prédiction**, d’après ce tableau et ce que vous savez : la plus lente prendra combien de fois le temps de la
# plus rapide, une fois les deux **mesurées** ?

# %% [markdown] lang="en"
# **Your prediction**, from this table and from what you know: how many times as long as the fastest will the slowest
# take, once they are **measured**?

# %% name="predict-slowest" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "slowest-here",
    ### BEGIN SOLUTION
    max(row.step_s for row in rows) / min(row.step_s for row in rows),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Et maintenant, on exécute : les huit sur les mêmes quatre processus, à tour de rôle. `base.build` enveloppe le
# modèle : DDP, `fully_shard`, `parallelize_module` ou les étages d’un pipeline (TP 03 à 07). Une barrière avant et
# après chaque pas : c’est le rang le plus lent qui compte.

# %% [markdown] lang="en"
# And now we run them: all eight on the same four processes, taking turns. `base.build` wraps the model: DDP,
# `fully_shard`, `parallelize_module` or the stages of a pipeline (labs 03 to 07). A barrier before and after each step:
# it is the slowest rank that counts.


# %% name="rounds" tags=["nbval-ignore-output"]
def in_turns(rank, size):
    engines = [base.build(config, loop.build_model(config), torch.device("cpu")) for config in eight]
    batches = [loop.open_batches(engine.config, engine.axes.dp_rank) for engine in engines]
    seconds = [[] for _ in eight]
    for turn in range(7):
        for index, engine in enumerate(engines):
            dist.barrier()
            begun_s = time.perf_counter()
            loop.accumulate(engine, batches[index], eight[index].layout.micro_batches, None)
            engine.update()
            dist.barrier()
            if turn:  # the first one warms up // le premier est un échauffement
                seconds[index].append(time.perf_counter() - begun_s)
    return seconds


rounds = spmd(in_turns, 4, wall_s=600, limit_s=300)[0].value
medians = [statistics.median(times_s) for times_s in rounds]
figures.neighbours(rows, medians)

# %% name="reveal-slowest" tags=["nbval-ignore-output"]
lab.reveal("slowest-here", max(medians) / min(medians))
lab.reveal("ddp-place", 1 + sorted(medians).index(medians[0]))

# %% [markdown] lang="fr"
# La **corrélation des rangs** de Spearman vaut 1 pour un même ordre, −1 pour l’ordre inverse. Le planificateur, puis
# vous :

# %% [markdown] lang="en"
# Spearman's **rank correlation** is 1 for the same order, −1 for the opposite one. The planner, then you:

# %% name="orders" tags=["nbval-ignore-output"]
print("planner // planificateur", decimal(spearmanr([row.step_s for row in rows], medians).statistic, 2))
mine = my_order()
print("mine // le mien", decimal(spearmanr([mine.index(index) for index in range(8)], medians).statistic, 2))

# %% [markdown] lang="fr"
# **Expliquez.** Là où l’ordre diffère, cherchez la pièce manquante : qu’est-ce que le planificateur n’a pas mesuré ? Et
# sur un nœud de quatre GPU, l’ordre serait-il le même ?
#
# <details><summary>Réponse</summary>
#
# Chaque pièce a été chronométrée seule, et le planificateur les additionne. Ce qui, en réalité, se recouvre est alors
# compté deux fois : le pas est prédit trop long. Ce qui se dispute les cœurs coûte plus que seul : il est prédit trop
# court. Regardez le signe de vos écarts, et quelles configurations ils touchent. Avec NVLink, un message coûte des
# microsecondes, et le *Tensor Parallelism* remonte.
#
# </details>
#
# ### Exercice 5 — la première est-elle vraiment plus rapide ?
#
# Deux médianes diffèrent toujours. Pour **défendre** un choix, il faut dire de combien, et si le hasard aurait suffi.
# Vous recevez deux listes de durées ; les n-ièmes durées viennent du même tour. Renvoyez `(ratio, p)` :
#
# - `ratio` : la médiane des rapports seconde / première, **tour par tour** ;
# - `p`, la valeur p du test du signe : si aucune n’était plus rapide, chaque tour (sans compter les ex æquo) se
#   jouerait à pile ou face ; quelle serait la probabilité d’un résultat au moins aussi tranché, **dans un sens ou
#   dans l’autre** ?

# %% [markdown] lang="en"
# **Explain.** Where the order differs, look for the missing piece: what has the planner not measured? And would the
# order be the same on a node with four GPUs?
#
# <details><summary>Answer</summary>
#
# Each piece was timed alone, and the planner adds them up. What really overlaps is then counted twice: the step is
# predicted too long. What competes for the cores costs more than alone: it is predicted too short. Look at the sign of
# your gaps, and at the layouts that have them. With NVLink a message costs microseconds, and tensor parallelism moves
# up.
#
# </details>
#
# ### Exercise 5 — is the first really faster?
#
# Two medians always differ. To **defend** a choice one must tell by how much, and whether chance would have been
# enough. You receive two lists of times; the n-th of each come from the same round. Return `(ratio, p)`:
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
# La plus rapide, face à chacune des autres :

# %% [markdown] lang="en"
# The fastest, against each of the others:

# %% name="duels" tags=["nbval-ignore-output"]
order = sorted(range(8), key=lambda index: medians[index])
tables.duels(compare_rounds, [rows[index] for index in order], [rounds[index] for index in order])

# %% [markdown] lang="fr"
# **Défendez** votre choix en une phrase : la configuration, le rapport, p, et la mémoire qu’elle prend. Avec 6 tours, p
# ne descend pas sous 2/2⁶ = 0,031.
#
# Le dernier mot revient à un entraînement ordinaire, avec sa fiche : la mémoire est prédite à 1 % près.

# %% [markdown] lang="en"
# **Defend** your choice in one sentence: the layout, the ratio, p, and the memory that it takes. With 6 rounds p does
# not get below 2/2⁶ = 0.031.
#
# The last word belongs to an ordinary training, with its record: memory is predicted within 1%.

# %% name="run-best" tags=["nbval-ignore-output"]
run = dlojz.run(eight[order[0]], steps=6)
run.compare()

# %% [markdown] lang="fr"
# ## 6. Passer à l’échelle, ici
#
# Deux façons d’ajouter des processus. **Scalabilité faible** : chacun garde son batch, et le travail grandit.
# **Scalabilité forte** : le batch total reste le même, chacun en a moins. Voici un entraînement en PyTorch seul, avec
# DDP, en tokens par seconde ; et d’abord la crête d’un produit de matrices, sur un processus, puis sur quatre.

# %% [markdown] lang="en"
# ## 6. Scaling, here
#
# There are two ways to add processes. **Weak scaling**: each keeps its batch, and the work grows. **Strong scaling**:
# the whole batch stays the same, each has less of it. Here is a training in plain PyTorch, with DDP, in tokens per
# second; and first the peak of a product of matrices, on one process, then on four at once.


# %% name="peak-here" tags=["nbval-ignore-output"]
def product(rank, size):
    a, begun_s = torch.randn(512, 512), time.perf_counter()
    for _ in range(100):
        a @ a
    return 100 * 2 * 512**3 / (time.perf_counter() - begun_s)


peak_flops = spmd(product, 1)[0].value
four_flops = sum(flops.value for flops in spmd(product, 4))
print("one process, four together: // un processus, quatre ensemble :", end=" ")
print(f"{decimal(peak_flops / 1e9, 0)}, {decimal(four_flops / 1e9, 0)} GFLOP/s")

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien de fois plus de tokens par seconde à quatre processus qu’à un seul, à batch égal par
# processus ?

# %% [markdown] lang="en"
# **Your prediction.** How many times as many tokens per second with four processes as with one, with the same batch for
# each process?


# %% name="predict-four" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "four-processes",
    ### BEGIN SOLUTION
    four_flops / peak_flops,
    ### END SOLUTION
)


# %% name="tokens-per-s"
def training(batch):
    def on_rank(rank, size):
        torch.manual_seed(rank)  # for tokens: the weights are rank 0's // pour les tokens : les poids sont du rang 0
        model = models.build("gpt_tiny")
        model = DistributedDataParallel(model) if size > 1 else model
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, 64, (batch, 129))
        for step in range(8):
            if step == 3:
                begun_s = time.perf_counter()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return 5 * size * batch * 128 / (time.perf_counter() - begun_s)

    return on_rank


# %% name="scaling" tags=["nbval-ignore-output"]
patient = {"wall_s": 600, "limit_s": 300}
weak = {size: spmd(training(16), size, **patient)[0].value for size in (1, 2, 4)}
strong = {size: spmd(training(16 // size), size, **patient)[0].value for size in (1, 2, 4)}
parameters = sum(parameter.numel() for parameter in models.build("gpt_tiny").parameters())
for name, rates in (("weak // faible", weak), ("strong // forte", strong)):
    for size, rate in rates.items():
        mfu, _ = shares_of_peak(parameters, rate, size, peak_flops, False)
        shares = f"{percent(rate / rates[1] / size, 0):>4}, MFU {percent(mfu, 0):>4}"
        print(f"{name:6} {size}: {decimal(rate, 0):>6} tokens/s,", "efficiency // efficacité", shares)

# %% name="reveal-four" tags=["nbval-ignore-output"]
lab.reveal("four-processes", weak[4] / weak[1])

# %% [markdown] lang="fr"
# **Expliquez.** À quatre, on ne calcule pas plus vite que ne le permettent les cœurs, et les messages s’ajoutent.
# Dans quel cas l’efficacité devrait-elle chuter le plus vite, et pourquoi ? Votre mesure est-elle d’accord ?
#
# <details><summary>Réponse</summary>
#
# La forte : seize exemples, puis huit, puis quatre par processus, alors que l’*all-reduce* a toujours la taille des
# gradients. La faible garde seize exemples par processus : un message pèse autant, mais il suit quatre fois plus de
# calcul. Toutes deux partent du même entraînement à un processus. L’écart entre elles est ce que coûtent les messages ;
# ce qu’elles perdent ensemble, ce sont les cœurs partagés. Si votre mesure dit l’inverse, recommencez-la : sur
# quelques secondes, un voisin occupé suffit à la fausser.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** Together the four compute only what the cores give, and messages are added. Which of the two kinds of
# scaling should fall faster, and why? Does your measurement agree?
#
# <details><summary>Answer</summary>
#
# Strong scaling: sixteen samples, then eight, then four for each process, while the all-reduce is still as large as the
# gradients. Weak scaling keeps sixteen samples for each process: a message is as large, but four times as much
# computation comes before it. Both begin with the same training on one process. What lies between them is the cost of
# the messages; what they lose together is the cores that they share. If your measurement says the opposite, repeat it:
# over a few seconds, one busy neighbour is enough.
#
# </details>

# %% [markdown] lang="fr"
# ## Défi
#
# `megatron-18b` doit voir cent milliards de tokens (séquences de 2 048) sur des A100 de Jean Zay, par pas de 512
# séquences, en 45, 30, puis 19 jours, avec Megatron-Core. Écrivez une fonction qui reçoit le nombre de jours et
# renvoie une configuration qui tient ce délai avec **le moins de GPU possible** : un dictionnaire de `dp`, `tp`,
# `pp`, `zero`, `micro_batch` et `checkpointing`. Des nœuds entiers de 8 GPU, 128 GPU au plus ; dix secondes pour les
# trois délais. Ce qui compte est `estimated_s`, la durée d’un pas selon le planificateur. Le score est la somme des
# GPU des trois délais. Facultatif.

# %% [markdown] lang="en"
# ## Challenge
#
# Suppose that `megatron-18b` must see a hundred billion tokens (sequences of 2,048) on A100s of Jean Zay, in steps of
# 512 sequences, within 45, 30, then 19 days, with Megatron-Core. Write a function that receives the number of days
# and returns a layout that meets the deadline with **as few GPUs as possible**: a dictionary of `dp`, `tp`, `pp`,
# `zero`, `micro_batch` and `checkpointing`. Whole nodes of 8 GPUs, at most 128 GPUs; ten seconds for all three
# deadlines. What counts is `estimated_s`, the time of a step according to the planner. The score is the sum of the
# GPUs for the three deadlines. Optional.


# %% name="fewest-gpus"
def fewest_gpus(days):
    ### BEGIN SOLUTION
    steps, seconds = 100e9 / (512 * 2048), 86_400 * days
    # With 60% of the peak, so many nodes at least // À 60 % de la crête, il faut au moins tant de nœuds
    nodes = int(6 * 18.4e9 * 100e9 / (0.6 * 312e12 * seconds) / 8) + 1
    while True:
        asked = dlojz.plan("megatron-18b", "jean_zay_a100", 8 * nodes, 512, engines="megatron-core", simulate=1)
        if (best := asked.choose()).estimated_s * steps <= seconds:
            fields = ("dp", "tp", "pp", "zero", "micro_batch", "checkpointing")
            return {name: getattr(best.candidate, name) for name in fields}
        nodes += 1
    ### END SOLUTION


lab.check("fewest-gpus", fewest_gpus)

# %%
# lab.hint("fewest-gpus")

# %% [markdown] lang="fr"
# ## 7. Facultatif — chercher opérateur par opérateur : Alpa
#
# Le planificateur essaie des degrés, les mêmes pour toutes les couches. **Alpa** (Zheng et al., 2022) va plus loin, à
# deux niveaux : comment découper chaque opérateur sur un groupe de GPU (niveau **interne**, un programme linéaire en
# nombres entiers) ; où couper en étages, et quel groupe de GPU donner à chacun (niveau **externe**, de la programmation
# dynamique).
#
# Prenons six couches denses (batch 32, largeur 256, fp32) sur un maillage de 4 GPU, avec le modèle de coût du test
# d’Alpa : une communication coûte α + β · octets, α = β = 1, et un *all-reduce* de n octets entre 4 rangs coûte
# 1 + 1,5 · n (plus 0,01, pour départager deux plans égaux). Trois **stratégies** par couche : `column` (TP 06 : le
# gradient de l’entrée est réduit, sauf à la première couche, dont personne n’attend le gradient), `row` (la sortie est
# réduite), `batch` (le gradient des poids est réduit). Et entre deux couches, **changer de découpe** peut coûter :
# `resharding[v][k][j]`, si la couche v prend la stratégie k et la suivante la stratégie j.

# %% [markdown] lang="en"
# ## 7. Optional — searching operator by operator: Alpa
#
# The planner tries degrees, the same for all layers. **Alpa** (Zheng et al., 2022) goes further, on two levels: how to
# shard each operator on a group of GPUs (the **inner** level, an integer linear programme); where to cut into stages,
# and which group of GPUs to give to each (the **outer** level, dynamic programming).
#
# Let us take six dense layers (batch 32, width 256, fp32) on a mesh of 4 GPUs, with the cost model of Alpa's own test:
# a communication costs α + β · bytes, α = β = 1, and an all-reduce of n bytes among 4 ranks costs 1 + 1.5 · n (plus
# 0.01, to tell two equal plans apart). Three **strategies** per layer: `column` (lab 06: the input's gradient is
# reduced, except at the first layer, whose gradient nobody waits for), `row` (the output is reduced), `batch` (the
# weights' gradient is reduced). And between two layers **resharding** may cost: `resharding[v][k][j]`, if layer v takes
# strategy k and the next one strategy j.

# %% name="chain"
mesh = DeviceMesh((1, 4))
chain = perceptron(batch=32, width=256, layers=6, mesh=mesh)
print(chain.strategies)
print(chain.costs[0], chain.costs[1])
for row in chain.resharding[0]:
    print(row)

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien coûte la meilleure suite de six stratégies ?

# %% [markdown] lang="en"
# **Your prediction.** What does the best sequence of six strategies cost?

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
# Renvoyez `objective, equations` : l’objectif est un dictionnaire variable → coût (`costs[v][k]` : couche v, stratégie
# k) ; chaque équation, une paire (dictionnaire variable → coefficient, valeur de la somme). Ainsi
# `({("s", 0, 0): 1, ("s", 0, 1): 1}, 1)` dit s[0, 0] + s[0, 1] = 1. Toutes les variables sont déjà entre 0 et 1, les s
# sont entiers ; le nombre de stratégies peut varier d’une couche à l’autre.

# %% [markdown] lang="en"
# ### Exercise 6 — a linear programme
#
# A solver knows variables, a linear objective and equations. Here:
#
# - `("s", v, k)` is 1 if layer v takes strategy k, and 0 else;
# - `("e", v, k, j)` is to be 1 if layer v takes k **and** layer v + 1 takes j: that would be the product
#   s[v, k] · s[v+1, j], which is not linear; equations must force it.
#
# Return `objective, equations`: the objective is a dictionary variable → cost (`costs[v][k]`: layer v, strategy k);
# each equation a pair (dictionary variable → coefficient, value of the sum). So `({("s", 0, 0): 1, ("s", 0, 1): 1}, 1)`
# says s[0, 0] + s[0, 1] = 1. All variables are between 0 and 1 already, the s are whole; the number of strategies may
# differ from layer to layer.


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
# Personne n’a dit au solveur d’alterner colonnes et lignes : c’est la paire de Megatron (TP 06), retrouvée. Avec un
# grand batch, il passe au *Data Parallelism* : les activations grandissent avec le batch, les poids non.
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
# n’en valent que 3. Avec 4 GPU et **64** micro-batches, combien dure le pas le plus court ?

# %% [markdown] lang="en"
# Nobody told the solver to take columns and rows in turn: it is Megatron's pair (lab 06), found again. With a large
# batch it turns to data parallelism: activations grow with the batch, weights do not.
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
        least_s = float("inf")
        for n in (n for n in sizes if n <= left):
            for last in range(first, layers):
                if (t := time_of(first, last, n)) <= t_max:
                    least_s = min(least_s, t + least(last + 1, left - n, t_max))
        return least_s

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
# Les cas C, B, D ont les mêmes couches et les mêmes GPU, mais 1, 8, puis 64 micro-batches : plus il y en a, moins le
# remplissage compte, et plus il y a d’étages.

# %% [markdown] lang="en"
# Cases C, B, D have the same layers and the same GPUs, but 1, 8, then 64 micro-batches: the more there are, the less
# filling counts, and the more stages there are.

# %% [markdown] lang="fr"
# ## 8. Le même, en grand
#
# `documents()` écrit un choix pour la bibliothèque qui l’exécute :

# %% [markdown] lang="en"
# ## 8. The same, at full size
#
# `documents()` writes a choice for the library that runs it:

# %% name="documents"
tables.documents(bloom.choose(**taken).documents(), most=12)

# %% [markdown] lang="fr"
# Et pour ce que `dlojz.run` exécute lui-même, une seule ligne change sur un calculateur, `on="slurm"`. L’aperçu ne
# soumet rien :

# %% [markdown] lang="en"
# And for what `dlojz.run` runs itself, one line changes on a cluster, `on="slurm"`. The preview submits nothing:

# %% name="preview"
big = RunConfig.of(model="coatnet_7", dp=8, zero=3, micro_batch=8, precision="bf16", steps=100)
dlojz.preview(big, "jean_zay_a100", account="abc@a100", time_limit_s=1800)

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Faites-lui mesurer son débit : à la fin de chaque époque, le rang 0 affiche `samples/s` et le nombre d’échantillons
# que toutes les répliques traitent par seconde. Continuez dans votre `train.py`, ou partez de celui qu’écrit
# `dlojz labs script 08 un_autre_dossier`. La cellule ci-dessous le juge.
#
# Puis lancez `--parallel ddp`, `fsdp`, `tp` et `1f1b --accumulation 4` à tour de rôle, et défendez votre choix par les
# médianes. `dlojz compare` montre ce que chaque configuration détient et envoie.
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
# Let it measure its rate: at the end of each epoch, rank 0 prints `samples/s` and the number of samples that all
# replicas together train per second. Go on in your `train.py`, or let `dlojz labs script 08 another_folder` write what
# this lab begins with. The cell below judges it.
#
# Then start `--parallel ddp`, `fsdp`, `tp` and `1f1b --accumulation 4` in turns, and defend your choice by the medians.
# `dlojz compare` shows what each layout holds and sends.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# steps = len(loader) // micro_batches
# print(f"samples/s {steps * args.batch / (time.perf_counter() - begun_s):.1f}", flush=True)
# ```
#
# </details>

# %% name="judge-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | question | ce qui y répond | ce qui la tranche |
# |--|--|--|
# | est-ce que ça tient ? | états selon ZeRO, activations × micro-batches en cours | le premier étage |
# | est-ce rapide ? | la MFU | la crête, et le recalcul |
# | dans quel ordre ? | des pièces mesurées une à une | l’exécution |
# | le choix est-il bon ? | des tours appariés, un test du signe | la mesure |

# %% [markdown] lang="en"
# ## Summary
#
# | question | what answers it | what decides it |
# |--|--|--|
# | does it fit? | states by ZeRO, activations × micro-batches under way | the first stage |
# | is it fast? | the MFU | the peak, and recomputation |
# | in which order? | pieces measured one by one | the run |
# | is the choice right? | paired rounds, a sign test | the measurement |

# %%
lab.progress()
