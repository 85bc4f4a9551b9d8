"""Outputs discarded and recomputed for their readers: equal to the bit, recomputed once, freed in between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from automoe.passes.discard_outputs import discard_outputs, discard_scope

WIDTH = 8


class Layer:
    """x -> a (discarded) -> b and c (discarded, computed from a) -> their product with what else reads a."""

    def __init__(self, discards: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator).requires_grad_() for _ in range(4)]
        self.first_calls = self.second_calls = 0
        self.storages: list[StorageWeakRef] = []
        wrap: Callable = discard_outputs if discards else lambda fn: fn
        self.first, self.second = wrap(self._first), wrap(self._second)
        self.run = discard_scope(self._run) if discards else self._run

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        self.first_calls += 1
        return self._watched(x @ self.weights[0])

    def _second(self, a: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.second_calls += 1
        whole = self._watched(a @ self.weights[1]) * factor
        return self._watched(whole.sin()), whole.chunk(2, dim=-1)[1]  # the second is a view

    def _watched(self, tensor: torch.Tensor) -> torch.Tensor:
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b, c = self.second(a, 0.5)
        return (F.linear(b, self.weights[2]) * b).sum(-1) + (c.tanh() * c).sum(-1) + F.silu(a).sum(-1)

    def gradients(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.run(x).square().sum(), (x, *self.weights[:3])))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What is in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_gradients_are_equal_to_the_bit_and_each_output_is_made_once_more(x: torch.Tensor) -> None:
    layer = Layer(discards=True)
    assert_equal(layer.gradients(x), Layer(discards=False).gradients(x))
    assert (layer.first_calls, layer.second_calls) == (2, 2)


@pytest.mark.usefixtures("no_garbage_collection")
def test_outputs_are_freed_after_the_forward_pass_and_after_the_backward_pass(x: torch.Tensor) -> None:
    kept, layer = Layer(discards=False), Layer(discards=True)
    losses = [each.run(x).sum() for each in (kept, layer)]
    assert not all(storage.expired() for storage in kept.storages)
    assert len(layer.storages) == 3 and all(storage.expired() for storage in layer.storages)
    own = x * 2  # of the graph alone
    input_storage, again = StorageWeakRef(own.untyped_storage()), layer.run(own).sum()
    del own
    assert not input_storage.expired(), "what is made again needs its input"
    for loss in (*losses, again):
        loss.backward()
    del loss, losses, again
    assert input_storage.expired() and all(storage.expired() for storage in layer.storages)


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_graph_without_a_backward_pass_is_freed(x: torch.Tensor) -> None:
    own = x * 2
    input_storage, loss = StorageWeakRef(own.untyped_storage()), Layer(discards=True).run(own).sum()
    del own, loss
    assert input_storage.expired()


def test_a_graph_that_is_kept_may_be_walked_again_and_in_part(x: torch.Tensor) -> None:
    kept, layer = Layer(discards=False), Layer(discards=True)
    results = []
    for each in (kept, layer):
        loss = each.run(x).square().sum()
        part = torch.autograd.grad(loss, each.weights[2], retain_graph=True)
        whole = torch.autograd.grad(loss, (x, *each.weights[:3]), retain_graph=True)
        results.append([*part, *whole, *torch.autograd.grad(loss, (x, *each.weights[:3]))])
    assert_equal(*results)


def test_two_calls_in_flight_do_not_mix(x: torch.Tensor) -> None:
    layer, kept = Layer(discards=True), Layer(discards=False)
    losses = [layer.run(scale * x).sum() for scale in (1, 3)]
    for scale, loss in reversed(list(zip((1, 3), losses, strict=True))):
        assert_equal(
            list(torch.autograd.grad(loss, layer.weights[:3])),
            list(torch.autograd.grad(kept.run(scale * x).sum(), kept.weights[:3])),
        )


def test_hooks_around_a_region_get_all_that_is_kept(x: torch.Tensor) -> None:
    """Such as those that move what is kept to the CPU, or count it."""
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.detach())
        return len(packed) - 1

    layer = Layer(discards=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i].clone()):
        got = layer.gradients(x)
    assert_equal(got, Layer(discards=False).gradients(x))
    storages = {tensor.untyped_storage()._cdata for tensor in packed}
    assert x.untyped_storage()._cdata in storages
    assert all(weight.untyped_storage()._cdata in storages for weight in layer.weights[:3])
    assert not storages & {storage.cdata for storage in layer.storages}


@pytest.mark.parametrize("inside", [False, True], ids=["around_a_region", "inside_a_region"])
def test_checkpoints_and_regions_nest(x: torch.Tensor, inside: bool) -> None:
    def gradients(layer: Layer) -> list[torch.Tensor]:
        if inside:
            second = layer.second
            layer.second = lambda a, factor: checkpoint(second, a, factor, use_reentrant=False)
            return layer.gradients(x)
        out = checkpoint(layer.run, x, use_reentrant=False)
        return list(torch.autograd.grad(out.square().sum(), (x, *layer.weights[:3])))

    assert_equal(gradients(Layer(discards=True)), gradients(Layer(discards=False)))


def test_a_compiled_reader_discards_too(x: torch.Tensor) -> None:
    results, storages = [], []
    for discards in (False, True):
        layer = Layer(discards)
        first, reader = layer.first, torch.compile(lambda a: (a.sin() * a).sum(-1), backend="aot_eager")

        def run(x: torch.Tensor, first=first, reader=reader) -> torch.Tensor:
            return reader(first(x))

        out = discard_scope(run)(x) if discards else run(x)
        storages.append(layer.storages[0].expired())
        results.append(list(torch.autograd.grad(out.sum(), (x, layer.weights[0]))))
    assert_equal(*results)
    assert storages == [False, True]


def test_without_gradients_nothing_is_kept_or_made_again(x: torch.Tensor) -> None:
    layer = Layer(discards=True)
    with torch.no_grad():
        out = layer.run(x)
    assert torch.equal(out, Layer(discards=False).run(x)) and not out.requires_grad
    assert (layer.first_calls, layer.second_calls) == (1, 1)
