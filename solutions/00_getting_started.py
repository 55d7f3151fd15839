# %% [markdown] lang="fr"
# # TP 00 — Prise en main
#
# Dans ce cours, on n’entraîne jamais un modèle à l’aveugle. Chaque expérience se joue en quatre temps :
#
# 1. **prédire** — vous écrivez d’abord un nombre ;
# 2. **exécuter** — un véritable entraînement tourne, sur plusieurs processus ;
# 3. **comparer** — la mesure est confrontée à la prédiction ;
# 4. **expliquer** — d’où vient l’écart, ou pourquoi il n’y en a pas ?
#
# À la fin de ce TP, vous saurez décrire un entraînement distribué, le lancer, l’arrêter, le retrouver, lire ce qu’il a
# mesuré, et dire si deux entraînements sont *le même*. Comptez une heure. Aucun GPU n’est nécessaire : le modèle est
# petit, les processus sont bien réels.

# %% [markdown] lang="en"
# # Lab 00 — Getting started
#
# No model is ever trained blindly in this course. Every experiment has four beats:
#
# 1. **predict** — you write a figure down first;
# 2. **run** — a real training runs, on several processes;
# 3. **compare** — the measurement is set beside the prediction;
# 4. **explain** — where does the difference come from, or why is there none?
#
# By the end of this lab you can describe a distributed training, start it, stop it, find it again, read what it has
# measured, and tell whether two trainings are *the same*. Allow one hour. No GPU is needed: the model is small, the
# processes are real.

# %% name="setup"
import dlojz
from dlojz import labs, models
from dlojz.base.language import decimal
from dlojz.labs.lab01_big_models import figures

lab = labs.start("00")

# %% [markdown] lang="fr"
# ## Comment travailler dans ce notebook
#
# | appel | ce qu’il fait |
# |--|--|
# | `lab.check("…", fonction)` | juge votre fonction et vous dit quoi corriger |
# | `lab.hint("…")` | donne un indice, puis un second plus précis |
# | `lab.predict("…", nombre)` | prend note de votre prédiction |
# | `lab.reveal("…", mesure)` | pose la mesure sur votre prédiction |
# | `lab.progress()` | montre les exercices réussis |
#
# Ce que vous devez écrire est marqué `TODO`. Une vérification n’abîme jamais rien : votre fonction y tourne dans un
# processus à part, arrêté au bout de dix secondes (davantage sur une machine occupée).
#
# ## 1. La machine
#
# Avant tout, regardons où nous sommes : combien de cœurs, quelle mémoire, quelles bibliothèques, et si deux processus
# arrivent à se parler.

# %% [markdown] lang="en"
# ## How to work in this notebook
#
# | call | what it does |
# |--|--|
# | `lab.check("…", function)` | judges your function and tells you what to correct |
# | `lab.hint("…")` | gives a hint, then a second, more precise one |
# | `lab.predict("…", number)` | notes your prediction |
# | `lab.reveal("…", measurement)` | lays the measurement over your prediction |
# | `lab.progress()` | shows the exercises you have done |
#
# What you have to write is marked `TODO`. A check never breaks anything: your function runs in a separate process,
# which is stopped after ten seconds (later on a busy machine).
#
# ## 1. The machine
#
# First of all, let us see where we are: how many cores, how much memory, which libraries, and whether two processes
# manage to talk to each other.

# %% tags=["nbval-ignore-output"]
lab.environment()

# %% [markdown] lang="fr"
# ## 2. Décrire un entraînement
#
# Un entraînement entier tient dans un objet, la `RunConfig` : le modèle, les données, la précision, l’optimiseur, le
# nombre de pas, et la répartition (*layout*), c’est-à-dire la manière dont le modèle est posé sur les processus.
#
# Notre modèle est `coatnet_tiny`, un *CoAtNet* réduit qui garde tous les types de blocs du grand. Nos images sont 1 797
# chiffres manuscrits, fournis par scikit-learn : rien n’est téléchargé. `dp=2` demande deux **répliques** : deux
# processus (on appelle **rang** un processus, et son numéro), chacun avec une copie complète du modèle et sa propre
# part des données. C’est le *Data Parallelism* ; PyTorch le réalise avec **DDP** (*Distributed Data Parallel*).

