# SPDX-License-Identifier: Apache-2.0
"""Tunix's own formulas and learner over detjax: what is trained on is what was sampled.

Tunix is in no extra (docs/training.md), so most of this runs only where it was installed by hand.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.models.bundled import bundled_model_path
from detjax.models.loading import load_model
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal

ROOT = Path(__file__).parents[2]
PROMPTS = ["17+26=", "30+41=", "It was"]


def test_without_tunix_the_error_says_where_to_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "detjax.integrations.tunix", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"docs/training\.md has the commands"):
        importlib.import_module("detjax.integrations.tunix")


@pytest.fixture(scope="module")
def tunix():
    """The adapter and what it adapts to, as Tunix runs: without this suite's strictness."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tunix", reason="Tunix is not installed: docs/training.md says how")
        from flax import nnx
        from tunix.generate.tokenizer_adapter import TokenizerAdapter
        from tunix.rl import common
        from tunix.rl.rollout.base_rollout import RolloutConfig

        from detjax.integrations import tunix as adapter
    yield adapter, nnx, common, TokenizerAdapter, RolloutConfig


@pytest.fixture(autouse=True)
def as_outside():
    """Tunix promotes dtypes and warns."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


def bundled(tp: int):
    return load_model(
        str(bundled_model_path()),
        profile=NumericsProfile(),
        mesh=make_mesh(1, tp, platform="cpu"),
        backend=Backend.PORTABLE,
        max_len=128,
    )


@pytest.fixture(scope="module")
def actor(tunix):
    return tunix[0].DetjaxActor(bundled(1))


@pytest.fixture(scope="module")
def make_rollout(tunix, actor):
    """A rollout on two devices, made as Tunix makes it."""
    adapter, _, _, TokenizerAdapter, RolloutConfig = tunix
    tokenizer = adapter.TunixTokenizer(Tokenizer.from_folder(bundled_model_path()))
    config = RolloutConfig(
        max_prompt_length=10, max_tokens_to_generate=6, temperature=1.0, return_logprobs=True
    )
    engine = functools.partial(adapter.DetjaxRollout, model=bundled(2), batch_size=4)

    def make(rollout_actor=actor):
        return engine(
            rollout_actor=rollout_actor,
            tokenizer=TokenizerAdapter(tokenizer),
            mesh=None,
            rollout_config=config,
        ), config

    return make


def padded_tokens(rollout, config, output):
    """Prompts and answers as Tunix's learners pad them, and where the answers are."""
    tokens = np.full((len(output.tokens), config.max_tokens_to_generate), rollout.pad_id())
    is_answer = np.zeros(tokens.shape, bool)
    for row, answer in enumerate(output.tokens):
        tokens[row, : len(answer)], is_answer[row, : len(answer)] = answer, True
    return jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(tokens), is_answer


@pytest.mark.slow
@pytest.mark.invariance
def test_tunix_computes_the_log_probabilities_that_were_sampled(tunix, actor, make_rollout):
    """At tp 2 against Tunix's formula on one device; also after an update of the weights.

    The control gives the same logits to Tunix's formula without our log-sum-exp.
    """
    _, nnx, common, _, _ = tunix
    rollout, config = make_rollout()
    for scale in (1.0, 0.97):
        state = nnx.state(actor, nnx.Param)
        scaled = jax.tree.map(lambda x, scale=scale: x * scale, state)
        trained = nnx.merge(nnx.graphdef(actor), scaled, nnx.state(actor, nnx.Not(nnx.Param)))
        rollout.update_params(nnx.state(trained, nnx.Param), (nnx.Param,))
        output = rollout.generate(PROMPTS, config)
        prompts, tokens, is_answer = padded_tokens(rollout, config, output)
        graphdef, whole = nnx.split(trained)
        ids = {"prompt_tokens": prompts, "completion_tokens": tokens}
        ends = {"pad_id": rollout.pad_id(), "eos_id": rollout.eos_id()}
        found = common.compute_per_token_logps(graphdef, whole, **ids, **ends)
        sampled = np.concatenate(output.logprobs)
        claim = "Tunix's log-probabilities are those that were sampled"
        assert_bitwise_equal(np.asarray(found)[is_answer], sampled, claim=claim)
        scored = np.asarray(rollout.get_per_token_logps(prompts, tokens))
        assert_bitwise_equal(scored[is_answer], sampled, claim="and so are the rollout's own")

        text, positions, mask, _ = common.process_ids(**ids, **ends)
        logits, _ = trained(text, positions, None, mask)
        plain = logits.values[:, -tokens.shape[1] - 1 : -1]
        control = np.asarray(common.selective_log_softmax(plain, tokens))[is_answer]
        assert (control != sampled).any(), "XLA's log-sum-exp has our bits too: vacuous"
        assert np.abs(control - sampled).max() < 1e-5


