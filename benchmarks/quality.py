# SPDX-License-Identifier: Apache-2.0
"""What quantisation costs in quality: how well each scheme's copy of a model predicts a text.

python -m benchmarks.quality --model DIR --text novels.txt.gz --out rows.jsonl

The model is quantised by each scheme of `detjax.quantize`. Each copy and the bfloat16 model score
the same windows of the text, which begin at line ends spread evenly over it. Every token of a
window but the first counts. A row has the mean loss in nats per token and in bits per byte of the
text, and the difference from bfloat16 with its standard error. Windows are far apart, so they are
taken as independent, and the error is that of the mean over windows. `same_greedy` is the share of
positions at which greedy decoding would choose the token that the bfloat16 model chooses. The
bfloat16 model is scored with a cache of 8 bits as well.
"""

import argparse
import gzip
import hashlib
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import rich.console
import rich.table

from benchmarks.common import Rows, environment
from detjax import LLM
from detjax.defaults import AUTO, FP8_CACHE, KV_CACHE_DTYPES
from detjax.models.hub import find_model
from detjax.models.quantization.quantize import GROUP_SIZES, RECIPES, quantize_folder
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.load import ignore_progress
from detjax.pallas_kernels.backend import Backend

BFLOAT16 = "bfloat16"
ANY_WIDTH = [name for name, recipe in RECIPES.items() if recipe.block_rows == 1]
"""Schemes without blocks, which take only models of whole blocks of 128."""

