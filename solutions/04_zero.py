# %% [markdown] lang="fr"
# # TP 04 — ZeRO
#
# En *Data Parallelism*, chaque réplique garde tout : les poids, les gradients, les états de l’optimiseur. Avec 64 GPU,
# le même octet existe donc 64 fois. **ZeRO** (*Zero Redundancy Optimizer*, Rajbhandari et al., 2020) supprime ces
# copies, en trois temps : chaque rang n’en garde qu’une part, et demande le reste aux autres. Le calcul ne change pas ;
# la mémoire gagnée se paie en communication. Vous écrivez les trois niveaux (*stages*), puis mesurez ceux de DeepSpeed
# et de PyTorch.
#
# À la fin, vous saurez :
#
# - dire combien d’octets chaque rang garde et envoie à chaque niveau, et ce que cela coûte en secondes ;
# - répartir à la main l’optimiseur, puis les gradients, puis les poids ;
# - écrire la configuration JSON de DeepSpeed, et décharger l’optimiseur vers l’hôte.
#
# Comptez une heure et demie. Quatre rangs suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 04 — ZeRO
#
# In data parallelism every replica keeps everything: weights, gradients, optimizer states. With 64 GPUs the same byte
# thus exists 64 times. **ZeRO** (Zero Redundancy Optimizer, Rajbhandari et al., 2020) does away with these copies, in
# three stages: each rank keeps only a share, and asks the others for the rest. The computation is the same; the memory
# saved is paid for in communication. In this lab you write the three stages yourself, then you measure those of
# DeepSpeed and PyTorch.
#
# By the end you can:
#
# - tell how many bytes each rank keeps and sends in each stage, and what that costs in seconds;
# - shard by hand the optimizer, then the gradients, then the weights;
# - write DeepSpeed's JSON configuration, and offload the optimizer to the host.
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
from dlojz.base.language import decimal, yes_no
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
# Bloqué ? Décommentez ; deux exécutions donnent le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("zero-states")

# %% [markdown] lang="fr"
# Voici le tableau 1 de l’article, à côté du calcul de votre fonction :

# %% [markdown] lang="en"
# Here is table 1 of the paper, beside what your function computes:

# %% name="published"
figures.table_1(state_bytes)

# %% [markdown] lang="fr"
# En image, pour 7,5 milliards de paramètres : les niveaux 1 et 2 butent sur ce qu’ils ne répartissent pas.

# %% [markdown] lang="en"
# As a picture, for 7.5 billion parameters: stages 1 and 2 stop at what they do not partition.

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
# Un H100 « de 80 Go » en offre 79 Gio, soit 85 Go. Il faut aussi loger les activations, que les niveaux 1 à 3 ne
# répartissent pas : chaque rang a les siennes.
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
# Les deux moitiés, sur quatre rangs.

# %% [markdown] lang="en"
# An H100 “with 80 GB” offers 79 GiB, or 85 GB. The activations need room too, and stages 1 to 3 do not partition these:
# each rank has its own.
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
# The two halves, on four ranks.

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
# Après le *reduce-scatter*, chacun détient deux nombres de la somme ; l’*all-gather* les réunit. L’optimiseur travaille
# entre les deux : écrivons les étapes 2 et 3.
#
# ### Exercice 2 — répartir l’optimiseur
#
# `weights` contient tous les poids, bout à bout, dans un vecteur dont la longueur est un multiple du nombre de rangs ;
# il est le même partout. `make_optimizer([tenseur])` crée un optimiseur PyTorch pour ce tenseur. Renvoyez une fonction
# `step(gradient)`, que l’on appellera à chaque pas : `gradient` est la part de **ce rang** dans le gradient moyen.
# Après `step`, `weights` doit être à jour, en entier, sur tous les rangs. Les octets comptent aussi : n’envoyez que ce
# qu’il faut.
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
# up to date, whole, on all ranks. Bytes count, too: send only what is needed.
#
# - `weights.chunk(size)[i]` is a view: to write there is to write in `weights`;
# - an optimizer reads the gradient of a tensor `t` in `t.grad`;
# - `dist.all_gather_into_tensor(whole, share)` lays the shares of all ranks end to end.


