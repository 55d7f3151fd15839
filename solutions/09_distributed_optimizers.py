# %% [markdown] lang="fr"
# # TP 09 — Optimiseurs distribués
#
# En *Data Parallelism*, chaque pas se termine par un *all-reduce*, puis par la mise à jour. Ce TP s’attaque aux deux.
# Côté réseau, les optimiseurs **1-bit** n’envoient plus qu’un bit par nombre, et d’autres, *Local SGD* ou *DiLoCo*,
# n’envoient presque jamais rien. Côté mise à jour, les optimiseurs **fusionnés** lisent et écrivent moins de mémoire,
# et peuvent travailler pendant la passe arrière.
#
# À la fin, vous saurez :
#
# - compresser un gradient en un bit par nombre, compenser l’erreur, et brancher le tout sur DDP ;
# - prévoir les octets et la durée des envois, puis les mesurer ;
# - dire quand geler la variance d’Adam, et ce qui arrive si on le fait trop tôt ;
# - fusionner une mise à jour, la placer dans la passe arrière, et écrire le pas extérieur de DiLoCo.
#
# Comptez deux heures. Quatre rangs suffisent, sans GPU.

# %% [markdown] lang="en"
# # Lab 09 — Distributed optimizers
#
# In data parallelism each step ends with an all-reduce, and then the update. This lab tackles both. On the network, the
# **1-bit** optimizers send no more than one bit per number, and others, local SGD or DiLoCo, hardly ever send anything.
# In the update, **fused** optimizers read and write less memory, and can work during the backward pass.
#
# By the end you can:
#
# - compress a gradient to one bit per number, feed the error back, and put all this into DDP;
# - foresee bytes and seconds of what is sent, then measure them;
# - tell when Adam's variance may be frozen, and what happens if it is done too early;
# - fuse an update, put it into the backward pass, and write the outer step of DiLoCo.
#
# Allow two hours. Four ranks are enough, without GPUs.

# %% name="setup"
import math
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import dlojz
from dlojz import labs, models
from dlojz.base.language import decimal, format_bytes, yes_no
from dlojz.labs.lab09_optimizers import figures
from dlojz.labs.lab09_optimizers.exercises_compression import read, write
from dlojz.labs.lab09_optimizers.exercises_updates import watch_gradients

lab = labs.start("09")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. Un bit par nombre
#
# D’un nombre en fp32, gardons le signe : un bit au lieu de 32. La valeur absolue est perdue ; une seule pour tout le
# vecteur suffit, l’**échelle**. De tous les nombres c, celui qui rend ‖x − c signe(x)‖ minimal est la moyenne des |xᵢ|.
#
# ### Exercice 1 — compresser
#
# Renvoyez, pour le vecteur `values`, ce que le destinataire en saura : le signe de chaque nombre, multiplié par
# l’échelle. Un bit ne distingue que deux cas : zéro compte comme positif. (Laissez `values` tel quel.)

# %% [markdown] lang="en"
# ## 1. One bit per number
#
# Of a number in fp32 let us keep the sign: one bit instead of 32. The magnitude is lost; one magnitude for the whole
# vector is enough, the **scale**. Of all numbers c, the one that makes ‖x − c sign(x)‖ smallest is the mean of the
# |xᵢ|.
#
# ### Exercise 1 — compressing
#
# Return, for the vector `values`, what its receiver will know of it: the sign of each number, times the scale. A bit
# tells two cases apart only: zero counts as positive. (Leave `values` as it is.)


# %% name="compress-signs"
def compress(values):
    ### BEGIN SOLUTION
    signs = torch.where(values >= 0, 1.0, -1.0)
    return signs * values.abs().mean()
    ### END SOLUTION


lab.check("compress-signs", compress)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("compress-signs")

# %% [markdown] lang="fr"
# Une erreur d’arrondi ordinaire tombe tantôt d’un côté, tantôt de l’autre : en moyenne, elle disparaît. Qu’en est-il
# ici ? Voici huit gradients équiprobables de deux poids. Celui du premier poids vaut 4 une fois sur quatre, sinon −1 :
# sa moyenne est +0,25, donc ce poids doit **diminuer**. Celui du second n’est que du bruit, ±2.

# %% [markdown] lang="en"
# An ordinary rounding error falls now to one side, now to the other: on average it vanishes. And here? Below are eight
# equally likely gradients of two weights. That of the first weight is 4 one time in four, else −1: its mean is +0.25,
# so this weight must **go down**. That of the second is mere noise, ±2.

# %% name="draws"
draws = torch.tensor([[first, second] for first in (4.0, -1.0, -1.0, -1.0) for second in (2.0, -2.0)])
print("mean gradient: // gradient moyen :", draws.mean(0).tolist())

# %% [markdown] lang="fr"
# **Votre prédiction.** L’échelle est la moyenne des deux valeurs absolues. Que reçoit-on en moyenne du gradient du
# premier poids, une fois compressé ?

# %% [markdown] lang="en"
# **Your prediction.** The scale is the mean of both magnitudes. What arrives on average of the first weight's gradient,
# once compressed?

# %% name="predict-arrives" stub="value"
lab.predict(
    "what-arrives",
    ### BEGIN SOLUTION
    1 / 4 * (4 + 2) / 2 - 3 / 4 * (1 + 2) / 2,
    ### END SOLUTION
)

# %% name="reveal-arrives"
arrives = torch.stack([compress(draw) for draw in draws]).mean(0)
lab.reveal("what-arrives", arrives[0].item())

# %% [markdown] lang="fr"
# Le signe s’est inversé : en moyenne, le premier poids ira dans le **mauvais sens**. C’est un **biais**.
#
# ### Exercice 2 — le biais
#
# `draws` contient un gradient par ligne. Renvoyez, pour chaque poids, la moyenne de ce qui arrive, moins la moyenne de
# ce qui aurait dû arriver. Chaque gradient est compressé séparément, avec votre `compress`.

# %% [markdown] lang="en"
# The sign has flipped: on average the first weight will go the **wrong way**. It is a **bias**.
#
# ### Exercise 2 — the bias
#
# `draws` holds one gradient per row. Return, for each weight, the mean of what arrives, less the mean of what should
# have arrived. Each gradient is compressed by itself, with your `compress`.


# %% name="sign-bias"
def bias(draws):
    ### BEGIN SOLUTION
    arriving = torch.stack([compress(draw) for draw in draws])
    return arriving.mean(0) - draws.mean(0)
    ### END SOLUTION


lab.check("sign-bias", bias)

# %%
# lab.hint("sign-bias")

# %% [markdown] lang="fr"
# ## 2. Ne rien perdre
#
# Le remède tient en une idée : ce qu’un message laisse, le suivant l’emporte. On garde l’**erreur** de chaque
# compression, et on l’ajoute à ce qu’il faut envoyer la fois d’après (*error feedback*).
#
# ### Exercice 3 — compenser l’erreur
#
# `values` est le nouveau gradient, `error` ce que les messages précédents ont laissé, `compress` une compression (pas
# forcément la vôtre). Renvoyez deux tenseurs : ce qui est envoyé, et ce qui reste maintenant à envoyer.

# %% [markdown] lang="en"
# ## 2. Losing nothing
#
# The remedy is one idea: what one message leaves out, the next one carries. You keep the **error** of each compression,
# and add it to what you send next time (error feedback).
#
# ### Exercise 3 — feeding the error back
#
# `values` is the new gradient, `error` what earlier messages left out, `compress` a compression (not necessarily
# yours). Return two tensors: what is sent, and what is left to send.


# %% name="error-feedback"
def feed_back(values, error, compress):
    ### BEGIN SOLUTION
    corrected = values + error
    sent = compress(corrected)
    return sent, corrected - sent
    ### END SOLUTION


lab.check("error-feedback", feed_back)

# %%
# lab.hint("error-feedback")

# %% [markdown] lang="fr"
# Quatre cents pas, avec des gradients tirés parmi les huit, et vos deux fonctions :

# %% [markdown] lang="en"
# Four hundred steps, with gradients drawn among the eight, and your two functions:


