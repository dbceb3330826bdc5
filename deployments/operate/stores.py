"""Where the store of a service lives: in Redis where the configuration names one, else in one named Ray actor.

Both are keyed by the application's name, not by its code version: an update, or every replica's end, loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError

from cluster.config.app import AppArgs
from cluster.config.environment import redis_password
from cluster.config.limits import ResponsesStore
from deployments.http.store import Changes, MemoryStore, Store, Version
from specdec.core.errors import InvalidParameterError, ServiceUnavailableError

logger = logging.getLogger("ray.serve")

NAMESPACE = "specdec"
"""Ray's namespace of the actors."""
PATIENCE_S = 5.0
"""How long a call may take, beyond the time that it asks to wait."""
START_S = 60.0
"""How long whoever watches waits for the actor's process to start; other calls have no more than their usual time."""
_POLL_S = 1.0
_T = TypeVar("_T")


def open_store(args: AppArgs, application: str) -> Store:
    """The store of an application; the same one for all its ingresses, now and after an update.

    Raises:
        InvalidParameterError: Redis is named, and its client is not installed.
    """
    if args.store.redis_url is not None:
        return RedisStore(args.store.redis_url, f"{args.store.key_prefix}:{application}", args.responses_store)
    return RayStore(f"store:{application}", args.responses_store, args.actors.ingress.label_selector)


