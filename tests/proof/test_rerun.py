# SPDX-License-Identifier: Apache-2.0
"""Receipts replayed and audited: on other meshes and batches, with forgeries, and with `fast`."""

import base64
import dataclasses
import json

import numpy as np
import pytest

import detjax
from detjax import audit, replay
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import CollectedTokens
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.outputs.text_batch import TextBatch
from detjax.engine.requests.request import Request
from detjax.models.bundled import bundled_model_path
from detjax.proof.identity import Identifier, Identity
from detjax.proof.receipt import Receipt, _float32_text
from detjax.proof.rerun import (
    ReceiptDifference,
    RerunListener,
    _Claim,
    identity_differences,
    rerun,
)

pytestmark = pytest.mark.slow

PROMPTS = ("The old house by the sea", "My sister said", "17+26=", "A stranger")
SIZES = {"max_len": 256, "prefill_chunk": 32, "show_progress": False}


@pytest.fixture(scope="module")
def llm() -> detjax.LLM:
    return detjax.LLM(batch_size=4, **SIZES)


@pytest.fixture(scope="module")
def auditor(llm) -> detjax.LLM:
    return detjax.LLM(batch_size=4, has_prompt_lookup=True, verify_window=16, **SIZES)


def samplings(count: int) -> list[detjax.SamplingParams]:
    return [
        detjax.SamplingParams(
            max_tokens=20 + i,
            temperature=(0.0, 1.0, 0.7)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            seed=2**40 + i,
            n=1 + i % 2,
            logprobs=2 * (i % 2),
            prompt_logprobs=(None, 3)[i % 2],
            stop=("he",) if i % 4 == 3 else (),
        )
        for i in range(count)
    ]


def receipts_of(llm: detjax.LLM, identity: Identity, count: int = 8) -> list[Receipt]:
    outputs = llm.generate([PROMPTS[i % 4] for i in range(count)], samplings(count))
    ends = llm.config.model.eos_token_ids
    return [Receipt.of(identity, o, end_token_ids=ends) for p in outputs for o in p.outputs]


@pytest.fixture(scope="module")
def identity(llm) -> Identity:
    return Identifier(llm.model, llm.tokenizer, name="novels-6m").identity()


@pytest.fixture(scope="module")
def receipts(llm, identity) -> list[Receipt]:
    return receipts_of(llm, identity)


def check(
    llm: detjax.LLM, receipts, *, has_predictions: bool, **options
) -> list[ReceiptDifference]:
    identity = Identifier(llm.model, llm.tokenizer, name="novels-6m").identity()
    return rerun(
        llm.engine, llm.tokenizer, receipts, identity=identity, config=llm.config.model,
        has_predictions=has_predictions, **options,
    )  # fmt: skip


@pytest.mark.invariance
def test_receipts_replay_in_another_order_and_one_sequence_alone(llm, receipts):
    assert len({receipt.answer["digest"] for receipt in receipts}) > 8  # they do say something
    assert check(llm, receipts, has_predictions=False, order=range(11, -1, -1)) == []
    # One of n is drawn from its own stream, without the others.
    (second,) = [r for r in receipts if r.sampling.noise_stream == 1][:1]
    assert check(llm, [second], has_predictions=False) == []


@pytest.mark.invariance
def test_an_audit_is_by_windows_and_finds_the_same_bits(auditor, receipts):
    before = dataclasses.replace(auditor.engine.stats())
    assert check(auditor, receipts, has_predictions=True) == []
    stats = auditor.engine.stats()
    num_windows = stats.num_windows - before.num_windows
    num_tokens = sum(len(receipt.token_ids) for receipt in receipts)
    assert num_windows >= num_tokens // 16
    assert stats.num_rollbacks == before.num_rollbacks  # every answer was accepted whole
    # All but the first tokens, which prefill chooses, came of windows.
    assert stats.draft_tokens - before.draft_tokens >= num_tokens - 3 * len(receipts)


