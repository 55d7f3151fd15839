# %% [markdown] lang="fr"
# # TP 04 — ZeRO
#
# En *Data Parallelism*, chaque réplique garde tout : les poids, les gradients, les états de l’optimiseur. Avec 64 GPU,
# le même octet existe donc 64 fois. **ZeRO** (*Zero Redundancy Optimizer*, Rajbhandari et al., 2020) supprime ces
# copies, en trois temps : chaque rang n’en garde qu’une part, et demande le reste aux autres quand il en a besoin. Le
# calcul ne change pas ; la mémoire devient de la communication. Dans ce TP, vous écrivez vous-même les trois niveaux
# (*stages*), en quelques lignes chacun, puis vous mesurez ceux de DeepSpeed et de PyTorch.
#
# À la fin, vous saurez :
#
# - dire combien d’octets chaque rang garde à chaque niveau, et sur combien de GPU un modèle tient ;
# - répartir à la main l’optimiseur, puis les gradients, puis les poids ;
# - compter ce que chaque niveau envoie : 2Ψ, 2Ψ, 3Ψ, et ce que les bibliothèques envoient vraiment ;
# - écrire la configuration JSON de DeepSpeed ;
# - décharger l’optimiseur vers la mémoire de l’hôte, et dire quand c’est rentable ;
# - prévoir les cas où ZeRO-3 fait perdre du temps.
#
# Comptez une heure et demie. Quatre rangs suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 04 — ZeRO
#
# In data parallelism every replica keeps everything: weights, gradients, optimizer states. With 64 GPUs the same byte
# thus exists 64 times. **ZeRO** (Zero Redundancy Optimizer, Rajbhandari et al., 2020) does away with these copies, in
# three stages: each rank keeps only a share, and asks the others for the rest when it needs it. The computation is the
# same; memory turns into communication. In this lab you write the three stages yourself, in a few lines each, then you
# measure those of DeepSpeed and PyTorch.
#
# By the end you can:
#
# - tell how many bytes each rank keeps in each stage, and on how many GPUs a model fits;
# - shard by hand the optimizer, then the gradients, then the weights;
# - count what each stage sends: 2Ψ, 2Ψ, 3Ψ, and what the libraries really send;
# - write DeepSpeed's JSON configuration;
# - offload the optimizer to host memory, and tell when that pays;
# - foresee where ZeRO-3 loses time.
#
# Allow an hour and a half. Four ranks are enough, without GPUs.

# %% name="setup"
import json
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import dlojz
from dlojz import labs, models
from dlojz.base.language import format_bytes
from dlojz.hardware import DEVICES
from dlojz.labs.lab04_zero import figures

lab = labs.start("04")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. Seize octets par paramètre, et qui les garde
#
# En précision mixte avec Adam, un modèle de Ψ paramètres coûte, sur chaque rang (TP 02) :
#
# | quoi | octets | quand s’en sert-on ? |
# |--|--|--|
# | poids, en 16 bits | 2Ψ | à chaque couche, passe avant et passe arrière |
# | gradients, en 16 bits | 2Ψ | de la passe arrière à la mise à jour |
# | optimiseur : copie maître et deux moments, en fp32 | 12Ψ | à la mise à jour, une fois par pas |
#
# ZeRO répartit d’abord ce qui est volumineux et rarement utilisé. Sur N rangs :
#
# - **niveau 1** : l’optimiseur ;
# - **niveau 2** : l’optimiseur et les gradients ;
# - **niveau 3** : l’optimiseur, les gradients et les poids.
#
# ### Exercice 1 — octets par rang
#
# Combien d’octets d’états un rang garde-t-il, pour `parameters` paramètres sur `ranks` rangs ? `stage` vaut 0 (sans
# ZeRO), 1, 2 ou 3.

# %% [markdown] lang="en"
# ## 1. Sixteen bytes per parameter, and who keeps them
#
# In mixed precision with Adam, a model of Ψ parameters costs on every rank (lab 02):
#
# | what | bytes | when is it used? |
# |--|--|--|
# | weights, 16 bit | 2Ψ | in every layer, forward and backward |
# | gradients, 16 bit | 2Ψ | from backward to the update |
# | optimizer: master copy and two moments, fp32 | 12Ψ | in the update, once per step |
#
# ZeRO partitions first what is large and seldom used. On N ranks:
#
# - **stage 1**: the optimizer;
# - **stage 2**: the optimizer and the gradients;
# - **stage 3**: the optimizer, the gradients and the weights.
#
# ### Exercise 1 — bytes per rank
#
# How many bytes of states does a rank keep, for `parameters` parameters on `ranks` ranks? `stage` is 0 (no ZeRO), 1, 2
# or 3.


# %% name="zero-states"
def state_bytes(parameters, ranks, stage):
    ### BEGIN SOLUTION
    weights, gradients, optimizer = 2 * parameters, 2 * parameters, 12 * parameters
    if stage >= 1:
        optimizer /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage >= 3:
        weights /= ranks
    return weights + gradients + optimizer
    ### END SOLUTION


lab.check("zero-states", state_bytes)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("zero-states")

# %% [markdown] lang="fr"
# L’article de ZeRO donne ces valeurs dans sa table 1, pour trois modèles. La voici, à côté de ce que calcule votre
# fonction :

# %% [markdown] lang="en"
# ZeRO's paper gives these figures in its table 1, for three models. Here it is, beside what your function computes:

# %% name="published"
figures.table_1(state_bytes)

# %% [markdown] lang="fr"
# La même chose en image, pour le modèle de 7,5 milliards de paramètres. Les niveaux 1 et 2 descendent vite, puis butent
# sur un plancher : ce qu’ils ne répartissent pas.

# %% [markdown] lang="en"
# The same as a picture, for the model with 7.5 billion parameters. Stages 1 and 2 fall fast, then meet a floor: what
# they do not partition.

# %%
figures.states_by_ranks(state_bytes, 7.5e9, [DEVICES["v100-32"], DEVICES["a100-80"]])

# %% [markdown] lang="fr"
# **Votre prédiction.** Mille milliards de paramètres, en ZeRO-3, sur des H100 de 80 Go : combien de GPU faut-il au
# moins, rien que pour les états ?

# %% [markdown] lang="en"
# **Your prediction.** A thousand billion parameters, ZeRO-3, H100s with 80 GB: how many GPUs does it take at least, for
# the states alone?

# %% name="predict-gpus" stub="value"
lab.predict(
    "zero-3-gpus",
    ### BEGIN SOLUTION
    math.ceil(16e12 / 80e9),
    ### END SOLUTION
)

# %% name="reveal-gpus"
from dlojz.prediction.rules_of_thumb import bytes_per_parameter


def fits(size):
    states = bytes_per_parameter("fp16_amp", "adam", zero=3, dp=size)
    return states.device_bytes(10**12) <= DEVICES["h100"].memory_bytes


lab.reveal("zero-3-gpus", next(size for size in range(1, 1000) if fits(size)))

