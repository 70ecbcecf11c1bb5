"""Figures of the server in the text format of Prometheus: GET /metrics."""

from collections.abc import Mapping

from edgespec.server.service import Service


def metrics(service: Service) -> str:
    scheduler, counts = service.model.scheduler, service.model.scheduler.counts
    fresh = counts.prompt_tokens - counts.cached_tokens
    answered = {f'path="{path}",status="{status}"': count for (path, status), count in service.answered.items()}
    counters: dict[str, Mapping[str, float]] = {
        "prompt_tokens": {'cached="false"': fresh, 'cached="true"': counts.cached_tokens},
        "tokens": {f'source="{source}"': count for source, count in counts.tokens.items()},
        "passes": {"": counts.passes},
        "pass_seconds": {"": counts.pass_seconds},
        "wait_seconds": {"": service.model.target.wait_seconds},
        "works": {"": counts.works},
        "draft_nodes": {"": counts.nodes},
        "texts": {f'ended="{how}"': count for how, count in counts.requests.copy().items()},  # other threads add
        "requests": answered,
    }
    gauges = {"active": scheduler.active, "waiting": scheduler.waiting, "kept_tokens": scheduler.kept_tokens}
    lines = [line for name, values in counters.items() for line in _lines(f"{name}_total", "counter", values)]
    lines += [line for name, value in gauges.items() for line in _lines(name, "gauge", {"": value})]
    return "\n".join(lines) + "\n"


def _lines(name: str, kind: str, values: Mapping[str, float]) -> list[str]:
    full = f"edgespec_{name}"
    found = [f"{full}{{{labels}}} {value}" if labels else f"{full} {value}" for labels, value in sorted(values.items())]
    return [f"# TYPE {full} {kind}", *found]
