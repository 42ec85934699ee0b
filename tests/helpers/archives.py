"""Small image sets in the published formats, written without the code that reads them, and a server that offers them."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
import time
import zipfile
import zlib
from collections import Counter

import numpy as np
from PIL import Image

from hatrack.datasets.catalog import SETS


def images(count, shape, seed=0):
    """Return random images."""
    return np.random.RandomState(seed).randint(0, 256, (count, *shape)).astype(np.uint8)


def arrays(name, train=2, test=1):
    """Return a set with `train` and `test` random images of every class."""
    spec = SETS[name]
    y_train, y_test = (np.arange(spec.classes * n, dtype=np.uint8) % spec.classes for n in (train, test))
    x_train, x_test = images(len(y_train), spec.shape), images(len(y_test), spec.shape, 1)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


# One function per format: each returns {file name: contents}


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(data, train, test):
    """Return the four idx files of a set, whose names begin with `train` and `test`."""
    return {
        f"{stem}-{kind}-ubyte.gz": gzip.compress(idx(data[f"{key}_{part}"]))
        for part, stem in (("train", train), ("test", test))
        for key, kind in (("x", "images-idx3"), ("y", "labels-idx1"))
    }


def mnist(data):
    return idx_files(data, "train", "t10k")


def letters(data):
    """Return the idx files of EMNIST letters: images transposed, labels counted from 1."""
    turned = {k: np.ascontiguousarray(a.swapaxes(1, 2)) if k[0] == "x" else a + np.uint8(1) for k, a in data.items()}
    return idx_files(turned, "emnist-letters-train", "emnist-letters-test")


def emnist(data):
    inside = {f"gzip/{name}": contents for name, contents in letters(data).items()}
    return {"gzip.zip": zipped({"gzip/emnist-digits-mapping.txt": b"0 48\n", **inside})}


def cifar(data, coarse):
    def records(part, rows=slice(None)):
        x, y = data[f"x_{part}"][rows], data[f"y_{part}"][rows]
        head = [y // 5, y] if coarse else [y]
        return b"".join(bytes([h[k] for h in head]) + x[k].transpose(2, 0, 1).tobytes() for k in range(len(y)))

    if coarse:
        inside = {"train.bin": records("train"), "test.bin": records("test"), "fine_label_names.txt": b"apple\n"}
        return {"cifar-100-binary.tar.gz": tarred({f"cifar-100-binary/{n}": c for n, c in inside.items()})}
    each = len(data["y_train"]) // 5
    inside = {f"data_batch_{k + 1}.bin": records("train", slice(k * each, (k + 1) * each)) for k in range(5)}
    inside |= {"batches.meta.txt": b"airplane\n", "test_batch.bin": records("test")}
    return {"cifar-10-binary.tar.gz": tarred({f"cifar-10-batches-bin/{n}": c for n, c in inside.items()})}


def element(kind, data):
    if len(data) <= 4:
        return struct.pack("<HH4s", kind, len(data), data)
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(name, array, kind, shape=None):
    flags = element(6, struct.pack("<II", kind, 0))
    sizes = element(5, struct.pack(f"<{array.ndim}i", *(shape or array.shape)))
    inside = flags + sizes + element(1, name.encode()) + element(2, array.tobytes(order="F"))
    return struct.pack("<II", 14, len(inside)) + inside


def mat(x, y, packed):
    """Return a file of SVHN as MATLAB writes it: the labels are doubles that are stored as bytes."""
    tens = np.where(y == 0, np.uint8(10), y)[:, None]
    parts = [matrix("X", x.transpose(1, 2, 3, 0), 9), matrix("y", tens, 6)]
    if packed:
        parts = [struct.pack("<II", 15, len(z)) + z for z in map(zlib.compress, parts)]
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + b"".join(parts)


def svhn(data):
    parts = {"train": True, "test": False}
    return {f"{p}_32x32.mat": mat(data[f"x_{p}"], data[f"y_{p}"], packed) for p, packed in parts.items()}


def gtsrb(data):
    head = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\r\n"
    line = "{};32;32;5;5;27;27;{}\r\n"
    train, test, tables, truth = {}, {}, {}, head
    for k, (x, y) in enumerate(zip(data["x_train"], data["y_train"], strict=True)):
        folder, name = f"GTSRB/Final_Training/Images/{y:05}/", f"{k // 43:05}_00000.ppm"
        train[folder + name] = encode_image(x, "PPM")
        tables[f"{folder}GT-{y:05}.csv"] = tables.get(f"{folder}GT-{y:05}.csv", head) + line.format(name, y)
    for k, (x, y) in enumerate(zip(data["x_test"], data["y_test"], strict=True)):
        test[f"GTSRB/Final_Test/Images/{k:05}.ppm"] = encode_image(x, "PPM")
        truth += line.format(f"{k:05}.ppm", y)
    return {
        "GTSRB_Final_Training_Images.zip": zipped(train | {name: text.encode() for name, text in tables.items()}),
        "GTSRB_Final_Test_Images.zip": zipped(test | {"GTSRB/Final_Test/Images/GT-final_test.test.csv": head.encode()}),
        "GTSRB_Final_Test_GT.zip": zipped({"GT-final_test.csv": truth.encode()}),
    }


def notmnist(x, y):
    """Return the archive of notMNIST, which has no split: `x` and `y` are all images."""
    inside = {
        f"notMNIST_small/{'ABCDEFGHIJ'[c]}/{k:03}.png": encode_image(i, "PNG")
        for k, (i, c) in enumerate(zip(x, y, strict=True))
    }
    inside["notMNIST_small/A/RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png"] = b""
    inside["notMNIST_small/F/Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png"] = b""
    return {"notMNIST_small.tar.gz": tarred(dict(reversed(inside.items())))}


def caltech(photos):
    """Return the archive of Caltech-101 with the images {(class, file): contents}."""
    inside = {f"101_ObjectCategories/{folder}/{name}": c for (folder, name), c in photos.items()}
    inside["101_ObjectCategories/BACKGROUND_Google/tmp"] = b"#!/bin/sh\n"
    inside["101_ObjectCategories/BACKGROUND_Google/image_0001.jpg"] = next(iter(photos.values()))
    packed = {"caltech-101/101_ObjectCategories.tar.gz": tarred(inside), "caltech-101/Annotations.tar": b""}
    return {"caltech-101.zip": zipped(packed)}


def encode_image(x, kind):
    """Return an image as a file of some format."""
    out = io.BytesIO()
    Image.fromarray(x).save(out, kind)
    return out.getvalue()


def zipped(inside):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, contents in inside.items():
            file.writestr(name, contents)
    return out.getvalue()


def tarred(inside, extra=()):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
        for name, contents in inside.items():
            info = tarfile.TarInfo(name)
            info.size = len(contents)
            tar.addfile(info, io.BytesIO(contents))
        for info in extra:
            tar.addfile(info)
    return out.getvalue()


def entry(name, files, base, train, test):
    """Return the set's entry in the catalogue for these files at this address."""
    made = [f._replace(md5=hashlib.md5(files[f.name]).hexdigest(), bases=(base,), sha256="") for f in SETS[name].files]
    return dataclasses.replace(SETS[name], files=tuple(made), train=train, test=test, digest="")


