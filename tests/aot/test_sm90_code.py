# SPDX-License-Identifier: Apache-2.0
"""The machine code of the sm90 kernels at real shapes, made without a GPU.

Compiled in a process each, since JAX chooses its platforms once.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from detjax.testing import aot

SOURCE = Path(__file__).with_name("programs.py").read_text()
PROGRAMS = re.findall(r'^    "(\w+)": ', SOURCE, re.M)
MESH_PROGRAMS = {
    text.partition('"')[0] for text in re.split(r'^    "(?=\w+": )', SOURCE, flags=re.M)[1:]
    if re.search(r"\b[dt]p=[2-9]", text)
}  # fmt: skip
UPSTREAM = Path(__file__).parents[2] / "docs" / "upstream"
MISSING = aot.why_unavailable()
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(MISSING is not None, reason=f"cannot compile for sm_90a: {MISSING}"),
]

UNCLAIMED = {name for name in PROGRAMS if name.startswith(("upstream_", "unguarded_"))} | {
    "contractible", "draft_launch", "fast_step", "fast_step_float8", "fast_step_int8", "kept_cache",
    "pressed_draft_prefill", "pressed_draft_window", "pressed_draft_window_one", "pressed_fast",
    "pressed_head_int8_prefill", "pressed_head_int8_window", "pressed_head_int8_window_one",
    "pressed_head_prefill", "pressed_head_window", "pressed_head_window_one",
    "pressed_mesh_fast", "pressed_mesh_head_window", "pressed_mtp_prefill", "pressed_mtp_window",
    "gemma3_draft_window", "qwen35_draft_window",
}  # fmt: skip
"""Programs that claim no bits."""

DRAFTING = {"pressed_head_windows", "narrow_windows"}
"""Programs whose verification claims bits, and whose drafts by a head do not."""

NEW_TOKEN_SPILL_BYTES = 28
"""Where a CTA takes whole sequences and rotates their new tokens: scalars, once a sequence, outside
the loop over blocks."""
FLOAT8_SPILL_BYTES = 48
"""There, where loading warpgroups need 8 registers more."""


PROMPT_SHAPES = {"m64n8k16", "m64n256k16"}
"""Of a prompt's experts: the last layer has one row."""


def compiled(name: str, *, dump_to: Path | None = None) -> dict:
    """What `programs.py` finds; XLA leaves its own description in `dump_to`."""
    if name in MESH_PROGRAMS and (crash := aot.why_no_mesh()) is not None:
        pytest.skip(crash)
    dump = f" --xla_dump_to={dump_to} --xla_dump_hlo_as_text" if dump_to else ""
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("programs.py"), name],
        env=os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + dump},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    program = json.loads(run.stdout.splitlines()[-1])
    if name not in UNCLAIMED:
        assert_rounds_as_its_source_says(program, drafts=name in DRAFTING)
    return program


def assert_rounds_as_its_source_says(program: dict, *, drafts: bool = False) -> None:
    """No kernel leaves it to ptxas whether to round, and XLA's own code rounds nothing.

    Where the program also drafts by a head, XLA's code is of that.
    """
    found = {k["name"]: k["contractions"] for k in program["kernels"] if k["contractions"]}
    assert found == {}
    assert drafts or program["float_arithmetic"] == []


def wgmma(program: dict, kernel: str) -> set[tuple[str, ...]]:
    """Tensor-core shapes of every variant of a kernel in a program."""
    shapes = {tuple(k["wgmma"]) for k in program["kernels"] if k["name"] == kernel}
    assert shapes, f"no {kernel} among {[k['name'] for k in program['kernels']]}"
    return shapes


