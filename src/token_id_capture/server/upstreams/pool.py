"""Several engines behind one gateway: a rollout stays with one, and the engine with the fewest calls gets the next.

::

    the rollout's engine, if it is up     its prefix cache is there
    else that of its latest stored call   another worker, or an earlier run, has chosen it
    else the one with the fewest calls    as this worker sees it

One that cannot be connected to, or whose ``/health`` fails, is left out until its ``/health`` answers again. A call
that could not be sent goes to another one; a call that was sent never does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.types import Scope

from token_id_capture.capture.recorder import recorder_in
from token_id_capture.errors import ConfigurationError
from token_id_capture.server.http.upstream import Upstream, UpstreamError, UpstreamResponse

_logger = logging.getLogger(__name__)

_REMEMBERED_ROLLOUTS: Final = 65_536
_HEALTH_SECONDS: Final = 5.0
_FAILURES: Final = 2
"""How many checks in a row have to fail: an engine at work may be slow to answer one."""
_HEALTH: Final[Scope] = {"type": "http", "method": "GET", "path": "/health", "raw_path": b"/health", "headers": []}


class RemembersUpstreams(Protocol):
    """A sink that can be asked where a rollout was served; the store does."""

    async def upstream_of(self, rollout_id: str) -> str | None:
        """The address of the engine that served its latest stored call; None if nobody told."""
        ...


@dataclass(eq=False)
class Member:
    """One engine: its ``running`` calls in this process, and the ``problem`` for which it is left out, if any.

    ``chosen`` rises with each choice, so that of several without calls each has its turn.
    """

    upstream: Upstream
    running: int = 0
    chosen: int = 0
    problem: str = ""
    failures: int = 0
    removed: bool = False

    @property
    def address(self) -> str:
        """Its URL; what entries name."""
        return self.upstream.address


class Upstreams:
    """The engines of one gateway. With one of them a request goes straight to it."""

    def __init__(
        self, addresses: Iterable[str], make: Callable[[str], Upstream], memory: RemembersUpstreams | None = None
    ) -> None:
        """``make`` opens the connections to an address, and ``memory`` is asked for rollouts that are not known here.

        Raises:
            ConfigurationError: an address is not a URL, or there is none.
        """
        self._make = make
        self._memory = memory
        self.members: tuple[Member, ...] = ()
        self._rollouts: OrderedDict[str, Member] = OrderedDict()
        self._choices = 0
        for address in addresses:
            self.add(address)
        if not self.members:
            raise ConfigurationError("name the engine's address with --upstream")

    def open(self, scope: Scope, body: bytes, *, plain: bool) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send the request of ``scope`` to one of them; see ``Upstream.open``."""
        if len(self.members) == 1:
            return self.members[0].upstream.open(scope, body, plain=plain)
        return self._opened(scope, body, plain)

    @asynccontextmanager
    async def _opened(self, scope: Scope, body: bytes, plain: bool) -> AsyncIterator[UpstreamResponse]:
        recorder = recorder_in(scope)
        rollout_id = None if recorder is None else recorder.context.rollout_id
        tried: list[Member] = []
        async with AsyncExitStack() as stack:
            while True:
                member = await self._chosen(rollout_id, tried)
                member.running += 1
                try:
                    response = await stack.enter_async_context(member.upstream.open(scope, body, plain=plain))
                    break
                except UpstreamError as error:
                    self._ended(member)
                    tried.append(member)
                    if not self._can_go_elsewhere(member, error, tried):
                        raise
                except BaseException:
                    self._ended(member)
                    raise
            body = b""  # a long prompt need not wait for its answer
            stack.callback(self._ended, member)
            yield response

    def _can_go_elsewhere(self, member: Member, error: UpstreamError, tried: list[Member]) -> bool:
        """Whether the engine was not there, and another one may be. Nothing was sent to it then."""
        if error.sent or error.status == 503:  # which says that this process can open no connection at all
            return False
        self.take_out(member, str(error))
        return any(other not in tried for other in self.members)

    async def _chosen(self, rollout_id: str | None, tried: list[Member]) -> Member:
        member = None if rollout_id is None else await self._known(rollout_id)
        if member is None or member.removed or member.problem or member in tried:
            left = [other for other in self.members if other not in tried]
            up = [other for other in left if not other.problem]
            # Where all are down, one may be up again.
            member = min(up or left, key=lambda one: (one.running, one.chosen))
            self._choices += 1
            member.chosen = self._choices
        if rollout_id is not None:
            self._rollouts[rollout_id] = member
            self._rollouts.move_to_end(rollout_id)
            if len(self._rollouts) > _REMEMBERED_ROLLOUTS:
                self._rollouts.popitem(last=False)
        return member

    async def _known(self, rollout_id: str) -> Member | None:
        """Where the rollout was served so far; asked of the store once."""
        if rollout_id in self._rollouts or self._memory is None:
            return self._rollouts.get(rollout_id)
        try:
            address = await self._memory.upstream_of(rollout_id)
        except Exception as error:
            _logger.warning("the engine of rollout %r is not known: %s", rollout_id, error)
            address = None
        # A call beside this one may have chosen meanwhile.
        return self._rollouts.get(rollout_id) or self.member(address)

    def apart(self, address: str) -> Upstream:
        """Connections to an address that takes no calls; the caller closes them.

        Raises:
            ConfigurationError: the address is not a URL.
        """
        return self._make(address)

    def member(self, address: str | None) -> Member | None:
        """The engine at this address, if it is one of them."""
        return next((one for one in self.members if one.address == address), None)

    def up(self) -> dict[str, bool]:
        """Of the address of each engine, whether calls are sent there."""
        return {member.address: not member.problem for member in self.members}

    # Who belongs to them, and who is up

    def add(self, address: str) -> Member:
        """Send calls there too. Adding one that is there changes nothing.

        Raises:
            ConfigurationError: the address is not a URL.
        """
        upstream = self.apart(address)
        member = self.member(upstream.address)
        if member is None:
            member = Member(upstream)
            self.members = (*self.members, member)
        return member

    async def remove(self, member: Member) -> None:
        """Send no further call there; those that run end as they would.

        Raises:
            ConfigurationError: it is the last one.
        """
        if self.members == (member,):
            raise ConfigurationError("the last upstream cannot be removed: add another one first")
        self.members = tuple(one for one in self.members if one is not member)
        member.removed = True
        if not member.running:
            await member.upstream.close()

    async def follow(self, addresses: Iterable[str]) -> None:
        """Have exactly these, as another process decided."""
        wanted = {self.add(address) for address in addresses}
        for member in self.members:
            if member not in wanted:
                await self.remove(member)

    def take_out(self, member: Member, problem: str) -> None:
        """Leave it out until it is found healthy."""
        if not member.problem:
            _logger.warning("upstream %s is left out: %s", member.address, problem)
        member.problem = problem

    async def look(self) -> None:
        """Ask each engine how it is."""
        await asyncio.gather(*map(self._look_at, self.members))

    async def _look_at(self, member: Member) -> None:
        problem = await _problem_of(member.upstream)
        if not problem:
            if member.problem:
                _logger.warning("upstream %s answers again", member.address)
            member.problem, member.failures = "", 0
            return
        member.failures += 1
        if member.failures >= _FAILURES:
            self.take_out(member, problem)

    async def reach(self) -> None:
        """Return once one of them listens.

        Raises:
            OSError: none does.
        """
        for member in sorted(self.members, key=lambda one: bool(one.problem)):
            try:
                return await member.upstream.reach()
            except OSError as error:
                last = error
        raise last

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        for member in self.members:
            await member.upstream.close()

    def _ended(self, member: Member) -> None:
        member.running -= 1
        if member.removed and not member.running:
            closing = asyncio.create_task(member.upstream.close())
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)


_closing: Final[set[asyncio.Task[None]]] = set()


async def _problem_of(upstream: Upstream) -> str:
    """Why an engine is not healthy; empty if it is, or has no such endpoint."""
    try:
        async with asyncio.timeout(_HEALTH_SECONDS), upstream.open(_HEALTH, b"", plain=True) as response:
            await response.read()
            return f"GET /health answered {response.status}" if response.status >= 500 else ""
    except TimeoutError:
        return f"GET /health was not answered in {_HEALTH_SECONDS:g} s"
    except UpstreamError as error:
        return str(error)
