#!/usr/bin/env bash
# Rows made into a table keep the keys of the first row alone.
#
# guess: Table.from_pylist and Dataset.from_list take the union of all keys and fill what is missing with
#   null, as they do inside nested records.
# behaviour: Columns are the keys of the first row: a key that appears later is dropped without a message. One
#   level deeper, in a list of messages, the union is taken.
# versions: pyarrow 26.0.1, datasets 5.2.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   pyarrow: {'text': 'b'}
#   datasets: {'text': 'b'}
#   nested, pyarrow: {'messages': [{'role': 'user', 'tools': 'search'}]}
# consequence: Conversations of which only some have tools, a weight or a system prompt lose them all if the
#   first has none; in the other order they are kept.
# automoe: reads JSON lines and parquet row by row
#   (tests/data/test_chat.py::test_parquet_gives_what_json_lines_give); what was lost before the file was
#   written it cannot know.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'pyarrow==26.0.1' 'datasets==5.2.0'
cat > check.py <<'PY'
import datasets
import pyarrow

rows = [{"text": "a"}, {"text": "b", "tools": "search"}]
nested = [{"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "tools": "search"}]}]
table = pyarrow.Table.from_pylist(rows).to_pylist()[1]
data_set = datasets.Dataset.from_list(rows)[1]
inside = pyarrow.Table.from_pylist(nested).to_pylist()[1]
turned = pyarrow.Table.from_pylist(rows[::-1]).to_pylist()[0]
print("pyarrow:", table)
print("datasets:", data_set)
print("nested, pyarrow:", inside)
assert table == data_set == {"text": "b"} and turned == rows[1] and inside == nested[1]
PY
HF_HUB_OFFLINE=1 venv/bin/python -W ignore check.py
