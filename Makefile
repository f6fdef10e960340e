# `make demo` and `make test` do all their own set-up: a virtual environment from hash-locked files, embedded model included.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# cpu or cuda (requirements/*.lock); empty: cpu where pip finds a CPU build of torch, and outside Linux.
LOCK   ?=
LOCKED := install --quiet --require-hashes --no-deps --only-binary :all:
# Idle OpenMP threads that spin starve a second torch process on a small machine.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY ?= 1
# Each of the two test processes would compile all tests anew, for twelve seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint typecheck unit coverage test-axolotl test-sharding test-deepspeed test-ray pages notebooks docs pictures accessibility package sbom audit-dependencies clean

help:
	@echo "make demo   plain SFT against holdfast on the embedded model, both results side by side"
	@echo "make test   lint, type check and the test suite"
	@echo "make coverage  the test suite, and the share of lines that it runs, by module"
	@echo "make test-axolotl  the Axolotl plugin: axolotl train on a tiny model, in an environment with Axolotl of its own"
	@echo "make test-sharding  2 and 4 processes x DDP, FSDP2 x LoRA, QLoRA, all weights; every defense under FSDP2; 25 minutes on two cores"
	@echo "make test-deepspeed  ZeRO-1 and 2 on two processes against DDP; three minutes on two cores"
	@echo "make test-ray  a study on two Ray nodes: scheduler killed, node lost, no cell lost; one minute"
	@echo "make pages  rewrite the pages of defenses, commands and run-file keys from the code"
	@echo "make notebooks  execute the notebooks of examples/ and store what they print"
	@echo "make docs   the documentation site, in site/"
	@echo "make pictures  the screenshots of the report, README and the site (needs chromium)"
	@echo "make accessibility  axe over the site and the report in Chromium: no serious fault (needs npm and chromium)"
	@echo "make package  wheel and source distribution, in dist/"
	@echo "make sbom   sbom.json: the locked packages with their hashes (CycloneDX)"
	@echo "make audit-dependencies  known vulnerabilities of the locked packages (asks an online database)"
	@echo "make clean  remove the virtual environment and caches"

demo: $(VENV)/.ready
	$(BIN)/holdfast demo

test: lint typecheck sbom unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.ready
	$(BIN)/mypy

unit: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

coverage: $(VENV)/.ready
	$(BIN)/python -m pip $(LOCKED) --requirement requirements/coverage.lock
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n 2 --dist worksteal
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Environments of their own, which nothing that ships depends on: Axolotl pins its own versions of transformers and TRL,
# and with bitsandbytes or DeepSpeed other tests of the suite would change.
$(VENV)-axolotl/.ready $(VENV)-sharding/.ready $(VENV)-deepspeed/.ready: $(VENV)-%/.ready: pyproject.toml requirements/%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --requirement requirements/$*.txt
	$(VENV)-$*/bin/python -m pip install --quiet --editable .
	touch $@

# Besides the plugin's tests, those that compare our trainer with TRL's run on Axolotl's older versions.
test-axolotl: $(VENV)-axolotl/.ready
	OMP_NUM_THREADS=1 $(VENV)-axolotl/bin/python -m pytest -p no:cacheprovider tests/axolotl \
	  tests/unit/test_axolotl_refusals.py tests/contracts/test_slack_is_sft.py tests/contracts/test_auto_is_sft.py

test-sharding: $(VENV)-sharding/.ready
	OMP_NUM_THREADS=1 $(VENV)-sharding/bin/python -m pytest -p no:cacheprovider tests/sharding/matrix.py \
	  tests/sharding/defenses.py tests/sharding/launched.py tests/oracle/test_kl_quantized.py

test-deepspeed: $(VENV)-deepspeed/.ready
	OMP_NUM_THREADS=1 $(VENV)-deepspeed/bin/python -m pytest -p no:cacheprovider tests/deepspeed/zero.py \
	  tests/deepspeed/launched.py

