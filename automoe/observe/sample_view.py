"""Text view of a packed training row that marks trained tokens by a prefix and by colour."""

from __future__ import annotations

import textwrap

import numpy as np

from automoe.comm.tokens import IGNORE
from automoe.data.tokenizer import Tokenizer
from automoe.errors import steers

_MOST_SAMPLES = 3  # samples shown of a row
_MOST_LINES = 4  # lines shown of a part
_MARKS = {False: "          | ", True: "trained > | "}
Line = tuple[str, bool]  # (text of the line, whether it is trained)


def describe_row(
    tokens: np.ndarray,
    labels: np.ndarray,
    doc_ids: np.ndarray,
    tokenizer: Tokenizer,
    width: int = 80,
) -> list[Line]:
    """Return the first three documents of a packed row as lines (text, whether its tokens are trained).

    The first line counts the row's documents and tokens, a last one any documents not shown. Each
    line of text is either all trained or all untrained, and says so at its beginning. A token is
    trained if it is the label of the token before it. Line ends in the text are shown as ``⏎``; of
    long passages only the first and the last line are shown.

    Args:
        tokens: [S] token ids of the row.
        labels: [S] next token of each position, or -100 where none is trained.
        doc_ids: [S] number of each token's document within the row; -1: padding.
        width: largest number of columns of a line.
    """
    trained = np.zeros(len(tokens), dtype=bool)
    trained[1:] = labels[:-1] != IGNORE
    count = int(doc_ids.max()) + 1
    filled = int((doc_ids >= 0).sum())
    head = f"a row of the training data: {count} samples, {filled} of {len(tokens)} tokens, {trained.sum()} trained"
    lines = [(head, False)]
    # A special token appears by its name, or by its number if it has none.
    special = tokenizer.byte_lengths[tokens] == 0
    for sample in range(min(count, _MOST_SAMPLES)):
        here = np.flatnonzero(doc_ids == sample)
        for part in np.split(here, np.flatnonzero(np.diff(trained[here])) + 1):
            cuts = np.flatnonzero(special[part][1:] | special[part][:-1]) + 1
            pieces = (
                tokenizer.decode(ids) or f"<{ids[0]}>" for ids in np.split(tokens[part], cuts)
            )
            text = "".join(pieces).replace("\n", "⏎").replace("\t", " ")
            shown = "".join("�" if steers(char) else char for char in text)
            is_trained = bool(trained[part[0]])
            mark = _MARKS[is_trained]
            wrapped = textwrap.wrap(
                shown, width - len(mark), drop_whitespace=False, break_on_hyphens=False
            )
            if len(wrapped) > _MOST_LINES:
                wrapped[1:-1] = [f"... {len(wrapped) - 2} lines ..."]
            lines += [(mark + line, is_trained) for line in wrapped]
        lines.append(("", False))
    if count > _MOST_SAMPLES:
        lines.append((f"and {count - _MOST_SAMPLES} more", False))
    return lines
