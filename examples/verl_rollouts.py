# SPDX-License-Identifier: Apache-2.0
"""Use verl's agent loops with detjax servers: rollouts, new weights, the same rollout again.

    python -m venv verl && verl/bin/pip install verl torch      # torch's CPU build is enough
    verl/bin/python examples/verl_rollouts.py --server-python "$(which python)"

verl's rollouts are Ray actors. `DetjaxServer` is one that asks a detjax server over HTTP,
`DetjaxReplica` makes it where verl makes vLLM's, and `DetjaxRollout` sends the trainer's weights.
Importing this module registers them under the name "detjax". The rollouts are requested twice: all
prompts at once, and one after the other. The exit status is 1 if a token or a logprob differs.

A factor on the last norm stands in for a trainer. docs/training.md says how verl's own trainer
takes them.
"""

import argparse
import asyncio
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file, save
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.workers.rollout import base
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)

BUNDLED_MODEL = Path(__file__).resolve().parents[1] / "detjax" / "models" / "bundled" / "novels-6m"
ADMIN_KEY = "of-this-run"
PROMPTS = ("17+26=", "40+41=", "The old house by the sea", "17+26=")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
BODY_BYTES = 256 << 20


# ------------------------------------------------------------------------- what a trainer needs


async def post(url: str, admin_key: str, **options: Any) -> dict:
    """Post to a server; the JSON of its answer.

    Raises:
        RuntimeError: With the server's message, if it refuses.
    """
    headers = {"Authorization": f"Bearer {admin_key}"} | options.pop("headers", {})
    limits = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=limits) as session,
        session.post(url, headers=headers, **options) as reply,
    ):
        if reply.status != 200:
            raise RuntimeError(f"{url}: {reply.status} {await reply.text()}")
        return await reply.json()


class DetjaxServer:
    """A Ray actor with the methods of verl's servers, in front of a detjax server.

    A request of verl has no seed. Here it has that of the training step, of the prompt, and of how
    often the step has asked any server for that prompt. So answers to one prompt differ, and a step
    has the same ones in every run, in the order in which they are asked for.
    """

    def __init__(self, url: str, admin_key: str, config: Any):
        """Take requests for a server with an administrator's key."""
        self._url, self._key, self._config = url, admin_key, config
        self._step, self._asked = 0, Counter()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **images: Any
    ) -> TokenOutput:
        """Answer a prompt: token ids, and float32 logprobs of what was sampled from."""
        if given := sorted(name for name, value in images.items() if value and name != "priority"):
            raise ValueError(f"detjax reads text alone, not {', '.join(given)}")
        config, prompt_ids = self._config, [int(token) for token in prompt_ids]
        room = config.prompt_length + config.response_length - len(prompt_ids)
        asked = {"max_tokens": config.response_length, "ignore_eos": config.ignore_eos}
        asked |= sampling_params
        asked["max_tokens"] = max(1, min(asked["max_tokens"], room))
        asked["logprobs"] = 0 if asked.pop("logprobs", False) else None
        if "seed" not in asked:
            asked["seed"] = await ray.get_actor(server_name(0)).seed_of.remote(prompt_ids)
        body = {
            "token_ids": prompt_ids,
            "request_id": request_id,
            "sampling_params": asked | {"logprobs_mode": "processed"},
        }
        answer = await post(f"{self._url}/inference/v1/generate", self._key, json=body)
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"] and [one["logprob"] for one in choice["logprobs"]["content"]]
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self._step},
        )

    async def seed_of(self, prompt_ids: list[int]) -> int:
        """Of a request to any server: the first one counts for all."""
        prompt = tuple(prompt_ids)
        self._asked[prompt] += 1
        of = f"{self._config.seed} {self._step} {self._asked[prompt]} {prompt}"
        return int.from_bytes(hashlib.sha256(of.encode()).digest()[:4], "big")

    async def set_global_steps(self, global_steps: int) -> None:
        """Begin a training step: seeds are those of its number."""
        self._step, self._asked = global_steps, Counter()

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes. New weights never meet those of old ones."""
        await post(f"{self._url}/reset_prefix_cache", self._key)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing: the server has GPUs of its own, and keeps its weights."""

    async def abort_all_requests(self, **_: Any) -> None:
        """Wait for open requests, which end with the weights that they began with."""
        await post(f"{self._url}/pause", self._key, params={"mode": "wait"})

    async def resume_generation(self) -> None:
        """Let requests in again."""
        await post(f"{self._url}/resume", self._key)

    sleep = release_kv_cache = resume_kv_cache = wake_up


