# SPDX-License-Identifier: Apache-2.0
"""A compiled program as bytes: the executable as its driver writes it, and JSON for the rest.

JAX pickles what it knows of a program beside the executable, and a pickle runs what it says. Here
shapes, shardings and trees are written as JSON. What is written is made again at once and compared,
so a program that JSON cannot describe is refused then.
"""

import dataclasses
import enum
import importlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

# WHY: how a loaded executable becomes a `Compiled` has no public name but the one that unpickles.
from jax._src import core, layout, linear_util, stages
from jax._src.interpreters import pxla
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxlib import xla_client

_PACKAGE = "detjax."
_LENGTH_BYTES = 8
_NONE_YET = ("unordered_effects", "ordered_effects", "keepalive", "host_callbacks")
_PLAIN = ("committed", "name")


class FormError(ValueError):
    """A program that cannot be written, or bytes that are none."""


def write_executable(compiled: jax.stages.Compiled) -> bytes:
    """The bytes of a program.

    Raises:
        FormError: If it has something that cannot be written.
    """
    program = getattr(compiled._executable, "_unloaded_executable", None)
    if not isinstance(program, pxla.UnloadedMeshExecutable) or compiled._params.const_args:
        raise FormError("it is no executable of its own")
    devices = list(program.device_list)
    described = _describe(program, compiled, devices)
    # As it comes back from a file, where there are no tuples.
    rebuilt = _rebuild(json.loads(json.dumps(described)), devices)
    for name, value in rebuilt.items():
        if name not in ("args", "out_tree", "no_kwargs") and value != getattr(program, name):
            raise FormError(f"its {name} cannot be described: {getattr(program, name)!r:.300}")
    args_info, out_tree = rebuilt["args"], rebuilt["out_tree"]
    if args_info != compiled.args_info or out_tree != compiled.out_tree:
        raise FormError(f"its trees cannot be described: {compiled.out_tree!r:.300}")
    head = json.dumps(described, separators=(",", ":")).encode()
    payload = program.backend.serialize_executable(program.xla_executable)
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head + payload


