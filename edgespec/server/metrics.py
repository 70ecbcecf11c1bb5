from collections.abc import Mapping

from edgespec.server.service import Service


def metrics(service: Service) -> str:
    scheduler, counts = service.model.scheduler, service.model.scheduler.counts
    fresh = counts.prompt_tokens - counts.cached_tokens
    lines = [
        *_lines("prompt_tokens_total", "counter", {'cached="false"': fresh, 'cached="true"': counts.cached_tokens}),
        *_lines("tokens_total", "counter", {f'source="{source}"': count for source, count in counts.tokens.items()}),
        *_lines("passes_total", "counter", {"": counts.passes}),
        *_lines("pass_seconds_total", "counter", {"": counts.pass_seconds}),
        *_lines("wait_seconds_total", "counter", {"": service.model.target.wait_seconds}),
        *_lines("works_total", "counter", {"": counts.works}),
        *_lines("draft_nodes_total", "counter", {"": counts.nodes}),
        *_lines("texts_total", "counter", {f'ended="{how}"': count for how, count in counts.requests.items()}),
        *_lines(
            "requests_total",
            "counter",
            {f'path="{path}",status="{status}"': count for (path, status), count in service.answered.items()},
        ),
        *_lines("active", "gauge", {"": scheduler.active}),
        *_lines("waiting", "gauge", {"": scheduler.waiting}),
        *_lines("kept_tokens", "gauge", {"": scheduler.kept_tokens}),
    ]
    return "\n".join(lines) + "\n"


def _lines(name: str, kind: str, values: Mapping[str, float]) -> list[str]:
    full = f"edgespec_{name}"
    found = [f"{full}{{{labels}}} {value}" if labels else f"{full} {value}" for labels, value in sorted(values.items())]
    return [f"# TYPE {full} {kind}", *found]
