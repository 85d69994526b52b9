"""triton and Liger without kernels: their Python runs as on a GPU, a kernel launch does nothing."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.core.errors import SetupError
from tightfit.trace.kernel_workspace import find_multiprocessors

_CUDA_DEVICE = torch.device("cuda", 0)
_FUNCTIONS = (BuiltinFunctionType, FunctionType)
_COMMON_CAPABILITY = (8, 0)
"""For GPUs of other vendors, on which libraries take the same code path."""


@contextmanager
def pretend_cuda(package: str, capability: tuple[int, int] | None) -> Iterator[None]:
    """Modules of `package` see the device of fake CPU tensors as `cuda:0`.

    A fake tensor on a real CUDA device would need a CUDA build of torch. Modules imported later
    are not covered: import first what is to run.
    """
    patched_torch = _TorchWithCuda(capability or _COMMON_CAPABILITY)
    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "device", _pretend_device(patched_torch)))
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{package}.") and getattr(module, "torch", None) is torch:
                stack.enter_context(patch.object(module, "torch", patched_torch))
        yield


@contextmanager
def redirect_autocast(device_type: str) -> Iterator[None]:
    """Queries about CUDA's autocast return the state of `device_type`'s."""
    is_enabled: Any = torch.is_autocast_enabled
    dtype: Any = torch.get_autocast_dtype
    with (
        patch.object(torch, "is_autocast_enabled", lambda *_: is_enabled(device_type)),
        patch.object(torch, "get_autocast_dtype", lambda *_: dtype(device_type)),
    ):
        yield


def _pretend_device(patched_torch: _TorchWithCuda) -> property:
    """`cuda:0` for modules that use `patched_torch`, the real device for all others."""
    own: Any = vars(FakeTensor)["device"]

    def device(self: Any) -> torch.device:
        if sys._getframe(1).f_globals.get("torch") is patched_torch:
            return _CUDA_DEVICE
        known: torch.device = own.fget(self)
        return known

    return property(device, own.fset)


class _TorchWithCuda:
    """torch as the library sees it: CUDA is available, and its tensors are created on the CPU."""

    def __init__(self, capability: tuple[int, int]) -> None:
        # Gradients of trained norms are summed in as many rows.
        count = find_multiprocessors(capability).count
        properties = SimpleNamespace(multi_processor_count=count)
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            get_device_capability=lambda *_: capability,
            get_device_properties=lambda *_: properties,
            device=lambda *_: nullcontext(),
        )

    def equal(self, _first: Any, _second: Any) -> bool:
        """Liger asks whether the loss's gradient is 1; in training it is 1 / number of tokens."""
        return False

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_host(value) if isinstance(value, _FUNCTIONS) else value


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == _CUDA_DEVICE:
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)

    return call


_TRITON = "triton"
_LIGER = "liger_kernel"
_VERSION = "3.4.0"
"""Version of the stub: libraries choose between triton's old and new names by it."""
LAUNCH_LISTENERS: list[Callable[[tuple[Any, ...], dict[str, Any]], None]] = []
"""Called with the arguments of every skipped launch."""


@contextmanager
def liger_without_kernels(capability: tuple[int, int] | None) -> Iterator[None]:
    """Liger's own Python runs as on a GPU of this compute capability."""
    logging.getLogger(_LIGER).setLevel(logging.ERROR)  # it warns about missing compilers
    with triton_without_kernels():
        _import_liger()
        with pretend_cuda(_LIGER, capability), _undo_liger_patches():
            yield


def _import_liger() -> None:
    remedy = "pip install -U --no-deps liger-kernel (no GPU needed), or leave --trace out"
    if importlib.util.find_spec(_LIGER) is None:
        raise SetupError(
            "Tracing this plan runs liger-kernel's own code, which is not installed.",
            remedy=remedy,
        )
    try:
        from liger_kernel.transformers import monkey_patch  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"Tracing this plan needs liger-kernel, which cannot be imported: {error}.",
            remedy=remedy,
        ) from error


@contextmanager
def triton_without_kernels() -> Iterator[None]:
    """Kernels are declared, and launching them does nothing.

    Tensors that a library allocates around its kernels are still allocated. Where triton is not
    installed, a stub is imported instead and removed at the end, together with every module
    that imported it.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        yield  # nested: the outer context skips them already
    elif importlib.util.find_spec(_TRITON) is None:
        with _stub_triton():
            yield
    else:
        with _skip_launches():
            yield


@contextmanager
def _skip_launches() -> Iterator[None]:
    from triton.runtime import autotuner, jit  # type: ignore[import-not-found, unused-ignore]

    with ExitStack() as stack:
        # An autotuner would time its choices before it launches one.
        for owner in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
            stack.enter_context(patch.object(owner, "run", _do_nothing))
        yield


@contextmanager
def _stub_triton() -> Iterator[None]:
    _cache_triton_check()
    finder = _Finder()
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if _is_part_of(name, _TRITON) or _is_part_of(name, _LIGER) or _has_our_kernels(name):
                del sys.modules[name]


def _has_our_kernels(name: str) -> bool:
    """Whether this is a tightfit module that imported the stub."""
    module = sys.modules[name]
    return _is_part_of(name, "tightfit") and isinstance(vars(module).get(_TRITON), _Module)


@contextmanager
def _undo_liger_patches() -> Iterator[None]:
    """Undo Liger's patches of transformers' modelling modules, which it never undoes itself."""
    from liger_kernel import utils
    from liger_kernel.transformers import monkey_patch

    apply: Any = monkey_patch._apply_liger_kernel_to_instance
    kept: dict[str, dict[str, Any]] = {}

    def apply_and_remember(*args: Any, **kwargs: Any) -> Any:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models."):
                kept.setdefault(name, dict(vars(module)))
        return apply(*args, **kwargs)

    with patch.object(monkey_patch, "_apply_liger_kernel_to_instance", apply_and_remember):
        try:
            yield
        finally:
            for name, before in kept.items():
                vars(sys.modules[name]).update(before)
            forget = getattr(getattr(utils, "infer_device_arch", None), "cache_clear", None)
            if forget is not None:
                forget()  # the traced GPU is not this machine's


def _cache_triton_check() -> None:
    """torch checks once whether triton can be imported; let it do so before the stub is there.

    `flop_counter`, which FSDP's tracing imports, tries triton's classes at its own import.
    """
    from torch.utils import _triton, flop_counter  # noqa: F401

    ask: Any = _triton.has_triton_package
    ask()


def _is_part_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


class _Finder:
    """Import hook that provides every module of a missing triton."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if not _is_part_of(name, _TRITON):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _TRITON:
            vars(module).update(_STUB_NAMES)
        elif module.__name__ == f"{_TRITON}.language":
            vars(module)["constexpr"] = _Constant


class _Module(ModuleType):
    """A module with every name: none is used unless a kernel runs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything:
    """Any name of triton's language; only ever passed to a kernel."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return _Anything()


class _Constant:
    """`triton.language.constexpr`: a value known when a kernel is compiled."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Kernel:
    """A kernel: `kernel[grid](...)`, `kernel.run(...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return _do_nothing

    run = warmup = lambda *_args, **_kwargs: None


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    for listener in LAUNCH_LISTENERS:
        listener(args, kwargs)


def _declare(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)


def _keep(*_args: Any, **_options: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


def _divide_up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 0


_STUB_NAMES: dict[str, Any] = {
    "__version__": _VERSION,
    "jit": _declare,
    "autotune": _keep,
    "heuristics": _keep,
    "Config": _Anything().__call__,
    "cdiv": _divide_up,
    "next_power_of_2": _next_power_of_2,
}
