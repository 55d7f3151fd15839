# %% [markdown] lang="fr"
# # TP 05 — Le parallélisme de pipeline
#
# Un modèle trop gros pour un GPU peut se couper **entre ses couches** : chaque rang en porte une tranche, un *étage*.
# Fait naïvement, un seul rang travaille à la fois. Le **parallélisme de pipeline** coupe aussi le batch, en
# *micro-batches* qui se suivent d’étage en étage, comme des voitures sur une chaîne. Reste la *bulle* : le temps où des
# rangs attendent. Qui l’étudie tombe sur une vingtaine d’ordonnancements, et sur des tutoriels qui se contredisent.
# Dans ce TP, vous les écrivez, les simulez, les comparez à l’optimum prouvé, puis les exécutez vraiment.
#
# À la fin, vous saurez :
#
# - calculer la durée d’un pas et sa bulle, sans confondre fraction et surcoût ;
# - écrire l’ordre de 1F1B, et dire ce qu’il gagne sur GPipe (et ce qu’il ne gagne pas) ;
# - lire un interblocage et le réparer ;
# - ordonnancer sous contrainte de mémoire ;
# - faire passer activations et gradients d’un rang à l’autre ;
# - couper un modèle en étages équilibrés ;
# - dire ce que coûtent les gradients en retard des pipelines asynchrones ;
# - configurer le pipeline de DeepSpeed.
#
# Comptez deux heures. Quatre rangs au plus, sans GPU.

# %% [markdown] lang="en"
# # Lab 05 — Pipeline parallelism
#
# A model that is too large for one GPU can be cut **between its layers**: each rank holds a slice of it, a *stage*.
# Done naively, one single rank works at a time. **Pipeline parallelism** cuts the batch as well, into *micro-batches*
# that follow one another from stage to stage, like cars on an assembly line. What remains is the *bubble*: the time in
# which ranks wait. You will meet about twenty schedules, and tutorials that contradict one another. In this lab you
# write schedules, simulate them, compare them with the proven optimum, then really execute them.
#
# By the end you can:
#
# - compute the length of a step and its bubble, without confusing fraction and overhead;
# - write 1F1B's order, and tell what it gains over GPipe (and what it does not);
# - read a deadlock, and repair it;
# - schedule under a memory limit;
# - pass activations and gradients from one rank to the next;
# - cut a model into balanced stages;
# - tell what the stale gradients of asynchronous pipelines cost;
# - configure DeepSpeed's pipeline.
#
# Allow two hours. At most four ranks, without GPUs.

# %% name="setup"
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dlojz
from dlojz import labs
from dlojz.labs.lab05_pipeline import figures
from dlojz.pipeline.orders.zero_bubble import list_schedule
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import simulate

lab = labs.start("05")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. La bulle
#
# Voici d’abord la manière naïve, sur 4 étages, puis le pipeline de **GPipe** (Huang et al., 2019), avec 9
# micro-batches. Une case par action : `F3` est la passe avant du micro-batch 3, `B3` sa passe arrière, deux fois plus
# longue. Chaque ligne est un rang ; sous les cases, en gris, les activations qu’il garde.

# %% [markdown] lang="en"
# ## 1. The bubble
#
# Here is the naive way first, on 4 stages, then the pipeline of **GPipe** (Huang et al., 2019), with 9 micro-batches.
# One box per action: `F3` is the forward pass of micro-batch 3, `B3` its backward pass, twice as long. Each line is a
# rank; below the boxes, in grey, the activations that it keeps.

# %%
figures.drawn("naive", 4, 2)

# %%
figures.drawn("gpipe", 4, 9)

# %% [markdown] lang="fr"
# Quatre rangs, et des blancs : la bulle. « 25 % » ou « 33 % » ? On lit les deux, sous le même nom :
#
# - la **fraction** rapporte l’attente à tout le temps disponible, rangs × durée du pas (article de GPipe) ;
# - le **surcoût** la rapporte au travail (article de Megatron-LM).
#
# ### Exercice 1 — la bulle à la main
#
# `ranks` étages égaux, `micro_batches` micro-batches ; chaque étage met un temps `forward` à faire la passe avant d’un
# micro-batch, et `backward` à faire sa passe arrière. Les messages ne prennent pas de temps. Renvoyez trois nombres
# pour GPipe : la durée d’un pas, la fraction de bulle, le surcoût de bulle.

# %% [markdown] lang="en"
# Four ranks, and blanks: the bubble. “25%” or “33%”? Both are published, under one name:
#
# - the **fraction** compares the waiting with all the time there is, ranks × length of the step (GPipe's paper);
# - the **overhead** compares it with the work (Megatron-LM's paper).
#
# ### Exercise 1 — the bubble by hand
#
# `ranks` equal stages, `micro_batches` micro-batches; each stage spends `forward` on the forward pass of a micro-batch,
# and `backward` on its backward pass. Messages take no time. Return three numbers for GPipe: the length of a step, the
# bubble fraction, the bubble overhead.


# %% name="pipeline-bubble"
def pipeline_step(ranks, micro_batches, forward, backward):
    ### BEGIN SOLUTION
    bubble = (ranks - 1) * (forward + backward)
    work = micro_batches * (forward + backward)
    return work + bubble, bubble / (work + bubble), bubble / work
    ### END SOLUTION


lab.check("pipeline-bubble", pipeline_step)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("pipeline-bubble")

# %% [markdown] lang="fr"
# **Votre prédiction.** Avec m micro-batches et p étages, dont chacun prend t_f en passe avant et t_b en passe arrière,
# un seul GPU ferait tout le travail en m·p·(t_f + t_b). Combien de fois plus vite va le pipeline de la figure, avec ses
# 4 étages et 9 micro-batches ?

# %% [markdown] lang="en"
# **Your prediction.** With m micro-batches and p stages, each of which takes t_f in forward and t_b in backward, one
# GPU alone would do all the work in m·p·(t_f + t_b). How many times faster is the pipeline of the figure, with its 4
# stages and 9 micro-batches?

# %% name="predict-speedup" stub="value"
lab.predict(
    "speedup",
    ### BEGIN SOLUTION
    9 * 4 * (1 + 2) / pipeline_step(4, 9, 1, 2)[0],
    ### END SOLUTION
)

# %% name="reveal-speedup"
lab.reveal("speedup", simulate(build("gpipe", 4, 9)).speedup)

# %% [markdown] lang="fr"
# Quatre GPU, trois fois plus vite : la bulle coûte l’équivalent d’un GPU. Voici vos formules, et à côté ce que trouve
# le simulateur ([simulator.py](../../dlojz/pipeline/simulator.py)), pour GPipe et pour 1F1B, l’ordonnancement le plus
# répandu. Regardez bien les deux noms.

# %% [markdown] lang="en"
# Four GPUs, three times faster: the fourth went into the bubble. Here are your formulas, and beside them what the
# simulator ([simulator.py](../../dlojz/pipeline/simulator.py)) finds, for GPipe and for 1F1B, the most widespread
# schedule. Look closely at the two names.

# %% name="bubbles"
figures.bubbles(pipeline_step, ("gpipe", "1f1b"), ((4, 8), (4, 32), (8, 32)))

# %% [markdown] lang="fr"
# ## 2. 1F1B : la même bulle, moins de mémoire
#
# Oui : **1F1B a exactement la bulle de GPipe.** Plus d’un tutoriel affirme le contraire. Ce qu’il change, c’est la
# mémoire : une passe arrière rend les activations que sa passe avant avait prises ; 1F1B l’exécute donc dès qu’il le
# peut. Au rang r, d’abord assez de passes avant pour occuper l’attente du premier gradient ; ensuite, une passe arrière
# et une passe avant en alternance (*one forward, one backward*) ; à la fin, les passes arrière qui restent.
#
# ### Exercice 2 — l’ordre de 1F1B
#
# Renvoyez l’ordre du rang `rank`, sous forme de liste : `["F0", "F1", "B0", …]`. Il peut y avoir moins de micro-batches
# que de rangs. (Les messages écrivent aussi l’étage : `2F0` est la passe avant du micro-batch 0 à l’étage 2.)

