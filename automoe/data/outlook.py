"""Lines for the user before the first step: the length of a run, and tokens that it cannot learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from automoe.config.batch import rows_of_run
from automoe.config.schema import Config, tokenizer_of
from automoe.data.prepare import TokenCorpus
from automoe.data.tokenizer import Tokenizer, tokenizer_beside
from automoe.errors import listed
from automoe.model.adapters import is_trained
from automoe.model.params import model_params

_PART = 1 << 24  # tokens that are counted at once


def describe_length(config: Config, rows: int) -> Iterator[str]:
    """Yield the learning rate, the steps and the epochs of a run, and a warning on its warm-up.

    Args:
        rows: rows of an epoch.
    """
    optim = config.optim
    steps = config.train.steps
    yield (
        f"optim.lr={optim.lr:g}, weight decay {optim.weight_decay:g}, {steps:,} steps: "
        f"{rows_of_run(config.train) / rows:.3g} epochs of {rows:,} rows"
    )
    if 2 * optim.warmup_steps > steps:
        yield (
            f"warning: the learning rate rises for optim.warmup_steps={optim.warmup_steps}, more than half of "
            f"the {steps:,} steps. Lower it, or train longer (train.epochs)"
        )


def describe_unlearned(
    config: Config, tokenizer: Tokenizer, corpora: Iterable[TokenCorpus]
) -> Iterator[str]:
    """Yield a warning if tokens are trained that the checkpoint does not know, and rows are frozen.

    Rows are those of the embedding and of the output head.
    """
    model = config.model
    base = None if model.random_weights or config.data.is_synthetic else model.hf_path
    ends = [p.name for p in model_params(model) if p.spec.part in ("embedding", "head")]
    frozen = [name for name in ends if not is_trained(name, config)]
    theirs = tokenizer_beside(base) if frozen and tokenizer_of(config) != base else None
    if theirs is None:
        return
    counts = np.zeros(model.vocab_size, np.int64)
    for corpus in corpora:
        for at in range(0, len(corpus.tokens), _PART):
            part = corpus.tokens[at : at + _PART]
            if corpus.trained is not None:
                part = part[corpus.trained[at : at + _PART]]
            counts += np.bincount(part, minlength=len(counts))
    new = [
        f"{tokenizer.token(number)} (id {number}, {counts[number]:,} times)"
        for number in np.flatnonzero(counts).tolist()
        if not tokenizer.shares(number, theirs)
    ]
    if new:
        yield (
            f"warning: {len(new)} tokens are trained and cannot be learned, since the tokenizer of {base} does "
            f"not have them and their rows of {listed(frozen)} are frozen: {listed(new)}. Set "
            f"train.trainable=[{','.join(frozen)}], or train all weights (lora.rank=0, train.freeze=[])"
        )
