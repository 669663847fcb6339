"""Defines the command ``completion``, which lets shells complete the others."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rekindle.errors import RekindleError

__all__ = ["completion_command"]

_NAME, _VARIABLE = "rekindle", "_REKINDLE_COMPLETE"


@click.command("completion", short_help="Print the lines by which a shell completes commands, options and roots.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the lines by which SHELL completes commands, options and roots.

    \b
    rekindle completion bash >> ~/.bashrc                                    bash 4.4 or newer
    rekindle completion zsh >> ~/.zshrc
    rekindle completion fish > ~/.config/fish/completions/rekindle.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise RekindleError(f"the installed click can't complete for {shell}: it takes click 8.1 or newer")
    click.echo(kind(context.find_root().command, {}, _NAME, _VARIABLE).source())
