"""Mistakes in exports in 4 bits, in extensions to longer rows and in rings; see ``mutants.py``."""

from __future__ import annotations

from mutant import Mutant

MXFP4, INT4 = ["tests/hf/test_mxfp4_export.py"], ["tests/hf/test_int4.py"]
EXTENSION = ["tests/hf/test_extension.py"]
RING = ["tests/parallel/test_ring.py"]

_ROWS = [
    ("hf/quantized.py", "amax.frexp().exponent - 3)", "amax.frexp().exponent - 2)", MXFP4),
    ("hf/quantized.py", ".masked_fill(amax == 0, 0)", "", MXFP4),
    ("hf/quantized.py", "_BORDERS[::2] = _BORDERS[::2]", "_BORDERS[1::2] = _BORDERS[1::2]", MXFP4),
    ("hf/quantized.py", " | scaled.signbit().to(torch.uint8) << 3", "", MXFP4),
    ("hf/quantized.py", ".masked_fill(~amax.isfinite(), 255)", "", MXFP4),
    ("hf/quantized.py", "torch.where(same, old_scales, scales)", "scales", MXFP4),
    ("hf/quantized.py", "dequantize(old, old_scales).to(matrix.dtype)", "dequantize(old, old_scales)", INT4),
    ("hf/quantized.py", "amax(-1) / 7.5)", "amax(-1) / 7)", INT4),
    ("hf/quantized.py", ".round().clamp(-8, 7)", ".round().clamp(-7, 7)", INT4),
    ("hf/save_plan.py", "_square(decoded.sub_(wanted))", "_square(decoded)", MXFP4),
    ("hf/save_plan.py", "if not torch.equal(decoded.to(found.dtype), found):", "if False:", MXFP4),
    ("hf/keys.py", "getattr(config, key)) % GROUP", "getattr(config, key)) % 16", MXFP4),
    ("hf/keys.py", "if config.family != publisher:", "if False:", INT4),
    ("hf/families/family.py", "None if config.rope.extends else hf", "hf", EXTENSION),
    ("launch/prepare.py", "2 * original <= 2 * longest", "2 * original", EXTENSION),
    ("launch/prepare.py", '("theta", "interleaved"', '("interleaved"', EXTENSION),
    ("launch/prepare.py", "not asked.factor * original > longest", "not asked.factor > 1", EXTENSION),
    ("parallel/ring.py", "if theirs <= own and", "if theirs < own and", RING),
    ("parallel/ring.py", "((1, last - source), (0, source))", "((0, source), (1, last - source))", RING),
    ("parallel/ring.py", "mask & same", "same", RING),
    ("parallel/ring.py", "part * (part_lse - total)", "part * (total - part_lse)", RING),
    ("parallel/ring.py", "(rank - step) % num_ranks, kv", "(rank + step) % num_ranks, kv", RING),
    ("parallel/ring.py", "unflatten(2, (kv.shape[2], -1)).sum(3)", "unflatten(2, (-1, kv.shape[2])).sum(2)", RING),
    ("interop/torch_private.py", "lse.masked_fill(~mask.any(-1), -torch.inf)", "lse", RING),
]
EXPORTS = [Mutant(f"automoe/{file}", *rest) for file, *rest in _ROWS]
