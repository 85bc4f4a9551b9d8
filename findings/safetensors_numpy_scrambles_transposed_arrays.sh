#!/usr/bin/env bash
# safetensors.numpy writes a transposed or strided array with its numbers in another order.
#
# guess: save_file of a transposed array reads back equal: what is not contiguous is copied, or refused as in
#   safetensors.torch.
# behaviour: the bytes of the array's memory go into the file under the shape of the view. A transposed matrix, a matrix
#   in Fortran's order and every second column come back with the right shape and dtype and the wrong numbers; save does
#   the same. safetensors.torch refuses such a tensor.
# versions: safetensors 0.8.0, numpy 2.4.6; Python 3.11
# seen (2026-11-30):
#   transposed        [[0, 3], [1, 4], [2, 5]]    reads back as  [[0, 1], [2, 3], [4, 5]]
#   order of Fortran  [[0, 1, 2], [3, 4, 5]]      reads back as  [[0, 3, 1], [4, 2, 5]]
#   every second      [[0, 2], [3, 5]]            reads back as  [[0, 1], [2, 3]]
#   contiguous copy   [[0, 3], [1, 4], [2, 5]]    reads back as  [[0, 3], [1, 4], [2, 5]]
# consequence: A converter in numpy that turns [in, out] weights (of JAX, of GPT-OSS's experts) or cuts gate and up out
#   of one array writes a checkpoint that loads without a word, and whose weights are shuffled.
# automoe: reads and writes tensors with its own code and with safetensors.torch, contiguous before their bytes are
#   taken (automoe/hf/files.py, automoe/hf/peft.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'numpy==2.4.6' 'safetensors==0.8.0'
cat > check.py <<'PY'
import numpy as np
from safetensors.numpy import load, load_file, save, save_file

a = np.arange(6, dtype=np.float32).reshape(2, 3)
arrays = {
    "transposed": a.T,
    "order of Fortran": np.asfortranarray(a),
    "every second": a[:, ::2],
    "contiguous copy": np.ascontiguousarray(a.T),
}
for name, array in arrays.items():
    save_file({"w": array}, "one.safetensors")
    back = load_file("one.safetensors")["w"]
    print(f"{name:16}  {str(array.astype(int).tolist()):26}  reads back as  {back.astype(int).tolist()}")
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert np.array_equal(back, array) == (name == "contiguous copy")
    assert np.array_equal(load(save({"w": array}))["w"], back)
PY
venv/bin/python -W ignore check.py
