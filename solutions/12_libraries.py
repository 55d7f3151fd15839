# %% [markdown] lang="fr"
# # TP 12 — Les bibliothèques
#
# Tout ce que vous avez écrit dans les TP précédents existe tout fait. Quatre bibliothèques reviennent sans cesse :
#
# - **DeepSpeed** (Microsoft, aujourd’hui de la fondation PyTorch) : ZeRO et ses déchargements, un pipeline, des
#   optimiseurs, réglés par un fichier JSON ;
# - **Accelerate** (Hugging Face) : votre boucle, presque inchangée, sur un ou mille GPU ; elle peut confier le travail
#   à DDP, à FSDP, à DeepSpeed ou à Megatron-LM ;
# - **Megatron-LM** (NVIDIA), et son cœur Megatron-core : les *Transformers*, en *3D Parallelism* ;
# - **Colossal-AI** (HPC-AI Tech) : réunir tous les parallélismes derrière une seule interface.
#
# Mais tout fait ne veut pas dire sans surprise. Ici, **un seul entraînement est écrit cinq fois**, une fois en PyTorch
# et une fois pour chacune, comme l’écrirait leur utilisateur. Chaque programme tourne vraiment, sur deux processus, et
# le TP l’observe de l’extérieur : mêmes pertes ? quels octets ? quelle mémoire ?
#
# À la fin, vous saurez :
#
# - convertir une boucle PyTorch pour DeepSpeed, puis pour Accelerate, sans diviser deux fois ni rien oublier ;
# - compléter le JSON du cours, et l’exécuter par la commande du cours ;
# - calculer une métrique sur plusieurs rangs sans compter deux fois un échantillon ;
# - lire, dans les messages d’un pas, ce qu’une bibliothèque fait vraiment ;
# - convertir des poids vers Megatron, et lire sa ligne de commande ;
# - choisir.
#
# Comptez une heure et quart. Quatre processus au plus, sans GPU. Accelerate et Megatron-core sont facultatifs
# (`pip install 'dlojz[libraries]'`), Colossal-AI aussi (`make colossalai` dans le dépôt du cours) : sans eux, le TP
# montre leur code et continue.

# %% [markdown] lang="en"
# # Lab 12 — The libraries
#
# All that you have written in the labs before exists ready-made. Four libraries are met again and again:
#
# - **DeepSpeed** (from Microsoft, now a project of the PyTorch Foundation): ZeRO with its offloading, a pipeline,
#   optimizers, all set up by a JSON file;
# - **Accelerate** (Hugging Face): your own loop, nearly unchanged, on one GPU or a thousand; it can hand the work to
#   DDP, FSDP, DeepSpeed or Megatron-LM;
# - **Megatron-LM** (NVIDIA), and its core Megatron-core: Transformers, in 3D parallelism;
# - **Colossal-AI** (HPC-AI Tech): all kinds of parallelism behind one interface.
#
# But ready-made does not mean without surprises. Here **one training is written five times**, once in PyTorch and once
# for each of them, as their users would write it. Each program really runs, on two processes, and the lab watches from
# outside: the same losses? which bytes? how much memory?
#
# By the end you can:
#
# - convert a PyTorch loop for DeepSpeed, then for Accelerate, dividing nothing twice and forgetting nothing;
# - complete the course's JSON, and run it by the course's command;
# - compute a metric over several ranks without counting a sample twice;
# - read, from the messages of a step, what a library really does;
# - convert weights for Megatron, and read its command line;
# - choose.
#
# Allow an hour and a quarter. At most four processes, without GPUs. Accelerate and Megatron-core are optional
# (`pip install 'dlojz[libraries]'`), and so is Colossal-AI (`make colossalai` in the repository of the course): without
# them the lab shows their code and goes on.

# %% name="setup"
import math

import torch
import torch.distributed as dist

import dlojz
from dlojz import labs, models
from dlojz.labs.lab12_libraries import figures
from dlojz.labs.lab12_libraries.exercises_configuration import COURSE
from dlojz.labs.lab12_libraries.figures import course_command

lab = labs.start("12")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. Le point de départ : PyTorch
#
# Ce qui est installé ici, et ce que chacune promet de faire à votre place. Les lignes « d’adaptation » sont dans un
# autre fichier : elles font de notre modèle celui de la bibliothèque.

# %% [markdown] lang="en"
# ## 1. Where we start: PyTorch
#
# What is installed here, and what each of them promises to do for you. The lines “of bridge” are in another file: they
# make of our model the library's own.

# %% name="catalogue" tags=["nbval-ignore-output"]
figures.catalogue()

# %% [markdown] lang="fr"
# Voici le programme simple. Le modèle, les données et les options viennent d’un module commun
# ([course_training.py](../../dlojz/libraries/course_training.py)) ; tout le reste, vous l’avez déjà vu. Notez ce qui
# est **à votre charge** : le groupe de processus, le GPU, le rang donné au chargeur de données, la division par
# l’accumulation, le moment où les gradients partent, celui de la mise à jour.

# %% [markdown] lang="en"
# Here is the plain program. Model, data and options come from a common module
# ([course_training.py](../../dlojz/libraries/course_training.py)); all the rest you have seen before. Note what is **up
# to you**: the process group, the GPU, the rank given to the data loader, the division by the accumulation, when
# gradients leave, and when weights are updated.

# %% name="program-torch" tags=["nbval-ignore-output"]
figures.program("torch")

# %% [markdown] lang="fr"
# `gpt_tiny` lit du vrai texte, octet par octet. Deux répliques (DDP), quatre séquences chacune, en fp32.
#
# **Votre prédiction.** Combien d’octets chaque rang envoie-t-il par pas ? (TP 03 : un anneau, deux rangs.)

# %% [markdown] lang="en"
# `gpt_tiny` reads real text, byte by byte. Two replicas (DDP), four sequences each, in fp32.
#
# **Your prediction.** How many bytes does each rank send per step? (Lab 03: a ring, two ranks.)

# %% name="predict-plain" stub="value"
parameters = models.describe("gpt_tiny").parameters
lab.predict(
    "plain-sent",
    ### BEGIN SOLUTION
    2 * (2 - 1) / 2 * 4 * parameters,
    ### END SOLUTION
)