# %% name="walk"
def walk(compress_step, rate=0.01):
    order = torch.randint(len(draws), (400,), generator=torch.Generator().manual_seed(9))
    weights, error, path = torch.zeros(2), torch.zeros(2), [0.0]
    for gradient in draws[order]:
        sent, error = compress_step(gradient, error)
        weights = weights - rate * sent
        path.append(weights[0].item())
    return path


exact, signs = (
    walk(lambda gradient, error: (gradient, error)),
    walk(lambda gradient, error: (compress(gradient), error)),
)
figures.walk(exact, signs, walk(lambda gradient, error: feed_back(gradient, error, compress)))

# %% [markdown] lang="fr"
# **Expliquez.** Pourquoi la courbe compensée ne s’éloigne-t-elle jamais de celle à 32 bits ?
#
# <details><summary>Réponse</summary>
#
# Parce que la somme de tout ce qui a été dit, plus la dernière erreur, est **exactement** la somme de ce que l’on
# voulait dire ; et l’erreur reste bornée. Chaque pas se trompe un peu, mais les pas suivants le corrigent.
#
# </details>
#
# Cela vaut pour une somme : SGD, ou le momentum d’Adam. La variance d’Adam, elle, est une moyenne de **carrés** :
# compenser l’erreur n’y peut rien.
#
# ## 3. L’*all-reduce* compressé
#
# Peut-on donner des bits à un *all-reduce* ? Non : il additionne en route, et une somme de signes n’est plus un signe.
# 1-bit Adam (Tang et al., 2021) fait donc autrement, en deux échanges. Chaque rang est **travailleur**, et aussi
# **serveur** d’un morceau du vecteur :
#
# 1. le travailleur coupe son vecteur en N morceaux, et envoie au serveur j le message du morceau j (*all-to-all*) ;
# 2. le serveur fait la moyenne des N messages reçus, la compresse à son tour, et la rend à tous (*all-gather*).
#
# On compresse donc deux fois, et l’on compense deux fois : `worker_error` sur le vecteur entier, `server_error` sur le
# morceau que l’on sert. `write(vecteur)` donne un message, des octets : huit signes par octet, et 4 octets d’échelle
# pour 2 048 nombres. `read(message)` rend le vecteur qu’il représente.

# %% [markdown] lang="en"
# **Explain.** Why does the curve with feedback never stray from the one with 32 bits?
#
# <details><summary>Answer</summary>
#
# Because the sum of all that was sent, plus the last error, is **exactly** the sum of what was meant; and the error
# stays bounded. Each step is a little wrong, but the steps after it make up for that.
#
# </details>
#
# That holds for a sum: SGD, or Adam's momentum. Adam's variance is a mean of **squares**: feeding the error back does
# not help.
#
# ## 3. The compressed all-reduce
#
# Can an all-reduce be given bits? No: it adds on the way, and a sum of signs is no sign any more. So 1-bit Adam (Tang
# et al., 2021) does otherwise, in two exchanges. Each rank is a **worker**, and also the **server** of one chunk of the
# vector:
#
# 1. the worker cuts its vector into N chunks, and sends to server j the message of chunk j (all-to-all);
# 2. the server takes the mean of the N messages that it receives, compresses it in turn, and gives it to all
#    (all-gather).
#
# So there are two compressions, and two errors to feed back: `worker_error` for the whole vector, `server_error` for
# the chunk that one serves. `write(vector)` gives a message, bytes: eight signs to a byte, and 4 bytes of scale for
# 2,048 numbers. `read(message)` gives the vector that it stands for.

# %% name="message"
numbers = torch.randn(2048, generator=torch.Generator().manual_seed(0))
message = write(numbers)
print("bytes, in the message: // octets, dans le message :", numbers.nbytes, message.nbytes)
print(f"÷ {decimal(numbers.nbytes / message.nbytes)}")
print("read back: // relu :", *(decimal(number, 2) for number in read(message)[:8].tolist()))

# %% [markdown] lang="fr"
# ### Exercice 4 — l’*all-reduce* compressé, sur les rangs
#
# Renvoyez la moyenne sur les rangs de `values`, un vecteur dont la longueur est un multiple de 8 fois le nombre de
# rangs. Mettez à jour les deux erreurs **en place** (`+=`, `-=`, `copy_`), et laissez `values` tel quel.
#
# - `worker_error.view(size, -1)` : un morceau par ligne, sans copie ;
# - `dist.all_to_all_single(reçu, donné)` : la ligne j de `donné` part au rang j ; la ligne i de `reçu` vient du rang
#   i ;
# - `dist.all_gather_into_tensor(tout, message)` met bout à bout les messages de tous ; `tout` et `message` doivent
#   avoir autant de dimensions (`message[None]` en ajoute une).
#
# Suivons un morceau de deux nombres, sur deux rangs, toutes erreurs nulles. Le rang 0 a (3, −1) : il envoie (2, −2) et
# garde l’erreur (1, 1). Le rang 1 a (1, 1), qu’il envoie sans erreur. Le serveur en fait la moyenne (1,5, −0,5), envoie
# (1, −1) à tous et garde l’erreur (0,5, 0,5). Rien n’est perdu : la vraie moyenne (2, 0) est ce que tous reçoivent,
# plus l’erreur du serveur, plus la moyenne des erreurs des travailleurs.

# %% [markdown] lang="en"
# ### Exercise 4 — the compressed all-reduce, on the ranks
#
# Return the mean over the ranks of `values`, a vector whose length is a multiple of 8 times the number of ranks. Update
# both errors **in place** (`+=`, `-=`, `copy_`), and leave `values` as it is.
#
# - `worker_error.view(size, -1)`: one chunk per row, without a copy;
# - `dist.all_to_all_single(received, given)`: row j of `given` leaves for rank j; row i of `received` comes from rank
#   i;
# - `dist.all_gather_into_tensor(everything, message)` lays the messages of all end to end; `everything` and `message`
#   must have as many dimensions (`message[None]` adds one).
#
# Follow one chunk of two numbers on two ranks, with all errors zero. Rank 0 has (3, −1): it sends (2, −2) and keeps the
# error (1, 1). Rank 1 has (1, 1), which it sends without an error. The server averages them to (1.5, −0.5), sends
# (1, −1) to all and keeps the error (0.5, 0.5). Nothing is lost: the true mean (2, 0) is what all receive, plus the
# server's error, plus the mean of the workers' errors.


# %% name="compressed-all-reduce"
def compressed_mean(values, worker_error, server_error):
    size = dist.get_world_size()
    ### BEGIN SOLUTION
    worker_error += values
    chunks = worker_error.view(size, -1)
    messages = torch.stack([write(chunk) for chunk in chunks])
    chunks -= torch.stack([read(message) for message in messages])
    received = torch.empty_like(messages)
    dist.all_to_all_single(received, messages)
    server_error += torch.stack([read(message) for message in received]).mean(0)
    answer = write(server_error)
    server_error -= read(answer)
    dist.all_gather_into_tensor(received, answer[None])
    return torch.cat([read(message) for message in received])
    ### END SOLUTION


lab.check("compressed-all-reduce", compressed_mean)

# %%
# lab.hint("compressed-all-reduce")

# %% [markdown] lang="fr"
# Sur quatre rangs, chaque rang envoie cent fois son vecteur. Chaque ligne donne le nombre d’appels, puis l’écart
# relatif entre la moyenne de tout ce qui est revenu et la vraie moyenne. La première fois, il faut quelques secondes
# pour démarrer les rangs.

# %% [markdown] lang="en"
# On four ranks let us send the same vector a hundred times. Each line gives the number of calls, then the relative
# distance between the mean of all that has come back and the true mean. The first time, starting the ranks takes a few
# seconds.

# %% name="hundred-calls" tags=["nbval-ignore-output"]
# %%ranks 4 --with compressed_mean
import warnings

from dlojz.base.language import decimal

# torch gives these collectives shorter names, too // torch donne aussi des noms plus courts à ces collectives
warnings.filterwarnings("ignore", category=FutureWarning)

values = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
truth = values.clone()
dist.all_reduce(truth)
truth /= world_size
worker_error, server_error, total = torch.zeros(4096), torch.zeros(1024), torch.zeros(4096)
for call in range(1, 101):
    total += compressed_mean(values, worker_error, server_error)
    if rank == 0 and call in (1, 10, 100):
        print(call, decimal((total / call - truth).norm() / truth.norm(), 3))