# %% name="shard-optimizer"
def shard_optimizer(weights, make_optimizer):
    rank, size = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    share = weights.chunk(size)[rank]
    share_optimizer = make_optimizer([share])

    def step(gradient):
        share.grad = gradient
        share_optimizer.step()
        dist.all_gather_into_tensor(weights, share)

    return step
    ### END SOLUTION


lab.check("shard-optimizer", shard_optimizer)

# %%
# lab.hint("shard-optimizer")

# %% [markdown] lang="fr"
# On a le droit de couper n’importe où, même au milieu d’une matrice, car Adam traite chaque nombre séparément. Un
# optimiseur qui regarde une couche entière (LAMB et sa norme, Muon et sa matrice) ne se répartit pas ainsi.
#
# ## 3. Niveau 2 : les gradients
#
# Reste l’étape 1. Pendant la passe arrière, un rang calcule les gradients de tout le modèle, mais sur ses seules
# données. De leur moyenne, il ne lui faut que sa part.
#
# ### Exercice 3 — répartir les gradients
#
# `gradients` est la liste des gradients de ce rang, de formes quelconques. Renvoyez sa part de leur **moyenne** sur les
# rangs : un vecteur, obtenu en mettant les gradients bout à bout, puis en complétant par des zéros **à la fin** jusqu’à
# un multiple du nombre de rangs. Le rang r possède le r-ième des N morceaux égaux.
#
# - `dist.reduce_scatter_tensor(part, entier)` additionne les vecteurs `entier` de tous les rangs, et met le morceau de
#   ce rang dans `part`, N fois plus court ;
# - `F.pad(vecteur, (a, b))` ajoute `a` zéros devant et `b` derrière.

# %% [markdown] lang="en"
# One may cut anywhere, even in the middle of a matrix, because Adam treats each number by itself. An optimizer that
# looks at a whole layer (LAMB and its norm, Muon and its matrix) cannot be sharded in this way.
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
# deviennent des vues du vecteur `flat.whole`. La dernière ligne affiche sa longueur, celle de la part, et dit si les
# pertes suivent celles d’un processus seul, à un pour mille près.

# %% [markdown] lang="en"
# Now four ranks, with your two functions. `FlatWeights` lays the weights end to end: the model's parameters become
# views of the vector `flat.whole`. The last line prints its length, that of the share, and whether the losses follow
# those of one process, within one per mille.

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
# le *reduce-scatter*. Pour ne jamais les avoir tous, on réduit et libère chaque *bucket* dès qu’il est plein (TP 03).
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
# contient celles de ce rang. `gather(share)` les rassemble. Écrivez les deux passes d’une `torch.autograd.Function` :
#
# - `forward` renvoie `y`, et confie à `context.save_for_backward` ce dont `backward` aura besoin : **pas** la matrice
#   entière ;
# - `backward` reçoit le gradient de la perte par rapport à `y`. Elle renvoie deux gradients : celui de `x`, qui
#   appartient à ce rang, et celui de `share`, soit les lignes de ce rang dans la **moyenne** sur les rangs du gradient
#   de W.
#
# Les octets comptent aussi : un rang ne reçoit, du gradient de W, que ses lignes. Rappel : le gradient de W est
# `gradient.T @ x`, celui de `x` est `gradient @ W`.

# %% [markdown] lang="en"
# That is stage 2, but for one detail: here the whole gradients still exist for a moment, between backward and the
# reduce-scatter. Never to have all of them, each bucket is reduced and freed as soon as it is full (lab 03).
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
# Bytes count, too: of W's gradient, a rank receives its own rows alone. Reminder: the gradient of W is
# `gradient.T @ x`, that of `x` is `gradient @ W`.


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
# Le paquet contient les trois niveaux, pour n’importe quel modèle : [stage1.py](../../dlojz/by_hand/zero/stage1.py),
# [stage2.py](../../dlojz/by_hand/zero/stage2.py) et [stage3.py](../../dlojz/by_hand/zero/stage3.py), de moins de
# 300 lignes chacun. Cherchez-y : au niveau 3, combien de blocs sont entiers au même moment, et pourquoi plus d’un ?
#
# La boucle d’entraînement est la même pour les trois. Chaque ligne affiche, pour un niveau, le nombre de poids présents
# en entier entre deux pas, celui de la part, et si les pertes suivent celles d’un processus seul.

