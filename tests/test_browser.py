"""The explorer in Chromium: what a reader does, and the numbers on screen against JAX. Also inside JupyterLab."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from battery import normal
from conftest import assert_close

from jattn import explore, masks, trace

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium here", allow_module_level=True)

L, T, S, N, K, H, D = 2, 4, 5, 4, 2, 2, 2
TOKENS, KEYS = ["who", "saw", "the", "cat"], ["the", "cat", "sat", "down", "</b>&🙂"]


def arrays():
    return normal(1, L, T, N, H), normal(2, L, S, K, H), normal(3, L, S, K, D)


# Query 0 of layer 0, head 0 sees nothing.
GIVEN = np.random.default_rng(5).random((L, N, T, S)) < 0.7
GIVEN[0, 0, 0] = False
GIVEN[0, 0, 1:, 1] = True


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser, address, allowed, **options):
    """A page, on which every error and every request to elsewhere fails the test."""
    context = browser.new_context(**options)
    trouble = []

    def only_allowed(route):
        if route.request.url.startswith((allowed, "data:", "blob:")):
            return route.continue_()
        trouble.append(f"request: {route.request.url}")
        return route.abort()

    context.route("**/*", only_allowed)
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(address)
    yield page, trouble
    context.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    explorer = explore(*arrays(), GIVEN, tokens=TOKENS, key_tokens=KEYS)
    return explorer.save(tmp_path_factory.mktemp("explore") / "page.html").as_uri()


@pytest.fixture
def page(browser, saved):
    with opened(browser, saved, "file:") as (page, trouble):
        yield page
        assert trouble == []


def number(text):
    return float(text.strip().rstrip("!").replace("–", "nan"))


def on_screen(page):
    """The row's table: a list of numbers per column, and the sums."""
    columns = np.reshape(page.locator("#row tbody td").all_inner_texts(), (-1, 7)).T
    found = dict(zip(("raw", "masked", "shifted", "exp", "weights"), columns, strict=False))
    found = {name: [number(x) for x in column] for name, column in found.items()}
    found["weighted"] = [[number(x) for x in cell.split()] for cell in columns[6]]
    found["total"] = number(page.inner_text("#sum-total"))
    found["out"] = [number(x) for x in page.inner_text("#sum-out").split()]
    status = page.inner_text("#status")
    found["entropy"] = number(status.partition("Entropy ")[2].split()[0])
    return found


def assert_shows(page, i, layer=0, head=0, visible=None, query=None, scale=None):
    """The page shows query `i` as `trace` has it, to the digits shown; with `query` (H,) in its place, if given."""
    q, k, v = arrays()
    q, k, v = q[layer, :, head].copy(), k[layer, :, head // (N // K)], v[layer, :, head // (N // K)]
    if query is not None:
        q[i] = query
    t = trace(q, k, v, GIVEN[layer, head] if visible is None else visible, scale=scale)
    found = on_screen(page)
    for name, got in found.items():
        expected, got = np.asarray(getattr(t, name)[i]), np.array(got)
        np.testing.assert_allclose(
            got, expected, rtol=6e-3 if np.abs(expected).max() > 1e4 else 0, atol=6e-5, err_msg=name
        )
    return found


def click_cell(page, i, j):
    """The middle of a cell of the matrix, from its far corner: the labels' size is the page's own business."""
    box = page.locator("#matrix").bounding_box()
    cell = 26
    page.mouse.click(
        box["x"] + box["width"] - 2 - (S - j - 0.5) * cell, box["y"] + box["height"] - 2 - (T - i - 0.5) * cell
    )


def test_the_first_state_is_jax_s(page):
    assert page.is_visible("#live") and not page.is_visible("#plain")
    assert_shows(page, T - 1)
    assert float(page.inner_text("#apart")) < 1e-12
    assert page.inner_text("#row-title") == "Query 3 cat, key by key"
    assert "4 </b>&🙂" in page.inner_text("#row tbody")


def test_a_click_and_the_arrow_keys_choose_a_query(page):
    click_cell(page, 1, 2)
    assert page.input_value("#query") == "1"
    assert_shows(page, 1)
    page.focus("#matrix")
    page.keyboard.press("ArrowDown")
    assert_shows(page, 2)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#query") == "0"
    page.keyboard.press("ArrowUp")  # there is none
    page.keyboard.press("ArrowRight")
    assert page.input_value("#query") == "0"
    page.select_option("#query", "3")
    assert_shows(page, 3)


def test_heads_and_layers_are_chosen(page):
    page.select_option("#head", "1")
    assert_shows(page, 3, head=1)
    page.select_option("#head", "3")
    assert "key head 1" in page.inner_text("#head option:checked")
    assert_shows(page, 3, head=3)
    page.select_option("#layer", "1")
    assert_shows(page, 3, layer=1, head=3)
    page.click("#reset")
    assert_shows(page, 3)


def test_a_query_is_dragged_and_moved_by_keys(page):
    page.select_option("#query", "2")
    box = page.locator("#plane").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 80, box["y"] + 100, steps=3)
    page.mouse.up()
    there = [float(page.input_value(f"#move-{axis}")) for axis in (0, 1)]
    assert there[0] < -0.1 and there[1] > 0.1
    first = assert_shows(page, 2, query=there)
    assert np.abs(np.subtract(first["weights"], on_screen(page)["weights"])).max() == 0
    page.focus("#move-0")
    page.keyboard.press("ArrowRight")
    nearer = [float(page.input_value(f"#move-{axis}")) for axis in (0, 1)]
    assert nearer[0] > there[0] and abs(nearer[1] - there[1]) < 1e-9
    assert_shows(page, 2, query=nearer)
    # Another query is where it was, and so is this one when it is chosen again.
    page.select_option("#query", "3")
    assert_shows(page, 3)
    page.select_option("#query", "2")
    assert_shows(page, 2)


