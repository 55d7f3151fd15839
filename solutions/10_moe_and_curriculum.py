# %% [markdown] lang="fr"
# # TP 10 — Mélange d’experts et curriculum
#
# Jusqu’ici, chaque token passait par tous les poids du modèle. Un **mélange d’experts** (*Mixture of Experts*, MoE)
# remplace un MLP par plusieurs, les *experts*, et une **porte** (*gate*) envoie chaque token vers un ou deux d’entre
# eux : beaucoup de paramètres, peu de calcul. Cela se paie en communication, et demande un équilibre : si tous les
# tokens veulent le même expert, les autres n’apprennent rien. Dans la première partie de ce TP, vous écrivez un tel
# mélange, puis vous répartissez ses experts entre des rangs.
#
# La seconde partie présente une autre économie : au lieu de moins de poids par token, moins de tokens par pas, au
# début. Un **curriculum** sur la longueur des séquences commence par des textes courts.
#
# À la fin, vous saurez :
#
# - écrire une porte, donner à chaque expert sa capacité, et dire ce que deviennent les tokens en trop ;
# - écrire la perte qui équilibre les experts, et reconnaître un routeur qui s’effondre ;
# - échanger les tokens entre les rangs par *all-to-all*, et moyenner les gradients des experts sans se tromper ;
# - prévoir les octets échangés et la mémoire par rang, puis les mesurer ;
# - écrire une fonction de cadence, et dire ce qu’un curriculum fait gagner ou perdre.
#
# Comptez une heure et demie. Quatre rangs suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 10 — Mixture of experts and curriculum
#
# Until now every token went through all weights of the model. A **mixture of experts** (MoE) puts several MLPs, the
# *experts*, in the place of one, and a **gate** sends each token to one or two of them: many parameters, little
# computation. The price is paid in communication, and in balance: if all tokens want the same expert, the others learn
# nothing. In the first part of this lab you write such a mixture, then you divide its experts among ranks.
#
# The second part saves in another way: instead of fewer weights per token, fewer tokens per step, at first. A
# **curriculum** on the length of sequences begins with short texts.
#
# By the end you can:
#
# - write a gate, give each expert its capacity, and tell what becomes of the tokens that are too many;
# - write the loss that balances the experts, and recognise a router that collapses;
# - exchange tokens among ranks by all-to-all, and average the gradients of experts without a mistake;
# - foresee the bytes that are exchanged and the memory per rank, then measure them;
# - write a pacing function, and tell what a curriculum gains or loses.
#
# Allow an hour and a half. Four ranks are enough, without GPUs.

# %% name="setup"
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dlojz
from dlojz import labs, models
from dlojz.labs.lab06_tensor import figures as tensor_run_figures
from dlojz.labs.lab10_experts import figures
from dlojz.models.experts import Routing
from dlojz.models.experts.layer import MixtureOfExperts

lab = labs.start("10")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. Beaucoup de paramètres, peu de calcul
#
# Mixtral 8x7B (Jiang et al., 2024) a 46,7 milliards de paramètres. Dans chacun de ses 32 blocs, le MLP existe en 8
# exemplaires, et chaque token en voit 2. Un expert se compose de trois matrices, de 4 096 × 14 336. Attention,
# normalisations, embedding et routeurs servent à tous les tokens.
#
# **Votre prédiction.** Combien de paramètres un token rencontre-t-il ?

# %% [markdown] lang="en"
# ## 1. Many parameters, little computation
#
# Mixtral 8x7B (Jiang et al., 2024) has 46.7 billion parameters. In each of its 32 blocks the MLP exists 8 times, and
# each token sees 2 of them. An expert is made of three matrices of 4,096 × 14,336. Attention, norms, embedding and
# routers serve all tokens.
#
# **Your prediction.** How many parameters does one token meet?

# %% name="predict-active" stub="value"
whole, experts = models.describe("mixtral_8x7b").parameters, 32 * 8 * 3 * 4096 * 14336
lab.predict(
    "active-parameters",
    ### BEGIN SOLUTION
    whole - experts * 6 / 8,
    ### END SOLUTION
)

# %% name="reveal-active"
lab.reveal("active-parameters", models.describe("mixtral_8x7b").active_parameters)

# %% [markdown] lang="fr"
# Le calcul est celui d’un modèle de 13 milliards de paramètres, la mémoire celle d’un modèle de 47 milliards. Un
# mélange économise du calcul au prix de la mémoire : c’est pourquoi on en répartit les experts.
#
# ### Exercice 1 — la porte
#
# Le **routeur** est une couche linéaire : pour chaque token, un logit par expert. Softmax en fait des probabilités, et
# le token va vers les `k` experts les plus probables. La sortie du mélange est la somme de leurs sorties, chacune
# multipliée par un **poids** :
#
# - pour k = 1 (*Switch Transformer*, Fedus et al., 2021), la probabilité de l’expert choisi ;
# - pour k ≥ 2 (*GShard*, Lepikhin et al., 2020), les probabilités des experts choisis, divisées par leur somme.
#
# `logits` est de forme (tokens, experts). Renvoyez les poids et les numéros des experts choisis, chacun de forme
# (tokens, k). `t.topk(k)` donne les `k` plus grandes valeurs selon la dernière dimension, dans l’ordre décroissant, et
# leurs indices.

# %% [markdown] lang="en"
# The computation is that of a model with 13 billion parameters, the memory that of a model with 47 billion. A mixture
# saves computation at the price of memory: that is why its experts are divided among ranks.
#
# ### Exercise 1 — the gate
#
# The **router** is a linear layer: for each token, one logit per expert. Softmax turns them into probabilities, and the
# token goes to the `k` most probable experts. The mixture's output is the sum of their outputs, each multiplied by a
# **weight**:
#
# - for k = 1 (Switch Transformer, Fedus et al., 2021), the probability of the chosen expert;
# - for k ≥ 2 (GShard, Lepikhin et al., 2020), the probabilities of the chosen experts, divided by their sum.
#
# `logits` has the shape (tokens, experts). Return the weights and the numbers of the chosen experts, each of shape
# (tokens, k). `t.topk(k)` gives the `k` largest values along the last dimension, in decreasing order, and their
# indices.


# %% name="gate"
def choose(logits, k):
    ### BEGIN SOLUTION
    weights, chosen = logits.softmax(-1).topk(k)
    if k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen
    ### END SOLUTION


lab.check("gate", choose)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("gate")