# %% name="run-torch" tags=["nbval-ignore-output"]
config = dlojz.RunConfig.of(model="gpt_tiny", dp=2, micro_batch=4, steps=6)
plain = dlojz.run(config, library="torch")

# %% name="reveal-plain"
traffic = plain.record.footprint().communication
lab.reveal("plain-sent", sum(axis.sent_bytes for axis in traffic if axis.group == "dp"))

# %% [markdown] lang="fr"
# ## 2. DeepSpeed
#
# Le cours en donne trois extraits. Les options, d’abord, puis le **moteur** (*engine*), qui enveloppe modèle et
# optimiseur :
#
# ```python
# parser = deepspeed.add_config_arguments(parser)
#
# model_engine, optimizer, _, _ = deepspeed.initialize(
#     args=args, model=model, model_parameters=parameters, optimizer=optimizer)
# ```
#
# Dans la boucle, le moteur remplace la perte, la passe arrière et l’optimiseur. Quant au parallélisme, il n’apparaît
# nulle part : il est dans un fichier JSON.

# %% [markdown] lang="en"
# ## 2. DeepSpeed
#
# The course gives three snippets of it. First the options, then the **engine**, which wraps model and optimizer:
#
# ```python
# parser = deepspeed.add_config_arguments(parser)
#
# model_engine, optimizer, _, _ = deepspeed.initialize(
#     args=args, model=model, model_parameters=parameters, optimizer=optimizer)
# ```
#
# In the loop, the engine takes the place of the loss, of backward and of the optimizer. As for parallelism, it is
# nowhere to be seen: it is in a JSON file.

# %% [markdown] lang="fr"
# ### Exercice 1 — la boucle pour DeepSpeed
#
# Voici la boucle simple, avec accumulation. `model(batch)` donne la perte moyenne d’un micro-batch.

# %% [markdown] lang="en"
# ### Exercise 1 — the loop for DeepSpeed
#
# Here is the plain loop, with accumulation. `model(batch)` gives the mean loss of a micro-batch.


# %% name="plain-loop"
def plain_loop(model, optimizer, batches, accumulation):
    for number, batch in enumerate(batches, start=1):
        loss = model(batch) / accumulation
        loss.backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


# %% [markdown] lang="fr"
# Réécrivez-la pour un moteur DeepSpeed. Il connaît l’accumulation, par le JSON, et détient l’optimiseur.
# `engine(batch)` donne la perte ; `engine.backward(loss)` et `engine.step()` s’appellent **à chaque micro-batch**. Que
# reste-t-il à faire ? La vérification compare les poids obtenus à ceux de la boucle simple. Son moteur a aussi
# `train()`, `module`, `gradient_accumulation_steps()` et `is_gradient_accumulation_boundary()`, comme celui de
# DeepSpeed.

# %% [markdown] lang="en"
# Rewrite it for an engine of DeepSpeed. It knows the accumulation, from the JSON, and holds the optimizer.
# `engine(batch)` gives the loss; `engine.backward(loss)` and `engine.step()` are called **for each micro-batch**. What
# is left to do? The check compares the weights with those of the plain loop. Its engine also has `train()`, `module`,
# `gradient_accumulation_steps()` and `is_gradient_accumulation_boundary()`, as DeepSpeed's does.


# %% name="deepspeed-loop"
def deepspeed_loop(engine, batches):
    ### BEGIN SOLUTION
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
    ### END SOLUTION


lab.check("deepspeed-loop", deepspeed_loop)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("deepspeed-loop")

# %% [markdown] lang="fr"
# Votre boucle, sur le **vrai** moteur. Deux rangs se partagent 16 micro-batches, avec une accumulation de 4 ; à côté,
# la boucle simple, sur un seul processus, avec une accumulation de 8. En niveau 0 puis en niveau 2, les poids sont-ils
# les mêmes ? (La première fois, démarrer les rangs prend quelques secondes.)

# %% [markdown] lang="en"
# Your loop, on the **real** engine. Two ranks share 16 micro-batches, with an accumulation of 4; beside it the plain
# loop, in one process, with an accumulation of 8. In stage 0, then in stage 2, are the weights the same? (The first
# time, starting the ranks takes a few seconds.)

# %% name="real-engine"
# %%ranks 2 --with deepspeed_loop,plain_loop
from dlojz.labs.kit.sandbox import load_deepspeed
from dlojz.labs.lab12_libraries.exercises_loops import make_batches, make_model, make_optimizer, weights_of

deepspeed = load_deepspeed()
deepspeed.utils.logger.setLevel("ERROR")
batches = make_batches(16, seed=1)
alone = make_model(1)
plain_loop(alone, make_optimizer(alone), batches, accumulation=8)
for stage in (0, 2):
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    model = make_model(1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model), config=settings, dist_init_required=False
    )
    deepspeed_loop(engine, batches[rank::world_size])
    print(stage, torch.allclose(weights_of(alone), weights_of(engine.module), atol=1e-6))
    engine.destroy()

# %% [markdown] lang="fr"
# Remarquez `gradient_clipping`. Sans cette ligne, DeepSpeed 0.19 écrête à 1,0 (d’anciennes versions n’écrêtaient pas) :
# un autre entraînement, sans un mot. Cacher, c’est aussi choisir des valeurs par défaut.
#
# Le cours promet : *Few lines of code changes*. Voici le programme entier. Les lignes marquées d’un + ne sont pas dans
# le programme simple. Il en a disparu encore plus : celles de DDP, de FSDP et de l’accumulation.

# %% [markdown] lang="en"
# Note `gradient_clipping`. Without that line DeepSpeed 0.19 clips at 1.0 (older versions did not clip): another
# training, without a word. To hide is also to choose defaults.
#
# The course promises: *few lines of code changes*. Here is the whole program. Lines marked by a + are not in the plain
# program. Still more have gone: those of DDP, of FSDP and of the accumulation.

# %% name="program-deepspeed" tags=["nbval-ignore-output"]
figures.program("deepspeed")

