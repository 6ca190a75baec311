# SPDX-License-Identifier: Apache-2.0
"""Every axis of an annotation is in the glossary."""

import ast
import re
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

from detjax import array_types
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.rms_norm.api import rms_norm

PACKAGE = Path(array_types.__file__).parent
DTYPES = ("Activation", "BFloat16", "Bool", "Float32", "Int32", "UInt32")


def glossary() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \| ", array_types.__doc__ or "", re.M)
    letters = [letter for row in rows for letter in re.findall(r"`(\w)`", row)]
    assert len(letters) == len(set(letters)), "a letter has two meanings"
    return set(letters)


def unknown_axes(source: str) -> list[str]:
    """Axes of annotations that are no letter of the glossary, in either case."""
    known, found = glossary(), []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Subscript) and ast.unparse(node.value) in DTYPES):
            continue
        axes = node.slice.elts[1] if isinstance(node.slice, ast.Tuple) else None
        assert isinstance(axes, ast.Constant), ast.unparse(node)
        found += [
            f"line {node.lineno}: {axis} of {axes.value!r}"
            for axis in axes.value.split()
            if not (axis.isdigit() or axis in ("half", "...") or axis.upper() in known)
        ]
    return found


def test_every_axis_is_in_the_glossary():
    found = {
        str(path.relative_to(PACKAGE)): axes
        for path in sorted(PACKAGE.rglob("*.py"))
        if (axes := unknown_axes(path.read_text()))
    }
    assert not found


@pytest.mark.control
def test_control_an_unknown_axis_is_found():
    assert unknown_axes('x: Float32[Array, "M W half 2"]') == ["line 1: W of 'M W half 2'"]


def test_shapes_are_checked_at_each_call():
    """The import hook of `conftest.py` has every module with array types."""
    one, row = jnp.zeros((2, 8)), jnp.zeros(8)
    with pytest.raises(jaxtyping.TypeCheckError, match="gain"):
        rms_norm(one, row[:, None], eps=1e-5, backend=Backend.PORTABLE)
