# %% [markdown] lang="fr"
# # TP 03 — Data Parallelism
#
# Un modèle tient sur un GPU, mais l’entraînement prend trop de temps ? Copiez le modèle sur plusieurs GPU, donnez à
# chacun des données différentes, et faites la moyenne des gradients. L’idée tient en une phrase ; tout le métier est
# dans les mots « faire la moyenne ». Dans ce TP, vous écrivez cette communication vous-même, sur de vrais processus,
# vous prédisez sa durée, puis vous la recouvrez par le calcul, comme le fait **DDP** (*Distributed Data Parallel*).
#
# À la fin, vous saurez :
#
# - écrire un *all-reduce* en anneau, et dire combien d’octets chaque rang envoie ;
# - résumer un réseau par deux nombres, α et β, et prédire ce que coûteront 2, 8 ou 512 GPU ;
# - écrire DDP à la main : diffusion des poids, moyenne des gradients, *buckets*, recouvrement ;
# - cumuler des gradients, répartir les données, et reconnaître les pièges qui ne lèvent aucune erreur ;
# - agrandir la taille de batch sans perdre la convergence, et dire où cela s’arrête ;
# - régler le DDP de PyTorch en connaissance de cause.
#
# Comptez une heure et demie. Quatre rangs suffisent, sans GPU : les processus, les messages et les erreurs sont réels.

# %% [markdown] lang="en"
# # Lab 03 — Data parallelism
#
# A model fits on one GPU, but training takes too long? Copy the model to several GPUs, give each of them different
# data, and average the gradients. The idea is one sentence; the craft is all in the word “average”. In this lab you
# write that communication yourself, on real processes, predict how long it takes, and then hide it behind the
# computation, as **DDP** (Distributed Data Parallel) does.
#
# By the end you can:
#
# - write a ring all-reduce, and tell how many bytes each rank sends;
# - sum up a network in two numbers, α and β, and predict what 2, 8 or 512 GPUs will cost;
# - write DDP by hand: broadcast of the weights, average of the gradients, buckets, overlap;
# - accumulate gradients, split the data, and recognise the traps that raise no error;
# - enlarge the batch without losing convergence, and tell where that ends;
# - set the knobs of PyTorch's DDP knowingly.
#
# Allow an hour and a half. Four ranks are enough, without GPUs: processes, messages and errors are real.

# %% name="setup"
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import dlojz
from dlojz import labs, models
from dlojz.by_hand import collectives
from dlojz.display.figures.communication_figures import calibration_figure, collective_figure
from dlojz.display.figures.run_figures import timeline_figure
from dlojz.labs.lab03_data_parallel import figures

lab = labs.start("03")
# as on the ranks; more threads would only wait here // comme sur les rangs ; plus de threads s’attendraient
torch.set_num_threads(1)

# %% [markdown] lang="fr"
# ## 1. Un processus, puis quatre
#
# Notre modèle est un petit réseau convolutif, nos images les chiffres manuscrits de scikit-learn, en 8 × 8 pixels. La
# fonction `train` est une boucle d’entraînement ordinaire ; trois portes y restent ouvertes pour la suite : le taux
# d’apprentissage à chaque pas, une enveloppe autour du modèle, et ce que l’on fait **juste après la passe arrière**.
# C’est là que tout va se jouer.

# %% [markdown] lang="en"
# ## 1. One process, then four
#
# Our model is a small convolutional network, our images are scikit-learn's handwritten digits, of 8 × 8 pixels. The
# function `train` is an ordinary training loop; three arguments are there for later: the learning rate of each step, a
# wrapper around the model, and what is done **right after the backward pass**. That is where everything will happen.


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
# Passons à quatre. Une cellule qui commence par `%%ranks 4` ne s’exécute pas ici, mais sur quatre processus, les
# **rangs**, qui tournent à côté du notebook. Tous exécutent le même code (*SPMD*, *Single Program, Multiple Data*) ;
# seule la variable `rank` diffère de l’un à l’autre. Chacun a ses propres variables, qui restent d’une cellule à la
# suivante. La première fois, il faut quelques secondes pour les démarrer.

# %% [markdown] lang="en"
# On to four. A cell that begins with `%%ranks 4` does not run here, but on four processes, the **ranks**, that live
# beside the notebook. All run the same code (SPMD, single program, multiple data); only the variable `rank` differs
# from one to another. Each has its own variables, which stay from one cell to the next. The first time, starting
# them takes a few seconds.

# %% name="first-ranks" tags=["nbval-ignore-output"]
# %%ranks 4
print(rank, world_size)

# %% [markdown] lang="fr"
# Sur les rangs, `dist` est `torch.distributed`. Ici, dans le notebook, `ranks["x"]` rapporte la liste des `x` de tous
# les rangs.
#
# **Votre prédiction.** Chaque rang remplit un tenseur de `rank + 1`, puis appelle *all-reduce*, la communication
# collective qui remplace le tenseur de chacun par la somme de tous. Que contiendra celui du rang 3 ?

# %% [markdown] lang="en"
# On the ranks, `dist` is `torch.distributed`. Here in the notebook, `ranks["x"]` brings the list of all ranks' `x`.
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
# Une communication collective attend **tous** les rangs du groupe. Placée sous un `if rank == 0:`, au milieu d’un
# affichage ou d’une sauvegarde, elle bloque le rang 0, qui attend en vain les autres. Ici, le rang 2 oublie.

# %% [markdown] lang="en"
# ### And if one of them forgets?
#
# A collective waits for **all** ranks of the group. Put under an `if rank == 0:`, next to a print or a checkpoint, it
# blocks rank 0, which waits in vain for the others. Here, rank 2 forgets.

# %% name="forgotten"
# %%ranks
forgotten = torch.ones(2)
try:
    if rank != 2:
        dist.all_reduce(forgotten)
except RuntimeError as fault:
    print(fault)

