# %% [markdown] lang="fr"
# # TP 10 — Mélange d’experts et curriculum
#
# Jusqu’ici, chaque token passait par tous les poids du modèle. Un **mélange d’experts** (*Mixture of Experts*, MoE)
# remplace un MLP par plusieurs, les *experts*, et une **porte** (*gate*) envoie chaque token vers un ou deux d’entre
# eux : beaucoup de paramètres, peu de calcul. Cela se paie en communication, et demande un équilibre. Vous écrivez un
# tel mélange, puis vous répartissez ses experts entre des rangs.
#
# Un **curriculum** sur la longueur des séquences économise autrement : moins de tokens par pas, au début.
#
# À la fin, vous saurez :
#
# - écrire une porte, une capacité et une perte d’équilibrage, et reconnaître un routeur qui s’effondre ;
# - échanger les tokens entre les rangs par *all-to-all*, et moyenner les gradients des experts sans se tromper ;
# - prévoir octets, mémoire et secondes d’un mélange, puis les mesurer ;
# - écrire un curriculum, et dire ce qu’il fait gagner ou perdre.
#
# Comptez deux heures. Quatre rangs suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 10 — Mixture of experts and curriculum
#
# Until now every token went through all weights of the model. A **mixture of experts** (MoE) puts several MLPs, the
# *experts*, in the place of one, and a **gate** sends each token to one or two of them: many parameters, little
# computation. This costs communication, and it needs a balance. You write such a mixture, then you divide its experts
# among ranks.
#
# A **curriculum** on the length of sequences saves in another way: fewer tokens per step, at first.
#
# By the end you can:
#
# - write a gate, a capacity and a balance loss, and recognise a router that collapses;
# - exchange tokens among ranks by all-to-all, and average the gradients of experts without a mistake;
# - foresee bytes, memory and seconds of a mixture, then measure them;
# - write a curriculum, and tell what it gains or loses.
#
# Allow two hours. Four ranks are enough, without GPUs.

# %% name="setup"
import math
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dlojz
from dlojz import labs, models
from dlojz.base.language import decimal, percent, yes_no
from dlojz.data.datasets import ProseWindows
from dlojz.labs.lab06_tensor import figures as tensor_run_figures
from dlojz.labs.lab10_experts import figures
from dlojz.models.experts.layer import Experts

lab = labs.start("10")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. Beaucoup de paramètres, peu de calcul
#
# Mixtral 8x7B (Jiang et al., 2024) a 46,7 milliards de paramètres. Dans chacun de ses 32 blocs, le MLP existe en 8
# exemplaires, et chaque token en voit 2. Un expert a trois matrices de 4 096 × 14 336. Le reste sert à tous les tokens.
#
# **Votre prédiction.** Combien de paramètres un token rencontre-t-il ?

# %% [markdown] lang="en"
# ## 1. Many parameters, little computation
#
# Mixtral 8x7B (Jiang et al., 2024) has 46.7 billion parameters. In each of its 32 blocks the MLP exists 8 times, and
# each token sees 2 of them. An expert has three matrices of 4,096 × 14,336. The rest serves all tokens.
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
# Le calcul est celui d’un modèle de 13 milliards de paramètres, la mémoire celle d’un modèle de 47 milliards : on
# répartit donc les experts entre des rangs.
#
# ### Exercice 1 — la porte
#
# Le **routeur** est une couche linéaire : pour chaque token, un logit par expert. Le softmax en fait des probabilités,
# et le token va vers les `k` experts les plus probables. La sortie du mélange est la somme de leurs sorties, chacune
# multipliée par un **poids** :
#
# - pour k = 1 (*Switch Transformer*, Fedus et al., 2021), la probabilité de l’expert choisi ;
# - pour k ≥ 2 (*GShard*, Lepikhin et al., 2020), les probabilités des experts choisis, divisées par leur somme.
#
# `logits` est de forme (tokens, experts). Renvoyez les poids et les numéros des experts choisis, chacun de forme
# (tokens, k). `t.topk(k)` donne les `k` plus grandes valeurs selon la dernière dimension, dans l’ordre décroissant, et
# leurs indices.

# %% [markdown] lang="en"
# The computation is that of a model with 13 billion parameters, the memory that of a model with 47 billion: that is why
# the experts are divided among ranks.
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
# Le choix n’a pas de gradient : le routeur n’apprend que par les poids.
#
# ## 2. Chaque expert a sa capacité
#
# Un GPU préfère des tenseurs denses, de taille connue. On donne donc à chaque expert un nombre fixe de places, sa
# **capacité** : la part équitable des choix, multipliée par un **facteur de capacité**, arrondie vers le haut,
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
# choix, dans l’ordre des tokens, puis tous les seconds.

# %% [markdown] lang="en"
# The choice has no gradient: the router learns through the weights alone.
#
# ## 2. Each expert has its capacity
#
# A GPU likes dense tensors of a known size. So each expert is given a fixed number of places, its **capacity**: the
# fair share of the choices, times a **capacity factor**, rounded up,
#
# $$C = \left\lceil \text{factor} \times \frac{k \times \text{tokens}}{\text{experts}} \right\rceil$$
#
# A choice that finds no place is **dropped**: the residual connection alone carries the token to the next layer.
#
# ### Exercise 2 — at which place?
#
# `chosen` (tokens, k) holds the numbers of the experts, first choices in column 0. Return, in the same shape, the place
# of each choice with its expert, from 0; `-1` where it is dropped. All first choices are served first, in the order of
# the tokens, then all second ones.


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
everyone_to_0 = torch.zeros(256, 1, dtype=torch.long)
lab.reveal("dropped-share", (place(everyone_to_0, 8, 1.25) < 0).float().mean().item())

# %% [markdown] lang="fr"
# Trop petit, le facteur fait abandonner des tokens ; trop grand, il fait calculer et échanger des places vides. En
# tirets, la valeur usuelle, 1,25 :

