# SPDX-License-Identifier: Apache-2.0
"""A hash of the code that is loaded: functions and constants as they are now, not as files say.

The hash of the package's files names a build. A process may run something else: a constant that a
notebook has set, a function that a test has replaced, a file that was edited after it was imported.
What depends on the code that runs, as a kept executable does, needs this hash beside that one.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]
LIBRARIES = frozenset({
    "huggingface_hub", "jax", "jaxlib", "jaxtyping", "jinja2", "ml_dtypes", "numpy", "orbax",
    "safetensors", "tokenizers",
})  # fmt: skip
"""Whose values count by their names: their versions are in the keys of those who use the hash."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_NOT_CODE = {
    "__annotations__", "__builtins__", "__cached__", "__dict__", "__doc__", "__file__",
    "__firstlineno__", "__loader__", "__module__", "__msgspec_cache__", "__package__", "__path__",
    "__spec__", "__static_attributes__", "__weakref__", "_abc_impl", "_is_protocol",
    "_is_runtime_protocol",
}  # fmt: skip
"""Attributes that say nothing of what runs; some are there only after a first use."""
_STATELESS = (object, type(threading.Lock()))
_CODE_FIELDS = (
    "co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code",
    "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable", "co_consts",
)  # fmt: skip


class UnknownCodeError(ValueError):
    """A value that a hash of loaded code cannot tell from another."""


@functools.cache
def reached_modules(root: str) -> tuple[str, ...]:
    """Names of the modules of this package that a module imports, itself or through others.

    As their files say, inside functions too, so that every process has the same list.
    """
    names: set[str] = set()
    todo = [root]
    while todo:
        name = todo.pop()
        path = _file(name)
        if name not in names and path is not None:
            names.add(name)
            todo += _imported(path.read_text(encoding="utf-8"))
    return tuple(sorted(names))


_IMPORT = re.compile(
    rf"^[ \t]*(?:import[ \t]+(?P<module>{PACKAGE}[.\w]*)"
    rf"|from[ \t]+(?P<source>{PACKAGE}[.\w]*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|.*))",
    re.MULTILINE,
)


def _imported(text: str) -> Iterator[str]:
    """Names that may be modules of this package which a source imports.

    WHY: Python's own parser takes half a second for what a start asks.
    """
    for found in _IMPORT.finditer(text):
        names = [found["module"] or found["source"]]
        names += [f"{found['source']}.{name}" for name in re.findall(r"\w+", found["names"] or "")]
        yield from (name for name in names if name.startswith(f"{PACKAGE}."))


def _file(module: str) -> Path | None:
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    files = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in files if file.exists()), None)


def this_moment() -> int:
    """A moment, for those who ask `loaded_code_hash` several times for one request."""
    return _module_hashes().moment()


def loaded_code_hash(root: str, *values: Any, asked: int | None = None) -> str:
    """Hash what a module and the modules that it reaches hold now, and some values.

    Functions count by their bytecode, defaults and closures; classes by what they define; other
    values by what they hold; what a library defines by its name. Lines, files and annotations do
    not count.

    Args:
        root: Name of a module of this package.
        values: Whatever else should count.
        asked: A moment, as `this_moment` gives it; modules count as they were at some time after
            it. Now if None.

    Returns:
        64 hexadecimal digits; the same in every process that has loaded the same.

    Raises:
        UnknownCodeError: Naming a value of which nothing tells whether it is the same in another
            process, such as a function from outside the package.
    """
    walk = _Walk(reached_modules(root))
    walk.add(_module_hashes().get(root, asked), "the modules")
    for value in values:
        walk.add(value, "an argument")
    return walk.total.hexdigest()


class _ModuleHashes:
    """Hashes of what modules hold, for several threads that ask at once."""

    def __init__(self) -> None:
        self._moments = itertools.count()
        self._walking = threading.Lock()
        self._last: dict[str, tuple[int, str]] = {}

    def moment(self) -> int:
        return next(self._moments)

    def get(self, root: str, asked: int | None) -> str:
        """Hash what the modules hold at some time after a moment, by default that of the call.

        Threads that ask while another walks share the walk that begins when it is done.
        """
        asked = self.moment() if asked is None else asked
        with self._walking:
            if root in self._last and self._last[root][0] > asked:
                return self._last[root][1]
            begun, modules = self.moment(), reached_modules(root)
            walk = _Walk(modules)
            for name in modules:
                walk.add_module(importlib.import_module(name))
            self._last[root] = begun, walk.total.hexdigest()
            return self._last[root][1]


@functools.cache  # WHY: not a constant of this module: those count
def _module_hashes() -> _ModuleHashes:
    return _ModuleHashes()


@functools.cache  # WHY: code never changes, and is three quarters of what a walk has to hash
def _code_digest(code: types.CodeType) -> bytes:
    walk = _Walk(())
    for name in _CODE_FIELDS:
        walk.add(getattr(code, name), code.co_name)
    return walk.total.digest()


