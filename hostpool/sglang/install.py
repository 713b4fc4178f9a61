"""Puts these functions under the name ``sgl_kernel.kvcacheio``, for a process whose wheel has fewer or none."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType

from kvferry.hostpool.sglang.hooks import Hooks

log = logging.getLogger("kvferry")

PACKAGE, MODULE = "sgl_kernel", "sgl_kernel.kvcacheio"
REEXPORTED = (
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_mla",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_mla",
)
"""What ``sgl_kernel`` itself offers of them."""

_MISSING = object()
_undo: list[tuple[ModuleType, str, object]] = []
_before: dict[str, ModuleType | None] = {}
_hooks: list[Hooks] = []


def _replacements() -> dict[str, dict[str, object]]:
    from kvferry.hostpool.sglang import host_tensors, kvcacheio

    return {
        "sglang.srt.mem_cache.pool_host.common": {
            "_resolve_device_accessible_ptr_fn": lambda: kvcacheio.get_device_accessible_ptr,
            "_cuda_host_register": host_tensors._cuda_host_register,
            "_cuda_host_unregister": host_tensors._cuda_host_unregister,
        },
        "sglang.srt.mem_cache.embedding_cache_controller": {
            "transfer_embedding_ranges_direct": kvcacheio.transfer_embedding_ranges_direct,
        },
    }


def install() -> None:
    """``import sgl_kernel.kvcacheio`` gives kvferry's functions from now on. A second call does nothing.

    Call it before SGLang is imported: ``from sgl_kernel.kvcacheio import ...`` binds what is there at the time. The
    package ``sgl_kernel`` is left as it is, apart from the four functions that it exports again; where it is not
    installed there is an empty one. In SGLang itself the names are replaced that would ask ``torch.ops`` first, and
    those that page-lock its host pools (see ``hooks``).
    """
    if _before:
        return
    from kvferry.hostpool.sglang import kvcacheio

    _before[MODULE] = sys.modules.get(MODULE)
    sys.modules[MODULE] = kvcacheio
    package = sys.modules.get(PACKAGE)
    if package is None and importlib.util.find_spec(PACKAGE) is None:
        package = ModuleType(PACKAGE, "An empty sgl_kernel, made by kvferry: the wheel is not installed.")
        package.__path__ = []
        _before[PACKAGE] = None
        sys.modules[PACKAGE] = package
    if package is not None:
        _set(package, "kvcacheio", kvcacheio)
        for name in REEXPORTED:
            _set(package, name, getattr(kvcacheio, name))
    _hooks.append(Hooks(_replacements()))
    _hooks[0].enable()
    log.warning("sgl_kernel.kvcacheio is kvferry's from now on (%d functions)", len(kvcacheio.__all__))


def uninstall() -> None:
    """Undo ``install``: what was there before is there again, in SGLang's modules too.

    Names that others have imported from ``sgl_kernel.kvcacheio`` meanwhile stay kvferry's.
    """
    while _hooks:
        _hooks.pop().disable()
    while _undo:
        module, name, value = _undo.pop()
        if value is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, value)
    for name, before in _before.items():
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
    _before.clear()


def _set(module: ModuleType, name: str, value: object) -> None:
    _undo.append((module, name, getattr(module, name, _MISSING)))
    setattr(module, name, value)
