# %% [markdown] lang="fr"
# # TP 13 — Checkpoints et reprise
#
# Un entraînement long s’arrête plus d’une fois : limite de temps, panne, file d’attente. Il repart d’un *checkpoint*.
# Encore faut-il que rien n’y manque, que ZeRO ne l’ait pas figé sur un nombre de rangs, que son écriture ne coûte pas
# trop cher, et qu’un bit inversé ne passe pas inaperçu.
#
# À la fin, vous saurez :
#
# - enregistrer tout ce dont un entraînement a besoin pour reprendre à l’identique ;
# - relire sur trois rangs ce que deux rangs de FSDP2 ont écrit ;
# - prévoir la durée d’un enregistrement, la recouvrir, et choisir l’intervalle ;
# - reconnaître un format sûr, et un checkpoint endommagé.
#
# Comptez une heure et quart. Trois rangs suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 13 — Checkpoints and resuming
#
# A long training stops more than once: time limit, failure, queue. It goes on from a checkpoint. But nothing may be
# missing from it, ZeRO must not have tied it to one number of ranks, writing it must not cost too much, and a flipped
# bit must not go unnoticed.
#
# By the end you can:
#
# - save all that a training needs in order to resume exactly;
# - read on three ranks what two ranks of FSDP2 have written;
# - predict the time of a save, hide it, and choose the interval;
# - recognise a safe format, and a damaged checkpoint.
#
# Allow an hour and a quarter. Three ranks are enough, without GPUs.

# %% name="setup"
import hashlib
import json
import math
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

import dlojz
from dlojz import labs
from dlojz.base.language import decimal, percent, yes_no
from dlojz.labs.lab13_checkpoints import formats

lab = labs.start("13")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs
folder = tempfile.TemporaryDirectory(prefix="checkpoints-")
kept = Path(folder.name)

# %% [markdown] lang="fr"
# Tout ce que ce notebook écrit va dans le dossier `kept`, qui disparaîtra avec lui.
#
# ## 1. Ce dont le pas suivant a besoin
#
# Voici un entraînement ordinaire : un petit réseau avec du *dropout*, AdamW, un taux d’apprentissage qui décroît en
# cosinus, et un échantillonneur qui, comme `DistributedSampler`, tire l’ordre de chaque époque de son numéro. `place`
# est sa position dans l’époque.

# %% [markdown] lang="en"
# All that this notebook writes goes into the folder `kept`, which will vanish with it.
#
# ## 1. What the next step needs
#
# Here is an ordinary training: a small network with dropout, AdamW, a learning rate that falls as a cosine, and a
# sampler that draws the order of each epoch from its number, as `DistributedSampler` does. `place` is its position in
# the epoch.

# %% name="training"
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)