def test_keys_are_hidden_and_masks_are_switched(page):
    columns = np.arange(S)[None]
    page.uncheck("#row tbody tr:nth-child(2) input")
    assert_shows(page, 3, visible=GIVEN[0, 0] & (columns != 1))
    page.select_option("#mask", "none")
    assert_shows(page, 3, visible=np.broadcast_to(columns != 1, (T, S)))
    page.check("#row tbody tr:nth-child(2) input")
    page.select_option("#mask", "causal")
    assert_shows(page, 3, visible=masks.causal())
    assert not page.is_visible("#window")
    page.select_option("#mask", "window")
    assert_shows(page, 3, visible=masks.window(2, 0))
    page.fill("#window", "1")
    assert_shows(page, 3, visible=masks.window(1, 0))


def test_the_policy_for_a_query_that_sees_nothing_is_switched(page):
    page.select_option("#query", "0")
    found = assert_shows(page, 0)
    assert found["out"] == [0, 0] and "It may attend to nothing: zeros." in page.inner_text("#status")
    assert not page.is_visible("#error")

    page.select_option("#empty", "raise")
    expected = "a query has no key that it may attend to, and empty='raise'. Pass empty='zero' for zeros."
    assert page.inner_text("#error") == f"ValueError: attention: {expected}"
    assert page.inner_text("#sum-out") == "–"

    page.select_option("#empty", "mean")
    assert not page.is_visible("#error")
    assert_close([number(x) for x in page.inner_text("#sum-out").split()], np.round(arrays()[2][0, :, 0].mean(0), 4))
    assert "as in jax.nn, flax and equinox, never in jattn" in page.inner_text("#status")
    assert "others’ way, not jattn’s" in page.inner_text("#empty option:checked")


def test_the_naive_softmax_overflows_as_the_scale_grows(page):
    def weights():
        cells = np.reshape(page.locator("#precision tbody td").all_inner_texts(), (-1, 8))
        return cells[:, 4].tolist(), cells[:, 7].tolist()

    naive, stable = weights()
    assert not any("NaN" in x for x in [*naive, *stable])
    met = []
    for factor in np.arange(0, 10.25, 0.25):
        page.fill("#factor", str(factor))
        naive, stable = weights()
        assert not any("NaN" in x for x in stable)
        met.append([x.startswith("NaN! overflow") for x in naive])
    first = [column.index(True) for column in zip(*met, strict=True)]
    assert first == sorted(first) and len(set(first)) == 3  # float16, then float32, then float64
    assert_shows(page, 3, scale=2**10 / np.sqrt(2))


def test_light_and_dark_both_have_contrast(browser, saved):
    def luminance(colour):
        channels = [int(x) / 255 for x in colour.strip("rgb() ").split(",")[:3]]
        return np.dot(
            [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels], [0.2126, 0.7152, 0.0722]
        )

    for scheme in ("light", "dark"):
        with opened(browser, saved, "file:", color_scheme=scheme) as (page, trouble):
            colours = page.evaluate(
                "(({ color, backgroundColor }) => [color, backgroundColor])(getComputedStyle(document.body))"
            )
            ink, paper = map(luminance, colours)
            assert (paper > ink) == (scheme == "light")
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7
            assert trouble == []