def read_executable(held: bytes, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Load what `write_executable` has written. Its machine code will run, so it must be trusted.

    Args:
        held: The bytes.
        devices: Where the program runs.

    Raises:
        FormError: If they are something else.
        Exception: Whatever a driver says of an executable that it cannot load.
    """
    begin = _LENGTH_BYTES + int.from_bytes(held[:_LENGTH_BYTES], "little")
    if begin > len(held):
        raise FormError("it is cut short")
    described = json.loads(held[_LENGTH_BYTES:begin])
    if [device.id for device in devices] != described["devices"]:
        raise FormError("it is of other devices")
    rebuilt = _rebuild(described, devices)
    args_info, out_tree = rebuilt.pop("args"), rebuilt.pop("out_tree")
    no_kwargs = rebuilt.pop("no_kwargs")
    device_list, client = xla_client.DeviceList(tuple(devices)), devices[0].client
    executable = client.deserialize_executable(held[begin:], executable_devices=device_list)
    program = pxla.UnloadedMeshExecutable(
        xla_executable=executable, device_list=device_list, backend=client, pgle_profiler=None,
        **rebuilt,
    )  # fmt: skip
    return jax.stages.Compiled(program.load(), [], args_info, out_tree, no_kwargs=no_kwargs)


def _describe(
    program: pxla.UnloadedMeshExecutable, compiled: jax.stages.Compiled, devices: list[jax.Device]
) -> dict[str, Any]:
    for name in _NONE_YET:
        if getattr(program, name):
            raise FormError(f"it has {name}")
    if program.mut is not None or program.pgle_profiler is not None:
        raise FormError("it has references or a profile")
    shardings = [*program.input_shardings, *program.output_shardings]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    mesh = next(iter(meshes), None)
    if len(meshes) > 1 or not isinstance(mesh, Mesh | None):
        raise FormError(f"it has other meshes: {meshes!r:.200}")
    info = program.all_args_info
    args, args_tree = jax.tree.flatten(compiled.args_info)
    return {
        "devices": [device.id for device in devices],
        "mesh": None if mesh is None else _mesh_values(mesh),
        **{name: getattr(program, name) for name in _PLAIN},
        "input_avals": [_aval_values(aval, mesh) for aval in program.input_avals],
        "output_avals": [_aval_values(aval, mesh) for aval in program.output_avals],
        "input_shardings": [_sharding_values(s) for s in program.input_shardings],
        "output_shardings": [_sharding_values(s) for s in program.output_shardings],
        "kept_var_idx": sorted(program.kept_var_idx),
        **{name: [_layout_values(of) for of in getattr(program, name)] for name in _LAYOUTS},
        "all_args_info": None if info is None else {
            "in_avals": [_aval_values(aval, mesh) for aval in info.in_avals],
            "debug_info": info.debug_info._asdict(),
        },
        "args": [[_aval_values(arg._aval, mesh), arg.donated] for arg in args],
        "args_tree": _tree_values(args_tree),
        "out_tree": _tree_values(compiled.out_tree),
        "no_kwargs": compiled._no_kwargs,
    }  # fmt: skip


_LAYOUTS = ("xla_in_layouts", "dispatch_in_layouts", "xla_out_layouts")


def _rebuild(described: dict[str, Any], devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Fields of `UnloadedMeshExecutable`, and `args`, `out_tree` and `no_kwargs` of `Compiled`."""
    mesh = None if described["mesh"] is None else _mesh(described["mesh"], devices)
    info = described["all_args_info"]
    args = [
        stages.ArgInfo(_aval=_aval(aval, mesh), donated=donated)
        for aval, donated in described["args"]
    ]
    return {
        **{name: described[name] for name in _PLAIN},
        **{name: [] for name in _NONE_YET},
        "mut": None,
        "input_avals": [_aval(values, mesh) for values in described["input_avals"]],
        "output_avals": [_aval(values, mesh) for values in described["output_avals"]],
        "input_shardings": [_sharding(v, mesh, devices) for v in described["input_shardings"]],
        "output_shardings": [_sharding(v, mesh, devices) for v in described["output_shardings"]],
        "kept_var_idx": set(described["kept_var_idx"]),
        **{name: [_layout(values) for values in described[name]] for name in _LAYOUTS},
        "all_args_info": None if info is None else pxla.AllArgsInfo(
            [_aval(values, mesh) for values in info["in_avals"]],
            linear_util.DebugInfo(**{k: _tuples(v) for k, v in info["debug_info"].items()}),
        ),
        "args": _tree(described["args_tree"]).unflatten(args),
        "out_tree": _tree(described["out_tree"]),
        "no_kwargs": described["no_kwargs"],
    }  # fmt: skip


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -------------------------------------------------------------------------------- meshes and shapes


def _mesh_values(mesh: Mesh) -> dict[str, Any]:
    return {
        "names": list(mesh.axis_names),
        "shape": list(mesh.devices.shape),
        "devices": [device.id for device in mesh.devices.flat],
        "types": [kind.name for kind in mesh.axis_types],
    }


def _mesh(values: dict[str, Any], devices: Sequence[jax.Device]) -> Mesh:
    by_id = {device.id: device for device in devices}
    places = np.array([by_id[i] for i in values["devices"]]).reshape(values["shape"])
    types = tuple(AxisType[name] for name in values["types"])
    return Mesh(places, tuple(values["names"]), axis_types=types)


def _aval_values(aval: Any, mesh: Mesh | None) -> list[Any]:
    if not isinstance(aval, core.ShapedArray):
        raise FormError(f"it has an operand that is no array: {aval!r:.100}")
    is_on_mesh = mesh is not None and aval.sharding.mesh == mesh.abstract_mesh
    return [list(aval.shape), aval.dtype.name, aval.weak_type, is_on_mesh]


def _aval(values: list[Any], mesh: Mesh | None) -> core.ShapedArray:
    shape, dtype, weak_type, is_on_mesh = values
    if not is_on_mesh:
        return core.ShapedArray(tuple(shape), jax.numpy.dtype(dtype), weak_type=weak_type)
    assert mesh is not None
    sharding = NamedSharding(mesh.abstract_mesh, PartitionSpec(*[None] * len(shape)))
    return core.ShapedArray(
        tuple(shape), jax.numpy.dtype(dtype), weak_type=weak_type, sharding=sharding
    )


def _sharding_values(sharding: Any) -> dict[str, Any]:
    if isinstance(sharding, NamedSharding):
        return {"spec": list(sharding.spec), "memory_kind": sharding.memory_kind}
    if isinstance(sharding, SingleDeviceSharding):
        return {"memory_kind": sharding.memory_kind}
    raise FormError(f"it has a sharding of another kind: {sharding!r:.200}")


def _sharding(values: dict[str, Any], mesh: Mesh | None, devices: Sequence[jax.Device]) -> Any:
    if "spec" not in values:
        return SingleDeviceSharding(devices[0], memory_kind=values["memory_kind"])
    assert mesh is not None
    spec = PartitionSpec(*map(_tuples, values["spec"]))
    return NamedSharding(mesh, spec, memory_kind=values["memory_kind"])


def _layout_values(of: Any) -> dict[str, Any] | None:
    if of is None:
        return None
    if not isinstance(of, layout.Layout):
        raise FormError(f"it has a layout of another kind: {of!r:.200}")
    return {
        "major_to_minor": of.major_to_minor,
        "tiling": of.tiling,
        "sub_byte_element_size_in_bits": of.sub_byte_element_size_in_bits,
    }


def _layout(values: dict[str, Any] | None) -> layout.Layout | None:
    if values is None:
        return None
    return layout.Layout(**{name: _tuples(value) for name, value in values.items()})


# ------------------------------------------------------------------------------------------- trees


def _tree_values(tree: Any) -> Any:
    """A tree of tuples, lists, dictionaries, None and dataclasses of this package."""
    node = tree.node_data()
    if node is None:
        return "*" if tree.num_leaves else None
    kind, data = node
    children = [_tree_values(child) for child in tree.children()]
    if kind in (tuple, list):
        return {kind.__name__: children}
    if kind is dict:
        return {"dict": children, "keys": data}
    if kind is type(None):
        return None
    if not (isinstance(data, tuple) and kind.__module__.startswith(_PACKAGE)):
        raise FormError(f"it has a tree of another kind: {kind!r}")
    named = {"module": kind.__module__, "name": kind.__name__}
    return {"class": children, **named, "static": list(map(_static_value, data))}


def _static_value(value: Any) -> Any:
    """A static field of a dataclass: a plain value, or a member of an enumeration."""
    if isinstance(value, enum.Enum):
        kind = type(value)
        if not kind.__module__.startswith(_PACKAGE):
            raise FormError(f"it has a tree with {value!r}")
        return {"module": kind.__module__, "enum": kind.__name__, "member": value.name}
    # What JSON writes of a float is read as the same float.
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise FormError(f"it has a tree with {value!r:.200}")
    return value


def _static_example(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    kind = _class(values["module"], values["enum"])
    if not issubclass(kind, enum.Enum) or values["member"] not in kind.__members__:
        raise FormError(f"{values['enum']} has no {values['member']!r}")
    return kind[values["member"]]


def _class(module: str, name: str) -> type:
    """A class of this package by its name."""
    if not module.startswith(_PACKAGE):
        raise FormError(f"{module} is no module of this package")
    kind = getattr(importlib.import_module(module), name)
    if not isinstance(kind, type):
        raise FormError(f"{name} is no class")
    return kind


def _tree(values: Any) -> Any:
    return jax.tree.structure(_example(values))


def _example(values: Any) -> Any:
    """A value of the tree, whose leaves say nothing."""
    if values is None:
        return None
    if values == "*":
        return 0
    for kind in (tuple, list):
        if kind.__name__ in values:
            return kind(map(_example, values[kind.__name__]))
    if "dict" in values:
        return dict(zip(values["keys"], map(_example, values["dict"]), strict=True))
    kind = _class(values["module"], values["name"])
    if not dataclasses.is_dataclass(kind):
        raise FormError(f"{values['name']} is no dataclass")
    fields = dataclasses.fields(kind)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if field.name not in static]
    found = dict(zip(arrays, map(_example, values["class"]), strict=True))
    return kind(**found, **dict(zip(static, map(_static_example, values["static"]), strict=True)))
