# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices, strict promotion, one cache of programs, and skips that count."""

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import jaxtyping
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from .shards import ShardPlugin, add_options

# WHY: a thread of an interpreted kernel holds one of XLA's threads while it waits for another, and
# XLA has no more of them than processors or devices: 16 threads of a cluster stood still on two.
os.environ.setdefault("PJRT_NPROC", "32")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

MIN_COMPILE_S = 0.2
"""Programs that took less to compile are not worth a file."""

MAX_CACHE_BYTES = 16 << 30
"""More than any run needs. A bound makes JAX lock the folder, so no worker reads half a file."""

KEPT = "JAX_COMPILATION_CACHE_DIR"
"""The folder of programs to keep between runs; a run without it makes one and removes it."""

SLOW_TESTS = pytest.StashKey[list[str]]()
"""Names of the slow tests that were collected, before `-m` deselects any."""

_programs = pytest.StashKey[str]()
_is_temporary = pytest.StashKey[bool]()


def modules_with_array_types() -> list[str]:
    """Name the modules of detjax that import its array types. None is imported for it."""
    spec = importlib.util.find_spec("detjax")
    assert spec is not None and spec.submodule_search_locations
    (folder,) = map(Path, spec.submodule_search_locations)
    return [
        ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for path in sorted(folder.rglob("*.py"))
        if "array_types import" in path.read_text()
    ]


# Shapes and dtypes are checked at each call. Modules without them are left to pyright.
# WHY: here, because the conftest.py of a folder that is named is read before pytest_configure.
jaxtyping.install_import_hook(modules_with_array_types(), "beartype.beartype")


def pytest_addoption(parser):
    """Options of the shards."""
    add_options(parser)


def pytest_configure(config):
    """Many tests compile the same programs: all workers of a run share them.

    What is proven of new processes is proven in processes of their own, which are not told of the
    folder and compile afresh.
    """
    config.pluginmanager.register(ShardPlugin(config))
    workerinput = getattr(config, "workerinput", None)
    kept = os.environ.pop(KEPT, None)
    if workerinput is not None:
        folder = workerinput["programs"]
    elif kept is not None:
        folder = kept
    else:
        folder = tempfile.mkdtemp(prefix="detjax-programs-")
    config.stash[_programs] = folder
    config.stash[_is_temporary] = workerinput is None and kept is None
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker of pytest-xdist where the programs are."""
    node.workerinput["programs"] = node.config.stash[_programs]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Import test modules from the end in every second worker of pytest-xdist.

    pytest compiles a test module anew, with its own asserts, where no bytecode of it is kept. That
    takes half of a collection. So two workers meet in the middle, and each reads what the other has
    written.
    """
    worker = getattr(session.config, "workerinput", {}).get("workerid", "gw0")
    if int(worker.removeprefix("gw")) % 2 == 0 or sys.dont_write_bytecode:
        return
    root = session.config.rootpath
    folders = [Path(arg) for arg in session.config.args if Path(arg).is_dir()]
    for path in sorted({p for f in folders for p in f.resolve().rglob("test_*.py")}, reverse=True):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # its collection says it again
            importlib.import_module(name)


def pytest_unconfigure(config):
    """Remove a folder that this run has made."""
    if config.stash.get(_is_temporary, False):
        shutil.rmtree(config.stash[_programs], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Start JAX before a test runs the command, which would ask for devices of its own."""
    assert len(jax.devices("cpu")) == 8


def _num_gpus() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Of a test with `quick_cases` mark the other cases slow.

    Raises:
        pytest.Collector.CollectError: If the test has no case of a name.
    """
    made = yield
    if isinstance(made, list) and made and (marker := made[0].get_closest_marker("quick_cases")):
        if unknown := set(marker.args) - {item.callspec.id for item in made}:
            raise pytest.Collector.CollectError(f"{name} has no case {sorted(unknown)}")
        for item in made:
            if item.callspec.id not in marker.args:
                item.add_marker("slow")
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Skip GPU tests where there are too few GPUs; fail them there if DETJAX_NO_SKIP=1.

    What is `nightly` is `slow` too, so `-m "not slow"` leaves out both.
    """
    must_run = os.environ.get("DETJAX_NO_SKIP") == "1"
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else int(item.get_closest_marker("gpu") is not None)
        if needed and not must_run and needed > _num_gpus():
            reason = f"needs {needed} Hopper GPU(s), {_num_gpus()} here"
            item.add_marker(pytest.mark.skip(reason=reason))
    config.stash[SLOW_TESTS] = [item.nodeid for item in items if item.get_closest_marker("slow")]


GPU_TEST_S = 300
"""Most seconds of a GPU test beyond its own limit, compiling included. A kernel that waits without
end never returns, and a run that is cut off would count its test neither as passed nor as failed.
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """End the process of a GPU test that hangs; xdist then counts the test as failed, by name."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    marker = item.get_closest_marker("timeout")
    limit_s = GPU_TEST_S + (marker.args[0] if marker else 0)
    # WHY: standard error as it was before pytest took it.
    file = item.config.stash.get(fault_handler_stderr_fd_key, sys.__stderr__)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a skip into a failure under DETJAX_NO_SKIP=1: a skipped proof is a false green."""
    report = yield
    if (
        os.environ.get("DETJAX_NO_SKIP") == "1"
        and report.skipped
        and not hasattr(report, "wasxfail")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped under DETJAX_NO_SKIP=1: {report.longrepr}"
    return report


MOST_MAPPINGS = 25_000
"""Of a worker's memory, at the end of a test. Linux allows 65,530, and a program that XLA loads on
a CPU takes dozens: beyond the limit the next one to load ends the process."""


def _num_mappings() -> int:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:  # not Linux
        return 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Between two modules, let go of the engines and programs that their tests have shared."""
    if nextitem is not None and nextitem.module is item.module:
        return
    if _num_mappings() < MOST_MAPPINGS:
        return
    for name, module in list(sys.modules.items()):
        if name == "tests" or name.startswith("tests."):
            for shared, value in list(vars(module).items()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
                elif shared == "_PROGRAMS":  # of the models that were just let go
                    value.clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def cache_folder(tmp_path):
    """An empty folder, to keep programs in for a test; that of the run comes back behind it."""
    from detjax.compilation import kept_programs

    names = (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes", "jax_compilation_cache_max_size",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_max_size", -1)
    kept_programs.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    kept_programs.reset_cache()
