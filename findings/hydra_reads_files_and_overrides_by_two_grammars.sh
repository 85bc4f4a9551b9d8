#!/usr/bin/env bash
# The same characters mean one value in a file of Hydra and another one on its command line.
#
# guess: An override key=value gives what `key: value` in the YAML file gives.
# behaviour: Files are YAML 1.1, overrides have a grammar of their own. off is False in the file and the text
#   'off', which is true, in an override; 12:00:00 is 43200 in the file and text in an override; 010 is 8 and
#   text; 0x10 is 16 and text.
# versions: hydra-core 1.3.8, omegaconf 2.3.1; Python 3.11, on a CPU
# seen (2026-11-28):
#   file: {'flag': False, 'wall': 43200, 'seed': 8, 'mask': 16}
#   override: {'flag': 'off', 'wall': '12:00:00', 'seed': '010', 'mask': '0x10'}
# consequence: In a configuration without types flag=off turns something on, and a time limit written into a
#   file reaches Slurm as 43,200 minutes: 30 days.
# automoe: every key has a type: train.seed=010 and observe.tensorboard=off on the command line are refused by
#   name, with exit status 2
#   (tests/config/test_compose.py::test_a_wrong_override_names_key_value_and_the_nearest_choice, for other keys).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'hydra-core==1.3.8' 'omegaconf==2.3.1'
cat > check.py <<'PY'
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

Path("file.yaml").write_text("flag: off\nwall: 12:00:00\nseed: 010\nmask: 0x10\n")
Path("empty.yaml").write_text("flag: null\nwall: null\nseed: null\nmask: null\n")
with initialize_config_dir(str(Path.cwd()), version_base=None):
    file = OmegaConf.to_container(compose("file"))
    override = OmegaConf.to_container(compose("empty", ["flag=off", "wall=12:00:00", "seed=010", "mask=0x10"]))
print("file:", file)
print("override:", override)
assert file == {"flag": False, "wall": 43200, "seed": 8, "mask": 16}
assert override == {"flag": "off", "wall": "12:00:00", "seed": "010", "mask": "0x10"}
PY
venv/bin/python -W ignore check.py
