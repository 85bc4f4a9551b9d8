#!/usr/bin/env bash
# Weights saved twice into a folder by torch's writer of safetensors come back as the first ones, whatever the index says.
#
# guess: HuggingFaceStorageReader opens the files that model.safetensors.index.json names, as transformers does.
# behaviour: It reads every *.safetensors of the folder in the order in which the file system lists them; of a tensor
#   that several hold, the last one counts. HuggingFaceStorageWriter leaves files of an earlier save with another
#   number of files where they are, and writes an index that names only its own.
# versions: torch 2.13.0, safetensors 0.8.0; a file system that lists by hash (ext4)
# seen (2026-11-30): of 20 pairs of numbers of files, from 1 to 5
#   tensors of the first save after the second: in 16 pairs
#   by the index all are of the second save: True
# consequence: A folder 'latest' that is exported to with more files, or fewer, than before goes on from the old step,
#   or from some tensors of each, without a word; the same files read by transformers are right.
# automoe: reads what the index names, refuses a tensor in two files that no index decides, and writes an export into
#   a new folder before it takes the old one's place
#   (tests/hf/test_hf_reader.py::test_of_a_tensor_in_two_files_the_one_that_the_index_names_counts).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'safetensors==0.8.0'
cat > check.py <<'PY'
import json
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

NAMES = [f"layer{number}.weight" for number in range(10)]


def save(folder: Path, value: float, files: int) -> None:
    placed = {name: 1 + number % files for number, name in enumerate(NAMES)}
    tensors = {name: torch.full((2, 2), value) for name in NAMES}
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), placed))


stale = 0
right = True
pairs = list(permutations(range(1, 6), 2))
for first, second in pairs:
    folder = Path(f"{first}-then-{second}")
    save(folder, 1.0, first)
    save(folder, 2.0, second)
    read = {name: torch.zeros(2, 2) for name in NAMES}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(folder)))
    stale += any(tensor[0, 0] == 1.0 for tensor in read.values())
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    right &= all(load_file(folder / file)[name][0, 0] == 2.0 for name, file in index.items())
print(f"of {len(pairs)} pairs of numbers of files, from 1 to 5")
print(f"tensors of the first save after the second: in {stale} pairs")
print(f"by the index all are of the second save: {right}")
assert stale > 0 and right
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
