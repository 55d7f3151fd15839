# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SYSTEM := $(VENV)/.system
PACKAGES := $(VENV)/.packages
PROXY_VERSION := 5.3.0
PROXY := $(VENV)/node/node_modules/.bin/configurable-http-proxy
PYODIDE_VERSION := 314.0.7
PYODIDE := $(VENV)/node/node_modules/pyodide
export DLOJZ_RUNS ?= $(CURDIR)/runs

.PHONY: help demo test nightly check quick lint lab solutions book site libraries colossalai hub cluster cluster-stop gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train CoAtNet under DDP, FSDP2, ZeRO-0…3 and a pipeline on 2 processes; predicted beside measured (minutes)"
	@echo "make lab    open JupyterLab on the notebooks"
	@echo "make solutions LAB=03  execute a lab's solution again in both languages and compare it with what is stored (minutes)"
	@echo "make book   an HTML book of all solutions, French and English, in book/: no server, no network"
	@echo "make site   the same with the pages of docs/ and one page per module from its docstrings, in site/ (minutes),"
	@echo "            and the game of schedules, whose engine runs in the browser"
	@echo "make libraries  the optional extra of lab 12: Accelerate and Megatron-core beside torch and DeepSpeed"
	@echo "make colossalai  another extra of lab 12: Colossal-AI, in a separate environment (6 GB)"
	@echo "make hub    a JupyterHub with two students on this machine, to see the labs as they do"
	@echo "make cluster  a SLURM with two nodes on this machine, to try jobs on (root, Debian); make cluster-stop ends it"
	@echo "make test   the checks of every day: lint, types, tests on real processes, notebooks executed again"
	@echo "make nightly  the same with all answers in the banks of the labs, all wrong scripts, longer campaigns"
	@echo "make gpu    what only a GPU can tell, in 9 minutes, beside what is predicted: on a machine with one and torch with CUDA"
	@echo "make check  for everyday work: lint, types, the house, pure tests, one real training, one notebook (minutes)"
	@echo "make clean  remove the environments (.venv, .venv-colossalai); runs/ is kept"
	@echo "All of them set up what they need on first use: Python 3.11 or newer is all that must be there."

# Versions of the lock, extras of pyproject.toml.
INSTALL := $(BIN)/python -m pip install --no-compile -c constraints.txt -e

$(READY): constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dlojz needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1): call make PYTHON=python3.11"; exit 1; }
	@echo "Set-up: creating $(VENV) and installing the versions of constraints.txt (a minute or two; log: $(VENV)/install.log)"
	@$(PYTHON) -m venv $(VENV)
	@# Compiled after they are installed, since pip does it on one core; what cannot be compiled is nobody's module.
	@$(INSTALL) '.[labs,dev]' \
	  > $(VENV)/install.log 2>&1 || { tail -n 20 $(VENV)/install.log; echo "Set-up failed; the whole log is $(VENV)/install.log"; exit 1; }
	@# A CPU build of torch beside the other torchvision, whose operators it cannot load: from where such pairs come.
	@$(BIN)/python -W ignore -c "import torchvision" 2> /dev/null || $(BIN)/python -m pip install -q --no-deps \
	  --force-reinstall --retries 0 --timeout 20 --index-url https://download.pytorch.org/whl/cpu \
	  "torchvision==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torchvision"))')+cpu" \
	  >> $(VENV)/install.log 2>&1 || echo "Set-up: torchvision does not import beside this torch, and the one that does" \
	    "could not be fetched; the labs do without its operators (dlojz doctor says more)."
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
	@$(BIN)/python -m ipykernel install --prefix $(VENV) --name python3 --display-name "Python 3 (dlojz)" >> $(VENV)/install.log 2>&1
	@touch $(READY)
	@echo "Set-up: done."