class DetjaxReplica(RolloutReplica):
    """A server of verl's configuration: `rollout.engine_kwargs.detjax.urls[replica_rank]`."""

    async def init_standalone(self) -> None:
        """The server has GPUs of its own, so verl reserves none."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Make the actor; the server runs already."""
        own = self.config.engine_kwargs["detjax"]
        if self.replica_rank >= len(own["urls"]):
            raise ValueError(
                f"verl wants a replica {self.replica_rank}, and there are {len(own['urls'])} urls; "
                "it has one for each tensor_model_parallel_size GPUs of the trainer"
            )
        name = server_name(self.replica_rank)
        options = {"name": name, "num_cpus": 0, "max_concurrency": self.max_concurrency}
        url = own["urls"][self.replica_rank]
        actor = ray.remote(DetjaxServer).options(**options)
        self._server_handle = actor.remote(url, own["admin_key"], self.config)
        self._server_address = url.removeprefix("http://")
        self.servers = [self._server_handle]


def server_name(replica_rank: int) -> str:
    """Of the actor of a replica."""
    return f"detjax_server_{replica_rank}"


class DetjaxRollout(base.BaseRollout):
    """Sends a trainer's weights to all servers, in bodies.

    Rank 0 sends. The others only walk through the tensors, which verl gathers meanwhile.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = 0, **_: Any
    ):
        """Read the servers from the configuration of the rollout."""
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = int(os.environ.get("RANK", "0")) == 0
        own = self.config.engine_kwargs["detjax"]
        self._urls, self._key = list(own["urls"]), own["admin_key"]

    async def resume(self, tags: list[str]) -> None:
        """Nothing: the servers have GPUs of their own."""

    async def release(self) -> None:
        """Nothing, likewise."""

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors",
        peft_config: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """Put new weights in place on a server: all or none. Open answers end with the old ones."""
        if wire_format != "named_tensors":
            raise ValueError(f"detjax takes named tensors, not {wire_format=}")
        if peft_config is not None:
            raise ValueError("adapters are not sent: set actor_rollout_ref.model.lora.merge=True")
        if not self.is_leader_rank:
            async for _each_tensor in _each(weights):
                pass
            return
        await self._to_all("start_weight_update", json={"mode": "wait"})
        async for body in bodies(weights):
            kind = {"Content-Type": "application/octet-stream"}
            await self._to_all("update_weights", data=body, headers=kind)
        found = await self._to_all("finish_weight_update", json={})
        print("weights", {one["weights"][:16] for one in found})
        if global_steps is not None:
            servers = [ray.get_actor(server_name(i)) for i in range(len(self._urls))]
            await asyncio.gather(*(s.set_global_steps.remote(global_steps) for s in servers))

    async def _to_all(self, route: str, **options: Any) -> list[dict]:
        asked = (post(f"{url}/{route}", self._key, **options) for url in self._urls)
        return await asyncio.gather(*asked)


async def bodies(weights: Any) -> AsyncIterator[bytes]:
    """Tensors as safetensors, several in a body. verl gives them by either kind of generator."""
    held: dict[str, torch.Tensor] = {}
    size = 0
    async for name, tensor in _each(weights):
        tensor = tensor.detach().to("cpu").contiguous()
        if held and size + tensor.nbytes > BODY_BYTES:
            yield save(held)
            held, size = {}, 0
        held[name], size = tensor, size + tensor.nbytes
    if held:
        yield save(held)


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for one in weights:
            yield one
        return
    for one in weights:
        yield one


RolloutReplicaRegistry.register("detjax", lambda: DetjaxReplica)
base._ROLLOUT_REGISTRY["detjax", "async"] = f"{__name__}.{DetjaxRollout.__name__}"


# -------------------------------------------------------------------------------- what is tried


def config_of(folder: Path, urls: list[str], *, num_workers: int) -> DictConfig:
    """The configuration that verl has, with these servers, as its command line would give it."""
    rollout = {
        "name": "detjax", "calculate_log_probs": True, "prompt_length": 64, "response_length": 16,
        "tensor_model_parallel_size": 1, "n_gpus_per_node": len(urls), "nnodes": 1,
        "agent.num_workers": num_workers,
    }  # fmt: skip
    overrides = [
        f"actor_rollout_ref.model.path='{folder}'",
        f"actor_rollout_ref.model.custom_chat_template='{TEMPLATE}'",
        f"+actor_rollout_ref.rollout.engine_kwargs.detjax.urls={urls}",
        f"+actor_rollout_ref.rollout.engine_kwargs.detjax.admin_key={ADMIN_KEY}",
        *(f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()),
    ]
    folder_of_configs = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=folder_of_configs, version_base=None):
        return compose("ppo_trainer", overrides)


def rollout_of(manager: AgentLoopManager, prompts: tuple[str, ...]) -> list[tuple]:
    """Token ids and logprobs of each prompt, by verl's workers."""
    messages = np.empty(len(prompts), object)
    messages[:] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    kinds = np.array(["single_turn_agent"] * len(prompts), object)
    batch = DataProto.from_dict(non_tensors={"raw_prompt": messages, "agent_name": kinds})
    found = manager.generate_sequences(batch).batch
    columns = found["responses"], found["rollout_log_probs"], found["response_mask"].bool()
    return [
        (tuple(tokens[kept].tolist()), tuple(logprobs[kept].tolist()))
        for tokens, logprobs, kept in zip(*columns, strict=True)
    ]