def spills(program: dict) -> dict[str, int]:
    assert program["kernels"]
    return {k["name"]: k["spill_bytes"] for k in program["kernels"] if k["spill_bytes"]}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # Few activations are the N operand; many are the 64-row one beside 64 to 256 weights.
        ("qkv_8", "m64n8k16"),
        ("qkv_128", "m64n64k16"),
        ("qkv_4096", "m64n256k16"),
        ("down_8", "m64n8k16"),
        ("down_4096", "m64n128k16"),
        ("down_add_8", "m64n8k16"),
        ("norm_qkv_1", "m64n8k16"),
        ("norm_qkv_8", "m64n8k16"),
    ],
)
def test_linear_uses_the_tensor_core_and_spills_nothing(name, shape):
    program = compiled(name)
    assert wgmma(program, "detjax_linear") == {(shape,)}
    assert spills(program) == {}
    assert program["copies"] == []


@pytest.mark.parametrize("num_rows", [1, 64, 2048])
def test_adapters_spill_nothing_and_round_as_their_source_says(num_rows):
    """Products add adapters themselves, but for many rows of several leaves; XLA adds nothing."""
    program = compiled(f"adapted_{num_rows}")
    names = {kernel["name"] for kernel in program["kernels"]}
    few = {"detjax_linear", "detjax_linear_swiglu", "detjax_lora_project", "detjax_rms_norm_wide"}
    many = few - {"detjax_lora_project"} | {"detjax_lora_hidden", "detjax_lora_add"}
    assert names == (few if num_rows <= 64 else many)
    assert spills(program) == {} and program["copies"] == []
    assert_rounds_as_its_source_says(program)


@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [("int8", 8), ("int8", 4000), ("float8", 8), ("float8", 64), ("float8", 4000)]
    + [("blocks", num_rows) for num_rows in (8, 64, 128, 256, 4000)],
)
def test_products_of_8_bits_spill_nothing_and_copy_nothing(dtype, num_rows):
    program = compiled(f"w8a8_{dtype}_{num_rows}")
    assert sorted(kernel["name"] for kernel in program["kernels"]) == [
        "detjax_linear",
        "detjax_linear_swiglu",
        "detjax_quantize_rows",
        "detjax_rms_norm_quantize",
    ]
    assert spills(program) == {} and program["copies"] == []


@pytest.mark.parametrize("dtype", ["int8", "float8", "blocks"])
def test_one_row_is_normalised_and_quantised_where_it_is_multiplied(dtype):
    program = compiled(f"w8a8_{dtype}_1")
    names = sorted(kernel["name"] for kernel in program["kernels"])
    assert names == ["detjax_linear", "detjax_linear_swiglu"] and program["launches"] == 2
    assert spills(program) == {} and program["copies"] == []


@pytest.mark.parametrize("name", ["norm_gate_up_8", "norm_gate_up_8_wide"])
def test_a_norm_before_gated_tiles_spills_nothing(name):
    program = compiled(name)
    assert wgmma(program, "detjax_linear_swiglu") == {("m64n8k16",)}
    assert spills(program) == {}
    assert program["launches"] == 1


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        # One launch for each product, and two that add more rows and normalise them.
        ("codes_int4_1", 5), ("codes_int4_2", 5), ("codes_int4_3", 7), ("codes_int4_4", 7),
        ("codes_int4_8", 7), ("codes_int8_1", 5), ("codes_int8_2", 5), ("codes_int8_4", 7),
    ],
)  # fmt: skip
def test_products_of_codes_add_and_normalise_without_spills(name, launches):
    program = compiled(name)
    assert wgmma(program, "detjax_linear") == wgmma(program, "detjax_linear_swiglu")
    assert wgmma(program, "detjax_linear") == {("m64n8k16",)}
    assert spills(program) == {} and program["copies"] == []
    assert program["launches"] == launches
    assert program["waiting"] == []


