"""Defines the command ``ui``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from rekindle.cli.access import access_options, read_token
from rekindle.cli.page.jobs import Jobs
from rekindle.cli.page.sampling import Sampler
from rekindle.cli.page.server import Server
from rekindle.cli.serving import serve_until_told
from rekindle.cli.terminal import MEMORY_OPTION, complete_directory, parse_root
from rekindle.format.names import Root
from rekindle.memory.job_dir import memory_base

__all__ = ["ui_command"]


def _parse_roots(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Root]:
    return [root for value in values if (root := parse_root(ctx, param, value)) is not None]


@click.command("ui", short_help="Show jobs on a page for browsers.")
@click.argument("roots", nargs=-1, metavar="[ROOT]...", callback=_parse_roots, shell_complete=complete_directory)
@access_options(port=7979)
@MEMORY_OPTION
def ui_command(roots: list[Root], host: str, port: int, token_file: Path | None, memory: Path | None) -> None:
    """Show this node's jobs, or those of each ROOT, on a page for browsers, until it is told to end.

    The page shows what 'status', 'ls' and 'incidents' do: live while a job runs, and from its files when none does. It
    changes nothing, and loads nothing from elsewhere.
    """
    jobs = Jobs(roots, memory_base(memory))
    sampler = Sampler(jobs.directories)
    server = Server(jobs, sampler, host, read_token(token_file))
    sampler.start()
    try:
        asyncio.run(_serve(server, host, port))
    finally:
        sampler.stop()


async def _serve(server: Server, host: str, port: int) -> None:
    reading = asyncio.get_running_loop().create_task(server.read_ahead())
    try:
        await serve_until_told(
            server.application(), host, port, lambda address: click.echo(f"page at {address}/", err=True)
        )
    finally:
        reading.cancel()
