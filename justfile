# The front door: `just` lists these.
default:
    @just --list

# A virtual environment with everything a developer needs
setup:
    python3 -m venv .venv
    .venv/bin/pip install -e '.[dev]'
    .venv/bin/pre-commit install

# Style and types
check:
    ruff format --check .
    ruff check .
    mypy

# All tests, the real engine included
test:
    pytest

# Every benchmark that needs nothing but this machine; JSON and figures go to out/
bench:
    for script in benchmarks/*.py; do echo "== $script"; python "$script" || exit 1; done

# The command line's help texts as they are in docs/cli.md
docs:
    python docs/make_cli.py
