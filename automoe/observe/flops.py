"""FLOPs to train on one token, for the model FLOPs utilization (MFU). Does not import torch.

FLOPs come in the two conventions that published MFU figures use (``TokenFlops``). A multiply-add is
2 FLOPs and the backward pass costs twice the forward pass. So each element of a trained weight
costs 6 FLOPs per token; of a frozen weight 4, or 2 if no earlier parameter is trained. A gated
delta net counts as its recurrence: reading a head's state with a key, updating it, and reading it
with a query are three products of Dk x Dv numbers per token. With an indexer (sparse attention),
attention is counted over the selected keys; the indexer scores all keys and is trained on the
selected ones. Compressed attention is counted over its window and its entries. Router, norms,
hyper-connections, biases, softmax and recomputation are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from automoe.config.rules_kernels import score_dims
from automoe.config.schema import Config, ModelConfig, has_indexer, is_linear, ratio_of, window_of
from automoe.model.param_spec import NUM_PLACES, SCORES, Param
from automoe.model.params import model_params
from automoe.model.trainable import with_adapters

_LORA_B = (
    ".lora.B",
    ".lora.B13",
    ".lora.B2",
)  # the input of B needs a gradient, since A is trained


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs per token, by two conventions to count causal attention.

    Attributes:
        causal: counts only the half of the attention matrix below the diagonal.
        full_attention: counts the whole matrix.
    """

    causal: float
    full_attention: float

    def mfu(self, tokens_per_second: float, peak_flops: float) -> tuple[float, float]:
        """Return the MFU by both conventions: (``causal``, ``full_attention``), as fractions.

        Args:
            tokens_per_second: throughput of the GPUs to which ``peak_flops`` belongs.
            peak_flops: their peak FLOP/s, summed.
        """
        return (
            self.causal * tokens_per_second / peak_flops,
            self.full_attention * tokens_per_second / peak_flops,
        )


def train_flops_per_token(
    model: ModelConfig, seq_len: int, selected: Callable[[list[Param]], list[Param]] = list
) -> TokenFlops:
    """Return forward and backward FLOPs per token of rows with ``seq_len`` tokens.

    Args:
        model: the architecture; each multi-token prediction module uses the output head once more.
        seq_len: tokens per row; attention is counted over whole rows, even if a row has several
            documents.
        selected: function that gets the model's parameters and returns those to count: frozen ones
            marked, LoRA adapters added. By default all parameters are trained.
    """
    attention = model.attention
    params = selected(model_params(model))
    by_layer: dict[int | None, list[Param]] = {}
    for param in params:
        by_layer.setdefault(param.layer, []).append(param)
    embedding, *tail = by_layer[None]
    needs_grad = embedding.trained  # whether the input of the next parameters needs a gradient
    matmul = 0.0
    scores = np.zeros(2)  # of attention: the causal half, and the whole matrix
    for layer in model.all_layers:
        for place in range(NUM_PLACES):
            here = [param for param in by_layer[layer] if param.spec.place == place]
            matmul += sum(_active(model, param) * _passes(param, needs_grad) for param in here)
            needs_grad = needs_grad or any(
                param.trained and not param.spec.detached for param in here
            )
            if place != SCORES:
                continue
            # Two products, each computed forward and for both of its factors backward.
            passes = 6 if needs_grad else 2
            if is_linear(attention, layer):
                state = attention.linear_key_head_dim * attention.linear_value_head_dim
                scores += passes * attention.linear_num_value_heads * state * 3
                continue
            window, ratio = window_of(attention, layer), ratio_of(attention, layer)
            length = seq_len / (ratio or 1)  # keys or entries to choose from
            topk = has_indexer(attention, layer) or not ratio and attention.index_topk
            chosen = _band(attention.index_topk if topk else length, length)
            attended = _band(window, seq_len) + bool(ratio) * chosen if window else chosen
            scores += passes * attention.num_heads * sum(score_dims(attention)) * attended
            if has_indexer(attention, layer):
                learns = any(param.trained and param.spec.detached for param in by_layer[layer])
                dims = attention.index_n_heads * attention.index_head_dim
                scores += dims * (np.array([length, 2 * length]) + 4 * learns * chosen)
                # The indexer's loss is attached to attention's output.
                needs_grad = needs_grad or learns
    needs_grad = needs_grad or tail[0].trained
    head = model.hidden_size * model.vocab_size
    uses = 1 + model.num_mtp_layers
    matmul += head * uses * _passes(tail[-1] if len(tail) > 1 else embedding, needs_grad)
    return TokenFlops(*(matmul + scores).tolist())


def step_flops_per_token(config: Config) -> TokenFlops:
    """Return the FLOPs per token of training with ``config``, with its frozen weights and LoRA.

    A frozen weight needs no weight gradient; adapters add their own products.
    """
    selected = partial(with_adapters, config=config)
    model = config.model
    if config.train.indexer == "warmup":  # attention sees all keys
        every = replace(model.attention, index_topk=config.train.seq_len)
        model = replace(model, attention=every)
    return train_flops_per_token(model, config.train.seq_len, selected=selected)


def _passes(param: Param, needs_grad: bool) -> int:
    """Return FLOPs per token and element of weight ``param``: 2 for each matrix product with it.

    The products are the forward one; the gradient of its input if ``needs_grad`` (always for B of
    an adapter, never for a detached input); and the gradient of the weight if the weight is trained.
    """
    needs_grad = needs_grad and not param.spec.detached
    return 2 + 2 * (needs_grad or param.name.endswith(_LORA_B)) + 2 * param.trained


def _active(model: ModelConfig, param: Param) -> int:
    """Return how many elements of weight ``param`` a layer multiplies with one token.

    Of the routed experts' weights, these are those of the K experts that a token chooses, less the
    share of zero experts under an even load. It is 0 for weights that are not counted (norms,
    router) and for embedding and output head.
    """
    if not param.multiplies:
        return 0
    if param.part == "routed_experts":
        return param.numel * model.num_experts_per_token // model.num_scored_experts
    counted = ("attention", "dense_ffn", "latent", "shared_experts", "mtp")
    return param.numel if param.part in counted else 0


def _band(keys: float, length: float) -> np.ndarray:
    """Return the mean number of keys per query by both conventions of ``TokenFlops``: [causal, full].

    A query sees at most ``keys`` keys of a row of ``length``: in causal attention fewer near the
    start of the row, in full attention min(``keys``, ``length``).
    """
    keys = min(keys, length)
    return np.array([keys * (1 - keys / (2 * length)), keys])
