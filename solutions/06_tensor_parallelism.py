# %% [markdown] lang="fr"
# # TP 06 — Le parallélisme de tenseur
#
# ZeRO répartit les poids, mais les rassemble pour calculer ; le pipeline coupe le modèle entre ses couches. Reste le
# cas où **une seule couche** est trop grosse, ou trop lente, pour un GPU. Le **parallélisme de tenseur** (*Tensor
# Parallelism*) coupe la couche elle-même : chaque rang garde une partie des poids, calcule avec elle, et ne la donne
# jamais. C’est la pièce la plus délicate du parallélisme de modèle, et celle où une erreur se voit le moins : un oubli
# y laisse la première perte exacte. Vous l’écrivez à la main, sur de vrais rangs, jusqu’à retrouver, à l’arrondi près,
# ce que calcule un seul processus.
#
# À la fin, vous saurez :
#
# - couper un MLP, une attention, un vocabulaire ou une convolution, et dire ce que cela envoie, dans chaque sens ;
# - répartir aussi les tokens (*Sequence Parallelism*) ;
# - écrire le plan de `parallelize_module`, dans PyTorch ;
# - prédire les octets et les secondes, et dire pourquoi tout cela reste dans un nœud.
#
# Comptez deux heures. Trois rangs au plus, sans GPU.

# %% [markdown] lang="en"
# # Lab 06 — Tensor parallelism
#
# ZeRO partitions the weights, but gathers them to compute; a pipeline cuts the model between its layers. There remains
# the case where **one single layer** is too large, or too slow, for one GPU. **Tensor parallelism** cuts the layer
# itself: each rank keeps some of its weights, computes with them, and never gives them away. It is the most delicate
# part of model parallelism, and the one that goes wrong most quietly: if you forget one call, the first loss is still
# right. In this lab you write it by hand, on real ranks, until you find what one process computes, up to rounding.
#
# By the end you can:
#
# - cut an MLP, attention, a vocabulary or a convolution, and tell what it sends in each direction;
# - split the tokens too (sequence parallelism);
# - write the plan of PyTorch's `parallelize_module`;
# - predict bytes and seconds, and tell why all this stays within a node.
#
# Allow two hours. At most three ranks, without GPUs.

# %% name="setup"
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dlojz
from dlojz import labs, models
from dlojz.base.language import decimal
from dlojz.by_hand.tensor.axis import gather_tokens, scatter_tokens
from dlojz.labs.lab06_tensor import figures

lab = labs.start("06")
torch.set_num_threads(1)  # as on the ranks // comme sur les rangs

# %% [markdown] lang="fr"
# ## 1. Une couche, deux découpages
#
# Une couche linéaire calcule Y = X W. Il y a deux façons de couper W entre des rangs :

# %% [markdown] lang="en"
# ## 1. One layer, two ways to cut it
#
# A linear layer computes Y = X W. There are two ways to cut W among ranks:

# %% name="split-layer"
figures.split_layer(ranks=2)

# %% [markdown] lang="fr"
# - **Par colonne** (*column-parallel*) : chaque rang calcule une partie des *sorties*, à partir de X entier. Rien à
#   envoyer : les colonnes de Y se trouvent simplement chez des rangs différents.
# - **Par ligne** (*row-parallel*) : chaque rang a une partie des *entrées*, et calcule pour toutes les sorties un
#   produit **partiel**. Y en est la somme : un *all-reduce*.
#
# Attention à PyTorch : `nn.Linear` garde la transposée, de forme (sorties, entrées). Les *colonnes* de W y sont des
# *lignes* de `weight`.
#
# Et la passe arrière ? Par colonne, tous les rangs ont utilisé le même X. Le gradient de X est donc la somme de ce que
# trouve chacun.
#
# ### Exercice 1 — par colonne
#
# `x`, `weight` (sorties, entrées) et `bias` sont entiers. Renvoyez deux choses : les sorties de **ce rang**, puis le
# gradient **entier** de `x`. `y_gradient` est le gradient de la perte par rapport aux sorties de ce rang. Rappel : si
# y = x Wᵀ, le gradient de x est `y_gradient @ W`.
#
# - `weight.chunk(size)[i]` est la i-ième de `size` tranches de lignes ;
# - `dist.all_reduce(tenseur)` y met la somme des tenseurs de tous les rangs, en place.

# %% [markdown] lang="en"
# - **By columns** (column-parallel): each rank computes some of the *outputs*, from the whole X. Nothing is to be sent:
#   the columns of Y simply lie on different ranks.
# - **By rows** (row-parallel): each rank has some of the *inputs*, and computes a **partial** product for all outputs.
#   Y is their sum: an all-reduce.
#
# Beware: PyTorch's `nn.Linear` keeps the transpose, of shape (outputs, inputs). The *columns* of W are *rows* of
# `weight`.
#
# And backward? By columns, all ranks have used the same X. So the gradient of X is the sum of what each rank finds.
#
# ### Exercise 1 — by columns
#
# `x`, `weight` (outputs, inputs) and `bias` are whole. Return two things: the outputs of **this rank**, then the
# **whole** gradient of `x`. `y_gradient` is the gradient of the loss with respect to this rank's outputs. Reminder: if
# y = x Wᵀ, the gradient of x is `y_gradient @ W`.
#
# - `weight.chunk(size)[i]` is the i-th of `size` slices of rows;
# - `dist.all_reduce(tensor)` puts the sum of all ranks' tensors there, in place.


# %% name="column-linear"
def column_linear(x, weight, bias, y_gradient):
    rank, size = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    weight_part, bias_part = weight.chunk(size)[rank], bias.chunk(size)[rank]
    y = x @ weight_part.T + bias_part
    x_gradient = y_gradient @ weight_part
    dist.all_reduce(x_gradient)
    return y, x_gradient
    ### END SOLUTION


lab.check("column-linear", column_linear)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez ; deux exécutions donnent le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("column-linear")

# %% [markdown] lang="fr"
# ### Exercice 2 — par ligne
#
# `x_own` contient les entrées de **ce rang** (celles qu’une couche par colonne vient de calculer, par exemple) ;
# `weight` et `bias` sont entiers. Renvoyez la sortie entière. La vérification appelle ensuite `backward`.

# %% [markdown] lang="en"
# ### Exercise 2 — by rows
#
# `x_own` holds **this rank's** inputs (for example those that a layer by columns has just computed); `weight` and
# `bias` are whole. Return the whole output. The check then calls `backward`.


# %% name="row-linear"
def row_linear(x_own, weight, bias):
    rank, size = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    y = x_own @ weight.chunk(size, dim=1)[rank].T
    dist.all_reduce(y)
    return y + bias
    ### END SOLUTION


lab.check("row-linear", row_linear)

# %%
# lab.hint("row-linear")

# %% [markdown] lang="fr"
# Pour la passe arrière, il n’y avait rien à faire. Chaque rang calcule la même perte, à partir de la même somme : le
# gradient de la somme est donc déjà entier sur chacun, et c’est celui de chaque terme. `dist.all_reduce`, en place, est
# invisible pour autograd, ce qui est juste *ici*.
#
# Voyez les deux couches à l’œuvre sur deux vrais rangs : ce que détient chacun, d’un bout à l’autre. Si l’on veut la
# sortie entière d’une couche par colonne, il faut un *all-gather*. (Démarrer les rangs prend quelques secondes.)

# %% [markdown] lang="en"
# For backward, there was nothing to do. Each rank computes the same loss, from the same sum: so the gradient of the sum
# is already whole on each rank, and it is also that of each term. `dist.all_reduce`, in place, is invisible to
# autograd, which is right *here*.
#
# See both layers at work on two real ranks: what each holds, from one end to the other. To have the whole output of a
# column-parallel layer, an all-gather is needed. (Starting the ranks takes a few seconds.)

