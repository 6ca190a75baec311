# SPDX-License-Identifier: Apache-2.0
"""The tensors that the decoder reads, from those that a family's checkpoint holds.

Most families store what the decoder reads. Others name a norm otherwise, join projections, pair
the channels of rotary embedding otherwise, or leave a number out of a weight that belongs to it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from detjax.models.config import ModelConfig, RopeConfig
from detjax.models.family import ExpertStack, Family
from detjax.models.hf_config import read_quantization
from detjax.models.params import EMBED_NAME, HEAD_NAME, TensorSpec, tensor_specs
from detjax.models.quantization.expand import ExpandedRows, expand_tensors
from detjax.models.registry import family_named
from detjax.models.weights.files import StoredTensor, open_tensors
from detjax.models.weights.host import have_same_bits

ROTATED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm", "q_norm_whole", "k_norm_whole")
"""Tensors whose rows are channels that rotary embedding pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a tensor that the decoder reads is made of one of a checkpoint.

    Attributes:
        name: Of the decoder's tensor.
        source: The checkpoint's.
        source_rows: Rows of that.
        start: The first row that is read.
        num_rows: Rows that are read.
        head_order: Within each head, which channel comes where; empty leaves them as they are.
        head_rows: Rows of a head in the checkpoint's tensor, of which `head_order` chooses; 0 is
            as many as it chooses.
        offset: Added to each value.
        scale: Multiplied with the sum.
    """

    name: str
    source: str
    source_rows: int
    start: int
    num_rows: int
    head_order: tuple[int, ...] = ()
    head_rows: int = 0
    offset: float = 0.0
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint's tensor is the decoder's."""
        moved = self.name != self.source or self.num_rows != self.source_rows or self.head_order
        return not moved and not self.changes_values

    @property
    def changes_values(self) -> bool:
        """Whether values are not those of the checkpoint."""
        return self.offset != 0 or self.scale != 1

    def source_shape_of(self, tensor: np.ndarray) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor, given the decoder's."""
        return self.source_rows, *tensor.shape[1:]

    def write(self, tensor: np.ndarray, out: np.ndarray) -> None:
        """Put the decoder's tensor, with a checkpoint's values, where it is read from."""
        out[self.order] = tensor

    def rows_of(self, rows: Any, shape: tuple[int, ...], where: str) -> "ReadRows | ExpandedRows":
        """Rows of the decoder's tensor, read when they are indexed; quantised ones stay that.

        Args:
            rows: The checkpoint's, of `shape`.
            shape: Of the checkpoint's tensor.
            where: Name of that tensor, for errors.

        Raises:
            ValueError: If it has another number of rows than the configuration makes it.
        """
        if shape[0] != self.source_rows:
            raise ValueError(
                f"{where} has shape {shape}, but config.json makes it {self.source_rows} rows; "
                "they are of different models"
            )
        if isinstance(rows, ExpandedRows) and not self.changes_values:
            return rows.moved(self.order)
        return ReadRows(self, rows)

    @property
    def order(self) -> np.ndarray:
        """Which row of the checkpoint's tensor each row is."""
        if not self.head_order:
            return np.arange(self.start, self.start + self.num_rows)
        num_heads = self.num_rows // len(self.head_order)
        head_rows = self.head_rows or len(self.head_order)
        rows = np.arange(self.start, self.start + num_heads * head_rows)
        return rows.reshape(num_heads, head_rows)[:, list(self.head_order)].reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertReading:
    """How a tensor of one expert is made of the tensor that holds those of all.

    Attributes:
        name: Of the decoder's tensor.
        source: The checkpoint's: [U, inputs, outputs] of matrices, [U, outputs] of biases; or
            [U, outputs, inputs].
        source_shape: Shape of that.
        expert: Which.
        outputs: Which outputs, one part after the other.
        is_output_first: Whether outputs are rows of the checkpoint's tensor, not columns.
    """

    name: str
    source: str
    source_shape: tuple[int, ...]
    expert: int
    outputs: tuple[slice, ...]
    is_output_first: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decoder's tensor: outputs, then inputs."""
        *inputs, num_outputs = self.source_shape[1:]
        if self.is_output_first:
            num_outputs, *inputs = self.source_shape[1:]
        return sum(len(range(num_outputs)[part]) for part in self.outputs), *inputs

    def source_shape_of(self, _: np.ndarray) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.source_shape

    def write(self, tensor: np.ndarray, out: np.ndarray) -> None:
        """Put an expert's tensor where it is read from."""
        start = 0
        for outputs in self.outputs:
            if self.is_output_first:
                part = out[self.expert, outputs]
            else:
                part = np.moveaxis(out[self.expert], -1, 0)[outputs]
            part[...] = tensor[start : start + len(part)]
            start += len(part)

    def rows_of(self, rows: Any, shape: tuple[int, ...], where: str) -> "ExpertOutputs":
        """Rows of the decoder's tensor, read when they are indexed.

        Args:
            rows: The checkpoint's, of `shape`.
            shape: Of the checkpoint's tensor.
            where: Name of that tensor, for errors.

        Raises:
            ValueError: If it has another shape than the configuration makes it.
        """
        if tuple(shape) != self.source_shape:
            raise ValueError(
                f"{where} has shape {tuple(shape)}, but config.json makes it {self.source_shape}; "
                "they are of different models"
            )
        return ExpertOutputs(self, rows)


