/* Softmax attention and its gradients in float32 on a CPU core: kernels.attention=c.

Plain C with the vectors of GCC and Clang, compiled for the processor that it runs on (c_library.py). Both functions do
a range of tasks [first, last), so that the caller can share them out among threads. A task does not depend on the
others, and its result does not depend on the range. A NaN in a score reaches the queries that see it; one in a value
also reaches others of its block (0 * NaN).
Letters: B rows, S queries, R keys, N query heads, G key and value heads, D dims of queries and keys, E of values. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, TILE_ROWS = 8 }; /* 16 of 32 registers hold sums */
#elif defined(__AVX__)
enum { LANES = 8, TILE_ROWS = 4 };
#else
enum { LANES = 4, TILE_ROWS = 4 };
#endif
enum { BLOCK = 64, CHUNK = 512 }; /* queries or keys at a time; keys whose scores are kept at once: they fit L2 */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline vec load(const float *from) { return *(const vec *)from; }
static inline void store(float *to, vec x) { *(vec *)to = x; }
static inline vec splat(float x) { return (vec){0} + x; }
static inline vec choose(ivec if_, vec yes, vec no) { return (vec)(((ivec)yes & if_) | ((ivec)no & ~if_)); }
static inline long least(long a, long b) { return a < b ? a : b; }
static inline long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }

static inline float sum_lanes(vec x)
{
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* exp within two units of the last place; 0 below -87, where float32 has few digits left, and infinity above 88. */
static inline vec vector_exp(vec x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold */
    vec bounded = choose(x < -87.0f, splat(-87.0f), choose(x > 88.0f, splat(88.0f), x));
    vec shifted = bounded * 1.44269504088896341f + magic, n = shifted - magic;
    vec r = bounded - n * 0.693359375f + n * 2.12194440e-4f; /* log 2 in two parts */
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec result = p * (vec)(((ivec)shifted - 0x4b400000 + 127) << 23);
    result = choose(x > 88.0f, splat(INFINITY), result);
    return choose(x < -87.0f, splat(0), result);
}

/* ---- Products: C [M, N] = or += A [M, K] B [K, N], M a multiple of TILE_ROWS, N of LANES; A has two strides ---- */

static inline __attribute__((always_inline)) void tile(
    int width, long K, const float *A, long row, long col, const float *B, long ldb, float *C, long ldc, int add)
{
    vec sum[TILE_ROWS][2];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < width; c++) sum[r][c] = splat(0);
    for (long k = 0; k < K; k++)
        for (int r = 0; r < TILE_ROWS; r++)
            for (int c = 0; c < width; c++) sum[r][c] += A[r * row + k * col] * load(B + k * ldb + c * LANES);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < width; c++) {
            float *to = C + r * ldc + c * LANES;
            if (add) sum[r][c] += load(to);
            store(to, sum[r][c]);
        }
}

static void multiply(
    long M, long N, long K, const float *A, long row, long col, const float *B, long ldb, float *C, long ldc, int add)
{
    for (long n = 0; n < N; n += 2 * LANES)
        for (long m = 0; m < M; m += TILE_ROWS) {
            const float *a = A + m * row;
            if (N - n >= 2 * LANES) tile(2, K, a, row, col, B + n, ldb, C + m * ldc + n, ldc, add);
            else tile(1, K, a, row, col, B + n, ldb, C + m * ldc + n, ldc, add);
        }
}

/* ---- Attention: softmax(scale q k^T) v ---- */

typedef struct {
    long B, S, R, N, G, D, E;
    long q_row, q_position, q_head, k_row, k_position, k_head, v_row, v_position, v_head; /* strides, last ones are 1 */
    long mask_row, mask_position;
    float scale;
} Attention;

/* [rows, cols] with ``stride`` -> [up to padded_rows, width], times ``scale``, zeros behind. */
static void pack(
    float *to, const float *from, long stride, long rows, long cols, long padded_rows, long width, float scale)
{
    memset(to, 0, padded_rows * width * sizeof(float));
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < cols; c++) to[r * width + c] = from[r * stride + c] * scale;
}

/* The same, each block of BLOCK rows transposed: [blocks, width, BLOCK]. */
static void pack_transposed(float *to, const float *from, long stride, long rows, long cols, long width)
{
    memset(to, 0, round_up(rows, BLOCK) * width * sizeof(float));
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < cols; c++) to[(r / BLOCK * width + c) * BLOCK + r % BLOCK] = from[r * stride + c];
}

/* What the queries from ``query`` on see of the keys from ``key`` on, BLOCK of each: 0 nothing, 1 some, 2 all. */
static int sees(const Attention *a, const uint8_t *mask, long query, long key)
{
    long rows = least(BLOCK, a->S - query), cols = least(BLOCK, a->R - key);
    int any = 0, all = rows == BLOCK && cols == BLOCK;
    if (!mask) return key > query ? 0 : key == query || cols < BLOCK ? 1 : 2;
    for (long r = 0; r < rows && !(any && !all); r++) {
        const uint8_t *row = mask + (query + r) * a->mask_position + key;
        any = any || memchr(row, 1, cols), all = all && !memchr(row, 0, cols);
    }
    return any + all;
}

