#!/usr/bin/env bash
# torch's reader of quantized checkpoints returns FP8 codes as weights if the scales have llm-compressor's name.
#
# guess: QuantizedHuggingFaceStorageReader reads quantization_config, or at least refuses a float8 tensor whose scales
#   it does not find.
# behaviour: It reads no config.json. Scales are tensors named *.weight_scale_inv, in blocks of 128 unless its argument
#   block_size says otherwise. With *.weight_scale (llm-compressor, by row or by block) the codes, up to 448, are copied
#   into the model; with smaller blocks each scale serves a block of 128. Nothing is said in either case.
# versions: torch 2.13.0, safetensors 0.8.0
# seen (2026-11-30): of a matrix whose largest weight is 0.091, after dcp.load
#   weight_scale_inv, blocks of 128   largest  0.0913   relative error 0.026
#   weight_scale_inv, blocks of 64    largest  0.0869   relative error 0.11
#   weight_scale_inv, blocks of 32    largest  0.0762   relative error 0.15
#   weight_scale, blocks of 128       largest     448   relative error 5.2e+03
#   weight_scale, a row each          largest     448   relative error 7.5e+03
# consequence: A continued training starts from noise, which the first loss shows. With blocks of 64 or 32 it starts
#   from weights that are off by a tenth, which looks like the price of eight bits.
# automoe: reads weight_block_size and both names, and refuses codes without scales
#   (tests/hf/test_hf_quantized.py, tests/interop/test_foreign_writers.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'safetensors==0.8.0'
cat > check.py <<'PY'
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader

torch.manual_seed(0)
weights = torch.randn(256, 256) / 50


def error_of(suffix: str, rows: int, columns: int) -> float:
    blocks = weights.view(256 // rows, rows, 256 // columns, columns)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view(256, 256).to(torch.float8_e4m3fn)
    folder = Path(f"{suffix}-{rows}-{columns}")
    folder.mkdir()
    tensors = {"a.weight": codes, f"a.{suffix}": scales}
    save_file(tensors, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [rows, columns]}}
    (folder / "config.json").write_text(json.dumps(config))
    read = {"a.weight": torch.zeros(256, 256)}
    dcp.load(read, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)))
    error = ((read["a.weight"] - weights).norm() / weights.norm()).item()
    which = "a row each" if rows == 1 else f"blocks of {rows}"
    print(f"{suffix + ', ' + which:33} largest {read['a.weight'].abs().max().item():7.3g}   relative error {error:.2g}")
    return error


assert error_of("weight_scale_inv", 128, 128) < 0.03
assert error_of("weight_scale_inv", 64, 64) > 0.09
assert error_of("weight_scale_inv", 32, 32) > 0.12
assert error_of("weight_scale", 128, 128) > 1000
assert error_of("weight_scale", 1, 256) > 1000
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
