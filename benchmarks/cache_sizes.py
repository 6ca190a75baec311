# SPDX-License-Identifier: Apache-2.0
"""How many tokens fit into a cache, by model, with local layers' own pages and without.

    python -m benchmarks.cache_sizes [--out FILE]

Nothing is run: bytes follow from shapes. Pages are those that an engine on one device chooses.
"""

import argparse
import dataclasses
import math
from bisect import bisect_left

import jax

from benchmarks.common import Rows, environment
from benchmarks.step import MODELS
from detjax.engine.config import EngineConfig, ReplicaConfig
from detjax.engine.running.memory import with_prefixes
from detjax.models.config import ModelConfig
from detjax.models.pages import by_pages, cache_of
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend

NAMES = "gpt_oss_20b", "gemma3_4b", "gemma2_2b", "qwen35_4b_published", "llama3_8b"
CONTEXT = 8192


def page_bytes(config: ModelConfig) -> tuple[int, int]:
    """Bytes of a page of 128 tokens: of layers that read all tokens, and of local layers."""

    def shape(num_layers: int, *page: int, dtype, is_local: bool = False) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_layers, 1, *page), dtype)

    cache = cache_of(config, NumericsProfile(), num_kv_slots=config.num_kv_heads, make=shape)
    sizes = [0, 0]
    for array, is_local in by_pages(cache):
        sizes[is_local] += math.prod(array.shape) * array.dtype.itemsize
    return sizes[0], sizes[1]


def row_of(config: ModelConfig, *, gib: int, batch_size: int) -> dict:
    """Pages that fit into a cache, and the tokens that they hold."""
    of_others, of_local = page_bytes(config)
    room, page_len = gib * 2**30, NumericsProfile().attention_block
    alike = room // (of_others + of_local)
    asked = EngineConfig(batch_size=batch_size, max_len=CONTEXT, prefill_chunk=512)
    reach = config.local_reach(page_len) if config.has_local_layers else 0
    replica = ReplicaConfig.of(
        asked, dp=1, page_len=page_len, steps_beat_xla=True, local_reach=reach
    )
    least = replica.least_local_pages(None) if reach else 0

    def local_of(count: int) -> int:
        return least and with_prefixes(least, count, of_others, of_local, dp=1)

    def size(count: int) -> int:
        return count * of_others + (local_of(count) or count) * of_local

    counts = range(1, room // of_others + 2)
    fitting = bisect_left(counts, True, key=lambda count: size(count) > room)
    return {
        "page_kib": (of_others + of_local) / 1024,
        "local_page_kib": of_local / 1024,
        "tokens_alike": alike * page_len,
        "tokens": fitting * page_len,
        "local_pages": local_of(fitting),
    }


def main() -> None:
    """Print and keep a row for each model and batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=int, default=60, help="room for the cache (default 60)")
    parser.add_argument("--out", help="file of rows")
    args = parser.parse_args()
    rows = Rows(environment(Backend.PORTABLE), args.out)
    for name in NAMES:
        config = dataclasses.replace(MODELS[name], max_position_embeddings=CONTEXT)
        for batch_size in (16, 64, 256):
            found = row_of(config, gib=args.gib, batch_size=batch_size)
            rows.keep(kind="cache_size", model=name, gib=args.gib, batch=batch_size, **found)


if __name__ == "__main__":
    main()