def test_a_part_of_an_answer_is_checked_to_its_last_token(auditor, receipts):
    """A bit is changed at token 9 of two receipts. The progress is of tokens."""
    wrong = [with_logprob_bit(receipts[0], 9), with_logprob_bit(receipts[1], 9), *receipts[2:4]]
    told, noted = [], {}
    listener = RerunListener(
        on_tokens=told.append, on_receipt=lambda i, difference: noted.update({i: difference})
    )
    found = check(
        auditor, wrong, has_predictions=True, checked_lens=[10, 9, 0, 3], listener=listener
    )
    assert [(d.index, d.field) for d in found] == [(0, "answer.logprobs_f32[9]")]
    assert told == sorted(told) and told[-1] == 10 + 9 + 3
    assert noted == {0: found[0], 1: None, 3: None}


def cut(receipt: Receipt, count: int, **changes) -> Receipt:
    """Its first tokens as a whole answer, with the digest that they have."""
    completion = CollectedTokens(
        token_ids=list(receipt.token_ids[:count]),
        logprobs=list(receipt.logprobs[:count]),
        top_logprobs=list(receipt.top_logprobs[:count]),
    ).completion((), request_idx=0, sequence_idx=0, finish_reason=FinishReason.STOP)
    text = _float32_text(completion.logprobs)
    told = {"token_ids": list(completion.token_ids), "logprobs_f32": text}
    return edited(receipt, "answer", digest=completion.digest(), **told | changes)


@pytest.mark.parametrize("checked", [0, 5])
def test_text_and_end_of_answers_that_are_checked_in_part_follow_from_their_tokens(
    auditor, receipts, checked, monkeypatch
):
    """Every token up to the last drawn one is true, and what the forger wrote is not."""
    plain = next(r for r in receipts if r.answer["top_logprobs"] is None and not r.sampling.stop)
    assert plain.answer["finish_reason"] == "length" and len(plain.token_ids) > 12
    forged = {
        "answer.text": edited(plain, "answer", text="I agree to pay one million."),
        "answer.finish_reason": edited(plain, "answer", finish_reason="stop"),
        "answer.token_ids": cut(plain, 12, finish_reason="stop", text="No."),
    }
    lines = [*receipts, *forged.values()]
    lens = [checked] * len(lines)
    found = check(auditor, lines, has_predictions=True, checked_lens=lens)
    assert [(one.index, one.field) for one in found] == [
        (len(receipts) + i, field) for i, field in enumerate(forged)
    ]
    # Control: so far as tokens and logprobs are compared, nothing is wrong.
    monkeypatch.setattr(_Claim, "compare_end", lambda *_: None)
    assert check(auditor, lines, has_predictions=True, checked_lens=lens) == []


def edited(receipt: Receipt, section: str, **changes) -> Receipt:
    values = getattr(receipt, section) | changes
    return dataclasses.replace(receipt, **{section: values})


def with_sampling(receipt: Receipt, **changes) -> Receipt:
    return edited(receipt, "request", sampling=receipt.request["sampling"] | changes)


def with_logprob_bit(receipt: Receipt, at: int) -> Receipt:
    logprobs = receipt.logprobs.copy()
    logprobs.view(np.uint32)[at] ^= 1
    text = base64.b64encode(logprobs.tobytes()).decode()
    return edited(receipt, "answer", logprobs_f32=text)


FORGERIES = {
    "token": (
        lambda r: edited(
            r, "answer", token_ids=[*r.token_ids[:6], r.token_ids[6] ^ 1, *r.token_ids[7:]]
        ),
        "answer.token_ids[6]",
    ),
    "logprob": (lambda r: with_logprob_bit(r, 9), "answer.logprobs_f32[9]"),
    "seed": (lambda r: with_sampling(r, seed=str(r.sampling.seed ^ 1)), "answer.token_ids["),
    "stream": (lambda r: with_sampling(r, noise_stream=5), "answer.token_ids["),
    "temperature": (lambda r: with_sampling(r, temperature=3.0), "answer.token_ids["),
    "prompt": (
        lambda r: edited(r, "request", prompt_token_ids=[*r.prompt_token_ids[:-1], 7]),
        "answer.",
    ),
    "longer": (
        lambda r: with_sampling(r, max_tokens=r.sampling.max_tokens + 1), "answer.token_ids"
    ),
    "end": (lambda r: edited(r, "answer", finish_reason="stop"), "answer.finish_reason"),
    "text": (lambda r: edited(r, "answer", text="something else"), "answer.text"),
}  # fmt: skip


