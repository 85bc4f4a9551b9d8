"""Positions exchanged for heads by any number of ranks, without processes: threads are the ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from automoe.comm.communicators import Communicator
from automoe.model.rows import exchange_heads, exchange_positions, head_tail_index, own_heads


class Threads(Communicator):
    """Rank ``rank`` of the threads that share ``sent`` and ``barrier``."""

    def __init__(self, rank: int, sent: list[torch.Tensor], barrier: Barrier) -> None:
        self.rank, self.num_ranks = rank, len(sent)
        self.sent, self.barrier = sent, barrier

    def all_to_all(self, x_P: torch.Tensor) -> torch.Tensor:
        assert len(x_P) == self.num_ranks
        self.sent[self.rank] = x_P
        self.barrier.wait(60)
        received = torch.stack([parts[self.rank] for parts in self.sent])
        self.barrier.wait(60)
        return received


@pytest.mark.parametrize(("num_ranks", "heads", "key_heads"), [(2, 4, 2), (3, 6, 3), (3, 9, 1), (4, 8, 2), (5, 5, 5)])
def test_each_rank_gets_whole_rows_of_its_heads_and_gives_them_back(num_ranks: int, heads: int, key_heads: int) -> None:
    seq_len = 4 * num_ranks
    q, k = (torch.randn(2, seq_len, n, 3, dtype=torch.float64) for n in (heads, key_heads))
    sent, barrier = [torch.empty(0)] * num_ranks, Barrier(num_ranks)

    def run(rank: int):
        ranks = Threads(rank, sent, barrier)
        mine = head_tail_index(seq_len, num_ranks, rank)
        own_q, own_k = exchange_heads(ranks, q[:, mine], k[:, mine])
        numbers = own_heads(ranks, torch.arange(heads))
        assert torch.equal(own_q, q[:, :, numbers])
        # The key head of each of these query heads.
        wanted = k.repeat_interleave(heads // key_heads, dim=2)[:, :, numbers]
        assert torch.equal(own_k.repeat_interleave(len(numbers) // own_k.shape[2], dim=2), wanted)
        assert own_k.shape[2] == max(key_heads // num_ranks, 1)
        back = exchange_positions(ranks, own_q)
        assert torch.equal(back, q[:, mine])

    with ThreadPoolExecutor(num_ranks) as threads:
        list(threads.map(run, range(num_ranks)))


def test_one_rank_has_whole_rows_of_all_heads() -> None:
    x = torch.randn(2, 4, 6, 3)
    alone = Communicator()
    assert exchange_heads(alone, x)[0] is x and exchange_positions(alone, x) is x and own_heads(alone, x) is x
