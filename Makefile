# `make demo` runs the main job, `make test` the tests; each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check slow clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	@! ls passes/__init__.py kernels/__init__.py 2>/dev/null || (echo "passes/ and kernels/ must hold no __init__.py: they would shadow other packages"; exit 1)

slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m slow

# torch first and pinned: an open range takes a CUDA build of several GB on a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch setuptools
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[transformers,triton,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
