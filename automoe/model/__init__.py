"""Models: attention, blocks, heads, losses, and the table of their parameters.

Letters of dimensions end names (``x_BSH`` is [B, S, H]) and stand in docstrings, here and in
``automoe.moe``, ``automoe.training`` and ``automoe.parallel``:

    B  sequences ("rows") of a micro-batch
    R  positions of a whole sequence
    S  positions of this rank, R / cp (context parallelism)
    s  positions of this rank between two blocks, S / tp (sequence parallelism)
    T  tokens of this rank: B s in an MoE layer, B S at the head
    H  hidden size                      I  width of an expert; J = 2 I: gate and up
    N  query heads                      G  key and value heads
    D  width of a head                  V  vocabulary
    E  experts                          K  experts per token (top-k)
    L  MoE layers                       P  ranks of a group

A file that needs more letters, or uses one otherwise, says so at its top.
"""