def test_every_control_has_a_name_and_is_reached_by_tab(page):
    nameless = page.evaluate("""() => [...document.querySelectorAll("#live :is(input, select, button, [tabindex])")]
        .filter((x) => !(x.labels?.length || x.textContent.trim() || x.getAttribute("aria-label")))
        .map((x) => x.outerHTML)""")
    assert nameless == []
    page.focus("#query")
    met = []
    for _ in range(20):
        page.keyboard.press("Tab")
        met.append(page.evaluate("document.activeElement.id || document.activeElement.type"))
    assert ["mask", "empty", "factor", "reset", "matrix", "move-0", "move-1", "checkbox"] == list(dict.fromkeys(met))[
        :8
    ]


def test_without_scripts_the_tables_are_there(browser, saved):
    with opened(browser, saved, "file:", java_script_enabled=False) as (page, trouble):
        assert not page.is_visible("#live")
        text = page.inner_text("#plain")
        assert "query 3 over 5 keys" in text and "4 queries over 5 keys" in text and "0 who (empty)" in text
        assert trouble == []


def test_many_tokens_and_bad_numbers_are_drawn(browser, tmp_path):
    x = np.array(normal(7, 128, 3), np.float32)
    x[5] = np.nan
    saved = explore(x, x, x, masks.causal(), tokens=["some" * 10] * 128).save(tmp_path / "many.html").as_uri()
    with opened(browser, saved, "file:") as (page, trouble):
        assert "Entropy NaN! nats" in page.inner_text("#status")
        page.select_option("#query", "4")
        assert "NaN" not in page.inner_text("#status")
        page.select_option("#query", "5")
        assert page.is_disabled("#move-0")
        assert trouble == []


# In JupyterLab


@contextlib.contextmanager
def lab(folder):
    """JupyterLab on a free port, with files in `folder` alone; ended whatever happens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token = secrets.token_hex(8)
    home = {
        name: str(folder / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    options = ["--no-browser", "--allow-root", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
               "--ServerApp.ip=127.0.0.1", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}",
               "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", *options]
    log = open(folder / "lab.log", "w")
    server = subprocess.Popen(command, env=os.environ | home, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api?token={token}", timeout=5).close()
                break
            assert server.poll() is None, (folder / "lab.log").read_text()
            time.sleep(0.1)
        yield address, token
    finally:
        # With its kernels: all that it started.
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
                break
        log.close()


def test_a_notebook_shows_it_and_an_untrusted_one_its_tables(browser, tmp_path):
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    import nbformat
    from nbformat.sign import NotebookNotary

    explorer = explore(*arrays(), GIVEN, tokens=TOKENS, key_tokens=KEYS)
    data = {"text/plain": repr(explorer), "text/html": explorer._repr_html_()}
    for name in ("trusted", "untrusted"):
        output = nbformat.v4.new_output("execute_result", data, execution_count=1)
        cell = nbformat.v4.new_code_cell("explorer", outputs=[output], execution_count=1)
        notebook = nbformat.v4.new_notebook(cells=[cell])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, str(tmp_path / f"{name}.ipynb"))
        if name == "trusted":
            data_dir = tmp_path / "JUPYTER_DATA_DIR"
            data_dir.mkdir()
            notary = NotebookNotary(data_dir=str(data_dir))
            notary.sign(nbformat.read(str(tmp_path / "trusted.ipynb"), 4))
            notary.store.close()

    with lab(tmp_path) as (address, token):
        with opened(browser, f"{address}/lab/tree/trusted.ipynb?token={token}", address) as (page, trouble):
            frame = page.frame_locator(".jp-OutputArea-output iframe")
            frame.locator("#live").wait_for()
            frame.locator("#query").select_option("2")
            frame.locator("#mask").select_option("none")
            inside = next(f for f in page.frames if f.url == "about:srcdoc")
            assert_shows(inside, 2, visible=np.ones((T, S), bool))
            assert [x for x in trouble if x.startswith(("request", "error", "dialog"))] == []
        with opened(browser, f"{address}/lab/tree/untrusted.ipynb?token={token}&reset", address) as (page, trouble):
            table = page.locator(".jp-OutputArea-output table").first
            table.wait_for(state="attached")
            assert page.locator(".jp-OutputArea-output iframe").count() == 0
            assert "query 3 over 5 keys" in page.locator(".jp-OutputArea-output").first.text_content()
            assert [x for x in trouble if x.startswith(("request", "error", "dialog"))] == []
