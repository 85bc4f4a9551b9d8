"""Softmax attention by the kernel that the setting ``kernels.attention`` names.

Letters: B rows, S positions of queries, R of keys, N query heads, G key and value heads, D head dim
(Dv of values). Torch's kernels on CUDA require of q and k [B, N, S, D] and v [B, N, S, Dv] (its
``sdp_utils.cpp``):

    cuDNN      bfloat16, float16; D, Dv multiples of 8, up to 128 or exactly 192 and 128 (MLA);
               mask, grouped heads; not with a mask where R mod 128 = 64 (``cudnn_serves``)
    flash      bfloat16, float16; D = Dv up to 256; no mask; grouped heads
    efficient  float32 as well; D and Dv multiples of 8 (float32: of 4); mask; no grouped heads
    math       everything, and keeps every score [B, N, S, S]

On Hopper torch itself lets cuDNN take any dims up to 256, even if cuDNN then finds no plan for the
backward pass. Whether torch tries cuDNN first depends on its version. The CPU has flash (D = Dv,
any dtype, mask) and math.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from automoe.errors import BackendError

# The arguments are q_BSND, k_BRGD, v_BRGD, mask [B, 1, S, R] or None (causal), scale, and sinks_N
# or None; the result is [B, S, N, Dv].
AttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor | None], Tensor]

HALF = (torch.bfloat16, torch.float16)
FORCED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
_PLAIN_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Older versions of cuDNN are wrong if the length of a row is not a multiple of 128.
_MIN_CUDNN = 91501
cudnn_first: bool | None = None  # on this machine's GPU; None until attention has run


def prepare_cuda() -> None:
    """Set this module's ``cudnn_first`` once: whether attention on this GPU tries cuDNN first.

    Call this before attention on CUDA, outside compiled code. It runs SDPA once: torch sets up its
    default order of kernels at the first call, which must not happen inside ``sdpa_kernel``.
    Building a model does not call it: it creates a CUDA context, which a process that computes on
    the CPU must not have.
    """
    global cudnn_first
    if cudnn_first is None:
        # Torch sets up its own order of kernels at its first choice on CUDA, and only then. If
        # that choice happened within our order, leaving our order would restore one without
        # cuDNN for all other attention in this process.
        probe = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="cuda")
        F.scaled_dot_product_attention(probe, probe, probe)
        cudnn_first = cudnn_is_first()


def cudnn_is_first() -> bool:
    """Return whether cuDNN's attention is preferred to flash attention on this GPU.

    This is so on Hopper and datacenter Blackwell with cuDNN 9.15.1 or later; earlier versions are
    wrong for some sequence lengths.
    """
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return False
    version = torch.backends.cudnn.version()
    return version is not None and version >= _MIN_CUDNN


def cudnn_serves(mask: Tensor | None) -> bool:
    """Return whether cuDNN computes the right gradient of queries for this mask [B, 1, S, R].

    With a mask over R keys and R mod 128 = 64, the gradient may be NaN: half of the last tile of
    128 keys then gets the score 0 instead of being masked out, which overflows if all scores of a
    query are below -88.7 (pytorch#196678: cuDNN 9.15 and later on Hopper). Causal attention without
    a mask is right.
    """
    return mask is None or mask.shape[-1] % 128 != 64


def cuda_order(query_dim: int, value_dim: int, mask: Tensor | None = None) -> list[SDPBackend]:
    """Return the SDPA backends to try on CUDA for these head dims and mask, the best first.

    cuDNN is the first if this module's ``cudnn_first`` is True (``cudnn_is_first``) and it supports
    dims and mask [B, 1, S, R], else it is left out.
    """
    served = (
        max(query_dim, value_dim) <= 128 or (query_dim, value_dim) == (192, 128)
    ) and cudnn_serves(mask)
    return (
        [SDPBackend.CUDNN_ATTENTION, *_PLAIN_ORDER]
        if cudnn_first and served
        else list(_PLAIN_ORDER)
    )


def only_kernels(
    kernel: str, device_type: str, query_dim: int, value_dim: int, mask: Tensor | None = None
) -> AbstractContextManager[object]:
    """Return a context in which SDPA runs one kernel, or the best usable one for "sdpa".

    If a named kernel does not support its tensors, SDPA raises instead of using another one.

    Args:
        kernel: value of ``kernels.attention``: ``sdpa``, ``cudnn``, ``flash`` or ``math``.
        device_type: ``cuda`` or ``cpu``.
        query_dim, value_dim: head dims of queries (and keys) and of values.
        mask: [B, 1, S, R], or None for causal attention.

    Raises:
        BackendError: ``cudnn`` is named, and its gradient may be wrong for this mask.
    """
    if kernel == "cudnn" and not cudnn_serves(mask):
        raise BackendError(
            f"kernels.attention=cudnn: with a mask over {mask.shape[-1]} keys (mod 128 = 64) cuDNN's gradient of the "
            "queries may be NaN. Set kernels.attention=sdpa, which avoids cuDNN there, or another train.seq_len"
        )
    if kernel != "sdpa":
        return sdpa_kernel([FORCED[kernel]])
    if device_type == "cuda":
        return sdpa_kernel(cuda_order(query_dim, value_dim, mask), set_priority=True)
    return nullcontext()


def attend(
    q_BSND: Tensor,
    k_BRGD: Tensor,
    v_BRGD: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks_N: Tensor | None = None,
    kernel: str = "sdpa",
) -> Tensor:
    """Return the output of softmax attention, [B, S, N, head dim of values].

    Shapes: B rows, S queries, R keys, N query heads, G key and value heads (G divides N), D head
    dim; values may have another head dim than queries and keys.

    Args:
        mask: [B, 1, S, R] True where a query may attend to a key; None: causal attention.
        scale: factor of the products of queries and keys.
        sinks_N: attention sinks: per head, the logit of an extra key with a value of 0 that every
            query attends to.
        kernel: value of ``kernels.attention``: ``sdpa``, ``cudnn``, ``flash`` or ``math``.

    Raises:
        BackendError: ``cudnn`` is named, and its gradient may be wrong for this mask.
    """
    if sinks_N is not None:
        out = attend(
            *_with_sink_key(q_BSND, k_BRGD, v_BRGD, mask, scale, sinks_N), scale, None, kernel
        )
        return out[:, out.shape[1] - q_BSND.shape[1] :, :, : v_BRGD.shape[-1]]
    q_BNSD, k_BGRD, v_BGRD = (x.transpose(1, 2) for x in (q_BSND, k_BRGD, v_BRGD))
    value_dim = v_BGRD.shape[-1]
    device = q_BNSD.device.type
    num_heads = q_BNSD.shape[1]
    if value_dim < q_BNSD.shape[-1] and (
        kernel == "flash" or (kernel == "sdpa" and device == "cpu")
    ):
        # Flash needs equal head dims; on the CPU zero columns cost less than the unfused path.
        v_BGRD = F.pad(v_BGRD, (0, q_BNSD.shape[-1] - value_dim))
    if k_BGRD.shape[1] != num_heads and device == "cuda" and kernel == "sdpa":
        if mask is not None or q_BNSD.dtype not in HALF:
            # The efficient kernel may be the only fused kernel left, and takes no grouped heads.
            repeats = num_heads // k_BGRD.shape[1]
            k_BGRD, v_BGRD = (x.repeat_interleave(repeats, dim=1) for x in (k_BGRD, v_BGRD))
    with only_kernels(kernel, device, q_BNSD.shape[-1], v_BGRD.shape[-1], mask):
        out_BNSD = F.scaled_dot_product_attention(
            q_BNSD,
            k_BGRD,
            v_BGRD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=k_BGRD.shape[1] != num_heads,
        )
    return out_BNSD[..., :value_dim].transpose(1, 2)


def _with_sink_key(q_BSND, k_BRGD, v_BRGD, mask: Tensor | None, scale: float, sinks_N: Tensor):
    """Return q, k, v and mask with the attention sinks as one more key, for kernels without sinks.

    The new key comes first and has a value of zeros. The heads of queries and keys get one more
    feature, which holds the head's sink over ``scale`` (the later factor of the scores) in queries,
    1 in the new key, and 0 in all other keys. Zeros then pad all head dims, also of values, to one
    multiple of 8. Without a mask, a query of zeros also comes first, so that causality lets each
    query see the new key and the keys that it saw before; the caller drops its output and the
    values' extra dims.
    """
    dim = k_BRGD.shape[-1]
    extra = 8 - dim % 8  # at least one dim, padded to a multiple of 8 for fused kernels
    column_ND = F.pad((sinks_N.to(q_BSND.dtype) / scale).unsqueeze(1), (0, extra - 1))
    q_BSND = torch.cat((q_BSND, column_ND.expand(*q_BSND.shape[:3], extra)), dim=-1)
    k_BRGD = F.pad(k_BRGD, (0, extra, 0, 0, 1, 0))
    v_BRGD = F.pad(v_BRGD, (0, q_BSND.shape[-1] - v_BRGD.shape[-1], 0, 0, 1, 0))
    k_BRGD[:, 0, :, dim] = 1
    if mask is None:
        return F.pad(q_BSND, (0, 0, 0, 0, 1, 0)), k_BRGD, v_BRGD, None
    return q_BSND, k_BRGD, v_BRGD, F.pad(mask, (1, 0), value=True)


def attend_in_blocks(
    q_BSND: Tensor,
    k_BRGD: Tensor,
    v_BRGD: Tensor,
    mask: BlockMask,
    scale: float,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return the output of softmax attention by FlexAttention, which skips fully masked blocks.

    Shapes: B rows, S queries, R keys, N query heads, G key and value heads, D head dim. The result
    is [B, S, N, head dim of values]. Unless compiled, FlexAttention stores the scores of all
    queries and keys.

    Args:
        mask: blocks of queries and keys that see each other.
        scale: factor of the products of queries and keys.
        sinks_N: attention sinks: per head, the logit of an extra key with a value of 0 that every
            query attends to.
    """
    heads = (x.transpose(1, 2) for x in (q_BSND, k_BRGD, v_BRGD))
    options = {"block_mask": mask, "scale": scale, "enable_gqa": True}
    if sinks_N is None:
        return flex_attention(*heads, **options).transpose(1, 2)
    out_BNSD, aux = flex_attention(*heads, **options, return_aux=AuxRequest(lse=True))
    # the share of the keys in a softmax over keys and sink
    share_BNS = (aux.lse - sinks_N[:, None]).sigmoid()
    return (out_BNSD * share_BNS.unsqueeze(-1).to(out_BNSD.dtype)).transpose(1, 2)


def attention_fn(kernel: str) -> AttentionFn:
    """Return ``attend`` (softmax attention) with its argument ``kernel`` set.

    Args:
        kernel: value of ``kernels.attention``: ``sdpa``, ``cudnn``, ``flash`` or ``math``.

    Raises:
        BackendError: ``cudnn`` is named, and this machine's version computes wrong results.
    """
    if kernel == "cudnn":
        version = torch.backends.cudnn.version() if torch.cuda.is_available() else _MIN_CUDNN
        if version is None or version < _MIN_CUDNN:
            raise BackendError(
                f"kernels.attention=cudnn: this torch has cuDNN {version}, which is wrong if the length of a row is "
                f"not a multiple of 128; {_MIN_CUDNN} or later is not. Set kernels.attention=sdpa"
            )
    return partial(attend, kernel=kernel)