@pytest.mark.parametrize(
    ("name", "shape", "launches"),
    [
        # The first product routes and lists its tiles; else route, sort; from 129 rows a count.
        ("experts_1", "m64n8k16", 3),
        ("experts_8", "m64n8k16", 3),
        ("experts_64", "m64n16k16", 5),
        ("experts_256", "m64n32k16", 6),
        ("experts_4000", "m64n256k16", 6),
        # Of a rank: no routing and no sum; rows of tall tiles are put in order.
        ("expert_share_64", "m64n16k16", 3),
        ("expert_share_4000", "m64n256k16", 5),
    ],
)
def test_experts_use_the_tensor_core_and_spill_nothing(name, shape, launches):
    program = compiled(name)
    assert wgmma(program, "detjax_experts_gate_up") == {(shape,)}
    assert wgmma(program, "detjax_experts_down") == {(shape,)}
    assert spills(program) == {}
    assert program["copies"] == []
    assert program["launches"] == launches


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("bfloat16", "m64n8k16"), ("int8", "m64n8k32"), ("float8", "m64n8k32"),
        ("float8_blocks", "m64n8k32"),
    ],
)  # fmt: skip
def test_one_row_meets_a_shared_expert_in_two_launches(kind, shape):
    """Also of 8 bits: a CTA quantises the rows of its turns, which are fewer than nine."""
    program = compiled(f"shared_experts_{kind}")
    assert wgmma(program, "detjax_experts_gate_up") == {(shape,)}
    assert wgmma(program, "detjax_experts_down") == {(shape,)}
    assert spills(program) == {}
    assert program["launches"] == 2


@pytest.mark.parametrize(
    ("name", "shape"), [("expert_rows_512", "m64n16k16"), ("expert_rows_32768", "m64n256k16")]
)
def test_rows_of_experts_use_the_tensor_core_and_spill_nothing(name, shape):
    program = compiled(name)
    assert wgmma(program, "detjax_experts_down") == {(shape,)}
    assert spills(program) == {}
    assert program["copies"] == []


@pytest.mark.parametrize(
    ("kind", "num_rows", "shape", "launches"),
    [
        ("block", 1, "m64n8k32", 3), ("block", 8, "m64n8k32", 4), ("block", 64, "m64n16k32", 7),
        ("block", 256, "m64n32k32", 8), ("block", 1000, "m64n128k32", 8),
        ("block", 4000, "m64n128k32", 8), ("int8", 8, "m64n8k32", 4),
        ("int8", 4000, "m64n256k32", 8), ("float8_e4m3fn", 8, "m64n8k32", 4),
        ("float8_e4m3fn", 4000, "m64n128k32", 8),
    ],
)  # fmt: skip
def test_experts_of_8_bits_spill_nothing(kind, num_rows, shape, launches):
    """Two launches more than experts of bfloat16, those that quantise rows: one row needs neither.

    Up to eight need that of the second product.
    """
    program = compiled(f"{kind}_experts_{num_rows}")
    assert wgmma(program, "detjax_experts_gate_up") == {(shape,)}
    assert wgmma(program, "detjax_experts_down") == {(shape,)}
    assert spills(program) == {}
    assert program["copies"] == []
    assert program["launches"] == launches


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        pytest.param("mixtral_decode_one", {"m64n8k16"}, marks=pytest.mark.nightly),
        ("mixtral_decode", {"m64n8k16"}),
        ("mixtral_decode_many", {"m64n32k16"}),
        ("mixtral_prefill", PROMPT_SHAPES),
        ("mixtral_mesh", {"m64n8k16"}),
        pytest.param("mixtral_mesh_many", {"m64n32k16"}, marks=pytest.mark.nightly),
        pytest.param("mixtral_mesh_prefill", PROMPT_SHAPES, marks=pytest.mark.nightly),
    ],
)
def test_a_step_of_eight_experts_copies_nothing_and_spills_no_more_than_attention(name, shapes):
    """The router has fewer outputs than the least tile of a product."""
    program = compiled(name)
    assert wgmma(program, "detjax_experts_gate_up") == {(shape,) for shape in shapes}
    assert {kernel for kernel in spills(program) if not kernel.startswith("attention_")} == set()
    assert program["copies"] == program["faults"] == []


def test_a_decode_step_has_five_launches_a_layer():
    # qkv, attention, o, gate_up, down; the final norm, lm_head, two for the choice of a token.
    program = compiled("decode_step")
    assert program["launches"] == 2 * 5 + 4
    # Before the layers positions and keys, places, page table, rotations, embeddings; after them
    # windows. Slots are written where they lie: none is copied. Nothing joins tokens and logprobs.
    assert program["xla_launches"] == 6


