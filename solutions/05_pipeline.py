# %% [markdown] lang="fr"
# # TP 05 — Le parallélisme de pipeline
#
# Un modèle trop gros pour un GPU peut se couper **entre ses couches** : chaque rang en porte une tranche, un *étage*.
# Naïvement, un seul rang travaille à la fois. Le **parallélisme de pipeline** coupe aussi le batch, en *micro-batches*
# qui se suivent d’étage en étage. Reste la *bulle* : le temps d’attente des rangs. Vous écrirez des
# ordonnancements, à simuler, exécuter et chronométrer.
#
# À la fin, vous saurez :
#
# - calculer la durée d’un pas et sa bulle, et les retrouver au chronomètre ;
# - écrire 1F1B et l’exécuter sur de vrais rangs, sans interblocage ;
# - ordonnancer sous contrainte de mémoire, et couper un modèle en étages équilibrés ;
# - employer les pipelines de PyTorch et de DeepSpeed.
#
# Comptez deux heures. Parties facultatives en sus. Quatre rangs au plus, sans GPU.

# %% [markdown] lang="en"
# # Lab 05 — Pipeline parallelism
#
# A model that is too large for one GPU can be cut **between its layers**: each rank holds a slice of it, a *stage*.
# Done naively, this lets only one rank work at a time. **Pipeline parallelism** cuts the batch as well, into
# *micro-batches* that follow one another from stage to stage, like cars on an assembly line. What remains is the
# *bubble*: the time in which ranks wait. In this lab you write schedules, simulate them, then execute and time them.
#
# By the end you can:
#
# - compute the length of a step and its bubble, and find both again with a clock;
# - write 1F1B and execute it on real ranks, without deadlock;
# - schedule under a memory limit, and cut a model into balanced stages;
# - use the pipelines of PyTorch and of DeepSpeed.
#
# Allow two hours. The optional parts come on top. At most four ranks, without GPUs.

# %% name="setup"
import time
from functools import partial
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dlojz
from dlojz import labs
from dlojz.base.language import decimal, percent
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
# Voici la manière naïve, sur 4 étages, puis le pipeline de **GPipe** (Huang et al., 2019), avec 9 micro-batches. `F3`
# est la passe avant du micro-batch 3, `B3` sa passe arrière, deux fois plus longue. Chaque ligne est un rang ; en gris,
# les activations qu’il garde.

# %% [markdown] lang="en"
# ## 1. The bubble
#
# Here is the naive way, on 4 stages, then the pipeline of **GPipe** (Huang et al., 2019), with 9 micro-batches. `F3` is
# the forward pass of micro-batch 3, `B3` its backward pass, twice as long. Each line is a rank; in grey, the
# activations that it keeps.

# %%
figures.drawn("naive", 4, 2)

# %%
figures.drawn("gpipe", 4, 9)

# %% [markdown] lang="fr"
# Les blancs sont la bulle. « 25 % » ou « 33 % » ? On lit les deux, sous le même nom :
#
# - la **fraction** rapporte l’attente à tout le temps disponible, rangs × durée du pas (article de GPipe) ;
# - le **surcoût** la rapporte au travail (article de Megatron-LM).
#
# ### Exercice 1 — la bulle à la main
#
# `ranks` étages égaux (p), `micro_batches` micro-batches (m) ; par micro-batch, la passe avant d’un étage dure
# `forward` (t_f), sa passe arrière `backward` (t_b) ; les messages, rien. Renvoyez trois nombres pour GPipe : la
# durée d’un pas, la fraction de bulle, le surcoût de bulle.

# %% [markdown] lang="en"
# The blanks are the bubble. “25%” or “33%”? Both are published, under the same name:
#
# - the **fraction** compares the waiting with all the time there is, ranks × length of the step (GPipe's paper);
# - the **overhead** compares it with the work (Megatron-LM's paper).
#
# ### Exercise 1 — the bubble by hand
#
# `ranks` equal stages (p), `micro_batches` micro-batches (m); each stage spends `forward` (t_f) on the forward pass
# of a micro-batch, and `backward` (t_b) on its backward pass. Messages take no time. Return three numbers for GPipe:
# the length of a step, the bubble fraction, the bubble overhead.


# %% name="pipeline-bubble"
def pipeline_step(ranks, micro_batches, forward, backward):
    ### BEGIN SOLUTION
    bubble = (ranks - 1) * (forward + backward)
    work = micro_batches * (forward + backward)
    return work + bubble, bubble / (work + bubble), bubble / work
    ### END SOLUTION


lab.check("pipeline-bubble", pipeline_step)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez ; deux exécutions donnent le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("pipeline-bubble")

# %% [markdown] lang="fr"
# **Votre prédiction.** Un seul GPU ferait tout le travail en m·p·(t_f + t_b). Combien de fois plus vite va le pipeline
# de la figure (4 étages, 9 micro-batches) ? Vous le mesurerez dans la section 5.

# %% [markdown] lang="en"
# **Your prediction.** One GPU alone would do all the work in m·p·(t_f + t_b). How many times as fast is the pipeline of
# the figure, with its 4 stages and 9 micro-batches? You will measure it in section 5.

