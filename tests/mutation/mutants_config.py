"""Mistakes in the configuration's arithmetic; see ``mutants.py``."""

from __future__ import annotations

from mutant import Mutant

LAYOUT, MASKS = ["tests/config/test_layout.py"], ["tests/model/test_attention_masks.py"]
WGRAD = ["tests/config/test_validate.py"]

_ROWS = [
    ("batch.py", "consumed_rows * ((rows - start)", "consumed_rows * ((rows + start)", ["tests/config/test_batch.py"]),
    (
        "pipeline.py",
        "pp - 1 - place if schedule in V_SHAPED",
        "place if schedule in V_SHAPED",
        ["tests/config/test_pipeline.py"],
    ),
    ("layout.py", 'stage.count("t")', "len(stage)", LAYOUT),
    ("layout.py", "last[-1] *= times", "last[-1] *= times + 1", LAYOUT),
    ("layout.py", "len(sizes) // pp", "len(sizes) - pp", LAYOUT),
    ("validate.py", "not any(full[stage] for stage in own)", "not all(full[stage] for stage in own)", LAYOUT),
    ("validate.py", 'chosen == "delayed" and not parallel.overlap_all_to_all', 'chosen == "delayed"', WGRAD),
    ("validate.py", 'config.lora.rank > 0, f"adapters', 'config.lora.rank > 8, f"adapters', WGRAD),
    ("context.py", "2 * num_ranks - rank)", "2 * num_ranks)", MASKS),
    ("context.py", "- window + 1, 0) if window", "- window + 2, 0) if window", MASKS),
]
CONFIG = [Mutant(f"automoe/config/{file}", *rest) for file, *rest in _ROWS]