class Training:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=80)
        self.epoch = self.place = 0

    def run(self, steps):
        losses = []
        for _ in range(steps):
            order = torch.randperm(1792, generator=torch.Generator().manual_seed(self.epoch))
            batch = order[self.place : self.place + 64]
            loss = F.cross_entropy(self.model(images[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.place += 64
            if self.place == 1792:
                self.epoch, self.place = self.epoch + 1, 0
            losses.append(loss.item())
        return losses


whole = Training(seed=0).run(80)
print("loss of steps 1 and 80: // perte aux pas 1 et 80 :", decimal(whole[0], 2), decimal(whole[-1], 2))

# %% [markdown] lang="fr"
# ### Exercice 1 — reprendre à l’identique
#
# Écrivez `state_of(training)`, qui renvoie un dictionnaire de tout ce qu’il faut garder (une partie par clé), et
# `resume(training, state)`, qui le remet dans un entraînement neuf. `stop_and_resume` les appelle comme le feraient
# deux processus successifs : le second n’a du premier que le fichier, et son générateur aléatoire est dans un
# autre état. `weights_only=True` n’accepte que des tenseurs, des nombres, des textes, et leurs listes et dictionnaires.

# %% [markdown] lang="en"
# ### Exercise 1 — resuming exactly
#
# Write `state_of(training)`, which returns a dictionary of all that must be kept (one part per key), and
# `resume(training, state)`, which puts it into a new training. `stop_and_resume` calls them as two processes would, one
# after the other: the second has nothing of the first but the file, and its random generator is in another state.
# `weights_only=True` accepts only tensors, numbers, texts, and lists and dictionaries of them.


# %% name="resume-exactly"
def state_of(training):
    ### BEGIN SOLUTION
    return {
        "weights": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "schedule": training.schedule.state_dict(),
        "sampler": [training.epoch, training.place],
        "random": torch.get_rng_state(),
    }
    ### END SOLUTION


def resume(training, state):
    ### BEGIN SOLUTION
    training.model.load_state_dict(state["weights"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.schedule.load_state_dict(state["schedule"])
    training.epoch, training.place = state["sampler"]
    torch.set_rng_state(state["random"])
    ### END SOLUTION


def stop_and_resume(training, fresh, path):
    torch.save(state_of(training), path)
    torch.manual_seed(999)  # another process // un autre processus
    resume(fresh, torch.load(path, weights_only=True))


lab.check("resume-exactly", stop_and_resume)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("resume-exactly")

# %% [markdown] lang="fr"
# Coupons le premier entraînement après 40 pas, au milieu d’une époque. La seconde moitié est-elle la même, au bit
# près ?

# %% [markdown] lang="en"
# Let us cut the first training after 40 steps, in the middle of an epoch. Is the second half the same, to the bit?

# %% name="resumed"
resumed, stopped = Training(seed=1), Training(seed=0)
stopped.run(40)
stop_and_resume(stopped, resumed, kept / "state.pt")
print("the same losses, to the bit: // les mêmes pertes, au bit près :", yes_no(resumed.run(40) == whole[40:]))

# %% [markdown] lang="fr"
# **Et si l’on oublie une partie ?** Devinez d’abord laquelle fait le plus de dégâts, et laquelle ne se voit presque
# pas. La boucle remplace, une par une, chaque partie de **votre** état par celle d’un entraînement neuf, et affiche le
# plus grand écart à la perte attendue, au premier pas puis sur les 40.

# %% [markdown] lang="en"
# **And if a part is forgotten?** Guess first which one does most harm, and which one hardly shows. The loop replaces
# each part of **your** state, one by one, by that of a new training, and prints the largest gap to the expected loss,
# in the first step and then over all 40.

# %% name="forgotten"
blank, state = state_of(Training(seed=1)), torch.load(kept / "state.pt", weights_only=True)
for part in state:
    training = Training(seed=1)
    resume(training, {**state, part: blank[part]})
    gaps = [abs(loss - right) for loss, right in zip(training.run(40), whole[40:], strict=True)]
    gap = f"{decimal(gaps[0], 2)} {decimal(max(gaps), 2)}"
    print(f"without {part:<10} first step, largest: // sans {part:<10} premier pas, maximum :", gap)

# %% [markdown] lang="fr"
# Des poids oubliés sautent aux yeux. Le reste se voit à peine au premier pas : sans les moments, la courbe fait une
# bosse quelques pas plus tard ; sans le calendrier, elle dérive ; sans la position de l’échantillonneur, des images
# sont lues deux fois et d’autres jamais ; sans l’état aléatoire, les écarts sont ceux d’un autre tirage : rien ne
# semble anormal, mais aucune exécution ne se reproduit plus. Chaque rang a son état aléatoire, et chaque GPU le sien :
# il faut les enregistrer tous, comme l’échelle de la perte du TP 02 en fp16, et les générateurs de Python et de NumPy
# quand les données s’en servent.
#
# ## 2. D’un nombre de rangs à un autre
#
# ZeRO-3 a réparti les états : qui écrit quoi ? **DCP** (*Distributed Checkpoint*, `torch.distributed.checkpoint`)
# laisse chaque rang écrire sa part, et retrouve à la lecture où est chaque morceau. Deux rangs, donc, FSDP2, cinq pas,
# puis l’enregistrement. `get_state_dict` donne les états par nom ; ceux qui sont répartis sont des `DTensor`, qui
# savent quelle part du tenseur entier ce rang détient.

# %% [markdown] lang="en"
# Forgotten weights stand out at once. The rest hardly shows in the first step: without moments the curve has a bump
# some steps later; without the schedule it drifts; without the sampler's place, images are read twice and others
# never; without the random state the differences are those of another draw: nothing looks wrong, but no run can be
# repeated any more. With several ranks, each rank has its random state, and each GPU another: all must be saved. So
# must the loss scale of lab 02 in fp16, and the generators of Python and NumPy where the data use them.
#
# ## 2. From one number of ranks to another
#
# ZeRO-3 has sharded the states: who writes what? **DCP** (Distributed Checkpoint, `torch.distributed.checkpoint`) lets
# each rank write its share, and finds out on reading where each piece is. So: two ranks, FSDP2, five steps, then the
# save. `get_state_dict` gives the states by name; those that are sharded are `DTensor`s, which know what part of the
# whole tensor this rank holds.

# %% name="sharded-model"
def make_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 51), nn.ReLU(), nn.Linear(51, 10))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    rank, size, losses = torch.distributed.get_rank(), torch.distributed.get_world_size(), []
    for step in steps:
        batch = torch.arange(60 * step, 60 * step + 60)[rank::size]
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / size)
    return losses


def by_name(weights, moments):
    named = {f"weights.{name}": tensor for name, tensor in weights.items()}
    for name, tensors in moments["state"].items():
        named |= {f"{kind}.{name}": tensor for kind, tensor in tensors.items()}
    return named


# %% name="save-sharded" tags=["nbval-ignore-output"]
# %%ranks 2 --with make_sharded,train,by_name,images,labels,kept
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

model, optimizer = make_sharded()
train(model, optimizer, range(5))
weights, moments = get_state_dict(model, optimizer)
writer = HuggingFaceStorageWriter(kept / "safetensors", save_distributed=True)
written = dcp.save(by_name(weights, moments), storage_writer=writer)
written = dcp.save({"weights": weights, "optimizer": moments}, checkpoint_id=kept / "dcp")
share = by_name(weights, moments)["exp_avg.0.weight"]
print("whole, here: // entier, ici :", tuple(share.shape), tuple(share.to_local().shape))
losses = train(model, optimizer, range(5, 10))

# %% [markdown] lang="fr"
# Nous avons enregistré deux fois : en *safetensors* (un en-tête JSON, puis les nombres), puis dans le format habituel
# de DCP, dont nous regarderons les fichiers plus loin. Et les deux rangs ont continué cinq pas. **Trois** rangs,
# maintenant, relisent le premier : un modèle neuf, dont `dcp.load` remplit les parts, et les mêmes cinq pas.

# %% [markdown] lang="en"
# We have saved twice: as safetensors (a JSON header, then the numbers), then in DCP's usual format, whose files we look
# at further on. And the two ranks went on for five steps. Now **three** ranks read the former: a new model, whose
# shares `dcp.load` fills, and the same five steps.

# %% name="uninterrupted"
expected = ranks["losses"][0]

# %% name="load-sharded"
# %%ranks 3 --with make_sharded,train,by_name,images,labels,kept,expected
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dlojz.base.language import yes_no

model, optimizer = make_sharded()
weights, moments = get_state_dict(model, optimizer)
dcp.load(by_name(weights, moments), storage_reader=HuggingFaceStorageReader(kept / "safetensors"))
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
losses = train(model, optimizer, range(5, 10))
same = torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5)
print("the same losses: // les mêmes pertes :", yes_no(same))

# %% [markdown] lang="fr"
# Trois rangs continuent donc ce que deux ont commencé : les pertes sont égales, à l’ordre des additions près (on ne
# peut plus exiger l’égalité au bit près). Comment DCP trouve-t-il les morceaux ?
#
# ### Exercice 2 — relire avec un autre nombre de rangs
#
# Un vecteur de `elements` nombres a été coupé en parts de longueur ⌈elements / old_ranks⌉, une par rang et par
# fichier ; les dernières peuvent être plus courtes. On relit sur `new_ranks` rangs, qui le coupent de la même façon.
# Que lit le rang `rank` ? Renvoyez une liste de triplets `(old_rank, start, stop)`, dans l’ordre du vecteur : les
# positions sont comptées **dans la part** de l’ancien rang, `stop` est exclu, et un fichier dans lequel il n’y a rien à
# lire n’apparaît pas.

# %% [markdown] lang="en"
# So three ranks go on with what two have begun: the losses are equal up to the order of sums (the same bits can no
# longer be asked for). How does DCP find the pieces?
#
# ### Exercise 2 — reading with another number of ranks
#
# A vector of `elements` numbers was cut into shares of length ⌈elements / old_ranks⌉, one per rank and per file; the
# last ones may be shorter. It is read on `new_ranks` ranks, which cut it in the same way. What does rank `rank` read?
# Return a list of triples `(old_rank, start, stop)`, in the order of the vector: places are counted **within the
# share** of the old rank, `stop` is excluded, and a file of which there is nothing to read does not appear.


# %% name="shares-to-read"
def shares_to_read(elements, old_ranks, new_ranks, rank):
    ### BEGIN SOLUTION
    old, new = math.ceil(elements / old_ranks), math.ceil(elements / new_ranks)
    pieces = []
    for old_rank in range(old_ranks):
        start = max(rank * new, old_rank * old)
        stop = min((rank + 1) * new, (old_rank + 1) * old, elements)
        if start < stop:
            pieces.append((old_rank, start - old_rank * old, stop - old_rank * old))
    return pieces
    ### END SOLUTION


lab.check("shares-to-read", shares_to_read)

# %%
# lab.hint("shares-to-read")

# %% [markdown] lang="fr"
# ## 3. Combien de temps pour enregistrer ?
#
# Passons à plus grand : quatre couches de 1 024 × 1 024, soit 4 194 304 paramètres en fp32, et leurs deux moments. Un
# enregistrement n’est sûr que lorsque le disque l’a : `os.fsync` attend ce moment. Mesurons d’abord le débit de ce
# disque, sur 16 Mio.

# %% [markdown] lang="en"
# ## 3. How long does a save take?
#
# Now something larger: four layers of 1,024 × 1,024, or 4,194,304 parameters in fp32, and their two moments. A save is
# safe only when the disk has it: `os.fsync` waits for that. First let us measure the bandwidth of this disk, with 16
# MiB.

# %% name="bandwidth" tags=["nbval-ignore-output"]
def seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_raw(content):
    with open(kept / "raw", "wb") as file:
        file.write(content)
        os.fsync(file.fileno())


content = random.Random(0).randbytes(2**24)
bandwidth = 2**24 / median(seconds(lambda: write_raw(content)) for _ in range(5))
print(decimal(bandwidth / 1e6, 0), "MB/s // Mo/s")

# %% [markdown] lang="fr"
# **Votre prédiction** : combien de secondes prend l’enregistrement des poids et des deux moments ? Partez de
# `bandwidth` (octets par seconde).

# %% [markdown] lang="en"
# **Your prediction**: how many seconds does it take to save the weights and both moments? Start from `bandwidth` (bytes
# per second).

# %% name="predict-save" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "save-seconds",
    ### BEGIN SOLUTION
    (4 + 8) * 4 * 1024**2 / bandwidth,
    ### END SOLUTION
)

