"""Links within one process: for tests, and for a service without machines in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from deployments.transport.host import Host
from deployments.transport.links import Dial, until_first_ends
from deployments.transport.mailbox import Mailbox
from deployments.transport.wire import LinkError, LinkTimes


def memory_dial(me: str, my_host: Host[Any], peers: Mapping[str, Host[Any]], delay_s: float = 0.0) -> Dial:
    """Dials that link ``my_host`` with the hosts in ``peers``; a peer that is taken out of it cannot be dialled."""

    async def pump(mailbox: Mailbox, receiver: Host[Any]) -> None:
        async for batch in mailbox.batches(LinkTimes().heartbeat_s):
            await asyncio.sleep(delay_s)
            receiver.post(batch)

    async def dial(peer: str, on_up: Callable[[], None]) -> None:
        if peer not in peers:
            raise LinkError(f"{peer} is gone")
        mine, theirs = my_host.attach(peer), peers[peer].attach(me)
        try:
            on_up()
            await until_first_ends(pump(mine, peers[peer]), pump(theirs, my_host))
        finally:
            my_host.detach(peer, mine)
            peers[peer].detach(me, theirs)

    return dial
