# SPDX-License-Identifier: Apache-2.0
"""A hash of the code that is loaded: functions and constants as they are now, not as files say.

The hash of the package's files names a build. A process may run something else: a constant that a
notebook has set, a function that a test has replaced, a file that was edited after it was imported.
What depends on the code that runs, as a kept executable does, needs this hash beside that one.
"""

import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
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


Root = str | tuple[str, ...]
"""The name of a module of this package, or of several."""


@functools.cache
def reached_modules(root: Root) -> tuple[str, ...]:
    """Names of the modules of this package that modules import, themselves or through others.

    As their files say, inside functions too, so that every process has the same list.
    """
    names: set[str] = set()
    todo = [root] if isinstance(root, str) else list(root)
    while todo:
        name = todo.pop()
        if name not in names and _file(name) is not None:
            names.add(name)
            todo += _imports_of(name)
    return tuple(sorted(names))


@functools.cache
def _imports_of(module: str) -> tuple[str, ...]:
    """What the file of a module imports."""
    path = _file(module)
    assert path is not None
    return tuple(_imported(path.read_text(encoding="utf-8")))


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
    return _files().get(module)


@functools.cache  # WHY: a start asks of thousands of names whether there is such a file
def _files() -> dict[str, Path]:
    """The file of each module of this package."""
    root, found = Path(__file__).parents[1], {}
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = (PACKAGE, *path.relative_to(root).with_suffix("").parts)
                found[".".join(parts[:-1] if name == "__init__.py" else parts)] = path
    return found


def this_moment() -> int:
    """A moment, for those who ask `loaded_code_hash` several times for one request."""
    begun = _begun().get()
    return now() if begun is None else begun


def now() -> int:
    """A moment that comes after all others, also inside `one_moment`."""
    return _module_hashes().moment()


@contextlib.contextmanager
def one_moment() -> Iterator[None]:
    """What this thread asks for meanwhile is one request, of the moment in which it begins."""
    token = _begun().set(this_moment())
    try:
        yield
    finally:
        _begun().reset(token)


@functools.cache  # WHY: not a constant of this module: those count
def _begun() -> contextvars.ContextVar[int | None]:
    return contextvars.ContextVar("_begun", default=None)


def loaded_code_hash(root: Root, *values: Any, asked: int | None = None) -> str:
    """Hash what modules and the modules that they reach hold now, and some values.

    Functions count by their bytecode, defaults and closures; classes by what they define; other
    values by what they hold; what a library defines by its name. Lines, files and annotations do
    not count.

    Args:
        root: Name of a module of this package, or names of several.
        values: Whatever else should count.
        asked: A moment, as `this_moment` gives it; modules count as they were at some time after
            it. `this_moment()` if None.

    Returns:
        64 hexadecimal digits; the same in every process that has loaded the same.

    Raises:
        UnknownCodeError: Naming a value of which nothing tells whether it is the same in another
            process, such as a function from outside the package.
    """
    hashes = _module_hashes()
    modules = hashes.reached(root)
    walk = _Walk(modules)
    walk.add(hashes.get(modules, asked), "the modules")
    for value in values:
        walk.add(value, "an argument")
    _check_named(walk.named, modules)
    return walk.digest()


class _ModuleHashes:
    """Hashes of what modules hold, for several threads that ask at once."""

    def __init__(self) -> None:
        self._moments = itertools.count()
        self._reaching, self._walking = threading.Lock(), threading.Lock()
        self._last: dict[str, tuple[int, str, dict[str, str]]] = {}

    def moment(self) -> int:
        return next(self._moments)

    def reached(self, root: Root) -> tuple[str, ...]:
        """As `reached_modules`, for several threads that ask at once."""
        with self._reaching:
            return reached_modules(root)

    def get(self, modules: tuple[str, ...], asked: int | None) -> str:
        """Hash what modules hold at some time after a moment, by default `this_moment()`.

        Threads that ask while another walks share the walks that begin when it is done. Modules
        that are reached from several roots are walked once for all of them.
        """
        asked = this_moment() if asked is None else asked
        total = hashlib.sha256()
        with self._walking:
            for name in modules:
                if name not in self._last or self._last[name][0] <= asked:
                    begun, walk = self.moment(), _Walk(modules)
                    walk.add_module(importlib.import_module(name))
                    self._last[name] = begun, walk.digest(), walk.named
                _, digest, named = self._last[name]
                _check_named(named, modules)
                total.update(digest.encode())
        return total.hexdigest()


