"""Optimizers that communicate: they average over the ranks themselves, and send one bit where others send 32.

After a step all ranks hold the same weights (0/1 Adam, local SGD, DiLoCo: after a step that synchronises). With Ψ
parameters over N ranks, one rank hands to the collectives of a step (`sent_bytes` counts it without torch):

    optimizer     first stage                        second stage
    LAMB, Adam    4Ψ, all-reduce                     the same
    1-bit Adam    4Ψ, all-reduce, `warmup_steps`     Ψ/8 + scales, all-to-all; Ψ/8 + scales, all-gather
    1-bit LAMB    the same                           the same
    0/1 Adam      4Ψ when the variance is renewed,   the same, in the steps that synchronise; nothing in the others
                  else as in the second stage
    local SGD     4Ψ, all-reduce, `warmup_steps`     4Ψ, all-reduce, after every H-th step; nothing in the others
    DiLoCo        none                               the same

An all-reduce is itself a reduce-scatter, then an all-gather (`dlojz.by_hand.zero`); the two messages of the second
stage replace these, so that on the wire Ψ/8 replaces 4Ψ: one 32nd.

`in_backward` sends nothing: it puts any optimizer into the backward pass, so that gradients are freed early.
`muon` sends nothing either, unless its ranks have rows of a matrix: then they gather its update, 2nm bytes.

Source: Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888); Li et al. 2021, "1-bit LAMB" (arXiv 2104.06069); Lu et al.
2022, "0/1 Adam" (arXiv 2202.06009); You et al. 2020, "LAMB" (arXiv 1904.00962).
"""
