"""What operator and checkpoint decide: rule, processors, defaults, vocabulary, API keys, TLS, ingresses, a store."""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.integration.running import RunningService, eventually
from tests.specdec.checkpoints import WITH_GAPS, save_checkpoint

NO_A = "tests.cluster.processors:no_a"
BOTH_WORDS = {"1": 100, "5": 100}
END = WITH_GAPS["<end>"]
MOST_ANSWERS = 20
DRAFTS = ("--num-speculative-tokens", "4", "--speculation-mode", "sequential")
"""Drafts whatever the controller would think of them; the target waits for the first ones."""
KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
SERVED = r'^specdec_request_success_total{.*replica="([^"]+)".*} [1-9]'
"""The ingresses that have served a request, on the metrics page."""
RETRIEVED = r'^specdec_http_requests_total{(?=.*path="/v1/responses/{response_id}").*replica="([^"]+)".*} [1-9]'
CERTIFICATE = (
    *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=specdec"),
    *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pair whose vocabulary has gaps, and whose target keeps the most likely token unless told otherwise."""
    target = save_checkpoint(tmp_path_factory.mktemp("target"), temperature=0.0, max_new_tokens=5)
    return {"target": target, "draft": save_checkpoint(tmp_path_factory.mktemp("draft"), seed=1)}


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, and API keys."""
    folder = tmp_path_factory.mktemp("access")
    subprocess.run(CERTIFICATE, cwd=folder, check=True, capture_output=True)
    (folder / "keys").write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    (folder / "template").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    return folder


@pytest.fixture(scope="module")
def service(folders: dict[str, Path], access: Path) -> Iterator[RunningService]:
    flags = [part for role, folder in folders.items() for part in (f"--{role}", str(folder))]
    flags += ["--tls-ssl-certfile", f"{access}/cert.pem", "--tls-ssl-keyfile", f"{access}/key.pem"]
    flags += ["--access-api-keys-file", f"{access}/keys", "--replicas-ingress", "2", "--responses-store-enabled"]
    flags += ["--chat-template", f"{access}/template"]
    running = RunningService(*flags, "--logits-processors", NO_A, *DRAFTS)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def http(service: RunningService, access: Path) -> Iterator[httpx2.Client]:
    """Trusts the service's certificate, and no other."""
    with httpx2.Client(base_url=service.url, verify=ssl.create_default_context(cafile=access / "cert.pem")) as http:
        yield http


@pytest.fixture(scope="module")
def client(service: RunningService, http: httpx2.Client) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key=KEYS["alice"], http_client=http, max_retries=0, timeout=120)


def ask(client: OpenAI, folders: dict[str, Path], **options: object) -> list[int]:
    extra = {"return_token_ids": True, **options}
    body = {"model": str(folders["target"]), "prompt": [1, 5, END, 1], "max_tokens": 30}
    return client.completions.create(**body, extra_body=extra).choices[0].token_ids


def test_the_processor_acts_on_every_token_of_both_models(client: OpenAI, folders: dict[str, Path]) -> None:
    """With the bias only two words are left, and the processor forbids one of them."""
    for num_speculative_tokens in (0, 4):
        options = {"logit_bias": BOTH_WORDS, "num_speculative_tokens": num_speculative_tokens}
        assert ask(client, folders, temperature=2, seed=1, **options) == [5] * 30


def test_the_models_defaults_hold_where_a_request_says_nothing(client: OpenAI, folders: dict[str, Path]) -> None:
    texts = {tuple(ask(client, folders, seed=seed, ignore_eos=True)) for seed in range(4)}
    assert len(texts) == 1
    warm = {tuple(ask(client, folders, seed=seed, ignore_eos=True, temperature=2)) for seed in range(4)}
    assert len(warm) == 4


def test_the_highest_token_id_can_be_chosen_and_ends_the_text(client: OpenAI, folders: dict[str, Path]) -> None:
    assert ask(client, folders, logit_bias={str(END): 100}) == [END]


def test_responses_are_kept_for_both_ingresses_and_for_their_key(
    client: OpenAI, http: httpx2.Client, folders: dict[str, Path]
) -> None:
    options = {"model": str(folders["target"]), "max_output_tokens": 9, "extra_body": {"seed": 4}}
    first = client.responses.create(input="a b", **options)
    for _ in range(MOST_ANSWERS):
        assert client.responses.retrieve(first.id).output_text == first.output_text

    def both_were_asked() -> bool:
        page = http.get("/metrics", headers={"authorization": f"Bearer {KEYS['bob']}"}).text
        return len(set(re.findall(RETRIEVED, page, re.MULTILINE))) == 2

    eventually(both_were_asked, 30, "both ingresses were asked")
    items = [*client.responses.input_items.list(first.id, order="asc"), *first.output]
    whole = [item.to_dict() for item in items]
    told = client.responses.create(input=[*whole, {"role": "user", "content": "a"}], **options)
    later = client.responses.create(input="a", previous_response_id=first.id, **options)
    assert (later.output_text, later.usage.input_tokens) == (told.output_text, told.usage.input_tokens)
    bob = client.with_options(api_key=KEYS["bob"])
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_only_who_has_a_key_is_served_and_over_tls_alone(
    service: RunningService, client: OpenAI, folders: dict[str, Path]
) -> None:
    body = {"model": str(folders["target"]), "prompt": [1, 5], "max_tokens": 4}
    for key in ("wrong", KEYS["alice"][:-1]):
        stranger = client.with_options(api_key=key)
        for asked in (stranger.models.list, lambda client=stranger: client.completions.create(**body, stream=True)):
            with pytest.raises(openai.AuthenticationError) as caught:
                asked()
            assert caught.value.code == "invalid_api_key"
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(service.url.replace("https:", "http:") + "/health", timeout=30)
    with pytest.raises(httpx2.ConnectError, match=r"(?i)certificate"):
        httpx2.get(f"{service.url}/health", timeout=30)


def test_both_ingresses_stream_and_the_log_names_the_key_and_never_tells_it(
    service: RunningService, client: OpenAI, http: httpx2.Client, folders: dict[str, Path]
) -> None:
    body = {"model": str(folders["target"]), "prompt": [1, 5, END, 1], "max_tokens": 30, "temperature": 2, "seed": 4}
    bob = client.with_options(api_key=KEYS["bob"])
    whole = bob.completions.create(**body, extra_body={"ignore_eos": True}).choices[0].text
    for i in range(MOST_ANSWERS):
        told = {"x-request-id": f"mine-{i}"}
        options = {"extra_body": {"ignore_eos": True}, "extra_headers": told, "stream": True}
        chunks = client.completions.create(**body, **options)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole
        served = re.findall(
            SERVED, http.get("/metrics", headers={"authorization": f"Bearer {KEYS['bob']}"}).text, re.MULTILINE
        )
        if len(set(served)) == 2:
            break
    else:
        raise AssertionError("one of the two ingresses has had no request")
    (folder,) = re.findall(r"logs: (\S+)", "".join(service.lines))

    def logged() -> str:
        return "".join(path.read_text(errors="replace") for path in Path(folder).iterdir() if path.is_file())

    eventually(lambda: f"request_id=mine-{i} key=alice" in logged(), 30, "the last request is logged")
    assert "key=bob" in logged()
    assert not [key for key in KEYS.values() if key in logged()]