@pytest.mark.parametrize(
    "name",
    [
        "float32_decode", "float32_decode_many", "float32_prefill", "float32_verify",
        "float32_mesh_decode",
        pytest.param("float32_mesh_many", marks=pytest.mark.nightly),
        pytest.param("float32_mesh_prefill", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_float32_step_spills_nothing_and_copies_nothing(name):
    program = compiled(name)
    assert wgmma(program, "attention_float32_sm90") == {("m64n64k16",)}
    assert spills(program) == {}
    assert program["copies"] == program["faults"] == []


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("attention_decode", "attention_cluster_sm90"),
        ("attention_decode_many", "attention_sequences_sm90"),
        ("attention_decode_long", "attention_splits_sm90"),
        ("attention_verify_long", "attention_splits_sm90"),
        ("new_token_long", "attention_splits_sm90"),
    ],
)
def test_decode_attention_spills_nothing(name, kernel):
    program = compiled(name)
    assert wgmma(program, kernel) == {("m64n128k16",)}
    assert spills(program) == {}
    assert program["copies"] == []


@pytest.mark.parametrize(
    ("name", "kernel", "most_spilled"),
    [
        ("new_token", "attention_cluster_sm90", 0),
        ("new_token_one", "attention_spread_sm90", 0),
        ("new_token_256_one", "attention_spread_sm90", 0),
        ("new_token_many", "attention_sequences_sm90", NEW_TOKEN_SPILL_BYTES),
    ],
)
def test_a_new_token_takes_one_kernel_and_no_copy_of_the_cache(name, kernel, most_spilled):
    program = compiled(name)
    assert [k["name"] for k in program["kernels"]] == [kernel]
    assert spills(program).get(kernel, 0) <= most_spilled
    assert program["copies"] == []
    assert program["temp_bytes"] < 1 << 20


@pytest.mark.parametrize(
    ("name", "kernel", "most_spilled"),
    [
        ("float8_new_token", "attention_cluster_sm90", 0),
        ("float8_new_token_one", "attention_spread_sm90", 0),
        ("float8_new_token_many", "attention_sequences_sm90", FLOAT8_SPILL_BYTES),
        ("float8_verify", "attention_splits_sm90", 0),
        # Of the 232 registers that warpgroups have there, 8 less than without float8.
        ("float8_prefill", "attention_prefill_sm90", 8),
    ],
)
def test_pages_of_float8_are_widened_in_one_kernel_without_a_copy(name, kernel, most_spilled):
    program = compiled(name)
    assert kernel in {k["name"] for k in program["kernels"]}
    assert spills(program).get(kernel, 0) <= most_spilled
    assert program["copies"] == []


@pytest.mark.parametrize(
    "name",
    [
        "attention_decode_256", "new_token_256_many",
        pytest.param("attention_verify_256", marks=pytest.mark.nightly),
        pytest.param("new_token_256", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_decode_attention_of_wide_heads_spills_nothing(name):
    """One warpgroup has all channels of the output of a split; a second kernel merges."""
    program = compiled(name)
    assert {k["name"] for k in program["kernels"]} == {
        "attention_splits_sm90", "attention_merge_sm90",
    }  # fmt: skip
    assert wgmma(program, "attention_splits_sm90") == {("m64n128k16", "m64n256k16")}
    assert spills(program) == {}
    assert program["copies"] == []


@pytest.mark.parametrize(
    "name",
    [
        "attention_prefill", "attention_prefill_256_softcap",
        *(
            pytest.param(f"attention_{name}", marks=pytest.mark.nightly)
            for name in ("prefill_256", "prefill_256_window", "window_256")
        ),
    ],
)  # fmt: skip
def test_prefill_attention_spills_nothing(name):
    """Of wide heads a warpgroup has half of the channels, so the shape is the same."""
    program = compiled(name)
    assert wgmma(program, "attention_prefill_sm90") == {("m64n128k16",)}
    assert spills(program) == {}
    assert program["copies"] == []


@pytest.mark.parametrize(
    "name",
    [
        "glm4_decode",
        "olmo3_prefill",
        "gpt_oss_decode",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "granite_decode", "smollm3_decode", "phi3_decode", "glm4_prefill", "olmo3_decode",
                "exaone4_decode", "gemma2_decode", "gemma2_prefill", "gemma2_verify",
                "gemma3_decode", "gemma3_prefill", "gpt_oss_decode_one",
                "gpt_oss_decode_many", "gpt_oss_prefill", "ministral3_decode",
                "ministral3_verify", "ministral3_prefill", "qwen2_moe_decode",
                "glm4_moe_decode", "glm4_moe_prefill",
            )
        ),
    ],
)  # fmt: skip
def test_a_step_of_a_family_copies_nothing_and_spills_in_attention_alone(name):
    program = compiled(name)
    assert program["copies"] == program["faults"] == []
    assert {kernel for kernel in spills(program) if not kernel.startswith("attention_")} == set()


@pytest.mark.parametrize(
    "name",
    [
        "qwen35_decode_many", "qwen35_prefill",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "qwen35_decode_one", "qwen35_decode", "qwen35_verify", "qwen35_moe_decode",
                "qwen35_moe_prefill", "qwen3_next_decode", "qwen3_next_prefill",
            )
        ),
    ],
)  # fmt: skip
def test_a_step_of_a_hybrid_copies_no_cache_and_spills_in_attention_alone(name):
    """Rows, states and pages of keys and values are written where they lie."""
    program = compiled(name)
    assert program["copies"] == program["faults"] == []
    assert {kernel for kernel in spills(program) if not kernel.startswith("attention_")} == set()
    names = {kernel["name"] for kernel in program["kernels"]}
    several = {
        "detjax_delta_rows", "detjax_delta_mix", "detjax_delta_rule", "detjax_gated_rms_norm",
    }  # fmt: skip
    of_rows = {"detjax_delta_step"} if "decode" in name else several
    assert names & (several | {"detjax_delta_step"}) == of_rows
    # A cluster, which few sequences have, gates what it merges.
    assert ("detjax_sigmoid_gate" in names) == (name != "qwen35_decode_one")


