# Every target prepares its own environment: .venv, made once, renewed when the dependencies change.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env demo demo-large demo-large-auto test test-full faults acceptance mutations lint api docs bench-cpu clean

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: $(STAMP)  ## The development environment, in .venv

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,docs,bench,peft,trl,oracles]'
	touch $@

demo: $(STAMP)  ## Train the same small model without, with recompute and with offloading; table and plots in runs/demo (a few minutes)
	$(BIN)/hf-offload bench steps gpt/demo --steps 5 --strategies baseline,recompute,ours:ssd,ours:auto@960MiB --allocator auto --output runs/demo

demo-large: $(STAMP)  ## Train GPT-2 XL in full, in fp32 and within 6 GiB; table and picture in runs/large (15 minutes at most, 150 GB written)
	$(BIN)/python -m benchmarks large

demo-large-auto: $(STAMP)  ## The same by its budget alone: a plan says what is where; results in runs/large_auto (15 minutes, 180 GB written)
	$(BIN)/python -m benchmarks large --auto --steps 6 --most-written 200GB --output runs/large_auto

# Test files run side by side, each in one process, in the order of the tree: those of single units end it, so that no
# process waits long for another's last file.
JOBS   ?= 2
PYTEST  = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
test: $(STAMP)  ## All tests but the slow ones; prints what was skipped and why
	$(PYTEST) -m "not full"

test-full: $(STAMP)  ## All tests
	$(PYTEST)

faults: $(STAMP)  ## Nothing lost, nothing left behind: 200 runs killed, 2,000 rough steps, 100 GB through 4 GB, four processes (ten minutes)
	$(BIN)/python -m tests.faults.killed 200
	$(BIN)/python -m pytest -m full --capture=no tests/memory/test_growth.py
	$(BIN)/python -m tests.faults.load --gigabytes 100 --quota-gigabytes 4
	$(BIN)/python -m tests.faults.load --gigabytes 5 --quota-gigabytes 1 --threads 16 --processes 4

acceptance: $(STAMP)  ## Tests of accelerate, PEFT and, with TRL=<checkout>, TRL, and torch's tables, without and with offloading (half an hour; needs a package index)
	$(BIN)/python -m tests.acceptance $(if $(TRL),--trl $(TRL))

mutations: $(STAMP)  ## Breaks the engine on purpose, rule by rule; a test has to notice each; docs/mutations.md (an hour)
	$(BIN)/python -m tests.mutations --output docs/mutations.md

lint: $(STAMP)  ## Style, types, and which folder may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

api: $(STAMP)  ## The generated pages: API, settings, command line
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_command_line.py

docs: $(STAMP)  ## The documentation as a site, in runs/site; warnings are errors
	$(BIN)/python docs/make_site.py

ROUNDS ?= 3
SMALL   = model.config.vocab_size=8192 --steps 6 --rounds $(ROUNDS)
GPT2    = $(BIN)/hf-offload bench steps gpt2-small --batch 4 --sequence 512 $(SMALL)
NO_DROP = model.config.resid_pdrop=0.0 model.config.embd_pdrop=0.0 model.config.attn_pdrop=0.0
LLAMA   = model.dtype=float32 model.config.num_hidden_layers=6 model.config.hidden_size=768 \
          model.config.num_attention_heads=12 model.config.num_key_value_heads=4 model.config.intermediate_size=2048
PAIR    = --strategies baseline,ours:ssd
WINDOWS = ours:ssd@32MiB,ours:ssd@64MiB,ours:ssd@96MiB,ours:ssd@160MiB,ours:ssd@256MiB
bench-cpu: $(STAMP)  ## The tables of docs/measured.md (more than an hour); ROUNDS=1 for a look
	$(GPT2) model.config.n_layer=6 --output runs/bench/gpt2_6l
	$(GPT2) --output runs/bench/gpt2_12l
	$(GPT2) model.config.n_layer=6 $(NO_DROP) --output runs/bench/gpt2_6l_no_dropout
	$(GPT2) $(NO_DROP) --output runs/bench/gpt2_12l_no_dropout
	$(BIN)/hf-offload bench steps gpt2-small --batch 4 --sequence 512 model.config.n_layer=6 --steps 6 --rounds $(ROUNDS) \
	    --output runs/bench/gpt2_6l_full_vocabulary
	$(BIN)/hf-offload bench steps bert-base --batch 16 --sequence 128 $(SMALL) $(PAIR) --output runs/bench/bert
	$(BIN)/hf-offload bench steps t5-base --batch 8 --sequence 128 $(SMALL) $(PAIR) --output runs/bench/t5
	$(BIN)/hf-offload bench steps llama-1b $(LLAMA) --batch 4 --sequence 512 $(SMALL) --output runs/bench/llama
	$(GPT2) model.config.n_layer=6 --strategies all --output runs/bench/peers
	$(GPT2) model.config.n_layer=6 --strategies baseline,$(WINDOWS) --output runs/bench/read_ahead
	$(BIN)/python -m benchmarks budgets --rounds $(ROUNDS) --output runs/bench/budgets.json
	$(BIN)/hf-offload bench disk
	$(BIN)/hf-offload bench overhead

clean:  ## Remove the environment and all results
	rm -rf $(VENV) runs tests/accelerator/.build
