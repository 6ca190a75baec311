# SPDX-License-Identifier: Apache-2.0
"""A program that reads a donated argument after its in-place update is refused."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from detjax.compilation.donation import (
    CheckedJit,
    UnsafeProgramError,
    check_program,
    compile_checked,
    stale_reads,
    unaligned_operands,
)
from detjax.compilation.hlo_text import parse_module
from detjax.compilation.xla_flags import EXACT_OPTIONS


def text_of(body: str, *, alias: str = "{0}: (0, {}, may-alias)", others: str = "") -> str:
    """A scheduled program whose first argument is donated to its first result."""
    return (
        f"HloModule jit_step, is_scheduled=true, input_output_alias={{ {alias} }}, more={{1}}\n\n"
        f"{textwrap.dedent(others)}\n"
        "ENTRY %main (p.0: s32[8], p.1: s32[8]) -> (s32[8], s32[8]) {\n"
        "  %p.0 = s32[8]{0} parameter(0)\n"
        "  %p.1 = s32[8]{0} parameter(1)\n"
        f"{textwrap.indent(textwrap.dedent(body), '  ')}\n"
        "}\n"
    )


def module(body: str, **options: str):
    return parse_module(text_of(body, **options))


READ_FIRST = """
%read = s32[8]{0} fusion(%p.0), kind=kLoop, calls=%f
%write = s32[8]{0} fusion(%p.0, %p.1), kind=kLoop, calls=%f
ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%write, %read)
"""
READ_LATE = """
%write = s32[8]{0} fusion(%p.0, %p.1), kind=kLoop, calls=%f
%read.remat = s32[8]{0} fusion(%p.0), kind=kLoop, calls=%f
ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%write, %read.remat)
"""


def test_a_read_behind_the_writer_is_found():
    assert stale_reads(module(READ_LATE)) == [
        "read.remat reads p.0 after write was written over it"
    ]


@pytest.mark.control
def test_control_the_same_read_before_the_writer_is_right():
    assert stale_reads(module(READ_FIRST)) == []


@pytest.mark.control
def test_control_an_argument_that_is_not_donated_may_be_read_at_any_time():
    assert stale_reads(module(READ_LATE, alias="{0}: (1, {}, may-alias)")) == []


def test_a_read_behind_a_kernel_that_updates_in_place_is_found():
    body = """
    %k = (f32[2]{0}, s32[8]{0}) custom-call(%p.1, %p.0), custom_call_target="k", output_to_operand_aliasing={{1}: (1, {})}, api_version=API
    %new = s32[8]{0} get-tuple-element(%k), index=1
    %cast = s32[8]{0} bitcast(%p.0)
    %read = s32[8]{0} fusion(%cast), kind=kLoop, calls=%f
    ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%new, %read)
    """  # noqa: E501
    assert stale_reads(module(body)) == ["read reads p.0 after k:1 was written over it"]
    assert stale_reads(module(body.replace("fusion(%cast)", "fusion(%new)"))) == []


def test_a_result_that_was_overwritten_is_found():
    body = """
    %w.1 = s32[8]{0} custom-call(%p.0), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}
    %w.2 = s32[8]{0} custom-call(%w.1), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}
    ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%w.1, %p.1)
    """  # noqa: E501
    assert stale_reads(module(body)) == ["the result reads w.1 after w.2 was written over it"]


LOOP = """
%body (carry: (s32[8], s32[8], s32[])) -> (s32[8], s32[8], s32[]) {
  %carry = (s32[8]{0}, s32[8]{0}, s32[]) parameter(0)
  %a = s32[8]{0} get-tuple-element(%carry), index=0
  %b = s32[8]{0} get-tuple-element(%carry), index=1
  %i = s32[] get-tuple-element(%carry), index=2
BODY
  %j = s32[] fusion(%i), kind=kLoop, calls=%f
  ROOT %next = (s32[8]{0}, s32[8]{0}, s32[]) tuple(%write, %b, %j)
}