# %% [markdown] lang="fr"
# Sur ces rangs, chaque appel s’inscrit d’abord sur un tableau que tous peuvent lire : la panne est donc trouvée et
# nommée aussitôt. Sur un supercalculateur, les autres rangs attendraient sans un mot, jusqu’au délai de garde de
# PyTorch (10 minutes avec NCCL, 30 avec gloo), et les heures de calcul seraient décomptées. Le même silence suit deux
# communications collectives que les rangs n’appellent pas dans le même ordre.
#
# ## 2. L’anneau
#
# Comment obtenir la somme sur tous les rangs ? Si tous envoyaient leur tenseur au rang 0, celui-ci recevrait tout :
# avec 512 GPU, 511 tenseurs par pas. L’**anneau** évite cet engorgement : le tenseur est coupé en autant de
# **morceaux** que de rangs, et à chaque étape chacun envoie un seul morceau à son voisin de droite, tout en en recevant
# un de son voisin de gauche.
#
# Voici toutes les étapes, avec de vraies valeurs. Les trois premières sont le *reduce-scatter*, les trois suivantes
# l’*all-gather*. Suivez un morceau du regard : où va-t-il, et quand sa somme est-elle complète ?

# %% [markdown] lang="en"
# On these ranks every call is first written on a board that all can read: so the fault is found and named at once. On a
# supercomputer the other ranks would wait without a word until PyTorch's timeout (10 minutes with NCCL, 30 with gloo),
# and the computing hours would be charged. The same silence follows two collectives that the ranks do not call in the
# same order.
#
# ## 2. The ring
#
# How does one get the sum over all ranks? If all sent their tensor to rank 0, it would receive everything: with 512
# GPUs, 511 tensors per step. The **ring** avoids this jam: the tensor is cut in as many **chunks** as there are ranks,
# and in each step every rank sends one chunk to its right neighbour, while receiving one from its left.
#
# Here are all the steps, with real values. The first three are the reduce-scatter, the next three the all-gather.
# Follow one chunk with your eyes: where does it go, and when is its sum complete?

# %%
collective_figure("ring_all_reduce", size=4)

# %% [markdown] lang="fr"
# La même chose pas à pas, avec une phrase par message. Ici l’arbre ; choisissez d’autres algorithmes et d’autres
# nombres de rangs. Sans noyau actif, la figure fixe montre toutes les étapes.

# %% [markdown] lang="en"
# The same step by step, with a sentence for each message. Here the tree; choose other algorithms and other numbers of
# ranks. Where no kernel runs, the static figure shows all steps.

# %% name="stepper" tags=["nbval-ignore-output"]
from dlojz.display.figures.communication_figures import stepper

steps = {"name": "tree_all_reduce", "size": 4}
stepper(**steps)

# %% name="still-steps" tags=["nbval-ignore-output"]
collective_figure(**steps)

# %% [markdown] lang="fr"
# ### Exercice 1 — l’all-reduce en anneau
#
# À vous de l’écrire, sans appeler `dist.all_reduce`. `x` est un vecteur dont la longueur est un multiple du nombre de
# rangs ; il doit être remplacé **en place** par la somme. `chunks[i]` est une vue : ce que vous y écrivez, par
# `chunks[i].add_(…)` ou `chunks[i].copy_(…)`, s’écrit dans `x`.
#
# - `dist.isend(tenseur, destinataire)` rend la main aussitôt et renvoie un objet `Work`, dont la méthode `wait()`
#   attend la fin de l’envoi ;
# - `dist.recv(tenseur, expéditeur)` remplit le tenseur et ne rend la main qu’ensuite.
#
# À l’étape `s` du *reduce-scatter*, comptée à partir de 0, le rang `r` envoie le morceau `r − s` (modulo le nombre de
# rangs). Déduisez-en le morceau qu’il reçoit et ajoute au sien, puis l’*all-gather*. La vérification se fait sur 2, 3
# et 4 rangs.

# %% [markdown] lang="en"
# ### Exercise 1 — the ring all-reduce
#
# Your turn to write it, without calling `dist.all_reduce`. `x` is a vector whose length is a multiple of the number of
# ranks; it must be replaced **in place** by the sum. `chunks[i]` is a view: what you write there, by
# `chunks[i].add_(…)` or `chunks[i].copy_(…)`, is written in `x`.
#
# - `dist.isend(tensor, receiver)` returns at once, with a `Work` object whose method `wait()` waits until all is sent;
# - `dist.recv(tensor, sender)` fills the tensor and returns only then.
#
# In step `s` of the reduce-scatter, counted from 0, rank `r` sends chunk `r − s` (modulo the number of ranks). Derive
# from that which chunk it receives and adds to its own, then the all-gather. The check runs on 2, 3 and 4 ranks.


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
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("ring-all-reduce")

# %% [markdown] lang="fr"
# Votre anneau, sur les quatre rangs, face à la bibliothèque. `--with` envoie aux rangs une fonction du notebook,
# ou la copie d’une valeur.

# %% [markdown] lang="en"
# Your ring, on the four ranks, against the library. `--with` sends a function of the notebook to the ranks,
# or a copy of a value.

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
# Le modèle le plus simple d’un réseau a deux paramètres (Hockney, 1994) : un message de `n` octets met
#
# $$t = \alpha + \beta\, n$$
#
# secondes. α est la **latence**, payée par tout message, même vide ; β est l’inverse du **débit**, en secondes par
# octet.
#
# ### Exercice 2 — la durée de l’anneau
#
# Combien de temps prend l’*all-reduce* en anneau d’un message de `message_bytes` octets, sur `size` rangs ? Renvoyez
# des secondes ; `alpha_s` et `beta_s_per_byte` sont α et β. Négligez le temps des additions ; à chaque étape, tous les
# rangs envoient en même temps.