FORMS = dict.fromkeys(("fp8-dynamic", "fp8-block", "int8-w8a8"), ("auto", "w8a8"))
"""Forms of `quantized_weights` that give a scheme other answers: w8a8 rounds activations too."""
STDERR = rich.console.Console(stderr=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A piece of the text.

    Attributes:
        ids: Its tokens.
        num_bytes: Of the text of all its tokens but the first, in UTF-8.
    """

    ids: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """How well a model predicts each window.

    Attributes:
        nats: For each window, the sum of its tokens' negative logprobs.
        greedy_ids: For each window, the most likely token at each position but the last.
    """

    nats: np.ndarray
    greedy_ids: tuple[tuple[int, ...], ...]


def read_text(path: Path) -> str:
    """A text file in UTF-8, or one that gzip has packed."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def windows_of(text: str, tokenizer: Tokenizer, *, count: int, length: int) -> list[Window]:
    """Windows of `length` tokens that begin at line ends spread evenly over the text.

    Raises:
        ValueError: If the text is too short, or its lines are.
    """
    found = []
    for i in range(count):
        start = text.find("\n", len(text) * i // count) + 1
        # No token has more than 16 characters on average over a window.
        piece = text[start : start + 16 * length]
        ids = tokenizer.encode_raw(piece)[:length]
        if start == 0 or len(ids) < length:
            raise ValueError(
                f"the text has {len(text)} characters, too few for {count} windows of {length} "
                "tokens; ask for fewer or shorter ones"
            )
        scored = b"".join(tokenizer.token_bytes(one) for one in ids[1:])
        found.append(Window(ids=tuple(ids), num_bytes=len(scored)))
    return found


def score(
    folder: Path,
    windows: Sequence[Window],
    cache_dir: str,
    *,
    weights: str = "auto",
    kv_cache_dtype: str = AUTO,
) -> tuple[Scores, str]:
    """Score all windows with weights in a form of `quantized_weights`; also the backend."""
    llm = LLM(
        folder, dtype=BFLOAT16, max_len=len(windows[0].ids) + 1, show_progress=False,
        cache_dir=cache_dir, batch_size=min(8, len(windows)), quantized_weights=weights,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    scored = llm.engine.score([window.ids for window in windows], top=1)
    nats = [-math.fsum(float(token.logprob) for token in tokens) for tokens in scored]
    greedy_ids = tuple(tuple(token.top_logprobs[0][0] for token in tokens) for tokens in scored)
    return Scores(nats=np.array(nats), greedy_ids=greedy_ids), llm.model.backend.value


def row_of(windows: Sequence[Window], got: Scores, exact: Scores) -> dict[str, float]:
    """The figures of one model; `exact` are the scores of the bfloat16 model."""
    per_window = len(windows[0].ids) - 1
    num_bytes = sum(window.num_bytes for window in windows)
    changes = (got.nats - exact.nats) / per_window
    error = changes.std(ddof=1) / math.sqrt(len(windows)) if len(windows) > 1 else 0.0
    same = np.array(got.greedy_ids) == np.array(exact.greedy_ids)
    return {
        "nats_per_token": float(got.nats.mean()) / per_window,
        "bits_per_byte": float(got.nats.sum()) / math.log(2) / num_bytes,
        "difference_nats": float(changes.mean()),
        "difference_se": float(error),
        "same_greedy": float(same.mean()),
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", required=True, help="a bfloat16 folder, or a Hugging Face id")
    parser.add_argument("--text", type=Path, required=True, help="a text file, or one of gzip")
    parser.add_argument(
        "--windows", type=int, default=16, help="pieces of the text that are scored"
    )
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--schemes", nargs="*", default=ANY_WIDTH, choices=list(RECIPES))
    parser.add_argument(
        "--kv-cache-dtype", nargs="*", default=[FP8_CACHE], choices=KV_CACHE_DTYPES,
        help="caches with which the bfloat16 model is scored, beside its own",
    )  # fmt: skip
    parser.add_argument("--group-size", type=int, default=128, choices=GROUP_SIZES)
    parser.add_argument("--out", help="write JSON rows here")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Score the model and each copy; print a table."""
    args = make_parser().parse_args(argv)
    model, text = find_model(args.model), read_text(args.text)
    windows = windows_of(text, Tokenizer.from_folder(model), count=args.windows, length=args.length)
    about = {
        "subject": "quality", "model": model.name, "text": args.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(), "windows": args.windows,
        "length": args.length, "bytes": sum(window.num_bytes for window in windows),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        programs = str(Path(scratch) / "programs")
        exact, backend = score(model, windows, programs)
        rows = Rows(environment(Backend(backend)), args.out)
        for cache in dict.fromkeys((AUTO, *args.kv_cache_dtype)):
            got = exact
            if cache != AUTO:
                got, _ = score(model, windows, programs, kv_cache_dtype=cache)
            figures = row_of(windows, got, exact)
            rows.keep(
                **about, scheme=BFLOAT16, weights="auto", group_size=0, kv_cache_dtype=cache,
                **figures,
            )  # fmt: skip
        for scheme in args.schemes:
            recipe, folder = RECIPES[scheme], Path(scratch) / scheme
            if recipe.group_size and recipe.block_rows == 1:
                recipe = replace(recipe, group_size=args.group_size)
            quantize_folder(model, folder, recipe, progress=ignore_progress)
            for weights in FORMS.get(scheme, ("auto",)):
                try:
                    got, _ = score(folder, windows, programs, weights=weights)
                except ValueError as error:  # such as a width that the backend does not add by
                    STDERR.print(f"{scheme} with {weights}: {error}", highlight=False)
                    continue
                figures = row_of(windows, got, exact)
                rows.keep(
                    **about, scheme=scheme, weights=weights, group_size=recipe.group_size,
                    kv_cache_dtype=AUTO, **figures,
                )  # fmt: skip
    show(rows.rows)


def show(rows: list[dict]) -> None:
    """A table of the rows."""
    table = rich.table.Table(
        "scheme", "weights", "cache", "nats a token", "bits a byte", "worse by, nats", "same greedy"
    )
    for row in rows:
        table.add_row(
            row["scheme"], row["weights"], row["kv_cache_dtype"], f"{row['nats_per_token']:.4f}",
            f"{row['bits_per_byte']:.4f}",
            f"{row['difference_nats']:+.4f} ± {row['difference_se']:.4f}",
            f"{row['same_greedy']:.1%}",
        )  # fmt: skip
    STDERR.print(table)


if __name__ == "__main__":
    sys.exit(main())
