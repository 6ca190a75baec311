# SPDX-License-Identifier: Apache-2.0
"""Structured output: the mask is a function of the form and the tokens so far alone."""

import functools
import json

import pytest

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.llm import LLM
from detjax.models.bundled import bundled_model_path
from detjax.models.tokenizer import Tokenizer
from detjax.testing import assert_bitwise_equal

SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
    "additionalProperties": False,
    # A model without sense may write spaces until it has no more tokens.
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.from_folder(str(bundled_model_path()))
    return Grammars(tokenizer.backend.to_str, vocab_size=4096, eos_token_ids=(1,))


def allowed(mask) -> set[int]:
    return {i for i in range(4096) if not mask[i // 32] >> (i % 32) & 1}


def test_masks_depend_on_the_tokens_alone(grammars):
    tokenizer = Tokenizer.from_folder(bundled_model_path())
    form = StructuredOutput(kind="regex", spec="[0-9]{2}")
    ids = tokenizer.backend.encode("12", add_special_tokens=False).ids
    at_once, step_by_step = grammars.guide(form), grammars.guide(form)
    masks = [step_by_step.banned(ids[:n]) for n in range(len(ids) + 1)]
    again = step_by_step.banned(ids)  # as after a launch that was not made
    for mask in (at_once.banned(ids), again):
        assert_bitwise_equal(mask, masks[-1], claim="a mask of the same tokens")
    assert allowed(masks[0]) > {18, 19} and allowed(masks[-1]) == {1}


def takes(grammars, schema: dict | bool | None, text: str) -> bool:
    """Whether a text begins an answer of the schema, None being any object."""
    form = StructuredOutput(kind="json_object")
    if schema is not None:
        form = StructuredOutput(kind="json_schema", spec=json.dumps(schema))
    guide = grammars.guide(form)
    tokenizer = Tokenizer.from_folder(bundled_model_path())
    for n, token_id in enumerate(
        ids := tokenizer.backend.encode(text, add_special_tokens=False).ids
    ):
        if token_id not in allowed(guide.banned(ids[:n])):
            return False
    return True


@pytest.mark.parametrize("schema", [None, {"type": "object"}, {}, True])
def test_json_has_the_space_that_printers_write_and_no_more(grammars, schema):
    value = {"a": [1, {"b": True}], "c": {}}
    for layout in ({}, {"indent": 2}, {"indent": 8}, {"indent": "\t"}, {"separators": (",", ":")}):
        assert takes(grammars, schema, json.dumps(value, **layout)), layout
    for text in ('{"a":  1', '{"a":\n\n1', '{"a": \n1', '{\r"a"', "{\n" + 33 * " " + '"a"'):
        assert not takes(grammars, schema, text), text


def test_a_schema_may_allow_any_space_or_none_or_its_own(grammars):
    def with_space(**given) -> dict:
        return {"type": "object", "x-guidance": given}

    wide = '{"a":\n\n   1'
    assert takes(grammars, with_space(whitespace_flexible=True), wide)
    assert not takes(grammars, with_space(whitespace_flexible=False), '{"a": 1')
    assert takes(grammars, with_space(whitespace_pattern="[ ]{3}"), '{"a":   1')
    assert not takes(grammars, with_space(whitespace_pattern="[ ]{3}"), wide)


@pytest.mark.parametrize(
    ("kind", "spec", "says"),
    [
        ("regex", "a(b", "regex is refused"), ("json_schema", '{"type": 7}', "json_schema is re"),
        ("grammar", "start: nothing", "grammar is refused"), ("regex", "a" * 70_000, "70000 char"),
        ("json_schema", json.dumps(functools.reduce(lambda s, _: {"items": s}, range(200), {})),
         "structured_output=json_schema is refused: recursion limit"),
    ],
)  # fmt: skip
def test_a_bad_form_is_refused_by_name(grammars, kind, spec, says):
    with pytest.raises(ValueError, match=says):
        grammars.check(StructuredOutput(kind=kind, spec=spec))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("regex", r"[^\s\S]"), ("grammar", "start: start"), ("json_schema", '{"$ref": "#"}')],
)
def test_a_form_that_no_text_has_is_told_so(grammars, kind, spec):
    with pytest.raises(ValueError, match="its structured output cannot go on: no text has it"):
        grammars.guide(StructuredOutput(kind=kind, spec=spec)).banned([])


