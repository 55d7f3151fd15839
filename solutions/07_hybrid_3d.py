# %% [markdown] lang="fr"
# # TP 07 — Hybride et 3D
#
# Jusqu’ici, un parallélisme à la fois. Le *Data Parallelism* accélère l’entraînement, mais répète le modèle partout
# et gonfle le batch ; le *Pipeline Parallelism* coupe entre les couches, mais laisse une bulle ; le *Tensor
# Parallelism* coupe chaque couche, mais sollicite beaucoup la bande passante. Les plus grands modèles emploient les
# trois ensemble : chaque rang a une place sur une **grille**, et ne parle qu’à ses voisins de ligne, de colonne ou de
# profondeur. Se tromper de groupe ne lève souvent aucune erreur : l’entraînement continue, faux ou dix fois trop
# lent. Dans ce TP, vous construisez la grille, la posez sur des nœuds, puis lancez de vraies exécutions 2D et 3D, que
# vous comparez à un seul processus.
#
# À la fin, vous saurez :
#
# - dire l’étage, la réplique et la tranche d’un rang, et déduire un degré des deux autres ;
# - former les groupes de chaque axe ;
# - compter ce qui sort d’un nœud, et choisir quel axe y reste ;
# - dire quelle communication va sur quel axe ;
# - configurer une exécution 3D, et vérifier pertes, octets et mémoire ;
# - couper aussi la séquence : l’attention en anneau.
#
# Comptez deux heures. Huit processus au plus, sans GPU.

# %% [markdown] lang="en"
# # Lab 07 — Hybrid and 3D
#
# So far, one parallelism at a time. Data parallelism speeds training up, but repeats the model everywhere and swells
# the batch; pipeline parallelism cuts between layers, but leaves a bubble; tensor parallelism cuts each layer, but asks
# much of the bandwidth. The largest models use all three: each rank has a place on a **grid**, and speaks only to its
# neighbours in its row, its column or its depth. Using the wrong group often raises no error: training goes on, but it
# is wrong, or ten times slower. In this lab you build the grid, lay it on nodes, then really run 2D and 3D, and compare
# them with one process.
#
# By the end you can:
#
# - tell a rank's stage, replica and slice, and derive one degree from the other two;
# - form the groups of each axis;
# - count what leaves a node, and choose which axis stays inside;
# - tell which communication goes over which axis;
# - configure a 3D run, and verify losses, bytes and memory;
# - cut the sequence too: ring attention.
#
# Allow two hours. Eight processes at most, without GPUs.

# %% name="setup"
import torch
import torch.distributed as dist

import dlojz
from dlojz import labs
from dlojz.base.language import decimal
from dlojz.by_hand.tensor.axis import TensorAxis, add_up, copy
from dlojz.labs.lab07_hybrid import figures

lab = labs.start("07")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. La grille
#
# La figure du cours : 2 nœuds de 8 GPU, *Tensor* 2, *Pipeline* 4, *Data* 2. Une case par rang ; trois vues de la même
# grille, colorée tour à tour par les groupes de chaque axe.

# %% [markdown] lang="en"
# ## 1. The grid
#
# The course's picture: 2 nodes of 8 GPUs, tensor 2, pipeline 4, data 2. One cell per rank; three views of one grid,
# coloured by the groups of each axis in turn.

# %%
figures.drawn(dp=2, pp=4, tp=2, gpus_per_node=8)

# %% [markdown] lang="fr"
# Trois nombres placent un rang : son **étage** (`pp_rank`), sa **réplique** (`dp_rank`), sa **tranche** (`tp_rank`). La
# convention est celle de Megatron-LM : tp est l’axe le plus intérieur, pp le plus extérieur,
#
# $$\text{rang} = (\text{pp\_rank} \cdot \text{dp} + \text{dp\_rank}) \cdot \text{tp} + \text{tp\_rank}$$
#
# ### Exercice 1 — la place d’un rang
#
# Retrouvez la place à partir du rang : renvoyez `(pp_rank, dp_rank, tp_rank)`.

# %% [markdown] lang="en"
# Three numbers place a rank: its **stage** (`pp_rank`), its **replica** (`dp_rank`), its **slice** (`tp_rank`). The
# convention is that of Megatron-LM: tp is the innermost axis, pp the outermost,
#
# $$\text{rank} = (\text{pp\_rank} \cdot \text{dp} + \text{dp\_rank}) \cdot \text{tp} + \text{tp\_rank}$$
#
# ### Exercise 1 — the place of a rank
#
# Find the place from the rank: return `(pp_rank, dp_rank, tp_rank)`.


# %% name="grid-place"
def place_of(rank, dp, pp, tp):
    ### BEGIN SOLUTION
    without_tp, tp_rank = divmod(rank, tp)
    pp_rank, dp_rank = divmod(without_tp, dp)
    return pp_rank, dp_rank, tp_rank
    ### END SOLUTION


lab.check("grid-place", place_of)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("grid-place")

# %% [markdown] lang="fr"
# Aller et retour : votre place pour quelques rangs de la figure, puis le rang que la formule y trouve.

# %% [markdown] lang="en"
# There and back: your place for some ranks of the picture, then the rank that the formula finds there.

# %% name="places"
figures.places(place_of, dp=2, pp=4, tp=2, ranks=(0, 1, 2, 5, 8, 15))

# %% [markdown] lang="fr"
# ### Exercice 2 — le degré manquant
#
# Une tâche (*job*) demande des processus ; le produit des degrés doit les employer **tous** :
#
# $$\text{processus} = \text{dp} \times \text{pp} \times \text{tp}$$
#
# C’est la règle de Megatron-LM (Narayanan et al., 2021) : on en donne deux, le troisième s’en déduit. (SageMaker écrit
# `processes_per_host` = degré de pipeline × degré de données : les rangs de tenseur y sont comptés **dans** le degré de
# données, qui vaut ici dp × tp.) L’un des trois arguments vaut `None`, ou aucun. Renvoyez `(dp, pp, tp)` ; si aucun
# degré entier ne convient, ou si le produit des trois n’est pas `processes`, levez une `ValueError`.

# %% [markdown] lang="en"
# ### Exercise 2 — the missing degree
#
# A job asks for processes; the product of the degrees must use **all** of them:
#
# $$\text{processes} = \text{dp} \times \text{pp} \times \text{tp}$$
#
# That is Megatron-LM's rule (Narayanan et al., 2021): two are given, the third follows. (SageMaker writes
# `processes_per_host` = pipeline degree × data degree: tensor ranks are counted **within** its data degree, which is
# dp × tp here.) One of the three arguments is `None`, or none is. Return `(dp, pp, tp)`; where no whole degree would
# do, or the product of all three is not `processes`, raise a `ValueError`.


