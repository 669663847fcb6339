"""Defines the command ``metrics``, which serves the metrics of this node's jobs to Prometheus."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import click
from aiohttp import web

from rekindle.cli.access import access_options, check_access, read_token
from rekindle.cli.serving import serve_until_told
from rekindle.cli.terminal import MEMORY_OPTION
from rekindle.memory.job_dir import memory_base

__all__ = ["metrics_command"]

Render = Callable[[str], tuple[bytes, str]]
"""Returns the metrics and their content type, for a request's ``Accept``."""


@click.command("metrics", short_help="Serve the metrics of this node's jobs to Prometheus.")
@access_options(port=9760)
@click.option("--once", is_flag=True, help="Print the metrics, and serve nothing.")
@MEMORY_OPTION
def metrics_command(host: str, port: int, token_file: Path | None, once: bool, memory: Path | None) -> None:
    """Serve the metrics of all jobs of this node at http://HOST:PORT/metrics, until it is told to end.

    One process for each node and user. It reads what the jobs have in memory, and changes nothing. Jobs may come and
    go, and need not know of it.
    """
    render = _make_renderer(memory_base(memory))
    if once:
        sys.stdout.buffer.write(render("")[0])
        sys.stdout.buffer.flush()
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    access = check_access(host, read_token(token_file))
    asyncio.run(_serve(host, port, render, access))


def _make_renderer(base: Path) -> Render:
    """Loads what reads the jobs: other commands do without prometheus-client."""
    from prometheus_client import CollectorRegistry  # noqa: PLC0415
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

    from rekindle.cli.collector import JobCollector  # noqa: PLC0415

    registry = CollectorRegistry(auto_describe=False)
    collector = JobCollector(base)
    registry.register(collector)

    def render(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return render


async def _serve(host: str, port: int, render: Render, access: object) -> None:
    one_at_a_time = asyncio.Lock()

    async def get_metrics(request: web.Request) -> web.Response:
        async with one_at_a_time:
            body, content_type = await asyncio.to_thread(render, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def get_root(_: web.Request) -> web.Response:
        return web.Response(text='<a href="/metrics">metrics of this node\'s jobs</a>\n', content_type="text/html")

    app = web.Application(middlewares=[access])  # type: ignore[list-item]
    app.add_routes([web.get("/metrics", get_metrics), web.get("/", get_root)])
    await serve_until_told(app, host, port, lambda address: click.echo(f"metrics at {address}/metrics", err=True))