# %% [markdown] lang="en"
# ## 2. Describing a training
#
# A whole training fits in one object, the `RunConfig`: model, data, precision, optimizer, number of steps, and the
# layout, that is how the model is laid on the processes.
#
# Our model is `coatnet_tiny`, a small *CoAtNet* that keeps every kind of block of the large one. Our images are 1,797
# handwritten digits that come with scikit-learn: nothing is downloaded. `dp=2` asks for two **replicas**: two
# processes (a process, and its number, is called a **rank**), each with a whole copy of the model and its own share of
# the data. This is data parallelism; PyTorch does it with **DDP** (Distributed Data Parallel).

# %% name="config" tags=["nbval-ignore-output"]
config = dlojz.RunConfig.of(model="coatnet_tiny", dp=2, micro_batch=16, steps=10)
config.in_use()

# %% [markdown] lang="fr"
# Tous les champs laissés de côté ont été complétés. Une configuration illégale, elle, ne peut pas exister : elle est
# refusée en une phrase, qui dit pourquoi et propose ce qui marcherait.

# %% [markdown] lang="en"
# Every field left out has been filled in. An illegal configuration, on the other hand, cannot exist: it is refused in
# one sentence, which says why and what would work.

# %%
try:
    dlojz.RunConfig.of(model="coatnet_tiny", dp=2, zero=1)
except ValueError as refusal:
    print(refusal)

# %% [markdown] lang="fr"
# ### Exercice 1 — la taille de batch globale
#
# À chaque pas, chacune des `dp` répliques lit `micro_batches` *micro-batches* de `micro_batch` échantillons, cumule
# leurs gradients, puis l’optimiseur avance une seule fois. Combien d’échantillons compte le batch global ?

# %% [markdown] lang="en"
# ### Exercise 1 — the global batch
#
# In each step, every one of the `dp` replicas reads `micro_batches` micro-batches of `micro_batch` samples and adds up
# their gradients; then the optimizer moves once. How many samples are in the global batch?


# %% name="global-batch"
def global_batch(micro_batch, micro_batches, dp):
    ### BEGIN SOLUTION
    return micro_batch * micro_batches * dp
    ### END SOLUTION


lab.check("global-batch", global_batch)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("global-batch")

# %% [markdown] lang="fr"
# ### Exercice 2 — combien de pas par époque ?
#
# Une époque parcourt le jeu de données une fois. Si les échantillons ne remplissent pas le dernier batch global,
# l’échantillonneur l’écarte : tous les pas portent ainsi sur un batch de même taille.

# %% [markdown] lang="en"
# ### Exercise 2 — how many steps per epoch?
#
# An epoch goes through the data set once. Where the samples do not fill the last global batch, the sampler drops it:
# so every step trains on a batch of the same size.


# %% name="steps-per-epoch"
def steps_per_epoch(num_samples, global_batch):
    ### BEGIN SOLUTION
    return num_samples // global_batch
    ### END SOLUTION


lab.check("steps-per-epoch", steps_per_epoch)

# %%
# lab.hint("steps-per-epoch")

# %% [markdown] lang="fr"
# ## 3. Prédire
#
# Après la passe arrière, chaque réplique détient les gradients de *ses* images. Pour que toutes les répliques restent
# identiques, il faut en faire la moyenne : c’est le rôle de l’*all-reduce*, une communication collective à laquelle
# chaque rang confie un tenseur, et d’où chacun repart avec la somme.
#
# Le mieux est de le voir. Une cellule qui commence par `%%ranks` ne s’exécute pas ici, mais sur deux processus qui
# attendent vos ordres : chacun y dispose de son numéro, `rank`, et de `dist`, le module `torch.distributed`. Ils
# mettent quelques secondes à démarrer.