# %% name="grid-degrees"
def complete(processes, dp=None, pp=None, tp=None):
    ### BEGIN SOLUTION
    known = (dp or 1) * (pp or 1) * (tp or 1)
    if processes % known or (None not in (dp, pp, tp) and known != processes):
        raise ValueError(f"{processes} processes, dp={dp}, pp={pp}, tp={tp}")
    missing = processes // known
    return dp or missing, pp or missing, tp or missing
    ### END SOLUTION


lab.check("grid-degrees", complete)

# %%
# lab.hint("grid-degrees")

# %% [markdown] lang="fr"
# ## 2. Les groupes
#
# Une communication collective a lieu dans un **groupe**. Selon chaque axe, tout rang en a exactement un : les rangs
# dont la place ne diffère que selon cet axe.
#
# | axe | dans un groupe | ce qu’ils ont en commun | ce qu’ils échangent |
# |--|--|--|--|
# | tp | les tranches d’une couche | les mêmes échantillons, le même étage | des activations, à chaque couche |
# | dp | les répliques d’une tranche | les mêmes poids | des gradients, une fois par pas |
# | pp | les étages d’une réplique | les mêmes échantillons, l’un après l’autre | des activations, à chaque frontière |
#
# ### Exercice 3 — les groupes d’un axe
#
# Renvoyez la liste des groupes selon `axis` (`"tp"`, `"dp"` ou `"pp"`), chacun étant une liste de rangs (l’ordre est
# libre). `place_of` peut servir.

# %% [markdown] lang="en"
# ## 2. The groups
#
# A collective takes place in a **group**. Along each axis every rank has exactly one: the ranks whose place differs
# along this axis alone.
#
# | axis | in a group | what they have in common | what they exchange |
# |--|--|--|--|
# | tp | the slices of a layer | the same samples, the same stage | activations, in each layer |
# | dp | the replicas of a slice | the same weights | gradients, once per step |
# | pp | the stages of a replica | the same samples, one after the other | activations, at each boundary |
#
# ### Exercise 3 — the groups of an axis
#
# Return the list of the groups along `axis` (`"tp"`, `"dp"` or `"pp"`), each a list of ranks (in any order). `place_of`
# may help.


# %% name="grid-groups"
def groups_of(axis, dp, pp, tp):
    ### BEGIN SOLUTION
    step = {"tp": 1, "dp": tp, "pp": dp * tp}[axis]
    size = {"tp": tp, "dp": dp, "pp": pp}[axis]
    number = ("pp", "dp", "tp").index(axis)
    firsts = [rank for rank in range(dp * pp * tp) if place_of(rank, dp, pp, tp)[number] == 0]
    return [[first + i * step for i in range(size)] for first in firsts]
    ### END SOLUTION


lab.check("grid-groups", groups_of)

# %%
# lab.hint("grid-groups")

# %% [markdown] lang="fr"
# Vos groupes, pour la figure du cours : comparez-les avec ses couleurs.

# %% [markdown] lang="en"
# Your groups, for the course's picture: compare them with its colours.

# %% name="groups"
figures.groups(groups_of, dp=2, pp=4, tp=2)

# %% [markdown] lang="fr"
# ## 3. Le placement : ce qui sort du nœud
#
# Les rangs remplissent les nœuds dans l’ordre : l’ordre des axes décide donc de ce qui reste **dans** un nœud (NVLink)
# et de ce qui passe **entre** les nœuds (le réseau, plusieurs fois plus lent). Prenons LLaMA-2 7B sur la grille du
# cours, en fp32, 16 micro-batches d’une séquence de 2 048 tokens.
#
# ### Exercice 4 — les octets qui sortent du nœud
#
# Un groupe communique en anneau, dans l’ordre donné : chaque rang envoie à son voisin, le dernier au premier. Un
# *all-reduce* d’un message de M octets fait envoyer à chacun 2(n − 1)/n · M ; un *reduce-scatter* ou un *all-gather*,
# la moitié (TP 03). Renvoyez le nombre d’octets que les rangs de `group`, tous ensemble, envoient à un **autre
# nœud**. Le rang r est sur le nœud `r // gpus_per_node` ; `collective` vaut `"all_reduce"`, `"reduce_scatter"` ou
# `"all_gather"`.

# %% [markdown] lang="en"
# ## 3. Placement: what leaves the node
#
# Ranks fill the nodes in order: so the order of the axes decides what stays **inside** a node (NVLink) and what goes
# **between** the nodes (the network, several times slower). Let us take LLaMA-2 7B on the course's grid, in fp32, 16
# micro-batches of one sequence of 2,048 tokens.
#
# ### Exercise 4 — the bytes that leave the node
#
# A group communicates in a ring, in the order given: each rank sends to its neighbour, the last to the first. An
# all-reduce of a message of M bytes makes each send 2(n − 1)/n · M; a reduce-scatter or an all-gather, half of that
# (lab 03). Return how many bytes the ranks of `group`, all together, send to **another node**. Rank r is on node
# `r // gpus_per_node`; `collective` is `"all_reduce"`, `"reduce_scatter"` or `"all_gather"`.


