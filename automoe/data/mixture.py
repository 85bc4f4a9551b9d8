"""Weighted mixture of several sources' rows in one sequence; row i is computed, not stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_BLOCK = 4096  # random numbers per block; blocks are generated whole and cached.


class Mixture:
    """Endless sequence of rows drawn from several sources in proportion to their weights.

    Row k of source s has the time (k + u) / w_s, with u in [0, 1) derived from (seed, s, k); the
    sequence is all rows in the order of their times. Before any time T, source s has T w_s rows,
    within one. So n consecutive rows hold n w_s rows of source s, within 2 + 2 w_s (S - 2) for S
    sources. The rows depend only on the index, the weights and the seed.

    Args:
        weights: share of each source, in any unit; all above 0.
        seed: seed of the order.

    Attributes:
        weights: [S] float64, normalised to a sum of 1.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.weights = np.array(weights, dtype=np.float64) / sum(weights)
        assert (self.weights > 0).all()
        self.seed = seed
        self._block = lru_cache(maxsize=4 * len(self.weights))(self._make_block)

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows of which sources are rows ``first`` to ``first + count - 1``.

        Returns:
            (index of each row's source, index of the row within that source): int64 arrays [count].
        """
        S = len(self.weights)
        if S == 1:
            return np.zeros(count, dtype=np.int64), np.arange(first, first + count)
        # The number of rows with times before T is T, within S.
        begin = max(0, first - S)
        end = first + count + S
        spans = [(self._before(s, begin), self._before(s, end)) for s in range(S)]
        sources = np.repeat(np.arange(S), [last - start for start, last in spans])
        rows = np.concatenate([np.arange(*span) for span in spans])
        times = np.concatenate([self._times(s, np.arange(*span)) for s, span in enumerate(spans)])
        skipped = first - sum(start for start, _ in spans)
        order = np.argsort(times, kind="stable")[skipped : skipped + count]
        return sources[order], rows[order]

    def _before(self, source: int, time: int) -> int:
        """Return how many rows of source number ``source`` have a time before ``time``.

        Row k of a source of weight w has the time (k + u) / w, with a random u in [0, 1) per row.
        """
        # The number is ``near`` or differs from it by one.
        near = int(self.weights[source] * time)
        candidates = np.arange(max(0, near - 1), near + 2)
        return int(candidates[0] + (self._times(source, candidates) < time).sum())

    def _times(self, source: int, rows: np.ndarray) -> np.ndarray:
        shift = np.empty(len(rows))
        for block in np.unique(rows // _BLOCK):
            inside = rows // _BLOCK == block
            shift[inside] = self._block(source, int(block))[rows[inside] % _BLOCK]
        return (rows + shift) / self.weights[source]

    def _make_block(self, source: int, block: int) -> np.ndarray:
        # NumPy promises stable raw bits of PCG64, as ``seeded_order`` explains.
        generator = np.random.PCG64(np.random.SeedSequence((self.seed, source, block)))
        return (generator.random_raw(_BLOCK) >> np.uint64(11)) * 2.0**-53