%until (carry.1: (s32[8], s32[8], s32[])) -> pred[] {
  %carry.1 = (s32[8]{0}, s32[8]{0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=2
  ROOT %go = pred[] fusion(%i.1), kind=kLoop, calls=%f
}
"""
USE_LOOP = """
%zero = s32[] constant(0)
%start = (s32[8]{0}, s32[8]{0}, s32[]) tuple(%p.0, %p.1, %zero)
%loop = (s32[8]{0}, s32[8]{0}, s32[]) while(%start), condition=%until, body=%body
%new = s32[8]{0} get-tuple-element(%loop), index=0
%read = s32[8]{0} fusion(OPERAND), kind=kLoop, calls=%f
ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%new, %read)
"""
BODY_WRITE = "  %write = s32[8]{0} fusion(%a, %b), kind=kLoop, calls=%f\n"
BODY_READ = "  %late = s32[8]{0} fusion(%a), kind=kLoop, calls=%f\n"


@pytest.mark.parametrize(
    ("body", "operand", "want"),
    [
        (BODY_READ + BODY_WRITE, "%new", []),
        (BODY_WRITE + BODY_READ, "%new", ["late reads carry:0 after write was written over it"]),
        # What the loop leaves alone is there after it; what it writes is not.
        (BODY_WRITE, "%p.1", []),
        (BODY_WRITE, "%p.0", ["read reads p.0 after loop:0 was written over it"]),
    ],
    ids=["right", "stale in the body", "unwritten after", "stale after"],
)
def test_loops_are_looked_into(body, operand, want):
    others = LOOP.replace("BODY\n", body)
    assert stale_reads(module(USE_LOOP.replace("OPERAND", operand), others=others)) == want


def test_a_copy_in_flight_reads_until_it_is_done():
    body = """
    %c = (s32[8]{0}, s32[8]{0}, u32[]) copy-start(%p.0)
    %write = s32[8]{0} fusion(%p.0, %p.1), kind=kLoop, calls=%f
    %done = s32[8]{0} copy-done(%c)
    ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%write, %done)
    """
    assert stale_reads(module(body)) == ["done reads p.0 after write was written over it"]


@pytest.mark.parametrize(
    ("late", "want"),
    [("%p.1", []), ("%p.0", ["late reads p.0 after sum:1 was written over it"])],
    ids=["right", "stale"],
)
def test_a_collective_in_place_reads_what_it_writes_over_and_nobody_else_may(late, want):
    """As XLA compiles an all-reduce that runs beside other work."""
    body = f"""
    %sum = ((s32[8]{{0}}), s32[8]{{0}}) all-reduce-start(%p.0), ALIAS
    %late = s32[8]{{0}} add({late}, %p.1)
    %done = s32[8]{{0}} all-reduce-done(%sum)
    ROOT %out = (s32[8]{{0}}, s32[8]{{0}}) tuple(%done, %late)
    """.replace("ALIAS", "output_to_operand_aliasing={{1}: (0, {})}")
    assert stale_reads(module(body)) == want


@pytest.mark.parametrize("opcode", ["async", "custom-call", "fusion"])
@pytest.mark.parametrize("late", [False, True], ids=["right", "stale"])
def test_what_an_update_carries_on_is_read_until_it_is_done(opcode, late):
    """As XLA prints an asynchronous call that other work is put beside."""
    write = "%write = s32[8]{0} fusion(%p.0, %p.1), kind=kLoop, calls=%f"
    body = f"""
    %s = ((s32[8]{{0}}), s32[8]{{0}}, u32[]) {opcode}-start(%p.0), calls=%wrapped
    %u = ((s32[8]{{0}}), s32[8]{{0}}, u32[]) {opcode}-update(%s)
    {write if late else ""}
    %done = s32[8]{{0}} {opcode}-done(%u)
    {"" if late else write}
    ROOT %out = (s32[8]{{0}}, s32[8]{{0}}) tuple(%write, %done)
    """
    found = stale_reads(module(body, others=WRAPPED.replace("ALIAS", "")))
    assert found == (["done reads p.0 after write was written over it"] if late else [])


WRAPPED = """
%wrapped (w.0: s32[8]) -> s32[8] {
  %w.0 = s32[8]{0} parameter(0)
  ROOT %k = s32[8]{0} custom-call(%w.0), custom_call_target="k"ALIAS
}
"""
IN_PLACE = ", output_to_operand_aliasing={{}: (0, {})}"


@pytest.mark.parametrize("opcode", ["async", "custom-call"])
@pytest.mark.parametrize("at", ["before", "beside", "behind"])
def test_a_call_that_writes_in_place_does_so_from_its_start(opcode, at):
    read = "%read = s32[8]{0} fusion(%p.0), kind=kLoop, calls=%f"
    text = IN_PLACE if opcode == "custom-call" else ""
    body = f"""
    {read if at == "before" else ""}
    %s = ((s32[8]{{0}}), s32[8]{{0}}, u32[]) {opcode}-start(%p.0), calls=%wrapped{text}
    {read if at == "beside" else ""}
    %done = s32[8]{{0}} {opcode}-done(%s)
    {read if at == "behind" else ""}
    ROOT %out = (s32[8]{{0}}, s32[8]{{0}}) tuple(%done, %read)
    """
    found = stale_reads(module(body, others=WRAPPED.replace("ALIAS", IN_PLACE)))
    name = "k" if opcode == "async" else "s:1"
    assert found == ([] if at == "before" else [f"read reads p.0 after {name} was written over it"])


def test_a_result_in_flight_holds_its_buffer_from_the_start():
    """The donated argument is where the result goes."""
    body = """
    %s = ((s32[8]{0}), s32[8]{0}, u32[]) async-start(%p.1), calls=%wrapped
    %read = s32[8]{0} fusion(%p.0), kind=kLoop, calls=%f
    %done = s32[8]{0} async-done(%s)
    ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%done, %read)
    """
    found = stale_reads(module(body, others=WRAPPED.replace("ALIAS", "")))
    assert found == ["read reads p.0 after k was written over it"]


@pytest.mark.parametrize("late", [False, True], ids=["right", "stale"])
def test_an_update_in_flight_may_write_over_what_it_reads(late):
    """A donated argument that an asynchronous fusion updates in place, as XLA prints on an H100."""
    write = "%write = s32[8]{0} fusion(%p.0, %p.1), kind=kLoop, calls=%f"
    body = f"""
    %s = ((s32[8]{{0}}), s32[8]{{0}}, u32[]) fusion-start(%p.0), kind=kLoop, calls=%f
    {write if late else ""}
    %done = s32[8]{{0}} fusion-done(%s)
    ROOT %out = (s32[8]{{0}}, s32[8]{{0}}) tuple({"%write" if late else "%done"}, %p.1)
    """
    found = stale_reads(module(body))
    assert found == (["done reads p.0 after write was written over it"] if late else [])


def test_what_is_sent_is_read_until_it_is_done():
    body = """
    %t = token[] after-all()
    %s = (s32[8]{0}, u32[], token[]) send(%p.0, %t), channel_id=1
    %write = s32[8]{0} fusion(%p.0, %p.1), kind=kLoop, calls=%f
    %done = token[] send-done(%s), channel_id=1
    ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(%write, %p.1)
    """
    assert stale_reads(module(body)) == ["done reads p.0 after write was written over it"]


BRANCHES = """
%writes (a.0: (s32[8], s32[8])) -> s32[8] {
  %a.0 = (s32[8]{0}, s32[8]{0}) parameter(0)
  %a.1 = s32[8]{0} get-tuple-element(%a.0), index=0
  ROOT %k = s32[8]{0} custom-call(%a.1), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}
}

