"""Figures of the server in the text format of Prometheus: GET /metrics."""

from collections.abc import Mapping

from edgespec.server.models import Models
from edgespec.server.service import Service

Values = Mapping[str, float]  # by labels


def metrics(models: Models) -> str:
    answered: dict[str, float] = {
        f'path="{path}",status="{status}"': count for (path, status), count in models.answered.items()
    }
    found: dict[tuple[str, str], dict[str, float]] = {("requests_total", "counter"): answered}
    for name, service in models.services.items():
        label = f'model="{name}"' if models.all[1:] else ""
        for kind, values in _of_service(service).items():
            labelled = {",".join(filter(None, (label, labels))): value for labels, value in values.items()}
            found.setdefault(kind, {}).update(labelled)
    if models.all[1:]:
        found["memory_bytes", "gauge"] = {f'model="{one.name}"': one.size * bool(one.service) for one in models.all}
    return "\n".join(line for (name, kind), values in found.items() for line in _lines(name, kind, values)) + "\n"


def _of_service(service: Service) -> dict[tuple[str, str], Values]:
    scheduler, counts = service.model.scheduler, service.model.scheduler.counts
    fresh = counts.prompt_tokens - counts.cached_tokens
    counters: dict[str, Values] = {
        "prompt_tokens": {'cached="false"': fresh, 'cached="true"': counts.cached_tokens},
        "tokens": {f'source="{source}"': count for source, count in counts.tokens.items()},
        "passes": {"": counts.passes},
        "pass_seconds": {"": counts.pass_seconds},
        "wait_seconds": {"": service.model.target.wait_seconds},
        "works": {"": counts.works},
        "draft_nodes": {"": counts.nodes},
        "texts": {f'ended="{how}"': count for how, count in counts.requests.copy().items()},  # other threads add
    }
    gauges = {"active": scheduler.active, "waiting": scheduler.waiting, "kept_tokens": scheduler.kept_tokens}
    found = {(f"{name}_total", "counter"): values for name, values in counters.items()}
    return found | {(name, "gauge"): {"": value} for name, value in gauges.items()}


def _lines(name: str, kind: str, values: Mapping[str, float]) -> list[str]:
    full = f"edgespec_{name}"
    found = [f"{full}{{{labels}}} {value}" if labels else f"{full} {value}" for labels, value in sorted(values.items())]
    return [f"# TYPE {full} {kind}", *found]