# %% name="between-nodes"
def between_nodes(collective, message_bytes, group, gpus_per_node):
    ### BEGIN SOLUTION
    n = len(group)
    rounds = 2 if collective == "all_reduce" else 1
    leaving = sum(group[i] // gpus_per_node != group[(i + 1) % n] // gpus_per_node for i in range(n))
    return leaving * rounds * (n - 1) / n * message_bytes
    ### END SOLUTION


lab.check("between-nodes", between_nodes)

# %%
# lab.hint("between-nodes")

# %% [markdown] lang="fr"
# **Votre prédiction.** Mettons tp à l’extérieur et pp à l’intérieur (`pp-dp-tp`) : chaque groupe de tenseur est alors
# à cheval sur les deux nœuds. Combien de fois plus d’octets passent entre les nœuds qu’avec tp à l’intérieur
# (`tp-dp-pp`) ? (Le modèle a 32 couches. Avec tp, chacune fait quatre *all-reduce* par micro-batch, deux en passe
# avant et deux en passe arrière, dont le message est une activation. Avec pp, une seule frontière sépare les deux
# nœuds : une activation, puis son gradient. Chaque rang de tp y envoie le message entier.)

# %% [markdown] lang="en"
# **Your prediction.** Let us put tp outside and pp inside (`pp-dp-tp`): each tensor group then straddles both nodes.
# How many times as many bytes go between the nodes as with tp inside (`tp-dp-pp`)? (The model has 32 layers. With tp,
# each performs four all-reduces per micro-batch, two in forward and two in backward, whose message is an activation.
# With pp, one single boundary lies between the nodes: an activation, then its gradient, which each rank of tp sends
# whole.)

# %% name="predict-across" stub="value"
lab.predict(
    "tensor-across",
    ### BEGIN SOLUTION
    # 2 ranks: each sends a whole message, and along pp too // 2 rangs : chacun envoie un message entier, et sur pp
    32 * 4 / 2,
    ### END SOLUTION
)

# %% name="reveal-across"
big = {"model": "llama_2_7b", "sequence_length": 2048, "engine": "by_hand"}
course = dlojz.RunConfig.of(**big, dp=2, pp=4, tp=2, micro_batch=1, micro_batches=16)
across = figures.between_bytes(course, 8, "pp-dp-tp") / figures.between_bytes(course, 8, "tp-dp-pp")
lab.reveal("tensor-across", across)

# %% [markdown] lang="fr"
# Le quotient : 32 × 4 *all-reduces*, où chacun des 2 rangs envoie un message entier, contre 2 messages de pipeline, que
# chacune des 2 tranches envoie aussi en entier, soit 64 ; l’embedding et la couche de sortie font chacun un
# *all-reduce* de plus, soit 65. Voici le compte, axe par axe, avec votre fonction et à côté celui du paquet
# ([link_traffic.py](../../dlojz/prediction/link_traffic.py)). (Un pipeline n’a pas d’anneau : chaque étage envoie au
# suivant. Sa ligne vient du paquet.)

# %% [markdown] lang="en"
# The quotient: 32 × 4 all-reduces, in which each of the 2 ranks sends a whole message, over 2 messages of the pipeline,
# which each of the 2 slices sends whole, too: 64. The embedding and the output layer make one more all-reduce each: 65.
# Here is the account, axis by axis, with your function and the package's beside it
# ([link_traffic.py](../../dlojz/prediction/link_traffic.py)). (A pipeline has no ring: each stage sends to the next.
# Its line is the package's.)

# %% name="crossings"
figures.crossings(between_nodes, course, 8, ("tp-dp-pp", "dp-tp-pp", "tp-pp-dp", "pp-dp-tp"))

# %% [markdown] lang="fr"
# Le total ne change pas d’un ordre à l’autre : l’ordre décide seulement du lien. Les deux placements extrêmes :

# %% [markdown] lang="en"
# The total is the same in every order: the order only decides over which link. The two extremes:

# %%
figures.placed(course, 8, "tp-dp-pp")

# %%
figures.placed(course, 8, "pp-dp-tp")

# %% [markdown] lang="fr"
# **Et en secondes ?** Par le réseau, un GPU envoie 25 Go/s (TP 03). **Votre prédiction** : si tp est à l’extérieur, de
# combien de secondes les messages de tp allongent-ils le pas ? Comptez ceux d’un rang : il porte 8 couches, fait 4
# *all-reduces* par couche et pour chacun de ses 16 micro-batches, et à deux rangs il envoie chaque message en entier.
# Un message : 2 048 tokens, largeur 4 096, fp32.

# %% [markdown] lang="en"
# **And in seconds?** Over the network a GPU sends 25 GB/s (lab 03). **Your prediction**: with tp outside, by how many
# seconds do tp's messages lengthen the step? Count those of one rank: it holds 8 layers, makes 4 all-reduces per layer
# and for each of its 16 micro-batches, and with two ranks it sends each message whole. A message: 2,048 tokens, width
# 4,096, fp32.

# %% name="predict-seconds" stub="value"
lab.predict(
    "across-seconds",
    ### BEGIN SOLUTION
    8 * 4 * 16 * (2048 * 4096 * 4) / 25e9,
    ### END SOLUTION
)

# %% name="seconds-across"
for order in ("tp-dp-pp", "tp-pp-dp", "pp-dp-tp"):
    sent = figures.between_bytes(course, 8, order) / course.layout.world_size  # by one rank // par un rang
    print(f"{order}: {decimal(sent / 25e9, 3)} s,", decimal(sent / 2**20, 0), end=" ")
    print("MiB per rank between nodes // Mio par rang entre nœuds")

# %% name="reveal-seconds"
lab.reveal("across-seconds", figures.between_bytes(course, 8, "pp-dp-tp") / course.layout.world_size / 25e9)

# %% [markdown] lang="fr"
# **Expliquez.** Le pipeline est l’axe qui envoie le moins, tp celui qui envoie le plus. Mais les octets ne disent pas
# tout : lequel des trois trafics la passe arrière peut-elle recouvrir, et lequel fait attendre chaque couche ? Quel axe
# mettez-vous donc dans le nœud ?
#
# <details><summary>Réponse</summary>
#
# dp envoie des gradients dont personne n’a besoin avant la mise à jour : la passe arrière les recouvre. La couche
# suivante, elle, attend le résultat de tp. D’où l’ordre habituel : **tp dans le nœud, pp ou dp entre les nœuds**.
#
# </details>
#
# À vous de jouer : changez degrés, nœuds, ordre et modèle. Sans noyau actif, la figure fixe montre la même chose. En
# ligne de commande : `dlojz grid --dp 2 --pp 4 --tp 2 --gpus-per-node 8`.

# %% [markdown] lang="en"
# **Explain.** The pipeline is the axis that sends least, tp the one that sends most. But bytes are not the whole story:
# which of the three can backward hide, and which makes every layer wait? So which axis goes inside the node?
#
# <details><summary>Answer</summary>
#
# dp sends gradients that nobody needs before the update: backward hides them. The next layer, in contrast, waits for
# tp's result. Hence the usual order: **tp inside the node, pp or dp between the nodes**.
#
# </details>
#
# Your turn: change degrees, nodes, order and model. Where no kernel runs, the static figure shows the same. On the
# command line: `dlojz grid --dp 2 --pp 4 --tp 2 --gpus-per-node 8`.

# %% name="grid-panel" tags=["nbval-ignore-output"]
from dlojz.display.widgets.grid_panel import grid_panel, still_grid

shape = {"dp": 2, "pp": 4, "tp": 2, "gpus_per_node": 8}
grid_panel(**shape)

# %% name="still-grid" tags=["nbval-ignore-output"]
still_grid(**shape)

# %% [markdown] lang="fr"
# ## 4. Deux dimensions à la main
#
# Quatre rangs, dp = 2 et tp = 2. Le modèle est le MLP du TP 06, avec deux pièges : deux paramètres, `scale` et `bias`,
# restent **entiers** sur chaque rang.
#
# $$y = \text{relu}\big((x \odot \text{scale})\, W_1^\top\big)\, W_2^\top + \text{bias}$$
#
# `w1` est découpé par colonne (ses neurones), `w2` par ligne. Vous avez deux axes, `dp` et `tp`. Chacun a une taille,
# `axis.size`, et fait la somme d’un tenseur sur ses rangs, en place : `axis.all_reduce(t)`. Et les deux opérateurs
# conjugués du TP 06 :
#
# | | passe avant | passe arrière |
# |--|--|--|
# | `copy(t, axis)` | rien | *all-reduce* |
# | `add_up(t, axis)` | *all-reduce* | rien |
#
# ### Exercice 5 — un pas en deux dimensions
#
# Faites la passe avant puis la passe arrière de la perte `((y - targets) ** 2).mean()`, et laissez dans `.grad` de
# chaque paramètre le gradient du batch **entier**. `part` est un dictionnaire (`part["w1"]`…) ; `x` et `targets` sont
# les échantillons de la réplique de ce rang.

# %% [markdown] lang="en"
# ## 4. Two dimensions by hand
#
# Four ranks, dp = 2 and tp = 2. The model is lab 06's MLP, with two traps: two parameters, `scale` and `bias`, stay
# **whole** on every rank.
#
# $$y = \text{relu}\big((x \odot \text{scale})\, W_1^\top\big)\, W_2^\top + \text{bias}$$
#
# `w1` is split by column (its neurons), `w2` by row. You have two axes, `dp` and `tp`. Each has a size, `axis.size`,
# and adds a tensor up over its ranks, in place: `axis.all_reduce(t)`. And the two conjugate operators of lab 06:
#
# | | forward | backward |
# |--|--|--|
# | `copy(t, axis)` | nothing | all-reduce |
# | `add_up(t, axis)` | all-reduce | nothing |
#
# ### Exercise 5 — one step in two dimensions
#
# Do forward then backward of the loss `((y - targets) ** 2).mean()`, and leave in each parameter's `.grad` the gradient
# of the **whole** batch. `part` is a dictionary (`part["w1"]`…); `x` and `targets` are the samples of this rank's
# replica.


# %% name="hybrid-step"
def hybrid_step(part, x, targets, dp, tp):
    ### BEGIN SOLUTION
    hidden = torch.relu(copy(x * part["scale"], tp) @ part["w1"].T)
    y = add_up(hidden @ part["w2"].T, tp) + part["bias"]
    ((y - targets) ** 2).mean().backward()
    for parameter in part.values():
        dp.all_reduce(parameter.grad)
        parameter.grad /= dp.size
    ### END SOLUTION


lab.check("hybrid-step", hybrid_step)

# %%
# lab.hint("hybrid-step")

# %% [markdown] lang="fr"
# Entraînons ce MLP : d’abord un processus seul, qui lit tout le batch ; puis quatre rangs, avec **vos** groupes et
# **votre** pas. Chacun affiche sa place, la forme de sa tranche de `w1`, et dit si ses poids sont ceux du processus
# seul après 20 pas. (La première fois, il faut quelques secondes pour démarrer les rangs.)

# %% [markdown] lang="en"
# Let us train this MLP: first one process, which reads the whole batch; then four ranks, with **your** groups and
# **your** step. Each prints its place, the shape of its slice of `w1`, and whether its weights are those of the one
# process after 20 steps. (The first time, starting the ranks takes a few seconds.)

# %% name="alone"
torch.manual_seed(0)
data, wanted = torch.randn(64, 16), torch.randn(64, 16)
start = {"scale": torch.ones(16), "w1": torch.randn(32, 16) / 4, "w2": torch.randn(16, 32) / 6, "bias": torch.zeros(16)}

final = {name: value.clone().requires_grad_() for name, value in start.items()}
for _ in range(20):
    y = torch.relu((data * final["scale"]) @ final["w1"].T) @ final["w2"].T + final["bias"]
    ((y - wanted) ** 2).mean().backward()
    with torch.no_grad():
        for parameter in final.values():
            parameter.sub_(0.5 * parameter.grad)
            parameter.grad = None
final = {name: value.detach() for name, value in final.items()}

# %% name="two-dimensions"
# %%ranks 4 --with hybrid_step,groups_of,place_of,data,wanted,start,final,TensorAxis
from dlojz.base.language import yes_no

axes = {}
for axis in ("dp", "tp"):
    for group in groups_of(axis, 2, 1, 2):
        # every rank makes every group, and keeps its own // chaque rang crée tous les groupes et garde le sien
        made = dist.new_group(group)
        if rank in group:
            axes[axis] = TensorAxis(made)
_, dp_rank, tp_rank = place_of(rank, 2, 1, 2)


def slice_of(whole):
    return {
        "scale": whole["scale"].clone(),
        "w1": whole["w1"].chunk(2, dim=0)[tp_rank].clone(),
        "w2": whole["w2"].chunk(2, dim=1)[tp_rank].clone(),
        "bias": whole["bias"].clone(),
    }


part = {name: value.requires_grad_() for name, value in slice_of(start).items()}
for _ in range(20):
    hybrid_step(part, data.chunk(2)[dp_rank], wanted.chunk(2)[dp_rank], axes["dp"], axes["tp"])
    with torch.no_grad():
        for parameter in part.values():
            parameter.sub_(0.5 * parameter.grad)
            parameter.grad = None
expected = slice_of(final)
same = all(torch.allclose(part[name], expected[name], atol=1e-5) for name in part)
print((dp_rank, tp_rank), tuple(part["w1"].shape), "same weights: // mêmes poids :", yes_no(same))

# %% [markdown] lang="fr"
# Aucun rang n’a vu plus de la moitié des échantillons ni plus de la moitié de chaque matrice, et les poids sont les
# mêmes. Remarquez ce qui n’a **pas** été communiqué : le gradient de `bias` est déjà le même sur toutes les tranches
# (tout ce qui suit `add_up` l’est), et celui de `w1` n’intéresse que les répliques de sa tranche.
#
# **Avec PyTorch**, `init_device_mesh` forme tous ces groupes d’un coup ; `mesh["tp"]` en est un axe. Voici le couple
# habituel, *Tensor Parallelism* dans le nœud et FSDP entre les nœuds : le MLP est d’abord découpé selon `tp`, puis ce
# qui reste à chaque rang est partitionné selon `dp`. Quelle part des poids un rang gardera-t-il ?

# %% [markdown] lang="en"
# No rank has seen more than half of the samples, nor more than half of each matrix, and the weights are the same. Note
# what was **not** communicated: the gradient of `bias` is the same on all slices already (all that follows `add_up`
# is), and that of `w1` concerns the replicas of its slice alone.
#
# **With PyTorch.** `init_device_mesh` makes all these groups at once; `mesh["tp"]` is one axis. Here is the usual pair:
# tensor parallelism within the node, FSDP across the nodes. The MLP is split along `tp` first, then what each rank has
# left is sharded along `dp`. What part of the weights will a rank keep?

# %% name="mesh"
# %%ranks
import warnings

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dlojz.base.language import yes_no

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # about in-place operations // sur les opérations en place
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def train(two_axes, steps=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x, goal = torch.randn(2, 64, 16)
    if two_axes:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        x, goal = (tensor.chunk(2)[mesh["dp"].get_local_rank()] for tensor in (x, goal))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)  # of all ranks' samples // des échantillons de tous les rangs
    weights = [weight.to_local() if two_axes else weight for weight in model.parameters()]
    return losses / world_size, sum(weight.nbytes for weight in weights)


(whole_losses, whole_bytes), (losses, own_bytes) = train(False), train(True)
print(own_bytes, "bytes of // octets sur", whole_bytes)
print("same losses: // mêmes pertes :", yes_no(torch.allclose(losses, whole_losses, atol=1e-5)))

# %% [markdown] lang="fr"
# Un peu plus d’un quart : selon `tp`, le biais de la couche découpée par ligne reste entier.
#
# ## 5. Trois dimensions, pour de vrai
#
# ### Exercice 6 — une exécution 3D
#
# Renvoyez le `dlojz.Layout` d’un cahier des charges : `processes` processus, `stages` étages, chaque couche en `slices`
# tranches, des micro-batches de `micro_batch` échantillons, `global_batch` échantillons par pas, avec le moteur
# `"by_hand"`. Les champs : `dp`, `pp`, `tp`, `micro_batch`, `micro_batches` (par réplique), `engine`.

# %% [markdown] lang="en"
# A little more than a quarter: along `tp` the bias of the row-parallel layer stays whole.
#
# ## 5. Three dimensions, for real
#
# ### Exercise 6 — a 3D run
#
# Return the `dlojz.Layout` of a specification: `processes` processes, `stages` stages, each layer in `slices` slices,
# micro-batches of `micro_batch` samples, `global_batch` samples per step, with the engine `"by_hand"`. The fields:
# `dp`, `pp`, `tp`, `micro_batch`, `micro_batches` (per replica), `engine`.


# %% name="layout-3d"
def layout_3d(processes, stages, slices, micro_batch, global_batch):
    ### BEGIN SOLUTION
    dp = processes // (stages * slices)
    return dlojz.Layout(
        dp=dp,
        pp=stages,
        tp=slices,
        micro_batch=micro_batch,
        micro_batches=global_batch // (micro_batch * dp),
        engine="by_hand",
    )
    ### END SOLUTION


lab.check("layout-3d", layout_3d)

# %%
# lab.hint("layout-3d")

# %% [markdown] lang="fr"
# Lançons une telle exécution, en petit : un décodeur de type LLaMA, 8 processus (2 × 2 × 2), 8 séquences par pas.
# Puis les trois exécutions 2D, et un processus seul. **Vos prédictions**, avant de lancer :
#
# - combien de fois moins d’octets de poids un rang détient-il en 2 × 2 × 2 qu’un processus seul ?
# - presque tous les paramètres (leur nombre s’affiche ci-dessous) se découpent : en dp = 2, tp = 2, combien d’octets de
#   gradients (fp32) le rang 0 donne-t-il par pas aux *all-reduce* de dp ?

# %% [markdown] lang="en"
# Let us run it on a small scale: a LLaMA-like decoder, 8 processes (2 × 2 × 2), 8 sequences per step. Then the three 2D
# runs, and one process alone. **Your predictions**, before the start:
#
# - how many times fewer bytes of weights does a rank hold in 2 × 2 × 2 than one process alone?
# - nearly all parameters (their number is printed below) are split: with dp = 2, tp = 2, how many bytes of
#   gradients (fp32) does rank 0 hand to dp's all-reduces per step?

# %% name="parameters"
from dlojz import models

print(sum(parameter.numel() for parameter in models.build("llama_tiny").parameters()))

# %% name="predict-weights" stub="value"
lab.predict(
    "weights-3d",
    ### BEGIN SOLUTION
    2 * 2,
    ### END SOLUTION
)

# %% name="predict-gradients" stub="value"
lab.predict(
    "gradient-bytes",
    ### BEGIN SOLUTION
    803_968 / 2 * 4,
    ### END SOLUTION
)

# %% name="runs" tags=["nbval-ignore-output"]
layout = dlojz.Layout(dp=2, pp=2, tp=2, micro_batch=2, micro_batches=2, engine="by_hand")
config = dlojz.RunConfig(model="llama_tiny", sequence_length=32, steps=4, learning_rate=0.001, layout=layout)

both = dlojz.run(config)  # 2 × 2 × 2: 8 processes // 2 × 2 × 2 : 8 processus
hybrid = dlojz.run(config, tp=1)
data_tensor = dlojz.run(config, pp=1)
pipeline_tensor = dlojz.run(config, dp=1, micro_batches=4)
alone = dlojz.run(config, dp=1, pp=1, tp=1, micro_batches=4, engine="single")
runs = [both, hybrid, data_tensor, pipeline_tensor, alone]

# %% name="reveal-weights"
lab.reveal("weights-3d", figures.weights_ratio(both, alone))

# %% name="reveal-gradients"
lab.reveal("gradient-bytes", figures.dp_bytes(data_tensor))

# %% [markdown] lang="fr"
# Quatre fois moins, et non huit : les répliques répètent tout ; seuls pp et tp partagent le modèle. (ZeRO, au TP 04,
# répartit aussi selon dp.) Les nombres mesurés de cette section sont lus dans les fiches des exécutions, en quelques
# lignes chacun : `weights_ratio`, `dp_bytes` et `furthest`, dans
# [figures.py](../../dlojz/labs/lab07_hybrid/figures.py).
#
# Le même entraînement ? À gauche, les pertes superposées ; à droite, leur écart avec un processus seul.

# %% [markdown] lang="en"
# Four times fewer, and not eight: replicas repeat everything; pp and tp alone divide the model. (ZeRO, in lab 04,
# partitions along dp, too.) The measured numbers of this section are read from the records of the runs, in a few lines
# each: `weights_ratio`, `dp_bytes` and `furthest`, in [figures.py](../../dlojz/labs/lab07_hybrid/figures.py).
#
# The same training? On the left the losses, superimposed; on the right their distance to one process.

# %% name="losses" tags=["nbval-ignore-output"]
figures.losses(runs)

# %% name="same-training"
print([run.config.layout.world_size for run in runs], figures.furthest(runs) < 1e-5)

# %% [markdown] lang="fr"
# Ce n’est pas « à peu près pareil » : c’est le même calcul, à l’ordre des sommes près. Et les octets ? Par axe et par
# communication, ce qu’y envoie le rang 0 en un pas : prédit avant l’exécution, puis compté pendant.

# %% [markdown] lang="en"
# Not “about the same”: it is the same computation, but for the order of the sums. And the bytes? By axis and
# collective, what rank 0 hands over in one step: predicted before the run, then counted during it.

# %% name="volumes"
figures.volumes(runs)

# %% [markdown] lang="fr"
# **Expliquez.** Comparez les lignes tp de 2 × 2 × 2 et de dp × tp, puis les lignes dp. Pourquoi pp les divise-t-il
# toutes par deux, à peu près ?
#
# <details><summary>Réponse</summary>
#
# Un rang n’a plus que la moitié des couches : moitié moins d’*all-reduce* d’activations, et moitié moins de gradients.
# Chaque axe allège le trafic des autres : c’est une raison de les combiner.
#
# </details>
#
# La mémoire, enfin : à côté d’un processus seul, chaque rang à son pic, par catégorie ; le losange est le pic prédit.

# %% [markdown] lang="en"
# **Explain.** Compare the tp lines of 2 × 2 × 2 and of dp × tp, then the dp lines. Why does pp about halve both?
#
# <details><summary>Answer</summary>
#
# A rank has only half of the layers left: half as many all-reduces of activations, and half of the gradients. Each axis
# lightens the traffic of the others, which is one reason to combine them.
#
# </details>
#
# Last, memory: next to one process, each rank at its peak, by category; the diamond is the peak that was predicted.

# %% name="memory" tags=["nbval-ignore-output"]
figures.memory(both, alone)

# %% [markdown] lang="fr"
# Les rangs d’un même étage se ressemblent. Ceux du premier étage gardent les activations de deux micro-batches ; ceux
# du dernier, celles d’un seul (TP 05), mais ils calculent la perte. Au pic, le premier étage n’a encore qu’un tiers
# de ses gradients : il atteint ce pic au début de sa première passe arrière, quand il garde encore les activations
# des deux micro-batches. Le dernier l’atteint dans sa seconde passe arrière, où tous ses gradients existent.
#
# ## 6. Un quatrième axe : la séquence
#
# Le *Sequence Parallelism* du TP 06 ne coupe pas l’attention : chaque rang y voit tous les tokens. Pour une séquence
# de 100 000 tokens, c’est trop. Le ***Context Parallelism*** (cp) donne à chaque rang une part des tokens, partout :
# ses requêtes restent, les clés et les valeurs passent de rang en rang, en anneau (Liu et al., 2023). Voici comment
# passer un tenseur au rang suivant :

# %% [markdown] lang="en"
# The ranks of one stage look alike. Those of the first keep the activations of two micro-batches; those of the last
# keep those of one only (lab 05), but they compute the loss. At its peak the first stage has only a third of its
# gradients: the peak comes early in its first backward pass, while it still keeps the activations of both
# micro-batches. That of the last stage comes in its second backward pass, where all its gradients exist.
#
# ## 6. A fourth axis: the sequence
#
# Sequence parallelism (lab 06) does not cut attention: there each rank sees all tokens. For a sequence of 100,000
# tokens, this is too much. **Context parallelism** (cp) gives each rank a part of the tokens, everywhere: its queries
# stay, keys and values go from rank to rank, round a ring (Liu et al., 2023). Here is one pass:


# %% name="pass-on"
def pass_on(x):
    # To the next rank; returns what the one before sends. // Au rang suivant ; renvoie ce qu’envoie le précédent.
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(x)
    messages = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, arrived, (rank - 1) % size),
    ]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    return arrived