# %% [markdown] lang="en"
# Too small a factor drops tokens; too large a one computes and exchanges empty places. Dashed, the usual value, 1.25:

# %% name="dropped-or-empty" tags=["nbval-ignore-output"]
figures.dropped_or_empty(choose, place)

# %% [markdown] lang="fr"
# Un routeur effondré doit être équilibré (section 3).
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
# A collapsed router has to be balanced (section 3).
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
# Le plus grand écart entre vos trois fonctions et la couche du paquet
# ([layer.py](../../dlojz/models/experts/layer.py)), sur les mêmes poids ; puis avec le mélange **dense**, sans aucune
# capacité :

# %% [markdown] lang="en"
# The largest difference between your three functions and the package's layer
# ([layer.py](../../dlojz/models/experts/layer.py)), on the same weights; then with the **dense** mixture, without any
# capacity:

# %% name="beside-package"
figures.beside_package(choose, place, mix)

# %% [markdown] lang="fr"
# Avec un facteur égal à experts / k, chaque expert a de la place pour tous : le mélange est le mélange dense.
#
# ### Combien de secondes ?
#
# Voici la couche entière, sur vos fonctions. `Experts` contient les huit MLP, calculés ensemble.

# %% [markdown] lang="en"
# With a factor of experts / k each expert has room for all: the mixture is the dense one.
#
# ### How many seconds?
#
# Here is the whole layer, on your functions. `Experts` holds the eight MLPs, computed together.


# %% name="layer"
class Mixture(torch.nn.Module):
    def __init__(self, width, experts=8, k=1, factor=1.25):
        super().__init__()
        self.k, self.factor = k, factor
        self.router = torch.nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, 4 * width, "gelu")

    def forward(self, x):
        tokens = x.flatten(0, -2)
        self.logits = self.router(tokens)
        experts = self.logits.shape[1]
        weights, self.chosen = choose(self.logits, self.k)
        places = place(self.chosen, experts, self.factor)
        self.dropped = (places < 0).float().mean().item()
        capacity = math.ceil(self.factor * self.chosen.numel() / experts)
        return mix(tokens, weights, self.chosen, places, self.experts, (experts, capacity)).view_as(x)


# %% [markdown] lang="fr"
# Mesurons les passes avant et arrière de 1 024 tokens, de largeur 256, à côté de deux MLP denses : l’un de la taille
# d’**un** expert, l’autre d’autant de poids que les huit. Le temps d’un MLP est proportionnel à ses FLOPs ; le mélange,
# lui, calcule des places, vides ou non. **Vos prédictions** : par combien le débit (tokens/s) est-il multiplié quand le
# mélange remplace le petit MLP ? Et le grand ?

# %% [markdown] lang="en"
# Let us time forward and backward of 1,024 tokens, of width 256, beside two dense MLPs: one of the size of **one**
# expert, the other with as many weights as all eight. The time of an MLP is proportional to its FLOPs; the mixture
# computes places, empty or not. **Your predictions**: by how much is the rate (tokens/s) multiplied when the mixture
# replaces the small MLP? And the large one?

# %% name="predict-rate-small" stub="value"
lab.predict(
    "rate-same-computation",
    ### BEGIN SOLUTION
    1 / 1.25,
    ### END SOLUTION
)

# %% name="predict-rate-large" stub="value"
lab.predict(
    "rate-same-weights",
    ### BEGIN SOLUTION
    8 / 1.25,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Les trois couches passent à tour de rôle ; on prend la médiane des rapports de chaque tour :

# %% [markdown] lang="en"
# The three layers take turns; the median of the ratios within a round is taken:


# %% name="time-layers" tags=["nbval-ignore-output"]
def dense(width, hidden):
    return torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, width))


def seconds(layer, x):
    start = time.perf_counter()
    layer(x).square().mean().backward()
    return time.perf_counter() - start


torch.manual_seed(0)
layers = {"mixture": Mixture(256), "small": dense(256, 4 * 256), "large": dense(256, 8 * 4 * 256)}
x = torch.randn(1024, 256)
rounds = [{name: seconds(layer, x) for name, layer in layers.items()} for _ in range(10)][2:]
for name, shown in zip(layers, ("mixture // mélange", "small // petite", "large // grande"), strict=True):
    print(shown, decimal(1024 / statistics.median(round_s[name] for round_s in rounds), 0), "tokens/s")

# %% name="reveal-rate-small" tags=["nbval-ignore-output"]
lab.reveal("rate-same-computation", statistics.median(round_s["small"] / round_s["mixture"] for round_s in rounds))

# %% name="reveal-rate-large" tags=["nbval-ignore-output"]
lab.reveal("rate-same-weights", statistics.median(round_s["large"] / round_s["mixture"] for round_s in rounds))

# %% [markdown] lang="fr"
# Attendez-vous à 0,5–0,85 et à 4,5–9 : le routage et huit petits produits au lieu d’un grand coûtent plus que leurs
# FLOPs. Un mélange a autant de poids que le grand MLP, à un débit bien plus proche de celui du petit.
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
# Expect 0.5–0.85 and 4.5–9: routing and eight small products in place of a large one cost more than their FLOPs. A
# mixture has as many weights as the large MLP, at a rate much closer to that of the small one.
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
# Elle vaut 1 quand choix et probabilités sont uniformes, et E quand un seul expert a tout. Mettons votre couche dans
# `moe_tiny`, un décodeur d’octets dont un bloc sur deux a huit experts, et entraînons-le sur du vrai texte, sans puis
# avec votre perte. **Avant de regarder** : sans elle, combien d’experts travaillent encore après vingt pas ?

