"""Mistakes in the data layer; see ``mutants.py``."""

from __future__ import annotations

from mutant import Mutant, loop

LLAMA, QWEN = loop("llama"), loop("qwen3_moe")
PACKING, SAMPLES = ["tests/data/test_packing.py"], ["tests/data/test_sample_rows.py"]
LOADER = ["tests/data/test_data_loader.py", "tests/data/test_token_cache.py"]
CHAT, CHAT_DATA = ["tests/data/test_chat_template.py"], ["tests/data/test_chat.py"]
CHAT_SAID, CORPORA = ["tests/data/test_chat_warnings.py"], ["tests/data/test_corpora.py"]

_ROWS = [
    ("packing.py", "doc[:, 1:] == doc[:, :-1]", "doc[:, 1:] >= doc[:, :-1]", LLAMA),
    ("packing.py", "np.arange(S + 1)", "np.arange(1, S + 2)", PACKING),
    ("packing.py", "np.maximum(doc_start, row_start)", "doc_start", PACKING),
    (
        "packing.py",
        "doc_order = seeded_order(len(self.lengths), self.seed, epoch",
        "doc_order = seeded_order(len(self.lengths), self.seed, 0",
        LLAMA,
    ),
    (
        "packing.py",
        "row_order = seeded_order(self.num_rows, self.seed, epoch, 1)",
        "row_order = seeded_order(self.num_rows, self.seed, epoch, 0)",
        LLAMA,
    ),
    (
        "packing.py",
        "room = length + (enough & -enough).bit_length() - 1",
        "room = length + enough.bit_length() - 2",
        SAMPLES,
    ),
    ("packing.py", "self.trained[start + 1 : start + length]", "self.trained[start : start + length - 1]", SAMPLES),
    (
        "packing.py",
        "rows.positions[row, here] = np.arange(length)",
        "rows.positions[row, here] = place + np.arange(length)",
        SAMPLES,
    ),
    ("packing.py", "rows.doc_ids[row, here] = number", "rows.doc_ids[row, here] = 0", SAMPLES),
    ("turns.py", "turn.ids[: len(ids)] != ids", "False", CHAT),
    ("chat_template.py", "if behind[end] == closing:", "if False:", CHAT),
    ("chat_template.py", "if start < len(prompt):", "False", CHAT),
    ("chat_render.py", 'if not message["content"]:', "if False:", CHAT),
    ("chat_template.py", "first = max(1, conversation.prompt)", "first = 1", CHAT_SAID),
    ("chat_corpus.py", "trained[start:end] = True", "trained[start : end - 1] = True", CHAT_DATA),
    ("packing.py", "-(-self.num_tokens // self.seq_len)", "self.num_tokens // self.seq_len", LLAMA),
    ("packing.py", "np.where(real, doc_ids, -1)", "np.where(real, doc_ids, 0)", QWEN),
    ("packing.py", "indices[chosen] % self.num_rows", "indices[chosen] // self.num_rows", PACKING),
    (
        "loader.py",
        "first = consumed_rows + self.dp_rank * rows_per_rank",
        "first = consumed_rows + self.dp_rank",
        LOADER,
    ),
    ("loader.py", "self.consumed_rows += self.rows_of_last_step", "self.consumed_rows += self.rows_per_rank", LOADER),
    (
        "prepare.py",
        'config.train.seed if split == "train" else 0',
        'config.train.seed if split == "train" else 1',
        LLAMA,
    ),
    ("loader.py", "min(n * step, packed.num_rows)", "min(step, packed.num_rows)", LLAMA),
    ("loader.py", "np.where(indices < packed.num_rows, indices, -1)", "indices", LLAMA),
    ("loader.py", 'arrays["labels"][arrays["labels"] != IGNORE]', 'arrays["tokens"]', LLAMA),
    ("prepare.py", "/ 2.0**64 < val_fraction", "/ 2.0**63 < val_fraction", LLAMA),
    ("prepare.py", 'if split == "validation" else ~validation', 'if split == "train" else ~validation', LLAMA),
    ("tokenise.py", "self.end(length, text_hash", "self.end(length - 1, text_hash", LLAMA),
    ("tokenizer.py", "[1] * 256 + [0, 0]", "[1] * 256 + [1, 0]", LLAMA),
    ("tokenizer.py", "BYTE_VOCAB_SIZE, 256, 257", "BYTE_VOCAB_SIZE, 255, 257", LLAMA),
    ("corpora.py", "left -= len(raw)", "left -= len(text)", CORPORA),
]
DATA = [Mutant(f"automoe/data/{file}", *rest) for file, *rest in _ROWS]
