# Every target prepares its own environment: .venv, made once, renewed when the dependencies change.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env demo test test-full lint bench-cpu clean

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: $(STAMP)  ## The development environment, in .venv

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,bench,peft,trl]'
	touch $@

demo: $(STAMP)  ## Keep, recompute and offload the same small model; table and plot in runs/demo (a few minutes)
	$(BIN)/hf-offload bench steps gpt/demo --strategies keep,recompute,ours:ssd --output runs/demo

test: $(STAMP)  ## All tests but the slow ones; prints what was skipped and why
	$(BIN)/python -m pytest -m "not full"

test-full: $(STAMP)  ## All tests
	$(BIN)/python -m pytest

lint: $(STAMP)  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ROUNDS ?= 3
bench-cpu: $(STAMP)  ## 6 and 12 layers at 4 x 512, alternating rounds; tables and plots in runs/bench_*
	$(BIN)/hf-offload bench steps gpt/demo data.sequence_length=512 training.max_steps=8 \
	    --strategies keep,recompute,ours:ssd --rounds $(ROUNDS) --output runs/bench_6l
	$(BIN)/hf-offload bench steps gpt/demo data.sequence_length=512 training.max_steps=8 model.config.n_layer=12 \
	    --strategies keep,recompute,ours:ssd --rounds $(ROUNDS) --output runs/bench_12l

clean:  ## Remove the environment and all results
	rm -rf $(VENV) runs
