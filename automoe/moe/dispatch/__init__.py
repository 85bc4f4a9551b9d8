"""Dispatchers send each token to the ranks of its experts and bring the results back.

Every dispatcher is an object with one signature:

    x_TH            this rank's tokens
    topk_ids_TK     int64, chosen experts, numbered over all E of the layer; E: a dropped choice
    weights_TK      routing weights
    experts         ``f(x, gather_idx, offsets, probs) -> rows`` over this rank's experts
    rows_per_expert how many choices every expert gets from every rank, if known (padding to capacity): then
                    sizes need no host sync. Default None
    returns [T, H]  sum over k of weights * expert(x)

It is given the group that it sends over (``DispatchGroup``) and knows nothing else of the mesh. One object serves
every layer and micro-batch, so it keeps nothing from one call to the next. Weights do not depend on the
dispatcher, so any of them runs on any checkpoint.
"""

from automoe.moe.dispatch.allgather import AllGatherDispatcher
from automoe.moe.dispatch.alltoall import AllToAllDispatcher
from automoe.moe.dispatch.base import Dispatcher, DispatchGroup, LocalDispatcher
from automoe.moe.dispatch.deepep import DeepEPDispatcher
from automoe.moe.dispatch.etp import ExpertTensorDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DeepEPDispatcher",
    "DispatchGroup",
    "Dispatcher",
    "ExpertTensorDispatcher",
    "LocalDispatcher",
]