# %% name="save-wide" tags=["nbval-ignore-output"]
torch.manual_seed(0)
wide = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-4)


def train_step():
    wide(torch.randn(64, 1024)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


train_step()
state = {f"weights.{name}": weight.data for name, weight in wide.named_parameters()}
for name, weight in wide.named_parameters():
    state |= {f"{kind}.{name}": optimizer.state[weight][kind] for kind in ("exp_avg", "exp_avg_sq")}


def write(tensors):
    save_file(tensors, kept / "wide.safetensors")
    with open(kept / "wide.safetensors", "rb+") as file:
        os.fsync(file.fileno())


saves = [seconds(lambda: write(state)) for _ in range(5)]

# %% name="reveal-save" tags=["nbval-ignore-output"]
lab.reveal("save-seconds", median(saves))

# %% [markdown] lang="fr"
# Sur une machine partagée, le débit change d’un essai à l’autre : attendez-vous à un écart de 50 %. À grande échelle,
# la formule est la même. Poids et moments en fp32 font 12 octets par paramètre, soit 840 Go pour 70 milliards : un seul
# rang à 2 Go/s y passerait 7 minutes ; 64 rangs qui écrivent chacun leur part, quelques secondes, tant que le système
# de fichiers suit.
#
# ## 4. Enregistrer sans attendre
#
# Un enregistrement **asynchrone** copie les états dans des tampons de la mémoire de l’hôte, puis un *thread* les écrit
# pendant que l’entraînement continue : c’est ce que fait `dcp.async_save`. L’entraînement n’attend que la copie.
#
# ### Exercice 3 — enregistrer en arrière-plan
#
# `state` et `buffers` sont des dictionnaires de tenseurs, de mêmes noms et de mêmes formes ; `write(tensors)` écrit, et
# prend son temps. Renvoyez, sans attendre `write`, le `threading.Thread` qui l’exécute. Au retour de la fonction, le
# pas suivant modifie `state`.

# %% [markdown] lang="en"
# On a shared machine the bandwidth changes from one trial to the next: expect a gap of 50%. At a large scale the
# formula is the same. Weights and moments in fp32 are 12 bytes per parameter, or 840 GB for 70 billion: one single rank
# with 2 GB/s would spend 7 minutes on it; 64 ranks that write a share each, some seconds, as long as the file system
# keeps up.
#
# ## 4. Saving without waiting
#
# An **asynchronous** save copies the states into buffers in host memory; then a thread writes these while the training
# goes on: that is what `dcp.async_save` does. The training waits for the copy alone.
#
# ### Exercise 3 — saving in the background
#
# `state` and `buffers` are dictionaries of tensors, with the same names and shapes; `write(tensors)` writes, and takes
# its time. Return, without waiting for `write`, the `threading.Thread` that runs it. When the function has returned,
# the next step changes `state`.


# %% name="save-in-background"
def save_in_background(state, buffers, write):
    ### BEGIN SOLUTION
    for name, tensor in state.items():
        buffers[name].copy_(tensor)
    thread = threading.Thread(target=write, args=(buffers,))
    thread.start()
    return thread
    ### END SOLUTION


lab.check("save-in-background", save_in_background)

# %%
# lab.hint("save-in-background")

# %% [markdown] lang="fr"
# **Votre prédiction** : combien de secondes l’entraînement attend-il ? La cellule suivante mesure le débit d’une copie,
# sur six des douze tenseurs, de 4 Mio chacun. Ici aussi, attendez-vous à un écart de 50 %.

# %% [markdown] lang="en"
# **Your prediction**: for how many seconds does the training wait? The next cell measures the bandwidth of a copy, with
# six of the twelve tensors, of 4 MiB each. Here too, expect a gap of 50%.

# %% name="copy-bandwidth" tags=["nbval-ignore-output"]
buffers = {name: torch.ones_like(tensor) for name, tensor in state.items()}
train_step()  # so that no cache holds the tensors // pour qu’aucun cache ne contienne les tenseurs
copies = [seconds(lambda name=name, x=x: buffers[name].copy_(x)) for name, x in list(state.items())[:6]]
copy_bandwidth = 2**22 / median(copies)
print(decimal(copy_bandwidth / 1e9), "GB/s // Go/s")

# %% name="predict-stall" tags=["nbval-ignore-output"] stub="value"
lab.predict(
    "stall-seconds",
    ### BEGIN SOLUTION
    12 * 2**22 / copy_bandwidth,
    ### END SOLUTION
)

# %% name="stalls" tags=["nbval-ignore-output"]
stalls, threads = [], []
for _ in range(5):
    train_step()
    stalls.append(seconds(lambda: threads.append(save_in_background(state, buffers, write))))
    threads[-1].join()
lab.reveal("stall-seconds", median(stalls))
print("synchronous, asynchronous: // synchrone, asynchrone :", end=" ")
print(f"{decimal(median(saves), 3)} s, {decimal(median(stalls), 3)} s")

# %% [markdown] lang="fr"
# Et l’entraînement entier ? Huit pas, deux enregistrements, des trois façons, à tour de rôle.

# %% [markdown] lang="en"
# And the whole training? Eight steps, two saves, in the three ways, in turns.

# %% name="whole-training" tags=["nbval-ignore-output"]
def eight_steps(save):
    for step in range(8):
        train_step()
        if step in (1, 5):
            save()
    for thread in threads:
        thread.join()


ways = {"none // aucun": lambda: None, "synchronous // synchrone": lambda: write(state)}
ways["asynchronous // asynchrone"] = lambda: threads.append(save_in_background(state, buffers, write))
took = {name: [] for name in ways}
for _ in range(3):
    for name, save in ways.items():
        took[name].append(seconds(lambda save=save: eight_steps(save)))
for name, times in took.items():
    print(f"{name:<13} {decimal(median(times), 2)} s")

# %% [markdown] lang="fr"
# L’écriture n’est pas gratuite pour autant : ici, elle dispute les cœurs à l’entraînement. Et tant qu’elle dure, les
# tampons sont pris : deux enregistrements ne peuvent pas se suivre de plus près.
#
# ## 5. À quelle fréquence ?
#
# Trop souvent, on passe son temps à enregistrer ; trop rarement, chaque panne fait refaire un long travail. Soit C la
# durée d’un enregistrement, M le temps moyen entre deux pannes, T l’intervalle. On perd C secondes toutes les T, et, à
# chaque panne, T / 2 en moyenne : la part perdue est C / T + T / (2M).
#
# ### Exercice 4 — le meilleur intervalle
#
# Renvoyez deux nombres : l’intervalle T qui perd le moins, en secondes, et la part alors perdue (Young, 1974 ; Daly,
# 2006, l’affine).

# %% [markdown] lang="en"
# Yet writing is not free: here it competes with the training for the cores. And as long as it takes, the buffers are in
# use: two saves cannot follow each other more closely.
#
# ## 5. How often?
#
# If one saves too often, the time goes into saving; if too seldom, every failure throws away hours of work.
# Let C be the time of a save, M the mean time between failures, T the interval. One loses C seconds in every T, and
# with each failure T / 2 on average: the share lost is C / T + T / (2M).
#
# ### Exercise 4 — the best interval
#
# Return two numbers: the interval T that loses least, in seconds, and the share that is then lost (Young, 1974; refined
# by Daly, 2006).


# %% name="checkpoint-interval"
def best_interval(save_s, failure_s):
    ### BEGIN SOLUTION
    interval_s = math.sqrt(2 * save_s * failure_s)
    return interval_s, save_s / interval_s + interval_s / (2 * failure_s)
    ### END SOLUTION


lab.check("checkpoint-interval", best_interval)

# %%
# lab.hint("checkpoint-interval")

# %% [markdown] lang="fr"
# L’entraînement de Llama 3 (Grattafiori et al., 2024, § 3.3.4), sur 16 384 GPU, a connu 419 interruptions imprévues en
# 54 jours. **Votre prédiction** : avec des enregistrements de 60 s, au meilleur intervalle, quelle part du temps est
# perdue ?

# %% [markdown] lang="en"
# The training of Llama 3 (Grattafiori et al., 2024, §3.3.4), on 16,384 GPUs, met 419 unexpected interruptions in 54
# days. **Your prediction**: with saves of 60 s, at the best interval, which share of the time is lost?

# %% name="predict-lost" stub="value"
failure_s = 54 * 86_400 / 419
lab.predict(
    "lost-share",
    ### BEGIN SOLUTION
    best_interval(60, failure_s)[1],
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Vérifions en simulant un an de travail : des pannes au hasard, et, à chacune, retour au dernier checkpoint.

# %% [markdown] lang="en"
# Let us check by simulating a year of work: failures at random, and with each of them back to the last checkpoint.

# %% name="simulate"
def lost_share(interval_s, save_s):
    failures, clock, done, interval_s = random.Random(0), 0.0, 0.0, max(interval_s, 1.0)
    next_failure = failures.expovariate(1 / failure_s)
    while done < 365 * 86_400 and clock < 3650 * 86_400:  # ten years at most // dix ans au plus
        end = clock + interval_s + save_s
        if end < next_failure:
            clock, done = end, done + interval_s
        else:
            clock = next_failure
            next_failure += failures.expovariate(1 / failure_s)
    return 1 - done / clock


chosen = best_interval(60, failure_s)[0]
for interval_s in (300, 600, chosen, 2400, 4800):
    print(f"{decimal(interval_s, 0):>5} s", percent(lost_share(interval_s, 60)), "of the time lost // du temps perdu")
lab.reveal("lost-share", lost_share(chosen, 60))

# %% [markdown] lang="fr"
# Le minimum est plat : à un facteur deux près, l’intervalle importe peu. Réduire C importe davantage. Avec un
# enregistrement asynchrone, dont on n’attend que 5 s :

# %% [markdown] lang="en"
# The minimum is flat: within a factor of two the interval matters little. Making C smaller matters more. With an
# asynchronous save, of which one waits for 5 s only:

# %% name="asynchronous-interval"
shorter, predicted = best_interval(5, failure_s)
shares = f"{percent(predicted)}, {percent(lost_share(shorter, 5))}"
print(f"{decimal(shorter, 0)} s: // {decimal(shorter, 0)} s :", shares, "(predicted, simulated) // (prédit, simulé)")

# %% [markdown] lang="fr"
# ## 6. Les formats
#
# DeepSpeed écrit encore autrement. **Votre prédiction** : en ZeRO-2, sur deux rangs, chaque rang écrit un fichier pour
# sa part de l’optimiseur d’un modèle de 267 786 paramètres en fp32. Combien d’octets ? (DeepSpeed garde une copie
# maître même en fp32 : TP 04, partie 6.)

# %% [markdown] lang="en"
# ## 6. The formats
#
# DeepSpeed writes in yet another way. **Your prediction**: under ZeRO-2, on two ranks, each rank writes a file for its
# share of the optimizer of a model of 267,786 parameters in fp32. How many bytes? (DeepSpeed keeps a master copy even
# in fp32: lab 04, part 6.)

# %% name="predict-file" stub="value"
lab.predict(
    "optimizer-file",
    ### BEGIN SOLUTION
    (4 + 8) * 267_786 / 2,
    ### END SOLUTION
)

# %% name="keep-deepspeed" tags=["nbval-ignore-output"]
# %%ranks 2 --with kept --limit 180
from torch import nn

from dlojz.labs.kit.sandbox import load_deepspeed

deepspeed = load_deepspeed()
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2**20, "allgather_bucket_size": 2**20},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings, dist_init_required=False
)
engine.backward(engine(torch.randn(4, 512)).square().mean())
engine.step()
written = engine.save_checkpoint(str(kept / "deepspeed"))