@pytest.mark.parametrize(
    ("kind", "spec"), [("xml", "a"), ("regex", ""), ("json_object", "a"), ("choice", "[1]"),
                       ("json_schema", "[")],
)  # fmt: skip
def test_what_is_no_form_is_refused(kind, spec):
    with pytest.raises(ValueError, match="structured_output"):
        StructuredOutput(kind=kind, spec=spec)


def test_one_text_is_no_list_of_choices():
    with pytest.raises(ValueError, match=r"choices='yes' is one text; give a list"):
        StructuredOutput.of_choices("yes")


def forms() -> list[SamplingParams]:
    made = (
        StructuredOutput.of_schema(SCHEMA),
        StructuredOutput.of_choices(['yes "sir"', "né \\", "no"]),
        StructuredOutput(kind="regex", spec="[a-c]{3,5}[0-9]"),
        StructuredOutput(kind="grammar", spec='start: "x" (("y" | "z") "\\n"){2}'),
        None,
    )
    return [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, structured_output=form)
        for i, form in enumerate(made)
    ]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    "ways",
    [
        {"tp": 2, "decode_steps": 4}, {"mode": "dvr", "max_draft_fraction": 1.0},
        pytest.param({"has_prompt_lookup": True, "num_pages": 3}, marks=pytest.mark.nightly),
    ],
    ids=str,
)  # fmt: skip
def test_structured_answers_are_bitwise_schedule_invariant(ways):
    """Alone and with company, on ranks, with drafts, where others make several tokens a launch."""
    prompts = ["17+26=", "It was late", "a", "The old house", "She said"]
    alone = LLM(batch_size=1, max_len=256, show_progress=False)
    want = [
        alone.generate(p, s)[0].outputs[0] for p, s in zip(prompts, forms(), strict=True)
    ]  # fmt: skip
    assert isinstance(json.loads(want[0].text)["ok"], bool)
    assert want[1].text in ('yes "sir"', "né \\", "no")
    sizes = {"batch_size": 4, "max_len": 256, "show_progress": False, **ways}
    got = LLM(**sizes).generate(prompts, forms())
    assert [g.outputs[0].digest() for g in got] == [w.digest() for w in want]


@pytest.mark.slow
def test_a_small_model_ends_its_json_instead_of_writing_spaces():
    """With any space, the control, the bundled model writes it up to `max_tokens`."""
    fields = {"ok": {"type": "boolean"}, "digit": {"enum": [1, 2, 3]}}
    schema = {
        "type": "object", "properties": fields, "required": [*fields],
        "additionalProperties": False,
    }  # fmt: skip
    spaced = schema | {"x-guidance": {"whitespace_flexible": True}}
    samplings = [
        SamplingParams(
            max_tokens=120, temperature=t, seed=3, structured_output=StructuredOutput.of_schema(s)
        )
        for s in (schema, spaced)
        for t in (0.0, 1.0)
    ]
    llm = LLM(max_len=256, batch_size=4, show_progress=False)  # the programs of the server
    outs = llm.generate(["The old house"] * 4, samplings)
    ended, spaced_out = (tuple(o.outputs[0] for o in outs[i : i + 2]) for i in (0, 2))
    assert all(json.loads(one.text).keys() == fields.keys() for one in ended)
    assert [one.finish_reason.value for one in ended] == ["stop", "stop"]
    assert [one.finish_reason.value for one in spaced_out] == ["length", "length"]


def test_an_engine_without_a_tokenizer_refuses():
    from detjax.engine.config import EngineConfig
    from detjax.engine.engine import Engine
    from detjax.testing.dummies import dummy_config, dummy_model

    engine = Engine(
        dummy_model(dummy_config(num_layers=1)),
        EngineConfig(batch_size=1, prefill_chunk=16, max_len=64),
    )
    with pytest.raises(ValueError, match="structured_output, and this engine was given no"):
        engine.add_request([1], forms()[0])
