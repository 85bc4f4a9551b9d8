"""Softmax attention. ``kernels.attention`` says which kernel computes; it is not left to torch.

Letters: B rows, S positions of queries, R of keys, N query heads, G key and value heads, D head dim
(Dv of values). What torch asks of q and k [B, N, S, D] and v [B, N, S, Dv] on CUDA (its
``sdp_utils.cpp``):

    cuDNN      bfloat16, float16; D, Dv multiples of 8, to 128 or exactly 192 and 128 (MLA); mask, grouped heads;
               not with a mask where R mod 128 = 64 (``cudnn_serves``)
    flash      bfloat16, float16; D = Dv to 256; no mask; grouped heads
    efficient  float32 as well; D and Dv multiples of 8 (float32: of 4); mask; no grouped heads
    math       everything, and keeps every score [B, N, S, S]

Torch itself lets cuDNN take any dims to 256 on Hopper, also where cuDNN then finds no plan for the
backward pass, and puts it first, or does not, by version. The CPU has flash (D = Dv, any dtype,
mask) and math.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from automoe.errors import BackendError

# q_BSND, k_BRGD, v_BRGD, mask [B, 1, S, R] or None (causal), scale, sinks_N or None -> [B, S, N,
# Dv]
AttentionFn = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, torch.Tensor | None],
    torch.Tensor,
]

HALF = (torch.bfloat16, torch.float16)
FORCED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
_PLAIN_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Older ones are wrong where the length of a row is not a multiple of 128.
_MIN_CUDNN = 91501
cudnn_first: bool | None = None  # on this machine's GPU; None until attention has run there


def prepare_cuda() -> None:
    """Before attention on CUDA, outside compiled code: settle torch's own order, and whether cuDNN
    goes first in ours.

    Asked when attention gets tensors there and not when a model is built: the answer takes a CUDA
    context, which a process that computes on the CPU must not open.
    """
    global cudnn_first
    if cudnn_first is None:
        # Torch sets up its own order of kernels at its first choice on CUDA, and only then. Were
        # that choice within ours, leaving ours would restore an order without cuDNN for whoever
        # else computes attention in this process.
        probe = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="cuda")
        F.scaled_dot_product_attention(probe, probe, probe)
        cudnn_first = cudnn_is_first()


def cudnn_is_first() -> bool:
    """Whether cuDNN's attention goes before flash here: Hopper or datacenter Blackwell, cuDNN
    9.15.1 or later."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return False
    version = torch.backends.cudnn.version()
    return version is not None and version >= _MIN_CUDNN


def cudnn_serves(mask: torch.Tensor | None) -> bool:
    """Whether the gradient of queries is right: with a mask over R keys, R mod 128 = 64, it may be
    NaN.

    Half of the last tile of 128 keys is then scored 0 instead of not at all, which overflows where
    a query's scores are all below -88.7 (pytorch#196678: cuDNN 9.15 and later on Hopper; causality
    without a mask is right).
    """
    return mask is None or mask.shape[-1] % 128 != 64


def cuda_order(
    query_dim: int, value_dim: int, mask: torch.Tensor | None = None
) -> list[SDPBackend]:
    """The kernels that may compute on CUDA, the best first, for heads of these dims and this
    mask."""
    served = (
        max(query_dim, value_dim) <= 128 or (query_dim, value_dim) == (192, 128)
    ) and cudnn_serves(mask)
    return (
        [SDPBackend.CUDNN_ATTENTION, *_PLAIN_ORDER]
        if cudnn_first and served
        else list(_PLAIN_ORDER)
    )


def only_kernels(
    kernel: str, device_type: str, query_dim: int, value_dim: int, mask: torch.Tensor | None = None
) -> AbstractContextManager[object]:
    """Within it SDPA runs the kernel that ``kernels.attention`` names, or the first of the order
    that can.

    A named kernel that cannot serve its tensors makes SDPA raise: none takes its place.
    """
    if kernel == "cudnn" and not cudnn_serves(mask):
        raise BackendError(
            f"kernels.attention=cudnn: with a mask over {mask.shape[-1]} keys (mod 128 = 64) cuDNN's gradient of the "
            "queries may be NaN. Set kernels.attention=sdpa, which leaves it out there, or another train.seq_len"
        )
    if kernel != "sdpa":
        return sdpa_kernel([FORCED[kernel]])
    if device_type == "cuda":
        return sdpa_kernel(cuda_order(query_dim, value_dim, mask), set_priority=True)
    return nullcontext()