# %% name="both-layers"
# %%ranks 2 --with column_linear,row_linear
x = torch.tensor([[1.0, 2.0]])
first, second = torch.arange(8.0).view(4, 2), torch.ones(3, 4)
hidden, _ = column_linear(x, first, torch.zeros(4), torch.zeros(1, 4 // world_size))
parts = [torch.empty_like(hidden) for _ in range(world_size)]
dist.all_gather(parts, hidden)
print("by columns: // par colonnes :", hidden.tolist(), "gathered: // rassemblé :", torch.cat(parts, dim=1).tolist())
print("then by rows: // puis par lignes :", row_linear(hidden, second, torch.zeros(3)).tolist())

# %% [markdown] lang="fr"
# ## 2. Une paire, un seul *all-reduce*
#
# Une couche par colonne **donne** des sorties réparties ; une couche par ligne **prend** des entrées réparties. Mises
# l’une après l’autre, elles se passent de communication au milieu. Entre les deux, GELU traite chaque neurone
# séparément : il ne demande rien non plus. C’est l’idée de Megatron-LM (Shoeybi et al., 2019). Voici un demi-bloc de
# transformer, avec les deux bouts de cette *région* parallèle :

# %% [markdown] lang="en"
# ## 2. A pair, one single all-reduce
#
# A column-parallel layer **gives** outputs that are split; a row-parallel layer **takes** inputs that are split. Put
# one after the other, they need no communication in the middle. Between the two, GELU treats each feature alone: it
# asks for nothing either. That is the idea of Megatron-LM (Shoeybi et al., 2019). Here is half a transformer block,
# with the two ends of this parallel *region*:

# %% name="block"
figures.block_ends()

# %% [markdown] lang="fr"
# Les deux bouts sont **conjugués** : f ne fait rien en passe avant, et additionne en passe arrière ; g, l’inverse. Vous
# avez vu g à l’exercice 2. Il reste f, dont personne ne remarque l’absence.
#
# ### Exercice 3 — le MLP
#
# Écrivez la passe arrière de f (`EnterRegion`), puis le MLP. Cette fois, chaque rang ne reçoit que sa part : `expand`
# et `expand_bias` sont ses colonnes de la première couche, `project` ses lignes de la seconde (dans PyTorch, de forme
# (sorties, entrées de ce rang)) ; `project_bias` est entier. L’activation est `F.gelu`. Renvoyez la sortie entière.

# %% [markdown] lang="en"
# The two ends are **conjugate**: f does nothing in forward, and adds up in backward; g the other way round. You have
# met g in exercise 2. There remains f, whose absence nobody notices.
#
# ### Exercise 3 — the MLP
#
# Write the backward of f (`EnterRegion`), then the MLP. This time each rank receives its share only: `expand` and
# `expand_bias` are its columns of the first layer, `project` its rows of the second (in PyTorch, of shape (outputs,
# this rank's inputs)); `project_bias` is whole. The activation is `F.gelu`. Return the whole output.


# %% name="one-all-reduce"
class EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        ### BEGIN SOLUTION
        dist.all_reduce(gradient)
        ### END SOLUTION
        return gradient


def parallel_mlp(x, expand, expand_bias, project, project_bias):
    ### BEGIN SOLUTION
    hidden = F.gelu(EnterRegion.apply(x) @ expand.T + expand_bias)
    y = hidden @ project.T
    dist.all_reduce(y)
    return y + project_bias
    ### END SOLUTION


lab.check("one-all-reduce", parallel_mlp)

# %%
# lab.hint("one-all-reduce")

# %% [markdown] lang="fr"
# **Et sans f ?** Mettons une couche ordinaire, entière sur chaque rang, devant votre MLP, et entraînons dix pas, avec f
# puis sans. **Avant de regarder** : à quel pas la perte devient-elle fausse ? Les poids de la première couche, que tous
# les rangs sont censés avoir en commun, le restent-ils ?

# %% [markdown] lang="en"
# **And without f?** Let us put an ordinary layer, whole on each rank, before your MLP, and train ten steps, with f and
# then without. **Before you look**: at which step does the loss go wrong? Do the weights of the first layer, which all
# ranks are meant to have in common, stay equal?

# %% name="without-f"
# %%ranks --with EnterRegion,parallel_mlp
import warnings

import torch.nn.functional as F

from dlojz.base.language import decimal

# PyTorch warns that autograd does not see all_reduce; here that is right // PyTorch avertit, mais ici c’est juste
warnings.filterwarnings("ignore", "c10d::allreduce_")


def train(steps=10):
    torch.manual_seed(0)  # the same weights and data on every rank // mêmes poids et mêmes données sur tous les rangs
    x, goal = torch.randn(16, 8), torch.randn(16, 8)
    first, expand, project = torch.randn(8, 8) / 3, torch.randn(16, 8) / 3, torch.randn(8, 16) / 4
    expand, project = expand.chunk(world_size)[rank].clone(), project.chunk(world_size, dim=1)[rank].clone()
    weights = [weight.requires_grad_() for weight in (first, expand, project)]
    optimizer, losses = torch.optim.SGD(weights, lr=0.5), []
    for _ in range(steps):
        loss = F.mse_loss(parallel_mlp(x @ first.T, expand, torch.zeros(len(expand)), project, torch.zeros(8)), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, first.detach()


with_f, _ = train()


class EnterRegion:  # f is forgotten // f est oublié
    apply = staticmethod(lambda x: x)


without, first = train()
mean = first.clone()
dist.all_reduce(mean)
gaps = [abs(a - b) for a, b in zip(without, with_f, strict=True)]
print("losses, gap: // écart des pertes :", *(decimal(gap, 3) for gap in gaps[::3]))
print("weights, gap: // écart des poids :", decimal(2 * (first - mean / world_size).abs().max().item(), 2))

# %% [markdown] lang="fr"
# La première ligne donne l’écart entre la perte sans f et la vraie, tous les trois pas : nul au premier, puis de plus
# en plus grand, sans aucune erreur. La seconde, le plus grand écart entre les deux rangs, pour les poids de la première
# couche. On vérifie donc le *Tensor Parallelism* sur **plusieurs pas**, et sur les **poids**.
#
# **Que gagne la paire ?** L’autre façon : couper les **deux** couches par colonne, et rassembler la sortie de chacune.
# Comptez, pour un MLP de largeurs D, 4D, D, en passes avant et arrière : un *all-gather* envoie moitié moins d’octets
# qu’un *all-reduce* de la même taille (TP 03). **Votre prédiction** : combien de fois plus d’octets que la paire ?

# %% [markdown] lang="en"
# The first line gives the gap between the loss without f and the true one, every three steps: none at first, then
# larger and larger, without any error. The second gives the largest gap between the two ranks, for the weights of the
# first layer. So tensor parallelism is verified over **several steps**, and on the **weights**.
#
# **What does the pair save?** The other way: to cut **both** layers by columns, and to gather the output of each.
# Count, for an MLP of widths D, 4D, D, in forward and backward: an all-gather sends half as many bytes as an all-reduce
# of the same size (lab 03). **Your prediction**: how many times as many bytes as the pair?

# %% name="predict-pair" stub="value"
lab.predict(
    "pair-bytes",
    ### BEGIN SOLUTION
    # gathers 4 + 1, their fs 2 × (4 + 1); pair 2 + 2 // rassembler 4 + 1, leurs f 2 × (4 + 1) ; paire 2 + 2
    (4 + 1 + 2 * (4 + 1)) / (2 + 2),
    ### END SOLUTION
)

# %% name="count-pair"
# %%ranks --with EnterRegion,parallel_mlp
from dlojz.base.language import decimal
from dlojz.train.dispatch_trace import StorageTrace, traffic_of  # sees what torch sends // voit ce que torch envoie


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(context, y):
        parts = [torch.empty_like(y) for _ in range(world_size)]
        dist.all_gather(parts, y)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(world_size, dim=-1)[rank].contiguous()


def gathered_mlp(x, expand, expand_bias, project, project_bias):
    hidden = Gather.apply(F.gelu(EnterRegion.apply(x) @ expand.T + expand_bias))
    return Gather.apply(EnterRegion.apply(hidden) @ project.T) + project_bias


def count(mlp, project):
    x = torch.randn(4, 64, requires_grad=True)
    with StorageTrace({}) as trace:
        y = mlp(x, torch.randn(256 // world_size, 64), torch.zeros(256 // world_size), project, torch.zeros(64))
        y.sum().backward()
    calls = traffic_of(trace.trace.calls, trace.step)
    sent_bytes = sum(call.sent_bytes for call in calls)
    print(mlp.__name__, {call.collective: call.count for call in calls}, decimal(sent_bytes, 0), "B // o")
    return sent_bytes


by_columns, by_rows = torch.randn(64 // world_size, 256), torch.randn(64, 256 // world_size)
ratio = count(gathered_mlp, by_columns) / count(parallel_mlp, by_rows)

# %% name="reveal-pair"
lab.reveal("pair-bytes", ranks["ratio"][0])

# %% [markdown] lang="fr"
# Le cours dit « moitié moins » : c’est la passe avant de deux couches par ligne, un *all-reduce* au lieu de deux. Ici
# on gagne davantage, parce que la paire n’envoie jamais ce qui est large.
#
# ## 3. L’attention, par têtes
#
# L’attention est plus facile encore à couper : ses têtes ne se voient pas. Requêtes, clés et valeurs se calculent par
# colonne, la projection finale par ligne ; un rang porte des têtes entières. Le piège est dans le rangement : les trois
# projections ne font souvent qu’une seule matrice, `qkv`.
#
# À partir d’ici, f et g s’appellent `copy` et `add_up` : votre code, dans la cellule qui suit. Chacun attend un tenseur
# et `axis`, la place de ce rang : `axis.rank`, `axis.size`.

# %% [markdown] lang="en"
# The course says "half": that is the forward pass of two row-parallel layers, one all-reduce instead of two. Here we
# save more, because the pair never sends what is wide.
#
# ## 3. Attention, by heads
#
# Attention is even easier to cut: its heads do not see each other. Queries, keys and values are computed by columns,
# the last projection by rows; a rank holds whole heads. The trap lies in the layout: the three projections often are
# one single matrix, `qkv`.
#
# From here on, f and g are called `copy` and `add_up`: your code, in the next cell. Each expects a tensor and `axis`,
# this rank's place: `axis.rank`, `axis.size`.


# %% name="own-operators"
def copy(x, axis):
    return EnterRegion.apply(x)


def add_up(x, axis):
    x = x.clone()
    dist.all_reduce(x)
    return x


# %% [markdown] lang="fr"
# ### Exercice 4 — l’attention par têtes
#
# `x` (batch, tokens, largeur) est entier, de même que `qkv` et `project`. Les lignes de `qkv` contiennent **toutes**
# les requêtes, puis toutes les clés, puis toutes les valeurs : c’est une matrice (3, têtes, H, largeur) aplatie, où H
# est la largeur d’une tête. Renvoyez la sortie entière ; il n’y a pas de biais.
# `F.scaled_dot_product_attention(q, k, v)` attend des tenseurs (batch, têtes, tokens, H).

# %% [markdown] lang="en"
# ### Exercise 4 — attention by heads
#
# `x` (batch, tokens, width) is whole, and so are `qkv` and `project`. The rows of `qkv` hold **all** queries, then all
# keys, then all values: it is a flattened matrix (3, heads, H, width), where H is the width of a head. Return the whole
# output; there is no bias. `F.scaled_dot_product_attention(q, k, v)` expects tensors (batch, heads, tokens, H).


# %% name="attention-heads"
def parallel_attention(x, qkv, project, heads, axis):
    width = x.shape[-1]
    ### BEGIN SOLUTION
    qkv_part = qkv.view(3, heads, -1, width).chunk(axis.size, dim=1)[axis.rank]
    q, k, v = torch.einsum("btd,pnhd->pbnth", copy(x, axis), qkv_part)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return add_up(attended @ project.chunk(axis.size, dim=1)[axis.rank].T, axis)
    ### END SOLUTION


lab.check("attention-heads", parallel_attention)

# %%
# lab.hint("attention-heads")

# %% [markdown] lang="fr"
# Un rangement (têtes, 3, H), tête par tête, aurait rendu la simple tranche juste : c’est celui de Megatron-LM, et des
# modèles de ce paquet. Un modèle préentraîné garde le sien : une tranche prise sans y penser mélange requêtes et clés,
# et la perte descend quand même.
#
# ## 4. Les deux bouts du modèle : le vocabulaire
#
# Un modèle de texte commence par une table (mots × largeur) et finit par une matrice (largeur × mots) : à elles deux,
# souvent plus que plusieurs blocs. On les coupe par **mots**.
#
# ### Exercice 5 — l’embedding
#
# `table` contient les vecteurs des mots de ce rang : il y en a `len(table)`, et les rangs se suivent dans l’ordre du
# vocabulaire. Renvoyez les vecteurs de tous les `tokens` (batch, tokens), sur chaque rang.

# %% [markdown] lang="en"
# A layout (heads, 3, H), head by head, would have made the plain slice right: it is Megatron-LM's, and that of this
# package's models. A pretrained model has its own layout: a naive slice mixes queries and keys, and the loss goes down
# all the same.
#
# ## 4. The two ends of the model: the vocabulary
#
# A text model begins with a table (words × width) and ends with a matrix (width × words): the two together are often
# more than several blocks. They are cut by **words**.
#
# ### Exercise 5 — the embedding
#
# `table` holds the vectors of this rank's words: there are `len(table)` of them, and the ranks follow one another in
# the order of the vocabulary. Return the vectors of all `tokens` (batch, tokens), on every rank.


# %% name="vocabulary-embedding"
def parallel_embedding(tokens, table, axis):
    start = axis.rank * len(table)
    ### BEGIN SOLUTION
    elsewhere = (tokens < start) | (tokens >= start + len(table))
    embeddings = table[(tokens - start).masked_fill(elsewhere, 0)]
    return add_up(embeddings.masked_fill(elsewhere.unsqueeze(-1), 0.0), axis)
    ### END SOLUTION


lab.check("vocabulary-embedding", parallel_embedding)

# %%
# lab.hint("vocabulary-embedding")

# %% [markdown] lang="fr"
# À l’autre bout, chaque rang calcule les logits de ses mots. L’entropie croisée en veut la somme des exponentielles :
# faut-il les rassembler ? Pour Llama 3 (128 256 mots), 8 192 tokens en fp32, ce que pèseraient les logits, et ce que
# pèsent trois nombres par token :

# %% [markdown] lang="en"
# At the other end, each rank computes the logits of its words. Cross-entropy wants the sum of their exponentials: do
# they have to be gathered? For Llama 3 (128,256 words), 8,192 tokens in fp32, what the logits would weigh, and what
# three numbers per token weigh:

# %% name="logits-or-three"
from dlojz.base.language import format_bytes

print(format_bytes(4 * 8192 * 128_256), format_bytes(4 * 8192 * 3))

# %% [markdown] lang="fr"
# ### Exercice 6 — la perte
#
# `logits` (batch, tokens, mots de ce rang) ; `targets` (batch, tokens) donne le numéro du mot à prédire, dans tout le
# vocabulaire. Renvoyez la perte **moyenne**, la même sur chaque rang, et sans rassembler les logits.
#
# Pour un token : perte = log Σ exp(logit − m) − (logit de la cible − m), où m est le plus grand logit (sans lui, exp
# déborde). `axis.all_reduce(t, largest=True)` met dans `t`, en place, le maximum sur les rangs plutôt que la somme ; m
# n’a pas besoin de gradient.

# %% [markdown] lang="en"
# ### Exercise 6 — the loss
#
# `logits` (batch, tokens, this rank's words); `targets` (batch, tokens) gives the number of the word to predict, in the
# whole vocabulary. Return the **mean** loss, the same on every rank, and do not gather the logits.
#
# For one token: loss = log Σ exp(logit − m) − (logit of the target − m), where m is the largest logit (without it, exp
# overflows). `axis.all_reduce(t, largest=True)` puts into `t`, in place, the maximum over the ranks rather than the
# sum; m needs no gradient.


# %% name="vocabulary-loss"
def parallel_loss(logits, targets, axis):
    words = logits.shape[-1]
    start = axis.rank * words
    ### BEGIN SOLUTION
    largest = axis.all_reduce(logits.detach().amax(-1), largest=True)
    shifted = logits - largest.unsqueeze(-1)
    elsewhere = (targets < start) | (targets >= start + words)
    target = shifted.gather(-1, (targets - start).masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    target = add_up(target.masked_fill(elsewhere, 0.0), axis)
    total = add_up(shifted.exp().sum(-1), axis)
    return (total.log() - target).mean()
    ### END SOLUTION


lab.check("vocabulary-loss", parallel_loss)

# %%
# lab.hint("vocabulary-loss")

# %% [markdown] lang="fr"
# ## 5. Un modèle entier
#
# Toutes les pièces sont là : embedding, attention, MLP, perte. Assemblons vos fonctions en un petit modèle, et
# entraînons-le, d’abord sur un seul processus, sans elles, puis sur deux rangs :

# %% [markdown] lang="en"
# ## 5. A whole model
#
# All the parts are there: embedding, attention, MLP, loss. Let us put your functions together into a small model, and
# train it, first on one process, without them, then on two ranks:

# %% name="own-model-alone"
torch.manual_seed(0)
shapes = {"table": (32, 16), "qkv": (48, 16), "out": (16, 16), "expand": (64, 16), "project": (16, 64)}
start = {name: torch.randn(shape) / 4 for name, shape in shapes.items()}
tokens, targets = torch.randint(32, (2, 8, 12))


def alone(w):
    x = w["table"][tokens]
    q, k, v = (F.layer_norm(x, (16,)) @ w["qkv"].T).view(8, 12, 3, 4, 4).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ w["out"].T
    x = x + F.gelu(F.layer_norm(x, (16,)) @ w["expand"].T) @ w["project"].T
    return F.cross_entropy((x @ w["table"].T).flatten(0, 1), targets.flatten())


def train(loss_of, weights, steps=8):
    optimizer, losses = torch.optim.SGD(weights.values(), lr=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(weights)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


losses = train(alone, {name: weight.clone().requires_grad_() for name, weight in start.items()})
print(*(decimal(loss, 3) for loss in losses))

# %% name="own-model-split"
# %%ranks --with start,tokens,targets,train,copy,parallel_embedding,parallel_attention,parallel_mlp,parallel_loss
from dlojz.base.language import decimal
from dlojz.by_hand.tensor.axis import TensorAxis

axis = TensorAxis(dist.group.WORLD)
cut = {"table": 0, "expand": 0, "project": 1}  # parallel_attention cuts its own // parallel_attention coupe les siens
parts = {name: weight.chunk(2, cut[name])[rank].clone() if name in cut else weight for name, weight in start.items()}


def split(w):
    x = parallel_embedding(tokens, w["table"], axis)
    x = x + parallel_attention(F.layer_norm(x, (16,)), w["qkv"], w["out"], 4, axis)
    x = x + parallel_mlp(F.layer_norm(x, (16,)), w["expand"], torch.zeros(32), w["project"], torch.zeros(16))
    return parallel_loss(copy(x, axis) @ w["table"].T, targets, axis)


losses = train(split, {name: weight.requires_grad_() for name, weight in parts.items()})
print(*(decimal(loss, 3) for loss in losses))

# %% [markdown] lang="fr"
# Les mêmes pertes. Le paquet assemble les mêmes pièces dans
# [split_blocks.py](../../dlojz/by_hand/tensor/split_blocks.py). Entraînons `llama_tiny` (4 blocs), seul, puis sur deux
# rangs avec `tp=2`. **Vos prédictions** :
#
# - combien d’*all-reduces* par pas, pour un micro-batch ? Comptez les blocs (deux régions chacun, deux sens), puis
#   l’embedding, l’entrée de la dernière couche, et la perte, qui en fait deux (la vôtre en fait trois ; le paquet
#   envoie ensemble le logit de la cible et la somme) ;
# - combien d’octets de poids par rang, en fp32 ? (Les normalisations, entières partout, ne pèsent presque rien.)

# %% [markdown] lang="en"
# The same losses. The package puts the same parts together in
# [split_blocks.py](../../dlojz/by_hand/tensor/split_blocks.py). Let us train `llama_tiny` (4 blocks), alone, then on
# two ranks with `tp=2`. **Your predictions**:
#
# - how many all-reduces per step, for one micro-batch? Count the blocks (two regions each, two directions), then the
#   embedding, the entry of the last layer, and the loss, which makes two (yours makes three; the package sends the
#   target's logit and the sum together);
# - how many bytes of weights per rank, in fp32? (The norms, whole everywhere, weigh next to nothing.)

# %% name="predict-messages" stub="value"
lab.predict(
    "tensor-messages",
    ### BEGIN SOLUTION
    4 * 2 * 2 + 1 + 1 + 2,
    ### END SOLUTION
)

# %% name="predict-weights" stub="value"
parameters = models.describe("llama_tiny").parameters
lab.predict(
    "tensor-weights",
    ### BEGIN SOLUTION
    4 * parameters / 2,
    ### END SOLUTION
)

# %% name="run-by-hand" tags=["nbval-ignore-output"]
config = dlojz.RunConfig.of(model="llama_tiny", engine="by_hand", micro_batch=4, steps=4)
single = dlojz.run(config)
two = dlojz.run(config, tp=2)

# %% name="reveal-messages"
footprint = two.record.footprint()
lab.reveal("tensor-messages", sum(traffic.count for traffic in footprint.communication if traffic.group == "tp"))

# %% name="reveal-weights"
lab.reveal("tensor-weights", footprint.memory.weights_bytes)

# %% name="same-losses"
all(abs(a - b) < 1e-4 for a, b in zip(single.losses, two.losses, strict=True))

# %% [markdown] lang="fr"
# On peut ne couper que **certaines** couches (`tensor_parts=`, comme chez SageMaker) : celles où un octet envoyé
# épargne le plus de poids. **Avant de regarder** : attention ou MLP ? Chaque région envoie les mêmes messages ; comptez
# leurs poids (le MLP a trois matrices de 128 × 352).

# %% [markdown] lang="en"
# It is possible to cut **some** layers only (`tensor_parts=`, as with SageMaker): those where one byte sent saves most
# weights. **Before you look**: attention or MLP? Each region sends the same messages; count their weights (the MLP has
# three matrices of 128 × 352).

# %% name="chosen-layers"
for parts in ("attention", "mlp"):
    shared = dlojz.run(config, tp=2, tensor_parts=parts).record.footprint()
    spared = single.record.footprint().memory.weights_bytes - shared.memory.weights_bytes
    sent = sum(traffic.sent_bytes for traffic in shared.communication if traffic.group == "tp")
    numbers = decimal(spared / 2**10, 0), decimal(sent / 2**10, 0), decimal(spared / sent, 3)
    print(f"{parts}, KiB spared, sent, ratio: // {parts}, Kio épargnés, envoyés, rapport :", *numbers)

# %% [markdown] lang="fr"
# ## 6. *Sequence Parallelism*
#
# Il reste un gaspillage. Hors des régions, chaque rang a tous les tokens : il calcule les mêmes normalisations, les
# mêmes *dropouts*, et en garde les mêmes activations. *Sequence Parallelism* (Korthikanti et al., 2022) y répartit les
# **tokens**. Le prix, en octets ? Presque aucun : un *all-reduce* est un *reduce-scatter* suivi d’un *all-gather*
# (TP 03). On fait le premier à la fin d’une région, le second au début de la suivante. Comme dans l’article, la figure
# appelle **g** cette nouvelle entrée (`gather_tokens` ci-dessous) et **g̅** la sortie (`scatter_tokens`) : ce n’est plus
# le g de plus haut.

# %% [markdown] lang="en"
# ## 6. Sequence parallelism
#
# One inefficiency remains. Outside the regions every rank has all tokens: it computes the same norms and the same
# dropouts, and stores the same activations. Sequence parallelism (Korthikanti et al., 2022) splits the **tokens**
# there. The price, in bytes? Next to none: an all-reduce is a reduce-scatter, then an all-gather (lab 03). The former
# is made at the end of a region, the latter at the beginning of the next. As in the paper, the figure calls this new
# entry **g** (`gather_tokens` below) and the exit **g̅** (`scatter_tokens`): it is no longer the g from above.

# %% name="sequence-block"
figures.block_ends(sequence_parallel=True)

# %% [markdown] lang="fr"
# Deux détails suffisent à tout fausser, sans erreur.
#
# **La normalisation.** Ses poids sont entiers sur chaque rang, qui ne voit plus que ses tokens : leur gradient est à
# additionner sur les rangs. L’opérateur qui additionne en passe arrière, vous le connaissez.
#
# **Le *dropout*.** Sur des tokens que tous les rangs ont, le masque doit être **le même** partout ; sur des têtes ou
# des tokens que chacun a pour soi, il doit **différer**. D’où deux flux de nombres aléatoires
# ([random_state.py](../../dlojz/by_hand/tensor/random_state.py)) :

# %% [markdown] lang="en"
# Two details are enough to spoil everything, without an error.
#
# **The norm.** Its weights are whole on every rank, which now sees its own tokens only: their gradient is to be added
# up over the ranks. You know the operator that adds up in backward.
#
# **Dropout.** On tokens that all ranks have, the mask must be **the same** everywhere; on heads or tokens that each has
# for itself, it must **differ**. Hence two streams of random numbers
# ([random_state.py](../../dlojz/by_hand/tensor/random_state.py)):

# %% name="two-streams"
# %%ranks
from dlojz.by_hand.tensor.random_state import RandomStates

states = RandomStates(seed=0, tp_rank=rank)
for stream in ("replicated", "split"):
    print(stream, states.dropout(torch.ones(12), 0.5, stream).int().tolist())

# %% [markdown] lang="fr"
# ### Exercice 7 — un demi-bloc, avec et sans
#
# Écrivez un demi-bloc : normalisation (`F.layer_norm`, `weight`, `bias`), région, *dropout* de probabilité 0,5,
# connexion résiduelle. `axis.sequence_parallel` dit si `x` contient les tokens de ce rang, ou tous ; la sortie de même.
#
# - `region(h)` calcule tout ce qui est **dans** la région, à partir de tous les tokens, et renvoie le produit partiel
#   de ce rang ;
# - `gather_tokens(t, axis)` réunit les tokens (et, en passe arrière, additionne puis répartit) ;
#   `scatter_tokens(t, axis)` additionne et ne garde que ceux de ce rang (en passe arrière, il réunit) ;
# - `copy` et `add_up`, comme avant ;
# - `states.dropout(t, 0.5, flux)`, où flux vaut `"replicated"` ou `"split"`.

# %% [markdown] lang="en"
# ### Exercise 7 — half a block, with and without
#
# Write half a block: norm (`F.layer_norm`, `weight`, `bias`), region, dropout with probability 0.5, residual
# connection. `axis.sequence_parallel` tells whether `x` holds this rank's tokens, or all; the same goes for the output.
#
# - `region(h)` computes all that is **within** the region, from all tokens, and returns this rank's partial product;
# - `gather_tokens(t, axis)` brings the tokens together (and, in backward, adds up and scatters);
#   `scatter_tokens(t, axis)` adds up and keeps only this rank's (in backward, it gathers);
# - `copy` and `add_up`, as before;
# - `states.dropout(t, 0.5, stream)`, where stream is `"replicated"` or `"split"`.


# %% name="sequence-parallel"
def half_block(x, weight, bias, region, states, axis):
    ### BEGIN SOLUTION
    if axis.sequence_parallel:
        h = F.layer_norm(x, x.shape[-1:], copy(weight, axis), copy(bias, axis))
        h = scatter_tokens(region(gather_tokens(h, axis)), axis)
        return x + states.dropout(h, 0.5, "split")
    h = F.layer_norm(x, x.shape[-1:], weight, bias)
    h = add_up(region(copy(h, axis)), axis)
    return x + states.dropout(h, 0.5, "replicated")
    ### END SOLUTION


lab.check("sequence-parallel", half_block)

# %%
# lab.hint("sequence-parallel")

# %% [markdown] lang="fr"
# Le même entraînement, avec `sequence_parallel=True` : pour le rang 0, en clair ce qui était prédit, dessous la mesure.

# %% [markdown] lang="en"
# The same training, with `sequence_parallel=True`: for rank 0, the prediction in a pale shade, the measurement below
# it.

# %% name="run-sequence" tags=["nbval-ignore-output"]
sequence = dlojz.run(config, tp=2, sequence_parallel=True)

# %% name="side-by-side" tags=["nbval-ignore-output"]
figures.side_by_side([single, two, sequence])

# %% name="counted"
figures.counted([two, sequence])

# %% [markdown] lang="fr"
# **Expliquez**, d’après la figure ; la cellule répond ensuite. Par combien les poids sont-ils divisés de un à deux
# rangs, et par combien les activations, sans puis avec *Sequence Parallelism* ?

# %% [markdown] lang="en"
# **Explain**, from the figure; then the cell answers. By how much are weights divided from one rank to two, and by how
# much activations, without and then with sequence parallelism?

# %% name="sequence-seen"
figures.sequence_seen(single, two, sequence)

# %% [markdown] lang="fr"
# Les poids, les gradients et l’optimiseur sont divisés par le nombre de rangs, normalisations mises à part. Les
# activations ne le sont presque tout à fait que si l’on répartit aussi les tokens ; reste l’entrée de chaque région,
# que nous gardons rassemblée pour la passe arrière (Megatron-LM n’en garde que les tokens du rang, et les rassemble de
# nouveau). Quant au tableau : deux fois plus de messages, mais chacun n’est que la moitié d’un *all-reduce*, et
# l’anneau envoie autant d’octets. Les petits *all-reduces* qui restent sont les gradients des normalisations, et la
# perte.
#
# ## 7. Les convolutions, par canaux
#
# Le modèle du cours, CoAtNet, commence par des convolutions. Son bloc MBConv se coupe comme un MLP, par **canaux** : la
# convolution 1×1 qui élargit est une couche linéaire sur les canaux, par colonne ; celle qui projette, par ligne. Entre
# les deux, la convolution *depthwise* traite chaque canal seul. Il n’y a qu’un intrus : *squeeze-excite*, dont la porte
# dépend de **tous** les canaux. Voici le bloc sur un seul processus (sans ses normalisations) :

# %% [markdown] lang="en"
# Weights, gradients and optimizer are divided by the number of ranks, norms aside. Activations are nearly so only if
# tokens are split as well; what is left is the input of each region, which we keep gathered for backward
# (Megatron-LM keeps this rank's tokens of it only, and gathers them again). As for the table: twice as many messages,
# but each is only half of an all-reduce, and the ring sends as many bytes. The small all-reduces that remain are the
# gradients of the norms, and the loss.
#
# ## 7. Convolutions, by channels
#
# The model of the course, CoAtNet, begins with convolutions. Its MBConv block is cut like an MLP, by **channels**: the
# 1×1 convolution that widens is a linear layer over the channels, by columns; the one that projects, by rows. Between
# the two, the depthwise convolution treats each channel alone. There is one intruder: squeeze-excite, whose gate
# depends on **all** channels. Here is the block on one process (without its norms):


# %% name="mbconv-alone"
def mbconv_alone(x, part):
    h = F.gelu(F.conv2d(x, part.expand))
    h = F.gelu(F.conv2d(h, part.depthwise, padding=1, groups=len(part.depthwise)))
    squeezed = F.silu(h.mean((2, 3)) @ part.squeeze.T + part.squeeze_bias)
    gate = torch.sigmoid(squeezed @ part.excite.T + part.excite_bias)
    return x + F.conv2d(h * gate[:, :, None, None], part.project)


# %% [markdown] lang="fr"
# ### Exercice 8 — MBConv par canaux
#
# Chaque rang a sa part de chaque poids, dans `part` : ses canaux cachés pour `expand`, `depthwise`, `excite`,
# `excite_bias` (comme sorties), pour `squeeze` et `project` (comme entrées) ; `squeeze_bias` est entier. `x` l’est
# aussi, et la sortie doit l’être. Mettez les opérateurs où il faut : il y en a quatre.

# %% [markdown] lang="en"
# ### Exercise 8 — MBConv by channels
#
# Each rank has its part of each weight, in `part`: its hidden channels for `expand`, `depthwise`, `excite`,
# `excite_bias` (as outputs), for `squeeze` and `project` (as inputs); `squeeze_bias` is whole. So is `x`, and so must
# the output be. Put the operators where they belong: there are four.


# %% name="mbconv-channels"
def parallel_mbconv(x, part, axis):
    ### BEGIN SOLUTION
    h = F.gelu(F.conv2d(copy(x, axis), part.expand))
    h = F.gelu(F.conv2d(h, part.depthwise, padding=1, groups=len(part.depthwise)))
    squeezed = F.silu(add_up(h.mean((2, 3)) @ part.squeeze.T, axis) + part.squeeze_bias)
    gate = torch.sigmoid(copy(squeezed, axis) @ part.excite.T + part.excite_bias)
    return x + add_up(F.conv2d(h * gate[:, :, None, None], part.project), axis)
    ### END SOLUTION


lab.check("mbconv-channels", parallel_mbconv)

# %%
# lab.hint("mbconv-channels")

# %% [markdown] lang="fr"
# CoAtNet se coupe donc en entier : convolutions, attention et MLP. Sur deux rangs, ce que chacun garde et ce qu’ils
# échangent :

# %% [markdown] lang="en"
# So all of CoAtNet can be cut: convolutions, attention and MLP. On two ranks, what each keeps and what they exchange:

# %% name="run-coatnet" tags=["nbval-ignore-output"]
coatnet = dlojz.run(model="coatnet_tiny", engine="by_hand", tp=2, micro_batch=4, steps=3)

# %% name="counted-coatnet"
figures.counted([coatnet])

# %% [markdown] lang="fr"
# À la même largeur, un étage de convolution a bien plus de « tokens » (pixels) qu’un étage d’attention, et moins de
# poids à répartir : on coupe rarement les convolutions, et toujours les grandes matrices.
#
# ## 8. Avec PyTorch : `parallelize_module`
#
# PyTorch sait faire ce que vous venez d’écrire. On lui donne un **plan** : pour chaque couche, `ColwiseParallel()` ou
# `RowwiseParallel()`. Les poids deviennent des `DTensor`, et les communications se déduisent du plan.
#
# ### Exercice 9 — le plan d’un bloc de Llama
#
# Cherchez les noms de ses couches dans `named_modules()` ; les sorties de `mlp_gate` et `mlp_expand` se multiplient
# terme à terme. Renvoyez le plan, un dictionnaire `{nom: style}`.

# %% [markdown] lang="en"
# At the same width, a stage of convolutions has many more “tokens” (pixels) than a stage of attention, and fewer
# weights to split: convolutions are seldom cut, large matrices always.
#
# ## 8. With PyTorch: `parallelize_module`
#
# PyTorch can do what you have just written. It is given a **plan**: for each layer, `ColwiseParallel()` or
# `RowwiseParallel()`. The weights become `DTensor`s, and the communication follows from the plan.
#
# ### Exercise 9 — the plan of a Llama block
#
# Look for the names of its layers in `named_modules()`; the outputs of `mlp_gate` and `mlp_expand` are multiplied term
# by term. Return the plan, a dictionary `{name: style}`.

# %% name="names"
for name, layer in models.build("llama_tiny").blocks[1].named_modules():
    if not list(layer.children()):
        print(name, *(tuple(weight.shape) for weight in layer.parameters()))


# %% name="parallelize-plan"
def llama_plan():
    ### BEGIN SOLUTION
    return {
        "query": ColwiseParallel(),
        "key": ColwiseParallel(),
        "value": ColwiseParallel(),
        "attention_project": RowwiseParallel(),
        "mlp_gate": ColwiseParallel(),
        "mlp_expand": ColwiseParallel(),
        "mlp_project": RowwiseParallel(),
    }
    ### END SOLUTION


lab.check("parallelize-plan", llama_plan)

# %%
# lab.hint("parallelize-plan")

# %% [markdown] lang="fr"
# **Avant de regarder** : combien d’*all-reduces* en passe avant, et combien en tout, avec votre plan ? Vous en faisiez
# quatre à la main.

# %% [markdown] lang="en"
# **Before you look**: how many all-reduces in forward, and how many in all, with your plan? By hand you made four.

# %% name="count-torch"
# %%ranks --with llama_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from dlojz import models

mesh = init_device_mesh("cpu", (world_size,))
block = parallelize_module(models.build("llama_tiny").blocks[1], mesh, llama_plan())
x = torch.randn(2, 16, 128, requires_grad=True)
with CommDebugMode() as counted:
    y = block(x)
    forward = counted.get_total_counts()
    y.sum().backward()
print(forward, counted.get_total_counts())

# %% [markdown] lang="fr"
# Deux en passe avant, comme prévu ; mais cinq en passe arrière au lieu de deux. Chaque couche par colonne a son propre
# f : trois pour `query`, `key` et `value`, deux pour `mlp_gate` et `mlp_expand`, alors qu’un par région suffit. Un plan
# peut en dire davantage : `PrepareModuleInput` et `PrepareModuleOutput` disent sous quelle forme un module reçoit ou
# rend ses tenseurs, `SequenceParallel` découpe les tokens d’une normalisation (section 6), et `loss_parallel` fait la
# perte de l’exercice 6. Avec le moteur de PyTorch, le même entraînement :

# %% [markdown] lang="en"
# Two in forward, as foreseen; but five in backward rather than two. Each column-parallel layer has its own f: three for
# `query`, `key` and `value`, two for `mlp_gate` and `mlp_expand`, where one per region is enough. A plan can say more:
# `PrepareModuleInput` and `PrepareModuleOutput` tell in which form a module takes or gives its tensors,
# `SequenceParallel` splits the tokens of a norm (section 6), and `loss_parallel` makes the loss of exercise 6. With
# PyTorch's engine, the same training:

# %% name="run-torch" tags=["nbval-ignore-output"]
torch_run = dlojz.run(config, engine="torch", tp=2)

# %% name="torch-seen"
figures.torch_seen(single, torch_run, two)

# %% [markdown] lang="fr"
# ## 9. Octets et secondes, et pourquoi pas entre les nœuds
#
# ### Exercice 10 — les octets d’une couche
#
# Combien d’octets chaque rang **envoie**-t-il pour une couche de transformer (attention et MLP) et un micro-batch,
# passes avant et arrière, sur un anneau ? `number_bytes` est la taille d’un nombre (2 en bf16). Aucune activation
# n’est recalculée.

# %% [markdown] lang="en"
# ## 9. Bytes and seconds, and why not between nodes
#
# ### Exercise 10 — the bytes of a layer
#
# How many bytes does each rank **send** for one transformer layer (attention and MLP) and one micro-batch, forward and
# backward, on a ring? `number_bytes` is the size of a number (2 in bf16). No activation is computed again.


# %% name="layer-bytes"
def layer_bytes(samples, tokens, width, ranks, number_bytes):
    ### BEGIN SOLUTION
    message = samples * tokens * width * number_bytes
    return 4 * message * 2 * (ranks - 1) / ranks
    ### END SOLUTION


lab.check("layer-bytes", layer_bytes)

# %%
# lab.hint("layer-bytes")

# %% [markdown] lang="fr"
# **Et en secondes ?** Mesurons sur nos rangs : un *all-reduce* d’un nombre (la latence), puis de 4 Mio ; quatre MLP
# entiers, sur un rang seul ; leurs moitiés, sur les deux rangs à la fois, *all-reduces* omis. Médianes, en secondes :

# %% [markdown] lang="en"
# **And in seconds?** Let us measure on our two ranks: an all-reduce of one number (the latency), then of 4 MiB; four
# whole MLPs, on one rank alone; their halves, on both ranks at once, all-reduces left out. Medians, in seconds:

# %% name="calibrate" tags=["nbval-ignore-output"]
# %%ranks --with EnterRegion,parallel_mlp
from statistics import median
from time import perf_counter

from dlojz.base.language import decimal


def seconds(step, times):
    times_s = []
    for _ in range(times):
        dist.barrier()
        begin = perf_counter()
        step()
        times_s.append(perf_counter() - begin)
    return times_s


def mlps(ranks):
    torch.manual_seed(0)
    shapes = ((1024 // ranks, 256), (1024 // ranks,), (256, 1024 // ranks), (256,))
    return [[(torch.randn(shape) / 32).requires_grad_() for shape in shapes] for _ in range(4)]


def step(weights):
    y = x
    for parts in weights:
        y = y + parallel_mlp(y, *parts)
    y.square().mean().backward()


x = torch.randn(1024, 256, requires_grad=True)  # tokens, width // tokens, largeur
number, block, whole, half = torch.zeros(1), torch.zeros(2**20), mlps(1), mlps(world_size)
one_number_s = median(seconds(lambda: dist.all_reduce(number), 15))
four_mib_s = median(seconds(lambda: dist.all_reduce(block), 15))
all_reduce = dist.all_reduce
try:
    dist.all_reduce = lambda tensor: None  # left out // omis
    whole_s = median(seconds(lambda: step(whole) if rank == 0 else None, 7))
    half_s = median(seconds(lambda: step(half), 7))
finally:  # whatever happens above // quoi qu’il arrive au-dessus
    dist.all_reduce = all_reduce
print("one number, 4 MiB: // un nombre, 4 Mio :", f"{decimal(one_number_s, 4)} s, {decimal(four_mib_s, 4)} s")
print("whole, half: // entier, moitié :", f"{decimal(whole_s, 3)} s, {decimal(half_s, 3)} s")

# %% [markdown] lang="fr"
# **Vos prédictions**, pour ces quatre MLP (1 024 tokens, largeur 256, fp32) : combien de secondes par pas prendront les
# *all-reduces* (deux par MLP) ? Et combien de fois plus vite ira-t-on sur deux rangs que sur un seul ? Les mesures sont
# ci-dessus, par exemple `ranks["whole_s"][0]`. Rien ne recouvre ces messages : leur temps s’ajoute au calcul.

# %% [markdown] lang="en"
# **Your predictions**, for these four MLPs (1,024 tokens, width 256, fp32): how many seconds per step will the
# all-reduces take (two per MLP)? And how many times as fast as one rank will two ranks be? The measurements are above,
# for instance `ranks["whole_s"][0]`. Nothing hides these messages: their time is added to the computation.

# %% name="predict-reduce" stub="value" tags=["nbval-ignore-output"]
latency_s, large_s = ranks["one_number_s"][0], ranks["four_mib_s"][0]
lab.predict(
    "reduce-seconds",
    ### BEGIN SOLUTION
    8 * (latency_s + (large_s - latency_s) * (1024 * 256 * 4) / 2**22),
    ### END SOLUTION
)

# %% name="predict-speed-up" stub="value" tags=["nbval-ignore-output"]
whole_s, half_s = ranks["whole_s"][0], max(ranks["half_s"])
lab.predict(
    "tensor-speed-up",
    ### BEGIN SOLUTION
    whole_s / (half_s + 8 * (latency_s + (large_s - latency_s) * (1024 * 256 * 4) / 2**22)),
    ### END SOLUTION
)

# %% name="measure-step" tags=["nbval-ignore-output"]
# %%ranks --with EnterRegion,parallel_mlp
from dlojz.base.language import decimal

waited_s = spent_s = 0.0


def clocked(tensor):
    global waited_s, spent_s
    begin = perf_counter()
    dist.barrier()  # until the other rank is there // jusqu’à ce que l’autre rang soit là
    ready = perf_counter()
    all_reduce(tensor)
    waited_s, spent_s = waited_s + ready - begin, spent_s + perf_counter() - ready


measured = []
try:
    for _ in range(9):  # in turns, so that both meet the same machine // en alternance, pour la même machine
        dist.all_reduce = lambda tensor: None
        [alone_s] = seconds(lambda: step(whole) if rank == 0 else None, 1)
        dist.all_reduce, waited_s, spent_s = clocked, 0.0, 0.0
        [split_s] = seconds(lambda: step(half), 1)
        measured.append((alone_s / split_s, 1024 / split_s, waited_s, spent_s))
finally:
    dist.all_reduce = all_reduce
speed_up, rate, waited, spent = (median(column) for column in zip(*measured, strict=True))
print(decimal(rate, 0), "tokens/s; all-reduces, waiting, sending: // tokens/s ; all-reduces, attente, envoi :", end=" ")
print(f"{decimal(waited, 4)} s, {decimal(spent, 4)} s")

# %% name="reveal-reduce" tags=["nbval-ignore-output"]
lab.reveal("reduce-seconds", min(ranks["spent"]))

# %% name="reveal-speed-up" tags=["nbval-ignore-output"]
lab.reveal("tensor-speed-up", ranks["speed_up"][0])

# %% [markdown] lang="fr"
# Deux rangs ne vont pas deux fois plus vite : comptez sur 1,1 à 1,7, et des écarts de 30 % sur une machine occupée,
# davantage pour les *all-reduces*. Les cœurs se gênent (la moitié prend souvent plus de la moitié du temps), les
# messages s’ajoutent, et chaque *all-reduce* attend d’abord le rang le plus lent, ce que α et β ne disent pas.
#
# Et entre les nœuds ? Prenons NVLink, 300 Go/s par sens dans un nœud de A100 (NVIDIA, 2020), α = 5 µs ; le réseau du
# TP 03, 25 Go/s, α = 10 µs ; et le calcul d’une couche, 72 B T D² (1 + T / 6D) opérations réparties sur p rangs
# (Narayanan et al., 2021), avec des GPU qui soutiennent 200 TFLOP/s. (On peut recouvrir une partie des messages, en
# coupant le produit en morceaux : c’est le *Tensor Parallelism* asynchrone de PyTorch.)

# %% [markdown] lang="en"
# Two ranks are not twice as fast: expect 1.1 to 1.7, and differences of 30% on a busy machine, more for the
# all-reduces. The cores slow each other down (half often takes more than half the time), the messages are added, and
# each all-reduce first waits for the slowest rank, which α and β do not tell.
#
# And between nodes? Let us take NVLink, 300 GB/s per direction in a node of A100s (NVIDIA, 2020), α = 5 µs; the
# network of lab 03, 25 GB/s, α = 10 µs; and the computation of a layer, 72 B T D² (1 + T / 6D) operations divided
# among p ranks (Narayanan et al., 2021), on GPUs that sustain 200 TFLOP/s. (A part of the messages can be hidden, by
# cutting the product into pieces: PyTorch's asynchronous tensor parallelism.)

# %% name="over-links"
figures.over_links(layer_bytes, tokens=2048, width=12288, flops_per_s=200e12)

# %% [markdown] lang="fr"
# **Expliquez.** Sur 8 rangs, quelle part du temps d’une couche passe en communication, par NVLink, puis par le réseau ?
# Et pour une couche huit fois moins large ?

# %% [markdown] lang="en"
# **Explain.** On 8 ranks, which share of a layer's time is spent communicating, over NVLink, then over the network? And
# for a layer an eighth as wide?

# %% name="share-of-time"
sizes = {"samples": 1, "tokens": 2048, "ranks": 8, "number_bytes": 2}
figures.share_of_time(layer_bytes, (12288, 12288 // 8), flops_per_s=200e12, **sizes)

# %% [markdown] lang="fr"
# Dans le nœud, un dixième du temps ; par le réseau, la moitié. Et plus la couche est étroite, pire c’est : son calcul
# diminue comme le carré de la largeur, ses messages comme la largeur. D’où l’usage : *Tensor Parallelism* **dans le
# domaine NVLink** (les 8 GPU d’un nœud, jusqu’à 72 pour une baie GB200), le pipeline ou *Data Parallelism* entre les
# nœuds.
#
# ## Défi — le moins d’octets
#
# Facultatif. Le plan de l’exercice 9 envoie, en passes avant et arrière d’un bloc, sept fois les octets de x, là où
# quatre suffisent à la main. Écrivez une fonction sans argument qui renvoie un autre plan du même bloc : les sept
# couches découpées, les mêmes valeurs, et le moins d’octets comptés sur deux rangs. Objectif : 4.

# %% [markdown] lang="en"
# Within the node, a tenth of the time; over the network, half of it. And the narrower the layer, the worse: its
# computation shrinks with the square of the width, its messages with the width. Hence the usual practice: tensor
# parallelism **within the NVLink domain** (the 8 GPUs of a node, up to 72 of a GB200 rack), a pipeline or data
# parallelism between nodes.
#
# ## Challenge — the fewest bytes
#
# Optional. The plan of exercise 9 sends, in forward and backward of a block, seven times the bytes of x, where four are
# enough by hand. Write a function without arguments that returns another plan of the same block: the seven layers
# split, the same values, and the fewest bytes counted on two ranks. Target: 4.


# %% name="fewest-bytes"
def frugal_plan():
    ### BEGIN SOLUTION
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import PrepareModuleOutput

    shared = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False)
    return llama_plan() | {"norm1": shared, "norm2": shared}
    ### END SOLUTION


lab.check("fewest-bytes", frugal_plan)

# %%
# lab.hint("fewest-bytes")

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Découpez les MLP du script (`--parallel tp`) : la première couche par colonnes, la seconde par lignes. Trouvez leurs
# noms dans `model.named_modules()`. Tous les rangs lisent les mêmes échantillons. Continuez dans votre `train.py`, ou
# partez de la solution du TP précédent : `dlojz labs script 06 un_autre_dossier` la fournit, avec des `# TODO`.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))
# plan = {"blocks.*.fc1": ColwiseParallel(), "blocks.*.fc2": RowwiseParallel()}
# parallelize_module(model, mesh, plan)
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Split the MLPs of the script (`--parallel tp`): the first layer by columns, the second by rows. Find their names in
# `model.named_modules()`. All ranks read the same samples. Go on in your `train.py`, or begin with the solution of the
# lab before: `dlojz labs script 06 another_folder` writes one, with a `# TODO` at each place to fill in. Check it with
# the next cell.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))
# plan = {"blocks.*.fc1": ColwiseParallel(), "blocks.*.fc2": RowwiseParallel()}
# parallelize_module(model, mesh, plan)
# ```
#
# </details>

# %% name="own-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# | | passe avant | passe arrière |
# |--|--|--|
# | par colonne, seule | – (ou *all-gather* des sorties) | *all-reduce* du gradient de X |
# | par ligne, seule | *all-reduce* de Y | – |
# | la paire (MLP, attention) | un *all-reduce* | un *all-reduce* |
# | avec *Sequence Parallelism* | *all-gather*, *reduce-scatter* | *all-gather*, *reduce-scatter* |
# | embedding | *all-reduce* (B, T, D) | – |
# | perte | trois nombres par token | – |
# | MBConv | une paire, et une petite pour *squeeze-excite* | de même |
#
# Le *Tensor Parallelism* divise tout : poids, gradients, optimiseur, calcul, et les activations avec *Sequence
# Parallelism* ; sans toucher à la taille de batch, et sans bulle. Il le paie de quatre *all-reduces* par couche,
# difficiles à recouvrir. Il se combine avec les autres parallélismes : c’est le TP 07.

# %% [markdown] lang="en"
# ## Summary
#
# | | forward | backward |
# |--|--|--|
# | by columns, alone | – (or all-gather of the outputs) | all-reduce of the gradient of X |
# | by rows, alone | all-reduce of Y | – |
# | the pair (MLP, attention) | one all-reduce | one all-reduce |
# | with sequence parallelism | all-gather, reduce-scatter | all-gather, reduce-scatter |
# | embedding | all-reduce (B, T, D) | – |
# | loss | three numbers per token | – |
# | MBConv | a pair, and a small one for squeeze-excite | the same |
#
# Tensor parallelism divides everything: weights, gradients, optimizer, computation, and with sequence parallelism the
# activations; without touching the batch size, and without a bubble. It pays with four all-reduces per layer, which are
# hard to hide. It combines with the other parallelisms: that is lab 07.

# %%
lab.progress()

# %% name="stop-ranks"
# %ranks stop