# %% name="reveal-file" tags=["nbval-ignore-output"]
last_share = kept / "deepspeed" / "global_step1" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
lab.reveal("optimizer-file", last_share.stat().st_size)

# %% name="files" tags=["nbval-ignore-output"]
folders = {"DeepSpeed, ZeRO-2": kept / "deepspeed", "DCP": kept / "dcp", "DCP, safetensors": kept / "safetensors"}
for name, path in folders.items():
    print(name)
    for file in sorted(path.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size:>12}", "B // o", f" {file.relative_to(path)}")

# %% [markdown] lang="fr"
# DeepSpeed écrit les états là où ZeRO-2 les garde : chaque rang, sa part de l’optimiseur et de la copie maître ; le
# rang 0 seul, les poids. Le nombre de rangs y est figé ; pour le changer, un programme,
# `deepspeed.checkpoint.ds_to_universal`, en fait un *universal checkpoint*, un dossier par paramètre. DCP, lui,
# répartit tout, et se relit sur n’importe quel nombre de rangs.
#
# ### Un pickle est un programme
#
# Les fichiers `.pt`, `.distcp` et `.metadata` contiennent des **pickles**. Un pickle, ce ne sont pas des données, mais
# des instructions, exécutées par celui qui le lit. En voici un de 34 octets, inoffensif, écrit à la main. Nous ne le
# chargerons pas ; `pickletools` se contente d’en lister les instructions.

