"""Modules that lie beside a model's file, for one instance alone.

In Triton every instance is a process with the model's folders on its path. Here all share one process, whose
`sys.modules` knows one module of a name. So each instance has a package of its own, and what its code imports is
looked for there first:

- `import x` inside such a module is a lookup in the package: these modules have an `__import__` of their own.
- Who imports on behalf of a model (`importlib.import_module`, unpickling) gets a stand-in, that shows to each
  instance its own module. It stays in `sys.modules` and holds nothing.

Other than in Triton, a module or package beside the model goes before an installed one of the same name: what is
importable in this process depends on the other models, too.
"""

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from local_runtime.errors import ModelLoadError
from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.executors.shim import context
from local_runtime.executors.shim.context import ModelContext
from local_runtime.executors.shim.errors import TritonModelException

# The global variable of a package that holds whose it is.
_OWN = "__triton_own_modules__"
_SHIM = "triton_python_backend_utils"
# A copy of it, for editors, lies beside many a model; the standard library is on Python's path before anything else.
_NEVER_OWN = sys.stdlib_module_names | {_SHIM}


class OwnModules:
    """The modules of one instance, importable until they are forgotten. Safe from any thread.

    Args:
        folder: the version folder. As in Triton, the model's folder, in which it lies, is on the path, too.
        owner: whose modules they are; its `package` is the name of the package that they are in.
    """

    def __init__(self, folder: Path, *, owner: ModelContext) -> None:
        self._package = owner.package
        self._path = [str(folder), str(folder.parent)]
        self._are_own: dict[str, bool] = {}
        self.marks: Mapping[str, Any] = {
            context.MARK: owner,
            "__builtins__": {**vars(builtins), "__import__": self._import},
        }
        package = ModuleType(self._package)
        package.__path__ = self._path
        package.__dict__[_OWN] = self
        _install(_OwnFinder, at=0)
        _install(_StandInFinder, at=len(sys.meta_path))
        sys.modules[_SHIM] = pb_utils
        sys.modules[self._package] = package

    def execute(self, file: Path) -> ModuleType:
        """Execute the model's file as one of the modules; raises ModelLoadError or what its code raises."""
        name = f"{self._package}.{file.stem.replace('.', '_')}"
        loader = next((loader for loader, suffixes in _LOADERS if file.suffix in suffixes), None)
        spec = None if loader is None else spec_from_file_location(name, file, loader=loader(name, str(file)))
        if spec is None or spec.loader is None:
            raise ModelLoadError(f"{file.name} is not a Python file")
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def forget(self) -> None:
        """Take all of the instance's modules out of the process."""
        for name in list(sys.modules):
            if name == self._package or name.startswith(f"{self._package}."):
                sys.modules.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether the module of that name, or the package that it is in, lies beside the model."""
        top = name.partition(".")[0]
        if top not in self._are_own:
            self._are_own[top] = self._is_own(top)
        return self._are_own[top]

    def load(self, name: str) -> ModuleType:
        """The instance's own module of that name, imported if it was not; raises what its code raises."""
        return importlib.import_module(f"{self._package}.{name}")

    def _is_own(self, top: str) -> bool:
        if top in _NEVER_OWN:
            return False
        spec = _found(f"{self._package}.{top}", self._path)
        # A folder without __init__.py is a package only where there is nothing else, whatever data it holds.
        return spec is not None and (spec.loader is not None or not _is_elsewhere(top))

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - the signature of __import__
        locals: Mapping[str, object] | None = None,  # noqa: A002 - as above
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`__import__` as the instance's modules see it."""
        if level == 0 and not self.has(name) and isinstance(sys.modules.get(name.partition(".")[0]), _StandIn):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        # C code that imports by itself (unpickling) gives a list, and then looks into sys.modules.
        if level > 0 or isinstance(fromlist, list) or not self.has(name):
            return __import__(name, globals, locals, fromlist or (), level)
        if fromlist:
            return __import__(f"{self._package}.{name}", globals, locals, fromlist, 0)
        self.load(name)
        return self.load(name.partition(".")[0])


class _OwnSource(SourceFileLoader):
    """Always compiled: compiled files know their source by its size and second, and a reload may be quicker."""

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the file as it is now."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Execute it as its owner's."""
        _mark(module)
        super().exec_module(module)


class _OwnBytecode(SourcelessFileLoader):
    """A compiled file alone."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute it as its owner's."""
        _mark(module)
        super().exec_module(module)


_LOADERS: Sequence[tuple[Any, list[str]]] = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (_OwnSource, SOURCE_SUFFIXES),
    (_OwnBytecode, BYTECODE_SUFFIXES),
)


class _OwnFinder:
    """Finds the modules of the instances' packages."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG004 - the import system's port
        """See `importlib.abc.MetaPathFinder`."""
        return None if path is None or _own(name) is None else _found(name, path)


class _StandInFinder:
    """Asked last: for code that is not a model's, but called by a model, there is a stand-in for the model's module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG004 - the import system's port
        """See `importlib.abc.MetaPathFinder`."""
        own = _callers()
        if own is None or not own.has(name):
            return None
        own.load(name)
        return ModuleSpec(name, _StandInLoader(), is_package=True)


class _StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The stand-in."""
        module = _StandIn(spec.name)
        # Nowhere: otherwise Python's own finder would look into the folder of the instance that asked first.
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module behind it has been executed."""


class _StandIn(ModuleType):
    """In place of modules of that name that lie beside models: shows to each instance what is in its own."""

    def __getattr__(self, attribute: str) -> Any:
        own = _callers()
        if own is None or not own.has(self.__name__):
            raise AttributeError(f"module '{self.__name__}' belongs to a model, and no code of it is calling")
        return getattr(own.load(self.__name__), attribute)


def _own(name: str) -> OwnModules | None:
    """The instance's package that a full name lies in."""
    package = sys.modules.get(name.partition(".")[0])
    own: OwnModules | None = getattr(package, "__dict__", {}).get(_OWN)
    return own


def _mark(module: ModuleType) -> None:
    own = _own(module.__name__)
    if own is not None:
        module.__dict__.update(own.marks)


def _callers() -> OwnModules | None:
    """The package of the instance whose code is calling."""
    try:
        return _own(context.current().package)
    except TritonModelException:
        return None


def _found(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """What lies in those folders under the last part of the name. Not remembered: files may have been added."""
    portions: list[str] = []
    for folder in path:
        spec = FileFinder(folder, *_LOADERS).find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        portions.extend((spec.submodule_search_locations or ()) if spec is not None else ())
    if not portions:
        return None
    together = ModuleSpec(name, None, is_package=True)
    together.submodule_search_locations = portions
    return together


def _is_elsewhere(top: str) -> bool:
    """Whether the process has a module of that name without the instances' packages."""
    module = sys.modules.get(top)
    if module is not None and not isinstance(module, _StandIn):
        return True
    others = (finder for finder in sys.meta_path if finder not in (_OwnFinder, _StandInFinder))
    specs = (finder.find_spec(top, None) for finder in others)
    return any(spec is not None and spec.loader is not None for spec in specs)


def _install(finder: Any, *, at: int) -> None:
    if finder not in sys.meta_path:
        sys.meta_path.insert(at, finder)