# %% [markdown] lang="fr"
# ### Exercice 7 — l’attention en anneau
#
# `q`, `k`, `v` (batch, têtes, tokens de ce rang, H) sont contigus. Renvoyez la sortie de l’attention, sans masque,
# pour les tokens de ce rang : softmax(q kᵀ / √H) v, sur les clés de **tous** les rangs. Un rang ne détient jamais
# toutes les clés : construisez la somme des exp(scores) v et celle des exp(scores), bloc par bloc, sans passage
# superflu, et divisez à la fin. (L’implémentation réelle soustrait d’abord le plus grand score, comme la perte du TP
# 06.)

# %% [markdown] lang="en"
# ### Exercise 7 — attention round a ring
#
# `q`, `k`, `v` (batch, heads, this rank's tokens, H) are contiguous. Return the output of attention, without a mask,
# for this rank's tokens: softmax(q kᵀ / √H) v, over the keys of **all** ranks. A rank never holds all keys: build up
# the sum of exp(scores) v and that of exp(scores), block by block, with no pass too many, and divide at the end. (The
# real implementation subtracts the largest score first, as does the loss of lab 06.)


# %% name="ring-attention"
def ring_attention(q, k, v):
    size = dist.get_world_size()
    ### BEGIN SOLUTION
    output, total = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for step in range(size):
        weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()
        output, total = output + weights @ v, total + weights.sum(-1, keepdim=True)
        if step < size - 1:
            k, v = pass_on(torch.stack((k, v)))
    return output / total
    ### END SOLUTION