# %% [markdown] lang="fr"
# Le choix lui-même n’a pas de gradient : on ne dérive pas un indice. Le routeur n’apprend que par les poids.
#
# ## 2. Chaque expert a sa capacité
#
# Un GPU calcule efficacement sur des tenseurs denses, de taille connue d’avance. On donne donc à chaque expert un
# nombre fixe de places, sa **capacité** : la part équitable des choix, multipliée par un **facteur de capacité**, et
# arrondie vers le haut,
#
# $$C = \left\lceil \text{facteur} \times \frac{k \times \text{tokens}}{\text{experts}} \right\rceil$$
#
# Un choix qui ne trouve plus de place est **abandonné** (*dropped*) : la connexion résiduelle porte seule le token
# jusqu’à la couche suivante.
#
# ### Exercice 2 — à quelle place ?
#
# `chosen` (tokens, k) contient les numéros des experts, premiers choix dans la colonne 0. Renvoyez, dans la même forme,
# la place de chaque choix chez son expert, à partir de 0 ; `-1` s’il est abandonné. On sert d’abord tous les premiers
# choix, dans l’ordre des tokens, puis tous les seconds. (`F.one_hot` et `cumsum` évitent la boucle ; une boucle est
# juste aussi.)

# %% [markdown] lang="en"
# The choice itself has no gradient: one does not differentiate an index. The router learns through the weights alone.
#
# ## 2. Each expert has its capacity
#
# A GPU likes dense tensors, of a size known beforehand. So each expert is given a fixed number of places, its
# **capacity**: the fair share of the choices, times a **capacity factor**, rounded up,
#
# $$C = \left\lceil \text{factor} \times \frac{k \times \text{tokens}}{\text{experts}} \right\rceil$$
#
# A choice that finds no place is **dropped**: the residual connection alone carries the token to the next layer.
#
# ### Exercise 2 — at which place?
#
# `chosen` (tokens, k) holds the numbers of the experts, first choices in column 0. Return, in the same shape, the place
# of each choice with its expert, from 0; `-1` where it is dropped. All first choices are served first, in the order of
# the tokens, then all second ones. (`F.one_hot` and `cumsum` do without a loop; a loop is right too.)


# %% name="places"
def place(chosen, experts, factor):
    tokens, k = chosen.shape
    ### BEGIN SOLUTION
    capacity = math.ceil(factor * k * tokens / experts)
    taken = F.one_hot(chosen.T.flatten(), experts)
    places = (taken.cumsum(0) * taken).sum(1) - 1
    places[places >= capacity] = -1
    return places.view(k, tokens).T
    ### END SOLUTION


lab.check("places", place)

# %%
# lab.hint("places")

# %% [markdown] lang="fr"
# Vos deux fonctions à l’œuvre : douze tokens, quatre experts, un routeur qui préfère les premiers. D’abord k = 1 :

# %% [markdown] lang="en"
# Your two functions at work: twelve tokens, four experts, a router that likes the first ones better. First k = 1:

# %% name="seats-one" tags=["nbval-ignore-output"]
figures.seats(choose, place, k=1, factor=1.0)

# %% [markdown] lang="fr"
# Puis k = 2 et un facteur de 1,25. Un second choix ne prend jamais la place d’un premier :

# %% [markdown] lang="en"
# Then k = 2 and a factor of 1.25. A second choice never takes the place of a first one:

# %% name="seats-two" tags=["nbval-ignore-output"]
figures.seats(choose, place, k=2, factor=1.25)

# %% [markdown] lang="fr"
# **Votre prédiction.** Huit experts, k = 1, facteur 1,25 : le routeur envoie **tous** les tokens au même expert.
# Quelle part des tokens est abandonnée, entre 0 et 1 ?

# %% [markdown] lang="en"
# **Your prediction.** Eight experts, k = 1, factor 1.25: the router sends **all** tokens to the same expert. Which
# share of the tokens is dropped, between 0 and 1?

# %% name="predict-dropped" stub="value"
lab.predict(
    "dropped-share",
    ### BEGIN SOLUTION
    1 - 1.25 / 8,
    ### END SOLUTION
)

# %% name="reveal-dropped"
collapsed = MixtureOfExperts(16, 32, Routing(experts=8, top_k=1, capacity_factor=1.25))
with torch.no_grad():
    # whatever is positive likes expert 0 // tout ce qui est positif choisit l’expert 0
    collapsed.gate.weight.zero_()[0] = 1.0
    collapsed(torch.ones(4, 64, 16))
lab.reveal("dropped-share", collapsed.last.dropped_share.item())

# %% [markdown] lang="fr"
# Le facteur est un compromis. Trop petit, on abandonne des tokens ; trop grand, on calcule, et bientôt on échange, des
# places vides. La ligne en tirets est la valeur usuelle, 1,25 :

# %% [markdown] lang="en"
# The factor is a compromise. Too small, and tokens are dropped; too large, and empty places are computed, and soon
# exchanged. The dashed line is the usual value, 1.25:

# %% name="dropped-or-empty" tags=["nbval-ignore-output"]
figures.dropped_or_empty(choose, place)

# %% [markdown] lang="fr"
# Pour un routeur effondré, aucun facteur raisonnable ne suffit : il faut l’équilibrer (section 3).
#
# ### Exercice 3 — le mélange
#
# Assemblez la couche. `x` (tokens, largeur) ; `weights`, `chosen` et `places` (tokens, k) viennent des deux premiers
# exercices ; `experts(t)` attend un tenseur (experts, capacité, largeur), la ligne e pour l’expert e, et rend la même
# forme ; `shape` vaut (experts, capacité). Renvoyez la somme pondérée, (tokens, largeur), nulle pour un token
# abandonné : la connexion résiduelle est autour de la couche, pas dedans.
#
# - `(places >= 0).nonzero(as_tuple=True)` donne les lignes et les colonnes des choix qui ont une place ;
# - `t[lignes, colonnes]` lit, ou écrit, plusieurs éléments à la fois ;
# - `y.index_add(0, lignes, valeurs)` ajoute chaque ligne de `valeurs` à la ligne indiquée de `y`.

# %% [markdown] lang="en"
# For a collapsed router no reasonable factor is enough: it has to be balanced (section 3).
#
# ### Exercise 3 — the mixture
#
# Put the layer together. `x` (tokens, width); `weights`, `chosen` and `places` (tokens, k) come from the first two
# exercises; `experts(t)` takes a tensor (experts, capacity, width), row e for expert e, and gives the same shape;
# `shape` is (experts, capacity). Return the weighted sum, (tokens, width), zero for a token that is dropped: the
# residual connection is around the layer, not in it.
#
# - `(places >= 0).nonzero(as_tuple=True)` gives the rows and columns of the choices that have a place;
# - `t[rows, columns]` reads, or writes, several elements at once;
# - `y.index_add(0, rows, values)` adds each row of `values` to the row of `y` that is named.


# %% name="mixture"
def mix(x, weights, chosen, places, experts, shape):
    ### BEGIN SOLUTION
    token, choice = (places >= 0).nonzero(as_tuple=True)
    where = chosen[token, choice], places[token, choice]
    buffer = x.new_zeros(*shape, x.shape[1])
    buffer[where] = x[token]
    weighted = weights[token, choice].unsqueeze(1) * experts(buffer)[where]
    return torch.zeros_like(x).index_add(0, token, weighted)
    ### END SOLUTION


