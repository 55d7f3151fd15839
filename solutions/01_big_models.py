# %% [markdown] lang="fr"
# # TP 01 — Gros modèles
#
# ResNet-50 compte 25 millions de paramètres ; CoAtNet-7, cent fois plus. Entre les deux, une idée est venue compléter
# les convolutions, et parfois les remplacer : l’**attention**. Dans ce TP, vous la construisez à la main, vous
# transformez une image en séquence, vous comptez des paramètres et des opérations, puis vous mesurez.
#
# À la fin, vous saurez :
#
# - écrire l’auto-attention et l’attention multi-têtes, et les vérifier face à PyTorch ;
# - passer d’une image à des tokens, comme un *Vision Transformer* (ViT) ;
# - dire d’où viennent les paramètres et le coût d’un bloc, par une formule ;
# - expliquer pourquoi *CoAtNet* commence par des convolutions et finit par de l’attention ;
# - prévoir à partir de quelle taille un modèle ne tient plus sur un GPU.
#
# Comptez une heure et quart. Les suffixes des variables donnent leur forme : `x_TD` a `T` lignes (les tokens) et `D`
# colonnes (la largeur) ; `N` est le nombre de têtes, `H = D / N` la largeur d’une tête.

# %% [markdown] lang="en"
# # Lab 01 — Big models
#
# ResNet-50 has 25 million parameters; CoAtNet-7 has a hundred times more. Between the two, one idea has joined
# convolutions, and sometimes taken their place: **attention**. In this lab you build it by hand, turn an image into a
# sequence, count parameters and operations, and then measure.
#
# By the end you can:
#
# - write self-attention and multi-head attention, and check them against PyTorch;
# - go from an image to tokens, as a Vision Transformer (ViT) does;
# - tell where the parameters and the cost of a block come from, by a formula;
# - explain why CoAtNet begins with convolutions and ends with attention;
# - foresee from which size on a model no longer fits on a GPU.
#
# Allow an hour and a quarter. The suffixes of the variables give their shape: `x_TD` has `T` rows (the tokens) and `D`
# columns (the width); `N` is the number of heads, `H = D / N` the width of a head.

# %% name="setup"
import torch
import torch.nn.functional as F

import dlojz
from dlojz import data, labs, models
from dlojz.labs.lab01_big_models import figures

lab = labs.start("01")

# %% [markdown] lang="fr"
# ## 1. L’attention
#
# Une séquence de `T` tokens, chacun un vecteur de largeur `D`. Le sens d’un token dépend des autres : il faut
# qu’ils puissent échanger de l’information. L’attention procède en trois temps.
#
# 1. Chaque token pose une **requête** (une ligne de `q_TD`) et présente une **clé** (une ligne de `k_TD`). Le produit
#    scalaire d’une requête et d’une clé donne un **score** : à quel point le second token compte pour le premier.
# 2. Un **softmax** change les scores d’une requête en poids positifs, de somme 1. Les scores sont d’abord divisés par
#    $\sqrt{D}$ : une somme de `D` produits de variables indépendantes, centrées et réduites, a un écart-type de
#    $\sqrt{D}$ ; sans cette mise à l’échelle, le softmax ne garderait presque qu’un seul token.
# 3. La sortie est la moyenne des **valeurs** (les lignes de `v_TD`), pondérée par ces poids.
#
# $$\mathrm{attention}(q, k, v) = \mathrm{softmax}\!\left(\frac{q\,k^\top}{\sqrt{D}}\right) v$$
#
# On parle d’*auto*-attention (*self-attention*) quand requêtes, clés et valeurs viennent de la même séquence.
#
# ### Exercice 1 — l’attention à une tête
#
# Écrivez-la en deux ou trois lignes, sans appeler la fonction de PyTorch : c’est elle qui servira de juge.

# %% [markdown] lang="en"
# ## 1. Attention
#
# A sequence of `T` tokens, each a vector of width `D`. What a token means depends on the others: they must be allowed
# to exchange information. Attention does so in three steps.
#
# 1. Each token asks a **query** (a row of `q_TD`) and shows a **key** (a row of `k_TD`). The dot product of a query and
#    a key is a **score**: how relevant the second token is to the first.
# 2. A **softmax** turns the scores of one query into positive weights that sum to 1. The scores are divided by
#    $\sqrt{D}$ first: a dot product of `D` random terms has a standard deviation of $\sqrt{D}$, and without this
#    scaling the softmax would keep nearly one token only.
# 3. The output is the mean of the **values** (the rows of `v_TD`), with these weights.
#
# $$\mathrm{attention}(q, k, v) = \mathrm{softmax}\!\left(\frac{q\,k^\top}{\sqrt{D}}\right) v$$
#
# It is called *self*-attention when queries, keys and values come from the same sequence.
#
# ### Exercise 1 — attention with one head
#
# Write it in two or three lines, without calling PyTorch's own function: that one will be the judge.


