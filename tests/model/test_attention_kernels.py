"""Attention kernels: the one that is named is the one that runs, all of them agree, and the order on CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils._python_dispatch import TorchDispatchMode

from automoe.config.schema import Config, KernelsConfig, ModelConfig, MoEConfig
from automoe.errors import BackendError
from automoe.kernels import attention as attention_kernels
from automoe.kernels.attention import attend, attention_fn, cuda_order, cudnn_is_first, only_kernels, prepare_cuda
from automoe.parallel.choices import build_backend
from automoe.parallel.parallelize import build_decoder

B, S, N, G = 2, 9, 4, 2
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
FLASH_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"


class Operators(TorchDispatchMode):
    """Names of the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def heads(query_dim: int, value_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(query_dim)
    shapes = ((B, S, N, query_dim), (B, S, G, query_dim), (B, S, G, value_dim))
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def seen(kind: str) -> torch.Tensor | None:
    if kind == "causal":
        return None
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    same = documents[:, None, :] == documents[:, :, None]
    return (same & torch.ones(S, S, dtype=torch.bool).tril())[:, None]


@pytest.mark.parametrize("dims", [(24, 16), (16, 16)], ids=["mla", "gqa"])
@pytest.mark.parametrize("kind", ["causal", "documents"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_kernels_agree_and_each_is_the_one_that_was_named(dims: tuple[int, int], kind: str, with_sinks: bool) -> None:
    results = {}
    for name in ("sdpa", "flash", "math"):
        args = heads(*dims, torch.float64)
        sinks = torch.linspace(-1, 1, N, dtype=torch.float64).requires_grad_() if with_sinks else None
        with Operators() as operators:
            out = attention_fn(name)(*args, seen(kind), dims[0] ** -0.5, sinks)
        assert (FLASH_ON_CPU in operators.names) == (name != "math"), operators.names
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        trained = args if sinks is None else [*args, sinks]
        results[name] = [out, *torch.autograd.grad(out, trained, upstream)]
    for name in ("sdpa", "flash"):
        for got, expected in zip(results[name], results["math"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Flash attention kernel not used because")
def test_a_kernel_that_cannot_serve_is_not_replaced() -> None:
    q, k, v = heads(24, 16, torch.float32)
    with pytest.raises(RuntimeError):  # the CPU has no cuDNN
        attend(q, k, v, None, 1.0, kernel="cudnn")
    with (
        only_kernels("flash", "cpu", 24, 16),
        pytest.warns(UserWarning, match="same last dimension"),
        pytest.raises(RuntimeError),
    ):
        # Without the padding that attend does, flash cannot; math could, and must not.
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)


def test_the_order_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "cudnn_first", False)
    assert cuda_order(192, 128) == [FLASH, EFFICIENT, MATH], "flash declines unequal dims"
    monkeypatch.setattr(attention_kernels, "cudnn_first", True)
    assert cuda_order(192, 128) == [CUDNN, FLASH, EFFICIENT, MATH], "MLA"
    assert cuda_order(128, 128) == [CUDNN, FLASH, EFFICIENT, MATH]
    for dims in ((192, 192), (256, 256), (160, 128), (128, 192)):  # cuDNN may find no plan for the backward
        assert cuda_order(*dims) == [FLASH, EFFICIENT, MATH], dims
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with only_kernels("sdpa", "cuda", 192, 128):
        assert _cur_sdpa_kernel_backends(with_priority=True) == [CUDNN, FLASH, EFFICIENT, MATH]
    with only_kernels("sdpa", "cuda", 256, 256):
        assert _cur_sdpa_kernel_backends(with_priority=True) == [FLASH, EFFICIENT, MATH]
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_cudnn_is_left_out_where_its_gradient_may_be_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask over 64 keys more than a multiple of 128, and nowhere else."""
    monkeypatch.setattr(attention_kernels, "cudnn_first", True)
    for keys in (64, 192, 704, 2112):
        mask = torch.ones(1, 1, 2, keys, dtype=torch.bool)
        assert cuda_order(128, 128, mask) == [FLASH, EFFICIENT, MATH]
        with only_kernels("sdpa", "cuda", 128, 128, mask):
            assert CUDNN not in _cur_sdpa_kernel_backends()
        with pytest.raises(BackendError, match=rf"mask over {keys} keys.*kernels\.attention=sdpa"):
            only_kernels("cudnn", "cuda", 128, 128, mask)
    for mask in (None, *(torch.ones(1, 1, 2, keys, dtype=torch.bool) for keys in (63, 65, 128, 640))):
        assert cuda_order(128, 128, mask)[0] == CUDNN
        only_kernels("cudnn", "cuda", 128, 128, mask)


@pytest.mark.parametrize(
    ("capability", "version", "first"),
    [
        ((9, 0), 91900, True),
        ((10, 3), 91501, True),
        ((9, 0), 91500, False),  # wrong where a row's length is no multiple of 128
        ((8, 0), 91900, False),
        ((12, 0), 91900, False),
        ((9, 0), None, False),
    ],
)
def test_where_cudnn_goes_first(
    capability: tuple[int, int], version: int | None, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_kernels.torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(attention_kernels.torch.backends.cudnn, "version", lambda: version)
    assert cudnn_is_first() == first
    if version is None or version == 91500:
        with pytest.raises(BackendError, match=f"cuDNN {version}, .* multiple of 128; .*kernels.attention=sdpa"):
            attention_fn("cudnn")
    else:
        attention_fn("cudnn")


def test_torch_sets_up_its_own_order_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls, empty = _cur_sdpa_kernel_backends(with_priority=True), [], torch.empty

    def choose(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        calls.append(_cur_sdpa_kernel_backends(with_priority=True))
        return q

    monkeypatch.setattr(attention_kernels, "cudnn_first", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(F, "scaled_dot_product_attention", choose)
    prepare_cuda()
    prepare_cuda()
    assert calls == [before] and attention_kernels.cudnn_first is False


def test_a_model_on_the_cpu_opens_no_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, which another run may have filled."""

    def opened() -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", opened)
    config = ModelConfig(num_layers=1, vocab_size=16, hidden_size=16, first_k_dense=1, intermediate_size=16)
    model = build_decoder(config, MoEConfig(), torch.float32).to_empty(device="cpu")
    model(torch.zeros(1, 6, dtype=torch.int64))


def test_a_model_gets_the_kernel_of_its_configuration() -> None:
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    config = ModelConfig(num_layers=1, vocab_size=16, hidden_size=16, first_k_dense=1, intermediate_size=16)
    for name, fused in (("math", False), ("flash", True), ("sdpa", True)):
        model = build_decoder(
            config, MoEConfig(), torch.float32, backend=build_backend(Config(kernels=KernelsConfig(attention=name)))
        ).to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        with Operators() as operators:
            model(tokens)
        assert (FLASH_ON_CPU in operators.names) == fused, name


@pytest.mark.parametrize("name", ["sdpa", "flash", "math"])
def test_the_choice_of_kernels_compiles_without_a_graph_break(name: str) -> None:
    fn = torch.compile(attention_fn(name), fullgraph=True, backend="aot_eager")
    args = heads(24, 16, torch.float32)
    torch.testing.assert_close(fn(*args, None, 0.2), attention_fn(name)(*args, None, 0.2))


def test_the_order_on_cuda_compiles_without_a_graph_break() -> None:
    def ordered(q, k, v):  # what attend does on CUDA, over tensors that this machine has
        with only_kernels("sdpa", "cuda", 24, 24):
            return F.scaled_dot_product_attention(q, k, v)

    args = [x.detach() for x in heads(24, 24, torch.float32)]
    args = [args[0].transpose(1, 2)] + [x.repeat_interleave(N // G, 2).transpose(1, 2) for x in args[1:]]
    got = torch.compile(ordered, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*args))
