# %% [markdown] lang="fr"
# # TP 03 — Data Parallelism
#
# L’entraînement prend trop de temps ? Copiez le modèle sur plusieurs GPU, donnez à chacun des données différentes, et
# faites la moyenne des gradients. Vous écrivez ici cette communication vous-même, sur de vrais processus, vous prédisez
# sa durée, puis vous la recouvrez par le calcul, comme le fait **DDP** (*Distributed Data Parallel*).
#
# À la fin, vous saurez :
#
# - écrire un *all-reduce* en anneau, et dire combien d’octets chaque rang envoie ;
# - résumer un réseau par α et β, et prédire ce que coûteront 2, 8 ou 512 GPU ;
# - écrire DDP à la main : diffusion des poids, moyenne des gradients, *buckets*, recouvrement ;
# - cumuler des gradients et répartir les données ;
# - prédire et mesurer l’accélération, l’efficacité et la part de la puissance crête ;
# - agrandir le batch, et régler le DDP de PyTorch.
#
# Comptez deux heures. Quatre rangs suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 03 — Data parallelism
#
# Training takes too long? Copy the model to several GPUs, give each of them different data, and average the gradients.
# Here you write that communication yourself, on real processes, predict how long it takes, and then hide it behind the
# computation, as **DDP** (Distributed Data Parallel) does.
#
# By the end you can:
#
# - write a ring all-reduce, and tell how many bytes each rank sends;
# - sum up a network in α and β, and predict what 2, 8 or 512 GPUs will cost;
# - write DDP by hand: broadcast of the weights, average of the gradients, buckets, overlap;
# - accumulate gradients and split the data;
# - predict and measure speed-up, efficiency and the share of the peak;
# - enlarge the batch, and tune PyTorch's DDP.
#
# Allow two hours. Four ranks are enough, without GPUs.

# %% name="setup"
import time
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import dlojz
from dlojz import labs
from dlojz.base.language import decimal, integer, percent
from dlojz.by_hand import collectives
from dlojz.display.figures.communication_figures import calibration_figure, collective_figure
from dlojz.display.figures.run_figures import timeline_figure
from dlojz.hardware import evidence, gpus
from dlojz.labs.lab03_data_parallel import figures

lab = labs.start("03")
# as on the ranks; more threads would only wait here // comme sur les rangs ; plus de threads s’attendraient
torch.set_num_threads(1)

# %% [markdown] lang="fr"
# ## 1. Un processus, puis quatre
#
# Notre modèle est un petit réseau convolutif, nos images les chiffres manuscrits de scikit-learn (8 × 8 pixels).
# `train` est une boucle d’entraînement ordinaire, avec trois arguments pour la suite : le taux d’apprentissage à chaque
# pas, une enveloppe autour du modèle, et ce que l’on fait **juste après la passe arrière**.

# %% [markdown] lang="en"
# ## 1. One process, then four
#
# Our model is a small convolutional network, our images are scikit-learn's handwritten digits (8 × 8 pixels). `train`
# is an ordinary training loop, with three arguments for later: the learning rate of each step, a wrapper around the
# model, and what is done **right after the backward pass**.


# %% name="training"
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (N, 1, 8, 8)
labels = torch.tensor(digits.target)


def make_model(seed=4):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    for number in (0, 3, 7):
        nn.init.kaiming_normal_(model[number].weight, nonlinearity="relu")
    return model


def train(batches, rate=lambda step: 0.05, wrap=None, after_backward=None):
    model = wrap(make_model()) if wrap else make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        if after_backward:
            after_backward(model)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
model, losses = train(order.split(64)[:20])
sum(parameter.numel() for parameter in model.parameters()), losses[-1] < losses[0]

# %% [markdown] lang="fr"
# Une cellule qui commence par `%%ranks 4` s’exécute sur quatre processus, les **rangs**, qui tournent à côté du
# notebook. Tous exécutent le même code (*SPMD*, *Single Program, Multiple Data*) ; seule la variable `rank` diffère.
# Chacun garde ses propres variables d’une cellule à la suivante.

# %% [markdown] lang="en"
# A cell that begins with `%%ranks 4` runs on four processes, the **ranks**, that live beside the notebook. All run the
# same code (SPMD, single program, multiple data); only the variable `rank` differs. Each keeps its own variables from
# one cell to the next.

# %% name="first-ranks" tags=["nbval-ignore-output"]
# %%ranks 4
print(rank, world_size)

# %% [markdown] lang="fr"
# Sur les rangs, `dist` est `torch.distributed`. Dans le notebook, `ranks["x"]` rapporte la liste de leurs `x`.
#
# **Votre prédiction.** Chaque rang remplit un tenseur de `rank + 1`, puis appelle *all-reduce*, la communication
# collective qui remplace le tenseur de chacun par la somme de tous. Que contiendra celui du rang 3 ?

# %% [markdown] lang="en"
# On the ranks, `dist` is `torch.distributed`. In the notebook, `ranks["x"]` returns the list of their `x`.
#
# **Your prediction.** Each rank fills a tensor with `rank + 1`, then calls all-reduce, the collective communication
# that replaces everybody's tensor by the sum of all. What will rank 3's tensor hold?

# %% name="predict-sum" stub="value"
lab.predict(
    "sum-of-ranks",
    ### BEGIN SOLUTION
    1 + 2 + 3 + 4,
    ### END SOLUTION
)

# %% name="first-all-reduce"
# %%ranks
x = torch.full((2,), float(rank + 1))
print(x.tolist())
dist.all_reduce(x)
print(x.tolist())

# %% name="reveal-sum"
lab.reveal("sum-of-ranks", ranks["x"][3][0].item())

# %% [markdown] lang="fr"
# ### Et si l’un d’eux oublie ?
#
# Une communication collective attend **tous** les rangs du groupe. Sous un `if rank == 0:`, elle bloque le rang 0. Ici,
# le rang 2 oublie.

# %% [markdown] lang="en"
# ### And if one of them forgets?
#
# A collective waits for **all** ranks of the group. Under an `if rank == 0:`, it blocks rank 0. Here, rank 2 forgets.

# %% name="forgotten"
# %%ranks
forgotten = torch.ones(2)
try:
    if rank != 2:
        dist.all_reduce(forgotten)
except RuntimeError as fault:
    print(fault)

# %% [markdown] lang="fr"
# Nos rangs inscrivent chaque appel sur un tableau commun : la panne est nommée aussitôt. Sur un supercalculateur, les
# autres attendraient sans un mot, jusqu’au délai de garde de PyTorch (10 minutes avec NCCL, 30 avec gloo), aux frais de
# votre projet. De même si les rangs appellent deux communications collectives dans des ordres différents.
#
# ## 2. L’anneau
#
# Si tous envoyaient leur tenseur au rang 0, celui-ci recevrait, avec 512 GPU, 511 tenseurs par pas. L’**anneau** évite
# cet engorgement : le tenseur est coupé en autant de **morceaux** que de rangs ; à chaque étape, chacun envoie un
# morceau à son voisin de droite et en reçoit un de son voisin de gauche.
#
# Voici toutes les étapes : trois pour le *reduce-scatter*, trois pour l’*all-gather*. Suivez un morceau : quand sa
# somme est-elle complète ?

# %% [markdown] lang="en"
# Our ranks write each call on a common board: the fault is named at once. On a supercomputer the others would wait
# without a word until PyTorch's timeout (10 minutes with NCCL, 30 with gloo), at your project's expense. The same
# happens if the ranks call two collectives in different orders.
#
# ## 2. The ring
#
# If all sent their tensor to rank 0, it would receive, with 512 GPUs, 511 tensors per step. The **ring** avoids this
# jam: the tensor is cut into as many **chunks** as there are ranks; in each step every rank sends one chunk to its
# right neighbour, and receives one from its left.
#
# Here are all the steps: three of the reduce-scatter, three of the all-gather. Follow one chunk: when is its sum
# complete?

# %%
collective_figure("ring_all_reduce", size=4)

# %% [markdown] lang="fr"
# La même chose pas à pas ; choisissez d’autres algorithmes et d’autres nombres de rangs. Sans noyau actif, la figure
# fixe montre toutes les étapes de l’arbre.

# %% [markdown] lang="en"
# The same step by step; choose other algorithms and other numbers of ranks. Where no kernel runs, the static figure
# shows all steps of the tree.

# %% name="stepper" tags=["nbval-ignore-output"]
from dlojz.display.figures.communication_figures import stepper

steps = {"name": "tree_all_reduce", "size": 4}
stepper(**steps)

# %% name="still-steps" tags=["nbval-ignore-output"]
collective_figure(**steps)

