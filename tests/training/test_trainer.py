# SPDX-License-Identifier: Apache-2.0
"""Updates: the same on every number of devices, and after a stop."""

import inspect
import json
from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.compilation.hlo_text import parse_module
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.training import update as update_module
from detjax.training.batch import Scored, pack
from detjax.training.checkpoint import ARRAYS, FACTS, restore_state, save_state
from detjax.training.gradients import Backward
from detjax.training.lora import LoraConfig
from detjax.training.trainer import Trainer, TrainState, _check_training
from detjax.training.update import why_not_elementwise

FACTS_OF_RUN = {"fingerprint": "abc", "seed": 1}


@cache
def trainer(dp: int = 1, tp: int = 1) -> Trainer:
    model = dummy_model(dummy_config(num_layers=1, qk_norm=True))
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    return Trainer(model, optimizer, mesh=make_mesh(dp, tp), clip_norm=1.0, remat=False)


@pytest.fixture(scope="module")
def batches(weighted):
    """Eight microbatches of two sequences."""
    sequences = weighted(*range(5, 21))
    return [pack(sequences[2 * i : 2 * i + 2], length=20) for i in range(8)]


def assert_same_state(found: TrainState, expected: TrainState, claim: str) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert_bitwise_equal(a, b, claim=f"{claim}: {jax.tree_util.keystr(path)}")