# %% name="attention"
def attention(q_TD, k_TD, v_TD):
    ### BEGIN SOLUTION
    scores_TT = q_TD @ k_TD.T / q_TD.shape[-1] ** 0.5
    return torch.softmax(scores_TT, dim=-1) @ v_TD
    ### END SOLUTION


lab.check("attention", attention)

# %% [markdown] lang="fr"
# Bloqué ? Décommentez la ligne suivante ; exécutez-la deux fois pour le second indice.

# %% [markdown] lang="en"
# Stuck? Uncomment the next line; run it twice for the second hint.

# %%
# lab.hint("attention")

# %% [markdown] lang="fr"
# À quoi cela sert : dans « l’avocat prépare sa plaidoirie » et « l’avocat a un gros noyau », le même mot, donc le même
# vecteur, a deux sens. Sur trois vecteurs faits à la main, dont les colonnes disent « droit » et « fruit », voici ce
# que votre fonction fait d’*avocat* selon son voisin.

# %% [markdown] lang="en"
# What it is for: the French *avocat* is a lawyer or an avocado. Beside *plaidoirie* (a speech for the defence) or
# *noyau* (a stone of a fruit), the same word, so the same vector, has two meanings. With three vectors made by hand,
# whose columns mean "law" and "fruit", here is what your function makes of *avocat* beside each neighbour.

# %% name="homograph"
meanings = {"avocat": (1.0, 1.0), "plaidoirie": (2.0, 0.0), "noyau": (0.0, 2.0)}
for neighbour in ("plaidoirie", "noyau"):
    x_TD = torch.tensor([meanings["avocat"], meanings[neighbour]])
    print(neighbour, attention(x_TD, x_TD, x_TD)[0].tolist())

# %% [markdown] lang="fr"
# Une propriété à voir de ses yeux : mélangez les tokens, la sortie est mélangée de la même façon, et rien d’autre ne
# change. L’attention ne voit pas l’ordre ; il faudra donc lui dire où se trouve chaque token.

# %% [markdown] lang="en"
# One property to see with your own eyes: shuffle the tokens, and the output is shuffled in the same way; nothing else
# changes. Attention does not see order; so it needs to know where each token stands.

# %%
generator = torch.Generator().manual_seed(0)
x_1TD = torch.randn((1, 6, 8), generator=generator)
order = torch.randperm(6, generator=generator)
straight_1TD = F.scaled_dot_product_attention(x_1TD, x_1TD, x_1TD)
shuffled_1TD = F.scaled_dot_product_attention(x_1TD[:, order], x_1TD[:, order], x_1TD[:, order])
torch.allclose(straight_1TD[:, order], shuffled_1TD, atol=1e-6)

# %% [markdown] lang="fr"
# Qui voit qui ? C’est ce qui distingue les trois familles de Transformers. Le premier (Vaswani et al., 2017)
# traduisait, avec un **encodeur** qui voit toute la phrase source et un **décodeur** qui ne voit, de sa propre phrase,
# que le passé. BERT et ViT ne gardent que l’encodeur, GPT et LLaMA que le décodeur ; T5 garde les deux. Chaque case
# sombre est un score permis ; ailleurs, il vaut −∞ avant le softmax.

# %% [markdown] lang="en"
# Who sees whom? That is what tells the three families of Transformers apart. The first one (Vaswani et al., 2017)
# translated, with an **encoder** that sees the whole source sentence and a **decoder** that sees only the past of its
# own. BERT and ViT keep the encoder alone, GPT and LLaMA the decoder alone; T5 keeps both. Each dark square is a score
# that is allowed; elsewhere it is −∞ before the softmax.

# %% name="families"
figures.families()

# %% [markdown] lang="fr"
# ### Exercice 2 — l’attention multi-têtes
#
# Une seule moyenne ne peut exprimer qu’un seul genre de lien. L’attention multi-têtes découpe la largeur `D` en `N`
# têtes de largeur `H` ; chacune calcule sa propre attention, toutes en même temps. Deux matrices apprises encadrent le
# calcul :
#
# - `qkv_DE` (`E = 3 D`) projette les tokens ; le résultat contient, côte à côte, les requêtes, les clés, puis les
#   valeurs ;
# - dans chacune des trois parties, la tête `n` occupe les colonnes `n·H` à `(n + 1)·H − 1` ;
# - les sorties des têtes, remises côte à côte, passent par la projection de sortie `out_DD`.
#
# Il n’y a pas de biais. Chaque tête divise ses scores par la racine de **sa** largeur.

