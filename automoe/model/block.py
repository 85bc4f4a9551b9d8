"""One decoder layer: attention and feed-forward, each after a norm and joined to the residual.

Letters of dimensions: ``automoe.model``; here F width of the feed-forward.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from automoe.comm.communicators import SINGLE_RANK, Communicator
from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig, is_linear
from automoe.kernels.activation import SWIGLU, Activation, activation_of
from automoe.model.attention import AttentionSetup, GroupedQueryAttention, LatentAttention
from automoe.model.backend import BackendConfig
from automoe.model.compressed_attention import CompressedAttention
from automoe.model.delta_net import GatedDeltaNet
from automoe.model.linear import Linear
from automoe.model.norm import OutputNorm
from automoe.model.residual import residual_of
from automoe.moe.layer import MoE
from automoe.passes.calls import Wrap, as_it_is, bind, call_module

SOFTMAX = {"gqa": GroupedQueryAttention, "mla": LatentAttention, "compressed": CompressedAttention}


class MLP(nn.Module):
    """Gated feed-forward (arXiv 2002.05202, eq. 5): down(``activation``(gate(x), up(x))).

    Input and output are [B, s, H]. With ``gated_output`` (Qwen2-MoE's shared expert) the result is
    multiplied by sigmoid(x @ w), one number per token.

    Args:
        intermediate_size: width F.
        tp: ranks that shard F and the positions.
        gather: takes ``tp.all_gather``, which gathers the positions, and returns the function to
            call in its place, such as one that recomputes it.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        gated_output: bool = False,
        tp: Communicator = SINGLE_RANK,
        gather: Wrap = as_it_is,
        activation: Activation = SWIGLU,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.output_gate = Linear(hidden_size, 1) if gated_output else None
        self.tp = tp
        self.gather = gather(tp.all_gather)

    def forward(self, x_BsH: Tensor) -> Tensor:
        x_BSH = self.gather(x_BsH)
        activation_BSF = self.activation(self.gate_proj(x_BSH), self.up_proj(x_BSH))
        out_BsH = self.down_proj.project_and_scatter(activation_BSF, self.tp)
        # The gate sees only this rank's positions, since the result holds no others.
        return out_BsH if self.output_gate is None else self.output_gate(x_BsH).sigmoid() * out_BsH


class Latent(nn.Module):
    """Projections of hidden states to the narrower input of routed experts, and of their outputs back.

    With ``moe_latent_size`` the input is also normed; without it the projections are identities.
    The output of each expert is normed if the model sets ``post_norm_eps``.
    """

    def __init__(self, config: ModelConfig, backend: BackendConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_latent_size
        self.pre_expert_proj = self.pre_expert_norm = self.post_expert_proj = nn.Identity()
        if width:
            self.pre_expert_proj = Linear(hidden, width)
            self.pre_expert_norm = backend.norm(width, config.norm_eps, config.zero_centered_norms)
            self.post_expert_proj = Linear(width, hidden)
        self.post_expert_norm = OutputNorm(config.post_norm_eps, config.expert_hidden_size)

    def forward(self, x_BsH: Tensor) -> Tensor:
        """Return the routed experts' input for hidden states [B, s, H]: [B, s, ``moe_latent_size``].

        Without ``moe_latent_size`` the hidden states themselves are returned.
        """
        return self.pre_expert_norm(self.pre_expert_proj(x_BsH))


class Block(nn.Module):
    """Pre-norm decoder layer number ``layer``, from 0: attention and a feed-forward with residuals.

    The feed-forward is an ``MoE`` in ``ModelConfig.moe_layers``, and an ``MLP`` in others.
    """

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, layer: int, backend: BackendConfig
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        calls = backend.calls(layer)
        mlp_args = backend.pg_collection.tp, calls.gather, activation_of(config)
        self.wrapped_run = bind(calls.layer, self.run)
        self.wrapped_run_attention = bind(calls.run_attention, self.run_attention)
        self.attn_residual, self.ffn_residual = (
            residual_of(config, backend.router_dtype) for _ in range(2)
        )
        self.attention_out_norm = OutputNorm(config.post_norm_eps)
        self.shortcut = config.moe_shortcut
        self.call_norm = calls.norm(call_module)
        norm = partial(backend.norm, hidden, config.norm_eps, config.zero_centered_norms)
        self.input_layernorm = norm()
        if is_linear(config.attention, layer):
            self.linear_attn = GatedDeltaNet(config, layer, backend)
        else:
            self.self_attn = SOFTMAX[config.attention.kind](config, layer, backend)
        self.post_attention_layernorm = norm()
        self.post_feedforward_layernorm = OutputNorm(config.post_norm_eps, hidden)
        self.mlp: nn.Module
        if layer not in config.moe_layers:
            self.mlp = MLP(hidden, config.intermediate_size, False, *mlp_args)
            self.call_mlp = calls.mlp(call_module)
        else:
            width = config.shared_width
            shared = MLP(hidden, width, config.shared_expert_gate, *mlp_args) if width else None
            self.mlp = MoE(config, moe, layer, shared, backend, Latent(config, backend))

    @property
    def attention(self) -> nn.Module:
        """Module that mixes positions: softmax attention or a gated delta net."""
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn

    def forward(
        self, x_BsH: Tensor, setup: AttentionSetup, tokens: Tokens, other_BsH: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual after attention and feed-forward, shaped as ``x_BsH``, and None.

        This is ``run`` with the layer's recomputation or compilation, if any. In the first layer of
        a pair (``moe_shortcut``) what its routed experts give replaces None.

        Args:
            x_BsH: hidden states at the s positions of this tp rank; with hyper-connections all
                streams, side by side.
            setup: angles, masks and kernel of attention, for all S positions.
            tokens: per-token tensors at the s positions.
            other_BsH: in a module for multi-token prediction, embeddings of later tokens; in the
                second layer of a pair, what the experts of the first give; else None.
        """
        return self.wrapped_run(x_BsH, setup, tokens, other_BsH)

    def run(
        self, x_BsH: Tensor, setup: AttentionSetup, tokens: Tokens, routed_BsH: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual after attention and feed-forward, shaped as ``x_BsH``, and None.

        In the first layer of a pair (``moe_shortcut``) what its routed experts give replaces None.

        Args:
            x_BsH: hidden states at the s positions of this tp rank.
            setup: angles, masks and kernel of attention, for all S positions.
            tokens: per-token tensors at the s positions.
            routed_BsH: in the second layer of a pair, what the routed experts of the first give.
        """
        x_BsH, h_BsH, *weights = self.wrapped_run_attention(x_BsH, setup)
        moe = isinstance(self.mlp, MoE)
        out_BsH = self.mlp(h_BsH, tokens) if moe else self.call_mlp(self.mlp, h_BsH)
        later_BsH = None
        if self.shortcut and moe:
            out_BsH, later_BsH = out_BsH
        if routed_BsH is not None:
            out_BsH = out_BsH + routed_BsH
        out_BsH = self.post_feedforward_layernorm(out_BsH)
        return self.ffn_residual.join(x_BsH, out_BsH, *weights), later_BsH

    def run_attention(self, x_BsH: Tensor, setup: AttentionSetup) -> tuple[Tensor, ...]:
        """Return the residual after attention, the input of the feed-forward, and weights for ``join``.

        The input is normed. ``ffn_residual.join`` takes the weights, if the residual has any, to
        add the feed-forward's output. Tensors are at the s positions of this tp rank.
        """
        h_BsH, *weights = self.attn_residual(x_BsH)
        out_BsH = self.attention(self.call_norm(self.input_layernorm, h_BsH), setup)
        x_BsH = self.attn_residual.join(x_BsH, self.attention_out_norm(out_BsH), *weights)
        h_BsH, *weights = self.ffn_residual(x_BsH)
        return x_BsH, self.call_norm(self.post_attention_layernorm, h_BsH), *weights