class Site:
    """What a server offers.

    Attributes:
        files: contents by file name.
        trouble: how a request fails, by file name: "cut", "wrong", "missing", "slow", "stuck", "endless" or "dripping".
        requests: how often each file was requested.
        address: where the server runs.
        over: whether the server is to end.
    """

    def __init__(self):
        self.files, self.trouble, self.requests = {}, {}, Counter()
        self.address, self.over = "", False


@contextlib.contextmanager
def serve(site):
    """Run a server while the context is active."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            site.requests[name] += 1
            trouble, contents = site.trouble.get(name), site.files.get(name)
            if contents is None or trouble == "missing":
                self.send_error(404)
                return
            self.send_response(200)
            if trouble in ("endless", "dripping"):
                self.end_headers()
                with contextlib.suppress(OSError):
                    while not site.over:
                        self.wfile.write(bytes(1 << 20) if trouble == "endless" else b"x")
                        time.sleep(0.0 if trouble == "endless" else 0.01)
                return
            self.send_header("Content-Length", str(len(contents)))
            self.end_headers()
            half = len(contents) // 2
            if trouble == "wrong":
                contents = bytes(len(contents))
            elif trouble == "cut":
                contents = contents[:half]
            with contextlib.suppress(OSError):
                self.wfile.write(contents[:half])
                time.sleep({"slow": 1.0, "stuck": 60.0}.get(trouble, 0.0))
                self.wfile.write(contents[half:])

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        site.address = f"http://127.0.0.1:{server.server_port}/data/"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield site
        site.over = True
        server.shutdown()
