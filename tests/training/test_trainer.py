# SPDX-License-Identifier: Apache-2.0
"""Updates: the same on every number of devices, and after a stop."""

import json
from functools import cache

import jax
import numpy as np
import optax
import pytest

from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.training.batch import Scored, pack
from detjax.training.checkpoint import ARRAYS, FACTS, restore_state, save_state
from detjax.training.trainer import Trainer, TrainState
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
