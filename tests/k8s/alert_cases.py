"""Made-up series on which every alert fires and clears, with the minute for each; one sample a minute."""

from __future__ import annotations

from dataclasses import dataclass, field

WHOSE = {"namespace": "n", "application": "specdec", "model_name": "m"}


@dataclass(frozen=True)
class Case:
    """An alert on made-up series.

    Attributes:
        alert: Its name.
        series: Samples by the series' name and labels of its own, as promtool writes them.
        fires: A minute at which it fires; None where nothing is wrong.
        clears: A later minute, or the one that it stays silent at.
        labels: That it fires with, beside namespace and application.
        is_of_none: Whether it fires without these, as it speaks of no service.
    """

    alert: str
    series: dict[str, str]
    fires: int | None
    clears: int
    labels: dict[str, str] = field(default_factory=dict)
    is_of_none: bool = False


def held(*parts: tuple[float, int]) -> str:
    """A gauge: each value for so many minutes."""
    return " ".join(f"{value}+0x{minutes - 1}" for value, minutes in parts)


def counted(*parts: tuple[float, int]) -> str:
    """A counter from 0: so much a minute, for so many minutes."""
    at, texts = 0.0, ["0"]
    for step, minutes in parts:
        texts.append(f"{at + step}+{step}x{minutes - 1}")
        at += step * minutes
    return " ".join(texts)


def _linked(kind: str, replica: str, *parts: tuple[float, int]) -> dict[str, str]:
    return {f'specdec_router_workers{{replica="{replica}", kind="{kind}"}}': held(*parts)}


def _slow(name: str, bound: str, share: float, minutes: int) -> dict[str, str]:
    """A histogram of which a share is slow, and then nothing is."""
    series = f"specdec_{name}_seconds"
    return {
        f'{series}_bucket{{le="{bound}"}}': counted((100 * (1 - share), minutes), (100, 800)),
        f"{series}_count{{}}": counted((100, minutes + 800)),
    }


def _least(targets: int, drafters: int) -> dict[str, str]:
    counts = {"target": targets, "drafter": drafters}
    return {f'specdec_min_workers{{kind="{kind}"}}': held((count, 120)) for kind, count in counts.items()}


_TARGETS = {"kind": "target"}
_WANTED = {"specdec_sequences_without_drafter{}": held((0, 10), (2, 20), (0, 10))}
_GONE = ((1, 5), (0, 10), (1, 10))
_MODEL = {"model_name": "m"}
_TTFT, _ITL = ("time_to_first_token", "2.5"), ("inter_token_latency", "0.2")
_DRAFTED = {
    "specdec_spec_decode_num_draft_tokens_total{}": counted((600, 400)),
    "specdec_spec_decode_num_accepted_tokens_total{}": counted((480, 300), (120, 40), (480, 60)),
}
_FEW = {
    "specdec_spec_decode_num_draft_tokens_total{}": counted((30, 400)),
    "specdec_spec_decode_num_accepted_tokens_total{}": counted((24, 300), (6, 100)),
}
_GAIN = {'specdec_measured_gain{target="t"}': held((1.0, 60), (1.5, 60))}
_QUEUED = {
    'specdec_request_queue_time_seconds_bucket{le="5.0"}': counted((0, 20), (60, 30)),
    'specdec_request_queue_time_seconds_bucket{le="7.5"}': counted((60, 50)),
    'specdec_request_queue_time_seconds_bucket{le="+Inf"}': counted((60, 50)),
    "specdec_request_queue_time_seconds_count{}": counted((60, 50)),
}
_STUCK = {
    "specdec_num_requests_waiting{}": held((3, 20), (0, 20)),
    "specdec_request_queue_time_seconds_count{}": counted((0, 18), (60, 30)),
}


def _two(deployment: str, application: str = "specdec") -> dict[str, str]:
    labels = f'deployment="{deployment}", application="{application}"'
    return {f'specdec_worker_sequences{{{labels}, replica="{name}"}}': held((0, 40)) for name in "ab"}


_LOST_OFFERS = {
    'specdec_offers_total{deployment="DraftServer", application="specdec-draft"}': counted((60, 40)),
    'specdec_offers_total{deployment="TargetServer"}': counted((0, 20), (60, 20)),
}

_ANSWERS = {
    'specdec_http_requests_total{status="200"}': counted((60, 50)),
    'specdec_http_requests_total{status="503"}': counted((6, 20), (0, 30)),
}

_REFUSALS = {
    'specdec_http_requests_total{status="200"}': counted((60, 50)),
    'specdec_http_requests_total{status="429"}': counted((6, 20), (0, 30)),
}

