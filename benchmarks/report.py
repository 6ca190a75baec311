# SPDX-License-Identifier: Apache-2.0
"""Write the README's performance section from the committed rows: python -m benchmarks.report."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
SHAPES = ("qkv", "o", "gate_up", "down", "lm_head")
ROW_COUNTS = (1, 8, 64, 128, 512, 2048, 8192)


def rows(subject: str) -> list[dict]:
    """The newest committed rows of a subject."""
    newest = sorted(RESULTS.glob(f"*-{subject}.jsonl"))[-1]
    return [json.loads(line) for line in newest.read_text().splitlines()]


def linear_table() -> list[str]:
    """Ratio of the best of cuBLAS and XLA to ours, by shape and number of rows."""
    ratio = {(r["shape"], r["m"]): r["ratio"] for r in rows("linear") if "ratio" in r}
    lines = ["| rows | " + " | ".join(SHAPES) + " |", "|---" * (len(SHAPES) + 1) + "|"]
    for count in ROW_COUNTS:
        cells = [ratio.get((shape, count)) for shape in SHAPES]
        lines.append(f"| {count} | " + " | ".join(f"{c:.2f}" if c else "" for c in cells) + " |")
    return lines


def attention_lines() -> list[str]:
    """Prefill against cuDNN in its own run; decode as a share of the copy bandwidth."""
    timed = [r for r in rows("attention") if "time" in r]
    (kept,) = [r for r in timed if r["time"] == "late merge" and r["tokens"] == 8192]
    lines = [
        f"Prefill, 8192 tokens, 32/8 heads of 128: {kept['ms']:.3f} ms, {kept['tflops']:.0f} "
        f"TFLOP/s, {kept['over_cudnn']:.2f} of cuDNN's speed in the same run."
    ]
    decode = (("decode merge 4,1", 64, 4096), ("decode merge 4,1", 256, 1024))
    for name, batch, tokens in (*decode, ("decode default", 1, 32768)):
        found = [
            r for r in timed if (r["time"], r.get("batch"), r["tokens"]) == (name, batch, tokens)
        ][-1]
        lines.append(
            f"Decode, {batch} x {tokens} tokens: {found['us']:.1f} us, "
            f"{found['share']:.2f} of 4.3 TB/s."
        )
    return [f"- {line}" for line in lines]


def row_lines() -> list[str]:
    """Kernels that are bound by memory."""
    lines = []
    for r in rows("rows"):
        if r.get("time") in ("add_rms_norm 8192x4096", "swiglu 8192x14336"):
            name, size = r["time"].split()
            ours = r["chosen"]
            lines.append(
                f"- `{name}`, {size}: {ours['us']:.1f} us, {ours['share_of_copy']:.2f} of the "
                f"copy bandwidth (XLA {r['xla_us']:.1f} us)."
            )
    return lines


def section() -> str:
    """The text between the markers."""
    return "\n".join(
        [
            BEGIN,
            "Linear layers of Llama-3.1-8B, bfloat16, one H200: time of `jnp.dot` (cuBLAS or XLA's",
            "own kernel) over ours in the same run. `o` and `down` sum eight leaves as a tree;",
            "above 128 rows ours also add the residual stream, which the rival does not.",
            "",
            *linear_table(),
            "",
            *attention_lines(),
            *row_lines(),
            END,
        ]
    )


def main() -> None:
    """Rewrite the README, or with --check say whether it is up to date."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    new = text[:start] + section() + text[stop:]
    if "--check" in sys.argv:
        sys.exit(0 if new == text else "README.md is stale: run python -m benchmarks.report")
    readme.write_text(new)


if __name__ == "__main__":
    main()