class _Walk:
    """One pass over values. A value that comes again counts by its number."""

    def __init__(self, modules: Iterable[str]):
        self.total = hashlib.sha256()
        self._modules = frozenset(modules)
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no other value gets the id of one that was seen

    def add_module(self, module: types.ModuleType) -> None:
        self._put("module", module.__name__)
        for name, value in sorted(vars(module).items()):
            is_own = name.startswith("__") and name.endswith("__")
            # Which modules a package has as attributes is what was imported by now.
            if not is_own and sys.modules.get(f"{module.__name__}.{name}") is not value:
                self._put(name)
                self.add(value, f"{module.__name__}.{name}")

    def _put(self, *parts: object) -> None:
        for part in parts:
            held = part if isinstance(part, bytes) else str(part).encode()
            self.total.update(len(held).to_bytes(8, "little") + held)

    def add(self, value: Any, where: str) -> None:
        """Count a value; `where` is for people."""
        kind = type(value)
        if kind in _PLAIN:
            self._put(kind.__name__, repr(value))
            return
        if id(value) in self._numbers:
            self._put("again", self._numbers[id(value)])
            return
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        self._put(kind.__module__, kind.__qualname__)
        if isinstance(value, types.CodeType):
            self._put(_code_digest(value))
        elif isinstance(value, types.ModuleType):
            self._put(self._known(value.__name__, where))
        elif isinstance(value, type):
            self._add_class(value, where)
        elif isinstance(value, types.FunctionType):
            self._add_function(value, where)
        elif not self._add_held(value, where) and not self._add_named(value, where):
            raise UnknownCodeError(f"{where} is a {kind.__module__}.{kind.__qualname__}")

    def _known(self, module: str | None, where: str) -> str:
        """The name of a module that a value is from, if the value may count by its name."""
        top = (module or "").partition(".")[0]
        if module in self._modules or top in LIBRARIES or top in sys.stdlib_module_names:
            return str(module)
        if top == PACKAGE and hasattr(sys.modules.get(str(module)), "__path__"):
            return str(module)
        raise UnknownCodeError(f"{where} is from {module}")

    def _add_function(self, function: types.FunctionType, where: str) -> None:
        module = function.__module__
        is_made = (module or "").startswith("namedtuple_")  # by Python, for a NamedTuple
        self._put(module if is_made else self._known(module, where), function.__qualname__)
        if not is_made and module not in self._modules:
            return
        self.add(function.__code__, where)
        self.add(function.__defaults__, where)
        self.add(function.__kwdefaults__, where)
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                self._put("empty")
            else:
                self.add(held, f"{where}, closure")
        self.add(vars(function), where)

    def _add_class(self, value: type, where: str) -> None:
        module = self._known(value.__module__, where)
        self._put(module, value.__qualname__)
        if module not in self._modules:
            return
        for base in value.__bases__:
            self.add(base, where)
        for name, held in vars(value).items():
            if name not in _NOT_CODE:
                self._put(name)
                self.add(held, f"{where}.{name}")

    def _add_held(self, value: Any, where: str) -> bool:
        """Count a value by what it holds; whether it is one of those."""
        if isinstance(value, tuple | list):
            parts: Iterable[Any] = value
        elif isinstance(value, set | frozenset):
            parts = sorted(value, key=repr)
        elif isinstance(value, Mapping):
            parts = [part for item in value.items() for part in item]
        elif isinstance(value, enum.Enum):
            parts = type(value), value.name
        elif isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
        elif isinstance(value, property):
            parts = value.fget, value.fset, value.fdel
        elif isinstance(value, staticmethod | classmethod | functools.cached_property):
            parts = [getattr(value, "__func__", None) or value.func]  # pyright: ignore
        elif isinstance(value, logging.Logger):
            parts = [value.name]  # not its level: what is said changes nothing
        elif isinstance(value, inspect.Signature):
            parts = [(its.name, its.kind, its.default) for its in value.parameters.values()]
        elif isinstance(value, weakref.ref):
            parts = [value()]
        elif isinstance(value, types.MethodType):
            parts = value.__func__, value.__self__
        elif isinstance(value, dataclasses.Field):
            parts = value.name, value.default, value.default_factory, value.init, value.kw_only
        elif dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            parts = [type(value), *(getattr(value, name, None) for name in names)]
        elif isinstance(value, re.Pattern):
            parts = value.pattern, value.flags
        elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
            parts = str(value.dtype), value.shape, value.tobytes()
        elif callable(value) and hasattr(value, "__wrapped__"):  # of jit, of a cache
            parts = [value.__wrapped__]  # pyright: ignore[reportFunctionMemberAccess]
        elif type(value).__module__ in self._modules and not hasattr(value, "__slots__"):
            parts = type(value), vars(value)
        else:
            return False
        self._put("holds")
        for part in parts:
            self.add(part, where)
        return True

    def _add_named(self, value: Any, where: str) -> bool:
        """Count a value of a library by its text; whether that tells it from another."""
        module = getattr(value, "__module__", None)
        if isinstance(value, types.BuiltinFunctionType | types.WrapperDescriptorType) or (
            callable(value) and isinstance(module, str) and hasattr(value, "__qualname__")
        ):
            self._put(self._known(module or "builtins", where), value.__qualname__)
            return True
        if type(value) in _STATELESS or getattr(value, "__dict__", None) == {}:
            self._known(type(value).__module__, where)
            return True
        text = repr(value)
        if re.search(r" at 0x[0-9a-f]+", text):
            return False
        self._known(type(value).__module__, where)
        self._put(text)
        return True