%reads (b.0: (s32[8], s32[8])) -> s32[8] {
  %b.0 = (s32[8]{0}, s32[8]{0}) parameter(0)
  %b.1 = s32[8]{0} get-tuple-element(%b.0), index=0
  ROOT %f = s32[8]{0} fusion(%b.1), kind=kLoop, calls=%f
}

%loses (e.0: (s32[8], s32[8])) -> s32[8] {
  %e.0 = (s32[8]{0}, s32[8]{0}) parameter(0)
  %e.1 = s32[8]{0} get-tuple-element(%e.0), index=0
  %lost = s32[8]{0} custom-call(%e.1), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}
  ROOT %other = s32[8]{0} fusion(%lost), kind=kLoop, calls=%f
}

%hands_on (c.0: (s32[8], s32[8])) -> s32[8] {
  %c.0 = (s32[8]{0}, s32[8]{0}) parameter(0)
  ROOT %c.1 = s32[8]{0} get-tuple-element(%c.0), index=0
}
"""  # noqa: E501
USE_BRANCHES = """
%zero = s32[] constant(0)
%pair = (s32[8]{0}, s32[8]{0}) tuple(%p.0, %p.1)
%c = s32[8]{0} conditional(%zero, PAIRS), branch_computations={NAMES}
%read = s32[8]{0} fusion(OPERAND), kind=kLoop, calls=%f
ROOT %out = (s32[8]{0}, s32[8]{0}) tuple(OUT, %read)
"""


@pytest.mark.parametrize(
    ("names", "operand", "out", "want"),
    [
        # A branch writes over what another, and what follows, would read.
        ("writes reads", "%c", "%c", []),
        ("reads writes", "%c", "%c", []),
        ("writes reads", "%p.1", "%c", []),
        ("writes reads", "%p.0", "%c", "read reads p.0 after c was written over it"),
        ("reads writes", "%p.0", "%c", "read reads p.0 after c was written over it"),
        ("writes hands_on", "%p.0", "%c", "read reads p.0 after c was written over it"),
        # The result goes elsewhere, and the argument is lost all the same.
        ("writes writes", "%p.0", "%p.1", "read reads p.0 after c was written over it"),
        # Nor need the result have anything of it, whichever branch comes first.
        ("loses reads", "%p.0", "%p.1", "read reads p.0 after lost was written over it"),
        ("reads loses", "%p.0", "%p.1", "read reads p.0 after lost was written over it"),
        ("loses reads", "%c", "%p.1", ""),
        # What every branch hands on is what it was.
        ("hands_on hands_on", "%p.0", "%c", []),
        ("hands_on hands_on", "%c", "%c", []),
    ],
)
def test_a_branch_may_have_written_in_place(names, operand, out, want):
    branches = names.split()
    body = USE_BRANCHES.replace("NAMES", ", ".join(f"%{name}" for name in branches))
    body = body.replace("PAIRS", ", ".join(["%pair"] * len(branches)))
    body = body.replace("OPERAND", operand).replace("OUT", out)
    alias = "{0}: (0, {}, may-alias)" if out == "%c" else ""
    found = stale_reads(module(body, alias=alias or "{0}: (1, {}, may-alias)", others=BRANCHES))
    assert found == ([want] if want else [])


def test_a_conditional_inside_a_branch_is_looked_into():
    nested = """
    %outer (d.0: (s32[8], s32[8])) -> s32[8] {
      %d.0 = (s32[8]{0}, s32[8]{0}) parameter(0)
      %d.1 = s32[] constant(0)
      %d.2 = s32[8]{0} conditional(%d.1, %d.0, %d.0), branch_computations={%writes, %reads}
      ROOT %d.3 = s32[8]{0} fusion(%d.2), kind=kLoop, calls=%f
    }
    """
    body = USE_BRANCHES.replace("NAMES", "%outer, %reads").replace("PAIRS", "%pair, %pair")
    body = body.replace("OPERAND", "%p.0").replace("OUT", "%p.1")
    others = BRANCHES + textwrap.dedent(nested)
    (found,) = stale_reads(module(body, alias="{0}: (1, {}, may-alias)", others=others))
    assert found == "read reads p.0 after d.2 was written over it"


def test_a_real_conditional_that_updates_in_place_passes():
    def step(pages, is_new, row):
        def change(pages):
            return pages.at[1].set(row * 2)

        return jax.lax.cond(is_new, change, lambda pages: pages, pages), row + 1

    shapes = jnp.zeros((4, 16), jnp.int32), True, jnp.ones(16, jnp.int32)
    compiled = compile_checked(
        jax.jit(step, donate_argnums=0).lower(*shapes), EXACT_OPTIONS, jax.devices()[:1]
    )
    assert "conditional(" in (compiled.as_text() or "")
    pages, _ = compiled(*shapes)
    assert pages[1].tolist() == [2] * 16


SLICED = """
%inside (q.0: s32[256], q.1: s32[8]) -> s32[8] {
  %q.0 = s32[256]{0} parameter(0)
  %q.1 = s32[8]{0} parameter(1)
  %part = s32[64]{0} slice(%q.0), slice={[FIRST:LAST]}
  ROOT %k = s32[8]{0} custom-call(%part, %q.1), custom_call_target="k"
}
"""


@pytest.mark.parametrize(("first", "num_faults"), [(0, 0), (64, 0), (3, 1), (32, 1)])
def test_a_slice_at_an_unaligned_address_is_found(first, num_faults):
    others = SLICED.replace("FIRST", str(first)).replace("LAST", str(first + 64))
    faults = unaligned_operands(module(READ_FIRST, others=others))
    assert len(faults) == num_faults
    assert all(f"{4 * first} bytes" in fault for fault in faults)


def test_only_a_scheduled_program_is_read():
    with pytest.raises(ValueError, match="scheduled"):
        parse_module("HloModule jit_step, entry_computation_layout={}\n")


def test_such_a_program_is_refused_and_the_refusal_names_the_read():
    with pytest.raises(UnsafeProgramError, match=r"jit_step.*read\.remat reads p\.0"):
        check_program(text_of(READ_LATE))
    check_program(text_of(READ_FIRST))


def test_real_programs_with_loops_and_donation_pass():
    def step(pages, start, n):
        def turn(i, carry):
            pages, start = carry
            return pages.at[start[i % 8] % 4].set(start.sum()), start + 1

        pages, new = jax.lax.fori_loop(0, n, turn, (pages, start))
        return pages, new, start * 2

    shapes = jnp.zeros((4, 16), jnp.int32), jnp.zeros(8, jnp.int32), 5
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes)
    compiled = compile_checked(lowered, EXACT_OPTIONS, jax.devices()[:1])
    assert "input_output_alias" in (compiled.as_text() or "")
    _, _, doubled = compiled(jnp.zeros((4, 16), jnp.int32), jnp.arange(8, dtype=jnp.int32), 5)
    assert doubled.tolist() == [2 * i for i in range(8)]


def test_checked_jit_donates_and_compiles_once_a_shape():
    add = CheckedJit(lambda x, y: jax.tree.map(jnp.add, x, y), donate_argnums=0, options={})
    for size in (4, 8, 4):
        x = {"a": jnp.arange(size)}
        assert add(x, {"a": jnp.ones(size, jnp.int32)})["a"].tolist() == list(range(1, size + 1))
        assert x["a"].is_deleted()
    assert len(add._programs) == 2