/* Put ``value`` where query ``query`` does not see one of the ``width`` keys from ``key`` on. */
static inline void hide(
    const Attention *a, const uint8_t *mask, long query, long key, long width, float *row, float value)
{
    long end = least(least(a->R, mask ? a->R : query + 1) - key, width);
    if (end < 0) end = 0;
    if (mask)
        for (long c = 0; c < end; c++)
            if (!mask[query * a->mask_position + key + c]) row[c] = value;
    for (long c = end; c < width; c++) row[c] = value;
}

/* Tasks are (row, query head). Writes out [B, S, N, E] and log_sum [B, N, S]; where a query sees no key they are 0 and
infinite. Returns whether there was memory. */
int attention_forward(
    const Attention *a, const float *q, const float *k, const float *v, const uint8_t *mask, float *out, float *log_sum,
    long first, long last)
{
    long R = round_up(a->R, BLOCK), D = round_up(a->D, LANES), E = round_up(a->E, LANES);
    float *buffer = malloc((R * (D + E) + BLOCK * (D + E + CHUNK)) * sizeof(float));
    if (!buffer) return 0;
    float *keys = buffer, *values = keys + R * D, *queries = values + R * E, *sums = queries + BLOCK * D;
    float *scores = sums + BLOCK * E;
    for (long task = first; task < last; task++) {
        long b = task / a->N, n = task % a->N, g = n / (a->N / a->G);
        const uint8_t *hidden = mask ? mask + b * a->mask_row : 0;
        pack_transposed(keys, k + b * a->k_row + g * a->k_head, a->k_position, a->R, a->D, D);
        pack(values, v + b * a->v_row + g * a->v_head, a->v_position, a->R, a->E, R, E, 1);
        for (long query = 0; query < a->S; query += BLOCK) {
            long rows = least(BLOCK, a->S - query), end = mask ? a->R : least(a->R, query + BLOCK);
            float largest[BLOCK], total[BLOCK];
            for (long r = 0; r < BLOCK; r++) largest[r] = -INFINITY, total[r] = 0;
            const float *q_from = q + b * a->q_row + query * a->q_position + n * a->q_head;
            pack(queries, q_from, a->q_position, rows, a->D, BLOCK, D, a->scale);
            memset(sums, 0, BLOCK * E * sizeof(float));
            for (long key = 0; key < end; key += CHUNK) {
                long width = round_up(least(CHUNK, end - key), BLOCK);
                int any = 0, all = 1;
                for (long c = 0; c < width; c += BLOCK) {
                    int seen = sees(a, hidden, query, key + c);
                    any |= seen, all &= seen == 2;
                    if (seen)
                        multiply(BLOCK, BLOCK, D, queries, D, 1, keys + (key + c) * D, BLOCK, scores + c, CHUNK, 0);
                    else /* hidden below */
                        for (long r = 0; r < BLOCK; r++) memset(scores + r * CHUNK + c, 0, BLOCK * sizeof(float));
                }
                if (!any) continue;
                for (long r = 0; r < rows; r++) {
                    float *row = scores + r * CHUNK;
                    if (!all) hide(a, hidden, query + r, key, width, row, -INFINITY);
                    vec top = splat(largest[r]), sum = splat(0);
                    for (long c = 0; c < width; c += LANES) top = choose(load(row + c) > top, load(row + c), top);
                    float most = top[0];
                    for (int lane = 1; lane < LANES; lane++) most = top[lane] > most ? top[lane] : most;
                    float base = most == -INFINITY ? 0 : most; /* nothing seen yet: all of exp(-inf) are 0 */
                    for (long c = 0; c < width; c += LANES) {
                        vec p = vector_exp(load(row + c) - base);
                        store(row + c, p);
                        sum += p;
                    }
                    float shrink = total[r] ? expf(largest[r] - base) : 1;
                    total[r] = total[r] * shrink + sum_lanes(sum), largest[r] = most;
                    float *sum_to = sums + r * E;
                    for (long c = 0; shrink != 1 && c < E; c += LANES) store(sum_to + c, load(sum_to + c) * shrink);
                }
                multiply(round_up(rows, TILE_ROWS), E, width, scores, CHUNK, 1, values + key * E, E, sums, E, 1);
            }
            for (long r = 0; r < rows; r++) {
                float *to = out + ((b * a->S + query + r) * a->N + n) * a->E, factor = total[r] == 0 ? 0 : 1 / total[r];
                for (long c = 0; c < a->E; c++) to[c] = sums[r * E + c] * factor;
                log_sum[(b * a->N + n) * a->S + query + r] = total[r] == 0 ? INFINITY : largest[r] + logf(total[r]);
            }
        }
    }
    free(buffer);
    return 1;
}