# %% [markdown] lang="fr"
# ### Exercice 1 — l’all-reduce en anneau
#
# `x` est un vecteur dont la longueur est un multiple du nombre de rangs ; remplacez-le **en place** par la somme, sans
# `dist.all_reduce`. `chunks[i]` est une vue : ce que vous y écrivez, par `chunks[i].add_(…)` ou `chunks[i].copy_(…)`,
# s’écrit dans `x`.
#
# - `dist.isend(tenseur, destinataire)` rend la main aussitôt et renvoie un objet `Work`, dont la méthode `wait()`
#   attend la fin de l’envoi ;
# - `dist.recv(tenseur, expéditeur)` remplit le tenseur et ne rend la main qu’ensuite.
#
# À l’étape `s` du *reduce-scatter*, comptée à partir de 0, le rang `r` envoie le morceau `r − s` (modulo le nombre de
# rangs). Déduisez-en le morceau qu’il reçoit et ajoute au sien, puis l’*all-gather*.

# %% [markdown] lang="en"
# ### Exercise 1 — the ring all-reduce
#
# `x` is a vector whose length is a multiple of the number of ranks; replace it **in place** by the sum, without
# `dist.all_reduce`. `chunks[i]` is a view: what you write there, by `chunks[i].add_(…)` or `chunks[i].copy_(…)`, is
# written in `x`.
#
# - `dist.isend(tensor, receiver)` returns at once, with a `Work` object whose method `wait()` waits until all is sent;
# - `dist.recv(tensor, sender)` fills the tensor and returns only then.
#
# In step `s` of the reduce-scatter, counted from 0, rank `r` sends chunk `r − s` (modulo the number of ranks). Derive
# from that which chunk it receives and adds to its own, then the all-gather.


# %% name="ring-all-reduce"
def ring_all_reduce(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = x.chunk(size)
    received = torch.empty_like(chunks[0])
    ### BEGIN SOLUTION
    for step in range(size - 1):
        sending = dist.isend(chunks[(rank - step) % size], right)
        dist.recv(received, left)
        sending.wait()
        chunks[(rank - step - 1) % size].add_(received)
    for step in range(size - 1):
        sending = dist.isend(chunks[(rank + 1 - step) % size], right)
        dist.recv(chunks[(rank - step) % size], left)
        sending.wait()
    ### END SOLUTION
    return x


lab.check("ring-all-reduce", ring_all_reduce)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez ; deux exécutions donnent le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment; running it twice gives the second hint.

# %%
# lab.hint("ring-all-reduce")

# %% [markdown] lang="fr"
# Votre anneau face à la bibliothèque. `--with` envoie aux rangs une fonction ou la copie d’une valeur.

# %% [markdown] lang="en"
# Your ring against the library. `--with` sends the ranks a function or a copy of a value.

# %% name="ring-on-ranks"
# %%ranks --with ring_all_reduce
mine = torch.arange(8.0) * (rank + 1)
expected = mine.clone()
dist.all_reduce(expected)
ring_all_reduce(mine)
print(torch.equal(mine, expected))

# %% [markdown] lang="fr"
# ## 3. Combien de temps ?
#
# Le modèle le plus simple d’un réseau (Hockney, 1994) : un message de `n` octets met
#
# $$t = \alpha + \beta\, n$$
#
# secondes. α est la **latence**, payée par tout message, même vide ; β est l’inverse du **débit**, en secondes par
# octet.
#
# ### Exercice 2 — la durée de l’anneau
#
# Renvoyez les secondes que prend l’*all-reduce* en anneau d’un message de `message_bytes` octets, sur `size` rangs ;
# `alpha_s` et `beta_s_per_byte` sont α et β. Négligez les additions ; tous les rangs envoient en même temps.

# %% [markdown] lang="en"
# ## 3. How long does it take?
#
# The simplest model of a network (Hockney, 1994): a message of `n` bytes takes
#
# $$t = \alpha + \beta\, n$$
#
# seconds. α is the **latency**, paid by every message, even an empty one; β is the inverse of the **bandwidth**, in
# seconds per byte.
#
# ### Exercise 2 — the time of the ring
#
# Return the seconds that a ring all-reduce of a message of `message_bytes` bytes takes on `size` ranks; `alpha_s` and
# `beta_s_per_byte` are α and β. Neglect the additions; all ranks send at the same time.


# %% name="ring-time"
def ring_seconds(message_bytes, size, alpha_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    chunk_bytes = message_bytes / size
    return 2 * (size - 1) * (alpha_s + beta_s_per_byte * chunk_bytes)
    ### END SOLUTION


lab.check("ring-time", ring_seconds)

# %%
# lab.hint("ring-time")

# %% [markdown] lang="fr"
# Mesurons. Chaque taille est chronométrée plusieurs fois, cinq appels de suite ; on retient le rang le plus
# lent.

# %% [markdown] lang="en"
# Let us measure. Each size of message is timed several times, five calls in a row; the slowest rank is the one that
# counts.

# %% name="measure"
# %%ranks
from dlojz.by_hand import collectives

points = collectives.measure("all_reduce", [2**power for power in range(12, 23, 2)])

# %% name="points" tags=["nbval-ignore-output"]
points = ranks["points"][0]
for point in points:
    print(f"{point.message_bytes:>8}", "B // o", f" {decimal(1e3 * point.time_s, 3):>7} ms")

# %% [markdown] lang="fr"
# ### Exercice 3 — retrouver α et β
#
# Les durées `t` suivent une droite, `t = a + b·n`, avec
#
# $$a = 2(p-1)\,\alpha \qquad b = \frac{2(p-1)}{p}\,\beta$$
#
# Cherchez la droite qui minimise la somme des carrés des écarts **relatifs**, $\sum \left(\frac{a + b\,n -
# t}{t}\right)^2$ : avec des écarts absolus, α serait noyée dans le bruit des longues durées. `message_bytes` et
# `seconds` sont les listes des `n` et des `t`, `size` est `p`. Renvoyez `alpha_s, beta_s_per_byte`, par exemple avec
# `np.linalg.lstsq`.

# %% [markdown] lang="en"
# ### Exercise 3 — finding α and β
#
# The times `t` follow a line, `t = a + b·n`, with
#
# $$a = 2(p-1)\,\alpha \qquad b = \frac{2(p-1)}{p}\,\beta$$
#
# Find the line that minimises the sum of the squares of the **relative** gaps, $\sum \left(\frac{a + b\,n -
# t}{t}\right)^2$: with absolute ones α would drown in the noise of the long times. `message_bytes` and `seconds` are
# the lists of the `n` and the `t`, `size` is `p`. Return `alpha_s, beta_s_per_byte`, for example with
# `np.linalg.lstsq`.

# %% name="alpha-beta"
import numpy as np


def fit_alpha_beta(message_bytes, seconds, size):
    n, t = np.array(message_bytes), np.array(seconds)
    ### BEGIN SOLUTION
    rows = np.stack([1 / t, n / t], axis=1)
    (a, b), *_ = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)
    steps = 2 * (size - 1)
    return a / steps, b * size / steps
    ### END SOLUTION


lab.check("alpha-beta", fit_alpha_beta)

# %%
# lab.hint("alpha-beta")

# %% [markdown] lang="fr"
# Le paquet fait le même ajustement. À gauche, vos mesures et la droite ; à droite, ce qu’elle annonce pour 2, 8 et 512
# rangs. Entre processus d’une même machine, les messages passent par la mémoire : β n’est pas celui d’un réseau.

# %% [markdown] lang="en"
# The package makes the same fit. On the left your measurements and the line; on the right, what it predicts for 2, 8
# and 512 ranks. Between processes of one machine, messages go through memory: β is not that of a network.

# %% name="calibration" tags=["nbval-ignore-output"]
calibration = collectives.fit(points)
calibration_figure(calibration)

# %% [markdown] lang="fr"
# **Votre prédiction.** Avec ces `calibration.alpha_s` et `calibration.beta_s_per_byte`, combien de secondes prendra un
# *all-reduce* de 12 Mio sur nos quatre rangs, une taille que nous n’avons pas mesurée ?

# %% [markdown] lang="en"
# **Your prediction.** With these `calibration.alpha_s` and `calibration.beta_s_per_byte`, how many seconds will an
# all-reduce of 12 MiB take on our four ranks, a size that we have not measured?

# %% name="predict-ring-seconds" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "ring-seconds",
    ### BEGIN SOLUTION
    ring_seconds(12 * 2**20, 4, calibration.alpha_s, calibration.beta_s_per_byte),
    ### END SOLUTION
)

# %% name="measure-large"
# %%ranks
large = collectives.measure("all_reduce", [12 * 2**20])

# %% name="reveal-ring-seconds" tags=["nbval-ignore-output"]
lab.reveal("ring-seconds", ranks["large"][0][0].time_s)

# %% [markdown] lang="fr"
# ### De 2 à 512 GPU
#
# Sur un réseau de supercalculateur (α = 10 µs, 25 Go/s), voici les millisecondes d’un *all-reduce* des gradients de
# ResNet-50 en fp32, sur 2, 8 et 512 GPU, par trois algorithmes :

