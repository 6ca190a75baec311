# SPDX-License-Identifier: Apache-2.0
"""How long the hash of a model's weights takes: where they lie, and copied to the host.

python -m benchmarks.weight_hash --model FOLDER --backend sm90 --out rows.jsonl

The first call compiles. Both ways must give one hash.
"""

import argparse
import datetime
import json
import time
from pathlib import Path
from unittest import mock

import jax

import detjax
from detjax.models.loading import LoadedModel
from detjax.models.weights import hashing


def timed(model: LoadedModel) -> tuple[str, float]:
    """The hash, and the seconds that it took."""
    begin_s = time.perf_counter()
    found = hashing.hash_weights(
        model.params, model.config, model.mesh, vocab_block=model.profile.vocab_block
    )
    return found, time.perf_counter() - begin_s


def measure(model: LoadedModel) -> dict:
    """The row of a model."""
    found = [timed(model) for _ in range(3)]
    with mock.patch.object(hashing, "_places", lambda *_, **__: None):
        on_host = timed(model)
    if len({one for one, _ in (*found, on_host)}) > 1:
        raise SystemExit("the hashes differ")
    return {
        "subject": "weight_hash",
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
        "first_s": found[0][1],
        "again_s": min(s for _, s in found[1:]),
        "host_s": on_host[1],
        "gpu": model.mesh.devices.flat[0].device_kind,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    """Measure, print and write one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="novels-6m", help="a folder or an id")
    parser.add_argument("--backend", default="auto", help="portable or sm90 (default: by hardware)")
    parser.add_argument("--out", help="append the row to this file")
    args = parser.parse_args()
    llm = detjax.LLM(args.model, backend=args.backend, max_len=256, show_progress=False)
    row = measure(llm.model) | {"model": Path(args.model).name}
    print(json.dumps(row))
    if args.out:
        with Path(args.out).open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