# %% [markdown] lang="fr"
# Un H100 « de 80 Go » en offre un peu plus : 79 Gio, soit 85 Go. Il faut aussi loger les activations, que les niveaux
# de ZeRO ne répartissent pas : chaque rang a les siennes.
#
# ## 2. Niveau 1 : l’optimiseur
#
# Un *all-reduce*, c’est un *reduce-scatter* suivi d’un *all-gather* (TP 03). Entre les deux, chaque rang détient
# exactement une part de la moyenne. ZeRO glisse l’optimiseur à cet endroit :
#
# 1. *reduce-scatter* des gradients : le rang r reçoit la r-ième part de leur moyenne ;
# 2. il met à jour la r-ième part des poids, avec des moments pour elle seule ;
# 3. *all-gather* des poids : chacun donne sa part, tous ont de nouveau le modèle entier.
#
# Les deux moitiés, sur quatre rangs. La première fois, il faut quelques secondes pour les démarrer.

# %% [markdown] lang="en"
# An H100 “with 80 GB” offers a little more: 79 GiB, or 85 GB. But the activations need room too, and ZeRO does not
# partition these: each rank has its own.
#
# ## 2. Stage 1: the optimizer
#
# An all-reduce is a reduce-scatter, then an all-gather (lab 03). Between the two, each rank holds exactly one share of
# the mean. That is where ZeRO slips in the optimizer:
#
# 1. reduce-scatter of the gradients: rank r gets the r-th share of their mean;
# 2. it updates the r-th share of the weights, with moments for that share alone;
# 3. all-gather of the weights: each gives its share, and all have the whole model again.
#
# The two halves, on four ranks. The first time, starting them takes a few seconds.

# %% name="two-halves" tags=["nbval-ignore-output"]
# %%ranks 4
import warnings

# torch gives these two collectives shorter names, too // torch donne aussi des noms plus courts à ces deux collectives
warnings.filterwarnings("ignore", category=FutureWarning)

whole = torch.arange(8.0) + rank
share = torch.empty(2)
dist.reduce_scatter_tensor(share, whole)
print(share.tolist())
dist.all_gather_into_tensor(whole, share)
print(whole.tolist())

# %% [markdown] lang="fr"
# Après le *reduce-scatter*, chacun détient deux nombres de la somme ; l’*all-gather* les réunit. L’optimiseur
# travaille entre les deux : écrivons les étapes 2 et 3.
#
# ### Exercice 2 — répartir l’optimiseur
#
# `weights` contient tous les poids, bout à bout, dans un vecteur dont la longueur est un multiple du nombre de rangs ;
# il est le même partout. `make_optimizer([tenseur])` crée un optimiseur PyTorch pour ce tenseur. Renvoyez une fonction
# `step(gradient)`, que l’on appellera à chaque pas : `gradient` est la part de **ce rang** dans le gradient moyen.
# Après `step`, `weights` doit être à jour, en entier, sur tous les rangs.
#
# - `weights.chunk(size)[i]` est une vue : y écrire, c’est écrire dans `weights` ;
# - un optimiseur lit le gradient d’un tenseur `t` dans `t.grad` ;
# - `dist.all_gather_into_tensor(entier, part)` met bout à bout les parts de tous les rangs.

# %% [markdown] lang="en"
# After the reduce-scatter each holds two numbers of the sum; the all-gather brings them together. The optimizer works
# between the two: let us write steps 2 and 3.
#
# ### Exercise 2 — sharding the optimizer
#
# `weights` holds all weights, end to end, in a vector whose length is a multiple of the number of ranks; it is the same
# everywhere. `make_optimizer([tensor])` makes a PyTorch optimizer for this tensor. Return a function `step(gradient)`,
# to be called in every step: `gradient` is **this rank's** share of the mean gradient. After `step`, `weights` must be
# up to date, whole, on all ranks.
#
# - `weights.chunk(size)[i]` is a view: to write there is to write in `weights`;
# - an optimizer reads the gradient of a tensor `t` in `t.grad`;
# - `dist.all_gather_into_tensor(whole, share)` lays the shares of all ranks end to end.


# %% name="shard-optimizer"
def shard_optimizer(weights, make_optimizer):
    rank, size = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    share = weights.chunk(size)[rank]
    own = make_optimizer([share])

    def step(gradient):
        share.grad = gradient
        own.step()
        dist.all_gather_into_tensor(weights, share)

    return step
    ### END SOLUTION


lab.check("shard-optimizer", shard_optimizer)

# %%
# lab.hint("shard-optimizer")

# %% [markdown] lang="fr"
# Pourquoi a-t-on le droit de couper n’importe où, même au milieu d’une matrice ? Parce qu’Adam traite chaque nombre
# séparément. Un optimiseur qui regarde une couche entière (LAMB et sa norme, Muon et sa matrice) ne se répartit pas
# ainsi.
#
# ## 3. Niveau 2 : les gradients
#
# Reste l’étape 1. Pendant la passe arrière, un rang calcule les gradients de tout le modèle, mais sur ses seules
# données. De leur moyenne, il ne lui faut que sa part.
#
# ### Exercice 3 — répartir les gradients
#
# `gradients` est la liste des gradients de ce rang, de formes quelconques. Renvoyez sa part de leur **moyenne** sur les
# rangs : un vecteur, obtenu en mettant les gradients bout à bout, puis en complétant par des zéros **à la fin**
# jusqu’à un multiple du nombre de rangs. Le rang r possède le r-ième des N morceaux égaux.
#
# - `dist.reduce_scatter_tensor(part, entier)` additionne les vecteurs `entier` de tous les rangs, et met le morceau de
#   ce rang dans `part`, N fois plus court ;
# - `F.pad(vecteur, (a, b))` ajoute `a` zéros devant et `b` derrière.

# %% [markdown] lang="en"
# Why may one cut anywhere, even in the middle of a matrix? Because Adam treats each number by itself. An optimizer that
# looks at a whole layer (LAMB and its norm, Muon and its matrix) cannot be sharded so.
#
# ## 3. Stage 2: the gradients
#
# Step 1 remains. In backward a rank computes the gradients of the whole model, but on its own data alone. Of their mean
# it needs its share only.
#
# ### Exercise 3 — sharding the gradients
#
# `gradients` is the list of this rank's gradients, of any shapes. Return its share of their **mean** over the ranks: a
# vector, made by laying the gradients end to end, then adding zeros **at the end** up to a multiple of the number of
# ranks. Rank r owns the r-th of N equal pieces.
#
# - `dist.reduce_scatter_tensor(share, whole)` adds up the vectors `whole` of all ranks, and puts this rank's piece into
#   `share`, which is N times shorter;
# - `F.pad(vector, (a, b))` adds `a` zeros in front and `b` behind.


# %% name="shard-gradients"
def reduce_gradients(gradients):
    size = dist.get_world_size()
    ### BEGIN SOLUTION
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat = F.pad(flat, (0, -flat.numel() % size))
    share = flat.new_empty(flat.numel() // size)
    dist.reduce_scatter_tensor(share, flat)
    return share / size
    ### END SOLUTION


lab.check("shard-gradients", reduce_gradients)

# %%
# lab.hint("shard-gradients")

# %% [markdown] lang="fr"
# ### Entraînons
#
# Un petit réseau, les chiffres manuscrits de scikit-learn, et d’abord un seul processus : ce sera la référence.

# %% [markdown] lang="en"
# ### Let us train
#
# A small network, scikit-learn's handwritten digits, and one single process first: that will be the reference.

# %% name="training"
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(64, 51), nn.ReLU(), nn.Linear(51, 10))


def adam(tensors):
    return torch.optim.Adam(tensors, lr=0.01)


