"""What SGLang's own modules must find as kvferry's: they ask ``torch.ops`` before they use what they imported.

sglang 0.5.23 imports ``sgl_kernel.kvcacheio`` and then drops a function of it when torch has no operator of that name
(``pool_host/common.py``, ``embedding_cache_controller.py``). So the names are set again, in modules that are loaded
already, and in those that come later, as soon as they have run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Hooks(MetaPathFinder):
    """``replacements``: by module and name, what is to be found there."""

    def __init__(self, replacements: Mapping[str, Mapping[str, object]]) -> None:
        self._replacements = replacements
        self._done: list[tuple[str, str, object, object]] = []  # module, name, what was, what is

    def enable(self) -> None:
        """Replace what is loaded, and watch for the rest."""
        for name in self._replacements:
            if name in sys.modules:
                self.replace(sys.modules[name])
        sys.meta_path.insert(0, self)

    def disable(self) -> None:
        """Watch no longer, and put back what was, also where it was imported to meanwhile."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._done:
            module, name, before, after = self._done.pop()
            _exchange(module, name, after, before)

    def replace(self, module: ModuleType) -> None:
        """Set the names in ``module``, and in those modules of its package that have imported them."""
        for name, after in self._replacements[module.__name__].items():
            if name in module.__dict__:  # not in every release of SGLang
                before = module.__dict__[name]
                setattr(module, name, after)
                self._done.append((module.__name__, name, before, after))
                if before is not None:
                    _exchange(module.__name__, name, before, after)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python's own spec, with a loader that replaces afterwards."""
        if fullname not in self._replacements:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Replacing(spec.loader, self.replace)
        return spec


class _Replacing(Loader):
    """Another loader, and something to do when its module has run."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # get_source and its like, for tracebacks


def _exchange(module: str, name: str, old: object, new: object) -> None:
    """Set ``name`` in every loaded module of the package that has ``old`` under it."""
    package = module.partition(".")[0]
    for other, found in list(sys.modules.items()):
        if other.partition(".")[0] == package and found.__dict__.get(name) is old:
            setattr(found, name, new)
