"""Triton kernels for the matrix products of routed experts, with gathering and activation fused.

Every product runs over tiles of rows of one expert (``automoe.kernels.tiling``), accumulates in
float32 and writes each number once, without atomics: a run repeats bit for bit. Shapes: R rows
sorted by expert, E experts, H hidden, I expert width; ``pre`` is gate and up before the activation,
[R, 2I].
"""

from __future__ import annotations

import triton
import triton.language as tl

# So many tiles run through all columns together, so the weights that they share are read from L2
# and not from memory once per tile.
_TILES_TOGETHER = tl.constexpr(8)


@triton.jit
def _known(size, STEP: tl.constexpr):
    """Triton function: return ``size``, a multiple of STEP, so that the compiler knows the divisor.

    By itself the compiler only recognises multiples of 16, and copies rows of other lengths one number at a time.
    """
    return size // STEP * STEP


@triton.jit
def _rows_of_tile(
    tile_expert, tile_row, offsets, num_tiles, num_experts, num_columns, BLOCK_M: tl.constexpr
):
    """Triton function: return the expert, block of columns and rows that this program computes.

    Args:
        tile_expert, tile_row: [num_tiles] expert and first row of each tile of rows (``RowTiles``).
        offsets: [E] end of each expert's rows.
        num_tiles: length of ``tile_expert``, including entries without a tile.
        num_columns: number of blocks of columns.
        BLOCK_M: rows of a tile.

    Returns:
        The expert (``num_experts`` if the program has no tile), the number of the program's block of columns, the first
        row, the row numbers relative to it, and a mask of the rows that belong to the expert. The first row has 64
        bits, for addresses; the relative numbers have 32, since 64 would spill registers.
    """
    pid = tl.program_id(0)
    together = _TILES_TOGETHER * num_columns
    first_tile = (pid // together) * _TILES_TOGETHER
    height = tl.minimum(num_tiles - first_tile, _TILES_TOGETHER)
    tile = first_tile + (pid % together) % height
    column = (pid % together) // height
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_row + tile)
    row = tl.arange(0, BLOCK_M)
    end = tl.load(offsets + expert, mask=expert < num_experts, other=0)
    return expert, column, first.to(tl.int64), row, row < end - first


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Triton function: split ``tile`` [ROWS, COLUMNS] into its left and right half, within registers."""
    return tile.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """Triton function: return acc + a @ b, or a @ b if ``acc`` is None.

    PRECISION is ``tl.dot``'s: ``ieee`` multiplies in float32, as Triton's interpreter must for all dtypes.
    """
    if PRECISION == "ieee":
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _narrow(value, to: tl.constexpr, PRECISION: tl.constexpr):
    """Triton function: cast ``value`` (float32) to dtype ``to``, rounded to nearest, ties to even.

    GPUs round so themselves. Triton's interpreter, which has PRECISION ``ieee``, would truncate to bfloat16.
    """
    if PRECISION == "ieee" and to == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return value.to(to)


@triton.jit
def _load(at, mask):
    """Triton function: load numbers from the pointers ``at`` as float32; 0 where ``mask`` is False."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(at, value, mask, PRECISION: tl.constexpr):
    """Triton function: store ``value`` (float32) at the pointers ``at``, where ``mask``, rounded to their dtype.

    PRECISION is ``input_precision`` of ``tl.dot``; ``ieee`` rounds explicitly: Triton's interpreter would truncate.
    """
    tl.store(at, _narrow(value, at.dtype.element_ty, PRECISION), mask=mask)


@triton.jit
def _block(at, rows, columns):
    """Triton function: load a 2-D block from the pointers ``at``, in their dtype.

    ``rows`` and ``columns`` are 1-D masks of its dims; where either is False, the result is 0.
    """
    return tl.load(at, mask=rows[:, None] & columns[None, :], other=0.0)