# %% [markdown] lang="en"
# ### From 2 to 512 GPUs
#
# On a supercomputer's network (α = 10 µs, 25 GB/s), these are the milliseconds of an all-reduce of ResNet-50's
# gradients in fp32, on 2, 8 and 512 GPUs, by three algorithms:

# %% name="algorithms"
network = {"alpha_s": 10e-6, "beta_s_per_byte": 1 / 25e9}
gradient_bytes = 4 * 25_557_032

for algorithm in ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce"):
    costs_s = [collectives.cost_s(algorithm, gradient_bytes, size, **network) for size in (2, 8, 512)]
    print(f"{algorithm:<28}", *(f"{decimal(1e3 * cost_s):>7}" for cost_s in costs_s))

# %% [markdown] lang="fr"
# L’anneau envoie le moins d’octets possible, mais chacune de ses `2 (p − 1)` étapes paie α. L’arbre n’a que `2 log₂ p`
# étapes, mais y envoie tout le message : il l’emporte pour les petits. (Celui de NCCL est double, et les messages y
# passent en morceaux : il envoie presque aussi peu d’octets que l’anneau.) Le troisième a les octets de l’anneau et les
# étapes de l’arbre, mais par des liens lointains, que d’autres empruntent : notre modèle l’ignore.
#
# **Votre prédiction.** Sur ce réseau, avec l’anneau, à partir de combien de GPU la latence prend-elle plus de temps que
# les octets ?

# %% [markdown] lang="en"
# The ring sends as few bytes as possible, but each of its `2 (p − 1)` steps pays α. The tree takes only `2 log₂ p`
# steps, but sends the whole message in each: it wins for small ones. (NCCL's tree is a double one, through which
# messages pass in pieces: it sends nearly as few bytes as the ring.) The third has the ring's bytes and the tree's
# steps, but over distant links that others use: our model overlooks that.
#
# **Your prediction.** On this network, with the ring, from how many GPUs on does latency take more time than the bytes?

# %% name="predict-latency-ranks" stub="value"
lab.predict(
    "latency-ranks",
    ### BEGIN SOLUTION
    gradient_bytes * network["beta_s_per_byte"] / network["alpha_s"],
    ### END SOLUTION
)

# %% name="reveal-latency-ranks"
steps_s = {size: 2 * (size - 1) * network["alpha_s"] for size in range(2, 1024)}
ring_s = {size: collectives.cost_s("ring_all_reduce", gradient_bytes, size, **network) for size in steps_s}
lab.reveal("latency-ranks", min(size for size in steps_s if steps_s[size] > ring_s[size] / 2))

# %% [markdown] lang="fr"
# Coupez les gradients en quatre messages, et ce seuil tombe au quart. Voilà pourquoi, sur de très nombreux GPU,
# l’*all-reduce* est hiérarchique : d’abord dans le nœud, puis entre les nœuds.
#
# ### Soixante-quatre rangs ici même
#
# Au-delà de huit, les rangs de `%%ranks` sont les *threads* d’un seul processus, qui s’exécutent à tour de rôle : on
# n’y gagne aucun temps, mais chaque message est bien envoyé, et compté. Votre anneau et l’arbre du paquet y somment le
# même tenseur. (Les variables des quatre rangs précédents sont perdues.)
#
# **Votre prédiction.** À chaque étape, l’arbre envoie le tenseur entier, et l’anneau un soixante-quatrième. Additionnez
# ce qu’envoient les 64 rangs : combien de fois plus d’octets pour l’arbre que pour l’anneau ?

# %% [markdown] lang="en"
# Cut the gradients into four messages, and this threshold falls to a quarter. That is why an all-reduce over very many
# GPUs is hierarchical: first within the node, then between nodes.
#
# ### Sixty-four ranks right here
#
# Beyond eight, the ranks of `%%ranks` are threads of one process that run in turn: no time is gained, but every message
# is really sent, and counted. Your ring and the package's tree sum the same tensor. (The variables of the four ranks
# before are gone.)
#
# **Your prediction.** In each step the tree sends the whole tensor, and the ring a sixty-fourth. Add up what the 64
# ranks send: how many times as many bytes does the tree send as the ring?

# %% name="predict-tree-bytes" stub="value"
lab.predict(
    "tree-bytes",
    ### BEGIN SOLUTION
    1,
    ### END SOLUTION
)

# %% name="sixty-four"
# %%ranks 64 --with ring_all_reduce
from dlojz.by_hand import collectives

group, traffic = dist.group.WORLD, {}
for name in ("ring", "tree"):
    x = torch.arange(6400.0) + rank
    expected, messages, sent_bytes = 64 * torch.arange(6400.0) + sum(range(64)), group.sent_messages, group.sent_bytes
    y = ring_all_reduce(x) if name == "ring" else collectives.run("tree_all_reduce", x)
    assert torch.equal(y, expected)
    traffic[name] = {"messages": group.sent_messages - messages, "bytes": group.sent_bytes - sent_bytes}

# %% name="reveal-tree-bytes"
total_bytes = {name: sum(traffic[name]["bytes"] for traffic in ranks["traffic"]) for name in ("ring", "tree")}
lab.reveal("tree-bytes", total_bytes["tree"] / total_bytes["ring"])

# %% name="busiest-rank"
for name in ("ring", "tree"):
    busiest = max((traffic[name] for traffic in ranks["traffic"]), key=lambda traffic: traffic["bytes"])
    print(f"{name}: {integer(total_bytes[name])} | {integer(busiest['bytes'])} | {busiest['messages']}")

# %% [markdown] lang="fr"
# **Expliquez.** De gauche à droite : octets de tous les rangs, octets et messages du rang qui envoie le plus. À total
# égal, pourquoi l’arbre coûte-t-il plus cher pour un grand tenseur ?
#
# <details><summary>Réponse</summary>
#
# Pour une somme sur 64 rangs, 63 d’entre eux doivent envoyer leur tenseur, puis 63 recevoir la somme : l’anneau n’y
# change rien, il **répartit**. Dans l’arbre, la racine envoie six fois le tenseur entier, l’un après l’autre, pendant
# que la plupart des rangs attendent ; dans l’anneau, tous les liens servent à chaque étape, mais il y en a 126.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** From left to right: bytes of all ranks, bytes and messages of the rank that sends most. The totals are
# equal: why does the tree cost more for a large tensor?
#
# <details><summary>Answer</summary>
#
# To sum over 64 ranks, 63 of them must send their tensor, then 63 must receive the sum: the ring does not change that,
# it **spreads** it. In the tree the root sends the whole tensor six times, one after the other, while most ranks wait;
# in the ring all links work in every step, but there are 126 of them.
#
# </details>

# %% [markdown] lang="fr"
# ## 4. DDP à la main
#
# Le *Data Parallelism*, en quatre règles :
#
# 1. au départ, toutes les répliques ont les **mêmes poids** : ceux du rang 0, diffusés par un *broadcast* ;
# 2. à chaque pas, chaque rang lit des **données différentes** ;
# 3. après la passe arrière, on fait la **moyenne des gradients** ;
# 4. tous les rangs font le même pas d’optimiseur : ils restent identiques, sans plus jamais s’envoyer de poids.
#
# La première règle : chaque rang tire ses propres poids, puis reçoit ceux du rang 0.

# %% [markdown] lang="en"
# ## 4. DDP by hand
#
# Data parallelism, in four rules:
#
# 1. at the start all replicas have the **same weights**: those of rank 0, given to all by a broadcast;
# 2. in each step every rank reads **different data**;
# 3. after the backward pass the **gradients are averaged**;
# 4. all ranks take the same optimizer step: they stay identical without ever sending weights again.
#
# The first rule: each rank draws its own weights, then gets those of rank 0.

# %% name="broadcast"
# %%ranks 4 --with make_model
from dlojz.base.language import decimal

model = make_model(seed=rank)
print(decimal(model[7].weight.abs().sum().item()))
for weight in model.parameters():
    dist.broadcast(weight.data, src=0)
print(decimal(model[7].weight.abs().sum().item()))

# %% [markdown] lang="fr"
# ### Exercice 4 — la moyenne des gradients
#
# La passe arrière est terminée, chaque paramètre a son `grad`. Remplacez **en place** chaque gradient par sa moyenne
# sur les rangs.

# %% [markdown] lang="en"
# ### Exercise 4 — averaging the gradients
#
# The backward pass is over, each parameter has its `grad`. Replace each gradient **in place** by its mean over the
# ranks.


# %% name="average-gradients"
def average_gradients(model):
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    ### END SOLUTION


lab.check("average-gradients", average_gradients)

# %%
# lab.hint("average-gradients")