@functools.cache  # WHY: not a constant of this module: those count
def _module_hashes() -> _ModuleHashes:
    return _ModuleHashes()


@functools.cache  # WHY: code never changes, and is three quarters of what a walk has to hash
def _code_digest(code: types.CodeType) -> bytes:
    total = hashlib.sha256()
    for name in _CODE_FIELDS:
        total.update(repr(_plain_constant(getattr(code, name))).encode() + b"\n")
    return total.digest()


def _plain_constant(value: Any) -> Any:
    """A constant of code as a value whose text tells it from any other."""
    if isinstance(value, types.CodeType):
        return "code", _code_digest(value)
    if isinstance(value, tuple):
        return tuple(map(_plain_constant, value))
    if isinstance(value, frozenset):
        return "set", sorted(repr(_plain_constant(part)) for part in value)
    return ("plain", value) if isinstance(value, str) else value


def _check_named(named: Mapping[str, str], modules: Collection[str]) -> None:
    """Raise `UnknownCodeError` if a value counts by the name of a module that is not walked."""
    for module, where in named.items():
        if module not in modules:
            raise UnknownCodeError(f"{where} is from {module}")


class _Walk:
    """One pass over values. A value that comes again counts by its number.

    What another module of the package has under the name that it was defined with counts by that
    name: that module is walked by itself.

    Attributes:
        named: Modules of such names, and where the first was found.
    """

    def __init__(self, modules: Iterable[str]):
        self._parts: list[str] = []
        self._modules = frozenset(modules)
        self._module = ""
        self.named: dict[str, str] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no other value gets the id of one that was seen

    def add_module(self, module: types.ModuleType) -> None:
        self._module = module.__name__
        self._put("module", module.__name__)
        for name, value in sorted(vars(module).items()):
            is_own = name.startswith("__") and name.endswith("__")
            # Which modules a package has as attributes is what was imported by now.
            if not is_own and sys.modules.get(f"{module.__name__}.{name}") is not value:
                self._put(name)
                self.add(value, f"{module.__name__}.{name}")

    def _is_named(self, value: Any, where: str) -> bool:
        """Count what another module of the package defines by its name there, if it is that."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str) or module == self._module:
            return False
        if not module.startswith(f"{PACKAGE}.") or module not in self._modules:
            return False
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not value:
            return False
        self.named.setdefault(module, where)
        self._put("named", module, name)
        return True

    def digest(self) -> str:
        """Of all that was counted."""
        held = "".join([f"{len(part)} {part}\n" for part in self._parts])
        return hashlib.sha256(held.encode("utf-8", "surrogatepass")).hexdigest()

    def _put(self, *parts: str) -> None:
        self._parts += parts

    def add(self, value: Any, where: str) -> None:
        """Count a value; `where` is for people."""
        kind = type(value)
        if kind in _PLAIN:
            self._put(kind.__name__, repr(value))
            return
        if id(value) in self._numbers:
            self._put("again", str(self._numbers[id(value)]))
            return
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if callable(value) and self._is_named(value, where):
            return
        self._put(kind.__module__, kind.__qualname__)
        if isinstance(value, types.CodeType):
            self._put(_code_digest(value).hex())
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
        elif type(value).__module__ in self._modules and not hasattr(type(value), "__slots__"):
            parts = type(value), vars(value)
        elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
            parts = str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
        elif callable(value) and hasattr(value, "__wrapped__"):  # of jit, of a cache
            parts = [value.__wrapped__]  # pyright: ignore[reportFunctionMemberAccess]
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