lab.check("mixture", mix)

# %%
# lab.hint("mixture")

# %% [markdown] lang="fr"
# La couche du paquet ([layer.py](../../dlojz/models/experts/layer.py)) fait la même chose, avec des formes fixes
# partout. Vos trois fonctions à côté d’elle, sur les mêmes poids ; et à côté du mélange **dense**, où chaque token va
# chez ses experts sans aucune capacité. Le tableau donne le plus grand écart :

# %% [markdown] lang="en"
# The package's layer ([layer.py](../../dlojz/models/experts/layer.py)) does the same, with fixed shapes everywhere.
# Your three functions beside it, on the same weights; and beside the **dense** mixture, where each token goes to its
# experts without any capacity. The table gives the largest difference:

# %% name="beside-package"
figures.beside_package(choose, place, mix)

# %% [markdown] lang="fr"
# Avec un facteur égal à experts / k, chaque expert a de la place pour tous : la capacité ne change plus rien, et le
# mélange est le mélange dense.
#
# ## 3. Équilibrer
#
# Un expert un peu meilleur reçoit plus de tokens, apprend donc plus, et en reçoit encore plus : rien ne retient le
# routeur de tout lui envoyer. On ajoute donc à la perte un terme qui coûte d’autant plus que les choix sont inégaux :
#
# $$\text{équilibre} = E \sum_{e} f_e P_e$$
#
# où, sur les tokens du micro-batch, $f_e$ est la part de **tous les choix** (tokens × k) qui tombent sur l’expert e, et
# $P_e$ la moyenne de sa probabilité.
#
# ### Exercice 4 — la perte d’équilibrage
#
# Renvoyez-la, à partir des `logits` (tokens, experts) et de `chosen` (tokens, k). La vérification regarde aussi le
# gradient que reçoivent les logits.

# %% [markdown] lang="en"
# With a factor of experts / k each expert has room for all: the capacity no longer changes anything, and the mixture is
# the dense one.
#
# ## 3. Balance
#
# An expert that is a little better gets more tokens, so it learns more, and gets still more: nothing keeps the router
# from sending it everything. So a term is added to the loss, which costs the more the less even the choices are:
#
# $$\text{balance} = E \sum_{e} f_e P_e$$
#
# where, over the tokens of the micro-batch, $f_e$ is the share of **all choices** (tokens × k) that fall on expert e,
# and $P_e$ the mean of its probability.
#
# ### Exercise 4 — the balance loss
#
# Return it, from the `logits` (tokens, experts) and `chosen` (tokens, k). The check looks at the gradient that the
# logits get, too.


# %% name="balance-loss"
def balance(logits, chosen):
    experts = logits.shape[1]
    ### BEGIN SOLUTION
    f = F.one_hot(chosen, experts).float().mean((0, 1))
    p = logits.softmax(-1).mean(0)
    return experts * (f * p).sum()
    ### END SOLUTION


lab.check("balance-loss", balance)

# %%
# lab.hint("balance-loss")

# %% [markdown] lang="fr"
# Elle vaut 1 quand choix et probabilités sont uniformes, et E quand un seul expert a tout. Ajoutons-la, ou non, à la
# perte de `moe_tiny` : un décodeur d’octets, dont un bloc sur deux a huit experts, k = 1, entraîné sur du vrai texte.
# La boucle est celle d’AdamW, 40 pas ; après chacun, on lit dans la couche combien de tokens chaque expert a reçus.
# **Avant de regarder** : sans elle, combien d’experts travaillent encore après vingt pas ?

# %% [markdown] lang="en"
# It is 1 when choices and probabilities are uniform, and E when one single expert has everything. Let us add it, or
# not, to the loss of `moe_tiny`: a decoder of bytes, every second block of which has eight experts, k = 1, trained on
# real text. The loop is the usual one with AdamW, 40 steps; after each, one reads from the layer how many tokens each
# expert has received. **Before you look**: without it, how many experts still work after twenty steps?

# %% name="train-loads" tags=["nbval-ignore-output"]
unbalanced, balanced = (figures.train_mixture(balance_loss=weight) for weight in (0.0, 0.1))
figures.loads(unbalanced, balanced)

# %% [markdown] lang="fr"
# Une ligne par expert, une colonne par pas. En blanc, l’expert n’a rien reçu ; en bleu, jusqu’à sa capacité ; en
# orange, au-delà : le surplus est abandonné, comme le montre la courbe du bas. Sans perte d’équilibrage, un seul expert
# prend presque tout dès les premiers pas, puis un autre le remplace ; le reste n’apprend rien, et l’essentiel des
# tokens traverse la couche sans y être traité. Avec elle, il faut une vingtaine de pas, mais le travail se partage
# mieux. En moyenne sur l’entraînement :

# %% [markdown] lang="en"
# One row per expert, one column per step. In white, the expert has got nothing; in blue, up to its capacity; in orange,
# beyond: the rest is dropped, as the lowest curve shows. Without the balance loss one single expert takes nearly
# everything from the first steps on, then another takes its place; the rest learn nothing, and most tokens cross the
# layer without being processed there. With it, it takes about twenty steps, but the work is divided better. On average
# over the training:

# %% name="loads-seen" tags=["nbval-ignore-output"]
figures.loads_table(unbalanced, balanced)

# %% name="balance-helps"
print(unbalanced.dropped_share > balanced.dropped_share)

# %% [markdown] lang="fr"
# Deux remarques. Le poids de cette perte est lui aussi un compromis : trop faible, il n’équilibre rien ; trop fort, il
# empêche le routeur de choisir selon le texte. L’usage est de 0,01 sur un long entraînement ; nous prenons 0,1 pour
# voir son effet en quelques pas. Et le routeur calcule en fp32, même dans un modèle en bf16. Voici pourquoi : trois
# logits distincts, puis les mêmes arrondis en bf16.

# %% [markdown] lang="en"
# Two remarks. The weight of this loss is a compromise, too: too small, and it balances nothing; too large, and the
# router no longer chooses by the text. The custom is 0.01 over a long training; we take 0.1 to see its effect within a
# few steps. And the router computes in fp32, even in a bf16 model. Here is why: three different logits, then the same
# rounded to bf16.

# %% name="rounded-logits"
logits = torch.tensor([40.1, 40.0, 39.9])
print([round(p, 3) for p in logits.softmax(-1).tolist()])
print([round(p, 3) for p in logits.bfloat16().float().softmax(-1).tolist()])