# %% [markdown] lang="en"
# DeepSpeed writes the states where ZeRO-2 keeps them: each rank writes its share of the optimizer and of the master
# copy; rank 0 alone writes the weights. The number of ranks is frozen there; to change it, a program,
# `deepspeed.checkpoint.ds_to_universal`, makes a universal checkpoint of it, one folder per parameter. DCP distributes
# everything, and is read on any number of ranks.
#
# ### A pickle is a program
#
# The files `.pt`, `.distcp` and `.metadata` hold **pickles**. A pickle is not data but a sequence of instructions,
# which whoever reads it executes. Here is one of 34 bytes, harmless, written by hand. We shall not load it;
# `pickletools` only lists its instructions.

# %% name="planted"
import pickletools

planted = b"cbuiltins\nprint\n(S'it has run'\ntR."
pickletools.dis(planted)

# %% [markdown] lang="fr"
# `GLOBAL` importe une fonction, `REDUCE` l’appelle : charger ce fichier, c’est exécuter `print('it has run')`. Avec
# `os.system`, ce serait n’importe quelle commande, sous **votre** compte. Que demandent nos trois dossiers ? Pour
# chaque fichier, le nombre d’appels, et ce qu’en dit `torch.load(…, weights_only=True)`, qui n’accepte que les noms
# d’une courte liste ; puis tout ce qu’il faudrait importer.