def without_ends(receipt: Receipt, **changes) -> Receipt:
    """Its end tokens ended it; now it says that there are none."""
    return edited(edited(receipt, "request", end_token_ids=[]), "answer", **changes)


def longer(receipt: Receipt) -> Receipt:
    logprobs = np.append(receipt.logprobs, np.float32([-1, -2]))
    token_ids = [*receipt.token_ids, 17, 18]
    text = base64.b64encode(logprobs.tobytes()).decode()
    return without_ends(receipt, token_ids=token_ids, logprobs_f32=text, text="anything")


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("is_audit", [True, False], ids=["audit", "replay"])
def test_a_forgery_with_hashes_that_fit_is_found_out(llm, auditor, receipts, name, is_audit):
    """Control: nothing but the right answer passes."""
    forge, field = FORGERIES[name]
    honest = next(
        r
        for r in receipts
        if r.sampling.temperature == 1.0 and r.answer["finish_reason"] == "length"
    )
    engine = auditor if is_audit else llm
    found = check(engine, [honest, forge(honest)], has_predictions=is_audit)
    assert [difference.index for difference in found] == [1]
    assert found[0].field.startswith(field), found[0]


@pytest.mark.parametrize("is_audit", [True, False], ids=["audit", "replay"])
def test_what_ends_an_answer_is_the_models_to_say(llm, auditor, identity, is_audit):
    """A receipt whose end tokens are taken out may not say anything behind them."""
    sampling = detjax.SamplingParams(max_tokens=64, temperature=1.0, seed=3)
    end = llm.generate([PROMPTS[0]], sampling)[0].outputs[0].token_ids[5]
    ended, ending = [], llm.config.model
    for one in (llm, auditor):
        model = dataclasses.replace(one.model.config, eos_token_ids=(end,))
        ended.append(dataclasses.replace(one.model, config=model))
        ending = model
    engines = [
        Engine(model, dataclasses.replace(one.config.engine, self_check="off"))
        for model, one in zip(ended, (llm, auditor), strict=True)
    ]
    identity = Identifier(ended[0], llm.tokenizer, name="novels-6m").identity()
    request = Request(prompt_token_ids=tuple(llm.tokenizer.encode(PROMPTS[0])), sampling=sampling)
    batch = TextBatch([request], llm.tokenizer, end_ids=(end,), fingerprint="")
    done = engines[0].generate(
        batch.token_requests, on_token=batch.on_token, on_completion=batch.on_completion
    )
    (output,) = batch.outputs(done)
    honest = Receipt.of(identity, output, end_token_ids=(end,))
    assert honest.answer["finish_reason"] == "stop" and len(honest.token_ids) <= 6
    forged = [
        without_ends(honest, finish_reason="length", text="I owe Mallory a million."),
        without_ends(honest),
        longer(honest),
        edited(honest, "request", end_token_ids=sorted({end, honest.token_ids[0]})),
    ]
    found = rerun(
        engines[is_audit], llm.tokenizer, [honest, *forged], identity=identity, config=ending,
        has_predictions=is_audit,
    )  # fmt: skip
    assert [difference.index for difference in found] == [1, 2, 3, 4]
    assert found[1].field == "request.end_token_ids"