# %% [markdown] lang="fr"
# Plus les logits sont grands, plus l’arrondi est grossier : près de 40, bf16 ne distingue que des quarts. La **z-loss**
# (Zoph et al., 2022), moyenne de (log Σ exp(logit))², les retient près de zéro ; ici, c’est le champ `z_loss`.
#
# ## 4. Une porte à deux niveaux
#
# Avec des milliers d’experts, répartis entre des nœuds, une porte à un seul niveau a deux défauts : son softmax est
# long, et les k experts d’un token peuvent se trouver sur k nœuds. Une porte **à deux niveaux** (Shazeer et al., 2017)
# choisit d’abord un groupe, un nœud par exemple, puis des experts dans ce groupe.
#
# ### Exercice 5 — la porte à deux niveaux
#
# `group_logits` (tokens, groupes) ; `expert_logits` (tokens, experts), où les experts d’un groupe se suivent. Pour
# chaque token, prenez le groupe le plus probable, puis, parmi les experts de ce groupe **seulement**, ce que choisit la
# porte de l’exercice 1. Le poids est le produit : probabilité du groupe × poids dans le groupe. Renvoyez les poids et
# les numéros des experts (dans l’ensemble des experts), de forme (tokens, k).

# %% [markdown] lang="en"
# The larger the logits, the coarser the rounding: near 40 bf16 tells only quarters apart. The **z-loss** (Zoph et al.,
# 2022), the mean of (log Σ exp(logit))², holds them near zero; here, it is the field `z_loss`.
#
# ## 4. A gate of two levels
#
# With thousands of experts, divided among nodes, the flat gate has two faults: its softmax is long, and the k
# experts of a token may lie on k nodes. A gate **of two levels** (Shazeer et al., 2017) first chooses a group, such as
# a node, then experts within that group.
#
# ### Exercise 5 — the gate of two levels
#
# `group_logits` (tokens, groups); `expert_logits` (tokens, experts), where the experts of a group follow one another.
# For each token take the most probable group, then, among the experts of that group **only**, what the gate of exercise
# 1 chooses. The weight is the product: probability of the group × weight within the group. Return the weights and the
# numbers of the experts (among all of them), of shape (tokens, k).


# %% name="two-level-gate"
def choose_in_group(group_logits, expert_logits, k):
    tokens, groups = group_logits.shape
    ### BEGIN SOLUTION
    probability, group = group_logits.softmax(-1).max(-1, keepdim=True)
    inside = expert_logits.unflatten(1, (groups, -1))[torch.arange(tokens), group[:, 0]]
    weights, chosen = choose(inside, k)
    return probability * weights, group * inside.shape[1] + chosen
    ### END SOLUTION


lab.check("two-level-gate", choose_in_group)

# %%
# lab.hint("two-level-gate")

# %% [markdown] lang="fr"
# ## 5. Des experts sur d’autres rangs
#
# Les experts sont l’essentiel des poids, et chacun ne voit que ses tokens : répartissons-les. Avec l’**Expert
# Parallelism** (`ep`), chacun des n rangs garde E / n experts, et tout le reste du modèle. Chaque rang lit ses propres
# données, comme en *Data Parallelism*, et sa porte remplit des places pour **tous** les experts, où qu’ils soient. Un
# *all-to-all* apporte à chaque rang ce qui est destiné à ses experts ; un second ramène les résultats.

# %% [markdown] lang="en"
# ## 5. Experts on other ranks
#
# Experts are most of the weights, and each sees its own tokens only: let us divide them. With **expert parallelism**
# (`ep`), each of n ranks keeps E / n experts, and all the rest of the model. Each rank reads its own data, as in
# data parallelism, and its gate fills places for **all** experts, wherever they are. An all-to-all brings to each rank
# what is meant for its experts; a second one brings the results back.

# %% name="journey" tags=["nbval-ignore-output"]
figures.journey()

# %% [markdown] lang="fr"
# ### Exercice 6 — l’*all-to-all* à la main
#
# `buffer` (experts, capacité, largeur) contient les tokens de **ce rang**, pour tous les experts ; ceux du rang r
# occupent les lignes r·E/n et suivantes. `own_experts(t)` attend (experts de ce rang, n × capacité, largeur) et rend la
# même forme. Renvoyez ce que chaque expert, où qu’il soit, a fait des tokens de ce rang : même forme que `buffer`.
#
# - `dist.all_to_all_single(reçu, envoyé)` coupe `envoyé` en n morceaux égaux selon la première dimension, et envoie le
#   morceau i au rang i ; dans `reçu`, le morceau i vient du rang i ;
# - le tenseur envoyé doit être contigu (`.contiguous()`), le tenseur reçu déjà alloué (`torch.empty_like`).

# %% [markdown] lang="en"
# ### Exercise 6 — the all-to-all by hand
#
# `buffer` (experts, capacity, width) holds the tokens of **this rank**, for all experts; those of rank r take the rows
# from r·E/n on. `own_experts(t)` takes (this rank's experts, n × capacity, width) and gives the same shape. Return what
# each expert, wherever it is, has made of this rank's tokens: the same shape as `buffer`.
#
# - `dist.all_to_all_single(received, sent)` cuts `sent` into n equal pieces along the first dimension, and sends piece
#   i to rank i; in `received`, piece i comes from rank i;
# - the tensor that is sent must be contiguous (`.contiguous()`), the one received allocated already
#   (`torch.empty_like`).


# %% name="exchange"
def through_experts(buffer, own_experts):
    size = dist.get_world_size()
    experts, capacity, width = buffer.shape
    own = experts // size
    arrived, back = torch.empty_like(buffer), torch.empty_like(buffer)
    ### BEGIN SOLUTION
    dist.all_to_all_single(arrived, buffer)
    rows = arrived.view(size, own, capacity, width).transpose(0, 1).reshape(own, size * capacity, width)
    made = own_experts(rows).view(own, size, capacity, width).transpose(0, 1)
    dist.all_to_all_single(back, made.contiguous().view_as(buffer))
    return back
    ### END SOLUTION


lab.check("exchange", through_experts)

# %%
# lab.hint("exchange")

# %% [markdown] lang="fr"
# Et la passe arrière ? Un *all-to-all* ne fait que déplacer des lignes : le gradient de l’aller est le retour, et
# inversement ([exchange.py](../../dlojz/models/experts/exchange.py)). Quatre *all-to-all* par couche, donc. Les
# gradients reviennent ainsi d’eux-mêmes aux experts, de tous les rangs du groupe ; c’est là que se cache le piège.
#
# Prenons quatre rangs, huit experts et `ep=2`. Les rangs 0 et 1 se partagent les experts, les rangs 2 et 3 aussi :
# chaque expert existe en deux exemplaires, sur les rangs 0 et 2, ou 1 et 3. Chaque rang dit quels experts il détient
# (`experts`), avec qui il échange (`neighbours`), et qui a les mêmes experts que lui (`replicas`). La première fois, il
# faut quelques secondes pour démarrer les rangs.

