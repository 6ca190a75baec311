# SPDX-License-Identifier: Apache-2.0
"""One process of a job: `python worker.py '{"coordinator": ..., ...}'`; see `test_distributed.py`.

Process 0 prints the digests of what it generated as one line of JSON.
"""

import json
import os
import signal
import sys
import time

from detjax.parallel.distributed import start_job
from detjax.parallel.job_spec import JobSpec
from detjax.parallel.mesh import configure_virtual_devices

LATE_S = 33
"""Longer than Gloo lets devices wait for the first collective of theirs."""

LENGTHS = (29, 6, 140)
SM90_SIZES = {"head_dim": 64, "hidden_size": 512, "intermediate_size": 1536, "vocab_size": 1024}


def requests(changed: bool):
    from detjax.engine.requests.request import Request
    from detjax.engine.requests.sampling_params import SamplingParams

    return [
        Request(
            prompt_token_ids=tuple((7 * i + 3 * j + changed) % 320 for j in range(length)),
            sampling=SamplingParams(max_tokens=6, temperature=float(i), seed=i),
        )
        for i, length in enumerate(LENGTHS)
    ]


def make_engine(mesh, backend: str = "portable"):
    """An engine of a small random model that either backend takes."""
    from detjax.engine.config import EngineConfig
    from detjax.engine.engine import Engine
    from detjax.models.loading import random_model
    from detjax.numerics import NumericsProfile
    from detjax.pallas_kernels.backend import Backend
    from detjax.parallel.mesh import make_mesh
    from detjax.testing.dummies import dummy_config

    kernels = Backend(backend)
    sizes = {} if kernels is Backend.PORTABLE else SM90_SIZES
    model = random_model(
        dummy_config(num_layers=1, **sizes),
        seed=0,
        profile=NumericsProfile(),
        mesh=make_mesh(*mesh, platform=kernels.platform),
        backend=kernels,
    )
    return Engine(model, EngineConfig(batch_size=2, prefill_chunk=256, max_len=256))


def save_bundled(mesh, folder: str) -> None:
    """Load the bundled model with all processes, and save it."""
    from detjax.models.bundled import bundled_model_path
    from detjax.models.loading import load_model
    from detjax.numerics import NumericsProfile
    from detjax.pallas_kernels.backend import Backend
    from detjax.parallel.mesh import make_mesh

    model = load_model(
        str(bundled_model_path()), profile=NumericsProfile(), mesh=make_mesh(*mesh),
        backend=Backend.PORTABLE, max_len=64,
    )  # fmt: skip
    model.save(folder)


def main() -> None:
    what = json.loads(sys.argv[1])
    process_id, fault = what["process_id"], what.get("fault")
    watch = start_job(
        JobSpec(
            coordinator=what["coordinator"],
            num_processes=what["num_processes"],
            process_id=process_id,
        ),
        join_s=what.get("join_s", 60),
    )
    configure_virtual_devices(what["devices"])
    is_faulty = process_id == what.get("faulty")
    if "save" in what:
        with watch.working():
            save_bundled(what["mesh"], what["save"])
        return
    asked = requests(changed=is_faulty and fault == "other requests")
    if is_faulty and fault == "late":
        time.sleep(LATE_S)
    engine = make_engine(what["mesh"], what.get("backend", "portable"))
    counter = iter(range(1000))

    def on_token(event) -> bool:
        if is_faulty and next(counter) == 3:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raises":
                raise ZeroDivisionError("planted")
        return False

    watch.check_same("requests", repr(asked))
    with watch.working():
        got = engine.generate(asked, on_token=on_token)
    print(json.dumps([completion.digest() for completion in got]))


if __name__ == "__main__":
    main()
