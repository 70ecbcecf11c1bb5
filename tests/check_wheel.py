"""What `make check-wheel` asks of an environment that has only the wheel: a prompt, the server, all files."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).parent.parent
STATIC = Path("edgespec", "server", "static")


def check(environment: Path) -> None:
    """Raises CalledProcessError, URLError or AssertionError: what is installed there does not work."""
    from gguf_files import small_llama

    command = str(environment / "bin" / "edgespec")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        model = str(small_llama(Path(folder, "small.gguf"), layers=2))
        for arguments in (["--help"], ["models"], ["run", model, "the 12", "-n", "4"]):
            subprocess.run([command, *arguments], cwd=folder, check=True, capture_output=arguments[0] != "run")
        check_server([command, "serve", model, "--port", "0"], folder)
    (installed,) = environment.glob("lib/python*/site-packages")
    check_files(installed)


def check_server(command: list[str], folder: str) -> None:
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout or ())
            place = next(filter(None, found))[0]
            body = json.dumps({"prompt": "the 12", "max_tokens": 4}).encode()
            request = Request(f"{place}/v1/completions", body, {"Content-Type": "application/json"})
            with urlopen(request) as reply, urlopen(f"{place}/") as page:
                assert json.load(reply)["choices"][0]["text"]
                assert page.read() == (ROOT / STATIC / "index.html").read_bytes()
        finally:
            server.terminate()


def check_files(installed: Path) -> None:
    """Raises AssertionError: files of the page, the catalogue or licences are not those of the sources."""
    (licenses,) = installed.glob("edgespec-*.dist-info/licenses")
    static = [file.relative_to(ROOT) for file in (ROOT / STATIC).rglob("*") if file.is_file()]
    pairs = [(file, installed / file) for file in static]
    pairs += [(Path("models.yaml"), installed / "edgespec" / "models.yaml")]
    pairs += [(file, licenses / file) for file in (Path("LICENSE"), STATIC / "marked" / "LICENSE")]
    for source, copy in pairs:
        assert copy.is_file(), f"{copy} is missing"
        assert copy.read_bytes() == (ROOT / source).read_bytes(), f"{copy} is not that of the sources"


if __name__ == "__main__":
    check(Path(sys.argv[1]).absolute())
    print(f"{sys.argv[1]}: works")