# %% [markdown] lang="en"
# ## 3. Predict
#
# After the backward pass, each replica holds the gradients of *its own* images. For all replicas to stay the same, they
# must be averaged: that is what *all-reduce* is for, a collective communication to which each rank hands a tensor and
# from which each leaves with the sum.
#
# It is best seen. A cell that begins with `%%ranks` does not run here, but on two processes that wait for your
# orders: each has its number there, `rank`, and `dist`, the module `torch.distributed`. They take a few seconds to
# start.

# %% name="start-ranks" tags=["nbval-ignore-output"]
# %ranks start 2

# %% name="first-ranks"
# %%ranks
gradient = torch.tensor([1.0, 10.0, 100.0]) * (rank + 1)
before = gradient.clone()
dist.all_reduce(gradient)
before, gradient

# %% [markdown] lang="fr"
# Chaque rang avait ses propres valeurs ; les deux repartent avec la même somme, qu’il ne reste qu’à diviser par deux.
# Une variable des rangs se rapporte ici par son nom : `ranks["…"]` donne une valeur par rang.

# %% [markdown] lang="en"
# Each rank had its own values; both leave with the same sum, which then only needs to be divided by two to get the
# mean. A variable of the ranks is brought back by its name: `ranks["…"]` gives one value per rank.

# %%
[value.tolist() for value in ranks["gradient"]]

# %%
# %ranks stop

# %% [markdown] lang="fr"
# Voici le nombre de paramètres de notre modèle. Il s’entraîne en fp32, soit 4 octets par nombre.

# %% [markdown] lang="en"
# Here is the number of parameters of our model. It trains in fp32, that is 4 bytes per number.

# %%
parameters = models.describe(config.model, config.image_size, num_classes=config.num_classes).parameters
parameters

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien d’octets une réplique confie-t-elle à l’*all-reduce* en un pas ?

# %% [markdown] lang="en"
# **Your prediction.** How many bytes does a replica hand to all-reduce in one step?

