# SPDX-License-Identifier: Apache-2.0
"""Named tensors that arrive one by one become the weights that a folder of them would give."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel, place_model
from detjax.models.params import EMBED_NAME, tensor_specs
from detjax.models.weights.load import load_params
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model

UNTIED = dummy_config(num_heads=24, num_kv_heads=3, qk_norm=True, qkv_bias=True, vocab_size=300)
TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True)
GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
HEAD = "lm_head.weight"


class LikeTorch:
    """A tensor of another library: no `__array__` for bfloat16, memory that its owner reuses."""

    def __init__(self, values: np.ndarray):
        self._values = jnp.array(values)

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


class LikeArray:
    """A tensor that only NumPy can read."""

    def __init__(self, values: np.ndarray):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return self._values


KINDS = {"numpy": np.array, "jax": jnp.array, "dlpack": LikeTorch, "array": LikeArray}


def checkpoint(config, *, seed=1, dtype="bfloat16") -> dict[str, np.ndarray]:
    """A whole checkpoint, with both zeros and values that bfloat16 rounds."""
    rng, tensors = np.random.default_rng(seed), {}
    for spec in jax.tree.leaves(tensor_specs(config, tp=1, vocab_block=1)):
        values = rng.standard_normal(spec.hf_shape) * spec.hf_shape[-1] ** -0.5
        values.flat[:2] = 0.0, -0.0
        tensors[spec.hf_name] = values.astype(jnp.dtype(dtype))
    return tensors


def streamed(tensors: dict, kind: str = "numpy") -> Iterator:
    """In another order than a folder's, from one buffer that the next tensor overwrites."""
    for name in sorted(tensors, key=lambda name: name[::-1]):
        buffer = tensors[name].copy()
        yield name, buffer if kind == "numpy" else KINDS[kind](buffer)
        buffer.view(np.uint8 if buffer.ndim else None)[...] = 0x7F


def from_folder(folder: Path, tensors: dict, like: LoadedModel) -> LoadedModel:
    """The model that has read these tensors from a folder."""
    save_file(tensors, folder / "model.safetensors")
    dtype, block = like.profile.param_dtype, like.profile.vocab_block
    return place_model(
        like.config,
        lambda: load_params(folder, like.config, like.mesh, dtype=dtype, vocab_block=block),
        profile=like.profile,
        mesh=like.mesh,
        backend=like.backend,
        folder=None,
    )


def engine(model: LoadedModel) -> Engine:
    return Engine(model, EngineConfig(batch_size=2, prefill_chunk=64, max_len=256))


REQUESTS = [
    Request(
        prompt_token_ids=tuple(range(1, 140)),
        sampling=SamplingParams(max_tokens=4, temperature=1.0, seed=7),
    )
]


@pytest.mark.invariance
@pytest.mark.parametrize(
    ("tp", "config", "dtype", "kind"),
    quick_and_slow(
        [(1, TIED, "float32", "dlpack"), (2, UNTIED, "bfloat16", "dlpack"),
         (4, UNTIED, "float32", "numpy")],
        [(tp, config, dtype, kind) for tp, config, dtype, kind in [
            (1, UNTIED, "bfloat16", "numpy"), (2, TIED, "float32", "jax"),
            (4, TIED, "bfloat16", "array"), (4, UNTIED, "bfloat16", "jax")]],
    ),
)  # fmt: skip
def test_streamed_tensors_have_the_bits_of_a_folder(tmp_path, tp, config, dtype, kind):
    """The control swaps two tensors of one shape, which the same comparison finds."""
    tensors, model = checkpoint(config, dtype=dtype), dummy_model(config, tp=tp)
    want = from_folder(tmp_path, tensors, model)
    found = model.named_weights(streamed(tensors, kind))
    assert jax.tree.structure(found) == jax.tree.structure(want.params)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(want.params), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), name
        assert_bitwise_equal(a, b, claim=f"{name} at tp {tp} is the folder's")
    swapped = {**tensors, GATE: tensors[UP], UP: tensors[GATE]}
    other = model.named_weights(streamed(swapped, kind))["layers"][0]["gate_up"]
    assert (np.asarray(other) != np.asarray(found["layers"][0]["gate_up"])).any(), "vacuous"


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_engine_answers_as_if_it_had_read_the_folder(tmp_path, tp):
    """Cached pages of the old weights are forgotten; the old weights answer otherwise."""
    tensors, model = checkpoint(UNTIED), dummy_model(UNTIED, tp=tp)
    (want,) = engine(from_folder(tmp_path, tensors, model)).generate(REQUESTS)
    made = engine(model)
    (before,) = made.generate(REQUESTS)
    made.load_named_weights(streamed(tensors), version=5)
    (found,) = made.generate(REQUESTS)
    assert found == dataclasses.replace(want, weight_version=5)
    assert made.stats().prefix_tokens == 0
    assert before.digest() != want.digest(), "the weights make no difference"
    swapped = {**tensors, GATE: tensors[UP], UP: tensors[GATE]}
    made.load_named_weights(streamed(swapped), version=6)
    assert made.generate(REQUESTS)[0].digest() != want.digest(), "names make no difference"


