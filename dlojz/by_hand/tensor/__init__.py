"""Tensor parallelism taken apart: each layer shared out among the ranks, one idea per file, the collectives in sight.

A split model computes what the whole one computes, forward and backward, and each file is read in one sitting. In the
order in which to read them:

    axis               a rank's place, and the only calls that communicate
    operators          the conjugate pairs: identity and all-reduce, all-gather and reduce-scatter
    slicing            who holds which part of a parameter
    linear             by columns, by rows
    transformer_block  attention by heads, the MLP with one all-reduce; llama_block, coatnet_block, convolution likewise
    embedding, cross_entropy    split along the vocabulary
    sequence           norms on part of the sequence
    split              which modules are split
    random_state       dropout: the same on all ranks, or another on each
    ring_attention     context parallelism: attention over a sequence that no rank has whole

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv 2205.05198).
"""
