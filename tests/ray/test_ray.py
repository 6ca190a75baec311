# SPDX-License-Identifier: Apache-2.0
"""Fleets: what they refuse, and two replicas of which one is killed in mid-run."""

import functools
import json
import os
import re
import runpy
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import detjax

ROOT = Path(__file__).parents[2]
FLEET = Path(__file__).with_name("fleet.py")
DOCS = ROOT / "docs" / "server.md"


def run_script(path: Path, *arguments: str) -> str:
    """Standard output of a script, with the programs of the other tests."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(jax.config.jax_compilation_cache_max_size),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(path.parent)]),
    }
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, env=env,
        timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def run_fleet(**asked) -> dict:
    return json.loads(run_script(FLEET, json.dumps(asked)).splitlines()[-1])


def rows() -> list[dict]:
    """The same prompts with other seeds."""
    prompts = ("It was late", "The old house by the sea", "17+26=")
    return [{"prompt": prompts[i % 3], "seed": i // 2} for i in range(40)]


@functools.cache
def expected() -> list[tuple]:
    """Of each row: seed, prompt, and the digest and fingerprint of one process."""
    llm = detjax.LLM(max_len=256, batch_size=3, show_progress=False)
    samplings = [
        detjax.SamplingParams(max_tokens=24, temperature=0.7, seed=row["seed"]) for row in rows()
    ]
    outputs = llm.generate([row["prompt"] for row in rows()], samplings)
    return sorted(
        (row["seed"], row["prompt"], out.outputs[0].digest(), llm.config.fingerprint)
        for row, out in zip(rows(), outputs, strict=True)
    )


def assert_as_one_process(found: list[dict]) -> None:
    """Every row is there once, with the digest of one process at another batch size."""
    key = itemgetter("seed", "prompt", "digest", "fingerprint")
    assert sorted(map(key, found)) == expected()


def assert_differences_are_seen(found: list[dict]) -> None:
    """The control: a row that is lost or there twice, or has another's answer, is seen."""
    one, other = found[0], next(row for row in found if row["digest"] != found[0]["digest"])
    swapped = [one | {"digest": other["digest"]}, *found[1:]]
    for wrong in (found[1:], [*found, one], swapped):
        with pytest.raises(AssertionError):
            assert_as_one_process(wrong)
    assert len({row["digest"] for row in found}) > 30


@pytest.mark.nightly
@pytest.mark.invariance
def test_a_data_set_survives_the_loss_of_an_actor_bit_for_bit():
    """Ray gives the rows of the killed actor to another: none is lost, none is there twice."""
    asked = [row | {"kept": f"row {i}"} for i, row in enumerate(rows())]
    said = json.loads(
        run_script(FLEET, json.dumps({"part": "data", "rows": asked})).splitlines()[-1]
    )
    assert len(said["killed"]) == 1 and len(said["workers"]) >= 3
    assert_as_one_process(said["found"])
    assert_differences_are_seen(said["found"])
    assert sorted(row["kept"] for row in said["found"]) == sorted(row["kept"] for row in asked)
    kinds = {
        "token_ids": "list<item: int32>",
        "logprobs": "list<item: float>",
        "generated_text": "string",
    }
    assert kinds.items() <= said["schema"].items(), said["schema"]


@pytest.mark.slow
@pytest.mark.invariance
def test_clients_of_two_replicas_do_not_notice_the_loss_of_one():
    """The options are those of the command in the docs; the client is OpenAI's, with retries."""
    (line,) = re.findall(r"^serve run detjax\.ray:build (.*)$", DOCS.read_text(), re.M)
    options = dict(option.split("=") for option in line.partition("#")[0].split())
    assert options["num_replicas"] == "2"
    said = run_fleet(part="serve", rows=rows(), options=options)
    assert len(said["killed"]) == 1 and len(said["workers"]) >= 3
    assert_as_one_process(said["found"])
    assert_differences_are_seen(said["found"])


@pytest.mark.nightly
@pytest.mark.invariance
def test_streams_of_a_lost_replica_begin_as_those_that_are_asked_again():
    asked = [
        {"model": "novels-6m", "prompt": row["prompt"], "seed": row["seed"], "max_tokens": 200,
         "ignore_eos": True, "temperature": 0.7} for row in rows()[:12]
    ]  # fmt: skip
    options = {"model": "novels-6m", "gpus": 0, "num_replicas": 2}
    said = run_fleet(part="streams", rows=asked, options=options)
    assert len(said["killed"]) == 1 and any(map(any, (row["cut"] for row in said["found"])))
    llm = detjax.LLM(max_len=256, batch_size=3, show_progress=False)
    for row, found in zip(asked, said["found"], strict=True):
        sampling = detjax.SamplingParams(
            max_tokens=200, temperature=0.7, seed=row["seed"], ignore_eos=True
        )
        want = llm.generate(row["prompt"], sampling)[0].outputs[0]
        assert found["digest"] == want.digest()