# %% [markdown] lang="en"
# And backward? An all-to-all only moves rows: the gradient of the way there is the way back, and the other way round
# ([exchange.py](../../dlojz/models/experts/exchange.py)). So there are four all-to-all per layer. Gradients thus return
# to the experts by themselves, from all ranks of the group; and there lies the trap.
#
# Take four ranks, eight experts and `ep=2`. Ranks 0 and 1 divide the experts, and so do ranks 2 and 3: each expert
# exists twice, on ranks 0 and 2, or 1 and 3. Each rank tells which experts it holds (`experts`), with whom it exchanges
# (`neighbours`), and who has the same experts (`replicas`). The first time, starting the ranks takes a few seconds.

# %% name="who-holds-what" tags=["nbval-ignore-output"]
# %%ranks 4
ep, held = 2, 8 // 2
experts = list(range(rank % ep * held, (rank % ep + 1) * held))
neighbours = list(range(rank - rank % ep, rank - rank % ep + ep))
replicas = list(range(rank % ep, world_size, ep))
print(f"{experts=}, {neighbours=}, {replicas=}")

# %% [markdown] lang="fr"
# La perte d’un rang est la moyenne sur **ses** tokens ; celle que l’on veut minimiser, la moyenne sur les quatre rangs.
#
# ### Exercice 7 — les gradients des experts
#
# Après la passe arrière, `shared` est la liste des gradients des paramètres communs à tous les rangs (attention,
# normalisations, routeurs), `own` celle des gradients des experts de ce rang ; `replicas` est le groupe des rangs qui
# ont les mêmes experts que lui. Faites-en, **en place**, les gradients de la perte moyenne sur tous les rangs.
#
# `dist.all_reduce(t)` additionne sur tous les rangs, `dist.all_reduce(t, group=replicas)` sur ceux du groupe ;
# `dist.get_world_size()` est le nombre de tous les rangs, `dist.get_world_size(replicas)` celui du groupe.

# %% [markdown] lang="en"
# The loss of a rank is the mean over **its** tokens; the one to descend, the mean over the four ranks.
#
# ### Exercise 7 — the gradients of the experts
#
# After backward, `shared` is the list of the gradients of what all ranks have (attention, norms, routers), `own` that
# of the gradients of this rank's experts; `replicas` is the group of the ranks that have the same experts. Turn them,
# **in place**, into the gradients of the loss averaged over all ranks.
#
# `dist.all_reduce(t)` adds up over all ranks, `dist.all_reduce(t, group=replicas)` over those of the group;
# `dist.get_world_size()` is the number of all ranks, `dist.get_world_size(replicas)` that of the group.


# %% name="expert-gradients"
def average_gradients(shared, own, replicas):
    ### BEGIN SOLUTION
    for gradient in shared:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    for gradient in own:
        dist.all_reduce(gradient, group=replicas)
        gradient.div_(dist.get_world_size())
    ### END SOLUTION


lab.check("expert-gradients", average_gradients)

# %%
# lab.hint("expert-gradients")

# %% [markdown] lang="fr"
# Diviser les gradients des experts par le nombre de leurs répliques est l’erreur classique : leurs gradients sont alors
# `ep` fois trop grands, et aucun message ne le signale. En SGD, c’est un taux d’apprentissage `ep` fois trop grand ;
# Adam, qui divise par la taille des gradients, fait presque les mêmes pas ; mais si l’on écrête la norme de tous les
# gradients ensemble, ceux des autres couches en sont réduits d’autant.
#
# **La parité.** La même couche de huit experts, les mêmes données, avec `ep` = 1, 2 puis 4 sur quatre rangs, et vos
# gradients. Chaque rang compare sa sortie et ses gradients à ceux de `ep=1` ; `held` est le nombre d’experts qu’il
# détient.

# %% [markdown] lang="en"
# To divide the gradients of experts by the number of their replicas is the classic mistake: their gradients are then
# `ep` times too large, and no error tells. With SGD that is a learning rate `ep` times too large; Adam, which divides
# by the size of the gradients, takes nearly the same steps; but where the norm of all gradients together is clipped,
# those of the other layers are cut down as well.
#
# **Parity.** The same layer of eight experts, the same data, with `ep` = 1, 2 and then 4 on four ranks, and your
# gradients. Each rank compares its output and its gradients with those of `ep=1`; `held` is the number of experts that
# it holds.

# %% name="parity"
# %%ranks --with average_gradients
from dlojz.models.experts import Routing
from dlojz.models.experts.layer import MixtureOfExperts, shard_experts


