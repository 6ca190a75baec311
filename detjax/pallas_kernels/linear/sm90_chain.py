# SPDX-License-Identifier: Apache-2.0
"""The products of a layer at few rows in one launch: o, gate/up, down, the next layer's q/k/v.

A persistent grid, one CTA an SM, all resident at once. A loading warpgroup streams this CTA's
weights of all products, in order, through one ring of shared-memory slots: it waits for nothing but
free slots, so the next product's weights are in flight while the grid finishes the last one.
Only who reads activations waits, at a counter in device memory that every CTA raises when its share
of a product is stored.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.sm90_matmul import (
    add_bias,
    hold_rows,
    leaf_sum,
    put_transposed,
    tiled,
    tree_sum,
)
from detjax.pallas_kernels.linear.tiles import OUT_ROWS, ChainTiles, held_chunk
from detjax.pallas_kernels.swiglu.sm90 import gated_bf16

NUM_COUNTERS = 3
"""Words of a layer: a barrier of the grid after each product but the last."""

COMPUTE, LOADER, FEEDER = 0, 1, 2
"""Warpgroups: one multiplies, one loads weights, one activations; more only normalise."""

MAX_SPIN_CYCLES = 4_000_000_000
"""A CTA that waits for 2 s ends the kernel with an error: not all CTAs can be resident."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One product of the chain: sizes alone.

    Attributes:
        k_len: K.
        leaf_len: Of a leaf of its tree; K if it has one leaf.
        num_out: Outputs.
        is_gated: Whether its weights are gates, then as many ups.
        has_norm: Whether its input is normalised and held whole; else it is streamed.
        has_residual: Whether the residual stream is added.
        slot_bytes: Of a slot of the ring.
    """

    k_len: int
    leaf_len: int
    num_out: int
    is_gated: bool = False
    has_norm: bool = False
    has_residual: bool = False
    slot_bytes: int

    @property
    def rows(self) -> int:
        """Rows of weights of a tile."""
        return 2 * OUT_ROWS if self.is_gated else OUT_ROWS

    @property
    def span(self) -> int:
        """Depth of a slab: the widest swizzle whose span divides a leaf."""
        return next(span for span in (64, 32, 16) if self.leaf_len % span == 0)

    @property
    def room(self) -> int:
        """Slabs that a slot has room for."""
        return self.slot_bytes // (2 * self.rows * self.span)

    @property
    def slabs(self) -> int:
        """Slabs of a pipeline step: as many as fit and divide a leaf."""
        count = self.leaf_len // self.span
        return next(n for n in range(self.room, 0, -1) if count % n == 0)

    @property
    def leaf_steps(self) -> int:
        """Pipeline steps of a leaf."""
        return self.leaf_len // (self.slabs * self.span)

    @property
    def steps(self) -> int:
        """Pipeline steps of a tile."""
        return self.k_len // (self.slabs * self.span)

    @property
    def levels(self) -> int:
        """Of the tree of leaves."""
        return (self.k_len // self.leaf_len).bit_length() - 1

    @property
    def num_tiles(self) -> int:
        """Output tiles."""
        return self.num_out // OUT_ROWS

    @property
    def copies(self) -> int:
        """TMA copies of weights in a step."""
        return self.slabs * (2 if self.is_gated else 1)


@dataclass(frozen=True, slots=True)
class _Phase:
    """A product inside the kernel: its references and this CTA's share of it.

    `first`, `count`: its first tile and how many it has, a grid apart. `ring`, `fed`, `kept`: steps
    of weights and of streamed activations, and residual tiles, of the products before.
    """

    product: Product
    x: object
    w: object
    bias: object
    residual: object
    gain: object
    out: object
    w_smem: object
    x_smem: object
    first: object
    count: object
    ring: object
    fed: object
    kept: object

    def step(self, tile, i):
        """Which step of the ring is step `i` of this CTA's tile `tile`."""
        return self.ring + tile * self.product.steps + i

    def fed_step(self, tile, i):
        """The same of streamed activations."""
        return self.fed + tile * self.product.steps + i

    def row(self, tile, num_ctas):
        """First output of this CTA's tile `tile`."""
        return (self.first + tile * num_ctas) * OUT_ROWS