class ExpertOutputs:
    """Outputs of one expert as rows; indexing it reads the tensor of all experts."""

    def __init__(self, reading: ExpertReading, rows: Any):
        """Keep the checkpoint's tensor, which is read when rows are asked for."""
        self._reading, self._rows = reading, rows

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read some rows, and some inputs of a matrix; the first index is a slice."""
        first, *inputs = index if isinstance(index, tuple) else (index,)
        reading = self._reading
        inputs = inputs or [slice(None)] * (len(reading.source_shape) - 2)
        low, high, _ = first.indices(reading.shape[0])
        parts, start = [], 0
        for outputs in reading.outputs:
            own = range(reading.source_shape[1 if reading.is_output_first else -1])[outputs]
            chosen = own[max(low - start, 0) : max(high - start, 0)]
            start += len(own)
            if chosen:
                which = slice(chosen.start, chosen.stop, chosen.step)
                if reading.is_output_first:
                    parts.append(np.asarray(self._rows[(reading.expert, which, *inputs)]))
                    continue
                parts.append(np.asarray(self._rows[(reading.expert, *inputs, which)]).T)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class ReadRows:
    """Rows of a decoder's tensor; indexing it reads the checkpoint's."""

    def __init__(self, reading: Reading, rows: Any):
        """Keep the checkpoint's rows, which are read when they are asked for."""
        self._reading, self._rows = reading, rows

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read some rows and columns; the first index is a slice."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        reading = self._reading
        if reading.head_order:
            values = np.asarray(self._rows[(reading.order[first], *rest)])
        else:
            start, stop, _ = first.indices(reading.num_rows)
            values = self._rows[(slice(start + reading.start, stop + reading.start), *rest)]
        if not reading.changes_values:
            return values
        # ROUND: the sum to float32, then the product; neither is fused.
        wide = values.astype(np.float32) + np.float32(reading.offset)
        return wide * np.float32(reading.scale)


AnyReading = Reading | ExpertReading