@pytest.mark.slow
def test_samples_do_not_depend_on_which_thread_asks(make_rollout):
    """Four threads ask for what one asks for; each version of the weights has its own noise."""
    rollout, config = make_rollout()
    one = sorted(tuple(rollout.generate(PROMPTS[0], config).tokens[0]) for _ in range(4))
    assert len(set(one)) > 1, "every sample is the same"
    other, found = make_rollout()[0], []

    def ask():
        found.append(tuple(other.generate(PROMPTS[:1], config).tokens[0]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == one


@pytest.mark.slow
def test_what_is_not_supported_is_refused(tunix, actor, make_rollout):
    adapter, nnx, _, _, _ = tunix
    rollout, config = make_rollout()
    for change, message in (
        ({"temperature": 0.9}, "return_logprobs with temperature=0.9"),
        ({"max_tokens_to_generate": 7}, "max_tokens_to_generate=7 is more than the 6"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout.generate(PROMPTS, dataclasses.replace(config, **change))
    with pytest.raises(ValueError, match="the prompt '1, 2, 3, .* tokens; it must have 1 to max_p"):
        rollout.generate(["1, 2, 3, 4, 5, 6, 7, 8"], config)
    with pytest.raises(ValueError, match=r"knows no \['images'\]"):
        rollout.generate(PROMPTS, config, images=[])
    with pytest.raises(ValueError, match="LoRA is not supported"):
        rollout.update_params(nnx.state(actor, nnx.Param), (nnx.LoRAParam,))
    with pytest.raises(ValueError, match="the actor is a object; with DetjaxRollout"):
        make_rollout(object())
    with pytest.raises(ValueError, match="the actor's model is on 2 devices"):
        adapter.DetjaxActor(bundled(2))
    folder = Path(__file__).parents[1] / "golden" / "hf" / "olmo2"
    sizes = {"mesh": make_mesh(1, 1), "backend": Backend.PORTABLE}
    other = load_model(str(folder), profile=NumericsProfile(), **sizes)
    with pytest.raises(ValueError, match="an actor of 'olmo2' is not supported"):
        adapter.DetjaxActor(other)
    with pytest.raises(ValueError, match="no packing"):
        actor(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), jnp.int32))
    with pytest.raises(ValueError, match=r"temperature 0\.5 is not supported"):
        adapter.Logits(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1))) / 0.5


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.invariance
def test_tunix_grpo_measures_no_difference_and_with_its_own_rollout_one(tunix):
    """The documented command, with three updates; Tunix's sampler is the control."""

    def rows(rollout: str) -> list[dict]:
        command = [sys.executable, "examples/tunix_grpo.py", "--steps", "3", "--rollout", rollout]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    exact = [row["sampler_trainer/logp_diff_max"] for row in rows("detjax")]
    assert exact == [0.0] * 3
    assert min(row["sampler_trainer/logp_diff_max"] for row in rows("vanilla")) > 0