def outcome(ep):
    torch.manual_seed(0)  # the same weights on every rank // mêmes poids sur tous les rangs
    model = torch.nn.Sequential(MixtureOfExperts(16, 32, Routing(experts=8, top_k=2)))
    neighbours = [dist.new_group(list(range(first, first + ep))) for first in range(0, world_size, ep)]
    copies = [dist.new_group(list(range(place, world_size, ep))) for place in range(ep)]
    shard_experts(model, rank % ep, ep, neighbours[rank // ep])
    torch.manual_seed(1 + rank)  # its own tokens // ses propres tokens
    y = model(torch.randn(4, 8, 16))
    (y**2).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    own = [gradient for name, gradient in gradients.items() if ".experts." in name]
    shared = [gradient for name, gradient in gradients.items() if ".experts." not in name]
    average_gradients(shared, own, copies[rank % ep])
    return y.detach(), shared, own


y, shared, own = outcome(1)
for ep in (2, 4):
    held = 8 // ep
    whole = [gradient[rank % ep * held :][:held] for gradient in own]
    found = outcome(ep)
    same_y = torch.allclose(found[0], y, atol=1e-6)
    pairs = zip([*found[1], *found[2]], [*shared, *whole], strict=True)
    same_gradients = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    print(f"{ep=}, {held=}, {same_y=}, {same_gradients=}")

# %% [markdown] lang="fr"
# ## 6. Un modèle entier
#
# ### Exercice 8 — les octets de l’*all-to-all*
#
# Combien d’octets chaque rang **envoie**-t-il aux autres, pour un mélange et un micro-batch, passes avant et arrière ?
# `tokens` est le nombre de tokens de ce rang, `k` le nombre de choix, `factor` le facteur de capacité, `ranks` le
# nombre de rangs entre lesquels les experts sont répartis, `number_bytes` la taille d’un nombre.

# %% [markdown] lang="en"
# ## 6. A whole model
#
# ### Exercise 8 — the bytes of the all-to-all
#
# How many bytes does each rank **send** to the others, for one mixture and one micro-batch, forward and backward?
# `tokens` is the number of this rank's tokens, `k` the number of choices, `factor` the capacity factor, `ranks` the
# number of ranks among which the experts are divided, `number_bytes` the size of a number.


# %% name="exchange-bytes"
def exchange_bytes(tokens, width, experts, k, factor, ranks, number_bytes):
    ### BEGIN SOLUTION
    capacity = math.ceil(factor * k * tokens / experts)
    buffer = experts * capacity * width * number_bytes
    return 4 * buffer * (ranks - 1) / ranks
    ### END SOLUTION


lab.check("exchange-bytes", exchange_bytes)

# %%
# lab.hint("exchange-bytes")

# %% [markdown] lang="fr"
# Entraînons `moe_tiny` sur deux rangs : d’abord les experts entiers partout, puis répartis (`ep=2`). Largeur 128, deux
# mélanges de 8 experts, k = 1, facteur 1,25 ; chaque rang lit 4 séquences de 128 octets, en fp32. **Vos prédictions** :
#
# - combien d’octets chaque rang envoie-t-il par pas en *all-to-all* ?
# - combien d’octets de poids garde-t-il ? Un expert se compose de deux matrices, 128 × 512 et 512 × 128, et de leurs
#   biais, 512 et 128.

# %% [markdown] lang="en"
# Let us train `moe_tiny` on two ranks: first with whole experts everywhere, then with experts divided (`ep=2`).
# Width 128, two mixtures of 8 experts, k = 1, factor 1.25; each rank reads 4 sequences of 128 bytes, in fp32. **Your
# predictions**:
#
# - how many bytes does each rank send per step by all-to-all?
# - how many bytes of weights does it keep? An expert is made of two matrices, 128 × 512 and 512 × 128, and of their
#   biases, 512 and 128.

# %% name="predict-exchange" stub="value"
lab.predict(
    "exchange-sent",
    ### BEGIN SOLUTION
    2 * 4 * 8 * math.ceil(1.25 * 512 / 8) * 128 * 4 / 2,
    ### END SOLUTION
)

# %% name="predict-expert-weights" stub="value"
parameters = models.describe("moe_tiny").parameters
lab.predict(
    "expert-weights",
    ### BEGIN SOLUTION
    4 * (parameters - 2 * 4 * (2 * 128 * 512 + 512 + 128)),
    ### END SOLUTION
)

# %% name="run-experts" tags=["nbval-ignore-output"]
config = dlojz.RunConfig.of(model="moe_tiny", engine="by_hand", dp=2, micro_batch=4, steps=4)
everywhere = dlojz.run(config)
shared_out = dlojz.run(config, ep=2)

# %% name="reveal-exchange"
footprint = shared_out.record.footprint()
lab.reveal("exchange-sent", sum(one.sent_bytes for one in footprint.communication if one.group == "ep"))

# %% name="reveal-expert-weights"
lab.reveal("expert-weights", footprint.memory.weights_bytes)

# %% [markdown] lang="fr"
# DeepSpeed a son propre mélange d’experts. Le même modèle, avec les mêmes poids et sa couche `MoE` à la place de la
# nôtre :

# %% [markdown] lang="en"
# DeepSpeed has its own mixture of experts. The same model, with the same weights and its layer `MoE` in the place
# of ours:

# %% name="run-deepspeed" tags=["nbval-ignore-output"]
deepspeed_run = dlojz.run(config, engine="deepspeed", ep=2)

# %% [markdown] lang="fr"
# Dans la figure, pour le rang 0 : en teinte claire, ce qui était prédit ; au-dessous, ce qui est mesuré. À gauche la
# mémoire, à droite ce qu’il envoie par pas.

# %% [markdown] lang="en"
# In the figure, for rank 0: in pale what was predicted, below it what is measured. On the left memory, on the right
# what it sends per step.

# %% name="side-by-side" tags=["nbval-ignore-output"]
figures.side_by_side([everywhere, shared_out, deepspeed_run])

# %% name="counted"
tensor_run_figures.counted([shared_out, deepspeed_run], group="ep")

# %% [markdown] lang="fr"
# **Expliquez.** Répondez d’abord, puis laissez répondre la cellule. Les octets prédits sont-ils ceux qui ont été
# comptés ? Les pertes sont-elles les mêmes, à 10⁻⁶ près, avec les experts partout et répartis ? Et avec DeepSpeed ? À
# 10⁻² près ?

# %% [markdown] lang="en"
# **Explain.** Answer first, then let the cell answer. Are the bytes predicted those that were counted? Are the losses
# the same, to 10⁻⁶, with experts everywhere and divided? And with DeepSpeed? To 10⁻²?

# %% name="experts-seen"
print(dlojz.compare([shared_out, deepspeed_run]).exact)


def apart(run):
    return max(abs(a - b) for a, b in zip(everywhere.losses, run.losses, strict=True))


print(apart(shared_out) < 1e-6, apart(deepspeed_run) < 1e-6, apart(deepspeed_run) < 1e-2)

# %% [markdown] lang="fr"
# Avec `ep`, rien ne change au calcul : la porte d’un rang ne dépend que de ses tokens. DeepSpeed donne presque les
# mêmes pertes, mais pas tout à fait : quand un expert est plein, il n’abandonne pas les mêmes tokens que nous
# ([expert_engines.py](../../dlojz/train/engines/expert_engines.py) en dresse la liste). Sans token abandonné, les deux
# s’accordent à l’arrondi près.
#
# Remarquez aussi la colonne des gradients. Répartis, les experts ne sont plus répliqués : leurs gradients ne voyagent
# plus. Ici, l’*all-to-all* coûte même moins que l’*all-reduce* qu’il remplace. Mais il est difficile à recouvrir : la
# couche attend. Pour une couche de Mixtral, 4 096 tokens par GPU, 8 GPU qui soutiennent 200 TFLOP/s en bf16, selon vos
# octets :

# %% [markdown] lang="en"
# With `ep` nothing changes in the computation: the gate of a rank depends on its own tokens only. DeepSpeed gives
# nearly the same losses, but not quite: when an expert is full, it does not drop the same tokens as we do
# ([expert_engines.py](../../dlojz/train/engines/expert_engines.py) lists the differences). Where no token is dropped,
# the two agree up to rounding.
#
# Note the gradients, too. Divided, experts are no longer replicated: their gradients travel no more. Here the
# all-to-all even costs less than the all-reduce that it replaces. But it is hard to hide: the layer waits. For a layer
# of Mixtral, 4,096 tokens per GPU, 8 GPUs that sustain 200 TFLOP/s in bf16, by your bytes:

# %% name="over-links"
figures.over_links(exchange_bytes)

# %% [markdown] lang="fr"
# Dans le nœud, presque rien ; par le réseau, un cinquième du temps des experts, et davantage encore avec des experts
# plus étroits. C’est la même leçon qu’au TP 06, et la raison de la porte à deux niveaux.
#
# ## 7. Un curriculum sur la longueur
#
# Changeons de façon d’économiser. Au début d’un entraînement, un modèle apprend des régularités courtes : pourquoi lui
# donner de longues séquences ? De plus, avec de grands batches et un taux d’apprentissage élevé, les premiers pas sont
# les plus instables. Li et al. (2021) commencent donc par des séquences **tronquées**, toutes à la même longueur, qui
# croît avec les pas selon une **fonction de cadence** (*pacing function*) :
#
# $$\text{longueur}_t = \text{début} + (\text{fin} - \text{début}) \times \min\left(\frac{t}{T}, 1\right)^{1/d}$$
#
# Avec d = 1, la croissance est linéaire ; avec d = 2, rapide d’abord.
#
# ### Exercice 9 — la fonction de cadence
#
# Renvoyez la longueur au pas `t`, compté à partir de 1 : `start`, `end`, `steps` (T), `degree` (d). La longueur est un
# entier, arrondi **vers le bas** à un multiple de `multiple`. (`start` et `end` en sont eux-mêmes des multiples.)

# %% [markdown] lang="en"
# Within the node, next to nothing; over the network, a fifth of the time of the experts, and more with narrower
# experts. That is the same lesson as in lab 06, and the reason for the gate of two levels.
#
# ## 7. A curriculum on length
#
# Let us save in another way. At the beginning of a training a model learns short regularities: why give it long
# sequences? Moreover, with large batches and a high learning rate, the first steps are the least stable. So Li et al.
# (2021) begin with **truncated** sequences, all of the same length, which grows with the steps by a **pacing
# function**:
#
# $$\text{length}_t = \text{start} + (\text{end} - \text{start}) \times \min\left(\frac{t}{T}, 1\right)^{1/d}$$
#
# With d = 1 the growth is linear; with d = 2, fast at first.
#
# ### Exercise 9 — the pacing function
#
# Return the length at step `t`, counted from 1: `start`, `end`, `steps` (T), `degree` (d). The length is a whole
# number, rounded **down** to a multiple of `multiple`. (`start` and `end` are themselves multiples of it.)


# %% name="pacing"
def pace(t, start, end, steps, degree, multiple):
    ### BEGIN SOLUTION
    share = min(t / steps, 1) ** (1 / degree)
    length = math.floor(start + (end - start) * share)
    return length - length % multiple
    ### END SOLUTION


lab.check("pacing", pace)

# %%
# lab.hint("pacing")

# %% [markdown] lang="fr"
# DeepSpeed a la même fonction, dans son `CurriculumScheduler`. Sur un rang, la sienne et la vôtre, pas après pas :

# %% [markdown] lang="en"
# DeepSpeed has the same function, in its `CurriculumScheduler`. On one rank, its own and yours, step by step:

# %% name="deepspeed-pacing" tags=["nbval-ignore-output"]
# %%ranks --with pace
if rank == 0:
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    for degree in (1, 2):
        settings = {"total_curriculum_step": 37, "difficulty_step": 8, "root_degree": degree}
        asked = {"curriculum_type": "seqlen", "min_difficulty": 16, "max_difficulty": 128}
        scheduler = CurriculumScheduler({**asked, "schedule_type": "fixed_root", "schedule_config": settings})
        theirs = [scheduler.get_difficulty(t) for t in range(1, 50)]
        print(degree, theirs[::6], theirs == [pace(t, 16, 128, 37, degree, 8) for t in range(1, 50)])

# %% [markdown] lang="fr"
# Entraînons `gpt_tiny` sur du vrai texte : d’un côté 40 pas de 4 échantillons de 128 tokens, de l’autre des
# échantillons qui passent de 16 à 128 tokens en 40 pas. Pour être équitable, le second continue ensuite jusqu’à avoir
# lu **autant de tokens** que le premier. Le taux d’apprentissage, 3 × 10⁻³, est volontairement élevé.

# %% [markdown] lang="en"
# Let us train `gpt_tiny` on real text: on one side 40 steps of 4 samples of 128 tokens, on the other samples that grow
# from 16 to 128 tokens within 40 steps. To be fair, the second then goes on until it has read **as many tokens** as the
# first. The learning rate, 3 × 10⁻³, is high on purpose.

# %% name="curriculum-configs" tags=["nbval-ignore-output"]
from dlojz.config.schedules import tokens_at

whole = dlojz.RunConfig.of(model="gpt_tiny", micro_batch=4, learning_rate=3e-3, steps=40, seed=1)
growing = dlojz.RunConfig.of(
    model="gpt_tiny", micro_batch=4, learning_rate=3e-3, steps=59, seed=1,
    curriculum="linear", curriculum_start=16, curriculum_steps=40,
)  # fmt: skip
figures.lengths({"without": whole, "linear": growing})

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien de tokens les 40 pas de croissance lisent-ils en tout, à peu près ? (Sans curriculum :
# 40 × 4 × 128 = 20 480.)

# %% [markdown] lang="en"
# **Your prediction.** How many tokens do the 40 growing steps read in all, more or less? (Without curriculum:
# 40 × 4 × 128 = 20,480.)

# %% name="predict-tokens" stub="value"
lab.predict(
    "curriculum-tokens",
    ### BEGIN SOLUTION
    40 * 4 * (16 + 128) / 2,
    ### END SOLUTION
)

# %% name="reveal-tokens"
lab.reveal("curriculum-tokens", sum(tokens_at(growing, step) for step in range(40)))

# %% [markdown] lang="fr"
# Un peu plus de la moitié. `train_trial` ([trials.py](../../dlojz/train/trials.py)) fait les deux entraînements.
# **Avant de regarder** : après autant de tokens, quelle perte sera la plus basse ? Et après autant de **secondes** ?

# %% [markdown] lang="en"
# A little more than half. `train_trial` ([trials.py](../../dlojz/train/trials.py)) makes both trainings. **Before you
# look**: after as many tokens, which loss will be lower? And after as many **seconds**?

# %% name="train-curriculum" tags=["nbval-ignore-output"]
from dlojz.train.trials import train_trial

budget = 40 * 4 * 128
trials = {
    name: train_trial(one, tokens=budget, evaluations=12) for name, one in (("without", whole), ("linear", growing))
}
figures.trials(trials)

# %% name="trials-table" tags=["nbval-ignore-output"]
figures.trials_table(trials)

# %% [markdown] lang="fr"
# Les deux pertes sont mesurées sur le même texte, jamais vu, et sur des échantillons **entiers**. √v est la racine du
# second moment d’Adam, donc la taille récente des gradients : Li et al. relient ses sauts aux pics de la perte d’un pas
# (une croix : elle dépasse de 20 % la plus basse jusque-là). La dernière vignette compare ce que coûte un pas court :
# en FLOPs, comme prédit, et en secondes, comme mesuré.
#
# **Expliquez.** À tokens égaux, le curriculum fait-il plus de pas ? À la première mesure, est-il en avance ? Et à la
# dernière ?

# %% [markdown] lang="en"
# Both losses are measured on the same text, never seen, and on **whole** samples. √v is the root of Adam's second
# moment, so the recent size of gradients: Li et al. relate its jumps to the spikes of a step's loss (a cross: 20% above
# the lowest so far). The last panel compares what a short step costs: in FLOPs, as predicted, and in seconds, as
# measured.
#
# **Explain.** For as many tokens, does the curriculum make more steps? At the first measurement, is it ahead? And at
# the last?

# %% name="more-steps"
without, linear = trials["without"], trials["linear"]
print(len(without.losses), len(linear.losses))

# %% name="curriculum-seen" tags=["nbval-ignore-output"]
for number in (1, -1):
    print(linear.held_out[number].loss < without.held_out[number].loss)

# %% [markdown] lang="fr"
# Autant de tokens, mais en plus de pas, donc plus de mises à jour : le curriculum prend de l’avance dès le début. Sans
# lui, à un taux d’apprentissage aussi élevé, la perte peut s’envoler un moment avant de redescendre. √v, en revanche,
# ne montre pas ici ce que dit l’article : son maximum tient à quelques poids, et la perte d’un pas court, moyenne de
# peu de tokens, est bruitée, d’où ses croix.
#
# Ces pas ont un prix. Un pas huit fois plus court coûte neuf fois moins de FLOPs (grâce à l’attention) ; il ne dure pas
# neuf fois moins, car la mise à jour des poids prend toujours autant de temps, et un processeur mal rempli calcule
# moins bien. À secondes égales, l’avance est donc plus petite que les FLOPs ne le laisseraient prévoir.
#
# Ne concluez pas trop vite : quarante pas d’un modèle minuscule, une seule graine. Avec `seed=` et `learning_rate=`,
# vous verrez l’avance du début demeurer, mais l’écart final changer de taille, voire de sens. L’article annonce, pour
# GPT-2, jusqu’à 2,2 fois moins de tokens et 3,7 fois moins de temps à qualité égale, parce que la stabilité gagnée
# permet un batch 8 fois plus grand et un taux d’apprentissage 4 fois plus élevé. Pour en juger, prenez la médiane de
# plusieurs graines, sur plus de pas :
#
# ```bash
# python benchmarks/curriculum.py --help
# ```

# %% [markdown] lang="en"
# As many tokens, but in more steps, so more updates: the curriculum is ahead from the beginning. Without it, at so high
# a learning rate, the loss may take off for a while before it comes down again. √v, however, does not tell here what
# the paper says: its largest value is that of a few weights, and the loss of a short step, the mean of few tokens, is
# noisy, hence its crosses.
#
# These steps have to be paid for. A step an eighth as long costs a ninth of the FLOPs (thanks to attention); it does
# not take a ninth of the time, as the update of the weights takes as long as ever, and a processor that is badly filled
# computes less well. After as many seconds, the lead is therefore smaller than the FLOPs would suggest.
#
# Do not conclude too fast: forty steps of a tiny model, one single seed. With `seed=` and `learning_rate=` you will see
# the early lead remain, and the last gap change its size, even its sign. The paper claims, for GPT-2, up to 2.2 times
# fewer tokens and 3.7 times less time for the same quality, because the stability gained allows a batch 8 times as
# large and a learning rate 4 times as high. To judge for yourself, take the median of several seeds, over more steps:
#
# ```bash
# python benchmarks/curriculum.py --help
# ```

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Mettez un mélange à la place de chaque MLP, dont les experts sont répartis entre les rangs (`--experts 4`). La porte
# et les experts sont donnés ; vous écrivez l’all-to-all et sa passe arrière, et vous tenez les experts hors de DDP.
# Continuez dans votre `train.py`, ou laissez `dlojz labs script 10 un_autre_dossier` écrire ce par quoi ce TP commence.
# Jugez-le par `dlojz labs judge 10 my_training/train.py`.
#
# À regarder : les pertes d’un seul processus, alors que chaque rang ne détient que la moitié des experts. Puis mesurez
# : combien de samples/s l’all-to-all coûte-t-il ?
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# dist.all_to_all_single(arrivals, counts)
# sent, received = counts.sum(1).tolist(), arrivals.sum(1).tolist()
# arrived = Exchange.apply(tokens[order], sent, received)
# back = Exchange.apply(done, received, sent)
# return Exchange.apply(gradient, context.received, context.sent), None, None
# parameter.register_hook(lambda gradient: gradient / replicas)
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Put a mixture in the place of each MLP, whose experts are shared among the ranks (`--experts 4`). The gate and the
# experts are given; you write the all-to-all with its backward pass, and keep the experts out of DDP. Go on in your
# `train.py`, or let `dlojz labs script 10 another_folder` write what this lab begins with. Judge it by
# `dlojz labs judge 10 my_training/train.py`.
#
# What to look for: the losses of one process, although each rank holds half of the experts. Then measure: how many
# samples/s does the all-to-all cost?
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# dist.all_to_all_single(arrivals, counts)
# sent, received = counts.sum(1).tolist(), arrivals.sum(1).tolist()
# arrived = Exchange.apply(tokens[order], sent, received)
# back = Exchange.apply(done, received, sent)
# return Exchange.apply(gradient, context.received, context.sent), None, None
# parameter.register_hook(lambda gradient: gradient / replicas)
# ```
#
# </details>


# %% [markdown] lang="fr"
# ## Bilan
#
# | | mélange d’experts | curriculum de longueur |
# |--|--|--|
# | économise | le calcul par token | les tokens par pas, au début |
# | coûte | de la mémoire (E fois le MLP), quatre *all-to-all* par couche | des pas plus nombreux, moins efficaces |
# | se répartit | les experts, par `ep` ; le reste est répliqué | – |
# | peut mal tourner | le routeur s’effondre : perte d’équilibrage | départ trop court, croissance trop lente |
# | à surveiller | la charge de chaque expert, les tokens abandonnés | les pics de la perte, √v |
#
# | avec `ep` sur n rangs | chaque rang garde | gradients |
# |--|--|--|
# | attention, normalisations, routeurs | tout | somme sur tous les rangs, divisée par leur nombre |
# | experts | E / n par couche | somme sur les répliques, divisée par le nombre de **tous** les rangs |

# %% [markdown] lang="en"
# ## Summary
#
# | | mixture of experts | curriculum on length |
# |--|--|--|
# | saves | computation per token | tokens per step, at first |
# | costs | memory (E times the MLP), four all-to-all per layer | more steps, less efficient ones |
# | is divided | experts, by `ep`; the rest is replicated | – |
# | may go wrong | the router collapses: balance loss | too short a start, too slow a growth |
# | to be watched | the load of each expert, the tokens dropped | spikes of the loss, √v |
#
# | with `ep` over n ranks | each rank keeps | gradients |
# |--|--|--|
# | attention, norms, routers | everything | sum over all ranks, divided by their number |
# | experts | E / n per layer | sum over the replicas, divided by the number of **all** ranks |

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
