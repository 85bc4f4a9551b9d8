#!/usr/bin/env bash
# torch.sort of expert ids on a CPU keeps the order of equal ids up to 16 ids and from about 33,000 on, not between.
#
# guess: without stable=True nothing is promised, but the CPU's sort keeps ties in order, so code that sorts tokens by
#   expert and then drops the last ones of an expert, or compares with another rank, is right there.
# behaviour: without stable=True a sort of 17 to 32,767 numbers shuffles ties (always the same way); short ones do not show
#   it, and neither do integers from 32,768 on, which are sorted by digits. Floats stay shuffled. argsort is the same.
# versions: torch 2.13.0
# seen (2026-11-29): ids of 8 experts
#   ids        int64, ties in order    float32, ties in order
#       16     True                    True
#       17     False                   False
#      512     False                   False
#    32767     False                   False
#    32768     True                    False
#   512 tokens, the first 60 of each of 8 experts stay: 42 dropped, 36 of them others than the latest
# consequence: A test with a few tokens passes, a batch drops other tokens than the latest. Rows of an expert are added up
#   in another order, so one more token changes the last bits of every gradient. transformers' grouped_mm experts sort so.
# automoe: sorts with stable=True wherever the order counts (automoe/moe/dispatch/base.py, moe/capacity.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)


def in_order(ids):
    order = torch.sort(ids).indices
    return torch.equal(order, torch.sort(ids, stable=True).indices)


print("ids        int64, ties in order    float32, ties in order")
seen = []
for number in (16, 17, 512, 32767, 32768):
    ids = torch.randint(0, 8, (number,), generator=generator)
    seen.append((in_order(ids), in_order(ids.float())))
    print(f"{number:8}   {seen[-1][0]!s:21}   {seen[-1][1]}")
assert seen == [(True, True), (False, False), (False, False), (False, False), (True, False)]

ids = torch.randint(0, 8, (512,), generator=generator)


def dropped(stable):
    """The tokens beyond the first 60 of each expert, in the order of the sort."""
    order = torch.sort(ids, stable=stable).indices
    return {token for expert in range(8) for token in order[ids[order] == expert][60:].tolist()}


others = dropped(False) - dropped(True)
print(f"512 tokens, the first 60 of each of 8 experts stay: {len(dropped(True))} dropped, {len(others)} of them others than the latest")
assert others
PY
venv/bin/python -W ignore check.py