# What only the tests need, and the hub, of the system: a real SLURM, Node.js for the hub's proxy and Chromium where they
# may be installed: by root, on Debian. Node.js that is there already is left as it is.
$(SYSTEM): Makefile
	@mkdir -p $(VENV); \
	missing=""; \
	PATH="$$PATH:/usr/sbin:/sbin" command -v slurmctld > /dev/null || missing="$$missing slurm-wlm munge"; \
	command -v chromium > /dev/null || missing="$$missing chromium"; \
	command -v npm > /dev/null || missing="$$missing nodejs npm"; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then \
	  echo "Set-up: not here, and for an administrator to install (on Debian: apt-get install$$missing):$$missing." \
	    "What needs them is skipped; so are, without root, the tests of a real SLURM and of a hub with several users."; \
	else \
	  echo "Set-up: installing$$missing for the tests (log: $(VENV)/system.log)"; \
	  { apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -qq $$missing; } \
	    > $(VENV)/system.log 2>&1 || { tail -n 20 $(VENV)/system.log; exit 1; }; \
	fi
	@touch $(SYSTEM)

# And of Python and Node.js: the optional extras, the hub and its proxy, Python for the browser.
NPM := npm install --loglevel=error --no-fund --no-audit --no-update-notifier --fetch-retries=1 --prefix $(VENV)/node
$(PACKAGES): constraints.txt pyproject.toml Makefile | $(READY) $(SYSTEM)
	@$(INSTALL) '.[test]' > $(VENV)/packages.log 2>&1 || \
	  { tail -n 20 $(VENV)/packages.log; exit 1; }
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
	@if command -v npm > /dev/null && ! [ -x $(PROXY) -a -f $(PYODIDE)/pyodide.mjs ]; then \
	  $(NPM) configurable-http-proxy@$(PROXY_VERSION) pyodide@$(PYODIDE_VERSION) < /dev/null > $(VENV)/npm.log 2>&1 || \
	    { tail -n 4 $(VENV)/npm.log; echo "Set-up: the hub's proxy and Pyodide could not be fetched by npm, so that no hub" \
	      "can be started and the game's page not be built (log: $(VENV)/npm.log); everything else goes on."; exit 0; }; \
	fi
	@if [ -x $(PROXY) -a -f $(PYODIDE)/pyodide.mjs ] || ! command -v npm > /dev/null; then touch $(PACKAGES); fi

# make demo PICTURE=docs/demo.png also renews the picture of the README; on a quiet machine, as it shows throughput.
demo: $(READY)
	@$(BIN)/dlojz demo
	@$(if $(PICTURE),cp "$(DLOJZ_RUNS)/demo.png" "$(PICTURE)")

# Nothing is executed: the pages show the outputs that the solutions hold.
book: $(READY)
	@$(BIN)/dlojz labs book --out book

# The book, the pages of docs/, and one page per module from its docstrings, which pdoc writes. Left out: programs that are
# run, not imported, and the module that needs Megatron. The game of schedules has its engine in the browser.
MODULES = $(shell find dlojz -name '*.py' ! -path '*/data/*' | sed 's|/__init__\.py$$||;s|\.py$$||;s|/|.|g' | sort)
site: $(READY)
	@$(BIN)/python -W ignore -m pdoc --docformat google --no-show-source --output-directory site/api $(MODULES) \
	  '!dlojz.libraries.programs' '!dlojz.libraries.megatron_adapter'
	@{ [ -f $(PYODIDE)/pyodide.mjs ] || $(NPM) pyodide@$(PYODIDE_VERSION); } < /dev/null > $(VENV)/game.log 2>&1 && \
	  $(BIN)/python docs/game/build.py site/game $(PYODIDE) >> $(VENV)/game.log 2>&1 || \
	  { rm -rf site/game; tail -n 4 $(VENV)/game.log; echo "The site is without the game of schedules, which needs npm" \
	    "and both registries, npm's and PyPI (log: $(VENV)/game.log); everything else goes on."; }
	@$(BIN)/dlojz labs book --out site

# All of the course is served, since the labs link to the code that they are about. JupyterLab does not ask about news;
# its terminals are no login shells, which would set PATH anew on many systems, so that they find `dlojz` and `torchrun`.
LAB_SETTINGS := $(VENV)/share/jupyter/lab/settings
lab: $(READY)
	@mkdir -p $(LAB_SETTINGS)
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}' > $(LAB_SETTINGS)/overrides.json
	@case "$$DLOJZ_LANG" in [Ff][Rr]*) language=fr ;; *) language=en ;; esac; \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/jupyter lab --ServerApp.root_dir=. --ServerApp.terminado_settings=shell_command=bash --LabApp.default_url=/lab/tree/notebooks/$$language/contents.ipynb --LabApp.news_url=None \
	  $$([ "$$(id -u)" != 0 ] || echo --allow-root)

