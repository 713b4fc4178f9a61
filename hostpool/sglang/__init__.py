"""What SGLang's HiCache calls, on kvferry: ``sgl_kernel.kvcacheio`` and the helpers of its host pools.

The functions have the names, parameters, defaults and meaning of sglang-kernel 0.4.10, whatever wheel is installed:
no registered torch operator is looked up, the driver is asked instead. ``install()`` puts them where SGLang looks.
"""

from kvferry.hostpool.sglang.host_tensors import (
    HostTensorAllocator,
    _cuda_host_register,
    _cuda_host_unregister,
    alloc_with_host_register,
    make_kernel_ptr_table,
)
from kvferry.hostpool.sglang.install import install, uninstall
from kvferry.hostpool.sglang.operands import KVCacheIOError

__all__ = [
    "HostTensorAllocator",
    "KVCacheIOError",
    "_cuda_host_register",
    "_cuda_host_unregister",
    "alloc_with_host_register",
    "install",
    "make_kernel_ptr_table",
    "uninstall",
]