def loss_of(model, batch):
    return F.cross_entropy(model(images[batch]), labels[batch])


model, alone = make_model(), []
optimizer = adam(model.parameters())
for batch in order.split(64)[:20]:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    alone.append(loss.item())

sum(parameter.numel() for parameter in model.parameters()), alone[-1] < alone[0]

# %% [markdown] lang="fr"
# Maintenant quatre rangs, avec vos deux fonctions. `FlatWeights` met les poids bout à bout : les paramètres du modèle
# deviennent des vues du vecteur `flat.whole`, complété par des zéros. Chaque rang lit un quart de chaque batch. La
# dernière ligne affiche la longueur du vecteur, celle de la part, et dit si les pertes suivent celles d’un processus
# seul, à un pour mille près.

# %% [markdown] lang="en"
# Now four ranks, with your two functions. `FlatWeights` lays the weights end to end: the model's parameters become
# views of the vector `flat.whole`, which zeros fill up. Each rank reads a quarter of each batch. The last line prints
# the length of the vector, that of the share, and whether the losses follow those of one process, within one per mille.

# %% name="train-sharded"
# %%ranks --with make_model,adam,loss_of,shard_optimizer,reduce_gradients,images,labels,order,alone
from dlojz.by_hand.zero import FlatWeights

model = make_model()
parameters = list(model.parameters())
flat = FlatWeights(parameters)
step = shard_optimizer(flat.whole, adam)
losses = []
for batch in order.split(64)[:20]:
    loss = loss_of(model, batch[rank::world_size])
    loss.backward()
    step(reduce_gradients([parameter.grad for parameter in parameters]))
    model.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    losses.append(mean.item() / world_size)
print(len(flat.whole), len(flat.share), torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-3))

# %% [markdown] lang="fr"
# Voilà le niveau 2, à un détail près : ici, les gradients entiers existent encore un instant, entre la passe arrière et
# le *reduce-scatter*. Pour ne jamais les avoir tous, on réduit chaque *bucket* dès qu’il est plein, pendant la passe
# arrière, et on le libère aussitôt : ce sont les *hooks* et les *buckets* du TP 03.
#
# ## 4. Niveau 3 : les poids
#
# Il reste 2Ψ octets de poids entiers sur chaque rang. Mais une couche n’a besoin des siens que pendant qu’elle calcule.
# D’où le niveau 3 : rassembler les poids d’une couche (*all-gather*), calculer, les libérer ; et recommencer en passe
# arrière.
#
# ### Exercice 4 — répartir les poids
#
# Une couche linéaire calcule `y = x Wᵀ`. La matrice W, de forme (sortie, entrée), est répartie par lignes : `share`
# contient celles de ce rang. `gather(share)` les rassemble. Écrivez les deux passes d’une
# `torch.autograd.Function` :
#
# - `forward` renvoie `y`, et confie à `context.save_for_backward` ce dont `backward` aura besoin : **pas** la matrice
#   entière ;
# - `backward` reçoit le gradient de la perte par rapport à `y`. Elle renvoie deux gradients : celui de `x`, qui
#   appartient à ce rang, et celui de `share`, soit les lignes de ce rang dans la **moyenne** sur les rangs du gradient
#   de W.
#
# Rappel : le gradient de W est `gradient.T @ x`, celui de `x` est `gradient @ W`.

# %% [markdown] lang="en"
# That is stage 2, but for one detail: here the whole gradients still exist for a moment, between backward and the
# reduce-scatter. Never to have all of them, each bucket is reduced as soon as it is full, during backward, and freed at
# once: the hooks and buckets of lab 03.
#
# ## 4. Stage 3: the weights
#
# There remain 2Ψ bytes of whole weights on every rank. But a layer needs its own only while it computes. Hence stage 3:
# gather the weights of a layer (all-gather), compute, free them; and once more in backward.
#
# ### Exercise 4 — sharding the weights
#
# A linear layer computes `y = x Wᵀ`. The matrix W, of shape (output, input), is sharded by rows: `share` holds those of
# this rank. `gather(share)` brings them together. Write the two passes of a `torch.autograd.Function`:
#
# - `forward` returns `y`, and hands to `context.save_for_backward` what `backward` will need: **not** the whole matrix;
# - `backward` receives the gradient of the loss with respect to `y`. It returns two gradients: that of `x`, which is
#   this rank's own, and that of `share`, this rank's rows of the **mean** over the ranks of W's gradient.
#
# Reminder: the gradient of W is `gradient.T @ x`, that of `x` is `gradient @ W`.


# %% name="shard-weights"
def gather(share):
    whole = share.new_empty(dist.get_world_size() * share.shape[0], share.shape[1])
    dist.all_gather_into_tensor(whole, share)
    return whole


class ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(context, x, share):
        ### BEGIN SOLUTION
        context.save_for_backward(x, share)
        return x @ gather(share).T
        ### END SOLUTION

    @staticmethod
    def backward(context, gradient):
        x, share = context.saved_tensors
        share_gradient = torch.empty_like(share)
        ### BEGIN SOLUTION
        dist.reduce_scatter_tensor(share_gradient, gradient.T @ x)
        return gradient @ gather(share), share_gradient / dist.get_world_size()
        ### END SOLUTION


def sharded_linear(x, share):
    return ShardedLinear.apply(x, share)


lab.check("shard-weights", sharded_linear)

# %%
# lab.hint("shard-weights")

# %% [markdown] lang="fr"
# Le paquet contient les trois niveaux, pour n’importe quel modèle :
# [stage1.py](../../dlojz/by_hand/zero/stage1.py), [stage2.py](../../dlojz/by_hand/zero/stage2.py) et
# [stage3.py](../../dlojz/by_hand/zero/stage3.py), une centaine de lignes chacun. Lisez-les, en cherchant la réponse à
# quatre questions :
#
# - au niveau 1, combien de lignes séparent le *reduce-scatter* de l’*all-gather* ?
# - au niveau 2, pourquoi un *bucket* plein attend-il ceux qui le précèdent ?
# - au niveau 3, combien de blocs sont entiers au même moment, et pourquoi plus d’un ?
# - que devient, au niveau 3, un paramètre qui sert dans deux blocs ?
#
# La boucle d’entraînement, elle, est la même pour les trois. Chaque ligne affiche, pour un niveau, le
# nombre de poids entiers que montre le modèle entre deux pas, celui de la part du rang, et si les pertes suivent celles
# d’un processus seul.

# %% [markdown] lang="en"
# The package holds the three stages, for any model: [stage1.py](../../dlojz/by_hand/zero/stage1.py),
# [stage2.py](../../dlojz/by_hand/zero/stage2.py) and [stage3.py](../../dlojz/by_hand/zero/stage3.py), about a hundred
# lines each. Read them, looking for the answers to four questions:
#
# - in stage 1, how many lines lie between the reduce-scatter and the all-gather?
# - in stage 2, why does a full bucket wait for those before it?
# - in stage 3, how many blocks are whole at the same moment, and why more than one?
# - in stage 3, what becomes of a parameter that is used in two blocks?
#
# The training loop is the same for all three. Each line prints, for one stage, the elements of whole weights that the
# model shows between two steps, those of the shares, and whether the losses follow those of one process.

# %% name="three-stages"
# %%ranks --with make_model,adam,loss_of,images,labels,order,alone
from dlojz.by_hand.zero import ZeroStage1, ZeroStage2, ZeroStage3