# %% name="predict-speedup" stub="value"
lab.predict(
    "speedup",
    ### BEGIN SOLUTION
    9 * 4 * (1 + 2) / pipeline_step(4, 9, 1, 2)[0],
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Voici vos formules, et ce que trouve le simulateur ([simulator.py](../../dlojz/pipeline/simulator.py)), pour GPipe et
# pour 1F1B, l’ordonnancement le plus répandu. Comparez-les.

# %% [markdown] lang="en"
# Here are your formulas, and what the simulator ([simulator.py](../../dlojz/pipeline/simulator.py)) finds, for GPipe
# and for 1F1B, the most widespread schedule. Compare the two.

# %% name="bubbles"
figures.bubbles(pipeline_step, ("gpipe", "1f1b"), ((4, 8), (4, 32), (8, 32)))

# %% [markdown] lang="fr"
# ## 2. 1F1B : la même bulle, moins de mémoire
#
# Oui : **1F1B a exactement la bulle de GPipe**, quoi qu’en disent des tutoriels. PipeDream (2019) l’a inventé, sans
# attente entre les pas ; **DAPPLE** (Fan et al., 2021) en a fait le pipeline synchrone de ce TP. Ce qu’il change, c’est
# la mémoire : une passe arrière rend les activations de sa passe avant ; 1F1B l’exécute donc dès que possible. Au rang
# r, d’abord assez de passes avant pour occuper l’attente du premier gradient ; ensuite, une passe arrière et une passe
# avant en alternance (*one forward, one backward*) ; à la fin, les passes arrière qui restent.
#
# ### Exercice 2 — l’ordre de 1F1B
#
# Renvoyez l’ordre du rang `rank`, une liste : `["F0", "F1", "B0", …]`. Il peut y avoir moins de micro-batches que de
# rangs. (Les messages écrivent aussi l’étage : `2F0` est la passe avant du micro-batch 0 à l’étage 2.)

# %% [markdown] lang="en"
# ## 2. 1F1B: the same bubble, less memory
#
# Yes: **1F1B has exactly GPipe's bubble**, whatever some tutorials say. PipeDream (2019) invented it without a wait
# between steps; **DAPPLE** (Fan et al., 2021) made it the synchronous pipeline of this lab. What it changes is memory:
# a backward frees the activations that its forward took, so 1F1B runs it as soon as possible. On rank r: first enough
# forwards to fill the wait for the first gradient; then a backward and a forward in turn (one forward, one backward);
# at the end, the backwards that are left.
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
# GPipe, et votre 1F1B dessous : même durée, même bulle ; comparez le gris, et les pics à droite.

# %% [markdown] lang="en"
# GPipe, and your 1F1B below it, on one axis. The same length, the same bubble; but compare the grey, and the peaks
# noted at the right.

# %% name="beside-gpipe"
figures.beside_gpipe(one_f_one_b, 4, 8)

# %% [markdown] lang="fr"
# ### Exercice 3 — ce qu’il faut garder
#
# Combien de micro-batches le rang `rank` garde-t-il au plus, pour `schedule` valant `"gpipe"` ou `"1f1b"` ?

# %% [markdown] lang="en"
# ### Exercise 3 — what is to be kept
#
# How many micro-batches does rank `rank` keep at most, for `schedule` either `"gpipe"` or `"1f1b"`?


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
# 1F1B est-il donc simplement meilleur ? Il a un prix, la **latence** : si les messages prennent du temps, chaque
# changement de sens l’expose. Durée du pas pour 4 rangs, 8 micro-batches, et un message qui dure un quart de passe
# avant :

# %% [markdown] lang="en"
# So is 1F1B simply better? It has a price: **latency**. As soon as messages take time, each change of direction exposes
# it. Length of the step for 4 ranks, 8 micro-batches, and a message that takes a quarter of a forward:

# %% name="latency"
for name in ("gpipe", "1f1b", "eager-1f1b"):
    print(name, decimal(simulate(build(name, 4, 8), Costs(latency=0.25)).makespan))

# %% [markdown] lang="fr"
# GPipe ajoute 2(p − 1) latences ; 1F1B, 2(p − 1)m/p + 2(p − 2) si p divise m. *Eager 1F1B* les masque de nouveau, en
# gardant presque deux fois plus de micro-batches.
#
# ## 3. Interblocages
#
# Chaque rang exécute sa liste **dans l’ordre**. Deux actions mal placées suffisent alors pour que deux rangs
# s’attendent à jamais. Un cluster ne montrerait qu’un calcul figé ; le simulateur montre le cycle :

# %% [markdown] lang="en"
# GPipe adds 2(p − 1) latencies; 1F1B, 2(p − 1)m/p + 2(p − 2) where p divides m. *Eager 1F1B* hides them again, keeping
# nearly twice as many micro-batches.
#
# ## 3. Deadlocks
#
# Each rank executes its list **in order**. Two misplaced actions are then enough for two ranks to wait for each other
# for ever. A cluster would only show a job that hangs; the simulator shows the cycle:

# %% name="deadlock"
print(figures.deadlock_of([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]], micro_batches=2))

# %% [markdown] lang="fr"
# Un autre interblocage vient des envois. Avec un envoi **bloquant**, un rang attend que l’autre reçoive (ainsi fait
# NCCL pour un message qui n’est pas posté des deux côtés). Voici 1F1B avec de tels envois :

# %% [markdown] lang="en"
# Another deadlock comes from the sends. With a **blocking** send a rank waits until the other receives (which is what
# NCCL does with a message that is not posted on both sides). Here is 1F1B, right though it is, with such sends:

# %% name="blocking"
one_f = [["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"], ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]]
for sends in ("buffered", "rendezvous", "paired"):
    print(sends, "→", figures.deadlock_of(one_f, micro_batches=4, sends=sends))

# %% [markdown] lang="fr"
# Les deux rangs envoient en même temps. Le bon remède est de poster l’envoi et la réception **ensemble**
# (`batch_isend_irecv`, `paired` ici). Cherchons-en un autre, avec le seul ordre des actions.
#
# ### Exercice 4 — réparer un interblocage
#
# Renvoyez les ordres des deux rangs, pour 4 micro-batches, qui aillent jusqu’au bout avec des envois bloquants
# (`rendezvous`), gardent au plus **3** micro-batches par rang, et durent moins que sans pipeline (24 unités de temps).

# %% [markdown] lang="en"
# Both ranks send at the same time. The right remedy is to post the send and the receive **together**
# (`batch_isend_irecv`, `paired` here). Let us look for another one, with nothing but the order of the actions.
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
# En haut, 1F1B avec envois et réceptions postés ensemble ; en bas, votre réparation, envois bloquants.

# %% [markdown] lang="en"
# Above, 1F1B with sends and receives posted together; below, your repair with blocking sends.

# %% name="repaired"
figures.repaired(unblocked, 2, 4)

# %% [markdown] lang="fr"
# ## 4. Sous contrainte de mémoire
#
# Et si un rang ne peut pas garder p micro-batches ? Un **ordonnanceur de liste** écrit l’ordre : un rang libre exécute,
# parmi ce qui est prêt, ce que la **priorité** met en tête. `list_schedule(ranks, micro_batches, priority=…, cap=…)` a
# deux réglages :
#
# - `priority` : `"forward-first"` ou `"backward-first"` ;
# - `cap` : le nombre de micro-batches qu’un rang peut garder ; un seul pour tous, un par rang, ou une fonction du rang.
#
# Sans `cap`, `"forward-first"` redonne GPipe. `"backward-first"`, avec un `cap` de p − r au rang r, redonne 1F1B.
#
# Avec 4 rangs et 8 micro-batches, 1F1B dure 33 unités et garde 4 micro-batches au rang 0.

# %% [markdown] lang="en"
# ## 4. Under a memory limit
#
# And if a rank cannot keep p micro-batches? A list scheduler writes the order: as soon as a rank is free, it runs the
# ready action that the **priority** puts first. `list_schedule(ranks, micro_batches, priority=…, cap=…)` has two knobs:
#
# - `priority`: `"forward-first"` or `"backward-first"`;
# - `cap`: the number of micro-batches that a rank may keep; one for all, one per rank, or a function of the rank.
#
# Without `cap`, `"forward-first"` gives GPipe. `"backward-first"`, with a `cap` of p − r on rank r, gives 1F1B.
#
# With 4 ranks and 8 micro-batches 1F1B takes 33 time units, and keeps 4 micro-batches on rank 0.

# %% [markdown] lang="fr"
# ### Exercice 5 — le plus court sous contrainte
#
# Renvoyez un ordonnancement qui garde au plus `limit` micro-batches par rang, aussi court que possible : le résultat de
# `list_schedule`, ou vos listes. Il est comparé à l’optimum **prouvé** par un solveur.