@pytest.mark.parametrize("name", ["qwen35_draft_window", "gemma3_draft_window"])
def test_drafts_by_layers_of_two_kinds_copy_no_cache(name):
    """All parts of the cache are carried through a loop over drafts."""
    program = compiled(name)
    assert program["copies"] == program["faults"] == []


@pytest.mark.parametrize("name", ["narrow_200", "narrow_prefill"])
def test_a_step_of_narrow_rows_copies_nothing(name):
    """Between 128 and 256 rows, where a kernel of its own finishes sums."""
    program = compiled(name)
    assert program["copies"] == program["faults"] == []
    assert "detjax_linear_combine" in {kernel["name"] for kernel in program["kernels"]}


def test_several_windows_of_a_small_model_are_a_loop_that_copies_nothing():
    program = compiled("narrow_windows")
    assert program["copies"] == program["faults"] == []
    assert program["temp_bytes"] < 32 << 20
    assert spills(program) == {}


def readers_of_results(dumped: Path) -> list[int]:
    """Kernels that read the buffer of each result, before it is the result.

    That buffer has a new address in every step.
    """
    [assigned] = dumped.glob("*jit_local_step*gpu_after_optimizations-buffer-assignment.txt")
    hlo = assigned.with_name(assigned.name.replace("-buffer-assignment", "")).read_text()
    allocations = re.split(r"\n(?=allocation \d+: )", assigned.read_text())
    found = []
    for head, _, values in (one.partition("\n") for one in allocations):
        if "maybe-live-out" in head and "parameter" not in head and "output shape" not in head:
            held = set(re.findall(r"value: <\d+ ([\w.\-]+(?:\{\d+\})?) @", values))
            found.append(num_readers(hlo, held))
    return found