def own_name(name: str, config: ModelConfig) -> str | None:
    """A checkpoint's name of a tensor as the decoder has it; None for one of another part."""
    family = family_named(config.family)
    if family is None:
        return name
    first = config.num_layers
    behind = tuple(f"model.layers.{first + i}." for i in range(config.num_spare_layers))
    if name.startswith(family.spare_tensors + behind):
        return None
    longer = {} if family.wrapper is None else family.wrapper.names
    for prefix, own in longer.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _own_tensors(tensors: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The decoder's tensors by its names, of a checkpoint that may have other parts."""
    own: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if (plain := own_name(name, config)) is None:
            continue
        if plain in own:
            raise ValueError(
                f"{tensor.file} holds {name!r}, which is {plain!r} and there, too; keep one"
            )
        own[plain] = tensor
    return own


def readings(config: ModelConfig, dtype: DTypeLike) -> dict[str, AnyReading]:
    """How each of the decoder's tensors is read that is not the checkpoint's, by its name.

    Args:
        config: The model.
        dtype: Of the weights, to which Gemma rounds the factor on its embeddings.
    """
    family = family_named(config.family)
    if family is None:
        return {}
    specs = tensor_specs(config, tp=1, vocab_block=1)
    order = head_order(config.rope, config.head_dim)
    found = [
        reading
        for layer in specs["layers"]
        for reading in _layer_readings(config, family, layer, order)
    ]
    if config.has_output_gate:
        found = [_ungated(reading, config.head_dim) for reading in found]
    found += _model_readings(config, specs, dtype)
    plan: dict[str, AnyReading] = {it.name: it for it in found if not it.is_plain}
    if (stacked := family.stacked) is not None:
        plan |= {
            it.name: it for layer in specs["layers"] for it in _expert_readings(layer, stacked)
        }
    return plan


def head_order(rope: RopeConfig, head_dim: int) -> tuple[int, ...]:
    """The channel of a checkpoint's head that each of the decoder's is; empty if it is the same.

    The decoder rotates channel c with channel `c + head_dim / 2`. Pairs that are rotated come
    first in each half, in order of frequency, then those that are not.
    """
    rotary_dim = rope.rotary_dim or head_dim
    if rotary_dim == head_dim and not rope.is_interleaved:
        return ()
    if rope.is_interleaved:
        rotated = [list(range(half, rotary_dim, 2)) for half in (0, 1)]
    else:
        rotated = [list(range(h * rotary_dim // 2, (h + 1) * rotary_dim // 2)) for h in (0, 1)]
    rest = list(range(rotary_dim, head_dim))
    kept = [rest[: len(rest) // 2], rest[len(rest) // 2 :]]
    return tuple(rotated[0] + kept[0] + rotated[1] + kept[1])


def _layer_readings(
    config: ModelConfig, family: Family, layer: dict[str, TensorSpec], order: tuple[int, ...]
) -> Iterator[Reading]:
    """Those of one layer, plain ones included. Experts are stored as they are read."""
    rows = {spec.hf_name: spec.hf_shape[0] for spec in layer.values()}
    linear = config.linear_attention
    for name, spec in layer.items():
        if spec.num_experts:
            continue
        stem, _, kind = spec.hf_name.rpartition(".")
        prefix, suffix = stem[: -len(_suffix(stem))], _suffix(stem)
        source, start, total = family.tensor_names.get(suffix, suffix), 0, rows[spec.hf_name]
        for joined, parts in family.fused.items():
            if suffix in parts:
                sizes = [rows[f"{prefix}{part}.{kind}"] for part in parts]
                at = parts.index(suffix)
                source, start, total = joined, sum(sizes[:at]), sum(sizes)
        own_order, head_rows = order if name in ROTATED else (), 0
        for joined, parts in family.fused_by_head.items():
            if suffix in parts and linear is not None:
                sizes = [rows[f"{prefix}{part}.{kind}"] // linear.num_key_heads for part in parts]
                at, head_rows = parts.index(suffix), sum(sizes)
                source, total = joined, head_rows * linear.num_key_heads
                own_order = tuple(range(sum(sizes[:at]), sum(sizes[: at + 1])))
        yield Reading(
            name=spec.hf_name,
            source=f"{prefix}{source}.{kind}",
            source_rows=total,
            start=start,
            num_rows=rows[spec.hf_name],
            head_order=own_order,
            head_rows=head_rows,
            offset=spec.offset,
        )


def _ungated(reading: Reading, head_dim: int) -> Reading:
    """Of a `q_proj` whose heads are queries, then gates: which rows a tensor is made of."""
    is_gate = reading.name.endswith(_GATE_PROJECTION)
    if not is_gate and not reading.name.endswith(_QUERY_PROJECTION):
        return reading
    order = reading.head_order or tuple(range(head_dim))
    source = reading.source
    if is_gate:
        order = tuple(range(head_dim, 2 * head_dim))
        source = source.replace(_GATE_PROJECTION, _QUERY_PROJECTION)
    return dataclasses.replace(
        reading, source=source, source_rows=2 * reading.num_rows, head_order=order,
        head_rows=2 * head_dim,
    )  # fmt: skip


_QUERY_PROJECTION, _GATE_PROJECTION = "self_attn.q_proj.weight", "self_attn.gate_proj.weight"

_GATES, _UPS, _ALL = slice(0, None, 2), slice(1, None, 2), slice(0, None, 1)
_STACKED = {
    "expert_gate": ("gate_up_proj", (_GATES,)),
    "expert_up": ("gate_up_proj", (_UPS,)),
    "expert_gate_up_bias": ("gate_up_proj_bias", (_GATES, _UPS)),
    "expert_down": ("down_proj", (_ALL,)),
    "expert_down_bias": ("down_proj_bias", (_ALL,)),
}
"""What a tensor of an expert is made of where all experts are one tensor, and its outputs."""


def _expert_readings(layer: dict[str, TensorSpec], stacked: ExpertStack) -> Iterator[ExpertReading]:
    """Those of one layer's experts, which one tensor holds."""
    for name, (source, outputs) in _STACKED.items():
        if name not in layer:
            continue
        spec, is_output_first = layer[name], stacked is ExpertStack.HALVES
        width, *inputs = spec.hf_shape
        num_outputs = 2 * width if source == "gate_up_proj" else width
        if is_output_first:
            outputs = (slice(width, None, 1) if outputs == (_UPS,) else slice(0, width, 1),)
        shape = (num_outputs, *inputs) if is_output_first else (*inputs, num_outputs)
        prefix = spec.hf_name.split("{}")[0]
        for expert, own in enumerate(spec.hf_names):
            yield ExpertReading(
                name=own, source=f"{prefix}{source}", expert=expert, outputs=outputs,
                source_shape=(spec.num_experts, *shape), is_output_first=is_output_first,
            )  # fmt: skip


def _suffix(stem: str) -> str:
    """What follows `model.layers.<i>.`."""
    return stem.split(".", 3)[3]


def table_factor(config: ModelConfig, dtype: DTypeLike) -> float:
    """What the embedding table is a checkpoint's times; of Gemma it is rounded to the dtype."""
    family = family_named(config.family)
    if family is None or not family.scales_embedding:
        return config.embedding_scale
    return float(np.asarray(config.embedding_scale, np.dtype(dtype)))


def _model_readings(
    config: ModelConfig, specs: dict[str, Any], dtype: DTypeLike
) -> Iterator[Reading]:
    """Those of what stands once in a model."""
    scale, vocab = table_factor(config, dtype), config.vocab_size
    yield Reading(
        name=EMBED_NAME, source=EMBED_NAME, source_rows=vocab, start=0, num_rows=vocab, scale=scale
    )
    if config.tie_word_embeddings and not config.ties_table:
        yield Reading(name=HEAD_NAME, source=EMBED_NAME, source_rows=vocab, start=0, num_rows=vocab)
    norm: TensorSpec = specs["final_norm"]
    yield Reading(
        name=norm.hf_name, source=norm.hf_name, source_rows=norm.hf_shape[0], start=0,
        num_rows=norm.hf_shape[0], offset=config.gain_offset, scale=config.logits_scale,
    )  # fmt: skip


def open_weights(
    folder: Path, config: ModelConfig, dtype: DTypeLike, stack: contextlib.ExitStack
) -> dict[str, StoredTensor]:
    """Open a folder's files until `stack` closes, and list the tensors that the decoder reads.

    Those of the checkpoint that it does not read are listed, too.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged or of another model.
    """
    plan = readings(config, dtype)
    tensors = expand_tensors(open_tensors(folder, stack), read_quantization(folder))
    tensors = _own_tensors(tensors, config)
    if not plan:
        return tensors
    if HEAD_NAME in plan and HEAD_NAME in tensors:
        raise ValueError(
            f"config.json ties the embeddings, but {tensors[HEAD_NAME].file} holds a "
            f"{HEAD_NAME!r}; remove the tensor"
        )
    return read_by(plan, tensors)


def read_by(
    plan: Mapping[str, AnyReading], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The decoder's tensors of those of a checkpoint, and others that nothing is made of."""
    sources = {reading.source for reading in plan.values()}
    kept = {name: tensor for name, tensor in tensors.items() if name not in sources}
    return kept | {
        name: _read(reading, tensors[reading.source])
        for name, reading in plan.items()
        if reading.source in tensors
    }


def _read(reading: AnyReading, tensor: StoredTensor) -> StoredTensor:
    """The decoder's tensor."""
    rows = reading.rows_of(tensor.rows, tensor.shape, f"{reading.source!r} in {tensor.file}")
    is_expert = isinstance(reading, ExpertReading)
    shape = reading.shape if is_expert else (reading.num_rows, *tensor.shape[1:])
    return StoredTensor(file=tensor.file, rows=rows, shape=shape, dtype=tensor.dtype)


def read_named(
    readings: tuple[AnyReading, ...], array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Make the decoder's tensors of one of a checkpoint that is in memory.

    Args:
        readings: Of that tensor, from `readings_by_source`.
        array: The tensor.

    Raises:
        ValueError: If it has another number of rows than the configuration makes it.
    """
    for reading in readings:
        rows = reading.rows_of(array, array.shape, repr(reading.source))
        yield reading.name, np.ascontiguousarray(rows[:])


def written_tensor(
    readings: tuple[AnyReading, ...], tensors: dict[str, np.ndarray], dtype: jnp.dtype
) -> np.ndarray:
    """Make a checkpoint's tensor that is read as these of the decoder, bit for bit.

    Args:
        readings: All of that tensor, from `readings_by_source`.
        tensors: The decoder's, by name.
        dtype: Of most weights.

    Raises:
        ValueError: If there is none, neither in `dtype` nor in float32.
    """
    changed = [it for it in readings if isinstance(it, Reading) and it.changes_values]
    # WHY: a tied head has what its table was scaled from.
    chosen = [it for it in readings if it not in changed] or changed
    values = tensors | {
        it.name: _unread(it, tensors[it.name], dtype) for it in changed if it in chosen
    }
    last = values[chosen[-1].name]
    out = np.zeros(chosen[-1].source_shape_of(last), last.dtype)
    for reading in chosen:
        reading.write(values[reading.name], out)
    for name, back in read_named(readings, out):
        if not have_same_bits(back.astype(tensors[name].dtype), tensors[name]):
            raise ValueError(f"{readings[0].source!r} cannot hold what is read as {name!r}")
    return out


def _unread(reading: Reading, stored: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Values of a checkpoint that become these by an offset and a scale."""
    for target in (dtype, np.dtype(np.float32)):
        words = np.dtype(f"u{target.itemsize}")
        exact = (stored.astype(np.float64) / reading.scale - reading.offset).astype(target)
        out, is_found = exact.copy(), np.zeros(stored.shape, np.bool_)
        for step in (0, 1, -1):  # the quotient is rounded, so it may be a neighbour
            guess = (exact.view(words) + words.type(step % 2 ** (8 * target.itemsize))).view(target)
            wide = guess.astype(np.float32) + np.float32(reading.offset)
            back = (wide * np.float32(reading.scale)).astype(stored.dtype)
            is_it = ~is_found & (back == stored)
            out[is_it], is_found = guess[is_it], is_found | is_it
        if is_found.all():
            return out
    raise ValueError(
        f"{int((~is_found).sum())} values of {reading.name!r} are what no value of "
        f"{reading.source!r} is read as, neither in {dtype.name} nor in float32"
    )


@functools.cache
def readings_by_source(config: ModelConfig, dtype: np.dtype) -> dict[str, tuple[AnyReading, ...]]:
    """`readings`, by the name of the checkpoint's tensor that each is made of."""
    found: dict[str, tuple[AnyReading, ...]] = {}
    for reading in readings(config, dtype).values():
        found[reading.source] = (*found.get(reading.source, ()), reading)
    return found