LIBRARIES := $(VENV)/.libraries
$(LIBRARIES): constraints.txt pyproject.toml | $(READY)
	@$(INSTALL) '.[libraries]' > $(VENV)/libraries.log 2>&1 || \
	  { tail -n 20 $(VENV)/libraries.log; exit 1; }
	@touch $(LIBRARIES)

libraries: $(LIBRARIES)

# Executes the solutions of a lab, or of all, in both languages, and compares what they show with what is stored.
LAB ?= ??
CELL_LIMIT_S := 900
solutions: $(READY)
	@$(BIN)/python -m pytest --nbval --nbval-current-env --nbval-cell-timeout=$(CELL_LIMIT_S) -o timeout=$(CELL_LIMIT_S) -o addopts=-q \
	  solutions/*/$(LAB)_*.ipynb

# Without it the lab lacks one of five libraries. What could be made of it is not left where the lab would look for it.
COLOSSALAI := .venv-colossalai
$(COLOSSALAI)/.ready: requirements-colossalai.txt
	@echo "Set-up: Colossal-AI takes torch up to 2.5.1 only: creating $(COLOSSALAI), a separate environment, and" \
	  "installing requirements-colossalai.txt (6 GB, some minutes; log: $(COLOSSALAI)/install.log)"
	@$(PYTHON) -m venv --clear $(COLOSSALAI)
	@{ $(COLOSSALAI)/bin/python -m pip install -r requirements-colossalai.txt && \
	  $(COLOSSALAI)/bin/python -m pip install --no-deps -e . && \
	  $(COLOSSALAI)/bin/python -W ignore -c "import colossalai, dlojz.libraries.watched_training" ; } \
	  > $(COLOSSALAI)/install.log 2>&1 || { tail -n 20 $(COLOSSALAI)/install.log; rm -rf $(COLOSSALAI)/bin; \
	  echo "Set-up: Colossal-AI could not be installed (the whole log is $(COLOSSALAI)/install.log); everything else" \
	  "goes on without it: its row in lab 12 and in dlojz libraries says so."; exit 1; }
	@touch $@
	@echo "Set-up: done: dlojz libraries --run has one more row, and dlojz run --library colossalai works."

colossalai: $(COLOSSALAI)/.ready

hub: $(PACKAGES)
	@$(BIN)/python slurm/jupyterhub/start.py

cluster: $(READY)
	@$(BIN)/python slurm/cluster.py start

cluster-stop:
	@$(BIN)/python slurm/cluster.py stop

# Nothing is installed: it is for a machine that has torch with CUDA already, perhaps without a network. Its options:
# make gpu GPU="--only memory --minutes 5".
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	@$(GPU_PYTHON) benchmarks/gpu.py $(GPU)

lint: $(READY)
	@$(BIN)/ruff check -q . && $(BIN)/mypy --no-error-summary

# Side by side what does not wait for each other: pip and apt, then lint and the tests' own packages. One process more
# than two cores have, since tests of several processes often wait. With two more, each test that was tried took 1.9 times
# as long: ranks wait for others that have no core.
WORKERS ?= 3
test:
	@$(MAKE) --no-print-directory -j 2 lint $(PACKAGES)
	@$(BIN)/python -m compileall -q -j 0 dlojz tests > /dev/null 2>&1 || true # read by thousands of processes
	@$(BIN)/python -m pytest -n $(WORKERS) --durations=40 --durations-min=10

# With what the tests of every day try a part of: all answers in the banks of the labs, all notebooks, all wrong scripts.
nightly:
	@DLOJZ_NIGHTLY=1 $(MAKE) --no-print-directory test

# What a change breaks most often, without the extras that the whole suite installs.
CHECKED := tests/test_house.py tests/base tests/config tests/results tests/hardware \
  tests/pipeline/test_oracles.py tests/prediction/test_states.py tests/train/test_worker.py \
  "tests/notebooks/test_notebooks.py::test_a_solution_shows_again_what_is_stored[00_getting_started.ipynb-fr]"
check: $(READY)
	@$(MAKE) --no-print-directory -j 2 lint quick # side by side: neither waits for the other

quick: $(READY)
	@$(BIN)/python -m pytest -n 2 $(CHECKED)

clean:
	rm -rf $(VENV) $(COLOSSALAI)
