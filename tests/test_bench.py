"""The benchmark runs: every table with tiny sizes, and a peer in a process of its own. No time is judged."""

import functools
import importlib
import re
import sys
from pathlib import Path

import jax
import pytest
from bench import peers

TINY = {
    "long": {"T": 8, "dtypes": ["bfloat16"]},
    "small": {"batches": (2,), "lengths": (8,)},
    "sparse": {"T": 16, "longer": 512},
    "decode": {"S": 16, "capacity": 32, "used": 4},
    "isolation": {"T": 8},
    "growth": {"lengths": (8, 16), "quadratic": 8},
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(peers, "SECONDS", 0.0)
    monkeypatch.setattr(peers, "TURNS", 1)
    monkeypatch.setattr(peers, "CONTENDERS", dict(peers.CONTENDERS))
    # jax.nn mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A tokamax that is jax.nn by another name, so that the worker runs here; and no torch."""
    (tmp_path / "tokamax.py").write_text("from jax.nn import dot_product_attention")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    # No link: a link to the Python of an environment finds no packages.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    folders = {"tokamax xla": (tmp_path, "tokamax", {"implementation": "xla"})}
    folders["torch"] = (tmp_path / "none", "torch", {})
    # jax.nn has no such implementation: an error that comes with the question.
    folders["tokamax xla_chunked"] = (tmp_path, "tokamax", {"implementation": "xla_chunked"})
    monkeypatch.setattr(peers, "ELSEWHERE", folders)
    workers = []

    class Watched(peers.Worker):
        def __init__(self, *command):
            super().__init__(*command)
            workers.append(self)

    monkeypatch.setattr(peers, "Worker", Watched)
    yield peers.started()
    for worker in workers:
        worker.close()


def rows(text):
    """The cells of each line of the tables in `text`, names and heads left out."""
    lines = [line.strip("|").split("|")[1:] for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if not any(re.search("[a-z]", cell) for cell in cells)]


@pytest.mark.parametrize("name", sorted(TINY.keys() - {"growth"}))
def test_every_table_runs(capsys, name):
    peers.TABLES[name](**TINY[name])
    out = capsys.readouterr().out
    numbers = [float(cell.strip(" *")) for cells in rows(out) for cell in cells]
    numbers += [float(x) for x in re.findall(r"wise: (\S+)|dense: (\S+)", out) for x in x if x]
    assert numbers and min(numbers) >= 0


def test_every_table_has_a_tiny_form():
    assert TINY.keys() == peers.TABLES.keys()


def test_a_peer_elsewhere_takes_its_turns_and_one_that_cannot_says_why(capsys, elsewhere, monkeypatch, tmp_path):
    assert re.match(r"tokamax \? \(jax .*\)", elsewhere[0])
    assert elsewhere[1].startswith("no torch (")
    drawn = {}
    monkeypatch.setattr(peers, "plot", lambda lines, path: drawn.update(lines))
    peers.growth(**TINY["growth"])
    out = capsys.readouterr().out
    head = "| | jattn, ms | jax.nn, ms | times faster | tokamax xla, ms | times faster | tokamax xla_chunked, ms |"
    assert head in out
    short, long = rows(out)[0], rows(out)[2]
    assert float(short[3]) > 0 and float(short[4].strip(" *")) > 0
    # No quadratic peer beyond `quadratic`, and no column moves.
    assert [cell.strip() for cell in long[1:5]] == 4 * ["–"] and len(long) == len(short)
    assert "no time of tokamax xla_chunked: ValueError: Unsupported implementation option: xla_chunked" in out
    milliseconds, megabytes = drawn["milliseconds"], drawn["megabytes of temporaries"]
    assert [T for T, _ in milliseconds["jattn", True]] == [8, 16]
    assert [T for T, _ in megabytes["tokamax xla", False]] == [8]


def test_without_matplotlib_no_plot_is_drawn_and_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    peers.plot({}, tmp_path / "peers.svg")
    assert "no plot: pictures need matplotlib, which is not installed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_plot_is_small_and_its_text_is_text(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, from the extra `notebooks`")
    points = [(2**i, 3.0**i) for i in range(9, 15)]
    lines = {(peer, gradient): points for peer in ("jattn", *peers.ALL) for gradient in (False, True)}
    path = tmp_path / "peers.svg"
    peers.plot({"milliseconds": lines, "megabytes of temporaries": lines}, path)
    text = path.read_text("utf-8")
    assert len(text) < 60_000
    assert ">megabytes of temporaries</text>" in text and ">tokamax xla_chunked</text>" in text
    # Nothing is painted behind: a page of either kind shows through.
    assert not re.search(r"fill: ?(#f{3,6}|white)", text)


def test_the_tables_of_errors_have_small_ones_and_the_peers_beside(capsys, elsewhere, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(peers.__file__).parent))
    monkeypatch.setitem(sys.modules, "peers", peers)
    # Afresh: another test may have imported it beside other peers.
    monkeypatch.delitem(sys.modules, "numerics", raising=False)
    numerics = importlib.import_module("numerics")
    monkeypatch.setattr(numerics, "SCALES", (1.0,))
    monkeypatch.setattr(numerics, "FEW", (1.0,))
    tiny = {
        "rows": {"S": 5, "many": 2},
        "attention": {"T": 3, "S": 5, "dtypes": ["float32"]},
        "lengths": {"T": 3, "keys": (5,), "dtypes": ["float64"]},
    }
    assert tiny.keys() == numerics.TABLES.keys()
    monkeypatch.setattr(
        numerics, "TABLES", {name: functools.partial(numerics.TABLES[name], **tiny[name]) for name in tiny}
    )
    numerics.main(folder=tmp_path)
    out, err = capsys.readouterr()
    rows, attention, lengths, summary = (
        {name: errors for name, *errors in (line[2:-2].split(" | ") for line in table.splitlines() if line[:2] == "| ")}
        for table in out.split("| |")[1:]
    )
    assert len(rows) == 4 * 3 and max(float(jattn) for jattn, _ in rows.values()) < 4
    for table in (attention, lengths, summary):
        for dense, blockwise, jax_nn, tokamax, chunked in table.values():
            assert 0 <= max(float(dense), float(blockwise)) < 20 and chunked == "–"
            assert tokamax in (jax_nn, "–")
    assert float(attention["float32, scale 1, d key"][3]) < 20
    # In float32: what is compared with is much more exact than float32 is.
    assert float(lengths["float64, S = 5, d key"][3]) > 1e5
    assert err.count("no tokamax xla_chunked of float32: ValueError: Unsupported implementation option") == 1
    for name in ("attention", "lengths"):
        assert ">jattn blockwise</text>" in (tmp_path / f"numerics_{name}.svg").read_text("utf-8")