# %% [markdown] lang="fr"
# Votre DDP s’entraîne, 16 images par rang : d’abord avec `dist.all_reduce`, puis avec **votre anneau**, qui somme tous
# les gradients en un seul vecteur. Les répliques gardent-elles les mêmes poids, **bit à bit** ? Et la perte moyenne
# suit-elle, à un pour mille près, celle d’un processus seul qui lit les 64 images ?

# %% [markdown] lang="en"
# Your DDP trains, 16 images per rank: first with `dist.all_reduce`, then with **your ring**, which sums all gradients
# as one vector. Do the replicas keep the same weights, **bit by bit**? And does the mean loss follow, within one per
# mille, that of one process that reads all 64 images?


# %% name="own-ring"
def average_by_ring(model):
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    size = dist.get_world_size()
    flat = F.pad(flat, (0, -len(flat) % size))  # chunks of equal length // des morceaux de même longueur
    ring_all_reduce(flat)
    for parameter in model.parameters():
        mean, flat = flat[: parameter.numel()] / size, flat[parameter.numel() :]
        parameter.grad.copy_(mean.view_as(parameter))


def compare(replica, losses, alone):
    weights = nn.utils.parameters_to_vector(replica.parameters()).detach()
    largest = weights.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    same_weights = torch.equal(weights, largest)
    same_losses = torch.allclose(mean / dist.get_world_size(), torch.tensor(alone), rtol=1e-3)
    print(f"{same_weights=}, {same_losses=}")


# %% name="ddp-on-ranks"
# %%ranks --with train,average_gradients,average_by_ring,compare,images,labels
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
batches = order.split(64)[:20]
shares = [batch[rank::world_size] for batch in batches]
_, alone = train(batches)
for average in (average_gradients, average_by_ring):
    compare(*train(shares, after_backward=average), alone)

# %% [markdown] lang="fr"
# ## 5. Quatre fois plus vite ?
#
# L’**accélération** est le temps d’un processus divisé par celui de `p` ; l’**efficacité** est l’accélération divisée
# par `p`.
#
# - **Scalabilité forte** : même batch global, `p` fois moins d’images par processus.
# - **Scalabilité faible** : chacun garde son batch, le batch global grandit avec `p`. L’efficacité est alors le temps
#   d’un pas sur un processus divisé par celui d’un pas sur `p`.
#
# ### Exercice 5 — l’efficacité
#
# Le calcul prend `image_s` secondes par image. Après la passe arrière vient un *all-reduce* en anneau par paramètre ;
# `gradient_bytes` est la liste de leurs tailles. Renvoyez l’efficacité de `size` processus en scalabilité forte (batch
# global `batch`), puis faible (`batch` images chacun). Servez-vous de votre `ring_seconds`.

# %% [markdown] lang="en"
# ## 5. Four times as fast?
#
# The **speed-up** is the time of one process divided by that of `p`; the **efficiency** is the speed-up divided by `p`.
#
# - **Strong scaling**: the global batch stays the same, each process reads `p` times fewer images.
# - **Weak scaling**: each keeps its batch, the global batch grows with `p`. The efficiency is then the time of a step
#   on one process divided by that of a step on `p`.
#
# ### Exercise 5 — efficiency
#
# Computing takes `image_s` seconds per image. After the backward pass comes one ring all-reduce per parameter;
# `gradient_bytes` is the list of their sizes. Return the efficiency of `size` processes in strong scaling (global batch
# `batch`), then in weak scaling (`batch` images each). Use your `ring_seconds`.