# %% [markdown] lang="en"
# It is 1 when choices and probabilities are uniform, and E when one single expert has everything. Let us put your layer
# into `moe_tiny`, a decoder of bytes, every second block of which has eight experts, and train it on real text, without
# and with your loss. **Before you look**: without it, how many experts still work after twenty steps?


# %% name="train-mixture"
prose = ProseWindows(32)


def train(weight, steps=40):
    torch.manual_seed(3)
    model = models.build("moe_tiny", sequence_length=32)
    mixed = [block for block in model.blocks if getattr(block, "mixture", None)]
    for block in mixed:
        block.mixture = Mixture(128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loads, dropped = [], []
    for _ in range(steps):
        samples = [prose[index] for index in torch.randint(len(prose), (8,)).tolist()]
        inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss = loss + weight * sum(balance(block.mixture.logits, block.mixture.chosen) for block in mixed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loads.append(mixed[-1].mixture.chosen.flatten().bincount(minlength=8))
        dropped += [block.mixture.dropped for block in mixed]
    return loads, statistics.mean(dropped)


# %% name="train-loads" tags=["nbval-ignore-output"]
trained = {weight: train(weight) for weight in (0.0, 0.1)}
figures.loads({weight: loads for weight, (loads, _) in trained.items()})

# %% [markdown] lang="fr"
# Une ligne par expert, une colonne par pas ; en blanc, l’expert n’a rien reçu ; en orange, plus que sa capacité. Sans
# perte d’équilibrage, quelques experts prennent presque tout, et environ la moitié des tokens est abandonnée. Avec
# elle, les charges se rapprochent peu à peu : voyez ici en combien de pas. Part moyenne des tokens abandonnés :

# %% [markdown] lang="en"
# One row per expert, one column per step; in white, the expert has got nothing; in orange, more than its capacity.
# Without the balance loss a few experts take nearly everything, and about half of the tokens are dropped. With it, the
# loads come closer little by little: see here in how many steps. Mean share of the tokens dropped:

# %% name="loads-seen" tags=["nbval-ignore-output"]
for weight, (_, dropped) in trained.items():
    print("weight // poids", decimal(weight), percent(dropped, 0))

# %% name="balance-helps"
fewer = trained[0.1][1] < trained[0.0][1]
print("fewer dropped with the balance loss: // moins d’abandons avec la perte d’équilibrage :", yes_no(fewer))

# %% [markdown] lang="fr"
# Le poids de cette perte est un compromis : trop fort, il empêche le routeur de choisir selon le texte. L’usage est de
# 0,01 ; nous prenons 0,1 pour un effet en quelques pas. Et le routeur calcule en fp32, même dans un modèle en bf16 ;
# voici trois logits, puis les mêmes arrondis :

# %% [markdown] lang="en"
# The weight of this loss is a compromise: too large, and the router no longer chooses by the text. The custom is 0.01;
# we take 0.1 for an effect within a few steps. And the router computes in fp32, even in a bf16 model; here are three
# logits, then the same rounded:

# %% name="rounded-logits"
logits = torch.tensor([40.1, 40.0, 39.9])
print("fp32:", *(decimal(p, 3) for p in logits.softmax(-1).tolist()))
print("bf16:", *(decimal(p, 3) for p in logits.bfloat16().float().softmax(-1).tolist()))

# %% [markdown] lang="fr"
# Près de 40, bf16 ne distingue que des quarts. La **z-loss** (Zoph et al., 2022), moyenne de (log Σ exp(logit))²,
# retient les logits près de zéro.
#
# ## 4. Une porte à deux niveaux
#
# Avec des milliers d’experts, le softmax d’une porte est long, et les k experts d’un token peuvent se trouver sur k
# nœuds. Une porte **à deux niveaux** (Shazeer et al., 2017) choisit d’abord un groupe, un nœud par exemple, puis des
# experts dans ce groupe.
#
# ### Exercice 5 — la porte à deux niveaux
#
# `group_logits` (tokens, groupes) ; `expert_logits` (tokens, experts), où les experts d’un groupe se suivent. Pour
# chaque token, prenez le groupe le plus probable, puis, parmi les experts de ce groupe **seulement**, ce que choisit la
# porte de l’exercice 1. Le poids est le produit : probabilité du groupe × poids dans le groupe. Renvoyez les poids et
# les numéros des experts (dans l’ensemble des experts), de forme (tokens, k).

# %% [markdown] lang="en"
# Near 40 bf16 tells only quarters apart. The **z-loss** (Zoph et al., 2022), the mean of (log Σ exp(logit))², holds the
# logits near zero.
#
# ## 4. A gate of two levels
#
# With thousands of experts the softmax of a gate is long, and the k experts of a token may lie on k nodes. A gate **of
# two levels** (Shazeer et al., 2017) first chooses a group, such as a node, then experts within that group.
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
# Avec l’**Expert Parallelism** (`ep`), chacun des n rangs garde E / n experts, et tout le reste du modèle. Chaque rang
# lit ses propres données, comme en *Data Parallelism*, et sa porte remplit des places pour **tous** les experts, où
# qu’ils soient. Un *all-to-all* apporte à chaque rang ce qui est destiné à ses experts ; un second ramène les
# résultats.

# %% [markdown] lang="en"
# ## 5. Experts on other ranks
#
# With **expert parallelism** (`ep`), each of n ranks keeps E / n experts, and all the rest of the model. Each rank
# reads its own data, as in data parallelism, and its gate fills places for **all** experts, wherever they are. An
# all-to-all brings to each rank what is meant for its experts; a second one brings the results back.

# %% name="journey" tags=["nbval-ignore-output"]
figures.journey()

# %% [markdown] lang="fr"
# ### Exercice 6 — l’*all-to-all* à la main
#
# `buffer` (experts, capacité, largeur) contient les tokens de **ce rang**, pour tous les experts ; ceux du rang r
# occupent les lignes r·E/n et suivantes. `own_experts(t)` attend (experts de ce rang, n × capacité, largeur) et rend la
# même forme. Renvoyez ce que chaque expert a fait des tokens de ce rang : même forme que `buffer`.
#
# - `dist.all_to_all_single(reçu, envoyé)` coupe `envoyé` en n morceaux égaux selon la première dimension, et envoie le
#   morceau i au rang i ; dans `reçu`, le morceau i vient du rang i ;
# - le tenseur envoyé doit être contigu (`.contiguous()`), le tenseur reçu déjà alloué (`torch.empty_like`).

# %% [markdown] lang="en"
# ### Exercise 6 — the all-to-all by hand
#
# `buffer` (experts, capacity, width) holds the tokens of **this rank**, for all experts; those of rank r take the rows
# from r·E/n on. `own_experts(t)` takes (this rank's experts, n × capacity, width) and gives the same shape. Return what
# each expert has made of this rank's tokens: the same shape as `buffer`.
#
# - `dist.all_to_all_single(received, sent)` cuts `sent` into n equal pieces along the first dimension, and sends piece
#   i to rank i; in `received`, piece i comes from rank i;
# - the tensor that is sent must be contiguous (`.contiguous()`), the one received allocated already
#   (`torch.empty_like`).


# %% name="exchange"
def through_experts(buffer, own_experts):
    size = dist.get_world_size()
    experts, capacity, width = buffer.shape
    rank_experts = experts // size
    arrived, back = torch.empty_like(buffer), torch.empty_like(buffer)
    ### BEGIN SOLUTION
    dist.all_to_all_single(arrived, buffer)
    by_expert = arrived.view(size, rank_experts, capacity, width).transpose(0, 1)
    rows = by_expert.reshape(rank_experts, size * capacity, width)
    made = own_experts(rows).view(rank_experts, size, capacity, width).transpose(0, 1)
    dist.all_to_all_single(back, made.contiguous().view_as(buffer))
    return back
    ### END SOLUTION


lab.check("exchange", through_experts)

# %%
# lab.hint("exchange")

# %% [markdown] lang="fr"
# Et la passe arrière ? Un *all-to-all* ne fait que déplacer des lignes : le gradient de l’aller est le retour, et
# inversement ([exchange.py](../../dlojz/models/experts/exchange.py)). Quatre *all-to-all* par couche, donc. Les
# gradients reviennent ainsi aux experts, de tous les rangs du groupe ; là se cache le piège.
#
# Prenons quatre rangs, huit experts et `ep=2` : chaque expert existe en deux exemplaires.

# %% [markdown] lang="en"
# And backward? An all-to-all only moves rows: the gradient of the way there is the way back, and the other way round
# ([exchange.py](../../dlojz/models/experts/exchange.py)). So there are four all-to-all per layer. Gradients thus return
# to the experts from all ranks of the group; there lies the trap.
#
# Take four ranks, eight experts and `ep=2`: each expert exists twice.

# %% name="who-holds-what" tags=["nbval-ignore-output"]
# %%ranks 4
ep, rank_experts = 2, 8 // 2
experts = list(range(rank % ep * rank_experts, (rank % ep + 1) * rank_experts))
neighbours = list(range(rank - rank % ep, rank - rank % ep + ep))
replicas = list(range(rank % ep, world_size, ep))
print(f"{experts=}, {neighbours=}, {replicas=}")

# %% [markdown] lang="fr"
# La perte d’un rang est la moyenne sur **ses** tokens ; celle que l’on minimise, la moyenne sur les quatre rangs.
#
# ### Exercice 7 — les gradients des experts
#
# Après la passe arrière, `shared` est la liste des gradients des paramètres communs à tous les rangs (attention,
# normalisations, routeurs), `experts_gradients` celle des gradients des experts de ce rang ; `replicas` est le groupe
# des rangs qui ont les mêmes experts que lui. Faites-en, **en place**, les gradients de la perte moyenne sur tous les
# rangs.
#
# `dist.all_reduce(t)` additionne sur tous les rangs, `dist.all_reduce(t, group=replicas)` sur ceux du groupe ;
# `dist.get_world_size()` est le nombre de tous les rangs, `dist.get_world_size(replicas)` celui du groupe.

# %% [markdown] lang="en"
# The loss of a rank is the mean over **its** tokens; the loss to minimise is the mean over the four ranks.
#
# ### Exercise 7 — the gradients of the experts
#
# After backward, `shared` is the list of the gradients of what all ranks have (attention, norms, routers),
# `experts_gradients` that of the gradients of this rank's experts; `replicas` is the group of the ranks that have the
# same experts. Turn them, **in place**, into the gradients of the loss averaged over all ranks.
#
# `dist.all_reduce(t)` adds up over all ranks, `dist.all_reduce(t, group=replicas)` over those of the group;
# `dist.get_world_size()` is the number of all ranks, `dist.get_world_size(replicas)` that of the group.


# %% name="expert-gradients"
def average_gradients(shared, experts_gradients, replicas):
    ### BEGIN SOLUTION
    for gradient in shared:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    for gradient in experts_gradients:
        dist.all_reduce(gradient, group=replicas)
        gradient.div_(dist.get_world_size())
    ### END SOLUTION


lab.check("expert-gradients", average_gradients)

# %%
# lab.hint("expert-gradients")

# %% [markdown] lang="fr"
# Diviser les gradients des experts par le nombre de leurs répliques est l’erreur classique : ils sont alors `ep` fois
# trop grands, et aucun message ne le signale. Adam, qui divise par la taille des gradients, le cache presque.
#
# **La parité.** La même couche de huit experts, les mêmes données, avec `ep` = 2 puis 4, et vos gradients : chaque rang
# les compare, ainsi que sa sortie, à ceux de `ep=1` ; `rank_experts` est le nombre d’experts qu’il détient.

# %% [markdown] lang="en"
# To divide the gradients of experts by the number of their replicas is the classic mistake: they are then `ep` times
# too large, and no error message says so. Adam, which divides by the size of the gradients, nearly hides it.
#
# **Parity.** The same layer of eight experts, the same data, with `ep` = 2 and then 4, and your gradients: each rank
# compares them, and its output, with those of `ep=1`; `rank_experts` is the number of experts that it holds.

# %% name="parity"
# %%ranks --with average_gradients
from dlojz.models.experts import Routing
from dlojz.models.experts.layer import MixtureOfExperts, shard_experts


def outcome(ep):
    torch.manual_seed(0)  # the same weights on every rank // mêmes poids sur tous les rangs
    model = torch.nn.Sequential(MixtureOfExperts(16, 32, Routing(experts=8, top_k=2)))
    neighbours = [dist.new_group(list(range(first, first + ep))) for first in range(0, world_size, ep)]
    copies = [dist.new_group(list(range(position, world_size, ep))) for position in range(ep)]
    shard_experts(model, rank % ep, ep, neighbours[rank // ep])
    torch.manual_seed(1 + rank)  # its own tokens // ses propres tokens
    y = model(torch.randn(4, 8, 16))
    (y**2).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    experts_gradients = [gradient for name, gradient in gradients.items() if ".experts." in name]
    shared = [gradient for name, gradient in gradients.items() if ".experts." not in name]
    average_gradients(shared, experts_gradients, copies[rank % ep])
    return y.detach(), shared, experts_gradients


y, shared, experts_gradients = outcome(1)
for ep in (2, 4):
    rank_experts = 8 // ep
    whole = [gradient[rank % ep * rank_experts :][:rank_experts] for gradient in experts_gradients]
    sharded = outcome(ep)
    same_y = torch.allclose(sharded[0], y, atol=1e-6)
    pairs = zip([*sharded[1], *sharded[2]], [*shared, *whole], strict=True)
    same_gradients = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    print(f"{ep=}, {rank_experts=}, {same_y=}, {same_gradients=}")

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
# Entraînons `moe_tiny` sur deux rangs : les experts entiers partout, puis répartis (`ep=2`). Largeur 128, deux mélanges
# de 8 experts, k = 1, facteur 1,25 ; chaque rang lit 4 séquences de 128 octets, en fp32. **Vos prédictions** :
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
lab.reveal("exchange-sent", sum(traffic.sent_bytes for traffic in footprint.communication if traffic.group == "ep"))

# %% name="reveal-expert-weights"
lab.reveal("expert-weights", footprint.memory.weights_bytes)

# %% [markdown] lang="fr"
# Le même modèle, avec les mêmes poids et la couche `MoE` de DeepSpeed à la place de la nôtre :

# %% [markdown] lang="en"
# The same model, with the same weights and DeepSpeed's layer `MoE` in the place of ours:

# %% name="run-deepspeed" tags=["nbval-ignore-output"]
deepspeed_run = dlojz.run(config, engine="deepspeed", ep=2)

# %% [markdown] lang="fr"
# Pour le rang 0, en clair la prédiction, dessous la mesure ; à gauche la mémoire, à droite ce qu’il envoie par pas.

# %% [markdown] lang="en"
# For rank 0, predictions in a pale shade, measurements below; on the left memory, on the right what it sends per
# step.

# %% name="side-by-side" tags=["nbval-ignore-output"]
figures.side_by_side([everywhere, shared_out, deepspeed_run])

# %% name="counted"
tensor_run_figures.counted([shared_out, deepspeed_run], group="ep")

# %% [markdown] lang="fr"
# **Expliquez.** Les octets comptés sont-ils les octets prédits ? Les pertes sont-elles les mêmes, à 10⁻⁶ près, avec les
# experts partout et répartis ? Et avec DeepSpeed ? À 10⁻² près ?

# %% [markdown] lang="en"
# **Explain.** Are the bytes counted the bytes predicted? Are the losses the same, to 10⁻⁶, with experts everywhere and
# divided? And with DeepSpeed? To 10⁻²?

# %% name="experts-seen"
print("bytes as predicted: // octets comme prédit :", yes_no(dlojz.compare([shared_out, deepspeed_run]).exact))


def apart(run):
    return max(abs(a - b) for a, b in zip(everywhere.losses, run.losses, strict=True))


print("divided, to 10⁻⁶: // répartis, à 10⁻⁶ près :", yes_no(apart(shared_out) < 1e-6))
print("DeepSpeed, to 10⁻⁶: // DeepSpeed, à 10⁻⁶ près :", yes_no(apart(deepspeed_run) < 1e-6))
print("DeepSpeed, to 10⁻²: // DeepSpeed, à 10⁻² près :", yes_no(apart(deepspeed_run) < 1e-2))

# %% [markdown] lang="fr"
# Avec `ep`, le calcul ne change pas. DeepSpeed, quand un expert est plein, n’abandonne pas les mêmes tokens que nous ;
# sans token abandonné, les deux s’accordent à l’arrondi près.
#
# Les gradients des experts répartis ne voyagent plus.
#
# ## 7. Combien de secondes ?
#
# L’*all-to-all* est difficile à recouvrir : la couche l’attend. Mesurons, sur deux rangs, de quoi prédire : le débit
# d’un grand *all-to-all*, et le temps d’experts **étroits** (512 × 64, puis 64 × 512), quatre par rang, sur les places
# de 1 024 tokens par rang (k = 1, facteur 1,25).

# %% [markdown] lang="en"
# With `ep` the computation does not change. When an expert is full, DeepSpeed does not drop the same tokens as we do;
# where none is dropped, the two agree up to rounding.
#
# Gradients of divided experts travel no more.
#
# ## 7. How many seconds?
#
# The all-to-all is hard to hide: the layer waits for it. Let us measure, on two ranks, what a prediction needs: the
# rate of a large all-to-all, and the time of **narrow** experts (512 × 64, then 64 × 512), four per rank, on the places
# of 1,024 tokens per rank (k = 1, factor 1.25).

# %% name="measure-rates" tags=["nbval-ignore-output"]
# %%ranks 2
import statistics
import time

from dlojz.base.language import decimal


def seconds(act, times=15):
    times_s = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s)


up, down = torch.randn(4, 512, 64), torch.randn(4, 64, 512)
narrow = lambda rows: torch.relu(rows @ up) @ down  # noqa: E731
message, rows = torch.zeros(2**20), torch.randn(4, 2 * 160, 512)
rate = message.nbytes / 2 / seconds(lambda: dist.all_to_all_single(torch.empty_like(message), message))
experts_s = seconds(lambda: narrow(rows))
print("all-to-all: // all-to-all :", decimal(rate / 1e6, 0), "MB/s sent // Mo/s envoyés")
print("experts: // experts :", decimal(1e3 * experts_s, 2), "ms")

# %% [markdown] lang="fr"
# **Votre prédiction.** En passe **avant** (deux *all-to-all*), quelle part du temps est consacrée à l’échange ?
# `ranks["rate"][0]` et `ranks["experts_s"][0]` donnent les mesures du rang 0 ; votre `exchange_bytes` compte aussi la
# passe arrière.

# %% [markdown] lang="en"
# **Your prediction.** In the **forward** pass (two all-to-all), which share of the time goes to the exchange?
# `ranks["rate"][0]` and `ranks["experts_s"][0]` are the measurements of rank 0; your `exchange_bytes` counts the
# backward pass, too.

# %% name="predict-exchange-share" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "exchange-share",
    ### BEGIN SOLUTION
    1 / (1 + ranks["experts_s"][0] * ranks["rate"][0] / (exchange_bytes(1024, 512, 8, 1, 1.25, 2, 4) / 2)),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# La mesure : votre `through_experts`, et le temps passé dans les experts à l’intérieur.

# %% [markdown] lang="en"
# The measurement: your `through_experts`, and the time spent in the experts within it.

# %% name="measure-share" tags=["nbval-ignore-output"]
# %%ranks --with through_experts
from dlojz.base.language import percent

buffer, inside, shares = torch.randn(8, 160, 512), [], []


def watched(rows):
    start = time.perf_counter()
    made = narrow(rows)
    inside.append(time.perf_counter() - start)
    return made


for _ in range(21):
    dist.barrier()
    start = time.perf_counter()
    through_experts(buffer, watched)
    shares.append(1 - inside[-1] / (time.perf_counter() - start))
share = statistics.median(shares)
print(percent(share, 0), "of the time outside the experts // du temps hors des experts")

# %% name="reveal-exchange-share" tags=["nbval-ignore-output"]
lab.reveal("exchange-share", ranks["share"][0])

# %% [markdown] lang="fr"
# Attendez-vous à 0,5–0,85 : il faut aussi transposer les lignes et attendre l’autre rang. Sur de vrais liens, une
# couche de Mixtral, 4 096 tokens par GPU, 8 GPU qui soutiennent 200 TFLOP/s en bf16, selon vos octets :

# %% [markdown] lang="en"
# Expect 0.5–0.85: rows must be transposed and the other rank awaited, too. On real links, a layer of Mixtral, 4,096
# tokens per GPU, 8 GPUs that sustain 200 TFLOP/s in bf16, by your bytes:

# %% name="over-links"
figures.over_links(exchange_bytes)

# %% [markdown] lang="fr"
# Dans le nœud, presque rien ; par le réseau, près d’un cinquième du temps : d’où la porte à deux niveaux.
#
# **Un routeur déséquilibré.** Avec une capacité, le temps d’un pas ne dépend pas de l’équilibre. Mais bien des modèles
# récents n’abandonnent rien : le rang le plus chargé fait attendre les autres. Chaque rang a 512 tokens. D’abord, la
# moitié va à chaque rang ; puis les trois quarts vont au rang 0. **Votre prédiction** : combien de fois plus de temps
# la passe prend-elle ?

# %% [markdown] lang="en"
# Within the node, next to nothing; over the network, nearly a fifth of the time: hence the gate of two levels.
#
# **A router that is not even.** With a capacity, the time of a step does not depend on the balance. But many recent
# models drop nothing: the busiest rank keeps the others waiting. Each rank has 512 tokens. First, one half goes to each
# rank; then three quarters go to rank 0. **Your prediction**: how many times as long does the pass take?

# %% name="predict-unequal" stub="value"
lab.predict(
    "unequal-step",
    ### BEGIN SOLUTION
    (3 / 4) / (1 / 2),
    ### END SOLUTION
)

# %% name="measure-unequal" tags=["nbval-ignore-output"]
# %%ranks
from dlojz.base.language import decimal

wide, narrow_again = torch.randn(512, 2048), torch.randn(2048, 512)


def dropless(to_0, tokens=512):
    sent = [to_0, tokens - to_0]
    received = [sent[rank]] * 2  # both ranks send alike // les deux rangs envoient de même
    x = torch.randn(tokens, 512)
    arrived, back = x.new_empty(sum(received), 512), torch.empty_like(x)
    dist.barrier()
    start = time.perf_counter()
    dist.all_to_all_single(arrived, x, received, sent)
    dist.all_to_all_single(back, torch.relu(arrived @ wide) @ narrow_again, sent, received)
    dist.barrier()  # a step ends with its last rank // un pas finit avec son dernier rang
    return time.perf_counter() - start


ratios = [dropless(384) / dropless(256) for _ in range(21)]
unequal = statistics.median(ratios[1:])
print(f"{decimal(unequal, 2)} times as long // {decimal(unequal, 2)} fois plus long")

# %% name="reveal-unequal" tags=["nbval-ignore-output"]
lab.reveal("unequal-step", ranks["unequal"][0])

# %% [markdown] lang="fr"
# Sur des GPU, 1,5. Sur deux cœurs partagés, 1,0 à 1,5 : le rang qui a fini laisse sa part du processeur à l’autre.
#
# ## 8. Un curriculum sur la longueur
#
# Au début d’un entraînement, un modèle apprend des régularités courtes, et les premiers pas sont les plus instables. Li
# et al. (2021) commencent donc par des séquences **tronquées**, toutes à la même longueur, qui croît avec les pas selon
# une **fonction de cadence** (*pacing function*) :
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
# On GPUs, 1.5. On two shared cores, 1.0 to 1.5: the rank that has finished leaves its part of the processor to the
# other one.
#
# ## 8. A curriculum on length
#
# At the beginning of a training a model learns short regularities, and the first steps are the least stable. So Li et
# al. (2021) begin with **truncated** sequences, all of the same length, which grows with the steps by a **pacing
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
# Entraînons `gpt_tiny` sur du vrai texte : d’un côté 40 pas de 4 échantillons de 128 tokens, de l’autre des
# échantillons qui passent de 16 à 128 tokens en 40 pas. Le second continue ensuite jusqu’à avoir lu **autant de
# tokens**.
#
# **Votre prédiction.** Combien de tokens les 40 pas de croissance lisent-ils en tout, à peu près ? (Sans curriculum :
# 40 × 4 × 128 = 20 480.)

# %% [markdown] lang="en"
# Let us train `gpt_tiny` on real text: on one side 40 steps of 4 samples of 128 tokens, on the other samples that grow
# from 16 to 128 tokens within 40 steps. The second then goes on until it has read **as many tokens**.
#
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
lab.reveal("curriculum-tokens", sum(4 * pace(t, 16, 128, 40, 1, 8) for t in range(1, 41)))

# %% [markdown] lang="fr"
# **Et en secondes ?** La mise à jour des poids prend toujours autant de temps, quelle que soit la longueur. Mesurons
# deux longueurs, à tour de rôle :

# %% [markdown] lang="en"
# **And in seconds?** The update of the weights always takes as long, whatever the length. Let us measure two lengths,
# in turns:


# %% name="measure-steps" tags=["nbval-ignore-output"]
def one_step(model, optimizer, inputs, targets):
    start = time.perf_counter()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start


def in_turns(lengths, rounds=12):
    model = models.build("gpt_tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = {length: torch.zeros(4, length, dtype=torch.long) for length in lengths}
    return [{n: one_step(model, optimizer, text[n], text[n]) for n in lengths} for _ in range(rounds)][2:]


turns = in_turns((32, 128))
step_ms = {length: 1e3 * statistics.median(times_s[length] for times_s in turns) for length in (32, 128)}
for length, ms in step_ms.items():
    print(length, "tokens: // tokens :", decimal(ms), "ms")

# %% [markdown] lang="fr"
# **Votre prédiction.** D’après `step_ms`, et un temps a + b × longueur : quelle fraction de la durée d’un pas de 128
# tokens prend un pas de 16 tokens ?

# %% [markdown] lang="en"
# **Your prediction.** From `step_ms`, and a time of a + b × length: which share of a step of 128 tokens does a step of
# 16 tokens take?

# %% name="predict-short" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "short-step",
    ### BEGIN SOLUTION
    1 - (1 - step_ms[32] / step_ms[128]) / (128 - 32) * (128 - 16),
    ### END SOLUTION
)

# %% name="reveal-short" tags=["nbval-ignore-output"]
lab.reveal("short-step", statistics.median(times_s[16] / times_s[128] for times_s in in_turns((16, 128))))

# %% [markdown] lang="fr"
# Voici l’entraînement ; `length` est votre cadence. **Avant de regarder** la figure : des deux entraînements, lequel
# aura la perte la plus basse une fois lus autant de **tokens** ? Et au bout d’autant de **secondes** ?

# %% [markdown] lang="en"
# Here is the training; `length` is your pacing. **Before you look** at the figure: which of the two trainings will have
# the lower loss once both have read as many **tokens**? And once both have taken as many **seconds**?


# %% name="train-lengths"
prose = ProseWindows(128)


def batch(indices):
    return [torch.stack(column) for column in zip(*(prose[index] for index in indices), strict=True)]


def train_lengths(length, tokens=40 * 4 * 128):
    torch.manual_seed(1)
    model, steps, read, trained_s = models.build("gpt_tiny"), [], 0, 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs, targets = batch(range(len(prose) - 32, len(prose)))
    while read < tokens:
        drawn, n = torch.randint(len(prose) - 32, (4,)).tolist(), figures.whole_length(length(len(steps) + 1), 128)
        trained_s += one_step(model, optimizer, *(part[:, :n] for part in batch(drawn)))
        read, held_out = read + 4 * n, None
        if read // 2048 > (read - 4 * n) // 2048:
            with torch.no_grad():
                held_out = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
        root = max(state["exp_avg_sq"].max().item() for state in optimizer.state.values()) ** 0.5
        steps.append(figures.CurriculumStep(n, read, trained_s, root, held_out))
    return steps


# %% name="train-curriculum" tags=["nbval-ignore-output"]
without = train_lengths(lambda t: 128)
linear = train_lengths(lambda t: pace(t, 16, 128, 40, 1, 8))
figures.curriculum({"without // sans": without, "linear // linéaire": linear})

# %% name="more-steps"
print("steps without, with the curriculum: // pas sans, avec le curriculum :", len(without), len(linear))

# %% [markdown] lang="fr"
# Les pertes sont mesurées sur un texte jamais vu, en échantillons **entiers**.
#
# - Après autant de **tokens** : le curriculum a fait plus de mises à jour, il part donc de plus bas ; à la fin, les
#   deux se valent, et l’un ou l’autre peut mener.
# - Après autant de **secondes** : il perd de son avance, car un pas de 16 tokens dure bien plus d’un huitième d’un pas
#   de 128 ; les mêmes tokens lui prennent donc plus de temps.
# - √v, racine du second moment d’Adam, est la taille récente des gradients ; Li et al. relient ses sauts aux pics de la
#   perte. À lire sur votre figure : un pic a-t-il son saut, un saut son pic ? Un seul entraînement ne tranche pas.
#
# Changez la graine et le taux d’apprentissage avant de conclure. L’article annonce, pour GPT-2, jusqu’à 2,2 fois moins
# de tokens et 3,7 fois moins de temps à qualité égale : la stabilité gagnée permet un batch 8 fois plus grand.

# %% [markdown] lang="en"
# The losses are measured on text never seen, in **whole** samples.
#
# - After as many **tokens**: the curriculum has made more updates, so it starts lower; at the end the two are close,
#   and either may lead.
# - After as many **seconds**: it loses some of its lead, since a step of 16 tokens takes far more than an eighth of a
#   step of 128; so the same tokens take it longer.
# - √v, the root of Adam's second moment, is the recent size of gradients; Li et al. relate its jumps to the spikes of
#   the loss. Read it off your figure: has a spike its jump, and a jump its spike? One training alone does not settle
#   it.
#
# Change the seed and the learning rate before you draw conclusions. The paper claims, for GPT-2, up to 2.2 times
# fewer tokens and 3.7 times less time for the same quality: the stability gained allows a batch 8 times as large.

# %% [markdown] lang="fr"
# ## 9. Défi : où placer les experts ?
#
# Facultatif. Écrivez une fonction de la charge de chaque expert (`loads`, en tokens), des nombres de rangs et de places
# par rang, qui renvoie, pour chaque rang, la liste de ses experts. Il y a plus de places que d’experts : un expert peut
# avoir plusieurs copies, sur un rang ou sur plusieurs, qui se partagent ses tokens également. La charge du rang le plus
# chargé, en pourcentage de la charge moyenne, est votre score, en moyenne sur cinq mélanges. Objectif : 103 %.

# %% [markdown] lang="en"
# ## 9. Challenge: where do the experts go?
#
# Optional. Write a function of the load of each expert (`loads`, in tokens), the number of ranks and the number of
# places per rank, which returns, for each rank, the list of its experts. There are more places than experts: an expert
# may have several copies, on one rank or on several, which share its tokens equally. The load of the busiest rank, in
# per cent of the mean load, is your score, on average over five mixtures. Target: 103%.


# %% name="expert-placement"
def arrange(loads, ranks, places):
    ### BEGIN SOLUTION
    copies = [1] * len(loads)
    for _ in range(ranks * places - len(loads)):  # one more of the busiest // une copie de plus du plus chargé
        copies[max(range(len(loads)), key=lambda e: loads[e] / copies[e])] += 1
    share = [load / count for load, count in zip(loads, copies, strict=True)]
    experts_of = [[] for _ in range(ranks)]
    for e in sorted((e for e, count in enumerate(copies) for _ in range(count)), key=lambda e: -share[e]):
        with_room = (experts for experts in experts_of if len(experts) < places)
        min(with_room, key=lambda experts: sum(share[i] for i in experts)).append(e)
    for _ in range(100):
        experts_of.sort(key=lambda experts: sum(share[i] for i in experts))
        busy, load = experts_of[-1], sum(share[i] for i in experts_of[-1])
        for free in experts_of[:-1]:
            room = load - sum(share[i] for i in free)
            swaps = [(a, b) for a in range(len(busy)) for b in range(len(free))
                     if 0 < share[busy[a]] - share[free[b]] < room]  # fmt: skip
            if swaps:
                a, b = swaps[0]
                busy[a], free[b] = free[b], busy[a]
                break
    return experts_of
    ### END SOLUTION


lab.check("expert-placement", arrange)

# %%
# lab.hint("expert-placement")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Mettez un mélange à la place de chaque MLP, dont les experts sont répartis entre les rangs (`--experts 4`). La porte
# et les experts sont donnés ; vous écrivez l’*all-to-all* et sa passe arrière, et vous tenez les experts hors de DDP.
# Continuez dans votre `train.py`, ou partez de celui qu’écrit `dlojz labs script 10 un_autre_dossier`. La cellule
# ci-dessous le juge.
#
# À regarder : les pertes d’un seul processus, alors que chaque rang ne détient que la moitié des experts. Combien de
# samples/s l’*all-to-all* coûte-t-il ?
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
# `train.py`, or let `dlojz labs script 10 another_folder` write what this lab begins with. The cell below judges it.
#
# What to look for: the losses of one process, although each rank holds half of the experts. How many samples/s does the
# all-to-all cost?
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

# %% name="own-script"
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | | mélange d’experts | curriculum de longueur |
# |--|--|--|
# | économise | le calcul par token | les tokens par pas, au début |
# | coûte | de la mémoire (E fois le MLP), quatre *all-to-all* par couche | des pas plus nombreux, moins efficaces |
# | se répartit | les experts, par `ep` ; le reste est répliqué | – |
# | peut mal tourner | le routeur s’effondre : perte d’équilibrage | départ trop court, croissance trop lente |

# %% [markdown] lang="en"
# ## Summary
#
# | | mixture of experts | curriculum on length |
# |--|--|--|
# | saves | computation per token | tokens per step, at first |
# | costs | memory (E times the MLP), four all-to-all per layer | more steps, less efficient ones |
# | is divided | experts, by `ep`; the rest is replicated | – |
# | may go wrong | the router collapses: balance loss | too short a start, too slow a growth |

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
