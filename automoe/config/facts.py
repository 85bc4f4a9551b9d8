"""Constants shared by trainer, configuration rules and planner: element, block and buffer sizes. No torch."""

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # by ``train.dtype``
BLOCK = 128  # rows and columns of a weight under one 8-bit scale
# Formats of ``lora.base``: the numbers of a row that share a scale, and the bytes of their codes
# and scale (automoe.quantize.packed).
BASE_BLOCKS = {"fp8": (BLOCK, BLOCK + 4), "nf4": (64, 36)}
ROW_BYTES = 16  # grouped products need rows of a multiple of this
SENDS_KEPT = 2  # sends in flight per pipeline stage and direction
MUON_ROUND = 1 << 24  # elements per rank that Muon orthogonalises at once; bounds scratch memory
MUON_STEPS = 5  # of the iteration that orthogonalises
SAVES = "checkpoint"  # description of the process group over which saves and loads communicate
