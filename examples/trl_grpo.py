# SPDX-License-Identifier: Apache-2.0
"""Train with TRL's GRPOTrainer in torch, and sample from detjax's server over HTTP, on a CPU.

    python examples/trl_grpo.py               # 20 updates; docs/training.md: how to install
    python examples/trl_grpo.py --dtype bfloat16           # the server's weights are rounded
    python examples/trl_grpo.py --server-python ~/detjax/bin/python    # TRL without detjax

A trainer of your own needs only the class DetjaxRollouts: give its `rollout` to GRPOTrainer. It
sends token ids to the server and receives token ids and exact float32 logprobs. After each update
it sends the weights in the body of a request. The trainer does not import detjax.

Each rollout is requested again, one prompt at a time. After the last update the weights of an
earlier update are read from a checkpoint of the trainer, and its rollout is requested a third time.
The exit code is 3 if a bit differs. torch's own logprobs of the same tokens differ; the last lines
print by how much.
"""

import argparse
import base64
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import requests
import torch
from datasets import Dataset
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

BITS_DIFFER = 3
BODY_BYTES = 256 << 20
"""Of tensors that are sent at once; a larger tensor is sent alone."""


class DetjaxRollouts:
    """Rollouts of a detjax server, whose weights follow the trainer's."""

    def __init__(self, url: str, *, admin_key: str, sampling: dict):
        """Of the model that the server has.

        Args:
            url: Of the server, without a path.
            admin_key: Its --admin-api-key, which weights need.
            sampling: Fields of /v1/completions.
        """
        self.url, self.sampling = url, sampling
        self.session = requests.Session()
        self.admin = {"Authorization": f"Bearer {admin_key}"}
        self.model = self._json(self.session.get(f"{url}/v1/models"))["data"][0]["id"]
        self.step, self.weights = -1, ""

    def rollout(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict:
        """What GRPOTrainer asks its `rollout_func` for: a group of answers to each prompt."""
        step, group = trainer.state.global_step, trainer.num_generations
        if step != self.step:
            self.push(trainer.accelerator.unwrap_model(trainer.model))
            self.step = step
        # TRL repeats each prompt for every answer of its group; a group is one prompt with n.
        ids = trainer.processing_class(text=list(prompts[::group]))["input_ids"]
        choices = self.ask(ids, seed=step, n=group)
        return {
            "prompt_ids": [choice["prompt_token_ids"] for choice in choices],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [logprobs_of(choice) for choice in choices],
        }

    def ask(self, prompt_ids: Sequence[list[int]], *, seed: int, n: int) -> list[dict]:
        """Answers to prompts of token ids: `n` to the first, `n` to the second, and so on."""
        asked = {
            "model": self.model, "prompt": prompt_ids, "n": n, "seed": seed, "temperature": 1.0,
            "top_p": 1.0, "top_k": 0, "return_token_ids": True, "return_logprob_bytes": True,
            **self.sampling,
        }  # fmt: skip
        return self._json(self.session.post(f"{self.url}/v1/completions", json=asked))["choices"]

    def push(self, model: torch.nn.Module) -> None:
        """Send the weights, and have them put in place: all of them or none."""
        self._admin("/start_weight_update", json={})
        held: dict[str, torch.Tensor] = {}
        for name, weight in model.named_parameters():  # tied weights come once
            if held and _num_bytes(held) + weight.nbytes > BODY_BYTES:
                self._admin("/update_weights", data=save(held))
                held = {}
            held[name] = weight.detach().cpu().contiguous()
        self._admin("/update_weights", data=save(held))
        self.weights = self._admin("/finish_weight_update", json={})["weights"]

    def read(self, folder: Path) -> None:
        """Have the weights of a checkpoint put in place; the server must have its --weights-dir."""
        asked = {"model_path": str(folder)}
        self.weights = self._admin("/update_weights_from_disk", json=asked)["weights"]

    def _admin(self, path: str, **body) -> dict:
        kind = {"Content-Type": "application/octet-stream"} if "data" in body else {}
        return self._json(self.session.post(self.url + path, headers=self.admin | kind, **body))

    def _json(self, response: requests.Response) -> dict:
        if not response.ok:
            sys.exit(f"{response.request.method} {response.url}: {response.text}")
        return response.json()


def logprobs_of(choice: dict) -> list[float]:
    """The float32 logprobs of an answer, bit for bit."""
    return np.frombuffer(base64.b64decode(choice["detjax"]["logprobs_f32"]), "<f4").tolist()


def _num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


# ------------------------------------------------------------------------------- what is measured


class MeasuredRollouts(DetjaxRollouts):
    """Asks each rollout again, and keeps what one update needs to be asked for once more."""

    def __init__(self, *args, checkpoint: Path, keep_step: int, **kwargs):
        """With a folder for the checkpoint of the update `keep_step`."""
        super().__init__(*args, **kwargs)
        self.checkpoint, self.keep_step = checkpoint, keep_step
        self.num_answers = self.num_different = 0
        self.kept: tuple[list, str, list[dict]] = ([], "", [])

    def rollout(self, prompts, trainer):
        """As the base class, and compared with the same asked again, prompt by prompt."""
        found = super().rollout(prompts, trainer)
        group = trainer.num_generations
        ids = found["prompt_ids"][::group]
        alone = [choice for one in ids for choice in self.ask([one], seed=self.step, n=group)]
        for i, choice in enumerate(alone):
            again = choice["token_ids"], logprobs_of(choice)
            self.num_different += again != (found["completion_ids"][i], found["logprobs"][i])
        self.num_answers += len(alone)
        if self.step == self.keep_step:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(self.checkpoint)
            self.kept = ids, self.weights, alone
        return found

    def replay(self) -> tuple[int, int, int, bool]:
        """The kept rollout with the last weights, which is the control, and with its own again.

        Returns:
            How many answers it has, how many of them differ with the last weights, how many with
            its own, and whether these have the hash that they had.
        """
        ids, weights, before = self.kept
        n = len(before) // len(ids)

        def num_other() -> int:
            after = self.ask(ids, seed=self.keep_step, n=n)
            pairs = zip(before, after, strict=True)
            return sum(a["detjax"]["digest"] != b["detjax"]["digest"] for a, b in pairs)

        with_last = num_other()
        self.read(self.checkpoint)
        return len(before), with_last, num_other(), self.weights == weights


class MeasuredTrainer(GRPOTrainer):
    """Compares its own logprobs with those of the rollout, before each update."""

    differences: list[torch.Tensor]

    def compute_loss(self, model, inputs, *args, **kwargs):
        """As GRPOTrainer; the forward pass is made once more, with TRL's padding."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        num = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, -num - 1 : -1].float()
        own = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        apart = (own - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()]
        self.differences.append(apart.double())
        return super().compute_loss(model, inputs, *args, **kwargs)


# --------------------------------------------------------------------------------- what is trained


def problems(count: int) -> Dataset:
    """Sums of two numbers, as the bundled model knows them."""
    pairs = np.random.default_rng(0).integers(10, 100, (count, 2)).tolist()
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": f"{a + b}\n"} for a, b in pairs])


def reward(completions: Sequence[str], answer: Sequence[str], **_) -> list[float]:
    """1 for the right sum and nothing else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def start_server(
    python: str, model: str, dtype: str, folder: str
) -> tuple[subprocess.Popen, str, str]:
    """A server on a free port; its process, address and key."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = secrets.token_hex(16)
    command = [
        python, "-m", "detjax.serve", "--model", model, "--dtype", dtype, "--port", str(port),
        "--weights-dir", folder, "--max-len", "256", "--batch-size", "64", "--log-level", "warning",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    server = subprocess.Popen(command, env=os.environ | {"DETJAX_ADMIN_API_KEY": key})
    url = f"http://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=10).ok:
                return server, url, key
        except requests.RequestException:
            pass
        time.sleep(0.5)
    sys.exit(f"the server ended with exit code {server.returncode}")


def train(url: str, key: str, folder: Path, args: argparse.Namespace) -> int:
    """Train, tell what differs, and return the exit code."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    rollouts = MeasuredRollouts(
        url, admin_key=key, sampling={"max_tokens": 5, "stop_token_ids": [newline]},
        checkpoint=folder / "checkpoint", keep_step=args.updates // 2,
    )  # fmt: skip
    trainer = MeasuredTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        rollout_func=rollouts.rollout,
        train_dataset=problems(args.updates * args.prompts),
        args=GRPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none",
            save_strategy="no", logging_steps=1, max_steps=args.updates,
            num_generations=args.samples,
            per_device_train_batch_size=args.prompts * args.samples, max_completion_length=5,
            learning_rate=args.learning_rate, lr_scheduler_type="constant", adam_beta2=0.95,
            gradient_checkpointing=False, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.differences = []
    trainer.train()
    apart = torch.cat(trainer.differences)
    kl = (torch.exp(apart) - 1 - apart).mean()  # Schulman's k3, as in docs/training.md
    num, with_last, num_other, is_same = rollouts.replay()
    print(f"{args.updates} updates, {rollouts.num_answers} answers, {len(apart)} tokens")
    print(f"asked again one prompt at a time: {rollouts.num_different} answers differ")
    print(
        f"update {rollouts.keep_step} replayed from its checkpoint: {num_other} of {num} differ, "
        f"weights {'equal' if is_same else 'DIFFERENT'}; with the last weights {with_last} differ"
    )
    print(f"torch's logprobs of the same tokens: {int((apart != 0).sum())} of {len(apart)} differ, "
          f"by at most {apart.abs().max():.3g}, mean KL {kl:.3g}")  # fmt: skip
    return BITS_DIFFER if rollouts.num_different or num_other or not is_same else 0


def main() -> int:
    """Read the options, start a server unless one is named, train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder that both read (default: the model that comes with detjax)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the server")
    add("--server-python", default=sys.executable, help="a Python that has detjax")
    add("--updates", type=int, default=20)
    add("--prompts", type=int, default=8, help="problems an update")
    add("--samples", type=int, default=8, help="answers to each")
    add("--learning-rate", type=float, default=3e-5)
    args = parser.parse_args()
    ask = "from detjax.models.bundled import bundled_model_path as path; print(path())"
    command = [args.server_python, "-c", ask]
    try:
        found = subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        parser.error(
            f"--server-python {args.server_python} must be a Python that has detjax: "
            f"{reason.strip().splitlines()[-1]}"
        )
    if args.model is None:
        args.model = found.stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        server, url, key = start_server(args.server_python, args.model, args.dtype, folder)
        try:
            return train(url, key, Path(folder), args)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