lab.check("ring-attention", ring_attention)

# %%
# lab.hint("ring-attention")

# %% [markdown] lang="fr"
# **Votre prédiction** : 256 tokens, 4 têtes de largeur 32, fp32, sur 4 rangs. Combien d’octets chacun envoie-t-il ?

# %% [markdown] lang="en"
# **Your prediction**: 256 tokens, 4 heads of width 32, fp32, on 4 ranks. How many bytes does each of them send?

# %% name="predict-ring" stub="value"
lab.predict(
    "ring-bytes",
    ### BEGIN SOLUTION
    (4 - 1) * 2 * (4 * 256 / 4 * 32) * 4,
    ### END SOLUTION
)

# %% name="run-ring"
# %%ranks 4 --with ring_attention,pass_on
from dlojz.base.language import yes_no
from dlojz.train.dispatch_trace import StorageTrace, traffic_of  # sees what torch sends // voit ce que torch envoie

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 256, 32)
with StorageTrace({}) as trace:
    y = ring_attention(*(tensor.chunk(world_size, dim=2)[rank].contiguous() for tensor in (q, k, v)))
sent = sum(traffic.sent_bytes for traffic in traffic_of(trace.trace.calls, trace.step) if traffic.collective == "send")
whole = torch.nn.functional.scaled_dot_product_attention(q, k, v).chunk(world_size, dim=2)[rank]
print("the output of one process: // la sortie d’un seul processus :", yes_no(torch.allclose(y, whole, atol=1e-5)))

