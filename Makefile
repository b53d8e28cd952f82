# Every target sets up .venv first, when pyproject.toml or constraints.txt changed.
#   make PYTHON=python3.12 VENV=.venv312 test     another Python, in an environment of its own
#   make course ARGS="05 06 --strict"             arguments for perf-helpers course; for pytest in make test
#   make course TORCH="torch===2.15.0" VENV=.venv-cuda    another build of torch: here the CUDA one, by its exact name
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TORCH ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# The stamp holds the folder it was made in. It is void when the interpreter is gone (an upgraded Python) or the
# folder was moved or copied (the environment would run the other folder's code).
MADE_IN := $(shell $(BIN)/python -c "print(open('$(STAMP)').read().strip())" 2>/dev/null)
ifneq ($(MADE_IN),$(CURDIR))
FRESH := fresh
endif

help:
	@echo "make setup     create .venv; every other target does this first if needed"
	@echo "make course    run every lesson and write a report to build/course/index.html; 11 to 17 minutes on two cores"
	@echo "make lab       open the lessons in JupyterLab"
	@echo "make lessons   generate notebooks/*.ipynb from notebooks/src/*.py"
	@echo "make check     check style, structure, sizes and generated files, in seconds"
	@echo "make test      run make check, the quick tests, and every lesson at the smallest sizes; 10 minutes on two cores"
	@echo "make nightly   run all other tests: lessons at their real sizes, browser, web pages, instruction sets, rehearsals"
	@echo "make test-all  run make test, then make nightly"
	@echo "make levels    run the tests that depend on CPU instructions with older instruction sets"
	@echo "make random    check the CUDA estimate on randomly generated configurations for an hour"
	@echo "make architectures check the CPU estimate on 60 small models of transformers' classes, other ones each day"
	@echo "make rehearse  dry-run every lesson for several GPUs, with torch's CUDA build on a stub CUDA runtime"
	@echo "make record    run make course, and keep the run in results/ as this machine's reference"
	@echo "make site      build the web pages of all recorded results in build/site/index.html"
	@echo "make matrix    run the course with six sets of library versions, oldest to newest, and compare them"
	@echo "make gpu       on a machine with a GPU, measure what cannot be measured without one (ARGS=--list prints the parts)"
	@echo "make wheel     run the tests of rehearsals, and those that depend on torch's build, with torch's CUDA build"

course: extras
	$(BIN)/perf-helpers course --out build/course $(ARGS)

# Where a verdict is not as expected it stops before anything is kept: look first, then run the three lines by hand.
record: course
	$(BIN)/python benchmarks/build.py --record build/course
	$(BIN)/python website/recorded_lessons.py build/course
	$(BIN)/python notebooks/build.py

site: $(STAMP)
	$(BIN)/python website/site_pages.py $(ARGS)

setup: $(STAMP)

lab: $(STAMP)
	$(BIN)/jupyter lab --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(ARGS) notebooks/

lessons: $(STAMP)
	$(BIN)/python notebooks/build.py

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python notebooks/build.py --check
	$(BIN)/python tests/size.py

check: style
	$(BIN)/python -m pytest -q -m "not nightly" tests/test_repo.py tests/test_notebooks.py tests/course/test_ledger.py

# A test's markers (pyproject.toml) say in which tier and stage it runs. ARGS are arguments for pytest, in place of the stages.
# The tests of `check` run beside the others, on two cores.
test: style extras build/ipywidgets7
ifeq ($(ARGS),)
	$(BIN)/python tests/stages.py daily
else
	$(BIN)/python -m pytest $(ARGS)
endif

# MINUTES: no stage is begun that would end later (0: no limit). RUN: this run's number; the next one begins with other stages.
MINUTES ?= 0
RUN ?= $(or $(GITHUB_RUN_NUMBER),$(shell git rev-list --count --first-parent HEAD 2>/dev/null),0)
nightly: extras build/ipywidgets7
	$(BIN)/python tests/stages.py nightly --minutes $(MINUTES) --run $(RUN)

test-all:
	@$(MAKE) --no-print-directory test ARGS=; failed=$$?; $(MAKE) --no-print-directory nightly && exit $$failed

# What only torch's CUDA build can tell. It may not be installable everywhere: then it is not tried, and no GPU is rehearsed.
rehearsed: $(STAMP)
	@if $(MAKE) $(CUDA) $(CUDA_VENV)/.stamp; then \
		{ [ $(CUDA_VENV) = $(VENV) ] || $(MAKE) wheel; } && $(MAKE) rehearse LESSONS=core; \
	else \
		echo "torch's CUDA build cannot be installed here: it is not tried, and no GPU is rehearsed" >&2; \
	fi

levels: $(STAMP)
	$(BIN)/python tests/levels.py $(ARGS)

# torch's ordinary wheel for Linux is a CUDA build, with or without a GPU; it takes 5 GB with its packages. If .venv has it,
# no second environment is made, and `make test` has run what `make wheel` would.
WHEEL_TESTS := $(filter-out %_exact.py %_deepspeed.py,$(wildcard tests/estimate/test_*.py)) $(wildcard tests/widgets/test_*_explorer.py)
WHEEL_TESTS += tests/advise tests/lab/test_hardware.py tests/test_cli.py::test_measure_prints_one_json_object
WHEEL_TESTS += $(wildcard tests/rehearsal/test_*rehearsed.py)
HAS_CUDA = $(shell grep -l "^cuda: .*'" $(VENV)/lib/python*/site-packages/torch/version.py 2>/dev/null)
CUDA_VENV = $(if $(HAS_CUDA),$(VENV),.venv-cuda)
CUDA = VENV=$(CUDA_VENV) $(if $(HAS_CUDA),,TORCH="torch===$(shell sed -n 's/^torch==//p' constraints.txt)")
wheel: $(STAMP)
	$(MAKE) $(CUDA) $(CUDA_VENV)/.stamp
	$(CUDA_VENV)/bin/python -m pytest -n 2 --dist loadfile $(WHEEL_TESTS)

