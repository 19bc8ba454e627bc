# The front door: `just` lists these.
export PATH := justfile_directory() / ".venv/bin:" + env_var("PATH")

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

# The benchmarks that need nothing but this machine and ../shared, one at a time; JSON and figures go to out/
bench:
    for name in reading tree lengths steptime_fit workloads simulator_speed paper_blendserve paper_sortedf sortedf_more \
        embedded; do echo "== $name"; python benchmarks/$name.py || exit 1; done

# The command line's help texts as they are in docs/cli.md
docs:
    python docs/make_cli.py