# %% name="reveal-ring"
lab.reveal("ring-bytes", ranks["sent"][0])

# %% [markdown] lang="fr"
# Avec un masque causal, un token ne voit que ceux d’avant. Si les tokens sont contigus (n morceaux), le rang 0 a peu
# de calculs, et le dernier en a le plus : tous l’attendent. En **zigzag**, on coupe la séquence en 2n morceaux, et le
# rang r prend r et 2n − 1 − r, comme Llama 3, qui réunit toutefois K et V par un *all-gather*, sans anneau.
# L’implémentation du paquet ([ring_attention.py](../../dlojz/by_hand/ring_attention.py)) saute une paire de morceaux
# entièrement masquée ; une paire à moitié masquée coûte autant qu’une paire entière. **Votre prédiction** : sur 2
# rangs, combien de fois plus vite va le zigzag ? Comptez les paires du rang le plus chargé.

# %% [markdown] lang="en"
# With a causal mask, a token sees only those before it. Where tokens are contiguous (n chunks), rank 0 has little to
# compute, and the last rank most: all wait for it. In **zigzag** order the sequence is cut into 2n chunks, and rank r
# takes r and 2n − 1 − r, as in Llama 3, which all-gathers K and V, however, without a ring. The package's
# implementation ([ring_attention.py](../../dlojz/by_hand/ring_attention.py)) skips a pair of chunks that is wholly
# masked; a pair that is half masked costs as much as a whole one. **Your prediction**: on 2 ranks, how many times as
# fast is zigzag? Count the pairs of the rank that has most.

