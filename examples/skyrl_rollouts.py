# SPDX-License-Identifier: Apache-2.0
"""Use SkyRL's client with a detjax server: rollouts, a pause, new weights, a LoRA adapter.

    python -m venv skyrl
    skyrl/bin/pip install aiohttp orjson pybase64 pydantic rich cloudpathlib ml_dtypes safetensors
    git clone https://github.com/NovaSky-AI/SkyRL
    PYTHONPATH=SkyRL skyrl/bin/python examples/skyrl_rollouts.py --server-python "$(which python)"

`DetjaxClient` is SkyRL's RemoteInferenceClient with two additions: the admin key, and weights sent
in request bodies instead of over NCCL. Each rollout is requested twice: all prompts at once, and
one after the other. The exit status is 1 if a token or a logprob differs.

A factor on the last norm stands in for a trainer. docs/training.md says how SkyRL's own trainer
takes the client.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import ml_dtypes  # noqa: F401  which teaches NumPy bfloat16
import numpy as np
from safetensors.numpy import load_file, save, save_file
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)

BUNDLED_MODEL = Path(__file__).resolve().parents[1] / "detjax" / "models" / "bundled" / "novels-6m"
ADMIN_KEY = "of-this-run"
PROMPTS = ("17+26=", "40+41=", "The old house by the sea")
SAMPLING = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0}


# ------------------------------------------------------------------------- what a trainer needs


@dataclass
class DetjaxClient(RemoteInferenceClient):
    """SkyRL's client of servers that take weights in bodies.

    The servers have an administrator's key and no other: one session has one key.
    """

    admin_key: str = ""

    async def _get_session(self) -> aiohttp.ClientSession:
        session = await super()._get_session()
        session.headers["Authorization"] = f"Bearer {self.admin_key}"
        return session

    async def push(self, chunks: Iterable[Mapping[str, np.ndarray]]) -> list[str]:
        """Send all weights, some a body, and have each server put them in place: all or none.

        Returns the hash of the weights of each server. Answers that are open end with the old ones.
        """
        await self._call_all_servers("/start_weight_update", {"mode": "wait"})
        session = await self._get_session()
        for chunk in chunks:
            body, kind = save(dict(chunk)), {"Content-Type": "application/octet-stream"}
            for url in self.server_urls:
                async with session.post(f"{url}/update_weights", data=body, headers=kind) as reply:
                    if reply.status != 200:
                        raise RuntimeError(await reply.text())
        found = await self._call_all_servers("/finish_weight_update", {})
        self.increment_weight_version()
        return [one["body"]["weights"] for one in found.values()]


# -------------------------------------------------------------------------------- what is tried


async def rollout(client: DetjaxClient, prompts: list[list[int]], model: str, seed: int) -> list:
    """Token ids and logprobs, all prompts at once; and again, one after the other."""
    sampling = SAMPLING | {"seed": seed}
    # SkyRL has one text a prompt: a group repeats it, each time with a seed of its own.
    asked = {"prompt_token_ids": prompts, "sampling_params": sampling}
    found = await client.generate(asked, model=model)
    answers = list(zip(found["response_ids"], found["response_logprobs"], strict=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = await client.generate(asked | {"prompt_token_ids": [prompt]}, model=model)
        if (alone["response_ids"][0], alone["response_logprobs"][0]) != answer:
            sys.exit(f"asked alone, the answer to {prompt} is another one")
    return answers


async def run(client: DetjaxClient, folder: Path, shared: Path) -> None:
    """Three sets of weights; then the first again, which must give the first rollout."""
    prompts = await client.tokenize(list(PROMPTS))
    weights = load_file(folder / "model.safetensors")
    first, seen = None, []
    for step, factor in enumerate((1.0, 0.9, 1.1, 1.0)):
        if step:
            await client.pause_generation()  # SkyRL's default: mode=keep
            changed = {name: _scaled(name, value, factor) for name, value in weights.items()}
            names = sorted(changed)
            half = len(names) // 2
            parts = ({n: changed[n] for n in part} for part in (names[:half], names[half:]))
            (sha,) = await client.push(parts)
            await client.resume_generation()
            print(f"weights {step} (norm x {factor}): {sha[:16]}")
        answers = await rollout(client, prompts, client.model_name, seed=3)
        first = first or answers
        seen.append(answers == first)
    if seen != [True, False, False, True]:
        sys.exit(f"rollouts equal to that of the first weights: {seen}")
    print("asked again, in another batch: every token and logprob equal")
    print("the first weights, sent back: the first rollout, every bit equal")
    await client.reset_prefix_cache()
    for seed in (1, 2):  # one name, as SkyRL has it
        _write_adapter(shared / f"adapter{seed}", weights, seed)
        await client.load_lora_adapter("skyrl-lora", str(shared / f"adapter{seed}"))
        seen.append(await rollout(client, prompts, "skyrl-lora", seed=3))
    if seen[-1] == seen[-2] or seen[-1] == first:
        sys.exit("the adapters change nothing")
    await client.unload_lora_adapter("skyrl-lora")
    print("two adapters under one name, loaded as SkyRL loads them")
    try:
        await client.get_world_size()
    except aiohttp.ClientResponseError as error:
        print(f"NCCL is refused: {error.status} {error.message[:72]}...")


def _scaled(name: str, value: np.ndarray, factor: float) -> np.ndarray:
    wide = value.astype(np.float32)
    return wide * np.float32(factor) if name == "model.norm.weight" else wide


def _write_adapter(folder: Path, weights: Mapping[str, np.ndarray], seed: int) -> None:
    """An adapter of rank 4 of every q, as PEFT writes it."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, value in weights.items():
        if name.endswith("q_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for side, shape in (("A", (4, value.shape[1])), ("B", (value.shape[0], 4))):
                values = rng.standard_normal(shape, np.float32) * 0.3
                tensors[f"{module}.lora_{side}.weight"] = values
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


@asynccontextmanager
async def server(python: str, folder: Path, shared: Path) -> AsyncIterator[str]:
    """A detjax server of its own; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [
        python, "-m", "detjax.serve", "-m", str(folder), "--port", str(port), "--enable-lora",
        "--max-len", "128", "--admin-api-key", ADMIN_KEY, "--weights-dir", str(shared),
    ]  # fmt: skip
    log, url = shared / "server.log", f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        else:
            sys.exit(f"the server ended with {process.returncode}: {log.read_text()}")
        yield url
    finally:
        process.terminate()
        process.wait()


async def main(args: argparse.Namespace) -> None:
    """Start a server, and try everything."""
    with tempfile.TemporaryDirectory() as shared:
        async with server(args.server_python, args.model, Path(shared)) as url:
            client = DetjaxClient(
                proxy_url=url, server_urls=[url], data_parallel_size=1,
                model_name=args.model.name, admin_key=ADMIN_KEY,
            )  # fmt: skip
            async with client:
                await run(client, args.model, Path(shared))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server-python", required=True, help="a Python that has detjax")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    asyncio.run(main(parser.parse_args()))