class RayStore:
    """A :class:`~deployments.http.store.Store` in a detached actor, which Ray restarts, empty, after its death.

    While a call goes unanswered for too long, further ones fail at once: nothing piles up before an actor that hangs.
    All calls wait for one start of the actor, which goes on when they wait no longer.

    Args:
        name: Of the actor; whoever comes first starts it.
        bounds: Of its records.
        labels: Of the nodes where it may run.
    """

    def __init__(self, name: str, bounds: ResponsesStore, labels: dict[str, str] | None = None) -> None:
        self._options = {"name": name, "label_selector": labels or None}
        self._bounds = bounds
        self._actor: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._unanswered: asyncio.Future[Any] | None = None

    async def put(self, owner: str, name: str, value: bytes) -> bool:
        """Keep a record; False where it is larger than all records together may be."""
        return bool(await self._call("put", owner, name, value))

    async def get(self, owner: str, name: str) -> bytes | None:
        """A record of that owner."""
        found: bytes | None = await self._call("get", owner, name)
        return found

    async def delete(self, owner: str, name: str) -> bool:
        """Drop a record; returns whether there was one."""
        return bool(await self._call("delete", owner, name))

    async def assign(self, name: str, value: bytes | None) -> bool:
        """Let a name mean a value from now on, or nothing; returns whether it meant anything."""
        return bool(await self._call("assign", name, value))

    async def changes(self, since: Version, wait_s: float) -> Changes:
        """The names that have changed since a version; waits up to ``wait_s`` seconds while there are none."""
        return Changes(*await self._call("changes", since, wait_s, wait_s=wait_s))

    async def _call(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        if self._actor is None:
            await self._answer(self._started, START_S if wait_s > 0 else PATIENCE_S)
        return await self._answer(lambda: asyncio.create_task(self._ask(method, args)), wait_s + PATIENCE_S)

    async def _answer(self, ask: Callable[[], asyncio.Task[_T]], timeout_s: float) -> _T:
        if self._unanswered is not None and not self._unanswered.done():
            raise ServiceUnavailableError("the store of responses and adapters still owes an earlier answer")
        call = ask()
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        for _ in range(2):  # a loop that stood still finds the answer in the second half
            await asyncio.wait({call}, timeout=timeout_s / 2)
        if not call.done():
            self._unanswered = call
            raise ServiceUnavailableError(f"the store of responses and adapters did not answer within {timeout_s:g} s")
        try:
            return call.result()
        except Exception as error:
            raise ServiceUnavailableError(f"the store of responses and adapters failed: {error!r}") from error

    async def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            return await getattr(self._actor, method).remote(*args)
        except ActorDiedError:  # for good: the next call starts another
            self._actor = None
            raise

    def _started(self) -> asyncio.Task[None]:
        """The start of the actor that is under way, or a new one."""

        async def start() -> None:
            self._actor = await self._start()

        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(start())
        return self._starting

    async def _start(self) -> Any:
        """The actor that is there, or a new one, once it answers; its bounds are this version's."""
        options = {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, **self._options}
        kind = ray.remote(MemoryStore).options(num_cpus=0, max_restarts=-1, max_concurrency=1000, **options)
        actor = await asyncio.to_thread(kind.remote, self._bounds)
        await actor.set_bounds.remote(self._bounds)
        return actor


class RedisStore:
    """A :class:`~deployments.http.store.Store` in Redis, where it outlives the cluster.

    Args:
        url: Of Redis, without a password.
        prefix: Of all keys; in braces, so that they are on one node of a Redis cluster.
        bounds: Of its records.
    """

    def __init__(self, url: str, prefix: str, bounds: ResponsesStore) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError as error:
            text = "store.redis_url needs Redis' client: install specdec-serve[redis]"
            raise InvalidParameterError("store.redis_url", text) from error
        self._bounds = bounds
        self._prefix = f"{{{prefix}}}:"
        client = Redis.from_url(
            url, password=redis_password(), socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S
        )
        self._client: Any = client
        self._put = client.register_script(_LIBRARY + _PUT)
        self._delete = client.register_script(_LIBRARY + "return drop(ARGV[2], ARGV[3])")
        self._assign = client.register_script(_LIBRARY + _ASSIGN)
        self._changes = client.register_script(_LIBRARY + _CHANGES)

    async def put(self, owner: str, name: str, value: bytes) -> bool:
        """Keep a record; False where it is larger than all records together may be."""
        bounds = self._bounds
        most = [bounds.max_responses, bounds.max_bytes, int(bounds.max_age_s * 1000)]
        return bool(await self._answered(self._put(args=[self._prefix, owner, name, value, *most])))

    async def get(self, owner: str, name: str) -> bytes | None:
        """A record of that owner."""
        found: bytes | None = await self._answered(self._client.get(f"{self._prefix}record:{owner}\n{name}"))
        return found

    async def delete(self, owner: str, name: str) -> bool:
        """Drop a record; returns whether there was one."""
        return bool(await self._answered(self._delete(args=[self._prefix, owner, name])))

    async def assign(self, name: str, value: bytes | None) -> bool:
        """Let a name mean a value from now on, or nothing; returns whether it meant anything."""
        values = [] if value is None else [value]
        return bool(await self._answered(self._assign(args=[self._prefix, uuid.uuid4().hex, name, *values])))

    async def changes(self, since: Version, wait_s: float) -> Changes:
        """The names that have changed since a version, looked for once a second while there are none."""
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            asked = self._changes(args=[self._prefix, uuid.uuid4().hex, *since])
            store, version, is_all, names, values, gone = await self._answered(asked)
            found: Changes = Changes(
                (store.decode(), int(version)),
                bool(is_all),
                {name.decode(): value for name, value in zip(names, values, strict=True)}
                | {name.decode(): None for name in gone},
            )
            rest_s = deadline_s - asyncio.get_running_loop().time()
            if found.version != since or rest_s <= 0:
                return found
            await asyncio.sleep(min(_POLL_S, rest_s))

    async def _answered(self, call: Coroutine[Any, Any, _T]) -> _T:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            raise ServiceUnavailableError(f"the store in Redis failed (store.redis_url): {error!r}") from error


_LIBRARY = """
local p = ARGV[1]
local function drop(owner, name)
  local key = owner .. '\\n' .. name
  local size = redis.call('HGET', p .. 'sizes', key)
  if not size then return 0 end
  local is_there = redis.call('DEL', p .. 'record:' .. key)
  redis.call('HDEL', p .. 'sizes', key)
  redis.call('ZREM', p .. 'oldest', key)
  redis.call('ZREM', p .. 'owner:' .. owner, name)
  redis.call('DECRBY', p .. 'bytes', size)
  if tonumber(redis.call('ZINCRBY', p .. 'owners', -size, owner)) <= 0 then redis.call('ZREM', p .. 'owners', owner) end
  return is_there
end
"""
"""Record ``owner\\nname`` is a key of its own, which expires; ``oldest`` and ``owner:*`` order them by time, ``owners``
orders the owners by bytes. No owner has a line end in its name."""

_PUT = """
local owner, name, value = ARGV[2], ARGV[3], ARGV[4]
local most, most_bytes, age_ms = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if #value > most_bytes then return 0 end
drop(owner, name)
local key, now = owner .. '\\n' .. name, redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('SET', p .. 'record:' .. key, value, 'PX', age_ms)
redis.call('HSET', p .. 'sizes', key, #value)
redis.call('ZADD', p .. 'oldest', now_ms, key)
redis.call('ZADD', p .. 'owner:' .. owner, redis.call('INCR', p .. 'records'), name)
redis.call('ZINCRBY', p .. 'owners', #value, owner)
redis.call('INCRBY', p .. 'bytes', #value)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', p .. 'oldest', '-inf', now_ms - age_ms, 'LIMIT', 0, 1000)) do
  local at = string.find(old, '\\n', 1, true)
  drop(string.sub(old, 1, at - 1), string.sub(old, at + 1))
end
while redis.call('ZCARD', p .. 'oldest') > most or tonumber(redis.call('GET', p .. 'bytes')) > most_bytes do
  local is_smaller = false
  for _, largest in ipairs(redis.call('ZREVRANGE', p .. 'owners', 0, 1)) do
    local oldest = redis.call('ZRANGE', p .. 'owner:' .. largest, 0, 0)[1]
    if oldest and (largest ~= owner or oldest ~= name) then
      drop(largest, oldest)
      is_smaller = true
      break
    end
  end
  if not is_smaller then break end
end
return 1
"""

_ASSIGN = """
redis.call('SET', p .. 'id', ARGV[2], 'NX')
local name, value, version = ARGV[3], ARGV[4], redis.call('INCR', p .. 'version')
local was_there = redis.call('HDEL', p .. 'values', name)
redis.call('ZREM', p .. 'names', name)
redis.call('ZREM', p .. 'gone', name)
if value then
  redis.call('HSET', p .. 'values', name, value)
  redis.call('ZADD', p .. 'names', version, name)
else
  redis.call('ZADD', p .. 'gone', version, name)
  if redis.call('ZCARD', p .. 'gone') > redis.call('ZCARD', p .. 'names') + 1024 then
    redis.call('DEL', p .. 'gone')
    redis.call('SET', p .. 'complete_since', version)
  end
end
return was_there
"""

_CHANGES = """
redis.call('SET', p .. 'id', ARGV[2], 'NX')
local id, version = redis.call('GET', p .. 'id'), tonumber(redis.call('GET', p .. 'version') or '0')
local since, is_all = tonumber(ARGV[4]), 0
if ARGV[3] ~= id or since < tonumber(redis.call('GET', p .. 'complete_since') or '0') then since, is_all = 0, 1 end
local names = redis.call('ZRANGEBYSCORE', p .. 'names', '(' .. since, '+inf')
local values = {}
for first = 1, #names, 1000 do
  local part = redis.call('HMGET', p .. 'values', unpack(names, first, math.min(first + 999, #names)))
  for _, value in ipairs(part) do values[#values + 1] = value end
end
return {id, version, is_all, names, values, redis.call('ZRANGEBYSCORE', p .. 'gone', '(' .. since, '+inf')}
"""