# %% [markdown] lang="en"
# ### Exercise 5 — the shortest under a limit
#
# Return a schedule that keeps at most `limit` micro-batches per rank, as short as possible: what `list_schedule` gives,
# or lists of your own. It is compared with the optimum **proven** by a solver.


# %% name="memory-cap"
def under_cap(ranks, micro_batches, limit):
    ### BEGIN SOLUTION
    return list_schedule(ranks, micro_batches, priority="backward-first", cap=limit)
    ### END SOLUTION


lab.check("memory-cap", under_cap)

# %%
# lab.hint("memory-cap")

# %% [markdown] lang="fr"
# Une place de moins coûte 18 % de temps ; rien de plus court n’existe
# ([shortest_schedule.py](../../dlojz/pipeline/shortest_schedule.py)). Au-delà de quatre, la mémoire ne fait
# rien gagner : la bulle vient des dépendances.

# %% [markdown] lang="en"
# One slot fewer costs 18% more time, and nothing shorter exists
# ([shortest_schedule.py](../../dlojz/pipeline/shortest_schedule.py)). Beyond four, memory buys nothing more:
# the bubble comes from the dependencies.

# %% name="capped"
figures.capped(under_cap, 4, 8, range(1, 7))

# %% [markdown] lang="fr"
# ## 5. Votre ordre, sur de vrais rangs
#
# À la frontière entre deux étages, deux messages par micro-batch : l’activation dans un sens, son gradient dans
# l’autre. Mais autograd ne traverse pas les processus : à vous de relier les deux moitiés de la chaîne.
#
# ### Exercice 6 — envoyer et recevoir
#
# Faites passer un micro-batch à travers l’étage de ce rang, `stage` : passe avant au-dessus de `yield`, passe arrière
# au-dessous. `yield` suspend votre fonction, qui garde ses variables, jusqu’à la passe arrière. Les gradients restent
# dans les paramètres ; ne renvoyez rien.
#
# - `x` est le micro-batch sur le rang 0, `None` ailleurs ; `shape` et `dtype` décrivent ce qui passe entre deux
#   étages ;
# - `loss_of(y)` donne la perte, sur le dernier rang ;
# - `send(tenseur, rang)` envoie ; `dist.recv(tenseur, rang)` remplit un tenseur déjà alloué ;
# - `tenseur.backward(g)` part d’un gradient reçu, `g`, plutôt que d’une perte.
#
# Écrivez-le pour un nombre quelconque de rangs : celui du milieu reçoit et envoie dans les deux sens.

# %% [markdown] lang="en"
# ## 5. Your order, on real ranks
#
# Let us move on to real processes. Two messages per micro-batch cross the boundary between two stages: the activation
# one way, its gradient the other. But autograd does not cross processes: it is up to you to join the two halves of the
# chain.
#
# ### Exercise 6 — send and receive
#
# Run one micro-batch through this rank's `stage`: the forward above `yield`, the backward below. `yield` suspends your
# function, which keeps its variables, until it is the backward's turn. The gradients stay in the parameters; nothing is
# to be returned.
#
# - `x` is the micro-batch on rank 0, `None` elsewhere; `shape` and `dtype` are those of what passes between two stages;
# - `loss_of(y)` gives the loss, on the last rank;
# - `send(tensor, rank)` sends; `dist.recv(tensor, rank)` fills a tensor that is allocated already;
# - `tensor.backward(g)` starts from a gradient that was received, `g`, rather than from a loss.
#
# Write it for any number of ranks: one in the middle receives and sends in both directions.


# %% name="stage-boundary"
def run_stage(stage, x, loss_of, shape, dtype, send):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    ### BEGIN SOLUTION
    if rank > 0:
        x = torch.empty(shape, dtype=dtype)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank < last:
        send(y.detach(), rank + 1)
    ### END SOLUTION
    yield  # the backward comes when its turn has come // la passe arrière vient quand c’est son tour
    ### BEGIN SOLUTION
    if rank == last:
        loss_of(y).backward()
    else:
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
    if rank > 0:
        send(x.grad, rank - 1)
    ### END SOLUTION


lab.check("stage-boundary", run_stage)

# %%
# lab.hint("stage-boundary")

# %% [markdown] lang="fr"
# `F3` démarre votre fonction pour le micro-batch 3, jusqu’à son `yield` ; `B3` la mène à son terme. Les fonctions
# suspendues sont donc les micro-batches que le rang garde. Les envois ne bloquent pas (`isend`), sinon 1F1B se figerait
# (section 3) : on les attend à la fin du pas.

# %% [markdown] lang="en"
# `F3` starts your function for micro-batch 3, up to its `yield`; `B3` runs it to its end. So the suspended functions
# are the micro-batches that the rank keeps. The sends do not block (`isend`), otherwise 1F1B would hang (section 3):
# they are waited for at the end of the step.


# %% name="run-order"
def run_order(order, stage, inputs, loss_of, shape):
    started, sent = {}, []

    def send(tensor, to):
        sent.append((dist.isend(tensor, to), tensor))

    for action in order:
        number = int(action[1:])
        if action[0] == "F":
            loss = partial(loss_of, number)
            started[number] = run_stage(stage, inputs[number], loss, shape, torch.float32, send)
            next(started[number])
        else:
            next(started.pop(number), None)
    for work, _ in sent:
        work.wait()


# %% [markdown] lang="fr"
# Quatre rangs se gêneraient sur deux cœurs. Dormons donc à la place d’un GPU : un étage « calcule » 40 ms en passe
# avant, 80 ms en passe arrière, sans occuper de cœur. Messages, ordre et attentes sont vrais ; de deux pas, le plus
# court compte.
#
# **Votre prédiction.** Quelle fraction de bulle mesurera-t-on avec 4 étages et 16 micro-batches ?

# %% [markdown] lang="en"
# Four ranks would get in each other's way on two cores. So let us sleep in place of a GPU: a stage “computes” for 40 ms
# in forward, 80 ms in backward, without using a core. Messages, order and waits are real; of two steps, the shorter one
# counts.
#
# **Your prediction.** Which bubble fraction will be measured with 4 stages and 16 micro-batches?

# %% name="predict-bubble" stub="value"
lab.predict(
    "bubble-measured",
    ### BEGIN SOLUTION
    pipeline_step(4, 16, 0.04, 0.08)[1],
    ### END SOLUTION
)


# %% name="sleeping"
class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.04)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.08)
        return gradient


# %% name="four-ranks"
# %%ranks 4 --with run_order,run_stage,one_f_one_b,Sleeping,nn,time
layer, least_s = nn.Linear(8, 8), {}
for m in 2 * (9, 16):
    inputs = torch.randn(m, 2, 8)
    dist.barrier()
    start = time.perf_counter()
    run_order(one_f_one_b(rank, 4, m), lambda x: Sleeping.apply(layer(x)), inputs, lambda number, y: y.sum(), (2, 8))
    dist.barrier()
    least_s[m] = min(time.perf_counter() - start, least_s.get(m, 1e9))  # the least disturbed // la moins perturbée
step_s = least_s