# %% [markdown] lang="en"
# ## 2. 1F1B: the same bubble, less memory
#
# Yes: **1F1B has exactly GPipe's bubble.** More than one tutorial says otherwise. What it changes is memory: a backward
# gives back the activations that its forward took, so 1F1B runs it as soon as it can. On rank r: first enough forwards
# to fill the wait for the first gradient; then a backward and a forward in turn (one forward, one backward); at the
# end, the backwards that are left.
#
# ### Exercise 2 — 1F1B's order
#
# Return the order of rank `rank`, as a list: `["F0", "F1", "B0", …]`. There may be fewer micro-batches than ranks.
# (Messages also write the stage: `2F0` is the forward of micro-batch 0 on stage 2.)


# %% name="one-f-one-b"
def one_f_one_b(rank, ranks, micro_batches):
    ### BEGIN SOLUTION
    warm_up = min(ranks - rank, micro_batches)
    order = [f"F{k}" for k in range(warm_up)]
    for k in range(micro_batches):
        order.append(f"B{k}")
        if k + warm_up < micro_batches:
            order.append(f"F{k + warm_up}")
    return order
    ### END SOLUTION


lab.check("one-f-one-b", one_f_one_b)

# %%
# lab.hint("one-f-one-b")

# %% [markdown] lang="fr"
# GPipe, et votre 1F1B dessous, sur le même axe. Même durée, même bulle ; mais comparez le gris, et les pics notés à
# droite.

# %% [markdown] lang="en"
# GPipe, and your 1F1B below it, on one axis. The same length, the same bubble; but compare the grey, and the peaks
# noted at the right.

# %% name="beside-gpipe"
figures.beside_gpipe(one_f_one_b, 4, 8)

# %% [markdown] lang="fr"
# ### Exercice 3 — ce qu’il faut garder
#
# Combien de micro-batches le rang `rank` garde-t-il au plus, pour `schedule` valant `"gpipe"` ou `"1f1b"` ? Nous
# mesurerons cela en octets plus loin.

# %% [markdown] lang="en"
# ### Exercise 3 — what is to be kept
#
# How many micro-batches does rank `rank` keep at most, for `schedule` either `"gpipe"` or `"1f1b"`? We shall measure
# this in bytes further down.


# %% name="kept-micro-batches"
def kept(schedule, rank, ranks, micro_batches):
    ### BEGIN SOLUTION
    if schedule == "gpipe":
        return micro_batches
    return min(ranks - rank, micro_batches)
    ### END SOLUTION


lab.check("kept-micro-batches", kept)

# %%
# lab.hint("kept-micro-batches")

# %% [markdown] lang="fr"
# 1F1B est-il donc simplement meilleur ? Il a un prix, absent des formules du cours : la **latence**. Dès que les
# messages prennent du temps, chaque changement de sens l’expose. Durée du pas pour 4 rangs, 8 micro-batches, et un
# message qui dure un quart de passe avant :

# %% [markdown] lang="en"
# So is 1F1B simply better? It has a price, which the formulas above leave out: **latency**. As soon as messages take
# time, each change of direction exposes it. Length of the step for 4 ranks, 8 micro-batches, and a message that takes a
# quarter of a forward:

# %% name="latency"
for name in ("gpipe", "1f1b", "eager-1f1b"):
    print(name, simulate(build(name, 4, 8), Costs(latency=0.25)).makespan)

# %% [markdown] lang="fr"
# GPipe ajoute 2(p − 1) latences ; 1F1B, 2(p − 1)m/p + 2(p − 2) si p divise m (sinon, un peu plus ou un peu moins :
# demandez au simulateur). *Eager 1F1B* les masque de nouveau, en gardant presque deux fois plus : il gagne du temps au
# prix de la mémoire.
#
# ## 3. Interblocages
#
# Chaque rang exécute sa liste **dans l’ordre**. Il suffit alors de deux actions mal placées pour que deux rangs
# s’attendent à jamais. Sur un vrai cluster, on n’en verrait qu’un calcul figé ; le simulateur, lui, montre le cycle :

# %% [markdown] lang="en"
# GPipe adds 2(p − 1) latencies; 1F1B, 2(p − 1)m/p + 2(p − 2) where p divides m (otherwise somewhat more or less: ask
# the simulator). *Eager 1F1B* hides them again, keeping nearly twice as much: time is bought with memory only.
#
# ## 3. Deadlocks
#
# Each rank executes its list **in order**. Two misplaced actions are then enough for two ranks to wait for each other
# for ever. On a real cluster one would only see a job that hangs; the simulator shows the cycle:

# %% name="deadlock"
print(figures.deadlock_of([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]], micro_batches=2))

# %% [markdown] lang="fr"
# Celui-là se voit dans l’ordre. Un autre vient des envois. Jusqu’ici, un rang qui envoyait continuait aussitôt. Avec un
# envoi **bloquant**, il attend que l’autre reçoive (c’est ce que fait NCCL pour un message qui n’est pas posté des deux
# côtés). Voici 1F1B, pourtant juste, avec de tels envois :

# %% [markdown] lang="en"
# That one can be seen in the order. Another comes from the sends. So far, a rank that sent went on at once. With a
# **blocking** send it waits until the other receives (which is what NCCL does with a message that is not posted on both
# sides). Here is 1F1B, right though it is, with such sends:

# %% name="blocking"
one_f = [["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"], ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]]
for sends in ("buffered", "rendezvous", "paired"):
    print(sends, "→", figures.deadlock_of(one_f, micro_batches=4, sends=sends))

# %% [markdown] lang="fr"
# Les deux rangs envoient en même temps, l’un une activation, l’autre un gradient. Le bon remède est de poster l’envoi
# et la réception **ensemble** (`batch_isend_irecv`, `paired` ici). Cherchons-en un autre, avec pour seul outil l’ordre
# des actions.
#
# ### Exercice 4 — réparer un interblocage
#
# Renvoyez les ordres des deux rangs, pour 4 micro-batches : ils doivent aller jusqu’au bout avec des envois bloquants
# (`rendezvous`), en gardant au plus **3** micro-batches par rang, et plus vite que sans pipeline (24 unités de temps).

# %% [markdown] lang="en"
# Both ranks send at the same time, one an activation, the other a gradient. The right remedy is to post the send and
# the receive **together** (`batch_isend_irecv`, `paired` here). Let us look for another one, with the order of the
# actions as our only tool.
#
# ### Exercise 4 — repair a deadlock
#
# Return the orders of both ranks, for 4 micro-batches: they must run to their end with blocking sends (`rendezvous`),
# keep at most **3** micro-batches per rank, and be faster than without a pipeline (24 time units).


# %% name="unblock"
def unblocked():
    ### BEGIN SOLUTION
    ahead = ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    return [ahead, ahead]
    ### END SOLUTION


lab.check("unblock", unblocked)

# %%
# lab.hint("unblock")

# %% [markdown] lang="fr"
# En haut, 1F1B avec envois et réceptions postés ensemble ; en bas, votre réparation avec des envois bloquants.

# %% [markdown] lang="en"
# Above, 1F1B with sends and receives posted together; below, your repair with blocking sends.

# %% name="repaired"
figures.repaired(unblocked, 2, 4)

# %% [markdown] lang="fr"
# ## 4. Sous contrainte de mémoire
#
# Et si un rang ne peut pas garder p micro-batches ? Plutôt que d’écrire chaque ordre à la main, prenons un
# **ordonnanceur de liste** : dès qu’un rang est libre, il exécute, parmi ce qui est prêt, ce que la **priorité** met en
# tête. `list_schedule(ranks, micro_batches, priority=…, cap=…)` a deux réglages :
#
# - `priority` : `"forward-first"` ou `"backward-first"` ;
# - `cap` : le nombre de micro-batches qu’un rang peut garder ; un seul pour tous, un par rang, ou une fonction du rang.
#
# Sans `cap`, `"forward-first"` redonne GPipe. `"backward-first"`, avec un `cap` de p − r, redonne 1F1B.
#
# **Votre prédiction.** Avec 4 rangs et 8 micro-batches, 1F1B dure 33 unités de temps et garde 4 micro-batches au
# rang 0. Si l’on n’en permet que **3**, combien dure le plus court de tous les pas ?

