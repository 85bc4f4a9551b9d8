#!/usr/bin/env bash
# One call with truncation changes what tokenizer.json says, and other readers of the file cut every text.
#
# guess: truncation and padding of a call belong to the call; save_pretrained writes the tokenizer as it was loaded.
# behaviour: the call sets both in the tokenizer underneath, and save_pretrained writes what was set last. AutoTokenizer
#   resets them in each call and shows nothing. tokenizers.Tokenizer.from_file, which servers and data tools use, obeys:
#   it cuts all texts at max_length and pads short ones, without an error.
# versions: transformers 5.24.0, tokenizers 0.23.3; Python 3.11
# seen (2026-11-30): tokens of a text of 41 tokens, and of one of 1
#   saved before the call: AutoTokenizer 41 and 1, Tokenizer.from_file 41 and 1
#   saved after the call:  AutoTokenizer 41 and 1, Tokenizer.from_file 8 and 8
# consequence: A tokenizer that was saved beside a finetuned model, after a smoke test with max_length=8, cuts prompts
#   and training documents to eight tokens wherever transformers is not the reader.
# automoe: switches both off when it reads a tokenizer
#   (tests/data/test_data_tokenizer.py::test_saved_truncation_and_padding_are_switched_off).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'transformers==5.24.0' 'tokenizers==0.23.3'
cat > check.py <<'PY'
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

transformers.logging.set_verbosity_error()
text, word = "hello world of tokens " * 10, "hello"
backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel()
backend.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>"], show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
tokenizer.save_pretrained("before")
tokenizer(text, truncation=True, padding="max_length", max_length=8)
tokenizer.save_pretrained("after")
counts = {}
for folder in ("before", "after"):
    auto, raw = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(f"{folder}/tokenizer.json")
    counts[folder] = [(len(auto(t).input_ids), len(raw.encode(t).ids)) for t in (text, word)]
    (a, b), (c, d) = counts[folder]
    print(f"{f'saved {folder} the call:':22} AutoTokenizer {a} and {c}, Tokenizer.from_file {b} and {d}")
(a, b), (c, d) = counts["before"]
assert a == b > 30 and c == d < 8
assert counts["after"] == [(a, 8), (c, 8)]
PY
HF_HUB_OFFLINE=1 venv/bin/python -W ignore check.py
