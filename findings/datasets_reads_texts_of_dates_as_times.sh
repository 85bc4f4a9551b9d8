#!/usr/bin/env bash
# A JSON column whose texts all look like dates is read as times.
#
# guess: JSON has no dates: what stands in quotes is a string, and the column is one of strings.
# behaviour: The type of a column is inferred from its values. Texts in the form of ISO 8601 become a timestamp,
#   and a row that is turned into text again has another text. One answer of another form makes the whole
#   column strings.
# versions: pyarrow 26.0.1, datasets 5.2.0; Python 3.11, on a CPU
# seen (2026-11-29):
#   pyarrow: timestamp[s] 2024-05-01 00:00:00
#   datasets: timestamp[s] 2024-05-01 00:00:00
#   with one more answer, datasets: string 2024-05-01
# consequence: A set of questions about dates (or one shard of it) is trained and scored on answers that nobody
#   wrote; a template prints them without complaint, and an exact match with the right answer is wrong.
# automoe: reads JSON lines with Python's json, row by row
#   (tests/data/test_corpora.py::test_texts_that_look_like_dates_stay_as_they_are).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'pyarrow==26.0.1' 'datasets==5.2.0'
cat > check.py <<'PY'
import json
from pathlib import Path

import datasets
import pyarrow.json


def written(name, answers):
    path = Path(name)
    path.write_text("".join(json.dumps({"question": "When?", "answer": answer}) + "\n" for answer in answers))
    return str(path)


def loaded(path):
    return datasets.load_dataset("json", data_files=path, split="train", cache_dir=path + ".cache")


dates = written("dates.jsonl", ["2024-05-01", "2024-05-01 10:30:00"])
mixed = written("mixed.jsonl", ["2024-05-01", "in May"])
table, data_set, other = pyarrow.json.read_json(dates), loaded(dates), loaded(mixed)
print("pyarrow:", table.schema.field("answer").type, table["answer"][0])
print("datasets:", data_set.features["answer"].dtype, data_set[0]["answer"])
print("with one more answer, datasets:", other.features["answer"].dtype, other[0]["answer"])
assert data_set.features["answer"].dtype == "timestamp[s]" and str(data_set[0]["answer"]) == "2024-05-01 00:00:00"
assert str(table["answer"][0]) == "2024-05-01 00:00:00" and other[0]["answer"] == "2024-05-01"
PY
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python -W ignore check.py
