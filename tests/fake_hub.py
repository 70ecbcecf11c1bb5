"""A hub on this machine: repositories in memory, and the ways in which servers and lines fail."""

import hashlib
import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What there is, and how it is served."""

    files: dict[str, bytes] = field(default_factory=dict)  # "owner/repo/file" -> content
    large: Callable[[str], bool] = lambda name: name.endswith((".gguf", ".safetensors"))  # these have a checksum
    checksums: bool = True
    gated: bool = False  # files are listed, but not given
    ranges: bool = True
    wrong: Callable[[bytes], bytes] = lambda content: content  # what is really sent
    cut: Callable[[int], int | None] = lambda length: None  # bytes of an answer after which the line is cut
    statuses: list[int] = field(default_factory=list)  # answers to the next GETs of files
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    sent: int = 0  # bytes of files
    hold: threading.Event | None = None  # GETs of files wait for it
    asked: threading.Event = field(default_factory=threading.Event)  # a GET of a file has come

    def start(self) -> http.server.ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def etag(self, name: str) -> str:
        content = self.files[name]
        if self.large(name) and self.checksums:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(content).hexdigest()

    def repository(self, name: str) -> dict[str, Any] | None:
        names = [file.removeprefix(f"{name}/") for file in self.files if file.startswith(f"{name}/")]
        siblings: list[dict[str, Any]] = []
        for file in sorted(names):
            content = self.files[f"{name}/{file}"]
            one: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": "b"}
            if self.large(file) and self.checksums:
                digest = hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
            siblings.append(one)
        return {"id": name, "sha": COMMIT, "siblings": siblings} if names else None


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a header and its body go out at once

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if "/resolve/" in path or path.startswith("/api/models/"):  # the library asks for more, unasked
            self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            found = self.hub.repository("/".join(parts[2:4]))
            if found is None:
                self.fail(404, "RepoNotFound")
            elif "tree" in parts:
                rows = [
                    {"type": "file", "path": s["rfilename"], "size": s["size"], "oid": "b"} for s in found["siblings"]
                ]
                self.send(json.dumps(rows).encode(), {})
            else:
                self.send(json.dumps(found).encode(), {})
            return
        if self.hub.gated:
            self.fail(401, "GatedRepo")
            return
        name = "/".join([*parts[:2], *parts[4:]])
        content = self.hub.files.get(name) if parts[2:3] == ["resolve"] and parts[3] in ("main", COMMIT) else None
        if content is None:
            repository = self.hub.repository("/".join(parts[:2]))
            self.fail(404, "EntryNotFound" if repository else "RepoNotFound")
            return
        headers = {"ETag": f'"{self.hub.etag(name)}"', "X-Repo-Commit": COMMIT}
        if not body:
            self.send(b"", headers | {"Content-Length": str(len(content))})
            return
        self.hub.asked.set()
        if self.hub.hold:
            self.hub.hold.wait(20)
        if self.hub.statuses:
            self.fail(self.hub.statuses.pop(0), "")
            return
        content, status = self.hub.wrong(content), 200
        if self.hub.ranges and (asked := self.headers.get("Range")):
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self.send(content, headers, status, self.hub.cut(len(content)))

    def fail(self, status: int, code: str) -> None:
        self.send(b"", {"X-Error-Code": code} if code else {}, status)

    def send(self, content: bytes, headers: dict[str, str], status: int = 200, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(content[:cut])
        except OSError:  # the other side has gone
            return
        if status in (200, 206) and "ETag" in headers:
            self.hub.sent += len(content[:cut])
        if cut is not None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