# %% [markdown] lang="en"
# The package holds the three stages, for any model: [stage1.py](../../dlojz/by_hand/zero/stage1.py),
# [stage2.py](../../dlojz/by_hand/zero/stage2.py) and [stage3.py](../../dlojz/by_hand/zero/stage3.py), each in less
# than 300 lines. Look there: in stage 3, how many blocks are whole at the same moment, and why more than one?
#
# The training loop is the same for all three. Each line prints, for one stage, the number of weights that are there in
# full between two steps, that of the share, and whether the losses follow those of one process.

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
# Deux blocs sont entiers : celui qui calcule, et le suivant, dont les poids arrivent pendant ce temps (*prefetch*).
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
# Two blocks are whole: the one that computes, and the next, whose weights arrive meanwhile (prefetch).
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
# à la main, et **FSDP2**, le ZeRO-3 de PyTorch. Tout est ici en fp32 : poids 4, gradients 4, moments 8 octets par
# paramètre.
#
# **Vos prédictions**, avant de lancer. Combien d’octets de moments d’Adam chaque rang garde-t-il à partir du niveau 1 ?
# Et combien d’octets envoie-t-il par pas en ZeRO-3 ?

# %% [markdown] lang="en"
# ## 6. The stages side by side
#
# Let us train `coatnet_tiny` on two ranks with all engines: DeepSpeed in stages 0 to 3, the three stages written by
# hand, and **FSDP2**, PyTorch's ZeRO-3. All is in fp32 here: 4 bytes of weights, 4 of gradients, 8 of moments per
# parameter.
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
# Voici tout, pour le rang 0 : en teinte claire la prédiction, au-dessous la mesure. À gauche, les états ; le losange
# est le pic, activations comprises. À droite, les octets envoyés, en passages.

# %% [markdown] lang="en"
# Here is everything, for rank 0: the prediction in a pale shade, the measurement below it. On the left, the states; the
# diamond is the peak, activations included. On the right, the bytes sent, in passes.

# %% name="stages" tags=["nbval-ignore-output"]
figures.stages(everything)

# %% [markdown] lang="fr"
# **Expliquez**, d’après la figure ; la cellule répond ensuite. Chaque communication a-t-elle déplacé exactement les
# octets prédits ? Combien de passages par pas ? Les pertes sont-elles les mêmes, à un pour mille près ?

# %% [markdown] lang="en"
# **Explain**, from the figure; then the cell answers. Has each collective moved exactly the bytes predicted? How many
# passes per step? Are the losses the same, within one per mille?

# %% name="stages-seen"
print("bytes as predicted: // octets comme prédit :", yes_no(dlojz.compare(everything).exact))
print("passes: // passages :", *(decimal(sent_by(run) / (4 * parameters / 2), 2) for run in everything))
same = (all(abs(a / b - 1) < 1e-3 for a, b in zip(run.losses, fsdp2.losses, strict=True)) for run in everything)
print("same losses: // mêmes pertes :", *map(yes_no, same))

# %% [markdown] lang="fr"
# Trois surprises, que seule la mesure révèle.
#
# - **DeepSpeed envoie 3Ψ aux niveaux 1 et 2**, et non 2Ψ. Par défaut, il fait un *all-reduce* de chaque *bucket*, dont
#   chaque rang jette ensuite tout sauf sa part, puis un *all-gather* des poids. La règle « les niveaux 1 et 2 ne
#   coûtent rien » est celle de l’article.
# - **Au niveau 1, DeepSpeed garde aussi peu de gradients qu’au niveau 2** : quand il n’y a qu’un micro-batch par pas,
#   il les réduit au fil de la passe arrière.
# - **DeepSpeed garde une copie maître même en fp32**, où elle fait double emploi.
#
# Et le pic ? Les activations, les temporaires et les *buckets* s’y ajoutent : sur un modèle minuscule, ZeRO peut donc
# *augmenter* le pic.
#
# ## 7. Et en secondes ?
#
# La durée d’un pas dépend aussi du calcul et de la mise à jour. Prenons sur deux rangs un modèle de six couches de 512
# × 512, et mesurons tout à tour de rôle. D’abord DDP :

