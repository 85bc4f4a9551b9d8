"""Notes before the first step: length of the run, and a warning about tokens that training cannot learn.

A new token cannot be learned if its rows of the embedding or the output head are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from automoe.config.batch import rows_of_run
from automoe.config.schema import Config, tokenizer_of
from automoe.data.prepare import TokenCorpus
from automoe.data.tokenizer import Tokenizer, tokenizer_beside
from automoe.errors import listed
from automoe.hf.families.registry import read_hf_config
from automoe.hf.wrapper import text_config
from automoe.model.params import model_params
from automoe.model.trainable import is_trained

_MOST = 1 << 28  # tokens of a source that are looked at


def describe_length(config: Config, rows: int) -> Iterator[str]:
    """Yield lines on the learning rate, steps and epochs of a run, and a warning on a long warm-up.

    Args:
        rows: number of rows of an epoch, over all ranks.
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
    """Yield a warning if the data has tokens that are new to the checkpoint and cannot be learned.

    That is so if their rows of the embedding or the output head are frozen.

    Args:
        tokenizer: tokenizer of the data; ``corpora``: tokenised data of each source.
    """
    model = config.model
    frozen = [
        param.name
        for param in model_params(model)
        if param.spec.part in ("embedding", "head") and not is_trained(param.name, config)
    ]
    if not frozen or model.random_weights or config.data.is_synthetic or model.hf_path is None:
        return
    known = text_config(read_hf_config(model.hf_path)).get("vocab_size", model.vocab_size)
    theirs = None if tokenizer_of(config) == model.hf_path else tokenizer_beside(model.hf_path)
    if theirs is None and known >= model.vocab_size:
        return
    seen = np.zeros(model.vocab_size, np.bool_)
    for corpus in corpora:
        part = corpus.tokens[:_MOST]
        seen[part if corpus.trained is None else part[corpus.trained[:_MOST]]] = True
    new = [
        number
        for number in np.flatnonzero(seen).tolist()
        if number >= known or (theirs and not tokenizer.shares(number, theirs))
    ]
    if new:
        yield (
            f"warning: {len(new)} tokens are trained and cannot be learned, since {model.hf_path} does not know them "
            f"and their rows of {listed(frozen)} are frozen: "
            f"{listed(tokenizer.decode([n]) for n in new)}. Set train.trainable=[{','.join(frozen)}], or train all "
            "weights (lora.rank=0, train.freeze=[])"
        )
