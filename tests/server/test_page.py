# SPDX-License-Identifier: Apache-2.0
"""The page at `/`, in headless Chromium: it asks, shows, and proves what it says."""

import contextlib
import dataclasses
import re
import shutil
import socket
import threading

import pytest

import detjax
from detjax.server.served_model import Limits
from detjax.server.service import Service

from .conftest import TEMPLATE, make_service, served
from .small import small_model, small_service

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get: chromium)")


@pytest.fixture(scope="module")
def dvr():
    llm = detjax.LLM(
        mode="dvr", dtype="float32", max_len=384, batch_size=8, decode_batches=(1,),
        max_waiting=256, show_progress=False,
    )  # fmt: skip
    with served(make_service(llm), llm) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_default_timeout(120_000)
    told = []
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("console", lambda line: told.append(line.text) if line.type == "error" else None)
    yield page
    page.close()
    assert not told


@pytest.fixture
def troubled_page(browser):
    """A page whose browser reports failed requests; only its own script must not fail."""
    page = browser.new_page()
    page.set_default_timeout(120_000)
    told = []
    page.on("pageerror", lambda error: told.append(str(error)))
    yield page
    page.close()
    assert not told


class Door:
    """An address whose server can be taken away and replaced."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._port = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept).start()

    def lead_to(self, running):
        """Cut all connections; new ones go to this server, or are cut if it is None."""
        self._port = 0 if running is None else int(running.url.rpartition(":")[2])
        for one in self._open:
            shut(one)

    def _accept(self):
        with contextlib.suppress(OSError):  # the listener is shut
            while True:
                threading.Thread(target=self._join, args=self.listener.accept()[:1]).start()

    def _join(self, here):
        address = "127.0.0.1", self._port
        with here, contextlib.suppress(OSError), socket.create_connection(address) as there:
            self._open += [here, there]
            back = threading.Thread(target=copy, args=(there, here))
            back.start()
            copy(here, there)
            back.join()


def copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    shut(source)
    shut(target)


def shut(one):
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def door():
    made = Door()
    yield made
    made.lead_to(None)
    shut(made.listener)
    made.listener.close()


def another_service():
    """Of the small model, under another name and of another build."""
    model = dataclasses.replace(small_service().model, name="other", fingerprint="another-build")
    return Service(model, Limits())


def fill(page, **fields):
    for name, value in fields.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))


def ask(page, **fields):
    fill(page, **fields)
    page.click("#ask")
    page.wait_for_selector("#facts .digest")
    return page.text_content("#facts .digest")


def test_everything_comes_from_the_server_and_needs_no_key(llm):
    with served(make_service(llm), llm, api_keys=["k"]) as running, running.client() as client:
        for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
            got = client.get(path)
            assert got.status_code == 200 and kind in got.headers["content-type"]
            assert "default-src 'self'" in got.headers["content-security-policy"]
            assert not re.search(r"https?://", got.text), path


@needs_chromium
def test_an_answer_streams_and_shows_its_proof(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    assert page.text_content("#fingerprint") == running.llm.config.fingerprint
    digest = ask(page, prompt="It was late", temperature=0.8, seed=7, max_tokens=12)
    sampling = detjax.SamplingParams(max_tokens=12, temperature=0.8, seed=7)
    (out,) = running.llm.generate(["It was late"], sampling)
    assert digest == out.outputs[0].digest()
    assert page.text_content("#answer") == "It was late" + out.outputs[0].text
    assert page.locator(".token").count() == 12
    page.hover(".token >> nth=3")
    assert page.locator("#tip .row").count() >= 5
    logprob = float(out.outputs[0].logprobs[3])
    assert page.text_content("#tip .note") == f"logprob {logprob}"


@needs_chromium
def test_a_conversation_goes_on(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    page.click("#tab-chat")
    first = ask(page, prompt="17+26=", max_tokens=5, temperature=0)
    assert page.locator("#conversation li").count() == 2
    page.fill("#prompt", "and?")
    page.click("#ask")
    page.locator("#conversation li").nth(3).wait_for()
    assert page.text_content("#facts .digest") != first


@needs_chromium
@pytest.mark.invariance
def test_under_load_the_digests_stay_and_those_of_fast_do_not(dvr, page):
    page.goto(dvr.url)
    page.wait_for_selector("#state.ready")
    digest = ask(page, prompt="The old house by the sea", max_tokens=24)
    page.click("#load")
    page.wait_for_selector("#verdict.same, #verdict.differs")
    rows = page.locator("#load-rows tr")
    assert rows.count() == 4
    canonical = [rows.nth(i).locator("td >> nth=0").locator(".digest") for i in range(4)]
    assert {cell.get_attribute("title") for cell in canonical} == {digest}
    fast = [rows.nth(i).locator("td >> nth=1").locator(".digest") for i in range(4)]
    assert len({cell.get_attribute("title") for cell in fast}) > 1
    text = page.text_content("#verdict")
    assert "canonical: the same bits under every load" in text and "fast: " in text
    assert "loads changed a bit" in text and page.is_hidden("#error")


@needs_chromium
def test_a_server_that_cannot_run_fast_says_so(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    ask(page, max_tokens=4)
    page.click("#load")
    page.wait_for_selector("#load-text:has-text('Every step of this server is canonical')")
    page.click("#stop")
    page.wait_for_selector("#ask:enabled")


@needs_chromium
def test_the_other_requests_fit_a_short_context(page):
    """The page had asked for 200 tokens each, and a server of 256 refused some."""
    llm = detjax.LLM(max_len=64, batch_size=8, max_waiting=256, show_progress=False)
    with served(make_service(llm), llm) as running:
        page.goto(running.url)
        page.wait_for_selector("#state.ready")
        ask(page, prompt="It was late", max_tokens=4)
        page.click("#load")
        page.wait_for_selector("#verdict.same")
        assert page.is_hidden("#error")


@needs_chromium
def test_what_goes_wrong_is_said(llm, browser):
    page = browser.new_page()
    service = Service(None, Limits())
    with served(service, llm, api_keys=["secret"]) as running:
        page.goto(running.url)
        page.wait_for_selector("#state:has-text('starting')")
        service.open(make_service(llm).model)
        page.wait_for_selector("#error:has-text('wants an API key')")
        page.fill("#key", "secret")
        page.wait_for_selector("#model:has-text('novels-6m')")
        page.fill("#max-tokens", "5000")
        page.click("#ask")
        page.wait_for_selector('#error:has-text("this server\'s context of")')
    page.close()


@needs_chromium
@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_goes_on_whichever_tab_is_chosen(running, page, chat):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    page.click("#tab-chat" if chat else "#tab-completion")
    fill(page, prompt="It was late", max_tokens=120)
    page.click("#ask")
    page.wait_for_selector(".token")
    tabs = "['tab-chat', 'tab-completion', 'new-chat']"
    # A click on a tab that is disabled does nothing, so the other is chosen as if it were not.
    assert page.evaluate(f"() => {{ choose({str(not chat).lower()}); "
                         f"return {tabs}.every((id) => by(id).disabled); }}")  # fmt: skip
    page.wait_for_selector("#facts .digest")
    assert page.locator("#answer .token").count() > 100 and page.is_hidden("#error")
    page.click("#tab-chat")
    assert page.locator("#conversation li").count() == (2 if chat else 0)


@needs_chromium
def test_a_second_question_waits_until_the_first_is_answered(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    posts = []
    page.on("request", lambda one: posts.append(one) if one.method == "POST" else None)
    fill(page, max_tokens=100)
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".token")
    page.press("#prompt", "Control+Enter")
    assert page.is_enabled("#stop")
    page.wait_for_selector("#facts .digest")
    assert len(posts) == 1 and page.locator(".asked").count() == 1
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".token")
    assert len(posts) == 2


@needs_chromium
def test_the_page_shows_the_server_that_is_there_now(door, troubled_page):
    page = troubled_page
    first, second = small_service(), another_service()
    with served(first, None) as old, served(second, None) as new:
        door.lead_to(old)
        page.goto(door.url)
        page.wait_for_selector("#state.ready")
        ask(page, max_tokens=4)
        fill(page, max_tokens=5000)
        page.click("#ask")
        page.wait_for_selector("#error:has-text('context of')")
        ask(page, max_tokens=4)
        assert page.is_enabled("#load")
        door.lead_to(new)
        page.wait_for_selector("#model:has-text('other')")
        assert page.text_content("#fingerprint") == "another-build"
        assert page.text_content("#facts .fingerprint") == first.model.fingerprint
        assert page.is_disabled("#load"), "the digest is of another server"
        ask(page, max_tokens=4)
        assert page.text_content("#facts .fingerprint") == "another-build"
        assert page.is_enabled("#load")


@needs_chromium
def test_a_lost_server_and_a_wrong_key_are_said(running, door, troubled_page):
    page = troubled_page
    door.lead_to(running)
    page.goto(door.url)
    page.wait_for_selector("#state.ready")
    fill(page, prompt="The", max_tokens=250)
    page.click("#ask")
    page.wait_for_selector(".token")
    door.lead_to(None)
    lost = "#error:has-text('connection to the server was lost. If the server has stopped')"
    page.wait_for_selector(lost)
    page.wait_for_selector("#state:has-text('unreachable')", timeout=3000)
    assert page.locator(".token").count() > 0 and page.text_content("#fingerprint") == "–"
    page.click("#ask")
    page.wait_for_selector(lost)
    page.wait_for_selector("#ask:enabled")
    with served(another_service(), None, api_keys=["secret"]) as new:
        door.lead_to(new)
        page.wait_for_selector("#error:has-text('wants an API key')")
        for wrong in ("wrong", "schlüssel☃"):
            fill(page, key=wrong)
            page.click("#ask")
            page.wait_for_selector("#error:has-text('The API key in the field above is wrong')")
            page.wait_for_selector("#ask:enabled")
        ask(page, key="secret", max_tokens=4)
        assert page.text_content("#model").startswith("other") and page.is_hidden("#error")
        fill(page, key="wrong")
        page.click("#ask")
        page.wait_for_selector("#error:has-text('The API key in the field above is wrong')")


@needs_chromium
def test_reasoning_is_shown_apart_and_sent_back(page):
    service = small_service(
        small_model(eos_token_ids=(1,)), template=TEMPLATE + "{# <think></think> #}"
    )
    said = ["<think>\nHm</think>\nSee.", "<think>\nHm, hm</think>"]
    bodies = []

    def make_it_say(route):
        body = route.request.post_data_json
        bodies.append(body)
        form = {"structured_outputs": {"choice": [said[len(bodies) - 1]]}}
        route.continue_(post_data=body | form)

    page.route("**/v1/chat/completions", make_it_say)
    with served(service, None) as running:
        page.goto(running.url)
        page.wait_for_selector("#state.ready")
        page.click("#tab-chat")
        ask(page, prompt="17+26=", max_tokens=60)
        assert page.text_content("#answer") == "See."
        assert page.is_visible("#thoughts") and page.text_content("#thoughts") == "Hm"
        page.hover("#thoughts .token >> nth=0")
        assert page.locator("#tip .row").count() >= 5
        fill(page, prompt="and?")
        page.click("#ask")
        turns = page.locator("#conversation li")
        turns.nth(3).wait_for()
        assert bodies[1]["messages"][1] == {
            "role": "assistant", "content": "See.", "reasoning_content": "Hm",
        }  # fmt: skip
        assert turns.nth(1).text_content() == "ReasoningHmSee."
        assert turns.nth(3).text_content() == "ReasoningHm, hm"
        said.append("43")
        fill(page, prompt="so?")
        page.click("#ask")
        turns.nth(5).wait_for()
        assert bodies[2]["messages"][3]["content"] == ""
        assert turns.nth(5).text_content() == "43" and page.is_hidden("#reasoning")
        assert page.is_hidden("#error")


@needs_chromium
def test_an_empty_field_is_left_to_the_server(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    with page.expect_request("**/v1/completions") as asked:
        ask(page, prompt="It was late", temperature="", seed="", max_tokens="")
    fields = asked.value.post_data_json
    assert not {"temperature", "seed", "max_tokens"} & fields.keys()
    assert page.locator("#answer .token").count() == 16, "the server's default"
    seed = page.text_content("#facts div:has(dt:text('seed')) dd")
    with page.expect_request(lambda one: "cache_salt" in (one.post_data or "")) as again:
        page.click("#load")
    assert again.value.post_data_json["seed"] == int(seed), "the drawn seed is asked again"
    page.click("#stop")
    page.wait_for_selector("#ask:enabled")


@needs_chromium
def test_a_seed_that_the_browser_would_round_is_refused(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    fill(page, seed=2**53)
    page.click("#ask")
    page.wait_for_selector(f"#error:has-text('Seed {2**53} is above {2**53 - 1}')")
    ask(page, seed=2**53 - 1, max_tokens=2)
    assert page.text_content("#facts div:has(dt:text('seed')) dd") == str(2**53 - 1)


@needs_chromium
def test_tokens_are_reached_by_keyboard(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    ask(page, prompt="It was late", temperature=0.8, seed=7, max_tokens=12)
    sampling = detjax.SamplingParams(max_tokens=12, temperature=0.8, seed=7)
    (out,) = running.llm.generate(["It was late"], sampling)
    page.focus("#load")
    page.keyboard.press("Tab")
    assert page.locator(".token[tabindex]").count() == 1
    steps = [("", 0), ("ArrowLeft", 0), ("ArrowRight", 1), ("End", 11), ("ArrowRight", 11),
             ("ArrowLeft", 10), ("Home", 0)]  # fmt: skip
    for key, at in steps:
        if key:
            page.keyboard.press(key)
        logprob = float(out.outputs[0].logprobs[at])
        assert page.is_visible("#tip") and page.locator("#tip .row").count() >= 5
        assert page.text_content("#tip .note") == f"logprob {logprob}"
        focused = page.locator(".token:focus")
        label = focused.get_attribute("aria-label")
        assert label.startswith('token "') and label.endswith(page.text_content(".chosen .number"))
        assert page.locator(".token[tabindex]").count() == 1
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#tip")
    page.keyboard.press("Shift+Tab")
    assert page.is_hidden("#tip") and page.locator(".token:focus").count() == 0


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "dark")])
def test_it_fits_every_width_in_light_and_dark(running, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    ask(page, max_tokens=16)
    page.hover(".token >> nth=8")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") == (scheme == "dark")
    page.close()
