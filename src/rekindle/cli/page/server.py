"""Answers the page's requests: its files, and jobs as JSON. Nothing that it answers changes anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from rekindle.cli.access import Handler, check_access
from rekindle.cli.page.asking import Question
from rekindle.cli.page.jobs import Jobs, describe_history, describe_now, overview
from rekindle.cli.page.sampling import Sampler
from rekindle.memory.job_dir import JobDir

__all__ = ["Server"]

_STATIC = Path(__file__).with_name("static")
_NOW, _HISTORY = 0.5, 3.0
"""Seconds that an answer about the present and one about history are good for, at least."""
_PATIENCE = 2.0
"""Seconds that a request waits for an answer. After that it gets the one before, or word that it is being made."""
_OLD, _AT_A_TIME = 30.0, 4
"""Seconds after which a history is read anew before it is shown; histories that the list of jobs reads at a time."""
_MOST_LINES = 500
"""Checkpoints in one answer."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Server:
    """The page's server for some jobs. Its questions are asked while a browser wants the answers."""

    def __init__(self, jobs: Jobs, sampler: Sampler, host: str, token: str | None) -> None:
        """Raises UsageError if others reach ``host`` and there is no token."""
        self._jobs, self._sampler = jobs, sampler
        self._check, self._needs_token = check_access(host, token), token is not None
        self._questions: dict[tuple[str, str], Question[dict[str, Any]]] = {}
        self._overview: Question[list[dict[str, Any]]] = Question(self._describe_all, _NOW)

    def application(self) -> web.Application:
        """Returns the application, which only reads."""
        app = web.Application(middlewares=[_headed, self._checked])
        app.add_routes(
            [
                web.get("/", self._page),
                web.static("/static", _STATIC),
                web.get("/api/jobs", self._list_jobs),
                web.get("/api/jobs/{job}", self._tell_now),
                web.get("/api/jobs/{job}/history", self._tell_history),
                web.get("/api/jobs/{job}/checkpoints", self._list_checkpoints),
            ]
        )
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets the page itself, which has no facts in it, be loaded without the token: it asks its reader for that."""
        if self._needs_token and not request.path.startswith("/api/"):
            return await handler(request)
        return await self._check(request, handler)

    async def read_ahead(self) -> None:
        """Reads the history of the job while nobody waits for it, if there is one job."""
        jobs = self._jobs.directories()
        if len(jobs) == 1:
            await self._history_of(jobs[0]).answer(_PATIENCE)

    def _describe_all(self) -> list[dict[str, Any]]:
        return [overview(self._jobs, job, self._sampler.of(job)) for job in self._jobs.directories()]

    def _question(
        self, kind: str, job: JobDir, rest: float, ask: Callable[[], dict[str, Any]]
    ) -> Question[dict[str, Any]]:
        return self._questions.setdefault((kind, job.path.name), Question(ask, rest))

    def _history_of(self, job: JobDir) -> Question[dict[str, Any]]:
        return self._question("history", job, _HISTORY, partial(describe_history, self._jobs, job))

    async def _history(self, request: web.Request) -> tuple[dict[str, Any] | None, str | None]:
        """Returns the newest history at once, while a newer one is made; waits where there is none, or an old one."""
        question = self._history_of(self._job(request))
        found, age = question.latest()
        return await question.answer(_PATIENCE if found is None or age > _OLD else 0)

    def _job(self, request: web.Request) -> JobDir:
        job = self._jobs.find(request.match_info["job"])
        if job is None:
            for key in [key for key in self._questions if key[1] == request.match_info["job"]]:
                del self._questions[key]
            raise web.HTTPNotFound(text="the page shows no such job: it has ended, and its memory was given back")
        return job

    async def _page(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(_STATIC / "index.html")

    async def _list_jobs(self, _: web.Request) -> web.Response:
        found, error = await self._overview.answer(_PATIENCE)
        await self._add_what_storage_has([one for one in found or () if one["state"] == "away"])
        return _json({"host": socket.gethostname(), "now": time.time(), "jobs": found, "error": error})

    async def _add_what_storage_has(self, overviews: list[dict[str, Any]]) -> None:
        """Completes jobs of which memory knows nothing by their files, as far as these have been read."""
        asked = 0
        for one in overviews:
            job = self._jobs.find(one["id"])
            if job is None:
                continue
            question = self._history_of(job)
            history, age = question.latest()
            if age > _OLD and asked < _AT_A_TIME:
                asked += 1
                history, _ = await question.answer(0)
            if history is not None and history["newest_stored"] is not None:
                one["durable_step"], one["durable_at"] = history["newest_stored"].values()

    async def _tell_now(self, request: web.Request) -> web.Response:
        job = self._job(request)
        question = self._question("now", job, _NOW, lambda: describe_now(self._jobs, job, self._sampler.of(job)))
        found, error = await question.answer(_PATIENCE)
        return _json({"now": time.time(), "job": found, "error": error})

    async def _tell_history(self, request: web.Request) -> web.Response:
        """Leaves the checkpoints out, of which there may be many: only their number is told."""
        found, error = await self._history(request)
        if found is not None:
            found = {**found, "checkpoints": len(found["checkpoints"])}
        return _json({"now": time.time(), "history": found, "error": error})

    async def _list_checkpoints(self, request: web.Request) -> web.Response:
        """Lists some of the checkpoints, newest first: from the ``skip``-th on, of those that ``only`` names."""
        found, error = await self._history(request)
        skip, count = _number(request, "skip", 0), min(_number(request, "count", 50), _MOST_LINES)
        only = request.query.get("only", "")
        lines = [line for line in ([] if found is None else found["checkpoints"]) if _KINDS.get(only, _any)(line)]
        step = request.query.get("step", "")
        if step:
            lines = [line for line in lines if str(line["step"]).startswith(step)]
        listed = lines[skip : skip + count]
        at = None if found is None else found["at"]
        return _json({"total": len(lines), "skip": skip, "lines": listed, "at": at, "error": error})


def _any(_: dict[str, Any]) -> bool:
    return True


_KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "memory": lambda line: line["memory"] is not None,
    "peer": lambda line: line["peer"] is not None,
    "storage": lambda line: line["storage"] is not None,
    "pinned": lambda line: bool(line["pinned"] or line["best"]),
    "damaged": lambda line: (
        line["storage"] is not None
        and (line["storage"]["condition"] == "damaged" or line["storage"].get("sound") is False)
    ),
}
"""Filters of the list of checkpoints, by name."""


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise web.HTTPBadRequest(text=f"{name} must be a number")
    return int(text)


def _json(value: dict[str, Any]) -> web.Response:
    response = web.json_response(value)
    response.enable_compression()
    return response


@web.middleware
async def _headed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets the page load nothing from elsewhere, and nobody show it inside of another page."""
    try:
        response = await handler(request)
    except web.HTTPException as refused:
        refused.headers.update(_HEADERS)
        raise
    response.headers.update(_HEADERS)
    return response