@triton.jit
def _activate(gate, up, alpha, limit, offset, CLAMPED: tl.constexpr):
    """Triton function: return (a, its derivative by gate, by up), a = gate * sigmoid(gate) * up.

    CLAMPED: a = g * sigmoid(alpha * g) * (u + offset), g = min(gate, limit), u = up within +-limit."""
    if CLAMPED:
        low = tl.minimum(gate, limit)
        raised = tl.minimum(tl.maximum(up, -limit), limit) + offset
        sigmoid = tl.sigmoid(alpha * low)
        swish = low * sigmoid
        by_gate = tl.where(gate <= limit, raised * (sigmoid + alpha * swish * (1.0 - sigmoid)), 0.0)
        return raised * swish, by_gate, tl.where(tl.abs(up) <= limit, swish, 0.0)
    sigmoid = tl.sigmoid(gate)
    swish = gate * sigmoid
    return swish * up, up * (sigmoid + swish * (1.0 - sigmoid)), swish


@triton.jit
def gather_up_activate(
    x,  # [N, H]
    gather_idx,  # [R]
    gate_up_proj,  # [E, 2, I, H]; if TMA its descriptor as [2E, I, H]
    gate_up_proj_bias,  # [E, 2, I], or None
    probs,  # [R]
    pre,  # [R, 2I], written
    act,  # [R, I], written: probs * activation
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    num_experts,
    hidden,
    width,
    alpha,
    limit,
    offset,
    CLAMPED: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Triton kernel: compute the experts' gate and up projection and activation.

    Each program reads its tokens from ``x`` [tokens, hidden] through ``gather_idx`` [R], so no permuted copy of x is
    made. Outputs are ``pre`` (gate and up, [R, 2 ``width``]) and ``act`` (routing weight ``probs`` * activation, which
    is SwiGLU, with CLAMPED clamped, by ``alpha``, ``limit`` and ``offset``). ``tile_expert`` and ``tile_row`` are
    expert and first row of the ``num_tiles`` tiles, ``offsets`` the ends of the experts' rows (``RowTiles``). STEP
    divides all row lengths. ``gate_up_proj`` is [E, 2, width, hidden] (with TMA a tensor descriptor), and its bias [E,
    2, width] or None. PRECISION is ``input_precision`` of ``tl.dot``. A program computes BLOCK_M x BLOCK_N results.
    """
    hidden = _known(hidden, STEP)
    width = _known(width, STEP)
    expert, column, first, row, real = _rows_of_tile(
        tile_expert, tile_row, offsets, num_tiles, num_experts, tl.cdiv(width, BLOCK_N), BLOCK_M
    )
    if expert >= num_experts:
        return
    source = tl.load(gather_idx + first + row, mask=real, other=0).to(tl.int64)
    from_x = x + source[:, None] * hidden
    # One product for the columns of gate and up: two would read the rows from shared memory twice.
    if TMA:
        product = _described_product(
            from_x, first, real, gate_up_proj, 2 * expert, column * BLOCK_N, hidden,
            True, True, PRECISION, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        half = tl.arange(0, 2 * BLOCK_N) // BLOCK_N
        both = column * BLOCK_N + tl.arange(0, 2 * BLOCK_N) % BLOCK_N
        from_w = gate_up_proj + ((expert.to(tl.int64) * 2 + half) * width + both)[None, :] * hidden
        product = _product(
            from_x, from_w, real, both < width, hidden, 1, PRECISION, BLOCK_M, 2 * BLOCK_N, BLOCK_K
        )
    gate, up = _halves(product, BLOCK_M, 2 * BLOCK_N)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < width
    if gate_up_proj_bias is not None:
        bias = gate_up_proj_bias + expert * 2 * width + cols
        gate += _load(bias, inside)[None, :]
        up += _load(bias + width, inside)[None, :]
    mask = real[:, None] & inside[None, :]
    to = pre + first * 2 * width + row[:, None] * (2 * width) + cols[None, :]
    # Values are rounded first, since the backward activates the stored values.
    gate = _narrow(gate, pre.dtype.element_ty, PRECISION)
    up = _narrow(up, pre.dtype.element_ty, PRECISION)
    tl.store(to, gate, mask=mask)
    tl.store(to + width, up, mask=mask)
    value, _, _ = _activate(gate.to(tl.float32), up.to(tl.float32), alpha, limit, offset, CLAMPED)
    value *= _load(probs + first + row, real)[:, None]
    to = act + first * width + row[:, None] * width + cols[None, :]
    _store(to, value, mask, PRECISION)


@triton.jit
def rows_times_weights(
    a,  # [R, K]; if TMA its descriptor
    w,  # [E, N, K], or [E, K, N] if not BY_COLUMNS; if TMA its descriptor
    bias,  # [E, N], weighted by probs, or None
    probs,  # [R], read with the bias
    out,  # [R, N], written
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    num_experts,
    K,
    N,
    BY_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Triton kernel: multiply each row of ``a``, sorted by expert, by its expert's weight in ``w``.

    ``out`` [R, N] is the down projection of ``a`` [R, K], or in the backward pass the gradient of the experts' input
    rows. ``w`` is [E, N, K] with BY_COLUMNS, else [E, K, N]; ``bias`` [E, N] (or None) is added times ``probs`` [R],
    the routing weights. ``tile_expert`` and ``tile_row`` are expert and first row of the ``num_tiles`` tiles,
    ``offsets`` the ends of the experts' rows (``RowTiles``). STEP divides all row lengths. With TMA ``a`` and ``w`` are
    tensor descriptors. PRECISION is ``input_precision`` of ``tl.dot``. A program computes BLOCK_M x BLOCK_N results,
    over BLOCK_K at a time.
    """
    K = _known(K, STEP)
    N = _known(N, STEP)
    expert, column, first, row, real = _rows_of_tile(
        tile_expert, tile_row, offsets, num_tiles, num_experts, tl.cdiv(N, BLOCK_N), BLOCK_M
    )
    if expert >= num_experts:
        return
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < N
    if TMA:
        acc = _described_product(
            a, first, real, w, expert, column * BLOCK_N, K,
            False, BY_COLUMNS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        from_w = (
            w + expert.to(tl.int64) * K * N + cols[None, :].to(tl.int64) * (K if BY_COLUMNS else 1)
        )
        acc = _product(
            a + first * K + row[:, None] * K, from_w, real, inside, K, 1 if BY_COLUMNS else N,
            PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if bias is not None:
        weight = _load(probs + first + row, real)
        acc += weight[:, None] * _load(bias + expert * N + cols, inside)[None, :]
    to = out + first * N + row[:, None] * N + cols[None, :]
    _store(to, acc, real[:, None] & inside[None, :], PRECISION)


@triton.jit
def _product(
    a, w, real, inside, K, stride_w_k,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Triton function: return one block [BLOCK_M, BLOCK_N] of a matrix product.

    Args:
        a: [BLOCK_M, 1] pointers to the first of K numbers of each row.
        w: [1, BLOCK_N] pointers to the first of K numbers of each column.
        real, inside: masks of the rows and columns that exist.
        stride_w_k: stride between the numbers of a column.
    """
    k = tl.arange(0, BLOCK_K)
    a += k[None, :]
    w += k[:, None].to(tl.int64) * stride_w_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        in_k = k < K - start
        acc = _dot(_block(a, real, in_k), _block(w, in_k, inside), acc, PRECISION)
        a += BLOCK_K
        w += BLOCK_K * stride_w_k
    return acc


@triton.jit
def _described_product(
    a, first, real, w, expert, col, K, GATHERED: tl.constexpr, BY_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Triton function: return one block [BLOCK_M, COLUMNS] of a product, with operands read by TMA.

    ``w`` is a tensor descriptor of [.., N, K] if BY_COLUMNS, else of [.., K, N]; ``expert`` and ``col`` are the
    weight's index and the block's first column. ``a`` is a descriptor of [R, K], read from row ``first`` on; with
    GATHERED it is pointers to rows, of which ``real`` is the mask. A tile may extend past its expert's last row: these
    extra rows hold other rows or zeros, and the caller masks their results.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for start in range(0, K, BLOCK_K):
        if GATHERED:
            rows = _block(a + start + k[None, :], real, k < K - start)
        else:
            rows = a.load([first.to(tl.int32), start])
        if BY_COLUMNS:
            columns = w.load([expert, col, start]).reshape(COLUMNS, BLOCK_K).T
        else:
            columns = w.load([expert, start, col]).reshape(BLOCK_K, COLUMNS)
        acc = _dot(rows, columns, acc, PRECISION)
    return acc


@triton.jit
def grad_down_activate(
    grad_out,  # [R, H]; if TMA its descriptor
    down_proj,  # [E, H, I]; if TMA its descriptor
    probs,  # [R]
    pre,  # [R, 2I]
    grad_pre,  # [R, 2I], written
    act,  # [R, I], written: probs * activation, for the gradient of down_proj
    grad_probs,  # [R, blocks of columns] float32, written: shares of each row's sum
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    num_experts,
    hidden,
    width,
    alpha,
    limit,
    offset,
    CLAMPED: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS_AT_ONCE: tl.constexpr,
):
    """Triton kernel: compute the gradients of gate, up and routing weights from that of the output.

    The gradient of the activation stays in registers; its product with the activation, summed over columns, is the
    gradient of the routing weights ``probs`` [R]. Outputs are ``grad_pre`` (of gate and up), ``act`` [R, width]
    (routing weight * activation) and ``grad_probs`` [R, blocks] (a partial sum per block of columns). ``grad_out`` is
    [R, hidden], ``down_proj`` [E, hidden, width], ``pre`` gate and up [R, 2 width]; the activation is SwiGLU, with
    CLAMPED clamped, by ``alpha``, ``limit`` and ``offset``. ``tile_expert`` and ``tile_row`` are expert and first row
    of the ``num_tiles`` tiles, ``offsets`` the ends of the experts' rows (``RowTiles``). STEP divides all row lengths.
    With TMA ``grad_out`` and ``down_proj`` are tensor descriptors. PRECISION is ``input_precision`` of ``tl.dot``. The
    activation's gradients are computed for at most COLUMNS_AT_ONCE of a program's BLOCK_M x BLOCK_N results at a time.
    """
    hidden = _known(hidden, STEP)
    width = _known(width, STEP)
    num_columns = tl.cdiv(width, BLOCK_N)
    expert, column, first, row, real = _rows_of_tile(
        tile_expert, tile_row, offsets, num_tiles, num_experts, num_columns, BLOCK_M
    )
    if expert >= num_experts:
        return
    if TMA:
        grad = _described_product(
            grad_out, first, real, down_proj, expert, column * BLOCK_N, hidden,
            False, False, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        from_w = down_proj + expert.to(tl.int64) * hidden * width + cols[None, :]
        grad = _product(
            grad_out + first * hidden + row[:, None] * hidden, from_w, real, cols < width, hidden, width,
            PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    share = _grad_activation(
        grad, row, real, column * BLOCK_N, probs + first, pre + first * 2 * width, grad_pre + first * 2 * width,
        act + first * width, width, alpha, limit, offset, CLAMPED, PRECISION, BLOCK_M, BLOCK_N, COLUMNS_AT_ONCE,
    )  # fmt: skip
    tl.store(grad_probs + (first + row) * num_columns + column, share, mask=real)


@triton.jit
def _grad_activation(
    grad, row, real, first_col, probs, pre, grad_pre, act, width, alpha, limit, offset,
    CLAMPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
    COLUMNS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Triton function: run the backward pass of SwiGLU (``_activate``) for COLUMNS of ``width`` columns.

    ``grad`` is the gradient of routing weight * activation for the tile's rows and these columns, from ``first_col``
    on; ``row`` are the rows' numbers, ``real`` masks those that exist. Gate and up are read from ``pre`` [rows, 2
    ``width``], their gradients stored in ``grad_pre``, activation times routing weight (``probs``) in ``act``. Returns
    each row's sum over these columns of gradient times activation, a term of the gradient of ``probs``.

    Columns are processed at most COLUMNS_AT_ONCE at a time: gate, up and four results of all columns would not fit the
    registers together with the accumulator.
    """
    if COLUMNS > COLUMNS_AT_ONCE:
        left, right = _halves(grad, BLOCK_M, COLUMNS)
        share = _grad_activation(
            left, row, real, first_col, probs, pre, grad_pre, act, width, alpha, limit, offset,
            CLAMPED, PRECISION, BLOCK_M, COLUMNS // 2, COLUMNS_AT_ONCE,
        )  # fmt: skip
        return share + _grad_activation(
            right, row, real, first_col + COLUMNS // 2, probs, pre, grad_pre, act, width, alpha, limit, offset,
            CLAMPED, PRECISION, BLOCK_M, COLUMNS // 2, COLUMNS_AT_ONCE,
        )  # fmt: skip
    cols = first_col + tl.arange(0, COLUMNS)
    mask = real[:, None] & (cols < width)[None, :]
    at = row[:, None] * (2 * width) + cols[None, :]
    gate = _load(pre + at, mask)
    up = _load(pre + width + at, mask)
    value, by_gate, by_up = _activate(gate, up, alpha, limit, offset, CLAMPED)
    share = tl.sum(tl.where(mask, grad * value, 0.0), axis=1)
    weight = _load(probs + row, real)[:, None]
    _store(act + row[:, None] * width + cols[None, :], value * weight, mask, PRECISION)
    grad *= weight
    _store(grad_pre + width + at, grad * by_up, mask, PRECISION)
    _store(grad_pre + at, grad * by_gate, mask, PRECISION)
    return share


@triton.jit
def grad_weights(
    left,  # [R, M]
    right,  # [R, N], or [tokens, N] read through gather_idx
    gather_idx,  # [R], or None
    out,  # [E, M, N], written, zeros for an expert without rows
    offsets,
    M,
    N,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Triton kernel: compute out[e] = left.T @ right over the rows of each expert e.

    This is the gradient of the experts' weights: ``left`` [R, M] and ``right`` [R, N], sorted by expert, give [E, M,
    N], with zeros for an expert without rows. ``offsets`` [E] are the ends of the experts' rows. Unless ``gather_idx``
    [R] is None, ``right`` is [tokens, N], and ``gather_idx`` has its row for each row of ``left``. STEP divides M and
    N, for the compiler. PRECISION is ``input_precision`` of ``tl.dot``. A program computes BLOCK_M x BLOCK_N results.
    """
    M = _known(M, STEP)
    N = _known(N, STEP)
    num_columns = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(M, BLOCK_M) * num_columns
    expert = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    m = (block // num_columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (block % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        real = rows < end
        rows = rows.to(tl.int64)
        source = rows
        if gather_idx is not None:
            source = tl.load(gather_idx + rows, mask=real, other=0).to(tl.int64)
        from_left = _block(left + rows[None, :] * M + m[:, None], m < M, real)
        from_right = _block(right + source[:, None] * N + n[None, :], real, n < N)
        acc = _dot(from_left, from_right, acc, PRECISION)
    to = out + expert.to(tl.int64) * M * N + m[:, None].to(tl.int64) * N + n[None, :]
    _store(to, acc, (m < M)[:, None] & (n < N)[None, :], PRECISION)


@triton.jit
def sum_rows_of_token(
    rows,  # [R, H]
    order,  # [R], rows sorted by the token that they were read from
    first,  # [N + 1], where each token's rows begin in ``order``
    out,  # [N, H], written
    hidden,
    PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Triton kernel: sum each token's rows of gradients, in the order of its experts.

    Args:
        rows: [R, hidden] gradients; ``out`` [tokens, hidden] receives the sums.
        order: row numbers, sorted by token; those of a token are in the order of its experts.
        first: for each token, index in ``order`` of its first row; one more entry is the end.
        PRECISION: ``ieee`` for float32 and in Triton's interpreter, which must be told how to round to bfloat16.
        BLOCK_H: columns that one program sums.
    """
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for at in range(tl.load(first + token), tl.load(first + token + 1)):
        row = tl.load(order + at).to(tl.int64)
        acc += _load(rows + row * hidden + h, h < hidden)
    _store(out + token * hidden + h, acc, h < hidden, PRECISION)