# %% [markdown] lang="en"
# `GLOBAL` imports a function, `REDUCE` calls it: to load this file is to execute `print('it has run')`. With
# `os.system` it would be any command, under **your** account. What do our three folders ask for? For each file the
# number of calls, and what `torch.load(…, weights_only=True)` says of it, which accepts only the names of a short list;
# then all that would have to be imported.

# %% name="pickles" tags=["nbval-ignore-output"]
formats.pickle_table(folders)

# %% [markdown] lang="fr"
# Les fichiers de l’optimiseur nomment des classes de DeepSpeed, que `weights_only` refuse et que `load_checkpoint`
# charge pourtant, sans ce garde-fou ; DCP lit `.metadata` par `pickle.load`. D’où la règle : **ne chargez un checkpoint
# de ces formats que si vous l’avez écrit vous-même**. Pour échanger des poids, *safetensors*, où il n’y a rien à
# exécuter ; pour un `.pt`, `weights_only=True`, toujours.
#
# ## 7. Un bit inversé
#
# Un disque, un réseau, une copie interrompue : un bit change. Qui s’en aperçoit ? Inversons-en un, au milieu du fichier
# de la partie 3.

# %% [markdown] lang="en"
# The files of the optimizer name classes of DeepSpeed, which `weights_only` refuses and which `load_checkpoint` loads
# all the same, without that guard; DCP reads `.metadata` with `pickle.load`. Hence the rule: **load a checkpoint of
# these formats only if you have written it yourself**. To exchange weights, take safetensors, where there is nothing to
# execute; for a `.pt`, always set `weights_only=True`.
#
# ## 7. One bit flipped
#
# A disk, a network, a copy that was cut short: a bit changes. Who notices? Let us flip one, in the middle of the file
# of part 3.

