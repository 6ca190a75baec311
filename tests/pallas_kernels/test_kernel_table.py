# SPDX-License-Identifier: Apache-2.0
"""A kernel set is imported when it is asked for, and what runs another one never imports it."""

import sys
from types import ModuleType

import pytest

from detjax.compilation.loaded_code import _file, reached_modules
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS, LazyModule, module_name
from detjax.parallel.exchange import modules_of

ROOTS = ("detjax.engine.running.programs", "detjax.models.loading", "detjax.models.abstract")
MOSAIC = "jax.experimental.mosaic", "import mosaic_gpu"


def importers_of_mosaic(backend: Backend) -> list[str]:
    """Modules that name Mosaic, of those that a backend's programs reach; not where it is lazy."""
    modules = reached_modules((*ROOTS, *modules_of(backend)))
    lines = [(name, line) for name in modules for line in _file(name).read_text().splitlines()]
    return [name for name, line in lines if any(word in line for word in MOSAIC)]


@pytest.mark.parametrize("backend", [Backend.PORTABLE, Backend.REFERENCE])
def test_programs_of_a_cpu_reach_no_kernel_of_a_gpu(backend):
    """Importing Mosaic takes a CPU's start a third of a second, and hashing it as much again."""
    named = set(importers_of_mosaic(backend))
    assert named <= {"detjax.compilation.lowered_kernels"}, "which imports it in a function"
    assert f"detjax.pallas_kernels.{backend.value}" in reached_modules(modules_of(backend))


@pytest.mark.control
def test_control_programs_of_a_gpu_do():
    assert len(set(importers_of_mosaic(Backend.SM90))) > 10
    assert modules_of(Backend.SM90) == (
        "detjax.pallas_kernels.sm90", "detjax.parallel.sm90_exchange_kernels"
    )  # fmt: skip


@pytest.fixture
def lazy(monkeypatch) -> LazyModule:
    """Of a module that must not be imported, one of whose attributes another has."""
    other = ModuleType("made_up_other")
    vars(other)["why"] = "of the other"
    monkeypatch.setitem(sys.modules, "made_up_other", other)
    return LazyModule("made_up", {"why": "made_up_other"})


def test_what_another_module_knows_is_asked_there(lazy, monkeypatch):
    assert lazy.why == "of the other"
    with pytest.raises(ModuleNotFoundError, match="made_up"):
        _ = lazy.more
    # Once it is imported it answers itself, with whatever a test has put there.
    module = ModuleType("made_up")
    monkeypatch.setitem(sys.modules, "made_up", module)
    with pytest.raises(AttributeError):
        _ = lazy.why
    vars(module)["why"] = "its own"
    assert lazy.why == "its own"
    with monkeypatch.context() as patch:
        patch.setattr(lazy, "why", "of a test")
        assert lazy.why == "of a test" and vars(module)["why"] == "its own"
    assert lazy.why == "its own"


def test_a_set_that_is_made_up_has_no_name():
    assert module_name(KERNELS[Backend.PORTABLE]) == ("detjax.pallas_kernels.portable",)
    assert module_name(ModuleType("made_up")) == ()
