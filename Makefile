# The commands of the project. Everything is installed into .venv by the first one that is run.

# Containers often set this. Without cached bytecode each of the hundreds of processes that tests and demo start compiles
# torch and everything else again: the suite then takes half as long again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-fast test-ray test-packaging test-integrations test-canary test-pages bench docs release-check clean

help:
	@echo "make demo    set up, then watch a policy learn on this machine"
	@echo "make test    set up, then run every check and every test"
	@echo "make test-fast        the tests without processes, browser and models: under 90 s on two idle cores"
	@echo "make test-ray         the tests on a real Ray cluster of this machine, in .venv-ray: on loopback, and the demo also on a host with an address"
	@echo "make test-packaging   build the package and try it in fresh environments, on every Python that is found"
	@echo "make test-integrations       NeMo-Gym, TransferQueue, verl, TRL and peft, with those packages in an environment of their own"
	@echo "make test-canary      newest releases and pre-releases of the packages that integrations touch, each in its own environment"
	@echo "make test-pages       every page of an integration with the built wheel in an empty folder, as it is and with kill -9"
	@echo "make bench   set up, then measure against rivals on this machine"
	@echo "make docs    build the documentation site into build/site, in .venv-docs; fails on a broken link"
	@echo "make release-check    wheel, sdist, metadata, changelog, the lowest declared versions of the dependencies, and tests marked release"
	@echo "make clean   remove what the others made, .venv included"

demo:
	@bash scripts/setup demo
	.venv/bin/penstock demo

test:
	@bash scripts/setup dev,bench
	@bash scripts/setup_browser
	@bash scripts/setup_promtool
	.venv/bin/python scripts/run_suite.py

test-fast:
	@bash scripts/setup dev,bench
	.venv/bin/pytest --workers 6 -m "not slow and not deep and not process" tests

test-ray:
	@VENV=.venv-ray bash scripts/setup dev,ray
	bash scripts/without_network .venv-ray/bin/pytest -W default tests/ray

test-packaging:
	@bash scripts/setup dev,bench
	.venv/bin/python scripts/test_packaging.py

test-canary:
	@bash scripts/setup dev,bench
	.venv/bin/python scripts/test_canary.py --write

test-pages:
	@bash scripts/setup dev,bench
	.venv/bin/python -m scripts.test_pages_from_wheel --write

test-integrations:
	@bash scripts/setup_integrations build/upstream
	bash scripts/test_integrations build/upstream

bench:
	@bash scripts/setup dev,bench
	for name in $$(.venv/bin/python -c "from penstock.commands.bench import BENCHES; print(*list(BENCHES)[1:])"); do \
	  .venv/bin/penstock bench $$name || exit 1; echo; done

docs:
	@VENV=.venv-docs bash scripts/setup docs
	.venv-docs/bin/python scripts/build_docs.py build/site

release-check:
	@bash scripts/setup dev,bench
	.venv/bin/python -m scripts.release_check
	.venv/bin/pytest -m release tests

clean:
	rm -rf .venv .venv-docs .venv-ray build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