# %% name="bubbles-measured" tags=["nbval-ignore-output"]
for m, seconds in ranks["step_s"][0].items():
    predicted, fraction, _ = pipeline_step(4, m, 0.04, 0.08)
    print(f"m = {m:2}: {decimal(predicted, 2)} s → {decimal(seconds, 2)} s,", end=" ")
    print("bubble // bulle", f"{percent(fraction)} → {percent(1 - m * 0.12 / seconds)}")

# %% name="reveal-bubble" tags=["nbval-ignore-output"]
lab.reveal("speedup", 9 * 4 * 0.12 / ranks["step_s"][0][9])
lab.reveal("bubble-measured", 1 - 16 * 0.12 / ranks["step_s"][0][16])

# %% [markdown] lang="fr"
# Prédit → mesuré. L’écart vient des messages et du réveil des processus, plus lent sur une machine occupée.

# %% [markdown] lang="en"
# Predicted → measured. The gap comes from the messages and from processes waking up, which is slower on a busy machine.

# %% [markdown] lang="fr"
# ## 6. Où couper ?
#
# Un pipeline avance au pas de son étage le plus chargé, le **goulot** : sans compter les messages, un pas dure Σ tᵢ +
# (m − 1) max tᵢ, où tᵢ compte les deux passes d’un micro-batch à un étage. La somme ne dépend pas du découpage :
# rendons le goulot aussi petit que possible.
#
# Essayer tous les découpages de CoAtNet-7 (60 blocs) en 8 étages serait trop long : C(59, 7), plus de 300 millions.
# Renversons la question : pour une limite donnée, combien d’étages faut-il ? Un parcours y répond ; une dichotomie sur
# la limite fait le reste.
#
# ### Exercice 7 — couper sans dépasser
#
# `weights` donne le poids de chaque bloc, `limit` ce qu’un étage peut peser. Renvoyez les **bornes** du découpage en le
# moins d’étages possible, de 0 au nombre de blocs : `[0, 2, 4]` est fait des blocs 0 et 1, puis 2 et 3. Aucun bloc ne
# pèse plus que la limite.

# %% [markdown] lang="en"
# ## 6. Where to cut?
#
# A pipeline advances at the pace of its heaviest stage, the **bottleneck**: messages aside, a step takes Σ tᵢ + (m − 1)
# max tᵢ, where tᵢ counts both passes of a micro-batch on one stage. The sum does not depend on the **partition**, the
# cut into stages, so the bottleneck must be made as small as possible.
#
# Trying all cuts of CoAtNet-7 (60 blocks) into 8 stages would take too long: C(59, 7), more than 300 million. Let us
# turn the question round: for a given limit, how many stages does it take? One pass answers that; a bisection over the
# limit does the rest.
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
# CoAtNet-7 en quatre étages, par nombre de **paramètres** : votre découpage, ceux de DeepSpeed et de torchgpipe, et à
# nombre égal de blocs.

# %% [markdown] lang="en"
# CoAtNet-7 in four stages, by number of **parameters**: your cut, then those of DeepSpeed, of torchgpipe, and of equal
# numbers of blocks.

# %% name="cuts"
coatnet = dlojz.RunConfig.of(model="coatnet_7", data="synthetic")
figures.cuts(first_fit, coatnet, stages=4)

# %% [markdown] lang="fr"
# Un nombre égal de blocs charge un étage d’un tiers de trop. Mais des étages égaux en paramètres ne le sont pas en
# calcul. Les mêmes découpages, par **opérations** :

# %% [markdown] lang="en"
# Equal numbers of blocks load one stage by a third too much. But stages equal in parameters are not equal in
# computation. The same cuts, by **operations**:

# %% name="cuts-by-flops"
figures.cuts(first_fit, coatnet, stages=4, by="flops")

# %% [markdown] lang="fr"
# Ici, un nombre égal ralentit le pipeline d’un quart. Pour la mémoire, on pèse les paramètres ; pour la durée du pas,
# le temps. Les premiers étages gardent plus de micro-batches : quand la mémoire manque, on les charge moins.
#
# ## 7. De vraies secondes
#
# Deux étages de quatre couches denses, 8 micro-batches de 192 lignes. D’abord, votre 1F1B donne-t-il les gradients d’un
# processus seul ?

# %% [markdown] lang="en"
# Here equal numbers of blocks slow the pipeline down by a quarter. For memory one weighs parameters; for the length of
# the step, time. The first stages keep more micro-batches: where memory is short, they are loaded less.
#
# ## 7. Real seconds
#
# Two stages of four dense layers, 8 micro-batches of 192 rows. First, does your 1F1B give the gradients of one process?


# %% name="stages"
def make_stages():
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(384, 384), nn.GELU()) for _ in range(8)]
    return [nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])]


def make_batch():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 192, 384, generator=generator) for _ in range(2)]


def train_alone(stages, inputs, targets):
    for x, target in zip(inputs, targets, strict=True):
        (F.mse_loss(stages[1](stages[0](x)), target) / 8).backward()


# %% name="same-gradients"
# %%ranks 2 --with make_stages,make_batch,train_alone,run_order,run_stage,one_f_one_b,F
from dlojz.base.language import yes_no

inputs, targets = make_batch()
stages, stage = make_stages(), make_stages()[rank]
train_alone(stages, inputs, targets)


def loss_of(number, y):
    return F.mse_loss(y, targets[number]) / 8


def equal():
    pairs = zip(stage.parameters(), stages[rank].parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)


run_order(one_f_one_b(rank, 2, 8), stage, inputs, loss_of, (192, 384))
print("1F1B = one process: // 1F1B = un processus :", yes_no(equal()))

# %% [markdown] lang="fr"
# Durées d’un étage pour un micro-batch, sur les deux rangs à la fois, puis sur le rang 0 seul ; et d’un message.

# %% [markdown] lang="en"
# Then the times of a stage, measured with one micro-batch, on both ranks at once, then on rank 0 alone; and of a
# message.

# %% name="time-a-stage" tags=["nbval-ignore-output"]
# %%ranks 2 --with make_stages,time,mean
from dlojz.base.language import decimal

block = make_stages()[rank]


def stage_s():
    measured = []
    for _ in range(30):
        x = torch.randn(192, 384, requires_grad=True)
        start = time.perf_counter()
        y = block(x)
        middle = time.perf_counter()
        y.sum().backward()
        measured.append((middle - start, time.perf_counter() - middle))
    return [mean(times) for times in zip(*measured, strict=True)]  # what adds up // ce qui s’additionne


dist.barrier()
forward_s, backward_s = stage_s()
dist.barrier()
alone_s = sum(stage_s()) if rank == 0 else 0.0
dist.barrier()
start, x = time.perf_counter(), torch.zeros(192, 384)
for number in range(40):  # there and back // aller et retour
    dist.send(x, 1 - rank) if number % 2 == rank else dist.recv(x, 1 - rank)
message_s = (time.perf_counter() - start) / 40
print("forward, backward, alone, message, ms: // passe avant, passe arrière, seul, message (ms) :", end=" ")
print(*(decimal(1e3 * one_s, 2) for one_s in (forward_s, backward_s, alone_s, message_s)))