# %% name="predict-zigzag" stub="value"
lab.predict(
    "zigzag-speed-up",
    ### BEGIN SOLUTION
    # pairs of half-size chunks: (2 of 4) against 5 // paires de morceaux deux fois plus petits : (2 de 4) contre 5
    2 * 4 / 5,
    ### END SOLUTION
)

# %% name="run-zigzag" tags=["nbval-ignore-output"]
# %%ranks 2
from statistics import median
from time import perf_counter

from dlojz.base.language import decimal
from dlojz.by_hand import ring_attention as package

q, k, v = torch.randn(3, 1, 8, 512, 64)  # of one rank // d’un rang


def seconds(order):
    dist.barrier()
    begin = perf_counter()
    package.ring_attention(q, k, v, causal=True, order=order)
    dist.barrier()  # the step lasts as long as the slowest rank // le pas dure autant que le rang le plus lent
    return perf_counter() - begin


for order in ("contiguous", "zigzag"):
    seconds(order)
times = [(seconds("contiguous"), seconds("zigzag")) for _ in range(9)]  # in turns // en alternance
gain = median(contiguous_s / zigzag_s for contiguous_s, zigzag_s in times)
contiguous_s, zigzag_s = (median(column) for column in zip(*times, strict=True))
times = f"{decimal(contiguous_s, 3)} s, {decimal(zigzag_s, 3)} s, {decimal(1024 / zigzag_s, 0)} tokens/s"
print("contiguous, zigzag: // contiguës, en zigzag :", times)

# %% name="reveal-zigzag" tags=["nbval-ignore-output"]
lab.reveal("zigzag-speed-up", ranks["gain"][0])

# %% [markdown] lang="fr"
# Le rang le plus chargé a deux grandes paires, soit 8 petites, ou en zigzag 5 : 8/5 = 1,6. Attendez-vous à 1,3 à 2.
# Les messages et les petites opérations ne diminuent pas, et quand le rang 0 attend, l’autre a la machine pour lui
# seul ; en revanche, de plus petits morceaux tiennent mieux dans les caches.
#
# Et dans un entraînement entier ? Avec `cp=2`, chaque rang ne voit que 128 des 256 tokens de chaque séquence. Avant de
# lancer la cellule : quelles lignes du tableau seront divisées par deux, et lesquelles resteront entières ? Combien de
# messages par couche, aller et retour ?

# %% [markdown] lang="en"
# The rank that has most has two large pairs, that is 8 small ones, or 5 in zigzag: 8/5 = 1.6. Expect 1.3 to 2.
# Messages and small operations do not shrink, and while rank 0 waits, the other one has the machine to itself; on the
# other hand, smaller chunks fit better into the caches.
#
# And in a whole training? With `cp=2` each rank sees but 128 of the 256 tokens of a sequence. Before you run the cell:
# which lines of the table will be halved, and which stay whole? How many messages per layer, forward and backward?

# %% name="context-parallel-run" tags=["nbval-ignore-output"]
long = dlojz.RunConfig.of(model="llama_tiny", sequence_length=256, micro_batch=2, steps=4)
dlojz.compare([dlojz.run(long, engine="single"), dlojz.run(long, engine="by_hand", cp=2)])

# %% [markdown] lang="fr"
# Seules les activations sont divisées par deux : le cp coupe les données, non le modèle. Poids, gradients et optimiseur
# restent entiers, et les gradients se moyennent comme entre répliques. Chacune des quatre couches envoie trois
# messages : K et V à l’aller ; au retour, K et V de nouveau, puis leurs gradients. Les pertes sont celles d’un seul
# processus. (Reste un écart, les GFLOP d’un processus : son attention fusionnée recalcule les scores au retour, ce que
# la prédiction ne compte pas.)
#
# ## 7. Quand le 3D est-il rentable ?
#
# Revenons aux 16 GPU et à LLaMA-2 7B : 32 séquences par pas, Adam, donc 16 octets d’états par paramètre. Voici
# plusieurs façons de remplir les deux nœuds.

# %% [markdown] lang="en"
# Only activations are halved: cp cuts the data, not the model. Weights, gradients and optimizer stay whole, and
# gradients are averaged as between replicas. Each of the four layers sends three messages: K and V in forward; in
# backward K and V again, then their gradients. The losses are those of one process. (One gap is left, the GFLOP of one
# process: its fused attention computes the scores again in backward, which the prediction does not count.)
#
# ## 7. When does 3D pay?
#
# Back to the 16 GPUs and LLaMA-2 7B: 32 sequences per step, Adam, so 16 bytes of states per parameter. Here are several
# ways to fill the two nodes.

# %% name="degrees"
choices = [(16, 1, 1), (2, 8, 1), (2, 1, 8), (1, 1, 16), (4, 2, 2), (2, 4, 2), (2, 2, 4)]
figures.degrees(big, 8, choices, samples=32)

# %% [markdown] lang="fr"
# **Expliquez**, ligne par ligne, ce qui écarte chaque choix ou le rend cher :
#
# - 16 × 1 × 1 : les états tiennent-ils dans un GPU de 80 Go ?
# - 2 × 8 × 1 : quelle part du temps se perd en bulle, avec 16 micro-batches par réplique ?
# - 2 × 1 × 8 et 1 × 1 × 16 : combien chaque rang envoie-t-il, et par quel lien dans le second cas ?
# - 4 × 2 × 2 à 2 × 2 × 4 : que reste-t-il pour les activations, pour la bulle, entre les nœuds ?
#
# <details><summary>Réponse</summary>
#
# - 16 × 1 × 1 : non. 6,74 milliards de paramètres, à 16 octets, font 108 Go sur chaque rang.
# - 2 × 8 × 1 : (p − 1)/(m + p − 1) = 7/23, soit 30 % du temps.
# - 2 × 1 × 8 : presque tout le trafic est celui de tp, difficile à recouvrir ; avec 1 × 1 × 16, il passe en plus par le
#   réseau, bien plus lent que NVLink.
# - 4 × 2 × 2 à 2 × 2 × 4 : des états qui laissent de la place aux activations, une bulle modérée, et presque rien entre
#   les nœuds.
#
# </details>
#
# Une règle en ressort (Narayanan et al., 2021) : tp jusqu’à la taille du nœud s’il le faut, puis pp entre les nœuds
# jusqu’à ce que le modèle tienne ; le reste des GPU va à dp, le plus simple, et dont la passe arrière recouvre le
# trafic. Le TP 08 cherche le meilleur compromis pour de bon, durées comprises.