def num_readers(hlo: str, held: set[str]) -> int:
    """Custom calls that read a value, `name` or `name{element}`, of those held, or its bitcast."""
    held, calls = set(held), 0
    reading = re.compile(r"^\s+%([\w.\-]+) = .*? (bitcast|custom-call)\((.*?)\)", re.MULTILINE)
    for name, opcode, operands in reading.findall(hlo):
        found = re.findall(r"%([\w.\-]+)(?:#(\d+))?", operands)
        read = {f"{value}{{{element}}}" if element else value for value, element in found}
        if read & held:
            calls += opcode == "custom-call"
            held |= {name} if opcode == "bitcast" else set()
    return calls


def test_readers_of_a_buffer_are_found_through_elements_and_bitcasts():
    hlo = """
  %a = (s32[8]{0}, s32[8,8]{1,0}) fusion(%p), kind=kLoop
  %b.1 = s32[64]{0} bitcast(%a#1)
  %c = (bf16[4]{0}, bf16[4]{0}) custom-call(%x, /*index=1*/%b.1), custom_call_target="k"
  %d = bf16[4]{0} custom-call(%a#0, %c#1), custom_call_target="k"
  %e = bf16[4]{0} custom-call(%other, %a#1), custom_call_target="k"
"""
    assert num_readers(hlo, {"a{1}"}) == 2
    assert (num_readers(hlo, {"a{0}"}), num_readers(hlo, {"c{0}"}), num_readers(hlo, {"b"})) == (
        1, 0, 0,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["narrow_verify", "decode_step"])
def test_few_kernels_read_memory_that_is_new_in_every_step(name, tmp_path):
    """Each of them is a node of the CUDA graph that is given a new address in every step."""
    compiled(name, dump_to=tmp_path)
    [readers] = readers_of_results(tmp_path)
    assert readers <= 1


@pytest.mark.parametrize("name", ["decode_step", "fast_step"])
def test_step_copies_neither_cache_nor_weights_and_spills_nothing(name):
    program = compiled(name)
    assert program["copies"] == []
    # Nor in any other way: the smallest matrix has 32 MiB, a layer of the cache as much.
    assert program["temp_bytes"] < 32 << 20
    assert spills(program) == {}
    assert wgmma(program, "attention_cluster_sm90") == {("m64n128k16",)}
    names = {k["name"] for k in program["kernels"]}
    assert not names & {"attention_merge_sm90", "detjax_qk_norm_rope_write"}


@pytest.mark.parametrize("name", ["decode_launch", "draft_launch"])
def test_a_launch_of_several_tokens_copies_neither_cache_nor_weights(name):
    program = compiled(name)
    assert program["copies"] == []
    # Nor are 8-bit weights widened once before the loop.
    assert program["temp_bytes"] < 32 << 20
    assert spills(program) == {}


@pytest.mark.parametrize("name", ["fast_step_int8", "fast_step_float8"])
def test_8_bit_weights_are_widened_inside_the_products(name):
    # A matrix widened to bfloat16 in memory would take 32 MiB or more.
    program = compiled(name)
    assert program["copies"] == []
    assert program["temp_bytes"] < 32 << 20


@pytest.mark.parametrize(
    ("name", "most_mib"), [("pressed_scores", 192), ("pressed_mesh_scores", 64)]
)
def test_scores_of_a_prompt_take_the_memory_of_few_rows_of_logits(name, most_mib):
    """All logits of 4 x 512 tokens would take 1002 MiB."""
    assert compiled(name)["temp_bytes"] < most_mib << 20


def test_a_step_of_an_audit_takes_the_memory_of_its_logits():
    """Those of 32 x 64 tokens are 1002 MiB, and are made once."""
    program = compiled("audit_windows")
    assert program["temp_bytes"] < 1100 << 20
    assert (program["copies"], program["clones"], program["faults"]) == ([], 0, [])


def test_weights_are_hashed_in_windows_and_never_copied_whole():
    """The matrix has 224 MiB; a window 32."""
    window = compiled("weight_window")
    assert window["copies"] == []
    assert window["temp_bytes"] <= 64 << 20
    program = compiled("weight_hash")
    assert {k["name"] for k in program["kernels"]} == {
        "detjax_blake3_chunks",
        "detjax_blake3_parents",
    }
    assert spills(program) == {}
    assert program["temp_bytes"] < 16 << 20