# %% [markdown] lang="fr"
# **Vos prédictions**, d’après ces durées (`ranks["forward_s"]`, `ranks["backward_s"]`, une par rang), la formule de la
# section 6 et les latences de la section 2 (`ranks["message_s"][0]`) : combien de secondes dure un pas de 1F1B ?
# Combien de fois plus vite va-t-il qu’un processus seul, qui calcule les deux étages, chacun en `ranks["alone_s"][0]` ?

# %% [markdown] lang="en"
# **Your predictions**, from these times (`ranks["forward_s"]`, `ranks["backward_s"]`, one per rank), section 6's
# formula and section 2's latencies (`ranks["message_s"][0]`): how many seconds does a step of 1F1B take? How many times
# as fast is it as one process, which computes both stages, each in `ranks["alone_s"][0]`?

# %% name="predict-step-seconds" stub="value" tags=["nbval-ignore-output"]
### BEGIN SOLUTION
one_f_one_b_s = sum(ranks["forward_s"] + ranks["backward_s"]) + 7 * max(
    f + b for f, b in zip(ranks["forward_s"], ranks["backward_s"], strict=True)
)
one_f_one_b_s += 8 * ranks["message_s"][0]
### END SOLUTION
lab.predict(
    "step-seconds",
    ### BEGIN SOLUTION
    one_f_one_b_s,
    ### END SOLUTION
)

# %% name="predict-real-speedup" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "real-speedup",
    ### BEGIN SOLUTION
    8 * 2 * ranks["alone_s"][0] / one_f_one_b_s,
    ### END SOLUTION
)

# %% name="race"
# %%ranks 2 --with make_stages,time
seconds = {"alone": [], "1f1b": []}
for _ in range(5):
    for name, times_s in seconds.items():  # in turns: the machine is noisy // à tour de rôle : la machine est bruyante
        dist.barrier()
        start = time.perf_counter()
        if name == "1f1b":
            run_order(one_f_one_b(rank, 2, 8), stage, inputs, loss_of, (192, 384))
        elif rank == 0:
            train_alone(stages, inputs, targets)
        dist.barrier()
        times_s.append(time.perf_counter() - start)

# %% name="reveal-seconds" tags=["nbval-ignore-output"]
alone, piped = (ranks["seconds"][0][name] for name in ("alone", "1f1b"))
lab.reveal("step-seconds", median(piped))
lab.reveal("real-speedup", median(alone_s / piped_s for alone_s, piped_s in zip(alone, piped, strict=True)))

# %% [markdown] lang="fr"
# **Expliquez** l’écart avec le 1,78 que donnerait la bulle seule. <details><summary>Réponse</summary>
#
# Deux rangs qui calculent à la fois vont chacun moins vite, et 1F1B expose huit latences : votre prédiction en tient
# compte. Ce qui lui manque encore, ce sont les attentes : chaque rang varie d’une action à l’autre, et un pas attend
# chaque fois le plus lent.
#
# </details>

# %% [markdown] lang="en"
# **Explain** the gap to the 1.78 that the bubble alone would give. <details><summary>Answer</summary>
#
# Two ranks that compute at once are each slower, and 1F1B exposes eight latencies: your prediction holds both. What it
# still lacks are the waits: each rank varies from one action to the next, and a step waits each time for the slower
# one.
#
# </details>

# %% [markdown] lang="fr"
# ### La même chose avec PyTorch
#
# `PipelineStage` envoie et reçoit, `Schedule1F1B` suit l’ordre et coupe lui-même le batch :

# %% [markdown] lang="en"
# ### The same with PyTorch
#
# `PipelineStage` sends and receives, `Schedule1F1B` follows the order, and cuts the batch itself:

# %% name="torch-schedule"
# %%ranks 2 --with make_stages
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

stage = make_stages()[rank]
pipeline_stage = PipelineStage(stage, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(pipeline_stage, n_microbatches=8, loss_fn=F.mse_loss)
if rank == 0:
    schedule.step(inputs.flatten(0, 1))
else:
    losses = []
    schedule.step(target=targets.flatten(0, 1), losses=losses)
stages = make_stages()
train_alone(stages, inputs, targets)
print("torch = one process: // torch = un processus :", yes_no(equal()))

# %% [markdown] lang="fr"
# ### Et la mémoire ?
#
# Un petit Vision Transformer, sur deux rangs : 8 micro-batches de 16 images, avec GPipe, puis avec 1F1B. Ce qui passe à
# la frontière :

# %% [markdown] lang="en"
# ### And the memory?
#
# A small Vision Transformer, on two ranks: 8 micro-batches of 16 images, with GPipe first, then with 1F1B. What passes
# at the boundary:

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
# **Vos prédictions.** Combien d’octets le rang 0 envoie-t-il par pas à l’étage suivant ? Et combien de fois plus
# d’octets d’activations garde-t-il avec GPipe qu’avec 1F1B ?

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
# La mémoire mesurée, divisée par le nombre de micro-batches que prévoit votre fonction : le quotient est le même pour
# les deux, à un message près.

# %% [markdown] lang="en"
# The memory measured, divided by the number of micro-batches that your function foresees: the quotient is the same
# for both schedules, give or take a message.

# %% name="memory" tags=["nbval-ignore-output"]
figures.memory(kept, [gpipe, one_f_one_b_run])

# %% [markdown] lang="fr"
# En haut, la simulation de 1F1B avec les durées moyennes mesurées ; dessous, la mesure.

# %% [markdown] lang="en"
# Above, the simulation of 1F1B with the mean times measured; below, the measurement.

# %% name="laid-over-1f1b" tags=["nbval-ignore-output"]
figures.laid_over(one_f_one_b_run)

# %% [markdown] lang="fr"
# ## 8. Au-delà de 1F1B
#
# La bulle vient de ce que l’étage précédent attend le gradient **de l’entrée**. Celui **des poids**, seul l’optimiseur
# l’attend. *Zero bubble* (Qi et al., 2024) coupe donc la passe arrière en deux : `I`, pour l’entrée, aussitôt que
# possible ; `W`, pour les poids, dans les creux.
#
# ### Exercice 8 — votre ordonnancement
#
# Pour 2 rangs et 4 micro-batches, 1F1B dure 15 unités (F = I = W = 1). Renvoyez deux ordres avec `F`, `I` et `W` qui
# n’en durent que **13**, en gardant au plus 2 micro-batches par rang. C’est la fin de son `W` qui rend un micro-batch.

# %% [markdown] lang="en"
# ## 8. Beyond 1F1B
#
# The bubble comes from the stage before waiting for the gradient **of the input**. For that **of the weights** only the
# optimizer waits. *Zero bubble* (Qi et al., 2024) therefore cuts the backward in two: `I`, for the input, as soon as
# possible; `W`, for the weights, in the gaps.
#
# ### Exercise 8 — your own schedule
#
# For 2 ranks and 4 micro-batches 1F1B takes 15 time units (F = I = W = 1). Return two orders with `F`, `I` and `W` that
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
# Exécutons-le. `csv` est votre ordre, une ligne par rang (1F1B tant que l’exercice n’est pas fait). Le *runtime* du
# paquet ([runtime.py](../../dlojz/pipeline/runtime.py)) sait couper une passe arrière en deux :

# %% [markdown] lang="en"
# Let us execute it. `csv` is your order, one line per rank (1F1B until the exercise is done). The package's runtime
# ([runtime.py](../../dlojz/pipeline/runtime.py)) can cut a backward in two:

# %% name="csv"
csv = figures.csv_of(without_bubble, 2, 4)
print(csv)

# %% name="execute"
# %%ranks 2 --with csv,make_stages,make_batch,train_alone,F
from dlojz.base.language import yes_no
from dlojz.pipeline.exchange_formats import from_csv
from dlojz.pipeline.runtime import PipelineRuntime, boundaries_of

inputs, targets = make_batch()
parts = inputs.reshape(4, 384, 384), targets.reshape(4, 384, 384)
stages = make_stages()
runtime = PipelineRuntime(from_csv(csv), {(0, rank): stages[rank]}, boundaries_of(stages, parts[0][0]), F.mse_loss)
runtime.step(*parts)
right = make_stages()
train_alone(right, inputs, targets)
pairs = zip(stages[rank].parameters(), right[rank].parameters(), strict=True)
same = all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)
print("zero bubble = one process: // zero bubble = un processus :", yes_no(same))