# %% [markdown] lang="en"
# ## 3. How long does it take?
#
# The simplest model of a network has two parameters (Hockney, 1994): a message of `n` bytes takes
#
# $$t = \alpha + \beta\, n$$
#
# seconds. α is the **latency**, paid by every message, even an empty one; β is the inverse of the **bandwidth**, in
# seconds per byte.
#
# ### Exercise 2 — the time of the ring
#
# How long does the ring all-reduce of a message of `message_bytes` bytes take on `size` ranks? Return seconds;
# `alpha_s` and `beta_s_per_byte` are α and β. Neglect the time of the additions; in each step all ranks send at the
# same time.


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
# Mesurons maintenant. Chaque taille de message est chronométrée plusieurs fois, sur tous les rangs ; c’est le plus lent
# qui compte.

# %% [markdown] lang="en"
# Now let us measure. Each size of message is timed several times, on all ranks; the slowest one counts.

# %% name="measure"
# %%ranks
from dlojz.by_hand import collectives

points = collectives.measure("all_reduce", [2**power for power in range(12, 23, 2)])

# %% name="points" tags=["nbval-ignore-output"]
points = ranks["points"][0]
for point in points:
    print(f"{point.message_bytes:>8} B  {1e3 * point.time_s:7.3f} ms")

# %% [markdown] lang="fr"
# ### Exercice 3 — retrouver α et β
#
# Les durées `t` d’un *all-reduce* sur `p` rangs suivent une droite, `t = a + b·n`, avec
#
# $$a = 2(p-1)\,\alpha \qquad b = \frac{2(p-1)}{p}\,\beta$$
#
# Cherchez la droite qui minimise la somme des carrés des écarts **relatifs**, $\sum \left(\frac{a + b\,n -
# t}{t}\right)^2$ : avec des écarts absolus, une durée mille fois plus longue pèserait un million de fois plus, et α
# serait noyée dans le bruit. `message_bytes` et `seconds` sont les listes des `n` et des `t`, `size` est `p`. Renvoyez
# `alpha_s, beta_s_per_byte`. Vous pouvez utiliser `np.linalg.lstsq`.

# %% [markdown] lang="en"
# ### Exercise 3 — finding α and β
#
# The times `t` of an all-reduce on `p` ranks follow a line, `t = a + b·n`, with
#
# $$a = 2(p-1)\,\alpha \qquad b = \frac{2(p-1)}{p}\,\beta$$
#
# Find the line that minimises the sum of the squares of the **relative** gaps,
# $\sum \left(\frac{a + b\,n - t}{t}\right)^2$: with absolute ones a time a thousand times longer would weigh a million
# times more, and α would drown in the noise. `message_bytes` and `seconds` are the lists of the `n` and the `t`, `size`
# is `p`. Return `alpha_s, beta_s_per_byte`. You may use `np.linalg.lstsq`.

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
# rangs. Entre processus d’une même machine, les messages passent par la mémoire : β n’a rien de celui d’un réseau, mais
# la forme est la même.

# %% [markdown] lang="en"
# The package makes the same fit. On the left your measurements and the line; on the right, what it predicts for 2, 8
# and 512 ranks. Between processes of one machine, messages go through memory: β is nothing like that of a network, but
# the shape is the same.

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
# Prenons un réseau de supercalculateur, α = 10 µs et 25 Go/s, et les gradients de ResNet-50 en fp32. Pour trois
# algorithmes, la durée en millisecondes d’un *all-reduce* sur 2, 8 et 512 GPU :

# %% [markdown] lang="en"
# ### From 2 to 512 GPUs
#
# Let us take a supercomputer's network, α = 10 µs and 25 GB/s, and the gradients of ResNet-50 in fp32. For three
# algorithms, the milliseconds that an all-reduce takes on 2, 8 and 512 GPUs:

# %% name="algorithms"
network = {"alpha_s": 10e-6, "beta_s_per_byte": 1 / 25e9}
gradient_bytes = 4 * 25_557_032

for algorithm in ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce"):
    costs_s = [collectives.cost_s(algorithm, gradient_bytes, size, **network) for size in (2, 8, 512)]
    print(f"{algorithm:<28}", [round(1e3 * cost_s, 1) for cost_s in costs_s])

# %% [markdown] lang="fr"
# Dans l’anneau, chaque rang envoie le moins d’octets possible, et ce volume ne dépend presque pas du nombre de GPU :
# c’est ce qui rend le *Data Parallelism* possible à grande échelle. Mais il faut `2 (p − 1)` étapes, et chacune paie α.
# L’arbre fait `2 log₂ p` étapes, mais y envoie tout le message : il l’emporte sur l’anneau pour les petits messages.
# (NCCL choisit aussi entre anneau et arbre selon la taille, mais son arbre n’est pas celui-ci : il est double, et les
# messages y passent en morceaux, à la chaîne ; il envoie presque aussi peu d’octets que l’anneau.) Le troisième envoie
# aussi peu d’octets que l’anneau, en `2 log₂ p` étapes : le meilleur d’après notre modèle, qui ignore toutefois que ses
# rangs parlent à des rangs lointains, par des liens que d’autres empruntent au même moment.
#
# **Votre prédiction.** Sur ce réseau, avec l’anneau et ce modèle, à partir de combien de GPU la latence prend-elle plus
# de temps que les octets ?