@pytest.mark.control
def test_answers_of_kernels_without_a_claim_do_not_pass(llm, auditor, identity):
    fast = detjax.LLM(batch_size=4, mode="fast", **SIZES)
    outputs = fast.generate(list(PROMPTS), samplings(4))
    forged = [
        Receipt.of(identity, dataclasses.replace(o, is_deterministic=True), end_token_ids=())
        for p in outputs
        for o in p.outputs
    ]
    for engine, has_predictions in ((llm, False), (auditor, True)):
        found = check(engine, forged, has_predictions=has_predictions)
        assert len(found) == len(forged)


def test_another_weight_model_or_build_is_named(llm, identity, receipts):
    assert list(identity_differences(receipts[0], identity)) == []
    other = Identity(
        model=identity.model | {"weights": "00" * 32, "name": "another"},
        numerics=identity.numerics,
        build=identity.build | {"jax": "0.11.3"},
    )
    said, found = identity.model["weights"], "00" * 32
    assert list(identity_differences(receipts[0], other)) == [
        ("model.name", "novels-6m", "another"),
        ("model.weights", said, found),
        ("build.jax", "0.11.2", "0.11.3"),
    ]


# ---------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def file(receipts, tmp_path_factory):
    path = tmp_path_factory.mktemp("receipts") / "answers.jsonl"
    path.write_text("".join(receipt.to_json() + "\n" for receipt in receipts))
    return path


def run_replay(*argv) -> int:
    return replay.main([*map(str, argv), "--cache-dir", "none", "--prefill-chunk", "32"])


@pytest.mark.invariance
@pytest.mark.parametrize(
    "options",
    [
        "--tp 2 --batch-size 3 --shuffle 1",
        "--dp 2 --batch-size 2 --mode dvr",
        "--tp 4 --batch-size 7",
    ],
)
def test_replay_on_other_meshes(file, options, capsys):
    assert run_replay(file, *options.split()) == 0
    assert "12 receipts, " in capsys.readouterr().out


