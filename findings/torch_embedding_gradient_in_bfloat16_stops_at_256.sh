#!/usr/bin/env bash
# The gradient of a bfloat16 embedding stops at 256 occurrences of a token on a CPU.
#
# guess: the gradient of a row that is looked up a thousand times is summed in float32, as sums, products and index_add_
#   are.
# behaviour: the backward passes of F.embedding and of indexing (x[ids]), and index_put_ with accumulate, add one term
#   after the other in bfloat16: a thousand ones are 256. index_add_, scatter_add_, sum and expand's backward give
#   1,000.
# versions: torch 2.13.0 (2.15.0 is the same); Python 3.11, on a CPU
# seen (2026-11-30): a thousand times the gradient 1, in float32 and in bfloat16
#   embedding's backward   1000  256
#   indexing's backward    1000  256
#   index_put_             1000  256
#   index_add_             1000  1000
#   scatter_add_           1000  1000
#   expand's backward      1000  1000
# consequence: Frequent tokens (spaces, line breaks, padding) get a fraction of their gradient in a batch of some
#   thousand tokens, rare ones all of it. Tests on CPUs that compare a bfloat16 step with a GPU's blame something else.
# automoe: sums an embedding's gradient in float32 on CPUs too
#   (tests/model/test_embedding.py::test_a_frequent_token_is_summed_in_float32).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch

ids = torch.zeros(1000, dtype=torch.long)


def gradient(dtype, use):
    w = torch.zeros(4, 2, dtype=dtype, requires_grad=True)
    use(w).sum().backward()
    return w.grad[0, 0].item()


def added(dtype, add):
    return add(torch.zeros(4, 2, dtype=dtype), torch.ones(1000, 2, dtype=dtype))[0, 0].item()


ways = {
    "embedding's backward": lambda dtype: gradient(dtype, lambda w: torch.nn.functional.embedding(ids, w)),
    "indexing's backward": lambda dtype: gradient(dtype, lambda w: w[ids]),
    "index_put_": lambda dtype: added(dtype, lambda w, ones: w.index_put_((ids,), ones, accumulate=True)),
    "index_add_": lambda dtype: added(dtype, lambda w, ones: w.index_add_(0, ids, ones)),
    "scatter_add_": lambda dtype: added(dtype, lambda w, ones: w.scatter_add_(0, ids[:, None].expand(-1, 2), ones)),
    "expand's backward": lambda dtype: gradient(dtype, lambda w: w[:1].expand(1000, 2)),
}
for place, (name, way) in enumerate(ways.items()):
    wide, narrow = way(torch.float32), way(torch.bfloat16)
    print(f"{name:21}  {wide:.0f}  {narrow:.0f}")
    assert (wide, narrow) == (1000, 256 if place < 3 else 1000)
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
