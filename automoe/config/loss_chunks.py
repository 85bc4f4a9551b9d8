"""How the cross-entropy is cut up; the plan and the model read it here. No torch."""

from __future__ import annotations

CHUNK_TOKENS = 512  # at least
MOST_CHUNK_TOKENS = 4096


def chunk_tokens(tokens: int, hidden: int) -> int:
    """Tokens whose logits are alive at once, of ``tokens``: as many logits as the head has numbers, within bounds.

    For each chunk the gradient of the whole head is added up once; few tokens a chunk make that the larger part of
    what the loss moves. Compiled code is made for one size, so chunks are alike where fewer than twice the least number
    of them divides the tokens; elsewhere the last one is shorter.
    """
    most = max(CHUNK_TOKENS, min(hidden, MOST_CHUNK_TOKENS))
    fewest = max(1, -(-tokens // most))
    num_chunks = next((n for n in range(fewest, 2 * fewest) if tokens % n == 0), fewest)
    return max(1, -(-tokens // num_chunks))