def test_the_bits_of_a_whole_step_are_those_of_its_kernels():
    """As of every program with a claim here: `compiled` looks each time."""
    assert "decode_step" not in UNCLAIMED
    assert_rounds_as_its_source_says(compiled("decode_step"))


@pytest.mark.control
def test_control_a_product_and_a_sum_that_name_no_rounding_are_seen():
    (kernel,) = compiled("contractible")["kernels"]
    assert "mul.f32" in kernel["contractions"][0] and "feeds add.f32" in kernel["contractions"][0]


@pytest.mark.control
def test_control_arithmetic_outside_of_kernels_is_seen():
    """A step without a claim multiplies by XLA's own products."""
    found = compiled("fast_step")["float_arithmetic"]
    assert any(text.endswith("= dot") for text in found)


@pytest.mark.control
def test_control_a_kept_cache_is_seen_as_a_copy():
    program = compiled("kept_cache")
    assert len(program["copies"]) == 1


@pytest.mark.parametrize(
    ("name", "quantising", "attention", "others"),
    [("pressed_head_int8_window", 4, 1, 32), ("pressed_head_int8_window_one", 0, 2, 44)],
)
def test_drafts_of_an_8_bit_head_multiply_8_bit_operands(name, quantising, attention, others):
    """And no matrix is widened: the smallest would take 32 MiB."""
    program = compiled(name)
    shapes = wgmma(program, "detjax_linear") | wgmma(program, "detjax_linear_swiglu")
    assert {shape[-3:] for (shape,) in shapes} == {"k32"}
    assert program["temp_bytes"] < 16 << 20
    # Of each of four drafts: five products, the rows that they do not quantise themselves, and
    # attention. The first has the product of the features and its rows besides, and puts its
    # entries by another launch.
    assert program["launches"] == 4 * (5 + quantising + attention) + 3
    # Of each draft two that join and normalise, three that choose; most others are of all four.
    assert program["xla_launches"] <= others


def test_a_window_of_few_drafts_is_attended_in_one_launch():
    names = {kernel["name"] for kernel in compiled("pressed_features_of_windows")["kernels"]}
    assert "attention_window_sm90" in names
    assert not names & {"attention_merge_sm90", "detjax_qk_norm_rope_write"}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("pressed_")])
def test_a_step_on_a_full_device_reads_nothing_that_it_has_overwritten(name):
    """What the engine runs is what its source says, when XLA saves memory as it does in production.

    The updates of the cache and of the slots are in place, and the cache is never copied.
    """
    program = compiled(name)
    assert program["faults"] == []
    assert program["clones"] == 0
    assert program["copies"] == []


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("behind_")])
def test_a_program_behind_a_step_copies_nothing_that_it_is_given(name):
    """Zeros that a scatter writes into are copied at most: no logits, and no counts of tokens."""
    program = compiled(name)
    assert program["faults"] == []
    assert program["clones"] == 0
    assert all("copy(%broadcast" in copy for copy in program["copies"]), program["copies"]


@pytest.mark.control
def test_control_without_its_guards_a_step_on_a_full_device_reads_what_it_has_overwritten():
    program = compiled("unguarded_splits")
    assert program["clones"] > 0
    assert any("slots_place" in fault for fault in program["faults"]), program["faults"]


@pytest.mark.control
def test_control_without_its_guards_a_kernel_may_be_handed_an_unaligned_slice():
    """The table begins at an aligned column now; the head, which no kernel takes, does not."""
    text = (UPSTREAM / "dynamic_slice_fusion.py").read_text()
    assert "x[3:131]" in text
    assert "12 bytes into its operand" in "".join(compiled("upstream_slice")["faults"])
    assert compiled("upstream_slice_off")["faults"] == []


def test_the_minimal_program_of_the_upstream_report_fails_as_it_says():
    program = compiled("upstream_rematerialization")
    assert any("reads start" in fault for fault in program["faults"]), program
    assert compiled("upstream_rematerialization_off")["faults"] == []