# %% [markdown] lang="en"
# ### Exercise 2 — multi-head attention
#
# A single mean can express a single kind of relation. Multi-head attention cuts the width `D` into `N` heads of width
# `H`; each computes its own attention, all at the same time. Two learned matrices frame the computation:
#
# - `qkv_DE` (`E = 3 D`) projects the tokens; the result holds, side by side, the queries, the keys, then the values;
# - in each of the three parts, head `n` takes the columns `n·H` to `(n + 1)·H − 1`;
# - the outputs of the heads, side by side again, go through the output projection `out_DD`.
#
# There are no biases. Each head divides its scores by the square root of **its own** width.


# %% name="multi-head"
def multi_head(x_TD, qkv_DE, out_DD, num_heads):
    ### BEGIN SOLUTION
    parts = (x_TD @ qkv_DE).chunk(3, dim=-1)
    q_NTH, k_NTH, v_NTH = (part.unflatten(-1, (num_heads, -1)).transpose(0, 1) for part in parts)
    scores_NTT = q_NTH @ k_NTH.transpose(-2, -1) / q_NTH.shape[-1] ** 0.5
    heads_NTH = torch.softmax(scores_NTT, dim=-1) @ v_NTH
    return heads_NTH.transpose(0, 1).flatten(1) @ out_DD
    ### END SOLUTION


lab.check("multi-head", multi_head)

# %%
# lab.hint("multi-head")

# %% [markdown] lang="fr"
# Remarquez ce qui *n’apparaît pas* dans les formes des matrices : le nombre de têtes. Il change le calcul, pas le
# nombre de paramètres. Et les têtes ne se parlent qu’à la toute fin : c’est par là que le *Tensor Parallelism* les
# répartira entre GPU.
#
# ## 2. D’une image à une séquence
#
# Un *Vision Transformer* traite une image comme une phrase. L’image est découpée en carrés, les *patches* ; chacun,
# aplati puis projeté, devient un token. S’y ajoutent un **token de classe**, placé en tête, dont la sortie servira à
# classer l’image, et un **embedding de position** appris, additionné à chaque token.
#
# **Votre prédiction.** ViT-B/16 reçoit des images de 224 × 224 pixels et les découpe en patches de 16 × 16. Combien de
# tokens entrent dans son premier bloc ?

# %% [markdown] lang="en"
# Notice what does *not* appear in the shapes of the matrices: the number of heads. It changes the computation, not the
# number of parameters. And the heads talk to one another only at the very end: that is where tensor parallelism will
# divide them among GPUs.
#
# ## 2. From an image to a sequence
#
# A Vision Transformer treats an image like a sentence. The image is cut into squares, the patches; each, flattened and
# projected, becomes a token. To these come a **class token**, put in front, whose output will serve to classify the
# image, and a learned **position embedding**, added to each token.
#
# **Your prediction.** ViT-B/16 takes images of 224 × 224 pixels and cuts them into patches of 16 × 16. How many tokens
# enter its first block?