CASES = (
    Case("SpecdecMetricsMissing", {"specdec_router_workers{}": "1+0x4 _x20 1+0x15"}, 20, 35, is_of_none=True),
    # One of two services is gone; the other's series go on.
    Case(
        "SpecdecServiceMissing",
        {
            'specdec_router_workers{replica="r"}': "1+0x4 _x20 1+0x15",
            'specdec_router_workers{application="other", replica="o"}': held((1, 40)),
        },
        20,
        35,
    ),
    # An upgrade: another Ray cluster of the same service takes over.
    Case(
        "SpecdecServiceMissing",
        {
            'specdec_router_workers{ray_io_cluster="a"}': "1+0x9 _x30",
            'specdec_router_workers{ray_io_cluster="b"}': "_x8 1+0x31",
        },
        None,
        30,
    ),
    Case(
        "SpecdecWorkersMissing", _linked("target", "r", (2, 20), (1, 30), (2, 20)) | _least(2, 0), *(40, 60), _TARGETS
    ),
    # Some have gone, and there are as many as there are to be in any case.
    Case("SpecdecWorkersMissing", _linked("target", "r", (3, 20), (2, 90)) | _least(2, 0), None, 90),
    Case("SpecdecServerErrors", _ANSWERS, 15, 40),
    Case("SpecdecRequestsRefused", _REFUSALS, 15, 40),
    Case(
        "SpecdecGpuMemoryFull",
        {
            'ray_node_gram_used{instance="i", GpuIndex="0"}': held((900, 5), (990, 20), (900, 20)),
            'ray_node_gram_available{instance="i", GpuIndex="0"}': held((100, 5), (10, 20), (100, 20)),
            'ray_node_gram_used{instance="i", GpuIndex="1"}': held((500, 45)),
            'ray_node_gram_available{instance="i", GpuIndex="1"}': held((500, 45)),
        },
        *(20, 35),
        {"namespace": "n", "instance": "i", "GpuIndex": "0"},
        is_of_none=True,
    ),
    Case(
        "SpecdecRayServiceNotReady",
        {
            'kuberay_service_condition_ready{name="specdec", condition="true"}': "1+0x9 _x20 1+0x10",
            'kuberay_service_condition_ready{name="specdec", condition="false"}': "_x10 1+0x19 _x10",
        },
        *(20, 35),
        {"namespace": "n", "name": "specdec"},
        is_of_none=True,
    ),
    Case("SpecdecUpdateFailed", {"ray_serve_application_status{}": held((6, 5), (1, 10), (6, 10))}, 10, 20),
    Case("SpecdecUpdateLate", {"specdec_update_late{}": held((0, 5), (1, 10), (0, 10))}, 10, 20),
    Case("SpecdecTargetDown", _linked("target", "r", *_GONE), 10, 20),
    Case("SpecdecTargetDown", _linked("target", "r", *_GONE) | _linked("target", "s", (1, 25)), None, 10),
    Case("SpecdecDraftDown", _linked("drafter", "r", *_GONE) | _least(1, 1), 10, 20),
    # A pool that may be empty: while nobody wants a draft, and while somebody does.
    Case("SpecdecDraftDown", _linked("drafter", "r", *_GONE) | _least(1, 0), None, 10),
    Case("SpecdecDraftDown", _linked("drafter", "r", (0, 40)) | _least(1, 0) | _WANTED, 15, 35),
    # A service without a draft.
    Case("SpecdecDraftDown", _linked("target", "r", (1, 25)), None, 20),
    Case("SpecdecAcceptanceCollapse", _DRAFTED, 330, 360, _MODEL),
    # Probes alone draft.
    Case("SpecdecAcceptanceCollapse", _FEW, None, 330),
    Case("SpecdecSpeculationNotPaying", _GAIN | {'specdec_planned_sequences{mode="off"}': held((4, 120))}, 50, 115),
    # Nobody asks for anything.
    Case("SpecdecSpeculationNotPaying", _GAIN | {'specdec_planned_sequences{mode="off"}': held((0, 120))}, None, 50),
    Case("SpecdecSpeculationNotPaying", {"specdec_controller_failed{}": held((1, 30), (0, 10))}, 20, 35),
    Case(
        "SpecdecKvCacheNearlyFull",
        {'specdec_kv_cache_usage_perc{deployment="TargetServer", replica="t"}': held((0.97, 20), (0.5, 20))},
        *(15, 30),
        {"deployment": "TargetServer", "replica": "t"},
    ),
    Case("SpecdecWaitingTooLong", _QUEUED, 15, 40),
    Case("SpecdecWaitingTooLong", _STUCK, 15, 30),
    Case("SpecdecTtftBurnFast", _slow(*_TTFT, 0.2, 30), 20, 50, _MODEL),
    Case("SpecdecTtftBurnSlow", _slow(*_TTFT, 0.1, 200), 60, 300, _MODEL),
    Case("SpecdecTtftBurnSlow", _slow(*_TTFT, 0.05, 200), None, 60),
    Case("SpecdecItlBurnFast", _slow(*_ITL, 0.2, 30), 20, 50, _MODEL),
    Case("SpecdecItlBurnSlow", _slow(*_ITL, 0.1, 200), 60, 300, _MODEL),
    Case(
        "SpecdecCrashLoop",
        {f'specdec_worker_deaths_total{{kind="target", replica="{name}"}}': counted((1, 8), (0, 40)) for name in "rs"},
        *(8, 40),
        {"kind": "target"},
    ),
    # One death that two routers saw, and one more.
    Case(
        "SpecdecCrashLoop",
        {f'specdec_worker_deaths_total{{kind="target", replica="{name}"}}': counted((1, 2), (0, 40)) for name in "rs"},
        *(None, 8),
    ),
    *(
        Case(
            "SpecdecStepsFail",
            {f'specdec_{name}_total{{replica="{replica}"}}': counted((1, 6), (0, 40)) for replica in "ab"},
            *(8, 40),
        )
        for name in ("failed_steps", "worker_errors", "skipped_sequences", "suspects")
    ),
    Case("SpecdecRouterLinkDown", _two("TargetServer") | _linked("target", "r", (1, 20), (2, 20)), 10, 30),
    Case(
        "SpecdecRouterLinkDown",
        _two("DraftServer", "specdec-draft") | _linked("drafter", "r", (1, 20), (2, 20)),
        10,
        30,
    ),
    Case("SpecdecRouterLinkDown", _LOST_OFFERS, 15, 35),
)