# %% [markdown] lang="en"
# Three surprises, which only measuring reveals.
#
# - **DeepSpeed sends 3Ψ in stages 1 and 2**, not 2Ψ. By default it makes an all-reduce of each bucket, of which every
#   rank then discards all but its share, and afterwards an all-gather of the weights. The rule “stages 1 and 2 cost
#   nothing” is the paper's.
# - **In stage 1 DeepSpeed keeps as few gradients as in stage 2**: where a step has only one micro-batch, it reduces
#   them in the course of backward.
# - **DeepSpeed keeps a master copy even in fp32**, where it is redundant.
#
# And the peak? Activations, temporaries and buckets come on top: so on a tiny model ZeRO can *raise* the peak.
#
# ## 7. And in seconds?
#
# The time of a step also depends on the computation and the update. Let us take a model of six layers of 512 × 512 on
# two ranks, and measure everything in turns. First DDP:

# %% name="ddp" tags=["nbval-ignore-output"]
# %%ranks 2
import warnings

from torch import nn
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore", category=FutureWarning)


def make_wide():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)])


x = torch.randn(64, 512)
ddp = DistributedDataParallel(make_wide())
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)


def ddp_step():
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


ddp_step()

# %% [markdown] lang="fr"
# FSDP2, sans intermédiaire : `fully_shard` sur chaque couche, puis sur le modèle. La boucle ne change pas.

# %% [markdown] lang="en"
# FSDP2, with nothing in between: `fully_shard` on each layer, then on the model. The loop stays the same.

# %% name="fsdp2-in-the-open"
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sharded = make_wide()
mesh = init_device_mesh("cpu", (world_size,))
for layer in sharded:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
optimizer_sharded = torch.optim.AdamW(sharded.parameters(), lr=1e-4)


def fsdp2_step():
    sharded(x).square().mean().backward()
    optimizer_sharded.step()
    optimizer_sharded.zero_grad()


# %% [markdown] lang="fr"
# Enfin ZeRO-1, les trois passages de ZeRO-3 sans rien d’autre, et la mesure : neuf tours, un pas de chacun par tour.

# %% [markdown] lang="en"
# Last, ZeRO-1, the three passes of ZeRO-3 and nothing else, and the measurement: nine rounds, a step of each per round.

# %% name="zero-1-and-passes"
# %%ranks
from dlojz.by_hand.zero import ZeroStage1

zero_1 = ZeroStage1(make_wide(), lambda tensors: torch.optim.AdamW(tensors, lr=1e-4))
whole = torch.zeros(sum(parameter.numel() for parameter in ddp.parameters()))
share = torch.zeros(len(whole) // world_size)


def zero_1_step():
    zero_1.backward(zero_1(x).square().mean())
    zero_1.step()


def three_passes():
    dist.all_gather_into_tensor(whole, share)
    dist.all_gather_into_tensor(whole, share)
    dist.reduce_scatter_tensor(share, whole)


# %% name="in-turns"
# %%ranks
import time

ways = {
    "all-reduce": lambda: dist.all_reduce(whole),
    "all-gather": lambda: dist.all_gather_into_tensor(whole, share),
    "reduce-scatter": lambda: dist.reduce_scatter_tensor(share, whole),
    "computation // calcul": lambda: ddp.module(x).square().mean().backward(),
    "update // mise à jour": optimizer.step,
    "DDP": ddp_step,
    "three passes // trois passes": three_passes,
    "ZeRO-1": zero_1_step,
    "FSDP2": fsdp2_step,
}
took = {name: [] for name in ways}
for turn in range(11):
    for name, way in ways.items():
        dist.barrier()
        start = time.perf_counter()
        way()
        dist.barrier()
        if turn > 1:  # the first two warm up // les deux premiers tours servent d’échauffement
            took[name].append(time.perf_counter() - start)

# %% name="parts" tags=["nbval-ignore-output"]
from statistics import median

took = ranks["took"][0]
parts = {name: median(took[name]) for name in list(took)[:6]}
for name, time_s in parts.items():
    print(f"{name:<14} {decimal(1e3 * time_s):>6} ms")

# %% [markdown] lang="fr"
# **Vos prédictions**, à partir de ces durées, dans `parts`. Combien de secondes durent les trois passages de
# ZeRO-3 ? Combien d’échantillons par seconde ZeRO-1 lit-il (64 par rang) ? Et par combien la durée d’un pas est-elle
# multipliée quand on passe de DDP à FSDP2, si rien n’est recouvert ?

# %% [markdown] lang="en"
# **Your predictions**, from these times, in `parts`. How many seconds do the three passes of ZeRO-3 take? How many
# samples per second does ZeRO-1 read (64 per rank)? And by how much is the time of a step multiplied when one goes from
# DDP to FSDP2, if nothing is hidden?

# %% name="predict-passes" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "three-passes",
    ### BEGIN SOLUTION
    2 * parts["all-gather"] + parts["reduce-scatter"],
    ### END SOLUTION
)

