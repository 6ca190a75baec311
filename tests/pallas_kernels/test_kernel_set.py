# SPDX-License-Identifier: Apache-2.0
"""The table of kernel sets: complete, the only place that tells backends apart, and enough."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import detjax.pallas_kernels
from detjax.cli.parser import make_parser
from detjax.engine.config import EngineConfig, max_draft_fraction
from detjax.pallas_kernels import portable
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import choose_backend
from detjax.pallas_kernels.kernel_set import KernelSet
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.exchange import why_no_exchange
from detjax.parallel.mesh import make_mesh
from detjax.testing.dummies import answers, dummy_config, dummy_model, mixed_requests

PACKAGE = Path(detjax.pallas_kernels.__file__).parents[1]


def api_operations() -> set[str]:
    """Public functions of every operation's `api`, and of products of 8 bits."""
    names = set()
    for info in pkgutil.walk_packages(detjax.pallas_kernels.__path__, "detjax.pallas_kernels."):
        if info.name.endswith((".api", ".w8a8")):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                is_own = inspect.isfunction(value) and value.__module__ == module.__name__
                names |= {name} if is_own and name[0] != "_" else set()
    return names


def test_every_operation_is_in_the_kernel_set():
    properties = {"why_not_here", "what_to_install", "where_it_runs"}
    methods = {name for name, value in vars(KernelSet).items() if inspect.isfunction(value)}
    assert {m for m in methods if m[0] != "_"} - properties == api_operations()


@pytest.mark.parametrize("backend", Backend)
def test_every_backend_has_a_whole_kernel_set(backend):
    """Names and signatures; a checker of types does not look into jitted functions."""
    kernels = KERNELS[backend]
    for name in KernelSet.__annotations__:
        assert hasattr(kernels, name), name
    for name, method in vars(KernelSet).items():
        if name[0] == "_" or not inspect.isfunction(method):
            continue
        _, *wanted = inspect.signature(method).parameters.values()
        # What more it has, as an option for tests, has a default.
        had = inspect.signature(getattr(kernels, name)).parameters
        assert [p.name for p in wanted] == [n for n in had if n in {p.name for p in wanted}], name
        extra = [p for n, p in had.items() if n not in {p.name for p in wanted}]
        assert all(p.default is not p.empty for p in extra), name


@pytest.mark.parametrize("name", ["auto", *(backend.value for backend in Backend)])
def test_the_command_offers_every_backend(name):
    """Its arguments are read without JAX, so they do not ask the table."""
    assert make_parser().parse_args(["--backend", name]).backend == name


@pytest.fixture
def third(monkeypatch) -> Backend:
    """Another backend: the portable kernels under another name, and how often each was called."""
    backend = object.__new__(Backend)
    backend._name_, backend._value_, backend.platform = "THIRD", "third", "cpu"
    backend.mma = ""
    kernels = ModuleType("third")
    vars(kernels).update(vars(portable), calls={})

    def counted(name, function):
        def call(*args, **options):
            kernels.calls[name] = kernels.calls.get(name, 0) + 1
            return function(*args, **options)

        return call

    for name in api_operations():
        setattr(kernels, name, counted(name, getattr(portable, name)))
    monkeypatch.setitem(KERNELS, backend, kernels)
    return backend


@pytest.mark.slow
def test_another_backend_needs_an_entry_alone(third):
    """A whole model, prefill to choice, on the kernels of the entry."""
    config = dummy_config(num_heads=4, num_kv_heads=2, num_layers=2)
    requests = mixed_requests(5, vocab_size=config.vocab_size, max_tokens=3)
    got = answers(dummy_model(config, backend=third), requests, batch_size=2)
    want = answers(dummy_model(config, backend=Backend.PORTABLE), requests, batch_size=2)
    assert [g.digest() for g in got] == [w.digest() for w in want]
    assert {
        "embed", "norm_linear", "rope_attention", "linear_add_rms_norm", "linear_swiglu", "linear",
        "block_stats", "gumbel_scores", "nucleus_sums", "log_sum_exp", "log_probs",
    } <= set(KERNELS[third].calls)  # fmt: skip


def test_properties_are_asked_of_the_entry(third, monkeypatch):
    assert choose_backend(third).backend is third
    assert why_no_exchange(make_mesh(1, 2), width=4096, backend=third) == (
        "the third backend exchanges through XLA's collectives"
    )
    engine = EngineConfig(batch_size=1, prefill_chunk=64, max_len=64)
    assert max_draft_fraction(engine, steps_beat_xla=KERNELS[third].steps_beat_xla) == 1.0
    monkeypatch.setattr(KERNELS[third], "steps_beat_xla", True)
    assert max_draft_fraction(engine, steps_beat_xla=KERNELS[third].steps_beat_xla) == 0.0
    monkeypatch.setattr(KERNELS[third], "why_not_here", lambda: "it is made up")
    with pytest.raises(
        ValueError, match="--backend third cannot run here: it is made up; --backend "
    ):
        choose_backend(third)


def told_apart(source: str) -> list[str]:
    """Comparisons with a member of `Backend`, and matches on one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in (inner for outer in parts for inner in ast.walk(outer)):
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "Backend":
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_nothing_tells_backends_apart_but_the_tables():
    found = [
        f"{path.relative_to(PACKAGE)}: {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for source in [path.read_text()]
        if "Backend." in source
        for line in told_apart(source)
    ]
    assert not found, "ask KERNELS[backend] instead"


@pytest.mark.control
def test_control_a_comparison_of_backends_is_found():
    assert told_apart("if backend is Backend.SM90 and x > 1: pass")
    assert told_apart("y = backend in (Backend.SM90, Backend.PORTABLE)")
    assert told_apart("match backend:\n    case Backend.SM90: pass")
    assert not told_apart("KERNELS = {Backend.SM90: sm90}")


def test_no_api_knows_an_implementation():
    """An `api` imports the table; only kernel sets and kernels import kernels."""
    for path in sorted(PACKAGE.glob("pallas_kernels/*/api.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module.rpartition(".")[2], *(alias.name for alias in node.names)}
                assert not names & {"portable", "sm90"}, path
