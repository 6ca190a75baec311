# SPDX-License-Identifier: Apache-2.0
"""Run Tunix's GRPO learner on sums, with the rollout and actor of detjax or of Tunix.

    python examples/tunix_grpo.py               # 20 updates; docs/training.md: how to install
    python examples/tunix_grpo.py --rollout vanilla     # the control: Tunix's sampler and its Llama
                                                        # in float32; or vanilla-bfloat16

It prints a line of JSON per update: Tunix's metrics, among them `sampler_trainer/logp_diff_max`,
the largest difference between the sampler's log-probability of a token and the trainer's. With
detjax the exit code is 3 if it is not 0.0.
"""

import argparse
import dataclasses
import functools
import json
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import detjax
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.parallel.mesh import configure_virtual_devices, make_mesh
from detjax.training.tasks import ArithmeticTask

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument(
    "--rollout", choices=("detjax", "vanilla", "vanilla-bfloat16"), default="detjax"
)
parser.add_argument("--rollout-tp", type=int, default=2, help="devices of the engine (default 2)")
parser.add_argument("--steps", type=int, default=20, help="updates (default 20)")
parser.add_argument("--prompts", type=int, default=4, help="problems an update (default 4)")
parser.add_argument("--samples", type=int, default=4, help="answers to each (default 4)")
parser.add_argument("--learning-rate", type=float, default=3e-5, help="of Adam (default 3e-5)")
args = parser.parse_args()
configure_virtual_devices(max(2, args.rollout_tp))

# isort: split
from flax import nnx  # noqa: E402
from tunix.models.llama3 import model as llama  # noqa: E402
from tunix.models.llama3 import params as llama_params  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig  # noqa: E402
from tunix.rl.rollout.vanilla_rollout import VanillaRollout  # noqa: E402

from detjax.integrations.tunix import DetjaxActor, DetjaxRollout, TunixTokenizer  # noqa: E402

logging.getLogger("absl").setLevel(logging.ERROR)
MAX_PROMPT, MAX_TOKENS = 10, 5
folder, task = bundled_model_path(), ArithmeticTask()
tokenizer = TunixTokenizer(Tokenizer.from_folder(folder))
newline = tokenizer.encode("\n")[-1]


class PlainParser:
    """The last message is the prompt: the bundled model knows no chat."""

    def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
        """Return the text of the prompt."""
        return messages[-1]["content"]


def reward(prompts, completions, answer, **_):
    """1 for the right sum, 0 for any other; Tunix's vanilla rollout leaves the newline out."""
    return [float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


def batches():
    """The problems of each update."""
    for step in range(args.steps):
        rng = np.random.default_rng([0, step])
        problems = [task.draw(rng) for _ in range(args.prompts)]
        yield {
            "prompts": np.asarray([p.prompt for p in problems]),
            "answer": np.asarray([p.answer for p in problems]),
        }


class FreshNoise(VanillaRollout):
    """Tunix's rollout with a seed for each call and weights of its own, so that Tunix syncs them.

    By itself it draws the same noise for every answer of a group. With the trainer's arrays Tunix
    compares with the weights of the first step, which no sync brings up to date.
    """

    def __init__(self, *, rollout_actor, tokenizer, mesh, rollout_config):
        """Tunix gives these."""
        del mesh
        sizes = {"num_layers": 5, "num_kv_heads": 2, "head_dim": 64}
        cache = CacheConfig(cache_size=rollout_config.kv_cache_size, **sizes)
        graph, state = nnx.split(rollout_actor)
        super().__init__(nnx.merge(graph, jax.tree.map(jnp.copy, state)), tokenizer, cache)
        self.num_calls = 0

    def generate(self, prompts, rollout_config, **kwargs):
        """Answer with a seed of this call's own."""
        self.num_calls += 1
        config = dataclasses.replace(rollout_config, seed=jax.random.PRNGKey(self.num_calls))
        return super().generate(prompts, config, **kwargs)


def load(tp: int) -> LoadedModel:
    """The bundled model on so many devices."""
    return detjax.load_model(
        str(folder),
        profile=detjax.NumericsProfile(),
        mesh=make_mesh(1, tp, platform="cpu"),
        backend=detjax.Backend.PORTABLE,
        max_len=128,
    )


if args.rollout == "detjax":
    actor = DetjaxActor(load(1))
    engine = functools.partial(DetjaxRollout, model=load(args.rollout_tp), batch_size=16)
else:
    config = llama.ModelConfig(
        num_layers=5, vocab_size=4096, embed_dim=256, hidden_dim=768, num_heads=8, head_dim=64,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5, weight_tying=True,
    )  # fmt: skip
    dtype = jnp.bfloat16 if args.rollout == "vanilla-bfloat16" else jnp.float32
    actor = llama_params.create_model_from_safe_tensors(str(folder), config, dtype=dtype)
    engine = FreshNoise

auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=auto, devices=jax.devices("cpu")[:1])
roles = rl_cluster.Role
cluster = rl_cluster.RLCluster(
    actor=actor,
    tokenizer=tokenizer,
    cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh={role: mesh for role in (roles.ACTOR, roles.ROLLOUT, roles.REFERENCE)},
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(args.learning_rate, b2=0.95),
            eval_every_n_steps=1_000_000,
            max_steps=args.steps,
            mini_batch_size=args.prompts,
            train_micro_batch_size=args.prompts,
        ),
        rollout_config=RolloutConfig(
            max_prompt_length=MAX_PROMPT,
            max_tokens_to_generate=MAX_TOKENS,
            kv_cache_size=64,
            temperature=1.0,
            top_p=1.0,
            eos_tokens=[newline],
            return_logprobs=True,
        ),
    ),
)
worst = []


def show(buffer):
    """A line of what Tunix measured at one step."""
    names = ("logp_diff_max", "logp_diff_mean", "prob_diff_max")
    row = {"rollout": args.rollout, "step": buffer.global_steps}
    if "sampler_trainer/logp_diff_max" not in buffer.metrics:
        return  # the last one is of the wall clock alone
    for name in [f"sampler_trainer/{name}" for name in names]:
        values, _ = buffer.metrics[name]
        row[name] = float(np.max(values))
    row["reward"] = float(np.mean(buffer.metrics["rewards/sum"][0]))
    worst.append(row["sampler_trainer/logp_diff_max"])
    print(json.dumps(row), flush=True)


learner = GRPOLearner(
    rl_cluster=cluster.with_external_metrics_logger(show),
    reward_fns=reward,
    algo_config=GRPOConfig(
        num_generations=args.samples,
        max_response_length=MAX_TOKENS,
        beta=0.0,
        # One at a time for Tunix's sampler, which two threads may not share.
        max_concurrency=16 if args.rollout == "detjax" else 1,
    ),
    chat_parser=PlainParser(),
)
before = [np.asarray(leaf, "bfloat16") for leaf in jax.tree.leaves(nnx.state(actor, nnx.Param))]
learner.train(batches())
trained = jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param))
moved = sum(
    int((a != np.asarray(b, "bfloat16")).sum()) for a, b in zip(before, trained, strict=True)
)
assert len(worst) == args.steps
print(
    f"largest difference of {len(worst)} updates: {max(worst)}; {moved:,} of "
    f"{sum(a.size for a in before):,} weights changed in bfloat16",
    file=sys.stderr,
)
sys.exit(3 if args.rollout == "detjax" and max(worst) != 0.0 else 0)