def run(folder: Path, urls: list[str]) -> None:
    """Three sets of weights; then the first again, which must give the first rollout."""
    configs = [config_of(folder, urls, num_workers=count) for count in (2, 1)]
    servers = LLMServerManager.create(configs[0])
    managers = [AgentLoopManager.create(config, servers.get_client()) for config in configs]
    own = configs[0].actor_rollout_ref
    trainer = DetjaxRollout(own.rollout, own.model, device_mesh=None)
    weights = load_file(folder / "model.safetensors")
    first, seen = None, []
    for step, factor in enumerate((1.0, 0.9, 1.1, 1.0)):
        if step:
            asyncio.run(trainer.update_weights(scaled(weights, factor), global_steps=step))
        # A trainer's steps have numbers of their own. With one number rollouts can be compared.
        ray.get([one.set_global_steps.remote(0) for one in servers.server_handles])
        together = rollout_of(managers[0], PROMPTS)
        ray.get([one.set_global_steps.remote(0) for one in servers.server_handles])
        alone = [answer for one in PROMPTS for answer in rollout_of(managers[1], (one,))]
        if sorted(together) != sorted(alone):
            sys.exit(f"asked alone, the answers are others: {together} and {alone}")
        if together[0] == together[3]:
            sys.exit("two answers to one prompt have the same noise")
        first = first or sorted(together)
        seen.append(sorted(together) == first)
        asyncio.run(quiet(servers.rollout_replicas))
    if seen != [True, False, False, True]:
        sys.exit(f"rollouts equal to that of the first weights: {seen}")
    print("asked one after the other, of other servers: every token and logprob equal")
    print("the first weights, sent back: the first rollout, every bit equal")


async def quiet(replicas: list[RolloutReplica]) -> None:
    """What verl asks of every replica around an update."""
    for replica in replicas:
        await replica.abort_all_requests()
        await replica.sleep()
        await replica.wake_up()
        await replica.resume_generation()
        await replica.clear_kv_cache()


def scaled(weights: dict[str, torch.Tensor], factor: float) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as a trainer gives them, one after the other."""
    for name, value in weights.items():
        own = factor if name == "model.norm.weight" else 1.0
        yield name, (value.float() * own)


@contextmanager
def server(python: str, folder: Path) -> Iterator[str]:
    """A detjax server of its own; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [
        python, "-m", "detjax.serve", "-m", str(folder), "--port", str(port),
        "--max-len", "128", "--admin-api-key", ADMIN_KEY,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                try:
                    urllib.request.urlopen(f"{url}/health/ready", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            else:
                log.seek(0)
                sys.exit(f"the server ended with {process.returncode}: {log.read()}")
            yield url
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server-python", required=True, help="a Python that has detjax")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    args = parser.parse_args()
    with (
        server(args.server_python, args.model) as first,
        server(args.server_python, args.model) as second,
    ):
        ray.init(num_cpus=16, include_dashboard=False)
        run(args.model.resolve(), [first, second])