@pytest.mark.nightly
def test_the_example_writes_every_prompt_with_its_digest(tmp_path):
    from pyarrow import parquet

    prompts = ROOT / "examples" / "prompts.txt"
    run_script(ROOT / "examples" / "ray_data.py", "novels-6m", str(prompts), str(tmp_path), "1")
    answered = parquet.read_table(tmp_path)
    asked = [line for line in prompts.read_text().splitlines() if line]
    assert sorted(answered.column("text").to_pylist()) == sorted(asked)
    llm = detjax.LLM(max_len=256, show_progress=False)
    sampling = detjax.SamplingParams(max_tokens=16, temperature=0.8, seed=1)
    want = {text: llm.generate(text, sampling)[0].outputs[0].digest() for text in asked}
    texts, digests = (answered[name].to_pylist() for name in ("text", "digest"))
    assert dict(zip(texts, digests, strict=True)) == want


class FakeRay(SimpleNamespace):
    """Ray with so many CPUs; takes down how many actors are asked for."""

    def __init__(self, num_cpus: int):
        self.num_cpus, self.asked = num_cpus, []
        self.data = SimpleNamespace(read_text=lambda _: self)

    def init(self) -> None: ...

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.num_cpus)}

    def map_batches(self, _, *, concurrency: int, **options) -> "FakeRay":
        self.asked.append(concurrency)
        return self

    def write_parquet(self, _: str) -> None: ...


@pytest.mark.parametrize(
    ("num_cpus", "arguments", "num_replicas"),
    [(2, (), 1), (3, (), 2), (16, (), 2), (1, (), None), (2, ("2",), None), (3, ("2",), 2)],
)
def test_the_example_asks_for_no_more_actors_than_leave_a_cpu(
    monkeypatch, num_cpus, arguments, num_replicas
):
    """Actors that hold all CPUs wait for a task that reads, which waits for a CPU."""
    fake, path = FakeRay(num_cpus), ROOT / "examples" / "ray_data.py"
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "detjax.ray", SimpleNamespace(Generate=None))
    monkeypatch.setattr(detjax, "ray", sys.modules["detjax.ray"], raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), "novels-6m", "p.txt", "out", *arguments])
    if num_replicas is not None:
        runpy.run_path(str(path))
        assert fake.asked == [num_replicas]
        return
    with pytest.raises(SystemExit, match=rf"Ray has {num_cpus}; give fewer REPLICAS, or start"):
        runpy.run_path(str(path))
    assert not fake.asked


REFUSALS = """
import json, os, detjax.ray
from detjax import SamplingParams
import pyarrow as pa

def refusal(call, *args, **options):
    try:
        call(*args, **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return "taken"

class Fake(detjax.ray.Generate):
    def __init__(self):
        self._prompt_column, self._seed_column, self._sampling = "prompt", None, SamplingParams()

build, generate = detjax.ray.build, detjax.ray.Generate
said = [
    refusal(build, {"model": "novels-6m"}),
    refusal(build, {"gpus": 3, "tp": 2}),
    refusal(build, {"gpus": "many"}),
    refusal(build, {"gpus": 0, "num_replicas": 1.5}),
    refusal(build, {"gpus": 0, "port": 80}),
    refusal(build, {"gpus": 0, "admin_api_key": "a"}),
    refusal(build, {"gpus": 0, "temperature": 1}),
    refusal(build, {"gpus": 0, "mode": "quick"}),
    refusal(build, {"gpus": 0, "max_body_mb": -1}),
    refusal(build, {"gpus": 0, "config": "a.toml"}),
    refusal(build, {"gpus": 0, "no_compiel": False}),
    refusal(build, {"gpus": "2", "tp": "2", "no_compile": "true", "api_key": ["a", "b"],
                    "decode_batches": [1, 2]}),
    refusal(generate, sampling=SamplingParams(n=2)),
    refusal(generate, tmeperature=1),
    refusal(Fake(), {"prompt": ["x"]}),
    refusal(Fake(), pa.table({"text": ["x"]})),
]
os.environ["DETJAX_ADMIN_API_KEY"] = "a"
said.append(refusal(build, {"gpus": 0}))
del os.environ["DETJAX_ADMIN_API_KEY"]
os.environ["DETJAX_API_KEY"] = "of the environment"
said.append(" ".join(build({"gpus": 0, "api_key": "own"})._bound_deployment.init_args[0]))
print(json.dumps(said))
"""


@pytest.mark.slow
def test_what_cannot_be_is_refused_by_name(tmp_path):
    (tmp_path / "refusals.py").write_text(REFUSALS)
    said = json.loads(run_script(tmp_path / "refusals.py").splitlines()[-1])
    expected = [
        "gpus is missing: give gpus=0 for the CPU",
        "gpus=3 must be 0 or dp * tp = 2",
        "gpus='many' must be an integer of at least 0",
        "num_replicas=1.5 must be an integer of at least 1",
        "port=80 is no option of a replica: Ray decides it",
        "admin_api_key='a' is no option of a replica: Ray decides it",
        "unrecognized arguments: --temperature=1",
        "--mode: invalid choice: 'quick'",
        "--max-body-mb -1.0 must be above 0",
        "config='a.toml' is no option of a replica",
        "unrecognized arguments: --no-compiel=False; did you mean --no-compile?",
        "taken",
        "n=2 must be 1 here",
        "LLM has no option 'tmeperature'",
        'a batch is a dict; give map_batches batch_format="pyarrow"',
        "the rows have no column 'prompt', but ['text']",
        "DETJAX_ADMIN_API_KEY is set",
        "--api-key=own --api-key=of the environment",
    ]
    assert len(said) == len(expected)
    for found, text in zip(said, expected, strict=True):
        assert text in found
