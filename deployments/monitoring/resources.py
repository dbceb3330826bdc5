"""What the service runs on: cache, memory, restarts, links, and time that no device computes."""

from __future__ import annotations

from deployments.metrics import families as f
from deployments.monitoring.charts import WHOSE, WORKER, Board, Chart, chosen, mean, named, rare, rate, ratio, total

NODES = "ray_node_mem_used", "ray_node_mem_total", "ray_node_gram_used", "ray_node_gpus_utilization"
"""Series of Ray's own that the dashboard shows; they come from its exporters alone."""


BOARD = Board(
    "resources",
    "specdec: resources",
    "What the service runs on: cache, memory, restarts, links, and time that no device computes.",
    {
        "Cache": (
            Chart(
                "Cache blocks in use",
                "Share of the cache blocks of each worker that sequences hold.",
                "percentunit",
                {WHOSE: total(named("kv_cache_usage_perc"), WORKER)},
            ),
            Chart(
                "Cache blocks",
                "Blocks that sequences hold, and blocks kept for prompts that begin alike.",
                "none",
                {
                    "{{deployment}} in use": total(named("kv_blocks_in_use"), "deployment"),
                    "{{deployment}} reusable": total(named("kv_blocks_reusable"), "deployment"),
                },
            ),
            Chart(
                "State slots",
                "Recurrent states that there is room for, that sequences hold, and that are kept for prompts.",
                "none",
                {
                    "{{deployment}} room": total(named("state_slots"), "deployment"),
                    "{{deployment}} in use": total(named("state_slots_in_use"), "deployment"),
                    "{{deployment}} reusable": total(named("state_slots_reusable"), "deployment"),
                },
            ),
            Chart(
                "Prefix hits",
                "Share of prompt tokens that were found in the cache.",
                "percentunit",
                {"found": ratio(f.PREFIX_HITS, f.PREFIX_QUERIES)},
            ),
            Chart(
                "Evictions",
                "Sequences or branches that lost their cache to another.",
                "ops",
                {"{{deployment}}": rate(named("evictions"), "deployment")},
            ),
            Chart(
                "Sequences of each worker",
                "Sequences that each worker holds.",
                "none",
                {WHOSE: total(named("worker_sequences"), WORKER)},
            ),
        ),
        "Memory": (
            Chart(
                "Memory of nodes",
                "Share of each node's memory in use; Ray's exporters tell it, /metrics does not.",
                "percentunit",
                {
                    "{{instance}}": 'ray_node_mem_used{namespace=~"$namespace"} /'
                    ' ray_node_mem_total{namespace=~"$namespace"}'
                },
            ),
            Chart(
                "Memory of GPUs",
                "Memory of each GPU in use; Ray's exporters tell it where there are GPUs.",
                "mbytes",
                {"{{instance}} {{GpuIndex}}": 'ray_node_gram_used{namespace=~"$namespace"}'},
            ),
            Chart(
                "GPUs at work",
                "Utilisation of each GPU; Ray's exporters tell it where there are GPUs.",
                "percent",
                {"{{instance}} {{GpuIndex}}": 'ray_node_gpus_utilization{namespace=~"$namespace"}'},
            ),
        ),
        "Restarts and faults": (
            Chart(
                "Replicas",
                "Replicas that are there, by deployment; a step down and up is a restart.",
                "none",
                {"{{deployment}}": f"count by (deployment) ({chosen(named('is_draining'))})"},
            ),
            Chart(
                "Workers that died",
                "Workers lost within the last quarter of an hour, by kind, as the router that saw most of them counts.",
                "none",
                {"{{kind}}": f"max by (kind) (increase({chosen(named('worker_deaths'))}[15m])) or on() vector(0)"},
            ),
            Chart(
                "Contained faults",
                "Steps and sequences that failed and left the service up.",
                "ops",
                {
                    "steps": rate(named("failed_steps")),
                    "sequences of targets": rate(named("worker_errors")),
                    "sequences of drafters": rate(named("skipped_sequences")),
                    "put apart": rate(named("suspects")),
                },
            ),
        ),
        "Scaling": (
            Chart(
                "Exposed draft time",
                "Share of their time that targets would have saved had every planned draft been there.",
                "percentunit",
                {"exposed": f"max ({chosen(named('exposed_draft_share'))})"},
            ),
            Chart(
                "Wanted in vain",
                "Sequences that wait for a target's room, and sequences that would have a drafter if one were there.",
                "none",
                {
                    "wait for room": total(named("target_sequences_waiting")),
                    "without a drafter": total(named("sequences_without_drafter")),
                },
            ),
            Chart(
                "Event loops",
                "Time by which each router's and ingress' event loop was late.",
                "s",
                {WHOSE: mean(named("loop_lag_seconds"), WORKER, 'deployment=~"SpeculationRouter|OpenAIIngress"')},
            ),
            Chart(
                "Reuse by placement",
                "Tokens that some target was known to have cached, and those that the chosen one had.",
                "ops",
                {
                    "some target had": rate(named("placement_reusable_tokens")),
                    "the chosen one had": rate(named("placement_reused_tokens")),
                },
            ),
        ),
        "Links": (
            Chart(
                "Links of each router",
                "Workers that each router is linked to, by kind.",
                "none",
                {"{{replica}} {{kind}}": total(named("router_workers"), "replica, kind")},
            ),
            Chart(
                "Opened again",
                "Sequences that routers opened again, took from a worker that drains, or dropped a message of.",
                "ops",
                {
                    "opened again": rate(named("reopened")),
                    "handed over": rate(named("handed_over")),
                    "messages of what is over": rate(named("dropped_messages")),
                },
            ),
            Chart(
                "Asked for again",
                "Times that a worker asked for a sequence again, by the reason.",
                "ops",
                {"{{reason}}": rare(named("resyncs"), "reason")},
            ),
        ),
        "Steps": (
            Chart(
                "Steps",
                "Steps of each worker.",
                "ops",
                {WHOSE: rate(named("steps"), WORKER)},
            ),
            Chart(
                "Host time between steps",
                "Mean time between two steps of the same sequences, in which the device waits for its host.",
                "s",
                {WHOSE: ratio(named("step_gap_seconds"), named("step_gaps"), WORKER)},
            ),
            Chart(
                "Draining",
                "Replicas that take nothing new any more.",
                "none",
                {"{{deployment}}": total(named("is_draining"), "deployment")},
            ),
        ),
    },
)
