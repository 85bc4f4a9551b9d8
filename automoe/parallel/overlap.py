"""Forward pass of one micro-batch merged with the backward pass of another.

Each pass hides the other's all-to-alls (DualPipe of DeepSeek-V3, section 3.2.1; Megatron-Core's
1F1B with A2A overlap). The passes run in two threads, exactly one of which runs at any time. A pass
that has started an all-to-all yields to the other pass, and waits for the all-to-all when its turn
comes again. So the order of kernels and collectives depends on the program alone, not on the
scheduler of threads, and is the same on all ranks of an ep group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from automoe.comm.collectives import DispatchGroup

T = TypeVar("T")

# Name of the thread of the backward pass; ``launch.stuck`` looks for it.
BACKWARD_THREAD = "merged_backward"


class _OtherPassFailed(Exception):
    """Error raised in one of two overlapped passes after the other pass has failed."""


class MergedPasses:
    """Scheduler of a forward and a backward pass in two threads, of which one runs at a time.

    When a pass has started an all-to-all, it runs the products of weight gradients that backward
    passes have deferred (``defer``), and then lets the other pass run (``overlap``).
    ``MERGED_PASSES`` is the only instance.
    """

    def __init__(self) -> None:
        self._turn: int | None = None  # the pass that runs; None outside ``run``
        self._deferred: deque[Callable[[], None]] = deque()

    def run(self, first: Callable[[], object], second: Callable[[], T]) -> T:
        """Run both functions to their ends, alternating; ``first`` begins, in a thread of its own.

        Returns:
            The result of ``second``.

        Raises:
            BaseException: the first error of either function. The other one ends when it next gets
                its turn.
        """
        assert self._turn is None, "two passes are merged already"
        self._turn = 0
        self._done = [False, False]
        self._wake = [threading.Semaphore(0), threading.Semaphore(0)]
        self._errors: list[BaseException] = []
        threads = torch.get_num_threads()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        stream = None if device is None else torch.cuda.current_stream()

        def in_new_thread() -> object:
            # These settings are per thread.
            torch.set_num_threads(threads)
            if device is not None:
                torch.cuda.set_device(device)
                torch.cuda.set_stream(stream)
            return first()

        thread = threading.Thread(
            target=self._body, args=(0, in_new_thread), name=BACKWARD_THREAD, daemon=True
        )
        thread.start()
        self._wake[0].release()
        try:
            result = self._body(1, second)
            thread.join()
        finally:
            self._turn = None
        if self._errors:
            self._deferred.clear()
            raise self._errors[0]
        return result

    def _body(self, me: int, function: Callable[[], object]) -> Any:
        try:
            self.wait_for_turn(me)
            return function()
        except _OtherPassFailed:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._done[me] = True
            self._turn = 1 - me
            self._wake[1 - me].release()

    def wait_for_turn(self, me: int) -> None:
        """Block until pass ``me`` (0: first, 1: second) may run.

        Raise ``_OtherPassFailed``, which ends the pass, if the other one has failed. The watchdog
        of hanging ranks recognises this function by name.
        """
        self._wake[me].acquire()
        self._turn = me
        if self._errors:
            raise _OtherPassFailed

    def swap(self) -> None:
        """Suspend the calling pass until the other pass calls ``swap`` or ends.

        Outside ``run``, or if the other pass has ended, return at once. Raise ``_OtherPassFailed`` if
        the other pass fails meanwhile.
        """
        # The running pass has the turn, so this is also right in autograd's threads.
        me = self._turn
        if me is None or self._done[1 - me]:
            return
        self._turn = 1 - me
        self._wake[1 - me].release()
        self.wait_for_turn(me)

    def overlap(self, wait: Callable[[], object]) -> None:
        """Run the deferred functions, then the other pass, and then call ``wait``.

        The calling pass has started an all-to-all, which ``wait`` awaits. The other pass runs until
        it starts an all-to-all itself (``swap``) or ends.
        """
        self.run_deferred()
        self.swap()
        wait()

    def defer(self, work: Callable[[], None]) -> None:
        """Keep ``work`` to run it while the next all-to-all of the calling pass travels."""
        self._deferred.append(work)

    def run_deferred(self) -> None:
        """Run the functions that ``defer`` kept, in order, and forget them."""
        while self._deferred:
            self._deferred.popleft()()

    def forget_deferred(self) -> None:
        """Forget the functions that ``defer`` kept, after an error."""
        self._deferred.clear()

    def check_nothing_is_deferred(self) -> None:
        """Raise ``AssertionError`` if deferred work is left at the end of a step."""
        assert not self._deferred, f"{len(self._deferred)} deferred products were not computed"


MERGED_PASSES = MergedPasses()


class _Exchange(torch.autograd.Function):
    """Autograd function: all-to-all of rows; the backward sends the gradients the opposite way.

    A forward pass of one micro-batch and a backward pass of another run in turns. While the rows of
    one of them travel, the other one runs (``MergedPasses.overlap``).
    """

    @staticmethod
    def forward(
        ctx, x, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
    ):
        ctx.splits = output_splits, input_splits
        ctx.group = group
        x = x.contiguous()
        out = x.new_empty((sum(output_splits), *x.shape[1:]))
        work = dist.all_to_all_single(
            out, x, output_splits, input_splits, group=group, async_op=True
        )
        MERGED_PASSES.overlap(work.wait)
        return out

    @staticmethod
    def backward(ctx, grad):
        output_splits, input_splits = ctx.splits
        return _Exchange.apply(grad, input_splits, output_splits, ctx.group), None, None, None


class OverlappedDispatch(DispatchGroup):
    """Group over which tokens go to experts; meanwhile another micro-batch's pass runs (``MergedPasses``)."""

    def all_to_all(self, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        return _Exchange.apply(x, output_splits, input_splits, self.group)