for stage in (ZeroStage1, ZeroStage2, ZeroStage3):
    model = stage(make_model(), adam)
    losses = []
    for batch in order.split(64)[:20]:
        loss = loss_of(model, batch[rank::world_size])
        model.backward(loss)
        model.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    whole = sum(parameter.numel() for parameter in model.module.parameters())
    share = sum(part.numel() for part in model.shares)
    print(whole, share, torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-3))

# %% [markdown] lang="fr"
# Les réponses. Au niveau 1, une division et `optimizer.step()` : l’optimiseur est bien *entre* les deux moitiés d’un
# *all-reduce*. Un *bucket* plein attend les précédents pour que tous les rangs réduisent les mêmes *buckets* dans le
# même ordre. Au niveau 3, deux blocs sont entiers : celui qui calcule, et le suivant, dont les poids arrivent pendant
# ce temps (*prefetch*). Un paramètre de deux blocs serait libéré par l’un quand l’autre en a besoin ; il reste donc
# entier pendant toute la passe.
#
# ## 5. Ce que cela coûte : les communications
#
# Comptons en **passages** : un *reduce-scatter* ou un *all-gather* du modèle entier, pendant lequel chaque rang envoie
# (N − 1) / N de ses octets.
#
# | niveau | à chaque micro-batch | une fois par pas |
# |--|--|--|
# | 0 (DDP) | | *all-reduce* des gradients, cumulés |
# | 1 | | *reduce-scatter* des gradients, cumulés ; *all-gather* des poids |
# | 2 | *reduce-scatter* des gradients | *all-gather* des poids |
# | 3 | *all-gather* des poids, deux fois ; *reduce-scatter* des gradients | |
#
# ### Exercice 5 — octets envoyés par pas
#
# Combien d’octets chaque rang envoie-t-il par pas d’optimiseur ? `weight_bytes` est la taille du modèle entier ; les
# gradients ont la même. `micro_batches` est le nombre de micro-batches cumulés à chaque pas.

# %% [markdown] lang="en"
# The answers. In stage 1, a division and `optimizer.step()`: the optimizer does stand *between* the two halves of an
# all-reduce. A full bucket waits for those before it, so that all ranks reduce the same buckets in the same order. In
# stage 3 two blocks are whole: the one that computes, and the next, whose weights arrive meanwhile (prefetch). A
# parameter of two blocks would be freed by one when the other needs it; so it stays whole for the entire pass.
#
# ## 5. What it costs: communication
#
# Let us count in **passes**: a reduce-scatter or an all-gather of the whole model, in which each rank sends (N − 1) / N
# of its bytes.
#
# | stage | with every micro-batch | once per step |
# |--|--|--|
# | 0 (DDP) | | all-reduce of the gradients, accumulated |
# | 1 | | reduce-scatter of the gradients, accumulated; all-gather of the weights |
# | 2 | reduce-scatter of the gradients | all-gather of the weights |
# | 3 | all-gather of the weights, twice; reduce-scatter of the gradients | |
#
# ### Exercise 5 — bytes sent per step
#
# How many bytes does each rank send per optimizer step? `weight_bytes` is the size of the whole model; the gradients
# have the same. `micro_batches` is the number of micro-batches accumulated in each step.


# %% name="zero-volume"
def sent_bytes(weight_bytes, ranks, stage, micro_batches):
    ### BEGIN SOLUTION
    passes = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[stage]
    return passes * weight_bytes * (ranks - 1) / ranks
    ### END SOLUTION


lab.check("zero-volume", sent_bytes)

# %%
# lab.hint("zero-volume")

# %% [markdown] lang="fr"
# ## 6. Les niveaux, face à face
#
# Entraînons `coatnet_tiny` sur deux rangs avec tous les moteurs : DeepSpeed aux niveaux 0 à 3, les trois niveaux écrits
# à la main, et **FSDP2**, le ZeRO-3 de PyTorch ([sharded.py](../../dlojz/train/engines/sharded.py)). Tout est ici en
# fp32, pour que les pertes se comparent : poids 4, gradients 4, moments 8 octets par paramètre. Cela fait encore 16,
# mais répartis autrement.
#
# **Vos prédictions**, avant de lancer. Combien d’octets de moments d’Adam chaque rang garde-t-il à partir du
# niveau 1 ? Et combien d’octets envoie-t-il par pas en ZeRO-3 ?

# %% [markdown] lang="en"
# ## 6. The stages side by side
#
# Let us train `coatnet_tiny` on two ranks with all engines: DeepSpeed in stages 0 to 3, the three stages written by
# hand, and **FSDP2**, PyTorch's ZeRO-3 ([sharded.py](../../dlojz/train/engines/sharded.py)). All is in fp32 here, so
# that losses can be compared: 4 bytes of weights, 4 of gradients, 8 of moments per parameter. That is 16 again, but
# made up otherwise.
#
# **Your predictions**, before the start. How many bytes of Adam's moments does each rank keep from stage 1 on? And how
# many bytes does it send per step under ZeRO-3?

# %% name="predict-moments" stub="value"
parameters = models.describe("coatnet_tiny").parameters
lab.predict(
    "share-of-moments",
    ### BEGIN SOLUTION
    8 * parameters / 2,
    ### END SOLUTION
)

# %% name="predict-sent" stub="value"
lab.predict(
    "stage-3-sends",
    ### BEGIN SOLUTION
    sent_bytes(4 * parameters, ranks=2, stage=3, micro_batches=1),
    ### END SOLUTION
)

# %% name="run-by-hand" tags=["nbval-ignore-output"]
config = dlojz.RunConfig.of(model="coatnet_tiny", dp=2, micro_batch=4, steps=4)
by_hand = [dlojz.run(config, engine="by_hand", zero=stage) for stage in (1, 2, 3)]
fsdp2 = dlojz.run(config, engine="torch", zero=3)

# %% name="run-deepspeed" tags=["nbval-ignore-output"]
deepspeed = [dlojz.run(config, engine="deepspeed", zero=stage) for stage in range(4)]
everything = [deepspeed[0], *by_hand, fsdp2, *deepspeed[1:]]

# %% name="reveal-moments"
lab.reveal("share-of-moments", by_hand[0].record.footprint().memory.optimizer_bytes)


# %% name="reveal-sent"
def sent_by(run):
    return sum(traffic.sent_bytes for traffic in run.record.footprint().communication if traffic.group == "dp")


lab.reveal("stage-3-sends", sent_by(by_hand[2]))

# %% [markdown] lang="fr"
# Voici tout, pour le rang 0 : en teinte claire, ce qui était prédit ; au-dessous, ce qui est mesuré. À gauche, la
# mémoire des états par catégorie ; le losange est le pic, activations et temporaires compris. À droite, les octets
# envoyés, en passages.

# %% [markdown] lang="en"
# Here is everything, for rank 0: in pale what was predicted, below it what is measured. On the left, the memory of the
# states by category; the diamond is the peak, activations and temporaries included. On the right, the bytes sent, in
# passes.

# %% name="stages" tags=["nbval-ignore-output"]
figures.stages(everything)