# %% name="predict-samples" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "zero-1-samples",
    ### BEGIN SOLUTION
    2 * 64 / (parts["computation // calcul"] + parts["reduce-scatter"] + parts["all-gather"]
              + parts["update // mise à jour"] / 2),
    ### END SOLUTION
)

# %% name="predict-fsdp2" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "fsdp2-over-ddp",
    ### BEGIN SOLUTION
    (parts["computation // calcul"] + 2 * parts["all-gather"] + parts["reduce-scatter"]
     + parts["update // mise à jour"] / 2) / parts["DDP"],
    ### END SOLUTION
)

# %% name="reveal-seconds" tags=["nbval-ignore-output"]
lab.reveal("three-passes", median(took["three passes // trois passes"]))
lab.reveal("zero-1-samples", 2 * 64 / median(took["ZeRO-1"]))
lab.reveal("fsdp2-over-ddp", median(fsdp2 / ddp for fsdp2, ddp in zip(took["FSDP2"], took["DDP"], strict=True)))

# %% [markdown] lang="fr"
# Comparez : avec gloo, un reduce-scatter coûte plus qu’un all-reduce, pour deux fois moins d’octets. L’écart de FSDP2
# est grand : nos trois passages sont trois messages ; FSDP2 en envoie trois **par couche**, soit 18, dont chacun paie
# sa latence, et recopie les parts dans un tampon. Sur un GPU, le réseau travaille pendant le calcul ; ici, les mêmes
# cœurs font les deux.
#
# ## 8. La configuration de DeepSpeed
#
# DeepSpeed se règle par un fichier JSON. Ses clés :
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
# Renvoyez, pour un `RunConfig`, le dictionnaire que DeepSpeed lira. Tout est dans `config.precision` (`"fp32"` ou
# `"bf16"`) et dans `config.layout` : `zero`, `micro_batch`, `micro_batches`, `global_batch` et `offload` (`"none"`,
# `"optimizer"` ou `"parameters"`). Un *bucket* doit contenir `bucket_mib` Mio de gradients, de 2 octets en bf16 et de 4
# en fp32.

# %% [markdown] lang="en"
# Compare: with gloo, a reduce-scatter costs more than an all-reduce, for half the bytes. The gap of FSDP2 is large: our
# three passes are three messages; FSDP2 sends three **per layer**, that is 18, each of which pays its latency, and it
# copies the shares into a buffer. On a GPU the network works during the computation; here the same cores do both.
#
# ## 8. DeepSpeed's configuration
#
# DeepSpeed is set up by a JSON file. Its keys:
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
# Voici le fichier que le paquet écrit pour ZeRO-2 sur quatre GPU, 28 images chacun ; il le relit comme le ferait
# DeepSpeed.

# %% [markdown] lang="en"
# Here is the file that the package writes for ZeRO-2 on four GPUs, 28 images each; it reads it back as DeepSpeed would.

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
# Trois clés changent la communication. `contiguous_gradients` copie chaque gradient, dès qu’il est prêt, dans un tampon
# d’un seul tenant : un *bucket* part sans être rassemblé, et la mémoire ne se fragmente pas. `reduce_scatter` demande
# que chaque rang ne reçoive que sa part des gradients ; nous avons pourtant compté 3Ψ : pour un *bucket* qui appartient
# à plusieurs rangs, DeepSpeed fait un *all-reduce*, sauf si `use_multi_rank_bucket_allreduce` vaut `false`.
# `overlap_comm` réduit pendant la passe arrière. Si le modèle ne tient pas, réduisez d’abord `reduce_bucket_size`, 500
# millions d’éléments par défaut.
#
# ## 9. Décharger vers l’hôte
#
# Et si tous les GPU ensemble ne suffisent pas ? **ZeRO-Offload** place l’optimiseur dans la mémoire du nœud : le
# gradient y descend dès qu’il est réduit, les processeurs font la mise à jour en fp32, et les poids remontent.
# **ZeRO-Infinity** décharge aussi les poids, jusque sur des disques NVMe.
#
# ### Exercice 7 — ce qui se trouve où
#
# ZeRO-3, précision mixte, Adam. Renvoyez deux nombres : les octets d’états d’un rang sur son **GPU**, puis dans la
# **mémoire de l’hôte**. `offload` vaut `"none"`, `"optimizer"` ou `"parameters"` (l’optimiseur *et* les poids). L’hôte
# travaille en fp32 : copie maître, gradient, deux moments. Une fois l’optimiseur déchargé, le GPU ne garde que ses
# poids en 16 bits ; ceux-ci prennent 2 octets où qu’ils soient.

