"""Tensor parallelism by hand: each layer split over the ranks, forward and backward as the whole model computes them.

In the order in which to read the files:

    axis            a rank's place, the only calls that communicate, its slices of parameters; the conjugate pairs:
                    identity and all-reduce, all-gather and reduce-scatter
    layers          linear by columns and by rows, embedding, cross-entropy, norms on part of the sequence
    split_blocks    attention by heads, the MLP with one all-reduce; convolution likewise
    split           which modules are split; of a model from elsewhere, the pairs of linear layers found in it
    random_state    dropout: the same on all ranks, or another on each

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv 2205.05198).
"""