# %% [markdown] lang="en"
# In the ring each rank sends as few bytes as possible, and hardly more of them with more GPUs: that is what makes data
# parallelism possible at a large scale. But there are `2 (p − 1)` steps, and each pays α. The tree takes `2 log₂ p`
# steps, but sends the whole message in each: it beats the ring for small messages. (NCCL, too, chooses between ring and
# tree by size, but its tree is another one: a double one, through which messages pass in pieces, as in a pipeline; it
# sends nearly as few bytes as the ring.) The third sends as few bytes as the ring, in `2 log₂ p` steps: the best by our
# model, which overlooks, however, that its ranks talk to distant ones, over links that others use at the same moment.
#
# **Your prediction.** On this network, with the ring and this model, from how many GPUs on does latency take more time
# than the bytes?

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
# Coupez les gradients en quatre messages, et ce seuil tombe au quart : c’est le prix des *buckets*, que nous verrons
# plus loin. Voilà aussi pourquoi les très grands *all-reduce* sont hiérarchiques : d’abord dans le nœud, puis entre les
# nœuds.
#
# ## 4. DDP à la main
#
# Le *Data Parallelism*, en quatre règles :
#
# 1. au départ, toutes les répliques ont les **mêmes poids** : ceux du rang 0, diffusés par un *broadcast* ;
# 2. à chaque pas, chaque rang lit des **données différentes** ;
# 3. après la passe arrière, on fait la **moyenne des gradients** ;
# 4. tous les rangs font le même pas d’optimiseur : ils restent identiques, sans plus jamais s’envoyer de poids.
#
# La première règle, en vrai. Chaque rang tire ses propres poids initiaux, puis reçoit ceux du rang 0 :

# %% [markdown] lang="en"
# Cut the gradients in four messages, and this threshold falls to a quarter: that is the price of the buckets, which we
# will come to. It is also why very large all-reduces are hierarchical: first within the node, then between nodes.
#
# ## 4. DDP by hand
#
# Data parallelism, in four rules:
#
# 1. at the start all replicas have the **same weights**: those of rank 0, given to all by a broadcast;
# 2. in each step every rank reads **different data**;
# 3. after the backward pass the **gradients are averaged**;
# 4. all ranks take the same optimizer step: they stay identical without ever sending weights again.
#
# The first rule, for real. Each rank draws its own initial weights, then gets those of rank 0:

# %% name="broadcast"
# %%ranks --with make_model
model = make_model(seed=rank)
print(round(model[7].weight.abs().sum().item(), 1))
for weight in model.parameters():
    dist.broadcast(weight.data, src=0)
print(round(model[7].weight.abs().sum().item(), 1))

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
# Votre DDP s’entraîne : des batches globaux de 64 images, 16 par rang. Deux questions, auxquelles les rangs répondent :
# les répliques ont-elles toujours les mêmes poids, **bit à bit** ? Et la perte moyenne suit-elle, à un pour mille près,
# celle d’un processus seul qui lit les 64 images ?

# %% [markdown] lang="en"
# Your DDP trains: global batches of 64 images, 16 per rank. Two questions, which the ranks answer: do the replicas
# still have the same weights, **bit by bit**? And does the mean loss follow, within one per mille, that of one process
# that reads all 64 images?

# %% name="ddp-on-ranks"
# %%ranks --with train,average_gradients,images,labels
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
batches = order.split(64)[:20]
replica, losses = train([batch[rank::world_size] for batch in batches], after_backward=average_gradients)

weights = nn.utils.parameters_to_vector(replica.parameters()).detach()
largest = weights.clone()
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
print(torch.equal(weights, largest))

mean = torch.tensor(losses)
dist.all_reduce(mean)
_, alone = train(batches)
print(torch.allclose(mean / world_size, torch.tensor(alone), rtol=1e-3))

# %% [markdown] lang="fr"
# ## 5. Cacher la communication
#
# Notre version attend la fin de la passe arrière, puis communique un paramètre après l’autre. Deux défauts : autant de
# latences que de paramètres, et un GPU inactif pendant tout ce temps. DDP (Li et al., 2020) les corrige tous deux.
#
# - **Les *buckets*.** Les gradients voyagent par groupes : moins de messages, donc moins de latence.
# - **Le recouvrement.** La passe arrière commence par la fin du modèle : les gradients des dernières couches sont prêts
#   bien avant ceux des premières. Un *bucket* plein part aussitôt, et voyage pendant que le calcul continue.
#
# ### Exercice 5 — remplir les *buckets*
#
# `gradient_bytes[i]` est la taille du gradient du paramètre `i`, dans l’ordre de `model.parameters()`. Renvoyez la
# liste des *buckets*, chacun étant une liste de numéros de paramètres, **dans l’ordre où les gradients sont prêts** : à
# rebours. On ajoute les gradients un par un ; un *bucket* est fermé dès qu’il contient `limit_bytes` octets ou
# davantage. Le dernier peut être incomplet.

# %% [markdown] lang="en"
# ## 5. Hiding the communication
#
# Our version waits for the end of the backward pass, then communicates one parameter after the other. Two flaws: as
# many latencies as parameters, and a GPU that is idle all that time. DDP (Li et al., 2020) mends both.
#
# - **Buckets.** Gradients travel in groups: fewer messages, so less latency.
# - **Overlap.** The backward pass begins at the end of the model: the gradients of the last layers are ready long
#   before those of the first. A full bucket leaves at once, and travels while the computation goes on.
#
# ### Exercise 5 — filling the buckets
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
# Vos *buckets* de 0,25 Mio, pour `coatnet_tiny`. Un *bucket* peut dépasser la limite : un gradient ne se coupe pas.

# %% [markdown] lang="en"
# Your buckets of 0.25 MiB, for `coatnet_tiny`. A bucket may exceed the limit: a gradient is never cut.

# %%
coatnet_bytes = [4 * parameter.numel() for parameter in models.build("coatnet_tiny", num_classes=10).parameters()]
figures.buckets(fill_buckets, coatnet_bytes, 2**18)

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien d’*all-reduce* par pas, avec ces *buckets* ?

# %% [markdown] lang="en"
# **Your prediction.** How many all-reduces per step, with these buckets?

