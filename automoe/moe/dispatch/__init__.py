"""Dispatchers bring each token to the ranks of its experts and the results back.

Every dispatcher is an object with one signature, ``dispatcher(x, ids, weights, experts, rows_per_expert) -> y``:

    x       [T, H]  this rank's tokens
    ids     [T, K]  int64, chosen experts, numbered over all E of the layer; E: a dropped choice
    weights [T, K]  routing weights
    experts         ``f(x, gather_idx, offsets, probs) -> rows`` over this rank's experts
    rows_per_expert how many choices every expert gets from every rank, where that is known (padding to
                    capacity); sizes are then known too and no host sync asks for them. Default None
    returns [T, H]  sum over k of weights * expert(x)

Weights know nothing of dispatchers, so any of them runs on any checkpoint.
"""

from automoe.moe.dispatch.allgather import AllGatherDispatcher
from automoe.moe.dispatch.alltoall import AllToAllDispatcher
from automoe.moe.dispatch.base import Dispatcher, LocalDispatcher
from automoe.moe.dispatch.deepep import DeepEPDispatcher
from automoe.moe.dispatch.etp import ExpertTensorDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DeepEPDispatcher",
    "Dispatcher",
    "ExpertTensorDispatcher",
    "LocalDispatcher",
]
