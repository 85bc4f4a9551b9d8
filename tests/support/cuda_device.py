"""Importing this, before anything imports torch, gives torch a CUDA device for fake tensors (``tests.support.fake_cuda``).

Fake tensors may be of a device that the machine lacks, but autograd then still asks for that device's guard, its streams
and its hooks, and ends the process where there are none. Those are a few C++ functions, compiled here (g++ with C++20,
seconds) and loaded before torch's own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from automoe.errors import BackendError

_SOURCE = """
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <atomic>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;
const Device device(DeviceType::CUDA, 0);
std::atomic<StreamId> last_stream{0};
thread_local StreamId current = 0;
Stream stream(StreamId id) { return Stream(Stream::UNSAFE, device, id); }

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  Stream getStream(Device) const noexcept override { return stream(current); }
  Stream getNewStream(Device, int) const override { return stream(++last_stream); }
  Stream exchangeStream(Stream next) const noexcept override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = &last_stream; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
const Guard guard;
}  // namespace

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const Hooks hooks;
  return hooks;
}
}  // namespace at::detail
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator
// To be called once torch is loaded: a CUDA build of it has set its own.
extern "C" void set_guard() { c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard); }
"""


def _load() -> ctypes.CDLL:
    if shutil.which("g++") is None:
        raise BackendError(
            "tests.support.cuda_device compiles a few C++ functions with g++, and there is none on the PATH. "
            "Install g++ 10 or later, which knows C++20"
        )
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None and "torch" not in sys.modules
    torch = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "cuda.cpp"), Path(folder, "libcuda_device.so")
        source.write_text(_SOURCE)
        found = [f"-I{torch}/include", f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
        # RPATH, which also serves what libtorch_cpu itself needs.
        where = [f"-Wl,-rpath,{torch}/lib", "-Wl,--disable-new-dtags"]
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), *found, *where]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # before torch: the first definition counts


SHIM = _load()