# %% [markdown] lang="fr"
# ### Exercice 2 — le JSON du cours, complété
#
# Voici le JSON du cours. DeepSpeed l’accepte-t-il tel quel ?

# %% [markdown] lang="en"
# ### Exercise 2 — the course's JSON, completed
#
# Here is the course's JSON. Does DeepSpeed accept it as it is?

# %% name="as-printed"
# %%ranks 2 --with COURSE
from deepspeed.runtime.config import DeepSpeedConfig

if rank == 0:
    print(COURSE["zero_optimization"])
    try:
        DeepSpeedConfig(COURSE)
    except AssertionError as error:
        print("AssertionError:", error)

# %% [markdown] lang="fr"
# Non : il y manque les tailles de batch. Elles sont trois, liées par une égalité que DeepSpeed vérifie :
#
# $$\texttt{train\_batch\_size} = \texttt{train\_micro\_batch\_size\_per\_gpu} \times
# \texttt{gradient\_accumulation\_steps} \times \text{nombre de GPU}$$
#
# `global_batch` est le nombre d’échantillons d’un pas, `ranks` le nombre de GPU, `fits` le plus grand micro-batch qui
# tienne dans un GPU. Renvoyez le dictionnaire du cours **complété**, sans modifier celui que vous recevez, avec le
# plus grand micro-batch possible. (Les cas s’y prêtent : le batch se partage également entre les GPU.)

# %% [markdown] lang="en"
# No: the sizes of batches are missing. There are three, bound by an equation that DeepSpeed checks:
#
# $$\texttt{train\_batch\_size} = \texttt{train\_micro\_batch\_size\_per\_gpu} \times
# \texttt{gradient\_accumulation\_steps} \times \text{number of GPUs}$$
#
# `global_batch` is the number of samples of a step, `ranks` that of GPUs, `fits` the largest micro-batch that fits in a
# GPU. Return the course's dictionary, **completed** but not changed itself, with the largest possible micro-batch. (The
# cases are kind: the batch is shared equally among the GPUs.)


# %% name="course-json"
def complete(course, global_batch, ranks, fits):
    ### BEGIN SOLUTION
    samples = global_batch // ranks
    micro = max(size for size in range(1, fits + 1) if samples % size == 0)
    sizes = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": samples // micro,
    }
    return {**course, **sizes}
    ### END SOLUTION


lab.check("course-json", complete)

# %%
# lab.hint("course-json")

# %% [markdown] lang="fr"
# Et maintenant la commande du cours, avec votre fichier (`torchrun` à la place de `srun`, et un modèle plus petit que
# celui de la diapositive). Le micro-batch y figure deux fois, en `-b` pour le chargeur de données et dans le JSON pour
# le moteur : c’est à vous qu’il revient de les accorder. Au bout de chaque micro-batch, le rang 0 affiche sa perte. Le
# fichier du cours ne dit rien de l’écrêtage : DeepSpeed écrête donc. (`course_command`, dans
# [figures.py](../../dlojz/labs/lab12_libraries/figures.py), écrit le fichier et lance la commande dans un processus à
# part.)

# %% [markdown] lang="en"
# And now the course's command, with your file (`torchrun` in the place of `srun`, and a smaller model than the
# slide's). The micro-batch is in it twice, as `-b` for the data loader and in the JSON for the engine: it is up to you
# that they agree. At the end of each micro-batch, rank 0 prints its loss. The course's file says nothing of clipping:
# so DeepSpeed clips. (`course_command`, in [figures.py](../../dlojz/labs/lab12_libraries/figures.py), writes the file
# and starts the command in a separate process.)

# %% name="course-command" tags=["nbval-ignore-output"]
course_command(complete)

# %% [markdown] lang="fr"
# Le même programme, cette fois observé par le TP : ZeRO-2, et le même batch que PyTorch plus haut.
#
# **Votre prédiction.** Combien d’octets chaque rang envoie-t-il par pas ? (TP 04 : ce que fait DeepSpeed n’est pas tout
# à fait ce que dit l’article.)

# %% [markdown] lang="en"
# The same program, now watched by the lab: ZeRO-2, and the same batch as PyTorch above.
#
# **Your prediction.** How many bytes does each rank send per step? (Lab 04: what DeepSpeed does is not quite what the
# paper says.)

# %% name="predict-deepspeed" stub="value"
lab.predict(
    "deepspeed-sent",
    ### BEGIN SOLUTION
    3 * (2 - 1) / 2 * 4 * parameters,
    ### END SOLUTION
)

# %% name="run-deepspeed" tags=["nbval-ignore-output"]
deepspeed_run = dlojz.run(config, library="deepspeed", engine="deepspeed", zero=2)


# %% name="reveal-deepspeed"
def sent_by(run):
    return sum(traffic.sent_bytes for traffic in run.record.footprint().communication if traffic.group == "dp")


lab.reveal("deepspeed-sent", sent_by(deepspeed_run))

# %% [markdown] lang="fr"
# Les pertes sont-elles celles de PyTorch, à 10⁻⁵ près ? Chaque communication a-t-elle déplacé les octets prédits ?

# %% [markdown] lang="en"
# Are the losses those of PyTorch, to 10⁻⁵? Has each collective moved the bytes predicted?

# %% name="deepspeed-seen"
print(figures.gap(deepspeed_run, plain) < 1e-5, dlojz.compare([plain, deepspeed_run]).exact)

# %% [markdown] lang="fr"
# Même calcul, autre communication : un *all-reduce* entier des gradients, puis un *all-gather* des poids.
#
# ## 3. Accelerate
#
# Accelerate laisse la boucle chez vous, et se lance par `accelerate launch --num_processes 2 train.py`, ou par
# `torchrun`. `prepare` enveloppe modèle, optimiseur et chargeur de données ; ce qu’il rend s’emploie comme avant, et se
# comporte autrement :
#
# | | PyTorch (DDP) | DeepSpeed | Accelerate |
# |--|--|--|--|
# | partager les données | vous | vous | `prepare` |
# | les mettre sur le GPU | vous | vous | `prepare` |
# | moyenner les gradients | DDP | `engine.backward` | DDP, dans `prepare` |
# | diviser par l’accumulation | vous | `engine.backward` | `accelerator.backward` |
# | choisir le moment de la mise à jour | vous | `engine.step` | `accumulate` |
# | remettre à zéro | vous | `engine.step` | vous ; sans effet entre deux mises à jour |
#
# ### Exercice 3 — la boucle pour Accelerate
#
# Réécrivez la boucle simple. Vous recevez un `accelerator`, qui connaît l’accumulation, et le modèle, l’optimiseur et
# le chargeur tels quels.
#
# - `accelerator.prepare(a, b, …)` les rend enveloppés, dans le même ordre ;
# - `with accelerator.accumulate(model):` entoure tout ce qui concerne un micro-batch ;
# - `accelerator.backward(loss)` ; puis, **à chaque fois**, `optimizer.step()` et `optimizer.zero_grad()`, comme si
#   l’accumulation n’existait pas.