/* Tasks are (row, key head). grad and out [B, S, N, E]; writes dq [B, S, N, D], dk [B, R, G, D] and dv [B, R, G, E].
Probabilities are computed again from ``log_sum`` (arXiv 2205.14135, algorithm 4). Returns whether there was memory. */
int attention_backward(
    const Attention *a, const float *q, const float *k, const float *v, const uint8_t *mask, const float *out,
    const float *log_sum, const float *grad, float *dq, float *dk, float *dv, long first, long last)
{
    long S = round_up(a->S, BLOCK), R = round_up(a->R, BLOCK), D = round_up(a->D, LANES), E = round_up(a->E, LANES);
    float *buffer = malloc((R * (3 * D + 2 * E) + S * (2 * D + E + 2) + 2 * BLOCK * BLOCK) * sizeof(float));
    if (!buffer) return 0;
    float *keys_t = buffer, *keys = keys_t + R * D, *dkeys = keys + R * D, *values_t = dkeys + R * D;
    float *dvalues = values_t + R * E, *queries = dvalues + R * E, *dqueries = queries + S * D;
    float *grads = dqueries + S * D, *logs = grads + S * E, *delta = logs + S, *p = delta + S, *ds = p + BLOCK * BLOCK;
    for (long task = first; task < last; task++) {
        long b = task / a->G, g = task % a->G, group = a->N / a->G;
        const uint8_t *hidden = mask ? mask + b * a->mask_row : 0;
        const float *k_from = k + b * a->k_row + g * a->k_head;
        pack_transposed(keys_t, k_from, a->k_position, a->R, a->D, D);
        pack(keys, k_from, a->k_position, a->R, a->D, R, D, 1);
        pack_transposed(values_t, v + b * a->v_row + g * a->v_head, a->v_position, a->R, a->E, E);
        memset(dkeys, 0, R * D * sizeof(float)), memset(dvalues, 0, R * E * sizeof(float));
        for (long n = g * group; n < (g + 1) * group; n++) {
            pack(queries, q + b * a->q_row + n * a->q_head, a->q_position, a->S, a->D, S, D, a->scale);
            pack(grads, grad + (b * a->S * a->N + n) * a->E, a->N * a->E, a->S, a->E, S, E, 1);
            memset(dqueries, 0, S * D * sizeof(float));
            for (long r = 0; r < S; r++) {
                const float *result = out + ((b * a->S + r) * a->N + n) * a->E;
                float sum = 0;
                for (long c = 0; r < a->S && c < a->E; c++) sum += grads[r * E + c] * result[c];
                delta[r] = sum, logs[r] = r < a->S ? log_sum[(b * a->N + n) * a->S + r] : INFINITY;
            }
            for (long key = 0; key < a->R; key += BLOCK)
                for (long query = mask ? 0 : key; query < a->S; query += BLOCK) {
                    int seen = sees(a, hidden, query, key);
                    if (!seen) continue;
                    multiply(BLOCK, BLOCK, D, queries + query * D, D, 1, keys_t + key * D, BLOCK, p, BLOCK, 0);
                    for (long r = 0; r < BLOCK; r++) {
                        float *row = p + r * BLOCK;
                        for (long c = 0; c < BLOCK; c += LANES)
                            store(row + c, vector_exp(load(row + c) - logs[query + r]));
                        if (seen != 2 && query + r < a->S) hide(a, hidden, query + r, key, BLOCK, row, 0);
                    }
                    multiply(BLOCK, E, BLOCK, p, 1, BLOCK, grads + query * E, E, dvalues + key * E, E, 1);
                    multiply(BLOCK, BLOCK, E, grads + query * E, E, 1, values_t + key * E, BLOCK, ds, BLOCK, 0);
                    for (long r = 0; r < BLOCK; r++)
                        for (long c = r * BLOCK; c < (r + 1) * BLOCK; c += LANES)
                            store(ds + c, (load(ds + c) - delta[query + r]) * load(p + c));
                    multiply(BLOCK, D, BLOCK, ds, BLOCK, 1, keys + key * D, D, dqueries + query * D, D, 1);
                    multiply(BLOCK, D, BLOCK, ds, 1, BLOCK, queries + query * D, D, dkeys + key * D, D, 1);
                }
            for (long r = 0; r < a->S; r++) {
                float *to = dq + ((b * a->S + r) * a->N + n) * a->D;
                for (long c = 0; c < a->D; c++) to[c] = dqueries[r * D + c] * a->scale;
            }
        }
        for (long r = 0; r < a->R; r++) {
            memcpy(dk + ((b * a->R + r) * a->G + g) * a->D, dkeys + r * D, a->D * sizeof(float));
            memcpy(dv + ((b * a->R + r) * a->G + g) * a->E, dvalues + r * E, a->E * sizeof(float));
        }
    }
    free(buffer);
    return 1;
}