# %% name="predict-bucket-calls" stub="value"
lab.predict(
    "bucket-calls",
    ### BEGIN SOLUTION
    len(fill_buckets(coatnet_bytes, 2**18)),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# ### Exercice 6 — communiquer pendant la passe arrière
#
# `parameter.register_post_accumulate_grad_hook(f)` fait appeler `f(parameter)` pendant la passe arrière, dès que
# `parameter.grad` est définitif. Et `dist.all_reduce(tenseur, async_op=True)` rend la main aussitôt, avec un objet
# `Work` : jusqu’à son `wait()`, le tenseur voyage, et il ne faut ni le lire, ni l’écrire.
#
# Écrivez une fonction qui prépare le modèle une fois pour toutes, puis renvoie une fonction `synchronize()`, à appeler
# entre la passe arrière et l’optimiseur. Après `synchronize()`, chaque gradient doit être la moyenne sur les rangs.
# Ici, sans *buckets* : un message par paramètre.

# %% [markdown] lang="en"
# ### Exercise 6 — communicating during the backward pass
#
# `parameter.register_post_accumulate_grad_hook(f)` has `f(parameter)` called during the backward pass, as soon as
# `parameter.grad` is final. And `dist.all_reduce(tensor, async_op=True)` returns at once, with a `Work` object: until
# its `wait()` the tensor travels, and must be neither read nor written.
#
# Write a function that prepares the model once and for all, then returns a function `synchronize()`, to be called
# between the backward pass and the optimizer. After `synchronize()` each gradient must be the mean over the ranks. No
# buckets here: one message per parameter.


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
# *Hooks* et *buckets* ensemble : c’est DDP. Le paquet en contient une version complète, en moins de 300 lignes :
# [dlojz/by_hand/ddp.py](../../dlojz/by_hand/ddp.py). Lisez-la, en cherchant la réponse à trois questions :
#
# - un *bucket* plein attend parfois avant de partir : qu’attend-il, et pourquoi ?
# - que devient un paramètre que la passe arrière n’a pas atteint sur un rang, mais qu’elle a atteint sur un autre ?
# - comment `no_sync()` évite-t-il des communications ?
#
# Puis mesurons-la, sur un véritable entraînement à deux rangs, avec des *buckets* de 0,25 Mio, puis avec la taille
# habituelle de 25 Mio, où tous les gradients tiennent dans un seul *bucket*.

# %% [markdown] lang="en"
# Hooks and buckets together: that is DDP. The package holds a complete version, in fewer than 300 lines:
# [dlojz/by_hand/ddp.py](../../dlojz/by_hand/ddp.py). Read it, looking for the answers to three questions:
#
# - a full bucket sometimes waits before it leaves: for what, and why?
# - what becomes of a parameter that backward has not reached on one rank, but has reached on another?
# - how does `no_sync()` avoid communication?
#
# Then let us measure it, on a real training with two ranks, with buckets of 0.25 MiB, and with the usual size of 25
# MiB, where all gradients fit in one.

# %% name="run-by-hand" tags=["nbval-ignore-output"]
config = dlojz.RunConfig.of(model="coatnet_tiny", dp=2, micro_batch=16, steps=10, engine="by_hand", bucket_mib=0.25)
by_hand = dlojz.run(config)
one_bucket = dlojz.run(config, bucket_mib=25)
by_hand


# %% name="reveal-bucket-calls"
def gradient_traffic(run):
    [traffic] = [each for each in run.record.footprint().communication if each.group == "dp"]
    return traffic


lab.reveal("bucket-calls", gradient_traffic(by_hand).count)

# %% [markdown] lang="fr"
# La chronologie de quelques pas : sous le calcul de chaque rang, ses communications. Ce qui voyage pendant la passe
# arrière est **recouvert** ; ce qu’il faut attendre après elle est **exposé**, et lui seul coûte du temps. La seconde
# cellule donne, pour chaque entraînement, les *all-reduce* d’un pas, les millisecondes recouvertes, puis les
# millisecondes exposées.

# %% [markdown] lang="en"
# The timeline of a few steps: below the computation of each rank, its communication. What travels during the backward
# pass is **hidden**; what must be waited for after it is **exposed**, and only that costs time. The second cell gives,
# for each training, the all-reduces of a step, the milliseconds hidden, then the milliseconds exposed.

# %% tags=["nbval-ignore-output"]
timeline_figure(by_hand.record)

# %% name="exposed" tags=["nbval-ignore-output"]
for run in (by_hand, one_bucket):
    phases = run.record.footprint().phases
    hidden_ms, exposed_ms = 1e3 * phases.communication_hidden_s, 1e3 * phases.communication_exposed_s
    print(f"{gradient_traffic(run).count} × all-reduce  {hidden_ms:6.1f} ms  {exposed_ms:6.1f} ms")

# %% [markdown] lang="fr"
# Un *bucket* unique n’est complet qu’à la fin : il n’y a plus rien pour le cacher. Des *buckets* trop petits paient
# trop de latences, et sur notre machine, communiquer prend aussi des cœurs au calcul. La bonne taille est entre les
# deux ; elle dépend du réseau, donc se mesure.
#
# Et les trois questions ? Un *bucket* plein attend ceux qui le précèdent : des rangs qui enverraient les mêmes
# *buckets* dans un autre ordre additionneraient des gradients qui ne vont pas ensemble. Un paramètre que la passe
# arrière n’a pas atteint compte pour zéro : son *bucket* part quand même, mais seulement dans `synchronize()`, et
# personne ne reste bloqué. Enfin, sous `no_sync()`, les *hooks* ne font que noter qu’il y a quelque chose à envoyer.
#
# ## 6. Cumuler les gradients
#
# Un GPU n’a pas toujours la place pour le batch voulu. On fait alors plusieurs passes avant et arrière sur des
# *micro-batches*, dont les gradients s’additionnent dans `parameter.grad`, avant **un seul** pas d’optimiseur. Pour le
# modèle, c’est un batch plus grand ; pour le réseau, rien n’oblige à communiquer à chaque passe.
#
# ### Exercice 7 — l’accumulation
#
# `micro_batches` est une liste de couples (images, étiquettes), tous de même taille ; chacun a sa passe avant, puis sa
# passe arrière, pour n’en garder qu’un en mémoire. La perte est `F.cross_entropy(model(images), labels)`, en moyenne
# sur un *micro-batch*. Au retour, chaque gradient doit être celui de la perte moyenne sur **tous les micro-batches de
# tous les rangs**, chaque paramètre n’ayant été communiqué qu’**une fois**. Servez-vous de votre `average_gradients`.

# %% [markdown] lang="en"
# A single bucket is complete only at the end: there is nothing left to hide it behind. Buckets that are too small pay
# too many latencies, and on our machine communicating also takes cores away from computing. The right size lies in
# between; it depends on the network, so it is measured.
#
# And the three questions? A full bucket waits for those before it: ranks that sent the same buckets in another order
# would add gradients that do not belong together. A parameter that backward has not reached counts as zeros: its bucket
# leaves all the same, if only in `synchronize()`, and nobody is stuck. And under `no_sync()` the hooks only note that
# there is something to send.
#
# ## 6. Accumulating gradients
#
# A GPU does not always have room for the batch one wants. Then several forward and backward passes run on
# micro-batches, whose gradients add up in `parameter.grad`, before **one single** optimizer step. To the model it is a
# larger batch; to the network, nothing says that every pass must communicate.
#
# ### Exercise 7 — accumulation
#
# `micro_batches` is a list of pairs (images, labels), all of the same size; each has a forward pass, then a backward
# pass, so that only one is kept in memory. The loss is `F.cross_entropy(model(images), labels)`, a mean over one
# micro-batch. On return each gradient must be that of the mean loss over **all micro-batches of all ranks**, and each
# parameter must have been communicated only **once**. Use your `average_gradients`.


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
# Le DDP de PyTorch communique dans la passe arrière, donc à chaque *micro-batch*, sauf sous `with model.no_sync():`. Le
# paquet s’en sert pour tous les *micro-batches* sauf le dernier.
#
# **Votre prédiction.** Avec `micro_batches=4`, combien de fois moins d’octets communique-t-on **par image lue** ?

# %% [markdown] lang="en"
# PyTorch's DDP communicates in the backward pass, so with each micro-batch, except under `with model.no_sync():`. The
# package uses it for all micro-batches but the last.
#
# **Your prediction.** With `micro_batches=4`, how many times fewer bytes are communicated **per image read**?

# %% name="predict-accumulation" stub="value"
lab.predict(
    "accumulation-saving",
    ### BEGIN SOLUTION
    4,
    ### END SOLUTION
)

# %% name="run-ddp" tags=["nbval-ignore-output"]
ddp = dlojz.run(config, engine="torch")
accumulating = dlojz.run(config, engine="torch", micro_batches=4)
accumulating


# %% name="reveal-accumulation"
def bytes_per_image(run):
    return gradient_traffic(run).message_bytes / run.config.layout.global_batch


lab.reveal("accumulation-saving", bytes_per_image(ddp) / bytes_per_image(accumulating))

# %% [markdown] lang="fr"
# ## 7. Qui lit quoi ?
#
# Reste la deuxième règle : des données différentes sur chaque rang. Personne ne les distribue : chaque rang calcule
# **seul** les numéros des échantillons qu’il lira, et tous les calculs doivent s’accorder. C’est le rôle du
# `DistributedSampler` de PyTorch. (Par défaut, il complète les parts en **répétant** des échantillons, pour qu’elles
# soient de même longueur ; avec `drop_last=True`, il en laisse de côté, comme vous allez le faire. Le TP 12 montre ce
# que coûtent les répétitions quand on mesure.)
#
# ### Exercice 8 — l’échantillonneur
#
# Renvoyez, dans une liste ou un tenseur, les numéros (à partir de 0) des échantillons que lit `rank` pendant l’époque
# `epoch`. Les parts sont disjointes, de même longueur `num_samples // size` (le reste, différent à chaque époque, est
# laissé de côté), et le jeu de données entier est remélangé à chaque époque. Le hasard ne dépend que de `seed`, la
# graine commune à tous les rangs, et d’`epoch` : interrogée deux fois, votre fonction répond la même chose.

# %% [markdown] lang="en"
# ## 7. Who reads what?
#
# There remains the second rule: different data on each rank. Nobody deals them out: each rank computes **alone** the
# indices of the samples it will read, and all these computations must agree. That is the role of PyTorch's
# `DistributedSampler`. (By default it makes the shares equally long by **repeating** samples; with `drop_last=True` it
# leaves some out, as you are about to do. Lab 12 shows what repeated samples do to a metric.)
#
# ### Exercise 8 — the sampler
#
# Return, in a list or a tensor, the indices (from 0) of the samples that `rank` reads during the epoch `epoch`. The
# shares are disjoint, of the same length `num_samples // size` (the rest, another one in every epoch, is left out), and
# the whole data set is shuffled anew in every epoch. The shuffle depends on `seed`, the same on all ranks, and on
# `epoch` alone: asked twice, your function gives the same answer.


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
# Vos parts, pour 24 échantillons et 4 rangs : chaque échantillon paraît une fois par époque, sur un rang et un seul.

# %% [markdown] lang="en"
# Your shares, for 24 samples and 4 ranks: each sample appears once per epoch, on one rank only.

# %%
figures.shares(epoch_indices)

# %% [markdown] lang="fr"
# ### Le piège
#
# Que se passe-t-il si l’échantillonneur oublie `rank` ? Aucune erreur, aucun blocage : les pertes descendent.
# Entraînons quatre rangs pendant 20 pas, avec 16 images par rang et par pas : une fois avec un échantillonneur qui
# oublie `rank`, une fois avec le bon.
#
# **Votre prédiction.** Combien d’images **différentes** l’entraînement fautif aura-t-il lues, tous rangs confondus ?

# %% [markdown] lang="en"
# ### The trap
#
# What happens if the sampler forgets `rank`? No error, nothing blocks: the losses go down. Let us train four ranks for
# 20 steps, with 16 images per rank and step: once with a sampler that forgets `rank`, once with the right one.
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
# %%ranks --with train,images,labels
from dlojz.by_hand.ddp import DataParallel, shard_indices

ours = {"wrap": DataParallel, "after_backward": DataParallel.synchronize}
same = torch.tensor(shard_indices(1797, 0, world_size))[:320]
own = torch.tensor(shard_indices(1797, rank, world_size))[:320]
_, same_losses = train(same.split(16), **ours)
_, own_losses = train(own.split(16), **ours)

# %% name="reveal-distinct"
lab.reveal("distinct-samples", len(torch.cat(ranks["same"]).unique()))

# %% [markdown] lang="fr"
# Et les quatre rangs fautifs, qu’ont-ils appris de plus qu’un processus seul, lisant les mêmes 16 images à chaque pas ?
# Leurs pertes suivent-elles les siennes, à un pour mille près ? Chaque ligne donne le nombre d’images différentes, puis
# la réponse pour chaque rang : d’abord avec l’échantillonneur fautif, ensuite avec le bon.

# %% [markdown] lang="en"
# And the four faulty ranks, what have they learned beyond one single process that reads the same 16 images in each
# step? Do their losses follow its own, within one per mille? Each line gives the number of different images, then the
# answer for each rank: first with the faulty sampler, then with the right one.

# %% name="trap-seen"
_, alone = train(ranks["same"][0].split(16))
for name in ("same", "own"):
    follows = [torch.allclose(torch.tensor(each), torch.tensor(alone), rtol=1e-3) for each in ranks[f"{name}_losses"]]
    print(len(torch.cat(ranks[name]).unique()), follows)

# %% [markdown] lang="fr"
# Rien de plus : quatre fois la dépense, pour le même entraînement. Seul le nombre d’images lues trahit la faute :
# vérifiez votre échantillonneur. Autre oubli silencieux, avec celui de PyTorch : `sampler.set_epoch(epoch)`, sans quoi
# toutes les époques ont le même ordre.
#
# ## 8. Grands batches
#
# Plus de rangs, c’est un plus grand batch global, donc moins de pas par époque. Chaque gradient est moins bruité, mais
# le modèle avance-t-il autant ? La règle de Goyal et al. (2017) : batch `k` fois plus grand, taux d’apprentissage **`k`
# fois plus grand**. Au début, quand les poids changent vite, un tel taux déstabilise l’entraînement ; d’où un
# **warm-up** : le taux monte en ligne droite.
#
# ### Exercice 9 — le taux d’apprentissage d’un grand batch
#
# Renvoyez le taux du pas `step`, pour un batch `scale` fois plus grand. Au pas 0, il vaut `base_rate` ; il atteint
# `scale * base_rate` au pas `warmup_steps`, en ligne droite, et y reste.

# %% [markdown] lang="en"
# Nothing more: four times the expense for the same training. Only the number of images read gives the fault away: check
# your sampler. Another thing forgotten in silence, with PyTorch's own: `sampler.set_epoch(epoch)`, without which all
# epochs have the same order.
#
# ## 8. Large batches
#
# More ranks means a larger global batch, so fewer steps per epoch. Each gradient is less noisy, but does the model get
# as far? The rule of Goyal et al. (2017): batch `k` times as large, learning rate **`k` times as large**. At the
# beginning, when the weights change fast, such a rate upsets the training; hence a **warm-up**: the rate rises in a
# straight line.
#
# ### Exercise 9 — the learning rate of a large batch
#
# Return the rate of step `step`, for a batch `scale` times as large. At step 0 it is `base_rate`; it reaches
# `scale * base_rate` at step `warmup_steps`, in a straight line, and stays there.


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
# Douze époques, pour de vrai, et le warm-up de votre fonction : toutes les courbes lisent les mêmes images. Un batch de
# 64 est celui de 4 rangs à 16 images, un batch de 256 celui de 16 rangs ; leur gradient étant la moyenne, un seul
# processus suffit à les rejouer.

# %% [markdown] lang="en"
# Twelve epochs, for real, and the warm-up by your function: all curves read the same images. A batch of 64 is that of 4
# ranks with 16 images each, a batch of 256 that of 16 ranks; as their gradient is the mean, one process is enough to
# replay them.

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
curves = figures.trained(train, epochs, trainings)
figures.large_batches(curves)

# %% [markdown] lang="fr"
# **Expliquez.** Répondez d’abord d’après la figure ; la cellule répond ensuite, dans l’ordre, d’après la perte moyenne
# des derniers pas. Sans toucher au taux, la perte du batch de 256 dépasse-t-elle cinq fois celle du batch de 16 ? Un
# taux 4 fois plus grand divise-t-il au moins par deux celle du batch de 64 ? Avec un taux 16 fois plus grand, se passer
# de *warm-up* la multiplie-t-il au moins par trois ? Et avec le *warm-up*, le batch de 256 fait-il aussi bien que celui
# de 16 ?

# %% [markdown] lang="en"
# **Explain.** Answer from the figure first; then the cell answers, in order, on the mean loss of the last steps. With
# the rate left alone, is that of the batch of 256 more than five times that of the batch of 16? Does a rate 4 times as
# large at least halve that of the batch of 64? With a rate 16 times as large, does doing without warm-up multiply it by
# three at least? And with the warm-up, does the batch of 256 do as well as that of 16?

# %% name="large-batches-seen"
figures.large_batches_seen(curves)

# %% [markdown] lang="fr"
# La règle a ses limites : même avec le *warm-up*, le batch de 256 ne rattrape pas celui de 16, et au-delà
# d’une certaine taille, propre à chaque problème, plus rien n’y fait : Goyal et al. la trouvent vers 8 000 images pour
# ResNet-50 sur ImageNet. C’est l’une des deux limites du *Data Parallelism*. L’autre est la mémoire : chaque réplique
# garde tous les poids, tous les gradients et tous les états de l’optimiseur.
#
# ## 9. Le DDP de PyTorch et ses réglages
#
# Vous savez maintenant ce que font ses arguments :
#
# | argument | dans `RunConfig` | ce qu’il change |
# |--|--|--|
# | `bucket_cap_mb` | `bucket_mib` | le nombre d’*all-reduce* par pas |
# | `gradient_as_bucket_view` | le même | les gradients *sont* des vues des *buckets*, au lieu d’y être copiés |
# | `no_sync()` | `micro_batches` | l’accumulation sans communication inutile |
#
# **Votre prédiction.** Combien d’octets `gradient_as_bucket_view=True` économise-t-il par rang, pour `coatnet_tiny` en
# fp32 ?

# %% [markdown] lang="en"
# The rule has its limits: even with the warm-up, the batch of 256 does not catch up with that of 16, and beyond
# some size, which depends on the problem, nothing helps any more: Goyal et al. find it near 8,000 images for ResNet-50
# on ImageNet. That is one of the two limits of data parallelism. The other is memory: each replica keeps all weights,
# all gradients and all optimizer states.
#
# ## 9. PyTorch's DDP and its knobs
#
# You now know what its arguments do:
#
# | argument | in `RunConfig` | what it changes |
# |--|--|--|
# | `bucket_cap_mb` | `bucket_mib` | the number of all-reduces per step |
# | `gradient_as_bucket_view` | the same | gradients *are* views of the buckets, instead of being copied there |
# | `no_sync()` | `micro_batches` | accumulation without needless communication |
#
# **Your prediction.** How many bytes per rank does `gradient_as_bucket_view=True` save, for `coatnet_tiny` in fp32?

# %% name="predict-bucket-view" stub="value"
lab.predict(
    "bucket-view",
    ### BEGIN SOLUTION
    sum(coatnet_bytes),
    ### END SOLUTION
)

# %% name="run-views" tags=["nbval-ignore-output"]
views = dlojz.run(config, engine="torch", gradient_as_bucket_view=True)
views

# %% name="reveal-bucket-view" tags=["nbval-ignore-output"]
saved = [run.record.footprint().memory.workspace_bytes for run in (ddp, views)]
lab.reveal("bucket-view", saved[0] - saved[1])

# %% [markdown] lang="fr"
# Sans les vues, chaque gradient existe deux fois, dans son paramètre et dans son *bucket* : c’est toute l’économie.
#
# Voici les quatre entraînements face à face, prédictions et mesures : notre DDP, celui de PyTorch, le même avec les
# vues, et le nôtre avec un *bucket* unique.

# %% [markdown] lang="en"
# Without the views every gradient exists twice, in its parameter and in its bucket: that is the whole saving.
#
# Here are the four trainings side by side, predicted and measured: our DDP, PyTorch's, the same with the views, and
# ours with a single bucket.

# %% name="compare" tags=["nbval-ignore-output"]
comparison = dlojz.compare([by_hand, ddp, views, one_bucket])
comparison

# %% [markdown] lang="fr"
# Trois questions, trois réponses calculées : les octets et les appels sont-ils exactement ceux qui étaient prédits ?
# Combien d’*all-reduce* par pas, pour chacun ? Les pertes des trois dernières colonnes suivent-elles celles de la
# première à un pour mille près ?

# %% [markdown] lang="en"
# Three questions, three computed answers: are bytes and calls exactly those predicted? How many all-reduces per step,
# for each? Do the losses of the last three columns follow those of the first within one per mille?

# %% name="compared"
print(comparison.exact)
print([gradient_traffic(run).count for run in (by_hand, ddp, views, one_bucket)])
[
    all(abs(a / b - 1) < 1e-3 for a, b in zip(run.losses, by_hand.losses, strict=True))
    for run in (ddp, views, one_bucket)
]

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Faites entraîner le script par plusieurs processus : un groupe de processus, DDP, un DistributedSampler, et plusieurs
# micro-batches par pas. Continuez dans votre `train.py`, ou partez de la solution du TP précédent :
# `dlojz labs script 03 un_autre_dossier` en écrit un, avec un `# TODO` à chaque endroit à compléter. Jugez-le par
# `dlojz labs judge 03 my_training/train.py`.
#
# Sur votre machine, `torchrun --nproc-per-node 2 my_training/train.py` le lance sans dlojz. À regarder : à batch global
# égal, les pertes sont celles d’un seul processus, et chaque époque a un autre ordre.
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
# Let several processes train the script: a process group, DDP, a DistributedSampler, and several micro-batches per
# step. Go on in your `train.py`, or begin with the solution of the lab before: `dlojz labs script 03 another_folder`
# writes one, with a `# TODO` at each place to fill in. Judge it by `dlojz labs judge 03 my_training/train.py`.
#
# On your machine, `torchrun --nproc-per-node 2 my_training/train.py` starts it without dlojz. What to look for: with
# the same global batch, the losses are those of one process, and every epoch has another order.
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

# %% [markdown] lang="fr"
# ## Bilan
#
# Vous avez écrit DDP : un anneau, une moyenne, des *buckets*, des *hooks*. Vous savez ce qu’il coûte — `2 (p − 1) / p`
# fois les gradients par rang et par pas, et `2 (p − 1)` latences par *bucket* —, ce qui s’en cache, et ce que devient
# l’entraînement quand le batch grandit. Le TP 04 s’attaque à ce que DDP ne réduit pas : la mémoire de chaque réplique.

# %% [markdown] lang="en"
# ## Summary
#
# You have written DDP: a ring, a mean, buckets, hooks. You know what it costs — `2 (p − 1) / p` times the gradients per
# rank and step, and `2 (p − 1)` latencies per bucket —, how much of it can be hidden, and what becomes of training when
# the batch grows. Lab 04 tackles what DDP does not reduce: the memory of each replica.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
