"""Writes ``cli.md``: the help text of every command, as it is. ``tests/cli/test_docs.py`` checks that it is current.

python docs/make_cli.py
"""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from plait.cli import COMMANDS, cli

WIDTH = 110
INTRODUCTION = """# Command line

Made by `docs/make_cli.py`. Exit codes: 0 done, 1 some requests failed, 2 usage or input error, 3 the engine gave up,
or the run's files cannot be written or are another run's, 130 interrupted. After 3 and 130, run the same command
again to go on.
"""


def text() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for name in ("", *COMMANDS):
        arguments = [name, "--help"] if name else ["--help"]
        shown = CliRunner().invoke(cli, arguments, prog_name="plait", terminal_width=WIDTH, max_content_width=WIDTH)
        assert shown.exit_code == 0, shown.output
        parts.append(f"## plait {name}".rstrip() + f"\n\n```\n{shown.output}```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(text())
