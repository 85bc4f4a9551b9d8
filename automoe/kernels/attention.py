"""Softmax attention by the kernel that ``kernels.attention`` names; torch does not choose it.

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
    """Decide whether cuDNN's attention goes first on this GPU, and let torch set up its own order.

    Call it before attention on CUDA, outside compiled code. It runs when attention gets CUDA
    tensors and not when a model is built: it needs a CUDA context, which a process that computes on
    the CPU must not open.
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

    True on Hopper and datacenter Blackwell with cuDNN 9.15.1 or later.
    """
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return False
    version = torch.backends.cudnn.version()
    return version is not None and version >= _MIN_CUDNN


def cudnn_serves(mask: Tensor | None) -> bool:
    """Return whether cuDNN computes the right gradient of queries for this mask.

    With a mask over R keys, R mod 128 = 64, the gradient may be NaN. Half of the last tile of 128
    keys is then scored 0 instead of being left out, which overflows if all scores of a query are
    below -88.7 (pytorch#196678: cuDNN 9.15 and later on Hopper; causality without a mask is right).
    """
    return mask is None or mask.shape[-1] % 128 != 64


def cuda_order(query_dim: int, value_dim: int, mask: Tensor | None = None) -> list[SDPBackend]:
    """Return the kernels that may compute on CUDA for these head dims and mask, the best first."""
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
    """Return a context in which SDPA runs ``kernel``, or the first usable kernel of the order.

    A named kernel that cannot serve its tensors makes SDPA raise; no other kernel takes its place.
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
    """Return softmax attention's output [B, S, N, width of values]. G must divide N.

    Values may have another width than queries and keys.

    Args:
        mask: [B, 1, S, R] True where a query may attend to a key; None: plain causality.
        scale: factor of the products of queries and keys.
        sinks_N: per head, the score of one more key that every query sees and that has no value.
        kernel: the value of ``kernels.attention``.
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
    """Return q, k, v and mask with the sinks as one more key, so that fused kernels serve them.

    A key with a value of zeros is put in front of all others. One more dim of the queries holds the
    head's sink; this dim is one in the new key and zero in the others. Without a mask a query of
    zeros goes in front as well: by causality alone the other queries then see the new key and the
    keys that they saw before.
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
    """Return softmax attention's output by FlexAttention, which skips blocks that no query sees.

    Shapes and arguments are those of ``attend``, but for the mask. Without compilation it keeps all
    scores in memory.
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
    """Return the function ``attend`` with its ``kernel`` set, a value of ``kernels.attention``.

    Raises:
        BackendError: cuDNN is forced, and this machine's cuDNN computes wrong results.
    """
    if kernel == "cudnn":
        version = torch.backends.cudnn.version() if torch.cuda.is_available() else _MIN_CUDNN
        if version is None or version < _MIN_CUDNN:
            raise BackendError(
                f"kernels.attention=cudnn: this torch has cuDNN {version}, which is wrong if the length of a row is "
                f"not a multiple of 128; {_MIN_CUDNN} or later is not. Set kernels.attention=sdpa"
            )
    return partial(attend, kernel=kernel)