@pytest.fixture(scope="module")
def untouched():
    """An engine whose weights no test replaces, and its answer."""
    made = engine(dummy_model(UNTIED))
    return made, made.generate(REQUESTS)[0]


def broken(tensors: dict, how: str) -> Iterator:
    """A stream with one fault, as late as it can be."""
    last = list(tensors)[-1]
    match how:
        case "missing":
            yield from list(tensors.items())[:-1]
        case "unknown":
            yield from [*tensors.items(), ("module.lm_head.weight", tensors[last])]
        case "twice":
            yield from [*tensors.items(), (last, tensors[last])]
        case "shape":
            yield from (tensors | {last: tensors[last][:-1]}).items()
        case "float16":
            yield from (tensors | {last: tensors[last].astype(np.float16)}).items()
        case "float64":
            yield from (tensors | {last: tensors[last].astype(np.float64)}).items()
        case "overflow":
            values = tensors[last].astype(np.float32)
            values.flat[0] = 3.4e38
            yield from (tensors | {last: values}).items()
        case "not a tensor":
            yield from (tensors | {last: [1.0]}).items()
        case "deleted":
            gone = jnp.array(tensors[last])
            gone.delete()
            yield from (tensors | {last: gone}).items()
        case "no pair":
            yield from tensors
        case "raises":
            yield from list(tensors.items())[:-1]
            raise ConnectionError("the trainer has gone")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "1 of 31 tensors are missing: 'lm_head.weight'"),
        ("unknown", "'module.lm_head.weight' is not a tensor of this model; names are those"),
        ("twice", "'lm_head.weight' is given twice"),
        ("shape", r"lm_head.weight' has shape \(299, 64\), but this model's is \(300, 64\)"),
        ("float16", "lm_head.weight' is float16, whose 11 significant bits"),
        ("float64", "lm_head.weight' is float64, which is not supported; detjax reads F32"),
        ("overflow", "lm_head.weight' holds a finite value that would become infinite"),
        ("not a tensor", "lm_head.weight' is a list; give a NumPy, JAX or torch tensor"),
        ("deleted", "lm_head.weight', a .*, cannot be read .*deleted.*detach"),
        ("no pair", "must be pairs of a name and a tensor, such as .* not 'model.embed"),
        ("raises", "the trainer has gone"),
    ],
)
def test_a_stream_that_does_not_fit_changes_nothing(untouched, how, message):
    """Not the weights, the version or the prefix cache."""
    made, want = untouched
    num_cached = made.stats().prefix_tokens
    with pytest.raises((ValueError, ConnectionError), match=message):
        made.load_named_weights(broken(checkpoint(UNTIED), how), version=9)
    assert made.generate(REQUESTS) == [want]
    assert made.stats().prefix_tokens > num_cached


def test_weights_are_not_replaced_under_requests(untouched):
    """Refused before the first tensor is asked for, and if a request comes meanwhile."""
    made, _ = untouched

    def with_a_request():
        yield from checkpoint(UNTIED).items()
        made.add_request((1, 2, 3), SamplingParams(max_tokens=1))

    for _ in range(2):
        with pytest.raises(ValueError, match="at work on requests of the old weights"):
            made.load_named_weights(with_a_request(), version=1)
    (output,) = [o for o in made.drain() if o.finish_reason is not None]
    assert output.weight_version == 0


def test_a_tied_model_takes_an_equal_head_and_no_other():
    model, tensors = dummy_model(TIED), checkpoint(TIED)
    found = model.named_weights([*tensors.items(), (HEAD, tensors[EMBED_NAME])])
    head = np.asarray(found["lm_head"])[: TIED.vocab_size]  # padded to whole blocks
    assert_bitwise_equal(head, np.asarray(found["embed"]), claim="the head is the embeddings")
    other = tensors[EMBED_NAME].copy()
    other.view(np.uint16)[0, 0] ^= 0x8000
    with pytest.raises(ValueError, match="embeddings are tied, but 'lm_head.weight' differs"):
        model.named_weights([(HEAD, other), *tensors.items()])


def test_float16_is_rounded_where_the_model_was():
    tensors = checkpoint(UNTIED, dtype="float16")
    model = dataclasses.replace(dummy_model(UNTIED), weight_cast="float16 to bfloat16")
    found = model.named_weights(tensors.items())["final_norm"]
    want = tensors["model.norm.weight"].astype(jnp.bfloat16)
    assert_bitwise_equal(np.asarray(found), want, claim="rounded once, to nearest")
    with pytest.raises(ValueError, match="is float16, whose 11 significant bits"):
        dataclasses.replace(model, weight_cast="float32 to bfloat16").named_weights(tensors.items())