# %% name="flip"
def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0b0100_0000
    path.write_bytes(content)


write(state)
flip_a_bit(kept / "wide.safetensors")
wrong = load_file(kept / "wide.safetensors")
mistaken = sum(not torch.equal(wrong[name], state[name]) for name in state)
print("loaded without a word; wrong tensors: // chargé sans un mot ; tenseurs faux :", mistaken)

# %% [markdown] lang="fr"
# Ni *safetensors*, ni DCP, ni DeepSpeed ne vérifient ce qu’ils lisent. (L’archive zip d’un `.pt` contient bien une
# somme de contrôle, que PyTorch ne vérifie pas à la lecture.)
#
# ### Exercice 5 — sceller un checkpoint
#
# `hashes(folder)` donne l’empreinte sha256 de chaque fichier de `folder` (un `Path`), sous-dossiers compris, sauf celle
# du sceau. `seal(folder)` les écrit dans ce sceau, un fichier de plus (son nom est libre), **en dernier**.
# `is_intact(folder)` dit (`True` ou `False`) si tout est encore là, inchangé ; un dossier sans sceau n’a pas été
# terminé. `sealed` appelle les deux, et endommage le dossier entre-temps.

# %% [markdown] lang="en"
# Neither safetensors nor DCP nor DeepSpeed verifies what it reads. (The zip archive of a `.pt` does hold a checksum,
# which PyTorch does not verify as it reads.)
#
# ### Exercise 5 — sealing a checkpoint
#
# `hashes(folder)` gives the sha256 of each file of `folder` (a `Path`), those in its folders included, but not that of
# the seal. `seal(folder)` writes them into this seal, one more file (under a name of your choice), **last**.
# `is_intact(folder)` tells (`True` or `False`) whether all is still there, unchanged; a folder without a seal was not
# finished. `sealed` calls both, and damages the folder in between.


# %% name="sealed-folder"
def hashes(folder):
    ### BEGIN SOLUTION
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "COMMIT"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    ### END SOLUTION


def seal(folder):
    ### BEGIN SOLUTION
    (folder / "COMMIT").write_text(json.dumps(hashes(folder)))
    ### END SOLUTION


def is_intact(folder):
    ### BEGIN SOLUTION
    commit = folder / "COMMIT"
    return commit.is_file() and json.loads(commit.read_text()) == hashes(folder)
    ### END SOLUTION


def sealed(folder, harm):
    seal(folder)
    harm(folder)
    return is_intact(folder)


lab.check("sealed-folder", sealed)

# %%
# lab.hint("sealed-folder")

# %% [markdown] lang="fr"
# Essayons sur le checkpoint des deux rangs : intact, puis avec un bit inversé dans la part du rang 1.

# %% [markdown] lang="en"
# Let us try it on the checkpoint of the two ranks: intact, then with a bit flipped in the share of rank 1.