# %% [markdown] lang="fr"
# ### Facultatif : la galerie
#
# Deux idées : **déplacer** du travail dans la bulle, et **placer** plusieurs morceaux du modèle sur un rang : la bulle
# rétrécit.
#
# - *interleaved* (Megatron-LM) : v morceaux par rang, en boucle ; bulle divisée par v ;
# - *ZB-V* : deux morceaux en V, le rang 0 a le premier et le dernier étage ;
# - *Chimera*, *DualPipe* : deux pipelines en sens contraires ; chaque étage existe deux fois ;
# - *TeraPipe* : coupe aussi les séquences ; *BPipe* : confie ses activations à un rang moins chargé.
#
# Quatre rangs, 8 micro-batches, dont chacun occupe un rang pendant 1 + 1 + 1 (F, I, W). La durée (*makespan*) va du
# premier départ à la dernière fin ; la portée (*span*), la plus longue durée d’un rang entre **son** départ et **sa**
# fin, ne compte que si l’optimiseur n’attend pas tous les rangs. Dessous, les tranches de même durée de TeraPipe, pour
# 8 192 tokens : l’attention causale rend les dernières plus coûteuses.

# %% [markdown] lang="en"
# ### Optional: the gallery
#
# Two ideas: **move** work into the bubble, and **place** several pieces of the model on one rank, which makes the
# bubble smaller.
#
# - *interleaved* (Megatron-LM): v pieces per rank, going round; the bubble is divided by v;
# - *ZB-V*: two pieces in a V, rank 0 has the first and the last stage;
# - *Chimera*, *DualPipe*: two pipelines in opposite directions; each stage exists twice;
# - *TeraPipe*: cuts the sequences too; *BPipe*: leaves activations with a rank that has room.
#
# Four ranks, 8 micro-batches; a rank spends 1 + 1 + 1 (F, I, W) on each micro-batch. The makespan goes from the first
# start to the last end; the span is the longest time of a rank between **its** start and **its** end: it counts only
# where the optimizer does not wait for all ranks. Below, in tokens, TeraPipe's slices of equal time for 8,192 tokens:
# causal attention makes the last ones cost more.

# %% name="gallery"
figures.all_schedules(
    ("naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "chimera", "zb-h1", "zb-h2", "zb-v",
     "dualpipe", "dualpipe-v", "terapipe", "bpipe"),
    ranks=4,
    micro_batches=8,
)  # fmt: skip

# %% name="slices"
from dlojz.pipeline.validity import causal_slice_time, plan_slices

time_of = causal_slice_time(hidden=512, flops_per_s=1e14, overhead_s=1e-3, layers=8)
print("slices: // tranches :", plan_slices(8192, ranks=4, time=time_of, grid=128).lengths)

# %% [markdown] lang="fr"
# Choisissez-en un, changez durées et latence, ou modifiez l’ordre. Le panneau compte 1 par **morceau** : avec deux,
# ses chiffres doublent. Sans noyau, voyez la figure fixe. Il y en a aussi un jeu, en dix niveaux : l’ordonnancement que
# vous construisez est exécuté sur de vrais rangs. Ouvrez-le par `dlojz pipeline --play` sur votre machine, ou ici, dans
# une cellule ajoutée :
#
# ```python
# from dlojz.display.widgets.notebook_game import schedule_game; schedule_game()
# ```

# %% [markdown] lang="en"
# Choose one, change times and latency, or edit the order. The panel counts 1 per **piece**: with two pieces per rank
# its figures are twice those of the table. Where no kernel runs, see the static figure. There is a game of it, too, in
# ten levels: the schedule that you build is run on real ranks. Open it by `dlojz pipeline --play` on your own machine,
# or here, in a cell that you add:
#
# ```python
# from dlojz.display.widgets.notebook_game import schedule_game; schedule_game()
# ```

# %% name="pipeline-panel" tags=["nbval-ignore-output"]
from dlojz.display.widgets.pipeline_panel import pipeline_panel, still_panel

choice = {"schedule": "interleaved", "ranks": 4, "micro_batches": 8}
pipeline_panel(**choice)

# %% name="still-panel" tags=["nbval-ignore-output"]
still_panel(**choice)

# %% [markdown] lang="fr"
# ## 9. Facultatif : les pipelines asynchrones
#
# Et si l’on ne vidait jamais le pipeline ? **PipeDream** met les poids à jour après chaque passe arrière et continue :
# plus de bulle. Mais chaque gradient est alors celui d’anciens poids. Sur 4 étages, voici le retard τ de chacun (en
# mises à jour), et les versions des poids qu’il garde :
#
# - PipeDream garde (*weight stashing*) les poids de la passe avant pour la passe arrière ; la *vertical sync* prend la
#   même version sur tous les étages ;
# - **PipeDream-2BW** ne met à jour qu’une fois par batch : deux versions suffisent, et le retard est de 1 partout ;
# - **PipeMare** n’en garde qu’une : les passes avant et arrière voient des poids différents ;
# - **AMPNet** exécute ce qui arrive : son retard n’est pas fixe.

# %% [markdown] lang="en"
# ## 9. Optional: asynchronous pipelines
#
# And what if the pipeline were never emptied? **PipeDream** updates the weights after each backward and goes on: no
# more bubble. But other micro-batches have passed meanwhile: each is a **stale gradient**, of old weights. Here, on 4
# stages, are the delay τ of each (in updates), and the versions of the weights that it keeps:
#
# - PipeDream puts the weights of the forward aside for the backward (weight stashing); vertical sync takes the same
#   version on all stages;
# - **PipeDream-2BW** updates once per batch only: two versions are enough, and the delay is 1 everywhere;
# - **PipeMare** keeps only one: forward and backward see different weights;
# - **AMPNet** runs whatever arrives: its delay is not fixed.