# %% [markdown] lang="en"
# Three keys change the communication. `contiguous_gradients` copies each gradient, as soon as it is ready, into one
# buffer in one piece: a bucket leaves without being gathered first, and memory is not fragmented. `reduce_scatter` asks
# that each rank receive only its share of the gradients; yet we have counted 3Ψ: for a bucket that belongs to several
# ranks DeepSpeed makes an all-reduce, unless `use_multi_rank_bucket_allreduce` is `false`. `overlap_comm` reduces
# during the backward pass. If a model does not fit, first reduce `reduce_bucket_size`, which is 500 million elements by
# default.
#
# ## 9. Offloading to the host
#
# And if all the GPUs together are not enough? **ZeRO-Offload** puts the optimizer into the node's memory: the gradient
# goes down as soon as it is reduced, the processors make the update in fp32, and the weights come back up.
# **ZeRO-Infinity** offloads the weights too, as far as NVMe disks.
#
# ### Exercise 7 — what lies where
#
# ZeRO-3, mixed precision, Adam. Return two numbers: the bytes of a rank's states on its **GPU**, then in **host
# memory**. `offload` is `"none"`, `"optimizer"` or `"parameters"` (the optimizer *and* the weights). The host works in
# fp32: master copy, gradient, two moments. Once the optimizer is offloaded, the GPU keeps only its weights in 16 bit;
# these take 2 bytes wherever they are.


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
# L’écart avec votre formule : DeepSpeed garde aussi chez l’hôte, en 16 bits, les gradients des micro-batches.
#
# ### Quand est-ce rentable ?
#
# À chaque pas, chaque rang envoie sa part des gradients par le bus PCIe, 2Ψ/N octets, puis reçoit sa part des poids,
# 2Ψ/N octets. Pendant ce temps, le GPU calcule : environ 6 opérations par paramètre et par token, soit 2 pour la passe
# avant et 4 pour la passe arrière. Si le calcul dure plus longtemps que les transferts, il peut les recouvrir.
#
# ### Exercice 8 — les transferts face au calcul
#
# Renvoyez la durée des transferts divisée par celle du calcul, pour un pas, sur un rang. `tokens` est le nombre de
# tokens que **ce rang** lit par pas, `flops_per_s` le nombre d’opérations qu’il fait par seconde, et `pcie_bytes_per_s`
# le débit de son lien vers l’hôte. La taille du modèle n’est pas donnée : vous verrez pourquoi.

# %% [markdown] lang="en"
# The gap to your formula: DeepSpeed also keeps on the host, in 16 bit, the gradients of the micro-batches.
#
# ### When does it pay?
#
# In each step every rank sends its share of the gradients over the PCIe bus, 2Ψ/N bytes, then receives its share of the
# weights, 2Ψ/N bytes. Meanwhile the GPU computes: some 6 operations per parameter and token, 2 in forward and 4 in
# backward. Where the computation takes longer than the transfers, these can be hidden behind it.
#
# ### Exercise 8 — transfers against computation
#
# Return the time of the transfers divided by that of the computation, for one step, on one rank. `tokens` is the number
# of tokens that **this rank** reads per step, `flops_per_s` the operations it does per second, and `pcie_bytes_per_s`
# the bandwidth of its link to the host. The size of the model is not given: you will see why.


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
# Le déchargement demande donc de grands batches ; l’accumulation de gradients y aide.
#
# ## 10. Quand ZeRO-3 fait perdre du temps (facultatif)
#
# Revenons aux **messages** : trois communications collectives par couche, au lieu de deux pour le modèle entier.
# Chacune fait p − 1 étapes sur l’anneau, et chaque étape paie la latence α (TP 03).
#
# ### Exercice 9 — la durée des communications de ZeRO-3
#
# `layer_bytes` est la liste des tailles des couches, en octets. Combien de secondes durent les communications d’un
# micro-batch, si rien ne les cache ? Une étape d’anneau transporte `n / ranks` octets et dure
# `alpha_s + beta_s_per_byte · n / ranks`.