# %% [markdown] lang="en"
# The same computation, another communication: a whole all-reduce of the gradients, then an all-gather of the weights.
#
# ## 3. Accelerate
#
# Accelerate leaves the loop to you; the program is started by `accelerate launch --num_processes 2 train.py`, or by
# `torchrun`. `prepare` wraps model, optimizer and data loader; what it gives is used as before, and behaves otherwise:
#
# | | PyTorch (DDP) | DeepSpeed | Accelerate |
# |--|--|--|--|
# | split the data | you | you | `prepare` |
# | put them on the GPU | you | you | `prepare` |
# | average the gradients | DDP | `engine.backward` | DDP, within `prepare` |
# | divide by the accumulation | you | `engine.backward` | `accelerator.backward` |
# | choose when to update | you | `engine.step` | `accumulate` |
# | zero the gradients | you | `engine.step` | you; without effect between two updates |
#
# ### Exercise 3 — the loop for Accelerate
#
# Rewrite the plain loop. You are given an `accelerator`, which knows the accumulation, and model, optimizer and loader
# as they are.
#
# - `accelerator.prepare(a, b, …)` gives them back wrapped, in the same order;
# - `with accelerator.accumulate(model):` goes around all that concerns one micro-batch;
# - `accelerator.backward(loss)`; then, **each time**, `optimizer.step()` and `optimizer.zero_grad()`, as if there were
#   no accumulation.


# %% name="accelerate-loop"
def accelerate_loop(accelerator, model, optimizer, loader):
    ### BEGIN SOLUTION
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    ### END SOLUTION


lab.check("accelerate-loop", accelerate_loop)

# %%
# lab.hint("accelerate-loop")

# %% [markdown] lang="fr"
# **Votre prédiction.** Un chargeur de 10 micro-batches, une accumulation de 4. La boucle simple fait deux mises à jour,
# et les deux derniers micro-batches attendent. Combien Accelerate en fait-il ?

# %% [markdown] lang="en"
# **Your prediction.** A loader of 10 micro-batches, an accumulation of 4. The plain loop makes two updates, and the
# last two micro-batches wait. How many does Accelerate make?