# %% [markdown] lang="fr"
# **Expliquez.** Répondez d’abord d’après la figure, la cellule répond ensuite, dans l’ordre. Chaque communication
# a-t-elle déplacé exactement les octets prédits, sur tous les rangs ? Combien de passages par pas, de haut en bas ? Les
# pertes sont-elles, à un pour mille près, les mêmes pour tous ?

# %% [markdown] lang="en"
# **Explain.** Answer from the figure first; then the cell answers, in order. Has each collective moved exactly the
# bytes predicted, on all ranks? How many passes per step, from top to bottom? Are the losses the same for all, within
# one per mille?

# %% name="stages-seen"
print(dlojz.compare(everything).exact)
print([round(sent_by(run) / (4 * parameters / 2), 2) for run in everything])
print([all(abs(a / b - 1) < 1e-3 for a, b in zip(run.losses, fsdp2.losses, strict=True)) for run in everything])

# %% [markdown] lang="fr"
# Trois surprises, que seule la mesure révèle.
#
# - **DeepSpeed envoie 3Ψ aux niveaux 1 et 2**, et non 2Ψ. Par défaut (`use_multi_rank_bucket_allreduce`, même avec
#   `reduce_scatter: true`), il fait un *all-reduce* de chaque *bucket*, dont chaque rang jette ensuite tout sauf sa
#   part, puis un *all-gather* des poids. La règle « les niveaux 1 et 2 ne coûtent rien » est celle de l’article, pas de
#   toute implémentation.
# - **Au niveau 1, DeepSpeed garde aussi peu de gradients qu’au niveau 2** : quand il n’y a qu’un micro-batch par pas,
#   il les réduit au fil de la passe arrière.
# - **DeepSpeed garde une copie maître même en fp32**, où elle fait double emploi.
#
# Et le pic ? Il comprend les activations et les temporaires, que ZeRO ne réduit pas. Les *buckets* s’y ajoutent :
# DeepSpeed les réserve dès le niveau 1, quelle que soit la taille du modèle. Sur un modèle minuscule, ZeRO peut donc
# *augmenter* le pic ; sur un grand, ces tampons ne pèsent plus rien.
#
# Changez d’échelle : ce que la prédiction dit de CoAtNet-7 sur 64 GPU, en bf16 avec DeepSpeed, et ce que dit la
# formule de l’exercice 1. Chaque ligne donne le niveau, puis les deux valeurs par rang. Où diffèrent-elles, et
# pourquoi ?
#
# <details><summary>Réponse</summary>
#
# Au niveau 1. La formule y compte des gradients entiers, 2Ψ, comme l’article ; DeepSpeed, avec un micro-batch par pas,
# n’en garde que sa part, comme au niveau 2.
#
# </details>

# %% [markdown] lang="en"
# Three surprises, which only measuring reveals.
#
# - **DeepSpeed sends 3Ψ in stages 1 and 2**, not 2Ψ. By default (`use_multi_rank_bucket_allreduce`, even with
#   `reduce_scatter: true`) it makes an all-reduce of each bucket, of which every rank then throws away all but its
#   share, and afterwards an all-gather of the weights. The rule “stages 1 and 2 cost nothing” is the paper's, not that
#   of every implementation.
# - **In stage 1 DeepSpeed keeps as few gradients as in stage 2**: where a step has one micro-batch, it reduces them on
#   the way through backward.
# - **DeepSpeed keeps a master copy even in fp32**, where it is of no use.
#
# And the peak? It includes activations and temporaries, which ZeRO does not reduce. The buckets come on top: DeepSpeed
# sets them aside from stage 1 on, whatever the size of the model. So on a tiny model ZeRO can *raise* the peak; on a
# large one these buffers weigh nothing.
#
# Now change the scale: what the prediction says of CoAtNet-7 on 64 GPUs, in bf16 with DeepSpeed, and what the formula
# of exercise 1 says. Each line gives the stage, then the two values per rank. Where do they differ, and why?
#
# <details><summary>Answer</summary>
#
# In stage 1. There the formula counts whole gradients, 2Ψ, as the paper does; DeepSpeed, with one micro-batch per step,
# keeps only its share of them, as in stage 2.
#
# </details>

# %% name="at-scale"
from dlojz.prediction.shapes import model_shapes
from dlojz.prediction.states import predict_states

for stage in range(4):
    large = dlojz.RunConfig.of(
        model="coatnet_7", data="synthetic", precision="bf16", engine="deepspeed", dp=64, zero=stage
    )
    shapes = model_shapes(large)
    by_formula = bytes_per_parameter("bf16", "adam", zero=stage, dp=64).device_bytes(shapes.num_parameters)
    print(stage, format_bytes(predict_states(large, shapes).states_bytes), format_bytes(by_formula))

# %% [markdown] lang="fr"
# ## 7. La configuration de DeepSpeed
#
# DeepSpeed se règle par un fichier JSON. Ses clés principales :
#
# | clé | ce qu’elle dit |
# |--|--|
# | `train_micro_batch_size_per_gpu` | échantillons lus par un rang en une passe avant |
# | `gradient_accumulation_steps` | micro-batches cumulés par pas |
# | `train_batch_size` | le batch global : produit des deux, fois le nombre de rangs |
# | `bf16` | un objet : `{"enabled": true}` |
# | `zero_optimization` | un objet, qui contient les clés suivantes |
# | … `stage` | 0, 1, 2 ou 3 |
# | … `reduce_bucket_size` | gradients réduits ensemble, en **nombre d’éléments** |
# | … `offload_optimizer` | `{"device": "cpu"}` : l’optimiseur dans la mémoire de l’hôte |
# | … `offload_param` | de même pour les poids (niveau 3), en plus d’`offload_optimizer` |
#
# ### Exercice 6 — le JSON de DeepSpeed
#
# Renvoyez, pour un `RunConfig`, le dictionnaire que DeepSpeed lira. Vous trouverez tout dans `config.precision`
# (`"fp32"` ou `"bf16"`) et dans `config.layout` : `zero`, `micro_batch`, `micro_batches`, `global_batch` et `offload`
# (`"none"`, `"optimizer"` ou `"parameters"`). Un *bucket* doit contenir `bucket_mib` Mio de gradients, de 2 octets en
# bf16 et de 4 en fp32.

# %% [markdown] lang="en"
# ## 7. DeepSpeed's configuration
#
# DeepSpeed is set up by a JSON file. Its main keys:
#
# | key | what it says |
# |--|--|
# | `train_micro_batch_size_per_gpu` | samples that one rank reads in one forward pass |
# | `gradient_accumulation_steps` | micro-batches accumulated per step |
# | `train_batch_size` | the global batch: the product of both, times the number of ranks |
# | `bf16` | an object: `{"enabled": true}` |
# | `zero_optimization` | an object, which holds the keys that follow |
# | … `stage` | 0, 1, 2 or 3 |
# | … `reduce_bucket_size` | gradients reduced together, as a **number of elements** |
# | … `offload_optimizer` | `{"device": "cpu"}`: the optimizer in host memory |
# | … `offload_param` | the same for the weights (stage 3), besides `offload_optimizer` |
#
# ### Exercise 6 — DeepSpeed's JSON
#
# Return, for a `RunConfig`, the dictionary that DeepSpeed will read. All you need is in `config.precision` (`"fp32"` or
# `"bf16"`) and in `config.layout`: `zero`, `micro_batch`, `micro_batches`, `global_batch` and `offload` (`"none"`,
# `"optimizer"` or `"parameters"`). A bucket must hold `bucket_mib` MiB of gradients, of 2 bytes in bf16 and 4 in fp32.