# %% name="predict-vit-tokens" stub="value"
lab.predict(
    "vit-tokens",
    ### BEGIN SOLUTION
    (224 // 16) ** 2 + 1,
    ### END SOLUTION
)

# %% [markdown] lang="fr"
# Demandons au modèle lui-même. Sur le périphérique `meta`, un tenseur a une forme mais pas de mémoire : on peut y
# construire n’importe quel modèle en un instant.

# %% [markdown] lang="en"
# Let us ask the model itself. On the `meta` device a tensor has a shape but no memory: any model can be built there in
# an instant.

# %% name="reveal-vit-tokens"
with torch.device("meta"):
    vit = models.build("vit_b_16")
embedding, *encoder, head = vit.blocks
lab.reveal("vit-tokens", embedding.position.shape[1])

# %% [markdown] lang="fr"
# ### Exercice 3 — découper en patches
#
# `image_CHW` a `C` canaux, `H` lignes (ici la hauteur de l’image, non la largeur d’une tête), `W` colonnes ; `patch`
# est le côté d’un patch, qui divise `H` et `W`. Renvoyez un tenseur avec **un patch par ligne**, dans l’ordre de
# lecture (de gauche à droite, puis de haut en bas). Dans un patch : canal par canal, et dans un canal ligne par ligne —
# l’ordre du noyau d’une convolution.

# %% [markdown] lang="en"
# ### Exercise 3 — cutting into patches
#
# `image_CHW` has `C` channels, `H` rows (here the height of the image, not the width of a head), `W` columns; `patch`
# is the side of a patch, which divides `H` and `W`. Return a tensor with **one patch per row**, in reading order (left
# to right, then top to bottom). Within a patch: channel by channel, and within a channel row by row — the order of the
# kernel of a convolution.


# %% name="patches"
def cut_in_patches(image_CHW, patch):
    channels, height, width = image_CHW.shape
    ### BEGIN SOLUTION
    tiles = image_CHW.reshape(channels, height // patch, patch, width // patch, patch)
    return tiles.permute(1, 3, 0, 2, 4).reshape(-1, channels * patch**2)
    ### END SOLUTION


lab.check("patches", cut_in_patches)

# %%
# lab.hint("patches")

# %% [markdown] lang="fr"
# Votre découpage, sur un chiffre manuscrit : à gauche l’image de 32 × 32 pixels, à droite la séquence de ses 16 patches
# de 8 × 8, numérotés dans l’ordre où vous les donnez. Si tout va bien, on reconnaît encore le chiffre.

# %% [markdown] lang="en"
# Your cutting, on a handwritten digit: on the left the image of 32 × 32 pixels, on the right the sequence of its 16
# patches of 8 × 8, numbered in the order in which you give them. If all is well, the digit can still be recognised.

# %%
digit_CHW, label = data.load("digits", family="image", num_classes=10, image_size=32)[4]
figures.patches(cut_in_patches, digit_CHW, 8)

# %% [markdown] lang="fr"
# ### Exercice 4 — token de classe et positions
#
# À partir des `P` patches aplatis, fabriquez les `T = P + 1` tokens : projection, token de classe **en tête**,
# positions ajoutées à **tous** les tokens, celui de classe compris.

# %% [markdown] lang="en"
# ### Exercise 4 — class token and positions
#
# From the `P` flattened patches make the `T = P + 1` tokens: projection, class token **in front**, positions added to
# **all** tokens, the class token included.


# %% name="tokens"
def embed(patches_PE, projection_ED, class_token_D, position_TD):
    ### BEGIN SOLUTION
    patches_PD = patches_PE @ projection_ED
    return torch.cat((class_token_D[None], patches_PD)) + position_TD
    ### END SOLUTION


lab.check("tokens", embed)

# %%
# lab.hint("tokens")

# %% [markdown] lang="fr"
# ## 3. Compter les paramètres
#
# Un bloc de transformer de largeur `D` enchaîne une *LayerNorm*, une attention multi-têtes (une couche linéaire `D → 3
# D`, une autre `D → D`), une seconde *LayerNorm*, puis un MLP (`D → 4 D → D`). Toutes les couches linéaires ont un
# biais ; une *LayerNorm* a une échelle et un décalage par canal.
#
# ### Exercice 5 — les paramètres d’un bloc
#
# Donnez le compte exact, en fonction de la largeur seule.

# %% [markdown] lang="en"
# ## 3. Counting parameters
#
# A transformer block of width `D` is a layer norm, a multi-head attention (one linear layer `D → 3 D`, another `D →
# D`), a second layer norm, then an MLP (`D → 4 D → D`). All linear layers have a bias; a layer norm has a scale and a
# shift per channel.
#
# ### Exercise 5 — the parameters of a block
#
# Give the exact count, from the width alone.


# %% name="block-parameters"
def block_parameters(width):
    ### BEGIN SOLUTION
    attention_parameters = 3 * width**2 + 3 * width + width**2 + width
    mlp_parameters = 4 * width**2 + 4 * width + 4 * width**2 + width
    return attention_parameters + mlp_parameters + 2 * 2 * width
    ### END SOLUTION


lab.check("block-parameters", block_parameters)

# %%
# lab.hint("block-parameters")

# %% [markdown] lang="fr"
# **Votre prédiction.** Combien de paramètres les 12 blocs de ViT-B/16, de largeur 768, comptent-ils ensemble ?

# %% [markdown] lang="en"
# **Your prediction.** How many parameters do the 12 blocks of ViT-B/16, of width 768, have together?

# %% name="predict-vit-encoder" stub="value"
lab.predict(
    "vit-b-encoder",
    ### BEGIN SOLUTION
    12 * block_parameters(768),
    ### END SOLUTION
)

# %% name="reveal-vit-encoder"
lab.reveal("vit-b-encoder", sum(parameter.numel() for block in encoder for parameter in block.parameters()))

# %% [markdown] lang="fr"
# Voilà comment naissent les gros modèles : les paramètres croissent comme **profondeur × largeur²**. Doubler la largeur
# les multiplie par quatre ; la taille des images, elle, n’y change presque rien.
#
# ## 4. Compter les opérations
#
# La taille des images se paie ailleurs. Le produit d’une matrice (a, b) par une matrice (b, c) coûte `a·b·c`
# multiplications-additions. Les articles de vision les appellent « FLOPs » ; dans ce cours, chacune compte pour deux
# FLOP.
#
# ### Exercice 6 — ce que coûte l’attention
#
# Comptez les multiplications-additions d’une auto-attention de `T` tokens et de largeur `D` : les quatre projections
# (requêtes, clés, valeurs, sortie), les scores, et la moyenne des valeurs. Sans biais ni softmax, sans MLP.

# %% [markdown] lang="en"
# This is how big models are born: parameters grow as **depth × width²**. Twice the width is four times the parameters;
# the size of the images hardly matters for them.
#
# ## 4. Counting operations
#
# The size of the images is paid for elsewhere. The product of an (a, b) matrix and a (b, c) matrix costs `a·b·c`
# multiply-adds. Papers on vision call these “FLOPs”; in this course each counts as two FLOPs.
#
# ### Exercise 6 — what attention costs
#
# Count the multiply-adds of a self-attention with `T` tokens of width `D`: the four projections (queries, keys, values,
# output), the scores, and the mean of the values. No biases, no softmax, no MLP.


# %% name="attention-cost"
def attention_multiply_adds(num_tokens, width):
    ### BEGIN SOLUTION
    projections = 4 * num_tokens * width**2
    scores_and_mean = 2 * num_tokens**2 * width
    return projections + scores_and_mean
    ### END SOLUTION


lab.check("attention-cost", attention_multiply_adds)

# %%
# lab.hint("attention-cost")

# %% [markdown] lang="fr"
# **Votre prédiction.** Un CoAtNet divise le côté de l’image par deux à chaque étage : 112, 56, 28, 14, puis 7 positions
# pour une image de 224 pixels. À largeur égale (96), combien de fois l’attention coûterait-elle plus cher sur une carte
# de 112 × 112 positions que sur une carte de 14 × 14 ?

# %% [markdown] lang="en"
# **Your prediction.** A CoAtNet halves the side of the image at each stage: 112, 56, 28, 14, then 7 positions for an
# image of 224 pixels. At equal width (96), how many times more expensive would attention be on a map of 112 × 112
# positions than on one of 14 × 14?

# %% name="predict-pixel-attention" stub="value"
lab.predict(
    "pixel-attention",
    ### BEGIN SOLUTION
    attention_multiply_adds(112**2, 96) / attention_multiply_adds(14**2, 96),
    ### END SOLUTION
)

# %% name="reveal-pixel-attention"
lab.reveal("pixel-attention", figures.attention_ratio(112, 14, width=96))

# %% [markdown] lang="fr"
# La figure suivante montre, en échelles logarithmiques, le coût d’une couche selon le côté de la carte : celui de la
# convolution suit l’aire de l’image, celui de l’attention finit par en suivre le carré.

# %% [markdown] lang="en"
# The next figure shows, on logarithmic axes, the cost of a layer by the side of the map: that of the convolution
# follows the area of the image, that of attention ends up following its square.

# %%
figures.attention_by_stage()

# %% [markdown] lang="fr"
# ## 5. Convolution puis attention : *CoAtNet*
#
# Le coût n’est que la première raison de commencer par des convolutions. La seconde : une convolution traite de la même
# façon un motif où qu’il soit (**équivariance en translation**), et apprend donc d’une image ce qu’un ViT doit
# apprendre de plusieurs. L’attention, elle, voit toute l’image d’un coup. *CoAtNet* prend les deux dans l’ordre :
# convolutions tant que la carte est grande, attention dès qu’elle est petite. Il n’a donc pas besoin de patches.
#
# Mesurons : l’image est décalée de 8 pixels, les caractéristiques obtenues sont redécalées en sens inverse, et l’on
# regarde ce qui a changé, relativement à la plus grande. Zéro signifie équivariant.

# %% [markdown] lang="en"
# ## 5. Convolution, then attention: CoAtNet
#
# Cost is only the first reason to begin with convolutions. The second: a convolution treats a pattern in the same way
# wherever it is (**translation equivariance**), so it learns from one image what a ViT must learn from several.
# Attention sees the whole image at once. CoAtNet takes both in order: convolutions as long as the map is large,
# attention as soon as it is small. So it needs no patches.
#
# Let us measure: the image is shifted by 8 pixels, the features are shifted back, and we look at what has changed,
# relative to the largest. Zero means equivariant.

# %% name="equivariance"
image_BCHW = torch.randn((1, 3, 32, 32), generator=generator)
kernel = torch.randn((8, 3, 3, 3), generator=generator)
patch_embedding = models.build("vit_tiny", image_size=32).get_submodule("blocks.0")


def convolution(x_BCHW):
    # A circular border, so that nothing is lost at the edge. // Un bord circulaire : rien n’est perdu au bord.
    return F.conv2d(F.pad(x_BCHW, (1, 1, 1, 1), mode="circular"), kernel)


def patch_tokens(x_BCHW):
    # 4 × 4 patches of 8 × 8 pixels, no class token // 4 × 4 patchs de 8 × 8 pixels, sans le token de classe
    return patch_embedding(x_BCHW)[:, 1:].transpose(1, 2).unflatten(-1, (4, 4))


def shift_gap(features, positions):
    # The image moves by 8 pixels, as many positions. // L’image se décale de 8 pixels, soit autant de positions.
    before, after = features(image_BCHW), features(image_BCHW.roll(8, dims=-1))
    return ((after.roll(-positions, dims=-1) - before).abs().max() / before.abs().max()).item()


round(shift_gap(convolution, 8), 3), shift_gap(patch_tokens, 1) > 0.01

# %% [markdown] lang="fr"
# Le décalage est ici d’un patch entier : ce sont donc les **positions absolues**, et elles seules, qui brisent
# l’équivariance du ViT. *CoAtNet* les remplace par un **biais de position relative** : à chaque score s’ajoute un
# nombre appris qui ne dépend que du décalage entre la requête et la clé,
#
# $$\mathrm{score}_{ij} = \frac{q_i \cdot k_j}{\sqrt{H}} + w_{i - j}$$
#
# ### Exercice 7 — le biais de position relative
#
# La carte a `side` × `side` positions, numérotées en ordre de lecture. Les décalages vont de `−(side − 1)` à `side − 1`
# dans chaque direction ; la table apprise a donc `2·side − 1` lignes et autant de colonnes : `table[Δligne + side − 1,
# Δcolonne + side − 1]`, où Δ est la position de la **requête** moins celle de la **clé**. Construisez le tenseur des
# biais, de forme (`side²`, `side²`) : une ligne par requête, une colonne par clé.

# %% [markdown] lang="en"
# The shift is a whole patch here: it is the **absolute positions** alone that break the equivariance of the ViT.
# CoAtNet replaces them by a **relative position bias**: to each score is added a learned number that depends only on
# the offset between query and key,
#
# $$\mathrm{score}_{ij} = \frac{q_i \cdot k_j}{\sqrt{H}} + w_{i - j}$$
#
# ### Exercise 7 — the relative position bias
#
# The map has `side` × `side` positions, numbered in reading order. Offsets go from `−(side − 1)` to `side − 1` in each
# direction; so the learned table has `2·side − 1` rows and as many columns: `table[Δrow + side − 1, Δcolumn + side −
# 1]`, where Δ is the position of the **query** minus that of the **key**. Build the tensor of biases, of shape
# (`side²`, `side²`): one row per query, one column per key.


# %% name="relative-bias"
def relative_bias(table, side):
    ### BEGIN SOLUTION
    position = torch.arange(side * side)
    row, column = position // side, position % side
    row_offset = row[:, None] - row[None, :] + side - 1
    column_offset = column[:, None] - column[None, :] + side - 1
    return table[row_offset, column_offset]
    ### END SOLUTION


lab.check("relative-bias", relative_bias)

# %%
# lab.hint("relative-bias")

# %% [markdown] lang="fr"
# Ce que trois requêtes (étoiles : un coin, le milieu, le coin opposé) voient d’une même table en forme de bosse : la
# bosse se déplace avec la requête, comme le noyau d’une convolution glisse sur l’image.

# %% [markdown] lang="en"
# What three queries (stars: a corner, the middle, the opposite corner) see of one and the same bump-shaped table: the
# bump moves along with the query, as the kernel of a convolution slides over the image.

# %%
side = 7
offset = torch.arange(1 - side, side)
bump = torch.exp(-(offset[:, None] ** 2 + offset[None, :] ** 2) / 8)
figures.bias_seen_by(relative_bias, bump, side)

# %% [markdown] lang="fr"
# ## 6. De CoAtNet-0 à CoAtNet-7
#
# Le paquet construit chaque modèle sur le périphérique `meta` et compte ; à côté, ce qu’imprime l’article
# (arXiv 2106.04803). Au-delà de CoAtNet-2, l’article ne donne que la variante qui réduit la résolution à un autre
# endroit du bloc (*stride*) : d’où un écart de quelques pour cent sur les opérations.

# %% [markdown] lang="en"
# ## 6. From CoAtNet-0 to CoAtNet-7
#
# The package builds each model on the `meta` device and counts; beside it, what the paper prints (arXiv 2106.04803).
# Beyond CoAtNet-2 the paper only gives the variant with the stride placed elsewhere in the block: hence a difference of
# a few per cent in the operations.

# %%
table = figures.coatnet_table()
table

# %% [markdown] lang="fr"
# En image, sur des axes logarithmiques : cent fois plus de paramètres de CoAtNet-0 à CoAtNet-7, et plus de cinq cents
# fois plus d’opérations, car les images aussi ont grandi.

# %% [markdown] lang="en"
# As a picture, on logarithmic axes: a hundred times more parameters from CoAtNet-0 to CoAtNet-7, and more than five
# hundred times more operations, for the images have grown, too.

# %%
figures.scaling(table)

# %% [markdown] lang="fr"
# Pourquoi en vouloir autant ? La figure suivante donne ce que les articles ont mesuré sur ImageNet : une couleur par
# modèle, un trait par jeu de données de pré-entraînement. À gauche, la précision (*top-1*) selon les opérations, à
# droite selon les paramètres.

# %% [markdown] lang="en"
# Why would one want so many? The next figure gives what the papers measured on ImageNet: a colour per model, a line
# style per data set of the pre-training. On the left the accuracy (top-1) by operations, on the right by parameters.

# %% name="accuracy"
figures.accuracy()

# %% [markdown] lang="fr"
# **Expliquez.** 1. Sur ImageNet-1K seul (1,3 million d’images), que gagne ViT à multiplier ses paramètres par trois et
# demi ? 2. Et pré-entraîné sur JFT-300M ? 3. Qu’ont apporté à CoAtNet ses convolutions, puis son attention ?
#
# <details><summary>Réponse</summary>
#
# D’après les articles. 1. Rien : il perd 1,4 point, car il surapprend. CoAtNet, lui, gagne à chaque taille. 2. Trois
# points, et il fait mieux que les deux tailles avec moins d’images. 3. Ses convolutions, de quoi apprendre de peu
# d’images : avec quatre fois moins d’opérations (13 contre 55 milliards), CoAtNet-0 dépasse ViT-B de 6 points sur
# ImageNet-1K. Son attention, de quoi profiter de beaucoup d’images : les courbes montent encore avec JFT-3B, et
# CoAtNet-6 égale ViT-G/14 avec 3,4 fois moins d’opérations. D’où les gros modèles, et la suite de ce cours.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** 1. On ImageNet-1K alone (1.3 million images), what does ViT gain by three and a half times the
# parameters? 2. And pre-trained on JFT-300M? 3. What have its convolutions given CoAtNet, and then its attention?
#
# <details><summary>Answer</summary>
#
# From the papers: 1. Nothing: it loses 1.4 points, for it overfits. CoAtNet gains with each size. 2. Three points, and
# it does better than either size with fewer images. 3. Its convolutions let it learn from few images: with a quarter of
# the operations (13 against 55 billion), CoAtNet-0 is 6 points above ViT-B on ImageNet-1K. Its attention lets it profit
# from many: the curves still rise with JFT-3B, and CoAtNet-6 equals ViT-G/14 with 3.4 times fewer operations. Hence the
# big models, and the rest of this course.
#
# </details>

# %% [markdown] lang="fr"
# **Votre prédiction.** Entraîner, c’est garder quatre nombres en fp32 pour chaque paramètre : le poids, son gradient,
# et les deux moments d’AdamW. Combien d’octets cela fait-il pour CoAtNet-7, avant même la première activation ?

# %% [markdown] lang="en"
# **Your prediction.** Training means keeping four fp32 numbers for each parameter: the weight, its gradient, and the
# two moments of AdamW. How many bytes is that for CoAtNet-7, before there is a single activation?

# %% name="predict-coatnet-states" stub="value"
lab.predict(
    "coatnet-7-states",
    ### BEGIN SOLUTION
    4 * 4 * models.describe("coatnet_7").parameters,
    ### END SOLUTION
)

# %% name="reveal-coatnet-states"
biggest = dlojz.RunConfig.of(model="coatnet_7", data="synthetic")
lab.reveal("coatnet-7-states", dlojz.predict(biggest).memory.states_bytes)

# %% [markdown] lang="fr"
# La figure empile ces états par catégorie, pour chaque CoAtNet, et trace la mémoire des GPU de Jean Zay. Ce qui reste
# au-dessus d’une barre jusqu’à la ligne du GPU, c’est toute la place laissée aux activations. Sur un V100 de 16 Gio,
# CoAtNet-6 ne tient pas, même avec un batch vide.

# %% [markdown] lang="en"
# The figure stacks these states by category for each CoAtNet, and draws the memory of the GPUs of Jean Zay. What is
# left above a bar up to the line of a GPU is all the room there is for activations. On a V100 with 16 GiB, CoAtNet-6
# does not fit, not even with an empty batch.

# %%
figures.states_beside_gpus()

# %% [markdown] lang="fr"
# ## 7. En vrai : *CoAtNet* contre ViT, sur deux processus
#
# Terminons par une mesure : `coatnet_tiny` et `vit_tiny` s’entraînent sur les mêmes chiffres, avec deux répliques
# (`dp=2`) et le même batch global.
#
# **Votre prédiction.** Combien d’octets de poids, de gradients et d’états d’AdamW chaque réplique de `coatnet_tiny`
# détiendra-t-elle ?

# %% [markdown] lang="en"
# ## 7. For real: CoAtNet against ViT, on two processes
#
# Let us end with a measurement: `coatnet_tiny` and `vit_tiny` train on the same digits, with two replicas (`dp=2`) and
# the same global batch.
#
# **Your prediction.** How many bytes of weights, gradients and AdamW states will each replica of `coatnet_tiny` hold?

# %% name="predict-tiny-states" stub="value"
lab.predict(
    "tiny-states",
    ### BEGIN SOLUTION
    16 * models.describe("coatnet_tiny").parameters,
    ### END SOLUTION
)

# %% name="run-both" tags=["nbval-ignore-output"]
coatnet = dlojz.run(model="coatnet_tiny", dp=2, micro_batch=16, steps=20)
vit_run = dlojz.run(model="vit_tiny", dp=2, micro_batch=16, steps=20)
vit_run

# %% name="reveal-tiny-states"
memory = coatnet.record.footprint().memory
lab.reveal("tiny-states", memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes)

# %% [markdown] lang="fr"
# Le tableau met tout face à face, prédit et mesuré ; la courbe montre les deux pertes.

# %% [markdown] lang="en"
# The table lays everything side by side, predicted and measured; the curve shows both losses.

# %% name="compare" tags=["nbval-ignore-output"]
dlojz.compare([coatnet, vit_run])

# %%
figures.losses({"coatnet_tiny": coatnet.losses, "vit_tiny": vit_run.losses})

# %% [markdown] lang="fr"
# **Expliquez.** Avant d’exécuter la cellule suivante, répondez : lequel des deux apprend le plus vite sur si peu
# d’images, et pourquoi ? Lequel a le plus de paramètres ? Lequel fait le plus d’opérations par image ? La cellule
# répond dans l’ordre : pertes moyennes des cinq derniers pas (CoAtNet inférieure à ViT ?), rapport des paramètres,
# rapport des opérations (ViT / CoAtNet).
#
# <details><summary>Réponse</summary>
#
# CoAtNet : ses convolutions savent d’avance que des pixels voisins vont ensemble et qu’un
# motif peut apparaître n’importe où, alors que ViT doit l’apprendre, ce qui demande beaucoup d’images. La cellule donne
# le reste.
#
# </details>

# %% [markdown] lang="en"
# **Explain.** Before you run the next cell, answer: which of the two learns faster from so few images, and why? Which
# has more parameters? Which takes more operations per image? The cell answers in order: mean losses of the last five
# steps (CoAtNet's below ViT's?), ratio of the parameters, ratio of the operations (ViT / CoAtNet).
#
# <details><summary>Answer</summary>
#
# CoAtNet: its convolutions assume that neighbouring pixels belong together and that a pattern may appear anywhere,
# while ViT has to learn that, which takes many images. The cell gives the rest.
#
# </details>

# %%
figures.learning_seen(coatnet, vit_run)

# %% [markdown] lang="fr"
# ## Dans votre projet : votre script
#
# Remplacez le modèle du script par un petit Vision Transformer : des patches, quatre blocs identiques, une tête.
# Continuez dans votre `train.py`, ou partez de la solution du TP précédent, qu’écrit
# `dlojz labs script 01 un_autre_dossier`, avec un `# TODO` à chaque endroit à compléter. La cellule qui suit le juge.
#
# À regarder : `dlojz run` affiche la mémoire des poids (4 octets par paramètre en fp32) et les FLOPs d’un pas : ce sont
# ceux que vos formules donnent.
#
# <details><summary>Les lignes de PyTorch</summary>
#
# ```python
# q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
# attended = F.scaled_dot_product_attention(q, k, v)
# x = x + self.out(attended.transpose(1, 2).flatten(2))
# return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
# ```
#
# </details>

# %% [markdown] lang="en"
# ## In your project: your own script
#
# Replace the script's model by a small vision transformer: patches, four equal blocks, a head. Go on in your
# `train.py`, or begin with the solution of the lab before, which `dlojz labs script 01 another_folder` writes, with a
# `# TODO` at each place to fill in. The next cell judges it.
#
# What to look for: `dlojz run` prints the memory of the weights (4 bytes per parameter in fp32) and the FLOPs of a
# step, which are those of your formulas.
#
# <details><summary>The lines of PyTorch</summary>
#
# ```python
# q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
# attended = F.scaled_dot_product_attention(q, k, v)
# x = x + self.out(attended.transpose(1, 2).flatten(2))
# return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
# ```
#
# </details>

# %% name="judge-script" tags=["nbval-ignore-output"]
labs.judge_script(lab, "my_training/train.py")

# %% [markdown] lang="fr"
# ## Bilan
#
# Vous avez écrit les briques de tous les gros modèles actuels, et vous savez d’où viennent leurs paramètres
# (profondeur × largeur²), leurs opérations (tokens × largeur² + tokens² × largeur) et leurs états (16 octets par
# paramètre avec AdamW en fp32).

# %% [markdown] lang="en"
# ## Summary
#
# You have written the bricks of all of today's big models, and you know where their parameters (depth × width²), their
# operations (tokens × width² + tokens² × width) and their states (16 bytes per parameter with AdamW in fp32) come from.

# %%
lab.progress()