def test_audit_writes_a_report(file, tmp_path):
    report = tmp_path / "report.json"
    assert audit.main([str(file), "--cache-dir", "none", "--report", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["differences"] == [] and found["num_receipts"] == 12 and found["num_windows"] > 0


def test_a_difference_has_an_exit_code_and_a_line(file, receipts, tmp_path, capsys):
    path = tmp_path / "forged.jsonl"
    forged = FORGERIES["text"][0](receipts[0])
    path.write_text(receipts[1].to_json() + "\n" + forged.to_json() + "\n")
    assert run_replay(path) == 3
    out, err = capsys.readouterr()
    assert "1 receipts differ" in out and "receipt 2: answer.text is 'something else'" in err


@pytest.mark.parametrize("command", ["audit", "replay"])
def test_copies_are_checked_and_counted_once(receipts, command, tmp_path, capsys):
    """Also with another signature or none. A receipt keeps its number in the file."""
    from tests.proof.test_receipt import make_key

    path, report = tmp_path / "copies.jsonl", tmp_path / "report.json"
    forged = FORGERIES["text"][0](receipts[0])
    signed = receipts[1].signed(make_key(tmp_path))
    path.write_text("".join(
        one.to_json() + "\n" for one in (receipts[1], signed, receipts[1], forged, forged)
    ))  # fmt: skip
    given = [str(path), "--cache-dir", "none", "--report", str(report)]
    assert {"audit": audit, "replay": replay}[command].main(given) == 3
    out, err = capsys.readouterr()
    num_tokens = len(receipts[1].token_ids) + len(forged.token_ids)
    assert f"2 receipts, {num_tokens} tokens and logprobs: 1 receipts differ\n" in out
    assert "\ncopies: 3 lines are copies of others, and are not counted\n" in out
    assert "receipt 4: answer.text" in err and "receipt 5" not in err
    found = json.loads(report.read_text())
    assert (found["num_receipts"], found["num_copies"], len(found["differences"])) == (2, 3, 1)
    assert any("not signed" in one for one in found["not_proven"])
    assert any("whose key" in one for one in found["not_proven"])
    if command == "audit":
        assert audit.main([*given, "--positions", "1000", "--seed", "a"]) == 3
        assert f"drawn: {num_tokens} positions of {num_tokens}, " in capsys.readouterr().out


def test_another_build_is_refused_where_it_may_have_other_bits(receipts, tmp_path, capsys):
    """`reference` has the bits of the numerics version, under any release of JAX."""
    path, another = tmp_path / "r.jsonl", "build.jax is 0.9.9 in the receipts and 0.11.2 here"
    path.write_text(edited(receipts[0], "build", jax="0.9.9").to_json() + "\n")
    assert run_replay(path) == 0
    assert f"another build: {another}" in capsys.readouterr().err
    of_portable = edited(receipts[0], "build", jax="0.9.9", backend="portable")
    path.write_text(of_portable.to_json() + "\n")
    assert run_replay(path) == 2
    assert another in capsys.readouterr().err
    assert run_replay(path, "--backend", "reference") == 2
    assert "does not give the bits of portable" in capsys.readouterr().err


def test_true_receipts_of_the_best_of_several_and_of_a_full_context_pass(
    llm, identity, tmp_path, capsys
):
    best = detjax.SamplingParams(max_tokens=8, temperature=1.0, seed=2, n=2, best_of=5)
    whole = detjax.LLM(batch_size=2, max_len=1024, prefill_chunk=512, show_progress=False)
    full = [5 + i % 900 for i in range(1021)]
    outputs = [
        *llm.generate([PROMPTS[0]], best)[0].outputs,
        *whole.generate([full], detjax.SamplingParams(max_tokens=10))[0].outputs,
    ]
    assert len(outputs[-1].token_ids) == 3
    made = [
        Receipt.of(identity, o, end_token_ids=whole.config.model.eos_token_ids) for o in outputs
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(receipt.to_json() + "\n" for receipt in made))
    assert audit.main([str(path), "--cache-dir", "none"]) == 0
    assert run_replay(path) == 0
    out = capsys.readouterr().out
    assert out.count("3 receipts, 19 tokens and logprobs: 0 receipts differ") == 2
    # A receipt of the context's end cannot ask for more than there was room for.
    path.write_text(with_sampling(made[-1], max_tokens=10).to_json() + "\n")
    assert run_replay(path) == 3


def test_the_verdict_names_the_model_and_what_is_not_proven(receipts, tmp_path, capsys):
    path, report = tmp_path / "r.jsonl", tmp_path / "report.json"
    path.write_text(edited(receipts[0], "model", name="hers").to_json() + "\n")
    given = ("--model", bundled_model_path(), "--report", report)
    assert run_replay(path, *given) == 0
    weights = receipts[0].model["weights"]
    says = (
        f"model: weights {weights}, found at {bundled_model_path()}\nbits: {receipts[0].bits}\n"
        "not proven: when it was made; who made it (not signed); model.name (hers in the receipts, "
        f"{bundled_model_path()} here)\n"
    )
    assert says in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["model"]["weights"] == weights
    assert found["model"]["folder"] == str(bundled_model_path())
    assert len(found["not_proven"]) == 3


@pytest.mark.parametrize("name", ["{folder}", ".", "~", "../x", "/etc", "a/b/c", "here", "a\nb"])
def test_a_receipt_does_not_choose_a_folder(receipts, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    path = tmp_path / "r.jsonl"
    name = name.format(folder=bundled_model_path())
    path.write_text(edited(receipts[0], "model", name=name).to_json() + "\n")
    assert run_replay(path) == 2
    err = capsys.readouterr().err
    assert "a receipt does not choose what is opened on this machine" in err
    assert err.count("\n") == 1


def test_only_what_machines_say_of_themselves_may_be_accepted(file, capsys):
    assert run_replay(file, "--accept", "request.end_token_ids") == 2
    assert "is no field of model, numerics or build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "build.archs",
            "--accept build.archs is no field of these receipts; did you mean build.ar",
        ),
        ("build.arch.x", "--accept build.arch.x is no field of these receipts"),
        ("model.nope", "--accept model.nope is no field of these receipts"),
    ],
)
def test_a_field_that_nobody_has_is_not_accepted(file, capsys, path, says):
    assert run_replay(file, "--accept", path) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_fingerprint_that_does_not_follow_from_its_build_is_refused(receipts, tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text(edited(receipts[0], "numerics", fingerprint="0" * 16).to_json() + "\n")
    assert run_replay(path) == 2
    assert "numerics.fingerprint is 0000000000000000 in the receipts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("attention_split", 2**52, "attention_split=4503599627370496 must be a power of two up to"),
        ("vocab_block", 2**17, "vocab_block=131072 must be a power of two up to 65536"),
        ("vocab_block", 64, "its kernels sum blocks of 128 logits, not 64"),
    ],
)
def test_a_profile_that_no_kernel_has_is_one_line(receipts, tmp_path, capsys, field, value, says):
    path, made = tmp_path / "r.jsonl", receipts[0]
    values = json.loads(made.to_json())
    profile = values["numerics"]["profile"] | {field: value}
    other = edited(made, "numerics", profile=profile)
    path.write_text(other.to_json() + "\n")
    assert run_replay(path, "--backend", "reference") == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_receipts_of_two_models_are_not_mixed(receipts, tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    other = edited(receipts[1], "model", weights="00" * 32)
    path.write_text(receipts[0].to_json() + "\n" + other.to_json() + "\n")
    assert run_replay(path) == 2
    assert "receipts 1 and 2 were not made by the same: model.weights" in capsys.readouterr().err


def test_who_must_have_signed(receipts, tmp_path, capsys):
    from tests.proof.test_receipt import make_key

    key = make_key(tmp_path)
    path = tmp_path / "r.jsonl"
    path.write_text(receipts[0].to_json() + "\n")
    assert run_replay(path, "--trust", tmp_path / "public.pem") == 2
    assert "receipt 1 is not signed" in capsys.readouterr().err
    path.write_text(receipts[0].signed(key).to_json() + "\n")
    assert run_replay(path, "--trust", tmp_path / "public.pem") == 0


def test_the_command_writes_receipts(tmp_path, capsys):
    from detjax.generate import main
    from tests.proof.test_receipt import make_key

    make_key(tmp_path)
    path = tmp_path / "r.jsonl"
    argv = ["--prompt", "The old house", "--max-tokens", "8", "--temperature", "1", "--n", "2"]
    argv += ["--receipts", str(path), "--sign", str(tmp_path / "key.pem"), "--cache-dir", "none"]
    assert main([*argv, "--format", "jsonl"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    written = [Receipt.from_json(line) for line in path.read_text().splitlines()]
    assert [r.answer["digest"] for r in written] == [line["digest"] for line in lines]
    assert [r.model for r in written] == [line["model"] for line in lines]
    (drawn,) = {line["sampling"]["seed"] for line in lines}
    assert {r.sampling.seed for r in written} == {drawn}
    assert [r.sampling.noise_stream for r in written] == [0, 1]
    assert bundled_model_path().name == written[0].model["name"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--sign", "k.pem"), "--sign k.pem signs receipts; add --receipts FILE"),
        (("--receipts", "no/such/r.jsonl"), "is in a folder that does not exist"),
        (("--receipts", "r.jsonl", "--mode", "fast"), "promises nothing"),
        (("--receipts", "r.jsonl", "--sign", "no.pem"), "no.pem"),
        (("--receipts", "r.jsonl", "--coordinator", "a:1"), "several processes"),
    ],
)
def test_the_command_refuses_before_it_runs(argv, says, tmp_path, monkeypatch, capsys):
    from detjax.generate import main

    monkeypatch.chdir(tmp_path)
    assert main(["--prompt", "a", *argv]) == 2
    assert says in capsys.readouterr().err
