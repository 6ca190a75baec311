# SPDX-License-Identifier: Apache-2.0
"""What PyTorch measures, in a process of its own, as JSON lines: `kernels` and `step` run this.

python -m benchmarks.rivals_torch linear --cases '[["qkv", 6144, 4096, 8, false]]'
python -m benchmarks.rivals_torch transformers --model '{"hidden_size": 4096, ...}' --batch 1 8 64
"""

import argparse
import inspect
import itertools
import json
import statistics
import sys
import time

import torch

L2_BYTES = 256 << 20
"""Weights in rotation take at least this much, so that each product reads them from memory."""


STEPS = 10
"""Of a run of whole models: each writes a position more, for which the cache has room."""


def device_us(run, turns: int, *, repeats: int = 15) -> float:
    """Median device time of `run(i)` for i in turn, of all kernels that a call launches."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for i in range(turns):
        run(i)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for i in itertools.islice(itertools.cycle(range(turns)), repeats):
            run(i)
        torch.cuda.synchronize()
    spans = [e.time_range for e in trace.events() if e.device_type == DeviceType.CUDA]
    spans.sort(key=lambda span: span.start)
    kernels, rest = divmod(len(spans), repeats)
    if not kernels or rest:
        raise RuntimeError(f"{len(spans)} kernels in {repeats} calls")
    times = [span.elapsed_us() for span in spans]
    return statistics.median(sum(times[i : i + kernels]) for i in range(0, len(times), kernels))


def fixed_tiles():
    """One tile for every M and no split over K, as Thinking Machines' batch-invariant product.

    Reference: "Defeating Nondeterminism in LLM Inference", 2025: 128 x 128 x 64 for bfloat16.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, w, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        # Eight tiles of rows by all of N before the next eight, so that weights stay in the L2.
        row_tiles, col_tiles = tl.cdiv(m, BM), tl.cdiv(n, BN)
        width = 8 * col_tiles
        first = tl.program_id(0) // width * 8
        height = tl.minimum(row_tiles - first, 8)
        rows = (first + tl.program_id(0) % width % height) * BM + tl.arange(0, BM)
        cols = (tl.program_id(0) % width // height) * BN + tl.arange(0, BN)
        depth = tl.arange(0, BK)
        x_ptrs = x + rows[:, None] * k + depth[None, :]
        w_ptrs = w + cols[None, :] * k + depth[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        for _ in range(0, k, BK):
            total = tl.dot(tl.load(x_ptrs, mask=rows[:, None] < m), tl.load(w_ptrs), total)
            x_ptrs += BK
            w_ptrs += BK
        tl.store(
            out + rows[:, None].to(tl.int64) * n + cols[None, :],
            total.to(out.dtype.element_ty),
            mask=rows[:, None] < m,
        )

    def run(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """`out = x @ w.T`; N must be a multiple of 128 and K of 64."""
        (m, k), n = x.shape, w.shape[0]
        grid = (triton.cdiv(m, 128) * (n // 128),)
        kernel[grid](x, w, out, m, n, k, BM=128, BN=128, BK=64, num_warps=8, num_stages=3)

    return run


def linear(cases: list) -> None:
    """Time `torch.mm` and fixed tiles for each (shape, N, K, M, whether the output is float32)."""
    fixed = fixed_tiles()
    weights: dict[str, list[torch.Tensor]] = {}
    for shape, n, k, m, is_wide in cases:
        if shape not in weights:
            weights.clear()
            count = -(-L2_BYTES // (2 * n * k))
            weights[shape] = [
                torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)
            ]
        ws = weights[shape]
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        dtype = torch.float32 if is_wide else torch.bfloat16
        out = torch.empty(m, n, device="cuda", dtype=dtype)

        def product(i, x=x, ws=ws, is_wide=is_wide):
            more = {"out_dtype": torch.float32} if is_wide else {}
            return torch.mm(x, ws[i].t(), **more)

        def tiled(i, x=x, ws=ws, out=out):
            fixed(x, ws[i], out)

        row = {"shape": shape, "m": m}
        for name, run in (("torch", product), ("fixed", tiled)):
            try:
                row[f"{name}_us"] = device_us(run, len(ws))
            except Exception as error:
                row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
        if "fixed_us" in row and "torch_us" in row:
            want = product(0).float()
            tiled(0)
            row["fixed_error"] = float((out.float() - want).norm() / want.norm())
        print(json.dumps(row), flush=True)


class TransformersStep:
    """`LlamaForCausalLM` with random weights over a static cache that is full up to a context."""

    def __init__(self, sizes: dict, *, device: str):
        """Make the model."""
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(attn_implementation="sdpa", **sizes)
        self.device = device
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            self.model = LlamaForCausalLM(self.config).eval()

    def wall_ms(self, batch: int, context: int, *, is_compiled: bool) -> float:
        """Median over five runs of the mean time of a greedy decode step."""
        from transformers import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=context + 16)
        tokens = torch.full((batch, 1), 5, device=self.device)
        positions = torch.tensor([context - 1], device=self.device)
        more = {}
        if "cache_position" in inspect.signature(type(self.model.model).forward).parameters:
            more["cache_position"] = positions

        def forward(tokens):
            logits = self.model(
                tokens,
                past_key_values=cache,
                use_cache=True,
                position_ids=positions[None].expand(batch, 1),
                logits_to_keep=1,
                **more,
            ).logits
            return logits[:, -1].argmax(dim=-1, keepdim=True)

        forward(tokens)  # allocates the cache
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        step = forward
        if is_compiled:
            step = torch.compile(forward, mode="reduce-overhead", dynamic=False)

        def run(count):
            for layer in cache.layers:  # where the cache itself counts its tokens
                if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                    layer.cumulative_length.fill_(context - 1)
            synchronise(self.device)
            begin = time.perf_counter()
            for _ in range(count):
                torch.compiler.cudagraph_mark_step_begin()
                step(tokens)
            synchronise(self.device)
            return (time.perf_counter() - begin) / count * 1e3

        run(4)  # compiles, and records the graph
        return statistics.median(run(STEPS) for _ in range(5))


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def transformers(sizes: dict, batches: list[int], context: int, seconds: float, device: str):
    """Time decode steps, eager and compiled; a row that says why where one fails."""
    deadline = time.monotonic() + seconds
    versions = {"torch": torch.__version__}
    cases = [(batch, is_compiled) for is_compiled in (False, True) for batch in batches]
    try:
        import transformers as package

        versions["transformers"] = package.__version__
        model = TransformersStep(sizes, device=device)
    except Exception as error:
        model, reason = None, f"{type(error).__name__}: {error}"[:300]
    for batch, is_compiled in cases:
        row = {"impl": "transformers compiled" if is_compiled else "transformers eager"}
        row |= {"batch": batch, "context": context, **versions}
        if model is None:
            row["failed"] = reason
        elif time.monotonic() > deadline:
            row["failed"] = f"not started: {seconds:.0f} s were over"
        else:
            try:
                row["ms_p50"] = model.wall_ms(batch, context, is_compiled=is_compiled)
                row["steps"] = STEPS
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)


def main() -> None:
    """Run one subject."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=["linear", "transformers"])
    parser.add_argument("--cases", type=json.loads, default=[])
    parser.add_argument("--model", type=json.loads, default={})
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.subject == "linear":
        linear(args.cases)
    else:
        transformers(args.model, args.batch, args.context, args.seconds, args.device)


if __name__ == "__main__":
    sys.exit(main())
