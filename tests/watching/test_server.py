"""The server of `hatrack watch`: the loopback alone, other Hosts, what it gives away, two readers at once, and load."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from hatrack.__main__ import main
from hatrack.cli.watching import make_server
from hatrack.tracking.reader import FILE
from tests.helpers.killing import here, start, wait_for
from tests.helpers.lines import about, epoch, write
from tests.helpers.records import make, save
from tests.helpers.tiers import cases


@pytest.fixture
def served(tmp_path):
    """A server of an empty folder; and a function that asks it."""
    server = make_server(tmp_path, 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    port = server.server_address[1]

    def ask(path="/", method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    ask.port = port
    yield ask
    server.shutdown()
    server.server_close()


def test_the_page_the_data_and_the_records_are_served(served, tmp_path):
    record = make("sgd", 0)
    save(tmp_path, [record])
    answer, body = served("/")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"HATRACK_LIVE" in body
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Frame-Options"] == "DENY"
    answer, body = served("/data.json?x=1")
    assert set(json.loads(body)) >= {"digest", "running", "running_html"}
    answer, body = served(f"/{record.name}.json")
    assert body == (tmp_path / f"{record.name}.json").read_bytes()
    answer, body = served("/", method="HEAD")
    assert (answer.status, body) == (200, b"")


@pytest.mark.parametrize(
    "path",
    ["/../secret.json", "/%2e%2e/secret.json", "/..%2fsecret.json", "/secret.txt", "//etc/passwd", "/x.part/epochs.jsonl",
     "/other.json", "/none.json", "/./", "/%00", "/" + "a" * 5000],
)  # fmt: skip
def test_nothing_else_is_served(path, served, tmp_path):
    (tmp_path.parent / "secret.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "other.json").write_text('{"no": "record"}')
    write(tmp_path, "x", about())
    served("/")
    answer, body = served(path)
    assert answer.status == 404
    assert b"record" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""]
)
def test_a_request_for_another_host_is_refused(host, served, tmp_path):
    """A site whose name points to this machine must not read anything (DNS rebinding)."""
    save(tmp_path, [make("sgd", 0)])
    for path in ("/", "/data.json"):
        answer, body = served(path, Host=host.format(port=served.port))
        assert answer.status == 403
        assert b"sgd" not in body
    answer, _ = served("/", Host=f"localhost:{served.port}")
    assert answer.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_it_only_reads(method, served):
    answer, _ = served("/", method=method)
    assert answer.status == 501
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_it_listens_on_the_loopback_alone(served):
    """The address of the socket, and a try from another address of this machine."""
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    mine = [address for address in listening if int(address.split(":")[1], 16) == served.port]
    assert mine == [f"0100007F:{served.port:04X}"]
    with open("/proc/net/tcp6") as table:
        assert not [line for line in table if line.split()[1].endswith(f":{served.port:04X}") and line.split()[3] == "0A"]
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with pytest.raises(ConnectionError), socket.create_connection((address, served.port), timeout=2):
            pass


def test_a_port_that_is_taken(served, tmp_path, capsys):
    assert main(["watch", str(tmp_path), "--no-open", "--port", str(served.port)]) == 2
    assert f"--port {served.port}" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err


def poll(ask, until, found):
    """What a browser does: ask for the data again and again, and note the numbers of points and the times."""
    while time.monotonic() < until:
        began = time.perf_counter()
        answer, body = ask("/data.json")
        news = json.loads(body)
        runs = {run["name"]: [tuple(point[:2]) for point in run.get("curve", [])] for run in news["running"]}
        found.append((answer.status, time.perf_counter() - began, runs))
        time.sleep(0.05)


def watch_load(ask, folder, seconds):
    """An epoch line every 10 ms for so long, of two runs, while two readers ask; return what they saw."""
    readers, seen = [], [[], []]
    until = time.monotonic() + seconds
    for found in seen:
        readers.append(threading.Thread(target=poll, args=(ask, until + 1.5, found)))
        readers[-1].start()
    write(folder, "a", about())
    write(folder, "b", about())
    written = 0
    while time.monotonic() < until:
        for name in "ab":
            write(folder, name, epoch(0, written, epochs=10**6))
        written += 1
        time.sleep(0.01)
    for reader in readers:
        reader.join()
    return written, seen


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_an_epoch_every_ten_milliseconds_and_two_browsers(seconds, served, tmp_path):
    written, seen = watch_load(served, tmp_path, seconds)
    assert written > 20 * seconds
    for found in seen:
        assert {status for status, _, _ in found} == {200}
        assert len(found) > 2
        last = found[-1][2]
        for name in "ab":
            assert last[name][-1] == (1, written), "the last epoch has arrived"
            epochs = [number for _, number in last[name]]
            assert epochs == sorted(set(epochs))
            lengths = [runs[name][-1][1] for _, _, runs in found if runs.get(name)]
            assert lengths == sorted(lengths), "the curve only grows"
        times = sorted(seconds for _, seconds, _ in found)
        assert times[len(times) // 2] < 2, "half of the answers come at once, also beside other work"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(cases(1, 5)))
def test_a_run_that_is_killed_and_resumed_while_it_is_watched(seed, served, tmp_path):
    """A real run, a real kill: the curve that a reader sees goes on where it was, without a gap or a double."""
    runs = tmp_path
    found: list[tuple[int, float, dict]] = []
    stop = threading.Event()
    reader = threading.Thread(target=lambda: poll_until(served, stop, found))
    reader.start()
    process = start(runs, "--save-every", "0.002")
    wait_for(runs, "fit")
    time.sleep(1.5)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    time.sleep(1.5)
    (record,) = here(runs, "--save-every", "0.002")
    time.sleep(1.5)
    stop.set()
    reader.join()
    curves = [runs[record.name] for _, _, runs in found if runs.get(record.name)]
    for before, after in pairwise(curves):
        assert after[: len(before)] == before, "nothing that was shown goes away"
    assert curves[-1] == [(1, k + 1) for k in range(12)] + [(2, k + 1) for k in range(len(curves[-1]) - 12)]
    assert not found[-1][2], "it has its record"


def poll_until(ask, stop, found):
    while not stop.is_set():
        poll(ask, time.monotonic() + 0.2, found)


# The command


@pytest.mark.slow
def test_watch_from_the_command_line(tmp_path):
    """It says where, serves, and ends with Ctrl-C and exit code 0."""
    save(tmp_path, [make("sgd", 0)])
    words = [sys.executable, "-m", "hatrack", "watch", str(tmp_path), "--no-open", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = process.stdout.readline()
    port = int(said.split("http://127.0.0.1:")[1].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")
    assert b"sgd" in connection.getresponse().read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.slow
def test_a_run_that_is_watched(tmp_path):
    """`hatrack run --watch`: a browser is opened, the page is served while the run goes on, and stays as a file."""
    opened, runs = tmp_path / "opened", tmp_path / "runs"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    words = [sys.executable, "-m", "hatrack", "run", "smnist", "sgd", "--data", "sample", "--widths", "12", "--epochs", "80"]
    words += ["--batch", "50", "--patience", "1000", "--device", "cpu", "--watch", "--out", str(runs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "BROWSER": f"{browser} %s"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    seen = []
    while process.poll() is None:
        if opened.exists() and (address := opened.read_text().strip()):
            host = address.removeprefix("http://").rstrip("/")
            try:
                connection = http.client.HTTPConnection(host, timeout=30)
                connection.request("GET", "/data.json")
                seen.append(json.loads(connection.getresponse().read()))
            except OSError:
                break
        time.sleep(0.2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert any(news["running"] and news["running"][0].get("curve") for news in seen)
    assert (runs / "report.html").is_file()
    assert f"the page: {runs / 'report.html'}" in out
    assert not list(runs.glob(f"*.part/{FILE}"))
