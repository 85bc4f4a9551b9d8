#!/usr/bin/env bash
# datasets gives the rows of an older file and of older code, after both have changed.
#
# guess: Dataset.from_generator runs its generator in every process, and so reads a file that has changed; map runs
#   again when the code that it calls has changed, because its cache is named by a hash of the function.
# behaviour: from_generator's cache is named by the generator's code and arguments, not by what it reads. The hash of a
#   function has its own code; of an imported function or module it has the name alone, so a change in the module is not
#   seen: not by map(helper.f), nor by a lambda that calls it. Both take the cached rows of the first run.
# versions: datasets 5.2.0 (4.7.0 is the same), pyarrow 26.0.1; Python 3.11
# seen (2026-11-30): a process, and one after d.txt and helper.py have changed
#   from_generator ['a', 'b'], map of helper.f [1, 2, 3], of a lambda [1, 2, 3]
#   from_generator ['a', 'b'], map of helper.f [1, 2, 3], of a lambda [1, 2, 3], right would be ['c', 'd'] and [100, 101, 102]
# consequence: Who corrects the chat template or the filter in data.py and starts train.py again trains on the tokens of
#   the faulty one, and the experiment says that the correction makes no difference.
# automoe: names its caches by the data's files, the tokenizer and the whole file of a reader from outside, and states that
#   what this file imports is not seen (docs/extend.md, tests/data/test_cache_key.py::test_the_code_of_a_reader_from_outside).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'datasets==5.2.0' 'pyarrow==26.0.1'
cat > check.py <<'PY'
import os
import subprocess
import sys
from pathlib import Path

USER = '''
import datasets
import helper

datasets.disable_progress_bars()


def lines():
    for line in open("d.txt"):
        yield {"text": line.strip()}


rows = datasets.Dataset.from_generator(lines)["text"][:]
numbers = datasets.load_from_disk("numbers")
named = numbers.map(helper.f)["y"][:]
called = numbers.map(lambda row: helper.f(row))["y"][:]
print((rows, named, called))
'''


def run(lines, summand):
    Path("d.txt").write_text(lines)
    Path("helper.py").write_text(f"def f(row):\n    return {{'y': row['x'] + {summand}}}\n")
    command = [sys.executable, "-B", "-W", "ignore", "user.py"]
    return eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


os.environ["HF_HOME"] = str(Path("cache").absolute())
os.environ["HF_HUB_OFFLINE"] = "1"
Path("user.py").write_text(USER)
import datasets

datasets.disable_progress_bars()
datasets.Dataset.from_list([{"x": x} for x in range(3)]).save_to_disk("numbers")
first = run("a\nb\n", 1)
second = run("c\nd\n", 100)
for (rows, named, called), right in ((first, ""), (second, ", right would be ['c', 'd'] and [100, 101, 102]")):
    print(f"from_generator {rows}, map of helper.f {named}, of a lambda {called}{right}")
assert first == (["a", "b"], [1, 2, 3], [1, 2, 3]) and second == first
PY
venv/bin/python -W ignore check.py