# %% name="predict-gradient-bytes" stub="value"
lab.predict(
    "gradient-bytes",
    ### BEGIN SOLUTION
    4 * parameters,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# ## 4. Exécuter
#
# Deux processus démarrent, se trouvent, et s’entraînent ensemble. Le démarrage (chargement de PyTorch, connexion des
# rangs) prend plus de temps que les dix pas eux-mêmes : sur un supercalculateur aussi.

# %% [markdown] lang="en"
# ## 4. Run
#
# Two processes start, find each other, and train together. Starting up (loading PyTorch, connecting the ranks) takes
# longer than the ten steps themselves: on a supercomputer, too.

# %% name="run-ddp" tags=["nbval-ignore-output"]
run = dlojz.run(config)
run

# %% [markdown] lang="fr"
# L’objet `run` permet de suivre cette exécution : `run.state` donne son état, `run.losses` la perte de chaque pas
# terminé, `run.record` tout ce qui a été mesuré. Une exécution finit toujours dans l’un de ces états : *completed*
# (allée au bout), *oom* (mémoire insuffisante), *timeout* (limite de temps atteinte), *cancelled* (annulée), *failed*
# (échouée) ou *diverged* (la perte n’est plus un nombre).

# %% [markdown] lang="en"
# `run` is your handle on this run: `run.state` gives its state, `run.losses` the loss of every finished step,
# `run.record` all that was measured. A run always ends in one of these states: completed, oom (out of memory), timeout
# (time limit reached), cancelled, failed, or diverged (the loss is no longer a number).

# %%
run.state, len(run.losses), run.losses[-1] < run.losses[0]

# %% [markdown] lang="fr"
# La courbe ci-dessous montre la perte à chaque pas, moyennée sur les deux répliques. Un modèle à dix classes qui
# répondrait au hasard aurait une perte de ln 10 ≈ 2,3 ; le nôtre part un peu plus haut : pas encore entraîné, il penche
# déjà, à tort, pour certaines classes.

# %% [markdown] lang="en"
# The curve below shows the loss at each step, averaged over both replicas. A ten-class model that guesses at random
# would have a loss of ln 10 ≈ 2.3; ours starts a little higher: not trained yet, it already leans, wrongly, towards
# some classes.

# %%
figures.losses({run.config.title: run.losses})

# %% [markdown] lang="fr"
# ## 5. Comparer
#
# Pendant l’entraînement, une sonde a compté chaque communication. Confrontons la mesure à votre prédiction.

# %% [markdown] lang="en"
# ## 5. Compare
#
# During the training a probe has counted every communication. Let us lay the measurement over your prediction.

# %% name="reveal-gradient-bytes"
measured = run.record.footprint()
lab.reveal("gradient-bytes", measured.traffic("all_reduce"))

# %% [markdown] lang="fr"
# ### Exercice 3 — ce qui passe réellement sur le réseau
#
# Le *message* confié à l’*all-reduce* n’est pas ce qui circule. Dans l’algorithme en anneau, le message est découpé en
# `dp` parts. Un premier tour, le *reduce-scatter*, additionne : à chaque étape, un rang envoie **une part** à son
# voisin de droite, qui l’ajoute à la sienne ; au bout de `dp − 1` étapes, chaque rang détient une part entièrement
# sommée. Un second tour de `dp − 1` étapes, l’*all-gather*, distribue ces parts à tous.
#
# Combien d’octets **un rang envoie-t-il** en tout ?

# %% [markdown] lang="en"
# ### Exercise 3 — what really crosses the network
#
# The *message* handed to all-reduce is not what travels. In the ring algorithm the message is cut in `dp` shares. A
# first round, the reduce-scatter, adds: at each stage a rank sends **one share** to its right neighbour, which adds it
# to its own; after `dp − 1` stages each rank holds one share, fully summed. A second round of `dp − 1` stages, the
# all-gather, brings these shares to everyone.
#
# How many bytes does **one rank send** in all?


# %% name="ring-bytes"
def ring_sent_bytes(message_bytes, dp):
    ### BEGIN SOLUTION
    share_bytes = message_bytes / dp
    return 2 * (dp - 1) * share_bytes
    ### END SOLUTION


lab.check("ring-bytes", ring_sent_bytes)

# %%
# lab.hint("ring-bytes")

# %% [markdown] lang="fr"
# Le paquet connaît cette formule. Pour chaque collective de notre entraînement : le nombre d’appels par pas, les octets
# du message, et ce qu’un rang envoie. L’*all-reduce* est appelé plusieurs fois par pas, parce que DDP regroupe les
# gradients en paquets (*buckets* : le premier de 1 Mio, pour partir tôt, les suivants de 25 Mio) et envoie chacun dès
# qu’il est plein, pendant que la passe arrière continue.

# %% [markdown] lang="en"
# The package knows this formula. For each collective of our training: the calls per step, the bytes of the message, and
# what one rank sends. All-reduce is called several times per step, because DDP groups the gradients in buckets (a first
# one of 1 MiB, which leaves early, then of 25 MiB) and sends each as soon as it is full, while the backward pass goes
# on.

# %%
for traffic in measured.communication:
    if traffic.group == "dp":
        print(traffic.collective, traffic.count, decimal(traffic.message_bytes, 0), decimal(traffic.sent_bytes, 0))

# %% [markdown] lang="fr"
# ## 6. Retrouver
#
# Chaque exécution a son dossier : la configuration, les événements de chaque rang (écrits pas à pas, pour qu’une
# exécution interrompue dise encore jusqu’où elle est allée), les journaux, et le bilan (*record*), écrit à la fin.

# %% [markdown] lang="en"
# ## 6. Find again
#
# Every run has its folder: the configuration, the events of each rank (written step by step, so that a run cut short
# still tells how far it got), the logs, and the record, written at the end.

# %%
[name for name in ("config.json", "events", "logs", "record.json") if (run.folder / name).exists()]

# %% tags=["nbval-ignore-output"]
print(run.logs()[-600:])

# %% [markdown] lang="fr"
# Le nom du dossier contient l’empreinte de la configuration. Redemander le même entraînement ne relance donc rien : on
# **retrouve** l’exécution, même après un redémarrage du noyau. « Exécuter tout » ne relance donc pas un entraînement
# terminé : seuls repartent ceux que vous redemandez (`again=True`) et ceux qui n’étaient pas allés au bout.

# %% [markdown] lang="en"
# The name of the folder contains the hash of the configuration. So asking for the same training again starts nothing:
# the run is **found again**, even after the kernel was restarted. “Run All” does not repeat a finished training: only
# those you ask for again (`again=True`), and those that did not come to their end, start anew.

# %%
same_run = dlojz.run(config, wait=False)
print(same_run == run)

# %% [markdown] lang="fr"
# Pour en faire une autre, dites-le : `again=True`. Mêmes poids initiaux, mêmes images dans le même ordre : la seconde
# exécution arrive-t-elle aux mêmes poids ? Le bilan garde une somme de contrôle des poids finals, bit à bit.

# %% [markdown] lang="en"
# To make another, say so: `again=True`. Same initial weights, same images in the same order: does the second run arrive
# at the same weights? The record keeps a checksum of the final weights, bit by bit.

# %% name="run-again" tags=["nbval-ignore-output"]
twin = dlojz.run(config, again=True)
twin

# %%
twin == run, twin.record.weights_sha256 == run.record.weights_sha256

# %% [markdown] lang="fr"
# ## 7. Une autre répartition
#
# En *Data Parallelism*, chaque réplique garde tout : les poids, les gradients, et les états de l’optimiseur. Pour
# AdamW, ces états sont deux moments par paramètre, en fp32 : les moyennes glissantes du gradient et de son carré.
#
# **ZeRO-2** (*Zero Redundancy Optimizer*, niveau 2) supprime une partie de cette redondance : chaque rang ne garde que
# sa part des états de l’optimiseur et des gradients. Le résultat de l’entraînement ne doit pas changer ; l’empreinte
# mémoire, si.
#
# **Vos prédictions**, en octets par rang, pour les états de l’optimiseur : en DDP, en ZeRO-2 sur 2 processus, puis en
# ZeRO-2 sur 64 processus.

# %% [markdown] lang="en"
# ## 7. Another layout
#
# With data parallelism each replica keeps everything: weights, gradients, and the optimizer states. For AdamW these are
# two moments per parameter, in fp32: the running means of the gradient and of its square.
#
# **ZeRO-2** (Zero Redundancy Optimizer, stage 2) removes part of that redundancy: each rank keeps only its share of the
# optimizer states and of the gradients. The result of the training must not change; the memory footprint does.
#
# **Your predictions**, in bytes per rank, for the optimizer states: under DDP, under ZeRO-2 on 2 processes, then under
# ZeRO-2 on 64 processes.

# %% name="predict-ddp-optimizer" stub="value"
lab.predict(
    "ddp-optimizer",
    ### BEGIN SOLUTION
    2 * 4 * parameters,
    ### END SOLUTION
)

# %% name="predict-zero-optimizer" stub="value"
lab.predict(
    "zero-2-optimizer",
    ### BEGIN SOLUTION
    2 * 4 * parameters / 2,
    ### END SOLUTION
)

# %% name="predict-zero-64" stub="value"
lab.predict(
    "zero-2-64",
    ### BEGIN SOLUTION
    2 * 4 * parameters / 64,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Deux exécutions de plus : ZeRO-2 avec DeepSpeed, et **un seul processus** qui cumule deux *micro-batches*. Les trois
# ont le même batch global de 32 images, découpé de la même façon.

# %% [markdown] lang="en"
# Two more runs: ZeRO-2 with DeepSpeed, and **one single process** that accumulates two micro-batches. All three have
# the same global batch of 32 images, cut in the same way.

# %% name="run-zero" tags=["nbval-ignore-output"]
zero = dlojz.run(config, zero=2, engine="deepspeed")
serial = dlojz.run(config, dp=1, micro_batches=2, engine="single")
zero

# %% name="reveal-optimizer"
lab.reveal("ddp-optimizer", run.record.footprint().memory.optimizer_bytes)
lab.reveal("zero-2-optimizer", zero.record.footprint().memory.optimizer_bytes)

# %% [markdown] lang="fr"
# Les quelques octets d’écart ont une cause précise : pour chaque tenseur, AdamW garde aussi un compteur de pas.
#
# Nous n’avons pas 64 processus sous la main, mais la prédiction n’en a pas besoin : `dlojz.predict` calcule l’empreinte
# d’un rang pour n’importe quelle répartition.

# %% [markdown] lang="en"
# The few bytes of difference have a precise cause: for each tensor, AdamW also keeps a counter of steps.
#
# We do not have 64 processes at hand, but predicting needs none: `dlojz.predict` computes the footprint of a rank for
# any layout.

# %% name="reveal-zero-64"
many = dlojz.RunConfig.of(model=config.model, dp=64, zero=2, engine="deepspeed")
lab.reveal("zero-2-64", dlojz.predict(many).memory.optimizer_bytes)

# %% [markdown] lang="fr"
# ### Exercice 4 — est-ce le même entraînement ?
#
# Paralléliser ne doit rien changer au calcul : aux arrondis près, les pertes doivent rester celles d’un seul processus.
# Écrivez la mesure qui le dit : le **plus grand écart relatif à la référence** sur tous les pas. Deux courbes de
# longueurs différentes ne sont pas comparables : votre fonction doit alors lever une erreur
# (attention : `zip`, seul, s’arrête sans rien dire à la fin de la plus courte).

# %% [markdown] lang="en"
# ### Exercise 4 — is it the same training?
#
# Running in parallel must not change the computation: up to rounding, the losses must stay those of one process. Write
# the measure that says so: the **largest gap, relative to the reference**, over all steps. Two curves of different
# lengths cannot be compared: your function must raise an error then (mind that `zip` alone
# stops at the end of the shorter one, and says nothing).


# %% name="same-training"
def largest_gap(losses, reference):
    ### BEGIN SOLUTION
    steps = zip(losses, reference, strict=True)
    return max(abs(loss - right) / abs(right) for loss, right in steps)
    ### END SOLUTION


lab.check("same-training", largest_gap)

# %%
# lab.hint("same-training")

# %% [markdown] lang="fr"
# `dlojz.compare` fait ce calcul, et tous les autres : une colonne par exécution, et dans chaque case « prédit | mesuré
# ».

# %% [markdown] lang="en"
# `dlojz.compare` does this computation, and all the others: one column per run, and in each cell “predicted |
# measured”.

# %% name="compare" tags=["nbval-ignore-output"]
comparison = dlojz.compare([serial, run, zero])
comparison

# %% [markdown] lang="fr"
# Une ligne s’écarte un peu, GFLOP : la prédiction compte trois passes avant (une pour l’aller, deux pour le retour),
# donc aussi le gradient des images, dont personne n’a besoin et que PyTorch ne calcule pas.
#
# La même chose en image : la mémoire par catégorie, les communications, le débit et les pertes ; le prédit en clair
# au-dessus du mesuré. Les trois courbes de perte se recouvrent.

# %% [markdown] lang="en"
# One line is slightly off, GFLOP: the prediction counts three forward passes (one for forward, two for backward), hence
# also the gradient of the images, which nobody needs and PyTorch does not compute.
#
# The same as a picture: memory by category, communication, throughput and losses; predicted, paler, above measured. The
# three loss curves coincide.

# %%
comparison.figure()

# %% [markdown] lang="fr"
# Deux questions, deux réponses calculées : les octets communiqués sont-ils exactement ceux qui étaient prédits ? Et les
# pertes des deux exécutions parallèles s’écartent-elles de celles du processus seul de moins d’un pour mille ?

# %% [markdown] lang="en"
# Two questions, two computed answers: are the bytes communicated exactly those predicted? And do the losses of the two
# parallel runs stay within one per mille of those of the single process?

# %%
from dlojz.labs.lab00_getting_started.figures import compared, replay_seen

compared(comparison)

# %% [markdown] lang="fr"
# ## 8. Annuler
#
# Un long entraînement lancé par erreur ? `wait=False` rend la main aussitôt, `watch()` montre où il en est sans bloquer
# le notebook, `cancel()` demande l’arrêt. Les pas déjà terminés restent mesurés ; aucun processus ne survit.

# %% [markdown] lang="en"
# ## 8. Cancel
#
# A long training, started by mistake? `wait=False` returns at once, `watch()` shows how far it is without blocking the
# notebook, `cancel()` asks it to stop. The steps already finished stay measured; no process survives.

# %% name="cancel" tags=["nbval-ignore-output"]
long_run = dlojz.run(config, steps=5000, wait=False)
long_run.watch()

# %% tags=["nbval-ignore-output"]
print(long_run.cancel())

# %%
long_run.wait(timeout_s=120).state

# %% [markdown] lang="fr"
# Toutes vos exécutions, la plus récente d’abord :

# %% [markdown] lang="en"
# All your runs, the newest first:

# %% tags=["nbval-ignore-output"]
for each in dlojz.runs():
    print(each.run_id, each.state, each.config.title)

# %% [markdown] lang="fr"
# ## 9. Ailleurs
#
# Avec `on="slurm"`, le même appel envoie un travail sur un calculateur. `dlojz.preview` dit d’abord ce qu’il
# demanderait, ce qu’il coûterait et, s’il y a lieu, pourquoi il serait refusé ; rien n’est envoyé.

# %% [markdown] lang="en"
# ## 9. Elsewhere
#
# With `on="slurm"` the same call sends a job to a cluster. `dlojz.preview` first says what it would ask for, what it
# would cost and, if so, why it would be refused; nothing is sent.

# %% name="preview"
big = dlojz.RunConfig.of(model="coatnet_7", dp=8, zero=3, micro_batch=8, device="cuda")
dlojz.preview(big, "jean_zay_v100_32", account="abc@v100", time_limit_s=3600)

# %% [markdown] lang="fr"
# Quatre rangs par nœud, un par GPU : il en faut donc deux. `on="slurm"` écrirait le script dans le dossier de
# l’exécution, `dlojz queue` montrerait la file d’attente, et le reste du notebook ne changerait pas.
#
# Pas d’allocation ? `on="replay"` montre les mesures d’une exécution réelle, livrées avec le TP. Elle est marquée comme
# rejouée partout où elle apparaît. Voici votre entraînement, tel qu’il s’est déroulé sur une autre machine :

# %% [markdown] lang="en"
# Four ranks per node, one per GPU: so two nodes are needed. `on="slurm"` would write the script into the run’s folder,
# `dlojz queue` would show the queue, and the rest of the notebook would not change.
#
# No allocation? `on="replay"` shows the measurements of a real run, shipped with the lab. It is marked as replayed
# wherever it appears. Here is your training, as it went on another machine:

# %% name="replay" tags=["nbval-ignore-output"]
replayed = dlojz.run(config, on="replay")
replayed

# %% [markdown] lang="fr"
# Les octets sont les mêmes, au dernier près ; les temps sont ceux de l’autre machine.

# %% [markdown] lang="en"
# The bytes are the same, to the last one; the times are the other machine’s.

# %%
replay_seen(run, replayed)

# %% [markdown] lang="fr"
# ## 10. Expliquer
#
# Répondez de tête, puis lisez ce que le paquet déduit de vos mesures :
#
# - Qu’est-ce que ZeRO-2 a réduit, et de combien ? Qu’est-ce qu’il n’a pas réduit ?
# - A-t-il fallu communiquer davantage que DDP ?
# - Sur cette machine, deux processus vont-ils deux fois plus vite qu’un seul ? Qui se partage les cœurs ?

# %% [markdown] lang="en"
# ## 10. Explain
#
# Answer in your head, then read what the package concludes from your measurements:
#
# - What has ZeRO-2 reduced, and by how much? What has it not reduced?
# - Did it have to communicate more than DDP?
# - On this machine, are two processes twice as fast as one? Who shares the cores?

# %% tags=["nbval-ignore-output"]
for finding in comparison.findings():
    print("-", finding)

# %% [markdown] lang="fr"
# - ZeRO-2 a réduit les gradients et les états de l’optimiseur ; ni les poids, ni les activations. Regardez la ligne du
#   pic : à cette taille, les activations et les tampons temporaires dominent, et DeepSpeed garde en plus, en fp32, une
#   « copie maître » de sa part des poids, celle que l’optimiseur met à jour.
# - En théorie, ZeRO-2 envoie autant que DDP : un *reduce-scatter* suivi d’un *all-gather* valent un *all-reduce*. Ici,
#   DeepSpeed fait un *all-reduce* complet, **puis** un *all-gather*.
# - Deux processus vont rarement deux fois plus vite : communiquer prend du temps, et ils se partagent la mémoire et les
#   caches de la machine. (Sur une machine occupée, le processus seul a pu être plus gêné qu’eux.)

# %% [markdown] lang="en"
# - ZeRO-2 has reduced the gradients and the optimizer states; neither the weights nor the activations. Look at the line
#   of the peak: at this size activations and temporary buffers dominate, and DeepSpeed keeps besides, in fp32, a
#   “master copy” of its share of the weights, the one that the optimizer updates.
# - In theory ZeRO-2 sends as much as DDP: a reduce-scatter and then an all-gather are worth one all-reduce. Here,
#   DeepSpeed does a whole all-reduce, **then** an all-gather.
# - Two processes are seldom twice as fast: communicating takes time, and they share the memory and the caches of the
#   machine. (On a busy machine, the single process may have been disturbed more than they were.)

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Les TP appellent `dlojz.run` ; votre projet a un `train.py`. Prenez-en un tout simple, de 41 lignes et sans dlojz,
# dans un terminal de JupyterLab. Lancez-le seul, puis faites-le mesurer de l’extérieur : le script ne change pas.
#
# ```
# dlojz labs script 00 my_training
# python my_training/train.py
# dlojz run my_training/train.py
# ```
#
# Chaque TP, jusqu’au TP 12, y ajoute une chose que vous écrivez ; la cellule qui suit (ou, dans un terminal,
# `dlojz labs judge 00 my_training/train.py`) juge ce que fait alors le script, sur de vrais processus.

# %% [markdown] lang="en"
# ## In your project: your own script
#
# The labs call `dlojz.run`; your project has a `train.py`. Take a plain one, of 41 lines and without dlojz, in a
# terminal of JupyterLab. Start it alone, then have it measured from outside: the script does not change.
#
# ```
# dlojz labs script 00 my_training
# python my_training/train.py
# dlojz run my_training/train.py
# ```
#
# Every lab up to lab 12 adds one thing to it, which you write; the next cell (or, in a terminal,
# `dlojz labs judge 00 my_training/train.py`) judges what the script then does, on real processes.

# %% name="judge-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# Vous savez maintenant décrire, prédire, exécuter et comparer. Le TP 01 ouvre le capot des gros modèles : de quoi
# sont-ils faits, et d’où viennent leurs milliards de paramètres ?

# %% [markdown] lang="en"
# ## Summary
#
# You can now describe, predict, run and compare. Lab 01 lifts the bonnet of big models: what are they made of, and
# where do their billions of parameters come from?

# %%
lab.progress()
