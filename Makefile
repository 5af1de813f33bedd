# `make help` lists the targets. Each builds or checks .venv first, which is quick when nothing has changed.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?=
export PYTHON
JOBS ?= 2
KILLS ?= 10000
STEPS ?= 1000000
STORIES ?= 1000
SANITIZE_SECONDS ?= 10
DAMAGE_ROUNDS ?= 3000
SEED ?=
LIFE ?=
FAR ?=
BIN := .venv/bin
NATIVE_SOURCES = $(shell find native tests/native -path '*/third_party' -prune -o -name '*.[ch]pp' -print -o -name '*.h' -print)

.PHONY: help setup demo test test-quick check check-gpu format bench setup-vllm033 setup-mooncake soak stories soak-pool sanitize clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## build .venv: vLLM's CPU build, the tools, the stores, the native core
	@python="$$(scripts/find_python)" && "$$python" scripts/setup_env.py

demo: setup  ## a real engine restores a long prompt from the pool (DEMO_ARGS=--json for programs)
	@$(BIN)/umbp demo $(DEMO_ARGS)

test: setup  ## every test; those marked vllm033 on vLLM 0.33 too, where `make setup-vllm033` has run (JOBS=1: one at a time)
	@$(BIN)/python scripts/run_tests.py --jobs $(JOBS) $(PYTEST_ARGS)

test-quick: setup  ## the tests that start no engine
	@$(BIN)/python scripts/run_tests.py --quick --jobs $(JOBS) $(PYTEST_ARGS)

check: setup  ## lint, formatting, types, and README's table of options
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES))
	$(BIN)/python scripts/update_readme.py --check
	$(BIN)/mypy

# The environment of `make setup` has torch for processors only: whose torch sees the GPU, says GPU_PYTHON.
check-gpu:  ## are copies to and from a GPU right, and how fast (GPU_PYTHON=python3 has torch for it and umbp)
	@$(or $(GPU_PYTHON),$(wildcard $(BIN)/python),python3) -m umbp check-gpu $(CHECK_ARGS)

format: setup  ## format everything, and write README's table of options
	$(BIN)/python scripts/update_readme.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format -i $(NATIVE_SOURCES))

bench: setup  ## the benchmarks, as ratios (BENCH_ARGS=--small for a short run)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

setup-vllm033: setup  ## build .venv-vllm033: vLLM 0.33's Python files over the CPU build
	@$(BIN)/python scripts/setup_vllm033.py

setup-mooncake: setup  ## install Mooncake Store, where `make setup` could not (libraries as root on Debian)
	@scripts/setup_mooncake.sh

soak: setup  ## random lives of engines over failing, dying pools (STEPS=1000000, SEED=n to repeat a run, FAR=1 with a store)
	@$(BIN)/python tests/connector/walk_soak.py --steps $(STEPS) $(if $(FAR),--far) $(if $(SEED),--seed $(SEED)) $(if $(LIFE),--life $(LIFE))

stories: setup  ## stories of engines, whose failing ones are told in their fewest acts (STORIES=1000, SEED=n)
	@$(BIN)/python tests/connector/walk_soak.py --stories $(STORIES) $(if $(SEED),--seed $(SEED))

soak-pool: setup  ## kill and stop processes that share a pool (KILLS=10000, SEED=n to repeat a run)
	@$(BIN)/python tests/pool/soak.py --kills $(KILLS) $(if $(SEED),--seed $(SEED))

sanitize: setup  ## the core's drivers under AddressSanitizer, UBSan and TSan (SANITIZE_SECONDS, DAMAGE_ROUNDS, SEED)
	@for kind in address thread; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	    -DUMBP_PYTHON=OFF -DUMBP_DRIVERS=ON -DUMBP_DEV=ON -DUMBP_SANITIZE=$$kind >/dev/null && \
	  $(BIN)/ninja --quiet -C build/sanitize-$$kind && \
	  echo "-- threads on one pool, $$kind sanitizer" && \
	  build/sanitize-$$kind/tests/native/umbp_stress $(SANITIZE_SECONDS) 6 $(SEED) || exit 1; \
	done
	@echo "-- a pool that is damaged while in use, address sanitizer"
	@build/sanitize-address/tests/native/umbp_damage $(DAMAGE_ROUNDS) $(SEED)

clean:  ## remove what was built
	rm -rf .venv .venv-vllm033 build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