# %% [markdown] lang="en"
# So offloading asks for large batches; gradient accumulation helps.
#
# ## 10. When ZeRO-3 loses time (optional)
#
# Back to the **messages**: three collectives per layer, in place of two for the whole model. Each takes p − 1 steps
# around the ring, and each step pays the latency α (lab 03).
#
# ### Exercise 9 — the time of ZeRO-3's communication
#
# `layer_bytes` is the list of the sizes of the layers, in bytes. How many seconds does the communication of one
# micro-batch take, if nothing hides it? A step of the ring carries `n / ranks` bytes and takes
# `alpha_s + beta_s_per_byte · n / ranks`.


# %% name="zero-time"
def zero_3_seconds(layer_bytes, ranks, alpha_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    return sum(3 * (ranks - 1) * (alpha_s + beta_s_per_byte * n / ranks) for n in layer_bytes)
    ### END SOLUTION


lab.check("zero-time", zero_3_seconds)

# %%
# lab.hint("zero-time")

# %% [markdown] lang="fr"
# Comparons au calcul, de CoAtNet-0 à CoAtNet-7 sur 64 GPU : réseau du TP 03, 200 TFLOP/s, 16 images par rang en bf16.

# %% [markdown] lang="en"
# Let us compare with the computation, from CoAtNet-0 to CoAtNet-7 on 64 GPUs: the network of lab 03, 200 TFLOP/s, 16
# images per rank in bf16.

# %% name="lost-time"
sizes = ("coatnet_0", "coatnet_2", "coatnet_4", "coatnet_5", "coatnet_7")
figures.lost_time(zero_3_seconds, [(model, 64) for model in sizes])

# %% [markdown] lang="fr"
# **Expliquez.** Où ZeRO-3 communique-t-il plus longtemps qu’il ne calcule ? Et de 8 à 1 024 GPU, par combien ce temps
# est-il multiplié ?

# %% [markdown] lang="en"
# **Explain.** Where does ZeRO-3 communicate longer than it computes? And from 8 to 1,024 GPUs, by how much is that time
# multiplied?

# %% name="lost-time-seen"
figures.lost_time_seen(zero_3_seconds)

# %% [markdown] lang="fr"
# D’où l’usage : ZeRO-1 ou 2 tant que le modèle tient, ZeRO-3 sinon ; et à grande échelle, ZeRO-3 dans le nœud
# seulement, DDP entre les nœuds (*hybrid sharding*).

# %% [markdown] lang="en"
# Hence the usual practice: ZeRO-1 or 2 as long as the model fits, ZeRO-3 otherwise; and at a large scale, ZeRO-3 within
# the node only, DDP between nodes (hybrid sharding).

# %% [markdown] lang="fr"
# ## Défi (facultatif) — le moins de messages possible
#
# Quatre couches, dont les poids entiers pèsent 6, 2, 3 et 5 Mio ; leurs gradients, autant. Chaque rang garde ses parts,
# comme en ZeRO-3, et dispose à côté de **12 Mio** pour tout ce qui est entier. Écrivez une fonction sans argument qui
# renvoie un plan, une liste d’opérations :
#
# - `("gather", [0, 1])` : un *all-gather* des poids de ces couches, soit un message ; `("free", [0])` les libère ;
# - `("forward", 0)`, `("backward", 0)` : demandent les poids entiers de la couche ; `backward` crée son gradient
#   entier ;
# - `("reduce", [2, 3])` : un *reduce-scatter* des gradients de ces couches, soit un message, puis les libère.
#
# Les couches passent dans l’ordre, puis à rebours. À la fin, tout gradient est réduit et rien n’est entier. Couche par
# couche, il faut 12 messages. Objectif : 7.

# %% [markdown] lang="en"
# ## Challenge (optional) — as few messages as possible
#
# Four layers, whose whole weights take 6, 2, 3 and 5 MiB; their gradients, as much. Each rank keeps its shares, as
# under ZeRO-3, and has **12 MiB** besides for all that is whole. Write a function without arguments that returns a
# plan, a list of operations:
#
# - `("gather", [0, 1])`: an all-gather of the weights of these layers, one message; `("free", [0])` frees them;
# - `("forward", 0)`, `("backward", 0)`: need the whole weights of the layer; `backward` makes its whole gradient;
# - `("reduce", [2, 3])`: a reduce-scatter of the gradients of these layers, one message, which then frees them.
#
# The layers run in order, then backwards. In the end each gradient is reduced and nothing is whole any more. Layer by
# layer it takes 12 messages. Target: 7.


# %% name="fewest-messages"
def plan():
    ### BEGIN SOLUTION
    return [
        *[("gather", [0, 1, 2]), ("forward", 0), ("forward", 1), ("forward", 2), ("free", [0, 1, 2])],
        *[("gather", [3]), ("forward", 3), ("backward", 3), ("free", [3])],
        *[("gather", [2]), ("backward", 2), ("free", [2]), ("gather", [1]), ("backward", 1), ("free", [1])],
        *[("reduce", [1, 2, 3]), ("gather", [0]), ("backward", 0), ("free", [0]), ("reduce", [0])],
    ]
    ### END SOLUTION


lab.check("fewest-messages", plan)

# %%
# lab.hint("fewest-messages")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Répartissez le modèle avec FSDP2, bloc par bloc (`--parallel fsdp`), enregistrez-le et
# reprenez-le sur un autre nombre de rangs (`--save`, `--load`). Continuez dans votre `train.py`, ou partez de la
# solution du TP précédent, que `dlojz labs script 04 un_autre_dossier` écrit avec des `# TODO`.
#
# À regarder : chaque rang tient une part des paramètres ; un rang lit le checkpoint de deux, moments compris.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# for block in model.blocks:
#     fully_shard(block)
# fully_shard(model)
# weights, moments = get_state_dict(model, optimizer)
# dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=args.save)
# dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=args.load)
# set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Shard the script's model with FSDP2, block by block (`--parallel fsdp`; without it, `ddp`), save it and resume on
# another number of ranks (`--save`, `--load`). Go on in your `train.py`, or begin with the solution of the lab before:
# `dlojz labs script 04 another_folder` writes one, with a `# TODO` at each place to fill in.
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
# dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=args.load)
# set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
# ```
#
# </details>

# %% name="judge-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | niveau | chaque rang garde (octets) | envoie par pas (nombres) | quand |
# |--|--|--|--|
# | 0 | 16Ψ | 2Ψ | le modèle tient |
# | 1 | 4Ψ + 12Ψ/N | 2Ψ (DeepSpeed : 3Ψ) | presque toujours |
# | 2 | 2Ψ + 14Ψ/N | 2Ψ (DeepSpeed : 3Ψ) | sans accumulation de gradients |
# | 3 | 16Ψ/N | 3Ψ par micro-batch | sinon |
#
# Les niveaux 1 à 3 répartissent les états, pas les activations ; ZeRO-R, dans le même article, répartit les points de
# contrôle d’activation (TP 02) sur les rangs de tenseur (`partition_activations`). Et une couche doit toujours tenir
# entière sur un GPU, le temps du calcul : seul le TP 06 lève cette limite. Enregistrer ces états, et reprendre sur un
# autre nombre de rangs : TP 13.

# %% [markdown] lang="en"
# ## Summary
#
# | stage | each rank keeps (bytes) | sends per step (numbers) | when |
# |--|--|--|--|
# | 0 | 16Ψ | 2Ψ | the model fits |
# | 1 | 4Ψ + 12Ψ/N | 2Ψ (DeepSpeed: 3Ψ) | nearly always |
# | 2 | 2Ψ + 14Ψ/N | 2Ψ (DeepSpeed: 3Ψ) | without gradient accumulation |
# | 3 | 16Ψ/N | 3Ψ per micro-batch | otherwise |
#
# Stages 1 to 3 shard the states, not the activations; ZeRO-R, from the same paper, partitions the activation
# checkpoints (lab 02) over the tensor-parallel ranks (`partition_activations`). And a layer must still fit whole on one
# GPU while it computes: only lab 06 lifts that limit. To save sharded states, and to resume on another number of ranks:
# that is lab 13.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
