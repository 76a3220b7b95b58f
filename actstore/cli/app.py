"""The entry of the command line."""

from __future__ import annotations

import sys

import typer

from actstore.errors import ActstoreError


def main() -> None:
    """Run the command line. A user's mistake is one line and exit code 2; a failed row is exit code 1."""
    try:
        _commands()()
    except ActstoreError as error:
        typer.echo(f"actstore: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("actstore: stopped", err=True)
        sys.exit(130)


def _commands() -> typer.Typer:
    """Return the commands; ``run`` alone where it is given, so that the script has no other command in its memory."""
    if sys.argv[1:2] != ["run"]:
        from actstore.cli.commands import app

        return app
    from actstore.cli.run import SETTINGS, run

    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.callback()(lambda: None)  # otherwise Typer would take away the command's name
    alone.command(context_settings=SETTINGS)(run)
    return alone


if __name__ == "__main__":
    main()