def attend(
    q_BSND: torch.Tensor,
    k_BRGD: torch.Tensor,
    v_BRGD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks_N: torch.Tensor | None = None,
    kernel: str = "sdpa",
) -> torch.Tensor:
    """Softmax attention, G dividing N; values may have another width than queries and keys.

    Args:
        mask: [B, 1, S, R] True where a query may look; None: plain causality.
        sinks_N: scores of one more key a head, which every query sees and which has no value.
        kernel: that of ``kernels.attention``.

    Returns:
        [B, S, N, width of values].
    """
    if sinks_N is not None:
        out = attend(
            *_with_sink_key(q_BSND, k_BRGD, v_BRGD, mask, scale, sinks_N), scale, None, kernel
        )
        return out[:, out.shape[1] - q_BSND.shape[1] :, :, : v_BRGD.shape[-1]]
    q_BNSD, k_BGRD, v_BGRD = q_BSND.transpose(1, 2), k_BRGD.transpose(1, 2), v_BRGD.transpose(1, 2)
    value_dim, device, num_heads = v_BGRD.shape[-1], q_BNSD.device.type, q_BNSD.shape[1]
    if value_dim < q_BNSD.shape[-1] and (
        kernel == "flash" or (kernel == "sdpa" and device == "cpu")
    ):
        # Flash wants equal head dims; on the CPU zero columns cost less than the unfused path.
        v_BGRD = F.pad(v_BGRD, (0, q_BNSD.shape[-1] - value_dim))
    if k_BGRD.shape[1] != num_heads and device == "cuda" and kernel == "sdpa":
        if mask is not None or q_BNSD.dtype not in HALF:
            # The efficient kernel may be the only fused one left, and takes no grouped heads.
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


def _with_sink_key(
    q_BSND, k_BRGD, v_BRGD, mask: torch.Tensor | None, scale: float, sinks_N: torch.Tensor
):
    """q, k, v and mask of an attention without sinks that computes one with them, so that fused
    kernels serve both.

    A key is put in front of all others, with a value of zeros. One more dim of the queries holds
    the head's sink, and is one in that key and zero in the others. Without a mask a query of zeros
    goes in front as well: the others then see the new key and what they saw before by causality
    alone.
    """
    dim = k_BRGD.shape[-1]
    extra = 8 - dim % 8  # at least one dim, and as many as fused kernels want
    column_ND = F.pad((sinks_N.to(q_BSND.dtype) / scale).unsqueeze(1), (0, extra - 1))
    q_BSND = torch.cat((q_BSND, column_ND.expand(*q_BSND.shape[:3], extra)), dim=-1)
    k_BRGD = F.pad(k_BRGD, (0, extra, 0, 0, 1, 0))
    v_BRGD = F.pad(v_BRGD, (0, q_BSND.shape[-1] - v_BRGD.shape[-1], 0, 0, 1, 0))
    k_BRGD[:, 0, :, dim] = 1
    if mask is None:
        return F.pad(q_BSND, (0, 0, 0, 0, 1, 0)), k_BRGD, v_BRGD, None
    return q_BSND, k_BRGD, v_BRGD, F.pad(mask, (1, 0), value=True)


def attention_fn(kernel: str) -> AttentionFn:
    """``attend`` with the kernel that ``kernels.attention`` names.

    Raises:
        BackendError: cuDNN is to be forced, and this machine's is wrong.
    """
    if kernel == "cudnn":
        version = torch.backends.cudnn.version() if torch.cuda.is_available() else _MIN_CUDNN
        if version is None or version < _MIN_CUDNN:
            raise BackendError(
                f"kernels.attention=cudnn: this torch has cuDNN {version}, which is wrong where the length of a row is "
                f"not a multiple of 128; {_MIN_CUDNN} or later is not. Set kernels.attention=sdpa"
            )
    return partial(attend, kernel=kernel)