# %% name="staleness"
figures.staleness(ranks=4, micro_batches=24)

# %% [markdown] lang="fr"
# Prenons la parabole w²/2, de gradient w.
#
# ### Exercice 9 — SGD en retard
#
# Renvoyez la liste w(0), …, w(`updates`) des poids, avec w(0) = 1 et w(t+1) = w(t) − `step` · w(t − `delay`). Tant
# qu’il n’y a pas eu `delay` mises à jour, le gradient est celui des premiers poids.

# %% [markdown] lang="en"
# Take the parabola w²/2, whose gradient is w.
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
# mises à jour de retard (premier de 8 étages de PipeDream), par combien le diviser ? Essayez `stale_sgd`.

# %% [markdown] lang="en"
# The same step converges, swings, then diverges. **Your prediction.** Without delay the step may be as large as 2.
# With 7 updates of delay (that of the first of PipeDream's 8 stages), by how much must it be divided? Try your
# `stale_sgd`.

# %% name="predict-step" stub="value"
lab.predict(
    "stable-step",
    ### BEGIN SOLUTION
    2 / (3.14159 / (2 * 7 + 1)),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Le plus grand pas stable de **votre** fonction, et la loi 2 sin(π/(4τ+2)), environ π/(2τ).

# %% [markdown] lang="en"
# The largest stable step of **your** function, beside the law 2 sin(π/(4τ+2)), about π/(2τ).

# %% name="reveal-step"
from dlojz.labs.lab05_pipeline.exercises_runs import largest_step

lab.reveal("stable-step", largest_step(stale_sgd, 0) / largest_step(stale_sgd, 7))
figures.thresholds(stale_sgd, (0, 1, 2, 3, 7))

# %% [markdown] lang="fr"
# Et un vrai réseau, de huit étages non linéaires ? Chaque étage lit ses poids d’il y a τ mises à jour :

# %% [markdown] lang="en"
# And a real network, of eight stages that are not linear? Each stage reads its weights of τ updates ago:


# %% name="train-stale"
def forward(x, weights):
    for weight in weights[:-1]:
        x = torch.tanh(x @ weight)
    return x @ weights[-1]


def train_stale(delays, rate, updates=300):
    generator = torch.Generator().manual_seed(0)
    teacher, start = torch.randn(2, len(delays), 8, 8, generator=generator) / 8**0.5
    history, losses = [list(start)], []
    for t in range(updates):
        x = torch.randn(16, 8, generator=generator)
        read = [history[max(t - delay, 0)][stage].detach().requires_grad_() for stage, delay in enumerate(delays)]
        loss = F.mse_loss(forward(x, read), forward(x, teacher))
        gradients = torch.autograd.grad(loss, read)
        history.append([w - rate * g for w, g in zip(history[-1], gradients, strict=True)])
        losses.append(loss.item())
    return losses


# %% name="trainings"
delays = {"GPipe, 1F1B": [0] * 8, "PipeDream-2BW": [1] * 8, "PipeDream": range(7, -1, -1)}
figures.losses({name: train_stale(counted, rate=2.0) for name, counted in delays.items()})

# %% [markdown] lang="fr"
# L’asynchrone supprime la bulle au prix de la convergence, ou de la mémoire. À grande échelle, on préfère les pipelines
# synchrones.
#
# ## 10. DeepSpeed
#
# DeepSpeed exécute 1F1B (`PipelineModule`). Voici AlexNet sur deux rangs. Un `LayerSpec` dit comment faire une couche :
# chaque rang ne construit que les siennes. `train_batch()` fait un pas entier.

# %% [markdown] lang="en"
# Asynchrony thus removes the bubble at the price of convergence, and of memory where versions are kept. At a large
# scale synchronous pipelines are preferred.
#
# ## 10. DeepSpeed
#
# DeepSpeed executes 1F1B (`PipelineModule`). Here is AlexNet on two ranks. A `LayerSpec` says how to make a layer: each
# rank builds only those of its stage. `train_batch()` does a whole step: eight micro-batches, then the update.

# %% name="deepspeed-alexnet"
# %%ranks 2 --with nn,F
from dlojz.labs.kit.sandbox import load_deepspeed, silenced

deepspeed = load_deepspeed()
deepspeed.utils.logger.setLevel("ERROR")
from deepspeed.pipe import LayerSpec, PipelineModule

sizes = [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1)]
layers = []
for number, size in enumerate(sizes):  # channels in and out, kernel, stride, padding // canaux, noyau, pas, bord
    layers += [LayerSpec(nn.Conv2d, *size), LayerSpec(nn.ReLU)]
    layers += [LayerSpec(nn.MaxPool2d, 3, 2)] * (number in (0, 1, 4))
layers.append(LayerSpec(nn.Flatten))
for before, after in ((256, 1024), (1024, 1024)):
    layers += [LayerSpec(nn.Linear, before, after), LayerSpec(nn.ReLU)]
layers.append(LayerSpec(nn.Linear, 1024, 10))

# %% name="deepspeed-train"
# %%ranks 2
from dlojz.base.language import decimal

torch.manual_seed(0)
settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
with silenced():  # it prints its partition // il affiche son découpage
    deepspeed.init_distributed(dist_init_required=False)
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=F.cross_entropy, partition_method="parameters")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings, dist_init_required=False
    )
images, labels = torch.randn(8, 4, 3, 64, 64), torch.randint(0, 10, (8, 4))
losses = [engine.train_batch(iter(zip(images, labels, strict=True))).item() for _ in range(4)]
print("layers // couches", range(*model.parts[rank : rank + 2]))
print("losses // pertes", *(decimal(loss, 2) for loss in losses))

# %% [markdown] lang="fr"
# Les paramètres d’AlexNet sont dans ses couches denses, ses opérations dans les convolutions : couper par paramètres
# égalise ici la mémoire, pas le temps.
#
# Le cas du cours : AlexNet sur quatre GPU, en deux étages et deux répliques, avec huit micro-batches :
#
# ```
# deepspeed train.py --deepspeed_config=ds_config.json -p 2 --steps=200
# ```
#
# - `-p` est le nombre d’**étages** ; le reste des GPU fait des répliques (*Data Parallelism*) ;
# - `gradient_accumulation_steps` est le nombre de **micro-batches** : c’est lui qui remplit le pipeline ;
# - `train_batch_size` reste micro-batch × micro-batches × répliques ;
# - avec `PipelineModule`, DeepSpeed refuse ZeRO-2 et ZeRO-3, qui répartiraient des gradients que le pipeline cumule
#   (FSDP2, lui, l’accepte).
#
# ### Exercice 10 — la configuration de DeepSpeed
#
# Renvoyez, pour un `RunConfig`, le nombre de processus à lancer, le nombre à donner à `-p`, et le dictionnaire du
# fichier JSON (tailles de batch et niveau de ZeRO, dans `zero_optimization`). Dans `config.layout` : `pp` étages, `dp`
# répliques, `micro_batch`, `micro_batches`, `global_batch` et `zero`.