# %% name="efficiency"
def efficiencies(batch, size, image_s, gradient_bytes, alpha_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    communication_s = sum(ring_seconds(each, size, alpha_s, beta_s_per_byte) for each in gradient_bytes)
    strong = (batch * image_s) / (size * (batch / size * image_s + communication_s))
    weak = (batch * image_s) / (batch * image_s + communication_s)
    return strong, weak
    ### END SOLUTION


lab.check("efficiency", efficiencies)

# %%
# lab.hint("efficiency")

# %% [markdown] lang="fr"
# Mesurons, avec un réseau aux couches larges. `step_s` chronomètre un pas : passes avant et arrière, puis la
# communication qu’on lui donne. `turns` chronomètre, à tour de rôle, le rang 0 seul, puis tous. D’abord un
# processus seul.

# %% [markdown] lang="en"
# Let us measure, with a network of wide layers. `step_s` times one step: forward and backward pass, then the
# communication it is given. `turns` times, in turns, rank 0 alone and then all at once. First one process
# alone.


# %% name="one-process" tags=["nbval-ignore-output"]
def make_wide():
    torch.manual_seed(0)
    sizes = [64, 1024, 1024, 1024, 10]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def step_s(model, x, y, communicate=None):
    start = time.perf_counter()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if communicate:
        communicate(model)
    return time.perf_counter() - start


def turns(model, whole, mine, communicate=None):
    times = []
    for _ in range(7):
        dist.barrier()
        alone_s = step_s(model, *whole) if dist.get_rank() == 0 else 0.0
        dist.barrier()
        times.append((alone_s, step_s(model, *mine, communicate)))
    return times


x, y = images[:256].flatten(1), labels[:256]
wide_bytes = [4 * parameter.numel() for parameter in make_wide().parameters()]
image_s = median(step_s(make_wide(), x, y) for _ in range(7)) / len(x)
print(f"{decimal(1 / image_s, 0)} images/s, {decimal(sum(wide_bytes) / 1e6)}", "MB // Mo")

# %% [markdown] lang="fr"
# Quatre processus se partagent cœurs, caches et mémoire : combien de fois plus longtemps calcule le plus lent ?

# %% [markdown] lang="en"
# Four processes share cores, caches and memory: how many times as long does the slowest compute, for which the others
# wait?

# %% name="at-once" tags=["nbval-ignore-output"]
# %%ranks --with step_s,turns,make_wide,x,y
model, batch = make_wide(), (x, y)
at_once_s = turns(model, batch, batch)

# %% name="slower" tags=["nbval-ignore-output"]
def slowest(turns):
    alone_s = median(alone for alone, _ in turns[0])
    return max(median(together for _, together in of_rank) for of_rank in turns) / alone_s


slower = slowest(ranks["at_once_s"])
print(f"{decimal(slower, 2)} times as long // {decimal(slower, 2)} fois plus long")

# %% [markdown] lang="fr"
# **Votre prédiction.** Quelle efficacité auront quatre processus, avec 256 images chacun, d’après `efficiencies` et
# `calibration` ? À quatre, une image prend `slower` fois plus longtemps ; or l’efficacité se rapporte à un processus
# **seul** sur la machine : `slower` compte donc deux fois, dans la durée d’une image, puis comme diviseur.

# %% [markdown] lang="en"
# **Your prediction.** What will be the efficiency of four processes, each with its 256 images? Use `efficiencies` and
# `calibration`. With four at once an image takes `slower` times as long; but the efficiency compares with one process
# **alone** on the machine: so `slower` counts twice, in the seconds of an image, then as a divisor.

# %% name="predict-weak-efficiency" stub="value" tags=["nbval-ignore-output"]
### BEGIN SOLUTION
network_here = calibration.alpha_s, calibration.beta_s_per_byte
predicted = efficiencies(256, 4, image_s * slower, wide_bytes, *network_here)[1] / slower
### END SOLUTION
lab.predict(
    "weak-efficiency",
    ### BEGIN SOLUTION
    predicted,
    ### END SOLUTION
)

# %% name="measure-weak"
# %%ranks --with average_gradients
weak_s = turns(model, batch, batch, average_gradients)

# %% name="reveal-weak-efficiency" tags=["nbval-ignore-output"]
lab.reveal("weak-efficiency", median(alone_s / together_s for alone_s, together_s in ranks["weak_s"][0]))

# %% [markdown] lang="fr"
# L’écart restant : gloo copie et additionne sur ces mêmes cœurs.
#
# Deux nouveaux rangs mesurent leurs α et β, puis un pas du batch entier, seul, et de sa moitié, ensemble. **Votre
# prédiction.** Combien de fois plus vite qu’un seul iront-ils sur le **même** batch ?

# %% [markdown] lang="en"
# The gap that remains: gloo copies and adds on the same cores.
#
# Two fresh ranks measure their own α and β, then the whole batch on one and half of it on each. **Your prediction.**
# How many times as fast as one will they be on the **same** batch of 256 images?

# %% name="measure-two" tags=["nbval-ignore-output"]
# %%ranks 2 --with step_s,turns,make_wide,x,y
from dlojz.by_hand import collectives

points = collectives.measure("all_reduce", [2**power for power in range(12, 23, 2)])
model, half = make_wide(), (x[rank::2], y[rank::2])
at_once_s = turns(model, (x, y), half)

# %% name="predict-speed-up" stub="value" tags=["nbval-ignore-output"]
two = collectives.fit(ranks["points"][0])
# An image of half a batch takes longer: the gradients are as large // Une image d’un demi-batch prend plus longtemps
slower = 2 * slowest(ranks["at_once_s"])
lab.predict(
    "speed-up",
    ### BEGIN SOLUTION
    2 * efficiencies(256, 2, image_s * slower, wide_bytes, two.alpha_s, two.beta_s_per_byte)[0] / slower,
    ### END SOLUTION
)

# %% name="measure-strong"
# %%ranks --with average_gradients
strong_s = turns(model, (x, y), half, average_gradients)

# %% name="reveal-speed-up" tags=["nbval-ignore-output"]
lab.reveal("speed-up", median(alone_s / together_s for alone_s, together_s in ranks["strong_s"][0]))

# %% [markdown] lang="fr"
# ### Exercice 6 — la part de la puissance crête
#
# Une efficacité de 100 % peut cacher des processus lents. La **MFU** (*Model FLOPs Utilization*, PaLM, 2022) compare
# les opérations dont le modèle a besoin, par seconde, à la **puissance crête**. Renvoyez-la, entre 0 et 1, pour
# `images_per_s` images par seconde, tous processus réunis ; `forward_flops` compte les opérations de la passe avant
# d’une image, `peak_flops` est la crête d’**un** processus. La passe arrière, deux gradients par produit, demande le
# double d’opérations.

# %% [markdown] lang="en"
# ### Exercise 6 — the share of the peak
#
# An efficiency of 100% may hide slow processes. **MFU** (model FLOPs utilization, PaLM, 2022) compares the operations
# that the model needs, per second, to the **peak** of the machine. Return it, between 0 and 1, for `images_per_s`
# images read per second by all processes together; `forward_flops` counts the operations of one image's forward pass,
# `peak_flops` is the peak of **one** process. The backward pass computes two gradients, of weights and of inputs: count
# it double.


# %% name="mfu"
def mfu(images_per_s, forward_flops, processes, peak_flops):
    ### BEGIN SOLUTION
    return 3 * forward_flops * images_per_s / (processes * peak_flops)
    ### END SOLUTION


lab.check("mfu", mfu)

# %%
# lab.hint("mfu")

# %% [markdown] lang="fr"
# La puissance crête se mesure : ici, le plus rapide de dix produits de matrices. Voici la MFU d’un processus, puis de
# deux ; seul, un réseau de produits de matrices devrait en atteindre la moitié ou plus.

# %% [markdown] lang="en"
# The peak can be measured: here, the fastest of ten matrix products. This is the MFU of one process, then of two;
# alone, a network of matrix products should reach half of it or more.

# %% name="peak" tags=["nbval-ignore-output"]
a, seconds = torch.randn(1024, 1024), []
for _ in range(10):
    start = time.perf_counter()
    a @ a
    seconds.append(time.perf_counter() - start)
peak_flops = 2 * 1024**3 / min(seconds)
forward_flops = 2 * sum(weight.numel() for weight in make_wide().parameters() if weight.dim() > 1)
print(f"{decimal(peak_flops / 1e9, 0)} GFLOP/s")
for processes, measured_s in enumerate(zip(*ranks["strong_s"][0], strict=True), start=1):
    rate = 256 / median(measured_s)
    share = mfu(rate, forward_flops, processes, peak_flops)
    print(f"{processes=}: {decimal(rate, 0)} images/s, MFU {percent(share, 0)}")

# %% [markdown] lang="fr"
# Le tableau 1 de Megatron (Narayanan et al., 2021) donne les TFLOP/s de chaque A100 et la part de la crête ; mais il
# compte la passe avant **recalculée** pendant la passe arrière.
#
# **Votre prédiction.** Quelle est la MFU du plus gros modèle, publié à 52 % ?

# %% [markdown] lang="en"
# Table 1 of Megatron (Narayanan et al., 2021) gives the TFLOP/s of each A100 and the share of the peak; but it counts
# the forward pass **recomputed** during the backward pass.
#
# **Your prediction.** What is the MFU of the largest model, published at 52%?

# %% name="predict-megatron-mfu" stub="value"
lab.predict(
    "megatron-mfu",
    ### BEGIN SOLUTION
    0.52 * 3 / 4,
    ### END SOLUTION
)

# %% name="megatron"
from dlojz.hardware.decoder_size import flops_per_sequence

peak = gpus.gpu("a100-80").peak_flops["fp16"]
for row in evidence.table("sc21-1"):
    share = row.tflops_per_gpu * 1e12 / peak
    model_share = share * flops_per_sequence(row.size, "model") / flops_per_sequence(row.size, "recompute")
    print(f"{decimal(row.size.num_parameters / 1e9):>7}", "B, // Md,", f"{row.gpus:4} GPU:", end=" ")
    print(f"{percent(share, 0)}, MFU {percent(model_share, 0)}")

# %% name="reveal-megatron-mfu"
lab.reveal("megatron-mfu", model_share)

# %% [markdown] lang="fr"
# ## 6. Cacher la communication
#
# Notre version attend la fin de la passe arrière, puis communique un paramètre après l’autre : autant de latences que
# de paramètres, et un GPU inactif. DDP (Li et al., 2020) corrige les deux.
#
# - **Les *buckets*.** Les gradients voyagent par groupes : moins de messages, donc moins de latence.
# - **Le recouvrement.** La passe arrière commence par la fin du modèle : un *bucket* plein part aussitôt, et voyage
#   pendant que le calcul continue.
#
# ### Exercice 7 — remplir les *buckets*
#
# `gradient_bytes[i]` est la taille du gradient du paramètre `i`, dans l’ordre de `model.parameters()`. Renvoyez la
# liste des *buckets*, listes de numéros de paramètres, **dans l’ordre où les gradients sont prêts** : à rebours. On
# ajoute les gradients un par un ; un *bucket* est fermé dès qu’il contient `limit_bytes` octets ou davantage. Le
# dernier peut être incomplet.

# %% [markdown] lang="en"
# ## 6. Hiding the communication
#
# Our version waits for the end of the backward pass, then communicates one parameter after the other: as many latencies
# as parameters, and a GPU that is idle meanwhile. DDP (Li et al., 2020) corrects both.
#
# - **Buckets.** Gradients travel in groups: fewer messages, so less latency.
# - **Overlap.** The backward pass begins at the end of the model: a full bucket leaves at once, and travels while the
#   computation goes on.
#
# ### Exercise 7 — filling the buckets
#
# `gradient_bytes[i]` is the size of the gradient of parameter `i`, in the order of `model.parameters()`. Return the
# list of buckets, each a list of parameter indices, **in the order in which the gradients become ready**:
# backwards. Gradients are added one by one; a bucket is closed once it holds `limit_bytes` bytes or more. The last one
# may be incomplete.


# %% name="buckets"
def fill_buckets(gradient_bytes, limit_bytes):
    ### BEGIN SOLUTION
    buckets, filling, held_bytes = [], [], 0
    for index in reversed(range(len(gradient_bytes))):
        filling.append(index)
        held_bytes += gradient_bytes[index]
        if held_bytes >= limit_bytes:
            buckets.append(filling)
            filling, held_bytes = [], 0
    return [*buckets, filling] if filling else buckets
    ### END SOLUTION


lab.check("buckets", fill_buckets)

# %%
# lab.hint("buckets")

# %% [markdown] lang="fr"
# Vos *buckets* de 1 Mio, pour le réseau aux couches larges ; un gradient ne se coupe pas.
#
# **Votre prédiction.** Combien d’*all-reduce* par pas ?

# %% [markdown] lang="en"
# Your buckets of 1 MiB, for the network of wide layers; a gradient is never cut.
#
# **Your prediction.** How many all-reduces per step, with these buckets?

# %% name="draw-buckets"
figures.buckets(fill_buckets, wide_bytes, 2**20)

# %% name="predict-bucket-calls" stub="value"
lab.predict(
    "bucket-calls",
    ### BEGIN SOLUTION
    len(fill_buckets(wide_bytes, 2**20)),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# ### Exercice 8 — communiquer pendant la passe arrière
#
# `parameter.register_post_accumulate_grad_hook(f)` fait appeler `f(parameter)` dès que `parameter.grad` est définitif.
# Et `dist.all_reduce(tenseur, async_op=True)` rend la main aussitôt, avec un objet `Work` : jusqu’à son `wait()`, il ne
# faut ni lire le tenseur, ni l’écrire.
#
# Écrivez une fonction qui prépare le modèle, puis renvoie une fonction `synchronize()`, à appeler entre la passe
# arrière et l’optimiseur : ensuite, chaque gradient doit être la moyenne sur les rangs. Sans *buckets* : un message par
# paramètre.

# %% [markdown] lang="en"
# ### Exercise 8 — communicating during the backward pass
#
# `parameter.register_post_accumulate_grad_hook(f)` has `f(parameter)` called during the backward pass, as soon as
# `parameter.grad` is final. And `dist.all_reduce(tensor, async_op=True)` returns at once, with a `Work` object: until
# its `wait()` the tensor travels, and must be neither read nor written.
#
# Write a function that prepares the model, then returns a function `synchronize()`, to be called between the backward
# pass and the optimizer: after it each gradient must be the mean over the ranks. No buckets: one message per parameter.


# %% name="overlap"
def overlap_gradients(model):
    ### BEGIN SOLUTION
    works = []

    def send(parameter):
        parameter.grad /= dist.get_world_size()
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)

    def synchronize():
        while works:
            works.pop().wait()

    return synchronize
    ### END SOLUTION


lab.check("overlap", overlap_gradients)

# %%
# lab.hint("overlap")

# %% [markdown] lang="fr"
# *Hooks* et *buckets* ensemble : c’est DDP. Les *buckets* sont ceux de votre `fill_buckets`. `synchronize` renvoie le
# nombre d’*all-reduce* du pas.

# %% [markdown] lang="en"
# Hooks and buckets together: that is DDP. The buckets are those of your `fill_buckets`. `synchronize` returns the
# number of all-reduces of the step.


# %% name="bucketed"
def bucketed(model, limit_bytes):
    parameters, flights = list(model.parameters()), []

    def departure(group, ready):
        def arrive(parameter):
            ready.append(parameter)
            if len(ready) == len(group):  # the bucket is full: it leaves // le bucket est plein : il part
                flat = torch.cat([parameter.grad.flatten() for parameter in group])
                flights.append((dist.all_reduce(flat, async_op=True), flat, group))
                ready.clear()

        return arrive

    for bucket in fill_buckets([4 * parameter.numel() for parameter in parameters], limit_bytes):
        arrive = departure([parameters[index] for index in bucket], [])
        for index in bucket:
            parameters[index].register_post_accumulate_grad_hook(arrive)

    def synchronize():
        for work, flat, group in flights:
            work.wait()
            for parameter, total in zip(group, flat.split([parameter.numel() for parameter in group]), strict=True):
                parameter.grad.copy_(total.view_as(parameter) / dist.get_world_size())
        count = len(flights)
        flights.clear()
        return count

    return synchronize


# %% [markdown] lang="fr"
# Votre `overlap_gradients`, puis vos *buckets*, entraînent le réseau convolutif :

# %% [markdown] lang="en"
# Your `overlap_gradients`, then your buckets, train the convolutional network:

# %% name="trained-by-buckets"
# %%ranks --with train,overlap_gradients,bucketed,compare,images,labels
batches = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split(64)[:20]
_, alone = train(batches)
shares = [batch[rank::world_size] for batch in batches]


def prepared_by(prepare):
    def wrap(model):
        model.synchronize = prepare(model)
        return model

    return {"wrap": wrap, "after_backward": lambda model: model.synchronize()}


compare(*train(shares, **prepared_by(overlap_gradients)), alone)
compare(*train(shares, **prepared_by(lambda model: bucketed(model, 2**12))), alone)

# %% [markdown] lang="fr"
# Ce qui voyage pendant la passe arrière est **recouvert** ; ce qu’il faut attendre après elle est **exposé**, et lui
# seul coûte du temps.
#
# **Votre prédiction.** Avec `average_gradients`, tout est exposé. Combien de secondes par pas, sur nos deux rangs,
# d’après `two.alpha_s` et `two.beta_s_per_byte` ? La cellule donne ensuite la durée d’un pas, puis ce qui en est
# exposé.

# %% [markdown] lang="en"
# What travels during the backward pass is **hidden**; what must be waited for after it is **exposed**, and only that
# costs time.
#
# **Your prediction.** With `average_gradients` everything is exposed. How many seconds per step, on our two ranks, by
# `two.alpha_s` and `two.beta_s_per_byte`? The cell then gives the time of a step, and how much of it is exposed.

# %% name="predict-exposed" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "exposed",
    ### BEGIN SOLUTION
    sum(ring_seconds(each, 2, two.alpha_s, two.beta_s_per_byte) for each in wide_bytes),
    ### END SOLUTION
)

