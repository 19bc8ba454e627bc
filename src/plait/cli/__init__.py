"""The command line: one file a subcommand, loaded when it is called, so that ``plait --help`` stays instant."""

from __future__ import annotations

import importlib
import io
import os
import sys

import click

from plait import __version__
from plait.errors import PlaitError

COMMANDS = {
    "run": "Answer every request of a batch file, in the planned order, resumably.",
    "plan": "Say how long a job will take and why, without running it.",
    "simulate": "Say how long a trace would take on a machine under each policy.",
    "check": "Report every problem of a batch file, without an engine.",
}
"""Subcommand -> one-line help; the command itself is ``plait.cli.<name>:command``."""
INTERRUPTED = 130


class LazyGroup(click.Group):
    """Imports a subcommand's module only when that subcommand runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The real command, or None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"plait.cli.{cmd_name.replace('-', '_')}")
        found: click.Command = module.command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="plait")
def cli() -> None:
    """Runs large batches of LLM requests in the order the hardware wants."""


def main() -> None:
    """Entry point: a PlaitError becomes one line on stderr and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an id that the terminal cannot show is no reason to fail
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        click.echo("plait: interrupted", err=True)
        code = INTERRUPTED
    except PlaitError as error:
        click.echo(f"plait: {error}", err=True)
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on: not even the flush at exit
        code = 1
    sys.exit(code)
