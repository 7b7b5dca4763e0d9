"""Make the C++ library's operators torch's implementation of the CPU kernel's ops, by torch's stable C interface.

The library gets torch's functions as pointers (operators.h), so that it builds without torch's headers in a few seconds.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from moefx.activation.spec import Activation

_FUNCTIONS = (
    "aoti_torch_library_init_impl",
    "torch_library_impl",
    "torch_call_dispatcher",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_dtype",
    "aoti_torch_is_contiguous",
    "aoti_torch_empty_strided",
    "aoti_torch_delete_tensor_object",
    "torch_delete_stable_ivalue",
    "torch_string_c_str",
    "torch_delete_string",
    "torch_get_num_threads",
    "torch_exception_get_what_without_backtrace",
    "aoti_torch_dtype_bfloat16",
    "aoti_torch_dtype_float16",
    "aoti_torch_dtype_float32",
    "aoti_torch_dtype_int32",
    "aoti_torch_dtype_int64",
    "aoti_torch_memory_format_contiguous_format",
    "aoti_torch_device_type_cpu",
)
_KINDS = {"swiglu": 0, "swiglu_oai": 1, "geglu": 2, "geglu_tanh": 3, "relu2": 4, "silu": 5}
_CLAMPS = {None: 0, "pre": 1, "post": 2}


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64 * 3), ctypes.POINTER(ctypes.c_double * 3))
def _decode(text: bytes, integers: Any, reals: Any) -> None:
    act = Activation.decode(text.decode())
    reals.contents[:] = act.limit or 0.0, act.alpha, act.beta
    integers.contents[:] = _KINDS.get(act.kind, -1), _CLAMPS[act.clamp], act.gated


class _Current:
    """The library whose operators torch has, and torch's handle of them."""

    library: ctypes.CDLL | None = None
    handle = ctypes.c_void_p()


def install(library: ctypes.CDLL, openmp: int) -> None:
    """Let torch call `library`; one that was installed before it is taken out."""
    if library is _Current.library:
        return
    if _Current.library is not None:
        _torch().aoti_torch_delete_library_object(_Current.handle)
    pointers = [ctypes.cast(getattr(_torch(), name), ctypes.c_void_p).value for name in _FUNCTIONS]
    host = (ctypes.c_void_p * (len(pointers) + 2))(*pointers, openmp, ctypes.cast(_decode, ctypes.c_void_p).value)
    if library.moefx_install(host, ctypes.byref(_Current.handle)):
        raise RuntimeError("torch refused the CPU kernel's operators: its stable C interface is not the one of torch 2.13")
    _Current.library = library


@functools.cache
def _torch() -> ctypes.CDLL:
    """Torch's own library, which this process has loaded."""
    return ctypes.CDLL("libtorch_cpu.so")
