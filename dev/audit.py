"""Looks up what is installed in a database of known weaknesses, with pip-audit; says so and passes if it can't be reached.

    python -m dev.audit

The exit code is 1 if a weakness is known or if pip-audit fails, and 0 if there is none, or if the service has no answer to a
query that must have one. The service is OSV. PyPI's own is not used: a mirror of the index may lack its advisories, and then
pip-audit passes over every package and finds nothing.
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from typing import Any

SERVICE = "https://api.osv.dev/v1/query"
KNOWN = {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.4.1"}  # has weaknesses that were published
SKIPPED = "skipped: no access to the advisory service"


def is_reachable(service: str, seconds: float = 15.0) -> bool:
    """Return whether the service answers a query in its own form: a proxy's page of errors is no answer."""
    query = urllib.request.Request(service, json.dumps(KNOWN).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(query, timeout=seconds) as answer:
            return bool(json.load(answer).get("vulns"))
    except (OSError, ValueError, AttributeError):  # no name, no route, refused, an error of HTTP; no JSON; no table
        return False


def audit(service: str) -> tuple[int, str]:
    """Return the exit code, and what there is to say."""
    if not is_reachable(service):
        return 0, SKIPPED
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner", "off", "-f", "json"]
    done = subprocess.run([*command, "-s", "osv", "--osv-url", service], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        return 1, done.stderr.strip()
    wrong = [line for package in packages for line in _weaknesses(package)]
    return int(bool(wrong)), "\n".join(wrong) or f"no weakness is known of {len(packages)} packages"


def _weaknesses(package: dict[str, Any]) -> list[str]:
    """Return a line for every weakness of a package, or for why it could not be looked up; hatrack itself is not."""
    if "skip_reason" in package:
        return [] if package["name"] == "hatrack" else [f"{package['name']}: {package['skip_reason']}"]
    known = package["vulns"]
    return [f"{package['name']} {package['version']}: {one['id']}, fixed in {one['fix_versions']}" for one in known]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--service", default=SERVICE, help="the address of another service that speaks as OSV does")
    code, text = audit(parser.parse_args().service)
    print(f"pip-audit: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