# %% [markdown] lang="en"
# **Explain**, line by line, what rules each choice out or makes it expensive:
#
# - 16 × 1 × 1: do the states fit into a GPU of 80 GB?
# - 2 × 8 × 1: how much of the time goes into the bubble, with 16 micro-batches per replica?
# - 2 × 1 × 8 and 1 × 1 × 16: how much does each rank send, and over which link in the second case?
# - 4 × 2 × 2 to 2 × 2 × 4: what is left for activations, for the bubble, between the nodes?
#
# <details><summary>Answer</summary>
#
# - 16 × 1 × 1: no. 6.74 billion parameters, 16 bytes each, make 108 GB on every rank.
# - 2 × 8 × 1: (p − 1)/(m + p − 1) = 7/23, so 30% of the time.
# - 2 × 1 × 8: nearly all traffic is tp's, which is hard to hide; with 1 × 1 × 16 it also crosses the network, much
#   slower than NVLink.
# - 4 × 2 × 2 to 2 × 2 × 4: states that leave room for activations, a moderate bubble, and next to nothing between the
#   nodes.
#
# </details>
#
# This gives a rule (Narayanan et al., 2021): tp up to the size of a node if needed, then pp across nodes until the
# model fits; the rest of the GPUs goes to dp, the simplest, whose traffic backward can hide. Lab 08 looks for the best
# compromise in earnest, times included.

# %% [markdown] lang="fr"
# ## Défi — seize rangs sur quatre nœuds
#
# Facultatif. L’ordonnanceur a numéroté les rangs au hasard. `messages` donne, pour chaque couple (rang, autre rang),
# les Mio que le premier envoie au second en un pas. Écrivez une fonction qui prend (`messages`, `nodes`, `per_node`)
# et renvoie, pour chaque nœud, la liste de ses rangs. On mesure la part des octets qui passe entre nœuds, en moyenne
# sur trois grilles de 16 rangs. Objectif : 7,2 %.

# %% [markdown] lang="en"
# ## Challenge — sixteen ranks on four nodes
#
# Optional. The scheduler has numbered the ranks at random. `messages` gives, for each pair (rank, other rank), the MiB
# that the first sends to the second in one step. Write a function of (`messages`, `nodes`, `per_node`) that returns,
# for each node, the list of its ranks. What counts is the share of the bytes that goes between nodes, on average over
# three grids of 16 ranks. Target: 7.2%.


# %% name="rank-placement"
def placement(messages, nodes, per_node):
    ### BEGIN SOLUTION
    groups = [[rank] for rank in range(nodes * per_node)]

    def exchanged(pair):
        return sum(messages.get((a, b), 0) + messages.get((b, a), 0) for a in pair[0] for b in pair[1])

    while len(groups) > nodes:
        pairs = [(a, b) for a in groups for b in groups if a < b and len(a + b) <= per_node]
        a, b = max(pairs, key=exchanged)
        groups = [group for group in groups if group not in (a, b)] + [a + b]
    return groups
    ### END SOLUTION


lab.check("rank-placement", placement)

# %%
# lab.hint("rank-placement")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Croisez les deux axes (`--parallel tp-fsdp`, sur quatre processus) : les MLP découpés selon `tp`, le tout
# partitionné selon `dp`. Le script, environ 160 lignes, fait alors DDP, FSDP2, 1F1B, *Tensor Parallelism* ou les deux
# axes, par une option. Continuez dans votre `train.py`, ou partez de la solution du TP précédent : `dlojz labs script
# 07 un_autre_dossier` en écrit un, avec un `# TODO` à chaque endroit à compléter. Faites-le juger par la cellule qui
# suit.
#
# À regarder : les pertes d’un processus, quelle que soit la grille, et un tiers des paramètres sur chaque rang.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# mesh = init_device_mesh(device.type, (size // tp, tp), mesh_dim_names=("dp", "tp"))
# parallelize_module(model, mesh["tp"], plan)
# fully_shard(model, mesh=mesh["dp"])
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Cross the two axes (`--parallel tp-fsdp`, on four processes): the MLPs split along `tp`, all of it sharded along `dp`.
# The script, about 160 lines, then has DDP, FSDP2, 1F1B, tensor parallelism and both axes, by an option. Go on in your
# `train.py`, or begin with the solution of the lab before: `dlojz labs script 07 another_folder` writes one, with a
# `# TODO` at each place to fill in. Judge it by the next cell.
#
# What to look for: the losses of one process whatever the grid, and a third of the parameters on each rank.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# mesh = init_device_mesh(device.type, (size // tp, tp), mesh_dim_names=("dp", "tp"))
# parallelize_module(model, mesh["tp"], plan)
# fully_shard(model, mesh=mesh["dp"])
# ```
#
# </details>

# %% name="own-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | axe | ce qu’il partage | groupe (rangs) | ce qui passe | où |
# |--|--|--|--|--|
# | tp | chaque couche | consécutifs | activations, 4 *all-reduce* par couche et micro-batch | dans le nœud |
# | dp | le batch | à tp rangs les uns des autres | gradients, une fois par pas, recouverts | partout |
# | pp | les couches | à dp · tp rangs les uns des autres | activations aux frontières | entre les nœuds |
# | cp | la séquence | un axe de plus | clés et valeurs, en anneau | dans le nœud si possible |
#
# processus = dp × pp × tp ; batch global = micro-batch × micro-batches × dp ; les poids d’un rang : 1/(pp · tp) du
# modèle.

# %% [markdown] lang="en"
# ## Summary
#
# | axis | what it divides | group (ranks) | what travels | where |
# |--|--|--|--|--|
# | tp | each layer | consecutive | activations, 4 all-reduces per layer and micro-batch | inside the node |
# | dp | the batch | tp ranks apart | gradients, once per step, hidden | anywhere |
# | pp | the layers | dp · tp ranks apart | activations at the boundaries | between the nodes |
# | cp | the sequence | one more axis | keys and values, round a ring | inside the node if possible |
#
# processes = dp × pp × tp; global batch = micro-batch × micro-batches × dp; weights of a rank: 1/(pp · tp) of the
# model.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