# %% [markdown] lang="en"
# ## 4. Under a memory limit
#
# And if a rank cannot keep p micro-batches? Rather than writing each order by hand, let us take a list scheduler: as
# soon as a rank is free, it runs the ready action that the **priority** puts first.
# `list_schedule(ranks, micro_batches, priority=…, cap=…)` has two knobs:
#
# - `priority`: `"forward-first"` or `"backward-first"`;
# - `cap`: the number of micro-batches that a rank may keep; one for all, one per rank, or a function of the rank.
#
# Without `cap`, `"forward-first"` gives GPipe. `"backward-first"`, with a `cap` of p − r, gives 1F1B.
#
# **Your prediction.** With 4 ranks and 8 micro-batches, 1F1B takes 33 time units and keeps 4 micro-batches on rank 0.
# If only **3** are allowed, how long is the shortest of all steps?

# %% name="predict-cap" stub="value"
lab.predict(
    "one-slot-less",
    ### BEGIN SOLUTION
    simulate(list_schedule(4, 8, priority="backward-first", cap=3)).makespan,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# ### Exercice 5 — le plus court sous contrainte
#
# Renvoyez un ordonnancement qui garde au plus `limit` micro-batches par rang, et aussi court que possible : le résultat
# de `list_schedule`, ou vos propres listes. La vérification le compare à l’optimum **prouvé** (un solveur a exclu tout
# ordonnancement plus court).

# %% [markdown] lang="en"
# ### Exercise 5 — the shortest under a limit
#
# Return a schedule that keeps at most `limit` micro-batches per rank, and as short as possible: what `list_schedule`
# gives, or lists of your own. The check compares it with the **proven** optimum (a solver has excluded any shorter
# schedule).


# %% name="memory-cap"
def under_cap(ranks, micro_batches, limit):
    ### BEGIN SOLUTION
    return list_schedule(ranks, micro_batches, priority="backward-first", cap=limit)
    ### END SOLUTION


lab.check("memory-cap", under_cap)

# %%
# lab.hint("memory-cap")

# %% name="reveal-cap"
from dlojz.pipeline.optimum.shortest_schedule import optimum

lab.reveal("one-slot-less", optimum(4, 8, memory_limit=3).value)

# %% [markdown] lang="fr"
# Une place de moins coûte 18 % de temps : rien de plus court n’existe, et c’est prouvé
# ([shortest_schedule.py](../../dlojz/pipeline/optimum/shortest_schedule.py)). Au-delà de quatre places, plus de mémoire
# ne fait rien gagner : la bulle est due aux dépendances. Et 1F1B « raccourci » (une passe avant de moins en tête, puis
# la même alternance) ? 48 : il attend des passes avant qui ne peuvent pas venir, alors que des passes arrière sont
# prêtes. Pour fixer un ordre d’avance, il faut savoir ce que les autres rangs pourront faire.

# %% [markdown] lang="en"
# One slot fewer costs 18% more time: nothing shorter exists, and that is proven
# ([shortest_schedule.py](../../dlojz/pipeline/optimum/shortest_schedule.py)). Beyond four, memory buys nothing more:
# the bubble comes from the dependencies. And 1F1B “cut short” (one forward fewer in front, then in turn all the same)?
# 48: it waits for forwards that cannot come while backwards are ready. An order that is fixed in advance must know what
# the others can do.

# %% name="capped"
figures.capped(under_cap, 4, 8, range(1, 7))

# %% [markdown] lang="fr"
# ## 5. Une frontière, deux vrais rangs
#
# Passons aux processus. À la frontière entre deux étages, deux messages par micro-batch : l’activation dans un sens,
# son gradient dans l’autre. Rien de plus, mais autograd ne traverse pas les processus : c’est à vous de relier les deux
# moitiés de la chaîne.
#
# ### Exercice 6 — envoyer et recevoir
#
# Faites passer un micro-batch à travers l’étage de ce rang, `stage` : passe avant, puis passe arrière. Les gradients
# restent dans les paramètres de l’étage ; il n’y a rien à renvoyer.
#
# - `x` est le micro-batch sur le rang 0, `None` ailleurs ; `shape` et `dtype` sont la forme et le type de ce qui passe
#   entre deux étages ;
# - `loss_of(y)` donne la perte, sur le dernier rang ;
# - `dist.send(tenseur, rang)` envoie, `dist.recv(tenseur, rang)` remplit un tenseur déjà alloué ;
# - `tenseur.backward(g)` part d’un gradient reçu, `g`, plutôt que d’une perte.
#
# Écrivez-le pour un nombre quelconque de rangs : celui du milieu reçoit et envoie dans les deux sens.

# %% [markdown] lang="en"
# ## 5. One boundary, two real ranks
#
# Let us move on to real processes. Two messages per micro-batch cross the boundary between two stages: the activation
# one way, its gradient the other. Nothing more, but autograd does not cross processes: it is up to you to join the two
# halves of the chain.
#
# ### Exercise 6 — send and receive
#
# Run, on this rank, one micro-batch through `stage`, forward then backward. The gradients stay in the stage's
# parameters; nothing is to be returned.
#
# - `x` is the micro-batch on rank 0, `None` elsewhere; `shape` and `dtype` are those of what passes between two stages;
# - `loss_of(y)` gives the loss, on the last rank;
# - `dist.send(tensor, rank)` sends, `dist.recv(tensor, rank)` fills a tensor that is allocated already;
# - `tensor.backward(g)` starts from a gradient that was received, `g`, rather than from a loss.
#
# Write it for any number of ranks: one in the middle receives and sends in both directions.


# %% name="stage-boundary"
def run_stage(stage, x, loss_of, shape, dtype):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    ### BEGIN SOLUTION
    if rank > 0:
        x = torch.empty(shape, dtype=dtype)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank == last:
        loss_of(y).backward()
    else:
        dist.send(y.detach(), rank + 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    ### END SOLUTION


lab.check("stage-boundary", run_stage)

# %%
# lab.hint("stage-boundary")

# %% [markdown] lang="fr"
# Pour plusieurs micro-batches, il ne manque que l’ordonnancement : garder entrées et sorties de ceux qui sont en cours,
# et suivre la liste du rang. Le paquet l’écrit ainsi, en deux cents lignes :
# [runtime.py](../../dlojz/pipeline/runtime.py). Lisez-le, en cherchant la réponse à trois questions :
#
# - pourquoi les envois ne bloquent-ils pas, et quand finit-on par les attendre ?
# - comment un rang sait-il, sans étiquette, quel message il reçoit ?
# - où la perte est-elle divisée par le nombre de micro-batches, et pourquoi ?
#
# <details><summary>Réponse</summary>
#
# Avec des envois bloquants, deux rangs qui s’envoient un message au même moment s’attendraient (section 3) ; le code
# appelle donc `isend`, et n’attend ses envois qu’à la fin du pas. Entre deux rangs, les messages arrivent dans l’ordre
# où ils sont partis, et chaque rang connaît la liste de tous : il sait donc lequel vient. La perte est divisée au
# dernier étage, avant la passe arrière : les gradients des micro-batches s’additionnent, et leur somme doit être le
# gradient de la perte moyenne.
#
# </details>

# %% [markdown] lang="en"
# For several micro-batches only the schedule is missing: keep the inputs and outputs of those under way, and follow the
# rank's list. The package writes it so, in two hundred lines: [runtime.py](../../dlojz/pipeline/runtime.py). Read it,
# looking for the answers to three questions:
#
# - why do the sends not block, and when are they waited for in the end?
# - how does a rank know, without labels, which message it receives?
# - where is the loss divided by the number of micro-batches, and why?
#
# <details><summary>Answer</summary>
#
# With blocking sends, two ranks that send to each other at the same time would wait for ever (section 3); so the code
# calls `isend`, and waits for its sends at the end of the step only. Messages between two ranks arrive in the order in
# which they were sent, and each rank knows the lists of all: so it knows which one comes. The loss is divided on the
# last stage, before the backward pass: the gradients of the micro-batches add up, and their sum must be the gradient of
# the mean loss.
#
# </details>

# %% [markdown] lang="fr"
# ## 6. Où couper ?
#
# Jusqu’ici, tous les étages étaient égaux. Un pipeline avance au pas de son étage le plus chargé, le **goulot** :
# sans compter les messages, un pas dure Σ tᵢ + (m − 1) max tᵢ. La somme ne dépend pas du découpage ; il faut donc
# rendre le goulot aussi petit que possible.
#
# Essayer tous les découpages de CoAtNet-7 (60 blocs) est l’affaire d’une seconde pour 4 étages, C(59, 3) = 32 509, mais
# serait trop long pour 8 : C(59, 7), plus de 300 millions. Renversons la question : pour une limite donnée, combien
# d’étages faut-il ? On y répond en un parcours ; une recherche par dichotomie sur la limite fait le reste.
#
# ### Exercice 7 — couper sans dépasser
#
# `weights` donne le poids de chaque bloc, `limit` ce qu’un étage peut peser. Renvoyez les **bornes** du découpage qui
# utilise le moins d’étages possible, de 0 au nombre de blocs : `[0, 2, 4]` est fait des blocs 0 et 1, puis 2 et 3.
# Aucun bloc ne pèse plus que la limite.

# %% [markdown] lang="en"
# ## 6. Where to cut?
#
# So far all stages were equal. A pipeline advances at the pace of its heaviest stage, the **bottleneck**: messages
# aside, a step takes Σ tᵢ + (m − 1) max tᵢ. The sum does not depend on the cut, so the bottleneck must be made as small
# as possible.
#
# Trying all cuts of CoAtNet-7 (60 blocks) takes a second for 4 stages, C(59, 3) = 32,509, but would take too long for
# 8: C(59, 7), more than 300 million. Let us turn the question round: for a given limit, how many stages does it take?
# That is answered in one pass; a bisection over the limit does the rest.
#
# ### Exercise 7 — cut without exceeding
#
# `weights` gives the weight of each block, `limit` what a stage may weigh. Return the **bounds** of the cut that uses
# the fewest stages, from 0 to the number of blocks: `[0, 2, 4]` is made of blocks 0 and 1, then 2 and 3. No block
# weighs more than the limit.


# %% name="first-fit"
def first_fit(weights, limit):
    ### BEGIN SOLUTION
    bounds, load = [0], 0
    for block, weight in enumerate(weights):
        if load + weight > limit:
            bounds.append(block)
            load = 0
        load += weight
    return [*bounds, len(weights)]
    ### END SOLUTION


lab.check("first-fit", first_fit)

# %%
# lab.hint("first-fit")

# %% [markdown] lang="fr"
# CoAtNet-7 en quatre étages, par nombre de **paramètres** : votre découpage, puis ceux de DeepSpeed, de torchgpipe, et
# d’un nombre égal de blocs.

# %% [markdown] lang="en"
# CoAtNet-7 in four stages, by number of **parameters**: your cut, then those of DeepSpeed, of torchgpipe, and of equal
# numbers of blocks.

# %% name="cuts"
coatnet = dlojz.RunConfig.of(model="coatnet_7", data="synthetic")
figures.cuts(first_fit, coatnet, stages=4)

# %% [markdown] lang="fr"
# Un nombre égal de blocs charge un étage d’un tiers de trop, donc ralentit tout le pipeline d’autant. Les deux
# heuristiques trouvent ici l’optimum ; ce n’est pas toujours le cas. Comptons, sur 1 000 listes de blocs tirées au
# hasard, combien de fois chacune le manque, et de combien au pire
# ([partition_baselines.py](../../dlojz/pipeline/partition_baselines.py)) :

# %% [markdown] lang="en"
# Equal numbers of blocks load one stage by a third too much, and so slow the whole pipeline down by as much. Both
# heuristics find the optimum here; that is not always so. Let us count, over 1,000 random lists of blocks, how often
# each misses it, and by how much at worst ([partition_baselines.py](../../dlojz/pipeline/partition_baselines.py)):

# %% name="how-often"
from dlojz.pipeline.partition_baselines import how_often

for peer in ("deepspeed", "torchgpipe", "uniform"):
    counted = how_often(peer, cases=1000)
    print(f"{peer:<10}", round(counted.missed_share, 3), round(counted.worst_ratio, 2))

# %% [markdown] lang="fr"
# DeepSpeed minimise l’écart entre l’étage le plus lourd et le plus léger, ce qui n’est pas tout à fait la même chose.
# Et que peser ? Des étages égaux en paramètres ne le sont pas en calcul. Le même découpage, par **opérations** :

# %% [markdown] lang="en"
# DeepSpeed minimises the gap between the heaviest and the lightest stage, which is not quite the same. And what should
# be weighed? Stages with equally many parameters do not take equally long to compute. The same cut, by **operations**:

# %% name="cuts-by-flops"
figures.cuts(first_fit, coatnet, stages=4, by="flops")

# %% [markdown] lang="fr"
# Pour la mémoire des états, on pèse les paramètres ; pour la durée du pas, le temps. `dlojz partition --by time` mesure
# chaque bloc. Et les premiers étages gardent plus de micro-batches que les derniers : quand la mémoire manque, on les
# charge moins.
#
# ## 7. GPipe et 1F1B, pour de vrai
#
# Entraînons un petit Vision Transformer sur deux rangs, avec le *runtime* que vous venez de lire : 8 micro-batches de
# 16 images, d’abord avec GPipe, puis avec 1F1B. Ce qui passe à la frontière :

# %% [markdown] lang="en"
# For the memory of the states one weighs parameters; for the length of the step, time. `dlojz partition --by time`
# measures each block. And the first stages keep more micro-batches than the last: where memory is short, they are
# loaded less.
#
# ## 7. GPipe and 1F1B, for real
#
# Let us train a small Vision Transformer on two ranks, with the runtime that you have just read: 8 micro-batches of 16
# images, with GPipe first, then with 1F1B. What passes at the boundary:

# %% name="boundary"
from dlojz import models
from dlojz.pipeline.runtime import boundaries_of, stage_modules

config = dlojz.RunConfig.of(
    model="vit_tiny", image_size=32, pp=2, micro_batch=16, micro_batches=8, engine="by_hand", steps=6
)
blocks = models.build("vit_tiny", image_size=32)
_, boundary, _ = boundaries_of(stage_modules(blocks, (0, 3, 6)), torch.zeros(16, 3, 32, 32))
print(boundary.shape, boundary.dtype)

# %% [markdown] lang="fr"
# **Vos prédictions**, avant de lancer. Combien d’octets le rang 0 envoie-t-il par pas à l’étage suivant ? Et combien de
# fois plus d’octets d’activations garde-t-il avec GPipe qu’avec 1F1B ?

# %% [markdown] lang="en"
# **Your predictions**, before the start. How many bytes does rank 0 send per step to the next stage? And how many times
# as many bytes of activations does it keep with GPipe as with 1F1B?

# %% name="predict-boundary" stub="value"
lab.predict(
    "boundary-bytes",
    ### BEGIN SOLUTION
    8 * 16 * 17 * 128 * 4,
    ### END SOLUTION
)

# %% name="predict-activations" stub="value"
lab.predict(
    "activations",
    ### BEGIN SOLUTION
    kept("gpipe", 0, 2, 8) / kept("1f1b", 0, 2, 8),
    ### END SOLUTION
)

# %% name="run-pipelines" tags=["nbval-ignore-output"]
gpipe = dlojz.run(config, schedule="gpipe")
one_f_one_b_run = dlojz.run(config, schedule="1f1b")

# %% name="reveal-boundary"
sent = [traffic for traffic in gpipe.record.footprint().communication if traffic.group == "pp"]
lab.reveal("boundary-bytes", sum(traffic.message_bytes for traffic in sent if traffic.collective == "send"))

# %% name="reveal-activations"
lab.reveal("activations", figures.activation_bytes(gpipe, 0) / figures.activation_bytes(one_f_one_b_run, 0))

# %% [markdown] lang="fr"
# Voici la mémoire mesurée sur les deux rangs, divisée par le nombre de micro-batches que prévoit votre fonction :

# %% [markdown] lang="en"
# Here is the memory measured on both ranks, divided by the number of micro-batches that your function foresees:

# %% name="memory" tags=["nbval-ignore-output"]
figures.memory(kept, [gpipe, one_f_one_b_run])

# %% [markdown] lang="fr"
# Le quotient est le même des deux côtés, à un message encore en route près : ce que garde un rang, c’est bien
# « micro-batches en cours × activations d’un micro-batch ». Et l’entraînement ? Les pertes sont-elles les mêmes,
# et celles d’un processus seul ?

# %% [markdown] lang="en"
# The quotient is the same on both sides, give or take a message that is still under way: what a rank keeps is indeed
# “micro-batches under way × activations of one micro-batch”. And the training? Are the losses the same, and those of
# one process?

# %% name="run-alone" tags=["nbval-ignore-output"]
alone = dlojz.run(config, pp=1, engine="torch")

# %% name="same-training"
figures.same_training(gpipe, one_f_one_b_run, alone)

# %% [markdown] lang="fr"
# ### Et la durée ?
#
# Chaque action a été chronométrée, sur chaque rang, les horloges des rangs étant alignées. En haut, la simulation avec
# les durées moyennes ainsi mesurées ; juste au-dessous, la mesure. La courbe dit où elles s’écartent.

# %% [markdown] lang="en"
# ### And the time?
#
# Each action was timed, on each rank, with the clocks of the ranks aligned. Above, the simulation with the mean times
# so measured; just below, the measurement. The curve tells where they part.

# %% name="laid-over-gpipe" tags=["nbval-ignore-output"]
figures.laid_over(gpipe)

# %% name="laid-over-1f1b" tags=["nbval-ignore-output"]
figures.laid_over(one_f_one_b_run)

# %% [markdown] lang="fr"
# **Expliquez.** Les deux ordonnancements ont, en théorie, la même durée. Regardez le tableau, puis la figure : la
# différence mesurée vient-elle de la bulle, ou de la durée des actions elles-mêmes ?
#
# <details><summary>Réponse</summary>
#
# La durée du pas × (1 − bulle) est celle des actions d’un rang. Si les deux lignes y sont égales, c’est l’attente qui
# diffère : les étages n’ont pas la même durée, et les messages ne partent pas aux mêmes moments. Si celle de 1F1B est
# plus courte, ce sont les actions : garder moins d’activations, c’est mieux profiter des caches. La théorie suppose des
# actions égales et un cœur par rang ; ici, les rangs se partagent les cœurs, et un rang qui attend laisse les siens à
# l’autre.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** In theory both schedules take the same time. Look at the table, then at the figure: does the measured
# difference come from the bubble, or from the time of the actions themselves?
#
# <details><summary>Answer</summary>
#
# The step × (1 − bubble) is the time of a rank's actions. Where both rows have the same, it is the waiting that
# differs: the stages do not take equal time, and the messages leave at other moments. Where that of 1F1B is shorter, it
# is the actions: keeping fewer activations makes better use of the caches. The theory assumes equal actions and a core
# for each rank; here the ranks share the cores, and one that waits leaves its cores to the other.
#
# </details>

# %% name="steps" tags=["nbval-ignore-output"]
figures.steps([gpipe, one_f_one_b_run])

# %% [markdown] lang="fr"
# ## 8. Au-delà de 1F1B
#
# La bulle vient de ce que l’étage précédent attend le gradient **de l’entrée**. Celui **des poids**, personne ne
# l’attend, sauf l’optimiseur. *Zero bubble* (Qi et al., 2024) coupe donc la passe arrière en deux : `I`, pour l’entrée,
# aussitôt que possible ; `W`, pour les poids, dans les creux.
#
# ### Exercice 8 — votre ordonnancement
#
# Pour 2 rangs et 4 micro-batches, 1F1B dure 15 unités de temps (F = I = W = 1). Écrivez deux ordres avec `F`, `I` et
# `W` qui n’en durent que **13**, sans garder plus de 2 micro-batches par rang. Un micro-batch n’est rendu qu’à la fin
# de son `W`.

# %% [markdown] lang="en"
# ## 8. Beyond 1F1B
#
# The bubble comes from the stage before waiting for the gradient **of the input**. For that **of the weights** nobody
# waits, but the optimizer. *Zero bubble* (Qi et al., 2024) therefore cuts the backward in two: `I`, for the input, as
# soon as possible; `W`, for the weights, in the gaps.
#
# ### Exercise 8 — your own schedule
#
# For 2 ranks and 4 micro-batches 1F1B takes 15 time units (F = I = W = 1). Write two orders with `F`, `I` and `W` that
# take only **13**, without keeping more than 2 micro-batches per rank. A micro-batch is given back at the end of its
# `W` only.


# %% name="zero-bubble"
def without_bubble():
    ### BEGIN SOLUTION
    return [
        ["F0", "F1", "I0", "W0", "F2", "I1", "W1", "F3", "I2", "W2", "I3", "W3"],
        ["F0", "I0", "F1", "I1", "W0", "F2", "I2", "W1", "F3", "I3", "W2", "W3"],
    ]
    ### END SOLUTION


lab.check("zero-bubble", without_bubble)

# %%
# lab.hint("zero-bubble")

# %% name="own"
figures.own(without_bubble, 2, 4)

# %% [markdown] lang="fr"
# Simulé, donc ; exécutons-le. La cellule qui suit l’écrit dans le format CSV du *runtime* de PyTorch, une ligne par
# rang. (Tant que l’exercice n’est pas fait, ou que votre ordre ne peut pas s’exécuter, c’est 1F1B.)

# %% [markdown] lang="en"
# Simulated, then; let us execute it. The next cell writes it in the CSV format of PyTorch's runtime, one line per rank.
# (As long as the exercise is to do, or your order cannot be executed, it is 1F1B.)

# %% name="csv"
csv = figures.csv_of(without_bubble, 2, 4)
print(csv)

# %% [markdown] lang="fr"
# Deux rangs, deux exécutions : par notre *runtime*, puis par celui de PyTorch, qui lit le CSV. Chaque rang compare ses
# gradients à ceux d’un processus seul, qui fait passer tout le batch à travers les deux étages.

# %% [markdown] lang="en"
# Two ranks, two executions: by our runtime, then by PyTorch's, which reads the CSV. Each rank compares its gradients
# with those of one process, which sends the whole batch through both stages.


# %% name="stages"
def make_stages():
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]


def whole_gradients(inputs, targets):
    stages = make_stages()
    F.mse_loss(stages[1](stages[0](inputs)), targets).backward()
    return [[parameter.grad for parameter in stage.parameters()] for stage in stages]


# %% name="execute" tags=["nbval-ignore-output"]
# %%ranks 2 --with csv,make_stages,whole_gradients,F
from torch.distributed.pipelining import PipelineStage

from dlojz.pipeline.exchange_formats import from_csv
from dlojz.pipeline.runtime import PipelineRuntime, boundaries_of
from dlojz.train.engines.pipeline_engines import torch_schedule

schedule = from_csv(csv)
generator = torch.Generator().manual_seed(0)
inputs, targets = (torch.randn(8, 32, generator=generator) for _ in range(2))
expected = whole_gradients(inputs, targets)[rank]


def apart(stage):
    return max(float((p.grad - right).abs().max()) for p, right in zip(stage.parameters(), expected, strict=True))


stages = make_stages()
parts = inputs.chunk(4), targets.chunk(4)
ours = PipelineRuntime(schedule, {(0, rank): stages[rank]}, boundaries_of(stages, parts[0][0]), F.mse_loss)
ours.step(*parts)
print("dlojz", apart(stages[rank]) < 1e-6)

stages = make_stages()
place = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
theirs = torch_schedule(schedule, [place], F.mse_loss)
theirs.step(inputs) if rank == 0 else theirs.step(target=targets)
print("torch", apart(stages[rank]) < 1e-6)

# %% [markdown] lang="fr"
# ### La galerie
#
# Tous partagent deux idées : **déplacer** du travail dans la bulle (`W` plus tard, d’autres micro-batches plus tôt), et
# **placer** plusieurs morceaux du modèle sur un rang, pour que la bulle soit celle de petits morceaux.
#
# - *interleaved* (Megatron-LM) : v morceaux par rang, en boucle ; bulle divisée par v, messages multipliés par (vp −
#   1)/(p − 1), un peu plus que v ;
# - *ZB-V* : deux morceaux en V, le rang 0 a le premier et le dernier étage ;
# - *Chimera*, *DualPipe* : deux pipelines en sens contraires ; chaque étage existe deux fois ;
# - *TeraPipe* : coupe aussi les séquences, en tranches de tokens ; *BPipe* : confie ses activations à un rang moins
#   chargé.
#
# Quatre rangs, 8 micro-batches ; partout, un micro-batch occupe un rang pendant 1 + 1 + 1. « Gardés » se compte en
# micro-batches entiers, du rang le moins chargé au plus chargé.

# %% [markdown] lang="en"
# ### The gallery
#
# All share two ideas: **move** work into the bubble (`W` later, other micro-batches sooner), and **place** several
# pieces of the model on one rank, so that the bubble is one of small pieces.
#
# - *interleaved* (Megatron-LM): v pieces per rank, going round; the bubble is divided by v, messages are multiplied by
#   (vp − 1)/(p − 1), somewhat more than v;
# - *ZB-V*: two pieces in a V, rank 0 has the first and the last stage;
# - *Chimera*, *DualPipe*: two pipelines in opposite directions; each stage exists twice;
# - *TeraPipe*: cuts the sequences too, into slices of tokens; *BPipe*: leaves activations with a rank that has room.
#
# Four ranks, 8 micro-batches; everywhere a rank spends 1 + 1 + 1 on a micro-batch. “Kept” counts whole micro-batches,
# from the least to the most loaded rank.

# %% name="gallery"
figures.all_schedules(
    ("naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "chimera", "zb-h1", "zb-h2", "zb-v",
     "dualpipe", "dualpipe-v", "terapipe", "bpipe"),
    ranks=4,
    micro_batches=8,
)  # fmt: skip

# %% [markdown] lang="fr"
# **Expliquez.** ZB-H1 et ZB-H2 ont la même **durée** (*makespan*), 27, mais pas la même **portée** (*span*). La durée
# va du premier départ à la dernière fin ; la portée est le plus long temps qu’un rang passe entre **son** départ et
# **sa** fin. Voici ZB-H2 : pourquoi ses 24 ne servent-ils à rien si l’optimiseur attend tous les rangs (pour l’écrêtage
# des gradients, par exemple) ?

# %% [markdown] lang="en"
# **Explain.** ZB-H1 and ZB-H2 have the same makespan, 27, but not the same span. The makespan goes from the first start
# to the last end; the span is the longest time that a rank spends between **its** start and **its** end. Here is ZB-H2:
# why are its 24 of no use if the optimizer waits for all ranks (to clip gradients, for instance)?

# %%
figures.drawn("zb-h2", 4, 8)

# %% [markdown] lang="fr"
# Son parallélogramme n’a pas de trou : chaque rang enchaîne un pas sur l’autre, *à condition* de ne pas attendre les
# autres. Avec une barrière, un pas dure 27, et c’est l’optimum prouvé, quelle que soit la mémoire. ZB-H2 n’aurait alors
# que doublé la mémoire. Voyez aussi Chimera, coloré par étage : les deux pipelines se croisent.

# %% [markdown] lang="en"
# Its parallelogram has no hole: each rank goes from one step to the next, *provided* it need not wait for the others.
# With a barrier a step takes 27, and that is the proven optimum, whatever the memory. ZB-H2 would then only have
# doubled the memory. See Chimera as well, coloured by stage: the two pipelines cross.

# %%
figures.drawn("chimera", 4, 8, color_by="chunk")

# %% [markdown] lang="fr"
# TeraPipe coupe chaque séquence en tranches : ici 2 micro-batches de 4 tranches remplissent mieux le pipeline que 2
# micro-batches entiers. Mais avec l’attention causale, une tranche coûte d’autant plus que d’autres la précèdent : les
# tranches de même durée ne sont pas de même longueur. Voici le meilleur découpage de 8 192 tokens pour 4 rangs, si
# chaque tranche coûte 1 ms de plus (lancements, messages).

# %% [markdown] lang="en"
# TeraPipe cuts each sequence into slices: here 2 micro-batches of 4 slices fill the pipeline better than 2 whole
# micro-batches. But with causal attention the later a slice, the more it costs: slices of equal time are not of equal
# length. Here is the best cut of 8,192 tokens for 4 ranks, if each slice costs 1 ms more (launches, messages).

# %%
figures.drawn("terapipe", 4, 2)

# %% name="slices"
from dlojz.pipeline.validity import causal_slice_time, pipelined_time, plan_slices

time_of = causal_slice_time(hidden=512, flops_per_s=1e14, overhead_s=1e-3, layers=8)
plan = plan_slices(8192, ranks=4, time=time_of, grid=128)
print(plan.lengths, round(1e3 * plan.total, 1), round(1e3 * pipelined_time([time_of(8192, 0)], 4), 1))

# %% [markdown] lang="fr"
# Les deux durées, en ms : avec ces tranches, puis d’une seule pièce.
#
# À vous de jouer : changez d’ordonnancement, de durées, de latence, ou modifiez l’ordre vous-même. Sans noyau actif, la
# figure fixe montre la même chose.

# %% [markdown] lang="en"
# The two times, in ms: with these slices, then in one piece.
#
# Your turn: change schedule, times and latency, or edit the order yourself. Where no kernel runs, the static figure
# shows the same.

# %% name="pipeline-panel" tags=["nbval-ignore-output"]
from dlojz.display.widgets.pipeline_panel import pipeline_panel, still_panel

choice = {"schedule": "interleaved", "ranks": 4, "micro_batches": 8}
pipeline_panel(**choice)

# %% name="still-panel" tags=["nbval-ignore-output"]
still_panel(**choice)

# %% [markdown] lang="fr"
# ## 9. Sans attendre : les pipelines asynchrones
#
# Et si l’on ne vidait jamais le pipeline ? **PipeDream** (2019) met les poids à jour après chaque passe arrière et
# continue : plus de bulle. Mais entre la passe avant d’un micro-batch et sa mise à jour, d’autres sont passés : son
# gradient est celui d’anciens poids. Comptons, sur 4 étages, le retard τ de chaque étage (en mises à jour), et les
# versions des poids qu’il garde :
#
# - PipeDream garde de côté (*weight stashing*) les poids de la passe avant, pour la passe arrière ; la *vertical sync*
#   prend la même version sur tous les étages ;
# - **PipeDream-2BW** ne met à jour qu’une fois par batch : deux versions suffisent, et le retard est de 1 partout ;
# - **PipeMare** n’en garde qu’une : les passes avant et arrière voient des poids différents.
#
# (AMPNet va plus loin : chacun exécute ce qui arrive, et le retard n’a plus de borne que le nombre de micro-batches en
# cours.)

# %% [markdown] lang="en"
# ## 9. Without waiting: asynchronous pipelines
#
# And what if the pipeline were never emptied? **PipeDream** (2019) updates the weights after each backward and goes on:
# no more bubble. But between the forward of a micro-batch and its update, others have passed: its gradient is one of
# old weights. Let us count, on 4 stages, the delay τ of each stage (in updates), and the versions of the weights that
# it keeps:
#
# - PipeDream puts the weights of the forward aside for the backward (weight stashing); vertical sync takes the same
#   version on all stages;
# - **PipeDream-2BW** updates once per batch only: two versions are enough, and the delay is 1 everywhere;
# - **PipeMare** keeps one only: forward and backward see different weights.
#
# (AMPNet goes further: everyone runs whatever arrives, and nothing but the number of micro-batches in flight bounds the
# delay.)

# %% name="staleness"
figures.staleness(ranks=4, micro_batches=24)

# %% [markdown] lang="fr"
# PipeDream, coloré par version des poids : sur le rang 0, `B4` reprend la version 1, celle de `F4`, alors que la
# version 4 existe déjà, soit trois mises à jour de retard. Dessous, PipeDream-2BW : deux couleurs à la fois, jamais
# plus.

# %% [markdown] lang="en"
# PipeDream, coloured by version of the weights: on rank 0 `B4` takes up version 1 again, that of `F4`, when version 4
# exists already: three updates late. Below, PipeDream-2BW: two colours at a time, never more.

# %%
figures.drawn("pipedream", 4, 8, color_by="version")

# %%
figures.drawn("pipedream-2bw", 4, 12, color_by="version")

# %% [markdown] lang="fr"
# Que fait un gradient en retard ? Prenons le problème le plus simple, la parabole w²/2, dont le gradient est w.
#
# ### Exercice 9 — SGD en retard
#
# Renvoyez la liste w(0), …, w(`updates`) des poids, avec w(0) = 1 et w(t+1) = w(t) − `step` · w(t − `delay`). Tant
# qu’il n’y a pas eu `delay` mises à jour, le gradient est celui des premiers poids.

# %% [markdown] lang="en"
# What does a stale gradient do? Let us take the simplest problem, the parabola w²/2, whose gradient is w.
#
# ### Exercise 9 — stale SGD
#
# Return the list w(0), …, w(`updates`) of the weights, with w(0) = 1 and w(t+1) = w(t) − `step` · w(t − `delay`). As
# long as there have not been `delay` updates, the gradient is that of the first weights.


# %% name="stale-sgd"
def stale_sgd(step, delay, updates):
    ### BEGIN SOLUTION
    weights = [1.0]
    for t in range(updates):
        weights.append(weights[t] - step * weights[max(t - delay, 0)])
    return weights
    ### END SOLUTION


lab.check("stale-sgd", stale_sgd)

# %%
# lab.hint("stale-sgd")

# %% name="swings"
figures.swings(stale_sgd, step=0.5, delays=(0, 1, 3))

# %% [markdown] lang="fr"
# Le même pas converge, oscille, puis diverge. **Votre prédiction.** Sans retard, le pas peut aller jusqu’à 2. Avec 7
# mises à jour de retard (le premier de 8 étages de PipeDream), par combien faut-il le diviser ?

# %% [markdown] lang="en"
# The same step converges, swings, then diverges. **Your prediction.** Without delay the step may be as large as 2. With
# 7 updates of delay (that of the first of PipeDream's 8 stages), by how much must it be divided?

# %% name="predict-step" stub="value"
lab.predict(
    "stable-step",
    ### BEGIN SOLUTION
    2 / (3.14159 / (2 * 7 + 1)),
    ### END SOLUTION
)

# %% name="reveal-step"
from dlojz.pipeline.stale_weights import threshold

lab.reveal("stable-step", threshold(0) / threshold(7))

# %% [markdown] lang="fr"
# Le plus grand pas stable de **votre** fonction, trouvé par dichotomie, à côté de la loi 2 sin(π/(4τ+2)), soit environ
# π/(2τ) : deux fois plus de retard, deux fois moins de pas.

# %% [markdown] lang="en"
# The largest stable step of **your** function, found by bisection, beside the law 2 sin(π/(4τ+2)), some π/(2τ): twice
# the delay, half the step.

# %% name="thresholds"
figures.thresholds(stale_sgd, (0, 1, 2, 3, 7))

# %% [markdown] lang="fr"
# Et sur un vrai réseau (huit étages, non linéaire) ? Le même taux d’apprentissage, avec les retards comptés plus haut
# ([stale_weights.py](../../dlojz/pipeline/stale_weights.py)). PipeMare apporte deux correctifs : un taux réduit au
# début sur les étages en retard (T1), et une estimation des poids de la passe avant pour la passe arrière (T2).

# %% [markdown] lang="en"
# And on a real network (eight stages, not linear)? The same learning rate, with the delays counted above
# ([stale_weights.py](../../dlojz/pipeline/stale_weights.py)). PipeMare brings two remedies: a smaller rate at first on
# the stages that lag (T1), and an estimate of the forward's weights for the backward (T2).

# %% name="trainings"
figures.trainings(stages=8, learning_rate=2.0)

# %% [markdown] lang="fr"
# L’asynchrone supprime donc la bulle au prix de la convergence, et de la mémoire quand il garde des versions. À grande
# échelle, on lui préfère les pipelines synchrones, dont l’entraînement est exactement celui d’un processus seul.
#
# ## 10. DeepSpeed
#
# DeepSpeed exécute 1F1B (`PipelineModule`). Le cas du cours : AlexNet sur quatre GPU, en deux étages et deux répliques,
# avec huit micro-batches :
#
# ```
# deepspeed train.py --deepspeed_config=ds_config.json -p 2 --steps=200
# ```
#
# - `-p` est le nombre d’**étages** ; le reste des GPU fait des répliques (*Data Parallelism*) ;
# - `gradient_accumulation_steps` est le nombre de **micro-batches** : c’est lui qui remplit le pipeline ;
# - `train_batch_size` reste micro-batch × micro-batches × répliques ;
# - `partition_method` choisit le découpage : `parameters` (par défaut), `uniform`, ou `type:REGEX`, qui compte les
#   couches dont la classe correspond ;
# - avec `PipelineModule`, ZeRO s’arrête au niveau 1 : DeepSpeed refuse les niveaux 2 et 3, qui répartiraient des
#   gradients que le pipeline cumule d’un micro-batch à l’autre (c’est son choix : FSDP2, lui, l’accepte).
#
# ### Exercice 10 — la configuration de DeepSpeed
#
# Renvoyez trois choses pour un `RunConfig` : le nombre de processus à lancer, le nombre à donner à `-p`, et le
# dictionnaire du fichier JSON (tailles de batch et niveau de ZeRO, dans `zero_optimization`). Dans `config.layout` :
# `pp` étages, `dp` répliques, `micro_batch`, `micro_batches`, `global_batch` et `zero`.

# %% [markdown] lang="en"
# Asynchrony thus removes the bubble at the price of convergence, and of memory where versions are kept. At a large
# scale synchronous pipelines are preferred, whose training is exactly that of one process.
#
# ## 10. DeepSpeed
#
# DeepSpeed executes 1F1B (`PipelineModule`). The course's case: AlexNet on four GPUs, two stages and two replicas, with
# eight micro-batches:
#
# ```
# deepspeed train.py --deepspeed_config=ds_config.json -p 2 --steps=200
# ```
#
# - `-p` is the number of **stages**; the rest of the GPUs makes replicas (data parallelism);
# - `gradient_accumulation_steps` is the number of **micro-batches**: that is what fills the pipeline;
# - `train_batch_size` remains micro-batch × micro-batches × replicas;
# - `partition_method` chooses the cut: `parameters` (the default), `uniform`, or `type:REGEX`, which counts the layers
#   whose class matches;
# - with `PipelineModule` ZeRO ends at stage 1: DeepSpeed refuses stages 2 and 3, which would shard gradients that the
#   pipeline accumulates from one micro-batch to the next (a choice of DeepSpeed's: FSDP2 allows it).
#
# ### Exercise 10 — DeepSpeed's configuration
#
# Return three things for a `RunConfig`: the number of processes to start, the number to give to `-p`, and the
# dictionary of the JSON file (sizes of batches and ZeRO's stage, in `zero_optimization`). In `config.layout`: `pp`
# stages, `dp` replicas, `micro_batch`, `micro_batches`, `global_batch` and `zero`.


# %% name="pipeline-json"
def deepspeed_pipeline(config):
    layout = config.layout
    ### BEGIN SOLUTION
    settings = {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {"stage": layout.zero},
    }
    return layout.pp * layout.dp, layout.pp, settings
    ### END SOLUTION


lab.check("pipeline-json", deepspeed_pipeline)

# %%
# lab.hint("pipeline-json")

# %% [markdown] lang="fr"
# Le fichier que le paquet écrit pour le cas du cours. Et avec ZeRO-2 ? Demandez-le :

# %% [markdown] lang="en"
# The file that the package writes for the course's case. And with ZeRO-2? Ask for it:

# %% name="course-case"
from dlojz.base.errors import LabError
from dlojz.config.deepspeed_json import deepspeed_json

course = dlojz.RunConfig.of(model="alexnet", engine="deepspeed", pp=2, dp=2, micro_batch=32, micro_batches=8, steps=200)
print(json.dumps(deepspeed_json(course), indent=2))
print(course.layout.title, course.layout.world_size, course.layout.global_batch)
try:
    dlojz.RunConfig.of(model="alexnet", engine="deepspeed", pp=2, dp=2, zero=2)
except LabError as refused:
    print(refused)

# %% [markdown] lang="fr"
# Lançons ce cas, en petit : de petites images, des micro-batches de 2, trois pas, et quatre processus. **Avant de
# regarder** : qui envoie à qui, et combien de messages par pas ? Avec qui chaque rang fait-il l’*all-reduce* de ses
# gradients ?

# %% [markdown] lang="en"
# Let us run this case on a small scale: small images, micro-batches of 2, three steps, and four processes. **Before you
# look**: who sends to whom, and how many messages per step? With whom does each rank all-reduce its gradients?

# %% name="run-course-case" tags=["nbval-ignore-output"]
small = dlojz.run(course, image_size=64, micro_batch=2, steps=3, learning_rate=1e-4, partition="parameters")

# %% name="traffic"
figures.traffic(small)

# %% [markdown] lang="fr"
# Les rangs 0 et 2 forment un pipeline, 1 et 3 l’autre : huit activations dans un sens, huit gradients dans l’autre.
# Puis les rangs d’un même étage, 0 et 1, 2 et 3, font la moyenne de leurs gradients, une fois par pas. Comparez la
# taille des deux sortes de messages : c’est pourquoi un pipeline s’accommode d’un réseau plus lent.
#
# AlexNet en deux étages : ses 8 blocs sont très inégaux, et le découpage par paramètres met six blocs d’un côté, deux
# de l’autre. Est-ce le bon découpage pour la durée du pas ?

# %% [markdown] lang="en"
# Ranks 0 and 2 make one pipeline, 1 and 3 the other: eight activations one way, eight gradients the other. Then the
# ranks of one stage, 0 and 1, 2 and 3, average their gradients, once per step. Compare the sizes of the two sorts of
# messages: that is why a pipeline bears a slower network.
#
# AlexNet in two stages: its 8 blocks are very unequal, and the cut by parameters puts six blocks on one side, two on
# the other. Is that the right cut for the length of the step?

# %% name="alexnet"
from dlojz.pipeline.partition import exact
from dlojz.pipeline.partition_baselines import block_weights

alexnet = dlojz.RunConfig.of(model="alexnet", data="synthetic")
for by in ("parameters", "flops"):
    print(by, exact(block_weights(alexnet, by).weights, 2).bounds)

# %% [markdown] lang="fr"
# Les paramètres d’AlexNet sont dans ses couches denses, ses opérations dans les convolutions : ici, mémoire et temps
# veulent deux découpages différents.

# %% [markdown] lang="en"
# AlexNet's parameters are in its dense layers, its operations in the convolutions: here memory and time ask for two
# different cuts.

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Faites de chaque rang un étage (`--parallel 1f1b`) : il garde ses blocs, et `Schedule1F1B` exécute les micro-batches.
# Continuez dans votre `train.py`, ou partez de la solution du TP précédent : `dlojz labs script 05 un_autre_dossier` en
# écrit un, avec un `# TODO` à chaque endroit à compléter. Jugez-le par `dlojz labs judge 05 my_training/train.py`.
#
# À regarder : seul le dernier rang connaît la perte, et ensemble les rangs tiennent chaque paramètre une fois.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# model.blocks = model.blocks[rank * each : (rank + 1) * each]
# stage = PipelineStage(model, rank, size, device)
# schedule = Schedule1F1B(stage, args.accumulation, loss_fn=F.cross_entropy)
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Make a stage of each rank (`--parallel 1f1b`): it keeps its blocks, and `Schedule1F1B` runs the micro-batches. Go on
# in your `train.py`, or begin with the solution of the lab before: `dlojz labs script 05 another_folder` writes one,
# with a `# TODO` at each place to fill in. Judge it by `dlojz labs judge 05 my_training/train.py`.
#
# What to look for: only the last rank knows the loss, and together the ranks hold each parameter once.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# model.blocks = model.blocks[rank * each : (rank + 1) * each]
# stage = PipelineStage(model, rank, size, device)
# schedule = Schedule1F1B(stage, args.accumulation, loss_fn=F.cross_entropy)
# ```
#
# </details>

# %% [markdown] lang="fr"
# ## Bilan
#
# | | bulle (fraction) | gardés, rang 0 | prix |
# |--|--|--|--|
# | naïf | 1 − 1/p | 1 | un seul rang travaille |
# | GPipe | (p − 1)/(m + p − 1) | m | mémoire |
# | 1F1B | la même | min(p, m) | latence exposée |
# | interleaved | (p − 1)/(vm + p − 1) | p (1 + (p − 1)/(pv)) | (vp − 1)/(p − 1) fois plus de messages |
# | ZB-H1 | un tiers de la bulle de 1F1B, si F = I = W | p | passe arrière découpée |
# | asynchrone | 0 en régime établi | p | gradients en retard de τ |
#
# Le pipeline demande peu de communication : une frontière par micro-batch. C’est donc lui que l’on place **entre** les
# nœuds, quand le *Tensor Parallelism* (TP 06) reste dans le nœud. Il demande en revanche beaucoup de micro-batches,
# donc un grand batch. On le combine avec le *Data Parallelism* : c’est le parallélisme hybride.

# %% [markdown] lang="en"
# ## Summary
#
# | | bubble (fraction) | kept, rank 0 | price |
# |--|--|--|--|
# | naive | 1 − 1/p | 1 | one single rank works |
# | GPipe | (p − 1)/(m + p − 1) | m | memory |
# | 1F1B | the same | min(p, m) | exposed latency |
# | interleaved | (p − 1)/(vm + p − 1) | p (1 + (p − 1)/(pv)) | (vp − 1)/(p − 1) times as many messages |
# | ZB-H1 | a third of 1F1B's bubble, if F = I = W | p | backward split |
# | asynchronous | 0 in the steady state | p | gradients τ updates old |
#
# A pipeline asks for little communication: one boundary per micro-batch. So it is what one puts **between** nodes,
# while tensor parallelism (lab 06) stays within the node. But it asks for many micro-batches, and so for a large batch:
# it is therefore combined with data parallelism, as hybrid parallelism.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