# %% [markdown] lang="fr"
# Un seul appel ne vaut pas grand-chose ; cent valent bien davantage. Rien n’est perdu, tout est différé.
#
# ## 4. Les octets, à la main
#
# ### Exercice 5 — ce qu’un rang envoie
#
# Combien d’octets chaque rang **envoie-t-il** pendant un *all-reduce* compressé de `parameters` nombres ? Chaque
# serveur sert autant de nombres que les autres : `parameters` / N, arrondi vers le haut, puis complété jusqu’à un
# multiple de 8. Son message compte un octet pour 8 nombres, et 4 octets pour 2 048 nombres, tout bloc entamé compte.
# On ne s’envoie rien à soi-même, et l’*all-gather* envoie autant que l’*all-to-all*.

# %% [markdown] lang="en"
# A single call is far off; the average of a hundred is close. Nothing is lost, all is put off.
#
# ## 4. The bytes, by hand
#
# ### Exercise 5 — what a rank sends
#
# How many bytes does each rank **send** in one compressed all-reduce of `parameters` numbers? Each server serves the
# same count of numbers: `parameters` / N, rounded up, then filled up to a multiple of 8. Its message has one byte for 8
# numbers, and 4 bytes for every 2,048 numbers begun. Nobody sends anything to itself, and the all-gather sends as much
# as the all-to-all.


# %% name="compressed-bytes"
def compressed_bytes(parameters, ranks):
    ### BEGIN SOLUTION
    chunk = 8 * math.ceil(math.ceil(parameters / ranks) / 8)
    message = chunk // 8 + 4 * math.ceil(chunk / 2048)
    return 2 * (ranks - 1) * message
    ### END SOLUTION


lab.check("compressed-bytes", compressed_bytes)

# %%
# lab.hint("compressed-bytes")

# %% [markdown] lang="fr"
# Un *all-reduce* en fp32 envoie 2 (N − 1) / N × 4Ψ octets : on en économise 97 %, la valeur que donne le cours. Mais
# l’optimiseur doit d’abord faire quelques pas ordinaires (le *warm-up* ; on verra pourquoi), qui envoient tout.
#
# **Votre prédiction.** Un *warm-up* d’un quart de l’entraînement : combien de fois moins d’octets l’entraînement entier
# envoie-t-il ?

# %% [markdown] lang="en"
# An all-reduce in fp32 sends 2 (N − 1) / N × 4Ψ bytes: 97% of them are saved, the figure that the course gives. But the
# optimizer must first make some ordinary steps (the warm-up; we shall see why), which send everything.
#
# **Your prediction.** A warm-up of one quarter of the training: how many times fewer bytes does the whole training
# send?

# %% name="predict-fewer" stub="value"
lab.predict(
    "times-fewer",
    ### BEGIN SOLUTION
    1 / (0.25 + 0.75 * 0.03),
    ### END SOLUTION
)

# %% name="reveal-fewer"
from dlojz.by_hand.optimizers.sent_bytes import saved_share

lab.reveal("times-fewer", 1 / (0.25 + 0.75 * (1 - saved_share(875_000, ranks=2))))

# %% [markdown] lang="fr"
# C’est le *warm-up* qui domine. L’article (Tang et al., 2021) annonce « jusqu’à 5 fois moins » : un *warm-up* de 15 %,
# face à des messages en **fp16**. Face à fp32, comme ici, il donne un peu plus :

# %% [markdown] lang="en"
# It is the warm-up that matters. The paper (Tang et al., 2021) announces “up to 5 times less”: a warm-up of 15%,
# against messages in **fp16**. Against fp32, as here, it gives somewhat more:

# %% name="warm-up"
for precision, bits in (("fp16", 16), ("fp32", 32)):
    print(f"{precision}: bytes ÷ // {precision} : octets ÷", decimal(1 / (0.15 + 0.85 / bits)))

# %% [markdown] lang="fr"
# ### Et en secondes ?
#
# Un message de n octets met α + β n secondes. Mesurons α et β de l’*all-reduce* entre deux rangs de cette machine :

# %% [markdown] lang="en"
# ### And in seconds?
#
# A message of n bytes takes α + β n. Let us measure α and β of the all-reduce between two ranks of this machine:

# %% name="measure-link" tags=["nbval-ignore-output"]
# %%ranks 2
import statistics
import time

from dlojz.base.language import decimal


def seconds(act):
    dist.barrier()
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def message_s(numbers):
    message = torch.zeros(numbers)
    return seconds(lambda: dist.all_reduce(message))


pairs = [(message_s(2), message_s(2**21)) for _ in range(25)]  # in turns // à tour de rôle
alpha = statistics.median(pair[0] for pair in pairs)
beta = statistics.median(pair[1] - pair[0] for pair in pairs) / (4 * 2**21)
print(f"alpha = {decimal(1e6 * alpha, 0)} µs, 1 / beta = {decimal(1e-6 / beta, 0)}", "MB/s // Mo/s")

# %% [markdown] lang="fr"
# **Vos prédictions.** Un message d’un million de nombres (2²⁰, en fp32) : combien de fois plus vite passe-t-il, s’il a
# 3 fois moins d’octets ? Et 32 fois moins ? `ranks["alpha"][0]` et `ranks["beta"][0]` sont les mesures du rang 0, en
# secondes et en secondes par octet.

# %% [markdown] lang="en"
# **Your predictions.** A message of a million numbers (2²⁰, in fp32): how many times as fast does it pass, if it has a
# third of the bytes? And a 32nd? `ranks["alpha"][0]` and `ranks["beta"][0]` are the measurements of rank 0, in seconds
# and in seconds per byte.

# %% name="predict-third" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "third-of-the-bytes",
    ### BEGIN SOLUTION
    (ranks["alpha"][0] + ranks["beta"][0] * 2**22) / (ranks["alpha"][0] + ranks["beta"][0] * 2**22 / 3),
    ### END SOLUTION
)

# %% name="predict-32nd" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "32nd-of-the-bytes",
    ### BEGIN SOLUTION
    (ranks["alpha"][0] + ranks["beta"][0] * 2**22) / (ranks["alpha"][0] + ranks["beta"][0] * 2**22 / 32),
    ### END SOLUTION
)

# %% name="measure-messages" tags=["nbval-ignore-output"]
# %%ranks
from dlojz.base.language import decimal