# Ray is in the suite's environment; its processes are too heavy for the suite.
test-ray: $(VENV)/.ready
	$(BIN)/python -m pytest -p no:cacheprovider tests/unit/study/two_nodes.py tests/unit/study/test_ray_engine.py

pages: $(VENV)/.ready
	$(BIN)/python -m tools.defense_pages docs
	$(BIN)/python -m tools.command_page
	$(BIN)/python -m tools.run_file_schema
	$(BIN)/python -m tools.run_file_page

# Environments of their own: neither needs torch, and nothing that ships needs them.
$(VENV)-docs/.ready: requirements/docs.lock
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip $(LOCKED) --requirement requirements/docs.lock
	touch $@

notebooks: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.notebooks

docs: $(VENV)-docs/.ready
	$(VENV)-docs/bin/mkdocs build --strict

pictures: $(VENV)/.ready docs
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.pictures report
	$(BIN)/python -m tools.pictures site

# axe-core comes from npm and Chromium from the system; nothing that ships needs either.
$(VENV)-axe/package/axe.min.js:
	mkdir -p $(VENV)-axe
	cd $(VENV)-axe && npm pack --silent axe-core@4.14.0 && tar -xzf axe-core-4.14.0.tgz

accessibility: $(VENV)/.ready docs $(VENV)-axe/package/axe.min.js
	$(BIN)/python -m tests.unit.report.pages $(VENV)-axe/reports
	$(BIN)/python -m tools.accessibility $(VENV)-axe/package/axe.min.js $(VENV)-axe/reports site

$(VENV)-package/.ready: requirements/package.lock requirements/build.lock
	$(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/python -m pip $(LOCKED) --requirement requirements/build.lock
	$(VENV)-package/bin/python -m pip $(LOCKED) --requirement requirements/package.lock
	touch $@

package: $(VENV)-package/.ready
	rm -rf dist
	$(VENV)-package/bin/python -m build --no-isolation --outdir dist

# Every file is checked against the sha256 in the lock, the project itself is built with the locked backend.
# The lock files are written by tools/lock.py.
$(VENV)/.ready: pyproject.toml requirements/cpu.lock requirements/cuda.lock requirements/build.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(LOCKED) --requirement requirements/build.lock
	lock="$(LOCK)"; torch=$$(grep -oE '^torch==[^ ]+' requirements/cpu.lock | cut -d= -f3); \
	if [ -z "$$lock" ]; then lock=cuda; \
	  if [ "$$(uname)" != Linux ]; then lock=cpu; \
	  elif $(BIN)/python -m pip index versions torch 2>/dev/null | grep -qF "$$torch+cpu"; then lock=cpu; fi; fi; \
	echo "installing requirements/$$lock.lock"; \
	$(BIN)/python -m pip $(LOCKED) --requirement requirements/$$lock.lock
	$(BIN)/python -m pip uninstall --quiet --yes holdfast 2>/dev/null || true  # the name of the distribution before 0.2
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Its own environment: the tool is no part of what it lists.
$(VENV)-sbom/.ready: requirements/sbom.lock
	$(PYTHON) -m venv $(VENV)-sbom
	$(VENV)-sbom/bin/python -m pip $(LOCKED) --requirement requirements/sbom.lock
	touch $@

sbom: $(VENV)-sbom/.ready
	$(VENV)-sbom/bin/cyclonedx-py requirements requirements/$(or $(LOCK),cuda).lock --pyproject pyproject.toml \
	  --mc-type library --output-reproducible --of JSON --output-file sbom.json
	@echo "sbom.json: requirements/$(or $(LOCK),cuda).lock"

# pip-audit sends names and versions to an online database; it is installed as it is, and nothing that ships depends on it.
audit-dependencies:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit
	$(VENV)-audit/bin/pip-audit --require-hashes --disable-pip --requirement requirements/$(or $(LOCK),cuda).lock

clean:
	rm -rf $(VENV) $(VENV)-sbom $(VENV)-audit $(VENV)-axolotl $(VENV)-sharding $(VENV)-deepspeed $(VENV)-docs $(VENV)-axe $(VENV)-package site dist sbom.json .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
