"""The environment: the one place in this package where it is read or set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType

from cluster.config.names import MIDDLEWARES
from specdec.core.errors import InvalidParameterError

PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
RAY_SETTINGS = {
    # Calls and stream items over Serve's gRPC transport cost less than those over actor calls.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # A replica's own loop carries its messages: no hand-over from thread to thread, each of which waits for a core.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Beyond 4 MiB, its default, an answer is lost, and so is a link: log probabilities of long prompts are larger.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # Serve replaces its HTTP proxy when three checks in a row fail. By default they are 10 s apart: so long after a
    # crash of the only proxy every connection would be refused.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.2",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    # What fails its health checks is killed at once. By default it has the time of a drain to stop by itself, which a
    # process that hangs does not use: it would keep its GPU from the replica in its place.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Time to the first token counts from when the proxy had the request: it waits there while no ingress runs.
    PROXY_VARIABLE: MIDDLEWARES,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without this Ray hides the GPUs of actors that ask for none in one way today and in another tomorrow, and warns.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # On a machine whose cores are all taken Ray's own processes need longer to come up than the 30 s it gives them.
    "RAY_raylet_start_wait_time_s": "120",
    # Ray's workers run at the lowest priority but four; here they are what the machine is for.
    "RAY_worker_niceness": "0",
    # Under this name traces are found.
    "OTEL_SERVICE_NAME": "specdec",
}

DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""How long ``ray start --block`` lets its node drain after SIGTERM, in seconds; Ray's default is 30."""

_NEEDED = (
    "RAY_SERVE_USE_GRPC_BY_DEFAULT",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)
"""Of :data:`RAY_SETTINGS` those without which answers are lost, links stall, or GPUs are seen that are others'."""


def check_node() -> None:
    """Refuse to start a replica on a node that was started without the settings that it needs.

    Raises:
        InvalidParameterError: A variable is not in force there; the message names it, and what it must be.
    """
    for name in _NEEDED:
        needed, value = RAY_SETTINGS[name], os.environ.get(name)
        is_enough = name.endswith("_LENGTH") and value is not None and value.isdecimal() and int(value) >= int(needed)
        if value != needed and not is_enough:
            has = "is not set" if value is None else f"is {value}"
            raise InvalidParameterError(
                name,
                f"{name} {has} on this node, and must be {needed}: start Ray on every node with the variables "
                "that specdec render --environment prints",
            )


VLLM_SETTINGS = {
    # Its runner V2 takes neither our proposer nor our drafts.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # The engine runs in our process, and with one worker the model does too.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Which cores a replica has is Ray's matter.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What a process has in its environment before vLLM is imported."""


def prepare_for_vllm(num_threads: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what vLLM reads when it is imported and when it loads a model, for this process and its workers.

    Args:
        num_threads: Threads of each worker on a CPU, where vLLM ignores ``torch.set_num_threads``.
        environment: Where to set it.
    """
    environment.update(VLLM_SETTINGS, OMP_NUM_THREADS=str(num_threads))


def hide_gpus() -> None:
    """Let this process and those it starts see no GPU; to be called before CUDA is used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


KEY_PREFIX = "SPECDEC__"
"""Variables that begin so are keys of the configuration: ``SPECDEC__TARGET__DTYPE`` is ``target.dtype``.

Kubernetes sets ``SPECDEC_PORT`` and the like for a service of that name, so one underscore would not do.
"""


def keys_from_environment() -> dict[str, str]:
    """Configuration keys that the environment sets: their dotted paths, and their values as text."""
    return {
        name.removeprefix(KEY_PREFIX).lower().replace("__", "."): value
        for name, value in os.environ.items()
        if name.startswith(KEY_PREFIX)
    }


API_KEYS_VARIABLE = "SPECDEC_API_KEYS"
_LEAST_KEY_CHARACTERS = 16


def set_for_command(
    api_keys: str, download_dir: str | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set what flags say that are no keys of the configuration, for this process and all it starts.

    To be called before ``huggingface_hub`` is imported.

    Args:
        api_keys: Further entries of :data:`API_KEYS_VARIABLE`, with commas between them; may be empty.
        download_dir: Where models of the hub are kept.
        environment: Where to set it.
    """
    if api_keys:
        environment[API_KEYS_VARIABLE] = ",".join(filter(None, (environment.get(API_KEYS_VARIABLE), api_keys)))
    if download_dir is not None:
        environment["HF_HUB_CACHE"] = download_dir


def client_key(environment: Mapping[str, str] = os.environ) -> str:
    """Return the API key for calls to a service, from ``OPENAI_API_KEY``; empty if it is not set."""
    return environment.get("OPENAI_API_KEY", "")


def api_keys(file: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """API keys by their names: those of a file, ``name: key`` a line, and ``name=key,name=key`` of the environment.

    They are read where they are needed, by each replica that checks them, and are in nobody's configuration.

    Args:
        file: One to a line; None for no file.
        environment: Where :data:`API_KEYS_VARIABLE` may be.

    Raises:
        InvalidParameterError: The file cannot be read, or has no key in it, or what is there are no keys with names; no
            key is shown.
    """
    keys: dict[str, str] = {}
    for where, entry in _key_entries(file, environment):
        name, key = (part.strip() for part in [*re.split("[:=]", entry, maxsplit=1), ""][:2])
        if not name or len(key) < _LEAST_KEY_CHARACTERS or not key.isascii() or " " in key:
            raise InvalidParameterError(
                "access.api_keys_file",
                f"{where}: must be a name and a key of at least {_LEAST_KEY_CHARACTERS} characters, without spaces",
            )
        if name in keys or key in keys.values():
            raise InvalidParameterError("access.api_keys_file", f"{where}: the name or the key was there before")
        keys[name] = key
    return keys


def _key_entries(file: str | None, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if file is not None:
        try:
            lines = Path(file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameterError("access.api_keys_file", f"access.api_keys_file: {file}: {error}") from None
        entries = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
        if not entries:  # a secret that has not come yet, say: without keys everybody might call
            raise InvalidParameterError("access.api_keys_file", f"access.api_keys_file: {file} has no key in it")
        for number, line in entries:
            yield f"{file}, line {number}", line
    for number, entry in enumerate(filter(str.strip, environment.get(API_KEYS_VARIABLE, "").split(",")), 1):
        yield f"{API_KEYS_VARIABLE}, entry {number}", entry


def check_ray(allow_unauthenticated: bool) -> None:
    """Refuse a Ray whose ports take calls, which are code, from everybody who reaches them.

    Raises:
        InvalidParameterError: Its token authentication is off, and nobody said that it may be.
    """
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if not allow_unauthenticated and not is_token_auth_enabled():
        raise InvalidParameterError(
            "access.allow_unauthenticated_ray",
            "this Ray cluster has no token authentication: start it with RAY_AUTH_MODE=token (KubeRay: authOptions), "
            "or set access.allow_unauthenticated_ray where nobody else reaches its ports",
        )


def prepare_for_ray(
    environment: MutableMapping[str, str] = os.environ, further: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Set what Ray and Serve read when they are imported, for this process and all it starts.

    What the user has set stays, but for what the configuration says. To be called before ``ray`` is imported.

    Args:
        environment: Where to set it.
        further: What the configuration says.
    """
    environment.update(further)
    for name, value in RAY_SETTINGS.items():
        environment.setdefault(name, value)