# %% [markdown] lang="en"
# AlexNet's parameters are in its dense layers, its operations in the convolutions: here the cut by parameters balances
# memory, not time.
#
# The course's case: AlexNet on four GPUs, two stages and two replicas, with eight micro-batches:
#
# ```
# deepspeed train.py --deepspeed_config=ds_config.json -p 2 --steps=200
# ```
#
# - `-p` is the number of **stages**; the rest of the GPUs makes replicas (data parallelism);
# - `gradient_accumulation_steps` is the number of **micro-batches**: that is what fills the pipeline;
# - `train_batch_size` remains micro-batch × micro-batches × replicas;
# - with `PipelineModule` DeepSpeed refuses ZeRO-2 and ZeRO-3, which would shard gradients that the pipeline accumulates
#   from one micro-batch to the next (a choice of DeepSpeed's: FSDP2 allows it).
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
# Lançons ce cas, en petit. **Avant de regarder** : qui envoie à qui, et combien de messages par pas ? Avec qui chaque
# rang fait-il l’*all-reduce* de ses gradients ?

# %% [markdown] lang="en"
# Let us run this case on a small scale, on four processes. **Before you look**: who sends to whom, and how many
# messages per step? With whom does each rank all-reduce its gradients?

# %% name="run-course-case" tags=["nbval-ignore-output"]
course = dlojz.RunConfig.of(model="alexnet", engine="deepspeed", pp=2, dp=2, micro_batches=8, partition="parameters")
small = dlojz.run(course, image_size=64, micro_batch=2, steps=3, learning_rate=1e-4)

# %% name="traffic"
figures.traffic(small)

# %% [markdown] lang="fr"
# Les rangs 0 et 2 forment un pipeline, 1 et 3 l’autre : huit activations dans un sens, huit gradients dans l’autre.
# Puis les rangs d’un même étage font la moyenne de leurs gradients. Comparez la taille des messages : un pipeline
# s’accommode d’un réseau plus lent.
#
# ## Défi (facultatif) : le temps de 1F1B, moins de mémoire
#
# Quatre rangs, 8 micro-batches, F = I = W = 1. 1F1B dure 33 unités et garde au plus 4 + 3 + 2 + 1 = 10 micro-batches.
# Renvoyez un ordonnancement (une liste par rang, ou ce que donne un ordonnanceur) **pas plus long**, mais plus sobre
# : le score est la somme, sur les rangs, de ce que chacun garde au plus. Les envois ne bloquent pas. (`split=True`
# sépare I et W.) **Objectif : 9.**

# %% [markdown] lang="en"
# Ranks 0 and 2 make one pipeline, 1 and 3 the other: eight activations one way, eight gradients the other. Then the
# ranks of one stage average their gradients, once per step. Compare the sizes of the two sorts of messages: a pipeline
# bears a slower network.
#
# ## Challenge (optional): 1F1B's time, less memory
#
# Four ranks, 8 micro-batches, F = I = W = 1. 1F1B takes 33 time units, and its ranks keep at most 4 + 3 + 2 + 1 = 10
# micro-batches. Return a schedule (one list per rank, or what a scheduler gives) that takes **no longer** and keeps
# fewer: the score is the sum, over the ranks, of the most that each keeps. Sends do not block. (`list_schedule` takes
# `split=True` too: I and W in place of B.) **Target: 9.**


# %% name="frugal"
def frugal():
    ### BEGIN SOLUTION
    def forward_first(action, state):
        return "FIW".index(action.kind), action.micro_batch

    return list_schedule(4, 8, priority=forward_first, cap=[3, 3, 2, 1], split=True)
    ### END SOLUTION


lab.check("frugal", frugal)

# %%
# lab.hint("frugal")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Faites de chaque rang un étage (`--parallel 1f1b`) : il garde ses blocs, et `Schedule1F1B` exécute les micro-batches.
# Partez de la solution du TP précédent, que `dlojz labs script 05 un_autre_dossier` écrit avec des `# TODO` ; ou
# continuez dans votre `train.py`, où ceci change aussi, que ce script contient déjà :
#
# - `--parallel` accepte `1f1b` ; l’ensemble des rangs forme une seule réplique, et tous lisent les mêmes batches ;
# - ces batches sont entiers (`micro_batches = 1`) : c’est `Schedule1F1B` qui les coupe ;
# - `forward` saute patchs, norm et head là où ils valent `None` ;
# - la boucle appelle un pas de l’ordonnancement au lieu des deux passes, et le dernier rang affiche la perte.
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
# Make a stage of each rank (`--parallel 1f1b`): it keeps its blocks, and `Schedule1F1B` runs the micro-batches. Begin
# with the solution of the lab before, which `dlojz labs script 05 another_folder` writes with a `# TODO` at each place
# to fill in; or go on in your `train.py`, where this changes too, and that script has it already:
#
# - `--parallel` takes `1f1b`; all ranks together are one replica, and all read the same batches;
# - these batches are whole (`micro_batches = 1`): `Schedule1F1B` cuts them;
# - `forward` skips patches, norm and head where they are `None`;
# - the loop calls one step of the schedule in place of both passes, and the last rank prints the loss.
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

# %% name="judge-script"
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | | bulle (fraction) | gardés, rang 0 | prix |
# |--|--|--|--|
# | naïf | 1 − 1/p | 1 | un seul rang travaille |
# | GPipe | (p − 1)/(m + p − 1) | m | mémoire |
# | 1F1B | la même | min(p, m) | latence exposée |
# | interleaved | (p − 1)/(vm + p − 1) | p (1 + (p − 1)/(pv)) | (vp − 1)/(p − 1) fois plus de messages |
# | ZB-H1 | (p − 1)/(3m + p − 1), si F = I = W | p | passe arrière découpée |
# | asynchrone | 0 en régime établi | p | gradients en retard de τ |
#
# Le pipeline demande peu de communication : on le place donc **entre** les nœuds, quand le *Tensor Parallelism* (TP 06)
# reste dans le nœud. Mais il demande un grand batch : on le combine avec le *Data Parallelism*.

# %% [markdown] lang="en"
# ## Summary
#
# | | bubble (fraction) | kept, rank 0 | price |
# |--|--|--|--|
# | naive | 1 − 1/p | 1 | one single rank works |
# | GPipe | (p − 1)/(m + p − 1) | m | memory |
# | 1F1B | the same | min(p, m) | exposed latency |
# | interleaved | (p − 1)/(vm + p − 1) | p (1 + (p − 1)/(pv)) | (vp − 1)/(p − 1) times as many messages |
# | ZB-H1 | (p − 1)/(3m + p − 1), if F = I = W | p | backward split |
# | asynchronous | 0 in the steady state | p | gradients τ updates old |
#
# A pipeline asks for little communication, so one puts it **between** nodes, while tensor parallelism (lab 06) stays
# within the node. But it asks for a large batch: it is therefore combined with data parallelism.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
