"""Writes the lessons: executes each notebooks/*.py that is a lesson and puts the notebook with its outputs beside it.

The .py files, in jupytext's percent format, are the source. A change to a lesson is made there, then `make lessons`.
The same code under the same versions gives the same notebooks, but for times that a lesson measures.
Try: python notebooks/build.py 1_rows
"""

import argparse
import itertools
import os
import time
from pathlib import Path

import jupytext
import matplotlib.font_manager  # noqa: F401  (writes its cache here, which would be a warning in a lesson)
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 300  # that one cell may take


def lessons():
    """The names of all lessons, in order."""
    return sorted(path.stem for path in FOLDER.glob("[0-9]_*.py"))


def source(name) -> nbformat.NotebookNode:
    """A lesson without outputs, as it stands in its .py file."""
    notebook: nbformat.NotebookNode = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
    # Nothing about the Python that ran it: any Python gives the same notebook.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def executed(name) -> nbformat.NotebookNode:
    """A lesson with its outputs. An error in it, or anything on stderr, is an error here."""
    notebook = source(name)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
    )
    # The kernel finds jattn where this checkout is, and computes where every reader can.
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"})
    notebook.metadata = source(name).metadata
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    raise RuntimeError(f"{name}: cell {number} must print nothing to stderr, got\n{output.text}")
    return notebook


def _joined(outputs):
    """Prints of one cell arrive in pieces that are cut by chance; here they are one."""
    joined = []
    for stream, together in itertools.groupby(outputs, lambda output: output.get("name")):
        together = list(together)
        if stream:
            together = [nbformat.v4.new_output("stream", name=stream, text="".join(x.text for x in together))]
        joined += together
    return joined


def main():
    parser = argparse.ArgumentParser(description="Executes lessons and writes them with their outputs.")
    parser.add_argument("lessons", nargs="*", help=f"all if none is named: {' '.join(lessons())}")
    args = parser.parse_args()
    if unknown := set(args.lessons) - set(lessons()):
        parser.error(f"lessons must be among {' '.join(lessons())}, got {' '.join(sorted(unknown))}")
    for name in args.lessons or lessons():
        print(f"{name} ...", end=" ", flush=True)
        start = time.perf_counter()
        notebook = executed(name)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        size = (FOLDER / f"{name}.ipynb").stat().st_size
        print(f"{time.perf_counter() - start:.0f} s, {size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