rounds = [[message_s(2**20 // fewer) for fewer in (1, 3, 32)] for _ in range(21)]  # in turns // à tour de rôle
third, least = (statistics.median(times_s[0] / times_s[index] for times_s in rounds[1:]) for index in (1, 2))
print("a third, a 32nd of the bytes: // un tiers, un 32ᵉ des octets :", f"× {decimal(third)}, × {decimal(least)}")

# %% name="reveal-third" tags=["nbval-ignore-output"]
lab.reveal("third-of-the-bytes", ranks["third"][0])

# %% name="reveal-32nd" tags=["nbval-ignore-output"]
lab.reveal("32nd-of-the-bytes", ranks["least"][0])

# %% [markdown] lang="fr"
# Attendez-vous à 1,5–3, puis à bien moins de 32 : α reste, et grandit quand la machine est occupée. Et empaqueter les
# bits prend du temps. Votre `compressed_mean` à côté de l’*all-reduce* : en dessous de quel débit du lien est-elle
# rentable ?

# %% [markdown] lang="en"
# Expect 1.5–3, then far less than 32: α stays, and grows while the machine is busy. And packing bits takes time. Your
# `compressed_mean` beside the all-reduce: below which rate of the link does it pay?

# %% name="pays-below" tags=["nbval-ignore-output"]
# %%ranks --with compressed_mean
import warnings

from dlojz.base.language import decimal

warnings.filterwarnings("ignore", category=FutureWarning)
values, worker_error, server_error = torch.randn(2**20), torch.zeros(2**20), torch.zeros(2**19)
ours = statistics.median(seconds(lambda: compressed_mean(values, worker_error, server_error)) for _ in range(7))
packing = ours - alpha - beta * 2**22 / 32
plain = statistics.median(times_s[0] for times_s in rounds)
print("compressed, all-reduce: // compressé, all-reduce :", f"{decimal(1e3 * ours)} ms, {decimal(1e3 * plain)} ms")
print("it pays below // rentable sous", decimal(1e-6 * (1 - 1 / 32) * 2**22 / packing, 0), "MB/s // Mo/s")

# %% [markdown] lang="fr"
# ### Dans DDP
#
# DDP donne chaque *bucket* de gradients à un **hook de communication**, qui renvoie un *future* de leur moyenne :
# `register_comm_hook(état, hook)`. Votre `compressed_mean`, sur de vrais chiffres manuscrits, dont une étiquette sur
# cinq est tirée au hasard (les gradients restent bruités) :

# %% [markdown] lang="en"
# ### In DDP
#
# DDP hands each bucket of gradients to a **communication hook**, which returns a future of their mean:
# `register_comm_hook(state, hook)`. Your `compressed_mean`, on real handwritten digits, one label in five of which is
# drawn at random (gradients stay noisy):

# %% name="digits"
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
chance = torch.Generator().manual_seed(0)
wrong = torch.rand(1797, generator=chance) < 0.2
labels = torch.where(wrong, torch.randint(10, (1797,), generator=chance), torch.tensor(digits.target))
STEPS, BETA2 = 120, 0.95


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


# %% name="comm-hook" tags=["nbval-ignore-output"]
# %%ranks --with compressed_mean,make_model,images,labels,STEPS
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dlojz.base.language import decimal


def hook(errors, bucket):
    gradient = bucket.buffer()
    padded = F.pad(gradient, (0, -len(gradient) % (8 * world_size)))
    if not errors:
        errors += [torch.zeros(len(padded)), torch.zeros(len(padded) // world_size)]
    mean = torch.futures.Future()
    mean.set_result(compressed_mean(padded, *errors)[: len(gradient)])
    return mean


def train_ddp(compressed):
    model, losses = DistributedDataParallel(make_model(0)), []
    if compressed:
        model.register_comm_hook([], hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    order = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (64,), generator=order)[rank::world_size]
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-20:])


last = {name: train_ddp(name == "hook") for name in ("DDP", "hook")}
print("last losses, by DDP, with your hook: // dernières pertes, DDP, votre hook :", end=" ")
print(decimal(last["DDP"], 2), decimal(last["hook"], 2))

# %% [markdown] lang="fr"
# ## 5. Quand geler la variance
#
# Le momentum se compresse ; la variance, non. Mais au bout d’un moment elle ne change plus guère. D’où **1-bit Adam** :
#
# - d’abord Adam, sans rien changer, gradients envoyés en entier ;
# - ensuite la variance est **gelée** ; chaque rang met à jour son momentum avec son propre gradient, et c’est le
#   momentum que l’on moyenne, compressé.
#
# Quand passer de l’un à l’autre ? Une moyenne glissante de facteur β2 se souvient d’environ Δ = 1/(1 − β2) pas. On
# compare donc sa norme à celle d’il y a Δ pas.
#
# ### Exercice 6 — le pas du gel
#
# `norms[t]` est la norme de la variance après le pas t. Renvoyez le premier pas t ≥ Δ, avec Δ = 1/(1 − `beta2`)
# arrondi, tel que la plus petite des normes des pas t − Δ et t, divisée par la plus grande, vaille au moins
# `threshold`. S’il n’y en a pas, renvoyez `len(norms)` : on ne gèle pas.

# %% [markdown] lang="en"
# ## 5. When the variance may be frozen
#
# The momentum can be compressed; the variance cannot. But after a while it hardly changes. Hence **1-bit Adam**:
#
# - first Adam, with nothing changed, gradients sent in full;
# - then the variance is **frozen**; each rank updates its momentum with its own gradient, and it is the momentum that
#   is averaged, compressed.
#
# When to go from one to the other? A moving average with decay β2 remembers some Δ = 1/(1 − β2) steps. So its norm is
# compared with that of Δ steps ago.
#
# ### Exercise 6 — the step of freezing
#
# `norms[t]` is the norm of the variance after step t. Return the first step t ≥ Δ, with Δ = 1/(1 − `beta2`) rounded,
# where the ratio of the smaller to the larger of the norms of steps t − Δ and t is at least `threshold`. Where there is
# none, return `len(norms)`: nothing is frozen.


# %% name="freeze-step"
def freeze_step(norms, beta2, threshold):
    ### BEGIN SOLUTION
    delta = round(1 / (1 - beta2))
    for step in range(delta, len(norms)):
        before, now = norms[step - delta], norms[step]
        if min(before, now) / max(before, now) >= threshold:
            return step
    return len(norms)
    ### END SOLUTION


lab.check("freeze-step", freeze_step)

# %%
# lab.hint("freeze-step")

# %% [markdown] lang="fr"
# Essayons, sur les mêmes chiffres, avec cinq graines. La variance est gelée au pas 5, 15 ou 60, ou jamais (c’est alors
# Adam). `OneBitAdam` est celui du paquet ([adam.py](../../dlojz/by_hand/optimizers/adam.py)) : lisez-le, les lignes de
# l’algorithme y sont nommées.

# %% [markdown] lang="en"
# Let us try, on the same digits, with five seeds. The variance is frozen at step 5, 15 or 60, or never (that is Adam
# then). `OneBitAdam` is the package's ([adam.py](../../dlojz/by_hand/optimizers/adam.py)): read it, the algorithm's
# lines are named there.

# %% name="freezing-runs" tags=["nbval-ignore-output"]
# %%ranks --with make_model,images,labels,STEPS,BETA2 --limit 300
import warnings

import torch.nn.functional as F

from dlojz.by_hand.optimizers.adam import OneBitAdam

warnings.filterwarnings("ignore")


def train(seed, warmup_steps):
    model, losses, norms = make_model(seed), [], []
    optimizer = OneBitAdam(model.parameters(), lr=0.01, betas=(0.9, BETA2), warmup_steps=warmup_steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (64,), generator=order)[rank::world_size]
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        model.zero_grad()
        loss.backward()
        optimizer.step()  # averages over the ranks itself // fait lui-même la moyenne sur les rangs
        norms.append(sum(state["exp_avg_sq"].sum().item() for state in optimizer.state.values()))
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses, norms


curves, norms = {}, []
for warmup_steps in (5, 15, 60, STEPS):
    results = [train(seed, warmup_steps) for seed in range(5)]
    curves[warmup_steps] = torch.tensor([losses for losses, _ in results])
    norms = torch.tensor([row for _, row in results])

# %% name="freezing" tags=["nbval-ignore-output"]
curves, norms = ranks["curves"][0], ranks["norms"][0]
ends = {warmup_steps: losses[:, -12:].mean(1).tolist() for warmup_steps, losses in curves.items()}
figures.freezing(norms.tolist(), ends, freeze_step, BETA2, threshold=0.9)

# %% [markdown] lang="fr"
# **Expliquez.** Que se passe-t-il quand on gèle au pas 5 ? Au pas 15 ? Et passé le pas que désigne votre critère ?
#
# <details><summary>Réponse</summary>
#
# Gelée au pas 5, la variance est encore trop petite : les pas sont trop grands, et la plupart des entraînements
# s’égarent, ou divergent. Au pas 15, ils aboutissent, parfois plus vite qu’Adam : c’est un pari, qu’une autre graine
# peut perdre. Passé le pas que désigne votre critère, la perte est à peu près celle d’Adam.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** What happens where the variance is frozen at step 5? At step 15? And past the step that your criterion
# names?
#
# <details><summary>Answer</summary>
#
# Frozen at step 5, the variance is still too small: steps are too long, and most trainings go astray or diverge. At
# step 15 they arrive, sometimes sooner than Adam: that is a gamble, which another seed may lose. Past the step that
# your criterion names, the loss is about Adam's.
#
# </details>

# %% [markdown] lang="fr"
# ## 6. Un vrai entraînement
#
# Le décodeur `gpt_tiny`, sur du vrai texte, deux rangs : AdamW, puis 1-bit Adam. **Vos prédictions.** Quelle part des
# octets un pas compressé économise-t-il, entre 0 et 1 ? Et combien d’octets chaque rang garde-t-il en plus pour la
# compensation, c’est-à-dire les erreurs du travailleur (Ψ nombres) et du serveur (Ψ/N nombres) ?

# %% [markdown] lang="en"
# ## 6. A real training
#
# The decoder `gpt_tiny`, on real text, two ranks: AdamW, then 1-bit Adam. **Your predictions.** What share of the bytes
# does a compressed step save, from 0 to 1? And how many bytes does each rank keep besides, for the errors of the worker
# (Ψ numbers) and of the server (Ψ/N numbers)?

# %% name="predict-saved" stub="value"
config = dlojz.RunConfig.of(
    model="gpt_tiny", sequence_length=64, engine="by_hand", dp=2, micro_batch=4, steps=24, device="cpu"
)
parameters = sum(parameter.numel() for parameter in models.build("gpt_tiny", sequence_length=64).parameters())
lab.predict(
    "share-saved",
    ### BEGIN SOLUTION
    1 - compressed_bytes(parameters, 2) / (4 * parameters),
    ### END SOLUTION
)

# %% name="predict-errors" stub="value"
lab.predict(
    "error-bytes",
    ### BEGIN SOLUTION
    4 * (parameters + parameters / 2),
    ### END SOLUTION
)

# %% name="run-compressed" tags=["nbval-ignore-output"]
plain = dlojz.run(config, optimizer="adamw")
one_bit = dlojz.run(config, optimizer="one_bit_adam")


# %% name="reveal-saved"
def sent_by(run):
    return sum(traffic.sent_bytes for traffic in run.record.footprint().communication if traffic.group == "dp")


lab.reveal("share-saved", 1 - sent_by(one_bit) / sent_by(plain))

# %% name="reveal-errors"
optimizer_bytes = [run.record.footprint().memory.optimizer_bytes for run in (plain, one_bit)]
lab.reveal("error-bytes", optimizer_bytes[1] - optimizer_bytes[0])

# %% name="sent-and-kept"
figures.sent_and_kept([plain, one_bit])

# %% [markdown] lang="fr"
# La compression épargne le réseau, mais prend de la mémoire : 4Ψ (1 + 1/N) octets. Les pertes du *warm-up*, et celle du
# pas suivant, sont-elles celles d’AdamW **au bit près** ? Et après ?

# %% [markdown] lang="en"
# Compression spares the network, but takes memory: 4Ψ (1 + 1/N) bytes. Are the losses of the warm-up, and that of the
# step after, those of AdamW **to the bit**? And afterwards?


# %% name="compressed-seen"
def beside(plainly, compressed):
    warm = compressed.config.warmup_steps + 1
    print("bytes as predicted: // octets comme prédit :", yes_no(dlojz.compare([plainly, compressed]).exact))
    same = compressed.losses[:warm] == plainly.losses[:warm]
    print("same losses in the warm-up: // mêmes pertes pendant l’échauffement :", yes_no(same))
    same = compressed.losses[warm:] == plainly.losses[warm:]
    print("same losses afterwards: // mêmes pertes ensuite :", yes_no(same))


beside(plain, one_bit)

# %% [markdown] lang="fr"
# ### LAMB et 1-bit LAMB
#
# Conçu pour de très grands batches, **LAMB** (You et al., 2020) est un Adam dont le pas, dans chaque couche, est
# proportionnel à la norme de ses poids. Avec u la mise à jour d’Adam :
#
# $$x \leftarrow x - \gamma\, c\, u, \qquad c = \text{clip}\left(\frac{\|x\|}{\|u\|}, c_{min}, c_{max}\right)$$
#
# c est le *trust ratio*. Le voici, sur un rang, pour un batch de 512 :

# %% [markdown] lang="en"
# ### LAMB and 1-bit LAMB
#
# **LAMB** (You et al., 2020) is Adam with the step of each layer in proportion to the norm of its weights, for very
# large batches. With u the update of Adam:
#
# $$x \leftarrow x - \gamma\, c\, u, \qquad c = \text{clip}\left(\frac{\|x\|}{\|u\|}, c_{min}, c_{max}\right)$$
#
# c is the trust ratio. Here it is, on one rank, for a batch of 512:


# %% name="lamb" tags=["nbval-ignore-output"]
def lamb_step(model, states, rate=0.02, betas=(0.9, 0.95), c_min=0.01, c_max=10.0):
    ratios = []
    for x in model.parameters():
        state = states.setdefault(x, {"t": 0, "m": torch.zeros_like(x), "v": torch.zeros_like(x)})
        state["t"] += 1
        state["m"].lerp_(x.grad, 1 - betas[0])
        state["v"].lerp_(x.grad**2, 1 - betas[1])
        u = state["m"] / (1 - betas[0] ** state["t"])
        u = u / ((state["v"] / (1 - betas[1] ** state["t"])).sqrt() + 1e-6)
        ratios.append((x.norm() / u.norm()).clamp(c_min, c_max).item())
        x.sub_(rate * ratios[-1] * u)
    return ratios


model, states = make_model(0), {}
for step in range(40):
    batch = torch.randint(len(images), (512,), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    with torch.no_grad():
        ratios = lamb_step(model, states)
    if step % 13 == 0:
        print(f"step {step}: loss // pas {step} : perte", decimal(loss.item(), 2), end=", c ")
        print(*(decimal(c, 2) for c in ratios))

# %% [markdown] lang="fr"
# Une fois la variance gelée, les c le seraient aussi : **1-bit LAMB** (Li et al., 2021) les corrige couche par couche,
# en comparant la variance gelée à une variance reconstituée ([lamb.py](../../dlojz/by_hand/optimizers/lamb.py)). Les
# deux, sur le même décodeur :

# %% [markdown] lang="en"
# Once the variance is frozen, the c would be frozen too: **1-bit LAMB** (Li et al., 2021) corrects them layer by layer,
# comparing the frozen variance with one that it builds again ([lamb.py](../../dlojz/by_hand/optimizers/lamb.py)). Both,
# on the same decoder:

# %% name="run-lamb" tags=["nbval-ignore-output"]
lamb = dlojz.run(config, optimizer="lamb", learning_rate=0.01)
one_bit_lamb = dlojz.run(config, optimizer="one_bit_lamb", learning_rate=0.01)
print("last loss, LAMB, 1-bit LAMB: // dernière perte, LAMB, 1-bit LAMB :", end=" ")
print(decimal(lamb.losses[-1], 2), decimal(one_bit_lamb.losses[-1], 2))

# %% name="lamb-seen"
beside(lamb, one_bit_lamb)

# %% [markdown] lang="fr"
# **0/1 Adam** (Lu et al., 2022) n’attend pas la fin d’un *warm-up* : la variance est renouvelée de plus en plus
# rarement, et entre deux synchronisations les rangs font des pas locaux.
#
# ## 7. La mise à jour, en un seul noyau
#
# Restent les optimiseurs **fusionnés**. Adam fait une dizaine d’opérations par paramètre, mais déplace bien plus
# d’octets : la mémoire fixe son rythme. `for_loop` lance un noyau par opération et par tenseur ; `foreach` groupe les
# tenseurs : moins de lancements, mais autant de lectures ; `fused` fait tout en un seul noyau.
#
# ### Exercice 7 — lectures et écritures
#
# `operations` est la liste, dans l’ordre, des opérations d’une mise à jour : des couples (tenseurs lus, tenseurs
# écrits), désignés par leurs noms. `states` contient les noms des tenseurs présents avant et après ; les autres sont
# temporaires. Renvoyez les octets déplacés **par paramètre**, en fp32 : un noyau par opération, puis un seul noyau pour
# tout. Un noyau lit un tenseur une fois, même si une opération le nomme deux fois (g · g). Le noyau unique lit un état
# la première fois qu’il en a besoin, sauf s’il vient de le calculer, et écrit à la fin chaque état modifié ; les
# temporaires restent dans les registres.

# %% [markdown] lang="en"
# **0/1 Adam** (Lu et al., 2022) does not wait for the end of a warm-up: the variance is renewed less and less often,
# and between two synchronisations the ranks make local steps.
#
# ## 7. The update, in one kernel
#
# There remain the **fused** optimizers. Adam makes some ten operations per parameter, but moves far more bytes: memory
# sets its pace. `for_loop` launches a kernel per operation and tensor; `foreach` groups the tensors: fewer launches,
# but as many reads; `fused` does everything in one kernel.
#
# ### Exercise 7 — reads and writes
#
# `operations` is the list, in order, of an update's operations: pairs (tensors read, tensors written), given by their
# names. `states` holds the names of the tensors that are there before and after; the others are temporary. Return the
# bytes moved **per parameter**, in fp32: one kernel per operation, then one kernel for all. A kernel reads a tensor
# once, even if an operation names it twice (g · g). The one for all reads a state the first time that it needs it,
# unless it has just computed it, and writes at the end each state that was changed; temporaries stay in registers.


# %% name="fused-traffic"
def update_traffic(operations, states):
    ### BEGIN SOLUTION
    separate = 4 * sum(len(set(reads)) + len(set(writes)) for reads, writes in operations)
    needed, changed = set(), set()
    for reads, writes in operations:
        needed |= (set(reads) & set(states)) - changed
        changed |= set(writes) & set(states)
    return separate, 4 * (len(needed) + len(changed))
    ### END SOLUTION


lab.check("fused-traffic", update_traffic)

# %%
# lab.hint("fused-traffic")

# %% [markdown] lang="fr"
# Voici Adam, tel que PyTorch l’écrit pour un tenseur : `p` sont les poids, `g` le gradient, `m` et `v` les moments, `t`
# un temporaire. **Votre prédiction.** Quand la mémoire fixe le rythme, combien de fois plus vite la mise à jour
# fusionnée peut-elle aller, au mieux ?

# %% [markdown] lang="en"
# Here is Adam, as PyTorch writes it for one tensor: `p` are the weights, `g` the gradient, `m` and `v` the moments, `t`
# a temporary tensor. **Your prediction.** Where memory sets the pace, how many times faster can the fused update be at
# most?

# %% name="adam-operations"
from dlojz.labs.lab09_optimizers.exercises_updates import ADAM, ADAM_STATES

for reads, writes in ADAM:
    print(*reads, "→", *writes)

# %% name="predict-fused" stub="value"
lab.predict(
    "fused-gain",
    ### BEGIN SOLUTION
    72 / 28,
    ### END SOLUTION
)

# %% name="fused-bytes"
separate, fused = update_traffic(ADAM, ADAM_STATES)
print("bytes per parameter: // octets par paramètre :", separate, "fused: // fusionné :", fused)

# %% [markdown] lang="fr"
# La mesure, à tour de rôle, sur un tenseur de 16 Mio, trop grand pour les caches (attendez-vous à 2–4) :

# %% [markdown] lang="en"
# The measurement, in turns, on a tensor of 16 MiB, too large for the caches (expect 2–4):

# %% name="measure-forms" tags=["nbval-ignore-output"]
p = nn.Parameter(torch.zeros(2**22))
p.grad = torch.ones(2**22)
fused_adam = torch.optim.AdamW([p], fused=True)
x, g, m, v, t = (torch.ones(2**22) for _ in range(5))


def by_operation():
    m.lerp_(g, 0.1)
    v.mul_(0.999)
    v.addcmul_(g, g, value=0.001)
    torch.sqrt(v, out=t)
    t.div_(0.5)
    t.add_(1e-8)
    x.addcdiv_(m, t, value=-1e-3)


def seconds(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


rounds = [(seconds(by_operation), seconds(fused_adam.step)) for _ in range(20)][2:]
apart_ms, fused_ms = (1e3 * statistics.median(times_s[index] for times_s in rounds) for index in (0, 1))
print("operation by operation, fused: // opération par opération, fusionné :", end=" ")
print(f"{decimal(apart_ms)} ms, {decimal(fused_ms)} ms")

# %% name="reveal-fused" tags=["nbval-ignore-output"]
lab.reveal("fused-gain", statistics.median(apart / fused for apart, fused in rounds))

# %% [markdown] lang="fr"
# ### Et le pas entier ?
#
# Dans `gpt_tiny`, les tenseurs sont petits et nombreux. Sur un échantillon de 32 octets :

# %% [markdown] lang="en"
# ### And the whole step?
#
# In `gpt_tiny` tensors are small, and many. On one sample of 32 bytes:


# %% name="measure-update" tags=["nbval-ignore-output"]
FORMS = {"for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
few = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(2))


def few_loss(model):
    return F.cross_entropy(model(few[:, :-1]).flatten(0, 1), few[:, 1:].flatten())


decoders = {form: models.build("gpt_tiny") for form in FORMS}
steps = {form: torch.optim.AdamW(decoders[form].parameters(), **options) for form, options in FORMS.items()}


def one_step(form):
    passes_s = seconds(lambda: few_loss(decoders[form]).backward())
    update_s = seconds(steps[form].step) if form in steps else 0.0
    decoders[form].zero_grad()
    return passes_s, update_s


rounds = [{form: one_step(form) for form in decoders} for _ in range(12)][2:]
share = statistics.median(times_s["for_loop"][1] / sum(times_s["for_loop"]) for times_s in rounds)
gain = statistics.median(times_s["for_loop"][1] / times_s["fused"][1] for times_s in rounds)
print("for_loop: update / step // for_loop : mise à jour / pas", decimal(share, 2))
print("fused update: // mise à jour fusionnée :", f"× {decimal(gain)}")

# %% [markdown] lang="fr"
# **Votre prédiction.** D’après `share` et `gain`, combien de fois plus vite le pas **entier** va-t-il avec `fused` ?

# %% [markdown] lang="en"
# **Your prediction.** From `share` and `gain`, how many times as fast is the **whole** step with `fused`?

# %% name="predict-step" stub="value" tags=["nbval-ignore-output"]
lab.predict(
    "step-gain",
    ### BEGIN SOLUTION
    1 / (1 - share + share / gain),
    ### END SOLUTION
)

# %% name="reveal-step" tags=["nbval-ignore-output"]
rounds = [{form: sum(one_step(form)) for form in decoders} for _ in range(20)]
lab.reveal("step-gain", statistics.median(times_s["for_loop"] / times_s["fused"] for times_s in rounds))

# %% [markdown] lang="fr"
# Le facteur 2,6 vaut quand la mémoire fixe le rythme. Ici, ce qui coûte, c’est de lancer chaque opération sur chaque
# petit tenseur : `fused` en lance une au lieu de sept, et peut gagner bien davantage. Mais le pas entier ne gagne
# qu’en proportion de ce que la mise à jour y pèse : presque rien avec un grand batch.
#
# ## 8. L’optimiseur dans la passe arrière
#
# Jiang et al. (2021) vont plus loin : pourquoi attendre la fin de la passe arrière ? Dès que le gradient d’un paramètre
# est prêt, on met ce paramètre à jour, et on libère le gradient.
#
# ### Exercice 8 — mettre à jour dans la passe arrière
#
# Faites en sorte que `loss.backward()` mette lui-même à jour les paramètres de `model`, et libère leurs gradients.
# `make_optimizer([tenseur])` crée un optimiseur pour ce tenseur. Ne renvoyez rien.
#
# - `parameter.register_post_accumulate_grad_hook(fonction)` : `fonction(parameter)` est appelée dès que
#   `parameter.grad` est complet.

# %% [markdown] lang="en"
# The factor of 2.6 holds where memory sets the pace. Here, what takes time is to launch each operation on each small
# tensor: `fused` launches one instead of seven, and may gain a good deal more. But the whole step gains only in
# proportion to the update's share of it: next to nothing with a large batch.
#
# ## 8. The optimizer in the backward pass
#
# Jiang et al. (2021) go further: why wait for the end of the backward pass? As soon as a parameter's gradient is there,
# the parameter is updated, and the gradient freed.
#
# ### Exercise 8 — updating in the backward pass
#
# See to it that `loss.backward()` itself updates the parameters of `model`, and frees their gradients.
# `make_optimizer([tensor])` makes an optimizer for this tensor. Return nothing.
#
# - `parameter.register_post_accumulate_grad_hook(function)`: `function(parameter)` is called as soon as
#   `parameter.grad` is complete.


# %% name="update-in-backward"
def update_in_backward(model, make_optimizer):
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        parameter_optimizer = make_optimizer([parameter])

        def update(parameter, parameter_optimizer=parameter_optimizer):
            parameter_optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    ### END SOLUTION


lab.check("update-in-backward", update_in_backward)

# %%
# lab.hint("update-in-backward")

# %% [markdown] lang="fr"
# **Votre prédiction.** Dans `gpt_tiny`, combien d’octets de gradients sont alors présents en même temps, au plus ? La
# cellule suivante donne le nombre de paramètres et les cinq plus grands tenseurs. Plus bas, `watch_gradients` compte
# ces octets : un *hook* de chaque paramètre, appelé dès que son gradient est complet, fait la somme de tous les `.grad`
# présents.

# %% [markdown] lang="en"
# **Your prediction.** In `gpt_tiny`, how many bytes of gradients are then there at once, at most? The next cell gives
# the number of parameters and the five largest tensors. Further down, `watch_gradients` counts these bytes: a hook of
# each parameter, called as soon as its gradient is complete, sums all `.grad` that are there.

# %% name="sizes"
sizes = sorted((parameter.numel() for parameter in models.build("gpt_tiny").parameters()), reverse=True)
print("parameters; the largest tensors: // paramètres ; les plus grands tenseurs :", sum(sizes), sizes[:5])

# %% name="predict-at-once" stub="value"
lab.predict(
    "gradients-at-once",
    ### BEGIN SOLUTION
    4 * sizes[0],
    ### END SOLUTION
)

# %% name="reveal-at-once"
tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))


def decoder_loss(model):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def watch(way=None):
    attach = way and (lambda model: way(model, lambda tensors: torch.optim.AdamW(tensors, lr=1e-3)))
    return watch_gradients(models.build("gpt_tiny"), decoder_loss, attach)


lab.reveal("gradients-at-once", max(watch(update_in_backward)))

# %% name="gradients-at-once"
figures.gradients_at_once(watch(), lambda: watch(update_in_backward))

# %% [markdown] lang="fr"
# Le prix : on perd la norme globale avant la mise à jour (donc l’écrêtage des gradients), et l’accumulation de
# micro-batches. Quant au temps, seule la mesure décide :

# %% [markdown] lang="en"
# The price: the global norm before the update is lost (so is the clipping of gradients), and so is the accumulation of
# micro-batches. As to time, only measuring decides:

# %% name="in-backward-seconds" tags=["nbval-ignore-output"]
decoders["in backward"] = models.build("gpt_tiny")
update_in_backward(decoders["in backward"], lambda tensors: torch.optim.AdamW(tensors, foreach=False))
rounds = [{form: sum(one_step(form)) for form in decoders} for _ in range(12)][2:]
for form in decoders:
    ratio = statistics.median(times_s["for_loop"] / times_s[form] for times_s in rounds)
    print(f"{form}: // {form} :", f"for_loop × {decimal(ratio, 2)}")

# %% [markdown] lang="fr"
# Il y a une troisième place : la passe **avant** suivante (Jiang et al., 2021). Le gradient attend, complet, que son
# module soit appelé : l’accumulation et l’écrêtage restent possibles. Dans une exécution, `update` choisit la forme.
# Avant de lancer la cellule : laquelle des deux allège le pic, et que reste-t-il de l’autre économie ? Les poids
# finaux sont-ils les mêmes, au bit près ?

# %% [markdown] lang="en"
# There is a third place: the next **forward** pass (Jiang et al., 2021). A gradient waits, complete, until its module
# is called: accumulation and clipping stay possible. In a run, `update` chooses the form. Before you run the cell:
# which of the two lowers the peak, and what is left of the other's saving? Are the final weights the same, to the bit?

# %% name="update-forms"
few = dlojz.RunConfig.of(model="gpt_tiny", sequence_length=32, micro_batch=2, engine="single", steps=4)
formed = {form: dlojz.run(few, update=form) for form in ("for_loop", "in_backward", "in_forward")}
for form, run in formed.items():
    predicted_bytes = dlojz.predict(run.config).memory.peak_bytes
    peaks = f"{format_bytes(predicted_bytes)} | {format_bytes(run.record.footprint().memory.peak_bytes)}"
    same = run.record.weights_sha256 == formed["for_loop"].record.weights_sha256
    print(f"{form:<12}", peaks, "same weights: // mêmes poids :", yes_no(same))

# %% [markdown] lang="fr"
# Prédit | mesuré. Dans la passe arrière il n’y a plus qu’un gradient à la fois ; dans la passe avant, tous attendent :
# seuls les temporaires de la mise à jour ne s’ajoutent plus à eux au même moment. Ce qu’on y gagne est ailleurs : le
# module lit de toute façon ses poids, qui viennent d’être mis à jour et sont encore dans le cache.

# %% [markdown] lang="en"
# Predicted | measured. In backward there is but one gradient at a time; in forward all of them wait, and only the
# temporaries of the update no longer come on top of them all. The gain lies elsewhere: the module reads its weights
# anyhow, which have just been updated and are still in the cache.

# %% [markdown] lang="fr"
# ## 9. Ne presque plus envoyer : Local SGD et DiLoCo
#
# On peut aussi envoyer plus rarement. **Local SGD** (Stich, 2018) : chaque rang fait H pas seul, puis on moyenne les
# poids. **DiLoCo** (Douillard et al., 2023) va plus loin : le déplacement moyen pendant ces H pas, changé de signe,
# tient lieu de gradient, le **gradient extérieur**, avec lequel on fait un pas de SGD avec momentum de Nesterov. En
# notant θ l’ancre (les poids au début du tour), wᵢ les poids du rang i après ses H pas :
#
# $$\Delta = \theta - \frac{1}{N}\sum_i w_i, \qquad u \leftarrow \mu u + \Delta, \qquad
# \theta \leftarrow \theta - \eta\,(\Delta + \mu u)$$
#
# ### Exercice 9 — le pas extérieur
#
# Mettez à jour **en place** les vecteurs `anchor` (θ), `momentum` (u) et `weights` (wᵢ) : à la fin, tous les rangs
# repartent de la nouvelle ancre. `rate` est η, `decay` est μ. Ne renvoyez rien. Les octets comptent aussi : un
# *all-reduce* aussi long que les poids suffit.

# %% [markdown] lang="en"
# ## 9. Sending almost nothing: local SGD and DiLoCo
#
# One can also send more seldom. **Local SGD** (Stich, 2018): each rank makes H steps alone, then the weights are
# averaged. **DiLoCo** (Douillard et al., 2023) goes further: the average displacement over these H steps, with its sign
# changed, is taken for a gradient, the **outer gradient**, with which one makes a step of SGD with Nesterov momentum.
# With θ the anchor (the weights at the beginning of the round) and wᵢ the weights of rank i after its H steps:
#
# $$\Delta = \theta - \frac{1}{N}\sum_i w_i, \qquad u \leftarrow \mu u + \Delta, \qquad
# \theta \leftarrow \theta - \eta\,(\Delta + \mu u)$$
#
# ### Exercise 9 — the outer step
#
# Update **in place** the vectors `anchor` (θ), `momentum` (u) and `weights` (wᵢ): at the end all ranks go on from the
# new anchor. `rate` is η, `decay` is μ. Return nothing. Bytes count, too: one all-reduce as long as the weights is
# enough.


# %% name="outer-step"
def outer_step(weights, anchor, momentum, rate, decay):
    size = dist.get_world_size()
    ### BEGIN SOLUTION
    gradient = anchor - weights
    dist.all_reduce(gradient)
    gradient /= size
    momentum.mul_(decay).add_(gradient)
    anchor -= rate * (gradient + decay * momentum)
    weights.copy_(anchor)
    ### END SOLUTION


lab.check("outer-step", outer_step)

# %%
# lab.hint("outer-step")

# %% [markdown] lang="fr"
# **Votre prédiction.** Le même décodeur, deux rangs, DiLoCo avec H = 4 : combien d’octets chaque rang envoie-t-il **par
# pas**, en moyenne ?

# %% [markdown] lang="en"
# **Your prediction.** The same decoder, two ranks, DiLoCo with H = 4: how many bytes does each rank send **per step**,
# on average?

# %% name="predict-diloco" stub="value"
lab.predict(
    "diloco-bytes",
    ### BEGIN SOLUTION
    4 * parameters / 4,
    ### END SOLUTION
)

# %% name="run-diloco" tags=["nbval-ignore-output"]
diloco = dlojz.run(config, optimizer="diloco", local_steps=4)
halved = dlojz.run(config, engine="torch", gradient_compression="fp16")

# %% name="reveal-diloco"
lab.reveal("diloco-bytes", sent_by(diloco) / diloco.config.local_steps)

# %% [markdown] lang="fr"
# Voici quatre entraînements ; l’un d’eux est DDP avec un *hook* de PyTorch, qui envoie les gradients en fp16. À
# gauche, les octets par pas et l’écart de perte avec AdamW ; le trait pointillé mène à ce que l’on enverrait après le
# *warm-up*. À droite, la durée d’un pas selon le débit du lien : la durée mesurée ici, plus α + β n par message.

# %% [markdown] lang="en"
# Here are four trainings; one of them is DDP with one of PyTorch's hooks, which sends gradients in fp16. On the left,
# the bytes per step and the gap of the loss to AdamW; the dotted line leads to what would be sent after the warm-up. On
# the right, the time of a step by the bandwidth of the link: the time measured here, plus α and β of the messages.

# %% name="board" tags=["nbval-ignore-output"]
figures.board([plain, halved, one_bit, diloco])

# %% [markdown] lang="fr"
# **Expliquez.** Où la compression est-elle rentable ? 24 pas ne disent presque rien de la perte.
#
# <details><summary>Réponse</summary>
#
# Là où le lien est lent : sur un réseau rapide, empaqueter des bits prend plus de temps qu’envoyer les nombres. Pour la
# perte, PowerSGD compris : `python benchmarks/communication_board.py`.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** Where does compression pay? 24 steps tell next to nothing about the loss.
#
# <details><summary>Answer</summary>
#
# Where the link is slow: on a fast network, packing bits takes more time than sending the numbers. For the loss, with
# PowerSGD too: `python benchmarks/communication_board.py`.
#
# </details>

# %% [markdown] lang="fr"
# ## 10. Défi : envoyer moins, à perte égale
#
# Facultatif. Écrivez une fonction qui moyenne le gradient d’un pas sur les rangs, comme vous voulez, avec les
# collectives que vous voulez : `gradient` est un vecteur, `memory` un dictionnaire qui dure tout l’entraînement, vide
# au premier pas. Renvoyez le même vecteur sur tous les rangs, de la longueur de `gradient`. Le juge entraîne un petit
# réseau sur deux rangs : sa perte finale ne doit pas dépasser celle de DDP de plus de 3 %. Votre score est la part des
# octets de DDP que vous envoyez. Objectif : 10 %.

# %% [markdown] lang="en"
# ## 10. Challenge: sending less, for the same loss
#
# Optional. Write a function that averages the gradient of a step over the ranks, as you like, with the collectives that
# you like: `gradient` is a vector, `memory` a dictionary that lasts for the whole training, empty in the first step.
# Return the same vector on all ranks, as long as `gradient`. The judge trains a small network on two ranks: its final
# loss must not exceed that of DDP by more than 3%. Your score is the share of DDP's bytes that you send. Target: 10%.


# %% name="fewer-bytes"
def average(gradient, memory):
    ### BEGIN SOLUTION
    size = dist.get_world_size()
    padded = F.pad(gradient, (0, -len(gradient) % (8 * size)))
    if not memory:
        memory["worker"], memory["server"] = torch.zeros(len(padded)), torch.zeros(len(padded) // size)
    return compressed_mean(padded, memory["worker"], memory["server"])[: len(gradient)]
    ### END SOLUTION


lab.check("fewer-bytes", average)

# %%
# lab.hint("fewer-bytes")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Divisez par deux ce que DDP envoie : un *hook* de communication fait l’*all-reduce* de chaque *bucket* de gradients
# en bf16 (`--compress`). Faites mettre à jour tous les paramètres en un seul noyau (`--fused`). Continuez dans votre
# `train.py`, ou partez de celui qu’écrit `dlojz labs script 09 un_autre_dossier`. La cellule ci-dessous le juge.
#
# À regarder : deux fois moins d’octets par pas, et des pertes qui diffèrent de moins d’un pour cent.
#
# Ce qu’un *hook* donne à `then` s’exécute dans un *thread* du groupe de processus. Si Python s’arrête avant lui, le
# rang meurt parfois tout à la fin, avec `terminate called without an active exception` : attendez tous les rangs
# (`dist.barrier()`) avant de défaire le groupe.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# small = bucket.buffer().to(torch.bfloat16) / replicas
# sent = dist.all_reduce(small, group=group, async_op=True).get_future()
# return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))
# model.register_comm_hook(dist.group.WORLD, mean_in_bf16)
# optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False, fused=args.fused)
# dist.barrier()
# dist.destroy_process_group()
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Halve what DDP sends: a communication hook all-reduces each bucket of gradients in bf16 (`--compress`). Let the
# optimizer update all parameters in one kernel (`--fused`). Go on in your `train.py`, or let
# `dlojz labs script 09 another_folder` write what this lab begins with. The cell below judges it.
#
# What to look for: half the bytes in each step, and losses that differ by less than a percent.
#
# What a hook gives to `then` runs on a thread of the process group. If Python ends before that thread, the rank may die
# at the very end, with `terminate called without an active exception`: wait for all ranks (`dist.barrier()`) before
# the group is destroyed.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# small = bucket.buffer().to(torch.bfloat16) / replicas
# sent = dist.all_reduce(small, group=group, async_op=True).get_future()
# return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))
# model.register_comm_hook(dist.group.WORLD, mean_in_bf16)
# optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False, fused=args.fused)
# dist.barrier()
# dist.destroy_process_group()
# ```
#
# </details>

# %% name="own-script"
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | | donne aux collectives par pas | garde en plus | condition |
# |--|--|--|--|
# | AdamW | 4Ψ, *all-reduce* | | |
# | *hook* fp16 | 2Ψ, *all-reduce* | | des gradients dans l’intervalle de fp16 |
# | 1-bit Adam, 1-bit LAMB | Ψ/8, *all-to-all* ; Ψ/8, *all-gather* | 4Ψ (1 + 1/N) | variance au repos avant le gel |
# | 0/1 Adam | de même, et de plus en plus rarement | 4Ψ (1 + 1/N) | taux d’apprentissage prudent |
# | Local SGD, DiLoCo | 4Ψ/H | l’ancre et son momentum : 8Ψ (DiLoCo) | tours assez courts |
# | mise à jour dans la passe arrière | autant | moins de gradients : une couche | ni écrêtage, ni accumulation |
#
# Trois idées à retenir : un biais ne disparaît pas en moyenne, une erreur gardée se rattrape ; on ne gèle que ce qui
# est au repos, et l’on ne compresse que ce qui voyage sur un lien lent.

# %% [markdown] lang="en"
# ## Summary
#
# | | hands to collectives per step | keeps besides | on condition |
# |--|--|--|--|
# | AdamW | 4Ψ, all-reduce | | |
# | fp16 hook | 2Ψ, all-reduce | | gradients within the range of fp16 |
# | 1-bit Adam, 1-bit LAMB | Ψ/8, all-to-all; Ψ/8, all-gather | 4Ψ (1 + 1/N) | variance at rest before it is frozen |
# | 0/1 Adam | the same, and less and less often | 4Ψ (1 + 1/N) | a cautious learning rate |
# | local SGD, DiLoCo | 4Ψ/H | the anchor and its momentum: 8Ψ (DiLoCo) | rounds that are short enough |
# | update in backward | as much | fewer gradients: one layer | no clipping, no accumulation |
#
# Three ideas to keep: a bias does not average out, but an error that is kept is corrected later; only what is at rest
# may be frozen; and only what travels over a slow link is worth compressing.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
