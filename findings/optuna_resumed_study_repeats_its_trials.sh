#!/usr/bin/env bash
# A study that goes on with the same seed tries the same points again.
#
# guess: A stored study that is loaded again goes on where it was: its sampler knows the trials and draws new
#   ones.
# behaviour: The generator is not stored. A sampler with a seed begins anew in every process: as long as it
#   draws at random (RandomSampler always, TPESampler for the first 10 trials of a study) it repeats the points
#   of the first process one by one. The tutorial on storages says that samplers are not stored and pickles
#   one; at run time nothing is said.
# versions: optuna 5.0.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   RandomSampler: 0.549 0.715 0.603 0.545, resumed: 0.549 0.715 0.603 0.545
#   TPESampler: 0.549 0.715 0.603 0.545, resumed: 0.549 0.715 0.603 0.545
# consequence: A sweep that is cut every few trials, or run by several workers with one seed, pays for the
#   same training runs again and counts them as evidence.
# automoe: brings no sweeper of its own; whoever resumes a sweep of Optuna gives each start another seed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'optuna==5.0.0'
cat > check.py <<'PY'
import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
for kind in (optuna.samplers.RandomSampler, optuna.samplers.TPESampler):
    storage = optuna.storages.InMemoryStorage()
    for _ in range(2):  # as two processes would
        study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True, sampler=kind(seed=0))
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=4)
    points = [f"{trial.params['x']:.3f}" for trial in study.trials]
    print(f"{kind.__name__}: {' '.join(points[:4])}, resumed: {' '.join(points[4:])}")
    assert len(points) == 8 and points[:4] == points[4:]
PY
venv/bin/python -W ignore check.py