# %% name="predict-updates" stub="value"
lab.predict(
    "accelerate-updates",
    ### BEGIN SOLUTION
    math.ceil(10 / 4),
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Accelerate les fait pour de bon, dans un processus à part, et l’on compte (s’il manque, c’est une maquette qui compte,
# et la cellule le dit) :

# %% [markdown] lang="en"
# Accelerate really makes them, in a separate process, and they are counted (where it is missing a stand-in is
# counted, and the cell says so):

# %% name="reveal-updates"
lab.reveal("accelerate-updates", figures.updates_made(micro_batches=10, accumulation=4))

# %% [markdown] lang="fr"
# Vos trois boucles, sur ces 10 micro-batches, avec le vrai moteur de DeepSpeed et le vrai Accelerate :

# %% [markdown] lang="en"
# Your three loops, on these 10 micro-batches, with DeepSpeed's real engine and the real Accelerate:

# %% name="three-loops"
figures.loops(plain_loop, deepspeed_loop, accelerate_loop, micro_batches=10, accumulation=4)

# %% [markdown] lang="fr"
# À la fin du chargeur, Accelerate met à jour avec ce qu’il a. Mais il divise toujours par 4 : pour ce dernier pas, fait
# de deux micro-batches, le gradient est deux fois trop petit (en SGD, le pas aussi ; Adam le compense presque). Chez
# DeepSpeed, les deux micro-batches attendent l’époque suivante. Aucune des deux réponses n’est fausse ; encore faut-il
# savoir laquelle on a.
#
# Le programme, puis son exécution. Il passe par des *plugins* pour déléguer à FSDP2 ou à DeepSpeed : quelques lignes
# de réglage, la même boucle. Notez `cpu=on_cpu` (ici True) : sans lui, là où il n’y a pas de GPU, `Accelerator()` ne
# forme aucun groupe, et chaque processus s’entraîne seul, sur toutes les données, sans rien en dire.

# %% [markdown] lang="en"
# At the end of the loader, Accelerate updates with what it has. But it still divides by 4: for that last step, made of
# two micro-batches, the gradient is half of what it should be (with SGD, so is the step; Adam nearly makes up for it).
# With DeepSpeed the two micro-batches wait for the next epoch. Neither answer is wrong, but one should know which it
# is.
#
# The program, then a run of it. It has plugins to hand the work over to FSDP2 or DeepSpeed: a few lines of settings,
# the same loop. Note `cpu=on_cpu` (True here): without it, where there is no GPU, `Accelerator()` makes no group at
# all, and each process trains alone, on all the data, without a word.

# %% name="program-accelerate" tags=["nbval-ignore-output"]
figures.program("accelerate")

# %% name="run-accelerate" tags=["nbval-ignore-output"]
accelerate_run = figures.train(config, "accelerate")

# %% [markdown] lang="fr"
# ### Exercice 4 — une mesure sur tous les rangs
#
# Reste la validation. Neuf échantillons sur deux rangs, par batches de cinq : le chargeur d’Accelerate complète le
# dernier batch en reprenant les **premiers** échantillons, pour que chaque rang en ait autant. Ceux-là comptent alors
# deux fois dans la mesure. `accelerator.gather_for_metrics` rassemble les valeurs de tous les rangs, et les écarte.
#
# Écrivez-la. `values` (échantillons de ce rang, …) a la même forme sur chaque rang ; les rangs ont des échantillons
# consécutifs, le rang 0 les premiers. `real` est le nombre d’échantillons, tous rangs réunis, qui ne sont pas des
# répétitions. Renvoyez leurs valeurs, dans l’ordre, sur chaque rang.

# %% [markdown] lang="en"
# ### Exercise 4 — a metric over all ranks
#
# What remains is validation. Nine samples on two ranks, in batches of five: Accelerate's loader fills the last batch up
# with the **first** samples once more, so that each rank has as many. These then count twice in the metric.
# `accelerator.gather_for_metrics` gathers the values of all ranks, and leaves them out.
#
# Write it. `values` (samples of this rank, …) has the same shape on each rank; ranks have consecutive samples, rank 0
# the first ones. `real` is the number of samples, of all ranks together, that are no repetitions. Return their values,
# in order, on each rank.


# %% name="gather-metrics"
def gather_for_metrics(values, real):
    ### BEGIN SOLUTION
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)[:real]
    ### END SOLUTION


lab.check("gather-metrics", gather_for_metrics)

# %%
# lab.hint("gather-metrics")

# %% [markdown] lang="fr"
# Neuf échantillons, dont le premier est mal classé, puis celui-ci encore, pour compléter. L’exactitude sans votre
# fonction, puis avec :

# %% [markdown] lang="en"
# Nine samples, the first of which is classified wrongly, then that one again, to fill up. The accuracy without your
# function, then with it:

# %% name="accuracy"
# %%ranks 2 --with gather_for_metrics
from dlojz.base.language import decimal

correct = torch.tensor([[0.0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])[rank]
mean = correct.mean()
dist.all_reduce(mean)
print(decimal(mean.item() / world_size, 3), decimal(gather_for_metrics(correct, 9).mean().item(), 3))

# %% [markdown] lang="fr"
# ## 4. Ce que disent les messages
#
# Une bibliothèque ne dit pas toujours ce qu’elle fait. Ses messages, si. Ψ désigne les octets des poids :
#
# - aux niveaux 1 et 2 de ZeRO, chaque rang met à jour sa part des poids, puis un *all-gather* la rend à tous : Ψ,
#   **une fois** par pas ;
# - au niveau 3, personne ne garde les poids entiers : on les rassemble pour la passe avant, **puis** pour la passe
#   arrière ; au moins deux fois, et à chaque micro-batch ;
# - quant aux gradients, il faut les réduire de toute façon, d’une manière ou d’une autre.
#
# ### Exercice 5 — lire les messages d’un pas
#
# `messages` associe à chaque communication (`"all_reduce"`, `"all_gather"`, `"reduce_scatter"`) ses octets par pas ;
# celles qui n’ont pas lieu n’y sont pas. Renvoyez 0 si rien n’est réparti, 2 pour les niveaux 1 et 2, 3 pour le
# niveau 3. Les octets ne tombent pas toujours juste : s’y ajoutent un peu de remplissage, et de petits messages.

# %% [markdown] lang="en"
# ## 4. What the messages tell
#
# A library does not always say what it does. Its messages do. Ψ stands for the bytes of the weights:
#
# - in stages 1 and 2 of ZeRO each rank updates its share of the weights, then an all-gather gives it to all: Ψ,
#   **once** per step;
# - in stage 3 nobody keeps whole weights: they are gathered for forward, **then** for backward; at least twice, and for
#   each micro-batch;
# - as for gradients, they must be reduced anyway, in one way or another.
#
# ### Exercise 5 — read the messages of a step
#
# `messages` gives for each collective (`"all_reduce"`, `"all_gather"`, `"reduce_scatter"`) its bytes per step; those
# that do not take place are not in it. Return 0 if nothing is sharded, 2 for stages 1 and 2, 3 for stage 3. The bytes
# do not always come out even: there is some padding, and there are small messages.


# %% name="read-traffic"
def stage(messages, weight_bytes):
    ### BEGIN SOLUTION
    gathered = messages.get("all_gather", 0) / weight_bytes
    if gathered < 0.5:
        return 0
    return 2 if gathered < 1.5 else 3
    ### END SOLUTION


lab.check("read-traffic", stage)

# %%
# lab.hint("read-traffic")

# %% [markdown] lang="fr"
# Votre fonction, sur ce qui a été **compté** : PyTorch en DDP puis en FSDP2, DeepSpeed en niveau 2. Chaque
# communication passe par le *dispatcher* de PyTorch : c’est là qu’on la compte, quel que soit le programme
# ([dispatch_trace.py](../../dlojz/train/dispatch_trace.py)). Pour un script à vous :
# `torchrun -m dlojz.watch train.py`.

# %% [markdown] lang="en"
# Your function, on what has been **counted**: PyTorch with DDP, then with FSDP2, DeepSpeed in stage 2. Each collective
# passes through PyTorch's dispatcher: there it is counted, whatever the program
# ([dispatch_trace.py](../../dlojz/train/dispatch_trace.py)); for a script of yours, `torchrun -m dlojz.watch train.py`.

# %% name="run-fsdp" tags=["nbval-ignore-output"]
sharded = dlojz.run(config, library="torch", zero=3)

# %% name="told"
figures.told(stage, plain, sharded, deepspeed_run)

# %% [markdown] lang="fr"
# À Accelerate, demandons maintenant la même chose qu’à FSDP2 : `zero=3`, par son *plugin* FSDP. **Avant de regarder** :
# que dira votre fonction ?

# %% [markdown] lang="en"
# Of Accelerate, let us now ask the same as of FSDP2: `zero=3`, by its FSDP plugin. **Before you look**: what will your
# function say?

# %% name="run-accelerate-fsdp" tags=["nbval-ignore-output"]
asked_for_fsdp = figures.train(config, "accelerate", zero=3)
figures.told(stage, accelerate_run, asked_for_fsdp)

# %% [markdown] lang="fr"
# Sans GPU, Accelerate se rabat sur DDP, **sans erreur ni avertissement** : rien n’est réparti, et sur un modèle qui ne
# tient pas, vous l’apprendriez par un dépassement de mémoire. (Avec un GPU, le *plugin* fait bien du FSDP2.) Les
# messages comptés, eux, ne trompent pas.
#
# ## 5. Megatron-core
#
# Les trois précédentes prennent **votre** modèle. Megatron-core fournit le sien : un *Transformer* dont chaque matrice
# sait se couper entre des rangs. C’est la contrepartie du *Tensor Parallelism* (TP 06). On lui donne une configuration,
# et l’on y charge ses poids.
#
# ### Exercice 6 — de torch à Megatron : Q, K et V
#
# C’est là qu’une conversion se trompe sans rien dire. `nn.MultiheadAttention` range les trois projections dans un seul
# poids (3 × largeur, largeur) : d’abord **tout** Q, puis tout K, puis tout V ; dans chacun, les têtes se suivent.
# Megatron les range **tête par tête** : q, k, v de la tête 0, puis q, k, v de la tête 1… Ainsi, couper les lignes en
# `tp` morceaux égaux donne à chaque rang des têtes entières.
#
# Renvoyez, dans l’ordre de Megatron, les lignes du rang `rank` sur `tp`. Rappel : `view`, `transpose`, `reshape`,
# `chunk`.

# %% [markdown] lang="en"
# Without a GPU, Accelerate falls back to DDP, **without error or warning**: nothing is sharded, and with a model that
# does not fit you would learn it by running out of memory. (With a GPU, the plugin does do FSDP2.) Messages that are
# counted do not deceive.
#
# ## 5. Megatron-core
#
# The three before take **your** model. Megatron-core brings its own: a Transformer whose every matrix can be cut among
# ranks. That is the price of tensor parallelism (lab 06). One gives it a configuration, and loads one's weights into
# it.
#
# ### Exercise 6 — from torch to Megatron: Q, K and V
#
# That is where a conversion goes wrong without a word. `nn.MultiheadAttention` keeps the three projections in one
# weight (3 × width, width): first **all** of Q, then all of K, then all of V; within each, heads follow one another.
# Megatron lays them out **head by head**: q, k, v of head 0, then q, k, v of head 1… So, cutting the rows into `tp`
# equal pieces gives whole heads to each rank.
#
# Return, in Megatron's order, the rows of rank `rank` of `tp`. As a reminder: `view`, `transpose`, `reshape`, `chunk`.


# %% name="megatron-qkv"
def megatron_qkv(weight, heads, tp, rank):
    width = weight.shape[1]
    ### BEGIN SOLUTION
    by_head = weight.view(3, heads, width // heads, width).transpose(0, 1)
    return by_head.reshape(3 * width, width).chunk(tp)[rank]
    ### END SOLUTION


lab.check("megatron-qkv", megatron_qkv)

# %%
# lab.hint("megatron-qkv")

# %% [markdown] lang="fr"
# Le programme. Il n’y reste presque rien du programme simple : c’est Megatron qui mène la boucle, et `forward_step` ne
# décrit qu’un micro-batch, pour que son ordonnanceur puisse en faire un pipeline. Ses couches par colonnes et par
# lignes sont celles du TP 06 : un [test](../../tests/by_hand/tensor/test_megatron_oracle.py) les compare aux nôtres,
# nombres et messages.

# %% [markdown] lang="en"
# The program. Next to nothing of the plain one is left in it: Megatron leads the loop, and `forward_step` only
# describes one micro-batch, so that its scheduler can make a pipeline of it. Its layers by columns and by rows are
# those of lab 06: a [test](../../tests/by_hand/tensor/test_megatron_oracle.py) compares them with ours, numbers and
# messages.

# %% name="program-megatron" tags=["nbval-ignore-output"]
figures.program("megatron")

# %% [markdown] lang="fr"
# Trois exécutions, avec les mêmes poids et le même batch global : deux répliques ; un modèle dont chaque couche est
# coupée en deux (`tp=2`) ; un pipeline de deux étages, deux micro-batches en 1F1B (`pp=2`).

# %% [markdown] lang="en"
# Three runs, with the same weights and the same global batch: two replicas; one model whose every layer is cut in two
# (`tp=2`); a pipeline of two stages, two micro-batches by 1F1B (`pp=2`).

# %% name="run-megatron" tags=["nbval-ignore-output"]
layouts = {}, {"dp": 1, "tp": 2, "micro_batch": 8}, {"dp": 1, "pp": 2, "micro_batches": 2}
replicas, split, piped = figures.train_each(config, "megatron", *layouts)
figures.told(stage, replicas, split)

# %% [markdown] lang="fr"
# Pour `tp=2`, votre fonction dit que tout est entier partout. Elle se trompe : chaque rang n’a que la moitié des
# matrices, et ce sont des **activations** qui voyagent par *all-reduce*, d’autant plus que le batch est grand. Une
# signature se lit au sein d’une famille. Le groupe aide (`dp` ou `tp`), le nombre d’appels aussi.
#
# ### Exercice 7 — la répartition qu’indique une ligne de commande
#
# Megatron-LM se règle par des options. Voici une partie de celles d’un exemple publié avec lui
# (`pretrain_gpt3_175B.sh`), pour GPT-3, 175 milliards de paramètres, sur 128 nœuds de 8 GPU :

# %% [markdown] lang="en"
# For `tp=2`, your function says that everything is whole everywhere. It is wrong: each rank has half of the matrices,
# and what travels by all-reduce are **activations**, the more the larger the batch. A signature is read within one
# family. The group helps (`dp` or `tp`), and so does the number of calls.
#
# ### Exercise 7 — the layout that a command line tells
#
# Megatron-LM is set up by options. Here are some of an example published with it (`pretrain_gpt3_175B.sh`), for GPT-3,
# 175 billion parameters, on 128 nodes of 8 GPUs:

# %% name="gpt3"
from itertools import pairwise

from dlojz.labs.lab12_libraries.exercises_configuration import GPT3

print(GPT3)

# %% [markdown] lang="fr"
# `words` est la liste de ces mots, `gpus` le nombre de GPU. Renvoyez quatre entiers : les degrés `tp` et `pp`, le
# nombre de répliques `dp`, et le nombre de micro-batches que chaque réplique cumule par pas. Les degrés absents valent
# 1 ; sans `--global-batch-size`, chaque réplique prend un seul micro-batch. `--micro-batch-size` est toujours là.
# `pairwise(words)` donne les paires de mots qui se suivent.

# %% [markdown] lang="en"
# `words` is the list of these words, `gpus` the number of GPUs. Return four whole numbers: the degrees `tp` and `pp`,
# the number of replicas `dp`, and the number of micro-batches that each replica accumulates per step. Degrees that are
# left out are 1; without `--global-batch-size` each replica takes one single micro-batch. `--micro-batch-size` is
# always there. `pairwise(words)` gives the pairs of words that follow one another.


# %% name="megatron-arguments"
def megatron_layout(words, gpus):
    ### BEGIN SOLUTION
    arguments = dict(pairwise(words))
    tp = int(arguments.get("--tensor-model-parallel-size", 1))
    pp = int(arguments.get("--pipeline-model-parallel-size", 1))
    dp = gpus // (tp * pp)
    micro = int(arguments["--micro-batch-size"])
    return tp, pp, dp, int(arguments.get("--global-batch-size", micro * dp)) // (micro * dp)
    ### END SOLUTION


lab.check("megatron-arguments", megatron_layout)

# %%
# lab.hint("megatron-arguments")

# %% [markdown] lang="fr"
# **Votre prédiction.** Pour GPT-3, sur ces 1 024 GPU : combien de micro-batches par réplique et par pas ?

# %% [markdown] lang="en"
# **Your prediction.** For GPT-3, on these 1,024 GPUs: how many micro-batches per replica and step?

# %% name="predict-gpt3" stub="value"
lab.predict(
    "gpt3-micro-batches",
    ### BEGIN SOLUTION
    megatron_layout(GPT3.split(), 1024)[3],
    ### END SOLUTION
)

# %% name="reveal-gpt3"
from dlojz.labs.lab12_libraries import exercises_configuration as arguments

lab.reveal("gpt3-micro-batches", arguments.megatron_layout(GPT3.split(), arguments.GPT3_GPUS)[3])

# %% [markdown] lang="fr"
# De quoi bien remplir un pipeline de 16 étages (TP 05). Les modèles géants entraînés ainsi, de 1,7 à 1 000 milliards de
# paramètres, leur durée et leurs heures de GPU sont dans le [TP 08](08_best_compromise.ipynb).
#
# ## 6. Colossal-AI
#
# Colossal-AI réunit les parallélismes derrière un `Booster`, et un *plugin* par façon de répartir. Elle en connaît
# d’autres, que le cours ne traite pas, comme des *Tensor Parallelism* à plusieurs dimensions ; mais ce ne sont pas des
# *plugins* : en 0.5.0, ils sont rangés dans `colossalai.legacy`. Son revers : cette version demande un PyTorch d’une
# autre époque (2.5.1 au plus), donc un environnement à part, et son ZeRO refuse les processeurs.

# %% [markdown] lang="en"
# Enough to fill a pipeline of 16 stages well (lab 05). The giants that were trained in this way, from 1.7 to 1,000
# billion parameters, with their time and GPU-hours, are in [lab 08](08_best_compromise.ipynb).
#
# ## 6. Colossal-AI
#
# Colossal-AI puts all kinds of parallelism behind a `Booster`, and one plugin per layout. It also knows some that the
# course does not treat, such as tensor parallelism in several dimensions; but these are no plugins: in 0.5.0 they are
# kept in `colossalai.legacy`. The downside: that version needs an older PyTorch (2.5.1 at most), so a separate
# environment, and its ZeRO refuses CPUs.

# %% name="program-colossalai" tags=["nbval-ignore-output"]
figures.program("colossalai")

# %% name="run-colossalai" tags=["nbval-ignore-output"]
colossalai_run = figures.train(config, "colossalai")

# %% [markdown] lang="fr"
# ## 7. Côte à côte
#
# Les pertes de tous ceux qui ont tourné ici, superposées ; dessous, l’écart à PyTorch, avec la limite de 10⁻⁵ :

# %% [markdown] lang="en"
# ## 7. Side by side
#
# The losses of all that have run here, superimposed; below, the gap to PyTorch, with the limit of 10⁻⁵:

# %% name="losses" tags=["nbval-ignore-output"]
everything = [plain, deepspeed_run, accelerate_run, replicas, split, piped, colossalai_run]
figures.losses(*everything)

# %% [markdown] lang="fr"
# La mémoire du rang 0 au moment du pic, et ce qu’il envoie par pas : en clair ce qui était prédit, dessous ce qui est
# mesuré. Le tableau qui suit donne les mêmes pics et les mêmes octets ; ses états, eux, sont chacun à son maximum, qui
# n’est pas toujours celui du pic (à celui de PyTorch, par exemple, les gradients ne sont pas encore là).

# %% [markdown] lang="en"
# The memory of rank 0 at the moment of its peak, and what it sends per step: predictions in a pale shade, measurements
# below. The table that follows gives the same peaks and the same bytes; its states are each at their own largest,
# which need not be at the peak (at that of PyTorch, for one, the gradients are not there yet).

# %% name="side-by-side" tags=["nbval-ignore-output"]
figures.side_by_side(*everything)

# %% name="table" tags=["nbval-ignore-output"]
figures.table(*everything)

# %% [markdown] lang="fr"
# **Expliquez.** Répondez d’abord, puis laissez répondre la cellule. PyTorch et DeepSpeed donnent-ils les mêmes pertes,
# à 10⁻⁵ près ? Lequel garde le moins d’états d’optimiseur par rang ? Lequel envoie le moins d’octets par pas ?

# %% [markdown] lang="en"
# **Explain.** Answer first, then let the cell answer. Do PyTorch and DeepSpeed give the same losses, to 10⁻⁵? Which one
# keeps fewer optimizer states per rank? Which one sends fewer bytes per step?

# %% name="seen"
figures.two_choices(plain, deepspeed_run)

# %% [markdown] lang="fr"
# Même calcul, autres choix : ZeRO-2 garde moins d’états, pour plus d’octets. Mais son pic (tableau d’avant) est plus
# haut : sur un modèle minuscule, ses tampons pèsent plus que ce qu’il économise. (Leur taille est bornée, celle des
# états ne l’est pas : sur un grand modèle, c’est l’inverse.) Avec deux répliques, le pic de Megatron-core est plus
# haut, lui aussi : son tampon de gradients est là d’un bout à l’autre ; et sans son noyau fusionné, qui demande un GPU,
# son attention garde une matrice par tête, couche après couche. Quant à la durée d’un pas, elle ne vaut qu’ici, pour
# deux processus d’un petit processeur et un modèle minuscule, et change d’une exécution à l’autre. Retenez plutôt les
# autres colonnes.

# %% [markdown] lang="en"
# The same computation, other choices: ZeRO-2 keeps fewer states, for more bytes. But its peak (the table before) is
# higher: with a tiny model its buffers weigh more than what it saves. (Their size is bounded, that of the states is
# not: with a large model it is the other way round.) With two replicas, Megatron-core's peak is higher too: its buffer
# of gradients is there from beginning to end; and without its fused kernel, which wants a GPU, its attention keeps a
# matrix per head, layer after layer. As for the time of a step, it holds here only, for two processes on a small CPU
# and a tiny model, and changes from one run to the next. Remember the other columns.

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Le même script avec deux bibliothèques : `--parallel deepspeed` (ZeRO-2) et `--parallel accelerate`. Continuez dans
# votre `train.py`, ou laissez `dlojz labs script 12 un_autre_dossier` écrire ce par quoi ce TP commence. La cellule
# qui suit le juge.
#
# À regarder : les pertes de DDP avec `--accumulation 2`, et ce que vous n’écrivez plus : la division de la perte,
# `no_sync`, la mise à jour après le dernier micro-batch.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# config = {"train_micro_batch_size_per_gpu": args.batch // replicas // micro_batches, "gradient_clipping": 0.0}
# config |= {"gradient_accumulation_steps": micro_batches, "zero_optimization": {"stage": 2}}
# model, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
# model.backward(loss)
# model.step()
# accelerator = Accelerator(gradient_accumulation_steps=micro_batches, cpu=not on_gpu)
# model, optimizer = accelerator.prepare(model, optimizer)
# with accelerator.accumulate(model):
# accelerator.backward(loss)
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# The same script with two libraries: `--parallel deepspeed` (ZeRO stage 2) and `--parallel accelerate`. Go on in your
# `train.py`, or let `dlojz labs script 12 another_folder` write what this lab begins with. The next cell
# judges it.
#
# What to look for: the losses of DDP with `--accumulation 2`, and what you no longer write: the division of the loss,
# `no_sync`, the update after the last micro-batch.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# config = {"train_micro_batch_size_per_gpu": args.batch // replicas // micro_batches, "gradient_clipping": 0.0}
# config |= {"gradient_accumulation_steps": micro_batches, "zero_optimization": {"stage": 2}}
# model, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
# model.backward(loss)
# model.step()
# accelerator = Accelerator(gradient_accumulation_steps=micro_batches, cpu=not on_gpu)
# model, optimizer = accelerator.prepare(model, optimizer)
# with accelerator.accumulate(model):
# accelerator.backward(loss)
# ```
#
# </details>

# %% name="judge-script"
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan : comment choisir ?
#
# | si… | prenez | parce que |
# |--|--|--|
# | le modèle tient sur un GPU | DDP, seul ou par Accelerate | rien à cacher, rien à perdre |
# | il ne tient plus, et n’est pas de vous | FSDP2 ou ZeRO, seuls ou par Accelerate | ses couches restent intactes |
# | même réparti, il ne tient pas | FSDP2 ou DeepSpeed, avec déchargement | la mémoire de l’hôte (DeepSpeed : disques) |
# | vous pré-entraînez un *Transformer*, sur de nombreux nœuds | Megatron | *3D Parallelism* ; mais c’est son modèle |
# | l’architecture est nouvelle | PyTorch : `fully_shard`, `parallelize_module`… | tout se voit, tout se change |
# | vous cherchez un parallélisme rare | Colossal-AI | tout sous un toit ; voyez d’abord quel PyTorch elle exige |
#
# Et dans tous les cas :
#
# - commencez par comparer **quelques pas** à la boucle simple, en fp32, avec le même batch : l’écart doit être de
#   l’ordre de l’arrondi ;
# - comptez les messages : ce qui devait être réparti l’est-il ?
# - lisez les valeurs par défaut (écrêtage, division, fin d’époque) : c’est là que deux bibliothèques diffèrent.
#
# Dans un terminal, `dlojz libraries --run` refait ce tableau. Et `library=` ne se limite pas au texte : essayez
# `model="coatnet_tiny"`, sur des images, avec PyTorch, DeepSpeed ou Accelerate.

# %% [markdown] lang="en"
# ## Summary: how to choose?
#
# | if… | take | because |
# |--|--|--|
# | the model fits in a GPU | DDP, alone or by Accelerate | nothing to hide, nothing to lose |
# | it no longer fits, and is not your own | FSDP2 or ZeRO, alone or by Accelerate | its layers are left alone |
# | even sharded it does not fit | FSDP2 or DeepSpeed, with offloading | the host's memory (DeepSpeed: disks too) |
# | you pre-train a Transformer, on many nodes | Megatron | 3D parallelism; but it is its own model |
# | the architecture is new | PyTorch: `fully_shard`, `parallelize_module`… | everything can be seen, and changed |
# | you look for a rare kind of parallelism | Colossal-AI | all under one roof; see first which PyTorch it wants |
#
# And in any case:
#
# - begin by comparing **a few steps** with the plain loop, in fp32, with the same batch: the gap should be that of
#   rounding;
# - count the messages: is what should be sharded really sharded?
# - read the defaults (clipping, division, end of an epoch): that is where two libraries differ.
#
# In a terminal, `dlojz libraries --run` makes this table anew. And `library=` is not for text only: try
# `model="coatnet_tiny"`, on images, with PyTorch, DeepSpeed or Accelerate.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