# %% name="sealed-shards"
shards = kept / "safetensors"
print("intact: // intact :", yes_no(sealed(shards, lambda folder: None)))
flipped = sealed(shards, lambda folder: flip_a_bit(sorted(folder.glob("*.safetensors"))[1]))
print("after one flipped bit: // après un bit inversé :", yes_no(flipped))

# %% [markdown] lang="fr"
# Les exécutions de dlojz font tout cela : *safetensors*, un manifeste avec les sha256, `COMMIT` en dernier, et
# plusieurs checkpoints gardés. Un checkpoint endommagé est refusé, et l’on repart du précédent. Voici le refus :

# %% [markdown] lang="en"
# The runs of dlojz do all this: safetensors, a manifest with each sha256, `COMMIT` last, and several checkpoints
# kept. A damaged checkpoint is refused, and one goes on from the one before. Here is the refusal:

# %% name="verify-ours"
import shutil

from dlojz.base.errors import LabError
from dlojz.train.checkpoint_files import verify

config = dlojz.RunConfig.of(model="coatnet_tiny", dp=2, micro_batch=4, steps=2)
written = dlojz.run(config, engine="by_hand", zero=2, checkpoint_every=2).checkpoints[0].folder
ours = shutil.copytree(written, kept / "ours", dirs_exist_ok=True)
flip_a_bit(ours / "tensors-0000.safetensors")
try:
    verify(ours)
except LabError as error:
    print(error)

# %% [markdown] lang="fr"
# ## Dans votre projet
#
# Le `train.py` du TP 04 enregistre poids et moments (`--save`, `--load`). Ajoutez-y ce qui manque pour reprendre à
# l’identique : l’époque, la position de l’échantillonneur, l’état aléatoire de chaque rang et de son GPU ; et écrivez
# le sceau en dernier. À regarder dans les journaux : la première perte après la reprise suit la dernière d’avant, sans
# bosse dans les pas suivants.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# position = {"epoch": epoch, "place": place, "random": torch.get_rng_state()}
# if torch.cuda.is_available():
#     position["gpu"] = torch.cuda.get_rng_state()
# os.makedirs(args.save, exist_ok=True)
# torch.save(position, f"{args.save}/position-{rank}.pt")
# position = torch.load(f"{args.load}/position-{rank}.pt", weights_only=True)
# torch.set_rng_state(position["random"])
# if "gpu" in position:
#     torch.cuda.set_rng_state(position["gpu"])
# future = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=args.save)
# # ... des pas d’entraînement, puis avant le sceau :
# future.result()
# dist.barrier()
# ```
#
# Après `set_rng_state`, sautez les `place` premiers batches de l’époque `epoch`. Sur GPU, `async_save` a besoin de
# `init_process_group("cpu:gloo,cuda:nccl")`.
#
# </details>

# %% [markdown] lang="en"
# ## In your project
#
# The `train.py` of lab 04 saves weights and moments (`--save`, `--load`). Add what is missing to resume exactly: the
# epoch, the sampler's place, the random state of each rank and of its GPU; and write the seal last. What to look for
# in the logs: the first loss after the resumption follows the last one before, without a bump in the next steps.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# position = {"epoch": epoch, "place": place, "random": torch.get_rng_state()}
# if torch.cuda.is_available():
#     position["gpu"] = torch.cuda.get_rng_state()
# os.makedirs(args.save, exist_ok=True)
# torch.save(position, f"{args.save}/position-{rank}.pt")
# position = torch.load(f"{args.load}/position-{rank}.pt", weights_only=True)
# torch.set_rng_state(position["random"])
# if "gpu" in position:
#     torch.cuda.set_rng_state(position["gpu"])
# future = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=args.save)
# # ... steps of training, then before the seal:
# future.result()
# dist.barrier()
# ```
#
# After `set_rng_state`, skip the first `place` batches of the epoch `epoch`. On a GPU, `async_save` needs
# `init_process_group("cpu:gloo,cuda:nccl")`.
#
# </details>

# %% [markdown] lang="fr"
# ## Bilan
#
# | question | réponse |
# |--|--|
# | que garder ? | poids, moments, calendrier, position de l’échantillonneur, états aléatoires, échelle fp16 |
# | combien de temps ? | 12Ψ octets sur le débit ; en asynchrone, sur celui d’une copie |
# | à quelle fréquence ? | √(2 C M) |
# | quel format ? | *safetensors*, ou DCP que l’on a écrit soi-même |
# | comment savoir qu’il est intact ? | un sha256 par fichier, et le sceau écrit en dernier |

# %% [markdown] lang="en"
# ## Summary
#
# | question | answer |
# |--|--|
# | what to keep? | weights, moments, schedule, sampler's place, random states, loss scale (fp16) |
# | how long does it take? | 12Ψ bytes over the bandwidth; if asynchronous, over that of a copy |
# | how often? | √(2 C M) |
# | which format? | safetensors, or DCP that one has written oneself |
# | how to know that it is intact? | one sha256 per file, and the seal written last |

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