# On two machines with one GPU each, a T4, and one with two GPUs. LESSONS=core takes what CI does, LESSONS=05,06 those. With all
# lessons the estimate is also held against torch's allocator anew, which takes an hour; torchao is needed for its optimizers.
LESSONS ?= all
rehearse: $(STAMP)
	$(MAKE) $(CUDA) $(CUDA_VENV)/.stamp
	$(CUDA_VENV)/bin/python tests/rehearsal/rehearse_lessons.py $(LESSONS)
ifeq ($(LESSONS),all)
	$(CUDA_VENV)/bin/python -m pip install -q --disable-pip-version-check torchao==0.18.0
	$(CUDA_VENV)/bin/python benchmarks/measure_cuda.py --out build/cuda.json
	$(CUDA_VENV)/bin/python benchmarks/measure_allocator.py --out build/allocator.json
endif

# The next COUNT classes of transformers' registries, another set each day: the estimate against the count, kept in results/.
architectures: build/scipy
	PYTHONPATH=$(SCIPY) $(BIN)/python benchmarks/measure_architectures.py --count $(or $(COUNT),60)

# Compare the estimate with torch's allocator on random configurations for an hour, on another set each day. A miss fails.
random: $(STAMP)
	$(MAKE) $(CUDA) $(CUDA_VENV)/.stamp
	$(CUDA_VENV)/bin/python benchmarks/measure_random.py --seed $(shell date +%Y%m%d) --out build/random.json

# Each set of benchmarks/matrix.toml in an environment of its own in build/matrix: 5 GB each, and all lessons take a quarter of an
# hour each on two quiet cores. LESSONS=05,06 takes those; ARGS="--sets oldest newest" two of the sets.
matrix: $(STAMP)
	$(BIN)/python benchmarks/matrix.py --lessons $(LESSONS) $(ARGS); code=$$?; $(BIN)/python benchmarks/build.py && exit $$code

# Exit code 3: rows are left, and the same command goes on. ARGS="--part ten" runs one part, ARGS=--tiny all of it on a CPU.
gpu: $(STAMP)
	$(BIN)/python benchmarks/measure_gpu.py $(ARGS)

# The widgets are also tested under the version that Colab has.
build/ipywidgets7: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $@ ipywidgets==7.7.1 ipython_genutils==0.2.0
	@touch $@

# For lesson 16, in a folder of its own for each Python: an installed DeepSpeed would be imported in every training. Where it cannot
# be built the course and its tests go on without it.
DEEPSPEED_PARTS := wheel setuptools hjson py-cpuinfo msgpack einops ninja pydantic pydantic-core annotated-types typing-inspection
OF_PYTHON = $(shell $(BIN)/python -c "import sys; print('%d.%d' % sys.version_info[:2])")
DEEPSPEED = build/deepspeed-$(OF_PYTHON)
build/deepspeed: $(STAMP)
	@test -f $(DEEPSPEED)/.stamp || { rm -rf $(DEEPSPEED); $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
		--target $(DEEPSPEED) -c constraints.txt $(DEEPSPEED_PARTS) && \
		PYTHONPATH=$(DEEPSPEED) DS_ACCELERATOR=cpu $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
		--no-build-isolation --no-cache-dir --target $(DEEPSPEED) -c constraints.txt deepspeed && touch $(DEEPSPEED)/.stamp; }
# $(call apart,folder,packages): install packages without their dependencies in a folder, unless it has them.
apart = @test -f $(1)/.stamp || { rm -rf $(1); $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
	--target $(1) -c constraints.txt $(2) && touch $(1)/.stamp; }
# For lesson 22; what it needs besides is there.
OPTUNA = build/optuna-$(OF_PYTHON)
build/optuna: $(STAMP)
	$(call apart,$(OPTUNA),optuna alembic SQLAlchemy colorlog Mako)
# For lesson 25: where it is installed, each training of the Trainer imports it, and bitsandbytes with it.
PEFT = build/peft-$(OF_PYTHON)
build/peft: $(STAMP)
	$(call apart,$(PEFT),peft)
# For the losses of detection models in `make architectures`.
SCIPY = build/scipy-$(OF_PYTHON)
build/scipy: $(STAMP)
	$(call apart,$(SCIPY),scipy==1.17.1)
extras: $(STAMP)
	@$(MAKE) --no-print-directory build/deepspeed || echo "DeepSpeed could not be built: lesson 16 goes on without it." >&2
	@$(MAKE) --no-print-directory build/optuna || echo "optuna could not be installed: lesson 22 goes on without it." >&2
	@$(MAKE) --no-print-directory build/peft || echo "peft could not be installed: lesson 25 goes on without it." >&2

$(STAMP): pyproject.toml constraints.txt $(FRESH)
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
		echo "Python 3.11 or newer is needed; $(PYTHON) is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
		echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version). The first time this takes minutes and some GB."
	@$(if $(FRESH),$(PYTHON) -m venv --clear $(VENV))
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(TORCH) -e ".[course,dev]"
	@echo "$(CURDIR)" > $(STAMP)

.PHONY: setup extras build/deepspeed build/optuna build/peft build/scipy help course record site lab lessons style check test nightly test-all levels rehearsed rehearse architectures random matrix wheel gpu fresh
fresh: ;