@functools.partial(jax.jit, static_argnames=("leaf_lens", "eps", "tiles", "interpret"))
def chain(
    x, residual, o, gate_up, down, following, counters, layer,
    *, leaf_lens: tuple[int, int], eps: float, tiles: ChainTiles, interpret=None,
):  # fmt: skip
    """The products of a layer after attention, and the next layer's first.

    Args:
        x: Attention's output, bfloat16 [M, K].
        residual: The residual stream, bfloat16 [M, D].
        o: Weights [D, K] and bias [D] or None.
        gate_up: Gain of the norm [D] and weights [2 F, D], gates before ups.
        down: Weights [D, F] and bias [D] or None.
        following: Gain [D], weights [Q, D] and bias [Q] or None; or None after the last layer.
        counters: int32 [layers, NUM_COUNTERS], zero in this layer's row.
        layer: Which row, an int32 scalar.
        leaf_lens: Lengths of the leaves of o and of down.
        eps: Of both norms.
        tiles: How the work is cut; changes no bit.
        interpret: Interpret on CPU: the CTAs are those of a cluster, the barrier is the cluster's.

    Raises:
        ValueError: For more than 8 rows, or outputs that are no multiple of a tile's.

    Returns:
        The residual stream, the product of `following` or None, and the counters.

    Numerics:
        # ORDER, # ROUND: those of `linear_add`, `norm_linear_swiglu` and `norm_linear`, by the same
        functions; K is never split over CTAs, and which of them has a tile changes no bit.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    num_rows, width = residual.shape
    rounded = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    sized = functools.partial(Product, slot_bytes=tiles.slot_bytes)
    ffn = gate_up[1].shape[0] // 2
    products = [
        sized(k_len=x.shape[1], leaf_len=leaf_lens[0], num_out=width, has_residual=True),
        sized(k_len=width, leaf_len=width, num_out=ffn, is_gated=True, has_norm=True),
        sized(k_len=ffn, leaf_len=leaf_lens[1], num_out=width, has_residual=True),
    ]
    if following is not None:
        num_out = following[1].shape[0]
        products.append(sized(k_len=width, leaf_len=width, num_out=num_out, has_norm=True))
    streamed = [p for p in products if not p.has_norm]
    if num_rows > 8 or any(p.num_out % OUT_ROWS for p in products):
        raise ValueError(
            f"a chain takes at most 8 rows and outputs in multiples of {OUT_ROWS}, not {num_rows} "
            f"rows and {[p.num_out for p in products]} outputs"
        )

    num_ctas, stages, x_slots = tiles.num_ctas, tiles.stages, tiles.x_slots
    is_interpreted = interpret is not None
    rows_each = pl.cdiv(num_rows, 4)
    num_sharers = pl.cdiv(num_rows, rows_each)
    num_threads = max(FEEDER + 1, num_sharers + 1)
    w_views = sorted({(p.rows, p.span) for p in products})
    x_views = sorted({(p.slabs, p.span) for p in streamed})
    w_copies = max(p.copies for p in products)
    x_copies = max(p.slabs for p in streamed)
    arithmetic = sm90_rows.Arithmetic(layout=plgpu.Layout.WGMMA, is_interpreted=is_interpreted)
    present = [
        (w, bias, gain)
        for w, bias, gain in (
            (*o, None),
            (gate_up[1], None, gate_up[0]),
            (*down, None),
            (None, None, None) if following is None else (*following[1:], following[0]),
        )
        if w is not None
    ]
    operands = [v for group in present for v in group if v is not None]

    def body(x_gmem, residual_gmem, *refs):
        refs = list(refs)
        groups = [[None if v is None else refs.pop(0) for v in group] for group in present]
        counters_ref, layer_ref = refs.pop(0), refs.pop(0)
        outs = [refs.pop(0) for _ in products]
        w_smem, x_smem, out_smem, kept_smem, sums_smem, *barriers = refs
        full, empty, x_full, x_empty, kept_full, kept_empty, held, done = barriers
        w_of = dict(zip(w_views, w_smem, strict=True))
        held_view, *x_rest = x_smem
        x_of = dict(zip(x_views, x_rest, strict=True))
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")

        phases, numbered = [], 0
        ring = fed = kept = jnp.int32(0)
        inputs = (x_gmem, outs[0], outs[1], outs[2])
        for i, (product, (w, bias, gain)) in enumerate(zip(products, groups, strict=True)):
            start = numbered % num_ctas if tiles.is_rotated else 0
            first = lax.rem(cta + (num_ctas - start), jnp.int32(num_ctas))
            count = lax.div(product.num_tiles - first + (num_ctas - 1), jnp.int32(num_ctas))
            phases.append(
                _Phase(
                    product=product,
                    x=inputs[i],
                    w=w,
                    bias=bias,
                    residual=(residual_gmem, None, outs[0], None)[i],
                    gain=gain,
                    out=outs[i],
                    w_smem=w_of[product.rows, product.span],
                    x_smem=held_view if product.has_norm else x_of[product.slabs, product.span],
                    first=first,
                    count=count,
                    ring=ring,
                    fed=fed,
                    kept=kept,
                )
            )
            numbered += product.num_tiles
            ring += count * product.steps
            fed += count * (0 if product.has_norm else product.steps)
            kept += count * int(product.has_residual)

        def meet(i, *, for_tma=False):
            """Wait until all CTAs have stored their share of product `i`."""
            if is_interpreted:
                plgpu.barrier_wait(done.at[i])
            else:
                index = layer_ref[0] * NUM_COUNTERS + i
                _await_grid(counters_ref, index, num_ctas, for_tma=for_tma)

        def announce(i):
            """Say that this CTA's share of product `i` is stored."""
            if is_interpreted:
                plgpu.barrier_arrive(done.at[i])
            else:
                _announce(counters_ref, layer_ref[0] * NUM_COUNTERS + i)

        def free_slot(barriers, n, num_slots):
            """The slot of step `n`, once it has been read."""
            slot = lax.rem(n, jnp.int32(num_slots))

            @pl.when(n >= num_slots)
            def _():
                plgpu.barrier_wait(barriers.at[slot])

            return slot

        def load_weights(phase: _Phase):
            product = phase.product

            def step(i, tile):
                slot = free_slot(empty, phase.step(tile, i), stages)
                for s in range(product.slabs):
                    columns = pl.ds((i * product.slabs + s) * product.span, product.span)
                    for part in range(2 if product.is_gated else 1):
                        first = phase.row(tile, num_ctas) + part * product.num_out
                        plgpu.copy_gmem_to_smem(
                            phase.w.at[pl.ds(first, OUT_ROWS), columns],
                            phase.w_smem.at[slot, s, pl.ds(part * OUT_ROWS, OUT_ROWS)],
                            full.at[slot],
                        )
                for _ in range(w_copies - product.copies):
                    plgpu.barrier_arrive(full.at[slot])
                return tile

            @pl.loop(0, phase.count)
            def _tiles(tile):
                lax.fori_loop(0, product.steps, step, tile)

        def prefetch(phase: _Phase):
            """Bring what will not fit in the ring into the L2, of the first tile."""
            product = phase.product
            depth = product.slabs * product.span

            def step(i, _):
                for part in range(2 if product.is_gated else 1):
                    first = phase.row(0, num_ctas) + part * product.num_out
                    plgpu.async_prefetch(
                        phase.w.at[pl.ds(first, OUT_ROWS), pl.ds(i * depth, depth)],
                        predicate=phase.count > 0,
                    )
                return ()

            lax.fori_loop(stages, min(stages + tiles.ahead, product.steps), step, ())

        def feed(phase: _Phase):
            """Stream the activations of each tile, then its residual."""
            product = phase.product
            all_rows = pl.ds(jnp.int32(0), 8)

            def step(i, tile):
                slot = free_slot(x_empty, phase.fed_step(tile, i), x_slots)
                for s in range(product.slabs):
                    columns = pl.ds((i * product.slabs + s) * product.span, product.span)
                    plgpu.copy_gmem_to_smem(
                        phase.x.at[all_rows, columns], phase.x_smem.at[slot, s], x_full.at[slot]
                    )
                for _ in range(x_copies - product.slabs):
                    plgpu.barrier_arrive(x_full.at[slot])
                return tile

            @pl.loop(0, phase.count)
            def _tiles(tile):
                lax.fori_loop(0, product.steps, step, tile)

                @pl.when(phase.kept + tile > 0)
                def _():
                    plgpu.barrier_wait(kept_empty)

                columns = pl.ds(phase.row(tile, num_ctas), OUT_ROWS)
                plgpu.copy_gmem_to_smem(phase.residual.at[all_rows, columns], kept_smem, kept_full)

        def multiply_tile(phase: _Phase, tile):
            product = phase.product

            def take(i):
                plgpu.barrier_wait(full.at[lax.rem(phase.step(tile, i), jnp.int32(stages))])
                if not product.has_norm:
                    n = phase.fed_step(tile, i)
                    plgpu.barrier_wait(x_full.at[lax.rem(n, jnp.int32(x_slots))])

            def multiply(i, acc):
                slot = lax.rem(phase.step(tile, i), jnp.int32(stages))
                x_slot = lax.rem(phase.fed_step(tile, i), jnp.int32(x_slots))
                for s in range(product.slabs):
                    at = (i * product.slabs + s, 0) if product.has_norm else (x_slot, s)
                    plgpu.wgmma(acc, phase.w_smem.at[slot, s], phase.x_smem.at[at].T)

            def give(i):
                plgpu.barrier_arrive(empty.at[lax.rem(phase.step(tile, i), jnp.int32(stages))])
                if not product.has_norm:
                    n = phase.fed_step(tile, i)
                    plgpu.barrier_arrive(x_empty.at[lax.rem(n, jnp.int32(x_slots))])

            shape = (product.rows, 8)

            def leaf(first):
                return leaf_sum(
                    shape, product.leaf_steps,
                    take=lambda i: take(first + i),
                    multiply=lambda i, acc: multiply(first + i, acc),
                    give=lambda i: give(first + i),
                    in_flight=product.slabs,
                )  # fmt: skip

            total = tree_sum(shape, product.levels, product.leaf_steps, leaf, jnp.int32(0))
            row = phase.row(tile, num_ctas)
            if product.is_gated:
                total = gated_bf16(total[:OUT_ROWS], total[OUT_ROWS:], arithmetic)
            if phase.bias is not None:
                total = add_bias(total, phase.bias, row, 0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if product.has_residual:
                plgpu.barrier_wait(kept_full)
                put_transposed(total, out_smem, kept_smem)
                plgpu.barrier_arrive(kept_empty)
            else:
                put_transposed(total, out_smem)
            window = (pl.ds(jnp.int32(0), 8), pl.ds(row, OUT_ROWS))
            plgpu.copy_smem_to_gmem(out_smem, phase.out.at[window])

        def work(i, phase: _Phase):
            @pl.when(phase.count > 0)
            def _has_tiles():
                if phase.product.has_norm:
                    share = jnp.where(wg == COMPUTE, 0, wg - LOADER)

                    @pl.when(share < num_sharers)
                    def _normalise():
                        hold_rows(
                            phase.x, phase.gain, phase.x_smem, sums_smem, share, rows_each,
                            eps=eps, num_threads=num_threads, is_interpreted=is_interpreted,
                            ready=lambda: meet(i - 1),
                        )  # fmt: skip
                        plgpu.barrier_arrive(held)

                else:

                    @pl.when(wg == FEEDER)
                    def _feed():
                        if i > 0:
                            meet(i - 1, for_tma=True)
                        feed(phase)

                @pl.when(wg == COMPUTE)
                def _compute():
                    if phase.product.has_norm:
                        plgpu.barrier_wait(held)
                    pl.loop(0, phase.count)(functools.partial(multiply_tile, phase))
                    plgpu.wait_smem_to_gmem(0)

            if i + 1 < len(phases):
                pl.when(wg == COMPUTE)(lambda: announce(i))

        def drain(barriers, total, num_slots):
            """Wait until what was loaded has been read."""
            used = jnp.minimum(total, num_slots)

            def one(i, _):
                plgpu.barrier_wait(barriers.at[lax.rem(total - used + i, jnp.int32(num_slots))])
                return ()

            lax.fori_loop(0, used, one, ())

        @pl.when(wg == LOADER)
        def _load():
            if num_threads == 5:
                plgpu.set_max_registers(24, action="decrease")
            for i, phase in enumerate(phases):
                load_weights(phase)
                if i + 1 < len(phases):
                    prefetch(phases[i + 1])
            drain(empty, ring, stages)

        @pl.when(wg != LOADER)
        def _work():
            if num_threads == 5:
                # WHY: two rows a warpgroup and the chain's state are a little more than 96.
                plgpu.set_max_registers(112, action="increase")
            for i, phase in enumerate(phases):
                work(i, phase)

            @pl.when(wg == FEEDER)
            def _drain():
                drain(x_empty, fed, x_slots)
                pl.when(kept > 0)(lambda: plgpu.barrier_wait(kept_empty))

    held_shape = (width // 64, 1, 8, 64)
    sums_shape = (num_sharers, rows_each, width // held_chunk(width), 4)
    smem = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16)
    w_blocks = [
        smem(
            (stages, tiles.slot_bytes // (2 * rows * span), rows, span),
            transforms=tiled(span, jnp.bfloat16),
        )
        for rows, span in w_views
    ]
    x_blocks = [smem(held_shape, transforms=tiled(64, jnp.bfloat16))]
    x_blocks += [
        smem((x_slots, slabs, 8, span), transforms=tiled(span, jnp.bfloat16))
        for slabs, span in x_views
    ]

    def views(blocks):
        """One memory as each product sees it; interpretation takes a union for one block."""
        return tuple(blocks) if is_interpreted else plgpu.RefUnion(*blocks)

    is_last = following is None
    grid = {"grid": (num_ctas,), "grid_names": ("cta",)}
    done = None
    if is_interpreted:
        grid = {"grid": (1,), "grid_names": ("all",)}
        grid |= {"cluster": (num_ctas,), "cluster_names": ("cta",)}
        done = plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=len(products))
    counters_ref = jax.new_ref(counters)
    outs = plgpu.kernel(
        body,
        out_type=[rounded((num_rows, p.num_out)) for p in products],
        scratch_types=(
            views(w_blocks),
            views(x_blocks),
            smem((8, OUT_ROWS), transforms=tiled(OUT_ROWS, jnp.bfloat16)),
            smem((8, OUT_ROWS), transforms=tiled(OUT_ROWS, jnp.bfloat16)),
            plgpu.SMEM(sums_shape, jnp.float32),
            plgpu.Barrier(num_arrivals=w_copies, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=x_copies, num_barriers=x_slots),
            plgpu.Barrier(num_barriers=x_slots),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=num_sharers),
            done,
        ),
        **grid,
        num_threads=num_threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=False,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        kernel_name="detjax_linear_chain",
        interpret=interpret,
    )(x, residual, *operands, counters_ref, layer.reshape(1))
    return outs[2], None if is_last else outs[3], jax.freeze(counters_ref)


def _address(memory, index):
    """Of an int32 of device memory."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [index.registers.item()], i32)


def _announce(counters, index) -> None:
    """Raise a counter, after everything this warpgroup has stored, by TMA too.

    # WHY: the thread that issued the TMA stores has waited until they were complete, and all have
    # met since; one thread's release at the scope of the GPU publishes what it has seen.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def emit(ctx, memory, index):
        with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
            mgpu.utils.inline_ptx(
                "red.release.gpu.global.add.s32 [$0], 1;",
                _address(memory, index),
                has_side_effects=True,
            )

    emit(counters, index)


def _await_grid(counters, index, target: int, *, for_tma: bool) -> None:
    """Wait until a counter is `target`: this warpgroup then sees what was stored before.

    With `for_tma` its TMA loads do as well: they are issued by the thread that waits here.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def emit(ctx, memory, index):
        i32 = ir.IntegerType.get_signless(32)
        with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
            mgpu.utils.inline_ptx(
                f"""{{
                .reg .pred p;
                .reg .b32 count;
                .reg .b64 start, now;
                mov.u64 start, %clock64;
                again:
                ld.acquire.gpu.global.b32 count, [$0];
                setp.ge.s32 p, count, $1;
                @p bra done;
                mov.u64 now, %clock64;
                sub.u64 now, now, start;
                setp.gt.u64 p, now, {MAX_SPIN_CYCLES};
                @p trap;
                bra again;
                done:
                }}""",
                _address(memory, index),
                arith.constant(i32, target),
                has_side_effects=True,
            )
            if for_tma:
                mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    emit(counters, index)