# %% name="measure-exposed"
# %%ranks --with step_s,make_wide,average_gradients,bucketed,x,y
ways = {name: (make_wide(), None) for name in ("nothing", "afterwards", "one bucket", "1 MiB")}
ways["afterwards"] = (ways["afterwards"][0], average_gradients)
sent = {}
for name, limit in (("one bucket", 2**30), ("1 MiB", 2**20)):
    synchronize = bucketed(ways[name][0], limit)
    ways[name] = (ways[name][0], lambda model, name=name, wait=synchronize: sent.update({name: wait()}))


def turn():
    measured = {}
    for name, (model, communicate) in ways.items():
        dist.barrier()
        measured[name] = step_s(model, x, y, communicate)
    return measured


exposed_turns = [turn() for _ in range(7)]
calls = dict(sent)

# %% name="reveal-bucket-calls"
lab.reveal("bucket-calls", ranks["calls"][0]["1 MiB"])

# %% name="reveal-exposed" tags=["nbval-ignore-output"]
of_turns = zip(*ranks["exposed_turns"], strict=True)  # the slowest rank's // ceux du rang le plus lent
turns = [{name: max(of_rank[name] for of_rank in turn) for name in turn[0]} for turn in of_turns]
step = {name: median(turn[name] for turn in turns) for name in turns[0]}
exposed_s = {name: median(turn[name] - turn["nothing"] for turn in turns) for name in step}
names = ("nothing // rien", "afterwards // après", "one bucket // un seul", "1 MiB // 1 Mio")
for name, shown in zip(step, names, strict=True):
    print(f"{shown:<12} {decimal(1e3 * step[name]):>6} ms  {decimal(1e3 * exposed_s[name]):>6} ms")
lab.reveal("exposed", exposed_s["afterwards"])

# %% [markdown] lang="fr"
# L’écart : les divisions, et l’attente d’un cœur, que deux rangs et les *threads* de gloo se partagent. Un *bucket*
# unique n’est complet qu’à la fin : rien ne le recouvre, mais il ne paie qu’une latence, là où « après » en paie une
# par gradient. Des *buckets* trop petits en paient trop. Comparez les deux dernières lignes : ici, communiquer prend
# des cœurs au calcul, et le recouvrement gagne peu, et perd parfois ; sur GPU, les calculs n’en souffrent guère.
#
# Notre version suppose que tous les gradients arrivent, dans le même ordre sur tous les rangs ;
# [dlojz/by_hand/ddp.py](../../dlojz/by_hand/ddp.py), non. Voici sa chronologie : sous le calcul, les communications.

# %% [markdown] lang="en"
# The gap to your prediction: the divisions, and waiting for a core, which two ranks and gloo's threads share. A single
# bucket is complete only at the end: nothing hides it, but it pays one latency, where “afterwards” pays one for each
# gradient. Buckets that are too small pay too many. Compare the last two rows: here communicating takes cores away from
# computing, and overlap gains little, and sometimes loses; a GPU communicates without slowing its computation
# much.
#
# Our version supposes that all gradients come, in the same order on all ranks;
# [dlojz/by_hand/ddp.py](../../dlojz/by_hand/ddp.py) does not. This is its timeline: the communication of each rank is
# below its computation.

# %% name="timeline" tags=["nbval-ignore-output"]
config = dlojz.RunConfig.of(model="coatnet_tiny", dp=2, micro_batch=16, steps=10, engine="by_hand", bucket_mib=0.25)
timeline_figure(dlojz.run(config).record)

# %% [markdown] lang="fr"
# ## 7. Cumuler les gradients
#
# Un GPU n’a pas toujours la place pour le batch voulu. On enchaîne les passes avant et arrière de
# *micro-batches*, dont les gradients s’additionnent dans `parameter.grad`, avant **un seul** pas d’optimiseur.
#
# ### Exercice 9 — l’accumulation
#
# `micro_batches` est une liste de couples (images, étiquettes) de même taille ; chacun a sa passe avant, puis sa passe
# arrière. La perte est `F.cross_entropy(model(images), labels)`, en moyenne sur un *micro-batch*. Au retour, chaque
# gradient doit être celui de la perte moyenne sur **tous les micro-batches de tous les rangs**, chaque paramètre
# n’ayant été communiqué qu’**une fois**. Servez-vous de votre `average_gradients`.

# %% [markdown] lang="en"
# ## 7. Accumulating gradients
#
# A GPU does not always have room for the batch one wants. Then forward and backward passes run on micro-batches, whose
# gradients add up in `parameter.grad`, before **one single** optimizer step.
#
# ### Exercise 9 — accumulation
#
# `micro_batches` is a list of pairs (images, labels) of the same size; each has a forward pass, then a backward pass.
# The loss is `F.cross_entropy(model(images), labels)`, a mean over one micro-batch. On return each gradient must be
# that of the mean loss over **all micro-batches of all ranks**, and each parameter must have been communicated only
# **once**. Use your `average_gradients`.