# %% name="deepspeed-json"
def deepspeed_settings(config, bucket_mib):
    layout = config.layout
    ### BEGIN SOLUTION
    gradient_bytes = 2 if config.precision == "bf16" else 4
    zero = {"stage": layout.zero, "reduce_bucket_size": int(bucket_mib * 2**20) // gradient_bytes}
    if layout.offload in ("optimizer", "parameters"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "bf16": {"enabled": config.precision == "bf16"},
        "zero_optimization": zero,
    }
    ### END SOLUTION


lab.check("deepspeed-json", deepspeed_settings)

# %%
# lab.hint("deepspeed-json")

# %% [markdown] lang="fr"
# Voici le fichier que le paquet écrit pour ZeRO-2 sur quatre GPU, 28 images chacun, comme on le ferait pour Jean Zay ;
# il le relit ensuite comme le ferait DeepSpeed. Comparez avec le vôtre, `deepspeed_settings(wanted, bucket_mib=50)` :
# que disent les clés de plus, et en quoi les autres diffèrent-elles ?

# %% [markdown] lang="en"
# Here is the file that the package writes for ZeRO-2 on four GPUs, 28 images each, as one would for Jean Zay; it then
# reads it back as DeepSpeed would. Compare it with your own, `deepspeed_settings(wanted, bucket_mib=50)`: what do the
# additional keys say, and where do the others differ?

# %% name="read-back"
from dlojz.config.deepspeed_json import deepspeed_json, read_deepspeed_json

wanted = dlojz.RunConfig.of(
    model="coatnet_2", data="synthetic", precision="bf16", engine="deepspeed", dp=4, zero=2, micro_batch=28
)
text = json.dumps(deepspeed_json(wanted), indent=2)
print(text)
read = read_deepspeed_json(text, dlojz.RunConfig.of(model="coatnet_2", data="synthetic", dp=4))
print(read.title, read.layout.global_batch, read == wanted)

# %% [markdown] lang="fr"
# `gradient_clipping` à zéro : pas d’écrêtage, pour que tous les moteurs fassent le même entraînement.
# `zero_allow_untested_optimizer` : DeepSpeed enveloppe l’optimiseur PyTorch qu’on lui donne, quel qu’il soit. Et
# `data_types` : en bf16, les tampons du modèle (statistiques de *BatchNorm*) sont convertis comme les poids. Votre
# *bucket* de 50 Mio compte 26 214 400 éléments ; le paquet en écrit de 2 millions, à la mesure de ses petits modèles.
# Il omet `train_batch_size`, que DeepSpeed déduit des deux autres tailles.
#
# Enregistré sous `ds_config_zero2.json`, ce fichier se donne à l’entraînement ainsi :
#
# ```
# srun python -m dlojz.train -b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config ds_config_zero2.json
# ```
#
# Une clé que l’on n’écrit pas a aussi une valeur : `reduce_bucket_size` et `allgather_bucket_size`, par exemple, valent
# 500 millions d’éléments. Avec `overlap_comm`, plusieurs sont en route à la fois : la documentation de Transformers
# (Hugging Face) compte 4,5 fois la taille des deux. Combien de mémoire cela fait-il, en 16 bits ?

# %% [markdown] lang="en"
# `gradient_clipping` of zero: no clipping, so that all engines do the same training. `zero_allow_untested_optimizer`:
# DeepSpeed wraps the PyTorch optimizer it is given, whichever it is. And `data_types`: in bf16 the model's buffers
# (BatchNorm's statistics) are cast as the weights are. Your bucket of 50 MiB is 26,214,400 elements; the package writes
# buckets of 2 million, for its small models. It leaves out `train_batch_size`, which DeepSpeed derives from the other
# two sizes.
#
# Saved as `ds_config_zero2.json`, this file is given to the training like this:
#
# ```
# srun python -m dlojz.train -b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config ds_config_zero2.json
# ```
#
# A key that is not written has a value too. `reduce_bucket_size` and `allgather_bucket_size`, for instance, are 500
# million elements. With `overlap_comm` several are on their way at once: the documentation of Hugging Face's
# Transformers counts 4.5 times the size of both. How much memory does that make, in 16 bit?

# %% name="default-buckets"
from dlojz.prediction.rules_of_thumb import REDUCE_BUCKET_ELEMENTS, overlap_buffer_bytes

print(format_bytes(4.5 * 2 * REDUCE_BUCKET_ELEMENTS * 2), format_bytes(overlap_buffer_bytes(REDUCE_BUCKET_ELEMENTS)))

# %% [markdown] lang="fr"
# Plus que les états de bien des modèles : si un modèle moyen ne tient pas en ZeRO, regardez d’abord la taille des
# *buckets*.
#
# ## 8. Décharger vers l’hôte
#
# Et si la mémoire de tous les GPU ne suffit pas ? Un nœud a aussi de la mémoire centrale, souvent plus que tous ses
# GPU réunis. **ZeRO-Offload** y place l’optimiseur, qui ne sert qu’une fois par pas : le gradient y descend dès qu’il
# est réduit, les processeurs font la mise à jour en fp32, et les poids remontent. **ZeRO-Infinity** décharge aussi les
# poids, et sait aller jusqu’aux disques NVMe.
#
# ### Exercice 7 — ce qui se trouve où
#
# ZeRO-3, précision mixte, Adam. Renvoyez deux nombres : les octets d’états d’un rang sur son **GPU**, puis dans la
# **mémoire de l’hôte**. `offload` vaut `"none"`, `"optimizer"` ou `"parameters"` (l’optimiseur *et* les poids).
# L’hôte travaille en fp32 : copie maître, gradient, deux moments. Une fois l’optimiseur déchargé, le GPU ne garde
# que ses poids en 16 bits ; ces derniers gardent leurs 2 octets là où ils vont.

# %% [markdown] lang="en"
# More than the states of many a model: if a middling model does not fit with ZeRO, look at the size of the buckets
# first.
#
# ## 8. Offloading to the host
#
# And if the memory of all GPUs is not enough? A node also has main memory, often more than all its GPUs together.
# **ZeRO-Offload** puts the optimizer there, which is used once per step only: the gradient goes down as soon as it is
# reduced, the processors make the update in fp32, and the weights come back up. **ZeRO-Infinity** offloads the weights
# too, and can go as far as NVMe disks.
#
# ### Exercise 7 — what lies where
#
# ZeRO-3, mixed precision, Adam. Return two numbers: the bytes of a rank's states on its **GPU**, then in **host
# memory**. `offload` is `"none"`, `"optimizer"` or `"parameters"` (the optimizer *and* the weights). The host works in
# fp32: master copy, gradient, two moments. Once the optimizer is offloaded, the GPU keeps only its weights in 16 bit;
# these keep their 2 bytes wherever they go.


# %% name="offload-bytes"
def offload_bytes(parameters, ranks, offload):
    ### BEGIN SOLUTION
    weights, update = 2 * parameters / ranks, (4 + 4 + 4 + 4) * parameters / ranks
    if offload == "none":
        return 16 * parameters / ranks, 0
    if offload == "optimizer":
        return weights, update
    return 0, weights + update
    ### END SOLUTION


lab.check("offload-bytes", offload_bytes)

# %%
# lab.hint("offload-bytes")

# %% [markdown] lang="fr"
# Avec un seul V100 de 32 Go, l’article de ZeRO-Offload annonce des modèles de 13 milliards de paramètres. Voici, sans
# puis avec l’optimiseur déchargé, les octets sur le GPU, ceux de l’hôte, et si les premiers tiennent :

# %% [markdown] lang="en"
# With one single V100 with 32 GB, the paper on ZeRO-Offload announces models of 13 billion parameters. Here are,
# without and then with the optimizer offloaded, the bytes on the GPU, those on the host, and whether the former fit:

# %% name="thirteen-billion"
for offload in ("none", "optimizer"):
    states = bytes_per_parameter("fp16_amp", "adam", zero=3, offload=offload)
    on_device, on_host = states.device_bytes(13 * 10**9), states.host_bytes(13 * 10**9)
    fits_there = on_device <= DEVICES["v100-32"].memory_bytes
    print(f"{offload:<10}", format_bytes(on_device), format_bytes(on_host), fits_there)

# %% [markdown] lang="fr"
# **Votre prédiction.** `coatnet_tiny` en bf16, ZeRO-3 de DeepSpeed sur deux rangs, optimiseur déchargé : combien
# d’octets chaque rang a-t-il dans la mémoire de l’hôte ?

# %% [markdown] lang="en"
# **Your prediction.** `coatnet_tiny` in bf16, DeepSpeed's ZeRO-3 on two ranks, optimizer offloaded: how many bytes does
# each rank have in host memory?

# %% name="predict-host" stub="value"
lab.predict(
    "host-bytes",
    ### BEGIN SOLUTION
    offload_bytes(parameters, 2, "optimizer")[1],
    ### END SOLUTION
)

# %% name="run-offload" tags=["nbval-ignore-output"]
offloaded = dlojz.run(config, engine="deepspeed", zero=3, precision="bf16", offload="optimizer")

# %% name="reveal-host"
memory = offloaded.record.footprint().memory
lab.reveal("host-bytes", memory.host_bytes)

# %% [markdown] lang="fr"
# Que reste-t-il sur le « GPU » (ici, un processus qui n’en a pas) ? Et le paquet avait-il prédit exactement les octets
# de l’hôte ?

# %% [markdown] lang="en"
# What stays on the “GPU” (here, a process without one)? And had the package predicted the host's bytes exactly?

# %% name="host-seen"
print(format_bytes(memory.states_bytes), memory.host_bytes == dlojz.predict(offloaded.config).memory.host_bytes)

# %% [markdown] lang="fr"
# L’écart avec votre formule : DeepSpeed garde aussi chez l’hôte, en 16 bits, les gradients des micro-batches.
#
# ### Quand est-ce rentable ?
#
# À chaque pas, chaque rang envoie sa part des gradients par le bus PCIe, 2Ψ/N octets, et reçoit sa part des poids,
# 2Ψ/N octets. Pendant ce temps, le GPU calcule : environ 6 opérations par paramètre et par *token*, soit 2 pour la
# passe avant et 4 pour la passe arrière. Si le calcul dure plus longtemps que les transferts, il peut les recouvrir.
#
# ### Exercice 8 — les transferts face au calcul
#
# Renvoyez la durée des transferts divisée par celle du calcul, pour un pas, sur un rang. `tokens` est le nombre de
# tokens que **ce rang** lit par pas, `flops_per_s` le nombre d’opérations qu’il fait par seconde, et
# `pcie_bytes_per_s` le débit de son lien vers l’hôte. La taille du modèle n’est pas donnée : vous verrez pourquoi.

# %% [markdown] lang="en"
# The gap to your formula: DeepSpeed also keeps on the host, in 16 bit, the gradients of the micro-batches.
#
# ### When does it pay?
#
# In each step every rank sends its share of the gradients over the PCIe bus, 2Ψ/N bytes, and receives its share of the
# weights, 2Ψ/N bytes. Meanwhile the GPU computes: some 6 operations per parameter and token, 2 in forward and 4 in
# backward. Where the computation takes longer than the transfers, these can be hidden behind it.
#
# ### Exercise 8 — transfers against computation
#
# Return the time of the transfers over that of the computation, for one step, on one rank. `tokens` is the number of
# tokens that **this rank** reads per step, `flops_per_s` the operations it does per second, and `pcie_bytes_per_s` the
# bandwidth of its link to the host. The size of the model is not given: you will see why.


# %% name="offload-time"
def transfer_over_compute(ranks, tokens, flops_per_s, pcie_bytes_per_s):
    ### BEGIN SOLUTION
    transfer = (2 + 2) / ranks / pcie_bytes_per_s
    compute = 6 * tokens / flops_per_s
    return transfer / compute
    ### END SOLUTION


lab.check("offload-time", transfer_over_compute)

# %%
# lab.hint("offload-time")

# %% [markdown] lang="fr"
# **Votre prédiction.** Un GPU qui soutient 400 TFLOP/s, un lien de 25 Go/s, un seul rang : à partir de combien de
# tokens par pas les transferts durent-ils au plus aussi longtemps que le calcul ?

# %% [markdown] lang="en"
# **Your prediction.** A GPU that sustains 400 TFLOP/s, a link of 25 GB/s, one single rank: from how many tokens per
# step on do the transfers take no longer than the computation?

# %% name="predict-tokens" stub="value"
machine = {"flops_per_s": 400e12, "pcie_bytes_per_s": 25e9}
lab.predict(
    "offload-tokens",
    ### BEGIN SOLUTION
    transfer_over_compute(1, 1, **machine),
    ### END SOLUTION
)

# %% name="reveal-tokens"
from dlojz.labs.lab04_zero import exercises_cost

tokens = next(n for n in range(1, 10**6) if exercises_cost.transfer_over_compute(1, n, **machine) <= 1)
lab.reveal("offload-tokens", tokens)

# %% name="offloading"
figures.offloading(transfer_over_compute, **machine)

# %% [markdown] lang="fr"
# Le déchargement demande donc de grands batches ; l’accumulation de gradients y aide, et chaque rang de plus divise les
# transferts. Il faut aussi que les processeurs suivent : Adam lit et écrit une trentaine d’octets par paramètre en
# mémoire hôte, à la vitesse de celle-ci. C’est ce que DeepSpeed optimise avec son `CPUAdam`.
#
# ## 9. Quand ZeRO-3 fait perdre du temps (facultatif)
#
# ZeRO-3 envoie 50 % d’octets de plus que DDP, et surtout beaucoup plus de **messages** : trois communications
# collectives par couche, au lieu de deux pour le modèle entier. Chacune fait p − 1 étapes sur l’anneau, et chaque étape
# paie la latence α (TP 03).
#
# ### Exercice 9 — la durée des communications de ZeRO-3
#
# `layer_bytes` est la liste des tailles des couches. Combien de secondes durent les communications d’un micro-batch, si
# rien ne les cache ? Une étape d’anneau transporte `n / ranks` octets et dure `alpha_s + beta_s_per_byte · n / ranks`.

# %% [markdown] lang="en"
# So offloading asks for large batches; gradient accumulation helps, and every further rank divides the transfers. The
# processors must keep up besides: Adam reads and writes some thirty bytes per parameter there, at the speed of host
# memory. That is what DeepSpeed optimises with its `CPUAdam`.
#
# ## 9. When ZeRO-3 loses (optional)
#
# ZeRO-3 sends 50% more bytes than DDP, and above all many more **messages**: three collectives per layer, in place of
# two for the whole model. Each takes p − 1 steps around the ring, and each step pays the latency α (lab 03).
#
# ### Exercise 9 — the time of ZeRO-3's communication
#
# `layer_bytes` is the list of the sizes of the layers. How many seconds does the communication of one micro-batch take,
# if nothing hides it? A step of the ring carries `n / ranks` bytes and takes `alpha_s + beta_s_per_byte · n / ranks`.


# %% name="zero-time"
def zero_3_seconds(layer_bytes, ranks, alpha_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    return sum(3 * (ranks - 1) * (alpha_s + beta_s_per_byte * n / ranks) for n in layer_bytes)
    ### END SOLUTION


lab.check("zero-time", zero_3_seconds)

# %%
# lab.hint("zero-time")

# %% [markdown] lang="fr"
# Comparons au calcul, pour des modèles de toutes tailles : le réseau du TP 03 (α = 10 µs, 25 Go/s), des GPU qui
# soutiennent 200 TFLOP/s, 16 images par rang en bf16. Les couches et les opérations viennent des prédictions du paquet.

# %% [markdown] lang="en"
# Let us compare with the computation, for models of all sizes: the network of lab 03 (α = 10 µs, 25 GB/s), GPUs that
# sustain 200 TFLOP/s, 16 images per rank in bf16. Layers and operations come from the package's predictions.

# %% name="lost-time"
sizes = ("coatnet_0", "coatnet_2", "coatnet_4", "coatnet_5", "coatnet_7")
figures.lost_time(zero_3_seconds, [(model, 64) for model in sizes])

# %% [markdown] lang="fr"
# Et le plus grand, CoAtNet-7, quand le nombre de GPU augmente :

# %% [markdown] lang="en"
# And the largest, CoAtNet-7, as the number of GPUs grows:

# %% name="lost-time-by-ranks"
figures.lost_time(zero_3_seconds, [("coatnet_7", size) for size in (8, 64, 256, 1024)])

# %% [markdown] lang="fr"
# **Expliquez.** Trois questions, trois réponses calculées. Pour CoAtNet-0, ZeRO-3 communique-t-il plus longtemps qu’il
# ne calcule ? Et pour CoAtNet-7, sur 64 GPU ? Pour ce dernier, de 8 à 1 024 GPU, par combien le temps de communication
# est-il multiplié ?

# %% [markdown] lang="en"
# **Explain.** Three questions, three computed answers. For CoAtNet-0, does ZeRO-3 communicate longer than it computes?
# And for CoAtNet-7, on 64 GPUs? For the latter, from 8 to 1,024 GPUs, by how much is the time of communication
# multiplied?

# %% name="lost-time-seen"
figures.lost_time_seen(zero_3_seconds)

# %% [markdown] lang="fr"
# Sur un petit modèle, ZeRO-3 fait perdre sur les deux tableaux : rien à gagner en mémoire, et des latences que rien ne
# cache. Sur un grand, le calcul les couvre, jusqu’à un certain nombre de GPU. D’où l’usage : ZeRO-1 ou 2 tant que le
# modèle tient, ZeRO-3 sinon ; et à grande échelle, ZeRO-3 dans le nœud seulement, DDP entre les nœuds (*hybrid
# sharding*).

# %% [markdown] lang="en"
# On a small model ZeRO-3 loses twice: no memory to be gained, and latencies that nothing hides. On a large one the
# computation covers them, up to some number of GPUs. Hence the custom: ZeRO-1 or 2 as long as the model fits, ZeRO-3
# otherwise; and at a large scale, ZeRO-3 within the node only, DDP between nodes (hybrid sharding).

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Partitionnez le modèle du script par FSDP2, bloc par bloc (un choix de plus pour `--parallel`), enregistrez-le et
# reprenez-le sur un autre nombre de rangs (`--save`, `--load`). Continuez dans votre `train.py`, ou partez de la
# solution du TP précédent : `dlojz labs script 04 un_autre_dossier` en écrit un, avec un `# TODO` à chaque endroit à
# compléter. Jugez-le par `dlojz labs judge 04 my_training/train.py`.
#
# À regarder : chaque rang tient une part des paramètres, et le checkpoint écrit par deux rangs est lu par un seul,
# moments de l’optimiseur compris.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# for block in model.blocks:
#     fully_shard(block)
# fully_shard(model)
# weights, moments = get_state_dict(model, optimizer)
# dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=args.save)
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Shard the script's model by FSDP2, block by block (one more choice of `--parallel`), save it and go on with another
# number of ranks (`--save`, `--load`). Go on in your `train.py`, or begin with the solution of the lab before:
# `dlojz labs script 04 another_folder` writes one, with a `# TODO` at each place to fill in. Judge it by
# `dlojz labs judge 04 my_training/train.py`.
#
# What to look for: each rank holds a part of the parameters, and the checkpoint that two ranks have written is read by
# one, the optimizer's moments included.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# for block in model.blocks:
#     fully_shard(block)
# fully_shard(model)
# weights, moments = get_state_dict(model, optimizer)
# dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=args.save)
# ```
#
# </details>

# %% name="judge-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | niveau | chaque rang garde | envoie par pas | quand |
# |--|--|--|--|
# | 0 | 16Ψ | 2Ψ | le modèle tient |
# | 1 | 4Ψ + 12Ψ/N | 2Ψ (DeepSpeed : 3Ψ) | presque toujours : le plus gros gain, pour presque rien |
# | 2 | 2Ψ + 14Ψ/N | 2Ψ (DeepSpeed : 3Ψ) | sans accumulation de gradients |
# | 3 | 16Ψ/N | 3Ψ par micro-batch | le modèle ne tient pas autrement |
#
# Les niveaux 1 à 3 répartissent les états, pas les activations : pour elles, il y a les points de contrôle d’activation
# (TP 02), que ZeRO-R, dans le même article, sait répartir sur les rangs de tenseur (`partition_activations` de
# DeepSpeed). Et une couche trop grande pour un GPU doit toujours y tenir entière, le temps du calcul : seul le TP 06,
# qui coupe les couches, lève cette limite (un pipeline, TP 05, coupe entre elles).

# %% [markdown] lang="en"
# ## Summary
#
# | stage | each rank keeps | sends per step | when |
# |--|--|--|--|
# | 0 | 16Ψ | 2Ψ | the model fits |
# | 1 | 4Ψ + 12Ψ/N | 2Ψ (DeepSpeed: 3Ψ) | nearly always: the largest gain, for next to nothing |
# | 2 | 2Ψ + 14Ψ/N | 2Ψ (DeepSpeed: 3Ψ) | without gradient accumulation |
# | 3 | 16Ψ/N | 3Ψ per micro-batch | the model does not fit otherwise |
#
# Stages 1 to 3 shard the states, not the activations: for these there is activation checkpointing (lab 02), and ZeRO-R,
# from the same paper, can partition the checkpoints over the tensor-parallel ranks (DeepSpeed's
# `partition_activations`). And a layer that is too large for one GPU must still fit there whole while it computes: only
# lab 06, which splits layers, lifts that limit (a pipeline, lab 05, cuts between them).

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