def steps(of: Trainer, state: TrainState, batches, count: int):
    outputs = []
    for _ in range(count):
        state, output = of.step(state, batches)
        outputs.append(output)
    return state, outputs


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_updates_are_bitwise_mesh_invariant(dp, tp, batches):
    expected, want = steps(trainer(), trainer().init(), batches, 2)
    found, got = steps(trainer(dp, tp), trainer(dp, tp).init(), batches, 2)
    assert_same_state(found, expected, f"state after two updates on ({dp}, {tp})")
    for g, w in zip(got, want, strict=True):
        assert_bitwise_equal(g.logprobs, w.logprobs, claim="logprobs")
        assert g.gradient_norm == w.gradient_norm
    shares = {s.data.size for s in found.params["layers"][0]["q"].addressable_shards}
    assert shares == {found.params["layers"][0]["q"].size // (dp * tp)}


def test_each_device_has_its_part_of_masters_and_moments():
    """Four devices: parts that do not overlap, and that together are the whole of each array."""
    state = trainer(4).init()
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    masters = jax.tree.leaves(state.params)
    assert len(moments) == 2 * len(masters)
    for leaf in (*masters, *moments):
        parts = {str(shard.index): shard for shard in leaf.addressable_shards}
        assert len({shard.device for shard in parts.values()}) == 4
        assert sum(shard.data.size for shard in parts.values()) == leaf.size
        assert {shard.data.size for shard in parts.values()} == {leaf.size // 4}


@pytest.mark.slow
def test_whole_masters_are_freed_before_the_update(batches, monkeypatch):
    """While weights are updated no device holds what it computed gradients with."""
    of = trainer(2)
    state, update, counts = of.init(), of._updated, []
    shape = state.params["layers"][0]["q"].shape

    def num_whole() -> int:
        """Arrays of one device that have the shape of a whole master."""
        found = [x for x in jax.live_arrays() if x.shape == shape]
        return sum(len(x.sharding.device_set) == 1 for x in found)

    def checked(state, total):
        counts.append(num_whole())
        return update(state, total)

    monkeypatch.setattr(of, "_updated", checked)
    before = num_whole()
    of.step(state, batches[:1])
    assert counts == [before]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the programs that XLA has compiled since."""
    names, is_over = [], False

    def listener(event: str, duration_secs: float, **named) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and not is_over:
            names.append(str(named.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield names
    is_over = True


@pytest.mark.parametrize(("dp", "tp"), quick_and_slow([(1, 1)], [(2, 1)]))
def test_a_second_update_compiles_nothing(dp, tp, compiled):
    """Of a gradient that is there already."""
    of = trainer(dp, tp)
    state, gradient = of.init(), jax.tree.map(jnp.ones_like, of.init().params)
    gradient = jax.device_put(gradient, NamedSharding(make_mesh(dp, tp), P()))
    state, _ = of._updated(state, gradient)
    compiled.clear()
    for _ in range(2):
        state, _ = of._updated(state, gradient)
    assert not compiled
    assert {x.sharding for x in jax.tree.leaves(state)} <= set(jax.tree.leaves(of.shardings()))
    of._norm(jax.tree.map(lambda x: x[:1], gradient))  # what is counted
    assert compiled


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ((1, 1), {}), ((1, 1), {"lora": LoraConfig(rank=8, alpha=16.0)}), ((2, 1), {}),
        ((1, 1), {"backward": Backward.XLA}), ((1, 2), {"shares_layers": True}),
    ],
)  # fmt: skip
def test_no_step_after_the_first_compiles(mesh, named, num_microbatches, batches, compiled):
    """With rematerialisation, Adam and a norm that clips."""
    model = dummy_model(dummy_config(num_layers=1, qk_norm=True))
    of = Trainer(model, optax.adam(1e-3), mesh=make_mesh(*mesh), clip_norm=1e-3, **named)
    state, _ = of.step(of.init(), batches[:num_microbatches])
    assert compiled
    compiled.clear()
    for _ in range(2):
        state, output = of.step(state, batches[:num_microbatches])
        assert output.gradient_norm > 1e-3
    assert not compiled


OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5), weight_decay=0.1),
    "momentum": optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "amsgrad": optax.amsgrad(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_turn_of_an_update_copies_the_weights(name):
    """Else its time would grow with the square of their number, as it did."""
    params = {"a": jnp.ones((3, update_module.UPDATE_BLOCK)), "b": jnp.ones((5,))}
    found = parse_module(_updates(OPTIMIZERS[name], params, Backend.PORTABLE)[0])
    (loop,) = (i for i in found.computations[found.entry] if i.opcode == "while")
    rows = f"f32[4,{update_module.UPDATE_BLOCK}]"
    assert rows in loop.shape
    body = found.computations[loop.attribute("body") or ""]
    assert [i.name for i in body if i.shape.startswith(rows) and i.opcode == "copy"] == []
    assert any(i.shape.startswith(rows) and i.opcode == "fusion" for i in body)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_place_have_the_bits_of_updates_into_other_arrays(name, monkeypatch):
    """What a GPU runs, and what a CPU does; blocks of one size, both on a CPU."""
    monkeypatch.setattr(update_module, "GPU_UPDATE_BLOCK", update_module.UPDATE_BLOCK)
    rng = np.random.default_rng(3)
    shapes = {"a": (130, 300), "b": (7,), "c": (update_module.UPDATE_BLOCK,)}
    params = {k: jnp.asarray(rng.standard_normal(s, np.float32)) for k, s in shapes.items()}
    apart, in_place = (
        _updates(OPTIMIZERS[name], params, backend)[1]
        for backend in (Backend.PORTABLE, Backend.SM90)
    )
    for a, b in zip(jax.tree.leaves(apart), jax.tree.leaves(in_place), strict=True):
        assert_bitwise_equal(a, b, claim=f"{name} in place")
    assert count_different_bits(apart[1]["a"], params["a"])


def _updates(optimizer, params: dict, backend: Backend) -> tuple[str, tuple]:
    """The compiled text of an update, and the state of the optimizer and weights after three."""

    def update(state, params, gradient):
        return update_module.update_in_blocks(optimizer, gradient, state, params, backend=backend)

    jitted, state = jax.jit(update, compiler_options=EXACT_OPTIONS), optimizer.init(params)
    program = jitted.lower(state, params, params).compile()
    for i in range(3):
        gradient = jax.tree.map(lambda x, i=i: jnp.sin(x * np.float32(i + 1)), params)
        state, params = program(state, params, gradient)
    return program.as_text() or "", (state, params)


@pytest.mark.slow
@pytest.mark.control
def test_control_another_order_of_microbatches_has_other_bits(batches):
    expected, _ = steps(trainer(), trainer().init(), batches, 1)
    turned = [*batches[1:], batches[0]]  # in reverse the tree would be its own mirror image
    found, _ = steps(trainer(), trainer().init(), turned, 1)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_state(found, expected, "order")


@pytest.mark.slow
@pytest.mark.invariance
def test_a_restored_state_continues_with_the_same_bits(batches, tmp_path):
    """Saved by one device, restored by two."""
    expected, want = steps(trainer(), trainer().init(), batches, 3)
    state, _ = steps(trainer(), trainer().init(), batches, 1)
    save_state(tmp_path / "a", state, facts=FACTS_OF_RUN)
    restored = restore_state(tmp_path / "a", trainer(1, 2), facts=FACTS_OF_RUN)
    assert_same_state(restored, state, "restored")
    found, got = steps(trainer(1, 2), restored, batches, 2)
    assert_same_state(found, expected, "continued")
    assert_bitwise_equal(got[-1].logprobs, want[-1].logprobs, claim="logprobs of the last update")
    assert int(found.step) == 3


def test_restoring_refuses_what_would_not_continue_the_run(tmp_path):
    save_state(tmp_path / "a", trainer().init(), facts=FACTS_OF_RUN)
    with pytest.raises(ValueError, match=r"has seed=1, this run 2"):
        restore_state(tmp_path / "a", trainer(), facts=FACTS_OF_RUN | {"seed": 2})
    with pytest.raises(ValueError, match="holds a training state already"):
        save_state(tmp_path / "a", trainer().init(), facts=FACTS_OF_RUN)
    assert json.loads((tmp_path / "a" / FACTS).read_text())["fingerprint"] == "abc"
    assert (tmp_path / "a" / ARRAYS).is_dir()
    with pytest.raises(FileNotFoundError, match="no finished state"):
        restore_state(tmp_path / "b", trainer(), facts=FACTS_OF_RUN)


def test_a_state_with_a_flipped_bit_is_refused(tmp_path):
    save_state(tmp_path / "a", trainer().init(), facts=FACTS_OF_RUN)
    largest = max((tmp_path / "a" / ARRAYS).rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its bytes are not those that were saved"):
        restore_state(tmp_path / "a", trainer(), facts=FACTS_OF_RUN)
    (tmp_path / "a" / FACTS).write_text("{")
    with pytest.raises(ValueError, match="detjax_training.json is damaged"):
        restore_state(tmp_path / "a", trainer(), facts=FACTS_OF_RUN)


@pytest.mark.slow
def test_an_update_raises_the_objective(batches):
    def value(output):
        pairs = zip(batches, output.logprobs, strict=True)
        return sum(float(np.sum(b.weights * p)) for b, p in pairs)

    _, outputs = steps(trainer(), trainer().init(), batches, 4)
    values = [value(output) for output in outputs]
    assert values == sorted(values), values
    assert values[-1] - values[0] > 1, values


@pytest.mark.slow
def test_long_gradients_are_scaled_to_the_clip_norm(batches):
    model = dummy_model(dummy_config(num_layers=1, qk_norm=True))
    sgd = Trainer(model, optax.sgd(1.0), mesh=make_mesh(1, 1), clip_norm=0.5, remat=False)
    before = jax.device_get(sgd.init().params)
    state, output = sgd.step(sgd.init(), batches)
    moved = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - b) ** 2.0), state.params, before)
    assert output.gradient_norm > 1
    assert np.sqrt(sum(jax.tree.leaves(moved))) == pytest.approx(0.5, rel=1e-3)


def test_bad_input_is_refused_by_name(batches):
    model = dummy_model(dummy_config(num_layers=1))
    with pytest.raises(ValueError, match=r"keeps arrays of shape \[\(1,\), \(3,\), \(5,\)\]"):
        Trainer(
            model, optax.adafactor(1e-2, min_dim_size_to_factor=1),
            mesh=make_mesh(1, 1), clip_norm=1.0,
        )  # fmt: skip
    experts = dummy_model(dummy_config(num_layers=1, experts=(8, 3)))
    with pytest.raises(ValueError, match=r"balance_weight=0.1 has no canonical backward pass"):
        Trainer(experts, optax.sgd(1.0), mesh=make_mesh(1, 1), clip_norm=1.0, balance_weight=0.1)
    with pytest.raises(ValueError, match="3 devices must be a power of two"):
        Trainer(model, optax.sgd(1.0), mesh=make_mesh(3, 1), clip_norm=1.0)
    unknown = pack([Scored(token_ids=(1, 320), weights=(0.0, 1.0))], length=20)
    with pytest.raises(ValueError, match="microbatch 1 has token ids from 0 to 320"):
        trainer().step(trainer().init(), [batches[0], unknown])
    with pytest.raises(ValueError, match=r"batches=\[\] must have at least one microbatch"):
        trainer().step(trainer().init(), [])
    # As a user calls it: without the checks of types that the tests add.
    check = inspect.unwrap(_check_training)
    with pytest.raises(ValueError, match=r"lora=8 must be a LoraConfig, such as LoraConfig\(rank"):
        check(model, balance_weight=0.0, lora=8, backward=Backward.CANONICAL, tp=1)
    model = dummy_model(dummy_config(num_layers=1), tp=2)
    with pytest.raises(ValueError, match="load the model to be trained on a mesh with tp=1"):
        Trainer(model, optax.sgd(1.0), mesh=make_mesh(1, 1), clip_norm=1.0)
    with pytest.raises(ValueError, match="clip_norm=0.0 must be positive"):
        Trainer(model, optax.sgd(1.0), mesh=make_mesh(1, 1), clip_norm=0.0)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-3, b2=0.95), optax.adamw(1e-3), optax.sgd(1e-2, momentum=0.9),
        optax.lion(1e-4),
        optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(1e-3, 0.0, 10))),
    ],
)  # fmt: skip
def test_optimizers_of_each_weight_by_itself_are_taken(optimizer):
    assert why_not_elementwise(optimizer) is None


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (optax.adafactor(1e-3, min_dim_size_to_factor=2), "keeps arrays of shape"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), "clip with clip_norm"),
        (optax.clip_by_global_norm(1.0), "depends on the other weights"),
        (optax.lamb(1e-3), "depends on the other weights"),
    ],
)
def test_optimizers_whose_updates_depend_on_other_weights_are_refused(optimizer, says):
    assert says in (why_not_elementwise(optimizer) or "")