# %% name="accumulation"
def accumulate(model, micro_batches):
    ### BEGIN SOLUTION
    for images, labels in micro_batches:
        (F.cross_entropy(model(images), labels) / len(micro_batches)).backward()
    average_gradients(model)  # once, after the loop // une fois, après la boucle
    ### END SOLUTION


lab.check("accumulation", accumulate)

# %%
# lab.hint("accumulation")

# %% [markdown] lang="fr"
# **Votre prédiction.** Avec quatre *micro-batches* de 256 images par pas, combien de fois plus d’images par seconde
# qu’avec un seul ? Il suffit du temps d’un pas sans communication, `step["nothing"]`, et de
# `exposed_s["afterwards"]`.

# %% [markdown] lang="en"
# **Your prediction.** With four micro-batches of 256 images per step, how many times more images per second than with
# one? The time of a step without communication, `step["nothing"]`, and `exposed_s["afterwards"]` are enough.

# %% name="predict-accumulation" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "accumulation-rate",
    ### BEGIN SOLUTION
    4 * (step["nothing"] + exposed_s["afterwards"]) / (4 * step["nothing"] + exposed_s["afterwards"]),
    ### END SOLUTION
)

# %% name="measure-accumulation"
# %%ranks --with accumulate,make_wide,x,y
import time

model = make_wide()


def rate(count):
    dist.barrier()
    start = time.perf_counter()
    model.zero_grad()
    accumulate(model, count * [(x, y)])
    return count * len(x) / (time.perf_counter() - start)


rates = [(rate(1), rate(4)) for _ in range(5)]

# %% name="reveal-accumulation" tags=["nbval-ignore-output"]
lab.reveal("accumulation-rate", median(rate_of_4 / rate_of_1 for rate_of_1, rate_of_4 in ranks["rates"][0]))

# %% [markdown] lang="fr"
# Le DDP de PyTorch communique dans la passe arrière, donc à chaque *micro-batch*, sauf sous `with model.no_sync():`.
# Placez-y tous les *micro-batches* sauf le dernier.

# %% [markdown] lang="en"
# PyTorch's DDP communicates in the backward pass, so with each micro-batch, except under `with model.no_sync():`. Put
# all micro-batches but the last there.

# %% [markdown] lang="fr"
# ## 8. Qui lit quoi ?
#
# Reste la deuxième règle. Chaque rang calcule **seul** les numéros des échantillons qu’il lira, comme le
# `DistributedSampler` de PyTorch. (Par défaut, celui-ci complète les parts en **répétant** des échantillons ; avec
# `drop_last=True`, il en laisse de côté, comme vous ici. Le TP 12 montre ce que coûtent les répétitions.)
#
# ### Exercice 10 — l’échantillonneur
#
# Renvoyez, dans une liste ou un tenseur, les numéros (à partir de 0) des échantillons que lit `rank` pendant l’époque
# `epoch`. Les parts sont disjointes, de longueur `num_samples // size` (le reste, différent à chaque époque, est laissé
# de côté) ; le jeu entier est remélangé à chaque époque. Le hasard ne dépend que de la graine `seed` et d’`epoch`.

# %% [markdown] lang="en"
# ## 8. Who reads what?
#
# There remains the second rule. Each rank computes **alone** the indices of the samples it will read, as PyTorch's
# `DistributedSampler` does. (By default it makes the shares equally long by **repeating** samples; with
# `drop_last=True` it leaves some out, as you do here. Lab 12 shows what repeated samples do to a metric.)
#
# ### Exercise 10 — the sampler
#
# Return, in a list or a tensor, the indices (from 0) of the samples that `rank` reads during the epoch `epoch`. The
# shares are disjoint, of length `num_samples // size` (the rest, another one in every epoch, is left out); the whole
# data set is shuffled anew in every epoch. The shuffle depends on `seed`, the same on all ranks, and on `epoch` alone.


