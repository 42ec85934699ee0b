"""What hatrack is built from: the hashes of requirements.lock, the look-up of known weaknesses, the bill of materials."""

import json
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from dev import audit, lock

ROOT = Path(__file__).parent.parent
SHA = "0123456789abcdef" * 4


# The hashes


def test_the_lock_is_what_the_constraints_ask_for():
    versions = lock.pinned((ROOT / "constraints.txt").read_text())
    assert len(versions) > 60
    assert list(lock.differences((ROOT / "requirements.lock").read_text(), versions)) == []


def test_packages_that_differ_are_named():
    locked = (
        f"a==1.0 \\\n    --hash=sha256:{SHA}\nb==2 \\\n    --hash=sha256:{SHA}\nc==3\ntorch==9 \\\n    --hash=sha256:{SHA}\n"
    )
    found = list(lock.differences(locked, {"a": "1.0", "b": "2.1", "c": "3", "d": "4", "torch": "9"}))
    assert [line.split(":")[0] for line in found] == ["b", "c", "d", "torch"]
    assert "has 2, constraints.txt 2.1" in found[0]
    assert "no sha256" in found[1]


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a_b-1.2-py3-none-any.whl", True),
        ("a_b-1.2.0-py2.py3-none-any.whl", True),
        ("a_b-1.2-cp311-cp311-win_amd64.whl", True),
        ("a_b-1.2-cp314-cp314-macosx_11_0_arm64.whl", True),
        ("a_b-1.2-cp38-abi3-manylinux_2_17_x86_64.whl", True),
        ("a_b-1.2-cp310-cp310-win_amd64.whl", False),
        ("a_b-1.2-pp311-pypy311_pp73-win_amd64.whl", False),
        ("a_b-1.3-py3-none-any.whl", False),
        ("a-b-1.2.tar.gz", True),
        ("a-b-1.2.post1.tar.gz", False),
        ("a-b-1.2.src.zip", False),
        ("a-b-1.2.win32-py2.7.exe", False),
    ],
)
def test_files_of_a_version(name, fits):
    assert lock.fits(name, "1.2") is fits


def test_a_page_of_the_index():
    other = "f" * 64
    page = f"""<a href="https://x/y/a-1.tar.gz#sha256={SHA}">a-1.tar.gz</a>
        <a href="https://x/y/a-1%2Bcpu-py3-none-any.whl#sha256={other}" data-requires-python="&gt;=3.9">wheel</a>
        <a href="https://x/y/a-2.tar.gz#sha256={other}" data-yanked="broken">a-2.tar.gz</a>
        <a href="https://x/y/a-3.tar.gz">without a hash</a>"""
    files = lock.published(page)
    assert files == [("a-1.tar.gz", SHA), ("a-1+cpu-py3-none-any.whl", other)]
    assert lock.entry("a", "1", files) == f"a==1 \\\n    --hash=sha256:{SHA}"
    with pytest.raises(ValueError, match="a==2"):
        lock.entry("a", "2", files)


# The ranges


def test_every_range_ends_at_the_next_version_after_the_one_that_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = lock.pinned((ROOT / "constraints.txt").read_text())
    for one in map(Requirement, project["dependencies"]):
        tried = Version(versions[lock.canonicalize_name(one.name)])
        ends = [Version(part.version) for part in one.specifier if part.operator == "<"]
        following = (Version(f"{tried.major + 1}"), Version(f"{tried.major}.{tried.minor + 1}"))
        assert tried in one.specifier, one
        assert len(ends) == 1, one
        assert ends[0] in following, one


# Known weaknesses


class Service:
    """Answers queries as OSV does.

    Args:
        weak: the packages that have a weakness, with its name.
        broken: the packages for which it answers with an error.
        knows: whether it knows the weakness by which the real service is recognised.
    """

    def __init__(self, weak: dict[str, str], broken: tuple[str, ...] = (), *, knows: bool = True) -> None:
        self.asked: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = query["package"]["name"]
                service.asked.append(name)
                known = [_weakness(weak[name], name)] if name in weak else []
                known += [_weakness("PYSEC-OLD", name)] if knows and query == audit.KNOWN else []
                self.send_response(500 if name in broken else 200)
                self.end_headers()
                self.wfile.write(json.dumps({"vulns": known} if known else {}).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> "Service":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/query"


def _weakness(name: str, package: str) -> dict[str, object]:
    events = [{"introduced": "0"}, {"fixed": "999"}]
    affected = {
        "package": {"name": package, "ecosystem": "PyPI"},
        "ranges": [{"type": "ECOSYSTEM", "events": events}],
    }
    return {"id": name, "published": "2026-01-01T00:00:00Z", "summary": "weak", "details": "weak", "affected": [affected]}


def test_without_the_service_it_is_skipped():
    with Service({}, knows=False) as service:
        assert audit.audit(service.address) == (0, audit.SKIPPED), "it does not know what the real one knows"
    assert audit.audit(service.address) == (0, audit.SKIPPED), "nobody listens there now"
    with Service({}, broken=("jinja2",)) as broken:
        assert audit.audit(broken.address) == (0, audit.SKIPPED)


def test_a_failure_of_pip_audit_is_no_reason_to_skip(monkeypatch):
    def fails(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 3, "", "no such option")

    monkeypatch.setattr(audit.subprocess, "run", fails)
    with Service({}) as service:
        assert audit.audit(service.address) == (1, "no such option")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weak", "broken", "code", "said"),
    [
        ({}, (), 0, "no weakness is known of"),
        ({"click": "PYSEC-2026-1"}, (), 1, "PYSEC-2026-1, fixed in ['999']"),
        ({}, ("click",), 1, "500"),
    ],
)
def test_pip_audit_asks_about_everything_that_is_installed(weak, broken, code, said):
    with Service(weak, broken) as service:
        found, text = audit.audit(service.address)
    assert {"jinja2", "click"} <= set(service.asked)
    assert broken or {"torch", "numpy", "pytest"} <= set(service.asked)
    assert found == code
    assert said in text
    assert "PYSEC-OLD" not in text, "that is about another version"


# The bill of materials


@pytest.mark.slow
def test_the_bill_of_materials_lists_what_is_installed(tmp_path):
    """cyclonedx-py checks what it writes by the schema of CycloneDX."""
    file = tmp_path / "sbom.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml", "--of", "JSON"]
    subprocess.run([*command, "-o", str(file), sys.executable], cwd=ROOT, check=True, capture_output=True)
    bill = json.loads(file.read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "hatrack")
    parts = {part["name"].lower(): part for part in bill["components"]}
    assert {"torch", "numpy", "click", "pytest"} <= parts.keys()
    assert all(
        part["version"] and part["purl"].startswith("pkg:pypi/") for part in parts.values() if part["name"] != "hatrack"
    )