# %% name="sampler"
def epoch_indices(num_samples, rank, size, epoch, seed):
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed + epoch)
    shuffled = torch.randperm(num_samples, generator=generator)
    return shuffled[rank::size][: num_samples // size]
    ### END SOLUTION


lab.check("sampler", epoch_indices)

# %%
# lab.hint("sampler")

# %% [markdown] lang="fr"
# Vos parts de 24 échantillons :

# %% [markdown] lang="en"
# Your shares of 24 samples:

# %%
figures.shares(epoch_indices)

# %% [markdown] lang="fr"
# ### Le piège
#
# Et si l’échantillonneur oublie `rank` ? Aucune erreur : les pertes descendent. Entraînons quatre rangs pendant 20 pas
# de 16 images, avec un échantillonneur fautif, puis avec le vôtre.
#
# **Votre prédiction.** Combien d’images **différentes** l’entraînement fautif aura-t-il lues, tous rangs confondus ?

# %% [markdown] lang="en"
# ### The trap
#
# What happens if the sampler forgets `rank`? No error: the losses go down. Let us train four ranks for 20 steps of 16
# images, once with a faulty sampler, once with yours.
#
# **Your prediction.** How many **different** images will the faulty training have read, over all ranks?

# %% name="predict-distinct" stub="value"
lab.predict(
    "distinct-samples",
    ### BEGIN SOLUTION
    20 * 16,
    ### END SOLUTION
)

# %% name="trap"
# %%ranks 4 --with train,average_gradients,epoch_indices,images,labels
same = torch.as_tensor(epoch_indices(1797, 0, world_size, 0, 0))[:320]
distinct = torch.as_tensor(epoch_indices(1797, rank, world_size, 0, 0))[:320]
_, same_losses = train(same.split(16), after_backward=average_gradients)
_, distinct_losses = train(distinct.split(16), after_backward=average_gradients)

# %% name="reveal-distinct"
lab.reveal("distinct-samples", len(torch.cat(ranks["same"]).unique()))

# %% [markdown] lang="fr"
# Qu’ont-ils appris de plus qu’un processus seul, lisant les mêmes 16 images à chaque pas ? Pour les deux
# échantillonneurs : le nombre d’images différentes, et si les pertes de chaque rang suivent celles de ce processus, à
# un pour mille près.

# %% [markdown] lang="en"
# What have they learned beyond one single process that reads the same 16 images in each step? For the faulty sampler,
# then for the right one: the number of different images, and whether the losses of each rank follow those of that
# process within one per mille.

# %% name="trap-seen"
_, alone = train(ranks["same"][0].split(16))
for name, shown in (("same", "faulty // fautif"), ("distinct", "right // juste")):
    follow = [torch.allclose(torch.tensor(each), torch.tensor(alone), rtol=1e-3) for each in ranks[f"{name}_losses"]]
    print(shown, len(torch.cat(ranks[name]).unique()), "images,", sum(follow), "ranks follow // rangs suivent")

# %% [markdown] lang="fr"
# Rien de plus, pour quatre fois la dépense. Autre oubli silencieux, avec PyTorch : `sampler.set_epoch(epoch)`, sans
# quoi toutes les époques ont le même ordre.
#
# ## 9. Grands batches
#
# Plus de rangs, c’est un plus grand batch global, donc moins de pas par époque. La règle de Goyal et al. (2017) : batch
# `k` fois plus grand, taux d’apprentissage **`k` fois plus grand**. Au début, un tel taux déstabilise l’entraînement ;
# d’où un **warm-up** : le taux monte en ligne droite.
#
# ### Exercice 11 — le taux d’apprentissage d’un grand batch
#
# Renvoyez le taux du pas `step`, pour un batch `scale` fois plus grand : `base_rate` au pas 0, puis, en ligne droite,
# `scale * base_rate` au pas `warmup_steps` et ensuite.

# %% [markdown] lang="en"
# Nothing more: four times the expense for the same training. Another thing forgotten in silence, with PyTorch:
# `sampler.set_epoch(epoch)`, without which all epochs have the same order.
#
# ## 9. Large batches
#
# More ranks means a larger global batch, so fewer steps per epoch. The rule of Goyal et al. (2017): batch `k` times as
# large, learning rate **`k` times as large**. At the beginning such a rate upsets the training; hence a **warm-up**:
# the rate rises in a straight line.
#
# ### Exercise 11 — the learning rate of a large batch
#
# Return the rate of step `step`, for a batch `scale` times as large: `base_rate` at step 0, then, in a straight line,
# `scale * base_rate` at step `warmup_steps` and after it.


# %% name="learning-rate"
def learning_rate(step, base_rate, scale, warmup_steps):
    ### BEGIN SOLUTION
    share = min(1, step / warmup_steps)
    return base_rate * (1 + share * (scale - 1))
    ### END SOLUTION


lab.check("learning-rate", learning_rate)

# %%
# lab.hint("learning-rate")

# %% name="rates"
figures.rates(learning_rate, base_rate=0.05, scales=(1, 4, 16), warmup_steps=17, steps=85)

# %% [markdown] lang="fr"
# Douze époques des mêmes images. Un batch de 64 est celui de 4 rangs à 16 images ; un seul processus suffit à le
# rejouer.

# %% [markdown] lang="en"
# Twelve epochs of the same images. A batch of 64 is that of 4 ranks with 16 images each; one process is enough to
# replay it.

# %% name="large-batches"
generator = torch.Generator().manual_seed(0)
epochs = torch.cat([torch.randperm(1797, generator=generator) for _ in range(12)])
trainings = {
    "16": (16, lambda step: 0.05),
    "64": (64, lambda step: 0.05),
    "64, × 4": (64, lambda step: 4 * 0.05),
    "256": (256, lambda step: 0.05),
    "256, × 16": (256, lambda step: 16 * 0.05),
    "256, × 16, warm-up": (256, lambda step: learning_rate(step, 0.05, 16, 17)),
}
curves = {name: (batch, train(epochs.split(batch), rate)[1]) for name, (batch, rate) in trainings.items()}
figures.large_batches(curves)

# %% [markdown] lang="fr"
# **Expliquez.** Répondez d’après la figure ; la cellule répond ensuite. Sans toucher au taux, que devient la perte
# quand le batch passe de 16 à 256 ? Que change un taux 4 fois plus grand pour le batch de 64, puis le *warm-up* pour
# celui de 256 ? Fait-il alors aussi bien que celui de 16 ?

# %% [markdown] lang="en"
# **Explain.** Answer from the figure first; then the cell answers. With the rate left alone, what becomes of the loss
# from a batch of 16 to one of 256? What does a rate 4 times as large change for the batch of 64, and the warm-up for
# that of 256? Does that one then do as well as the batch of 16?

# %% name="large-batches-seen"
figures.large_batches_seen(curves)

# %% [markdown] lang="fr"
# La règle a ses limites : au-delà d’une certaine taille de batch, plus rien n’y fait (Goyal et al. : vers 8 000 images
# pour ResNet-50 sur ImageNet). L’autre limite du *Data Parallelism* est la mémoire : chaque réplique garde tous les
# poids, gradients et états de l’optimiseur.

# %% [markdown] lang="en"
# The rule has its limits: beyond some size of batch nothing helps any more (Goyal et al.: near 8,000 images for
# ResNet-50 on ImageNet). The other limit of data parallelism is memory: each replica keeps all weights, gradients and
# optimizer states.

# %% [markdown] lang="fr"
# ## 10. Le DDP de PyTorch et ses réglages
#
# | argument | dans `RunConfig` | ce qu’il change |
# |--|--|--|
# | `bucket_cap_mb` | `bucket_mib` | la taille des *buckets*, donc le nombre d’*all-reduce* par pas |
# | `gradient_as_bucket_view` | le même | les gradients *sont* des vues des *buckets* : une copie de moins en mémoire |
# | `no_sync()` | `micro_batches` | l’accumulation sans communication inutile |
#
# Sans réglage, un *bucket* fait 25 Mio, **sauf le premier : 1 Mio**, qui part ainsi plus tôt.
#
# **Votre prédiction.** Combien d’octets partent en premier, avec notre réseau aux couches larges ?

# %% [markdown] lang="en"
# ## 10. PyTorch's DDP and its knobs
#
# | argument | in `RunConfig` | what it changes |
# |--|--|--|
# | `bucket_cap_mb` | `bucket_mib` | the size of buckets, so the number of all-reduces per step |
# | `gradient_as_bucket_view` | the same | gradients *are* views of the buckets: one copy less in memory |
# | `no_sync()` | `micro_batches` | accumulation without needless communication |
#
# By default a bucket holds 25 MiB, **except the first: 1 MiB**, which therefore leaves earlier.
#
# **Your prediction.** How many bytes leave first, with our network of wide layers?

# %% name="predict-first-bucket" stub="value"
lab.predict(
    "first-bucket",
    ### BEGIN SOLUTION
    sum(wide_bytes[index] for index in fill_buckets(wide_bytes, 2**20)[0]),
    ### END SOLUTION
)

# %% name="torch-ddp"
# %%ranks --with make_wide,x,y
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

model, sent = nn.parallel.DistributedDataParallel(make_wide()), []


def noted(state, bucket):
    sent.append(4 * bucket.buffer().numel())
    return allreduce_hook(state, bucket)


model.register_comm_hook(None, noted)
for _ in range(2):  # buckets are made from the order of the first step // découpés d’après l’ordre du premier pas
    sent.clear()
    F.cross_entropy(model(x), y).backward()

# %% name="reveal-first-bucket"
lab.reveal("first-bucket", ranks["sent"][0][0])

# %% name="sizes-sent"
print(*(decimal(each / 2**20, 2) for each in ranks["sent"][0]), "MiB // Mio")

# %% [markdown] lang="fr"
# ## Défi : peu de messages
#
# Facultatif. Sur **quatre rangs**, remplacez en place un vecteur `x`, de longueur multiple de 4, par sa somme sur les
# rangs. Règles : uniquement des messages entre deux rangs (`dist.isend`, `dist.recv`…) ; aucun rang n’envoie plus
# d’éléments que dans un anneau. Le score est le plus grand nombre de messages envoyés par un rang : 6 avec l’anneau.
# **Objectif : 4.**

# %% [markdown] lang="en"
# ## Challenge: few messages
#
# Optional. On **four ranks**, replace a vector `x`, whose length is a multiple of 4, in place by its sum over the
# ranks. Rules: only messages between two ranks (`dist.isend`, `dist.recv`…); no rank sends more elements than in a
# ring. The score is the largest number of messages that a rank sends: 6 with the ring. **Target: 4.**


# %% name="few-messages"
def all_reduce_in_few_messages(x):
    ### BEGIN SOLUTION
    rank, start, end = dist.get_rank(), 0, len(x)
    kept = []
    for distance in (2, 1):  # keep one half, give the other away // garder une moitié, donner l’autre
        kept.append((start, end))
        middle = (start + end) // 2
        mine, sent = ((start, middle), (middle, end)) if rank & distance == 0 else ((middle, end), (start, middle))
        received = torch.empty(mine[1] - mine[0])
        sending = dist.isend(x[slice(*sent)].clone(), rank ^ distance)
        dist.recv(received, rank ^ distance)
        sending.wait()
        x[slice(*mine)] += received
        start, end = mine
    for distance, (first, last) in zip((1, 2), reversed(kept), strict=True):  # the way back // le retour
        missing = (first, start) if start > first else (end, last)
        received = torch.empty(missing[1] - missing[0])
        sending = dist.isend(x[start:end].clone(), rank ^ distance)
        dist.recv(received, rank ^ distance)
        sending.wait()
        x[slice(*missing)] = received
        start, end = first, last
    ### END SOLUTION


lab.check("few-messages", all_reduce_in_few_messages)

# %%
# lab.hint("few-messages")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Faites tourner le script sur plusieurs processus : DDP, un DistributedSampler, `--accumulation` micro-batches par pas.
# Continuez dans votre `train.py`, ou partez de la solution du TP précédent, que fournit
# `dlojz labs script 03 un_autre_dossier`, avec des `# TODO`.
#
# Sur votre machine, `torchrun --nproc-per-node 2 my_training/train.py` le lance sans dlojz. À regarder : à batch global
# égal, les pertes sont celles d’un seul processus.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# dist.init_process_group("nccl" if on_gpu else "gloo")
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
# sampler = DistributedSampler(samples, replicas, replica, shuffle=True, drop_last=True)
# model = DistributedDataParallel(model)
# sampler.set_epoch(epoch)
# with contextlib.nullcontext() if last else model.no_sync():
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Make the script train on several processes: DDP, a DistributedSampler, `--accumulation` micro-batches per step. Go on
# in your `train.py`, or begin with the solution of the lab before, which `dlojz labs script 03 another_folder` writes,
# with a `# TODO` at each place to fill in.
#
# On your machine, `torchrun --nproc-per-node 2 my_training/train.py` starts it without dlojz. What to look for: with
# the same global batch, the losses are those of one process.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# dist.init_process_group("nccl" if on_gpu else "gloo")
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
# sampler = DistributedSampler(samples, replicas, replica, shuffle=True, drop_last=True)
# model = DistributedDataParallel(model)
# sampler.set_epoch(epoch)
# with contextlib.nullcontext() if last else model.no_sync():
# ```
#
# </details>

# %% name="judge-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# Vous avez écrit DDP, et vous savez ce qu’il coûte et ce qui s’en cache. Le TP 04 s’attaque à ce que DDP ne réduit
# pas : la mémoire de chaque réplique.

# %% [markdown] lang="en"
# ## Summary
#
# You have written DDP, and you know what it costs and how much of it can be hidden. Lab 04 tackles what DDP does not
# reduce: the memory of each replica.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
